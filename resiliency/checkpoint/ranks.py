# SPDX-License-Identifier: Apache-2.0
"""What all ranks of a job decide together, at its start and never on the way.

The default process group carries it, so each call must be made by all ranks alike.
"""

from __future__ import annotations

import ctypes
import pickle
from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist

from resiliency.errors import ConfigError, PeerError, ResiliencyError
from resiliency.runtime import RunInfo

_T = TypeVar("_T")

#: What travels together with its length; most of what ranks agree on is shorter.
_SHORT_BYTES = 512
_LENGTH_BYTES = 8


class RankGroup:
    """The ranks of a job; a single process is a job of one.

    Raises:
        ConfigError: there are several ranks, and no process group to talk through.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        if world_size > 1 and not (dist.is_available() and dist.is_initialized()):
            raise ConfigError(
                f"this is rank {rank} of {world_size}, and there is no process group.",
                hint="Call torch.distributed.init_process_group() first.",
                rank=rank,
            )
        if world_size > 1 and dist.get_world_size() != world_size:
            raise ConfigError(
                f"the process group has {dist.get_world_size()} ranks, this job has {world_size}.",
                rank=rank,
            )

    @classmethod
    def of_process_group(cls) -> RankGroup:
        """The ranks of the default process group; without one, a job of one."""
        joined = dist.is_available() and dist.is_initialized()
        return cls(dist.get_rank(), dist.get_world_size()) if joined else cls(0, 1)

    def gather(self, value: _T) -> list[_T]:
        """The value of each rank, in order of ranks; the same list on all.

        Raises:
            PeerError: a rank died, or was silent for the timeout of the process group.
        """
        if self.world_size == 1:
            return [value]
        try:
            return _gather(value, self.world_size)
        except RuntimeError as error:  # what all backends raise
            raise PeerError(
                f"rank {self.rank} lost another rank while all agreed: {error}.",
                hint="One of them died or hangs, see its log; start the job again.",
                rank=self.rank,
            ) from error

    def check(self, error: ResiliencyError | None, doing: str) -> None:
        """Raise on all ranks if any has an error: its own, or else one that names the ranks.

        Raises:
            PeerError: another rank failed.
        """
        texts = self.gather(None if error is None else str(error))
        if error is not None:
            raise error
        failed = {rank: text for rank, text in enumerate(texts) if text is not None}
        if failed:
            first = min(failed)
            raise PeerError(
                f"{len(failed)} of {self.world_size} ranks failed while {doing};"
                f" rank {first}: {failed[first]}",
                rank=first,
            )


def _gather(value: _T, world_size: int) -> list[_T]:
    """As `all_gather_object`, in one collective instead of two where all values are short."""
    data = pickle.dumps(value)
    head = len(data).to_bytes(_LENGTH_BYTES, "little") + data[:_SHORT_BYTES]
    heads = _gather_bytes(head, _LENGTH_BYTES + _SHORT_BYTES, world_size)
    lengths = [int.from_bytes(head[:_LENGTH_BYTES], "little") for head in heads]
    rests = [b""] * world_size
    if (longest := max(lengths)) > _SHORT_BYTES:  # the same on all ranks
        rests = _gather_bytes(data[_SHORT_BYTES:], longest - _SHORT_BYTES, world_size)
    return [
        pickle.loads((head[_LENGTH_BYTES:] + rest)[:length])  # noqa: S301 - of the ranks of this job
        for head, rest, length in zip(heads, rests, lengths, strict=True)
    ]


def _gather_bytes(data: bytes, size: int, world_size: int) -> list[bytes]:
    """The bytes of all ranks, each filled up to `size`."""
    # Such as "cpu:gloo,cuda:nccl" or "cuda:nccl"; there in the memory of the current device.
    backends = dist.get_backend_config()
    device = "cpu" if "cpu:" in backends else backends.partition(":")[0]
    mine = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8).to(device)
    everyone = torch.empty(world_size * size, dtype=torch.uint8, device=device)
    dist.all_gather(list(torch.split(everyone, size)), mine)
    here = everyone.cpu()
    flat = ctypes.string_at(here.data_ptr(), here.nbytes)
    return [flat[start : start + size] for start in range(0, world_size * size, size)]


def identified(info: RunInfo) -> RunInfo:
    """`info` with the rank that the default process group gives this process, if `info` names none.

    Only torchrun sets RANK and WORLD_SIZE.  What srun, mpirun or `torch.multiprocessing` started would
    otherwise be rank 0 of 1 on every host, and all of them would commit over each other.

    Raises:
        ConfigError: `info` names a rank, and the group of several ranks another.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return info
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if info.rank is None:
        return replace(info, rank=rank, world_size=world_size)
    if (info.rank, info.world_size) != (rank, world_size):
        raise ConfigError(
            f"this is rank {info.rank} of {info.world_size} by its environment, and rank {rank} of"
            f" {world_size} in the process group.",
            hint="Set RANK and WORLD_SIZE to what init_process_group() was given, or unset both.",
            rank=rank,
        )
    return info
