# SPDX-License-Identifier: Apache-2.0
"""A measured run in which a whole host is lost: daemon, launcher and ranks end by SIGKILL, a spare is there.

Two hosts of one rank train and a third is spare; the store in which they meet is on none of them.  On the
spare a launcher waits for a place, or, with a cold spare, the supervisor starts one.  All hosts are processes
of this machine.  Zero is the moment of the kill.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import psutil
from measuring import free_ports
from restart_runs import (
    JOB,
    OURS,
    RANKS,
    ROOT,
    SUPERVISED,
    SUPERVISED_COLD,
    Launcher,
    WorkerEnds,
    Workload,
    memory_bytes,
    rendezvous_flags,
    run_environment,
)
from restart_spans import Restart, Unmeasured, measure
from supervisor_plane import PARTS, free_range

from resiliency.events import EventType, RunEvent, events_path
from resiliency.goodput_measure.reader import read_events
from resiliency.runtime import RunInfo
from resiliency.testing.processes import Command, processes_marked
from supervisor.orchestrators.local import stop_all
from supervisor.orchestrators.processes import kill_all, marked_processes

_NAMES = ("host0", "host1", "spare")
_LOOK_S = 0.02
#: Ranks that are about to be killed stand still for so long first: they are no step ahead of each other.
_STILL_S = 0.5
#: What the restart passed, from the programs that tell it: event of a launcher -> name.
_MOMENTS = {EventType.RENDEZVOUS_DONE: "met", EventType.WORKERS_STARTED: "ranks created"}
#: The same from the supervisor's log: pattern -> name.
_SAID = {
    r"incident \S+ opened": "incident opened",
    r"hot_swap \S+ of": "swap decided",
    r"hot_swap \S+ done": "swap done",
}


def run_once(name: str, launcher: Launcher, workload: Workload, directory: Path) -> Restart:
    """Start, lose a host, wait for the last step, and measure; nothing that was started outlives the call.

    Raises:
        Unmeasured: the job was not restarted once from the expected checkpoint.
        TimeoutError, EOFError: it did not get that far in time.
    """
    directory.mkdir(parents=True)
    started = time.monotonic()
    with ExitStack() as stack:
        hosts = Hosts(name, launcher, workload, directory, stack)
        hosts.wait_for_step(1)
        first_step_s = time.monotonic() - started
        with WorkerEnds.of(hosts.commands) as ends:
            zero = hosts.lose()
            ended = ends.wait(timeout=workload.deadline_s)
        hosts.wait_for_step(workload.fault_step + 1)
        memory = memory_bytes(hosts.commands)
        born = hosts.spare_born()
        hosts.wait_for_step(workload.steps)
        events = hosts.events()
        said = hosts.said()
    restart = measure(events, ended, zero=zero)
    passed = {"old ranks ended": max(ended.values()), **said, **_moments(events)}
    if born is not None:
        passed["spare's launcher created"] = born
    restart = replace(
        restart,
        first_step_s=first_step_s,
        memory_bytes=memory,
        own_spans_s={
            what: (at - zero).total_seconds() for what, at in sorted(passed.items(), key=lambda one: one[1])
        },
    )
    if restart.restored_step != workload.restored_step:
        raise Unmeasured(f"restored step {restart.restored_step}, expected {workload.restored_step}.")
    return restart


def _moments(events: Sequence[RunEvent]) -> dict[str, datetime]:
    """When the last host of the second attempt passed each of `_MOMENTS`; when the spare had imported."""
    newest = max((event.attempt or 0 for event in events if event.type in _MOMENTS), default=0)
    found: dict[str, datetime] = {}
    for event in events:
        name = _MOMENTS.get(event.type)
        if name is not None and event.attempt == newest:
            found[name] = max(event.time, found.get(name, event.time))
    begun = [event.time for event in events if event.type is EventType.JOB_STARTED]
    if begun:
        found["last launcher ready to meet"] = max(begun)
    return found


class Hosts:
    """Two hosts and a spare.

    Attributes:
        commands: under which all of their processes run.
    """

    def __init__(
        self, name: str, launcher: Launcher, workload: Workload, directory: Path, stack: ExitStack
    ) -> None:
        self._launcher, self._workload, self._directory = launcher, workload, directory
        self._state_dir = directory / "state"
        supervised = (SUPERVISED, SUPERVISED_COLD)
        self._supervised, self._ours = name in supervised, name in (*supervised, OURS)
        self._waiting = int(name == SUPERVISED)
        self._own = {host: directory / host for host in _NAMES}
        for own in self._own.values():
            own.mkdir()
        port, *ports = free_ports(1 + len(PARTS))
        store = [sys.executable, "-m", "resiliency.launch.rendezvous_store", "--host=127.0.0.1"]
        listening = Command([*store, f"--port={port}"], cwd=ROOT, log=directory / "store.txt")
        stack.enter_context(listening).wait_for_line("rendezvous store listens", timeout=60)
        self._meet = rendezvous_flags(port, silent="")
        if self._supervised:
            self.commands = [self._start_supervisor(ports, stack)]
        else:
            self.commands = [self._start(host, stack) for host in _NAMES[:2]]
            self.wait_for_step(1)
            self.commands.append(self._start(_NAMES[2], stack))

    def _start(self, name: str, stack: ExitStack) -> Command:
        own = self._own[name]
        # The others count attempts by host: in another host's first one the same fault would come again.
        has_fault = name != _NAMES[2] or self._ours
        script = self._workload.argv(self._directory, fault=has_fault)
        argv = [*self._launcher.argv, *self._meet, *script]
        env = {**self._launcher.env, **run_environment(own, self._directory), "NODE_NAME": name}
        return stack.enter_context(Command(argv, env=env, cwd=own, log=own / "output.txt"))

    def _start_supervisor(self, ports: Sequence[int], stack: ExitStack) -> Command:
        job = [
            *("--use-supervisor", "--host-daemon-port={daemon_port}", f"--workload-name={JOB}"),
            *("--max-workload-restarts=3", f"--job-name={JOB}", "--container-name=c"),
            *("--num-nodes-per-dp=1", "--num-dp-replicas={replicas}"),
        ]
        environment = run_environment(self._directory / "{host}", self._directory)
        started = {
            "workload": JOB,
            "replicas": RANKS,
            "waiting": self._waiting,
            "command": [*self._launcher.argv, *self._meet, *job, *self._workload.argv(self._directory)],
            "environment": {**self._launcher.env, **environment, "NODE_NAME": "{host}"},
        }
        file = {"hosts": list(_NAMES), "first_port": free_range(2 * len(_NAMES)), "jobs": [started]}
        job_file = self._directory / "job.json"
        job_file.write_text(json.dumps(file))
        argv = [sys.executable, "-m", "supervisor", "--all-in-one", f"--state-dir={self._state_dir}"]
        argv += ["--plaintext", "--listen=127.0.0.1", "--status-port=off"]
        argv += ["--orchestrator=local", f"--job-file={job_file}"]
        env = {
            f"{part.upper()}_ADDRESS": f"127.0.0.1:{port}" for part, port in zip(PARTS, ports, strict=True)
        }
        env |= {"PYTHONPATH": str(ROOT), "RESILIENCY_LOG_FORMAT": "json"}
        stack.callback(stop_all, self._state_dir)
        log = self._directory / "supervisor.txt"
        program = stack.enter_context(Command(argv, env=env, cwd=ROOT, log=log, cold=True))
        program.wait_for_line("sensor ready at port", timeout=60)
        return program

    def _outputs(self) -> str:
        logs = [*self._directory.glob("*/output.txt"), *self._state_dir.glob("logs/*-launcher.log")]
        return "\n".join(log.read_text(errors="replace") for log in logs)

    def wait_for_step(self, step: int) -> None:
        """Raises: TimeoutError."""
        pattern = re.compile(rf"\bstep {step}\b")
        self._wait(lambda: bool(pattern.search(self._outputs())), f"no step {step}")

    def _wait(self, condition: Callable[[], bool], otherwise: str) -> None:
        deadline = time.monotonic() + self._workload.deadline_s
        while not condition():
            if time.monotonic() > deadline:
                tail = "\n".join(self._outputs().splitlines()[-30:])
                raise TimeoutError(f"{otherwise} after {self._workload.deadline_s:g} s; at last:\n{tail}")
            time.sleep(_LOOK_S)

    def lose(self) -> datetime:
        """Kill the host whose rank has stopped at its fault; returns when."""
        stopped: list[psutil.Process] = []

        def stands() -> bool:
            stopped[:] = [one for one in self._ranks() if one.status() == psutil.STATUS_STOPPED]
            return bool(stopped)

        self._wait(stands, "no rank has come to its fault")
        time.sleep(_STILL_S)
        if not self._supervised:
            mine = next(
                command
                for command in self.commands
                if stopped[0].pid in {one.pid for one in processes_marked(command.id)}
            )
            self.commands.remove(mine)
            doomed = [one.pid for one in processes_marked(mine.id)]
            killed = datetime.now(timezone.utc)
            for pid in doomed:
                with suppress(ProcessLookupError):
                    os.kill(pid, 9)
            return killed
        fleet = marked_processes(str(self._state_dir.resolve()))
        host = next(one.mark.host for one in fleet if one.pid == stopped[0].pid)
        killed = datetime.now(timezone.utc)
        kill_all([one for one in fleet if one.mark.host == host])
        return killed

    def _ranks(self) -> Iterator[psutil.Process]:
        for command in self.commands:
            for process in processes_marked(command.id):
                with suppress(psutil.Error):
                    if "RANK" in process.environ():
                        yield process

    def spare_born(self) -> datetime | None:
        """When the spare's launcher was created, where a supervisor did it."""
        born = []
        for one in marked_processes(str(self._state_dir.resolve())) if self._supervised else ():
            if (one.mark.host, one.mark.part) == (_NAMES[2], "launcher"):
                with suppress(psutil.Error):
                    born.append(psutil.Process(one.pid).create_time())
        return datetime.fromtimestamp(min(born), timezone.utc) if born else None

    def said(self) -> dict[str, datetime]:
        """Moments in the supervisor's log."""
        found: dict[str, datetime] = {}
        for line in self.commands[0].lines if self._supervised else ():
            with suppress(ValueError, KeyError, TypeError):
                record: Mapping[str, str] = json.loads(line)
                for pattern, name in _SAID.items():
                    if re.search(pattern, record["message"]):
                        found.setdefault(name, datetime.fromisoformat(record["timestamp"]))
        return found

    def events(self) -> list[RunEvent]:
        """Of all hosts."""
        found = []
        for name, own in self._own.items():
            path = events_path(RunInfo(job_name=JOB, run_dir=str(own)))
            for event in read_events(path, progress=False) if path.exists() else ():
                # See `_start`: what a host that came later calls its first attempt is the job's second.
                late = not self._ours and name == _NAMES[2] and event.rank is not None
                found.append(replace(event, attempt=1) if late else event)
        return found
