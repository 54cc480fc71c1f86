# SPDX-License-Identifier: Apache-2.0
"""Each line of a kernel log is read once, whatever happens to the log and to its reader."""

from __future__ import annotations

import errno
import os
import random
import stat
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.watchdogs.kernel_log import FileLog, RingLog, open_log
from supervisor.watchdogs.testing import MemoryRing
from supervisor.watchdogs.watchdog import UnknownHealth

NOW_S = 1000.0


def ring_log(ring: MemoryRing, memory: object = None, boot: str = "boot-1") -> RingLog:
    return RingLog(ring, dict(memory or {}), boot=boot, clock=lambda: NOW_S)  # type: ignore[call-overload]


def texts(log: RingLog | FileLog) -> list[str]:
    return [line.text for line in log.read_lines().lines]


# ---------------------------------------------------------------- the ring


def test_a_ring_gives_each_record_once_with_its_age_and_without_its_dictionary() -> None:
    ring = MemoryRing()
    ring.write("first\n SUBSYSTEM=pci\n DEVICE=+pci:0000:3b:00.0", at_s=NOW_S - 2.5)
    log = ring_log(ring)
    (line,) = log.read_lines().lines
    assert (line.id, line.text, line.age_s) == ("boot-1-0", "first", 2.5)
    assert texts(log) == []
    ring.write("second; with a semicolon", at_s=NOW_S)
    assert texts(log) == ["second; with a semicolon"]


def test_a_reader_that_was_never_here_leaves_old_records_alone() -> None:
    ring = MemoryRing()
    ring.write("an hour old", at_s=NOW_S - 900.0)
    ring.write("just now", at_s=NOW_S - 10.0)
    assert texts(ring_log(ring)) == ["just now"]


def test_the_next_reader_goes_on_where_the_last_one_was_however_long_ago() -> None:
    ring = MemoryRing()
    ring.write("seen", at_s=NOW_S)
    first = ring_log(ring)
    assert texts(first) == ["seen"]
    ring.write("missed meanwhile", at_s=NOW_S - 900.0)
    assert texts(ring_log(ring.rewind(), first.memory())) == ["missed meanwhile"]


def test_after_a_start_of_the_machine_the_numbers_of_the_one_before_mean_nothing() -> None:
    ring = MemoryRing()
    ring.write("line 0 of this start", at_s=NOW_S)
    log = ring_log(ring, {"boot": "boot-0", "sequence": 5000})
    assert texts(log) == ["line 0 of this start"]
    assert log.memory() == {"boot": "boot-1", "sequence": 0}


def test_a_ring_that_wraps_during_a_burst_loses_the_oldest_and_says_how_many() -> None:
    ring = MemoryRing(size=10)
    log = ring_log(ring)
    ring.write("before", at_s=NOW_S)
    assert texts(log) == ["before"]
    for n in range(25):
        ring.write(f"burst {n}", at_s=NOW_S)
    read = log.read_lines()
    assert [line.text for line in read.lines] == [f"burst {n}" for n in range(15, 25)]
    assert read.notes == ["15 lines of the kernel log were overwritten before they were read"]


@pytest.mark.parametrize("record", [b"", b"no prefix", b"6,x,1,-;text", b"6,7;text", b"\xff\xfe,1,2,-;x"])
def test_a_record_that_is_none_is_left_out(record: bytes) -> None:
    class Odd(MemoryRing):
        def read(self) -> bytes:
            self.left -= 1
            if self.left < 0:
                raise BlockingIOError
            return record

        left = 1

    assert texts(ring_log(Odd())) == []


def test_the_ring_of_this_kernel_can_be_read() -> None:
    path = "/dev/kmsg"
    if not (os.path.exists(path) and stat.S_ISCHR(os.stat(path).st_mode) and os.access(path, os.R_OK)):
        pytest.skip("this user cannot read /dev/kmsg")
    try:
        log = open_log(path, {"boot": "another", "sequence": 1})
    except UnknownHealth as error:
        pytest.skip(str(error))  # dmesg_restrict
    log.read_lines()
    assert isinstance(log.memory().get("sequence"), int)
    log.close()


# ---------------------------------------------------------------- a file


