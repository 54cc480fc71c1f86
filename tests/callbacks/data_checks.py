# SPDX-License-Identifier: Apache-2.0
"""Checks of `DataProgressCallback` in a real Lightning loop, in one process: `test_data_progress.py` runs it.

python -m tests.callbacks.data_checks DIRECTORY
"""

from __future__ import annotations

import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.callbacks.checks import CHECKS, check, refusal

SIZE, BATCH = 18, 4


def loader_of(**options: Any) -> Any:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from resiliency.data import InterruptableDistributedSampler

    data = TensorDataset(torch.arange(SIZE))
    sampler = InterruptableDistributedSampler(data, 1, 0, seed=3)
    return DataLoader(data, batch_size=BATCH, sampler=sampler, **options)


def train(
    loader: Any, *callbacks: Any, trained_on: Any = None, resume: Path | None = None, **limits: Any
) -> Any:
    """Train a model of one weight; the model that comes back has in `steps` what each step was made of."""
    import torch
    from lightning.pytorch import LightningModule, Trainer

    class Recording(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))
            self.steps: list[list[int]] = []
            self.in_gradients: list[int] = []

        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            self.in_gradients += batch[0].tolist()
            return (self.weight * batch[0].double().mean()).square().sum()

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            self.steps.append(self.in_gradients)
            self.in_gradients = []

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-6)

    model = Recording()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=list(callbacks),
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **limits,
    )
    trainer.fit(model, loader if trained_on is None else trained_on, ckpt_path=resume)
    return trainer


def steps_of(trainer: Any) -> list[list[int]]:
    steps: list[list[int]] = trainer.lightning_module.steps
    return steps


@check
def a_fit_that_is_resumed_after_any_step_takes_the_steps_of_an_undisturbed_one(directory: Path) -> None:
    from resiliency.callbacks.data_progress import DataProgressCallback

    def fit(steps: int, resume: Path | None, drop_last: bool, **limits: Any) -> Any:
        loader = loader_of(drop_last=drop_last)
        return train(loader, DataProgressCallback(loader), resume=resume, max_steps=steps, **limits)

    for drop_last, limits in (
        (False, {}),
        (True, {}),
        (False, {"accumulate_grad_batches": 2}),
        (False, {"limit_train_batches": 3}),
    ):
        whole = steps_of(fit(11, None, drop_last, **limits))
        assert len(whole) == 11
        for stop in (2, 5, 8):  # within an epoch, at its end, and in a later one
            first = fit(stop, None, drop_last, **limits)
            path = directory / f"{drop_last}-{len(limits)}-{stop}.ckpt"
            first.save_checkpoint(path)
            then = steps_of(fit(11, path, drop_last, **limits))
            assert steps_of(first) + then == whole, (drop_last, limits, stop)


@check
def a_checkpoint_of_an_exception_after_a_step_and_before_it_has_the_position_of_its_model(
    directory: Path,
) -> None:
    from lightning.pytorch.callbacks import Callback

    from resiliency.callbacks.data_progress import DataProgressCallback

    class Failing(Callback):
        """Comes before the callback that counts, so that it never learns of the end of the batch."""

        def __init__(self, path: Path, hook: str, number: int) -> None:
            self.path = path

            def fail(trainer: Any, model: Any, *args: Any) -> None:
                if args[-1] == number:
                    raise ValueError("on purpose")

            setattr(self, hook, fail)

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            trainer.save_checkpoint(self.path)

    for hook, number, accumulated, done in (
        ("on_train_batch_end", 1, 1, 2),
        ("on_train_batch_start", 1, 1, 1),
        ("on_train_batch_end", 2, 2, 1),
        ("on_train_batch_end", 3, 2, 2),
    ):
        limits = {"max_steps": 7, "accumulate_grad_batches": accumulated}
        loader = loader_of()
        whole = steps_of(train(loader, DataProgressCallback(loader), **limits))
        path, loader = directory / f"{hook}-{number}.ckpt", loader_of()
        with suppress(ValueError):
            train(loader, Failing(path, hook, number), DataProgressCallback(loader), **limits)
        loader = loader_of()
        then = steps_of(train(loader, DataProgressCallback(loader), resume=path, **limits))
        assert then == whole[done:], (hook, number, accumulated)


