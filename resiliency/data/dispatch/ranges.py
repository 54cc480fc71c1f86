# SPDX-License-Identifier: Apache-2.0
"""What there is to read, as ranges, each of which is named once and in the same order after every restart.

A source is a frozen value. It names the range that follows a *cursor*, plain numbers which the book of
ranges (`resiliency.data.dispatch.book`) keeps in the checkpoint. So no list of ranges is stored, however
many there are.

- `SampleRanges`: samples 0 to `size` of a dataset with a length.
- `TextRanges`: bytes of files of records, such as lines, whose number is not known.
- `PartitionRanges`: partitions that grow, such as those of a message log.

The standard library only.
"""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from typing import Protocol, TypeAlias

from resiliency.data.progress import check_kind, check_seed, check_whole
from resiliency.errors import ConfigError, DataError

#: Plain values, for JSON: what was named before.
Cursor: TypeAlias = dict[str, int]
Plain: TypeAlias = dict[str, object]


@dataclass(frozen=True)
class SampleRange:
    """`start` to `stop` of one partition in one epoch.

    Units: positions of the epoch's order (`SampleRanges`), bytes of a file (`TextRanges`) or offsets
    (`PartitionRanges`).
    """

    start: int
    stop: int
    epoch: int = 0
    partition: str = ""

    def __post_init__(self) -> None:
        for name in ("start", "stop", "epoch"):
            check_whole(name, getattr(self, name))
        if not isinstance(self.partition, str):
            raise ConfigError(f"the partition is {self.partition!r}; it must be a text.")
        if self.stop <= self.start:
            raise ConfigError(f"a range from {self.start} to {self.stop} is empty.")

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        of = f" of {self.partition}" if self.partition else ""
        return f"{self.start}..{self.stop}{of} in epoch {self.epoch}"

    def first(self, count: int) -> SampleRange:
        """The first `count` of it."""
        return replace(self, stop=self.start + count)

    def to_plain(self) -> list[int | str]:
        return [self.start, self.stop, self.epoch, self.partition]

    @classmethod
    def of_plain(cls, plain: object) -> SampleRange:
        """Raises ConfigError: that is no range."""
        if not isinstance(plain, list) or len(plain) != 4:
            raise ConfigError(f"{plain!r} is no range: it must be [start, stop, epoch, partition].")
        return cls(*plain)


class RangeSource(Protocol):
    """Names ranges, none twice; frozen."""

    def identity(self) -> Plain:
        """Plain values that fix which range has which cursor; another identity is another order."""
        ...

    def next_range(self, cursor: Cursor) -> tuple[SampleRange, Cursor] | None:
        """The range after a cursor (the first is {}), and the cursor after it; None: there is none now."""
        ...

    def ended(self, cursor: Cursor) -> bool:
        """Whether there never will be a range after this cursor."""
        ...


