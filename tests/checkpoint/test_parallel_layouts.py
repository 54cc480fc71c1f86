# SPDX-License-Identifier: Apache-2.0
"""Real ranks with meshes: each gets back its own part of its own tensors, or the reason why not."""

from __future__ import annotations

import os
from collections import OrderedDict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._composable.fsdp import fully_shard
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from resiliency.checkpoint import Checkpointer, CheckpointerOptions, LocalTier, Tier
from resiliency.checkpoint.agent.client import LinkOptions
from resiliency.checkpoint.state.rank_sets import ranks_of, text_of_ranks
from resiliency.checkpoint.trainer.handles import SaveState
from resiliency.errors import LayoutMismatch
from resiliency.runtime import RunInfo
from resiliency.testing.rank_pool import RankPool

SOON = timedelta(seconds=60)
WHOLE = torch.arange(64.0).view(8, 8)
TIMES = {"timeout": 240.0, "operation_timeout": 60.0}


def opened(
    directory: Path, job: str, rank: int, *, replicated: bool = False, local: bool = False
) -> Checkpointer:
    return Checkpointer(
        None if local else directory,
        local=LocalTier(directory=directory) if local else None,
        replicated=replicated,
        info=RunInfo(job_name=job, host="here", rank=rank, world_size=dist.get_world_size()),
        options=CheckpointerOptions(link=LinkOptions(grace=timedelta(seconds=5))),
    )


def job_of(directory: Path) -> str:
    return f"layouts-{os.getpid()}-{directory.name}"[:60]


@pytest.mark.parametrize(
    "ranks", [[3], [0, 1, 2], [4, 6, 8], [0, 1, 8, 9, 16, 17], [2, 3, 6, 7, 34, 35, 38, 39], [0, 1, 5]]
)
def test_a_set_of_ranks_is_a_short_text(ranks: list[int]) -> None:
    assert ranks_of(text_of_ranks(ranks)) == ranks
    assert len(text_of_ranks(ranks)) < 15


def adamw(mesh: DeviceMesh, placements: list[Placement], value: float) -> torch.optim.Optimizer:
    """Stepped once, so that it has state."""
    parameter = torch.nn.Parameter(distribute_tensor(WHOLE + value, mesh, placements))
    optimizer = torch.optim.AdamW([parameter])
    if value:
        parameter.grad = distribute_tensor(WHOLE * value, mesh, placements)
        optimizer.step()
    return optimizer


def other_orders(rank: int, directory: Path, job: str, tier: str) -> list[str]:
    """Save on one order of the ranks, restore on others with equal local shapes."""
    block: list[Placement] = [Shard(0), Shard(1)]
    rows: list[Placement] = [Shard(0)]
    grid = DeviceMesh("cpu", [[0, 1], [2, 3]])
    turned = DeviceMesh("cpu", [[0, 2], [1, 3]])
    line, reversed_line = DeviceMesh("cpu", [0, 1, 2, 3]), DeviceMesh("cpu", [3, 2, 1, 0])
    saved = {
        "w": distribute_tensor(WHOLE, grid, block),
        "rows": distribute_tensor(WHOLE, line, rows),
        "optimizer": adamw(grid, block, 1),
    }
    texts = []

    def refused(checkpoints: Checkpointer, **other: Any) -> None:
        target = {"w": torch.zeros_like(saved["w"]), "rows": torch.zeros_like(saved["rows"])}  # type: ignore[call-overload]
        target["optimizer"] = adamw(grid, block, 0)
        with pytest.raises(LayoutMismatch) as caught:
            checkpoints.restore({**target, **other})
        texts.append(str(caught.value))
        assert not target["w"].to_local().any()

    def refuse_all(checkpoints: Checkpointer) -> None:
        refused(checkpoints, w=distribute_tensor(WHOLE * 0, turned, block))
        refused(checkpoints, rows=distribute_tensor(WHOLE * 0, reversed_line, rows))
        refused(checkpoints, optimizer=adamw(turned, block, 0))
        refused(checkpoints, rows=torch.zeros(2, 8))

    with opened(directory, job, rank, local=tier == "local") as checkpoints:
        assert checkpoints.save(1, saved).wait(SOON)
        refuse_all(checkpoints)
    with opened(directory, job, rank, local=tier == "local") as checkpoints:
        refuse_all(checkpoints)
        same = {
            "w": distribute_tensor(WHOLE * 0, grid, block),
            "rows": distribute_tensor(WHOLE * 0, line, rows),
            "optimizer": adamw(grid, block, 0),
        }
        restored = checkpoints.restore(same)
        assert (restored.step, restored.tier.value) == (1, tier)
    assert torch.equal(same["w"].to_local(), saved["w"].to_local())  # type: ignore[attr-defined]
    return texts


