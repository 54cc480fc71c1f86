# SPDX-License-Identifier: Apache-2.0
"""The savers that are compared, each behind the same few calls.

    contestant.prepare(training)      what a job does once, at its start
    save = contestant.save(step)      returns when training may go on reading its state
    contestant.fence()                returns when training may write it
    contestant.between_steps()        what the saver asks a training loop to call once a step
    save.wait()                       the checkpoint is durable: written and synced, on all ranks

A saver that copies before its call returns has an empty fence.  Everyone syncs to storage: what
torch.save leaves in the page cache is no checkpoint yet.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    AsyncSaveResponse,
    async_save,
)
from torch.distributed.checkpoint.state_dict_saver import (
    save as dcp_save,
)

from resiliency.checkpoint import Checkpointer, CheckpointerOptions, SaveState, Tier

WAIT = timedelta(minutes=3)
#: Names the directory in shared memory for captures, so that it can be removed whatever happened.
ARENA_ENV = "CKPT_COMPARE_ARENA"


class Save:
    """One save under way.  `durable_at` is the `perf_counter` at which its checkpoint was durable."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._done = threading.Event()
        self._durable_at = 0.0
        self._error: BaseException | None = None

    def done(self, error: BaseException | None = None) -> None:
        """In any thread: it ended now."""
        self._durable_at, self._error = time.perf_counter(), error
        self._done.set()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self) -> float:
        """When it was durable.

        Raises:
            TimeoutError: it was not, in three minutes.
        """
        if not self._done.wait(WAIT.total_seconds()):
            raise TimeoutError(f"{self.directory} was not durable after {WAIT}.")
        if self._error is not None:
            raise self._error
        return self._durable_at


