# SPDX-License-Identifier: Apache-2.0
"""The position in the data is in Lightning's own checkpoint: a killed training sees each sample once."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
import torch

from resiliency.data import InterruptableDistributedSampler
from resiliency.testing import warm
from tests.callbacks import noting_ranks

pytestmark = [pytest.mark.nemo, pytest.mark.slow]
ROOT = Path(__file__).parents[2]


@pytest.mark.thorough("two ranks that are killed are near")
def test_a_resumed_fit_takes_the_same_steps_and_what_would_lose_samples_is_refused(
    nemo_is_warm: None, tmp_path: Path
) -> None:
    argv = [sys.executable, "-W", "ignore", "-m", "tests.callbacks.data_checks", str(tmp_path)]
    done = warm.run(argv, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("passed ") == 6


def train(directory: Path, die_at: object, epochs: int = 3) -> tuple[int, str]:
    words = ["-m", "tests.callbacks.lightning_data", str(directory), str(epochs), str(die_at)]
    done = warm.run([sys.executable, "-W", "ignore", *words], cwd=ROOT, timeout=600)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode, "".join(line for line in done.stdout.splitlines() if line.startswith("seen"))


@pytest.mark.thorough("two ranks that are killed are near")
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


def one_loop(size: int, per_step: int, epochs: int) -> dict[int, tuple[list[int], float]]:
    """Step -> its samples and its loss, in a plain loop of one process with the model of the example."""
    inputs = torch.randn(size, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.manual_seed(0)
    layer = torch.nn.Linear(16, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01, momentum=0.9)
    sampler = InterruptableDistributedSampler(inputs, num_replicas=1, rank=0, seed=3)
    steps: dict[int, tuple[list[int], float]] = {}
    for epoch in range(epochs):
        with sampler.in_epoch(epoch):
            order = list(sampler)
            sampler.finish_epoch()
        for first in range(0, size, per_step):
            numbers = order[first : first + per_step]
            loss = (layer(inputs[numbers]).squeeze(1) - inputs[numbers].sum(1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps[len(steps) + 1] = sorted(numbers), loss.item()
    return steps


def test_two_ranks_that_are_killed_go_on_as_one_with_the_steps_and_losses_of_a_plain_loop(
    nemo_is_warm: None, tmp_path: Path
) -> None:
    script = Path(__file__).parent / "lightning_ranks.py"
    # In the middle of the second epoch; the newest checkpoint is that of the step before.
    noting_ranks.train(script, tmp_path, ranks=2, accumulate=1, die_at=9)
    before = noting_ranks.notes(tmp_path)
    for path in tmp_path.glob("rank*.jsonl"):
        path.unlink()
    assert "ended at step 12" in noting_ranks.train(script, tmp_path, ranks=1, accumulate=2)
    after = noting_ranks.notes(tmp_path)
    assert (list(before), list(after)) == (list(range(1, 9)), list(range(9, 13)))
    expected = one_loop(96, 16, epochs=2)
    for step, (numbers, loss) in {**before, **after}.items():
        assert numbers == expected[step][0]
        assert loss == pytest.approx(expected[step][1], rel=1e-12)
