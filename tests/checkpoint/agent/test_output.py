# SPDX-License-Identifier: Apache-2.0
"""What an agent says when its trainers have gone and others come is overwritten by none of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from resiliency.testing import warm

AGENT = """
import sys
from resiliency.checkpoint.agent.output import AgentOutput

output = AgentOutput("job")
output.left_alone()
output.joined_by(int(sys.argv[1]))
print("a word of the agent", file=sys.stderr, flush=True)
"""


def said_beside(trainer_says: Path, how: str, directory: Path) -> int:
    """Have an agent that was left alone join a trainer whose standard error is a file, opened for `how`."""
    with trainer_says.open(how) as stderr:
        # `cat` stands for the trainer: it lives until its standard input ends.
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stderr=stderr) as trainer:
            argv = [sys.executable, "-c", AGENT, str(trainer.pid)]
            env = {**os.environ, "TMPDIR": str(directory)}
            agent = warm.run(argv, env=env, timeout=60)
        stderr.write("a word of the trainer\n")
    return agent.returncode


@pytest.mark.parametrize(("how", "joins"), [("a", True), ("w", False)])
def test_a_trainers_file_is_taken_over_only_if_both_add_to_its_end(
    tmp_path: Path, how: str, joins: bool
) -> None:
    log = tmp_path / "trainer.log"
    assert said_beside(log, how, tmp_path) == 0
    own = (tmp_path / "job-agent.log").read_text()
    assert ("a word of the agent" in log.read_text()) is joins
    assert ("a word of the agent" in own) is not joins
    assert "a word of the trainer" in log.read_text()


@pytest.mark.slow
def test_a_pipe_that_somebody_put_in_the_place_of_the_agents_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "job-agent.log")
    assert said_beside(tmp_path / "trainer.log", "a", tmp_path) == 0
