# SPDX-License-Identifier: Apache-2.0
"""What a training loop sees when storage or memory is full, slow, or its agent stands still.

It goes on, it is told of every save that was not made, what was committed stays, and the next save
after the trouble is over commits.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from resiliency.checkpoint.agent.client import LinkOptions
from resiliency.checkpoint.agent.protocol import connect
from resiliency.checkpoint.capture.capturer import CaptureOptions, WhenFull
from resiliency.checkpoint.capture.job_memory import DEFAULT_ROOT
from resiliency.checkpoint.checkpointer import Checkpointer
from resiliency.checkpoint.format.catalog import Condition, list_checkpoints
from resiliency.checkpoint.recovery.sources import Tier
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.checkpoint.trainer.handles import SaveHandle, SaveState
from resiliency.errors import ConfigError
from resiliency.events import EventStream, EventType
from resiliency.runtime import RunInfo
from resiliency.testing import MemorySink
from resiliency.testing.rank_pool import RankPool
from tests import agent_host
from tests.checkpoint import two_hosts
from tests.checkpoint.checkpointer_builders import Place, make_state
from tests.waiting import agent_of, settled, wait_until

SOON = timedelta(seconds=60)
pytestmark = [
    pytest.mark.usefixtures("agents_at_once"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path, f"trouble-{os.getpid()}-{tmp_path.name}")
    yield place
    agent_host.wait_for_end(tmp_path.name)


def complete(place: Place) -> list[int]:
    found = list_checkpoints(LocalStorage(place.directory))
    return [checkpoint.step for checkpoint in found if checkpoint.condition is Condition.COMPLETE]


def saved(handle: SaveHandle) -> SaveState:
    assert handle.wait(SOON)
    return handle.state


@contextmanager
def a_full_disk(checkpoints: Checkpointer, directory: Path) -> Iterator[None]:
    del checkpoints
    # All but what the names of a save need: it fails in the middle.
    room = os.statvfs(directory)
    ballast = directory / "ballast"
    ballast.write_bytes(bytes(room.f_bavail * room.f_frsize - (300 << 10)))
    yield
    ballast.unlink()


@contextmanager
def a_file_size_limit(checkpoints: Checkpointer, directory: Path) -> Iterator[None]:
    del directory
    before = resource.prlimit(agent_of(checkpoints), resource.RLIMIT_FSIZE)
    resource.prlimit(agent_of(checkpoints), resource.RLIMIT_FSIZE, (100 << 10, before[1]))
    yield
    resource.prlimit(agent_of(checkpoints), resource.RLIMIT_FSIZE, before)


@contextmanager
def a_read_only_disk(checkpoints: Checkpointer, directory: Path) -> Iterator[None]:
    del checkpoints
    subprocess.run(["mount", "-o", "remount,ro", str(directory)], check=True)
    yield
    subprocess.run(["mount", "-o", "remount,rw", str(directory)], check=True)


@contextmanager
def mounted(directory: Path) -> Iterator[None]:
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(directory)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs; the limit on file sizes is tested without")
    try:
        yield
    finally:
        subprocess.run(["umount", str(directory)], check=True)


@pytest.mark.parametrize(
    ("trouble", "error"),
    [(a_full_disk, "ENOSPC"), (a_file_size_limit, "EFBIG"), (a_read_only_disk, "EROFS")],
)
def test_saves_fail_by_name_while_storage_takes_nothing_and_the_next_one_after_it_commits(
    place: Place,
    caplog: pytest.LogCaptureFixture,
    trouble: Callable[[Checkpointer, Path], Iterator[None]],
    error: str,
) -> None:
    sink = MemorySink()
    events = EventStream(RunInfo(job_name="j", rank=0), [sink])
    state = make_state(1, size=256 << 10)  # 1 MiB
    with ExitStack() as stack:
        if trouble is not a_file_size_limit:
            stack.enter_context(mounted(place.directory))
        checkpoints = stack.enter_context(place.open(events=events))
        assert saved(checkpoints.save(1, state)) is SaveState.COMMITTED
        with trouble(checkpoints, place.directory):
            for step in range(2, 8):
                handle = checkpoints.save(step, state)
                assert saved(handle) is SaveState.FAILED
                assert error in handle.record.why
            assert complete(place) == [1]
            # The files of failed saves are not what the disk is full of: only the last one's may be there.
            assert len(list(place.directory.glob("step=*/*/__*"))) <= 2
        assert saved(checkpoints.save(8, state)) is SaveState.COMMITTED
        assert complete(place) == [1, 8]
        checkpoints.close()
        agent_host.wait_for_end(place.root.name)  # it tidies up after its report
        assert sorted(path.name for path in place.directory.iterdir()) == ["step=1", "step=8"]
        text = checkpoints.metrics_text()
        failed = [event for event in sink.events if event.type is EventType.SAVE_FAILED]
    assert 'saves_total{rank="0",outcome="failed"} 6' in text
    assert [event.step for event in failed] == list(range(2, 8))
    assert all(error in str(event.fields["cause"]) for event in failed)
    assert caplog.text.count(error) == 6


def test_training_that_asks_for_it_waits_for_slow_storage_instead_of_skipping(place: Place) -> None:
    capture = CaptureOptions(when_full=WhenFull.WAIT, wait_timeout=SOON)
    with place.open(bytes_per_s=16 << 20, capture=capture, keep=5) as checkpoints:
        state = make_state(1, size=2 << 20)  # 8 MiB: half a second each
        handles = [checkpoints.save(step, state) for step in range(1, 6)]
        assert {saved(handle) for handle in handles} == {SaveState.COMMITTED}
        assert max(handle.record.delayed_s for handle in handles) > 0.1
        assert all(handle.record.delayed_s <= handle.record.held_s for handle in handles)
        delayed = re.search(r"delayed_seconds_total\S+ (\S+)", checkpoints.metrics_text())
        assert delayed is not None
        assert float(delayed[1]) == pytest.approx(
            sum(handle.record.delayed_s for handle in handles), abs=1e-3
        )
    assert complete(place) == [1, 2, 3, 4, 5]


def test_training_goes_on_beside_an_agent_that_stands_still_and_says_what_was_not_saved(
    place: Place,
) -> None:
    with place.open(link=LinkOptions(silence=timedelta(minutes=10))) as checkpoints:
        assert saved(checkpoints.save(1, make_state(1))) is SaveState.COMMITTED
        agent = psutil.Process(agent_of(checkpoints))
        agent.suspend()
        handles = [checkpoints.save(step, make_state(step)) for step in range(2, 8)]
        assert all(handle.wait(SOON, until=SaveState.CAPTURED) for handle in handles)
        states = [handle.state for handle in handles]
        assert states == [SaveState.CAPTURED] * 2 + [SaveState.SKIPPED] * 4
        assert "slower than the interval" in handles[-1].record.why
        assert complete(place) == [1]
        agent.resume()
        assert [saved(handle) for handle in handles[:2]] == [SaveState.COMMITTED] * 2
        assert checkpoints.agent_pid == agent.pid
        assert saved(checkpoints.save(8, make_state(8))) is SaveState.COMMITTED
    agent_host.wait_for_end(place.root.name)
    assert complete(place) == [2, 3, 8]


@contextmanager
def little_room() -> Iterator[None]:
    """This process may make no file above 1 MiB, in shared memory either."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_state_too_large_for_shared_memory_is_refused_with_what_to_set_and_stays_as_it_is(
    place: Place,
) -> None:
    sink = MemorySink()
    events = EventStream(RunInfo(job_name="j", rank=0), [sink])
    state = make_state(3, size=1 << 20)
    with place.open(events=events) as checkpoints:
        assert saved(checkpoints.save(1, make_state(1))) is SaveState.COMMITTED
        with little_room(), pytest.raises(ConfigError, match=r"MiB more are needed.*ulimit -f.*Raise it"):
            checkpoints.save(2, state)
        assert torch.equal(state["weights"], torch.full((1 << 20,), 3.0))  # type: ignore[arg-type]
        assert 'outcome="failed"} 1' in checkpoints.metrics_text()
        assert complete(place) == [1]
        # The same step may be tried again.
        assert saved(checkpoints.save(2, state)) is SaveState.COMMITTED
    types = [event.type for event in sink.events]
    assert types.count(EventType.SAVE_STARTED) == types.count(EventType.SAVE_RELEASED) == 3
    assert types.count(EventType.SAVE_FAILED) == 1


