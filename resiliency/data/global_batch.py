# SPDX-License-Identifier: Apache-2.0
"""An optimizer step of a fixed number of samples, on any number of ranks.

The global batch is the constant, the world size a detail. Each step takes a *row* of `samples` positions of
the epoch's order. The row is split among the ranks in order, their counts differ by at most one, and each
rank works its share off in micro-batches of at most `micro` samples. A micro-batch of n of the row's t
samples has the weight

    n * world_size / t

so that the mean over the ranks, which DDP and FSDP2 make of gradients, is the gradient of the mean over the
row, also where shares are unequal and where the last row of an epoch is short.

With a `RampUp` the first rows are smaller. The size of a row follows from the samples that were consumed
before it, so it is the same on any number of ranks and after any restart, and no state is needed for it.

All ranks run equally many micro-batches: a rank that has one less runs its first one sample of the row again
with weight 0. The others are at work meanwhile, so that costs no time, and no rank is ever missing from a
collective, whether that is in the backward of the last micro-batch (DDP) or in every forward (FSDP2).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import nn

from resiliency.data.progress import check_rank, check_whole
from resiliency.errors import ConfigError

T = TypeVar("T", covariant=True)
Batch = TypeVar("Batch")


@dataclass(frozen=True)
class MicroBatch:
    """Positions `start` to `stop` of a row; `weight` is the factor of their mean loss before backward."""

    start: int
    stop: int
    weight: float

    @property
    def samples(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class RampUp:
    """Optimizer steps that grow from `start` samples by `increment` at a time, as Megatron's
    ``--rampup-batch-size START INCREMENT SAMPLES`` does.

    Args:
        start: samples of the first step.
        increment: how many more there are in each stage; the last one reaches the global batch.
        samples: that are consumed below the global batch; each stage has an equal part of them, and the step
            in which it ends is still of its size.
    Raises:
        ConfigError: a number is below 1.
    """

    start: int
    increment: int
    samples: int

    def __post_init__(self) -> None:
        for name in ("start", "increment", "samples"):
            if check_whole(f"{name} of the ramp-up", getattr(self, name)) < 1:
                raise ConfigError(f"{name} of the ramp-up is 0; it must be at least 1.")


@dataclass(frozen=True)
class GlobalBatch:
    """How many samples an optimizer step is made of, and how many of them a rank takes at once.

    Args:
        samples: of one optimizer step, over all ranks.
        micro: most samples of one forward and backward of one rank; 0 means its whole share. The gradients
            are the same for each value, up to rounding.
        ramp_up: how the first steps grow to `samples`; None means that all are of one size.
    Raises:
        ConfigError: `samples` is below 1, or `micro` below 0, or the ramp-up does not reach `samples`.
    """

    samples: int
    micro: int = 0
    ramp_up: RampUp | None = None

    def __post_init__(self) -> None:
        check_whole("micro", self.micro)
        if check_whole("the global batch", self.samples) < 1:
            raise ConfigError("the global batch has 0 samples; an optimizer step is made of at least one.")
        ramp = self.ramp_up
        if ramp and (ramp.start >= self.samples or (self.samples - ramp.start) % ramp.increment):
            raise ConfigError(
                f"a ramp-up from {ramp.start} samples by {ramp.increment} does not reach the global batch of "
                f"{self.samples}.",
                hint="samples - start must be a multiple of increment, and above 0.",
            )

    def rows(self, consumed: int, left: int, *, drop_last: bool = False) -> Iterator[tuple[int, int]]:
        """The sizes of the next rows: pairs of a size, and how many rows in turn have it.

        Args:
            consumed: samples before the first row, of all epochs.
            left: samples to split; the last row is short where they do not fill it.
            drop_last: leave out a row that is short.
        """
        while left:
            size, more = self._stage(consumed)
            count = left // size if more is None else min(left // size, -(-more // size))
            if not count:
                if not drop_last:
                    yield left, 1
                return
            yield size, count
            consumed += size * count
            left -= size * count

    def _stage(self, consumed: int) -> tuple[int, int | None]:
        """Samples of a row that begins here, and how many samples on a row of the next size may begin."""
        ramp = self.ramp_up
        if ramp is None or consumed >= ramp.samples:
            return self.samples, None
        stages = (self.samples - ramp.start) // ramp.increment
        stage = consumed * stages // ramp.samples
        return ramp.start + stage * ramp.increment, -(-(stage + 1) * ramp.samples // stages) - consumed

    def share(self, rank: int, world_size: int, row: int | None = None) -> range:
        """The positions of one rank in a row; the first ranks have one more where the row cannot be split
        evenly.

        Args:
            row: samples of the row; fewer than `samples` only at the end of an epoch. None means a full row.
        Raises:
            ConfigError: there is no such rank.
        """
        check_rank(rank, world_size)
        each, more = divmod(self.samples if row is None else row, world_size)
        start = rank * each + min(rank, more)
        return range(start, start + each + (rank < more))

    def micro_count(self, world_size: int, row: int) -> int:
        """How many micro-batches each rank runs for a row."""
        most = len(self.share(0, world_size, row))
        return -(-most // (self.micro or most))

    def run_samples(self, rank: int, world_size: int, row: int) -> int:
        """Samples that one rank runs for a row, those of weight 0 too."""
        most, mine = len(self.share(0, world_size, row)), len(self.share(rank, world_size, row))
        micro = self.micro or most
        return mine + -(-most // micro) - -(-mine // micro)

    def micro_batches(self, rank: int, world_size: int, row: int | None = None) -> tuple[MicroBatch, ...]:
        """What one rank runs for a row: equally many micro-batches on all ranks, at least one.

        Args:
            row: as in `share`.
        """
        row = self.samples if row is None else row
        most = len(self.share(0, world_size, row))
        micro = self.micro or most
        mine = self.share(rank, world_size, row)
        starts = range(mine.start, mine.stop, micro)
        stops = (min(start + micro, mine.stop) for start in starts)
        found = [
            MicroBatch(start, stop, (stop - start) * world_size / row)
            for start, stop in zip(starts, stops, strict=True)
        ]
        # Shares differ by at most one sample, so this is at most one micro-batch.
        missing = -(-most // micro) - len(found)
        return (*found, *[MicroBatch(0, 1, 0.0)] * missing)


class Step(Protocol[T]):
    """The micro-batches of one optimizer step: pairs of data and weight, and how many there are."""

    def __iter__(self) -> Iterator[tuple[T, float]]: ...
    def __len__(self) -> int: ...


def accumulate(model: nn.Module, step: Step[Batch]) -> Iterator[tuple[Batch, float]]:
    """The micro-batches of a step, with gradients reduced over the ranks once: in the last one's backward.

        for batch, weight in accumulate(model, step):
            (loss_of(model(batch)) * weight).backward()
        optimizer.step()

    The loss is to be a mean over the samples of its micro-batch. Between the first and the last backward, DDP
    keeps gradients of the model's size as always; FSDP2 keeps them unsharded, which takes the memory of a
    whole copy.

    Args:
        model: DDP, FSDP2 (`torch.distributed.fsdp.fully_shard`), or a module on a single rank.
        step: of `advancing_steps`, or a list of pairs.
    """
    count = len(step)
    for number, (batch, weight) in enumerate(step, 1):
        with _reduced(model, last=number == count):
            yield batch, weight


def _reduced(model: nn.Module, *, last: bool) -> AbstractContextManager[object]:
    """Whether a backward inside reduces gradients. By method: importing FSDP2 for its class costs a
    second."""
    fsdp2 = getattr(model, "set_requires_gradient_sync", None)
    if fsdp2 is not None:
        return _fsdp2_reduced(model, last=last)
    no_sync = getattr(model, "no_sync", None)
    if last or no_sync is None:
        return nullcontext()
    context: AbstractContextManager[object] = no_sync()
    return context


@contextmanager
def _fsdp2_reduced(model: nn.Module, *, last: bool) -> Iterator[None]:
    model.set_requires_gradient_sync(last)  # type: ignore[operator]
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)  # type: ignore[operator]
