# SPDX-License-Identifier: Apache-2.0
"""Where copies go: even, apart, the same for all who ask, and not moved without need."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resiliency.checkpoint.replication.placement import Peer, choose_targets, preferred
from resiliency.errors import ConfigError


def peer(host: str, *domains: tuple[str, str], groups: Sequence[str] = ()) -> Peer:
    return Peer(host=host, address="192.0.2.1", port=1, domains=domains, groups=tuple(groups))


def cluster(count: int, *, name: str = "host") -> list[Peer]:
    return [peer(f"{name}-{number}") for number in range(count)]


def copies(peers: Sequence[Peer], replicas: int) -> dict[str, list[str]]:
    return {
        source_host.host: choose_targets(source_host.host, peers, replicas)[:replicas]
        for source_host in peers
    }


@st.composite
def peers_of_any_kind(draw: st.DrawFn) -> list[Peer]:
    hosts = draw(st.lists(st.text(min_size=1, max_size=3), min_size=2, max_size=14, unique=True))
    labels = st.lists(
        st.tuples(st.sampled_from(["rack", "block"]), st.sampled_from("123")), max_size=2, unique=True
    )
    groups = st.lists(st.sampled_from("pqrs"), max_size=3)
    return [peer(host, *draw(labels), groups=draw(groups)) for host in hosts]


@given(peers_of_any_kind(), st.integers(0, 5))
def test_each_owner_gets_all_other_hosts_in_an_order(peers: list[Peer], replicas: int) -> None:
    for source_host in peers:
        others = {other.host for other in peers} - {source_host.host}
        targets = choose_targets(source_host.host, peers, replicas)
        assert len(targets) == len(others)
        assert set(targets) == others


@given(peers_of_any_kind(), st.integers(1, 5))
def test_no_host_keeps_more_than_one_copy_above_its_share(peers: list[Peer], replicas: int) -> None:
    kept = Counter(host for hosts in copies(peers, replicas).values() for host in hosts)
    assert max(kept.values()) <= min(replicas, len(peers) - 1) + 1


@given(peers_of_any_kind(), st.integers(1, 3), st.randoms(use_true_random=False))
def test_all_who_know_the_same_hosts_decide_alike(
    peers: list[Peer], replicas: int, order: random.Random
) -> None:
    shuffled = [
        replace(each, domains=each.domains[::-1], groups=each.groups[::-1], address="192.0.2.9")
        for each in order.sample(peers, len(peers))
    ]
    assert copies(peers, replicas) == copies(shuffled, replicas)


@given(peers_of_any_kind(), st.integers(1, 3), st.data())
def test_hosts_that_are_left_out_change_nothing_else(
    peers: list[Peer], replicas: int, data: st.DataObject
) -> None:
    out = data.draw(st.sets(st.sampled_from([each.host for each in peers])))
    for source_host in peers:
        everyone = choose_targets(source_host.host, peers, replicas)
        left = choose_targets(source_host.host, peers, replicas, exclude=out)
        assert left == [host for host in everyone if host not in out]


@given(st.lists(st.integers(1, 6), min_size=2, max_size=6), st.integers(0, 999))
def test_no_copy_shares_its_owners_rack_unless_one_rack_is_more_than_half(
    sizes: list[int], seed: int
) -> None:
    peers = [
        peer(f"{seed}-{rack}-{number}", ("rack", str(rack)))
        for rack, size in enumerate(sizes)
        for number in range(size)
    ]
    rack_of = {each.host: each.domains for each in peers}
    together = sum(rack_of[source_host] == rack_of[host] for source_host, [host] in copies(peers, 1).items())
    if max(sizes) * 2 <= sum(sizes):
        assert together == 0
    else:  # as many as fit go elsewhere: two to each host of the other racks
        assert together <= max(0, max(sizes) - 2 * (sum(sizes) - max(sizes))) + sum(sizes) - max(sizes)


def test_two_copies_and_their_owner_are_in_three_racks() -> None:
    peers = [peer(f"h{number}", ("rack", str(number % 3))) for number in range(12)]
    rack_of = {each.host: each.domains for each in peers}
    for source_host, hosts in copies(peers, 2).items():
        assert len({rack_of[host] for host in [source_host, *hosts]}) == 3


def test_a_host_of_another_rack_in_the_same_block_is_better_than_one_of_the_same_rack() -> None:
    near = peer("near", ("block", "1"), ("rack", "1"))
    same_block = peer("same-block", ("block", "1"), ("rack", "2"))
    far = peer("far", ("block", "2"), ("rack", "3"))
    source_host = peer("owner", ("block", "1"), ("rack", "1"))
    assert choose_targets("owner", [near, same_block, far, source_host], 1) == ["far", "same-block", "near"]


def test_hosts_outside_the_owners_groups_come_before_its_fellows() -> None:
    peers = [peer(f"h{number}", groups=[f"pipeline-{number // 4}"]) for number in range(8)]
    for number, (source_host, [host]) in enumerate(copies(peers, 1).items()):
        assert int(host[1:]) // 4 != number // 4, source_host


def test_a_group_of_which_all_hosts_are_members_moves_no_copy() -> None:
    peers = cluster(5)
    assert copies([replace(each, groups=("all",)) for each in peers], 2) == copies(peers, 2)


def test_of_hosts_in_the_owners_groups_those_that_share_fewest_come_first() -> None:
    source_host, stage = peer("owner", groups="tp"), peer("stage", groups="p")
    shard, other = peer("shard", groups="tp"), peer("other", groups="q")
    assert choose_targets("owner", [shard, source_host, stage, other], 1) == ["other", "stage", "shard"]


def test_another_rack_counts_more_than_another_group() -> None:
    source_host = peer("owner", ("rack", "1"), groups="pqrs")
    fellow, neighbour = peer("fellow", ("rack", "2"), groups="pqrs"), peer("neighbour", ("rack", "1"))
    assert choose_targets("owner", [source_host, neighbour, fellow], 1) == ["fellow", "neighbour"]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("count", [5, 12, 41])
def test_when_a_host_leaves_or_joins_hardly_another_copy_moves(count: int, replicas: int) -> None:
    peers = cluster(count)
    before = copies(peers, replicas)
    moved = stayed = 0
    for gone in peers:
        after = copies([each for each in peers if each != gone], replicas)
        for source_host, hosts in after.items():
            # Those that were on the host that left must go somewhere, and may take a place that another had.
            lost = before[source_host].count(gone.host)
            new = len(set(hosts) - set(before[source_host]))
            moved += max(0, new - lost)
            stayed += replicas - lost
    # Random places would move nearly all, and a ring of hosts by number one per owner next to the gap.
    assert moved <= stayed / count


def test_two_hosts_keep_each_others_copies() -> None:
    assert copies(cluster(2), 1) == {"host-0": ["host-1"], "host-1": ["host-0"]}
    assert copies(cluster(2), 3) == {"host-0": ["host-1"], "host-1": ["host-0"]}


def test_a_host_alone_has_nobody() -> None:
    assert choose_targets("host-0", cluster(1), 1) == []


@pytest.mark.parametrize("seed", range(8))
def test_copies_stay_even_where_the_first_to_choose_leave_no_room_for_the_last(seed: int) -> None:
    # The three of one rack all want the three others, which also keep each other's copies.
    racked = [peer(f"{seed}-racked-{number}", ("rack", "1")) for number in range(3)]
    lonely = [peer(f"{seed}-lonely-{number}") for number in range(3)]
    kept = Counter(host for hosts in copies(racked + lonely, 3).values() for host in hosts)
    assert sum(kept.values()) == 18
    assert max(kept.values()) <= 4


@pytest.mark.parametrize(
    ("source_host", "peers", "replicas", "what"),
    [
        ("x", cluster(3), 1, "none of the 3 hosts"),
        ("host-0", cluster(3) + cluster(1), 1, "several hosts are called host-0"),
        ("host-0", cluster(3), -1, "found -1"),
    ],
)
def test_what_cannot_be_is_refused(source_host: str, peers: list[Peer], replicas: int, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        choose_targets(source_host, peers, replicas)


def test_a_further_copy_goes_where_none_of_the_holders_can_take_it_along() -> None:
    peers = [peer(f"h{number}", ("rack", str(number % 3))) for number in range(6)]
    ranking = preferred("gone", peers[2:], away_from=peers[:2])
    assert set(ranking[:2]) == {"h2", "h5"}
    assert ranking == preferred("gone", peers[:1:-1], away_from=peers[:2])
