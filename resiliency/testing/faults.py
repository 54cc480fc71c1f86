# SPDX-License-Identifier: Apache-2.0
"""Faults are values; an injector makes them happen for real.

A `Fault` says which rank fails, when, and how.  Its text form is what command lines take:

    rank_killed,8                        the last rank gets SIGKILL 8 s after the training loop starts
    rank_hung,step=20,rank=0             rank 0 is stopped (SIGSTOP) after it finished step 20
    rank_exit,step=3,code=7,attempt=any  the last rank exits with 7 after step 3 in every attempt
    rank_killed,step=5,phase=save_started  the last rank dies inside the save of step 5

A training program reports where it is with ``injector.at(step=, phase=)``; a fault placed there
strikes in that very call, so a test can put it between any two operations.  A fault fires at most
once in the life of a process, and by default only in the first attempt, so that the restarted job
can finish.
"""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import TypeVar

from resiliency.errors import ConfigError
from resiliency.events import EventStream, EventType, RunEvent
from resiliency.runtime import RunInfo

#: How long a dying process waits for its last event to reach the sinks.
FLUSH_TIMEOUT = timedelta(seconds=2)


class FaultKind(str, Enum):
    """How a rank fails."""

    KILLED = "rank_killed"  # SIGKILL: no handler, no cleanup, as the OOM killer does
    HUNG = "rank_hung"  # SIGSTOP: alive for the kernel, silent for everybody else
    EXCEPTION = "rank_exception"  # InjectedFault is raised in the training thread
    EXIT = "rank_exit"  # os._exit(code): sockets close, no Python cleanup
    TERMINATED = "rank_terminated"  # SIGTERM: what a preemption sends first


class Phase(str, Enum):
    """A point in a rank's life at which a fault can be placed.

    Where an event exists for the point, the word is the event's.
    """

    INITIALIZED = "initialized"
    RESTORE_STARTED = "restore_started"
    STEP_STARTED = "step_started"
    BACKWARD_FINISHED = "backward_finished"
    STEP_FINISHED = "step_finished"
    SAVE_STARTED = "save_started"
    SAVE_RELEASED = "save_released"
    CHECKPOINT_SAVED = "checkpoint_saved"  # the commit; only rank 0 reports it