class Logger:
    """What writes a log file, rotates and truncates it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.written = 0

    def write(self, text: str) -> None:
        with self.path.open("a") as file:
            file.write(text)

    def line(self) -> str:
        text = f"line {self.written}"
        self.written += 1
        self.write(f"{text}\n")
        return text

    def rotate(self) -> None:
        self.path.rename(f"{self.path}.1")
        self.path.touch()

    def truncate(self) -> None:
        os.truncate(self.path, 0)


@pytest.fixture
def logger(tmp_path: Path) -> Logger:
    logger = Logger(tmp_path / "kern.log")
    logger.line()
    return logger


def test_a_file_is_read_from_its_end_and_then_each_line_once(logger: Logger) -> None:
    log = FileLog(logger.path, {})
    assert texts(log) == []
    wanted = [logger.line(), logger.line()]
    assert (texts(log), texts(log)) == (wanted, [])
    log.close()


def test_a_torn_line_counts_when_its_end_is_there(logger: Logger) -> None:
    log = FileLog(logger.path, {})
    logger.write("half of")
    assert texts(log) == []
    logger.write(" a line\nnext")
    assert texts(log) == ["half of a line"]
    log.close()


def test_a_first_look_at_a_torn_line_reads_it_whole(logger: Logger) -> None:
    logger.write("half of")
    log = FileLog(logger.path, {})
    logger.write(" a line\n")
    assert texts(log) == ["half of a line"]
    log.close()


def test_a_rotated_file_is_read_to_its_end_before_the_new_one(logger: Logger) -> None:
    log = FileLog(logger.path, {})
    last = logger.line()
    logger.rotate()
    first = logger.line()
    assert texts(log) == [last, first]
    log.close()


def test_a_file_that_was_rotated_while_nobody_read_is_found_under_its_new_name(logger: Logger) -> None:
    before = FileLog(logger.path, {})
    memory = before.memory()
    before.close()
    last = logger.line()
    logger.rotate()
    first = logger.line()
    after = FileLog(logger.path, memory)
    assert texts(after) == [last, first]
    after.close()


def test_lines_before_an_error_are_told_before_it(logger: Logger) -> None:
    log = FileLog(logger.path, {})
    last = logger.line()
    logger.rotate()
    logger.path.unlink()
    logger.path.symlink_to(logger.path)  # nobody can read it, root neither
    assert texts(log) == [last]
    with pytest.raises(UnknownHealth, match="cannot be read"):
        log.read_lines()
    log.close()

    class Broken(MemoryRing):
        def read(self) -> bytes:
            try:
                return super().read()
            except BlockingIOError:
                raise OSError(errno.EIO, "Input/output error") from None

    ring = Broken()
    ring.write("NVRM: Xid", at_s=NOW_S)
    broken = ring_log(ring)
    assert texts(broken) == ["NVRM: Xid"]
    with pytest.raises(UnknownHealth, match="Input/output error"):
        broken.read_lines()


def test_what_a_reader_missed_for_good_is_noted(logger: Logger) -> None:
    before = FileLog(logger.path, {})
    memory = before.memory()
    before.close()
    logger.rotate()
    logger.rotate()
    first = logger.line()
    after = FileLog(logger.path, memory)
    read = after.read_lines()
    assert [line.text for line in read.lines] == [first]
    assert read.notes == [f"{logger.path} is another file than before: lines between the two may be missing"]
    after.close()


def test_a_truncated_file_is_read_from_its_beginning_also_when_it_has_grown_beyond(logger: Logger) -> None:
    log = FileLog(logger.path, {})
    logger.truncate()
    wanted = [logger.line() for _ in range(50)]
    assert texts(log) == wanted
    log.close()


def test_a_long_line_without_an_end_does_not_stop_the_reader(logger: Logger) -> None:
    log = FileLog(logger.path, {})
    logger.write("x" * (70 << 10))
    assert texts(log) == []
    logger.write("\n")
    wanted = logger.line()
    assert texts(log)[-1] == wanted
    log.close()


@given(st.integers(0, 2**32))
def test_no_line_is_lost_or_read_twice_in_any_history(seed: int) -> None:
    """Writes, rotations, restarts of the reader and torn lines in any order."""
    chance = random.Random(seed)  # noqa: S311
    with tempfile.TemporaryDirectory() as folder:
        logger = Logger(Path(folder) / "kern.log")
        logger.line()
        log = FileLog(logger.path, {})
        wanted: list[str] = []
        found: list[str] = []
        rotated = False  # since the last look: a second rotation would lose lines, as the note says
        for _ in range(chance.randrange(30)):
            step = chance.choice(("line", "line", "torn", "look", "restart", "rotate"))
            if step == "line":
                wanted.append(logger.line())
            elif step == "torn":
                logger.write("torn ")
                found += texts(log)
                rotated = False
                text = logger.line()
                wanted.append(f"torn {text}")
            elif step == "rotate" and not rotated:
                logger.rotate()
                rotated = True
            elif step == "look":
                found += texts(log)
                rotated = False
            elif step == "restart":
                memory = log.memory()
                log.close()
                log = FileLog(logger.path, memory)
        assert found + texts(log) == wanted
        log.close()
