# SPDX-License-Identifier: Apache-2.0
"""Tells tensors apart that ranks call alike, so that a name in a checkpoint means one tensor.

A torch optimizer numbers its state from 0 on every pipeline stage: ``optimizer.state.0.exp_avg`` is another
tensor on each.  Ranks are of one *stage* if meshes connect them, or none of them has one, and they hold the
parameters of their optimizers in common (see `_Program`).  A name that stands for different tensors
gets, for each of them, the lowest rank that shares it in front: ``@rank4.optimizer.state.0.exp_avg``.  All
other names stay as they are.

Within a stage, ranks run one program: tensors of one name and shape are copies where they have one path and
no mesh, or their meshes hold the same (`resiliency.checkpoint.state.mesh_contents`).  Of copies one is
listed.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from resiliency.checkpoint.format.manifest import BlobRecord, RankIndex, TensorRecord
from resiliency.checkpoint.state.rank_sets import mesh_of, ranks_of
from resiliency.errors import LayoutMismatch

#: A name in the state of a torch optimizer: which optimizer, and what of the parameter with that number.
_OF_OPTIMIZER = re.compile(r"(?:(.*)\.)?state\.\d+\.(.+)")

#: Name, dtype and shape of a tensor that a rank has whole.
_Plain = tuple[str, str, tuple[int, ...]]
_CONTENT = attrgetter("key", "dtype", "global_shape", "attributes", "hidden")
#: Begins the name of a `mesh_note`.
_NOTE = "mesh:"
#: In place of the lowest rank of those that meshes connect.
_NO_MESH = -1
_Identity = tuple[object, ...]


@dataclass
class _Variant:
    """The parts of one of the tensors that a name stands for."""

    stage: int
    lowest_rank: int
    dtype: str
    global_shape: tuple[int, ...]
    #: Without a mesh its path, else the first mesh that holds the same.
    place: object
    parts: set[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=set)

    @property
    def kind(self) -> tuple[object, ...]:
        """The same of copies."""
        return self.stage, self.dtype, self.global_shape, self.place, frozenset(self.parts)


class SharedNames:
    """The names of all tensors of a checkpoint.

    Raises:
        LayoutMismatch: the state has a name that begins like one of those made here.
    """

    def __init__(self, indexes: Sequence[RankIndex]) -> None:
        #: Tensors without a mesh of which ranks hold parts; one may hold all of it, and others nothing.
        self._in_parts = {
            (record.key, record.dtype, record.global_shape)
            for _, record in _records(indexes)
            if record.shape != record.global_shape
        }
        self._stages = self._find_stages(indexes)
        alike = meshes_alike(indexes)
        variants: dict[str, dict[_Identity, _Variant]] = defaultdict(dict)
        for index, record in _records(indexes):
            of_name = variants[record.key]
            identity = self._identity(index.rank, record)
            variant = of_name.get(identity)
            if variant is None:
                mesh = mesh_of(record.attributes)
                lowest = ranks_of(mesh)[0] if mesh else index.rank
                place = alike.get(mesh, mesh) if mesh else record.path
                stage = self._stages[index.rank]
                variant = _Variant(stage, lowest, record.dtype, record.global_shape, place)
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
                    prefix = self._prefixes[key, identity] = f"@rank{lowest_ranks[variant.kind]}"
                    if f"{prefix}.{key}" in variants:
                        raise LayoutMismatch(
                            f"{prefix}.{key} is the name of a tensor, and that of {key} of rank"
                            f" {variant.lowest_rank}, as other ranks have another {key}.",
                            hint="Begin no name in the state with @rank.",
                            key=key,
                        )

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
        return self._stages[rank], record.dtype, record.global_shape, record.path

    def _find_stages(self, indexes: Sequence[RankIndex]) -> dict[int, int]:
        """The number of each rank's stage."""
        connected = _connected(indexes)
        found: list[tuple[int, _Program]] = []
        by_content: dict[object, int] = {}  # data-parallel ranks have the same
        stages = {}
        for index in indexes:
            mesh = connected.get(index.rank, _NO_MESH)
            content = mesh, tuple(map(_CONTENT, index.tensors))
            if content not in by_content:
                program = _Program(
                    plain
                    for *fields, attributes, hidden in content[1]
                    if not hidden
                    and not mesh_of(attributes)
                    and (plain := tuple(fields)) not in self._in_parts
                )
                alike = (n for n, (other, its) in enumerate(found) if other == mesh and program.is_same(its))
                by_content[content] = next(alike, len(found))
                if by_content[content] == len(found):
                    found.append((mesh, program))
            stages[index.rank] = by_content[content]
        return stages


