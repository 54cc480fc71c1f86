# SPDX-License-Identifier: Apache-2.0
"""The values that the parts of the supervisor exchange: checked when they are made, frozen afterwards.

    daemon     --HostInfo, WorkloadInfo, DaemonReport-->              sensor
    sensor     --Event, HostInfo, WorkloadInfo, Progress, Silence-->  controller
    controller --Command-->                                           actuator
    actuator   --Outcome-->                                           controller

Two rules hold everywhere.  **No time of another machine's clock is compared with ours**: a value says how
old a fact was when it was sent (`age_s`), and its receiver counts on from there with its own monotonic
clock.  **Each value has a plain form** (`to_dict`, `from_dict`) of strings, numbers, lists and dicts, for
the event log and the status page; a field that this release does not know is refused, never dropped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from resiliency.launch.health.causes import Advice, Cause, Confidence
from resiliency.launch.health.condition import JobCondition
from resiliency.launch.health.condition import LauncherState as LauncherState
from resiliency.launch.health.scores import HostHealth
from supervisor.plain import InvalidValue, from_plain, to_plain
from supervisor.policy.diagnosis import is_against_host
from supervisor.policy.spares import Place

#: Longest name, id or address; a DNS name has at most 253 characters.
MAX_NAME_CHARS = 253
#: Longest free text, such as a line of the kernel log; a sender cuts its text with `cut_text`.
MAX_TEXT_CHARS = 2048
#: Longest list in one value: ranks of a hang, workers of a host, evidence of an event.
MAX_ITEMS = 100_000

#: Witness of a silence: nobody saw more than that nothing came.
STREAM = "stream"

V = TypeVar("V", bound="Value")


# ---------------------------------------------------------------- kinds


class DeviceState(Enum):
    """State of a worker or a host."""

    RUNNING = "running"
    SPARE = "spare"
    FAILED = "failed"
    COMPLETE = "complete"


class EventType(Enum):
    """What the sensor can say to the controller."""

    WORKER_HB = "worker_hb"  # workers failed or silent on a host that is there
    HOST_HB = "host_hb"  # a host with all its workers is lost
    HANG = "hang"  # all workers alive, none advances; `ranks` are those behind
    SCALE_UP = "scale_up"  # capacity is back
    XID = "xid"
    ECC = "ecc"
    NO_PROGRESS = "no_progress"  # a job that is not hung finished no step for its downtime threshold
    NODE_CHECK = "node_check"
    ATTEMPT = "attempt"  # all ranks of an attempt run, and their launchers tell how the job is
    DIAGNOSIS = "diagnosis"  # why an attempt ended or stands still, by the launcher of a host with its ranks
    ORCHESTRATOR = "orchestrator"  # a node or pod changed; `change` says how
    DAEMON_LOST = "daemon_lost"  # only the daemon: another witness has seen the host since
    OPERATOR = "operator"  # asked for by a person; `request` says what


class Change(Enum):
    """What the orchestrator did to the host of an ORCHESTRATOR event."""

    GONE = "gone"
    READY = "ready"
    CORDONED = "cordoned"
    UNCORDONED = "uncordoned"
    #: It will go at a time that was announced (maintenance, preemption).
    LEAVING = "leaving"


class Request(Enum):
    """What a person asked for in an OPERATOR event."""

    CORDON = "cordon"
    UNCORDON = "uncordon"
    DRAIN = "drain"
    FREEZE = "freeze"
    THAW = "thaw"


class CommandKind(Enum):
    """What the actuator can do."""

    IN_JOB_RESET = "in_job_reset"  # launchers restart their ranks in place; memory stays
    WORKLOAD_RESET = "workload_reset"  # all launchers start again; `spare`, if given, in the place of `host`
    WORKLOAD_RECREATION = "workload_recreation"
    HOT_SWAP = "hot_swap"  # `host` leaves, `spare` joins, the others keep their processes' memory
    SCALE_DOWN = "scale_down"  # to `replicas`, without `host`
    SCALE_UP = "scale_up"  # to `replicas`; nothing failed, so ranks can stop at one step and save it
    CORDON_HOST = "cordon_host"
    UNCORDON_HOST = "uncordon_host"
    DRAIN_HOST = "drain_host"
    DUMP_STACKS = "dump_stacks"
    CHECK_HOST = "check_host"  # `host`, on which no rank runs, finds out whether it works

    @property
    def irreversible(self) -> bool:
        """True where steps, a host or a process may be lost: evidence is looked at again before it."""
        return self not in (
            CommandKind.DUMP_STACKS,
            CommandKind.UNCORDON_HOST,
            CommandKind.SCALE_UP,
            CommandKind.CHECK_HOST,
        )

    @property
    def restarts(self) -> bool:
        """True where the ranks of a job that stands still start again; growth stops one that advances."""
        return self in (
            CommandKind.IN_JOB_RESET,
            CommandKind.WORKLOAD_RESET,
            CommandKind.WORKLOAD_RECREATION,
            CommandKind.HOT_SWAP,
            CommandKind.SCALE_DOWN,
        )

    @property
    def relaunches(self) -> bool:
        """True where all launchers of the job start again, those that gave up too."""
        return self.restarts and self not in (CommandKind.IN_JOB_RESET, CommandKind.HOT_SWAP)


class OutcomeStatus(Enum):
    """How a command ended."""

    DONE = "done"
    FAILED = "failed"
    #: No answer by its deadline: it may have had its effect.
    TIMED_OUT = "timed_out"
    #: Its evidence no longer held when it was looked at again; nothing was done.
    WITHDRAWN = "withdrawn"
    #: A newer controller has spoken; nothing was done.
    FENCED = "fenced"


# ---------------------------------------------------------------- checks


def cut_text(text: str) -> str:
    """`text` as a value takes it: printable, and cut in the middle where it is too long."""
    text = "".join(char if char.isprintable() else " " for char in text)
    if len(text) <= MAX_TEXT_CHARS:
        return text
    half = MAX_TEXT_CHARS // 2 - 3
    return f"{text[:half]} ... {text[-half:]}"


def _refuse(value: object, field: str, why: str) -> InvalidValue:
    name = type(value).__name__
    return InvalidValue(f"{name}.{field} {why}.", value=name, field=field)


def require(condition: bool, value: object, field: str, why: str) -> None:
    if not condition:
        raise _refuse(value, field, why)


def check_names(value: object, *names: str, required: bool = True) -> None:
    for field in names:
        text = getattr(value, field)
        if not text:
            require(not required, value, field, "must be set, found an empty text")
        elif len(text) > MAX_NAME_CHARS or not text.isprintable() or " " in text:
            raise _refuse(
                value, field, f"must be at most {MAX_NAME_CHARS} printable characters, found {text[:80]!r}"
            )


def check_text(value: object, *names: str) -> None:
    for field in names:
        text = getattr(value, field)
        if len(text) > MAX_TEXT_CHARS or not text.isprintable():
            raise _refuse(
                value,
                field,
                f"must be at most {MAX_TEXT_CHARS} printable characters, found {len(text)}: {text[:40]!r}",
            )


def check_counts(value: object, *names: str, least: int = 0) -> None:
    for field in names:
        count = getattr(value, field)
        if count is not None and not least <= count < 2**63:
            raise _refuse(value, field, f"must be {least} or more, found {count}")


def check_seconds(value: object, *names: str) -> None:
    for field in names:
        seconds = getattr(value, field)
        # `0 <=` also refuses nan.
        if seconds is not None and not 0 <= seconds < math.inf:
            raise _refuse(value, field, f"must be 0 or more seconds, found {seconds}")


def check_items(value: object, *names: str) -> None:
    for field in names:
        items = getattr(value, field)
        if len(items) > MAX_ITEMS:
            raise _refuse(value, field, f"must hold at most {MAX_ITEMS} items, found {len(items)}")


def check_diagnosis(value: object, kind: EventType, evidence: Evidence) -> None:
    """The words of a diagnosis are known ones, so that no decision rests on one that nobody understands."""
    words: tuple[tuple[str, type[Enum]], ...] = ()
    if kind is EventType.DIAGNOSIS:
        words = (("cause", Cause), ("advice", Advice), ("confidence", Confidence))
    elif kind is EventType.NODE_CHECK and evidence.cause:
        words = (("cause", HostHealth),)
    for field, known in words:
        allowed = [one.value for one in known]
        word = getattr(evidence, field)
        require(
            word in allowed,
            value,
            "evidence",
            f"of a {kind.value} must have one of {', '.join(allowed)} as {field}, found {word[:40]!r}",
        )


def check_condition(value: object, launcher: LauncherState, condition: JobCondition | None) -> None:
    if condition is None:
        return
    same = condition.state is launcher
    require(same, value, "condition", f"must be {launcher.value} as launcher, found {condition.state.value}")
    check_text(condition, "phase", "why")
    check_seconds(condition, "usual_step_s", "still_s")
    check_items(condition, "ranks")


class Value:
    """Base of all values: the plain form."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = to_plain(self)
        return plain

    @classmethod
    def from_dict(cls: type[V], data: object) -> V:
        """The value whose `to_dict` gave `data`.

        Raises:
            InvalidValue: a field is missing, unknown, of another type or out of its range.
        """
        return from_plain(cls, data)


