# SPDX-License-Identifier: Apache-2.0
"""Agents of two hosts: each keeps a copy of what the other has, and both know when a step is complete."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from resiliency.checkpoint import Checkpointer, CheckpointerOptions, LocalTier, SaveHandle
from resiliency.checkpoint.agent.client import LinkOptions
from resiliency.checkpoint.format.catalog import Condition, list_checkpoints
from resiliency.checkpoint.format.reader import CheckpointReader
from resiliency.checkpoint.replication.completion import MOST_INCOMPLETE
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.checkpoint.trainer.handles import SaveState
from resiliency.errors import ResiliencyError
from resiliency.runtime import AGENT_HOST_ENV, RunInfo
from resiliency.testing.processes import stop_process
from resiliency.testing.rank_pool import RankPool
from tests.checkpoint.storage_builders import read_shard
from tests.waiting import agent_of, wait_until, wait_until_equal

pytestmark = pytest.mark.usefixtures("agents_at_once")

SOON = timedelta(seconds=60)


def run(pool: RankPool, fn: Callable[..., Any], root: Path, *args: object) -> list[Any]:
    """What `fn` returns on two ranks; agents are where the test's are."""
    env = {AGENT_HOST_ENV: os.environ[AGENT_HOST_ENV]}
    report = pool.run(fn, 2, str(root), *args, timeout=200, operation_timeout=90, env=env)
    return list(report.values)


def open_at(root: Path, rank: int, *, keep: int = 2, directory: Path | None = None) -> Checkpointer:
    home, memory = root / f"host-{rank}", root / "memory"  # as two hosts of one machine have it
    memory.mkdir(exist_ok=True)
    return Checkpointer(
        directory,
        local=LocalTier(directory=home / "disk", keep=keep, replicas=1),
        info=RunInfo(
            job_name="two", host=f"host-{rank}", rank=rank, world_size=2, peer_address=f"127.0.0.{2 + rank}"
        ),
        options=CheckpointerOptions(arena_root=memory, link=LinkOptions(grace=timedelta(seconds=2))),
    )


def state_of(rank: int, step: int) -> dict[str, object]:
    return {"weights": torch.full((1 << 16,), 10.0 * rank + step), "rank": rank}


def copied(handle: SaveHandle) -> tuple[str, ...]:
    assert handle.wait(SOON), handle.record
    assert handle.wait_complete(SOON), handle.record
    return handle.record.copies_on


def roots(root: Path) -> list[Path]:
    """Where each host keeps its own checkpoints and the other's."""
    return [
        root / f"host-{rank}" / "disk" / part for rank in (0, 1) for part in ("", f"replicas/host-{1 - rank}")
    ]


def complete(directory: Path) -> list[int]:
    found = list_checkpoints(LocalStorage(directory))
    return [checkpoint.step for checkpoint in found if checkpoint.condition is Condition.COMPLETE]


def save_steps(rank: int, root: str, steps: int) -> list[tuple[str, ...]]:
    with open_at(Path(root), rank, keep=1) as checkpoints:
        hosts = [copied(checkpoints.save(step, state_of(rank, step))) for step in range(1, steps + 1)]
        text = checkpoints.metrics_text()
        assert f'copies_verified_total{{rank="{rank}"}} {steps}' in text
        assert f'last_complete_step{{rank="{rank}"}} {steps}' in text
        # What is retired goes a moment later.
        for path in roots(Path(root))[2 * rank : 2 * rank + 2]:
            wait_until_equal(partial(complete, path), [steps])
        dist.barrier()
    return hosts


def test_each_host_has_a_verified_copy_of_the_others_checkpoint_and_old_ones_go_everywhere(
    tmp_path: Path, rank_pool: RankPool
) -> None:
    values = run(rank_pool, save_steps, tmp_path, 3)
    assert values == [[("host-1",)] * 3, [("host-0",)] * 3]
    for path in roots(tmp_path):
        assert complete(path) == [3]
        assert CheckpointReader(LocalStorage(path), 3).verify() > 1 << 18
    for rank in (0, 1):
        copy = read_shard(CheckpointReader(LocalStorage(roots(tmp_path)[2 * (1 - rank) + 1]), 3), rank)
        assert copy.rank == rank
    memory = tmp_path / "memory"
    wait_until(lambda: not list(memory.iterdir()), "an agent keeps its memory")


