# SPDX-License-Identifier: Apache-2.0
"""Bring a state back: from memory, this host's disk, other hosts, or storage that all see.

The ranks agree once on what is left and where (`resiliency.checkpoint.recovery.inventory`), and plan
alike from that, as often as they restore at one start: the newest save of which every rank gets a
shard, each from the place that costs least.  Shards of one save may come from any mix of places; saves
are never mixed.  No byte of the state changes before every rank has found that its shard fits.  A source
that turns out bad for any rank is passed over on all of them and the rest is planned anew: another copy,
else an older save.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch

from resiliency.checkpoint.agreement import Agreement
from resiliency.checkpoint.arena import RankArena, open_captured
from resiliency.checkpoint.catalog import quarantine
from resiliency.checkpoint.lease import try_lease
from resiliency.checkpoint.marker import step_directory
from resiliency.checkpoint.progress import Progress
from resiliency.checkpoint.reader import CheckpointReader
from resiliency.checkpoint.recovery.exchange import exchange
from resiliency.checkpoint.recovery.holdings import Holding, Place
from resiliency.checkpoint.recovery.inventory import (
    Inventory,
    Save,
    list_local,
    list_memory,
    open_holding,
    take_inventory,
    try_set_aside,
)
from resiliency.checkpoint.recovery.losses import BEGIN_ANEW, refuse_what_was_lost
from resiliency.checkpoint.recovery.planner import Pick, Plan, each_plan, explain_loss
from resiliency.checkpoint.recovery.sources import Tier, tier_of, tier_of_pick
from resiliency.checkpoint.recovery.unusable import find_unusable
from resiliency.checkpoint.recovery.verdicts import agree
from resiliency.checkpoint.save_id import save_id_of
from resiliency.checkpoint.storage import LocalStorage, Storage
from resiliency.checkpoint.table import Shard
from resiliency.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointIncomplete,
    ConfigError,
    LayoutMismatch,
    PeerError,
    ResiliencyError,
)

logger = logging.getLogger(__name__)

#: Finds out whether a state fits what its rank had captured (else LayoutMismatch), changing nothing, and
#: returns what fills it, which runs once all ranks fit; None: nothing is to be filled.
Fill = Callable[[Shard], Callable[[], object] | None]


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What `restore` did.  Step 0 and tier NONE: there was nothing, the state is as it was.

    Attributes:
        size_bytes: of this rank's tensors.
        run_id: the run whose checkpoints the directory holds; who goes on with them takes over its name.
        bytes_by_tier: how much of the state of all ranks came from where.
        holdings: the copies of this save on the disks of hosts, those that turned out bad left out: what
            to make new copies from.
    """

    step: int
    tier: Tier
    size_bytes: int = 0
    run_id: str = ""
    save_id: str = ""
    bytes_by_tier: Mapping[Tier, int] = field(default_factory=dict)
    holdings: tuple[Holding, ...] = field(default=(), compare=False, repr=False)


