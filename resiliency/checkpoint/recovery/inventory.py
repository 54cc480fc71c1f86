# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a job that starts want, and which shards are left: agreed once, by all.

Listing reads headers, manifests and indexes, and no data: a shard that is listed may turn out bad or
gone when it is read, and whoever reads it verifies it.  One that shows its damage without being read
(no index, a file that is missing or cut, a marker) is not listed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from resiliency.checkpoint.agreement import Agreement
from resiliency.checkpoint.arena import peek, ranks_in
from resiliency.checkpoint.catalog import SET_ASIDE, Condition, list_checkpoints, steps_in
from resiliency.checkpoint.dcp_format import DcpFormat
from resiliency.checkpoint.local_format import LocalFormat
from resiliency.checkpoint.marker import step_directory
from resiliency.checkpoint.megatron_format import MegatronFormat
from resiliency.checkpoint.reader import CheckpointReader
from resiliency.checkpoint.recovery.holdings import Holding, Need, Place, decode, encode
from resiliency.checkpoint.save_id import save_id_of
from resiliency.checkpoint.shard_file import check_size, verify_file
from resiliency.checkpoint.storage import LocalStorage, Storage, write_file
from resiliency.errors import CheckpointError, CheckpointIncomplete, ConfigError, ResiliencyError

logger = logging.getLogger(__name__)

#: Directory of the local tier that holds other hosts' checkpoints, one directory per host.
REPLICAS = "replicas"
#: Formats that hold each rank's state as it was captured; a checkpoint of another one is not bad.
_RESTORABLE = frozenset({DcpFormat.name, LocalFormat.name, MegatronFormat.name})


@dataclass(frozen=True, kw_only=True)
class Save:
    """A checkpoint on storage that all hosts see: the shards of all the ranks that saved it."""

    step: int
    save_id: str
    run_id: str
    world_size: int
    size_bytes: int

    def holdings(self) -> list[Holding]:
        return [
            Holding(
                step=self.step, save_id=self.save_id, run_id=self.run_id, rank=rank,
                world_size=self.world_size, host="", place=Place.PERSISTENT,
                size_bytes=self.size_bytes // self.world_size,
            )
            for rank in range(self.world_size)
        ]  # fmt: skip


@dataclass(frozen=True)
class Inventory:
    """The same on all ranks.

    Args:
        needs: one per rank, in their order.
        saves: on persistent storage, also those that another number of ranks saved.
    """

    needs: tuple[Need, ...]
    holdings: tuple[Holding, ...]
    saves: tuple[Save, ...] = ()

    def first_on(self, host: str) -> int:
        """The rank that acts for `host`."""
        return min(need.rank for need in self.needs if need.host == host)


def take_inventory(
    agreement: Agreement,
    *,
    host: str,
    group: str,
    interchangeable: bool,
    list_here: Callable[[bool], list[Holding]],
    storage: Storage | None,
) -> Inventory:
    """Learn what all ranks want and all hosts hold; collective.

    Args:
        host: of this rank.
        group: of this rank, see `Shard.group`.
        interchangeable: all ranks are of one group, whatever they said when they saved.
        list_here: what this host holds; called on each rank, with True on the first of its host.
        storage: that all hosts see; only rank 0 looks at it.
    Raises:
        CheckpointError, PeerError: rank 0 could not list `storage`.
    """
    world_size = agreement.world_size
    everyone = agreement.gather((host, group))
    needs = tuple(
        Need(rank=rank, host=host, world_size=world_size, group=_EVERYONE if interchangeable else group)
        for rank, (host, group) in enumerate(everyone)
    )
    is_first = agreement.rank == min(need.rank for need in needs if need.host == host)
    error: ResiliencyError | None = None
    saves: list[Save] = []
    if storage is not None and agreement.rank == 0:
        try:
            saves = list_saves(storage)
        except CheckpointError as failure:
            error = failure
    agreement.check(error, "listing checkpoints")
    gathered = agreement.gather((encode(list_here(is_first)), saves))
    saves = gathered[0][1]
    holdings = [holding for encoded, _ in gathered for holding in decode(encoded)]
    holdings += [holding for save in saves for holding in save.holdings()]
    if interchangeable:
        # As if as many ranks had saved as want it now: a rank then prefers the shard of its own number,
        # which holds what is not the same on all ranks.
        holdings = [replace(holding, group=_EVERYONE, world_size=world_size) for holding in holdings]
    return Inventory(needs, tuple(dict.fromkeys(holdings)), tuple(saves))


#: Group of all ranks of a job whose ranks all train the same tensors.
_EVERYONE = "replicated"


def list_memory(directory: Path, host: str, ranks: Iterable[int] | None = None) -> list[Holding]:
    """Captures in the arena `directory`: of `ranks`, by default of all that have slots there."""
    return [
        Holding(
            step=header.step, save_id=save_id_of(header.run_id, header.step), run_id="", rank=rank,
            world_size=header.world_size, host=host, place=Place.MEMORY,
            size_bytes=header.tensor_bytes, group=header.group,
        )
        for rank in (ranks_in(directory) if ranks is None else ranks)
        for _, header in peek(directory, rank)
    ]  # fmt: skip


