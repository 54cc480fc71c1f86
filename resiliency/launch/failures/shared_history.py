# SPDX-License-Identifier: Apache-2.0
"""Diagnoses of a run, shared by its hosts over the rendezvous store: a bad sample may move to another host.

Written and read only at a failure.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, fields

from resiliency.launch.health.causes import OWN, Advice, Cause, Confidence, DecidedBy, Diagnosis
from resiliency.launch.rendezvous.shared_lines import SharedLines

logger = logging.getLogger(__name__)

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
        lines: what hosts say to each other; None: the job has one host.
    """

    def __init__(self, lines: SharedLines | None) -> None:
        self._lines = lines
        self._own: dict[int, Diagnosis] = {}

    def before(self, run: str, attempt: int) -> tuple[Diagnosis, ...]:
        """One diagnosis for each earlier attempt: what names a rank goes before what is an echo of it."""
        found = dict(self._own)
        for one in self._of_all(run):
            mine = found.get(one.attempt)
            if mine is None or (mine.cause not in OWN and one.cause in OWN):
                found[one.attempt] = one
        return tuple(found[number] for number in sorted(found) if number < attempt)

    def add(self, run: str, diagnosis: Diagnosis) -> None:
        """Keep it; share what other hosts may meet again, and the end of the job."""
        self._own[diagnosis.attempt] = diagnosis
        if self._lines is not None and (diagnosis.advice is Advice.STOP or diagnosis.cause in OWN):
            self._lines.add(_key(run), encode_diagnosis(diagnosis))

    @property
    def own(self) -> tuple[Diagnosis, ...]:
        """Those of this launcher, oldest first."""
        return tuple(self._own[number] for number in sorted(self._own))

    def find_stop(self, run: str) -> Diagnosis | None:
        """The diagnosis with which a host has ended the job, if one did."""
        known: Sequence[Diagnosis] = [*self._own.values(), *self._of_all(run)]
        return next((one for one in known if one.advice is Advice.STOP), None)

    def rollbacks(self, run: str) -> list[tuple[int, int, int]]:
        """The branches that diagnoses of this run have begun, in their order."""
        known = [*self._own.values(), *self._of_all(run)]
        return sorted({one.rollback for one in known if one.rollback is not None})

    def _of_all(self, run: str) -> list[Diagnosis]:
        found = []
        for line in (self._lines.read(_key(run)) if self._lines is not None else None) or ():
            try:
                found.append(decode_diagnosis(line))
            except (ValueError, TypeError, KeyError):
                logger.debug("a diagnosis of another release: %s", line)
        return found


def _key(run: str) -> str:
    return f"resiliency/diagnoses/{run}"
