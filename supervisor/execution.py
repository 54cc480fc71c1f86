# SPDX-License-Identifier: Apache-2.0
"""The actuator's logic, without I/O: each command once, in time, and only while its reason holds.

submit -> [wait for stacks] -> [look at the evidence again] -> perform -> DONE
                               | gone                       | passing failure, or no answer: wait, again
                            WITHDRAWN                       | lasting failure: FAILED; not yet: WITHDRAWN
                                                            | deadline: TIMED_OUT

A command id is carried out by one submission and answered to all of them with the same outcome.  A command
below the highest epoch that was ever seen is refused: a controller that was deposed, and does not know it
yet.  A refusal says which epoch was seen, and is no outcome to a controller that is above it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from supervisor.orchestrator import Answer
from supervisor.policy.budget import backoff_s
from supervisor.values import Command, CommandKind, Outcome, OutcomeStatus


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """Ask the sensor whether the evidence of `command` still holds; the answer goes to `Executor.looked`."""

    command: Command


@dataclass(frozen=True, kw_only=True, slots=True)
class Perform:
    """Give `command` to the orchestrator; the answer goes to `Executor.answered` with `number`."""

    command: Command
    number: int


Act = Look | Perform | Outcome


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How the actuator tries: `at_once` commands side by side, each try `try_s` long, waits between.

    `stacks_s`: the longest that a restart of ranks waits for their stacks.
    """

    at_once: int = 8
    stacks_s: float = 10.0
    look_s: float = 5.0
    try_s: float = 60.0
    retry_s: float = 1.0
    retry_limit_s: float = 30.0


class _Stage(Enum):
    QUEUED = "queued"
    LOOKING = "looking"
    PERFORMING = "performing"
    WAITING = "waiting"


class _Job:
    __slots__ = ("command", "deadline", "maybe_done", "spare", "stage", "text", "tries", "until")

    def __init__(self, command: Command, now: float) -> None:
        self.command = command
        self.deadline = now + command.deadline_s
        self.stage = _Stage.QUEUED
        self.until = now
        self.tries = 0
        # A try without an answer may have had its effect: the command is finished then, not withdrawn.
        self.maybe_done = False
        self.text = ""
        self.spare = ""


#: Outcomes that are remembered for commands that are sent again.
_REMEMBERED = 4096


