# SPDX-License-Identifier: Apache-2.0
"""What can end a rank, for real and through a real launcher: each gets its cause, its rank and a sentence.

The rules are tested on values in `tests.launch.health.test_diagnosis`.  Here the kernel, torch and the
launcher say what happened.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from resiliency.events import EventType
from tests.waiting import wait_until

from .conftest import SCRIPTS, WAIT, Launch, events

#: What the group of a launcher may use: far more than it does, far less than the machine has.
LIMIT_BYTES = 1 << 30

#: In the order of attempts: what happens, the cause, the rank that is named, and words of the sentence.
FAILURES = [
    (
        "import",
        "import",
        1,
        "cannot load its program (ModuleNotFoundError: No module named 'no_such_module')",
    ),
    ("disk", "disk_full", 1, "found a full disk (OSError: [Errno 28] No space left on device)"),
    ("port", "port_taken", 1, "found its port taken (OSError: [Errno 98] Address already in use"),
    (
        "cuda",
        "illegal_access",
        1,
        "accessed device memory illegally (RuntimeError: CUDA error: an illegal memory access was enc",
    ),
    ("segfault", "segfault", 1, "crashed in native code (SIGSEGV)"),
    ("memory", "host_oom", 1, "was killed by the kernel: host memory ran out"),
    (
        "loader",
        "assertion",
        1,
        "failed an assertion of the program (AssertionError: Caught AssertionError in",
    ),
    ("exit", "exit_code", 1, "ended with exit code 17 and printed no error"),
    ("echo", "peer_lost", 0, "lost a peer ("),
    ("late", "exception", 1, "raised KeyError: 'labels' at "),
    ("watchdog", "hang", 1, "a collective timed out on rank 1"),
    (
        "nan",
        "nan",
        1,
        "has a loss that is not finite (resiliency.errors.LossNotFinite: the loss of step 111 is nan",
    ),
]


@pytest.fixture
def memory_group() -> Iterator[Path | None]:
    """A memory group with a limit; None where this user may make none."""
    made = None
    for root, limit in (("memory", "memory.limit_in_bytes"), ("", "memory.max")):
        group = Path("/sys/fs/cgroup", root, f"resiliency-test-{secrets.token_hex(4)}")
        with suppress(OSError):
            group.mkdir()
            try:
                (group / limit).write_text(str(LIMIT_BYTES))
            except OSError:
                group.rmdir()
                continue
            made = group
            break
    yield made
    if made is not None:
        wait_until(lambda: _removed(made), f"{made} is not empty", timeout=WAIT)


def _removed(group: Path) -> bool:
    try:
        group.rmdir()
    except OSError:  # the last of its processes is about to be gone
        return False
    return True


@pytest.mark.slow
def test_each_class_of_failure_gets_its_cause_its_rank_and_a_sentence(
    memory_group: Path | None, launch: Launch, tmp_path: Path
) -> None:
    """The kernel's kill is real where the test may limit memory; elsewhere a kill comes from outside."""
    os.mkfifo(tmp_path / "begin")
    job = launch(
        *("--nproc-per-node=2", "--max-restarts=99", "--on-nan=stop", "--monitor-interval=30"),
        *(SCRIPTS / "failing.py", *(kind for kind, *_ in FAILURES)),
        IS_LIMITED=str(int(memory_group is not None)),
    )
    job.wait_for_line("rank 1 attempt 0 meets", timeout=WAIT)
    if memory_group is not None:  # ranks of later attempts inherit it
        (memory_group / "cgroup.procs").write_text(str(job.pid))
    (tmp_path / "begin").write_text("")
    assert job.wait(timeout=WAIT) == 70
    told = events(tmp_path / "run", EventType.DIAGNOSED)
    for event, (kind, cause, rank, says) in zip(told, FAILURES, strict=True):
        if kind == "memory" and memory_group is None:
            cause, says = "killed", "was ended from outside (SIGKILL)"
        found = (event.fields["cause"], event.fields["ranks"])
        assert found == (cause, [] if kind in ("echo", "watchdog") else [rank]), event.fields["sentence"]
        step = "" if kind == "import" else f" (after step {10 * (event.attempt or 0)})"
        who = "" if kind == "watchdog" else f"rank {rank} on {os.uname().nodename}{step} "
        assert str(event.fields["sentence"]).startswith(f"{who}{says}")
    assert [event.fields["advice"] for event in told] == ["restart"] * (len(FAILURES) - 1) + ["stop"]
    assert "The job ends: rank 1 on" in job.output
