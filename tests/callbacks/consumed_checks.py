# SPDX-License-Identifier: Apache-2.0
"""Checks of `ConsumedSamplesCallback` with NeMo's samplers and Megatron's calculator, without a model:
`test_consumed_samples.py` runs them.

python -m tests.callbacks.consumed_checks DIRECTORY
"""

from __future__ import annotations

import logging
import sys
import warnings
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.callbacks.checks import CHECKS, check, logged_by, refusal

SAMPLES, GLOBAL_BATCH = 1000, 16
RAMP = [4, 4, 24]


def undisturbed(ramp: list[int] | None, steps: int) -> list[list[int]]:
    """The samples of each step, by Megatron's definition of a ramp-up."""
    found: list[list[int]] = []
    first = 0
    for _ in range(steps):
        size = GLOBAL_BATCH
        if ramp is not None and first <= ramp[2]:
            per_increment = ramp[2] / ((GLOBAL_BATCH - ramp[0]) // ramp[1])
            size = ramp[0] + int(first / per_increment) * ramp[1]
        found.append(list(range(first, first + size)))
        first += size
    return found


class Life:
    """One start of a training on `ranks` data-parallel ranks."""

    def __init__(
        self,
        ranks: int,
        *,
        saved: dict[str, Any] | None = None,
        ramp: list[int] | None = None,
        kind: str = "single",
        global_batch: int = GLOBAL_BATCH,
        sampler: Any = None,
        samples: int = SAMPLES,
    ) -> None:
        from megatron.core import num_microbatches_calculator as calculator
        from nemo.collections.llm.gpt.data.pre_training import PreTrainingDataModule
        from nemo.lightning.pytorch.plugins.data_sampler import MegatronDataSampler
        from nemo.lightning.pytorch.strategies import MegatronStrategy
        from nemo.utils import AppState

        from resiliency.callbacks.consumed_samples import ConsumedSamplesCallback

        class Strategy(MegatronStrategy):  # type: ignore[misc]
            def __init__(self) -> None:
                self.data_sampler = None

        class Module(PreTrainingDataModule):  # type: ignore[misc]
            def __init__(self, sampler: Any, trainer: Any) -> None:
                self.data_sampler, self.trainer = sampler, trainer
                self.init_global_step = trainer.global_step

        AppState().data_parallel_size = ranks
        calculator.unset_num_microbatches_calculator()
        calculator.init_num_microbatches_calculator(1, ramp, global_batch, 1, ranks)
        self.ranks, self.ramp, self.samples = ranks, ramp, samples
        self.trainer = SimpleNamespace(
            global_step=saved["global_step"] if saved else 0,
            strategy=Strategy(),
            should_stop=False,
            training=True,
            state=SimpleNamespace(fn="fit"),
        )
        if sampler is None:
            sampler = MegatronDataSampler(8, 1, global_batch, ramp, kind, output_log=False)
        self.module = self.trainer.datamodule = Module(sampler, self.trainer)
        self.callback = ConsumedSamplesCallback()
        self.callback.setup(self.trainer, None, "fit")
        if saved is not None:
            self.module.load_state_dict(saved["module"])
            self.callback.on_load_checkpoint(self.trainer, None, saved)
        self.sampler: Any = self.module.data_sampler

    def save(self) -> dict[str, Any]:
        return {
            "global_step": self.trainer.global_step,
            "module": self.module.state_dict(),
            "callbacks": {self.callback.state_key: self.callback.state_dict()},
        }

    def loaders(self) -> list[Any]:
        from nemo.lightning.data import add_megatron_sampler
        from torch.utils.data import DataLoader

        return [
            iter(
                add_megatron_sampler(
                    DataLoader(range(self.samples)),  # type: ignore[arg-type]
                    micro_batch_size=1,
                    global_batch_size=GLOBAL_BATCH,
                    rampup_batch_size=self.ramp,
                    consumed_samples=self.sampler.init_consumed_samples,
                    rank=rank,
                    world_size=self.ranks,
                ).batch_sampler
            )
            for rank in range(self.ranks)
        ]

    def run(self, loaders: list[Any], *, validate: bool = False) -> list[int]:
        """One step of all ranks up to the optimizer's; returns its samples."""
        from nemo.lightning.megatron_parallel import MegatronStep

        step = MegatronStep(
            pipeline=SimpleNamespace(trainer=self.trainer, module=None),
            data=None,
            forward_step_func=None,
            forward_only=validate,
            step_i=self.trainer.global_step,
        )
        step = self.sampler.on_megatron_step_start(step)
        self.sampler.on_megatron_microbatches_start(step)
        taken: list[int] = []
        for loader in [] if validate else loaders:
            taken += [number for batch in islice(loader, step.num_microbatches) for number in batch]
        self.sampler.on_megatron_step_end(step)
        return sorted(taken)


@check
def a_ramp_up_has_the_steps_of_an_undisturbed_one_over_kills_validations_and_other_ranks(
    directory: Path,
) -> None:
    from hypothesis import given, settings
    from hypothesis import strategies as st

    lives = st.lists(
        st.tuples(
            st.sampled_from((1, 2, 4)), st.integers(0, 6), st.integers(0, 6), st.sets(st.integers(0, 12))
        ),
        max_size=5,
    )

    @settings(deadline=None, derandomize=True, max_examples=60)
    @given(lives, st.sampled_from((RAMP, [8, 8, 1], [4, 12, 100], None)))
    def history(killed: list[tuple[int, int, int, set[int]]], ramp: list[int] | None) -> None:
        expected = undisturbed(ramp, 40)
        saved = None
        for ranks, steps, lost, validated in [*killed, (1, 3, 0, set())]:
            life = Life(ranks, saved=saved, ramp=ramp)
            loaders = life.loaders()
            for number in range(steps + lost):
                if number == steps:
                    saved = life.save()
                count = life.save()["module"]
                assert life.run(loaders) == expected[life.trainer.global_step]
                assert life.save()["module"] == count  # the optimizer has not stepped yet
                life.trainer.global_step += 1
                if number in validated:
                    life.run(loaders, validate=True)
                assert life.save()["module"] == {
                    "consumed_samples": sum(map(len, expected[: life.trainer.global_step]))
                }
                assert not life.trainer.should_stop
            if not lost:
                saved = life.save()

    history()


@check
def a_checkpoint_whose_count_belongs_to_other_steps_is_refused_with_both_values(directory: Path) -> None:
    saved = Life(2, ramp=RAMP).save()
    for change, sentence in (
        ({"ramp": [4, 4, 36]}, "rampup_batch_size=[4, 4, 24], and this start has [4, 4, 36]"),
        ({"ramp": None}, "rampup_batch_size=[4, 4, 24], and this start has None"),
        ({"ramp": RAMP, "global_batch": 32}, "global_batch_size=16, and this start has 32"),
        ({"ramp": None, "kind": "batch"}, "dataloader_type=single, and this start has batch"),
    ):
        text = refusal(lambda change=change: Life(1, saved=saved, **change))  # type: ignore[misc]
        assert sentence in text, text
    of_nemo = {**saved, "callbacks": {}}
    assert "saved without ConsumedSamplesCallback" in refusal(lambda: Life(2, saved=of_nemo, ramp=RAMP))
    of_nemo["module"] = {"consumed_samples": 48}
    assert Life(1, saved=of_nemo).save()["module"] == {"consumed_samples": 48}


@check
def a_cyclic_epoch_goes_on_with_other_ranks_at_its_end_only(directory: Path) -> None:
    def saved_at(consumed: int, samples: int) -> dict[str, Any]:
        state = Life(2, kind="cyclic", samples=samples).save()
        state["module"]["consumed_samples"] = consumed
        state["callbacks"]["resiliency.consumed_samples"] |= {
            "consumed_samples": consumed,
            "samples": samples,
        }
        return state

    text = refusal(lambda: Life(4, kind="cyclic", saved=saved_at(1016, 1000)))
    assert "'cyclic' epoch (16 of 1000 samples) that was dealt to micro-batches of 2" in text
    assert "this start has 4" in text
    assert "(0 of 1002 samples)" in refusal(lambda: Life(4, kind="cyclic", saved=saved_at(1002, 1002)))
    for ranks, consumed in ((4, 1000), (2, 1016)):
        life = Life(ranks, kind="cyclic", saved=saved_at(consumed, 1000))
        assert life.sampler.compute_consumed_samples() == consumed


@check
def another_size_of_the_data_set_is_refused_where_the_order_depends_on_it_and_logged_elsewhere(
    directory: Path,
) -> None:
    def started(kind: str) -> Life:
        life = Life(1, kind=kind)
        life.sampler.samples = SAMPLES
        after = Life(1, kind=kind, saved=life.save())
        after.sampler.samples = SAMPLES - 1
        return after

    cyclic = started("cyclic")
    text = refusal(lambda: cyclic.callback.on_train_start(cyclic.trainer, None))
    assert "in the order of 1000 samples, and the data set has 999" in text
    single = started("single")
    with logged_by("resiliency.callbacks.consumed_samples") as lines:
        single.callback.on_train_start(single.trainer, None)
    assert lines[0].startswith("the data set has 999 samples, and 1000 when the checkpoint was saved")


@check
def a_ramp_up_that_would_have_other_batches_than_it_says_is_refused_when_the_fit_begins(
    directory: Path,
) -> None:
    assert "an epoch would not be a whole number of steps" in refusal(
        lambda: Life(2, ramp=RAMP, kind="batch")
    )
    text = refusal(lambda: Life(8, ramp=RAMP))
    assert "from 4 by 4 to 16 samples has batches that the ranks cannot take" in text
    assert "a micro-batch of all ranks is 8 samples" in text
    assert "needs a data module with NeMo's MegatronDataSampler" in refusal(lambda: Life(1, sampler=object()))


@check
def a_ramp_up_that_nemo_counts_is_logged_where_it_is_saved(directory: Path) -> None:
    from nemo.lightning.pytorch.plugins.data_sampler import MegatronDataSampler

    from resiliency.callbacks.model_checkpoint import _warn_of_count

    life = Life(1, ramp=RAMP)
    with logged_by("resiliency.callbacks.model_checkpoint") as lines:
        _warn_of_count(life.trainer)
        assert not lines
        life.module.data_sampler = MegatronDataSampler(8, 1, GLOBAL_BATCH, RAMP)
        _warn_of_count(life.trainer)
    assert lines[0].startswith("in the batch-size ramp-up [4, 4, 24] checkpoints have NeMo's count")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)  # NeMo's data module greets at each load
    own_checks = {name: function for name, function in CHECKS.items() if function.__module__ == __name__}
    for name, function in own_checks.items():
        function(Path(sys.argv[1]))
        print(f"passed {name}", flush=True)
