# SPDX-License-Identifier: Apache-2.0
"""The thread that finds out when ranks of this host stand still, says why, and ends them if that lasts.

It reads the step page and the states of processes twice a second, which ranks do not notice.  Ranks that
have stood still for longer than steps of this job take are inspected; while that lasts, after twice the time
again.  What is found is a warning; an accusation that holds at each look for a minute is an error, and at
last, if it still holds, the end of those that are to blame.  With several hosts, the first one asks the
others to look at theirs, and decides for all of them.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from resiliency.events import EventStream, EventType
from resiliency.launch._compat import hang_note
from resiliency.launch.fleet.link import WorkerStateReporter
from resiliency.launch.hangs.activity import inspected_process, is_stopped
from resiliency.launch.hangs.attempt_thread import AttemptThread
from resiliency.launch.hangs.hosts import HostBoard, JobView, SaidFinding, merged
from resiliency.launch.hangs.looking import Look, Quiet, Watched, look, stack_clusters
from resiliency.launch.health import hang_times
from resiliency.launch.health.causes import Advice, Cause, Confidence, Diagnosis
from resiliency.launch.health.hang_times import HangTimeout, HangTimes
from resiliency.launch.health.hangs import HangFinding, HangKind, RankView, explain_hang
from resiliency.launch.health.phases import RankPhase
from resiliency.launch.rendezvous.shared_lines import SharedLines
from resiliency.proc_stat import has_ended
from resiliency.progress import StepPage
from resiliency.rank.inspection import questions_file
from resiliency.runtime import awake_s, name_ranks

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.5
#: This process was not run for so long: the whole host was suspended, and what it saw before says nothing.
_FROZEN_S = 5.0
#: From this part of the time before a look on, a host listens to what the first one asks.
_LISTEN = 0.8
#: A host that the first one asks nothing for so long looks at its own ranks alone.
_ALONE_S, _ALONE_STOPPED_S = 10.0, 2.5
#: How often the first host asks where others may have looked late.
_QUESTIONS = 3
#: Looks at each of which an accusation has to hold before the launcher acts by itself.
_LOOKS = 3


def _asleep_s() -> float:
    """Seconds in which this process did not run, since an arbitrary point."""
    return time.monotonic() - awake_s()


@dataclass(kw_only=True)
class _Seen:
    """A rank of the current attempt, as far as it is known.  Times are monotonic.

    `trains`: the process that offers to be inspected; None before it does.
    """

    local_rank: int
    pid: int
    since: float
    trains: int | None = None
    count: int | None = None
    stopped_since: float | None = None
    quiet: Quiet | None = None


@dataclass(kw_only=True)
class _Accusation:
    """Ranks that each look since `since` has found to be to blame."""

    ranks: tuple[int, ...]
    since: float
    looks: int = 0
    is_reported: bool = False


@dataclass(kw_only=True)
class _Attempt:
    job: JobView
    ranks: dict[int, _Seen] = field(default_factory=dict)
    #: When the ranks are inspected next, as seconds of standing still.
    next_look_s: float = 0.0
    finding: HangFinding | None = None
    accusation: _Accusation | None = None
    #: When this host went on after it was suspended, the last time; and for how long it had been in all.
    resumed_at: float = 0.0
    asleep_s: float = field(default_factory=_asleep_s)
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
        while not over.wait(_LOOK_EVERY_S):
            self._was_suspended(attempt)
            now = time.monotonic()
            self._sample(attempt, now)
            still_s = self._longest_still_s(attempt, now)
            look_s = self._times.look_s
            if still_s < look_s:
                if attempt.finding is not None:
                    logger.warning("job goes on in attempt %d: it had stood still", attempt.job.attempt)
                self._report(attempt, SaidFinding(sentence="the attempt goes on"))
                attempt.next_look_s, attempt.finding, attempt.accusation = 0.0, None, None
            asked = attempt.board is not None and attempt.job.node > 0
            if asked and still_s >= _LISTEN * look_s:
                self._listen(attempt, over)
            is_time = still_s >= max(attempt.next_look_s, look_s + (self._alone_s(attempt) if asked else 0.0))
            if is_time and not self._is_soon_still(attempt, now):
                self._inspect(attempt, over, still_s)
            self._report_pace(attempt, still_s)

    def _was_suspended(self, attempt: _Attempt) -> bool:
        """Whether this host was since the last time; then what was seen of ranks before is forgotten."""
        before, attempt.asleep_s = attempt.asleep_s, _asleep_s()
        if attempt.asleep_s - before <= _FROZEN_S:
            return False
        attempt.resumed_at = time.monotonic()
        for rank in attempt.ranks.values():
            rank.since, rank.stopped_since, rank.quiet = attempt.resumed_at, None, None
        return True

    def _is_soon_still(self, attempt: _Attempt, now: float) -> bool:
        """True where a rank will have stood still for long enough at the next turn, as those that finished
        the same step a moment before it: until then a look finds that it moves."""
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
                logger.warning("job stands still in attempt %d: %s", attempt.job.attempt, finding.sentence)
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
                if rank.count is None:
                    self._times.learn_first(seen.step_time - rank.since)
                elif seen.step > rank.count and rank.since > attempt.resumed_at:
                    seconds = (seen.step_time - rank.since) / (seen.step - rank.count)
                    self._times.learn(seconds, seen.step)
                rank.count, rank.since = seen.step, max(seen.step_time, attempt.resumed_at)
            if rank.trains is None or has_ended(rank.trains):
                trains = inspected_process(rank.pid, str(self._directory))
                rank.trains = trains if questions_file(str(self._directory), trains).exists() else None
            if not is_stopped(rank.trains or rank.pid):
                rank.stopped_since = None
            elif rank.stopped_since is None:
                rank.stopped_since = now

    def _longest_still_s(self, attempt: _Attempt, now: float) -> float:
        """Before its first step a rank may import and compile for long, but not be stopped."""
        longest = 0.0
        for rank in attempt.ranks.values():
            if rank.stopped_since is not None:
                longest = max(longest, now - rank.stopped_since)
            if rank.count is not None or now - rank.since >= hang_times.FIRST_STEP_S:
                longest = max(longest, now - rank.since)
        return longest

    def _look(self, attempt: _Attempt, over: threading.Event) -> tuple[Look, bool] | None:
        """The ranks of this host, and whether one has gone on meanwhile; None: the attempt is over."""
        now = time.monotonic()
        watched = {
            number: Watched(
                pid=rank.pid,
                trains=rank.trains or rank.pid,
                step=rank.count,
                still_s=now - rank.since,
                stopped_s=now - rank.stopped_since if rank.stopped_since is not None else 0.0,
                quiet=rank.quiet,
            )
            for number, rank in attempt.ranks.items()
        }
        before = _steps(attempt)
        found = look(watched, str(self._directory), self._host, over.wait)
        if found is None:
            return None
        for number, quiet in found.quiet.items():
            attempt.ranks[number].quiet = quiet
        return found, self._was_suspended(attempt) or not self._stands_at(before, attempt)

    def _stands_at(self, steps: Mapping[int, int | None], attempt: _Attempt) -> bool:
        """True where no rank of this host has finished a step or ended since then."""
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
        if seen is None:
            return
        found, moved, silent = seen
        finding = None
        if not (moved or self._was_suspended(attempt)) and self._stands_at(before, attempt):
            finding = explain_hang(found.views, self._times.look_s, silent=silent)
        if finding is None:
            attempt.accusation = None
            return
        attempt.next_look_s = 2 * still_s
        named = [view for view in found.views if view.rank in finding.ranks]
        lasted_s = self._lasted_s(attempt, finding, named)
        # Ranks that end take their time, and are told when that is long.
        if not any(view.ends or view.raised for view in named) or still_s >= self._times.accuse_s:
            self._tell(attempt, finding, found, lasted_s)
        if finding.phase is RankPhase.PERSON:
            return
        if finding.kind is HangKind.ENDING and not finding.waiting:
            return  # an export after training has no steps, and holds up no other rank
        left_s = self._left_s(attempt, finding, named, lasted_s)
        if left_s > 0:
            accuse_s = self._times.accuse_s - lasted_s if finding.is_accusation else 0.0
            left_s = min(left_s, accuse_s) if accuse_s > 0 else left_s
            attempt.next_look_s = min(attempt.next_look_s, still_s + max(left_s, _LOOK_EVERY_S))
        elif finding.kind is HangKind.STOPPED and not silent and len(named) == len(found.views):
            return  # the whole job was suspended by its owner: this is how it is resumed, too
        else:
            ranks = finding.ranks if finding.is_accusation else finding.ranks[:1]
            said = SaidFinding(sentence=finding.sentence, end=ranks)
            if attempt.board is not None:
                attempt.board.tell(said)
            self._end(attempt, said, over)

    def _left_s(
        self, attempt: _Attempt, finding: HangFinding, named: Sequence[RankView], lasted_s: float
    ) -> float:
        """Time until those that are named are ended; 0: it is over."""
        act_s = self._times.act_s(
            certain=finding.is_accusation,
            stopped=finding.kind is HangKind.STOPPED,
            started=all(view.step is not None for view in named),
        )
        if self._times.is_set or attempt.accusation is None:
            lasted_s = max(max(view.still_s, view.stopped_s) for view in named)
        return max(0.0, act_s - lasted_s)

    def _lasted_s(self, attempt: _Attempt, finding: HangFinding, named: Sequence[RankView]) -> float:
        """For how long each look has found the same ranks to blame, and they have done nothing in between.

        0 before that is known from three looks, but for a stopped rank: it is seen all the time.
        """
        now = time.monotonic()
        if not finding.is_accusation:
            attempt.accusation = None
            return 0.0
        if attempt.accusation is None or attempt.accusation.ranks != finding.ranks:
            attempt.accusation = _Accusation(ranks=finding.ranks, since=now)
        attempt.accusation.looks += 1
        if finding.kind is HangKind.STOPPED:
            return min(view.stopped_s for view in named)
        if attempt.accusation.looks < _LOOKS:
            return 0.0
        return min(now - attempt.accusation.since, *(view.quiet_s for view in named))

    def _tell(self, attempt: _Attempt, finding: HangFinding, found: Look, lasted_s: float) -> None:
        accusation = attempt.accusation
        if accusation is not None and lasted_s >= self._times.accuse_s and not accusation.is_reported:
            accusation.is_reported = True
            logger.error("job stands still in attempt %d: %s", attempt.job.attempt, finding.sentence)
            self._say(attempt, SaidFinding(sentence=finding.sentence, accused=finding.ranks))
        if finding == attempt.finding:
            return
        attempt.finding = finding
        if accusation is None or not accusation.is_reported:
            logger.warning("job stands still in attempt %d: %s", attempt.job.attempt, finding.sentence)
            self._say(attempt, SaidFinding(sentence=finding.sentence))
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

    def _say(self, attempt: _Attempt, said: SaidFinding) -> None:
        if attempt.board is not None:
            attempt.board.tell(said)
        self._report(attempt, said)

    def _report_pace(self, attempt: _Attempt, still_s: float) -> None:
        """To the supervisor, which leaves a job to this thread whatever its steps take."""
        finding = attempt.finding
        self._reporter.report_pace(
            usual_step_s=self._times.usual_s or None,
            still_s=still_s if still_s >= self._times.look_s else None,
            phase=finding.phase.value if finding is not None else "",
            ranks=finding.ranks if finding is not None else (),
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
