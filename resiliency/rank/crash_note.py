# SPDX-License-Identifier: Apache-2.0
"""The crash note of a rank: torch's error file, also for a script without torchelastic's `record`.

The launcher reads it to name the exception that ended a rank.  An exception is noted and goes on to the hook
that was there before: what the rank prints and its exit code do not change.  A note of `record` stays.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

#: torch's launcher tells each rank where its error file is.
ERROR_FILE_ENV = "TORCHELASTIC_ERROR_FILE"
#: Innermost frames that are kept, and characters of a message: an exception may hold a tensor.
FRAMES, MESSAGE_CHARS = 20, 4000


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
    frames = traceback.format_exception(kind, value, trace, limit=-FRAMES, chain=False)
    message = {
        "message": f"{kind.__name__}: {value}"[:MESSAGE_CHARS],
        "extraInfo": {
            "py_callstack": "".join(frames)[-2 * MESSAGE_CHARS :],
            "timestamp": str(int(time.time())),
        },
    }
    part = f"{path}.part"
    with open(part, "w") as file:
        json.dump({"message": message, "step": step}, file)
    os.replace(part, path)  # a rank that is killed meanwhile leaves none, which torch takes for none
