# SPDX-License-Identifier: Apache-2.0
"""How the votes of many ranks come to the leader of a save: in blocks, so that no host reads one per rank.

    save=5f0c.../votes=100.json     the heads of the indexes of ranks 100 to 199

Of N ranks a block has about the square root, and 64 at least.  The process that writes the first rank of a
block collects it: while it waits for the commit it looks for the other votes, and writes their heads into one
file.  The leader reads the votes of its own block and one file for each other block.  Votes count as before,
and a collector that is slow, or gone, costs nothing but time: the leader reads itself what lies there for
long.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Sequence

from resiliency.checkpoint.format.manifest import RankIndex, index_name, index_of_head, read_head
from resiliency.checkpoint.storage.interface import Storage, read_file, write_file
from resiliency.checkpoint.threads import map_parallel
from resiliency.errors import CheckpointCorrupt, CheckpointIncomplete, CheckpointMissing

#: So many votes are read one by one: a job of so many ranks has one block, which nobody collects.
LEAST = 64
#: How long all votes of a block may lie there before the leader reads them itself.
COLLECTED_WITHIN_S = 5.0

#: An index and its digest.
Vote = tuple[RankIndex, str]


def blocks_of(ranks: Collection[int]) -> list[list[int]]:
    """The same on all hosts, each in ascending order; the first one is the leader's."""
    size = max(LEAST, math.isqrt(max(len(ranks) - 1, 0)) + 1)
    ordered = sorted(ranks)
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def block_name(place: str, block: Sequence[int]) -> str:
    """The file with the votes of a block; `place` is the folder of the save."""
    return f"{place}/votes={block[0]}.json"


def is_all_there(place: str, block: Sequence[int], names: Collection[str]) -> bool:
    """Whether each rank of a block has voted, by the names in the folder."""
    return all(index_name(place, rank) in names for rank in block)


class BlockCollector:
    """Collects one block, a look at a time.

    Args:
        counts: whether an index is a vote of the save.
    """

    def __init__(
        self, storage: Storage, place: str, block: Sequence[int], counts: Callable[[RankIndex], bool]
    ) -> None:
        self._storage = storage
        self._place = place
        self._block = block
        self._counts = counts
        self._there = 0

    def try_collect(self) -> bool:
        """Write the file of the block if all its ranks have voted.

        Raises:
            CheckpointError: the storage refused.
        """
        # One after the other, as a listing has the names of all ranks.
        while self._there < len(self._block):
            if not self._storage.exists(index_name(self._place, self._block[self._there])):
                return False
            self._there += 1
        heads = map_parallel(self._read, self._block, "resiliency-votes")
        if not all(heads):
            return False
        content = json.dumps([head.decode() for head in heads]).encode()
        write_file(self._storage, block_name(self._place, self._block), content)
        return True

    def _read(self, rank: int) -> bytes:
        """Empty: the vote is torn, or does not count."""
        try:
            index, head = read_head(self._storage, self._place, rank)
        except (CheckpointIncomplete, CheckpointCorrupt):
            return b""
        return head if index.rank == rank and self._counts(index) else b""


def try_read_block(storage: Storage, place: str, block: Sequence[int]) -> list[Vote] | None:
    """The votes of a block from its file; None where that is absent or still being written."""
    try:
        heads = json.loads(read_file(storage, block_name(place, block)))
        return [
            index_of_head(storage, place, rank, head.encode())
            for rank, head in zip(block, heads, strict=True)
        ]
    except (
        CheckpointMissing,
        CheckpointIncomplete,
        CheckpointCorrupt,
        ValueError,
        TypeError,
        AttributeError,
    ):
        return None
