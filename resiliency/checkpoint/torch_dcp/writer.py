# SPDX-License-Identifier: Apache-2.0
"""`DcpStorageWriter`: the bytes of `torch.distributed.checkpoint.save`, written by our storage layer.

torch plans, moves and coordinates; this decides what is durable when.  Of torch's five calls,

    set up, local plan      every rank
    global plan             coordinator     marker step=N-unfinished, empty directory
    write data              every rank      its files in checksummed chunks, then its index
    finish                  coordinator     .metadata, manifest, marker lifted, old ones pruned

each is durable before the next begins, so a kill at any moment leaves what was committed before
and the new step whole or hidden: the commit protocol of `resiliency.checkpoint.commit.commit`, with
torch's collectives in place of its waiting.
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from resiliency.checkpoint.commit.commit import open_save
from resiliency.checkpoint.format._compat import StoragePrefix
from resiliency.checkpoint.format.catalog import try_prune
from resiliency.checkpoint.format.manifest import RankIndex, write_index
from resiliency.checkpoint.format.marker import split_path
from resiliency.checkpoint.storage.chunked_file import DEFAULT_THREADS
from resiliency.checkpoint.storage.interface import Storage
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.checkpoint.torch_dcp.commit import (
    TorchSave,
    Vote,
    clear_way,
    commit_save,
    give_up,
    wait_for_marker,
)
from resiliency.checkpoint.torch_dcp.files import PlannedFiles
from resiliency.errors import CheckpointWriteFailed, ConfigError, ResiliencyError

logger = logging.getLogger(__name__)


class DcpStorageWriter(StorageWriter):
    """For ``dcp.save(state, storage_writer=...)`` and ``dcp.async_save``, on all ranks alike.

    What it leaves is a directory ``step=N`` that stock `torch.distributed.checkpoint.load` opens and
    that ``python3 -m resiliency.checkpoint verify`` proves.  All ranks must see the directory.  One
    writer may serve all saves of a job, one after the other: give each its ``checkpoint_id``.

    Args:
        path: the checkpoint, such as ``/ckpt/step=100``; None: `checkpoint_id` of each save says it.
        keep: complete checkpoints to leave in the directory, counted after the save; None: all.
        overwrite: a checkpoint that stands at this step is deleted first; until the new one is
            there, a kill leaves those of other steps only.  Without it the save fails.
        threads: writers per rank.
        open_storage: makes the storage of the directory; must be picklable for process executors.
    Raises:
        ConfigError: the path does not end in ``step=N``, or `keep` is below 1.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        keep: int | None = None,
        overwrite: bool = False,
        threads: int = DEFAULT_THREADS,
        open_storage: Callable[[Path], Storage] = LocalStorage,
    ) -> None:
        super().__init__()
        if keep is not None and keep < 1:
            raise ConfigError(f"keep must be at least 1, found {keep}.", keep=keep)
        self._path = path
        self._keep = keep
        self._overwrite = overwrite
        self._threads = threads
        self._open_storage = open_storage
        self._save: TorchSave | None = None
        if path is not None:
            split_path(path)

    # --- what torch calls, in this order ---------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._path = checkpoint_id

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise ConfigError(
                "DcpStorageWriter cannot save with use_collectives=False: without the votes of all "
                "ranks a checkpoint cannot be proven complete.",
                hint="Leave use_collectives at its default.",
            )
        if self._path is None:
            raise ConfigError(
                "DcpStorageWriter was given no path.", hint="Pass checkpoint_id='.../step=N' to dcp.save."
            )
        root, step = split_path(self._path)
        self._save = TorchSave(
            storage=self._open_storage(root),
            step=step,
            rank=kwargs.get("rank") or 0,
            save_id=uuid.uuid4().hex if is_coordinator else "",
            coordinates=is_coordinator,
            thread=threading.get_ident(),
        )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        save = self._current()
        save.storage.make_dir("")
        clear_way(save, self._overwrite)
        try:
            open_save(save.storage, save.step, save.save_id)
        except ResiliencyError as error:
            give_up(save, save.save_id, error)
            raise
        # Torch may cache these plans and give them to a writer of its own later, which needs this.
        return [
            replace(plan, storage_data=StoragePrefix(f"__{rank}_")) if plan.storage_data is None else plan
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        save = self._current()
        save_id = save.save_id or wait_for_marker(save)
        try:
            results = self._write(save, save_id, plan, planner)
        except ResiliencyError as error:
            give_up(save, save_id, error)
            raise
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        save = self._current()
        try:
            commit_save(save, metadata, results)
        except ResiliencyError as error:
            give_up(save, save.save_id, error)
            raise
        logger.info("step %d committed in %s", save.step, save.path)
        if self._keep is not None:
            try_prune(save.storage, self._keep, spare=save.step)

    # --- the rest of torch's interface -----------------------------------------------------------

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self._path)

    @property
    def checkpoint_id(self) -> str | os.PathLike[str] | None:
        """Where the current save goes; torch logs it."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        try:
            split_path(checkpoint_id)
        except ConfigError:
            return False
        return True

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_save": None}  # to the process executor; a save does not travel

    # --- steps -----------------------------------------------------------------------------------

    def _current(self) -> TorchSave:
        """The save of this thread: torch makes all calls of one save in one thread."""
        save = self._save
        if save is None or save.thread != threading.get_ident():
            raise CheckpointWriteFailed(
                "this DcpStorageWriter was given another save before this one ended.",
                hint="Wait for the future of async_save first, or give each save a writer of its own.",
            )
        return save

    def _write(
        self, save: TorchSave, save_id: str, plan: SavePlan, planner: SavePlanner
    ) -> list[WriteResult]:
        storage, rank, claim = save.storage, save.rank, save.claim(save_id)
        files = PlannedFiles(storage, save.directory, claim.folder, rank=rank, threads=self._threads)
        files.write(plan, planner)
        index = RankIndex(
            rank=rank,
            step=save.step,
            run_id="",
            save_id=save_id,
            fingerprint="",
            files=tuple(files.records),
            tensors=tuple(files.tensors),
            blobs=tuple(files.blobs),
        )
        index = index.placed_in(claim.folder)
        digest = write_index(storage, claim.place, index)
        if not save.coordinates:  # the coordinator syncs the names once, with that of the manifest
            storage.sync_dir(claim.place)
        vote = WriteResult(
            index=MetadataIndex(f"rank={rank}"), size_in_bytes=0, storage_data=Vote(save_id, digest)
        )
        return [*files.results, vote]
