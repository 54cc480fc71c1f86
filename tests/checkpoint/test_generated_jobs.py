# SPDX-License-Identifier: Apache-2.0
"""Generated states and histories on four real ranks, beside a model of what each must get back.

The model: a state is a function of the rank and of one number, a save stores that number, and whatever a
restore brings back is on all ranks the state of one number that was saved at that step.  A save is committed
unless the ranks have different tensors in spite of `replicated`, or another branch has committed the step.  A
state with other parts of its tensors is refused.

More than the check has time for:

    RESILIENCY_EXAMPLES=1000 python -m pytest tests/checkpoint/test_generated_jobs.py
"""

from __future__ import annotations

import itertools
import math
import os
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from resiliency.checkpoint import Checkpointer, CheckpointerOptions
from resiliency.checkpoint.agent.client import LinkOptions
from resiliency.checkpoint.state.tensors import leaf_of
from resiliency.checkpoint.trainer.handles import SaveState
from resiliency.errors import LayoutMismatch
from resiliency.runtime import RunInfo
from resiliency.testing.rank_pool import RankPool

SOON = timedelta(seconds=120)
RANKS = 4
EXAMPLES = int(os.environ.get("RESILIENCY_EXAMPLES", "0"))
PLACEMENTS: dict[str, Placement] = {"R": Replicate(), "0": Shard(0), "1": Shard(1)}


@dataclass(frozen=True)
class Entry:
    """One tensor of the state.  `kind`: the mesh it lies on, or what it is without one."""

    kind: str
    shape: tuple[int, ...]
    splits: str = "RR"
    #: Of an extra one: the rank that has it.
    rank: int = 0
    #: Ranks or stages have other shapes of it.
    uneven: bool = False


@dataclass(frozen=True)
class Job:
    entries: tuple[Entry, ...]
    replicated: bool
    with_optimizer: bool
    #: "save", "start" (all ranks start again and restore the newest), "back", "other".
    history: tuple[str, ...]


shapes = st.sampled_from([(8, 8), (3, 5), (4, 1), (1, 2), (40, 500)])
sharded = st.builds(
    Entry,
    kind=st.sampled_from(["grid", "line", "stage"]),
    shape=shapes,
    splits=st.sampled_from(["".join(pair) for pair in itertools.product("R01", repeat=2)]),
    uneven=st.booleans(),
)
copied = st.builds(Entry, kind=st.sampled_from(["grid", "line"]), shape=shapes)
plain = st.builds(
    Entry,
    kind=st.sampled_from(["plain", "tied", "extra"]),
    shape=shapes,
    rank=st.integers(0, RANKS - 1),
    uneven=st.booleans(),
)

events = st.sampled_from(["save", "save", "back", "other", "start"])


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    replicated = draw(st.sampled_from([False, False, True]))
    kinds = st.one_of(plain, copied) if replicated else st.one_of(sharded, plain)
    return Job(
        entries=tuple(draw(st.lists(kinds, min_size=1, max_size=6))),
        replicated=replicated,
        with_optimizer=not replicated and draw(st.booleans()),
        history=tuple(draw(st.lists(events, min_size=3, max_size=9))),
    )


class Meshes:
    """All in one order on all ranks, as making them is collective; `other` has the ranks in another."""

    def __init__(self, *, other: bool) -> None:
        names = ("stage", "copy")
        self.grid = DeviceMesh("cpu", [[0, 2], [1, 3]] if other else [[0, 1], [2, 3]])
        self.line = DeviceMesh("cpu", [3, 1, 0, 2] if other else [0, 1, 2, 3])
        stages = DeviceMesh("cpu", [[1, 0], [3, 2]] if other else [[0, 1], [2, 3]], mesh_dim_names=names)
        self.stage = stages["copy"]


