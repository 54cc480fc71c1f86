# SPDX-License-Identifier: Apache-2.0
"""From what ranks say of a step to jobs for the tiers, with a real arena and real disks."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from threading import Event

import pytest
import torch

from resiliency.checkpoint.agent.jobs import SaveJob
from resiliency.checkpoint.agent.protocol import Attach, Done, SaveRequest, Settings, Skip
from resiliency.checkpoint.agent.save_collector import SaveCollector
from resiliency.checkpoint.capture.arena import RankArena, rank_directory
from resiliency.checkpoint.capture.capturer import Capturer
from resiliency.checkpoint.format.catalog import Condition, list_checkpoints
from resiliency.checkpoint.format.marker import Marker, MarkerState, put_marker, try_read_marker
from resiliency.checkpoint.locks import FileLock
from resiliency.checkpoint.names import TierName, save_id_of
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.checkpoint.storage.throttle import Throttle
from tests.checkpoint.hanging_storage import Hang
from tests.checkpoint.storage_builders import no_descriptor_left
from tests.waiting import wait_until

SOON = timedelta(seconds=60)
BOTH = ("local", "persistent")


class Desk:
    """An intake for some of two ranks, on one host, and what it reported."""

    def __init__(
        self,
        root: Path,
        *,
        local_ranks: tuple[int, ...] = (0, 1),
        host: str = "",
        world_size: int = 2,
        attempt_id: str = "s",
    ) -> None:
        self.root = root
        self.own = own = root / host
        own.mkdir(exist_ok=True)
        self.done: queue.SimpleQueue[tuple[SaveJob, Done]] = queue.SimpleQueue()
        self.throttle = Throttle()
        self.collector = SaveCollector(
            own / "arena", lambda job, done: self.done.put((job, done)), self.throttle
        )
        settings = Settings(
            directory=str(root / "persistent"),
            keep=3,
            replicated=False,
            bytes_per_s=0,
            save_timeout_s=60.0,
            local_directory=str(own / "local"),
        )
        self.ranks = [
            Attach(
                rank=rank,
                world_size=world_size,
                local_ranks=local_ranks,
                run_id="run",
                attempt_id=attempt_id,
                host=host,
                settings=settings,
            )
            for rank in local_ranks
        ]
        self.arenas: list[RankArena] = []
        self._open()

    def _open(self) -> None:
        self.arenas = [
            RankArena(
                self.own / "arena", rank=at.rank, world_size=at.world_size, slots=3, run_id=at.attempt_id
            )
            for at in self.ranks
        ]
        self.capturers = {arena.rank: Capturer(arena) for arena in self.arenas}

    def start_again(self, attempt_id: str) -> None:
        """The ranks, not the agent."""
        for arena in self.arenas:
            self.capturers[arena.rank].close()
            arena.close()
        self.ranks = [replace(rank, attempt_id=attempt_id) for rank in self.ranks]
        self._open()
        self.collector.begin_attempt(self.ranks[0])

    def capture(self, rank: int, step: int, tiers: tuple[str, ...] = BOTH) -> SaveRequest:
        state = {"weights": torch.full((1000,), float(step))}
        capture = self.capturers[rank].begin(state, step, wait=SOON)
        assert capture is not None
        self.capturers[rank].fence()
        assert capture.wait(SOON)
        return SaveRequest(step=step, slot=capture.slot_path.name, tiers=tiers)

    def reports(self, count: int) -> dict[tuple[int, str], str]:
        """The next ones, by step and tier."""
        found = {}
        pause = Event()
        for _ in range(count):
            for _ in range(6000):  # as the agent does
                self.collector.look_again()
                if not self.done.empty():
                    break
                pause.wait(0.01)
            job, done = self.done.get(timeout=0)
            self.collector.finish(job, done)
            found[done.step, done.tier] = done.error
        assert self.done.empty()
        return found

    def replace_agent(self) -> None:
        """By one that knows nothing of what was before."""
        self.collector.close(SOON)
        self.collector = SaveCollector(
            self.root / "arena", lambda job, done: self.done.put((job, done)), self.throttle
        )

    def complete(self, tier: str) -> list[int]:
        found = list_checkpoints(LocalStorage(self.root / tier))
        return [checkpoint.step for checkpoint in found if checkpoint.condition is Condition.COMPLETE]

    def close(self) -> None:
        self.collector.close(SOON)
        for arena in self.arenas:
            self.capturers[arena.rank].close()
            arena.close(remove=True)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    desk.close()


def test_a_step_goes_to_its_tiers_once_all_ranks_have_it_and_its_slots_are_given_back(desk: Desk) -> None:
    for step in range(1, 6):  # more steps than slots
        for rank in (0, 1):
            assert desk.done.empty()
            assert desk.collector.save(desk.ranks[rank], desk.capture(rank, step)) == []
        assert desk.reports(2) == {(step, "local"): "", (step, "persistent"): ""}
    assert desk.complete("local") == [1, 2, 3, 4, 5]  # nobody said that one is complete on all hosts
    assert desk.complete("persistent")[-1] == 5
    assert desk.collector.captures_are_spent()


def test_a_slot_that_cannot_be_opened_for_now_costs_that_save_and_not_the_agent(desk: Desk) -> None:
    saves = [desk.capture(rank, 1) for rank in (0, 1)]
    with no_descriptor_left():
        assert desk.collector.save(desk.ranks[0], saves[0]) == []
    assert desk.collector.save(desk.ranks[1], saves[1]) == []
    for why in desk.reports(2).values():
        assert why.startswith("rank 0: ")
        assert "Too many open files" in why
    # As any failed save it may be tried again, by all ranks together.
    for rank in (0, 1):
        assert desk.collector.save(desk.ranks[rank], saves[rank]) == []
    assert desk.reports(2) == {(1, "local"): "", (1, "persistent"): ""}


def test_what_ranks_left_in_memory_is_rescued_where_it_is_quickest(desk: Desk) -> None:
    desk.collector.save(desk.ranks[0], desk.capture(0, 1, ("local",)))
    desk.collector.save(desk.ranks[1], desk.capture(1, 1, ("local",)))
    assert desk.reports(1) == {(1, "local"): ""}
    for rank in (0, 1):
        desk.capture(rank, 2)  # nobody tells the agent
    desk.collector.commit_emergency(desk.ranks[0])
    assert desk.reports(1) == {(2, "local"): ""}
    desk.collector.commit_emergency(desk.ranks[0])  # once
    assert (desk.complete("local"), desk.complete("persistent")) == ([1, 2], [])
    assert desk.done.empty()


def test_a_rescue_of_a_step_that_was_to_go_elsewhere_too_takes_it_there(desk: Desk) -> None:
    desk.collector.save(desk.ranks[0], desk.capture(0, 1, ("persistent",)))
    desk.capture(1, 1)  # this rank dies before it can tell
    desk.collector.commit_emergency(desk.ranks[0])
    assert desk.reports(2) == {(1, "local"): "", (1, "persistent"): ""}


def test_a_rank_that_asks_late_hears_what_became_of_the_step(desk: Desk) -> None:
    saves = [desk.capture(rank, 1, ("local",)) for rank in (0, 1)]
    desk.collector.commit_emergency(desk.ranks[0])
    assert desk.reports(1) == {(1, "local"): ""}
    (missed,) = desk.collector.save(desk.ranks[1], saves[1])
    assert (missed.step, missed.tier, missed.error) == (1, "local", "")
    assert desk.done.empty()


def test_a_rank_that_lost_its_agent_hears_from_the_next_what_the_first_had_committed(
    desk: Desk,
) -> None:
    saves = [desk.capture(rank, 1, ("local",)) for rank in (0, 1)]
    for rank in (0, 1):
        desk.collector.save(desk.ranks[rank], saves[rank])
    assert desk.reports(1) == {(1, "local"): ""}
    desk.replace_agent()
    assert desk.collector.save(desk.ranks[1], replace(saves[1], again=True)) == []
    assert desk.reports(1) == {(1, "local"): ""}  # for all, as that of any save
    (missed,) = desk.collector.save(desk.ranks[0], replace(saves[0], again=True))
    assert (missed.step, missed.tier, missed.error) == (1, "local", "")
    assert desk.collector.save(desk.ranks[0], replace(desk.capture(0, 2, ("local",)), again=True)) == []
    assert desk.done.empty()
    assert desk.collector.in_work == 0


def test_what_an_earlier_agent_committed_is_reported_however_late_the_disk_says_so(desk: Desk) -> None:
    """Rank 0 was told, so it says no more of it."""
    lost = desk.capture(1, 1, ("local",))
    saves = [desk.capture(rank, 2, ("local",)) for rank in (0, 1)]
    for rank in (0, 1):
        desk.collector.save(desk.ranks[rank], saves[rank])
    assert desk.reports(1) == {(2, "local"): ""}
    desk.replace_agent()
    hang = Hang(desk.root / "local", 1)
    for save in (lost, saves[1]):
        desk.collector.save(desk.ranks[1], replace(save, again=True))
    for rank in (0, 1):
        desk.collector.save(desk.ranks[rank], desk.capture(rank, 3, ("local",)))
    desk.collector.look_again()
    assert desk.done.empty()
    hang.end()
    assert desk.reports(3) == {
        (1, "local"): "rank 0 went on without it",
        (2, "local"): "",
        (3, "local"): "",
    }
    assert desk.collector.in_work == 0


def test_who_asks_for_what_the_disk_does_not_say_in_the_time_of_a_save_hears_that_others_went_on(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    settings = replace(desk.ranks[0].settings, save_timeout_s=0.2)
    desk.ranks = [replace(rank, settings=settings) for rank in desk.ranks]
    (desk.root / "local").mkdir()
    hang = Hang(desk.root / "local", 1)
    desk.collector.save(desk.ranks[1], replace(desk.capture(1, 1, ("local",)), again=True))
    for rank in (0, 1):
        desk.collector.save(desk.ranks[rank], desk.capture(rank, 2, ("local",)))
    assert desk.reports(1) == {(1, "local"): "rank 0 went on without it"}
    assert "whether an earlier agent committed step 1 is not known" in caplog.text
    hang.end()
    assert desk.reports(1) == {(2, "local"): ""}


@pytest.mark.parametrize("tiers", [("local",), BOTH], ids=["when-it-answers", "in-the-other-tier"])
def test_a_step_that_was_left_out_as_storage_hung_is_rescued(desk: Desk, tiers: tuple[str, ...]) -> None:
    persistent = desk.ranks[0].settings.directory if tiers == BOTH else ""
    settings = replace(desk.ranks[0].settings, save_timeout_s=0.3, directory=persistent)
    desk.ranks = [replace(rank, settings=settings) for rank in desk.ranks]
    for step in (1, 2, 3):
        for rank in (0, 1):
            desk.collector.save(desk.ranks[rank], desk.capture(rank, step, ("local",)))
        if step == 1:
            assert desk.reports(1) == {(1, "local"): ""}
            hang = Hang(desk.root / "local", 2)

    def are_all_reported() -> bool:
        desk.collector.look_for_hang()
        while not desk.done.empty():
            job, done = desk.done.get()
            desk.collector.finish(job, done)
            assert done.left_out or done.step == 2
        return not desk.collector.in_work

    wait_until(are_all_reported, "the hang is not seen")
    desk.collector.commit_emergency(desk.ranks[0])
    if tiers == BOTH:
        assert desk.reports(1) == {(3, "persistent"): ""}
        hang.end()
        return
    assert (desk.done.empty(), desk.collector.in_work) == (True, 0)  # nowhere to go for now
    hang.end()

    def is_rescued() -> bool:
        desk.collector.commit_emergency(desk.ranks[0])
        return bool(desk.collector.in_work)

    wait_until(is_rescued, "the storage answers, and nothing is rescued")
    assert desk.reports(1) == {(3, "local"): ""}


def test_a_rescue_that_fails_in_one_tier_goes_to_the_next_and_ends_when_none_has_taken_it(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    for tier in BOTH:
        (desk.root / tier).write_text("in the way")
    for rank in (0, 1):
        desk.capture(rank, 1)
    gave_up: set[tuple[int, TierName]] = set()
    for tier in BOTH:
        for _ in range(2):  # the second time it is in work
            desk.collector.commit_emergency(desk.ranks[0], gave_up)
        ((found, why),) = desk.reports(1).items()
        assert found == (1, tier)
        assert why
        gave_up.add((1, TierName(tier)))
    for _ in range(2):
        desk.collector.commit_emergency(desk.ranks[0], gave_up)
    assert (desk.done.empty(), desk.collector.in_work) == (True, 0)
    assert caplog.text.count("is not committed: storage of the local and the persistent tier failed") == 1


def test_only_the_first_tier_gets_a_rescue_of_one_of_several_hosts(tmp_path: Path) -> None:
    with closing(Desk(tmp_path, local_ranks=(1,), host="h1")) as desk:
        (tmp_path / "h1" / "local").write_text("in the way")
        desk.capture(1, 1)
        desk.collector.commit_emergency(desk.ranks[0])
        assert list(desk.reports(1)) == [(1, "local")]
        desk.collector.commit_emergency(
            desk.ranks[0], {(1, TierName.LOCAL)}
        )  # nobody would wait for it elsewhere
        assert (desk.done.empty(), desk.collector.in_work) == (True, 0)


def test_ranks_that_ask_again_are_heard_although_the_disk_does_not_answer(desk: Desk) -> None:
    saves = [replace(desk.capture(rank, 1), again=True) for rank in (0, 1)]
    (desk.root / "local").mkdir()
    hang = Hang(desk.root / "local", 1)
    told = threading.Thread(
        target=lambda: [desk.collector.save(desk.ranks[rank], saves[rank]) for rank in (0, 1)], daemon=True
    )
    told.start()
    assert desk.done.get(timeout=60)[1].tier == "persistent"
    told.join(20)
    assert not told.is_alive()
    hang.end()  # for the look and the save
    assert desk.done.get(timeout=60)[1].error == ""


@pytest.mark.parametrize("knew", [True, False], ids=["both-had-told-it", "one-had-not-told-it"])
def test_what_ranks_give_up_in_one_tier_after_their_agent_died_is_saved_to_the_other(
    desk: Desk, knew: bool
) -> None:
    given_up = {1: "", 2: ""}
    for rank, told in ((0, True), (1, knew)):
        member = desk.ranks[rank]
        saves = [desk.capture(rank, step) for step in given_up]
        if not told:
            for save in saves:
                desk.collector.save(member, save)
            continue
        for save in saves:
            desk.collector.save(member, replace(save, tiers=("local",), patient=True, again=True))
        for step in given_up:
            desk.collector.skip(member, Skip(step=step, tiers=("persistent",), reason=f"lost by {rank}"))
    why = "lost by 0; lost by 1" if knew else "lost by 0"
    assert desk.reports(4) == {
        **{(step, "local"): "" for step in given_up},
        **{(step, "persistent"): why for step in given_up},
    }
    assert (desk.complete("local"), desk.complete("persistent")) == ([1, 2], [])


def test_a_rescue_that_comes_too_late_gives_back_what_it_took_and_says_nothing(desk: Desk) -> None:
    first, second = (
        FileLock(rank_directory(desk.root / "arena", rank) / desk.capture(rank, 1).slot) for rank in (0, 1)
    )
    assert second.try_lock(exclusive=True)  # as if its owner captured again
    desk.collector.commit_emergency(desk.ranks[0])
    assert first.try_lock(exclusive=True)
    first.close()
    second.close()
    for rank in (0, 1):
        desk.collector.save(desk.ranks[rank], desk.capture(rank, 2, ("local",)))
    assert desk.reports(1) == {(2, "local"): ""}


def test_a_rank_without_a_capture_fails_the_step_in_all_its_tiers_and_another_try_commits(desk: Desk) -> None:
    desk.collector.skip(desk.ranks[1], Skip(step=1, tiers=BOTH, reason="no room"))
    desk.collector.save(desk.ranks[0], desk.capture(0, 1))
    assert desk.reports(2) == {(1, "local"): "no room", (1, "persistent"): "no room"}
    for rank in (0, 1):
        desk.collector.save(desk.ranks[rank], replace(desk.capture(rank, 1), try_number=2))
    assert desk.reports(2) == {(1, "local"): "", (1, "persistent"): ""}


def test_a_tier_that_is_busy_is_left_out_unless_the_save_is_patient(desk: Desk) -> None:
    ranks = [replace(rank, settings=replace(rank.settings, bytes_per_s=100)) for rank in desk.ranks]
    for rank in (0, 1):
        desk.collector.save(ranks[rank], desk.capture(rank, 1))
    assert desk.reports(1) == {(1, "local"): ""}
    for rank in (0, 1):
        desk.collector.save(ranks[rank], desk.capture(rank, 2, ("persistent",)))
    ((_, why),) = desk.reports(1).items()
    assert why.startswith("an earlier save is still being written")
    for rank in (0, 1):
        desk.collector.save(ranks[rank], replace(desk.capture(rank, 3, ("persistent",)), patient=True))
    assert desk.done.empty()
    desk.throttle.lift()
    assert desk.reports(2) == {(1, "persistent"): "", (3, "persistent"): ""}


def outcomes(desk: Desk, count: int) -> list[tuple[int, str]]:
    """Number and error of the next reports, in order."""
    found = []
    for _ in range(count):
        job, done = desk.done.get(timeout=60)
        desk.collector.finish(job, done)
        found.append((done.try_number, done.error))
    assert desk.done.empty()
    return found


@pytest.mark.parametrize("order", sorted(set(itertools.permutations([0, 0, 1, 1]))))
def test_ranks_may_be_at_different_tries_and_each_try_is_reported_once_for_what_they_said_of_it(
    desk: Desk, order: tuple[int, ...]
) -> None:
    """As their links tell an agent, each in its own order."""
    told: dict[int, list[SaveRequest | Skip]] = {
        rank: [
            Skip(step=1, tiers=("persistent",), reason=f"lost by {rank}"),
            replace(desk.capture(rank, 1, ("persistent",)), try_number=2),
        ]
        for rank in (0, 1)
    }
    for rank in order:
        said = told[rank].pop(0)
        if isinstance(said, Skip):
            desk.collector.skip(desk.ranks[rank], said)
        else:
            assert desk.collector.save(desk.ranks[rank], said) == []
    found = outcomes(desk, 2)
    assert sorted(error for _, error in found) == ["", found[0][1]]
    assert found[0][0] == 1
    assert sorted(found[0][1].split("; ")) == ["lost by 0", "lost by 1"]
    assert found[1] == (2, "")
    assert desk.complete("persistent") == [1]


@pytest.mark.parametrize("tier", BOTH)
def test_every_rank_hears_that_a_step_is_committed_also_of_a_try_that_comes_after(
    desk: Desk, tier: str
) -> None:
    for number in (1, 2):
        for rank in (0, 1):
            assert outcomes(desk, 0) == []
            save = replace(desk.capture(rank, 1, (tier,)), try_number=number)
            assert desk.collector.save(desk.ranks[rank], save) == []
        assert outcomes(desk, 1) == [(number, "")]
    # Without a capture, too: what is committed does not fail.
    for rank in (0, 1):
        skip = Skip(step=1, tiers=(tier,), reason="no slot", try_number=3)
        desk.collector.skip(desk.ranks[rank], skip)
    assert outcomes(desk, 1) == [(3, "")]
    late = replace(desk.capture(0, 1, (tier,)), try_number=2)
    (missed,) = desk.collector.save(desk.ranks[0], late)
    assert (missed.try_number, missed.error) == (2, "")
    assert desk.complete(tier) == [1]


def test_a_rank_that_asks_late_of_a_try_that_failed_hears_that_and_another_try_is_rescued_as_well(
    desk: Desk,
) -> None:
    (desk.root / "local").write_text("in the way")
    settings = replace(desk.ranks[0].settings, directory="")  # else it goes there
    desk.ranks = [replace(rank, settings=settings) for rank in desk.ranks]
    saves = [desk.capture(rank, 1, ("local",)) for rank in (0, 1)]
    desk.collector.commit_emergency(desk.ranks[0])
    ((number, why),) = outcomes(desk, 1)
    assert number == 1
    (missed,) = desk.collector.save(desk.ranks[1], saves[1])
    assert (missed.try_number, missed.error) == (1, why)
    (desk.root / "local").unlink()
    desk.collector.commit_emergency(desk.ranks[0])  # it had failed, and nobody asks for more
    assert outcomes(desk, 0) == []
    assert desk.collector.save(desk.ranks[0], replace(saves[0], try_number=2)) == []
    desk.collector.commit_emergency(desk.ranks[0])
    assert outcomes(desk, 1) == [(2, "")]


# --- two hosts ------------------------------------------------------------------------------------


def test_a_refusal_of_the_first_try_that_still_waits_on_one_host_does_not_refuse_the_second(
    tmp_path: Path,
) -> None:
    """The follower's tier is busy with step 1 while all refuse step 2, and while all try that again."""
    storage = LocalStorage(tmp_path / "persistent")
    refused = Skip(step=2, tiers=("persistent",), reason="no slot")
    with ExitStack() as stack:
        leader, follower = (
            stack.enter_context(closing(Desk(tmp_path, local_ranks=(rank,), host=f"h{rank}")))
            for rank in (0, 1)
        )
        follower.collector.save(follower.ranks[0], follower.capture(1, 1))
        assert follower.reports(1) == {(1, "local"): ""}
        for host in (follower, leader):  # the leader never heard of step 1
            host.collector.skip(host.ranks[0], refused)
            assert outcomes(host, 1) == [(1, "no slot")]
        for rank, host in enumerate((leader, follower)):
            save = replace(host.capture(rank, 2), try_number=2, patient=True)
            host.collector.save(host.ranks[0], save)
            assert host.reports(1) == {(2, "local"): ""}
        wait_until(
            lambda: (marker := try_read_marker(storage, 2)) and marker.state is MarkerState.WRITING,
            "the leader has not begun",
        )
        put_marker(storage, 1, Marker(state=MarkerState.FAILED, save_id=save_id_of("s", 1), reason="no more"))
        ((_, why), second) = outcomes(follower, 2)
        assert "no more" in why
        assert second == (2, "")
        assert outcomes(leader, 1) == [(2, "")]
        assert leader.complete("persistent") == [2]


