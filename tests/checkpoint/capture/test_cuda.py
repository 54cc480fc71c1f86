# SPDX-License-Identifier: Apache-2.0
"""Captures from a CUDA device.  Their CPU twins, which run everywhere, are in test_capture.py.

The host is far ahead of the device in all of these: kernels that write the state are enqueued while
its copies still wait behind `torch.cuda._sleep`, so a copy that is ordered wrongly takes wrong bytes.
"""

from __future__ import annotations

import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import nn

from resiliency.checkpoint import (
    CaptureOptions,
    Capturer,
    Checkpointer,
    CheckpointerOptions,
    Outcome,
    RankArena,
    SaveState,
    Tier,
    materialize,
    open_captured,
    restore_into,
)
from resiliency.checkpoint.capture.cuda import PACK_BYTES, CudaHostRegistry
from resiliency.checkpoint.state import staging
from resiliency.checkpoint.state.staging import STAGE_BYTES
from resiliency.checkpoint.storage.memory_files import is_in_memory
from resiliency.errors import ConfigError
from resiliency.runtime import RunInfo
from tests.checkpoint.capture_builders import SOON, bits
from tests.waiting import agent_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.leaks("descriptors", reason="CUDA keeps its devices open for the life of the process"),
]

#: About a second of any GPU, for the host to run ahead of.
BUSY_CYCLES = 2_000_000_000
MEBI = 1 << 20

Make = Callable[..., tuple[RankArena, Capturer]]


