# SPDX-License-Identifier: Apache-2.0
"""Which host keeps whose copies: the same answer on all hosts, without asking.

Each pair of hosts has a score, drawn by a hash of their two names (rendezvous hashing): an owner's
copies go to the hosts with its highest scores.  So when a host comes or goes, the other hosts' copies
stay where they are, but for few.  Scores come second, though.  First, a copy should not be lost with
its owner: the fewer labels of failure domains (rack, power, block) a host shares with the owner and
with the copies before it, the better; then, the fewer groups it shares with them (`Peer.groups`), as
what breaks one rank of a parallel group often breaks them all.  And no host keeps more than one copy
above its share, since memory and disk of all hosts are alike.

Any number of hosts from two on will do, even or odd.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

from resiliency.errors import ConfigError

#: Scores are whole numbers below this.
_SCORES = 1 << 64
#: Odd, and its bits without a pattern: the golden ratio's.
_SCATTER = 0x9E3779B97F4A7C15
#: A shared failure domain weighs more than any number of shared groups.
_DOMAIN, _GROUP = 1 << 32, 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """One host of the job, as the others see it.

    Args:
        host: its name, unique in the job.
        address: where its agent listens, on `port`.
        ranks: that run there.
        domains: what it may fail together with, as (label, value), such as ("rack", "r7").
        groups: labels of the groups that its ranks are members of: parallel groups, whose ranks may fail
            together, and groups of ranks that stand in for each other, which hold the same state.
    """

    host: str
    address: str
    port: int
    ranks: tuple[int, ...] = ()
    domains: tuple[tuple[str, str], ...] = ()
    groups: tuple[str, ...] = ()


def choose_targets(
    source_host: str, peers: Sequence[Peer], replicas: int, *, exclude: Collection[str] = ()
) -> list[str]:
    """Hosts to keep the copies of `source_host`, best first.

    The first `replicas` are where the copies belong; the others follow as fall-backs, for when one of
    those is full or dead.

    Args:
        source_host: one of `peers`.
        exclude: hosts to leave out, which changes nothing for the others.
    Returns:
        All hosts but the owner and the excluded.
    Raises:
        ConfigError: two peers have one name, the owner is none of them, or `replicas` is negative.
    """
    return [host for host in _placement(tuple(peers), replicas).targets(source_host) if host not in exclude]


def preferred(name: str, peers: Iterable[Peer], *, away_from: Collection[Peer]) -> list[str]:
    """Hosts for one more copy of `name`, best first, without regard to what they keep already.

    Args:
        away_from: hosts that have it, or will: a copy that fails together with one of them is worth less.
    """
    return _Hosts(peers).ranking(name, away_from)


@lru_cache(maxsize=4)  # it answers for all owners at once, and the same peers are asked about again and again
def _placement(peers: tuple[Peer, ...], replicas: int) -> _Placement:
    return _Placement(peers, replicas)


class _Placement:
    """Where the copies of all owners belong.

    Owners choose one after another, in an order drawn by hash, each the best hosts that have room left;
    the room is one copy more than the share.
    """

    def __init__(self, peers: Sequence[Peer], replicas: int) -> None:
        _check(peers, replicas)
        self._hosts = _Hosts(peers)
        self._replicas = min(replicas, len(peers) - 1)
        order = sorted(self._hosts.peers, key=lambda host: (_draw(host), host))
        chosen = self._choose(order)
        self._chosen = _ring(order, self._replicas) if chosen is None else chosen

    def targets(self, source_host: str) -> list[str]:
        """Hosts with its copies first, then all others but itself."""
        peers = self._hosts.peers
        if source_host not in peers:
            raise ConfigError(
                f"host {source_host!r} is none of the {len(peers)} hosts of the job.",
                hint="Is the table of peers from an earlier attempt?",
                host=source_host,
            )
        chosen = self._chosen[source_host]
        taken = {source_host, *chosen}
        rest = self._hosts.ranking(source_host, [peers[host] for host in (source_host, *chosen)])
        return [*chosen, *(host for host in rest if host not in taken)]

    def _choose(self, order: list[str]) -> dict[str, list[str]] | None:
        """The choice of each owner; None if there is no room for one of the last."""
        names, peers = self._hosts.names, self._hosts.peers
        room = dict.fromkeys(names, self._replicas + 1)
        chosen: dict[str, list[str]] = {}
        for source_host in order:
            mine: list[str] = []
            for _ in range(self._replicas):
                taken = {source_host, *mine}
                away_from = [peers[host] for host in (source_host, *mine)]
                queue = list(zip(self._hosts.distances(source_host, away_from), names, strict=True))
                heapq.heapify(queue)
                best = source_host
                while best in taken or not room[best]:
                    if not queue:
                        return None
                    best = heapq.heappop(queue)[1]
                mine.append(best)
                room[best] -= 1
            chosen[source_host] = mine
        return chosen


class _Hosts:
    """Peers, and how well each suits as a place for a copy."""

    def __init__(self, peers: Iterable[Peer]) -> None:
        self.peers = {peer.host: peer for peer in sorted(peers, key=lambda peer: peer.host)}
        self.names = list(self.peers)
        self._draws = [_draw(name) for name in self.names]
        self._in_domain: dict[tuple[str, str], list[int]] = defaultdict(list)
        self._in_group: dict[str, list[int]] = defaultdict(list)
        for number, peer in enumerate(self.peers.values()):
            for domain in set(peer.domains):
                self._in_domain[domain].append(number)
            for group in set(peer.groups):
                self._in_group[group].append(number)

    def distances(self, name: str, away_from: Iterable[Peer]) -> list[int]:
        """Of each host, in the order of `names`: the smaller, the better."""
        penalties = [0] * len(self.names)
        groups: set[str] = set()
        for peer in away_from:
            groups.update(peer.groups)
            for domain in set(peer.domains):
                for number in self._in_domain.get(domain, ()):
                    penalties[number] += _DOMAIN
        for group in groups:
            for number in self._in_group.get(group, ()):
                penalties[number] += _GROUP
        own = _draw(name, salt=b"owner")
        # Two drawn numbers need little to become a third; to hash each pair of names takes ten times as long.
        return [
            (penalty + 1) * _SCORES - (own ^ draw) * _SCATTER % _SCORES
            for penalty, draw in zip(penalties, self._draws, strict=True)
        ]

    def ranking(self, name: str, away_from: Iterable[Peer]) -> list[str]:
        """All hosts, best first."""
        distances = self.distances(name, away_from)
        return [host for _, host in sorted(zip(distances, self.names, strict=True))]


def _ring(order: list[str], replicas: int) -> dict[str, list[str]]:
    """The exact share for each host, whatever its domain.

    For when few hosts keep so many copies (at least 3 of each, on at most 9 hosts; or 4 on 16, ...)
    that those who chose first left no room for the last.
    """
    twice = order * 2
    return {source_host: twice[place + 1 : place + 1 + replicas] for place, source_host in enumerate(order)}


def _draw(name: str, *, salt: bytes = b"") -> int:
    """A number below 2**64 that is the same wherever it is drawn."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8, salt=salt).digest(), "little")


def _check(peers: Sequence[Peer], replicas: int) -> None:
    if replicas < 0:
        raise ConfigError(f"a host has 0 copies or more on others, found {replicas}.", replicas=replicas)
    names = [peer.host for peer in peers]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ConfigError(
            f"several hosts are called {', '.join(twice)}.",
            hint="Set NODE_NAME to a name of its own on each.",
        )
