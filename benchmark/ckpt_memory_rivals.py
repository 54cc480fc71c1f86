# SPDX-License-Identifier: Apache-2.0
"""Optional contestants that keep checkpoints on the host: DLRover in its memory, NVRx and lm-resiliency on
its own disk.

They take part where their distribution is installed (`OPTIONAL` in ckpt_contestants); nothing here imports
one before it is used.  Each is used as its documentation says, on one host, and is measured as the others:
every rank saves all of its state, and a checkpoint counts when its files are synced.  What they leave
unsynced is synced here, inside the time until it is durable, since their users would have to.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from ckpt_contestants import WAIT, Nvrx, Rival, Save, Trained, copy_into
from ckpt_groups import RankFailed

from resiliency.checkpoint import Tier
from resiliency.testing import warm

#: What DLRover calls the part of a state that a rank saves, if it is one part.
_PART = "model_states"
#: Both are fixed in DLRover; a job has a directory of sockets, and a segment for each of its ranks.
_SOCKETS = Path("/tmp/ckpt_sock")  # noqa: S108
_SEGMENTS = Path("/dev/shm")  # noqa: S108
_START_S = 120.0
_LOOK_S = 0.005


class DlroverFlash(Rival):
    """DLRover's flash checkpoint: a rank copies its state into shared memory, and a saver writes that.

    The saver runs where `dlrover-run` has it, in a process that outlives the ranks (`dlrover_saver`); all
    ranks are told to save a shard of their own.  A save to storage is its save to memory plus a message to
    the saver, so one contestant shows both: training is held for the first, and the second makes it durable.
    """

    def prepare(self, training: Trained) -> None:
        super().prepare(training)
        self._engine = self._open()

    def save(self, step: int) -> Save:
        save = self._begin(step)
        path = self._shard(save.directory)
        self._mark = _durable(self._directory, step)
        if not self._engine.save_to_storage(step, {_PART: self._training.state_dict()}, {_PART: path}):
            raise RuntimeError(f"DLRover skipped the save of step {step}: it still writes the one before")
        return save

    def drain(self, save: Save) -> float:
        # Its own `wait_latest_checkpoint` looks every 3 s.
        deadline = time.monotonic() + WAIT.total_seconds()
        while not self._mark.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{save.directory} was not durable after {WAIT}.")
            threading.Event().wait(_LOOK_S)
        return float(self._mark.read_text())

    def close(self, *, keep_memory: bool = False) -> None:
        if not keep_memory:
            self._forget()
        self._engine.close()

    def prepare_restore(self, training: Trained, saved: Path) -> None:
        super().prepare_restore(training, saved)
        self._engine = self._open()

    def restore(self) -> None:
        # As its own `load`, which does not tell where it has found the state.
        _, parts = self._engine.get_state_dict_from_memory()
        self.restored_from = Tier.MEMORY if parts else Tier.PERSISTENT
        state = parts[_PART] if parts else self._engine.load(self._shard(self._saved))
        copy_into(self._training, state)

    def _open(self) -> Any:
        from dlrover.trainer.torch.flash_checkpoint.full_ckpt_engine import FullCheckpointEngine

        storage, ranks = SyncedStorage(str(self._directory)), dist.get_world_size()
        return FullCheckpointEngine(
            str(self._directory), storage, local_shard_num=ranks, global_shard_num=ranks
        )

    def _shard(self, directory: Path) -> str:
        return str(directory / f"rank_{self._training.rank}.pt")

    def _forget(self) -> None:
        """What the memory holds is lost, as after a restart of the host."""
        from dlrover.python.elastic_agent.torch.ckpt_saver import SharedMemoryHandler

        handler = SharedMemoryHandler(self._training.rank, host=False)
        handler.metadata.set({})
        handler.init_shared_memory()
        if handler.shared_memory is not None:
            handler.shared_memory.unlink()
        handler.close()


class SyncedStorage:
    """DLRover's storage on a disk, but each file is synced, and the time of a commit is kept.

    Its own leaves state files unsynced, and syncs small ones before they are flushed.  (A class of its own
    and not derived: the saver imports it by name, and that must not need DLRover.)
    """

    def __init__(self, root: str) -> None:
        from dlrover.python.common.storage import PosixDiskStorage

        self._root = Path(root)
        self._disk = PosixDiskStorage()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._disk, name)

    def get_class_meta(self) -> Any:
        from dlrover.python.common.serialize import ClassMeta

        return ClassMeta(__name__, type(self).__name__, {"root": str(self._root)})

    def write(self, content: str | bytes | memoryview, path: str) -> None:
        with open(path, "w" if isinstance(content, str) else "wb") as file:
            file.write(content)
        _sync(Path(path))

    def write_state_dict(self, state: Any, path: str, write: Callable[..., object] | None = None) -> None:
        self._disk.write_state_dict(state, path, write)
        _sync(Path(path))

    def commit(self, step: int, success: bool) -> None:
        """The last that the saver does for a step: all shards are written, and its tracker names it."""
        self._disk.commit(step, success)
        if success:
            mark = _durable(self._root, step)
            part = mark.with_suffix(".part")
            part.write_text(repr(time.perf_counter()))  # of one clock for all processes of a host
            part.replace(mark)


@contextlib.contextmanager
def dlrover_saver(directory: Path) -> Iterator[Mapping[str, str]]:
    """DLRover's saver, from the first rank to the last; yields what to tell the ranks.

    Raises:
        RankFailed: it did not start; why is in `directory`.
    """
    # As dlrover-run names itself and the job.  Both make the names of sockets and segments.
    env = {"ROLE_NAME": "dlrover-trainer", "TORCHELASTIC_RUN_ID": directory.name}
    with (directory / "output-saver").open("ab") as output:
        process, pipe = warm.start_function(
            _save_for_ranks, env={**os.environ, **env}, stdout=output.fileno(), stderr=output.fileno()
        )
    try:
        # Before the ranks begin: what the launcher itself takes, every job has, and no save costs it.
        if not pipe.poll(_START_S) or not _received(pipe):
            raise RankFailed("DLRover's saver did not start")
        yield env
    finally:
        pipe.close()
        process.kill()
        process.wait(10)
        for segment in _SEGMENTS.glob(f"{directory.name}_*"):
            segment.unlink(missing_ok=True)
        shutil.rmtree(_SOCKETS / directory.name, ignore_errors=True)
        with contextlib.suppress(OSError):  # other jobs have theirs there
            _SOCKETS.rmdir()


def _save_for_ranks(parent: Connection) -> None:
    """What the agent of `dlrover-run` does about checkpoints.  Ends with the process that started it."""
    from dlrover.python.elastic_agent.torch.ckpt_saver import AsyncCheckpointSaver

    AsyncCheckpointSaver.start_async_saving_ckpt()
    parent.send("ready")
    _received(parent)


def _received(pipe: Connection) -> bool:
    """Whether there was a message; else the other side has ended."""
    with contextlib.suppress(EOFError, ConnectionError):
        pipe.recv()
        return True
    return False


def _durable(root: Path, step: int) -> Path:
    """There as soon as the step is durable; holds when that was."""
    return root / f"durable-{step}"


class NvrxLocal(Nvrx):
    """NVRx's local checkpoints: a file for each rank, which its async worker writes.

    With `persistent`, as NVRx has it: the state is copied while training waits, and goes to a worker that
    stays.  Else the older way, which NVRx means to drop: a process is forked for each save, and its memory
    is the copy.  A manager is made for each save, so that old files go as everyone's do, while no clock runs.
    """

    def __init__(self, directory: Path, *, persistent: bool) -> None:
        super().__init__(directory)
        self._persistent = persistent

    def prepare(self, training: Trained) -> None:
        super().prepare(training)
        # It waits there for its copies from the device; here is none.
        torch.cuda.synchronize = lambda: None  # type: ignore[assignment, misc]
        self._queue = self._core.AsyncCallsQueue(persistent=self._persistent)

    def save(self, step: int) -> Save:
        save = self._begin(step)
        state = HostState(self._training.state_dict(), copied=self._persistent)
        request = _manager(save.directory).save(state, step, is_async=True)
        files = save.directory / str(self._training.rank)
        write = functools.partial(_write_and_sync, request.async_fn, files)
        self._queue.schedule_async_request(request._replace(async_fn=write))
        self._under_way = save
        return save

    def restore(self) -> None:
        manager = _manager(self._saved)
        manager.find_latest()
        loaded, _ = manager.load()
        copy_into(self._training, loaded.state)


class LmResiliency(Rival):
    """lm-resiliency: a copy in the memory of the process, flushed to the host's disk, with its checksums.

    As its hook does it after `optimizer.step()`; each save is flushed.  Its copies to other hosts are off, as
    no contestant makes any here.
    """

    def prepare(self, training: Trained) -> None:
        super().prepare(training)
        self._manager = self._open()

    def save(self, step: int) -> Save:
        self._manager.save(self._training.state_dict(), step)
        self._manager.flush_to_disk(step)
        files = self._manager._disk
        save = Save(files._folder / f"step-{step}")

        def watch() -> None:
            error = None
            try:
                files.wait()
            except RuntimeError as failure:
                error = failure
            save.done(error)

        threading.Thread(target=watch, daemon=True).start()
        return save

    def prepare_restore(self, training: Trained, saved: Path) -> None:
        super().prepare_restore(training, saved)
        self._manager = self._open()

    def restore(self) -> None:
        found = self._manager.load()
        if found is None:
            raise RuntimeError("lm-resiliency found nothing to load")
        copy_into(self._training, found[0])

    def close(self, *, keep_memory: bool = False) -> None:
        self._manager.close()

    def _open(self) -> Any:
        from lm_resiliency import InMemoryCkptConfig
        from lm_resiliency.checkpointing.manager import InMemoryCheckpointManager

        config = InMemoryCkptConfig(
            disk_flush_interval=0,
            disk_folder=str(self._directory),
            run_id="compare",
            verify_integrity=True,
            pin_memory=False,
        )
        # Its switch for jobs whose replicas are copies already.
        return InMemoryCheckpointManager(config, SimpleNamespace(has_natural_replicas=True))


class HostState:
    """A state on the host, with what NVRx's local manager calls (its `TensorAwareStateDict`, in part).

    NVRx's own class for states takes tensors of a GPU alone; for others its guide asks for a class like this.
    """

    def __init__(self, state: dict[str, Any], *, copied: bool) -> None:
        self.state = state
        self._copied = copied

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        """In the place of the copy from the device."""
        if self._copied:
            # Not in place, as NVRx's does it: an optimizer's `state_dict` shares its inner dictionaries.
            self.state = _cloned(self.state)

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """The tensors are where they were."""


def _cloned(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _cloned(value) for name, value in tree.items()}
    if isinstance(tree, list):
        return [_cloned(value) for value in tree]
    return tree.detach().clone() if isinstance(tree, torch.Tensor) else tree


def _manager(directory: Path) -> Any:
    from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager

    return LocalCheckpointManager(directory)


def _write_and_sync(write: Callable[..., object], directory: Path, *args: object) -> None:
    """In NVRx's worker: its files are durable when its call ends."""
    write(*args)
    for file in directory.iterdir():
        _sync(file)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
