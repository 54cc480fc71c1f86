# SPDX-License-Identifier: Apache-2.0
"""NeMo's count of consumed samples, exact also in a batch-size ramp-up and in an epoch that was resumed.

    trainer = nl.Trainer(callbacks=[ConsumedSamplesCallback(), ModelCheckpoint(...)], ...)

The idea: `ExactMegatronSampler` takes the place of the data module's sampler. A batch is noted before its
forward pass and counts once the trainer's `global_step` has passed it: the optimizer has made its step.

Invariant: the count is the position of the model in the data, whenever it is read. The data modules of NeMo
save and load it as they always do.

NeMo's own sampler reckons the count from the batch size of the moment. In a ramp-up that is the size of the
next step, so each restart leaves out a batch; a validation moves the count too; and the first step of a
larger batch ends the training. With "cyclic" and "batch", an epoch that was resumed ends early: its loader
has the length of what is left, and Lightning counts the steps before the restart in it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from lightning.pytorch.callbacks import Callback
from megatron.core.num_microbatches_calculator import update_num_microbatches
from nemo.lightning.pytorch.plugins.data_sampler import MegatronDataSampler
from nemo.lightning.pytorch.strategies import MegatronStrategy
from nemo.utils import AppState

from resiliency.errors import ConfigError

logger = logging.getLogger(__name__)

_VERSION = 1


class _FromPosition:
    """Mixin for a batch sampler of NeMo: a pass begins where the model is, its length is that of an epoch.

    NeMo's has the length of what is left, to which Lightning cuts all later epochs too.
    """

    position: Callable[[], int]
    length: int

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[list[int]]:
        self.consumed_samples = self.position()
        return super().__iter__()  # type: ignore[misc,no-any-return]


class ExactMegatronSampler(MegatronDataSampler):
    """NeMo's sampler, with `init_consumed_samples` as the count of the samples that are in the model.

    Args:
        sampler: the sampler of a data module, whose settings are taken over.
        trainer: the trainer that trains on it.
    """

    init_consumed_samples: int

    def __init__(self, sampler: MegatronDataSampler, trainer: Any) -> None:
        self.__dict__.update(vars(sampler))
        self.connect(trainer)
        #: Of the data set that is trained on; None before its loader is made.
        self.samples: int | None = None
        #: The step that was begun last, and its batch size.
        self._begun: tuple[int, int] | None = None

    @property
    def samples_per_microbatch(self) -> int:
        """Over all data-parallel ranks."""
        return int(self.micro_batch_size * AppState().data_parallel_size)

    def epoch_length(self, samples: int, samples_per_microbatch: int) -> int:
        """Samples by which the count grows in one epoch; a rest smaller than a batch is left out."""
        return samples - samples % samples_per_microbatch if self.dataloader_type == "cyclic" else samples

    @property
    def _epoch(self) -> int | None:
        """None for "single", which passes over the data once."""
        if self.dataloader_type == "single" or self.samples is None:
            return None
        return self.epoch_length(self.samples, self.samples_per_microbatch)

    def given_in_epoch(self) -> int | None:
        """How often the loader has given something in this epoch; None where there are no epochs."""
        if self._epoch is None:
            return None
        return self.compute_consumed_samples() % self._epoch // self._samples_per_fetch

    @property
    def _samples_per_fetch(self) -> int:
        """Over all data-parallel ranks."""
        return self.global_batch_size if self.dataloader_type == "batch" else self.samples_per_microbatch

    def transform_dataloader(self, dataloader: Any, consumed_samples: int = 0) -> Any:
        loader = super().transform_dataloader(dataloader, consumed_samples)
        if not self.trainer.training:
            return loader
        self.samples = len(dataloader.dataset)
        if self.dataloader_type != "single":
            batches = loader.batch_sampler
            batches.position = self.compute_consumed_samples
            whole = self.samples - self.samples % self.global_batch_size
            batches.length = whole // self._samples_per_fetch
            batches.__class__ = type(type(batches).__name__, (_FromPosition, type(batches)), {})
        return loader

    def compute_consumed_samples(self, steps_since_resume: int = 0) -> int:
        """The samples that are in the model, with those that an epoch left out."""
        self._settle()
        return int(self.init_consumed_samples)

    def on_megatron_step_start(self, step: Any) -> Any:
        self._settle()
        return super().on_megatron_step_start(step)

    def on_megatron_microbatches_start(self, step: Any) -> None:
        """NeMo would end the training here where the batch size changes."""
        if not step.forward_only:
            self._begun = self.trainer.global_step, self.current_global_batch_size

    def on_megatron_step_end(self, step: Any) -> None:
        """NeMo's, which logs the count with the step that the optimizer is about to make."""
        count = self.init_consumed_samples
        if self._begun is not None and not step.forward_only:
            self.init_consumed_samples += self._begun[1]
        try:
            super().on_megatron_step_end(step)
        finally:
            self.init_consumed_samples = count

    def _settle(self) -> None:
        if self._begun is not None and self.trainer.global_step > self._begun[0]:
            self.init_consumed_samples += self._begun[1]
            self._begun = None
        update_num_microbatches(self.init_consumed_samples, consistency_check=False)
        epoch = self._epoch
        if epoch is not None:
            left = -self.init_consumed_samples % epoch
            if left < self.global_batch_size:  # no step can be made of them
                self.init_consumed_samples += left


