# SPDX-License-Identifier: Apache-2.0
"""What an import takes from chance, from the clock or from its process, and keeps: a fork would copy it.

A fresh process has an id, a start time and random numbers of its own.  `Draws` blames the module that took
such a thing while it was imported.  Two kinds can be made again with certainty, and are, in each fork: a
`random.Random` without a seed, and a variable that holds the very time at which it was set.
"""

from __future__ import annotations

import datetime
import os
import random
import re
import signal
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

#: Modules that draw at import, or let others do so, and why their forks may share it.
SHARED = {
    "joblib._multiprocessing_helpers": "names that are free again",
    "opentelemetry.context": "keys within one process",
    "rich.style": "numbers of links within one process",
    "scipy.stats._new_distributions": "examples in docstrings",
    "sympy.core.symbol": "numbers of symbols within one process, to which those made at import belong",
    "torch.distributed._composable.contract": "keys within one process",
    # The fork makes their random numbers, or keys of connections, again.
    "numpy.random": "",
    "multiprocess.process": "",
    "multiprocessing.process": "",
}
#: Packages that look whether their process is another one by now, or use its id at once.
_LOOK_AGAIN = (
    *("filelock.", "fsspec.", "joblib.", "logging.", "multiprocess.", "multiprocessing.", "psutil."),
    *("resiliency.template.", "subprocess.", "tempfile.", "threading."),
)
#: Functions that all random bytes of the interpreter come from, and ids that follow from the clock.
_RANDOM_SOURCES = ((os, "urandom"), (random, "_urandom"), (os, "getrandom"), (uuid, "_generate_time_safe"))
#: What torch gives to each generator that nobody has seeded.
_TORCH_DEFAULT_SEED = 67280421310721
#: A seed that a person writes is smaller.
_SMALLEST_DRAWN_SEED = 1 << 32
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
#: As texts tell the time of day; the day before it is optional.
_DAYS = ("%Y%m%d", "%Y-%m-%d", "%Y_%m_%d")
_TIMES_OF_DAY = ("%H%M%S", "%H:%M:%S", "%H-%M-%S", "%H_%M_%S")
_LONGEST_TEXT = 1000


def running_modules(frame: FrameType | None) -> list[str]:
    """Modules whose top-level code runs, innermost first."""
    names = []
    while frame is not None:
        if frame.f_code.co_name == "<module>":
            name = str(frame.f_globals.get("__name__"))
            if name != "__main__":
                names.append(name)
        frame = frame.f_back
    return names


