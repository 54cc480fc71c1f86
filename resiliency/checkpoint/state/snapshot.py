# SPDX-License-Identifier: Apache-2.0
"""From a nested state to a layout and its sources; `resiliency.checkpoint.state.fill` is the way back.

`StateWalker` keeps the structure of the state that it saw last.  As long as the structure holds, a
save is one walk that picks up tensors and values; any difference (a key, a shape, a stride, a tie
between two tensors) makes a new layout with another fingerprint, so nothing is ever saved under a
layout that does not fit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from resiliency.checkpoint.state.aliases import stored_tensors
from resiliency.checkpoint.state.layout import Path, StateLayout
from resiliency.checkpoint.state.skeleton import Builder, to_bytes, tree_of
from resiliency.checkpoint.state.skeleton import sharded_objects as skeleton_objects
from resiliency.checkpoint.state.tensors import Leaf, Placement
from resiliency.checkpoint.state.tree import Gathered, Node, StructureChanged, TensorNode
from resiliency.checkpoint.state.values import (
    Allowed,
    decode,
    dump_values,
    load_values,
    names_in,
    opaque_parts,
)
from resiliency.errors import ConfigError


@dataclass(frozen=True)
class Snapshot:
    """One state at one moment: its layout, the live memory of each entry, and its values.

    `sources[i]` holds the bytes of `layout.entries[i]`; it is the memory of the state, not a copy.
    """

    layout: StateLayout
    sources: tuple[torch.Tensor, ...]
    values: bytes
    #: The same object as in an earlier snapshot if all sources are at the same addresses.
    addresses: object
    #: Of each entry the tensors whose versions count what is written to its source.
    written: tuple[tuple[torch.Tensor, ...], ...]


class StateWalker:
    """Takes snapshots of one state, cheaply while its structure does not change.

    Args:
        replica_id: of plain tensors: 0 if this rank owns them, else they are copies of another
            rank's (data-parallel rank, for plain DDP).
        allow: classes that a restart will allow, see `resiliency.checkpoint.state.values`: a state that names
            others is refused; None: nothing is known of a restart.
    """

    def __init__(self, *, replica_id: int = 0, allow: Iterable[type | str] | None = None) -> None:
        self._replica_id = replica_id
        self._allowed = None if allow is None else Allowed(allow)
        #: Opaque values of the last snapshot, and where values are in the state.
        self._opaque: set[str] = set()
        self._places: list[Path] = []
        self._root: Node | None = None
        self._nodes: list[TensorNode] = []
        self._skeleton = b""
        self._signature: list[Any] = []
        self._layout: StateLayout | None = None
        self._order: list[int] = []

    @torch.no_grad()
    def snapshot(self, state: object) -> Snapshot:
        """Walk `state`.

        Raises:
            ConfigError: something in it cannot be saved; the text names it.
        """
        gathered = self._gather(state)
        signature = [_signature(leaf) for leaf in gathered.leaves]
        values = dump_values(gathered.values)
        if self._allowed is not None and (self._opaque or b'{"pickle":' in values):
            self._check_restorable(gathered.values, self._allowed)
        if self._layout is not None and signature == self._signature and -1 not in self._order:
            leaves = [gathered.leaves[i] for i in self._order]
            sources, written = tuple(leaf.raw for leaf in leaves), tuple(leaf.written for leaf in leaves)
            return Snapshot(self._layout, sources, values, self._signature, written)
        stored = stored_tensors(self._nodes, gathered.leaves, replica_id=self._replica_id)
        layout = StateLayout(
            entries=tuple(item.entry for item in stored),
            views=tuple(view for item in stored for view in item.views),
            skeleton=self._skeleton,
        )
        if self._layout is None or layout.fingerprint != self._layout.fingerprint:
            self._layout = layout
        # Where the same structure sits in new memory only the addresses differ.
        self._signature = signature
        position = {node.key: i for i, node in enumerate(self._nodes)}
        self._order = [position.get(item.entry.key, -1) for item in stored]
        written = tuple(
            (item.source,) if i < 0 else gathered.leaves[i].written
            for i, item in zip(self._order, stored, strict=True)
        )
        return Snapshot(self._layout, tuple(item.source for item in stored), values, signature, written)

    def _gather(self, state: object) -> Gathered:
        if self._root is not None:
            gathered = Gathered()
            try:
                self._root.gather(state, gathered)
                return gathered
            except StructureChanged:
                pass
        builder = Builder()
        self._root = builder.build(state)
        self._places = builder.places
        self._nodes, self._skeleton, self._layout = builder.nodes, to_bytes(self._root), None
        gathered = Gathered()
        try:
            self._root.gather(state, gathered)
        except StructureChanged:
            raise ConfigError(
                "the state changes its structure each time it is asked for.",
                hint="A state_dict() in it returns different keys or types at each call.",
            ) from None
        return gathered

    def _check_restorable(self, values: list[Any], allowed: Allowed) -> None:
        """Refuse what would be refused when it is restored, as long as that costs nothing."""
        opaque = set()
        for index, value in enumerate(values):
            for path, data in opaque_parts(value):
                opaque.add(data)
                if data in self._opaque:
                    continue
                refused = sorted(name for name in names_in(data) if not allowed.permits(name))
                if refused:
                    place = "/".join(map(str, (*self._places[index], *path))) or "the state"
                    raise ConfigError(
                        f"{place}: a checkpoint of this object could not be restored: it names"
                        f" {', '.join(refused)}, not on the list of allowed classes.",
                        hint=f"Allow it, now and at restarts: options=CheckpointerOptions(allow={refused!r})."
                        "  Or save plain values, or leave it out of the state.",
                        names=refused,
                    )
        self._opaque = opaque


def _signature(leaf: Leaf) -> Any:
    raw = leaf.raw
    lazy = raw.is_conj(), raw.is_neg()
    return raw.data_ptr(), raw.dtype, raw.shape, raw.stride(), raw.device, leaf.placement, lazy


def sharded_objects(
    layout: StateLayout, values: bytes, *, allow: Iterable[type | str] = ()
) -> list[tuple[Placement, Any]]:
    """The objects of registered sharded types that hold no tensor, with their place: for other formats."""
    found, allowed = load_values(values), Allowed(allow)
    nodes = skeleton_objects(tree_of(layout.skeleton))
    return [(node.placement, decode(found[node.index], allowed)) for node in nodes]
