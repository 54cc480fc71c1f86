# SPDX-License-Identifier: Apache-2.0
"""How much of a window is a rank's own, from the looks at it and what it noted at them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from resiliency.launch.hangs.moments import MomentsOfRank
from resiliency.rank.inspection import Moments, RankAnswer, questions_file
from tests.waiting import wait_until

LOOKS = 40


@pytest.fixture
def asleep(tmp_path: Path) -> Iterator[MomentsOfRank]:
    """Looked at 40 times, in each of which its main thread slept."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        questions = questions_file(str(tmp_path), process.pid)
        os.mkfifo(questions)
        reader = os.open(questions, os.O_RDWR)
        rank = MomentsOfRank(process.pid, str(tmp_path))
        stat = Path(f"/proc/{process.pid}/stat")
        wait_until(lambda: stat.read_text().startswith(f"{process.pid} (sleep) S"), "it does not sleep")
        rank.restart(7)
        for _ in range(LOOKS):
            rank.look()
        yield rank
        rank.close()
        os.close(reader)
        process.kill()


@pytest.mark.parametrize(("noted", "is_usual"), [(LOOKS, True), (LOOKS - 4, True), (LOOKS // 2, False)])
def test_a_window_in_which_a_rank_slept_and_could_not_say_where_is_no_usual_one(
    asleep: MomentsOfRank, noted: int, is_usual: bool
) -> None:
    """In a save to storage that hangs it keeps the interpreter, and the others wait for it."""
    waiting = Moments(state="S", calls=(("train.py", "main"),), count=noted)
    answer = RankAnswer(groups=(), moments=(waiting,))
    own = asleep.own_time(answer, rank=0, host="h", step=17)
    assert (own is not None) == is_usual
    if own is not None:
        assert (own.samples, own.waiting, own.steps) == (noted, noted, 10)
