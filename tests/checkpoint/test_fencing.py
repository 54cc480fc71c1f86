# SPDX-License-Identifier: Apache-2.0
"""Whoever writes the state while it is copied: held, found out, or never let in."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._composable.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh

from resiliency.checkpoint import CaptureOptions, Checkpointer, CheckpointerOptions
from resiliency.checkpoint.agent.client import LinkOptions
from resiliency.checkpoint.capture.owned_memory import why_unfenced
from resiliency.checkpoint.trainer.handles import SaveState
from resiliency.runtime import RunInfo
from tests import agent_host

SOON = timedelta(seconds=60)
#: How long a copy waits for a write that must not come.
CHANCE_S = 0.5
SIZE = 1 << 20
pytestmark = [
    pytest.mark.usefixtures("agents_at_once"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.leaks("variables", reason="torch's optimizers import its compiler, which sets its cache"),
    pytest.mark.leaks("descriptors", reason="gloo keeps its socket as long as the mesh refers to the group"),
]

Open = Callable[..., Checkpointer]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    def open_one(before_piece: Callable[[int], None] | None = None) -> Checkpointer:
        return Checkpointer(
            tmp_path / "ckpt",
            info=RunInfo(job_name=f"fencing-{os.getpid()}-{tmp_path.name}", host="here"),
            options=CheckpointerOptions(
                capture=CaptureOptions(before_piece=before_piece),
                link=LinkOptions(silence=timedelta(seconds=30), grace=timedelta(seconds=5)),
            ),
        )

    yield open_one
    agent_host.wait_for_end(tmp_path.name)


class Copying:
    """Copies begin when they are told to, or when the time for a write that must not come is over."""

    def __init__(self, at_most_s: float = CHANCE_S) -> None:
        self.go_on = threading.Event()
        self.at_most_s = at_most_s

    def __call__(self, piece: int) -> None:
        self.go_on.wait(self.at_most_s)


def trained(value: float) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    weights = torch.nn.Parameter(torch.full((SIZE,), value))
    return weights, torch.optim.SGD([weights], lr=1.0)


def stored(directory: Path, step: int) -> list[float]:
    found = {"weights": torch.zeros(SIZE)}
    dcp.load(found, checkpoint_id=directory / "ckpt" / f"step={step}", no_dist=True)
    values: list[float] = found["weights"].unique().tolist()
    return values


@pytest.mark.slow
def test_a_restore_waits_until_the_state_that_it_overwrites_is_copied(tmp_path: Path, opened: Open) -> None:
    weights, optimizer = trained(10.0)
    state = {"weights": weights, "optimizer": optimizer}
    copying = Copying()
    with opened(copying) as checkpoints:
        assert checkpoints.save(10, state).wait(SOON)
        with torch.no_grad():
            weights.fill_(20)
        handle = checkpoints.save(20, state)
        assert checkpoints.restore(state, step=10).step == 10
        copying.go_on.set()
        assert handle.wait(SOON)
        assert handle.state is SaveState.COMMITTED
    assert weights.unique().tolist() == [10.0]
    assert stored(tmp_path, 20) == [20.0]


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "fsdp"])
def test_a_state_that_is_written_without_a_fence_is_never_saved(
    tmp_path: Path, opened: Open, sharded: bool
) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        model = torch.nn.Linear(1024, 1024, bias=False)
        if sharded:
            fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        copying = Copying(SOON.total_seconds())  # this write must come first
        with opened(copying) as checkpoints:
            bad = checkpoints.save(1, {"model": model, "optimizer": optimizer})
            with torch.no_grad():
                next(iter(model.parameters())).mul_(2)
            copying.go_on.set()
            assert bad.wait(SOON)
            good = checkpoints.save(2, {"model": model, "optimizer": optimizer})
            checkpoints.fence()
            with torch.no_grad():
                next(iter(model.parameters())).mul_(2)
            assert good.wait(SOON)
    finally:
        dist.destroy_process_group()
    assert (bad.state, good.state) == (SaveState.FAILED, SaveState.COMMITTED)
    assert "the state was written while step 1 was copied, and nothing fenced it" in bad.record.why


def test_where_a_forward_writes_parameters_one_save_is_lost_and_later_ones_hold_training(
    tmp_path: Path, opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    table = torch.nn.Embedding(1 << 14, 16, max_norm=1.0)
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    state = {"table": table, "optimizer": optimizer}
    copying = Copying(SOON.total_seconds())
    handles = []
    with opened(copying) as checkpoints:
        for step in (1, 2, 3):
            handles.append(checkpoints.save(step, state))
            optimizer.zero_grad()
            loss = table(torch.randint(1 << 14, (4096,))).sum()  # scales the rows that it reads
            copying.go_on.set()
            loss.backward()
            optimizer.step()
            assert handles[-1].wait(SOON)
            copying.go_on.clear()  # later saves are not to be overtaken: their copies only give it a chance
            copying.at_most_s = CHANCE_S
    assert [h.state for h in handles] == [SaveState.FAILED, SaveState.COMMITTED, SaveState.COMMITTED]
    told = [r for r in caplog.records if "saves hold training until the state is copied" in r.message]
    assert [("while step 1 was copied" in record.message) for record in told] == [True]


def test_a_write_behind_a_copy_that_nothing_fenced_yet_costs_no_second_save(
    tmp_path: Path, opened: Open
) -> None:
    weights, optimizer = trained(1.0)
    state = {"weights": weights, "optimizer": optimizer}
    handles = []
    with opened(Copying()) as checkpoints:
        for step in (1, 2):  # such as where a scaler of gradients skips the optimizer's step
            handles.append(checkpoints.save(step, state))
            with torch.no_grad():
                weights.mul_(2)
        assert all(handle.wait(SOON) for handle in handles)
    assert [handle.state for handle in handles] == [SaveState.FAILED, SaveState.COMMITTED]
    assert stored(tmp_path, 2) == [2.0]


class Averaging(torch.optim.SGD):
    """As those of schedule-free training: an evaluation writes parameters, unseen by torch."""

    def train(self) -> None:
        self.eval()

    def eval(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(1)


def test_saves_hold_training_where_the_optimizer_writes_outside_of_its_steps(
    tmp_path: Path, opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    weights = torch.nn.Parameter(torch.zeros(SIZE))
    optimizer = Averaging([weights], lr=1.0)
    copying = Copying()
    with opened(copying) as checkpoints:
        optimizer.eval()
        handle = checkpoints.save(1, {"weights": weights, "optimizer": optimizer})
        optimizer.train()
        copying.go_on.set()
        assert handle.wait(SOON)
        assert handle.state is SaveState.COMMITTED
    assert stored(tmp_path, 1) == [1.0]
    held = [record.message for record in caplog.records if "saves hold training" in record.message]
    assert held == [
        "saves hold training until the state is copied: Averaging writes parameters in train() and eval()"
    ]


def test_steps_that_a_cuda_graph_has_recorded_are_not_copied_behind(
    tmp_path: Path, opened: Open, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin of a graph: it writes what the recorded step wrote, and calls no hook."""
    weights, optimizer = trained(1.0)
    state = {"weights": weights, "optimizer": optimizer}
    copying = Copying()
    with opened(copying) as checkpoints:
        assert checkpoints.save(1, state).wait(SOON)
        with monkeypatch.context() as recording:
            recording.setattr(torch.cuda, "is_initialized", lambda: True)
            recording.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            optimizer.step()
        handle = checkpoints.save(2, state)
        weights.data.fill_(2.0)  # replayed
        copying.go_on.set()
        assert handle.wait(SOON)
        assert handle.state is SaveState.COMMITTED
    assert stored(tmp_path, 2) == [1.0]
    held = [record.message for record in caplog.records if "saves hold training" in record.message]
    assert held == ["saves hold training until the state is copied: a CUDA graph has recorded a step of SGD"]


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_optimizers_that_step_without_their_hooks_are_known(tmp_path: Path) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer, _apply_optimizer_in_backward

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        weights = torch.nn.Parameter(torch.zeros(3))
        assert why_unfenced(torch.optim.SGD([weights])) == ""
        overlapping = ZeroRedundancyOptimizer(
            [weights], torch.optim.SGD, overlap_with_ddp=True, parameters_as_bucket_view=False, lr=0.1
        )
        assert "in hooks of DistributedDataParallel" in why_unfenced(overlapping)
        _apply_optimizer_in_backward(torch.optim.SGD, [weights], {"lr": 0.1})
        assert "in the backward pass" in why_unfenced(torch.optim.SGD([weights]))
        assert why_unfenced(weights._in_backward_optimizers[0]) == ""  # type: ignore[attr-defined]
    finally:
        dist.destroy_process_group()


