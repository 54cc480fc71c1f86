# SPDX-License-Identifier: Apache-2.0
"""The two kinds of checkpoint that may stand side by side in one directory, asked the same questions.

NeMo's own (a folder ``weights/``, proven by `resiliency.checkpoint.format.nemo`) and those of the
engine (flat).  Both are ``step=N``, and both are hidden by the marker
``step=N-unfinished``, so a job may change from one to the other and back.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path

from resiliency.checkpoint.format.lease import try_lease
from resiliency.checkpoint.format.manifest import MANIFEST, read_manifest
from resiliency.checkpoint.format.marker import MARKER_SUFFIX, parse_step, split_path, step_directory
from resiliency.checkpoint.format.nemo import NEMO_FORMAT, WEIGHTS, check_unproven, storage_of
from resiliency.checkpoint.format.reader import CheckpointReader
from resiliency.checkpoint.locations import ShardRequest
from resiliency.checkpoint.ranks import RankGroup
from resiliency.checkpoint.recovery.complaints import complaint_of, try_quarantine
from resiliency.checkpoint.storage.chunked_file import check_size, verify_file
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointIncomplete,
    CheckpointMissing,
    ResiliencyError,
)

#: What says that bytes were read, and are not those of a whole checkpoint.
_BAD = (CheckpointCorrupt, CheckpointIncomplete, CheckpointMissing)


class CheckpointKind(str, Enum):
    """Who wrote a checkpoint."""

    NEMO = "nemo"
    ENGINE = "engine"


def kind_of(directory: Path) -> CheckpointKind:
    """Told by what is there; a directory that is neither counts as NeMo's, whose checks say what it lacks."""
    flat = not (directory / WEIGHTS).is_dir() and (directory / MANIFEST).is_file()
    step = parse_step(directory.name)
    named = step is not None and directory.name == step_directory(step)
    return CheckpointKind.ENGINE if flat and named else CheckpointKind.NEMO


def verify(directory: Path, *, part: int = 0, parts: int = 1, skim: bool = False) -> str | None:
    """What is wrong with part `part` of `parts` of a checkpoint, in a sentence; None if nothing is.

    Args:
        skim: the reader verifies what it reads: of the files of the ranks look at the lengths alone, and
            read only those that all ranks share.  NeMo verifies nothing.
    """
    problem = _find_problem(directory, part=part, parts=parts, skim=skim)
    return None if problem is None else str(problem)


def _find_problem(directory: Path, *, part: int, parts: int, skim: bool) -> ResiliencyError | None:
    """`verify`, with more than a sentence; whatever this rank cannot reach is a problem and no exception."""
    try:
        _check(directory, part, parts, skim=skim)
    except ResiliencyError as error:
        return error
    except OSError as error:
        return CheckpointError(f"{directory} cannot be read: {error}", path=str(directory))
    return None


def _check(directory: Path, part: int, parts: int, *, skim: bool) -> None:
    storage = storage_of(directory)
    if kind_of(directory) is CheckpointKind.NEMO and not storage.exists(f"{directory.name}/{MANIFEST}"):
        check_unproven(storage, directory.name)
        return
    reader = _reader(directory)
    skim = skim and reader.manifest.format != NEMO_FORMAT
    shared = [*reader.manifest.files]
    if skim:  # the common part, which rank 0 writes
        shared += [record for record in reader.index(0).files if "/" not in record.name]
    for record in shared[part::parts]:
        verify_file(storage, record.inside(directory.name))
    # No rank reads the indexes of all.  Where more ranks read than wrote, several share the files of one.
    writers = list(reader.manifest.ranks)
    for number in range(part % max(len(writers), 1), len(writers), parts):
        index = reader.index(writers[number])
        if not skim:
            index.check()
        sharing = max(len(range(number, parts, len(writers))), 1)
        for record in index.files[part // len(writers) :: sharing]:
            (check_size if skim else verify_file)(storage, record.inside(directory.name))


def verify_together(directory: Path, *, skim: bool = False) -> list[str]:
    """`verify`, each rank a part of the files; every rank gets every problem that any rank found.

    A checkpoint whose content is bad is hidden from all readers, here and now.  One that some rank could not
    read is not: its host may have lost the storage, and other hosts may have not.
    """
    ranks = RankGroup.of_process_group()
    mine = _find_problem(directory, part=ranks.rank, parts=ranks.world_size, skim=skim)
    gathered = ranks.gather((socket.gethostname(), mine))
    found = [problem for _, problem in gathered if problem is not None]
    if any(map(_is_content, found)):
        needs = [
            ShardRequest(rank=rank, host=host, world_size=ranks.world_size)
            for rank, (host, _) in enumerate(gathered)
        ]
        root, step = split_path(directory)
        storage = LocalStorage(root)
        complaint = None
        if mine is not None and _is_content(mine):
            complaint = complaint_of(storage, ranks.rank, mine)
        # What stands at a step and is not hidden, `ModelCheckpoint` does not replace.
        try_quarantine(ranks, storage, step, complaint, needs, hide_incomplete=True)
    return sorted({str(problem) for problem in found})


def _is_content(problem: ResiliencyError) -> bool:
    """Whether a checkpoint was read, and is bad.  Of one of a later version, or of storage that gave an error
    instead of bytes, nothing is known."""
    return isinstance(problem, _BAD) and "errno" not in problem.fields


def saved_ranks(directory: Path) -> int | None:
    """How many ranks wrote a checkpoint; None if it does not say.

    Raises:
        CheckpointCorrupt: its manifest is not what was written.
    """
    storage = storage_of(directory)
    if not storage.exists(f"{directory.name}/{MANIFEST}"):
        return None
    return read_manifest(storage, directory.name).world_size


def saved_ranks_together(directory: Path) -> int | None:
    """`saved_ranks`, as rank 0 sees it, on all ranks: what they ask for together depends on it.

    Raises:
        CheckpointError: on all ranks alike.
    """
    ranks = RankGroup.of_process_group()
    answer: int | ResiliencyError | None = None
    if ranks.rank == 0:
        try:
            answer = saved_ranks(directory)
        except ResiliencyError as error:
            answer = error
        except OSError as error:
            answer = CheckpointError(f"{directory} cannot be read: {error}.", path=str(directory))
    answer = ranks.gather(answer)[0]
    if isinstance(answer, ResiliencyError):
        raise answer
    return answer


@contextmanager
def in_use(directory: Path) -> Iterator[None]:
    """Keep a checkpoint from being deleted while the ranks read it together: rank 0 has a lease for all.

    Leave it only when no rank reads any more.  Without effect where there is no such checkpoint: a step that
    only hosts hold is guarded by who reads it there.
    """
    step = parse_step(directory.name)
    is_first = RankGroup.of_process_group().rank == 0
    if (
        not is_first
        or step is None
        or not os.path.isdir(directory)
        or os.path.lexists(f"{directory}{MARKER_SUFFIX}")
    ):
        yield
        return
    with try_lease(LocalStorage(directory.parent), step):
        yield


def _reader(directory: Path) -> CheckpointReader:
    step = parse_step(directory.name)
    assert step is not None  # see `kind_of`
    return CheckpointReader(storage_of(directory), step)
