# SPDX-License-Identifier: Apache-2.0
"""Tasks of an event loop that end when they are told to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def end_tasks(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks, and wait until they have ended; what they raise is dropped."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


async def first_of(*work: Coroutine[Any, Any, None]) -> None:
    """Run all until the first ends, and end the others; raises what it raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await end_tasks(tasks)


async def wait_for(work: Awaitable[T], timeout_s: float | None) -> T:
    """`asyncio.wait_for` that never loses a cancellation.

    Before Python 3.12 that one returns, and its task goes on for ever, where the cancellation comes in the
    moment in which `work` ends (https://github.com/python/cpython/issues/86296).

    Raises:
        asyncio.TimeoutError: `work` was not done after `timeout_s`; it is cancelled.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=timeout_s)
    except asyncio.CancelledError:
        await end_tasks([task])
        raise
    if not task.done():
        await end_tasks([task])
        if task.cancelled():
            raise asyncio.TimeoutError
    return task.result()
