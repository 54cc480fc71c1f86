# SPDX-License-Identifier: Apache-2.0
"""Status documents for tests: one with all that can be in it, one of a large fleet."""

from __future__ import annotations

import json

from supervisor.values import CommandKind, DeviceState, EventType, LauncherState, OutcomeStatus
from supervisor.view.status import (
    BudgetStatus,
    CommandStatus,
    CounterStatus,
    DiagnosisStatus,
    EvidenceStatus,
    History,
    HostStatus,
    IncidentStatus,
    JobStatus,
    LabelStatus,
    NoteStatus,
    PartStatus,
    RecordStatus,
    ReportStatus,
    SpanStatus,
    Status,
    VerdictStatus,
    WorkerStatus,
)

#: What a host could write into a log line to harm a page or a terminal.
EVIL = "<script>alert('x')</script> \"quoted\" & \x1b[31mred"


#: An input of the event log, as it is kept there.
EVENT = json.dumps(
    {
        "id": "event-1",
        "type": "operator",
        "evidence": [{"id": "e1", "witness": "operator", "text": "a switch is replaced", "code": None}],
        "workload": "",
        "ranks": [],
        "attempt": 0,
        "launcher": "unknown",
        "request": "freeze",
    }
)


#: As the launcher of host 1 says, with words from its log.
DIAGNOSIS = DiagnosisStatus(
    host="h1",
    attempt=2,
    cause="gpu_missing",
    advice="replace_host",
    confidence="medium",
    ranks=(3,),
    text=EVIL,
    age_s=90.0,
)


def job(name: str, hosts: tuple[str, ...], *, incident: str = "") -> JobStatus:
    return JobStatus(
        workload=name,
        replicas=4,
        nodes_per_replica=max(1, len(hosts) // 4),
        hosts=hosts,
        hosts_needed=len(hosts),
        step=120,
        step_age_s=75.0,
        best_step=130,
        attempt=2,
        in_job=BudgetStatus(left=2, limit=3, steps_per_restart=1000),
        restarts=BudgetStatus(left=5, limit=7, steps_per_restart=1000),
        actions_left=1,
        actions_at_once=2,
        fruitless=1,
        next_action_s=30.0,
        incident=incident,
        diagnosis=DIAGNOSIS if incident else None,
    )


def host(number: int, state: DeviceState = DeviceState.RUNNING, **fields: object) -> HostStatus:
    given: dict[str, object] = {
        "id": f"host-{number}.boot",
        "name": f"host-{number}",
        "state": state,
        "workload": "llama",
        "domains": (f"subblock=b{number // 16}", "zone=z1"),
        "connected": True,
        "report_age_s": 0.5,
        "attempt": 2,
        "launcher": LauncherState.RUNNING,
        "workers": tuple(
            WorkerStatus(global_rank=8 * number + rank, local_rank=rank, state=DeviceState.RUNNING, step=120)
            for rank in range(8)
        ),
    }
    return HostStatus(**{**given, **fields})  # type: ignore[arg-type]


def incident() -> IncidentStatus:
    return IncidentStatus(
        id="incident-7",
        subject="llama",
        age_s=95.0,
        reports=(
            ReportStatus(
                event="event-1",
                type=EventType.HOST_HB,
                host="host-1.boot",
                evidence=(
                    EvidenceStatus(id="evidence-1", witness="stream", text="no report for 31 s"),
                    EvidenceStatus(id="evidence-2", witness="xid", text=EVIL, code=79, device="GPU-3"),
                ),
                acted_on=True,
            ),
        ),
        command="command-3",
        actions=1,
        spans=(
            SpanStatus(name="gathered", age_s=95.0, seconds=2.0),
            SpanStatus(name="hot_swap", age_s=93.0),
        ),
    )


def full() -> Status:
    hosts = (
        host(0),
        host(
            1,
            DeviceState.FAILED,
            silent=True,
            connected=False,
            report_age_s=31.0,
            verdict=EVIL,
            diagnosis=DIAGNOSIS,
        ),
        host(2, DeviceState.SPARE, workload="", workers=(), cordoned=True),
        host(3, DeviceState.COMPLETE),
    )
    return Status(
        release="0.1.0",
        epoch=4,
        uptime_s=3725.0,
        shadow=True,
        frozen=True,
        frozen_by="alice",
        spare_floor=1,
        cordons_left=2,
        max_cordons=3,
        log_problem="No space left on device",
        parts=(
            PartStatus(name="sensor", address="sensor:60061", contact_age_s=0.5),
            PartStatus(
                name="actuator", address="actuator:60063", contact_age_s=64.0, problem="Connection refused"
            ),
        ),
        hosts=hosts,
        jobs=(job("llama", (hosts[0].id, hosts[1].id), incident="incident-7"),),
        incidents=(
            incident(),
            IncidentStatus(
                id="incident-6", subject="host:host-2.boot", age_s=900.0, closed_age_s=800.0, actions=1
            ),
        ),
        commands=(
            CommandStatus(
                id="command-3",
                kind=CommandKind.HOT_SWAP,
                workload="llama",
                host="host-1.boot",
                spare="host-2.boot",
                incident="incident-7",
                age_s=93.0,
            ),
            CommandStatus(
                id="command-2",
                kind=CommandKind.CORDON_HOST,
                host="host-2.boot",
                age_s=850.0,
                outcome=OutcomeStatus.DONE,
                text="the node is unschedulable",
                seconds=1.5,
            ),
        ),
        verdicts=(
            VerdictStatus(
                subject="host:host-1.boot", cause="xid", text="GPU fell off the bus", expires_s=3600.0
            ),
        ),
        decisions=(NoteStatus(age_s=93.0, text="llama: hot swap of host-1.boot: it is lost"),),
        counters=(
            CounterStatus(name="events", value=12, labels=(LabelStatus(name="type", value="host_hb"),)),
            CounterStatus(name="records", value=345),
        ),
    )


def large(hosts: int = 1000) -> Status:
    states = {3: DeviceState.FAILED, 5: DeviceState.FAILED}
    fleet = tuple(host(number, states.get(number, DeviceState.RUNNING)) for number in range(hosts))
    return Status(
        epoch=1,
        uptime_s=60.0,
        hosts=fleet,
        jobs=(job("llama", tuple(one.id for one in fleet)),),
        max_cordons=3,
    )


def history() -> History:
    return History(
        epoch=4,
        records=(
            RecordStatus(number=10, epoch=4, age_s=96.0, kind="Event", given=EVENT, notes=(EVIL,)),
            RecordStatus(number=11, epoch=4, age_s=95.0, kind="Tick"),
            RecordStatus(number=12, epoch=4, age_s=93.0, kind="Tick", notes=("llama: hot swap",)),
        ),
    )
