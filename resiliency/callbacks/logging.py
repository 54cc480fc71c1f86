# SPDX-License-Identifier: Apache-2.0
"""Step time, tokens per second, loss and memory: log lines of rank 0, and TensorBoard scalars.

Each class logs what its name says, and writes the same numbers to the trainer's loggers and, given `tb_dir`,
to TensorBoard files of its own.  `StepLoggingCallback` alone is enough for most jobs.
"""

from __future__ import annotations

import logging
import resource
import statistics
import time
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from lightning.pytorch.callbacks import Callback

from resiliency.errors import ConfigError
from resiliency.progress import report_step, watch_rank
from resiliency.runtime import check_loss

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger(__name__)

_GIB = 1 << 30


class TensorboardCallback(Callback):
    """Opens TensorBoard files on rank 0 for the time of a fit; subclasses write scalars with `write_scalar`.

    After a restart from an earlier step, TensorBoard shows the new values of steps that were done again.

    Args:
        tb_dir: directory for the files; None writes none.
    """

    def __init__(self, tb_dir: str | Path | None) -> None:
        self._tb_dir = tb_dir
        self._writer: SummaryWriter | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # the restored step is known by then
        if self._tb_dir is not None and trainer.is_global_zero:
            # torch looks for the tensorboard package when this is imported.
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._tb_dir), purge_step=trainer.global_step + 1)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close()

    def write_scalar(self, tag: str, value: float, step: int) -> None:
        """Write one value where files are open."""
        if self._writer is not None:
            self._writer.add_scalar(tag, value, step)

    def _close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


class _StepTimes:
    """Seconds of a step as a user pays for it: from end to end, saves and data included.

    Args:
        interval_steps: measure over that many steps at a time.
        sync_cuda: wait for the device before the clock is read.
    """

    def __init__(self, interval_steps: int, *, sync_cuda: bool = False) -> None:
        if interval_steps < 1:
            raise ConfigError(f"interval_steps is at least 1, found {interval_steps}.")
        self._interval_steps = interval_steps
        self._sync_cuda = sync_cuda
        self._last: tuple[int, float] | None = None

    def start(self, step: int) -> None:
        self._last = (step, self._now())

    def measure(self, step: int) -> float | None:
        """Mean seconds of the steps since the last measurement; None where none is due."""
        if step % self._interval_steps or self._last is None or step <= self._last[0]:
            return None
        now = self._now()
        seconds = (now - self._last[1]) / (step - self._last[0])
        self._last = (step, now)
        return seconds

    def _now(self) -> float:
        if self._sync_cuda and torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.monotonic()


