# SPDX-License-Identifier: Apache-2.0
"""How ranks and hosts get to know each other when a job starts, and never on the way.

First the ranks learn who shares a host with them, and agree on a name for this start of the job.  Once
every host has its agent, they tell each other where the agents are, and the first rank of each host
hands that to its agent: a table with a secret, for agents have no process group to meet in.
"""

from __future__ import annotations

import os
import secrets
import socket
import uuid
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from resiliency.checkpoint.agent.protocol import Attach
from resiliency.checkpoint.machine import Machine
from resiliency.checkpoint.ranks import RankGroup
from resiliency.checkpoint.replication.hosts import HostTable
from resiliency.checkpoint.replication.placement import Peer
from resiliency.errors import ConfigError, ResiliencyError
from resiliency.runtime import RunInfo, interface_towards, is_loopback

#: Label of the failure domain that every host has: the machine that it runs on.
_NODE = "node"


@dataclass(frozen=True, kw_only=True)
class _Member:
    """What a rank says of itself."""

    host: str
    attempt_id: str
    tiers: tuple[str, ...]
    token: str
    groups: frozenset[str]
    domains: tuple[tuple[str, str], ...]
    machine: Machine
    arena: str
    node_rank: int
    local_rank: int | None


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """All ranks of this start of the job, by rank."""

    members: tuple[_Member, ...]

    @property
    def attempt_id(self) -> str:
        """The name of this start of the job."""
        return self.members[0].attempt_id

    def renamed(self, attempt_id: str) -> Rendezvous:
        """The same ranks under the name of another attempt."""
        first, *others = self.members
        return Rendezvous(members=(replace(first, attempt_id=attempt_id), *others))

    @property
    def hosts(self) -> dict[str, tuple[int, ...]]:
        """The ranks of each host, hosts in the order of their first ranks."""
        hosts: dict[str, tuple[int, ...]] = {}
        for rank, member in enumerate(self.members):
            hosts[member.host] = (*hosts.get(member.host, ()), rank)
        return hosts

    @property
    def shares_loopback(self) -> bool:
        """Whether a loopback address leads to each host: all are on one machine, as in tests."""
        first = self.members[0].machine
        return all(first.shares_loopback_with(member.machine) for member in self.members)


def meet(
    rank_group: RankGroup,
    info: RunInfo,
    *,
    tiers: tuple[str, ...],
    groups: Collection[str],
    machine: Machine | None = None,
    arena: str = "",
) -> Rendezvous:
    """Learn who is there; collective.

    Args:
        groups: of this rank, outside of which its host's copies belong; see `Peer.groups`.
        machine: where this rank runs.
        arena: name of the directory of its captures.
    Raises:
        ConfigError: ranks were given different tiers, or two hosts have one name, one directory for captures
            or one for the local tier; the same on all ranks.
    """
    machine = machine or Machine()
    first = rank_group.rank == 0
    me = _Member(
        host=info.host,
        attempt_id=uuid.uuid4().hex,
        tiers=tiers,
        token=secrets.token_hex(32) if first else "",
        groups=frozenset(groups) - {""},
        domains=_with_node(info.domains, machine),
        machine=machine,
        arena=arena,
        node_rank=info.node_rank,
        local_rank=info.local_rank,
    )
    rendezvous = Rendezvous(members=tuple(rank_group.gather(me)))
    for rank, member in enumerate(rendezvous.members):
        if member.tiers != rendezvous.members[0].tiers:
            raise ConfigError(
                f"rank {rank} saves to the tiers {', '.join(member.tiers)},"
                f" rank 0 to {', '.join(rendezvous.members[0].tiers)}.",
                hint="Give all ranks the same directories.",
                rank=rank,
            )
    for host, ranks in rendezvous.hosts.items():
        _check_is_one_host(host, ranks, rendezvous.members)
    _check_are_apart([rendezvous.members[ranks[0]] for ranks in rendezvous.hosts.values()])
    return rendezvous


def _with_node(domains: tuple[tuple[str, str], ...], machine: Machine) -> tuple[tuple[str, str], ...]:
    """Two hosts of a job may be containers of one machine, which fails as a whole."""
    if not machine.boot or any(label == _NODE for label, _ in domains):
        return domains
    return (*domains, (_NODE, machine.boot))


def _check_is_one_host(host: str, ranks: Sequence[int], members: Sequence[_Member]) -> None:
    """Ranks of one name share an agent; those that cannot would wait for each other in vain."""
    first = members[ranks[0]]
    for rank in ranks[1:]:
        other = members[rank]
        why = first.machine.difference_from(other.machine)
        # Where each rank sees one device all have LOCAL_RANK 0: the launchers differ in GROUP_RANK.
        is_same_place = other.local_rank is not None and other.local_rank == first.local_rank
        if not why and is_same_place and other.node_rank != first.node_rank:
            why = f"two launchers started them, each with LOCAL_RANK {other.local_rank}"
        if why:
            raise ConfigError(
                f"ranks {ranks[0]} and {rank} are both on host {host!r}, but {why}.",
                hint="Set NODE_NAME to a name of its own for each host (in Kubernetes the pod's name), for"
                " its launcher and ranks.",
                host=host,
                rank=rank,
            )


