# SPDX-License-Identifier: Apache-2.0
"""The thread that finds out when ranks of this host stand still, says why, and ends them if that lasts.

It reads the step page and the states of processes twice a second, which ranks do not notice.  Ranks that
have stood still for longer than steps of this job take are inspected; while that lasts, after twice the time
again.  With several hosts, the first one asks the others to look at theirs, and decides for all of them.
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
from resiliency.launch.hangs.activity import is_stopped
from resiliency.launch.hangs.attempt_thread import AttemptThread
from resiliency.launch.hangs.hosts import HostBoard, JobView, SaidFinding, merged
from resiliency.launch.hangs.looking import Look, Watched, look, stack_clusters
from resiliency.launch.health.causes import Advice, Cause, Confidence, Diagnosis
from resiliency.launch.health.hang_times import FIRST_STEP_S, HangTimeout, HangTimes
from resiliency.launch.health.hangs import HangFinding, HangKind, explain_hang
from resiliency.launch.rendezvous.shared_lines import SharedLines
from resiliency.proc_stat import has_ended
from resiliency.progress import StepPage
from resiliency.runtime import name_ranks

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.5
#: This thread was not run for so long: the whole host was suspended, and what it saw before says nothing.
_FROZEN_S = 5.0
#: From this part of the time before a look on, a host listens to what the first one asks.
_LISTEN = 0.8
#: A host that the first one asks nothing for so long looks at its own ranks alone.
_ALONE_S, _ALONE_STOPPED_S = 10.0, 2.5
#: How often the first host asks where others may have looked late.
_QUESTIONS = 3


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
    job: JobView
    ranks: dict[int, _Seen] = field(default_factory=dict)
    #: When the ranks are inspected next, as seconds of standing still.
    next_look_s: float = 0.0
    finding: HangFinding | None = None
    #: Last finished steps when this host answered the first one.
    answered: dict[int, int | None] = field(default_factory=dict)
    #: Ranks of this host that the supervisor was told to be to blame.
    accused: tuple[int, ...] = ()
    #: With several hosts.
    board: HostBoard | None = None


class HangWatch:
    """Watches the workers of one host from `begin` to `end`; `close` ends the thread.

    Args:
        page: where ranks write their steps.
        directory: where they offer to be inspected, and hang notes are left for the launcher.
        lines: what hosts say to each other; None: the job has one host.
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
        lines: SharedLines | None = None,
    ) -> None:
        self._page = page
        self._directory = directory
        self._host = host
        self._events = events
        self._lines = lines
        self._reporter = reporter
        self._times = HangTimes(timeout)
        self._thread = AttemptThread(self._watch, name="hang-watch")
        self.end, self.close = self._thread.end, self._thread.close

    def begin(self, job: JobView, ranks: Mapping[int, tuple[int, int]]) -> None:
        """The workers of an attempt run; by local rank: rank and process."""
        now = time.monotonic()
        self._thread.begin(
            _Attempt(
                job=job,
                ranks={
                    rank: _Seen(local_rank=local_rank, pid=pid, since=now)
                    for local_rank, (rank, pid) in ranks.items()
                },
                board=HostBoard(self._lines, job) if self._lines is not None and job.hosts > 1 else None,
            )
        )

    # ------------------------------------------------------------------------------------------ in the thread

    def _watch(self, attempt: _Attempt, over: threading.Event) -> None:
        last = time.monotonic()
        while not over.wait(_LOOK_EVERY_S):
            now = time.monotonic()
            if now > last + _FROZEN_S:
                for rank in attempt.ranks.values():
                    rank.since, rank.stopped_since = now, None
            self._sample(attempt, now)
            still_s = self._longest_still_s(attempt, now)
            look_s = self._times.look_s
            if still_s < look_s:
                if attempt.finding is not None:
                    logger.warning("attempt %d goes on: it had stood still", attempt.job.attempt)
                attempt.next_look_s, attempt.finding = 0.0, None
            asked = attempt.board is not None and attempt.job.node > 0
            if asked and still_s >= _LISTEN * look_s:
                self._listen(attempt, over)
            is_time = still_s >= max(attempt.next_look_s, look_s + (self._alone_s(attempt) if asked else 0.0))
            if is_time and not self._is_soon_still(attempt, now):
                self._inspect(attempt, over, still_s)
            last = time.monotonic()

    def _is_soon_still(self, attempt: _Attempt, now: float) -> bool:
        """Whether a rank will have stood still for long enough at the next turn, as those that finished the
        same step a moment before it: until then a look finds that it moves."""
        return any(
            rank.count is not None and 0 < self._times.look_s - (now - rank.since) < _LOOK_EVERY_S
            for rank in attempt.ranks.values()
        )

    def _alone_s(self, attempt: _Attempt) -> float:
        """A stopped rank is known without the others, and before the first step no host asks."""
        stopped = any(rank.stopped_since is not None for rank in attempt.ranks.values())
        return _ALONE_STOPPED_S if stopped else _ALONE_S

    def _listen(self, attempt: _Attempt, over: threading.Event) -> None:
        """Answer the first host, and do what it says."""
        assert attempt.board is not None
        late, findings = attempt.board.read()
        for finding in findings:
            self._sample(attempt, time.monotonic())
            # One that has ended since then may be the one that is to blame: others have yet to hear why.
            if not _steps(attempt).items() <= attempt.answered.items():
                break
            if not finding.end:
                logger.warning("attempt %d stands still: %s", attempt.job.attempt, finding.sentence)
                self._report(attempt, finding)
            self._end(attempt, finding, over)
        if late is None:
            return
        attempt.answered = _steps(attempt)
        if (seen := self._look(attempt, over)) is not None:
            found, moved = seen
            attempt.board.answer(found, late=late, moved=moved)
            attempt.next_look_s = 2 * self._longest_still_s(attempt, time.monotonic()) + _ALONE_S

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
        first_s = min(FIRST_STEP_S, self._times.act_s(certain=False))
        longest = 0.0
        for rank in attempt.ranks.values():
            if rank.stopped_since is not None:
                longest = max(longest, now - rank.stopped_since)
            if rank.count is not None or now - rank.since >= first_s:
                longest = max(longest, now - rank.since)
        return longest

    def _look(self, attempt: _Attempt, over: threading.Event) -> tuple[Look, bool] | None:
        """The ranks of this host, and whether one has gone on meanwhile; None: the attempt is over."""
        now = time.monotonic()
        watched = {
            number: Watched(
                pid=rank.pid,
                step=rank.count,
                still_s=now - rank.since,
                stopped_s=now - rank.stopped_since if rank.stopped_since is not None else 0.0,
            )
            for number, rank in attempt.ranks.items()
        }
        before = _steps(attempt)
        found = look(watched, str(self._directory), self._host, over.wait)
        return None if found is None else (found, not self._stands_at(before, attempt))

    def _stands_at(self, steps: Mapping[int, int | None], attempt: _Attempt) -> bool:
        """Whether no rank of this host has finished a step or ended since then."""
        self._sample(attempt, time.monotonic())
        return steps == _steps(attempt)

    def _look_everywhere(
        self, attempt: _Attempt, over: threading.Event
    ) -> tuple[Look, bool, list[int]] | None:
        """As `_look`, with the ranks of all hosts that answer, and the numbers of the others."""
        board, job = attempt.board, attempt.job
        if board is None or job.node > 0:
            seen = self._look(attempt, over)
            others = [node for node in range(job.hosts) if node != job.node]
            return (*seen, others) if seen is not None else None
        for question in range(_QUESTIONS):
            # Hosts that have just answered look for the next question first, and so know when it came.
            if question and over.wait(2 * _LOOK_EVERY_S):
                break
            board.ask()
            mine = self._look(attempt, over)
            answers = board.gather(over.wait) if mine is not None else None
            if mine is None or answers is None:
                break
            timely = [answer for answer in answers if not answer.late]
            if len(timely) == len(answers) or question == _QUESTIONS - 1:
                moved = mine[1] or any(answer.moved for answer in timely)
                silent = sorted(set(range(1, job.hosts)) - {answer.node for answer in timely})
                return merged([mine[0], *(answer.look for answer in timely)]), moved, silent
        return None

    def _inspect(self, attempt: _Attempt, over: threading.Event, still_s: float) -> None:
        attempt.next_look_s = 1.2 * still_s + _LOOK_EVERY_S  # it may just have begun, or go on
        before = _steps(attempt)
        seen = self._look_everywhere(attempt, over)
        if seen is None or seen[1] or not self._stands_at(before, attempt):
            return
        found, _, silent = seen
        finding = explain_hang(found.views, self._times.look_s, silent=silent)
        if finding is None:
            return
        attempt.next_look_s = 2 * still_s
        if finding != attempt.finding:
            attempt.finding = finding
            self._tell(attempt, finding, found)
        act_s = self._times.act_s(certain=finding.is_accusation)
        still_s = max(max(view.still_s, view.stopped_s) for view in found.views if view.rank in finding.ranks)
        if still_s < act_s:
            attempt.next_look_s = min(attempt.next_look_s, max(act_s, still_s + _LOOK_EVERY_S))
        elif finding.kind is HangKind.STOPPED and not silent and len(finding.ranks) == len(found.views) > 1:
            return  # the whole job was suspended by its owner: this is how it is resumed, too
        else:
            named = finding.ranks if finding.is_accusation else finding.ranks[:1]
            said = SaidFinding(sentence=finding.sentence, end=named)
            if attempt.board is not None:
                attempt.board.tell(said)
            self._end(attempt, said, over)

    def _tell(self, attempt: _Attempt, finding: HangFinding, found: Look) -> None:
        log = logger.error if finding.is_accusation else logger.warning
        log("attempt %d stands still: %s", attempt.job.attempt, finding.sentence)
        said = SaidFinding(sentence=finding.sentence, accused=finding.ranks if finding.is_accusation else ())
        if attempt.board is not None:
            attempt.board.tell(said)
        self._report(attempt, said)
        for ranks, text in stack_clusters(found.stacks):
            logger.warning("stacks of %s:\n%s", name_ranks(ranks), text)
        self._events.emit(
            EventType.HANG_DETECTED,
            attempt=attempt.job.attempt,
            cause=finding.sentence,
            kind=finding.kind.value,
            ranks=list(finding.ranks),
            hosts=list(finding.hosts),
            phase=finding.phase.name.lower(),
            frame=finding.frame,
            waiting=list(finding.waiting),
            silent=list(finding.silent),
        )

    def _report(self, attempt: _Attempt, finding: SaidFinding) -> None:
        """To the supervisor, each host of its own ranks; of none any more where it was of some before."""
        accused = tuple(rank for rank in finding.accused if rank in attempt.ranks)
        before, attempt.accused = attempt.accused, accused
        if accused or before:
            self._reporter.report_diagnosis(
                Diagnosis(
                    attempt=attempt.job.attempt,
                    cause=Cause.HANG,
                    advice=Advice.RESTART,
                    confidence=Confidence.HIGH,
                    sentence=finding.sentence,
                    ranks=accused,
                    hosts=(self._host,),
                )
            )

    def _end(self, attempt: _Attempt, finding: SaidFinding, over: threading.Event) -> None:
        """End those of its ranks that are on this host."""
        for number in finding.end:
            rank = attempt.ranks.get(number)
            if rank is not None and not over.is_set():
                hang_note(self._directory, rank.pid).write_text(finding.sentence)
                with suppress(OSError):
                    os.kill(rank.pid, signal.SIGKILL)


def _steps(attempt: _Attempt) -> dict[int, int | None]:
    return {number: rank.count for number, rank in attempt.ranks.items()}
