# SPDX-License-Identifier: Apache-2.0
"""The order in which an epoch takes its samples, as a pure function of seed and epoch.

An order maps *positions* (0 is taken first) to *indexes* of the dataset. Equal arguments give equal orders on
every rank, in every process and after every restart, so that no order is ever stored: a position is enough.

Two kinds of shuffle:

- ``torch``: the permutation of `torch.utils.data.DistributedSampler`, bit for bit. 8 bytes for each
  sample of the dataset in every rank, made once for each epoch.
- ``computed``: a permutation that is computed where it is asked for, in constant memory, for 10^8 samples and
  more. A Feistel network over Z_a x Z_b with a * b just above the size; what falls beyond the size is mapped
  again until it does not. Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002.
"""

from __future__ import annotations

import hashlib
import math
import struct
from functools import lru_cache

import torch
from torch import Tensor

from resiliency.data.progress import check_kind, check_seed, check_whole

#: Fewer rounds leave visible structure in small datasets; more cost time only.
_ROUNDS = 8
# Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators" (2014): the finalizer of SplitMix64,
# with its constants as the signed numbers that int64 tensors hold.
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_LOW_34, _LOW_37, _LOW_33 = (1 << 34) - 1, (1 << 37) - 1, (1 << 33) - 1
_LOW_62 = (1 << 62) - 1


class EpochOrder:
    """The order of one epoch. The permutation of kind ``torch`` is made at the first look, and kept.

    Args:
        size: samples in the dataset.
        epoch: each has an order of its own if `shuffle`.
        seed: equal on all ranks.
        shuffle: without it the order is that of the dataset.
        kind: ``torch`` or ``computed``, see the module.
    Raises:
        ConfigError: a number is negative or no whole number, the seed is none of torch, or the kind is
            unknown.
    """

    def __init__(
        self, size: int, *, epoch: int = 0, seed: int = 0, shuffle: bool = True, kind: str = "torch"
    ) -> None:
        self.size = check_whole("size", size)
        self.epoch = check_whole("epoch", epoch)
        self.seed = check_seed(seed)
        self.shuffle = shuffle
        check_kind(kind)
        self.kind = kind
        self._permutation: Tensor | None = None

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, position: int) -> int:
        """The index at one position, which may be beyond the size: the order starts over."""
        return int(self.at(torch.tensor([position]))[0])

    def at(self, positions: Tensor) -> Tensor:
        """The indexes at these positions.

        Shapes: (n,) int64 to (n,) int64. A position beyond the size is that many from the start: the order
            wraps.
        """
        positions = positions % self.size if positions.numel() else positions
        if not self.shuffle:
            return positions
        if self.kind == "computed":
            return _computed(self.size, positions, _keys(self.seed, self.epoch).unsqueeze(1))
        if self._permutation is None:
            seed = self.seed + self.epoch
            generator = torch.Generator().manual_seed(seed if seed < 2**64 else seed - 2**64)
            self._permutation = torch.randperm(self.size, generator=generator)
        return self._permutation[positions]


def indexes_of_epochs(size: int, seed: int, epochs: Tensor, positions: Tensor) -> Tensor:
    """What `EpochOrder` of kind ``computed`` gives, at positions that are each of an epoch of its own.

    Shapes: epochs and positions (n,) int64, positions below `size`; returns (n,) int64.
    """
    distinct, which = torch.unique(epochs, return_inverse=True)
    if not len(distinct):
        return positions
    keys = torch.stack([_keys(seed, epoch) for epoch in distinct.tolist()], dim=1)
    return _computed(size, positions, keys if len(distinct) == 1 else keys[:, which])


def _computed(size: int, positions: Tensor, keys: Tensor) -> Tensor:
    """Shapes: positions (n,), keys (rounds, n) or (rounds, 1)."""
    found = _encrypt(size, positions, keys)
    while bool((outside := found >= size).any()):
        found[outside] = _encrypt(size, found[outside], keys if keys.shape[1] == 1 else keys[:, outside])
    return found


def _encrypt(size: int, values: Tensor, keys: Tensor) -> Tensor:
    """One pass of the network: a permutation of all lines x columns cells."""
    # Over a square-like grid of at least `size` cells: at most 2 * sqrt(size) too many.
    columns = max(1, math.isqrt(max(0, size - 1)) + 1)
    lines = max(1, -(-size // columns))
    left, right = values // columns, values % columns
    for number, key in enumerate(keys):
        if number % 2:
            right = (right + _mix(left + key)) % columns
        else:
            left = (left + _mix(right + key)) % lines
    return left * columns + right


@lru_cache(maxsize=4096)
def _keys(seed: int, epoch: int) -> Tensor:
    return torch.tensor([_hash(seed, epoch, number) for number in range(_ROUNDS)])


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """A seed for whatever is random about one sample in one epoch, on any rank and in any worker.

    Augmentation that draws from ``torch.Generator().manual_seed(sample_seed(...))`` does not depend on the
    world size, nor on how often the job was restarted.

    Returns: 0 to 2^62 - 1.
    """
    return _hash(seed, epoch, index)


def _hash(*numbers: int) -> int:
    plain = struct.pack(f"<{len(numbers)}Q", *(number % 2**64 for number in numbers))
    return int.from_bytes(hashlib.blake2b(plain, digest_size=8).digest(), "little") & _LOW_62


def _mix(values: Tensor) -> Tensor:
    """Numbers from 0 to 2^62 - 1 that look random; int64 multiplication wraps, and `>>` keeps the sign."""
    values = (values ^ ((values >> 30) & _LOW_34)) * _MIX_1
    values = (values ^ ((values >> 27) & _LOW_37)) * _MIX_2
    return (values ^ ((values >> 31) & _LOW_33)) & _LOW_62
