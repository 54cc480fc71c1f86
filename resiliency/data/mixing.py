# SPDX-License-Identifier: Apache-2.0
"""Several datasets in fixed proportions, as one dataset whose item at a position is a pure function.

Positions come in blocks. In each block every source has its exact part of the positions, in an order that is
drawn from the seed and the number of the block. The k-th position of a source is the k-th sample of that
source, which is taken epoch after epoch, each in an order of its own. So a position is all there is to know:
nothing is drawn while training, no source has an iterator that would have to be saved, and any number of
ranks and workers goes on from any position.

    mixture = MixedDataset({"web": (web, 7), "code": (code, 3)}, samples=1_000_000)
    sampler = MixedSampler(mixture)
    loader = DataLoader(mixture, batch_size=32, sampler=sampler, num_workers=4)

Memory: the blocks of one batch. The orders of the sources are computed where they are looked at (`EpochOrder`
of kind ``computed``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from fractions import Fraction
from numbers import Rational
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from resiliency.data.global_batch import GlobalBatch
from resiliency.data.order import EpochOrder, indexes_of_epochs, sample_seed
from resiliency.data.progress import Progress, check_seed, check_whole
from resiliency.data.samplers import InterruptableDistributedSampler
from resiliency.errors import ConfigError

T = TypeVar("T")
Item = TypeVar("Item", covariant=True)

#: Blocks that are tried, in turn, for weights that no small block gives exactly.
_BLOCKS = (1_000, 10_000, 100_000)
#: How far from its weight a part may be in such a block.
_ROUNDING = Fraction(1, 20)


class MapStyleDataset(Protocol[Item]):
    """A dataset with a length."""

    def __getitem__(self, index: int, /) -> Item: ...
    def __len__(self) -> int: ...


class MixedDataset(Dataset[T], Generic[T]):
    """A mixture of datasets by weight, to be taken in order through a `MixedSampler`.

    Args:
        sources: name -> dataset and weight. Weights are relative; a float means its decimal, so 0.7 and 0.3
            are 7 and 3 of 10.
        samples: of an epoch of the mixture. The next epoch goes on in each source where this one ends.
        seed: of the order in the blocks and in the sources.
        shuffle: take each source in another order in each of its epochs; without it in its own order.
        block: positions in which each source has its exact part. None means the smallest that gives the
            weights exactly, up to 1,000; else 1,000, 10,000 or 100,000: the first that gives each within a
            twentieth of itself.
    Attributes:
        parts: name -> positions of a source in a block.
        block: positions of a block.
        identity: what the mixture is made of, in words; `MixedSampler` has it in its state.
    Raises:
        ConfigError: a source is empty, a weight is no positive number, or no block gives it a position.
    """

    def __init__(
        self,
        sources: Mapping[str, tuple[MapStyleDataset[T], float | Fraction]],
        *,
        samples: int,
        seed: int = 0,
        shuffle: bool = True,
        block: int | None = None,
    ) -> None:
        if not sources:
            raise ConfigError("a mixture of no sources has no samples.")
        self._sources = [source for source, _ in sources.values()]
        self._sizes = [_size(name, source) for name, (source, _) in sources.items()]
        self._samples = check_whole("samples", samples)
        self._seed, self._shuffle = check_seed(seed), shuffle
        weights = {name: _exact(name, weight) for name, (_, weight) in sources.items()}
        self.parts = _parts(weights, block)
        self.block = sum(self.parts.values())
        self._counts = torch.tensor(list(self.parts.values()))
        self._planned: tuple[Tensor, Tensor, Tensor] | None = None
        held = (
            f"{name} {part} (of {size} samples)"
            for (name, part), size in zip(self.parts.items(), self._sizes, strict=True)
        )
        order = "" if shuffle else ", not shuffled"
        self.identity = f"mixture in blocks of {self.block}: {', '.join(held)}; seed {self._seed}{order}"

    def __len__(self) -> int:
        """Samples of an epoch."""
        return self._samples

    def __iter__(self) -> Iterator[T]:
        """The samples of the first epoch."""
        return (self[position] for position in range(self._samples))

    def __getitem__(self, position: int) -> T:
        """The sample at a position; those from ``len`` on are of the later epochs."""
        return self.__getitems__([position])[0]

    def __getitems__(self, positions: Sequence[int]) -> list[T]:
        """The samples at these positions, found in one go for each source; DataLoaders call it."""
        found: list[T | None] = [None] * len(positions)
        sources, numbers = self._places(torch.tensor(positions, dtype=torch.int64))
        for source in _distinct(sources):
            (where,) = torch.nonzero(sources == source, as_tuple=True)
            indexes = self._indexes(source, numbers[where])
            for place, index in zip(where.tolist(), indexes.tolist(), strict=True):
                found[place] = self._sources[source][index]
        return found  # type: ignore[return-value]

    def counts(self, samples: int) -> dict[str, int]:
        """How many of the first so many samples are from each source."""
        blocks, rest = divmod(check_whole("samples", samples), self.block)
        found = blocks * self._counts
        last = torch.arange(blocks * self.block, blocks * self.block + rest)
        found += torch.bincount(self._places(last)[0], minlength=len(self.parts))
        return dict(zip(self.parts, found.tolist(), strict=True))

    def _places(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Source of each position, and how many of that source come before it. Shapes: (n,) int64."""
        if bool((positions < 0).any()):
            raise IndexError(f"a mixture has no position {int(positions.min())}")
        sources, numbers = torch.empty_like(positions), torch.empty_like(positions)
        blocks = positions // self.block
        distinct = torch.unique(blocks)
        for planned in distinct.split(max(1, _BLOCKS[-1] // self.block)):
            here = (blocks >= planned[0]) & (blocks <= planned[-1]) if len(planned) < len(distinct) else ...
            plan, of_source, number = self._plan(planned)
            line, at = torch.searchsorted(plan, blocks[here]), positions[here] % self.block
            sources[here] = of_source[line, at]
            numbers[here] = number[line, at] + blocks[here] * self._counts[of_source[line, at]]
        return sources, numbers

    def _plan(self, blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Blocks that have these among them, the source of each of their positions, and how many of that
        source come before it in the block.

        Shapes: blocks (n,), ascending; returns (m,), (m, block), (m, block).
        """
        if self._planned is None or not bool(torch.isin(blocks, self._planned[0]).all()):
            generator = torch.Generator()
            drawn = torch.empty(len(blocks), self.block, dtype=torch.int64)
            for line, block in enumerate(blocks.tolist()):
                generator.manual_seed(sample_seed(self._seed, 0, block))
                torch.randperm(self.block, generator=generator, out=drawn[line])
            sources = torch.repeat_interleave(torch.arange(len(self.parts)), self._counts)[drawn]
            before = torch.repeat_interleave(self._counts.cumsum(0) - self._counts, self._counts)
            numbers = torch.empty_like(sources)
            in_turn = (torch.arange(self.block) - before).expand_as(sources)
            numbers.scatter_(1, torch.argsort(sources, dim=1, stable=True), in_turn)
            self._planned = blocks, sources, numbers
        return self._planned

    def _indexes(self, source: int, numbers: Tensor) -> Tensor:
        """Which samples of a source its positions of these numbers are."""
        size = self._sizes[source]
        epochs, places = numbers // size, numbers % size
        if not self._shuffle:
            return places
        # No stream of random numbers is that of the blocks, or of another source.
        return indexes_of_epochs(size, sample_seed(self._seed, 1, source), epochs, places)


class MixedSampler(InterruptableDistributedSampler):
    """Deals the positions of a mixture in order; the epochs are one sequence, which the sources go through.

    The state names what the mixture is made of: that of another one is refused.

    Args:
        dataset: the mixture that the loader loads.
        num_replicas, rank, drop_last, global_batch: as in `InterruptableDistributedSampler`.
    Raises:
        ConfigError: the dataset is no mixture.
    """

    dataset: MixedDataset[object]

    def __init__(
        self,
        dataset: MixedDataset[object],
        num_replicas: int | None = None,
        rank: int | None = None,
        drop_last: bool = False,
        *,
        global_batch: GlobalBatch | int | None = None,
    ) -> None:
        if not isinstance(dataset, MixedDataset):
            raise ConfigError(
                f"a {type(dataset).__name__} is no MixedDataset, whose positions go on beyond its length.",
                hint="Put the mixture itself into the sampler and the loader; take subsets of its sources.",
            )
        super().__init__(
            dataset, num_replicas, rank, shuffle=False, drop_last=drop_last, global_batch=global_batch
        )
        self._place(replace(self.progress, plan=dataset.identity))

    def counts(self) -> dict[str, int]:
        """How many samples of each source are in the model, over all ranks and epochs."""
        now = self.progress
        return self.dataset.counts(now.epoch * now.size + now.position)

    def order_of(self, now: Progress) -> EpochOrder:
        """The positions of an epoch."""
        return _Following(now.size, epoch=now.epoch, shuffle=False)


class _Following(EpochOrder):
    """The positions of an epoch, counted from the start of the first one."""

    def at(self, positions: Tensor) -> Tensor:
        return super().at(positions) + self.epoch * self.size


def _distinct(values: Tensor) -> list[int]:
    return sorted(set(values.tolist()))


def _size(name: str, source: Sized) -> int:
    if not len(source):
        raise ConfigError(f"the source {name!r} of a mixture is empty.")
    return len(source)


def _exact(name: str, weight: float | Fraction) -> Fraction:
    try:
        found = Fraction(weight) if isinstance(weight, Rational) else Fraction(repr(float(weight)))
    except (TypeError, ValueError):  # ValueError: infinite, not a number, or another text
        found = Fraction(0)
    if found <= 0:
        raise ConfigError(
            f"the weight of {name!r} is {weight!r}; it must be a number above 0.",
            hint="Leave a source out that is to give nothing.",
        )
    return found


def _parts(weights: Mapping[str, Fraction], block: int | None) -> dict[str, int]:
    """How many positions of a block each source has."""
    total = sum(weights.values())
    shares = {name: weight / total for name, weight in weights.items()}
    exact = math.lcm(*(share.denominator for share in shares.values()))
    if block is None and exact <= _BLOCKS[0]:
        block = exact
    for size in _BLOCKS if block is None else (check_whole("block", block),):
        parts = _rounded(shares, size)
        is_fair = all(
            abs(parts[name] - share * size) <= _ROUNDING * share * size for name, share in shares.items()
        )
        if all(parts.values()) and (is_fair or block is not None):
            return parts
    rarest = min(shares, key=lambda name: shares[name])
    raise ConfigError(
        f"{rarest!r} has {float(shares[rarest]):.3g} of the weight: it has no fair part of a block of "
        f"{size} positions.",
        hint="Raise its weight, or pass a larger block.",
    )


def _rounded(shares: Mapping[str, Fraction], size: int) -> dict[str, int]:
    """Whole parts of `size` that are nearest to the shares: the largest remainders are rounded up."""
    parts = {name: math.floor(share * size) for name, share in shares.items()}
    by_remainder = sorted(shares, key=lambda name: parts[name] - shares[name] * size)
    for name in by_remainder[: size - sum(parts.values())]:
        parts[name] += 1
    return parts
