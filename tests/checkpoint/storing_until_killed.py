# SPDX-License-Identifier: Apache-2.0
"""Saves step 2 over step 1 in a directory per operation, killing the saver at that operation.

Prints the exit status of each child; the last one was not killed.  Forking is safe here: this
process has no threads and no CUDA.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import torch

from resiliency.checkpoint.format.dcp import DcpFormat
from resiliency.checkpoint.format.local import LocalFormat
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.testing.storage import FaultyStorage, StorageFault, StorageFaultKind, kill_this_process
from tests.checkpoint.storage_builders import save, small_shard


def main(root: Path, format_name: str) -> None:
    torch.set_num_threads(1)
    layout = {"LocalFormat": LocalFormat, "DcpFormat": DcpFormat}[format_name](threads=1)
    number, status = 0, -1
    save(LocalStorage(root / "first"), layout, [small_shard(1, world_size=2)], ranks=[0])
    while status != 0:
        shutil.copytree(root / "first", root / str(number))
        storage = LocalStorage(root / str(number))
        child = os.fork()
        if child == 0:
            fault = StorageFault(operation=number, kind=StorageFaultKind.TORN_KILL)
            faulty = FaultyStorage(storage, fault, on_kill=kill_this_process)
            save(faulty, layout, [small_shard(2, world_size=2)], ranks=[0])
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(status)
        number += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
