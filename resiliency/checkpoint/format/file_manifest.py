# SPDX-License-Identifier: Apache-2.0
"""Checksums that make a persistent checkpoint provable, written beside the files that they cover.

    step=40/                     the checkpoint directory
      weights/                   what NeMo and Megatron write: .metadata, common.pt, __0_0.distcp, ...
      checksums/rank-00000.json  written by the process that wrote rank 0's files
      manifest.json              written last, by rank 0: every file with its size and checksum
    step=40-unfinished           stands beside the directory until the manifest is durable

Stock readers ignore the extra files.  A checkpoint without a manifest is either unfinished (then
its marker stands beside it) or was written by another tool; `check` tells the two apart.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from resiliency.checkpoint.format.manifest import MANIFEST as MANIFEST
from resiliency.checkpoint.format.marker import MARKER_SUFFIX, parse_step
from resiliency.errors import CheckpointCorrupt, CheckpointIncomplete
from resiliency.files import sync_dir, write_durably

CHECKSUMS = "checksums"
WEIGHTS = "weights"
_FORMAT = 1
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class RecordedFile:
    """Size in bytes and 64-bit xxh3 of one file, as lower-case hex."""

    size_bytes: int
    xxh3: str


@dataclass(frozen=True, kw_only=True)
class FileManifest:
    """What a committed checkpoint consists of.  Paths are relative to the checkpoint directory.

    On storage it carries a checksum of itself: a flipped bit in, say, the world size would otherwise
    go unseen, and cost the random state at the next resume.
    """

    step: int
    world_size: int
    files: Mapping[str, RecordedFile] = field(default_factory=dict)

    def save(self, directory: Path) -> None:
        record = asdict(self) | {"format": _FORMAT}
        record["xxh3"] = _digest(record)
        write_durably(directory / MANIFEST, json.dumps(record, indent=1, sort_keys=True).encode())

    @classmethod
    def load(cls, directory: Path) -> FileManifest | None:
        """The manifest of `directory`; None when it has none.

        Raises:
            CheckpointCorrupt: the manifest is not readable as one.
        """
        path = directory / MANIFEST
        try:
            record = json.loads(path.read_bytes())
            if record["format"] != _FORMAT:
                raise ValueError(f"format {record['format']}, expected {_FORMAT}")
            written, found = record.pop("xxh3"), _digest(record)
            if found != written:
                raise ValueError(f"its own checksum is {found}, {written} was written")
            files = {name: RecordedFile(**entry) for name, entry in record["files"].items()}
            return cls(step=int(record["step"]), world_size=int(record["world_size"]), files=files)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointCorrupt(
                f"{path} is not a readable manifest: {error}.",
                hint="The checkpoint cannot be proven whole and is not used.",
                path=str(path),
            ) from error


def _digest(record: dict[str, Any]) -> str:
    return xxhash.xxh3_64(json.dumps(record, sort_keys=True).encode()).hexdigest()


def complete_checkpoints(root: Path) -> list[Path]:
    """Directories ``step=N`` below `root` without a marker, newest first; [] when there is no `root`."""
    try:
        with os.scandir(root) as entries:
            is_directory = {entry.name: entry.is_dir() for entry in entries}
    except FileNotFoundError:
        return []
    found = []
    for name in is_directory:
        step = parse_step(name)
        if step is not None and is_directory[name] and name + MARKER_SUFFIX not in is_directory:
            found.append((step, root / name))
    return [path for _, path in sorted(found, reverse=True)]


def checksum(path: Path) -> RecordedFile:
    """Read `path` once and describe it."""
    digest = xxhash.xxh3_64()
    size = 0
    with open(path, "rb", buffering=0) as file:
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return RecordedFile(size_bytes=size, xxh3=digest.hexdigest())


def record_rank_files(directory: Path, rank: int) -> None:
    """Write the checksums of the files that `rank` wrote (``weights/__<rank>_*``), durably."""
    files = sorted((directory / WEIGHTS).glob(f"__{rank}_*"))
    _write_records(directory, f"rank-{rank:05d}", files)


def seal(directory: Path, *, step: int, world_size: int) -> FileManifest:
    """Merge the records of all ranks into the manifest; the last write of a checkpoint.

    Call it in one process, after every rank has finished writing.

    Raises:
        CheckpointIncomplete: a file of the checkpoint is in nobody's records.
    """
    shared = [path for path in sorted((directory / WEIGHTS).iterdir()) if not path.name.startswith("__")]
    for path in shared:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    _write_records(directory, "shared", shared)
    files: dict[str, RecordedFile] = {}
    for path in sorted((directory / CHECKSUMS).glob("*.json")):
        files |= {name: RecordedFile(**entry) for name, entry in json.loads(path.read_bytes()).items()}
    unknown = {_relative(directory, path) for path in (directory / WEIGHTS).iterdir()} - files.keys()
    if unknown:
        raise CheckpointIncomplete(
            f"{directory}: no rank recorded a checksum of {sorted(unknown)}.",
            hint="The checkpoint stays marked as unfinished; the one before it is untouched.",
            path=str(directory),
            step=step,
        )
    manifest = FileManifest(step=step, world_size=world_size, files=files)
    sync_dir(directory / WEIGHTS)
    manifest.save(directory)
    return manifest


def check(
    directory: Path, *, part: int = 0, parts: int = 1, only: str | None = None, sizes_only: bool = False
) -> None:
    """Read every file of part `part` of `parts` and compare it with the manifest.

    Several processes share the work by calling this with different parts.

    Args:
        only: of all files, the one of that name, if it is one of the checkpoint.
        sizes_only: read no file, and so do not find other bytes of the same length.
    Raises:
        CheckpointCorrupt, CheckpointIncomplete: the content is bad; the field `path` names the file.
        OSError: it cannot be read, and may well be good.
    """
    manifest = FileManifest.load(directory)
    if manifest is None:
        _check_foreign(directory)
        return
    if manifest.step != parse_step(directory.name):
        path = directory / MANIFEST
        raise CheckpointCorrupt(f"{directory} holds a manifest of step {manifest.step}.", path=str(path))
    names = sorted(manifest.files)[part::parts] if only is None else [only]
    for name in names:
        if name in manifest.files:
            _check_file(directory / name, manifest.files[name], sizes_only=sizes_only)


def _check_foreign(directory: Path) -> None:
    # NeMo and Megatron write these two last; a directory with both, without a marker, is theirs.
    last = [directory / WEIGHTS / name for name in ("metadata.json", ".metadata")]
    missing = [path for path in last if not path.is_file()]
    if missing:
        names = " and ".join(path.name for path in missing)
        raise CheckpointIncomplete(
            f"{directory} has no {MANIFEST} and lacks {names}: it was never finished", path=str(missing[0])
        )


def _check_file(path: Path, expected: RecordedFile, *, sizes_only: bool) -> None:
    if not path.is_file():
        raise CheckpointIncomplete(f"{path} is missing.", path=str(path))
    size = path.stat().st_size
    if size != expected.size_bytes:
        raise CheckpointIncomplete(
            f"{path} has {size} bytes, {expected.size_bytes} were committed.", path=str(path)
        )
    if not sizes_only and (found := checksum(path)) != expected:
        raise CheckpointCorrupt(
            f"{path}: checksum {found.xxh3}, {expected.xxh3} was committed.", path=str(path)
        )


def _relative(directory: Path, path: Path) -> str:
    return path.relative_to(directory).as_posix()


def _write_records(directory: Path, name: str, files: Iterable[Path]) -> None:
    records = {_relative(directory, path): asdict(checksum(path)) for path in files}
    target = directory / CHECKSUMS
    target.mkdir(parents=True, exist_ok=True)
    write_durably(target / f"{name}.json", json.dumps(records).encode())
