# SPDX-License-Identifier: Apache-2.0
"""The steps of one save through torch that make it a commit; `DcpStorageWriter` takes them in order."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.storage import WriteResult

from resiliency.checkpoint.format._compat import DCP_VERSION
from resiliency.checkpoint.format.catalog import remove_checkpoint
from resiliency.checkpoint.format.claim import StepClaim, holds_claims_alone
from resiliency.checkpoint.format.dcp import METADATA, write_whole_file
from resiliency.checkpoint.format.manifest import (
    MANIFEST,
    Manifest,
    read_manifest,
    save_folder,
    show_files,
    write_manifest,
)
from resiliency.checkpoint.format.marker import (
    UNNUMBERED,
    Marker,
    MarkerState,
    marker_name,
    step_directory,
    try_read_marker,
)
from resiliency.checkpoint.storage.interface import Storage
from resiliency.checkpoint.torch_dcp.files import DCP_STATE_FORMAT
from resiliency.errors import CheckpointWriteFailed, ResiliencyError
from resiliency.runtime import SystemClock

#: How long the marker of the coordinator may take to be seen on other hosts (NFS caches names).
SEEN_WITHIN = timedelta(seconds=90)
_POLL_S = 0.05


@dataclass(frozen=True)
class Vote:
    """A rank's word that its part is durable; travels to the coordinator among the write results."""

    save_id: str
    digest: str


@dataclass(frozen=True, kw_only=True)
class TorchSave:
    """One save in one rank, from set-up to finish."""

    storage: Storage
    step: int
    rank: int
    save_id: str
    coordinates: bool
    thread: int

    @property
    def directory(self) -> str:
        return step_directory(self.step)

    def claim(self, save_id: str) -> StepClaim:
        """Of the save that the coordinator has named."""
        return StepClaim(self.storage, self.step, save_folder(save_id, UNNUMBERED))

    @property
    def path(self) -> str:
        return self.storage.describe(self.directory)


def clear_way(save: TorchSave, overwrite: bool) -> None:
    """See that nothing worth keeping stands at this step."""
    storage, marker = save.storage, try_read_marker(save.storage, save.step)
    names = storage.list(save.directory)
    if not names or marker is not None or holds_claims_alone(storage, save.step):
        return
    if METADATA not in names and MANIFEST not in names:
        raise CheckpointWriteFailed(
            f"{save.path} exists and is no checkpoint: it holds {names[0]!r}.",
            hint="Save to another directory, or move it away.",
            path=save.path,
            step=save.step,
        )
    if not overwrite:
        raise CheckpointWriteFailed(
            f"{save.path} is a complete checkpoint already.",
            hint="Save under another step, or pass overwrite=True to replace it.",
            path=save.path,
            step=save.step,
        )
    if not remove_checkpoint(storage, save.step):
        raise CheckpointWriteFailed(
            f"{save.path} cannot be replaced: a process reads it.",
            hint="Try again when the reader is done.",
            path=save.path,
            step=save.step,
        )


def wait_for_marker(save: TorchSave) -> str:
    """Identity of the save, from the marker that the coordinator placed before this rank was told.

    The look is also the proof that both see one directory.
    """
    ends = time.monotonic() + SEEN_WITHIN.total_seconds()
    pause = threading.Event()
    while True:
        marker = try_read_marker(save.storage, save.step)
        if marker is not None and marker.state is MarkerState.WRITING:
            return marker.save_id
        if marker is not None and marker.state is MarkerState.FAILED:
            raise CheckpointWriteFailed(
                f"rank {save.rank} wrote nothing: the save was given up by {marker.reason}",
                rank=save.rank,
                step=save.step,
            )
        if time.monotonic() > ends:
            raise CheckpointWriteFailed(
                f"rank {save.rank} does not see {save.storage.describe(marker_name(save.step))}, which the "
                "coordinator placed.",
                hint="All ranks must write to one shared directory: check the mount on this host.",
                rank=save.rank,
                step=save.step,
            )
        pause.wait(_POLL_S)


def commit_save(save: TorchSave, metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> None:
    storage, directory = save.storage, save.directory
    digests: dict[int, str] = {}
    places: dict[MetadataIndex, object] = {}
    for rank, written in enumerate(results):
        for result in written:
            vote = result.storage_data
            if not isinstance(vote, Vote):
                places[result.index] = vote
            elif vote.save_id == save.save_id:
                digests[rank] = vote.digest
    silent = sorted(set(range(len(results))) - digests.keys())
    if silent:
        raise CheckpointWriteFailed(
            f"step {save.step}: ranks {silent} wrote for another save than this one.",
            hint="Let one save end before the next begins, and pass DcpStorageWriter on every rank.",
            step=save.step,
        )
    metadata.version = DCP_VERSION
    metadata.storage_data = places
    metadata.storage_meta = StorageMeta(save_id=save.save_id)
    claim = save.claim(save.save_id)
    record = write_whole_file(storage, claim.place, METADATA, pickle.dumps(metadata))
    manifest = Manifest(
        step=save.step,
        run_id="",
        save_id=save.save_id,
        world_size=len(results),
        format=DCP_STATE_FORMAT,
        ranks=digests,
        files=(record,),
        created=SystemClock().now().isoformat(timespec="seconds"),
        folder=claim.folder,
    )
    write_manifest(storage, claim.place, manifest)
    storage.sync_dir(claim.place)
    with claim.changing():
        show_files(storage, directory, claim.folder, [METADATA, MANIFEST])
    storage.sync_dir(directory)
    is_own = read_manifest(storage, directory).save_id == save.save_id
    own = (MarkerState.WRITING, save.save_id)
    if not is_own or not claim.try_lift(lambda marker: (marker.state, marker.save_id) == own):
        raise claim.overtaken()


def give_up(save: TorchSave, save_id: str, error: ResiliencyError) -> None:
    """Say in the marker why the step stays hidden; where even that fails, it stays hidden all the same."""
    reason = f"rank {save.rank}: {error}"
    with suppress(ResiliencyError):
        marker = try_read_marker(save.storage, save.step)
        if marker is not None and marker.save_id == save_id:
            save.claim(save_id).mark(Marker(state=MarkerState.FAILED, save_id=save_id, reason=reason))