class _Program:
    """What a rank holds without a mesh, to tell pipeline stages from data-parallel ranks with more or less.

    An optimizer's state says of which parameters it is by their number alone.  So two ranks have copies of it
    if they have the parameters in common, under their names: as many of each shape as the state has.  Where
    they have not, the states are taken for different ones: a name too many costs less than one for two
    tensors.
    """

    def __init__(self, content: Iterable[_Plain]) -> None:
        #: By the name of the optimizer.
        self._states: dict[str, set[_Plain]] = defaultdict(set)
        self._others: set[_Plain] = set()
        for plain in content:
            match = _OF_OPTIMIZER.fullmatch(plain[0])
            (self._others if match is None else self._states[match[1] or ""]).add(plain)

    def is_same(self, other: _Program) -> bool:
        """Whether the optimizers that both have are copies."""
        shared = self._states.keys() & other._states.keys()
        if not shared:
            return True
        common = Counter(shape for _, _, shape in self._others & other._others)
        return all(
            self._states[name] == other._states[name] and self._is_of(common, self._states[name])
            for name in shared
        )

    @staticmethod
    def _is_of(parameters: Counter[tuple[int, ...]], states: Iterable[_Plain]) -> bool:
        """Whether there is a parameter for each of the states; those without dimensions, such as a count of
        steps, say nothing of it."""
        wanted = Counter(
            (match[2], shape)
            for name, _, shape in states
            if shape and (match := _OF_OPTIMIZER.fullmatch(name)) is not None
        )
        return all(count <= parameters[shape] for (_, shape), count in wanted.items())


def mesh_note(mesh: str, checksum: str, file: str) -> BlobRecord:
    """An empty blob of `file` that says what `resiliency.checkpoint.state.mesh_contents` found of a mesh."""
    return BlobRecord(key=f"{_NOTE}{mesh}:{checksum}", file=file, position=0, size_bytes=0)


def meshes_alike(indexes: Iterable[RankIndex]) -> dict[str, str]:
    """Mesh to the first mesh that holds the same; those of which a rank noted nothing are left out."""
    noted: dict[str, list[str]] = defaultdict(list)
    for index in indexes:
        for blob in index.blobs:
            if blob.key.startswith(_NOTE):
                mesh, _, digest = blob.key.removeprefix(_NOTE).partition(":")
                noted[mesh].append(digest)
    first: dict[tuple[str, ...], str] = {}
    return {
        mesh: first.setdefault(tuple(sorted(digests)), mesh)
        for mesh, digests in noted.items()
        if len(digests) == len(ranks_of(mesh))
    }


def _records(indexes: Iterable[RankIndex]) -> Iterator[tuple[RankIndex, TensorRecord]]:
    for index in indexes:
        for record in index.tensors:
            if not record.hidden:
                yield index, record


def _connected(indexes: Sequence[RankIndex]) -> dict[int, int]:
    """Of each rank that is in a mesh, the lowest of the ranks that meshes connect it with."""
    meshes = {mesh_of(record.attributes) for _, record in _records(indexes)} - {""}
    joint: dict[int, set[int]] = {}
    for ranks in (set(ranks_of(mesh)) for mesh in meshes):
        joined = ranks.union(*(joint[rank] for rank in ranks if rank in joint))
        joint.update(dict.fromkeys(joined, joined))
    return {rank: min(ranks) for rank, ranks in joint.items()}
