# SPDX-License-Identifier: Apache-2.0
"""The checkpoint comparison as its users start it, small; and how it judges figures."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from datetime import datetime, timezone
from pathlib import Path

import pytest
from ckpt_bars import bars
from ckpt_cells import Cell, CellResult, Outcome
from ckpt_compare import parse_cell
from ckpt_contestants import DLROVER, NVRX_LOCAL, ONE_SLOT, OURS
from ckpt_report import Report, as_markdown, as_png, as_text

from resiliency.testing.processes import Command

BENCHMARK = Path(__file__).parents[2] / "benchmark"
#: Takes forty seconds on two idle cores.
WAIT = 500.0

RIVAL, BLOCKING_RIVAL = "DCP async, thread", "torch.save"
SAVED = [
    *("held_s", "held_alone_s", "durable_s", "commit_s"),
    *("copy1_s", "copy2_s", "write_s", "first_held_s", "setup_s", "extra_bytes", "disk_restore_s"),
]


@pytest.mark.thorough("a benchmark; tests/benchmark_restart has one that runs")
@pytest.mark.slow
def test_a_quick_run_measures_every_contestant_and_names_the_one_that_fails(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    for package in ("nvidia_resiliency_ext", "dlrover"):
        (broken / package).mkdir(parents=True)
        (broken / package / "__init__.py").write_text("raise ImportError('out of order')\n")
    files = {kind: tmp_path / f"report.{kind}" for kind in ("json", "md", "png")}
    names = [OURS, BLOCKING_RIVAL, "DCP async, thread, tuned", "NVRx async", DLROVER]
    argv = ["--quick", "--cells", "0.004x2", "--directory", tmp_path / "disk", "--contestants", *names]
    outputs = ["--export", files["json"], "--markdown", files["md"], "--plot", files["png"]]
    env = {"PYTHONPATH": str(broken)}
    with Command([sys.executable, BENCHMARK / "ckpt_compare.py", *argv, *outputs], env=env) as command:
        assert command.wait(timeout=WAIT) == 1, command.output
        assert "FAILED 4.1 MiB x 2 ranks, NVRx async" in command.output
        command.assert_no_orphans(timeout=120)
    (cell,) = json.loads(files["json"].read_text())["cells"]
    assert list(cell["contestants"]) == names
    for name in names[-2:]:
        assert "out of order" in cell["contestants"][name]["error"], name
    for name in names[:-2]:
        figures = cell["contestants"][name]
        assert figures["error"] is None
        assert [key for key in SAVED if len(figures[key]) != 1] == [], name
        assert len(figures["excess_s"]) == (name != BLOCKING_RIVAL)
        assert min(figures["held_s"] + figures["durable_s"] + figures["disk_restore_s"]) > 0
    assert len(cell["contestants"][OURS]["memory_restore_s"]) == 1
    unknown = [bar["name"] for bar in cell["bars"] if bar["value"] is None]
    assert unknown == ["restore from memory / best rival"]  # the only one that offers it is out of order
    note = files["md"].read_text()
    assert "## Bars" in note
    assert "- 4.1 MiB x 2 ranks, NVRx async: rank" in note
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert list((tmp_path / "disk").iterdir()) == []


def cell_result(ranks: int = 1, size_bytes: int = 2**30, **ours: float) -> CellResult:
    """A cell in which ours has these figures and copies, writes and reads take one second, on two cores."""
    limits = dict.fromkeys(("copy1_s", "copy2_s", "write_s", "disk_read_s", "ten_steps_s"), 1.0)
    limits |= {"memory_copy1_s": 1.0, "memory_copy2_s": 2.0, "warm_cached_read_s": 1.0}
    mine = {name: [value] * 3 for name, value in (limits | ours).items()}
    rival = {name: [1.0] * 3 for name in ("held_s", "held_alone_s", "ten_steps_s", "memory_restore_s")}
    rival["excess_s"] = [0.1] * 3
    blocking = rival | {"excess_s": [-0.5] * 3, "held_s": [9.0] * 3}
    return CellResult(
        cell=Cell(size_bytes, ranks),
        size_bytes=size_bytes,
        cores=2,
        batch=1,
        limits={"copy": [1.0]},
        outcomes={
            OURS: Outcome(contestant=OURS, series=mine),
            RIVAL: Outcome(contestant=RIVAL, series=rival),
            BLOCKING_RIVAL: Outcome(contestant=BLOCKING_RIVAL, series=blocking),
        },
    )


@pytest.mark.parametrize(
    ("name", "figure", "good", "bad"),
    [
        ("held without overlap / copy", "held_alone_s", 1.14, 1.16),
        ("held with overlap / copy", "held_s", 0.14, 0.16),
        ("held with overlap / best rival", "held_s", 0.69, 0.71),
        ("durable, from the call / write", "durable_s", 1.19, 1.21),
        ("restore from memory / copy", "memory_restore_s", 1.24, 1.26),
        ("restore from memory / best rival", "memory_restore_s", 0.99, 1.01),
        ("restore from disk / read", "disk_restore_s", 1.14, 1.16),
        ("restore from a warm disk / copy out of the page cache", "warm_restore_s", 1.24, 1.26),
        # Of the rival's 1.1 s: what it holds training and what its next steps take longer.
        ("time lost / best rival, a core is free", "held_s", 0.38, 0.39),
        ("extra memory of ours / state", "extra_bytes", 2.09 * 2**30, 2.11 * 2**30),
        # Against the asynchronous rival's 0.1 s: who blocks has nothing left to slow the steps with.
        ("excess over ten steps, against the best asynchronous rival", "excess_s", 0.1, 0.12),
    ],
)
def test_a_bar_is_met_up_to_its_limit_and_missed_beyond(
    name: str, figure: str, good: float, bad: float
) -> None:
    met, missed = (
        next(bar for bar in bars(cell_result(**{figure: value})) if bar.name == name) for value in (good, bad)
    )
    assert met.is_met
    assert not missed.is_met
    assert missed.rating.startswith("MISSED by")


def test_where_ranks_fill_the_cores_a_save_may_cost_more_beside_the_best_rival() -> None:
    found = {bar.name: bar for bar in bars(cell_result(ranks=2, held_s=0.5, excess_s=0.2))}
    bar = found["time lost / best rival, no core is free"]
    assert (bar.value, bar.limit, bar.remark) == (pytest.approx(0.7 / 1.1), 0.6, RIVAL)
    assert "time lost / best rival, a core is free" not in found


def test_steps_that_seem_faster_with_a_save_make_up_for_nothing_that_it_held() -> None:
    found = {bar.name: bar for bar in bars(cell_result(held_s=0.5, excess_s=-0.2))}
    assert found["time lost / best rival, a core is free"].value == pytest.approx(0.5 / 1.1)


def test_memory_of_a_small_state_is_not_judged() -> None:
    names = [bar.name for bar in bars(cell_result(size_bytes=2**27, extra_bytes=2.0**31))]
    assert [name for name in names if "extra memory" in name] == []


def test_a_rank_with_one_slot_has_a_memory_limit_of_its_own_and_is_no_rival() -> None:
    result = cell_result(held_s=0.5, extra_bytes=2.0 * 2**30)
    of_one = {"held_s": [0.1] * 3, "extra_bytes": [1.2 * 2**30]}
    result.outcomes[ONE_SLOT] = Outcome(contestant=ONE_SLOT, series=of_one)
    found = {bar.name: bar for bar in bars(result)}
    assert found["extra memory of ours / state"].is_met
    assert found["extra memory of ours, one slot / state"].rating == "MISSED by 4%"
    assert found["held with overlap / best rival"].remark == RIVAL


def test_ratios_are_taken_within_a_round() -> None:
    result = cell_result()
    result.outcomes[OURS].series |= {"held_alone_s": [1.0, 20.0, 300.0], "copy1_s": [1.0, 10.0, 100.0]}
    result.outcomes[OURS].series["copy2_s"] = [5.0, 50.0, 500.0]
    bar = next(bar for bar in bars(result) if bar.name == "held without overlap / copy")
    assert bar.value == statistics.median([1.0, 2.0, 3.0])


def test_what_was_not_measured_is_no_success_and_is_said() -> None:
    result = cell_result(disk_restore_s=2.0)
    bar = next(bar for bar in bars(result) if bar.name == "restore from memory / copy")
    assert (bar.is_met, bar.rating) == (False, "not measured")
    result.outcomes[RIVAL] = Outcome(contestant=RIVAL, error="rank 1: OSError: no space left\nTraceback")
    without_ours = cell_result()
    del without_ours.outcomes[OURS]
    report = Report(
        results=(result, without_ours, cell_result(ranks=2, size_bytes=2**28)),
        left_out=("2 GiB x 1 rank",),
        rounds=3,
        date=datetime.now(timezone.utc),
        command="x",
        machine=dict.fromkeys(("cores", "cpu", "memory_gib", "storage", "kernel", "load_1min"), 1),
        wall_s=1.0,
        not_installed=(NVRX_LOCAL,),
    )
    failure = f"1 GiB x 1 rank, {RIVAL}: rank 1: OSError: no space left"
    assert failure in as_text(report)
    note = as_markdown(report)
    assert failure in note
    assert f"| {bar.name} | 1.25 x | not measured | not measured |" in note
    assert "| restore from disk / read | 1.15 x | 2.00 x **missed** | not measured |" in note
    # A bar of one kind of cell says nothing about the others.
    assert "| time lost / best rival, no core is free | 0.60 x |  | not measured |" in note
    assert f"| {RIVAL} |" in note
    assert "| not offered |" in note
    assert f"NOT INSTALLED {NVRX_LOCAL}" in as_text(report)
    assert f"- {NVRX_LOCAL}: was not installed" in note
    assert "2 GiB x 1 rank: everything" in as_markdown(report)
    assert len(as_png(report).axes) == 6


@pytest.mark.parametrize("text", ["1", "x2", "1x", "0x1", "1x0", "axb"])
def test_a_cell_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="GiB"):
        parse_cell(text)
