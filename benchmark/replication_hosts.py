# SPDX-License-Identifier: Apache-2.0
"""Two hosts on one machine: two ranks that are told different names, directories and arenas.

Everything a measurement needs to know travels as one `Place`; what it starts from, a step that the two
hosts committed and copied to each other, is made by a real job.  Its functions run in rank processes.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from ckpt_training import Training

from resiliency.checkpoint import Checkpointer, CheckpointerOptions, LocalTier
from resiliency.checkpoint.format.reader import CheckpointReader
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.runtime import RunInfo

HOSTS = 2
STEP = 1
ADDRESS = "127.0.0.1"
WAIT = timedelta(minutes=2)
#: A step's forward and backward take as long as moving the state does at that rate, so that ten steps
#: leave room for a copy of it on a machine of any speed.
_ROOM_BYTES_PER_S = 2e9


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a measurement works, and on how much.

    Attributes:
        disk: directory on the disk that is measured.
        memory: directory in shared memory, for captures.
        job: name of the job, which nobody else on the machine uses.
        size_bytes: of the state of each rank, about.
    """

    disk: Path
    memory: Path
    job: str
    size_bytes: int

    def saved(self, host: int) -> Path:
        """The local tier of a host after `save_once`; nobody writes there any more."""
        return self.disk / "saved" / host_name(host)

    def scratch(self, name: str, host: int) -> Path:
        """A directory of a host for one measurement."""
        return self.disk / "scratch" / name / host_name(host)

    def checkpointer(self, local: Path, rank: int, *, replicas: int) -> Checkpointer:
        """Of a job of two hosts with one rank each; with its agent."""
        arena = self.memory / host_name(rank)
        arena.mkdir(exist_ok=True)
        return Checkpointer(
            None,
            local=LocalTier(directory=local, keep=1, replicas=replicas),
            info=RunInfo(
                job_name=self.job,
                host=host_name(rank),
                node_rank=rank,
                rank=rank,
                local_rank=0,
                world_size=HOSTS,
                peer_address=ADDRESS,
            ),
            options=CheckpointerOptions(arena_root=arena, close_timeout=WAIT),
        )


class Saved(NamedTuple):
    """What `save_once` says of one rank."""

    digest: str
    batch: int


def host_name(host: int) -> str:
    return f"host-{host}"


def save_once(rank: int, place: Place) -> Saved:
    """Have both hosts commit one step and copy it to each other.

    Raises:
        TimeoutError: the copies were not complete in time.
    """
    training = Training(place.size_bytes, rank)
    batch = torch.tensor([training.batch_for(place.size_bytes / _ROOM_BYTES_PER_S)])
    dist.broadcast(batch, src=0)
    with place.checkpointer(place.saved(rank), rank, replicas=1) as checkpoints:
        handle = checkpoints.save(STEP, training.state)
        if not handle.wait_complete(WAIT):
            raise TimeoutError(f"step {STEP} was not complete on both hosts after {WAIT}: {handle.record}")
    return Saved(training.digest(), int(batch))


def saved_files(root: Path) -> list[Path]:
    """All files of the step below the root of a tier, the manifest among them."""
    return sorted(path for path in (root / f"step={STEP}").rglob("*") if path.is_file())


def saved_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in saved_files(root))


def save_id(root: Path) -> str:
    return CheckpointReader(LocalStorage(root), STEP).manifest.save_id


def link_step(root: Path, target: Path) -> None:
    """Put the step below another root, without copying a byte: nobody writes into a committed file."""
    shutil.copytree(root / f"step={STEP}", target / f"step={STEP}", copy_function=os.link)


def fill_cache(root: Path) -> None:
    """Read the step, so that the page cache has it; who sent it before had it dropped."""
    buffer = bytearray(4 << 20)
    for path in saved_files(root):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