@pytest.mark.parametrize("tier", ["persistent", "local"])
def test_a_part_is_never_restored_where_another_part_of_the_tensor_belongs(
    tmp_path: Path, rank_pool: RankPool, agent_host_env: dict[str, str], tier: str
) -> None:
    report = rank_pool.run(other_orders, 4, tmp_path, job_of(tmp_path), tier, env=agent_host_env, **TIMES)  # type: ignore[arg-type]
    one = report.values[1]
    assert (
        "w: the checkpoint holds for this rank the part of a tensor (8, 8) that begins at (0, 4),"
        " the state to restore has that of a tensor (8, 8) at (4, 0)"
    ) in one[0]
    assert "begins at (2, 0), the state to restore has that of a tensor (8, 8) at (4, 0)" in one[1]
    assert "optimizer/state/0/exp_avg: " in one[2]
    assert "the state to restore has that of a tensor (2, 8) at (0, 0)" in one[3]


def staged(rank: int, directory: Path, job: str, rows: int, copies: int, shards: int) -> None:
    """Two pipeline stages, each replicated and sharded; the optimizer of each numbers its state from 0."""
    stage = rank // (copies * shards)
    whole = init_device_mesh("cpu", (2, copies, shards), mesh_dim_names=("stage", "copy", "shard"))
    mesh = whole["copy", "shard"]

    def build(value: float) -> dict[str, Any]:
        layer = torch.nn.Linear(4, rows if stage else 4, bias=False)
        model = fully_shard(torch.nn.Sequential(OrderedDict({f"layer{stage}": layer})), mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, value)
            parameter.grad = torch.full_like(parameter, value)
        optimizer.step()
        return {"model": model, "optimizer": optimizer, "rng": torch.tensor([float(rank)])}

    def moments(state: dict[str, Any]) -> torch.Tensor:
        moment = next(iter(state["optimizer"].state.values()))["exp_avg"]
        assert isinstance(moment, DTensor)
        return moment.to_local()

    saved = build(stage + 1.0)
    with opened(directory, job, rank) as checkpoints:
        handle = checkpoints.save(1, saved)
        assert handle.wait(SOON)
        assert handle.state is SaveState.COMMITTED, handle.record.why
    dist.barrier()
    with opened(directory, job, rank) as checkpoints:
        state = build(9.0)
        restored = checkpoints.restore(state)
        assert restored.tier.value == "persistent"
    assert torch.equal(moments(state), moments(saved))
    assert moments(state).unique().numel() == 1
    assert state["rng"].item() == rank
    if rank == 0:
        for number, shape in ((0, (4, 4)), (1, (rows, 4))):
            name = f"@rank{copies * shards * number}"
            found: dict[str, Any] = {
                name: {"optimizer": {"state": {"0": {"exp_avg": torch.zeros(shape)}}}},
                "model": {f"layer{number}": {"weight": torch.zeros(shape)}},
            }
            dcp.load(found, checkpoint_id=directory / "step=1", no_dist=True)
            moment = found[name]["optimizer"]["state"]["0"]["exp_avg"]
            assert torch.allclose(moment, torch.tensor(0.1 * (number + 1)))
            assert found["model"][f"layer{number}"]["weight"].any()


