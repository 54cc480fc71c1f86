# SPDX-License-Identifier: Apache-2.0
"""Processes that die at any point of a step, and what comes back of what they used: scenarios of a keeper."""

from __future__ import annotations

import json
from typing import Any

import pytest

from resiliency.data.dispatch.book import Book
from resiliency.data.dispatch.bookkeeper import Bookkeeper
from resiliency.data.dispatch.ranges import SampleRanges


class Process:
    """A client of a keeper; texts of refusals come as exceptions."""

    def __init__(self, keeper: Bookkeeper, name: str, attempt: int | None = None) -> None:
        self.keeper, self.name, self.life, self.seq = keeper, name, f"life {id(self)}", 0
        self.rest: list[Any] = []
        self.attempt = self.ask("join", attempt=attempt)["attempt"]

    def ask(self, op: str, **fields: object) -> dict[str, Any]:
        self.seq += 1
        request = {"op": op, "worker": self.name, "life": self.life, "seq": self.seq, **fields}
        answer = self.keeper.apply(json.loads(json.dumps(request)))[0]
        if "error" in answer:
            raise LookupError(f"{answer['error']}: {answer['text']} {answer['hint']}")
        return answer

    def take(self) -> list[Any]:
        found: list[Any] = self.ask("grant")["range"]
        return found

    def train(self, *steps: int) -> list[int]:
        """Ten samples in each of these steps; returns where they start."""
        starts = []
        for step in steps:
            start, stop, *more = self.rest or self.take()
            self.ask("done", range=[start, start + 10, *more], step=step)
            self.rest = [start + 10, stop, *more] if start + 10 < stop else []
            starts.append(start)
        return starts

    def commit(self, step: int) -> dict[str, Any]:
        self.ask("finish", step=step)
        return self.ask("commit", step=step)


@pytest.fixture
def keeper() -> Bookkeeper:
    return Bookkeeper(Book(SampleRanges(size=100, range_size=10, order="sequential")))


def restarted(keeper: Bookkeeper) -> Bookkeeper:
    """That of a server which goes on from a snapshot."""
    plain = json.loads(json.dumps(keeper.to_plain()))
    return Bookkeeper.of_plain(plain, keeper.book.source, keeper.book.failures.policy)


# -- a job that is started again in place


def test_a_job_killed_before_its_first_checkpoint_gets_all_its_data_again(keeper: Bookkeeper) -> None:
    assert Process(keeper, "rank0").train(1, 2) == [0, 10]
    keeper = restarted(keeper)
    assert Process(keeper, "rank0").train(1, 2, 3) == [0, 10, 20]


def test_a_job_of_several_ranks_gets_all_again_in_whatever_order_they_come_and_if_some_never_do(
    keeper: Bookkeeper,
) -> None:
    ranks = [Process(keeper, f"rank{number}") for number in range(3)]
    for step in (1, 2):
        for rank in ranks:
            rank.train(step)
    late = Process(keeper, "rank1")
    assert late.attempt == 1  # the others went on, so that it is the first of a new attempt
    first = Process(keeper, "rank0")
    assert first.attempt == 1
    assert late.train(1) + first.train(1) == [0, 60]  # what came back is joined
    with pytest.raises(
        LookupError, match=r"attempt 0 is over: attempt 1 has begun, as worker 'rank1' joined"
    ):
        ranks[2].take()


def test_ranks_that_joined_before_an_aborted_start_do_not_throw_each_other_out_for_ever(
    keeper: Bookkeeper,
) -> None:
    """If each rank that joins twice began an attempt, one of two ranks would always be of the one before."""
    Process(keeper, "rank0").ask("rollback", state=None)  # and the launcher gives up this start
    rank1 = Process(keeper, "rank1")
    rank1.ask("rollback", state=None)
    rank1.train(1)
    rank0 = Process(keeper, "rank0")
    rank0.ask("rollback", state=None)
    assert rank0.train(1) == [10]
    assert rank1.train(2) == [20]


@pytest.mark.parametrize("attempt", [None, 0], ids=["counted by the server", "the same number by hand"])
def test_a_restart_from_a_checkpoint_gets_what_was_used_above_it(
    keeper: Bookkeeper, attempt: int | None
) -> None:
    rank = Process(keeper, "rank0", attempt)
    rank.train(1)
    state = rank.commit(1)["state"]
    rank.train(2, 3)
    for _ in range(2):  # twice, with no commit in between
        rank = Process(keeper, "rank0", attempt)
        with pytest.raises(LookupError, match=r"did not say where its model is.*rollback"):
            rank.take()
        rank.ask("rollback", state=state)
        assert rank.train(2, 3) == [10, 20]
        keeper = restarted(keeper)


