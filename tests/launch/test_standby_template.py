# SPDX-License-Identifier: Apache-2.0
"""What the launcher does with a template that hangs or ends, without a launcher around it."""

from __future__ import annotations

import colorsys
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import wave
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest

from resiliency.launch import cli, guardian, standby
from resiliency.launch.options import resolve
from resiliency.launch.protection import Protection
from resiliency.launch.standby import MOST_KEPT, Standby
from resiliency.proc_stat import wait_for_program
from resiliency.testing.processes import stop_process
from tests.waiting import wait_until

from .conftest import WAIT, WORKER

SHORT = timedelta(seconds=0.5)


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


def wait_for_imports(protection: Protection, module: str = "endless") -> None:
    """A busy machine takes a second to start an interpreter."""
    note = protection.private_dir / "importing"
    begun = f"{module}\n"
    wait_until(lambda: note.exists() and note.read_text().startswith(begun), "no import", timeout=WAIT)


def start_worker(standby: Standby, *words: str) -> None:
    process = standby.start_worker([sys.executable, *(words or ("-c", ""))], os.environ, None, None, 1)
    assert process.wait(timeout=WAIT) == 0


@pytest.fixture
def endless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Flags of a launcher whose template imports for ever."""
    (tmp_path / "endless.py").write_text("import threading\nthreading.Event().wait()\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    return ["--standby-preload=endless", str(WORKER)]


def test_a_template_that_hangs_in_an_import_costs_one_deadline_for_all_ranks_and_attempts(
    protection: Protection,
    stack: ExitStack,
    endless: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(standby, "TELL_TIMEOUT", SHORT / 4)
    caplog.set_level("INFO")
    script = tmp_path / "script.py"
    script.write_text("import sys\nassert 'colorsys' in sys.modules\n")
    modules = "--standby-preload=colorsys,endless"
    job = prepared(protection, stack, modules, str(script), directory=tmp_path)
    wait_for_imports(protection)
    began = time.monotonic()
    job.begin_attempt()
    with monkeypatch.context() as hasty:
        hasty.setattr(standby, "HANG_TIMEOUT", SHORT)
        for _ in range(3):
            start_worker(job)
    assert job.forked == 0
    assert protection.exempt == set()
    waits, lost = caplog.messages
    assert waits == "standby: ranks wait for the import of endless, for more than 0.125 s so far"
    assert re.fullmatch(
        r"standby: the template process \d+ has hung in the import of endless for \d+ s\.  Ranks start the"
        r" ordinary way until there is another one, which leaves out endless\.",
        lost,
    )
    job.workers_started()
    job.begin_attempt()
    start_worker(job)
    wait_until(lambda: is_ready(job), "the next template hangs, too", timeout=WAIT)
    start_worker(job, str(script))
    assert job.forked == 1
    assert len(caplog.messages) == 2, caplog.messages
    assert time.monotonic() - began < standby.WAIT_TIMEOUT.total_seconds() / 2


def is_ready(job: Standby) -> bool:
    job.look()
    return job._template is not None and job._template.ready


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("while True: pass", id="computes"),
        pytest.param("import subprocess\nsubprocess.run(['sleep', '1000'])", id="waits for a compiler"),
    ],
)
def test_a_module_that_does_something_is_waited_for_longer_and_not_for_ever(
    source: str,
    protection: Protection,
    stack: ExitStack,
    endless: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(standby, "HANG_TIMEOUT", SHORT / 4)
    monkeypatch.setattr(standby, "WAIT_TIMEOUT", SHORT)
    (tmp_path / "endless.py").write_text(source)
    job = prepared(protection, stack, *endless, directory=tmp_path)
    wait_for_imports(protection)
    job.begin_attempt()
    start_worker(job)  # the attempt has waited for long enough, or the module had its time
    wait_until(lambda: job.look() or not protection.exempt, "the template is kept", timeout=WAIT)
    assert re.search(r"has hung in the import of endless for \d+ s", caplog.text)


def test_a_template_that_comes_last_on_a_busy_host_is_no_template_that_hangs(
    protection: Protection,
    stack: ExitStack,
    endless: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It could run, and gets no processor."""
    monkeypatch.setattr(standby, "HANG_TIMEOUT", SHORT / 5)
    monkeypatch.setattr(standby, "WAIT_TIMEOUT", SHORT / 5)
    monkeypatch.setattr(standby, "stat_fields", lambda pid: ["R", *["0"] * 20])
    job = prepared(protection, stack, *endless, directory=tmp_path)
    wait_for_imports(protection)
    end = time.monotonic() + SHORT.total_seconds()
    wait_until(lambda: job.look() or time.monotonic() > end, "time stands still")
    assert len(protection.exempt) == 1