def test_a_step_of_which_a_rank_says_nothing_fails_at_the_deadline_and_its_slots_are_given_back(
    desk: Desk,
) -> None:
    first, second = (
        replace(rank, settings=replace(rank.settings, save_timeout_s=limit_s))
        for rank, limit_s in zip(desk.ranks, (0.05, 60.0), strict=True)
    )
    for step in (1, 2):
        desk.collector.save(first, desk.capture(0, step))
    reports = desk.reports(4)
    assert reports.keys() == {(step, tier) for step in (1, 2) for tier in BOTH}
    assert all("rank 1 said nothing of it for 0.05 s" in error for error in reports.values())
    for step in (3, 4, 5):  # as many as there are slots
        desk.collector.save(second, desk.capture(1, step))
        desk.collector.save(first, desk.capture(0, step))
        assert set(desk.reports(2).values()) == {""}


@pytest.mark.parametrize("lost", ["rank", "host"])
def test_a_save_whose_rank_or_host_was_lost_holds_up_no_save_of_the_next_start(
    tmp_path: Path, lost: str
) -> None:
    """Of two hosts and three ranks: the last rank never has step 1, or its host is gone with its agent."""
    with ExitStack() as stack:
        leader, other = (
            stack.enter_context(closing(Desk(tmp_path, local_ranks=ranks, host=f"h{ranks[0]}", world_size=3)))
            for ranks in ((0,), (1, 2))
        )
        leader.collector.save(leader.ranks[0], leader.capture(0, 1, ("persistent",)))
        storage = LocalStorage(tmp_path / "persistent")
        wait_until(lambda: try_read_marker(storage, 1), "the leader has not begun")
        other.collector.save(other.ranks[0], other.capture(1, 1, ("persistent",)))
        leader.start_again("t")
        if lost == "rank":
            other.start_again("t")
        else:
            spare = Desk(tmp_path, local_ranks=(1, 2), host="spare", world_size=3, attempt_id="t")
            other = stack.enter_context(closing(spare))
        began = time.monotonic()
        for host in (leader, other):
            for rank in host.ranks:
                host.collector.save(rank, host.capture(rank.rank, 2, ("persistent",)))
        reports = leader.reports(2)
        assert (reports[2, "persistent"], other.reports(1)) == ("", {(2, "persistent"): ""})
        assert time.monotonic() - began < 20, "it waits for the time of a save"
        expected = "rank 1 could not write its part" if lost == "rank" else "ranks 1, 2 did not answer"
        assert expected in reports[1, "persistent"]
        assert leader.complete("persistent") == [2]
