# SPDX-License-Identifier: Apache-2.0
"""A Python program on a machine of the cluster: in its network, under its name, in its start.

    python -m tests.supervisor_pages.enter NETWORK NAME BOOT -m MODULE ARGS...      or a script's path
    python -m tests.supervisor_pages.enter "" "" "" -m MODULE ARGS...               where services lead to

In one process, so that it can be forked from an interpreter that has imported the program.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import socket
import sys
from pathlib import Path

_NEWNET, _NEWNS, _NEWUTS, _BIND = 0x40000000, 0x00020000, 0x04000000, 4096


def enter(network: str, name: str, boot: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", network).open() as there:
        _check(libc.setns(there.fileno(), _NEWNET))
    _check(libc.unshare(_NEWNS | _NEWUTS))
    _check(libc.mount(boot.encode(), b"/proc/sys/kernel/random/boot_id", None, _BIND, None))
    socket.sethostname(name)


def _check(answer: int) -> None:
    if answer:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    scene, (first, *arguments) = sys.argv[1:4], sys.argv[4:]
    if scene[0]:
        enter(*scene)
    sys.argv = arguments if first == "-m" else [first, *arguments]
    if first == "-m":
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(first, run_name="__main__")