def test_optimizers_of_two_threads_are_both_held(tmp_path: Path, opened: Open) -> None:
    (first, a), (second, b) = trained(1.0), trained(1.0)
    entered = threading.Barrier(2)
    written = threading.Event()

    def meet(*_: object) -> None:
        entered.wait(SOON.total_seconds())

    def stepping(weights: torch.nn.Parameter, optimizer: torch.optim.Optimizer) -> threading.Thread:
        weights.grad = torch.ones(SIZE)
        optimizer.register_step_pre_hook(meet)
        optimizer.register_step_post_hook(lambda *_: written.set())
        return threading.Thread(target=optimizer.step)

    threads = [stepping(first, a), stepping(second, b)]
    go_on = threading.Event()

    def hold(piece: int) -> None:
        assert go_on.wait(SOON.total_seconds())

    with opened(hold) as checkpoints:
        state = {"weights": first, "second": second, "optimizers": [a, b]}
        handle = checkpoints.save(1, state)
        for thread in threads:
            thread.start()
        is_unfenced = written.wait(CHANCE_S)
        go_on.set()
        for thread in threads:
            thread.join()
        assert not is_unfenced
        assert handle.wait(SOON)
        assert handle.state is SaveState.COMMITTED
    assert stored(tmp_path, 1) == [1.0]
