# SPDX-License-Identifier: Apache-2.0
"""The example trains on a real Ray cluster, which loses a node."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from resiliency.testing.processes import Command as Program
from supervisor.orchestrators.local import stop_all
from supervisor.orchestrators.processes import marked_processes
from supervisor.values import CommandKind, OutcomeStatus
from supervisor.view.status import Status
from tests.ports import free_port, free_row
from tests.supervisor_plane.plane import PATIENCE_S, ROOT, THRESHOLDS, Plane, host_of, job_of, open_plane
from tests.supervisor_ray.cluster import Cluster
from tests.supervisor_ray.cluster_program import HOST

pytestmark = [pytest.mark.slow, pytest.mark.leaks("descriptors", reason="gRPC's own pollers")]

TRAIN = ROOT / "tests" / "supervisor_plane" / "scripts" / "train.py"


@pytest.fixture
def example(tmp_path: Path, cluster: Cluster) -> Iterator[Plane]:
    """The supervisor of the example, with a job of two hosts and a spare."""
    with open_plane(tmp_path) as (plane, stack):
        try:
            _start(plane, stack, cluster)
            yield plane
        finally:
            stop_all(plane.state_dir)


def _start(plane: Plane, stack: ExitStack, cluster: Cluster) -> None:
    patient = ("--launcher-grace-s=60", "--workload-downtime-threshold-s=180", "--listen=127.0.0.1")
    argv = [
        *(sys.executable, str(ROOT / "examples" / "ray" / "train_on_ray.py")),
        *(f"--ray-address={cluster.address}", "--hosts=2", "--spares=1"),
        *(f'--resources={{"{next(iter(HOST))}": 1}}', f"--state-dir={plane.state_dir}"),
        *(f"--store-port={free_port()}", f"--first-port={free_row(6)}"),
        f"--supervisor-flags={' '.join((*THRESHOLDS, '--status-port=0', *patient))}",
        *(str(TRAIN), "{state_dir}/disk/{host}", "{state_dir}/memory/{host}"),
    ]
    program = Program(
        argv,
        env={**plane.env, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        log=plane.tmp_path / "example.txt",
        cold=True,
    )
    stack.enter_context(program)
    program.wait_for_line("sensor ready at port", timeout=PATIENCE_S)


@pytest.mark.thorough("test_ray.py loses a node")
def test_the_example_trains_on_when_the_node_of_a_host_is_lost(example: Plane) -> None:
    def trains(seen: Status) -> bool:
        return bool(seen.jobs) and (job_of(seen).step or 0) > 12 and host_of(seen, "host-2") is not None

    before = example.wait_for(trains, "it does not train")
    fleet = str(example.state_dir.resolve())
    processes = {
        (one.mark.host, one.mark.part): one
        for one in marked_processes(fleet)
        if one.parent not in _marked(fleet)
    }
    actor = psutil.Process(processes["host-1", "daemon"].parent)
    (node,) = [one for one in actor.parents() if one.name() == "raylet"]
    for process in (node, *node.children(recursive=True)):
        process.kill()

    def goes_on(seen: Status) -> bool:
        job = job_of(seen)
        return (
            job.attempt > job_of(before).attempt
            and not job.incident
            and (job.step or 0) > _begun(example) + 5
        )

    after = example.wait_for(goes_on, "it does not go on")
    (swap,) = [one for one in after.commands if one.kind is CommandKind.HOT_SWAP]
    assert (swap.outcome, swap.text) == (OutcomeStatus.DONE, "started on host-2")
    there = {(one.mark.host, one.mark.part): one.pid for one in marked_processes(fleet)}
    assert {host for host, part in there if part == "launcher"} == {"host-0", "host-2"}
    kept = processes["host-0", "launcher"].pid
    assert kept in {one.pid for one in marked_processes(fleet)}
    assert _begun(example) > 0


def _marked(fleet: str) -> set[int]:
    return {one.pid for one in marked_processes(fleet)}


def _begun(plane: Plane) -> int:
    """At which step the ranks of the host that stayed began last."""
    log = (plane.state_dir / "logs" / "host-0-launcher.log").read_text()
    return int(re.findall(r"begins at step (\d+)", log)[-1])
