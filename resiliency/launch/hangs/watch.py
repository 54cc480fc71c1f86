# SPDX-License-Identifier: Apache-2.0
"""The thread that finds out when ranks of this host stand still, says why, and ends them if that lasts.

It reads the step page and the states of processes twice a second, which ranks do not notice.  Ranks that
have stood still for longer than steps of this job take are inspected; while that lasts, after twice the time
again.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from resiliency.events import EventStream, EventType
from resiliency.launch._compat import hang_note
from resiliency.launch.fleet.link import WorkerStateReporter
from resiliency.launch.hangs.activity import has_ended, is_stopped
from resiliency.launch.hangs.looking import Look, Watched, look
from resiliency.launch.health.causes import Advice, Cause, Confidence, Diagnosis
from resiliency.launch.health.hang_times import HangTimeout, HangTimes
from resiliency.launch.health.hangs import HangFinding, HangKind, explain_hang
from resiliency.launch.health.phases import main_thread
from resiliency.progress import StepPage
from resiliency.runtime import name_ranks

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.5
#: This thread was not run for so long: the whole host was suspended, and what it saw before says nothing.
_FROZEN_S = 5.0
_STACK_LINES = 30


@dataclass(kw_only=True)
class _Seen:
    """What is known of a rank of the current attempt.  Times are monotonic."""

    local_rank: int
    pid: int
    since: float
    count: int | None = None
    stopped_since: float | None = None


@dataclass(kw_only=True)
class _Attempt:
    number: int
    ranks: dict[int, _Seen] = field(default_factory=dict)
    #: When the ranks are inspected next, as seconds of standing still.
    next_look_s: float = 0.0
    finding: HangFinding | None = None


class HangWatch:
    """Watches the workers of one host from `begin` to `end`; `close` ends the thread.

    Args:
        page: where ranks write their steps.
        directory: where they offer to be inspected, and hang notes are left for the launcher.
        reporter: of the supervisor, which may act before this thread does.
    """

    def __init__(
        self,
        page: StepPage,
        *,
        directory: Path,
        host: str,
        events: EventStream,
        reporter: WorkerStateReporter,
        timeout: HangTimeout,
    ) -> None:
        self._page = page
        self._directory = directory
        self._host = host
        self._events = events
        self._reporter = reporter
        self._times = HangTimes(timeout)
        self._attempt: _Attempt | None = None
        #: Set when the attempt ends, or this.
        self._over = threading.Event()
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="hang-watch", daemon=True)
        self._thread.start()

    def begin(self, attempt: int, ranks: Mapping[int, tuple[int, int]]) -> None:
        """The workers of an attempt run; by local rank: rank and process."""
        now = time.monotonic()
        with self._changed:
            self._over.set()
            self._over = threading.Event()
            self._attempt = _Attempt(
                number=attempt,
                ranks={
                    rank: _Seen(local_rank=local_rank, pid=pid, since=now)
                    for local_rank, (rank, pid) in ranks.items()
                },
            )
            self._changed.notify_all()

    def end(self) -> None:
        """The workers are about to be stopped, or have ended."""
        with self._changed:
            self._attempt = None
            self._over.set()

    def close(self) -> None:
        with self._changed:
            self._attempt = None
            self._closed = True
            self._over.set()
            self._changed.notify_all()
        self._thread.join(_FROZEN_S)

    # ------------------------------------------------------------------------------------------ in the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._attempt is None and not self._closed:
                    self._changed.wait()
                attempt, over = self._attempt, self._over
            if attempt is None:
                return
            try:
                self._watch(attempt, over)
            except Exception:  # the border of this thread: training goes on without being watched
                logger.exception("hangs are not watched in attempt %d any more", attempt.number)
                over.wait()

    def _watch(self, attempt: _Attempt, over: threading.Event) -> None:
        last = time.monotonic()
        while not over.wait(_LOOK_EVERY_S):
            now = time.monotonic()
            if now > last + _FROZEN_S:
                for rank in attempt.ranks.values():
                    rank.since, rank.stopped_since = now, None
            last = now
            self._sample(attempt, now)
            still_s = self._longest_still_s(attempt, now)
            look_s = self._times.look_s
            if still_s < look_s:
                if attempt.finding is not None:
                    logger.warning("attempt %d goes on: it had stood still", attempt.number)
                attempt.next_look_s, attempt.finding = 0.0, None
            elif still_s >= max(attempt.next_look_s, look_s):
                attempt.next_look_s = 2 * still_s
                self._inspect(attempt, over, now)
                last = time.monotonic()

    def _sample(self, attempt: _Attempt, now: float) -> None:
        gone = [number for number, rank in attempt.ranks.items() if has_ended(rank.pid)]
        for number in gone:
            del attempt.ranks[number]
        for rank in attempt.ranks.values():
            if gone:  # one that ends is progress, too: the others may have something left to do
                rank.since = now
            seen = self._page.read(rank.local_rank)
            if seen.step is not None and seen.step_time is not None and seen.step != rank.count:
                if rank.count is not None and seen.step > rank.count:
                    self._times.learn((seen.step_time - rank.since) / (seen.step - rank.count))
                rank.count, rank.since = seen.step, seen.step_time
            if not is_stopped(rank.pid):
                rank.stopped_since = None
            elif rank.stopped_since is None:
                rank.stopped_since = now

    def _longest_still_s(self, attempt: _Attempt, now: float) -> float:
        """Before its first step a rank may import and compile for long, but not be stopped."""
        uncertain_s = self._times.act_s(certain=False)
        longest = 0.0
        for rank in attempt.ranks.values():
            if rank.stopped_since is not None:
                longest = max(longest, now - rank.stopped_since)
            if rank.count is not None or now - rank.since >= uncertain_s:
                longest = max(longest, now - rank.since)
        return longest

    def _inspect(self, attempt: _Attempt, over: threading.Event, now: float) -> None:
        watched = {
            number: Watched(
                pid=rank.pid,
                step=rank.count,
                still_s=now - rank.since,
                stopped_s=now - rank.stopped_since if rank.stopped_since is not None else 0.0,
            )
            for number, rank in attempt.ranks.items()
        }
        found = look(watched, str(self._directory), self._host, over.wait)
        if found is None:
            return
        before = {number: rank.count for number, rank in attempt.ranks.items()}
        self._sample(attempt, time.monotonic())
        if before != {number: rank.count for number, rank in attempt.ranks.items()}:
            return  # it moves
        finding = explain_hang(found.views, self._times.look_s)
        if finding is None:
            return
        if finding != attempt.finding:
            attempt.finding = finding
            self._tell(attempt, finding, found)
        act_s = self._times.act_s(certain=finding.is_accusation)
        still_s = max(max(view.still_s, view.stopped_s) for view in found.views if view.rank in finding.ranks)
        if still_s >= act_s:
            self._act(attempt, finding, over)
        else:
            attempt.next_look_s = min(attempt.next_look_s, max(act_s, still_s + _LOOK_EVERY_S))

    def _tell(self, attempt: _Attempt, finding: HangFinding, found: Look) -> None:
        log = logger.error if finding.is_accusation else logger.warning
        log("attempt %d stands still: %s", attempt.number, finding.sentence)
        for ranks, text in _clusters(found):
            logger.warning("stacks of %s:\n%s", name_ranks(ranks), text)
        self._events.emit(
            EventType.HANG_DETECTED,
            attempt=attempt.number,
            cause=finding.sentence,
            kind=finding.kind.value,
            ranks=list(finding.ranks),
            hosts=list(finding.hosts),
            phase=finding.phase.name.lower(),
            frame=finding.frame,
            waiting=list(finding.waiting),
        )
        if finding.is_accusation:
            self._reporter.report_diagnosis(
                Diagnosis(
                    attempt=attempt.number,
                    cause=Cause.HANG,
                    advice=Advice.RESTART,
                    confidence=Confidence.HIGH,
                    sentence=f"{finding.kind.value}: {finding.sentence}",
                    ranks=finding.ranks,
                    hosts=finding.hosts,
                )
            )

    def _act(self, attempt: _Attempt, finding: HangFinding, over: threading.Event) -> None:
        named = [attempt.ranks[rank] for rank in finding.ranks if rank in attempt.ranks]
        if finding.kind is HangKind.STOPPED and len(named) == len(attempt.ranks) > 1:
            return  # the whole job was suspended by its owner: this is how it is resumed, too
        if over.is_set():
            return
        for rank in named[:1] if not finding.is_accusation else named:
            hang_note(self._directory, rank.pid).write_text(finding.sentence)
            with suppress(OSError):
                os.kill(rank.pid, signal.SIGKILL)


def _clusters(found: Look) -> list[tuple[list[int], str]]:
    """Stacks, those that are equal once, the rarest first: a rank that differs is what a person looks for."""
    clusters: dict[tuple[str, ...], list[int]] = {}
    for rank, text in found.stacks.items():
        # How a rank was started, by its template or by itself, makes no difference.
        calls = (call for call in main_thread(text) if "resiliency/template/" not in call.file)
        key = tuple(f"{call.file} {call.function}" for call in calls) or (text,)
        clusters.setdefault(key, []).append(rank)
    ordered = sorted(clusters.values(), key=len)
    return [(ranks, _shortened(found.stacks[ranks[0]])) for ranks in ordered]


def _shortened(text: str) -> str:
    """The main thread's part."""
    head, mark, last = text.rpartition("(most recent call first)")
    lines = (head.rpartition("\n")[2] + mark + last).splitlines() if mark else text.splitlines()
    return "\n".join(lines[:_STACK_LINES])
