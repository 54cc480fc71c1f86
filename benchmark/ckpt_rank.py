# SPDX-License-Identifier: Apache-2.0
"""One rank under one contestant: train, save, measure; or, in a fresh process, restore and measure.

A round measures in turn the limits of the machine, ten undisturbed steps, a save with room to overlap
and the ten steps from there on, and a save without any room: fenced at once, nothing beside it.  What
is compared later saw the same seconds of the machine.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import time
import traceback
from collections import defaultdict
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ckpt_contestants import BLOCKING, CONTESTANTS, Contestant
from ckpt_limits import Limits, drop_from_cache, read_all, timed
from ckpt_training import Training

from resiliency.checkpoint import Tier

STEPS = 10
#: Of a new process; a save comes no earlier.
STEPS_BEFORE_FIRST = 3 * STEPS
#: Forward and backward take that many times as long as copying the state with one thread.
ROOM = 2.0

Figures = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What one group of rank processes is to do.

    Attributes:
        contestant: None measures the limits alone.
        directory: for everything that is written.
        batch: samples of a step, from the task that measured the limits.
        restore: restore from there instead of saving.
        is_warm: the page cache has the files to restore from.
        keep_memory: leave what is captured for the next process.
        digest: what the restored state must be.
        saved: the checkpoint to restore.
    """

    contestant: str | None
    size_bytes: int
    world_size: int
    directory: Path
    rounds: int
    batch: int = 1
    restore: Tier = Tier.NONE
    is_warm: bool = False
    keep_memory: bool = False
    digest: tuple[str, ...] = ()
    saved: Path = Path()


