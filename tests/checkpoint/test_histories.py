# SPDX-License-Identifier: Apache-2.0
"""Generated histories of jobs: saves, starts, rollbacks, kills, hangs and errors at any operation.

What must hold is in `tests.checkpoint.history_model`.  More than the check has time for:

    RESILIENCY_EXAMPLES=10000 python -m pytest tests/checkpoint/test_histories.py -k many
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from resiliency.checkpoint.storage.interface import read_file
from resiliency.errors import CheckpointMissing
from resiliency.testing.storage import MemoryStorage
from tests.checkpoint.histories import History, play

EXAMPLES = int(os.environ.get("RESILIENCY_EXAMPLES", "0"))
FEW = 100
#: Histories that once found something, and what.
FOUND = {
    96: "a follower that is quicker than its leader fails the save of a step that was left",
    457: "a save that was under way at a rollback deletes the step that the job went back to",
    520: "retention of a local tier deletes what was left before anything has replaced it",
    1741: "a removal that was overtaken removes the folder of the save that overtook it",
    2499: "what another program removes just then fails the save of a step that was left",
    3048: "what another program removes just then passes for a checkpoint of unknown origin",
    6564: "a removal of another program that ends just then fails a save",
    6649: "a leader that was late removes the folder of a save that is committed",
    7894: "another program removes the folder of a save in flight",
}


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    """Thousands of lines are logged, and read by nobody."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("seed", FOUND)
def test_histories_that_once_lost_a_checkpoint_or_a_save_keep_it(seed: int) -> None:
    play(seed)


def test_in_a_hundred_generated_histories_what_was_committed_stays_and_is_restored(tmp_path: Path) -> None:
    for seed in range(FEW):
        history = play(seed)
        if seed % 10 == 0:
            assert_read_by_torch(history, tmp_path / str(seed))


@pytest.mark.thorough("a hundred of these histories are near")
@pytest.mark.slow
def test_in_many_generated_histories_what_was_committed_stays_and_is_restored(tmp_path: Path) -> None:
    for seed in range(FEW, FEW + (EXAMPLES or 1500)):
        history = play(seed)
        if seed % 50 == 0:
            assert_read_by_torch(history, tmp_path / str(seed))


def test_a_history_is_the_same_whenever_its_seed_is() -> None:
    first, second = play(5), play(5)
    assert first.scheduler.operations > 100
    assert first.scheduler.told() == second.scheduler.told()


def assert_read_by_torch(history: History, directory: Path) -> None:
    """The newest checkpoint of a history, in a directory, loads by torch alone."""
    step, save_id = max(history.model.visible[""].items(), default=(0, ""))
    if not step:
        return
    write_out(history.disks[""], f"step={step}", directory)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is no process group
        found = dcp.FileSystemReader(directory / f"step={step}")
        tensors = {
            key: torch.zeros(entry.size, dtype=entry.properties.dtype)
            for key, entry in found.read_metadata().state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        dcp.load(tensors, storage_reader=found, no_dist=True)
    content = history.model.saves[save_id].content
    assert len(tensors) == len(history.hosts)
    starts = sorted(int(tensor[0]) for tensor in tensors.values())
    assert starts == [1000 * content + 10 * rank for rank in range(len(history.hosts))]


def write_out(storage: MemoryStorage, name: str, directory: Path) -> None:
    """Copy a directory of a storage to a disk."""
    (directory / name).mkdir(parents=True)
    for inner in storage.list(name):
        path = f"{name}/{inner}"
        if storage.list(path):
            write_out(storage, path, directory)
        else:
            with suppress(CheckpointMissing):  # a folder that a late process has left empty
                (directory / path).write_bytes(read_file(storage, path))
