# SPDX-License-Identifier: Apache-2.0
"""The planner against an oracle that tries everything, in small worlds drawn at random."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resiliency.checkpoint.locations import Place, ShardLocation, ShardRequest
from resiliency.checkpoint.recovery.planner import (
    RestorePlan,
    each_plan,
    explain_missing,
    missing_shards,
    plans,
)
from resiliency.checkpoint.recovery.refusals import find_refused_saves

#: "spare" runs no rank of the job, whatever it holds.
HOSTS = ("a", "b", "c", "spare")
GROUPS = ("", "g", "h")
SENDABLE = (Place.LOCAL, Place.REPLICA)


@dataclass(frozen=True)
class World:
    """A job that starts, and what is left of the one before."""

    needs: list[ShardRequest]
    locations: list[ShardLocation]
    bad: list[ShardLocation]

    @property
    def good(self) -> list[ShardLocation]:
        return [location for location in self.locations if location not in self.bad]

    @property
    def saves(self) -> set[tuple[int, str]]:
        return {(location.step, location.save_id) for location in self.good}

    def usable(self, need: ShardRequest, save: tuple[int, str]) -> list[ShardLocation]:
        """The oracle: all that a rank could take, by the definition."""
        running = {other.host for other in self.needs}
        found = []
        for location in self.good:
            same_shard = (location.rank, location.world_size) == (need.rank, need.world_size)
            same_group = need.group != "" and location.group == need.group
            here = location.host in ("", need.host)
            sent = location.place in SENDABLE and location.host in running
            if (location.step, location.save_id) == save and (same_shard or same_group) and (here or sent):
                found.append(location)
        return found

    def whole(self) -> set[tuple[int, str]]:
        return {save for save in self.saves if all(self.usable(need, save) for need in self.needs)}


@st.composite
def locations(draw: st.DrawFn, world_size: int) -> ShardLocation:
    place = draw(st.sampled_from(Place))
    step, attempt_id = draw(st.integers(1, 3)), draw(st.sampled_from("xy"))
    return ShardLocation(
        step=step,
        save_id=f"{attempt_id}-{step}",
        run_id="run",
        rank=draw(st.integers(0, world_size)),
        world_size=draw(st.sampled_from([world_size] * 4 + [world_size + 1])),
        host="" if place is Place.PERSISTENT else draw(st.sampled_from(HOSTS)),
        place=place,
        root="" if place is Place.MEMORY else f"/{place.value}",
        size_bytes=draw(st.integers(0, 3)),
        group=draw(st.sampled_from(GROUPS)),
    )


@st.composite
def whole_hosts(draw: st.DrawFn, needs: list[ShardRequest]) -> list[ShardLocation]:
    """What a job leaves: own checkpoints, one copy elsewhere, memory, storage; some hosts are lost."""
    left = []
    for step in draw(st.sets(st.integers(1, 3), max_size=2)):
        for need in needs:
            places = [(need.host, Place.LOCAL), (draw(st.sampled_from(HOSTS)), Place.REPLICA)]
            for host, place in [*places, (need.host, Place.MEMORY), ("", Place.PERSISTENT)]:
                if draw(st.integers(0, 3)):
                    left.append(
                        ShardLocation(
                            step=step, save_id=f"x-{step}", run_id="run", rank=need.rank, host=host,
                            world_size=need.world_size, place=place, size_bytes=2, group=need.group,
                        )
                    )  # fmt: skip
    lost = draw(st.sets(st.sampled_from(HOSTS), max_size=2))
    return [location for location in left if location.host not in lost]


@st.composite
def worlds(draw: st.DrawFn) -> World:
    size = draw(st.integers(1, 4))
    needs = [
        ShardRequest(
            rank=rank,
            host=draw(st.sampled_from(HOSTS[:3])),
            world_size=size,
            group=draw(st.sampled_from(GROUPS)),
        )
        for rank in range(size)
    ]
    some = draw(st.one_of(st.lists(locations(size), max_size=14), whole_hosts(needs)))
    bad = draw(st.lists(st.sampled_from(some), max_size=3)) if some else []
    return World(needs, some, bad)


def taken(plan: RestorePlan) -> tuple[int, str]:
    return plan.step, plan.save_id


@given(worlds())
def test_it_finds_all_saves_that_can_be_made_whole_newest_first(world: World) -> None:
    found = plans(world.needs, world.locations, bad=world.bad)
    assert sorted(map(taken, found)) == sorted(world.whole())
    assert [plan.step for plan in found] == sorted((plan.step for plan in found), reverse=True)
    for step in (1, 2, 3):
        only = plans(world.needs, world.locations, bad=world.bad, step=step)
        assert only == [plan for plan in found if plan.step == step]


@given(worlds())
def test_every_pick_can_be_carried_out(world: World) -> None:
    host_of = {need.rank: need.host for need in world.needs}
    for plan in each_plan(world.needs, world.locations, bad=world.bad):
        assert [assignment.rank for assignment in plan.assignments] == sorted(host_of)
        for assignment, need in zip(plan.assignments, world.needs, strict=True):
            assert assignment.location in world.usable(need, taken(plan))
            if assignment.sender is None:
                assert assignment.location.host in ("", need.host)
            else:
                assert assignment.location.place in SENDABLE
                assert host_of[assignment.sender] == assignment.location.host != need.host
        moved = sum(
            assignment.location.size_bytes for assignment in plan.assignments if assignment.sender is not None
        )
        assert plan.moved_bytes == moved


@given(worlds())
def test_it_names_exactly_the_shards_that_are_lost(world: World) -> None:
    found = missing_shards(world.needs, world.locations, bad=world.bad)
    expected = {
        save: tuple(need.rank for need in world.needs if not world.usable(need, save))
        for save in world.saves - world.whole()
    }
    assert {(loss.step, loss.save_id): loss.ranks for loss in found} == expected
    text = explain_missing(world.needs, world.locations, bad=world.bad)
    newest = sorted(expected, reverse=True)[:3]
    assert all(f"step {step} (save {save_id}) lacks" in text for step, save_id in newest)


@given(worlds(), st.randoms(use_true_random=False))
def test_the_plan_does_not_depend_on_the_order_of_the_lists(world: World, order: random.Random) -> None:
    needs, shuffled = list(world.needs), list(world.locations)
    order.shuffle(needs)
    order.shuffle(shuffled)
    assert plans(needs, shuffled, bad=world.bad) == plans(world.needs, world.locations, bad=world.bad)


@given(worlds())
def test_shards_are_taken_from_the_best_place_there_is(world: World) -> None:
    def rank_of(location: ShardLocation, need: ShardRequest) -> tuple[bool, bool, bool, int]:
        """The rule: storage of all last; the own shard first; this host first; the quicker place first."""
        stored, own = location.place is Place.PERSISTENT, location.rank == need.rank
        own = own and location.world_size == need.world_size
        here = location.host in ("", need.host)
        return stored, not own, not here, list(Place).index(location.place) if here else 0

    for plan in each_plan(world.needs, world.locations, bad=world.bad):
        for assignment, need in zip(plan.assignments, world.needs, strict=True):
            best = min(rank_of(location, need) for location in world.usable(need, taken(plan)))
            assert rank_of(assignment.location, need) == best


def need(rank: int, host: str, *, of: int = 8, group: str = "") -> ShardRequest:
    return ShardRequest(rank=rank, host=host, world_size=of, group=group)


def shard(
    rank: int, host: str, place: Place = Place.REPLICA, *, of: int = 8, group: str = ""
) -> ShardLocation:
    return ShardLocation(
        step=5, save_id="s-5", run_id="run", rank=rank, world_size=of, host=host, place=place,
        root=f"/{place.value}", size_bytes=10, group=group,
    )  # fmt: skip


def senders(found: list[RestorePlan]) -> Counter[int | None]:
    return Counter(assignment.sender for assignment in found[0].assignments)


def test_a_host_that_sends_much_lets_all_its_ranks_send() -> None:
    needs = [need(rank, "new" if rank < 4 else "b") for rank in range(8)]
    held = [shard(rank, "b") for rank in range(8)]
    assert senders(plans(needs, held)) == {None: 4, 4: 1, 5: 1, 6: 1, 7: 1}


def test_who_has_a_choice_goes_around_those_who_have_none() -> None:
    hosts = ["new"] * 4 + ["b"] * 2 + ["c"] * 2
    needs = [need(rank, host) for rank, host in enumerate(hosts)]
    here = [shard(rank, hosts[rank], Place.LOCAL) for rank in range(4, 8)]
    held = [*here, *(shard(rank, "b") for rank in range(4)), shard(0, "c"), shard(1, "c")]
    assert senders(plans(needs, held)) == {None: 4, 4: 1, 5: 1, 6: 1, 7: 1}


def test_members_of_a_group_share_the_sending() -> None:
    hosts = ["new"] * 3 + ["newer"] * 3 + ["b", "c"]
    needs = [need(rank, host, group="g") for rank, host in enumerate(hosts)]
    held = [shard(rank, hosts[rank], Place.LOCAL, group="g") for rank in (6, 7)]
    (plan,) = plans(needs, held)
    assert senders([plan]) == {None: 2, 6: 3, 7: 3}
    # To each host from one of them alone: the ranks there pass it on.
    assert (
        len(
            {
                (hosts[assignment.rank], assignment.sender)
                for assignment in plan.assignments
                if assignment.sender is not None
            }
        )
        == 2
    )


def test_shards_of_different_sizes_are_spread_by_bytes() -> None:
    needs = [need(rank, host, of=5) for rank, host in enumerate(["new"] * 3 + ["b", "c"])]
    sizes = (30, 10, 20)
    held = [
        replace(shard(rank, host, of=5), size_bytes=size) for host in "bc" for rank, size in enumerate(sizes)
    ]
    held += [shard(3, "b", Place.LOCAL, of=5), shard(4, "c", Place.LOCAL, of=5)]
    (plan,) = plans(needs, held)
    sent = Counter[int]()
    for assignment in plan.assignments:
        if assignment.sender is not None:
            sent[assignment.sender] += assignment.location.size_bytes
    assert sent == {3: 30, 4: 30}


def test_of_two_attempts_at_one_step_the_one_that_moves_less_is_taken_whole() -> None:
    needs = [need(rank, "a", of=2) for rank in range(2)]
    first = [shard(rank, "a", Place.LOCAL, of=2) for rank in range(2)]
    second = [replace(location, save_id="t-5", host="", place=Place.PERSISTENT) for location in first]
    found = plans(needs, [*second, *first])
    assert [plan.save_id for plan in found] == ["s-5", "t-5"]
    mixed = [first[0], second[1]]
    assert plans(needs, mixed) == []


def test_the_run_is_that_which_disks_know() -> None:
    in_memory = replace(shard(0, "a", Place.MEMORY, of=1), run_id="session")
    (plan,) = plans([need(0, "a", of=1)], [in_memory, shard(0, "spare", of=1)])
    assert (plan.assignments[0].location, plan.run_id) == (in_memory, "run")


@pytest.mark.parametrize(
    ("held", "why"),
    [
        ([], "ranks 2-4, 7: held nowhere"),
        ([shard(2, "old", Place.LOCAL)], "rank 2: only on old, which runs no rank of this job"),
        ([shard(3, "b", Place.MEMORY)], "rank 3: only in the memory of b"),
        ([shard(rank, "b", of=16) for rank in range(16)], "ranks 2-4, 7: held nowhere"),
    ],
)
def test_the_reason_of_a_loss_is_told(held: list[ShardLocation], why: str) -> None:
    needs = [need(rank, "b" if rank == 0 else "a") for rank in range(8)]
    here = [shard(rank, "a", Place.LOCAL) for rank in (0, 1, 5, 6)]
    assert why in explain_missing(needs, [*here, *held])


def test_another_number_of_ranks_is_told_as_the_reason() -> None:
    text = explain_missing(
        [need(0, "a", of=2), need(1, "a", of=2)], [shard(0, "a", of=4), shard(1, "a", of=4)]
    )
    assert text == (
        "step 5 (save s-5) lacks the shards of ranks 0-1: saved by a job of 4 ranks, this one has 2."
    )


def test_older_losses_are_counted_and_no_loss_is_no_riddle() -> None:
    held = [replace(shard(1, "a"), step=step, save_id=f"s-{step}") for step in range(1, 6)]
    text = explain_missing([need(0, "a"), need(1, "a")], held)
    assert text.count("lacks") == 3
    assert text.endswith("2 older saves are not whole either.")
    assert explain_missing([need(1, "a")], held) == "no save that was found lacks a shard."


def test_of_whole_saves_of_other_numbers_of_ranks_the_newest_says_how_many_to_start() -> None:
    needs = [need(rank, "a", of=3) for rank in range(3)]
    older = [shard(rank, "a", of=4) for rank in range(4)]
    newer = [replace(shard(rank, "a", of=2), step=6, save_id="s-6") for rank in range(2)]
    parts = [replace(shard(rank, "a", of=4), step=7, save_id="s-7") for rank in range(3)]
    found = find_refused_saves(needs, [*newer, *older, *parts])
    assert (found.step, found.ranks, found.saves) == (6, 2, 3)
    assert find_refused_saves(needs, [*newer, *parts], above=6).ranks == 0
    in_memory = [replace(location, place=Place.MEMORY) for location in newer]
    assert find_refused_saves(needs, in_memory).refusal() is None
