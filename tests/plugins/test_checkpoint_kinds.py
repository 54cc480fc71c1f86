# SPDX-License-Identifier: Apache-2.0
"""All ranks come to one verdict on a checkpoint, and what one host cannot reach is not hidden from all.

The ranks are hosts here: one path leads each of them into a directory of its own.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from resiliency.checkpoint.format.dcp import DcpFormat
from resiliency.checkpoint.format.manifest import MANIFEST
from resiliency.checkpoint.format.marker import Marker, MarkerState, put_marker, try_read_marker
from resiliency.checkpoint.format.nemo import WEIGHTS
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.errors import ResiliencyError
from resiliency.plugins import checkpoint_kinds
from resiliency.testing.rank_pool import RankPool
from tests.checkpoint.nemo_checkpoints import write_checkpoint
from tests.checkpoint.storage_builders import save, small_shard

STEP = 10
#: Where each rank sees the storage.
SHARED = Path("/proc/self/cwd/storage") / f"step={STEP}"


def by_the_engine(storage: Path) -> Path:
    save(LocalStorage(storage), DcpFormat(), [small_shard(STEP, rank=rank, world_size=2) for rank in (0, 1)])
    return storage / f"step={STEP}"


def by_nemo(storage: Path) -> Path:
    return write_checkpoint(storage, STEP)


def by_nemo_alone(storage: Path) -> Path:
    directory = write_checkpoint(storage, STEP)
    for path in (directory / MANIFEST, *directory.glob("rank=*")):
        path.unlink()
    return directory


KINDS = pytest.mark.parametrize("write", [by_the_engine, by_nemo])


class Hosts:
    """Two hosts, rank 0 on the first, and what each of them sees of one checkpoint."""

    def __init__(self, root: Path, pool: RankPool, write: Callable[[Path], Path]) -> None:
        self._root = root
        self._pool = pool
        for rank in (0, 1):
            (root / str(rank) / "storage").mkdir(parents=True)
            write(root / str(rank) / "storage")

    def seen_by(self, rank: int) -> Path:
        return self._root / str(rank) / "storage" / f"step={STEP}"

    def verdicts(self, *, skim: bool = False) -> list[list[str]]:
        return self._pool.run(verdict, 2, str(self._root), skim).values

    def answers(self) -> list[object]:
        return self._pool.run(answer, 2, str(self._root)).values

    def reason(self) -> str | None:
        """Why it is hidden; None if it is not."""
        marker = try_read_marker(LocalStorage(self.seen_by(0).parent), STEP)
        assert marker is None or marker.state is MarkerState.CORRUPT
        return None if marker is None else marker.reason


def verdict(rank: int, root: str, skim: bool) -> list[str]:
    os.chdir(Path(root) / str(rank))
    return checkpoint_kinds.verify_together(SHARED, skim=skim)


def answer(rank: int, root: str) -> object:
    os.chdir(Path(root) / str(rank))
    try:
        return checkpoint_kinds.saved_ranks_together(SHARED)
    except ResiliencyError as error:
        return f"{type(error).__name__}: {error}"


def flip_a_bit_of_each_file(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file() and path.stat().st_size:
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)


@KINDS
@pytest.mark.parametrize("skim", [False, True])
def test_a_whole_checkpoint_is_good_on_all_ranks(
    tmp_path: Path, rank_pool: RankPool, write: Callable[[Path], Path], skim: bool
) -> None:
    assert Hosts(tmp_path, rank_pool, write).verdicts(skim=skim) == [[], []]


@pytest.mark.parametrize("write", [by_the_engine, by_nemo, by_nemo_alone])
def test_what_another_host_lost_sight_of_is_passed_over_by_all_and_hidden_from_nobody(
    tmp_path: Path, rank_pool: RankPool, write: Callable[[Path], Path]
) -> None:
    hosts = Hosts(tmp_path, rank_pool, write)
    shutil.rmtree(hosts.seen_by(1))
    first, second = hosts.verdicts()
    assert first == second
    assert "never finished" in first[0]
    assert hosts.reason() is None


@KINDS
def test_what_another_host_still_sees_marked_is_passed_over_by_all_and_hidden_from_nobody(
    tmp_path: Path, rank_pool: RankPool, write: Callable[[Path], Path]
) -> None:
    hosts = Hosts(tmp_path, rank_pool, write)
    put_marker(LocalStorage(hosts.seen_by(1).parent), STEP, Marker(state=MarkerState.WRITING))
    first, second = hosts.verdicts()
    assert first == second
    assert "marked as unfinished" in first[0]
    assert hosts.reason() is None


@KINDS
def test_what_only_another_host_reads_wrong_is_passed_over_by_all_and_hidden_from_nobody(
    tmp_path: Path, rank_pool: RankPool, write: Callable[[Path], Path]
) -> None:
    hosts = Hosts(tmp_path, rank_pool, write)
    flip_a_bit_of_each_file(hosts.seen_by(1))
    first, second = hosts.verdicts()
    assert first == second != []
    assert hosts.reason() is None


@KINDS
def test_what_another_rank_finds_damaged_and_rank_0_too_is_hidden(
    tmp_path: Path, rank_pool: RankPool, write: Callable[[Path], Path]
) -> None:
    hosts = Hosts(tmp_path, rank_pool, write)
    for rank in (0, 1):
        flip_a_bit_of_each_file(hosts.seen_by(rank))
    first, second = hosts.verdicts()
    assert first == second
    assert hosts.reason() in first


def an_error_instead_of_bytes(directory: Path) -> None:
    for index in directory.rglob("rank=*"):
        index.unlink()
        (index / "a directory that is not empty").mkdir(parents=True)


@KINDS
def test_what_cannot_be_read_is_passed_over_and_not_hidden(
    tmp_path: Path, rank_pool: RankPool, write: Callable[[Path], Path]
) -> None:
    hosts = Hosts(tmp_path, rank_pool, write)
    for rank in (0, 1):
        an_error_instead_of_bytes(hosts.seen_by(rank))
    first, second = hosts.verdicts()
    assert first == second
    assert "read" in first[0]
    assert hosts.reason() is None


def test_where_the_reader_verifies_a_cut_file_of_any_rank_is_found_all_the_same(
    tmp_path: Path, rank_pool: RankPool
) -> None:
    hosts = Hosts(tmp_path, rank_pool, by_the_engine)
    for rank in (0, 1):
        (cut,) = hosts.seen_by(rank).rglob("__1_0*")
        os.truncate(cut, cut.stat().st_size - 1)
    first, second = hosts.verdicts(skim=True)
    assert first == second
    assert "__1_0" in first[0]
    assert "__1_0" in (hosts.reason() or "")


@KINDS
def test_how_many_ranks_saved_is_what_rank_0_sees(
    tmp_path: Path, rank_pool: RankPool, write: Callable[[Path], Path]
) -> None:
    hosts = Hosts(tmp_path, rank_pool, write)
    shutil.rmtree(hosts.seen_by(1))
    assert hosts.answers() == [2, 2]
    (hosts.seen_by(0) / MANIFEST).write_text("{")
    first, second = hosts.answers()
    assert first == second
    assert str(first).startswith("CheckpointCorrupt: ")


def test_a_device_error_while_its_kind_is_told_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_checkpoint(tmp_path, 10)
    stat = os.stat

    def failing(path: object, *args: Any, **kwargs: Any) -> os.stat_result:
        if str(path).endswith(WEIGHTS):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return stat(path, *args, **kwargs)  # type: ignore[call-overload,no-any-return]

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", failing)
        assert len(checkpoint_kinds.verify_together(directory)) == 1
    assert not (tmp_path / "step=10-unfinished").exists()
    assert checkpoint_kinds.verify(directory) is None
