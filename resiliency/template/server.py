# SPDX-License-Identifier: Apache-2.0
"""The template process: imports what it is told or what a rank records, and forks programs on request.

It has one thread, which either imports or waits on one socket.  It says "busy" before it imports and
"ready" afterwards, so that nobody asks while it cannot answer.  When an import turns out to be unsafe, the
process replaces itself by a fresh interpreter that leaves out that module and all that imported it.
"""

from __future__ import annotations

import array
import ctypes
import gc
import json
import os
import select
import socket
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from resiliency.template.program import Program, PythonCommand, set_scene, show_in_proc
from resiliency.template.record import Entry, RecordReader, file_of
from resiliency.template.repairs import failing, not_numbers
from resiliency.template.safety import Beginning, ImportWatch, LeftOut, differences, is_read_by_libraries

#: A template that had to leave out more and more this often is not worth its while.
MOST_FRESH_STARTS = 8
_NICENESS = 10
#: A rank that has imported nothing for so long has begun to work.
_QUIET_S = 1.0
_LOOK_S = 0.2
_PROGRESS_S = 1.0
_HEADER = struct.Struct("!I")
#: What a program can be given; the kernel sends 253 at a time.
MOST_DESCRIPTORS = 250
#: A process's number, as it tells its owner.
PID = struct.Struct("!i")
#: Makes the kernel leave room where it shows the environment.
ROOM_ENV = "RESILIENCY_TEMPLATE_ROOM"
#: Given to a fresh interpreter that continues the work of this one.
CONTINUE_ENV = "RESILIENCY_TEMPLATE_CONTINUES"


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a template is for.

    Args:
        argv: command line of the program that is to be forked: its arguments and `sys.path[0]` are there
            during the imports.  None: any program will come.
        preload: modules to import at once.
        follow: record of a running rank, to be repeated as it grows.
        known: record of an earlier job, to be repeated at once.
        save: where to keep the record for later jobs.
        volatile: variables with another value in each rank or attempt.
        background: stay out of the way of others.
        importing: file for the name of the module that is imported at this moment.
        left_out: modules that must not be imported, and why.
    """

    argv: tuple[str, ...] | None = None
    preload: tuple[str, ...] = ()
    follow: str | None = None
    known: str | None = None
    save: str | None = None
    volatile: tuple[str, ...] = ()
    background: bool = False
    importing: str | None = None
    left_out: dict[str, str] = field(default_factory=dict)
    #: Filled by a template for the interpreter that replaces it.
    follow_from: int = 0
    fresh_starts: int = 0
    asked: int = 0


def send(channel: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """One message, with descriptors at its head."""
    data = json.dumps(message).encode(errors="surrogateescape")
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    channel.sendmsg([_HEADER.pack(len(data))], rights)
    channel.sendall(data)


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The next message.

    Raises:
        EOFError: the other side is gone.
    """
    fds = array.array("i")
    size = struct.calcsize("i")
    try:
        head, ancillary, _, _ = channel.recvmsg(
            _HEADER.size, socket.CMSG_SPACE((MOST_DESCRIPTORS + 1) * size), socket.MSG_CMSG_CLOEXEC
        )
        for _, kind, content in ancillary:
            if kind == socket.SCM_RIGHTS:
                fds.frombytes(content[: len(content) - len(content) % size])
        head += _exactly(channel, _HEADER.size - len(head))
        data = _exactly(channel, _HEADER.unpack(head)[0])
    except ConnectionError as error:
        raise EOFError from error
    return json.loads(data.decode(errors="surrogateescape")), list(fds)


