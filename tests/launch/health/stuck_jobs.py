# SPDX-License-Identifier: Apache-2.0
"""A model of ranks that run the same program over a mesh of process groups, until one of them does not go on.

It knows what a collective is and no more: it ends for a rank when all members of the group have begun it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
        product = 1
        for size in self.sizes:
            product *= size
        return product

    def group(self, rank: int, axis: int) -> tuple[int, int]:
        """Its axis, and its first member."""
        stride = 1
        for size in self.sizes[axis + 1 :]:
            stride *= size
        return axis, rank - (rank // stride % self.sizes[axis]) * stride

    def members(self, group: tuple[int, int]) -> range:
        axis, first = group
        stride = 1
        for size in self.sizes[axis + 1 :]:
            stride *= size
        return range(first, first + stride * self.sizes[axis], stride)


def any_job(draw: random.Random, most_ranks: int) -> tuple[Mesh, list[Operation]]:
    """A mesh of one to three axes, and a program in which each axis has a collective that is waited for."""
    sizes: tuple[int, ...] = ()
    while not 2 <= Mesh(sizes).ranks <= most_ranks:
        sizes = tuple(draw.choice((1, 2, 2, 3, 4, 8)) for _ in range(draw.randint(1, 3)))
    axes = [axis for axis, size in enumerate(sizes) if size > 1]
    program = [
        Operation(draw.choice(ORDINARY), draw.choice(axes), draw.random() < 0.7)
        for _ in range(draw.randint(1, 6))
    ]
    program += [Operation(RankPhase.BACKWARD, axis, True) for axis in axes]
    return Mesh(sizes), program * 2


def run_until_stuck(mesh: Mesh, program: Sequence[Operation], stuck: int, at: int) -> list[int]:
    """How many operations each rank has begun when rank `stuck` does not begin operation `at`."""
    begun = [0] * mesh.ranks
    counts: dict[tuple[int, tuple[int, int]], int] = {}
    moves = True
    waits = [False] * mesh.ranks
    while moves:
        moves = False
        for rank in range(mesh.ranks):
            while begun[rank] < len(program) and not (rank == stuck and begun[rank] == at):
                if waits[rank]:
                    last = begun[rank] - 1
                    group = mesh.group(rank, program[last].axis)
                    if counts[last, group] < len(mesh.members(group)):
                        break
                operation = program[begun[rank]]
                key = begun[rank], mesh.group(rank, operation.axis)
                counts[key] = counts.get(key, 0) + 1
                begun[rank] += 1
                waits[rank] = operation.waits
                moves = True
    return begun


def views(
    mesh: Mesh, program: Sequence[Operation], begun: Sequence[int], named: RankView, *, mute: bool = False
) -> Iterator[RankView]:
    """What the ranks show; `named` is what the stuck one shows, but for its groups: none if it is `mute`."""
    for rank, count in enumerate(begun):
        groups = tuple(
            GroupState(
                name=f"axis {axis} of {mesh.group(rank, axis)[1]}",
                members=f"{size}",
                begun=sum(operation.axis == axis for operation in program[:count]),
            )
            for axis, size in enumerate(mesh.sizes)
        )
        if rank == named.rank:
            yield RankView(**{**vars(named), "groups": () if mute or named.stopped_s else groups})
        else:
            yield RankView(
                rank=rank,
                host=f"h{rank // 8}",
                step=0,
                still_s=named.still_s,
                phase=RankPhase.COLLECTIVE,
                waits=True,
                idle=True,
                groups=groups,
            )