class Restorer:
    """Restores one rank's state, together with all others.

    Args:
        arena: of this rank.
        storage: that all hosts see, if there is one.
        replicated: all ranks train the same tensors, so each may go on from the shard of any, and their
            number may change.
        local: directory of this host's local tier.
        host: name of this host; empty: each rank looks at its own captures only.
        group: names the ranks whose shards are interchangeable with this one's.
    """

    def __init__(
        self,
        arena: RankArena,
        storage: Storage | None,
        agreement: Agreement,
        *,
        replicated: bool,
        local: Path | None = None,
        host: str = "",
        group: str = "",
    ) -> None:
        self._arena = arena
        self._storage = storage
        self._agreement = agreement
        self._replicated = replicated
        self._local = local
        self._host = host
        self._group = group
        #: Whether a source turned out bad when some of it had been put into the state already.
        self._overwritten = False

    def restore(self, fill: Fill, *, step: int | None = None, inventory: Inventory | None = None) -> Restored:
        """Let `fill` bring back the newest step, or exactly `step`; collective.

        Args:
            inventory: what there is, from `take_inventory`; None: take it now.
        Raises:
            LayoutMismatch: the checkpoint is of another model or parallel layout, on any rank; or all that
                is left is a whole one of another number of ranks.
            CheckpointCorrupt: there are checkpoints, and all turned out bad, now or at an earlier start.
            CheckpointIncomplete: there are parts of several saves, and not one save is whole.
            ConfigError: the ranks were given different inventories.
            PeerError: another rank could not restore, or died.
        """
        inventory = self._agreed(inventory)
        self._overwritten = False
        plan = self._choose(inventory, step)
        self._tell_losses(inventory, plan, step)
        while plan is not None:
            size, found_bad = self._try(plan, fill)
            if not found_bad:
                return _restored(inventory, plan, size, self._agreement.rank)
            inventory.bad |= self._pass_over(plan, inventory, found_bad)
            # Whoever reads a bad shard again takes its time: not at the cost of an exchange's deadlines.
            self._agreement.gather(None)
            plan = self._choose(inventory, step)
        if self._overwritten:
            raise CheckpointCorrupt(
                "a checkpoint turned out bad when a part of it was in the state already; there is no other.",
                hint=BEGIN_ANEW,
                rank=self._agreement.rank,
            )
        if step is None:
            self._refuse_to_begin_anew(inventory)
            seen_by_all = [] if self._storage is None else [self._storage]
            refuse_what_was_lost(self._agreement, seen_by_all, self._local)
        return Restored(step=0, tier=Tier.NONE)

    def _refuse_to_begin_anew(self, inventory: Inventory) -> None:
        """Where much was saved and nothing can be used, a person decides what becomes of it."""
        if inventory.bad:
            tried = len({holding.save_id for holding in inventory.bad})
            raise CheckpointCorrupt(
                f"none of the {tried} checkpoints that are left can be used; the log says what is wrong.",
                hint=BEGIN_ANEW,
            )
        refusal = find_unusable(inventory.needs, inventory.holdings).refusal()
        if refusal is not None:
            raise refusal

    # --- choosing --------------------------------------------------------------------------------

    def take_inventory(self) -> Inventory:
        """Look at what is left and where; collective.

        Raises:
            CheckpointError, PeerError: rank 0 could not list the storage that all see.
        """
        # Without a name of the host, each rank is one by itself.
        host = self._host or f"rank-{self._agreement.rank}"

        def list_here(is_first: bool) -> list[Holding]:
            if not is_first:
                return []
            ranks = None if self._host else [self._agreement.rank]
            found = list_memory(self._arena.directory, host, ranks)
            return found if self._local is None else found + list_local(self._local, host)

        return take_inventory(
            self._agreement,
            host=host,
            group=self._group,
            interchangeable=self._replicated,
            list_here=list_here,
            storage=self._storage,
        )

    def _agreed(self, given: Inventory | None) -> Inventory:
        """The inventory to restore from: one for all, for from two the ranks would plan differently."""
        names = self._agreement.gather(None if given is None else given.name)
        if len(set(names)) > 1:
            without = names.count(None)
            raise ConfigError(
                f"{len(names)} ranks restore together, {without} of them without an inventory and the others"
                f" with {len(set(names) - {None})} different ones.",
                hint="Take one inventory on all ranks and give it to `restore` on all, or on none.",
                rank=self._agreement.rank,
            )
        return self.take_inventory() if given is None else given

    def _choose(self, inventory: Inventory, step: int | None) -> Plan | None:
        """The best that is left, looking into no more checkpoints than that takes; collective."""
        if step is not None:
            plan = self._best(inventory, step)
            if plan is None:
                inventory.look_at(step)
                plan = self._best(inventory, step)
            return plan
        plan = self._best(inventory, None)
        while inventory.has_newer(None if plan is None else plan.step):
            inventory.look_further()
            plan = self._best(inventory, None)
        if plan is None and inventory.list_rest():
            plan = self._best(inventory, None)
        return plan

    def _best(self, inventory: Inventory, step: int | None) -> Plan | None:
        plan = next(each_plan(inventory.needs, inventory.holdings, bad=inventory.bad, step=step), None)
        for save in sorted(inventory.saves, key=lambda save: -save.step):
            if step not in (None, save.step) or (plan is not None and save.step <= plan.step):
                continue
            if save.world_size != self._agreement.world_size and not self._replicated:
                raise self._of_others(save, inventory, step)
        return plan

    def _of_others(self, save: Save, inventory: Inventory, step: int | None) -> LayoutMismatch:
        """`save` is of another number of ranks; who loads it by other means learns what newer is left."""
        assert self._storage is not None  # it was listed
        path = self._storage.describe(step_directory(save.step))
        message = f"{path} was saved by {save.world_size} ranks, this job has {self._agreement.world_size}."
        hint = "Load it with torch.distributed.checkpoint.load, which cuts it anew."
        newer = _not_taken(inventory, above=save.step, step=step)
        if newer:
            message += f"  The hosts hold newer ones: {explain_loss(inventory.needs, newer)}"
        found = find_unusable(inventory.needs, newer)
        if found.ranks:
            hint = f"Start {found.ranks} ranks to go on from step {found.step}.  Step {save.step}: {hint}"
        return LayoutMismatch(message, hint=hint, path=path, step=save.step)

    def _tell_losses(self, inventory: Inventory, plan: Plan | None, step: int | None) -> None:
        """Why it is not the newest save that is restored."""
        newer = _not_taken(inventory, above=-1 if plan is None else plan.step, step=step)
        if newer and self._agreement.rank == 0:
            logger.warning("not restored: %s", explain_loss(inventory.needs, newer))

    # --- trying ----------------------------------------------------------------------------------

    def _try(self, plan: Plan, fill: Fill) -> tuple[int, dict[int, str]]:
        """Bytes of this rank, and the ranks whose source is bad; if there are any, nothing is restored."""
        rank, doing = self._agreement.rank, f"restoring from {tier_of(plan).value}"
        with ExitStack() as held:
            if rank == 0 and self._storage is not None and _uses(plan, Place.PERSISTENT):
                held.enter_context(try_lease(self._storage, plan.step))
            progress = held.enter_context(Progress(f"restoring step {plan.step}", shown=rank == 0))
            error: ResiliencyError | None = None
            size, act = 0, None
            try:
                received = exchange(plan, rank)
            except PeerError:  # leaves nobody to agree with
                raise
            except ResiliencyError as failure:
                received, error = None, failure
            try:
                if error is None:
                    shard = self._find(plan.picks[rank], held, progress) if received is None else received
                    size, act = shard.layout.size_bytes, fill(shard)
            except _OWN_ERRORS as failure:
                error = _named(failure)
            bad = agree(self._agreement, error, doing)
            if bad:
                return 0, bad
            try:
                if act is not None:
                    act()
            except _OWN_ERRORS as failure:
                error = _named(failure)
            bad = agree(self._agreement, error, doing)
            self._overwritten |= bool(bad)
            return size, bad

    def _find(self, pick: Pick, held: ExitStack, progress: Progress) -> Shard:
        """What this rank reads by itself; its tensors may be read when they are asked for."""
        holding, rank = pick.holding, pick.holding.rank
        if holding.place is Place.MEMORY:
            return self._borrow(holding, held)
        if holding.place is Place.PERSISTENT:
            assert self._storage is not None
            reader = CheckpointReader(self._storage, holding.step)
            if reader.manifest.save_id != holding.save_id:
                raise CheckpointIncomplete(f"{reader.path} was replaced.", path=reader.path)
            if self._replicated:  # any will do: the one of the same number, as far as there is one
                rank = self._agreement.rank % reader.manifest.world_size
        else:
            held.enter_context(try_lease(LocalStorage(holding.root), holding.step))
            reader = open_holding(holding)
        progress.expect(reader.index(rank).size_bytes)
        reader.pace = progress
        return reader.open_shard(rank)

    def _borrow(self, holding: Holding, held: ExitStack) -> Shard:
        if holding.rank == self._arena.rank:
            shard = held.enter_context(self._arena.captured(holding.step))
        else:
            slot = open_captured(self._arena.directory, holding.rank, step=holding.step)
            shard = held.enter_context(slot).shard
        if save_id_of(shard.run_id, shard.step) != holding.save_id:
            raise CheckpointIncomplete(f"the capture of step {holding.step} was replaced.")
        return shard

    # --- what turned out bad ---------------------------------------------------------------------

    def _pass_over(self, plan: Plan, inventory: Inventory, why: Mapping[int, str]) -> set[Holding]:
        """What not to try again, now or in another start."""
        first = why[min(why)]
        logger.error("step %d from %s passed over: %s", plan.step, tier_of(plan).value, first)
        bad = {plan.picks[rank].holding: text for rank, text in why.items()}
        for holding, text in bad.items():
            on_host = holding.place.is_disk_of_host
            if on_host and self._agreement.rank == inventory.first_on(holding.host):
                try_set_aside(holding, text)
        if all(holding.place is not Place.PERSISTENT for holding in bad):
            return set(bad)
        # There a checkpoint is one whole: all ranks may need the same file.
        if self._agreement.rank == 0 and self._storage is not None:
            ranks = [rank if self._replicated else plan.picks[rank].holding.rank for rank in why]
            _try_quarantine(self._storage, plan.step, ranks, first)
        same = {h for h in inventory.holdings if h.save_id == plan.save_id and h.place is Place.PERSISTENT}
        return same | set(bad)


