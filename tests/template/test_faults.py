# SPDX-License-Identifier: Apache-2.0
"""Faults of the mechanism itself: a template that is killed or stopped, an owner that ends, 200 forks."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from resiliency.template import client
from resiliency.template.client import ForkRefused, StillImporting, Template, TemplateLost
from resiliency.template.server import Work
from resiliency.testing.processes import stop_process
from tests.template.programs import DEADLINE, DEADLINE_S, environment, ready_template, run, write_modules
from tests.waiting import settled, wait_until

SHORT = timedelta(seconds=1)
#: A template with this module sends itself a signal when it forks, as soon as a file names one.
SIGNALS_ITSELF = """
import os, signal
def hit(moment, template=int(os.readlink("/proc/self"))):  # asked in this way it is not noticed
    if os.getpid() == template and os.path.exists(f"{os.environ['HITS']}/{moment}"):
        with open(f"{os.environ['HITS']}/{moment}") as file:
            os.kill(os.getpid(), int(file.read()))
os.register_at_fork(before=lambda: hit("before"), after_in_parent=lambda: hit("after"))
"""


def touch(path: Path) -> list[str]:
    return [sys.executable, "-c", "import sys; open(sys.argv[1], 'w')", str(path)]


def start(template: Template, *argv: str, timeout: timedelta = SHORT, **variables: str) -> int:
    """Fork a program with this process's streams; its number."""
    env = environment(**variables)
    return template.fork(argv, env=env, descriptors={0: 0, 1: 1, 2: 2}, timeout=timeout).pid


def own_children() -> list[int]:
    """Zombies among them."""
    return [child.pid for child in psutil.Process().children()]


def wait_for_end(pid: int) -> None:
    """Of a process that need not be a child."""
    with suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        try:
            assert select.select([fd], [], [], DEADLINE_S)[0], f"process {pid} still runs"
        finally:
            os.close(fd)


@contextmanager
def template_hit(directory: Path, moment: str, number: signal.Signals) -> Iterator[Template]:
    write_modules(directory, signals_itself=SIGNALS_ITSELF)
    env = environment(PYTHONPATH=str(directory), HITS=str(directory))
    with ready_template("signals_itself", env=env) as template:
        (directory / moment).write_text(str(int(number)))
        yield template


def test_a_killed_template_is_lost_at_the_next_call() -> None:
    with ready_template() as template:
        os.kill(template.pid, signal.SIGKILL)
        with pytest.raises(TemplateLost, match=f"process {template.pid}"):
            start(template, sys.executable, "-c", "")
        with pytest.raises(TemplateLost, match="was closed"):
            template.look()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_what_a_template_forked_when_it_was_lost_never_runs_and_leaves_no_process(
    moment: str, number: signal.Signals, tmp_path: Path
) -> None:
    variables = {"PYTHONPATH": str(tmp_path), "HITS": str(tmp_path)}
    before = own_children()
    with template_hit(tmp_path, moment, number) as template:
        with pytest.raises(TemplateLost, match=r"ended|did not answer within 1 s"):
            start(template, *touch(tmp_path / "ran"), timeout=SHORT, **variables)
        assert own_children() == before, "a process or a zombie is left"
        with pytest.raises(ProcessLookupError):
            os.kill(template.pid, 0)
        assert not [process for process in psutil.process_iter() if names(process, tmp_path / "ran")]
    assert not (tmp_path / "ran").exists()


def names(process: psutil.Process, path: Path) -> bool:
    with suppress(psutil.Error):
        return str(path) in process.cmdline()
    return False


def test_a_stopped_template_is_lost_however_much_it_is_sent(tmp_path: Path) -> None:
    """More than a socket takes: the call must not wait for the template to read."""
    with ready_template() as template:
        stop_process(template.pid)
        began = time.monotonic()
        with pytest.raises(TemplateLost):
            start(template, *touch(tmp_path / "ran"), BIG="x" * 100_000, BIGGER="y" * 900_000)
        assert time.monotonic() - began < DEADLINE_S / 2
    assert not (tmp_path / "ran").exists()


def test_a_template_that_looks_at_many_files_on_slow_storage_does_not_count_as_hung(tmp_path: Path) -> None:
    write_modules(
        tmp_path,
        slow=f"""
import os, sys, time
sys.modules["resiliency.template.server"]._PROGRESS_S = 0.1
real = os.stat
def stat(path, *args, **kwargs):
    if str(path).startswith({str(tmp_path)!r}) and os.access({str(tmp_path / "SLOW")!r}, os.F_OK):
        time.sleep(0.3)
    return real(path, *args, **kwargs)
os.stat = stat
""",
        **{f"file{number}": "" for number in range(8)},
    )
    env = environment(PYTHONPATH=str(tmp_path))
    files = [f"file{number}" for number in range(8)]
    with ready_template("slow", *files, env=env) as template:
        (tmp_path / "SLOW").touch()
        pid = start(
            template, *touch(tmp_path / "ran"), timeout=timedelta(seconds=2), PYTHONPATH=str(tmp_path)
        )
        assert os.waitpid(pid, 0)[1] == 0
    assert (tmp_path / "ran").exists()


