# SPDX-License-Identifier: Apache-2.0
"""What requests, reports and queues speak of: one try to save a step, as far as it concerns one tier."""

from __future__ import annotations

from typing import NamedTuple


class TierTry(NamedTuple):
    """Of one tier, they sort as ranks make them.

    `number`: of the try, from 1; the same on all ranks.
    """

    step: int
    number: int
    tier: str
