# SPDX-License-Identifier: Apache-2.0
"""Hosts of a Ray cluster, as `wanted` asks for them; a bridge that ends is replaced."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from signal import Signals
from typing import Any

from resiliency.errors import ConfigError
from resiliency.tasks import wait_for
from supervisor.orchestrators.job_file import JobFile
from supervisor.orchestrators.processes import Mark, Marked
from supervisor.orchestrators.ray.order import LINE_BYTES, Order, namespace_of
from supervisor.orchestrators.tasks import LoggedTasks
from supervisor.orchestrators.wanted import Seen

logger = logging.getLogger(__name__)

#: For an answer of the bridge; longer than it waits for a node.
_ANSWER_S = 40.0
#: For another bridge, where one has ended; and for a bridge's first answer.
_CONNECT_S, _READY_S = 15.0, 90.0
#: Between two bridges.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
#: For the end of a bridge whose standard input ended.
_END_S = 5.0


class RayMachines:
    """Args:
        address: of the cluster, as `ray.init` takes it.
        fleet: marks the processes of this fleet.
    Raises:
        ConfigError: Ray is not installed.
    """

    name, watch_s, returns = "ray", 2.0, True
    python, supervisor = "{python}", "{supervisor}"  # of the node

    def __init__(self, file: JobFile, address: str, fleet: str) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ConfigError(
                "--orchestrator ray needs ray.",
                hint="Install it with: pip install 'resiliency[supervisor,ray]'",
                flag="--orchestrator",
            )
        self._file, self._address, self._fleet = file, address, fleet
        self._nodes: dict[str, str] = {}
        self._bridge: asyncio.subprocess.Process | None = None
        self._why = "the client of Ray has not started yet"
        self._connected = asyncio.Event()
        self._number = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        keeping = LoggedTasks("the client of Ray")
        keeping.start(self._keep())
        try:
            yield
        finally:
            await keeping.end()

    # ------------------------------------------------------------------------------------- what is asked

    async def scan(self) -> Seen:
        """All hosts.

        Raises:
            OSError: the cluster cannot be asked.
        """
        answer = await self._ask("scan")
        processes: list[Marked] = []
        away: dict[str, set[str]] = {"unseen": set(), "absent": set()}
        addresses: dict[str, str] = {}
        boots: dict[str, str] = {}
        for host, found in answer["hosts"].items():
            if "away" in found:
                away[found["away"]].add(host)
                continue
            self._nodes[host], addresses[host], boots[host] = found["node"], found["address"], found["boot"]
            for pid, parent, text in found["processes"]:
                mark = Mark.from_text(text)
                assert mark is not None
                processes.append(Marked(pid=pid, parent=parent, mark=mark))
        return Seen(
            processes=processes,
            unseen=frozenset(away["unseen"]),
            absent=frozenset(away["absent"]),
            addresses=addresses,
            boots=boots,
        )

    async def start(self, argv: Sequence[str], mark: Mark, environment: Mapping[str, str], log: Path) -> None:
        await self._ask("start", mark.host, list(argv), mark.to_text(), dict(environment), str(log))

    async def signal_roots(self, processes: Sequence[Marked], number: Signals) -> None:
        await self._ask_hosts("signal_roots", processes, int(number))

    async def kill(self, processes: Sequence[Marked]) -> None:
        await self._ask_hosts("kill", processes)

    async def _ask_hosts(self, call: str, processes: Sequence[Marked], *args: object) -> None:
        by_host: dict[str, list[int]] = {}
        for one in processes:
            by_host.setdefault(one.mark.host, []).append(one.pid)
        await asyncio.gather(*(self._ask(call, host, pids, *args) for host, pids in by_host.items()))

    async def _ask(self, call: str, host: str = "", *args: object) -> dict[str, Any]:
        """The bridge's answer.

        Raises:
            OSError: there is none.
        """
        with suppress(asyncio.TimeoutError):
            await wait_for(self._connected.wait(), _CONNECT_S)
        bridge = self._bridge
        if bridge is None or bridge.stdin is None:
            raise OSError(self._why)
        self._number += 1
        number, answer = self._number, asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            line = json.dumps({"number": number, "call": call, "host": host, "args": args})
            bridge.stdin.write(line.encode() + b"\n")
            found: dict[str, Any] = await wait_for(answer, _ANSWER_S)
        except asyncio.TimeoutError:
            with suppress(ProcessLookupError):
                bridge.kill()  # a client that hangs is replaced
            raise OSError(f"the client of Ray did not answer within {_ANSWER_S:g} s") from None
        finally:
            self._waiting.pop(number, None)
        if "error" in found:
            raise OSError(found["error"])
        return found

    # ------------------------------------------------------------------------------------- the bridge

    async def _keep(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            if await self._run_bridge():
                pause_s = _FIRST_PAUSE_S
            logger.warning("%s; trying again in %g s", self._why, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _run_bridge(self) -> bool:
        """Until it ends; whether it was of use."""
        order = Order(
            address=self._address,
            namespace=namespace_of(self._fleet),
            fleet=self._fleet,
            hosts=self._file.hosts,
            resources=self._file.resources,
            nodes=self._nodes,
        )
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "supervisor.orchestrators.ray.bridge"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                cwd=Path(__file__).parents[3],
                start_new_session=True,
                limit=LINE_BYTES,
            )
        except OSError as error:
            self._why = f"no client of Ray can be started: {error}"
            return False
        assert process.stdin is not None
        assert process.stdout is not None
        useful = False
        self._why = f"the client of Ray at {self._address} has ended"
        try:
            process.stdin.write(json.dumps(asdict(order)).encode() + b"\n")
            while line := await wait_for(process.stdout.readline(), None if useful else _READY_S):
                answer = json.loads(line)
                if "failed" in answer:
                    self._why = f"the Ray cluster at {self._address} cannot be reached: {answer['failed']}"
                elif "ready" in answer:
                    self._bridge, useful = process, True
                    self._connected.set()
                    logger.info("connected to the Ray cluster at %s", self._address)
                elif (waiting := self._waiting.get(answer["number"])) is not None and not waiting.done():
                    waiting.set_result(answer)
        except asyncio.TimeoutError:
            self._why = f"the Ray cluster at {self._address} does not answer within {_READY_S:g} s"
        except (OSError, ValueError, KeyError, TypeError) as error:  # it wrote no line of ours
            self._why = f"the client of Ray cannot be understood: {error}"
        finally:
            self._bridge = None
            self._connected.clear()
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(OSError(self._why))
            await self._end(process)
        return useful

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        process.stdin.close()
        with suppress(asyncio.TimeoutError):
            await wait_for(process.wait(), _END_S)
            return
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
