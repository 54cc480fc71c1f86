# SPDX-License-Identifier: Apache-2.0
"""The launcher's side of the supervisor: its options, and the seam where its client plugs in.

The texts of `WorkerReport` and `HostCommandKind` are those of `supervisor.values` and
`supervisor.protocol.host_commands`, which the launcher does not import; a test compares them.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Protocol

from resiliency.errors import ConfigError
from resiliency.launch.health.causes import Diagnosis
from resiliency.launch.health.condition import JobCondition


class WorkerReport(Enum):
    """What a host daemon is told about one worker."""

    RUNNING = "running"
    FAILED = "failed"
    COMPLETE = "complete"


class HostCommandKind(Enum):
    """What the supervisor can ask of this host."""

    RESTART_RANKS = "restart_ranks"
    LEAVE = "leave"
    DUMP_STACKS = "dump_stacks"


@dataclass(frozen=True, kw_only=True)
class HostCommand:
    """One thing that this host is to do.

    Attributes:
        attempt: that is to end by RESTART_RANKS; None is any.
        expires_at: of the monotonic clock; from then on it is answered and not obeyed.
    """

    epoch: int
    id: str
    kind: HostCommandKind
    ranks: tuple[int, ...] = ()
    attempt: int | None = None
    reason: str = ""
    expires_at: float = math.inf


class WorkerStateReporter(Protocol):
    """Reports the workers of this host, and brings commands about them.

    An implementation must return at once and must not raise: a daemon that is missing or dead is
    its own problem to retry, and never stops training.
    """

    @property
    def wake_fd(self) -> int:
        """Readable when there may be a command; -1 when there never is one."""
        ...

    def begin_attempt(self, attempt: int, *, run: str = "", first_attempt: int = 0) -> None:
        """All hosts have met.

        Args:
            run: id of this start of the job, the same on all its hosts.
            first_attempt: of that run.
        """
        ...

    def report(self, *, rank: int, local_rank: int, pid: int, state: WorkerReport) -> None: ...

    def job_is(self, condition: JobCondition) -> None:
        """Report the job's condition; after an end, only a new start or the order not to requeue is news."""
        ...

    def report_pace(
        self,
        *,
        usual_step_s: float | None,
        still_s: float | None = None,
        phase: str = "",
        ranks: tuple[int, ...] = (),
    ) -> None:
        """Report the pace of a running job, as in `JobCondition`; ignored while it does not run."""
        ...

    def report_diagnosis(self, found: Diagnosis) -> None:
        """Why an attempt ended, or stands still; what is said of another host is left to its launcher."""
        ...

    def try_take_command(self) -> HostCommand | None:
        """RESTART_RANKS or LEAVE; the reporter carries the others out itself."""
        ...

    def finish_command(self, command: HostCommand, *, done: bool, text: str) -> None: ...

    def failure_domains(self) -> str:
        """Of this host, as RESILIENCY_FAILURE_DOMAINS has them; empty where the daemon does not know.

        Waits for the daemon's first answer, two seconds at most in the launcher's life.
        """
        ...

    def close(self) -> None: ...


