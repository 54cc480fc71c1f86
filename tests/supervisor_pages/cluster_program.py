# SPDX-License-Identifier: Apache-2.0
"""A whole cluster on this machine, in the network namespace in which a page is typed.

    python -m tests.supervisor_pages.cluster_program DIRECTORY gpus|cpus [--real]

Writes DIRECTORY/config, by which kubectl and helm find it.  What only a cloud does is asked for by HTTP:
``/machines/NAME/deletion`` ends a machine, ``/machines/NAME/creation`` makes another one of that name.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import nullcontext
from pathlib import Path

from resiliency.testing import warm
from supervisor.testing.kubernetes import hosts
from tests.supervisor_kubernetes.fleet import kubeconfig
from tests.supervisor_pages.control_plane import ControlPlane
from tests.supervisor_pages.machines import FIRST, NETWORK, Machine, make_bridge

#: The clusters of docs/gke-walkthrough.md: name, how many, processors, GPUs.
POOLS = {"gpus": (("cpu", 2, 8, 0), ("gpu", 5, 208, 8)), "cpus": (("cpu", 4, 4, 0),)}
#: What pods import: they are forked from an interpreter that has done it.
PROGRAMS = (
    *("supervisor.parts.run", "supervisor.daemon.daemon", "supervisor.watchdogs.runner", "pynvml"),
    *("supervisor.orchestrators.gke.orchestrator", "kubernetes_asyncio.client"),
    *("resiliency.launch.cli", "resiliency.launch.options", "resiliency.launch.fleet.reporter"),
)
#: How long a machine is gone before the cloud takes its Node away: a hundredth of the real time.
GONE_S = 0.4


class Program:
    def __init__(self, directory: Path, pools: str, *, plays: bool) -> None:
        self.directory, self.plays = directory, plays
        self.plane = ControlPlane(self._asked)
        self._shapes = {
            f"{kind}-{number}": (cpus, gpus)
            for kind, count, cpus, gpus in POOLS[pools]
            for number in range(1, count + 1)
        }
        self._tasks: set[asyncio.Task[None]] = set()
        #: Addresses are used once.
        self._number = FIRST + 9

    async def run(self) -> None:
        make_bridge()
        over = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
        plane = self.plane
        plane.choose_node = min
        plane.store.listeners.append(self._serve_names)
        async with plane:
            for name in self._shapes:
                self._add(name)
            kubeconfig(self.directory / "new", plane.api.url, "operator").rename(self.directory / "config")
            (self.directory / "url").write_text(plane.api.url)
            assert plane._task is not None
            await asyncio.wait(
                {asyncio.ensure_future(over.wait()), plane._task}, return_when=asyncio.FIRST_COMPLETED
            )
            if plane._task.done():
                plane._task.result()
            machines, plane.kubelets = list(plane.kubelets.values()), {}
            for machine in machines:
                assert isinstance(machine, Machine)
                machine.kill()

    def _add(self, name: str) -> None:
        self._number += 1
        cpus, gpus = self._shapes[name]
        machine = Machine(
            directory=self.directory,
            node=name,
            number=self._number,
            store=self.plane.store,
            url=self.plane.api.url,
            plays=self.plays,
        )
        accelerator = {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"} if gpus else {}
        node = hosts.node(name, gpus=gpus, labels=accelerator)
        node["status"]["allocatable"]["cpu"] = str(cpus)
        node["status"]["nodeInfo"]["bootID"] = machine.boot
        node["spec"]["taints"] = (
            [{"key": hosts.GPU, "value": "present", "effect": "NoSchedule"}] if gpus else []
        )
        self.plane.kubelets[name] = machine
        self.plane.store.create("nodes", node)

    def _asked(self, path: str) -> str | None:
        words = path.strip("/").split("/")
        if words[:1] != ["machines"]:
            return None
        name = words[1]
        if words[2] == "creation":
            self._add(name)
        else:
            task = asyncio.ensure_future(self._delete(name))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return f"{words[2]} of {name}\n"

    async def _delete(self, name: str) -> None:
        """The machine first; then the node controller gives up on it, and the cloud has none of that name."""
        machine = self.plane.kubelets[name]
        assert isinstance(machine, Machine)
        machine.alive = False  # first: it would see its pods end
        await asyncio.to_thread(machine.vanish)
        self.plane.give_up_on(name)
        await asyncio.sleep(GONE_S)
        self.plane.remove_node(name)

    def _serve_names(self) -> None:
        """As the cluster's DNS, by a file that lies over /etc/hosts."""
        lines = ["127.0.0.1 localhost"]
        for one in self.plane.store.all("services"):
            meta = one["metadata"]
            lines.append(f"{NETWORK}.{FIRST} {meta['name']}.{meta['namespace']}.svc")
        for name, machine in self.plane.kubelets.items():
            assert isinstance(machine, Machine)
            lines.append(f"{machine.address} {name}")
        file, text = self.directory / "hosts", "\n".join(lines) + "\n"
        if file.read_text() != text:
            file.write_text(text)


def main(directory: str, pools: str, *flags: str) -> None:
    program = Program(Path(directory), pools, plays="--real" not in flags)
    with warm.interpreter(*PROGRAMS) if program.plays else nullcontext():
        asyncio.run(program.run())


if __name__ == "__main__":
    main(*sys.argv[1:])
