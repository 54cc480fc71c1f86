# SPDX-License-Identifier: Apache-2.0
"""The local tier of one host, alone and beside a persistent one, with a real agent."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch

from resiliency.checkpoint import (
    Checkpointer,
    CheckpointerOptions,
    LocalTier,
    SaveState,
    Terminated,
    TerminationOptions,
    Tier,
)
from resiliency.checkpoint.agent.client import LinkOptions
from resiliency.checkpoint.agent.protocol import Attach, Settings
from resiliency.checkpoint.capture.arena import RankArena
from resiliency.checkpoint.capture.capturer import Capturer
from resiliency.checkpoint.commit.retention import BEING_TAKEN, delete_superseded, retire
from resiliency.checkpoint.format.catalog import Condition, list_checkpoints
from resiliency.checkpoint.format.manifest import Manifest, write_manifest
from resiliency.checkpoint.format.marker import put_marker
from resiliency.checkpoint.gke.hand_off import HandOffQueue, awaiting, give_up, locked
from resiliency.checkpoint.names import TierName
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.checkpoint.trainer.delivery import Delivery
from resiliency.checkpoint.trainer.handles import SaveHandle, SaveLog, SaveRecord, TierOutcomes
from resiliency.errors import CheckpointWriteFailed, ConfigError
from resiliency.events import EventStream, EventType
from resiliency.runtime import RunInfo
from resiliency.testing import MemorySink
from resiliency.testing.processes import Command
from resiliency.testing.storage import StorageTrouble, TroubledStorage
from tests import agent_host
from tests.checkpoint.peer_builders import commit_step
from tests.step_page import own_page
from tests.waiting import agent_of, wait_until, wait_until_equal

SOON = timedelta(seconds=60)
BOTH = ("local", "persistent")
pytestmark = [
    pytest.mark.usefixtures("agents_at_once"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


def make_state(value: float, size: int = 1000) -> dict[str, object]:
    return {"weights": torch.full((size,), float(value)), "lr": value}


def complete(directory: Path) -> list[int]:
    found = list_checkpoints(LocalStorage(directory))
    return [checkpoint.step for checkpoint in found if checkpoint.condition is Condition.COMPLETE]


@dataclass
class Place:
    """Where one job of a test lives."""

    root: Path
    job: str

    @property
    def persistent(self) -> Path:
        return self.root / "persistent"

    @property
    def local(self) -> Path:
        return self.root / "local"

    def open(
        self,
        *,
        alone: bool = False,
        keep: int = 2,
        backlog: int = 0,
        events: EventStream | None = None,
        termination: TerminationOptions | None = None,
        **options: object,
    ) -> Checkpointer:
        link = LinkOptions(silence=timedelta(seconds=30), grace=timedelta(seconds=5))
        return Checkpointer(
            None if alone else self.persistent,
            every_steps=0 if alone else 4,
            local=LocalTier(directory=self.local, every_steps=2, keep=keep, backlog=backlog),
            info=RunInfo(job_name=self.job, host="here", rank=0),
            events=events,
            termination=termination,
            options=CheckpointerOptions(link=link, **options),  # type: ignore[arg-type]
        )

    def is_started_again(self, step: int, *, alone: bool) -> None:
        """By its launcher, as another host left and this one stays: the rank's captures are in memory."""
        with self.open(alone=alone) as checkpoints:
            restored = checkpoints.restore(make_state(0))
            assert (restored.step, restored.tier.value) == (step, "memory")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path, f"local-{os.getpid()}-{tmp_path.name}")
    yield place
    agent_host.wait_for_end(tmp_path.name)


# --- what is saved -------------------------------------------------------------------------------


def test_a_job_with_a_local_tier_alone_saves_there_and_comes_back_from_there(place: Place) -> None:
    with own_page() as page, place.open(alone=True) as checkpoints:
        handle = checkpoints.save(3, make_state(3))
        assert handle.wait_complete(SOON)
        assert handle.record.committed_in == ("local",)
        assert page.read(0).kept_step is None  # another number of ranks could not go on from that
    state = make_state(0)
    with place.open(alone=True) as checkpoints:
        restored = checkpoints.restore(state)
    assert (restored.step, restored.tier) == (3, Tier.LOCAL)
    assert torch.equal(state["weights"], torch.full((1000,), 3.0))  # type: ignore[arg-type]
    assert not place.persistent.exists()


