# SPDX-License-Identifier: Apache-2.0
"""Where nothing is left to restore: whether that is a beginning, or all was lost.

A start hides what it finds bad.  The next one, which a launcher makes by itself, must not take what is
hidden for a place where nothing was ever saved: it would train from random weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from resiliency.checkpoint.format.catalog import list_damaged
from resiliency.checkpoint.ranks import RankGroup
from resiliency.checkpoint.recovery.inventory import REPLICAS
from resiliency.checkpoint.storage.interface import Storage
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.errors import CheckpointCorrupt, CheckpointError

#: For errors after which a person has to decide.
START_FROM_SCRATCH = "Mend what the log names, or name other directories to start from scratch on purpose."
#: Of many lost checkpoints the message names as many.
_NAMED = 3


def refuse_lost_checkpoints(
    rank_group: RankGroup, shared_storages: Sequence[Storage], local: Path | None = None
) -> None:
    """Return only where nothing was lost: no checkpoint is damaged, nor was found so by an earlier start.

    For when nothing can be restored; collective.  Saves that never ended count for nothing.

    Args:
        shared_storages: storage that rank 0 looks at for all.
        local: directory of this host's local tier.
    Raises:
        CheckpointCorrupt: on all ranks; names what was lost.
    """
    lines = _damaged_in(shared_storages) if rank_group.rank == 0 else []
    if local is not None:
        own = LocalStorage(local)
        lines += _damaged_in([own, *_replicas(own)])
    # The ranks of a host find the same.
    lost = sorted({line for found in rank_group.gather(lines) for line in found})
    if lost:
        more = f"; and {len(lost) - _NAMED} more" if len(lost) > _NAMED else ""
        raise CheckpointCorrupt(
            f"no checkpoint is left that can be used, but there were some: {'; '.join(lost[:_NAMED])}{more}.",
            hint=START_FROM_SCRATCH,
        )


def _replicas(own: LocalStorage) -> Iterable[LocalStorage]:
    try:
        return [LocalStorage(own.root / REPLICAS / source_host) for source_host in own.list(REPLICAS)]
    except CheckpointError:  # so does `own` itself, which says it
        return []


def _damaged_in(storages: Iterable[Storage]) -> list[str]:
    lines = []
    for storage in storages:
        try:
            lines += list_damaged(storage)
        except CheckpointError as error:  # who cannot look does not know that there is nothing
            lines.append(str(error))
    return lines
