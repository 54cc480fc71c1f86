# SPDX-License-Identifier: Apache-2.0
"""Sensor, controller and actuator in one process: one incident through all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from resiliency.events import RunEvent
from supervisor.values import DeviceState, OutcomeStatus
from tests.supervisor_plane.plane import Host, host_of, job_of, open_plane
from tests.waiting import wait_until

pytestmark = pytest.mark.leaks("descriptors", reason="gRPC's own pollers")


@pytest.mark.slow
def test_a_failed_rank_is_restarted_in_place_and_the_next_step_closes_the_incident(tmp_path: Path) -> None:
    with open_plane(tmp_path) as (plane, stack):
        plane.start("all")
        hosts = [Host(plane, stack, name) for name in ("a", "b", "c")]
        for rank, host in enumerate(hosts[:2]):
            host.join(rank, nodes_per_replica=2, max_in_job_restarts=2)
        status = plane.wait_for(
            lambda seen: (
                seen.jobs and job_of(seen).step and len(job_of(seen).hosts) == 2 and host_of(seen, "c")
            ),
            "no job runs beside a spare",
        )
        assert host_of(status, "c").state is DeviceState.SPARE
        assert job_of(status).in_job.left == 2
        for host in hosts[:2]:
            host.stick()
        # A step that is read after the failure would be progress, and the command for it be withdrawn.
        reached = max(host.step for host in hosts[:2])
        plane.wait_for(lambda seen: (job_of(seen).best_step or 0) >= reached, "the last steps are not read")
        hosts[1].fail()
        wait_until(lambda: hosts[0].commands and hosts[1].commands, "no launcher was asked")
        assert {command["kind"] for host in hosts[:2] for command in host.commands} == {"restart_ranks"}
        status = plane.wait_for(
            lambda seen: seen.incidents and seen.incidents[0].closed_age_s is not None, "the incident stays"
        )
        incident = status.incidents[0]
        # On a busy machine a command may be withdrawn first: a step was read late.
        command = next(one for one in status.commands if one.outcome is not OutcomeStatus.WITHDRAWN)
        assert [span.name for span in incident.spans][-3:] == ["gathered", "in_job_reset", "first step"]
        assert incident.reports[0].evidence[0].text == "rank 1: launcher: failed"
        assert (command.outcome, command.incident) == (OutcomeStatus.DONE, incident.id)
        assert "attempt 0 ends" in command.text
        assert job_of(status).in_job.left == 1
        stream = plane.state_dir / "job-events.jsonl"
        wait_until(
            lambda: stream.is_file() and stream.read_text().count("\n") == 3,
            "the job's event stream does not have all of it",
        )
        told = [RunEvent.from_json(line) for line in stream.read_text().splitlines()]
        assert [event.type.value for event in told] == ["fault_detected", "action_decided", "action_ended"]
        assert {event.fields["incident"] for event in told} == {incident.id}
        assert told == sorted(told, key=lambda event: event.time)
