# SPDX-License-Identifier: Apache-2.0
"""The end of each rank's standard error is kept, and whatever happens to its readers no rank waits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from resiliency.launch import guardian
from resiliency.launch.failures import standard_error
from resiliency.launch.failures.standard_error import StandardErrors
from resiliency.launch.incident import read_tail
from tests.waiting import wait_until

WAIT = 60.0


class Shown:
    """The launcher's standard error as a pipe, which is read when a test says so."""

    def __init__(self) -> None:
        self._out, self.fd = os.pipe()
        os.set_blocking(self._out, False)
        self.text = b""

    def has(self, words: bytes) -> bool:
        with suppress(BlockingIOError):
            while data := os.read(self._out, 1 << 20):
                self.text += data
        return words in self.text

    def close(self) -> None:
        os.close(self._out)
        os.close(self.fd)


@pytest.fixture
def shown() -> Iterator[Shown]:
    pipe = Shown()
    yield pipe
    pipe.close()


@pytest.fixture
def errors(shown: Shown) -> Iterator[StandardErrors]:
    kept = StandardErrors(shown.fd)
    yield kept
    kept.close()


def run(errors: StandardErrors, script: str, local_rank: int = 0, *, is_shown: bool = True) -> str:
    """Run a program as a rank to its end; returns where its standard error is kept."""
    memory = errors.try_open(local_rank, shown=is_shown)
    assert memory is not None
    subprocess.run(["sh", "-c", script], stderr=memory.fileno(), check=False, timeout=WAIT)
    return memory.path


def test_what_ranks_write_is_shown_in_order_and_its_end_is_kept(errors: StandardErrors, shown: Shown) -> None:
    path = run(errors, "printf 'a\\rb'; printf '\\033[1mfirst\\r' >&2; python3 -c 'import nothing_there'")
    run(errors, "echo only kept >&2", 1, is_shown=False)
    wait_until(lambda: shown.has(b"No module named 'nothing_there'\n"), "nothing is shown", timeout=WAIT)
    assert shown.text.startswith(b"\033[1mfirst\rTraceback (most recent call last):\n")
    assert b"only kept" not in shown.text
    assert read_tail(path)[-1] == "ModuleNotFoundError: No module named 'nothing_there'"


def test_a_reader_that_takes_nothing_holds_up_no_rank_and_gets_all_of_it_later(
    errors: StandardErrors, shown: Shown
) -> None:
    """As behind a log that is stuck, or a launcher that is stopped: 3 MiB are far more than a pipe takes."""
    path = run(errors, "head -c 3145728 /dev/zero >&2; echo last >&2")
    assert read_tail(path)[-1].endswith("last")
    wait_until(lambda: shown.has(b"last\n"), "the rest is not shown", timeout=WAIT)
    assert len(shown.text) == 3145728 + len("last\n")
    # What was shown is memory again.
    wait_until(lambda: os.stat(path).st_blocks * 512 < 1 << 21, "memory is not freed", timeout=WAIT)
    assert read_tail(path)[-1].endswith("last")


def test_of_more_than_memory_is_for_the_oldest_is_left_out_and_a_line_says_so(
    errors: StandardErrors, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standard_error, "MOST_BYTES", 1000)
    run(errors, "head -c 1000000 /dev/zero >&2; echo last >&2")
    wait_until(lambda: shown.has(b"last\n"), "the rest is not shown", timeout=WAIT)
    assert b" bytes of the standard error of local rank 0 left out\n" in shown.text


def test_a_standard_error_that_is_closed_or_truncated_ends_no_rank(
    errors: StandardErrors, shown: Shown
) -> None:
    path = run(errors, "echo one >&2; echo two > /dev/stderr; echo three >> /dev/stderr; echo four >&2")
    assert read_tail(path) == ("two", "three", "four")
    wait_until(lambda: shown.has(b"four\n"), "what follows is not shown", timeout=WAIT)
    out, closed = os.pipe()
    os.close(out)
    unread = StandardErrors(closed)
    path = run(unread, "echo one >&2")
    unread.show()
    assert read_tail(path) == ("one",)
    unread.close()
    os.close(closed)


def test_a_terminal_is_left_to_the_ranks() -> None:
    leader, terminal = os.openpty()
    assert StandardErrors(terminal).try_open(0) is None
    os.close(leader)
    os.close(terminal)


def test_a_guardian_shows_what_ranks_say_after_their_launcher_was_killed(
    errors: StandardErrors, tmp_path: Path
) -> None:
    memory = errors.try_open(0, shown=False)
    assert memory is not None
    script = (
        "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit('saved step 7'))\n"
        "print('before', file=sys.stderr)\nprint('ready', flush=True)\nwhile True: signal.pause()\n"
    )
    rank = subprocess.Popen([sys.executable, "-c", script], stderr=memory.fileno(), stdout=subprocess.PIPE)
    with rank:
        assert rank.stdout is not None
        rank.stdout.readline()
        watch = subprocess.run(
            [sys.executable, "-I", "-S", guardian.__file__, "no-such-launcher", "30", str(tmp_path / "gone")],
            input=f"workers {rank.pid}\n",
            capture_output=True,
            text=True,
            check=True,
            timeout=WAIT,
        )
    assert rank.returncode == 1
    assert watch.stderr == "launcher.py was killed: its guardian ends the workers\nsaved step 7\n"
