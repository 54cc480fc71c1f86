# SPDX-License-Identifier: Apache-2.0
"""Stock `torch.distributed.checkpoint` over our storage: the same bits, and proof of them."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlanner

from resiliency.checkpoint.cli import OK, main
from resiliency.checkpoint.format.catalog import Condition, find_newest, inspect, quarantine
from resiliency.checkpoint.format.claim import holds_claims_alone
from resiliency.checkpoint.format.lease import Lease
from resiliency.checkpoint.format.local import LocalFormat
from resiliency.checkpoint.format.marker import MarkerState, try_read_marker
from resiliency.checkpoint.format.reader import CheckpointReader
from resiliency.checkpoint.storage.interface import Storage, WritableFile
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.checkpoint.torch_dcp import DcpStorageReader, DcpStorageWriter
from resiliency.checkpoint.torch_dcp import files as dcp_files
from resiliency.checkpoint.torch_dcp import load_plan as dcp_reading
from resiliency.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointIncomplete,
    CheckpointMissing,
    CheckpointWriteFailed,
    ConfigError,
)
from resiliency.testing import warm
from resiliency.testing.rank_pool import RankPool
from resiliency.testing.storage import FaultyStorage, MemoryStorage, StorageFault, StorageFaultKind, Survival
from tests.checkpoint import dcp_ranks
from tests.checkpoint.dcp_saves import small_state, store
from tests.checkpoint.storage_builders import content_of, folder_of, save, small_shard
from tests.checkpoint.tensor_builders import DTYPES, SHAPES, random_tensor, same_bits

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    # torch itself, in its staging of async saves
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    state = {
        f"{str(dtype).removeprefix('torch.')}-{number}": random_tensor(dtype, shape, number + seed)
        for dtype in DTYPES
        for number, shape in enumerate(SHAPES)
    }
    base = random_tensor(torch.float32, (6, 8), seed)
    state |= {"turned": base.t(), "window": base[1:5, 2:7], "spread": base[0, 0].expand(4)}
    state["large"] = random_tensor(torch.float32, (3 << 18,), seed)
    state["conjugated"] = torch.view_as_complex(random_tensor(torch.float32, (3, 2), seed)).conj()
    return state


def full_state(seed: int = 0) -> dict[str, Any]:
    return {
        "model": tensors(seed),
        "optim": {"state": {0: {"step": torch.tensor(float(seed))}}, "groups": [{"lr": 0.1 * seed}]},
        "list": [torch.full((2,), seed), {"deep": torch.tensor([seed])}],
        "plain": ("a", seed, None, 2.5),
        "text": f"seed {seed}",
    }


def template() -> dict[str, Any]:
    """Another state of the same structure, to load into."""
    state = full_state(2)
    state["model"]["spread"] = torch.zeros(4)  # torch writes to no tensor that overlaps itself
    return state


def assert_same_state(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert same_bits(found.resolve_conj(), expected.resolve_conj())
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_same_state(found[key], value)
    elif isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            assert_same_state(one, other)
    else:
        assert found == expected


def assert_stored(storage: Storage, step: int) -> None:
    found = small_state(999)
    dcp.load(found, storage_reader=DcpStorageReader(f"/x/step={step}", open_storage=lambda root: storage))
    assert_same_state(found, small_state(step))


def refusal(action: Callable[[], object]) -> Exception:
    """Our own error, from inside of torch's."""
    with pytest.raises(CheckpointException) as caught:
        action()
    ((error, _),) = caught.value.failures.values()
    assert str(error) in str(caught.value), "torch prints our text"
    assert isinstance(error, Exception)
    return error


# --- contract with stock torch ------------------------------------------------------------------


def test_what_we_save_stock_torch_loads_bit_for_bit_and_verify_proves(tmp_path: Path) -> None:
    dcp.save(full_state(1), storage_writer=DcpStorageWriter(tmp_path / "step=1"))
    found = template()
    dcp.load(found, checkpoint_id=tmp_path / "step=1")
    assert_same_state(found, full_state(1))
    assert os.listdir(tmp_path) == ["step=1"]
    assert main(["verify", str(tmp_path)]) == OK
    assert main(["show", str(tmp_path)]) == OK


def test_what_we_save_we_load_bit_for_bit(tmp_path: Path) -> None:
    dcp.save(full_state(1), checkpoint_id=tmp_path / "step=1", storage_writer=DcpStorageWriter())
    found = template()
    dcp.load(found, checkpoint_id=tmp_path / "step=1", storage_reader=DcpStorageReader())
    assert_same_state(found, full_state(1))
    assert os.listdir(tmp_path) == ["step=1"]