def test_another_number_of_ranks_and_other_names_go_on_from_a_checkpoint(keeper: Bookkeeper) -> None:
    ranks = [Process(keeper, f"pod-{number}") for number in range(3)]
    for rank in ranks:
        rank.train(1)
    state = [rank.commit(1) for rank in reversed(ranks)]  # the first ones wait for the others
    for step in (2, 3):
        for rank in ranks:
            rank.train(step)
    new = Process(keeper, "pod-x")
    with pytest.raises(LookupError, match=r"'pod-x' did not say where its model is, and step 2 is over"):
        new.take()
    new.ask("rollback", state=state[-1]["state"])
    assert new.train(2) == [30]
    other = Process(keeper, "pod-y")
    other.ask("rollback", state=state[-1]["state"])
    assert other.train(2) == [40]


def test_by_hand_an_attempt_that_went_on_is_not_gone_back_to(keeper: Bookkeeper) -> None:
    ranks = [Process(keeper, f"rank{number}", 5) for number in range(2)]
    for step in (1, 2):
        for rank in ranks:
            rank.train(step)
    again = Process(keeper, "rank0", 5)
    with pytest.raises(LookupError, match=r"attempt 5 went on from step -1 to step 1.*pass a higher number"):
        again.ask("rollback", state=None)
    Process(keeper, "rank1", 5)  # now no process is left that had the model
    again.ask("rollback", state=None)
    assert again.train(1, 2) == [0, 10]


def test_a_process_may_go_back_without_a_new_one_and_the_others_with_it(keeper: Bookkeeper) -> None:
    ranks = [Process(keeper, f"rank{number}") for number in range(2)]
    for step in (1, 2):
        for rank in ranks:
            rank.train(step)
    assert [rank.ask("rollback", state=None)["attempt"] for rank in ranks] == [1, 1]
    assert ranks[0].train(1) == [0]


def test_ranks_that_restored_different_checkpoints_are_told_both_steps(keeper: Bookkeeper) -> None:
    ranks = [Process(keeper, f"rank{number}") for number in range(2)]
    for rank in ranks:
        rank.train(1)
    ranks[0].ask("finish", step=1)
    state = ranks[1].commit(1)["state"]
    ranks = [Process(keeper, f"rank{number}") for number in range(2)]
    ranks[0].ask("rollback", state=None)
    ranks[1].ask("rollback", state=state)
    with pytest.raises(LookupError, match=r"attempt 2 has begun, as worker 'rank1' said rollback to step 1"):
        ranks[0].take()


def test_where_nothing_counts_by_steps_a_new_process_disturbs_nobody(keeper: Bookkeeper) -> None:
    workers = [Process(keeper, f"w{number}") for number in range(2)]
    held = workers[1].take()
    workers[0].ask("done", range=workers[0].take(), step=None)
    lost = workers[0].take()
    again = Process(keeper, "w0")
    assert again.attempt == 0
    assert again.take() == lost
    workers[1].ask("done", range=held, step=None)


# -- a replica that dies, while the others go on


def replicas(keeper: Bookkeeper) -> tuple[Process, Process]:
    return Process(keeper, "a", 0), Process(keeper, "b", 0)


def test_a_replica_that_dies_between_done_and_the_collective_has_its_samples_not_committed(
    keeper: Bookkeeper,
) -> None:
    a, b = replicas(keeper)
    assert a.train(1) + b.train(1) == [0, 10]
    waiting = a.commit(1)
    assert waiting == {"answer": "wait", "workers": ["b"]}
    keeper.apply({"op": "silent", "worker": "b"})
    assert keeper.take_returned()["b"][0].start == 10
    assert a.ask("commit", step=1)["state"]["free"] == [[10, 20, 0, ""]]
    assert a.train(2) == [10]
    # It wakes up, and its model has what comes again.
    for op, fields in (("grant", {}), ("finish", {"step": 1})):
        with pytest.raises(LookupError, match=r"StaleRange: worker 'b' was silent for too long while steps"):
            b.ask(op, **fields)


@pytest.mark.parametrize("how", ["the next step", "its own commit", "the end of its block"])
def test_a_commit_counts_what_a_replica_used_once_the_step_is_over_there(
    keeper: Bookkeeper, how: str
) -> None:
    a, b = replicas(keeper)
    a.train(1)
    b.train(1)
    assert a.commit(1)["answer"] == "wait"
    if how == "the next step":
        b.train(2)
    elif how == "its own commit":
        assert b.commit(1)["state"]["free"] == []
    else:
        b.ask("leave", finished=True)
    in_step_2 = [[20, 30, 0, ""]] if how == "the next step" else []
    assert a.ask("commit", step=1)["state"]["free"] == in_step_2
    b = Process(keeper, "b", 0)
    assert [part.start for part in keeper.take_returned().get("b", [])] == [part[0] for part in in_step_2]


