# SPDX-License-Identifier: Apache-2.0
"""A JobSet of real launchers trains over the API server in memory, and loses a node."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from resiliency.testing.processes import Command as Program
from resiliency.testing.processes import stop_process
from supervisor.orchestrators.gke.lease import NAME as LEASE
from supervisor.testing.kubernetes import Cluster, Fault, FaultKind
from supervisor.values import CommandKind, DeviceState, OutcomeStatus, Request
from supervisor.view.status import CommandStatus, HostStatus, Status
from supervisor.watchdogs.watchdog import boot_id
from tests.ports import free_port, free_row
from tests.supervisor_kubernetes.fleet import JOBS, OWN, field, jobset
from tests.supervisor_kubernetes.pods import ProcessKubelet
from tests.supervisor_kubernetes.threaded import Threaded, add_node, drive, threaded_cluster
from tests.supervisor_plane.fault_table import fault
from tests.supervisor_plane.plane import PATIENCE_S, ROOT, Plane, job_of, open_plane
from tests.supervisor_plane.training import break_gpu
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.leaks("descriptors", reason="gRPC's own pollers")]

NODES = ("n1", "n2", "n3")
#: Launchers of new pods import torch when they start.
PATIENT = ("--launcher-grace-s=60", "--workload-downtime-threshold-s=180")
TRAIN = ROOT / "tests" / "supervisor_plane" / "scripts" / "train.py"


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
                flags=("--watchdogs=xid", f"--kernel_log={self._kernel_log(node)}"),
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
        self.directory.mkdir()
        for node, kubelet in self.kubelets.items():
            self._kernel_log(node).touch()
            cluster.call(lambda cluster, node=node, kubelet=kubelet: add_node(cluster, node, kubelet))
            kubelet.start_daemon()
        self._store = f"127.0.0.1:{port}"

    def begins(self, **job_spec: Any) -> Status:
        """The supervisor is started, and a job that trains on the first two nodes."""
        self.plane.start("all", "--orchestrator=gke", *PATIENT)
        self.submit(**job_spec)
        status = self.goes_on(-1, "it does not train")
        assert self.hosts(status) == {"n1", "n2"}
        return status

    def submit(self, **job_spec: Any) -> None:
        thing = _jobset(self._store, job_spec)
        self.cluster.call(lambda cluster: cluster.store.create("jobsets", thing, JOBS))

    def _end(self) -> None:
        self.cluster.call(lambda cluster: cluster.kubelets.clear())
        for kubelet in self.kubelets.values():
            kubelet.kill()

    def evict(self, node: str) -> None:
        """As `kubectl drain` of somebody else, or a preemption, has a pod end; its node stays open."""

        def delete(cluster: Cluster) -> None:
            (pod,) = [one for one in cluster.pods("demo") if one["spec"]["nodeName"] == node]
            cluster.store.delete("pods", pod["metadata"]["name"], JOBS, grace_s=30)

        self.cluster.call(delete)

    def _kernel_log(self, node: str) -> Path:
        return self.directory / f"{node}-kernel.log"

    def break_gpu(self, node: str) -> None:
        break_gpu(self.log(node), self._kernel_log(node))

    def pull_takes(self, node: str, seconds: float) -> None:
        self.cluster.call(lambda cluster: setattr(cluster.kubelets[node], "pull_s", seconds))

    def stick(self, node: str) -> None:
        """All of a pod waits for a device that does not answer: no signal ends it."""
        for one in self.kubelets[node].processes("pod"):
            stop_process(one.pid)
        self.kubelets[node].is_stuck = True

    def processes_are_stopped(self, node: str) -> bool:
        states = {psutil.Process(one.pid).status() for one in self.kubelets[node].processes("pod")}
        return states == {psutil.STATUS_STOPPED}

    def log(self, node: str) -> str:
        return self.kubelets[node].log_of("pod")

    def lose(self, node: str) -> None:
        """The machine is gone, with all that ran there."""
        self.cluster.call(lambda cluster: cluster.lose_node(node))
        self.kubelets[node].kill()

    @contextmanager
    def no_pod_may_go(self) -> Iterator[None]:
        """A disruption budget is in the way of each eviction, and at least one was refused at the end."""
        budget = {
            "metadata": {"name": "all"},
            "spec": {"maxUnavailable": 0, "selector": {"matchLabels": {}}},
        }
        self.cluster.call(lambda cluster: cluster.store.create("poddisruptionbudgets", budget, JOBS))
        yield
        wait_until(lambda: self.calls("pods/eviction") > 1, "no eviction is tried", timeout=PATIENCE_S)
        self.cluster.call(lambda cluster: cluster.store.delete("poddisruptionbudgets", "all", JOBS))

    def calls(self, resource: str) -> int:
        return self.cluster.call(
            lambda cluster: sum(call.changes and call.resource == resource for call in cluster.api.calls)
        )

    def uid(self) -> str:
        return self.cluster.call(
            lambda cluster: str(cluster.store.get("jobsets", "demo", JOBS)["metadata"]["uid"])
        )

    def kill_supervisor_at(self, fault: Fault, what: Callable[[], None]) -> None:
        """It is killed at a call that `what` leads to, and the time makes its lease run out."""
        self.cluster.call(lambda cluster: cluster.api.faults.place(fault))
        what()
        wait_until(
            lambda: self.cluster.call(lambda cluster: cluster.api.held.is_set()),
            f"no {fault.verb} of {fault.resource}",
            timeout=PATIENCE_S,
        )
        self.plane.kill("all")

        def run_out(cluster: Cluster) -> None:
            lease = cluster.store.get("leases", LEASE, OWN)
            lease["spec"]["holderIdentity"] = ""
            cluster.store.update("leases", lease, OWN)

        self.cluster.call(run_out)

    def api_is_away(self, away: bool) -> None:
        self.cluster.call(lambda cluster: setattr(cluster.api, "down", away))

    def repair(self, node: str) -> None:
        """The machine starts again, and a person lets it train."""
        self.cluster.call(lambda cluster: cluster.reboot_node(node, boot_id()))
        self.kubelets[node].start_daemon()
        self.plane.act(Request.UNCORDON, host=node, why="it was repaired")

    def hosts(self, status: Status) -> set[str]:
        """Nodes that the job trains on, as the supervisor and as the cluster has it."""
        known = {host.name for host in status.hosts if host.id in job_of(status).hosts}
        running = self.cluster.call(lambda cluster: cluster.running("demo"))
        assert known == set(running.values())
        return known

    def goes_on(self, attempt: int, why: str) -> Status:
        """Wait until the job has trained for two saves since an attempt after `attempt`."""

        def look(seen: Status) -> bool:
            if not seen.jobs or job_of(seen).attempt <= attempt or job_of(seen).incident:
                return False
            begun = self.begun()
            return bool(begun) and (job_of(seen).step or 0) > begun[-1][1] + 12

        return self.plane.wait_for(look, why)

    def pids(self, node: str) -> set[int]:
        return {one.pid for one in self.kubelets[node].processes("pod")}

    def begun(self) -> list[tuple[int, int]]:
        """Numbers of ranks, and steps, with which the rank on the first node began."""
        log = self.log("n1")
        found = re.findall(r"^rank \d of (\d) begins at step (\d+)", log, re.M)
        return [(int(ranks), int(step)) for ranks, step in found]

    def stopped_at(self) -> int:
        """The last step that the rank on the first node finished before it began the last time."""
        before = self.log("n1").rpartition(" begins at step ")[0]
        return int(re.findall(r"^rank \d of \d step (\d+) loss", before, re.M)[-1])

    def restored(self) -> set[str]:
        """Tiers that the ranks began from the last time, as the rank on the first node says."""
        found = re.findall(r"^rank \d of \d restored (.*)$", self.log("n1"), re.M)
        return {part.partition("=")[0] for part in found[-1].split()}


def _jobset(store: str, job_spec: dict[str, Any]) -> dict[str, Any]:
    thing = jobset("demo", hosts=2, **job_spec)
    (replicated,) = thing["spec"]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]["spec"]
    pod["terminationGracePeriodSeconds"] = 30
    (container,) = pod["containers"]
    container["command"] = [sys.executable, str(ROOT / "launcher.py")]
    container["args"] = [
        *("--use-supervisor", "--nnodes=$(NNODES)", "--nproc-per-node=1", "--max-restarts=3"),
        *("--monitor-interval=0.2", "--rdzv-backend=c10d", f"--rdzv-endpoint={store}"),
        "--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=4,join_timeout=120,last_call_timeout=1,is_host=0",
        *("--rdzv-id=demo-$(RESILIENCY_JOB_GENERATION)", "--local-addr=$(NODE_IP)"),
        *(
            "--num-nodes-per-dp=1",
            "--num-dp-replicas=$(NUM_DP_REPLICAS)",
            "--min-num-dp-replicas=1",
            "--max-num-dp-replicas=2",
        ),
        *("--enable-workload-scaling", str(TRAIN), "$(DISK)", "$(MEMORY)"),
    ]
    name = field("metadata.labels['jobset.sigs.k8s.io/jobset-name']")
    container["env"] += [
        {"name": "NNODES", "value": "2"},
        {"name": "NUM_DP_REPLICAS", "value": "2"},
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
        drive(plane, cluster)
        yield Training(plane, stack, cluster)


def _host(status: Status, name: str) -> HostStatus:
    """The newest of that name."""
    return [host for host in status.hosts if host.name == name][-1]


def _is_spare(status: Status, name: str) -> bool:
    host = _host(status, name)
    return host.state is DeviceState.SPARE and not host.cordoned and not host.workload


def _swaps(status: Status) -> list[CommandStatus]:
    """Without those that had no effect: a step that is read late counts as progress after the loss."""
    swaps = [one for one in status.commands if one.kind is CommandKind.HOT_SWAP]
    return [one for one in swaps if one.outcome is not OutcomeStatus.WITHDRAWN]


@fault("node", "drained against a disruption budget", "waits for the budget, then as a host that is drained")
@pytest.mark.thorough("test_contract.py drains, a broken GPU is near")
def test_a_drained_host_is_replaced_once_its_budget_allows(training: Training) -> None:
    plane = training.plane
    status = training.begins()
    launchers = training.pids("n1")

    plane.act(Request.CORDON, host="n3", why="a look at it")
    plane.wait_for(lambda seen: _host(seen, "n3").cordoned, "it is not cordoned")
    plane.act(Request.UNCORDON, host="n3", why="it is fine")
    plane.wait_for(lambda seen: not _host(seen, "n3").cordoned, "it is no spare again")

    with training.no_pod_may_go():
        plane.act(Request.DRAIN, host="n2", why="maintenance")
        wait_until(lambda: training.calls("pods/eviction"), "it is not drained", timeout=PATIENCE_S)
        begun = job_of(plane.status()).step or 0
        status = plane.wait_for(lambda seen: (job_of(seen).step or 0) > begun + 5, "it does not train on")
        assert training.hosts(status) == {"n1", "n2"}
    status = training.goes_on(job_of(status).attempt, "it does not go on without the drained host")
    assert training.hosts(status) == {"n1", "n3"}
    assert launchers & training.pids("n1")
    # All ranks stopped at one step.  The rank that stayed has it in its memory, the other from a copy.
    assert training.restored() == {"memory", "peers"}
    (drain,) = [one for one in status.commands if one.kind is CommandKind.DRAIN_HOST]
    assert (drain.outcome, drain.text) == (OutcomeStatus.DONE, "cordoned; 1 pods evicted")
    assert _host(status, "n2").cordoned
    plane.act(Request.UNCORDON, host="n2", why="it was maintained")
    plane.wait_for(lambda seen: _is_spare(seen, "n2"), "it is no spare again")


@fault(
    "pod",
    "evicted by somebody else",
    "made again by its Job; the job goes on from its last step, nothing is done",
)
@pytest.mark.thorough("a broken GPU is near")
def test_a_pod_that_somebody_else_evicts_is_made_again_and_the_job_goes_on_from_its_last_step(
    training: Training,
) -> None:
    status = training.begins()
    launchers, jobset_uid = training.pids("n1"), training.uid()

    training.evict("n2")
    status = training.goes_on(job_of(status).attempt, "it does not go on")
    assert launchers & training.pids("n1")
    assert training.uid() == jobset_uid
    assert "memory" in training.restored()
    # All ranks stopped at one step, and that is saved.
    assert training.begun()[-1][1] == training.stopped_at()
    assert (status.commands, status.incidents) == ((), ())


@fault(
    "node, and the supervisor while it replaces it",
    "gone; SIGKILL",
    "one hot swap, finished by the next supervisor",
)
@pytest.mark.thorough("test_contract.py loses nodes, test_crashes.py kills adapters, a broken GPU is near")
def test_a_lost_host_is_replaced_once_also_by_a_supervisor_that_was_killed(training: Training) -> None:
    plane = training.plane
    status = training.begins()
    launchers, jobset_uid = training.pids("n1"), training.uid()

    training.kill_supervisor_at(
        Fault(verb="delete", resource="pods", kind=FaultKind.HOLD_AFTER), lambda: training.lose("n2")
    )
    plane.start("all", "--orchestrator=gke", *PATIENT)
    status = training.goes_on(job_of(status).attempt, "it does not go on without the lost host")
    assert training.hosts(status) == {"n1", "n3"}
    assert launchers & training.pids("n1")
    assert training.uid() == jobset_uid
    (swap,) = _swaps(status)
    assert swap.outcome is OutcomeStatus.DONE
    assert training.calls("pods/status")  # nothing can end in order on a lost node
    steps = [step for _, step in training.begun()]
    assert steps == sorted(steps)


@fault("GPU of a node", "Xid 79", "cordoned, its pod moves to a spare node")
def test_a_host_whose_gpu_is_gone_leaves_at_once_and_the_others_meet_its_replacement(
    training: Training,
) -> None:
    status = training.begins()
    launchers, jobset_uid = training.pids("n1"), training.uid()

    training.break_gpu("n2")
    status = training.goes_on(job_of(status).attempt, "it does not go on without the host")
    assert training.hosts(status) == {"n1", "n3"}
    assert launchers & training.pids("n1")
    assert training.uid() == jobset_uid
    (swap,) = _swaps(status)
    assert (swap.outcome, swap.text) == (OutcomeStatus.DONE, "moved to n3; 2 pods run")
    assert _host(status, "n2").cordoned
    # Nobody waited for a step to stop at together with a rank that hangs.  The other one may be told to stop
    # when that one has just been killed, and finds out at once.
    log = training.log("n1") + training.log("n2")
    assert log.count("all ranks stop") == log.count("no common stop: lost contact with rank 1")
    assert training.restored() == {"memory", "peers"}


@fault(
    "node, while the API server is away",
    "gone",
    "decided at once, done when the server is back: the JobSet restarts",
)
@pytest.mark.thorough("test_crashes.py takes the server away, a broken GPU is near")
def test_a_job_that_restarts_as_a_whole_loses_a_node_while_the_api_server_is_away(training: Training) -> None:
    plane = training.plane
    status = training.begins(backoffLimitPerIndex=None, backoffLimit=0)
    before = training.pids("n1")

    training.api_is_away(True)
    training.lose("n2")
    # The daemon's silence alone decides, and the command waits for the API server.
    plane.wait_for(lambda seen: any(_swaps(seen)), "nothing is decided")
    training.api_is_away(False)
    status = training.goes_on(job_of(status).attempt, "it does not go on with the spare")
    swap, *_ = _swaps(status)
    assert swap.outcome is OutcomeStatus.DONE
    assert training.hosts(status) == {"n1", "n3"}
    assert not before & training.pids("n1")
    first, *others = training.begun()
    assert first == (2, 0)
    assert others[-1] > first


@fault("node, without a spare", "gone, later back", "a smaller JobSet, which grows again")
@pytest.mark.thorough("test_contract.py shrinks and grows, a broken GPU is near")
def test_without_a_spare_the_job_is_smaller_until_the_node_is_back(training: Training) -> None:
    plane = training.plane
    training.lose("n3")
    plane.start("all", "--orchestrator=gke", *PATIENT, "--spare-floor=0", "--scale-up-hold-s=1")
    training.submit()
    status = training.goes_on(-1, "it does not train")

    training.lose("n2")
    status = training.goes_on(job_of(status).attempt, "it does not go on smaller")
    assert training.hosts(status) == {"n1"}

    training.repair("n2")
    status = training.goes_on(job_of(status).attempt, "it does not grow")
    assert training.hosts(status) == {"n1", "n2"}

    # Rank 0 restored from its node's disk each time, at the size that all of the JobSet names.
    sizes, steps = zip(*training.begun(), strict=True)
    assert sizes == (2, 1, 2)
    assert 0 == steps[0] < steps[1] < steps[2]
    # A growth costs no step: the pods' grace is enough for their ranks to stop at one step and save it.
    assert steps[2] == training.stopped_at()
    done = [one.kind for one in status.commands if one.outcome is OutcomeStatus.DONE]
    assert [kind for kind in reversed(done) if kind is not CommandKind.UNCORDON_HOST] == [
        *(CommandKind.SCALE_DOWN, CommandKind.SCALE_UP)
    ]


@pytest.mark.thorough("test_detection.py waits for a save, test_simulation.py loses what was not saved")
def test_a_job_whose_ranks_end_at_once_grows_right_after_its_next_checkpoint(training: Training) -> None:
    plane = training.plane
    training.lose("n3")
    asked = training.directory / "disk" / "save-at"
    asked.parent.mkdir(exist_ok=True)
    asked.write_text("5")
    plane.start("all", "--orchestrator=gke", *PATIENT, "--spare-floor=0", "--scale-up-hold-s=1")
    training.submit()
    # Two reports later the supervisor knows that it saves.
    status = plane.wait_for(
        lambda seen: any(seen.jobs) and (job_of(seen).step or 0) > 200, "it does not train"
    )
    training.lose("n2")
    status = training.goes_on(job_of(status).attempt, "it does not go on smaller")
    assert training.begun()[-1] == (1, 5)

    training.repair("n2")
    plane.wait_for(lambda seen: _is_spare(seen, "n2"), "there is no room")
    begun = job_of(plane.status()).step or 0
    # Many reports, looks and holds later it still trains.
    status = plane.wait_for(lambda seen: (job_of(seen).step or 0) > begun + 200, "it does not train on")
    assert [one for one in status.commands if one.kind is CommandKind.SCALE_UP] == []
    step = (job_of(status).step or 0) + 60
    asked.write_text(f"5 {step}")
    status = training.goes_on(job_of(status).attempt, "it does not grow")
    assert training.hosts(status) == {"n1", "n2"}
    assert training.begun()[-1] == (2, step)


@fault(
    "node, with a spare that pulls its image for longer than a job may stand still",
    "gone",
    "one hot swap; what would restart the pods that wait is put off until the image is there",
)
@pytest.mark.thorough("test_waiting.py asks for a restart meanwhile, a broken GPU is near")
def test_a_slow_image_pull_costs_its_time_and_no_launcher_that_waits_for_it(training: Training) -> None:
    plane = training.plane
    plane.start(
        *("all", "--orchestrator=gke", "--launcher-grace-s=60", "--hot-swap-threshold-s=20"),
        "--workload-downtime-threshold-s=45",
    )
    training.submit()
    status = training.goes_on(-1, "it does not train")
    launchers, jobset_uid = training.pids("n1"), training.uid()

    training.pull_takes("n3", seconds=3600.0)
    training.lose("n2")

    def is_put_off(seen: Status) -> bool:
        return any(one.outcome is OutcomeStatus.WITHDRAWN for one in seen.commands)

    status = plane.wait_for(is_put_off, "nothing more is tried")
    (put_off,) = [one for one in status.commands if one.outcome is OutcomeStatus.WITHDRAWN]
    assert "as while a large image is pulled: 1 pods run, 1 start on their nodes" in put_off.text
    training.pull_takes("n3", seconds=0.0)
    status = training.goes_on(job_of(status).attempt, "it does not go on")
    assert training.hosts(status) == {"n1", "n3"}
    assert launchers & training.pids("n1")
    assert training.uid() == jobset_uid
    assert training.restored() == {"memory", "peers"}
    # The launchers that are there may have been asked to restart their ranks in place.
    done = {one.kind for one in status.commands if one.outcome is OutcomeStatus.DONE and one.kind.restarts}
    assert done - {CommandKind.IN_JOB_RESET} == {CommandKind.HOT_SWAP}


@fault(
    "pod",
    "its processes are stopped, and its kubelet cannot end it",
    "deleted for good after its grace and 30 s, its place taken by a spare; the others wait for that",
)
@pytest.mark.thorough("test_waiting.py drains such a pod, a broken GPU is near")
def test_a_pod_that_cannot_be_ended_is_given_up_and_the_others_meet_its_replacement(
    training: Training,
) -> None:
    plane = training.plane
    status = training.begins()
    launchers, jobset_uid = training.pids("n1"), training.uid()

    training.stick("n2")
    plane.act(Request.DRAIN, host="n2", why="its driver hangs")
    status = training.goes_on(job_of(status).attempt, "it does not go on without the pod")
    assert training.hosts(status) == {"n1", "n3"}
    assert launchers & training.pids("n1")
    assert training.uid() == jobset_uid
    assert training.restored() == {"memory", "peers"}
    assert training.processes_are_stopped("n2")