def test_what_stock_torch_saved_we_load_and_say_that_nothing_proves_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dcp.save(full_state(1), checkpoint_id=tmp_path / "any name")
    found = template()
    dcp.load(found, storage_reader=DcpStorageReader(tmp_path / "any name"))
    assert_same_state(found, full_state(1))
    assert "has no checksums" in caplog.text


def test_what_the_engine_saved_is_loaded_and_verified(tmp_path: Path) -> None:
    from resiliency.checkpoint.format.dcp import DcpFormat

    save(LocalStorage(tmp_path), DcpFormat(), [small_shard(4)])
    found = {"model": {"weight": torch.zeros(37, 11), "bias": torch.zeros(5, dtype=torch.bfloat16)}}
    dcp.load(found, storage_reader=DcpStorageReader(tmp_path / "step=4"))
    generator = torch.Generator().manual_seed(4000)
    assert torch.equal(found["model"]["weight"], torch.randn(37, 11, generator=generator))


def test_our_own_reader_finds_the_tensors_of_a_torch_save(tmp_path: Path) -> None:
    dcp.save(full_state(1), storage_writer=DcpStorageWriter(tmp_path / "step=1"))
    index = CheckpointReader(LocalStorage(tmp_path), 1).index(0)
    (large,) = (record for record in index.tensors if record.key == "model.large")
    assert same_bits(content_of(tmp_path, 1, index, large), tensors(1)["large"])


def test_tied_tensors_are_stored_once_and_load_under_both_names(tmp_path: Path) -> None:
    weight = random_tensor(torch.float32, (300, 1000))
    dcp.save({"a": weight, "b": weight}, storage_writer=DcpStorageWriter(tmp_path / "step=1"))
    assert (tmp_path / folder_of(tmp_path, 1) / "__0_0.distcp").stat().st_size < 1.1 * weight.nbytes
    for how in (
        {"checkpoint_id": tmp_path / "step=1"},
        {"storage_reader": DcpStorageReader(tmp_path / "step=1")},
    ):
        found = {"a": torch.zeros(300, 1000), "b": torch.zeros(300, 1000)}
        dcp.load(found, **how)
        assert same_bits(found["a"], weight)
        assert same_bits(found["b"], weight)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_tensors_that_bytes_alone_do_not_describe_are_left_to_torch(tmp_path: Path) -> None:
    quantised = torch.quantize_per_tensor(torch.randn(9), 0.1, 3, torch.qint8)
    dcp.save({"q": quantised[2:7], "w": torch.ones(2)}, storage_writer=DcpStorageWriter(tmp_path / "step=1"))
    for how in (
        {"checkpoint_id": tmp_path / "step=1"},
        {"storage_reader": DcpStorageReader(tmp_path / "step=1")},
    ):
        found = {"q": torch.quantize_per_tensor(torch.zeros(5), 0.5, 1, torch.qint8), "w": torch.zeros(2)}
        dcp.load(found, **how)
        assert torch.equal(found["q"].int_repr(), quantised[2:7].int_repr())
        assert found["w"].tolist() == [1, 1]


def test_a_large_state_makes_several_files_and_bounded_scratch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcp_files, "FILE_BYTES", 1000)
    monkeypatch.setattr(dcp_reading, "SCRATCH_BYTES", 100)
    dcp.save(full_state(1), storage_writer=DcpStorageWriter(tmp_path / "step=1"))
    assert len(list((tmp_path / "step=1").glob("*/__0_*.distcp"))) > 5
    for how in (
        {"checkpoint_id": tmp_path / "step=1"},
        {"storage_reader": DcpStorageReader(tmp_path / "step=1")},
    ):
        found = template()
        dcp.load(found, **how)
        assert_same_state(found, full_state(1))


def test_another_dtype_is_cast_as_stock_torch_casts_it(tmp_path: Path) -> None:
    weight = torch.randn(7, 5)
    dcp.save({"w": weight}, storage_writer=DcpStorageWriter(tmp_path / "step=1"))
    found = {"w": torch.zeros(7, 5, dtype=torch.bfloat16)}
    dcp.load(found, storage_reader=DcpStorageReader(tmp_path / "step=1"))
    assert torch.equal(found["w"], weight.bfloat16())


