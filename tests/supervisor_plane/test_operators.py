# SPDX-License-Identifier: Apache-2.0
"""What an operator asks of a running supervisor, and what comes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from supervisor.transport.errors import Refused
from supervisor.values import Request
from tests.supervisor_plane.plane import Host, host_of, job_of, open_plane
from tests.supervisor_wire.certificates import CONTROL, HOST, Authority

pytestmark = pytest.mark.leaks("descriptors", reason="gRPC's own pollers")


def test_an_operator_cordons_freezes_and_thaws_and_the_log_says_who_asked_and_why(tmp_path: Path) -> None:
    with open_plane(tmp_path) as (plane, stack):
        plane.start("all")
        Host(plane, stack, "a")
        plane.wait_for(lambda seen: host_of(seen, "a"), "the host is not known")
        reply = plane.act(Request.CORDON, host="a", why="its fan is loud")
        assert reply.text == "cordon logged and handed to the actuator"
        status = plane.wait_for(lambda seen: host_of(seen, "a").cordoned, "not cordoned")
        assert [command.kind.value for command in status.commands] == ["cordon_host"]
        assert not status.frozen
        plane.act(Request.FREEZE)
        status = plane.status()
        assert (status.frozen, status.frozen_by, status.silent) == (True, "tester", False)
        plane.act(Request.THAW)
        plane.act(Request.UNCORDON, host=host_of(status, "a").id)
        status = plane.wait_for(lambda seen: not host_of(seen, "a").cordoned, "still cordoned")
        assert not status.frozen
        with pytest.raises(Refused, match="no host has the id or the name 'b'"):
            plane.act(Request.DRAIN, host="b")
        with pytest.raises(Refused, match="freeze is for the whole fleet"):
            plane.act(Request.FREEZE, workload="job")
        with pytest.raises(Refused, match="no job has the name 'other'"):
            plane.act(Request.THAW, workload="other")
        records = plane.history().records
        assert [one.number for one in records] == sorted(one.number for one in records)
        asked = next(one for one in records if reply.event in one.given)
        assert (asked.kind, asked.epoch) == ("Event", status.epoch)
        assert "its fan is loud" in asked.given
        assert "cordon a" in asked.notes[0]
        assert "asked for by tester" in asked.notes[0]
        assert any(changed.startswith("commands c1@") for changed in asked.changed)
        assert len(plane.history(limit=2).records) == 2


def test_all_parts_speak_tls_and_a_training_host_may_ask_for_nothing(
    tmp_path: Path, authority: Authority
) -> None:
    with open_plane(tmp_path) as (plane, stack):
        certificate, key = authority.issue(*CONTROL)
        files = {"CA": authority.path, "CERT": certificate, "KEY": key}
        plane.env |= {f"SUPERVISOR_TLS_{name}": str(path) for name, path in files.items()}
        plane.security, plane.security_flags = authority.security(*CONTROL), ()
        plane.start("all")
        certificate, key = authority.issue(HOST, f"a.{HOST}")
        plane.env |= {"SUPERVISOR_TLS_CERT": str(certificate), "SUPERVISOR_TLS_KEY": str(key)}
        Host(plane, stack, "a")
        status = plane.wait_for(lambda seen: host_of(seen, "a"), "the host is not known")
        assert all(not part.problem for part in status.parts)
        plane.act(Request.CORDON, host="a")
        plane.wait_for(lambda seen: host_of(seen, "a").cordoned, "not cordoned")
        plane.security = authority.security(HOST)
        with pytest.raises(
            Refused, match="this call is for resiliency-operator, and the caller is resiliency-host"
        ):
            plane.act(Request.UNCORDON, host="a")


def test_shadow_says_what_would_be_done_and_does_nothing(tmp_path: Path) -> None:
    with open_plane(tmp_path) as (plane, stack):
        plane.start("all", "--shadow")
        host = Host(plane, stack, "a")
        host.join(0, max_in_job_restarts=2)
        plane.wait_for(lambda seen: seen.jobs and job_of(seen).step, "no job runs")
        host.fail()
        status = plane.wait_for(
            lambda seen: any(
                "shadow: in_job_reset of job would be done for i1@" in n.text for n in seen.decisions
            ),
            "nothing was decided",
        )
        assert status.shadow
        assert status.commands == ()
        assert host.commands == []
