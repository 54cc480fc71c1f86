# SPDX-License-Identifier: Apache-2.0
"""Hosts out of service: which spare comes first and which late, and the owner and the end of each cordon."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from supervisor.decision.guards import View
from supervisor.policy.verdict import Verdict
from supervisor.values import (
    Change,
    Command,
    CommandKind,
    DeviceState,
    EventType,
    HostInfo,
    LauncherState,
    Outcome,
    OutcomeStatus,
    Request,
)
from tests.supervisor.controllers import LIMITS, Controller, _host, checked, diagnosed

RESET, SWAP, DOWN = CommandKind.WORKLOAD_RESET, CommandKind.HOT_SWAP, CommandKind.SCALE_DOWN
CORDON, UNCORDON, CHECK = CommandKind.CORDON_HOST, CommandKind.UNCORDON_HOST, CommandKind.CHECK_HOST
DONE, FAILED, TIMED_OUT = OutcomeStatus.DONE, OutcomeStatus.FAILED, OutcomeStatus.TIMED_OUT


def view(fleet: Controller) -> View:
    return View(state=fleet.state, now=fleet.now, limits=fleet.logic.thresholds)


def asks(fleet: Controller, request: Request, host: str) -> list[Command]:
    """A person's request, as the controller makes it an event."""
    event = fleet.event(EventType.OPERATOR, host, request=request)
    return fleet.give(replace(event, evidence=(replace(event.evidence[0], text="alice"),), workload=""))


def kinds(commands: list[Command]) -> list[CommandKind]:
    return [one.kind for one in commands]


def end(fleet: Controller, kind: CommandKind, status: OutcomeStatus = DONE) -> list[CommandKind]:
    """End the commands of one kind that are under way."""
    later: list[CommandKind] = []
    for flight in list(fleet.state.commands.values()):
        if flight.command.kind is kind:
            took = flight.command.spare if status is DONE else ""
            later += kinds(fleet.give(Outcome(command=flight.command.id, epoch=7, status=status, spare=took)))
    return later


def told(fleet: Controller, host: str, change: Change, command: str = "") -> list[Command]:
    """What the orchestrator says of a host, and by which command it was, if by one."""
    event = fleet.event(EventType.ORCHESTRATOR, host, change=change)
    return fleet.give(replace(event, evidence=(replace(event.evidence[0], cause=command),), workload=""))


# ---------------------------------------------------------------- what may take a host away


@pytest.mark.parametrize(
    ("confidence", "spares", "scaling", "wanted"),
    [
        ("high", 1, False, [CORDON, SWAP]),
        ("high", 0, True, [CORDON, DOWN]),
        ("high", 0, False, [CORDON]),
        ("medium", 1, False, [SWAP, CORDON]),
        ("medium", 0, True, []),
        ("medium", 0, False, []),
        ("low", 1, True, []),
    ],
)
def test_a_guess_cordons_no_host_while_no_spare_fits(
    confidence: str, spares: int, scaling: bool, wanted: list[CommandKind]
) -> None:
    fleet = Controller(spares=spares, scaling=scaling, max_replicas=2)
    fleet.give(fleet.event(EventType.WORKER_HB, ranks=(1,)))
    fleet.give(fleet.event(EventType.WORKER_HB, launcher=LauncherState.RESTARTING))
    fleet.give(diagnosed(fleet, confidence=confidence))
    assert fleet.wait(LIMITS.coalesce_s) == wanted
    if not wanted and confidence == "medium":
        said = "h1 is not replaced: no spare fits; its launcher restarts the ranks"
        assert (fleet.notes.count(said), fleet.state.cordons, fleet.state.verdicts) == (1, {}, {})


def test_a_spare_that_is_gone_at_the_decision_leaves_a_guess_to_the_launcher() -> None:
    fleet = Controller()
    fleet.give(diagnosed(fleet, confidence="medium"))
    fleet.give(_host("s0", "other", DeviceState.RUNNING))
    assert fleet.wait(LIMITS.coalesce_s) == []
    assert (fleet.state.incidents, fleet.state.cordons) == ({}, {})


