# SPDX-License-Identifier: Apache-2.0
"""A run of goodput_under_failures.py in which whole hosts are lost, with their disks and memory.

A host is a launcher with one rank, and a daemon where there is a supervisor: processes of this machine.  Its
disk and memory are directories of its own.  A loss kills all of these processes and removes the
directories.  After `AWAY` of the mean interval the host is back, with nothing in them.

All contestants meet in a store outside of the hosts, and note their steps outside of them.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil
from failures_jobs import OURS, UNDISTURBED, Contestant, Training
from failures_runs import (
    END_S,
    JOB,
    MEMORY,
    ROOT,
    Plan,
    Run,
    RunFailed,
    counted,
    kept,
    log_of_faults,
    patient,
)
from measuring import free_ports
from restart_runs import RANKS, launchers, rendezvous_flags
from supervisor_plane import PARTS, WAIT_S, ask, free_range

from resiliency.events import EventStream, EventType, FileSink, events_path
from resiliency.launch.standby import CACHE_DIR_ENV
from resiliency.runtime import JOB_ENV, RUN_DIR_ENV
from resiliency.testing.processes import Command, processes_marked
from supervisor.orchestrators.local import stop_all
from supervisor.orchestrators.processes import Marked, kill_all, marked_processes
from supervisor.values import Request
from supervisor.view.status import ActRequest

#: How long a lost host is away, in mean times between losses.
AWAY = 1 / 3
#: Words before those of a launcher: it starts once a file, the next word, is no longer there.
HELD = ("sh", "-c", 'while [ -e "$0" ]; do sleep 0.2; done; exec "$@"')
_LOOK_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Of the host that has a rank at a moment: which host that is, differs between contestants."""

    at_s: float
    rank: int


def losses(plan: Plan) -> list[Loss]:
    """The same for all contestants: times of the plan, ranks by its seed."""
    draw = random.Random(plan.seed)  # noqa: S311 - a schedule
    return [
        Loss(at_s=fault.at_us / 1e6, rank=draw.randrange(plan.training.hosts)) for fault in plan.schedule()
    ]


