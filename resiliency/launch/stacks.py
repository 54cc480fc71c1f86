# SPDX-License-Identifier: Apache-2.0
"""Stacks of ranks, without their help where they cannot give it.

A rank that has finished a step has offered its stacks (`resiliency.rank.inspection`): on a signal, the
interpreter writes them into a file, also when the main thread waits in native code.  Of another rank, or one
that does not answer, the kernel tells the state and where it waits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from resiliency.proc_stat import handles_signal
from resiliency.rank.inspection import STACK_SIGNAL, stacks_file

ANSWER_TIMEOUT_S = 5.0
#: A rank writes its stacks in many pieces, and a busy host may stop it between two of them.
_SETTLED_S = 0.3
_POLL_S = 0.02
_MOST_CHARS = 16_384


def dump_stacks(
    pids: Mapping[int, int], directory: str, timeout_s: float = ANSWER_TIMEOUT_S
) -> dict[int, str]:
    """Stacks by rank of the processes `pids`, within about `timeout_s` for all together."""
    sizes = {}
    for rank, pid in pids.items():
        file = stacks_file(directory, pid)
        with suppress(OSError):
            size = file.stat().st_size
            if not handles_signal(pid, STACK_SIGNAL):
                continue  # another program by now, by exec or as the next process of this number
            os.kill(pid, STACK_SIGNAL)
            sizes[rank] = size
    _wait_until_written({stacks_file(directory, pids[rank]): size for rank, size in sizes.items()}, timeout_s)
    answers = {rank: _new_text(stacks_file(directory, pids[rank]), size) for rank, size in sizes.items()}
    return {rank: answers.get(rank) or _from_kernel(pid) for rank, pid in pids.items()}


def has_left_python(pid: int, directory: str, stacks: str) -> bool:
    """Whether the interpreter of a process that gave `stacks` has ended, or the program is another one."""
    if not stacks_file(directory, pid).exists():
        return False
    with suppress(OSError):
        return not handles_signal(pid, STACK_SIGNAL) or stacks.rstrip().endswith("<no Python frame>")
    return True


def _wait_until_written(sizes: Mapping[Path, int], timeout_s: float) -> None:
    """Until each of the files has grown beyond its size, and all have stopped growing."""
    seen = dict(sizes)
    since = began = time.monotonic()
    while seen and (now := time.monotonic()) < began + timeout_s:
        if now >= since + _SETTLED_S and all(seen[file] != size for file, size in sizes.items()):
            return
        time.sleep(_POLL_S)
        for file in sizes:
            with suppress(OSError):
                size = file.stat().st_size
                if size != seen[file]:
                    seen[file], since = size, time.monotonic()


def _new_text(file: Path, size: int) -> str:
    """What was added to `file`."""
    with suppress(OSError), file.open("rb") as opened:
        opened.seek(size)
        return opened.read(_MOST_CHARS).decode(errors="replace")
    return ""


def _from_kernel(pid: int) -> str:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        state = next(line for line in status.splitlines() if line.startswith("State:"))
        waits = Path(f"/proc/{pid}/wchan").read_text() or "0"
    except (OSError, StopIteration):
        return f"process {pid} is gone"
    return f"process {pid} gives no Python stacks; {state.replace(chr(9), ' ')}, waits in {waits}"
