# SPDX-License-Identifier: Apache-2.0
"""One look at the ranks of this host: what each shows of itself, and whether it did anything meanwhile."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace

from resiliency.launch.hangs.activity import Activity, activity, is_stopped, is_traced
from resiliency.launch.hangs.descriptors import TERMINAL
from resiliency.launch.hangs.waits import RankThreads, ThreadWait, WaitKind
from resiliency.launch.health.evidence import Frame
from resiliency.launch.health.hangs import RankView
from resiliency.launch.health.phases import RankPhase, joins_threads, main_thread, phase_of, telling_frame
from resiliency.launch.stacks import dump_stacks, has_left_python
from resiliency.rank.inspection import (
    ASK,
    COUNT,
    GroupState,
    RankAnswer,
    answer_file,
    questions_file,
    read_answer,
)
from resiliency.runtime import awake_s

#: For this long a rank has to have done nothing to count as idle.
WINDOW_S = 1.0
#: Ranks that can answer do so within milliseconds, also on a busy host within this.
ANSWER_S = 2.0
_POLL_S = 0.02
_STACK_LINES = 30
#: Two threads of a launcher ask, and a rank has one answer.
_asking = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Quiet:
    """A rank that has done nothing since `since`, as the looks up to the one at `at` showed: by `awake_s`."""

    since: float
    at: float
    activity: Activity


@dataclass(frozen=True, kw_only=True)
class Watched:
    """A rank that stands still, as far as the step page and the kernel have told so far.

    `pid`: the process that the launcher started.  `trains`: the one that offers to be inspected.  `quiet`: of
    the look before.
    """

    pid: int
    trains: int
    step: int | None
    still_s: float
    stopped_s: float
    quiet: Quiet | None = None


@dataclass(frozen=True, kw_only=True)
class Look:
    """Views, and the stacks that they come from, by rank; `quiet`: for the next look at this host."""

    views: tuple[RankView, ...]
    stacks: Mapping[int, str]
    quiet: Mapping[int, Quiet] = field(default_factory=dict, compare=False)


def look(
    ranks: Mapping[int, Watched], directory: str, host: str, wait: Callable[[float], bool]
) -> Look | None:
    """Inspect `ranks` for about two seconds.  None: `wait`, which waits so many seconds, said to stop.

    What a rank has begun is asked before and after: one that has gone on meanwhile is not idle.
    """
    # A signal to a process in a debugger would end there.
    trains = {
        rank: seen.trains
        for rank, seen in ranks.items()
        if not (is_stopped(seen.trains) or is_traced(seen.trains))
    }
    asked = awake_s()
    found = {rank: activity(ranks[rank].pid, trains[rank]) for rank in trains}
    answers_before = ask(trains, directory, question=COUNT)
    # Counting may take a rank longer than one that is idle works in a second.
    began = awake_s()
    before = {rank: activity(ranks[rank].pid, trains[rank]) for rank in trains}
    if wait(WINDOW_S):
        return None
    after = {rank: activity(ranks[rank].pid, trains[rank]) for rank in trains}
    seconds = awake_s() - began
    stacks = dump_stacks(trains, directory, ANSWER_S)
    answers = ask(trains, directory, answers_before.keys(), question=COUNT)
    views, quiet = [], {}
    for rank, seen in ranks.items():
        view = RankView(rank=rank, host=host, step=seen.step, still_s=seen.still_s, stopped_s=seen.stopped_s)
        if rank in trains:
            idle = before[rank].is_idle_until(after[rank], seconds)
            if _begun(answers_before.get(rank)) != _begun(answers.get(rank)):
                idle = False
            view = _shown(replace(view, idle=idle), seen.trains, directory, stacks[rank], answers.get(rank))
            quiet[rank] = _quiet(seen, view, found[rank], asked)
            view = replace(view, quiet_s=quiet[rank].at - quiet[rank].since)
        elif is_traced(seen.trains):
            view = replace(view, phase=RankPhase.PERSON)
        if seen.step is None and not (view.phase.is_collective or view.phase is RankPhase.PERSON):
            view = replace(view, phase=RankPhase.STARTING)
        views.append(view)
    return Look(views=tuple(views), stacks=stacks, quiet=quiet)


def _shown(view: RankView, pid: int, directory: str, stacks: str, answer: RankAnswer | None) -> RankView:
    """With what the rank shows of itself, and the kernel of its main thread."""
    frames = main_thread(stacks)
    phase = phase_of(frames)
    view = replace(
        view,
        phase=phase,
        frame=telling_frame(frames),
        answers=answer is not None or not questions_file(directory, pid).exists(),
        ends=(answer is not None and answer.ends) or has_left_python(pid, directory, stacks),
        raised=answer.raised if answer is not None else "",
        groups=_begun(answer),
    )
    found = _wait_of(pid, answer, frames)
    if phase.is_collective:
        return replace(view, waits=True)
    if found is None:  # the kernel of a hardened host shows input and output, and no system call
        return replace(view, idle=None)
    if found.outside.startswith(TERMINAL):
        view = replace(view, phase=RankPhase.PERSON)
    idle = view.idle and found.kind is not WaitKind.NONE
    return replace(view, waits=found.kind is WaitKind.PEERS, outside=found.outside, idle=idle)


def _quiet(seen: Watched, view: RankView, found: Activity, asked: float) -> Quiet:
    """Since when it has done nothing, but for looks, which wake it."""
    now, last = awake_s(), seen.quiet
    was_quiet = last is not None and last.activity.is_idle_until(found, asked - last.at)
    since = last.since if last is not None and was_quiet and view.idle else now
    return Quiet(since=since, at=now, activity=activity(seen.pid, seen.trains))


def _wait_of(pid: int, answer: RankAnswer | None, frames: tuple[Frame, ...]) -> ThreadWait | None:
    """The wait of a rank's main thread; a lock only where no thread of it waits for something outside."""
    with suppress(OSError, ValueError), closing(RankThreads(pid)) as threads:
        found = threads.wait_of(pid)
        if found is not None and found.kind is WaitKind.TIME:
            return ThreadWait(WaitKind.OUTSIDE, found.library, "a time of its own")
        if found is not None and found.kind is WaitKind.LOCK:
            known = answer.threads if answer is not None else None
            if threads.may_be_helped(found, known, joins=joins_threads(frames)):
                return ThreadWait(WaitKind.OUTSIDE, found.library, "another thread of its own")
        return found
    return None


