# SPDX-License-Identifier: Apache-2.0
"""Tensors of wrapper subclasses are saved part by part, and come back into tensors of the same class."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from resiliency.checkpoint import Checkpointer, CheckpointerOptions, StateLayout, materialize, restore_into
from resiliency.checkpoint.agent.client import LinkOptions
from resiliency.checkpoint.format.reader import CheckpointReader
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.errors import ConfigError, LayoutMismatch
from resiliency.runtime import RunInfo
from resiliency.testing.rank_pool import RankPool
from tests.checkpoint.capture_builders import bits, saved
from tests.checkpoint.low_bit import LowBit, OtherLowBit, low_bit
from tests.checkpoint.storage_builders import read_shard

SOON = timedelta(seconds=60)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def same(found: LowBit, expected: LowBit) -> bool:
    return (bits(found.codes), bits(found.scale), found.signed) == (
        bits(expected.codes),
        bits(expected.scale),
        expected.signed,
    )


def test_the_parts_of_a_wrapper_come_back_bit_for_bit_into_those_of_the_target(
    tmp_path: Path, stack: ExitStack
) -> None:
    state = {"moment": low_bit(3, 7), "weight": torch.nn.Parameter(low_bit(2, 1)), "step": 4}
    shard = saved(state, tmp_path / "job", stack, allow=())
    assert [entry.key for entry in shard.layout.entries] == [
        f"{name}/{part}" for name in ("moment", "weight") for part in ("codes", "scale")
    ]
    assert StateLayout.from_json(shard.layout.to_json()) == shard.layout
    target = {"moment": low_bit(3, 0), "weight": torch.nn.Parameter(low_bit(2, 0)), "step": 0}
    codes = target["moment"].codes  # type: ignore[attr-defined]
    restore_into(target, shard)
    assert same(target["moment"], state["moment"])  # type: ignore[arg-type]
    assert same(target["weight"], state["weight"])  # type: ignore[arg-type]
    assert target["moment"].codes is codes  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (low_bit(3, 0, cls=OtherLowBit), "holds a LowBit of shape .*has a OtherLowBit"),
        (torch.zeros(3, 4), "holds a LowBit of shape .*has a Tensor"),
        (low_bit(2, 0), r"holds shape \(3, 4\), .*has shape \(2, 4\)"),
        (low_bit(3, 0, signed=False), "with {'signed': True}.* with {'signed': False}"),
    ],
    ids=["class", "plain", "shape", "meaning"],
)
def test_another_kind_of_tensor_is_refused_by_name_and_nothing_is_written(
    tmp_path: Path, stack: ExitStack, other: torch.Tensor, found: str
) -> None:
    shard = saved({"first": torch.ones(2), "moment": low_bit(3, 7)}, tmp_path / "job", stack)
    first = torch.zeros(2)
    with pytest.raises(LayoutMismatch, match=f"^moment: .*{found}"):
        restore_into({"first": first, "moment": other}, shard)
    assert not first.any()


def test_a_wrapper_is_made_anew_where_its_class_is_allowed(tmp_path: Path, stack: ExitStack) -> None:
    """As for an optimizer that has not stepped yet."""
    shard = saved({"moment": low_bit(3, 7)}, tmp_path / "job", stack)
    with pytest.raises(ConfigError, match="low_bit:LowBit, which is not on the list"):
        materialize(shard)
    assert same(materialize(shard, allow=[LowBit])["moment"], low_bit(3, 7))


class Weighted(torch.nn.Module):
    def __init__(self, weight: LowBit) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)


def test_a_context_that_changes_with_use_comes_back_where_the_class_is_allowed(
    tmp_path: Path, stack: ExitStack
) -> None:
    """As that of a weight which has seen its first forward; the tensor itself stays, also in a module."""
    used: dict[str, Any] = {"moment": low_bit(3, 7), "model": Weighted(low_bit(2, 1))}
    shard = saved(used, tmp_path / "job", stack)
    fresh: dict[str, Any] = {
        "moment": low_bit(3, 0, signed=False),
        "model": Weighted(low_bit(2, 0, signed=False)),
    }
    moment: Any = fresh["moment"]
    weight: Any = fresh["model"].weight
    with pytest.raises(LayoutMismatch, match=r"allow=\['tests.checkpoint.low_bit:LowBit'\]"):
        restore_into(fresh, shard)
    restore_into(fresh, shard, allow=[LowBit])
    assert fresh["moment"] is moment
    assert fresh["model"].weight is weight
    assert isinstance(weight, torch.nn.Parameter)
    assert same(moment, used["moment"])
    assert same(fresh["model"].weight, used["model"].weight)


class Scaled(LowBit):
    """Its scale is there from its first use on."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"] if self.scale is not None else ["codes"], {"signed": self.signed}

    @classmethod
    def __tensor_unflatten__(cls, parts: Any, context: Any, size: Any, stride: Any) -> LowBit:
        return cls(parts["codes"], parts.get("scale"), **context)


