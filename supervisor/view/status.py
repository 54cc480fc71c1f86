# SPDX-License-Identifier: Apache-2.0
"""The status document: what the controller answers to an operator, as frozen values with a plain form.

The controller makes a `Status` in one go from its state, so that all of it is of one moment.  **No time of
a clock is in it**: each moment is an age in seconds, as of the moment when the document was made.  A reader
of another release finds a field that it does not know refused with its name (`supervisor.plain`), and
`FORMAT` says whether the meaning is the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from supervisor.plain import InvalidValue
from supervisor.values import (
    CommandKind,
    DeviceState,
    EventType,
    LauncherState,
    OutcomeStatus,
    Request,
    Value,
)

#: Raised with every change of meaning.
FORMAT = 1
#: Records that one answer to `HistoryRequest` holds at most.
MOST_RECORDS = 1000


class Document(Value):
    """Base of the documents that travel as JSON: of the values, those that say their format."""

    __slots__ = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStatus(Value):
    """One rank.  `step`: the last that it finished; None where it has reported none."""

    global_rank: int
    local_rank: int
    state: DeviceState
    step: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DiagnosisStatus(Value):
    """Why an attempt ended or stands still, as the launcher of a host says.

    Attributes:
        host: id of the host whose launcher it is.
        cause, advice, confidence: in the launcher's words, as in docs/health.md.
        ranks: that are to blame.
        text: its sentence.
    """

    host: str
    attempt: int
    cause: str
    advice: str
    confidence: str
    ranks: tuple[int, ...] = ()
    text: str = ""
    age_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class HostStatus(Value):
    """One host of the fleet.

    Attributes:
        state: as the controller has it; FAILED is a host that is lost or has a failed worker.
        workload: name of its job; empty for a host that no job holds.
        domains: ``label=value``, from small to large.
        connected: whether its daemon's stream is open; None where the sensor could not be asked.
        report_age_s: since its last report; None where the sensor has none, or could not be asked.
        silent: the sensor waits for it longer than it should have to.
        launcher: what the host's launcher does; UNKNOWN too where the sensor could not be asked.
        verdict: why no job is put on it; empty without one.
        diagnosis: the newest of its launcher.
    """

    id: str
    name: str
    state: DeviceState
    address: str = ""
    workload: str = ""
    workers_per_host: int = 8
    domains: tuple[str, ...] = ()
    cordoned: bool = False
    connected: bool | None = None
    report_age_s: float | None = None
    silent: bool = False
    attempt: int = 0
    launcher: LauncherState = LauncherState.UNKNOWN
    workers: tuple[WorkerStatus, ...] = ()
    verdict: str = ""
    diagnosis: DiagnosisStatus | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetStatus(Value):
    """Restarts of one kind: `left` of `limit`; `steps_per_restart` finished steps give one back."""

    left: int
    limit: int
    steps_per_restart: int


@dataclass(frozen=True, kw_only=True, slots=True)
class JobStatus(Value):
    """One job.

    Attributes:
        hosts: ids of the hosts that work for it; `hosts_needed` of them make its present size.
        step, step_age_s: the last finished step of this attempt; None before the first.
        best_step: the highest ever; a restart may go back behind it.
        attempt: of the newest step.
        in_job, restarts: budgets for restarts in place, and for restarts of the whole job.
        actions_left: actions that may be taken at once now, of `actions_at_once`.
        fruitless: actions in a row that brought no new best step.
        next_action_s: no action before that many seconds have passed.
        incident: id of the open one, empty without.
        verdict: why nothing more is done for it; empty without one.
        condition: a launcher's word on a job that stands still or has ended; empty without one.
        diagnosis: of the newest attempt that failed or stood still; one that blames this job's ranks or hosts
            goes before those that are its echoes.
    """

    workload: str
    job: str = ""
    container: str = ""
    replicas: int = 1
    min_replicas: int = 1
    max_replicas: int = 1
    nodes_per_replica: int = 1
    scaling: bool = False
    hosts: tuple[str, ...] = ()
    hosts_needed: int = 1
    step: int | None = None
    step_age_s: float | None = None
    best_step: int = 0
    attempt: int = 0
    in_job: BudgetStatus
    restarts: BudgetStatus
    actions_left: int = 0
    actions_at_once: int = 0
    fruitless: int = 0
    next_action_s: float = 0.0
    incident: str = ""
    verdict: str = ""
    condition: str = ""
    diagnosis: DiagnosisStatus | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EvidenceStatus(Value):
    """One observation that an event was concluded from.  `code`: of an Xid."""

    id: str
    witness: str
    text: str = ""
    code: int | None = None
    device: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportStatus(Value):
    """One event of an incident.  `acted_on`: the last action was for it.  `cause`: of a diagnosis."""

    event: str
    type: EventType
    host: str = ""
    ranks: tuple[int, ...] = ()
    evidence: tuple[EvidenceStatus, ...] = ()
    acted_on: bool = False
    cause: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpanStatus(Value):
    """One part of an incident's time, in order and without gaps.

    Attributes:
        name: ``gathered`` (first report to the decision), the kind of a command (decided to its outcome), or
            ``first step`` (outcome to a finished step, or to the next decision).
        age_s: since its beginning.
        seconds: how long it took; None while it lasts.
    """

    name: str
    age_s: float
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class IncidentStatus(Value):
    """What is or was wrong with one job, or with a host that no job holds.

    Attributes:
        subject: name of the job, or ``host:`` and the host's id.
        age_s: since its first report; `closed_age_s` since its end, None while it is open.
        command: id of the action under way; empty without.
        actions: taken for it so far.
        note: why nothing was done at the last look; empty where something was.
        next_look_s: until the policy is asked again; None while a command runs, and once it is closed.
    """

    id: str
    subject: str
    age_s: float
    closed_age_s: float | None = None
    reports: tuple[ReportStatus, ...] = ()
    command: str = ""
    actions: int = 0
    note: str = ""
    next_look_s: float | None = None
    spans: tuple[SpanStatus, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandStatus(Value):
    """One command, under way or ended.

    Attributes:
        age_s: since it was decided.
        evidence: ids of what it was decided upon.
        outcome: None while it is under way; then `text` says how it ended, and `seconds` how long it took.
    """

    id: str
    kind: CommandKind
    workload: str = ""
    host: str = ""
    spare: str = ""
    replicas: int | None = None
    incident: str = ""
    evidence: tuple[str, ...] = ()
    age_s: float = 0.0
    outcome: OutcomeStatus | None = None
    text: str = ""
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class VerdictStatus(Value):
    """A conclusion that holds for `expires_s` more; `subject` is ``host:ID``, ``hang:ID`` or ``job:NAME``."""

    subject: str
    cause: str
    text: str = ""
    evidence: tuple[str, ...] = ()
    age_s: float = 0.0
    expires_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class NoteStatus(Value):
    """One line of what was decided and why, `age_s` ago."""

    age_s: float
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PartStatus(Value):
    """Another process of the supervisor, as the controller sees it.

    Attributes:
        name: ``sensor`` or ``actuator``.
        contact_age_s: since the last call from or to it that succeeded; None if there was none.
        problem: of the last call that failed; empty after one that succeeded.
    """

    name: str
    address: str = ""
    contact_age_s: float | None = None
    problem: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelStatus(Value):
    name: str
    value: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CounterStatus(Value):
    """A count since the controller process started, in Prometheus' sense.

    Attributes:
        name: without prefix and suffix: ``events`` (label ``type``), ``commands`` (labels ``kind``,
            ``outcome``), ``diagnoses`` (label ``cause``), ``log_errors``, ``records``.
    """

    name: str
    value: int
    labels: tuple[LabelStatus, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Status(Document):
    """The fleet, as the controller knows it at one moment.

    Attributes:
        epoch: of this controller; grows with each start.
        uptime_s: of the controller process.
        shadow: decisions are noted and no command is given.
        frozen: nothing is done, by whichever cause: `frozen_by` names a person, `silent` says that many hosts
            are silent at once.
        spare_floor: spares that no job may grow into.
        cordons_left: hosts that may be cordoned now, of `max_cordons` a window.
        log_problem: why the event log takes nothing at present; empty while it does.
        fenced_by: epoch above this controller's own that refused a command of it; 0 is none.
        incidents: open ones first, then those that closed lately, newest first.
        commands: under way first, then those that ended lately, newest first.
        decisions: newest first.
    """

    format: int = FORMAT
    release: str = ""
    epoch: int
    uptime_s: float
    shadow: bool = False
    frozen: bool = False
    frozen_by: str = ""
    silent: bool = False
    spare_floor: int = 0
    cordons_left: int = 0
    max_cordons: int = 0
    log_problem: str = ""
    fenced_by: int = 0
    parts: tuple[PartStatus, ...] = ()
    hosts: tuple[HostStatus, ...] = ()
    jobs: tuple[JobStatus, ...] = ()
    incidents: tuple[IncidentStatus, ...] = ()
    commands: tuple[CommandStatus, ...] = ()
    verdicts: tuple[VerdictStatus, ...] = ()
    decisions: tuple[NoteStatus, ...] = ()
    counters: tuple[CounterStatus, ...] = ()

    def __post_init__(self) -> None:
        _check_format(self.format)


@dataclass(frozen=True, kw_only=True, slots=True)
class ActRequest(Document):
    """What a person asks for.

    Attributes:
        host: id or name of a host: for CORDON, UNCORDON and DRAIN.
        workload: name of a job: THAW forgets the verdict on it.
        by: who asks; at most 64 characters without spaces.
        why: for the log.
    """

    request: Request
    by: str
    host: str = ""
    workload: str = ""
    why: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActReply(Document):
    """The request is in the event log under the id `event`; `text` says what comes of it."""

    event: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class HistoryRequest(Document):
    """The newest `limit` records whose number is above `since`."""

    limit: int = 100
    since: int = 0

    def __post_init__(self) -> None:
        for name, least, most in (("limit", 1, MOST_RECORDS), ("since", 0, 2**63 - 1)):
            value = getattr(self, name)
            if not least <= value <= most:
                raise InvalidValue(
                    f"HistoryRequest.{name} must be {least} to {most}, found {value}.", field=name
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordStatus(Value):
    """One record of the event log.

    Attributes:
        number: of the record; grows.
        age_s: in the log's own clock, which stands while no controller runs.
        kind: of the input: ``Event``, ``HostInfo``, ``Outcome``, ..., ``Tick`` for the passing of time.
        given: the input's plain form as JSON; empty for a tick.
        changed: ``table key`` of each row that was written or deleted.
        notes: what was decided and why.
    """

    number: int
    epoch: int
    age_s: float
    kind: str
    given: str = ""
    changed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class History(Document):
    """Records in the order in which they were written."""

    format: int = FORMAT
    epoch: int
    records: tuple[RecordStatus, ...] = ()

    def __post_init__(self) -> None:
        _check_format(self.format)


def _check_format(found: int) -> None:
    if found != FORMAT:
        raise InvalidValue(
            f"the controller's documents have format {found}, this program reads format {FORMAT}.",
            hint="Use the same release of both.",
            field="format",
        )
