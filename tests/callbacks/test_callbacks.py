# SPDX-License-Identifier: Apache-2.0
"""What callbacks and connector do, one test per check of this package, all from one process."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.callbacks import process_checks, stop_checks, tier_checks  # noqa: F401  # register their checks
from tests.callbacks.checks import CHECKS

from .. import __file__ as TESTS

pytestmark = pytest.mark.nemo


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """check -> traceback, empty where it passed."""
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "tests.callbacks",
            str(tmp_path_factory.mktemp("checks")),
        ],
        cwd=TESTS.removesuffix("tests/__init__.py"),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", CHECKS)
def test_that(name: str, verdicts: dict[str, str]) -> None:
    assert not verdicts[name], verdicts[name]
