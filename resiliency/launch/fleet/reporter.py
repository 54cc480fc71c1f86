# SPDX-License-Identifier: Apache-2.0
"""The launcher's client of the host daemon: what it reports, and the commands that it takes.

Nothing here waits for the daemon.  Reports are made from what is known when they are sent: states from the
agent, steps and heartbeats from the step page.  Commands that concern the workers wait for the agent's next
look; `dump_stacks` does not need it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from resiliency.daemon_link import (
    TOKEN_ENV,
    DaemonLink,
    read_generation,
    to_fleet_attempt,
    to_launcher_attempt,
)
from resiliency.errors import ConfigError
from resiliency.launch.fleet.link import (
    HostCommand,
    HostCommandKind,
    SupervisorOptions,
    WorkerReport,
)
from resiliency.launch.health.causes import Advice, Diagnosis
from resiliency.launch.health.condition import JobCondition, LauncherState
from resiliency.launch.options import LaunchOptions
from resiliency.launch.stacks import dump_stacks
from resiliency.progress import StepPage
from resiliency.runtime import FAILURE_DOMAINS_ENV, RunInfo, awake_since, was_stopped_for
from resiliency.wake_pipe import WakePipe

logger = logging.getLogger(__name__)

#: An outcome travels in a message with a limit.
_MOST_TEXT_CHARS = 2000
#: Diagnoses that are told in each report: those of the last attempts, should the daemon have been away.
_MOST_DIAGNOSES = 4
#: A sentence, and the ranks that are to blame, in each of these reports.
_MOST_SENTENCE_CHARS, _MOST_RANKS = 1000, 64
#: Ranks wait so long for the daemon's first answer, which says where this host is.
_FIRST_ANSWER_S = 2.0
#: Of a command whose daemon says none.
_DEADLINE_S = 60.0


class DaemonReporter:
    """Reports the workers of this host; see `WorkerStateReporter`.

    Args:
        page: where ranks and rank monitors write.
        stacks_dir: where ranks leave their stacks.
    """

    def __init__(self, options: LaunchOptions, page: StepPage, *, stacks_dir: str) -> None:
        self._page = page
        self._host = options.info.host
        self._stacks_dir = stacks_dir
        self._lock = threading.Lock()
        self._generation = read_generation(os.environ)
        self._attempt, self._first_attempt, self._run = 0, 0, ""
        self._condition = JobCondition(state=LauncherState.UNKNOWN)
        #: Monotonic time since which the job stands still, where it does.
        self._still_since: float | None = None
        #: Local rank -> global rank, process, state.
        self._workers: dict[int, tuple[int, int, WorkerReport]] = {}
        #: With the monotonic time of each.
        self._diagnoses: deque[tuple[float, dict[str, object]]] = deque(maxlen=_MOST_DIAGNOSES)
        self._commands: deque[HostCommand] = deque(maxlen=16)
        self._commanded = WakePipe()
        self.wake_fd = self._commanded.fileno()
        self._link = DaemonLink(
            port=options.supervisor.host_daemon_port,
            hello={
                "kind": "launcher",
                "key": uuid.uuid4().hex,
                "workload": _workload(options.supervisor, options.rendezvous.max_nodes, options.max_restarts),
            },
            make_report=self._make_report,
            on_command=self._take,
            token_file=os.environ.get(TOKEN_ENV, ""),
        )

    def begin_attempt(self, attempt: int, *, run: str = "", first_attempt: int = 0) -> None:
        with self._lock:
            self._attempt, self._first_attempt, self._run = attempt, first_attempt, run
            self._workers = {}

    def report(self, *, rank: int, local_rank: int, pid: int, state: WorkerReport) -> None:
        with self._lock:
            self._workers[local_rank] = (rank, pid, state)
        self._link.report_soon()

    def job_is(self, condition: JobCondition) -> None:
        with self._lock:
            ended = self._condition.state in (LauncherState.GAVE_UP, LauncherState.STOPPING)
            # What follows an end is its execution.
            if condition.state is LauncherState.RUNNING or not ended or condition.ends_job:
                why = _printable(condition.why)[:_MOST_SENTENCE_CHARS]
                self._condition, self._still_since = replace(condition, why=why), None
        self._link.report_soon()

    def report_pace(
        self,
        *,
        usual_step_s: float | None,
        still_s: float | None = None,
        phase: str = "",
        ranks: tuple[int, ...] = (),
    ) -> None:
        with self._lock:
            before, still = self._condition, self._still_since is not None
            if before.state is not LauncherState.RUNNING:
                return
            self._condition = replace(
                before, usual_step_s=usual_step_s, phase=phase, ranks=ranks[:_MOST_RANKS]
            )
            self._still_since = None if still_s is None else time.monotonic() - still_s
            said = (phase, ranks[:_MOST_RANKS], still_s is not None)
        if said != (before.phase, before.ranks, still):  # ages alone are in each report
            self._link.report_soon()

    def report_diagnosis(self, found: Diagnosis) -> None:
        about_us = self._host in found.hosts or found.advice is not Advice.REPLACE_HOST
        with self._lock:
            diagnosis: dict[str, object] = {
                "id": uuid.uuid4().hex,
                "run": self._run,
                "attempt": to_fleet_attempt(self._generation, found.attempt),
                "cause": found.cause.value,
                "advice": (found.advice if about_us else Advice.RESTART).value,
                "confidence": found.confidence.value,
                "ranks": list(found.ranks[:_MOST_RANKS]),
                "text": _printable(found.sentence)[:_MOST_SENTENCE_CHARS],
            }
            self._diagnoses.append((time.monotonic(), diagnosis))
        self._link.report_soon()

    def try_take_command(self) -> HostCommand | None:
        self._commanded.clear()
        while self._commands:
            command = self._commands.popleft()
            late_s = time.monotonic() - command.expires_at
            if late_s < 0:
                return command
            logger.warning("launcher does not %s: its time was over %.1f s ago", command.kind.value, late_s)
            self.finish_command(command, done=False, text=f"expired: its time was over {late_s:.1f} s ago")
        return None

    def finish_command(self, command: HostCommand, *, done: bool, text: str) -> None:
        self._link.send_outcome(
            {
                "command": command.id,
                "epoch": command.epoch,
                "status": "done" if done else "failed",
                "text": _printable(text),
            }
        )

    def failure_domains(self) -> str:
        if not self._link.tried.wait(_FIRST_ANSWER_S):
            self._link.tried.set()
        domains = self._link.domains
        try:
            RunInfo.from_env({FAILURE_DOMAINS_ENV: domains})
        except ConfigError as error:
            logger.warning("failure domains of the host daemon ignored: %s", error)
            return ""
        return domains

    def close(self) -> None:
        self._link.close()
        self._commanded.close()
        self._page.close()

    # --------------------------------------------------------------------------------------- in the link's
    # thread

    def _make_report(self) -> Mapping[str, object]:
        with self._lock:
            workers, attempt, condition = dict(self._workers), self._attempt, self._condition
            run, first_attempt, still_since = self._run, self._first_attempt, self._still_since
            diagnoses = tuple(self._diagnoses)
        now = time.monotonic()
        if still_since is not None:
            condition = replace(condition, still_s=max(now - still_since, 0.0))
        return {
            "run": run,
            "first_attempt": to_fleet_attempt(self._generation, first_attempt),
            "attempt": to_fleet_attempt(self._generation, attempt),
            "launcher": condition.state.value,  # a daemon of an earlier release knows no condition
            "condition": condition.to_dict(),
            "workers": [
                _worker(local_rank, rank, worker_state, self._page)
                for local_rank, (rank, _, worker_state) in workers.items()
            ],
            "diagnoses": [{**diagnosis, "age_s": max(now - at, 0.0)} for at, diagnosis in diagnoses],
        }

    def _take(self, said: Mapping[str, Any]) -> None:
        within_s = float(said.get("deadline_s", _DEADLINE_S))
        command = HostCommand(
            epoch=said["epoch"],
            id=said["id"],
            kind=HostCommandKind(said["kind"]),
            ranks=tuple(said.get("ranks", ())),
            attempt=to_launcher_attempt(self._generation, said.get("attempt")),
            reason=said.get("reason", ""),
            expires_at=time.monotonic() + (0.0 if was_stopped_for(within_s) else within_s),
        )
        logger.warning("the supervisor asks for %s: %s", command.kind.value, command.reason or "no reason")
        if command.kind is HostCommandKind.DUMP_STACKS:
            threading.Thread(target=self._dump, args=(command,), name="stacks", daemon=True).start()
        else:
            self._commands.append(command)
            self._commanded.wake()

    def _dump(self, command: HostCommand) -> None:
        with self._lock:
            pids = {
                rank: pid
                for rank, pid, _ in self._workers.values()
                if not command.ranks or rank in command.ranks
            }
        stacks = dump_stacks(pids, self._stacks_dir)
        for rank, text in stacks.items():
            logger.warning("stacks of rank %d:\n%s", rank, text)
        brief = "; ".join(f"rank {rank}: {_last_frame(text)}" for rank, text in stacks.items())
        self.finish_command(command, done=bool(stacks), text=brief or "this host has none of these ranks")


def _worker(local_rank: int, rank: int, state: WorkerReport, page: StepPage) -> dict[str, object]:
    seen = page.read(local_rank)
    worker: dict[str, object] = {
        "local_rank": local_rank,
        "global_rank": rank,
        "state": state.value,
        # The launcher watches the process, and this thread of it lives: only its own silence is a worker's.
        "heartbeat_age_s": 0.0,
    }
    if seen.heartbeat_time is not None:
        worker["monitor_age_s"] = awake_since(seen.heartbeat_time)
    if seen.step is not None and seen.step_time is not None:
        worker["step"] = seen.step
        worker["step_age_s"] = awake_since(seen.step_time)
    if seen.kept_step is not None:
        worker["kept_step"] = seen.kept_step
    return worker


def _workload(options: SupervisorOptions, hosts: int, max_restarts: int) -> dict[str, object]:
    """The fields of `supervisor.values.WorkloadInfo`."""
    per_replica = options.nodes_per_dp or hosts
    replicas = options.dp_replicas or max(hosts // per_replica, 1)
    downtime, termination = options.workload_downtime_threshold, options.container_termination_threshold
    return {
        "workload": options.workload_name,
        "job": options.job_name,
        "container": options.container_name,
        "replicas": replicas,
        "min_replicas": options.min_dp_replicas or replicas,
        "max_replicas": options.max_dp_replicas or replicas,
        "nodes_per_replica": per_replica,
        "downtime_threshold_s": downtime.total_seconds() if downtime else 0.0,
        "termination_threshold_s": termination.total_seconds() if termination else 0.0,
        "max_in_job_restarts": max_restarts,
        "max_workload_restarts": options.max_workload_restarts,
        "scaling": options.scaling,
    }


def _last_frame(stacks: str) -> str:
    """The line of the innermost call of the thread that runs Python's main code, which is written last."""
    lines = stacks.splitlines()
    heads = [number for number, line in enumerate(lines) if "most recent call first" in line]
    return lines[heads[-1] + 1].strip() if heads and heads[-1] + 1 < len(lines) else stacks.strip()


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)[:_MOST_TEXT_CHARS]
