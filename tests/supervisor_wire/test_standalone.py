# SPDX-License-Identifier: Apache-2.0
"""Jobs of other launchers: the daemon learns them from the annotations of its pod."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from resiliency.testing import ManualClock
from supervisor.daemon.standalone import read_annotations
from supervisor.daemon.workers import HostWorkers
from supervisor.values import DaemonReport, DeviceState, HostFacts, HostInfo, PodFacts, WorkloadInfo
from tests.supervisor_wire.fleet import Fleet

ALL = {
    "container-name": "trainer",
    "job-name": "workers",
    "max-workload-restarts": "3",
    "max-in-job-restarts": "0",
    "workload-downtime-threshold-s": "90.5",
    "enable-workload-scaling": "true",
    "container-termination-threshold-s": "60",
    "num-nodes-per-dp": "2",
    "min-num-dp-replicas": "1",
    "max-num-dp-replicas": "4",
}


def pod(state: DeviceState = DeviceState.RUNNING, **said: str) -> PodFacts:
    texts = tuple(f"{name}={text}" for name, text in said.items())
    return PodFacts(id="p1", workload="a", namespace="jobs", hosts=4, index=1, state=state, annotations=texts)


def test_each_annotation_is_a_field_of_the_job() -> None:
    workload, sentences = read_annotations(pod(**ALL))
    assert sentences == ()
    assert workload == WorkloadInfo(
        workload="a",
        namespace="jobs",
        container="trainer",
        job="workers",
        max_workload_restarts=3,
        max_in_job_restarts=0,
        downtime_threshold_s=90.5,
        scaling=True,
        termination_threshold_s=60.0,
        nodes_per_replica=2,
        replicas=2,
        min_replicas=1,
        max_replicas=4,
    )
    assert read_annotations(pod())[0].replicas == 1


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("container-name", "two words", "supervisor/container-name must be a name without a space"),
        ("job-name", "", "supervisor/job-name must be a name without a space, found ''; ignored"),
        ("max-workload-restarts", "-1", "must be a whole number from 0 on, found '-1'; ignored"),
        ("max-in-job-restarts", "9" * 5000, "must be a whole number from 0 on, found '999"),
        ("max-in-job-restarts", "1.5", "must be a whole number from 0 on, found '1.5'; ignored"),
        ("workload-downtime-threshold-s", "nan", "must be seconds from 0 to a year, found 'nan'; ignored"),
        ("container-termination-threshold-s", "1e9", "must be seconds from 0 to a year, found '1e9'"),
        ("enable-workload-scaling", "maybe", "must be true or false, found 'maybe'; ignored"),
        ("num-nodes-per-dp", "0", "must be a whole number from 1 on, found '0'; ignored"),
        ("num-nodes-per-dp", "3", "num-nodes-per-dp (3) must divide the 4 pods of a; ignored"),
        ("min-num-dp-replicas", "x", "must be a whole number from 1 on, found 'x'; ignored"),
        ("max-num-dp-replicas", "1", "needs min-num-dp-replicas (1) <= 2 <= max-num-dp-replicas (1)"),
    ],
)
def test_a_text_that_cannot_be_used_costs_a_sentence_and_the_others_hold(
    name: str, text: str, sentence: str
) -> None:
    workload, sentences = read_annotations(pod(**{**ALL, name: text}))
    assert sentence in " ".join(sentences)
    if name != "max-workload-restarts":
        assert workload.max_workload_restarts == 3
    if name != "job-name":
        assert workload.job == "workers"


def test_workers_live_as_long_as_the_pod_runs_and_are_silent_when_it_failed() -> None:
    clock = ManualClock()
    workers = HostWorkers(HostInfo(id="h", name="h", workers_per_host=2), "i", clock)

    def take(facts: PodFacts | None) -> None:
        workers.take_pod(facts, read_annotations(facts)[0] if facts is not None else None)

    def ages() -> list[float | None]:
        return [worker.heartbeat_age_s for worker in workers.report().workers]

    take(pod(DeviceState.SPARE, **ALL))
    assert (workers.host_info().workload, workers.host_info().state) == ("a", DeviceState.SPARE)
    take(pod(**ALL))
    clock.advance(timedelta(seconds=100))
    assert ages() == [0.0, 0.0]
    assert workers.host_info().state is DeviceState.RUNNING
    assert [worker.global_rank for worker in workers.host_info().workers] == [2, 3]
    take(pod(DeviceState.FAILED, **ALL))
    clock.advance(timedelta(seconds=40))
    assert ages() == [40.0, 40.0]
    take(pod(DeviceState.COMPLETE, **ALL))
    assert workers.host_info().state is DeviceState.COMPLETE
    take(None)
    assert (workers.host_info().workload, workers.report().workers) == ("", ())


def test_programs_and_launchers_go_before_the_pod_and_thresholds_count_once_steps_are_told() -> None:
    workers = HostWorkers(HostInfo(id="h", name="h", workers_per_host=2), "i", ManualClock())
    facts = pod(**ALL)
    said = read_annotations(facts)[0]
    workers.take_pod(facts, said)
    # A pod tells no steps: a job that trains must not be taken for one that does not.
    assert workers.workload == replace(said, downtime_threshold_s=0.0)
    program = workers.join("k", "worker", WorkloadInfo(workload="a"))
    assert workers.workload == said
    assert workers.report().workers == ()
    workers.leave(program, ended=False)
    # The next pod of the host: what the programs of the one before said is forgotten.
    workers.take_pod(replace(facts, id="p2"), said)
    assert len(workers.report().workers) == 2
    launcher = WorkloadInfo(workload="a", max_in_job_restarts=9)
    workers.join("l", "launcher", launcher)
    assert workers.workload == launcher


@pytest.mark.leaks("descriptors", reason="gRPC's own pollers")
async def test_a_daemon_in_standalone_mode_reports_the_job_of_its_pod(tmp_path: Path) -> None:
    facts = HostFacts(pod=pod(**{**ALL, "max-workload-restarts": "many"}))
    fleet = Fleet(tmp_path)
    async with fleet.serve():
        with fleet.daemon("--enable_standalone_mode") as daemon:
            await fleet.actuator.wait_for("connected", "host-1")
            assert fleet.actuator_streams.try_send_facts("host-1", facts)
            report: DaemonReport = await fleet.reported(lambda report: len(report.workers) == 2)
            assert {worker.state for worker in report.workers} == {DeviceState.RUNNING}
            job = await fleet.told(WorkloadInfo, lambda workload: workload.workload == "a")
            assert (job.replicas, job.max_workload_restarts) == (2, 0)
            line = "annotation supervisor/max-workload-restarts must be a whole number from 0 on"
            await asyncio.to_thread(daemon.wait_for_line, line, timeout=60.0)
