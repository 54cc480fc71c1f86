# SPDX-License-Identifier: Apache-2.0
"""Lists of holdings travel between ranks and come out as they went in."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resiliency.checkpoint.locations import Place, ShardLocation, decode, encode
from resiliency.checkpoint.names import directory_name
from resiliency.errors import PeerError

names = st.text(max_size=6)
numbers = st.integers(0, 2**40)
anything = st.builds(
    ShardLocation,
    step=numbers,
    save_id=names,
    run_id=names,
    rank=numbers,
    world_size=numbers,
    host=names,
    place=st.sampled_from(Place),
    root=names,
    digest=names,
    size_bytes=numbers,
    group=names,
)

SHARD = ShardLocation(
    step=7,
    save_id="s-7",
    run_id="r",
    rank=3,
    world_size=8,
    host="h1",
    place=Place.LOCAL,
    root="/local/job",
    digest="xxh3:0123456789abcdef",
    size_bytes=10**9,
)


@given(st.lists(anything, max_size=12))
def test_a_list_survives_the_way_through_json(locations: list[ShardLocation]) -> None:
    back = decode(json.loads(json.dumps(encode(locations))))
    assert sorted(map(repr, back)) == sorted(map(repr, locations))


def test_shards_of_one_directory_say_once_what_they_share() -> None:
    one, many = ([replace(SHARD, rank=rank) for rank in range(count)] for count in (1, 9))
    more = len(json.dumps(encode(many))) - len(json.dumps(encode(one)))
    assert more == 8 * len(json.dumps([3, SHARD.digest, SHARD.size_bytes, ""]) + ", ")


@pytest.mark.parametrize(
    "found", [None, 5, [], [2, []], [1, [[1, 2]]], [1, [[*range(6), "nowhere", "", []]]]]
)
def test_what_another_release_sent_is_refused(found: object) -> None:
    with pytest.raises(PeerError, match="same release"):
        decode(found)


@pytest.mark.parametrize(
    ("place", "host", "root", "source_host"),
    [
        (Place.LOCAL, "h/1", "/local/job", "h%2F1"),
        (Place.REPLICA, "h2", "/local/job/replicas/h%2F1", "h%2F1"),
        (Place.REPLICA, "h2", "/local/job/replicas/h1/", "h1"),
        (Place.MEMORY, "h1", "", ""),
        (Place.PERSISTENT, "", "/shared/job", ""),
    ],
)
def test_a_checkpoint_and_its_copies_have_one_owner(
    place: Place, host: str, root: str, source_host: str
) -> None:
    assert replace(SHARD, place=place, host=host, root=root).source_host == source_host


@given(st.lists(st.text(min_size=1, max_size=5), unique=True, max_size=20))
def test_directories_of_hosts_are_safe_and_never_shared(hosts: list[str]) -> None:
    directories = [directory_name(host) for host in hosts]
    assert len(set(directories)) == len(hosts)
    assert all("/" not in name and "\0" not in name and name not in (".", "..") for name in directories)


def test_plain_host_names_stay_readable() -> None:
    assert directory_name("gke-pool-1.zone_b~2") == "gke-pool-1.zone_b~2"
