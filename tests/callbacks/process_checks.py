# SPDX-License-Identifier: Apache-2.0
"""Checks of what a checkpoint process and the callback beside it refuse, and of two kinds of checkpoint
in one directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.callbacks.checks import check, connector, refusal, sealed
from tests.checkpoint.storage_builders import file_in


def process(directory: Path, **options: Any) -> Any:
    from resiliency.plugins.min_ckpt_overhead import MinCkptOverheadCheckpointIO
    from resiliency.plugins.persistent_ckpt_proc import PersistentCheckpointProcessIO

    return PersistentCheckpointProcessIO(MinCkptOverheadCheckpointIO(), directory, **options)


def setup(directory: Path, *, other: Path | None = None, keep: int = -1, nemos_async: bool = False) -> None:
    """What a trainer does at its start with a process for `directory` and a callback for `other`."""
    from lightning.pytorch import Trainer

    from resiliency.callbacks.model_checkpoint import ModelCheckpoint

    tier = ModelCheckpoint(other or directory, 10, keep=keep)
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        callbacks=[tier],
        plugins=[process(directory)],
    )
    trainer.strategy.async_save = nemos_async
    tier.setup(trainer, trainer.lightning_module, stage="fit")


@check
def a_callback_that_contradicts_the_checkpoint_process_is_refused(directory: Path) -> None:
    text = refusal(lambda: setup(directory, other=directory / "elsewhere"))
    assert f"saves to {directory / 'elsewhere'}, the checkpoint process to {directory}" in text
    assert "Give `keep` to PersistentCheckpointProcessIO alone" in refusal(lambda: setup(directory, keep=3))
    assert "ckpt_async_save=False" in refusal(lambda: setup(directory, nemos_async=True))
    assert "(or -1 for all), found 0" in refusal(lambda: process(directory, keep=0))
    setup(directory)


@check
def a_save_that_is_not_of_its_step_in_its_directory_is_refused(directory: Path) -> None:
    io = process(directory)
    text = refusal(lambda: io.save_checkpoint({"global_step": 4}, directory / "step=5.ckpt"))
    assert f"step 4 was to be saved as {directory / 'step=5.ckpt'}" in text
    assert str(directory / "step=4") in text
    io.teardown()


@check
def a_process_that_was_not_asked_for_anything_starts_nothing(directory: Path) -> None:
    io = process(directory)
    io.fence()
    io.wait()
    io.teardown()
    assert list(directory.iterdir()) == []


def by_the_engine(root: Path, step: int) -> Path:
    """A checkpoint of one rank, committed by the engine."""
    import torch

    from resiliency.checkpoint import Checkpointer, SaveState
    from resiliency.runtime import RunInfo

    with Checkpointer(root, info=RunInfo(job_name="checks", host="here")) as checkpoints:
        handle = checkpoints.save(step, {"weight": torch.arange(100_000.0)})
    assert handle.state is SaveState.COMMITTED, handle.record.why
    return root / f"step={step}"


@check
def checkpoints_of_both_kinds_stand_side_by_side_and_the_newest_good_one_is_taken(directory: Path) -> None:
    from resiliency.checkpoint.format.catalog import Condition, list_checkpoints
    from resiliency.checkpoint.format.marker import MarkerState, try_read_marker
    from resiliency.checkpoint.storage.posix import LocalStorage
    from resiliency.plugins import checkpoint_kinds

    nemos, engines = sealed(directory, 5), by_the_engine(directory, 10)
    assert [checkpoint_kinds.verify(path) for path in (nemos, engines)] == [None, None]
    assert [checkpoint_kinds.saved_ranks(path) for path in (nemos, engines)] == [1, 1]
    storage = LocalStorage(directory)
    assert [f.condition for f in list_checkpoints(storage)] == [Condition.COMPLETE] * 2
    both = connector(persistent_ckpt_dir=directory)
    assert both._newest_usable() == engines
    damaged = file_in(engines, "__0_0.distcp")
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    assert checkpoint_kinds.verify(engines, skim=True) is None  # who reads it will find out
    assert both._newest_usable() == nemos
    marker = try_read_marker(storage, 10)
    assert marker is not None
    assert marker.state is MarkerState.CORRUPT
    assert "__0_0.distcp" in marker.reason


@check
def a_forward_that_may_write_a_large_buffer_does_not_begin_before_the_copy_is_done(directory: Path) -> None:
    import threading
    from types import SimpleNamespace

    import torch

    from resiliency.checkpoint import CaptureOptions, CheckpointerOptions
    from resiliency.plugins.min_ckpt_overhead import MinCkptOverheadCheckpointIO
    from resiliency.plugins.persistent_ckpt_proc import PersistentCheckpointProcessIO, large_buffers

    model = torch.nn.Module()
    model.codes = torch.nn.BatchNorm1d(40_000)
    model.register_buffer("cache", torch.zeros(40_000), persistent=False)
    model.register_buffer("small", torch.zeros(10))
    assert large_buffers(model) == ["codes.running_mean", "codes.running_var"]
    assert large_buffers(torch.nn.Linear(400, 400)) == []

    copied: list[int] = []

    def slowly(number: int) -> None:
        threading.Event().wait(0.2)
        copied.append(number)

    class Prepared(MinCkptOverheadCheckpointIO):
        def try_reuse(self, strategy: Any, checkpoint: dict[str, Any]) -> dict[str, Any]:
            return {"weights": torch.ones(1 << 20)}

    options = CheckpointerOptions(capture=CaptureOptions(threads=1, before_piece=slowly))
    io = PersistentCheckpointProcessIO(Prepared(), directory, options=options)
    io.save(SimpleNamespace(megatron_parallel=model), {"global_step": 1}, directory / "step=1")
    assert copied
    before = len(copied)
    io.fence()
    assert len(copied) == before  # it was fenced already
    io.finish()
    io.teardown()


@check
def copies_of_the_optimizer_that_cannot_be_are_refused_with_those_that_can(directory: Path) -> None:
    from resiliency.plugins.replication_utils import ReplicatedOptimizerMegatronStrategy, check_replicas

    text = refusal(lambda: ReplicatedOptimizerMegatronStrategy(num_distributed_optimizer_instances=1))
    assert "at least 2 copies, found 1" in text
    text = refusal(lambda: check_replicas(3, data_parallel_ranks=4))
    assert "4 data-parallel ranks do not divide into 3 copies of the optimizer" in text
    assert "Choose 2, 4 copies" in text
    assert "Start more data-parallel ranks" in refusal(lambda: check_replicas(2, data_parallel_ranks=1))
    check_replicas(2, data_parallel_ranks=4)
