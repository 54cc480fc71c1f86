# SPDX-License-Identifier: Apache-2.0
"""The ranks that hold up a job that stands still, found from what all of them show at one moment.

Ranks are compared with each other, not with a clock.  A rank waits for those of its process group that have
begun fewer collectives.  A rank that is waited for, waits for no other and sleeps in a lock is why the job
stands still.  No other is accused: a rank that works, saves, evaluates or compiles, or that waits for
something outside of the job, holds the others up and is named as such, and where no rank is behind the
finding says what all of them do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from resiliency.launch.health.phases import RankPhase
from resiliency.rank.inspection import GroupState
from resiliency.runtime import name_hosts, name_ranks


@dataclass(frozen=True, kw_only=True)
class RankView:
    """One rank as it shows itself.

    `step`: last finished one; None before the first.
    `still_s`: seconds since it finished it, or since the attempt began.
    `stopped_s`: seconds for which the kernel has shown the process as stopped.
    `waits`: its main thread waits in a collective, or in code of torch and the libraries that it sends with.
    `outside`: what its main thread waits for that may come by itself: ``10.0.0.7:443``, ``a pipe``.
    `idle`: neither it nor its children worked, read or wrote, for a second; None: not known.
    `quiet_s`: for so long its host has seen it do nothing at all.
    `answers`: not false where it offers to answer and does not: its interpreter is not free.
    `ends`: its interpreter ends, or it has destroyed its process groups.
    `raised`: the type of an exception that it handles, or that ends it.
    """

    rank: int
    host: str
    step: int | None
    still_s: float
    stopped_s: float = 0.0
    phase: RankPhase = RankPhase.UNKNOWN
    frame: str = ""
    waits: bool = False
    outside: str = ""
    idle: bool | None = None
    quiet_s: float = 0.0
    answers: bool = True
    ends: bool = False
    raised: str = ""
    groups: tuple[GroupState, ...] = ()


class HangKind(Enum):
    STOPPED = "stopped"  # processes that the kernel does not run: SIGSTOP
    BEHIND = "behind"  # ranks that sleep in a lock and have not begun what all others wait in
    HELD_UP = "held_up"  # ranks that others wait for, for a reason that may be good
    CROSSED = "crossed"  # ranks that wait for each other: collectives in different orders
    TOGETHER = "together"  # no rank is behind
    ENDING = "ending"  # ranks that others may wait for have left their groups, or their interpreter ends


@dataclass(frozen=True, kw_only=True)
class HangFinding:
    """Why a job stands still.

    `ranks`: those that are named; all that were seen for TOGETHER.  `silent`: numbers of hosts that did
    not answer.
    """

    kind: HangKind
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    phase: RankPhase
    frame: str
    waiting: tuple[int, ...] = ()
    silent: tuple[int, ...] = ()
    sentence: str = field(compare=False)

    @property
    def is_accusation(self) -> bool:
        """True where the ranks are to blame, if it lasts."""
        return self.kind in (HangKind.STOPPED, HangKind.BEHIND)


def explain_hang(
    views: Sequence[RankView], after_s: float, *, silent: Sequence[int] = ()
) -> HangFinding | None:
    """Why nothing moves; None while something may move.

    Args:
        views: of one moment.  Ranks that are missing make the finding weaker, never wrong.
        after_s: how long a rank has to stand still.
        silent: numbers of hosts that did not answer.
    """
    finding = _explain(views, after_s)
    if finding is None or not silent:
        return finding
    sentence = f"{finding.sentence}; {name_hosts(silent)} of the job did not answer"
    return replace(finding, silent=tuple(silent), sentence=sentence)


def _explain(views: Sequence[RankView], after_s: float) -> HangFinding | None:
    by_rank = {view.rank: view for view in views}
    waits_for = _waits_for(views)
    waiting = tuple(sorted(waits_for))
    waits = [view.rank for view in views if view.waits]
    persons = [view for view in views if view.phase is RankPhase.PERSON and view.still_s >= after_s]
    if persons:
        return _finding(HangKind.HELD_UP, persons, waits)
    stopped = [view for view in views if view.stopped_s >= after_s]
    if stopped:  # they cannot say what they have begun
        return _finding(HangKind.STOPPED, stopped, waits)
    moving = [view for view in views if view.still_s < after_s]
    if not views or (moving and not waits_for):
        return None
    # A rank that crashed has not come to its end: others may wait for it for ever.
    if ending := [view for view in views if view.ends and not view.raised]:
        return _finding(HangKind.ENDING, ending, waits)
    # Native code that keeps the interpreter lets no thread answer: the others wait for such a rank, if they
    # wait and for no other one.
    mute = [view for view in views if not view.groups and not view.phase.is_collective]
    others_wait = all(view.waits for view in views if view not in mute)
    if not waits_for:
        if mute and others_wait and len(mute) < len(views):
            return _of_mute(mute, list(by_rank))
        return _finding(HangKind.TOGETHER, list(views), ())
    roots = {other for others in waits_for.values() for other in others if not waits_for.get(other)}
    if not roots:
        return _finding(HangKind.CROSSED, [by_rank[rank] for rank in waiting], ())
    found = [by_rank[rank] for rank in sorted(roots)]
    if any(view.still_s < after_s for view in found):
        return None  # it has just finished a step: the others wait for it no longer than usual
    if mute and all(view.waits for view in found):
        return _of_mute(mute, waiting)
    guilty = [view for view in found if _does_nothing(view)]
    if guilty:
        return _finding(HangKind.BEHIND, guilty, waiting)
    return _finding(HangKind.HELD_UP, found, waiting)


def _of_mute(mute: Sequence[RankView], waiting: Sequence[int]) -> HangFinding:
    guilty = all(_does_nothing(view) and not view.answers for view in mute)
    return _finding(HangKind.BEHIND if guilty else HangKind.HELD_UP, mute, waiting)


def _waits_for(views: Iterable[RankView]) -> dict[int, set[int]]:
    """Rank -> ranks that have not begun a collective that it has begun."""
    groups: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
    for view in views:
        for group in view.groups:
            groups[group.name, group.members][view.rank] = group.begun
    found: dict[int, set[int]] = {}
    for begun in groups.values():
        least = min(begun.values())
        behind = {rank for rank, count in begun.items() if count == least}
        for rank, count in begun.items():
            if count > least:
                found.setdefault(rank, set()).update(behind)
    return found


def _does_nothing(view: RankView) -> bool:
    """True where it sleeps in a lock, in a phase of each step."""
    return view.idle is True and not (view.waits or view.outside or view.phase.has_no_usual_time)


def _finding(kind: HangKind, named: Sequence[RankView], waiting: Sequence[int]) -> HangFinding:
    named = sorted(named, key=lambda view: view.rank)
    first = named[0]
    ranks = tuple(view.rank for view in named)
    waiting = tuple(rank for rank in waiting if rank not in ranks)
    hosts = tuple(dict.fromkeys(view.host for view in named))
    return HangFinding(
        kind=kind,
        ranks=ranks,
        hosts=hosts,
        phase=first.phase,
        frame=first.frame,
        waiting=waiting,
        sentence=_sentence(kind, named, hosts, waiting),
    )


def _sentence(kind: HangKind, named: Sequence[RankView], hosts: Sequence[str], waiting: Sequence[int]) -> str:
    ranks = name_ranks([view.rank for view in named])
    one = len(named) == 1
    if kind is HangKind.TOGETHER:
        return f"no rank is behind: {_phases(named)}"
    where = f"{ranks} ({name_hosts(hosts)})"
    wait = f"; {name_ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'}" if waiting else ""
    first = named[0]
    place = f"in {first.phase.value}" + (f": {first.frame}" if first.frame else "")
    if kind is HangKind.STOPPED:
        seconds = max(view.stopped_s for view in named)
        return f"{where} {'has' if one else 'have'} been stopped by a signal for {seconds:.0f} s{wait}"
    if kind is HangKind.CROSSED:
        return f"{where} wait for each other: they began collectives in different orders; {_phases(named)}"
    seconds = max(view.still_s for view in named)
    if kind is HangKind.ENDING:
        return f"{where} {'has' if one else 'have'} been ending for {seconds:.0f} s, {place}{wait}"
    if first.raised:
        place = f"after {first.raised}, {place}"
    if kind is HangKind.BEHIND:
        verb, whose = ("has", "it has") if one else ("have", "they have")
        wait += f" in a collective that {whose} not begun"
        return f"{where} {verb} done nothing for {seconds:.0f} s, {place}{wait}"
    if first.outside:
        place += f", waiting for {first.outside}"
    return f"{where} {'holds' if one else 'hold'} up the job for {seconds:.0f} s, {place}{wait}"


def _phases(views: Sequence[RankView]) -> str:
    """``ranks 0 and 1 in a collective: train.py:9 in main; rank 2 in the data loader``"""
    clusters: Mapping[tuple[str, str], list[int]] = defaultdict(list)
    for view in views:
        clusters[view.phase.value, view.frame].append(view.rank)
    ordered = sorted(clusters.items(), key=lambda item: item[1])
    return "; ".join(
        f"{name_ranks(ranks)} in {phase}" + (f": {frame}" if frame else "")
        for (phase, frame), ranks in ordered[:8]
    )
