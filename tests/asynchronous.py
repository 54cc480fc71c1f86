# SPDX-License-Identifier: Apache-2.0
"""Tests that run an event loop: a deadline for the whole of one, and waiting for what tells nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tests.waiting import WAIT_S

T = TypeVar("T")
#: For all steps of a test together.
TEST_S = 3 * WAIT_S


def run(work: Awaitable[T]) -> T:
    """What `work` returns, in a loop of its own."""

    async def bounded() -> T:
        return await asyncio.wait_for(work, TEST_S)

    return asyncio.run(bounded())


async def until(look: Callable[[], T | None], otherwise: str, *, timeout_s: float = WAIT_S) -> T:
    """Look until something is true; returns what was seen.

    Raises:
        AssertionError: it was not within `timeout_s`.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while not (seen := look()):
        assert loop.time() < deadline, f"{otherwise} after {timeout_s:g} s"
        await asyncio.sleep(0.01)
    return seen
