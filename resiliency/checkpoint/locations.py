# SPDX-License-Identifier: Apache-2.0
"""What is left of a job's saves: one rank's shard of one save, in one place.

A save of one attempt at one step has one identity, its `save_id`, the same on all ranks and in all
places.  Shards of one save may be taken from any mix of places; shards of two saves never meet, even
if the steps are equal, for two attempts may have come to the same step by different ways.

Every rank lists what its host holds and gathers the lists of all; `encode` keeps them small.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import Any, cast

from resiliency.checkpoint.names import directory_name
from resiliency.errors import PeerError

_VERSION = 1


class Place(str, Enum):
    """Where a shard lies, quickest to read first."""

    MEMORY = "memory"  # a slot of the arena: read by ranks of this host, sent to nobody
    LOCAL = "local"  # this host's own checkpoints
    REPLICA = "replica"  # this host's copy of another host's checkpoints
    PERSISTENT = "persistent"  # storage that all hosts see

    @property
    def is_disk_of_host(self) -> bool:
        """Whether it outlives a host's processes, and not the host."""
        return self in (Place.LOCAL, Place.REPLICA)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardLocation:
    """One rank's shard of one save in one place.

    Args:
        rank: of the job that saved it, which had `world_size` ranks.
        run_id: the run that the checkpoint belongs to, which outlives attempts.
        host: that can read it; empty: all can.
        root: of the storage it lies in; empty for memory.
        digest: of the rank's index, which the manifest there vouches for; empty for memory.
        group: names the ranks whose shards are interchangeable, if any are: whoever says that two ranks
            are of one group says that each may go on from the shard of the other.
    """

    step: int
    save_id: str
    run_id: str
    rank: int
    world_size: int
    host: str
    place: Place
    root: str = ""
    digest: str = ""
    size_bytes: int = 0
    group: str = ""

    @property
    def source_host(self) -> str:
        """Whose checkpoint this is a part of: the directory name of the host that saved it.

        Empty where hosts have no part: in memory and on storage that all see.
        """
        if self.place is Place.LOCAL:
            return directory_name(self.host)
        return self.root.rstrip("/").rpartition("/")[2] if self.place is Place.REPLICA else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRequest:
    """What one rank of the job that starts wants: its own shard, or one of its group."""

    rank: int
    host: str
    world_size: int
    group: str = ""


def encode(locations: Iterable[ShardLocation]) -> list[object]:
    """As lists for JSON or a gathering, without saying for each shard what a directory has in common."""
    shelves = groupby(sorted(locations, key=_order), key=_shelf)
    return [
        _VERSION,
        [[*shelf, [[h.rank, h.digest, h.size_bytes, h.group] for h in shards]] for shelf, shards in shelves],
    ]


def decode(encoded: object) -> list[ShardLocation]:
    """What `encode` made.

    Raises:
        PeerError: it did not make this; ranks of one job must run one release.
    """
    try:
        version, shelves = cast(Any, encoded)
        if version != _VERSION:
            raise ValueError(f"version {version!r}")
        return [
            ShardLocation(
                step=step, save_id=save_id, run_id=run_id, world_size=world_size, host=host,
                place=Place(place), root=root, rank=rank, digest=digest, size_bytes=size, group=group,
            )
            for step, save_id, run_id, world_size, host, place, root, shards in shelves
            for rank, digest, size, group in shards
        ]  # fmt: skip
    except (TypeError, ValueError) as error:
        raise PeerError(
            f"a list of held checkpoints cannot be read: expected version {_VERSION} of it, found {error}.",
            hint="Do all hosts run the same release?",
        ) from error


def _shelf(location: ShardLocation) -> tuple[int, str, str, int, str, str, str]:
    return (
        location.step,
        location.save_id,
        location.run_id,
        location.world_size,
        location.host,
        location.place.value,
        location.root,
    )


def _order(location: ShardLocation) -> tuple[object, ...]:
    return (*_shelf(location), location.rank, location.digest, location.size_bytes, location.group)
