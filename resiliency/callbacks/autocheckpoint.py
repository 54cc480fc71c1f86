# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of the last step when a job is ended from outside.

    trainer = nl.Trainer(callbacks=[ModelCheckpoint(directory, 1000), AutoCheckpointCallback()], ...)

On SIGTERM at any rank all ranks agree on one step, train to it and stop; `ModelCheckpoint` saves that
step, into all tiers that a checkpoint process writes, and waits until it is committed; then the process
ends with exit code 0, so that whoever starts the job again goes on from there.  With two tiers, one of
them is enough if the time ends before the other is written.  How ranks agree, and what happens when
they cannot, is told in `resiliency.checkpoint.stop.termination`.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

from lightning.pytorch.callbacks import Callback

from resiliency.callbacks.model_checkpoint import ModelCheckpoint
from resiliency.checkpoint.ranks import RankGroup
from resiliency.checkpoint.stop.loader_workers import outliving
from resiliency.checkpoint.stop.termination import Termination, TerminationOptions
from resiliency.errors import ConfigError
from resiliency.events import EventStream, EventType
from resiliency.plugins.persistent_ckpt_proc import process_of
from resiliency.progress import report_step, watch_rank

logger = logging.getLogger(__name__)

#: Of the deadline, left for the ranks to agree in which tiers the last step is.
_TIME_TO_AGREE = timedelta(seconds=1)


class AutoCheckpointCallback(Callback):
    """Stops training for a signal, with its last step saved.  On all ranks alike; needs `ModelCheckpoint`.

    It takes the place of Lightning's own handlers for these signals while a fit runs, Slurm's automatic
    requeue among them; handlers that the program had installed before are called.

    A validation that is under way ends first.  If the checkpoint is not committed by the deadline, or a
    rank is dead, the process ends with 128 + signal, and older checkpoints are as they were.

    Args:
        deadline: from the signal until the checkpoint must be committed: some seconds less than what your
            platform leaves before it kills (Kubernetes: ``terminationGracePeriodSeconds``, 30 by default).
        signals: what stops the job.  Slurm's ``--signal=USR1@120`` needs SIGUSR1; with SIGINT the first
            Ctrl-C saves and the second ends at once.
        events: where the request is recorded.
        exit_process: raise `resiliency.checkpoint.stop.termination.Terminated`, a SystemExit, when the fit
            is over; False: return from it as if training had ended, see `stopped_at`, with trainer and
            signal handlers as they were before.
    """

    #: The step at which training was stopped from outside, or None.
    stopped_at: int | None = None

    def __init__(
        self,
        *,
        deadline: timedelta = timedelta(seconds=25),
        signals: Iterable[signal.Signals] = (signal.SIGTERM,),
        events: EventStream | None = None,
        exit_process: bool = True,
    ) -> None:
        self._options = TerminationOptions(deadline=deadline, signals=tuple(signals))
        self._events = events
        self._exit_process = exit_process
        self._termination: Termination | None = None
        self._restore: Callable[[], None] | None = None
        self._workers = ExitStack()
        self._step = -1

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Raises: ConfigError: there is nobody to save."""
        if stage == "fit" and not any(isinstance(c, ModelCheckpoint) for c in trainer.checkpoint_callbacks):
            raise ConfigError(
                "AutoCheckpointCallback needs a resiliency.callbacks.model_checkpoint.ModelCheckpoint,"
                " which saves when training ends.",
                hint="Add one to the trainer's callbacks.",
            )
        watch_rank()
        if stage == "fit":  # Lightning starts the loaders' workers before the first hook of training
            self._workers.enter_context(outliving(self._options.signals))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.stopped_at, self._step = None, trainer.global_step
        self._step_over_lightning(trainer)
        self._termination = Termination(
            RankGroup.of_process_group(),
            self._options,
            on_request=lambda cause: self._lift_bandwidth_cap(trainer, cause),
            on_leave=self._flush,
        )
        # A signal that came while data were made ready: Lightning would end this rank alone for it.
        noticed = trainer._signal_connector
        if noticed.received_sigterm and signal.SIGTERM in self._options.signals:
            noticed.received_sigterm = False
            self._termination.request()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """Stop here if all ranks do.  Checkpoint callbacks come after this one, as Lightning orders them."""
        report_step(trainer.global_step)
        if trainer.global_step == self._step or self._termination is None:
            return  # gradients are being accumulated
        self._step = trainer.global_step
        if self._termination.boundary(self._step):
            self.stopped_at = self._step
            self._restore = _stop(trainer, self._termination)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """From here on only the deadline may end the process: saving takes what it takes."""
        if self._termination is not None:
            self._termination.leaving()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """The last step is committed, or the checkpoint callbacks had raised."""
        termination = self._termination
        if termination is None:
            return
        if self.stopped_at is None:
            self._close(finished=True)
            return
        terminated = termination.terminated(self.stopped_at, committed=True)
        logger.warning("step %d is committed; %s ends this rank", self.stopped_at, terminated.cause)
        self._close(finished=True)
        if self._exit_process:
            raise terminated

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close(finished=False)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._close(finished=False)

    def _close(self, *, finished: bool) -> None:
        termination, self._termination = self._termination, None
        if termination is not None:
            termination.close(finished=finished, ending=self._exit_process)
        self._workers.close()
        restore, self._restore = self._restore, None
        if restore is not None:
            restore()

    def _step_over_lightning(self, trainer: Any) -> None:
        """Put back the handlers that Lightning replaced, and take that off what it does at the end.

        Its own would end each rank at its next batch, without a checkpoint, and not at one step.  At the
        end it would put them back before the last hooks have run: one more signal would kill this rank.
        """
        replaced = trainer._signal_connector._original_handlers
        for number in self._options.signals:
            if number in replaced:
                previous = replaced.pop(number)
                signal.signal(number, signal.SIG_DFL if previous is None else previous)

    def _lift_bandwidth_cap(self, trainer: Any, cause: str) -> None:
        """In the watcher's thread."""
        if self._events is not None:
            deadline_s = self._options.deadline.total_seconds()
            self._events.emit(EventType.STOP_REQUESTED, cause=cause, deadline_s=deadline_s)
        process = process_of(trainer)
        if process is not None:
            process.lift_bandwidth_cap()

    def _flush(self, why: str) -> None:
        if self._events is not None:
            self._events.flush(timedelta(seconds=1))


def _stop(trainer: Any, termination: Termination) -> Callable[[], None]:
    """End the fit after this batch: no more steps, however few there were, and no validation.

    Returns:
        What puts the trainer's settings back, for another fit.
    """

    def until_the_deadline() -> timedelta:
        return max(timedelta(), termination.time_left() - _TIME_TO_AGREE)

    settings: list[tuple[Any, str, object]] = [
        (trainer, "should_stop", True),
        (trainer, "limit_val_batches", 0),
        (trainer.fit_loop, "min_epochs", None),
        (trainer.fit_loop.epoch_loop, "min_steps", None),
    ]
    process = process_of(trainer)
    if process is not None:
        settings += [(process, "timeouts", until_the_deadline), (process, "is_stopping", True)]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in settings]
    _set(settings)
    return lambda: _set(before)


def _set(settings: Iterable[tuple[Any, str, object]]) -> None:
    for owner, name, value in settings:
        setattr(owner, name, value)
