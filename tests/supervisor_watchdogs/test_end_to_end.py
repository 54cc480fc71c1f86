# SPDX-License-Identifier: Apache-2.0
"""From lines of kernel logs to what the controller decides, with real processes in between."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from supervisor.values import CommandKind
from supervisor.view.status import CommandStatus, Status
from tests.supervisor_plane.plane import Host, host_of, job_of, open_plane
from tests.waiting import wait_until_equal

pytestmark = [pytest.mark.slow, pytest.mark.leaks("descriptors", reason="gRPC's own pollers")]


def cordons(status: Status) -> list[CommandStatus]:
    return [one for one in status.commands if one.kind is CommandKind.CORDON_HOST]


def xid(bus: str, code: int) -> str:
    return f"NVRM: Xid (PCI:{bus}): {code}, pid=4711, name=python3, why\n"


def test_of_two_xids_in_one_second_the_nodes_takes_its_host_out_of_service_and_the_applications_does_not(
    tmp_path: Path,
) -> None:
    with open_plane(tmp_path) as (plane, stack):
        # None of the plane's orchestrators knows cordons without jobs of its own: what is decided counts.
        plane.start("all")
        logs = {name: tmp_path / f"{name}.log" for name in "ab"}
        for rank, (name, log) in enumerate(logs.items()):
            log.touch()
            host = Host(
                plane, stack, name, "--watchdogs=xid", "--watchdog_interval_s=0.2", f"--kernel_log={log}"
            )
            host.join(rank, replicas=2, max_replicas=2)
            host.daemon.wait_for_line("watchdog xid: looks each", timeout=60)
        plane.wait_for(lambda seen: seen.jobs and len(job_of(seen).hosts) == 2, "no job of two hosts")
        for name, line in (("a", xid("0000:3b:00", 31)), ("b", xid("0000:5e:00", 79))):
            with logs[name].open("a") as file:
                file.write(line)

        def codes() -> dict[str, int]:
            """Xids that the controller has been told of: host and code."""
            events = [json.loads(one.given) for one in plane.history().records if one.kind == "Event"]
            xids = [event for event in events if event["type"] == "xid"]
            return {event["host"].partition(".")[0]: event["evidence"][0]["code"] for event in xids}

        wait_until_equal(codes, {"a": 31, "b": 79})
        status = plane.wait_for(cordons, "no host is taken out of service")
        b = host_of(status, "b")
        assert b is not None
        assert {one.host for one in cordons(status)} == {b.id}
        (command, *_) = cordons(status)
        assert [one.startswith("b/xid/") for one in command.evidence] == [True]
        # The application's Xid has opened no incident: its launcher sees to its ranks itself.
        reports = [report for incident in status.incidents for report in incident.reports]
        assert {report.host for report in reports} == {b.id}
