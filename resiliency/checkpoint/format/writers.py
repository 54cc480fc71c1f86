# SPDX-License-Identifier: Apache-2.0
"""Which rank wrote what several ranks hold: found and proven once, at the commit, and kept in the manifest.

Replicas of a tensor are written by one rank for all.  A rank that restores must find that one's bytes, and
must not search the indexes of all ranks for them: 10,000 ranks would open 100 million files.  So the index
of each rank names its *shared* entries (`SharedEntry`): those of which it is one of several holders.  Ranks
that share the same ones have equal tables, with equal checksums; the manifest holds, for each such table,
the ranks that wrote its entries.  A reader opens its own index and theirs.

The same look is the proof that nothing is lost: each shared entry of each rank was written by some rank, or
there is no commit.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from resiliency.checkpoint.format.manifest import (
    RankIndex,
    SharedEntry,
    TensorRecord,
    table_digest,
)
from resiliency.checkpoint.state.layout import StateLayout, TensorEntry
from resiliency.checkpoint.state.rank_sets import mesh_of, text_of_ranks
from resiliency.checkpoint.threads import map_parallel
from resiliency.errors import CheckpointIncomplete

#: Among so many ranks at most are entries spread that all have whole: each restart reads the files of all.
MOST_WRITERS = 64

_Identity = tuple[str, str, tuple[int, ...], tuple[int, ...], str]
#: What an answer depends on: rank, checksums of what it wrote and of what it shares.
_Question = tuple[tuple[int, str, str], ...]

#: Answers to the last questions: ranks write and share the same at every save of a job.
_ANSWERS: OrderedDict[_Question, dict[str, str]] = OrderedDict()
_MOST_ANSWERS = 4
_LOCK = threading.Lock()


def writers_among(world_size: int) -> list[int]:
    """The ranks that write what all ranks have whole: up to `MOST_WRITERS`, as far apart as they can be, so
    that many hosts share the work.  All ranks find the same ones."""
    count = min(world_size, MOST_WRITERS)
    return [number * world_size // count for number in range(count)]


def shared_entries(layout: StateLayout, entries: Iterable[TensorEntry]) -> tuple[SharedEntry, ...]:
    """How the index names `entries` of a rank's `layout`, in an order that all their holders share."""
    found = (
        SharedEntry(
            key=layout.disk_names[entry.key],
            dtype=entry.dtype,
            offsets=entry.global_offset,
            shape=entry.shape,
            mesh=mesh_of(entry.attributes),
        )
        for entry in entries
    )
    return tuple(sorted(found, key=_identity))


def find_writers(indexes: Sequence[RankIndex]) -> Mapping[str, str]:
    """What `Manifest.written_by` holds, from the indexes of all ranks in ascending order.

    Of copies that several ranks wrote the lowest rank's counts.

    Raises:
        CheckpointIncomplete: a rank has an entry that no rank wrote.
        CheckpointCorrupt: an index is not what was written.
    """
    if not any(index.shared for index in indexes):
        return {}
    question = tuple(
        (index.rank, table_digest(index, "tensors"), table_digest(index, "shared")) for index in indexes
    )
    with _LOCK:
        known = _ANSWERS.get(question)
    if known is not None:
        return known
    map_parallel(RankIndex.load, indexes, "resiliency-tables")
    answer = _find_writers(indexes)
    with _LOCK:
        _ANSWERS[question] = answer
        while len(_ANSWERS) > _MOST_ANSWERS:
            _ANSWERS.popitem(last=False)
    return answer


def _find_writers(indexes: Sequence[RankIndex]) -> dict[str, str]:
    lowest: dict[_Identity, int] = {}
    for index in indexes:
        for record in index.tensors:
            lowest.setdefault(_identity_of(record), index.rank)
    found: dict[str, str] = {}
    for index in indexes:
        digest = table_digest(index, "shared")
        if not digest or digest in found:  # of equal tables one is looked at
            continue
        writers = set()
        for entry in index.shared:
            writer = lowest.get(_identity(entry))
            if writer is None:
                raise CheckpointIncomplete(
                    f"{entry.key} at {list(entry.offsets)}: rank {index.rank} holds a {entry.dtype} copy"
                    f" {list(entry.shape)} of it, and no rank wrote it.",
                    hint="Does exactly one rank hold each part with replica_id 0?",
                    key=entry.key,
                    rank=index.rank,
                )
            writers.add(writer)
        found[digest] = text_of_ranks(writers)
    return found


def _identity(entry: SharedEntry) -> _Identity:
    return entry.key, entry.dtype, entry.offsets, entry.shape, entry.mesh


def _identity_of(record: TensorRecord) -> _Identity:
    return record.key, record.dtype, record.offsets, record.shape, mesh_of(record.attributes)
