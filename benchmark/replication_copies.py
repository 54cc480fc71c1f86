# SPDX-License-Identifier: Apache-2.0
"""How fast a committed step gets to another host: ours, raw sockets, and NVRx's replication.

Each function runs in both ranks at once and returns this rank's seconds, 0 where it has none.  All send
the same bytes over the loopback device.  Ours and the raw socket send files that are in the page cache;
NVRx sends the tensors they were saved from.
"""

from __future__ import annotations

import mmap
import os
import queue
import shutil
import socket
import time
import zlib
from contextlib import ExitStack, suppress
from pathlib import Path

import torch
import torch.distributed as dist
from ckpt_training import Training
from replication_hosts import (
    ADDRESS,
    HOSTS,
    STEP,
    WAIT,
    Place,
    fill_cache,
    host_name,
    link_step,
    save_id,
    saved_bytes,
    saved_files,
)

from resiliency.checkpoint.replication.hosts import HostTable
from resiliency.checkpoint.replication.placement import Peer
from resiliency.checkpoint.replication.service import NotReplicated, PeerEvent, PeerService, Replicated

Figures = dict[str, float]
_PIECE_BYTES = 4 << 20


def raw_socket(rank: int, place: Place, written: bool) -> Figures:
    """Rank 0 sends with sendfile, rank 1 receives into a buffer; `written`: and from there into a file.

    The file is synced before rank 1 answers, as a copy is that shall survive its host.
    """
    source = place.saved(0)
    if rank == 0:
        fill_cache(source)
        port = _tell(0, src=1)
        dist.barrier()
        return {"s": _send(source, port)}
    directory = place.scratch("raw", rank)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "received"
    path.unlink(missing_ok=True)
    with socket.create_server((ADDRESS, 0)) as server:
        server.settimeout(WAIT.total_seconds())
        _tell(server.getsockname()[1], src=1)
        dist.barrier()
        connection, _ = server.accept()
        with connection:
            connection.settimeout(WAIT.total_seconds())
            _receive(connection, saved_bytes(source), path if written else None)
    path.unlink(missing_ok=True)
    return {"s": 0.0}


def _send(source: Path, port: int) -> float:
    began = time.perf_counter()
    with socket.create_connection((ADDRESS, port), timeout=WAIT.total_seconds()) as connection:
        for path in saved_files(source):
            with path.open("rb") as file:
                connection.sendfile(file)
        if connection.recv(1) != b"k":
            raise ConnectionError("the receiver of the raw socket gave up.")
    return time.perf_counter() - began


def _receive(connection: socket.socket, size_bytes: int, path: Path | None) -> None:
    with mmap.mmap(-1, _PIECE_BYTES) as memory, memoryview(memory) as buffer, ExitStack() as files:
        file = None if path is None else files.enter_context(_File(path))
        for start in range(0, size_bytes, _PIECE_BYTES):
            piece = buffer[: min(_PIECE_BYTES, size_bytes - start)]
            with piece:
                _fill(connection, piece)
                if file is not None:
                    file.write(start, piece)
        if file is not None:
            file.sync()
    connection.sendall(b"k")


def _fill(connection: socket.socket, piece: memoryview) -> None:
    received = 0
    while received < piece.nbytes:
        with piece[received:] as rest:
            count = connection.recv_into(rest)
        if not count:
            raise ConnectionError("the sender of the raw socket gave up.")
        received += count


