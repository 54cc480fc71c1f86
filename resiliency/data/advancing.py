# SPDX-License-Identifier: Apache-2.0
"""Loops over a DataLoader that say by themselves what is in the model.

Invariant: with the optimizer, a batch counts exactly when a step of it comes after the batch was handed out.
So a state that is saved at any moment, after an exception too, has the position of the model that is saved
with it. That holds beyond the end of an epoch: batches whose gradients are carried into the next one count
there. After a loop that was left early a step may be of its last batches or not, and so may the gradients: no
state is guessed then, and no loop begins before the program says what they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import GeneratorType
from typing import Generic, TypeVar

import torch
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from resiliency.data.global_batch import MicroBatch
from resiliency.data.iterable import ResumableIterable
from resiliency.data.optimizer_steps import StepListener
from resiliency.data.resumable import Loop, ResumableSampler, warn_of_waiting
from resiliency.data.samplers import InterruptableDistributedSampler, MicroBatchSampler
from resiliency.errors import ConfigError

log = logging.getLogger(__name__)

#: Batches without a step before the log asks whether the optimizer is the right one.
_MANY = 64

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

    Where an epoch goes on after a restart, torch's default random numbers go on as well, as if the loop had
    not begun again.

    Args:
        loader: with a sampler or batch sampler of ours, or over a `ResumableIterable`.
        optimizer: a batch counts when this optimizer has made a step after it, so that a state saved at any
            moment is that of the model, with gradient accumulation too. Of several optimizers the one that
            makes the last step for each batch; one that accelerate has prepared is taken as the one in it.
            Without it a batch counts when the next is asked for, and the state cannot be saved inside the
            loop. After a loop that was left with batches in no step, `advance` or `load_state_dict` says
            where the model is, before a state is saved or another loop begins.
    Raises:
        ConfigError: the loader has no sampler of ours, or one with `global_batch` (see `advancing_steps`), or
            gives batches out of order, of unknown size, or more of them than the sampler has.
    """
    _check_loader(loader)
    if isinstance(loader.dataset, ResumableIterable):
        yield from loader.dataset.loop(loader, None if optimizer is None else optimizer_with_hooks(optimizer))
        return
    sampler = sampler_of(loader)
    if isinstance(sampler, InterruptableDistributedSampler) and sampler.global_batch is not None:
        raise ConfigError(
            "the sampler has a global batch, whose micro-batches have weights.",
            hint="Loop over advancing_steps(loader, optimizer).",
        )
    size = count_of_batch(loader, sampler)
    drops = batches_are_whole(loader, sampler)
    counter = _Counter(sampler, optimizer, least=size if drops else 1)
    with counter:
        for batch in counter.begin(loader):
            counter.hand_out(size)
            yield batch
            counter.next_asked()


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
    _check_loader(loader)
    micro_batches = loader.batch_sampler
    if not isinstance(micro_batches, MicroBatchSampler):
        raise ConfigError(
            f"the loader's batch_sampler is a {type(micro_batches).__name__}.",
            hint="Construct it with batch_sampler=sampler.micro_batches() of a sampler with global_batch.",
        )
    sampler = micro_batches.sampler
    counter = _Counter(sampler, optimizer)
    start = sampler.begin_iteration()
    if start is None:
        return
    with counter:
        batches = counter.begin(loader)
        for _, plan in sampler.rows(start):
            step = OptimizerStep(plan, batches, counter.hand_out)
            yield step
            if step.remaining:
                raise ConfigError(
                    f"{step.remaining} of {len(plan)} micro-batches of an optimizer step were not taken.",
                    hint="Every rank runs all of them, or the ranks lose step; leave the loop with break.",
                )
            counter.next_asked()


