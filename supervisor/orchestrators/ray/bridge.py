# SPDX-License-Identifier: Apache-2.0
"""The client of a Ray cluster, as a process: ``python -m supervisor.orchestrators.ray.bridge``.

Its first line says which cluster and hosts (`Order`); each other line is a call, answered by a line with the
same number.  It ends with its standard input.  Actors outlive it.  What Ray prints goes to standard error.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from resiliency.tasks import wait_for
from supervisor.orchestrators.ray.actor import HostActor
from supervisor.orchestrators.ray.order import LINE_BYTES, Order

logger = logging.getLogger(__name__)

#: How long a look waits for hosts that answered the last one.
_SCAN_S = 5.0
#: How long a node may take to start or signal a process.
_CALL_S = 30.0
#: Between two actors of a host that cannot be made.
_MAKE_S = 30.0


class Bridge:
    """Actors of one fleet.  `connect` before anything else."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._actors: dict[str, Any] = {}
        self._nodes = dict(order.nodes)
        #: Looks that were not answered in time.  What they see is past by then.
        self._late: dict[str, asyncio.Future[Any]] = {}
        #: Why hosts have no actor now, and when another one may be made.
        self._why: dict[str, str] = {}
        self._not_before: dict[str, float] = {}
        self._scanning = asyncio.Lock()

    def connect(self) -> None:
        """Join the cluster, and make the actors that are not there; Ray places them when it has room."""
        ray.init(
            address=self._order.address,
            namespace=self._order.namespace,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
        for host in ray.util.list_named_actors():
            if host not in self._order.hosts:
                logger.warning("host %s is no longer in the job file: its actor is ended", host)
                ray.kill(ray.get_actor(host), no_restart=True)
        for host in self._order.hosts:
            self._make(host)

    def _make(self, host: str) -> None:
        others = {name: n for name, n in self._order.resources.items() if name not in ("CPU", "GPU")}
        self._actors[host] = (
            ray.remote(HostActor)
            .options(
                name=host,
                get_if_exists=True,
                lifetime="detached",
                max_restarts=-1,  # on another node where its own is lost
                num_cpus=self._order.resources.get("CPU", 0),
                num_gpus=self._order.resources.get("GPU", 0),
                resources=others,
                scheduling_strategy="SPREAD",
            )
            .remote(self._order.fleet, host)
        )

    async def answer(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one line."""
        try:
            if call["call"] == "scan":
                async with self._scanning:
                    return {"hosts": await self._scan()}
            method = getattr(self._actors[call["host"]], call["call"])
            await wait_for(asyncio.wrap_future(method.remote(*call["args"]).future()), _CALL_S)
        except asyncio.TimeoutError:
            return {"error": f"host {call['host']} did not answer within {_CALL_S:g} s"}
        except (RayError, OSError) as error:
            return {"error": f"host {call['host']}: {_first_line(error)}"}
        except Exception as error:  # the border of this process: who asked must not wait for nothing
            logger.exception("call %s failed, which is a bug", call["call"])
            return {"error": f"{call['call']} failed: {error!r}"}
        return {}

    async def _scan(self) -> dict[str, Any]:
        looks: dict[str, asyncio.Future[Any]] = {}
        for host, actor in self._actors.items():
            late = self._late.get(host)
            if late is not None and not late.done():
                continue
            if late is not None and not late.cancelled():
                late.exception()  # it counts as seen
            looks[host] = asyncio.wrap_future(actor.scan.remote().future())
        if looks:
            await asyncio.wait(looks.values(), timeout=_SCAN_S)
        asked = {**self._late, **looks}
        found: dict[str, Any] = {}
        away: list[str] = []
        for host, look in asked.items():
            try:
                if host not in looks or not look.done():
                    raise asyncio.TimeoutError
                found[host] = look.result()
                self._nodes[host] = found[host]["node"]
                self._why.pop(host, None)
            except ActorDiedError as error:
                found[host] = {"away": "absent"}
                self._make_again(host, error)
            except (RayError, asyncio.TimeoutError):
                away.append(host)
        self._late = {host: look for host, look in asked.items() if not look.done()}
        nodes = await asyncio.to_thread(_living_nodes) if away else set()
        for host in away:
            lost = host in self._nodes and self._nodes[host] not in nodes
            found[host] = {"away": "absent" if lost else "unseen"}
        return found

    def _make_again(self, host: str, error: ActorDiedError) -> None:
        """Ray gave it up; unless somebody ended the fleet, another one is made, seldom if that fails too."""
        if "ray.kill" in str(error):
            self._note(host, "its actor was ended; the next client of Ray makes it again")
            return
        self._note(host, f"its actor has died: {_first_line(error)}; another one is made")
        now = asyncio.get_running_loop().time()
        if now >= self._not_before.get(host, now):
            self._not_before[host] = now + _MAKE_S
            self._make(host)

    def _note(self, host: str, why: str) -> None:
        """Log it once."""
        if self._why.get(host) != why:
            logger.warning("host %s: %s", host, why)
        self._why[host] = why


def _living_nodes() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1][:300]


async def serve() -> None:
    """Answer lines until there are no more."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(answer: Mapping[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    bridge = Bridge(Order(**json.loads(await reader.readline())))
    try:
        bridge.connect()
    except (RayError, OSError, RuntimeError, ValueError) as error:  # a cluster that is away: ConnectionError
        say({"failed": _first_line(error)})
        return
    say({"ready": True})
    running: set[asyncio.Task[None]] = set()

    async def carry_out(call: Mapping[str, Any]) -> None:
        say({"number": call["number"], **await bridge.answer(call)})

    while line := await reader.readline():
        task = asyncio.ensure_future(carry_out(json.loads(line)))
        running.add(task)
        task.add_done_callback(running.discard)


if __name__ == "__main__":
    asyncio.run(serve())