@pytest.mark.parametrize(
    ("rows", "copies", "shards"),
    [(4, 2, 1), (8, 2, 1), (4, 1, 2), (4, 2, 2)],
    ids=["same-shapes", "other-shapes", "shards", "copies-and-shards"],
)
def test_stages_whose_optimizers_number_alike_get_their_own_state_back(
    tmp_path: Path, rank_pool: RankPool, agent_host_env: dict[str, str], rows: int, copies: int, shards: int
) -> None:
    world, job = 2 * copies * shards, job_of(tmp_path)
    assert rank_pool.run(
        staged, world, tmp_path, job, rows, copies, shards, env=agent_host_env, **TIMES
    ).values  # type: ignore[arg-type]


def staged_without_meshes(rank: int, directory: Path, job: str) -> None:
    """Two pipeline stages of DDP ranks; one optimizer numbers from 0 on each."""
    stage = rank // 2

    def build(value: float) -> dict[str, Any]:
        model = torch.nn.Sequential(OrderedDict({f"layer{stage}": torch.nn.Linear(4, 4, bias=False)}))
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        next(model.parameters()).grad = torch.full((4, 4), value)
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    with opened(directory, job, rank) as checkpoints:
        handle = checkpoints.save(1, build(stage + 1.0))
        assert handle.wait(SOON)
        assert handle.state is SaveState.COMMITTED, handle.record.why
    dist.barrier()
    with opened(directory, job, rank) as checkpoints:
        state = build(9.0)
        assert checkpoints.restore(state).tier.value == "persistent"
        (moment,) = (each["momentum_buffer"] for each in state["optimizer"].state.values())
        assert moment.unique().tolist() == [stage + 1.0]
    if rank == 0:
        name = "optimizer.state.0.momentum_buffer"
        with pytest.raises(dcp.CheckpointException, match=f"Missing key.*{name}"):
            dcp.load({name: torch.zeros(4, 4)}, checkpoint_id=directory / "step=1", no_dist=True)
        found = {f"@rank{lowest}.{name}": torch.zeros(4, 4) for lowest in (0, 2)}
        dcp.load(found, checkpoint_id=directory / "step=1", no_dist=True)
        assert [moment.unique().tolist() for moment in found.values()] == [[1.0], [2.0]]


def test_stages_of_plain_tensors_get_their_own_state_also_from_stock_torch(
    tmp_path: Path, rank_pool: RankPool, agent_host_env: dict[str, str]
) -> None:
    report = rank_pool.run(staged_without_meshes, 4, tmp_path, job_of(tmp_path), env=agent_host_env, **TIMES)  # type: ignore[arg-type]
    assert report.values


