# SPDX-License-Identifier: Apache-2.0
"""Which copies of other hosts' checkpoints may go, and when.

A copy belongs to the run that its manifest names, as a host's own checkpoints do
(`resiliency.checkpoint.commit.retention`).  It is needless once newer saves of that run are complete on all
hosts of the job, whether its owner is still one of them or left: what such a host saved counted only
together with the others' parts, which go too.

The run is that of this host's own part of the newest complete save.  Without that part nothing goes:
then it was replaced or lost, and vouches for nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

from resiliency.checkpoint.branches import Branches, read_branches
from resiliency.checkpoint.commit.retention import committed
from resiliency.checkpoint.format.manifest import Manifest
from resiliency.checkpoint.replication.completion import SaveName
from resiliency.checkpoint.replication.replica_store import ReplicaStore
from resiliency.checkpoint.storage.interface import Storage
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.errors import ResiliencyError

logger = logging.getLogger(__name__)


def retire_replicas(
    store: ReplicaStore, own: Storage, newest: SaveName, *, below: int
) -> Iterator[tuple[str, list[int]]]:
    """Delete copies before step `below`; yields the directory name of each owner with the steps that went.

    Args:
        own: this host's own checkpoints.
        newest: save that is complete on all hosts of the job.
        below: step of the oldest complete save that stays.
    """
    part = _part_of(own, newest)
    branches = Branches() if part is None else read_branches(own)
    for source_host in store.source_hosts() if part is not None else ():
        assert part is not None
        try:
            yield source_host, store.retire(source_host, below, run_id=part.run_id, branches=branches)
        except ResiliencyError as error:  # of one owner; the next complete save tries again
            logger.warning("old copies of %s were not deleted: %s", source_host, error)


def retire_replicas_alone(
    local_root: Path, complete: Mapping[int, str], *, keep: int
) -> Iterator[tuple[str, list[int]]]:
    """`retire_replicas` for a job that went on with this host alone, where no `PeerService` runs.

    While other hosts have parts of the newest save, that is left to the service: it may be receiving.

    Args:
        complete: step to save id of this attempt's complete saves.
        keep: how many complete generations stay.
    """
    own = LocalStorage(local_root)
    newest = SaveName(max(complete), complete[max(complete)])
    part = _part_of(own, newest)
    stays = sorted(complete)[-keep:]
    if part is not None and len(part.ranks) == part.world_size and len(stays) == keep:
        yield from retire_replicas(ReplicaStore(local_root), own, newest, below=stays[0])


def _part_of(own: Storage, save: SaveName) -> Manifest | None:
    """This host's part of a save."""
    manifest = committed(own, save.step)
    return manifest if manifest is not None and manifest.save_id == save.save_id else None
