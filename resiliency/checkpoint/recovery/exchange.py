# SPDX-License-Identifier: Apache-2.0
"""Shards on their way from ranks that can read them to ranks that want them.

The process group of the job carries them, in rounds: in each, a rank sends at most one shard of its
host and receives at most one.  A shard that several ranks want goes from one to the next of them: each
passes a message on while the next one comes.  So it is read once, no rank sends it twice, and all have it
in little more than the time that one would take.

    sender --> a --> b --> c        message 3 to a, while a passes 2 on to b, and b passes 1 on to c

No round waits for ranks that have no part in it.  What a shard looks like on its way, and how its
bytes are verified, is in `resiliency.checkpoint.recovery.transfer`.

A file that is bad or gone changes nothing for anyone but the ranks that wanted it, and these learn of
it when the exchange is over; what a rank finds bad it passes on as it came, for the next one to judge.
What does end an exchange is a rank that dies or falls silent: each wait has a deadline.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from resiliency.checkpoint.locations import ShardLocation
from resiliency.checkpoint.recovery.planner import RestorePlan
from resiliency.checkpoint.recovery.transfer import Incoming, Messages, Outgoing
from resiliency.checkpoint.state.layout import Shard
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

    def granted(self, size_bytes: int) -> timedelta:
        """What so many bytes may take."""
        return timedelta(seconds=size_bytes / self.slowest_bytes_per_s)


@dataclass(frozen=True, slots=True)
class Chain:
    """One shard, and the ranks that it goes through: from the one that reads it to the last that wants it."""

    location: ShardLocation
    ranks: tuple[int, ...]

    def before(self, rank: int) -> int | None:
        """Whom `rank` has it from; None: from nobody."""
        place = self.ranks.index(rank) if rank in self.ranks else 0
        return self.ranks[place - 1] if place else None

    def after(self, rank: int) -> int | None:
        """Whom `rank` gives it to; None: to nobody."""
        return next((to for by, to in zip(self.ranks, self.ranks[1:], strict=False) if by == rank), None)


def rounds(plan: RestorePlan) -> list[list[Chain]]:
    """The sends of `plan`, so that in each round a rank reads and sends at most one shard.

    Each rank wants one shard only, so it is the readers alone that need more than one round.
    """
    wanted: dict[tuple[int, ShardLocation], list[int]] = defaultdict(list)
    for assignment in plan.assignments:  # by rank: those of one host follow each other, with links inside it
        if assignment.sender is not None:
            wanted[assignment.sender, assignment.location].append(assignment.rank)
    by_sender: dict[int, list[Chain]] = defaultdict(list)
    for (sender, location), ranks in wanted.items():
        by_sender[sender].append(Chain(location, (sender, *ranks)))
    most = max(map(len, by_sender.values()), default=0)
    return [[chains[i] for chains in by_sender.values() if i < len(chains)] for i in range(most)]


def exchange(
    plan: RestorePlan,
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
    carrier = _Carrier(rank, device or _device_of_group())
    received: Incoming | None = None
    timeouts = options.stall
    for chains in turns:
        # Each link that a message passes may take its time for it.
        longest = max(len(chain.ranks) - 2 for chain in chains)
        timeouts += options.granted(longest * options.message_bytes)
        out = next((chain for chain in chains if chain.ranks[0] == rank), None)
        into = next((chain for chain in chains if chain.before(rank) is not None), None)
        with contextlib.ExitStack() as ends:
            outgoing = incoming = onward = None
            if out is not None:
                outgoing = Outgoing(out.location, out.ranks[1], options.message_bytes)
                ends.callback(outgoing.close)
            if into is not None:
                source, onward = into.before(rank), into.after(rank)
                assert source is not None
                received = incoming = Incoming(into.location, source, options.message_bytes)
                ends.callback(incoming.close)
            carrier.run(outgoing, incoming, onward, timeouts)
        # In later rounds a peer, or the peer of a peer, may first have to finish this one with others.
        timeouts += options.granted(max(chain.location.size_bytes for chain in chains))
    return None if received is None else received.shard()


class _Carrier:
    """Moves one message out, in and onward at a time, through memory that the group's backend reaches."""

    def __init__(self, rank: int, device: torch.device | None) -> None:
        self._rank = rank
        self._device = device
        self._buffers: dict[str, torch.Tensor] = {}

    def run(
        self, outgoing: Outgoing | None, incoming: Incoming | None, onward: int | None, timeout: timedelta
    ) -> None:
        """One round.

        Args:
            onward: rank that gets what comes in, a message later.
            timeout: longest wait for each message.
        """
        passed: memoryview | None = None
        with contextlib.ExitStack() as open_ends:
            outs = open_ends.enter_context(contextlib.closing(_messages(outgoing)))
            intos = open_ends.enter_context(contextlib.closing(_messages(incoming)))
            while True:
                out, into = next(outs, None), next(intos, None)
                operations = []
                if out is not None and outgoing is not None:
                    operations.append(dist.P2POp(dist.isend, self._lift("out", out), outgoing.peer))
                if passed is not None and onward is not None:
                    operations.append(dist.P2POp(dist.isend, self._lift("onward", passed), onward))
                if into is not None and incoming is not None:
                    operations.append(dist.P2POp(dist.irecv, self._landing(into), incoming.peer))
                if not operations:
                    return
                self._wait(operations, timeout)
                if into is not None:
                    self._drop(into)
                # Its memory is left alone until the message after the next one comes.
                passed = None if onward is None else into

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

    def _lift(self, name: str, message: memoryview) -> torch.Tensor:
        host = torch.frombuffer(message, dtype=torch.uint8)
        return host if self._device is None else self._buffer(name, message.nbytes).copy_(host)

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
