# SPDX-License-Identifier: Apache-2.0
"""The checkpoint engine: torch and nothing else.

`Checkpointer` is what a training loop uses; the rest is what it is made of.

Capture side: `Capturer` copies a state into the slots of a `RankArena`, shared memory that outlives
the process; `open_captured` finds it there after a restart, `restore_into` and `materialize` bring
it back.
"""

from resiliency.checkpoint.arena import (
    CapturedSlot,
    RankArena,
    clean_up,
    job_directory,
    open_captured,
)
from resiliency.checkpoint.capture import Capture, CaptureOptions, Capturer, CaptureStats, Outcome, WhenFull
from resiliency.checkpoint.checkpointer import Checkpointer, CheckpointerOptions
from resiliency.checkpoint.leaves import Placement, ShardedView, register_sharded_type
from resiliency.checkpoint.restoring import Restored, Tier
from resiliency.checkpoint.saves import SaveHandle, SaveRecord, SaveState
from resiliency.checkpoint.state import Restore, StateWalker, materialize, restore_into
from resiliency.checkpoint.table import Shard, StateLayout, TensorEntry, TensorView
from resiliency.checkpoint.values import ANY_CLASS

__all__ = [
    "ANY_CLASS",
    "Capture",
    "CaptureOptions",
    "CaptureStats",
    "CapturedSlot",
    "Capturer",
    "Checkpointer",
    "CheckpointerOptions",
    "Outcome",
    "Placement",
    "RankArena",
    "Restore",
    "Restored",
    "SaveHandle",
    "SaveRecord",
    "SaveState",
    "Shard",
    "ShardedView",
    "StateLayout",
    "StateWalker",
    "TensorEntry",
    "TensorView",
    "Tier",
    "WhenFull",
    "clean_up",
    "job_directory",
    "materialize",
    "open_captured",
    "register_sharded_type",
    "restore_into",
]
