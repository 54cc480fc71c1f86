# SPDX-License-Identifier: Apache-2.0
"""Random numbers from a seed and a name, equal on every machine and in every Python version.

The generator: word *i* of the stream (seed, name) is bytes 8(i mod 4) to 8(i mod 4)+8 of
SHA-256(``"{seed}/{name}/{i div 4}"``), read as a big-endian integer.  Rejected was Python's `random`: of it
only `random()` is promised not to change between versions, and the last bit of `log` is the C library's.

- `below(n)`: the word modulo n; words at or above the largest multiple of n are left out.
- `exponential_us(mean)`: -ln((word + 1) / 2**64) x mean, with `decimal`'s logarithm, which is correctly
  rounded by its specification, to 28 digits, and then to whole microseconds.

Streams are independent of each other: a further source of faults changes no draw of the others.
"""

from __future__ import annotations

import hashlib
from decimal import ROUND_HALF_EVEN, Context, Decimal
from fractions import Fraction

_DRAWS_BELOW = 2**64
_PLACES = Context(prec=28, rounding=ROUND_HALF_EVEN)


class Draws:
    """One stream of draws.

    Args:
        seed: of the schedule.
        name: of the stream; another name is another stream.
    """

    def __init__(self, seed: int, name: str) -> None:
        self._prefix = f"{seed}/{name}/"
        self._block = 0
        self._words: list[int] = []

    def word(self) -> int:
        """An integer from 0 to 2**64 - 1."""
        if not self._words:
            digest = hashlib.sha256(f"{self._prefix}{self._block}".encode()).digest()
            self._block += 1
            # Taken from the end of the list.
            self._words = [int.from_bytes(digest[at : at + 8], "big") for at in (24, 16, 8, 0)]
        return self._words.pop()

    def below(self, bound: int) -> int:
        """An integer from 0 to `bound` - 1, each as likely as the others."""
        limit = _DRAWS_BELOW - _DRAWS_BELOW % bound
        while (word := self.word()) >= limit:
            pass
        return word % bound

    def exponential_us(self, mean_us: Fraction) -> int:
        """A waiting time of a Poisson process with this mean, in whole microseconds."""
        mean = _PLACES.divide(Decimal(mean_us.numerator), Decimal(mean_us.denominator))
        share = _PLACES.divide(Decimal(self.word() + 1), Decimal(_DRAWS_BELOW))
        wait = _PLACES.multiply(_PLACES.minus(_PLACES.ln(share)), mean)
        return int(wait.to_integral_value(ROUND_HALF_EVEN))
