# SPDX-License-Identifier: Apache-2.0
"""Hosts that check themselves: when they are asked to, and what their answer changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from supervisor.decision import checks
from supervisor.decision.controller import BaseController
from supervisor.decision.guards import View
from supervisor.decision.turn import Turn
from supervisor.values import CommandKind, DeviceState, EventType, HostInfo, OutcomeStatus
from tests.supervisor.controllers import LIMITS, Controller, _host, checked, diagnosed

SWAP, CHECK, UNCORDON = CommandKind.HOT_SWAP, CommandKind.CHECK_HOST, CommandKind.UNCORDON_HOST
CORDON = CommandKind.CORDON_HOST


def swapped(cause: str = "gpu_missing") -> Controller:
    """A fleet whose host h1 was blamed and replaced, and has no launcher any more."""
    fleet = Controller()
    fleet.give(diagnosed(fleet, cause=cause))
    assert fleet.wait(LIMITS.coalesce_s) == [CORDON, SWAP]
    assert fleet.end() == []  # its launcher may still be there
    fleet.now += 5.0
    fleet.advance(600, attempt=1)
    fleet.give(_host("h1"))
    return fleet


def usable(fleet: Controller) -> set[str]:
    view = View(state=fleet.state, now=fleet.now, limits=fleet.logic.thresholds)
    return {host.id for host in view.spares()}


@pytest.mark.parametrize(
    ("cause", "health", "gpus", "back"),
    [
        ("gpu_missing", "ok", "gpu0", True),
        ("gpu_missing", "ok", "", False),
        ("illegal_access", "ok", "", False),
        ("io_error", "ok", "", True),
        ("io_error", "slow", "", False),
        ("io_error", "undecided", "gpu0", False),
        ("io_error", "faulty", "gpu0", False),
    ],
)
def test_a_blamed_host_checks_itself_once_and_is_back_only_if_that_disproves_the_blame(
    cause: str, health: str, gpus: str, back: bool
) -> None:
    fleet = swapped(cause)
    assert [(one.kind, one.host) for one in fleet.sent[-1:]] == [(CHECK, "h1")]
    assert fleet.end() == []
    fleet.give(checked(fleet, "h1", health, gpus=gpus, text="as measured"))
    for _ in range(3):
        fleet.end()
        fleet.wait(30.0)
    assert usable(fleet) == ({"h1"} if back else set())
    assert [one.kind for one in fleet.sent[3:]] == ([UNCORDON] if back else [])
    said = "suspicion of h1 dropped" if back else "h1 stays under suspicion"
    if health == "faulty":
        verdict = fleet.state.verdicts["host:h1"]
        assert (verdict.cause, verdict.text) == ("node_check", "as measured")
    else:
        assert any(said in note for note in fleet.notes)


def test_a_host_that_was_found_well_and_is_blamed_again_stays_out() -> None:
    fleet = swapped()
    fleet.give(checked(fleet, "h1", "ok"))
    fleet.end()
    assert usable(fleet) == {"h1"}
    fleet.give(_host("s0", "train", DeviceState.RUNNING))
    fleet.now += 700.0
    fleet.give(diagnosed(fleet, "s0", attempt=1))
    assert fleet.wait(LIMITS.coalesce_s) == [CORDON, SWAP]  # h1 is in the job again
    fleet.end()
    fleet.now += 5.0
    fleet.give(_host("s0"))
    fleet.give(_host("h1", "train", DeviceState.RUNNING))
    fleet.advance(700, attempt=2)
    fleet.wait(700.0)
    asked = [one.host for one in fleet.sent if one.kind is CHECK]
    assert asked == ["h1", "s0"]
    fleet.give(checked(fleet, "s0", "ok"))
    fleet.end()
    fleet.give(diagnosed(fleet, "h1", attempt=2))
    fleet.wait(LIMITS.coalesce_s)
    fleet.end()
    fleet.now += 5.0
    fleet.advance(800, attempt=3)
    fleet.give(_host("h1"))
    for _ in range(3):
        fleet.wait(30.0)
        fleet.end()
    assert [one.host for one in fleet.sent if one.kind is CHECK] == ["h1", "s0"]
    assert "h1" not in usable(fleet)


@pytest.mark.parametrize("status", [OutcomeStatus.FAILED, OutcomeStatus.TIMED_OUT])
def test_a_check_that_came_to_nothing_is_made_again_later(status: OutcomeStatus) -> None:
    fleet = swapped()
    fleet.end(status)
    assert fleet.wait(60.0) == []
    assert fleet.wait(LIMITS.suspicion_s) == [CHECK]


def test_other_evidence_than_a_launchers_word_is_disproved_by_no_check() -> None:
    fleet = Controller()
    fleet.happens(EventType.ECC)
    fleet.end()
    fleet.give(_host("h1"))
    fleet.wait(60.0)
    assert CHECK not in [one.kind for one in fleet.sent]
    fleet.give(checked(fleet, "h1", "ok"))
    fleet.end()
    assert "host:h1" in fleet.state.verdicts


def test_a_shadow_and_a_host_with_a_launcher_are_asked_for_no_check() -> None:
    fleet = Controller(shadow=True)
    fleet.give(diagnosed(fleet))
    fleet.wait(LIMITS.coalesce_s)
    fleet.now += 5.0
    fleet.advance(600, attempt=1)
    assert "train" not in fleet.state.incidents
    fleet.give(_host("h1"))
    fleet.wait(60.0)
    assert fleet.sent == []
    assert sum("shadow: check_host of h1" in note for note in fleet.notes) == 1

    fleet = Controller()
    fleet.give(diagnosed(fleet))
    fleet.wait(LIMITS.coalesce_s)
    fleet.end()
    fleet.give(_host("h1", "train"))
    fleet.wait(60.0)
    assert CHECK not in [one.kind for one in fleet.sent]


# ---------------------------------------------------------------- spares


def careful() -> Callable[..., BaseController]:
    return lambda limits, **flags: BaseController(replace(limits, spare_check_s=600.0), **flags)


def test_where_it_is_asked_spares_check_themselves_before_they_are_any_and_again_two_at_a_time() -> None:
    fleet = Controller(policy=careful(), spares=3)
    asked = [one for one in fleet.sent if one.kind is CHECK]
    assert [one.host for one in asked] == ["s0", "s1"]
    assert usable(fleet) == set()
    fleet.give(checked(fleet, "s0", "faulty", text="core 3 has another result"))
    fleet.give(checked(fleet, "s1", "undecided"))
    fleet.end()
    fleet.wait(LIMITS.coalesce_s)
    assert fleet.sent[-1].host == "s2"
    assert usable(fleet) == {"s1"}
    assert (CORDON, "s0") in [(one.kind, one.host) for one in fleet.sent]
    fleet.end()
    fleet.give(checked(fleet, "s2", "ok"))
    fleet.now += 600.0
    assert [one.host for one in fleet.give(None)] == ["s1", "s2"]
    assert usable(fleet) == {"s1", "s2"}  # they were well, and are still to be had


def test_by_default_no_spare_is_checked() -> None:
    fleet = Controller(spares=3)
    fleet.wait(7200.0)
    assert fleet.sent == []


def test_news_of_one_host_is_no_look_at_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A blamed host stays in the state for days, and a fleet has twenty thousand hosts with news."""
    fleet = swapped()
    looked = []
    reason = checks._reason

    def look(turn: Turn, host: HostInfo) -> tuple[str, ...] | None:
        looked.append(host.id)
        return reason(turn, host)

    fleet.end()
    monkeypatch.setattr(checks, "_reason", look)
    fleet.give(_host("h2", "train", DeviceState.RUNNING))
    assert looked == ["h1"]