@pytest.mark.parametrize("status", [FAILED, OutcomeStatus.WITHDRAWN])
def test_a_host_whose_swap_on_a_guess_came_to_nothing_is_in_service_again(status: OutcomeStatus) -> None:
    fleet = Controller()
    fleet.give(diagnosed(fleet, confidence="medium"))
    fleet.wait(LIMITS.coalesce_s)
    end(fleet, CORDON)
    assert end(fleet, SWAP, status) == [UNCORDON]
    fleet.end()
    assert (fleet.state.hosts["h1"].cordoned, fleet.state.verdicts) == (False, {})
    assert fleet.wait(LIMITS.launcher_grace_s) == []
    if status is FAILED:  # its launcher may have left
        assert RESET in fleet.wait(LIMITS.workload_downtime_threshold_s)


def test_a_host_that_was_swapped_on_a_guess_is_a_spare_again_soon() -> None:
    fleet = swapped(confidence="medium")
    assert fleet.wait(LIMITS.suspicion_s) == [UNCORDON]


# ---------------------------------------------------------------- a spare or a host that comes late


def promise(fleet: Controller) -> None:
    """The spare is to take a place in another job."""
    fleet.give(replace(fleet.state.workloads["train"], workload="other"))
    fleet.give(_host("o1", "other", DeviceState.RUNNING))
    fleet.give(replace(fleet.event(EventType.HOST_HB, "o1"), workload="other"))
    assert fleet.wait(LIMITS.coalesce_s) == [SWAP]


def condemn(fleet: Controller) -> None:
    verdict = Verdict(
        subject="s0", cause="swap failed", evidence=("e",), at=fleet.now, expires_at=fleet.now + 90.0
    )
    fleet.state = fleet.state.with_changes([("verdicts", "host:s0", verdict)])


def spare(**fields: Any) -> HostInfo:
    return replace(_host("s0"), **fields)


Step = Callable[[Controller], object]
#: What keeps the spare from being one at first, and what ends that.
LATE: dict[str, tuple[Step, Step]] = {
    "registers": (lambda fleet: None, lambda fleet: fleet.give(spare())),
    "comes back": (
        lambda fleet: fleet.give(spare(state=DeviceState.FAILED)),
        lambda fleet: fleet.give(spare()),
    ),
    "is uncordoned by a person": (
        lambda fleet: (asks(fleet, Request.CORDON, "s0"), end(fleet, CORDON)),
        lambda fleet: (asks(fleet, Request.UNCORDON, "s0"), end(fleet, UNCORDON)),
    ),
    "is uncordoned with kubectl": (
        lambda fleet: told(fleet, "s0", Change.CORDONED),
        lambda fleet: told(fleet, "s0", Change.UNCORDONED),
    ),
    "is freed by another job": (
        lambda fleet: fleet.give(spare(workload="other", state=DeviceState.RUNNING)),
        lambda fleet: fleet.give(spare()),
    ),
    "is condemned no more": (condemn, lambda fleet: fleet.wait(60.0)),
    "is promised no more": (promise, lambda fleet: end(fleet, SWAP, OutcomeStatus.WITHDRAWN)),
}


@pytest.mark.parametrize("how", LATE)
def test_a_job_that_lacks_a_host_gets_a_spare_as_soon_as_one_can_be_used(how: str) -> None:
    fleet = Controller(spares=int(how != "registers"))
    before, comes = LATE[how]
    before(fleet)
    fleet.give(fleet.event(EventType.HOST_HB))
    assert RESET in fleet.wait(LIMITS.coalesce_s)
    end(fleet, RESET)
    fleet.wait(60.0)
    assert fleet.state.incidents["train"].no_spare == ("h1",)
    already = len(fleet.sent)
    comes(fleet)
    swaps = [one for one in fleet.sent[already:] if one.workload == "train"]
    assert [(one.kind, one.host, one.spare) for one in swaps] == [(SWAP, "h1", "s0")]
    fleet.end()
    fleet.now += 10.0
    fleet.advance(700, attempt=9)
    assert "train" not in fleet.state.incidents


def lacks_a_host(*hosts: str) -> Controller:
    """Hosts are gone, no spare is there, and the last resort was taken a minute ago."""
    fleet = Controller(spares=0)
    for host in hosts:
        fleet.give(fleet.event(EventType.HOST_HB, host))
    assert fleet.wait(LIMITS.coalesce_s) == [RESET]
    fleet.end()
    fleet.wait(60.0)
    return fleet


