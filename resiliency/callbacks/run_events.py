# SPDX-License-Identifier: Apache-2.0
"""Record the life of one rank as run events, for goodput and the incident timeline."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch.callbacks import Callback

from resiliency import log
from resiliency.events import EventStream, EventType


class RunEventsCallback(Callback):
    """Emits INITIALIZED, STEP_STARTED (first step), STEP_FINISHED (every step) and RANK_FINISHED.

    Emitting is a queue put: the stream's `BackgroundSink` does the writing.  The loss is read, and
    with it a CUDA device is waited for, only every `loss_interval_steps` steps; 0 never reads it.

    Args:
        events: where to record; closed by its owner, not here.
        loss_interval_steps: put the training loss into every n-th STEP_FINISHED.
    """

    def __init__(self, events: EventStream, *, loss_interval_steps: int = 0) -> None:
        self._events = events
        self._loss_interval_steps = loss_interval_steps
        self._step_started = 0.0
        self._first = True

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._events.emit(EventType.INITIALIZED, step=trainer.global_step)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if self._first:
            self._first = False
            self._events.emit(EventType.STEP_STARTED, step=trainer.global_step)
        self._step_started = time.monotonic()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        step = trainer.global_step
        log.set_step(step)
        loss = None
        if self._loss_interval_steps and step % self._loss_interval_steps == 0:
            value = trainer.callback_metrics.get("reduced_train_loss")
            loss = None if value is None else float(value)
        duration_s = time.monotonic() - self._step_started
        self._events.emit(EventType.STEP_FINISHED, step=step, duration_s=round(duration_s, 6), loss=loss)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._events.emit(EventType.RANK_FINISHED, step=trainer.global_step)
