# SPDX-License-Identifier: Apache-2.0
"""Checks of the callbacks and the connector in a real Lightning loop, without Megatron.

NeMo takes seconds to import, warns while it does, and starts threads; so one process imports it
once, runs every check, and prints a verdict for each: ``python -m tests.callbacks DIRECTORY``.
`test_callbacks.py` makes a test of each verdict.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

Check = Callable[[Path], None]
#: Name of the check, a sentence -> the check.
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def refusal(make: Callable[[], object]) -> str:
    """Text of the ConfigError that `make` must raise."""
    from resiliency.errors import ConfigError

    with pytest.raises(ConfigError) as caught:
        make()
    return str(caught.value)


@contextmanager
def logged_by(name: str) -> Iterator[list[str]]:
    """What the logger `name` says in this block, a text each, from INFO on."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger(name)
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        log.removeHandler(handler)


class Run:
    """One short training of a real Lightning trainer, with its events and its checkpoints."""

    def __init__(self, directory: Path) -> None:
        from resiliency.events import EventStream
        from resiliency.runtime import RunInfo
        from resiliency.testing import MemorySink

        self.directory = directory
        self.sink = MemorySink()
        self.events = EventStream(RunInfo(job_name="checks", rank=0), [self.sink])
        #: Names in the checkpoint directory at each moment at which the trainer writes.
        self.seen_while_writing: list[list[str]] = []
        self.validated_at: list[int] = []
        self.fail_at: int | None = None
        #: Makes the loader of training; None: one without workers.
        self.loader: Callable[[], Any] | None = None

    def tier(self, interval: int | None, name: str = "persistent", **options: Any) -> Any:
        from resiliency.callbacks.model_checkpoint import ModelCheckpoint, Tier

        return ModelCheckpoint(
            self.directory / name, interval, tier=Tier(name), events=self.events, **options
        )

    def train(self, steps: int, *callbacks: object, logger: object = False, **options: object) -> Any:
        """Train `steps` steps of a model with one weight."""
        import torch
        from lightning.pytorch import LightningModule, Trainer
        from lightning.pytorch.callbacks import Checkpoint
        from lightning.pytorch.plugins import TorchCheckpointIO

        from resiliency.errors import CheckpointWriteFailed

        run = self

        class OneWeight(LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.layer = torch.nn.Linear(1, 1)

            def training_step(self, batch: torch.Tensor) -> torch.Tensor:
                loss = self.layer(batch).square().mean()
                self.log("reduced_train_loss", loss)
                return loss

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.SGD(self.parameters(), lr=0.1)

            def train_dataloader(self) -> Any:
                return (run.loader or (lambda: torch.utils.data.DataLoader(torch.ones(1000, 1))))()

            def validation_step(self, batch: torch.Tensor) -> None:
                run.validated_at.append(self.trainer.global_step)

            def val_dataloader(self) -> Any:
                return torch.utils.data.DataLoader(torch.ones(1, 1))

        class DirectoryIO(TorchCheckpointIO):
            """One directory for each checkpoint, as Megatron's IO writes it."""

            def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
                directory = Path(str(path).removesuffix(".ckpt"))
                run.seen_while_writing.append(sorted(p.name for p in directory.parent.iterdir()))
                directory.mkdir()
                (directory / "state").write_bytes(b"half")
                if checkpoint["global_step"] == run.fail_at:
                    raise CheckpointWriteFailed("storage is full.", step=run.fail_at)
                torch.save(checkpoint["state_dict"], directory / "state")

        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=steps,
            logger=logger,
            callbacks=list(callbacks),
            plugins=[] if "strategy" in options else [DirectoryIO()],
            enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
            default_root_dir=str(self.directory),
            enable_progress_bar=False,
            enable_model_summary=False,
            log_every_n_steps=1,
            **{"limit_val_batches": 0, **options},
        )
        trainer.fit(OneWeight())
        return trainer

    def names(self, tier: str = "persistent") -> list[str]:
        return sorted(path.name for path in (self.directory / tier).iterdir())

    def steps_of(self, type: str, tier: str = "persistent") -> list[int | None]:
        from resiliency.events import EventType

        return [e.step for e in self.sink.of_type(EventType(type)) if e.fields.get("tier") == tier]


