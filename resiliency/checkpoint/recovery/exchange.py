# SPDX-License-Identifier: Apache-2.0
"""Shards on their way from ranks that can read them to ranks that want them.

The process group of the job carries them, in rounds: in each, a rank sends at most one shard and
receives at most one.  No round waits for ranks that have no part in it.  What a shard looks like on
its way, and how its bytes are verified, is in `resiliency.checkpoint.recovery.shipping`.

A file that is bad or gone changes nothing for anyone but the rank that wanted it, and that one
learns of it when the exchange is over.  What does end an exchange is a rank that dies or falls silent:
each wait has a deadline.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from resiliency.checkpoint.recovery.planner import Pick, Plan
from resiliency.checkpoint.recovery.shipping import Incoming, Messages, Outgoing
from resiliency.checkpoint.table import Shard
from resiliency.errors import PeerError


@dataclass(frozen=True, kw_only=True)
class ExchangeOptions:
    """How shards are cut, and how long a rank may be silent.

    Args:
        message_bytes: of a shard that travel at once; whole pages, the same on all ranks.
        stall: longest wait for the next message of a shard, in the first round.
        slowest_bytes_per_s: what is granted in later rounds for those before.
    """

    message_bytes: int = 32 << 20
    stall: timedelta = timedelta(minutes=2)
    slowest_bytes_per_s: int = 20_000_000


def rounds(plan: Plan) -> list[list[Pick]]:
    """The sends of `plan`, so that in each round a rank sends and receives at most one shard.

    Each rank wants one shard only, so it is the senders alone that need more than one round.
    """
    by_sender: dict[int, list[Pick]] = defaultdict(list)
    for pick in plan.picks:
        if pick.sender is not None:
            by_sender[pick.sender].append(pick)
    most = max(map(len, by_sender.values()), default=0)
    return [[picks[i] for picks in by_sender.values() if i < len(picks)] for i in range(most)]


def exchange(
    plan: Plan,
    rank: int,
    options: ExchangeOptions | None = None,
    *,
    device: torch.device | None = None,
) -> Shard | None:
    """Play this rank's part in the sends of `plan`, over the default process group.

    All ranks that send or receive must call it, with the same plan.  With NCCL, the group must have been
    used by all ranks before.

    Args:
        device: in whose memory the group wants its messages; default: with NCCL the current one, else
            wherever shards are.
    Returns:
        What was sent to this rank, verified; None if nothing was to be.
    Raises:
        CheckpointCorrupt, CheckpointIncomplete: what came is not what was saved.
        CheckpointError: this rank has no memory for what came.  In both cases the other ranks got theirs.
        PeerError: a rank died or fell silent; the group cannot be used any more.
    """
    turns = rounds(plan)
    if not turns:  # a job of one rank has no group
        return None
    options = options or ExchangeOptions()
    sends = Counter(pick.holding for pick in plan.picks if pick.sender is not None)
    carrier = _Carrier(rank, device or _device_of_group())
    received: Incoming | None = None
    patience = options.stall
    for picks in turns:
        out = next((pick for pick in picks if pick.sender == rank), None)
        into = next((pick for pick in picks if pick.rank == rank), None)
        with contextlib.ExitStack() as ends:
            outgoing = incoming = None
            if out is not None:
                direct = sends[out.holding] == 1
                outgoing = Outgoing(out.holding, out.rank, options.message_bytes, direct=direct)
                ends.callback(outgoing.close)
            if into is not None and into.sender is not None:
                received = incoming = Incoming(into.holding, into.sender, options.message_bytes)
                ends.callback(incoming.close)
            carrier.run(outgoing, incoming, patience)
        # In later rounds a peer, or the peer of a peer, may first have to finish this one with others.
        largest = max(pick.holding.size_bytes for pick in picks)
        patience += timedelta(seconds=largest / options.slowest_bytes_per_s)
    return None if received is None else received.shard()


class _Carrier:
    """Moves one message out and one in at a time, through memory that the group's backend reaches."""

    def __init__(self, rank: int, device: torch.device | None) -> None:
        self._rank = rank
        self._device = device
        self._buffers: dict[str, torch.Tensor] = {}

    def run(self, outgoing: Outgoing | None, incoming: Incoming | None, timeout: timedelta) -> None:
        """One round; `timeout` is the longest wait for each message."""
        with contextlib.ExitStack() as open_ends:
            outs = open_ends.enter_context(contextlib.closing(_messages(outgoing)))
            intos = open_ends.enter_context(contextlib.closing(_messages(incoming)))
            while True:
                out, into = next(outs, None), next(intos, None)
                operations = []
                if out is not None and outgoing is not None:
                    operations.append(dist.P2POp(dist.isend, self._lift(out), outgoing.peer))
                if into is not None and incoming is not None:
                    operations.append(dist.P2POp(dist.irecv, self._landing(into), incoming.peer))
                if not operations:
                    return
                self._wait(operations, timeout)
                if into is not None:
                    self._drop(into)

    def _wait(self, operations: list[dist.P2POp], timeout: timedelta) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        try:
            for work in dist.batch_isend_irecv(operations):
                work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except RuntimeError as error:
            peers = " or ".join(f"rank {peer}" for peer in sorted({op.peer for op in operations}))
            raise PeerError(
                f"rank {self._rank} lost {peers} while they exchanged shards: {error}.",
                hint="It died, or was silent for too long: start the job again.",
                rank=self._rank,
            ) from error

    def _lift(self, message: memoryview) -> torch.Tensor:
        host = torch.frombuffer(message, dtype=torch.uint8)
        return host if self._device is None else self._buffer("out", message.nbytes).copy_(host)

    def _landing(self, target: memoryview) -> torch.Tensor:
        if self._device is None:
            return torch.frombuffer(target, dtype=torch.uint8)
        return self._buffer("in", target.nbytes)

    def _drop(self, target: memoryview) -> None:
        if self._device is not None:
            torch.frombuffer(target, dtype=torch.uint8).copy_(self._buffer("in", target.nbytes))

    def _buffer(self, name: str, size: int) -> torch.Tensor:
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._buffers[name][:size]


def _device_of_group() -> torch.device | None:
    if "nccl" in dist.get_backend_config() and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return None


def _messages(end: Outgoing | Incoming | None) -> Messages:
    if end is not None:
        yield from end.messages()
