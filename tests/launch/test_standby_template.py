# SPDX-License-Identifier: Apache-2.0
"""What the launcher does with a template that hangs or ends, without a launcher around it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest

from resiliency.launch import cli, guardian, standby
from resiliency.launch.options import resolve
from resiliency.launch.protection import Protection
from resiliency.launch.standby import MOST_KEPT, Standby
from resiliency.testing.processes import stop_process
from tests.waiting import wait_until

from .conftest import WAIT, WORKER

SHORT = timedelta(seconds=1)


@pytest.fixture
def protection(monkeypatch: pytest.MonkeyPatch) -> Iterator[Protection]:
    monkeypatch.setenv(guardian.LAUNCHER_ENV, "")  # is put back at the end
    with Protection(grace=timedelta(seconds=1)) as protection:
        yield protection


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def prepared(protection: Protection, stack: ExitStack, *words: str, directory: Path) -> Standby:
    argv = [f"--run-dir={directory}", "--max-restarts=1", *words]
    return stack.enter_context(Standby(resolve(cli.parse(argv, {}), {}), protection))


def start_worker(standby: Standby) -> None:
    process = standby.start_worker([sys.executable, "-c", ""], os.environ, None, None, 1)
    assert process.wait(timeout=WAIT) == 0


@pytest.fixture
def endless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Flags of a launcher whose template imports for ever."""
    (tmp_path / "endless.py").write_text("import threading\nthreading.Event().wait()\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    return ["--standby-preload=endless", str(WORKER)]


def test_a_template_that_imports_for_too_long_is_waited_for_once_and_lost(
    protection: Protection,
    stack: ExitStack,
    endless: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(standby, "WAIT_TIMEOUT", SHORT)
    prepared_standby = prepared(protection, stack, *endless, directory=tmp_path)
    assert len(protection.exempt) == 1
    prepared_standby.begin_attempt()
    for _ in range(3):
        start_worker(prepared_standby)
    assert prepared_standby.forked == 0
    assert len(caplog.messages) == 1, caplog.messages
    assert "after 1 s.  Ranks start the ordinary way until there is another one." in caplog.text
    assert protection.exempt == set()
    prepared_standby.workers_started()
    assert len(protection.exempt) == 1, "it is not replaced"


def test_a_template_that_is_stopped_while_it_imports_is_lost_also_where_no_rank_waits_for_it(
    protection: Protection,
    stack: ExitStack,
    endless: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(standby, "WAIT_TIMEOUT", SHORT)
    prepared_standby = prepared(protection, stack, *endless, directory=tmp_path)
    (pid,) = protection.exempt
    stop_process(pid)

    def is_lost() -> bool:
        prepared_standby.look()
        return not protection.exempt

    wait_until(is_lost, "the template is kept", timeout=WAIT)
    assert f"the template process {pid} has imported nothing for 1 s." in caplog.text
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_template_that_is_killed_while_it_imports_is_counted_once(
    protection: Protection,
    stack: ExitStack,
    endless: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    prepared_standby = prepared(protection, stack, *endless, directory=tmp_path)
    (pid,) = protection.exempt
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    prepared_standby.begin_attempt()
    start_worker(prepared_standby)
    (message,) = caplog.messages
    assert message.startswith(
        f"standby: the template process {pid} ended.  Ranks start the ordinary way until"
    )


def test_what_a_template_runs_for_its_imports_is_nothing_that_workers_left(
    protection: Protection, stack: ExitStack, endless: list[str], tmp_path: Path
) -> None:
    """ldconfig, compilers."""
    (tmp_path / "endless.py").write_text(
        "import subprocess\nfrom pathlib import Path\nprocess = subprocess.Popen(['sleep', '1000'])\n"
        f"Path({str(tmp_path / 'sleeper')!r}).write_text(f'{{process.pid}}\\n')\nprocess.wait()\n"
    )
    prepared(protection, stack, *endless, directory=tmp_path)
    said = tmp_path / "sleeper"
    wait_until(lambda: said.exists() and said.read_text().endswith("\n"), "nothing is run", timeout=WAIT)
    stack.callback(os.kill, int(said.read_text()), signal.SIGKILL)
    worker = stack.enter_context(subprocess.Popen(["sleep", "1000"], start_new_session=True))
    stack.callback(worker.kill)
    assert [process.pid for process in protection.leftovers()] == [worker.pid]


# --- what is known of a script -----------------------------------------------------------------------


def run_job(script: Path, *args: str, kept: int) -> tuple[int, str]:
    """Run a script in a job of one rank, until `kept` records are kept; the forked ranks, and the output."""
    words = [f"--run-dir={script.parent}", "--max-restarts=1", str(script), *args]
    output = script.with_name("output")
    with (
        Protection(grace=timedelta(seconds=1)) as protection,
        Standby(resolve(cli.parse(words, {}), {}), protection) as job,
        output.open("w") as file,
    ):
        job.begin_attempt()
        process = job.start_worker([sys.executable, "-u", *words[2:]], os.environ, file, None, 0)
        assert process.wait(timeout=WAIT) == 0
        job.workers_started()
        wait_until(lambda: len(records(script)) == kept, "the record is not kept", timeout=WAIT)
        return job.forked, output.read_text()


def records(script: Path) -> list[Path]:
    return list(script.parent.glob("cache/imports/*/*"))


def test_what_a_job_imported_for_its_arguments_is_not_imported_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(guardian.LAUNCHER_ENV, "")
    monkeypatch.setenv(standby.CACHE_DIR_ENV, str(tmp_path / "cache"))
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nprint('colorsys' in sys.modules)\nif sys.argv[1:]: import colorsys\nimport wave\n"
    )
    assert run_job(script, "--patch", kept=1) == (0, "False\n")
    assert run_job(script, kept=2) == (0, "False\n")
    assert run_job(script, "--patch", kept=2) == (1, "True\n")
    assert run_job(script, kept=2) == (1, "False\n")
    (record, *_) = records(script)
    for number in range(2 * MOST_KEPT):
        os.utime(shutil.copy(record, record.with_name(f"{number}")), (number, number))
    assert run_job(script, "--date=today", kept=MOST_KEPT) == (0, "False\n")
    assert not record.with_name("0").exists()