# ---------------------------------------------------------------- hosts and jobs


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerInfo(Value):
    """One rank of a job and where it runs."""

    id: str
    local_rank: int
    global_rank: int
    name: str = ""
    address: str = ""
    state: DeviceState = DeviceState.RUNNING

    def __post_init__(self) -> None:
        check_names(self, "id")
        check_names(self, "name", "address", required=False)
        check_counts(self, "local_rank", "global_rank")


@dataclass(frozen=True, kw_only=True, slots=True)
class HostInfo(Value):
    """One training host, as its daemon registers it.

    Attributes:
        id: of this machine or pod; a replacement under the same name has another one.
        name: that the orchestrator knows the node by.
        serial_number: of the machine, which outlives pods and names; empty where it is not known.
        subblock, superblock, zone: the failure domains that it shares with others, from small to large.
        workload: name of the job that it works for, empty for a host that no job holds.
        workers_per_host: workers that make it RUNNING once all are known.
        cordoned: no job may be put on it; never a spare.
    """

    id: str
    name: str
    address: str = ""
    serial_number: str = ""
    subblock: str = ""
    superblock: str = ""
    zone: str = ""
    state: DeviceState = DeviceState.SPARE
    workers: tuple[WorkerInfo, ...] = ()
    workload: str = ""
    workers_per_host: int = 8
    cordoned: bool = False

    def __post_init__(self) -> None:
        check_names(self, "id", "name")
        check_names(
            self, "address", "serial_number", "subblock", "superblock", "zone", "workload", required=False
        )
        check_counts(self, "workers_per_host", least=1)
        check_items(self, "workers")
        ranks = [worker.local_rank for worker in self.workers]
        require(len(set(ranks)) == len(ranks), self, "workers", f"name a local rank twice, found {ranks}")
        require(
            len(ranks) <= self.workers_per_host,
            self,
            "workers",
            f"are more than workers_per_host ({self.workers_per_host}), found {len(ranks)}",
        )

    @property
    def domains(self) -> tuple[str, ...]:
        """What it shares with others, from small to large; without labels none."""
        return (*self.blocks, *([f"zone={self.zone}"] if self.zone else ()))

    @property
    def blocks(self) -> tuple[str, ...]:
        """Its domains below the zone, which holds all hosts of many fleets."""
        labels = (("subblock", self.subblock), ("superblock", self.superblock))
        return tuple(f"{label}={value}" for label, value in labels if value)

    @property
    def place(self) -> Place:
        """What decides for which jobs it can be a spare."""
        return Place(id=self.id, workers=self.workers_per_host, blocks=self.blocks, zone=self.zone)


