# SPDX-License-Identifier: Apache-2.0
"""A sealed checkpoint is proven whole, and every damage to it is found and named."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resiliency.checkpoint.format import nemo
from resiliency.checkpoint.format.catalog import Condition, inspect, prune, unmarked_checkpoints
from resiliency.checkpoint.format.manifest import MANIFEST, read_index
from resiliency.checkpoint.format.marker import (
    Marker,
    MarkerState,
    lift_marker,
    parse_step,
    put_marker,
    try_read_marker,
)
from resiliency.checkpoint.format.reader import CheckpointReader
from resiliency.checkpoint.recovery.inventory import find_save
from resiliency.checkpoint.storage.interface import ReadableFile
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.errors import CheckpointIncomplete
from resiliency.plugins.checkpoint_kinds import verify, verify_together
from resiliency.testing import warm
from tests.checkpoint.nemo_checkpoints import FILES, write_checkpoint


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One checkpoint for all examples of a property; each example puts back what it damaged."""
    return write_checkpoint(tmp_path_factory.mktemp("lasting"))


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path)


def test_a_sealed_checkpoint_is_whole_and_its_manifest_says_what_it_is(sealed: Path) -> None:
    assert verify(sealed) is None
    found = inspect(LocalStorage(sealed.parent), 10)
    assert (found.condition, found.size_bytes) == (Condition.COMPLETE, sum(map(len, FILES.values())))
    assert found.manifest is not None
    assert (found.manifest.step, found.manifest.world_size, found.manifest.format) == (10, 2, "nemo")
    records = CheckpointReader(LocalStorage(sealed.parent), 10).files()
    assert {record.name: record.size_bytes for record in records} == {
        f"step=10/weights/{name}": len(data) for name, data in FILES.items()
    }


def problem_of_a_flipped_bit(data: st.DataObject, checkpoint: Path, path: Path) -> str | None:
    """What is found while one bit of `path`, a file of `checkpoint`, is another one."""
    whole = path.read_bytes()
    position = data.draw(st.integers(0, 8 * len(whole) - 1))
    damaged = bytearray(whole)
    damaged[position // 8] ^= 1 << position % 8
    path.write_bytes(damaged)
    try:
        return verify(checkpoint)
    finally:
        path.write_bytes(whole)


@given(data=st.data())
def test_one_flipped_bit_anywhere_in_a_file_is_found(data: st.DataObject, lasting: Path) -> None:
    path = lasting / nemo.WEIGHTS / data.draw(st.sampled_from(sorted(FILES)))
    problem = problem_of_a_flipped_bit(data, lasting, path)
    assert problem is not None
    assert str(path) in problem
    assert "xxh3_64 is" in problem


@given(data=st.data())
def test_one_flipped_bit_in_the_manifest_or_an_index_is_found(data: st.DataObject, lasting: Path) -> None:
    path = lasting / data.draw(st.sampled_from([MANIFEST, "rank=0.json", "rank=1.json"]))
    problem = problem_of_a_flipped_bit(data, lasting, path)
    assert problem is not None


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["missing", "truncated", "longer", "empty", "a directory"])
def test_a_lost_or_resized_file_is_named(sealed: Path, name: str, damage: str) -> None:
    path = sealed / nemo.WEIGHTS / name
    whole = path.read_bytes()
    path.unlink()
    if damage == "a directory":
        path.mkdir()
    elif damage != "missing":
        path.write_bytes({"truncated": whole[:-1], "longer": whole + b"\0", "empty": b""}[damage])
    problem = verify(sealed)
    assert problem is not None
    assert str(path) in problem
    if damage == "missing":
        assert "lacks its file" in problem
    elif damage != "a directory":
        assert f"expected {len(whole)}" in problem


def test_files_that_the_manifest_does_not_name_are_no_business_of_it(sealed: Path) -> None:
    (sealed / nemo.WEIGHTS / "note.txt").write_text("left by somebody")
    (sealed / "README").write_text("left by somebody")
    assert verify(sealed) is None


