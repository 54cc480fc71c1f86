# SPDX-License-Identifier: Apache-2.0
"""A forked program ends as a freshly started one does, to the last byte of what it says."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from resiliency.template.client import Template
from tests.template.programs import DEADLINE_S, environment, ready_template, run

ENDS = {
    "returns": "print('done')",
    "exits with a number": "import sys; print('out'); sys.exit(3)",
    "exits with a text": "import sys; sys.exit('a text')",
    "exits with nothing": "raise SystemExit",
    "raises": "def outer():\n    inner()\ndef inner():\n    raise ValueError('wrong')\nouter()",
    "raises within": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    {}['key']",
    "raises for a cause": "try:\n    int('x')\nexcept ValueError as error:\n    raise KeyError from error",
    "does not compile": "x = (\n",
    "is indented": "if True:\n        x = 1\n    y = 2\n",
    "imports what does not compile": "import broken",
    "imports what is missing": "import not_there",
    "ends at once": "import os; print('lost', end=''); os._exit(7)",
    "kills itself": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "is terminated": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "is interrupted": "import atexit, os, signal\natexit.register(print, 'at exit')\n"
    # A shell that runs this in the background lets it ignore the signal.
    "signal.signal(signal.SIGINT, signal.default_int_handler)\nfile = open('FILE', 'w')\n"
    "file.write('kept')\nos.kill(os.getpid(), signal.SIGINT)\nsignal.pause()",
    "reports by itself": "import sys\nsys.excepthook = lambda kind, error, trace: print(kind, error, "
    "trace.tb_lineno)\nraise ValueError('hooked')",
    "asks for the last error": "import atexit, sys\ndef last():\n"
    "    print(repr(sys.last_value), sys.last_traceback.tb_lineno, sys.excepthook is sys.__excepthook__)\n"
    "atexit.register(last)\nraise ValueError('last')",
    "has exit handlers": "import atexit, sys\natexit.register(print, 'first')\n"
    "atexit.register(print, 'second')\nsys.exit(5)",
    "has a thread": "import threading\nevent = threading.Event()\n"
    "thread = threading.Thread(target=lambda: (event.wait(), print('thread')))\nthread.start()\n"
    "print('main')\nthreading.Timer(0.05, event.set).start()",
    "leaves what it wrote to the interpreter": "import sys\nsys.stdout.write('no newline')\n"
    "file = open('FILE', 'w')\nfile.write('text')",
    "warns": "import warnings; warnings.warn('careful', stacklevel=1)",
    "deletes": "class Late:\n    def __del__(self):\n        print('deleted')\nlate = Late()",
    "fails in a thread": "import threading\nthread = threading.Thread(target=lambda: 1 / 0, name='t')\n"
    "thread.start()\nthread.join()",
    "fails at exit": "import atexit, sys\nsys.unraisablehook = lambda what: print(what.exc_value)\n"
    "atexit.register(lambda: 1 / 0)",
}


@pytest.fixture(scope="module")
def template() -> Iterator[Template]:
    with ready_template() as template:
        yield template


#: Those that are different where the program is a module or a text.
ENDS_BY_KIND = ("returns", "exits with a text", "raises", "does not compile", "is interrupted", "warns")


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        *((end, "script") for end in ENDS),
        *((end, kind) for end in ENDS_BY_KIND for kind in ("module", "code")),
    ],
)
def test_a_forked_program_ends_as_a_fresh_one(
    template: Template, end: str, kind: str, tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text("def :\n")
    (tmp_path / "program.py").write_text(ENDS[end])
    words = {"script": ["program.py"], "module": ["-m", "program"], "code": ["-c", ENDS[end]]}[kind]
    written = tmp_path / "FILE"
    results = []
    for start_from in (template, None):
        ended = run(start_from, *words, cwd=tmp_path)
        results.append((ended, written.read_text() if written.exists() else None))
        written.unlink(missing_ok=True)
    forked, fresh = results
    assert forked == fresh


@pytest.mark.parametrize(
    "words",
    [["-m", "not_there"], ["-m", "not_there.either"], ["-m", "json"], ["-m", "os.path"]],
    ids=" ".join,
)
def test_a_module_that_cannot_run_is_reported_as_by_the_interpreter(
    template: Template, words: list[str], tmp_path: Path
) -> None:
    assert run(template, *words, cwd=tmp_path) == run(None, *words, cwd=tmp_path)


def test_an_interrupted_program_dies_by_the_signal(template: Template) -> None:
    assert run(template, "-c", "raise KeyboardInterrupt").code == -signal.SIGINT


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing_works_in_a_forked_program(template: Template, method: str, tmp_path: Path) -> None:
    script = tmp_path / "parallel.py"
    script.write_text(
        "import multiprocessing, os, pickle, sys\n"
        "class Mine:\n"
        "    def __init__(self, value): self.value = value\n"
        "def work(item): return Mine((item.value, os.getppid(), sys.argv[1]))\n"
        "if __name__ == '__main__':\n"
        "    assert pickle.loads(pickle.dumps(Mine(3))).value == 3\n"
        "    with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:\n"
        "        print(sorted(mine.value[::2] for mine in pool.map(work, [Mine(1), Mine(2)])))\n"
    )
    ended = run(template, "parallel.py", method, cwd=tmp_path)
    assert ended.out == f"[(1, '{method}'), (2, '{method}')]\n", ended.err
    assert ended == run(None, "parallel.py", method, cwd=tmp_path)


def test_a_forked_program_can_start_programs_that_inherit_from_it(template: Template) -> None:
    code = (
        "import os, subprocess, sys\n"
        "os.environ['NEW'] = '1'\n"
        "print(subprocess.run([sys.executable, '-c', 'import os; print(os.environ[\"NEW\"], os.getppid())'],"
        " capture_output=True, text=True).stdout == f'1 {os.getpid()}\\n')\n"
        "print(os.system('exit 3') >> 8)\n"
        "sys.stdout.flush()\n"
        "os.execv(sys.executable, [sys.executable, '-c', 'import os; print(os.environ[\"NEW\"])'])\n"
    )
    assert run(template, "-c", code) == run(None, "-c", code)


def test_a_forked_process_is_waited_for_signalled_and_reaped_as_that_of_subprocess(
    template: Template,
) -> None:
    process = template.popen(
        [sys.executable, "-c", "import signal; signal.pause()"], env=environment(), stdin=subprocess.DEVNULL
    )
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    assert os.getpgid(process.pid) == process.pid, "it leads its group as soon as it is known"
    process.terminate()
    assert process.wait(DEADLINE_S) == -signal.SIGTERM
    process.kill()  # of no process any more
    assert process.poll() == process.returncode == -signal.SIGTERM
    with pytest.raises(ChildProcessError):
        os.waitpid(process.pid, os.WNOHANG)


def test_an_exit_code_that_other_code_took_is_no_success(
    template: Template, caplog: pytest.LogCaptureFixture
) -> None:
    process = template.popen([sys.executable, "-c", ""], env=environment(), stdin=subprocess.DEVNULL)
    assert os.waitpid(process.pid, 0)[1] == 0
    assert process.wait(DEADLINE_S) == 255
    assert "other code took its exit code" in caplog.text


def test_a_kernel_without_pidfds_is_asked_again_and_again(
    template: Template, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int) -> int:
        raise OSError(errno.ENOSYS, "no such call")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    process = template.popen(
        [sys.executable, "-c", "import signal; signal.pause()"], env=environment(), stdin=subprocess.DEVNULL
    )
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.kill()
    assert process.wait(DEADLINE_S) == -signal.SIGKILL
