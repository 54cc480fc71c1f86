# SPDX-License-Identifier: Apache-2.0
"""Where a NeMo job with a checkpoint process takes a step from: the nearest place that has it.

That is memory, the disk of the host, another host, or the persistent tier.  The engine plans which rank takes
what from where (`resiliency.checkpoint.recovery`), for all ranks together, from what they found at their
start; it verifies what it reads.  What it cannot load goes to the inner CheckpointIO: NeMo's own checkpoints,
and persistent ones of another parallel layout, which are cut anew.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nemo.lightning.ckpt_utils import ckpt_to_dir

from resiliency.checkpoint.checkpointer import Checkpointer
from resiliency.checkpoint.format.marker import parse_step
from resiliency.checkpoint.names import TierName
from resiliency.checkpoint.ranks import RankGroup
from resiliency.checkpoint.recovery.inventory import Inventory
from resiliency.checkpoint.recovery.refusals import RefusedSaves, find_refused_saves
from resiliency.checkpoint.recovery.sources import Tier
from resiliency.checkpoint.state.layout import Shard
from resiliency.errors import CheckpointCorrupt, CheckpointMissing, LayoutMismatch
from resiliency.files import posix_path
from resiliency.plugins import checkpoint_kinds
from resiliency.plugins.checkpoint_kinds import CheckpointKind
from resiliency.plugins.host_shards import Filling, content_metadata
from resiliency.plugins.megatron_state import load_common
from resiliency.plugins.min_ckpt_overhead import MinCkptOverheadCheckpointIO

logger = logging.getLogger(__name__)


class ProcessRestores:
    """What a checkpoint process can restore, and how.

    Args:
        checkpoint_io: loads what the engine cannot.
        directories: of the tiers that the process writes, the one to fall back to first.
        open: meets the process, which is started if there is none; collective at the first call.
    """

    #: Random state to set just before the first step; None when nothing was loaded that has one.
    restored_rng: dict[str, Any] | None = None
    #: Where the last load came from.
    restored_from: Tier = Tier.NONE
    #: Whether the last load gave the persistent copy to the inner CheckpointIO; alike on all ranks.
    is_resharded = False

    def __init__(
        self,
        checkpoint_io: MinCkptOverheadCheckpointIO,
        directories: Mapping[TierName, Path],
        open: Callable[[], Checkpointer],
    ) -> None:
        self._checkpoint_io = checkpoint_io
        self._directories = directories
        self._open = open
        #: What this start found, from which it restores whatever it restores.
        self._inventory: Inventory | None = None

    def inventory(self) -> Inventory:
        """What this start may restore; collective at the first call, and looked at anew only after a save."""
        if self._inventory is None:
            self._inventory = self._open().take_inventory()
        return self._inventory

    def forget_inventory(self) -> None:
        """Look anew when next asked: there is another save now, or the training is over."""
        self._inventory = None

    def captured(self) -> dict[int, Tier]:
        """Steps that the hosts of this job hold between them, newest first, and the nearest place of each.

        Collective where `inventory` is.
        """
        return self.inventory().on_hosts

    def refused_saves(self, *, above: int) -> RefusedSaves:
        """What local tiers hold above the newest step that can be restored; collective as `inventory` is."""
        inventory = self.inventory()
        return find_refused_saves(inventory.needs, inventory.locations, above=above)

    def path_of(self, step: int) -> Path:
        """How a step that the hosts hold is named to a trainer."""
        return next(iter(self._directories.values())) / f"step={step}"

    def step_of(self, path: str | Path | None) -> int | None:
        """The step of a checkpoint in one of its directories; None for any other."""
        if path is None:
            return None
        directory = Path(ckpt_to_dir(path)).absolute()
        return parse_step(directory.name) if directory.parent in self._directories.values() else None

    def load_content_metadata(
        self, path: str | Path | None = None, preloaded_state_dict: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """What NeMo's strategy asks before it builds the template to load into; collective."""
        step = self.step_of(path)
        if step is not None and step in self.captured():
            path, preloaded_state_dict = None, self._common_part(step)
        metadata: dict[str, Any] = self._checkpoint_io.load_content_metadata(path, preloaded_state_dict)
        return metadata

    def load_checkpoint(
        self, path: str | Path, sharded_state_dict: Any = None, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Load from the nearest place that has the step, verified; collective.

        What the engine cannot load goes to the inner CheckpointIO: NeMo's own checkpoints, and other
        numbers of ranks or parallel layouts.

        Raises:
            CheckpointMissing, CheckpointCorrupt: on all ranks; no source of this step could be used.
            LayoutMismatch: on all ranks; the step is of another parallel layout, and the hosts alone have
                it, for only the persistent tier is cut anew; or its form there does not allow that, and
                `is_resharded` is set.
        """
        directory = Path(ckpt_to_dir(posix_path(path)))
        step = self.step_of(path)
        self.restored_rng, self.restored_from, self.is_resharded = None, Tier.NONE, False
        if step is not None:
            filling = Filling(sharded_state_dict)
            try:
                restored = self._open().restore_with(filling.fill, step=step, inventory=self.inventory())
            except LayoutMismatch as mismatch:
                if self._kind_on_disk(directory) is None:
                    raise
                self._verify_all(directory)
                logger.warning("%s is of another parallel layout and is resharded: %s", path, mismatch)
            else:
                if restored.tier is not Tier.NONE:
                    self.restored_from = restored.tier
                    checkpoint, self.restored_rng = filling.loaded()
                    return checkpoint
                if self._kind_on_disk(directory) is not CheckpointKind.NEMO:
                    raise CheckpointMissing(f"no usable source of step {step} is left.", step=step)
        self.is_resharded = True
        loaded: dict[str, Any] = self._checkpoint_io.load_checkpoint(
            path, sharded_state_dict, *args, **kwargs
        )
        self.restored_from = Tier.PERSISTENT
        self.restored_rng = self._checkpoint_io.restored_rng
        return loaded

    def _common_part(self, step: int) -> dict[str, Any]:
        """What ranks saved alike; collective."""
        common: dict[str, Any] = {}
        if self.captured()[step] is Tier.PEERS:
            # Not through the engine, which would move whole shards between hosts for it.
            ranks = RankGroup.of_process_group()
            everyone = ranks.gather(content_metadata(self.inventory(), ranks.rank, step))
            common = next((found for found in everyone if found), common)
        if not common:

            def look(shard: Shard) -> None:
                nonlocal common
                common = load_common(shard)

            # What this rank has found is not asked: the source may have been bad for another one.
            found = self._open().restore_with(look, step=step, inventory=self.inventory())
            if found.tier is Tier.NONE:
                raise CheckpointMissing(f"no usable source of step {step} is left.", step=step)
        return common

    def _kind_on_disk(self, directory: Path) -> CheckpointKind | None:
        """Who wrote a persistent checkpoint; None if there is none."""
        # As rank 0 sees it: storage may show the directory to other ranks later.
        is_persistent = directory.parent.absolute() == self._directories.get(TierName.PERSISTENT)
        there = is_persistent and os.path.isdir(directory)
        try:
            mine = checkpoint_kinds.kind_of(directory) if there else None
        except OSError as error:
            logger.warning("%s cannot be read: %s", directory, error)
            mine = None
        return RankGroup.of_process_group().gather(mine)[0]

    def _verify_all(self, directory: Path) -> None:
        """Verify every byte before Megatron's own reader, which does not, moves them into the model."""
        problems = checkpoint_kinds.verify_together(directory)
        if problems:
            raise CheckpointCorrupt(problems[0], path=str(directory))