def save_alone_then_together(rank: int, root: str, steps: int) -> tuple[list[int], bool]:
    own = Path(root) / f"host-{rank}" / "disk"
    with open_at(Path(root), rank, keep=1) as checkpoints:
        for step in range(1, steps):
            if rank == 0:
                handle = checkpoints.save(step, state_of(rank, step))
                assert handle.wait(SOON)
        before = complete(own)
        dist.barrier()
        assert copied(checkpoints.save(steps, state_of(rank, steps)))
        wait_until_equal(lambda: complete(own), [steps])
        dist.barrier()
    return before, handle.record.complete if rank == 0 else False


def test_nothing_goes_before_a_newer_step_is_complete_on_all_hosts(
    tmp_path: Path, rank_pool: RankPool
) -> None:
    values = run(rank_pool, save_alone_then_together, tmp_path, 5)
    assert values == [([1, 2, 3, 4], False), ([], False)]


def save_while_one_disk_takes_nothing(rank: int, root: str, without: int) -> None:
    disk = Path(root) / f"host-{rank}" / "disk"
    away = disk.with_name("away")
    with open_at(Path(root), rank, keep=1) as checkpoints:
        assert copied(checkpoints.save(1, state_of(rank, 1)))
        wait_until_equal(partial(complete, roots(Path(root))[2 * rank + 1]), [1])
        dist.barrier()
        if rank == without:
            disk.rename(away)
            disk.touch()
        last = 3 + MOST_INCOMPLETE
        for step in range(2, last + 1):
            handle = checkpoints.save(step, state_of(rank, step))
            assert handle.wait(SOON)
            assert (handle.state is SaveState.FAILED) == (rank == without)
            dist.barrier()  # else slots may be lent
        if rank != without:
            # Newer ones never were complete, and the oldest of them went.
            wait_until_equal(partial(complete, disk), [1, *range(last - MOST_INCOMPLETE + 1, last + 1)])
        dist.barrier()
        if rank == without:
            disk.unlink()
            away.rename(disk)
        dist.barrier()
        assert copied(checkpoints.save(last + 1, state_of(rank, last + 1)))
        wait_until_equal(partial(complete, disk), [last + 1])
        dist.barrier()


@pytest.mark.slow
@pytest.mark.parametrize("without", [0, 1], ids=["leader", "follower"])
def test_while_the_disk_of_one_host_takes_nothing_the_others_keep_the_complete_step_and_few_more(
    tmp_path: Path, rank_pool: RankPool, without: int
) -> None:
    assert run(rank_pool, save_while_one_disk_takes_nothing, tmp_path, without) == [None, None]


def lose_an_agent(rank: int, root: str, victim: int) -> list[tuple[str, ...]]:
    with open_at(Path(root), rank) as checkpoints:
        hosts = [copied(checkpoints.save(1, state_of(rank, 1)))]
        dist.barrier()
        if rank == victim:
            pid = agent_of(checkpoints)
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: checkpoints.agent_pid not in (0, pid), "no other agent comes")
        dist.barrier()
        hosts.append(copied(checkpoints.save(2, state_of(rank, 2))))
        dist.barrier()
    return hosts


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1], ids=["leader", "follower"])
def test_an_agent_that_is_replaced_is_found_by_the_others_and_goes_on_with_the_session(
    tmp_path: Path, rank_pool: RankPool, victim: int
) -> None:
    values = run(rank_pool, lose_an_agent, tmp_path, victim)
    assert values == [[("host-1",)] * 2, [("host-0",)] * 2]
    for path in roots(tmp_path):
        assert complete(path) == [1, 2]


def restore_and_await_copies(rank: int, root: str, step: int) -> tuple[str, float, int]:
    state = state_of(rank, 0)
    with open_at(Path(root), rank) as checkpoints:
        restored = checkpoints.restore(state)
        wait_until(lambda: len(copies_of(Path(root), step)) >= 4, "copies are missing")
        dist.barrier()
    weights = state["weights"]
    assert isinstance(weights, torch.Tensor)
    return restored.tier.value, float(weights[0]), restored.step


