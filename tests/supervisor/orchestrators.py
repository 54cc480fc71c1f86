# SPDX-License-Identifier: Apache-2.0
"""Any orchestrator as tests ask it, and the processes of a local one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil

from supervisor.orchestrator import Answer, Orchestrator
from supervisor.orchestrators.local import stop_all
from supervisor.orchestrators.processes import has_ended, marked_processes
from supervisor.values import Command, OutcomeStatus
from tests.waiting import WAIT_S, wait_until


async def try_once(orchestrator: Orchestrator, command: Command) -> Answer:
    """The answer to one try of a command."""
    done: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    orchestrator.perform(command, done.set_result)
    return await asyncio.wait_for(done, WAIT_S)


async def carry_out(orchestrator: Orchestrator, command: Command) -> Answer:
    """As the actuator does: failures that pass are tried again."""
    end = asyncio.get_running_loop().time() + WAIT_S
    while True:
        answer = await try_once(orchestrator, command)
        late = asyncio.get_running_loop().time() > end
        if answer.status is not OutcomeStatus.FAILED or not answer.passing or late:
            return answer
        await asyncio.sleep(0.05)


async def look_at(orchestrator: Orchestrator, host: str) -> bool | None:
    seen: asyncio.Future[bool | None] = asyncio.get_running_loop().create_future()
    orchestrator.look(host, seen.set_result)
    return await asyncio.wait_for(seen, WAIT_S)


@contextmanager
def local_fleet(path: Path) -> Iterator[Path]:
    """`path` as the state directory of a local fleet whose processes end with the block."""
    path.mkdir()
    before = psutil.Process().children()
    try:
        yield path
    finally:
        stop_all(path)
        assert marked_processes(str(path)) == []
        # Children of an orchestrator of this process that another one ended.  Some have given their memory
        # back, and are no zombies yet.
        for child in psutil.Process().children():
            if child not in before:
                wait_until(partial(has_ended, child.pid), "a launcher lives on")