@dataclass(frozen=True, kw_only=True, slots=True)
class PodFacts(Value):
    """A pod whose annotations say what its job is, as the orchestrator sees it.

    Attributes:
        id: another one for each pod.
        workload, namespace: of the object that the job is.
        hosts, index: how many pods train beside it, itself included, and which of them it is.
        state: SPARE before its container runs, FAILED until another pod takes its place.
        annotations: ``job-name=workers``, ..., unchecked.
    """

    id: str
    workload: str
    namespace: str = ""
    hosts: int = 1
    index: int = 0
    state: DeviceState = DeviceState.SPARE
    annotations: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_names(self, "id", "workload")
        check_names(self, "namespace", required=False)
        check_counts(self, "hosts", least=1)
        check_counts(self, "index")
        check_items(self, "annotations")


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFacts(Value):
    """What the orchestrator knows of a host; the actuator tells its daemon, which has no rights there.

    Attributes:
        subblock, superblock, zone: as in `HostInfo`; empty where it does not say.
        pod: the one that trains there, where its annotations say what its job is.
    """

    subblock: str = ""
    superblock: str = ""
    zone: str = ""
    pod: PodFacts | None = None

    def __post_init__(self) -> None:
        check_names(self, "subblock", "superblock", "zone", required=False)


def host_state(states: tuple[DeviceState, ...], workers_per_host: int) -> DeviceState:
    """State of a host: spare until all workers are known, failed with one of them, complete with all."""
    if DeviceState.FAILED in states:
        return DeviceState.FAILED
    if len(states) < workers_per_host:
        return DeviceState.SPARE
    if all(state is DeviceState.COMPLETE for state in states):
        return DeviceState.COMPLETE
    return DeviceState.RUNNING


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadInfo(Value):
    """One job and what the supervisor may do for it.

    Attributes:
        workload, job, container: names of the JobSet, of its ReplicatedJob and of the training container;
            `workload` is the job's name everywhere in the supervisor.
        replicas, min_replicas, max_replicas: data-parallel replicas now and the bounds of scaling.
        nodes_per_replica: hosts of one replica.
        downtime_threshold_s: without progress that long, the job gets the next rung; 0: the supervisor's own.
        termination_threshold_s: an action must have ended by then; 0: the supervisor's own.
        max_in_job_restarts, max_workload_restarts: budgets, refilled by training progress.
        run: id of this start of the job, the same on all its hosts and for all its attempts: names are used
            again.  Empty where no launcher has said.
        first_attempt: of this run.
    """

    workload: str
    job: str = ""
    container: str = ""
    namespace: str = ""
    replicas: int = 1
    min_replicas: int = 1
    max_replicas: int = 1
    nodes_per_replica: int = 1
    downtime_threshold_s: float = 0.0
    termination_threshold_s: float = 0.0
    max_in_job_restarts: int = 0
    max_workload_restarts: int = 0
    scaling: bool = False
    run: str = ""
    first_attempt: int = 0

    def __post_init__(self) -> None:
        check_names(self, "workload")
        check_names(self, "job", "container", "namespace", "run", required=False)
        check_counts(self, "first_attempt")
        check_counts(self, "replicas", "min_replicas", "max_replicas", "nodes_per_replica", least=1)
        check_counts(self, "max_in_job_restarts", "max_workload_restarts")
        check_seconds(self, "downtime_threshold_s", "termination_threshold_s")
        if self.scaling:
            require(
                self.min_replicas <= self.replicas <= self.max_replicas,
                self,
                "replicas",
                f"must lie between {self.min_replicas} and {self.max_replicas}, found {self.replicas}",
            )

    @property
    def hosts(self) -> int:
        """Hosts that the job needs at its present size."""
        return self.replicas * self.nodes_per_replica

    def is_new_run(self, known: WorkloadInfo, attempt: int) -> bool:
        """Whether this is another job than `known`, under its name: what was known of that one is history.

        A run whose attempts go on above those of `known` is no other job: the supervisor, or who owns the
        job, has started it again as a whole.

        Args:
            attempt: newest of `known` that was heard of.
        """
        other = bool(self.run and known.run) and self.run != known.run
        return other and self.first_attempt <= max(known.first_attempt, attempt)

    def is_of_run(self, run: str) -> bool:
        """Whether what was said of `run` is about this one; where either does not say, it is."""
        return not run or not self.run or run == self.run


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress(Value):
    """The highest step that a rank of a job has finished; ranks of one job are at most a step apart.

    A restart may take the job back to an older step: `attempt` tells that from a message that was late, and
    `run` a job from an earlier one of its name.

    Attributes:
        usual_step_s: what a step of this job takes; 0 before that is known.
    """

    workload: str
    step: int
    attempt: int = 0
    age_s: float = 0.0
    run: str = ""
    usual_step_s: float = 0.0

    def __post_init__(self) -> None:
        check_names(self, "workload")
        check_names(self, "run", required=False)
        check_counts(self, "step", "attempt")
        check_seconds(self, "age_s", "usual_step_s")