def norms_beside_blocks(rank: int, directory: Path, job: str) -> None:
    """A weight that tensor parallelism does not split lies on a mesh of its own per column."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    state = {
        "block": distribute_tensor(WHOLE, mesh, [Shard(0), Shard(1)]),
        "norm": DTensor.from_local(torch.ones(2) + mesh["dp"].get_local_rank(), mesh["dp"], [Shard(0)]),
    }
    with opened(directory, job, rank) as checkpoints:
        assert checkpoints.save(1, state).wait(SOON)
    if rank == 0:
        found = {"block": torch.zeros(8, 8), "norm": torch.zeros(4)}
        dcp.load(found, checkpoint_id=directory / "step=1", no_dist=True)
        assert torch.equal(found["block"], WHOLE)
        assert found["norm"].tolist() == [1, 1, 2, 2]


def test_copies_on_several_meshes_of_one_program_keep_their_name(
    tmp_path: Path, rank_pool: RankPool, agent_host_env: dict[str, str]
) -> None:
    report = rank_pool.run(norms_beside_blocks, 4, tmp_path, job_of(tmp_path), env=agent_host_env, **TIMES)  # type: ignore[arg-type]
    assert report.values


def experts_beside_blocks(rank: int, directory: Path, job: str, step: int) -> None:
    """Expert parallelism: as the norms above, but each column has experts of its own, of equal names."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    column = mesh["ep"].get_local_rank()

    def build(value: float) -> dict[str, Any]:
        expert = torch.nn.Parameter(distribute_tensor(torch.full((4,), value), mesh["dp"], [Shard(0)]))
        expert.grad = expert.detach().clone()
        optimizer = torch.optim.SGD([expert], momentum=0.9)
        if step:
            optimizer.step()
        block = distribute_tensor(WHOLE, mesh, [Shard(0), Shard(1)])
        return {"block": block, "expert": expert, "optimizer": optimizer}

    # Before the first step all are as they were initialized, by one seed.
    saved = build(1.0 + column if step else 1.0)
    with opened(directory, job, rank) as checkpoints:
        handle = checkpoints.save(step, saved)
        assert handle.wait(SOON)
        assert handle.state is SaveState.COMMITTED, handle.record.why
    dist.barrier()
    with opened(directory, job, rank) as checkpoints:
        state = build(9.0)
        assert checkpoints.restore(state).tier.value == "persistent"
    assert torch.equal(state["expert"].to_local(), saved["expert"].to_local())
    if rank:
        return
    if not step:
        found: dict[str, Any] = {"expert": torch.zeros(4)}
        dcp.load(found, checkpoint_id=directory / "step=0", no_dist=True)
        assert found["expert"].tolist() == [1.0] * 4
        return
    moment = "optimizer.state.0.momentum_buffer"
    for name in ("expert", moment):
        with pytest.raises(dcp.CheckpointException, match=f"Missing key.*{name}"):
            dcp.load({name: torch.zeros(4)}, checkpoint_id=directory / f"step={step}", no_dist=True)
    found = {f"@rank{n}.{name}": torch.zeros(4) for n in (0, 1) for name in ("expert", moment)}
    dcp.load({**found, "block": torch.zeros(8, 8)}, checkpoint_id=directory / f"step={step}", no_dist=True)
    for n in (0, 1):
        assert found[f"@rank{n}.{moment}"].tolist() == [1.0 + n] * 4
        assert found[f"@rank{n}.expert"].unique().numel() == 1
    assert not torch.equal(found["@rank0.expert"], found["@rank1.expert"])


def test_experts_of_one_name_are_copies_for_stock_torch_only_while_they_are_equal(
    tmp_path: Path, rank_pool: RankPool, agent_host_env: dict[str, str]
) -> None:
    for step in (0, 1):
        report = rank_pool.run(
            experts_beside_blocks, 4, tmp_path / str(step), f"{job_of(tmp_path)}-{step}", step,
            env=agent_host_env, **TIMES,
        )  # type: ignore[arg-type]  # fmt: skip
        assert report.values


