# SPDX-License-Identifier: Apache-2.0
"""The step page: memory in which each rank of a host writes its last finished step, for its launcher.

A rank pays for two stores into shared memory, under a microsecond, and never for a system call: a reader that
is slow or dead makes no difference to training.  A rank without a launcher writes nothing.

    slot of a local rank: last finished step + 1, its time | time of the last heartbeat at the rank monitor |
    when the rank found the page | step + 1 of the newest checkpoint, and of the restored one; the branch |
    step + 1 that the job would go on from

One process writes each word.  A reader may see a step with the time of the one before it, which is as good.
Times are CLOCK_MONOTONIC, the same in all processes of a host.  The page has no name in any file system: it
is gone with the last process that has it, however that ends.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass

from resiliency.rank import crash_note, inspection
from resiliency.rank.checkpoint_steps import CheckpointSteps
from resiliency.runtime import STOP_NOTES_ENV

#: Where a rank finds its slot: ``/proc/<launcher>/fd/<n>:<slot>``.
STEP_PAGE_ENV = "RESILIENCY_STEP_PAGE"

_STEP = struct.Struct("=Qd")
_TIME = struct.Struct("=d")
#: A cache line each, so that ranks do not take each other's.
_SLOT_BYTES = 64
_CHECKPOINTS = struct.Struct("=QQQ")
_KEPT = struct.Struct("=Q")
_HEARTBEAT_OFFSET, _FOUND_OFFSET, _CHECKPOINTS_OFFSET, _KEPT_OFFSET = 16, 24, 32, 56


@dataclass(frozen=True, kw_only=True)
class RankProgress:
    """What a slot holds; None before the first step or heartbeat.  Times are monotonic seconds.

    `reports`: the rank has found the page: no step means that it has finished none.
    `kept_step`: that the job would go on from, were it told to end now; None where nobody said so.
    """

    step: int | None
    step_time: float | None
    heartbeat_time: float | None
    reports: bool
    checkpoints: CheckpointSteps | None = None
    kept_step: int | None = None


class StepPage:
    """The launcher's side: owns the memory.

    Args:
        ranks: slots, one for each local rank.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._fd = os.memfd_create("resiliency-steps", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, ranks * _SLOT_BYTES)
        self._memory = mmap.mmap(self._fd, ranks * _SLOT_BYTES)

    def variable(self, local_rank: int) -> str:
        """Value of STEP_PAGE_ENV for one rank."""
        return f"/proc/{os.getpid()}/fd/{self._fd}:{local_rank}"

    def clear(self) -> None:
        """Forget an attempt whose ranks have ended."""
        self._memory[:] = bytes(len(self._memory))

    def read(self, local_rank: int) -> RankProgress:
        start = local_rank * _SLOT_BYTES
        count, step_time = _STEP.unpack_from(self._memory, start)
        (heartbeat,) = _TIME.unpack_from(self._memory, start + _HEARTBEAT_OFFSET)
        (kept,) = _KEPT.unpack_from(self._memory, start + _KEPT_OFFSET)
        return RankProgress(
            step=count - 1 if count else None,
            step_time=step_time if count else None,
            heartbeat_time=heartbeat or None,
            reports=_TIME.unpack_from(self._memory, start + _FOUND_OFFSET)[0] > 0,
            checkpoints=self._checkpoints(start),
            kept_step=kept - 1 if kept else None,
        )

    def _checkpoints(self, start: int) -> CheckpointSteps | None:
        newest, restored, branch = _CHECKPOINTS.unpack_from(self._memory, start + _CHECKPOINTS_OFFSET)
        if not newest:
            return None
        return CheckpointSteps(newest=newest - 1, restored=restored - 1 if restored else None, branch=branch)

    def record_heartbeat(self, local_rank: int) -> None:
        """For a rank monitor, which has this memory from its launcher by fork."""
        if 0 <= local_rank < self._ranks:
            _TIME.pack_into(self._memory, local_rank * _SLOT_BYTES + _HEARTBEAT_OFFSET, time.monotonic())

    def close(self) -> None:
        if self._fd >= 0:
            self._memory.close()
            os.close(self._fd)
            self._fd = -1


_slot: tuple[mmap.mmap, int] | None = None
#: Whether there is a page is found out once in a process.
_looked = False


def watch_rank() -> None:
    """Let the launcher, if there is one, see the steps of this rank and inspect it; the first step does, too.

    Call it when the job is set up: a rank that hangs before its first step can be inspected then.
    """
    global _slot, _looked
    if not _looked:
        _slot, _looked = _open_slot(os.environ.get(STEP_PAGE_ENV, "")), True
        if _slot is not None:
            memory, start = _slot
            _TIME.pack_into(memory, start + _FOUND_OFFSET, time.monotonic())
            inspection.offer(os.environ.get(STOP_NOTES_ENV, ""))
            crash_note.install(_last_step)


def report_step(step: int) -> None:
    """Say that this rank has finished `step`.  Without a launcher that asks, this does nothing."""
    if not _looked:
        watch_rank()
    if _slot is not None:
        _STEP.pack_into(_slot[0], _slot[1], step + 1, time.monotonic())


def report_kept(step: int) -> None:
    """Say that the job would go on from `step`, or a later one, were it told to end now.

    With any number of ranks.  A supervisor that has room for a larger job waits until this is news.  Any
    thread may say so, after the first `report_step` or `watch_rank`.
    """
    if _slot is not None:
        memory, at = _slot[0], _slot[1] + _KEPT_OFFSET
        # A save of before may be committed after the step that a job stops at was agreed on.
        _KEPT.pack_into(memory, at, max(step + 1, *_KEPT.unpack_from(memory, at)))


def report_checkpoints(steps: CheckpointSteps) -> None:
    """Say what a rollback of this attempt would go back from."""
    if _slot is not None:
        restored = 0 if steps.restored is None else steps.restored + 1
        _CHECKPOINTS.pack_into(
            _slot[0], _slot[1] + _CHECKPOINTS_OFFSET, steps.newest + 1, restored, steps.branch
        )


def _last_step() -> int | None:
    if _slot is None:
        return None
    count, _ = _STEP.unpack_from(*_slot)
    return count - 1 if count else None


def _open_slot(text: str) -> tuple[mmap.mmap, int] | None:
    path, colon, slot = text.rpartition(":")
    if not colon or not slot.isdecimal():
        return None
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None  # the launcher is gone: its guardian ends this rank soon
    try:
        memory = mmap.mmap(fd, 0)
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)
    start = int(slot) * _SLOT_BYTES
    return (memory, start) if start + _SLOT_BYTES <= len(memory) else None