@given(length=st.integers(0, 10_000))
def test_a_torn_manifest_is_refused_at_every_length(length: int, lasting: Path) -> None:
    path = lasting / MANIFEST
    whole = path.read_bytes()
    path.write_bytes(whole[: length % len(whole)])
    try:
        problem = verify(lasting)
    finally:
        path.write_bytes(whole)
    assert problem is not None
    assert str(path) in problem


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", '"text"', "\xff\xfe", '{"format": 1, "step": 10}'])
def test_a_manifest_that_is_something_else_is_refused(sealed: Path, text: str) -> None:
    (sealed / MANIFEST).write_bytes(text.encode("latin-1"))
    problem = verify(sealed)
    assert problem is not None
    assert "is not a file of this format" in problem


def test_a_manifest_of_the_form_before_the_first_release_is_refused_by_name_and_hidden_from_nobody(
    sealed: Path,
) -> None:
    old = {"format": 1, "step": 10, "world_size": 2, "files": {"weights/common.pt": {}}, "xxh3": "0" * 16}
    (sealed / MANIFEST).write_text(json.dumps(old, indent=1, sort_keys=True))
    storage = LocalStorage(sealed.parent)
    (problem,) = verify_together(sealed)
    assert "before its first release" in problem
    assert f"Take {MANIFEST} and checksums/ away" in problem
    assert try_read_marker(storage, 10) is None
    assert inspect(storage, 10).why == problem
    (sealed / MANIFEST).unlink()
    assert verify_together(sealed) == []


def test_a_manifest_of_another_step_is_refused_with_its_step(sealed: Path) -> None:
    moved = sealed.rename(sealed.with_name("step=20"))
    assert f"{moved} holds step 10, expected 20" in (verify(moved) or "")


def test_a_checkpoint_of_another_tool_is_accepted_when_its_last_files_are_there(sealed: Path) -> None:
    (sealed / MANIFEST).unlink()
    assert verify(sealed) is None


@pytest.mark.parametrize("lacking", ["metadata.json", ".metadata"])
def test_without_a_manifest_and_without_megatrons_last_files_it_was_never_finished(
    sealed: Path, lacking: str
) -> None:
    (sealed / MANIFEST).unlink()
    (sealed / nemo.WEIGHTS / lacking).unlink()
    problem = verify(sealed)
    assert problem is not None
    assert f"lacks {lacking}" in problem
    assert "never finished" in problem


def test_a_directory_that_does_not_exist_is_a_problem_not_an_exception(tmp_path: Path) -> None:
    assert "never finished" in (verify(tmp_path / "step=1") or "")
    (tmp_path / "step=2").touch()
    assert "never finished" in (verify(tmp_path / "step=2") or "")


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 50])
def test_the_parts_of_a_shared_verification_cover_every_file_once(sealed: Path, parts: int) -> None:
    for name in FILES:
        path = sealed / nemo.WEIGHTS / name
        whole = path.read_bytes()
        path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
        found = list(filter(None, (verify(sealed, part=part, parts=parts) for part in range(parts))))
        path.write_bytes(whole)
        assert len(found) == 1, name
        assert str(path) in found[0]
    assert not any(verify(sealed, part=part, parts=parts) for part in range(parts))