@pytest.fixture
def memory() -> Iterator[Path]:
    """For arenas: the kernel pins no files of a disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", ignore_cleanup_errors=True) as directory:
        yield Path(directory)


@pytest.fixture
def make(memory: Path, request: pytest.FixtureRequest) -> Make:
    def build(**options: object) -> tuple[RankArena, Capturer]:
        arena = RankArena(memory / "job", rank=0)
        capturer = Capturer(arena, CaptureOptions(**options))  # type: ignore[arg-type]
        request.addfinalizer(arena.close)
        request.addfinalizer(capturer.close)
        return arena, capturer

    return build


def kept_state(arena: RankArena, step: int | None = None) -> object:
    with open_captured(arena.directory, 0, step=step) as slot:
        return materialize(slot.shard)


def test_a_capture_overlaps_and_never_mixes_two_steps(make: Make) -> None:
    arena, capturer = make()
    weight = torch.zeros(64 * MEBI, device="cuda")
    small = torch.zeros(4, device="cuda")
    odd = torch.zeros(64, 64, device="cuda").t()[:, ::2]
    for step in range(1, 6):
        for tensor in (weight, small, odd):
            tensor.fill_(step)
        torch.cuda._sleep(BUSY_CYCLES // 10)  # type: ignore[no-untyped-call]
        capture = capturer.begin({"w": weight, "small": small, "odd": odd, "cpu": torch.ones(3)}, step)
        assert capture is not None
        small.fill_(-1)  # as a forward would: copied eagerly
        assert capturer.fence(SOON)
        for tensor in (weight, odd):
            tensor.fill_(-1)
        assert capture.wait(SOON)
        assert capture.error is None
        found = kept_state(arena, step)
        for name in ("w", "small", "odd"):
            assert found[name].unique().tolist() == [step]  # type: ignore[index]


def test_training_right_after_the_fence_does_not_change_the_captured_bits(make: Make) -> None:
    arena, capturer = make()
    wide = 1 << 14  # so that the running statistics are no small tensors
    model = nn.Sequential(nn.Linear(64, wide), nn.BatchNorm1d(wide), nn.Linear(wide, 64)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    hook = capturer.install_fence(optimizer)
    data = torch.randn(64, 64, device="cuda")

    def train_step() -> None:
        optimizer.zero_grad()
        model(data).square().mean().backward()  # writes the running statistics as well
        optimizer.step()

    train_step()
    for step in range(1, 5):
        expected = {name: bits(tensor.cpu()) for name, tensor in model.state_dict().items()}
        moments = [bits(s["exp_avg"].cpu()) for s in optimizer.state_dict()["state"].values()]
        torch.cuda._sleep(BUSY_CYCLES // 10)  # type: ignore[no-untyped-call]
        capture = capturer.begin({"model": model, "optimizer": optimizer}, step, writers=[optimizer])
        train_step()
        assert capture is not None
        assert capture.wait(SOON)
        found = kept_state(arena, step)
        assert {name: bits(tensor) for name, tensor in found["model"].items()} == expected  # type: ignore[index]
        states = found["optimizer"]["state"].values()  # type: ignore[index]
        assert [bits(s["exp_avg"]) for s in states] == moments
    hook.remove()


def test_the_host_does_not_wait_for_the_copies(make: Make) -> None:
    _, capturer = make()
    weight = torch.ones(16 * MEBI, device="cuda")
    capturer.prewarm({"w": weight})
    torch.cuda.synchronize()
    torch.cuda._sleep(4 * BUSY_CYCLES)  # type: ignore[no-untyped-call]
    capture = capturer.begin({"w": weight}, 1)
    assert capturer.fence(SOON)
    assert capture is not None
    assert capture.outcome is Outcome.RUNNING, "the host waited for the device"
    assert capture.wait(SOON)
    assert capture.outcome is Outcome.CAPTURED


def test_the_slots_are_pinned_and_given_back(make: Make) -> None:
    arena, capturer = make()
    state = {"w": torch.ones(MEBI, device="cuda")}
    capturer.prewarm(state)
    views = [torch.frombuffer(slot.memory, dtype=torch.uint8) for slot in arena.slots]
    assert [view.is_pinned() for view in views] == [True, True]
    capture = capturer.begin(state, 1)
    assert capture is not None
    assert capture.wait(SOON)
    capturer.close()
    assert [view.is_pinned() for view in views] == [False, False]


def test_the_first_capture_pins_in_a_thread_of_its_own(make: Make) -> None:
    class Noting(CudaHostRegistry):
        def register(self, address: int, length: int, device: torch.device) -> str:
            threads.append(threading.current_thread())
            return super().register(address, length, device)

    threads: list[threading.Thread] = []
    _, capturer = make(registry=Noting())
    capture = capturer.begin({"w": torch.ones(MEBI, device="cuda")}, 1)
    assert capture is not None
    assert capture.wait(SOON)
    assert threads
    assert threading.current_thread() not in threads


def test_an_arena_on_a_disk_is_refused_with_where_to_put_it(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if is_in_memory(tmp_path.stat().st_dev):
        pytest.skip("gpu: the temporary folders of this machine are in memory")
    arena = RankArena(tmp_path / "job", rank=0)
    capturer = Capturer(arena, CaptureOptions())
    request.addfinalizer(arena.close)
    request.addfinalizer(capturer.close)
    with pytest.raises(ConfigError, match=r"could not pin .* keep arenas in /dev/shm"):
        capturer.prewarm({"w": torch.ones(MEBI, device="cuda")})


def test_a_state_that_grows_is_pinned_anew(make: Make) -> None:
    arena, capturer = make()
    for step, size in enumerate((MEBI, 8 * MEBI, 2 * MEBI), start=1):
        capture = capturer.begin({"w": torch.full((size,), float(step), device="cuda")}, step)
        assert capture is not None
        assert capture.wait(SOON)
        assert capture.error is None
        assert kept_state(arena, step)["w"].unique().tolist() == [step]  # type: ignore[index]


def test_a_source_that_training_drops_is_kept_until_it_is_copied(make: Make) -> None:
    arena, capturer = make()
    weight = torch.full((16 * MEBI,), 7.0, device="cuda")
    capturer.prewarm({"w": weight})
    torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
    capture = capturer.begin({"w": weight}, 1)
    assert capture is not None
    assert capturer.fence(SOON)
    del weight
    reuse = [torch.zeros(16 * MEBI, device="cuda") for _ in range(4)]  # would take the freed memory
    assert capture.wait(SOON)
    assert len(reuse) == 4
    assert kept_state(arena)["w"].unique().tolist() == [7.0]  # type: ignore[index]


def test_a_restore_writes_the_tensors_in_place_after_what_initialized_them(make: Make) -> None:
    arena, capturer = make()
    saved = {"w": torch.randn(4 * MEBI, device="cuda"), "t": torch.randn(64, 32, device="cuda").t()}
    capture = capturer.begin(saved, 1)
    assert capture is not None
    assert capture.wait(SOON)
    target = {"w": torch.zeros(4 * MEBI, device="cuda"), "t": torch.zeros(64, 32, device="cuda").t()}
    before = {name: tensor.data_ptr() for name, tensor in target.items()}
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
        target["w"].fill_(-1)  # an initialization that is still to come when the restore begins
        with open_captured(arena.directory, 0) as slot:
            restore_into(target, slot.shard)
    torch.cuda.synchronize()
    assert {name: tensor.data_ptr() for name, tensor in target.items()} == before
    for name, tensor in saved.items():
        assert bits(target[name].cpu()) == bits(tensor.cpu())


@pytest.mark.parametrize("has_pinned_memory", [True, False], ids=["", "without pinned memory"])
def test_a_restore_through_pinned_buffers_brings_back_each_bit(
    make: Make, monkeypatch: pytest.MonkeyPatch, has_pinned_memory: bool
) -> None:
    if not has_pinned_memory:
        monkeypatch.setattr(staging, "_Stage", raise_out_of_memory)
    arena, capturer = make()
    sizes = (0, 1, STAGE_BYTES - 1, STAGE_BYTES, STAGE_BYTES + 1, 5 * STAGE_BYTES + 3, *[4099] * 200)
    saved = {
        f"w{number}": torch.randint(256, (size,), dtype=torch.uint8, device="cuda")
        for number, size in enumerate(sizes)
    }
    saved["nan"] = torch.full((3 * STAGE_BYTES // 4,), -1, dtype=torch.int32, device="cuda").view(
        torch.float32
    )
    capture = capturer.begin(saved, 1)
    assert capture is not None
    assert capture.wait(SOON)
    target = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    with open_captured(arena.directory, 0) as slot:
        restore_into(target, slot.shard)
    for name, tensor in saved.items():
        assert bits(target[name].cpu()) == bits(tensor.cpu()), name


def raise_out_of_memory(device: torch.device) -> None:
    raise RuntimeError("CUDA error: out of memory")


def test_the_agent_never_opens_the_gpu_and_the_checkpoint_comes_back(tmp_path: Path, memory: Path) -> None:
    options = CheckpointerOptions(arena_root=memory)
    info = RunInfo(job_name="cuda", host="here", rank=0)
    state = {"w": torch.randn(4 * MEBI, device="cuda")}
    expected = bits(state["w"].cpu())
    with Checkpointer(tmp_path / "ckpt", info=info, options=options) as checkpoints:
        checkpoints.prewarm(state)
        handle = checkpoints.save(1, state)
        state["w"].zero_()
        assert handle.wait(timedelta(minutes=1))
        assert handle.state is SaveState.COMMITTED
        opened = [link.readlink() for link in Path(f"/proc/{agent_of(checkpoints)}/fd").iterdir()]
        assert [path for path in opened if str(path).startswith("/dev/nvidia")] == []
    with Checkpointer(tmp_path / "ckpt", info=info, options=options) as checkpoints:
        restored = checkpoints.restore(state)
    assert (restored.step, restored.tier) == (1, Tier.PERSISTENT)
    assert bits(state["w"].cpu()) == expected


def test_tensors_that_are_not_contiguous_take_no_second_copy_of_the_state_on_the_device(make: Make) -> None:
    arena, capturer = make()
    last = torch.channels_last
    state = {
        f"w{number}": torch.randn(16, 256, 64, 64, device="cuda").contiguous(memory_format=last)
        for number in range(16)
    }
    capturer.prewarm(state)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
    capture = capturer.begin(state, 1)
    assert capture is not None
    taken = torch.cuda.max_memory_allocated() - before
    assert taken <= 2 * PACK_BYTES < sum(tensor.nbytes for tensor in state.values()) // 4
    assert capturer.fence(SOON)
    assert capture.wait(SOON)
    found = kept_state(arena)
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor.cpu())  # type: ignore[index]


def test_a_plan_is_used_again_and_holds_nothing_of_the_state(make: Make) -> None:
    arena, capturer = make()
    state = {"w": torch.zeros(MEBI, device="cuda"), "t": torch.zeros(512, 256, device="cuda").t()}
    plans = []
    for step in range(1, 5):
        for tensor in state.values():
            tensor.fill_(step)
        capture = capturer.begin(state, step)
        assert capture is not None
        assert capture.wait(SOON)
        found = kept_state(arena, step)
        assert [found[name].unique().tolist() for name in state] == [[step], [step]]  # type: ignore[index]
        plans.append({area.plan for area in capturer._areas.values()})
    assert plans[1] == plans[3]
    assert None not in plans[3]
    alive = weakref.ref(state["w"])
    del capture, tensor
    state["w"] = torch.full((MEBI,), 7.0, device="cuda")
    assert alive() is None
    capture = capturer.begin(state, 5)
    assert capture is not None
    assert capture.wait(SOON)
    assert kept_state(arena, 5)["w"].unique().tolist() == [7.0]  # type: ignore[index]


def replayed(weights: torch.nn.Parameter, optimizer: torch.optim.Optimizer) -> torch.cuda.CUDAGraph:
    """A graph of one step."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            weights.grad = torch.ones_like(weights)
            optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    return graph