def build(job: Job, meshes: Meshes, rank: int, number: int, *, extras: bool = True) -> dict[str, Any]:
    """The state of a rank."""
    state: dict[str, Any] = {"number": number}
    for position, entry in enumerate(job.entries):
        name, stage = f"t{position}", rank // 2
        place = {"stage": stage, "plain": rank, "tied": rank}.get(entry.kind, 0)
        if job.replicated:
            place = 0
        rows, *rest = entry.shape
        shape = (rows + place * entry.uneven, *rest)
        whole = torch.arange(float(math.prod(shape))).view(shape) + 1000 * number + 100_000 * place
        if entry.kind in ("grid", "line", "stage"):
            mesh = getattr(meshes, entry.kind)
            splits = [PLACEMENTS[split] for split in entry.splits[: mesh.ndim]]
            state[name] = distribute_tensor(whole, mesh, splits, src_data_rank=None)
        elif entry.kind == "extra":
            if extras and rank == entry.rank:
                state[name] = whole
        else:
            state[name] = whole
            if entry.kind == "tied":
                state[f"{name}-view"] = whole[:1]
    if job.with_optimizer:
        rows = 4 + 4 * (rank // 2)
        initial = torch.full((rows, 4), float(number))
        weight = torch.nn.Parameter(distribute_tensor(initial, meshes.stage, [Shard(0)], src_data_rank=None))
        optimizer = torch.optim.AdamW([weight], lr=0.1)
        weight.grad = torch.full_like(weight, 1.0 + number + 100 * (rank // 2))
        optimizer.step()
        state["model"] = {f"weight{rank // 2}": weight}
        state["optimizer"] = optimizer
    return state


def tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What this rank has of all tensors."""
    found: dict[str, torch.Tensor] = {}

    def add(path: str, value: Any) -> None:
        if isinstance(value, torch.optim.Optimizer):
            value = value.state_dict()["state"]
        if isinstance(value, dict):
            for key, item in value.items():
                add(f"{path}/{key}", item)
        elif isinstance(value, torch.Tensor):
            local = value.to_local() if isinstance(value, DTensor) else value
            found[path] = local.detach().clone()

    add("", state)
    return found


def parts(state: dict[str, Any]) -> list[object]:
    """Which part of each tensor this rank has."""
    held = (*state.values(), *state.get("model", {}).values())
    return [leaf_of(value, "dtensor", ()).placement for value in held if isinstance(value, DTensor)]


def is_anywhere(value: bool) -> bool:
    found = [False] * RANKS
    dist.all_gather_object(found, value)
    return any(found)


@dataclass
class Model:
    #: Numbers that were captured at a step, committed or not.
    captured: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    committed: dict[int, int] = field(default_factory=dict)
    step: int = 0
    number: int = 0


def run_job(rank: int, root: str, name: str, job: Job) -> None:
    meshes, others = Meshes(other=False), Meshes(other=True)
    fits_others = not is_anywhere(
        [_place(part) for part in parts(build(job, meshes, rank, 0))]
        != [_place(part) for part in parts(build(job, others, rank, 0))]
    )
    is_refused = job.replicated and any(entry.kind == "extra" for entry in job.entries)
    model = Model()

    def opened() -> Checkpointer:
        return Checkpointer(
            Path(root) / "ckpt",
            keep=99,
            replicated=job.replicated,
            info=RunInfo(job_name=name, host="here", rank=rank, world_size=RANKS),
            options=CheckpointerOptions(
                arena_root=Path(root) / "memory", link=LinkOptions(grace=timedelta(seconds=2))
            ),
        )

    def save(checkpoints: Checkpointer, *, extras: bool = True) -> None:
        model.step, model.number = model.step + 1, model.number + 1
        handle = checkpoints.save(model.step, build(job, meshes, rank, model.number, extras=extras))
        assert handle.wait(SOON)
        is_stale = model.step in model.committed
        expected = SaveState.FAILED if is_stale or (is_refused and extras) else SaveState.COMMITTED
        assert handle.state is expected, (model, handle.record)
        model.captured[model.step].add(model.number)
        if expected is SaveState.COMMITTED:
            model.committed[model.step] = model.number

    def restore(checkpoints: Checkpointer, step: int | None) -> None:
        state = build(job, meshes, rank, 0)
        restored = checkpoints.restore(state, step=step)
        newest = max(model.committed, default=0) if step is None else step
        assert restored.step == newest or (step is None and restored.step in model.captured), (
            model,
            restored,
        )
        if restored.step:
            assert state["number"] in model.captured[restored.step], (model, state["number"])
            expected = tensors(build(job, meshes, rank, state["number"]))
            found = tensors(state)
            assert found.keys() == expected.keys()
            for key, tensor in expected.items():
                assert torch.equal(found[key], tensor), (key, found[key], tensor)
            assert not is_anywhere(state["number"] != _of_rank_0(state["number"]))
        model.step = restored.step

    def restore_to_others(checkpoints: Checkpointer, step: int) -> None:
        state = build(job, others, rank, 0)
        if fits_others:
            assert checkpoints.restore(state, step=step).step == step
            model.step = step
            expected = tensors(build(job, others, rank, state["number"]))
            assert state["number"] in model.captured[step]
            assert all(torch.equal(now, expected[key]) for key, now in tensors(state).items())
            return
        before = tensors(state)
        with pytest.raises(LayoutMismatch):
            checkpoints.restore(state, step=step)
        assert all(torch.equal(now, before[key]) for key, now in tensors(state).items())

    with ExitStack() as stack:
        checkpoints = stack.enter_context(opened())
        for event in job.history:
            if event == "save":
                save(checkpoints)
            elif event == "start":
                stack.close()
                dist.barrier()
                checkpoints = stack.enter_context(opened())
                restore(checkpoints, None)
            elif model.committed and event == "back":
                restore(checkpoints, sorted(model.committed)[len(model.committed) // 2])
            elif model.committed:
                restore_to_others(checkpoints, max(model.committed))
        model.step = max([0, *model.captured])
        save(checkpoints, extras=False)  # so that nothing has to stay in memory


def _place(part: Any) -> tuple[object, object]:
    return part.global_shape, part.global_offset


def _of_rank_0(value: object) -> object:
    found = [value]
    dist.broadcast_object_list(found)
    return found[0]


numbers = itertools.count()


def check(job: Job, rank_pool: RankPool, env: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory(prefix="generated-") as root:
        (Path(root) / "memory").mkdir()
        name = f"generated-{os.getpid()}-{next(numbers)}"
        report = rank_pool.run(
            *(run_job, RANKS, root, name, job), timeout=240.0, operation_timeout=120.0, env=env
        )
        assert len(report.values) == RANKS


generated = settings(
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


@given(job=jobs())
@settings(generated, max_examples=EXAMPLES or 4)
def test_a_few_generated_jobs_get_back_what_they_saved_or_the_reason_why_not(
    rank_pool: RankPool, agent_host_env: dict[str, str], job: Job
) -> None:
    check(job, rank_pool, agent_host_env)


@pytest.mark.slow
@given(job=jobs())
@settings(generated, max_examples=EXAMPLES or 25)
def test_many_generated_jobs_get_back_what_they_saved_or_the_reason_why_not(
    rank_pool: RankPool, agent_host_env: dict[str, str], job: Job
) -> None:
    check(job, rank_pool, agent_host_env)