def other_stages(rank: int, directory: Path, job: str) -> str:
    """Two pipeline stages of two copies each; at the restart a rank is of another stage."""

    def on(*ranks: int) -> DTensor:
        mesh = DeviceMesh("cpu", list(ranks), _init_backend=False)
        return DTensor.from_local(torch.full((4,), float(rank // 2)), mesh, [Replicate()], run_check=False)

    first = (0, 1) if rank < 2 else (2, 3)
    with opened(directory, job, rank) as checkpoints:
        assert checkpoints.save(1, {"w": on(*first)}).wait(SOON)
    dist.barrier()
    with opened(directory, job, rank) as checkpoints:
        with pytest.raises(LayoutMismatch) as caught:
            checkpoints.restore({"w": on(rank % 2, rank % 2 + 2)})
        assert checkpoints.restore({"w": on(*first)}).step == 1
    return str(caught.value)


def test_a_copy_is_never_restored_by_a_rank_that_now_shares_it_with_others(
    tmp_path: Path, rank_pool: RankPool, agent_host_env: dict[str, str]
) -> None:
    report = rank_pool.run(other_stages, 4, tmp_path, job_of(tmp_path), env=agent_host_env, **TIMES)  # type: ignore[arg-type]
    assert (
        "w: the checkpoint holds a tensor of ranks 0, 1, the state to restore has one of ranks 1, 3"
        in (report.values[1])
    )


def replicated_alike(rank: int, directory: Path, job: str) -> list[str]:
    """torch's composable `replicate`, whose parameters are DTensors; then one more tensor on one rank."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    replicate(model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    for each in model.parameters():
        assert isinstance(each, DTensor)
        assert each.placements[-1] == Replicate()
    with opened(directory, job, rank, replicated=True) as checkpoints:
        average = {"average": {"weight": torch.ones(3)}} if rank == 0 else {}
        lost = checkpoints.save(1, {"model": model, **average})
        assert lost.wait(SOON)
        whole = checkpoints.save(2, {"model": model})
        assert whole.wait(SOON)
    dist.barrier()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with opened(directory, job, rank, replicated=True) as checkpoints:
        restored = checkpoints.restore({"model": model})
        assert (restored.step, restored.tier.value) == (2, "persistent")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.to_local(), expected[name]), name
    return [whole.state.value, lost.state.value, lost.record.why]


def test_with_replicated_every_tensor_of_every_rank_is_written_or_the_save_is_refused(
    tmp_path: Path, rank_pool: RankPool, agent_host_env: dict[str, str]
) -> None:
    report = rank_pool.run(replicated_alike, 2, tmp_path, job_of(tmp_path), env=agent_host_env, **TIMES)  # type: ignore[arg-type]
    for whole, lost, why in report.values:
        assert (whole, lost) == ("committed", "failed")
        assert "average/weight: rank 0 has a float32 tensor [3] that rank 1 has not" in why


def unreadable_marker(rank: int, directory: Path, job: str) -> str:
    """Storage does not say whether a committed step is being written: a real error, at each look."""
    with opened(directory, job, rank) as checkpoints:
        assert checkpoints.save(5, {"w": WHOLE + rank}).wait(SOON)
    dist.barrier()
    marker = directory / "step=5-unfinished"
    if rank == 0:
        marker.symlink_to(marker)
    dist.barrier()
    with opened(directory, job, rank) as checkpoints:
        handle = checkpoints.save(5, {"w": WHOLE - rank})
        assert handle.wait(SOON)
        dist.barrier()
        if rank == 0:
            marker.unlink()
        dist.barrier()
        state = {"w": torch.zeros(8, 8)}
        assert checkpoints.save(6, state).wait(SOON)
    dist.barrier()
    with opened(directory, job, rank) as checkpoints:  # with nothing in memory
        assert checkpoints.restore(state, step=5).tier is Tier.PERSISTENT
        assert torch.equal(state["w"], WHOLE + rank)
    return handle.state.value


def test_an_error_of_storage_is_not_absence_and_costs_no_committed_step(
    tmp_path: Path, rank_pool: RankPool, agent_host_env: dict[str, str]
) -> None:
    report = rank_pool.run(unreadable_marker, 2, tmp_path, job_of(tmp_path), env=agent_host_env, **TIMES)  # type: ignore[arg-type]
    assert report.values == ["failed", "failed"]


def bytes_from_the_device(rank: int, directory: Path, job: str) -> int:
    """How much a restore of what all ranks hold read from the disk."""
    state = {"w": torch.arange(8 << 20, dtype=torch.float32)}
    with opened(directory, job, rank, replicated=True) as checkpoints:
        handle = checkpoints.save(1, state, wait=SOON)
        assert handle.wait(SOON)
        assert handle.state is SaveState.COMMITTED, handle.record.why
    with opened(directory, job, rank, replicated=True) as checkpoints:
        state["w"].zero_()
        before = read_bytes()
        dist.barrier()
        restored = checkpoints.restore(state)
        found = read_bytes() - before
    assert (restored.step, restored.tier) == (1, Tier.PERSISTENT)
    assert torch.equal(state["w"], torch.arange(8 << 20, dtype=torch.float32))
    return found


def read_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


@pytest.mark.slow
def test_what_all_ranks_of_a_host_restore_is_read_from_the_device_once(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    found = rank_pool.run(bytes_from_the_device, 2, tmp_path / "ckpt", job_of(tmp_path), **TIMES).values
    # Nothing at all where the disk is memory.
    assert sum(found) < 1.2 * (32 << 20), "each rank read all of it"
