# SPDX-License-Identifier: Apache-2.0
"""The Ray orchestrator on a real cluster of several nodes, with real daemons and launchers that only wait."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from supervisor.orchestrator import Answer
from supervisor.orchestrators.job_file import read_job_file
from supervisor.orchestrators.processes import Marked, marked_processes
from supervisor.orchestrators.ray import machines
from supervisor.orchestrators.ray.machines import RayMachines
from supervisor.orchestrators.wanted import WantedOrchestrator
from supervisor.values import Change, Command, CommandKind, Evidence, OutcomeStatus
from supervisor.watchdogs.watchdog import boot_id
from tests.asynchronous import until
from tests.ports import free_port, free_row
from tests.supervisor.orchestrators import local_fleet, look_at, try_once
from tests.supervisor_ray.cluster import Cluster
from tests.supervisor_ray.cluster_program import HOST

pytestmark = [pytest.mark.slow, pytest.mark.leaks("descriptors", reason="gRPC's own pollers")]

WAITER = "import signal, sys; print(*sys.argv[1:], flush=True); signal.pause()"


class Fleet:
    """Three hosts, two of which have a job, on the nodes of a cluster."""

    def __init__(self, path: Path, address: str) -> None:
        self.path, self.address = path, address
        self._port = free_row(6)
        self.has_hosts("a", "b", "c")

    def has_hosts(self, *hosts: str) -> None:
        command = ["{python}", "-c", WAITER, "{host} {node_rank}/{nnodes} {generation} {address}"]
        jobs = [{"workload": "job", "replicas": 2, "command": command, "grace_s": 5}]
        file = {"hosts": hosts, "first_port": self._port, "jobs": jobs, "resources": HOST}
        (self.path / "job.json").write_text(json.dumps(file))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[WantedOrchestrator]:
        file = read_job_file(self.path / "job.json")
        there = RayMachines(file, self.address, str(self.path))
        orchestrator = WantedOrchestrator(file, self.path, {"SUPERVISOR_PLAINTEXT": "1"}, there)

        def tell(host: str, change: Change, evidence: Evidence) -> None: ...

        async with orchestrator.running(tell):
            yield orchestrator

    def processes(self, part: str) -> dict[str, Marked]:
        return {one.mark.host: one for one in marked_processes(str(self.path)) if one.mark.part == part}

    def pids(self, part: str = "launcher") -> dict[str, int]:
        return {host: one.pid for host, one in self.processes(part).items()}

    async def is_up(self, launchers: str, daemons: str) -> None:
        await until(
            lambda: set(self.pids()) == set(launchers) and set(self.pids("daemon")) == set(daemons),
            f"not up: {self.pids()}, {self.pids('daemon')}",
        )

    def started(self, host: str) -> list[str]:
        path = self.path / "logs" / f"{host}-launcher.log"
        return [line.rpartition(" ")[0] for line in path.read_text().splitlines()] if path.exists() else []


async def do(on: WantedOrchestrator, id: str, kind: CommandKind, *, epoch: int = 1, **fields: Any) -> Answer:
    return await try_once(on, Command(epoch=epoch, id=id, kind=kind, **fields))


@pytest.fixture
def fleet(tmp_path: Path, cluster: Cluster) -> Iterator[Fleet]:
    with local_fleet(tmp_path / "fleet") as path:
        yield Fleet(path, cluster.address)


async def test_a_lost_node_costs_its_host_a_spare_takes_its_place_and_a_new_node_is_the_next_spare(
    fleet: Fleet, cluster: Cluster
) -> None:
    async with fleet.running() as first:
        await fleet.is_up("ab", daemons="abc")
        await until(lambda: fleet.started("a") and fleet.started("b"), "a launcher says nothing")
        assert (fleet.started("a"), fleet.started("b")) == (["a 0/2 0"], ["b 1/2 0"])
        ids = ("a", f"b.{boot_id()}", "b.before", "d")
        assert [await look_at(first, host) for host in ids] == [True, True, False, None]
        pids = fleet.pids()
        lost, survivor = "a", "b"
        cluster.remove(first._machines._nodes[lost])  # type: ignore[attr-defined]
        await until(lambda: lost in first._state.gone, "it does not count as gone")
        assert await look_at(first, lost) is False
        swap = {"workload": "job", "host": f"{lost}.boot", "spare": "c.boot"}
        done = await do(first, "c1", CommandKind.HOT_SWAP, epoch=3, **swap)
        assert (done.status, done.text) == (OutcomeStatus.DONE, "started on c")
        await fleet.is_up(survivor + "c", daemons=survivor + "c")
        assert fleet.pids()[survivor] == pids[survivor]
        pids = fleet.pids()
    # All that was started outlives the actuator, and the next one takes it over.
    async with fleet.running() as second:
        done = await do(second, "c1", CommandKind.HOT_SWAP, epoch=4, **swap)
        assert (done.status, done.text) == (OutcomeStatus.DONE, "as wanted")
        fenced = await do(second, "c2", CommandKind.WORKLOAD_RESET, epoch=3, workload="job")
        assert fenced.status is OutcomeStatus.FENCED
        assert fleet.pids() == pids
        # Ray's autoscaler would bring a node; the host that waits for one takes it.
        cluster.add()
        await until(lambda: lost in fleet.pids("daemon"), "the host has no machine again")
        await until(lambda: lost not in second._state.gone, "it still counts as gone")
        assert fleet.pids() == pids
        reset = await do(second, "c3", CommandKind.WORKLOAD_RESET, epoch=4, workload="job")
        assert reset.status is OutcomeStatus.DONE
        await until(lambda: set(fleet.pids()) == set(pids), "not started again")
        assert not set(fleet.pids().values()) & set(pids.values())


@pytest.mark.thorough("the lost node is near, test_bridge.py has what the client says")
async def test_a_host_whose_actor_ended_alone_ends_with_it_and_comes_back(fleet: Fleet) -> None:
    async with fleet.running() as here:
        await fleet.is_up("ab", daemons="abc")
        before = fleet.pids("daemon")
        actor = fleet.processes("daemon")["a"].parent
        os.kill(actor, signal.SIGKILL)
        await until(lambda: before["a"] not in fleet.pids("daemon").values(), "the keeper does nothing")
        await until(lambda: "a" not in fleet.pids(), "its launcher lives on")
        await until(lambda: "a" in fleet.pids("daemon"), "it does not come back")
        # As after a loss of the node: the same host on another machine, which the controller knows apart.
        swap = {"workload": "job", "host": "a.before", "spare": "a.now"}
        swapped = await do(here, "c1", CommandKind.HOT_SWAP, **swap)
        # Its launcher may be back before, and is stopped for this one then.
        assert swapped.status is OutcomeStatus.DONE
        assert swapped.text.endswith("started on a")
        assert fleet.pids("daemon").keys() == {"a", "b", "c"}
        # A fleet is ended by one command, also under a supervisor, which starts nothing anew.
        command = [sys.executable, "-m", "supervisor.orchestrators.ray", f"--stop={fleet.path}"]
        done = await asyncio.create_subprocess_exec(*command, f"--ray-address={fleet.address}")
        assert await done.wait() == 0
        await until(lambda: not marked_processes(str(fleet.path)), "processes live on")
        await until(lambda: set(here._state.gone) == {"a", "b"}, "its hosts do not count as gone")
        assert not marked_processes(str(fleet.path))
    done = await asyncio.create_subprocess_exec(*command, f"--ray-address={fleet.address}")
    assert await done.wait() == 0
    async with fleet.running() as again:
        await fleet.is_up("ab", daemons="abc")
        # A later start of the job: the controller knows the steps of the one before.
        assert again._state.jobs[0].generation >= 1
        assert "c1" in again._state.applied


@pytest.mark.thorough("the lost node is near, test_bridge.py has what the client says")
async def test_a_node_that_hangs_costs_its_host_and_what_it_trained_is_stopped_when_it_goes_on(
    fleet: Fleet,
) -> None:
    async with fleet.running() as here:
        await fleet.is_up("ab", daemons="abc")
        actor = fleet.processes("daemon")["a"].parent
        os.kill(actor, signal.SIGSTOP)
        try:
            assert await look_at(here, "a") is None
            swap = {"workload": "job", "host": "a", "spare": "c"}
            swapped = await do(here, "c1", CommandKind.HOT_SWAP, **swap)
            assert (swapped.status, swapped.text) == (OutcomeStatus.DONE, "started on c")
            assert fleet.pids().keys() == {"a", "b", "c"}
        finally:
            os.kill(actor, signal.SIGCONT)
        await fleet.is_up("bc", daemons="abc")


@pytest.mark.thorough("the lost node is near, test_bridge.py has what the client says")
async def test_a_client_that_ends_is_replaced_and_a_cluster_that_is_away_is_no_loss(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet.running() as here:
        await fleet.is_up("ab", daemons="abc")
        pids = fleet.pids()
        bridge = here._machines._bridge  # type: ignore[attr-defined]
        os.kill(bridge.pid, signal.SIGKILL)
        done = await do(here, "c1", CommandKind.CORDON_HOST, host="c")
        if done.status is OutcomeStatus.FAILED:  # it was asked before the kill was known
            assert done.passing
            done = await do(here, "c1", CommandKind.CORDON_HOST, host="c")
        assert done.status is OutcomeStatus.DONE
        assert fleet.pids() == pids
    # A host that leaves the job file gives its node back.
    fleet.has_hosts("a", "b")
    async with fleet.running():
        await fleet.is_up("ab", daemons="ab")
        assert fleet.pids() == pids
    monkeypatch.setattr(machines, "_CONNECT_S", 0.1)
    monkeypatch.setattr(fleet, "address", f"127.0.0.1:{free_port()}")
    async with fleet.running() as away:
        assert await look_at(away, "a") is None
        failed = await do(away, "c2", CommandKind.WORKLOAD_RESET, workload="job")
        assert (failed.status, failed.passing) == (OutcomeStatus.FAILED, True)
        assert fleet.pids() == pids
