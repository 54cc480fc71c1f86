# SPDX-License-Identifier: Apache-2.0
"""One measured run: a launcher, a training script, one killed rank, and what was seen of it.

Launchers differ in their command line and in nothing else: same script, same environment, same
number of ranks, same monitor interval, each run in a directory of its own.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from typing import Literal

import psutil
from restart_spans import Restart, Unmeasured, measure

from resiliency.events import events_path
from resiliency.goodput_measure.reader import read_events
from resiliency.launch.standby import CACHE_DIR_ENV
from resiliency.runtime import JOB_ENV, RUN_DIR_ENV, RunInfo
from resiliency.testing.processes import Command, processes_marked

ROOT = Path(__file__).resolve().parents[1]
JOB = "restart"
RANKS = 2
#: In the command line of the process that ranks are forked from.
TEMPLATE = str(Path("resiliency") / "template")
#: The launcher that is compared with the others.
OURS = "launcher.py"


#: Ours with a supervisor, where a host is lost: a launcher waits on the spare, or has to be started there.
SUPERVISED, SUPERVISED_COLD = "supervisor", "supervisor, cold spare"


#: SIGKILL of the last rank; SIGSTOP, where time counts from its end, when it was found hung; SIGKILL of all
#: processes of one of two hosts, beside which there is a spare (`restart_hosts`).
Failure = Literal["killed", "hung", "host"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A training script, and where its fault lies: after a checkpoint, and some steps beyond it.

    It lies some seconds behind the start, so that what a launcher prepares in the background is prepared.

    `deadline_s` bounds each of the two attempts on a busy machine.
    """

    name: str
    steps: int
    save_every: int
    fault_step: int
    deadline_s: float
    description: str
    #: Saves in the time that the imports of two more launchers take on two busy cores.
    imports_saves: int = 0
    failure: Failure = "killed"

    @property
    def hung(self) -> bool:
        return self.failure == "hung"

    @property
    def hosts(self) -> int:
        return 2 if self.failure == "host" else 1

    @property
    def fault(self) -> str:
        # A host is killed when its rank stands still, so that the others are no step ahead.
        return f"{'rank_killed' if self.failure == 'killed' else 'rank_hung'},step={self.fault_step}"

    @property
    def launcher_flags(self) -> tuple[str, ...]:
        """What a launcher needs to find the fault."""
        return ("--ft-rank-heartbeat-timeout", "10", "--ft-workload-check-interval", "1") if self.hung else ()

    @property
    def restored_step(self) -> int:
        """The step that every launcher must come back to, or the runs did not do the same work."""
        return self.fault_step // self.save_every * self.save_every

    def for_hosts(self) -> Workload:
        """The loss of a host comes later: launchers import one after the other what they prepare."""
        more = self.save_every * self.imports_saves
        return replace(self, failure="host", steps=self.steps + more, fault_step=self.fault_step + more)

    def quick(self) -> Workload:
        """The same with a fifth of the steps: it shows that all runs, and measures nothing."""
        steps, save_every, fault_step = (n // 5 for n in (self.steps, self.save_every, self.fault_step))
        return replace(self, steps=steps, save_every=save_every, fault_step=fault_step)

    def argv(self, directory: Path, *, fault: bool = True) -> list[str]:
        """Script and arguments."""
        if self.name == "light":
            return [
                str(ROOT / "benchmark" / "restart_workload.py"),
                *("--checkpoint", str(directory / "checkpoint.pt"), "--steps", str(self.steps)),
                *("--save-every", str(self.save_every), *(["--fault", self.fault] if fault else [])),
            ]
        return [
            str(ROOT / "benchmark" / "benchmark.py"),
            *("--device", "cpu", "--model", "tiny", "--job-name", JOB, "--max-steps", str(self.steps)),
            *("--persistent-ckpt-dir", str(directory / "storage")),
            *("--persistent-ckpt-interval", str(self.save_every), "--log-interval", "1"),
            *("--log-dir", str(directory / "logs"), *(["--sim-fault-desc", self.fault] if fault else [])),
            *(["--enable-fault-tolerance"] if self.hung else []),
        ]


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            name="light",
            steps=280,
            save_every=25,
            fault_step=260,
            deadline_s=120,
            description="torch and gloo, one linear layer, a torch.save of a few MiB",
        ),
        Workload(
            name="nemo",
            steps=380,
            save_every=50,
            fault_step=360,
            deadline_s=240,
            imports_saves=24,
            description="NeMo 2 and Megatron-core on gloo, model `tiny`, a sharded persistent checkpoint",
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """A command line up to the training script, and what its environment has beyond the common one."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


def launchers(monitor_interval_s: float, hosts: int = 1) -> dict[str, Launcher]:
    """Name -> launcher of one of so many hosts, ours first; with a supervisor, too, for several."""
    flags = [
        *("--nproc-per-node", str(RANKS // hosts), "--max-restarts", "1"),
        *("--monitor-interval", f"{monitor_interval_s:g}"),
    ]
    programs = Path(sys.executable).parent
    alone = ("--standalone",) if hosts == 1 else ()
    torchrun = (str(programs / "torchrun"), *alone, *flags)
    ours = Launcher(argv=(sys.executable, str(ROOT / "launcher.py"), *flags))
    return {
        **({SUPERVISED: ours, SUPERVISED_COLD: ours} if hosts > 1 else {}),
        OURS: ours,
        "standby off": Launcher(argv=(sys.executable, str(ROOT / "launcher.py"), *flags, "--standby", "off")),
        # As shipped, its workers meet in a store that outlives the restart; half of the restarts
        # failed with "connection refused", most likely from the address of a dead rank.
        "torchrun": Launcher(argv=torchrun, env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}),
        # It refuses to start without a flag of its own; the watch of network cards needs InfiniBand.
        "ft_launcher": Launcher(
            argv=(
                str(programs / "ft_launcher"),
                *(*alone, *flags, "--ft-enable-nic-monitor", "false"),
            )
        ),
        "torchrun-as-shipped": Launcher(argv=torchrun),
    }


#: What is compared when nothing is asked for.
DEFAULT_LAUNCHERS = (OURS, "standby off", "torchrun", "ft_launcher")
#: The same where a host is lost.
HOST_LAUNCHERS = (SUPERVISED, SUPERVISED_COLD, OURS, "torchrun", "ft_launcher")
#: Those that notice a rank that hangs.
WATCHFUL = (OURS, "standby off", "ft_launcher")


#: A host that is silent is noticed in 6 s, not 15.
SOON_SILENT = ",keep_alive_interval=1,keep_alive_max_attempt=6"


def rendezvous_flags(
    port: int | str, *, nnodes: str = "2", job: str = JOB, silent: str = SOON_SILENT
) -> list[str]:
    """How launchers of several hosts meet: in a store that none of them serves."""
    conf = f"is_host=0{silent}"
    where = ["--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1", "--rdzv-conf", conf]
    return ["--nnodes", nnodes, "--rdzv-backend", "c10d", "--rdzv-id", job, *where]


def run_once(launcher: Launcher, workload: Workload, directory: Path) -> Restart:
    """Start, watch, wait for success, and measure.

    Nothing that was started outlives the call.

    Raises:
        Unmeasured: the job failed, or was not restarted once from the expected checkpoint.
        TimeoutError, EOFError: it did not get that far in time; the message quotes its output.
    """
    directory.mkdir(parents=True)
    started = time.monotonic()
    env = {**launcher.env, **run_environment(directory, directory)}
    argv = [*launcher.argv, *workload.launcher_flags, *workload.argv(directory)]
    with Command(argv, env=env, cwd=directory, log=directory / "output.txt") as command:
        command.wait_for_line(r"\bstep 1\b", timeout=workload.deadline_s)
        first_step_s = time.monotonic() - started
        with WorkerEnds.of([command]) as ends:
            ended = ends.wait(timeout=workload.deadline_s)
        command.wait_for_line(rf"\bstep {workload.fault_step + 1}\b", timeout=workload.deadline_s)
        memory = memory_bytes([command])
        if (code := command.wait(timeout=workload.deadline_s)) != 0:
            tail = "\n".join(command.lines[-20:])
            raise Unmeasured(f"the launcher ended with exit code {code}, not 0.  Its last lines:\n{tail}")
    events = list(read_events(events_path(RunInfo(job_name=JOB, run_dir=str(directory))), progress=False))
    restart = replace(
        measure(events, ended, zero=min(ended.values()) if workload.hung else None),
        first_step_s=first_step_s,
        memory_bytes=memory,
    )
    if restart.restored_step != workload.restored_step:
        raise Unmeasured(f"restored step {restart.restored_step}, expected {workload.restored_step}.")
    return restart


class WorkerEnds:
    """Sees the processes of the first attempt end, to the millisecond and from outside."""

    def __init__(self, workers: Mapping[int, int]) -> None:
        """Watch `workers`, rank -> process id."""
        self._stack = ExitStack()
        self._ranks: dict[int, int] = {}
        try:
            for rank, pid in workers.items():
                fd = os.pidfd_open(pid)
                self._stack.callback(os.close, fd)
                self._ranks[fd] = rank
        except ProcessLookupError as error:
            self.close()
            raise Unmeasured("a rank ended before its fault, so its end was not seen.") from error

    @classmethod
    def of(cls, commands: Sequence[Command]) -> WorkerEnds:
        """Watch the ranks that run under `commands`.

        Raises:
            Unmeasured: they are not all there.
        """
        workers = dict(_workers(commands))
        if sorted(workers) != list(range(RANKS)):
            raise Unmeasured(f"expected processes of ranks 0 to {RANKS - 1}, found {sorted(workers)}.")
        return cls(workers)

    def wait(self, *, timeout: float) -> dict[int, datetime]:
        """Wait until all have ended; rank -> when.

        Raises:
            TimeoutError: one still runs.
        """
        deadline = time.monotonic() + timeout
        poll = select.poll()
        for fd in self._ranks:
            poll.register(fd, select.POLLIN)
        ended: dict[int, datetime] = {}
        while len(ended) < len(self._ranks):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                running = sorted(set(self._ranks.values()) - set(ended))
                raise TimeoutError(f"ranks {running} of the first attempt still run after {timeout:g} s")
            for fd, _ in poll.poll(left_s * 1000):
                ended[self._ranks[fd]] = datetime.now(timezone.utc)
                poll.unregister(fd)
        return ended

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> WorkerEnds:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def run_environment(own: Path, directory: Path) -> dict[str, str]:
    """Of a launcher that writes its events to `own`; `directory` is the run's."""
    return {
        JOB_ENV: JOB,
        RUN_DIR_ENV: str(own),
        "GOODPUT_USE_FILE_TRACKING": "1",
        "OMP_NUM_THREADS": "1",
        # Of all runs: after the first one, our launcher knows the script's imports.
        CACHE_DIR_ENV: str(directory.parent / "cache"),
    }


def memory_bytes(commands: Sequence[Command]) -> int:
    """Memory of the ranks, and of the template that they were forked from: what is shared counts once."""
    total = 0
    for process in chain.from_iterable(processes_marked(command.id) for command in commands):
        try:
            if "RANK" in process.environ() or TEMPLATE in " ".join(process.cmdline()[:4]):
                total += process.memory_full_info().pss
        except psutil.Error:  # ended meanwhile
            continue
    return total


def _workers(commands: Sequence[Command]) -> Iterator[tuple[int, int]]:
    """(rank, process) of each worker: it has a rank, and what started it has none."""
    for process in chain.from_iterable(processes_marked(command.id) for command in commands):
        try:
            rank = process.environ().get("RANK")
            parent = process.parent()
            inherited = parent is not None and "RANK" in parent.environ()
        except psutil.Error:  # ended meanwhile
            continue
        if rank is not None and not inherited:
            yield int(rank), process.pid