class _Counter(Loop):
    """What was handed to the program, until it counts as in the model.

    Args:
        least: samples of which the loader makes a batch; fewer are dropped at the end.
    """

    def __init__(
        self, sampler: ResumableSampler[object], optimizer: Optimizer | None, *, least: int = 1
    ) -> None:
        super().__init__()
        self._sampler = sampler
        self._optimizer = None if optimizer is None else optimizer_with_hooks(optimizer)
        self._least = least
        self._remaining = 0
        self._steps = self._batches = 0

    def __enter__(self) -> None:
        self._sampler.begin_loop(self)
        self._remaining = self._sampler.left
        self._hook = self._optimizer and StepListener(self._optimizer, self._stepped)

    def __exit__(self, error: type[BaseException] | None, *rest: object) -> None:
        if self._sampler.loop is not self or self.left:  # left: the next epoch was set meanwhile
            return
        # A zip with a range, or with another loop, does not ask for the end.
        without_doubt = self._optimizer is not None or not self.handed_out
        if self._is_all_handed_out and without_doubt and error in (None, GeneratorExit):
            self._end()
            return
        # A batch that is in hand stays so: the program may have trained on it before it left the loop.
        self.left = True
        if not self.handed_out and not self._sampler.waits_for_step:
            self.release()

    def begin(self, loader: DataLoader[T]) -> Iterator[T]:
        """An iterator of the loader, which draws the seed of its workers from torch's default generator. A
        run that was not interrupted drew it at the start of the epoch only, and for workers that persist at
        that of its first one."""
        sampler = self._sampler
        was_drawn = sampler.start.position or (loader.persistent_workers and sampler.is_resumed)
        drawn = loader.generator is None and was_drawn
        before = torch.get_rng_state() if drawn else None
        if type(loader).__module__.partition(".")[0] == "accelerate":  # else it sets the number of its loops
            loader.set_epoch(sampler.start.epoch)  # type: ignore[attr-defined]
        batches: object = iter(loader)
        if before is not None and isinstance(batches, GeneratorType):  # accelerate's, which has not begun
            self.generator_state = before
        elif before is not None:
            torch.set_rng_state(before)
        return batches  # type: ignore[return-value]

    def release(self) -> None:
        if self._hook:
            self._hook.remove()

    @property
    def _is_all_handed_out(self) -> bool:
        return self._remaining < self._least

    def hand_out(self, size: int) -> None:
        """A batch of `size`, or of what is left, goes to the program."""
        if self._is_all_handed_out:
            raise ConfigError(
                "the loader gave another batch after the last one of its sampler: it repeats or adds some, "
                "and the position would not be that of the model.",
                hint="Use torch's DataLoader without an __iter__ of its own, or count by hand: loop over the "
                "loader itself, and call sampler.advance(its samples) after each step.",
            )
        if self._sampler.loop is not self:
            raise ConfigError(
                "the position of the sampler was set while this loop was under way, by another loop over it "
                "or by load_state_dict, set_epoch, finish_epoch or reset_progress.",
                hint="Leave the loop, and begin another.",
            )
        count = min(size, self._remaining)
        self._remaining -= count
        self.handed_out += count
        self._sampler.in_hand = self._optimizer is None
        self.ended = self._remaining < self._least and self._optimizer is not None
        self._batches += 1
        if self._batches == _MANY and self._optimizer is not None and not self._steps:
            warn_of_no_step(self._sampler.epoch, _MANY, self._optimizer)

    def next_asked(self) -> None:
        if self._optimizer is None and self._sampler.loop is self:
            self._count()

    def _end(self) -> None:
        """All batches were handed out: what the loader drops is left out; what no step came after waits."""
        waiting = self._sampler.end_loop()
        if not waiting or self._optimizer is None:
            return
        if self._steps:
            warn_of_waiting(self._sampler.epoch, waiting)
        else:
            warn_of_no_step(self._sampler.epoch, self._batches, self._optimizer)

    def _stepped(self) -> None:
        if self.left and self.handed_out:
            self.release()
            self._sampler.in_hand = True
        else:
            self._count()

    def _count(self) -> None:
        self._steps += 1
        self._sampler.count_step()


