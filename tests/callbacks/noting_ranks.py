# SPDX-License-Identifier: Apache-2.0
"""Trainings whose ranks note what each step was made of, one JSON object a micro-batch in rank<N>.jsonl."""

from __future__ import annotations

import json
import signal
import sys
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from resiliency.testing.processes import Command
from tests.ports import free_port
from tests.waiting import WAIT_S

LONG_S = 3 * WAIT_S


def train(script: Path, directory: Path, *, ranks: int, accumulate: int, die_at: int = 0) -> str:
    """Run to the end, or until all ranks are dead; returns what the first rank printed."""
    directory.mkdir(exist_ok=True)
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    world |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    argv = [sys.executable, str(script), str(directory), str(accumulate), str(die_at)]
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
