# SPDX-License-Identifier: Apache-2.0
"""Loops over a DataLoader that say by themselves what is in the model.

Invariant: with the optimizer, a batch counts exactly when a step of it comes after the batch was handed out.
So a state that is saved at any moment, after an exception too, has the position of the model that is saved
with it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader

from resiliency.data.global_batch import MicroBatch
from resiliency.data.resumable import ResumableSampler
from resiliency.data.samplers import InterruptableDistributedSampler, MicroBatchSampler
from resiliency.errors import ConfigError

log = logging.getLogger(__name__)

T = TypeVar("T")


class OptimizerStep(Generic[T]):
    """The micro-batches of one optimizer step on this rank, loaded as they are taken: pairs of batch and
    weight."""

    def __init__(
        self, plan: tuple[MicroBatch, ...], batches: Iterator[T], taken: Callable[[int], None]
    ) -> None:
        self.plan = plan
        self._batches = batches
        self._taken = taken
        self.remaining = len(plan)

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self) -> Iterator[tuple[T, float]]:
        """To be taken once, and wholly."""
        while self.remaining:
            part = self.plan[-self.remaining]
            batch = next(self._batches)
            self.remaining -= 1
            self._taken(part.samples)
            yield batch, part.weight


def advancing(loader: DataLoader[T], optimizer: Optimizer | None = None) -> Iterator[T]:
    """The batches of a loader, which count as in the model by themselves.

    Args:
        loader: with a sampler or batch sampler of ours.
        optimizer: a batch counts when this optimizer has made a step after it, so that a state saved at any
            moment is that of the model, with gradient accumulation too. Without it a batch counts when the
            next is asked for, and the state cannot be saved inside the loop, nor after a loop that was left
            early, until `advance` or `load_state_dict` says where the model is.
    Raises:
        ConfigError: the loader has no sampler of ours, or one with `global_batch` (see `advancing_steps`), or
            gives batches out of order or of unknown size.
    """
    sampler = sampler_of(loader)
    if isinstance(sampler, InterruptableDistributedSampler) and sampler.global_batch is not None:
        raise ConfigError(
            "the sampler has a global batch, whose micro-batches have weights.",
            hint="Loop over advancing_steps(loader, optimizer).",
        )
    size = count_of_batch(loader, sampler)
    left = sampler.left
    counter = _Counter(sampler, optimizer)
    with counter:
        for batch in loader:
            counter.hand_out(min(size, left))
            left -= min(size, left)
            yield batch
            counter.next_asked()
    counter.finish()


def advancing_steps(loader: DataLoader[T], optimizer: Optimizer | None = None) -> Iterator[OptimizerStep[T]]:
    """The optimizer steps of a loader over `micro_batches()`; a step counts as `advancing` counts a batch.

        for step in advancing_steps(loader, optimizer):
            for batch, weight in accumulate(model, step):
                (loss_of(model(batch)) * weight).backward()
            optimizer.step()
            optimizer.zero_grad()

    Raises:
        ConfigError: the loader has another batch sampler or gives batches out of order, or a step was asked
            for before the last one's micro-batches were all taken.
    """
    _check_in_order(loader)
    micro_batches = loader.batch_sampler
    if not isinstance(micro_batches, MicroBatchSampler):
        raise ConfigError(
            f"the loader's batch_sampler is a {type(micro_batches).__name__}.",
            hint="Construct it with batch_sampler=sampler.micro_batches() of a sampler with global_batch.",
        )
    sampler = micro_batches.sampler
    counter = _Counter(sampler, optimizer)
    if not sampler.ready():
        return
    rows = sampler.rows()
    with counter:
        batches = iter(loader)
        for _, plan in rows:
            step = OptimizerStep(plan, batches, counter.hand_out)
            yield step
            if step.remaining:
                raise ConfigError(
                    f"{step.remaining} of {len(plan)} micro-batches of an optimizer step were not taken.",
                    hint="Every rank runs all of them, or the ranks lose step; leave the loop with break.",
                )
            counter.next_asked()
    counter.finish()


class _Counter:
    """What was handed to the program, until it counts as in the model."""

    _counted = 0

    def __init__(self, sampler: ResumableSampler[object], optimizer: Optimizer | None) -> None:
        self._sampler = sampler
        self._optimizer = optimizer
        self._handed_out = 0

    def __enter__(self) -> None:
        self._sampler.in_hand = False
        self._hook = self._optimizer and self._optimizer.register_step_post_hook(self._stepped)

    def __exit__(self, *exc: object) -> None:
        # A batch that is in hand stays so: the program may have trained on it before it left the loop.
        if self._hook:
            self._hook.remove()

    def hand_out(self, count: int) -> None:
        self._handed_out += count
        self._sampler.in_hand = self._optimizer is None

    def next_asked(self) -> None:
        if self._optimizer is None:
            self._count()

    def finish(self) -> None:
        """The loader has no more batches: what it dropped, or what no step came after, is left out."""
        if self._optimizer is not None and self._handed_out and not self._counted:
            log.warning(
                "epoch %d ended without a step of the optimizer that was passed to advancing (a %s): no "
                "batch "
                "was counted; pass the one whose step() the loop calls",
                self._sampler.epoch,
                type(self._optimizer).__name__,
            )
        if not self._sampler.progress.finished:
            self._sampler.finish_epoch()

    def _stepped(self, optimizer: Optimizer, *_: object) -> None:
        # Fused optimizers are called for a step that a gradient scaler skips, too, and are told so by this.
        if not getattr(optimizer, "found_inf", None):
            self._count()

    def _count(self) -> None:
        self._counted += 1
        self._sampler.counted += self._handed_out
        self._handed_out = 0
        self._sampler.in_hand = False


def sampler_of(loader: DataLoader[T]) -> ResumableSampler[object]:
    """Raises ConfigError: the loader has no sampler of ours, or gives batches out of order."""
    _check_in_order(loader)
    for found in (loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None), loader.sampler):
        if isinstance(found, ResumableSampler):
            return found
    raise ConfigError(
        f"the loader has a {type(loader.sampler).__name__}, which does not keep its position.",
        hint="Pass sampler=InterruptableDistributedSampler(dataset), or the grouped one as batch_sampler.",
    )


def count_of_batch(loader: DataLoader[T], sampler: ResumableSampler[object]) -> int:
    """What a batch of the loader counts, but for a short last one.

    Raises ConfigError: the loader has a batch sampler that does not say it."""
    batches: object = loader.batch_sampler
    if batches is None or batches is sampler:
        return 1
    if type(batches) is BatchSampler:  # a subclass may make its batches in another way
        return batches.batch_size
    raise ConfigError(
        f"the loader's batch_sampler is a {type(batches).__name__}; how many samples its batches have is not "
        "known.",
        hint="Pass sampler=sampler and batch_size=n to the loader, or torch's own BatchSampler over it.",
    )


def _check_in_order(loader: DataLoader[T]) -> None:
    if not loader.in_order:
        raise ConfigError(
            "the loader has in_order=False: it gives batches as its workers are ready, and which of them are "
            "in the model is then no position.",
            hint="Leave out in_order=False.",
        )