def warn_of_no_step(epoch: int, batches: int, optimizer: Optimizer) -> None:
    log.warning(
        "%d batches of epoch %d came without a step of the optimizer that was passed to advancing (a %s): "
        "none is counted; if gradients are accumulated over more batches, they count with its next step; "
        "else pass the optimizer whose step() the loop calls, or count by hand where it is called elsewhere",
        batches,
        epoch,
        type(optimizer).__name__,
    )


def optimizer_with_hooks(optimizer: Optimizer) -> Optimizer:
    """The optimizer whose `step` calls hooks: this one, or the one in a wrapper such as accelerate's.

    Raises ConfigError: there is none."""
    found: object = optimizer
    while found is not None:
        if isinstance(found, Optimizer) and hasattr(found, "_optimizer_step_post_hooks"):
            return found
        found = getattr(found, "optimizer", None)
    raise ConfigError(
        f"a {type(optimizer).__name__} does not tell when it makes a step.",
        hint="Pass the optimizer of torch that is in it; without one, loop over the loader itself and call "
        "sampler.advance(len(batch)) after each step.",
    )


def sampler_of(loader: DataLoader[T]) -> ResumableSampler[object]:
    """Raises ConfigError: the loader has no sampler of ours, or gives batches out of order."""
    _check_loader(loader)
    places: list[object] = [loader.sampler, loader.batch_sampler]
    while (inner := getattr(places[-1], "batch_sampler", None)) is not None:  # accelerate's
        places.append(inner)
    for found in (*places, getattr(places[-1], "sampler", None)):
        if isinstance(found, ResumableSampler):
            return found
    innermost = getattr(places[-1], "sampler", loader.sampler)
    raise ConfigError(
        f"the loader has a {type(innermost).__name__}, which does not keep its position.",
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
    name = type(batches).__name__
    if getattr(batches, "batch_sampler", None) is not None:
        raise ConfigError(
            f"the loader's batch_sampler is a {name}, which deals or skips the batches of another.",
            hint="With accelerate leave the loader out of accelerator.prepare, or prepare it for one process "
            "(docs/data.md, Accelerate), and leave out skip_first_batches: the sampler deals and skips.",
        )
    raise ConfigError(
        f"the loader's batch_sampler is a {name}; how many samples its batches have is not known.",
        hint="Pass sampler=sampler and batch_size=n to the loader, or torch's own BatchSampler over it.",
    )


def batches_are_whole(loader: DataLoader[T], sampler: ResumableSampler[object]) -> bool:
    """Whether the loader drops a last batch that is short."""
    batches: object = loader.batch_sampler
    return batches is not sampler and bool(getattr(batches, "drop_last", False))


def _check_loader(loader: DataLoader[T]) -> None:
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            f"a {type(loader).__name__} is no DataLoader of torch: what it deals, skips or fetches ahead is "
            "not known.",
            hint="Pass the DataLoader itself: leave it out of fabric.setup_dataloaders, and move batches in "
            "the loop.",
        )
    kind = loader.__class__  # that of the loader inside, where accelerate wraps one
    if kind.__module__.partition(".")[0] == "torchdata":
        raise ConfigError(
            f"a {kind.__name__} of torchdata keeps a position of its own, which is not that of the model.",
            hint="Use torch's DataLoader: the position is in the state of the sampler.",
        )
    if isinstance(loader.dataset, IterableDataset) and not isinstance(loader.dataset, ResumableIterable):
        raise ConfigError(
            f"the loader reads a {type(loader.dataset).__name__}, an IterableDataset, whose samples have no "
            "positions.",
            hint="Give it state_dict and load_state_dict, and the loader ResumableIterable(dataset). Or take "
            "a dataset with a length and samples by number.",
        )
    if not loader.in_order:
        raise ConfigError(
            "the loader has in_order=False: it gives batches as its workers are ready, and which of them are "
            "in the model is then no position.",
            hint="Leave out in_order=False.",
        )