class Trained(Protocol):
    """What is saved."""

    @property
    def model(self) -> torch.nn.Module: ...

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    @property
    def rank(self) -> int: ...

    @property
    def state(self) -> dict[str, Any]:
        """For savers that know modules and optimizers."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """For savers of dictionaries.  The tensors are those that are trained."""
        ...


class Contestant(Protocol):
    """A saver on one rank.  `directory` is its own; all ranks share it."""

    #: Where `restore` found the state.
    restored_from: Tier

    def prepare(self, training: Trained) -> None: ...

    def save(self, step: int) -> Save: ...

    def fence(self) -> None: ...

    def between_steps(self) -> None: ...

    def drain(self, save: Save) -> float:
        """Wait until `save` is durable; returns when it was."""
        ...

    def close(self, *, keep_memory: bool = False) -> None:
        """Give everything back.  With `keep_memory`, what a restart could find in memory stays."""
        ...

    def prepare_restore(self, training: Trained, saved: Path) -> None:
        """In a fresh process, before the clock runs: what a job has to start anyway."""
        ...

    def restore(self) -> None:
        """Bring back what `save` stored in `saved`."""
        ...


class Rival:
    """What most rivals have in common."""

    restored_from = Tier.PERSISTENT

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def prepare(self, training: Trained) -> None:
        self._training = training

    def fence(self) -> None: ...

    def between_steps(self) -> None: ...

    def drain(self, save: Save) -> float:
        return save.wait()

    def close(self, *, keep_memory: bool = False) -> None: ...

    def prepare_restore(self, training: Trained, saved: Path) -> None:
        self._training, self._saved = training, saved

    def _begin(self, step: int) -> Save:
        save = Save(self._directory / f"step-{step}")
        save.directory.mkdir(parents=True, exist_ok=True)
        return save


class TorchSave(Rival):
    """`torch.save`, one file per rank, then fsync."""

    def save(self, step: int) -> Save:
        save = self._begin(step)
        with (save.directory / f"rank{self._training.rank}.pt").open("wb") as file:
            torch.save(self._training.state_dict(), file)
            file.flush()
            os.fsync(file.fileno())
        save.done()
        return save

    def restore(self) -> None:
        path = self._saved / f"rank{self._training.rank}.pt"
        # Mapped, so that every byte moves once, into its place.
        copy_into(self._training, torch.load(path, weights_only=True, mmap=True))


def copy_into(training: Trained, saved: dict[str, Any]) -> None:
    """Copy what was a `state_dict` of this rank into the tensors that are trained."""
    state = saved[f"rank{training.rank}"]
    training.model.load_state_dict(state["model"])
    # The optimizer's own loading would clone and let go of what it had.
    target = training.optimizer.state_dict()["state"]
    for index, moments in state["optimizer"]["state"].items():
        for key, value in moments.items():
            target[index][key].copy_(value)


class _Dcp(Rival):
    """Anything that `torch.distributed.checkpoint.load` reads."""

    def prepare(self, training: Trained) -> None:
        super().prepare(training)
        # Of its own: a save in the background must not mix its collectives with training's.
        self._group = dist.new_group(backend="gloo")

    def restore(self) -> None:
        load(self._training.state_dict(), checkpoint_id=self._saved)


class DcpSave(_Dcp):
    """`dcp.save`."""

    def save(self, step: int) -> Save:
        save = self._begin(step)
        dcp_save(self._training.state_dict(), checkpoint_id=save.directory, process_group=self._group)
        save.done()
        return save


class DcpAsync(_Dcp):
    """`dcp.async_save` with its defaults, in a thread or in a process."""

    def __init__(self, directory: Path, *, process: bool) -> None:
        super().__init__(directory)
        self._type = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
        self._staged: Future[None] | None = None

    def _options(self, save: Save) -> dict[str, Any]:
        return {"checkpoint_id": save.directory}

    def save(self, step: int) -> Save:
        save = self._begin(step)
        response = async_save(
            self._training.state_dict(),
            process_group=self._group,
            async_checkpointer_type=self._type,
            **self._options(save),
        )
        if isinstance(response, AsyncSaveResponse):
            self._staged, upload = response.staging_completion, response.upload_completion
        else:
            upload = response
        upload.add_done_callback(lambda done: save.done(done.exception()))
        return save

    def fence(self) -> None:
        staged, self._staged = self._staged, None
        if staged is not None:
            staged.result(WAIT.total_seconds())


class DcpTuned(DcpAsync):
    """`dcp.async_save` with all that its options offer.

    The stager keeps its buffers (in shared memory for the process) and copies in a thread of its own,
    so the copy overlaps with the forward and backward; two writers; the plan is cached.  Pinned
    buffers, and with them copies that do not block, need CUDA.
    """

    def __init__(self, directory: Path, *, process: bool, pinned: bool = False) -> None:
        super().__init__(directory, process=process)
        options = StagingOptions(
            use_pinned_memory=pinned,
            use_shared_memory=process,
            use_async_staging=True,
            use_non_blocking_copy=pinned,
        )
        self._stager = DefaultStager(options)

    def _options(self, save: Save) -> dict[str, Any]:
        return {
            "async_stager": self._stager,
            "storage_writer": FileSystemWriter(save.directory, thread_count=2),
            "planner": DefaultSavePlanner(enable_plan_caching=True),
        }

    def close(self, *, keep_memory: bool = False) -> None:
        self._stager.close()


class Nvrx(_Dcp):
    """NVRx's persistent writer process with `FileSystemWriterAsync` and its metadata cache.

    It is made for CUDA tensors, which its worker copies to the host while training waits.  A CPU
    tensor would only be shared with the worker, and be written while the optimizer changes it; so the
    worker clones it in the place of that copy.
    """

    _queue: Any = None

    def prepare(self, training: Trained) -> None:
        from nvidia_resiliency_ext.checkpointing.async_ckpt import core, filesystem_async, state_dict_saver

        super().prepare(training)
        # Its agreement among ranks sends one number from the current CUDA device.
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
        self._core, self._files, self._saver = core, filesystem_async, state_dict_saver
        self._queue = core.AsyncCallsQueue(persistent=True)
        self._cache = state_dict_saver.CheckpointMetadataCache()
        self._under_way: Save | None = None

    def save(self, step: int) -> Save:
        save = self._begin(step)
        writer = self._files.FileSystemWriterAsync(save.directory, thread_count=2)
        planned = self._saver.save_state_dict_async_plan(
            self._training.state_dict(), writer, self._group, enable_cache=True, metadata_cache=self._cache
        )
        write, _, args = writer.get_save_function_and_args()
        request = self._core.AsyncRequest(
            write,
            args,
            [functools.partial(self._saver.save_state_dict_async_finalize, *planned)],
            preload_fn=functools.partial(_clone_buckets, writer.write_buckets),
        )
        self._queue.schedule_async_request(request)
        self._under_way = save
        return save

    def between_steps(self) -> None:
        save = self._under_way
        if save is not None and self._queue.maybe_finalize_async_calls(blocking=False):
            self._under_way = None
            save.done()

    def drain(self, save: Save) -> float:
        deadline = time.monotonic() + WAIT.total_seconds()
        while not save.is_done and time.monotonic() < deadline:
            self.between_steps()
            threading.Event().wait(0.005)  # its own blocking wait looks every 0.1 s
        return save.wait()

    def close(self, *, keep_memory: bool = False) -> None:
        if self._queue is not None:
            self._queue.close()


def _clone_buckets(buckets: list[Any]) -> list[Any]:
    """In NVRx's worker: a copy of what the trainer shares with it."""
    return [
        (file, key, (data, [(item, tensor.clone()) for item, tensor in tensors]))
        for file, key, (data, tensors) in buckets
    ]


