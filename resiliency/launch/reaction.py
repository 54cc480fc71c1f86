# SPDX-License-Identifier: Apache-2.0
"""Whether a worker can act on a signal, or waits in native code that Python's handlers never interrupt.

A rank whose peer has died sits in a collective: its main thread waits within libtorch, and the handler that
Lightning or the script installed for SIGTERM runs when that wait returns, after minutes.  Nothing is gained
by waiting for it.  The kernel shows the system call in which a thread sleeps and where its stack is; the
first address on the stack that does not belong to the C library tells who called.
"""

from __future__ import annotations

import os
import platform
import struct
from bisect import bisect_right

#: System calls that only wait, by machine: a thread that reads or writes makes progress.
_WAITS = {
    # poll, select, nanosleep, futex, clock_nanosleep, epoll_wait, pselect6, ppoll, epoll_pwait
    "x86_64": frozenset({7, 23, 35, 202, 230, 232, 270, 271, 281}),
    # epoll_pwait, pselect6, ppoll, futex, nanosleep, clock_nanosleep
    "aarch64": frozenset({22, 72, 73, 98, 101, 115}),
}
_STACK_BYTES = 4096
_C_LIBRARIES = ("libc.", "libc-", "libpthread", "libstdc++", "libgcc", "ld-linux", "libm.", "[vdso]")
_PYTHON = ("python", "libpython")


def waits_natively(pid: int) -> bool | None:
    """Whether the main thread of `pid` sleeps in native code, outside Python's interpreter.

    None where that cannot be seen: no right to look, another machine, no such process.
    """
    waits = _WAITS.get(platform.machine())
    if waits is None:
        return None
    try:
        with open(f"/proc/{pid}/syscall") as file:
            words = file.read().split()
        if len(words) < 9 or int(words[0]) not in waits:
            return False
        stack = _read(pid, int(words[-2], 16))
        return _is_native(stack, _code(pid))
    except (OSError, ValueError):
        return None


def _read(pid: int, address: int) -> tuple[int, ...]:
    memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
    try:
        data = os.pread(memory, _STACK_BYTES, address)
    finally:
        os.close(memory)
    return struct.unpack(f"{len(data) // 8}Q", data[: len(data) // 8 * 8])


def _code(pid: int) -> list[tuple[int, int, str]]:
    """Executable memory: start, end, name of the file."""
    found = []
    with open(f"/proc/{pid}/maps") as maps:
        for line in maps:
            fields = line.split(maxsplit=5)
            if "x" in fields[1] and len(fields) == 6:
                start, _, end = fields[0].partition("-")
                found.append((int(start, 16), int(end, 16), os.path.basename(fields[5].strip())))
    return sorted(found)


def _is_native(stack: tuple[int, ...], code: list[tuple[int, int, str]]) -> bool:
    starts = [start for start, _, _ in code]
    for word in stack:
        index = bisect_right(starts, word) - 1
        if index < 0 or word >= code[index][1]:
            continue
        name = code[index][2]
        if name.startswith(_C_LIBRARIES):
            continue
        # Python's own extension modules wait on its behalf, and return to it at a signal.
        return not (name.startswith(_PYTHON) or ".cpython-" in name)
    return False
