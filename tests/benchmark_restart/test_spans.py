# SPDX-License-Identifier: Apache-2.0
"""What the restart benchmark computes and shows, on events made by hand."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import ModuleType

import pytest

from resiliency.events import EventType, RunEvent

BENCHMARK = Path(__file__).parents[2] / "benchmark"
ZERO = datetime(2026, 1, 1, tzinfo=timezone.utc)
FAULT_S = 10.0


@pytest.fixture(scope="module")
def report() -> Iterator[ModuleType]:
    """The module that shows, imported as the benchmark's own scripts import it."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARK))
        import restart_report

        yield restart_report
        for name in set(sys.modules) - before:
            if name.startswith("restart_") or name == "measuring":
                del sys.modules[name]


@pytest.fixture(scope="module")
def spans(report: ModuleType) -> ModuleType:
    """The module that computes."""
    return sys.modules["restart_spans"]


def at(seconds: float) -> datetime:
    return ZERO + timedelta(seconds=seconds)


def event(
    type: EventType, seconds: float, *, rank: int | None = 0, attempt: int = 0, step: int | None = None,
    **fields: float,
) -> RunEvent:  # fmt: skip
    return RunEvent(
        type=type, time=at(seconds), job_name="job", rank=rank, attempt=attempt, step=step, fields=fields
    )


def life(
    rank: int, attempt: int, begin: float, *, restored: int, steps: int, late: float = 0.0
) -> list[RunEvent]:
    """One process: each stage takes a second, each step 0.5 s and the first one a second."""
    mine = {"rank": rank, "attempt": attempt}
    found = [
        event(EventType.PROCESS_STARTED, begin, **mine),
        event(EventType.IMPORTED, begin + 1 + late, **mine),
        event(EventType.RESTORE_STARTED, begin + 2 + late, **mine),
        event(EventType.CHECKPOINT_LOADED, begin + 3 + late, step=restored, **mine),
        event(EventType.INITIALIZED, begin + 4 + late, **mine),
    ]
    for number in range(steps):
        end = begin + 5 + late + number / 2
        duration_s = 0.5 if number else 1.0
        done = restored + 1 + number
        found.append(event(EventType.STEP_FINISHED, end, step=done, duration_s=duration_s, **mine))
    return found


def a_restart(*, late: float = 0.0) -> list[RunEvent]:
    """Ranks 0 and 1; rank 1 dies at 10 s after step 7, both come back at step 5 at 12 s."""
    return [
        *life(0, 0, 1.0, restored=0, steps=7),
        *life(1, 0, 1.0, restored=0, steps=7),
        event(EventType.SAVE_STARTED, 8.2, step=5),
        event(EventType.SAVE_RELEASED, 8.3, step=5),
        event(EventType.FAULT_INJECTED, FAULT_S, rank=1, step=7),
        *life(0, 1, 12.0, restored=5, steps=3),
        *life(1, 1, 12.0, restored=5, steps=3, late=late),
    ]


ENDED = {0: at(11.5), 1: at(10.1)}


def test_each_piece_of_time_belongs_to_the_stage_that_ended_it(spans: ModuleType) -> None:
    restart = spans.measure(a_restart(), ENDED)
    assert restart.spans_s == {
        "stopped": 1.5,
        "started": 0.5,
        "imported": 1.0,
        "initialized": 2.0,  # before the restore and after it
        "restored": 1.0,
        "first_new_step": 1.0,
    }
    assert restart.total_s == 7.0
    assert restart.launcher_s == 2.0
    assert (restart.restored_step, restart.lost_steps) == (5, 2)


def test_a_stage_counts_as_reached_when_the_last_rank_has_reached_it(spans: ModuleType) -> None:
    restart = spans.measure(a_restart(late=0.25), ENDED)
    assert restart.spans_s["imported"] == 1.25
    assert restart.total_s == 7.25


def test_a_new_process_that_seems_older_than_the_end_of_the_last_one_takes_no_negative_time(
    spans: ModuleType,
) -> None:
    restart = spans.measure(a_restart(), {0: at(12.01), 1: at(10.1)})
    assert restart.spans_s["stopped"] == pytest.approx(2.01)
    assert restart.spans_s["started"] == 0.0
    assert restart.total_s == pytest.approx(7.0)


