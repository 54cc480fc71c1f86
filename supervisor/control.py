# SPDX-License-Identifier: Apache-2.0
"""A controller with its log: decide, write down, then let the commands go; in this order, and no other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from supervisor.decision.controller import BaseController, Input
from supervisor.event_log import EventLog, LogDeposed, LogError, Record, record_of
from supervisor.values import Command, Progress

logger = logging.getLogger(__name__)

#: A job's step changes all the time, and one that is lost is told again: it is written with the next record
#: that a decision made, or after this time.
PROGRESS_S = 10.0
#: Records after a snapshot that failed before the next try.
RETRY_RECORDS = 200


class ControllerCore:
    """One controller process's logic.  `monotonic` is a reading of its own clock, from any origin.

    The log's clock goes on where it stopped: it is the last moment in the log plus the time since this
    process took over.
    """

    def __init__(self, controller: BaseController, log: EventLog, monotonic: float) -> None:
        self.controller = controller
        self.log = log
        self.state = log.replayed.state
        self._offset = log.replayed.now - monotonic
        self._last = log.replayed.now
        self._compact_again_at = 0
        self._progress: tuple[Record, ...] = ()
        self._written_at = self._last
        #: Told of each record that is in the log, for what operators see.
        self.recorded: Callable[[Record], None] = lambda record: None

    def at(self, monotonic: float) -> float:
        """The log's clock at a reading of this process's."""
        return max(self._last, self._offset + monotonic)

    def progress(self, monotonic: float) -> list[Progress]:
        """How far each job has come, for a sensor that was started again."""
        now, jobs = self.at(monotonic), self.state.workloads
        return [
            Progress(
                workload=name,
                step=mark.step,
                attempt=mark.attempt,
                age_s=max(0.0, now - mark.at),
                run=jobs[name].run if name in jobs else "",
            )
            for name, mark in self.state.progress.items()
        ]

    @property
    def now(self) -> float:
        """The last moment of the log's clock that something was decided at."""
        return self._last

    def resume(self) -> tuple[Command, ...]:
        """Commands whose outcome is not known: to be sent at the start, and when an actuator comes back."""
        return self.controller.resume(self.state, epoch=self.log.epoch)

    def take(self, given: Input, monotonic: float) -> tuple[Command, ...]:
        """Decide upon one input; the commands that come back may be carried out.

        Raises:
            LogError: the decision is not in the log, so it was not made; the state is what it was.
        """
        return self.take_all((given,), monotonic)

    def take_all(self, inputs: Iterable[Input], monotonic: float) -> tuple[Command, ...]:
        """Decide upon several inputs in their order, with one write to the log: all of them, or none.

        Steps alone are not written at once: nothing was decided upon them.

        Raises:
            LogError: no decision is in the log, so none was made; the state is what it was.
        """
        now = self.at(monotonic)
        state, mine = self.state, set[str]()
        records: list[Record] = list(self._progress)
        commands: list[Command] = []
        for given in inputs:
            decision = self.controller.decide(state, given, now, epoch=self.log.epoch, mine=mine)
            if decision.changes:
                records.append(record_of(now, given, decision.changes, decision.notes))
            state = decision.state
            commands += decision.commands
        if now - self._written_at < PROGRESS_S and all(map(_is_progress, records)):
            self._progress, records = _newest(records), []
        if records:
            self.log.append(records)
            self._progress, self._written_at = (), now
        self.state, self._last = state, now
        for record in records:
            self.recorded(record)
        if records:
            self._compact(now)
        return tuple(commands)

    def _compact(self, now: float) -> None:
        """A snapshot that fails takes nothing back: what was decided is in the log, and goes on."""
        if self.log.since_snapshot < self._compact_again_at:
            return
        try:
            self.log.compact(self.state, now)
            self._compact_again_at = 0
        except LogDeposed:
            raise
        except LogError as error:
            # Not at each record: a snapshot is all of the state.
            self._compact_again_at = self.log.since_snapshot + RETRY_RECORDS
            logger.warning(
                "event log: no snapshot was made, the next try is in %d records: %s", RETRY_RECORDS, error
            )

    def flush(self) -> None:
        """Write the steps that wait, before an end in order.

        Raises:
            LogError: they are not in the log.
        """
        if self._progress:
            self.log.append(self._progress)
            self._progress = ()

    def wake_after(self, monotonic: float) -> float | None:
        """Seconds until time alone will change something."""
        at = self.controller.wake_at(self.state)
        return None if at is None else max(0.0, at - self._offset - monotonic)


def _is_progress(record: Record) -> bool:
    return not record.notes and all(table == "progress" for table, _, _ in record.changes)


def _newest(records: list[Record]) -> tuple[Record, ...]:
    """Of records of progress the last for each job."""
    return tuple({record.changes[0][1]: record for record in records}.values())