def _not_taken(inventory: Inventory, *, above: int, step: int | None) -> list[Holding]:
    """What is newer than step `above`; what turned out bad was told when it was found."""
    return [
        holding
        for holding in inventory.holdings
        if step in (None, holding.step) and holding.step > above and holding not in inventory.bad
    ]


def _try_quarantine(storage: Storage, step: int, ranks: Collection[int], why: str) -> None:
    """Hide a checkpoint that all hosts see, if it is as bad as a rank found.

    It is read again: a host that cannot see the directory must not cost the job its checkpoints.
    """
    try:
        is_there = storage.exists(step_directory(step))
    except CheckpointError as error:
        logger.warning("step %d was not read again: %s", step, error)
        return
    if not is_there:
        logger.warning("%s is gone since it was listed", storage.describe(step_directory(step)))
        return
    try:
        reader = CheckpointReader(storage, step)
        for rank in ranks:
            reader.read_shard(rank % reader.manifest.world_size)
    except (CheckpointCorrupt, CheckpointIncomplete) as error:
        logger.error("%s", error)
    except _OWN_ERRORS as error:
        logger.warning("step %d was not read again: %s", step, error)
        return
    else:
        logger.warning("a rank found step %d bad that is good here; does its host see it?  %s", step, why)
        return
    try:
        quarantine(storage, step, why)
    except CheckpointError as failure:
        logger.warning("%s", failure)


