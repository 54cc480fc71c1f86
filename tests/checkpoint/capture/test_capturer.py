# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from resiliency.checkpoint import (
    CaptureOptions,
    Capturer,
    Outcome,
    RankArena,
    StateWalker,
    WhenFull,
    materialize,
    open_captured,
)
from resiliency.checkpoint.capture.arena import peek
from resiliency.checkpoint.capture.cuda import PACK_BYTES, SEGMENT_BYTES, DeviceTransfer, PinnedMemory, cuts
from resiliency.checkpoint.state.copying import strips
from resiliency.checkpoint.state.snapshot import Snapshot
from resiliency.errors import ConfigError
from tests.checkpoint.capture_builders import SOON, Gate, bits
from tests.checkpoint.low_bit import low_bit
from tests.waiting import wait_until

Make = Callable[..., tuple[RankArena, Capturer]]


@pytest.fixture
def make(tmp_path: Path, request: pytest.FixtureRequest) -> Make:
    def build(slots: int = 2, **options: object) -> tuple[RankArena, Capturer]:
        arena = RankArena(tmp_path / "job", rank=0, slots=slots)
        capturer = Capturer(arena, CaptureOptions(**options))  # type: ignore[arg-type]
        request.addfinalizer(arena.close)
        request.addfinalizer(capturer.close)
        return arena, capturer

    return build


def kept_state(arena: RankArena, step: int | None = None) -> object:
    with open_captured(arena.directory, 0, step=step) as slot:
        return materialize(slot.shard)


def test_a_capture_never_mixes_two_steps(make: Make) -> None:
    arena, capturer = make()
    weights = [torch.zeros(1 << 18) for _ in range(8)]
    for step in range(1, 40):
        for weight in weights:
            weight.fill_(step)
        capture = capturer.begin({"weights": weights, "step": step}, step)
        assert capture is not None
        assert capturer.fence(SOON)
        for weight in weights:
            weight.fill_(-step)  # at once after the fence, while the capture may not be published yet
        assert capture.wait(SOON)
        found = kept_state(arena, step)
        assert found["step"] == step  # type: ignore[index]
        assert {float(v) for w in found["weights"] for v in w.unique()} == {float(step)}  # type: ignore[index]
    assert capturer.stats.captured == 39
    assert capturer.stats.layouts == 1


@pytest.mark.leaks("variables", reason="the first torch optimizer sets TORCHINDUCTOR_CACHE_DIR")
def test_the_optimizer_waits_for_the_capture(make: Make) -> None:
    gate = Gate()
    arena, capturer = make(before_piece=gate, eager_below_bytes=0, threads=1)
    weight = torch.nn.Parameter(torch.ones(1000))
    weight.grad = torch.ones(1000)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    handle = capturer.install_fence(optimizer)
    capture = capturer.begin({"w": weight}, 1)
    assert capture is not None
    assert gate.arrived.wait(30)
    stepping = threading.Thread(target=optimizer.step)
    stepping.start()
    stepping.join(0.05)
    assert stepping.is_alive()
    assert weight.detach()[0] == 1
    gate.open()
    stepping.join(30)
    assert weight.detach()[0] == 0
    assert capture.wait(SOON)
    assert kept_state(arena)["w"].unique().tolist() == [1]  # type: ignore[index]
    handle.remove()
    with pytest.raises(ConfigError, match=r"object is no torch optimizer.*capturer\.fence"):
        capturer.install_fence(object())


@pytest.mark.leaks("variables", reason="the first torch optimizer sets TORCHINDUCTOR_CACHE_DIR")
def test_one_thread_copies_behind_training_and_all_do_once_it_waits(make: Make) -> None:
    both = threading.Barrier(2)
    _, capturer = make(before_piece=lambda index: both.wait(30), eager_below_bytes=0, threads=2)
    weights = [torch.nn.Parameter(torch.ones(1000)) for _ in range(2)]
    capture = capturer.begin({"w": weights}, 1, writers=[torch.optim.SGD(weights)])
    assert capture is not None
    assert not capture.wait(timedelta(seconds=0.05))  # the one thread waits for another
    assert capturer.fence(SOON)
    assert capture.wait(SOON)
    assert capture.outcome is Outcome.CAPTURED