@pytest.mark.parametrize(
    "unfit",
    [
        spare(workers_per_host=4),
        spare(cordoned=True),
        spare(workload="other"),
        replace(_host("h1", "train"), state=DeviceState.RUNNING),
    ],
)
def test_a_host_that_does_not_fit_or_runs_by_itself_wakes_no_incident(unfit: HostInfo) -> None:
    fleet = lacks_a_host("h1")
    fleet.give(unfit)
    if unfit.id == "h1":  # all launchers meet, and load for a while: the job needs no spare
        fleet.give(spare())
    assert fleet.wait(30.0) == []


@pytest.mark.parametrize("after_s", [60.0, 20_000.0])
def test_a_host_that_is_back_is_used_at_once_also_after_the_job_was_given_up(after_s: float) -> None:
    fleet = lacks_a_host("h1")
    while after_s > 60.0 and "job:train" not in fleet.state.verdicts:
        fleet.stuck()
    fleet.end()
    assert kinds(fleet.give(_host("h1", "train"))) == [RESET]  # it has no budget
    assert "job:train" not in fleet.state.verdicts
    fleet.end()
    assert fleet.give(_host("h1", "train")) == []


def test_a_spare_that_is_lost_each_time_does_not_make_a_job_endless() -> None:
    fleet = lacks_a_host("h1")
    acts = 0
    for number in range(40):
        fleet.now += 3600.0
        new = f"s0.{number}"  # it is started again
        fleet.give(replace(_host(new), name="s0"))
        if "job:train" in fleet.state.verdicts:
            break
        for _ in range(3):
            acts += len(fleet.wait(60.0))
            fleet.end()
        if fleet.state.hosts[new].workload:
            fleet.give(fleet.event(EventType.HOST_HB, new))
    assert "job:train" in fleet.state.verdicts
    assert acts < 40


def test_two_hosts_that_are_lost_get_the_two_spares_that_come_one_after_the_other() -> None:
    fleet = lacks_a_host("h0", "h1")
    fleet.give(_host("s8"))
    fleet.give(_host("s9"))
    fleet.end()
    fleet.wait(LIMITS.coalesce_s)
    assert [(one.kind, one.host, one.spare) for one in fleet.sent[1:]] == [
        (SWAP, "h0", "s8"),
        (SWAP, "h1", "s9"),
    ]


def test_a_host_that_a_person_drained_without_a_spare_is_replaced_when_one_comes() -> None:
    fleet = Controller(spares=0)
    asks(fleet, Request.DRAIN, "h1")
    fleet.give(_host("h1"))
    fleet.end()
    assert fleet.wait(LIMITS.coalesce_s) == [RESET]
    fleet.end()
    fleet.wait(60.0)
    fleet.give(_host("s9"))
    assert (fleet.sent[-1].kind, fleet.sent[-1].host, fleet.sent[-1].spare) == (SWAP, "h1", "s9")


def test_a_late_spare_waits_for_what_a_guard_says_and_no_longer() -> None:
    fleet = lacks_a_host("h1")
    fleet.give(fleet.event(EventType.OPERATOR, "", request=Request.FREEZE))
    assert fleet.give(spare()) == []
    fleet.give(fleet.event(EventType.OPERATOR, "", request=Request.THAW))
    assert fleet.wait(5.0) == [SWAP]


# ---------------------------------------------------------------- spares that were lost before


def test_a_spare_that_is_lost_each_time_is_chosen_once_and_then_only_where_no_other_is_left() -> None:
    fleet = Controller(spares=4)
    took, lost = [], "h1"
    for attempt in range(5):
        fleet.give(fleet.event(EventType.HOST_HB, lost, attempt=attempt))
        assert SWAP in fleet.wait(LIMITS.coalesce_s)
        took.append(fleet.sent[-1].spare)
        fleet.end()
        fleet.give(_host(lost))  # it is back, on its own
        fleet.give(_host(took[-1], "train", DeviceState.RUNNING))
        fleet.now += LIMITS.action_period_s
        fleet.advance(600 + attempt, attempt=attempt + 1)
        fleet.now += 60.0
        lost = took[-1]
    assert took == ["s0", "s1", "s2", "s3", "h1"]


