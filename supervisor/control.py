# SPDX-License-Identifier: Apache-2.0
"""A controller with its log: decide, write down, then let the commands go; in this order, and no other."""

from __future__ import annotations

from supervisor.decision.controller import BaseController, Input
from supervisor.event_log import EventLog, record_of
from supervisor.values import Command


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
        now = max(self._last, self._offset + monotonic)
        decision = self.controller.decide(self.state, given, now, epoch=self.log.epoch)
        if decision.changes:
            self.log.append([record_of(now, given, decision.changes, decision.notes)])
        self.state, self._last = decision.state, now
        self.log.compact(self.state, now)
        return decision.commands

    def wake_after(self, monotonic: float) -> float | None:
        """Seconds until time alone will change something."""
        at = self.controller.wake_at(self.state)
        return None if at is None else max(0.0, at - self._offset - monotonic)
