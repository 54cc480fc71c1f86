# SPDX-License-Identifier: Apache-2.0
"""How much of what a host holds is listed for all ranks at once.

A gathering costs every rank the longest list times the number of ranks, and a host whose steps did not become
complete for long has hundreds of them.  So hosts list their newest steps, of the others only the numbers, and
then all list those steps that may be restored: the newest, and the newest that the most hosts have a part of.
"""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from resiliency.checkpoint.locations import ShardLocation

#: Steps of one host that are listed at once; more than its tiers keep, as a rule.
NEWEST = 16


def split(locations: Sequence[ShardLocation]) -> tuple[list[ShardLocation], list[ShardLocation]]:
    """Those of the newest steps, and the rest."""
    newest = set(sorted({location.step for location in locations})[-NEWEST:])
    return (
        [location for location in locations if location.step in newest],
        [location for location in locations if location.step not in newest],
    )


def pack(locations: Iterable[ShardLocation]) -> bytes:
    """Which steps there are of each host that saved; some bytes for hundreds."""
    steps: dict[str, set[int]] = defaultdict(set)
    for location in locations:
        steps[_source_of(location)].add(location.step)
    if not steps:
        return b""
    return zlib.compress(json.dumps({source: sorted(found) for source, found in steps.items()}).encode())


def unpack(packed: bytes) -> dict[str, list[int]]:
    """The inverse of `pack`."""
    return json.loads(zlib.decompress(packed)) if packed else {}


def likely_steps(
    listed: Iterable[ShardLocation], others: Collection[Mapping[str, Sequence[int]]]
) -> set[int]:
    """Of all steps those to be listed in full first; the same for the same arguments.

    Args:
        listed: already.
        others: what all hosts have besides, as `unpack` gives it.
    """
    sources: dict[int, set[str]] = defaultdict(set)
    for location in listed:
        sources[location.step].add(_source_of(location))
    for by_source in others:
        for source, steps in by_source.items():
            for step in steps:
                sources[step].add(source)
    most = max(map(len, sources.values()), default=0)
    widest = sorted(step for step, found in sources.items() if len(found) == most)
    return {*sorted(sources)[-NEWEST:], *widest[-NEWEST:]}


def _source_of(location: ShardLocation) -> str:
    return location.source_host or location.host
