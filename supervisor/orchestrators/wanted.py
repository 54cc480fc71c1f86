# SPDX-License-Identifier: Apache-2.0
"""Hosts that are a daemon and a launcher each, wherever their processes are.

What is wanted (which hosts work for which job, at which size, at which start of it) is in one file, replaced
as a whole.  A command changes what is wanted and keeps its id there in the same write; then processes are
stopped and started until what is there is what is wanted (`_settle`).  So a command that is repeated, by
another actuator too, goes on where it was, and has its effect once.

A host is *gone* when its daemon and all of its launcher's processes have ended, as after the loss of a
machine.  A daemon that ended alone is started again, and what no command could do because a host was out of
reach is done once it is in reach.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from signal import SIGTERM, Signals
from typing import Protocol

from resiliency.daemon_link import GENERATION_ENV
from resiliency.errors import ConfigError
from resiliency.files import write_durably
from supervisor.orchestrator import Answer, TellChange, TellFacts, ignore_facts
from supervisor.orchestrators.job_file import JobFile
from supervisor.orchestrators.processes import Mark, Marked
from supervisor.orchestrators.tasks import LoggedTasks
from supervisor.plain import InvalidValue, from_plain, to_plain
from supervisor.values import Change, Command, CommandKind, Evidence, OutcomeStatus

logger = logging.getLogger(__name__)

#: How often processes that were signalled are looked at.
_LOOK_S = 0.1
#: Longest wait for the end of processes that were killed.
KILL_S = 10.0
#: Command ids that are remembered; the controller repeats none that is older.
REMEMBERED = 1024


@dataclass(frozen=True, kw_only=True)
class Seen:
    """All hosts at one moment.

    Attributes:
        processes: that live on hosts which could be looked at.
        unseen: hosts that could not; nothing is concluded about them.
        absent: hosts that have no machine: nothing lives there, and nothing can be started.
        addresses: of the others, where they are reached.
        boots: and, where a host may move to another machine, the start of the one that it is on now.
    """

    processes: Sequence[Marked]
    unseen: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()
    addresses: Mapping[str, str] = field(default_factory=dict)
    boots: Mapping[str, str] = field(default_factory=dict)

    def of(self, part: str) -> list[Marked]:
        return [one for one in self.processes if one.mark.part == part]


class Machines(Protocol):
    """Where the processes of hosts are.  OSError is a trouble that may pass.

    Attributes:
        name: as logs and answers say it; also names the file of what is wanted.
        watch_s: how often hosts are looked at.
        returns: a lost host that has a machine again is used again by itself, and not when it is uncordoned.
        python, supervisor: interpreter, and folder of this package, on a host.
    """

    name: str
    watch_s: float
    returns: bool
    python: str
    supervisor: str

    def running(self) -> AbstractAsyncContextManager[None]: ...

    async def scan(self) -> Seen: ...

    async def start(self, argv: Sequence[str], mark: Mark, environment: Mapping[str, str], log: Path) -> None:
        """Start a process on the host of `mark`; its output is added to the file `log` there."""

    async def signal_roots(self, processes: Sequence[Marked], number: Signals) -> None:
        """Signal those that none of the others started."""

    async def kill(self, processes: Sequence[Marked]) -> None: ...


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
class WantedState:
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

    def with_job(self, job: JobState) -> WantedState:
        """Put `job` in the place of the one with its name, or behind the others."""
        others = tuple(one for one in self.jobs if one.workload != job.workload)
        return replace(self, jobs=(*others, job))

    def with_seats(self, job: JobState, hosts: Sequence[str], keep: Collection[str] = ()) -> WantedState:
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


class _NoSpare(_Refusal):
    """The spare of a swap is none."""


class WantedOrchestrator:
    """See the module.

    Args:
        state_dir: of this fleet; a second one with another directory runs beside it.
        environment: of all that is started, with the addresses of sensor and actuator.
    Raises:
        ConfigError: the state that was kept cannot be read, or does not fit the job file.
    """

    def __init__(
        self, file: JobFile, state_dir: Path, environment: Mapping[str, str], machines: Machines
    ) -> None:
        self._file = file
        self._dir = state_dir.resolve()
        self._environment = environment
        self._machines = machines
        self._jobs = {job.workload: job for job in file.jobs}
        self._tasks = LoggedTasks(f"{machines.name} orchestrator")
        #: What was looked at counts until this is free again: nothing is started or decided meanwhile.
        self._starting = asyncio.Lock()
        self._settling = {job.workload: asyncio.Lock() for job in file.jobs}
        self._troubles: dict[str, str] = {}
        self._tell: TellChange = lambda host, change, evidence: None
        self._state = self._load()

    @asynccontextmanager
    async def running(self, tell: TellChange, tell_facts: TellFacts = ignore_facts) -> AsyncIterator[None]:
        """Start what is wanted and is not there, and watch it; processes outlive the context."""
        del tell_facts  # neither machines of one room nor of a Ray cluster say where they are
        self._tell = tell
        async with self._machines.running():
            self._tasks.start(self._watch())
            try:
                yield
            finally:
                await self._tasks.end()

    # ------------------------------------------------------------------------------------- the seam

    def perform(self, command: Command, answer: Callable[[Answer], None]) -> None:
        self._tasks.start(self._perform(command, answer))

    def look(self, host: str, answer: Callable[[bool | None], None]) -> None:
        self._tasks.start(self._look(host, answer))

    async def _look(self, host: str, answer: Callable[[bool | None], None]) -> None:
        try:
            answer(self._is_there(host, await self._machines.scan()))
        except OSError as error:
            logger.warning("host %s cannot be looked at: %s", host, error)
            answer(None)

    def _is_there(self, host: str, seen: Seen) -> bool | None:
        name = self._name_of(host)
        boot = host.removeprefix(name).removeprefix(".")
        if name not in self._file.hosts or name in seen.unseen:
            return None
        if name in self._state.gone or (boot and seen.boots.get(name, boot) != boot):
            return False
        there = [one for one in seen.processes if one.mark.host == name]
        if there:
            # One that stands still as a whole may be a machine that does: no word for or against it.
            return None if all(one.stopped for one in there) else True
        # A spare, or a drained host, is its daemon alone, which is started again; nobody can tell that from a
        # lost machine.
        works = any(seat.host == name and seat.start for job in self._state.jobs for seat in job.seats)
        return False if works else None

    async def _perform(self, command: Command, answer: Callable[[Answer], None]) -> None:
        try:
            host = self._name_of(command.host)
            async with self._starting:
                seen = await self._machines.scan()
                if command.epoch < self._state.epoch:
                    text = f"epoch {command.epoch} refused: this orchestrator has seen {self._state.epoch}"
                    answer(Answer(status=OutcomeStatus.FENCED, text=text, epoch=self._state.epoch))
                    return
                workload = command.workload or self._workload_on(host)
                if command.id not in self._state.applied:
                    wanted = self._apply(command, seen)
                    applied = (*wanted.applied, command.id)[-REMEMBERED:]
                    self._save(replace(wanted, epoch=command.epoch, applied=applied))
                elif command.epoch > self._state.epoch:
                    self._save(replace(self._state, epoch=command.epoch))
            text = "noted"
            if workload:
                text, seen = await self._settle(workload)
            if command.kind is CommandKind.DRAIN_HOST and workload:
                if host in seen.unseen:  # after the stop: a host that hung meanwhile showed no process
                    raise OSError(f"host {host} cannot be reached, and may still train")
                # The job must go on without it: the controller decides how.
                word = f"{host} was drained"
                evidence = Evidence(
                    id=f"{self._machines.name}:{command.id}", witness="orchestrator", text=word
                )
                self._tell(command.host, Change.GONE, evidence)
            answer(Answer(status=OutcomeStatus.DONE, text=text, spare=command.spare))
        except _Refusal as error:
            spare = command.spare if isinstance(error, _NoSpare) else ""
            answer(Answer(status=OutcomeStatus.FAILED, text=str(error), spare=spare))
        except OSError as error:
            # Of a swap, the spare is the one host that was to start something.
            answer(Answer(status=OutcomeStatus.FAILED, text=str(error), passing=True, spare=command.spare))

    # ------------------------------------------------------------------------------------- what is wanted

    def _apply(self, command: Command, seen: Seen) -> WantedState:
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
            return self._bring_back(replace(state, cordoned=cordoned), host)
        job = state.job(command.workload)
        if job is None:
            raise _Refusal(f"the job file has no job {command.workload}")
        if kind is CommandKind.IN_JOB_RESET:
            return self._revive(state, job, seen)
        if kind in (CommandKind.WORKLOAD_RESET, CommandKind.WORKLOAD_RECREATION):
            if command.spare:  # in the same write: the launcher of a lost host would be waited for
                state = self._swap(state, job, host, self._name_of(command.spare), seen)
                job = state.job(command.workload) or job
            return state.with_seats(replace(job, generation=job.generation + 1), job.hosts)
        if kind is CommandKind.HOT_SWAP:
            return self._swap(state, job, host, self._name_of(command.spare), seen)
        if kind in (CommandKind.SCALE_DOWN, CommandKind.SCALE_UP) and command.replicas is not None:
            return self._resize(state, job, host, command.replicas, seen)
        raise _Refusal(f"the {self._machines.name} orchestrator has no {kind.value}")

    def _bring_back(self, state: WantedState, host: str) -> WantedState:
        """A lost host is used again; the launcher that a job still wants there is another one."""
        if host not in state.gone:
            return state
        state = replace(state, gone=tuple(one for one in state.gone if one != host))
        for job in state.jobs:
            if any(seat.host == host and seat.start for seat in job.seats):
                return state.with_seats(job, job.hosts, keep=set(job.hosts) - {host})
        return state

    def _revive(self, state: WantedState, job: JobState, seen: Seen) -> WantedState:
        """A launcher that ended alone is started again, and meets the others in their rendezvous."""
        ended = self._ended(state, job, seen)
        running = any(_workload_of(one.mark) == job.workload for one in seen.of("launcher"))
        # One on a host that cannot be looked at may live, and meets those that start.
        if not running and not seen.unseen & set(job.hosts):
            raise _Refusal(f"no launcher of {job.workload} is left: the whole job must be started again")
        return state.with_seats(job, job.hosts, keep=set(job.hosts) - ended)

    def _ended(self, state: WantedState, job: JobState, seen: Seen) -> set[str]:
        """Hosts of `job` that are there, and whose launcher is not."""
        running = {one.mark.host for one in seen.of("launcher")}
        ended = {seat.host for seat in job.seats if seat.started} - running - set(state.gone)
        return ended - seen.unseen - seen.absent

    def _drain(self, state: WantedState, host: str) -> WantedState:
        state = replace(state, cordoned=tuple(dict.fromkeys((*state.cordoned, host))))
        for job in state.jobs:
            seats = tuple(replace(seat, start=0) if seat.host == host else seat for seat in job.seats)
            state = state.with_job(replace(job, seats=seats))
        return state

    def _swap(self, state: WantedState, job: JobState, host: str, spare: str, seen: Seen) -> WantedState:
        if host not in job.hosts and spare in job.hosts:
            return state  # by a command that was not done in time
        if host not in job.hosts:
            raise _Refusal(f"{host} does not work for {job.workload}; {', '.join(job.hosts)} do")
        if spare == host and host not in state.gone:
            # The host of before and the spare are one name: it has another machine by now.
            return state.with_seats(job, job.hosts, keep=set(job.hosts) - {host})
        if spare not in self._free(state, seen):
            raise _NoSpare(f"{spare} is no spare: it is busy, cordoned or gone")
        hosts = [spare if one == host else one for one in job.hosts]
        # One whose ranks stopped in order with those of a host that was drained has ended as they did.
        survivors = set(job.hosts) - {host} - self._ended(state, job, seen)
        return self._without(state, host, seen).with_seats(job, hosts, keep=survivors)

    def _resize(self, state: WantedState, job: JobState, host: str, replicas: int, seen: Seen) -> WantedState:
        """The whole job starts again, because its launchers are told the size when they start."""
        settings = self._jobs[job.workload]
        wanted = settings.hosts(replicas)
        hosts = [one for one in job.hosts if one != host]
        if replicas > job.replicas:
            hosts = [one for one in hosts if not self._is_closed(one)] + self._free(state, seen)
        else:
            hosts.sort(key=self._is_closed)  # a second host that is lost goes before one that lives
        if len(hosts) < wanted:
            raise _Refusal(f"{replicas} replicas need {wanted} hosts, and there are {len(hosts)}")
        if host:
            state = self._without(state, host, seen)
        resized = replace(job, replicas=replicas, generation=job.generation + 1)
        return state.with_seats(resized, hosts[: wanted + settings.waiting])

    def _without(self, state: WantedState, host: str, seen: Seen) -> WantedState:
        """A host that a job is taken from; if nothing of it is left it counts as gone."""
        if host in state.gone or host in seen.unseen or any(one.mark.host == host for one in seen.processes):
            return state
        return replace(state, gone=(*state.gone, host))

    def _free(self, state: WantedState, seen: Seen) -> list[str]:
        taken = state.busy | set(state.gone) | set(state.cordoned) | seen.unseen | seen.absent
        return [host for host in self._file.hosts if host not in taken]

    # ------------------------------------------------------------------------------------- what is there

    async def _settle(self, workload: str) -> tuple[str, Seen]:
        """Stop and start launchers until those of `workload` are the wanted ones.

        Returns:
            What was done, and the hosts as they were seen before the start.
        Raises:
            OSError: some are not now; all others are.
        """
        stopped: set[str] = set()
        async with self._settling[workload]:  # a launcher that is being stopped is not told twice
            while True:
                async with self._starting:
                    seen = await self._machines.scan()
                    job = self._state.job(workload)
                    assert job is not None
                    launchers = seen.of("launcher")
                    stale = _stale(job, launchers)
                    if not stale:
                        mine = [one.mark for one in launchers if _workload_of(one.mark) == workload]
                        started = await self._start_missing(job, {mark.host for mark in mine}, seen)
                        closed = [seat.host for seat in job.seats if self._is_closed(seat.host)]
                        break
                stopped |= {one.mark.host for one in stale}
                await self._stop(stale, self._jobs[workload].grace_s)
                # A launcher that could not tell its end (killed, or out of touch) is still of the job for its
                # host's daemon, and the host would be no spare again: another daemon knows nothing of it.
                left = {one.mark.host for one in stale} - self._state.busy
                await self._machines.kill([one for one in seen.of("daemon") if one.mark.host in left])
                # What is wanted may have changed meanwhile.
        said = [f"stopped on {', '.join(sorted(stopped))}"] if stopped else []
        said += [f"started on {', '.join(started)}"] if started else []
        said += [f"{', '.join(closed)} lost and not used until uncordoned"] if closed else []
        return ", ".join(said) or "as wanted", seen

    async def _settle_alone(self, workload: str) -> None:
        """At the start, and what was out of reach when its command was carried out."""
        trouble: OSError | None = None
        try:
            text, _ = await self._settle(workload)
            logger.info("job %s: %s", workload, text)
        except OSError as error:  # as in `_watch`
            trouble = error
        self._note(f"job {workload}", trouble)

    async def _start_missing(self, job: JobState, there: Collection[str], seen: Seen) -> list[str]:
        """Start the launchers of `job` that are not `there`; returns their hosts.

        Raises:
            OSError: one cannot be started now; all others are.
        """
        missing: list[str] = []
        trouble: OSError | None = None
        for rank, seat in enumerate(job.seats):
            if not seat.start or seat.started or self._is_closed(seat.host):
                continue
            if seat.host not in there:
                try:
                    if seat.host in seen.unseen or seat.host in seen.absent:
                        raise OSError(f"host {seat.host} cannot be reached")
                    if seat.host not in {one.mark.host for one in seen.of("daemon")}:
                        # Before it: a launcher that ends at once would leave nothing, as a lost host does.
                        await self._start_daemon(seat.host, seen)
                    await self._start_launcher(job, rank, seat, seen)
                except OSError as error:
                    trouble = trouble or error
                    continue
                missing.append(seat.host)
            seats = (replace(one, started=True) if one is seat else one for one in job.seats)
            job = replace(job, seats=tuple(seats))
            self._save(self._state.with_job(job))
        if trouble is not None:
            raise trouble
        return missing

    async def _stop(self, processes: Sequence[Marked], grace_s: float) -> None:
        """SIGTERM to the launchers, SIGKILL to what is left of them after `grace_s`.

        Where all that is left stands still, at once: it acts on no other signal.

        Raises:
            OSError: processes are left that nothing ends.
        """
        starts = {(one.mark.host, one.mark.start) for one in processes}

        async def left() -> list[Marked]:
            seen = await self._machines.scan()
            return [one for one in seen.processes if (one.mark.host, one.mark.start) in starts]

        await self._machines.signal_roots(processes, SIGTERM)
        end = time.monotonic() + grace_s
        while not all(one.stopped for one in await left()) and time.monotonic() < end:
            await asyncio.sleep(_LOOK_S)
        end = time.monotonic() + KILL_S
        while remaining := await left():
            if time.monotonic() >= end:
                pids = ", ".join(str(one.pid) for one in remaining[:8])
                raise OSError(f"processes {pids} do not end after SIGKILL")
            await self._machines.kill(remaining)
            await asyncio.sleep(_LOOK_S)

    async def _start_launcher(self, job: JobState, rank: int, seat: Seat, seen: Seen) -> None:
        settings, port = self._jobs[job.workload], self._file.launcher_port(seat.host)
        values = {
            "python": self._machines.python,
            "host": seat.host,
            "address": seen.addresses.get(seat.host, "127.0.0.1"),
            "node_rank": rank,
            "nnodes": min(settings.hosts(job.replicas), len(job.seats)),
            "replicas": job.replicas,
            "generation": job.generation,
            "daemon_port": port,
            "state_dir": self._dir,
        }
        argv = [_fill(word, values) for word in settings.command]
        environment = {"NODE_NAME": seat.host}  # hosts of one machine, or image, have one name of their own
        environment |= {name: _fill(text, values) for name, text in settings.environment.items()}
        environment[GENERATION_ENV] = str(job.generation)
        start = _start_text(job.workload, seat.start)
        logger.info("launcher of %s on %s starts: %s", job.workload, seat.host, " ".join(argv))
        mark = Mark(fleet=self._fleet, host=seat.host, part="launcher", start=start)
        await self._start(argv, mark, environment)

    async def _start_daemon(self, host: str, seen: Seen) -> None:
        address = seen.addresses.get(host, "127.0.0.1")
        argv = [
            *(self._machines.python, f"{self._machines.supervisor}/host_daemon.py"),
            f"--launcher_port={self._file.launcher_port(host)}",
            f"--port={self._file.probe_port(host)}",
            f"--workers_per_host={self._file.workers_per_host}",
            f"--state_dir={self._dir / 'hosts' / host}",
            *(f"--address={address}", f"--listen={address}"),
            *(_fill(word, {"host": host, "state_dir": self._dir}) for word in self._file.daemon_flags),
        ]
        logger.info("daemon of %s starts", host)
        await self._start(argv, Mark(fleet=self._fleet, host=host, part="daemon"), {"NODE_NAME": host})
        self._note(f"daemon of {host}", None)

    async def _start(self, argv: Sequence[str], mark: Mark, environment: Mapping[str, str]) -> None:
        log = self._dir / "logs" / f"{mark.host}-{mark.part}.log"
        await self._machines.start(argv, mark, {**self._environment, **environment}, log)

    async def _watch(self) -> None:
        """Keep daemons running, notice lost hosts, and do what could not be done before."""
        suspects = set[str]()
        while True:
            trouble: OSError | None = None
            try:
                async with self._starting:
                    seen = await self._machines.scan()
                    suspects = await self._look_at_hosts(suspects, seen)
                launchers = seen.of("launcher")
                for job in self._state.jobs:
                    waits = any(
                        seat.start and not (seat.started or self._is_closed(seat.host)) for seat in job.seats
                    )
                    if (waits or _stale(job, launchers)) and not self._settling[job.workload].locked():
                        self._tasks.start(self._settle_alone(job.workload))
            except OSError as error:  # a full disk, no free process or descriptor: these pass
                trouble = error
            self._note("watching", trouble)
            await asyncio.sleep(self._machines.watch_s)

    def _note(self, what: str, trouble: OSError | None) -> None:
        """Log a trouble when it begins, changes and ends."""
        before, now = self._troubles.get(what, ""), str(trouble or "")
        if now and now != before:
            logger.error("%s orchestrator, %s: %s; trying again", self._machines.name, what, now)
        elif before and not now:
            logger.warning("%s orchestrator, %s: well again", self._machines.name, what)
        self._troubles[what] = now

    async def _look_at_hosts(self, suspects: set[str], seen: Seen) -> set[str]:
        """Act upon hosts of `suspects` that are without a daemon; returns those to look at again.

        Twice, because the parts of a host that is lost do not all end in the same instant.
        """
        running: dict[str, set[str]] = {}
        for one in seen.processes:
            running.setdefault(one.mark.host, set()).add(one.mark.part)
        missing = {
            host
            for host in self._file.hosts
            if "daemon" not in running.get(host, ())
            and host not in seen.unseen
            and (host not in self._state.gone or (self._machines.returns and host not in seen.absent))
        }
        failed = set[str]()
        for host in missing & suspects:
            if host in self._launched and host not in running and host not in self._state.gone:
                logger.warning("host %s is gone: its daemon and its launcher have ended", host)
                self._save(replace(self._state, gone=(*self._state.gone, host)))
            elif host not in seen.absent:
                if host in self._state.gone:
                    logger.warning("host %s has a machine again", host)
                    self._save(self._bring_back(self._state, host))
                try:
                    await self._start_daemon(host, seen)
                except OSError as error:
                    self._note(f"daemon of {host}", error)
                    failed.add(host)
        return missing - suspects | failed

    @property
    def _launched(self) -> set[str]:
        """Hosts that a launcher was started on, and not stopped by a drain: a daemon alone is left there."""
        return {seat.host for job in self._state.jobs for seat in job.seats if seat.start and seat.started}

    # ------------------------------------------------------------------------------------- small parts

    def _is_closed(self, host: str) -> bool:
        """Whether a host is lost, and nothing is started there until somebody has seen to it."""
        return host in self._state.gone and not self._machines.returns

    @property
    def _fleet(self) -> str:
        return str(self._dir)

    @property
    def _path(self) -> Path:
        return self._dir / f"{self._machines.name}.json"

    def _name_of(self, host: str) -> str:
        """A daemon's id is its host's name, a dot, and the start of the machine."""
        return host if host in self._file.hosts else host.rpartition(".")[0]

    def _workload_on(self, host: str) -> str:
        return next((job.workload for job in self._state.jobs if host in job.hosts), "")

    def _load(self) -> WantedState:
        path = self._path
        state = _read(path)
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
                hosts = free[: settings.hosts(settings.replicas) + settings.waiting]
                job = JobState(workload=settings.workload, seats=(), replicas=settings.replicas)
                state = state.with_seats(job, hosts)
        return state

    def _save(self, state: WantedState) -> None:
        """Replace the file; what is in it counts from then on.

        Raises:
            OSError: it cannot be written; what is wanted is what it was.
        """
        write_durably(self._path, json.dumps(to_plain(state)).encode())
        self._state = state


def restart_at_next_run(path: Path) -> None:
    """Rewrite what is wanted, in the file at `path`, once all of it was stopped: each job starts as a whole.

    The file is not removed: the controller's event log still has the attempts and commands of before, and a
    job that begins at generation 0 again would look older than them.

    Raises:
        ConfigError: the file cannot be read.
        OSError: it cannot be written.
    """
    if not path.exists():
        return
    state = replace(_read(path), gone=())
    for job in state.jobs:
        drained = [seat.host for seat in job.seats if not seat.start]
        job = replace(job, generation=job.generation + 1)
        state = state.with_seats(job, job.hosts, keep=drained)
    write_durably(path, json.dumps(to_plain(state)).encode())


def _read(path: Path) -> WantedState:
    """What is wanted, as the file at `path` has it; nothing where there is none."""
    try:
        return from_plain(WantedState, json.loads(path.read_text()))
    except FileNotFoundError:
        return WantedState()
    except (OSError, ValueError, InvalidValue) as error:
        raise ConfigError(
            f"--state-dir: {path} cannot be read: {error}.",
            hint="Stop what the orchestrator started, remove the file, and start again.",
            flag="--state-dir",
            path=str(path),
        ) from error


def _start_text(workload: str, start: int) -> str:
    return f"{workload}:{start}"


def _stale(job: JobState, launchers: Sequence[Marked]) -> list[Marked]:
    """Those of `job` that are of another start than the wanted one, or on another host."""
    wanted = {seat.host: _start_text(job.workload, seat.start) for seat in job.seats}
    return [
        one
        for one in launchers
        if _workload_of(one.mark) == job.workload and one.mark.start != wanted.get(one.mark.host)
    ]


def _workload_of(mark: Mark) -> str:
    return mark.start.rpartition(":")[0]


def _fill(text: str, values: Mapping[str, object]) -> str:
    """`text` with its placeholders replaced; other braces stay, because arguments may be JSON."""
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", str(value))
    return text
