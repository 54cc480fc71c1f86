# SPDX-License-Identifier: Apache-2.0
"""Generated states and histories on four real ranks, beside a model of what each must get back.

The model: a state is a function of the rank and of one number, a save stores that number in tiers, and a
restore brings back, on all ranks, the number that the tier it names holds at that step: of no step before the
newest of the live branch that is committed, or was captured by all ranks when they were killed, and of a
branch that was left only by its step.  A save is committed unless the ranks have different tensors in spite
of `replicated`, or the step holds another number of the live branch already, which the local tier alone
replaces.  A state with other parts of its tensors is refused.

More than the check has time for:

    RESILIENCY_EXAMPLES=1000 python -m pytest tests/checkpoint/test_generated_jobs.py
"""

from __future__ import annotations

import itertools
import math
import os
import pickle
import signal
import tempfile
from collections import defaultdict
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from resiliency.checkpoint import Checkpointer, CheckpointerOptions, LocalTier, Tier
from resiliency.checkpoint.agent.client import LinkOptions
from resiliency.checkpoint.state.tensors import leaf_of
from resiliency.checkpoint.trainer.handles import SaveState
from resiliency.errors import LayoutMismatch
from resiliency.runtime import RunInfo
from resiliency.testing.rank_pool import RankOutcome, RankPool

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
    #: Of each of two stages: "" or adamw or sgd; on the stage's mesh or on plain tensors.
    optimizer: str
    #: "save"; "start" (all ranks start again and restore the newest); "again" (that, and it is saved as at
    #: the end of a loop); "back" (to an older step); "left" (to one of a branch that was left); "other"; or a
    #: kill of all ranks within a save, or once they have captured
    #: it, or then with their agent; the next start restores the newest.
    history: tuple[str, ...]
    optimizer_is_plain: bool = False
    has_local: bool = False