@check
def batches_without_a_step_at_the_end_of_an_epoch_count_with_the_first_step_of_the_next_one(
    directory: Path,
) -> None:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback
    from torch import nn, optim

    from resiliency.callbacks.data_progress import DataProgressCallback

    class Manual(LightningModule):
        """A step after every second batch: none after the last of five."""

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.layer = nn.Linear(1, 1)

        def training_step(self, batch: Any, number: int) -> None:
            if number % 2:
                self.optimizers().step()  # type: ignore[union-attr]

        def configure_optimizers(self) -> optim.Optimizer:
            return optim.SGD(self.parameters(), lr=0.1)

    class Positions(Callback):
        def __init__(self) -> None:
            self.found: list[tuple[int, int]] = []

        def on_train_batch_end(self, *args: Any) -> None:
            state = callback.state_dict()
            self.found.append((state["epoch"], state["position"]))

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(directory / f"{trainer.current_epoch}.ckpt")

    def fit(epochs: int, resume: Path | None) -> list[tuple[int, int]]:
        nonlocal callback
        loader = loader_of()
        callback = DataProgressCallback(loader)
        positions = Positions()
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=epochs,
            callbacks=[callback, positions],
            use_distributed_sampler=False,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Manual(), loader, ckpt_path=resume)
        return positions.found

    callback: DataProgressCallback
    waiting = [(0, 0), (0, 8), (0, 8), (0, 16), (0, 16)]
    assert fit(2, None) == [*waiting, (0, 16), (1, 8), (1, 8), (1, 16), (1, 16)]
    # The checkpoint of the end of the epoch goes on with the two samples that are not in its model.
    assert fit(2, directory / "0.ckpt") == [(0, 16), (0, 16), (1, 8), (1, 8), (1, 16), (1, 16)]


@check
def a_step_that_a_gradient_scaler_skips_counts_with_the_next_one(directory: Path) -> None:
    from lightning.pytorch.callbacks import Callback

    from resiliency.callbacks.data_progress import DataProgressCallback

    class Skipping(Callback):
        """The optimizer is called, as by a scaler, but for the second and the last batch of an epoch."""

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            (optimizer,) = trainer.optimizers
            step = optimizer.step

            def step_or_skip(closure: Any) -> Any:
                return closure() if trainer.fit_loop.epoch_loop.batch_idx in (1, 4) else step(closure)

            optimizer.step = step_or_skip

        def on_train_batch_end(self, *args: Any) -> None:
            state = callback.state_dict()
            found.append((state["epoch"], state["position"]))

    found: list[tuple[int, int]] = []
    loader = loader_of()
    callback = DataProgressCallback(loader)
    train(loader, callback, Skipping(), max_epochs=2)
    assert found == [(0, 4), (0, 4), (0, 12), (0, 16), (0, 16), (1, 4), (1, 4), (1, 12), (1, 16), (1, 16)]


@check
def a_checkpoint_that_does_not_say_where_its_model_is_in_the_data_is_refused(directory: Path) -> None:
    from resiliency.callbacks.data_progress import DataProgressCallback

    train(loader_of(), max_steps=2).save_checkpoint(directory / "without.ckpt")
    loader = loader_of()
    callback = DataProgressCallback(loader)
    text = refusal(lambda: train(loader, callback, resume=directory / "without.ckpt", max_steps=4))
    assert "does not say where in the data its model is" in text


@check
def data_progress_refuses_another_loader_and_weights_that_no_trainer_knows(directory: Path) -> None:
    from torch.utils.data import DataLoader

    from resiliency.callbacks.data_progress import DataProgressCallback
    from resiliency.data import InterruptableDistributedSampler

    callback = DataProgressCallback(loader_of())
    text = refusal(lambda: train(loader_of(), callback, trained_on=loader_of(), max_steps=1))
    assert "does not train on the loader of DataProgressCallback" in text
    rows = InterruptableDistributedSampler(range(8), 1, 0, global_batch=4)
    weighted = DataLoader(range(8), batch_sampler=rows.micro_batches())  # type: ignore[arg-type]
    assert "has a global batch" in refusal(lambda: DataProgressCallback(weighted))
    unweighted = DataLoader(range(8), batch_size=4, sampler=rows)  # type: ignore[arg-type]
    assert "has a global batch" in refusal(lambda: DataProgressCallback(unweighted))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    own_checks = {name: function for name, function in CHECKS.items() if function.__module__ == __name__}
    for name, function in own_checks.items():
        own = Path(sys.argv[1]) / name
        own.mkdir()
        function(own)
        print(f"passed {name}", flush=True)
