# SPDX-License-Identifier: Apache-2.0
"""The examples on the page about testing are tests, and pass."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from resiliency.testing.faults import FaultKind, Phase
from resiliency.testing.leaks import LeakKind
from resiliency.testing.processes import Command

PAGE = Path(__file__).parents[2] / "docs" / "testing.md"


@pytest.mark.slow
def test_the_examples_of_the_page_pass(tmp_path: Path) -> None:
    examples = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), flags=re.M | re.S)
    for number, example in enumerate(examples):
        (tmp_path / f"test_example_{number}.py").write_text(example)
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["resiliency.testing.fixtures"]\n')
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--strict-markers", str(tmp_path)]
    with Command(argv, cwd=tmp_path) as cmd:
        assert cmd.wait(timeout=120) == 0, cmd.output
        assert f"{sum(example.count('def test_') for example in examples)} passed" in cmd.output
        cmd.assert_no_orphans()  # the ranks and their server end with the session


def test_the_page_names_every_fault_phase_and_kind_of_leak() -> None:
    text = PAGE.read_text()
    missing = [
        word.value for words in (FaultKind, Phase, LeakKind) for word in words if word.value not in text
    ]
    assert missing == []
