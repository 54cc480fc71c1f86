# SPDX-License-Identifier: Apache-2.0
"""Where a host is: from the metadata server and the node's labels to the supervisor and the ranks."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from resiliency.errors import ConfigError
from resiliency.testing.processes import Command as Program
from supervisor.daemon.settings import DaemonSettings
from supervisor.daemon.topology import find_place, merge_facts, metadata_address
from supervisor.protocol.host_commands import HostCommand, HostCommandKind
from supervisor.values import HostFacts, HostInfo
from tests.asynchronous import run
from tests.launch.conftest import WAIT, Launch, launch, leaves_nothing, ready, temporary
from tests.ports import free_ports
from tests.supervisor_wire.fleet import Fleet
from tests.supervisor_wire.metadata import VALUES, metadata_server

__all__ = ["launch", "leaves_nothing", "temporary"]  # fixtures
pytestmark = pytest.mark.leaks("descriptors", reason="gRPC's own pollers")

STEPPER = Path(__file__).parent / "scripts" / "stepper.py"
PLACE = HostFacts(subblock="s1", superblock="b1", zone="us-east5-a")


@pytest.mark.parametrize(
    ("values", "place"),
    [
        (VALUES, PLACE),
        ({"zone": VALUES["zone"]}, HostFacts(zone="us-east5-a")),
        ({"attributes/physical_host": "/b1/s1/m1\n"}, HostFacts(subblock="s1", superblock="b1")),
        ({"attributes/physical_host": "b1"}, HostFacts(superblock="b1")),
        ({"zone": "a,b=c", "attributes/physical_host": f"/{'b' * 300}/s 1"}, HostFacts()),
        ({}, HostFacts()),
    ],
)
async def test_what_the_metadata_server_says_is_the_place_of_the_host(
    values: dict[str, str], place: HostFacts
) -> None:
    async with metadata_server(values) as address:
        assert await find_place(address, pauses_s=()) == place


def test_a_server_that_is_missing_another_or_silent_holds_up_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        (port,) = free_ports(1)
        assert await find_place(("127.0.0.1", port), pauses_s=(0.0, 0.0)) is None
        async with metadata_server(VALUES, flavor="Server: EC2ws\r\n") as address:
            assert await find_place(address, pauses_s=()) is None
        async with metadata_server(VALUES, answers=False) as address:
            assert await find_place(address, question_s=0.2, pauses_s=(0.0,)) is None

    caplog.set_level("INFO")
    run(work())
    missing, other, silent = [record.getMessage() for record in caplog.records if "place" in record.message]
    assert "no metadata server at 127.0.0.1:" in missing
    assert "it is not Google's: 'HTTP/1.0 200 OK" in other
    assert silent.endswith("no answer within 0.2 s; labels only")


def test_labels_go_first_and_the_metadata_server_fills_in() -> None:
    labels = HostFacts(subblock="rack-7")
    assert merge_facts(labels, PLACE) == HostFacts(subblock="rack-7", superblock="b1", zone="us-east5-a")
    assert merge_facts(HostFacts(), PLACE) == PLACE


def test_the_metadata_server_is_where_google_has_it_or_where_the_variable_says() -> None:
    assert metadata_address({}) == ("169.254.169.254", 80)
    assert metadata_address({"GCE_METADATA_HOST": "10.0.0.1:8080"}) == ("10.0.0.1", 8080)
    for text in ("metadata.google.internal", "10.0.0.1:0", "10.0.0.1:x"):
        with pytest.raises(ConfigError, match="GCE_METADATA_HOST must be an IPv4 address with or without"):
            metadata_address({"GCE_METADATA_HOST": text})


def test_nobody_is_asked_without_the_flag() -> None:
    env = {"SUPERVISOR_PLAINTEXT": "1", "NODE_NAME": "host-1", "GCE_METADATA_HOST": "nonsense"}
    assert DaemonSettings.parse([], env).metadata is None
    with pytest.raises(ConfigError, match="GCE_METADATA_HOST"):
        DaemonSettings.parse(["--enable-topology-aware-scheduling"], env)


async def placed(fleet: Fleet, *domains: str) -> None:
    """The sensor knows that the host is in `domains`."""
    while not any(
        isinstance(value, HostInfo) and value.domains == domains for _, _, value in fleet.sensor.told
    ):
        await asyncio.sleep(0.01)


@pytest.mark.thorough("tests/supervisor/test_wanted.py compares places")
@pytest.mark.slow
async def test_ranks_and_supervisor_know_the_place_of_the_host_and_the_next_attempt_a_new_one(
    launch: Launch, leaves_nothing: Callable[[Program], None], tmp_path: Path
) -> None:
    fleet = Fleet(tmp_path)
    async with fleet.serve(), metadata_server(VALUES) as (address, port):
        with fleet.daemon("--enable_topology_aware_scheduling", GCE_METADATA_HOST=f"{address}:{port}"):
            await placed(fleet, "subblock=s1", "superblock=b1", "zone=us-east5-a")
            flags = ("--nnodes=1", "--nproc-per-node=1", "--use-supervisor", "--container-name=c")
            flags += (
                "--workload-name=job",
                "--job-name=job",
                f"--host-daemon-port={fleet.launcher_port}",
            )
            job = await asyncio.to_thread(lambda: launch(*flags, STEPPER))
            await asyncio.to_thread(lambda: ready(job, 0))
            assert "rank 0 attempt 0 is in subblock=s1,superblock=b1,zone=us-east5-a" in job.output
            # A person labels the node; what runs stays as it is until its ranks start again.
            await fleet.actuator.wait_for("connected", "host-1")
            assert fleet.actuator_streams.try_send_facts("host-1", HostFacts(subblock="rack-7"))
            await placed(fleet, "subblock=rack-7", "superblock=b1", "zone=us-east5-a")
            restart = HostCommand(
                epoch=1, id="c1", kind=HostCommandKind.RESTART_RANKS, workload="job", attempt=0
            )
            await fleet.command(restart)
            await asyncio.to_thread(lambda: ready(job, 0, attempt=1))
            assert "rank 0 attempt 1 is in subblock=rack-7,superblock=b1,zone=us-east5-a" in job.output
            job.signal(signal.SIGTERM)
            assert await asyncio.to_thread(lambda: job.wait(timeout=WAIT)) == 0
    leaves_nothing(job)
