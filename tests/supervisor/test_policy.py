# SPDX-License-Identifier: Apache-2.0
"""The rules, each as a table or a property."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.policy.budget import Budget, TokenBucket, backoff_s
from supervisor.policy.caps import CordonMark, refuse_cordon, refuse_growth
from supervisor.policy.ladder import Cause, Rung, rungs
from supervisor.policy.silence import is_correlated
from supervisor.policy.spares import JobShape, Place, choose_spare
from supervisor.policy.thresholds import Thresholds, flag, flags
from supervisor.policy.verdict import Verdict
from supervisor.policy.xid import Remedy, remedy, worst

# ---------------------------------------------------------------- Xid


@pytest.mark.parametrize(
    ("wanted", "codes"),
    [
        (Remedy.RESTART_APP, [8, 11, 13, 25, 31, 32, 39, 40, 41, 60, 68, 72, 75, 77, 80, 82, 86, 88, 89]),
        (Remedy.RESTART_APP, [94, 96, 105, 126, 135, 139]),
        (Remedy.LOG, [37, 38, 43, 44, 63, 66, 67, 92, 93, 106, 107, 121, 141, 152, 153, 157, 160, 161]),
        (Remedy.RESET_GPU, [46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158]),
        (Remedy.OUT_OF_SERVICE, [54, 74, 79, 151]),
        (Remedy.DRAIN_AND_RESET, [48]),
        (Remedy.SUPPORT, [142]),
        (Remedy.UNKNOWN, [1, 81, 144, 150, 999]),
    ],
)
def test_each_code_has_the_remedy_of_the_catalogue(wanted: Remedy, codes: list[int]) -> None:
    assert {code: remedy(code) for code in codes} == dict.fromkeys(codes, wanted)


def test_the_drivers_own_advice_goes_before_the_catalogue() -> None:
    assert remedy(31, "NODE_REBOOT") is Remedy.OUT_OF_SERVICE
    assert remedy(79, "none") is Remedy.LOG
    assert remedy(79, "words of a newer driver") is Remedy.OUT_OF_SERVICE


def test_an_applications_xid_does_not_hide_a_nodes() -> None:
    assert worst([(31, ""), (79, ""), (999, "")]) is Remedy.OUT_OF_SERVICE
    assert worst([]) is Remedy.LOG


@given(st.lists(st.integers(0, 200)))
def test_only_remedies_of_the_node_take_it_away(codes: list[int]) -> None:
    found = worst((code, "") for code in codes)
    assert found.cordons == any(remedy(code).cordons for code in codes)
    assert not found.cordons or found.needs_host


# ---------------------------------------------------------------- budgets


@given(st.integers(1, 5), st.integers(1, 50), st.lists(st.integers(0, 30), max_size=40))
def test_a_budget_gives_back_one_for_so_many_steps_and_nothing_else(
    limit: int, per: int, advances: list[int]
) -> None:
    """Against the simplest account: all that was spent is bounded by the limit and the steps made."""
    budget, step, spent = Budget(), 0, 0
    for advance in advances:
        step += advance
        now = budget.at(step, per)
        if now.left(limit):
            budget, spent = now.spend(), spent + 1
    assert spent <= limit + step // per
    assert budget.at(step, per) == budget.at(step, per).at(step, per)


def test_a_budget_without_progress_stays_spent_and_a_rollback_costs_nothing() -> None:
    budget = Budget().at(100, 50).spend().spend()
    assert budget.at(100, 50).left(2) == 0
    assert budget.at(40, 50).left(2) == 0
    assert budget.at(149, 50).left(2) == 0
    assert budget.at(150, 50).left(2) == 1
    assert budget.at(10_000, 50).left(2) == 2


@given(st.lists(st.floats(0, 500), max_size=60), st.integers(1, 5))
def test_a_bucket_never_lets_more_through_than_capacity_and_time(waits: list[float], capacity: int) -> None:
    bucket, now, taken = TokenBucket(), 0.0, 0
    for wait in waits:
        now += wait
        if bucket.ready_at(now, capacity=capacity, period_s=100.0) <= now:
            bucket, taken = bucket.take(now, period_s=100.0), taken + 1
    assert taken <= capacity + now / 100.0 + 1e-6


def test_an_empty_bucket_says_when_it_is_ready() -> None:
    bucket = TokenBucket().take(0.0, period_s=60.0).take(0.0, period_s=60.0)
    ready = bucket.ready_at(10.0, capacity=2, period_s=60.0)
    assert ready == pytest.approx(60.0)
    assert bucket.ready_at(ready, capacity=2, period_s=60.0) == ready


def test_backoff_doubles_up_to_its_limit_and_never_overflows() -> None:
    waits = [backoff_s(failures, base_s=5.0, limit_s=60.0) for failures in (0, 1, 2, 3, 4, 5, 5000)]
    assert waits == [0.0, 5.0, 10.0, 20.0, 40.0, 60.0, 60.0]


# ---------------------------------------------------------------- caps and spares


def _cordons(*domains: str) -> list[CordonMark]:
    return [CordonMark(host=f"h{n}", at=100.0 * n, domains=(name,)) for n, name in enumerate(domains)]


@pytest.mark.parametrize(
    ("marks", "now", "why"),
    [
        (_cordons(), 300.0, ""),
        (_cordons("rack=a"), 300.0, ""),
        (
            _cordons("rack=a", "rack=a"),
            300.0,
            "2 hosts of rack=a were cordoned within 1000 s, at most 2 may be",
        ),
        (_cordons("rack=b", "rack=c", "rack=d"), 300.0, "3 hosts were cordoned within 1000 s, at most 3"),
        (_cordons("rack=a", "rack=a"), 1050.0, ""),
    ],
)
def test_cordons_have_a_cap_per_window_and_per_domain(marks: list[CordonMark], now: float, why: str) -> None:
    refusal = refuse_cordon(marks, ("rack=a", "zone=z"), now, window_s=1000.0, per_window=3, per_domain=2)
    assert refusal.startswith(why) if why else not refusal


def test_growth_leaves_the_floor_of_spares() -> None:
    assert refuse_growth(3, needed=2, floor=1) == ""
    assert "fewer than the floor of 2" in refuse_growth(3, needed=2, floor=2)


def place(id: str, *blocks: str, zone: str = "", workers: int = 8) -> Place:
    return Place(id=id, blocks=blocks, zone=zone, workers=workers)


def test_a_spare_is_near_the_job_but_not_in_the_lost_hosts_rack() -> None:
    lost = place("lost", "rack=a", "block=1")
    others = [place("o1", "rack=b", "block=1"), place("o2", "rack=a", "block=1")]
    same_rack = place("s1", "rack=a", "block=1")
    same_block = place("s2", "rack=c", "block=1")
    far = place("s3", "rack=d", "block=2")
    bare = place("s4")
    assert choose_spare(lost, others, [same_rack, far, same_block, bare]) == same_block
    assert choose_spare(lost, others, [same_rack, far]) == far
    assert choose_spare(lost, others, [same_rack]) == same_rack
    assert choose_spare(lost, others, [lost]) is None


@pytest.mark.parametrize("workers", [4, 16])
def test_a_spare_for_another_number_of_ranks_is_none(workers: int) -> None:
    other, right = place("a", workers=workers), place("b")
    assert choose_spare(place("lost"), [], [other, right]) == right
    assert choose_spare(place("lost"), [], [other]) is None
    why = f"{workers} workers per host instead of 8"
    assert JobShape.of([place("lost")]).refuse_all([other, other, right]) == f"{why} (2)"


def test_a_job_in_one_zone_stays_there_and_one_in_several_takes_a_spare_where_most_of_it_is() -> None:
    lost, near, far = place("lost", zone="z1"), place("o1", zone="z1"), place("o2", zone="z2")
    in_1, in_2, in_3 = (place(f"s{number}", zone=f"z{number}") for number in (1, 2, 3))
    bare = place("s4")
    assert choose_spare(lost, [near], [in_3, in_2, bare, in_1]) == in_1
    assert choose_spare(lost, [near], [in_2, bare]) == bare
    assert choose_spare(lost, [near], [in_2, in_3]) is None
    why = JobShape.of([lost, near]).refuse_all([in_2, in_3])
    assert why == "zone z2 instead of z1 (1), zone z3 instead of z1 (1)"
    assert choose_spare(lost, [near, far], [in_3, in_2, in_1]) == in_1
    assert choose_spare(lost, [near, far], [in_3, in_2]) == in_2
    assert choose_spare(lost, [near, far], [in_3]) == in_3
    assert choose_spare(place("lost"), [], [in_2]) == in_2


def test_the_jobs_zone_goes_before_another_rack() -> None:
    lost, others = place("lost", "rack=a", zone="z1"), [place("o1", zone="z1"), place("o2", zone="z2")]
    same_rack, elsewhere = place("s1", "rack=a", zone="z1"), place("s2", "rack=b", zone="z2")
    assert choose_spare(lost, others, [same_rack, elsewhere]) == same_rack


def test_equal_spares_are_told_apart_by_name_so_a_decision_can_be_repeated() -> None:
    spares = [place("b"), place("a")]
    assert choose_spare(place("x"), [], spares) == choose_spare(place("x"), [], spares[::-1]) == spares[1]


@pytest.mark.parametrize(
    ("silent", "hosts", "correlated"),
    [(1, 4, False), (2, 4, False), (3, 4, True), (3, 100, False), (20, 100, False), (21, 100, True)],
)
def test_many_silent_hosts_are_a_broken_path_and_few_are_not(
    silent: int, hosts: int, correlated: bool
) -> None:
    assert is_correlated(silent, hosts, share=0.2, at_least=3) is correlated


# ---------------------------------------------------------------- ladder, verdicts, thresholds


def test_the_ladder_begins_with_what_costs_least() -> None:
    resets = (Rung.IN_JOB_RESET, Rung.WORKLOAD_RESET, Rung.LAST_RESORT)
    assert rungs(Cause.WORKER) == rungs(Cause.HANG) == rungs(Cause.NO_PROGRESS) == resets
    swap = (Rung.HOT_SWAP, Rung.SCALE_DOWN, Rung.LAST_RESORT)
    assert rungs(Cause.HOST, host_usable=False) == swap
    assert rungs(Cause.HOST, host_usable=True) == (Rung.WORKLOAD_RESET, *swap)
    assert rungs(Cause.CAPACITY) == (Rung.SCALE_UP,)


def test_a_verdict_needs_evidence_and_an_end() -> None:
    verdict = Verdict(subject="h1", cause="xid", evidence=("e1",), at=10.0, expires_at=20.0)
    assert verdict.holds(19.9)
    assert not verdict.holds(20.0)
    with pytest.raises(ValueError, match="needs evidence"):
        replace(verdict, evidence=())
    with pytest.raises(ValueError, match="must expire"):
        replace(verdict, expires_at=float("inf"))


@pytest.mark.parametrize("name", [field.name for field in fields(Thresholds)])
def test_each_threshold_has_a_flag_and_refuses_what_cannot_work(name: str) -> None:
    assert flags()[flag(name)] == getattr(Thresholds(), name)
    for bad in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"{flag(name)} must be"):
            Thresholds(**{name: bad})


def test_a_share_of_all_hosts_can_never_be_silent_together() -> None:
    with pytest.raises(ValueError, match="--silence-share must be below 1"):
        Thresholds(silence_share=1.0)
