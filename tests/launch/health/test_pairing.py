# SPDX-License-Identifier: Apache-2.0
"""Group testing over pairs: every broken host and link is found, soon, and no other host is accused."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterator
from itertools import combinations
from statistics import median

import pytest

from resiliency.launch.health.pairing import Pair, Pairing
from resiliency.launch.health.scores import HostHealth


def hosts(count: int) -> tuple[str, ...]:
    return tuple(f"h{number:02}" for number in range(count))


def run(names: tuple[str, ...], faulty: Collection[str], links: Collection[Pair] = ()) -> tuple[Pairing, int]:
    """The end of a check, and its rounds; each must be of disjoint pairs that were not tested before."""
    pairing, rounds = Pairing(hosts=names), 0
    while pairs := pairing.next_round():
        named = [host for pair in pairs for host in pair]
        assert len(set(named)) == len(named)
        assert not set(pairs) & (pairing.passed | pairing.failed)
        works = {pair: not set(pair) & set(faulty) and pair not in links for pair in pairs}
        pairing, rounds = pairing.with_results(works), rounds + 1
    return pairing, rounds


def fault_sets(count: int, most: int, draws: int) -> Iterator[tuple[str, ...]]:
    """All sets up to `most` hosts where they are few, else as many draws of each size."""
    names, rng = hosts(count), random.Random(count)  # noqa: S311
    for size in range(most + 1):
        if math.comb(count, size) <= draws:
            yield from combinations(names, size)
        else:
            yield from (tuple(rng.sample(names, size)) for _ in range(draws))


@pytest.mark.parametrize("count", [3, 4, 5, 7, 8, 13, 16, 31, 32, 64])
def test_up_to_a_quarter_of_faulty_hosts_are_found_in_two_rounds_and_in_three_where_two_of_them_met(
    count: int,
) -> None:
    names = hosts(count)
    for faulty in fault_sets(count, count // 4, 40):
        pairing, rounds = run(names, faulty)
        assert (pairing.faulty, pairing.undecided, pairing.broken_links) == (tuple(sorted(faulty)), (), ())
        met = any({a, b} <= set(faulty) for a, b in zip(names[::2], names[1::2], strict=False))
        assert rounds <= (2 if count % 2 == 0 and not met else 3), faulty


@pytest.mark.parametrize("count", [3, 5, 6, 8, 15, 16, 33, 64])
def test_below_half_all_are_decided_in_few_rounds(count: int) -> None:
    names, taken = hosts(count), []
    for faulty in fault_sets(count, (count - 1) // 2, 24):
        pairing, rounds = run(names, faulty)
        assert (pairing.faulty, pairing.undecided) == (tuple(sorted(faulty)), ())
        if len(faulty) == (count - 1) // 2:
            taken.append(rounds)
    assert median(taken) <= math.log2(count) + 2


def test_no_healthy_host_is_accused_whatever_else_is_broken() -> None:
    """Any number of faulty hosts, and broken links, at most one at each healthy host."""
    rng = random.Random(1)  # noqa: S311
    found = 0
    for _ in range(800):
        names = hosts(rng.randint(2, 24))
        faulty = set(rng.sample(names, rng.randint(0, len(names))))
        good = [name for name in names if name not in faulty]
        rng.shuffle(good)
        links = {
            (min(pair), max(pair))
            for pair in zip(good[::2], good[1::2], strict=False)
            if rng.random() < rng.choice([0.1, 0.6])
        }
        pairing, _ = run(names, faulty, links)
        assert set(pairing.faulty) <= faulty
        assert set(pairing.proven) <= set(good)
        assert set(pairing.broken_links) <= links
        found += len(pairing.broken_links)
    assert found > 40


@pytest.mark.parametrize("count", [4, 7, 32])
def test_a_broken_link_is_named_as_the_link_and_its_hosts_are_good(count: int) -> None:
    names = hosts(count)
    for link in zip(names[::2], names[1::2], strict=False):
        pairing, rounds = run(names, (), [link])
        assert (pairing.broken_links, pairing.faulty, pairing.undecided) == ((link,), (), ())
        assert rounds <= 3


def test_of_two_hosts_one_is_suspect_until_a_spare_decides() -> None:
    """D14: partners share the result of their test."""
    alone, _ = run(("a", "b"), ["b"])
    assert (alone.undecided, alone.faulty, alone.suspect_pairs) == (("a", "b"), (), (("a", "b"),))
    assert alone.why("a") == "failed with b: one of these hosts or a link between them is broken"
    with_spare, _ = run(("a", "b", "spare"), ["b"])
    assert (with_spare.faulty, with_spare.undecided) == (("b",), ())
    assert with_spare.why("b") == "failed with a, spare, which passed with other hosts"
    assert with_spare.why("a") == "passed with spare"


def test_a_good_host_that_meets_bad_ones_twice_is_cleared() -> None:
    """D17: two fixed rounds accuse it; and an odd host is in no triple."""
    names = hosts(7)
    assert Pairing(hosts=names).next_round() == (("h00", "h01"), ("h02", "h03"), ("h04", "h05"))
    for faulty in combinations(names, 3):
        pairing, _ = run(names, faulty)
        assert pairing.faulty == faulty


def test_with_no_good_host_nobody_is_accused() -> None:
    pairing, _ = run(hosts(6), hosts(6))
    assert (pairing.undecided, pairing.faulty, pairing.proven) == (hosts(6), (), ())
    only, _ = run(("a",), [])
    assert only.why("a") == "no test: no partner was left"


@pytest.mark.parametrize("count", [2, 3, 6, 9])
def test_a_host_whose_tests_cannot_be_made_is_accused_of_nothing(count: int) -> None:
    names = hosts(count)
    pairing = Pairing(hosts=names)
    while pairs := pairing.next_round():
        assert not set(pairs) & (pairing.passed | pairing.untested)
        pairing = pairing.with_results({pair: True for pair in pairs if names[1] not in pair})
    assert (pairing.faulty, pairing.broken_links, pairing.suspect_pairs) == ((), (), ())
    assert set(pairing.undecided) == (set(names) if count == 2 else {names[1]})
    met = ", ".join(name for name in names if name != names[1])
    assert pairing.why(names[1]) == f"no test: none with {met} was made"


def test_results_of_another_check_are_refused_and_a_missing_one_is_none() -> None:
    """D15 and D17a: a round takes results of its own pairs; a new check starts from nothing."""
    first = Pairing(hosts=hosts(4))
    with pytest.raises(ValueError, match=r"did not test \[\('h01', 'h02'\)\]"):
        first.with_results({("h01", "h02"): True})
    after = first.with_results({("h00", "h01"): True})
    assert (after.failed, after.untested) == (set(), {("h02", "h03")})
    assert first == Pairing(hosts=hosts(4))
    assert after.health_of("h02") is HostHealth.UNDECIDED
    with pytest.raises(ValueError, match="named once"):
        Pairing(hosts=("a", "a"))
