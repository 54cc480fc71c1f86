# SPDX-License-Identifier: Apache-2.0
"""One look at the ranks of this host: what each shows of itself, and whether it did anything meanwhile."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

from resiliency.launch.hangs.activity import activity, is_stopped
from resiliency.launch.health.hangs import RankView
from resiliency.launch.health.phases import RankPhase, main_thread, phase_of, telling_frame
from resiliency.launch.reaction import waits_natively
from resiliency.launch.stacks import dump_stacks
from resiliency.rank.inspection import ASK, GroupState, RankAnswer, answer_file, questions_file, read_answer

#: For this long a rank has to have done nothing to count as idle.
WINDOW_S = 1.0
#: Ranks that can answer do so within milliseconds, also on a busy host within this.
ANSWER_S = 2.0
_POLL_S = 0.02
_STACK_LINES = 30
#: Two threads of a launcher ask, and a rank has one answer.
_asking = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Watched:
    """A rank that stands still, as far as the step page and the kernel have told so far."""

    pid: int
    step: int | None
    still_s: float
    stopped_s: float


@dataclass(frozen=True, kw_only=True)
class Look:
    """Views, and the stacks that they come from, by rank."""

    views: tuple[RankView, ...]
    stacks: Mapping[int, str]


def look(
    ranks: Mapping[int, Watched], directory: str, host: str, wait: Callable[[float], bool]
) -> Look | None:
    """Inspect `ranks` for about two seconds.  None: `wait`, which waits so many seconds, said to stop.

    What a rank has begun is asked before and after: one that has gone on meanwhile is not idle.
    """
    running = {rank: seen.pid for rank, seen in ranks.items() if not is_stopped(seen.pid)}
    before = {rank: activity(pid) for rank, pid in running.items()}
    began = time.monotonic()
    begun_before = _groups(running, directory)
    # A rank that does not answer is waited for once, and the others are watched meanwhile.
    if wait(max(WINDOW_S - (time.monotonic() - began), 0.0)):
        return None
    after = {rank: activity(pid) for rank, pid in running.items()}
    seconds = time.monotonic() - began
    stacks = dump_stacks(running, directory, ANSWER_S)
    begun = _groups(running, directory, wait_for=begun_before.keys())
    views = []
    for rank, seen in ranks.items():
        frames = main_thread(stacks.get(rank, ""))
        phase = phase_of(frames)
        idle, waits = None, None
        if rank in running:
            idle = before[rank].is_idle_until(after[rank], seconds)
            waits = phase.is_collective or waits_natively(seen.pid)
            if waits is None:  # the kernel of a hardened host shows input and output, and no system call
                idle = None
            if begun_before.get(rank) != begun.get(rank):
                idle = False
        views.append(
            RankView(
                rank=rank,
                host=host,
                step=seen.step,
                still_s=seen.still_s,
                stopped_s=seen.stopped_s,
                phase=phase if seen.step is not None or phase.is_collective else RankPhase.STARTING,
                frame=telling_frame(frames),
                waits=bool(waits),
                idle=idle,
                groups=begun.get(rank, ()),
            )
        )
    return Look(views=tuple(views), stacks=stacks)


def _groups(
    pids: Mapping[int, int], directory: str, wait_for: Collection[int] | None = None
) -> dict[int, tuple[GroupState, ...]]:
    return {rank: answer.groups for rank, answer in ask(pids, directory, wait_for).items()}


def ask(
    pids: Mapping[int, int], directory: str, wait_for: Collection[int] | None = None
) -> dict[int, RankAnswer]:
    """What those of the processes say, by rank, that answer in time.

    Args:
        wait_for: ranks of which an answer is expected; None: of all.
    """
    with _asking:
        return _ask(pids, directory, pids.keys() if wait_for is None else wait_for)


def _ask(pids: Mapping[int, int], directory: str, wait_for: Collection[int]) -> dict[int, RankAnswer]:
    asked = {}
    for rank, pid in pids.items():
        answer = answer_file(directory, pid)
        with suppress(OSError):  # it offers none, or has ended
            answer.unlink(missing_ok=True)
            fd = os.open(questions_file(directory, pid), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.write(fd, ASK)
            finally:
                os.close(fd)
            asked[rank] = answer
    deadline = time.monotonic() + ANSWER_S
    found: dict[int, RankAnswer] = {}
    expected = asked.keys() & wait_for
    while not expected <= found.keys() and time.monotonic() < deadline:
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