class NullReporter:
    """A launcher without a supervisor."""

    wake_fd = -1

    def begin_attempt(self, attempt: int, *, run: str = "", first_attempt: int = 0) -> None:
        del attempt, run, first_attempt

    def report(self, *, rank: int, local_rank: int, pid: int, state: WorkerReport) -> None:
        del rank, local_rank, pid, state

    def job_is(self, condition: JobCondition) -> None:
        del condition

    def report_pace(
        self,
        *,
        usual_step_s: float | None,
        still_s: float | None = None,
        phase: str = "",
        ranks: tuple[int, ...] = (),
    ) -> None:
        del usual_step_s, still_s, phase, ranks

    def report_diagnosis(self, found: Diagnosis) -> None:
        del found

    def try_take_command(self) -> HostCommand | None:
        return None

    def finish_command(self, command: HostCommand, *, done: bool, text: str) -> None:
        del command, done, text

    def failure_domains(self) -> str:
        return ""

    def close(self) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class SupervisorOptions:
    """Validated flags of the supervisor group.  0 stands for "not set" in counts, None in times."""

    host_daemon_port: int
    max_workload_restarts: int
    scaling: bool
    nodes_per_dp: int
    dp_replicas: int
    min_dp_replicas: int
    max_dp_replicas: int
    container_termination_threshold: timedelta | None
    workload_downtime_threshold: timedelta | None
    workload_name: str
    job_name: str
    container_name: str

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> SupervisorOptions:
        """Check what holds for each flag alone, used or not, and with `--use-supervisor` the rest.

        Raises:
            ConfigError: the first flag that cannot work, and why.
        """
        _check_each(args)
        if args.use_supervisor:
            _check_together(args)
        return cls(
            host_daemon_port=args.host_daemon_port,
            max_workload_restarts=args.max_workload_restarts,
            scaling=args.enable_workload_scaling,
            nodes_per_dp=args.num_nodes_per_dp,
            dp_replicas=args.num_dp_replicas,
            min_dp_replicas=args.min_num_dp_replicas,
            max_dp_replicas=args.max_num_dp_replicas,
            container_termination_threshold=_seconds(args.container_termination_threshold_s),
            workload_downtime_threshold=_seconds(args.workload_downtime_threshold_s),
            workload_name=args.workload_name,
            job_name=args.job_name,
            container_name=args.container_name,
        )


def _seconds(value: float) -> timedelta | None:
    return timedelta(seconds=value) if value else None


def _check_each(args: argparse.Namespace) -> None:
    if not 1 <= args.host_daemon_port <= 65535:
        raise ConfigError(
            f"--host-daemon-port must be 1 to 65535, found {args.host_daemon_port}.",
            flag="--host-daemon-port",
        )
    for name in (
        "max_workload_restarts",
        "num_nodes_per_dp",
        "num_dp_replicas",
        "min_num_dp_replicas",
        "max_num_dp_replicas",
        "container_termination_threshold_s",
        "workload_downtime_threshold_s",
    ):
        # `not >=` also refuses nan.
        if not getattr(args, name) >= 0:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} must be 0 or more, found {getattr(args, name)}.", flag=flag)


def _check_together(args: argparse.Namespace) -> None:
    low, _, high = args.nnodes.partition(":")
    if high and low != high:
        raise ConfigError(
            f"--nnodes must be one number with --use-supervisor, found {args.nnodes}: the supervisor decides "
            "how many hosts take part.",
            flag="--nnodes",
        )
    for name in ("workload_name", "job_name", "container_name"):
        if not getattr(args, name):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{flag} must be set with --use-supervisor: the supervisor finds the workload by its names.",
                flag=flag,
            )
        text = getattr(args, name)
        if len(text) > 253 or not text.isprintable() or " " in text:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{flag} must be at most 253 printable characters without a space, found {text[:80]!r}.",
                flag=flag,
            )
    nodes = int(low)
    if args.num_nodes_per_dp and nodes % args.num_nodes_per_dp:
        raise ConfigError(
            f"--nnodes ({nodes}) must be divisible by --num-nodes-per-dp ({args.num_nodes_per_dp}): a "
            "data-parallel replica fills whole hosts.",
            flag="--num-nodes-per-dp",
        )
    if args.enable_workload_scaling:
        _check_scaling(args, nodes)


def _check_scaling(args: argparse.Namespace, nodes: int) -> None:
    for name in ("num_nodes_per_dp", "num_dp_replicas", "min_num_dp_replicas", "max_num_dp_replicas"):
        if not getattr(args, name):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{flag} must be set with --enable-workload-scaling: it bounds what the supervisor may do.",
                flag=flag,
            )
    low, now, high = args.min_num_dp_replicas, args.num_dp_replicas, args.max_num_dp_replicas
    if not low <= now <= high:
        raise ConfigError(
            f"--num-dp-replicas ({now}) must lie between --min-num-dp-replicas ({low}) and "
            f"--max-num-dp-replicas ({high}): scaling starts from it.",
            flag="--num-dp-replicas",
        )
    if now * args.num_nodes_per_dp != nodes:
        raise ConfigError(
            f"--num-dp-replicas ({now}) times --num-nodes-per-dp ({args.num_nodes_per_dp}) must be --nnodes "
            f"({nodes}), found {now * args.num_nodes_per_dp}.",
            flag="--num-dp-replicas",
        )
