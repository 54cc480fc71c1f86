# SPDX-License-Identifier: Apache-2.0
"""NeMo's samplers in real trainings that are killed: which samples each optimizer step was made of."""

from __future__ import annotations

import json
import signal
import sys
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

import pytest

from resiliency.testing.processes import Command
from tests.nemo.conftest import ATTEMPT_S
from tests.ports import free_port

pytestmark = [pytest.mark.nemo, pytest.mark.slow]

PROGRAM = Path(__file__).parent / "noting_data.py"


def train(
    directory: Path, *, ranks: int, steps: int, samples: int, kind: str, ramp: str, die_at: int
) -> None:
    """One life of `noting_data`, to its end or until all ranks are dead."""
    words = [str(directory), *map(str, (steps, samples, kind, ramp, die_at))]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    with ExitStack() as stack:
        programs = [
            stack.enter_context(
                Command(
                    [sys.executable, "-W", "ignore", str(PROGRAM), *words],
                    env={**world, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)},
                    cwd=directory,
                )
            )
            for rank in range(ranks)
        ]
        for program in programs:
            assert program.wait(timeout=ATTEMPT_S) == (-signal.SIGKILL if die_at else 0), program.output


def noted(directory: Path, world: int) -> dict[int, list[int]]:
    """Step -> the samples that `world` ranks took for it, in order."""
    found: dict[int, list[int]] = defaultdict(list)
    for path in directory.glob(f"rank*-of-{world}.jsonl"):
        for line in path.read_text().splitlines():
            step, number = json.loads(line)
            found[step].append(number)
        path.unlink()
    return {step: sorted(found[step]) for step in sorted(found)}


def test_a_ramp_up_that_is_killed_after_a_validation_goes_on_at_another_size_with_the_next_samples(
    tmp_path: Path,
) -> None:
    of_step, first = {}, 0
    for step, size in enumerate((2, 2, 2, 2, 4, 4, 6, 6, 8, 8), 1):
        of_step[step] = list(range(first, first + size))
        first += size
    training = {"steps": 10, "samples": 200, "kind": "single", "ramp": "2,2,24"}
    train(tmp_path, ranks=2, die_at=6, **training)  # type: ignore[arg-type]
    assert noted(tmp_path, 2) == {step: of_step[step] for step in range(1, 7)}
    train(tmp_path, ranks=1, die_at=0, **training)  # type: ignore[arg-type]
    assert noted(tmp_path, 1) == {step: of_step[step] for step in range(7, 11)}


@pytest.mark.thorough("the killed ramp-up is near")
@pytest.mark.parametrize("kind", ["cyclic", "batch"])
def test_an_epoch_that_is_killed_has_each_sample_once_and_so_has_the_next_one(
    kind: str, tmp_path: Path
) -> None:
    training = {"ranks": 1, "steps": 12, "samples": 42, "kind": kind, "ramp": "none"}
    train(tmp_path, die_at=8, **training)  # type: ignore[arg-type]
    before = noted(tmp_path, 1)
    train(tmp_path, die_at=0, **training)  # type: ignore[arg-type]
    after = noted(tmp_path, 1)
    assert (list(before), list(after)) == (list(range(1, 9)), list(range(9, 13)))
    steps = {**before, **after}
    assert {len(numbers) for numbers in steps.values()} == {8}
    for epoch in (range(1, 6), range(6, 11), range(11, 13)):  # of 5 steps; 2 samples are left out
        taken = [number for step in epoch for number in steps[step]]
        assert len(set(taken)) == len(taken) == 8 * len(epoch)
