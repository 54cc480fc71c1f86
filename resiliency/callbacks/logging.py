# SPDX-License-Identifier: Apache-2.0
"""Step time, tokens per second, loss and memory: one log line a step, and TensorBoard scalars."""

from __future__ import annotations

import logging
import resource
import statistics
import time
from collections import deque
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from resiliency.errors import ConfigError
from resiliency.progress import report_step

logger = logging.getLogger(__name__)

_GIB = 1 << 30


class StepLoggingCallback(Callback):
    """Logs every `interval_steps` steps on rank 0, and at the end the median step time.

    The step time is the whole step as a user pays for it: from the end of one step to the end of
    the next, saves and data included.

    Args:
        tokens_per_step: global batch size x sequence length, for tokens per second.
        interval_steps: log (and on CUDA wait for the device) every n-th step.
    """

    def __init__(self, *, tokens_per_step: int, interval_steps: int = 1) -> None:
        if interval_steps < 1:
            raise ConfigError(f"interval_steps is at least 1, found {interval_steps}.")
        self._tokens_per_step = tokens_per_step
        self._interval_steps = interval_steps
        self._last: tuple[int, float] | None = None
        # Enough for a stable median; bounded, because a run has millions of steps.
        self._step_times: deque[float] = deque(maxlen=10_000)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._last = (trainer.global_step, time.monotonic())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        step = trainer.global_step
        report_step(step)
        if step % self._interval_steps or not trainer.is_global_zero or self._last is None:
            return
        loss = trainer.callback_metrics.get("reduced_train_loss")
        loss_value = float("nan") if loss is None else float(loss)
        now = time.monotonic()
        seconds = (now - self._last[1]) / max(step - self._last[0], 1)
        self._last = (step, now)
        self._step_times.append(seconds)
        tokens_per_s = self._tokens_per_step / seconds
        memory_bytes = peak_memory_bytes()
        logger.info(
            "step %d/%s  loss %.4f  %.3f s  %s tokens/s  %.2f GiB",
            step,
            trainer.max_steps if trainer.max_steps > 0 else "-",
            loss_value,
            seconds,
            f"{tokens_per_s:,.0f}",
            memory_bytes / _GIB,
        )
        scalars = {"step_time_s": seconds, "tokens_per_s": tokens_per_s, "peak_memory_bytes": memory_bytes}
        for sink in trainer.loggers:
            sink.log_metrics(scalars, step=step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero and self._step_times:
            median = statistics.median(self._step_times)
            logger.info(
                "median step %.3f s, %s tokens/s over %d logged steps of this attempt",
                median,
                f"{self._tokens_per_step / median:,.0f}",
                len(self._step_times),
            )


def peak_memory_bytes() -> int:
    """Peak memory of this rank: of the CUDA allocator where there is one, else of the process."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