def test_what_the_private_name_of_save_plans_is_for(tmp_path: Path) -> None:
    class Cached(DefaultSavePlanner):
        """A name of its own: torch keeps cached plans by it."""

    try:
        for number, writer in enumerate([DcpStorageWriter, FileSystemWriter, DcpStorageWriter], start=1):
            path = tmp_path / f"step={number}"
            dcp.save(small_state(7), storage_writer=writer(path), planner=Cached(enable_plan_caching=True))
            found = small_state(1)
            dcp.load(found, storage_reader=DcpStorageReader(path))
            assert_same_state(found, small_state(7))
    finally:
        forget_plans("Cached")


def test_cached_plans_follow_a_structure_that_changes_and_changes_back(tmp_path: Path) -> None:
    class Kept(DefaultSavePlanner):
        """A name of its own: torch keeps cached plans by it."""

    one, other = small_state, lambda step: {**small_state(step), "new": torch.full((4, 4), step)}
    try:
        for step, build in enumerate([one, one, other, other, one, one], start=1):
            writer = DcpStorageWriter(tmp_path / f"step={step}")
            dcp.save(build(step), storage_writer=writer, planner=Kept(enable_plan_caching=True))
        for step, build in enumerate([one, one, other, other, one, one], start=1):
            found = build(99)
            dcp.load(found, storage_reader=DcpStorageReader(tmp_path / f"step={step}"))
            assert_same_state(found, build(step))
    finally:
        forget_plans("Kept")


def forget_plans(name: str) -> None:
    caches = ("save_plan", "final_save_plan", "all_plans", "global_plan", "metadata")
    for cache in caches:
        getattr(SavePlanner, f"_cached_{cache}").pop(name, None)


# --- a kill after every operation ---------------------------------------------------------------


@pytest.mark.parametrize("kind", [StorageFaultKind.KILL, StorageFaultKind.TORN_KILL])
def test_a_power_cut_at_any_operation_leaves_the_previous_or_the_new_step(kind: StorageFaultKind) -> None:
    counted = FaultyStorage(MemoryStorage())
    store(counted, 2)
    count = len(counted.operations)
    assert count > 15
    outcomes = []
    for operation in range(count + 1):
        disk = MemoryStorage()
        store(disk, 1)
        faulty = FaultyStorage(disk, StorageFault(operation=operation, kind=kind))
        if operation < count:
            with pytest.raises(CheckpointException, match="StorageKilled"):
                store(faulty, 2)
        else:
            store(faulty, 2)
        found = set()
        for world in [(Survival.NOTHING, 0), (Survival.EVERYTHING, 0), (Survival.RANDOM, operation)]:
            after = disk.crash(*world)
            step = find_newest(after).step
            assert_stored(after, step)
            found.add(step)
        outcomes.append(found)
        after = disk.crash(Survival.RANDOM, operation)
        store(after, 2, overwrite=True)
        assert_stored(after, 2)
    assert outcomes[0] == {1}
    assert outcomes[-1] == {2}
    assert all(outcome <= {1, 2} for outcome in outcomes)


def test_sigkill_at_any_operation_on_disk_leaves_the_previous_or_the_new_step(tmp_path: Path) -> None:
    done = run_program("dcp_saving_until_killed", tmp_path)
    deaths = [int(line) for line in done.stdout.split()]
    assert len(deaths) > 15
    steps = []
    for number, status in enumerate(deaths):
        assert status == (-signal.SIGKILL if number < len(deaths) - 1 else 0)
        storage = LocalStorage(tmp_path / str(number))
        steps.append(find_newest(storage).step)
        assert_stored(storage, steps[-1])
    assert steps == sorted(steps), "once the new step is there it stays"
    assert (steps[0], steps[-1]) == (1, 2)


def run_program(name: str, directory: Path) -> subprocess.CompletedProcess[str]:
    done = warm.run([sys.executable, "-m", f"tests.checkpoint.{name}", str(directory)], timeout=240)
    assert done.returncode == 0, done.stderr
    return done


# --- storages that fail -------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_an_error_at_any_operation_fails_the_save_by_name_and_nothing_else(number: int) -> None:
    counted = FaultyStorage(MemoryStorage())
    store(counted, 2)
    count = len(counted.operations)
    for operation in range(count):
        disk = MemoryStorage()
        store(disk, 1)
        fault = StorageFault(operation=operation, kind=StorageFaultKind.ERROR, errno=number)
        error = refusal(lambda: store(FaultyStorage(disk, fault), 2))  # noqa: B023  # called at once
        assert isinstance(error, CheckpointWriteFailed)
        assert errno.errorcode[number] in str(error)
        # Its last operation alone may fail after the fact: then the new step is shown, and whole.
        assert find_newest(disk).step in ({1, 2} if operation == count - 1 else {1})
        assert_stored(disk, 1)
        if operation == count - 1:
            continue
        marker = try_read_marker(disk, 2)
        if disk.exists("step=2") and not holds_claims_alone(disk, 2):
            assert marker is not None
            assert marker.state is MarkerState.FAILED
            assert errno.errorcode[number] in marker.reason


