# SPDX-License-Identifier: Apache-2.0
"""Scores: a host at 60 % speed is slow, noise of 10 % is not, and a wrong result is found."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from resiliency.launch.health.scores import HostHealth, Measurement, judge, worst

OK, UNDECIDED, SLOW, FAULTY = HostHealth.OK, HostHealth.UNDECIDED, HostHealth.SLOW, HostHealth.FAULTY


def measured(*values: float, digests: str = "", probe: str = "compute") -> list[Measurement]:
    return [
        Measurement(
            host=f"h{number:02}",
            probe=probe,
            value=value,
            unit="GFLOP/s",
            digest=digests[number : number + 1],
            platform="cpu-a",
        )
        for number, value in enumerate(values)
    ]


def healths(*values: float, digests: str = "") -> list[HostHealth]:
    return [score.health for score in judge(measured(*values, digests=digests))]


def test_a_host_at_60_percent_is_slow_and_noise_is_not() -> None:
    """Noise of +-10 % of each kind, with up to a quarter of slow hosts; no host is slow that is not."""
    rng = random.Random(5)  # noqa: S311
    noises = (lambda: 1.0, lambda: rng.uniform(0.9, 1.1), lambda: rng.choice([0.9, 1.1]))
    for _ in range(1_500):
        noise, hosts = rng.choice(noises), rng.randint(3, 64)
        slow = set(rng.sample(range(hosts), rng.randint(0, hosts // 4 if hosts > 3 else 1)))
        speed = rng.choice([3.0, 4e5])
        values = [speed * noise() * (0.6 if host in slow else 1.0) for host in range(hosts)]
        found = {host for host, health in enumerate(healths(*values)) if health is SLOW}
        assert found == slow


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([5.0], [OK]),
        ([5.0, 5.0, 5.0, 5.0], [OK] * 4),
        ([5.0, 4.8, 5.0, 5.0], [OK] * 4),  # an even fleet accuses no host for a few percent
        ([5.0, 3.0], [OK, UNDECIDED]),  # D14: slower than one other host is no proof
        ([5.0, 5.0, 3.0], [OK, OK, SLOW]),
        ([5.0, 5.0, 3.0, 3.0], [OK, OK, UNDECIDED, UNDECIDED]),  # two kinds of hosts
        ([1.0, 3.0, 5.0, 0.5], [UNDECIDED, OK, OK, UNDECIDED]),
        ([0.0, 0.0, 0.0], [OK] * 3),
    ],
)
def test_table_of_rates(values: list[float], expected: list[HostHealth]) -> None:
    assert healths(*values) == expected


@pytest.mark.parametrize(
    ("digests", "expected"),
    [
        ("aaaa", [OK] * 4),
        ("aaba", [OK, OK, UNDECIDED, OK]),
        ("abca", [UNDECIDED] * 4),
        ("aab", [OK, OK, UNDECIDED]),
        ("ab", [UNDECIDED] * 2),
    ],
)
def test_a_result_that_other_hosts_do_not_have_leaves_its_host_undecided(
    digests: str, expected: list[HostHealth]
) -> None:
    """D16: it may be of other instructions; a broken core differs from the other cores of its host."""
    assert healths(*[5.0] * len(digests), digests=digests) == expected


def test_results_are_compared_on_one_platform_alone() -> None:
    two, three = measured(5.0, 5.0, digests="aa"), measured(5.0, 5.0, 5.0, digests="bbb")
    others = [replace(one, host=f"o{one.host}", platform="cpu-b") for one in three]
    assert {score.health for score in judge([*two, *others])} == {OK}


def test_a_probe_that_failed_is_a_fault_and_no_measure_for_others() -> None:
    values = measured(5.0, 5.0, 5.0, 0.0)
    values[3] = replace(values[3], error="hung: no result after 5 s")
    scores = judge(values)
    assert [score.health for score in scores] == [OK, OK, OK, FAULTY]
    assert str(scores[3]) == "compute: faulty, hung: no result after 5 s"


def test_a_probe_that_measured_nothing_accuses_no_host_and_a_limit_is_part_of_the_reason() -> None:
    values = measured(5.0, 5.0, 5.0, 0.0, 2.0)
    values[3] = replace(values[3], missing="had no core")
    values[4] = replace(values[4], note="throttled 60% of the time")
    scores = judge(values, {"h03": [5.0] * 3})
    assert [score.health for score in scores] == [OK, OK, OK, UNDECIDED, SLOW]
    assert str(scores[3]) == "compute: undecided, had no core"
    assert scores[4].why.endswith("20% are allowed; throttled 60% of the time")


def test_the_past_of_a_host_decides_where_other_hosts_cannot() -> None:
    past = {"h01": [5.0, 5.1, 4.9]}
    assert [score.health for score in judge(measured(5.0, 3.0), past)] == [OK, SLOW]
    assert [score.health for score in judge(measured(3.0, 5.0), past)] == [UNDECIDED, OK]
    assert judge(measured(5.0, 3.0), {"h01": [3.0, 5.0]})[1].health is UNDECIDED  # too short
    # All hosts are slower than they were: a new version, and no fault of any host.
    assert {score.health for score in judge(measured(3.0, 3.0, 3.0), past)} == {OK}


def test_each_probe_has_its_own_score_and_one_unit() -> None:
    """D12 and D13: nothing is added up, so a fast product hides no slow link."""
    compute, link = measured(5e5, 5e5, 5e5, 5e5), measured(9.0, 9.0, 9.0, 3.0, probe="link")
    assert worst([*judge(compute), *judge(link)]) == {"h00": OK, "h01": OK, "h02": OK, "h03": SLOW}
    with pytest.raises(ValueError, match="one probe and one unit"):
        judge([compute[0], replace(compute[1], unit="ms")])
    with pytest.raises(ValueError, match="one measurement"):
        judge([compute[0], compute[0]])


def test_the_evidence_is_a_sentence() -> None:
    assert [str(score) for score in judge(measured(5.0, 5.0, 3.0))][1:] == [
        "compute 5 GFLOP/s: ok, not below the median of the other hosts",
        "compute 3 GFLOP/s: slow, 40% below the median of the other hosts, 5 GFLOP/s; 20% are allowed",
    ]
