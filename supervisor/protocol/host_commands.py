# SPDX-License-Identifier: Apache-2.0
"""What one host is asked to do, and the fence that lets each command take effect once.

A `HostCommand` is one host's part of a `supervisor.values.Command`.  Controllers are replaced, messages
repeated: `Fence` refuses what an older controller says and answers a repeated id with the outcome that it
had.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum

from supervisor.plain import InvalidValue
from supervisor.values import (
    Outcome,
    OutcomeStatus,
    Value,
    check_counts,
    check_items,
    check_names,
    check_text,
    require,
)

#: How many command ids a fence remembers; a controller that repeats an older one has also raised its epoch.
REMEMBERED = 1024


class HostCommandKind(Enum):
    """What a host can do: its launcher, and the daemon where there is none."""

    RESTART_RANKS = (
        "restart_ranks"  # in place, all hosts of the job meet again; the launcher and its agents stay
    )
    LEAVE = "leave"  # this host leaves the job at once, and its launcher waits to be ended; the others go on
    CHECK_HOST = "check_host"  # the daemon finds out whether the host works, while no launcher is there
    DUMP_STACKS = "dump_stacks"  # of all ranks of the host, into the outcome and the launcher's log


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCommand(Value):
    """One thing that one host is to do.

    Attributes:
        epoch: of the controller; a lower one than the host has seen is refused.
        id: unique; a repeated one is answered, not carried out.
        workload: the job that is meant; a host that works for another one refuses.  Empty for CHECK_HOST.
        ranks: global ranks for DUMP_STACKS; empty means all of the host.
        attempt: of the job that is meant by RESTART_RANKS; a host that has a later one by then has done it.
        reason: for logs and people.
        deadline_s: the outcome is due this long after the host got the command, which is not begun later.
    """

    epoch: int
    id: str
    kind: HostCommandKind
    workload: str
    ranks: tuple[int, ...] = ()
    reason: str = ""
    deadline_s: float = 60.0
    attempt: int | None = None

    def __post_init__(self) -> None:
        check_names(self, "id")
        check_names(self, "workload", required=self.kind is not HostCommandKind.CHECK_HOST)
        check_counts(self, "epoch", least=1)
        check_counts(self, "attempt")
        check_items(self, "ranks")
        check_text(self, "reason")
        require(
            all(rank >= 0 for rank in self.ranks), self, "ranks", f"must be 0 or more, found {self.ranks}"
        )
        require(
            0 < self.deadline_s <= 86_400,
            self,
            "deadline_s",
            f"must be above 0 and at most a day, found {self.deadline_s}",
        )


class Fence:
    """Remembers the highest epoch and how each command ended; survives restarts through `to_dict`."""

    def __init__(self) -> None:
        self.epoch = 0
        self._outcomes: OrderedDict[str, Outcome | None] = OrderedDict()

    def try_enter(self, command: HostCommand) -> tuple[bool, Outcome | None]:
        """Whether to carry `command` out; if not, the answer, or None while the first one still runs."""
        if command.epoch < self.epoch:
            return False, Outcome(
                command=command.id,
                epoch=self.epoch,
                status=OutcomeStatus.FENCED,
                text=f"epoch {command.epoch} refused: this host has seen epoch {self.epoch}",
            )
        self.epoch = command.epoch
        if command.id in self._outcomes:
            return False, self._outcomes[command.id]
        self._outcomes[command.id] = None
        while len(self._outcomes) > REMEMBERED:
            self._outcomes.popitem(last=False)
        return True, None

    def record(self, outcome: Outcome) -> None:
        """Keep how a command that was entered ended."""
        if outcome.command in self._outcomes:
            self._outcomes[outcome.command] = outcome

    def to_dict(self) -> dict[str, object]:
        outcomes = {key: None if done is None else done.to_dict() for key, done in self._outcomes.items()}
        return {"epoch": self.epoch, "outcomes": outcomes}

    @classmethod
    def from_dict(cls, data: dict[str, object]) -> Fence:
        """A fence as it was; of a command that was being carried out at that time the outcome is not known.

        Raises:
            InvalidValue: `to_dict` has not given `data`.
        """
        fence = cls()
        epoch, outcomes = data.get("epoch"), data.get("outcomes")
        if not isinstance(epoch, int) or not isinstance(outcomes, dict):
            raise InvalidValue("Fence must hold an epoch and outcomes.", value="Fence")
        fence.epoch = epoch
        for key, done in outcomes.items():
            fence._outcomes[key] = (
                Outcome.from_dict(done)
                if done is not None
                else Outcome(
                    command=key,
                    epoch=max(epoch, 1),
                    status=OutcomeStatus.TIMED_OUT,
                    text="the daemon ended while it was carried out; it may have had its effect",
                )
            )
        return fence
