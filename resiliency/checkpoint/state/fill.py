# SPDX-License-Identifier: Apache-2.0
"""From what was stored back into a state: into the tensors that are there, or into new ones."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch

from resiliency.checkpoint.state.aliases import dtype_name, has_its_memory
from resiliency.checkpoint.state.copying import Copier, Piece, memory_pieces, pieces
from resiliency.checkpoint.state.layout import Shard, StateLayout, TensorEntry, TensorView, item_bytes
from resiliency.checkpoint.state.rank_sets import mesh_of, named, ranks_of
from resiliency.checkpoint.state.skeleton import from_bytes
from resiliency.checkpoint.state.staging import threads_to_device
from resiliency.checkpoint.state.tensors import Placement
from resiliency.checkpoint.state.values import (
    Allowed,
    Put,
    decode,
    dtype_called,
    load_values,
)
from resiliency.checkpoint.storage.memory import address_of, is_populated, populate
from resiliency.checkpoint.threads import start_thread
from resiliency.errors import CheckpointCorrupt, CheckpointError, LayoutMismatch, ResourceShortage

logger = logging.getLogger(__name__)

#: Smaller memory is populated as it is filled.
_POPULATE_FROM_BYTES = 1 << 20


@dataclass
class RestoreJob:
    """Where the bytes of one entry go.  What it says of its targets holds once it has them all."""

    entry: TensorEntry
    targets: list[tuple[TensorEntry | TensorView, torch.Tensor]] = field(default_factory=list)

    @cached_property
    def memory(self) -> memoryview | None:
        """Host memory that the entry's bytes may be read straight into; None: go through a buffer."""
        raw = self.direct
        if raw is None:
            return None
        return memoryview((ctypes.c_char * raw.nbytes).from_address(raw.data_ptr())).cast("B")

    def pieces(self, data: memoryview, *, filled: bool = False) -> Iterable[Piece]:
        """Copies from the entry's bytes into the targets; `filled`: not into `memory`, it has them."""
        if not self.entry.size_bytes:
            return
        flat = torch.frombuffer(data, dtype=torch.uint8)
        direct = self.direct if filled else None
        for item, raw in self.targets:
            if raw is not direct:
                yield from pieces(raw.detach(), stored_as(item, flat))

    @cached_property
    def direct(self) -> torch.Tensor | None:
        """The target whose memory is exactly the entry's bytes."""
        for item, raw in self.targets:
            lazy = raw.is_conj() or raw.is_neg()
            if item is self.entry and raw.device.type == "cpu" and raw.is_contiguous() and not lazy:
                return raw
        return None


