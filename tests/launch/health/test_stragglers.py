# SPDX-License-Identifier: Apache-2.0
"""Which ranks are named as slow: those that the others wait for in each step, and never another one."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest

from resiliency.launch.health.stragglers import SPANS, Delay, OwnTime, find_stragglers

#: Looks at a rank in a window, and its seconds.
LOOKS, WINDOW_S = 30, 3.0


def windows(
    draw: random.Random, own_s: Sequence[float], count: int, *, data_s: Mapping[int, float], **more: object
) -> dict[int, list[OwnTime]]:
    """What is seen of ranks that have so many own seconds in each step and move in step, each time at random.

    Own times vary by a tenth from window to window; a collective takes a tenth of a step.
    """
    history: dict[int, list[OwnTime]] = {rank: [] for rank in range(len(own_s))}
    for _ in range(count):
        now = [seconds * draw.uniform(0.9, 1.1) for seconds in own_s]
        step_s = 1.1 * max(now)
        for rank, seconds in enumerate(now):
            own = sum(draw.random() < seconds / step_s for _ in range(LOOKS))
            data = sum(draw.random() < data_s.get(rank, 0.0) / seconds for _ in range(own))
            history[rank].append(
                OwnTime(
                    rank=rank,
                    host=f"h{rank // 8}",
                    seconds=WINDOW_S,
                    steps=round(WINDOW_S / step_s),
                    samples=LOOKS,
                    waiting=LOOKS - own,
                    data=data,
                    **more,  # type: ignore[arg-type]
                )
            )
    return history


@pytest.mark.parametrize("ranks", [2, 4, 64, 1024])
def test_a_rank_at_60_percent_of_its_speed_is_named_and_noise_is_not(ranks: int) -> None:
    draw = random.Random(ranks)  # noqa: S311 (a seeded history, no secret)
    for _ in range(max(1, 200 // ranks)):
        assert find_stragglers(windows(draw, [0.1] * ranks, max(SPANS), data_s={})) is None
        slow = draw.randrange(ranks)
        own_s = [0.1] * ranks
        own_s[slow] /= 0.6
        finding = find_stragglers(windows(draw, own_s, 12, data_s={slow: 0.1}))
        assert finding is not None
        assert (finding.ranks, finding.hosts) == ((slow,), (f"h{slow // 8}",))
        assert finding.delay is Delay.DATA
        assert finding.own_s > 1.3 * finding.usual_s


def test_a_host_is_named_when_its_ranks_are_slow_and_one_slow_window_names_nobody() -> None:
    draw = random.Random(1)  # noqa: S311 (as above)
    own_s = [0.2 if 8 <= rank < 16 else 0.1 for rank in range(32)]
    assert find_stragglers(windows(draw, own_s, 3, data_s={})) is not None
    finding = find_stragglers(windows(draw, own_s, 12, data_s={}))
    assert finding is not None
    assert (finding.ranks, finding.hosts) == (tuple(range(8, 16)), ("h1",))
    assert finding.delay is Delay.HOST
    assert "ranks 8-15 (host h1) are slow: " in finding.sentence

    one = windows(draw, [0.1] * 8, 2, data_s={})
    for rank, seen in windows(draw, [0.1] * 7 + [0.9], 1, data_s={}).items():
        one[rank] += seen
    assert find_stragglers(one) is None


def test_ranks_with_another_part_of_the_model_are_not_slow() -> None:
    """The first stage of a pipeline has more to do; its ranks are compared with each other as well."""
    draw = random.Random(2)  # noqa: S311 (as above)
    first = windows(draw, [0.2] * 4 + [0.1] * 12, 12, data_s={})
    for rank, seen in first.items():
        first[rank] = [OwnTime(**vars(one) | {"groups": (f"stage {rank // 4}", "all")}) for one in seen]
    assert find_stragglers(first) is None


@pytest.mark.parametrize("times", [0.25, 4.0])
def test_a_rank_that_has_steps_of_its_own_holds_nobody_up(times: float) -> None:
    """A trainer works all the time, while many actors sleep until they are answered."""
    draw = random.Random(5)  # noqa: S311 (as above)
    history = windows(draw, [0.2] + [0.05] * 7, 12, data_s={})
    assert find_stragglers(history) is not None
    history[0] = [OwnTime(**vars(one) | {"steps": round(times * one.steps)}) for one in history[0]]
    assert find_stragglers(history) is None


@pytest.mark.parametrize(
    ("more", "delay"),
    [
        ({"stopped": 12}, Delay.STOPPED),
        ({"delayed_s": 1.2}, Delay.CORE),
    ],
)
def test_the_sentence_says_what_a_slow_rank_does_meanwhile(more: dict[str, float], delay: Delay) -> None:
    draw = random.Random(3)  # noqa: S311 (as above)
    history = windows(draw, [0.1, 0.2, 0.1, 0.1], 4, data_s={})
    history[1] = [OwnTime(**vars(one) | more) for one in history[1]]
    finding = find_stragglers(history)
    assert finding is not None
    assert finding.delay is delay
    assert delay.value in finding.sentence


def test_before_three_windows_and_of_one_rank_nothing_is_said() -> None:
    draw = random.Random(4)  # noqa: S311 (as above)
    assert find_stragglers(windows(draw, [0.1, 0.3], 2, data_s={})) is None
    assert find_stragglers(windows(draw, [0.1], 12, data_s={})) is None
    assert find_stragglers({}) is None