def test_a_restart_after_a_hang_is_measured_from_when_it_was_found(spans: ModuleType) -> None:
    whole, restart = (
        spans.measure(a_restart(), {0: at(10.4), 1: at(10.1)}, zero=zero) for zero in (None, at(10.1))
    )
    assert whole.spans_s["stopped"] == pytest.approx(0.4)
    assert restart.spans_s["stopped"] == pytest.approx(0.3)
    assert whole.total_s - restart.total_s == pytest.approx(0.1)


def test_the_steady_step_leaves_out_the_first_of_each_attempt_and_held_time_is_the_save(
    spans: ModuleType,
) -> None:
    # Two steps of each attempt: with the first ones among them the median would be 0.75.
    kept = {(0, 1), (0, 2), (1, 6), (1, 7)}
    events = [
        item
        for item in a_restart()
        if item.type is not EventType.STEP_FINISHED or (item.attempt, item.step) in kept
    ]
    restart = spans.measure(events, ENDED)
    assert restart.step_s == 0.5
    assert restart.held_s == pytest.approx(0.1)


def test_what_the_launcher_says_of_itself_is_kept_apart_and_is_empty_where_it_is_silent(
    spans: ModuleType,
) -> None:
    said = [
        event(EventType.FAULT_DETECTED, 10.2, rank=1),
        event(EventType.WORKERS_STOPPED, 11.6, rank=None),
        event(EventType.RENDEZVOUS_DONE, 11.8, rank=None, attempt=1),
        event(EventType.WORKERS_STARTED, 12.0, rank=None, attempt=1),
    ]
    ours, theirs = spans.measure([*a_restart(), *said], ENDED), spans.measure(a_restart(), ENDED)
    assert ours.own_spans_s == pytest.approx(
        {"detected": 0.2, "stopped": 1.4, "rendezvous": 0.2, "started": 0.2}
    )
    assert theirs.own_spans_s == {}
    assert ours.spans_s == theirs.spans_s


@pytest.mark.parametrize(
    ("left_out", "said"),
    [
        (EventType.FAULT_INJECTED, "expected one injected fault, found 0"),
        (EventType.RESTORE_STARTED, "2 of 2 new ranks never reported restore_started"),
    ],
)
def test_a_run_that_lacks_a_fact_is_refused_by_name(
    spans: ModuleType, left_out: EventType, said: str
) -> None:
    with pytest.raises(spans.Unmeasured, match=said):
        spans.measure([item for item in a_restart() if item.type is not left_out], ENDED)


def test_a_job_that_was_restarted_twice_is_refused(spans: ModuleType) -> None:
    again = [*life(0, 2, 20.0, restored=5, steps=1), *life(1, 2, 20.0, restored=5, steps=1)]
    with pytest.raises(spans.Unmeasured, match=r"expected attempts 0 and 1, found \[0, 1, 2\]"):
        spans.measure([*a_restart(), *again], ENDED)


def test_a_rank_whose_end_was_not_seen_is_refused(spans: ModuleType) -> None:
    with pytest.raises(spans.Unmeasured, match="ended processes"):
        spans.measure(a_restart(), {1: at(10.1)})


def test_the_first_start_of_round_1_is_left_out_since_nothing_is_known_then(
    spans: ModuleType, report: ModuleType
) -> None:
    runs = sys.modules["restart_runs"]
    restart = spans.measure(a_restart(), ENDED)
    results = [
        report.Result(
            round=number, launcher=name, wall_s=1.0, restart=replace(restart, first_step_s=seconds * number)
        )
        for number in (1, 2, 3)
        for name, seconds in ((runs.OURS, 2.0), ("torchrun", 5.0))
    ]
    shown = report.Report(
        workload=runs.WORKLOADS["light"], monitor_interval_s=0.1, launchers=(runs.OURS, "torchrun"),
        results=tuple(results), date=ZERO, command="", machine={},
    )  # fmt: skip
    table = {row[0]: row[1:] for row in report.rows(shown)}
    assert table[report.FIRST_START] == [
        "5.000 (4.000..6.000)",
        "12.500 (10.000..15.000)",
        "0.40 (0.40..0.40)",
    ]
    assert table["total: fault to first new step"][0] == "7.000 (7.000..7.000)"