def test_saves_go_on_and_later_ranks_find_the_agent_after_something_emptied_shared_memory(
    place: Place,
) -> None:
    with place.open() as checkpoints:
        assert checkpoints.save(1, make_state(1)).wait(SOON)
        agent = agent_of(checkpoints)
        (arena,) = DEFAULT_ROOT.glob(f"resiliency-*{place.root.name}*")
        shutil.rmtree(arena)
        for step in (2, 3):
            handle = checkpoints.save(step, make_state(step))
            assert handle.wait(SOON)
            assert handle.state is SaveState.COMMITTED
        channel = wait_until(lambda: connect(arena), "the agent is not found")
        assert channel.pid == agent
        channel.close()
        checkpoints.close(finished=False)
    state = make_state(0)
    with place.open() as checkpoints:
        assert agent_of(checkpoints) == agent
        assert checkpoints.restore(state).tier is Tier.MEMORY
    assert state["lr"] == 3


def test_another_try_is_not_taken_for_the_one_that_failed_however_soon_it_comes(place: Place) -> None:
    with place.open() as checkpoints:
        for step in range(1, 11):
            # Larger each time: there is always room to be missing.
            state = make_state(step, size=step << 18)
            with little_room(), pytest.raises(ConfigError):
                checkpoints.save(step, state)
            again = checkpoints.save(step, state)
            assert saved(again) is SaveState.COMMITTED, again.record.why


