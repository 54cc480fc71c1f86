# SPDX-License-Identifier: Apache-2.0
"""Bring a state back: from memory, this host's disk, other hosts, or storage that all see.

The ranks agree once on what is left and where (`resiliency.checkpoint.recovery.inventory`), and plan
alike from that, as often as they restore at one start: the newest save of which every rank gets a
shard, each from the place that costs least.  Shards of one save may come from any mix of places; saves
are never mixed.  No byte of the state changes before every rank has found that its shard fits.  A source
that turns out bad for any rank is skipped on all of them and the rest is planned anew: another copy,
else an older save.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch

from resiliency.checkpoint.branches import Branches
from resiliency.checkpoint.capture.arena import RankArena, open_captured
from resiliency.checkpoint.format.lease import try_lease
from resiliency.checkpoint.format.marker import step_directory
from resiliency.checkpoint.format.reader import CheckpointReader
from resiliency.checkpoint.locations import Place, ShardLocation
from resiliency.checkpoint.names import branch_number, save_id_of
from resiliency.checkpoint.progress import ReadProgress
from resiliency.checkpoint.ranks import RankGroup
from resiliency.checkpoint.recovery.complaints import Complaint, complaint_of, try_quarantine
from resiliency.checkpoint.recovery.exchange import exchange
from resiliency.checkpoint.recovery.inventory import (
    FoundSave,
    Inventory,
    list_local,
    list_memory,
    open_location,
    quarantine_location,
    take_inventory,
)
from resiliency.checkpoint.recovery.lost_checkpoints import START_FROM_SCRATCH, refuse_lost_checkpoints
from resiliency.checkpoint.recovery.outcomes import agree
from resiliency.checkpoint.recovery.planner import Assignment, RestorePlan, each_plan, explain_missing
from resiliency.checkpoint.recovery.refusals import find_refused_saves
from resiliency.checkpoint.recovery.sources import Tier, tier_of, tier_of_assignment
from resiliency.checkpoint.state.layout import Shard
from resiliency.checkpoint.storage.interface import Storage
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointIncomplete,
    ConfigError,
    LayoutMismatch,
    PeerError,
    ResiliencyError,
)
from resiliency.runtime import no_garbage_collection

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
        branches: of the job, as the ranks found them.
        is_rollback: a newer save of the live branch is whole, or this one is of a branch that was left: what
            is saved from here on is of another branch.
        bytes_by_tier: how much of the state of all ranks came from where.
        is_in_memory_alone: when the ranks looked, disks had all of neither this save nor a later one.
        from_own_captures: every rank of a job of the same size found its own capture of it in memory.
        locations: the copies of this save on the disks of hosts, those that turned out bad left out: what
            to make new copies from.
    """

    step: int
    tier: Tier
    size_bytes: int = 0
    run_id: str = ""
    save_id: str = ""
    branches: Branches = field(default_factory=Branches, compare=False, repr=False)
    is_rollback: bool = field(default=False, compare=False)
    bytes_by_tier: Mapping[Tier, int] = field(default_factory=dict)
    is_in_memory_alone: bool = False
    from_own_captures: bool = False
    locations: tuple[ShardLocation, ...] = field(default=(), compare=False, repr=False)


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
        rank_group: RankGroup,
        *,
        replicated: bool,
        local: Path | None = None,
        host: str = "",
        group: str = "",
    ) -> None:
        self._arena = arena
        self._storage = storage
        self._rank_group = rank_group
        self._replicated = replicated
        self._local = local
        self._host = host
        self._group = group
        #: Whether a source turned out bad when some of it had been put into the state already.
        self._overwritten = False
        #: What this rank met at its last try.
        self._own: ResiliencyError | None = None

    def restore(
        self,
        fill: Fill,
        *,
        step: int | None = None,
        inventory: Inventory | None = None,
        leases: ExitStack | None = None,
    ) -> Restored:
        """Let `fill` bring back the newest step, or exactly `step`; collective.

        Args:
            inventory: what there is, from `take_inventory`; None: take it now.
            leases: keeps what was restored from being deleted until it is closed; None: while it is read.
        Raises:
            LayoutMismatch: the checkpoint is of another model or parallel layout, on any rank; or all that
                is left is a whole one of another number of ranks.
            CheckpointCorrupt: there are checkpoints, and all turned out bad, now or at an earlier start.
            CheckpointIncomplete: there are parts of several saves, and not one save is whole.
            ConfigError: the ranks were given different inventories.
            PeerError: another rank could not restore, or died.
        """
        # Objects for thousands of tensors are made at once.  They would start a full collection, which looks
        # at all that torch and the program have imported: 0.14 s on a host that copies a gigabyte in 0.1 s.
        with no_garbage_collection():
            return self._restore(fill, step, inventory, leases)

    def _restore(
        self, fill: Fill, step: int | None, inventory: Inventory | None, leases: ExitStack | None
    ) -> Restored:
        inventory = self._agreed(inventory)
        self._overwritten = False
        plan = self._choose(inventory, step)
        self._log_skipped_saves(inventory, plan, step)
        while plan is not None:
            size, found_bad = self._try(plan, fill, leases)
            if not found_bad:
                inventory.look_above(plan.step)
                return _restored(inventory, plan, size, self._rank_group.rank)
            inventory.bad |= self._skip(plan, inventory, found_bad)
            # Whoever reads a bad shard again takes its time: not at the cost of an exchange's deadlines.
            self._rank_group.gather(None)
            plan = self._choose(inventory, step)
        if self._overwritten:
            raise CheckpointCorrupt(
                "a checkpoint turned out bad when a part of it was in the state already; there is no other.",
                hint=START_FROM_SCRATCH,
                rank=self._rank_group.rank,
            )
        if step is None:
            self._refuse_to_start_from_scratch(inventory)
            shared_storages = [] if self._storage is None else [self._storage]
            refuse_lost_checkpoints(self._rank_group, shared_storages, self._local)
        return Restored(step=0, tier=Tier.NONE, branches=inventory.branches)

    def _refuse_to_start_from_scratch(self, inventory: Inventory) -> None:
        """Where much was saved and nothing can be used, a person decides what becomes of it."""
        if inventory.bad:
            tried = len({location.save_id for location in inventory.bad})
            raise CheckpointCorrupt(
                f"none of the {tried} checkpoints that are left can be used; the log says what is wrong.",
                hint=START_FROM_SCRATCH,
            )
        refusal = find_refused_saves(inventory.needs, inventory.live).refusal()
        if refusal is not None:
            raise refusal
        if left := sorted({plan.step for plan in each_plan(inventory.needs, inventory.locations)}):
            raise CheckpointIncomplete(
                f"the job went back behind all that is left, steps {left}, and what it went on from is gone.",
                hint="Restore one of them by its number: restore(state, step=...).",
            )

    # --- choosing --------------------------------------------------------------------------------

    def take_inventory(self) -> Inventory:
        """Look at what is left and where; collective.

        Raises:
            CheckpointError, PeerError: rank 0 could not list the storage that all see.
        """
        # Without a name of the host, each rank is one by itself.
        host = self._host or f"rank-{self._rank_group.rank}"

        def list_here(is_first: bool) -> list[ShardLocation]:
            if not is_first:
                return []
            ranks = None if self._host else [self._rank_group.rank]
            found = list_memory(self._arena.directory, host, ranks)
            return found if self._local is None else found + list_local(self._local, host)

        return take_inventory(
            self._rank_group,
            host=host,
            group=self._group,
            interchangeable=self._replicated,
            list_here=list_here,
            storage=self._storage,
            own=None if self._local is None else LocalStorage(self._local),
            asked=Branches.asked_for(os.environ),
        )

    def _agreed(self, given: Inventory | None) -> Inventory:
        """The inventory to restore from: one for all, for from two the ranks would plan differently."""
        names = self._rank_group.gather(None if given is None else given.name)
        if len(set(names)) > 1:
            without = names.count(None)
            raise ConfigError(
                f"{len(names)} ranks restore together, {without} of them without an inventory and the others"
                f" with {len(set(names) - {None})} different ones.",
                hint="Take one inventory on all ranks and give it to `restore` on all, or on none.",
                rank=self._rank_group.rank,
            )
        return self.take_inventory() if given is None else given

    def _choose(self, inventory: Inventory, step: int | None) -> RestorePlan | None:
        """The best that is left, looking into no more checkpoints than that takes; collective."""
        if step is not None:
            plan = self._best(inventory, step)
            if plan is None or not inventory.branches.is_live(step, plan.save_id):
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

    def _best(self, inventory: Inventory, step: int | None) -> RestorePlan | None:
        """Of the live branch; a given step also of another one, of the newest first."""
        branches = inventory.branches
        plan = next(each_plan(inventory.needs, inventory.live, bad=inventory.bad, step=step), None)
        if plan is None and step is not None:
            left = each_plan(inventory.needs, inventory.locations, bad=inventory.bad, step=step)
            plan = max(left, key=lambda plan: branch_number(plan.save_id), default=None)
        for save in sorted(inventory.saves, key=lambda save: -save.step):
            if step not in (None, save.step) or (plan is not None and save.step <= plan.step):
                continue
            if step is None and not branches.is_live(save.step, save.save_id):
                continue
            if save.world_size != self._rank_group.world_size and not self._replicated:
                raise self._of_others(save, inventory, step)
        return plan

    def _of_others(self, save: FoundSave, inventory: Inventory, step: int | None) -> LayoutMismatch:
        """`save` is of another number of ranks; who loads it by other means learns what newer is left."""
        assert self._storage is not None  # it was listed
        path = self._storage.describe(step_directory(save.step))
        message = f"{path} was saved by {save.world_size} ranks, this job has {self._rank_group.world_size}."
        hint = "Load it with torch.distributed.checkpoint.load, which cuts it anew."
        newer = _not_taken(inventory, above=save.step, step=step)
        if newer:
            message += f"  The hosts hold newer ones: {explain_missing(inventory.needs, newer)}"
        found = find_refused_saves(inventory.needs, newer)
        if found.ranks:
            hint = f"Start {found.ranks} ranks to go on from step {found.step}.  Step {save.step}: {hint}"
        return LayoutMismatch(message, hint=hint, path=path, step=save.step)

    def _log_skipped_saves(self, inventory: Inventory, plan: RestorePlan | None, step: int | None) -> None:
        """Why it is not the newest save that is restored."""
        newer = _not_taken(inventory, above=-1 if plan is None else plan.step, step=step)
        if newer and self._rank_group.rank == 0:
            logger.warning("not restored: %s", explain_missing(inventory.needs, newer))

    # --- trying ----------------------------------------------------------------------------------

    def _try(self, plan: RestorePlan, fill: Fill, leases: ExitStack | None) -> tuple[int, dict[int, str]]:
        """Bytes of this rank, and the ranks whose source is bad; if there are any, nothing is restored."""
        rank, doing = self._rank_group.rank, f"restoring from {tier_of(plan).value}"
        with ExitStack() as own, ExitStack() as held:
            if rank == 0 and self._storage is not None and _uses(plan, Place.PERSISTENT):
                own.enter_context(try_lease(self._storage, plan.step))
            progress = held.enter_context(ReadProgress(f"restoring step {plan.step}", shown=rank == 0))
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
                    shard = (
                        self._find(plan.assignments[rank], held, own, progress)
                        if received is None
                        else received
                    )
                    size, act = shard.layout.size_bytes, fill(shard)
            except _OWN_ERRORS as failure:
                error = _named(failure)
            self._own = error
            bad = agree(self._rank_group, error, doing)
            if bad:
                return 0, bad
            try:
                if act is not None:
                    act()
            except _OWN_ERRORS as failure:
                error = _named(failure)
            self._own = error
            bad = agree(self._rank_group, error, doing)
            self._overwritten |= bool(bad)
            if leases is not None and not bad:
                leases.enter_context(own.pop_all())
            return size, bad

    def _find(
        self, assignment: Assignment, held: ExitStack, leases: ExitStack, progress: ReadProgress
    ) -> Shard:
        """What this rank reads by itself; its tensors may be read when they are asked for."""
        location, rank = assignment.location, assignment.location.rank
        if location.place is Place.MEMORY:
            return self._borrow(location, held)
        if location.place is Place.PERSISTENT:
            assert self._storage is not None
            reader = CheckpointReader(self._storage, location.step)
            if reader.manifest.save_id != location.save_id:
                raise CheckpointIncomplete(f"{reader.path} was replaced.", path=reader.path)
            if self._replicated:  # any will do: the one of the same number, as far as there is one
                rank = self._rank_group.rank % reader.manifest.world_size
        else:
            leases.enter_context(try_lease(LocalStorage(location.root), location.step))
            reader = open_location(location)
        progress.expect(reader.index(rank).size_bytes)
        reader.pace = progress
        return reader.open_shard(rank)

    def _borrow(self, location: ShardLocation, held: ExitStack) -> Shard:
        if location.rank == self._arena.rank:
            shard = held.enter_context(self._arena.captured(location.step))
        else:
            slot = open_captured(self._arena.directory, location.rank, step=location.step)
            shard = held.enter_context(slot).shard
        if save_id_of(shard.run_id, shard.step) != location.save_id:
            raise CheckpointIncomplete(f"the capture of step {location.step} was replaced.")
        return shard

    # --- what turned out bad ---------------------------------------------------------------------

    def _skip(self, plan: RestorePlan, inventory: Inventory, why: Mapping[int, str]) -> set[ShardLocation]:
        """What not to try again, now or in another start."""
        first = why[min(why)]
        logger.error("step %d from %s skipped: %s", plan.step, tier_of(plan).value, first)
        bad = {plan.assignments[rank].location: text for rank, text in why.items()}
        for location, text in bad.items():
            on_host = location.place.is_disk_of_host
            if on_host and self._rank_group.rank == inventory.first_on(location.host):
                quarantine_location(location, text)
        if all(location.place is not Place.PERSISTENT for location in bad):
            return set(bad)
        # There a checkpoint is one whole: all ranks may need the same file.
        if self._storage is not None:
            try_quarantine(
                self._rank_group, self._storage, plan.step, self._complaint(plan, why), inventory.needs
            )
        same = {h for h in inventory.locations if h.save_id == plan.save_id and h.place is Place.PERSISTENT}
        return same | set(bad)

    def _complaint(self, plan: RestorePlan, why: Mapping[int, str]) -> Complaint | None:
        """Of this rank, about storage that all see."""
        rank = self._rank_group.rank
        location = plan.assignments[rank].location
        if rank not in why or location.place is not Place.PERSISTENT or self._storage is None:
            return None
        source = rank if self._replicated else location.rank
        return Complaint(source) if self._own is None else complaint_of(self._storage, source, self._own)


