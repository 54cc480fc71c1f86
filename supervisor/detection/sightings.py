# SPDX-License-Identifier: Apache-2.0
"""What a detector says, and what it keeps of each host and job."""

from __future__ import annotations

import math
from dataclasses import dataclass

from resiliency.launch.health.condition import JobCondition
from supervisor.policy.pace import StepTimes
from supervisor.policy.thresholds import Thresholds
from supervisor.values import (
    DeviceState,
    Event,
    HostInfo,
    LauncherState,
    Progress,
    Silence,
    WorkerReport,
    WorkloadInfo,
)

#: Of a host's time, after which it counts as silent and a second witness is asked: a little above the period
#: of reports, which may be half of it.
SILENT_SHARE = 0.55
#: Long before any time.
NEVER = -1e18


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """`host` is to be looked at by a second path; the answer goes to `Detector.witness_answered`."""

    host: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Poll:
    """The daemon of `host` should report now: what it said last may be a period old."""

    host: str


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSight:
    """One host as the sensor sees it.

    Attributes:
        age_s: since its last report.
        silent: it is waited for longer than it should have to be.
        steps: last finished step of each global rank.
        condition: its launcher's word on the job; empty where it says nothing special.
    """

    host: str
    connected: bool
    age_s: float
    silent: bool
    attempt: int
    launcher: LauncherState
    steps: tuple[tuple[int, int], ...]
    condition: str = ""


Output = Event | HostInfo | WorkloadInfo | Progress | Silence | Probe | Poll


class SeenHost:
    """What the detector knows of one host; all times are its own effective time."""

    __slots__ = (
        "attempt",
        "blind",
        "condition",
        "connected",
        "earlier",
        "failed",
        "heard",
        "heartbeats",
        "incarnation",
        "info",
        "launcher",
        "left",
        "lost",
        "missed_at",
        "missing",
        "probed_at",
        "scheduled",
        "seen_alive",
        "sequence",
        "states",
        "steps",
    )

    def __init__(self, info: HostInfo, now: float) -> None:
        self.info = info
        self.heard = now
        self.connected = True
        self.lost = False
        self.blind = False  # its daemon is gone, the host is not
        self.probed_at = NEVER  # when a second witness was asked last
        self.seen_alive = NEVER  # when it saw the host last
        self.scheduled = False
        self.missed_at = math.inf  # when the first of its workers will be lost, by its last report
        self.missing = False  # that moment, or an earlier one, is in the heap
        self.incarnation = ""
        self.earlier: set[str] = set()
        self.sequence = -1
        self.attempt = 0
        self.launcher = LauncherState.UNKNOWN
        self.condition: JobCondition | None = None
        self.left = ""  # the job that was seen to go on without it, and whose host its daemon says it is
        self.states: dict[int, DeviceState] = {}  # by local rank
        self.failed: set[int] = set()
        self.steps: dict[int, int] = {}  # by global rank
        self.heartbeats: dict[int, float] = {}  # when a rank monitor got its last one, by local rank

    @property
    def is_expected(self) -> bool:
        """Whether it should report."""
        return not self.lost and self.info.state is not DeviceState.COMPLETE

    def forget_attempt(self) -> None:
        """What its workers said belongs to another job, or to another run of it."""
        self.states.clear()
        self.failed.clear()
        self.steps.clear()
        self.heartbeats.clear()
        self.attempt = 0
        self.condition = None

    @property
    def ends_job(self) -> bool:
        """True where its launcher has ended the job as one that would fail again as it is."""
        return self.condition is not None and self.condition.ends_job

    def look_in(self, time: float, limits: Thresholds) -> float:
        """Seconds until it would be silent, or late, or is looked at again because it is."""
        timeout, silent = limits.heartbeat_timeout_s, time - self.heard
        looks = (timeout * SILENT_SHARE, timeout)
        return next((at - silent for at in looks if silent < at), limits.tick_s)

    def take_worker(self, worker: WorkerReport, time: float, timeout_s: float) -> str:
        """Note the state of one worker; why it is lost, if it is and was not before."""
        silent, known = worker.heartbeat_age_s, worker.local_rank in self.failed
        self.states[worker.local_rank] = worker.state
        if worker.monitor_age_s is not None:
            self.heartbeats[worker.local_rank] = time - worker.monitor_age_s
        if worker.state is DeviceState.FAILED:
            self.failed.add(worker.local_rank)
            return "" if known else "launcher: failed"
        if worker.state is DeviceState.RUNNING and silent is not None:
            if silent >= timeout_s:
                self.failed.add(worker.local_rank)
                return "" if known else f"worker: silent for {silent:.1f} s"
            self.missed_at = min(self.missed_at, time - silent + timeout_s)
        self.failed.discard(worker.local_rank)
        return ""

    def sight(self, silent: bool, time: float) -> HostSight:
        """For operators."""
        return HostSight(
            host=self.info.id,
            connected=self.connected,
            age_s=max(0.0, time - self.heard),
            silent=self.lost or silent,
            attempt=self.attempt,
            launcher=self.launcher,
            steps=tuple(sorted(self.steps.items())),
            condition=self.condition.sentence if self.condition is not None else "",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """Capacity that a job was offered: `what` is replicas, spares and attempt; again only after `hold_s`."""

    what: tuple[int, int, int]
    at: float
    hold_s: float


class SeenJob:
    """What the detector knows of one job; times as for hosts."""

    __slots__ = (
        "announced",
        "answered",
        "attempt",
        "began_at",
        "dirty",
        "earlier",
        "hang_reported",
        "hosts",
        "info",
        "kept",
        "kept_in",
        "kept_more",
        "left_at",
        "named",
        "newest",
        "offered",
        "step",
        "step_at",
        "stuck_since",
        "surely_at",
        "times",
    )

    def __init__(self, info: WorkloadInfo, now: float, earlier: frozenset[str] = frozenset()) -> None:
        self.info = info
        self.left_at: float | None = None  # since when no host that is there works for it
        self.earlier = earlier  # runs whose late messages are told apart from the present one's
        self.hosts: set[str] = set()
        self.attempt = 0  # of the last step
        self.newest = 0  # that any of its hosts is at
        self.announced = -1  # the newest attempt for which an ATTEMPT event was sent
        self.times = StepTimes()
        self.named = 0  # the same, of this run: launchers that have not met the others name none yet
        self.began_at = now  # when that was heard of
        self.step: int | None = None
        self.step_at = now  # of the last step; as late as it can have been
        self.surely_at = now  # as early as it can have been
        self.stuck_since = now
        self.dirty = False
        self.answered = True  # the last poll, by any host
        self.hang_reported = False
        self.offered: Offer | None = None
        self.kept: int | None = None  # step that it would go on from, were it told to end
        self.kept_in = 0  # the attempt that told it
        self.kept_more = False  # since it was looked at last