def test_what_a_lost_replica_used_in_steps_that_are_over_stays_in_the_model_of_the_others(
    keeper: Bookkeeper,
) -> None:
    a, b = replicas(keeper)
    for step in (1, 2):
        a.train(step)
        b.train(step)
    b = Process(keeper, "b", 0)  # another process, which gets the model of the others
    assert [part.start for part in keeper.take_returned()["b"]] == [30]
    with pytest.raises(LookupError, match="did not say where its model is"):
        b.take()
    with pytest.raises(LookupError, match="did not say where its model is"):
        b.ask("finish", step=0)
    b.ask("finish", step=2)
    assert b.train(3) + a.train(3) == [30, 40]
    b.ask("finish", step=3)
    assert a.commit(3)["state"]["free"] == []


def test_a_late_done_of_a_step_that_is_over_elsewhere_is_refused(keeper: Bookkeeper) -> None:
    a, b = replicas(keeper)
    part = b.take()
    a.train(1, 2)
    with pytest.raises(LookupError, match=r"was used in step 1, and step 1 is over on worker 'a'\."):
        b.ask("done", range=part, step=1)
    b.ask("done", range=part, step=2)


def test_a_worker_that_closes_with_a_model_that_is_not_committed_makes_the_next_one_say_where_it_is(
    keeper: Bookkeeper,
) -> None:
    first = Process(keeper, "a")
    first.train(1)
    first.ask("leave", finished=True)
    second = Process(keeper, "a")  # the same process may go on with its model, or another with a new one
    with pytest.raises(LookupError, match="did not say where its model is"):
        second.take()
    second.ask("rollback", state=None)
    assert second.train(1) == [0]


def test_a_finished_range_stays_in_the_model_of_members_that_used_none_d21(keeper: Bookkeeper) -> None:
    a, b = replicas(keeper)
    b.train(1, 2)
    b.ask("leave", finished=True)  # the end of its block, after the collective of step 2
    assert keeper.take_returned() == {}
    assert a.commit(2)["state"]["free"] == []
    c = Process(keeper, "c", 0)
    c.ask("finish", step=2)
    a.train(3)
    a.ask("finish", step=3)
    keeper.apply({"op": "silent", "worker": "a"})
    assert keeper.take_returned() == {}
    keeper = restarted(keeper)
    Process(keeper, "c", 0)  # the last one that had it
    assert [part.start for part in keeper.take_returned()["c"]] == [20]


# -- workers that live, of which the server hears nothing


def test_all_ranks_of_an_outage_are_told_that_their_steps_come_back(keeper: Bookkeeper) -> None:
    """A commit of one of them would give a state that lacks what its model has."""
    ranks = [Process(keeper, f"rank{number}") for number in range(2)]
    for rank in ranks:
        rank.train(1)
    for rank in ranks:
        rank.ask("finish", step=1)
    for rank in ranks:
        keeper.apply({"op": "silent", "worker": rank.name})
    for rank in ranks:
        with pytest.raises(LookupError, match=r"was silent for too long while steps were not committed"):
            rank.commit(1)
    assert [rank.ask("rollback", state=None)["attempt"] for rank in ranks] == [0, 0]
    assert ranks[0].train(1) == [0]


def test_an_outage_after_a_commit_costs_only_what_was_held(keeper: Bookkeeper) -> None:
    ranks = [Process(keeper, f"rank{number}") for number in range(2)]
    for rank in ranks:
        rank.train(1)
    for rank in reversed(ranks):
        rank.commit(1)
    held = ranks[1].take()
    for rank in ranks:
        keeper.apply({"op": "silent", "worker": rank.name})
    with pytest.raises(LookupError, match="does not hold range"):
        ranks[1].ask("done", range=held, step=2)
    keeper = restarted(keeper)
    for rank in ranks:
        rank.keeper = keeper
    assert ranks[0].train(2) + ranks[1].train(2) == [20, 30]


def test_a_new_replica_that_is_silent_has_still_to_say_where_its_model_is(keeper: Bookkeeper) -> None:
    a, b = replicas(keeper)
    for step in (1, 2):
        a.train(step)
        b.train(step)
    b = Process(keeper, "b", 0)
    keeper.apply({"op": "silent", "worker": "b"})
    with pytest.raises(LookupError, match="worker 'b' did not say where its model is"):
        b.take()
    b.ask("finish", step=2)
    assert b.take()


# -- steps from 0, and wrong ones


def test_steps_from_0_are_gone_back_from_like_others(keeper: Bookkeeper) -> None:
    ranks = [Process(keeper, f"rank{number}") for number in range(2)]
    for rank in ranks:
        rank.train(0)
    for rank in reversed(ranks):
        rank.commit(0)  # and they are killed before the checkpoint is written
    again = []
    for rank in ranks:
        again.append(Process(keeper, rank.name))
        again[-1].ask("rollback", state=None)
    assert again[0].train(0) + again[1].train(0) == [0, 10]


