# SPDX-License-Identifier: Apache-2.0
"""The owner's side: start a template, ask it for processes, and hold them like those of `subprocess`.

A forked program is a child of the process that asked, not of the template: the template may end, be killed
or hang, and nothing that was forked from it notices.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

from resiliency.errors import ResiliencyError
from resiliency.runtime import awake_s
from resiliency.template import program, server
from resiliency.template.program import Become, PythonCommand
from resiliency.template.safety import close_files, passed_on
from resiliency.template.server import MOST_DESCRIPTORS, PID, ROOM_ENV, Work

logger = logging.getLogger(__name__)

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
#: Longest time that a template which said it was ready may take to fork, while it says nothing else.
FORK_TIMEOUT = timedelta(seconds=5)
#: Longest time that it may look at files, of which there are thousands.
CHECK_TIMEOUT = timedelta(seconds=30)
#: Longest time that a template may take to end after SIGKILL: the kernel lets it finish its I/O.
KILL_TIMEOUT = timedelta(seconds=5)
#: Exit code of a process that ended, and whose exit code cannot be known.
UNKNOWN_EXIT = 255
#: Room for the command line and the environment of what is forked, in the memory where /proc shows them.
_ROOM_BYTES = 32 << 10

_adoption = threading.Lock()
_templates: weakref.WeakSet[Template] = weakref.WeakSet()


class ForkRefused(ResiliencyError):
    """A template cannot fork this program, and says why; it can be started the ordinary way."""


class StillImporting(ForkRefused):
    """It can be waited for."""


class TemplateLost(ResiliencyError):
    """A template ended, or does not answer; it was killed, and nothing that was asked of it last will run."""


class ForkedProcess:
    """A child of this process that was forked from a template, with the used part of `subprocess.Popen`."""

    def __init__(self, pid: int, args: Sequence[str]) -> None:
        self.pid = pid
        self.args = list(args)
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """The exit code, or minus the signal that killed it; None while it runs."""
        with self._lock:
            return self._poll()

    def _poll(self) -> int | None:
        if self.returncode is None:
            try:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                logger.warning("process %d counts as failed: other code took its exit code", self.pid)
                self.returncode = UNKNOWN_EXIT
            else:
                if ended:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        if self.poll() is None:
            self._wait_for_end(timeout)
        code = self.poll()
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return code

    def _wait_for_end(self, timeout: float | None) -> None:
        deadline = None if timeout is None else awake_s() + timeout
        try:
            with _pidfd(self.pid) as ended:
                ended.poll(None if timeout is None else max(timeout, 0) * 1000)
        except ProcessLookupError:  # another thread has seen it end meanwhile
            return
        except OSError:  # the kernel has no pidfd: look every 20 ms
            while self.poll() is None and (deadline is None or awake_s() < deadline):
                time.sleep(0.02)

    def send_signal(self, number: int) -> None:
        with self._lock:
            if self._poll() is None:
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@contextmanager
def _pidfd(pid: int) -> Iterator[select.poll]:
    fd = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        yield poll
    finally:
        os.close(fd)


class Template:
    """Owner of one template process; a context manager.

    Args:
        work: what to import.
        interpreter: program and flags; those of what is to be forked.
        env: environment of the template; that of what is to be forked, as far as it is known.
    Raises:
        OSError: no process can be started.
    """

    def __init__(
        self, work: Work, *, interpreter: Sequence[str] = (), env: Mapping[str, str] | None = None
    ) -> None:
        interpreter = interpreter or (sys.executable,)
        self._interpreters = {interpreter[0]}
        ours, theirs = socket.socketpair()
        with theirs, ExitStack() as unless_started:
            unless_started.callback(ours.close)
            room = "-" * _ROOM_BYTES
            self._process: subprocess.Popen[bytes] | ForkedProcess = subprocess.Popen(
                [*interpreter, str(Path(__file__).parent), str(theirs.fileno()), room],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={**(os.environ if env is None else env), ROOM_ENV: room},
            )
            unless_started.pop_all()
        self._set_up(ours, work)

    @classmethod
    def of_this_process(cls, work: Work) -> Template | None:
        """A template that holds what this process holds, if it was itself forked from one; else None.

        To be called before this process has threads or anything open, and with nothing on its stack that
        must be left in order: the stack below is unwound in what will be forked.
        """
        if not program.forked:
            return None
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            try:
                ours.close()
                os.setsid()
                close_files(keep=(theirs.fileno(),))
                forked = server.TemplateServer(theirs, work, room=None).serve()
            except BaseException:
                os._exit(1)
            raise Become(forked)
        theirs.close()
        template = cls.__new__(cls)
        template._interpreters = {sys.orig_argv[0], sys.executable}
        template._process = ForkedProcess(pid, sys.orig_argv)
        template._set_up(ours, None)
        return template

    def _set_up(self, channel: socket.socket, work: Work | None) -> None:
        self._channel = channel
        self._channel.settimeout(FORK_TIMEOUT.total_seconds())
        self._lock = threading.Lock()
        self._closed = False
        #: How often it was told to import more, and asked to fork.
        self._asked = self._forks = 0
        #: Whether it has done the imports that it knows of.
        self.ready = False
        #: How many modules it holds, and how long it took to import them.
        self.modules, self.seconds = 0, 0.0
        #: Modules that it does not hold because they cannot be forked, and why; and how many import them.
        self.left_out: dict[str, str] = {}
        self.left_out_importers = 0
        #: What is wrong with it, if nothing can be forked from it at all.
        self.unsafe = ""
        #: Variable that the program sets and libraries read when they are loaded: no import after it is held.
        self.ends_at = ""
        #: Modules that it was told to import and cannot, and why.
        self.failed: dict[str, str] = {}
        #: How many lines of records it has repeated; and, of the one that it follows, how many bytes.
        self.repeated = self.followed = 0
        self._passed_on = passed_on()
        _register_at_fork()
        _templates.add(self)
        if work is not None:
            with suppress(OSError):  # ended at once; the next call tells
                server.send(self._channel, asdict(work))

    @property
    def pid(self) -> int:
        return self._process.pid

    def look(self) -> None:
        """Take in what it said; does not block.

        Raises:
            TemplateLost: it is gone.
        """
        with self._lock:
            while self._readable(0.0):
                self._take_in(self._receive())

    def wait_until_ready(self, timeout: timedelta, wake_fd: int | None = None) -> bool:
        """Wait for the imports; False when time is up, or `wake_fd` became readable.

        Raises:
            TemplateLost: it is gone.
        """
        deadline = awake_s() + timeout.total_seconds()
        with self._lock:
            while not self.ready:
                if not self._readable(max(deadline - awake_s(), 0.0), wake_fd):
                    return False
                self._take_in(self._receive())
        return True

    def preload(self, modules: Sequence[str]) -> None:
        """Let it import more; it is not ready until it has.

        Raises:
            TemplateLost: it is gone.
        """
        with self._lock:
            self.ready = False
            self._asked += 1
            self._send({"preload": list(modules)})

    def fork(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str | None = None,
        descriptors: Mapping[int, int],
        record: str | None = None,
        check_files: bool = True,
        new_session: bool = True,
        timeout: timedelta = FORK_TIMEOUT,
    ) -> ForkedProcess:
        """A new child of this process that runs ``argv``, in a session of its own.

        Args:
            argv: ``python [-u] SCRIPT|-m MODULE|-c CODE ...``
            env: its whole environment.
            descriptors: its number of each descriptor -> the number here; 0, 1 and 2 have to be there.
            record: file that is told what it imports.
            check_files: refuse if code has changed since it was imported.
            new_session: False: it stays in the template's session and process group.
            timeout: how long a template may take to answer, or to say that it still looks at files.
        Raises:
            ForkRefused: start it the ordinary way; the message says why.
            TemplateLost: the template is gone; so is anything that this call may have started.
        """
        cwd = self._check(argv, cwd, descriptors)
        request = {
            "argv": [os.fspath(word) for word in argv],
            "env": dict(env),
            "cwd": cwd,
            "descriptors": list(descriptors),
            "record": record,
            "check_files": check_files,
            "new_session": new_session,
        }
        link, theirs = socket.socketpair()
        with link, theirs:
            try:
                with self._lock, _adopting():
                    while self._readable(0.0):
                        self._take_in(self._receive())
                    if not self.ready:
                        raise StillImporting("the template still imports.")
                    self._forks += 1
                    self._channel.settimeout(timeout.total_seconds())
                    self._send({**request, "number": self._forks}, [theirs.fileno(), *descriptors.values()])
                    reply = self._reply(timeout)
                if "refused" in reply:
                    raise ForkRefused(f"{reply['refused']}.")
                if not _is_child(reply["pid"]):
                    raise ForkRefused("the system does not let this process adopt others.")
                link.send(b"g")
                return ForkedProcess(reply["pid"], argv)
            except BaseException:  # also of a signal handler
                theirs.close()
                _end_forked(link)
                raise

    def _check(self, argv: Sequence[str], cwd: str | None, descriptors: Mapping[int, int]) -> str:
        """Refuse what this side knows to be impossible; returns the working directory."""
        try:
            where = os.getcwd() if cwd is None else os.path.abspath(cwd)
            os.stat(where)
            for fd in descriptors.values():
                os.fstat(fd)
        except (OSError, OverflowError) as error:
            raise ForkRefused(f"directory or descriptors cannot be passed on: {error}.") from error
        if argv[0] not in self._interpreters or PythonCommand.parse(argv, where) is None:
            raise ForkRefused(f"{' '.join(argv[:3])} is no program for a running interpreter.")
        if not {0, 1, 2} <= set(descriptors) or len(descriptors) > MOST_DESCRIPTORS:
            raise ForkRefused(f"descriptors {sorted(descriptors)} are too many, or not the first three.")
        if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
            raise ForkRefused("SIGCHLD is ignored, so that no exit code can be known.")
        now = passed_on()
        if names := [name for name in now if now[name] != self._passed_on[name]]:
            raise ForkRefused(f"{', '.join(names)} of this process changed since the template was started.")
        return where

    def popen(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        pass_fds: Collection[int] = (),
        start_new_session: bool = True,
        record: str | None = None,
        check_files: bool = True,
        timeout: timedelta = FORK_TIMEOUT,
    ) -> ForkedProcess:
        """`fork` with the arguments of `subprocess.Popen`; streams are descriptors, DEVNULL or None.

        Raises:
            ForkRefused, TemplateLost: as `fork`.
        """
        with open(os.devnull, "r+b") as null:
            descriptors = {fd: fd for fd in pass_fds}
            for number, stream in enumerate((stdin, stdout, stderr)):
                own = null.fileno() if stream == subprocess.DEVNULL else stream
                descriptors[number] = number if own is None else own
            return self.fork(
                argv,
                env=os.environ if env is None else env,
                cwd=None if cwd is None else os.fspath(cwd),
                descriptors=descriptors,
                new_session=start_new_session,
                record=record,
                check_files=check_files,
                timeout=timeout,
            )

    def close(self) -> None:
        """End the template; what was forked from it lives on; idempotent."""
        if not self._closed:
            self._closed = True
            _templates.discard(self)
            self._channel.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
            self._process.kill()
            try:
                self._process.wait(KILL_TIMEOUT.total_seconds())
            except subprocess.TimeoutExpired:
                logger.warning(
                    "template process %d left behind: it does not end after SIGKILL, and probably waits for a"
                    " file system; it ends as soon as that answers",
                    self.pid,
                )

    def __enter__(self) -> Template:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _reply(self, timeout: timedelta) -> dict[str, Any]:
        began = awake_s()
        deadline, last = began + timeout.total_seconds(), began + max(timeout, CHECK_TIMEOUT).total_seconds()
        while True:
            if not self._readable(max(min(deadline, last) - awake_s(), 0.0)):
                if awake_s() < min(deadline, last):
                    continue
                raise self.lose(f"did not answer within {awake_s() - began:.0f} s")
            message = self._receive()
            if message.get("number") == self._forks:
                return message
            if message.get("state") == "checking":
                deadline = awake_s() + timeout.total_seconds()
            self._take_in(message)
            if (
                message.get("state") == "busy"
            ):  # it had begun when it was asked; what it forks later ends at once
                raise StillImporting("the template still imports.")

    def _readable(self, timeout_s: float, wake_fd: int | None = None) -> bool:
        if self._closed:
            raise TemplateLost("the template was closed.")
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        if wake_fd is not None:
            poll.register(wake_fd, select.POLLIN)
        return any(fd == self._channel.fileno() for fd, _ in poll.poll(timeout_s * 1000))

    def _send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        try:
            server.send(self._channel, message, fds)
        except OSError as error:
            raise self.lose("is gone") from error
        except BaseException:  # a signal handler raised; how much was sent is unknown
            self.lose("received a truncated message")
            raise

    def _receive(self) -> dict[str, Any]:
        try:
            message, _ = server.receive(self._channel)
        except (EOFError, OSError) as error:
            raise self.lose("ended" if isinstance(error, EOFError) else "stopped within an answer") from error
        except BaseException:  # a signal handler raised; how much was read is unknown
            self.lose("sent a message that was not read to its end")
            raise
        if "died" in message:
            logger.debug("%s", message["died"])
            raise self.lose(f"failed ({message['died'].splitlines()[-1]})")
        return message

    def lose(self, how: str) -> TemplateLost:
        """Kill a template that is of no use any more; returns the error to raise."""
        self._process.kill()
        self.close()
        return TemplateLost(f"the template process {self.pid} {how}.")

    def _take_in(self, message: dict[str, Any]) -> None:
        if "number" in message:
            # Of a call that a signal handler ended.  The process was not released, and ends.
            if "pid" in message:
                with suppress(ChildProcessError):
                    os.waitpid(message["pid"], 0)
        elif "left_out" in message:
            self.left_out, self.left_out_importers = message["left_out"], message["importers"]
        elif message["state"] == "checking":
            pass
        elif message["state"] == "busy":
            self.ready, self.modules = False, message["modules"]
        else:
            self.ready, self.unsafe = message["asked"] == self._asked, message["unsafe"]
            self.modules, self.seconds = message["modules"], message["seconds"]
            self.ends_at, self.failed = message["ends_at"], message["failed"]
            self.repeated, self.followed = message["repeated"], message["followed"]


@cache
def _register_at_fork() -> None:
    """Once: a fork of this process owns no template, and must not keep one waiting for the channel's end."""

    def forget() -> None:
        global _adoption
        _adoption = threading.Lock()  # another thread may have held it
        for template in list(_templates):
            template._channel.close()
            template._closed, template._lock = True, threading.Lock()

    os.register_at_fork(after_in_child=forget)


def _is_child(pid: int) -> bool:
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _end_forked(link: socket.socket) -> None:
    """End and reap what a template forked in a call that failed; it tells its own numbers."""
    link.shutdown(socket.SHUT_WR)
    link.settimeout(1.0)
    pids = b""
    try:
        while more := link.recv(64):
            pids += more
    except OSError:
        return
    for number, (pid,) in enumerate(PID.iter_unpack(pids[: len(pids) - len(pids) % PID.size])):
        if _is_child(pid):
            if number == 1:  # not the one in between: it may have been released
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


@contextmanager
def _adopting() -> Iterator[None]:
    """Within, a process whose parent ends becomes a child of this one, if it descends from it."""
    libc = ctypes.CDLL(None, use_errno=True)
    with _adoption:
        before = ctypes.c_int()
        libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
        try:
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            yield
        finally:
            libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)
