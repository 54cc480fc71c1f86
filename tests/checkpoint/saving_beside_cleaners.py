# SPDX-License-Identifier: Apache-2.0
"""A job that saves as fast as it can, for tests of what removes checkpoints beside it.

    python -m tests.checkpoint.saving_beside_cleaners DIRECTORY

It begins with the newest checkpoint that is whole, reads it under a lease, says which step that was, and
saves one step after the other: two threads are its two ranks, the second follows through the files alone.
"""

from __future__ import annotations

import sys
import threading
from datetime import timedelta
from pathlib import Path

import torch

from resiliency.checkpoint.commit.commit import SaveTicket, commit
from resiliency.checkpoint.format.catalog import find_newest, verify
from resiliency.checkpoint.format.dcp import DcpFormat
from resiliency.checkpoint.format.lease import Lease
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.errors import CheckpointMissing
from tests.checkpoint.storage_builders import small_shard


def main() -> None:
    torch.set_num_threads(1)
    storage = LocalStorage(Path(sys.argv[1]))
    try:
        newest = find_newest(storage).step
        with Lease(storage, newest):
            verify(storage, newest)
    except CheckpointMissing:
        newest = 0
    print("began", newest, flush=True)
    attempt = f"{id(storage)}-{threading.get_native_id()}"
    while True:
        newest += 1
        ranks = [threading.Thread(target=save, args=(storage, newest, rank, attempt)) for rank in (0, 1)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        print("committed", newest, flush=True)


def save(storage: LocalStorage, step: int, rank: int, attempt: str) -> None:
    ticket = SaveTicket(
        step=step,
        run_id="run",
        save_id=f"{attempt}-{step}",
        world_size=2,
        ranks=range(2),
        timeout=timedelta(seconds=60),
        poll=timedelta(milliseconds=2),
    )
    shard = small_shard(step, rank=rank, world_size=2)
    commit(storage, DcpFormat(threads=1), ticket, {rank: shard}, leads=rank == 0)


if __name__ == "__main__":
    main()
