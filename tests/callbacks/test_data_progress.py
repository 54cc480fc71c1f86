# SPDX-License-Identifier: Apache-2.0
"""The position in the data is in Lightning's own checkpoint: a killed training sees each sample once."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from resiliency.testing import warm

pytestmark = [pytest.mark.nemo, pytest.mark.slow]
ROOT = Path(__file__).parents[2]


def test_a_resumed_fit_takes_the_same_steps_and_what_would_lose_samples_is_refused(
    nemo_is_warm: None, tmp_path: Path
) -> None:
    argv = [sys.executable, "-W", "ignore", "-m", "tests.callbacks.data_checks", str(tmp_path)]
    done = warm.run(argv, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("passed ") == 3


def train(directory: Path, die_at: object, epochs: int = 3) -> tuple[int, str]:
    words = ["-m", "tests.callbacks.lightning_data", str(directory), str(epochs), str(die_at)]
    done = warm.run([sys.executable, "-W", "ignore", *words], cwd=ROOT, timeout=600)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode, "".join(line for line in done.stdout.splitlines() if line.startswith("seen"))


def test_a_lightning_training_that_is_killed_three_times_is_that_of_an_undisturbed_one(
    nemo_is_warm: None, tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    undisturbed = train(whole, "never")
    assert "seen [3] step 21 " in undisturbed[1]
    # In the middle of gradients that are accumulated, at the end of an epoch, in the middle of the next one.
    for die_at in (7, "epoch", 3):
        assert train(killed, die_at) == (-signal.SIGKILL, "")
    assert train(killed, "never") == undisturbed
