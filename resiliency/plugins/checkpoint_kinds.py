# SPDX-License-Identifier: Apache-2.0
"""The two kinds of checkpoint that may stand side by side in one directory, asked the same questions.

NeMo's own (a folder ``weights/``, proven by `resiliency.checkpoint.format.file_manifest`) and those of the
engine (flat, proven by `resiliency.checkpoint`).  Both are ``step=N``, and both are hidden by the marker
``step=N-unfinished``, so a job may change from one to the other and back.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from resiliency.checkpoint.format import file_manifest as manifest
from resiliency.checkpoint.format.lease import try_lease
from resiliency.checkpoint.format.manifest import index_name
from resiliency.checkpoint.format.marker import MARKER_SUFFIX, parse_step, split_path, step_directory
from resiliency.checkpoint.format.reader import CheckpointReader
from resiliency.checkpoint.locations import ShardRequest
from resiliency.checkpoint.ranks import RankGroup
from resiliency.checkpoint.recovery.complaints import Complaint, try_quarantine
from resiliency.checkpoint.storage.chunked_file import FileRecord, check_size, verify_file
from resiliency.checkpoint.storage.interface import Storage
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointIncomplete,
    CheckpointMissing,
    ResiliencyError,
)

logger = logging.getLogger(__name__)

#: What says that bytes were read, and are not those of a whole checkpoint.
_BAD = (CheckpointCorrupt, CheckpointIncomplete, CheckpointMissing)


class CheckpointKind(str, Enum):
    """Who wrote a checkpoint."""

    NEMO = "nemo"
    ENGINE = "engine"


def kind_of(directory: Path) -> CheckpointKind:
    """Told by what is there; a directory that is neither counts as NeMo's, whose checks say what it lacks."""
    flat = not (directory / manifest.WEIGHTS).is_dir() and (directory / manifest.MANIFEST).is_file()
    step = parse_step(directory.name)
    named = step is not None and directory.name == step_directory(step)
    return CheckpointKind.ENGINE if flat and named else CheckpointKind.NEMO


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is wrong with a checkpoint, as one rank sees it.

    Attributes:
        text: a sentence.
        file: the one that is bad, by its name in the checkpoint; empty: no single one.
        is_content: it was read, and it is bad; False: it could not be read, and may well be good.
    """

    text: str
    file: str = ""
    is_content: bool


def verify(directory: Path, *, part: int = 0, parts: int = 1, skim: bool = False) -> str | None:
    """What is wrong with part `part` of `parts` of a checkpoint, in a sentence; None if nothing is.

    Args:
        skim: the reader verifies what it reads: of the files of the ranks look at the lengths alone, and
            read only those that all ranks share.
    """
    problem = find_problem(directory, part=part, parts=parts, skim=skim)
    return None if problem is None else problem.text


def find_problem(
    directory: Path, *, part: int = 0, parts: int = 1, skim: bool = False, only: str | None = None
) -> Problem | None:
    """`verify`, with more than a sentence; whatever this rank cannot reach is a problem and no exception.

    Args:
        only: of all files, the one of that name.
    """
    try:
        if kind_of(directory) is CheckpointKind.NEMO:
            manifest.check(directory, part=part, parts=parts, only=only)
        else:
            _check(directory, part, parts, skim=skim, only=only)
    except ResiliencyError as error:
        # Of a later version, or of storage that gave an error instead of bytes: nothing is known of it.
        is_content = isinstance(error, _BAD) and "errno" not in error.fields
        return Problem(text=str(error), file=_file_of(directory, error), is_content=is_content)
    except OSError as error:
        return Problem(text=f"{directory} cannot be read: {error}", is_content=False)
    return None


def _check(directory: Path, part: int, parts: int, *, skim: bool, only: str | None) -> None:
    storage = LocalStorage(directory.parent)
    reader = _reader(directory)
    if only is not None:
        for index in reader.indexes():
            if index_name(directory.name, index.rank) == f"{directory.name}/{only}":
                index.check()
        records = [record for record in reader.files() if record.name == f"{directory.name}/{only}"]
    elif skim:
        _check_sizes(storage, directory, reader, list(reader.manifest.ranks)[part::parts])
        records = _shared(reader, directory)[part::parts]
    else:
        for index in reader.indexes()[part::parts]:
            index.check()
        records = reader.files()[part::parts]
    for record in records:
        verify_file(storage, record)


def _check_sizes(storage: Storage, directory: Path, reader: CheckpointReader, ranks: Sequence[int]) -> None:
    for rank in ranks:
        for record in reader.index(rank).files:
            check_size(storage, record.inside(directory.name))


def verify_together(directory: Path, *, skim: bool = False) -> list[str]:
    """`verify`, each rank a part of the files; every rank gets every problem that any rank found.

    A checkpoint whose content is bad is hidden from all readers, here and now.  One that some rank could not
    read is not: its host may have lost the storage, and other hosts may have not.
    """
    ranks = RankGroup.of_process_group()
    mine = find_problem(directory, part=ranks.rank, parts=ranks.world_size, skim=skim)
    gathered = ranks.gather((socket.gethostname(), mine))
    found = [problem for _, problem in gathered if problem is not None]
    if any(problem.is_content for problem in found):
        needs = [
            ShardRequest(rank=rank, host=host, world_size=ranks.world_size)
            for rank, (host, _) in enumerate(gathered)
        ]
        complaint = Complaint(ranks.rank, mine.file) if mine is not None and mine.is_content else None
        root, step = split_path(directory)
        try_quarantine(ranks, LocalStorage(root), step, complaint, needs, find_proof=_find_proof)
    return sorted({problem.text for problem in found})


def _find_proof(storage: Storage, step: int, here: Collection[Complaint], _ends: float) -> str | None:
    """Read again what any rank found bad: the fault may be theirs."""
    directory = Path(storage.describe(step_directory(step)))
    for complaint in here:
        again = find_problem(directory, only=complaint.name)
        if again is None:
            logger.warning(
                "a rank found %s bad that is good here: does its host see it?", directory / complaint.name
            )
        elif not again.is_content:
            logger.warning("%s was not read again: %s", directory, again.text)
        else:
            return again.text
    return None


def saved_ranks(directory: Path) -> int | None:
    """How many ranks wrote a checkpoint; None if it does not say.

    Raises:
        CheckpointCorrupt: its manifest is not what was written.
    """
    if kind_of(directory) is CheckpointKind.ENGINE:
        return _reader(directory).manifest.world_size
    committed = manifest.FileManifest.load(directory)
    return committed.world_size if committed is not None else None


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


def _file_of(directory: Path, error: ResiliencyError) -> str:
    path = Path(str(error.fields.get("path", "")))
    return path.relative_to(directory).as_posix() if path.is_relative_to(directory) else ""


def _shared(reader: CheckpointReader, directory: Path) -> list[FileRecord]:
    """What belongs to no rank: the metadata of the whole, and the common part, which rank 0 writes."""
    common = [record for record in reader.index(0).files if not record.name.startswith("__")]
    return [record.inside(directory.name) for record in (*reader.manifest.files, *common)]


def _reader(directory: Path) -> CheckpointReader:
    step = parse_step(directory.name)
    assert step is not None  # see `kind_of`
    return CheckpointReader(LocalStorage(directory.parent), step)