def save_where_one_has_no_room(rank: int, root: str, job: str) -> list[str]:
    """In a rank: what became of each save.  Rank 1 has no room for the first and leaves out the third."""
    info = RunInfo(job_name=job, host="here", rank=rank, world_size=dist.get_world_size())
    state = make_state(1, size=1 << 20)
    with Checkpointer(Path(root), replicated=True, info=info) as checkpoints:
        if rank == 1:
            with little_room(), pytest.raises(ConfigError):
                checkpoints.save(1, state)
        else:
            first = checkpoints.save(1, state)
            assert saved(first) is SaveState.FAILED
        second = checkpoints.save(2, state)
        assert saved(second) is SaveState.COMMITTED
        third = checkpoints.save(3, state) if rank == 0 else second
        assert third.wait(SOON, until=SaveState.CAPTURED)
        assert saved(checkpoints.save(4, state)) is SaveState.COMMITTED
        assert third.state in (SaveState.FAILED, SaveState.COMMITTED)
    return [first.record.why, third.record.why] if rank == 0 else []


def test_a_save_that_one_rank_cannot_make_fails_on_all_by_name_and_keeps_nobody_waiting(
    place: Place, rank_pool: RankPool
) -> None:
    report = rank_pool.run(save_where_one_has_no_room, 2, str(place.directory), place.job, timeout=240)
    no_room, left_out = report.values[0]
    assert no_room.startswith("rank 1: shared memory for checkpoints:")
    assert left_out == "rank 1 went on without it"
    assert complete(place) == [2, 4]


def save_again_where_one_had_no_room(rank: int, root: str, job: str) -> tuple[list[bool], list[str]]:
    """In a rank: whether the program's second saves of a step were new tries, and what became of the last.

    Rank 1 has no room the first time, and knows it at once; rank 0 hears of it later.
    """
    world_size = dist.get_world_size()
    info = RunInfo(job_name=job, host="here", rank=rank, world_size=world_size)
    state = make_state(1, size=1 << 20)
    with Checkpointer(Path(root), replicated=True, info=info) as checkpoints:
        if rank == 1:
            with little_room(), pytest.raises(ConfigError):
                checkpoints.save(1, state)
        first = checkpoints.save(1, state)  # of rank 1 the second call
        were_tries = [checkpoints.save(1, state) is not first]
        assert saved(first) is SaveState.FAILED
        were_tries.append(checkpoints.save(1, state) is not first)
        states = [saved(checkpoints.save(1, state, wait=SOON)).value]
        states.append(saved(checkpoints.save(1, state, wait=SOON)).value)  # it stays
        states.append(saved(checkpoints.save(2, state)).value)
    return were_tries, states


def test_a_failed_step_is_tried_again_by_all_ranks_or_by_none_whatever_each_knows_of_it(
    place: Place, rank_pool: RankPool
) -> None:
    report = rank_pool.run(save_again_where_one_had_no_room, 2, str(place.directory), place.job, timeout=240)
    assert report.values == [([False, False], ["committed"] * 3)] * 2
    assert complete(place) == [1, 2]


def shared_memory(place: Place) -> list[tuple[str, int]]:
    files = DEFAULT_ROOT.glob(f"resiliency-*{place.root.name}*/rank-*/*")
    return sorted((path.name, path.stat().st_size) for path in files)


@pytest.mark.thorough("test_checkpointer.py makes many saves")
@pytest.mark.slow
@pytest.mark.usefixtures("own_agents")
def test_a_thousand_saves_use_no_more_memory_threads_files_or_processes_than_a_hundred(
    place: Place,
) -> None:
    capture = CaptureOptions(when_full=WhenFull.WAIT, wait_timeout=SOON)
    with place.open(capture=capture) as checkpoints:
        both = (psutil.Process(), psutil.Process(agent_of(checkpoints)))
        counts, memory = [], []

        def look() -> tuple[object, ...]:
            held = [(p.num_fds(), p.num_threads(), len(p.children())) for p in both]
            return held, shared_memory(place), len(list(place.directory.iterdir()))

        for step in range(1, 1001):
            handle = checkpoints.save(step, make_state(step))
            if step in (100, 1000):
                assert checkpoints.wait(SOON)
                assert handle.state is SaveState.COMMITTED
                counts.append(settled(look))
                memory.append([p.memory_full_info().uss for p in both])
        assert counts[0] == counts[1]
        assert 'outcome="committed"} 1000' in checkpoints.metrics_text()
        grown = [after - before for before, after in zip(*memory, strict=True)]
        assert max(grown) < 4 << 20, grown  # 4 KiB a save
    assert complete(place) == [998, 999, 1000]


def test_a_host_without_room_for_captures_is_refused_on_all_ranks(
    tmp_path: Path, rank_pool: RankPool
) -> None:
    roots = [str(tmp_path), str(tmp_path / "missing")]
    errors = rank_pool.run(two_hosts.open_with_memory_at, 2, roots, timeout=90).values
    for error in errors:
        assert f"rank 1 cannot keep captures in {roots[1]}" in error