def test_a_killed_job_whose_memory_is_lost_too_goes_on_from_the_local_tier(place: Place) -> None:
    memory = place.root / "memory"
    memory.mkdir()
    argv = [sys.executable, "-m", "tests.checkpoint.training_until_killed", "-", "20", "5"]
    argv += [f"local={place.local}", f"memory={memory}", "grace=1"]
    env = {"JOB_IDENTIFIER": place.job, "OMP_NUM_THREADS": "1"}
    with Command([*argv, "park=10"], env=env) as first:
        agent = int(first.wait_for_line(r"agent (\d+)", timeout=60)[1])
        first.wait_for_line("saved 5 committed", timeout=60)
        first.wait_for_line("parked 10", timeout=60)
        wait_until_equal(lambda: complete(place.local), [5, 10])
        first.signal(signal.SIGKILL)
        os.kill(agent, signal.SIGKILL)
        first.wait(timeout=60)
    for path in sorted(memory.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    with Command(argv, env=env) as second:
        assert second.wait_for_line("restored", timeout=60).string.split() == ["restored", "10", "local"]
        assert second.wait(timeout=60) == 0
    wait_until_equal(lambda: complete(place.local), [15, 20])


def test_one_capture_serves_both_tiers_that_are_due_and_the_others_get_what_is_theirs(place: Place) -> None:
    sink = MemorySink()
    with place.open(events=EventStream(RunInfo(job_name="j", rank=0), [sink])) as checkpoints:
        handles = {}
        for step in range(1, 5):
            handle = checkpoints.step(step, make_state(step))
            if handle is not None:
                handles[step] = handle
                assert handle.wait(SOON)
                assert handle.wait_complete(SOON)
        assert {step: handle.record.committed_in for step, handle in handles.items()}.keys() == {2, 4}
        assert handles[2].record.committed_in == ("local",)
        assert sorted(handles[4].record.committed_in) == sorted(BOTH)
        assert (complete(place.local), complete(place.persistent)) == ([2, 4], [4])
        text = checkpoints.metrics_text()
    assert 'tier_saves_total{rank="0",tier="local",outcome="committed"} 2' in text
    assert 'tier_saves_total{rank="0",tier="persistent",outcome="committed"} 1' in text
    assert 'last_complete_step{rank="0"} 4' in text
    assert [event.type for event in sink.events].count(EventType.SAVE_STARTED) == 2
    saved = [(e.step, e.fields["tier"]) for e in sink.events if e.type is EventType.CHECKPOINT_SAVED]
    assert sorted(saved) == [(2, "local"), (4, "local"), (4, "persistent")]


def test_the_step_that_a_job_goes_on_from_stays_when_it_is_saved_again(place: Place) -> None:
    with place.open(alone=True) as checkpoints:
        for step in (1, 2):
            assert checkpoints.save(step, make_state(step)).wait_complete(SOON)
    manifest = place.local / "step=2" / "manifest.json"
    before = manifest.read_bytes()
    with place.open(alone=True) as checkpoints:
        state = make_state(0)
        assert checkpoints.restore(state).step == 2
        handle = checkpoints.save(2, state, wait=SOON)
        assert handle.wait_complete(SOON)
        assert handle.record.committed_in == ("local",)
    assert manifest.read_bytes() == before
    assert complete(place.local) == [1, 2]


def test_the_step_that_a_job_goes_on_from_stays_rather_than_newer_ones_that_it_left(place: Place) -> None:
    with place.open(alone=True, keep=4) as checkpoints:
        for step in (1, 2, 3):
            assert checkpoints.save(step, make_state(step)).wait_complete(SOON)
    with place.open(alone=True) as checkpoints:
        assert checkpoints.restore(make_state(0), step=1).step == 1
        assert checkpoints.save(4, make_state(4)).wait_complete(SOON)
        wait_until_equal(lambda: complete(place.local), [1, 4])


def test_a_step_that_one_tier_has_of_a_branch_that_was_left_is_saved_in_both(place: Place) -> None:
    with place.open() as checkpoints:
        assert checkpoints.save(5, make_state(5)).wait(SOON)
        assert checkpoints.save(10, make_state(10), tiers=[TierName.PERSISTENT]).wait(SOON)
    with place.open() as checkpoints:
        assert checkpoints.restore(make_state(0), step=5).step == 5
        assert checkpoints.save(10, make_state(-10), tiers=[TierName.LOCAL]).wait(SOON)
    state = make_state(0)
    with place.open() as checkpoints:
        restored = checkpoints.restore(state)
        assert (restored.step, restored.tier, state["lr"]) == (10, Tier.LOCAL, -10)
        handle = checkpoints.save(10, state, wait=SOON)
        assert handle.wait(SOON)
    assert sorted(handle.record.committed_in) == sorted(BOTH), handle.record.why
    with place.open() as checkpoints:
        assert [source.step for source in checkpoints.take_inventory().sources()].count(10) == 2


def test_the_same_state_under_another_name_counts_as_saved(place: Place) -> None:
    """As after an end that is repeated: what is in memory then is named after the start before."""
    with place.open() as checkpoints:
        assert checkpoints.save(10, make_state(10)).wait(SOON)
    state = make_state(0)
    for _ in range(2):
        checkpoints = place.open()
        assert checkpoints.restore(state).step == 10
        handle = checkpoints.save(10, state, wait=SOON)
        is_final = handle.wait(SOON)
        checkpoints.close(finished=False)
        assert is_final
        assert sorted(handle.record.committed_in) == sorted(BOTH), handle.record.why
    with place.open() as checkpoints:
        assert checkpoints.restore(state).tier is Tier.MEMORY
        assert checkpoints.save(11, state, wait=SOON).wait(SOON)


def test_a_step_that_one_tier_has_is_saved_again_for_the_other_only(place: Place) -> None:
    with place.open() as checkpoints:
        first = checkpoints.save(1, make_state(1), tiers=[TierName.LOCAL])
        assert first.wait(SOON)
        assert checkpoints.save(1, make_state(1), tiers=[TierName.LOCAL]) is first
        second = checkpoints.save(1, make_state(1))
        assert second is not first
        assert second.wait(SOON)
        assert (first.record.committed_in, second.record.committed_in) == (("local",), ("persistent",))
        assert checkpoints.save(1, make_state(1)) is second
    assert complete(place.local) == complete(place.persistent) == [1]


def test_a_tier_that_a_job_does_not_have_is_refused_by_name(place: Place) -> None:
    with place.open(alone=True) as checkpoints, pytest.raises(ConfigError, match=r"\(local\), found persist"):
        checkpoints.save(1, make_state(1), tiers=[TierName.PERSISTENT])
    with pytest.raises(ConfigError, match="nowhere to save to"):
        Checkpointer(None)
    with pytest.raises(ConfigError, match=r"several labels, found the text 'tp:0'"):
        Checkpointer(place.persistent, parallel_groups="tp:0")
    with pytest.raises(ConfigError, match="is of the persistent tier, found without a directory"):
        Checkpointer(None, every_steps=5, local=LocalTier(directory=place.local))


# --- one tier in trouble -------------------------------------------------------------------------


def test_a_slow_persistent_tier_delays_no_local_save(place: Place) -> None:
    # 4 MiB at 16 KiB/s: the persistent tier writes its first save for as long as this test lasts.
    with place.open(bytes_per_s=16 << 10) as checkpoints:
        first = checkpoints.save(1, make_state(1, size=1 << 20))
        assert first.wait_complete(SOON)
        for step in range(2, 8):
            handle = checkpoints.save(step, make_state(step, size=1 << 20))
            assert handle.wait(SOON), handle.record
            assert handle.record.committed_in == ("local",)
            assert "persistent: an earlier save is still being written" in handle.record.why
            assert handle.wait_complete(SOON)
        skipped = checkpoints.save(8, make_state(8, size=1 << 20), tiers=[TierName.PERSISTENT])
        assert skipped.wait(SOON)
        assert skipped.state is SaveState.SKIPPED
        assert first.record.committed_in == ("local",)
        assert complete(place.persistent) == []
        checkpoints.lift_bandwidth_cap()
        # The last one waits for its turn.
        last = checkpoints.save(9, make_state(9, size=1 << 20), wait=SOON)
        assert last.wait(SOON)
        assert first.state is SaveState.COMMITTED
        assert sorted(last.record.committed_in) == sorted(BOTH)
    assert complete(place.persistent) == [1, 9]
    # Older ones are deleted after the word that a newer one is complete.
    wait_until_equal(lambda: complete(place.local), [7, 9])


@pytest.mark.slow
@pytest.mark.usefixtures("own_agents")
def test_a_local_save_outlives_the_agent_that_held_it_and_a_persistent_one_fails_with_it(
    place: Place,
) -> None:
    with place.open() as checkpoints:
        agent = psutil.Process(agent_of(checkpoints))
        agent.suspend()
        handle = checkpoints.save(1, make_state(1))
        assert handle.wait(SOON, until=SaveState.CAPTURED)
        agent.kill()
        assert handle.wait(timedelta(seconds=150)), handle.record
        assert handle.record.committed_in == ("local",)
        assert f"persistent: the checkpoint agent (process {agent.pid}) was lost" in handle.record.why
        assert checkpoints.agent_pid not in (0, agent.pid)
        assert checkpoints.save(2, make_state(2)).wait(SOON)
    assert (complete(place.local), complete(place.persistent)) == ([1, 2], [2])


@pytest.mark.thorough("a local save that outlives its agent is near")
@pytest.mark.slow
@pytest.mark.usefixtures("own_agents")
def test_local_saves_of_all_ranks_outlive_the_agent_when_other_hosts_are_told_of_the_persistent_ones(
    tmp_path: Path,
) -> None:
    settings = Settings(
        directory=str(tmp_path / "persistent"),
        keep=3,
        replicated=False,
        bytes_per_s=0,
        save_timeout_s=5.0,
        local_directory=str(tmp_path / "local"),
        replicas=0,
    )
    with ExitStack() as stack:
        ranks = [stack.enter_context(delivering(tmp_path / "arena", rank, settings)) for rank in (0, 1)]
        agent = psutil.Process(ranks[0][0].link.agent_pid)
        agent.suspend()
        handles = []
        for delivery, capturer in ranks:
            handles.append(SaveHandle(1, BOTH))
            capture = capturer.begin(make_state(1), 1, wait=SOON)
            assert capture is not None
            capturer.fence()
            delivery.send(handles[-1], capture, patient=False)
            assert handles[-1].wait(SOON, until=SaveState.CAPTURED)
        agent.kill()
        for handle in handles:
            assert handle.wait(timedelta(seconds=150)), handle.record
            assert handle.record.committed_in == ("local",)
        # Else it stays for a while: the other host, which there is not, may want copies.
        psutil.Process(ranks[0][0].link.agent_pid).terminate()
    assert (complete(tmp_path / "local"), complete(tmp_path / "persistent")) == ([1], [])


@contextmanager
def delivering(arena: Path, rank: int, settings: Settings) -> Iterator[tuple[Delivery, Capturer]]:
    """One of the two ranks here, of a job that has two more on another host, attached to its agent."""
    attach = Attach(
        rank=rank,
        world_size=4,
        local_ranks=(0, 1),
        run_id="run",
        attempt_id="s",
        host="here",
        settings=settings,
    )
    slots = RankArena(arena, rank=rank, world_size=4, slots=3, run_id="s")
    capturer = Capturer(slots)
    options = LinkOptions(grace=timedelta(seconds=5))
    delivery = Delivery(arena, attach, capturer, emit=lambda *_, **__: None, options=options)
    try:
        assert delivery.link.wait_for_agent()
        yield delivery, capturer
    finally:
        capturer.close()
        delivery.link.close(detach=True)
        slots.close(remove=True)


def test_an_agent_that_takes_over_when_the_job_was_told_to_end_has_no_bandwidth_cap_either(
    place: Place,
) -> None:
    with place.open(bytes_per_s=16 << 10) as checkpoints:
        checkpoints.lift_bandwidth_cap()
        # 4 MiB: at 16 KiB/s they would take minutes.
        assert checkpoints.save(1, make_state(1, size=1 << 20)).wait(SOON)
        agent = psutil.Process(agent_of(checkpoints))
        agent.kill()
        assert checkpoints.save(2, make_state(2), tiers=[TierName.LOCAL]).wait(timedelta(seconds=150))
        assert checkpoints.agent_pid not in (0, agent.pid)
        last = checkpoints.save(3, make_state(3, size=1 << 20))
        assert last.wait(SOON), last.record
        assert sorted(last.record.committed_in) == sorted(BOTH)
    assert complete(place.persistent) == [1, 3]


@pytest.mark.parametrize("broken", BOTH)
def test_a_tier_that_takes_nothing_fails_by_name_and_the_other_commits(place: Place, broken: str) -> None:
    (place.root / broken).write_text("in the way")
    works = BOTH[1 - BOTH.index(broken)]
    sink = MemorySink()
    with place.open(events=EventStream(RunInfo(job_name="j", rank=0), [sink])) as checkpoints:
        for step in (1, 2):
            handle = checkpoints.save(step, make_state(step))
            assert handle.wait(SOON)
            assert handle.state is SaveState.COMMITTED
            assert handle.record.committed_in == (works,)
            assert handle.record.why.startswith(f"{broken}: ")
        text = checkpoints.metrics_text()
    assert f'tier="{broken}",outcome="failed"}} 2' in text
    assert f'tier="{works}",outcome="committed"}} 2' in text
    failed = [event.fields["tier"] for event in sink.events if event.type is EventType.SAVE_FAILED]
    assert failed == [broken, broken]
    assert complete(place.root / works) == [1, 2]


def test_a_job_that_is_told_to_end_is_content_with_what_is_complete_in_the_local_tier(place: Place) -> None:
    place.persistent.write_text("in the way")
    told = TerminationOptions(deadline=SOON, signals=())

    def train() -> None:
        with place.open(termination=told) as checkpoints:
            checkpoints.request_stop()
            for step in range(1, 1000):
                checkpoints.save(step, make_state(step), tiers=[TierName.LOCAL], wait=SOON)
                checkpoints.step(step, make_state(step))

    with pytest.raises(Terminated) as ended:
        train()
    assert (ended.value.code, ended.value.committed) == (0, True)
    assert ended.value.step in complete(place.local)
    place.is_started_again(ended.value.step, alone=False)


def test_a_job_that_is_told_to_end_after_a_rollback_ends_at_its_next_step(place: Place) -> None:
    told = TerminationOptions(deadline=SOON, signals=())

    def train() -> None:
        with place.open(alone=True, termination=told) as checkpoints:
            assert checkpoints.save(10, make_state(10)).wait(SOON)
            for step in range(11, 31):
                checkpoints.step(step, make_state(step))
            assert checkpoints.restore(make_state(0), step=10).step == 10
            checkpoints.request_stop()
            wait_until(lambda: checkpoints.stopping or None, "the request does not arrive")
            for step in range(11, 40):
                checkpoints.step(step, make_state(step))

    with pytest.raises(Terminated) as ended:
        train()
    assert (ended.value.code, ended.value.step) == (0, 11)
    place.is_started_again(11, alone=True)


def test_a_save_is_final_when_all_tiers_have_reported_and_good_if_one_of_them_has_it() -> None:
    outcomes = TierOutcomes(BOTH)
    assert outcomes.report("local", "", queued_s=1.0, commit_s=2.0)
    assert not outcomes.report("local", "again")
    assert "state" not in outcomes.changes()
    assert outcomes.changes()["committed_in"] == ("local",)
    assert outcomes.report("persistent", "full", commit_s=1.0)
    assert outcomes.changes() == {
        "committed_in": ("local",), "why": "persistent: full", "queued_s": 1.0, "commit_s": 2.0,
        "state": SaveState.COMMITTED,
    }  # fmt: skip


def test_a_save_that_no_tier_has_is_failed_with_all_reasons() -> None:
    outcomes = TierOutcomes(BOTH)
    outcomes.report("local", "gone")
    outcomes.report("persistent", "full")
    changes = outcomes.changes()
    assert (changes["state"], changes["why"]) == (SaveState.FAILED, "local: gone; persistent: full")
    log = SaveLog()
    log.add(SaveRecord(step=1, tiers=BOTH, **changes))
    assert 'tier="local",outcome="failed"} 1' in log.metrics_text(rank=0, agent_losses=0)


# --- generations ---------------------------------------------------------------------------------


def test_old_generations_go_when_a_newer_one_is_complete_and_so_many_stay_as_were_asked_for(
    place: Place,
) -> None:
    with place.open(alone=True, keep=1) as checkpoints:
        for step in range(1, 4):
            assert checkpoints.save(step, make_state(step)).wait_complete(SOON)
        wait_until_equal(lambda: complete(place.local), [3])


def test_copies_of_hosts_that_left_go_when_the_job_has_gone_on_with_one_host(place: Place) -> None:
    for owner, run_id in (("left", place.job), ("stranger", "another")):
        storage = LocalStorage(place.local / "replicas" / owner)
        commit_step(storage, 1, attempt_id="before", run_id=run_id)
    with place.open(alone=True, keep=2) as checkpoints:
        for step in (2, 3):
            assert checkpoints.save(step, make_state(step), wait=SOON).wait_complete(SOON)
        wait_until_equal(lambda: complete(place.local / "replicas" / "left"), [])
        assert complete(place.local) == [2, 3]
    assert complete(place.local / "replicas" / "stranger") == [1]


def generations(root: Path, **saves: str) -> LocalStorage:
    """Checkpoints without any data: ``s1="a"`` is step 1 of save id a-1."""
    storage = LocalStorage(root)
    for name, attempt_id in saves.items():
        step = int(name[1:])
        storage.make_dir(f"step={step}")
        manifest = Manifest(
            step=step, run_id="run", save_id=f"{attempt_id}-{step}", world_size=1, format="local", ranks={}
        )
        write_manifest(storage, f"step={step}", manifest)
    return storage


def test_of_older_generations_those_that_were_complete_stay_first(tmp_path: Path) -> None:
    storage = generations(tmp_path, s1="a", s2="b", s3="b", s4="b", s5="b")
    gone = retire(storage, run_id="run", complete={2: "b-2", 4: "b-4"}, keep=2)
    assert gone == [1, 3]
    assert complete(tmp_path) == [2, 4, 5]


@pytest.mark.parametrize("news", [{4: "c-4"}, {9: "b-9"}], ids=["replaced", "not-here"])
def test_nothing_goes_for_a_complete_step_that_this_host_does_not_have(
    tmp_path: Path, news: dict[int, str]
) -> None:
    storage = generations(tmp_path, s1="a", s4="b")
    assert retire(storage, run_id="run", complete=news, keep=1) == []
    assert complete(tmp_path) == [1, 4]


def test_a_generation_whose_removal_failed_goes_when_the_next_one_is_complete(tmp_path: Path) -> None:
    storage = generations(tmp_path, s1="a", s2="a", s3="a")
    troubled = TroubledStorage(storage, StorageTrouble(step=1, operation="remove_tree"))
    with pytest.raises(CheckpointWriteFailed, match="step=1"):
        retire(troubled, run_id="run", complete={3: "a-3"}, keep=2)
    put_marker(storage, 2, BEING_TAKEN)
    assert retire(troubled, run_id="run", complete={3: "a-3"}, keep=2) == [1]
    assert storage.list("") == ["step=2", "step=2-unfinished", "step=3"]


def test_another_runs_checkpoints_are_not_retired(tmp_path: Path) -> None:
    storage = generations(tmp_path, s1="a", s4="b")
    assert retire(storage, run_id="other", complete={4: "b-4"}, keep=1) == []


def test_what_an_earlier_start_saved_makes_way_for_the_same_step_but_the_last_one_stays(
    tmp_path: Path,
) -> None:
    storage = generations(tmp_path, s1="a", s2="a")
    delete_superseded(storage, step=2, run_id="run", save_id="a-2")  # the same save
    delete_superseded(storage, step=2, run_id="other", save_id="b-2")
    assert complete(tmp_path) == [1, 2]
    delete_superseded(storage, step=2, run_id="run", save_id="b-2")
    assert complete(tmp_path) == [1]
    with pytest.raises(CheckpointWriteFailed, match="there is none before it here: it is kept"):
        delete_superseded(storage, step=1, run_id="run", save_id="b-1")
    assert complete(tmp_path) == [1]


def test_a_newer_leftover_is_no_reason_for_a_step_to_make_way(tmp_path: Path) -> None:
    """The leftover may be this host's part of a save that no other host has."""
    storage = generations(tmp_path, s1="a", s2="a")
    with pytest.raises(CheckpointWriteFailed, match="there is none before it here: it is kept"):
        delete_superseded(storage, step=1, run_id="run", save_id="b-1")
    assert complete(tmp_path) == [1, 2]


# --- generations that wait to be handed over -----------------------------------------------------


def test_a_generation_stays_until_it_is_handed_over_or_given_up(tmp_path: Path) -> None:
    storage = generations(tmp_path, s1="b", s2="b", s3="a", s4="b", s5="b")
    known = {step: f"b-{step}" for step in (1, 2, 4, 5)}  # of step 3 another host lost its part
    give_up(storage, 1)
    assert retire(storage, run_id="run", complete=known, keep=1, hook=HandOffQueue(storage, 9)) == [1, 3]
    assert awaiting(storage, known) == [2, 4, 5]
    assert complete(tmp_path) == [2, 4, 5]
    give_up(storage, 4)
    for step in (2, 5):
        os.rename(tmp_path / f"step={step}", tmp_path / str(step))
    # The newest is with the replicator, and vouches for what goes all the same.
    assert retire(storage, run_id="run", complete=known, keep=1, hook=HandOffQueue(storage, 9)) == [4]


def test_a_generation_that_was_overtaken_does_not_wait(tmp_path: Path) -> None:
    storage = generations(tmp_path, s1="b", s2="b", s3="b", s4="b")
    known = {step: f"b-{step}" for step in (1, 2, 3, 4)}
    os.rename(tmp_path / "step=2", tmp_path / "2")
    assert awaiting(storage, known) == [3, 4]
    assert retire(storage, run_id="run", complete=known, keep=1, hook=HandOffQueue(storage, 9)) == [1]


def test_of_too_many_that_wait_the_oldest_is_given_up_and_its_note_stays_for_who_hands_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage = generations(tmp_path, s1="b", s2="b", s3="b", s4="b")
    known = {step: f"b-{step}" for step in (1, 2, 3, 4)}
    assert retire(storage, run_id="run", complete=known, keep=1, hook=HandOffQueue(storage, 2)) == [1]
    assert awaiting(storage, known) == [2, 3, 4]
    assert "step 1 is given up: more than 3 steps wait" in caplog.text
    assert "step=1.given-up" in os.listdir(tmp_path)
    del known[1]
    assert retire(storage, run_id="run", complete=known, keep=1, hook=HandOffQueue(storage, 2)) == []
    assert "step=1.given-up" not in os.listdir(tmp_path)


def test_on_a_full_disk_what_is_given_up_makes_room_though_no_note_can_say_so(tmp_path: Path) -> None:
    generations(tmp_path, s1="b", s2="b", s3="b")
    known = {step: f"b-{step}" for step in (1, 2, 3)}
    full = TroubledStorage(
        LocalStorage(tmp_path), StorageTrouble(step=1, operation="create", errno=errno.ENOSPC)
    )
    assert retire(full, run_id="run", complete=known, keep=1, hook=HandOffQueue(full, 1)) == [1]
    assert full.is_over


def test_nothing_is_given_up_while_a_step_is_being_handed_over(tmp_path: Path) -> None:
    with (
        locked(tmp_path),
        pytest.raises(CheckpointWriteFailed, match="another process of this host"),
        locked(tmp_path, timedelta(0)),
    ):
        pass
    with locked(tmp_path):
        pass


def test_saves_go_on_while_nothing_is_handed_over_and_the_disk_holds_so_many_of_them(place: Place) -> None:
    limits = {"alone": True, "keep": 1, "backlog": 2}
    with place.open(**limits) as checkpoints:  # type: ignore[arg-type]
        for step in range(1, 8):
            assert checkpoints.save(step, make_state(step), wait=SOON).wait_complete(SOON)
            # At most the bound, one that is being given up, and this one.
            assert len(complete(place.local)) <= 4
        wait_until_equal(lambda: complete(place.local), [5, 6, 7])
        os.rename(place.local / "step=5", place.local / "5")  # handed over
        assert checkpoints.save(8, make_state(8)).wait_complete(SOON)
        wait_until_equal(lambda: complete(place.local), [6, 7, 8])


@pytest.mark.thorough("a local save that outlives its agent is near")
@pytest.mark.usefixtures("own_agents")
def test_what_a_killed_agent_knew_to_be_complete_on_a_single_host_waits_on(place: Place) -> None:
    limits = {"alone": True, "keep": 1, "backlog": 3}
    with place.open(**limits) as checkpoints:  # type: ignore[arg-type]
        for step in (1, 2):
            assert checkpoints.save(step, make_state(step)).wait_complete(SOON)
        psutil.Process(agent_of(checkpoints)).kill()
        for step in (3, 4, 5):
            assert checkpoints.save(step, make_state(step), wait=SOON).wait_complete(SOON)
        wait_until_equal(lambda: complete(place.local), [2, 3, 4, 5])
        assert "step=1.given-up" in os.listdir(place.local)
