# SPDX-License-Identifier: Apache-2.0
"""The two kinds of checkpoint that may stand side by side in one directory, asked the same questions.

NeMo's own (a folder ``weights/``, proven by `resiliency.plugins.manifest`) and those of the engine
(flat, proven by `resiliency.checkpoint`).  Both are ``step=N``, and both are hidden by the marker
``step=N-unfinished``, so a job may change from one to the other and back.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path

from resiliency.checkpoint.agreement import Agreement
from resiliency.checkpoint.catalog import quarantine
from resiliency.checkpoint.marker import step_directory
from resiliency.checkpoint.reader import CheckpointReader
from resiliency.checkpoint.shard_file import FileRecord, verify_file
from resiliency.checkpoint.storage import LocalStorage
from resiliency.errors import ResiliencyError
from resiliency.plugins import manifest


class Kind(str, Enum):
    """Who wrote a checkpoint."""

    NEMO = "nemo"
    ENGINE = "engine"


def kind_of(directory: Path) -> Kind:
    """Told by what is there; a directory that is neither counts as NeMo's, whose checks say what it lacks."""
    flat = not (directory / manifest.WEIGHTS).is_dir() and (directory / manifest.MANIFEST).is_file()
    step = manifest.step_of(directory)
    named = step is not None and directory.name == step_directory(step)
    return Kind.ENGINE if flat and named else Kind.NEMO


def verify(directory: Path, *, part: int = 0, parts: int = 1, skim: bool = False) -> str | None:
    """What is wrong with part `part` of `parts` of a checkpoint, in a sentence; None if nothing is.

    Args:
        skim: the reader verifies what it reads: look only at what is read before, the files that all
            ranks share.
    """
    if kind_of(directory) is Kind.NEMO:
        return manifest.verify(directory, part=part, parts=parts)
    storage = LocalStorage(directory.parent)
    try:
        reader = _reader(directory)
        for record in (_shared(reader, directory) if skim else reader.files())[part::parts]:
            verify_file(storage, record)
    except ResiliencyError as error:
        return str(error)
    return None


def verify_together(directory: Path, *, skim: bool = False) -> list[str]:
    """`verify`, each rank a part of the files; every rank gets every problem that any rank found."""
    ranks = Agreement.of_process_group()
    problem = verify(directory, part=ranks.rank, parts=ranks.world_size, skim=skim)
    return sorted({found for found in ranks.gather(problem) if found})


def saved_ranks(directory: Path) -> int | None:
    """How many ranks wrote a checkpoint; None if it does not say.

    Raises:
        CheckpointCorrupt: its manifest is not what was written.
    """
    if kind_of(directory) is Kind.ENGINE:
        return _reader(directory).manifest.world_size
    committed = manifest.Manifest.load(directory)
    return committed.world_size if committed is not None else None


def hide(directory: Path, reason: str) -> None:
    """Hide a checkpoint that was found bad from all readers; it stays for people to look at."""
    step = manifest.step_of(directory)
    assert step is not None
    quarantine(LocalStorage(directory.parent), step, reason)


def _shared(reader: CheckpointReader, directory: Path) -> list[FileRecord]:
    """What belongs to no rank: the metadata of the whole, and the common part, which rank 0 writes."""
    common = [record for record in reader.index(0).files if not record.name.startswith("__")]
    return [record.inside(directory.name) for record in (*reader.manifest.files, *common)]


def _reader(directory: Path) -> CheckpointReader:
    step = manifest.step_of(directory)
    assert step is not None  # see `kind_of`
    return CheckpointReader(LocalStorage(directory.parent), step)
