# SPDX-License-Identifier: Apache-2.0
"""The supervisor's benchmark runs: a fault on real processes, and synthetic hosts on a sensor."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from resiliency.testing.processes import Command

SCRIPT = Path(__file__).parents[2] / "benchmark" / "supervisor_numbers.py"
PATIENCE_S = 300.0


@pytest.mark.thorough("a benchmark; tests/supervisor_plane has the faults")
@pytest.mark.slow
def test_a_fault_and_synthetic_hosts_are_measured_and_the_note_says_what_is_promised(tmp_path: Path) -> None:
    report, note = tmp_path / "numbers.json", tmp_path / "numbers.md"
    flags = ["--quick", "--only", "host-killed", "hosts", "--export", str(report), "--markdown", str(note)]
    with Command([sys.executable, SCRIPT, *flags]) as command:
        assert command.wait(timeout=PATIENCE_S) == 0, command.output
    rows = {row["what"]: row for row in json.loads(report.read_text())["rows"]}
    (acted_s,) = rows["host killed, witness, until the action"]["values"]
    (detected_s,) = rows["host killed: until it is detected"]["values"]
    (suspected_s,) = rows["host killed: until it is suspected"]["values"]
    assert 0 < suspected_s < detected_s < acted_s
    (found_s,) = rows["a host that falls silent, found"]["values"]
    assert found_s > 0.5  # its timeout is 2 s, and its last report was a period before at most
    assert rows["sensor: processor"]["values"][0] > 0
    assert rows["streams that ended"]["values"] == [0]
    assert "| host killed, witness, until the action | 1/2 s | - | 5 s |" in note.read_text()
    assert "| host killed: until it is suspected | 1/2 s | - | 0.1 s |" in note.read_text()
    assert "| host killed: until it is detected | 1/2 s | - | 3 s |" in note.read_text()


def test_a_name_that_is_not_measured_is_refused() -> None:
    with Command([sys.executable, SCRIPT, "--only", "faults"]) as command:
        assert command.wait(timeout=PATIENCE_S) == 2
        assert "invalid choice: 'faults'" in command.output
