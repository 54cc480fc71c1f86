# SPDX-License-Identifier: Apache-2.0
"""Diagnoses of a run, shared by its hosts over the rendezvous store: a bad sample may move to another host.

Written and read only at a failure.  One key holds the lines of a run, so that a launcher reads those of all
hosts at once.  A store that is away or hangs costs `DEADLINE_S` for each look, and nothing else.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from typing import Any, TypeVar

from resiliency.launch.health.causes import Advice, Cause, Confidence, DecidedBy, Diagnosis
from resiliency.launch.health.history import FROM_OUTSIDE

logger = logging.getLogger(__name__)

T = TypeVar("T")

DEADLINE_S = 2.0
_NAMES = {one.name for one in fields(Diagnosis)}


def encode_diagnosis(diagnosis: Diagnosis) -> str:
    return json.dumps(asdict(diagnosis), separators=(",", ":"))


def decode_diagnosis(line: str) -> Diagnosis:
    """Raises:
    ValueError, TypeError: the line is no diagnosis of this release.
    """
    values = {name: value for name, value in json.loads(line).items() if name in _NAMES}
    values |= {"cause": Cause(values["cause"]), "advice": Advice(values["advice"])}
    values |= {
        "confidence": Confidence(values["confidence"]),
        "decided_by": DecidedBy(values["decided_by"]),
        "ranks": tuple(values["ranks"]),
        "hosts": tuple(values["hosts"]),
        "rollback": tuple(values["rollback"]) if values.get("rollback") else None,
    }
    return Diagnosis(**values)


class SharedHistory:
    """The diagnoses of one run.  This launcher's own are kept here, whatever the store does.

    Args:
        call: runs a function with the rendezvous store; None where the job has one host.
    """

    def __init__(self, call: Callable[[Callable[[Any], Any]], Any] | None) -> None:
        self._call = call
        self._own: dict[int, Diagnosis] = {}

    def before(self, run: str, attempt: int) -> tuple[Diagnosis, ...]:
        """One diagnosis for each earlier attempt: what names a rank goes before what is an echo of it."""
        found = dict(self._own)
        for one in self._lines(run):
            mine = found.get(one.attempt)
            if mine is None or (mine.cause in FROM_OUTSIDE and one.cause not in FROM_OUTSIDE):
                found[one.attempt] = one
        return tuple(found[number] for number in sorted(found) if number < attempt)

    def add(self, run: str, diagnosis: Diagnosis) -> None:
        """Keep it; share what other hosts may meet again, and the end of the job."""
        self._own[diagnosis.attempt] = diagnosis
        if self._call is not None and (
            diagnosis.advice is Advice.STOP or diagnosis.cause not in FROM_OUTSIDE
        ):
            line = encode_diagnosis(diagnosis) + "\n"
            self._try(lambda store: store.append(_key(run), line))

    def find_stop(self, run: str) -> Diagnosis | None:
        """The diagnosis with which a host has ended the job, if one did."""
        known: Sequence[Diagnosis] = [*self._own.values(), *self._lines(run)]
        return next((one for one in known if one.advice is Advice.STOP), None)

    def rollbacks(self, run: str) -> list[tuple[int, int, int]]:
        """The branches that diagnoses of this run have begun, in their order."""
        known = [*self._own.values(), *self._lines(run)]
        return sorted({one.rollback for one in known if one.rollback is not None})

    def _lines(self, run: str) -> list[Diagnosis]:
        key = _key(run)
        value = self._try(lambda store: store.get(key) if store.check([key]) else b"")
        found = []
        for line in (value or b"").decode(errors="replace").splitlines():
            try:
                found.append(decode_diagnosis(line))
            except (ValueError, TypeError, KeyError):
                logger.debug("a diagnosis of another release: %s", line)
        return found

    def _try(self, work: Callable[[Any], T]) -> T | None:
        call = self._call
        return None if call is None else within(DEADLINE_S, lambda: call(work))


def within(seconds: float, work: Callable[[], T]) -> T | None:
    """What `work` returns; None when it raises or takes longer, and then the caller does not wait for it."""
    answers: list[T] = []

    def run() -> None:
        try:
            answers.append(work())
        except (RuntimeError, OSError) as error:  # torch's store raises RuntimeError
            logger.debug("the rendezvous store did not answer: %s", error)

    thread = threading.Thread(target=run, name="resiliency-shared-history", daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


def _key(run: str) -> str:
    return f"resiliency/diagnoses/{run}"
