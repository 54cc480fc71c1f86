# SPDX-License-Identifier: Apache-2.0
"""All that a decision may depend on, as tables of frozen values, and the changes that one decision makes.

The event log keeps the *changes*, not the code that made them: a replay applies them and calls no policy, so
a log stays true when the policy of the next release, or a user's own, would have decided otherwise.

Times are seconds of the log's own clock, which goes on where it stopped when a new process takes over: time
in which no controller ran has passed for nobody, and no step of a wall clock can move it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from supervisor.plain import InvalidValue, from_plain, to_plain
from supervisor.policy.budget import Budget, TokenBucket
from supervisor.policy.caps import CordonMark
from supervisor.policy.verdict import Verdict
from supervisor.values import Command, Event, EventType, HostInfo, LauncherState, WorkloadInfo

#: An epoch from here on is no controller's: a host that tells one must not leave none above it.
MOST_EPOCH = 2**62

_NOTHING_SPENT = Budget()
_FULL_BUCKET = TokenBucket()


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """Progress of a job: the last step of this attempt, when it was finished, and the best ever.

    `usual_step_s`: what a step takes; 0 before that is known.
    """

    step: int
    attempt: int
    at: float
    best: int
    usual_step_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """What was done for one job, and what may still be.

    Attributes:
        fruitless: actions in a row since `best`, the best step at the last one, was not exceeded.
        acted_at: when the last action was decided.
        quiet_since: end of its last incident.
    """

    in_job: Budget = _NOTHING_SPENT
    workload: Budget = _NOTHING_SPENT
    bucket: TokenBucket = _FULL_BUCKET
    fruitless: int = 0
    best: int = 0
    acted_at: float = 0.0
    quiet_since: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Incident:
    """What is wrong with one job, or with a host that no job holds: many reports, one action at a time.

    Attributes:
        subject: name of the job, or ``host:`` and the host's id.
        reports: not acted upon yet.
        past: what the last action was for; looked at again where it brought no progress.
        reported_at: of the newest report; later where the controller was stopped since.
        decide_at: when the policy is asked, again or for the first time.
        command: id of the action that is under way; empty if none is.
        done_at: when the last action was done.
        handled: hosts that an action was for.
        attempt: that the last action ended, if it was done; -1 without one.
        runs: newest attempt all of whose ranks run since, by the word of their launchers; -1 where none said.
        relaunched: the last action, if it was done, started all launchers of the job again.
        stuck: how often the time after an action ended without a step.
        not_swapped: hosts whose swap came to nothing by no fault of a spare: another would fare as it did.
        no_spare: hosts for whose place no spare fits: one that does, or their return, is acted upon at once.
        note: why nothing was done at the last look.
    """

    id: str
    subject: str
    opened_at: float
    reported_at: float
    decide_at: float
    reports: tuple[Event, ...] = ()
    past: tuple[Event, ...] = ()
    command: str = ""
    done_at: float | None = None
    handled: tuple[str, ...] = ()
    attempt: int = -1
    runs: int = -1
    relaunched: bool = False
    actions: int = 0
    stuck: int = 0
    not_swapped: tuple[str, ...] = ()
    no_spare: tuple[str, ...] = ()
    note: str = ""

    def is_echo(self, event: Event, now: float, within_s: float) -> bool:
        """Ranks of an attempt that the last action has ended: they were restarted with the others.

        For `within_s` only: programs that count no attempts would otherwise fail unheard.  A time without a
        step is no news at any time: the incident waits for one itself.  A launcher that gave up restarts
        no ranks: it is an echo only of an action that started another one.
        """
        if event.type is EventType.NO_PROGRESS:
            return True
        if self.command or self.done_at is None or now - self.done_at >= within_s:
            return False
        if event.launcher is LauncherState.GAVE_UP and not self.relaunched:
            return False
        return event.type in (EventType.WORKER_HB, EventType.HANG) and event.attempt <= self.attempt

    def is_over(self, event: Event) -> bool:
        """True for ranks of an attempt that another one has followed, all of whose ranks run."""
        return (event.is_of_ranks or event.type is EventType.DIAGNOSIS) and event.attempt < self.runs

    @property
    def gave_up(self) -> tuple[str, ...]:
        """Hosts whose launchers gave up, and so have ended."""
        return tuple(each.host for each in self.reports if each.launcher is LauncherState.GAVE_UP)

    @property
    def is_being_restarted(self) -> bool:
        """Whether the launchers restart all lost ranks themselves.

        A launcher reports the failure first and what it does about it a moment later, in another event.  Its
        diagnosis of the failure is no other failure.
        """
        at_it = {
            (each.host, each.attempt) for each in self.reports if each.launcher is LauncherState.RESTARTING
        }
        return not self.gave_up and all(
            each.type is EventType.WORKER_HB and (each.host, each.attempt) in at_it
            for each in self.reports
            if each.type is not EventType.DIAGNOSIS
        )

    @property
    def evidence(self) -> tuple[str, ...]:
        ids = tuple(found.id for report in self.past + self.reports for found in report.evidence)
        # A time without progress is evidence of the controller's own; no sensor can withdraw it.
        return (*ids[:64], f"{self.id}/stuck{self.stuck}") if self.stuck else ids[:64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Flight:
    """A command whose outcome is not known yet."""

    command: Command
    at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """What concerns all jobs: who froze it, and the counters that ids are made of.

    Attributes:
        series: ends each id of this log, so that no other log has the same ids.
        fenced_by: highest epoch of another controller that refused a command of this log; 0 is none.
    """

    silent: bool = False
    frozen_by: str = ""
    incidents: int = 0
    commands: int = 0
    series: str = ""
    fenced_by: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspicion:
    """Application-level Xids of one GPU: one is the application's, many across jobs are the GPU's."""

    count: int
    workloads: tuple[str, ...]
    evidence: tuple[str, ...]
    at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """When the id of an event or of a finding's evidence came; the same id again is the same.

    In the table of what is gone: when that was noticed first.
    """

    at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosed:
    """The newest diagnosis that the launcher of a host has made, and when."""

    event: Event
    at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """When a host was asked to check itself or has answered, for which evidence, and what came of it.

    `health`: empty until it has answered once.
    """

    at: float
    evidence: tuple[str, ...] = ()
    health: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cordon(CordonMark):
    """A host that is cordoned, or is to be.

    Attributes:
        by: a person or the orchestrator, whose word alone ends it; empty: the supervisor, while its verdict
            on the host holds.
        tries: commands in a row that did not bring it about, or to its end.
        retry_at: when the next one may be sent.
    """

    by: str = ""
    tries: int = 0
    retry_at: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Losses:
    """Times at which a host was lost; the last ones are enough to tell how often."""

    at: tuple[float, ...]


#: Table, key, and the value that it holds now; None is a deletion.
Change = tuple[str, str, Any]


@dataclass(frozen=True)
class State:
    """Tables by key.  `with_changes` gives the next one, and changes none in place that others may see.

    Attributes:
        names: ids of the hosts with each name, in the order in which they came; made from `hosts`.
    """

    hosts: dict[str, HostInfo]
    workloads: dict[str, WorkloadInfo]
    progress: dict[str, Mark]
    accounts: dict[str, Account]
    incidents: dict[str, Incident]  # by subject
    commands: dict[str, Flight]
    cordons: dict[str, Cordon]  # by host
    losses: dict[str, Losses]  # by name of the host, which outlives its ids
    verdicts: dict[str, Verdict]  # by "host:ID", "hang:ID" or "job:NAME"
    suspicions: dict[str, Suspicion]  # by host and GPU
    diagnoses: dict[str, Diagnosed]  # by host
    checks: dict[str, Checked]  # by host
    seen: dict[str, Seen]
    gone: dict[str, Seen]  # since when, by "job:NAME" that no host works for, or "host:ID" that is lost
    fleet: dict[str, Fleet]  # one row, ""
    names: dict[str, tuple[str, ...]] = field(compare=False, repr=False)

    @classmethod
    def empty(cls) -> State:
        return cls(**{field.name: {} for field in fields(cls)})

    def with_changes(self, changes: Iterable[Change], mine: set[str] | None = None) -> State:
        """The next state.

        Args:
            mine: tables that the caller alone holds: they are changed in place, and all that are copied now
                are added.  So a thousand hosts at once cost one copy of their table.
        """
        mine = set() if mine is None else mine
        tables: dict[str, dict[str, Any]] = {}

        def own(table: str) -> dict[str, Any]:
            if table not in tables:
                known = getattr(self, table)
                tables[table] = known if table in mine else dict(known)
            return tables[table]

        for table, key, value in changes:
            rows = own(table)
            before = rows.pop(key, None) if value is None else rows.get(key)
            if value is not None:
                rows[key] = value
            if table == "hosts":
                _rename(own, key, before, value)
        mine.update(tables)
        return replace(self, **tables)

    @property
    def size(self) -> int:
        """Rows of all tables."""
        return sum(len(getattr(self, table)) for table in _ROWS)

    def to_changes(self) -> tuple[Change, ...]:
        """The changes that make this state from an empty one: a snapshot."""
        return tuple((table, key, row) for table in _ROWS for key, row in getattr(self, table).items())


def _rename(
    own: Callable[[str], dict[str, Any]], id: str, before: HostInfo | None, after: HostInfo | None
) -> None:
    """Keep `State.names` with a change of one host."""
    if before is not None and after is not None and before.name == after.name:
        return
    names = own("names")
    if before is not None:
        names[before.name] = tuple(other for other in names[before.name] if other != id)
        if not names[before.name]:
            del names[before.name]
    if after is not None:
        names[after.name] = (*names.get(after.name, ()), id)


_ROWS: dict[str, type] = {
    "hosts": HostInfo,
    "workloads": WorkloadInfo,
    "progress": Mark,
    "accounts": Account,
    "incidents": Incident,
    "commands": Flight,
    "cordons": Cordon,
    "losses": Losses,
    "verdicts": Verdict,
    "suspicions": Suspicion,
    "diagnoses": Diagnosed,
    "checks": Checked,
    "seen": Seen,
    "gone": Seen,
    "fleet": Fleet,
}


def changes_to_plain(changes: tuple[Change, ...]) -> list[list[Any]]:
    return [[table, key, None if row is None else to_plain(row)] for table, key, row in changes]


def changes_from_plain(data: list[list[Any]]) -> tuple[Change, ...]:
    """The changes that `changes_to_plain` wrote.

    Raises:
        InvalidValue: a table or a row is not one of this release.
    """
    changes = []
    for table, key, row in data:
        if table not in _ROWS:
            raise InvalidValue(f"State has no table {table!r} in this release.")
        changes.append((table, key, None if row is None else from_plain(_ROWS[table], row)))
    return tuple(changes)
