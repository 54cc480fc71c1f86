# SPDX-License-Identifier: Apache-2.0
"""All of it with real processes: supervisor, local orchestrator, daemons, launchers, training on gloo."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from resiliency.events import RunEvent
from resiliency.goodput_measure.ledger import Ledger, build_ledger
from resiliency.goodput_measure.timeline.file import write_timeline
from resiliency.testing.processes import Command as Program
from supervisor.orchestrators.local import stop_all
from supervisor.orchestrators.processes import Marked, kill_all, marked_processes
from supervisor.values import CommandKind, OutcomeStatus, Request
from supervisor.view.status import CommandStatus, Status
from tests.ports import free_port, free_row
from tests.supervisor_plane.plane import PATIENCE_S, ROOT, Plane, host_of, job_of, open_plane
from tests.supervisor_plane.scripts.train import Model
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.leaks("descriptors", reason="gRPC's own pollers")]

SCRIPTS = Path(__file__).parent / "scripts"
#: Launchers import torch when they start, several at once on a busy machine.
LONG_S = 4 * PATIENCE_S
HOSTS = ("a", "b", "c", "spare")


class Training:
    """A plane with a local orchestrator and one job of three hosts, and a spare."""

    def __init__(self, plane: Plane, stack: ExitStack, tmp_path: Path) -> None:
        self.plane, self.tmp_path = plane, tmp_path
        self.fleet = str(plane.state_dir.resolve())
        store_port = free_port()
        argv = [sys.executable, "-m", "resiliency.launch.rendezvous_store"]
        store = Program([*argv, "--host=127.0.0.1", f"--port={store_port}"], cwd=ROOT)
        stack.enter_context(store)
        conf = "keep_alive_interval=1,keep_alive_max_attempt=4,join_timeout=120,last_call_timeout=1,is_host=0"
        command = [
            *("{python}", str(ROOT / "launcher.py"), "--use-supervisor", "--host-daemon-port={daemon_port}"),
            *("--nnodes={nnodes}", "--nproc-per-node=1", "--max-restarts=3", "--monitor-interval=0.2"),
            *(f"--rdzv-endpoint=127.0.0.1:{store_port}", "--rdzv-id=demo-{generation}"),
            *(f"--rdzv-conf={conf}", "--local-addr=127.0.0.1", f"--run-dir={tmp_path}/run-{{host}}"),
            *("--workload-name=demo", "--job-name=demo", "--container-name=c", "--num-nodes-per-dp=1"),
            *("--num-dp-replicas={replicas}", "--min-num-dp-replicas=1", "--max-num-dp-replicas=3"),
            *("--enable-workload-scaling", str(SCRIPTS / "train.py")),
            *("{state_dir}/disk/{host}", "{state_dir}/memory/{host}"),
        ]
        environment = {
            "OMP_NUM_THREADS": "1",
            "JOB_IDENTIFIER": "demo",
            "RESILIENCY_PEER_ADDRESS": "127.0.0.1",
            "RESILIENCY_RUN_DIR": f"{tmp_path}/run-{{host}}",
        }
        job = {
            "workload": "demo",
            "replicas": 3,
            "grace_s": 120,  # for the save of the step that ranks stop at
            "command": command,
            "environment": environment,
        }
        self.job_file = tmp_path / "job.json"
        first_port = free_row(2 * len(HOSTS))
        self.job_file.write_text(json.dumps({"hosts": list(HOSTS), "first_port": first_port, "jobs": [job]}))
        store.wait_for_line("rendezvous store listens", timeout=PATIENCE_S)
        self.flags = ("--orchestrator=local", f"--job-file={self.job_file}")

    def processes(self, host: str) -> list[Marked]:
        return [one for one in marked_processes(self.fleet) if one.mark.host == host]

    def lose(self, host: str) -> None:
        """Daemon, launcher and ranks of a host end at once, as with its machine; so do memory and disk."""
        kill_all(self.processes(host))
        wait_until(lambda: not self.processes(host), f"processes of {host} are left")
        for kept in ("disk", "memory"):
            shutil.rmtree(self.plane.state_dir / kept / host)

    def launcher_log(self, host: str) -> str:
        path = self.plane.state_dir / "logs" / f"{host}-launcher.log"
        return path.read_text() if path.exists() else ""

    def restored(self, ranks: int) -> list[dict[str, int]]:
        """By tier, the bytes that all ranks began with, for each start with so many."""
        found = re.findall(rf"^rank \d of {ranks} restored (.*)$", self.launcher_log("a"), re.MULTILINE)
        parts = [dict(part.split("=") for part in one.split()) for one in found]
        return [{tier: int(size) for tier, size in one.items()} for one in parts]

    def begun(self, rank: str, ranks: int) -> list[tuple[int, str]]:
        """Step and tier of each start of a rank in the log of the host that always stays."""
        text = self.launcher_log("a")
        found = re.findall(rf"^rank {rank} of {ranks} begins at step (\d+) from (\w+)$", text, re.MULTILINE)
        return [(int(step), tier) for step, tier in found]

    def last_step(self, *, of: int) -> int:
        """The last one that a rank of `a` finished while there were so many ranks."""
        return int(re.findall(rf"^rank \d of {of} step (\d+) loss", self.launcher_log("a"), re.MULTILINE)[-1])

    def goes_on(self, replicas: int, attempt: int, why: str) -> Status:
        """Wait until the job of this size has trained for two saves since an attempt after `attempt`."""

        def look(seen: Status) -> bool:
            if not seen.jobs or job_of(seen).attempt <= attempt or job_of(seen).incident:
                return False
            job = job_of(seen)
            begun = [step for step, _ in self.begun(r"\d", replicas)]
            return job.replicas == replicas and bool(begun) and (job.step or 0) > begun[-1] + 12

        return self.plane.wait_for(look, why, timeout=LONG_S)

    def ledger(self) -> Ledger:
        files = [*self.tmp_path.glob("run-*/demo-events.jsonl"), self.plane.state_dir / "demo-events.jsonl"]
        lines = [line for file in files for line in file.read_text().splitlines()]
        return build_ledger((RunEvent.from_json(line) for line in lines), "demo")


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    with open_plane(tmp_path) as (plane, stack):
        training = Training(plane, stack, tmp_path)
        try:
            yield training
        finally:
            for program in plane.programs.values():
                program.close()
            stop_all(plane.state_dir)


def ended(status: Status, kind: CommandKind) -> CommandStatus | None:
    return next((one for one in status.commands if one.kind is kind and one.outcome), None)


def check_losses(log: str) -> set[int]:
    """Work out again all that a rank said, at the sizes that it ran with; returns the sizes."""
    states: dict[int, torch.Tensor] = {0: Model().weights}
    model, sizes, size, number = Model(), set[int](), 0, 0
    for line in log.splitlines():
        if begins := re.fullmatch(r"rank \d of (\d+) begins at step (\d+) from \w+", line):
            start = int(begins[2])
            if start not in states and start == number + 1:
                # The rank was ended in this step after the others had its part, and they have saved the step.
                model.step([model.part(start, rank) for rank in range(size)])
                states[start] = model.weights
            model, size, number = Model(states[start]), int(begins[1]), start
        elif step := re.fullmatch(r"rank \d of (\d+) step (\d+) loss (\S+)", line):
            size, number = int(step[1]), int(step[2])
            assert model.step([model.part(number, rank) for rank in range(size)]) == step[3], line
            states[number] = model.weights.clone()
            sizes.add(size)
    return sizes


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
