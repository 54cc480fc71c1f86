# SPDX-License-Identifier: Apache-2.0
"""The crash note of a rank: torch's error file, also for a script without torchelastic's `record`.

The launcher reads it to name the exception that ended a rank.  An exception is noted and goes on to the hook
that was there before: what the rank prints and its exit code do not change.  A note of `record` stays.

    message   as `record` writes it, which torch reads
    step      the last one that the rank has finished
    error     type, message and frames of the exception
    chain     the same of the exceptions that led to it, nearest first

No line of source is read for `error` and `chain`: the storage that holds the source may be what is away.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from types import TracebackType

from resiliency.rank.error_text import CHAIN, shorten

#: torch's launcher tells each rank where its error file is.
ERROR_FILE_ENV = "TORCHELASTIC_ERROR_FILE"
#: Innermost frames that are kept.
FRAMES = 20


def install(last_step: Callable[[], int | None]) -> None:
    """Note the exception that ends this process; without a launcher, this does nothing.

    Args:
        last_step: the last step that this rank has finished, if it knows.
    """
    path = os.environ.get(ERROR_FILE_ENV)
    if not path:
        return
    before = sys.excepthook

    def note(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        try:
            # Whatever goes wrong here must not hide what is on its way to the user.
            with suppress(Exception):
                _write(path, kind, value, trace, last_step())
        finally:
            before(kind, value, trace)

    sys.excepthook = note


def _write(
    path: str, kind: type[BaseException], value: BaseException, trace: TracebackType | None, step: int | None
) -> None:
    if issubclass(kind, KeyboardInterrupt) or os.path.exists(path):
        return
    error = _entry(value, trace)
    message = {
        "message": f"{error['type']}: {error['message']}",
        "extraInfo": {
            "py_callstack": _formatted(kind, value, trace),
            "timestamp": str(int(time.time())),
        },
    }
    chain = [_entry(one, one.__traceback__) for one in islice(_causes(value), CHAIN)]
    part = f"{path}.part"
    with open(part, "w") as file:
        json.dump({"message": message, "step": step, "error": error, "chain": chain}, file)
    os.replace(part, path)  # a rank that is killed meanwhile leaves none, which torch takes for none


def _entry(value: BaseException, trace: TracebackType | None) -> dict[str, object]:
    """One exception; its type has its module, as in a traceback."""
    kind = type(value)
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    try:
        message = str(value)
    except Exception:
        message = "<its text cannot be made>"
    calls = deque(traceback.walk_tb(trace), maxlen=FRAMES)
    frames = [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in calls]
    return {"type": f"{module}{kind.__qualname__}", "message": shorten(message), "frames": frames}


def _causes(value: BaseException) -> Iterator[BaseException]:
    """The exceptions that led to `value`, as a traceback shows them, nearest first; of a group, its first."""
    seen = {id(value)}
    one: BaseException | None = value
    while one is not None:
        parts = getattr(one, "exceptions", ())
        one = (
            one.__cause__
            or (None if one.__suppress_context__ else one.__context__)
            or next((part for part in parts if isinstance(part, BaseException)), None)
        )
        if one is None or id(one) in seen:
            return
        seen.add(id(one))
        yield one


def _formatted(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> str:
    with suppress(Exception):  # its own text, or a traceback beyond measure
        return shorten("".join(traceback.format_exception(kind, value, trace, limit=-FRAMES)))
    return ""
