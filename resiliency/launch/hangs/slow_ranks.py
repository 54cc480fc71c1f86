# SPDX-License-Identifier: Apache-2.0
"""The thread that finds out which ranks make the others wait in each step, and says so.

It looks at the ranks of this host all the time, ten times a second, and compares them after each window.
With several hosts, each leaves its last window in the rendezvous store, and the first one compares all.
It only tells: a slow rank is not ended.
"""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from resiliency.events import EventStream, EventType
from resiliency.launch.hangs.activity import inspected_process
from resiliency.launch.hangs.attempt_thread import AttemptThread
from resiliency.launch.hangs.hosts import JobView
from resiliency.launch.hangs.moments import MomentsOfRank, ask_moments
from resiliency.launch.health.stragglers import SPANS, OwnTime, StragglerFinding, find_stragglers
from resiliency.launch.rendezvous.shared_lines import SharedLines
from resiliency.progress import StepPage

logger = logging.getLogger(__name__)

LOOKS_PER_S = 10.0
#: A window is at least so long, and has so many steps.
WINDOW_S, WINDOW_STEPS = 3.0, 3
#: Longer windows for jobs of many hosts, so that the store sees no more than so many of them at a time.
_HOSTS_PER_WINDOW = 128


@dataclass(kw_only=True)
class _Comparison:
    """The ranks of an attempt.  `page`: their slots in the step page."""

    job: JobView
    pids: Mapping[int, int]
    page: Mapping[int, int]
    history: dict[int, list[OwnTime]] = field(default_factory=lambda: defaultdict(list))
    #: Number of the last window of each host.
    windows: dict[int, int] = field(default_factory=dict)
    finding: StragglerFinding | None = None


class SlowRanks:
    """Watches the workers of one host from `begin` to `end`; `close` ends the thread.

    Args:
        page: where ranks write their steps.
        directory: where they offer to be inspected.
        lines: what hosts say to each other; None: the job has one host.
    """

    def __init__(
        self,
        page: StepPage,
        *,
        directory: Path,
        host: str,
        events: EventStream,
        lines: SharedLines | None = None,
    ) -> None:
        self._page = page
        self._directory = str(directory)
        self._host = host
        self._events = events
        self._lines = lines
        self._thread = AttemptThread(self._watch, name="slow-ranks")
        self.end, self.close = self._thread.end, self._thread.close

    def begin(self, job: JobView, ranks: Mapping[int, tuple[int, int]]) -> None:
        """The workers of an attempt run; by local rank: rank and process."""
        if job.hosts * len(ranks) > 1:
            pids = dict(ranks.values())
            page = {rank: local_rank for local_rank, (rank, _) in ranks.items()}
            self._thread.begin(_Comparison(job=job, pids=pids, page=page))

    # ------------------------------------------------------------------------------------------ in the thread

    def _watch(self, compared: _Comparison, over: threading.Event) -> None:
        draw = random.Random(compared.job.node)  # noqa: S311 (moments that no step keeps time with)
        looks: dict[int, MomentsOfRank] = {}
        try:
            window_s = WINDOW_S * max(1.0, compared.job.hosts / _HOSTS_PER_WINDOW)
            began = time.monotonic()
            while not over.wait(draw.uniform(0.5, 1.5) / LOOKS_PER_S):
                for moments in looks.values():
                    moments.look()
                if time.monotonic() - began < window_s:
                    continue
                steps = {rank: self._page.read(slot).step for rank, slot in compared.page.items()}
                if not looks:
                    looks = self._open(compared, steps)
                elif not all(_has_moved(looks[rank].step, steps[rank]) for rank in looks):
                    continue
                else:
                    self._compare(compared, self._own_times(looks, steps))
                began = time.monotonic()
                for rank, moments in looks.items():
                    moments.restart(steps[rank])
        finally:
            for moments in looks.values():
                moments.close()

    def _open(self, compared: _Comparison, steps: Mapping[int, int | None]) -> dict[int, MomentsOfRank]:
        """Ranks that have finished a step and can be asked; none before all have."""
        if None in steps.values():
            return {}
        looks = {}
        for rank, pid in compared.pids.items():
            with suppress(OSError):  # it offers nothing
                looks[rank] = MomentsOfRank(inspected_process(pid, self._directory), self._directory)
        ask_moments(looks, self._directory)
        return looks

    def _own_times(
        self, looks: Mapping[int, MomentsOfRank], steps: Mapping[int, int | None]
    ) -> list[OwnTime]:
        found = []
        for rank, answer in ask_moments(looks, self._directory).items():
            own = looks[rank].own_time(answer, rank=rank, host=self._host, step=steps[rank] or 0)
            found += [own] if own is not None else []
        # One that evaluates lets all others wait: nothing in such a window is usual.
        return found if len(found) == len(looks) else []

    def _compare(self, compared: _Comparison, mine: list[OwnTime]) -> None:
        job = compared.job
        _add(compared, job.node, compared.windows.get(job.node, 0) + 1, mine)
        if self._lines is not None and job.hosts > 1:
            # Without the attempt: the store keeps what is in it, for weeks of attempts.
            key = f"resiliency/own-times/{job.run}"
            if job.node > 0:
                window = compared.windows[job.node]
                said = {"attempt": job.attempt, "window": window, "ranks": [asdict(one) for one in mine]}
                self._lines.put(f"{key}/{job.node}", json.dumps(said, separators=(",", ":")))
                return
            keys = [f"{key}/{node}" for node in range(1, job.hosts)]
            for node, text in enumerate(self._lines.read_each(keys), 1):
                with suppress(ValueError, TypeError, KeyError):  # nothing yet, or of another release
                    said = json.loads(text)
                    if said["attempt"] != job.attempt:
                        continue
                    ranks = [OwnTime(**one | {"groups": tuple(one["groups"])}) for one in said["ranks"]]
                    _add(compared, node, int(said["window"]), ranks)
        self._tell(compared, find_stragglers(compared.history))

    def _tell(self, compared: _Comparison, finding: StragglerFinding | None) -> None:
        before, compared.finding = compared.finding, finding
        if finding == before:
            return
        if finding is None:
            logger.info("attempt %d: no rank is slow any more", compared.job.attempt)
            return
        logger.warning("attempt %d: %s", compared.job.attempt, finding.sentence)
        self._events.emit(
            EventType.STRAGGLER_SUSPECTED,
            attempt=compared.job.attempt,
            cause=finding.sentence,
            ranks=list(finding.ranks),
            hosts=list(finding.hosts),
            delay=finding.delay.name.lower(),
            own_s=finding.own_s,
            usual_s=finding.usual_s,
        )


def _add(compared: _Comparison, node: int, window: int, ranks: list[OwnTime]) -> None:
    if compared.windows.get(node) != window:
        compared.windows[node] = window
        for one in ranks:
            compared.history[one.rank] = [*compared.history[one.rank], one][-max(SPANS) :]


def _has_moved(begin: int | None, now: int | None) -> bool:
    return begin is not None and now is not None and now - begin >= WINDOW_STEPS
