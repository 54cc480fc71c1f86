# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on the hosts themselves: written fast, and found again when hosts were lost or swapped.

One engine, three ways to use it:

* `InClusterLocalCheckpointIO` alone: only a local tier.
* The same with `persistent_directory`: two tiers.  Training copies its state once for both.
* `SplitCheckpointIO`: the local tier as above, the persistent one as NeMo saves it
  (`resiliency.plugins.combined_functionality` makes it from the arguments of NeMo's own).

    local = LocalTier(directory="/dev/shm/ckpt", replicas=1)
    io = InClusterLocalCheckpointIO(MinCkptOverheadCheckpointIO(), local, persistent_directory="/shared/ckpt")
    trainer = nl.Trainer(
        ...,
        strategy=nl.MegatronStrategy(..., ckpt_async_save=False),
        plugins=[io],
        callbacks=[
            ModelCheckpoint(local.directory, 50, tier=Tier.LOCAL),
            ModelCheckpoint("/shared/ckpt", 500, priority=1),
        ],
    )
    trainer._checkpoint_connector = CheckpointConnector(trainer, persistent_ckpt_dir="/shared/ckpt")

At a restart each rank gets its own shard, wherever it lies: in the memory or on the disk of its host, with
the rank that now runs where it ran before, or on a host that keeps a copy.  With `substitutes` it may also
be the shard of another rank of its replica group (`resiliency.plugins.replica_groups`).  Steps are
never mixed.  Only the persistent tier can be cut anew for another parallel layout.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo.utils.callbacks.dist_ckpt_io import AsyncCompatibleCheckpointIO, AsyncFinalizableCheckpointIO

from resiliency.checkpoint.names import TierName
from resiliency.checkpoint.recovery.sources import Tier
from resiliency.checkpoint.trainer.options import CheckpointerOptions, LocalTier
from resiliency.checkpoint.trainer.tier_policy import Interval
from resiliency.errors import ConfigError
from resiliency.events import EventStream
from resiliency.plugins.dist_ckpt import VerifiedCheckpointIO
from resiliency.plugins.hand_off import HandOff
from resiliency.plugins.min_ckpt_overhead import MinCkptOverheadCheckpointIO
from resiliency.plugins.persistent_ckpt_proc import PersistentCheckpointProcessIO

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest


class InClusterLocalCheckpointIO(PersistentCheckpointProcessIO):
    """`PersistentCheckpointProcessIO` with a local tier, and with or without a persistent one.

    Args:
        checkpoint_io: what to capture, and how to load what the engine cannot.
        local: the local tier; its directory is of this job alone, and each host has its own.
        persistent_directory: of a persistent tier that the same process writes; None: it writes none.
        every: interval of that tier; given here, its `ModelCheckpoint` has none.
        keep: newest complete persistent checkpoints that stay, -1: all.
        substitutes: a rank whose shard is lost everywhere goes on from that of another rank of its replica
            group.
        hand_off: of local checkpoints to GKE's replicator; then `local` has no replicas of its own.
        events: where the ends of saves are recorded.
    """

    def __init__(
        self,
        checkpoint_io: MinCkptOverheadCheckpointIO,
        local: LocalTier,
        *,
        persistent_directory: str | Path | None = None,
        every: Interval | None = None,
        keep: int = -1,
        substitutes: bool = False,
        hand_off: HandOff | None = None,
        events: EventStream | None = None,
        options: CheckpointerOptions | None = None,
    ) -> None:
        volume = None if hand_off is None else hand_off.job.directory
        if volume is not None and (local.replicas or Path(local.directory) != volume):
            raise ConfigError(
                f"a local tier in {local.directory} with {local.replicas} copies on other hosts cannot be"
                f" handed over in {volume}.",
                hint="Its directory must be that volume itself; the replicator makes the copies: replicas=0.",
            )
        if hand_off is not None:
            local = replace(local, backlog=hand_off.backlog)
        super().__init__(
            checkpoint_io,
            persistent_directory,
            local=local,
            every=every,
            keep=keep,
            substitutes=substitutes,
            hand_off=hand_off,
            events=events,
            options=options,
        )


class SplitCheckpointIO(AsyncCompatibleCheckpointIO):
    """Two that save side by side: NeMo the persistent checkpoints, a checkpoint process the local ones.

    For asynchronous saves wrap the whole as NeMo wraps its own:
    ``AsyncFinalizableCheckpointIO(SplitCheckpointIO(VerifiedCheckpointIO(..., async_save=True),
    local))``.

    Args:
        persistent: as it would be used alone, not wrapped.
        process: writes a local tier only.
    Raises:
        ConfigError: `persistent` is wrapped, or `process` writes a persistent tier too.
    """

    def __init__(self, persistent: VerifiedCheckpointIO, process: InClusterLocalCheckpointIO) -> None:
        if isinstance(persistent, AsyncFinalizableCheckpointIO):
            raise ConfigError(
                "SplitCheckpointIO was given a wrapped CheckpointIO.",
                hint="Put the wrapper outside: AsyncFinalizableCheckpointIO(SplitCheckpointIO(...)).",
            )
        if TierName.PERSISTENT in process.directories:
            raise ConfigError(
                f"the process writes {process.places()}, and NeMo persistent checkpoints as well.",
                hint="Use one of them: the process alone serves both tiers from one copy.",
            )
        self.persistent = persistent
        self.process = process
        self._loaded: VerifiedCheckpointIO | PersistentCheckpointProcessIO = persistent

    @property
    def restored_rng(self) -> dict[str, Any] | None:
        """Of the last load, whichever it was."""
        return self._loaded.restored_rng

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> AsyncRequest | None:
        """Save a persistent checkpoint; `ModelCheckpoint` gives local ones to the process itself."""
        return self.persistent.save_checkpoint(checkpoint, path, storage_options)

    def load_content_metadata(
        self, path: str | Path | None = None, preloaded_state_dict: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        loader = self._loader(path)
        metadata: dict[str, Any] = loader.load_content_metadata(path, preloaded_state_dict)
        return metadata

    def load_checkpoint(
        self, path: str | Path, sharded_state_dict: Any = None, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Load from the tier that `path` is in."""
        self.process.restores.restored_from = Tier.NONE
        self._loaded = self._loader(path)
        return self._loaded.load_checkpoint(path, sharded_state_dict, *args, **kwargs)

    def remove_checkpoint(self, path: str | Path) -> None:
        self._loader(path).remove_checkpoint(path)

    def teardown(self) -> None:
        self.process.teardown()
        self.persistent.teardown()

    def _loader(self, path: str | Path | None) -> Any:
        return self.persistent if self.process.restores.step_of(path) is None else self.process
