# SPDX-License-Identifier: Apache-2.0
"""What a process waits for is read from the kernel: one real process for each kind of wait."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path

import pytest

from resiliency.launch.hangs.waits import PYTHON, RankThreads, ThreadWait, WaitKind, _may_help, classify
from resiliency.rank.inspection import RankThread
from tests.waiting import wait_until

K = WaitKind
#: What waits, what is to be found: the kind, and words.
WAITS: Mapping[str, tuple[str, WaitKind, str]] = {
    "lock": ("lock = threading.Lock(); lock.acquire(); lock.acquire()", K.LOCK, ""),
    "event": ("threading.Event().wait()", K.LOCK, ""),
    "queue": ("queue.SimpleQueue().get()", K.LOCK, ""),
    "mutex of a library": (
        "mutex = ctypes.create_string_buffer(64); lock = ctypes.CDLL(None).pthread_mutex_lock\n"
        "lock(mutex); lock(mutex)",
        K.LOCK,
        "",
    ),
    "event with a time": ("threading.Event().wait(1000)", K.TIME, ""),
    "sleep": ("time.sleep(1000)", K.TIME, ""),
    "lock of processes": ("lock = multiprocessing.Lock(); lock.acquire(), lock.acquire()", K.OUTSIDE, "a l"),
    "answer": ("client.recv(1)", K.OUTSIDE, r"127\.0\.0\.1:\d+"),
    "answer over IPv6": ("client6.recv(1)", K.OUTSIDE, r"\[::1\]:\d+"),
    "answer with a time": ("client.settimeout(1000); client.recv(1)", K.OUTSIDE, r"127\.0\.0\.1:\d+"),
    "select": ("select.select([client], [], [], 1000)", K.OUTSIDE, r"127\.0\.0\.1:\d+"),
    "event loop": (
        "loop = selectors.DefaultSelector(); loop.register(client, 1); loop.select(1000)",
        K.OUTSIDE,
        r"127\.0\.0\.1:\d+",
    ),
    "connection": ("server.accept(); server.accept()", K.OUTSIDE, r"a connection to port \d+"),
    "unix socket": ("pair = socket.socketpair(); pair[0].recv(1)", K.OUTSIDE, "a unix socket"),
    "pipe": ("os.read(os.pipe()[0], 1)", K.OUTSIDE, "a pipe"),
    "pipe with a name": ("os.mkfifo('fifo'); open('fifo')", K.OUTSIDE, "file fifo"),
    "terminal": ("os.read(pty.openpty()[1], 1)", K.OUTSIDE, r"terminal /dev/pts/\d+"),
    "child": ("subprocess.run(['sleep', '1000'])", K.OUTSIDE, "a child process"),
    "lock file": (
        "first, second = open('lock', 'w'), open('lock', 'w')\n"
        "fcntl.flock(first, fcntl.LOCK_EX); fcntl.flock(second, fcntl.LOCK_EX)",
        K.OUTSIDE,
        "a lock on file /.*/lock",
    ),
    "change of a file": ("os.read(ctypes.CDLL(None).inotify_init(), 1)", K.OUTSIDE, r"an event \(inotify\)"),
    "nothing": ("while True: pass", K.NONE, ""),
}  # fmt: skip
BEGIN = """
import ctypes, fcntl, multiprocessing, os, pty, queue, select, selectors, socket, subprocess, threading, time
server = socket.create_server(("127.0.0.1", 0)); client = socket.create_connection(server.getsockname())
server6 = socket.create_server(("::1", 0), family=socket.AF_INET6)
client6 = socket.create_connection(server6.getsockname()[:2])
"""


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[dict[str, int]]:
    """One that waits for each of these."""
    started = {}
    try:
        for number, (kind, (program, _, _)) in enumerate(WAITS.items()):
            folder = tmp_path / str(number)
            folder.mkdir()
            argv = [sys.executable, "-S", "-c", BEGIN + program]
            started[kind] = subprocess.Popen(argv, cwd=folder, start_new_session=True)
        yield {kind: process.pid for kind, process in started.items()}
    finally:
        for process in started.values():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_of(pid: int) -> ThreadWait | None:
    with suppress(OSError), closing(RankThreads(pid)) as threads:
        return threads.wait_of(pid)
    return None


def test_a_wait_is_told_by_what_ends_it(processes: dict[str, int]) -> None:
    wrong: dict[str, ThreadWait | None] = {}

    def all_are_right() -> bool:
        wrong.clear()
        for kind, (_, expected, words) in WAITS.items():
            found = wait_of(processes[kind])
            if found is None or found.kind is not expected or not re.match(words, found.outside):
                wrong[kind] = found
        return not wrong

    with suppress(AssertionError):
        wait_until(all_are_right, "some are not", timeout=60.0)
    assert not wrong
    found = wait_of(processes["lock"])
    assert found is not None
    assert found.library == PYTHON


@pytest.mark.parametrize(
    ("call", "arguments", "library", "kind"),
    [
        ("futex", (0, 0x189, 0, 0), "libtorch_cpu.so", K.PEERS),
        ("futex", (0, 0x189, 0, 0x7F00), "libtorch_cpu.so", K.PEERS),
        ("recvfrom", (5,), "libtorch_cpu.so", K.PEERS),  # its store
        ("epoll_wait", (5,), "libnccl.so.2", K.PEERS),
        ("ioctl", (5,), "libcuda.so.570", K.PEERS),
        ("write", (5,), "libtorch_cpu.so", K.OUTSIDE),  # a file that it saves
        ("openat", (0, 0), "libtorch_cpu.so", K.OUTSIDE),
        ("futex", (0, 0x189, 0, 0), "tokenizers.abi3.so", K.LOCK),
        ("futex", (0, 0x189, 0, 0x7F00), "_raylet.so", K.TIME),
        ("futex", (0, 0x80, 0, 0), PYTHON, K.LOCK),
        ("futex", (0, 0x81, 0, 0), PYTHON, K.OUTSIDE),  # it wakes others
        ("system call 426", (5,), "liburing.so", K.OUTSIDE),
        ("restart_syscall", (), PYTHON, K.TIME),
    ],
)
def test_a_lock_is_a_wait_without_a_time_that_no_other_process_and_no_peer_ends(
    call: str, arguments: tuple[int, ...], library: str, kind: WaitKind
) -> None:
    assert classify(call, arguments, library) is kind


OWN, LIBRARYS = (RankThread(id=7, is_daemon=True, is_own=own) for own in (True, False))


@pytest.mark.parametrize(
    ("thread", "kind", "library", "main", "joins", "helps"),
    [
        (None, K.OUTSIDE, "libarrow.so", "libarrow.so", False, True),
        (None, K.OUTSIDE, "libgrpc.so", PYTHON, False, False),
        (None, K.TIME, "libarrow.so", "libarrow.so", False, True),  # between two tries of a request
        (None, K.TIME, "libgrpc.so", "libarrow.so", True, False),
        (OWN, K.TIME, PYTHON, PYTHON, False, True),
        (LIBRARYS, K.TIME, PYTHON, PYTHON, True, False),  # it measures something now and then
        (LIBRARYS, K.OUTSIDE, PYTHON, PYTHON, False, False),
        (LIBRARYS, K.OUTSIDE, PYTHON, PYTHON, True, True),
        (LIBRARYS, K.PEERS, "libtorch_cpu.so", PYTHON, True, True),  # in a store, or a collective
        (OWN, K.PEERS, "libtorch_cpu.so", PYTHON, False, True),
        (OWN, K.LOCK, PYTHON, PYTHON, True, False),
    ],
)
def test_a_lock_may_be_released_by_a_thread_that_itself_waits_for_something_outside(
    thread: RankThread | None, kind: WaitKind, library: str, main: str, joins: bool, helps: bool
) -> None:
    found, lock = ThreadWait(kind, library), ThreadWait(K.LOCK, main)
    assert _may_help(found, thread, lock, joins=joins) is helps


def test_a_thread_that_ends_while_threads_are_looked_at_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with closing(RankThreads(os.getpid())) as threads:
        monkeypatch.setattr(os, "listdir", lambda _: [str(os.getpid()), str(2**22)])
        assert not threads.may_be_helped(ThreadWait(K.LOCK, PYTHON), [], joins=True)
