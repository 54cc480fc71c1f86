# SPDX-License-Identifier: Apache-2.0
"""Ranks complain about a checkpoint on storage that all hosts see: what they complain about is read again.

A checkpoint is hidden from all readers only when its damage is proven: another rank, on a host without
complaints where there is one, reads the file and finds other bytes in it.  A host with bad memory, a missing
mount or a device error (EIO) proves nothing, and must not cost the job its checkpoints.  Neither does a file
that is missing or too short: somebody may be copying the checkpoint into the directory, and the next start
finds it whole.  Only where a trainer would not save that step again while it stands, it counts as damage.

Each file is read by one rank, however many complain about it, and all ranks that are needed read at once: a
mount that is missing on a thousand hosts costs no more than a bad byte.  The chunks that ranks found bad are
read first: the rest of a large file may take longer than all ranks wait.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import TimeoutError as Unanswered
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TypeVar

from resiliency.checkpoint.format.catalog import quarantine
from resiliency.checkpoint.format.manifest import MANIFEST
from resiliency.checkpoint.format.marker import step_directory, try_read_marker
from resiliency.checkpoint.format.nemo import NEMO_FORMAT, check_unproven
from resiliency.checkpoint.format.reader import CheckpointReader
from resiliency.checkpoint.locations import ShardRequest
from resiliency.checkpoint.ranks import RankGroup
from resiliency.checkpoint.storage.interface import Storage
from resiliency.checkpoint.threads import TaskThread
from resiliency.errors import CheckpointCorrupt, CheckpointIncomplete, ResiliencyError

_T = TypeVar("_T")

logger = logging.getLogger(__name__)

#: Longest time for reading again what ranks complain about: all ranks wait for it.
READ_AGAIN_WITHIN = timedelta(minutes=2)
#: Longest time for writing the marker of a checkpoint that is proven bad, likewise.
HIDE_WITHIN = timedelta(seconds=30)
#: Of one file that many ranks find bad at many places, as many are read before the rest.
_MOST_OFFSETS = 16


@dataclass(frozen=True, order=True)
class Complaint:
    """What a rank could not restore from.

    Args:
        source: the rank whose shard it wanted.
        name: of the file that is bad, relative to the storage; empty: it cannot be told, or is no file.
        offsets: where in that file, in bytes; empty: it cannot be told.
    """

    source: int
    name: str = ""
    offsets: tuple[int, ...] = ()


def complaint_of(storage: Storage, source: int, error: ResiliencyError) -> Complaint:
    """What `error` says that a restore of the shard of `source` ran into."""
    path = error.fields.get("path")
    root = storage.describe()
    if not isinstance(path, str) or not path.startswith(root):
        return Complaint(source)
    offset = error.fields.get("offset")
    offsets = (offset,) if isinstance(offset, int) else ()
    return Complaint(source, path.removeprefix(root).lstrip("/"), offsets)


def choose_readers(
    complaints: Mapping[int, Complaint], needs: Sequence[ShardRequest]
) -> dict[Complaint, int]:
    """Which rank reads what again; the same on all ranks, and each file once.

    Ranks of hosts without complaints read if there are any, else ranks without one, else all; one per host
    first.

    Args:
        complaints: by rank.
        needs: of all ranks, in their order.
    """
    hosts = {needs[rank].host for rank in complaints}
    pool = (
        [need.rank for need in needs if need.host not in hosts]
        or [need.rank for need in needs if need.rank not in complaints]
        or [need.rank for need in needs]
    )
    place: dict[str, int] = {}
    order = []
    for rank in pool:
        place[needs[rank].host] = place.get(needs[rank].host, -1) + 1
        order.append((place[needs[rank].host], rank))
    ordered = [rank for _, rank in sorted(order)]
    files: dict[str, Complaint] = {}
    for complaint in sorted(complaints.values()):
        # Where the file is known, it is the same file for all; else all of the shard is read.
        first = files.setdefault(complaint.name or f"shard {complaint.source}", complaint)
        places = sorted({*first.offsets, *complaint.offsets})[:_MOST_OFFSETS]
        files[complaint.name or f"shard {complaint.source}"] = replace(first, offsets=tuple(places))
    return {complaint: ordered[i % len(ordered)] for i, complaint in enumerate(files.values())}


def try_quarantine(
    rank_group: RankGroup,
    storage: Storage,
    step: int,
    mine: Complaint | None,
    needs: Sequence[ShardRequest],
    *,
    hide_incomplete: bool = False,
    within: timedelta = READ_AGAIN_WITHIN,
    hide_within: timedelta = HIDE_WITHIN,
) -> bool:
    """Hide a checkpoint if it is as bad as ranks found; collective.  Returns whether its damage is proven.

    Args:
        mine: what this rank complains about; None: nothing.
        hide_incomplete: a file that is missing or too short proves it as well.
        within: time to read again; what is not read by then stays.
        hide_within: time to write the marker, after that.
    Raises:
        PeerError: a rank died on the way.
    """
    gathered = rank_group.gather(mine)
    complaints = {rank: complaint for rank, complaint in enumerate(gathered) if complaint is not None}
    readers = choose_readers(complaints, needs)
    here = [complaint for complaint, rank in readers.items() if rank == rank_group.rank]
    proof = _read_again(storage, step, here, within, hide_incomplete) if here else None
    proofs = {rank: proof for rank, proof in enumerate(rank_group.gather(proof)) if proof}
    # Whoever has proven it sees the storage.  One alone, for markers of two could be mixed into one.
    if proof and rank_group.rank == min(proofs):
        _hide(storage, step, proof, hide_within)
    return bool(proofs)


def _read_again(
    storage: Storage, step: int, here: Collection[Complaint], within: timedelta, hide_incomplete: bool
) -> str | None:
    """The proof that one of the complaints is right, or None.  Never raises: all ranks wait for it."""
    name = storage.describe(step_directory(step))
    ends = time.monotonic() + within.total_seconds()

    def look() -> str | None:
        if not storage.exists(step_directory(step)):
            logger.warning("%s is gone since it was listed", name)
            return None
        # Hidden already, or its marker cannot be read.
        is_hidden = try_read_marker(storage, step) is not None
        return None if is_hidden else _find_proof(storage, step, here, ends, hide_incomplete)

    try:
        return _aside(look, within)
    except Unanswered:
        logger.warning("%s was not read again within %s: it is not hidden", name, within)
    except Exception as error:  # such as a process that may have no more threads or memory
        logger.warning("%s was not read again: %r", name, error)
    return None


def _hide(storage: Storage, step: int, proof: str, within: timedelta) -> None:
    """Never raises: all ranks wait for it."""
    name = storage.describe(step_directory(step))
    try:
        _aside(lambda: quarantine(storage, step, proof), within)
    except Unanswered:
        logger.warning("%s was not hidden within %s: the next start may try it again", name, within)
    except Exception as error:
        logger.warning("%s was not hidden: %r", name, error)


def _aside(work: Callable[[], _T], within: timedelta) -> _T:
    """What `work` returns or raises, done by a thread that is left alone after `within`: a mount may hang for
    ever.

    Raises:
        Unanswered: it took longer.
    """
    thread = TaskThread("resiliency-read-again")
    doing = thread.submit(work)
    thread.close()
    return doing.result(within.total_seconds())


def _find_proof(
    storage: Storage, step: int, here: Collection[Complaint], ends: float, hide_incomplete: bool
) -> str | None:
    """Read what there are complaints about, until the monotonic time `ends`; the proof that one is right."""
    name = storage.describe(step_directory(step))

    def pace(_size: int) -> None:
        if time.monotonic() > ends:
            raise Unanswered

    def look(complaint: Complaint, *, at_offsets: bool) -> None:
        if not storage.exists(f"{step_directory(step)}/{MANIFEST}"):
            check_unproven(storage, step_directory(step))
            return
        reader = CheckpointReader(storage, step, pace=pace)
        if at_offsets:
            reader.verify_named(complaint.name, complaint.offsets)
            return
        if not reader.verify_named(complaint.name) and reader.manifest.format != NEMO_FORMAT:
            reader.verify_shard(complaint.source % reader.manifest.world_size)
        logger.warning(
            "a rank found step %d bad that is good here (%s): does its host see it, is its memory good?",
            step,
            complaint.name or f"the shard of rank {complaint.source}",
        )

    first = [partial(look, complaint, at_offsets=True) for complaint in here if complaint.offsets]
    for task in (*first, *(partial(look, complaint, at_offsets=False) for complaint in here)):
        try:
            task()
        except (CheckpointCorrupt, CheckpointIncomplete) as error:
            is_short = isinstance(error, CheckpointIncomplete) or error.fields.get("is_short")
            if error.fields.get("errno") is not None:
                logger.warning("%s was not read again: %s", name, error)
            elif is_short and not hide_incomplete:
                logger.warning("%s is not hidden, for it may not have been copied in full: %s", name, error)
            else:
                logger.error("%s", error)
                return str(error)
    return None