def test_the_engine_neither_restores_nor_prunes_a_save_of_nemo(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (10, 20):
        write_checkpoint(tmp_path, step)
    storage = LocalStorage(tmp_path)
    assert find_save(storage, 20, world_size=2) is None
    assert "it has format 'nemo'" in caplog.text
    assert find_save(storage, 20, world_size=3) is None
    assert prune(storage, keep_last=1) == []


def test_a_marker_that_a_mount_still_shows_does_not_hide_a_sealed_checkpoint(tmp_path: Path) -> None:
    class OldView(LocalStorage):
        """Opens a file that another host has removed since; its listings are fresh."""

        def open(self, name: str) -> ReadableFile:
            return super().open(name.replace("step=10-unfinished", "cached"))

    storage = LocalStorage(tmp_path)
    put_marker(storage, 10, Marker(state=MarkerState.WRITING, save_id="the save"))
    write_checkpoint(tmp_path)
    (tmp_path / "step=10-unfinished").rename(tmp_path / "cached")
    assert CheckpointReader(OldView(tmp_path), 10).verify() == sum(map(len, FILES.values()))


def test_sealing_refuses_a_file_that_nobody_checksummed(tmp_path: Path) -> None:
    with pytest.raises(CheckpointIncomplete, match=r"__1_0\.distcp.*__1_1\.distcp.*marked as unfinished"):
        write_checkpoint(tmp_path, ranks=1)
    assert not (tmp_path / "step=10" / MANIFEST).exists()


def test_rank_1_does_not_claim_the_files_of_rank_10(tmp_path: Path) -> None:
    weights = tmp_path / "step=10" / nemo.WEIGHTS
    weights.mkdir(parents=True)
    (weights / "__1_0.distcp").write_bytes(b"of 1")
    (weights / "__10_0.distcp").write_bytes(b"of 10")
    nemo.record_rank(tmp_path / "step=10", step=10, rank=1)
    index, _ = read_index(LocalStorage(tmp_path), "step=10", 1)
    assert [record.name for record in index.files] == ["weights/__1_0.distcp"]


def test_complete_checkpoints_come_newest_first_by_number_and_without_marked_ones(tmp_path: Path) -> None:
    for name in ("step=9", "step=10", "step=100", "step=20", "step=x", "last", "step=7-last", "xstep=8"):
        (tmp_path / name).mkdir()
    (tmp_path / "step=30").touch()  # a file is no checkpoint
    (tmp_path / "step=20-unfinished").touch()
    (tmp_path / "step=40-unfinished").touch()  # a marker without its directory yet
    found = [path.name for path in unmarked_checkpoints(tmp_path)]
    assert found == ["step=100", "step=10", "step=9"]


def test_where_nothing_was_ever_saved_there_are_no_checkpoints(tmp_path: Path) -> None:
    assert unmarked_checkpoints(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("name", "step"),
    [("step=0", 0), ("step=12", 12), ("step=12-unfinished", None), ("step=", None), ("step=-1", None)],
)
def test_the_step_is_read_from_the_whole_name(name: str, step: int | None) -> None:
    assert parse_step(name) == step


def test_marking_hides_a_checkpoint_and_may_be_done_twice(sealed: Path) -> None:
    assert unmarked_checkpoints(sealed.parent) == [sealed]
    storage = LocalStorage(sealed.parent)
    for _ in range(2):
        put_marker(storage, 10, Marker(state=MarkerState.WRITING))
    assert unmarked_checkpoints(sealed.parent) == []
    lift_marker(storage, 10)
    assert unmarked_checkpoints(sealed.parent) == [sealed]


#: Killed just before one of its calls of a function in `os`.
SEALS = """
import os, signal, sys
from pathlib import Path
from resiliency.checkpoint.format import nemo

setattr(os, sys.argv[2], lambda *args: os.kill(os.getpid(), signal.SIGKILL))
nemo.seal(Path(sys.argv[1]), step=20, world_size=2)
"""


@pytest.mark.parametrize("call", ["fsync", "pwritev"])
def test_a_process_killed_while_it_seals_leaves_the_checkpoint_before_as_the_newest(
    call: str, sealed: Path
) -> None:
    unsealed = write_checkpoint(sealed.parent, step=20)
    (unsealed / MANIFEST).unlink()
    # It stands from before the first byte until after the manifest.
    put_marker(LocalStorage(sealed.parent), 20, Marker(state=MarkerState.WRITING))
    done = warm.run([sys.executable, "-c", SEALS, str(unsealed), call], timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert unmarked_checkpoints(sealed.parent) == [sealed]
