# SPDX-License-Identifier: Apache-2.0
"""A job that trains on gloo under a whole supervisor: what journeys through its life share."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from resiliency.events import RunEvent
from resiliency.goodput_measure.ledger import Ledger, build_ledger
from resiliency.testing.processes import Command as Program
from resiliency.testing.processes import stop_process
from supervisor.orchestrators.local import stop_all
from supervisor.orchestrators.processes import Marked, kill_all, marked_processes
from supervisor.values import CommandKind
from supervisor.view.status import CommandStatus, Status
from tests.ports import free_port, free_row
from tests.supervisor_plane.plane import PATIENCE_S, ROOT, Plane, job_of, open_plane
from tests.supervisor_plane.scripts.train import Model
from tests.waiting import wait_until

SCRIPTS = Path(__file__).parent / "scripts"
#: Launchers import torch when they start, several at once on a busy machine.
LONG_S = 4 * PATIENCE_S


class Training:
    """A plane with a local orchestrator and one job, on the first of `hosts`; the others are spares.

    Args:
        max_restarts: of each launcher.
        waiting: launchers beyond the size; they begin when they are let in.
    """

    def __init__(
        self,
        plane: Plane,
        stack: ExitStack,
        tmp_path: Path,
        *,
        hosts: Sequence[str],
        replicas: int,
        max_restarts: int = 3,
        waiting: int = 0,
    ) -> None:
        self.plane, self.tmp_path = plane, tmp_path
        self.fleet = str(plane.state_dir.resolve())
        store_port = free_port()
        argv = [sys.executable, "-m", "resiliency.launch.rendezvous_store"]
        store = Program([*argv, "--host=127.0.0.1", f"--port={store_port}"], cwd=ROOT)
        stack.enter_context(store)
        conf = "keep_alive_interval=1,keep_alive_max_attempt=4,join_timeout=120,last_call_timeout=1,is_host=0"
        command = [
            *("{python}", str(ROOT / "launcher.py"), "--use-supervisor", "--host-daemon-port={daemon_port}"),
            *(
                "--nnodes={nnodes}",
                "--nproc-per-node=1",
                f"--max-restarts={max_restarts}",
                "--monitor-interval=0.2",
            ),
            *(f"--rdzv-endpoint=127.0.0.1:{store_port}", "--rdzv-id=demo-{generation}"),
            *(f"--rdzv-conf={conf}", "--local-addr=127.0.0.1", f"--run-dir={tmp_path}/run-{{host}}"),
            *("--workload-name=demo", "--job-name=demo", "--container-name=c", "--num-nodes-per-dp=1"),
            *("--num-dp-replicas={replicas}", "--min-num-dp-replicas=1"),
            f"--max-num-dp-replicas={replicas}",
            *("--enable-workload-scaling", str(SCRIPTS / "train.py")),
            *("{state_dir}/disk/{host}", "{state_dir}/memory/{host}"),
        ]
        environment = {
            "OMP_NUM_THREADS": "1",
            "JOB_IDENTIFIER": "demo",
            "RESILIENCY_PEER_ADDRESS": "127.0.0.1",
            "RESILIENCY_RUN_DIR": f"{tmp_path}/run-{{host}}",
        }
        beyond = hosts[replicas : replicas + waiting]
        for host in beyond:
            self._door(host).touch()
        held = ["sh", "-c", 'while [ -e "$0" ]; do sleep 0.1; done; exec "$@"', str(self._door("{host}"))]
        command = [*(held if beyond else []), *command]
        job = {
            "workload": "demo",
            "replicas": replicas,
            "waiting": waiting,
            "grace_s": 120,  # for the save of the step that ranks stop at
            "command": command,
            "environment": environment,
        }
        self.job_file = tmp_path / "job.json"
        for host in hosts:
            self._kernel_log(host).touch()
        file = {
            "hosts": list(hosts),
            "first_port": free_row(2 * len(hosts)),
            "daemon_flags": ["--watchdogs=xid", f"--kernel_log={self._kernel_log('{host}')}"],
            "jobs": [job],
        }
        self.job_file.write_text(json.dumps(file))
        store.wait_for_line("rendezvous store listens", timeout=PATIENCE_S)
        self.flags = ("--orchestrator=local", f"--job-file={self.job_file}")

    def _door(self, host: str) -> Path:
        return self.tmp_path / f"closed-{host}"

    def let_in(self, host: str) -> None:
        """A launcher beyond the size begins; the job has its hosts, so it waits for a place."""
        self._door(host).unlink()
        wait_until(lambda: "meeting other hosts" in self.launcher_log(host), f"{host} begins nothing")

    def processes(self, host: str) -> list[Marked]:
        return [one for one in marked_processes(self.fleet) if one.mark.host == host]

    def lose(self, host: str) -> None:
        """Daemon, launcher and ranks of a host end at once, as with its machine; so do memory and disk."""
        kill_all(self.processes(host))
        wait_until(lambda: not self.processes(host), f"processes of {host} are left")
        for kept in ("disk", "memory"):
            shutil.rmtree(self.plane.state_dir / kept / host, ignore_errors=True)  # a spare has none

    def _kernel_log(self, host: str) -> Path:
        return self.tmp_path / f"kernel-{host}.log"

    def rank_on(self, host: str) -> int:
        """The process of the rank that runs there."""
        return newest_rank(self.launcher_log(host))

    def remove_gpu(self, host: str) -> None:
        """From its next step on each rank there says that it finds no GPU."""
        (self.plane.state_dir / "memory" / f"{host}-no-gpu").touch()

    def break_gpu(self, host: str) -> None:
        break_gpu(self.launcher_log(host), self._kernel_log(host))

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
        files = [
            *self.tmp_path.glob("run-*/demo-events.jsonl"),
            *self.plane.state_dir.glob("demo-events.jsonl"),
        ]
        lines = [line for file in files for line in file.read_text().splitlines()]
        return build_ledger((RunEvent.from_json(line) for line in lines), "demo")


def newest_rank(launcher_log: str) -> int:
    """The process of the rank that a launcher of one worker has started last."""
    return int(re.findall(r"started 1 workers.*, as processes (\d+)", launcher_log)[-1])


def break_gpu(launcher_log: str, kernel_log: Path) -> None:
    """The GPU of a host falls off its bus, and the rank hangs in its driver."""
    stop_process(newest_rank(launcher_log))
    with kernel_log.open("a") as log:
        log.write("NVRM: Xid (PCI:0000:01:00): 79, pid=7, name=python3, GPU has fallen off the bus.\n")


@contextmanager
def open_training(
    tmp_path: Path, *, hosts: Sequence[str], replicas: int, **options: int
) -> Iterator[Training]:
    with open_plane(tmp_path) as (plane, stack):
        training = Training(plane, stack, tmp_path, hosts=hosts, replicas=replicas, **options)
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
