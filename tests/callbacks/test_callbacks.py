# SPDX-License-Identifier: Apache-2.0
"""What callbacks and connector do, one test per check of this package, all from one process."""

from __future__ import annotations

import json
import sys

import pytest

from resiliency.testing import warm
from tests.callbacks import process_checks, stop_checks, tier_checks  # noqa: F401  # register their checks
from tests.callbacks.checks import CHECKS

from .. import __file__ as TESTS

pytestmark = pytest.mark.nemo


@pytest.fixture(scope="module")
def verdicts(nemo_is_warm: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """check -> traceback, empty where it passed."""
    argv = [sys.executable, "-W", "ignore", "-m", "tests.callbacks", str(tmp_path_factory.mktemp("checks"))]
    done = warm.run(argv, cwd=TESTS.removesuffix("tests/__init__.py"), timeout=900)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.thorough("trainings of tests/nemo use each callback")
@pytest.mark.parametrize("name", CHECKS)
def test_that(name: str, verdicts: dict[str, str]) -> None:
    assert not verdicts[name], verdicts[name]
