# SPDX-License-Identifier: Apache-2.0
"""Checks of two tiers side by side: who saves what at which step, and what a start finds."""

from __future__ import annotations

import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.callbacks.checks import Run, check, connector, logged_by, refusal
from tests.waiting import wait_until


def at_leisure() -> Any:
    """Steps that take as long as storage needs: no save is skipped."""
    from lightning.pytorch.callbacks import Callback

    from resiliency.plugins.persistent_ckpt_proc import process_of

    class Waiting(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            process_of(trainer).wait()

    return Waiting()


class TwoTiers(Run):
    """A training whose checkpoint process writes a local tier, and a persistent one if asked for."""

    def process(
        self,
        *,
        both: bool = True,
        memory: str = "memory",
        hand_off: Any = None,
        every: Any = None,
        every_local: Any = None,
    ) -> Any:
        from resiliency.checkpoint.trainer.options import CheckpointerOptions, LocalTier
        from resiliency.plugins.in_cluster_local_ckpt import InClusterLocalCheckpointIO
        from resiliency.plugins.min_ckpt_overhead import MinCkptOverheadCheckpointIO

        class WholeState(MinCkptOverheadCheckpointIO):
            """Captures what Lightning dumps: there is no Megatron here."""

            def preview(self, strategy: Any) -> dict[str, Any]:
                return {"weights": dict(strategy.model.state_dict())}

            def try_reuse(self, strategy: Any, checkpoint: dict[str, Any]) -> dict[str, Any]:
                return {"weights": dict(strategy.model.state_dict()), "step": checkpoint["global_step"]}

        (self.directory / memory).mkdir(exist_ok=True)
        return InClusterLocalCheckpointIO(
            WholeState(),
            LocalTier(
                directory=self.directory / "local",
                every=every_local,
                keep=10,
                replicas=int(hand_off is None),
            ),
            persistent_directory=self.directory / "persistent" if both else None,
            every=every,
            hand_off=hand_off,
            events=self.events,
            options=CheckpointerOptions(arena_root=self.directory / memory),
        )

    def train_with(self, io: Any, steps: int, *callbacks: object) -> Any:
        from lightning.pytorch.strategies import SingleDeviceStrategy

        class WithoutMegatron(SingleDeviceStrategy):
            async_save = False

            @property
            def megatron_parallel(self) -> Any:
                return self.model

        strategy = WithoutMegatron(device="cpu", checkpoint_io=io)
        return self.train(steps, at_leisure(), *callbacks, strategy=strategy)

    def saved(self, tier: str) -> list[int | None]:
        return self.steps_of("checkpoint_saved", tier)


@check
def an_interval_is_given_to_the_callback_or_to_the_process_and_not_to_both_or_none(directory: Path) -> None:
    from lightning.pytorch import Trainer

    from resiliency.checkpoint import Interval

    run = TwoTiers(directory)

    def start(interval_steps: int | None, **intervals: Any) -> None:
        tier, io = run.tier(interval_steps, "local"), run.process(both=False, **intervals)
        trainer = Trainer(
            accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=[tier], plugins=[io]
        )
        tier.setup(trainer, trainer.lightning_module, stage="fit")

    seldom = Interval(mtbf_s=3600)
    assert "the interval of the local tier, and both were" in refusal(lambda: start(5, every_local=seldom))
    assert "the interval of the local tier, and none was" in refusal(lambda: start(None))
    assert "found without a directory" in refusal(lambda: start(5, every=seldom))
    start(5)
    start(None, every_local=seldom)


@check
def the_url_of_an_object_store_is_refused_by_callback_connector_and_process(directory: Path) -> None:
    from resiliency.callbacks.model_checkpoint import ModelCheckpoint
    from resiliency.plugins.dist_ckpt import VerifiedCheckpointIO
    from resiliency.plugins.min_ckpt_overhead import MinCkptOverheadCheckpointIO
    from resiliency.plugins.persistent_ckpt_proc import PersistentCheckpointProcessIO

    url = "s3://bucket/run"
    inner = MinCkptOverheadCheckpointIO()
    for make in (
        lambda: ModelCheckpoint(url, 10),
        lambda: connector(persistent_ckpt_dir=url),
        lambda: PersistentCheckpointProcessIO(inner, url),
        lambda: VerifiedCheckpointIO().save_checkpoint({"global_step": 1}, f"{url}/step=1"),
    ):
        assert "found the URL 's3:" in refusal(make)


@check
def an_interval_of_the_process_makes_its_tier_due_beside_one_in_steps(directory: Path) -> None:
    from resiliency.checkpoint import Interval

    run = TwoTiers(directory)
    soon = Interval(seconds=1e-9)  # whatever a step takes, that is every step
    run.train_with(run.process(every_local=soon), 9, run.tier(None, "local"), run.tier(4, priority=1))
    # Nothing is known of the time of a step before the second.
    saved = sorted(set(run.saved("local")))
    # Nor does the end wait until the last step is complete in the local tier: the persistent one has it.
    assert saved in ([2, 3, 4, 5, 6, 7, 8], [2, 3, 4, 5, 6, 7, 8, 9])
    assert sorted(set(run.saved("persistent"))) == [4, 8, 9]
    assert run.steps_of("save_started") == [4, 8, 9]


@check
def one_copy_serves_all_tiers_that_are_due_and_the_last_step_goes_into_each(directory: Path) -> None:
    run = TwoTiers(directory)
    run.train_with(run.process(), 9, run.tier(2, "local"), run.tier(4, priority=1))
    assert run.steps_of("save_started", "local") == [2, 6]
    assert run.steps_of("save_started") == [4, 8, 9]
    assert sorted(set(run.saved("local"))) == [2, 4, 6, 8, 9]
    assert sorted(set(run.saved("persistent"))) == [4, 8, 9]
    assert run.names() == ["step=4", "step=8", "step=9"]
    assert {"step=8", "step=9"} <= set(run.names("local"))


@check
def what_saves_cost_is_told_in_a_callback_and_logged_at_the_end(directory: Path) -> None:
    from lightning.pytorch.callbacks import Callback

    from resiliency.checkpoint.names import TierName
    from resiliency.plugins.persistent_ckpt_proc import process_of

    class Asking(Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 16:  # whose save told the cost of that of step 8
                advised.append(process_of(trainer).advice(TierName.LOCAL, mtbf_s=3600).text)

    advised: list[str] = []
    run = TwoTiers(directory)
    io = run.process(both=False)
    with logged_by("resiliency.checkpoint.trainer.saver") as lines:
        run.train_with(io, 17, Asking(), run.tier(8, "local"))
    assert [text.partition(" every ")[0] for text in advised] == ["local: save"]
    assert [line.partition(" s (")[2].partition(",")[0] for line in lines] == ["median of 2)"]
    text = refusal(lambda: io.advice(TierName.LOCAL, mtbf_s=3600))
    assert "no interval can be advised where no training runs" in text


@check
def the_memory_for_saves_is_there_before_the_first_of_them(directory: Path) -> None:
    from lightning.pytorch.callbacks import Callback

    run = TwoTiers(directory)
    allocated: dict[int, list[bool]] = {}

    class Looking(Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 1:  # another thread makes it
                wait_until(lambda: sizes() == [True] * 3, "no memory after the first step")
            allocated[trainer.global_step] = sizes()

    def sizes() -> list[bool]:
        slots = (directory / "memory").glob("resiliency-*/rank-0/slot-*")
        return [slot.stat().st_size > 0 for slot in slots]

    run.train_with(run.process(), 3, Looking(), run.tier(3, "local"), run.tier(3, priority=1))
    assert run.steps_of("save_started") == [3]
    # Of a fresh optimizer nothing is known before its first step.
    assert allocated == {0: [], 1: [True] * 3, 2: [True] * 3}


@check
def nemo_may_save_one_tier_and_the_process_the_other(directory: Path) -> None:
    from lightning.pytorch.plugins import TorchCheckpointIO

    from resiliency.plugins.in_cluster_local_ckpt import SplitCheckpointIO

    class DirectoryIO(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            Path(str(path).removesuffix(".ckpt")).mkdir()

    run = TwoTiers(directory)
    io = SplitCheckpointIO(DirectoryIO(), run.process(both=False))
    run.train_with(io, 11, run.tier(2, "local"), run.tier(4, priority=1))
    assert sorted(set(run.saved("local"))) == [2, 6, 10]
    assert sorted(set(run.saved("persistent"))) == [4, 8, 11]
    assert run.names() == ["step=11", "step=4", "step=8"]
    assert {"step=10", "step=6"} <= set(run.names("local"))
    text = refusal(lambda: SplitCheckpointIO(DirectoryIO(), run.process()))
    assert "the process alone serves both tiers" in text


@check
def recipes_make_both_tiers_by_the_arguments_that_they_know(directory: Path) -> None:
    from nemo.utils.callbacks.dist_ckpt_io import AsyncFinalizableCheckpointIO

    from resiliency.checkpoint.names import TierName
    from resiliency.plugins.combined_functionality import CombinedCheckpointIO

    io = CombinedCheckpointIO(
        save_ckpt_format="torch_dist",
        load_directly_on_device=True,
        async_save=True,
        torch_dist_multiproc=2,
        assume_constant_structure=True,
        persistent_parallel_save=True,
        persistent_parallel_save_within_dp=False,
        persistent_parallel_load=True,
        local_parallel_save=False,
        local_parallel_save_within_dp=False,
        local_parallel_load=False,
        use_ckpt_load_replication=True,
        local_ckpt_dir=directory / "local",
    )
    persistent, captured = io.persistent, io.process.checkpoint_io
    assert (persistent.async_save, persistent.torch_dist_multiproc) == (True, 2)
    assert (persistent.parallel_save, captured.parallel_save) == (True, False)
    assert (persistent.parallel_load, captured.parallel_load) == (True, False)
    assert io.process.directories == {TierName.LOCAL: directory / "local"}
    AsyncFinalizableCheckpointIO(io)  # refuses what it cannot finish


@check
def a_start_finds_what_only_the_host_holds(directory: Path) -> None:
    run = TwoTiers(directory)
    run.train_with(run.process(), 6, run.tier(2, "local"), run.tier(4, priority=1))
    shutil.rmtree(directory / "persistent" / "step=6")
    io = run.process(memory="other-memory")
    try:
        found = connector(persistent_ckpt_dir=directory / "persistent", plugins=[io])._newest_usable()
        assert found == directory / "persistent" / "step=6"
        assert {step: tier.value for step, tier in io.restores.captured().items()} == {
            6: "local",
            4: "local",
            2: "local",
        }
    finally:
        io.finish()
        io.teardown()


@check
def a_local_tier_of_several_hosts_that_nobody_writes_is_refused(directory: Path) -> None:
    from lightning.pytorch import Trainer

    tier = Run(directory).tier(2, "local")
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=[tier])
    trainer.strategy.num_nodes = 2
    text = refusal(lambda: tier.setup(trainer, trainer.lightning_module, stage="fit"))
    assert "no checkpoint process writes there" in text
    assert "InClusterLocalCheckpointIO" in text


@check
def complete_steps_are_handed_over_and_the_newest_comes_back_at_the_next_start(directory: Path) -> None:
    from resiliency.checkpoint.gke.replicated_job import ReplicatedJob
    from resiliency.plugins.hand_off import HandOff
    from resiliency.testing.replicator import start_replicator

    run = TwoTiers(directory)
    volume, bucket = directory / "local", directory / "bucket"
    for path in (volume, bucket):
        path.mkdir()

    def hand_off(volume: Path = volume) -> HandOff:
        job = ReplicatedJob(directory=volume, job_name="checks", node_rank=0, nodes=1)
        return HandOff(job, is_first=True, timeout=timedelta(seconds=60))

    with start_replicator(volume, store=bucket) as replicator:
        io = run.process(both=False, hand_off=hand_off())
        run.train_with(io, 6, run.tier(2, "local"))
        for step in (2, 4, 6):
            replicator.wait_for_line(f"kept {step}$", timeout=60)
    with start_replicator(volume, store=bucket) as replicator:
        io = run.process(both=False, memory="new", hand_off=hand_off())
        try:
            assert {step: tier.value for step, tier in io.restores.captured().items()} == {6: "local"}
            replicator.wait_for_line("restored 6$", timeout=60)
        finally:
            io.finish()
            io.teardown()
    text = refusal(lambda: run.process(hand_off=hand_off(directory)))
    assert f"cannot be handed over in {directory}" in text
