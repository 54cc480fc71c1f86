# SPDX-License-Identifier: Apache-2.0
"""Waits of an event loop: none outlives its cancellation."""

from __future__ import annotations

import asyncio

import pytest

from resiliency.tasks import end_tasks, wait_for


def test_a_cancellation_that_comes_as_the_work_ends_is_not_lost() -> None:
    async def main() -> list[str]:
        loop = asyncio.get_running_loop()
        work: asyncio.Future[str] = loop.create_future()
        went_on: list[str] = []

        async def waits() -> None:
            went_on.append(await wait_for(work, 60.0))

        task = asyncio.ensure_future(waits())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        work.set_result("done")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return went_on

    assert asyncio.run(main()) == []


def test_work_that_is_late_is_cancelled_and_what_it_gives_after_all_is_not_lost() -> None:
    async def main() -> None:
        never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with pytest.raises(asyncio.TimeoutError):
            await wait_for(never, 0.0)
        assert never.cancelled()

        async def late() -> str:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return "late"
            return ""

        assert await wait_for(late(), 0.01) == "late"

    asyncio.run(main())


def test_a_wait_that_is_cancelled_takes_its_work_with_it() -> None:
    async def main() -> None:
        ended: list[int] = []

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(1)

        task = asyncio.ensure_future(wait_for(work(), 60.0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await end_tasks([task])
        assert task.cancelled()
        assert ended == [1]

    asyncio.run(main())


def test_errors_of_the_work_come_out_and_those_of_ended_tasks_do_not() -> None:
    async def fails() -> None:
        raise ValueError("x")

    async def main() -> None:
        with pytest.raises(ValueError, match="x"):
            await wait_for(fails(), 60.0)
        failed = asyncio.ensure_future(fails())
        await end_tasks([failed])
        assert failed.done()

    asyncio.run(main())