# ---------------------------------------------------------------- daemon to sensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence(Value):
    """One observation, told by one witness; a verdict names the ids of its evidence.

    Attributes:
        id: unique over the life of the supervisor.
        witness: of the observation: "stream", "worker", "launcher", "orchestrator", "xid", "operator", ...
        text: what was seen, for people.
        age_s: how old it was when it was sent.
        code: of an Xid; None elsewhere.
        device: the GPU, as the driver names it; empty where no GPU is meant.
        advice: the driver's own recovery action where it gives one (NVML, Xid 154), see `policy.xid`; of a
            diagnosis, and of a launcher that gave up, what the launcher advises.
        cause, confidence: of a diagnosis, in the words of `resiliency.launch.health`; else empty.  A node
            check that was asked for says as its cause how the host is, and as its device which GPUs it has
            tried.  Of a cordon, the command of the supervisor that made it; empty: it is another's.
    """

    id: str
    witness: str
    text: str = ""
    age_s: float = 0.0
    code: int | None = None
    device: str = ""
    advice: str = ""
    cause: str = ""
    confidence: str = ""

    def __post_init__(self) -> None:
        check_names(self, "id", "witness")
        check_names(self, "device", "advice", "cause", "confidence", required=False)
        check_text(self, "text")
        check_seconds(self, "age_s")
        check_counts(self, "code")


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerReport(Value):
    """What a daemon knows of one worker.

    Attributes:
        heartbeat_age_s: since the worker or its launcher gave a sign; None before the first.
        monitor_age_s: since its launcher's rank monitor got a heartbeat or section; None where it got none.
            A job all of whose ranks send them is not taken for hung; a rank that is late the monitor ends.
        step, step_age_s: the last finished step and the time since; None before the first.
        kept_step: that the job would go on from if its ranks were told to end now; None: nobody tells.
    """

    local_rank: int
    global_rank: int
    state: DeviceState = DeviceState.RUNNING
    heartbeat_age_s: float | None = None
    monitor_age_s: float | None = None
    step: int | None = None
    step_age_s: float | None = None
    kept_step: int | None = None

    def __post_init__(self) -> None:
        check_counts(self, "local_rank", "global_rank", "step", "kept_step")
        check_seconds(self, "heartbeat_age_s", "monitor_age_s", "step_age_s")
        require(
            (self.step is None) == (self.step_age_s is None),
            self,
            "step_age_s",
            f"must be given exactly with a step, found {self.step_age_s} with step {self.step}",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding(Value):
    """What a watchdog, a node check or a launcher found on the host of its daemon.

    Attributes:
        ranks, attempt, run: of a diagnosis: who is to blame, and what it is about.
    """

    type: EventType
    evidence: Evidence
    ranks: tuple[int, ...] = ()
    attempt: int = 0
    run: str = ""

    def __post_init__(self) -> None:
        require(
            self.type in (EventType.XID, EventType.ECC, EventType.NODE_CHECK, EventType.DIAGNOSIS),
            self,
            "type",
            f"must be xid, ecc, node_check or diagnosis, found {self.type.value}",
        )
        require(
            self.type is not EventType.XID or self.evidence.code is not None,
            self,
            "evidence",
            "of an xid must carry its code",
        )
        check_names(self, "run", required=False)
        check_counts(self, "attempt")
        check_items(self, "ranks")
        check_diagnosis(self, self.type, self.evidence)


@dataclass(frozen=True, kw_only=True, slots=True)
class DaemonReport(Value):
    """One message of a daemon on its stream; the first one follows its `HostInfo`.

    Attributes:
        incarnation: of the daemon process; `sequence` counts its reports from 0, so that a receiver drops
            what is late or repeated.
        attempt: of the job, as the launcher counts; facts of an older attempt say nothing about this one.
        condition: the launcher's word on the job; None where it tells none.
        workers: all that the daemon knows, also those that did not change.
        run: that the attempt is of, as in `WorkloadInfo`.
    """

    host: str
    incarnation: str
    sequence: int
    attempt: int = 0
    launcher: LauncherState = LauncherState.UNKNOWN
    workers: tuple[WorkerReport, ...] = ()
    findings: tuple[Finding, ...] = ()
    run: str = ""
    condition: JobCondition | None = None

    def __post_init__(self) -> None:
        check_names(self, "host", "incarnation")
        check_names(self, "run", required=False)
        check_counts(self, "sequence", "attempt")
        check_items(self, "workers", "findings")
        check_condition(self, self.launcher, self.condition)


# ---------------------------------------------------------------- events


_NEEDS_HOST = frozenset(
    {
        EventType.WORKER_HB,
        EventType.HOST_HB,
        EventType.XID,
        EventType.ECC,
        EventType.NODE_CHECK,
        EventType.DIAGNOSIS,
        EventType.DAEMON_LOST,
        EventType.ORCHESTRATOR,
    }
)
_NEEDS_WORKLOAD = frozenset({EventType.HANG, EventType.NO_PROGRESS, EventType.ATTEMPT})


@dataclass(frozen=True, kw_only=True, slots=True)
class Event(Value):
    """One thing that happened, once, with what it was concluded from.

    Attributes:
        id: unique over the life of the supervisor; a repeated id is the same event.
        workload: name of the job, empty for a host that no job holds.
        host: id of the host.
        ranks: global ranks that are lost (WORKER_HB), behind (HANG) or to blame (DIAGNOSIS).
        attempt: of the job when it happened.
        launcher: what the host's launcher does about it itself.
        change, request: of an ORCHESTRATOR or OPERATOR event.
        run: of the job when it happened.
    """

    id: str
    type: EventType
    evidence: tuple[Evidence, ...]
    workload: str = ""
    host: str = ""
    ranks: tuple[int, ...] = ()
    attempt: int = 0
    launcher: LauncherState = LauncherState.UNKNOWN
    change: Change | None = None
    request: Request | None = None
    run: str = ""

    def __post_init__(self) -> None:
        check_names(self, "id")
        check_names(self, "workload", "host", "run", required=False)
        check_counts(self, "attempt")
        check_items(self, "evidence", "ranks")
        kind = self.type
        require(bool(self.evidence), self, "evidence", "must not be empty: an event says what it was told by")
        require(
            all(rank >= 0 for rank in self.ranks), self, "ranks", f"must be 0 or more, found {self.ranks}"
        )
        require(bool(self.host) or kind not in _NEEDS_HOST, self, "host", f"must be set for {kind.value}")
        require(
            bool(self.workload) or kind not in _NEEDS_WORKLOAD,
            self,
            "workload",
            f"must be set for {kind.value}",
        )
        require(
            (self.change is not None) == (kind is EventType.ORCHESTRATOR),
            self,
            "change",
            "must be given exactly for orchestrator events",
        )
        require(
            (self.request is not None) == (kind is EventType.OPERATOR),
            self,
            "request",
            "must be given exactly for operator events",
        )
        require(
            kind is not EventType.XID or any(evidence.code is not None for evidence in self.evidence),
            self,
            "evidence",
            "of an xid must carry its code",
        )
        require(
            self.request not in (Request.CORDON, Request.UNCORDON, Request.DRAIN) or bool(self.host),
            self,
            "host",
            "must be set to cordon, uncordon or drain",
        )
        for found in self.evidence:
            check_diagnosis(self, kind, found)

    @property
    def asks_for_another_host(self) -> bool:
        """Whether it is a diagnosis by which its host is to be replaced."""
        return self.type is EventType.DIAGNOSIS and any(
            is_against_host(Cause(found.cause), Advice(found.advice), Confidence(found.confidence))
            for found in self.evidence
        )

    @property
    def order_to_stop(self) -> Evidence | None:
        """A launcher's word that the job would fail again as it is, and should not be started again."""
        if self.type is not EventType.DIAGNOSIS and self.launcher is not LauncherState.GAVE_UP:
            return None
        return next((found for found in self.evidence if found.advice == Advice.STOP.value), None)

    @property
    def is_guess(self) -> bool:
        """True for a diagnosis that rests on words: it takes a host only where a spare fits."""
        sure = any(found.confidence == Confidence.HIGH.value for found in self.evidence)
        return self.type is EventType.DIAGNOSIS and not sure

    @property
    def is_of_ranks(self) -> bool:
        """Whether it tells of ranks and their steps, and not of the host that they run on."""
        return self.type in (EventType.WORKER_HB, EventType.HANG, EventType.NO_PROGRESS)

    @property
    def confirms_loss(self) -> bool:
        """Whether the job surely lacks the host: it is gone, or its launcher said that it ends.

        It is not concluded from silence alone.
        """
        if self.launcher is LauncherState.GAVE_UP:
            return True
        if self.type is EventType.HOST_HB:
            return any(found.witness != STREAM for found in self.evidence)
        return self.type is EventType.ORCHESTRATOR and self.change is Change.GONE

    @property
    def ends_attempt(self) -> bool:
        """Whether the launcher of the host has said that its ranks ended: it restarts them, or says why."""
        return self.type is EventType.DIAGNOSIS or self.launcher is LauncherState.RESTARTING


@dataclass(frozen=True, kw_only=True, slots=True)
class Silence(Value):
    """Whether more hosts are silent at once than fail together; no verdict leaves the sensor while so."""

    frozen: bool
    silent: int
    hosts: int

    def __post_init__(self) -> None:
        check_counts(self, "silent", "hosts")


# ---------------------------------------------------------------- commands


_ON_HOST = frozenset(
    {
        CommandKind.HOT_SWAP,
        CommandKind.CORDON_HOST,
        CommandKind.UNCORDON_HOST,
        CommandKind.DRAIN_HOST,
        CommandKind.CHECK_HOST,
    }
)
_ON_WORKLOAD = frozenset(CommandKind) - {
    CommandKind.CORDON_HOST,
    CommandKind.UNCORDON_HOST,
    CommandKind.DRAIN_HOST,
    CommandKind.CHECK_HOST,
}
_RESIZES = frozenset({CommandKind.SCALE_DOWN, CommandKind.SCALE_UP})


@dataclass(frozen=True, kw_only=True, slots=True)
class Command(Value):
    """One action that the controller decided upon; its id and epoch make it safe to send twice.

    Attributes:
        epoch: of the controller that decided; who has seen a higher one refuses it.
        id: unique over the life of the supervisor; who has carried it out answers with that outcome.
        workload, host: its target.
        spare: host that takes the place of `host` in a hot swap, or in a workload reset that is one for a job
            whose launchers gave up.
        replicas: size of the job afterwards, of a scale down or up.
        incident: that it is the action for.
        evidence: ids of what it was decided upon; looked at again before an irreversible step.
        deadline_s: time for all tries together, from the moment when the actuator takes it.
        run: of the job that it was decided for; it is not for another one of that name.
    """

    epoch: int
    id: str
    kind: CommandKind
    workload: str = ""
    host: str = ""
    spare: str = ""
    replicas: int | None = None
    incident: str = ""
    evidence: tuple[str, ...] = ()
    deadline_s: float = 600.0
    run: str = ""

    def __post_init__(self) -> None:
        check_names(self, "id")
        check_names(self, "workload", "host", "spare", "incident", "run", required=False)
        check_counts(self, "epoch", "replicas", least=1)
        check_seconds(self, "deadline_s")
        check_items(self, "evidence")
        kind = self.kind
        require(bool(self.host) or kind not in _ON_HOST, self, "host", f"must be set for {kind.value}")
        require(
            bool(self.workload) or kind not in _ON_WORKLOAD, self, "workload", f"must be set for {kind.value}"
        )
        require(
            bool(self.spare) == (kind is CommandKind.HOT_SWAP)
            or (kind is CommandKind.WORKLOAD_RESET and bool(self.host)),
            self,
            "spare",
            "must be given for a hot swap, and may be for a workload reset that names a host",
        )
        require(
            not self.spare or self.spare != self.host, self, "spare", f"must be another host than {self.host}"
        )
        require(
            (self.replicas is not None) == (kind in _RESIZES),
            self,
            "replicas",
            "must be given exactly to scale down or up",
        )

    @property
    def is_of_person(self) -> bool:
        """True where a person asked for it: what the supervisor decides about a host rests on evidence."""
        return not (self.incident or self.evidence)

    def is_beside(self, other: Command) -> bool:
        """Whether both are for one incident; a command is beside itself."""
        return bool(self.incident) and self.incident == other.incident


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome(Value):
    """How a command ended; the actuator sends exactly one per command id, and repeats it when asked again.

    Attributes:
        epoch: of the command; of a FENCED one, the higher epoch that was seen.
        spare: of a hot swap that was done, the host that took the place, which a scheduler may have chosen;
            of one that failed, the spare whose fault that is.  Empty where that is not known.
    """

    command: str
    epoch: int
    status: OutcomeStatus
    text: str = ""
    tries: int = 1
    spare: str = ""

    def __post_init__(self) -> None:
        check_names(self, "command")
        check_names(self, "spare", required=False)
        check_text(self, "text")
        check_counts(self, "epoch", least=1)
        check_counts(self, "tries")
