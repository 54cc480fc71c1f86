# SPDX-License-Identifier: Apache-2.0
"""The book of ranges: each position counts once in the model, whatever is lost on the way."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from resiliency.data.dispatch.book import Answer, Book, StaleRange
from resiliency.data.dispatch.bookkeeper import Bookkeeper
from resiliency.data.dispatch.failures import PoisonedRange, PoisonPolicy
from resiliency.data.dispatch.journal import Journal, decoded, encoded
from resiliency.data.dispatch.ranges import (
    PartitionRanges,
    RangeSource,
    SampleRange,
    SampleRanges,
    TextRanges,
    coalesced,
)
from resiliency.errors import ConfigError, DataError
from tests.data.book_histories import history


def samples(size: int = 20, range_size: int = 10, **options: Any) -> SampleRanges:
    return SampleRanges(size=size, range_size=range_size, **{"order": "sequential", **options})


def granted(book: Book, worker: str = "a", attempt: int = 0) -> SampleRange:
    part = book.grant(worker, attempt)
    assert isinstance(part, SampleRange)
    return part


def committed(book: Book, step: int, attempt: int) -> Any:
    """The state of a step that is over on all workers."""
    for worker in book.unfinished(step, attempt):
        book.finish_step(worker, attempt, step)
    return book.commit(step, attempt)


def all_of(source: RangeSource) -> list[SampleRange]:
    found, cursor = [], {}
    while (following := source.next_range(cursor)) is not None:
        part, cursor = following
        found.append(part)
    return found


@pytest.mark.parametrize("first", range(0, 160, 80))
def test_any_history_has_each_position_once_in_the_model_d49_d50_d51_d52(first: int) -> None:
    """Workers and ranks that die at any point of a step, are broken, sleep and come back, and a server that
    is killed between any two writes of its journal; see `tests.data.book_histories`, which runs more."""
    for seed in range(first, first + 80):
        history(seed).run()


# -- sources


@pytest.mark.parametrize("order", ["sequential", "ranges", "samples"])
def test_ranges_of_samples_cover_each_epoch_in_an_order_of_its_seed_d53(order: str) -> None:
    source = samples(103, 10, order=order, epochs=2, seed=3)
    found = all_of(source)
    assert found == all_of(samples(103, 10, order=order, epochs=2, seed=3))
    for epoch in range(2):
        assert coalesced(part for part in found if part.epoch == epoch) == [SampleRange(0, 103, epoch)]
    starts = [[part.start for part in found if part.epoch == epoch] for epoch in range(2)]
    if order == "ranges":
        assert starts[0] != sorted(starts[0])
        assert starts[0] != starts[1]
        assert found != all_of(samples(103, 10, order=order, epochs=2, seed=4))
    else:
        assert starts[0] == starts[1] == sorted(starts[0])


def test_ranges_of_files_cover_each_byte_once_and_empty_files_none() -> None:
    files = (("a", 25), ("empty", 0), ("b", 10), ("end", 0))
    found = all_of(TextRanges(files=files, range_bytes=10))
    assert coalesced(found) == [SampleRange(0, 25, 0, "a"), SampleRange(0, 10, 0, "b")]
    assert len(found) == 4


def test_partitions_are_read_in_turn_as_they_grow_and_end_when_they_are_closed_d56() -> None:
    book = Book(PartitionRanges(range_size=10))
    assert book.grant("a", 0) is Answer.WAIT
    book.extend({"x": 15, "y": 5})
    parts = [granted(book) for _ in range(3)]
    assert [str(part) for part in parts] == [
        "0..10 of x in epoch 0",
        "0..5 of y in epoch 0",
        "10..15 of x in epoch 0",
    ]
    for part in parts:
        book.done("a", 0, part, step=1)
    state = committed(book, 1, 0)
    assert book.grant("a", 0) is Answer.WAIT
    book.extend({"x": 20})
    # The state is a copy: it is not moved by what came after it.
    assert state["cursor"] == {"x": 15, "y": 5}
    with pytest.raises(DataError, match="partition 'x' reaches 3, and reached 20 before"):
        book.extend({"x": 3})
    last = granted(book)
    book.extend({}, closed=True)
    assert book.grant("b", 0) is Answer.WAIT  # what is held may come back
    book.done("a", 0, last, step=2)
    assert book.grant("b", 0) is Answer.END
    with pytest.raises(ConfigError, match="the end of partition 'x' is None"):
        book.extend({"x": None})  # type: ignore[dict-item]
    book.rollback(1, state)
    assert granted(book, attempt=1) == last  # once, not with what was granted before
    with pytest.raises(ConfigError, match="SampleRanges has no partitions"):
        Book(samples()).extend({"x": 1})


# -- what counts


def test_a_range_counts_in_the_checkpoint_of_the_step_that_used_it_and_of_later_ones() -> None:
    book = Book(samples(30))
    first, second = granted(book), granted(book)
    book.done("a", 0, first, step=1)
    book.done("a", 0, second, step=2)
    assert committed(book, 1, 0)["free"] == [second.to_plain()]
    assert committed(book, 2, 0)["free"] == []


def test_a_model_that_goes_back_gets_again_what_it_lacks_and_nothing_else_d52() -> None:
    book = Book(samples(30))
    first, second, third = (granted(book) for _ in range(3))
    book.done("a", 0, first, step=1)
    state = json.loads(json.dumps(committed(book, 1, 0)))
    book.done("a", 0, second, step=2)
    later = committed(book, 2, 0)
    book.done("a", 0, third, step=3)
    book.rollback(1, state)
    assert book.grant("b", 1) == SampleRange(10, 30)  # neighbours are joined
    assert book.grant("b", 1) is Answer.WAIT
    # And from one that is of another book's life altogether.
    fresh = Book(samples(30))
    fresh.rollback(0, later)
    assert fresh.grant("b", 0) == third


def test_a_job_that_starts_from_scratch_before_its_first_checkpoint_gets_all_again_d52() -> None:
    book = Book(samples())
    book.done("a", 0, granted(book), step=1)
    committed(book, 1, 0)  # its checkpoint was never finished
    book.new_attempt(1)
    with pytest.raises(ConfigError, match=r"attempt 1 did not say where its model is.*rollback"):
        book.grant("a", 1)
    with pytest.raises(ConfigError, match="attempt 1 did not say where its model is"):
        committed(book, 2, 1)
    book.rollback(1, None)
    book.rollback(1, None)  # the other ranks
    assert [granted(book, attempt=1).start for _ in range(2)] == [0, 10]
    book.rollback(1, None)  # a late one takes nothing away
    assert book.grant("a", 1) is Answer.WAIT


def test_ranks_that_restored_different_checkpoints_are_refused_with_both_steps() -> None:
    book = Book(samples())
    states = [committed(book, step, 0) for step in (3, 5)]
    book.rollback(1, states[0])
    with pytest.raises(ConfigError, match="attempt 1 is at step 3, and step 5 was named"):
        book.rollback(1, states[1])
    book.rollback(2, states[1])
    with pytest.raises(StaleRange, match="attempt 1 is over"):
        book.rollback(1, states[0])


@pytest.mark.parametrize("from_scratch", [True, False])
def test_a_model_that_goes_back_without_a_new_attempt_is_refused_and_loses_nothing(
    from_scratch: bool,
) -> None:
    book = Book(samples(40))
    state = None
    if not from_scratch:
        book.done("a", 0, granted(book), step=1)
        state = committed(book, 1, 0)
        book.rollback(1, state)
    attempt = book.attempt
    lost = granted(book, attempt=attempt)
    book.done("a", attempt, lost, step=2)
    book.rollback(attempt, state)  # a late rank, before the collective that ends step 2
    committed(book, 2, attempt)
    with pytest.raises(ConfigError, match=r"went on from step -?1 to step 2, and step -?1 was named again"):
        book.rollback(attempt, state)
    book.rollback(attempt + 1, state)
    assert granted(book, attempt=attempt + 1).start == lost.start


def test_a_worker_that_names_the_step_again_gives_up_what_it_took_since_and_a_late_one_nothing() -> None:
    book = Book(samples(40))
    book.done("a", 0, granted(book), step=1)
    state = committed(book, 1, 0)
    book.rollback(1, state, "a")
    lost = granted(book, attempt=1)
    book.done("a", 1, lost, step=2)
    again = Book.of_plain(book.to_plain(), samples(40))
    again.rollback(1, state, "b")  # a late rank
    granted(again, "b", 1)
    assert again.rollback(1, state, "a") == [lost]
    assert granted(again, "a", 1) == lost
    again.rollback(2, state, "a")
    assert granted(again, attempt=2).start == lost.start


def test_a_step_whose_state_is_kept_is_gone_back_to_by_its_number() -> None:
    book = Book(samples(40))
    for step in range(3):
        book.done("a", 0, granted(book), step=step)
        committed(book, step, 0)
    book.rollback_to(1, 1)
    assert granted(book, attempt=1).start == 20
    with pytest.raises(ConfigError, match=r"state of step 2 is not kept; kept are steps \[0, 1\]"):
        book.rollback_to(2, 2)


def test_what_is_said_after_the_commit_of_its_step_is_refused_and_not_counted_twice() -> None:
    book = Book(samples())
    part = granted(book)
    committed(book, 4, 0)
    with pytest.raises(ConfigError, match=r"was used in step 4, and step 4 is committed without it"):
        book.done("a", 0, part, step=4)
    book.done("a", 0, part, step=5)
    with pytest.raises(ConfigError, match="step 3 cannot be committed after step 4"):
        committed(book, 3, 0)


def test_without_a_model_a_range_counts_at_once_and_outlives_attempts() -> None:
    book = Book(samples())
    book.done("a", 0, granted(book))
    granted(book)
    book.new_attempt(1)
    assert granted(book, attempt=1).start == 10
    assert book.grant("a", 1) is Answer.WAIT


def test_the_first_part_of_a_range_may_be_done_before_the_rest() -> None:
    book = Book(samples())
    part = granted(book)
    book.done("a", 0, part.first(4), step=1)
    assert committed(book, 1, 0)["free"] == [[4, 10, 0, ""]]
    with pytest.raises(StaleRange):
        book.done("a", 0, part, step=2)  # 0 to 4 would count twice
    book.done("a", 0, SampleRange(4, 10), step=2)
    assert committed(book, 2, 0)["free"] == []


# -- who holds what


def test_a_new_attempt_frees_at_once_what_the_one_before_held_d50() -> None:
    book = Book(samples())
    part = granted(book, "a")
    book.new_attempt(1)
    assert granted(book, "b", 1) == part  # and it comes first
    with pytest.raises(StaleRange, match="attempt 0 is over: attempt 1 has begun"):
        book.done("a", 0, part)
    with pytest.raises(ConfigError, match="attempt 2 has not begun"):
        book.grant("a", 2)


def test_while_others_hold_ranges_the_answer_is_wait_and_never_end_d51() -> None:
    book = Book(samples(10))
    part = granted(book, "a")
    assert book.grant("b", 0) is Answer.WAIT
    book.leave("a")  # it died
    assert granted(book, "b") == part
    with pytest.raises(StaleRange, match=r"'a' does not hold range 0\.\.10 in epoch 0"):
        book.done("a", 0, part)
    book.done("b", 0, part)
    assert book.grant("b", 0) is Answer.END


def test_any_number_of_readers_is_told_the_end_d55() -> None:
    book = Book(samples(10))
    book.done("a", 0, granted(book))
    assert {book.grant(f"reader {number}", 0) for number in range(1000)} == {Answer.END}


def test_an_empty_source_ends_at_once() -> None:
    assert Book(samples(0)).grant("a", 0) is Answer.END


# -- ranges that cannot be used


def test_a_range_that_fails_too_often_stops_the_job_by_name_and_is_never_dropped_d49() -> None:
    book = Book(TextRanges(files=(("bad.txt", 10),), range_bytes=10), PoisonPolicy(tries=2))
    for _ in range(3):  # the loss of a worker is no failure of its range
        granted(book)
        book.leave("a")
    book.failed("a", 0, granted(book), "line 7 is no JSON")
    book.failed("a", 0, granted(book), "line 7 is no JSON")
    with pytest.raises(
        PoisonedRange, match=r"from 0 of bad.txt in epoch 0 failed 2 times: line 7 is no JSON"
    ):
        book.grant("b", 0)
    book.new_attempt(1)  # with repaired data
    assert granted(book, attempt=1) == SampleRange(0, 10, 0, "bad.txt")


def test_by_policy_it_is_skipped_counted_and_stays_so_in_the_checkpoint_d49() -> None:
    book = Book(samples(), PoisonPolicy(tries=1, skip=True))
    bad = granted(book)
    book.failed("a", 0, bad, "cannot be decoded")
    book.done("a", 0, granted(book), step=1)
    assert book.skipped == [bad]
    state = committed(book, 1, 0)
    book.rollback(1, state)
    assert book.grant("a", 1) is Answer.END
    assert book.skipped == [bad]
    book.rollback(2, None)
    assert book.skipped == []


# -- what is refused


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"version": 2}, "has version 2, and this release reads version 1"),
        ({"source": None}, "has version 1"),
        ({"cursor": {"ranges": -1}}, "the cursor is -1"),
        ({"cursor": [3]}, r"is not whole: TypeError"),
        ({"free": [[3, 3, 0, ""]]}, "a range from 3 to 3 is empty"),
        ({"free": [[0, 3, 0]]}, r"is no range"),
        ({"free": 7}, "is not whole"),
        ({"step": "5"}, "step is '5'"),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(change: dict[str, object], text: str) -> None:
    book = Book(samples())
    state = committed(book, 1, 0)
    before = json.dumps(book.to_plain())
    with pytest.raises(ConfigError, match=text):
        book.rollback(1, state | change)
    assert json.dumps(book.to_plain()) == before


def test_a_state_of_other_ranges_is_refused_with_both_values() -> None:
    state = committed(Book(samples(20, 10, seed=1)), 1, 0)
    with pytest.raises(ConfigError, match="seed 1 in the state and 2 here; size 20 in the state and 30 here"):
        Book(samples(30, 10, seed=2)).rollback(1, state)
    with pytest.raises(ConfigError, match="'samples' in the state and 'partitions' here"):
        Book(PartitionRanges(range_size=10)).rollback(1, state)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: samples(range_size=0), "size of a range is 0"),
        (lambda: samples(order="random"), "no order 'random'; choose sequential, ranges or samples"),
        (lambda: TextRanges(files=(("a", 1), ("a", 2)), range_bytes=1), "a file is named twice"),
        (lambda: PartitionRanges(range_size=1, stops={"a": -1}), "the end of partition 'a' is -1"),
        (lambda: PoisonPolicy(tries=0), "tries is 0"),
        (lambda: SampleRange(0, True), "stop is True"),
    ],
)
def test_what_cannot_work_is_refused(make: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make()


# -- requests and their journal


def joined(keeper: Bookkeeper, worker: str, life: str, **more: object) -> dict[str, object]:
    request = {"op": "join", "worker": worker, "life": life, "attempt": 0, **more}
    return keeper.apply(request)[0]


def test_a_request_that_comes_again_has_the_same_answer_and_no_effect() -> None:
    keeper = Bookkeeper(Book(samples()))
    assert joined(keeper, "a", "1") == {"answer": "welcome", "attempt": 0}
    me = {"worker": "a", "life": "1", "attempt": 0}
    grant = {"op": "grant", "seq": 1, **me}
    first = keeper.apply(grant)
    assert first[1] == grant  # is written into the journal
    assert keeper.apply(grant) == (first[0], None)
    assert len(keeper.book.held) == 1
    done = {"op": "done", "seq": 2, "range": first[0]["range"], "step": None, **me}
    assert keeper.apply(done) == ({"answer": "ok"}, done)
    assert keeper.apply(done) == ({"answer": "ok"}, None)
    assert "comes after request 2" in str(keeper.apply(grant)[0]["text"])


def test_a_process_that_was_replaced_is_refused_when_it_wakes_up() -> None:
    keeper = Bookkeeper(Book(samples()))
    joined(keeper, "a", "old")
    granted_to_old = keeper.apply({"op": "grant", "seq": 1, "worker": "a", "life": "old", "attempt": 0})[0]
    joined(keeper, "a", "new")
    assert not keeper.book.held
    done = {"op": "done", "seq": 2, "worker": "a", "life": "old", "attempt": 0}
    assert keeper.apply(done | {"range": granted_to_old["range"]})[0]["error"] == "StaleRange"
    assert joined(keeper, "a", "old", again=True)["error"] == "StaleRange"


@pytest.mark.parametrize(
    "request_",
    [
        {},
        {"op": "grunt"},
        {"op": ["grant"]},
        {"op": "grant"},
        {"op": "grant", "seq": "1"},
        {"op": "done", "seq": 1, "attempt": 0, "range": [0, "x", 0, ""]},
        {"op": "done", "seq": 1, "attempt": 0, "range": [0, 10, 0, ""], "step": -4},
        {"op": "done", "seq": 1, "attempt": 0, "range": {"start": 0}},
        {"op": "failed", "seq": 1, "attempt": 0, "range": [0, 10, 0, ""], "reason": 7},
        {"op": "commit", "seq": 1, "attempt": 0, "step": 1.5},
        {"op": "rollback", "seq": 1, "attempt": 0, "state": [1]},
        {"op": "extend", "seq": 1, "attempt": 0, "stops": 3},
        {"op": "join", "attempt": 0, "life": ""},
        {"op": "join", "attempt": -1, "life": "x"},
        {"op": "join", "attempt": 2**32, "life": "x"},
    ],
)
def test_a_bad_request_is_refused_with_a_text_and_changes_nothing(request_: dict[str, object]) -> None:
    keeper = Bookkeeper(Book(samples()))
    joined(keeper, "a", "1")
    before = json.dumps(keeper.to_plain())
    answer, changed = keeper.apply({"worker": "a", "life": "1", **request_})
    assert answer["error"]
    assert answer["text"]
    assert not changed
    assert json.dumps(keeper.to_plain()) == before


def test_a_journal_that_is_cut_anywhere_holds_what_was_durable_before(tmp_path: Path) -> None:
    lines = [encoded([{"number": number}, {"also": number}]) for number in range(4)]
    ends = [0]
    for line in lines:
        ends.append(ends[-1] + len(line))
    data = b"".join(lines)
    for cut in range(ends[1]):
        with pytest.raises(DataError, match="journal is damaged: its first line is not whole"):
            decoded(data[:cut])
    for cut in range(ends[1], len(data) + 1):
        entries, length = decoded(data[:cut])
        whole = max(number for number, end in enumerate(ends) if end <= cut)
        assert length == ends[whole]
        assert entries == [entry for n in range(whole) for entry in ({"number": n}, {"also": n})]
    for begin, end in list(pairwise(ends))[:-1]:
        middle = (begin + end) // 2
        with pytest.raises(DataError, match="journal is damaged"):
            decoded(data[:middle] + b"?" + data[middle + 1 :])
    path = tmp_path / "book.journal"
    path.write_bytes(data[:-3])
    journal = Journal(tmp_path)
    assert len(journal.entries) == 6
    with pytest.raises(ConfigError, match="another process keeps the journal"):
        Journal(tmp_path)
    journal.append([{"number": 9}])
    journal.close()
    assert decoded(path.read_bytes())[0][-1] == {"number": 9}
