# SPDX-License-Identifier: Apache-2.0
"""What a value refuses, and that its plain form gives it back."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from supervisor.plain import InvalidValue
from supervisor.values import (
    MAX_TEXT_CHARS,
    Change,
    Command,
    CommandKind,
    DaemonReport,
    DeviceState,
    Event,
    EventType,
    Evidence,
    Finding,
    HostInfo,
    LauncherState,
    Outcome,
    OutcomeStatus,
    Progress,
    Request,
    Silence,
    Value,
    WorkerInfo,
    WorkerReport,
    WorkloadInfo,
    cut_text,
    host_state,
)

EVIDENCE = Evidence(id="s1:1/0", witness="watchdog", text="Xid 79", age_s=0.5, code=79, device="0000:3b:00")
HOST = HostInfo(
    id="h1",
    name="node-1",
    subblock="r1",
    zone="z1",
    state=DeviceState.RUNNING,
    workers=(WorkerInfo(id="w0", local_rank=0, global_rank=8),),
    workload="train",
)
WORKLOAD = WorkloadInfo(workload="train", replicas=2, min_replicas=1, max_replicas=3, scaling=True)
REPORT = DaemonReport(
    host="h1",
    incarnation="d1",
    sequence=3,
    attempt=1,
    launcher=LauncherState.RUNNING,
    workers=(WorkerReport(local_rank=0, global_rank=8, heartbeat_age_s=0.1, step=5, step_age_s=1.5),),
    findings=(Finding(type=EventType.XID, evidence=EVIDENCE),),
)
EVENT = Event(id="s1:1", type=EventType.XID, evidence=(EVIDENCE,), workload="train", host="h1", ranks=(8, 9))
COMMAND = Command(epoch=2, id="c1", kind=CommandKind.HOT_SWAP, workload="train", host="h1", spare="h9")
OUTCOME = Outcome(command="c1", epoch=2, status=OutcomeStatus.TIMED_OUT, text="no answer", tries=3)
ALL = [
    *(EVIDENCE, HOST, WORKLOAD, REPORT, EVENT, COMMAND, OUTCOME),
    Progress(workload="train", step=7, attempt=2, age_s=0.25),
    Silence(frozen=True, silent=5, hosts=9),
    Event(id="o1", type=EventType.OPERATOR, evidence=(EVIDENCE,), request=Request.FREEZE),
    Event(id="o2", type=EventType.ORCHESTRATOR, evidence=(EVIDENCE,), host="h1", change=Change.GONE),
]


@pytest.mark.parametrize("value", ALL, ids=lambda value: type(value).__name__)
def test_the_plain_form_survives_json_and_gives_the_value_back(value: Value) -> None:
    assert type(value).from_dict(json.loads(json.dumps(value.to_dict()))) == value


@pytest.mark.parametrize(
    ("value", "change", "sentence"),
    [
        (HOST, {"name": ""}, r"HostInfo\.name must be set"),
        (HOST, {"id": "a b"}, r"HostInfo\.id must be at most 253 printable characters"),
        (HOST, {"id": "x" * 254}, r"HostInfo\.id must be at most 253"),
        (HOST, {"workers_per_host": 0}, r"workers_per_host must be 1 or more, found 0"),
        (HOST, {"workers": HOST.workers * 2}, r"name a local rank twice"),
        (WORKLOAD, {"replicas": 4}, r"replicas must lie between 1 and 3, found 4"),
        (WORKLOAD, {"downtime_threshold_s": float("nan")}, r"must be 0 or more seconds, found nan"),
        (WORKLOAD, {"max_in_job_restarts": -1}, r"max_in_job_restarts must be 0 or more, found -1"),
        (EVIDENCE, {"age_s": -1.0}, r"Evidence\.age_s must be 0 or more seconds"),
        (EVIDENCE, {"text": "a\nb"}, r"Evidence\.text must be at most 2048 printable characters"),
        (REPORT.workers[0], {"step_age_s": None}, r"must be given exactly with a step"),
        (
            REPORT.findings[0],
            {"type": EventType.HANG},
            r"must be xid, ecc, node_check or diagnosis, found hang",
        ),
        (REPORT.findings[0], {"evidence": replace(EVIDENCE, code=None)}, r"of an xid must carry its code"),
        (EVENT, {"evidence": ()}, r"Event\.evidence must not be empty"),
        (EVENT, {"host": ""}, r"Event\.host must be set for xid"),
        (EVENT, {"ranks": (-1,)}, r"Event\.ranks must be 0 or more"),
        (EVENT, {"request": Request.THAW}, r"request must be given exactly for operator events"),
        (EVENT, {"type": EventType.HANG, "workload": ""}, r"workload must be set for hang"),
        (EVENT, {"type": EventType.ORCHESTRATOR}, r"change must be given exactly for orchestrator events"),
        (ALL[9], {"request": Request.DRAIN}, r"must be set to cordon, uncordon or drain"),
        (COMMAND, {"epoch": 0}, r"Command\.epoch must be 1 or more, found 0"),
        (COMMAND, {"spare": ""}, r"spare must be given for a hot swap, and may be for a workload reset"),
        (COMMAND, {"kind": CommandKind.IN_JOB_RESET}, r"may be for a workload reset that names a host"),
        (COMMAND, {"spare": "h1"}, r"spare must be another host than h1"),
        (COMMAND, {"replicas": 2}, r"replicas must be given exactly to scale down or up"),
        (COMMAND, {"workload": ""}, r"workload must be set for hot_swap"),
        (OUTCOME, {"tries": -1}, r"Outcome\.tries must be 0 or more"),
    ],
)
def test_a_broken_value_is_refused_with_a_sentence(
    value: Value, change: dict[str, object], sentence: str
) -> None:
    with pytest.raises(InvalidValue, match=sentence):
        replace(value, **change)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"colour": "red"}, r"Outcome has no field 'colour' in this release.*newer release"),
        ({"epoch": "2"}, r"Outcome\.epoch must be of type int, found '2'"),
        ({"epoch": True}, r"Outcome\.epoch must be of type int, found True"),
        (
            {"status": "gone"},
            r"status must be one of done, failed, timed_out, withdrawn, fenced, found 'gone'",
        ),
    ],
)
def test_a_plain_form_that_this_release_does_not_know_is_refused(
    change: dict[str, object], sentence: str
) -> None:
    with pytest.raises(InvalidValue, match=sentence):
        Outcome.from_dict({**OUTCOME.to_dict(), **change})


def test_a_missing_field_and_a_form_that_is_no_table_are_refused() -> None:
    with pytest.raises(InvalidValue, match=r"Outcome\.epoch is missing"):
        Outcome.from_dict({"command": "c1", "status": "done"})
    with pytest.raises(InvalidValue, match="must be a table of fields"):
        Outcome.from_dict(["c1"])


def test_any_text_can_be_cut_to_one_that_a_value_takes() -> None:
    cut = cut_text("x" * 5000 + "\n\x00end")
    assert len(cut) <= MAX_TEXT_CHARS
    assert cut.endswith("end")
    replace(EVIDENCE, text=cut)


def test_a_host_is_spare_until_all_workers_are_known_and_complete_when_all_are() -> None:
    running, failed, complete = DeviceState.RUNNING, DeviceState.FAILED, DeviceState.COMPLETE
    assert host_state((running,), 2) is DeviceState.SPARE
    assert host_state((running, complete), 2) is running
    assert host_state((complete, complete), 2) is complete
    assert host_state((failed,), 2) is failed


def test_domains_go_from_small_to_large_and_leave_out_what_is_not_known() -> None:
    assert HOST.domains == ("subblock=r1", "zone=z1")
