# SPDX-License-Identifier: Apache-2.0
"""The checkpoint engine: torch and nothing else.

`Checkpointer` is what a training loop uses; the rest is what it is made of.

Capture side: `Capturer` copies a state into the slots of a `RankArena`, shared memory that outlives
the process; `open_captured` finds it there after a restart, `restore_into` and `materialize` bring
it back.

`DcpStorageWriter` and `DcpStorageReader` give programs that call `torch.distributed.checkpoint`
themselves the same commits and checksums.
"""

from resiliency.checkpoint.capture.arena import (
    CapturedSlot,
    RankArena,
    open_captured,
)
from resiliency.checkpoint.capture.capturer import (
    Capture,
    CaptureOptions,
    Capturer,
    CaptureStats,
    Outcome,
    WhenFull,
)
from resiliency.checkpoint.capture.job_memory import clean_up, job_directory
from resiliency.checkpoint.checkpointer import Checkpointer
from resiliency.checkpoint.names import TierName
from resiliency.checkpoint.recovery.inventory import Inventory
from resiliency.checkpoint.recovery.restore import Restored
from resiliency.checkpoint.recovery.sources import Source, Tier
from resiliency.checkpoint.state.fill import Restore, materialize, plan_restore, restore_into
from resiliency.checkpoint.state.layout import Shard, StateLayout, TensorEntry, TensorView
from resiliency.checkpoint.state.snapshot import StateWalker
from resiliency.checkpoint.state.tensors import Placement, ShardedView, register_sharded_type
from resiliency.checkpoint.state.values import ANY_CLASS
from resiliency.checkpoint.stop.termination import Terminated, Termination, TerminationOptions
from resiliency.checkpoint.torch_dcp import DcpStorageReader, DcpStorageWriter
from resiliency.checkpoint.trainer.handles import SaveHandle, SaveRecord, SaveState
from resiliency.checkpoint.trainer.options import CheckpointerOptions, LocalTier
from resiliency.checkpoint.trainer.tier_policy import Interval

__all__ = [
    "ANY_CLASS",
    "Capture",
    "CaptureOptions",
    "CaptureStats",
    "CapturedSlot",
    "Capturer",
    "Checkpointer",
    "CheckpointerOptions",
    "DcpStorageReader",
    "DcpStorageWriter",
    "Interval",
    "Inventory",
    "LocalTier",
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
    "Source",
    "StateLayout",
    "StateWalker",
    "TensorEntry",
    "TensorView",
    "Terminated",
    "Termination",
    "TerminationOptions",
    "Tier",
    "TierName",
    "WhenFull",
    "clean_up",
    "job_directory",
    "materialize",
    "open_captured",
    "plan_restore",
    "register_sharded_type",
    "restore_into",
]