shapes = st.sampled_from([(8, 8), (3, 5), (4, 1), (1, 2), (40, 500)])
sharded = st.builds(
    Entry,
    kind=st.sampled_from(["grid", "line", "stage", "column"]),
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

KILLS = {"kill", "kill captured", "kill agent"}
events = st.sampled_from([*["save"] * 4, "back", "back", "left", "other", "start", "again", *sorted(KILLS)])


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    replicated = draw(st.sampled_from([False, False, True]))
    kinds = st.one_of(plain, copied) if replicated else st.one_of(sharded, plain)
    entries = tuple(draw(st.lists(kinds, min_size=1, max_size=6)))
    # A rank of these may get the capture of another after a kill, which lacks its own tensor: it is refused.
    is_refused = replicated and any(entry.kind == "extra" for entry in entries)
    chosen = events.filter(lambda event: event not in KILLS) if is_refused else events
    return Job(
        entries=entries,
        replicated=replicated,
        optimizer="" if replicated else draw(st.sampled_from(["", "adamw", "sgd"])),
        history=tuple(draw(st.lists(chosen, min_size=3, max_size=9))),
        optimizer_is_plain=draw(st.booleans()),
        has_local=draw(st.booleans()),
    )


class Meshes:
    """All in one order on all ranks, as making them is collective; `other` has the ranks in another."""

    def __init__(self, *, other: bool) -> None:
        names = ("stage", "copy")
        self.grid = DeviceMesh("cpu", [[0, 2], [1, 3]] if other else [[0, 1], [2, 3]])
        self.line = DeviceMesh("cpu", [3, 1, 0, 2] if other else [0, 1, 2, 3])
        stages = DeviceMesh("cpu", [[1, 0], [3, 2]] if other else [[0, 1], [2, 3]], mesh_dim_names=names)
        self.stage = stages["copy"]
        columns = DeviceMesh("cpu", [[0, 3], [1, 2]] if other else [[0, 1], [2, 3]], mesh_dim_names=names)
        self.column = columns["stage"]


def build(job: Job, meshes: Meshes, rank: int, number: int, *, extras: bool = True) -> dict[str, Any]:
    """The state of a rank."""
    state: dict[str, Any] = {"number": number}
    for position, entry in enumerate(job.entries):
        name, stage = f"t{position}", rank // 2
        place = {"stage": stage, "column": rank % 2, "plain": rank, "tied": rank}.get(entry.kind, 0)
        if job.replicated:
            place = 0
        rows, *rest = entry.shape
        shape = (rows + place * entry.uneven, *rest)
        whole = torch.arange(float(math.prod(shape))).view(shape) + 1000 * number + 100_000 * place
        if entry.kind in ("grid", "line", "stage", "column"):
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
    if job.optimizer:
        rows = 4 if job.optimizer_is_plain else 4 + 4 * (rank // 2)
        initial = torch.full((rows, 4), float(number))
        if not job.optimizer_is_plain:
            initial = distribute_tensor(initial, meshes.stage, [Shard(0)], src_data_rank=None)
        weight = torch.nn.Parameter(initial)
        optimizer: torch.optim.Optimizer
        if job.optimizer == "adamw":
            optimizer = torch.optim.AdamW([weight], lr=0.1)
        else:
            optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
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
    #: Numbers that were captured at a step, the newest last, committed or not.
    captured: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    #: By tier, step to number; and what a kill may have left there.
    committed: dict[str, dict[int, int]] = field(default_factory=lambda: {"persistent": {}, "local": {}})
    unclear: dict[str, dict[int, int]] = field(default_factory=lambda: {"persistent": {}, "local": {}})
    #: The live branch: step to the numbers that were captured there, of two starts maybe two.
    path: dict[int, set[int]] = field(default_factory=dict)
    #: Number to the path that led to it.
    paths: dict[int, dict[int, set[int]]] = field(default_factory=dict)
    #: No restart may go on from an older one.
    safe: int = 0
    step: int = 0
    number: int = 0
    last: int = 0
    restored: int = 0

    def standing(self, tier: str, step: int) -> set[int | None]:
        """What may be there."""
        found: set[int | None] = {self.committed[tier].get(step)}
        return found | ({self.unclear[tier][step]} if step in self.unclear[tier] else set())

    def outcomes(self, tier: str, step: int, number: int) -> set[bool]:
        """Whether a save of `number` at `step` counts as committed in `tier`."""
        found = set()
        for standing in self.standing(tier, step):
            if standing in (None, number) or standing not in self.path.get(step, ()):
                found.add(True)  # what was left is replaced
            elif tier == "persistent" or step == self.restored:
                found.add(False)
            elif any(other < step for other in self.live(tier)):
                found.add(True)  # it is replaced: there is an older one
            else:
                others = {*self.unclear[tier], *self.committed[tier]}
                found |= {False, any(other < step for other in others)}
        return found

    def live(self, tier: str) -> list[int]:
        """Committed steps of the live branch, lowest first."""
        return sorted(s for s, number in self.committed[tier].items() if number in self.path.get(s, ()))

    def left(self) -> list[int]:
        """Steps that are of a branch that was left, wherever they are committed, lowest first."""
        live = {step for tier in self.committed for step in self.live(tier)}
        return sorted(self.committed["persistent"].keys() - live)

    def may_go_back(self, step: int) -> bool:
        """Whether it is known if a newer save is there."""
        return not any(other >= step for unclear in self.unclear.values() for other in unclear)

    def add(self, step: int, number: int) -> None:
        self.captured[step].append(number)
        self.path.setdefault(step, set()).add(number)
        self.paths.setdefault(number, {s: set(found) for s, found in self.path.items() if s <= step})

    def go_back(self, step: int, number: int) -> None:
        newer = any(other > step for tier in self.committed for other in self.live(tier))
        if newer or number not in self.path.get(step, ()):
            self.path = {s: set(found) for s, found in self.paths[number].items()}
            self.safe = step


class Ranks:
    """One rank's part of a job, from one start of its process to the next."""

    def __init__(self, rank: int, root: Path, name: str, job: Job) -> None:
        self.rank, self.root, self.name, self.job = rank, root, name, job
        self.meshes, self.others = Meshes(other=False), Meshes(other=True)
        self.fits_others = not is_anywhere(
            [_place(part) for part in parts(build(job, self.meshes, rank, 0))]
            != [_place(part) for part in parts(build(job, self.others, rank, 0))]
        )
        self.tiers = ["persistent", *(["local"] if job.has_local else [])]
        file = root / f"model-{rank}"
        self.model: Model = pickle.loads(file.read_bytes()) if file.exists() else Model()  # noqa: S301

    def opened(self) -> Checkpointer:
        local = LocalTier(directory=self.root / "local", keep=99) if self.job.has_local else None
        return Checkpointer(
            self.root / "ckpt",
            keep=99,
            local=local,
            replicated=self.job.replicated,
            info=RunInfo(job_name=self.name, host="here", rank=self.rank, world_size=RANKS),
            options=CheckpointerOptions(
                arena_root=self.root / "memory", link=LinkOptions(grace=timedelta(seconds=2))
            ),
        )

    def state(self, number: int, *, extras: bool = True) -> dict[str, Any]:
        return build(self.job, self.meshes, self.rank, number, extras=extras)

    def save(self, checkpoints: Checkpointer, *, extras: bool = True) -> None:
        self.model.step, self.model.last = self.model.step + 1, self.model.last + 1
        self.model.number = self.model.last
        self._save(checkpoints, extras=extras)

    def save_again(self, checkpoints: Checkpointer) -> None:
        if self.model.step:
            self._save(checkpoints, wait=SOON)

    def _save(self, checkpoints: Checkpointer, *, extras: bool = True, wait: timedelta | None = None) -> None:
        model, step, number = self.model, self.model.step, self.model.number
        state = self.state(number, extras=extras)
        handle = checkpoints.save(step, state, wait=wait)
        assert handle.wait(SOON)
        expected_in = {tier: model.outcomes(tier, step, number) for tier in self.tiers}
        model.add(step, number)
        for tier, expected in expected_in.items():
            is_committed = tier in handle.record.committed_in
            if tier == "persistent" and extras and self._is_refused and True in expected:
                expected = {False} if model.standing(tier, step) == {None} else {True, False}
            assert is_committed in expected, (tier, model, handle.record)
            if is_committed:
                model.committed[tier][step] = number
            if len(expected) == 1:
                model.unclear[tier].pop(step, None)
        if handle.state is SaveState.COMMITTED:
            model.safe = max(model.safe, step)

    @property
    def _is_refused(self) -> bool:
        return self.job.replicated and any(entry.kind == "extra" for entry in self.job.entries)

    def kill(self, checkpoints: Checkpointer, how: str) -> None:
        """All ranks die in a save, which the next start finds or not."""
        model = self.model
        model.step, model.last = model.step + 1, model.last + 1
        outcomes = {tier: model.outcomes(tier, model.step, model.last) for tier in self.tiers}
        model.add(model.step, model.last)
        for tier, expected in outcomes.items():
            if True in expected:
                model.unclear[tier][model.step] = model.last
        if how != "kill":
            model.safe = max(model.safe, model.step)
        (self.root / f"model-{self.rank}").write_bytes(pickle.dumps(model))
        agent = checkpoints.agent_pid
        handle = checkpoints.save(model.step, self.state(model.last))
        if how != "kill":
            assert handle.wait(SOON, until=SaveState.CAPTURED)
        dist.barrier()
        if how == "kill agent":
            with suppress(ProcessLookupError):
                os.kill(agent, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def restore(self, checkpoints: Checkpointer, step: int | None) -> None:
        model = self.model
        state = self.state(0)
        restored = checkpoints.restore(state, step=step)
        if step is None:
            assert restored.step >= model.safe, (model, restored)
        else:
            assert restored.step == step, (model, restored)
        if restored.step:
            number = state["number"]
            assert number in self._held(restored.tier, restored.step), (model, restored, number)
            assert step is not None or number in model.path[restored.step], (model, restored, number)
            expected = tensors(self.state(number))
            found = tensors(state)
            assert found.keys() == expected.keys()
            for key, tensor in expected.items():
                assert torch.equal(found[key], tensor), (key, found[key], tensor)
            assert not is_anywhere(number != _of_rank_0(number))
            model.number = number
            model.restored = restored.step
            if step is not None:
                model.go_back(step, number)
            if restored.tier is Tier.MEMORY:  # and on no disk, it may be: then it is saved
                for tier in self.tiers:
                    if number not in model.standing(tier, restored.step):
                        model.unclear[tier].setdefault(restored.step, number)
                assert checkpoints.wait(SOON)
        model.step = restored.step

    def _held(self, tier: Tier, step: int) -> set[int | None]:
        """What a restore may bring back."""
        if tier is Tier.MEMORY:
            return set(self.model.captured[step][-1:])
        return self.model.standing(tier.value, step)

    def restore_to_others(self, checkpoints: Checkpointer, step: int) -> None:
        state = build(self.job, self.others, self.rank, 0)
        if self.fits_others:
            restored = checkpoints.restore(state, step=step)
            assert restored.step == step
            self.model.step = self.model.restored = step
            self.model.number = state["number"]
            self.model.go_back(step, state["number"])
            expected = tensors(build(self.job, self.others, self.rank, state["number"]))
            assert state["number"] in self._held(restored.tier, step)
            assert all(torch.equal(now, expected[key]) for key, now in tensors(state).items())
            return
        before = tensors(state)
        with pytest.raises(LayoutMismatch):
            checkpoints.restore(state, step=step)
        assert all(torch.equal(now, before[key]) for key, now in tensors(state).items())

    def load_with_torch(self) -> None:
        """Of each stage its own moments, and of each column its own experts, under a name of its own."""
        committed = self.model.committed["persistent"]
        if self.rank != 0 or not committed:
            return
        step = max(committed)
        for column in (0, 1):
            experts = {
                f"@rank{column}.t{n}": torch.zeros(entry.shape[0] + column * entry.uneven, *entry.shape[1:])
                for n, entry in enumerate(self.job.entries)
                if entry.kind == "column"
            }
            dcp.load(experts, checkpoint_id=self.root / "ckpt" / f"step={step}", no_dist=True)
            for name, loaded in experts.items():
                first = 1000 * committed[step] + 100_000 * column
                assert torch.equal(loaded.flatten(), torch.arange(float(loaded.numel())) + first), name
        if not self.job.optimizer:
            return
        moment = {"adamw": "exp_avg", "sgd": "momentum_buffer"}[self.job.optimizer]
        factor = 0.1 if self.job.optimizer == "adamw" else 1.0
        for stage in (0, 1):
            rows = 4 if self.job.optimizer_is_plain else 4 + 4 * stage
            found = {f"@rank{2 * stage}.optimizer.state.0.{moment}": torch.zeros(rows, 4)}
            dcp.load(found, checkpoint_id=self.root / "ckpt" / f"step={step}", no_dist=True)
            expected = factor * (1.0 + committed[step] + 100 * stage)
            (loaded,) = found.values()
            assert torch.allclose(loaded, torch.full((rows, 4), expected)), (stage, loaded, expected)


def run_job(rank: int, root: str, name: str, job: Job, first: int) -> None:
    """From the event number `first` to the next kill, or to the end."""
    ranks = Ranks(rank, Path(root), name, job)
    model = ranks.model
    with ExitStack() as stack:
        checkpoints = stack.enter_context(ranks.opened())
        if first:
            ranks.restore(checkpoints, None)
        for event in job.history[first:]:
            committed = model.live("persistent")
            left = [step for step in model.left() if model.may_go_back(step)]
            if event == "save":
                ranks.save(checkpoints)
            elif event in ("start", "again"):
                stack.close()
                dist.barrier()
                checkpoints = stack.enter_context(ranks.opened())
                ranks.restore(checkpoints, None)
                if event == "again":
                    ranks.save_again(checkpoints)
            elif event in KILLS:
                ranks.kill(checkpoints, event)
            elif event == "left":
                if left:
                    ranks.restore(checkpoints, left[len(left) // 2])
            elif committed and event == "back" and model.may_go_back(committed[len(committed) // 2]):
                ranks.restore(checkpoints, committed[len(committed) // 2])
            elif committed and event == "other" and model.may_go_back(max(committed)):
                ranks.restore_to_others(checkpoints, max(committed))
        model.step = max([0, *model.captured])
        ranks.save(checkpoints, extras=False)  # so that nothing has to stay in memory
    ranks.load_with_torch()


def _place(part: Any) -> tuple[object, ...]:
    return part.global_shape, part.global_offset, part.attributes


def _of_rank_0(value: object) -> object:
    found = [value]
    dist.broadcast_object_list(found)
    return found[0]


numbers = itertools.count()


def check(job: Job, rank_pool: RankPool, env: dict[str, str]) -> None:
    kills = [number for number, event in enumerate(job.history) if event in KILLS]
    with tempfile.TemporaryDirectory(prefix="generated-") as root:
        (Path(root) / "memory").mkdir()
        name = f"generated-{os.getpid()}-{next(numbers)}"
        for first in (0, *(number + 1 for number in kills)):
            report = rank_pool.run(
                *(run_job, RANKS, root, name, job, first), timeout=240.0, operation_timeout=120.0, env=env
            )
            if first <= max(kills, default=-1):
                assert set(report.outcomes) == {RankOutcome.DIED}, "\n".join(map(str, report.ranks))
                assert {each.exit_code for each in report.ranks} == {-signal.SIGKILL}
            else:
                assert len(report.values) == RANKS


ROWS_AND_COLUMNS = Entry("grid", (8, 8), "01")
PLAIN = Entry("plain", (3, 5))
#: Entries of the review of the engine, and what was found since.
FOUND = {
    "another part of a tensor after a change of the mesh": Job(
        (ROWS_AND_COLUMNS,), False, "", ("save", "other")
    ),
    "stages on meshes whose optimizers number alike": Job((PLAIN,), False, "adamw", ("save", "start")),
    "stages of plain tensors whose optimizers number alike": Job(
        (PLAIN,), False, "sgd", ("save", "start"), True
    ),
    "the same beside a mesh of all ranks": Job((ROWS_AND_COLUMNS,), False, "sgd", ("save",), True),
    "experts of one name, one of them a copy, on the columns of a mesh": Job(
        (ROWS_AND_COLUMNS, Entry("column", (3, 5), "0"), Entry("column", (8, 8), "R")),
        False,
        "",
        ("save", "other"),
    ),
    "a rollback in one process": Job(
        (PLAIN,), False, "", ("save",) * 3 + ("back",) + ("save",) * 2 + ("start",)
    ),
    "back to a branch that was left, with a kill on each": Job(
        (PLAIN,),
        False,
        "",
        (*["save"] * 3, "back", "save", "kill captured", "save", "left", "save", "kill agent", "save"),
        has_local=True,
    ),
    "replicated ranks with a tensor of their own": Job(
        (PLAIN, Entry("extra", (3, 5), rank=1)), True, "", ("save", "start")
    ),
    "gone on from memory, and ended without a save": Job(
        (PLAIN,), False, "", ("save", "kill agent", "start")
    ),
    "the last step again, from memory": Job(
        (PLAIN,), False, "", ("save", "kill captured", "again", "kill", "again"), has_local=True
    ),
}


generated = settings(
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


@example(job=FOUND["stages of plain tensors whose optimizers number alike"])
@example(job=FOUND["the last step again, from memory"])
@given(job=jobs())
@settings(generated, max_examples=EXAMPLES or 5)
@pytest.mark.slow
def test_a_few_generated_jobs_get_back_what_they_saved_or_the_reason_why_not(
    rank_pool: RankPool, agent_host_env: dict[str, str], job: Job
) -> None:
    check(job, rank_pool, agent_host_env)


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUND)
def test_jobs_that_once_got_wrong_bytes_or_none_get_back_what_they_saved(
    rank_pool: RankPool, agent_host_env: dict[str, str], name: str
) -> None:
    check(FOUND[name], rank_pool, agent_host_env)


@pytest.mark.thorough("the few generated jobs are near")
@pytest.mark.slow
@given(job=jobs())
@settings(generated, max_examples=EXAMPLES or 25)
def test_many_generated_jobs_get_back_what_they_saved_or_the_reason_why_not(
    rank_pool: RankPool, agent_host_env: dict[str, str], job: Job
) -> None:
    check(job, rank_pool, agent_host_env)
