# SPDX-License-Identifier: Apache-2.0
"""Whatever a test leaves behind is found and named, and finding nothing is cheap."""

from __future__ import annotations

import mmap
import os
import re
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from resiliency.testing.leaks import LeakKind, Owner, ProcessSnapshot, leaks_since
from resiliency.testing.processes import Command
from tests.waiting import wait_until


@contextmanager
def thread() -> Iterator[str]:
    stop = threading.Event()
    worker = threading.Thread(target=stop.wait, name="forgotten", daemon=True)
    worker.start()
    yield r"thread 'forgotten' \(daemon\) still runs"
    stop.set()
    worker.join()


@contextmanager
def child() -> Iterator[str]:
    process = subprocess.Popen(["sleep", "60"])
    yield rf"process {process.pid} still runs: sleep 60"
    process.kill()
    process.wait()


@contextmanager
def child_of_a_session_of_its_own() -> Iterator[str]:
    process = subprocess.Popen(["sleep", "61"], start_new_session=True)
    yield rf"process {process.pid} still runs: sleep 61"
    process.kill()
    process.wait()


@contextmanager
def unreaped_child() -> Iterator[str]:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    yield rf"process {pid} ended but was never waited for"
    os.waitpid(pid, 0)


@contextmanager
def open_file() -> Iterator[str]:
    fd = os.open("/etc/hostname", os.O_RDONLY)
    yield rf"descriptor {fd} is open: /etc/hostname"
    os.close(fd)


@contextmanager
def port() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield rf"socket listening on \('127.0.0.1', {server.getsockname()[1]}\)"


@contextmanager
def variable() -> Iterator[str]:
    os.environ["FORGOTTEN"] = "1"
    yield "environment variable FORGOTTEN changed from None to '1'"
    del os.environ["FORGOTTEN"]


@contextmanager
def segment() -> Iterator[str]:
    memory = shared_memory.SharedMemory(create=True, size=mmap.PAGESIZE)
    yield rf"file /dev/shm/{memory.name} still exists"
    memory.close()
    memory.unlink()


LEAKS = [thread, child, child_of_a_session_of_its_own, unreaped_child, open_file, port, variable, segment]


@pytest.mark.parametrize("leak", LEAKS, ids=lambda leak: leak.__name__)
def test_a_leak_is_named(leak: object) -> None:
    before = ProcessSnapshot.take()
    with ExitStack() as stack:
        text = stack.enter_context(leak())  # type: ignore[operator]
        with pytest.raises(AssertionError, match=text):
            assert not leaks_since(before, grace_s=0.0)
    assert leaks_since(before) == []


@pytest.mark.skipif(os.getppid() == 1, reason="this process itself looks like an orphan")
def test_an_orphan_of_a_child_that_is_gone_is_found() -> None:
    before = ProcessSnapshot.take()
    shell = subprocess.run(["/bin/sh", "-c", "sleep 60 >&- 2>&- & echo $!"], capture_output=True, check=True)
    orphan = int(shell.stdout)
    wait_until(lambda: Path(f"/proc/{orphan}/cmdline").read_bytes() == b"sleep\x0060\x00", "no sleep runs")
    assert leaks_since(before, grace_s=0.0) == [f"process {orphan} still runs: sleep 60"]
    os.kill(orphan, 9)
    assert leaks_since(before) == []


def test_a_shared_tensor_is_a_leak_while_its_process_lives_and_is_deleted_after_a_kill() -> None:
    before = ProcessSnapshot.take()
    process = subprocess.Popen(["sleep", "60"])
    tensor = Path(f"/dev/shm/torch_{process.pid}_1234_0")  # noqa: S108  # as a killed loader worker leaves it
    tensor.touch()
    allowed = [LeakKind.PROCESSES]
    assert leaks_since(before, allowed=allowed, grace_s=0.0) == [f"file {tensor} still exists"]
    process.kill()
    process.wait()
    assert leaks_since(before) == []
    assert not tensor.exists()


def test_what_goes_away_within_the_grace_is_no_leak() -> None:
    before = ProcessSnapshot.take()
    threading.Timer(0.1, lambda: None).start()
    assert leaks_since(before) == []


def test_allowed_kinds_and_other_owners_are_left_out() -> None:
    before = ProcessSnapshot.take()
    with thread(), child() as text:
        # Not the newest process that there is: another test's worker may start some at the same time.
        pid = int(text.split()[1])
        allowed = [LeakKind.THREADS]
        assert leaks_since(before, allowed=allowed, owners=[Owner(pids=lambda: [pid])], grace_s=0.0) == []


def test_a_check_without_a_leak_costs_less_than_two_milliseconds() -> None:
    def check() -> float:
        start = time.perf_counter()
        before = ProcessSnapshot.take()
        assert leaks_since(before) == []
        return time.perf_counter() - start

    assert min(check() for _ in range(20)) < 0.002


PROJECT = """
    import os
    import pytest

    def test_leaks_a_variable():
        os.environ["FORGOTTEN"] = "1"

    def test_runs_in_a_clean_environment():
        assert "FORGOTTEN" not in os.environ

    @pytest.mark.leaks("variables", reason="for the test")
    def test_may_leak():
        os.environ["ALLOWED"] = "1"
"""


@pytest.mark.slow
def test_the_plugin_fails_exactly_the_test_that_leaked(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["resiliency.testing.fixtures"]')
    (tmp_path / "test_project.py").write_text(textwrap.dedent(PROJECT))
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--strict-markers", str(tmp_path)]
    with Command(argv, cwd=tmp_path) as cmd:
        assert cmd.wait(timeout=60) == 1, cmd.output
        assert "environment variable FORGOTTEN changed from None to '1'" in cmd.output
        # Of what the interpreter holds that it was forked from, pytest may have a warning.
        assert re.search(r"^3 passed, (\d+ warnings?, )?1 error", cmd.output, re.MULTILINE)
