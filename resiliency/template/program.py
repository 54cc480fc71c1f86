# SPDX-License-Identifier: Apache-2.0
"""A Python command line as a value, and how a running interpreter becomes the program that it names.

What a fresh ``python script.py`` sets up before the first line of the script is set up here in the same
way, so that the program cannot tell: ``__main__``, ``sys.argv``, ``sys.path[0]``, the environment (also for
C code and in ``/proc``), working directory, streams, random state, and how an exception ends it.
"""

from __future__ import annotations

import ctypes
import fcntl
import io
import linecache
import mmap
import os
import pkgutil
import runpy
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import BuiltinImporter, ModuleSpec, SourceFileLoader
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from resiliency.proc_stat import read_stat
from resiliency.template.record import Recorder
from resiliency.template.repairs import repair_all

_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
#: Flags of the interpreter that can be given to one which runs already.
_FLAG, _FLAG_WITH_VALUE = "-u", "-W"
#: Whether the directory of the program is no place for modules (``-P``, Python 3.11).
_SAFE_PATH = bool(getattr(sys.flags, "safe_path", False))

#: Whether this process was forked from a template instead of started.
forked = False
#: ``__main__`` of the program; made before the imports, because some modules keep it (dill).
_main = ModuleType("__main__")
#: The program's entry in `sys.path`, found by identity: imports may put others before it.
_directory = "" if _SAFE_PATH or not sys.path else sys.path[0]
#: As the interpreter made them.
_first_filters = list(warnings.filters)
#: What ``/proc`` shows, and where the kernel put that at first.
_shown: mmap.mmap | None = None
_places: list[int] = []


@dataclass(frozen=True, kw_only=True)
class PythonCommand:
    """``INTERPRETER [-u] [-W FILTER] SCRIPT | -m MODULE | -c CODE [ARGS]``, taken apart."""

    interpreter: str
    unbuffered: bool = False
    warn_options: tuple[str, ...] = ()
    #: "script", "module" or "code".
    kind: str
    target: str
    args: tuple[str, ...] = ()

    @classmethod
    def parse(cls, argv: Sequence[str], cwd: str = "") -> PythonCommand | None:
        """None for what a running interpreter cannot take over, for instance ``python -O x.py``."""
        words = list(argv[1:])
        unbuffered, warn_options = False, []
        while words:
            word = words.pop(0)
            if word == _FLAG:
                unbuffered = True
            elif word.startswith(_FLAG_WITH_VALUE) and (len(word) > 2 or words):
                warn_options.append(word[2:] or words.pop(0))
            elif word in ("-m", "-c") and words:
                kind, target = ("module" if word == "-m" else "code"), words.pop(0)
                break
            elif not word.startswith("-") and _is_source(os.path.join(cwd, word)):
                kind, target = "script", word
                break
            else:
                return None
        else:
            return None
        return cls(
            interpreter=argv[0],
            unbuffered=unbuffered,
            warn_options=tuple(warn_options),
            kind=kind,
            target=target,
            args=tuple(words),
        )

    @property
    def name(self) -> str:
        """What a person would call it."""
        return {"script": self.target, "module": f"-m {self.target}", "code": "-c"}[self.kind]


@dataclass(frozen=True, kw_only=True)
class Program:
    """What a forked child becomes."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    #: Descriptors that were received -> the numbers that the program knows them by, 0, 1 and 2 among them.
    descriptors: Mapping[int, int]
    #: File that is told which modules the program imports.
    record: str | None = None
    #: Variables that imports set, over those of the program's environment.
    set_by_imports: Mapping[str, str | None] = field(default_factory=dict)
    #: Makes again what modules drew while they were imported.
    renew: Callable[[], None] = lambda: None


class Become(BaseException):  # no error: it unwinds a stack to its bottom
    """Raised in a child of a process that was forked itself: the stack below is not the child's."""

    def __init__(self, program: Program) -> None:
        self.program = program


def run(program: Program) -> NoReturn:
    """Become `program` and run it to its end; call this with nothing on the stack that must be left."""
    global forked
    forked = True
    while True:
        command = PythonCommand.parse(program.argv, program.cwd)
        assert command is not None, "the client parsed it"
        _become(program, command)
        try:
            run_main(command)
        except Become as other:
            program = other.program
            continue
        sys.exit(0)


