# SPDX-License-Identifier: Apache-2.0
"""Tells tensors apart that ranks call alike, so that a name in a checkpoint means one tensor.

A torch optimizer numbers its state from 0 on every pipeline stage: `optimizer.state.0.exp_avg` is another
tensor on each.  Ranks are of one *stage* if meshes connect them.  A name that stands for different tensors
gets, for each of them, the lowest rank that shares it in front: `@rank4.optimizer.state.0.exp_avg`.  All
other names stay as they are.

Within a stage, ranks run one program: tensors of one name and shape on several meshes of it are copies.  So
are those that have no mesh, where their ranks are of one stage or of none.  Of copies one is listed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from resiliency.checkpoint.format.manifest import RankIndex, TensorRecord
from resiliency.checkpoint.state.rank_sets import mesh_of, ranks_of

#: Stage of the ranks that share no mesh with others.
_NO_STAGE = -1

_Identity = tuple[object, ...]


@dataclass
class _Variant:
    """The parts of one of the tensors that a name stands for."""

    stage: int
    lowest_rank: int
    dtype: str
    global_shape: tuple[int, ...]
    parts: set[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=set)

    @property
    def kind(self) -> tuple[object, ...]:
        """The same of copies."""
        return self.stage, self.dtype, self.global_shape, frozenset(self.parts)


class SharedNames:
    """The names of all tensors of a checkpoint."""

    def __init__(self, indexes: Sequence[RankIndex]) -> None:
        self._stages = _stages(indexes)
        #: Tensors without a mesh of which ranks hold parts; one may hold all of it, and others nothing.
        self._in_parts = {
            (record.key, record.dtype, record.global_shape)
            for _, record in _records(indexes)
            if record.shape != record.global_shape
        }
        variants: dict[str, dict[_Identity, _Variant]] = defaultdict(dict)
        for index, record in _records(indexes):
            of_name = variants[record.key]
            identity = self._identity(index.rank, record)
            variant = of_name.get(identity)
            if variant is None:
                mesh = mesh_of(record.attributes)
                lowest = ranks_of(mesh)[0] if mesh else index.rank
                stage = self._stage_of(index.rank)
                variant = _Variant(stage, lowest, record.dtype, record.global_shape)
                of_name[identity] = variant
            variant.parts.add((record.offsets, record.shape))
        self._prefixes: dict[tuple[str, _Identity], str] = {}
        for key, of_name in variants.items():
            if len({variant.kind for variant in of_name.values()}) > 1:
                lowest_ranks: dict[object, int] = {}
                for variant in of_name.values():
                    known = lowest_ranks.get(variant.kind, variant.lowest_rank)
                    lowest_ranks[variant.kind] = min(known, variant.lowest_rank)
                for identity, variant in of_name.items():
                    self._prefixes[key, identity] = f"@rank{lowest_ranks[variant.kind]}"

    def prefix(self, rank: int, record: TensorRecord) -> str:
        """What stands before the name of a tensor, and is the top of its path; empty: nothing."""
        if not self._prefixes:
            return ""
        return self._prefixes.get((record.key, self._identity(rank, record)), "")

    def name(self, rank: int, record: TensorRecord) -> str:
        """Of the tensor that `rank` wrote a part of."""
        prefix = self.prefix(rank, record)
        return f"{prefix}.{record.key}" if prefix else record.key

    def _identity(self, rank: int, record: TensorRecord) -> _Identity:
        """The same for all parts of one tensor."""
        if mesh := mesh_of(record.attributes):
            return (mesh,)
        if (record.key, record.dtype, record.global_shape) in self._in_parts:
            return ()  # of all ranks
        return self._stage_of(rank), record.dtype, record.global_shape

    def _stage_of(self, rank: int) -> int:
        return self._stages.get(rank, _NO_STAGE)


def _records(indexes: Iterable[RankIndex]) -> Iterator[tuple[RankIndex, TensorRecord]]:
    for index in indexes:
        for record in index.tensors:
            if not record.hidden:
                yield index, record


def _stages(indexes: Sequence[RankIndex]) -> dict[int, int]:
    """The lowest rank of the stage of each rank that is in a mesh."""
    meshes = {mesh_of(record.attributes) for _, record in _records(indexes)} - {""}
    stages: dict[int, set[int]] = {}
    for ranks in (set(ranks_of(mesh)) for mesh in meshes):
        joined = ranks.union(*(stages[rank] for rank in ranks if rank in stages))
        stages.update(dict.fromkeys(joined, joined))
    return {rank: min(stage) for rank, stage in stages.items()}