def test_a_template_that_sigkill_does_not_end_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a process that waits for a file system, for which a stopped one stands here."""
    monkeypatch.setattr(client, "KILL_TIMEOUT", timedelta(seconds=0.1))
    with ready_template() as template:
        stop_process(template.pid)
        with monkeypatch.context() as unkillable:
            unkillable.setattr(template._process, "kill", lambda: None)
            template.close()
        assert f"template process {template.pid} left behind" in caplog.text
        template._process.kill()
        template._process.wait(DEADLINE_S)


def test_a_template_ends_with_its_owner_and_what_it_forked_lives_on(tmp_path: Path) -> None:
    owner_code = """
import os, sys
from datetime import timedelta
from resiliency.template.client import Template
from resiliency.template.server import Work
template = Template(Work())
assert template.wait_until_ready(timedelta(seconds=60))
child = template.popen([sys.executable, "-c", "import signal, sys; print('up', flush=True); signal.pause()"])
print(template.pid, child.pid, flush=True)
import signal; signal.pause()
"""
    env = environment(PYTHONPATH=str(Path(__file__).parents[2]))
    with subprocess.Popen(
        [sys.executable, "-c", owner_code],
        env=env,
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        lines = sorted((owner.stdout.readline(), owner.stdout.readline()))
        template, child = map(int, lines[0].split())
        assert lines[1] == "up\n"
        owner.kill()
        try:
            wait_for_end(template)
            assert psutil.Process(child).status() != psutil.STATUS_ZOMBIE
        finally:
            os.kill(child, signal.SIGKILL)
        wait_for_end(child)


def test_a_template_that_imports_for_ever_is_ended_with_its_owner_by_close(tmp_path: Path) -> None:
    write_modules(tmp_path, endless="import threading\nthreading.Event().wait()\n")
    template = Template(Work(preload=("endless",)), env=environment(PYTHONPATH=str(tmp_path)))
    assert not template.wait_until_ready(timedelta(seconds=0.05))
    with pytest.raises(ForkRefused, match="still imports"):
        start(template, sys.executable, "-c", "")
    template.close()
    template.close()
    with pytest.raises(ProcessLookupError):
        os.kill(template.pid, 0)


def test_a_template_that_begins_to_import_when_it_is_asked_is_kept(tmp_path: Path) -> None:
    write_modules(
        tmp_path,
        slow=f"import os, select\nselect.select([os.open({str(tmp_path / 'go')!r}, os.O_RDONLY)], [], [])\n",
    )
    os.mkfifo(tmp_path / "go")
    env = environment(PYTHONPATH=str(tmp_path))
    with ready_template(env=env) as template, ThreadPoolExecutor() as pool:
        stop_process(template.pid)
        template.preload(["slow"])
        template.ready = True  # as if it had said so before
        asked = pool.submit(start, template, *touch(tmp_path / "ran"), PYTHONPATH=str(tmp_path))
        wait_until(lambda: template._forks == 1, "it is not asked")
        os.kill(template.pid, signal.SIGCONT)
        assert isinstance(asked.exception(DEADLINE_S), StillImporting)
        (tmp_path / "go").write_text("x")
        assert template.wait_until_ready(DEADLINE)
        assert run(template, "-c", "", env=env).code == 0
    assert not (tmp_path / "ran").exists()


def test_waiting_for_a_template_ends_when_it_should(tmp_path: Path) -> None:
    write_modules(tmp_path, endless="import threading\nthreading.Event().wait()\n")
    reading, writing = os.pipe()
    try:
        with Template(Work(preload=("endless",)), env=environment(PYTHONPATH=str(tmp_path))) as template:
            os.write(writing, b"x")
            assert not template.wait_until_ready(DEADLINE, wake_fd=reading)
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.thorough("tests/launch/test_standby.py restarts 30 times")
def test_200_forks_leave_nothing_behind() -> None:
    with ready_template("json") as template:
        owner, process = psutil.Process(), psutil.Process(template.pid)

        def fork_some(count: int) -> None:
            for _ in range(count):
                assert run(template, "-c", "import os; os._exit(0)").code == 0

        def held() -> list[int]:
            both = (owner, process)
            return [n for p in both for n in (p.num_fds(), p.num_threads(), len(p.children()))]

        fork_some(20)
        before, memory = settled(held), [who.memory_info().rss for who in (owner, process)]
        fork_some(200)

        def is_no_more() -> bool:
            """Less, where what libraries kept of earlier tests goes meanwhile."""
            return all(now <= then for now, then in zip(held(), before, strict=True))

        # The template closes what the last fork had a moment after that has ended.
        wait_until(is_no_more, "forks leave something behind")
        grown = [who.memory_info().rss - old for who, old in zip((owner, process), memory, strict=True)]
        assert max(grown) < 1 << 20, grown


def test_a_template_that_was_closed_is_forgotten() -> None:
    """No fork of the owner has to think of all that there were."""
    for _ in range(3):
        with Template(Work()) as template:
            assert template in client._templates
    assert template not in client._templates


def test_threads_can_fork_at_the_same_time() -> None:
    with ready_template() as template:
        codes: list[int] = []

        def fork_some() -> None:
            for number in range(5):
                codes.append(run(template, "-c", f"raise SystemExit({number})").code)

        threads = [threading.Thread(target=fork_some) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert sorted(codes) == sorted([*range(5)] * 6)


def test_a_fork_of_the_owner_owns_no_template() -> None:
    with ready_template() as template:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                start(template, sys.executable, "-c", "")
            except TemplateLost:
                template.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
        assert run(template, "-c", "").code == 0


# --- a template of a forked process ------------------------------------------------------------------

LAUNCHER = """
import os, sys
from datetime import timedelta
from resiliency.template import client
from resiliency.template.client import ForkRefused, Template
from resiliency.template.server import Work

