# SPDX-License-Identifier: Apache-2.0
"""The count of consumed samples with NeMo's samplers; `tests/nemo/test_consumed_samples.py` trains too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from resiliency.testing import warm

pytestmark = [pytest.mark.nemo, pytest.mark.slow]
ROOT = Path(__file__).parents[2]


@pytest.mark.thorough("tests/nemo/test_consumed_samples.py trains with it")
def test_nemos_count_is_that_of_the_model_over_any_lives_and_what_does_not_fit_is_refused(
    nemo_is_warm: None, tmp_path: Path
) -> None:
    argv = [sys.executable, "-W", "ignore", "-m", "tests.callbacks.consumed_checks", str(tmp_path)]
    done = warm.run(argv, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("passed ") == 6
