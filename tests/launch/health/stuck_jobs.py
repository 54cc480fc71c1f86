# SPDX-License-Identifier: Apache-2.0
"""A model of ranks that run the same program over a mesh of process groups, until some of them do not go on.

It knows what a collective is and no more: it ends for a rank when all members of the group have begun it.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from resiliency.launch.health.hangs import RankView
from resiliency.launch.health.phases import RankPhase
from resiliency.rank.inspection import GroupState

#: What ranks do between collectives.
ORDINARY = (RankPhase.DATA, RankPhase.FORWARD, RankPhase.BACKWARD, RankPhase.OPTIMIZER, RankPhase.OTHER)
SLOW = (RankPhase.CHECKPOINT, RankPhase.EVALUATION, RankPhase.COMPILATION, RankPhase.STARTING)


@dataclass(frozen=True)
class Operation:
    """Own work in a phase, then a collective along an axis of the mesh; `waits`: its end is waited for."""

    phase: RankPhase
    axis: int
    waits: bool


@dataclass(frozen=True)
class Mesh:
    """Ranks as a grid: along each axis, ranks that differ in nothing else are a group."""

    sizes: tuple[int, ...]

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes)

    def group(self, rank: int, axis: int) -> tuple[int, int]:
        """Its axis, and its first member."""
        stride = math.prod(self.sizes[axis + 1 :])
        return axis, rank - (rank // stride % self.sizes[axis]) * stride


def any_job(draw: random.Random, most_ranks: int) -> tuple[Mesh, list[Operation]]:
    """A mesh of one to three axes, and a program in which each axis has a collective that is waited for."""
    sizes: tuple[int, ...] = ()
    while not 2 <= Mesh(sizes).ranks <= most_ranks:
        sizes = tuple(draw.choice((1, 2, 2, 3, 4, 8)) for _ in range(draw.randint(1, 3)))
    axes = [axis for axis, size in enumerate(sizes) if size > 1]
    return Mesh(sizes), _any_program(draw, axes)


def _any_program(draw: random.Random, axes: Sequence[int]) -> list[Operation]:
    program = [
        Operation(draw.choice(ORDINARY), draw.choice(axes), draw.random() < 0.7)
        for _ in range(draw.randint(1, 6))
    ]
    program += [Operation(RankPhase.BACKWARD, axis, True) for axis in axes]
    return program * 2


def large_job(draw: random.Random, ranks: int) -> tuple[Mesh, list[Operation]]:
    """As `any_job`, of exactly so many ranks."""
    sizes: list[int] = []
    for _ in range(draw.randint(0, 2)):
        left = ranks // math.prod(sizes)
        sizes.append(draw.choice([size for size in range(2, 129) if left % size == 0]))
    sizes.append(ranks // math.prod(sizes))
    draw.shuffle(sizes)
    return Mesh(tuple(sizes)), _any_program(draw, [axis for axis, size in enumerate(sizes) if size > 1])


def run_until_stuck(mesh: Mesh, program: Sequence[Operation], stuck: Mapping[int, int]) -> list[int]:
    """How many operations each rank has begun when each rank of `stuck` does not begin that operation."""
    begun = [0] * mesh.ranks
    counts: dict[tuple[int, tuple[int, int]], int] = defaultdict(int)
    waiting: dict[tuple[int, tuple[int, int]], list[int]] = defaultdict(list)
    ready = list(range(mesh.ranks))
    while ready:
        rank = ready.pop()
        stop = min(stuck.get(rank, len(program)), len(program))
        while begun[rank] < stop:
            operation = program[begun[rank]]
            key = begun[rank], mesh.group(rank, operation.axis)
            counts[key] += 1
            begun[rank] += 1
            if counts[key] == mesh.sizes[operation.axis]:
                ready += waiting.pop(key, [])
            elif operation.waits:
                waiting[key].append(rank)
                break
    return begun


def views(
    mesh: Mesh,
    program: Sequence[Operation],
    begun: Sequence[int],
    stuck: Iterable[RankView],
    *,
    mute: bool = False,
) -> Iterator[RankView]:
    """What the ranks show; `stuck` are those that do not go on, but for their groups: no answer if `mute`."""
    by_rank = {view.rank: view for view in stuck}
    still_s = max(view.still_s for view in by_rank.values())
    axes = range(len(mesh.sizes))
    begun_by_axis = [
        [sum(operation.axis == axis for operation in program[:count]) for axis in axes]
        for count in range(len(program) + 1)
    ]
    states: dict[tuple[int, int, int], GroupState] = {}
    for rank, count in enumerate(begun):
        groups = []
        for axis in axes:
            key = *mesh.group(rank, axis), begun_by_axis[count][axis]
            if key not in states:
                name = f"axis {axis} of {key[1]}"
                states[key] = GroupState(name=name, members=f"{mesh.sizes[axis]}", begun=key[2])
            groups.append(states[key])
        if (view := by_rank.get(rank)) is not None:
            shown = () if mute or view.stopped_s else tuple(groups)
            yield replace(view, groups=shown, answers=not mute)
        else:
            yield RankView(
                rank=rank,
                host=f"h{rank // 8}",
                step=0,
                still_s=still_s,
                phase=RankPhase.COLLECTIVE,
                waits=True,
                idle=True,
                groups=tuple(groups),
            )
