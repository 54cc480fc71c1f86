# SPDX-License-Identifier: Apache-2.0
"""The whole supervisor over the API server in memory, with pods that do not train."""

from __future__ import annotations

import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from supervisor.testing.kubernetes import Cluster
from supervisor.values import CommandKind, DeviceState, OutcomeStatus
from supervisor.view.status import CommandStatus, Status
from tests.ports import free_row
from tests.supervisor_kubernetes.fleet import JOBS, jobset
from tests.supervisor_kubernetes.pods import ProcessKubelet
from tests.supervisor_kubernetes.threaded import Threaded, add_node, drive, threaded_cluster
from tests.supervisor_plane.plane import PATIENCE_S, Host, Plane, host_of, job_of, open_plane
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.leaks("descriptors", reason="gRPC's own pollers")]

NODES = ("n1", "n2", "n3")
#: Longer than the job may be without a step after an action (`THRESHOLDS` of the plane).
PULL_S = 25.0


def _restarts(status: Status) -> list[CommandStatus]:
    """Without those that had no effect: a step that is read late counts as progress after the loss."""
    found = [one for one in status.commands if one.kind.restarts]
    return [one for one in found if one.outcome is not OutcomeStatus.WITHDRAWN]


def _runs_on(cluster: Threaded, *nodes: str) -> None:
    wait_until(
        lambda: sorted(cluster.call(lambda cluster: cluster.running("a")).values()) == list(nodes),
        f"the pods do not run on {nodes}",
        timeout=PATIENCE_S,
    )


@pytest.mark.thorough("test_waiting.py waits for slow pods")
def test_an_image_that_takes_longer_than_a_job_may_be_down_leads_to_one_swap_and_no_more(
    tmp_path: Path,
) -> None:
    with threaded_cluster() as cluster, open_plane(tmp_path) as (plane, stack):
        drive(plane, cluster)
        for node in NODES:
            cluster.call(lambda cluster, node=node: add_node(cluster, node))
        plane.start("all", "--orchestrator=gke")
        hosts = [Host(plane, stack, node) for node in NODES]
        cluster.call(lambda cluster: cluster.store.create("jobsets", jobset("a", hosts=2), JOBS))
        _runs_on(cluster, "n1", "n2")
        for rank, host in enumerate(hosts[:2]):
            host.join(rank, workload="a", nodes_per_replica=2)
        plane.wait_for(
            lambda seen: (
                seen.jobs and job_of(seen).step and len(job_of(seen).hosts) == 2 and host_of(seen, "n3")
            ),
            "no job runs beside a spare",
        )

        def lose(cluster: Cluster) -> None:
            cluster.kubelets["n3"].pull_s = 3600.0
            cluster.lose_node("n2")

        for host in hosts[:2]:
            host.stick()
        hosts[1].daemon.signal(signal.SIGKILL)
        cluster.call(lose)
        plane.wait_for(_restarts, "nothing is decided")
        begun = time.monotonic()
        wait_until(lambda: time.monotonic() - begun > PULL_S, "time stands still", timeout=PATIENCE_S)
        (swap,) = _restarts(plane.status())
        assert (swap.kind, swap.outcome) == (CommandKind.HOT_SWAP, None)

        cluster.call(lambda cluster: setattr(cluster.kubelets["n3"], "pull_s", 0.0))
        _runs_on(cluster, "n1", "n3")
        hosts[0].attempt = hosts[2].attempt = 1
        hosts[0].advancing = True
        hosts[2].join(1, workload="a", nodes_per_replica=2)
        status = plane.wait_for(
            lambda seen: not job_of(seen).incident and job_of(seen).attempt == 1, "it is not over"
        )
        (swap,) = _restarts(status)
        assert (swap.outcome, swap.text) == (OutcomeStatus.DONE, "moved to n3; 2 pods run")


def _standalone(plane: Plane, cluster: Threaded, stack: ExitStack) -> dict[str, ProcessKubelet]:
    """Nodes whose daemons learn the job from the annotations of its pods."""
    first = free_row(2 * len(NODES))
    kubelets = {
        node: ProcessKubelet(
            directory=plane.tmp_path / "nodes",
            node=node,
            port=first + 2 * number,
            environment=plane.env,
            flags=("--enable_standalone_mode",),
        )
        for number, node in enumerate(NODES)
    }

    def end() -> None:
        cluster.call(lambda cluster: cluster.kubelets.clear())
        for kubelet in kubelets.values():
            kubelet.kill()

    stack.callback(end)
    for node, kubelet in kubelets.items():
        cluster.call(lambda cluster, node=node, kubelet=kubelet: add_node(cluster, node, kubelet))
        kubelet.start_daemon()
    return kubelets


def test_a_job_of_another_launcher_loses_a_node_and_goes_on_with_the_spare(tmp_path: Path) -> None:
    with threaded_cluster() as cluster, open_plane(tmp_path) as (plane, stack):
        drive(plane, cluster)
        kubelets = _standalone(plane, cluster, stack)
        plane.start("all", "--orchestrator=gke")
        thing = jobset("a", hosts=2)
        template = thing["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
        template["metadata"] = {"annotations": {"supervisor/container-name": "trainer"}}
        waits = "import signal; signal.pause()"
        template["spec"]["containers"][0].update(command=[sys.executable], args=["-c", waits])
        cluster.call(lambda cluster: cluster.store.create("jobsets", thing, JOBS))
        plane.wait_for(
            lambda seen: (
                seen.jobs
                and len(job_of(seen).hosts) == 2
                and all(
                    host.state is DeviceState.RUNNING for host in seen.hosts if host.id in job_of(seen).hosts
                )
                and host_of(seen, "n3")
            ),
            "the job of the annotations is not seen beside a spare",
        )
        survivor = {one.pid for one in kubelets["n1"].processes("pod")}
        cluster.call(lambda cluster: cluster.lose_node("n2"))  # first: it would see its pod end
        kubelets["n2"].kill()
        _runs_on(cluster, "n1", "n3")
        status = plane.wait_for(
            lambda seen: any(one.outcome for one in _restarts(seen)), "the swap has no end"
        )
        (swap,) = _restarts(status)
        assert (swap.kind, swap.outcome) == (CommandKind.HOT_SWAP, OutcomeStatus.DONE)
        assert {one.pid for one in kubelets["n1"].processes("pod")} == survivor
