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
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from resiliency.checkpoint.agreement import Agreement
from resiliency.checkpoint.arena import RankArena, clean_up, job_directory
from resiliency.checkpoint.capture import Capturer, WhenFull
from resiliency.checkpoint.delivery import Delivery
from resiliency.checkpoint.intervals import Advice
from resiliency.checkpoint.meeting import Meeting, introduce_agents, meet
from resiliency.checkpoint.options import CheckpointerOptions, LocalTier, intervals_of, settings_of
from resiliency.checkpoint.peers.table import PeerTable
from resiliency.checkpoint.recovery.repairs import repairs
from resiliency.checkpoint.replication import table_path
from resiliency.checkpoint.restoring import Fill, Restored, Restorer, Source
from resiliency.checkpoint.saves import FINAL, SaveHandle, SaveState, await_tiers
from resiliency.checkpoint.schedule import Schedule
from resiliency.checkpoint.state import plan_restore
from resiliency.checkpoint.step_times import Excess, StepTimes
from resiliency.checkpoint.storage import LocalStorage
from resiliency.checkpoint.table import Shard
from resiliency.checkpoint.termination import Terminated, Termination, TerminationOptions
from resiliency.checkpoint.tiers import Interval, TierName
from resiliency.checkpoint.wire import Attach, Hurry, Peers, Repair
from resiliency.errors import ConfigError, ResiliencyError
from resiliency.events import EventStream, EventType
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
        optimizers: that write the state without being part of it.
        info: identity of this rank; default: from the environment, as torchrun sets it.
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
        info = info or RunInfo.from_env()
        self._agreement = Agreement(info.rank or 0, info.world_size)
        self._schedule = Schedule(intervals, self._agreement)
        meeting = meet(self._agreement, info, tiers=settings.tiers, group=group)
        # Two directories are two jobs, whatever their names: a program may keep two checkpointers.
        suffix = f"{zlib.crc32((settings.directory or settings.local_directory).encode()):08x}"
        self._arena_directory = job_directory(f"{info.job_name}-{suffix}", options.arena_root)
        self._attach = Attach(
            rank=self._agreement.rank,
            world_size=self._agreement.world_size,
            local_ranks=meeting.hosts[info.host],
            run_id=info.job_name,
            session=meeting.session,
            host=info.host,
            peer_address=info.peer_address,
            settings=settings,
        )
        self._arena = self._open_arena()
        self._capturer = Capturer(self._arena, options.capture)
        self._optimizers = list(optimizers)
        self._hooks: dict[int, Any] = {}
        self._times = StepTimes(time.monotonic)
        self._newest: SaveHandle | None = None
        #: How long training had been held when the newest save began.
        self._held_before_s = 0.0
        #: Of the newest step: who saves it to which tier.
        self._saved_in: dict[str, SaveHandle] = {}
        self._delivery = Delivery(self._arena_directory, self._attach, emit=self._emit, options=options.link)
        #: Of the hosts, if they keep copies for each other.
        self._table: PeerTable | None = None
        self._closed = False
        self._termination: Termination | None = None
        if termination is not None:
            self._watch_for_signals(termination)
        # Else the first saves would fill all slots while the agent still imports torch.
        if not self._delivery.link.wait_for_agent():
            logger.error("there is no checkpoint agent yet: saves fail until there is")
        if settings.local_directory and len(meeting.hosts) > 1:
            self._introduce_agents(meeting, info)

    @property
    def rank(self) -> int:
        return self._attach.rank

    @property
    def agent_pid(self) -> int:
        """Process id of this host's agent; 0 while this rank is not attached to one."""
        return self._delivery.link.agent_pid

    def restore(self, state: object) -> Restored:
        """Bring the newest state back, in place; collective over all ranks.

        It comes from this host's memory if every rank finds its capture there, else from the newest step
        that can be made whole from the tiers and verifies.  A bad checkpoint is hidden and the one
        before it taken.

        Returns:
            The step and where it came from; step 0 if there is nothing, and `state` is as it was.
        Raises:
            LayoutMismatch: the names, shapes or number of ranks are not those that were saved, on any rank.
            CheckpointCorrupt: the last checkpoint there was turned out bad when a part of it was in `state`.
            PeerError: another rank failed to restore.
        """

        def fill(shard: Shard) -> Callable[[], object]:
            return plan_restore(state, shard, allow=self._options.allow)

        return self.restore_with(fill)

    def sources(self) -> list[Source]:
        """The steps that could be restored, best first; collective, the same on all ranks."""
        return self._restorer().sources()

    def restore_with(self, fill: Fill, *, step: int | None = None) -> Restored:
        """Like `restore`, for states that are not filled along their tree.

        Args:
            fill: checks whether the shard of this rank fits, and returns what fills the state from it (or
                None); that runs only when all ranks fit.  The shard is valid until then.
            step: take this one or nothing; None means the newest.
        """
        self._emit(EventType.RESTORE_STARTED)
        restored = self._restorer().restore(fill, step=step)
        attach = replace(
            self._attach,
            run_id=restored.run_id or self._attach.run_id,
            restored_step=restored.step or self._attach.restored_step,
        )
        if attach != self._attach:
            self._attach = attach
            self._delivery.link.introduce_again(attach)
        if restored.step:
            self._emit(EventType.CHECKPOINT_LOADED, restored.step, tier=restored.tier.value)
            self._repair(restored)
        return restored

    def prewarm(self, state: object) -> None:
        """Make room for the captures of `state` now, so that the first save costs what later ones do.

        Worth its while once the optimizer has its state: after a restore, or after the first step of a
        fresh run.  Without it the first two saves allocate the memory, and training waits for that.

        Raises:
            ConfigError: something in the state cannot be saved, or shared memory has no room for it.
        """
        self._capturer.prewarm(state)

    def step(self, step: int, state: object) -> SaveHandle | None:
        """Say that `step` optimizer steps are done; saves when it is time to.

        With `termination`, this is where a job that is told to end does so: all ranks at one step.  That
        step is saved, as soon as there is a slot and without a bandwidth cap, and this waits for its commit.

        Raises:
            Terminated: the job was told to end; exit code 0 if this step is committed, else 128 + signal.
        """
        self._note_excess(self._times.tick(self._capturer.stats.held_s))
        if self._termination is not None:
            self._end_if_told_to(self._termination, step, state)
        due = self._schedule.due(step)
        return self.save(step, state, tiers=due) if due else None

    @property
    def stopping(self) -> bool:
        """Whether this rank knows that the job is told to end, for instance to leave out an evaluation.

        Ranks learn it at different moments: nothing that all ranks must do may depend on it.
        """
        return self._termination is not None and self._termination.requested

    def request_stop(self) -> None:
        """End the job as if SIGTERM had come to this rank, from any thread: for notices that are no signals.

        Raises:
            ConfigError: this object was made without `termination`.
        """
        if self._termination is None:
            raise ConfigError(
                "this Checkpointer does not end jobs.", hint="Make it with termination=TerminationOptions()."
            )
        self._termination.request()

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
        already, or being saved, it is not saved again.  A skipped or failed one may be tried again.

        The state may be changed by the optimizers that this object knows, and by nothing else before
        they step (see `CheckpointerOptions.overlap` and `fence`).

        Args:
            tiers: None means all that there are.
            wait: for storage to catch up, at most so long, before the save is skipped; for the last one of
                a job.  None: as `CaptureOptions.when_full` says, by default not at all.  A tier that still
                writes an earlier save is then left out of this one, if there is another tier.
        Raises:
            ConfigError: something in the state cannot be saved, or shared memory has no room for it.
        """
        wanted = self._wanted(step, tiers)
        self._schedule.saved(step, [TierName(tier) for tier in tiers or self._attach.settings.tiers])
        if not wanted:
            assert self._newest is not None
            return self._newest
        self._note_excess(self._times.saved(step))
        handle = self._register(step, wanted)
        self._held_before_s = self._capturer.stats.held_s
        self._emit(EventType.SAVE_STARTED, step)
        try:
            capture = self._capturer.begin(state, step, keep=True, wait=wait)
        except ResiliencyError as error:  # the caller may go on without this save, and so must the others
            self._emit(EventType.SAVE_RELEASED, step)
            self._delivery.not_captured(handle, SaveState.FAILED, str(error), self._held_s)
            raise
        if capture is not None and not self._fences(state):
            self._capturer.fence()
        self._emit(EventType.SAVE_RELEASED, step)
        if capture is None:
            why = "storage is slower than the interval: all slots still wait to be written"
            self._delivery.not_captured(handle, SaveState.SKIPPED, why, self._held_s)
            return handle
        handle.update(size_bytes=capture.layout.size_bytes, held_s=self._held_s)
        patient = wait is not None or self._options.capture.when_full is WhenFull.WAIT
        self._delivery.send(handle, capture, patient=patient)
        return handle

    def hurry(self) -> None:
        """This host is about to go: what is captured is written without the bandwidth cap."""
        self._delivery.link.request(Hurry())

    def fence(self) -> None:
        """Hold the caller until the state may be changed; for code that changes it without an optimizer."""
        self._capturer.fence()

    def wait(self, timeout: timedelta) -> bool:
        """Wait until no save is under way; False at the timeout."""
        return self._delivery.wait(timeout)

    def advice(self, tier: TierName, *, mtbf_s: float) -> Advice:
        """How often to save into `tier`, from what saves of this job have cost training so far.

        Args:
            mtbf_s: mean time between the failures of the job that this tier is for: a process or a host
                for the local tier, the loss of several hosts at once for the persistent one.
        Raises:
            ConfigError: nothing is known yet; a cost is known ten steps after a save.
        """
        return self._schedule.advice(tier, step_s=self._times.undisturbed_s, mtbf_s=mtbf_s)

    def metrics_text(self) -> str:
        """Counters of this rank's saves in Prometheus' text format."""
        return self._delivery.metrics_text()

    def close(self, *, finished: bool = True) -> None:
        """Wait for saves under way and give everything back.  Idempotent.

        If the newest capture could not be committed it stays in memory, where a restart finds it.

        Args:
            finished: False: this rank stops without having come to its end.  It waits for nothing;
                its captures stay for the agent and for a restart.
        """
        if self._closed:
            return
        self._closed = True
        if self._termination is not None:
            self._termination.leaving()
        for hook in self._hooks.values():
            hook.remove()
        if finished and not self.wait(self._options.close_timeout):
            logger.error("saves are still under way; the agent goes on with them")
        if finished:
            left = self._termination.time_left() if self._termination and self.stopping else _LAST_COPIES
            self._delivery.await_last_copies(min(left, _LAST_COPIES))
        self._capturer.close()
        self._delivery.end_captures(self._options.close_timeout)
        spent = finished and self._delivery.is_spent
        if finished and not spent:
            logger.error(
                "step %d is nowhere but in the memory of this host: its save failed.  Mend the storage and"
                " start the job again here, to restore it from there",
                self._delivery.captured_step,
            )
        # Before the goodbye: the agent leaves when all have said theirs, and removes what is empty.
        self._arena.close(remove=spent)
        if self._termination is not None:
            self._termination.close(finished=finished)
        self._delivery.link.close(goodbye=spent)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(finished=kind is None)

    def _restorer(self) -> Restorer:
        settings = self._attach.settings
        return Restorer(
            self._arena,
            LocalStorage(settings.directory) if settings.directory else None,
            self._agreement,
            replicated=self._replicated,
            local=Path(settings.local_directory) if settings.local_directory else None,
            host=self._attach.host,
            group=self._group,
        )

    # --- the start -------------------------------------------------------------------------------

    def _introduce_agents(self, meeting: Meeting, info: RunInfo) -> None:
        path = table_path(self._arena_directory, self._attach.local_ranks[0])
        port = self._delivery.link.peer_port
        try:
            self._table = introduce_agents(
                self._agreement, meeting, self._attach, port=port, path=path, info=info
            )
        except ResiliencyError:
            self.close(finished=False)
            raise
        if self._is_first_of_host:
            self._delivery.link.request(Peers(path=str(path)))

    @property
    def _is_first_of_host(self) -> bool:
        return self.rank == self._attach.local_ranks[0]

    def _repair(self, restored: Restored) -> None:
        """Have the hosts that are here make up for the copies that were lost with others."""
        if self._table is None or not self._is_first_of_host:
            return
        for push in repairs(restored.save_id, restored.holdings, self._table.peers, self._table.copies()):
            if push.holder == self._attach.host:
                self._delivery.link.request(
                    Repair(
                        step=push.step,
                        save_id=push.save_id,
                        owner=push.owner,
                        root=push.root,
                        target=push.target,
                    )
                )

    def _open_arena(self) -> RankArena:
        error: ResiliencyError | None = None
        arena = None
        try:
            if self._is_first_of_host:
                clean_up(self._options.arena_root, keep=self._arena_directory)
            arena = RankArena(
                self._arena_directory,
                rank=self.rank,
                world_size=self._attach.world_size,
                slots=self._options.slots or (3 if len(self._attach.settings.tiers) > 1 else 2),
                run_id=self._attach.session,
                group=self._group,
            )
        except ResiliencyError as failure:
            error = failure
        except OSError as failure:
            error = ConfigError(
                f"rank {self.rank} cannot keep captures in {self._arena_directory}: {failure}.",
                hint="CheckpointerOptions(arena_root=...) must name a directory in memory, on every host.",
                rank=self.rank,
                path=str(self._arena_directory),
            )
        try:
            self._agreement.check(error, "opening shared memory")
        except ResiliencyError:
            if arena is not None:
                arena.close()
            raise
        assert arena is not None
        return arena

    # --- a common end ----------------------------------------------------------------------------

    def _watch_for_signals(self, options: TerminationOptions) -> None:
        deadline_s = options.deadline.total_seconds()

        def begin(cause: str) -> None:
            self._emit(EventType.STOP_REQUESTED, cause=cause, deadline_s=deadline_s)
            # Now, and not with the last save: it may need the slots of those under way.
            self.hurry()

        def leave(why: str) -> None:
            if self._events is not None:
                self._events.flush(timedelta(seconds=1))

        try:
            self._termination = Termination(self._agreement, options, on_request=begin, on_leave=leave)
        except ResiliencyError:
            self.close()
            raise

    def _end_if_told_to(self, termination: Termination, step: int, state: object) -> None:
        try:
            if not termination.boundary(step):
                return
        except Terminated:
            self.close(finished=False)
            raise
        self.save(step, state, wait=termination.time_left())
        handles = list(dict.fromkeys(self._saved_in.values()))
        tiers = await_tiers(handles, termination.time_left)
        terminated = termination.terminated(step, committed=bool(tiers))
        if tiers:
            logger.warning(
                "step %d is committed (%s); %s ends this rank", step, " and ".join(tiers), terminated.cause
            )
            self._emit(EventType.RANK_FINISHED, step, cause=terminated.cause)
        else:
            why = "; ".join(handle.record.why for handle in handles if handle.record.why)
            logger.error(
                "step %d is not committed (%s); it is left to the agent", step, why or "the deadline is over"
            )
        self.close(finished=bool(tiers) and all(handle.state in FINAL for handle in handles))
        raise terminated

    # --- saves -----------------------------------------------------------------------------------

    def _wanted(self, step: int, tiers: Collection[TierName] | None) -> tuple[str, ...]:
        """The tiers that do not have the step and are not about to."""
        known = self._attach.settings.tiers
        asked = known if tiers is None else tuple(TierName(tier).value for tier in tiers)
        if not asked or not set(asked) <= set(known):
            raise ConfigError(
                f"a save is for some of this job's tiers ({', '.join(known)}), found {', '.join(asked)}.",
                step=step,
            )
        newest = self._newest
        if newest is None or step > newest.step:
            return asked
        if step < newest.step:
            raise ConfigError(
                f"step {step} comes after step {newest.step}: steps are saved in growing order.", step=step
            )
        return tuple(tier for tier in asked if self._may_try(tier))

    def _may_try(self, tier: str) -> bool:
        """Whether the newest step is not in that tier, nor on its way there."""
        handle = self._saved_in.get(tier)
        return handle is None or (handle.state in FINAL and tier not in handle.record.committed_in)

    def _register(self, step: int, tiers: tuple[str, ...]) -> SaveHandle:
        handle = SaveHandle(step, tiers)
        if self._newest is None or step > self._newest.step:
            self._saved_in.clear()
        self._newest = handle
        self._saved_in.update(dict.fromkeys(tiers, handle))
        return handle

    def _fences(self, state: object) -> bool:
        """Whether something will call the fence before the state changes."""
        if not self._options.overlap:
            return False
        for optimizer in (*self._optimizers, *_optimizers_in(state)):
            if id(optimizer) not in self._hooks:
                self._hooks[id(optimizer)] = self._capturer.install_fence(optimizer)
        return bool(self._hooks)

    def _note_excess(self, excess: Excess | None) -> None:
        if excess is not None and self._newest is not None and self._newest.step == excess.step:
            self._newest.update(excess_s=excess.excess_s)
            held_s = self._capturer.stats.held_s - self._held_before_s  # fences since then included
            tiers = tuple(map(TierName, self._newest.record.tiers))
            self._schedule.add_cost(tiers, held_s + excess.excess_s)
            self._delivery.log.add_excess(excess.excess_s)
            logger.debug("excess of the save of step %d: %+.3f s", excess.step, excess.excess_s)

    @property
    def _held_s(self) -> float:
        return self._capturer.stats.last_held_s

    def _emit(self, type: EventType, step: int | None = None, **fields: Any) -> None:
        if self._events is not None:
            self._events.emit(type, step=step, **fields)


def _optimizers_in(state: object, depth: int = 3) -> Iterator[torch.optim.Optimizer]:
    if isinstance(state, torch.optim.Optimizer):
        yield state
    elif depth and isinstance(state, Mapping):
        for value in state.values():
            yield from _optimizers_in(value, depth - 1)
    elif depth and isinstance(state, list | tuple):
        for value in state:
            yield from _optimizers_in(value, depth - 1)