@check
def a_tier_refuses_an_interval_or_a_number_to_keep_that_would_save_nothing(directory: Path) -> None:
    from resiliency.callbacks.model_checkpoint import ModelCheckpoint

    for interval in (0, -1):
        assert f"at least 1 step, found {interval}" in refusal(lambda i=interval: ModelCheckpoint("d", i))
    for keep in (0, -2):
        text = refusal(lambda k=keep: ModelCheckpoint("d", 1, keep=k))
        assert f"keep at least 1 checkpoint (or -1 for all), found {keep}" in text


@check
def a_tier_keeps_no_state_because_the_directory_is_the_memory(directory: Path) -> None:
    run = Run(directory)
    local, persistent = run.tier(1, "local"), run.tier(1)
    assert local.state_dict() == persistent.state_dict() == {}
    assert local.state_key != persistent.state_key
    local.load_state_dict({"best_model_path": "elsewhere"})
    assert local.best_model_path == ""


@check
def it_saves_every_interval_and_once_more_at_the_end(directory: Path) -> None:
    run = Run(directory)
    run.train(10, run.tier(4))
    assert run.names() == ["step=10", "step=4", "step=8"]
    for kind in ("save_started", "save_released", "checkpoint_saved"):
        assert run.steps_of(kind) == [4, 8, 10], kind


@check
def a_last_step_that_is_saved_already_is_not_saved_again(directory: Path) -> None:
    run = Run(directory)
    run.train(8, run.tier(4))
    assert run.steps_of("save_started") == [4, 8]


@check
def the_marker_stands_while_a_checkpoint_is_written_and_the_old_one_beside_it(directory: Path) -> None:
    run = Run(directory)
    run.train(6, run.tier(2, keep=1))
    assert run.seen_while_writing == [
        ["step=2-unfinished"],
        ["step=2", "step=4-unfinished"],
        ["step=4", "step=6-unfinished"],
    ]
    assert run.names() == ["step=6"]


@check
def only_the_newest_are_kept(directory: Path) -> None:
    run = Run(directory)
    run.train(12, run.tier(1, keep=3))
    assert run.names() == ["step=10", "step=11", "step=12"]


@check
def of_two_tiers_that_are_due_the_one_with_the_higher_priority_saves(directory: Path) -> None:
    run = Run(directory)
    run.train(11, run.tier(2, "local"), run.tier(4, priority=1))
    assert run.steps_of("save_started", "local") == [2, 6, 10]
    assert run.steps_of("save_started") == [4, 8, 11]


@check
def a_save_that_fails_deletes_nothing_and_is_recorded(directory: Path) -> None:
    from resiliency.checkpoint.format.catalog import unmarked_checkpoints
    from resiliency.errors import CheckpointWriteFailed

    run = Run(directory)
    run.fail_at = 4
    with pytest.raises(CheckpointWriteFailed):
        run.train(10, run.tier(2, keep=1))
    assert unmarked_checkpoints(directory / "persistent") == [directory / "persistent" / "step=2"]
    assert run.names() == ["step=2", "step=4", "step=4-unfinished"]
    assert run.steps_of("save_failed") == [4]
    assert run.steps_of("checkpoint_saved") == [2]


@check
def what_an_unfinished_save_left_is_replaced_at_the_same_step(directory: Path) -> None:
    run = Run(directory)
    left = directory / "persistent" / "step=4"
    left.mkdir(parents=True)
    (left / "torn").touch()
    (directory / "persistent" / "step=4-unfinished").touch()
    run.train(4, run.tier(4))
    assert run.names() == ["step=4"]
    assert [path.name for path in left.iterdir()] == ["state"]


