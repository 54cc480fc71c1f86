# SPDX-License-Identifier: Apache-2.0
"""Checkpoints for a plain training loop, without training waiting for storage.

    with Checkpointer("/ckpt", every_steps=100, keep=3) as checkpoints:
        start = checkpoints.restore(state).step
        for step in range(start + 1, steps + 1):
            train_step()
            checkpoints.step(step, state)

A save copies the state into memory that outlives this process and returns; the checkpoint agent of
this host writes it from there, to one tier or two:

* persistent: a directory that all hosts see, in a format that stock `torch.distributed.checkpoint` reads;
* local: each host's own disk or memory, with copies on other hosts.

When storage is slower than the interval, saves are skipped, counted and logged; training is never held
up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from resiliency.checkpoint.agent.protocol import LiftBandwidthCap
from resiliency.checkpoint.branches import Branches, record_branches
from resiliency.checkpoint.capture.capturer import Capturer
from resiliency.checkpoint.commit.retention import committed_save
from resiliency.checkpoint.names import TierName, attempt_id_of, branch_number, save_id_of, start_of
from resiliency.checkpoint.ranks import RankGroup, identified
from resiliency.checkpoint.recovery.inventory import Inventory
from resiliency.checkpoint.recovery.restore import Fill, Restored, Restorer
from resiliency.checkpoint.state.fill import plan_restore
from resiliency.checkpoint.state.layout import Shard
from resiliency.checkpoint.state.snapshot import StateWalker
from resiliency.checkpoint.stop.termination import TerminationOptions
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.checkpoint.trainer.common_end import CommonEnd
from resiliency.checkpoint.trainer.delivery import Delivery
from resiliency.checkpoint.trainer.going_on import GoingOn, go_on_from
from resiliency.checkpoint.trainer.handles import SaveHandle
from resiliency.checkpoint.trainer.intervals import IntervalAdvice
from resiliency.checkpoint.trainer.join import ReplicaHosts, join
from resiliency.checkpoint.trainer.options import CheckpointerOptions, LocalTier, intervals_of, settings_of
from resiliency.checkpoint.trainer.saver import Saver
from resiliency.checkpoint.trainer.schedule import Schedule
from resiliency.checkpoint.trainer.tier_policy import Interval
from resiliency.errors import CheckpointError, ConfigError, ResiliencyError
from resiliency.events import EventStream, EventType
from resiliency.progress import report_checkpoints, report_step, watch_rank
from resiliency.rank.checkpoint_steps import CheckpointSteps
from resiliency.runtime import RunInfo

__all__ = ["Checkpointer", "CheckpointerOptions", "LocalTier"]

logger = logging.getLogger(__name__)

#: How long the end of a job waits for the copies of its last step.
_LAST_COPIES = timedelta(seconds=60)


class Checkpointer:
    """Saves and restores the state of one rank; a context manager, used by the training thread.

    All ranks of the job make one alike, after `init_process_group`; this returns when the agent of the
    host is there, which takes seconds at the first start and nothing after a restart.  Leaving the
    context waits for the saves under way; leaving it by an exception does not: the agent commits what
    is captured, and a restart finds it in memory.

    Args:
        directory: of the persistent tier, where ``step=N`` go; all ranks see the same.  None: there is none.
        every_steps: interval of `step` for the persistent tier; 0: only `save` saves.
        every: the same in seconds, or by the rate of failures: `Interval(mtbf_s=...)` saves as often as
            costs least, from what saves turn out to cost; instead of `every_steps`.
        keep: newest complete checkpoints that stay there.
        local: the local tier; None: there is none.  At least one tier is needed.
        replicated: all tensors are the same on all ranks (plain data parallelism), so each is written
            by one of them.  What differs between ranks must then be no tensor: numbers, bytes, lists.
        group: ranks that name the same group say that each may go on from the state of any of them;
            empty: this rank's state is its own.
        parallel_groups: labels of the groups of ranks that this rank computes with, and may fail together
            with, such as ("tp:0", "pp:4"); a label names one group of the job.  Copies of the local tier go
            to hosts that have no rank of them, if there are any.
        optimizers: that write the state without being part of it.  A torch optimizer vouches for its
            parameters and its own state; any other object with `register_step_pre_hook` for everything.
        info: identity of this rank; default: from the environment, as torchrun sets it, and the rank from
            the process group where it is not there.
        events: where to report saves, for goodput.
        termination: what makes the job save its current step and end, see `step`; None: signals do what
            they did before.  With it this must be made in the main thread.
    Raises:
        ConfigError: no process group, no room in shared memory, or a living process owns this rank.
    """

    def __init__(
        self,
        directory: str | Path | None,
        *,
        every_steps: int = 0,
        every: Interval | None = None,
        keep: int = 3,
        local: LocalTier | None = None,
        replicated: bool = False,
        group: str = "",
        parallel_groups: Sequence[str] = (),
        optimizers: Iterable[Any] = (),
        info: RunInfo | None = None,
        events: EventStream | None = None,
        options: CheckpointerOptions | None = None,
        termination: TerminationOptions | None = None,
    ) -> None:
        self._options = options = options or CheckpointerOptions()
        self._replicated = replicated
        self._group = group
        self._events = events
        settings = settings_of(directory, keep=keep, local=local, replicated=replicated, options=options)
        intervals = intervals_of(every_steps, every, settings, local)
        info = identified(info or RunInfo.from_env())
        self._info = info
        self._rank_group = RankGroup(info.rank or 0, info.world_size)
        self._schedule = Schedule(intervals, self._rank_group, options.clock)
        context = join(
            self._rank_group, info, settings, options, group=group, parallel_groups=parallel_groups
        )
        self._attach = context.attach
        self._arena = context.arena
        self._capturer = Capturer(self._arena, options.capture, walker=StateWalker(allow=options.allow))
        self._delivery = Delivery(
            context.directory,
            self._attach,
            self._capturer,
            emit=self._emit,
            options=options.link,
            on_commit=self._schedule.add_commit,
        )
        self._saver = Saver(
            self._capturer,
            self._delivery,
            self._schedule,
            tiers=settings.tiers,
            is_alone=self._attach.world_size == 1,
            optimizers=optimizers,
            options=options,
            emit=self._emit,
        )
        watch_rank()
        self._replica_hosts = ReplicaHosts(context, self._delivery.link)
        self._closed = False
        #: Whether room for captures of the whole state has been asked for.
        self._is_prepared = False
        self._end: CommonEnd | None = None
        if termination is not None:
            self._end = self._watch_for_signals(termination)
        # Else the first saves would fill all slots while the agent still imports torch.
        if not self._delivery.link.wait_for_agent():
            logger.error("there is no checkpoint agent yet: saves fail until there is")
        try:
            self._replica_hosts.meet(self._rank_group, info)
        except ResiliencyError:
            self.close(finished=False)
            raise

    @property
    def rank(self) -> int:
        return self._attach.rank

    @property
    def agent_pid(self) -> int:
        """Process id of this host's agent; 0 while this rank is not attached to one."""
        return self._delivery.link.agent_pid

    def take_inventory(self) -> Inventory:
        """Look once at all that could be restored, and from where; collective, the same on all ranks.

        For programs that choose: `sources` of it lists the steps, and whatever this start then restores is
        taken from it without looking again.  It tells of now: what is saved later is not in it, and
        what is gone or damaged by then is skipped when it is read.

        Raises:
            CheckpointError: the persistent tier cannot be listed; on the other ranks PeerError.
        """
        return self._restorer().take_inventory()

    def restore(
        self,
        state: object,
        *,
        step: int | None = None,
        inventory: Inventory | None = None,
        partial: bool = False,
    ) -> Restored:
        """Bring the newest state back, in place; collective over all ranks.

        Where a later step could be restored, the job goes back: what is saved from then on is of a new
        branch, from which every later start goes on.  A checkpoint of the branch that was left stays until
        the new one saves the same step, or has as many checkpoints as are kept; until then `step` restores
        it, which begins another branch.

        It comes from this host's memory if every rank finds its capture there, else from the newest step
        that can be made whole from the tiers and verifies.  A bad checkpoint is hidden and the one
        before it taken.

        Args:
            step: take this one or nothing, of the live branch if that has it; None means the newest of the
                live branch.
            inventory: of `take_inventory`, the same on all ranks; None: take it now.
            partial: dicts of `state` may lack parts that were saved (the model alone, for an evaluation), and
                have parts that were not, which stay as they are.  What a module or an optimizer holds still
                comes back whole.  Another state than was saved at that step is not saved there: that save
                fails by name, and later ones do not.
        Returns:
            The step and where it came from; step 0 if there is nothing, and `state` is as it was.
        Raises:
            ConfigError: the ranks gave different inventories.
            LayoutMismatch: the names, shapes or number of ranks are not those that were saved, on any rank;
                nothing of `state` was changed.
            CheckpointError: an object, such as an optimizer with other parameter groups, refused its state;
                the rest is overwritten.
            CheckpointCorrupt: there are checkpoints, and all of them turned out bad; of the last one a part
                may be in `state`.
            CheckpointIncomplete: hosts hold parts of several saves, and not one save is whole.
            PeerError: another rank failed to restore.
        """

        def fill(shard: Shard) -> Callable[[], object]:
            is_own = shard.rank == self._rank_group.rank
            return plan_restore(state, shard, allow=self._options.allow, partial=partial, own=is_own)

        # Where a device is in use, only a look through the state tells whether captures need pinned memory.
        has_device = self._options.capture.registry.current_device() is not None
        if partial or has_device:
            restored = self._restore(fill, step=step, inventory=inventory, partial=partial)
        else:
            restored = self.restore_with(fill, step=step, inventory=inventory)
        # Else the first step prepares, whose state an optimizer has made larger, or of which this is a part:
        # an evaluation never takes one, and needs no room.
        self._is_prepared = bool(restored.step) and not partial
        if not partial and (has_device or not self._is_prepared):
            self._prepare(state)
        if not self._is_prepared:  # also for programs that do not call `step`
            self._saver.after_first_steps(state, lambda: self._prepare(state))
        return restored

    def restore_with(
        self, fill: Fill, *, step: int | None = None, inventory: Inventory | None = None
    ) -> Restored:
        """Like `restore`, for states that are not filled along their tree.

        Args:
            fill: checks whether the shard of this rank fits, and returns what fills the state from it (or
                None); that runs only when all ranks fit.  The shard is valid until then.
            step, inventory: as for `restore`.
        """
        room: list[tuple[int, int]] = []

        def fill_noted(shard: Shard) -> Callable[[], object] | None:
            room[:] = [(shard.layout.size_bytes, len(shard.values))]
            return fill(shard)

        restored = self._restore(fill_noted, step=step, inventory=inventory)
        if restored.step and room:
            self._is_prepared = True
            self._capturer.prepare_room(*room[0])
        return restored

    def _restore(
        self, fill: Fill, *, step: int | None, inventory: Inventory | None, partial: bool = False
    ) -> Restored:
        self._capturer.fence()  # a capture under way reads the state that is overwritten
        self._emit(EventType.RESTORE_STARTED)
        # Until a rollback is recorded, retention sees its step as any old one.
        with ExitStack() as leases:
            restored = self._restorer().restore(fill, step=step, inventory=inventory, leases=leases)
            goes_on = self._go_on(restored, partial=partial)
        attach = goes_on.attach
        is_renamed = attach.attempt_id != self._attach.attempt_id
        if is_renamed:
            # The first rank that introduces itself again ends the attempt for all ranks of its host.
            self._rank_group.gather(None)
            self._arena.run_id = attach.attempt_id
        if attach != self._attach:
            self._attach = attach
            self._delivery.link.introduce_again(attach)
        if is_renamed:
            self._replica_hosts.meet_again(attach, self._rank_group, self._info)
        if restored.is_in_memory_alone:
            self._delivery.captured_step = restored.step
            if restored.from_own_captures and not partial:
                self._saver.save_found(attempt_id_of(restored.save_id, restored.step), restored.step)
        self._report_checkpoints()
        if restored.step:
            if self._end is not None:
                self._end.went_on_from(restored.step)
            self._emit(EventType.CHECKPOINT_LOADED, restored.step, tier=restored.tier.value)
            self._replica_hosts.repair(restored)
        return restored

    def _report_checkpoints(self) -> None:
        """For the launcher, which may have to go back behind them."""
        restored, saved = self._attach.restored_step, self._saver.newest_step
        if max(restored, saved) > 0:
            branch = branch_number(self._attach.attempt_id)
            steps = CheckpointSteps(newest=max(restored, saved), restored=restored or None, branch=branch)
            report_checkpoints(steps)

    def _go_on(self, restored: Restored, *, partial: bool) -> GoingOn:
        """What the job is from here on: on a new branch if it went back; collective."""
        newest = max(self._rank_group.gather(self._saver.newest_step))
        goes_on = go_on_from(self._attach, restored, newest_saved=newest, partial=partial)
        if goes_on.is_rollback and self.rank == 0:
            logger.warning(
                "job went back to step %d: its saves from now on are branch %d, from which a restart goes on;"
                " later checkpoints of before stay until that has as many, and can be restored by their step",
                *(restored.step, goes_on.branches.newest),
            )
        if goes_on.leaves_own_saves:
            self._delivery.went_back(self._options.close_timeout)
            self._saver.went_back()
            self._schedule.went_back(restored.step)
            # Before the first save of the new branch, for a restart meanwhile is to go back as well.  A
            # program that has not saved may be an evaluation: its agent does this when it saves.
            self._record(goes_on.branches)
        return goes_on

    def _record(self, branches: Branches) -> None:
        settings = self._attach.settings
        directories = [settings.directory] if self.rank == 0 else []
        if self.rank == self._attach.local_ranks[0]:
            directories.append(settings.local_directory)
        for directory in filter(None, directories):
            try:
                record_branches(LocalStorage(directory), branches)
            except CheckpointError as error:
                logger.error("a restart before the next commit does not go back: %s", error)

    def prewarm(self, state: object) -> None:
        """Make room for the captures of `state`, and wait for it.

        Rarely needed: `restore`, the first step of the optimizers in its state, and the first `step` have the
        room made in the background.  A program that calls none of them calls `prepare`, or this.

        Raises:
            ConfigError: something in the state cannot be saved, or shared memory has no room for it.
        """
        self._capturer.prewarm(state)

    def prepare(self, state: object) -> None:
        """Have room made for the captures of `state` in the background; returns at once.

        Best once the optimizer has its state: after its first step.  Saves that come before the room is
        there wait for it, see `save`.

        Raises:
            ConfigError: something in the state cannot be saved.
        """
        self._is_prepared = True
        self._capturer.prepare(state)

    def _prepare(self, state: object) -> None:
        try:
            self._capturer.prepare(state)
        except Exception as error:  # of the state, which the caller did not ask to save: its save will tell
            logger.debug("memory for captures is not prepared yet: %r", error)

    def step(self, step: int, state: object) -> SaveHandle | None:
        """Say that `step` optimizer steps are done; saves when it is time to.

        With `termination`, this is where a job that is told to end does so: all ranks at one step.  That
        step is saved, as soon as there is a slot and without a bandwidth cap, and this waits for its commit.

        Raises:
            Terminated: the job was told to end; exit code 0 if this step is committed, else 128 + signal.
        """
        report_step(step)
        self._saver.tick()
        if not self._is_prepared:  # now the optimizer has its state
            self._is_prepared = True
            self._prepare(state)
        if self._end is not None:
            self._end.boundary(step, state)
        due = self._schedule.due(step)
        return self.save(step, state, tiers=due) if due else None

    def due(self, step: int) -> tuple[TierName, ...]:
        """Like `step`, for programs that call `save` themselves: the tiers to save `step` to now.

        The same on all ranks, and the most important first.
        """
        report_step(step)
        self._saver.tick()
        return self._schedule.due(step)

    @property
    def stopping(self) -> bool:
        """Whether this rank knows that the job is told to end, for instance to leave out an evaluation.

        Ranks learn it at different moments: nothing that all ranks must do may depend on it.
        """
        return self._end is not None and self._end.requested

    def request_stop(self) -> None:
        """End the job as if SIGTERM had come to this rank, from any thread: for notices that are no signals.

        Raises:
            ConfigError: this object was made without `termination`.
        """
        if self._end is None:
            raise ConfigError(
                "this Checkpointer does not end jobs.", hint="Make it with termination=TerminationOptions()."
            )
        self._end.request()

    def save(
        self,
        step: int,
        state: object,
        *,
        tiers: Collection[TierName] | None = None,
        wait: timedelta | None = None,
    ) -> SaveHandle:
        """Save `state` as of `step`; returns while it is still being copied or written.

        All ranks must save the same steps to the same tiers, in growing order; where a step is saved
        already, or being saved, it is not saved again.  Of several ranks one may know that a step was skipped
        or failed, and another not yet: so it is tried again by none of them without `wait`, and by all with
        it, whatever each knows.  What turns out to be committed then stays as it is.

        What the optimizers that this object knows own, the parameters that they train and their state,
        nothing else may change before they step (see `CheckpointerOptions.overlap` and `fence`).  The rest,
        such as buffers that the next forward writes, is copied when this returns.

        Memory is never allocated here.  A save that comes before the room for it is made, as the first of a
        start may, or the first after the state has grown, holds training until it is, and says so; after two
        minutes it is skipped.  See `prepare`.

        Args:
            tiers: None means all that there are.
            wait: for storage to catch up, at most so long, before the save is skipped; for
                the last one of a job.  None: as `CaptureOptions.when_full` says, by default not at all.  A
                tier that still writes an earlier save is then left out of this one, if there is another
                tier.  All ranks give one, or none does.
        Raises:
            ConfigError: something in the state cannot be saved, or shared memory has no room for it.
        """
        handle = self._saver.save(step, state, tiers=tiers, wait=wait)
        self._report_checkpoints()
        return handle

    def lift_bandwidth_cap(self) -> None:
        """This host is about to go: what is captured is written without the bandwidth cap."""
        self._delivery.link.request(LiftBandwidthCap())

    def fence(self) -> None:
        """Hold the caller until the state may be changed; for code that changes it without an optimizer."""
        self._capturer.fence()

    def wait(self, timeout: timedelta) -> bool:
        """Wait until no save is under way; False at the timeout."""
        return self._delivery.wait(timeout)

    def advice(self, tier: TierName, *, mtbf_s: float) -> IntervalAdvice:
        """How often to save into `tier`, from what saves of this job have cost training so far.

        No more often than saves of this rank became durable there, or some would be skipped.  At the end
        of a job rank 0 logs what saves have cost, with this advice where the interval has an `mtbf_s`.

        Args:
            mtbf_s: mean time between the failures of the job that this tier is for: a process or a host
                for the local tier, the loss of several hosts at once for the persistent one.
        Raises:
            ConfigError: nothing is known yet; a cost is known ten steps after a save.
        """
        return self._saver.advice(tier, mtbf_s=mtbf_s)

    def metrics_text(self) -> str:
        """Counters of this rank's saves in Prometheus' text format."""
        return self._delivery.metrics_text()

    def close(self, *, finished: bool = True, stopped: bool = False) -> None:
        """Wait for saves under way and give everything back.  Idempotent.

        If the newest capture could not be committed it stays in memory, where a restart finds it.

        Args:
            finished: False: this rank stops without having come to its end.  It waits for nothing;
                its captures stay for the agent and for a restart.
            stopped: the job was told to end.  A launcher may start this rank again, as its host may be one
                that stays while another leaves: then agent and captures stay until the launcher ends them.
        """
        if self._closed:
            return
        self._closed = True
        if self._end is not None:
            self._end.leaving()
        self._saver.close()
        if finished and not self.wait(self._options.close_timeout):
            logger.error("saves are still under way; the agent goes on with them")
        if finished:
            if self.rank == 0:
                self._saver.log_findings()
            left = self._end.time_left(otherwise=_LAST_COPIES) if self._end else _LAST_COPIES
            self._delivery.await_last_copies(min(left, _LAST_COPIES))
        self._capturer.close()
        spent = finished and self._delivery.is_spent
        if finished and not spent:
            logger.error(
                "step %d is nowhere but in the memory of this host: its save failed, or was cut short.  Mend"
                " the storage if it failed, and start the job again here, to restore the step from there,"
                " before another job of this user starts here: from ten minutes on it frees that memory",
                self._delivery.captured_step,
            )
        if spent and (step := self._newer_capture_of_others()):
            logger.warning(
                "the capture of step %d stays in the memory of this host: a start before this one made it,"
                " and this one has neither restored it nor saved a step after it",
                step,
            )
            spent = False
        # Before the goodbye: the agent leaves when all have said theirs, and removes what is empty.
        self._arena.close(remove=spent and not (stopped and self._delivery.link.is_hosted))
        if self._end is not None:
            self._end.close(finished=finished)
        self._delivery.link.close(detach=spent)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(finished=kind is None)

    def _newer_capture_of_others(self) -> int:
        """The step of the newest capture, if an earlier start made it, this one left it, and no tier has it;
        else 0."""
        newest, attach = self._arena.newest, self._attach
        if newest is None or newest.step <= attach.restored_step:
            return 0
        if start_of(newest.run_id) == start_of(attach.attempt_id):
            return 0
        save_id = save_id_of(newest.run_id, newest.step)
        tiers = (attach.settings.directory, attach.settings.local_directory)
        is_stored = any(committed_save(LocalStorage(path), newest.step) == save_id for path in tiers if path)
        return 0 if is_stored else newest.step

    def _restorer(self) -> Restorer:
        settings = self._attach.settings
        # What all ranks of a host read comes from the device once, and from its page cache to the others.
        is_shared = self._replicated and len(self._attach.local_ranks) > 1
        return Restorer(
            self._arena,
            LocalStorage(settings.directory, direct=not is_shared) if settings.directory else None,
            self._rank_group,
            replicated=self._replicated,
            local=Path(settings.local_directory) if settings.local_directory else None,
            host=self._attach.host,
            group=self._group,
        )

    def _watch_for_signals(self, options: TerminationOptions) -> CommonEnd:
        try:
            return CommonEnd(
                self._rank_group,
                options,
                self._saver,
                emit=self._emit,
                lift_bandwidth_cap=self.lift_bandwidth_cap,
                flush=self._flush,
                close=self.close,
            )
        except ResiliencyError:
            self.close()
            raise

    def _flush(self) -> None:
        if self._events is not None:
            self._events.flush(timedelta(seconds=1))

    def _emit(self, type: EventType, step: int | None = None, **fields: Any) -> None:
        if self._events is not None:
            self._events.emit(type, step=step, **fields)