def _not_taken(inventory: Inventory, *, above: int, step: int | None) -> list[ShardLocation]:
    """What of the live branch is newer than step `above`; what turned out bad was told when it was found."""
    return [
        location
        for location in inventory.live
        if step in (None, location.step) and location.step > above and location not in inventory.bad
    ]


def _named(failure: Exception) -> ResiliencyError:
    """What can be agreed on with the other ranks, which wait for this one's verdict."""
    if isinstance(failure, ResiliencyError):
        return failure
    if isinstance(failure, RuntimeError) and not isinstance(failure, torch.OutOfMemoryError):
        error = CheckpointError(f"the shard of this rank could not be restored: {failure!r}")
        error.__cause__ = failure  # with its traceback
        return error
    return CheckpointError(
        f"there is no memory to restore the shard of this rank: {failure!r}",
        hint="Give the host or its container more memory: a state on a device is restored through the host.",
    )


#: What may befall one rank alone, and must not change what the others do.  OSError: mmap without memory;
#: RuntimeError: no more threads for this process, or a device that fails.
_OWN_ERRORS = (ResiliencyError, MemoryError, OSError, RuntimeError)


def _uses(plan: RestorePlan, place: Place) -> bool:
    return any(assignment.location.place is place for assignment in plan.assignments)


