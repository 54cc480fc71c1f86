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


class Bridge:
    """Actors of one fleet.  `connect` before anything else."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._actors: dict[str, Any] = {}
        self._nodes = dict(order.nodes)
        #: Looks that are not answered.
        self._asked: dict[str, asyncio.Future[Any]] = {}
        self._late: set[str] = set()
        self._scanning = asyncio.Lock()

    def connect(self) -> None:
        """Join the cluster, and make the actors that are not there; Ray places them when it has room."""
        ray.init(
            address=self._order.address,
            namespace=self._order.namespace,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
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
        for host, actor in self._actors.items():
            if host not in self._asked:
                self._asked[host] = asyncio.wrap_future(actor.scan.remote().future())
        prompt = [look for host, look in self._asked.items() if host not in self._late]
        if prompt:
            await asyncio.wait(prompt, timeout=_SCAN_S)
        found: dict[str, Any] = {}
        nodes: set[str] | None = None
        for host in self._order.hosts:
            look = self._asked[host]
            if look.done():
                del self._asked[host]
            try:
                if not look.done():
                    raise asyncio.TimeoutError
                found[host] = look.result()
                self._nodes[host] = found[host]["node"]
                self._late.discard(host)
            except (RayError, asyncio.TimeoutError) as error:
                self._late.add(host)
                if nodes is None:
                    nodes = await asyncio.to_thread(_living_nodes)
                found[host] = {"away": "unseen"}
                if isinstance(error, ActorDiedError):  # for good: somebody has killed it
                    self._make(host)
                    found[host] = {"away": "absent"}
                elif self._nodes.get(host, "unknown") not in (*nodes, "unknown"):
                    found[host] = {"away": "absent"}
        return found


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
