# SPDX-License-Identifier: Apache-2.0
"""Files and directories of checkpoints that are whole after a kill at any moment.

For programs that write their own checkpoint files; `resiliency.checkpoint` does more and needs none of this.

A checkpoint directory goes through three states, each made durable before the next:

    marker                              .<name>_checkpoint_<n>.unfinished, beside the directory
    directory, filled by the program    <name>_checkpoint_<n>, or ..._force
    link                                <name>.latest_checkpoint -> <name>_checkpoint_<n>

and what is superseded is deleted only when the link is durable. So the link leads to a whole checkpoint at
every moment. A directory with a marker is what a crash left; one without was finished, as far as anything
tells, and is deleted for no other reason than `keep_last`.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from resiliency.errors import (
    CheckpointMissing,
    CheckpointWriteFailed,
    ConfigError,
    PeerError,
    ResiliencyError,
)
from resiliency.files import Files, LocalFiles, posix_path, replacing

log = logging.getLogger(__name__)

T = TypeVar("T")

STRATEGIES = ("sync_any", "sync_all", "async", "mono")
#: How long the directory that one rank made may take to be seen by another host: NFS clients remember for a
#: minute.
_VISIBLE_S = 90.0


def atomic_torch_save(obj: object, f: str | os.PathLike[str], **torch_save_options: Any) -> None:
    """`torch.save` to a path that holds the old object or the new one after a kill or a power cut.

    Args:
        f: a path; file objects are refused, as they have no old content to keep.
        torch_save_options: passed to `torch.save`.
    Raises:
        ConfigError: `f` is no path of a file system.
        CheckpointWriteFailed: storage refused; what was at `f` is still there.
    """
    if not isinstance(f, str | os.PathLike):
        raise ConfigError(f"atomic_torch_save writes to a path, and was given a {type(f).__name__}.")
    path = posix_path(f)
    try:
        with replacing(path) as temporary:
            torch.save(obj, temporary, **torch_save_options)
    except OSError as error:
        raise CheckpointWriteFailed(
            f"{os.fspath(f)} could not be saved: {error.strerror or error}.", path=os.fspath(f)
        ) from error


@dataclass(frozen=True, order=True)
class _Directory:
    index: int
    forced: bool
    name: str


class AtomicDirectory:
    """Checkpoint directories with a link to the newest whole one.

        saver = AtomicDirectory("/shared/ckpt", is_master=rank == 0, keep_last=3)
        latest = saver.latest()
        ...
        with saver.checkpoint() as directory:
            if rank == 0:
                atomic_torch_save(state, os.path.join(directory, "state.pt"))

    Strategies: ``sync_any`` and ``sync_all`` make one directory for all ranks; constructor and methods are
    collective there, and a directory is forced if any rank says so, or if all do. ``async`` gives every rank
    directories and a link of its own, named ``<name>_rank_<rank>``. ``mono`` is for a program of one process.

    Args:
        output_directory: seen by all ranks of a sync strategy; made if it is missing.
        is_master: exactly one rank of a sync strategy; it makes, links and deletes.
        name: of this saver; two in one directory have different ones.
        keep_last: whole checkpoints that stay, the newest ones; forced ones stay in any case. -1 keeps all.
        strategy: one of the above.
        device: for programs that pass it; votes travel over gloo, on the CPU.
        timeout: longest wait for another rank, which may be syncing or deleting files meanwhile.
        files: the file system; for tests.
    Raises:
        ConfigError: no rank or several are the master, ranks disagree about an argument, or one is out of
            range; on all ranks.
        PeerError: in a sync strategy, a rank did not call the constructor within `timeout`, or has a saver of
            strategy ``async`` or ``mono``, which waits for no rank.
    """

    def __init__(
        self,
        output_directory: str | os.PathLike[str],
        is_master: bool = False,
        name: str = "AtomicDirectory",
        keep_last: int = -1,
        strategy: str = "sync_any",
        device: object = None,
        *,
        timeout: timedelta = timedelta(minutes=30),
        files: Files | None = None,
    ) -> None:
        if strategy not in STRATEGIES:
            raise ConfigError(f"there is no strategy {strategy!r}; choose one of {', '.join(STRATEGIES)}.")
        if keep_last != -1 and keep_last < 1:
            raise ConfigError(f"keep_last is {keep_last}; it is at least 1, or -1 to keep all.")
        if not name or "/" in name:
            raise ConfigError(f"the name of a saver is part of file names; {name!r} cannot be.")
        posix_path(output_directory)
        self._ranks = _Ranks(strategy, timeout)
        self.strategy = strategy
        self.keep_last = keep_last
        self.output_directory = os.path.abspath(output_directory)
        self.is_master = is_master or strategy in ("async", "mono")
        self.name = f"{name}_rank_{self._ranks.rank}" if strategy == "async" else name
        self.symlink_name = f"{self.name}.latest_checkpoint"
        self._files: Files = LocalFiles() if files is None else files
        self._pattern = re.compile(rf"{re.escape(self.name)}_checkpoint_(\d+)(_force)?")
        #: What this process prepared, and may still be writing.
        self._made: set[str] = set()
        #: A name is given once, also after its directory was deleted: a thread of the block that failed may
        #: still be writing there.
        self._next_index = 0
        self._check_ranks(name)
        if files is None:
            self._on_all(lambda: os.makedirs(self.output_directory, exist_ok=True))

    def prepare_checkpoint_directory(self, force_save: bool = False) -> str:
        """A new empty directory for a checkpoint; collective in the sync strategies.

        Args:
            force_save: the directory is not deleted by `keep_last`.
        Returns:
            Its path, the same on all ranks of a sync strategy.
        Raises:
            ConfigError: there are whole checkpoints and no link, so which one the job goes on from is not
                known.
            CheckpointWriteFailed: storage refused, on any rank; on all ranks.
        """
        votes = self._ranks.gather(force_save)
        force = all(votes) if self.strategy == "sync_all" else any(votes)
        directory = self._on_master(lambda: self._prepare(force))
        self._made.add(os.path.basename(directory))
        self._on_all(lambda: self._wait_until_seen(directory))
        return directory

    def symlink_latest(self, checkpoint_directory: str | os.PathLike[str]) -> None:
        """Make a filled directory the latest checkpoint, and delete what it supersedes; collective as above.

        A rank calls this when it has written its part. When this returns, the checkpoint survives a power
        cut. A directory of an earlier run may be named too, which makes that the latest one.

        Raises:
            ConfigError: it is no directory of this saver, on any rank; on all ranks.
            CheckpointWriteFailed: storage refused, on any rank; on all ranks. The link leads to a whole
                checkpoint.
        """
        found = self._sync(checkpoint_directory)
        self._on_master(lambda: self._link(found))
        self._made.discard(found.name)

    @contextmanager
    def checkpoint(self, force: bool = False) -> Iterator[str]:
        """`prepare_checkpoint_directory`, the block, and `symlink_latest` if no rank failed in it.

        If the block failed on a rank, or its files cannot be made durable, the directory is deleted.

        Raises:
            PeerError: the block failed on another rank; the checkpoint is not linked on any.
        """
        directory = self.prepare_checkpoint_directory(force)
        try:
            yield directory
        except Exception as error:
            self._ranks.gather(f"{type(error).__name__}: {error}")
            self._abandon(directory)
            raise
        failures = self._ranks.gather("")
        if any(failures):
            self._abandon(directory)
            reasons = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(failures) if text)
            raise PeerError(f"{directory} is not linked, as writing it failed on another rank: {reasons}.")
        try:
            found = self._sync(directory)
        except CheckpointWriteFailed:  # on all ranks
            self._abandon(directory)
            raise
        self._on_master(lambda: self._link(found))
        self._made.discard(found.name)

    def latest(self) -> str | None:
        """The directory of the newest whole checkpoint; None if there is none yet.

        Collective in the sync strategies, and the same on all ranks: what the master sees, as another host
        may see an older link for a while.

        Raises:
            ConfigError: there are whole checkpoints and no link.
            CheckpointMissing: the link leads nowhere.
            CheckpointWriteFailed: a host does not see the directory that the master sees.
        """
        latest = self._on_master(self._latest)
        if latest is not None:
            self._on_all(lambda: self._wait_until_seen(latest))
        return latest

    def _latest(self) -> str | None:
        linked = self._whole_or_nothing()[1]
        return self._path(linked.name) if linked else None

    def _sync(self, checkpoint_directory: str | os.PathLike[str]) -> _Directory:
        path = os.path.abspath(checkpoint_directory)
        # The ranks meet here before any of them syncs: what another one still writes would not be durable.
        found = self._on_all(lambda: self._directory_at(path))
        # One rank of each host: what others on it wrote is in the same page cache.
        if self._ranks.first_on_host:
            self._on_all(lambda: self._files.sync_tree(path))
        else:
            self._on_all(lambda: None)
        return found

    def _directory_at(self, path: str) -> _Directory:
        found = self._parse(os.path.basename(path))
        if found is None or os.path.dirname(path) != self.output_directory:
            raise ConfigError(
                f"{path} is no checkpoint directory of {self.name!r} in {self.output_directory}."
            )
        return found

    def _abandon(self, directory: str) -> None:
        """Delete a directory that was never linked, once all ranks know that none fills it any more."""
        name = os.path.basename(directory)
        if name not in self._made:  # the block itself has linked it
            return
        self._made.discard(name)  # if it cannot be deleted now, the next checkpoint does
        if not self.is_master:
            return
        try:
            linked = self._linked()
            if linked is None or linked.name != name:
                self._delete([name])
        except OSError as error:  # that of the block tells more
            log.warning("%s is not whole and could not be deleted: %s", directory, error)

    def _prepare(self, force: bool) -> str:
        directories, linked = self._whole_or_nothing()
        self._remove_leftovers(directories, linked)
        index = max([self._next_index - 1, *(found.index for found in directories)]) + 1
        self._next_index = index + 1
        name = f"{self.name}_checkpoint_{index}" + "_force" * force
        self._files.create(self._marker(name))
        self._files.sync_dir(self.output_directory)
        self._files.make_dir(self._path(name))
        self._files.sync_dir(self.output_directory)
        return self._path(name)

    def _link(self, target: _Directory) -> None:
        files, parent = self._files, self.output_directory
        directories, linked = self._directories(), self._linked()
        if target not in directories:
            raise ConfigError(f"there is no directory {self._path(target.name)} to link to.")
        if linked not in directories or linked.index < target.index or target.name not in self._made:
            files.sync_dir(parent)
            temporary = self._path(f".{self.symlink_name}.{secrets.token_hex(6)}")
            files.symlink(target.name, temporary)
            files.rename(temporary, self._path(self.symlink_name))
            files.sync_dir(parent)
            linked = target
        files.remove(self._marker(target.name))
        self._delete([found.name for found in self._superseded(directories, linked, target)])
        files.sync_dir(parent)

    def _superseded(
        self, directories: list[_Directory], linked: _Directory, target: _Directory
    ) -> list[_Directory]:
        """What may go now that `linked` is durable: leftovers of earlier runs, and those beyond
        `keep_last`."""
        names = set(self._files.list(self.output_directory))
        marked = {found for found in directories if os.path.basename(self._marker(found.name)) in names}
        unfinished = marked - {linked, target}
        whole = [found for found in sorted(directories, reverse=True) if found not in unfinished]
        beyond = whole[self.keep_last :] if self.keep_last > 0 else []
        old = [found for found in beyond if not found.forced and found != linked]
        return [found for found in unfinished if found.name not in self._made] + old

    def _delete(self, names: list[str]) -> None:
        """Under other names first, durably: half of a directory never looks like a checkpoint."""
        removed = {name: self._path(f".{name}.removed-{secrets.token_hex(6)}") for name in names}
        for name, other in removed.items():
            self._files.rename(self._path(name), other)
        self._files.sync_dir(self.output_directory)
        for name, other in removed.items():
            self._files.remove_tree(other)
            self._files.remove(self._marker(name))

    def _remove_leftovers(self, directories: list[_Directory], linked: _Directory | None) -> None:
        """What a crash left of links, deletions and markers."""
        here = {found.name for found in directories} - {linked.name if linked else ""}
        temporary_link = re.compile(rf"\.{re.escape(self.symlink_name)}\.[0-9a-f]{{12}}")
        removed = re.compile(rf"\.({self._pattern.pattern})\.removed-[0-9a-f]{{12}}")
        marker = re.compile(rf"\.({self._pattern.pattern})\.unfinished")
        for name in self._files.list(self.output_directory):
            if temporary_link.fullmatch(name) or name == f"{self.symlink_name}_temp":
                self._files.remove(self._path(name))
            elif removed.fullmatch(name):
                self._files.remove_tree(self._path(name))
            elif (found := marker.fullmatch(name)) and found[1] not in here:
                self._files.remove(self._path(name))

    def _whole_or_nothing(self) -> tuple[list[_Directory], _Directory | None]:
        """All directories and the linked one, which is None only where no checkpoint was ever whole."""
        directories, linked = self._directories(), self._linked()
        if linked in directories:
            return directories, linked
        link = self._path(self.symlink_name)
        if linked is not None:
            raise CheckpointMissing(
                f"{link} leads to {linked.name}, which is not in {self.output_directory}.",
                hint="Bring it back, or make another directory the latest one with symlink_latest(path), or "
                "remove the link to start from nothing.",
                path=link,
            )
        names = self._files.list(self.output_directory)
        whole = [found for found in directories if f".{found.name}.unfinished" not in names]
        if whole:
            newest = max(whole).name
            raise ConfigError(
                f"{self.output_directory} has {len(whole)} checkpoints of {self.name!r}, the newest of them "
                f"{newest}, and no link {self.symlink_name} to the one that is whole; nothing was deleted.",
                hint=f"If the newest is whole: saver.symlink_latest({self._path(newest)!r}). Else move them "
                "away.",
            )
        return directories, None

    def _directories(self) -> list[_Directory]:
        return [found for found in map(self._parse, self._files.list(self.output_directory)) if found]

    def _linked(self) -> _Directory | None:
        target = self._files.read_link(self._path(self.symlink_name))
        return (
            None if target is None else self._parse(os.path.basename(target)) or _Directory(-1, False, target)
        )

    def _parse(self, name: str) -> _Directory | None:
        found = self._pattern.fullmatch(name)
        return _Directory(int(found[1]), bool(found[2]), name) if found else None

    def _path(self, name: str) -> str:
        return os.path.join(self.output_directory, name)

    def _marker(self, name: str) -> str:
        return self._path(f".{name}.unfinished")

    def _wait_until_seen(self, directory: str) -> None:
        deadline = time.monotonic() + _VISIBLE_S
        while not self._files.is_dir(directory):
            if time.monotonic() > deadline:
                raise CheckpointWriteFailed(
                    f"{directory} was made by the master, and this host does not see it after "
                    f"{_VISIBLE_S:.0f} s.",
                    hint="A sync strategy needs storage that all hosts share; take strategy='async' without.",
                )
            time.sleep(0.2)

    def _check_ranks(self, name: str) -> None:
        mine = (self.strategy, name, self.keep_last)
        gathered = self._ranks.gather((*mine, self.is_master))
        differing = sorted({str(values[:3]) for values in gathered})
        if len(differing) > 1:
            raise ConfigError(
                f"ranks disagree about (strategy, name, keep_last) of a saver: {' and '.join(differing)}."
            )
        masters = [rank for rank, values in enumerate(gathered) if values[3]]
        if self.strategy.startswith("sync") and len(masters) != 1:
            found = f"ranks {masters} are masters" if masters else "no rank is its master"
            raise ConfigError(
                f"the saver {name!r} of strategy {self.strategy!r} has one master, and {found}.",
                hint="Pass is_master=rank == 0.",
            )

    def _on_master(self, work: Callable[[], T]) -> T:
        """Do `work` on the master; its value on all ranks, or its error."""
        value, error = _attempt(work) if self.is_master else (None, None)
        gathered = self._ranks.gather((self.is_master, value, error))
        _, value, error = next(found for found in gathered if found[0])
        if error is not None:
            raise error
        return value  # type: ignore[return-value]

    def _on_all(self, work: Callable[[], T]) -> T:
        """Do `work` on every rank; its value there, or the first error of any on all."""
        value, error = _attempt(work)
        for found in self._ranks.gather(error):
            if found is not None:
                raise found
        return value  # type: ignore[return-value]


def _attempt(work: Callable[[], T]) -> tuple[T | None, ResiliencyError | None]:
    try:
        return work(), None
    except ResiliencyError as error:
        return None, error
    except OSError as error:
        where = error.filename or ""
        failed = CheckpointWriteFailed(f"storage refused {where}: {error.strerror or error}.", path=where)
        failed.__cause__ = error
        return None, failed


class _Ranks:
    """The ranks that share a saver: those of the process group in the sync strategies, else this one."""

    def __init__(self, strategy: str, timeout: timedelta) -> None:
        in_group = dist.is_available() and dist.is_initialized()
        env = os.environ
        self.rank = dist.get_rank() if in_group else int(env.get("RANK", "0"))
        self.first_on_host = not strategy.startswith("sync") or env.get("LOCAL_RANK", "0") == "0"
        self._group: dist.ProcessGroup | None = None
        self._timeout = timeout
        if not strategy.startswith("sync"):
            return
        if not in_group and int(env.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError(
                f"strategy {strategy!r} needs the process group of {env['WORLD_SIZE']} ranks.",
                hint="Call init_process_group first, or take strategy='async' or 'mono'.",
            )
        if in_group and dist.get_world_size() > 1:
            try:
                self._group = dist.new_group(backend="gloo", timeout=timeout)
            except RuntimeError as error:
                raise self._lost(error) from error

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in their order.

        Raises:
            PeerError: a rank did not answer.
        """
        if self._group is None:
            return [value]
        gathered: list[T] = [value] * self._group.size()
        try:
            dist.all_gather_object(gathered, value, group=self._group)
        except RuntimeError as error:
            raise self._lost(error) from error
        return gathered

    def _lost(self, error: RuntimeError) -> PeerError:
        return PeerError(
            f"rank {self.rank} lost another rank, or waited {self._timeout} for it: {error}",
            hint="A rank died, does not call the same methods of the saver in the same order, or has a saver "
            "of strategy 'async' or 'mono'.",
            rank=self.rank,
        )
