# SPDX-License-Identifier: Apache-2.0
"""The table of a captured state: which tensor lies where in a slot, as plain values without torch.

A *slot* is one flat buffer.  A `TensorEntry` owns a byte range of it, holding one tensor in
row-major order.  Tensors that share memory in the training process are stored once: the others
are `TensorView`s, strided windows onto an entry.  Everything that is not a tensor is split in
two: the *skeleton* (the shape of the tree) belongs to the layout and is fixed as long as the
structure is; the *values* (step counters, learning rates, ...) travel with each save.

Invariant: two captures with equal `fingerprint` have the same tree, keys, dtypes, shapes and byte
ranges, so the bytes of one slot can be read with the layout of another.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from functools import cached_property
from typing import TypeVar

from resiliency.errors import CheckpointCorrupt, InternalError

LAYOUT_VERSION = 1
#: Entries start at multiples of this (a cache line; also the widest vector register).
ALIGNMENT_BYTES = 64

Path = tuple[str | int, ...]

_ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1, "float4_e2m1fn_x2": 1, "bits8": 1,
    **{f"{sign}int{bits}": 1 for sign in ("", "u") for bits in range(1, 8)},
    "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2, "bits16": 2,
    "int32": 4, "uint32": 4, "float32": 4, "complex32": 4,
    "int64": 8, "uint64": 8, "float64": 8, "complex64": 8,
    "complex128": 16,
}  # fmt: skip


def item_bytes(dtype: str) -> int:
    """Bytes per element of the torch dtype called `dtype` (such as ``bfloat16``).

    Raises:
        CheckpointCorrupt: no such dtype is known.
    """
    try:
        return _ITEM_BYTES[dtype]
    except KeyError:
        raise CheckpointCorrupt(
            f"unknown dtype {dtype!r} in a state layout; known are {', '.join(sorted(_ITEM_BYTES))}.",
            hint="Was the checkpoint written by a newer release?",
            dtype=dtype,
        ) from None


def align(size: int, to: int = ALIGNMENT_BYTES) -> int:
    """The smallest multiple of `to` that is not below `size`."""
    return -(-size // to) * to


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One stored tensor, or this rank's shard of one: a byte range of the slot.

    Units: `shape`, `stride`, `global_shape`, `global_offset` count elements.
    """

    #: Unique in the layout: the path joined by '/'.
    key: str
    #: What the tensor is called on every rank.  Shards of one global tensor share it, also when one
    #: rank holds several of them (stacked layers of Megatron).  Equal to `key` unless an adapter says more.
    name: str
    #: Where it stands in the state: dict keys (other than str and int as their repr), list positions.
    path: Path
    #: torch's name without ``torch.``, such as ``bfloat16``.
    dtype: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    #: Strides in the training process, to rebuild it; the bytes in the slot are always row-major.
    stride: tuple[int, ...]
    offset_bytes: int
    size_bytes: int
    #: 0: this rank owns the shard; others hold identical copies, which need not be persisted.
    replica_id: int = 0
    #: True: not a tensor of the state but memory that several `TensorView`s share.
    is_base: bool = False
    #: What a registered sharded type adds, sorted by name (Megatron's flattened_range, ...).
    attributes: tuple[tuple[str, str], ...] = ()

    @property
    def is_sharded(self) -> bool:
        """True if this rank holds only a part of the global tensor."""
        return self.shape != self.global_shape

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.size_bytes