def _restored(inventory: Inventory, plan: RestorePlan, size_bytes: int, rank: int) -> Restored:
    moved: Counter[Tier] = Counter()
    for assignment in plan.assignments:
        moved[tier_of_assignment(assignment)] += assignment.location.size_bytes
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
        branches=inventory.branches,
        is_rollback=_is_rollback(inventory, plan.step)
        or not inventory.branches.is_live(plan.step, plan.save_id),
        bytes_by_tier=dict(moved),
        is_in_memory_alone=_is_in_memory_alone(inventory, plan),
        from_own_captures=all(
            (each.location.place, each.location.rank, each.location.world_size)
            == (Place.MEMORY, number, len(plan.assignments))
            for number, each in enumerate(plan.assignments)
        ),
        locations=tuple(
            location
            for location in inventory.locations
            if location.save_id == plan.save_id
            and location.place.is_disk_of_host
            and location not in inventory.bad
        ),
    )


def _is_rollback(inventory: Inventory, step: int) -> bool:
    """Whether a job that goes on from `step` leaves newer saves that a later start could take."""
    branches = inventory.branches
    newer = [location for location in inventory.live if location.step > step]
    return any(
        save.step > step and branches.is_live(save.step, save.save_id) for save in inventory.saves
    ) or any(each_plan(inventory.needs, newer))


def _is_in_memory_alone(inventory: Inventory, plan: RestorePlan) -> bool:
    if all(assignment.location.place is not Place.MEMORY for assignment in plan.assignments):
        return False  # without another plan: of many ranks each waits for it
    on_disks = [
        location
        for location in inventory.live
        if location.step >= plan.step and location.place is not Place.MEMORY
    ]
    return next(each_plan(inventory.needs, on_disks, bad=inventory.bad), None) is None


def _run_of(inventory: Inventory) -> str:
    """The run that the newest checkpoint belongs to: on storage that all see, else on the hosts."""
    everything = (inventory.saves, inventory.locations)
    named = [
        max(((item.step, item.run_id) for item in items if item.run_id), default=None) for items in everything
    ]
    return next((newest[1] for newest in named if newest is not None), "")
