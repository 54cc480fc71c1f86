# SPDX-License-Identifier: Apache-2.0
"""Starts the same program twice: as a fresh process, and forked from a template."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest

from resiliency.template.client import Template
from resiliency.template.server import Work
from resiliency.testing import warm

DEADLINE = timedelta(seconds=60)
DEADLINE_S = DEADLINE.total_seconds()


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


def environment(**variables: str) -> dict[str, str]:
    """Of this process, without what only a test run has; the same strings get the same hashes."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PYTHON"))}
    return {**env, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", **variables}


@contextmanager
def ready_template(
    *preload: str, work: Work | None = None, env: Mapping[str, str] | None = None, flags: Sequence[str] = ()
) -> Iterator[Template]:
    """A template that has done its imports."""
    interpreter = (sys.executable, *flags)
    env = environment() if env is None else env
    with Template(work or Work(preload=preload), interpreter=interpreter, env=env) as template:
        assert template.wait_until_ready(DEADLINE), "the template imports for ever"
        yield template


def run(
    template: Template | None,
    *words: str,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> Ended:
    """Run ``python WORDS`` to its end: forked from the template, or, without one, fresh."""
    start = subprocess.Popen if template is None else template.popen

    def begin(out: int, err: int) -> warm.Process:
        return start(
            [sys.executable, *words],
            env=environment() if env is None else env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )

    code, out, err = warm.run_to_end(begin, DEADLINE_S)
    return Ended(code, out.decode(), err.decode())


def write_modules(directory: Path, **sources: str) -> None:
    """``NAME.py`` for each."""
    for name, source in sources.items():
        path = directory / f"{name}.py"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(source)


# --- what a process passes on to those that it starts; each returns what puts it back ----------------


def other_affinity() -> Callable[[], object]:
    before = os.sched_getaffinity(0)
    if len(before) == 1:
        pytest.skip("there is one core only")
    os.sched_setaffinity(0, [min(before)])
    return lambda: os.sched_setaffinity(0, before)


def other_oom_score() -> Callable[[], object]:
    path = Path("/proc/self/oom_score_adj")
    before = path.read_text()
    path.write_text(str(int(before) + 1))

    def put_back() -> None:
        with suppress(PermissionError):  # only root may lower it
            path.write_text(before)

    return put_back


def other_numa_policy() -> Callable[[], object]:
    number = {"x86_64": 238, "aarch64": 237}.get(platform.machine())
    nodes, default, interleave = (ctypes.c_ulong * 16)(1), 0, 3
    libc = ctypes.CDLL(None)
    if number is None or libc.syscall(number, interleave, nodes, ctypes.c_ulong(1024)) != 0:
        pytest.skip("the system has no NUMA policies")
    return lambda: libc.syscall(number, default, None, ctypes.c_ulong(0))
