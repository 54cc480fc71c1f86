# SPDX-License-Identifier: Apache-2.0
"""What ranks learn of each other at the start: which of them share a host, and where hosts are reached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from resiliency.checkpoint.agent.protocol import Attach, Settings
from resiliency.checkpoint.machine import Machine
from resiliency.checkpoint.ranks import RankGroup
from resiliency.checkpoint.replication.hosts import HostTable
from resiliency.checkpoint.trainer.rendezvous import Rendezvous, address_among, exchange_agent_addresses, meet
from resiliency.errors import ConfigError
from resiliency.runtime import RunInfo
from tests.checkpoint.agreeing_threads import ends_of
from tests.checkpoint.containers import NEW_NETWORK, run_in_container

HERE = Machine(boot="b1", network="n1", memory="m1")
ELSEWHERE = Machine(boot="b2", network="n9", memory="m9")
INFO = RunInfo(host="node-1")


def meetings(
    machines: Sequence[Machine], infos: Sequence[RunInfo] | None = None, arenas: Sequence[str] | None = None
) -> list[Rendezvous | BaseException]:
    """What each rank learns, or why not."""
    infos = infos or [INFO] * len(machines)

    def rank(rank_group: RankGroup) -> Rendezvous:
        machine, info = machines[rank_group.rank], infos[rank_group.rank]
        arena = arenas[rank_group.rank] if arenas else info.host
        return meet(rank_group, info, tiers=("local",), groups=(), machine=machine, arena=arena)

    return ends_of(len(machines), rank)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (ELSEWHERE, "they run on two machines"),
        (replace(HERE, network="n2"), "two network namespaces"),
        (replace(HERE, memory="m2"), "do not share their memory"),
    ],
)
def test_ranks_of_one_host_name_that_cannot_share_an_agent_are_refused_on_all_ranks(
    other: Machine, why: str
) -> None:
    for end in meetings([HERE, HERE, other]):
        assert isinstance(end, ConfigError)
        assert "ranks 0 and 2 are both on host 'node-1'" in str(end)
        assert why in str(end)
        assert "NODE_NAME" in str(end)


def test_two_launchers_of_one_host_name_are_refused_on_all_ranks() -> None:
    infos = [replace(INFO, node_rank=rank, local_rank=0) for rank in range(2)]
    for end in meetings([HERE, HERE], infos):
        assert isinstance(end, ConfigError)
        assert "two launchers started them, each with LOCAL_RANK 0" in str(end)
        assert "NODE_NAME" in str(end)


@pytest.mark.parametrize(
    ("disks", "arenas", "why", "what_to_set"),
    [
        ("ab", "cc", "share the memory file system and the network", "NODE_NAME"),
        ("aa", "cd", "have one directory for the local tier", "LocalTier(directory="),
        ("ab", "cd", "", ""),
    ],
)
def test_hosts_on_one_machine_that_would_share_captures_or_local_checkpoints_are_refused_on_all_ranks(
    disks: str, arenas: str, why: str, what_to_set: str
) -> None:
    infos = [replace(INFO, host=host, local_rank=0) for host in ("node-1", "node-2")]
    for end in meetings([replace(HERE, disk=disk) for disk in disks], infos, arenas):
        assert isinstance(end, ConfigError if why else Rendezvous)
        assert not why or f"hosts 'node-1' and 'node-2' {why}" in str(end).replace(
            "are on one machine and ", ""
        )
        assert what_to_set in str(end)


def test_ranks_that_see_one_device_each_and_all_have_local_rank_0_are_one_host() -> None:
    infos = [replace(INFO, node_rank=0, local_rank=0) for _ in range(2)]
    for end in meetings([HERE, HERE], infos):
        assert isinstance(end, Rendezvous)
        assert end.hosts == {"node-1": (0, 1)}


def test_what_could_not_be_found_out_about_a_machine_is_no_difference() -> None:
    for end in meetings([HERE, Machine(), replace(HERE, boot="")]):
        assert isinstance(end, Rendezvous)


def test_this_process_shares_its_machine_with_itself_and_not_with_another_memory(tmp_path: Path) -> None:
    mine = Machine.of_this_process(tmp_path)
    assert mine.difference_from(Machine.of_this_process(tmp_path)) == ""
    assert "memory" in mine.difference_from(Machine.of_this_process(tmp_path.parent))
    assert Machine.of_this_process(tmp_path / "missing").memory == ""


def test_containers_on_one_machine_fail_together_unless_their_domains_say_otherwise() -> None:
    infos = [
        RunInfo(host="pod-0", domains=(("rack", "r1"),)),
        RunInfo(host="pod-1"),
        RunInfo(host="pod-2", domains=(("node", "n7"),)),
    ]
    for end in meetings([HERE, HERE, HERE], infos):
        assert isinstance(end, Rendezvous)
        domains = [dict(member.domains) for member in end.members]
        assert domains == [{"rack": "r1", "node": "b1"}, {"node": "b1"}, {"node": "n7"}]


def tables(
    machines: Sequence[Machine], addresses: Sequence[str], root: Path
) -> list[HostTable | BaseException]:
    """What each rank hands to its agent; each is a host by itself."""
    settings = Settings(
        directory="", keep=1, replicated=False, bytes_per_s=0, save_timeout_s=60.0, local_directory="/local"
    )

    def rank(rank_group: RankGroup) -> HostTable:
        number = rank_group.rank
        info = RunInfo(host=f"node-{number}", peer_address=addresses[number])
        rendezvous = meet(rank_group, info, tiers=("local",), groups=(), machine=machines[number])
        attach = Attach(
            rank=number,
            world_size=len(machines),
            local_ranks=(number,),
            run_id="run",
            attempt_id=rendezvous.attempt_id,
            host=info.host,
            settings=settings,
        )
        path = root / f"table-{number}"
        return exchange_agent_addresses(
            rank_group, rendezvous, attach, port=4000 + number, path=path, info=info
        )

    return ends_of(len(machines), rank)


def test_a_host_that_only_knows_a_loopback_address_of_itself_is_refused_where_there_are_other_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As /etc/hosts of Debian gives it to the host's own name; there is no way to the other one either.
    monkeypatch.setenv("MASTER_ADDR", "127.0.1.1")
    for end in tables([HERE, ELSEWHERE], ["", "255.255.255.255"], tmp_path):
        assert isinstance(end, ConfigError)
        assert "host 'node-0' would be reached at 127.0.0.1" in str(end)
        assert "RESILIENCY_PEER_ADDRESS" in str(end)


def test_hosts_on_one_machine_may_reach_each_other_by_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.1.1")
    for end in tables([HERE, replace(HERE, memory="m2")], ["", ""], tmp_path):
        assert isinstance(end, HostTable)
        assert [peer.port for peer in end.peers] == [4000, 4001]


def test_a_loopback_address_gives_way_to_that_of_the_interface_towards_another_host() -> None:
    network = ("ip link set lo up", "ip addr add 192.0.2.1/24 dev lo")
    others = ["127.0.0.1", "192.0.2.9"]
    assert run_in_container(NEW_NETWORK, network, lambda: address_among(others, "127.0.1.1")) == "192.0.2.1"
    assert address_among(others, "10.0.0.7") == "10.0.0.7"