def _exactly(channel: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = channel.recv(size - len(data))
        if not more:
            raise EOFError
        data += more
    return data


#: In a process that was forked from a template: what was known there of what it holds.
_forked_from: TemplateServer | None = None


class TemplateServer:
    """One template; `serve` returns in forked children, and ends the process in the template itself."""

    def __init__(
        self,
        channel: socket.socket,
        work: Work,
        *,
        room: str | None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._channel = channel
        self._work = work
        #: For the interpreter that replaces this one; None: what this one holds was there before.
        self._room = room
        self._beginning, self._cwd = Beginning(), os.getcwd()
        self._command = PythonCommand.parse(work.argv) if work.argv else None
        self._importing = _open_note(work.importing)  # before the watch looks at what is open
        self._watch = ImportWatch(work.volatile, work.left_out)
        self._files: dict[str, tuple[int, int]] = {}
        if room is None and _forked_from is not None:
            self._files = dict(_forked_from._files)
            self._environment: Mapping[str, str] = _forked_from._environment
            self._watch.take_over(_forked_from._watch)
        else:
            self._environment = environment or {}
            # What the start of the interpreter did, for instance sitecustomize.
            for name in {*self._environment, *os.environ}:
                if self._environment.get(name) != os.environ.get(name):
                    self._watch.set_by_imports[name] = os.environ.get(name)
                    self._watch.read[name] = self._environment.get(name), "sitecustomize"
        if self._command is not None and self._command.kind == "script":
            self._files[os.path.join(self._cwd, self._command.target)] = _stamp(self._command.target)
        self._reader = RecordReader(Path(work.follow), work.follow_from) if work.follow else None
        self._entries: list[Entry] = []
        #: Variable that the program sets and libraries read when they are loaded: no import follows it.
        self._ends_at = ""
        #: Files that are not what was imported.
        self._changed: list[str] = []
        self._seconds = 0.0
        self._said_at = 0.0
        self._watch.on_import = self._note_import
        self._raised_nice = 0
        self._repaired: set[str] = set()
        self._looked_at = set(sys.modules)
        #: Module that was asked for by name -> why it cannot be imported.
        self._failed: dict[str, str] = {}

    def serve(self) -> Program:
        """Import and fork until the owner is gone."""
        try:
            return self._serve()
        except BaseException:  # the border of this process, and of a child that is no program yet
            with suppress(OSError):
                send(self._channel, {"died": traceback.format_exc()})
            os._exit(1)

    def _serve(self) -> Program:
        if self._work.background:
            self._step_back()
        if self._room is not None:
            set_scene(self._command)
        self._import([Entry(name, None) for name in self._work.preload], always=True)
        self._import(self._known())
        if self._reader is not None and self._work.fresh_starts:
            self._import(self._reader.read())  # what the interpreter before this one held, but for some
        self._say_ready()
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        while True:
            if (
                self._reader is not None
                and self._may_follow()
                and (entries := self._reader.read() or self._reader.take_asked())
            ):
                self._import(entries)
                self._say_ready()
            asked = poll.poll(_LOOK_S * 1000 if self._reader else None)
            if asked and (program := self._answer()) is not None:
                return program

    # --- imports ---------------------------------------------------------------------------------

    def _known(self) -> list[Entry]:
        """What an earlier job imported, unless code has changed since."""
        if self._work.known is None:
            return []
        entries = RecordReader(Path(self._work.known)).read()
        files = [entry.file for entry in entries if entry.file]
        if self._command is not None and self._command.kind == "script":
            files.append(self._command.target)
        written, _ = _stamp(self._work.known)
        return entries if all(0 < _stamp(file)[0] <= written for file in files) else []

    def _import(self, entries: Iterable[Entry], *, always: bool = False) -> None:
        entries = list(entries)
        self._say_busy()
        began, began_ns = time.monotonic(), time.time_ns()
        thresholds = gc.get_threshold()
        gc.set_threshold(0)  # collections find nothing among what stays
        try:
            with self._watch.watching():
                for entry in entries:
                    self._import_one(entry, always=always)
        except LeftOut:
            pass  # the watch knows who asked
        finally:
            gc.collect()
            gc.freeze()  # nor does a child copy what it never changes
            if gc.get_threshold()[0] == 0:  # set by no import
                gc.set_threshold(*thresholds)
        _flush()
        self._watch.settle()
        for name, why in failing(sys.modules, self._repaired).items():
            self._watch.found.setdefault(name, why)
        self._seconds += time.monotonic() - began
        new = {name: module for name, module in list(sys.modules.items()) if name not in self._looked_at}
        new.pop("__mp_main__", None)  # the program
        self._looked_at |= new.keys()
        self._watch.draws.look_at({name: one for name, one in new.items() if isinstance(one, ModuleType)})
        for module in list(sys.modules.values()):
            if (file := file_of(module)) and file not in self._files:
                stamp = _stamp(file)
                # Which of both it imported is unknown if it was changed meanwhile.
                self._files[file] = stamp if stamp[0] < began_ns else (0, 0)
        if self._watch.found:
            self._leave_out()

    def _import_one(self, entry: Entry, *, always: bool) -> None:
        name, file = entry
        if not always:
            self._entries.append(entry)
            if file is None:
                self._watch.volatile.add(name)
                if is_read_by_libraries(name):
                    self._ends_at = self._ends_at or name
            if file is None or self._ends_at:
                return
        if name not in sys.modules:
            if self._is_left_out(name):
                return
            try:
                __import__(name)
            except LeftOut:
                raise
            except BaseException as error:  # SystemExit, too: the rank will see it, if it matters to it
                if always:
                    self._failed[name] = f"{type(error).__name__}: {error}"
            self._watch.check_end(name)
        here = file_of(sys.modules.get(name))
        if file and here and here != file:
            self._watch.found.setdefault(name, f"is {file} for the program, and {here} here")

    def _is_left_out(self, name: str) -> bool:
        parts = name.split(".")
        return any(".".join(parts[: end + 1]) in self._watch.left_out for end in range(len(parts)))

    def _leave_out(self) -> None:
        left_out = self._watch.to_leave_out()
        importers = {name for name, why in left_out.items() if why.startswith("imports ")}
        causes = {name: why for name, why in left_out.items() if name not in importers}
        send(self._channel, {"left_out": causes, "importers": len(importers)})
        if self._work.fresh_starts < MOST_FRESH_STARTS and left_out.keys() > self._work.left_out.keys():
            again = self._work.fresh_starts + 1
            self._start_afresh(replace(self._work, left_out=left_out, fresh_starts=again))

    def _start_afresh(self, work: Work) -> None:
        """Replace this interpreter by one that has imported nothing yet, if there was one before."""
        if self._room is None:
            return
        if self._raised_nice:
            os.nice(-self._raised_nice)
        memory = os.memfd_create("work")
        os.write(memory, json.dumps(asdict(work)).encode())
        self._beginning.restore(keep=(memory, self._channel.fileno()))
        env = {**self._environment, ROOM_ENV: self._room, CONTINUE_ENV: str(memory)}
        os.execve(sys.executable, sys.orig_argv, env)  # noqa: S606

    def _say_busy(self) -> None:
        self._said_at = time.monotonic()
        send(self._channel, {"state": "busy", "modules": len(sys.modules)})

    def _note_import(self, module: str) -> None:
        if self._importing is not None:
            with suppress(OSError):  # the disk is full
                os.pwrite(self._importing, f"{module}\n".encode(errors="surrogateescape"), 0)
        if time.monotonic() > self._said_at + _PROGRESS_S:
            self._say_busy()

    def _tell_checking(self) -> None:
        if time.monotonic() > self._said_at + _PROGRESS_S:
            self._said_at = time.monotonic()
            send(self._channel, {"state": "checking"})

    def _say_ready(self) -> None:
        if self._entries and self._work.save is not None:
            _save(Path(self._work.save), dict.fromkeys(self._entries))
        answer = {
            "state": "ready",
            "asked": self._work.asked,
            "modules": len(sys.modules),
            "seconds": self._seconds,
            "ends_at": self._ends_at,
            "failed": self._failed,
            "repeated": len(self._entries),
            "followed": self._reader.position if self._reader is not None else 0,
        }
        send(self._channel, {**answer, "unsafe": self._watch.unsafe()})

    def _step_back(self) -> None:
        """Use time that others leave, where that can be taken back in the ranks."""
        if _may_raise_priority():
            with suppress(OSError):
                os.nice(_NICENESS)
                self._raised_nice = _NICENESS

    def _may_follow(self) -> bool:
        """In the background not while the rank still imports: both would take twice as long."""
        if not self._work.background or self._work.follow is None:
            return True
        return time.time_ns() - _stamp(self._work.follow)[0] > _QUIET_S * 1e9

    # --- forks -----------------------------------------------------------------------------------

    def _answer(self) -> Program | None:
        """The program, in the child; None in the template."""
        try:
            request, fds = receive(self._channel)
        except EOFError:
            os._exit(0)
        if "preload" in request:
            self._work = replace(
                self._work, preload=(*self._work.preload, *request["preload"]), asked=self._work.asked + 1
            )
            self._import([Entry(name, None) for name in request["preload"]], always=True)
            self._say_ready()
            return None
        refusal = self._refusal(request)
        if len(fds) != len(request["descriptors"]) + 1:
            refusal = "descriptors were lost on the way"
        work = self._work
        if self._changed:
            # What was seen so far may not be imported any more.
            work = replace(work, known=None, follow_from=_stamp(work.follow)[1] if work.follow else 0)
        if refusal:
            send(self._channel, {"number": request["number"], "refused": refusal})
        else:
            program = self._fork(request, fds)
            if program is not None:
                return program
        for fd in fds:
            os.close(fd)
        if self._changed and self._room is not None:
            self._say_busy()
            self._start_afresh(work)  # imports what is there now
        return None

    def _refusal(self, request: dict[str, Any]) -> str:
        self._changed = []
        if why := self._watch.unsafe():
            return why
        if self._command is not None:
            asked = PythonCommand.parse(request["argv"], request["cwd"])
            if asked is None or (asked.target, asked.args) != (self._command.target, self._command.args):
                return "its arguments are not those that the template was started for"
            if request["cwd"] != self._cwd:
                return f"its working directory is not {self._cwd}"
        env = request["env"]
        # A program that was forked from here passes on what imports set: to it, that is nothing new.
        passed_on = self._watch.set_by_imports.items() & env.items()
        env = {**env, **{name: self._environment.get(name) for name, _ in passed_on}}
        if names := differences(self._environment, env):
            return f"{', '.join(names)} is different from when the template was started"
        if names := not_numbers(env):
            return f"{', '.join(names)} is no whole number"
        if why := self._watch.contradiction(env):
            return why
        if request["check_files"]:
            # Thousands of files, and on a slow file system of the network each takes milliseconds.
            for file, stamp in self._files.items():
                self._tell_checking()
                if _stamp(file) != stamp:
                    self._changed.append(file)
            if self._changed:
                return f"{self._changed[0]} has changed since it was imported"
        return ""

    def _fork(self, request: dict[str, Any], fds: list[int]) -> Program | None:
        link, *others = fds
        reading, writing = os.pipe()
        # Two forks: the process in between ends, and the program becomes a child of who asked for it.
        between = _try_fork()
        if between != 0:
            os.close(writing)
            with os.fdopen(reading, "rb") as pipe:
                pid = pipe.read()
            if between is not None:
                with suppress(ChildProcessError):  # an import had children reaped by the system
                    os.waitpid(between, 0)
            answer = {"pid": int(pid)} if pid else {"refused": "no process can be started"}
            send(self._channel, {"number": request["number"], **answer})
            return None
        self._channel.close()
        if self._importing is not None:
            os.close(self._importing)
        _tell_pid(link)
        if _try_fork() != 0:
            os._exit(0)
        if request["new_session"]:
            os.setsid()
        _tell_pid(link)
        os.write(writing, str(os.getpid()).encode())
        os.close(reading)
        os.close(writing)
        global _forked_from
        _forked_from = self
        if self._raised_nice:
            os.nice(-self._raised_nice)
        # The owner knows of this process now, or never will.
        with suppress(ConnectionError):
            if os.read(link, 1) == b"g":
                os.close(link)
                return self._program(request, others)
        os._exit(0)

    def _program(self, request: dict[str, Any], others: Sequence[int]) -> Program:
        return Program(
            argv=tuple(request["argv"]),
            env=request["env"],
            cwd=request["cwd"],
            descriptors=dict(zip(others, request["descriptors"], strict=True)),
            record=request["record"],
            set_by_imports=self._watch.set_by_imports,
            renew=self._watch.draws.renew,
        )


def _open_note(path: str | None) -> int | None:
    if path is None:
        return None
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    except OSError:  # nobody will know where it hangs
        return None


def _stamp(file: str) -> tuple[int, int]:
    try:
        status = os.stat(file)
    except OSError:
        return (0, 0)
    return (status.st_mtime_ns, status.st_size)


def _save(path: Path, entries: Iterable[Entry]) -> None:
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Pods that share a home have the same process ids.
        fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with open(fd, "w", errors="surrogateescape") as file:
                file.writelines(map(str, entries))
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise


def _may_raise_priority() -> bool:
    """Found out in a child: neither capabilities nor limits tell it in a container."""
    child = _try_fork()
    if child == 0:
        with suppress(OSError):
            os.nice(_NICENESS)
            os.nice(-_NICENESS)
            os._exit(0)
        os._exit(1)
    return child is not None and os.waitpid(child, 0)[1] == 0


def _try_fork() -> int | None:
    try:
        return os.fork()
    except OSError:  # too many processes, too little memory
        return None


def _tell_pid(link: int) -> None:
    with suppress(OSError):  # the owner is gone
        os.write(link, PID.pack(os.getpid()))


def _flush() -> None:
    """What imports wrote is not written once more by each child."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # an import may have put anything there
            stream.flush()
    ctypes.CDLL(None).fflush(None)


def _first_environment() -> dict[str, str]:
    """That of the command which started this process."""
    with open("/proc/self/environ", "rb") as file:
        pairs = [os.fsdecode(pair).partition("=") for pair in file.read().split(b"\0") if pair]
    return {name: value for name, _, value in reversed(pairs) if name not in (ROOM_ENV, CONTINUE_ENV)}


def main() -> Program:
    """Entry of a template that was started; returns in forked children."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(channel.fileno(), False)
    continued, room = os.environ.pop(CONTINUE_ENV, None), os.environ.pop(ROOM_ENV, "")
    environment = _first_environment()
    show_in_proc(sys.orig_argv[:-1], os.environ)  # without the room for others
    if continued is None:
        fields, _ = receive(channel)
    else:
        with os.fdopen(int(continued), "rb") as memory:
            memory.seek(0)
            fields = json.loads(memory.read())
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    return TemplateServer(channel, Work(**fields), room=room, environment=environment).serve()