def test_a_step_that_a_cuda_graph_replays_beside_a_save_is_in_none_or_all_of_it(
    tmp_path: Path, memory: Path
) -> None:
    weights = torch.nn.Parameter(torch.zeros(16 * MEBI, device="cuda"))
    optimizer = torch.optim.AdamW([weights], lr=0.1, capturable=True)
    state = {"weights": weights, "optimizer": optimizer}
    graph = replayed(weights, optimizer)
    info = RunInfo(job_name="cuda-graphs", host="here", rank=0)
    with Checkpointer(tmp_path / "ckpt", info=info, options=CheckpointerOptions(arena_root=memory)) as saves:
        saves.prewarm(state)
        torch.cuda.synchronize()
        expected = weights.detach().cpu()
        torch.cuda._sleep(BUSY_CYCLES // 10)  # type: ignore[no-untyped-call]
        handle = saves.save(1, state)
        graph.replay()  # calls no hook
        assert handle.wait(timedelta(minutes=1))
        assert handle.state is SaveState.COMMITTED
        torch.cuda.synchronize()
        assert not torch.equal(weights.detach().cpu(), expected)
        assert saves.restore(state, step=1).step == 1
    assert torch.equal(weights.detach().cpu(), expected)


def test_a_fence_inside_the_recording_of_a_graph_neither_fails_nor_is_recorded(make: Make) -> None:
    arena, capturer = make()
    weights = torch.nn.Parameter(torch.full((16 * MEBI,), 3.0, device="cuda"))
    optimizer = torch.optim.SGD([weights], lr=1.0)
    capturer.prewarm({"w": weights})
    weights.grad = torch.ones_like(weights)
    optimizer.step()
    weights.data.fill_(3.0)
    torch.cuda.synchronize()
    capture = capturer.begin({"w": weights}, 1, writers=[optimizer])
    assert capture is not None
    hook = capturer.install_fence(optimizer)
    graph = torch.cuda.CUDAGraph()
    # Only this thread's calls are checked: the publisher waits for the copies meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        optimizer.step()
    hook.remove()
    assert capture.wait(SOON)
    assert capture.error is None
    graph.replay()
    torch.cuda.synchronize()
    assert weights.unique().tolist() == [2.0]
    assert kept_state(arena, 1)["w"].unique().tolist() == [3.0]  # type: ignore[index]


@pytest.mark.gpu(devices=2)
def test_a_state_on_two_devices_is_captured_whole(make: Make) -> None:
    arena, capturer = make()
    state = {name: torch.ones(4 * MEBI, device=name) for name in ("cuda:0", "cuda:1")}
    for step in range(1, 4):
        for tensor in state.values():
            tensor.fill_(step)
        capture = capturer.begin(state, step)
        assert capture is not None
        assert capturer.fence(SOON)
        for tensor in state.values():
            tensor.fill_(-1)
        assert capture.wait(SOON)
        found = kept_state(arena, step)
        assert [found[name].unique().tolist() for name in state] == [[step], [step]]  # type: ignore[index]
