# SPDX-License-Identifier: Apache-2.0
"""Messages carry values whole, and the stubs belong to the .proto that lies beside them."""

from __future__ import annotations

import hashlib
from dataclasses import fields
from pathlib import Path

import pytest

import supervisor.protocol
from resiliency.launch.health.condition import JobCondition, Requeue
from supervisor import values
from supervisor.plain import InvalidValue
from supervisor.protocol import fleet_pb2
from supervisor.protocol.convert import MESSAGES, from_message, to_message
from supervisor.protocol.host_commands import Fence, HostCommand, HostCommandKind
from supervisor.values import (
    Command,
    CommandKind,
    DaemonReport,
    DeviceState,
    Event,
    EventType,
    Evidence,
    Finding,
    HostFacts,
    HostInfo,
    LauncherState,
    Outcome,
    OutcomeStatus,
    PodFacts,
    Progress,
    Request,
    Silence,
    Value,
    WorkerInfo,
    WorkerReport,
    WorkloadInfo,
)

HERE = Path(supervisor.protocol.__file__).parent
EVIDENCE = Evidence(id="e1", witness="xid", text="NVRM: Xid 79", age_s=0.5, code=79, device="PCI:0000:3b:00")
VALUES: list[Value] = [
    WorkerInfo(id="w3", local_rank=3, global_rank=11, name="n", address="a:1", state=DeviceState.FAILED),
    HostInfo(
        id="h1",
        name="host-1",
        zone="z",
        state=DeviceState.RUNNING,
        workers=(WorkerInfo(id="w0", local_rank=0, global_rank=0),),
        workload="job",
        workers_per_host=4,
        cordoned=True,
    ),
    HostFacts(subblock="s1", zone="z1"),
    HostFacts(pod=PodFacts(id="p1", workload="job")),
    PodFacts(
        id="p1",
        workload="job",
        namespace="jobs",
        hosts=4,
        index=3,
        state=DeviceState.RUNNING,
        annotations=("job-name=workers", "max-in-job-restarts="),
    ),
    WorkloadInfo(workload="job", replicas=2, max_replicas=4, downtime_threshold_s=60.5, scaling=True),
    EVIDENCE,
    Finding(type=EventType.XID, evidence=EVIDENCE),
    WorkerReport(local_rank=0, global_rank=8),
    WorkerReport(
        local_rank=0,
        global_rank=8,
        heartbeat_age_s=0.0,
        monitor_age_s=1.5,
        step=0,
        step_age_s=0.0,
        kept_step=0,
    ),
    DaemonReport(
        host="h1",
        incarnation="ab",
        sequence=7,
        attempt=2,
        launcher=LauncherState.RESTARTING,
        workers=(WorkerReport(local_rank=1, global_rank=9),),
        findings=(Finding(type=EventType.XID, evidence=EVIDENCE),),
        condition=JobCondition(
            **{
                "state": LauncherState.RESTARTING,
                "requeue": Requeue.LATER,
                "why": "storage",
                "ranks": (0, 3),
            },
            **{"usual_step_s": 0.0, "still_s": 12.5, "phase": "an evaluation"},
        ),
    ),
    DaemonReport(host="h1", incarnation="ab", sequence=8),
    Event(id="v", type=EventType.WORKER_HB, evidence=(EVIDENCE,), host="h1", ranks=(0, 3), attempt=1),
    Event(id="v", type=EventType.OPERATOR, evidence=(EVIDENCE,), request=Request.FREEZE),
    Command(epoch=2, id="c", kind=CommandKind.SCALE_DOWN, workload="job", replicas=1, evidence=("e1", "e2")),
    Outcome(command="c", epoch=2, status=OutcomeStatus.TIMED_OUT, text="late", tries=3),
    Progress(workload="job", step=12, attempt=2, age_s=1.5, usual_step_s=0.25),
    Silence(frozen=True, silent=3, hosts=4),
    HostCommand(epoch=1, id="c", kind=HostCommandKind.DUMP_STACKS, workload="job", ranks=(0, 5)),
    HostCommand(epoch=1, id="d", kind=HostCommandKind.RESTART_RANKS, workload="job", attempt=0),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_is_the_same_after_its_journey(value: Value) -> None:
    message = type(to_message(value)).FromString(to_message(value).SerializeToString())
    assert from_message(type(value), message) == value


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_a_message_has_the_fields_of_its_value(kind: type[Value]) -> None:
    names = {field.name for field in MESSAGES[kind].DESCRIPTOR.fields}
    assert names == {field.name for field in fields(kind)}  # type: ignore[arg-type]


def test_a_message_with_an_unknown_kind_is_refused_with_the_allowed_ones() -> None:
    message = fleet_pb2.WorkerReport(local_rank=1, global_rank=1, state="asleep")
    with pytest.raises(
        InvalidValue, match=r"state must be one of running, spare, failed, complete, found 'asl"
    ):
        from_message(WorkerReport, message)


@pytest.mark.parametrize("stub", ["fleet_pb2.py", "fleet_pb2.pyi"])
def test_stubs_are_those_of_the_proto(stub: str) -> None:
    lines = (HERE / stub).read_bytes().splitlines(keepends=True)
    source = hashlib.sha256((HERE / "fleet.proto").read_bytes()).hexdigest()
    body = hashlib.sha256(b"".join(lines[3:])).hexdigest()
    stale = "run scripts/protocol: the stubs are not those of fleet.proto"
    assert [line.decode().split()[-1] for line in lines[1:3]] == [source, body], stale


def command(epoch: int, id: str) -> HostCommand:
    return HostCommand(epoch=epoch, id=id, kind=HostCommandKind.RESTART_RANKS, workload="job")


def test_a_fence_lets_a_command_in_once() -> None:
    fence = Fence()
    assert fence.try_enter(command(3, "a")) == (True, None)
    assert fence.try_enter(command(3, "a")) == (False, None)  # still runs
    done = Outcome(command="a", epoch=3, status=OutcomeStatus.DONE)
    fence.record(done)
    assert fence.try_enter(command(4, "a")) == (False, done)


def test_a_fence_refuses_a_controller_that_was_replaced() -> None:
    fence = Fence()
    fence.try_enter(command(3, "a"))
    entered, answer = fence.try_enter(command(2, "b"))
    assert not entered
    assert answer is not None
    assert answer.status is OutcomeStatus.FENCED
    assert answer.text == "epoch 2 refused: this host has seen epoch 3"
    assert answer.epoch == 3


def test_a_fence_that_was_kept_knows_what_it_does_not_know() -> None:
    fence = Fence()
    fence.try_enter(command(3, "a"))
    again = Fence.from_dict(fence.to_dict())
    assert again.epoch == 3
    entered, answer = again.try_enter(command(3, "a"))
    assert not entered
    assert answer is not None
    assert answer.status is OutcomeStatus.TIMED_OUT


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"epoch": 0}, "epoch must be 1 or more, found 0"),
        ({"id": ""}, "id must be set, found an empty text"),
        ({"ranks": (-1,)}, "ranks must be 0 or more, found"),
        ({"reason": "a\nb"}, "reason must be at most 2048 printable characters"),
        ({"deadline_s": float("nan")}, "deadline_s must be above 0 and at most a day, found nan"),
    ],
)
def test_a_host_command_checks_itself(change: dict[str, object], sentence: str) -> None:
    good = command(1, "a").to_dict()
    with pytest.raises(InvalidValue, match=sentence):
        HostCommand.from_dict(good | change)


def test_every_value_that_travels_is_tested() -> None:
    assert {type(value) for value in VALUES} == set(MESSAGES)
    assert values.Value not in MESSAGES