def set_scene(command: PythonCommand | None) -> None:
    """`__main__`, `sys.argv` and `sys.path` as they are when a program begins; None: of no program."""
    global _directory
    _main.__dict__.clear()
    _main.__init__("__main__")  # type: ignore[misc]
    _main.__dict__.update(
        __builtins__=sys.modules["builtins"], __annotations__={}, __loader__=BuiltinImporter
    )
    sys.modules["__main__"] = _main
    sys.argv[:] = [""]
    if command is None:
        return
    if command.kind == "script":
        path = os.path.join(os.getcwd(), command.target)
        _main.__dict__.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    sys.argv[:] = [{"script": command.target, "module": "-m", "code": "-c"}[command.kind], *command.args]
    if _SAFE_PATH:
        return
    directory = {"script": os.path.dirname(os.path.realpath(command.target)), "module": os.getcwd()}.get(
        command.kind, ""
    )
    for position, entry in enumerate(sys.path):
        if entry is _directory:
            sys.path[position] = _directory = directory
            return


def run_main(command: PythonCommand) -> None:
    """Run the program as ``__main__`` of this interpreter, which reports exceptions as the program's own."""
    set_scene(command)
    try:
        if command.kind == "module":
            _hide_from_runpy(command.target)
            _hide_from_runpy(f"{command.target}.__main__")
            runpy._run_module_as_main(command.target, alter_argv=True)  # type: ignore[attr-defined]
            return
        if command.kind == "code":
            source: str | bytes = command.target
            if sys.version_info >= (3, 13):  # shows its lines
                linecache.cache["<string>"] = (0, None, [f"{line}\n" for line in source.splitlines()], "")
        else:
            with io.open_code(_main.__dict__["__file__"]) as file:
                source = file.read()
        name = "<string>" if command.kind == "code" else _main.__dict__["__file__"]
        # The future statements of this file are not the program's.
        code = compile(source, name, "exec", dont_inherit=True)
        exec(code, _main.__dict__)  # noqa: S102  # the user's own program
    except (Become, SystemExit):
        raise
    except BaseException:
        _leave_out_own_frames()
        raise


def _is_source(path: str) -> bool:
    """Whether a file is a script in source form, and no archive, directory or compiled file."""
    if not os.path.isfile(path) or path.endswith(".pyc") or pkgutil.get_importer(path) is not None:
        return False
    try:
        with open(path, "rb") as file:
            return file.read(2) != MAGIC_NUMBER[:2]
    except OSError:
        return False


def _hide_from_runpy(name: str) -> None:
    """Let runpy not find `name` imported, of which it would warn, and others find it."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    if spec is None or spec.name != name or spec.submodule_search_locations is not None:
        return
    module = sys.modules.pop(name)

    class PutBack:
        def find_spec(self, asked: str, path: object = None, target: object = None) -> ModuleSpec | None:
            if asked == name:
                sys.meta_path.remove(self)
                sys.modules[name] = module
            return None

    sys.meta_path.insert(0, PutBack())


def _leave_out_own_frames() -> None:
    """Let the interpreter report the exception that ends it without the frames that run the program."""
    report = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.excepthook = report
        while trace is not None and trace.tb_frame.f_code is not run_main.__code__:
            trace = trace.tb_next
        trace = None if trace is None else trace.tb_next
        sys.last_traceback = trace
        report(kind, error.with_traceback(trace), trace)

    sys.excepthook = excepthook


def _become(program: Program, command: PythonCommand) -> None:
    _place(program.descriptors)
    _set_environment(program.env)
    show_in_proc(program.argv, program.env)
    for name, value in program.set_by_imports.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    os.chdir(program.cwd)
    _set_streams(unbuffered=command.unbuffered or bool(os.environ.get("PYTHONUNBUFFERED")))
    sys.orig_argv[:] = program.argv
    _add_warn_options(command.warn_options)
    for finder in list(sys.path_importer_cache.values()):  # what is in a directory by now is found
        if finder is not None and hasattr(finder, "invalidate_caches"):
            finder.invalidate_caches()
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]  # Python 3.12 and before
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:  # the standard library's own is seeded again at every fork
        numpy_random.seed()
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()
    for name in ("multiprocessing.process", "multiprocess.process"):  # the second one is that of dill
        processes: Any = sys.modules.get(name)
        if processes is not None:
            processes.current_process().authkey = os.urandom(32)
            processes.ORIGINAL_DIR = program.cwd
    program.renew()
    repair_all(sys.modules)
    if program.record is not None:
        Recorder(Path(program.record)).install()


def _place(descriptors: Mapping[int, int]) -> None:
    """Move received descriptors to their numbers, by way of numbers that none of them is to have."""
    above = max(descriptors.values()) + 1
    high = {}
    for received, number in descriptors.items():
        # Not inherited by what the program starts, except at the number that it knows.
        high[number] = fcntl.fcntl(received, fcntl.F_DUPFD_CLOEXEC, above)
        os.close(received)
    for number, fd in high.items():
        os.dup2(fd, number, inheritable=True)
        os.close(fd)


def _add_warn_options(options: Sequence[str]) -> None:
    """As if the interpreter had been started with them: filters that imports made go before theirs."""
    if options:
        sys.warnoptions += options
        first = {id(entry) for entry in _first_filters}
        by_imports = [entry for entry in warnings.filters if id(entry) not in first]
        warnings.filters[:] = [entry for entry in warnings.filters if id(entry) in first]  # type: ignore[index]
        warnings._processoptions(options)  # type: ignore[attr-defined]
        warnings.filters[:0] = by_imports  # type: ignore[index]


def _set_environment(env: Mapping[str, str]) -> None:
    os.environ.clear()  # also for C code: each is unset
    os.environ.update(env)


class _MemoryMap(ctypes.Structure):
    """``struct prctl_mm_map`` of linux/prctl.h."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("start_code", "end_code", "start_data", "end_data")),
        *((name, ctypes.c_uint64) for name in ("start_brk", "brk", "start_stack")),
        *((name, ctypes.c_uint64) for name in ("arg_start", "arg_end", "env_start", "env_end", "auxv")),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    )