class ConsumedSamplesCallback(Callback):
    """Puts an `ExactMegatronSampler` into the data module, and refuses a checkpoint whose count does not fit.

    On all ranks alike.

    Raises:
        ConfigError: when the fit begins: the trainer has no data module with NeMo's Megatron sampler, or a
            ramp-up whose batches its ranks cannot take. For those of a load, see `on_load_checkpoint`.
    """

    def __init__(self) -> None:
        self._sampler: ExactMegatronSampler | None = None
        #: Of the checkpoint's data set.
        self._samples_before: int | None = None
        #: No step was begun since the trainer started.
        self._is_first = True

    @property
    def state_key(self) -> str:
        return "resiliency.consumed_samples"

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Behind the data module's setup, where some make their sampler, and before the strategy's."""
        if stage != "fit":
            return
        of_strategy = getattr(trainer.strategy, "data_sampler", None)
        sampler = of_strategy or getattr(trainer.datamodule, "data_sampler", None)
        if type(sampler) is MegatronDataSampler:
            sampler = ExactMegatronSampler(sampler, trainer)
        if not isinstance(sampler, ExactMegatronSampler) or not isinstance(
            trainer.strategy, MegatronStrategy
        ):
            raise ConfigError(
                "ConsumedSamplesCallback needs a data module with NeMo's MegatronDataSampler and a "
                f"MegatronStrategy, found {type(sampler).__name__} and {type(trainer.strategy).__name__}.",
                hint="Leave the callback out where another sampler counts.",
            )
        _check_ramp(sampler)
        self._sampler = sampler
        if of_strategy is not None:
            trainer.strategy.data_sampler = sampler
        if trainer.datamodule is not None:
            trainer.datamodule.data_sampler = sampler

    def state_dict(self) -> dict[str, Any]:
        if self._sampler is None:
            return {}
        sampler = self._sampler
        return {
            "version": _VERSION,
            "consumed_samples": sampler.compute_consumed_samples(),
            "samples": sampler.samples,
            "global_batch_size": sampler.global_batch_size,
            "rampup_batch_size": _ramp(sampler),
            "dataloader_type": sampler.dataloader_type,
            "samples_per_microbatch": sampler.samples_per_microbatch,
        }

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Put the sampler to where the checkpoint's model is.

        Raises:
            ConfigError: the count belongs to other steps or to another order: another batch size, ramp-up or
                type of loader; the middle of a "cyclic" epoch on another number of ranks; or a ramp-up in
                which NeMo counted.
        """
        sampler = self._sampler
        if sampler is None or trainer.state.fn != "fit":
            return
        saved = checkpoint.get("callbacks", {}).get(self.state_key)
        if not saved:
            if sampler.rampup_batch_size is not None:
                _refuse(
                    "was saved without ConsumedSamplesCallback: in a ramp-up NeMo's count is not that of the "
                    "model",
                    "Begin from scratch, or go on without the callback, with samples left out.",
                )
            return  # without a ramp-up NeMo counts well
        now = self.state_dict()
        for key in ("version", "dataloader_type", "global_batch_size", "rampup_batch_size"):
            if saved[key] != now[key]:
                _refuse(
                    f"was saved with {key}={saved[key]}, and this start has {now[key]}",
                    "Its steps would not be those of an undisturbed run. To change it on purpose, start once "
                    "without ConsumedSamplesCallback and without a ramp-up.",
                )
        consumed = saved["consumed_samples"]
        before, here = saved["samples_per_microbatch"], now["samples_per_microbatch"]
        if sampler.dataloader_type == "cyclic" and before != here:
            epoch = sampler.epoch_length(saved["samples"], before)
            if consumed % epoch or sampler.epoch_length(saved["samples"], here) != epoch:
                _refuse(
                    f"is in a 'cyclic' epoch ({consumed % epoch} of {epoch} samples) that was dealt to micro-"
                    f"batches of {before} samples over all ranks, and this start has {here}",
                    "Go on with as many data-parallel ranks x micro_batch_size until the epoch ends; with "
                    "'single' any number goes on.",
                )
        self._samples_before = saved["samples"]
        sampler.init_consumed_samples = sampler.prev_consumed_samples = consumed
        update_num_microbatches(consumed, consistency_check=False)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Raises ConfigError: a "cyclic" data set has another size, and with it another order."""
        assert self._sampler is not None
        self._is_first = True
        before, now = self._samples_before, self._sampler.samples
        if before is None or before == now:
            return
        if self._sampler.dataloader_type == "cyclic":
            _refuse(f"is in the order of {before} samples, and the data set has {now}", "Use its data set.")
        logger.warning(
            "the data set has %s samples, and %s when the checkpoint was saved: training goes on with number "
            "%s. Megatron orders a data set anew where the number of epochs in it changes: if yours does, "
            "give it as many samples as before (num_train_samples)",
            now,
            before,
            self._sampler.init_consumed_samples,
        )

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Lightning takes its steps before a restart for what the loader has given since the epoch began."""
        assert self._sampler is not None
        if self._is_first and (given := self._sampler.given_in_epoch()) is not None:
            fetcher = trainer.fit_loop._data_fetcher
            fetcher.fetched = given % fetcher.length  # shorter than an epoch with limit_train_batches
        self._is_first = False