def _named(failure: Exception) -> ResiliencyError:
    """What can be agreed on with the other ranks, which wait for this one's verdict."""
    if isinstance(failure, ResiliencyError):
        return failure
    return CheckpointError(
        f"there is no memory to restore the shard of this rank: {failure!r}",
        hint="Give the host or its container more memory: a state on a device is restored through the host.",
    )


#: What may befall one rank alone, and must not change what the others do.  OSError: mmap without memory.
_OWN_ERRORS = (ResiliencyError, MemoryError, OSError, torch.OutOfMemoryError)


def _uses(plan: Plan, place: Place) -> bool:
    return any(pick.holding.place is place for pick in plan.picks)


def _restored(inventory: Inventory, plan: Plan, size_bytes: int, rank: int) -> Restored:
    moved: Counter[Tier] = Counter()
    for pick in plan.picks:
        moved[tier_of_pick(pick)] += pick.holding.size_bytes
    tier = tier_of(plan)
    level = logging.DEBUG if rank else logging.INFO  # all ranks alike
    amounts = ", ".join(f"{size} bytes from {tier.value}" for tier, size in moved.items())
    logger.log(level, "restored step %d from %s (%s)", plan.step, tier.value, amounts)
    return Restored(
        step=plan.step,
        tier=tier,
        size_bytes=size_bytes,
        run_id=_run_of(inventory),
        save_id=plan.save_id,
        bytes_by_tier=dict(moved),
        holdings=tuple(
            holding
            for holding in inventory.holdings
            if holding.save_id == plan.save_id
            and holding.place.is_disk_of_host
            and holding not in inventory.bad
        ),
    )


def _run_of(inventory: Inventory) -> str:
    """The run that the newest checkpoint belongs to: on storage that all see, else on the hosts."""
    everything = (inventory.saves, inventory.holdings)
    named = [
        max(((item.step, item.run_id) for item in items if item.run_id), default=None) for items in everything
    ]
    return next((newest[1] for newest in named if newest is not None), "")
