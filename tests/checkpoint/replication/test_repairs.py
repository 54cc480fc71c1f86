# SPDX-License-Identifier: Apache-2.0
"""Repairs bring back the copies that a loss took, and leave alone what is enough."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resiliency.checkpoint.locations import Place, ShardLocation
from resiliency.checkpoint.replication.placement import Peer
from resiliency.checkpoint.replication.repairs import Push, repairs
from resiliency.errors import ConfigError

RANKS_PER_HOST = 2


def peer(number: int, *, runs: int | None = None, rack: str = "") -> Peer:
    """Host `number`, which runs the ranks that host `runs` ran before."""
    first = (number if runs is None else runs) * RANKS_PER_HOST
    return Peer(
        host=f"h{number}",
        address="192.0.2.1",
        port=1,
        ranks=tuple(range(first, first + RANKS_PER_HOST)),
        domains=(("rack", rack),) if rack else (),
    )


def saved(source_host: int, on: int, *, save_id: str = "s-9") -> list[ShardLocation]:
    """What host `on` has of the checkpoint of host `source_host`."""
    place = Place.LOCAL if source_host == on else Place.REPLICA
    root = f"/h{on}" if source_host == on else f"/h{on}/replicas/h{source_host}"
    return [
        ShardLocation(
            step=9, save_id=save_id, run_id="run", rank=rank, world_size=64, host=f"h{on}", place=place,
            root=root, size_bytes=5,
        )
        for rank in range(source_host * RANKS_PER_HOST, (source_host + 1) * RANKS_PER_HOST)
    ]  # fmt: skip


@dataclass(frozen=True)
class World:
    peers: list[Peer]
    locations: list[ShardLocation]
    copies: int

    def holders(self, pushes: Sequence[Push] = ()) -> dict[str, set[str]]:
        """Owner -> live hosts with its checkpoint, after `pushes`."""
        live = {peer.host for peer in self.peers}
        found = defaultdict(set)
        for location in self.locations:
            if location.host in live and location.save_id == "s-9" and location.source_host:
                found[location.source_host].add(location.host)
        for push in pushes:
            found[push.source_host].add(push.target)
        return dict(found)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    hosts = draw(st.sets(st.integers(0, 7), min_size=1))
    peers = [peer(number, rack=draw(st.sampled_from(["", "1", "2"]))) for number in sorted(hosts)]
    held = draw(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=16, unique=True))
    locations = [location for source_host, on in held for location in saved(source_host, on)]
    other = draw(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=4))
    locations += [location for source_host, on in other for location in saved(source_host, on, save_id="t-9")]
    return World(peers, locations, draw(st.integers(0, 3)))


@given(worlds())
def test_after_the_pushes_every_checkpoint_that_is_left_is_on_enough_live_hosts(world: World) -> None:
    before = world.holders()
    pushes = repairs("s-9", world.locations, world.peers, world.copies)
    enough = min(world.copies + 1, len(world.peers))
    for source_host, hosts in world.holders(pushes).items():
        assert len(hosts) == max(enough, len(before[source_host]))


@given(worlds())
def test_only_live_holders_send_and_only_to_live_hosts_that_lack_it(world: World) -> None:
    before = world.holders()
    live = {peer.host for peer in world.peers}
    pushes = repairs("s-9", world.locations, world.peers, world.copies)
    assert len({(push.source_host, push.target) for push in pushes}) == len(pushes)
    for push in pushes:
        assert (push.step, push.save_id) == (9, "s-9")
        assert push.holder in before[push.source_host]
        assert push.target in live - before[push.source_host]
        assert any(
            (location.host, location.root, location.source_host) == (push.holder, push.root, push.source_host)
            for location in world.locations
        )


@given(worlds())
def test_repairs_repaired_need_no_more_and_ask_for_the_same_whatever_the_order(world: World) -> None:
    pushes = repairs("s-9", world.locations, world.peers, world.copies)
    assert repairs("s-9", world.locations[::-1], world.peers[::-1], world.copies) == pushes
    new = [location for push in pushes for location in saved(int(push.source_host[1:]), int(push.target[1:]))]
    assert repairs("s-9", world.locations + new, world.peers, world.copies) == []


def job(count: int) -> list[ShardLocation]:
    """Each host's checkpoint and its copy on the next host."""
    return [
        location
        for number in range(count)
        for on in (number, (number + 1) % count)
        for location in saved(number, on)
    ]


def test_a_host_that_took_over_the_ranks_of_a_lost_one_gets_their_checkpoint() -> None:
    peers = [peer(0), peer(7, runs=1), peer(2), peer(3)]
    pushes = repairs("s-9", job(4), peers, 1)
    assert {(push.source_host, push.holder, push.target) for push in pushes} == {
        ("h1", "h2", "h7"),  # its own copy, on the host that runs its ranks now
        ("h0", "h0", next(push.target for push in pushes if push.source_host == "h0")),
    }


@pytest.mark.parametrize("lost", range(8))
@pytest.mark.parametrize("shuffled", [False, True])
def test_a_host_that_lost_its_disk_gets_its_own_checkpoint_back(shuffled: bool, lost: int) -> None:
    held = [location for location in job(8) if location.host != f"h{lost}"]
    peers = [peer(number) for number in range(8)]
    if shuffled:  # no host runs the ranks now that any host ran before
        peers = [replace(each, ranks=(number, number + 8)) for number, each in enumerate(peers)]
    pushes = repairs("s-9", held, peers, 1)
    back = (f"h{lost}", f"h{(lost + 1) % 8}", f"h{lost}")
    assert back in {(push.source_host, push.holder, push.target) for push in pushes}


def test_a_copy_goes_to_another_rack_than_the_one_that_is_left() -> None:
    racks = ["a", "a", "a", "b"]
    peers = [peer(number, rack=rack) for number, rack in enumerate(racks)]
    (push,) = repairs("s-9", saved(6, 0), peers, 1)
    assert push.target == "h3"


def test_neither_sending_nor_keeping_is_left_to_one_host() -> None:
    live = [peer(number) for number in range(10)]
    held = [location for source_host in range(20, 30) for on in (0, 1) for location in saved(source_host, on)]
    pushes = repairs("s-9", held, live, 2)
    assert Counter(push.holder for push in pushes) == {"h0": 5, "h1": 5}
    assert max(Counter(push.target for push in pushes).values()) <= 2


def test_copies_in_memory_and_on_shared_storage_do_not_count() -> None:
    here = saved(0, 0)
    elsewhere = [
        replace(location, host=host, place=place, root="")
        for location in here
        for host, place in (("h1", Place.MEMORY), ("", Place.PERSISTENT))
    ]
    (push,) = repairs("s-9", here + elsewhere, [peer(0), peer(1)], 1)
    assert push == Push(holder="h0", source_host="h0", step=9, save_id="s-9", target="h1", root="/h0")


def test_a_copy_that_lost_a_rank_is_no_copy() -> None:
    damaged = [*saved(0, 0), saved(0, 1)[0]]
    (push,) = repairs("s-9", damaged, [peer(0), peer(1)], 1)
    assert (push.holder, push.target) == ("h0", "h1")


def test_fewer_copies_than_none_are_refused() -> None:
    with pytest.raises(ConfigError, match="found -1"):
        repairs("s-9", [], [], -1)
