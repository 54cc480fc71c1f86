# SPDX-License-Identifier: Apache-2.0
"""The plain-loop API in one process, with a real agent beside it."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp

from resiliency.checkpoint.agent.client import LinkOptions
from resiliency.checkpoint.capture.arena import RankArena
from resiliency.checkpoint.capture.capturer import CaptureOptions
from resiliency.checkpoint.capture.job_memory import DEFAULT_ROOT, hold_job, job_directory
from resiliency.checkpoint.checkpointer import Checkpointer
from resiliency.checkpoint.cleaner import flags as cleaner_flags
from resiliency.checkpoint.cli import main as command_line
from resiliency.checkpoint.commit.commit import open_save
from resiliency.checkpoint.format.catalog import Condition, inspect, list_checkpoints
from resiliency.checkpoint.recovery.restore import Restored
from resiliency.checkpoint.recovery.sources import Tier
from resiliency.checkpoint.state.layout import Shard
from resiliency.checkpoint.storage.interface import write_file
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.checkpoint.torch_dcp import DcpStorageReader, DcpStorageWriter
from resiliency.checkpoint.trainer.handles import SaveState
from resiliency.checkpoint.trainer.options import LocalTier
from resiliency.data.saving import AtomicDirectory, atomic_torch_save
from resiliency.errors import ConfigError, LayoutMismatch
from resiliency.events import EventStream, EventType
from resiliency.runtime import RunInfo
from resiliency.testing import MemorySink
from resiliency.testing.processes import Command
from tests import agent_host
from tests.checkpoint.capture_builders import Gate
from tests.checkpoint.checkpointer_builders import SOON, Place, make_state
from tests.checkpoint.storage_builders import file_in
from tests.step_page import own_page
from tests.waiting import agent_of, settled, wait_until

pytestmark = [
    pytest.mark.usefixtures("agents_at_once"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path, f"test-{os.getpid()}-{tmp_path.name}")
    yield place
    agent_host.wait_for_end(tmp_path.name)


#: Whatever takes a directory, by what makes it.
TAKES_A_DIRECTORY: dict[str, Callable[[str], object]] = {
    "Checkpointer": lambda path: Checkpointer(path),
    "a Path": lambda path: Checkpointer(Path(path)),
    "LocalTier": lambda path: LocalTier(directory=path),
    "LocalStorage": lambda path: LocalStorage(path),
    "DcpStorageWriter": lambda path: DcpStorageWriter(f"{path}/step=1"),
    "DcpStorageReader": lambda path: DcpStorageReader(f"{path}/step=1").read_metadata(),
    "atomic_torch_save": lambda path: atomic_torch_save({}, f"{path}/state.pt"),
    "AtomicDirectory": lambda path: AtomicDirectory(path, strategy="mono"),
    "the command line": lambda path: command_line(["ls", path]),
    "the cleaner": lambda path: cleaner_flags.parse(
        ["--job-identifier=job", "--persistent-ckpt-dir-prefix", path]
    ),
}


@pytest.mark.parametrize("taker", TAKES_A_DIRECTORY)
@pytest.mark.parametrize("path", ["gs://bucket/run", "~/run"])
def test_an_object_store_url_and_an_unexpanded_home_are_refused_wherever_a_directory_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], taker: str, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ConfigError, SystemExit)) as caught:
        TAKES_A_DIRECTORY[taker](path)
    text = f"{caught.value} {capfd.readouterr().err}"
    assert ("the URL" if ":" in path else "called '~'") in text
    assert list(tmp_path.iterdir()) == []


def test_what_is_saved_comes_back_in_place_and_a_new_directory_has_nothing(place: Place) -> None:
    with place.open() as checkpoints:
        assert checkpoints.restore(make_state(0)) == Restored(step=0, tier=Tier.NONE)
        handle = checkpoints.save(7, make_state(7))
        assert handle.wait(SOON)
        assert handle.state is SaveState.COMMITTED
        assert handle.record.size_bytes >= 4000
    state = make_state(0)
    weights = state["weights"]
    with place.open() as checkpoints:
        restored = checkpoints.restore(state)
    assert (restored.step, restored.tier) == (7, Tier.PERSISTENT)
    assert state["weights"] is weights
    assert torch.equal(weights, torch.full((1000,), 7.0))
    assert state["lr"] == 7


def test_a_launcher_sees_the_last_committed_step_which_the_job_would_go_on_from(place: Place) -> None:
    with own_page() as page, place.open(every_steps=2) as checkpoints:
        checkpoints.step(1, make_state(1))
        assert page.read(0).kept_step is None
        handle = checkpoints.step(2, make_state(2))
        assert handle is not None
        assert handle.wait(SOON)
        checkpoints.step(3, make_state(3))
        assert page.read(0).kept_step == 2


def test_stock_torch_loads_what_the_agent_wrote(place: Place) -> None:
    with place.open() as checkpoints:
        checkpoints.save(1, make_state(3))
    agent_host.wait_for_end(place.root.name)
    state = make_state(0)
    dcp.load(state, checkpoint_id=place.directory / "step=1", no_dist=True)
    assert torch.equal(state["weights"], torch.full((1000,), 3.0))  # type: ignore[arg-type]
    assert state["lr"] == 3


def test_after_a_prewarm_no_save_allocates_memory(place: Place) -> None:
    memory = place.root / "memory"
    memory.mkdir()
    state = make_state(1, size=1 << 20)

    def allocated() -> list[int]:
        return [path.stat().st_blocks for path in sorted(memory.glob("*/rank-0/slot-*"))]

    with place.open(arena_root=memory) as checkpoints:
        checkpoints.prewarm(state)
        before = allocated()
        assert len(before) == 2
        assert min(before) * 512 >= 4 << 20
        for step in (1, 2):
            assert checkpoints.save(step, state).wait(SOON)
        assert allocated() == before


@pytest.mark.parametrize("ask", ["the first step", "a restore"])
def test_memory_for_all_captures_is_there_before_the_first_save(place: Place, ask: str) -> None:
    memory = place.root / "memory"
    memory.mkdir()
    state = make_state(1, size=1 << 20)

    def allocated() -> list[int]:
        return [path.stat().st_blocks * 512 for path in sorted(memory.glob("*/rank-0/slot-*"))]

    with place.open(arena_root=memory, every_steps=100) as checkpoints:
        if ask == "a restore":
            checkpoints.restore(state)
        else:
            assert checkpoints.step(1, state) is None
        wait_until(lambda: len(allocated()) == 2 and min(allocated()) >= 4 << 20, "memory is missing")
        before = allocated()
        for step in (2, 3):
            assert checkpoints.save(step, state).wait(SOON)
        assert allocated() == before


def test_the_first_save_that_is_due_commits_also_while_its_memory_is_held_back(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    gate = Gate()
    capture = CaptureOptions(before_slot=lambda: gate(0))

    def open_when_held() -> None:
        wait_until(lambda: "save of step 10 holds training" in caplog.text, "the save does not wait")
        gate.open()

    with place.open(every_steps=10, capture=capture) as checkpoints:
        opener = threading.Thread(target=open_when_held)
        opener.start()
        state = make_state(1, size=24 << 20)  # 96 MiB
        handles = [
            handle for step in range(1, 31) if (handle := checkpoints.step(step, state)) and handle.wait(SOON)
        ]
        opener.join()
        text = checkpoints.metrics_text()
    assert [(handle.step, handle.state) for handle in handles] == [
        (step, SaveState.COMMITTED) for step in (10, 20, 30)
    ]
    assert 'saves_total{rank="0",outcome="skipped"} 0' in text
    assert handles[0].record.held_s > 0.1


def test_a_program_that_only_saves_has_the_memory_after_the_first_step_of_its_optimizer(place: Place) -> None:
    memory = place.root / "memory"
    memory.mkdir()
    weights = torch.nn.Parameter(torch.zeros(1 << 20))
    optimizer = torch.optim.SGD([weights], lr=0.1, momentum=0.9)
    state = {"weights": weights, "optimizer": optimizer}

    def allocated() -> list[int]:
        return [path.stat().st_blocks * 512 for path in sorted(memory.glob("*/rank-0/slot-*"))]

    with place.open(arena_root=memory) as checkpoints:
        checkpoints.restore(state)
        for step in (1, 2):
            weights.grad = torch.ones_like(weights)
            optimizer.step()
            if step == 1:
                wait_until(
                    lambda: len(allocated()) == 2 and min(allocated()) >= 8 << 20, "momentum has no room"
                )
                checkpoints.prewarm(state)  # its last page may still be mapped
            handle = checkpoints.save(step, state)
            assert handle.wait(SOON)
            assert handle.state is SaveState.COMMITTED


def test_a_partial_restore_takes_no_memory_for_saves_and_the_first_step_has_it_prepared_for_all_of_them(
    place: Place,
) -> None:
    memory = place.root / "memory"
    memory.mkdir()
    whole = {"model": torch.ones(1 << 18), "rest": torch.ones(1 << 20)}
    with place.open() as checkpoints:
        assert checkpoints.save(1, whole).wait(SOON)
    agent_host.wait_for_end(place.root.name)
    began: list[int] = []
    capture = CaptureOptions(before_slot=lambda: began.append(1))
    with place.open(arena_root=memory, every_steps=100, capture=capture) as checkpoints:
        assert checkpoints.restore({"model": whole["model"]}, partial=True).step == 1
        assert not began
        assert "resiliency-memory" not in {thread.name for thread in threading.enumerate()}
        assert checkpoints.step(2, whole) is None
        wait_until(
            lambda: [path.stat().st_size > 5 << 20 for path in memory.glob("*/rank-0/slot-*")] == [True] * 2,
            "there is no room for the rest",
        )


def test_a_start_frees_the_memory_of_jobs_that_are_dead_for_long(place: Place) -> None:
    memory = place.root / "memory"
    memory.mkdir()
    young, old, living = (job_directory(name, memory) for name in ("young", "old", "living"))
    for directory in (young, old, living):
        RankArena(directory, rank=0).close()
    for directory in (old, living):
        for path in (*directory.rglob("*"), directory):
            os.utime(path, (1, 1))
    with contextlib.closing(hold_job(living)), place.open(arena_root=memory):
        assert not old.exists()
        assert young.exists()  # its restart may be on its way
        assert living.exists()


def test_the_newest_checkpoints_are_kept_and_older_ones_go(place: Place) -> None:
    with place.open(keep=2) as checkpoints:
        for step in range(1, 5):
            assert checkpoints.save(step, make_state(step)).wait(SOON)
    agent_host.wait_for_end(place.root.name)
    assert [found.step for found in list_checkpoints(LocalStorage(place.directory))] == [3, 4]


def test_a_damaged_checkpoint_is_hidden_and_the_one_before_it_restored(place: Place) -> None:
    with place.open() as checkpoints:
        for step in (1, 2):
            assert checkpoints.save(step, make_state(step)).wait(SOON)
    data = file_in(place.directory / "step=2", "__0_0.distcp")
    content = bytearray(data.read_bytes())
    content[content.index(bytes.fromhex("0000004000000040"))] ^= 1  # a weight, 2.0
    data.write_bytes(content)
    state = make_state(0)
    with place.open() as checkpoints:
        assert checkpoints.restore(state).step == 1
    assert torch.equal(state["weights"], torch.full((1000,), 1.0))  # type: ignore[arg-type]
    assert inspect(LocalStorage(place.directory), 2).condition is Condition.UNFINISHED


def test_a_checkpoint_of_a_torch_save_is_passed_over_and_not_called_bad(place: Place) -> None:
    with place.open() as checkpoints:
        assert checkpoints.save(1, make_state(1)).wait(SOON)
    dcp.save(make_state(2), storage_writer=DcpStorageWriter(place.directory / "step=2"))
    with place.open() as checkpoints:
        assert checkpoints.restore(make_state(0)).step == 1
    assert inspect(LocalStorage(place.directory), 2).condition is Condition.COMPLETE


def test_a_last_step_that_storage_refused_stays_in_memory_until_a_start_that_restores_it_has_saved_it(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place.directory.write_text("in the way")
    with place.open() as checkpoints:
        handle = checkpoints.save(3, make_state(3))
        assert handle.wait(SOON)
        assert handle.state is SaveState.FAILED
        agent = psutil.Process(agent_of(checkpoints))
    place.directory.unlink()
    state = make_state(0)
    with place.open() as checkpoints:
        assert checkpoints.agent_pid == agent.pid
    assert "the capture of step 3 stays" in caplog.text
    with place.open() as checkpoints:
        assert checkpoints.restore(state).tier is Tier.MEMORY  # there is nothing left to do
    agent.wait(SOON.total_seconds())
    assert list(DEFAULT_ROOT.glob(f"resiliency-*{place.job.replace('-', '_')}*")) == []
    assert torch.equal(state["weights"], torch.full((1000,), 3.0))  # type: ignore[arg-type]
    assert inspect(LocalStorage(place.directory), 3).condition is Condition.COMPLETE


def test_another_model_is_refused_with_both_shapes_and_stays_as_it_is(place: Place) -> None:
    with place.open() as checkpoints:
        checkpoints.save(1, make_state(1))
    state = make_state(9, size=2000)
    with place.open() as checkpoints, pytest.raises(LayoutMismatch, match=r"1000.*2000"):
        checkpoints.restore(state)
    assert torch.equal(state["weights"], torch.full((2000,), 9.0))  # type: ignore[arg-type]


@pytest.mark.parametrize("slots", [2, 1])
def test_saves_that_slow_storage_cannot_take_are_skipped_and_counted_while_training_runs(
    place: Place, caplog: pytest.LogCaptureFixture, slots: int
) -> None:
    sink = MemorySink()
    events = EventStream(RunInfo(job_name="j", rank=0), [sink])
    with place.open(bytes_per_s=8 << 20, events=events, slots=slots) as checkpoints:
        state = make_state(1, size=2 << 20)  # 8 MiB: a second each
        checkpoints.prewarm(state)
        handles = [checkpoints.save(step, state) for step in range(1, 6)]
        states = [handle.state for handle in handles]
        assert states.count(SaveState.SKIPPED) >= 4 - slots
        assert checkpoints.wait(SOON)
        text = checkpoints.metrics_text()
    skipped = states.count(SaveState.SKIPPED)
    assert f'saves_total{{rank="0",outcome="skipped"}} {skipped}' in text
    assert {handle.state for handle in handles} == {SaveState.SKIPPED, SaveState.COMMITTED}
    assert "slower than the interval" in next(h.record.why for h in handles if h.state is SaveState.SKIPPED)
    types = [event.type for event in sink.events]
    assert types.count(EventType.SAVE_STARTED) == types.count(EventType.SAVE_RELEASED) == 5
    assert types.count(EventType.SAVE_FAILED) == skipped
    assert types.count(EventType.CHECKPOINT_SAVED) == 5 - skipped
    assert sum("skipped" in record.getMessage() for record in caplog.records) == skipped


def test_the_steps_after_a_save_are_compared_with_undisturbed_ones(place: Place) -> None:
    with place.open(every_steps=20) as checkpoints:
        state = make_state(1)
        handles = [checkpoints.step(step, state) for step in range(1, 30)]
        save = handles[19]
        assert save is not None
        assert save.record.excess_s is None
        checkpoints.step(30, state)
        assert save.record.excess_s is not None
        assert save.wait(SOON)
        assert save.record.excess_s is not None  # the end of the save keeps it
        excess = f'excess_seconds{{rank="0"}} {round(save.record.excess_s, 6)}'
        assert excess in checkpoints.metrics_text()


@pytest.mark.slow
def test_a_step_is_saved_once_in_order_and_again_only_if_it_was_skipped_or_failed(place: Place) -> None:
    with place.open(bytes_per_s=4 << 20) as checkpoints:
        state = make_state(1, size=2 << 20)  # two seconds each, and a moment to capture
        handles = [checkpoints.save(step, state) for step in range(1, 5)]
        assert handles[-1].state is SaveState.SKIPPED
        assert checkpoints.wait(SOON)
        again = checkpoints.save(4, state)
        assert again is not handles[-1]
        assert again.wait(SOON)
        assert again.state is SaveState.COMMITTED
        assert checkpoints.save(4, state) is again
        with pytest.raises(ConfigError, match="step 3 comes after step 4"):
            checkpoints.save(3, state)


def test_a_directory_of_others_fails_the_save_by_name_and_the_next_one_commits(place: Place) -> None:
    with place.open() as checkpoints:
        place.directory.mkdir(exist_ok=True)
        (place.directory / "step=1").mkdir()
        (place.directory / "step=1" / "somebody else's").touch()
        failed, good = checkpoints.save(1, make_state(1)), checkpoints.save(2, make_state(2))
        assert failed.wait(SOON)
        assert good.wait(SOON)
    assert failed.state is SaveState.FAILED
    assert "was not written by this library" in failed.record.why
    assert good.state is SaveState.COMMITTED


def test_a_start_that_goes_on_from_an_older_step_saves_each_and_keeps_what_is_new(place: Place) -> None:
    def go_back(shard: Shard) -> None:
        assert shard.step == 3

    with place.open() as checkpoints:
        for step in (3, 8, 9):
            assert checkpoints.save(step, make_state(step)).wait(SOON)
    with place.open(keep=2) as checkpoints:
        assert checkpoints.restore_with(go_back, step=3).step == 3
        outcomes = {}
        for step in (3, 5, 8, 10):
            handle = checkpoints.save(step, make_state(-step))
            assert handle.wait(SOON)
            outcomes[step] = handle.state
            if step == 5:  # not one of the newest two, but the newest of this branch
                assert (place.directory / "step=5").is_dir()
    assert outcomes == dict.fromkeys((3, 5, 8, 10), SaveState.COMMITTED)
    agent_host.wait_for_end(place.root.name)
    assert [found.step for found in list_checkpoints(LocalStorage(place.directory))] == [8, 10]


def saved(checkpoints: Checkpointer, step: int, value: int) -> SaveState:
    handle = checkpoints.save(step, make_state(value), wait=SOON)
    assert handle.wait(SOON)
    return handle.state


def test_after_a_rollback_each_step_is_saved_and_a_restart_goes_on_from_the_new_branch(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    state = make_state(0)
    with suppress(KeyboardInterrupt), place.open(keep=2) as checkpoints:
        for step in (1, 2, 3, 4):
            assert saved(checkpoints, step, step) is SaveState.COMMITTED
        assert checkpoints.restore(state, step=3).step == 3
        assert "job went back to step 3: its saves from now on are branch 1" in caplog.text
        raise KeyboardInterrupt  # nothing of the new branch is saved, and memory holds step 4
    with place.open(keep=2) as checkpoints:
        assert checkpoints.restore(state).step == 3
        assert saved(checkpoints, 5, -5) is SaveState.COMMITTED
        assert checkpoints.restore(state, step=3).step == 3
        assert saved(checkpoints, 6, -6) is SaveState.COMMITTED
    agent_host.wait_for_end(place.root.name)
    steps = [found.step for found in list_checkpoints(LocalStorage(place.directory))]
    assert steps == [3, 4, 5, 6]
    with place.open(keep=2) as checkpoints:
        assert (checkpoints.restore(state).step, state["lr"]) == (6, -6)
        # Of the first branch, by its step: that is the live one again.
        assert (checkpoints.restore(state, step=4).step, state["lr"]) == (4, 4)
        assert saved(checkpoints, 6, 6) is SaveState.COMMITTED
        assert saved(checkpoints, 7, 7) is SaveState.COMMITTED
    agent_host.wait_for_end(place.root.name)
    steps = [found.step for found in list_checkpoints(LocalStorage(place.directory))]
    assert steps == [6, 7]
    with place.open(keep=2) as checkpoints:
        assert (checkpoints.restore(state).step, state["lr"]) == (7, 7)


def test_a_start_that_goes_back_and_saves_nothing_changes_nothing(place: Place) -> None:
    with place.open() as checkpoints:
        for step in (1, 2):
            assert saved(checkpoints, step, step) is SaveState.COMMITTED
    with place.open() as checkpoints:
        assert checkpoints.restore(make_state(0), step=1).step == 1
    with place.open() as checkpoints:
        assert checkpoints.restore(make_state(0)).step == 2
    assert sorted(path.name for path in place.directory.iterdir()) == ["step=1", "step=2"]


def test_a_state_with_parts_that_were_not_saved_is_not_reported_as_committed(place: Place) -> None:
    with place.open() as checkpoints:
        assert saved(checkpoints, 1, 1) is SaveState.COMMITTED
    with place.open() as checkpoints:
        state = {**make_state(0), "ema": torch.zeros(3)}
        assert checkpoints.restore(state, partial=True).step == 1
        handle = checkpoints.save(1, state, wait=SOON)
        assert handle.wait(SOON)
        assert handle.state is SaveState.FAILED
        assert "did not go on from it" in handle.record.why
        handle = checkpoints.save(2, state, wait=SOON)
        assert handle.wait(SOON)
        assert handle.state is SaveState.COMMITTED


@pytest.mark.leaks("variables", reason="torch's optimizers import its compiler, which sets its cache")
def test_training_is_held_by_the_optimizer_it_knows_and_the_capture_is_of_one_step(place: Place) -> None:
    weights = torch.nn.Parameter(torch.zeros(1 << 22))
    optimizer = torch.optim.SGD([weights], lr=1.0)
    with place.open() as checkpoints:
        for step in range(1, 6):
            weights.grad = torch.full_like(weights, -1.0)
            optimizer.step()
            if step == 5:
                assert checkpoints.wait(SOON)
            assert checkpoints.save(step, {"weights": weights, "optimizer": optimizer})
        weights.grad = torch.full_like(weights, -1.0)
        optimizer.step()
    agent_host.wait_for_end(place.root.name)
    stored = [found.step for found in list_checkpoints(LocalStorage(place.directory))]
    assert stored[-1] == 5
    for step in stored:
        found = {"weights": torch.zeros(1 << 22)}
        dcp.load(found, checkpoint_id=place.directory / f"step={step}", no_dist=True)
        assert found["weights"].unique().tolist() == [float(step)]


def test_the_hold_of_an_optimizer_at_its_fence_counts_as_held_time_of_the_save(place: Place) -> None:
    weights = torch.nn.Parameter(torch.zeros(1 << 20))
    optimizer = torch.optim.SGD([weights], lr=1.0)
    gate = Gate()
    with place.open(capture=CaptureOptions(before_piece=gate)) as checkpoints:
        handle = checkpoints.save(1, {"weights": weights, "optimizer": optimizer})
        assert gate.arrived.wait(30)
        began = handle.record.held_s
        # Nothing tells that the optimizer is at its fence; it must not find the copy done already.
        opener = threading.Timer(0.5, gate.open)
        weights.grad = torch.full_like(weights, -1.0)
        before = time.monotonic()
        opener.start()
        optimizer.step()
        at_most = time.monotonic() - before
        opener.join()
        assert handle.wait(SOON)
        assert began < handle.record.held_s <= began + at_most
        held = re.search(r'held_seconds_total{rank="0"} (\S+)', checkpoints.metrics_text())
    assert held is not None
    assert float(held[1]) == pytest.approx(handle.record.held_s, abs=1e-5)


class Codebook(torch.nn.Module):
    """A forward writes everything in it but the weight and bias of `norm`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(40_000)
        self.key = torch.nn.Parameter(torch.zeros(40_000), requires_grad=False)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        self.key.add_(1)
        normed: torch.Tensor = self.norm(data)
        return normed.square().mean()


