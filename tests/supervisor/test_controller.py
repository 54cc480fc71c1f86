# SPDX-License-Identifier: Apache-2.0
"""(state, input, now) -> (state, commands): the ladder, the guards, and what a user's own policy may do."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.control import ControllerCore
from supervisor.decision.controller import BaseController, Input
from supervisor.decision.guards import View
from supervisor.decision.state import State, changes_from_plain, changes_to_plain
from supervisor.decision.turn import EventReport
from supervisor.event_log import EventLog
from supervisor.values import (
    Change,
    CommandKind,
    DeviceState,
    EventType,
    HostInfo,
    LauncherState,
    Outcome,
    OutcomeStatus,
    Progress,
    Request,
    Silence,
)
from tests.supervisor.controllers import LIMITS, Controller, _host

IN_JOB, RESET = CommandKind.IN_JOB_RESET, CommandKind.WORKLOAD_RESET
SWAP, CORDON, STACKS = CommandKind.HOT_SWAP, CommandKind.CORDON_HOST, CommandKind.DUMP_STACKS
DOWN, UP = CommandKind.SCALE_DOWN, CommandKind.SCALE_UP


# ---------------------------------------------------------------- the ladder


def test_a_lost_worker_is_restarted_in_place_while_the_budget_lasts_then_the_job_is() -> None:
    fleet = Controller(max_in_job_restarts=2, max_workload_restarts=1)
    assert fleet.happens(EventType.WORKER_HB, ranks=(1,)) == [IN_JOB]
    assert fleet.stuck() == [IN_JOB]
    assert fleet.stuck() == [RESET]
    assert fleet.stuck() == [RESET]  # the last resort, beyond the budget
    assert fleet.stuck() == [RESET]
    assert fleet.stuck() == []
    verdict = fleet.state.verdicts["job:train"]
    assert verdict.text == "the job cannot progress: 5 actions in a row brought no step"
    assert verdict.evidence[0] == "s:1/0"
    assert verdict.expires_at == fleet.now + LIMITS.verdict_s


def test_a_step_lifts_the_verdict_and_refills_the_budgets() -> None:
    fleet = Controller(max_in_job_restarts=1)
    fleet.happens(EventType.WORKER_HB)
    while "job:train" not in fleet.state.verdicts:
        fleet.stuck()
    fleet.advance(501, attempt=9)
    assert "job:train" not in fleet.state.verdicts
    assert "train" not in fleet.state.incidents
    fleet.advance(600, attempt=9)
    fleet.now += 3600.0
    assert fleet.happens(EventType.WORKER_HB, attempt=9) == [IN_JOB]


def test_a_person_who_thaws_a_given_up_job_has_it_tried_again_at_once() -> None:
    fleet = Controller(max_in_job_restarts=1)
    fleet.happens(EventType.WORKER_HB)
    while "job:train" not in fleet.state.verdicts:
        fleet.stuck()
    fleet.wait(3600.0)
    (reset,) = fleet.give(fleet.event(EventType.OPERATOR, "", request=Request.THAW))
    assert reset.kind is IN_JOB
    assert fleet.state.verdicts == {}
    # A sensor that saw its own evidence end cannot withdraw what the time without a step says.
    assert reset.evidence[-1].startswith("i1/stuck")


def test_a_lost_host_is_swapped_for_a_spare_and_the_view_follows() -> None:
    fleet = Controller(spares=2)
    assert fleet.happens(EventType.HOST_HB) == [SWAP]
    assert (fleet.sent[0].host, fleet.sent[0].spare, fleet.sent[0].epoch) == ("h1", "s0", 7)
    fleet.end()
    assert fleet.state.hosts["s0"].workload == "train"
    assert fleet.state.hosts["h1"].workload == ""
    fleet.now += 10.0
    fleet.advance(501, attempt=1)
    assert fleet.state.incidents == {}


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"workers_per_host": 4}, "4 workers per host instead of 1 (1)"),
        ({"zone": "z2"}, "zone z2 instead of z1 (1)"),
    ],
)
def test_a_spare_that_does_not_fit_is_none_and_the_next_rung_is_taken(
    other: dict[str, object], why: str
) -> None:
    fleet = Controller(spares=0, scaling=True, max_replicas=3)
    for name in ("h0", "h1"):
        fleet.give(replace(fleet.state.hosts[name], zone="z1"))
    fleet.give(replace(_host("s0"), **{"zone": "z1", **other}))
    fleet.now += LIMITS.scale_up_hold_s
    assert fleet.give(fleet.event(EventType.SCALE_UP, "")) == []
    assert "scale_up refused by above_spare_floor: 0 spares less 1" in fleet.notes[-1]
    assert fleet.happens(EventType.HOST_HB) == [DOWN]
    assert f"incident i2: hot swap: no spare fits: {why}" in fleet.notes


def test_hosts_of_which_nothing_but_the_zone_is_known_have_no_cap_of_cordons_in_it() -> None:
    fleet = Controller(spares=4, max_in_job_restarts=5)
    for number in range(4):
        name = f"s{number}"
        fleet.give(replace(fleet.state.hosts[name], zone="z1"))
        fleet.give(replace(fleet.event(EventType.ECC, name), workload=""))
        fleet.wait(LIMITS.coalesce_s)
    assert [command.host for command in fleet.sent] == ["s0", "s1", "s2", "s3"]


def test_without_a_spare_the_job_shrinks_where_it_may_and_is_reset_where_not() -> None:
    shrinks = Controller(spares=0, scaling=True, max_replicas=2)
    assert shrinks.happens(EventType.HOST_HB) == [DOWN]
    assert shrinks.sent[0].replicas == 1
    shrinks.end()
    assert shrinks.state.workloads["train"].replicas == 1
    assert Controller(spares=0).happens(EventType.HOST_HB) == [RESET]


def test_a_host_that_the_orchestrator_has_replaced_is_waited_for_then_the_job_is_reset() -> None:
    fleet = Controller(spares=2, scaling=True, max_replicas=2)
    fleet.give(fleet.event(EventType.HOST_HB))
    fleet.give(_host("s0", "train"))  # a JobSet has made the pod again there
    assert fleet.wait(LIMITS.coalesce_s) == []
    fleet.now += 10.0
    fleet.advance(501, attempt=1)
    assert fleet.state.incidents == {}
    # The lost host is no more of the job, which would else seem to have all its hosts.
    fleet.give(_host("s1", "train"))
    fleet.give(fleet.event(EventType.HOST_HB, host="s0", attempt=1))
    assert fleet.wait(LIMITS.coalesce_s) == []
    assert fleet.wait(LIMITS.workload_downtime_threshold_s - LIMITS.coalesce_s) == [RESET]


def test_one_that_is_cordoned_replaces_no_host() -> None:
    fleet = Controller(spares=2)
    fleet.give(fleet.event(EventType.HOST_HB))
    fleet.give(_host("s0", "train"))
    fleet.give(fleet.event(EventType.ORCHESTRATOR, "s0", change=Change.CORDONED))
    assert fleet.wait(LIMITS.coalesce_s) == [SWAP]
    assert fleet.sent[0].spare == "s1"


def test_a_host_that_came_back_before_the_decision_is_used_again() -> None:
    fleet = Controller(max_in_job_restarts=1)
    fleet.give(fleet.event(EventType.HOST_HB))
    fleet.give(_host("h1", "train", DeviceState.RUNNING))
    assert fleet.wait(LIMITS.coalesce_s) == [IN_JOB]


def test_a_reset_in_place_is_not_waited_for_once_a_host_of_the_job_is_lost() -> None:
    fleet = Controller(max_in_job_restarts=3)
    # The ranks of the host that stays fail at once; that the other one is silent is seen later.
    assert fleet.happens(EventType.WORKER_HB, "h0") == [IN_JOB]
    (reset,) = fleet.sent
    fleet.wait(LIMITS.heartbeat_timeout_s)
    assert fleet.happens(EventType.HOST_HB, "h1") == [SWAP]
    swap = fleet.sent[-1]
    assert (swap.host, swap.spare, list(fleet.state.commands)) == ("h1", "s0", [swap.id])
    # It has restarted nothing, so it costs nothing.
    assert fleet.state.accounts["train"].in_job.spent == 0
    # Its outcome comes when the launchers have met on the spare; it changes nothing any more.
    late = Outcome(command=reset.id, epoch=7, status=OutcomeStatus.DONE)
    assert fleet.give(late) == []
    assert list(fleet.state.commands) == [swap.id]
    fleet.end()
    fleet.wait(1.0)
    fleet.advance(501, attempt=1)
    assert fleet.state.incidents == {}


def test_two_hosts_lost_together_are_one_incident_and_two_swaps_one_after_the_other() -> None:
    fleet = Controller(spares=2)
    fleet.give(fleet.event(EventType.HOST_HB, "h0"))
    assert fleet.happens(EventType.HOST_HB, "h1") == [SWAP]
    assert fleet.end() == []
    assert fleet.wait(LIMITS.coalesce_s) == [SWAP]
    assert [command.host for command in fleet.sent] == ["h0", "h1"]
    assert {command.incident for command in fleet.sent} == {"i1"}


def test_a_hang_takes_stacks_first_and_the_same_host_twice_is_a_failed_host() -> None:
    fleet = Controller(max_in_job_restarts=3)
    assert fleet.happens(EventType.HANG, ranks=(1,)) == [STACKS, IN_JOB]
    fleet.end()
    fleet.advance(501, attempt=1)
    fleet.now += 60.0
    assert fleet.happens(EventType.HANG, ranks=(1,), attempt=1) == [STACKS, SWAP]


def test_a_hang_that_goes_on_is_no_second_hang() -> None:
    fleet = Controller(max_in_job_restarts=3)
    fleet.happens(EventType.HANG, ranks=(1,))
    assert fleet.stuck() == [STACKS, IN_JOB]


@pytest.mark.parametrize(
    ("codes", "kinds", "cordoned"),
    [
        ((31,), [], False),
        ((999,), [], False),
        ((63,), [], False),
        ((79,), [CORDON, SWAP], True),
        ((48,), [CORDON, SWAP], True),
        ((95,), [RESET], False),
    ],
)
def test_an_xid_is_treated_by_what_it_means(
    codes: tuple[int, ...], kinds: list[CommandKind], cordoned: bool
) -> None:
    fleet = Controller(max_workload_restarts=1)
    assert fleet.happens(EventType.XID, code=codes[0]) == kinds
    fleet.end()
    assert fleet.state.hosts["h1"].cordoned is cordoned


def test_an_applications_xid_beside_a_nodes_does_not_take_the_wrong_host() -> None:
    fleet = Controller(spares=2)
    fleet.give(fleet.event(EventType.XID, "h0", code=31))
    assert fleet.happens(EventType.XID, "h1", code=79) == [CORDON, SWAP]
    assert {command.host for command in fleet.sent} == {"h1"}


def test_application_xids_of_one_gpu_under_several_jobs_make_the_host_suspect() -> None:
    fleet = Controller(max_in_job_restarts=5)
    for workload in ("train", "train", "other"):
        fleet.give(replace(fleet.event(EventType.XID, code=31), workload=workload))
    assert fleet.state.verdicts["host:h1"].cause == "repeated xid"
    assert fleet.happens(EventType.WORKER_HB) == [SWAP]


def test_application_xids_are_counted_for_each_gpu_of_a_report() -> None:
    fleet = Controller(max_in_job_restarts=5)
    for workload in ("train", "train", "other"):
        event = fleet.event(EventType.XID, code=31)
        (first,) = event.evidence
        others = (
            replace(first, id=f"{first.id}b", device="gpu1"),
            replace(first, id=f"{first.id}c", device="gpu2", code=43),  # one that is only logged
        )
        # The first GPU has an error of one job only.
        evidence = (first, *others) if workload == "train" else others
        fleet.give(replace(event, workload=workload, evidence=evidence))
    assert {key: one.count for key, one in fleet.state.suspicions.items()} == {"h1/gpu0": 2, "h1/gpu1": 3}
    assert fleet.state.verdicts["host:h1"].evidence == tuple(f"s:{n}/0b" for n in (1, 2, 3))


def test_findings_that_a_new_sensor_tells_again_in_another_grouping_count_once() -> None:
    fleet = Controller(max_in_job_restarts=5)
    first, second, third = (fleet.event(EventType.XID, code=31) for _ in range(3))
    fleet.give(first)
    fleet.give(replace(second, workload="other"))
    both = replace(first, id="s2:1", evidence=first.evidence + second.evidence)
    fleet.give(both)
    assert [one.count for one in fleet.state.suspicions.values()] == [2]
    assert "s2:1" not in fleet.state.seen
    # What is new beside them counts.
    fleet.give(replace(third, id="s2:2", evidence=both.evidence + third.evidence))
    assert fleet.state.verdicts["host:h1"].cause == "repeated xid"


def test_a_fault_of_a_spare_is_cordoned_and_no_job_is_touched() -> None:
    fleet = Controller()
    fleet.give(replace(fleet.event(EventType.ECC, "s0"), workload=""))
    assert fleet.wait(LIMITS.coalesce_s) == [CORDON]
    fleet.end()
    assert fleet.state.incidents == {}
    assert fleet.happens(EventType.HOST_HB) == [RESET]  # a cordoned host is no spare


def test_a_host_that_was_swapped_out_is_no_longer_its_jobs_affair() -> None:
    fleet = Controller(max_workload_restarts=5)
    fleet.happens(EventType.HOST_HB)
    fleet.end()
    fleet.now += 10.0
    fleet.advance(501, attempt=1)
    fleet.now += 60.0
    assert fleet.happens(EventType.ECC) == [CORDON]
    assert fleet.state.incidents == {}


def test_a_job_grows_when_it_is_quiet_and_enough_spares_stay() -> None:
    fleet = Controller(spares=1, scaling=True, max_replicas=3)
    fleet.now += LIMITS.scale_up_hold_s
    assert [command.kind for command in fleet.give(fleet.event(EventType.SCALE_UP, ""))] == []
    assert "would leave fewer than the floor" in fleet.notes[-1]
    fleet.give(_host("s1"))
    assert [command.kind for command in fleet.give(fleet.event(EventType.SCALE_UP, ""))] == [UP]
    fleet.end()
    assert fleet.state.workloads["train"].replicas == 3
    assert fleet.state.incidents == {}


@pytest.mark.parametrize("kind", [EventType.WORKER_HB, EventType.HOST_HB])
def test_what_happens_while_a_job_grows_is_not_forgotten_with_its_growth(kind: EventType) -> None:
    fleet = Controller(spares=3, scaling=True, max_replicas=3)
    fleet.now += LIMITS.scale_up_hold_s
    assert [command.kind for command in fleet.give(fleet.event(EventType.SCALE_UP, ""))] == [UP]
    fleet.give(fleet.event(kind))
    # Ranks were restarted with the others; the host is still lost.
    lost = kind is EventType.HOST_HB
    assert fleet.end() + fleet.wait(LIMITS.coalesce_s) == [SWAP] * lost
    assert ("train" in fleet.state.incidents) == lost


def test_a_lost_daemon_and_changes_of_a_node_move_no_job() -> None:
    fleet = Controller()
    assert fleet.happens(EventType.DAEMON_LOST) == []
    assert "training is not touched" in fleet.notes[-1]
    fleet.give(fleet.event(EventType.ORCHESTRATOR, "s0", change=Change.LEAVING))
    assert fleet.state.hosts["s0"].cordoned
    fleet.give(fleet.event(EventType.ORCHESTRATOR, "s0", change=Change.UNCORDONED))
    assert not fleet.state.hosts["s0"].cordoned
    fleet.give(_host("s0"))
    assert fleet.happens(EventType.ORCHESTRATOR, "h1", change=Change.GONE) == [SWAP]


# ---------------------------------------------------------------- guards


def test_one_incident_is_one_action_however_many_reports_it_makes() -> None:
    fleet = Controller(max_in_job_restarts=5)
    first = fleet.event(EventType.WORKER_HB, ranks=(1,))
    for report in (first, first, fleet.event(EventType.WORKER_HB, "h0", ranks=(0,)), first):
        fleet.give(report)
    assert fleet.wait(LIMITS.coalesce_s) == [IN_JOB]
    fleet.give(fleet.event(EventType.HANG, ranks=(0,)))
    assert fleet.wait(60.0) == []
    assert len(fleet.sent) == 1


def test_a_job_that_advances_is_not_restarted_and_the_incident_ends() -> None:
    fleet = Controller(max_in_job_restarts=5)
    fleet.give(fleet.event(EventType.WORKER_HB))
    fleet.advance(501)
    assert fleet.wait(LIMITS.coalesce_s) == []
    assert fleet.state.incidents["train"].note == "step 501 was finished 2.0 s ago"
    fleet.now += 2.5
    fleet.advance(502)
    assert fleet.state.incidents == {}


def test_a_confirmed_loss_does_not_wait_until_the_last_step_is_old() -> None:
    fleet = Controller()
    fleet.advance(501)
    assert fleet.happens(EventType.HOST_HB) == [SWAP]  # the step is `coalesce_s` old, and not `advancing_s`
    for steps_go_on in (False, True):
        fleet = Controller()
        fleet.advance(501)
        event = fleet.event(EventType.HOST_HB)
        # Nobody has seen that it is gone; or somebody has, and the job goes on.
        silence = replace(event, evidence=(replace(event.evidence[0], witness="stream"),))
        fleet.give(event if steps_go_on else silence)
        fleet.now += 0.5
        if steps_go_on:
            fleet.advance(502)
        assert fleet.wait(LIMITS.coalesce_s) == []
        assert "was finished" in fleet.state.incidents["train"].note
        assert fleet.wait(LIMITS.advancing_s) == [SWAP]


def test_a_launcher_that_gave_up_is_not_waited_for_until_the_last_step_is_old() -> None:
    fleet = Controller(max_workload_restarts=1)
    fleet.advance(501)
    assert fleet.happens(EventType.WORKER_HB, launcher=LauncherState.GAVE_UP) == [RESET]
    fleet = Controller(max_workload_restarts=1)
    fleet.give(fleet.event(EventType.WORKER_HB, launcher=LauncherState.GAVE_UP))
    fleet.now += 0.5
    fleet.advance(501)  # the others go on without it
    assert fleet.wait(LIMITS.coalesce_s) == []


@pytest.mark.parametrize(("attempt", "closed"), [(3, False), (4, True)])
def test_the_first_step_of_another_attempt_ends_an_incident_at_once_and_a_late_one_of_the_same_does_not(
    attempt: int, closed: bool
) -> None:
    fleet = Controller(max_in_job_restarts=5)
    fleet.advance(501, attempt=3)
    fleet.give(fleet.event(EventType.WORKER_HB, attempt=3, launcher=LauncherState.RESTARTING))
    fleet.now += 1.0
    fleet.advance(502, attempt=attempt)
    assert (fleet.state.incidents == {}) == closed


def test_a_host_that_is_back_does_not_make_its_job_be_restarted_while_it_advances() -> None:
    fleet = Controller(max_in_job_restarts=1)
    fleet.advance(501)
    fleet.give(fleet.event(EventType.HOST_HB))
    fleet.give(_host("h1", "train", DeviceState.RUNNING))
    assert fleet.wait(LIMITS.coalesce_s) == []
    assert fleet.wait(LIMITS.advancing_s) == [IN_JOB]


@pytest.mark.parametrize("order", [1, -1], ids=["in order", "messages cross"])
def test_the_launcher_comes_first_for_a_while(order: int) -> None:
    """It reports the failure first, while it still watches, and a moment later that it restarts the ranks."""
    fleet = Controller(max_in_job_restarts=5)
    said = [
        fleet.event(EventType.WORKER_HB, host, launcher=state, ranks=ranks)
        for state, ranks in ((LauncherState.RUNNING, (1,)), (LauncherState.RESTARTING, ()))
        for host in ("h0", "h1")
    ]
    for event in said[::order]:
        fleet.give(event)
        fleet.now += 0.1
    for _ in range(int(LIMITS.launcher_grace_s) - 1):
        assert fleet.wait(1.0) == []
    assert fleet.wait(1.0) == [IN_JOB]


def test_a_launcher_that_stops_its_ranks_slowly_is_left_to_it_and_costs_no_budget() -> None:
    fleet = Controller(max_in_job_restarts=1)
    for state in (LauncherState.RUNNING, LauncherState.RESTARTING):
        fleet.give(fleet.event(EventType.WORKER_HB, launcher=state))
        fleet.now += 0.1
    for _ in range(int(LIMITS.launcher_grace_s / 2)):
        assert fleet.wait(1.0) == []
    fleet.advance(501, attempt=1)
    assert (fleet.state.incidents, fleet.sent) == ({}, [])


def test_a_launcher_of_another_host_that_does_nothing_does_not_come_first() -> None:
    fleet = Controller(max_in_job_restarts=1)
    fleet.give(fleet.event(EventType.WORKER_HB, "h0", launcher=LauncherState.RESTARTING))
    assert fleet.happens(EventType.WORKER_HB, "h1", launcher=LauncherState.RUNNING) == [IN_JOB]


def test_a_silence_has_had_its_echoes_when_it_is_noticed() -> None:
    fleet = Controller(max_in_job_restarts=5)
    event = fleet.event(EventType.WORKER_HB)
    old = replace(event, evidence=(replace(event.evidence[0], age_s=LIMITS.heartbeat_timeout_s),))
    fleet.give(old)
    assert fleet.wait(LIMITS.tick_s) == [IN_JOB]


def test_a_step_of_before_a_loss_that_a_stopped_controller_reads_late_does_not_end_the_incident() -> None:
    fleet = Controller(spares=2)
    fleet.give(fleet.event(EventType.HOST_HB))
    fleet.now += 20.0  # stopped
    fleet.advance(501)
    fleet.advance(502)
    assert "train" in fleet.state.incidents
    assert fleet.wait(LIMITS.advancing_s) == [SWAP]


def test_a_job_that_goes_on_while_the_controller_is_stopped_ends_its_incident_after_a_moment() -> None:
    fleet = Controller(spares=2)
    fleet.give(fleet.event(EventType.HOST_HB))
    fleet.now += 20.0  # stopped
    for step in range(501, 507):
        fleet.advance(step)
        fleet.now += 1.0
    assert (fleet.sent, fleet.state.incidents) == ([], {})


def test_a_launcher_that_gave_up_is_not_asked_to_restart_its_ranks() -> None:
    fleet = Controller(max_in_job_restarts=5, max_workload_restarts=1)
    assert fleet.happens(EventType.WORKER_HB, launcher=LauncherState.GAVE_UP) == [RESET]
    assert "in_job_reset refused by launcher_is_there: the launcher of h1 gave up" in fleet.notes[-2]


GAVE_UP = {"launcher": LauncherState.GAVE_UP}


def test_a_host_is_lost_and_other_launchers_gave_up_so_all_start_again_with_the_spare() -> None:
    fleet = Controller()  # without any budget
    fleet.give(fleet.event(EventType.HOST_HB))
    fleet.give(fleet.event(EventType.WORKER_HB, "h0", launcher=LauncherState.RUNNING, ranks=(0,)))
    assert fleet.happens(EventType.WORKER_HB, "h0", **GAVE_UP) == [RESET]
    (reset,) = fleet.sent
    assert (reset.host, reset.spare) == ("h1", "s0")
    fleet.end()
    assert [fleet.state.hosts[name].workload for name in ("h0", "h1", "s0")] == ["train", "", "train"]
    # The second host that is lost finds launchers that wait for its replacement.
    assert fleet.happens(EventType.WORKER_HB, "h0", **GAVE_UP) == []
    fleet.advance(1, attempt=10**6)
    assert fleet.state.incidents == {}


@pytest.mark.parametrize("said", [False, True], ids=["at once", "after its daemon spoke"])
def test_a_spare_that_is_lost_before_its_launcher_was_heard_of_is_swapped_like_any_host(said: bool) -> None:
    """To the sensor it is a spare still: it names no job for it."""
    fleet = Controller(spares=2)
    assert fleet.happens(EventType.HOST_HB) == [SWAP]
    fleet.end()
    spare = replace(fleet.state.hosts["s0"], workload="")
    if said:
        fleet.give(spare)
    fleet.give(replace(spare, state=DeviceState.FAILED))
    lost = replace(fleet.event(EventType.HOST_HB, "s0"), workload="", run="")
    fleet.give(lost)
    assert fleet.wait(LIMITS.coalesce_s) == [SWAP]
    assert (fleet.sent[-1].host, fleet.sent[-1].spare) == ("s0", "s1")


def test_a_spare_that_got_a_job_and_lost_it_is_a_spare_again() -> None:
    fleet = Controller(spares=1)
    assert fleet.happens(EventType.HOST_HB) == [SWAP]
    fleet.end()
    fleet.give(replace(fleet.state.hosts["s0"], workload=""))
    assert fleet.state.hosts["s0"].workload == "train"
    fleet.now += 1.0
    fleet.advance(1, attempt=10**6)
    fleet.give(replace(fleet.state.hosts["s0"], workload=""))
    assert fleet.state.hosts["s0"].workload == ""


def test_without_a_spare_launchers_that_gave_up_beside_a_lost_host_start_again_all_the_same() -> None:
    fleet = Controller(spares=0)
    fleet.give(fleet.event(EventType.WORKER_HB, "h0", **GAVE_UP))
    assert fleet.happens(EventType.HOST_HB) == [RESET]
    assert fleet.sent[0].spare == ""


def test_two_hosts_are_lost_and_launchers_gave_up_so_all_start_again_and_then_one_is_swapped() -> None:
    fleet = Controller(spares=2)
    fleet.give(replace(fleet.state.workloads["train"], replicas=3))
    fleet.give(_host("h2", "train", DeviceState.RUNNING))
    fleet.give(fleet.event(EventType.HOST_HB, "h1"))
    fleet.give(fleet.event(EventType.HOST_HB, "h2"))
    assert fleet.happens(EventType.WORKER_HB, "h0", **GAVE_UP) == [RESET]
    fleet.end()
    assert fleet.wait(LIMITS.coalesce_s) == [SWAP]
    assert [(one.host, one.spare) for one in fleet.sent] == [("h1", "s0"), ("h2", "s1")]


@pytest.mark.parametrize("ended", [True, False], ids=["after the swap", "during the swap"])
def test_launchers_that_give_up_beside_a_swap_are_no_echo_of_it(ended: bool) -> None:
    fleet = Controller(spares=2, max_workload_restarts=1)
    assert fleet.happens(EventType.HOST_HB) == [SWAP]
    if ended:
        fleet.end()
    fleet.give(fleet.event(EventType.WORKER_HB, "h0", launcher=LauncherState.RUNNING, ranks=(0,)))
    kinds = fleet.happens(EventType.WORKER_HB, "h0", **GAVE_UP)
    if not ended:
        kinds += fleet.end() + fleet.wait(LIMITS.coalesce_s)
    assert kinds == [RESET]
    # Those that it ended are.
    fleet.end()
    assert fleet.happens(EventType.WORKER_HB, "h0", **GAVE_UP) == []


def test_the_launcher_of_the_host_that_was_swapped_out_may_give_up() -> None:
    fleet = Controller(spares=2)
    assert fleet.happens(EventType.ECC) == [CORDON, SWAP]
    assert fleet.happens(EventType.WORKER_HB, "h1", **GAVE_UP) == []
    assert fleet.end() + fleet.wait(LIMITS.coalesce_s) == []


def test_a_reset_in_place_is_not_waited_for_once_a_launcher_gave_up() -> None:
    fleet = Controller(max_in_job_restarts=1, max_workload_restarts=1)
    assert fleet.happens(EventType.WORKER_HB) == [IN_JOB]
    assert fleet.happens(EventType.WORKER_HB, "h0", **GAVE_UP) == [RESET]
    assert "in_job_reset c1 is not waited for: the launcher of h0 gave up" in fleet.notes
    assert fleet.state.accounts["train"].in_job.spent == 0


def test_fruitless_actions_wait_longer_each_time() -> None:
    fleet = Controller(max_in_job_restarts=5)
    fleet.happens(EventType.WORKER_HB)
    waits = []
    for _ in range(3):
        began = fleet.now
        kinds = fleet.end(OutcomeStatus.FAILED)
        while not kinds:
            kinds = fleet.wait(1.0)
        waits.append(fleet.now - began)
    assert waits == [15.0, 30.0, 60.0]


def test_cordons_have_a_cap_and_uncordoning_gives_it_back() -> None:
    fleet = Controller(spares=LIMITS.max_cordons + 1)
    for number in range(LIMITS.max_cordons + 1):
        fleet.give(replace(fleet.event(EventType.ECC, f"s{number}"), workload=""))
        fleet.wait(LIMITS.coalesce_s)
        fleet.end()
    assert [command.host for command in fleet.sent] == [f"s{n}" for n in range(LIMITS.max_cordons)]
    asked = replace(fleet.event(EventType.OPERATOR, "s0", request=Request.UNCORDON), workload="")
    assert [command.kind for command in fleet.give(asked)] == [CommandKind.UNCORDON_HOST]
    fleet.end()
    assert "s0" not in fleet.state.cordons
    assert "host:s0" not in fleet.state.verdicts


@pytest.mark.parametrize("frozen", [Silence(frozen=True, silent=9, hosts=10), Request.FREEZE])
def test_a_frozen_fleet_does_nothing_until_it_thaws(frozen: Silence | Request) -> None:
    fleet = Controller(max_in_job_restarts=5)
    if isinstance(frozen, Silence):
        fleet.give(frozen)
    else:
        fleet.give(fleet.event(EventType.OPERATOR, "", request=Request.FREEZE))
    assert fleet.happens(EventType.WORKER_HB) == []
    assert fleet.wait(3600.0) == []
    if isinstance(frozen, Silence):
        fleet.give(replace(frozen, frozen=False))
    else:
        fleet.give(fleet.event(EventType.OPERATOR, "", request=Request.THAW))
    assert fleet.wait(5.0) == [IN_JOB]


def test_a_withdrawn_command_gives_the_budget_back_and_waits_for_a_step() -> None:
    fleet = Controller(max_in_job_restarts=1)
    fleet.happens(EventType.WORKER_HB)
    assert fleet.end(OutcomeStatus.WITHDRAWN) == []
    assert fleet.state.accounts["train"].in_job.spent == 0
    assert fleet.wait(LIMITS.workload_downtime_threshold_s) == [IN_JOB]
    # What it is for now is the time without a step, which no sensor can withdraw.
    assert fleet.sent[-1].evidence == ("s:1/0", "i1/stuck1")


def test_a_swap_that_failed_by_its_spare_takes_another_spare() -> None:
    fleet = Controller(spares=2)
    fleet.happens(EventType.HOST_HB)
    (swap,) = fleet.sent
    fleet.give(Outcome(command=swap.id, epoch=7, status=OutcomeStatus.FAILED, spare=swap.spare))
    fleet.wait(LIMITS.backoff_s)
    assert [command.spare for command in fleet.sent] == ["s0", "s1"]
    assert "host:s0" in fleet.state.verdicts


@pytest.mark.parametrize("status", [OutcomeStatus.TIMED_OUT, OutcomeStatus.FAILED])
def test_a_swap_that_failed_by_no_spare_condemns_none_and_gives_way_to_the_next_rung(
    status: OutcomeStatus,
) -> None:
    fleet = Controller(spares=3)
    assert fleet.happens(EventType.HOST_HB) == [SWAP]
    fleet.end(status)
    fleet.wait(LIMITS.backoff_s)
    assert [command.kind for command in fleet.sent] == [SWAP, RESET]
    assert fleet.state.verdicts == {}
    # Another incident may swap again.
    fleet.end()
    fleet.now += 10.0
    fleet.advance(501, attempt=1)
    fleet.now += LIMITS.action_period_s
    assert fleet.happens(EventType.HOST_HB, "h0") == [SWAP]


def test_a_second_loss_beside_a_swap_that_failed_is_swapped() -> None:
    fleet = Controller(spares=2, max_workload_restarts=2)
    assert fleet.happens(EventType.HOST_HB) == [SWAP]
    fleet.end(OutcomeStatus.TIMED_OUT)
    assert fleet.wait(LIMITS.backoff_s) == [RESET]
    fleet.end()
    assert fleet.happens(EventType.HOST_HB, "h0") == [SWAP]
    assert fleet.sent[-1].host == "h0"


def test_a_swap_that_fails_by_no_fault_of_its_spare_gives_way_to_a_whole_start_with_the_spare() -> None:
    fleet = Controller(spares=1, scaling=True, max_replicas=2)  # without a budget of restarts
    assert fleet.happens(EventType.HOST_HB) == [SWAP]
    fleet.end(OutcomeStatus.FAILED)
    assert fleet.wait(LIMITS.backoff_s) == [RESET]
    assert (fleet.sent[-1].host, fleet.sent[-1].spare) == ("h1", "s0")


def test_a_rank_of_the_attempt_that_an_action_began_may_fail_before_the_outcome_is_told() -> None:
    fleet = Controller(max_in_job_restarts=5)
    assert fleet.happens(EventType.WORKER_HB) == [IN_JOB]
    fleet.give(fleet.event(EventType.WORKER_HB, "h0"))
    fleet.give(fleet.event(EventType.WORKER_HB, "h0", attempt=1))
    fleet.end()
    assert [each.attempt for each in fleet.state.incidents["train"].reports] == [1]
    fleet.now += LIMITS.action_period_s
    assert fleet.wait(LIMITS.coalesce_s) == [IN_JOB]


def test_the_host_that_took_the_place_is_booked_and_not_the_spare_that_was_named() -> None:
    fleet = Controller(spares=2)
    fleet.happens(EventType.HOST_HB)
    (swap,) = fleet.sent
    assert swap.spare == "s0"
    fleet.give(Outcome(command=swap.id, epoch=7, status=OutcomeStatus.DONE, spare="s1"))
    assert [fleet.state.hosts[name].workload for name in ("h1", "s0", "s1")] == ["", "", "train"]
    # The spare that is left is known as one at the next loss.
    fleet.now += 10.0
    fleet.advance(501, attempt=1)
    fleet.now += LIMITS.action_period_s
    assert fleet.happens(EventType.HOST_HB, "h0") == [SWAP]
    assert fleet.sent[-1].spare == "s0"


def test_where_nobody_says_who_took_the_place_no_spare_is_booked() -> None:
    fleet = Controller(spares=2)
    fleet.happens(EventType.HOST_HB)
    fleet.give(Outcome(command=fleet.sent[0].id, epoch=7, status=OutcomeStatus.DONE))
    assert [fleet.state.hosts[name].workload for name in ("h1", "s0", "s1")] == ["", "", ""]


def test_a_report_of_ranks_that_were_replaced_since_is_dropped() -> None:
    fleet = Controller(max_in_job_restarts=1)
    fleet.advance(500, attempt=3)
    fleet.now += 60.0
    assert fleet.happens(EventType.WORKER_HB, attempt=2) == []
    assert fleet.state.incidents == {}


def test_a_withdrawn_command_does_not_forget_the_host_that_is_lost() -> None:
    # A step that was read late spoke for a job that advances; then the ranks of the other hosts fail.
    fleet = Controller(max_in_job_restarts=5)
    assert fleet.happens(EventType.HOST_HB) == [SWAP]
    fleet.end(OutcomeStatus.WITHDRAWN)
    fleet.happens(EventType.WORKER_HB, "h0", ranks=(0,))
    fleet.wait(LIMITS.backoff_s)
    assert [command.kind for command in fleet.sent] == [SWAP, SWAP]


def test_a_withdrawn_restart_in_place_does_not_forget_the_rank_that_is_lost() -> None:
    fleet = Controller(max_in_job_restarts=5)
    fleet.give(_host("h1", "train", DeviceState.FAILED))
    assert fleet.happens(EventType.WORKER_HB) == [IN_JOB]
    fleet.end(OutcomeStatus.WITHDRAWN)
    assert fleet.wait(LIMITS.backoff_s) == [IN_JOB]


def test_a_job_that_advances_without_a_lost_host_is_left_alone() -> None:
    fleet = Controller(max_in_job_restarts=5)
    assert fleet.happens(EventType.HOST_HB) == [SWAP]
    fleet.end(OutcomeStatus.WITHDRAWN)
    for step in range(1000, 1015):
        fleet.advance(step)
        assert fleet.wait(1.0) == []
    assert fleet.state.incidents == {}


def test_ranks_that_an_action_has_ended_are_an_echo_and_spend_nothing() -> None:
    fleet = Controller(max_in_job_restarts=1)
    assert fleet.happens(EventType.HOST_HB) == [SWAP]
    fleet.end()
    assert fleet.happens(EventType.WORKER_HB, "h0", ranks=(0,)) == []
    assert fleet.notes[-1] == "incident i1: worker_hb of h0 is an echo"
    assert fleet.state.accounts["train"].in_job.spent == 0
    # Ranks that the action started are another matter.
    fleet.now += LIMITS.backoff_s
    assert fleet.happens(EventType.WORKER_HB, "h0", ranks=(0,), attempt=1) == [IN_JOB]


def test_a_time_without_a_step_is_no_news_to_an_incident_that_waits_for_one() -> None:
    fleet = Controller(max_in_job_restarts=5)
    assert fleet.happens(EventType.HANG) == [STACKS, IN_JOB]
    fleet.end()
    fleet.now += LIMITS.workload_downtime_threshold_s / 2
    assert fleet.happens(EventType.NO_PROGRESS, "", attempt=1) == []
    assert fleet.wait(LIMITS.workload_downtime_threshold_s / 2) == [STACKS, IN_JOB]


def test_an_echo_is_one_for_a_while_only_and_none_of_an_action_that_was_withdrawn() -> None:
    fleet = Controller(max_in_job_restarts=5)
    fleet.happens(EventType.HOST_HB)
    fleet.end()
    fleet.now += LIMITS.launcher_grace_s
    assert fleet.happens(EventType.WORKER_HB, "h0") == [IN_JOB]
    fleet = Controller(max_in_job_restarts=5)
    fleet.happens(EventType.WORKER_HB)
    fleet.end(OutcomeStatus.WITHDRAWN)
    fleet.now += LIMITS.backoff_s
    assert fleet.happens(EventType.WORKER_HB) == [IN_JOB]


def test_a_host_that_was_replaced_is_no_reason_to_shrink() -> None:
    fleet = Controller(spares=2, scaling=True, max_replicas=2)
    assert fleet.happens(EventType.HOST_HB) == [SWAP]
    assert fleet.stuck() == [RESET]


def test_a_drained_host_is_replaced_although_its_launcher_left_in_order() -> None:
    fleet = Controller()
    (drain,) = fleet.give(fleet.event(EventType.OPERATOR, "h1", request=Request.DRAIN))
    assert (drain.kind, drain.workload) == (CommandKind.DRAIN_HOST, "train")
    fleet.give(_host("h1"))  # its launcher has said that it ends
    fleet.end()
    assert fleet.wait(LIMITS.coalesce_s) == [SWAP]
    assert (fleet.sent[-1].host, fleet.sent[-1].spare) == ("h1", "s0")
    spare = Controller()
    (drain,) = spare.give(spare.event(EventType.OPERATOR, "s0", request=Request.DRAIN))
    assert drain.workload == ""
    spare.end()
    assert spare.state.incidents == {}


# ---------------------------------------------------------------- hosts that are gone for good


def test_a_lost_host_is_forgotten_once_its_name_has_another_id_and_nothing_holds_it() -> None:
    fleet = Controller()
    fleet.happens(EventType.HOST_HB)
    again = replace(_host("h1"), id="h1.2")
    fleet.give(again)
    fleet.end()
    assert set(fleet.state.hosts) == {"h0", "h1", "h1.2", "s0"}  # its incident is open
    fleet.now += 10.0
    fleet.advance(501, attempt=1)
    assert set(fleet.state.hosts) == {"h0", "h1.2", "s0"}
    assert fleet.notes[-1] == "host h1 forgotten: h1 has another id"
    # A sensor that still tells of it changes nothing.
    fleet.give(_host("h1", state=DeviceState.FAILED))
    assert set(fleet.state.hosts) == {"h0", "h1.2", "s0"}


class Reads:
    """A field of a class, and how often it was read."""

    def __init__(self, field: Any) -> None:
        self.field, self.count = field, 0

    def __get__(self, row: object, kind: type) -> object:
        self.count += 1
        return self.field.__get__(row, kind)

    def __set__(self, row: object, value: object) -> None:
        self.field.__set__(row, value)


def test_a_host_that_registers_costs_no_look_at_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = [_host(f"x{number}") for number in range(400)]
    reads = Reads(HostInfo.name)
    monkeypatch.setattr(HostInfo, "name", reads)
    core = ControllerCore(BaseController(LIMITS), EventLog(sqlite3.connect(":memory:")), 0.0)
    core.take_all(hosts, 1.0)
    assert reads.count <= 10 * len(hosts)
    before = core.state
    core.take_all([replace(hosts[0], state=DeviceState.FAILED), replace(hosts[0], id="x0.2")], 2.0)
    assert core.state.names["x0"] == ("x0.2",)
    assert before.names["x0"] == ("x0",)  # what others hold is left as it was
    core.log.close()


def test_a_lost_host_without_a_successor_is_kept() -> None:
    fleet = Controller()
    fleet.give(_host("s0", state=DeviceState.FAILED))
    fleet.give(_host("s1"))
    assert "s0" in fleet.state.hosts


# ---------------------------------------------------------------- shadow, own policies, resuming


def test_a_shadow_decides_and_says_so_and_sends_nothing() -> None:
    fleet = Controller(shadow=True)
    assert fleet.happens(EventType.HOST_HB) == []
    assert fleet.state.commands == {}
    assert "shadow: hot_swap of train h1 by s0 would be done for i1" in fleet.notes


class Greedy(BaseController):
    def event_policy(self, event_reports: Sequence[EventReport]) -> None:
        for report in event_reports * 2:
            self.trigger_in_job_reset(report)
            self.trigger_workload_recreation(report)


class Broken(BaseController):
    def event_policy(self, event_reports: Sequence[EventReport]) -> None:
        raise ValueError("a typing error")


class Patient(BaseController):
    def event_policy(self, event_reports: Sequence[EventReport]) -> None:
        if not self.observe(event_reports[0], 1000.0):
            super().event_policy(event_reports)


class Idle(BaseController):
    def event_policy(self, event_reports: Sequence[EventReport]) -> None:
        pass


def test_a_policy_of_ones_own_cannot_go_around_the_guards() -> None:
    fleet = Controller(policy=Greedy, max_in_job_restarts=5, max_workload_restarts=5)
    assert fleet.happens(EventType.WORKER_HB) == [IN_JOB]


def test_a_policy_that_raises_is_noted_and_the_default_decides() -> None:
    fleet = Controller(policy=Broken, max_in_job_restarts=5)
    assert fleet.happens(EventType.WORKER_HB) == [IN_JOB]
    assert "event_policy failed: ValueError: a typing error; the default decides" in fleet.notes


def test_a_policy_may_wait() -> None:
    fleet = Controller(policy=Patient)
    assert fleet.happens(EventType.WORKER_HB) == []
    assert fleet.logic.wake_at(fleet.state) == fleet.now + 1000.0


def test_a_policy_that_never_acts_ends_in_a_verdict() -> None:
    fleet = Controller(policy=Idle)
    fleet.happens(EventType.WORKER_HB)
    for _ in range(5):
        fleet.wait(LIMITS.workload_downtime_threshold_s)
    assert fleet.state.verdicts["job:train"].text == "the job cannot progress: no action is possible"


def test_commands_without_outcome_are_sent_again_with_the_new_epoch_and_their_ids() -> None:
    fleet = Controller()
    fleet.happens(EventType.HOST_HB)
    (again,) = fleet.logic.resume(fleet.state, epoch=8)
    assert again == replace(fleet.sent[0], epoch=8)


def test_a_command_that_a_higher_epoch_refused_has_ended_and_blocks_its_job_no_more() -> None:
    fleet = Controller(spares=2)
    fleet.happens(EventType.HOST_HB)
    (swap,) = fleet.sent
    fenced = Outcome(command=swap.id, epoch=9, status=OutcomeStatus.FENCED)
    # One of this log's own epoch was said to an earlier start of it; the command was sent again since.
    assert fleet.give(replace(fenced, epoch=7)) == []
    assert list(fleet.state.commands) == [swap.id]
    for _ in range(3):  # told again, it is the same
        assert fleet.give(fenced) == []
    assert [note for note in fleet.notes if "fenced" in note] == [
        "hot_swap c1 fenced: epoch 9 was seen, this controller has epoch 7; end the other controller, or"
        " start this one again if there is none"
    ]
    assert fleet.state.fleet[""].fenced_by == 9
    assert fleet.state.commands == {}
    # Nothing was done: no spare is to blame, and no verdict on the job may come of it.
    assert (fleet.state.verdicts, fleet.state.accounts["train"].fruitless) == ({}, 0)
    assert fleet.wait(LIMITS.backoff_s) == [SWAP]
    assert fleet.sent[-1].spare == "s0"
    # Above all epochs there may be is none that the next start could exceed.
    fleet.give(replace(fenced, command=fleet.sent[-1].id, epoch=2**62))
    assert (fleet.state.fleet[""].fenced_by, fleet.state.commands) == (9, {})


def test_a_host_that_refuses_by_its_fence_does_not_hold_its_job_on_that_rung() -> None:
    fleet = Controller(max_in_job_restarts=1, max_workload_restarts=1)
    assert fleet.happens(EventType.WORKER_HB) == [IN_JOB]
    fleet.give(Outcome(command=fleet.sent[-1].id, epoch=9, status=OutcomeStatus.FENCED))
    assert fleet.wait(LIMITS.backoff_s) == [RESET]


def test_a_cordon_that_was_fenced_is_tried_again() -> None:
    fleet = Controller(spares=2)
    assert fleet.happens(EventType.ECC) == [CORDON, SWAP]
    for command in fleet.sent:
        fleet.give(Outcome(command=command.id, epoch=9, status=OutcomeStatus.FENCED))
    assert not fleet.state.hosts["h1"].cordoned
    assert sorted(fleet.wait(LIMITS.backoff_s), key=str) == [CORDON, SWAP]


# ---------------------------------------------------------------- names that are used again


def _begin(fleet: Controller, run: str, first_attempt: int = 0) -> list[CommandKind]:
    """All launchers of the job have met: they say which start of it they are of."""
    known = fleet.state.workloads["train"]
    return [each.kind for each in fleet.give(replace(known, run=run, first_attempt=first_attempt))]


def test_a_name_that_is_used_again_is_another_job_of_which_nothing_is_known() -> None:
    fleet = Controller(max_in_job_restarts=1)
    _begin(fleet, "r1")
    fleet.advance(501, attempt=3)
    fleet.now += 60.0
    fleet.happens(EventType.WORKER_HB, attempt=3)
    while "job:train" not in fleet.state.verdicts:
        fleet.stuck()
    # A person has mended the program, and starts it again.
    _begin(fleet, "r2")
    for table in ("incidents", "accounts", "progress", "verdicts"):
        assert getattr(fleet.state, table) == {}, table
    assert fleet.notes[-1] == "job train forgotten: its name is used again"
    # What is told of the first one late is not about this one.
    fleet.give(Progress(workload="train", step=900, attempt=4, run="r1"))
    fleet.give(replace(fleet.event(EventType.WORKER_HB, attempt=4), run="r1"))
    assert (fleet.state.progress, fleet.state.incidents) == ({}, {})
    fleet.give(Progress(workload="train", step=1, run="r2"))
    fleet.now += 60.0
    assert fleet.happens(EventType.WORKER_HB, run="r2") == [IN_JOB]
    assert fleet.sent[-1].run == "r2"


def test_a_start_that_an_action_has_led_to_goes_on_with_its_budgets() -> None:
    fleet = Controller(max_in_job_restarts=1, max_workload_restarts=1)
    _begin(fleet, "r1")
    assert fleet.happens(EventType.WORKER_HB) == [IN_JOB]
    # All launchers had ended, and were started again: they count from 0.
    assert _begin(fleet, "r2") == []
    fleet.end()
    assert fleet.wait(LIMITS.workload_downtime_threshold_s) == [RESET]
    fleet.end()
    # The orchestrator counts its starts.
    assert _begin(fleet, "r3", first_attempt=1_000_000) == []
    assert fleet.state.accounts["train"].in_job.spent == 1
    fleet.wait(10.0)
    fleet.advance(501, attempt=1_000_000)
    assert fleet.state.incidents == {}


def test_a_start_that_counts_from_0_after_an_action_has_its_time_and_its_steps_count() -> None:
    fleet = Controller(max_in_job_restarts=2)
    _begin(fleet, "r1")
    fleet.advance(501, attempt=5)
    fleet.now += 60.0
    assert fleet.happens(EventType.WORKER_HB, attempt=5) == [IN_JOB]
    fleet.end()
    fleet.wait(LIMITS.workload_downtime_threshold_s - 10.0)
    assert _begin(fleet, "r2") == []
    assert fleet.wait(20.0) == []
    fleet.advance(490, attempt=0)
    assert fleet.state.incidents == {}


def test_a_host_that_is_lost_is_lost_to_the_next_job_of_the_name_too() -> None:
    fleet = Controller(spares=0)
    _begin(fleet, "r1")
    fleet.give(fleet.event(EventType.WORKER_HB, "h0"))
    fleet.give(fleet.event(EventType.HOST_HB))
    assert _begin(fleet, "r2") == []
    (incident,) = fleet.state.incidents.values()
    assert [each.type for each in incident.reports] == [EventType.HOST_HB]
    assert fleet.wait(LIMITS.coalesce_s) == [RESET]


@pytest.mark.parametrize("held", [True, False])
def test_a_loss_that_was_not_heard_of_before_the_name_was_used_again_counts_where_the_job_has_the_host(
    held: bool,
) -> None:
    fleet = Controller(spares=0)
    _begin(fleet, "r1")
    lost = replace(fleet.event(EventType.HOST_HB), run="r1")
    _begin(fleet, "r2")
    if not held:
        fleet.give(replace(fleet.state.hosts["h1"], workload="other"))
    fleet.give(lost)
    assert fleet.wait(LIMITS.coalesce_s) == [RESET] * held


def test_a_job_that_ended_is_forgotten_and_its_hosts_are_spares_again() -> None:
    fleet = Controller(spares=0, downtime_threshold_s=100.0)
    before = fleet.state.size
    fleet.give(_host("h0"))
    fleet.give(_host("h1", "train", DeviceState.FAILED))  # that it lost it never said
    fleet.wait(0.0)
    assert fleet.wait(99.0) == []
    assert "train" in fleet.state.workloads
    fleet.wait(1.0)
    assert fleet.notes[-1] == "job train forgotten: no host works for it any more"
    assert (fleet.state.workloads, fleet.state.progress) == ({}, {})
    view = View(state=fleet.state, now=fleet.now, limits=LIMITS)
    assert [host.id for host in view.spares()] == ["h0"]
    # The lost host is forgotten too, and a sensor that still tells of it changes nothing.
    fleet.wait(0.0)
    fleet.wait(LIMITS.verdict_s)
    fleet.give(_host("h1", "train", DeviceState.FAILED))
    assert (list(fleet.state.hosts), fleet.state.gone) == (["h0"], {})
    assert fleet.state.size < before


def test_what_is_held_is_not_forgotten() -> None:
    fleet = Controller(spares=0, downtime_threshold_s=100.0)
    assert fleet.happens(EventType.HOST_HB) == [RESET]
    fleet.give(_host("h0"))
    for _ in range(3):  # a command is under way, then an incident is open
        fleet.wait(99.0)
        fleet.end()
    assert (list(fleet.state.workloads), list(fleet.state.hosts)) == (["train"], ["h0", "h1"])
    fleet.give(_host("h0", "train", DeviceState.RUNNING))  # its launcher is back
    fleet.wait(0.0)
    assert "job:train" not in fleet.state.gone


# ---------------------------------------------------------------- for all histories

_KINDS = st.sampled_from(
    [EventType.WORKER_HB, EventType.HOST_HB, EventType.ECC, EventType.HANG, EventType.NO_PROGRESS]
)
_STEPS = st.one_of(
    st.tuples(st.just("event"), _KINDS, st.sampled_from(["h0", "h1", "s0"])),
    st.tuples(st.just("wait"), st.sampled_from([1.0, 3.0, 60.0, 700.0])),
    st.tuples(st.just("end"), st.sampled_from(list(OutcomeStatus))),
    st.tuples(st.just("advance"), st.integers(1, 60)),
)


@given(st.lists(_STEPS, max_size=30))
def test_changes_alone_give_the_state_back_and_a_decision_can_be_repeated(
    steps: list[tuple[object, ...]],
) -> None:
    fleet = Controller(max_in_job_restarts=1, max_workload_restarts=1, scaling=True, max_replicas=3)
    replayed = fleet.state
    decide = fleet.logic.decide

    def watched(state: State, given: Input, now: float, *, epoch: int) -> object:
        nonlocal replayed
        decision = decide(state, given, now, epoch=epoch)
        assert decide(state, given, now, epoch=epoch) == decision
        replayed = replayed.with_changes(changes_from_plain(changes_to_plain(decision.changes)))
        under_way = [each for each in decision.state.commands.values() if each.command.kind.restarts]
        assert len(under_way) <= 1
        return decision

    fleet.logic.decide = watched  # type: ignore[method-assign, assignment]
    step = 500
    for kind, *rest in steps:
        if kind == "event":
            fleet.happens(rest[0], rest[1])
        elif kind == "wait":
            fleet.wait(rest[0])
        elif kind == "end":
            fleet.end(rest[0])
        else:
            step += rest[0]
            fleet.advance(step)
    assert replayed == fleet.state
    assert fleet.state.names == {host.name: (host.id,) for host in fleet.state.hosts.values()}
    assert State.empty().with_changes(fleet.state.to_changes()) == fleet.state
