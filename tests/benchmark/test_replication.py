# SPDX-License-Identifier: Apache-2.0
"""The measurement of copies on other hosts as its users start it, small."""

from __future__ import annotations

import json
import re
import sys
from datetime import datetime, timezone
from pathlib import Path

import pytest
from replication import PARTS
from replication_report import TITLES, Failure, Report, as_markdown, as_text

from resiliency.testing.processes import Command

SCRIPT = Path(__file__).parents[2] / "benchmark" / "replication.py"
#: Takes twenty seconds on two busy cores.
WAIT = 500.0


def run(*flags: object, expect: int, env: dict[str, str] | None = None) -> str:
    with Command([sys.executable, SCRIPT, *map(str, flags)], env=env) as command:
        assert command.wait(timeout=WAIT) == expect, command.output
        command.assert_no_orphans(timeout=120)
        return command.output


@pytest.mark.thorough("a benchmark; its ratios and flags have tests of their own")
@pytest.mark.slow
def test_a_quick_run_has_every_figure_and_leaves_nothing_behind(tmp_path: Path) -> None:
    disk, export, markdown = tmp_path / "disk", tmp_path / "report.json", tmp_path / "report.md"
    in_memory = set(Path("/dev/shm").glob("replication-*"))  # noqa: S108
    run("--quick", "--directory", disk, "--export", export, "--markdown", markdown, expect=0)
    report = json.loads(export.read_text())
    assert report["failures"] == []
    assert report["saved_bytes"] > 4_000_000
    (figures,) = report["rounds"]
    assert figures.keys() == TITLES.keys()
    for part in ("copies", "recovery"):
        assert all(figures[name]["s"] > 0 for name in PARTS[part])
    for name in PARTS["saves"]:
        assert figures[name].keys() == {"held_s", "excess_s", "cost_s", "ten_steps_s", "complete_s"}
        assert all(figures[name][figure] > 0 for figure in ("held_s", "ten_steps_s", "complete_s"))
    assert [len(ratios) for ratios in report["ratios"].values()] == [1] * 6
    note = markdown.read_text()
    assert all(title in note for title in TITLES.values())
    assert "| - |" not in note
    assert list(disk.iterdir()) == []
    assert set(Path("/dev/shm").glob("replication-*")) <= in_memory  # noqa: S108


@pytest.mark.thorough("a benchmark; its ratios and flags have tests of their own")
@pytest.mark.slow
def test_what_cannot_run_is_listed_with_its_error_and_the_rest_goes_on(tmp_path: Path) -> None:
    broken = tmp_path / "broken" / "nvidia_resiliency_ext"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('out of order')\n")
    export = tmp_path / "report.json"
    flags = ["--quick", "--rounds", 2, "--parts", "copies", "--directory", tmp_path, "--export", export]
    output = run(*flags, expect=1, env={"PYTHONPATH": str(broken.parent)})
    assert re.search(r"FAILED NVRx .*, round 1: rank 0 error: ImportError: out of order", output)
    report = json.loads(export.read_text())
    (failure,) = report["failures"]
    assert (failure["measurement"], failure["round"]) == ("nvrx_both_ways", 1)
    assert [found.keys() for found in report["rounds"]] == [set(PARTS["copies"]) - {"nvrx_both_ways"}] * 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gib", "0"], "must be a number of GiB from 0.001 on, found '0'"),
        (["--gib", "nan"], "must be a number of GiB from 0.001 on, found 'nan'"),
        (["--gib", "1000"], "choose a smaller --gib than 1000"),
        (["--rounds", "0"], "must be a whole number above 0, found '0'"),
        (["--parts", "backups"], "invalid choice: 'backups'"),
        (["--export", "nowhere/report.json"], "the directory of nowhere/report.json does not exist"),
        (["--directory", f"{SCRIPT}/disk"], "Not a directory"),
    ],
)
def test_bad_arguments_are_refused_at_the_door(flags: list[str], message: str) -> None:
    assert message in run(*flags, expect=2)


def test_ratios_and_differences_are_taken_within_a_round() -> None:
    save = dict.fromkeys(("held_s", "excess_s", "cost_s", "ten_steps_s", "complete_s"), 1.0)
    report = Report(
        rounds=[
            {"own_disk": {"s": 1.0}, "from_peer": {"s": 3.0}, "replicas_off": save, "replicas_on": save},
            {"own_disk": {"s": 10.0}, "from_peer": {"s": 20.0}},
            {"from_peer": {"s": 500.0}, "replicas_off": save | {"held_s": 9.0}},
        ],
        failures=[Failure(name="own_disk", round=3, error="rank 0 died: without a word")],
        saved_bytes=1,
        date=datetime.now(timezone.utc),
        command="x",
        machine=dict.fromkeys(("cores", "cpu", "memory_gib", "storage", "kernel", "load_1min"), 1),
        wall_s=1.0,
    )
    assert report.ratios("from_peer", "own_disk") == [3.0, 2.0]
    assert report.differences("held_s") == [0.0]
    for text in (as_text(report), as_markdown(report)):
        assert f"{TITLES['own_disk']}, round 3: rank 0 died: without a word" in text
