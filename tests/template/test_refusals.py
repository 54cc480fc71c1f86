# SPDX-License-Identifier: Apache-2.0
"""What cannot be forked is refused with the reason, and large, odd or many things are no reason."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from importlib import util
from pathlib import Path

import pytest

from resiliency.template.client import ForkRefused, Template
from resiliency.template.program import PythonCommand
from tests.template.programs import (
    environment,
    other_affinity,
    other_numa_policy,
    other_oom_score,
    ready_template,
    run,
)


@pytest.fixture(scope="module")
def template() -> Iterator[Template]:
    with ready_template() as template:
        yield template


@pytest.mark.parametrize(
    "flags",
    [
        *(["-O"], ["-I"], ["-P"], ["-E"], ["-s"], ["-S"], ["-B"], ["-uO"], ["-X", "dev"], ["-i"], ["-v"]),
        *(["-m"], ["-c"], ["-W"], ["-"], ["--version"], [], ["not_there.py"], [""]),
    ],
    ids=" ".join,
)
def test_what_a_running_interpreter_cannot_take_over_is_refused(template: Template, flags: list[str]) -> None:
    words = [] if flags in (["-m"], ["-c"], ["-W"], [], ["-"], ["--version"]) else ["x.py"]
    with pytest.raises(ForkRefused, match="no program for a running interpreter"):
        run(template, *flags, *words)


def make_directory(path: Path) -> None:
    path.mkdir()
    (path / "__main__.py").write_text("print('from a directory')")


def make_archive(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("__main__.py", "print('from an archive')")


def make_compiled(path: Path) -> None:
    path.write_bytes(util.MAGIC_NUMBER + b"\0" * 12)


@pytest.mark.parametrize("make", [make_directory, make_archive, make_compiled, os.mkfifo])
def test_a_script_that_is_no_source_file_is_refused(
    template: Template, make: Callable[[Path], None], tmp_path: Path
) -> None:
    make(tmp_path / "program.py")
    with pytest.raises(ForkRefused, match="no program for a running interpreter"):
        run(template, "program.py", cwd=tmp_path)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["-u", "-Wignore", "-W", "error", "-m", "x", "-u"],
            (True, ("ignore", "error"), "module", "x", ("-u",)),
        ),
        (["-c", "pass", "-c"], (False, (), "code", "pass", ("-c",))),
        ([__file__, "-m", ""], (False, (), "script", __file__, ("-m", ""))),
    ],
)
def test_a_command_line_is_taken_apart_as_the_interpreter_does(
    words: list[str], expected: tuple[object, ...]
) -> None:
    command = PythonCommand.parse(["python", *words])
    assert command is not None
    found = (command.unbuffered, command.warn_options, command.kind, command.target, command.args)
    assert found == expected


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "PYTHONPATH", "LD_PRELOAD", "PYTORCH_CUDA_ALLOC_CONF"])
def test_a_variable_that_was_read_when_the_template_started_must_not_differ(
    template: Template, name: str
) -> None:
    with pytest.raises(ForkRefused, match=f"{name} is different from when the template was started"):
        run(template, "-c", "", env=environment(**{name: "/other"}))


@pytest.mark.parametrize("value", ["first", "", "-1"])
def test_a_rank_that_is_no_number_is_refused(template: Template, value: str) -> None:
    with pytest.raises(ForkRefused, match="LOCAL_RANK is no whole number"):
        run(template, "-c", "", env=environment(LOCAL_RANK=value))


def test_another_interpreter_is_refused(template: Template) -> None:
    with pytest.raises(ForkRefused, match="no program for a running interpreter"):
        template.popen(["/usr/bin/python3", "-c", ""], env=environment())


def test_a_directory_that_is_not_there_is_refused(template: Template, tmp_path: Path) -> None:
    with pytest.raises(ForkRefused, match=r"cannot be passed on: .*No such file"):
        run(template, "-c", "", cwd=tmp_path / "not_there")


def test_a_descriptor_that_is_not_open_is_refused_and_the_template_lives(template: Template) -> None:
    for descriptors in ({0: 0, 1: 1, 2: 9999}, {0: 0, 1: 1, 2: -1}, {0: 0, 1: 1, 2: subprocess.STDOUT}):
        with pytest.raises(ForkRefused, match=r"cannot be passed on: .*Bad file descriptor"):
            template.fork([sys.executable, "-c", ""], env=environment(), descriptors=descriptors)
    with pytest.raises(ForkRefused, match="not the first three"):
        template.fork([sys.executable, "-c", ""], env=environment(), descriptors={1: 1, 2: 2})
    assert run(template, "-c", "").code == 0


def test_an_owner_that_ignores_its_children_is_refused(template: Template) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pytest.raises(ForkRefused, match="SIGCHLD is ignored"):
            run(template, "-c", "")
    finally:
        signal.signal(signal.SIGCHLD, before)


def other_umask() -> Callable[[], object]:
    before = os.umask(0o137)
    return lambda: os.umask(before)


def other_limit() -> Callable[[], object]:
    before = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(
        resource.RLIMIT_CORE, (0, before[1]) if before[0] else (1 if before[1] else 0, before[1])
    )
    return lambda: resource.setrlimit(resource.RLIMIT_CORE, before)


def other_mask() -> Callable[[], object]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    return lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before)


def other_disposition() -> Callable[[], object]:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    return lambda: signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (other_umask, "Umask"),
        (other_limit, "limits"),
        (other_affinity, "Cpus_allowed"),
        (other_mask, "SigBlk"),
        (other_disposition, "SigIgn"),
        (other_oom_score, "oom_score_adj"),
        (other_numa_policy, "NUMA policy"),
    ],
)
def test_what_the_owner_would_pass_on_by_now_must_be_what_the_template_got(
    template: Template, change: Callable[[], Callable[[], object]], name: str
) -> None:
    put_back = change()
    try:
        with pytest.raises(
            ForkRefused, match=f"{name} of this process changed since the template was started"
        ):
            run(template, "-c", "")
    finally:
        put_back()
    assert run(template, "-c", "").code == 0


def test_what_glibc_does_with_signals_of_its_own_is_no_change(tmp_path: Path) -> None:
    """It ignores two in a child of `posix_spawn`, as the local orchestrator uses, until the first thread."""
    text = """
