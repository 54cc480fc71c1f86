# Made by scripts/protocol: do not edit.
# source a58645fb375ef4d59430915d472b1790353614406e01b2d45c4012725930286b
# body d399d6b2400ac53bd624000a65bb7b9de475d12af56c4683eb65f67cc75cfa4d
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerInfo(_message.Message):
    __slots__ = ("id", "local_rank", "global_rank", "name", "address", "state")
    ID_FIELD_NUMBER: _ClassVar[int]
    LOCAL_RANK_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_RANK_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    id: str
    local_rank: int
    global_rank: int
    name: str
    address: str
    state: str
    def __init__(self, id: _Optional[str] = ..., local_rank: _Optional[int] = ..., global_rank: _Optional[int] = ..., name: _Optional[str] = ..., address: _Optional[str] = ..., state: _Optional[str] = ...) -> None: ...

class HostInfo(_message.Message):
    __slots__ = ("id", "name", "address", "serial_number", "subblock", "superblock", "zone", "state", "workers", "workload", "workers_per_host", "cordoned")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SERIAL_NUMBER_FIELD_NUMBER: _ClassVar[int]
    SUBBLOCK_FIELD_NUMBER: _ClassVar[int]
    SUPERBLOCK_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    WORKERS_PER_HOST_FIELD_NUMBER: _ClassVar[int]
    CORDONED_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    address: str
    serial_number: str
    subblock: str
    superblock: str
    zone: str
    state: str
    workers: _containers.RepeatedCompositeFieldContainer[WorkerInfo]
    workload: str
    workers_per_host: int
    cordoned: bool
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., address: _Optional[str] = ..., serial_number: _Optional[str] = ..., subblock: _Optional[str] = ..., superblock: _Optional[str] = ..., zone: _Optional[str] = ..., state: _Optional[str] = ..., workers: _Optional[_Iterable[_Union[WorkerInfo, _Mapping]]] = ..., workload: _Optional[str] = ..., workers_per_host: _Optional[int] = ..., cordoned: bool = ...) -> None: ...

class WorkloadInfo(_message.Message):
    __slots__ = ("workload", "job", "container", "namespace", "replicas", "min_replicas", "max_replicas", "nodes_per_replica", "downtime_threshold_s", "termination_threshold_s", "max_in_job_restarts", "max_workload_restarts", "scaling", "run", "first_attempt")
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    CONTAINER_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    MIN_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    MAX_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    NODES_PER_REPLICA_FIELD_NUMBER: _ClassVar[int]
    DOWNTIME_THRESHOLD_S_FIELD_NUMBER: _ClassVar[int]
    TERMINATION_THRESHOLD_S_FIELD_NUMBER: _ClassVar[int]
    MAX_IN_JOB_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    MAX_WORKLOAD_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    SCALING_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    FIRST_ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    workload: str
    job: str
    container: str
    namespace: str
    replicas: int
    min_replicas: int
    max_replicas: int
    nodes_per_replica: int
    downtime_threshold_s: float
    termination_threshold_s: float
    max_in_job_restarts: int
    max_workload_restarts: int
    scaling: bool
    run: str
    first_attempt: int
    def __init__(self, workload: _Optional[str] = ..., job: _Optional[str] = ..., container: _Optional[str] = ..., namespace: _Optional[str] = ..., replicas: _Optional[int] = ..., min_replicas: _Optional[int] = ..., max_replicas: _Optional[int] = ..., nodes_per_replica: _Optional[int] = ..., downtime_threshold_s: _Optional[float] = ..., termination_threshold_s: _Optional[float] = ..., max_in_job_restarts: _Optional[int] = ..., max_workload_restarts: _Optional[int] = ..., scaling: bool = ..., run: _Optional[str] = ..., first_attempt: _Optional[int] = ...) -> None: ...

