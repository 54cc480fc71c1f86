# SPDX-License-Identifier: Apache-2.0
"""A command under test is waited for without polling and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from resiliency.testing.leaks import open_descriptors
from resiliency.testing.processes import MARKER_ENV, Command, is_alive, processes_marked
from tests.waiting import wait_until

Python = Callable[..., Command]


@pytest.fixture(params=["forked", "cold"])
def python(request: pytest.FixtureRequest) -> Python:
    """``python(code, ...)`` starts a program; the warm interpreter cannot take the flag."""
    flags = ["-S"] if request.param == "cold" else []

    def start(code: str, *, words: Sequence[Path] = (), **options: Any) -> Command:
        return Command([sys.executable, *flags, "-c", textwrap.dedent(code), *words], **options)

    return start


def test_waits_for_a_line_and_returns_its_match(python: Python, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    with python("print('step 41'); print('step 42')", log=log) as cmd:
        assert cmd.wait_for_line(r"step (\d+)", timeout=60, count=2)[1] == "42"
        assert cmd.wait(timeout=60) == 0
    assert cmd.output == log.read_text() == "step 41\nstep 42\n"


def test_stdout_and_stderr_are_one_stream_and_the_last_line_needs_no_newline(python: Python) -> None:
    code = "import sys; sys.stderr.write('first\\n'); sys.stderr.flush(); sys.stdout.write('last')"
    with python(code) as cmd:
        cmd.wait_for_line("^last$", timeout=60)
        assert cmd.lines == ["first", "last"]


def test_lines_before_an_action_can_be_left_out(python: Python) -> None:
    with python("print('ready', flush=True); input_ = input") as cmd:
        cmd.wait_for_line("ready", timeout=60)
        with pytest.raises(EOFError, match=r"0 of 1 lines matching 'ready'"):
            cmd.wait_for_line("ready", timeout=60, since=len(cmd.lines))


def test_a_missing_line_is_reported_with_the_output_and_whether_the_command_runs(python: Python) -> None:
    code = """
        import signal
        for i in range(50):
            print(f"line {i}", flush=True)
        signal.pause()
    """
    with python(code) as cmd:
        cmd.wait_for_line("line 49", timeout=60)
        with pytest.raises(TimeoutError, match=r"(?s)still runs.*Last 40 of 50 lines.*line 10\n.*line 49"):
            cmd.wait_for_line("never", timeout=0.05)
        with pytest.raises(TimeoutError, match="did not exit within"):
            cmd.wait(timeout=0.05)
        with pytest.raises(AssertionError, match="left 1 processes behind"):
            cmd.assert_no_orphans(timeout=0)


def test_what_was_written_before_something_else_was_seen_is_in_the_output(
    python: Python, tmp_path: Path
) -> None:
    code = """
        import sys
        with open(sys.argv[1]) as asked, open(sys.argv[2], "w") as told:
            for line in asked:
                print("said", line.strip(), flush=True)
                print("done", file=told, flush=True)
    """
    asked, told = tmp_path / "asked", tmp_path / "told"
    for fifo in (asked, told):
        os.mkfifo(fifo)
    with python(code, words=[asked, told]) as cmd, asked.open("w") as asking, told.open() as telling:
        for number in range(300):
            print(number, file=asking, flush=True)
            assert telling.readline() == "done\n"
            assert (cmd.lines[-1] if number % 2 else cmd.output.splitlines()[-1]) == f"said {number}"


def test_output_written_before_exit_is_complete_after_wait_even_if_a_child_holds_the_pipe(
    python: Python,
) -> None:
    code = """
        import subprocess, sys
        subprocess.Popen(["sleep", "60"])
        print("x" * 200_000 + "end")
    """
    with python(code) as cmd:
        assert cmd.wait(timeout=60) == 0
        assert len(cmd.lines[0]) == 200_003
        assert [p.name() for p in cmd.survivors()] == ["sleep"]


def test_a_signal_reaches_the_command_and_the_exit_code_names_it(python: Python) -> None:
    with python("import signal; print('up', flush=True); signal.pause()") as cmd:
        cmd.wait_for_line("up", timeout=60)
        cmd.signal(signal.SIGTERM)
        assert cmd.wait(timeout=60) == cmd.returncode == -signal.SIGTERM


ORPHAN = """
    import os, sys, time
    if os.fork() == 0:
        if os.fork() == 0:
            os.setsid()
            print("orphan", os.getpid(), flush=True)
            time.sleep({seconds})
        os._exit(0)
    os.wait()
