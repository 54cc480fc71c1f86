# SPDX-License-Identifier: Apache-2.0
"""The local orchestrator: hosts are a daemon and a launcher each, as plain processes of one machine.

What is wanted (which hosts work for which job, at which size, at which start of it) is in one file, replaced
as a whole.  A command changes what is wanted and keeps its id there in the same write; then processes are
stopped and started until what is there is what is wanted (`_settle`).  So a command that is repeated, by
another actuator too, goes on where it was, and has its effect once.

A host is *gone* when its daemon and all of its launcher's processes have ended, as after the loss of a
machine; it stays so until it is uncordoned.  A daemon that ended alone is started again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from signal import SIGTERM

from resiliency.daemon_link import GENERATION_ENV
from resiliency.errors import ConfigError
from resiliency.files import write_durably
from supervisor.orchestrator import Answer, TellChange, TellFacts, ignore_facts
from supervisor.orchestrators.job_file import JobFile
from supervisor.orchestrators.processes import (
    Mark,
    Marked,
    has_ended,
    kill_all,
    marked_processes,
    signal_roots,
    start_process,
)
from supervisor.orchestrators.tasks import LoggedTasks
from supervisor.plain import InvalidValue, from_plain, to_plain
from supervisor.values import Change, Command, CommandKind, Evidence, OutcomeStatus

logger = logging.getLogger(__name__)

#: How often processes are looked at.
WATCH_S = 0.5
#: Longest wait for the end of processes that were killed.
KILL_S = 10.0
#: Command ids that are remembered; the controller repeats none that is older.
REMEMBERED = 1024
STATE_NAME = "local.json"

_DAEMON = Path(__file__).parents[1] / "host_daemon.py"


@dataclass(frozen=True, kw_only=True)
class Seat:
    """One host of a job, in the order of node ranks.

    Attributes:
        start: number of the launcher's start that is wanted here; 0 is none, on a host that was drained.
        started: that one was started; a launcher that ends is not started again under the same number.
    """

    host: str
    start: int
    started: bool = False


@dataclass(frozen=True, kw_only=True)
class JobState:
    """One job as it is wanted.  `generation`: starts of the whole job so far."""

    workload: str
    seats: tuple[Seat, ...]
    replicas: int
    generation: int = 0

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(seat.host for seat in self.seats)


@dataclass(frozen=True, kw_only=True)
class LocalState:
    """All that is wanted, and what was done.

    Attributes:
        starts: numbers given so far.
        gone: hosts that are lost.
        applied: ids of commands whose change of this state is in it.
    """

    epoch: int = 0
    starts: int = 0
    jobs: tuple[JobState, ...] = ()
    gone: tuple[str, ...] = ()
    cordoned: tuple[str, ...] = ()
    applied: tuple[str, ...] = ()

    def job(self, workload: str) -> JobState | None:
        return next((job for job in self.jobs if job.workload == workload), None)

    def with_job(self, job: JobState) -> LocalState:
        """Put `job` in the place of the one with its name, or behind the others."""
        others = tuple(one for one in self.jobs if one.workload != job.workload)
        return replace(self, jobs=(*others, job))

    def with_seats(self, job: JobState, hosts: Sequence[str], keep: Collection[str] = ()) -> LocalState:
        """`job` on `hosts`, each with a new start, but those of `keep` go on with theirs."""
        known = {seat.host: seat for seat in job.seats}
        state, seats = self, []
        for host in hosts:
            if host in keep:
                seats.append(known[host])
            else:
                state = replace(state, starts=state.starts + 1)
                seats.append(Seat(host=host, start=state.starts))
        return state.with_job(replace(job, seats=tuple(seats)))

    @property
    def busy(self) -> set[str]:
        """Hosts that a job holds."""
        return {seat.host for job in self.jobs for seat in job.seats}


class _Refusal(Exception):
    """The command cannot be done; its text says why."""


class LocalOrchestrator:
    """See the module.

    Args:
        state_dir: of this fleet; a second one with another directory runs beside it.
        environment: of all that is started, with the addresses of sensor and actuator.
    Raises:
        ConfigError: the state that was kept cannot be read, or does not fit the job file.
    """

    def __init__(self, file: JobFile, state_dir: Path, environment: Mapping[str, str]) -> None:
        self._file = file
        self._dir = state_dir.resolve()
        self._environment = environment
        self._jobs = {job.workload: job for job in file.jobs}
        self._children: list[int] = []
        self._tasks = LoggedTasks("local orchestrator")
        self._tell: TellChange = lambda host, change, evidence: None
        self._state = self._load()

    @asynccontextmanager
    async def running(self, tell: TellChange, tell_facts: TellFacts = ignore_facts) -> AsyncIterator[None]:
        """Start what is wanted and is not there, and watch it; processes outlive the context."""
        del tell_facts  # all hosts are this machine
        self._tell = tell
        self._tasks.start(self._watch())
        for workload in self._jobs:
            self._tasks.start(self._settle_at_start(workload))
        try:
            yield
        finally:
            await self._tasks.end()
            self._reap()

    # ------------------------------------------------------------------------------------- the seam

    def perform(self, command: Command, answer: Callable[[Answer], None]) -> None:
        self._tasks.start(self._perform(command, answer))

    def look(self, host: str, answer: Callable[[bool | None], None]) -> None:
        try:
            answer(self._look(self._name_of(host)))
        except OSError as error:
            logger.warning("host %s cannot be looked at: %s", host, error)
            answer(None)

    def _look(self, name: str) -> bool | None:
        if name not in self._file.hosts:
            return None
        if name in self._state.gone:
            return False
        if any(one.mark.host == name for one in self._processes()):
            return True
        # A spare is its daemon alone, which is started again; nobody can tell that from a lost machine.
        return False if name in self._state.busy else None

    async def _perform(self, command: Command, answer: Callable[[Answer], None]) -> None:
        if command.epoch < self._state.epoch:
            text = f"epoch {command.epoch} refused: this orchestrator has seen {self._state.epoch}"
            answer(Answer(status=OutcomeStatus.FENCED, text=text))
            return
        try:
            workload = command.workload or self._workload_on(self._name_of(command.host))
            if command.id not in self._state.applied:
                wanted = self._apply(command)
                applied = (*wanted.applied, command.id)[-REMEMBERED:]
                self._save(replace(wanted, epoch=command.epoch, applied=applied))
            elif command.epoch > self._state.epoch:
                self._save(replace(self._state, epoch=command.epoch))
            text = await self._settle(workload) if workload else "noted"
            if command.kind is CommandKind.DRAIN_HOST and workload:
                # The job must go on without it: the controller decides how.
                word = f"{self._name_of(command.host)} was drained"
                evidence = Evidence(id=f"local:{command.id}", witness="orchestrator", text=word)
                self._tell(command.host, Change.GONE, evidence)
            answer(Answer(status=OutcomeStatus.DONE, text=text))
        except _Refusal as error:
            answer(Answer(status=OutcomeStatus.FAILED, text=str(error)))
        except OSError as error:
            answer(Answer(status=OutcomeStatus.FAILED, text=str(error), passing=True))

    # ------------------------------------------------------------------------------------- what is wanted

    def _apply(self, command: Command) -> LocalState:
        """The state with `command` in it.

        Raises:
            _Refusal: it cannot be done.
        """
        state, kind = self._state, command.kind
        host = self._name_of(command.host)
        if command.host and host not in self._file.hosts:
            raise _Refusal(f"the job file has no host {host}")
        if kind is CommandKind.CORDON_HOST:
            return replace(state, cordoned=tuple(dict.fromkeys((*state.cordoned, host))))
        if kind is CommandKind.DRAIN_HOST:
            return self._drain(state, host)
        if kind is CommandKind.UNCORDON_HOST:
            cordoned = tuple(one for one in state.cordoned if one != host)
            return replace(state, cordoned=cordoned, gone=tuple(one for one in state.gone if one != host))
        job = state.job(command.workload)
        if job is None:
            raise _Refusal(f"the job file has no job {command.workload}")
        if kind is CommandKind.IN_JOB_RESET:
            return self._revive(state, job)
        if kind in (CommandKind.WORKLOAD_RESET, CommandKind.WORKLOAD_RECREATION):
            return state.with_seats(replace(job, generation=job.generation + 1), job.hosts)
        if kind is CommandKind.HOT_SWAP:
            return self._swap(state, job, host, self._name_of(command.spare))
        if kind in (CommandKind.SCALE_DOWN, CommandKind.SCALE_UP) and command.replicas is not None:
            return self._resize(state, job, host, command.replicas)
        raise _Refusal(f"the local orchestrator has no {kind.value}")

    def _revive(self, state: LocalState, job: JobState) -> LocalState:
        """A launcher that ended alone is started again, and meets the others in their rendezvous."""
        running = {one.mark.host for one in self._processes("launcher")}
        ended = {seat.host for seat in job.seats if seat.started} - running - set(state.gone)
        if len(ended) == len(job.seats):
            raise _Refusal(f"no launcher of {job.workload} is left: the whole job must be started again")
        return state.with_seats(job, job.hosts, keep=set(job.hosts) - ended)

    def _drain(self, state: LocalState, host: str) -> LocalState:
        state = replace(state, cordoned=tuple(dict.fromkeys((*state.cordoned, host))))
        for job in state.jobs:
            seats = tuple(replace(seat, start=0) if seat.host == host else seat for seat in job.seats)
            state = state.with_job(replace(job, seats=seats))
        return state

    def _swap(self, state: LocalState, job: JobState, host: str, spare: str) -> LocalState:
        if host not in job.hosts:
            raise _Refusal(f"{host} does not work for {job.workload}; {', '.join(job.hosts)} do")
        if spare not in self._free(state):
            raise _Refusal(f"{spare} is no spare: it is busy, cordoned or gone")
        hosts = [spare if one == host else one for one in job.hosts]
        survivors = set(job.hosts) - {host}
        return self._without(state, host).with_seats(job, hosts, keep=survivors)

    def _resize(self, state: LocalState, job: JobState, host: str, replicas: int) -> LocalState:
        """The whole job starts again, because its launchers are told the size when they start."""
        wanted = replicas * self._jobs[job.workload].nodes_per_replica
        hosts = [one for one in job.hosts if one != host]
        if replicas > job.replicas:
            hosts += self._free(state)
        if len(hosts) < wanted:
            raise _Refusal(f"{replicas} replicas need {wanted} hosts, and there are {len(hosts)}")
        if host:
            state = self._without(state, host)
        resized = replace(job, replicas=replicas, generation=job.generation + 1)
        return state.with_seats(resized, hosts[:wanted])

    def _without(self, state: LocalState, host: str) -> LocalState:
        """A host that a job is taken from; if nothing of it is left it counts as gone."""
        if host in state.gone or any(one.mark.host == host for one in self._processes()):
            return state
        return replace(state, gone=(*state.gone, host))

    def _free(self, state: LocalState) -> list[str]:
        taken = state.busy | set(state.gone) | set(state.cordoned)
        return [host for host in self._file.hosts if host not in taken]

    # ------------------------------------------------------------------------------------- what is there

    async def _settle(self, workload: str) -> str:
        """Stop and start launchers until those of `workload` are the wanted ones; says what was done."""
        stopped: set[str] = set()
        while True:
            job = self._state.job(workload)
            assert job is not None
            wanted = {seat.host: _start_text(workload, seat.start) for seat in job.seats}
            mine = [one for one in self._processes("launcher") if _workload_of(one.mark) == workload]
            stale = [one for one in mine if one.mark.start != wanted.get(one.mark.host)]
            if not stale:
                break
            stopped |= {one.mark.host for one in stale}
            await self._stop(stale, self._jobs[workload].grace_s)
            # What is wanted may have changed meanwhile.
        there = {one.mark.host for one in mine}
        missing = [
            (rank, seat)
            for rank, seat in enumerate(job.seats)
            if seat.start and not seat.started and seat.host not in there
        ]
        for rank, seat in missing:
            self._start_launcher(job, rank, seat)
        seats = tuple(replace(seat, started=bool(seat.start)) for seat in job.seats)
        self._save(self._state.with_job(replace(job, seats=seats)))
        said = [f"stopped on {', '.join(sorted(stopped))}"] if stopped else []
        said += [f"started on {', '.join(seat.host for _, seat in missing)}"] if missing else []
        return ", ".join(said) or "as wanted"

    async def _stop(self, processes: Sequence[Marked], grace_s: float) -> None:
        """SIGTERM to the launchers, SIGKILL to what is left of them after `grace_s`.

        Raises:
            OSError: processes are left that nothing ends.
        """
        starts = {(one.mark.host, one.mark.start) for one in processes}

        def left() -> list[Marked]:
            return [one for one in self._processes() if (one.mark.host, one.mark.start) in starts]

        signal_roots(processes, SIGTERM)
        end = time.monotonic() + grace_s
        while left() and time.monotonic() < end:
            await asyncio.sleep(WATCH_S / 5)
        end = time.monotonic() + KILL_S
        while remaining := left():
            if time.monotonic() >= end:
                pids = ", ".join(str(one.pid) for one in remaining[:8])
                raise OSError(f"processes {pids} do not end after SIGKILL")
            kill_all(remaining)
            await asyncio.sleep(WATCH_S / 5)

    def _start_launcher(self, job: JobState, rank: int, seat: Seat) -> None:
        settings, port = self._jobs[job.workload], self._file.launcher_port(seat.host)
        values = {
            "python": sys.executable,
            "host": seat.host,
            "node_rank": rank,
            "nnodes": len(job.seats),
            "replicas": job.replicas,
            "generation": job.generation,
            "daemon_port": port,
            "state_dir": self._dir,
        }
        argv = [_fill(word, values) for word in settings.command]
        environment = {name: _fill(text, values) for name, text in settings.environment.items()}
        environment[GENERATION_ENV] = str(job.generation)
        start = _start_text(job.workload, seat.start)
        logger.info("launcher of %s on %s starts: %s", job.workload, seat.host, " ".join(argv))
        self._start(argv, Mark(fleet=self._fleet, host=seat.host, part="launcher", start=start), environment)

    def _start_daemon(self, host: str) -> None:
        argv = [
            *(sys.executable, str(_DAEMON)),
            f"--launcher_port={self._file.launcher_port(host)}",
            f"--port={self._file.probe_port(host)}",
            f"--workers_per_host={self._file.workers_per_host}",
            f"--state_dir={self._dir / 'hosts' / host}",
            "--address=127.0.0.1",
        ]
        (self._dir / "hosts").mkdir(exist_ok=True)
        logger.info("daemon of %s starts", host)
        self._start(argv, Mark(fleet=self._fleet, host=host, part="daemon"), {"NODE_NAME": host})

    def _start(self, argv: Sequence[str], mark: Mark, environment: Mapping[str, str]) -> None:
        log = self._dir / "logs" / f"{mark.host}-{mark.part}.log"
        environment = {**self._environment, **environment}
        self._children.append(start_process(argv, mark=mark, environment=environment, log=log))

    async def _watch(self) -> None:
        """Keep daemons running, notice lost hosts, and wait for children that ended."""
        suspects: set[str] = set()
        problem = ""
        while True:
            try:
                self._reap()
                suspects = self._look_at_hosts(suspects)
                if problem:
                    logger.warning("local orchestrator watches its hosts again")
                problem = ""
            except OSError as error:  # a full disk, no free process or descriptor: these pass
                if not problem:
                    logger.error("local orchestrator cannot look after its hosts: %s; trying again", error)
                problem = str(error)
            await asyncio.sleep(WATCH_S)

    def _reap(self) -> None:
        self._children = [child for child in self._children if not has_ended(child)]

    def _look_at_hosts(self, suspects: set[str]) -> set[str]:
        """Act upon hosts of `suspects` that are without a daemon; returns those to look at again.

        Twice, because the parts of a host that is lost do not all end in the same instant.
        """
        running: dict[str, set[str]] = {}
        for one in self._processes():
            running.setdefault(one.mark.host, set()).add(one.mark.part)
        missing = {
            host
            for host in self._file.hosts
            if "daemon" not in running.get(host, ()) and host not in self._state.gone
        }
        for host in missing & suspects:
            if host in self._launched and host not in running:
                logger.warning("host %s is gone: its daemon and its launcher have ended", host)
                self._save(replace(self._state, gone=(*self._state.gone, host)))
            else:
                self._start_daemon(host)
        return missing - suspects

    @property
    def _launched(self) -> set[str]:
        """Hosts that a launcher was started on."""
        return {seat.host for job in self._state.jobs for seat in job.seats if seat.started}

    # ------------------------------------------------------------------------------------- small parts

    @property
    def _fleet(self) -> str:
        return str(self._dir)

    def _processes(self, part: str = "") -> list[Marked]:
        return [one for one in marked_processes(self._fleet) if part in ("", one.mark.part)]

    def _name_of(self, host: str) -> str:
        """A daemon's id is its host's name, a dot, and the start of the machine."""
        return host if host in self._file.hosts else host.rpartition(".")[0]

    def _workload_on(self, host: str) -> str:
        return next((job.workload for job in self._state.jobs if host in job.hosts), "")

    async def _settle_at_start(self, workload: str) -> None:
        try:
            logger.info("job %s: %s", workload, await self._settle(workload))
        except OSError as error:
            logger.error("job %s is not as wanted: %s", workload, error)

    def _load(self) -> LocalState:
        path = self._dir / STATE_NAME
        try:
            state = from_plain(LocalState, json.loads(path.read_text()))
        except FileNotFoundError:
            state = LocalState()
        except (OSError, ValueError, InvalidValue) as error:
            raise ConfigError(
                f"--state-dir: {path} cannot be read: {error}.",
                hint="Stop what the local orchestrator started, remove the file, and start again.",
                flag="--state-dir",
                path=str(path),
            ) from error
        unknown = state.busy - set(self._file.hosts) | {job.workload for job in state.jobs} - set(self._jobs)
        if unknown:
            raise ConfigError(
                f"--job-file has not {', '.join(sorted(unknown))}, which {path} has.",
                hint="Use the job file of before, or another --state-dir.",
                flag="--job-file",
            )
        for settings in self._file.jobs:
            if state.job(settings.workload) is None:
                free = [host for host in self._file.hosts if host not in state.busy | set(state.gone)]
                hosts = free[: settings.replicas * settings.nodes_per_replica]
                job = JobState(workload=settings.workload, seats=(), replicas=settings.replicas)
                state = state.with_seats(job, hosts)
        return state

    def _save(self, state: LocalState) -> None:
        """Replace the file; what is in it counts from then on.

        Raises:
            OSError: it cannot be written; what is wanted is what it was.
        """
        write_durably(self._dir / STATE_NAME, json.dumps(to_plain(state)).encode())
        self._state = state


def stop_all(state_dir: Path) -> int:
    """Kill all that local orchestrators with this directory have started; returns how many processes."""
    fleet, killed = str(state_dir.resolve()), set()
    end = time.monotonic() + KILL_S
    while (left := marked_processes(fleet)) and time.monotonic() < end:
        killed |= {one.pid for one in left}
        kill_all(left)
        time.sleep(WATCH_S / 10)
    for pid in killed:
        # Where it is a child of this process: one that gives its memory back has ended for all but `waitpid`.
        while not has_ended(pid) and time.monotonic() < end:
            time.sleep(WATCH_S / 10)
    return len(killed)


def _start_text(workload: str, start: int) -> str:
    return f"{workload}:{start}"


def _workload_of(mark: Mark) -> str:
    return mark.start.rpartition(":")[0]


def _fill(text: str, values: Mapping[str, object]) -> str:
    """`text` with its placeholders replaced; other braces stay, because arguments may be JSON."""
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", str(value))
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """``python3 -m supervisor.orchestrators.local --stop DIR``: end a local fleet."""
    parser = argparse.ArgumentParser(
        prog="python3 -m supervisor.orchestrators.local",
        description="End all daemons, launchers and ranks that a local orchestrator has started.",
    )
    parser.add_argument("--stop", metavar="DIR", type=Path, required=True, help="Its --state-dir.")
    print(f"{stop_all(parser.parse_args(argv).stop)} processes ended")
    return 0


if __name__ == "__main__":
    sys.exit(main())