def test_a_real_full_and_then_read_only_disk_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        store(LocalStorage(disk), 1)
        large = {"w": torch.zeros(400 << 10, dtype=torch.uint8)}
        error = refusal(lambda: dcp.save(large, storage_writer=DcpStorageWriter(disk / "step=2")))
        assert "ENOSPC" in str(error)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        error = refusal(lambda: store(LocalStorage(disk), 3))
        assert "EROFS" in str(error)
        assert_stored(LocalStorage(disk), 1)  # without a lease
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# --- what is refused ----------------------------------------------------------------------------


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "rank=0.json", "manifest.json"])
@pytest.mark.parametrize("damage", [flip, cut, Path.unlink], ids=["flipped bit", "cut", "missing"])
def test_any_damage_to_any_file_is_refused_by_name(
    tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    store(LocalStorage(tmp_path), 1)
    (path,) = (tmp_path / "step=1").rglob(name)
    damage(path)
    error = refusal(lambda: assert_stored(LocalStorage(tmp_path), 1))
    assert isinstance(error, CheckpointIncomplete if damage is Path.unlink else CheckpointCorrupt)
    assert name in str(error)


@pytest.mark.parametrize("damage", [cut, Path.unlink], ids=["cut", "missing"])
def test_a_damaged_stock_checkpoint_is_refused_by_name(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    dcp.save(small_state(1), checkpoint_id=tmp_path / "step=1")
    damage(tmp_path / "step=1" / "__0_0.distcp")
    found = small_state(2)
    error = refusal(lambda: dcp.load(found, storage_reader=DcpStorageReader(tmp_path / "step=1")))
    assert isinstance(error, CheckpointIncomplete if damage is Path.unlink else CheckpointCorrupt)


def test_what_is_unfinished_foreign_renamed_or_not_there_is_refused_by_name(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    store(storage, 1)
    shutil.copytree(tmp_path / "step=1", tmp_path / "step=7")
    shutil.copytree(tmp_path / "step=1", tmp_path / "backup")
    (tmp_path / "step=8").mkdir()
    (tmp_path / "step=8" / "something").touch()
    save(storage, LocalFormat(), [small_shard(9)])
    dcp.save(small_state(5), checkpoint_id=tmp_path / "step=5")
    quarantine(storage, 5, "bytes differ")
    quarantine(storage, 1, "bytes differ")
    expected: dict[str, tuple[type[Exception], str]] = {
        "step=1": (CheckpointIncomplete, r"marked as unfinished: it was found bad \(bytes differ\)"),
        "step=5": (CheckpointIncomplete, "marked as unfinished"),
        "step=7": (CheckpointCorrupt, "holds step 1, expected 7"),
        "backup": (ConfigError, "a directory called step=N, found .*backup"),
        "step=8": (CheckpointIncomplete, "never committed"),
        "step=9": (CheckpointIncomplete, "has format 'local', without the .metadata"),
        "step=6": (CheckpointMissing, "there is no checkpoint"),
    }
    for name, (kind, text) in expected.items():
        reader = DcpStorageReader(tmp_path / name)
        error = refusal(lambda: dcp.load(small_state(2), storage_reader=reader))  # noqa: B023
        assert type(error) is kind, name
        with pytest.raises(kind, match=text):
            reader.read_metadata()


def test_a_step_that_stands_is_not_overwritten_unless_asked_for(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    store(storage, 1)
    error = refusal(lambda: store(storage, 1))
    assert "step=1 is a complete checkpoint already" in str(error)
    with Lease(storage, 1):
        assert "a process reads it" in str(refusal(lambda: store(storage, 1, overwrite=True)))
    assert_stored(storage, 1)
    assert inspect(storage, 1).condition is Condition.COMPLETE
    writer = DcpStorageWriter(tmp_path / "step=1", overwrite=True)
    dcp.save(small_state(8), storage_writer=writer)
    found = small_state(2)
    dcp.load(found, storage_reader=DcpStorageReader(tmp_path / "step=1"))
    assert_same_state(found, small_state(8))
    (tmp_path / "step=3").mkdir()
    (tmp_path / "step=3" / "precious").touch()
    assert "holds 'precious'" in str(refusal(lambda: store(storage, 3, overwrite=True)))


def test_old_checkpoints_go_only_after_the_new_one_stands(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    for step in (1, 2, 3):
        store(storage, step, keep=2)
    assert storage.list("") == ["step=2", "step=3"]
    fault = StorageFault(operation=5, kind=StorageFaultKind.ERROR)
    refusal(lambda: store(FaultyStorage(storage, fault), 4, keep=1))
    assert {"step=2", "step=3"} <= set(storage.list(""))


def test_settings_that_cannot_work_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keep must be at least 1"):
        DcpStorageWriter(keep=0)
    with pytest.raises(ConfigError, match=r"found the URL 's3://bucket/step=1'"):
        DcpStorageWriter("s3://bucket/step=1")
    assert "was given no path" in str(
        refusal(lambda: dcp.save(small_state(1), storage_writer=DcpStorageWriter()))
    )
    assert "was given no path" in str(
        refusal(lambda: dcp.load(small_state(1), storage_reader=DcpStorageReader()))
    )
    with pytest.raises(ConfigError, match="use_collectives=False"):
        dcp.save(small_state(1), storage_writer=DcpStorageWriter(tmp_path / "step=1"), use_collectives=False)
    assert os.listdir(tmp_path) == []


# --- async --------------------------------------------------------------------------------------


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_an_async_save_holds_the_state_of_its_call(tmp_path: Path) -> None:
    state, expected, found = full_state(1), full_state(1), template()
    for one in (state, expected, found):
        del one["model"]["conjugated"]  # torch's staging forgets that it is
    future = dcp.async_save(state, storage_writer=DcpStorageWriter(tmp_path / "step=1"))
    state["model"]["large"].zero_()
    future.result(timeout=60)
    dcp.load(found, storage_reader=DcpStorageReader(tmp_path / "step=1"))
    assert_same_state(found, expected)


class HeldStorage(LocalStorage):
    """The first file of data waits until it is let go."""

    begun = threading.Event()
    go_on = threading.Event()

    def create(self, name: str, size_bytes: int = 0) -> WritableFile:
        if name.startswith("step=1/") and name.endswith("/__0_0.distcp"):
            self.begun.set()
            assert self.go_on.wait(60)
        return super().create(name, size_bytes)


@pytest.mark.usefixtures("group")
def test_a_save_whose_writer_was_given_another_one_meanwhile_fails_and_the_other_stands(
    tmp_path: Path,
) -> None:
    writer = DcpStorageWriter(open_storage=HeldStorage)
    held = {"checkpoint_id": tmp_path / "step=1", "storage_writer": writer, "no_dist": True}
    first = dcp.async_save(small_state(1), **held)
    try:
        assert HeldStorage.begun.wait(60)
        dcp.save(small_state(2), checkpoint_id=tmp_path / "step=2", storage_writer=writer, no_dist=True)
    finally:
        HeldStorage.go_on.set()
    with pytest.raises(CheckpointException, match="was given another save before this one ended"):
        first.result(timeout=60)
    assert inspect(LocalStorage(tmp_path), 1).condition is Condition.UNFINISHED
    assert_stored(LocalStorage(tmp_path), 2)


@pytest.mark.thorough("the writer in a thread is near")
@pytest.mark.slow
def test_the_process_executor_takes_the_writer_and_a_failed_save_does_not_end_it(tmp_path: Path) -> None:
    assert isinstance(pickle.loads(pickle.dumps(DcpStorageWriter(tmp_path / "step=1"))), DcpStorageWriter)  # noqa: S301
    done = run_program("dcp_async_process", tmp_path)
    assert done.stdout.split() == ["saved", "refused", "saved"]
    for step in (1, 3):
        assert_stored(LocalStorage(tmp_path), step)


@pytest.mark.gpu
@pytest.mark.leaks("descriptors", reason="CUDA keeps its devices open for the life of the process")
def test_tensors_of_a_cuda_device_come_back_on_it(tmp_path: Path) -> None:
    state = {"w": torch.arange(3 << 18, device="cuda").float(), "t": torch.randn(5, 7, device="cuda").t()}
    dcp.save(state, storage_writer=DcpStorageWriter(tmp_path / "step=1"))
    for how in (
        {"checkpoint_id": tmp_path / "step=1"},
        {"storage_reader": DcpStorageReader(tmp_path / "step=1")},
    ):
        found = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
        dcp.load(found, **how)
        assert all(torch.equal(found[key], tensor) for key, tensor in state.items())


# --- several ranks ------------------------------------------------------------------------------


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, 2), (2, 1), (1, 2), (3, 2)])
def test_a_sharded_model_and_optimizer_come_back_at_any_world_size(
    tmp_path: Path, rank_pool: RankPool, saved_by: int, loaded_by: int
) -> None:
    path = str(tmp_path / "step=1")
    (expected, *_) = rank_pool.run(dcp_ranks.save_trained, saved_by, path, False, timeout=90).values
    for stock in (False, True):
        for found in rank_pool.run(dcp_ranks.load_trained, loaded_by, path, stock, timeout=90).values:
            assert_same_state(found, expected)
    assert len(CheckpointReader(LocalStorage(tmp_path), 1).manifest.ranks) == saved_by
    assert main(["verify", str(tmp_path)]) == OK


def test_what_stock_ranks_saved_is_loaded_at_another_world_size(tmp_path: Path, rank_pool: RankPool) -> None:
    path = str(tmp_path / "step=1")
    (expected, *_) = rank_pool.run(dcp_ranks.save_trained, 2, path, True, timeout=90).values
    for found in rank_pool.run(dcp_ranks.load_trained, 3, path, False, timeout=90).values:
        assert_same_state(found, expected)


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(3, 1), (1, 3), (3, 2)])
def test_uneven_empty_and_replicated_parts_come_back_at_any_world_size(
    tmp_path: Path, rank_pool: RankPool, saved_by: int, loaded_by: int
) -> None:
    path = str(tmp_path / "step=1")
    assert not any(rank_pool.run(dcp_ranks.save_rows, saved_by, path, timeout=90).values)
    (expected,) = rank_pool.run(dcp_ranks.rows_of, 1, 2, timeout=90).values
    for found in rank_pool.run(dcp_ranks.load_rows, loaded_by, path, timeout=90).values:
        assert_same_state(found, expected)