def serve(parent: Connection, task: Task, rank: int, store: str, env: dict[str, str]) -> None:
    """Entry of the process: tell the parent the figures, or why there are none."""
    os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(task.world_size))
    os.environ.update(WORLD_SIZE=str(task.world_size), MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    output = os.open(task.directory / f"output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):  # of everything that the contestant starts as well
        os.dup2(output, stream)
    faulthandler.enable()
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, task.world_size),  # type: ignore[attr-defined]
            rank=rank,
            world_size=task.world_size,
            timeout=timedelta(minutes=3),
        )
        parent.send(("figures", _figures(task, rank, parent)))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException as error:  # the border of the process: the report names it
        parent.send(("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
        os._exit(1)  # threads of a failed contestant could keep it alive for ever


def _figures(task: Task, rank: int, parent: Connection) -> Figures:
    scratch = task.directory / f"limits-{rank}"
    scratch.mkdir(exist_ok=True)
    training = Training(task.size_bytes, rank, batch=task.batch)
    limits = Limits(training.tensors(), scratch)
    if task.contestant is None:
        return _limits(task, training, limits)
    contestant = CONTESTANTS[task.contestant](task.directory / "saved")
    if task.restore is not Tier.NONE:
        return _restore(task, contestant, training, limits)
    return _Saver(task, contestant, training, limits, parent).run()


def _limits(task: Task, training: Training, limits: Limits) -> Figures:
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(task.rounds + 1):
        for threads in (1, 2):
            found[f"copy, {threads} threads"].append(_together(lambda: limits.copy(threads)))  # noqa: B023
        for writers in (1, 2):
            seconds = _together(lambda: limits.write(writers, direct=True))  # noqa: B023
            found[f"write past the page cache, {writers} writers"].append(seconds)
        found["read past the page cache"].append(_together(lambda: limits.read(direct=True)))
        found["write through the page cache, 1 writer"].append(
            _together(lambda: limits.write(1, direct=False))
        )
        found["read through the page cache"].append(_together(lambda: limits.read(direct=False)))
    warm = {name: seconds[1:] for name, seconds in found.items()}
    room = ROOM * sorted(warm["copy, 1 threads"])[task.rounds // 2]
    return {"seconds": warm, "batch": training.batch_for(room), "size_bytes": limits.size_bytes}


def _together(measure: Any) -> float:
    dist.barrier()
    seconds: float = measure()
    return seconds


class _Saver:
    """Trains and saves.  All times are those of this rank; the slowest rank counts later."""

    def __init__(
        self, task: Task, contestant: Contestant, training: Training, limits: Limits, parent: Connection
    ) -> None:
        self._task = task
        self._contestant = contestant
        self._training = training
        self._limits = limits
        self._parent = parent
        self._step = 0
        self._found: dict[str, list[float]] = defaultdict(list)

    def run(self) -> Figures:
        self._tell("baseline")
        setup = timed(lambda: self._contestant.prepare(self._training))
        # As a job does that saves every so many steps: what a contestant prepares beside them is ready.
        self._training.steps(STEPS_BEFORE_FIRST, self._contestant.between_steps)
        self._save_alone()
        first = {name: values[0] for name, values in self._found.items()}
        self._save_alone()
        second_held_s = self._found["held_alone_s"][1]
        self._save_overlapped()  # the other way has a first time as well
        self._found.clear()
        for number in range(self._task.rounds):
            self._round(undisturbed_first=number % 2 == 0)
        figures = {name: list(values) for name, values in self._found.items()}
        self._tell("watch")
        digest = self._training.digest()
        saved = self._save_overlapped(keep=True)
        self._tell("stop")
        self._contestant.close(keep_memory=self._task.keep_memory)
        return {
            "size_bytes": self._limits.size_bytes,
            "setup_s": setup,
            "first_held_s": first["held_alone_s"],
            "second_held_s": second_held_s,
            "first_durable_s": first["durable_s"],
            "digest": digest,
            "saved": saved,
            **figures,
        }

    def _round(self, *, undisturbed_first: bool) -> None:
        """Both orders in turn, so that a drift of the machine's speed favors nobody."""
        found = self._found
        for threads in (1, 2):
            found[f"copy{threads}_s"].append(_together(lambda: self._limits.copy(threads)))  # noqa: B023
        found["write_s"].append(_together(lambda: self._limits.write(1, direct=True)))
        if undisturbed_first:
            self._undisturbed()
        self._save_overlapped()
        if not undisturbed_first:
            self._undisturbed()
        self._save_alone()

    @property
    def _blocks(self) -> bool:
        """Nothing is left to run beside the steps after a save: they need not be looked at."""
        return self._task.contestant in BLOCKING

    def _undisturbed(self) -> None:
        if self._blocks:
            return
        dist.barrier()
        self._found["ten_steps_s"].append(self._training.steps(STEPS, self._contestant.between_steps))

    def _save_overlapped(self, *, keep: bool = False) -> Path:
        """A save, then ten steps; the first one's forward and backward run beside the copy."""
        contestant, training = self._contestant, self._training
        dist.barrier()
        self._step += 1
        began = time.perf_counter()
        save = contestant.save(self._step)
        returned = time.perf_counter()
        training.forward_backward()
        at_fence = time.perf_counter()
        contestant.fence()
        held = time.perf_counter() - at_fence + returned - began
        training.update()
        contestant.between_steps()
        self._found["held_s"].append(held)
        if not self._blocks:
            training.steps(STEPS - 1, contestant.between_steps)
            self._found["window_s"].append(time.perf_counter() - began)
        self._found["durable_beside_steps_s"].append(contestant.drain(save) - began)
        return save.directory if keep else self._delete(save.directory)

    def _save_alone(self) -> None:
        """A save just before the optimizer steps; then nothing runs until it is durable."""
        dist.barrier()
        self._step += 1
        began = time.perf_counter()
        save = self._contestant.save(self._step)
        self._contestant.fence()
        self._found["held_alone_s"].append(time.perf_counter() - began)
        self._found["durable_s"].append(self._contestant.drain(save) - began)
        self._delete(save.directory)

    def _delete(self, directory: Path) -> Path:
        """Of nobody's time: old checkpoints go, and the storage comes to rest."""
        dist.barrier()
        if self._training.rank == 0:
            shutil.rmtree(directory)
            os.sync()
        dist.barrier()
        return directory

    def _tell(self, what: str) -> None:
        """Let the parent look at the memory of all processes; it answers when it has."""
        dist.barrier()
        if self._training.rank == 0:
            self._parent.send(("memory", what))
            self._parent.recv()
        dist.barrier()


def _restore(task: Task, contestant: Contestant, training: Training, limits: Limits) -> Figures:
    if task.restore is Tier.PERSISTENT:
        limits.write(1, direct=not task.is_warm)
        if training.rank == 0:
            drop_from_cache(task.saved)
            if task.is_warm:
                read_all(task.saved)
    contestant.prepare_restore(training, task.saved)
    training.forget()
    dist.barrier()
    seconds = timed(contestant.restore)
    if contestant.restored_from is not task.restore:
        raise RuntimeError(f"restored from {contestant.restored_from}, not {task.restore}")
    if training.digest() != task.digest[training.rank]:
        raise RuntimeError(f"{task.saved}: the restored bytes are not those that were saved")
    found = {"restore_s": [seconds]}
    for threads in (1, 2):
        found[f"copy{threads}_s"] = [_together(lambda: limits.copy(threads))]  # noqa: B023
    if task.is_warm:
        found["cached_read_s"] = [min(_together(lambda: limits.read_cached(n)) for n in (1, 2))]  # noqa: B023
    elif task.restore is Tier.PERSISTENT:
        found["read_s"] = [_together(lambda: limits.read(direct=True))]
    contestant.close(keep_memory=task.keep_memory)
    return found