class Draws:
    """Watches what imports draw.

    Args:
        blame: called with a module, and with what it did.
    """

    def __init__(self, blame: Callable[[str, str], None]) -> None:
        self._blame = blame
        #: Generators that were seeded by the system; and, until a look, by whom, and their state then.
        self._unseeded: list[weakref.ref[random.Random]] = []
        self._made: list[tuple[weakref.ref[random.Random], str, object]] = []
        self._times: list[tuple[type | ModuleType, str]] = []
        #: Objects that `time.time` returned, by their ids.
        self._taken: dict[int, float] = {}

    def take_over(self, other: Draws) -> None:
        """Know what another one knows of imports that were made before a fork."""
        self._unseeded, self._times = list(other._unseeded), list(other._times)

    def renew(self) -> None:
        """Make again, in a fork, what is its own in each process."""
        for reference in self._unseeded:
            if (generator := reference()) is not None:
                generator.seed()
        for holder, name in self._times:
            setattr(holder, name, time.time())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around imports; the modules that are new afterwards are looked at in `look_at`."""
        self._began, self._began_monotonic = time.time(), time.monotonic()
        _forget_names()  # the template makes files itself
        draws, real_seed = self, random.Random.seed
        replaced: list[tuple[Any, str, _Watched]] = [
            (module, name, _Watched(getattr(module, name), note))
            for module, name, note in (
                *((module, name, self._note_random) for module, name in _RANDOM_SOURCES),
                (os, "getpid", self._note_pid),
                (threading, "get_native_id", self._note_pid),
                (time, "time", self._note_time),
            )
        ]

        def seed(generator: random.Random, *args: Any, **kwargs: Any) -> None:
            real_seed(generator, *args, **kwargs)
            draws._note_seed(generator, (args[0] if args else kwargs.get("a")) is None, sys._getframe(1))

        random.Random.seed = seed  # type: ignore[method-assign, assignment]
        for module, name, watched in replaced:
            setattr(module, name, watched)
        try:
            yield
        finally:
            random.Random.seed = real_seed  # type: ignore[method-assign]
            for module, name, watched in replaced:
                setattr(module, name, watched.real)
                watched.note = _ignore

    def check(self, module: str) -> None:
        """After a module: what needs no look at what it holds."""
        for timer in _TIMERS:
            if any(signal.getitimer(timer)):
                signal.setitimer(timer, 0)  # it would be this process's, too
                self._blame(module, "sets a timer")
        if _forget_names():
            self._blame(module, "makes a temporary file")

    def look_at(self, modules: Mapping[str, ModuleType]) -> None:
        """Look through what new modules and their classes keep, and at generators."""
        moment = _Moment(self._began, self._began_monotonic)
        for module_name, module in modules.items():
            holders: list[type | ModuleType] = [module, *_classes_of(module)]
            for holder in holders:
                for name, value in list(vars(holder).items()):
                    if type(value) is _Watched:
                        _try_set(holder, name, value.real)
                    elif id(value) in self._taken and _try_set(holder, name, value):
                        self._times.append((holder, name))
                    elif not name.startswith("__") and (why := moment.why(value)):
                        self._blame(module_name, f"keeps {why} in {name}")
        self._taken.clear()
        for reference, module_name, state in self._made:
            generator = reference()
            if generator is not None and generator.getstate() == state:
                self._unseeded.append(reference)
            else:  # also where it was made to draw from it
                self._blame(module_name, "draws random numbers while it is imported")
        self._made.clear()

    # --- notes -----------------------------------------------------------------------------------

    def _note_random(self, frame: FrameType, value: object) -> None:
        del value
        if running := running_modules(frame):
            callers = [str(caller.f_globals.get("__name__")) for caller in _up_to_module(frame)]
            if not _is_shared(callers):
                self._blame(running[0], "draws random numbers while it is imported")

    def _note_pid(self, frame: FrameType, value: object) -> None:
        del value
        caller = f"{frame.f_globals.get('__name__')}."
        if not caller.startswith(_LOOK_AGAIN) and (running := running_modules(frame)):
            self._blame(running[0], "reads its process id while it is imported")

    def _note_time(self, frame: FrameType, value: object) -> None:
        del frame
        if isinstance(value, float):
            self._taken[id(value)] = value

    def _note_seed(self, generator: random.Random, by_the_system: bool, frame: FrameType) -> None:
        running = running_modules(frame)
        # `tempfile` makes names, and sees to it that each process has its own.
        by_tempfile = any(caller.f_globals.get("__name__") == "tempfile" for caller in _up_to_module(frame))
        self._unseeded = [one for one in self._unseeded if one() is not generator]
        self._made = [made for made in self._made if made[0]() is not generator]
        if by_the_system and running and not by_tempfile:
            self._made.append((weakref.ref(generator), running[0], generator.getstate()))


class _Watched:
    """A function that notes who calls it.  No function of its own, which would bind to instances."""

    def __init__(self, real: Callable[..., Any], note: Callable[[FrameType, object], None]) -> None:
        self.real, self.note = real, note

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        value = self.real(*args, **kwargs)
        self.note(sys._getframe(1), value)
        return value


def _ignore(frame: FrameType, value: object) -> None:
    del frame, value


class _Moment:
    """Tells whether a value is a time of the last imports, or follows from one."""

    def __init__(self, began: float, began_monotonic: float) -> None:
        self._wall, self._monotonic = (began, time.time()), (began_monotonic, time.monotonic())
        seconds = range(int(began), int(self._wall[1]) + 2)
        zones = (time.localtime, time.gmtime)
        days = {time.strftime(form, convert(began)) for form in _DAYS for convert in zones}
        clocks = {
            time.strftime(form, convert(one))
            for form in _TIMES_OF_DAY
            for convert in zones
            for one in seconds
        }
        of_day = rf"(?<![0-9A-Za-z])(?:(?:{'|'.join(days)})[-_T ]?)?(?:{'|'.join(clocks)})(?![0-9A-Za-z])"
        self._text = re.compile(rf"{of_day}|(?<!\d)(?:{'|'.join(map(str, seconds))})")

    def why(self, value: object) -> str:
        """What it is, or ""."""
        kind = type(value)
        if kind in (float, int, str, datetime.datetime):  # and nothing like NaT
            return "the time" if self._is_time(value) else ""
        torch: Any = sys.modules.get("torch")
        if hasattr(torch, "Generator") and kind is torch.Generator:
            seed = value.initial_seed()  # type: ignore[attr-defined]
            drawn = seed >= _SMALLEST_DRAWN_SEED and seed != _TORCH_DEFAULT_SEED
            drawn &= value is not torch.default_generator  # which is seeded in each fork
            return "a generator with a random seed" if drawn else ""
        return ""

    def _is_time(self, value: Any) -> bool:
        if type(value) is float:
            return (
                self._wall[0] <= value <= self._wall[1] or self._monotonic[0] <= value <= self._monotonic[1]
            )
        if type(value) is int:
            bounds = [(int(self._wall[0] * unit), self._wall[1] * unit) for unit in (1, 10**3, 10**6, 10**9)]
            if value % 1000:  # as a count of nanoseconds is
                bounds.append((int(self._monotonic[0] * 1e9), self._monotonic[1] * 1e9))
            return any(first <= value <= last for first, last in bounds)
        if type(value) is str:
            return len(value) < _LONGEST_TEXT and self._text.search(value) is not None
        zones = (None, datetime.timezone.utc) if value.tzinfo is None else (datetime.timezone.utc,)
        for zone in zones:
            first, last = (datetime.datetime.fromtimestamp(one, zone) for one in self._wall)
            if value.tzinfo is None:
                first, last = first.replace(tzinfo=None), last.replace(tzinfo=None)
            if first <= value <= last:
                return True
        return False


def _try_set(holder: type | ModuleType, name: str, value: object) -> bool:
    """Some classes do not let anybody change them."""
    try:
        setattr(holder, name, value)
    except Exception:  # of any code
        return False
    return True


def _forget_names() -> bool:
    """Whether `tempfile` has made names for files since the last call."""
    tempfile: Any = sys.modules.get("tempfile")
    if getattr(tempfile, "_name_sequence", None) is None:
        return False
    tempfile._name_sequence = None
    return True


def _classes_of(module: ModuleType) -> list[type]:
    return [
        value
        for value in list(vars(module).values())
        if issubclass(type(value), type) and vars(value).get("__module__") == module.__name__
    ]


def _up_to_module(frame: FrameType | None) -> Iterator[FrameType]:
    """Frames from the innermost one to that of the module whose top-level code runs."""
    while frame is not None:
        yield frame
        if frame.f_code.co_name == "<module>":
            return
        frame = frame.f_back


def _is_shared(names: Iterable[str]) -> bool:
    return any(name == known or name.startswith(f"{known}.") for name in names for known in SHARED)
