# SPDX-License-Identifier: Apache-2.0
"""Checkpoints for a plain training loop, without training waiting for storage.

    with Checkpointer("/ckpt", every_steps=100, keep=3) as checkpoints:
        start = checkpoints.restore(state).step
        for step in range(start + 1, steps + 1):
            train_step()
            checkpoints.step(step, state)

A save copies the state into memory that outlives this process and returns; the checkpoint agent of
this host writes it from there, in a format that stock `torch.distributed.checkpoint` reads.  When
storage is slower than the interval, saves are skipped, counted and logged; training is never held up.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from resiliency.checkpoint.agent_link import AgentLink, LinkOptions
from resiliency.checkpoint.agreement import Agreement
from resiliency.checkpoint.arena import DEFAULT_ROOT, RankArena, clean_up, job_directory
from resiliency.checkpoint.capture import Capture, CaptureOptions, Capturer, Outcome
from resiliency.checkpoint.restoring import Fill, Restored, Restorer, Source
from resiliency.checkpoint.saves import FINAL, SaveHandle, SaveLog, SaveRecord, SaveState
from resiliency.checkpoint.state import plan_restore
from resiliency.checkpoint.step_times import Excess, StepTimes
from resiliency.checkpoint.storage import LocalStorage
from resiliency.checkpoint.table import Shard
from resiliency.checkpoint.termination import Terminated, Termination, TerminationOptions
from resiliency.checkpoint.wire import Attach, Done, Hurry, Save, Settings, Skip, check_settings
from resiliency.errors import ConfigError, ResiliencyError
from resiliency.events import EventStream, EventType
from resiliency.runtime import RunInfo

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CheckpointerOptions:
    """What most jobs leave as it is.

    Attributes:
        overlap: copy while the next forward and backward run, and hold training only where an optimizer
            is about to write.  Needs the optimizers: those in the state are found, others are passed to
            `Checkpointer`.  Without any, or with False, a save returns when the copy is done.
        slots: captures that fit into memory, at least 2.
        capture: see `CaptureOptions`.
        bytes_per_s: bandwidth cap of this host's writes; 0 means none.
        save_timeout: longest wait of a save for the agents of other hosts.
        close_timeout: longest wait for saves under way at the end.
        link: deadlines between trainer and agent.
        arena_root: where the captures live; must be memory.
        allow: classes that a checkpoint may name when it is restored, see `resiliency.checkpoint.values`.
        format: who reads the checkpoints without this library: "dcp" (stock torch) or "megatron" (stock
            Megatron-core, for states that `resiliency.plugins.megatron_state` prepared).
    """

    overlap: bool = True
    slots: int = 2
    capture: CaptureOptions = field(default_factory=CaptureOptions)
    bytes_per_s: int = 0
    save_timeout: timedelta = timedelta(minutes=10)
    close_timeout: timedelta = timedelta(minutes=10)
    link: LinkOptions = field(default_factory=LinkOptions)
    arena_root: Path = DEFAULT_ROOT
    allow: tuple[type | str, ...] = ()
    format: str = "dcp"


class Checkpointer:
    """Saves and restores the state of one rank; a context manager, used by the training thread.

    All ranks of the job make one alike, after `init_process_group`; this returns when the agent of the
    host is there, which takes seconds at the first start and nothing after a restart.  Leaving the
    context waits for the saves under way; leaving it by an exception does not: the agent commits what
    is captured, and a restart finds it in memory.

    Args:
        directory: where ``step=N`` go; all ranks see the same.
        every_steps: interval of `step`; 0: only `save` saves.
        keep: newest complete checkpoints that stay.
        replicated: all tensors are the same on all ranks (plain data parallelism), so each is written
            by one of them.  What differs between ranks must then be no tensor: numbers, bytes, lists.
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
        directory: str | Path,
        *,
        every_steps: int = 0,
        keep: int = 3,
        replicated: bool = False,
        optimizers: Iterable[Any] = (),
        info: RunInfo | None = None,
        events: EventStream | None = None,
        options: CheckpointerOptions | None = None,
        termination: TerminationOptions | None = None,
    ) -> None:
        if every_steps < 0:
            raise ConfigError(f"every_steps must not be negative, found {every_steps}.")
        self._options = options = options or CheckpointerOptions()
        self._every_steps = every_steps
        self._replicated = replicated
        self._events = events
        self._directory = Path(directory).absolute()
        settings = Settings(
            directory=str(self._directory),
            keep=keep,
            replicated=replicated,
            bytes_per_s=options.bytes_per_s,
            save_timeout_s=options.save_timeout.total_seconds(),
            format=options.format,
        )
        check_settings(settings)
        info = info or RunInfo.from_env()
        self._agreement = Agreement(info.rank or 0, info.world_size)
        self._attach = self._meet(info, settings)
        self._arena = self._open_arena(info)
        self._capturer = Capturer(self._arena, options.capture)
        self._optimizers = list(optimizers)
        self._hooks: dict[int, Any] = {}
        self._log = SaveLog()
        self._times = StepTimes(time.monotonic)
        self._newest: SaveHandle | None = None
        self._captured_step = self._committed_step = -1
        self._lock = threading.Lock()
        self._under_way: dict[int, tuple[SaveHandle, Capture]] = {}
        self._captures: queue.SimpleQueue[tuple[SaveHandle, Capture] | Skip | None] = queue.SimpleQueue()
        self._courier = threading.Thread(target=self._deliver, name="resiliency-courier", daemon=True)
        self._courier.start()
        self._link = AgentLink(
            self._arena.directory,
            self._attach,
            starts=self.rank == min(self._attach.local_ranks),
            on_done=self._done,
            on_lost=self._lost,
            options=options.link,
        )
        self._closed = False
        self._termination: Termination | None = None
        if termination is not None:
            self._watch_for_signals(termination)
        # Else the first saves would fill all slots while the agent still imports torch.
        if not self._link.wait_for_agent():
            logger.error("there is no checkpoint agent yet: saves fail until there is")

    @property
    def rank(self) -> int:
        return self._attach.rank

    @property
    def agent_pid(self) -> int:
        """Process id of this host's agent; 0 while this rank is not attached to one."""
        return self._link.agent_pid

    def restore(self, state: object) -> Restored:
        """Bring the newest state back, in place; collective over all ranks.

        It comes from this host's memory if every rank finds its capture there, else from the newest
        checkpoint in the directory that is complete and verifies.  A bad one is hidden and the one
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
        if restored.run_id and restored.run_id != self._attach.run_id:
            self._attach = replace(self._attach, run_id=restored.run_id)
            self._link.introduce_again(self._attach)
        if restored.step:
            self._emit(EventType.CHECKPOINT_LOADED, restored.step, tier=restored.tier.value)
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
        if self._every_steps and step % self._every_steps == 0:
            return self.save(step, state)
        return None

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

    def save(self, step: int, state: object, *, wait: timedelta | None = None) -> SaveHandle:
        """Save `state` as of `step`; returns while it is still being copied or written.

        All ranks must save the same steps, in growing order; a step that is saved already, or being
        saved, is not saved again.  A skipped or failed one may be tried again.

        The state may be changed by the optimizers that this object knows, and by nothing else before
        they step (see `CheckpointerOptions.overlap` and `fence`).

        Args:
            wait: for storage to catch up, at most so long, before the save is skipped; for the last one of
                a job.  None: as `CaptureOptions.when_full` says, by default not at all.
        Raises:
            ConfigError: something in the state cannot be saved, or shared memory has no room for it.
        """
        newest = self._newest
        if newest is not None and step <= newest.step:
            if step == newest.step and newest.state not in (SaveState.FAILED, SaveState.SKIPPED):
                return newest
            if step < newest.step:
                raise ConfigError(
                    f"step {step} comes after step {newest.step}: steps are saved in growing order.",
                    step=step,
                )
        self._note_excess(self._times.saved(step))
        handle = self._newest = SaveHandle(step)
        self._emit(EventType.SAVE_STARTED, step)
        try:
            capture = self._capturer.begin(state, step, keep=True, wait=wait)
        except ResiliencyError as error:  # the caller may go on without this save, and so must the others
            self._emit(EventType.SAVE_RELEASED, step)
            self._not_captured(handle, SaveState.FAILED, str(error))
            raise
        if capture is not None and not self._fences(state):
            self._capturer.fence()
        held_s = self._capturer.stats.last_held_s
        self._emit(EventType.SAVE_RELEASED, step)
        if capture is None:
            why = "storage is slower than the interval: all slots still wait to be written"
            self._not_captured(handle, SaveState.SKIPPED, why)
            return handle
        size = capture.layout.size_bytes
        handle._update(SaveRecord(step=step, state=SaveState.QUEUED, size_bytes=size, held_s=held_s))
        with self._lock:
            self._under_way[step] = (handle, capture)
        self._captures.put((handle, capture))
        return handle

    def hurry(self) -> None:
        """This host is about to go: what is captured is written without the bandwidth cap."""
        self._link.request(Hurry())

    def fence(self) -> None:
        """Hold the caller until the state may be changed; for code that changes it without an optimizer."""
        self._capturer.fence()

    def wait(self, timeout: timedelta) -> bool:
        """Wait until no save is under way; False at the timeout."""
        deadline = time.monotonic() + timeout.total_seconds()
        with self._lock:
            handles = [handle for handle, _ in self._under_way.values()]
        return all(h.wait(timedelta(seconds=max(0.0, deadline - time.monotonic()))) for h in handles)

    def metrics_text(self) -> str:
        """Counters of this rank's saves in Prometheus' text format."""
        return self._log.metrics_text(rank=self.rank, agent_losses=self._link.losses)

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
        self._capturer.close()
        self._captures.put(None)
        self._courier.join(self._options.close_timeout.total_seconds())
        spent = finished and self._captured_step <= self._committed_step
        if finished and not spent:
            logger.error(
                "step %d is nowhere but in the memory of this host: its save failed.  Mend the storage and"
                " start the job again here, to restore it from there",
                self._captured_step,
            )
        # Before the goodbye: the agent leaves when all have said theirs, and removes what is empty.
        self._arena.close(remove=spent)
        if self._termination is not None:
            self._termination.close(finished=finished)
        self._link.close(goodbye=spent)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(finished=kind is None)

    def _restorer(self) -> Restorer:
        storage = LocalStorage(self._directory)
        return Restorer(self._arena, storage, self._agreement, replicated=self._replicated)

    # --- the start -------------------------------------------------------------------------------

    def _meet(self, info: RunInfo, settings: Settings) -> Attach:
        """Learn who shares this host, and agree on a name for this start of the job."""
        everyone = self._agreement.gather((info.host, uuid.uuid4().hex))
        # Two directories are two jobs, whatever their names: a program may keep two checkpointers.
        suffix = f"{zlib.crc32(settings.directory.encode()):08x}"
        self._arena_directory = job_directory(f"{info.job_name}-{suffix}", self._options.arena_root)
        return Attach(
            rank=self._agreement.rank,
            world_size=self._agreement.world_size,
            local_ranks=tuple(rank for rank, (host, _) in enumerate(everyone) if host == info.host),
            run_id=info.job_name,
            session=everyone[0][1],
            settings=settings,
        )

    def _open_arena(self, info: RunInfo) -> RankArena:
        error: ResiliencyError | None = None
        arena = None
        try:
            if self.rank == min(self._attach.local_ranks):
                clean_up(self._options.arena_root, keep=self._arena_directory)
            arena = RankArena(
                self._arena_directory,
                rank=self.rank,
                world_size=self._attach.world_size,
                slots=self._options.slots,
                run_id=self._attach.session,
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
        handle = self.save(step, state, wait=termination.time_left())
        handle.wait(termination.time_left())
        committed = handle.state is SaveState.COMMITTED
        terminated = termination.terminated(step, committed=committed)
        if committed:
            logger.warning("step %d is committed; %s ends this rank", step, terminated.cause)
            self._emit(EventType.RANK_FINISHED, step, cause=terminated.cause)
        else:
            why = handle.record.why or "the deadline is over"
            logger.error("step %d is not committed (%s); it is left to the agent", step, why)
        self.close(finished=committed)
        raise terminated

    # --- saves -----------------------------------------------------------------------------------

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
            self._newest._learn_excess(excess.excess_s)
            self._log.add_excess(excess.excess_s)
            logger.debug("excess of the save of step %d: %+.3f s", excess.step, excess.excess_s)

    def _not_captured(self, handle: SaveHandle, state: SaveState, why: str) -> None:
        # After the captures before it: the agent takes a rank's steps to come in order.
        self._captures.put(Skip(step=handle.step, reason=f"rank {self.rank}: {why}"))
        held_s = self._capturer.stats.last_held_s
        self._settle(handle, SaveRecord(step=handle.step, state=state, why=why, held_s=held_s))

    def _deliver(self) -> None:
        """In the courier's thread: tell the agent of each capture once it is whole."""
        while (item := self._captures.get()) is not None:
            if isinstance(item, Skip):
                self._link.request(item)
                continue
            handle, capture = item
            capture.wait(timedelta(days=1))  # the capturer settles every capture, by its own deadlines
            if capture.outcome is Outcome.CAPTURED:
                self._captured_step = capture.step
                handle._update(replace(handle.record, state=SaveState.CAPTURED))
                self._link.request(Save(step=capture.step, slot=capture.slot_path.name))
            else:
                why = f"rank {self.rank}: its capture was dropped: {capture.error}"
                self._link.request(Skip(step=capture.step, reason=why))
                self._finish(capture.step, SaveState.FAILED, why=why)

    def _done(self, done: Done) -> None:
        """In the link's thread: the agent reports the end of a save."""
        if self.rank in done.skipped_by:
            return  # settled when it was not captured; a second try may be under way
        state = SaveState.FAILED if done.error else SaveState.COMMITTED
        self._finish(done.step, state, done.error, queued_s=done.queued_s, commit_s=done.commit_s)

    def _lost(self, why: str, steps: frozenset[int]) -> None:
        """In the link's thread: an agent is gone, and with it the saves that it held."""
        for step in sorted(steps):
            self._finish(step, SaveState.FAILED, why)

    def _finish(
        self, step: int, state: SaveState, why: str = "", *, queued_s: float = 0.0, commit_s: float = 0.0
    ) -> None:
        with self._lock:
            found = self._under_way.pop(step, None)
        if found is None:  # reported before
            return
        handle, capture = found
        capture.release()
        record = replace(handle.record, state=state, why=why, queued_s=queued_s, commit_s=commit_s)
        self._settle(handle, record)

    def _settle(self, handle: SaveHandle, record: SaveRecord) -> None:
        assert record.state in FINAL
        self._log.add(record)
        if record.state is SaveState.COMMITTED:
            self._committed_step = max(self._committed_step, record.step)
            if self.rank == 0:
                self._emit(EventType.CHECKPOINT_SAVED, record.step)
        else:
            logger.warning("save of step %d %s: %s", record.step, record.state.value, record.why)
            self._emit(EventType.SAVE_FAILED, record.step, cause=record.why, outcome=record.state.value)
        handle._update(record)

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
