# SPDX-License-Identifier: Apache-2.0
"""Reads what stock `torch.distributed.checkpoint.save` wrote; there are no checksums to verify.

torch unpickles its `.metadata`, as `torch.distributed.checkpoint.load` does: open only directories
that you trust.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from resiliency.checkpoint._compat import StorageInfo
from resiliency.checkpoint.reader import Target, overlap
from resiliency.errors import CheckpointCorrupt, CheckpointIncomplete, LayoutMismatch

_Part = tuple[StorageInfo, tuple[int, ...], tuple[int, ...]]


def read_stock_tensors(directory: str | os.PathLike[str], targets: Iterable[Target]) -> None:
    """Fill CPU tensors, cut in any way, from a directory that torch wrote.

    Raises:
        CheckpointIncomplete: no `.metadata`, a file is missing, or parts do not cover a target.
        CheckpointCorrupt: a record is not what torch writes.
        LayoutMismatch: a key is unknown, or dtype or shape do not fit.
    """
    path = Path(directory)
    metadata = _read_metadata(path)
    by_file: dict[str, list[tuple[_Part, Target]]] = defaultdict(list)
    for target in targets:
        for part in _parts_of(metadata, target, path):
            by_file[part[0].relative_path].append((part, target))
    for name, work in by_file.items():
        _read_parts(path / name, work)


def _read_metadata(path: Path) -> Metadata:
    try:
        metadata = FileSystemReader(path).read_metadata()
    except FileNotFoundError as error:
        raise CheckpointIncomplete(f"{path} has no .metadata.", path=str(path)) from error
    except (pickle.UnpicklingError, EOFError, AttributeError) as error:
        raise CheckpointCorrupt(f"{path}/.metadata is damaged: {error}.", path=str(path)) from error
    if not isinstance(metadata, Metadata):
        raise CheckpointCorrupt(f"{path}/.metadata holds a {type(metadata).__name__}.", path=str(path))
    return metadata


def _parts_of(metadata: Metadata, target: Target, path: Path) -> list[_Part]:
    saved = metadata.state_dict_metadata.get(target.key)
    tensor = target.tensor
    if not isinstance(saved, TensorStorageMetadata):
        raise LayoutMismatch(f"{path} has no tensor {target.key!r}.", path=str(path), key=target.key)
    fits = len(saved.size) == tensor.dim() and all(
        start + size <= whole
        for start, size, whole in zip(target.offsets, tensor.shape, saved.size, strict=True)
    )
    if saved.properties.dtype != tensor.dtype or not fits:
        raise LayoutMismatch(
            f"{target.key}: the model wants {tensor.dtype} {list(tensor.shape)} at {list(target.offsets)}, "
            f"{path} holds {saved.properties.dtype} {list(saved.size)}.",
            path=str(path),
            key=target.key,
        )
    parts, held = [], 0
    for chunk in saved.chunks:
        low, high = overlap(target.offsets, tensor.shape, chunk.offsets, chunk.sizes)
        if all(a < b for a, b in zip(low, high, strict=True)):
            info = metadata.storage_data[MetadataIndex(target.key, chunk.offsets)]
            parts.append((info, tuple(chunk.offsets), tuple(chunk.sizes)))
            held += torch.Size(b - a for a, b in zip(low, high, strict=True)).numel()
    if held < tensor.numel():
        raise CheckpointIncomplete(
            f"{path}: {held} of {tensor.numel()} elements of {target.key} are there.", path=str(path)
        )
    return parts


def _read_parts(path: Path, work: list[tuple[_Part, Target]]) -> None:
    try:
        file = path.open("rb")
    except FileNotFoundError as error:
        raise CheckpointIncomplete(f"the checkpoint lacks its file {path}.", path=str(path)) from error
    with file:
        for (info, offsets, sizes), target in sorted(work, key=lambda item: item[0][0].offset):
            part = _load_part(file, info, path, target.key)
            low, high = overlap(target.offsets, target.tensor.shape, offsets, sizes)
            destination = target.tensor.detach()
            for dim, (a, b) in enumerate(zip(low, high, strict=True)):
                part = part.narrow(dim, a - offsets[dim], b - a)
                destination = destination.narrow(dim, a - target.offsets[dim], b - a)
            destination.copy_(part)


def _load_part(file: io.BufferedReader, info: StorageInfo, path: Path, key: str) -> torch.Tensor:
    if info.transform_descriptors:
        raise LayoutMismatch(
            f"{path}: {key} was written through {list(info.transform_descriptors)}, which only torch undoes.",
            hint="Load this checkpoint with torch.distributed.checkpoint.load.",
            path=str(path),
            key=key,
        )
    file.seek(info.offset)
    try:
        loaded = torch.load(io.BytesIO(file.read(info.length)), map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, zipfile.BadZipFile) as error:
        raise CheckpointCorrupt(
            f"{path}: {key} at byte {info.offset} is damaged: {error}.",
            hint="Restore another checkpoint.",
            path=str(path),
            key=key,
            offset=info.offset,
        ) from error
    if not isinstance(loaded, torch.Tensor):
        raise CheckpointCorrupt(f"{path}: {key} is a {type(loaded).__name__}.", path=str(path), key=key)
    return loaded
