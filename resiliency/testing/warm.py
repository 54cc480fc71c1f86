# SPDX-License-Identifier: Apache-2.0
"""One interpreter per test run that has imported what programs under test import; they are forked from it.

    with warm.interpreter("torch.distributed"):
        process = warm.start([sys.executable, "-m", "my.program"], env=env)     # as subprocess.Popen
        output = warm.run([sys.executable, "train.py", "--steps", "3"], timeout=60).stdout
        process, connection = warm.start_function(serve, "h0")      # calls serve(CONNECTION, "h0")

Without `interpreter`, and for a program that cannot be forked, processes are started the ordinary way: a
test never has to know.  What a test must see from a cold start it starts with `subprocess`.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import spawn
from multiprocessing.connection import Connection

from resiliency.template.client import ForkedProcess, ForkRefused, Template, TemplateLost
from resiliency.template.server import Work

logger = logging.getLogger(__name__)

#: Longest wait for the imports, on a machine that does much else.
IMPORT_TIMEOUT = timedelta(minutes=5)
#: Longest wait for a fork: on a machine that does much else, an ordinary start would take no less.
FORK_TIMEOUT = timedelta(minutes=1)

Process = subprocess.Popen[bytes] | ForkedProcess

_current: Template | None = None
#: What it was told to import.
_modules: tuple[str, ...] = ()


@contextmanager
def interpreter(*modules: str) -> Iterator[None]:
    """Within, processes are forked from an interpreter that has imported `modules`; one serves all."""
    global _current, _modules
    if _current is not None:
        preload(*modules)
        yield
        return
    _current, _modules = Template(Work(preload=modules)), modules
    try:
        yield
    finally:
        last, _current = _current, None
        last.close()


def preload(*modules: str) -> None:
    """Let the interpreter import more, once; without one, nothing happens."""
    global _modules
    if _current is not None:
        _modules += modules
        with suppress(TemplateLost):  # the next start tells
            _current.preload(modules)


def _replace(lost: Template) -> None:
    """Start another interpreter: all tests that follow would import for themselves, and be slow unseen."""
    global _current
    if _current is lost:
        _current = Template(Work(preload=_modules))


def pids() -> list[int]:
    """The interpreter's process, for those that count or measure processes."""
    return [] if _current is None else [_current.pid]


def descriptors() -> list[int]:
    """What leads to it."""
    return [] if _current is None else [_current._channel.fileno()]


def start(
    argv: Sequence[str | os.PathLike[str]],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    stdin: int | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    pass_fds: Sequence[int] = (),
    cold: bool = False,
    new_session: bool = True,
    import_timeout: timedelta = IMPORT_TIMEOUT,
) -> Process:
    """Start a program in a session of its own, as `subprocess.Popen` does.

    Args:
        stdin, stdout, stderr: descriptors, or `subprocess.DEVNULL`, or None for this process's own; no pipes.
        pass_fds: descriptors that the program knows by the same numbers.
        cold: start it the ordinary way in any case.
        new_session: False for programs that make process groups with each other: all are in the session of
            the interpreter, or, if none can be forked, of this process.
        import_timeout: how long the interpreter may still import before the program is not forked from it.
    """
    words = [os.fspath(word) for word in argv]
    if (template := _current) is not None and words[0] == sys.executable and not cold:
        try:
            template.wait_until_ready(import_timeout)
            return template.popen(
                words,
                env=env,
                cwd=cwd,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=pass_fds,
                start_new_session=new_session,
                check_files=False,
                timeout=FORK_TIMEOUT,
            )
        except (ForkRefused, TemplateLost) as error:
            # Its words alone: a log that keeps the error keeps all that its callers hold.
            logger.info("%s is started the ordinary way: %s", words[1:3], str(error))
            if isinstance(error, TemplateLost):
                _replace(template)
    return subprocess.Popen(
        words, env=env, cwd=cwd, stdin=stdin, stdout=stdout, stderr=stderr, pass_fds=pass_fds,
        start_new_session=new_session,
    )  # fmt: skip


def start_function(
    fn: Callable[..., object],
    *args: object,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    new_session: bool = True,
    import_timeout: timedelta = IMPORT_TIMEOUT,
) -> tuple[Process, Connection]:
    """Start a process that calls ``fn(connection, *args)``; its connection leads to the one returned here.

    As `multiprocessing.Process` does with a fork server: function and arguments are pickled, and the process
    finds modules where this one does.
    """
    call = pickle.dumps((fn, args))
    scene = spawn.get_preparation_data(fn.__qualname__)
    del scene["authkey"]  # is not for pipes
    ours, theirs = multiprocessing.Pipe()
    with theirs:
        process = start(
            [sys.executable, "-m", "resiliency.testing.pool.function", str(theirs.fileno()), fn.__qualname__],
            env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
            pass_fds=(theirs.fileno(),), new_session=new_session, import_timeout=import_timeout,
        )  # fmt: skip
    try:
        with suppress(BrokenPipeError):  # it ended at once; the next read tells
            ours.send(scene)
            ours.send_bytes(call)
    except BaseException:  # Ctrl-C, for one
        ours.close()
        process.kill()
        process.wait()
        raise
    return process, ours


def run(
    argv: Sequence[str | os.PathLike[str]],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` with ``capture_output=True, text=True`` and no input.

    Raises:
        subprocess.TimeoutExpired: it was killed after `timeout` seconds.
        subprocess.CalledProcessError: with `check`, its exit code was not 0.
    """

    def begin(out: int, err: int) -> Process:
        return start(argv, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=out, stderr=err)

    code, *outputs = run_to_end(begin, timeout)
    texts = [output.decode(errors="replace") for output in outputs]
    done = subprocess.CompletedProcess([os.fspath(word) for word in argv], code, *texts)
    if check:
        done.check_returncode()
    return done


def run_to_end(begin: Callable[[int, int], Process], timeout: float) -> tuple[int, bytes, bytes]:
    """Exit code and output of the process that `begin` starts with these descriptors for it.

    Raises:
        subprocess.TimeoutExpired: it was killed after `timeout` seconds.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = begin(out.fileno(), err.fileno())
        try:
            code = process.wait(timeout)
        except BaseException:
            process.kill()
            process.wait()
            raise
        out.seek(0)
        err.seek(0)
        return code, out.read(), err.read()
