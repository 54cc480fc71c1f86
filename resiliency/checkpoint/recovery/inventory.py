# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a job that starts want, and which shards are left: looked at once, agreed by all.

Listing reads headers, manifests and indexes, and no data: a shard that is listed may turn out bad or
gone when it is read, and whoever reads it verifies it.  One that shows its damage without being read
(no index, a file that is missing or cut, a marker) is not listed.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from resiliency.checkpoint.agreement import Agreement
from resiliency.checkpoint.arena import peek, ranks_in
from resiliency.checkpoint.catalog import SET_ASIDE, Condition, inspect, list_steps, steps_in
from resiliency.checkpoint.dcp_format import DcpFormat
from resiliency.checkpoint.local_format import LocalFormat
from resiliency.checkpoint.marker import step_directory
from resiliency.checkpoint.megatron_format import MegatronFormat
from resiliency.checkpoint.reader import CheckpointReader
from resiliency.checkpoint.recovery.holdings import Holding, Need, Place, decode, encode
from resiliency.checkpoint.recovery.listing import likely_steps, pack, split, unpack
from resiliency.checkpoint.recovery.sources import Source, Tier, nearest_on_hosts, sources_of
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


class Inventory:
    """What a start may restore, and from where; the same on all ranks.

    What hosts hold is listed in full, but for older steps of a host that has many: those are listed when they
    are asked for, or nothing else is left.  Checkpoints on storage that all see are looked into newest first,
    and only as far as is asked for: of hundreds of them a start needs one.  What has turned out bad since
    is noted here, and not tried again by whoever restores from the same inventory.

    Attributes:
        needs: one per rank, in their order.
        holdings: shards that are known so far, also those that turned out bad.
        saves: on persistent storage, as far as known; also those that another number of ranks saved.
        bad: holdings that were found damaged or gone.
        stored: steps that had a directory and no marker on persistent storage, newest first, whoever wrote
            them and whatever they are worth.
        name: of this very inventory, to tell whether all ranks mean the same.
    """

    def __init__(
        self, agreement: Agreement, storage: Storage | None, needs: tuple[Need, ...], *, interchangeable: bool
    ) -> None:
        self._agreement = agreement
        self._storage = storage
        self._interchangeable = interchangeable
        self.needs = needs
        self.holdings: tuple[Holding, ...] = ()
        self.saves: tuple[Save, ...] = ()
        self.bad: set[Holding] = set()
        self.stored: tuple[int, ...] = ()
        self.name = ""
        self._listed: frozenset[int] = frozenset()
        self._unseen: list[int] = []
        #: What this host holds and did not list, and the steps of all that hosts did not.
        self._rest: list[Holding] = []
        self._rest_steps: frozenset[int] = frozenset()

    def sources(self) -> list[Source]:
        """What could be restored, best first: newest, and of one step the quickest; collective.

        The first call looks into every checkpoint on storage that all see, and has hosts list all they hold.
        """
        self.list_rest()
        if self._unseen:
            self._look_into(self._unseen, all_of_them=True)
        good = [holding for holding in self.holdings if holding not in self.bad]
        stored = {holding.save_id for holding in good if holding.place is Place.PERSISTENT}
        saves = [
            Source(step=save.step, tier=Tier.DISK, save_id=save.save_id, run_id=save.run_id)
            for save in self.saves
            if save.save_id in stored
        ]
        return sources_of(self.needs, good, saves)

    @cached_property
    def on_hosts(self) -> dict[int, Tier]:
        """Steps that the hosts held between them, newest first, and the nearest place of each."""
        return nearest_on_hosts(self.needs, self.holdings, self.bad)

    def first_on(self, host: str) -> int:
        """The rank that acts for `host`."""
        return min(need.rank for need in self.needs if need.host == host)

    def has_newer(self, step: int | None) -> bool:
        """Whether there are checkpoints above `step` that nobody has looked into; None: any at all."""
        return bool(self._unseen) and (step is None or self._unseen[0] > step)

    def look_further(self) -> None:
        """Look into older checkpoints until one can be restored; collective."""
        self._look_into(self._unseen)

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
        mine = encode(holding for holding in self._rest if holding.step in wanted)
        self._rest_steps -= wanted
        self._hold(holding for encoded in self._agreement.gather(mine) for holding in decode(encoded))
        self.__dict__.pop("on_hosts", None)  # looked at before
        return True

    def _look_into(self, steps: Sequence[int], *, all_of_them: bool = False) -> None:
        """Have rank 0 look, and tell all what it found."""
        error: ResiliencyError | None = None
        looked = _Looked()
        if self._agreement.rank == 0 and self._storage is not None:
            try:
                looked = _look_for_saves(self._storage, steps, all_of_them=all_of_them)
            except CheckpointError as failure:
                error = failure
        self._agreement.check(error, "looking into checkpoints")
        self._add(self._agreement.gather(looked)[0])

    def _add(self, looked: _Looked) -> None:
        self.saves += tuple(looked.saves)
        self._unseen = [step for step in self._unseen if step not in looked.steps]
        self._hold(holding for save in looked.saves for holding in save.holdings())

    def _hold(self, found: Iterable[Holding]) -> None:
        if self._interchangeable:
            # As if as many ranks had saved as want it now: a rank then prefers the shard of its own number,
            # which holds what is not the same on all ranks.
            found = (replace(holding, group=_EVERYONE, world_size=len(self.needs)) for holding in found)
        self.holdings = tuple(dict.fromkeys((*self.holdings, *found)))

    def _begin(
        self,
        stored: _Stored,
        held: Iterable[Holding],
        rest: list[Holding],
        unlisted: Collection[Mapping[str, Sequence[int]]],
    ) -> None:
        self.name, self.stored = stored.name, stored.unmarked
        self._listed, self._unseen = frozenset(stored.listed), list(stored.listed)
        self._hold(held)
        self._add(stored.looked)
        self._rest = rest
        self._rest_steps = frozenset(
            step for by_source in unlisted for steps in by_source.values() for step in steps
        )
        if self._rest_steps:
            self.list_rest(likely_steps(self.holdings, unlisted))


