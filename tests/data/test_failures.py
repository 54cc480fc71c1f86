# SPDX-License-Identifier: Apache-2.0
"""Ranges that fail: whether the range is bad, or the worker."""

from __future__ import annotations

from collections import Counter

import pytest

from resiliency.data.dispatch.book import Answer, Book
from resiliency.data.dispatch.failures import BrokenWorker, PoisonedRange, PoisonPolicy
from resiliency.data.dispatch.ranges import SampleRange, SampleRanges


def book_of(ranges: int, *workers: str, **policy: int) -> Book:
    source = SampleRanges(size=10 * ranges, range_size=10, order="sequential")
    book = Book(source, PoisonPolicy(**policy))  # type: ignore[arg-type]
    for worker in workers:
        book.join(worker)
    return book


def fail_until_it_waits(book: Book, worker: str) -> int:
    """How often a worker failed ranges before it got no more."""
    for count in range(1000):
        part = book.grant(worker, 0)
        if not isinstance(part, SampleRange):
            assert part is Answer.WAIT
            return count
        book.failed(worker, 0, part, "OSError: /data is not mounted")
    raise AssertionError("it gets ranges for ever")


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("broken", [1, 3])
def test_broken_workers_beside_a_good_one_cost_no_range_and_are_refused_by_name(
    skip: bool, broken: int
) -> None:
    """Three of them are the ranks of one host: they fail before the good one has used its first range."""
    names = [f"broken{number}" for number in range(broken)]
    book = book_of(100, "good", *names, skip=skip)
    used = []
    held = book.grant("good", 0)
    # Each holds a range when the disk of its host is lost, or asks for its first one.
    firsts = [book.grant(name, 0) for name in names]
    for name, part in zip(names, firsts, strict=True):
        assert isinstance(part, SampleRange)
        book.failed(name, 0, part, "OSError: /data is not mounted")
    assert sum(fail_until_it_waits(book, name) for name in names) < 20 * broken
    while isinstance(held, SampleRange):
        book.done("good", 0, held)
        used.append(held.start)
        held = book.grant("good", 0)
    assert held is Answer.END
    assert sorted(used) == list(range(0, 1000, 10))
    assert book.skipped == []
    for name in names:
        with pytest.raises(
            BrokenWorker, match=rf"'{name}' failed \d+ ranges in a row, and other workers used"
        ):
            book.grant(name, 0)
    book.join(names[0])  # it was repaired, and started again
    assert book.grant(names[0], 0) is Answer.END


def test_a_range_that_failed_goes_to_another_worker_and_comes_back_if_none_is_left() -> None:
    book = book_of(2, "a", "b", tries=4)
    part = book.grant("a", 0)
    assert isinstance(part, SampleRange)
    book.failed("a", 0, part, "bad")
    assert book.grant("a", 0) == SampleRange(10, 20)
    assert book.grant("b", 0) == part
    book.failed("b", 0, part, "bad")
    assert book.grant("a", 0) == part  # all failed it: any may try again
    book.failed("a", 0, part, "bad")
    book.leave("b")
    assert book.grant("a", 0) == part
    book.failed("a", 0, part, "very bad")
    with pytest.raises(PoisonedRange, match=r"from 0 in epoch 0 failed 4 times: very bad \(workers a, b\)"):
        book.grant("a", 0)
    book.join("c")  # which has not tried
    assert book.grant("c", 0) == part


def test_a_range_that_healthy_workers_fail_is_skipped_after_as_many_as_the_policy_says() -> None:
    workers = [f"w{number}" for number in range(9)]
    book = book_of(9, *workers, skip=True)
    tries: Counter[int] = Counter()
    for _ in range(3):
        for worker in workers:
            part = book.grant(worker, 0)
            if isinstance(part, SampleRange):
                tries[part.start] += 1
                if part.start == 30:
                    book.failed(worker, 0, part, "sample 7 cannot be decoded")
                else:
                    book.done(worker, 0, part)
    assert [part.start for part in book.skipped] == [30]
    assert tries[30] == 3


def test_where_all_workers_fail_everything_the_job_ends_and_the_data_are_not_thrown_away() -> None:
    """Such as a shared file system that is away: with `skip` all of it would be skipped within a second."""
    book = book_of(1000, "a", "b", skip=True)

    def fail_all() -> None:
        for number in range(100_000):
            part = book.grant("ab"[number % 2], 0)
            if isinstance(part, SampleRange):
                book.failed("ab"[number % 2], 0, part, "OSError: away")

    with pytest.raises(PoisonedRange, match=r"failed 3 times: .*; the 5 bad ranges before it were skipped"):
        fail_all()
    assert len(book.skipped) == 5
    book.new_attempt(1)  # it is back
    book.join("a")
    assert isinstance(book.grant("a", 1), SampleRange)


def test_a_worker_that_takes_no_ranges_is_not_waited_for() -> None:
    book = book_of(1, "a", "feeder")
    part = book.grant("a", 0)
    assert isinstance(part, SampleRange)
    book.failed("a", 0, part, "bad")
    assert book.grant("a", 0) is Answer.WAIT  # the other may try
    assert book.failures.awaited() == {"feeder"}
    book.failures.remove_reader("feeder")  # it asked for nothing for a while
    assert book.grant("a", 0) == part


def test_a_worker_that_was_started_again_tries_what_the_process_before_failed() -> None:
    book = book_of(2, "repaired", "b")
    parts = [book.grant("repaired", 0), book.grant("b", 0)]
    assert isinstance(parts[0], SampleRange)
    book.failed("repaired", 0, parts[0], "OSError: /data is not mounted")
    assert book.grant("repaired", 0) is Answer.WAIT  # b has not tried it
    book.join("repaired")
    assert book.grant("repaired", 0) == parts[0]
