# SPDX-License-Identifier: Apache-2.0
"""Tensors that share memory are stored once: from leaves to entries and views.

Leaves whose address ranges overlap form a group.  A group is stored as

- one tensor, if one contiguous member covers all others, or if all members are equal;
- else the bytes that the members span, as an entry of its own that all of them view.

A tensor that overlaps itself (`torch.Tensor.expand`) is a group of one.  Tensors that share a storage without
overlapping are independent: they come back with equal contents and separate storages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from resiliency.checkpoint.state.layout import TensorEntry, TensorView, align, contiguous_stride
from resiliency.checkpoint.state.tensors import Leaf, Placement, refuse
from resiliency.checkpoint.state.tree import TensorNode

#: A span is only stored as a whole if it is not much larger than the members, or they truly overlap.
_MAX_WASTE = 2


@dataclass(frozen=True)
class Member:
    """A leaf with its address range; `end` is behind its last byte."""

    position: int
    node: TensorNode
    leaf: Leaf
    start: int
    end: int

    @property
    def raw(self) -> torch.Tensor:
        return self.leaf.raw


@dataclass(frozen=True)
class Stored:
    """An entry (its offset still to be assigned), the memory it is copied from, its views."""

    entry: TensorEntry
    source: torch.Tensor
    views: tuple[TensorView, ...] = ()


def stored_tensors(nodes: Sequence[TensorNode], leaves: Sequence[Leaf], *, replica_id: int) -> list[Stored]:
    """What a slot holds for these leaves, in the order of the walk, at offsets from 0.

    Args:
        replica_id: of tensors that have no placement of their own.
    Raises:
        ConfigError: the memory of one was freed; the text names it.
    """
    members = [_member(i, node, leaf) for i, (node, leaf) in enumerate(zip(nodes, leaves, strict=True))]
    groups = sorted(_groups(members), key=lambda group: min(m.position for m in group))
    result: list[Stored] = []
    offset = 0
    for group in groups:
        for stored in _store(group, replica_id):
            entry = replace(stored.entry, offset_bytes=align(offset))
            result.append(replace(stored, entry=entry))
            offset = entry.end_bytes
    return result


def _member(position: int, node: TensorNode, leaf: Leaf) -> Member:
    raw = leaf.raw
    if not has_its_memory(raw):
        refuse(raw, node.path, "has lost its memory: its storage is smaller than it is, as after a resize_")
    start = raw.data_ptr() if raw.numel() else 0
    return Member(position, node, leaf, start, start + span_bytes(raw))


def span_bytes(raw: torch.Tensor) -> int:
    """Bytes from the first element of a strided tensor to behind its last one, gaps included."""
    if raw.numel() == 0:
        return 0
    last = sum((n - 1) * s for n, s in zip(raw.shape, raw.stride(), strict=True))
    return (last + 1) * raw.element_size()


def has_its_memory(raw: torch.Tensor) -> bool:
    """Whether all of it is within its storage, which may have been freed under it."""
    storage = raw.untyped_storage()
    return raw.storage_offset() * raw.element_size() + span_bytes(raw) <= storage.nbytes()


def _groups(members: Iterable[Member]) -> list[list[Member]]:
    alone: list[list[Member]] = []
    shared: list[Member] = []
    for member in members:
        # A lazily conjugated tensor is not what its memory holds.
        lazy = member.raw.is_conj() or member.raw.is_neg()
        if member.end == member.start or lazy:
            alone.append([member])
        else:
            shared.append(member)
    shared.sort(key=lambda m: (str(m.raw.device), m.start, -m.end))
    groups: list[list[Member]] = []
    reach = 0
    for member in shared:
        if groups and groups[-1][0].raw.device == member.raw.device and member.start < reach:
            groups[-1].append(member)
            reach = max(reach, member.end)
        else:
            groups.append([member])
            reach = member.end
    return alone + groups


def _store(group: list[Member], replica_id: int) -> list[Stored]:
    group.sort(key=lambda m: m.position)
    first = group[0]
    start, end = min(m.start for m in group), max(m.end for m in group)
    folded = first.raw.nbytes > first.end - first.start  # overlaps itself
    if not folded and all(_same(first, other) for other in group):
        stride = contiguous_stride(tuple(first.raw.shape))
        views = tuple(_view(m, first.node.key, 0, stride, replica_id) for m in group[1:])
        return [Stored(_entry(first, replica_id), first.raw, views)]
    cover = next((m for m in group if _covers(m, group, start, end)), None)
    if cover is not None:
        rest = [m for m in group if m is not cover]
        views = tuple(_member_view(m, cover.node.key, start, replica_id) for m in rest)
        return [Stored(_entry(cover, replica_id), cover.raw, views)]
    wasteful = end - start > _MAX_WASTE * sum(m.raw.nbytes for m in group)
    if wasteful and _disjoint(group, start, end):
        return [Stored(_entry(m, replica_id), m.raw) for m in group]
    return _span_of(group, start, end, replica_id)


def _covers(member: Member, group: list[Member], start: int, end: int) -> bool:
    return (
        (member.start, member.end) == (start, end)
        and member.raw.is_contiguous()
        and not any((m.start - start) % m.raw.element_size() for m in group)
    )


def _same(a: Member, b: Member) -> bool:
    return (
        a.start == b.start
        and a.raw.dtype == b.raw.dtype
        and a.raw.shape == b.raw.shape
        and a.raw.stride() == b.raw.stride()
    )


def _disjoint(group: list[Member], start: int, end: int) -> bool:
    used = torch.zeros(end - start, dtype=torch.uint8)
    for member in group:
        size, raw = member.raw.element_size(), member.raw
        shape, stride = (*raw.shape, size), (*(s * size for s in raw.stride()), 1)
        part = used.as_strided(shape, stride, member.start - start)
        if bool(part.any()):
            return False
        part.fill_(1)
    return int(used.count_nonzero()) == sum(m.raw.nbytes for m in group)


def _span_of(group: list[Member], start: int, end: int, replica_id: int) -> list[Stored]:
    first = min(group, key=lambda m: m.start)
    # Views are rebuilt at multiples of their item size, which memory from an allocator grants only
    # relative to an address as aligned as the widest item.
    start -= start % 16
    storage = first.raw.untyped_storage()
    start = max(start, storage.data_ptr())
    size = end - start
    if end > storage.data_ptr() + storage.nbytes():
        # Overlapping wrappers of foreign memory (numpy's): no storage holds the span.
        return [Stored(_entry(m, replica_id), m.raw) for m in group]
    source = torch.empty(0, dtype=torch.uint8, device=first.raw.device)
    source.set_(storage, start - storage.data_ptr(), (size,), (1,))
    key = f"{group[0].node.key}#memory"
    entry = TensorEntry(
        key=key, name=key, path=(*group[0].node.path, "#memory"), dtype="uint8", shape=(size,),
        global_shape=(size,), global_offset=(0,), stride=(1,), offset_bytes=0, size_bytes=size,
        replica_id=replica_id, is_base=True,
    )  # fmt: skip
    return [Stored(entry, source, tuple(_member_view(m, key, start, replica_id) for m in group))]


def _placement(member: Member, replica_id: int) -> Placement:
    shape = tuple(member.raw.shape)
    return member.leaf.placement or Placement(
        global_shape=shape, global_offset=(0,) * len(shape), replica_id=replica_id
    )


def dtype_name(tensor: torch.Tensor) -> str:
    """torch's name without its prefix."""
    return str(tensor.dtype).removeprefix("torch.")


def _entry(member: Member, replica_id: int) -> TensorEntry:
    raw, place = member.raw, _placement(member, replica_id)
    return TensorEntry(
        key=member.node.key, name=place.name or member.node.key, path=member.node.path,
        dtype=dtype_name(raw), shape=tuple(raw.shape), stride=tuple(raw.stride()),
        global_shape=place.global_shape, global_offset=place.global_offset,
        offset_bytes=0, size_bytes=raw.nbytes, replica_id=place.replica_id, attributes=place.attributes,
    )  # fmt: skip


def _member_view(member: Member, base: str, start: int, replica_id: int) -> TensorView:
    return _view(member, base, member.start - start, tuple(member.raw.stride()), replica_id)


def _view(
    member: Member, base: str, offset_bytes: int, stride: tuple[int, ...], replica_id: int
) -> TensorView:
    place = _placement(member, replica_id)
    return TensorView(
        key=member.node.key, name=place.name or member.node.key, path=member.node.path, base=base,
        dtype=dtype_name(member.raw), shape=tuple(member.raw.shape), stride=stride,
        offset_bytes=offset_bytes, global_shape=place.global_shape, global_offset=place.global_offset,
        replica_id=place.replica_id, attributes=place.attributes,
    )  # fmt: skip
