# SPDX-License-Identifier: Apache-2.0
"""A JobSet of real launchers trains over the API server in memory, and loses a node."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from resiliency.testing.processes import Command as Program
from supervisor.testing.kubernetes import Cluster
from supervisor.values import CommandKind, OutcomeStatus
from supervisor.view.status import Status
from supervisor.watchdogs.watchdog import boot_id
from tests.ports import free_port, free_row
from tests.supervisor_kubernetes.fleet import JOBS, OWN, cluster_of, field, jobset, kubeconfig
from tests.supervisor_kubernetes.pods import ProcessKubelet
from tests.supervisor_plane.plane import PATIENCE_S, ROOT, Plane, host_of, job_of, open_plane

pytestmark = [pytest.mark.slow, pytest.mark.leaks("descriptors", reason="gRPC's own pollers")]

T = TypeVar("T")
NODES = ("n1", "n2", "n3")
TRAIN = ROOT / "tests" / "supervisor_plane" / "scripts" / "train.py"


class Threaded:
    """A cluster in an event loop of its own: the test waits without one."""

    def __init__(self, cluster: Cluster, loop: asyncio.AbstractEventLoop) -> None:
        self.cluster, self._loop = cluster, loop

    def call(self, what: Callable[[Cluster], T]) -> T:
        async def work() -> T:
            return what(self.cluster)

        return asyncio.run_coroutine_threadsafe(work(), self._loop).result(PATIENCE_S)


@contextmanager
def threaded_cluster() -> Iterator[Threaded]:
    started: list[Threaded] = []
    ready, over = threading.Event(), asyncio.Event()

    async def work() -> None:
        async with cluster_of() as cluster:
            started.append(Threaded(cluster, asyncio.get_running_loop()))
            ready.set()
            await over.wait()

    thread = threading.Thread(target=lambda: asyncio.run(work()))
    thread.start()
    assert ready.wait(PATIENCE_S)
    try:
        yield started[0]
    finally:
        started[0].call(lambda cluster: over.set())
        thread.join(PATIENCE_S)


class Training:
    """A JobSet of two pods on three nodes, under the supervisor in one process."""

    def __init__(self, plane: Plane, stack: ExitStack, cluster: Threaded) -> None:
        self.plane, self.cluster = plane, cluster
        self.directory = plane.tmp_path / "nodes"
        port = free_port()
        store = [sys.executable, "-m", "resiliency.launch.rendezvous_store", "--host=127.0.0.1"]
        program = stack.enter_context(Program([*store, f"--port={port}"], cwd=ROOT))
        program.wait_for_line("rendezvous store listens", timeout=PATIENCE_S)
        first = free_row(2 * len(NODES))
        self.kubelets = {
            node: ProcessKubelet(
                directory=self.directory,
                node=node,
                port=first + 2 * number,
                environment={
                    **plane.env,
                    "OMP_NUM_THREADS": "1",
                    "RESILIENCY_RUN_DIR": str(self.directory / "run" / node),
                    "DISK": str(self.directory / "disk" / node),
                    "MEMORY": str(self.directory / "memory" / node),
                },
            )
            for number, node in enumerate(NODES)
        }
        stack.callback(self._end)
        for node, kubelet in self.kubelets.items():
            cluster.call(lambda cluster, node=node, kubelet=kubelet: _add(cluster, node, kubelet))
            kubelet.start_daemon()
        self._store = f"127.0.0.1:{port}"

    def submit(self, **job_spec: Any) -> None:
        thing = _jobset(self._store, job_spec)
        self.cluster.call(lambda cluster: cluster.store.create("jobsets", thing, JOBS))

    def _end(self) -> None:
        self.cluster.call(lambda cluster: cluster.kubelets.clear())
        for kubelet in self.kubelets.values():
            kubelet.kill()

    def lose(self, node: str) -> None:
        """The machine is gone, with all that ran there."""
        self.cluster.call(lambda cluster: cluster.lose_node(node))
        self.kubelets[node].kill()

    def goes_on(self, attempt: int, why: str) -> Status:
        """Wait until the job has trained for two saves since an attempt after `attempt`."""

        def look(seen: Status) -> bool:
            if not seen.jobs or job_of(seen).attempt <= attempt or job_of(seen).incident:
                return False
            begun = self.begun()
            return bool(begun) and (job_of(seen).step or 0) > begun[-1] + 12

        return self.plane.wait_for(look, why)

    def pids(self, node: str) -> set[int]:
        return {one.pid for one in self.kubelets[node].processes("pod")}

    def begun(self) -> list[int]:
        """Steps at which ranks on the first node began."""
        found = re.findall(r"^rank \d of 2 begins at step (\d+)", self.kubelets["n1"].log_of("pod"), re.M)
        return [int(step) for step in found]


def _add(cluster: Cluster, node: str, kubelet: ProcessKubelet) -> None:
    cluster.add_node(node, kubelet)
    thing = cluster.store.get("nodes", node)
    # Daemons say of which start of the machine they are, and all of them are on this one.
    thing["status"]["nodeInfo"]["bootID"] = boot_id()
    cluster.store.update("nodes", thing, checked=False)


def _jobset(store: str, job_spec: dict[str, Any]) -> dict[str, Any]:
    thing = jobset("demo", hosts=2, **job_spec)
    (replicated,) = thing["spec"]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]["spec"]
    pod["terminationGracePeriodSeconds"] = 5
    (container,) = pod["containers"]
    container["command"] = [sys.executable, str(ROOT / "launcher.py")]
    container["args"] = [
        *("--use-supervisor", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=3"),
        *("--monitor-interval=0.2", "--rdzv-backend=c10d", f"--rdzv-endpoint={store}"),
        "--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=4,join_timeout=120,last_call_timeout=1,is_host=0",
        *("--rdzv-id=demo-$(RESILIENCY_JOB_GENERATION)", "--local-addr=$(NODE_IP)"),
        *("--num-nodes-per-dp=1", "--num-dp-replicas=2", str(TRAIN), "$(DISK)", "$(MEMORY)"),
    ]
    name = field("metadata.labels['jobset.sigs.k8s.io/jobset-name']")
    container["env"] += [
        {"name": "PET_CONTAINER_NAME", "value": "trainer"},
        {"name": "PET_WORKLOAD_NAME", "valueFrom": name},
        {"name": "PET_JOB_NAME", "valueFrom": name},
        {"name": "JOB_IDENTIFIER", "valueFrom": name},
        {"name": "NODE_NAME", "valueFrom": field("spec.nodeName")},
        {"name": "NODE_IP", "valueFrom": field("status.hostIP")},
        {"name": "RESILIENCY_PEER_ADDRESS", "value": "$(NODE_IP)"},
    ]
    return thing


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    with threaded_cluster() as cluster, open_plane(tmp_path) as (plane, stack):
        config = kubeconfig(tmp_path / "config", cluster.call(lambda cluster: cluster.api.url))
        plane.env |= {
            "KUBECONFIG": str(config),
            "WORKLOAD_NAMESPACE": JOBS,
            "JOB_NAMESPACE": OWN,
            "POD_NAME": "actuator-0",
        }
        yield Training(plane, stack, cluster)


@pytest.mark.parametrize(
    ("job_spec", "kept"),
    [
        pytest.param({}, True, id="each pod alone"),
        pytest.param({"backoffLimitPerIndex": None, "backoffLimit": 0}, False, id="all pods together"),
    ],
)
def test_a_node_is_lost_and_the_job_goes_on_with_the_spare(
    training: Training, job_spec: dict[str, Any], kept: bool
) -> None:
    plane = training.plane
    patient = ("--launcher-grace-s=60", "--workload-downtime-threshold-s=180")
    plane.start("all", "--orchestrator=gke", *patient)
    training.submit(**job_spec)
    status = training.goes_on(-1, "it does not train")
    assert set(job_of(status).hosts) == {host_of(status, name).id for name in ("n1", "n2")}
    before = training.pids("n1")

    training.lose("n2")
    status = training.goes_on(job_of(status).attempt, "it does not go on with the spare")
    swap = next(one for one in status.commands if one.kind is CommandKind.HOT_SWAP)
    assert swap.outcome is OutcomeStatus.DONE
    assert set(job_of(status).hosts) == {host_of(status, name).id for name in ("n1", "n3")}
    assert training.cluster.call(lambda cluster: cluster.running("demo")) == {"0-0": "n1", "0-1": "n3"}
    # Where a pod may be made again alone, the launcher of the other one is the same process.
    assert bool(before & training.pids("n1")) == kept
    first, *others = training.begun()
    assert first == 0
    assert others[-1] > 0