class Fleet(Protocol):
    """The hosts of one job."""

    @property
    def names(self) -> Sequence[str]: ...

    def processes(self, host: str) -> list[int]: ...

    def lose(self, host: str) -> None: ...

    def come_back(self, host: str) -> None: ...

    def output(self) -> str:
        """For an error: the last that was said."""
        ...

    def has_ended(self) -> bool:
        """Whether its job cannot go on, whatever host comes back."""
        ...

    def incidents_s(self) -> list[dict[str, float]]:
        """Of a supervisor, the oldest first: seconds of each part."""
        ...


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where a job runs, and how one of its hosts is started.

    Attributes:
        directory: a storage of all hosts, which no loss touches.
        memory: holds a directory for each host.
    """

    training: Training
    contestant: Contestant
    directory: Path
    memory: Path
    save_every: int
    store_port: int
    ends_at: float

    def disk(self, host: str) -> Path:
        return self.directory / "disks" / host

    def logs(self, host: str) -> Path:
        """Events of a host, as somebody collects them."""
        return self.directory / "logs" / host

    def launcher(self, *, nnodes: str, job: str = JOB) -> list[str]:
        """A launcher with one rank."""
        launcher = launchers(0.1, hosts=RANKS)[self.contestant.launcher]
        meet = rendezvous_flags(self.store_port, nnodes=nnodes, job=job)
        return [*patient(launcher), *meet]

    def script(self, host: str) -> list[str]:
        return self.training.argv(
            self.contestant,
            self.directory,
            job=JOB,
            save_every=self.save_every,
            memory=str(self.memory / host),
            ends_at=self.ends_at,
            local=str(self.disk(host) / "local"),
        )

    def environment(self, host: str) -> dict[str, str]:
        return {
            **launchers(0.1)[self.contestant.launcher].env,
            JOB_ENV: JOB,
            RUN_DIR_ENV: str(self.logs(host)),
            "GOODPUT_USE_FILE_TRACKING": "1",
            "OMP_NUM_THREADS": "1",
            "RESILIENCY_PEER_ADDRESS": "127.0.0.1",
            CACHE_DIR_ENV: str(self.disk(host) / "cache"),
        }

    def remove(self, host: str) -> None:
        """Disk and memory."""
        for place in (self.disk(host), self.memory / host):
            shutil.rmtree(place, ignore_errors=True)


class Launchers:
    """A launcher on each host, which a lost host's watchman starts again when the host is back."""

    def __init__(self, site: Site, names: Sequence[str], stack: ExitStack) -> None:
        self.names = names
        self._site, self._stack = site, stack
        self._running: dict[str, Command] = {}
        self._starts = 0
        for host in names:
            self.come_back(host)

    def processes(self, host: str) -> list[int]:
        command = self._running.get(host)
        return [] if command is None else [one.pid for one in processes_marked(command.id)]

    def lose(self, host: str) -> None:
        self._running.pop(host).kill()
        self._site.remove(host)

    def come_back(self, host: str) -> None:
        site, self._starts = self._site, self._starts + 1
        wanted = site.training.hosts
        argv = [*site.launcher(nnodes=f"{wanted}:{wanted}"), *site.script(host)]
        log = site.directory / f"{host}-{self._starts}.txt"
        command = Command(argv, env=site.environment(host), cwd=site.directory, log=log)
        self._running[host] = self._stack.enter_context(command)

    def output(self) -> str:
        return "\n".join(line for one in self._running.values() for line in one.lines[-20:])

    def has_ended(self) -> bool:
        ended = [one for one in self._running.values() if one.returncode is not None]
        return len(self.names) - len(ended) < self._site.training.hosts

    def incidents_s(self) -> list[dict[str, float]]:
        return []


class Supervised:
    """A supervisor with its local orchestrator, which starts launchers and daemons; default thresholds."""

    def __init__(self, site: Site, names: Sequence[str], stack: ExitStack) -> None:
        self.names = names
        self._site = site
        self.state_dir = site.directory / "state"
        self._ports = dict(zip(PARTS, free_ports(len(PARTS)), strict=True))
        job_file = site.directory / "job.json"
        job_file.write_text(json.dumps(self._job_file()))
        argv = [sys.executable, "-m", "supervisor", "--all-in-one", f"--state-dir={self.state_dir}"]
        argv += ["--plaintext", "--listen=127.0.0.1", "--status-port=off"]
        argv += ["--orchestrator=local", f"--job-file={job_file}"]
        addresses = {f"{part.upper()}_ADDRESS": f"127.0.0.1:{port}" for part, port in self._ports.items()}
        stack.callback(stop_all, self.state_dir)
        log = site.directory / "supervisor.txt"
        command = Command(argv, env={**addresses, "PYTHONPATH": str(ROOT)}, cwd=ROOT, log=log, cold=True)
        self._program = stack.enter_context(command)
        self._program.wait_for_line("sensor ready at port", timeout=site.training.start_s)

    def _job_file(self) -> Mapping[str, object]:
        site, hosts = self._site, self._site.training.hosts
        job = [
            *("--use-supervisor", "--host-daemon-port={daemon_port}", f"--workload-name={JOB}"),
            *(f"--job-name={JOB}", "--container-name=c", "--num-nodes-per-dp=1"),
            *("--num-dp-replicas={replicas}", f"--min-num-dp-replicas={hosts}"),
            f"--max-num-dp-replicas={hosts}",
        ]
        launcher = site.launcher(nnodes="{nnodes}", job=f"{JOB}-{{generation}}")
        started = {
            "workload": JOB,
            "replicas": hosts,
            # A reset of the whole job may want a host that is still away.
            "command": [*HELD, str(self._away("{host}")), *launcher, *job, *site.script("{host}")],
            "environment": {**site.environment("{host}"), "JOB_IDENTIFIER": JOB, "NODE_NAME": "{host}"},
        }
        first_port = free_range(2 * len(self.names))
        return {"hosts": list(self.names), "first_port": first_port, "jobs": [started]}

    def _away(self, host: str) -> Path:
        """There while the host is not."""
        return self._site.directory / f"{host}.away"

    def processes(self, host: str) -> list[int]:
        return [one.pid for one in self._of(host)]

    def _of(self, host: str) -> list[Marked]:
        return [one for one in marked_processes(str(self.state_dir.resolve())) if one.mark.host == host]

    def lose(self, host: str) -> None:
        self._away(host).touch()
        kill_all(self._of(host))
        self._site.remove(host)

    def come_back(self, host: str) -> None:
        self._away(host).unlink()
        asked = ActRequest(request=Request.UNCORDON, by="benchmark", host=host, why="it was repaired")
        ask(self._ports["controller"], lambda controller: controller.act(asked, timeout_s=WAIT_S))

    def output(self) -> str:
        return "\n".join(self._program.lines[-20:])

    def has_ended(self) -> bool:
        return self._program.returncode is not None

    def incidents_s(self) -> list[dict[str, float]]:
        status = ask(self._ports["controller"], lambda controller: controller.status(timeout_s=WAIT_S))
        about = [one for one in status.incidents if one.subject == JOB]
        return [_seconds(one.spans) for one in sorted(about, key=lambda one: -one.age_s)]