def _check_are_apart(hosts: Iterable[_Member]) -> None:
    """Hosts may be on one machine, but what each keeps there must be its own."""
    memories: dict[tuple[str, ...], str] = {}
    disks: dict[tuple[str, ...], str] = {}
    for member in hosts:
        machine, host = member.machine, member.host
        memory = (machine.boot, machine.network, machine.memory, member.arena)
        if all(memory) and (other := memories.setdefault(memory, host)) != host:
            raise ConfigError(
                f"hosts {other!r} and {host!r} share the memory file system and the network of one machine,"
                " and neither has a name of its own there.",
                hint="Set NODE_NAME to a name of its own for each, for its launcher and ranks.",
                host=host,
            )
        disk = (machine.boot, machine.disk)
        if all(disk) and (other := disks.setdefault(disk, host)) != host:
            raise ConfigError(
                f"hosts {other!r} and {host!r} are on one machine and have one directory for the local tier.",
                hint="Give each its own: LocalTier(directory=f\"/local/{os.environ['NODE_NAME']}\").",
                host=host,
            )


def exchange_agent_addresses(
    rank_group: RankGroup, rendezvous: Rendezvous, attach: Attach, *, port: int, path: Path, info: RunInfo
) -> HostTable:
    """Tell all hosts where the agents are; collective.

    Args:
        attach: what this rank said to its agent.
        port: of this host's agent; 0 if it has none, and then other hosts cannot send anything to it.
        path: for the table, see above.
    Returns:
        What is in `path` now, which the first rank of each host has its agent read.
    Raises:
        ConfigError: a host has no address at which others reach it; the same on all ranks.  Or a rank
            could not write the table; on the others PeerError.
    """
    known = rank_group.gather((own_address(info), port))
    hosts = rendezvous.hosts
    if not rendezvous.shares_loopback and any(is_loopback(known[ranks[0]][0]) for ranks in hosts.values()):
        others = [known[ranks[0]][0] for host, ranks in hosts.items() if host != attach.host]
        known = rank_group.gather((address_among(others, known[rank_group.rank][0]), port))
        _check_addresses({host: known[ranks[0]][0] for host, ranks in hosts.items()})
    table = HostTable(
        attempt_id=rendezvous.attempt_id,
        run_id=attach.run_id,
        token=rendezvous.members[0].token,
        leader=rendezvous.members[0].host,
        replicas=attach.settings.replicas,
        bytes_per_s=attach.settings.replication_bytes_per_s,
        keep=attach.settings.local_keep,
        peers=tuple(
            Peer(
                host=host,
                address=known[ranks[0]][0],
                port=known[ranks[0]][1],
                ranks=ranks,
                domains=rendezvous.members[ranks[0]].domains,
                groups=tuple(sorted({group for rank in ranks for group in rendezvous.members[rank].groups})),
            )
            for host, ranks in hosts.items()
        ),
    )
    error: ResiliencyError | None = None
    if rank_group.rank == hosts[attach.host][0]:
        try:
            table.write(path)
        except OSError as failure:
            error = ConfigError(f"the table of hosts cannot be written: {failure}.", path=str(path))
    rank_group.check(error, "telling the agents of each other")
    return table


def own_address(info: RunInfo) -> str:
    """Where other hosts reach this one, as far as it knows by itself."""
    if info.peer_address:
        return info.peer_address
    master = os.environ.get("MASTER_ADDR", "")
    # The address of the interface towards a host that all of them reach.
    return (interface_towards(master) if master else "") or socket.gethostname()


def address_among(others: Iterable[str], own: str) -> str:
    """`own`, or if that is a loopback address, as where /etc/hosts gives it to the host's name, a better one.

    Args:
        others: addresses of other hosts.
    Returns:
        The address of the interface towards one of `others`; `own` if none leads there.
    """
    if not is_loopback(own):
        return own
    found = (interface_towards(other) for other in others if not is_loopback(other))
    return next((address for address in found if address and not is_loopback(address)), own)


def _check_addresses(addresses: dict[str, str]) -> None:
    for host, address in addresses.items():
        if is_loopback(address):
            raise ConfigError(
                f"host {host!r} would be reached at {address}, which leads the other hosts to themselves.",
                hint="Set RESILIENCY_PEER_ADDRESS there to an address that the other hosts reach.",
                host=host,
            )