def _ramp(sampler: MegatronDataSampler) -> list[int] | None:
    return None if sampler.rampup_batch_size is None else [int(size) for size in sampler.rampup_batch_size]


def _check_ramp(sampler: ExactMegatronSampler) -> None:
    """Raises ConfigError: some batch of the ramp-up would be another one than its size says."""
    ramp, part = _ramp(sampler), sampler.samples_per_microbatch
    if ramp is None:
        return
    if sampler.dataloader_type != "single":
        raise ConfigError(
            f"a ramp-up {ramp} with dataloader_type={sampler.dataloader_type!r}: an epoch would not be a "
            "whole number of steps.",
            hint="Use dataloader_type='single' with rampup_batch_size, or leave the ramp-up out.",
        )
    sizes = (ramp[0], ramp[1], sampler.global_batch_size)
    if any(size % part for size in sizes):
        raise ConfigError(
            f"a ramp-up from {sizes[0]} by {sizes[1]} to {sizes[2]} samples has batches that the ranks "
            f"cannot take: a micro-batch of all ranks is {part} samples.",
            hint="Choose multiples of micro_batch_size x data-parallel ranks (the largest number of them).",
        )


def _refuse(what: str, hint: str) -> NoReturn:
    raise ConfigError(f"the checkpoint {what}.", hint=hint)
