# SPDX-License-Identifier: Apache-2.0
"""`DcpStorageReader`: `torch.distributed.checkpoint.load` that verifies every byte it takes.

Checkpoints of this library (of `DcpStorageWriter` and of the engine) are read by ranges, straight
into the tensors where they fit, and each chunk is compared with its checksum before its bytes are
used.  What torch wrote alone is read by torch's own reader, with a warning that nothing proves it.
What is unfinished, damaged or foreign is refused on all ranks before or while they read.
"""

from __future__ import annotations

import logging
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from resiliency.checkpoint.format.claim import is_claim
from resiliency.checkpoint.format.dcp import METADATA
from resiliency.checkpoint.format.lease import try_lease
from resiliency.checkpoint.format.manifest import MANIFEST
from resiliency.checkpoint.format.marker import MARKER_SUFFIX, split_path, step_directory
from resiliency.checkpoint.format.reader import CheckpointReader
from resiliency.checkpoint.progress import ReadProgress
from resiliency.checkpoint.storage.chunked_file import DEFAULT_THREADS, Pace, Want, read_ranges
from resiliency.checkpoint.storage.interface import Storage
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.checkpoint.torch_dcp.load_plan import ItemReader
from resiliency.errors import (
    CheckpointCorrupt,
    CheckpointIncomplete,
    CheckpointMissing,
    ConfigError,
    ResiliencyError,
)
from resiliency.files import posix_path

logger = logging.getLogger(__name__)

_FOREIGN_ERRORS = (OSError, EOFError, RuntimeError, pickle.UnpicklingError, zipfile.BadZipFile)


class DcpStorageReader(StorageReader):
    """For ``dcp.load(state, storage_reader=...)``, on all ranks alike.

    A failure on any rank ends the load on all of them as torch's `CheckpointException`, whose
    `failures` hold our errors by rank: `CheckpointMissing`, `CheckpointIncomplete` (unfinished, or a
    file is missing) or `CheckpointCorrupt` (names file, tensor, offset and both digests).  Tensors
    may hold part of the new bytes then.

    Args:
        path: the checkpoint, such as ``/ckpt/step=100``; None: `checkpoint_id` of each load says it.
            What torch wrote alone may have any name.
        threads: readers per file.
        pace: called before each chunk with its size: bandwidth cap, progress; default: a progress bar
            of the coordinator for long reads on a terminal.
        open_storage: makes the storage of the directory.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        threads: int = DEFAULT_THREADS,
        pace: Pace | None = None,
        open_storage: Callable[[Path], Storage] = LocalStorage,
    ) -> None:
        super().__init__()
        self._path = path
        self._threads = threads
        self._pace = pace
        self._open_storage = open_storage
        self._metadata: Metadata | None = None
        self._coordinates = False
        self._ours: CheckpointReader | None = None
        self._storage: Storage | None = None
        self._stock: FileSystemReader | None = None
        self._refusal: ResiliencyError | None = None

    # --- what torch calls, in this order ---------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._path = checkpoint_id

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Torch's own description of the checkpoint, verified.

        Raises:
            CheckpointMissing: there is no such directory.
            CheckpointIncomplete: the checkpoint was never committed, or it is marked.
            CheckpointCorrupt: it is not what was written.
        """
        if kwargs.get("rank") is not None and self._refusal is not None:
            # Torch asks again, for a description of one rank, after the first call failed, and
            # would replace our error by its own.  `set_up_storage_reader` comes next and raises it.
            return Metadata(state_dict_metadata={}, planner_data={}, storage_data={})
        self._ours = self._storage = self._stock = self._refusal = None
        try:
            return self._open()
        except ResiliencyError as error:
            self._refusal = error
            raise

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        if self._refusal is not None:
            raise self._refusal
        self._metadata = metadata
        self._coordinates = is_coordinator
        if self._stock is not None:
            self._stock.set_up_storage_reader(metadata, is_coordinator)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        if self._stock is not None:
            with _named_errors(str(self._path)):
                return self._stock.read_data(plan, planner)
        if self._ours is None or self._storage is None or self._metadata is None:
            raise ConfigError("DcpStorageReader.read_data was called before read_metadata.")
        step = self._ours.manifest.step
        with (
            try_lease(self._storage, step),
            ReadProgress(f"loading step {step}", shown=self._coordinates) as progress,
        ):
            reader = ItemReader(
                self._storage, self._ours, self._metadata, self._threads, self._pace or progress
            )
            progress.expect(reader.size_bytes(plan))
            reader.read(plan, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    # --- the rest of torch's interface -----------------------------------------------------------

    @property
    def checkpoint_id(self) -> str | os.PathLike[str] | None:
        """Where the current load reads; torch logs it."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" not in os.fspath(checkpoint_id)

    # --- steps -----------------------------------------------------------------------------------

    def _open(self) -> Metadata:
        if self._path is None:
            raise ConfigError(
                "DcpStorageReader was given no path.", hint="Pass checkpoint_id='.../step=N' to dcp.load."
            )
        place = posix_path(self._path)
        storage = self._open_storage(place.parent)
        names = storage.list(place.name)
        if not names:
            raise CheckpointMissing(
                f"there is no checkpoint {storage.describe(place.name)}.",
                hint="`python3 -m resiliency.checkpoint ls DIR` shows which there are.",
                path=os.fspath(self._path),
            )
        if (
            METADATA in names
            and MANIFEST not in names
            and not any(name.startswith("rank=") or is_claim(name) for name in names)
        ):
            return self._open_stock(place)
        _, step = split_path(place)
        self._storage, self._ours = storage, CheckpointReader(storage, step)
        return self._read_own_metadata(storage, self._ours)

    def _read_own_metadata(self, storage: Storage, reader: CheckpointReader) -> Metadata:
        record = next((file for file in reader.manifest.files if file.name == METADATA), None)
        if record is None:
            raise CheckpointIncomplete(
                f"{reader.path} has format {reader.manifest.format!r}, without the {METADATA} of torch.",
                hint="Restore it with what wrote it: resiliency.checkpoint.Checkpointer, or NeMo.",
                path=reader.path,
            )
        content = bytearray(record.size_bytes)
        want = Want(0, memoryview(content), METADATA)
        read_ranges(storage, record.inside(step_directory(reader.manifest.step)), [want])
        metadata = pickle.loads(content)  # noqa: S301  # as torch does; verified above
        if not isinstance(metadata, Metadata):
            raise CheckpointCorrupt(f"{reader.path}/{METADATA} holds a {type(metadata).__name__}.")
        return metadata

    def _open_stock(self, place: Path) -> Metadata:
        # A quarantined or half-removed checkpoint of torch has a marker of ours beside it.
        if self._open_storage(place.parent).exists(place.name + MARKER_SUFFIX):
            raise CheckpointIncomplete(
                f"{place} is marked as unfinished.", hint="Load another step.", path=str(place)
            )
        logger.warning(
            "%s was written by torch alone: it has no checksums, and damage to it cannot be noticed", place
        )
        self._stock = FileSystemReader(place)
        with _named_errors(str(place)):
            return self._stock.read_metadata()


@contextmanager
def _named_errors(path: str) -> Iterator[None]:
    """What torch's reader raises for files that are gone or not what torch writes."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointIncomplete(
            f"the checkpoint lacks its file {error.filename}.", hint="Load another step.", path=path
        ) from error
    except _FOREIGN_ERRORS as error:
        raise CheckpointCorrupt(
            f"{path} cannot be read: {type(error).__name__}: {error}.",
            hint="It is damaged, or does not fit the state; load another step.",
            path=path,
        ) from error
