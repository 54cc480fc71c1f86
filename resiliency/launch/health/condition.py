# SPDX-License-Identifier: Apache-2.0
"""The launcher's word on its job: one value, by which the supervisor leaves ranks to it.

Ranks are the launcher's business: it sees their stacks, knows evaluations and restores from hangs, and
restarts them in place.  The supervisor owns hosts and sizes.  It has numbers of its own only for programs
whose launcher tells no condition.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum

#: Ranks that a sentence names at most.
_NAMED = 8


class LauncherState(Enum):
    """State of a launcher, as far as it concerns its own workers."""

    UNKNOWN = "unknown"
    #: The ranks advance, or stand still: the rest of `JobCondition` says which.
    RUNNING = "running"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    #: It restarts no ranks any more; `JobCondition.requeue` says whether another start may help.
    GAVE_UP = "gave_up"


class Requeue(Enum):
    """Advice for a job that has ended: to start it again or not."""

    YES = "yes"  # it was asked to end before it was complete
    LATER = "later"  # its restarts are used up, by a trouble that may pass
    NO = "no"  # it is complete, or would fail again as it is


@dataclass(frozen=True, kw_only=True)
class JobCondition:
    """The launcher's word on the ranks of its host.

    Attributes:
        usual_step_s: of a running job, what a step takes; None before that is known.
        still_s: of a running job that stands still, the time since its last step; None while it advances.
        phase, ranks: what the named ranks of such a job are in, in the launcher's words.
        requeue: of one that has ended.
        why: of one that restarts or has ended.
    """

    state: LauncherState
    usual_step_s: float | None = None
    still_s: float | None = None
    phase: str = ""
    ranks: tuple[int, ...] = ()
    requeue: Requeue | None = None
    why: str = ""

    @property
    def ends_job(self) -> bool:
        """True where the launcher has ended the job as one that would fail again as it is."""
        return self.state is LauncherState.GAVE_UP and self.requeue is Requeue.NO

    @property
    def sentence(self) -> str:
        """``stands still for 240 s: rank 0 in an evaluation``, ``gave up: no restart is left``; or empty."""
        if self.state is LauncherState.RUNNING and self.still_s is not None:
            ranks = f"rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks[:_NAMED]))}"
            more = f" and {len(self.ranks) - _NAMED} more" if len(self.ranks) > _NAMED else ""
            where = f": {ranks}{more} in {self.phase}" if self.ranks and self.phase else ""
            return f"stands still for {self.still_s:.0f} s{where}"
        return f"{self.state.value.replace('_', ' ')}: {self.why}" if self.why else ""

    def to_dict(self) -> dict[str, object]:
        """Strings, numbers and lists, by the names of the fields."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: item.value if isinstance(item, Enum) else item for name, item in plain.items()}
