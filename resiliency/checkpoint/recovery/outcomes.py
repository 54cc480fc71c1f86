# SPDX-License-Identifier: Apache-2.0
"""What all ranks make of one attempt to restore: a failure of one is first agreed, then acted on.

What a rank does next depends on the kind of the failure, and must be the same on all of them.
"""

from __future__ import annotations

from enum import IntEnum

from resiliency.checkpoint.ranks import RankGroup
from resiliency.errors import (
    CheckpointCorrupt,
    CheckpointIncomplete,
    CheckpointMissing,
    LayoutMismatch,
    PeerError,
    ResiliencyError,
)


class _Kind(IntEnum):
    """Of failures on several ranks the first of these decides what happens on all."""

    OTHER = 0
    BAD = 1
    UNFIT = 2


_RAISED: dict[_Kind, type[ResiliencyError]] = {_Kind.OTHER: PeerError, _Kind.UNFIT: LayoutMismatch}


def agree(rank_group: RankGroup, error: ResiliencyError | None, doing: str) -> dict[int, str]:
    """Ranks whose source is bad, and why: those sources are to be skipped, on all ranks.

    Empty: all ranks succeeded.  A source that is bad for one rank is skipped also where it does not
    fit another.

    Args:
        error: of this rank.
    Raises:
        ResiliencyError: a rank failed for another reason; of the same kind on all ranks, and on those
            that have such an error their own.
    """
    found = rank_group.gather(None if error is None else (_kind(error), str(error)))
    failures = [(*outcome, rank) for rank, outcome in enumerate(found) if outcome is not None]
    if not failures:
        return {}
    worst, text, first = min(failures)
    if worst is _Kind.BAD:
        return {rank: text for kind, text, rank in failures if kind is _Kind.BAD}
    if error is not None and _kind(error) == worst:
        raise error
    raise _RAISED[worst](f"rank {first}, while {doing}: {text}", rank=first)


def _kind(error: ResiliencyError) -> _Kind:
    if isinstance(error, CheckpointCorrupt | CheckpointIncomplete | CheckpointMissing):
        return _Kind.BAD
    return _Kind.UNFIT if isinstance(error, LayoutMismatch) else _Kind.OTHER
