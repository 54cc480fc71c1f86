# SPDX-License-Identifier: Apache-2.0
"""What one rank alone finds at a restore is acted on by all of them, or by none."""

from __future__ import annotations

from pathlib import Path

import pytest

from resiliency.checkpoint.format.catalog import remove_checkpoint, unmarked_checkpoints
from resiliency.checkpoint.format.marker import parse_step
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.testing.rank_pool import RankPool
from tests.checkpoint.nemo_checkpoints import write_checkpoint
from tests.plugins import agreed_ranks
from tests.plugins.agreed_ranks import ERRORS, NEWEST
from tests.plugins.conftest import run
from tests.plugins.megatron_ranks import Layout

pytestmark = [pytest.mark.nemo, pytest.mark.slow, pytest.mark.usefixtures("agents_at_once")]

TWO = Layout(ranks=2)


def steps_in(directory: Path) -> list[int | None]:
    """Of the checkpoints that are not hidden, newest first."""
    return [parse_step(path.name) for path in unmarked_checkpoints(directory)]


def test_a_checkpoint_that_one_rank_cannot_load_is_passed_over_by_all_and_not_hidden(
    pool: RankPool, tmp_path: Path
) -> None:
    for step in (NEWEST - 1, NEWEST):
        write_checkpoint(tmp_path, step)
    found = run(pool, agreed_ranks.restored, TWO, tmp_path, "corrupt")
    assert found == [f"step={NEWEST - 1}"] * 2
    assert steps_in(tmp_path) == [NEWEST, NEWEST - 1]


def test_a_good_checkpoint_that_does_not_fit_one_rank_ends_the_job_on_all(
    pool: RankPool, tmp_path: Path
) -> None:
    for step in (NEWEST - 1, NEWEST):
        write_checkpoint(tmp_path, step)
    first, second = run(pool, agreed_ranks.restored, TWO, tmp_path, "unfit")
    assert second == f"LayoutMismatch: {ERRORS['unfit']}"
    assert first.startswith("LayoutMismatch: rank 1, while restoring")
    assert str(ERRORS["unfit"]) in first
    assert steps_in(tmp_path) == [NEWEST, NEWEST - 1]


def test_a_step_that_hosts_hold_for_another_layout_is_passed_over_unless_its_persistent_copy_was_tried(
    pool: RankPool, tmp_path: Path
) -> None:
    for step in (NEWEST - 1, NEWEST):
        write_checkpoint(tmp_path, step)
    held = run(pool, agreed_ranks.restored_of_both_tiers, TWO, tmp_path, False)
    assert held == [f"step={NEWEST - 1}"] * 2
    ended = run(pool, agreed_ranks.restored_of_both_tiers, TWO, tmp_path, True)
    assert ended == [f"LayoutMismatch: {ERRORS['unfit']}"] * 2


def test_a_checkpoint_that_one_host_does_not_see_is_passed_over_by_all_and_not_hidden(
    pool: RankPool, tmp_path: Path
) -> None:
    for rank in (0, 1):
        write_checkpoint(tmp_path / str(rank) / "storage", NEWEST - 1)
    write_checkpoint(tmp_path / "0" / "storage", NEWEST)
    found = run(pool, agreed_ranks.restored_where_it_is_seen, TWO, tmp_path)
    assert found == [f"step={NEWEST - 1}"] * 2
    assert steps_in(tmp_path / "0" / "storage") == [NEWEST, NEWEST - 1]


@pytest.mark.parametrize("is_held", [False, True])
def test_a_checkpoint_is_not_deleted_while_any_rank_reads_it(
    pool: RankPool, tmp_path: Path, is_held: bool
) -> None:
    write_checkpoint(tmp_path, NEWEST)
    found = run(pool, agreed_ranks.restored_while_a_cleaner_runs, TWO, tmp_path, is_held)
    assert found == [(f"step={NEWEST}", False)] * 2
    assert remove_checkpoint(LocalStorage(tmp_path), NEWEST)  # now it may go


def test_where_rank_0_cannot_list_the_checkpoints_no_rank_waits_for_it(
    pool: RankPool, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, NEWEST)
    (tmp_path / "a loop").symlink_to("a loop")
    first, second = run(pool, agreed_ranks.refused, TWO, tmp_path, "corrupt")
    assert first.startswith("CheckpointError: checkpoints cannot be listed")
    assert second.startswith("PeerError: ")
    assert "a loop" in second


def test_a_common_part_that_one_rank_cannot_read_is_read_by_none(pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    found = run(pool, agreed_ranks.content_metadata, TWO, tmp_path)
    assert found == [f"CheckpointMissing: no usable source of step {NEWEST} is left."] * 2


def test_where_rank_0_alone_sees_no_checkpoint_no_rank_begins_anew(pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    write_checkpoint(tmp_path / "1" / "storage", NEWEST)
    found = run(pool, agreed_ranks.refused_where_it_is_seen, TWO, tmp_path)
    path = f"/proc/self/cwd/storage/step={NEWEST}"
    assert [text.partition("  Mend")[0] for text in found] == [
        f"CheckpointError: rank 1 sees {path}, and rank 0 sees no checkpoint."
    ] * 2
