# SPDX-License-Identifier: Apache-2.0
"""Format of the persistent tier for Megatron: what ``megatron.core.dist_checkpointing.load`` reads.

    step=7/.metadata              as of `DcpFormat`; also the original shapes of flattened tensors
    step=7/metadata.json          which readers Megatron shall use
    step=7/common.pt              what is not sharded, of rank 0
    step=7/save=5f0c.../            the folder of this save
      __0_0.distcp                as of `DcpFormat`; sharded objects are records in it

Nothing of Megatron is imported.  The adapter (`resiliency.plugins.megatron_state`) gave the tensors
Megatron's keys and blocks when they were captured, and pickled the objects; here bytes go into files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from torch.distributed.checkpoint.metadata import Metadata

from resiliency.checkpoint.format.dcp import DcpFormat, dcp_metadata, write_whole_file
from resiliency.checkpoint.format.manifest import RankIndex
from resiliency.checkpoint.state.layout import Shard
from resiliency.checkpoint.state.snapshot import sharded_objects
from resiliency.checkpoint.state.tensors import Placement
from resiliency.checkpoint.storage.chunked_file import DEFAULT_THREADS, FileRecord, Pace
from resiliency.checkpoint.storage.interface import Storage
from resiliency.errors import InternalError

COMMON_FILE = "common.pt"
CONFIG_FILE = "metadata.json"
#: Attribute of an object that is a file of its own: its name.
FILE = "file"
#: Attribute of a flattened tensor: its global shape before, as a JSON list.  Megatron's own name for it.
ORIGINAL_SHAPE = "nd_reformulated_orig_global_shape"

_CONFIG = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


class MegatronFormat:
    """Writes what the adapter for Megatron captured.

    Args:
        threads: writers per rank.
        pace: called before each chunk with its size, see `resiliency.checkpoint.storage.chunked_file.Pace`.
    """

    name = "megatron"

    def __init__(self, *, threads: int = DEFAULT_THREADS, pace: Pace | None = None) -> None:
        self._dcp = DcpFormat(
            objects=_named_objects,
            threads=threads,
            pace=pace,
            extra_files={CONFIG_FILE: json.dumps(_CONFIG).encode()},
            describe=_metadata,
        )

    def write_rank(
        self, storage: Storage, directory: str, shard: Shard, *, run_id: str, save_id: str
    ) -> RankIndex:
        index = self._dcp.write_rank(storage, directory, shard, run_id=run_id, save_id=save_id)
        files = [
            write_whole_file(storage, directory, dict(placement.attributes)[FILE], data)
            for placement, data in _owned_objects(shard)
            if _is_file(placement)
        ]
        # Megatron looks for them in the checkpoint itself.
        return replace(index, files=(*index.files, *files), shown=tuple(file.name for file in files))

    def seal(self, storage: Storage, directory: str, indexes: Sequence[RankIndex]) -> Sequence[FileRecord]:
        """Write `.metadata`, with what Megatron adds to it, and `metadata.json`."""
        return self._dcp.seal(storage, directory, indexes)


def _metadata(indexes: Sequence[RankIndex]) -> Metadata:
    metadata = dcp_metadata(indexes)
    # Megatron has a subclass with this field; its readers ask for the attribute only.
    metadata.mcore_data = _original_shapes(indexes)  # type: ignore[attr-defined]
    return metadata


def _original_shapes(indexes: Iterable[RankIndex]) -> dict[str, dict[str, tuple[int, ...]]]:
    return {
        record.key: {ORIGINAL_SHAPE: tuple(json.loads(text))}
        for index in indexes
        for record in index.tensors
        for name, text in record.attributes
        if name == ORIGINAL_SHAPE
    }


def _named_objects(shard: Shard) -> Iterator[tuple[str, bytes]]:
    for placement, data in _owned_objects(shard):
        if not _is_file(placement):
            assert placement.name is not None
            yield placement.name, data


def _is_file(placement: Placement) -> bool:
    return any(name == FILE for name, _ in placement.attributes)


def _owned_objects(shard: Shard) -> Iterator[tuple[Placement, bytes]]:
    for placement, data in sharded_objects(shard.layout, shard.values):
        if placement.replica_id == 0:
            if not isinstance(data, bytes):
                raise InternalError(f"{placement.name} was captured as {type(data).__name__}, not as bytes.")
            yield placement, data