def with_steps(directory: Path, *steps: int) -> Path:
    root = directory / "persistent"
    for step in steps:
        (root / f"step={step}").mkdir(parents=True)
        (root / f"step={step}" / "state").touch()
    return root


@check
def a_kill_while_an_old_checkpoint_is_deleted_leaves_it_marked_and_the_newer_ones_whole(
    directory: Path,
) -> None:
    from resiliency.checkpoint.format.catalog import unmarked_checkpoints

    root = with_steps(directory, 1, 2, 3)
    tier = Run(directory).tier(1, keep=2)
    child = os.fork()
    if child == 0:  # dies in the middle of the deletion, as under SIGKILL from outside
        shutil.rmtree = lambda path: os.kill(os.getpid(), signal.SIGKILL)
        tier._prune(root)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert unmarked_checkpoints(root) == [root / "step=3", root / "step=2"]
    assert (root / "step=1-unfinished").exists()


@check
def what_this_training_commits_is_newer_than_higher_steps_of_one_before(directory: Path) -> None:
    with_steps(directory, 6, 8)
    run = Run(directory)
    run.train(4, run.tier(2, keep=2))
    assert run.names() == ["step=2", "step=4"]
    assert run.steps_of("checkpoint_saved") == [2, 4]


@check
def a_complete_checkpoint_of_an_earlier_training_is_not_replaced(directory: Path) -> None:
    from resiliency.errors import CheckpointWriteFailed

    before = with_steps(directory, 4) / "step=4" / "state"
    before.write_bytes(b"of an earlier training")
    run = Run(directory)
    run.train(6, run.tier(2))
    assert run.names() == ["step=2", "step=4", "step=6"]
    assert (run.steps_of("checkpoint_saved"), run.steps_of("save_failed")) == ([2, 6], [4])
    with pytest.raises(
        CheckpointWriteFailed, match="step=6 is a checkpoint of an earlier training: it stays"
    ):
        Run(directory).train(6, run.tier(6))
    assert before.read_bytes() == b"of an earlier training"
    assert run.names() == ["step=2", "step=4", "step=6"]


@check
def a_training_that_goes_back_saves_over_the_checkpoints_that_it_left_and_is_what_a_resume_takes(
    directory: Path,
) -> None:
    from resiliency.checkpoint.branches import read_branches
    from resiliency.checkpoint.format.catalog import unmarked_checkpoints
    from resiliency.checkpoint.format.manifest import Manifest, write_manifest
    from resiliency.checkpoint.storage.posix import LocalStorage

    root = with_steps(directory, 2, 4, 8, 10)
    for step in (2, 4, 8, 10):
        manifest = Manifest(step=step, run_id="", save_id="of-before", world_size=1, format="nemo", ranks={})
        write_manifest(LocalStorage(root), f"step={step}", manifest)
    run = Run(directory)
    run.train(4, run.tier(2, keep=3))
    assert (run.steps_of("checkpoint_saved"), run.steps_of("save_failed")) == ([2, 4], [])
    assert (root / "step=10").exists()
    assert unmarked_checkpoints(root) == [root / "step=4", root / "step=2"]
    assert read_branches(LocalStorage(root)).newest == 1


@check
def an_old_checkpoint_stays_while_somebody_reads_it(directory: Path) -> None:
    from resiliency.checkpoint.format.lease import Lease
    from resiliency.checkpoint.storage.posix import LocalStorage

    root = with_steps(directory, 1, 2, 3)
    tier = Run(directory).tier(1, keep=2)
    with Lease(LocalStorage(root), 1):
        tier._prune(root)
        assert (root / "step=1" / "state").exists()
    tier._prune(root)
    assert sorted(path.name for path in root.iterdir()) == ["step=2", "step=3"]


