# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's trainer: a crash and another number of ranks change nothing of what a step is made of."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from resiliency.errors import ConfigError
from resiliency.testing.processes import Command
from tests.ports import free_port
from tests.waiting import WAIT_S

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "hf_train.py"
#: Two epochs of 50 samples, 8 in a step.
STEPS = 14
LONG_S = 3 * WAIT_S


def train(directory: Path, *, ranks: int, accumulate: int, die_at: int = 0) -> str:
    """Run to the end, or until all ranks are dead; returns what the first rank printed."""
    directory.mkdir(exist_ok=True)
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    argv = [sys.executable, str(SCRIPT), str(directory), str(accumulate), str(die_at)]
    logs = [directory / f"log-{rank}-of-{ranks}-{accumulate}-{die_at}.txt" for rank in range(ranks)]
    with ExitStack() as stack:
        programs = []
        for rank, log in enumerate(logs):
            own = world | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
            program = Command(argv, env={"OMP_NUM_THREADS": "1", **own}, log=log)
            programs.append(stack.enter_context(program))
        for program, log in zip(programs, logs, strict=True):
            code = program.wait(timeout=LONG_S)
            assert code == (-signal.SIGKILL if die_at else 0), log.read_text()[-3000:]
    return logs[0].read_text()


def notes(directory: Path) -> dict[int, tuple[list[int], float]]:
    """By step: the samples of all ranks, in order, and the mean of their losses."""
    found: dict[int, dict[str, list[dict[str, Any]]]] = defaultdict(dict)
    for path in sorted(directory.glob("rank*.jsonl")):
        by_step: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for line in path.read_text().splitlines():
            note = json.loads(line)
            by_step[note["step"]].append(note)
        for step, of_rank in by_step.items():
            found[step][path.name] = of_rank
    result = {}
    for step, ranks in found.items():
        all_notes = [note for of_rank in ranks.values() for note in of_rank]
        numbers = sorted(number for note in all_notes for number in note["numbers"])
        weight = sum(len(note["numbers"]) for note in all_notes)
        loss = sum(note["loss"] * len(note["numbers"]) for note in all_notes) / weight
        result[step] = numbers, loss
    return result


def test_a_crash_and_another_number_of_ranks_change_nothing_of_the_steps(tmp_path: Path) -> None:
    undisturbed, crashed, alone = tmp_path / "undisturbed", tmp_path / "crashed", tmp_path / "alone"
    assert f"ended at step {STEPS}" in train(undisturbed, ranks=2, accumulate=1)
    whole = notes(undisturbed)
    assert sorted(whole) == list(range(1, STEPS + 1))
    for epoch in (range(1, 8), range(8, 15)):
        seen = [number for step in epoch for number in whole[step][0]]
        assert sorted(set(seen)) == list(range(50))
        assert len(seen) == 50
    # In the middle of the second epoch, two steps after a checkpoint.
    train(crashed, ranks=2, accumulate=1, die_at=12)
    shutil.copytree(crashed, alone)
    assert "refused: the checkpoint's steps have 8 samples, and those of this start 4" in train(
        alone, ranks=1, accumulate=1
    )
    for directory, ranks in ((crashed, 2), (alone, 1)):
        for path in directory.glob("rank*.jsonl"):
            path.unlink()
        assert f"ended at step {STEPS}" in train(directory, ranks=ranks, accumulate=2 // ranks)
        again = notes(directory)
        assert sorted(again) == list(range(11, STEPS + 1))
        assert [again[step][0] for step in again] == [whole[step][0] for step in again]
    for step, (_, loss) in notes(crashed).items():
        assert loss == pytest.approx(whole[step][1], rel=1e-6)


GOOD = {
    "group_by_length": False,
    "auto_find_batch_size": False,
    "n_gpu": 0,
    "ignore_data_skip": False,
    "parallelism_config": None,
    "deepspeed": None,
}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"group_by_length": True}, "group_by_length=True orders samples by the trainer's own draw"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True changes how many samples a step has"),
        ({"n_gpu": 4}, "one process trains on 4 GPUs"),
        ({"ignore_data_skip": True}, "ignore_data_skip=True begins the epoch again"),
        ({"deepspeed": "zero.json"}, "ranks that share samples"),
    ],
)
def test_what_leaves_no_position_is_refused(change: dict[str, object], sentence: str) -> None:
    from resiliency.callbacks.hf_data import _check

    _check(SimpleNamespace(**GOOD), [1, 2])
    with pytest.raises(ConfigError, match=sentence):
        _check(SimpleNamespace(**{**GOOD, **change}), [1, 2])
    with pytest.raises(ConfigError, match="has no length or is iterable"):
        _check(SimpleNamespace(**GOOD), iter([1]))
