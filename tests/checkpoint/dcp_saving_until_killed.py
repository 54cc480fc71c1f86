# SPDX-License-Identifier: Apache-2.0
"""Saves step 2 over step 1 through torch, in a directory per operation, killing the saver there.

Prints the exit status of each child; the last one was not killed.  Forking is safe here: this
process has no threads and no CUDA.
"""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from pathlib import Path

import torch

from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.testing.storage import FaultyStorage, StorageFault, StorageFaultKind, kill_this_process
from tests.checkpoint.dcp_saves import store


def main(root: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    number, status = 0, -1
    store(LocalStorage(root / "first"), 1)
    while status != 0:
        shutil.copytree(root / "first", root / str(number))
        child = os.fork()
        if child == 0:
            fault = StorageFault(operation=number, kind=StorageFaultKind.TORN_KILL)
            storage = LocalStorage(root / str(number))
            store(FaultyStorage(storage, fault, on_kill=kill_this_process), 2)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(status)
        number += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))