def test_a_capture_that_misses_its_fence_is_dropped_and_never_published(make: Make) -> None:
    gate = Gate()
    arena, capturer = make(before_piece=gate, eager_below_bytes=0, threads=1)
    weight = torch.ones(1000)
    capture = capturer.begin({"w": weight}, 1)
    assert capture is not None
    assert not capturer.fence(timedelta(milliseconds=1))
    weight.fill_(2)
    gate.open()
    assert capture.wait(SOON)
    assert capture.outcome is Outcome.DROPPED
    assert capturer.stats.dropped == 1
    assert peek(arena.directory, 0) == []
    assert capturer.begin({"w": weight}, 2) is not None
    assert capturer.fence(SOON)


@pytest.mark.parametrize("part", [False, True], ids=["whole", "part"])
def test_a_wrapper_that_is_written_without_a_fence_is_never_published(make: Make, part: bool) -> None:
    """Torch counts a write to the whole of it there, not in the parts that its class writes."""
    gate = Gate()
    arena, capturer = make(before_piece=gate, eager_below_bytes=0, threads=1)
    moment = low_bit(100, 1)
    capture = capturer.begin({"moment": moment}, 1)
    assert capture is not None
    (moment.scale if part else moment).mul_(2)
    gate.open()
    assert capture.wait(SOON)
    assert capture.outcome is Outcome.DROPPED
    assert "nothing fenced it" in str(capture.error)
    assert peek(arena.directory, 0) == []


def test_a_copy_that_hangs_is_left_behind_with_its_slot_when_the_capturer_is_closed(tmp_path: Path) -> None:
    gate = Gate()
    arena = RankArena(tmp_path / "job", rank=0)
    capturer = Capturer(arena, CaptureOptions(before_piece=gate, eager_below_bytes=0, threads=1))
    capture = capturer.begin({"w": torch.ones(1000)}, 1)
    assert capture is not None
    assert gate.arrived.wait(30)
    capturer.close(timedelta(milliseconds=1))
    assert not capture.wait(timedelta(0))
    arena.close()
    with RankArena(tmp_path / "job", rank=0) as successor:
        assert [slot.path.name for slot in iter(successor.try_take, None)] == ["slot-1"]
    gate.open()  # the copy goes on, into memory that is still there
    assert capture.wait(SOON)


def test_a_copy_that_fails_drops_the_capture_and_training_goes_on(make: Make) -> None:
    failing = True

    def fail(_: int) -> None:
        if failing:
            raise OSError("no such luck")

    arena, capturer = make(before_piece=fail, eager_below_bytes=0)
    weight = torch.ones(1000)
    first = capturer.begin({"w": weight}, 1)
    assert first is not None
    assert not capturer.fence(SOON)
    assert first.wait(SOON)
    assert (first.outcome, capturer.stats.dropped) == (Outcome.DROPPED, 1)
    assert "no such luck" in str(first.error)
    failing = False
    second = capturer.begin({"w": weight}, 2)
    assert second is not None
    assert second.wait(SOON)
    assert [header.step for _, header in peek(arena.directory, 0)] == [2]


