# SPDX-License-Identifier: Apache-2.0
"""Who writes a NeMo checkpoint: one process that lives as long as the job.

Training copies its state into memory that outlives it, and goes on; the checkpoint agent of the host
commits ``step=N`` from there (`resiliency.checkpoint`).  What is captured is told in
`resiliency.plugins.min_ckpt_overhead`.

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
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from nemo.lightning.ckpt_utils import ckpt_to_dir

from resiliency.checkpoint.agreement import Agreement
from resiliency.checkpoint.capture import EAGER_BELOW_BYTES
from resiliency.checkpoint.checkpointer import Checkpointer, CheckpointerOptions
from resiliency.checkpoint.restoring import Tier
from resiliency.checkpoint.saves import SaveHandle, SaveState
from resiliency.errors import CheckpointCorrupt, CheckpointMissing, ConfigError, LayoutMismatch
from resiliency.events import EventStream, EventType, JsonValue, RunEvent
from resiliency.plugins import checkpoint_kinds, manifest
from resiliency.plugins.checkpoint_kinds import Kind
from resiliency.plugins.dist_ckpt import RNG_KEY, sharded_per_rank
from resiliency.plugins.megatron_state import MegatronLoading, load_common
from resiliency.plugins.min_ckpt_overhead import MinCkptOverheadCheckpointIO
from resiliency.plugins.prepared_state import saved_buffers
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
        directory: where ``step=N`` go; all ranks see the same.
        keep: newest complete checkpoints that stay, -1: all.  The agent deletes, for it knows what is
            durable; leave `ModelCheckpoint.keep` at -1.
        events: where the ends of saves are recorded; the callback records their beginnings.
    """

    #: Random state to set just before the first step; None when nothing was loaded that has one.
    restored_rng: dict[str, Any] | None = None
    #: Whether the last load was from memory: then nothing says that its step is durable.
    restored_from_memory = False

    def __init__(
        self,
        checkpoint_io: MinCkptOverheadCheckpointIO,
        directory: str | Path,
        *,
        keep: int = -1,
        events: EventStream | None = None,
        options: CheckpointerOptions | None = None,
    ) -> None:
        if keep == 0 or keep < -1:
            raise ConfigError(
                f"keep at least 1 checkpoint (or -1 for all), found {keep}.", flag="--topk-ckpt"
            )
        self.checkpoint_io = checkpoint_io
        self.directory = Path(directory).absolute()
        self._keep = sys.maxsize if keep == -1 else keep
        self._events = events
        self._options = replace(options or CheckpointerOptions(), format="megatron")
        self._before_step = _StepHook()
        self._checkpointer: Checkpointer | None = None
        self._newest: SaveHandle | None = None
        self._in_memory: list[int] | None = None
        self._last_step = -1
        self._overlaps = False
        self._looked_at: torch.nn.Module | None = None
        self._large_buffers: list[str] = []
        self._finished = False

    # --- saving ----------------------------------------------------------------------------------

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: dict[str, Any] | None = None
    ) -> None:
        """Capture; for callers that know nothing of `fence`, this returns when the copy is done.

        Collective at the first save of a job only.

        Raises:
            ConfigError: `path` is not ``step=N`` of this step in the directory, or memory has no room.
        """
        step = int(checkpoint["global_step"])
        expected = self.directory / f"step={step}"
        if Path(ckpt_to_dir(path)).absolute() != expected:
            raise ConfigError(
                f"step {step} was to be saved as {path}; this process writes to {expected}.",
                hint="Use resiliency.callbacks.model_checkpoint.ModelCheckpoint with the same directory.",
            )
        self._begin(step, self.checkpoint_io.to_capture(checkpoint, storage_options))
        if not self._overlaps:
            self.fence()

    def save(self, strategy: Any, checkpoint: dict[str, Any], path: str | Path) -> None:
        """Like `strategy.save_checkpoint`, with as little of its work as earlier saves have left to do.

        This returns while the state is still being copied: the caller must see to it that `fence` is
        called before anything writes it.

        Args:
            checkpoint: as Lightning dumped it.
        """
        state = self.checkpoint_io.try_reuse(strategy, checkpoint)
        if state is not None:
            self._begin(int(checkpoint["global_step"]), state)
        else:
            self._overlaps = True
            try:
                strategy.save_checkpoint(checkpoint, path)  # which calls `save_checkpoint` above
            finally:
                self._overlaps = False
            self.checkpoint_io.remember(strategy)
        if self._has_large_buffers(strategy.megatron_parallel):
            self.fence()

    def _has_large_buffers(self, model: torch.nn.Module) -> bool:
        """Whether the next forward might write what is still being copied; looked up once per model."""
        if self._looked_at is not model:
            self._looked_at, self._large_buffers = model, large_buffers(model)
            if self._large_buffers:
                logger.info("saves do not overlap with training: it may write %s", self._large_buffers[0])
        return bool(self._large_buffers)

    def _begin(self, step: int, state: object) -> None:
        self._newest = self.open().save(step, state)

    def fence(self) -> None:
        """Hold the caller until the state may be written; for whoever is about to."""
        self._before_step()

    @property
    def newest_step(self) -> int | None:
        """The step that was last to be saved in this run."""
        return None if self._newest is None else self._newest.step

    def wait(self) -> None:
        """Wait until no save is under way, so that the next one finds a free slot."""
        if self._checkpointer is not None and not self._checkpointer.wait(LAST_SAVE_TIMEOUT):
            logger.error("saves are still under way after %s", LAST_SAVE_TIMEOUT)

    def step_done(self, step: int) -> None:
        """Say that `step` optimizer steps are done: what a save costs the steps after it is measured."""
        if self._checkpointer is not None and step != self._last_step:
            self._last_step = step
            self._checkpointer.step(step, None)

    def metrics_text(self) -> str:
        """Counters of this rank's saves in Prometheus' text format; empty before the start."""
        return "" if self._checkpointer is None else self._checkpointer.metrics_text()

    def hurry(self) -> None:
        """The host is about to go: no bandwidth cap any more.  Any thread may call it."""
        checkpointer = self._checkpointer
        if checkpointer is not None:
            checkpointer.hurry()

    def is_committed(self, step: int) -> bool:
        """Whether this run saved `step` and it is durable; collective."""
        newest = self._newest
        mine = newest is not None and newest.step == step and newest.state is SaveState.COMMITTED
        # A commit is one of all ranks; one that lost its agent just then was not told.
        return any(Agreement.of_process_group().gather(mine))

    def finish(self) -> None:
        """Training came to its end: `teardown` says goodbye to the agent instead of "wait for me"."""
        self._finished = True

    # --- loading ---------------------------------------------------------------------------------

    def steps_in_memory(self) -> list[int]:
        """Steps that every rank finds captured on its host, newest first.

        Collective at the first call; later ones tell what was there at the start.
        """
        if self._in_memory is None:
            sources = self.open().sources()
            self._in_memory = [source.step for source in sources if source.tier is Tier.MEMORY]
        return self._in_memory

    def load_content_metadata(
        self, path: str | Path | None = None, preloaded_state_dict: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """What NeMo's strategy asks before it builds the template to load into; collective."""
        step = self._step_of(path)
        if step is not None and step in self.steps_in_memory():
            common: dict[str, Any] = {}
            self.open().restore_with(lambda shard: common.update(load_common(shard)), step=step)
            if not common:
                raise CheckpointMissing(f"no usable source of step {step} is left.", step=step)
            path, preloaded_state_dict = None, common
        metadata: dict[str, Any] = self.checkpoint_io.load_content_metadata(path, preloaded_state_dict)
        return metadata

    def load_checkpoint(
        self, path: str | Path, sharded_state_dict: Any = None, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Load from memory, else from disk, verified; collective.

        What the engine cannot load goes to the inner CheckpointIO: NeMo's own checkpoints, and other
        numbers of ranks or parallel layouts.

        Raises:
            CheckpointMissing, CheckpointCorrupt: on all ranks; no source of this step could be used.
        """
        directory = Path(ckpt_to_dir(path))
        step = self._step_of(path)
        self.restored_rng, self.restored_from_memory = None, False
        if step is not None:
            loading = MegatronLoading({**sharded_state_dict, RNG_KEY: sharded_per_rank(None)})
            try:
                restored = self.open().restore_with(loading.fill, step=step)
            except LayoutMismatch as mismatch:
                self._verify_all(directory)
                logger.warning("%s is of another parallel layout and is resharded: %s", path, mismatch)
            else:
                if restored.tier is not Tier.NONE:
                    self.restored_from_memory = restored.tier is Tier.MEMORY
                    checkpoint = loading.state_dict
                    self.restored_rng = checkpoint.pop(RNG_KEY, None)
                    return checkpoint
                # As rank 0 sees it: storage may show the directory to other ranks later.
                there = Agreement.of_process_group().gather(
                    checkpoint_kinds.kind_of(directory) if directory.is_dir() else None
                )
                if there[0] is not Kind.NEMO:
                    raise CheckpointMissing(f"no usable source of step {step} is left.", step=step)
        loaded: dict[str, Any] = self.checkpoint_io.load_checkpoint(path, sharded_state_dict, *args, **kwargs)
        self.restored_rng = self.checkpoint_io.restored_rng
        return loaded

    def remove_checkpoint(self, path: str | Path) -> None:
        self.checkpoint_io.remove_checkpoint(path)

    def _verify_all(self, directory: Path) -> None:
        """Verify every byte before Megatron's own reader, which does not, moves them into the model."""
        problems = checkpoint_kinds.verify_together(directory)
        if problems:
            raise CheckpointCorrupt(problems[0], path=str(directory))

    def _step_of(self, path: str | Path | None) -> int | None:
        """The step of a checkpoint in this directory; None for any other."""
        if path is None:
            return None
        directory = Path(ckpt_to_dir(path)).absolute()
        return manifest.step_of(directory) if directory.parent == self.directory else None

    # --- the process -----------------------------------------------------------------------------

    def open(self) -> Checkpointer:
        """Meet the agent, which is started if there is none; collective at the first call."""
        if self._checkpointer is None:
            info = self._events.info if self._events is not None else RunInfo.from_env()
            ranks = Agreement.of_process_group()
            self._checkpointer = Checkpointer(
                self.directory,
                keep=self._keep,
                optimizers=[self._before_step],
                info=replace(info, rank=ranks.rank, world_size=ranks.world_size),
                events=None if self._events is None else _Ends(self._events),
                options=self._options,
            )
            if self._checkpointer.rank == 0:
                pid = self._checkpointer.agent_pid
                logger.info("checkpoint process %d writes to %s", pid, self.directory)
        return self._checkpointer

    def teardown(self) -> None:
        """Lightning's end of a training, good or bad.  Captures of a bad one stay for the agent."""
        checkpointer, self._checkpointer = self._checkpointer, None
        finished, self._finished = self._finished, False  # a trainer may fit again
        self._in_memory = None
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
    """The checkpoint process of a trainer; None if it saves in another way."""
    io = trainer.strategy.checkpoint_io
    return io if isinstance(io, PersistentCheckpointProcessIO) else None


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
