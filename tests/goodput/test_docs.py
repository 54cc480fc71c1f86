# SPDX-License-Identifier: Apache-2.0
"""The page about goodput says what the code does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from resiliency.goodput_measure.incidents import STAGES
from resiliency.goodput_measure.ledger import Bucket
from resiliency.goodput_measure.tracker import GOODPUT_TYPES

PAGE = (Path(__file__).parents[2] / "docs" / "goodput.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_every_flag_of_the_calculator_is_on_the_page_and_no_other() -> None:
    command = [sys.executable, "-m", "resiliency.goodput_measure.calculator", "--help"]
    env = {**os.environ, "COLUMNS": "400"}  # no wrapping inside a flag
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60)
    help_text = done.stdout
    ours = set(re.findall(r"--[a-z][a-z-]+", help_text)) - {"--help"}
    table = PAGE[PAGE.index("| Flag |") : PAGE.index("Exit codes")]
    assert set(re.findall(r"--[a-z][a-z-]+", table)) == ours


@pytest.mark.parametrize("name", [*(b.value for b in Bucket), *(t.value for t in GOODPUT_TYPES)])
def test_every_cause_and_published_event_is_explained(name: str) -> None:
    assert f"`{name}`" in PAGE


def test_the_stages_are_listed_in_their_order() -> None:
    assert ", ".join(STAGES).replace("_", " ") in " ".join(PAGE.split())


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_examples_run_and_what_they_write_can_be_calculated(example: str, tmp_path: Path) -> None:
    env = {**os.environ, "JOB_IDENTIFIER": "demo", "GOODPUT_USE_FILE_TRACKING": "1"}
    subprocess.run([sys.executable, "-c", example], cwd=tmp_path, env=env, check=True, timeout=60)
    assert (tmp_path / "demo-events.jsonl").read_text().count("\n") >= 2