def restore_and_lose_the_agent(rank: int, root: str, step: int) -> int:
    with open_at(Path(root), rank) as checkpoints:
        if rank == 0:  # it has the only copies
            pid = agent_of(checkpoints)
            stop_process(pid)
        restored = checkpoints.restore(state_of(rank, 0))
        if rank == 0:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: len(copies_of(Path(root), step)) >= 4, "copies are missing")
        dist.barrier()
    return restored.step


def lose_disk(home: Path) -> None:
    """Once the agents have left, which still delete old checkpoints when the trainers have ended."""
    wait_until(lambda: not any((home.parent / "memory").iterdir()), "agents keep their memory")
    shutil.rmtree(home / "disk")


def copies_of(root: Path, step: int) -> list[Path]:
    """Committed copies of a step on all disks, of whichever owner."""
    found = root.glob(f"host-*/disk/**/step={step}/manifest.json")
    return [path for path in found if not Path(f"{path.parent}-unfinished").exists()]


@pytest.mark.slow
def test_a_host_that_lost_its_disk_gets_its_state_and_all_copies_back_from_the_other(
    tmp_path: Path, rank_pool: RankPool
) -> None:
    run(rank_pool, save_steps, tmp_path, 2)
    lose_disk(tmp_path / "host-1")
    values = run(rank_pool, restore_and_await_copies, tmp_path, 2)
    assert values == [("peers", 2.0, 2), ("peers", 12.0, 2)]
    for path in copies_of(tmp_path, 2):
        assert CheckpointReader(LocalStorage(path.parent.parent), 2).verify() > 1 << 18


@pytest.mark.slow
def test_copies_that_an_agent_was_to_make_when_it_died_are_made_by_the_next(
    tmp_path: Path, rank_pool: RankPool
) -> None:
    run(rank_pool, save_steps, tmp_path, 2)
    lose_disk(tmp_path / "host-1")
    values = run(rank_pool, restore_and_lose_the_agent, tmp_path, 2)
    assert values == [2, 2]
    for path in copies_of(tmp_path, 2):
        assert CheckpointReader(LocalStorage(path.parent.parent), 2).verify() > 1 << 18


def disagree(rank: int, root: str) -> str:
    info = RunInfo(job_name="odd", host=f"host-{rank}", rank=rank, world_size=2)
    local = LocalTier(directory=Path(root) / "disk") if rank else None
    try:
        Checkpointer(Path(root) / "ckpt", local=local, info=info).close()
    except ResiliencyError as error:
        return str(error)
    return ""


def test_ranks_with_different_tiers_are_refused_on_all_of_them(tmp_path: Path, rank_pool: RankPool) -> None:
    for error in rank_pool.run(disagree, 2, str(tmp_path), timeout=90).values:
        assert "rank 1 saves to the tiers local, persistent, rank 0 to persistent" in error


def go_back_and_save_again(rank: int, root: str) -> list[tuple[str, ...]]:
    target = {"weights": torch.zeros(1 << 16), "rank": -1}
    with open_at(Path(root), rank, keep=9) as checkpoints:
        for step in (1, 2, 3):
            assert copied(checkpoints.save(step, state_of(rank, step)))
        assert checkpoints.restore(target, step=1).step == 1
        hosts = [copied(checkpoints.save(step, state_of(rank, -step))) for step in (2, 3, 4)]
        dist.barrier()
    return hosts


def test_after_a_rollback_the_copies_on_other_hosts_are_those_of_now(
    tmp_path: Path, rank_pool: RankPool
) -> None:
    values = run(rank_pool, go_back_and_save_again, tmp_path)
    assert values == [[("host-1",)] * 3, [("host-0",)] * 3]
    for rank in (0, 1):
        for step in (2, 3, 4):
            for path in (roots(tmp_path)[2 * rank], roots(tmp_path)[2 * (1 - rank) + 1]):
                shard = read_shard(CheckpointReader(LocalStorage(path), step), rank)
                found = torch.frombuffer(shard.read(shard.layout.by_key["weights"]), dtype=torch.float32)
                assert found.unique().tolist() == [10.0 * rank - step], (path, step)
