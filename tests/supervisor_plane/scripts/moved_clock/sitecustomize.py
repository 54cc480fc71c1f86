# SPDX-License-Identifier: Apache-2.0
"""Clocks of a machine that a test moves: by the seconds in $MOVED_CLOCKS/<name of the program>.

On PYTHONPATH it is imported by each Python at its start.  The monotonic clock stays what it is, as where a
real clock is set.
"""

import datetime
import os
import sys
import time

_time, _time_ns = time.time, time.time_ns


def _moved_s() -> int:
    program = os.path.basename(getattr(sys, "argv", [""])[0])
    try:
        with open(os.path.join(os.environ["MOVED_CLOCKS"], program), encoding="ascii") as file:
            return int(file.read() or 0)
    except (OSError, KeyError):
        return 0


def _moved_time() -> float:
    # gRPC makes deadlines of it for its core, which reads the kernel's clock, and that is not moved.
    caller = str(sys._getframe(1).f_globals.get("__name__"))
    return _time() + (0 if caller.startswith("grpc") else _moved_s())


class _MovedDatetime(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> "_MovedDatetime":
        return super().now(tz) + datetime.timedelta(seconds=_moved_s())


time.time, time.time_ns = _moved_time, lambda: _time_ns() + _moved_s() * 10**9
datetime.datetime = _MovedDatetime  # type: ignore[misc]
