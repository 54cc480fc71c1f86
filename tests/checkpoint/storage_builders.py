# SPDX-License-Identifier: Apache-2.0
"""Small shards for the tests of the storage side, made by hand from the layout's own types."""

from __future__ import annotations

import math
import mmap
import random
import resource
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import torch

from resiliency.checkpoint.commit.commit import CheckpointFormat, Committed, SaveTicket, commit
from resiliency.checkpoint.format.manifest import RankIndex, TensorRecord, read_manifest
from resiliency.checkpoint.format.marker import step_directory
from resiliency.checkpoint.format.reader import CheckpointReader
from resiliency.checkpoint.format.torch_record import memory_of
from resiliency.checkpoint.state.layout import (
    Shard,
    StateLayout,
    TensorEntry,
    TensorView,
    align,
    contiguous_stride,
)
from resiliency.checkpoint.storage.interface import Storage
from resiliency.checkpoint.storage.posix import LocalStorage


@dataclass
class Part:
    """A tensor to put into a shard; by default whole and unsharded."""

    tensor: torch.Tensor
    global_shape: tuple[int, ...] | None = None
    offset: tuple[int, ...] | None = None
    replica_id: int = 0
    is_base: bool = False


@dataclass
class Tie:
    """A window onto the bytes of another tensor."""

    base: str
    tensor: torch.Tensor
    offset_bytes: int = 0
    extra: dict[str, object] = field(default_factory=dict)


def make_shard(
    parts: Mapping[str, torch.Tensor | Part | Tie],
    *,
    step: int = 1,
    rank: int = 0,
    world_size: int = 1,
    values: bytes = b'["plain"]',
) -> Shard:
    """A shard with a page-aligned buffer; keys with '/' become paths."""
    entries, views, data = [], [], {}
    end = 0
    for key, given in parts.items():
        if isinstance(given, Tie):
            views.append(_view(key, given))
            continue
        part = given if isinstance(given, Part) else Part(given)
        tensor = part.tensor.contiguous()
        shape = tuple(tensor.shape)
        entries.append(
            TensorEntry(
                key=key,
                name=key,
                path=tuple(key.split("/")),
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=shape,
                global_shape=part.global_shape or shape,
                global_offset=part.offset or (0,) * len(shape),
                stride=contiguous_stride(shape),
                offset_bytes=end,
                size_bytes=tensor.nbytes,
                replica_id=part.replica_id,
                is_base=part.is_base,
            )
        )
        data[key] = tensor
        end = align(end + tensor.nbytes)
    layout = StateLayout(entries=tuple(entries), views=tuple(views), skeleton=b"{}")
    buffer = memoryview(mmap.mmap(-1, max(layout.size_bytes, 1)))
    for entry in entries:
        buffer[entry.offset_bytes : entry.end_bytes] = memory_of(data[entry.key])
    return Shard(
        layout=layout, values=values, step=step, rank=rank, world_size=world_size, buffer=buffer, run_id="run"
    )


def _view(key: str, tie: Tie) -> TensorView:
    shape = tuple(tie.tensor.shape)
    return TensorView(
        key=key,
        name=key,
        path=tuple(key.split("/")),
        base=tie.base,
        dtype=str(tie.tensor.dtype).removeprefix("torch."),
        shape=shape,
        stride=tie.tensor.stride(),
        offset_bytes=tie.offset_bytes,
        global_shape=shape,
        global_offset=(0,) * len(shape),
    )


def read_shard(reader: CheckpointReader, rank: int) -> Shard:
    """What a rank saved, read and verified as a restore does, but into the shard's own buffer."""
    shard = reader.open_shard(rank)
    assert shard.load is not None
    shard.load([(entry.offset_bytes, shard.read(entry)) for entry in shard.layout.entries])
    return replace(shard, load=None)


def content_of(root: Path, step: int, index: RankIndex, record: TensorRecord) -> torch.Tensor:
    """What is on disk where an index says that a part of a tensor is; nothing is verified."""
    dtype = getattr(torch, record.dtype)
    path = root / step_directory(step) / index.path_of(record.file)
    raw = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
    size_bytes = math.prod(record.shape) * dtype.itemsize
    content = raw[record.position : record.position + size_bytes]
    if record.position % dtype.itemsize:
        content = content.clone()
    return content.view(dtype).view(record.shape)


def folder_of(storage: Storage | Path, step: int) -> str:
    """Where the save that is committed at a step has its files, relative to the storage."""
    storage = LocalStorage(storage) if isinstance(storage, Path) else storage
    directory = step_directory(step)
    return f"{directory}/{read_manifest(storage, directory).folder}"


def file_in(directory: Path, name: str) -> Path:
    """The file of that name in a checkpoint, which may lie in the folder of its save."""
    (found,) = directory.rglob(name)
    return found


def small_shard(step: int, *, rank: int = 0, world_size: int = 1, seed: int = 0) -> Shard:
    """A few tensors whose content depends on step and rank."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + seed)
    return make_shard(
        {
            "model/weight": torch.randn(37, 11, generator=generator),
            "model/bias": torch.randn(5, generator=generator).to(torch.bfloat16),
            "optim/step": torch.tensor(float(step)),
            "optim/empty": torch.empty(0, 3),
        },
        step=step,
        rank=rank,
        world_size=world_size,
        values=random.Random(step).randbytes(40),  # noqa: S311
    )


def save(
    storage: Storage,
    format: CheckpointFormat[Shard],
    shards: Sequence[Shard],
    *,
    save_id: str = "attempt-0",
    run_id: str = "run",
    ranks: Sequence[int] | None = None,
    leads: bool = True,
    restored_save: str = "",
    try_number: int = 1,
    timeout: timedelta = timedelta(seconds=20),
    cancel: threading.Event | None = None,
    overtaken: threading.Event | None = None,
) -> Committed:
    """Save `shards` as one process that holds all of them."""
    ticket = SaveTicket(
        step=shards[0].step,
        run_id=run_id,
        save_id=save_id,
        world_size=shards[0].world_size,
        ranks=range(shards[0].world_size) if ranks is None else ranks,
        try_number=try_number,
        restored_save=restored_save,
        timeout=timeout,
        poll=timedelta(milliseconds=2),
    )
    by_rank = {shard.rank: shard for shard in shards}
    return commit(storage, format, ticket, by_rank, leads=leads, cancel=cancel, overtaken=overtaken)


def assert_holds(storage: Storage, shard: Shard) -> None:
    """`storage` gives back `shard` bit for bit."""
    found = read_shard(CheckpointReader(storage, shard.step), shard.rank)
    size = shard.layout.size_bytes
    assert found.layout.fingerprint == shard.layout.fingerprint
    assert found.values == shard.values
    assert found.step == shard.step
    for entry in shard.layout.entries:
        assert found.read(entry) == shard.read(entry), entry.key
    assert found.buffer.nbytes >= size


@contextmanager
def no_descriptor_left(pid: int = 0) -> Iterator[None]:
    """For a whole process, this one or another: what is open stays open."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