def test_losses_are_forgotten_after_a_day_and_a_host_that_a_person_took_away_has_none() -> None:
    fleet = Controller(spares=2)
    for _ in range(2):  # told again, it is the same loss
        fleet.give(replace(fleet.event(EventType.HOST_HB, "s0"), workload=""))
    fleet.give(_host("s0"))
    asks(fleet, Request.CORDON, "s1")
    fleet.end()
    fleet.give(replace(fleet.event(EventType.ORCHESTRATOR, "s1", change=Change.GONE), workload=""))
    assert [view(fleet).losses(name) for name in ("s0", "s1")] == [1, 0]
    fleet.wait(86_400.0)
    assert fleet.state.losses == {}


# ---------------------------------------------------------------- one owner, one end, tried until it is done


def swapped(**fields: Any) -> Controller:
    """A fleet whose host h1 was blamed, cordoned and replaced, and whose check has said nothing."""
    fleet = Controller(spares=2)
    fleet.give(diagnosed(fleet, **fields))
    assert set(fleet.wait(LIMITS.coalesce_s)) == {CORDON, SWAP}
    fleet.end()
    fleet.now += 5.0
    fleet.advance(600, attempt=1)
    assert kinds(fleet.give(_host("h1"))) == [CHECK]
    fleet.end()
    return fleet


def test_a_cordon_ends_with_its_verdict() -> None:
    fleet = swapped()
    assert fleet.wait(LIMITS.verdict_s - 60.0) == []
    assert fleet.wait(60.0) == [UNCORDON]
    assert not fleet.sent[-1].is_of_person
    fleet.end()
    assert ([host.id for host in view(fleet).spares()], fleet.state.cordons) == (["h1", "s1"], {})


def test_a_lost_host_is_uncordoned_when_it_is_back() -> None:
    fleet = swapped()
    fleet.give(replace(fleet.event(EventType.HOST_HB, "h1"), workload=""))
    fleet.wait(LIMITS.verdict_s - 60.0)
    assert fleet.wait(60.0) == []
    assert kinds(fleet.give(_host("h1"))) == [UNCORDON]


@pytest.mark.parametrize("status", [FAILED, TIMED_OUT, OutcomeStatus.FENCED])
def test_what_came_to_nothing_is_tried_again_with_a_growing_pause(status: OutcomeStatus) -> None:
    fleet = swapped()
    assert kinds(fleet.give(checked(fleet, "h1", "ok"))) == [UNCORDON]
    spare = Controller(spares=2)  # of which no job waits for anything
    spare.give(replace(spare.event(EventType.XID, "s0", code=79), workload=""))
    assert spare.wait(LIMITS.coalesce_s) == [CORDON]
    for plane, kind in ((fleet, UNCORDON), (spare, CORDON)):
        for pause_s in (1.0, 2.0, 4.0):
            for flight in list(plane.state.commands.values()):
                plane.give(Outcome(command=flight.command.id, epoch=9, status=status))
            assert plane.wait(LIMITS.backoff_s * pause_s - 1.0) == []
            assert plane.wait(1.0) == [kind]
            assert not plane.sent[-1].is_of_person
        plane.end()
        assert plane.wait(3600.0) == []
    assert not fleet.state.hosts["h1"].cordoned
    assert spare.state.hosts["s0"].cordoned


def test_in_a_frozen_fleet_and_in_a_shadow_nothing_is_tried_again() -> None:
    fleet = swapped()
    fleet.give(fleet.event(EventType.OPERATOR, "", request=Request.FREEZE))
    assert fleet.wait(2 * LIMITS.verdict_s) == []
    assert kinds(fleet.give(fleet.event(EventType.OPERATOR, "", request=Request.THAW))) == [UNCORDON]
    shadow = Controller(shadow=True)
    shadow.happens(EventType.ECC)
    for _ in range(3):
        shadow.wait(60.0)
    assert sum("cordon_host of h1" in note for note in shadow.notes) == 1