def test_ranks_wait_for_a_bounded_time_for_a_template_that_goes_on_and_it_is_kept(
    protection: Protection,
    stack: ExitStack,
    endless: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    (tmp_path / "endless.py").write_text("import sys\nwhile sys.modules.pop('part', True): import part\n")
    (tmp_path / "part.py").write_text("import time\ntime.sleep(0.05)\n")
    job = prepared(protection, stack, *endless, directory=tmp_path)
    wait_for_imports(protection, "part")
    job.begin_attempt()
    job._wait_until = time.monotonic() + SHORT.total_seconds() / 2
    start_worker(job)
    start_worker(job)
    assert caplog.messages == ["ranks start the ordinary way: the template still imports"]
    assert len(protection.exempt) == 1


def test_a_template_that_is_stopped_while_it_imports_is_lost_also_where_no_rank_waits_for_it(
    protection: Protection,
    stack: ExitStack,
    endless: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(standby, "HANG_TIMEOUT", SHORT)
    job = prepared(protection, stack, *endless, directory=tmp_path)
    wait_for_imports(protection)
    (pid,) = protection.exempt
    stop_process(pid)

    def is_lost() -> bool:
        job.look()
        return not protection.exempt

    wait_until(is_lost, "the template is kept", timeout=WAIT)
    assert f"the template process {pid} has hung in the import of" in caplog.text
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_module_that_cannot_be_imported_is_named_with_its_error(
    protection: Protection,
    stack: ExitStack,
    endless: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "raises.py").write_text("raise ValueError('of mine')")
    modules = "--standby-preload=not_there,raises,colorsys"
    job = prepared(protection, stack, modules, endless[1], directory=tmp_path)
    wait_until(lambda: is_ready(job), "the template is not ready", timeout=WAIT)
    job.look()
    named = "standby: {} of --standby-preload cannot be imported: {}".format
    assert caplog.messages[:2] == [
        named("not_there", "ModuleNotFoundError: No module named 'not_there'"),
        named("raises", "ValueError: of mine"),
    ]
    assert job._template is not None
    assert not job._template.left_out


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--standby=off"], "--standby is off"),
        (["--max-restarts=0"], "nothing restarts ranks, see --max-restarts"),
        (["--no-python"], "ranks are no Python programs that can be forked"),
    ],
)
def test_modules_that_nothing_imports_are_told(
    words: list[str],
    why: str,
    protection: Protection,
    stack: ExitStack,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    script = "/bin/true" if "--no-python" in words else str(WORKER)
    prepared(protection, stack, "--standby-preload=json", *words, script, directory=tmp_path)
    assert caplog.messages == [f"--standby-preload has no effect: {why}"]


def test_ready_is_said_when_the_imports_of_the_rank_are_repeated(
    protection: Protection,
    stack: ExitStack,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(standby.CACHE_DIR_ENV, str(tmp_path / "cache"))
    monkeypatch.setattr(standby, "_SETTLED_S", 0.0)
    caplog.set_level("INFO")
    job = prepared(protection, stack, str(WORKER), directory=tmp_path)
    job.begin_attempt()
    job.workers_started()

    def says_ready() -> bool:
        job.look()
        return "standby ready" in caplog.text

    wait_until(lambda: is_ready(job), "the template does not begin", timeout=WAIT)
    assert not says_ready(), "local rank 0 has imported nothing yet"
    record = protection.private_dir / "imports"
    record.write_text(f"m colorsys\t{colorsys.__file__}\nm wave\t{wave.__file__}\n")
    os.utime(record, (2**32, 2**32))  # the rank imports, so the template waits
    for _ in range(3):
        assert not says_ready(), "the template has repeated nothing yet"
    os.utime(record, (0, 0))
    wait_until(says_ready, "the template does not follow", timeout=WAIT)
    assert job._template is not None
    assert job._template.followed == record.stat().st_size


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
    wait_for_program(worker.pid, WAIT)
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
        os.utime(protection.private_dir / "imports", (0, 0))  # so that it counts as imported long ago
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
