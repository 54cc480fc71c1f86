# SPDX-License-Identifier: Apache-2.0
"""What the log of a training says of its saves and restores."""

from __future__ import annotations

from pathlib import Path

from resiliency.checkpoint.format.catalog import Condition, list_checkpoints
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.events import EventType
from tests.nemo.conftest import (
    Job,
)


def restored_from(job: Job) -> list[tuple[int | None, object]]:
    """(step, tier) of each start of rank 0; (0, None) is from scratch."""
    loaded = [e for e in job.events(EventType.CHECKPOINT_LOADED) if e.rank == 0]
    return [(event.step, event.fields.get("tier")) for event in loaded]


def complete(directory: Path) -> list[int]:
    """Steps whose checkpoint is committed, every file in full length."""
    found = list_checkpoints(LocalStorage(directory))
    return [checkpoint.step for checkpoint in found if checkpoint.condition is Condition.COMPLETE]
