# SPDX-License-Identifier: Apache-2.0
"""The same document in a terminal."""

from __future__ import annotations

from dataclasses import replace

import pytest

from supervisor.view.page import status_page
from supervisor.view.status import BudgetStatus
from supervisor.view.tables import history_text, status_text
from supervisor.view.words import duration, job_state

from .documents import full, history, job, large


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.04, "0.0 s"),
        (9.96, "10 s"),
        (59.6, "1 min 00 s"),
        (184, "3 min 04 s"),
        (3725, "1 h 02 min"),
        (97_200, "1 d 03 h"),
    ],
)
def test_durations_are_written_for_people(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    "line",
    [
        "Controller of release 0.1.0, epoch 4, up 1 h 02 min",
        "! Frozen by alice: nothing is done until a thaw.",
        "4 hosts: 1 failed, 1 running, 1 spare, 1 complete",
        "Incident incident-7 of llama, 1 min 35 s ago: action under way: command-3",
        "  host_hb on host-1.boot (acted on)",
        "    stream: no report for 31 s",
        "  gathered 2.0 s, hot_swap since 1 min 33 s",
    ],
)
def test_the_status_says(line: str) -> None:
    assert line in status_text(full()).splitlines()


def test_a_job_without_any_budget_of_restarts_is_named_and_one_that_has_one_is_well() -> None:
    with_one = replace(job("llama", ("a",)), restarts=BudgetStatus(left=0, limit=0, steps_per_restart=1))
    without = replace(with_one, in_job=with_one.restarts)
    assert job_state(with_one) == "well"
    assert job_state(without).startswith("no restart budget: --max-restarts and --max-workload-restarts")
    assert "no restart budget" in status_page(replace(full(), jobs=(without,)))


def test_the_status_says_that_another_controller_was_heard() -> None:
    assert (
        "! Commands are refused: a controller of epoch 9 was heard, this one has 4. End one of the two;"
        " if there is no other, start this one again."
        in status_text(replace(full(), fenced_by=9)).splitlines()
    )


def test_columns_are_aligned() -> None:
    lines = status_text(full()).splitlines()
    begin = lines.index("Jobs")
    assert lines[begin + 1].index("Hosts") == lines[begin + 3].index("2 of 2")


def test_nothing_that_a_host_wrote_steers_the_terminal() -> None:
    for text in (status_text(full()), history_text(history())):
        assert "alert('x')" in text
        assert "\x1b" not in text


def test_a_large_fleet_fits_on_a_screen_unless_every_host_is_asked_for() -> None:
    assert len(status_text(large(1000)).splitlines()) < 30
    assert len(status_text(large(1000), every_host=True).splitlines()) > 1000


def test_the_history_leaves_out_the_mere_passing_of_time() -> None:
    text = history_text(history())
    assert [line.split()[0] for line in text.splitlines() if line[:8].strip()] == ["10", "12"]
    assert "llama: hot swap" in text


def test_an_input_in_the_history_is_what_it_says_and_not_what_is_empty() -> None:
    first = history_text(history()).splitlines()[0]
    said = "id=event-1, type=operator, operator: a switch is replaced, request=freeze"
    assert first.split("  ")[-1] == said