def _begun(answer: RankAnswer | None) -> tuple[GroupState, ...]:
    return answer.groups if answer is not None else ()


def ask(
    pids: Mapping[int, int],
    directory: str,
    wait_for: Collection[int] | None = None,
    *,
    question: bytes = ASK,
) -> dict[int, RankAnswer]:
    """Answers of the processes, by rank, of those that answer in time.

    Args:
        wait_for: ranks of which an answer is expected; None: of all.
    """
    with _asking:
        return _ask(pids, directory, pids.keys() if wait_for is None else wait_for, question)


def _ask(
    pids: Mapping[int, int], directory: str, wait_for: Collection[int], question: bytes
) -> dict[int, RankAnswer]:
    asked = {}
    for rank, pid in pids.items():
        answer = answer_file(directory, pid)
        with suppress(OSError):  # it offers none, or has ended
            answer.unlink(missing_ok=True)
            fd = os.open(questions_file(directory, pid), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.write(fd, question)
            finally:
                os.close(fd)
            asked[rank] = answer
    deadline = awake_s() + ANSWER_S
    found: dict[int, RankAnswer] = {}
    expected = asked.keys() & wait_for
    while not expected <= found.keys() and awake_s() < deadline:
        for rank, answer in asked.items():
            if rank not in found:
                with suppress(OSError, ValueError):
                    found[rank] = read_answer(answer.read_text())
        if not expected <= found.keys():
            time.sleep(_POLL_S)
    return found


def stack_clusters(stacks: Mapping[int, str]) -> list[tuple[list[int], str]]:
    """Stacks of main threads, those that are equal once, with their ranks.

    The rarest is first: a rank that differs is what a person looks for.
    """
    clusters: dict[tuple[str, ...], list[int]] = {}
    for rank, text in stacks.items():
        # How a rank was started, by its template or by itself, makes no difference.
        calls = (call for call in main_thread(text) if "resiliency/template/" not in call.file)
        key = tuple(f"{call.file} {call.function}" for call in calls) or (text,)
        clusters.setdefault(key, []).append(rank)
    ordered = sorted(clusters.values(), key=len)
    return [(sorted(ranks), _main_part(stacks[ranks[0]])) for ranks in ordered]


def _main_part(text: str) -> str:
    head, mark, last = text.rpartition("(most recent call first)")
    lines = (head.rpartition("\n")[2] + mark + last).splitlines() if mark else text.splitlines()
    return "\n".join(lines[:_STACK_LINES])
