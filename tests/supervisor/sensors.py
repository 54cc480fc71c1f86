# SPDX-License-Identifier: Apache-2.0
"""A failure detector with hosts and a job, driven by the test."""

from __future__ import annotations

from collections.abc import Sequence

from supervisor.detection import Detector, Output
from supervisor.policy.thresholds import Thresholds
from supervisor.values import (
    DaemonReport,
    Event,
    EventType,
    HostInfo,
    WorkerReport,
    WorkloadInfo,
)

LIMITS = Thresholds(
    heartbeat_timeout_s=20.0, tick_s=1.0, hang_threshold_s=60.0, scale_up_hold_s=100.0, verdict_s=3600.0
)


class Sensor:
    """A detector and its clock; remembers all that it said."""

    def __init__(self, hosts: int = 4, limits: Thresholds = LIMITS, **workload: object) -> None:
        self.now = 1000.0
        self.detector = Detector("s1", limits, self.now)
        self.said: list[Output] = []
        self.job = WorkloadInfo(workload="train", replicas=2, max_replicas=3, **workload)
        self._sequences: dict[str, int] = {}
        self.names = [f"h{n}" for n in range(hosts)]
        self.take(self.detector.register_workload(self.job, self.now))
        for number, name in enumerate(self.names):
            workload_name = "train" if number < self.job.hosts else ""
            self.take(self.detector.register_host(_host(name, workload_name), self.now))
        self.run(LIMITS.heartbeat_timeout_s + 1.0)
        self.said.clear()

    def take(self, said: Sequence[Output]) -> list[Output]:
        self.said += said
        return list(said)

    def beat(self, name: str, **fields: object) -> list[Output]:
        return self.take(self.detector.report(self.report(name, **fields), self.now))

    def report(self, name: str, *, incarnation: str = "d1", **fields: object) -> DaemonReport:
        sequence = self._sequences[name] = self._sequences.get(name, -1) + 1
        known = {"host": name, "incarnation": incarnation, "sequence": sequence, **fields}
        return DaemonReport(**known)

    def run(self, seconds: float, silent: Sequence[str] = (), **fields: object) -> list[Output]:
        """Time passes; all hosts but `silent` report each five seconds."""
        before = len(self.said)
        for _ in range(round(seconds)):
            self.now += 1.0
            if round(self.now) % 5 == 0:
                for name in self.names:
                    if name not in silent:
                        self.beat(name, **(fields if name in ("h0", "h1") else {}))
            self.take(self.detector.tick(self.now))
        return self.said[before:]


def _host(name: str, workload: str = "") -> HostInfo:
    return HostInfo(id=name, name=name, workload=workload, workers_per_host=1)


def _worker(rank: int = 0, **fields: object) -> tuple[WorkerReport, ...]:
    return (WorkerReport(local_rank=0, global_rank=rank, **fields),)


def events(said: Sequence[Output], *kinds: EventType) -> list[Event]:
    return [each for each in said if isinstance(each, Event) and (not kinds or each.type in kinds)]
