# SPDX-License-Identifier: Apache-2.0
"""Replicas: checkpoints of other hosts on the disk of this one, as good as the originals.

    <local root>/replicas/<owner>/step=N/...      byte for byte the owner's step=N

A replica comes to exist as a save does (`resiliency.checkpoint.commit.commit`): hidden by its marker, files
first, then indexes, manifest last, each durable before the next, and the marker lifted at the very
end.  So a kill at any point leaves older replicas untouched and the new one whole or hidden, and
whatever reads, inspects, verifies or deletes checkpoints does so with replicas.

What was received survives a broken connection: the next one with the same content takes it over,
also from a connection that does not know yet that it is broken.  After the agent died, files
that had arrived whole are found and verified, the others are received again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from urllib.parse import unquote

from resiliency.checkpoint.branches import Branches
from resiliency.checkpoint.commit.commit import open_save
from resiliency.checkpoint.commit.retention import committed_save
from resiliency.checkpoint.format.catalog import free_hidden, remove_checkpoint, steps_in
from resiliency.checkpoint.format.claim import StepClaim
from resiliency.checkpoint.format.manifest import (
    MANIFEST,
    SAVE_PREFIX,
    data_directory,
    index_name,
    save_folder,
    show_files,
)
from resiliency.checkpoint.format.marker import (
    UNNUMBERED,
    Marker,
    MarkerState,
    read_marker,
    step_directory,
    try_read_marker,
)
from resiliency.checkpoint.names import directory_name
from resiliency.checkpoint.replication.copy_plan import NO_RANK, CopyPlan, parents_of
from resiliency.checkpoint.replication.existing import can_delete, holds
from resiliency.checkpoint.storage.checksums import digest_function
from resiliency.checkpoint.storage.chunked_file import verify_file
from resiliency.checkpoint.storage.interface import Storage, WritableFile, read_file, write_file
from resiliency.checkpoint.storage.memory import PAGE_BYTES
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointIncomplete,
    CheckpointWriteFailed,
    PeerError,
)

logger = logging.getLogger(__name__)

#: Directory of all replicas, below the root of the local tier.
REPLICAS = "replicas"
_HUNG_S = 10.0


def is_host_directory(name: str) -> bool:
    """Whether `name` is what `directory_name` makes of some host: nothing else becomes a path."""
    return 0 < len(name) <= 255 and directory_name(unquote(name)) == name


class ReplicaStore:
    """All replicas of this host.  Any number of threads may receive at once.

    Args:
        local_root: root of the local tier.
        open_storage: owner to the storage of its replicas; default: on the disk below `local_root`.
    """

    def __init__(self, local_root: Path, *, open_storage: Callable[[str], Storage] | None = None) -> None:
        self._root = local_root / REPLICAS
        self._open_storage = open_storage or (lambda source_host: LocalStorage(self._root / source_host))
        #: Where the attempt went on.  A host that lost its own part of it may save it anew, which never
        #: becomes complete, as other hosts keep theirs; a copy of the save that was restored may be the last.
        self.spared_step = 0
        self._partials: dict[tuple[str, int], _Partial] = {}
        self._lock = threading.Lock()
        #: Held while an owner's directory is changed by anything but chunks.
        self._source_locks: dict[str, threading.Lock] = defaultdict(threading.Lock)

    def source_hosts(self) -> list[str]:
        """Directory names of hosts of which there are replicas."""
        return [name for name in LocalStorage(self._root).list("") if is_host_directory(name)]

    def begin(self, source_host: str, copy_plan: CopyPlan, *, attempt_id: str = "") -> ReplicaWriter:
        """Get ready to receive a copy; what is there of it already is kept.

        Reserves the space for all of it.  What an earlier, unfinished copy of this owner left is removed.

        Args:
            attempt_id: whose saves are not replaced by others.
        Raises:
            CheckpointWriteFailed: the storage refused, for example because it is full; nothing of it stays.
            ReplicaKept: a copy of the attempt's own save, of the one that was restored, or of another run,
                stands at this step.
        """
        if not is_host_directory(source_host):
            raise PeerError(f"{source_host[:200]!r} is not the directory name of a host.")
        with self._source_lock(source_host):
            partial = self._find(source_host, copy_plan.step)
            if partial is not None and partial.copy_plan.manifest_bytes == copy_plan.manifest_bytes:
                claim = partial.take_over()
                if partial.is_open:  # else the connection before has just finished it, or given up
                    return ReplicaWriter(self, source_host, partial, claim)
            elif partial is not None:
                self._forget(source_host, copy_plan.step)
            storage = self._open_storage(source_host)
            if holds(storage, copy_plan, attempt_id=attempt_id, is_spared=copy_plan.step == self.spared_step):
                return ReplicaWriter(self, source_host, None, 0)
            self._sweep(source_host, storage, copy_plan.step)
            partial = _Partial(storage, copy_plan)
            try:
                partial.open()
            except CheckpointError:
                partial.discard()
                raise
            with self._lock:
                self._partials[source_host, copy_plan.step] = partial
            return ReplicaWriter(self, source_host, partial, partial.take_over())

    def retire(
        self, source_host: str, below_step: int, *, run_id: str, branches: Branches | None = None
    ) -> list[int]:
        """Delete the replicas of a run before `below_step`, and those of branches that it has left; returns
        the steps that went.

        Only for when a newer save of that run is complete on all hosts.  Those being read or received
        stay, and those of other runs.  What is unfinished is no run's, and goes.
        """
        gone = []
        branches = branches or Branches()
        with self._source_lock(source_host):
            storage = self._open_storage(source_host)
            for step in steps_in(storage):
                if step >= below_step and not _is_left(storage, step, branches):
                    continue
                partial = self._find(source_host, step)
                if (partial is not None and partial.is_active) or not can_delete(
                    storage, step, run_id=run_id
                ):
                    continue
                self._forget(source_host, step)
                if remove_checkpoint(storage, step):
                    gone.append(step)
        return gone

    def give_up(self, source_host: str, saves: Mapping[int, str]) -> list[int]:
        """Delete the replicas of saves that never become complete; returns the steps that went.

        Those being read or received stay.

        Args:
            saves: step to save id.
        """
        gone = []
        with self._source_lock(source_host):
            storage = self._open_storage(source_host)
            for step in (step for step in steps_in(storage) if step in saves):
                partial = self._find(source_host, step)
                if partial is None:
                    is_of_it = committed_save(storage, step) == saves[step]
                else:
                    is_of_it = not partial.is_active and partial.copy_plan.save_id == saves[step]
                if is_of_it:
                    self._forget(source_host, step)
                    if remove_checkpoint(storage, step):
                        gone.append(step)
        return gone

    def close(self) -> None:
        """Close all files.  What was received in part stays on disk, hidden."""
        with self._lock:
            partials = list(self._partials.values())
            self._partials.clear()
        for partial in partials:
            partial.shut()

    def finished(self, source_host: str, partial: _Partial) -> None:
        """A receipt has ended for good."""
        key = (source_host, partial.copy_plan.step)
        with self._lock:
            if self._partials.get(key) is partial:
                del self._partials[key]

    def _source_lock(self, source_host: str) -> threading.Lock:
        with self._lock:
            return self._source_locks[source_host]

    def _find(self, source_host: str, step: int) -> _Partial | None:
        with self._lock:
            return self._partials.get((source_host, step))

    def _forget(self, source_host: str, step: int) -> None:
        with self._lock:
            partial = self._partials.pop((source_host, step), None)
        if partial is not None:
            partial.shut()

    def _sweep(self, source_host: str, storage: Storage, step: int) -> None:
        """Remove other unfinished copies of this owner: it has gone on to `step`."""
        for other in steps_in(storage):
            marker = read_marker(storage, other) if other != step else None
            if marker is None or marker.state is MarkerState.CORRUPT:
                continue
            partial = self._find(source_host, other)
            if partial is None or not partial.is_active:
                self._forget(source_host, other)
                _remove_hidden(storage, other, marker)


class ReplicaWriter:
    """One connection's part in receiving a copy.

    Once another connection has taken over, all that this one does raises `PeerError`.
    """

    def __init__(self, store: ReplicaStore, source_host: str, partial: _Partial | None, epoch: int) -> None:
        self._store = store
        self._source_host = source_host
        self._partial = partial
        self._epoch = epoch

    @property
    def is_held(self) -> bool:
        """Whether the copy is whole and committed already: nothing remains to be done."""
        return self._partial is None

    def missing(self, limit: int) -> tuple[tuple[int, int, int], ...]:
        """Runs of chunks that have not come: (file, first chunk, chunk after the last)."""
        return self._claimed().missing(limit)

    def write_chunk(self, file: int, number: int, data: memoryview) -> None:
        """Verify and write one chunk.

        Raises:
            CheckpointCorrupt: it is not what the owner committed; nothing was written.
            CheckpointWriteFailed: the storage refused.
        """
        partial = self._claimed()
        with partial.lock:
            partial.check(self._epoch)
            with self._trusting(partial):
                partial.write_chunk(file, number, data)

    def finish(self) -> None:
        """Make the copy durable and visible.

        Raises:
            CheckpointIncomplete: chunks are missing.
            CheckpointWriteFailed: the storage refused; what was received cannot be trusted.
        """
        partial = self._claimed()
        with partial.lock:
            partial.check(self._epoch)
            with self._trusting(partial):
                partial.finish()
            self._store.finished(self._source_host, partial)

    @contextlib.contextmanager
    def _trusting(self, partial: _Partial) -> Iterator[None]:
        """A write that failed is told once: no later one may go on with what was received."""
        try:
            yield
        except CheckpointWriteFailed:
            partial.discard()
            self._store.finished(self._source_host, partial)
            raise

    def suspend(self) -> None:
        """The connection is gone; another may go on."""
        if self._partial is not None:
            self._partial.leave(self._epoch)

    def abort(self) -> None:
        """Give up and free the space, unless another connection went on."""
        if self._partial is None:
            return
        partial = self._partial
        with partial.lock:
            if partial.epoch == self._epoch and partial.is_open:
                partial.discard()
                self._store.finished(self._source_host, partial)

    def _claimed(self) -> _Partial:
        assert self._partial is not None, "there is nothing to receive"
        return self._partial


class _Partial:
    """A copy that is being received."""

    def __init__(self, storage: Storage, copy_plan: CopyPlan) -> None:
        self.copy_plan = copy_plan
        self.lock = threading.Lock()
        self.epoch = 0
        self.is_active = False
        self.is_open = True
        self._storage = storage
        self._directory = step_directory(copy_plan.step)
        # Of an older format, which has no folder, only the manifest passes through one.
        folder = copy_plan.folder or save_folder(copy_plan.save_id, UNNUMBERED)
        self._claim = StepClaim(storage, copy_plan.step, folder)
        self._files: dict[int, WritableFile] = {}
        self._missing = [set(range(len(file.digests))) for file in copy_plan.files]
        #: Ranks whose files are durable and whose index says so.
        self._voted: set[int] = set()

    @property
    def path(self) -> str:
        return self._storage.describe(self._directory)

    def open(self) -> None:
        """Hide the step, keep what a dead agent had received whole, and create the other files."""
        step, storage = self.copy_plan.step, self._storage
        storage.make_dir("")
        marker = try_read_marker(storage, step)
        is_begun = marker is not None and self._is_own(marker) and storage.exists(self._claim.place)
        if is_begun and self._has_only_own_files():
            self._keep_voted()
        else:
            open_save(storage, step, self.copy_plan.save_id, folder=self._claim.folder, replaces=True)
        for directory in self.copy_plan.directories:
            if directory != self.copy_plan.folder:
                storage.make_dir(f"{self._directory}/{directory}")
        for number, record in enumerate(self.copy_plan.files):
            if self.copy_plan.file_ranks[number] not in self._voted:
                self._files[number] = storage.create(f"{self._directory}/{record.name}", record.size_bytes)

    def take_over(self) -> int:
        """Claim it for a new connection: the one before has no say any more.  Returns the claim."""
        with self.lock:
            self.epoch += 1
            self.is_active = True
            return self.epoch

    def leave(self, epoch: int) -> None:
        with self.lock:
            if epoch == self.epoch:
                self.is_active = False

    def check(self, epoch: int) -> None:
        if epoch != self.epoch or not self.is_open:
            raise PeerError("another connection has taken over this copy.")

    def missing(self, limit: int) -> tuple[tuple[int, int, int], ...]:
        with self.lock:
            runs = ((file, *run) for file, numbers in enumerate(self._missing) for run in _runs(numbers))
            return tuple(islice(runs, limit))

    def write_chunk(self, file: int, number: int, data: memoryview) -> None:
        record = self.copy_plan.files[file]
        found = digest_function(record.algorithm)(data)
        if found != record.digests[number]:
            raise CheckpointCorrupt(
                f"chunk {number} of {record.name} came with {record.algorithm} {found}, "
                f"expected {record.digests[number]}.",
                hint="Either the owner's file is damaged, or the bytes were on their way.",
                file=file,
                chunk=number,
            )
        if number not in self._missing[file]:
            return
        # Only the end of a file is no whole page: the pages before it go to the device directly.
        start, rest = number * record.chunk_bytes, data.nbytes % PAGE_BYTES
        whole = data.nbytes - rest
        if whole:
            self._files[file].write_at(start, data[:whole])
        if rest:
            self._files[file].write_at(start + whole, data[whole:])
        self._missing[file].discard(number)
        if not self._missing[file]:
            self._vote(self.copy_plan.file_ranks[file])

    def finish(self) -> None:
        lacking = sum(map(len, self._missing))
        if lacking:
            raise CheckpointIncomplete(f"{lacking} chunks of {self.path} have not come.", path=self.path)
        for rank in (*self.copy_plan.index_bytes, NO_RANK):
            self._vote(rank)
        self.close()
        claim, storage = self._claim, self._storage
        write_file(storage, f"{claim.place}/{MANIFEST}", self.copy_plan.manifest_bytes)
        storage.sync_dir(claim.place)
        with claim.changing():
            show_files(storage, self._directory, claim.folder, [MANIFEST])
        storage.sync_dir(self._directory)
        if not claim.try_lift(self._is_own):
            raise claim.overtaken()
        if not self.copy_plan.folder:
            storage.remove_tree(claim.place)

    def shut(self) -> None:
        """Take it away from whoever receives it."""
        # A storage that hangs may hold the lock for ever: its files stay open then.
        if self.lock.acquire(timeout=_HUNG_S):
            try:
                self.close()
            finally:
                self.lock.release()

    def close(self) -> None:
        self.is_open = False
        while self._files:
            # All that counts was synced, and who closes may have an error to tell already.
            with contextlib.suppress(CheckpointWriteFailed):
                self._files.popitem()[1].close()

    def discard(self) -> None:
        """Free the space; on a storage that refuses even that, what stays is hidden."""
        self.close()
        try:
            marker = read_marker(self._storage, self.copy_plan.step)
            if marker is None or not self._is_own(marker):
                return
            _remove_hidden(self._storage, self.copy_plan.step, marker)
        except CheckpointError as error:
            logger.warning("an unfinished replica was not removed: %s", error)

    def _is_own(self, marker: Marker) -> bool:
        return (marker.state, marker.save_id) == (MarkerState.WRITING, self.copy_plan.save_id)

    def _index_name(self, rank: int) -> str:
        return index_name(data_directory(self._directory, self.copy_plan.folder), rank)

    def _files_of(self, rank: int) -> list[int]:
        return [number for number, writer in enumerate(self.copy_plan.file_ranks) if writer == rank]

    def _vote(self, rank: int) -> None:
        """Once all files of a rank have come: make them durable, and then its index, which says so."""
        mine = self._files_of(rank)
        if rank in self._voted or any(self._missing[number] for number in mine):
            return
        for number in mine:
            self._files[number].sync()
        names = [self.copy_plan.files[number].name for number in mine]
        for directory in reversed(parents_of(names)):
            self._storage.sync_dir(f"{self._directory}/{directory}")
        if rank != NO_RANK:
            write_file(self._storage, self._index_name(rank), self.copy_plan.index_bytes[rank])
        self._voted.add(rank)

    def _has_only_own_files(self) -> bool:
        """Whether nothing lies there that would make the copy differ from the original."""
        expected = {record.name for record in self.copy_plan.files} | set(self.copy_plan.directories)
        own = self._claim.folder
        expected |= {MANIFEST, own, f"{own}/{MANIFEST}"}
        expected |= {
            self._index_name(rank).removeprefix(f"{self._directory}/") for rank in self.copy_plan.index_bytes
        }
        found = set(self._storage.list(self._directory))
        for directory in self.copy_plan.directories:
            found |= {f"{directory}/{name}" for name in self._storage.list(f"{self._directory}/{directory}")}
        return found <= expected

    def _keep_voted(self) -> None:
        """A rank's index was written after its files were durable: if both are good, nothing is to do."""
        for rank, content in self.copy_plan.index_bytes.items():
            mine = self._files_of(rank)
            name = self._index_name(rank)
            try:
                if read_file(self._storage, name) != content:
                    raise CheckpointCorrupt(f"{self._storage.describe(name)} is torn.")
                for number in mine:
                    record = self.copy_plan.files[number].inside(self._directory)
                    verify_file(self._storage, record, threads=1)
            except CheckpointError as error:
                logger.info("rank %d of %s is received again: %s", rank, self.path, error)
                self._storage.remove(name)  # its files are about to become others
            else:
                self._voted.add(rank)
                for number in mine:
                    self._missing[number].clear()


def _is_left(storage: Storage, step: int, branches: Branches) -> bool:
    return bool(branches.known) and not branches.is_live(step, committed_save(storage, step) or "")


def _remove_hidden(storage: Storage, step: int, marker: Marker) -> None:
    """Delete a step as long as a marker hides it; the data first, for the disk may be full."""
    free_hidden(storage, step, SAVE_PREFIX)
    remove_checkpoint(storage, step, expected=marker)


def _runs(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Runs of consecutive numbers as (first, after the last)."""
    start = end = -1
    for number in sorted(numbers):
        if number != end:
            if end >= 0:
                yield start, end
            start = number
        end = number + 1
    if end >= 0:
        yield start, end