"""


def test_orphans_of_a_dead_parent_are_found_and_killed(python: Python) -> None:
    with python(ORPHAN.format(seconds=60)) as cmd:
        orphan = psutil.Process(int(cmd.wait_for_line(r"orphan (\d+)", timeout=60)[1]))
        cmd.wait(timeout=60)
        assert cmd.descendants() == []
        assert cmd.survivors(timeout=0.05) == [orphan]
    assert not is_alive(orphan)
    cmd.close()  # idempotent


def test_survivors_returns_as_soon_as_the_last_one_exits(python: Python) -> None:
    with python(ORPHAN.format(seconds=0.2)) as cmd:
        cmd.wait(timeout=60)
        start = time.monotonic()
        assert cmd.survivors(timeout=30) == []
        assert time.monotonic() - start < 5


def test_after_sigstop_no_thread_of_a_command_runs(python: Python) -> None:
    code = (
        "import threading\n"
        "def run():\n"
        "    while True: pass\n"
        "for _ in range(4): threading.Thread(target=run, daemon=True).start()\n"
        "print('ready', flush=True); run()\n"
    )
    with python(code) as cmd:
        cmd.wait_for_line("ready", timeout=60)
        cmd.signal(signal.SIGSTOP)
        states = {
            one.status()
            for one in map(psutil.Process, [thread.id for thread in psutil.Process(cmd.pid).threads()])
        }
        assert states == {psutil.STATUS_STOPPED}


def test_a_stopped_tree_is_killed_too(python: Python) -> None:
    with python("import subprocess; subprocess.run(['sleep', '60'])") as cmd:
        children = wait_until(cmd.descendants, "it starts no child")
        cmd.signal(signal.SIGSTOP)
        children[0].suspend()
    assert not is_alive(children[0])
    assert cmd.returncode == -signal.SIGKILL


def test_a_nested_command_belongs_to_both(python: Python, monkeypatch: pytest.MonkeyPatch) -> None:
    code = f"import os; print('id', os.environ['{MARKER_ENV}'])"
    monkeypatch.setenv(MARKER_ENV, "outer")
    with python(code) as cmd:
        assert cmd.wait_for_line(r"id (.*)", timeout=60)[1] == f"outer:{cmd.id}"


def test_variables_are_added_and_removed(python: Python, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GONE", "1")
    code = "import os; print(os.environ.get('GONE'), os.environ['KEPT'], os.getcwd())"
    with python(code, env={"GONE": None, "KEPT": "yes"}, cwd="/") as cmd:
        cmd.wait_for_line("^None yes /$", timeout=60)


def test_a_command_that_cannot_start_leaks_nothing() -> None:
    before = open_descriptors()
    with pytest.raises(FileNotFoundError):
        Command(["/no/such/program"])
    assert open_descriptors() == before


LOSES_ITS_INTERPRETER = """
import os, signal, sys
from resiliency.testing import warm

def is_forked():
    return warm.run([sys.executable, "-c", "import sys; print('colorsys' in sys.modules)"], timeout=60).stdout

with warm.interpreter("colorsys"):
    print(is_forked().strip())
    os.kill(*warm.pids(), signal.SIGKILL)
    print(is_forked().strip(), is_forked().strip())
"""


def test_an_interpreter_that_is_lost_is_replaced_and_costs_one_ordinary_start() -> None:
    with Command([sys.executable, "-c", LOSES_ITS_INTERPRETER]) as cmd:
        assert cmd.wait(timeout=120) == 0
        assert cmd.lines == ["True", "False True"]


@pytest.mark.parametrize("cold", [False, True])
def test_a_python_program_is_forked_unless_a_cold_start_is_asked_for(cold: bool) -> None:
    code = "import sys; print('torch' in sys.modules)"
    with Command([sys.executable, "-c", code], cold=cold) as cmd:
        assert cmd.wait(timeout=60) == 0
    assert cmd.output == f"{not cold}\n"


def test_a_program_that_was_just_started_is_found_by_its_mark() -> None:
    """`Popen` returns before the kernel has put the environment where others can read it."""
    for _ in range(50):
        with Command(["sleep", "600"]) as cmd:
            assert [process.pid for process in processes_marked(cmd.id)] == [cmd.pid]
