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
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            caller = first_caller(memory.fileno(), int(words[-2], 16), executable_memory(pid))
        # Python's own extension modules wait on its behalf, and return to it at a signal.
        return caller is not None and not (caller.startswith(_PYTHON) or ".cpython-" in caller)
    except (OSError, ValueError):
        return None


def executable_memory(pid: int) -> list[tuple[int, int, str]]:
    """Of process `pid`, in order: start, end, name of the file."""
    found = []
    with open(f"/proc/{pid}/maps") as maps:
        for line in maps:
            fields = line.split(maxsplit=5)
            if "x" in fields[1] and len(fields) == 6:
                start, _, end = fields[0].partition("-")
                found.append((int(start, 16), int(end, 16), os.path.basename(fields[5].strip())))
    return sorted(found)


def first_caller(memory: int, top: int, code: list[tuple[int, int, str]]) -> str | None:
    """The file of the first caller outside the C library, on a stack.

    Args:
        memory: descriptor of a process's memory.
        top: where the stack ends that grows down.
        code: of `executable_memory`.
    """
    data = os.pread(memory, _STACK_BYTES, top)
    starts = [start for start, _, _ in code]
    for (word,) in struct.iter_unpack("Q", data[: len(data) // 8 * 8]):
        index = bisect_right(starts, word) - 1
        if index < 0 or word >= code[index][1]:
            continue
        name = code[index][2]
        # Other numbers look like addresses, too: a new lower half beside what is left of an old one.
        if not name.startswith(_C_LIBRARIES) and _follows_call(memory, word, starts[index]):
            return name
    return None


def _follows_call(memory: int, address: int, start: int) -> bool:
    """Whether a call instruction ends at `address`, in the code that begins at `start`."""
    before = os.pread(memory, 7, address - 7) if address >= start + 7 else b""
    if len(before) < 7:
        return False
    if platform.machine() == "aarch64":  # bl, blr
        (word,) = struct.unpack("<I", before[3:])
        return bool(address % 4 == 0 and (word >> 26 == 0x25 or word & 0xFFFFFC1F == 0xD63F0000))
    # call rel32; call through a register or memory, of two to seven bytes
    return before[2] == 0xE8 or any(
        before[-size] == 0xFF and before[-size + 1] & 0x38 == 0x10 for size in (2, 3, 4, 6, 7)
    )