import threading
from resiliency.template.safety import passed_on
before = passed_on()
thread = threading.Thread(target=int)
thread.start()
thread.join()
print({name for name, value in passed_on().items() if value != before[name]})
"""
    said = tmp_path / "said"
    actions = [(os.POSIX_SPAWN_OPEN, 1, str(said), os.O_WRONLY | os.O_CREAT, 0o600)]
    child = os.posix_spawn(
        sys.executable, [sys.executable, "-c", text], dict(os.environ), file_actions=actions
    )
    assert os.waitpid(child, 0)[1] == 0
    assert said.read_text() == "set()\n"


def test_large_environments_and_arguments_arrive(template: Template) -> None:
    env = environment(**{f"LARGE_{number}": f"{number}" * 100_000 for number in range(10)})
    code = (
        "import os, sys; print(sum(map(len, os.environ.values())), len(sys.argv[1]),"
        " len(open('/proc/self/environ').read()), len(open('/proc/self/cmdline').read()))"
    )
    words = ["-c", code, "x" * 100_000]
    assert run(template, *words, env=env) == run(None, *words, env=env)


@pytest.mark.parametrize("count", [200, 247])
def test_many_descriptors_arrive(template: Template, count: int) -> None:
    copies = [os.dup(0) for _ in range(count)]
    try:
        code = "import os; print(len(os.listdir('/proc/self/fd')))"
        reading, writing = os.pipe()
        with open(reading) as output:
            process = template.popen(
                [sys.executable, "-c", code], env=environment(), stdout=writing, pass_fds=copies
            )
            os.close(writing)
            assert output.read() == f"{count + 4}\n"
        assert process.wait(60) == 0
    finally:
        for fd in copies:
            os.close(fd)


def test_too_many_descriptors_are_refused(template: Template) -> None:
    descriptors = {0: 0, 1: 1, 2: 2, **dict.fromkeys(range(1000, 1248), 0)}
    with pytest.raises(ForkRefused, match="too many"):
        template.fork([sys.executable, "-c", ""], env=environment(), descriptors=descriptors)


def test_descriptors_can_change_places(template: Template, tmp_path: Path) -> None:
    files = [tmp_path / "one", tmp_path / "two"]
    code = "import os; os.write(int(os.environ['ONE']), b'one'); os.write(int(os.environ['TWO']), b'two')"
    with files[0].open("wb") as one, files[1].open("wb") as two:
        a, b = one.fileno(), two.fileno()
        process = template.fork(
            [sys.executable, "-c", code],
            env=environment(ONE=str(b), TWO=str(a)),
            descriptors={0: 0, 1: 1, 2: 2, a: b, b: a},
        )
        assert process.wait(60) == 0
    assert [file.read_text() for file in files] == ["one", "two"]
