# SPDX-License-Identifier: Apache-2.0
"""The job of `outages.py`: steps that both ranks finish together, saves at each tenth, and a need.

    outage_job.py KIND WHERE SECONDS DIRECTORY

What rank 0 needs is away for SECONDS from when it is first asked for: before the first step, in each step
from the thirtieth on, or in each save from the third on.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from resiliency.progress import report_step, watch_rank

STEPS, EVERY, FROM = 200, 10, 30


class ServiceUnavailable(Exception):
    """As clients of object stores name it; their classes have no base of Python's own for this."""


def _stale() -> None:
    raise OSError(errno.ESTALE, "Stale file handle", "/mnt/shards/shard-000117.tar")


def _wrapped() -> None:
    try:
        _stale()
    except OSError as error:
        raise RuntimeError("reading a shard failed after 3 tries") from error


def _full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "/mnt/checkpoints/step-30")


def _unavailable() -> None:
    raise ServiceUnavailable("503 Slow Down: please reduce your request rate")


def _refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    socket.create_connection(("127.0.0.1", port), timeout=2).close()


def _unresolved() -> None:
    socket.getaddrinfo("store.invalid", 443)


KINDS: dict[str, Callable[[], None]] = {
    "stale_storage": _stale,
    "wrapped_storage_error": _wrapped,
    "full_disk": _full,
    "object_store": _unavailable,
    "data_service": _refused,
    "dns": _unresolved,
}
PLACES = ("start", "step", "save")


def main() -> None:
    kind, where, seconds, directory = sys.argv[1:]
    asked, saved = Path(directory, "asked"), Path(directory, "saved")
    rank = int(os.environ["RANK"])

    def need(place: str) -> None:
        if place != where or rank != 0:
            return
        if not asked.exists():
            asked.write_text(str(time.time()))
        if time.time() < float(asked.read_text()) + float(seconds):
            KINDS[kind]()
        over = Path(directory, "over")
        if not over.exists():
            over.write_text(str(time.time()))

    def meet(step: int) -> None:
        """As in a collective: no rank finishes a step without the other one."""
        mine, other = (
            Path(directory, f"{os.environ['TORCHELASTIC_RESTART_COUNT']}-{r}") for r in (rank, 1 - rank)
        )
        mine.write_text(str(step))
        while not other.exists() or int(other.read_text() or -1) < step:
            time.sleep(0.005)

    watch_rank()
    need("start")
    for step in range(int(saved.read_text()) if saved.exists() else 0, STEPS):
        time.sleep(0.02)
        if step >= FROM:
            need("step")
        if (step + 1) % EVERY == 0 and rank == 0:
            if step >= FROM:
                need("save")
            saved.write_text(str(step + 1))
        meet(step)
        report_step(step)


if __name__ == "__main__":
    main()
