# SPDX-License-Identifier: Apache-2.0
"""How long a restart waits for its state: from its own disks, or after one of the hosts was lost.

Each function runs in both ranks at once and returns this rank's seconds.  The page cache is emptied
before.  Both ranks read at the same time in all of them, so that the disk has the same work each time.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from ckpt_limits import drop_from_cache
from ckpt_training import Training
from replication_hosts import HOSTS, STEP, Place, Saved, host_name, saved_files

from resiliency.checkpoint import RankArena, Shard, Tier, plan_restore
from resiliency.checkpoint.ranks import RankGroup
from resiliency.checkpoint.recovery.restore import Restorer

Figures = dict[str, float]
_PIECE_BYTES = 8 << 20


def raw_read(rank: int, place: Place) -> Figures:
    """Each rank reads the files of its host in order, past the page cache where the disk allows."""
    files = saved_files(place.saved(rank))
    for path in files:
        drop_from_cache(path)
    with mmap.mmap(-1, _PIECE_BYTES) as buffer, memoryview(buffer) as view:
        view[:: mmap.PAGESIZE] = bytes(len(view[:: mmap.PAGESIZE]))  # else the first read pays for the pages
        dist.barrier()
        began = time.perf_counter()
        for path in files:
            _read(path, view)
        return {"s": time.perf_counter() - began}


def _read(path: Path, view: memoryview) -> None:
    size = path.stat().st_size
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:  # a file system without, such as one in memory
        fd = os.open(path, os.O_RDONLY)
    try:
        position = 0
        while position < size:
            position += os.preadv(fd, [view], position)
    finally:
        os.close(fd)


def restore(rank: int, place: Place, saved: tuple[Saved, ...], lost: bool) -> Figures:
    """Bring the state back; with `lost`, host-0 is gone and rank 0 starts on an empty one.

    Its shard then comes from host-1, which has host-0's copy, over the process group.
    """
    host = HOSTS if lost and rank == 0 else rank
    local = place.saved(host)
    local.mkdir(parents=True, exist_ok=True)
    training = Training(place.size_bytes, rank)
    training.forget()
    drop_from_cache(local)

    def fill(shard: Shard) -> Callable[[], object]:
        return plan_restore(training.state, shard)

    arena_root = place.memory / f"restore-{host_name(rank)}"
    with RankArena(arena_root, rank=rank, world_size=HOSTS) as arena:
        restorer = Restorer(
            arena, None, RankGroup(rank, HOSTS), replicated=False, local=local, host=host_name(host)
        )
        dist.barrier()
        began = time.perf_counter()
        restored = restorer.restore(fill)
        seconds = time.perf_counter() - began
        arena.close(remove=True)
    expected = Tier.PEERS if lost else Tier.LOCAL
    if (restored.step, restored.tier) != (STEP, expected):
        raise ValueError(f"restored step {restored.step} from {restored.tier}, expected it from {expected}.")
    if training.digest() != saved[rank].digest:
        raise ValueError(f"rank {rank} restored another state than it had saved.")
    return {"s": seconds}
