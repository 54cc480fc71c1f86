# SPDX-License-Identifier: Apache-2.0
"""Whether what lies under one name on several meshes is the same: by its bytes.

A weight that tensor parallelism leaves whole and the experts of expert parallelism look alike: a tensor of
one name on each of several meshes, all within a larger mesh of the program.  The former are copies, the
latter are not, and nothing but their content tells.  So each rank notes, for each such mesh, a checksum of
what it writes of the tensors there; meshes whose ranks noted the same hold copies.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping

from resiliency.checkpoint.state.layout import Shard, StateLayout, TensorEntry, TensorView
from resiliency.checkpoint.state.rank_sets import mesh_of, ranks_of
from resiliency.checkpoint.storage.checksums import DEFAULT_ALGORITHM, digest_function

#: Mesh to the tensors on it.
_OnMeshes = Mapping[str, list[TensorEntry | TensorView]]


def within_others(layout: StateLayout) -> _OnMeshes:
    """The tensors of a rank by their mesh, for each mesh that is not around all others of the rank."""
    found: dict[str, list[TensorEntry | TensorView]] = defaultdict(list)
    for item in layout.tensors():
        if mesh := mesh_of(item.attributes):
            found[mesh].append(item)
    ranks = {mesh: frozenset(ranks_of(mesh)) for mesh in found}
    everything = frozenset().union(*ranks.values())
    return {mesh: items for mesh, items in found.items() if ranks[mesh] != everything}


def checksums(shard: Shard, on_meshes: _OnMeshes) -> dict[str, str]:
    """Of what the rank of `shard` writes of the tensors on each of the meshes."""
    checksum = digest_function(DEFAULT_ALGORITHM)
    found = {}
    for mesh, items in on_meshes.items():
        content: list[object] = []
        for item in items:
            if item.replica_id == 0:
                entry = item if isinstance(item, TensorEntry) else shard.layout.by_key[item.base]
                window = () if isinstance(item, TensorEntry) else (item.offset_bytes, item.stride)
                name = shard.layout.disk_names[item.key]
                digest = checksum(shard.read(entry))
                content.append((name, item.global_offset, item.shape, window, digest))
        text = json.dumps(content).encode()
        found[mesh] = hashlib.blake2b(text, digest_size=16).hexdigest()
    return found
