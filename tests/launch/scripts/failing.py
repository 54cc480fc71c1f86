# SPDX-License-Identifier: Apache-2.0
"""A job of two ranks that meets another failure in each attempt, in the order of its arguments.

    failing.py KIND...

Rank 1 fails, but for an echo, which is what rank 0 gets when rank 1 has left.  The other rank waits.  An
import fails at the top of the script, before the launcher knows anything of the rank.
"""

import atexit
import ctypes
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from datetime import timedelta

from resiliency.progress import report_step, watch_rank
from resiliency.runtime import check_loss

RANK, ATTEMPT = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
#: As NCCL's watchdog ends a rank.
WATCHDOG = b"""\
[rank1]:[E1128 03:11:52.918273645 ProcessGroupNCCL.cpp:681] [Rank 1] Some NCCL operations have failed.
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7) ran for 60 s.
"""
#: As CUDA says it.
ILLEGAL_ACCESS = """CUDA error: an illegal memory access was encountered
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be \
incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1"""


def fails(kind: str) -> None:
    if kind == "loader":
        load()
    elif kind == "disk":
        with open("/dev/full", "w") as file:  # a device without room: the kernel's own error
            file.write("checkpoint")
    elif kind == "port":
        with socket.create_server(("127.0.0.1", 0)) as taken:
            socket.create_server(taken.getsockname())
    elif kind == "cuda":
        raise RuntimeError(ILLEGAL_ACCESS)
    elif kind == "segfault":
        ctypes.string_at(0)
    elif kind == "memory":
        allocate()
    elif kind == "watchdog":
        os.write(2, WATCHDOG)
        os.abort()
    elif kind == "nan":
        check_loss(float("nan"), step=10 * ATTEMPT + 1)


def load() -> None:
    from torch.utils.data import DataLoader, Dataset

    class Samples(Dataset[int]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> int:
            assert index < 3, f"sample {index} has no label"
            return index

    list(DataLoader(Samples(), num_workers=1))


def allocate() -> None:
    """Until the kernel ends this process; where no memory group limits it, as the kernel would do it."""
    if os.environ["IS_LIMITED"] == "1":
        blocks = []
        while True:
            blocks.append(b"x" * (1 << 24))
    os.kill(os.getpid(), signal.SIGKILL)


def communicate(kind: str) -> None:
    """Rank 1 leaves: it ends with an exit code, or closes its connections and lives on."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    peer = torch.tensor(os.getpid() * RANK)
    dist.all_reduce(peer)
    if RANK == 1 and kind == "late":
        atexit.register(wait)  # as a tracker that uploads
        try:
            {"input_ids": 1}["labels"]
        finally:
            dist.destroy_process_group()
    if RANK == 1 and kind == "exit":
        os._exit(17)
    if RANK == 1:
        dist.destroy_process_group()
        wait()
    if kind == "exit":  # only then may the loss of the connection be noticed
        with suppress(ProcessLookupError):  # it is gone already
            select.select([os.pidfd_open(int(peer))], [], [])
    dist.all_reduce(peer)


def wait() -> None:
    while True:  # the launcher's look at a rank that stands still ends one pause
        signal.pause()


def main() -> None:
    kind = sys.argv[1:][ATTEMPT]
    os.write(1, f"rank {RANK} attempt {ATTEMPT} meets {kind}\n".encode())
    if ATTEMPT == 0 and RANK == 1:
        with open("begin"):  # until the launcher is in its memory group
            pass
    if kind == "import" and RANK == 1:
        import no_such_module  # type: ignore[import-not-found]  # noqa: F401
    watch_rank()
    if kind != "import":
        report_step(10 * ATTEMPT)
    if kind in ("echo", "exit", "late"):
        communicate(kind)
    elif RANK == 1:
        fails(kind)
    wait()


if __name__ == "__main__":
    main()