def show_in_proc(argv: Sequence[str], env: Mapping[str, str] | None = None) -> None:
    """Let ``/proc/PID/cmdline`` and ``environ``, which ps, pkill and monitors read, tell what runs here."""
    global _shown
    fields = ["", "", *read_stat()]  # numbered from 1 in proc(5)
    places = list(map(int, fields[47:51]))
    _places[:] = _places or places
    words = b"".join(os.fsencode(word) + b"\0" for word in argv)
    pairs = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in (env or {}).items())
    shown = mmap.mmap(-1, len(words + pairs) + 1, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    shown.write(words + pairs)
    start = ctypes.addressof(ctypes.c_char.from_buffer(shown))
    end = start + len(words)
    libc = ctypes.CDLL(None)
    libc.sbrk.restype = ctypes.c_void_p
    code, data, heap = map(int, fields[25:27]), map(int, fields[44:46]), (int(fields[46]), libc.sbrk(0))
    variables = (end, end + len(pairs)) if env is not None else places[2:]
    values = (*code, *data, *heap, int(fields[27]), start, end, *variables, 0, 0, 2**32 - 1)
    size = ctypes.c_ulong(ctypes.sizeof(_MemoryMap))
    if libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(_MemoryMap(*values)), size, 0) == 0:
        _shown = shown
        return
    # A kernel that cannot do that shows the memory of the template's own start, which left room there; what
    # is too much shows as empty words.
    for text, (at, up_to) in zip((words, pairs), (_places[:2], _places[2:]), strict=True):
        if text and at < up_to:
            ctypes.memset(at, 0, up_to - at)
            ctypes.memmove(at, text, min(len(text), up_to - at - 1))


def _set_streams(*, unbuffered: bool) -> None:
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, f"__{name}__")
        if not isinstance(stream, io.TextIOWrapper):
            continue
        whole_lines = not unbuffered and (fd == 2 or os.isatty(fd))
        if fd == 0 or stream.write_through == unbuffered:
            stream.reconfigure(line_buffering=whole_lines, write_through=unbuffered)
            continue
        # What was imported may have kept the old one: both write whole lines.
        stream.reconfigure(line_buffering=True)
        raw = io.FileIO(fd, "w", closefd=False)
        raw.name = f"<{name}>"
        fresh = io.TextIOWrapper(
            raw if unbuffered else io.BufferedWriter(raw),
            encoding=stream.encoding,
            errors=stream.errors,
            newline="\n",
            write_through=unbuffered,
            line_buffering=whole_lines,
        )
        fresh.mode = "w"  # type: ignore[misc]
        if getattr(sys, name) is stream:
            setattr(sys, name, fresh)
        setattr(sys, f"__{name}__", fresh)