@check
def traces_are_written_around_the_interval_and_at_the_end(directory: Path) -> None:
    from resiliency.callbacks.profile import ProfileCheckpointCallback

    assert "every 2 steps overlaps" in refusal(lambda: ProfileCheckpointCallback("d", interval_steps=2))
    Run(directory).train(8, ProfileCheckpointCallback(directory / "p", interval_steps=4, trace_name="t"))
    names = sorted(path.name for path in (directory / "p").iterdir())
    assert names == ["t-rank0-step4.json", "t-rank0-step8.json"]
    for name in names:
        assert json.loads((directory / "p" / name).read_text())["traceEvents"]


@check
def step_times_reach_the_log_and_every_logger(directory: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    from resiliency.callbacks.logging import StepLoggingCallback, peak_memory_bytes

    assert "at least 1, found 0" in refusal(lambda: StepLoggingCallback(tokens_per_step=1, interval_steps=0))
    sink = CSVLogger(directory, name="csv", version="")
    callback = StepLoggingCallback(tokens_per_step=100, interval_steps=2)
    with logged_by("resiliency.callbacks.logging") as lines:
        trainer = Run(directory).train(6, callback, logger=sink)
    assert [line.split()[1] for line in lines[:-1]] == ["2/6", "4/6", "6/6"]
    assert "over 3 logged steps" in lines[-1]
    header, *rows = Path(sink.experiment.metrics_file_path).read_text().splitlines()
    assert {"step_time_s", "tokens_per_s", "peak_memory_bytes"} <= set(header.split(","))
    assert rows
    assert trainer.global_step == 6
    assert 2**20 < peak_memory_bytes() < 2**40


@check
def scalars_reach_tensorboard_and_steps_done_again_replace_those_before(directory: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from resiliency.callbacks.logging import StepLoggingCallback, TPSLoggingCallback

    assert "found 0 and 8" in refusal(lambda: TPSLoggingCallback(0, 8))
    assert "unknown enabled" in refusal(lambda: StepLoggingCallback(timer_kwargs={"enabled": True}))
    steps = StepLoggingCallback(directory / "tb", {"sync_cuda": True})
    rate = TPSLoggingCallback(gbs=2, seq_length=8, tb_dir=directory / "tb-tps")
    with logged_by("resiliency.callbacks.logging") as lines:
        Run(directory).train(3, steps, rate)
    assert not any("tokens/s" in line for line in lines if line.startswith("step 1/"))
    assert sum(" tokens/s" in line for line in lines) == 3
    again = TPSLoggingCallback(gbs=4, seq_length=8, tb_dir=directory / "tb-tps")
    Run(directory).train(2, again)
    for name, tag, count in (("tb", "train/step_time_s", 3), ("tb-tps", "train/tokens_per_s", 2)):
        files = EventAccumulator(str(directory / name))
        files.Reload()
        values = files.Scalars(tag)
        assert [value.step for value in values] == list(range(1, count + 1))
        assert all(value.value > 0 for value in values)


@check
def memory_is_logged_before_training_and_after_the_first_step(directory: Path) -> None:
    from resiliency.callbacks.logging import MemoryLoggingCallback

    with logged_by("resiliency.callbacks.logging") as lines:
        Run(directory).train(3, MemoryLoggingCallback())
    before, after = lines
    assert before.startswith("memory before training: host ")
    assert after.startswith("memory after step 1: host ")
    assert "parameters 0.00 GiB on cpu" in before


@check
def the_life_of_a_rank_is_recorded_in_order(directory: Path) -> None:
    from resiliency.callbacks.run_events import RunEventsCallback

    run = Run(directory)
    run.train(4, RunEventsCallback(run.events, loss_interval_steps=2))
    kinds = [(e.type.value, e.step) for e in run.sink.events]
    assert kinds == [
        ("initialized", 0),
        ("step_started", 0),
        *(("step_finished", step) for step in (1, 2, 3, 4)),
        ("rank_finished", 4),
    ]
    losses = [e.fields.get("loss") for e in run.sink.events if e.type.value == "step_finished"]
    assert [isinstance(loss, float) for loss in losses] == [False, True, False, True]


@check
def overlap_without_a_cuda_device_is_refused_by_the_name_of_its_flag(directory: Path) -> None:
    import torch

    from resiliency.callbacks.comm_overlap import comm_overlap_callback
    from resiliency.model import ParallelLayout

    if torch.cuda.is_available():
        assert comm_overlap_callback(ParallelLayout(tensor=2)).user_comm_overlap_cfg.tp_comm_overlap
    else:
        assert "--enable-comm-overlap" in refusal(lambda: comm_overlap_callback(ParallelLayout()))


def connector(plugins: list[Any] | None = None, **options: Any) -> Any:
    from lightning.pytorch import Trainer

    from resiliency.connectors.checkpoint_connector import CheckpointConnector

    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        plugins=plugins,
    )
    return CheckpointConnector(trainer, **options)


def sealed(root: Path, step: int) -> Path:
    from resiliency.checkpoint.format import nemo

    directory = root / f"step={step}"
    (directory / nemo.WEIGHTS).mkdir(parents=True)
    (directory / nemo.WEIGHTS / "common.pt").write_bytes(b"state")
    nemo.seal(directory, step=step, world_size=1)
    return directory


@check
def a_connector_without_a_directory_or_without_attempts_is_refused(directory: Path) -> None:
    assert "needs persistent_ckpt_dir, local_ckpt_dir or both" in refusal(connector)
    text = refusal(lambda: connector(persistent_ckpt_dir=directory, max_attempts=0))
    assert "at least 1, found 0" in text


@check
def the_newest_of_both_tiers_is_taken_and_at_equal_steps_the_local_one(directory: Path) -> None:
    local, persistent = directory / "local", directory / "persistent"
    for root, step in ((persistent, 9), (persistent, 10), (local, 10)):
        sealed(root, step)
    both = connector(persistent_ckpt_dir=persistent, local_ckpt_dir=local)
    assert both._newest_usable() == local / "step=10"
    newer = sealed(persistent, 100)
    assert both._newest_usable() == newer
    assert connector(persistent_ckpt_dir=directory / "none")._newest_usable() is None


@check
def a_damaged_checkpoint_is_marked_and_the_one_before_it_is_taken(directory: Path) -> None:
    from resiliency.checkpoint.format import nemo

    old, new = sealed(directory, 1), sealed(directory, 2)
    (new / nemo.WEIGHTS / "common.pt").write_bytes(b"statf")
    assert connector(persistent_ckpt_dir=directory)._newest_usable() == old
    assert (directory / "step=2-unfinished").exists()
    assert not (directory / "step=1-unfinished").exists()


@check
def when_the_attempts_are_used_up_it_raises_and_never_starts_over(directory: Path) -> None:
    from resiliency.checkpoint.format import nemo
    from resiliency.checkpoint.format.catalog import unmarked_checkpoints
    from resiliency.errors import CheckpointCorrupt

    for step in (1, 2, 3):
        (sealed(directory, step) / nemo.WEIGHTS / "common.pt").unlink()
    with pytest.raises(CheckpointCorrupt, match=r"3 checkpoints.*none of the newest 2 is usable"):
        connector(persistent_ckpt_dir=directory, max_attempts=2)._newest_usable()
    # What was not tried is not condemned.
    assert [path.name for path in unmarked_checkpoints(directory)] == ["step=1"]
    # A launcher starts again by itself, also when all are hidden.
    with pytest.raises(CheckpointCorrupt, match="none of the newest 1 is usable"):
        connector(persistent_ckpt_dir=directory)._newest_usable()
    with pytest.raises(CheckpointCorrupt, match=r"there were some: .*step=1: corrupt: .*step=3: corrupt: "):
        connector(persistent_ckpt_dir=directory)._newest_usable()
