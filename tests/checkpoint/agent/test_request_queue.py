# SPDX-License-Identifier: Apache-2.0
"""Every agent hears of a rank's steps in the order in which they were made, however many die."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resiliency.checkpoint.agent.protocol import (
    Detach,
    Done,
    LiftBandwidthCap,
    Peers,
    Repair,
    RepairDone,
    SaveRequest,
    Skip,
)
from resiliency.checkpoint.agent.request_queue import Request, RequestQueue
from resiliency.checkpoint.names import TierTry

BOTH = ("local", "persistent")


def a_save(step: int, tiers: tuple[str, ...] = BOTH, *, number: int = 1, again: bool = False) -> SaveRequest:
    slot = f"slot-{step}"
    return SaveRequest(step=step, slot=slot, tiers=tiers, try_number=number, patient=again, again=again)


def a_skip(step: int, tiers: tuple[str, ...] = BOTH, why: str = "no slot", *, number: int = 1) -> Skip:
    return Skip(step=step, tiers=tiers, reason=why, try_number=number)


def reported(step: int, tier: str, number: int = 1, *, error: str = "") -> Done:
    return Done(
        step=step, attempt_id="s", tier=tier, error=error, try_number=number, size_bytes=0, queued_s=0.0,
        commit_s=0.0,
    )  # fmt: skip


def pass_all_on(request_queue: RequestQueue) -> list[Request]:
    """An agent hears all that waits."""
    heard = []
    while (request := request_queue.first()) is not None:
        heard.append(request)
        request_queue.passed_on()
    return heard


def local_saves(tries: frozenset[TierTry]) -> list[SaveRequest]:
    local = [tried for tried in sorted(tries) if tried.tier == "local"]
    return [a_save(tried.step, ("local",), number=tried.number, again=True) for tried in local]


def test_what_an_agent_left_undone_goes_ahead_of_what_waits_for_the_next() -> None:
    request_queue = RequestQueue(3, is_alone=False)
    for request in (Peers(path="/table"), a_save(1), a_save(2)):
        request_queue.put(request)
    assert pass_all_on(request_queue) == [Peers(path="/table"), a_save(1), a_save(2)]
    request_queue.reported(reported(1, "persistent"))
    lost = request_queue.unreported
    request_queue.put(a_save(3))  # while the loss is being seen to
    request_queue.start_over(local_saves(lost), "it died.")
    request_queue.put(a_save(4))
    assert pass_all_on(request_queue) == [
        a_save(1, ("local",), again=True),
        a_save(2, ("local",), again=True),
        a_skip(2, ("persistent",), "rank 3: it died."),
        a_save(3),
        a_save(4),
    ]


def test_what_no_agent_has_in_hand_is_not_lost_with_it() -> None:
    request_queue = RequestQueue(0, is_alone=False)
    for request in (a_save(1), a_save(2), LiftBandwidthCap(), Detach()):
        request_queue.put(request)
    request_queue.passed_on()
    assert request_queue.unreported == {(1, 1, "local"), (1, 1, "persistent")}
    request_queue.start_over([], "it died.")
    assert not request_queue.cap_lifted
    assert pass_all_on(request_queue)[2:] == [a_save(2), LiftBandwidthCap(), Detach()]
    assert request_queue.cap_lifted


def test_where_no_agent_can_be_had_the_saves_are_lost_and_the_rest_waits_on() -> None:
    request_queue = RequestQueue(0, is_alone=False)
    for request in (Peers(path="/table"), a_save(1), a_skip(2), Detach()):
        request_queue.put(request)
    request_queue.give_up_waiting()
    assert request_queue.unreported == {(step, 1, tier) for step in (1, 2) for tier in BOTH}
    request_queue.start_over([], "none answered.")
    heard = pass_all_on(request_queue)
    assert heard[-2:] == [Peers(path="/table"), Detach()]
    # A rank that had nothing to save still says why.
    assert [(skip.step, skip.reason) for skip in heard[:4] if isinstance(skip, Skip)] == [
        *[(1, "rank 0: none answered.")] * 2,
        *[(2, "no slot")] * 2,
    ]


def test_nobody_waits_for_a_rank_that_is_alone() -> None:
    request_queue = RequestQueue(0, is_alone=True)
    request_queue.put(a_save(1))
    pass_all_on(request_queue)
    request_queue.start_over(local_saves(request_queue.unreported), "it died.")
    assert pass_all_on(request_queue) == [a_save(1, ("local",), again=True)]


def test_the_report_of_a_first_try_says_nothing_of_the_second() -> None:
    request_queue = RequestQueue(1, is_alone=False)
    for request in (a_skip(1, ("local",)), a_save(1, ("local",), number=2)):
        request_queue.put(request)
    pass_all_on(request_queue)
    request_queue.reported(reported(1, "local", 1, error="rank 1: no slot"))
    assert request_queue.unreported == {(1, 2, "local")}
    request_queue.reported(reported(1, "local", 2))
    assert request_queue.unreported == frozenset()


def test_the_next_agent_hears_of_every_try_that_the_last_one_took_with_it() -> None:
    request_queue = RequestQueue(1, is_alone=False)
    for request in (a_skip(1), a_save(1, number=2)):
        request_queue.put(request)
    pass_all_on(request_queue)
    request_queue.start_over([a_save(1, ("local",), number=2, again=True)], "it died.")
    assert pass_all_on(request_queue) == [
        a_skip(1, ("local",)),
        a_skip(1, ("persistent",)),
        a_save(1, ("local",), number=2, again=True),
        a_skip(1, ("persistent",), "rank 1: it died.", number=2),
    ]


def test_of_what_was_given_up_over_a_long_time_without_agents_the_newest_is_told() -> None:
    request_queue = RequestQueue(0, is_alone=False)
    for step in range(1, 1001):
        request_queue.put(a_save(step, ("persistent",)))
        request_queue.give_up_waiting()
        request_queue.start_over([], "none answered.")
    steps = [request.step for request in pass_all_on(request_queue) if isinstance(request, Skip)]
    assert steps == list(range(1001 - len(steps), 1001))
    assert len(steps) < 100


def a_repair(target: str) -> Repair:
    return Repair(step=9, save_id="before-9", source_host="h0", root="/local", target=target)


def test_a_repair_is_asked_of_the_next_agent_until_one_has_said_how_it_ended() -> None:
    request_queue = RequestQueue(0, is_alone=False)
    for target in ("h1", "h2"):
        request_queue.put(a_repair(target))
    assert pass_all_on(request_queue) == [a_repair("h1"), a_repair("h2")]
    request_queue.repair_reported(RepairDone(attempt_id="s", repair=a_repair("h1"), error="no room"))
    request_queue.start_over([], "it died.")
    request_queue.start_over([], "none answered.")  # before any agent has heard of it
    assert pass_all_on(request_queue) == [a_repair("h2")]
    request_queue.repair_reported(RepairDone(attempt_id="s", repair=a_repair("h2")))
    request_queue.start_over([], "it died.")
    assert pass_all_on(request_queue) == []


def test_a_repair_that_agents_die_of_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    request_queue = RequestQueue(0, is_alone=False)
    request_queue.put(a_repair("h1"))
    heard = []
    for _ in range(5):
        heard += pass_all_on(request_queue)
        request_queue.start_over([], "it died.")
    assert heard == [a_repair("h1")] * 3
    assert "3 agents were lost before they had sent step 9 of h0 to h1" in caplog.text


OPERATIONS = st.lists(
    st.sampled_from(["save", "save-local", "skip", "again", "pass", "pass", "report", "die", "none"]),
    max_size=40,
)


@given(OPERATIONS)
def test_every_agent_hears_the_steps_of_a_tier_in_order_and_the_last_one_of_all_that_is_open(
    operations: Sequence[str],
) -> None:
    request_queue = RequestQueue(0, is_alone=False)
    heard: list[Request] = []
    asked: list[TierTry] = []
    closed: set[TierTry] = set()

    def succeed() -> None:
        assert_in_order(heard)
        heard.clear()

    step, number = 0, 1
    for operation in operations:
        step, number = (step, number + 1) if operation == "again" else (step + 1, 1)
        tiers = ("local",) if operation == "save-local" else BOTH
        if operation in ("save", "save-local", "skip", "again"):
            is_skip = operation == "skip"
            said = a_skip(step, tiers, number=number) if is_skip else a_save(step, tiers, number=number)
            request_queue.put(said)
            asked += said.tries
        elif operation == "pass" and (request := request_queue.first()) is not None:
            heard.append(request)
            request_queue.passed_on()
        elif operation == "report" and request_queue.unreported:
            tried = min(request_queue.unreported)
            request_queue.reported(reported(tried.step, tried.tier, tried.number))
            closed.add(tried)
        elif operation in ("die", "none"):
            if operation == "none":
                request_queue.give_up_waiting()
            request_queue.start_over(local_saves(request_queue.unreported), "it died.")
            succeed()
    heard += pass_all_on(request_queue)
    assert_in_order(heard)
    known = {tried for said in heard if isinstance(said, SaveRequest | Skip) for tried in said.tries}
    assert set(asked) <= known | closed


def assert_in_order(heard: Sequence[Request]) -> None:
    for tier in BOTH:
        tries = [
            (r.step, r.try_number) for r in heard if isinstance(r, SaveRequest | Skip) and tier in r.tiers
        ]
        assert tries == sorted(set(tries))