def stored_as(item: TensorEntry | TensorView, flat: torch.Tensor) -> torch.Tensor:
    """An entry, or a view of it, as a tensor on the entry's bytes `flat`."""
    if isinstance(item, TensorEntry):
        return flat.view(dtype_called(item.dtype)).view(item.shape)
    usable = flat[item.offset_bytes :]
    usable = usable[: usable.numel() // item_bytes(item.dtype) * item_bytes(item.dtype)]
    typed = usable.view(dtype_called(item.dtype))
    return typed.as_strided(item.shape, item.stride, typed.storage_offset())


class Targets:
    """Memory that is to be filled from the tensors of one layout, by key.

    Args:
        own: the layout is of the rank that restores, and not of another of its group.
    """

    def __init__(self, layout: StateLayout, *, own: bool = False) -> None:
        self._layout = layout
        self._own = own
        self._items: dict[str, TensorEntry | TensorView] = {item.key: item for item in layout.tensors()}
        self._targets: list[tuple[TensorEntry | TensorView, torch.Tensor]] = []

    def target(self, key: str, raw: torch.Tensor, placement: Placement | None = None) -> None:
        """Let the bytes of `key` be read into `raw`.

        Args:
            placement: of the part that `raw` is; None: `raw` is a whole tensor, or the caller has compared.
        Raises:
            LayoutMismatch: shape, dtype or place differ; the text names both.
        """
        item = self._item(key)
        if tuple(raw.shape) != item.shape:
            raise LayoutMismatch(
                f"{key}: the checkpoint holds shape {item.shape},"
                f" the state to restore has {tuple(raw.shape)}.",
                hint="Is this the same model configuration and parallel layout?",
                key=key,
                expected_shape=item.shape,
                found_shape=tuple(raw.shape),
            )
        if dtype_name(raw) != item.dtype:
            raise LayoutMismatch(
                f"{key}: the checkpoint holds {item.dtype} {item.shape},"
                f" the state to restore has {dtype_name(raw)}.",
                key=key,
                expected_shape=item.shape,
                found_shape=tuple(raw.shape),
            )
        if not has_its_memory(raw):
            raise LayoutMismatch(
                f"{key}: the storage of the tensor to restore is smaller than the tensor, as after resize_.",
                hint="Give it its memory back first.",
                key=key,
            )
        if placement is not None:
            self.check_place(key, placement)
        self._targets.append((item, raw))

    def check_place(self, key: str, placement: Placement) -> None:
        """Raise LayoutMismatch unless the part saved as `key` is the part of its tensor at `placement`."""
        item = self._item(key)
        saved = (item.global_shape, item.global_offset)
        found = (tuple(placement.global_shape), tuple(placement.global_offset))
        if saved != found:
            raise LayoutMismatch(
                f"{key}: the checkpoint holds for this rank the part of a tensor {saved[0]} that begins at"
                f" {saved[1]}, the state to restore has that of a tensor {found[0]} at {found[1]}.",
                hint="Is this the same parallel layout, with its ranks in the same order?",
                key=key,
                expected_shape=item.shape,
                found_shape=item.shape,
                expected_offset=saved[1],
                found_offset=found[1],
            )
        # Of a replica the ranks that have it are all that tells it from that of another pipeline stage.
        meshes = mesh_of(item.attributes), mesh_of(placement.attributes)
        if self._own and all(meshes) and meshes[0] != meshes[1]:
            with_ranks, now_with = (named(ranks_of(mesh)) for mesh in meshes)
            raise LayoutMismatch(
                f"{key}: the checkpoint holds a tensor of ranks {with_ranks},"
                f" the state to restore has one of ranks {now_with}.",
                hint="Is this the same parallel layout, with its ranks in the same order?",
                key=key,
                expected_shape=item.shape,
                found_shape=item.shape,
            )

    def mark(self) -> int:
        return len(self._targets)

    def forget(self, mark: int) -> None:
        del self._targets[mark:]

    def _item(self, key: str) -> TensorEntry | TensorView:
        try:
            return self._items[key]
        except KeyError:
            raise CheckpointCorrupt(
                f"the checkpoint's tree names tensor {key!r}, its table does not."
            ) from None

    @cached_property
    def jobs(self) -> list[RestoreJob]:
        """What has to be filled, by entry, once all targets are named; entries that nobody wants are left
        out."""
        jobs: dict[str, RestoreJob] = {}
        seen: set[Any] = set()
        for item, raw in self._targets:
            where = (raw.data_ptr(), raw.dtype, raw.shape, raw.stride(), raw.device)
            if raw.numel() == 0 or where in seen:
                continue
            seen.add(where)
            base = item.base if isinstance(item, TensorView) else item.key
            job = jobs.setdefault(base, RestoreJob(self._layout.by_key[base]))
            job.targets.append((item, raw))
        return list(jobs.values())


class Restore(Targets):
    """A restore in three acts: find the targets (here), fill them (anyone), `finish`.

    Args:
        allow: classes that the checkpoint may name, see `resiliency.checkpoint.state.values`.
        into: a state of the same structure, whose tensors are to be filled in place; None makes a
            new state on the host (DTensors and registered sharded types come back as their local part).
        partial: `into` may lack parts that were saved, and have others, which stay as they are.
        own: see `Targets`.
    Raises:
        LayoutMismatch: `into` differs; the text names the key and both sides.
        ConfigError: a class is not allowed.
    """

    def __init__(
        self,
        layout: StateLayout,
        values: bytes,
        *,
        into: object = None,
        allow: Iterable[type | str] = (),
        partial: bool = False,
        own: bool = False,
    ) -> None:
        super().__init__(layout, own=own)
        self.partial: bool | None = partial
        self.allowed = Allowed(allow)
        self._values = load_values(values)
        self._fresh: dict[str, torch.Tensor] = {}
        self.putting = Put()
        root = from_bytes(layout.skeleton)
        self._finish: Callable[[], Any]
        with torch.no_grad():
            if into is None:
                made = root.rebuild(self)
                self._finish = lambda: made
            else:
                self._finish = root.restore(into, self, ())

    def forget(self, mark: int) -> None:
        """Also the new tensors among them, which nothing would fill."""
        dropped = {id(raw) for _, raw in self._targets[mark:]}
        self._fresh = {key: made for key, made in self._fresh.items() if id(made) not in dropped}
        super().forget(mark)

    def value(self, index: int) -> Any:
        if not 0 <= index < len(self._values):
            raise CheckpointCorrupt(
                f"the checkpoint has {len(self._values)} values, number {index} is missing."
            )
        return decode(self._values[index], self.allowed)

    def fresh(self, key: str) -> torch.Tensor:
        item = self._item(key)
        base = self._layout.by_key[item.base] if isinstance(item, TensorView) else item
        made = self._fresh.get(base.key)
        if made is None:
            made = self._fresh[base.key] = _allocate(base)
            self._targets.append((base, made))
        if isinstance(item, TensorEntry):
            return made
        if not made.is_contiguous():  # only equal tensors are views of such an entry
            return made.detach()
        flat = torch.empty(0, dtype=torch.uint8).set_(made.untyped_storage(), 0, (base.size_bytes,), (1,))
        return stored_as(item, flat)

    def finish(self) -> Any:
        """Once all bytes are in place: the restored state (the object given as `into`, if mutable)."""
        with torch.no_grad():
            return self._finish()


def _allocate(entry: TensorEntry) -> torch.Tensor:
    dtype = dtype_called(entry.dtype)
    stride = entry.stride
    dense = sorted((s, n) for s, n in zip(stride, entry.shape, strict=True) if n > 1)
    expected = 1
    for step, size in dense:
        if step != expected:
            return torch.empty(entry.shape, dtype=dtype)
        expected *= size
    return torch.empty_strided(entry.shape, stride, dtype=dtype)


def restore_into(
    state: object,
    shard: Shard,
    *,
    allow: Iterable[type | str] = (),
    threads: int = 2,
    timeout: timedelta = timedelta(minutes=30),
) -> Any:
    """Fill the tensors of `state` from memory, in parallel, and set its values.

    Returns `state`, or its replacement where it is immutable (a tuple of numbers).  If this raises
    LayoutMismatch, nothing was changed; after any other failure the state is partly overwritten.

    Raises:
        LayoutMismatch: the text names the key and both sides.
        ConfigError: the shard names a class that is not allowed.
        CheckpointError: an object, such as an optimizer with other parameter groups, refused its state.
    """
    return plan_restore(state, shard, allow=allow, threads=threads, timeout=timeout)()


def plan_restore(
    state: object,
    shard: Shard,
    *,
    allow: Iterable[type | str] = (),
    partial: bool = False,
    own: bool = False,
    threads: int = 2,
    timeout: timedelta = timedelta(minutes=30),
) -> Callable[[], Any]:
    """The first half of `restore_into`, which changes nothing, for ranks that first agree; returns the other.

    With `partial`, dicts of `state` may lack keys that were saved, and have others, which stay as they are.
    `own` says that this rank saved the shard, or takes its place: then tensors must also be shared with the
    same ranks.  Raises as `restore_into`.
    """
    restore = Restore(shard.layout, shard.values, into=state, allow=allow, partial=partial, own=own)
    populating = _populate_beside(restore)

    def act() -> Any:
        _fill(restore, shard, threads, timeout)
        populating()
        return restore.finish()

    return act


def materialize(
    shard: Shard,
    *,
    allow: Iterable[type | str] = (),
    threads: int = 2,
    timeout: timedelta = timedelta(minutes=30),
) -> Any:
    """The state that `shard` holds, as new objects on the host.

    Modules and optimizers come back as their state dicts.

    Raises:
        ConfigError: the shard names a class that is not allowed.
    """
    restore = Restore(shard.layout, shard.values, allow=allow)
    _fill(restore, shard, threads, timeout)
    return restore.finish()


def plan_restore_tensors(
    shard: Shard,
    targets: Iterable[tuple[str, torch.Tensor]],
    *,
    threads: int = 2,
    timeout: timedelta = timedelta(minutes=30),
) -> Callable[[], None]:
    """Tensors by their keys in the layout, for adapters whose state to fill is another tree; returns what
    fills them.

    Raises:
        LayoutMismatch: dtype or shape of a tensor differ; nothing was changed.
    """
    wanted = Targets(shard.layout)
    for key, raw in targets:
        wanted.target(key, raw)
    populating = _populate_beside(wanted)

    def act() -> None:
        _fill(wanted, shard, threads, timeout)
        populating()

    return act


def _populate_beside(targets: Targets) -> Callable[[], None]:
    """Take the page faults of memory that is to be filled, in a thread: while ranks agree, and then ahead of
    what is read into it.  Returns what waits for the end of that.

    New tensors, such as the state of an optimizer that has not stepped, are memory that the kernel still has
    to find and clear, which takes longer than to fill it from memory or from a fast disk.
    """
    memories = [memory for job in targets.jobs if (memory := job.memory) is not None]
    large = [each for each in memories if each.nbytes >= _POPULATE_FROM_BYTES and not is_populated(each)]
    if not large:
        return lambda: None

    def run(keep: Targets) -> None:  # the memory, which may be dropped by all others
        for memory in large:
            if not populate(memory):
                return

    thread = threading.Thread(target=run, args=(targets,), name="resiliency-restore-memory", daemon=True)
    try:
        start_thread(thread)
    except ResourceShortage as error:  # it only saves time, and other ranks wait for this one
        logger.info("memory to restore into is not prepared ahead: %s", error)
        return lambda: None
    return thread.join


def _fill(targets: Targets, shard: Shard, threads: int, timeout: timedelta) -> None:
    devices = {raw.device for job in targets.jobs for _, raw in job.targets if raw.is_cuda}
    for device in devices:
        # The copies run on streams of their own; what initialized the targets may still run on another.
        torch.cuda.synchronize(device)
    if devices:
        threads = max(threads, threads_to_device())
    with Copier(threads) as copier, torch.no_grad():
        buffer = _writable(shard.buffer)
        if shard.load is not None:
            shard.load([_place(job, buffer) for job in targets.jobs])
        run = copier.start(list(_work(targets.jobs, shard, buffer)), keep=(targets, buffer))
        if not run.wait(timeout):
            run.stop()
            raise CheckpointError(f"restoring from memory did not end within {timeout}.", step=shard.step)


def _place(job: RestoreJob, buffer: memoryview) -> tuple[int, memoryview]:
    """Which bytes a job needs, and where they come first: into the tensor itself where that is possible."""
    entry, memory = job.entry, job.memory
    return entry.offset_bytes, buffer[entry.offset_bytes : entry.end_bytes] if memory is None else memory


def _work(jobs: list[RestoreJob], shard: Shard, buffer: memoryview) -> Iterable[Piece]:
    base = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr() if buffer.nbytes else 0
    for job in jobs:
        entry, memory = job.entry, job.memory
        data = buffer[entry.offset_bytes : entry.end_bytes]
        if memory is not None and shard.load is not None:
            data = memory  # where it was loaded to
        elif memory is not None:
            yield from memory_pieces(address_of(memory), base + entry.offset_bytes, entry.size_bytes)
        if memory is None or len(job.targets) > 1:
            yield from job.pieces(data, filled=memory is not None)


def _writable(data: memoryview) -> memoryview:
    # torch has no read-only tensors and warns; a reader of an arena lends writable private memory.
    return memoryview(bytearray(data)) if data.readonly else data
