# SPDX-License-Identifier: Apache-2.0
"""Choosing a step, and filling a state only when it fits on every rank."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from resiliency.checkpoint import Checkpointer, CheckpointerOptions, LocalTier, Shard, plan_restore
from resiliency.checkpoint.agent.client import LinkOptions
from resiliency.checkpoint.capture.job_memory import DEFAULT_ROOT
from resiliency.checkpoint.format.marker import Marker, MarkerState, put_marker
from resiliency.checkpoint.recovery.restore import Restored
from resiliency.checkpoint.recovery.sources import Tier
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointMissing,
    ConfigError,
    LayoutMismatch,
    PeerError,
    ResiliencyError,
)
from resiliency.runtime import ROLLBACKS_ENV, RunInfo
from resiliency.testing.rank_pool import RankPool
from tests.checkpoint.restoring_ranks import opened, state
from tests.checkpoint.storage_builders import file_in

SOON = timedelta(seconds=60)


def filling(target: dict[str, object]) -> Callable[[Shard], Callable[[], object]]:
    return lambda shard: plan_restore(target, shard)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[str]:
    name = f"restoring-{os.getpid()}-{tmp_path.name[:20]}"
    yield name
    assert list(DEFAULT_ROOT.glob(f"resiliency-{name[:30]}*")) == []


@pytest.mark.slow
def test_the_sources_are_listed_best_first_and_any_step_can_be_asked_for(tmp_path: Path, job: str) -> None:
    seen = []
    with opened(tmp_path, job) as checkpoints:
        assert checkpoints.take_inventory().sources() == []
        for step in (1, 2):
            assert checkpoints.save(step, state(step)).wait(SOON)
        found = [(source.step, source.tier) for source in checkpoints.take_inventory().sources()]
        assert found == [(2, Tier.MEMORY), (2, Tier.PERSISTENT), (1, Tier.MEMORY), (1, Tier.PERSISTENT)]
        target = state(0)
        assert checkpoints.restore_with(filling(target), step=1).step == 1
        assert torch.equal(target["weights"], torch.full((1000,), 1.0))  # type: ignore[arg-type]
        assert checkpoints.restore_with(filling(target), step=7) == Restored(step=0, tier=Tier.NONE)
        assert torch.equal(target["weights"], torch.full((1000,), 1.0))  # type: ignore[arg-type]
        # Who only looks at a shard returns nothing to do.
        checkpoints.restore_with(lambda shard: seen.append((shard.step, gc.isenabled())))
    assert seen == [(1, False)]  # the newest of the branch that the first restore began
    assert gc.isenabled()


@pytest.mark.slow
def test_a_launcher_sends_a_job_back_behind_a_step_once_and_never_to_scratch(
    tmp_path: Path, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = state(0)
    with opened(tmp_path, job) as checkpoints:
        for step in (1, 2, 3):
            assert checkpoints.save(step, state(step)).wait(SOON)
        monkeypatch.setenv(ROLLBACKS_ENV, "[[1, 0, 2]]")  # step 3 is in memory as well
        assert next(source.step for source in checkpoints.take_inventory().sources()) == 2
        # The second time as an attempt after one that ended before it saved.
        assert [checkpoints.restore(target).step for _ in range(2)] == [2, 2]
        assert checkpoints.save(3, state(33)).wait(SOON)
    with opened(tmp_path, job) as checkpoints:
        for value in ("[]", "[[1, 0, 2]]"):
            monkeypatch.setenv(ROLLBACKS_ENV, value)
            assert checkpoints.restore(target).step == 3
            assert torch.equal(target["weights"], torch.full((1000,), 33.0))  # type: ignore[arg-type]
        monkeypatch.setenv(ROLLBACKS_ENV, "[[9, 2, 0]]")
        with pytest.raises(CheckpointMissing, match="no checkpoint before step 1 is left"):
            checkpoints.restore(target)
        monkeypatch.setenv(ROLLBACKS_ENV, "[[2]]")
        with pytest.raises(ConfigError, match="is no list of branches"):
            checkpoints.restore(target)


#: So many numbers that the first of them and the values at the end of the file are in different chunks.
SEVERAL_CHUNKS = 6 << 20


def damage(directory: Path, step: int) -> None:
    """Flip a bit near the beginning of the weights, as a disk may do long after the commit."""
    path = file_in(directory / f"step={step}", "__0_0.distcp")
    content = bytearray(path.read_bytes())
    content[content.index(torch.full((64,), float(step)).numpy().tobytes()) + 100] ^= 1
    path.write_bytes(content)


@pytest.mark.thorough("another failure of a restore is near")
@pytest.mark.slow
def test_bytes_that_turn_out_bad_on_their_way_into_the_state_are_replaced_by_those_of_the_step_before(
    tmp_path: Path, job: str
) -> None:
    with opened(tmp_path, job) as checkpoints:
        for step in (1, 2):
            assert checkpoints.save(step, state(step, SEVERAL_CHUNKS)).wait(SOON)
    damage(tmp_path, 2)
    target = state(9, SEVERAL_CHUNKS)
    with opened(tmp_path, job) as checkpoints:
        assert checkpoints.restore(target).step == 1
        assert [source.step for source in checkpoints.take_inventory().sources()] == [1]
    assert torch.equal(target["weights"], torch.full((SEVERAL_CHUNKS,), 1.0))  # type: ignore[arg-type]


@pytest.mark.thorough("another failure of a restore is near")
@pytest.mark.slow
def test_a_state_that_was_partly_overwritten_is_never_handed_back_as_good(tmp_path: Path, job: str) -> None:
    with opened(tmp_path, job) as checkpoints:
        assert checkpoints.save(1, state(1, SEVERAL_CHUNKS)).wait(SOON)
    damage(tmp_path, 1)
    with opened(tmp_path, job) as checkpoints:
        with pytest.raises(CheckpointCorrupt, match="in the state already; there is no other"):
            checkpoints.restore(state(9, SEVERAL_CHUNKS))
        assert checkpoints.take_inventory().sources() == []
    # It is hidden now, which is not to say that nothing was ever saved: a launcher starts again by itself.
    with opened(tmp_path, job) as checkpoints:
        with pytest.raises(CheckpointCorrupt, match=r"but there were some: .*step=1: corrupt: "):
            checkpoints.restore(state(9, SEVERAL_CHUNKS))
        # A save that never ended beside it changes nothing.
        put_marker(LocalStorage(tmp_path), 2, Marker(state=MarkerState.WRITING))
        with pytest.raises(CheckpointCorrupt, match="but there were some"):
            checkpoints.restore(state(9, SEVERAL_CHUNKS))
        shutil.rmtree(tmp_path / "step=1")
        (tmp_path / "step=1-unfinished").unlink()
        assert checkpoints.restore(state(9, SEVERAL_CHUNKS)).tier is Tier.NONE


@pytest.mark.slow
def test_where_only_a_manifest_is_damaged_no_job_begins_anew(tmp_path: Path, job: str) -> None:
    with opened(tmp_path, job) as checkpoints:
        assert checkpoints.save(1, state(1)).wait(SOON)
    (tmp_path / "step=1" / "manifest.json").write_bytes(b"{")
    for _ in range(2):
        with opened(tmp_path, job) as checkpoints, pytest.raises(CheckpointCorrupt, match="there were some"):
            checkpoints.restore(state(9))


@pytest.mark.thorough("another failure of a restore is near")
@pytest.mark.slow
def test_what_is_gone_when_it_is_read_is_passed_over_for_the_next_of_the_same_inventory(
    tmp_path: Path, job: str, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path, job) as checkpoints:
        for step in (1, 2, 3):
            assert checkpoints.save(step, state(step)).wait(SOON)
    target = state(9)
    with opened(tmp_path, job) as checkpoints:
        inventory = checkpoints.take_inventory()
        assert [source.step for source in inventory.sources()] == [3, 2, 1]
        shutil.rmtree(tmp_path / "step=3")
        assert checkpoints.restore(target, inventory=inventory).step == 2
        assert torch.equal(target["weights"], torch.full((1000,), 2.0))  # type: ignore[arg-type]
        assert [source.step for source in inventory.sources()] == [2, 1]
        caplog.clear()
        assert checkpoints.restore(target, inventory=inventory).step == 2
        assert "skipped" not in caplog.text  # known by now
        assert checkpoints.restore(target, step=3, inventory=inventory).step == 0
        for step in (1, 2):
            shutil.rmtree(tmp_path / f"step={step}")
        with pytest.raises(CheckpointCorrupt, match="none of the 3 checkpoints that are left can be used"):
            checkpoints.restore(target, inventory=inventory)
        assert torch.equal(target["weights"], torch.full((1000,), 2.0))  # type: ignore[arg-type]
        # There is nothing any more, and whoever looks now may begin.
        assert checkpoints.restore(target).tier is Tier.NONE
    assert [path.name for path in tmp_path.iterdir()] == []


def not_of_one_mind(rank: int, directory: Path, job: str) -> list[str]:
    """Restore with inventories that differ between the ranks."""
    texts = []
    with opened(directory, job, rank, 2) as checkpoints:
        assert checkpoints.save(1, state(3)).wait(SOON)
        older, newer = checkpoints.take_inventory(), checkpoints.take_inventory()
        for mine in (older if rank else None, older if rank else newer):
            with pytest.raises(ConfigError) as caught:
                checkpoints.restore(state(9), inventory=mine)
            texts.append(str(caught.value))
        assert checkpoints.restore(state(9), inventory=older).step == 1
    return texts


@pytest.mark.slow
def test_ranks_that_restore_from_different_inventories_are_refused_on_all(
    tmp_path: Path, job: str, rank_pool: RankPool
) -> None:
    report = rank_pool.run(not_of_one_mind, 2, tmp_path, job, timeout=120.0, operation_timeout=60.0)
    for without, different in report.values:
        assert without.startswith("2 ranks restore together, 1 of them without an inventory")
        assert different.startswith("2 ranks restore together, 0 of them without an inventory and the others")


def one_rank_does_not_fit(rank: int, directory: Path, job: str) -> list[str]:
    """Save alike on both ranks; then rank 1 wants another shape, from memory and from disk."""
    texts = []
    for tier in ("memory", "persistent"):
        with opened(directory, job, rank, 2) as checkpoints:
            if tier == "memory":
                assert checkpoints.save(1, state(3)).wait(SOON)
            assert checkpoints.take_inventory().sources()[0].tier.value == tier
            target = state(9, size=2000 if rank else 1000)
            with pytest.raises(LayoutMismatch) as caught:
                checkpoints.restore_with(filling(target))
            assert torch.equal(target["weights"].unique(), torch.tensor([9.0]))  # type: ignore[attr-defined]
            texts.append(str(caught.value))
    return texts


@pytest.mark.slow
def test_a_state_that_does_not_fit_on_one_rank_is_refused_and_unchanged_on_all(
    tmp_path: Path, job: str, rank_pool: RankPool
) -> None:
    report = rank_pool.run(one_rank_does_not_fit, 2, tmp_path, job, timeout=120.0, operation_timeout=60.0)
    first, second = report.values
    for told, own in zip(first, second, strict=True):
        assert told.startswith("rank 1, while restoring from ")
        assert told.endswith(own)
        assert "weights: the checkpoint holds shape (1000,), the state to restore has (2000,)" in own


def failing(error: Exception) -> Callable[[Shard], None]:
    def fill(_shard: Shard) -> None:
        raise error

    return fill


def test_a_rank_that_may_have_no_more_threads_says_so_to_the_others(tmp_path: Path, job: str) -> None:
    with opened(tmp_path, job) as checkpoints:
        assert checkpoints.save(1, state(3)).wait(SOON)
        no_threads = RuntimeError("can't start new thread")
        with pytest.raises(CheckpointError, match="could not be restored: RuntimeError") as caught:
            checkpoints.restore_with(failing(no_threads))
        assert caught.value.__cause__ is no_threads


def errors_are_mixed(rank: int, directory: Path, job: str) -> list[str]:
    """What each rank is told when the ranks fail in different ways."""
    told = []
    cable, bit = PeerError("a cable was pulled."), CheckpointCorrupt("a bit flipped.")
    fit, room = LayoutMismatch("no fit."), MemoryError("too large.")
    for step, errors in enumerate(((cable, fit), (cable, bit), (bit, fit), (room, fit)), 1):
        with opened(directory, job, rank, 2) as checkpoints:
            checkpoints.save(step, state(3)).wait(SOON)
            try:
                restored = checkpoints.restore_with(failing(errors[rank]), step=step)
                told.append(restored.tier.value)
            except ResiliencyError as error:
                told.append(f"{type(error).__name__}: {error}")
    return told


@pytest.mark.thorough("another failure of a restore is near")
@pytest.mark.slow
def test_when_ranks_fail_in_different_ways_all_are_told_of_one_kind(
    tmp_path: Path, job: str, rank_pool: RankPool
) -> None:
    report = rank_pool.run(errors_are_mixed, 2, tmp_path, job, timeout=120.0, operation_timeout=60.0)
    first, second = report.values
    for own, told in zip(first[:2], second[:2], strict=True):
        assert own == "PeerError: a cable was pulled."
        assert told.startswith("PeerError: rank 0, while restoring from")
    assert first[2] == second[2] == "none"  # bad for one rank: skipped on both
    assert "no memory to restore the shard of this rank: MemoryError('too large.')" in first[3]
    assert second[3].startswith("PeerError: rank 0, while restoring from")


def rolled_back(rank: int, directory: Path, job: str, tier: str) -> dict[int, str]:
    """Save three steps, go back to the first, and save again what comes after it."""
    outcomes = {}
    local = LocalTier(directory=directory / "local", keep=9) if tier == "local" else None
    settings = {"info": RunInfo(job_name=job, host="here", rank=rank, world_size=2), "local": local}
    settings["options"] = CheckpointerOptions(link=LinkOptions(grace=timedelta(seconds=5)))
    with Checkpointer(None if local else directory, keep=9, **settings) as checkpoints:  # type: ignore[arg-type]
        for step in (10, 20, 30):
            assert checkpoints.save(step, state(step)).wait(SOON)
        target = state(0)
        assert checkpoints.restore(target, step=10).step == 10
        assert target["weights"].unique().tolist() == [10]  # type: ignore[attr-defined]
        for step in (10, 20, 30, 40):
            handle = checkpoints.save(step, state(-step))
            assert handle.wait(SOON)
            outcomes[step] = f"{handle.state.value} {handle.record.why}".strip()
        assert checkpoints.restore(target).step == 40
        assert checkpoints.save(50, state(-50)).wait(SOON)
    with Checkpointer(None if local else directory, keep=9, **settings) as checkpoints:  # type: ignore[arg-type]
        for step in (20, 50):
            assert checkpoints.restore(target, step=step).step == step
            outcomes[-step] = str(target["weights"].unique().tolist())  # type: ignore[attr-defined]
    return outcomes


@pytest.fixture
def roll_back(
    tmp_path: Path, job: str, rank_pool: RankPool, agent_host_env: dict[str, str]
) -> Callable[[str], Sequence[dict[int, str]]]:
    """Runs `rolled_back` with a tier; what each rank returned."""

    def run(tier: str) -> Sequence[dict[int, str]]:
        report = rank_pool.run(
            *(rolled_back, 2, tmp_path, job, tier), timeout=120.0, operation_timeout=60.0, env=agent_host_env
        )
        return report.values

    return run


@pytest.mark.parametrize("tier", ["persistent", "local"])
def test_after_a_rollback_in_one_process_each_step_is_saved_and_none_of_the_branch_before_comes_back(
    roll_back: Callable[[str], Sequence[dict[int, str]]], tier: str
) -> None:
    for outcomes in roll_back(tier):
        assert [outcomes[step] for step in (10, 20, 30, 40)] == ["committed"] * 4
        assert (outcomes[-20], outcomes[-50]) == ("[-20.0]", "[-50.0]")
