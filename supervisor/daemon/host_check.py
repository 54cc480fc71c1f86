# SPDX-License-Identifier: Apache-2.0
"""The host check of the launcher's program, run by the daemon while no launcher is there."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from resiliency.launch.health.scores import HostHealth
from resiliency.tasks import end_tasks, wait_for
from supervisor.daemon.workers import HostWorkers
from supervisor.values import MAX_NAME_CHARS, EventType, Evidence, Finding, cut_text

T = TypeVar("T")

#: For all probes, and how much longer the program may take to end.
PROBES_S, END_S = 60.0, 20.0
PROGRAM = ("-m", "resiliency.launch.health", "check", "--json", f"--check-timeout-s={PROBES_S:g}")


@dataclass(frozen=True, kw_only=True)
class HostCheck:
    """The result of a check.  `gpus`: names of those that were measured."""

    health: HostHealth
    why: str = ""
    gpus: tuple[str, ...] = ()

    def finding(self, id: str) -> Finding:
        evidence = Evidence(
            id=id,
            witness="check",
            text=cut_text(self.why),
            device=",".join(self.gpus)[:MAX_NAME_CHARS],
            cause=self.health.value,
        )
        return Finding(type=EventType.NODE_CHECK, evidence=evidence)


async def check_host(directory: Path, program: tuple[str, ...] = PROGRAM) -> HostCheck:
    """Run the check; where it cannot be run, or says nothing, the host is undecided.

    Args:
        directory: of the daemon, on whose disk the check writes.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *program, f"--disk={directory}"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        said, _ = await wait_for(process.communicate(), PROBES_S + END_S)
    except asyncio.TimeoutError:
        said = b""
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    return _read(said, process.returncode)


async def while_idle(workers: HostWorkers, work: Awaitable[T], changed: asyncio.Event) -> T | None:
    """What `work` comes to; None, and it is cancelled, where a launcher comes meanwhile.

    Args:
        changed: is set with each change of `workers`.
    """
    working = asyncio.ensure_future(work)
    try:
        while workers.is_idle:
            if working.done():
                return working.result()
            changed.clear()
            news = asyncio.ensure_future(changed.wait())
            await asyncio.wait({working, news}, return_when=asyncio.FIRST_COMPLETED)
            await end_tasks([news])
        return None
    finally:
        await end_tasks([working])


def _read(said: bytes, exit_code: int | None) -> HostCheck:
    try:
        report: dict[str, Any] = json.loads(said)
        health, why = HostHealth(report["health"]), str(report["why"])
        found = {str(one["probe"]): HostHealth(one["health"]) for one in report["probes"]}
    except (ValueError, TypeError, KeyError):
        return HostCheck(health=HostHealth.UNDECIDED, why=f"the check ended with {exit_code} and no report")
    if health is HostHealth.FAULTY and health not in found.values():
        health, why = HostHealth.UNDECIDED, f"the check names no probe that found a fault: {why}"
    undecided = HostHealth.UNDECIDED
    gpus = (name for name, one in found.items() if name.startswith("gpu") and one is not undecided)
    return HostCheck(health=health, why=why, gpus=tuple(gpus))