class Ours:
    """`resiliency.checkpoint.Checkpointer`."""

    def __init__(self, directory: Path, *, slots: int = 0) -> None:
        self._directory = directory
        self._slots = slots

    def prepare(self, training: Trained) -> None:
        self._training = training
        self._checkpoints = self._open()
        self._checkpoints.prepare(training.state)  # as `restore` and `step` do

    def save(self, step: int) -> Save:
        save = Save(self._directory / f"step={step}")
        handle = self._checkpoints.save(step, self._training.state)

        def watch() -> None:
            handle.wait(WAIT)
            failed = handle.state is not SaveState.COMMITTED
            save.done(RuntimeError(f"not committed: {handle.record}") if failed else None)

        threading.Thread(target=watch, daemon=True).start()
        return save

    def fence(self) -> None:
        self._checkpoints.fence()

    def between_steps(self) -> None: ...

    def drain(self, save: Save) -> float:
        return save.wait()

    def close(self, *, keep_memory: bool = False) -> None:
        self._checkpoints.close(finished=not keep_memory)

    def prepare_restore(self, training: Trained, saved: Path) -> None:
        self._training = training
        self._checkpoints = self._open()

    def restore(self) -> None:
        self.restored_from = self._checkpoints.restore(self._training.state).tier

    def _open(self) -> Checkpointer:
        # The benchmark deletes old checkpoints itself, for all contestants, while no clock runs.
        options = CheckpointerOptions(arena_root=Path(os.environ[ARENA_ENV]), slots=self._slots)
        return Checkpointer(self._directory, keep=1000, options=options)


def _dlrover(directory: Path) -> Contestant:
    from ckpt_memory_rivals import DlroverFlash  # which needs this module

    return DlroverFlash(directory)


def _nvrx_local(directory: Path, *, persistent: bool) -> Contestant:
    from ckpt_memory_rivals import NvrxLocal

    return NvrxLocal(directory, persistent=persistent)


def _lm_resiliency(directory: Path) -> Contestant:
    from ckpt_memory_rivals import LmResiliency

    return LmResiliency(directory)


ONE_SLOT = "ours, one slot"
OURS, DLROVER, NVRX_LOCAL, NVRX_FORKED = "ours", "DLRover flash", "NVRx local", "NVRx local, forked"
LM_RESILIENCY = "lm-resiliency"
CONTESTANTS: dict[str, Callable[[Path], Contestant]] = {
    OURS: Ours,
    ONE_SLOT: functools.partial(Ours, slots=1),
    "torch.save": TorchSave,
    "DCP save": DcpSave,
    "DCP async, thread": functools.partial(DcpAsync, process=False),
    "DCP async, process": functools.partial(DcpAsync, process=True),
    "DCP async, thread, tuned": functools.partial(DcpTuned, process=False),
    "DCP async, process, tuned": functools.partial(DcpTuned, process=True),
    "NVRx async": Nvrx,
    DLROVER: _dlrover,
    NVRX_LOCAL: functools.partial(_nvrx_local, persistent=True),
    NVRX_FORKED: functools.partial(_nvrx_local, persistent=False),
    LM_RESILIENCY: _lm_resiliency,
}
#: Ours are no rivals of each other.
OWN = frozenset({OURS, ONE_SLOT})
#: Those that take part where this package can be imported, and whose absence is no failure.
OPTIONAL = {
    DLROVER: "dlrover",
    NVRX_LOCAL: "nvidia_resiliency_ext",
    NVRX_FORKED: "nvidia_resiliency_ext",
    LM_RESILIENCY: "lm_resiliency",
}
#: They hold training until the checkpoint is durable, so nothing is left to slow the next steps.
BLOCKING = frozenset({"torch.save", "DCP save"})
#: One reader for each format; the other contestants are restored once, to see that the bytes are right.
READERS = frozenset({*OWN, "torch.save", "DCP save", DLROVER, NVRX_LOCAL, LM_RESILIENCY})
#: A new process finds in the host's memory what the one before it saved.
FROM_MEMORY = frozenset({*OWN, DLROVER})


def is_installed(contestant: str) -> bool:
    """False only for an optional one."""
    return contestant not in OPTIONAL or importlib.util.find_spec(OPTIONAL[contestant]) is not None