class _Span(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def seconds(self) -> float | None: ...


def _seconds(spans: Sequence[_Span]) -> dict[str, float]:
    found: dict[str, float] = {}
    for span in spans:
        found[span.name] = found.get(span.name, 0.0) + (span.seconds or 0.0)
    return found


class Losing:
    """Loses hosts at their times and brings them back.

    Args:
        begin: of the window.
        tell: is called with each loss, the host and the time.
    """

    def __init__(
        self,
        fleet: Fleet,
        planned: Sequence[Loss],
        *,
        begin: float,
        away_s: float,
        tell: Callable[[Loss, str], None],
    ) -> None:
        self._fleet, self._planned, self._tell = fleet, list(planned), tell
        self._begin, self._away_s = begin, away_s
        self._away: list[tuple[float, str]] = []

    def look(self, now: float) -> None:
        """Do what is due.  A loss that finds its rank nowhere is missed."""
        while self._away and self._away[0][0] <= now:
            self._fleet.come_back(self._away.pop(0)[1])
        while self._planned and self._begin + self._planned[0].at_s <= now:
            loss = self._planned.pop(0)
            if (host := host_of(self._fleet, loss.rank)) is not None:
                self._fleet.lose(host)
                self._tell(loss, host)  # not before: a step that ends meanwhile is none that came after
                self._away.append((now + self._away_s, host))


def host_of(fleet: Fleet, rank: int) -> str | None:
    """The host on which a rank runs now."""
    for host in fleet.names:
        for pid in fleet.processes(host):
            with suppress(psutil.Error):
                if psutil.Process(pid).environ().get("RANK") == str(rank):
                    return host
    return None


def undisturbed_rate(training: Training, directory: Path, wall_s: float) -> float:
    """Steps a second without failures and saves.

    Raises:
        RunFailed, TimeoutError, EOFError: it cannot be measured.
    """
    with _fleet(training, UNDISTURBED, directory, save_every=1, wall_s=wall_s, spares=0) as fleet:
        _wait_for_first_step(training, fleet, directory)
        begin = time.time()
        while time.time() < begin + wall_s:
            if fleet.has_ended():
                raise RunFailed(f"the job ended before its window; at last:\n{fleet.output()}")
            time.sleep(_LOOK_S)
    return kept(training.notes(directory, JOB), begin, begin + wall_s)[0] / wall_s


def run_once(name: str, number: int, plan: Plan, directory: Path) -> Run:
    """Run one contestant through the losses of the plan.

    Raises:
        RunFailed: the ledger does not add up.
        TimeoutError, EOFError: it did not start.
    """
    training, contestant = plan.training, plan.training.contestants[name]
    is_ours = name == OURS
    with _fleet(
        training, contestant, directory, save_every=plan.save_every, wall_s=plan.wall_s, supervised=is_ours
    ) as fleet:
        _wait_for_first_step(training, fleet, directory)
        begin = time.time()
        log = log_of_faults(directory)
        with EventStream(log, [FileSink(events_path(log))]) as events:

            def tell(loss: Loss, host: str) -> None:
                events.emit(EventType.FAULT_INJECTED, rank=loss.rank, fault="host lost", lost_host=host)

            away_s = plan.fault_interval_s * AWAY
            losing = Losing(fleet, losses(plan), begin=begin, away_s=away_s, tell=tell)
            ended = _watch(fleet, losing, lambda: time.time() >= begin + plan.wall_s)
            if ended is None:
                # Hosts still come back: a job may wait for them.
                deadline = begin + plan.wall_s + training.start_s

                def is_over() -> bool:
                    newest = training.notes(directory, JOB)[-1].time
                    return newest > begin + plan.wall_s or time.time() > deadline

                _watch(fleet, losing, is_over)
        incidents_s = fleet.incidents_s()
    run_dirs = [*sorted((directory / "logs").glob("*")), directory / "state"] if is_ours else []
    return counted(name, number, plan, directory, run_dirs, begin=begin, ended=ended, incidents_s=incidents_s)


def _watch(fleet: Fleet, losing: Losing, is_over: Callable[[], bool]) -> float | None:
    """When the job ended by itself; None: it did not before `is_over`."""
    while not is_over():
        losing.look(time.time())
        if fleet.has_ended():
            return time.time()
        time.sleep(_LOOK_S)
    return None


@contextmanager
def _fleet(
    training: Training,
    contestant: Contestant,
    directory: Path,
    *,
    save_every: int,
    wall_s: float,
    spares: int = 1,
    supervised: bool = False,
) -> Iterator[Fleet]:
    """Hosts that are started; nothing of them outlives this."""
    directory.mkdir(parents=True)
    (port,) = free_ports(1)
    names = [*(f"host{number}" for number in range(training.hosts)), *["spare"] * spares]
    with ExitStack() as stack:
        memory = stack.enter_context(tempfile.TemporaryDirectory(prefix="failures-", dir=MEMORY))
        site = Site(
            training=training,
            contestant=contestant,
            directory=directory,
            memory=Path(memory),
            save_every=save_every,
            store_port=port,
            ends_at=time.monotonic() + 3 * training.start_s + wall_s + END_S,
        )
        for host in names:
            site.logs(host).mkdir(parents=True)
        store = [sys.executable, "-m", "resiliency.launch.rendezvous_store", "--host=127.0.0.1"]
        listening = Command([*store, f"--port={port}"], cwd=ROOT, log=directory / "store.txt")
        stack.enter_context(listening).wait_for_line("rendezvous store listens", timeout=training.start_s)
        yield Supervised(site, names, stack) if supervised else Launchers(site, names, stack)


def _wait_for_first_step(training: Training, fleet: Fleet, directory: Path) -> None:
    """Raises: TimeoutError, EOFError."""
    deadline = time.monotonic() + training.start_s
    notes = directory / "steps"
    while not notes.exists() or not any(note.step for note in training.notes(directory, JOB)):
        if fleet.has_ended():
            raise EOFError(f"the job ended before its first step; at last:\n{fleet.output()}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"there was no step within {training.start_s:g} s; at last:\n{fleet.output()}")
        time.sleep(_LOOK_S)
