# SPDX-License-Identifier: Apache-2.0
"""Hosts of one machine, with small checkpoints, for the tests of the exchange between agents."""

from __future__ import annotations

import queue
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import torch

from resiliency.checkpoint.format.local import LocalFormat
from resiliency.checkpoint.replication.copy_plan import CopyPlan
from resiliency.checkpoint.replication.hosts import HostTable
from resiliency.checkpoint.replication.placement import Peer
from resiliency.checkpoint.replication.service import PeerEvent, PeerService
from resiliency.checkpoint.replication.transport.connection import CallDeadline
from resiliency.checkpoint.state.layout import Shard
from resiliency.checkpoint.storage.interface import Storage
from resiliency.checkpoint.storage.posix import LocalStorage
from tests.checkpoint.storage_builders import make_shard, save

SESSION = "session"
LONG_S = 180.0
#: Short where a test waits for it to pass, and still far more than a loaded machine needs for a byte.
QUICK = CallDeadline(
    silence=timedelta(seconds=3), pause=timedelta(seconds=0.1), longest_pause=timedelta(seconds=0.3)
)
_E = TypeVar("_E")


@lru_cache(maxsize=16)
def shard(step: int, rank: int, world_size: int, size_bytes: int = 40_000) -> Shard:
    """A shard of about `size_bytes`, with content that depends on step and rank."""
    block = random.Random(1000 * step + rank).randbytes(min(size_bytes, 1_000_003))  # noqa: S311
    content = bytearray(block * (size_bytes // len(block) + 1))[:size_bytes]
    weights = torch.frombuffer(content, dtype=torch.uint8)
    return make_shard(
        {"weight": weights, "step": torch.tensor(float(step))}, step=step, rank=rank, world_size=world_size
    )


def save_name(step: int, attempt_id: str = SESSION) -> str:
    return f"{attempt_id}-{step}"


def commit_step(
    storage: Storage,
    step: int,
    *,
    ranks: Sequence[int] = (0,),
    world_size: int = 0,
    attempt_id: str = SESSION,
    run_id: str = "run",
    size_bytes: int = 40_000,
) -> list[Shard]:
    """Commit a host's part of a save; returns its shards."""
    world = world_size or max(ranks) + 1
    shards = [shard(step, rank, world, size_bytes) for rank in ranks]
    save_id = save_name(step, attempt_id)
    save(storage, LocalFormat(threads=1), shards, save_id=save_id, run_id=run_id, ranks=ranks)
    return shards


def blueprint_of(storage: Storage, step: int) -> CopyPlan:
    return CopyPlan.read(storage, step)


def tree(root: Path, without: str = "") -> dict[str, bytes]:
    """All files below a directory with their bytes, but for what is in its directory `without`, and markers
    that were lifted."""
    places = [path for path in sorted(root.iterdir()) if path.name != without]
    below = [path for place in places for path in (place, *sorted(place.rglob("*")))]
    files = (path for path in below if path.is_file() and path.name != "unfinished")
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


@dataclass
class Host:
    """A service in this process, and the events that it told."""

    name: str
    root: Path
    timeouts: CallDeadline = QUICK
    events: queue.Queue[PeerEvent] = field(default_factory=queue.Queue)
    seen: list[PeerEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.service = PeerService(
            self.name, self.root, listen_address="127.0.0.1", on_event=self.events.put, timeouts=self.timeouts
        )

    @property
    def peer(self) -> Peer:
        return Peer(host=self.name, address="127.0.0.1", port=self.service.port)

    @property
    def storage(self) -> LocalStorage:
        return LocalStorage(self.root)

    def replicas_of(self, owner: str) -> Path:
        return self.root / "replicas" / owner

    def save(self, step: int, *, attempt_id: str = SESSION, **how: object) -> list[Shard]:
        """Commit a step of this host, and ask for its copies."""
        shards = commit_step(self.storage, step, attempt_id=attempt_id, **how)  # type: ignore[arg-type]
        self.service.replicate(step, save_name(step, attempt_id))
        return shards

    def wait_for(self, kind: type[_E], step: int | None = None, timeout: float = LONG_S) -> _E:
        """The next event of a kind (and step), in the order in which they came."""
        deadline = time.monotonic() + timeout
        while True:
            for event in self.seen:
                if isinstance(event, kind) and step in (None, getattr(event, "step", None)):
                    self.seen.remove(event)
                    return event
            try:
                self.seen.append(self.events.get(timeout=max(deadline - time.monotonic(), 0.01)))
            except queue.Empty:
                raise AssertionError(f"{self.name}: no {kind.__name__} of step {step}; {self.seen}") from None


def table_of(
    peers: Sequence[Peer],
    *,
    attempt_id: str = SESSION,
    replicas: int = 1,
    bytes_per_s: int = 0,
    token: str = "",
) -> HostTable:
    return HostTable(
        attempt_id=attempt_id,
        run_id="run",
        token=token or f"secret of {attempt_id}",
        leader=peers[0].host,
        replicas=replicas,
        bytes_per_s=bytes_per_s,
        peers=tuple(peers),
    )
