# SPDX-License-Identifier: Apache-2.0
"""How the ranks of goodput_under_failures.py save, each as its documentation says.

A saver restores the newest complete checkpoint into the tensors of a state when it is made, and gives back
the step of it and a function to call after each step.  It runs in the ranks: torch is imported there.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from resiliency.events import EventStream

#: Complete checkpoints of DCP and NVRx that stay.
KEPT = 2
#: Called after each step, with its number.
Save = Callable[[int], None]
State = dict[str, Any]
#: Saves of the local tier for each one of the persistent tier.
LOCAL_SAVES = 5


def nothing(args: argparse.Namespace, state: State, events: EventStream | None) -> tuple[int, Save]:
    return 0, lambda step: None


def ours(
    args: argparse.Namespace, state: State, events: EventStream | None, *, local: bool = False
) -> tuple[int, Save]:
    """Memory and the persistent tier; with `local` a checkpoint on the host's own disk in between.

    Where there are other hosts, one of them gets a copy of it.
    """
    from resiliency.checkpoint import Checkpointer, CheckpointerOptions, LocalTier

    args.memory.mkdir(parents=True, exist_ok=True)  # a new host has none
    checkpoints = Checkpointer(
        args.directory / "checkpoints",
        # As one does with both tiers: often to the host, seldom to the storage of all.
        every_steps=args.save_every * (LOCAL_SAVES if local else 1),
        local=LocalTier(directory=args.disk, every_steps=args.save_every) if local else None,
        replicated=True,
        events=events,
        options=CheckpointerOptions(arena_root=args.memory),
    )
    restored = checkpoints.restore(state)

    def save(step: int) -> None:
        checkpoints.step(step, state)

    return restored.step, save


def dcp(args: argparse.Namespace, state: State, events: EventStream | None) -> tuple[int, Save]:
    """As PyTorch documents it: a save waits for the one before, and runs beside training."""
    from torch import distributed
    from torch.distributed.checkpoint.state_dict_saver import async_save

    place, group, newest = _restored_by_dcp(args, state)
    rank = distributed.get_rank()
    pending: list[Any] = []

    def save(step: int) -> None:
        if step % args.save_every:
            return
        while pending:
            pending.pop().result()
        if rank == 0:
            _remove_old(place)
        pending.append(async_save(state, checkpoint_id=place / f"step={step}", process_group=group))

    return newest, save


def nvrx(args: argparse.Namespace, state: State, events: EventStream | None) -> tuple[int, Save]:
    """NVRx's persistent writer process, which a save waits for as Megatron does.

    A CPU tensor would be shared with the worker and torn by the next step: the worker clones it in the place
    of its copy from the device.
    """
    import torch
    from nvidia_resiliency_ext.checkpointing.async_ckpt import core, filesystem_async, state_dict_saver
    from torch import distributed

    # Its agreement among ranks sends one number from the current CUDA device.
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    place, group, newest = _restored_by_dcp(args, state)
    rank = distributed.get_rank()
    queue = core.AsyncCallsQueue(persistent=True)
    atexit.register(queue.close)
    cache = state_dict_saver.CheckpointMetadataCache()

    def save(step: int) -> None:
        is_due = step % args.save_every == 0
        queue.maybe_finalize_async_calls(blocking=is_due)
        if not is_due:
            return
        directory = place / f"step={step}"
        if rank == 0:
            _remove_old(place)
        directory.mkdir(parents=True, exist_ok=True)
        writer = filesystem_async.FileSystemWriterAsync(directory, thread_count=2)
        planned = state_dict_saver.save_state_dict_async_plan(
            state, writer, group, enable_cache=True, metadata_cache=cache
        )
        write, _, write_args = writer.get_save_function_and_args()
        request = core.AsyncRequest(
            write,
            write_args,
            [functools.partial(state_dict_saver.save_state_dict_async_finalize, *planned)],
            preload_fn=functools.partial(_clone_buckets, writer.write_buckets),
        )
        queue.schedule_async_request(request)

    return newest, save


def _clone_buckets(buckets: list[Any]) -> list[Any]:
    """In NVRx's worker: a copy of what the trainer shares with it."""
    return [
        (file, key, (data, [(item, tensor.clone()) for item, tensor in tensors]))
        for file, key, (data, tensors) in buckets
    ]


def _restored_by_dcp(args: argparse.Namespace, state: State) -> tuple[Path, Any, int]:
    """(directory of checkpoints, group for savers, step that was loaded)."""
    from torch import distributed
    from torch.distributed.checkpoint.state_dict_loader import load

    place = args.directory / "checkpoints"
    # Its collectives must not meet those of training.
    group = distributed.new_group(backend="gloo")
    newest = [max(_complete(place), default=0)]
    distributed.broadcast_object_list(newest, src=0)
    if newest[0]:
        load(state, checkpoint_id=place / f"step={newest[0]}", process_group=group)
    return place, group, newest[0]


def _remove_old(place: Path) -> None:
    for old in sorted(_complete(place))[:-KEPT]:
        shutil.rmtree(place / f"step={old}")


def _complete(place: Path) -> list[int]:
    """Steps of checkpoints whose metadata, which is written last, is there."""
    return [int(path.parent.name.partition("=")[2]) for path in place.glob("step=*/.metadata")]


SAVERS: dict[str, Callable[[argparse.Namespace, State, EventStream | None], tuple[int, Save]]] = {
    "none": nothing,
    "ours": ours,
    "ours-local": functools.partial(ours, local=True),
    "dcp": dcp,
    "nvrx": nvrx,
}
#: Savers that tell of saves and restores themselves where they are given the events.
TELLING = frozenset({"ours", "ours-local"})
