# SPDX-License-Identifier: Apache-2.0
"""Traces of the steps around a checkpoint, to see what a save costs and where."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from resiliency.errors import ConfigError

logger = logging.getLogger(__name__)


class ProfileCheckpointCallback(Callback):
    """Profiles the step that ends with every `interval_steps`-th step and the two steps after it.

    The trace opens in Perfetto or ``chrome://tracing``; each rank writes its own file
    ``<trace_name>-rank<R>-step<N>.json`` into `trace_dir`.  Profiling itself costs time: leave it
    off when you measure goodput.

    Args:
        trace_dir: directory for traces; created when the first one is written.
        interval_steps: profile around every n-th step; choose the checkpoint interval.
        trace_name: prefix of the file names.
        steps_after: steps to record after the save, where the excess of an async save hides.
    """

    def __init__(
        self, trace_dir: str | Path, interval_steps: int, *, trace_name: str = "trace", steps_after: int = 2
    ) -> None:
        if interval_steps <= steps_after:
            raise ConfigError(
                f"profiling every {interval_steps} steps overlaps with the {steps_after} steps recorded "
                "after a save.",
                hint=f"Choose an interval above {steps_after}.",
                flag="--profile-ckpt-interval",
            )
        self._trace_dir = Path(trace_dir)
        self._interval_steps = interval_steps
        self._trace_name = trace_name
        self._steps_after = steps_after
        self._profiler: torch.profiler.profile | None = None
        self._around = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        around = trainer.global_step + 1
        if self._profiler is None and around % self._interval_steps == 0:
            self._around = around
            self._profiler = torch.profiler.profile()
            self._profiler.start()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_step >= self._around + self._steps_after:
            self._finish(trainer.global_rank)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._finish(trainer.global_rank)

    def _finish(self, rank: int) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        profiler.stop()
        self._trace_dir.mkdir(parents=True, exist_ok=True)
        path = self._trace_dir / f"{self._trace_name}-rank{rank}-step{self._around}.json"
        profiler.export_chrome_trace(str(path))
        logger.info("wrote the trace around step %d to %s", self._around, path)
