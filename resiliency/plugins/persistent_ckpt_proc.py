# SPDX-License-Identifier: Apache-2.0
"""Who writes a NeMo checkpoint: one process that lives as long as the job.

Training copies its state into memory that outlives it, and goes on; the checkpoint agent of the host
commits ``step=N`` from there (`resiliency.checkpoint`).  What is captured is told in
`resiliency.plugins.min_ckpt_overhead`, from where a step is loaded in `resiliency.plugins.process_restores`.

    io = PersistentCheckpointProcessIO(MinCkptOverheadCheckpointIO(), directory, keep=3)
    trainer = nl.Trainer(
        ...,
        strategy=nl.MegatronStrategy(..., ckpt_async_save=False),
        plugins=[io],
        callbacks=[ModelCheckpoint(directory, interval_steps=100)],
    )
    trainer._checkpoint_connector = CheckpointConnector(trainer, persistent_ckpt_dir=directory)

The copy goes on while the next forward and backward run, which read the state, and is done before
the optimizer writes it: `ModelCheckpoint` calls `fence` just before each step.  A save that fails or
is skipped is reported and training goes on; only the last one of a training must succeed.

With a local tier (`resiliency.plugins.in_cluster_local_ckpt`) the same copy serves both tiers.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from nemo.lightning.ckpt_utils import ckpt_to_dir

from resiliency.checkpoint.capture.capturer import EAGER_BELOW_BYTES
from resiliency.checkpoint.checkpointer import Checkpointer
from resiliency.checkpoint.names import PRIORITY, TierName
from resiliency.checkpoint.ranks import RankGroup
from resiliency.checkpoint.trainer.handles import SaveHandle
from resiliency.checkpoint.trainer.intervals import IntervalAdvice
from resiliency.checkpoint.trainer.options import CheckpointerOptions, LocalTier, interval_of
from resiliency.checkpoint.trainer.tier_policy import Interval
from resiliency.errors import ConfigError
from resiliency.events import EventStream, EventType, JsonValue, RunEvent
from resiliency.files import posix_path
from resiliency.plugins.hand_off import HandOff
from resiliency.plugins.min_ckpt_overhead import MinCkptOverheadCheckpointIO
from resiliency.plugins.parallel_groups import parallel_groups
from resiliency.plugins.prepared_state import saved_buffers
from resiliency.plugins.process_restores import ProcessRestores
from resiliency.plugins.replica_groups import replica_group
from resiliency.runtime import RunInfo

logger = logging.getLogger(__name__)

#: Longest wait at the end of a training for one save to become durable.
LAST_SAVE_TIMEOUT = timedelta(minutes=30)


class PersistentCheckpointProcessIO(CheckpointIO):
    """Saves through the checkpoint agent, and loads from memory where it can.

    It needs `resiliency.callbacks.model_checkpoint.ModelCheckpoint`, which calls `fence` and `finish`.
    All ranks make one alike.  Its process starts when the first checkpoint is looked for or saved, and
    ends with the training.

    Args:
        checkpoint_io: what to capture, and how to load what the engine cannot: another number of ranks, or
            NeMo's own checkpoints.
        directory: of the persistent tier, where ``step=N`` go; all ranks see the same.  None: there is only a
            local tier.
        local: the local tier; None: there is only a persistent one.  With an interval, for instance
            `every=Interval(mtbf_s=...)`, its `ModelCheckpoint` has none.
        every: the same for the persistent tier.
        keep: newest complete persistent checkpoints that stay, -1: all.  The agent deletes, for it knows
            what is durable; leave `ModelCheckpoint.keep` at -1.
        substitutes: a rank whose shard is lost everywhere goes on from the shard of another rank of its
            replica group, see `resiliency.plugins.replica_groups`.
        hand_off: of local checkpoints to GKE's replicator, which then keeps the copies.
        events: where the ends of saves are recorded; the callback records their beginnings.
    """

    #: How long a save is waited for in all its tiers; whoever ends the job shortens it.
    timeouts: Callable[[], timedelta] = staticmethod(lambda: LAST_SAVE_TIMEOUT)
    #: Whether the job was told to end: one tier is enough then.  On all ranks alike.
    is_stopping = False

    def __init__(
        self,
        checkpoint_io: MinCkptOverheadCheckpointIO,
        directory: str | Path | None,
        *,
        local: LocalTier | None = None,
        every: Interval | None = None,
        keep: int = -1,
        substitutes: bool = False,
        hand_off: HandOff | None = None,
        events: EventStream | None = None,
        options: CheckpointerOptions | None = None,
    ) -> None:
        if keep == 0 or keep < -1:
            raise ConfigError(
                f"keep at least 1 checkpoint (or -1 for all), found {keep}.", flag="--topk-ckpt"
            )
        self.checkpoint_io = checkpoint_io
        places = {
            TierName.PERSISTENT: directory,
            TierName.LOCAL: None if local is None else local.directory,
        }
        #: The directories of the tiers that this process writes, the one to fall back to first.
        self.directories = {
            tier: posix_path(place).absolute() for tier in PRIORITY if (place := places[tier]) is not None
        }
        if not self.directories:
            raise ConfigError("a checkpoint process needs a directory, a local tier, or both.")
        intervals = {TierName.PERSISTENT: interval_of(0, every)}
        if local is not None:
            intervals[TierName.LOCAL] = interval_of(local.every_steps, local.every)
        #: Tiers whose interval was given here, and not to `ModelCheckpoint`.
        self.paced = frozenset(tier for tier, interval in intervals.items() if interval != Interval())
        if not self.paced <= self.directories.keys():
            raise ConfigError("every is of the persistent tier, found without a directory for that.")
        #: What it can restore, and where the last load came from.
        self.restores = ProcessRestores(checkpoint_io, self.directories, self.open)
        self._local = local
        self._every = every
        self._substitutes = substitutes
        self._hand_off = hand_off
        self._keep = sys.maxsize if keep == -1 else keep
        self._events = events
        self._options = replace(options or CheckpointerOptions(), format="megatron")
        self._before_step = _StepHook()
        self._checkpointer: Checkpointer | None = None
        self._newest: SaveHandle | None = None
        #: The newest step: who saves it to which tier.
        self._saved: dict[TierName, SaveHandle] = {}
        self._last_step = -1
        self._due: tuple[TierName, ...] = ()
        self._overlaps = False
        self._tiers: tuple[TierName, ...] = ()
        self._looked_at: torch.nn.Module | None = None
        self._large_buffers: list[str] = []
        self._last = self._finished = False
        #: Whether there is room for this training's captures, as far as it could be made before a save.
        self.is_prewarmed = False

    # --- saving ----------------------------------------------------------------------------------

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: dict[str, Any] | None = None
    ) -> None:
        """Capture; for callers that know nothing of `fence`, this returns when the copy is done.

        Collective at the first save of a job only.

        Raises:
            ConfigError: `path` is not ``step=N`` of this step in a directory of it, or memory has no room.
        """
        step = int(checkpoint["global_step"])
        tier = self._tier_of(path, step)
        if not self._tiers:
            self._tiers = (tier,)
        self._begin(step, self.checkpoint_io.to_capture(checkpoint, storage_options))
        if not self._overlaps:
            self.fence()

    def save(
        self,
        strategy: Any,
        checkpoint: dict[str, Any],
        path: str | Path,
        *,
        tiers: Collection[TierName] = (),
        last: bool = False,
    ) -> None:
        """Like `strategy.save_checkpoint`, with as little of its work as earlier saves have left to do.

        This returns while the state is still being copied: the caller must see to it that `fence` is
        called before anything writes it.

        Args:
            checkpoint: as Lightning dumped it.
            tiers: all that the copy is for; default: the one that `path` lies in.
            last: of this training: wait for storage to catch up, rather than skip this save.
        """
        self._last = last
        own = self._tier_of(path, int(checkpoint["global_step"]))
        self._tiers = tuple(tier for tier in PRIORITY if tier in (*tiers, own))
        state = self.checkpoint_io.try_reuse(strategy, checkpoint)
        if state is not None:
            self._begin(int(checkpoint["global_step"]), state)
        else:
            self._overlaps = True
            try:
                with _in_charge(self, strategy):
                    strategy.save_checkpoint(checkpoint, path)  # which calls `save_checkpoint` above
            finally:
                self._overlaps = False
            self.checkpoint_io.remember(strategy)
        if self._has_large_buffers(strategy.megatron_parallel):
            self.fence()

    def _tier_of(self, path: str | Path, step: int) -> TierName:
        directory = Path(ckpt_to_dir(posix_path(path))).absolute()
        expected = {root / f"step={step}": tier for tier, root in self.directories.items()}
        if directory not in expected:
            raise ConfigError(
                f"step {step} was to be saved as {path}; this process writes to"
                f" {' and '.join(map(str, expected))}.",
                hint="Use resiliency.callbacks.model_checkpoint.ModelCheckpoint with the same directory.",
            )
        return expected[directory]

    def _has_large_buffers(self, model: torch.nn.Module) -> bool:
        """Whether the next forward might write what is still being copied; looked up once per model."""
        if self._looked_at is not model:
            self._looked_at, self._large_buffers = model, large_buffers(model)
            if self._large_buffers:
                logger.info("saves do not overlap with training: it may write %s", self._large_buffers[0])
        return bool(self._large_buffers)

    def _begin(self, step: int, state: object) -> None:
        tiers, self._tiers = self._tiers, ()
        self.restores.forget_inventory()
        wait = self.timeouts() if self._last else None
        self._newest = handle = self.open().save(step, state, tiers=tiers, wait=wait)
        kept = {tier: saved for tier, saved in self._saved.items() if saved.step == step}
        self._saved = kept | {TierName(tier): handle for tier in handle.record.tiers}
        if self._hand_off is not None:
            self._hand_off.saved(handle)

    def prewarm(self, strategy: Any) -> None:
        """Have room made for captures in the background, so that the first saves cost what later ones do.

        With CUDA this waits for it: the memory is pinned as well, which the training thread does by itself.
        Call it when the optimizer has its state: after the first step.  Collective where this process was
        not asked for anything before.

        Raises:
            ConfigError: memory has no room.
        """
        self.is_prewarmed = True
        state = self.checkpoint_io.preview(strategy)
        if state is None:
            return
        if torch.cuda.is_available():
            self.open().prewarm(state)
        else:
            self.open().prepare(state)

    def fence(self) -> None:
        """Hold the caller until the state may be written; for whoever is about to."""
        self._before_step()

    @property
    def newest_step(self) -> int | None:
        """The step that was last to be saved in this run."""
        return None if self._newest is None else self._newest.step

    def wait(self) -> None:
        """Wait until no save is under way; once `timeouts` is over, until one tier has the newest step."""
        checkpointer, newest = self._checkpointer, self._newest
        if checkpointer is None or checkpointer.wait(self.timeouts()):
            return
        two_tiers = len(self.directories) > 1
        if two_tiers and newest is not None and newest.record.committed_in:
            return
        if not checkpointer.wait(LAST_SAVE_TIMEOUT):
            logger.error("saves are still under way after %s", LAST_SAVE_TIMEOUT)

    def step_done(self, step: int) -> None:
        """Say that `step` optimizer steps are done: what a save costs the steps after it is measured.

        Collective at few steps, where intervals are not in steps.
        """
        checkpointer = self.open() if self.paced else self._checkpointer
        if checkpointer is not None and step != self._last_step:
            self._last_step = step
            self._due = checkpointer.due(step)
            if self._hand_off is not None:
                self._hand_off.step_done()

    def is_due(self, step: int, tier: TierName) -> bool:
        """Whether a tier with an interval here is to save `step`, which was the last that is done."""
        return step == self._last_step and tier in self._due

    def advice(self, tier: TierName, *, mtbf_s: float) -> IntervalAdvice:
        """How often to save into `tier`, see `Checkpointer.advice`."""
        if self._checkpointer is None:
            raise ConfigError("no interval can be advised where no training runs.", hint="Ask in a callback.")
        return self._checkpointer.advice(tier, mtbf_s=mtbf_s)

    def metrics_text(self) -> str:
        """Counters of this rank's saves in Prometheus' text format; empty before the start."""
        return "" if self._checkpointer is None else self._checkpointer.metrics_text()

    def lift_bandwidth_cap(self) -> None:
        """The host is about to go: no bandwidth cap any more.  Any thread may call it."""
        checkpointer = self._checkpointer
        if checkpointer is not None:
            checkpointer.lift_bandwidth_cap()

    def committed_in(self, step: int) -> frozenset[TierName]:
        """The tiers in which this run has committed `step`; collective."""
        mine = {
            tier
            for tier, saved in self._saved.items()
            if saved.step == step and tier.value in saved.record.committed_in
        }
        everyone = RankGroup.of_process_group().gather(mine)
        # A persistent commit is one of all ranks; one that lost its agent just then was not told.
        somewhere, everywhere = set.union(*everyone), set.intersection(*everyone)
        return frozenset(somewhere & {TierName.PERSISTENT} | everywhere & {TierName.LOCAL})

    def finish(self) -> None:
        """Training came to its end: `teardown` says goodbye to the agent instead of "wait for me"."""
        self._finished = True

    # --- loading ---------------------------------------------------------------------------------

    @property
    def restored_rng(self) -> dict[str, Any] | None:
        """Random state to set just before the first step; None when nothing was loaded that has one."""
        return self.restores.restored_rng

    def load_content_metadata(
        self, path: str | Path | None = None, preloaded_state_dict: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        return self.restores.load_content_metadata(path, preloaded_state_dict)

    def load_checkpoint(
        self, path: str | Path, sharded_state_dict: Any = None, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Load from the nearest place that has the step; see `ProcessRestores.load_checkpoint`."""
        return self.restores.load_checkpoint(path, sharded_state_dict, *args, **kwargs)

    def remove_checkpoint(self, path: str | Path) -> None:
        self.checkpoint_io.remove_checkpoint(path)

    # --- the process -----------------------------------------------------------------------------

    def open(self) -> Checkpointer:
        """Meet the agent, which is started if there is none; collective at the first call."""
        if self._checkpointer is None:
            info = self._info()
            ranks = RankGroup.of_process_group()
            if self._hand_off is not None:
                self._hand_off.meet()
            self._checkpointer = Checkpointer(
                self.directories.get(TierName.PERSISTENT),
                every=self._every,
                keep=self._keep,
                optimizers=[self._before_step],
                info=replace(info, rank=ranks.rank, world_size=ranks.world_size),
                events=None if self._events is None else _Ends(self._events),
                local=self._local,
                group=self._group(),
                parallel_groups=parallel_groups(),
                options=self._options,
            )
            if self._checkpointer.rank == 0:
                pid = self._checkpointer.agent_pid
                logger.info("checkpoint process %s writes to %s", pid or "(still starting)", self.places())
        return self._checkpointer

    def _group(self) -> str:
        return replica_group() if self._substitutes else ""

    def _info(self) -> RunInfo:
        return self._events.info if self._events is not None else RunInfo.from_env()

    def places(self) -> str:
        """Its directories, for people."""
        return " and ".join(map(str, self.directories.values()))

    def teardown(self) -> None:
        """Lightning's end of a training, good or bad.  Captures of a bad one stay for the agent."""
        checkpointer, self._checkpointer = self._checkpointer, None
        finished, self._finished = self._finished, False  # a trainer may fit again
        self.restores.forget_inventory()
        self.is_prewarmed = False
        if self._hand_off is not None:
            if finished:
                self._hand_off.finish()
            else:
                self._hand_off.stop()
        if checkpointer is not None:
            checkpointer.close(finished=finished)
        self.checkpoint_io.teardown()