def test_a_task_that_fails_after_a_capture_does_not_end_the_publishing(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    arena, capturer = make()

    def fail() -> None:
        raise OSError("no such luck")

    capturer.call_after_captures(fail)
    capture = capturer.begin({"w": torch.ones(1000)}, 1)
    assert capture is not None
    assert capture.wait(SOON)
    assert [header.step for _, header in peek(arena.directory, 0)] == [1]
    assert "publishing a capture failed" in caplog.text


def test_what_the_forward_mutates_is_copied_before_begin_returns(make: Make) -> None:
    gate = Gate()
    arena, capturer = make(before_piece=gate, threads=1, eager=lambda entry: entry.key.endswith("position"))
    state = {
        "weight": torch.ones(1 << 15), "running_mean": torch.ones(8),
        "position": torch.ones(1 << 15), "counter": [1],
    }  # fmt: skip
    capture = capturer.begin(state, 1)
    assert capture is not None
    assert gate.arrived.wait(30)
    state["running_mean"].fill_(2)  # type: ignore[union-attr]
    state["position"].fill_(2)  # type: ignore[union-attr]
    state["counter"][0] = 2
    gate.open()
    assert capturer.fence(SOON)
    assert capture.wait(SOON)
    found = kept_state(arena)
    assert found["counter"] == [1]  # type: ignore[index]
    for name in ("weight", "running_mean", "position"):
        assert found[name].unique().tolist() == [1]  # type: ignore[index]


def test_a_save_without_a_free_slot_is_skipped_counted_and_reported(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    arena, capturer = make()
    state = {"w": torch.ones(100)}
    kept = [capturer.begin(state, step, keep=True) for step in (1, 2)]
    caplog.set_level("DEBUG")
    assert capturer.begin(state, 3) is None
    assert capturer.stats.skipped == 1
    assert "save of step 3 skipped" in caplog.text
    assert [header.step for _, header in peek(arena.directory, 0)] == [2, 1]
    for capture in kept:
        assert capture is not None
        capture.release()
        capture.release()
    assert capturer.begin(state, 4) is not None
    capturer.close()
    assert [header.step for _, header in peek(arena.directory, 0)] == [4, 2]


def test_a_reader_in_another_place_keeps_its_slot_from_being_overwritten(make: Make) -> None:
    arena, capturer = make()
    for step in (1, 2):
        capturer.begin({"w": torch.full((100,), float(step))}, step)
        capturer.fence()
    reader = open_captured(arena.directory, 0, step=1)
    assert capturer.begin({"w": torch.zeros(100)}, 3) is None
    assert materialize(reader.shard)["w"].unique().tolist() == [1]
    reader.close()
    assert capturer.begin({"w": torch.zeros(100)}, 4) is not None


def test_waiting_for_a_slot_ends_when_it_is_released_or_the_deadline_comes(make: Make) -> None:
    _, capturer = make(when_full=WhenFull.WAIT, wait_timeout=timedelta(seconds=1))
    state = {"w": torch.ones(100)}
    first = capturer.begin(state, 1, keep=True)
    second = capturer.begin(state, 2, keep=True)
    assert first is not None
    assert second is not None
    assert capturer.begin(state, 3) is None
    assert (capturer.stats.skipped, capturer.stats.delayed) == (1, 1)
    releasing = threading.Timer(0.01, first.release)
    releasing.start()
    began = time.monotonic()
    assert capturer.begin(state, 4) is not None
    assert time.monotonic() - began < 5
    releasing.join()
    assert capturer.stats.delayed == 2


def test_a_change_of_structure_makes_a_new_layout_and_both_steps_stay_readable(make: Make) -> None:
    arena, capturer = make()
    capturer.begin({"w": torch.ones(10)}, 1)
    capturer.begin({"w": torch.ones(1 << 16), "v": torch.zeros(3)}, 2)
    capturer.fence()
    capturer.close()
    assert capturer.stats.layouts == 2
    assert set(kept_state(arena, 1)) == {"w"}  # type: ignore[call-overload]
    assert kept_state(arena, 2)["w"].numel() == 1 << 16  # type: ignore[index]


def test_a_state_that_cannot_be_saved_leaves_the_older_captures_alone(make: Make) -> None:
    arena, capturer = make()
    for step in (1, 2):
        capturer.begin({"w": torch.ones(10)}, step)
    with pytest.raises(ConfigError, match="cannot be saved"):
        capturer.begin({"w": torch.ones(10), "lock": threading.Lock()}, 3)
    assert [header.step for _, header in peek(arena.directory, 0)] == [2, 1]
    assert capturer.begin({"w": torch.ones(10)}, 4) is not None


def test_a_prewarmed_arena_allocates_and_maps_nothing_at_the_first_capture(make: Make) -> None:
    arena, capturer = make()
    state = {"w": torch.ones(1 << 16), "n": 1}
    capturer.prewarm(state)
    before = [(slot.path.stat().st_blocks, id(slot.memory)) for slot in arena.slots]
    assert all(blocks * 512 >= 4 << 16 for blocks, _ in before)
    for step in (1, 2):
        assert capturer.begin(state, step) is not None
    capturer.fence()
    assert [(slot.path.stat().st_blocks, id(slot.memory)) for slot in arena.slots] == before


class RecordedRegistry:
    """The CPU twin of CUDA's: pins nothing, and says who pinned what for a state in host memory."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.threads: list[str] = []
        self.unpinned_by: list[str] = []
        self.devices = {"cpu"}
        self.failure = ""
        self.fails_at = 0

    def is_for(self, device: torch.device) -> bool:
        return device.type in self.devices

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def register(self, address: int, length: int, device: torch.device) -> str:
        if address == self.fails_at:
            return "invalid argument"
        if not self.failure:
            self.threads.append(threading.current_thread().name)
            self.pinned[address] = length
        return self.failure

    def unregister(self, address: int, device: torch.device) -> None:
        self.unpinned_by.append(threading.current_thread().name)
        del self.pinned[address]


def test_a_save_waits_for_memory_that_is_held_back_and_neither_allocates_nor_pins_it(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    gate, registry = Gate(), RecordedRegistry()
    arena, capturer = make(before_slot=lambda: gate(0), registry=registry)
    state = {"w": torch.ones(1 << 20)}
    caplog.set_level(logging.INFO)
    held_back: list[object] = []

    def allocated() -> list[int]:
        return [slot.path.stat().st_blocks for slot in arena.slots]

    def open_when_held() -> None:
        wait_until(lambda: "save of step 1 holds training" in caplog.text, "the save does not wait")
        held_back.extend([*allocated(), *registry.pinned])
        gate.open()

    opener = threading.Thread(target=open_when_held)
    opener.start()
    capture = capturer.begin(state, 1)
    opener.join()
    assert capture is not None
    assert held_back == [0, 0]  # only the thread at the gate may do it
    assert "4 MiB of its slot are still being prepared" in caplog.text
    assert "save of step 1 held training for" in caplog.text
    capturer.prewarm(state)
    before = allocated()
    assert min(before) * 512 >= 4 << 20
    for step in (2, 3):
        assert capture.wait(SOON)
        capture = capturer.begin(state, step)
        assert capture is not None
    assert allocated() == before
    assert registry.threads == ["resiliency-memory"] * 2
    assert capturer.stats.skipped == 0


def test_a_save_whose_memory_never_comes_is_skipped_and_counted(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resiliency.checkpoint.capture.capturer.FENCE_TIMEOUT", timedelta())
    gate = Gate()
    _, capturer = make(before_slot=lambda: gate(0))
    state = {"w": torch.ones(1 << 20)}
    assert capturer.begin(state, 1) is None
    assert capturer.why_skipped == "no memory for a capture after 0 s (4 MiB to prepare)"
    assert capturer.stats.skipped == 1
    gate.open()
    capturer.prewarm(state)
    assert capturer.begin(state, 2) is not None
    assert capturer.why_skipped == ""


def test_slots_that_grow_are_pinned_anew_and_all_is_unpinned_without_training(make: Make) -> None:
    registry = RecordedRegistry()
    arena, capturer = make(registry=registry)
    for step, size in enumerate((1 << 16, 1 << 18, 1 << 17), start=1):
        state = {"w": torch.full((size,), float(step))}
        capturer.prewarm(state)
        capture = capturer.begin(state, step)
        assert capture is not None
        assert capture.wait(SOON)
        assert kept_state(arena, step)["w"].unique().tolist() == [step]  # type: ignore[index]
    assert registry.threads == ["resiliency-memory"] * 4
    settled = threading.Event()
    capturer.call_after_captures(settled.set)
    assert settled.wait(30)
    assert registry.unpinned_by == ["resiliency-publish"] * 2
    assert sorted(registry.pinned.values()) == [1 << 20] * 2
    capturer.close()
    assert registry.pinned == {}


def test_memory_that_cannot_be_pinned_is_told_and_serves_states_that_need_none(make: Make) -> None:
    registry = RecordedRegistry()
    arena, capturer = make(registry=registry)
    registry.failure = "out of memory"
    with pytest.raises(ConfigError, match=r"could not pin 4194304 bytes.*out of memory"):
        capturer.prewarm({"w": torch.ones(1 << 20)})
    registry.devices.clear()
    assert capturer.begin({"w": torch.ones(1 << 20)}, 1) is not None
    registry.devices.add("cpu")
    registry.failure = ""
    capturer.prewarm({"w": torch.ones(1 << 20)})
    assert len(registry.pinned) == len(arena.slots)


def test_a_registry_that_raises_is_told_and_the_next_request_tries_again(make: Make) -> None:
    class Raising(RecordedRegistry):
        def register(self, address: int, length: int, device: torch.device) -> str:
            if self.failure:
                raise RuntimeError(self.failure)
            return super().register(address, length, device)

    registry = Raising()
    arena, capturer = make(registry=registry)
    registry.failure = "the device is lost"
    with pytest.raises(ConfigError, match="could not be prepared: the device is lost"):
        capturer.prewarm({"w": torch.ones(1 << 20)}, SOON)
    registry.failure = ""
    capturer.prewarm({"w": torch.ones(1 << 20)}, SOON)
    assert len(registry.pinned) == len(arena.slots)


def test_memory_that_a_hanging_copy_goes_to_stays_pinned_also_after_its_slot_grew(tmp_path: Path) -> None:
    gate, registry = Gate(), RecordedRegistry()
    arena = RankArena(tmp_path / "job", rank=0)
    options = CaptureOptions(before_piece=gate, eager_below_bytes=0, threads=1, registry=registry)
    capturer = Capturer(arena, options)
    capture = capturer.begin({"w": torch.ones(1000)}, 1)
    assert capture is not None
    assert gate.arrived.wait(30)
    capturer.prewarm({"w": torch.ones(1 << 18)})
    assert len(registry.pinned) == 4  # of each slot the memory before and the one that it grew to
    capturer.close(timedelta(milliseconds=1))
    arena.close()
    assert len(registry.pinned) == 2
    gate.open()
    assert capture.wait(SOON)
    assert registry.pinned == {}


def test_threads_that_prepare_look_at_the_state_one_after_the_other(tmp_path: Path) -> None:
    class Watched(StateWalker):
        meeting = threading.Barrier(2)
        met = False

        def snapshot(self, state: object) -> Snapshot:
            with contextlib.suppress(threading.BrokenBarrierError):
                self.meeting.wait(0.5)  # broken from then on
                self.met = True
            return super().snapshot(state)

    walker = Watched()
    with RankArena(tmp_path / "job", rank=0) as arena, Capturer(arena, walker=walker) as capturer:
        state = {"w": torch.ones(1000)}
        threads = [threading.Thread(target=capturer.prepare, args=(state,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert not walker.met


def test_room_for_a_state_that_was_not_seen_is_pinned_for_the_device_in_use(make: Make) -> None:
    registry = RecordedRegistry()
    _, capturer = make(registry=registry)
    registry.devices.clear()
    capturer.prepare_room(4 << 20, 100)
    capturer.prewarm({"w": torch.ones(1 << 20)})
    assert sorted(registry.pinned.values()) == [4 << 20] * 2


def test_memory_is_pinned_in_segments_and_all_of_them_are_given_back_if_one_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("resiliency.checkpoint.capture.cuda.SEGMENT_BYTES", 4096)
    registry = RecordedRegistry()
    pinned = PinnedMemory(1 << 20, 10_000, torch.device("cpu"), registry)
    assert registry.pinned == {1 << 20: 4096, (1 << 20) + 4096: 4096, (1 << 20) + 8192: 1808}
    pinned.close()
    registry.fails_at = (1 << 20) + 8192
    with pytest.raises(ConfigError, match="could not pin 1808 bytes"):
        PinnedMemory(1 << 20, 10_000, torch.device("cpu"), registry)
    assert registry.pinned == {}


def test_a_small_state_is_saved_at_once_by_memory_of_another_thread(make: Make) -> None:
    threads: list[str] = []
    _, capturer = make(before_slot=lambda: threads.append(threading.current_thread().name))
    assert capturer.begin({"w": torch.ones(1 << 16)}, 1) is not None
    assert threads[0] == "resiliency-memory"


def test_many_saves_leak_neither_descriptors_nor_threads(make: Make) -> None:
    def count() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    arena, capturer = make()
    state = {"w": torch.ones(1 << 15), "m": torch.ones(3)}
    for step in range(10):
        capturer.begin({**state, "n": step}, step)
    before = count()
    for step in range(10, 300):
        capturer.begin({**state, "n": step}, step)
    assert count() == before
    assert capturer.stats.skipped == 0
    assert len(list((arena.directory / "rank-0").iterdir())) == 5  # lock, layout, room, two slots


@pytest.mark.parametrize(
    ("offset", "size", "expected"),
    [(0, 10, [(0, 4), (4, 8), (8, 10)]), (3, 2, [(0, 1), (1, 2)]), (4, 4, [(0, 4)]), (0, 0, [])],
)
def test_device_copies_are_cut_where_pinned_segments_meet(
    offset: int, size: int, expected: list[tuple[int, int]]
) -> None:
    assert list(cuts(offset, size, segment=4)) == expected


def of_all_kinds() -> dict[str, torch.Tensor]:
    """Tensors that lie in memory in every way that a copy from a device has to deal with."""
    torch.manual_seed(0)
    base = torch.randn(6, 4)
    return {
        "plain": base,
        "transposed": base.t(),
        "strided": base[::2, 1:3],
        "channels last": torch.randn(2, 3, 2, 4).contiguous(memory_format=torch.channels_last),
        "one element": torch.randn(9).as_strided((1, 1), (7, 5)),
        "scalar": torch.tensor(3.0),
        "conjugated": torch.randn(3, 2, dtype=torch.complex64).conj(),
        "negated": torch.randn(3, 2, dtype=torch.complex64).conj().imag,
        "small floats": torch.randn(7).to(torch.float8_e5m2),
        "flags": torch.tensor([True, False, True]),
        "not a number": torch.tensor([0x7F800001, -1], dtype=torch.int32).view(torch.float32),
    }


@pytest.mark.parametrize("segment", [SEGMENT_BYTES, 16])
@pytest.mark.parametrize("pack_bytes", [PACK_BYTES, 8])
def test_a_transfer_brings_the_bits_of_the_tensor_that_is_there_now(
    segment: int, pack_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU twin of what runs on a side stream."""
    monkeypatch.setattr("resiliency.checkpoint.capture.cuda.PACK_BYTES", pack_bytes)
    sources = list(of_all_kinds().values())
    slot = torch.zeros(4096, dtype=torch.uint8)
    targets, transfers = [], []
    for position, source in enumerate(sources):
        raw = slot[position * 256 : position * 256 + source.nbytes]
        targets.append(raw.view(source.dtype).view(source.shape))
        transfers.append(DeviceTransfer(position, targets[-1], source, slot.data_ptr(), segment=segment))
    for factor in (1, 2):  # as a step would, in place
        for source in sources:
            if source.dtype in (torch.float32, torch.complex64):
                source.mul_(factor)
        with torch.no_grad():
            assert all(t.enqueue(sources) is source for t, source in zip(transfers, sources, strict=True))
        assert [bits(target) for target in targets] == [bits(source) for source in sources]
    alive = [weakref.ref(source) for source in sources]
    del sources, source
    assert [ref() for ref in alive] == [None] * len(alive), "what is kept for the next save holds the state"


def test_strips_cover_a_tensor_once_and_are_contiguous_where_it_is() -> None:
    for shape in ((), (0, 3), (5,), (1, 7, 3), (3, 1, 5), (2, 3, 4, 5)):
        target = torch.zeros(shape, dtype=torch.int16)
        source = torch.arange(target.numel()).view(shape[::-1]).permute(tuple(reversed(range(len(shape)))))
        for size_bytes in (1, 6, 40, 1000):
            blocks = list(strips(target.zero_(), source, size_bytes))
            for block, same in blocks:
                assert block.is_contiguous()
                assert block.nbytes <= max(size_bytes, 2)
                block.add_(same.to(block.dtype) + 1)
            assert torch.equal(target, source + 1), "each element is in one block"


def test_the_copies_of_an_unchanged_state_are_planned_once(make: Make) -> None:
    _, capturer = make()
    state = {"w": torch.ones(100_000), "small": torch.ones(3)}
    plans = []
    for step in range(1, 5):
        state["w"].fill_(step)
        capture = capturer.begin(state, step)
        assert capture is not None
        assert capture.wait(SOON)
        plans.append({area.plan for area in capturer._areas.values()})
    assert plans[1] == plans[3]  # one for each slot
    state["w"] = torch.ones(100_000)
    capture = capturer.begin(state, 5)
    assert capture is not None
    assert capture.wait(SOON)
    assert plans[3] != {area.plan for area in capturer._areas.values()}