@pytest.mark.parametrize("used", [True, False])
def test_a_part_that_comes_with_use_comes_and_goes_where_the_class_is_allowed(
    tmp_path: Path, stack: ExitStack, used: bool
) -> None:
    saved_one, target = low_bit(3, 7, cls=Scaled), low_bit(3, 0, cls=Scaled)
    (target if used else saved_one).scale = None  # type: ignore[assignment]
    shard = saved({"moment": saved_one}, tmp_path / "job", stack)
    with pytest.raises(LayoutMismatch, match=r"and parts codes.* and parts codes"):
        restore_into({"moment": target}, shard)
    restore_into({"moment": target}, shard, allow=[Scaled])
    assert bits(target.codes) == bits(saved_one.codes)
    assert bits(target.scale) == bits(saved_one.scale) if used else target.scale is None


def sharded(mesh: DeviceMesh, rank: int, fill: int) -> DTensor:
    """Rows of a whole of 8 rows."""
    return DTensor.from_local(low_bit(4, fill + 10 * rank), mesh, [Shard(0)], run_check=False)


def save_and_restore(rank: int, directory: str, job: str) -> list[str]:
    mesh, turned = (DeviceMesh("cpu", ranks) for ranks in ([0, 1], [1, 0]))

    def opened() -> Checkpointer:
        return Checkpointer(
            directory,
            info=RunInfo(job_name=f"{job}-{count}", host="here", rank=rank, world_size=2),
            options=CheckpointerOptions(link=LinkOptions(grace=timedelta(seconds=5))),
        )

    state: dict[str, Any] = {"moment": sharded(mesh, rank, 1), "same": low_bit(2, 5)}
    count = 0
    with opened() as checkpoints:
        assert checkpoints.save(1, state).wait(SOON)
    dist.barrier()
    count = 1  # another arena: what memory holds is out of reach
    target: dict[str, Any] = {"moment": sharded(mesh, rank, 90), "same": low_bit(2, 0)}
    with opened() as checkpoints:
        with pytest.raises(LayoutMismatch, match=r"begins at \((0|4), 0\), the state to restore has"):
            checkpoints.restore({**target, "moment": sharded(turned, rank, 90)})
        assert checkpoints.restore(target).step == 1
    assert same(target["moment"].to_local(), state["moment"].to_local())
    assert same(target["same"], state["same"])
    index = read_shard(CheckpointReader(LocalStorage(Path(directory)), 1), rank)
    return sorted(entry.name for entry in index.layout.entries)


def test_parts_of_sharded_wrappers_are_told_apart_in_the_persistent_tier(
    tmp_path: Path, rank_pool: RankPool, agent_host_env: dict[str, str]
) -> None:
    job = f"wrappers-{os.getpid()}-{tmp_path.name}"[:60]
    args = (str(tmp_path / "persistent"), job)
    values = rank_pool.run(
        save_and_restore, 2, *args, env=agent_host_env, timeout=240, operation_timeout=60
    ).values
    whole = ["same/codes", "same/scale"]
    assert values == [[f"moment.codes@{row},0", f"moment.scale@{row},0", *whole] for row in (0, 4)]
