# SPDX-License-Identifier: Apache-2.0
"""All of it with real processes: supervisor, local orchestrator, daemons, launchers, training on gloo."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from resiliency.events import RunEvent
from resiliency.goodput_measure.timeline.file import write_timeline
from supervisor.orchestrators.local import stop_all
from supervisor.values import CommandKind, OutcomeStatus, Request
from tests.supervisor_plane.fault_table import fault
from tests.supervisor_plane.plane import PATIENCE_S, host_of, job_of
from tests.supervisor_plane.training import Training, check_losses, ended, open_training

pytestmark = [pytest.mark.slow, pytest.mark.leaks("descriptors", reason="gRPC's own pollers")]


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    with open_training(tmp_path, hosts=("a", "b", "c", "spare"), replicas=3) as training:
        yield training


@fault(
    "two hosts, with one spare",
    "SIGKILL of all their processes",
    "the spare takes one place, then the job is smaller until a host is back",
)
def test_a_job_loses_two_hosts_goes_on_with_the_spare_and_smaller_and_grows_when_one_is_back(
    training: Training,
) -> None:
    plane = training.plane
    # The launchers that stay wait for the spare's, which takes some seconds to start.
    patient = ("--launcher-grace-s=60", "--workload-downtime-threshold-s=180")
    growing = ("--spare-floor=0", "--scale-up-hold-s=1")
    program = plane.start("all", *training.flags, *growing, *patient)
    status = training.goes_on(3, -1, "it does not train")
    assert set(job_of(status).hosts) == {host_of(status, name).id for name in ("a", "b", "c")}
    survivor = {one.pid for one in training.processes("a")}

    training.lose("b")
    status = training.goes_on(3, job_of(status).attempt, "it does not go on with the spare")
    swap = ended(status, CommandKind.HOT_SWAP)
    assert swap is not None
    assert (swap.outcome, swap.text) == (OutcomeStatus.DONE, "started on spare")
    assert set(job_of(status).hosts) == {host_of(status, name).id for name in ("a", "spare", "c")}
    incident = next(one for one in status.incidents if one.id == swap.incident)
    assert "hot_swap" in [span.name for span in incident.spans]
    # The launcher of a host that stayed is the same process; its rank started again in place.
    assert survivor & {one.pid for one in training.processes("a")}
    first, *_, second = training.begun(r"\d", 3)  # on a busy machine a start may come to nothing
    assert first == (0, "none")
    assert second[0] > 0
    # Survivors go on from their own memory, or their own disk; the spare from a copy of theirs.
    sources = training.restored(3)[-1]
    assert {"memory", "peers"} <= set(sources) <= {"memory", "local", "peers"}
    assert training.processes("b") == []

    training.lose("c")
    status = training.goes_on(2, job_of(status).attempt, "it does not go on smaller")
    assert set(job_of(status).hosts) == {host_of(status, name).id for name in ("a", "spare")}
    smaller = training.begun(r"\d", 2)[-1]
    assert smaller[0] > second[0]
    assert training.processes("c") == []

    plane.act(Request.UNCORDON, host="b", why="it was repaired")
    status = training.goes_on(3, job_of(status).attempt, "it does not grow")
    assert set(job_of(status).hosts) == {host_of(status, name).id for name in ("a", "spare", "b")}
    # Growth costs no step: the ranks stopped at one and saved it.
    assert training.begun(r"\d", 3)[-1][0] == training.last_step(of=2) > smaller[0]

    # Once for each loss and for the growth, and nothing for the echoes of them.
    done = [one for one in status.commands if one.outcome is OutcomeStatus.DONE]
    assert [one.kind for one in reversed(done)] == [
        *(CommandKind.HOT_SWAP, CommandKind.SCALE_DOWN, CommandKind.UNCORDON_HOST, CommandKind.SCALE_UP)
    ]
    # All losses are those of a run that was told to use these sizes at these steps.
    assert check_losses(training.launcher_log("a")) == {2, 3}
    ledger = training.ledger()
    assert sum(ledger.totals.values()) == ledger.wall_us * len(ledger.lanes)
    assert len(ledger.lanes) == 3
    assert {"hot_swap", "scale_down", "scale_up"} == {
        event.fields["action"] for event in _events(training) if event.type.value == "action_decided"
    }
    (growth,) = (one for one in ledger.incidents if one.action == "scale_up")
    assert growth.lost_steps == 0
    write_timeline(ledger, training.tmp_path / "timeline.png")
    program.close()
    stop_all(plane.state_dir)
    assert program.survivors(timeout=PATIENCE_S) == []


def _events(training: Training) -> list[RunEvent]:
    text = (training.plane.state_dir / "demo-events.jsonl").read_text()
    return [RunEvent.from_json(line) for line in text.splitlines()]