@pytest.mark.leaks("variables", reason="torch's optimizers import its compiler, which sets its cache")
def test_a_wrapped_optimizer_that_torch_did_not_initialise_overlaps_by_the_one_within(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    weight = torch.nn.Parameter(torch.ones(1000))
    weight.grad = torch.ones(1000)
    inner = torch.optim.SGD([weight], lr=1.0)
    with place.open() as checkpoints:
        checkpoints.save(1, {"weight": weight, "optimizer": Wrapper(inner)})
        assert len(inner._optimizer_step_pre_hooks) == 1
        Wrapper(inner).step()
        assert checkpoints.wait(SOON)
    assert "do not overlap" not in caplog.text
    state = {"weight": torch.nn.Parameter(torch.zeros(1000)), "optimizer": Wrapper(inner)}
    with place.open() as checkpoints:
        assert checkpoints.restore(state).step == 1
    assert torch.equal(state["weight"], torch.ones(1000))  # type: ignore[arg-type]


@pytest.mark.leaks("variables", reason="torch's optimizers import its compiler, which sets its cache")
def test_an_optimizer_that_cannot_say_when_it_steps_is_saved_without_overlap_and_told_once(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    weight = torch.nn.Parameter(torch.ones(1000))
    wrapper = Wrapper(torch.optim.SGD([weight], lr=1.0))
    wrapper.wrapped, wrapper.optimizer = wrapper.optimizer, None
    with place.open() as checkpoints:
        for step in (1, 2):
            weight.data.fill_(step)
            handle = checkpoints.save(step, {"weight": weight, "optimizer": wrapper})
            weight.data.fill_(-1)  # nothing is left to copy
            assert handle.wait(SOON)
            assert handle.state is SaveState.COMMITTED
    assert caplog.text.count("saves do not overlap with training: Wrapper") == 1
    state = {"weight": torch.nn.Parameter(torch.zeros(1000)), "optimizer": wrapper}
    with place.open() as checkpoints:
        assert checkpoints.restore(state).step == 2
    assert torch.equal(state["weight"], torch.full((1000,), 2.0))  # type: ignore[arg-type]


class Wrapper(torch.optim.Optimizer):
    """As Accelerate's: a torch optimizer by class, and `Optimizer.__init__` was never called."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer: torch.optim.Optimizer | None = optimizer
        self.wrapped = optimizer

    state = property(lambda self: self.wrapped.state)
    param_groups = property(lambda self: self.wrapped.param_groups)
    defaults = property(lambda self: self.wrapped.defaults)

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.wrapped.step()

    def state_dict(self) -> dict[str, object]:
        return self.wrapped.state_dict()

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        self.wrapped.load_state_dict(state_dict)


@pytest.mark.leaks("variables", reason="torch's optimizers import its compiler, which sets its cache")
@pytest.mark.parametrize("dumped", [False, True], ids=["modules", "state-dicts"])
def test_what_a_forward_writes_is_of_the_saved_step_while_the_optimizers_memory_is_still_copied(
    place: Place, dumped: bool
) -> None:
    held, go_on = set[int](), threading.Event()
    copying = threading.Event()

    def hold(piece: int) -> None:
        held.add(piece)
        copying.set()
        assert go_on.wait(SOON.total_seconds())

    def build() -> tuple[Codebook, torch.optim.Optimizer]:
        model = Codebook()
        return model, torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)

    def state_of(model: Codebook, optimizer: torch.optim.Optimizer) -> dict[str, object]:
        if dumped:
            return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        return {"model": model, "optimizer": optimizer}

    model, optimizer = build()
    model(torch.randn(4, 40_000)).backward()
    optimizer.step()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with place.open(capture=CaptureOptions(before_piece=hold), optimizers=[optimizer]) as checkpoints:
        handle = checkpoints.save(1, state_of(model, optimizer))
        assert copying.wait(SOON.total_seconds())
        loss = model(torch.randn(4, 40_000) + 5)
        go_on.set()
        loss.backward()
        optimizer.step()
        assert handle.wait(SOON)
        assert handle.state is SaveState.COMMITTED
        later = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        restored, fresh = build()
        restored(torch.zeros(4, 40_000)).backward()
        fresh.step()
        assert checkpoints.restore(state_of(restored, fresh)).step == 1
    for name, tensor in restored.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
        assert not torch.equal(tensor, later[name]), name
    assert held == {0, 1, 2, 3}  # weight and bias, and the momentum of each


@pytest.mark.parametrize("saves", [False, True], ids=["restores", "saves"])
def test_a_second_job_on_the_directory_leaves_what_the_first_one_is_writing(
    place: Place, saves: bool
) -> None:
    """Such as an evaluation beside the training, with a name of its own."""
    storage = LocalStorage(place.directory)
    storage.make_dir("")
    claim = open_save(storage, 7, "start-7", 1, run_id="the training", until=int(time.time()) + 600)
    write_file(storage, f"{claim.place}/__0_0.distcp", b"half")
    with place.open() as checkpoints:
        if saves:
            assert checkpoints.save(1, make_state(1)).wait(SOON)
    assert storage.list(claim.place) == ["__0_0.distcp"]
    assert claim.try_lift(lambda marker: marker.save_id == "start-7")


EVALUATION = """
import sys, torch
from resiliency.checkpoint import Checkpointer
with Checkpointer(sys.argv[1]) as checkpoints:
    state = {"weights": torch.zeros(1000)}
    print("restored", checkpoints.restore(state, partial=True).step, state["weights"][0].item())
"""


def test_an_evaluation_of_its_own_name_from_start_to_end_leaves_the_save_that_the_training_has_in_flight(
    place: Place,
) -> None:
    link = LinkOptions(silence=timedelta(minutes=10), grace=timedelta(seconds=5))
    with place.open(bytes_per_s=4 << 20, link=link) as training:
        assert training.save(1, make_state(1)).wait(SOON)
        handle = training.save(2, make_state(2, size=2 << 20))
        begun = "step=2/save=*/__0_0.distcp"
        wait_until(lambda: any(place.directory.glob(begun)), f"there is no {begun}", every=0.005)
        agent = psutil.Process(agent_of(training))
        agent.suspend()
        try:
            env = {"JOB_IDENTIFIER": f"{place.job}-evaluation", "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-c", EVALUATION, str(place.directory)]
            with Command(command, env=env) as evaluation:
                assert evaluation.wait(timeout=120) == 0
            assert "restored 1 1.0" in evaluation.output
        finally:
            agent.resume()
        assert handle.wait(SOON)
        assert inspect(LocalStorage(place.directory), 2).condition is Condition.COMPLETE


@pytest.mark.parametrize(
    ("phase", "kind"),
    [
        ("idle", signal.SIGKILL),
        ("claimed", signal.SIGKILL),
        ("writing", signal.SIGKILL),
        pytest.param("writing", signal.SIGSTOP, marks=pytest.mark.slow),
    ],
    ids=["killed-idle", "killed-after-its-claim", "killed-writing", "stopped-writing"],
)
def test_an_agent_that_dies_costs_the_save_it_held_and_nothing_else(
    place: Place, phase: str, kind: signal.Signals
) -> None:
    silence = timedelta(seconds=5 if kind is signal.SIGSTOP else 30)
    link = LinkOptions(silence=silence, grace=timedelta(seconds=5))
    # What is to die while it writes does so for some seconds.
    with place.open(bytes_per_s=(64 if phase == "idle" else 4) << 20, link=link) as checkpoints:
        state = make_state(1, size=6 << 20)
        assert checkpoints.save(1, make_state(1)).wait(SOON)
        pid = agent_of(checkpoints)
        if phase != "idle":
            handle = checkpoints.save(2, state)
            seen = {"claimed": "step=2-unfinished", "writing": "step=2/save=*/__0_0.distcp"}[phase]
            wait_until(lambda: any(place.directory.glob(seen)), f"there is no {seen}", every=0.005)
        os.kill(pid, kind)
        if phase == "idle":
            handle = checkpoints.save(2, state)
        assert handle.wait(SOON)
        assert handle.state is SaveState.FAILED or phase == "idle"
        if handle.state is SaveState.FAILED:
            assert f"process {pid}" in handle.record.why
        assert checkpoints.save(3, make_state(3)).wait(SOON)
        assert checkpoints.agent_pid not in (0, pid)
        assert 'agent_losses_total{rank="0"} 1' in checkpoints.metrics_text()
    conditions = {f.step: f.condition for f in list_checkpoints(LocalStorage(place.directory))}
    assert conditions[1] is conditions[3] is Condition.COMPLETE
    assert (2 in conditions) == (handle.state is SaveState.COMMITTED)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"keep": 0}, "keep must be at least 1"),
        ({"bytes_per_s": -1}, "bandwidth not negative"),
        ({"every_steps": None}, "every_steps must be a whole number, found None"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_starts(
    place: Place, wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        place.open(**wrong)


def test_several_ranks_without_a_process_group_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="init_process_group"):
        Checkpointer(tmp_path, info=RunInfo(rank=1, world_size=2))


def test_an_object_that_cannot_be_saved_is_named_and_leaves_the_checkpointer_usable(place: Place) -> None:
    with place.open() as checkpoints:
        with pytest.raises(ConfigError, match="lock"):
            checkpoints.save(1, {"lock": threading.Lock()})
        assert checkpoints.save(2, make_state(2)).wait(SOON)


class Settings:
    """An object of a class of the job."""


def test_an_object_that_no_restart_would_build_is_refused_at_its_save_with_the_option_that_allows_it(
    place: Place,
) -> None:
    state = {**make_state(1), "settings": [Settings()]}
    with place.open() as checkpoints:
        with pytest.raises(ConfigError, match=r"settings/0: .*Settings.*CheckpointerOptions\(allow="):
            checkpoints.save(1, state)
        assert checkpoints.save(2, make_state(2)).wait(SOON)
    with place.open(allow=(Settings,)) as checkpoints:
        assert checkpoints.save(3, state).wait(SOON)
        assert checkpoints.restore(state).step == 3


def test_a_part_of_a_step_comes_back_from_memory_and_from_storage(place: Place) -> None:
    with place.open() as checkpoints:
        handle = checkpoints.save(1, {**make_state(1), "moments": torch.ones(2000)})
        assert handle.wait(SOON)
        for tier in (Tier.MEMORY, Tier.PERSISTENT):
            if tier is Tier.PERSISTENT:
                checkpoints.close()
                checkpoints = place.open()
            state = {**make_state(0), "scheduler": torch.zeros(3)}
            with pytest.raises(LayoutMismatch, match="partial=True"):
                checkpoints.restore(state)
            assert state["lr"] == 0
            restored = checkpoints.restore(state, partial=True)
            assert (restored.step, restored.tier) == (1, tier)
            assert torch.equal(state["weights"], torch.ones(1000))  # type: ignore[arg-type]
            assert torch.equal(state["scheduler"], torch.zeros(3))  # type: ignore[arg-type]
            assert state["lr"] == 1
        checkpoints.close()


@pytest.mark.thorough("each test looks for what it left")
@pytest.mark.slow
def test_many_saves_leave_no_threads_files_or_processes_behind(place: Place) -> None:
    with place.open() as checkpoints:
        both, counts = (psutil.Process(), psutil.Process(agent_of(checkpoints))), []

        def look() -> list[object]:
            own = f"resiliency-*{place.job.replace('-', '_')}*"  # other jobs of this machine come and go
            shm = sorted(p.name for p in DEFAULT_ROOT.glob(f"{own}/**/*"))
            assert shm, "the job has no memory"
            return [*((p.num_fds(), p.num_threads(), len(p.children())) for p in both), shm]

        for step in range(1, 301):
            handle = checkpoints.save(step, make_state(step))
            assert handle.wait(SOON)
            assert handle.state is SaveState.COMMITTED
            if step in (30, 300):
                counts.append(settled(look))
        assert counts[0] == counts[1]