@dataclass(frozen=True)
class _Looked:
    """Steps that were looked into, and the checkpoints that were found there."""

    steps: tuple[int, ...] = ()
    saves: tuple[Save, ...] = ()


@dataclass(frozen=True)
class _Stored:
    """What rank 0 knows of the storage that all see; steps newest first."""

    name: str
    listed: tuple[int, ...] = ()
    unmarked: tuple[int, ...] = ()
    looked: _Looked = field(default_factory=_Looked)


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
    inventory = Inventory(agreement, storage, needs, interchangeable=interchangeable)
    error: ResiliencyError | None = None
    stored = None
    if agreement.rank == 0:
        try:
            stored = _list_stored(storage)
        except CheckpointError as failure:
            error = failure
    agreement.check(error, "listing checkpoints")
    is_first = agreement.rank == inventory.first_on(host)
    newest, rest = split(list_here(is_first))
    gathered = agreement.gather((encode(newest), pack(rest), stored))
    of_storage = gathered[0][2]
    assert of_storage is not None  # rank 0's
    held = [holding for encoded, _, _ in gathered for holding in decode(encoded)]
    inventory._begin(of_storage, held, rest, [unpack(packed) for _, packed, _ in gathered if packed])
    return inventory


#: Group of all ranks of a job whose ranks all train the same tensors.
_EVERYONE = "replicated"


def _list_stored(storage: Storage | None) -> _Stored:
    name = secrets.token_hex(8)
    if storage is None:
        return _Stored(name)
    marked_too, unmarked = (steps[::-1] for steps in list_steps(storage))
    # The newest is always needed: its run is the one that goes on.
    return _Stored(name, tuple(marked_too), tuple(unmarked), _look_for_saves(storage, marked_too))


def _look_for_saves(storage: Storage, steps: Sequence[int], *, all_of_them: bool = False) -> _Looked:
    """Look into `steps` in this order, until one can be restored."""
    looked, saves = [], []
    for step in steps:
        looked.append(step)
        save = find_save(storage, step)
        if save is not None:
            saves.append(save)
            if not all_of_them:
                break
    return _Looked(tuple(looked), tuple(saves))


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


def find_save(storage: Storage, step: int) -> Save | None:
    """A complete checkpoint that holds what was captured; of any other it logs why it is none.

    Raises:
        CheckpointCorrupt: the storage cannot be read.
    """
    found = inspect(storage, step)
    manifest = found.manifest
    if found.condition is Condition.BAD:
        logger.warning("passing over %s: %s", found.path, found.why)
    elif found.condition is Condition.STOCK:  # good, but for other readers
        logger.warning(
            "passing over %s: another program wrote it (%s); load it with that, such as"
            " torch.distributed.checkpoint.load",
            found.path,
            found.why,
        )
    elif manifest is not None and manifest.format not in _RESTORABLE:
        logger.warning(
            "passing over %s: it has format %r; load it with torch.distributed.checkpoint.load",
            found.path,
            manifest.format,
        )
    elif manifest is not None:
        return Save(
            step=found.step,
            save_id=manifest.save_id,
            run_id=manifest.run_id,
            world_size=manifest.world_size,
            size_bytes=found.size_bytes,
        )
    return None


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
        try:
            if storage.exists(_set_aside(step_directory(step), rank)):
                logger.info("passing over the shard of rank %d in %s: it was found bad", rank, reader.path)
                continue
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