def large_buffers(model: torch.nn.Module) -> list[str]:
    """Names of buffers that a checkpoint holds and that the engine does not copy before it returns.

    Parameters are written by the optimizer alone; buffers may be written by any forward.
    """
    return [
        f"{path}.{name}".removeprefix(".")
        for path, module in model.named_modules()
        for name, buffer in saved_buffers(module)
        if buffer.nbytes >= EAGER_BELOW_BYTES
    ]


def process_of(trainer: Any) -> PersistentCheckpointProcessIO | None:
    """The checkpoint process of a trainer, for whichever tiers; None if it saves in another way."""
    io = trainer.strategy.checkpoint_io
    while isinstance(io, _WrappingCheckpointIO):
        io = io.checkpoint_io
    io = getattr(io, "process", io)  # of SplitCheckpointIO
    return io if isinstance(io, PersistentCheckpointProcessIO) else None


@contextmanager
def _in_charge(io: CheckpointIO, strategy: Any) -> Iterator[None]:
    """Let the strategy save through `io`, also where it saves other checkpoints in another way."""
    before = strategy.checkpoint_io
    strategy.checkpoint_io = io
    try:
        yield
    finally:
        strategy.checkpoint_io = before


class _StepHook:
    """Stands for the optimizer: Megatron's takes no hooks, so the callback announces each step here."""

    def __init__(self) -> None:
        self._hook: Callable[..., None] | None = None

    def register_step_pre_hook(self, hook: Callable[..., None]) -> _StepHook:
        self._hook = hook
        return self

    def remove(self) -> None:
        self._hook = None

    def __call__(self) -> None:
        if self._hook is not None:
            self._hook()


class _Ends(EventStream):
    """Lets through how saves ended.  When training was held, and what was loaded, others know better."""

    _PASSED = frozenset({EventType.CHECKPOINT_SAVED, EventType.SAVE_FAILED})

    def __init__(self, events: EventStream) -> None:
        super().__init__(events.info)
        self._events = events

    def emit(self, type: EventType, **fields: Any) -> RunEvent:
        if type not in self._PASSED:
            return super().emit(type, **fields)  # it has no sinks
        named: dict[str, JsonValue] = {"tier": "persistent"}
        return self._events.emit(type, **{**named, **fields})