@dataclass(frozen=True, kw_only=True)
class SampleRanges:
    """Ranges of `range_size` samples of a dataset.

    Args:
        epochs: how often all samples come; None: without end.
        order: ``sequential``; ``ranges``: ranges come in random order, and each is read in sequence;
            ``samples``: positions are those of `EpochOrder` with `seed` and `kind`: all samples are shuffled.
        dataset: a name of the data; a checkpoint of another name is refused.
    Raises:
        ConfigError: a number or a name is out of range.
    """

    size: int
    range_size: int
    epochs: int | None = 1
    order: str = "ranges"
    seed: int = 0
    kind: str = "torch"
    dataset: str = ""

    def __post_init__(self) -> None:
        check_whole("size", self.size)
        _check_sizes(self.range_size, self.epochs)
        check_seed(self.seed)
        check_kind(self.kind)
        if self.order not in ("sequential", "ranges", "samples"):
            raise ConfigError(f"there is no order {self.order!r}; choose sequential, ranges or samples.")

    def identity(self) -> Plain:
        return {"source": "samples"} | {name: getattr(self, name) for name in self.__dataclass_fields__}

    def next_range(self, cursor: Cursor) -> tuple[SampleRange, Cursor] | None:
        number = _next_number(cursor, -(-self.size // self.range_size), self.epochs)
        if number is None:
            return None
        epoch, place = number
        if self.order == "ranges":
            place = _shuffled(-(-self.size // self.range_size), self.seed, epoch)[place]
        start = place * self.range_size
        found = SampleRange(start, min(start + self.range_size, self.size), epoch)
        return found, {"ranges": cursor.get("ranges", 0) + 1}

    def ended(self, cursor: Cursor) -> bool:
        return self.next_range(cursor) is None


@dataclass(frozen=True, kw_only=True)
class TextRanges:
    """Ranges of about `range_bytes` of files of records; a record is of the range that has its first byte.

    The files must not change while they are read.

    Args:
        files: path and size in bytes of each, see `sizes_of`.
        shuffle: whether the ranges come in random order.
    Raises:
        ConfigError: a number is out of range, or a file is named twice.
    """

    files: tuple[tuple[str, int], ...]
    range_bytes: int
    epochs: int | None = 1
    shuffle: bool = True
    seed: int = 0
    dataset: str = ""
    #: Number of ranges in the files before each, and in all.
    _before: list[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_sizes(self.range_bytes, self.epochs)
        check_seed(self.seed)
        if len({path for path, _ in self.files}) < len(self.files):
            raise ConfigError("a file is named twice.")
        counts = (-(-check_whole(f"size of {path}", size) // self.range_bytes) for path, size in self.files)
        object.__setattr__(self, "_before", [0, *accumulate(counts)])

    def identity(self) -> Plain:
        files = hashlib.blake2b(repr(self.files).encode(), digest_size=16).hexdigest()
        named = {
            name: getattr(self, name) for name in ("range_bytes", "epochs", "shuffle", "seed", "dataset")
        }
        return {"source": "text", "files": files, **named}

    def next_range(self, cursor: Cursor) -> tuple[SampleRange, Cursor] | None:
        number = _next_number(cursor, self._before[-1], self.epochs)
        if number is None:
            return None
        epoch, place = number
        if self.shuffle:
            place = _shuffled(self._before[-1], self.seed, epoch)[place]
        file = bisect_right(self._before, place) - 1
        path, size = self.files[file]
        start = (place - self._before[file]) * self.range_bytes
        found = SampleRange(start, min(start + self.range_bytes, size), epoch, path)
        return found, {"ranges": cursor.get("ranges", 0) + 1}

    def ended(self, cursor: Cursor) -> bool:
        return self.next_range(cursor) is None


@dataclass(frozen=True, kw_only=True)
class PartitionRanges:
    """Ranges of at most `range_size` of partitions that grow, in turn.

    Args:
        stops: how far each partition is known to reach.
        closed: whether nothing will be added.
    Raises:
        ConfigError: a number is out of range.
    """

    range_size: int
    dataset: str = ""
    stops: Mapping[str, int] = field(default_factory=dict)
    closed: bool = False

    def __post_init__(self) -> None:
        _check_sizes(self.range_size, None)
        for name, stop in self.stops.items():
            check_whole(f"the end of partition {name!r}", stop)

    def identity(self) -> Plain:
        return {"source": "partitions", "range_size": self.range_size, "dataset": self.dataset}

    def extended(self, stops: Mapping[str, int], *, closed: bool = False) -> PartitionRanges:
        """The same with partitions that reach farther, or new ones.

        Raises:
            DataError: a partition became shorter, so that offsets have another meaning.
        """
        for name, stop in stops.items():
            check_whole(f"the end of partition {name!r}", stop)
        if self.closed and any(stop > self.stops.get(name, 0) for name, stop in stops.items()):
            raise DataError("partitions grew after they were closed.")
        for name, stop in stops.items():
            if stop < self.stops.get(name, 0):
                raise DataError(
                    f"partition {name!r} reaches {stop}, and reached {self.stops[name]} before.",
                    hint="A partition that was made again is another one: give it another name.",
                )
        return replace(self, stops={**self.stops, **stops}, closed=self.closed or closed)

    def next_range(self, cursor: Cursor) -> tuple[SampleRange, Cursor] | None:
        waiting = [name for name, stop in self.stops.items() if cursor.get(name, 0) < stop]
        if not waiting:
            return None
        # The one of which least was named: fair, and a function of the cursor alone.
        name = min(waiting, key=lambda name: (cursor.get(name, 0), name))
        start = cursor.get(name, 0)
        stop = min(start + self.range_size, self.stops[name])
        return SampleRange(start, stop, 0, name), {**cursor, name: stop}

    def ended(self, cursor: Cursor) -> bool:
        return self.closed and self.next_range(cursor) is None


def coalesced(ranges: Iterable[SampleRange]) -> list[SampleRange]:
    """The same ranges in order, neighbours joined."""
    found: list[SampleRange] = []
    for part in sorted(ranges, key=lambda r: (r.epoch, r.partition, r.start)):
        last = found[-1] if found else None
        if last and (last.epoch, last.partition, last.stop) == (part.epoch, part.partition, part.start):
            found[-1] = replace(last, stop=part.stop)
        else:
            found.append(part)
    return found


def _check_sizes(range_size: int, epochs: int | None) -> None:
    if check_whole("the size of a range", range_size) < 1:
        raise ConfigError("the size of a range is 0; it must be at least 1.")
    if epochs is not None:
        check_whole("epochs", epochs)


def _next_number(cursor: Cursor, in_epoch: int, epochs: int | None) -> tuple[int, int] | None:
    """Epoch, and number in the epoch, of the range after a cursor."""
    done = cursor.get("ranges", 0)
    if not in_epoch or (epochs is not None and done >= epochs * in_epoch):
        return None
    return divmod(done, in_epoch)


@lru_cache(maxsize=2)  # of an epoch that ends and the one that begins
def _shuffled(count: int, seed: int, epoch: int) -> Sequence[int]:
    order = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)  # noqa: S311 - an order, no secret
    return order
