# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a job that starts want, and which shards are left: looked at once, agreed by all.

Listing reads headers, manifests and the indexes of this host, and no data: a shard that is listed may turn
out bad or gone when it is read, and whoever reads it verifies it.  One that shows its damage without being
read (a marker, no manifest; on the disk of a host also no index, a file missing or cut) is not listed.
"""

from __future__ import annotations

import functools
import logging
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from resiliency.checkpoint.branches import Branches, read_branches
from resiliency.checkpoint.capture.arena import peek, ranks_in
from resiliency.checkpoint.format.catalog import (
    QUARANTINED,
    Condition,
    glance,
    left_among,
    list_steps,
    steps_in,
    try_read_committed,
)
from resiliency.checkpoint.format.dcp import DcpFormat
from resiliency.checkpoint.format.local import LocalFormat
from resiliency.checkpoint.format.marker import step_directory
from resiliency.checkpoint.format.megatron import MegatronFormat
from resiliency.checkpoint.format.reader import CheckpointReader
from resiliency.checkpoint.locations import Place, ShardLocation, ShardRequest, decode, encode
from resiliency.checkpoint.names import save_id_of
from resiliency.checkpoint.ranks import RankGroup
from resiliency.checkpoint.recovery.listing import likely_steps, pack, split, unpack
from resiliency.checkpoint.recovery.sources import Source, Tier, nearest_on_hosts, sources_of
from resiliency.checkpoint.storage.chunked_file import check_size, verify_file
from resiliency.checkpoint.storage.interface import Storage, write_file
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.errors import (
    CheckpointError,
    CheckpointIncomplete,
    CheckpointMissing,
    ConfigError,
    ResiliencyError,
)

logger = logging.getLogger(__name__)

#: Directory of the local tier that holds other hosts' checkpoints, one directory per host.
REPLICAS = "replicas"
#: Formats that hold each rank's state as it was captured; a checkpoint of another one is not bad.
_RESTORABLE = frozenset({DcpFormat.name, LocalFormat.name, MegatronFormat.name})


@dataclass(frozen=True, kw_only=True)
class FoundSave:
    """A checkpoint on storage that all hosts see: the shards of all the ranks that saved it."""

    step: int
    save_id: str
    run_id: str
    world_size: int
    size_bytes: int

    def locations(self) -> list[ShardLocation]:
        return [
            ShardLocation(
                step=self.step, save_id=self.save_id, run_id=self.run_id, rank=rank,
                world_size=self.world_size, host="", place=Place.PERSISTENT,
                size_bytes=self.size_bytes // self.world_size,
            )
            for rank in range(self.world_size)
        ]  # fmt: skip


class Inventory:
    """What a start may restore, and from where; the same on all ranks.

    What hosts hold is listed in full, but for older steps of a host that has many: those are listed when they
    are asked for, or nothing else is left.  Checkpoints on storage that all see are looked into newest first,
    and only as far as is asked for: of hundreds of them a start needs one.  What has turned out bad since
    is noted here, and not tried again by whoever restores from the same inventory.

    Attributes:
        needs: one per rank, in their order.
        locations: shards that are known so far, also those that turned out bad.
        saves: on persistent storage, as far as known; also those that another number of ranks saved.
        bad: locations that were found damaged or gone.
        branches: of the job, by the records of all tiers and the saves that are known so far.
        stored: steps of the live branch that had a directory and no marker on persistent storage, newest
            first, of any program and in any condition.
        name: of this very inventory, to tell whether all ranks mean the same.
    """

    def __init__(
        self,
        rank_group: RankGroup,
        storage: Storage | None,
        needs: tuple[ShardRequest, ...],
        *,
        interchangeable: bool,
    ) -> None:
        self._rank_group = rank_group
        self._storage = storage
        self._interchangeable = interchangeable
        self.needs = needs
        self.locations: tuple[ShardLocation, ...] = ()
        self.saves: tuple[FoundSave, ...] = ()
        self.bad: set[ShardLocation] = set()
        self.branches = Branches()
        self.stored: tuple[int, ...] = ()
        self.name = ""
        self._listed: frozenset[int] = frozenset()
        self._unseen: list[int] = []
        #: What this host holds and did not list, and the steps of all that hosts did not.
        self._rest: list[ShardLocation] = []
        self._rest_steps: frozenset[int] = frozenset()

    def sources(self) -> list[Source]:
        """What could be restored, best first: newest, and of one step the quickest; collective.

        The first call looks into every checkpoint on storage that all see, and has hosts list all they hold.
        """
        self.list_rest()
        if self._unseen:
            self._look_into(self._unseen, all_of_them=True)
        good = [location for location in self.live if location not in self.bad]
        stored = {location.save_id for location in good if location.place is Place.PERSISTENT}
        saves = [
            Source(step=save.step, tier=Tier.PERSISTENT, save_id=save.save_id, run_id=save.run_id)
            for save in self.saves
            if save.save_id in stored
        ]
        return sources_of(self.needs, good, saves)

    @cached_property
    def on_hosts(self) -> dict[int, Tier]:
        """Steps that the hosts held between them, newest first, and the nearest place of each."""
        return nearest_on_hosts(self.needs, self.live, self.bad)

    @property
    def live(self) -> tuple[ShardLocation, ...]:
        """The `locations` of the live branch."""
        if not self.branches.known:
            return self.locations
        return tuple(found for found in self.locations if self.branches.is_live(found.step, found.save_id))

    def first_on(self, host: str) -> int:
        """The rank that acts for `host`."""
        return min(need.rank for need in self.needs if need.host == host)

    def has_newer(self, step: int | None) -> bool:
        """Whether there are checkpoints above `step` that nobody has looked into; None: any at all."""
        return bool(self._unseen) and (step is None or self._unseen[0] > step)

    def look_further(self) -> None:
        """Look into older checkpoints until one can be restored; collective."""
        self._look_into(self._unseen)

    def look_above(self, step: int) -> None:
        """Look into all checkpoints above `step`; collective."""
        if newer := [unseen for unseen in self._unseen if unseen > step]:
            self._look_into(newer, all_of_them=True)

    def look_at(self, step: int) -> None:
        """Look into one step; collective.

        Also where it was unfinished before: agents go on committing while a job starts.
        """
        self.list_rest([step])
        if step in self._listed and all(save.step != step for save in self.saves):
            self._look_into([step])

    def list_rest(self, steps: Collection[int] | None = None) -> bool:
        """Have hosts list what they hold of `steps`, by default all, if there is more; collective.

        Returns:
            Whether there was more.
        """
        wanted = self._rest_steps if steps is None else self._rest_steps.intersection(steps)
        if not wanted:
            return False
        mine = encode(location for location in self._rest if location.step in wanted)
        self._rest_steps -= wanted
        self._hold(location for encoded in self._rank_group.gather(mine) for location in decode(encoded))
        self.__dict__.pop("on_hosts", None)  # looked at before
        return True

    def refuse_nothing_before(self, step: int) -> None:
        """For a job that was told to go back: it must not start from scratch; collective.

        Raises:
            CheckpointMissing: nothing of the live branch is left.
        """
        if not self.live:
            self.list_rest()
        if not self.live and not self.stored:
            raise CheckpointMissing(
                f"no checkpoint before step {step} is left.",
                hint="Keep more checkpoints (keep=3), or start the job again with restore(state, step=...).",
                step=step,
            )

    def _look_into(self, steps: Sequence[int], *, all_of_them: bool = False) -> None:
        """Have rank 0 look, and tell all what it found."""
        error: ResiliencyError | None = None
        looked = _Looked()
        if self._rank_group.rank == 0 and self._storage is not None:
            try:
                looked = _look_for_saves(
                    self._storage,
                    steps,
                    all_of_them=all_of_them,
                    world_size=self._wanted_size,
                    branches=self.branches,
                )
            except CheckpointError as failure:
                error = failure
        self._rank_group.check(error, "looking into checkpoints")
        self._add(self._rank_group.gather(looked)[0])

    @property
    def _wanted_size(self) -> int | None:
        return None if self._interchangeable else len(self.needs)

    def _add(self, looked: _Looked) -> None:
        self.saves += tuple(looked.saves)
        self._unseen = [step for step in self._unseen if step not in looked.steps]
        self._hold(location for save in looked.saves for location in save.locations())

    def _hold(self, found: Iterable[ShardLocation]) -> None:
        if self._interchangeable:
            # As if as many ranks had saved as want it now: a rank then prefers the shard of its own number,
            # which holds what is not the same on all ranks.
            found = (replace(location, group=_EVERYONE, world_size=len(self.needs)) for location in found)
        self.locations = tuple(dict.fromkeys((*self.locations, *found)))
        self.branches = self.branches.with_seen({location.save_id for location in self.locations})

    def _begin(
        self,
        stored: _Stored,
        held: Iterable[ShardLocation],
        rest: list[ShardLocation],
        unlisted: Collection[Mapping[str, Sequence[int]]],
        branches: Iterable[Branches],
    ) -> None:
        self.name, self.stored = stored.name, stored.unmarked
        self.branches = functools.reduce(Branches.merged, branches, stored.branches)
        self._listed, self._unseen = frozenset(stored.listed), list(stored.listed)
        self._hold(held)
        self._add(stored.looked)
        self._rest = rest
        self._rest_steps = frozenset(
            step for by_source in unlisted for steps in by_source.values() for step in steps
        )
        if self._rest_steps:
            self.list_rest(likely_steps(self.locations, unlisted))


@dataclass(frozen=True)
class _Looked:
    """Steps that were looked into, and the checkpoints that were found there."""

    steps: tuple[int, ...] = ()
    saves: tuple[FoundSave, ...] = ()


@dataclass(frozen=True)
class _Stored:
    """What rank 0 knows of the storage that all see; steps newest first."""

    name: str
    listed: tuple[int, ...] = ()
    unmarked: tuple[int, ...] = ()
    looked: _Looked = field(default_factory=_Looked)
    branches: Branches = field(default_factory=Branches)


def take_inventory(
    rank_group: RankGroup,
    *,
    host: str,
    group: str,
    interchangeable: bool,
    list_here: Callable[[bool], list[ShardLocation]],
    storage: Storage | None,
    own: Storage | None = None,
    asked: Branches | None = None,
) -> Inventory:
    """Learn what all ranks want and all hosts hold; collective.

    Args:
        host: of this rank.
        group: of this rank, see `Shard.group`.
        interchangeable: all ranks are of one group, whatever they said when they saved.
        list_here: what this host holds; called on each rank, with True on the first of its host.
        storage: that all hosts see; only rank 0 looks at it.
        own: this host's local tier, for its record of branches.
        asked: branches to go on from, also where no tier has a record of them yet; any one rank suffices.
    Raises:
        CheckpointError, PeerError: rank 0 could not list `storage`.
        CheckpointMissing: branches were asked for, and nothing of them is left.
    """
    world_size = rank_group.world_size
    everyone = rank_group.gather((host, group, (asked or Branches()).as_rows()))
    asked = functools.reduce(Branches.merged, (Branches.of_rows(rows) for *_, rows in everyone))
    needs = tuple(
        ShardRequest(
            rank=rank, host=host, world_size=world_size, group=_EVERYONE if interchangeable else group
        )
        for rank, (host, group, _) in enumerate(everyone)
    )
    inventory = Inventory(rank_group, storage, needs, interchangeable=interchangeable)
    error: ResiliencyError | None = None
    stored = None
    if rank_group.rank == 0:
        try:
            stored = _list_stored(storage, None if interchangeable else world_size, asked)
        except CheckpointError as failure:
            error = failure
    rank_group.check(error, "listing checkpoints")
    is_first = rank_group.rank == inventory.first_on(host)
    newest, rest = split(list_here(is_first))
    branches = _branches_of_host(own) if is_first else Branches()
    gathered = rank_group.gather((encode(newest), pack(rest), stored, branches.as_rows()))
    of_storage = gathered[0][2]
    assert of_storage is not None  # rank 0's
    held = [location for encoded, *_ in gathered for location in decode(encoded)]
    unlisted = [unpack(packed) for _, packed, *_ in gathered if packed]
    known = [Branches.of_rows(rows) for *_, rows in gathered if rows]
    inventory._begin(of_storage, held, rest, unlisted, [asked, *known])
    if asked.known:
        inventory.refuse_nothing_before(asked.known[-1].step + 1)
    return inventory


def _branches_of_host(own: Storage | None) -> Branches:
    try:
        return Branches() if own is None else read_branches(own)
    except CheckpointError as error:  # other hosts have the same record
        logger.warning("the branches of the local tier are not known here: %s", error)
        return Branches()


#: Group of all ranks of a job whose ranks all train the same tensors.
_EVERYONE = "replicated"


def _list_stored(storage: Storage | None, world_size: int | None, asked: Branches) -> _Stored:
    name = secrets.token_hex(8)
    if storage is None:
        return _Stored(name)
    marked_too, unmarked = (steps[::-1] for steps in list_steps(storage))
    branches = read_branches(storage).merged(asked)
    left = left_among(storage, unmarked, branches)
    # The newest is always needed: its run is the one that goes on.
    looked = _look_for_saves(storage, marked_too, world_size=world_size, branches=branches)
    live = tuple(step for step in unmarked if step not in left)
    return _Stored(name, tuple(marked_too), live, looked, branches)


def _look_for_saves(
    storage: Storage,
    steps: Sequence[int],
    *,
    world_size: int | None,
    branches: Branches,
    all_of_them: bool = False,
) -> _Looked:
    """Look into `steps` in this order, until there is one of the live branch; see `find_save`."""
    looked, saves = [], []
    for step in steps:
        looked.append(step)
        save = find_save(storage, step, world_size=world_size)
        if save is not None:
            saves.append(save)
            branches = branches.with_seen([save.save_id])
            if not all_of_them and branches.is_live(save.step, save.save_id):
                break
    return _Looked(tuple(looked), tuple(saves))


def list_memory(directory: Path, host: str, ranks: Iterable[int] | None = None) -> list[ShardLocation]:
    """Captures in the arena `directory`: of `ranks`, by default of all that have slots there."""
    return [
        ShardLocation(
            step=header.step, save_id=save_id_of(header.run_id, header.step), run_id="", rank=rank,
            world_size=header.world_size, host=host, place=Place.MEMORY,
            size_bytes=header.tensor_bytes, group=header.group,
        )
        for rank in (ranks_in(directory) if ranks is None else ranks)
        for _, header in peek(directory, rank)
    ]  # fmt: skip


def list_local(local: Path, host: str) -> list[ShardLocation]:
    """Shards on this host's disk: its own checkpoints, and its copies of other hosts' ones."""
    found = _list_root(local, host, Place.LOCAL)
    for source_host in _names(LocalStorage(local), REPLICAS):
        found += _list_root(local / REPLICAS / source_host, host, Place.REPLICA)
    return found


def find_save(storage: Storage, step: int, *, world_size: int | None = None) -> FoundSave | None:
    """A committed checkpoint that holds what was captured; of any other it logs why it is none.

    Few operations, however many ranks there are, for one rank does this while all others wait.  A file of it
    that is missing or damaged is found by the ranks that want it.  One that another number of ranks saved is
    wanted by none, and the job is refused for it: one that lacks an index, or was found damaged before,
    refuses nobody.

    Args:
        world_size: ranks of the job; None: it takes the checkpoints of any number.
    Raises:
        CheckpointCorrupt: the storage cannot be read.
    """
    found = glance(storage, step)
    manifest = found.manifest
    if (
        manifest is not None
        and manifest.format in _RESTORABLE
        and world_size not in (None, manifest.world_size)
    ):
        manifest = try_read_committed(storage, step)
        if manifest is None:
            logger.warning(
                "skipping %s: an index is missing, or a shard was found bad before, or it cannot be listed;"
                " and another number of ranks saved it",
                found.path,
            )
    if found.condition is Condition.BAD:
        logger.warning("skipping %s: %s", found.path, found.why)
    elif found.condition is Condition.STOCK:  # good, but for other readers
        logger.warning(
            "skipping %s: another program wrote it (%s); load it with that, such as"
            " torch.distributed.checkpoint.load",
            found.path,
            found.why,
        )
    elif manifest is not None and manifest.format not in _RESTORABLE:
        logger.warning(
            "skipping %s: it has format %r; load it with torch.distributed.checkpoint.load",
            found.path,
            manifest.format,
        )
    elif manifest is not None:
        return FoundSave(
            step=found.step,
            save_id=manifest.save_id,
            run_id=manifest.run_id,
            world_size=manifest.world_size,
            size_bytes=found.size_bytes,
        )
    return None


def open_location(location: ShardLocation) -> CheckpointReader:
    """The checkpoint on this host's disk that `location` is a part of.

    Raises:
        CheckpointIncomplete: it is gone, or another one took its place.
        CheckpointCorrupt: its manifest is not what was written.
    """
    reader = CheckpointReader(LocalStorage(location.root), location.step)
    if reader.manifest.ranks.get(location.rank) != location.digest:
        raise CheckpointIncomplete(
            f"{reader.path} is not the save {location.save_id} any more.",
            hint="It was replaced since the ranks agreed on what to restore.",
            rank=location.rank,
            path=reader.path,
        )
    return reader


def quarantine_location(location: ShardLocation, why: str) -> None:
    """Quarantine a shard on this host's disk, if it is as bad here as another host reported.

    This host reads the shard again, for the fault may be the other host's: a new host with bad memory must
    not cost the job the good copies that all others hold.  Only the shard goes, not its
    checkpoint, whose other shards may be all that is left.
    """
    storage = LocalStorage(location.root)
    directory = step_directory(location.step)
    try:
        index = open_location(location).index(location.rank)
        index.check()
        for record in index.files:
            verify_file(storage, record.inside(directory))
    except CheckpointError as error:
        logger.error("the shard of rank %d in %s is bad: %s", location.rank, location.root, error)
    except Exception as error:  # all ranks wait for this one
        logger.warning(
            "the shard of rank %d in %s was not read again: %r", location.rank, location.root, error
        )
        return
    else:
        logger.warning(
            "the shard of rank %d in %s kept: intact here, though another host reported it corrupt; check"
            " that host's memory (ECC).  Its report: %s",
            location.rank,
            location.root,
            why,
        )
        return
    try:
        write_file(storage, _quarantine_name(directory, location.rank), why.encode())
        storage.sync_dir(directory)
    except CheckpointError as error:  # then it is found bad again
        logger.warning("%s", error)


def _quarantine_name(directory: str, rank: int) -> str:
    return f"{directory}/rank={rank}{QUARANTINED}"


def _list_root(root: Path, host: str, place: Place) -> list[ShardLocation]:
    storage = LocalStorage(root)
    try:
        steps = steps_in(storage)
    except CheckpointError as error:  # a disk that fails takes its shards with it, not the job
        logger.warning("skipping %s: %s", root, error)
        return []
    return [location for step in steps for location in _list_step(storage, step, host, place)]


def _list_step(storage: LocalStorage, step: int, host: str, place: Place) -> Sequence[ShardLocation]:
    try:
        reader = CheckpointReader(storage, step)
    except (CheckpointError, ConfigError) as error:
        logger.info("skipping %s: %s", storage.describe(step_directory(step)), error)
        return ()
    manifest = reader.manifest
    if manifest.format != LocalFormat.name:
        logger.warning("skipping %s: it has format %r", reader.path, manifest.format)
        return ()
    found = []
    for rank, digest in manifest.ranks.items():
        try:
            if storage.exists(_quarantine_name(step_directory(step), rank)):
                logger.info("skipping the shard of rank %d in %s: it was found bad", rank, reader.path)
                continue
            index = reader.index(rank)
            for record in index.files:
                check_size(storage, record.inside(step_directory(step)))
        except (CheckpointError, ConfigError) as error:
            logger.warning("skipping the shard of rank %d in %s: %s", rank, reader.path, error)
            continue
        found.append(
            ShardLocation(
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
        logger.warning("skipping %s: %s", storage.describe(name), error)
        return []