class Evidence(_message.Message):
    __slots__ = ("id", "witness", "text", "age_s", "code", "device", "advice", "cause", "confidence")
    ID_FIELD_NUMBER: _ClassVar[int]
    WITNESS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    ADVICE_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    id: str
    witness: str
    text: str
    age_s: float
    code: int
    device: str
    advice: str
    cause: str
    confidence: str
    def __init__(self, id: _Optional[str] = ..., witness: _Optional[str] = ..., text: _Optional[str] = ..., age_s: _Optional[float] = ..., code: _Optional[int] = ..., device: _Optional[str] = ..., advice: _Optional[str] = ..., cause: _Optional[str] = ..., confidence: _Optional[str] = ...) -> None: ...

class Finding(_message.Message):
    __slots__ = ("type", "evidence", "ranks", "attempt", "run")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    type: str
    evidence: Evidence
    ranks: _containers.RepeatedScalarFieldContainer[int]
    attempt: int
    run: str
    def __init__(self, type: _Optional[str] = ..., evidence: _Optional[_Union[Evidence, _Mapping]] = ..., ranks: _Optional[_Iterable[int]] = ..., attempt: _Optional[int] = ..., run: _Optional[str] = ...) -> None: ...

class WorkerReport(_message.Message):
    __slots__ = ("local_rank", "global_rank", "state", "heartbeat_age_s", "monitor_age_s", "step", "step_age_s", "kept_step")
    LOCAL_RANK_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_RANK_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    MONITOR_AGE_S_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEP_AGE_S_FIELD_NUMBER: _ClassVar[int]
    KEPT_STEP_FIELD_NUMBER: _ClassVar[int]
    local_rank: int
    global_rank: int
    state: str
    heartbeat_age_s: float
    monitor_age_s: float
    step: int
    step_age_s: float
    kept_step: int
    def __init__(self, local_rank: _Optional[int] = ..., global_rank: _Optional[int] = ..., state: _Optional[str] = ..., heartbeat_age_s: _Optional[float] = ..., monitor_age_s: _Optional[float] = ..., step: _Optional[int] = ..., step_age_s: _Optional[float] = ..., kept_step: _Optional[int] = ...) -> None: ...

class JobCondition(_message.Message):
    __slots__ = ("state", "usual_step_s", "still_s", "phase", "ranks", "requeue", "why")
    STATE_FIELD_NUMBER: _ClassVar[int]
    USUAL_STEP_S_FIELD_NUMBER: _ClassVar[int]
    STILL_S_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    REQUEUE_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    state: str
    usual_step_s: float
    still_s: float
    phase: str
    ranks: _containers.RepeatedScalarFieldContainer[int]
    requeue: str
    why: str
    def __init__(self, state: _Optional[str] = ..., usual_step_s: _Optional[float] = ..., still_s: _Optional[float] = ..., phase: _Optional[str] = ..., ranks: _Optional[_Iterable[int]] = ..., requeue: _Optional[str] = ..., why: _Optional[str] = ...) -> None: ...

