# SPDX-License-Identifier: Apache-2.0
"""The checkpoint engine: torch and nothing else.

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
from resiliency.checkpoint.leaves import Placement, ShardedView, register_sharded_type
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
    "Outcome",
    "Placement",
    "RankArena",
    "Restore",
    "Shard",
    "ShardedView",
    "StateLayout",
    "StateWalker",
    "TensorEntry",
    "TensorView",
    "WhenFull",
    "clean_up",
    "job_directory",
    "materialize",
    "open_captured",
    "register_sharded_type",
    "restore_into",
]