@dataclass(frozen=True, kw_only=True)
class TensorView:
    """A tensor of the state whose bytes are part of an entry: a tied weight, a slice, an expand.

    Element (i, j, ...) lies `offset_bytes` + (i * stride[0] + j * stride[1] + ...) * item size after
    the start of the entry `base`.
    """

    key: str
    name: str
    path: Path
    #: Key of the entry that holds the bytes.
    base: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset_bytes: int
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: int = 0
    attributes: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class StateLayout:
    """Structure of one rank's state and its place in a slot.  Checked when it is made."""

    entries: tuple[TensorEntry, ...]
    views: tuple[TensorView, ...] = ()
    #: The tree without its tensors and values, see `resiliency.checkpoint.state.skeleton`.
    skeleton: bytes

    def __post_init__(self) -> None:
        keys: set[str] = set()
        for key in (*(entry.key for entry in self.entries), *(view.key for view in self.views)):
            if key in keys:
                raise CheckpointCorrupt(f"state layout names key {key!r} twice.", key=key)
            keys.add(key)
        end = 0
        for entry in self.entries:
            _check_entry(entry, after=end)
            end = entry.end_bytes
        for view in self.views:
            _check_view(view, self.by_key)

    @cached_property
    def by_key(self) -> Mapping[str, TensorEntry]:
        """The stored entries by key; views are not in it."""
        return {entry.key: entry for entry in self.entries}

    @cached_property
    def disk_names(self) -> Mapping[str, str]:
        """Key of each entry and view to its name in a checkpoint.

        What an adapter calls it on all ranks; else its path with dots, as `torch.distributed.checkpoint`
        names it.  Two paths may give one name ({"a": {"b": x}, "a.b": y}, or {1: x, "1": y}): all but
        the first get a number.
        """
        everything: tuple[TensorEntry | TensorView, ...] = (*self.entries, *self.views)
        named = {item.key: item.name for item in everything if item.name != item.key}
        names, taken = dict(named), set(named.values())
        bases = (entry for entry in self.entries if entry.is_base)  # last: nobody looks for them
        for item in (*self.tensors(), *bases):
            if item.key in named:
                continue
            wanted = name = ".".join(map(str, item.path))
            count = 1
            while name in taken:
                count += 1
                name = f"{wanted}~{count}"
            taken.add(name)
            names[item.key] = name
        return names

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of tensor data in a slot, alignment included."""
        return align(self.entries[-1].end_bytes) if self.entries else 0

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest over structure: tree, keys, dtypes, shapes, byte ranges; never over values."""
        return _digest(self._body())

    def tensors(self) -> Iterator[TensorEntry | TensorView]:
        """All tensors of the state, stored or view; without the bases that only views refer to."""
        yield from (entry for entry in self.entries if not entry.is_base)
        yield from self.views

    def to_json(self) -> str:
        """One line; `from_json` is its inverse."""
        return self._json

    @cached_property
    def _json(self) -> str:  # every save writes it
        return f"{_head(self.fingerprint)}{self._body()}}}"

    def _body(self) -> str:
        body = {
            "entries": [vars(entry) for entry in self.entries],
            "views": [vars(view) for view in self.views],
            "skeleton": self.skeleton.decode(),
        }
        return json.dumps(body, separators=(",", ":"), sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> StateLayout:
        """Read what `to_json` wrote.

        Raises:
            CheckpointCorrupt: not a layout, of another version, or its fingerprint does not match.
        """
        try:
            text = text if isinstance(text, str) else text.decode()
            document = json.loads(text)
            version = document["version"]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointCorrupt(f"not a state layout: {error!r}.") from error
        if version != LAYOUT_VERSION:
            raise CheckpointCorrupt(
                f"state layout has version {version!r}, this release reads {LAYOUT_VERSION}.",
                hint="Use the release that wrote it.",
                version=version,
            )
        try:
            body = document["layout"]
            layout = cls(
                entries=tuple(_from_fields(TensorEntry, fields) for fields in body["entries"]),
                views=tuple(_from_fields(TensorView, fields) for fields in body["views"]),
                skeleton=body["skeleton"].encode(),
            )
            expected = document["fingerprint"]
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointCorrupt(f"state layout has wrong or missing fields: {error!r}.") from error
        # Digest what was read, as `to_json` wrote it: to write it anew takes as long as all the rest.
        start = _head(str(expected))
        if text.startswith(start) and text.endswith("}"):
            layout.__dict__["fingerprint"] = _digest(text[len(start) : -1])
        if layout.fingerprint != expected:
            raise CheckpointCorrupt(
                f"state layout was altered: fingerprint {expected} expected, {layout.fingerprint} found."
            )
        return layout


@dataclass(frozen=True, kw_only=True, eq=False)
class Shard:
    """One rank's captured state: what is written, sent to a peer, or restored.

    `buffer` holds at least `layout.size_bytes` bytes and is valid until whoever lent the shard takes
    it back; `values` is a small blob (see `resiliency.checkpoint.state.skeleton`).
    """

    layout: StateLayout
    values: bytes
    step: int
    rank: int
    world_size: int
    buffer: memoryview
    #: Tells runs of one job apart; empty when unknown.
    run_id: str = ""
    #: Names the ranks whose shards are interchangeable: each may go on from the shard of any other.
    group: str = ""
    #: Brings, and verifies, all such ranges that are wanted, also those that belong into `buffer`, which may
    #: be empty memory until then.
    load: Callable[[Sequence[tuple[int, memoryview]]], None] | None = None

    def __post_init__(self) -> None:
        if self.buffer.nbytes < self.layout.size_bytes:
            raise CheckpointCorrupt(
                f"shard of rank {self.rank} at step {self.step} has {self.buffer.nbytes} bytes of tensors,"
                f" its layout needs {self.layout.size_bytes}.",
                rank=self.rank,
                step=self.step,
            )

    def read(self, entry: TensorEntry) -> memoryview:
        """The bytes of one entry, without a copy."""
        return self.buffer[entry.offset_bytes : entry.end_bytes]


def _head(fingerprint: str) -> str:
    """What stands before the body of a layout, in JSON."""
    return f'{{"version":{LAYOUT_VERSION},"fingerprint":"{fingerprint}","layout":'


def _digest(body: str) -> str:
    return hashlib.blake2b(body.encode(), digest_size=16).hexdigest()


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _check_entry(entry: TensorEntry, *, after: int) -> None:
    where = f"entry {entry.key!r} of a state layout"
    expected = math.prod(entry.shape) * item_bytes(entry.dtype)
    if min(entry.shape, default=0) < 0 or entry.size_bytes != expected:
        raise CheckpointCorrupt(
            f"{where} has {entry.size_bytes} bytes, {expected} expected for {entry.dtype} {entry.shape}.",
            key=entry.key,
        )
    if entry.offset_bytes % ALIGNMENT_BYTES or entry.offset_bytes < after:
        raise CheckpointCorrupt(
            f"{where} starts at byte {entry.offset_bytes}: not aligned, or inside the entry before it.",
            key=entry.key,
        )
    if len(entry.stride) != len(entry.shape):
        raise CheckpointCorrupt(f"{where} has {len(entry.stride)} strides for shape {entry.shape}.")


def _check_view(view: TensorView, entries: Mapping[str, TensorEntry]) -> None:
    base = entries.get(view.base)
    if base is None:
        raise CheckpointCorrupt(f"view {view.key!r} refers to entry {view.base!r}, which is missing.")
    last = -1 if 0 in view.shape else sum((n - 1) * s for n, s in zip(view.shape, view.stride, strict=True))
    end = view.offset_bytes + (last + 1) * item_bytes(view.dtype)
    if view.offset_bytes < 0 or min(view.stride, default=0) < 0 or end > base.size_bytes:
        raise CheckpointCorrupt(f"view {view.key!r} reaches outside entry {view.base!r}.", key=view.key)


_Record = TypeVar("_Record", TensorEntry, TensorView)


_PLAIN = {"str": str, "int": int, "bool": bool}


#: Of each class, by field: its plain type, or None, and its annotation.
_RULES: dict[type, dict[str, tuple[type | None, str]]] = {
    cls: {field.name: (_PLAIN.get(str(field.type)), str(field.type)) for field in dataclass_fields(cls)}
    for cls in (TensorEntry, TensorView)
}


def _from_fields(cls: type[_Record], fields: dict[str, object]) -> _Record:
    rules = _RULES[cls]
    if fields.keys() != rules.keys():
        wrong = sorted(fields.keys() ^ rules.keys())
        raise CheckpointCorrupt(f"{cls.__name__} in a state layout has missing or unknown fields {wrong}.")
    for name, (plain, kind) in rules.items():
        if type(fields[name]) is not plain:
            fields[name] = _checked(name, kind, fields[name])
    # For thousands of tensors, while a job waits: `cls(**fields)` takes three times as long.
    record = object.__new__(cls)
    record.__dict__.update(fields)
    return record


def _checked(name: str, kind: str, value: object) -> object:
    """`value` from JSON as the annotated type `kind`, which is no plain one, or TypeError."""
    if kind in _PLAIN:
        raise TypeError(f"{name} must be {kind}, found {value!r}")
    if not isinstance(value, list):
        raise TypeError(f"{name} must be a list, found {value!r}")
    if kind == "tuple[int, ...]":
        if not {*map(type, value)} <= {int}:
            raise TypeError(f"{name} must hold whole numbers, found {value!r}")
        return tuple(value)
    if kind == "Path":
        if not {*map(type, value)} <= {str, int}:
            raise TypeError(f"{name} must hold names and positions, found {value!r}")
        return tuple(value)
    if kind != "tuple[tuple[str, str], ...]":
        raise InternalError(f"no rule to read a field of type {kind}.")
    if not all(isinstance(p, list) and len(p) == 2 and all(type(s) is str for s in p) for p in value):
        raise TypeError(f"{name} must hold pairs of texts, found {value!r}")
    return tuple(tuple(pair) for pair in value)