def main():
    try:
        held = Template.of_this_process(Work(preload=("colorsys",)))
    finally:
        # Runs in what is forked, too: the stack is unwound there.
        print("finally", sys.argv[0], flush=True)
    if held is None:
        return print("not forked")
    print("held", flush=True)
    with held:
        assert held.wait_until_ready(timedelta(seconds=60)) and not held.unsafe, held.unsafe
        code = "import os, sys, json; print(json.dumps([os.getppid(), sys.argv, sys.path[0], __name__, " \
            "os.getsid(0) == os.getpid(), 'decimal' in sys.modules, 'colorsys' in sys.modules, " \
            "sorted(os.listdir('/proc/self/fd')), os.environ.get('ADDED'), sorted(globals())]))"
        for added in ("1", "2"):
            env = {**os.environ, "ADDED": added, "LONG": "x" * 100_000}
            child = held.popen([sys.executable, "-c", code, "mine"], env=env)
            assert child.wait(60) == 0
        with open("/proc/self/environ") as environ:
            assert "ADDED" not in environ.read()
        print(os.getpid(), flush=True)

if __name__ == "__main__":
    main()
    print("end of the launcher", flush=True)
"""


def test_a_forked_process_can_become_a_template_and_its_children_are_right(tmp_path: Path) -> None:
    script = tmp_path / "launcher.py"
    script.write_text(LAUNCHER)
    write_modules(tmp_path, draws="import random\nrng = random.Random()\n")
    env = environment(PYTHONPATH=f"{Path(__file__).parents[2]}:{tmp_path}")
    reading, writing = os.pipe()
    try:
        with ready_template("decimal", "draws", env=env) as template:
            out = tmp_path / "out"
            with out.open("wb") as file:
                process = template.popen(
                    [sys.executable, str(script)], env=env, stdout=file.fileno(), pass_fds=(writing,)
                )
                assert process.wait(DEADLINE_S) == 0, out.read_text()
    finally:
        os.close(reading)
        os.close(writing)
    lines = out.read_text().splitlines()
    launcher = int(lines[-2])
    assert lines[-1] == "end of the launcher"
    assert lines.count("held") == lines.count("end of the launcher") == 1
    assert lines.count(f"finally {script}") == 3, "once in the launcher, and once in each child"
    children = [json.loads(line) for line in lines if line.startswith("[")]
    for child, added in zip(children, ("1", "2"), strict=True):
        main = [
            "__annotations__",
            "__builtins__",
            "__doc__",
            "__loader__",
            "__name__",
            "__package__",
            "__spec__",
        ]
        assert child == [
            *(launcher, ["-c", "mine"], "", "__main__", True, True, True),
            *(["0", "1", "2", "3"], added, sorted([*main, "json", "os", "sys"])),
        ]


def test_a_process_that_was_not_forked_cannot_become_a_template(tmp_path: Path) -> None:
    env = environment(PYTHONPATH=str(Path(__file__).parents[2]))
    assert run(None, "-c", LAUNCHER, env=env).out == "finally -c\nnot forked\nend of the launcher\n"


def test_a_held_template_ends_with_its_owner(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from resiliency.template.client import Template\n"
        "from resiliency.template.server import Work\n"
        "held = Template.of_this_process(Work())\n"
        "open(sys.argv[1], 'w').write(str(held.pid))\n"
        "os._exit(0)\n"
    )
    pid = tmp_path / "pid"
    with ready_template() as template:
        assert run(template, "-c", code, str(pid), env={**environment(), "X": "1"}).code == 0
        wait_for_end(int(pid.read_text()))
