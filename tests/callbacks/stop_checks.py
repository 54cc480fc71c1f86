# SPDX-License-Identifier: Apache-2.0
"""Checks of `AutoCheckpointCallback`: real signals in a real Lightning loop."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.callbacks.checks import Run, check, refusal
from tests.waiting import wait_until

MANY = 100_000


def stopper(**options: Any) -> Any:
    from resiliency.callbacks.autocheckpoint import AutoCheckpointCallback

    return AutoCheckpointCallback(**options)


def signal_after(step: int, auto: Any, number: signal.Signals = signal.SIGTERM) -> Any:
    """A callback that signals this process when `step` steps are done, and waits until that is known."""
    from lightning.pytorch.callbacks import Callback

    class Signaller(Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == step:
                os.kill(os.getpid(), number)
                wait_until(lambda: auto._termination.requested, "the signal is not noticed")

    return Signaller()


@check
def sigterm_saves_the_step_at_which_it_stops_and_exits_with_0(directory: Path) -> None:
    from resiliency.checkpoint.stop.termination import Terminated
    from resiliency.events import EventType

    run = Run(directory)
    auto = stopper(events=run.events)
    try:
        with pytest.raises(Terminated) as caught:
            run.train(MANY, auto, signal_after(5, auto), run.tier(100))
        # This process is about to end: one more signal must not turn a good end into a bad one.
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert (caught.value.code, caught.value.step, caught.value.committed) == (0, 6, True)
    assert run.names() == ["step=6"]
    assert run.steps_of("checkpoint_saved") == [6]
    (asked,) = run.sink.of_type(EventType.STOP_REQUESTED)
    assert asked.fields == {"cause": "SIGTERM", "deadline_s": 25.0}


@check
def sigterm_to_loader_workers_as_well_saves_the_step_at_which_it_stops(directory: Path) -> None:
    import torch
    from lightning.pytorch.callbacks import Callback

    class EndsWorkers(Callback):
        """Before the rank: the next batch would be lost with a worker."""

        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            workers = multiprocessing.active_children()
            assert len(workers) == 2
            if trainer.global_step == 5:
                pids = [str(pid) for pid in (*(worker.pid for worker in workers), os.getpid())]
                subprocess.run(["kill", "-TERM", *pids], check=True)
                wait_until(lambda: auto._termination.requested, "the signal is not noticed")

    run = Run(directory)
    run.loader = lambda: torch.utils.data.DataLoader(torch.ones(1000, 1), num_workers=2)
    auto = stopper(exit_process=False)
    run.train(MANY, auto, EndsWorkers(), run.tier(100))
    assert auto.stopped_at == 6
    assert run.names() == ["step=6"]


@check
def a_step_that_is_due_anyway_is_saved_once(directory: Path) -> None:
    run = Run(directory)
    auto = stopper(exit_process=False)
    run.train(MANY, auto, signal_after(7, auto), run.tier(4))
    assert auto.stopped_at == 8
    assert run.steps_of("save_started") == [4, 8]


@check
def after_the_fit_signals_do_what_they_did_before_it(directory: Path) -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: came.append(number))
    try:
        mine = signal.getsignal(signal.SIGTERM)
        run = Run(directory)
        auto = stopper(exit_process=False)
        run.train(MANY, auto, signal_after(1, auto), run.tier(100))
        assert came == [signal.SIGTERM]  # the program's own handler is called as well
        assert signal.getsignal(signal.SIGTERM) is mine
        again = stopper()
        run.train(2, again, run.tier(100, "local"))
        assert again.stopped_at is None
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


@check
def one_more_signal_ends_nothing_until_the_last_hooks_have_run(directory: Path) -> None:
    from lightning.pytorch.callbacks import Callback

    from resiliency.checkpoint.stop.termination import Terminated

    class Late(Callback):
        def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL  # would kill this process
            os.kill(os.getpid(), signal.SIGTERM)

    run = Run(directory)
    auto = stopper()
    try:
        with pytest.raises(Terminated) as caught:
            run.train(MANY, Late(), auto, signal_after(1, auto), run.tier(100))
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert (caught.value.code, caught.value.step) == (0, 2)


@check
def a_program_that_goes_on_after_a_stop_can_be_ended_by_the_next_signal(directory: Path) -> None:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    run = Run(directory)
    auto = stopper(exit_process=False)
    run.train(MANY, auto, signal_after(1, auto), run.tier(100))
    assert auto.stopped_at == 2
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@check
def only_the_signals_that_were_asked_for_stop_it(directory: Path) -> None:
    run = Run(directory)
    auto = stopper(signals=[signal.SIGUSR1], exit_process=False)
    run.train(MANY, auto, signal_after(3, auto, signal.SIGUSR1), run.tier(100))
    assert (auto.stopped_at, run.names()) == (4, ["step=4"])


@check
def a_stop_needs_no_minimum_of_steps_and_runs_no_validation(directory: Path) -> None:
    run = Run(directory)
    auto = stopper(exit_process=False)
    run.train(
        MANY, auto, signal_after(5, auto), run.tier(100),
        min_steps=500, limit_val_batches=1, val_check_interval=4, num_sanity_val_steps=0,
    )  # fmt: skip
    assert auto.stopped_at == 6
    assert run.validated_at == [4]


@check
def a_trainer_that_was_stopped_is_afterwards_as_it_was_before(directory: Path) -> None:
    run = Run(directory)
    auto = stopper(exit_process=False)
    trainer = run.train(
        MANY, auto, signal_after(5, auto), run.tier(100),
        min_steps=500, min_epochs=1, limit_val_batches=1, val_check_interval=4, num_sanity_val_steps=0,
    )  # fmt: skip
    assert auto.stopped_at == 6
    loop = trainer.fit_loop
    assert (loop.min_steps, loop.min_epochs, trainer.limit_val_batches) == (500, 1, 1)
    assert not trainer.should_stop


@check
def a_signal_just_before_the_first_step_stops_it_after_its_first_step(directory: Path) -> None:
    from lightning.pytorch.callbacks import Callback

    from resiliency.checkpoint.stop.termination import Terminated

    class Early(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            wait_until(lambda: trainer.received_sigterm, "the signal is not noticed")

    run = Run(directory)
    with pytest.raises(Terminated) as caught:
        run.train(MANY, Early(), stopper(), run.tier(100))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert (caught.value.code, caught.value.committed) == (0, True)
    assert run.names() == [f"step={caught.value.step}"]


@check
def a_save_that_fails_at_the_stop_is_an_error_and_not_a_good_end(directory: Path) -> None:
    from resiliency.errors import CheckpointWriteFailed

    run = Run(directory)
    run.fail_at = 6
    auto = stopper()
    with pytest.raises(CheckpointWriteFailed):
        run.train(MANY, auto, signal_after(5, auto), run.tier(4))
    assert "step=4" in run.names()
    assert "step=6-unfinished" in run.names()


@check
def a_callback_without_anybody_who_saves_is_refused(directory: Path) -> None:
    assert "needs a resiliency.callbacks.model_checkpoint.ModelCheckpoint" in refusal(
        lambda: Run(directory).train(2, stopper())
    )
    assert "must be positive" in refusal(lambda: stopper(deadline=timedelta(0)))
