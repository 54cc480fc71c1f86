# SPDX-License-Identifier: Apache-2.0
"""Jobs: their steps, hangs, times without progress, and room to grow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set

from supervisor.detection.conditions import Conditions
from supervisor.detection.sightings import Offer, Output, SeenHost, SeenJob
from supervisor.policy.pace import advancing_s, still_s
from supervisor.policy.spares import JobShape
from supervisor.policy.thresholds import Thresholds
from supervisor.values import DeviceState, EventType, LauncherState, Progress

#: The pause before the same offer of capacity doubles each time, up to so many of the first.
LONGEST_HOLDS = 16


class JobWatch:
    """Looks at jobs with what is known of hosts.

    Args:
        hosts, silent: of the detector, which changes them.
    """

    def __init__(
        self,
        limits: Thresholds,
        hosts: Mapping[str, SeenHost],
        silent: Set[str],
        conditions: Conditions,
    ) -> None:
        self._limits, self._hosts, self._silent, self._conditions = limits, hosts, silent, conditions

    def take_step(
        self,
        job: SeenJob,
        attempt: int,
        step: int,
        at: float,
        unread_s: float,
        *,
        before: int | None,
    ) -> None:
        """`before`: the last step that this rank told, which may have gone back to an earlier checkpoint."""
        if attempt < job.attempt:
            return
        restarted = attempt > job.attempt or (before is not None and step < before)
        if restarted or job.step is None or step > job.step:
            if restarted or job.step is None:
                job.times.begin(at - job.began_at)
            else:
                job.times.learn(max(at - job.step_at, 0.0) / (step - job.step))
            surely_at = at - unread_s
            if attempt == job.attempt and job.step is not None:
                # What a rank told before it went back is no time without a step.
                at, surely_at = max(at, job.step_at), max(surely_at, job.surely_at)
            job.attempt, job.step, job.step_at, job.surely_at = attempt, step, at, surely_at
            job.stuck_since = max(job.stuck_since, at)
            job.hang_reported = False
            job.dirty = True
            self._conditions.close(("hang", job.info.workload))
            self._conditions.close(("no progress", job.info.workload))
        elif step == job.step and job.surely_at < job.step_at:
            job.surely_at = at - unread_s  # it was read among what may have been old

    def take_kept(self, job: SeenJob, attempt: int, kept: int) -> None:
        """A rank has told which step the job would go on from; what is told first may be long so."""
        if attempt != job.attempt:
            return
        if job.kept is None or kept > job.kept:
            job.kept_more, job.kept = job.kept is not None, kept
        elif attempt > job.kept_in:
            job.kept = kept  # it was started again from an earlier checkpoint
        job.kept_in = max(attempt, job.kept_in)

    def watch(self, name: str, job: SeenJob, time: float) -> list[Output]:
        said: list[Output] = []
        if job.dirty and job.step is not None:
            job.dirty = False
            said.append(self.progress(job, time))
        judged = self.is_judged(job)
        if self._is_still(job, time) and not job.hang_reported and not judged:
            said += self._hang(name, job, time)
        said += self._no_progress(name, job, time, judged=judged)
        if judged and job.newest > job.announced and self._all_run(job):
            said += self._begin(name, job)
        if job.info.scaling and job.info.replicas < job.info.max_replicas and self._may_stop(job):
            said += self._offer(name, job, time)
        job.kept_more = False
        return said

    def is_judged(self, job: SeenJob) -> bool:
        """True where its launchers report its condition: they know a hang from an evaluation."""
        hosts = [self._hosts[name] for name in self.hosts_there(job)]
        return any(host.states for host in hosts) and all(
            host.condition is not None for host in hosts if host.states
        )

    def usual_step_s(self, job: SeenJob) -> float:
        """As seen here; until then as its launchers say, and else the time to the first step."""
        known = (self._hosts[name].condition for name in job.hosts)
        by_launchers = max((each.usual_step_s or 0.0 for each in known if each), default=0.0)
        return job.times.usual_s or by_launchers or job.times.longest_s

    def advances(self, job: SeenJob, time: float) -> bool:
        """True where it has finished a step within the time that its steps take."""
        within_s = advancing_s(self._limits.advancing_s, self.usual_step_s(job))
        return job.step is not None and time - job.surely_at < within_s

    def _is_still(self, job: SeenJob, time: float) -> bool:
        least_s, times = self._limits.hang_threshold_s, job.times
        limit = still_s(least_s, times.usual_s, times.longest_s) if least_s else math.inf
        return job.step is not None and time - job.step_at >= limit

    def _all_run(self, job: SeenJob) -> bool:
        """True where all ranks of its newest attempt run, by the word of its launchers."""
        hosts = [(name, self._hosts[name]) for name in self.hosts_there(job)]
        return len(hosts) >= job.info.hosts and all(
            host.attempt == job.newest
            and host.launcher is LauncherState.RUNNING
            and host.info.state is DeviceState.RUNNING
            and not (host.failed or name in self._silent)
            for name, host in hosts
        )

    def _begin(self, name: str, job: SeenJob) -> list[Output]:
        """Say that an attempt runs: what was wrong with the ranks of earlier ones has been seen to."""
        job.announced = job.newest
        self._conditions.close(("attempt", name))
        event = self._conditions.event(
            EventType.ATTEMPT,
            self._conditions.evidence(f"launcher: all ranks of attempt {job.newest} run"),
            workload=name,
            attempt=job.newest,
            launcher=LauncherState.RUNNING,
        )
        self._conditions.keep_open(("attempt", name), event)
        return [event]

    def _no_progress(self, name: str, job: SeenJob, time: float, *, judged: bool) -> list[Output]:
        """By the job's own threshold from its start on; by the default only before the first step of an
        attempt.

        After the first step `_hang` looks, and before the first of all attempts nobody knows whether the
        program tells steps at all: by the default such a job is left alone.  A job whose ranks all run, by
        the word of their launchers, is not down.
        """
        if judged and self._all_run(job):
            job.stuck_since = time
            return []
        since, limit = job.stuck_since, job.info.downtime_threshold_s
        if not limit and not judged and self._waits_for_first_step(job):
            least_s = self._limits.workload_downtime_threshold_s
            since, limit = job.began_at, still_s(least_s, job.times.usual_s)
        if not limit or time - since < limit or not job.hosts:
            return []
        job.stuck_since = job.began_at = time
        event = self._conditions.event(
            EventType.NO_PROGRESS,
            self._conditions.evidence(f"steps: none finished for {limit:g} s", age_s=limit),
            workload=name,
            attempt=job.newest,
        )
        self._conditions.keep_open(("no progress", name), event)
        return [event]

    def _waits_for_first_step(self, job: SeenJob) -> bool:
        """Its ranks run in an attempt that has not told a step, as one before has."""
        if job.step is None or job.newest <= job.attempt:
            return False
        return any(
            host.attempt == job.newest
            and host.launcher is LauncherState.RUNNING
            and host.info.state is DeviceState.RUNNING
            for host in (self._hosts[name] for name in job.hosts)
        )

    def _hang(self, name: str, job: SeenJob, time: float) -> list[Output]:
        # A host that was lost and replaced, or whose launcher died alone, may never have said that it left.
        # One that waits for a place has no ranks.
        known = (self._hosts[name] for name in job.hosts)
        hosts = [host for host in known if not host.lost and host.attempt >= job.attempt and host.states]
        calm = (LauncherState.RUNNING, LauncherState.UNKNOWN)
        if len(hosts) < job.info.hosts:
            return []
        for host in hosts:
            if host.failed or host.info.id in self._silent or host.launcher not in calm:
                return []  # that is something else than a hang, or no longer this attempt
            if host.info.state is not DeviceState.RUNNING or host.attempt != job.attempt:
                return []
        heartbeats = (host.heartbeats.get(rank, -math.inf) for host in hosts for rank in host.states)
        if time - min(heartbeats, default=-math.inf) < self._limits.hang_threshold_s:
            return []  # each rank sends them to its monitor: it evaluates, or loads
        least = min((min(host.steps.values(), default=0) for host in hosts), default=0)
        behind = {
            rank: host.info.id
            for host in hosts
            for rank, step in host.steps.items()
            if step == least and least != job.step
        }
        named = set(behind.values())
        job.hang_reported = True
        event = self._conditions.event(
            EventType.HANG,
            self._conditions.evidence(
                f"steps: all alive, none finished for {time - job.step_at:.0f} s, last {job.step}",
                age_s=max(0.0, time - job.step_at),
            ),
            workload=name,
            host=next(iter(named)) if len(named) == 1 else "",
            ranks=tuple(sorted(behind)),
            attempt=job.attempt,
        )
        self._conditions.keep_open(("hang", name), event)
        return [event]

    def _may_stop(self, job: SeenJob) -> bool:
        """Whether it has just been saved, where its ranks tell that."""
        if job.kept is not None:
            return job.kept_more
        return all(self._hosts[name].sequence >= 0 for name in job.hosts)  # else they may be about to

    def _offer(self, workload: str, job: SeenJob, time: float) -> list[Output]:
        shape = JobShape.of([self._hosts[name].info.place for name in job.hosts])
        spares = sum(
            host.info.state is DeviceState.SPARE
            and not (host.info.workload or host.info.cordoned or host.lost or name in self._silent)
            and not shape.refuse(workers=host.info.workers_per_host, zone=host.info.zone)
            for name, host in self._hosts.items()
        )
        wanted = job.info.nodes_per_replica
        if spares < wanted:
            return []
        what, hold_s = (job.info.replicas, spares, job.attempt), self._limits.scale_up_hold_s
        if job.offered is not None and job.offered.what == what:
            # It may have been refused for a reason that passes; each offer is a record of the controller's.
            if time - job.offered.at < job.offered.hold_s:
                return []
            hold_s = min(2 * job.offered.hold_s, LONGEST_HOLDS * hold_s)
        job.offered = Offer(what=what, at=time, hold_s=hold_s)
        text = f"capacity: {spares} spares, a replica needs {wanted}"
        return [
            self._conditions.event(EventType.SCALE_UP, self._conditions.evidence(text), workload=workload)
        ]

    def progress(self, job: SeenJob, time: float) -> Progress:
        age_s = max(0.0, time - job.surely_at)
        return Progress(
            workload=job.info.workload,
            step=job.step or 0,
            attempt=job.attempt,
            age_s=round(age_s, 3),
            run=job.info.run,
            usual_step_s=round(self.usual_step_s(job), 3),
        )

    def hosts_there(self, job: SeenJob) -> list[str]:
        return [name for name in job.hosts if not self._hosts[name].lost]
