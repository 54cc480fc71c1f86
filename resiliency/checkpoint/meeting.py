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
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from resiliency.checkpoint.agreement import Agreement
from resiliency.checkpoint.peers.placement import Peer
from resiliency.checkpoint.peers.table import PeerTable
from resiliency.checkpoint.wire import Attach
from resiliency.errors import ConfigError, ResiliencyError
from resiliency.runtime import RunInfo

#: Any port does: nothing is sent to find out by which way another host is reached.
_SOME_PORT = 9


@dataclass(frozen=True, kw_only=True)
class _Member:
    """What a rank says of itself."""

    host: str
    session: str
    tiers: tuple[str, ...]
    token: str
    groups: frozenset[str]
    domains: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """All ranks of this start of the job, by rank."""

    members: tuple[_Member, ...]

    @property
    def session(self) -> str:
        """The name of this start of the job."""
        return self.members[0].session

    @property
    def hosts(self) -> dict[str, tuple[int, ...]]:
        """The ranks of each host, hosts in the order of their first ranks."""
        hosts: dict[str, tuple[int, ...]] = {}
        for rank, member in enumerate(self.members):
            hosts[member.host] = (*hosts.get(member.host, ()), rank)
        return hosts


def meet(agreement: Agreement, info: RunInfo, *, tiers: tuple[str, ...], groups: Collection[str]) -> Meeting:
    """Learn who is there; collective.

    Args:
        groups: of this rank, outside of which its host's copies belong; see `Peer.groups`.
    Raises:
        ConfigError: ranks were given different tiers; the same on all ranks.
    """
    first = agreement.rank == 0
    me = _Member(
        host=info.host,
        session=uuid.uuid4().hex,
        tiers=tiers,
        token=secrets.token_hex(32) if first else "",
        groups=frozenset(groups) - {""},
        domains=info.domains,
    )
    meeting = Meeting(members=tuple(agreement.gather(me)))
    for rank, member in enumerate(meeting.members):
        if member.tiers != meeting.members[0].tiers:
            raise ConfigError(
                f"rank {rank} saves to the tiers {', '.join(member.tiers)},"
                f" rank 0 to {', '.join(meeting.members[0].tiers)}.",
                hint="Give all ranks the same directories.",
                rank=rank,
            )
    return meeting


def introduce_agents(
    agreement: Agreement, meeting: Meeting, attach: Attach, *, port: int, path: Path, info: RunInfo
) -> PeerTable:
    """Tell all hosts where the agents are; collective.

    Args:
        attach: what this rank said to its agent.
        port: of this host's agent; 0 if it has none, and then other hosts cannot send anything to it.
        path: for the table, see above.
    Returns:
        What is in `path` now, which the first rank of each host has its agent read.
    Raises:
        ConfigError: a rank could not write it; on the others PeerError.
    """
    known = agreement.gather((own_address(info), port))
    hosts = meeting.hosts
    table = PeerTable(
        session=meeting.session,
        run_id=attach.run_id,
        token=meeting.members[0].token,
        leader=meeting.members[0].host,
        replicas=attach.settings.replicas,
        bytes_per_s=attach.settings.replication_bytes_per_s,
        keep=attach.settings.local_keep,
        peers=tuple(
            Peer(
                host=host,
                address=known[ranks[0]][0],
                port=known[ranks[0]][1],
                ranks=ranks,
                domains=meeting.members[ranks[0]].domains,
                groups=tuple(sorted({group for rank in ranks for group in meeting.members[rank].groups})),
            )
            for host, ranks in hosts.items()
        ),
    )
    error: ResiliencyError | None = None
    if agreement.rank == hosts[attach.host][0]:
        try:
            table.write(path)
        except OSError as failure:
            error = ConfigError(f"the table of hosts cannot be written: {failure}.", path=str(path))
    agreement.check(error, "telling the agents of each other")
    return table


def own_address(info: RunInfo) -> str:
    """Where other hosts reach this one."""
    if info.peer_address:
        return info.peer_address
    master = os.environ.get("MASTER_ADDR", "")
    if master:
        # The address of the interface towards a host that all of them reach.
        for family in (socket.AF_INET, socket.AF_INET6):
            try:
                with socket.socket(family, socket.SOCK_DGRAM) as probe:
                    probe.connect((master, _SOME_PORT))
                    return str(probe.getsockname()[0])
            except OSError:
                continue
    return socket.gethostname()
