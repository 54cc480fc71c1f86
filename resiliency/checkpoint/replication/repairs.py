# SPDX-License-Identifier: Apache-2.0
"""After a restore: which hosts copy what to whom, so that the save can bear the next loss too.

What is copied is all that one host saved of a step, its *owner's* directory, whether the owner still
lives or not.  Copies in memory do not count, for the next captures take their place; nor does shared
storage, which is there for the loss of all copies at once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from resiliency.checkpoint.locations import Place, ShardLocation
from resiliency.checkpoint.names import directory_name
from resiliency.checkpoint.replication.placement import Peer, preferred
from resiliency.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Push:
    """Have `holder` send its copy of a host's committed step to `target`.

    Args:
        holder: host that has it.
        source_host: directory name of the host that saved it; if that is the holder's own, the copy is its
            local checkpoint, else it is under the holder's ``replicas/<owner>``.
        root: of the storage on the holder that the step lies in.
    """

    holder: str
    source_host: str
    step: int
    save_id: str
    target: str
    root: str = ""


@dataclass(frozen=True, kw_only=True)
class _Owned:
    """All that one host saved, and which live hosts have it whole."""

    source_host: str
    step: int
    ranks: frozenset[int]
    roots: Mapping[str, str]  # by host


def repairs(
    save_id: str, locations: Iterable[ShardLocation], peers: Sequence[Peer], copies: int
) -> list[Push]:
    """What brings every shard of a save back to `copies` copies beside the first, all on live hosts.

    Nothing that has enough is moved.  A host that runs the ranks of an owner that is gone comes first as
    a target, as it then restarts from its own disk; then hosts that are unlikely to fail together with
    the holders.  Sending and keeping are spread evenly.

    Args:
        save_id: the save that was restored.
        locations: that are known to be good, of any save.
        peers: the hosts of the job as it runs now; others neither send nor keep.
    Raises:
        ConfigError: `copies` is negative.
    """
    if copies < 0:
        raise ConfigError(f"a host has 0 copies or more on others, found {copies}.", copies=copies)
    live = {peer.host: peer for peer in peers}
    short = []
    for owned in _all_owned(save_id, locations, live):
        lacking = min(copies + 1, len(live)) - len(owned.roots)
        if lacking > 0:
            short.append((owned, lacking))
    room = -(-sum(lacking for _, lacking in short) // max(1, len(live))) + 1
    sent: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    pushes = []
    for owned, lacking in short:
        for target in _targets(owned, lacking, live, kept, room):
            holder = min(owned.roots, key=lambda host: (sent[host], host))
            sent[holder] += 1
            kept[target] += 1
            pushes.append(
                Push(
                    holder=holder,
                    source_host=owned.source_host,
                    step=owned.step,
                    save_id=save_id,
                    target=target,
                    root=owned.roots[holder],
                )
            )
    return pushes


def _all_owned(save_id: str, locations: Iterable[ShardLocation], live: Mapping[str, Peer]) -> list[_Owned]:
    steps: dict[str, int] = {}
    found: dict[str, dict[tuple[str, str], set[int]]] = defaultdict(lambda: defaultdict(set))
    for location in locations:
        if (
            location.save_id == save_id
            and location.place in (Place.LOCAL, Place.REPLICA)
            and location.host in live
        ):
            steps[location.source_host] = location.step
            found[location.source_host][location.host, location.root].add(location.rank)
    all_owned = []
    for source_host, copies in sorted(found.items()):
        # A copy is committed as a whole, so one with fewer ranks than another has lost some since.
        whole = max(len(ranks) for ranks in copies.values())
        roots: dict[str, str] = {}
        for (host, root), ranks in sorted(copies.items()):
            if len(ranks) == whole:
                roots.setdefault(host, root)
        saved = frozenset(copies[next(iter(roots.items()))])
        all_owned.append(_Owned(source_host=source_host, step=steps[source_host], ranks=saved, roots=roots))
    return all_owned


def _targets(
    owned: _Owned, lacking: int, live: Mapping[str, Peer], kept: Mapping[str, int], room: int
) -> list[str]:
    """Where `lacking` more copies go."""
    chosen: list[str] = []
    for _ in range(lacking):
        have = {*owned.roots, *chosen}
        free = [peer for host, peer in live.items() if host not in have]
        homes = [peer for peer in free if owned.ranks.issubset(peer.ranks)] or [
            peer for peer in free if directory_name(peer.host) == owned.source_host
        ]
        ranking = preferred(owned.source_host, homes or free, away_from=[live[host] for host in sorted(have)])
        chosen.append(next((host for host in ranking if homes or kept.get(host, 0) < room), ranking[0]))
    return chosen
