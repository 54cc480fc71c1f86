# SPDX-License-Identifier: Apache-2.0
"""Metrics over ranks: exact, agreed by name, and plain in the checkpoint; and the timer beside them."""

from __future__ import annotations

import io
import math
import re
from datetime import timedelta

import numpy as np
import pytest
import torch

from resiliency.data import MetricsTracker, TimestampedTimer
from resiliency.errors import ConfigError
from resiliency.testing.clock import ManualClock
from resiliency.testing.rank_pool import RankPool


def reduce_whatever_ranks_have(rank: int) -> tuple[object, ...]:
    metrics = MetricsTracker()
    if rank != 2:  # has nothing to say, ever
        metrics.update({"samples": 2**53 - 1, f"only rank {rank}": 1.5})
        metrics.update({"loss": torch.tensor(float(rank), dtype=torch.float64)}, how="mean", weight=rank + 1)
        metrics.update({"longest": 10 * rank}, how="max")
    first = metrics.reduce().local
    again = metrics.reduce().reduce().local
    if rank == 1:
        metrics.update({"samples": 1})
    later = metrics.reduce().local
    return first, again, later, metrics.agg, metrics.reset_local().local, metrics.state_dict()


def test_ranks_with_other_names_and_with_none_agree_and_count_exactly_once_c34_c35_c36_c37(
    rank_pool: RankPool,
) -> None:
    reports = rank_pool.run(reduce_whatever_ranks_have, 3).values
    assert reports[0] == reports[1] == reports[2]
    first, again, later, agg, reset, _ = reports[0]
    assert first == {
        "samples": 2 * (2**53 - 1),
        "only rank 0": 1.5,
        "only rank 1": 1.5,
        "loss": 2 / 3,
        "longest": 10,
    }
    assert again == first
    assert later == agg == {**first, "samples": 2**54 - 1}
    assert reset == {}


def use_a_name_in_two_ways(rank: int) -> str:
    metrics = MetricsTracker().update({"loss": 1.0}, how=("sum", "mean")[rank])
    try:
        metrics.reduce()
    except ConfigError as error:
        return str(error)
    return ""


def test_a_name_that_ranks_use_in_two_ways_is_refused_on_all(rank_pool: RankPool) -> None:
    told = rank_pool.run(use_a_name_in_two_ways, 2).values
    assert told == ["the metric 'loss' is a mean and a sum; each name is combined in one way."] * 2


def test_epochs_end_with_a_report_and_calls_chain() -> None:
    metrics = MetricsTracker()
    metrics.update({"loss": 1.0}).reduce().update({"loss": 2.0}).reduce().end_epoch()
    metrics.reset_local().update({"loss": 5.0}).reduce()
    assert metrics.epoch_reports == [{"loss": 3.0}]
    assert metrics.local == metrics.agg == {"loss": 5.0}


def test_the_state_is_a_plain_copy_that_torch_loads_by_default_c38() -> None:
    metrics = MetricsTracker().update({"loss": 4.0}, how="mean", weight=3)
    metrics.update({"count": np.int64(3), "score": np.float64(0.5)}).reduce().end_epoch()
    metrics.update({"loss": 1.0}, how="mean").reduce()
    file = io.BytesIO()
    torch.save(metrics.state_dict(), file)
    metrics.update({"loss": 9.0}, how="mean").reduce().end_epoch()
    file.seek(0)
    resumed = MetricsTracker()
    resumed.load_state_dict(torch.load(file))
    assert resumed.epoch_reports == [{"loss": 4.0, "count": 3, "score": 0.5}]
    assert resumed.agg == {"loss": 1.0}
    assert resumed.update({"loss": 4.0}, how="mean", weight=2).reduce().agg == {"loss": 3.0}


def test_a_state_of_cycling_utils_is_read_and_another_is_refused() -> None:
    metrics = MetricsTracker()
    metrics.load_state_dict({"epoch_reports": [{"loss": 1.0}], "agg": {"loss": 2.0}})
    assert metrics.update({"loss": 1.0}).reduce().agg == {"loss": 3.0}
    with pytest.raises(ConfigError, match=r"no state of a MetricsTracker: its keys are \['loss'\]"):
        metrics.load_state_dict({"loss": 1.0})


def test_a_way_that_does_not_exist_and_a_change_of_it_are_refused_at_once() -> None:
    metrics = MetricsTracker().update({"loss": 1.0})
    with pytest.raises(ConfigError, match="combined by sum, mean, max; 'median' is none"):
        metrics.update({"loss": 1.0}, how="median")
    metrics.reduce()
    with pytest.raises(ConfigError, match="'loss' is a mean and a sum"):
        metrics.update({"loss": 1.0}, how="mean")
    assert metrics.local == {"loss": 1.0}


def test_whole_numbers_of_any_size_stay_whole_and_small_floats_are_not_lost() -> None:
    metrics = MetricsTracker()
    for value in (2**60, 1, 1):
        metrics.update({"tokens": value})
    assert metrics.reduce().local["tokens"] == 2**60 + 2


@pytest.mark.parametrize(
    ("values", "total"),
    [
        ((math.inf, -math.inf), math.nan),
        ((1e308, 1e308), math.inf),
        ((math.inf, 1.0), math.inf),
        ((-1e308, -1e308, 1), -math.inf),
    ],
)
def test_a_loss_that_diverges_is_a_number_like_others(values: tuple[float, ...], total: float) -> None:
    metrics = MetricsTracker()
    for value in values:
        metrics.update({"loss": value})
        metrics.update({"mean": value}, how="mean")
    found = metrics.reduce().local
    assert [found["loss"], found["mean"]] == pytest.approx([total] * 2, nan_ok=True)


# --- the timer -----------------------------------------------------------------------------------


def test_a_timer_reports_parts_and_their_sum_on_a_clock_that_never_goes_back_c39(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "0")
    clock, lines = ManualClock(), io.StringIO()
    timer = TimestampedTimer(running=10.0, stream=lines, clock=clock.monotonic)
    clock.advance(timedelta(seconds=2.0))
    assert timer.report("loading") is None
    clock.advance(timedelta(seconds=0.5))
    assert timer.report("the first step", ret=True) == 0.5
    date = r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] "
    start, loading, first_step = lines.getvalue().splitlines()
    assert re.fullmatch(date + r"Start +0\.000 ms +10\.00 s total", start)
    assert re.fullmatch(date + r"loading +2,000\.000 ms +12\.00 s total", loading)
    assert re.fullmatch(date + r"the first step +500\.000 ms +12\.50 s total", first_step)


def test_other_ranks_measure_and_print_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "3")
    clock = ManualClock()
    timer = TimestampedTimer("Begin", clock=clock.monotonic)
    clock.advance(timedelta(seconds=1.5))
    assert timer.report("a part", ret=True) == 1.5
    assert capsys.readouterr().out == ""
    monkeypatch.delenv("RANK")
    timer.report("printed where there are no ranks")
    assert "printed where there are no ranks" in capsys.readouterr().out