def test_a_model_that_is_saved_before_its_first_step_has_not_gone_on(keeper: Bookkeeper) -> None:
    ranks = [Process(keeper, f"rank{number}") for number in range(2)]
    ranks[0].commit(0)
    ranks[0].train(1)
    assert ranks[1].ask("rollback", state=None)["attempt"] == 0  # a late rank
    assert ranks[1].train(1) == [10]


def test_a_job_that_counts_from_0_uses_step_0_after_a_save_without_a_range(keeper: Bookkeeper) -> None:
    rank = Process(keeper, "rank0")
    rank.ask("rollback", state=None)
    rank.ask("commit", step=0)
    rank.ask("rollback", state=None)
    assert rank.train(0) == [0]
    assert rank.commit(0)["state"]["free"] == []


def test_ranks_that_count_from_0_use_step_0_after_one_without_a_range(keeper: Bookkeeper) -> None:
    ranks = [Process(keeper, f"rank{number}") for number in range(2)]
    for rank in ranks:
        rank.ask("rollback", state=None)
        rank.ask("finish", step=0)
    used = []
    for rank in ranks:  # one after the other
        rank.ask("rollback", state=None)
        used += rank.train(0)
    assert used == [0, 10]


@pytest.mark.parametrize("op", ["finish", "commit"])
def test_a_worker_that_counts_other_steps_is_named(keeper: Bookkeeper, op: str) -> None:
    a, b = replicas(keeper)
    part = a.take()
    b.ask("finish", step=4000)
    if op == "commit":
        b.ask("commit", step=4000)
    said = {"finish": "over on worker 'b'", "commit": "committed without it, as worker 'b' said"}
    with pytest.raises(LookupError, match=rf"was used in step 1, and step 4000 is {said[op]}"):
        a.ask("done", range=part, step=1)


# -- jobs that come back with other ranks, or in part in their processes


def test_a_new_rank_that_joins_first_waits_for_nothing_once_the_old_model_is_gone(keeper: Bookkeeper) -> None:
    Process(keeper, "rank0").train(1, 2)
    rank1, rank0 = Process(keeper, "rank1"), Process(keeper, "rank0")
    assert rank1.train(1) + rank0.train(1) == [0, 20]


def test_a_rank_that_goes_back_in_its_process_throws_out_no_new_process_of_another(
    keeper: Bookkeeper,
) -> None:
    ranks = [Process(keeper, f"rank{number}") for number in range(2)]
    for rank in ranks:
        rank.train(1)
    for rank in reversed(ranks):
        state = rank.commit(1)
    ranks[0].train(2)
    ranks[1].take()  # and dies
    rank1 = Process(keeper, "rank1")
    rank1.ask("rollback", state=state["state"])
    ranks[0].ask("rollback", state=state["state"])
    rank1.take()  # and dies again
    rank1 = Process(keeper, "rank1")
    rank1.ask("rollback", state=state["state"])
    ranks[0].take()
    ranks[0].ask("rollback", state=state["state"])
    assert rank1.train(2) + ranks[0].train(2) == [20, 30]


# -- what the journal holds


def test_states_that_each_rank_names_and_gets_are_kept_once(keeper: Bookkeeper) -> None:
    worlds = 50
    source = SampleRanges(size=10_000, range_size=10, order="sequential")
    keeper = Bookkeeper(Book(source))
    ranks = [Process(keeper, f"rank{number}") for number in range(worlds)]
    for rank in ranks:
        rank.train(1)
    holes = [Process(keeper, f"other{number}", 0) for number in range(100)]
    for number, other in enumerate(holes):
        other.ask("finish", step=1)
        part = other.take()
        if number % 2:
            other.ask("done", range=part, step=2)
    for rank in [*ranks, *holes]:
        rank.ask("finish", step=2)
    answers = [rank.ask("commit", step=2) for rank in ranks]
    size = len(json.dumps(answers[0]["state"]))
    assert size > 1000
    assert all(answer == answers[0] for answer in answers)
    assert len(json.dumps(keeper.to_plain())) < 10 * size + 500 * worlds
    ranks = [Process(keeper, f"rank{number}", 1) for number in range(worlds)]
    entries = []
    for rank in ranks:
        request = {"op": "rollback", "worker": rank.name, "life": rank.life, "seq": 9}
        entries.append(keeper.apply({**request, "state": answers[0]["state"]})[1])
    assert len(json.dumps(entries)) < size + 200 * worlds
    again = Bookkeeper.of_plain(keeper.to_plain(), source, keeper.book.failures.policy)
    assert again.to_plain() == keeper.to_plain()