class DaemonReport(_message.Message):
    __slots__ = ("host", "incarnation", "sequence", "attempt", "launcher", "workers", "findings", "run", "condition")
    HOST_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    LAUNCHER_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    CONDITION_FIELD_NUMBER: _ClassVar[int]
    host: str
    incarnation: str
    sequence: int
    attempt: int
    launcher: str
    workers: _containers.RepeatedCompositeFieldContainer[WorkerReport]
    findings: _containers.RepeatedCompositeFieldContainer[Finding]
    run: str
    condition: JobCondition
    def __init__(self, host: _Optional[str] = ..., incarnation: _Optional[str] = ..., sequence: _Optional[int] = ..., attempt: _Optional[int] = ..., launcher: _Optional[str] = ..., workers: _Optional[_Iterable[_Union[WorkerReport, _Mapping]]] = ..., findings: _Optional[_Iterable[_Union[Finding, _Mapping]]] = ..., run: _Optional[str] = ..., condition: _Optional[_Union[JobCondition, _Mapping]] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("id", "type", "evidence", "workload", "host", "ranks", "attempt", "launcher", "change", "request", "run")
    ID_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    LAUNCHER_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    id: str
    type: str
    evidence: _containers.RepeatedCompositeFieldContainer[Evidence]
    workload: str
    host: str
    ranks: _containers.RepeatedScalarFieldContainer[int]
    attempt: int
    launcher: str
    change: str
    request: str
    run: str
    def __init__(self, id: _Optional[str] = ..., type: _Optional[str] = ..., evidence: _Optional[_Iterable[_Union[Evidence, _Mapping]]] = ..., workload: _Optional[str] = ..., host: _Optional[str] = ..., ranks: _Optional[_Iterable[int]] = ..., attempt: _Optional[int] = ..., launcher: _Optional[str] = ..., change: _Optional[str] = ..., request: _Optional[str] = ..., run: _Optional[str] = ...) -> None: ...

class Command(_message.Message):
    __slots__ = ("epoch", "id", "kind", "workload", "host", "spare", "replicas", "incident", "evidence", "deadline_s", "run")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    SPARE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    INCIDENT_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    id: str
    kind: str
    workload: str
    host: str
    spare: str
    replicas: int
    incident: str
    evidence: _containers.RepeatedScalarFieldContainer[str]
    deadline_s: float
    run: str
    def __init__(self, epoch: _Optional[int] = ..., id: _Optional[str] = ..., kind: _Optional[str] = ..., workload: _Optional[str] = ..., host: _Optional[str] = ..., spare: _Optional[str] = ..., replicas: _Optional[int] = ..., incident: _Optional[str] = ..., evidence: _Optional[_Iterable[str]] = ..., deadline_s: _Optional[float] = ..., run: _Optional[str] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("command", "epoch", "status", "text", "tries", "spare")
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TRIES_FIELD_NUMBER: _ClassVar[int]
    SPARE_FIELD_NUMBER: _ClassVar[int]
    command: str
    epoch: int
    status: str
    text: str
    tries: int
    spare: str
    def __init__(self, command: _Optional[str] = ..., epoch: _Optional[int] = ..., status: _Optional[str] = ..., text: _Optional[str] = ..., tries: _Optional[int] = ..., spare: _Optional[str] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("workload", "step", "age_s", "attempt", "run", "usual_step_s")
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    USUAL_STEP_S_FIELD_NUMBER: _ClassVar[int]
    workload: str
    step: int
    age_s: float
    attempt: int
    run: str
    usual_step_s: float
    def __init__(self, workload: _Optional[str] = ..., step: _Optional[int] = ..., age_s: _Optional[float] = ..., attempt: _Optional[int] = ..., run: _Optional[str] = ..., usual_step_s: _Optional[float] = ...) -> None: ...

class Silence(_message.Message):
    __slots__ = ("frozen", "silent", "hosts")
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    SILENT_FIELD_NUMBER: _ClassVar[int]
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    frozen: bool
    silent: int
    hosts: int
    def __init__(self, frozen: bool = ..., silent: _Optional[int] = ..., hosts: _Optional[int] = ...) -> None: ...

class HostCommand(_message.Message):
    __slots__ = ("epoch", "id", "kind", "workload", "ranks", "reason", "deadline_s", "attempt")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    id: str
    kind: str
    workload: str
    ranks: _containers.RepeatedScalarFieldContainer[int]
    reason: str
    deadline_s: float
    attempt: int
    def __init__(self, epoch: _Optional[int] = ..., id: _Optional[str] = ..., kind: _Optional[str] = ..., workload: _Optional[str] = ..., ranks: _Optional[_Iterable[int]] = ..., reason: _Optional[str] = ..., deadline_s: _Optional[float] = ..., attempt: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "release", "incarnation", "host")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    release: str
    incarnation: str
    host: HostInfo
    def __init__(self, protocol: _Optional[int] = ..., release: _Optional[str] = ..., incarnation: _Optional[str] = ..., host: _Optional[_Union[HostInfo, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol", "release", "report_period_s")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    REPORT_PERIOD_S_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    release: str
    report_period_s: float
    def __init__(self, protocol: _Optional[int] = ..., release: _Optional[str] = ..., report_period_s: _Optional[float] = ...) -> None: ...

class HostMessage(_message.Message):
    __slots__ = ("hello", "host", "workload", "report", "outcome")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    host: HostInfo
    workload: WorkloadInfo
    report: DaemonReport
    outcome: Outcome
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., host: _Optional[_Union[HostInfo, _Mapping]] = ..., workload: _Optional[_Union[WorkloadInfo, _Mapping]] = ..., report: _Optional[_Union[DaemonReport, _Mapping]] = ..., outcome: _Optional[_Union[Outcome, _Mapping]] = ...) -> None: ...

class PodFacts(_message.Message):
    __slots__ = ("id", "workload", "namespace", "hosts", "index", "state", "annotations")
    ID_FIELD_NUMBER: _ClassVar[int]
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ANNOTATIONS_FIELD_NUMBER: _ClassVar[int]
    id: str
    workload: str
    namespace: str
    hosts: int
    index: int
    state: str
    annotations: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, id: _Optional[str] = ..., workload: _Optional[str] = ..., namespace: _Optional[str] = ..., hosts: _Optional[int] = ..., index: _Optional[int] = ..., state: _Optional[str] = ..., annotations: _Optional[_Iterable[str]] = ...) -> None: ...

class HostFacts(_message.Message):
    __slots__ = ("subblock", "superblock", "zone", "pod")
    SUBBLOCK_FIELD_NUMBER: _ClassVar[int]
    SUPERBLOCK_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    POD_FIELD_NUMBER: _ClassVar[int]
    subblock: str
    superblock: str
    zone: str
    pod: PodFacts
    def __init__(self, subblock: _Optional[str] = ..., superblock: _Optional[str] = ..., zone: _Optional[str] = ..., pod: _Optional[_Union[PodFacts, _Mapping]] = ...) -> None: ...

class HostOrder(_message.Message):
    __slots__ = ("welcome", "resend", "command", "facts")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    RESEND_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    resend: bool
    command: HostCommand
    facts: HostFacts
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., resend: bool = ..., command: _Optional[_Union[HostCommand, _Mapping]] = ..., facts: _Optional[_Union[HostFacts, _Mapping]] = ...) -> None: ...

class EventBatch(_message.Message):
    __slots__ = ("events", "hosts", "workloads", "progress", "silence")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    WORKLOADS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    SILENCE_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[Event]
    hosts: _containers.RepeatedCompositeFieldContainer[HostInfo]
    workloads: _containers.RepeatedCompositeFieldContainer[WorkloadInfo]
    progress: _containers.RepeatedCompositeFieldContainer[Progress]
    silence: Silence
    def __init__(self, events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ..., hosts: _Optional[_Iterable[_Union[HostInfo, _Mapping]]] = ..., workloads: _Optional[_Iterable[_Union[WorkloadInfo, _Mapping]]] = ..., progress: _Optional[_Iterable[_Union[Progress, _Mapping]]] = ..., silence: _Optional[_Union[Silence, _Mapping]] = ...) -> None: ...

class CommandBatch(_message.Message):
    __slots__ = ("commands",)
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[Command]
    def __init__(self, commands: _Optional[_Iterable[_Union[Command, _Mapping]]] = ...) -> None: ...

class OutcomeBatch(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedCompositeFieldContainer[Outcome]
    def __init__(self, outcomes: _Optional[_Iterable[_Union[Outcome, _Mapping]]] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("count", "epoch")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    count: int
    epoch: int
    def __init__(self, count: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class KnownRequest(_message.Message):
    __slots__ = ("after",)
    AFTER_FIELD_NUMBER: _ClassVar[int]
    after: str
    def __init__(self, after: _Optional[str] = ...) -> None: ...

class Known(_message.Message):
    __slots__ = ("epoch", "workloads", "hosts", "more", "progress")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKLOADS_FIELD_NUMBER: _ClassVar[int]
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    workloads: _containers.RepeatedCompositeFieldContainer[WorkloadInfo]
    hosts: _containers.RepeatedCompositeFieldContainer[HostInfo]
    more: bool
    progress: _containers.RepeatedCompositeFieldContainer[Progress]
    def __init__(self, epoch: _Optional[int] = ..., workloads: _Optional[_Iterable[_Union[WorkloadInfo, _Mapping]]] = ..., hosts: _Optional[_Iterable[_Union[HostInfo, _Mapping]]] = ..., more: bool = ..., progress: _Optional[_Iterable[_Union[Progress, _Mapping]]] = ...) -> None: ...

class LookRequest(_message.Message):
    __slots__ = ("host",)
    HOST_FIELD_NUMBER: _ClassVar[int]
    host: str
    def __init__(self, host: _Optional[str] = ...) -> None: ...

class LookReply(_message.Message):
    __slots__ = ("there",)
    THERE_FIELD_NUMBER: _ClassVar[int]
    there: bool
    def __init__(self, there: bool = ...) -> None: ...

class HostChange(_message.Message):
    __slots__ = ("host", "change", "evidence")
    HOST_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    host: str
    change: str
    evidence: Evidence
    def __init__(self, host: _Optional[str] = ..., change: _Optional[str] = ..., evidence: _Optional[_Union[Evidence, _Mapping]] = ...) -> None: ...

class SightsRequest(_message.Message):
    __slots__ = ("after",)
    AFTER_FIELD_NUMBER: _ClassVar[int]
    after: str
    def __init__(self, after: _Optional[str] = ...) -> None: ...

class HostSight(_message.Message):
    __slots__ = ("host", "connected", "age_s", "silent", "attempt", "launcher", "steps", "condition")
    HOST_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    SILENT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    LAUNCHER_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    CONDITION_FIELD_NUMBER: _ClassVar[int]
    host: str
    connected: bool
    age_s: float
    silent: bool
    attempt: int
    launcher: str
    steps: _containers.RepeatedCompositeFieldContainer[RankStep]
    condition: str
    def __init__(self, host: _Optional[str] = ..., connected: bool = ..., age_s: _Optional[float] = ..., silent: bool = ..., attempt: _Optional[int] = ..., launcher: _Optional[str] = ..., steps: _Optional[_Iterable[_Union[RankStep, _Mapping]]] = ..., condition: _Optional[str] = ...) -> None: ...

class RankStep(_message.Message):
    __slots__ = ("rank", "step")
    RANK_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    rank: int
    step: int
    def __init__(self, rank: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class Sights(_message.Message):
    __slots__ = ("hosts", "more")
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    hosts: _containers.RepeatedCompositeFieldContainer[HostSight]
    more: bool
    def __init__(self, hosts: _Optional[_Iterable[_Union[HostSight, _Mapping]]] = ..., more: bool = ...) -> None: ...

class ThawRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Document(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: bytes
    def __init__(self, json: _Optional[bytes] = ...) -> None: ...

class ProbeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ProbeReply(_message.Message):
    __slots__ = ("host", "incarnation", "age_s", "report")
    HOST_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    host: str
    incarnation: str
    age_s: float
    report: DaemonReport
    def __init__(self, host: _Optional[str] = ..., incarnation: _Optional[str] = ..., age_s: _Optional[float] = ..., report: _Optional[_Union[DaemonReport, _Mapping]] = ...) -> None: ...

class Holding(_message.Message):
    __slots__ = ("holds", "attempt")
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    holds: bool
    attempt: int
    def __init__(self, holds: bool = ..., attempt: _Optional[int] = ...) -> None: ...
