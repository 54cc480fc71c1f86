# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's trainer: a crash and another number of ranks change nothing of what a step is made of."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from resiliency.errors import ConfigError
from tests.callbacks.noting_ranks import notes, train

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "hf_train.py"
#: Two epochs of 50 samples, 8 in a step.
STEPS = 14


@pytest.mark.thorough("tests/data/test_example.py goes on with another number of ranks")
def test_a_crash_and_another_number_of_ranks_change_nothing_of_the_steps(tmp_path: Path) -> None:
    undisturbed, crashed, alone = tmp_path / "undisturbed", tmp_path / "crashed", tmp_path / "alone"
    assert f"ended at step {STEPS}" in train(SCRIPT, undisturbed, ranks=2, accumulate=1)
    whole = notes(undisturbed)
    assert sorted(whole) == list(range(1, STEPS + 1))
    for epoch in (range(1, 8), range(8, 15)):
        seen = [number for step in epoch for number in whole[step][0]]
        assert sorted(set(seen)) == list(range(50))
        assert len(seen) == 50
    # In the middle of the second epoch, two steps after a checkpoint.
    train(SCRIPT, crashed, ranks=2, accumulate=1, die_at=12)
    shutil.copytree(crashed, alone)
    assert "refused: the checkpoint's steps have 8 samples, and those of this start 4" in train(
        SCRIPT, alone, ranks=1, accumulate=1
    )
    for directory, ranks in ((crashed, 2), (alone, 1)):
        for path in directory.glob("rank*.jsonl"):
            path.unlink()
        assert f"ended at step {STEPS}" in train(SCRIPT, directory, ranks=ranks, accumulate=2 // ranks)
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