@pytest.mark.parametrize("status", [DONE, FAILED])
@pytest.mark.parametrize("how", [Request.CORDON, Request.DRAIN, None], ids=["cordon", "drain", "kubectl"])
def test_nothing_of_ours_opens_a_host_that_a_person_closed(
    how: Request | None, status: OutcomeStatus
) -> None:
    fleet = swapped()
    if how is None:  # before the answer to ours came
        told(fleet, "h1", Change.CORDONED)
    else:
        asks(fleet, how, "h1")
        fleet.end(status)
    after = fleet.give(checked(fleet, "h1", "ok"))
    if how is not None and status is FAILED:  # it is not theirs
        assert kinds(after) == [UNCORDON]
        return
    fleet.wait(2 * LIMITS.verdict_s)
    assert UNCORDON not in kinds(fleet.sent)
    assert fleet.state.cordons["h1"].by == ("a person" if how else "the orchestrator")
    assert kinds(asks(fleet, Request.UNCORDON, "h1")) == [UNCORDON]
    assert fleet.sent[-1].is_of_person
    fleet.end()
    assert (fleet.state.hosts["h1"].cordoned, fleet.state.cordons, fleet.state.verdicts) == (False, {}, {})


def test_a_person_who_closes_a_host_while_it_is_being_opened_goes_before() -> None:
    fleet = swapped()
    (opens,) = fleet.give(checked(fleet, "h1", "ok"))
    (closes,) = asks(fleet, Request.CORDON, "h1")
    fleet.give(Outcome(command=opens.id, epoch=7, status=OutcomeStatus.WITHDRAWN))
    fleet.give(Outcome(command=closes.id, epoch=7, status=DONE))
    fleet.wait(3600.0)
    assert fleet.state.hosts["h1"].cordoned
    assert kinds(fleet.sent).count(UNCORDON) == 1


def test_the_leaving_of_a_machine_takes_no_cordon_over() -> None:
    fleet = swapped()
    told(fleet, "h1", Change.LEAVING)
    assert fleet.wait(LIMITS.verdict_s) == [UNCORDON]


@pytest.mark.parametrize("first", [True, False], ids=["told before the swap is done", "told after it"])
@pytest.mark.parametrize("status", [DONE, FAILED])
def test_a_host_that_a_swap_has_closed_is_opened_again(status: OutcomeStatus, first: bool) -> None:
    fleet = Controller()
    assert fleet.happens(EventType.HOST_HB) == [SWAP]
    swap = fleet.sent[-1].id
    for step in (first, not first):
        if step:
            told(fleet, "h1", Change.CORDONED, swap)
        else:
            end(fleet, SWAP, status)
    fleet.now += 60.0
    fleet.give(_host("s0" if status is DONE else "h1", "train", DeviceState.RUNNING))
    fleet.give(_host("h1", "" if status is DONE else "train"))
    fleet.advance(600, attempt=2)
    sent = kinds(fleet.sent) + fleet.wait(LIMITS.suspicion_s)
    assert sent.count(UNCORDON) == 1
    end(fleet, UNCORDON)
    assert (fleet.state.hosts["h1"].cordoned, fleet.state.cordons) == (False, {})


@pytest.mark.parametrize("early", [True, False], ids=["told before it registers", "told after it"])
@pytest.mark.parametrize("by_us", [True, False])
def test_a_machine_that_was_started_again_is_as_closed_as_before(early: bool, by_us: bool) -> None:
    fleet = Controller(spares=1)
    if by_us:
        fleet.give(replace(fleet.event(EventType.XID, "s0", code=79), workload=""))
        fleet.wait(LIMITS.coalesce_s)
        end(fleet, CORDON)
    else:
        told(fleet, "s0", Change.CORDONED)
    cause = fleet.sent[-1].id if by_us else ""
    told(fleet, "s0", Change.GONE)
    for tells in (early, not early):
        if tells:
            told(fleet, "s0.2", Change.CORDONED, cause)
        else:
            fleet.give(replace(_host("s0.2"), name="s0"))
    assert view(fleet).spares() == []
    assert fleet.wait(2 * LIMITS.suspicion_s) == ([UNCORDON] if by_us else [])
    fleet.end()
    assert [host.id for host in view(fleet).spares()] == (["s0.2"] if by_us else [])
