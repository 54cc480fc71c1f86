# SPDX-License-Identifier: Apache-2.0
"""What a save costs training while its copies travel: time held, and excess of the ten steps after it.

Runs in both ranks at once, each with the agent of its host; returns this rank's figures.
"""

from __future__ import annotations

import shutil
import time

from ckpt_training import Training
from replication_hosts import WAIT, Place

from resiliency.checkpoint import Checkpointer, SaveHandle, SaveState
from resiliency.checkpoint.trainer.step_times import WINDOW_STEPS

Figures = dict[str, float]


def save_while_training(rank: int, place: Place, batch: int, replicas: int) -> Figures:
    """Train, save without being measured, train, save; the second save's record is what counts."""
    local = place.scratch(f"replicas-{replicas}", rank)
    shutil.rmtree(local, ignore_errors=True)
    training = Training(place.size_bytes, rank, batch=batch)
    with place.checkpointer(local, rank, replicas=replicas) as checkpoints:
        figures = _Job(checkpoints, training).run()
    shutil.rmtree(local)
    return figures


class _Job:
    def __init__(self, checkpoints: Checkpointer, training: Training) -> None:
        self._checkpoints = checkpoints
        self._training = training
        self._step = 0

    def run(self) -> Figures:
        self._checkpoints.prewarm(self._training.state)
        for _ in range(WINDOW_STEPS):
            self._one_step()
        self._save()  # the first allocates, here and in the agents
        undisturbed = time.perf_counter()
        for _ in range(WINDOW_STEPS):
            self._one_step()
        steps_s = time.perf_counter() - undisturbed
        handle, complete_s, cost_s = self._save()
        record = handle.record
        if record.excess_s is None:
            raise ValueError("the excess of the save is not known after ten steps.")
        return {
            "held_s": record.held_s,
            "excess_s": record.excess_s,
            "cost_s": cost_s - steps_s,
            "ten_steps_s": steps_s,
            "complete_s": complete_s,
        }

    def _save(self) -> tuple[SaveHandle, float, float]:
        """Save, take ten steps, and wait until it is complete on both hosts.

        Returns also the seconds until it was complete, and those of the save and the steps.
        """
        began = time.perf_counter()
        handle = self._checkpoints.save(self._step, self._training.state)
        complete_s = 0.0
        for _ in range(WINDOW_STEPS):
            self._one_step()
            if handle.record.complete and not complete_s:  # as exact as a step is long
                complete_s = time.perf_counter() - began
        steps_s = time.perf_counter() - began
        if not handle.wait_complete(WAIT) or handle.state is not SaveState.COMMITTED:
            raise TimeoutError(f"the save is not complete after {WAIT}: {handle.record}")
        return handle, complete_s or time.perf_counter() - began, steps_s

    def _one_step(self) -> None:
        self._training.forward_backward()
        self._training.update()
        self._step += 1
        self._checkpoints.step(self._step, self._training.state)
