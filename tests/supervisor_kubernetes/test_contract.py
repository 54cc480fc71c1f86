# SPDX-License-Identifier: Apache-2.0
"""What every orchestrator owes the actuator, over processes, Ray, the API server in memory, and a real one.

The real one is that of KUBECONFIG: it needs the JobSet controller, three nodes, of which one may be cordoned,
and the namespace CONTRACT_NAMESPACE (``default``).  The job asks for no GPU.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from supervisor.orchestrator import Answer, RunningOrchestrator
from supervisor.orchestrators.gke.client import JOBSETS, NODES, PODS, Api, find_cluster
from supervisor.orchestrators.gke.names import JOBSET_NAME
from supervisor.orchestrators.gke.nodes import host_id, is_cordoned, is_ready
from supervisor.orchestrators.gke.orchestrator import GkeOrchestrator
from supervisor.orchestrators.job_file import JobFile, read_job_file
from supervisor.orchestrators.local import LocalOrchestrator
from supervisor.orchestrators.processes import kill_all, marked_processes
from supervisor.orchestrators.ray.machines import RayMachines
from supervisor.orchestrators.wanted import WantedOrchestrator
from supervisor.values import Change, Command, CommandKind, OutcomeStatus
from supervisor.watchdogs.watchdog import boot_id
from tests.ports import free_row
from tests.supervisor.orchestrators import carry_out, local_fleet, look_at
from tests.supervisor_kubernetes.fleet import (
    NEEDS_CLUSTER,
    Adapter,
    cluster_of,
    host,
    jobset,
    new_epoch,
    submit,
)
from tests.supervisor_ray.cluster import Cluster, ray_cluster
from tests.supervisor_ray.cluster_program import HOST
from tests.waiting import WAIT_S

pytestmark = pytest.mark.leaks("descriptors", reason="gRPC's own pollers")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A fleet with a job of two hosts, and one host more.

    Attributes:
        make: an orchestrator of it; another one goes on where the first ended.
        workload: name of the job.
        hosts: ids of its hosts, by node rank, then the spare's.
        starts: what tells each start of a rank that is there now from all others.
        lose: have the machine of a host go, with all that runs there, under an orchestrator that runs.
    """

    make: Callable[[], RunningOrchestrator]
    workload: str
    hosts: tuple[str, str, str]
    starts: Callable[[], Awaitable[set[str]]]
    lose: Callable[[RunningOrchestrator, str], None] | None = None

    async def two_starts(self) -> set[str]:
        """Those of a job that runs."""
        return await self.starts_of(2)

    async def starts_of(self, hosts: int) -> set[str]:

        async def wait() -> set[str]:
            while len(found := await self.starts()) != hosts:
                await asyncio.sleep(0.05)
            return found

        return await asyncio.wait_for(wait(), WAIT_S)


@asynccontextmanager
async def of_job_file(
    tmp_path: Path,
    file: dict[str, Any],
    make: Callable[[JobFile, Path], RunningOrchestrator],
    lose: Callable[[RunningOrchestrator, str], None],
) -> AsyncIterator[Subject]:
    fleet, path = tmp_path / "fleet", tmp_path / "job.json"
    waiter = ["{python}", "-c", "import signal; signal.pause()"]
    job = {"workload": "a", "replicas": 2, "command": waiter, "grace_s": 5}
    hosts = {"hosts": ["n1", "n2", "n3"], "first_port": free_row(6), "jobs": [job]}
    path.write_text(json.dumps(hosts | file))

    async def starts() -> set[str]:
        return {f"{one.pid}" for one in marked_processes(str(fleet)) if one.mark.part == "launcher"}

    with local_fleet(fleet):
        yield Subject(
            make=lambda: make(read_job_file(path), fleet),
            workload="a",
            hosts=(f"n1.{boot_id()}", f"n2.{boot_id()}", f"n3.{boot_id()}"),
            starts=starts,
            lose=lose,
        )


