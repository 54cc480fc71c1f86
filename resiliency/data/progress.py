# SPDX-License-Identifier: Apache-2.0
"""How far an epoch is, as a value that is equal on all ranks and lives in the checkpoint.

Progress counts *positions* of the epoch's order (see `resiliency.data.order`): the samples before `position`
are in the model, the others are not. It names neither rank nor world size, so the copy of any one rank
restores all, on any number of ranks. It does name what the order was made of (seed, size, shuffle, kind, data
set), since a position in
another order would repeat some samples and leave out others without a word: such a state is refused.

The standard library only.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from resiliency.errors import ConfigError

_VERSION = 1
#: Kinds of shuffle, see `resiliency.data.order`.
KINDS = ("torch", "computed")
#: What a user sees of a field that does not fit, and what it is called there.
_IDENTITY = {
    "size": "size of the data set",
    "seed": "seed",
    "shuffle": "shuffle",
    "kind": "kind of order",
    "plan": "plan of batches",
}


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What an epoch is made of, and how much of it is in the model.

    Args:
        size: positions of an epoch: samples, or batches of a batch sampler.
        kind: of `EpochOrder`.
        dataset: a name of the data, if the program gave one; two names that differ are refused.
        plan: what else the positions depend on (how samples were put into batches); empty for samples.
        share: of the data that the position is in, where each rank has one of its own; equal on all ranks.
        position: positions before it are in the model; from 0 to `size`.
    Raises:
        ConfigError: a number is negative or no whole number, or the position is beyond the size.
    """

    size: int
    seed: int = 0
    shuffle: bool = True
    kind: str = "torch"
    dataset: str = ""
    plan: str = ""
    share: str = ""
    epoch: int = 0
    position: int = 0

    def __post_init__(self) -> None:
        for name in ("size", "epoch", "position"):
            object.__setattr__(self, name, check_whole(name, getattr(self, name)))
        object.__setattr__(self, "seed", check_seed(self.seed))
        check_kind(self.kind)
        if self.position > self.size:
            raise ConfigError(f"position {self.position} is beyond the end of an epoch of {self.size}.")

    @property
    def left(self) -> int:
        """Positions that are not in the model."""
        return self.size - self.position

    @property
    def finished(self) -> bool:
        return self.position == self.size

    def deal(self, rank: int, world_size: int, *, drop_last: bool = False) -> range:
        """The positions of one rank, dealt one by one from `position` on, as torch's DistributedSampler does.

        All ranks get equally many. Positions from `size` on are padding, and mean the start of the same
        order; with `drop_last` there are none, and up to ``world_size - 1`` positions are dealt to no rank.
        """
        each = self.left // world_size if drop_last else -(-self.left // world_size)
        start = self.position + rank
        return range(start, start + each * world_size, world_size)

    def padding(self, world_size: int) -> int:
        """How many positions are dealt twice so that all ranks get equally many: at most ``world_size -
        1``."""
        return -self.left % world_size

    def after(self, positions: int) -> Progress:
        """The progress with `positions` more in the model, padding not counted."""
        # At every step of a training: `replace` would check all fields again, which takes ten times as long.
        moved = object.__new__(Progress)
        moved.__dict__.update(self.__dict__, position=min(self.position + positions, self.size))
        return moved

    def at_epoch(self, epoch: int) -> Progress:
        """The start of another epoch over the same data."""
        return replace(self, epoch=epoch, position=0)

    def to_state(self) -> dict[str, int | bool | str]:
        """Plain values, for a checkpoint."""
        return {"version": _VERSION} | {field.name: getattr(self, field.name) for field in fields(self)}

    def resume(self, state: Mapping[str, object]) -> Progress:
        """The progress that a state of the same data holds.

        Raises:
            ConfigError: the state is of other data, of another order or of a later release, or it is none;
                the text names both sides.
        """
        if state.get("version") != _VERSION:
            raise ConfigError(
                f"the state of the sampler has version {state.get('version')!r}, and this release reads "
                f"version {_VERSION}.",
                hint=f"Its keys are {sorted(map(str, state))}.",
            )
        state = {"share": "", **state}  # of a release that did not say it
        try:
            saved = Progress(**{field.name: state[field.name] for field in fields(self)})  # type: ignore[arg-type]
        except KeyError as missing:
            raise ConfigError(f"the state of the sampler has no {missing}.") from None
        differing = [
            f"{text} {getattr(saved, name)!r} in the state and {getattr(self, name)!r} here"
            for name, text in _IDENTITY.items()
            if getattr(saved, name) != getattr(self, name)
        ]
        if saved.dataset and self.dataset and saved.dataset != self.dataset:
            differing.append(f"data set {saved.dataset!r} in the state and {self.dataset!r} here")
        if differing:
            raise ConfigError(
                "the state of the sampler belongs to another order of samples: " + "; ".join(differing) + ".",
                hint="Construct the sampler as it was when the state was saved, or start the epoch from "
                "its beginning.",
            )
        return replace(self, epoch=saved.epoch, position=saved.position, share=saved.share)


def check_whole(name: str, value: object) -> int:
    """`value`, if it is a whole number of at least 0.

    Raises:
        ConfigError: it is not.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < 0 or isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least 0.")
    return number


def check_seed(value: object) -> int:
    """`value`, if it is a whole number that torch takes for a seed; raises ConfigError if it is not."""
    try:
        seed = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigError(f"the seed is {value!r}; it must be a whole number.") from None
    if not -(2**63) <= seed < 2**64:
        raise ConfigError(f"the seed is {seed}; it must be from -2^63 to 2^64 - 1.")
    return seed


def check_kind(kind: str) -> None:
    """Raises ConfigError if there is no such kind of order."""
    if kind not in KINDS:
        raise ConfigError(f"there is no order of kind {kind!r}; choose one of {', '.join(KINDS)}.")


def check_rank(rank: int, world_size: int) -> None:
    """Raises ConfigError if there is no such rank."""
    if check_whole("the world size", world_size) < 1 or not 0 <= check_whole("the rank", rank) < world_size:
        raise ConfigError(f"there is no rank {rank} in a world of {world_size}; ranks count from 0.")
