# SPDX-License-Identifier: Apache-2.0
"""From what all hosts hold to what each rank takes: the newest save that can be made whole.

A save is whole if every rank can get a shard of it: its own, or one of its group.  A rank reads what
its host can read; all but the memory of a host is sent to other hosts by one of the ranks there.  A
rank prefers its own shard to its group's, and of those its host's memory, disk and copies, then the
copy of another host, and the storage that all hosts share last, for that is the slowest and everybody's.

The plan follows from the values alone, whatever their order, so ranks that gathered the same lists act
on the same plan.  When a shard turns out bad, plan anew with it in `bad`.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from resiliency.checkpoint.locations import Place, ShardLocation, ShardRequest

_QUICKNESS = {place: number for number, place in enumerate(Place)}
#: How many saves `explain_missing` tells about.
_EXPLAINED = 3


@dataclass(frozen=True, slots=True)
class Assignment:
    """What one rank takes.

    Args:
        rank: of the job that starts.
        sender: rank of that job on `location.host` that reads the shard and sends it; None: the rank reads
            it by itself, as its own host or all hosts can.
    """

    rank: int
    location: ShardLocation
    sender: int | None = None


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """One save and where each rank takes its shard from.

    Args:
        run_id: the run that the save belongs to.
        assignments: one for each rank, in their order.
        moved_bytes: sent from host to host.
    """

    step: int
    save_id: str
    run_id: str
    assignments: tuple[Assignment, ...]
    moved_bytes: int


@dataclass(frozen=True, slots=True)
class MissingShards:
    """Why a save is not whole.

    Args:
        ranks: of the job that starts, that get no shard of it.
        why: for each of them.
    """

    step: int
    save_id: str
    ranks: tuple[int, ...]
    why: tuple[str, ...]


def plans(
    needs: Sequence[ShardRequest],
    locations: Iterable[ShardLocation],
    *,
    bad: Collection[ShardLocation] = (),
    step: int | None = None,
) -> list[RestorePlan]:
    """All saves that every rank can go on from, newest step first.

    Of several saves of one step the first is that which reads least from shared storage, then that which
    moves least between hosts, then that which reads least from disk.

    Args:
        needs: one for each rank of the job that starts.
        bad: locations that turned out to be damaged or gone.
        step: only this one.
    """
    return list(each_plan(needs, locations, bad=bad, step=step))


def each_plan(
    needs: Sequence[ShardRequest],
    locations: Iterable[ShardLocation],
    *,
    bad: Collection[ShardLocation] = (),
    step: int | None = None,
) -> Iterator[RestorePlan]:
    """`plans`, each made when it is asked for: mostly the first is all that is needed."""
    ordered = _ordered(needs)
    ranks_on = _ranks_on(ordered)
    saves = _by_save(locations, bad, step)
    for _, same_step in sorted(saves.items(), reverse=True):
        found = []
        for save_id, shards in sorted(same_step.items(), reverse=True):
            plan = _plan(save_id, ordered, _Shards(shards, ranks_on), ranks_on)
            if plan is not None:
                found.append(plan)
        yield from sorted(found, key=_cost)


def missing_shards(
    needs: Sequence[ShardRequest], locations: Iterable[ShardLocation], *, bad: Collection[ShardLocation] = ()
) -> list[MissingShards]:
    """What is missing of each save that is not whole, newest first."""
    ordered = _ordered(needs)
    ranks_on = _ranks_on(ordered)
    found = []
    for step, same_step in sorted(_by_save(locations, bad, None).items(), reverse=True):
        for save_id, location in sorted(same_step.items(), reverse=True):
            shards = _Shards(location, ranks_on)
            lost = [(need.rank, shards.why_not(need)) for need in ordered if not shards.has(need)]
            if lost:
                ranks, why = zip(*lost, strict=True)
                found.append(MissingShards(step, save_id, ranks, why))
    return found


def explain_missing(
    needs: Sequence[ShardRequest], locations: Iterable[ShardLocation], *, bad: Collection[ShardLocation] = ()
) -> str:
    """For people: the newest saves that are not whole, and exactly which shards are lost, with the reason."""
    found = missing_shards(needs, locations, bad=bad)
    if not found:
        return "no save that was found lacks a shard."
    lines = []
    for missing in found[:_EXPLAINED]:
        by_reason: dict[str, list[int]] = defaultdict(list)
        for rank, why in zip(missing.ranks, missing.why, strict=True):
            by_reason[why].append(rank)
        reasons = "; ".join(f"{_ranges(ranks)}: {why}" for why, ranks in by_reason.items())
        lines.append(f"step {missing.step} (save {missing.save_id}) lacks the shards of {reasons}.")
    if len(found) > _EXPLAINED:
        lines.append(f"{len(found) - _EXPLAINED} older saves are not whole either.")
    return "\n".join(lines)


def _ordered(needs: Sequence[ShardRequest]) -> list[ShardRequest]:
    ordered = sorted(needs, key=lambda need: need.rank)
    assert len({need.rank for need in ordered}) == len(ordered), "two needs of one rank"
    return ordered


def _ranks_on(needs: Iterable[ShardRequest]) -> dict[str, list[int]]:
    ranks_on: dict[str, list[int]] = defaultdict(list)
    for need in needs:
        ranks_on[need.host].append(need.rank)
    return dict(ranks_on)


def _by_save(
    locations: Iterable[ShardLocation], bad: Collection[ShardLocation], step: int | None
) -> dict[int, dict[str, list[ShardLocation]]]:
    """Step -> save -> locations."""
    excluded = frozenset(bad)
    saves: dict[int, dict[str, list[ShardLocation]]] = defaultdict(lambda: defaultdict(list))
    for location in locations:
        if step in (None, location.step) and not (excluded and location in excluded):
            saves[location.step][location.save_id].append(location)
    return saves


class _Candidates:
    """Shards of one save, each as good as the others; by the host that can read them."""

    __slots__ = ("far", "near", "queue", "senders", "stored")

    def __init__(self, locations: list[ShardLocation], ranks_on: Collection[str]) -> None:
        self.near: dict[str, ShardLocation] = {}
        self.far: dict[str, ShardLocation] = {}
        self.stored: dict[str, ShardLocation] = {}
        for location in sorted(locations, key=_preference) if len(locations) > 1 else locations:
            host = location.host
            if location.place is Place.PERSISTENT:
                self.stored.setdefault(host, location)
                continue
            self.near.setdefault(host, location)
            if location.place is not Place.MEMORY and host in ranks_on:
                self.far.setdefault(host, location)
        self.queue: list[tuple[int, str]] = []
        #: By host that wants it, the one that sends there.
        self.senders: dict[str, str] = {}

    def read_on(self, host: str) -> ShardLocation | None:
        return self.near.get(host) or self.near.get("")

    def stored_for(self, host: str) -> ShardLocation | None:
        return self.stored.get("") or self.stored.get(host)


class _Shards:
    """All locations of one save."""

    def __init__(self, locations: Iterable[ShardLocation], ranks_on: Collection[str]) -> None:
        self._ranks_on = ranks_on
        own: dict[tuple[int, int], list[ShardLocation]] = defaultdict(list)
        mates: dict[str, list[ShardLocation]] = defaultdict(list)
        self._worlds: set[int] = set()
        run_ids = set()
        for location in locations:
            own[location.rank, location.world_size].append(location)
            self._worlds.add(location.world_size)
            run_ids.add((location.place is Place.MEMORY, location.run_id))
            if location.group:
                mates[location.group].append(location)
            self.step = location.step
        self._own = own
        self._mates = mates
        self._candidate_sets: dict[str, _Candidates] = {}  # of groups, which many ranks look at
        # Memory knows an attempt at most; the run is what is written on disk.
        self.run_id = min(((memory, run_id) for memory, run_id in run_ids if run_id), default=(False, ""))[1]

    def candidate_sets(self, need: ShardRequest) -> Iterator[_Candidates]:
        """The shards that a rank can use: its own, then those of its group."""
        own = self._own.get((need.rank, need.world_size))
        if own:
            yield _Candidates(own, self._ranks_on)
        mates = self._mates.get(need.group) if need.group else None
        if mates:
            if need.group not in self._candidate_sets:
                self._candidate_sets[need.group] = _Candidates(mates, self._ranks_on)
            yield self._candidate_sets[need.group]

    def has(self, need: ShardRequest) -> bool:
        candidate_sets = self.candidate_sets(need)
        return any(
            candidates.read_on(need.host) or candidates.far or candidates.stored_for(need.host)
            for candidates in candidate_sets
        )

    def why_not(self, need: ShardRequest) -> str:
        """Why `has` says no."""
        near = {
            host: location
            for candidates in self.candidate_sets(need)
            for host, location in candidates.near.items()
        }
        reasons = [
            f"in the memory of {host}"
            if host in self._ranks_on
            else f"on {host}, which runs no rank of this job"
            for host in sorted(near)
        ]
        if reasons:
            return f"only {' and '.join(reasons)}"
        if need.world_size not in self._worlds:
            saved_by = " or ".join(map(str, sorted(self._worlds)))
            return f"saved by a job of {saved_by} ranks, this one has {need.world_size}"
        return "held nowhere"


class _SendBalance:
    """Who sends how much so far: the next send goes to the host with the least, and to the rank there.

    What one rank of a host sends is sent by no other, for who wants it passes it on; and the ranks of one
    host get it from one sender, so that it comes to their host once.
    """

    def __init__(self, ranks_on: dict[str, list[int]]) -> None:
        self._hosts = dict.fromkeys(ranks_on, 0)
        self._ranks = {host: [(0, rank) for rank in ranks] for host, ranks in ranks_on.items()}
        self._senders: dict[ShardLocation, int] = {}

    def send(self, candidates: _Candidates, need: ShardRequest) -> Assignment:
        """Have one of the hosts of `candidates` send."""
        if need.host in candidates.senders:
            location = candidates.far[candidates.senders[need.host]]
            return Assignment(need.rank, location, self._senders[location])
        if not candidates.queue:
            candidates.queue = sorted((self._hosts[host], host) for host in candidates.far)
        # Loads only grow, so an entry with an old load may stand too early, never too late.
        while candidates.queue[0][0] != self._hosts[candidates.queue[0][1]]:
            host = candidates.queue[0][1]
            heapq.heapreplace(candidates.queue, (self._hosts[host], host))
        host = candidates.senders[need.host] = candidates.queue[0][1]
        location = candidates.far[host]
        weight = max(1, location.size_bytes)
        if location not in self._senders:
            sent, sender = self._ranks[host][0]
            heapq.heapreplace(self._ranks[host], (sent + weight, sender))
            self._senders[location] = sender
        self._hosts[host] += weight  # also for the next host, so that all who have it begin a chain
        return Assignment(need.rank, location, self._senders[location])


def _plan(
    save_id: str, needs: Sequence[ShardRequest], shards: _Shards, ranks_on: dict[str, list[int]]
) -> RestorePlan | None:
    """None if a rank gets no shard."""
    assignments: dict[int, Assignment] = {}
    sends: list[tuple[ShardRequest, _Candidates]] = []
    for need in needs:
        candidate_sets = list(shards.candidate_sets(need))
        for candidates in candidate_sets:
            if location := candidates.read_on(need.host):
                assignments[need.rank] = Assignment(need.rank, location)
                break
            if candidates.far:
                sends.append((need, candidates))
                break
        else:
            stored = next(
                (found for candidates in candidate_sets if (found := candidates.stored_for(need.host))), None
            )
            if stored is None:
                return None
            assignments[need.rank] = Assignment(need.rank, stored)
    balance = _SendBalance(ranks_on)
    # Who has no choice first, so that those who have one can go around.
    for need, candidates in sorted(sends, key=lambda send: (len(send[1].far), send[0].rank)):
        assignments[need.rank] = balance.send(candidates, need)
    return RestorePlan(
        step=shards.step,
        save_id=save_id,
        run_id=shards.run_id,
        assignments=tuple(assignments[need.rank] for need in needs),
        moved_bytes=sum(assignments[need.rank].location.size_bytes for need, _ in sends),
    )


def _cost(plan: RestorePlan) -> tuple[int, int, int]:
    from_storage = from_disk = 0
    for assignment in plan.assignments:
        if assignment.location.place is Place.PERSISTENT:
            from_storage += assignment.location.size_bytes
        elif assignment.location.place is not Place.MEMORY:
            from_disk += assignment.location.size_bytes
    return from_storage, plan.moved_bytes, from_disk


def _preference(location: ShardLocation) -> tuple[object, ...]:
    return (
        _QUICKNESS[location.place],
        location.host,
        location.root,
        location.rank,
        location.digest,
        location.size_bytes,
    )


def _ranges(ranks: Sequence[int]) -> str:
    """Sorted numbers for people: "ranks 0-3, 8"."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], rank]
        else:
            parts.append([rank])
    return f"rank{'s' * (len(ranks) > 1)} " + ", ".join("-".join(map(str, part)) for part in parts)
