# SPDX-License-Identifier: Apache-2.0
"""A program that writes down all that it can see of itself: ``facts.py ... FILE``."""

_main = dict(globals())

import sys  # noqa: E402

_sys = {
    "argv": list(sys.argv),
    "orig_argv": list(sys.orig_argv),
    "path": list(sys.path),
    "flags": list(sys.flags),
    "warnoptions": list(sys.warnoptions),
    "path_hooks": [getattr(hook, "__qualname__", repr(hook)) for hook in sys.path_hooks],
    "meta_path": [getattr(finder, "__qualname__", repr(type(finder))) for finder in sys.meta_path],
    "excepthook": sys.excepthook is sys.__excepthook__,
    "executable": (sys.executable, sys.prefix, sys.exec_prefix, sys.base_prefix),
    "recursion": sys.getrecursionlimit(),
    "dlopen": sys.getdlopenflags(),
    "xoptions": dict(sys._xoptions),
    "tracing": (repr(sys.gettrace()), repr(sys.getprofile())),
    "hash": hash("x"),
}

import gc  # noqa: E402
import os  # noqa: E402

_descriptors = {}
for _name in sorted(os.listdir("/proc/self/fd"), key=int):
    try:
        _descriptors[_name] = (os.readlink(f"/proc/self/fd/{_name}"), os.get_inheritable(int(_name)))
    except OSError:  # of the listing
        continue
_tasks = len(os.listdir("/proc/self/task"))

import ctypes  # noqa: E402
import faulthandler  # noqa: E402
import json  # noqa: E402
import locale  # noqa: E402
import multiprocessing  # noqa: E402
import platform  # noqa: E402
import re  # noqa: E402
import resource  # noqa: E402
import signal  # noqa: E402
import threading  # noqa: E402
import time  # noqa: E402
import warnings  # noqa: E402
from typing import Any  # noqa: E402


def describe(value: object) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def numa_policy() -> tuple[int, list[int]] | None:
    number = {"x86_64": 239, "aarch64": 236}.get(platform.machine())
    mode, nodes = ctypes.c_int(), (ctypes.c_ulong * 16)()
    libc = ctypes.CDLL(None)
    done = libc.syscall(number, ctypes.byref(mode), nodes, ctypes.c_ulong(1024), None, ctypes.c_ulong(0))
    return None if done else (mode.value, list(nodes))


def stream(file: Any) -> dict[str, object]:
    return {
        "kind": [
            type(part).__name__ for part in (file, file.buffer, getattr(file.buffer, "raw", file.buffer))
        ],
        "names": [str(part.name) for part in (file, file.buffer)],
        "modes": [file.mode, file.buffer.mode],
        "buffering": (file.line_buffering, file.write_through),
        "text": (file.encoding, file.errors, file.newlines, file.isatty(), file.fileno(), file.closed),
        "is": [getattr(sys, name) is file for name in ("stdin", "stdout", "stderr")],
    }


def warning_filter(entry: tuple[object, ...]) -> list[str]:
    return [part.pattern if isinstance(part, re.Pattern) else describe(part) for part in entry]


def bytes_of(path: str) -> str:
    with open(path, "rb") as file:
        return file.read().decode(errors="surrogateescape")


def umask() -> int:
    os.umask(mask := os.umask(0))
    return mask


_libc = ctypes.CDLL(None)
_libc.getenv.restype = ctypes.c_char_p
_status = dict(line.split(":\t", 1) for line in bytes_of("/proc/self/status").splitlines())

FACTS = {
    **{f"sys.{name}": value for name, value in _sys.items()},
    "main": {name: describe(value) for name, value in _main.items()},
    "main is in sys.modules": sys.modules["__main__"].__dict__ is globals(),
    "environ": dict(os.environ),
    "type of environ": type(os.environ).__name__,
    "getenv": {
        name: str(_libc.getenv(os.fsencode(name))) for name in (*os.environ, "OF_NOBODY", "OF_TEMPLATE")
    },
    # Without the right to cut the memory there, some words are empty.
    "/proc/self/environ": bytes_of("/proc/self/environ").rstrip("\0").split("\0"),
    "/proc/self/cmdline": bytes_of("/proc/self/cmdline").rstrip("\0").split("\0"),
    "/proc/self/comm": bytes_of("/proc/self/comm"),
    "cgroup": bytes_of("/proc/self/cgroup"),
    "cwd": os.getcwd(),
    "umask": umask(),
    "limits": {
        name: resource.getrlimit(getattr(resource, name))
        for name in dir(resource)
        if name.startswith("RLIMIT")
    },
    "affinity": sorted(os.sched_getaffinity(0)),
    "priority": (os.nice(0), os.sched_getscheduler(0), os.sched_getparam(0).sched_priority),
    "oom_score_adj": bytes_of("/proc/self/oom_score_adj"),
    "numa": numa_policy(),
    "leads": (os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()),
    "parent": os.getppid(),
    "handlers": {number.name: describe(signal.getsignal(number)) for number in signal.Signals},
    "timers": [signal.getitimer(which) for which in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL)],
    "status": {
        name: _status[name]
        for name in (
            "SigBlk",
            "SigIgn",
            "SigCgt",
            "SigPnd",
            "ShdPnd",
            "Threads",
            "Mems_allowed",
            "Cpus_allowed",
        )
    }
    | {
        name: _status[name]
        for name in ("Uid", "Gid", "Groups", "CapEff", "CapInh", "NoNewPrivs", "Seccomp", "Umask")
    },
    "descriptors": _descriptors,
    "streams": [stream(file) for file in (sys.stdin, sys.stdout, sys.stderr)],
    "original streams": [
        ours is theirs
        for ours, theirs in (
            (sys.stdin, sys.__stdin__),
            (sys.stdout, sys.__stdout__),
            (sys.stderr, sys.__stderr__),
        )
    ],
    "multiprocessing": {
        "parent": describe(multiprocessing.parent_process()),
        "name": multiprocessing.current_process().name,
        "children": len(multiprocessing.active_children()),
        "method": multiprocessing.get_start_method(allow_none=True),
        "directory": vars(multiprocessing.process)["ORIGINAL_DIR"],
        "key": len(multiprocessing.current_process().authkey),
    },
    "threads": {
        "main is current": threading.main_thread() is threading.current_thread(),
        "main": (threading.main_thread().name, threading.main_thread().native_id == os.getpid()),
        "count": (threading.active_count(), _tasks),
        "stack": threading.stack_size(),
        "switch": sys.getswitchinterval(),
    },
    "gc": (gc.isenabled(), gc.get_threshold(), gc.get_debug()),
    "filters": [warning_filter(entry) for entry in warnings.filters],
    "locale": (locale.setlocale(locale.LC_ALL), time.tzname),
    "faulthandler": faulthandler.is_enabled(),
}

if __name__ == "__main__":
    with open(sys.argv[-1], "w", encoding="utf-8", errors="surrogateescape") as _file:
        json.dump(FACTS, _file)