class _File(ExitStack):
    """Written past the page cache, which is the faster way and ours; but for the end of the last page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._plain = self._direct = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        self.callback(os.close, self._plain)
        with suppress(OSError):  # a file system without, such as one in memory
            self._direct = os.open(path, os.O_WRONLY | os.O_DIRECT)
            self.callback(os.close, self._direct)

    def write(self, position: int, piece: memoryview) -> None:
        whole = piece.nbytes - piece.nbytes % mmap.PAGESIZE
        for fd, start, end in ((self._direct, 0, whole), (self._plain, whole, piece.nbytes)):
            with piece[start:end] as part:
                if part.nbytes and os.pwrite(fd, part, position + start) != part.nbytes:
                    raise OSError("the disk took only a part of a piece.")

    def sync(self) -> None:
        os.fsync(self._plain)


def our_copy(rank: int, place: Place, both: bool) -> Figures:
    """A `PeerService` per rank; host-0's sends its step, with `both` host-1's too at the same time.

    The clock stops when the copy is verified, synced and committed on the other host.
    """
    root = place.scratch("copies", rank)
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    sends = both or rank == 0
    if sends:
        link_step(place.saved(rank), root)
        fill_cache(root)
    events: queue.SimpleQueue[PeerEvent] = queue.SimpleQueue()
    with PeerService(host_name(rank), root, listen_address=ADDRESS, on_event=events.put) as service:
        service.update(_table(service.port, rank))
        dist.barrier()
        began = time.perf_counter()
        if sends:
            service.replicate(STEP, save_id(root))
            _await_copy(events)
        seconds = time.perf_counter() - began
        dist.barrier()  # the other host may still be receiving from this one
    other = host_name(1 - rank)
    if (both or rank == 1) and not (root / "replicas" / other / f"step={STEP}" / "manifest.json").is_file():
        raise FileNotFoundError(f"{host_name(rank)} has no copy of {other}'s step.")
    shutil.rmtree(root)
    return {"s": seconds if sends else 0.0}


def _await_copy(events: queue.SimpleQueue[PeerEvent]) -> None:
    deadline = time.monotonic() + WAIT.total_seconds()
    while not isinstance(event := events.get(timeout=max(0.0, deadline - time.monotonic())), Replicated):
        if isinstance(event, NotReplicated):
            raise ConnectionError(f"not replicated: {event.why}")


def _table(port: int, rank: int) -> HostTable:
    """Another session than the one that saved: agents would begin at once to copy what is their own."""
    ports = torch.zeros(HOSTS, dtype=torch.int64)
    ports[rank] = port
    dist.all_reduce(ports)
    peers = [
        Peer(host=host_name(host), address=ADDRESS, port=int(ports[host]), ranks=(host,))
        for host in range(HOSTS)
    ]
    return HostTable(
        attempt_id="measured", run_id="replication", token="of one run on one machine",  # noqa: S106
        leader=host_name(0), replicas=1, peers=tuple(peers),
    )  # fmt: skip


def nvrx_copy(rank: int, place: Place) -> Figures:
    """NVRx's clique of two ranks: each ends with the tensors of both, in its memory."""
    from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
    from nvidia_resiliency_ext.checkpointing.local.replication.strategies import CliqueReplicationStrategy

    tensors = Training(place.size_bytes, rank).tensors()
    expected = _tell(_checksum(tensors), src=1 - rank)
    state = BasicTensorAwareStateDict({})
    # Its constructor takes tensors on CUDA devices only; everything else works wherever they are.
    state.state_dict = dict(enumerate(tensors))
    strategy = CliqueReplicationStrategy(dist.group.WORLD, target_device="cpu")
    dist.barrier()
    began = time.perf_counter()
    copies, names = strategy.replicate(state, host_name(rank))
    seconds = time.perf_counter() - began
    copy = copies[names.index(host_name(1 - rank))]
    if _checksum(list(copy.tensors)) != expected:
        raise ValueError("the copy that NVRx made has other bytes than its source.")
    return {"s": seconds}


def _checksum(tensors: list[torch.Tensor]) -> int:
    digest = 0
    for tensor in tensors:
        digest = zlib.crc32(tensor.numpy().data, digest)
    return digest


def _tell(number: int, *, src: int) -> int:
    """The number that rank `src` has; all ranks must ask, for any `src`."""
    numbers = torch.zeros(HOSTS, dtype=torch.int64)
    numbers[dist.get_rank()] = number
    dist.all_reduce(numbers)
    return int(numbers[src])
