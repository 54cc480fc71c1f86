# SPDX-License-Identifier: Apache-2.0
"""Sets of ranks as short texts: the mesh that a tensor is spread over, as it stands in a checkpoint.

Meshes are regular, so a few numbers say thousands of ranks: `4+8x1+16x64` is 16 blocks of 8 ranks that follow
each other, 64 apart, the first one from rank 4.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

#: Attribute of a tensor: the ranks that share it, unless all ranks have all of it.
MESH = "mesh"
_NAMED = 8


def mesh_of(attributes: Sequence[tuple[str, str]]) -> str:
    """The text of a tensor's mesh; empty: it has none, or all ranks have all of it."""
    return dict(attributes).get(MESH, "") if attributes else ""


def named(ranks: Sequence[int]) -> str:
    """For messages; of many the first ones."""
    listed = ", ".join(map(str, ranks[:_NAMED]))
    return f"{listed} and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else listed


def text_of_ranks(ranks: Iterable[int]) -> str:
    """The inverse of `ranks_of`."""
    wanted = left = sorted(set(ranks))
    steps = ""
    while len(left) > 1:
        stride = left[1] - left[0]
        size = next((i for i in range(1, len(left)) if left[i] - left[i - 1] != stride), len(left))
        starts = left[::size]
        if [start + i * stride for start in starts for i in range(size)] != left:
            return ",".join(map(str, wanted))
        left, steps = starts, f"{steps}+{size}x{stride}"
    return f"{left[0]}{steps}"


def ranks_of(text: str) -> list[int]:
    """In ascending order.

    Raises:
        ValueError: not such a text.
    """
    first, *steps = text.split("+")
    ranks = [int(rank) for rank in first.split(",")]
    for step in steps:
        size, stride = map(int, step.split("x"))
        ranks = [rank + i * stride for rank in ranks for i in range(size)]
    return sorted(ranks)