@pytest.mark.parametrize(
    ("broken", "operation"), [(0, 1), (0, 7), (1, 1)], ids=["the marker", "data of rank 0", "data of rank 1"]
)
def test_a_full_disk_at_one_rank_fails_the_save_on_all_and_the_next_one_commits(
    tmp_path: Path, rank_pool: RankPool, broken: int, operation: int
) -> None:
    root = str(tmp_path)
    rank_pool.run(dcp_ranks.save_rows, 2, f"{root}/step=1", timeout=90).values  # noqa: B018
    work = dcp_ranks.save_with_a_full_disk_at
    for first, listed in rank_pool.run(work, 2, root, broken, operation, timeout=80).values:
        assert broken in first
        # The other rank may have begun already, or have been told.
        assert all("CheckpointWriteFailed" in text and "ENOSPC" in text for text in first.values())
        assert "step=1" in listed.values()
    assert [found.condition for found in (inspect(LocalStorage(tmp_path), s) for s in (1, 2))] == [
        Condition.COMPLETE
    ] * 2


def test_a_flipped_bit_that_one_rank_reads_fails_the_load_on_all(tmp_path: Path, rank_pool: RankPool) -> None:
    path = str(tmp_path / "step=1")
    assert rank_pool.run(dcp_ranks.save_rows, 2, path, timeout=90).values == [{}, {}]
    reports = rank_pool.run(dcp_ranks.load_with_a_flipped_bit_at, 2, path, 1, timeout=90).values
    for report in reports:
        assert list(report) == [1]
        assert report[1].startswith("CheckpointCorrupt: ")
        assert "rows" in report[1]


def test_a_checkpoint_that_is_not_there_fails_the_load_on_all_ranks(
    tmp_path: Path, rank_pool: RankPool
) -> None:
    for report in rank_pool.run(dcp_ranks.load_rows, 2, str(tmp_path / "step=1"), timeout=90).values:
        assert sorted(report) == [0, 1]
        assert all(text.startswith("CheckpointMissing: ") for text in report.values())


def test_ranks_that_do_not_see_one_directory_are_told_so(tmp_path: Path, rank_pool: RankPool) -> None:
    reports = rank_pool.run(dcp_ranks.save_to_directories_of_their_own, 2, str(tmp_path), timeout=90).values
    for report in reports:
        assert "rank 1 does not see" in report[1]
        assert "All ranks must write to one shared directory" in report[1]
    with pytest.raises(CheckpointError):
        find_newest(LocalStorage(tmp_path / "host0"))
