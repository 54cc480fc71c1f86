# SPDX-License-Identifier: Apache-2.0
"""The shard that holds a state."""

from __future__ import annotations

import mmap

from resiliency.checkpoint.format.torch_record import memory_of
from resiliency.checkpoint.state.layout import Shard
from resiliency.checkpoint.state.snapshot import StateWalker


def shard_of(state: object) -> Shard:
    snapshot = StateWalker().snapshot(state)
    buffer = memoryview(mmap.mmap(-1, max(snapshot.layout.size_bytes, 1)))
    for entry, source in zip(snapshot.layout.entries, snapshot.sources, strict=True):
        buffer[entry.offset_bytes : entry.end_bytes] = memory_of(source.detach().contiguous())
    return Shard(layout=snapshot.layout, values=snapshot.values, step=7, rank=0, world_size=1, buffer=buffer)
