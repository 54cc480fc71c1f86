# SPDX-License-Identifier: Apache-2.0
"""The examples without a launcher, in ranks that are killed and come back."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from resiliency.testing.rank_pool import RankOutcome, RankPool

EXAMPLES = str(Path(__file__).parents[2] / "examples")


def train_mixed(rank: int, path: str, die_at: int | None) -> list[str]:
    sys.path.insert(0, EXAMPLES)
    from mixed_data import train

    lines = []
    for line in train(path, samples=100, epochs=2, every=3):
        lines.append(line)
        if len(lines) == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
    return lines


def test_a_mixture_that_is_killed_goes_on_with_the_steps_of_an_undisturbed_run_on_more_ranks(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    whole, killed = str(tmp_path / "whole.pt"), str(tmp_path / "killed.pt")
    [wanted] = rank_pool.run(train_mixed, 1, whole, None, timeout=60).values
    job = rank_pool.run(train_mixed, 2, killed, 7, timeout=60)
    assert job.outcomes == [RankOutcome.DIED] * 2
    resumed = rank_pool.run(train_mixed, 3, killed, None, timeout=60).values
    assert len(wanted) == len(resumed[0]) + 6
    for line, *ranks in zip(wanted[6:], *resumed, strict=True):
        words = line.split()
        for found in ranks:
            assert abs(float(found.split()[3]) - float(words[3])) < 2e-12
            assert found.split()[:2] + found.split()[4:] == words[:2] + words[4:]
    assert wanted[-1].endswith("{'rising': 150, 'falling': 50}")


def train_iterable(rank: int, directory: str, die_at: int | None) -> list[str]:
    sys.path.insert(0, EXAMPLES)
    from iterable_data import train

    lines = []
    for line in train(directory, steps=9, every=2):
        lines.append(line)
        if len(lines) == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
    return lines


def test_a_stream_that_is_killed_goes_on_with_the_next_line_of_each_worker_of_each_rank(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    wanted = rank_pool.run(train_iterable, 2, str(whole), None, timeout=60).values
    for die_at in (6, 3):
        job = rank_pool.run(train_iterable, 2, str(killed), die_at, timeout=60)
        assert job.outcomes == [RankOutcome.DIED] * 2
    resumed = rank_pool.run(train_iterable, 2, str(killed), None, timeout=60).values
    assert [lines[0].split()[1] for lines in resumed] == ["7", "7"]
    assert resumed == [lines[6:] for lines in wanted]