def local(tmp_path: Path, request: pytest.FixtureRequest) -> AbstractAsyncContextManager[Subject]:
    del request
    environment = {**os.environ, "SUPERVISOR_PLAINTEXT": "1"}

    def lose(orchestrator: RunningOrchestrator, host: str) -> None:
        del orchestrator
        fleet = str(tmp_path / "fleet")
        kill_all([one for one in marked_processes(fleet) if one.mark.host == name_of(host)])

    return of_job_file(tmp_path, {}, lambda file, fleet: LocalOrchestrator(file, fleet, environment), lose)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ray_cluster(tmp_path_factory.mktemp("ray")) as started:
        yield started


@asynccontextmanager
async def on_ray(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    cluster: Cluster = request.getfixturevalue("cluster")
    address = cluster.address
    removed: list[str] = []

    def lose(orchestrator: RunningOrchestrator, host: str) -> None:
        node = orchestrator._machines._nodes[name_of(host)]  # type: ignore[attr-defined]
        cluster.remove(node)
        removed.append(node)

    def make(file: JobFile, fleet: Path) -> WantedOrchestrator:
        machines = RayMachines(file, address, str(fleet))
        return WantedOrchestrator(file, fleet, {"SUPERVISOR_PLAINTEXT": "1"}, machines)

    async with of_job_file(tmp_path, {"resources": HOST}, make, lose) as subject:
        yield subject
        for _ in removed:
            cluster.add()
        # Its actors hold all nodes of the cluster.
        stop = ["supervisor.orchestrators.ray", f"--stop={tmp_path / 'fleet'}", f"--ray-address={address}"]
        done = await asyncio.create_subprocess_exec(sys.executable, "-m", *stop)
        assert await done.wait() == 0


@asynccontextmanager
async def in_memory(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    del tmp_path, request
    async with cluster_of("n1", "n2", "n3") as cluster:
        await submit(cluster, jobset("a", hosts=2))

        async def starts() -> set[str]:
            return _running(cluster.pods("a"))

        yield Subject(
            make=lambda: Adapter(cluster, uuid.uuid4().hex).orchestrator,
            workload="a",
            hosts=(host(cluster, "n1"), host(cluster, "n2"), host(cluster, "n3")),
            starts=starts,
            lose=lambda orchestrator, host: cluster.lose_node(name_of(host)),
        )


@asynccontextmanager
async def real(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    """A JobSet of two pods that sleep, each on a node of its own, on the cluster of KUBECONFIG."""
    del tmp_path, request
    namespace = os.environ.get("CONTRACT_NAMESPACE", "default")
    name = f"contract-{uuid.uuid4().hex[:6]}"
    thing = jobset(name, hosts=2)
    pod = thing["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    container.update(image="busybox:1.36", command=["sleep"], args=["100000"], resources={})
    pod["metadata"] = {"labels": {"contract": name}}
    apart = {"labelSelector": {"matchLabels": {"contract": name}}, "topologyKey": "kubernetes.io/hostname"}
    pod["spec"]["affinity"] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}}
    async with Api(await find_cluster()) as api:
        made = await api.create(JOBSETS, thing, namespace)

        async def pods() -> list[dict[str, Any]]:
            found, _ = await api.list(PODS, namespace, labels=f"{JOBSET_NAME}={name}")
            return found

        async def starts() -> set[str]:
            return _running(await pods())

        async def ids() -> tuple[str, str, str]:
            used = [one["spec"].get("nodeName") for one in await pods()]
            nodes, _ = await api.list(NODES)
            named = {one["metadata"]["name"]: one for one in nodes if is_ready(one) and not is_cordoned(one)}
            (spare, *_) = [one for one in named if one not in used]
            return host_id(named[used[0]]), host_id(named[used[1]]), host_id(named[spare])

        try:
            subject = Subject(
                make=lambda: GkeOrchestrator(namespace, namespace),
                workload=name,
                hosts=("", "", ""),
                starts=starts,
            )
            await subject.two_starts()
            yield replace(subject, hosts=await ids())
        finally:
            current = await api.try_get(JOBSETS, name, namespace)
            await api.delete(JOBSETS, current or made, foreground=True)


def name_of(host: str) -> str:
    return host.rpartition(".")[0]


def _running(pods: list[dict[str, Any]]) -> set[str]:
    return {
        pod["metadata"]["uid"]
        for pod in pods
        if pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]
    }


SUBJECTS = [
    pytest.param(local, id="local"),
    pytest.param(
        on_ray,
        id="ray",
        marks=[
            pytest.mark.slow,
            pytest.mark.thorough("test_ray.py loses a node of a cluster"),
            pytest.mark.leaks("processes", reason="the cluster lives as long as the module"),
        ],
    ),
    pytest.param(in_memory, id="in memory"),
    pytest.param(real, id="KUBECONFIG", marks=NEEDS_CLUSTER),
]
#: Those whose machines a test may take away.
OWN_MACHINES = SUBJECTS[:3]
Maker = Callable[[Path, pytest.FixtureRequest], Any]


@asynccontextmanager
async def running(
    subject: Subject, told: list[tuple[str, Change]] | None = None
) -> AsyncIterator[RunningOrchestrator]:
    orchestrator = subject.make()
    changes = told if told is not None else []
    async with orchestrator.running(lambda host, change, evidence: changes.append((host, change))):
        await subject.two_starts()
        yield orchestrator


async def do(orchestrator: RunningOrchestrator, name: str, kind: CommandKind, **fields: Any) -> Answer:
    return await carry_out(orchestrator, Command(id=name, kind=kind, **{"epoch": new_epoch(), **fields}))


@pytest.mark.slow
@pytest.mark.parametrize("make", SUBJECTS)
async def test_a_command_has_its_effect_once_also_under_another_orchestrator(
    make: Maker, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    async with make(tmp_path, request) as subject:
        reset = {"workload": subject.workload}
        async with running(subject) as orchestrator:
            first = await subject.two_starts()
            done = await do(orchestrator, "c1", CommandKind.WORKLOAD_RESET, **reset)
            assert done.status is OutcomeStatus.DONE, done
            second = await subject.two_starts()
            assert not first & second
            again = await do(orchestrator, "c1", CommandKind.WORKLOAD_RESET, **reset)
            assert again.status is OutcomeStatus.DONE
            assert await subject.two_starts() == second
        async with running(subject) as orchestrator:
            again = await do(orchestrator, "c1", CommandKind.WORKLOAD_RESET, **reset)
            assert again.status is OutcomeStatus.DONE
            assert await subject.two_starts() == second


@pytest.mark.slow
@pytest.mark.parametrize("make", SUBJECTS)
async def test_an_epoch_below_the_highest_is_refused_by_the_next_orchestrator_too(
    make: Maker, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    async with make(tmp_path, request) as subject:
        low = new_epoch()
        async with running(subject) as orchestrator:
            before = await subject.two_starts()
            uncordon = {"host": name_of(subject.hosts[2])}
            done = await do(orchestrator, "c1", CommandKind.UNCORDON_HOST, epoch=low + 1, **uncordon)
            assert done.status is OutcomeStatus.DONE
        async with running(subject) as orchestrator:
            reset = {"workload": subject.workload, "epoch": low}
            fenced = await do(orchestrator, "c2", CommandKind.WORKLOAD_RESET, **reset)
            assert fenced.status is OutcomeStatus.FENCED
            assert fenced.text == f"epoch {low} refused: this orchestrator has seen {low + 1}"
            assert fenced.epoch == low + 1
            assert await subject.two_starts() == before


@pytest.mark.parametrize("make", SUBJECTS)
async def test_a_swapped_host_leaves_the_others_as_they_are(
    make: Maker, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    async with make(tmp_path, request) as subject, running(subject) as orchestrator:
        before = await subject.two_starts()
        swap = {"workload": subject.workload, "host": subject.hosts[1], "spare": subject.hosts[2]}
        done = await do(orchestrator, "c1", CommandKind.HOT_SWAP, **swap)
        assert done.status is OutcomeStatus.DONE, done
        after = await subject.two_starts()
        assert len(before & after) == 1
        await do(orchestrator, "c2", CommandKind.UNCORDON_HOST, host=subject.hosts[1])


@pytest.mark.slow
@pytest.mark.parametrize("make", OWN_MACHINES)
async def test_a_job_goes_on_without_a_lost_host_and_grows_onto_another_one(
    make: Maker, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    async with make(tmp_path, request) as subject, running(subject) as orchestrator:
        before = await subject.two_starts()
        lost = subject.hosts[1]
        subject.lose(orchestrator, lost)
        down = {"workload": subject.workload, "host": lost, "replicas": 1}
        done = await do(orchestrator, "c1", CommandKind.SCALE_DOWN, **down)
        assert done.status is OutcomeStatus.DONE, done
        small = await subject.starts_of(1)
        assert not small & before
        again = await do(orchestrator, "c1", CommandKind.SCALE_DOWN, **down)
        assert again.status is OutcomeStatus.DONE
        assert await subject.starts_of(1) == small
        up = {"workload": subject.workload, "replicas": 2}
        done = await do(orchestrator, "c2", CommandKind.SCALE_UP, **up)
        assert done.status is OutcomeStatus.DONE, done
        assert not await subject.two_starts() & small
        refused = await do(orchestrator, "c3", CommandKind.SCALE_UP, **{**up, "replicas": 4})
        assert (refused.status, refused.passing) == (OutcomeStatus.FAILED, False)


@pytest.mark.slow
@pytest.mark.parametrize("make", OWN_MACHINES)
async def test_a_drained_host_is_told_of_and_the_others_stay_when_it_is_replaced(
    make: Maker, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    told: list[tuple[str, Change]] = []
    async with make(tmp_path, request) as subject, running(subject, told) as orchestrator:
        before = await subject.two_starts()
        drained, spare = subject.hosts[1:]
        done = await do(orchestrator, "c1", CommandKind.DRAIN_HOST, host=drained)
        assert done.status is OutcomeStatus.DONE, done
        assert told.count((drained, Change.GONE)) == 1
        swap = {"workload": subject.workload, "host": drained, "spare": spare}
        done = await do(orchestrator, "c2", CommandKind.HOT_SWAP, **swap)
        assert done.status is OutcomeStatus.DONE, done
        assert len(before & await subject.two_starts()) == 1
        # It takes no job before it is uncordoned.
        up = {"workload": subject.workload, "replicas": 3}
        refused = await do(orchestrator, "c3", CommandKind.SCALE_UP, **up)
        assert (refused.status, refused.passing) == (OutcomeStatus.FAILED, False)
        await do(orchestrator, "c4", CommandKind.UNCORDON_HOST, host=drained)
        done = await do(orchestrator, "c5", CommandKind.SCALE_UP, **up)
        assert done.status is OutcomeStatus.DONE, done
        await subject.starts_of(3)


@pytest.mark.slow
@pytest.mark.parametrize("make", OWN_MACHINES)
async def test_a_lost_host_is_replaced_once_also_when_another_orchestrator_gets_the_command(
    make: Maker, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    async with make(tmp_path, request) as subject:
        swap = {"workload": subject.workload, "host": subject.hosts[1], "spare": subject.hosts[2]}
        async with running(subject) as orchestrator:
            before = await subject.two_starts()
            subject.lose(orchestrator, subject.hosts[1])
            done = await do(orchestrator, "c1", CommandKind.HOT_SWAP, **swap)
            assert done.status is OutcomeStatus.DONE, done
            after = await subject.two_starts()
            assert len(before & after) == 1
        async with running(subject) as orchestrator:
            again = await do(orchestrator, "c1", CommandKind.HOT_SWAP, **swap)
            assert again.status is OutcomeStatus.DONE
            assert await subject.two_starts() == after


@pytest.mark.parametrize("make", SUBJECTS)
async def test_what_is_not_there_is_refused_and_a_host_is_there_or_cannot_be_told(
    make: Maker, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    async with make(tmp_path, request) as subject, running(subject) as orchestrator:
        done = await do(orchestrator, "c1", CommandKind.WORKLOAD_RESET, workload="nothing")
        assert (done.status, done.passing) == (OutcomeStatus.FAILED, False)
        assert "nothing" in done.text
        assert await look_at(orchestrator, subject.hosts[0]) is True
        # A node that the API server does not have is gone; a job file without it says nothing.
        assert await look_at(orchestrator, "nobody.boot") in (False, None)