def list_local(local: Path, host: str) -> list[Holding]:
    """Shards on this host's disk: its own checkpoints, and its copies of other hosts' ones."""
    found = _list_root(local, host, Place.LOCAL)
    for owner in _names(LocalStorage(local), REPLICAS):
        found += _list_root(local / REPLICAS / owner, host, Place.REPLICA)
    return found


def list_saves(storage: Storage) -> list[Save]:
    """Complete checkpoints that hold what was captured; of the others it logs why they are none.

    Raises:
        CheckpointCorrupt: the storage cannot be listed.
    """
    saves = []
    for found in list_checkpoints(storage):
        manifest = found.manifest
        if found.condition is Condition.BAD:
            logger.warning("passing over %s: %s", found.path, found.why)
        elif found.condition is Condition.STOCK:  # good, but for other readers
            logger.info("passing over %s: %s", found.path, found.why)
        elif manifest is not None and manifest.format not in _RESTORABLE:
            logger.warning(
                "passing over %s: it has format %r; load it with torch.distributed.checkpoint.load",
                found.path,
                manifest.format,
            )
        elif manifest is not None:
            saves.append(
                Save(
                    step=found.step,
                    save_id=manifest.save_id,
                    run_id=manifest.run_id,
                    world_size=manifest.world_size,
                    size_bytes=found.size_bytes,
                )
            )
    return saves


def open_holding(holding: Holding) -> CheckpointReader:
    """The checkpoint on this host's disk that `holding` is a part of.

    Raises:
        CheckpointIncomplete: it is gone, or another one took its place.
        CheckpointCorrupt: its manifest is not what was written.
    """
    reader = CheckpointReader(LocalStorage(holding.root), holding.step)
    if reader.manifest.ranks.get(holding.rank) != holding.digest:
        raise CheckpointIncomplete(
            f"{reader.path} is not the save {holding.save_id} any more.",
            hint="It was replaced since the ranks agreed on what to restore.",
            rank=holding.rank,
            path=reader.path,
        )
    return reader


def try_set_aside(holding: Holding, why: str) -> None:
    """Have a shard on this host's disk listed no more, if it is as bad as somebody found.

    It is read again, for the fault may be theirs: a new host with bad memory must not cost the job the
    good copies that all others hold.  Only the shard goes, not its checkpoint, whose others may be all
    that is left.
    """
    storage = LocalStorage(holding.root)
    directory = step_directory(holding.step)
    try:
        for record in open_holding(holding).index(holding.rank).files:
            verify_file(storage, record.inside(directory))
    except CheckpointError as error:
        logger.error("the shard of rank %d in %s is bad: %s", holding.rank, holding.root, error)
    else:
        logger.warning("another host found a shard bad that is good here: is its memory?  It says: %s", why)
        return
    try:
        write_file(storage, _set_aside(directory, holding.rank), why.encode())
        storage.sync_dir(directory)
    except CheckpointError as error:  # then it is found bad again
        logger.warning("%s", error)


def _set_aside(directory: str, rank: int) -> str:
    return f"{directory}/rank={rank}{SET_ASIDE}"


def _list_root(root: Path, host: str, place: Place) -> list[Holding]:
    storage = LocalStorage(root)
    try:
        steps = steps_in(storage)
    except CheckpointError as error:  # a disk that fails takes its shards with it, not the job
        logger.warning("passing over %s: %s", root, error)
        return []
    return [holding for step in steps for holding in _list_step(storage, step, host, place)]


def _list_step(storage: LocalStorage, step: int, host: str, place: Place) -> Sequence[Holding]:
    try:
        reader = CheckpointReader(storage, step)
    except (CheckpointError, ConfigError) as error:
        logger.info("passing over %s: %s", storage.describe(step_directory(step)), error)
        return ()
    manifest = reader.manifest
    if manifest.format != LocalFormat.name:
        logger.warning("passing over %s: it has format %r", reader.path, manifest.format)
        return ()
    found = []
    for rank, digest in manifest.ranks.items():
        if storage.exists(_set_aside(step_directory(step), rank)):
            logger.info("passing over the shard of rank %d in %s: it was found bad", rank, reader.path)
            continue
        try:
            index = reader.index(rank)
            for record in index.files:
                check_size(storage, record.inside(step_directory(step)))
        except (CheckpointError, ConfigError) as error:
            logger.warning("passing over the shard of rank %d in %s: %s", rank, reader.path, error)
            continue
        found.append(
            Holding(
                step=step, save_id=manifest.save_id, run_id=manifest.run_id, rank=rank,
                world_size=manifest.world_size, host=host, place=place, root=str(storage.root),
                digest=digest, size_bytes=index.size_bytes, group=index.group,
            )
        )  # fmt: skip
    return found


def _names(storage: Storage, name: str) -> list[str]:
    try:
        return storage.list(name)
    except CheckpointError as error:
        logger.warning("passing over %s: %s", storage.describe(name), error)
        return []