class StepLoggingCallback(TensorboardCallback):
    """Logs every `interval_steps` steps on rank 0, and at the end the median step time.

    The step time is the whole step as a user pays for it: from the end of one step to the end of
    the next, saves and data included.

    Args:
        tb_dir: see `TensorboardCallback`.
        timer_kwargs: ``{"sync_cuda": True}`` waits for the device before each measurement.
        tokens_per_step: global batch size x sequence length, for tokens per second; None: none are logged.
        interval_steps: log (and on CUDA wait for the loss) every n-th step.
    """

    def __init__(
        self,
        tb_dir: str | Path | None = None,
        timer_kwargs: Mapping[str, Any] | None = None,
        *,
        tokens_per_step: int | None = None,
        interval_steps: int = 1,
    ) -> None:
        super().__init__(tb_dir)
        options = dict(timer_kwargs or {})
        self._times = _StepTimes(interval_steps, sync_cuda=bool(options.pop("sync_cuda", False)))
        if options:
            raise ConfigError(
                f"timer_kwargs: unknown {', '.join(sorted(options))}.", hint="It takes sync_cuda alone."
            )
        self._tokens_per_step = tokens_per_step
        # Enough for a stable median; bounded, because a run has millions of steps.
        self._step_times: deque[float] = deque(maxlen=10_000)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        watch_rank()
        super().on_train_start(trainer, pl_module)
        self._times.start(trainer.global_step)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        step = trainer.global_step
        report_step(step)
        seconds = self._times.measure(step) if trainer.is_global_zero else None
        if seconds is None:
            return
        loss = trainer.callback_metrics.get("reduced_train_loss")
        self._step_times.append(seconds)
        memory_bytes = peak_memory_bytes()
        logger.info(
            "step %d/%s  loss %.4f  %.3f s%s  %.2f GiB",
            step,
            trainer.max_steps if trainer.max_steps > 0 else "-",
            float("nan") if loss is None else float(loss),
            seconds,
            self._tokens_text(seconds, "  "),
            memory_bytes / _GIB,
        )
        if loss is not None:
            check_loss(float(loss), step=step)
        scalars = {"step_time_s": seconds, "peak_memory_bytes": memory_bytes}
        if self._tokens_per_step is not None:
            scalars["tokens_per_s"] = self._tokens_per_step / seconds
        _log_scalars(self, trainer, scalars, step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero and self._step_times:
            median = statistics.median(self._step_times)
            logger.info(
                "median step %.3f s%s over %d logged steps of this attempt",
                median,
                self._tokens_text(median, ", "),
                len(self._step_times),
            )

    def _tokens_text(self, seconds: float, before: str) -> str:
        if self._tokens_per_step is None:
            return ""
        return f"{before}{self._tokens_per_step / seconds:,.0f} tokens/s"


class TPSLoggingCallback(TensorboardCallback):
    """Logs tokens per second of each `interval_steps`-th step on rank 0.

    Args:
        gbs: global batch size, in samples.
        seq_length: tokens of a sample.
        tb_dir: see `TensorboardCallback`.
        interval_steps: log every n-th step.
    """

    def __init__(
        self, gbs: int, seq_length: int, tb_dir: str | Path | None = None, *, interval_steps: int = 1
    ) -> None:
        super().__init__(tb_dir)
        if gbs < 1 or seq_length < 1:
            raise ConfigError(f"gbs and seq_length are at least 1, found {gbs} and {seq_length}.")
        self._tokens_per_step = gbs * seq_length
        self._times = _StepTimes(interval_steps)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        self._times.start(trainer.global_step)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        step = trainer.global_step
        seconds = self._times.measure(step) if trainer.is_global_zero else None
        if seconds is not None:
            tokens_per_s = self._tokens_per_step / seconds
            logger.info("step %d: %s tokens/s", step, f"{tokens_per_s:,.0f}")
            _log_scalars(self, trainer, {"tokens_per_s": tokens_per_s}, step)


class MemoryLoggingCallback(Callback):
    """Logs what memory holds on rank 0: before training, and after the first step, which fills the optimizer.

    Parameters and optimizer state are counted once for each storage, by device.
    """

    def __init__(self) -> None:
        self._logged_step = False

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._log("before training", trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if not self._logged_step:
            self._logged_step = True
            self._log(f"after step {trainer.global_step}", trainer, pl_module)

    def _log(self, moment: str, trainer: Any, pl_module: Any) -> None:
        if not trainer.is_global_zero:
            return
        host = psutil.virtual_memory()
        texts = [f"host {(host.total - host.available) / _GIB:.2f} of {host.total / _GIB:.2f} GiB used"]
        if torch.cuda.is_available():
            texts.append(
                f"CUDA {torch.cuda.memory_allocated() / _GIB:.2f} GiB allocated, "
                f"{torch.cuda.memory_reserved() / _GIB:.2f} reserved"
            )
        state = (
            value
            for optimizer in getattr(trainer, "optimizers", None) or ()
            for values in optimizer.state.values()
            if isinstance(values, Mapping)  # Megatron's distributed optimizer keeps other things as well
            for value in values.values()
        )
        for name, tensors in (("parameters", pl_module.parameters()), ("optimizer state", state)):
            texts += [f"{name} {size / _GIB:.2f} GiB on {device}" for device, size in _sizes(tensors).items()]
        logger.info("memory %s: %s", moment, "; ".join(texts))


def _sizes(values: Iterable[Any]) -> dict[str, int]:
    """Bytes of the tensors among `values` by type of device, each storage once."""
    seen: set[tuple[str, int]] = set()
    sizes: dict[str, int] = {}
    for value in values:
        if not isinstance(value, torch.Tensor):
            continue
        local = value.to_local() if hasattr(value, "to_local") else value
        storage = local.untyped_storage()
        if (key := (str(local.device), storage.data_ptr())) not in seen:
            seen.add(key)
            sizes[local.device.type] = sizes.get(local.device.type, 0) + storage.nbytes()
    return sizes


def _log_scalars(
    callback: TensorboardCallback, trainer: Any, scalars: Mapping[str, float], step: int
) -> None:
    for sink in trainer.loggers:
        sink.log_metrics(dict(scalars), step=step)
    for name, value in scalars.items():
        callback.write_scalar(f"train/{name}", value, step)


def peak_memory_bytes() -> int:
    """Peak memory of this rank: of the CUDA allocator where there is one, else of the process."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