class InjectedFault(RuntimeError):
    """The failure of a `rank_exception` fault; never raised by anything else."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One failure, placed.  Exactly one of `step` and `delay` is set.

    Args:
        kind: how the rank fails.
        step: fire at this step (number of finished steps) ...
        delay: ... or this long after the training loop started.
        rank: global rank; None means the last one, because rank 0 has duties (rendezvous, logs)
            that make its loss a special case which a test should ask for by name.
        phase: where in the step.  With `delay`: at the first such point once the delay is over;
            None means at once, wherever the rank is by then.
        attempt: start of the job, from 0; None means every one.
        exit_code: of `FaultKind.EXIT`.
    Raises:
        ConfigError: the values exclude each other.
    """

    kind: FaultKind
    step: int | None = None
    delay: timedelta | None = None
    rank: int | None = None
    phase: Phase | None = None
    attempt: int | None = 0
    exit_code: int = 1

    def __post_init__(self) -> None:
        if (self.step is None) == (self.delay is None):
            raise ConfigError("a fault has either a step or a delay.", hint=_FORMS)
        if self.delay is not None and self.delay < timedelta(0):
            raise ConfigError(f"a fault's delay is zero or more, found {self.delay}.", hint=_FORMS)
        for name, value in (("step", self.step), ("rank", self.rank), ("attempt", self.attempt)):
            if value is not None and value < 0:
                raise ConfigError(f"a fault's {name} is zero or more, found {value}.", hint=_FORMS)
        if not 0 <= self.exit_code <= 255:
            raise ConfigError(f"a fault's exit code is 0 to 255, found {self.exit_code}.", hint=_FORMS)
        if self.exit_code != 1 and self.kind is not FaultKind.EXIT:
            raise ConfigError(f"only rank_exit has an exit code, not {self.kind.value}.", hint=_FORMS)

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Read the text form.

        Raises:
            ConfigError: the message lists the allowed forms.
        """
        kind, *rest = (part.strip() for part in text.split(","))
        when = rest[0] if rest else ""
        values: dict[str, str] = {}
        for option in rest[1:]:
            name, separator, value = option.partition("=")
            if not separator or name not in _OPTIONS:
                raise _bad(text, f"{option!r} is not one of {', '.join(f'{name}=' for name in _OPTIONS)}")
            if name in values:
                raise _bad(text, f"{name}= is given twice")
            values[name] = value
        rank, attempt = values.get("rank", "last"), values.get("attempt", "0")
        by_step = when.startswith("step=")
        return cls(
            kind=_choice(FaultKind, text, kind),
            step=_number(text, "step", when.removeprefix("step=")) if by_step else None,
            delay=None if by_step else _delay(text, when),
            rank=None if rank == "last" else _number(text, "rank", rank),
            phase=_choice(Phase, text, values["phase"]) if "phase" in values else None,
            attempt=None if attempt == "any" else _number(text, "attempt", attempt),
            exit_code=_number(text, "code", values.get("code", "1")),
        )

    def __str__(self) -> str:
        """The text form; `parse` gives the same fault back."""
        delay_s = self.delay.total_seconds() if self.delay is not None else 0.0
        parts = [self.kind.value, f"{delay_s:.6f}" if self.step is None else f"step={self.step}"]
        if self.rank is not None:
            parts.append(f"rank={self.rank}")
        if self.phase is not None:
            parts.append(f"phase={self.phase.value}")
        if self.attempt != 0:
            parts.append(f"attempt={'any' if self.attempt is None else self.attempt}")
        if self.exit_code != 1:
            parts.append(f"code={self.exit_code}")
        return ",".join(parts)

    def hits(self, info: RunInfo) -> bool:
        """True in the process that this fault is meant for."""
        rank = info.world_size - 1 if self.rank is None else self.rank
        return info.rank == rank and self.attempt in (None, info.attempt or 0)


class FaultInjector:
    """Makes faults happen in this process.

        with FaultInjector([Fault.parse("rank_killed,step=5")], info, events) as injector:
            for step in range(1, steps + 1):
                train()
                injector.at(step=step, phase=Phase.STEP_FINISHED)

    Entering the context starts the delays, so enter it when the training loop starts.  A delay
    runs on a daemon thread and strikes a busy training thread too; only an exception must wait for
    the next call of `at`, because Python cannot raise in another thread that is inside C code.

    Args:
        faults: those for other ranks and attempts are left out.
        info: identity of this process.
        events: receives `FAULT_INJECTED`, and is flushed, before the process fails.
    """

    def __init__(self, faults: Iterable[Fault], info: RunInfo, events: EventStream | None = None) -> None:
        self._pending = [fault for fault in faults if fault.hits(info)]
        self._events = events
        self._due: set[Fault] = set()
        self._lock = threading.Lock()
        self._timers: list[threading.Timer] = []
        self._step: int | None = None

    def start(self) -> None:
        """Start the delays: the training loop begins now."""
        for fault in self._pending:
            if fault.delay is not None:
                timer = threading.Timer(fault.delay.total_seconds(), self._delay_is_over, [fault])
                timer.name = "fault-injector"
                timer.daemon = True
                timer.start()
                self._timers.append(timer)

    def at(self, *, step: int | None = None, phase: Phase = Phase.STEP_FINISHED) -> None:
        """Report that this rank reached a point; a fault placed here strikes now.

        Raises:
            InjectedFault: a `rank_exception` fault.
        """
        self._step = step
        for fault in tuple(self._pending):
            if fault.delay is None:
                hit = fault.step == step and phase is (fault.phase or Phase.STEP_FINISHED)
            else:
                hit = fault in self._due and fault.phase in (None, phase)
            if hit:
                self._hit(fault)

    def attach(self, events: EventStream) -> None:
        """Let the program's own run events say where it is, instead of calls of `at`.

        Delays start when INITIALIZED is emitted; a fault placed at a phase strikes inside the call
        that emits the event of that name.
        """
        events.observe(self._on_event)

    def _on_event(self, event: RunEvent) -> None:
        if event.type is EventType.INITIALIZED:
            self.start()
        if event.type.value in _PHASES:
            self.at(step=event.step, phase=Phase(event.type.value))

    def close(self) -> None:
        """Cancel the delays that still run; idempotent."""
        for timer in self._timers:
            timer.cancel()
        for timer in self._timers:
            if timer is not threading.current_thread():
                timer.join(5)
        self._timers.clear()

    def __enter__(self) -> FaultInjector:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _delay_is_over(self, fault: Fault) -> None:
        if fault.phase is None and fault.kind is not FaultKind.EXCEPTION:
            self._hit(fault)
        else:
            self._due.add(fault)

    def _hit(self, fault: Fault) -> None:
        with self._lock:
            if fault not in self._pending:
                return
            self._pending.remove(fault)
        if self._events is not None:
            self._events.emit(EventType.FAULT_INJECTED, step=self._step, fault=str(fault))
            self._events.flush(FLUSH_TIMEOUT)
        _ACTIONS[fault.kind](fault)


def _raise(fault: Fault) -> None:
    raise InjectedFault(f"injected fault {fault}")


def _signal(number: signal.Signals) -> Callable[[Fault], None]:
    return lambda fault: os.kill(os.getpid(), number)


_ACTIONS: dict[FaultKind, Callable[[Fault], None]] = {
    FaultKind.KILLED: _signal(signal.SIGKILL),
    FaultKind.HUNG: _signal(signal.SIGSTOP),
    FaultKind.TERMINATED: _signal(signal.SIGTERM),
    FaultKind.EXCEPTION: _raise,
    FaultKind.EXIT: lambda fault: os._exit(fault.exit_code),
}

_PHASES = frozenset(phase.value for phase in Phase)
_OPTIONS = ("rank", "phase", "attempt", "code")
_FORMS = (
    "Write <fault>,<delay>[,key=value...]: fault is one of "
    f"{', '.join(kind.value for kind in FaultKind)}; delay is seconds after the training loop starts "
    "or step=N; keys are rank=R|last, attempt=A|any, code=C (rank_exit) and phase=P, one of "
    f"{', '.join(phase.value for phase in Phase)}.  Example: rank_killed,step=5,rank=1."
)


def _bad(text: str, problem: str) -> ConfigError:
    return ConfigError(f"cannot read the fault {text!r}: {problem}.", hint=_FORMS, fault=text)


def _delay(text: str, value: str) -> timedelta:
    try:
        seconds = float(value)
        if math.isfinite(seconds) and seconds >= 0:
            return timedelta(seconds=seconds)
    except (ValueError, OverflowError):
        pass
    raise _bad(text, f"the delay must be seconds (zero or more) or step=N, found {value!r}")


_Value = TypeVar("_Value", FaultKind, Phase)


def _choice(words: type[_Value], text: str, value: str) -> _Value:
    try:
        return words(value)
    except ValueError:
        raise _bad(text, f"{value!r} is not one of {', '.join(word.value for word in words)}") from None


def _number(text: str, name: str, value: str) -> int:
    if value.isascii() and value.isdigit():
        return int(value)
    raise _bad(text, f"{name} must be a whole number, zero or more, found {value!r}")