class Executor:
    """One actuator's commands.  Each method returns what to do now; `now` is of one monotonic clock."""

    def __init__(self, pace: Pace | None = None) -> None:
        self._pace = pace or Pace()
        self._highest_epoch = 0
        self._jobs: dict[str, _Job] = {}
        self._outcomes: dict[str, Outcome] = {}

    def submit(self, command: Command, now: float) -> list[Act]:
        if command.epoch < self._highest_epoch:
            text = f"epoch {command.epoch} was followed by {self._highest_epoch}"
            seen = self._highest_epoch
            return [Outcome(command=command.id, epoch=seen, status=OutcomeStatus.FENCED, text=text, tries=0)]
        self._highest_epoch = command.epoch
        known = self._outcomes.get(command.id)
        if known is not None and known.status is not OutcomeStatus.FENCED:
            return [replace(known, epoch=command.epoch)]
        if known is not None and command.epoch < known.epoch:
            return [known]
        if command.id in self._jobs:
            self._jobs[command.id].command = command
            return []
        withdrawn = self._withdraw_resets(command)
        self._jobs[command.id] = _Job(command, now)
        together = [job for job in self._jobs.values() if job.command.is_beside(command)]
        if any(job.command.kind is CommandKind.DUMP_STACKS for job in together):
            for job in together:  # they may come in either order
                if job.command.kind.restarts and not job.tries:
                    job.stage, job.until = _Stage.WAITING, now + self._pace.stacks_s
        return [*withdrawn, *self._go_on(now)]

    def _withdraw_resets(self, command: Command) -> list[Act]:
        """Ends restarts in place that `command` makes vain; the controller waits for none of them."""
        if command.kind is CommandKind.IN_JOB_RESET or not command.kind.restarts:
            return []
        return [
            self._end(job, OutcomeStatus.WITHDRAWN, f"{command.id} ({command.kind.value}) follows it")
            for job in list(self._jobs.values())
            if job.command.kind is CommandKind.IN_JOB_RESET and job.command.workload == command.workload
        ]

    def looked(self, id: str, holds: bool | None, now: float) -> list[Act]:
        """The sensor's answer; None is "cannot tell", and is asked again until the deadline.

        So is one that comes too late: this process was stopped meanwhile, and it tells of a time before that.
        """
        job = self._jobs.get(id)
        if job is None or job.stage is not _Stage.LOOKING:
            return []
        if holds is None or now >= job.until:
            self._wait(job, now)
        elif not holds:
            return [
                self._end(job, OutcomeStatus.WITHDRAWN, "its evidence no longer holds"),
                *self._go_on(now),
            ]
        else:
            return [self._perform(job, now), *self._go_on(now)]
        return self._go_on(now)

    def answered(self, id: str, number: int, answer: Answer, now: float) -> list[Act]:
        job = self._jobs.get(id)
        if job is None:
            return []
        if answer.status is OutcomeStatus.DONE:
            # Also of an earlier try: the effect is there.
            job.spare = answer.spare
            return [self._end(job, OutcomeStatus.DONE, answer.text), *self._go_on(now)]
        if job.stage is not _Stage.PERFORMING or number != job.tries:
            return []
        job.spare = answer.spare
        if answer.status is OutcomeStatus.FENCED or not answer.passing:
            return [self._end(job, answer.status, answer.text, answer.epoch), *self._go_on(now)]
        job.text = answer.text
        self._wait(job, now)
        return self._go_on(now)

    def tick(self, now: float) -> list[Act]:
        acts: list[Act] = []
        for job in list(self._jobs.values()):
            if now >= job.deadline:
                last = f", last: {job.text}" if job.text else ""
                text = f"not done within {job.command.deadline_s:g} s and {job.tries} tries{last}"
                acts.append(self._end(job, OutcomeStatus.TIMED_OUT, text))
            elif now >= job.until and job.stage is _Stage.LOOKING:
                job.text = "its evidence could not be looked at"
                self._wait(job, now)
            elif now >= job.until and job.stage is _Stage.PERFORMING:
                job.text, job.maybe_done = f"no answer within {self._pace.try_s:g} s", True
                self._wait(job, now)
        return acts + self._go_on(now)

    def wake_at(self) -> float | None:
        """When `tick` is needed next."""
        waits = [
            min(job.until, job.deadline) for job in self._jobs.values() if job.stage is not _Stage.QUEUED
        ]
        return min(waits, default=None)

    def _go_on(self, now: float) -> list[Act]:
        """Start what is due, as far as there is room."""
        acts: list[Act] = []
        busy = sum(job.stage in (_Stage.LOOKING, _Stage.PERFORMING) for job in self._jobs.values())
        for job in list(self._jobs.values()):
            if busy >= self._pace.at_once:
                break
            if job.stage is _Stage.QUEUED or (job.stage is _Stage.WAITING and now >= job.until):
                busy += 1
                acts.append(self._start(job, now))
        return acts

    def _start(self, job: _Job, now: float) -> Act:
        command = job.command
        if command.kind.irreversible and command.evidence and not job.maybe_done:
            job.stage, job.until = _Stage.LOOKING, now + self._pace.look_s
            return Look(command=command)
        return self._perform(job, now)

    def _perform(self, job: _Job, now: float) -> Act:
        job.tries += 1
        job.stage, job.until = _Stage.PERFORMING, now + self._pace.try_s
        return Perform(command=job.command, number=job.tries)

    def _wait(self, job: _Job, now: float) -> None:
        wait = backoff_s(max(1, job.tries), base_s=self._pace.retry_s, limit_s=self._pace.retry_limit_s)
        job.stage, job.until = _Stage.WAITING, now + wait

    def _end(self, job: _Job, status: OutcomeStatus, text: str, seen: int = 0) -> Outcome:
        command = job.command
        del self._jobs[command.id]
        if command.kind is CommandKind.DUMP_STACKS:
            for other in self._jobs.values():
                if not other.tries and other.stage is _Stage.WAITING and other.command.is_beside(command):
                    other.until = 0.0  # it waited for this
        epoch = max(seen, command.epoch)
        outcome = Outcome(
            command=command.id, epoch=epoch, status=status, text=text, tries=job.tries, spare=job.spare
        )
        self._outcomes[command.id] = outcome
        if len(self._outcomes) > _REMEMBERED:
            del self._outcomes[next(iter(self._outcomes))]
        return outcome
