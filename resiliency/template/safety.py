# SPDX-License-Identifier: Apache-2.0
"""What an import did that a fork must not copy, and which modules have to be left out for it.

A fork copies memory, signal handlers and one thread.  It does not copy other threads, shares open
descriptors and shared memory, and keeps what an import worked out from variables which are different in
each rank.  `ImportWatch` looks for all of that after every module, so that the module is named that did it;
what imported that module is left out with it, because it may have kept what it found there.
"""

from __future__ import annotations

import builtins
import ctypes
import os
import re
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from resiliency.template.draws import SHARED, Draws, running_modules
from resiliency.template.repairs import REPAIRS, SET_BY_REPAIRS, end_threads

#: Threads of native libraries that stop themselves before a fork, or start again after it, by handlers of
#: their own (pthread_atfork).
FORK_SAFE_THREADS = ("jemalloc_bg_thd",)
#: Modules that look through all variables for names with their own prefix.
READERS_BY_PREFIX = ("tqdm", "fsspec", "networkx")
#: Variables that native libraries read once, when they are loaded, and those that the interpreter does.
_READ_BY_LIBRARIES = ("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "BLIS_", "JE_", "PYTORCH_", "TORCH_CPP_")
_READ_WHEN_LOADED = (*_READ_BY_LIBRARIES, "LD_", "MALLOC_", "LC_")
_READ_WHEN_LOADED_NAMES = ("LANG", "GLIBC_TUNABLES", "TZ")
_HARMLESS_FILES = ("/dev/null", "/dev/urandom")
#: Lines of /proc/PID/status about what a process passes on to those that it starts.
_PASSED_ON = re.compile(
    r"^(Umask|[UG]id|Groups|Sig(?:Blk|Ign)|Cap\w+|NoNewPrivs|Seccomp|Cpus_allowed|Mems_allowed):(.*)$", re.M
)
#: The name of each such mapping in /proc/PID/maps.
_SHARED_AND_WRITABLE = re.compile(r"^\S+ .w.s \S+ \S+ \S+ *(.*)$", re.M)
#: Number of the system call; no library that is always there has a function for it.
_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
_OF_GLIBC = 1 << 31 | 1 << 32  # signals 32 and 33


class LeftOut(BaseException):  # not for programs that try imports and catch their errors
    """A module that is left out was asked for: the module that asked has to be left out, too."""


def differences(ours: Mapping[str, str], theirs: Mapping[str, str | None]) -> list[str]:
    """Variables read by what is loaded already, without Python seeing it, that two environments differ in."""

    def is_read(name: str) -> bool:
        # Whether output is buffered is set for each program.
        read = name.startswith(("PYTHON", *_READ_WHEN_LOADED)) or name in _READ_WHEN_LOADED_NAMES
        return read and name != "PYTHONUNBUFFERED"

    return sorted(name for name in {*ours, *theirs} if is_read(name) and ours.get(name) != theirs.get(name))


def is_read_by_libraries(name: str) -> bool:
    """Whether a library that is loaded before a variable is set does not see it, and Python cannot tell."""
    return name.startswith(_READ_BY_LIBRARIES)


def passed_on() -> dict[str, object]:
    """What a process that this thread starts has from it, besides environment, directory and descriptors."""
    status = dict(_PASSED_ON.findall(_read("/proc/thread-self/status")))
    if ignored := status.get("SigIgn"):
        # glibc's own two: `posix_spawn` ignores them in the child, and the first thread takes one back.
        status["SigIgn"] = f"{int(ignored, 16) & ~_OF_GLIBC:x}"
    return {
        **status,
        **{name: _read(f"/proc/self/{name}") for name in ("limits", "cgroup", "oom_score_adj")},
        "scheduling": (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)),
        "NUMA policy": _numa_policy(),
    }


def _numa_policy() -> tuple[int, ...]:
    mode, nodes = ctypes.c_int(), (ctypes.c_ulong * 16)()
    if number := _GET_MEMPOLICY.get(os.uname().machine):
        bits = ctypes.c_ulong(8 * ctypes.sizeof(nodes))
        # A kernel without NUMA changes nothing here.
        ctypes.CDLL(None).syscall(number, ctypes.byref(mode), nodes, bits, None, ctypes.c_ulong(0))
    return (mode.value, *nodes)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:  # some sandboxes do not show it
        return ""


class Beginning:
    """What stays when a process replaces its interpreter, and imports may have changed."""

    def __init__(self) -> None:
        self._directory = os.getcwd()
        self._umask = os.umask(0o077)
        os.umask(self._umask)
        self._signals = {number: signal.getsignal(number) for number in signal.valid_signals()}
        self._blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())

    def restore(self, keep: Collection[int]) -> None:
        """Put it back; descriptors above 2 that are not to be kept will be closed; children end now."""
        os.chdir(self._directory)
        os.umask(self._umask)
        for number, handler in self._signals.items():
            if signal.getsignal(number) != handler and number not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(number, signal.SIG_IGN if handler == signal.SIG_IGN else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._blocked)
        for fd in open_files():
            os.set_inheritable(fd, fd in keep or fd <= 2)
        for child in children():
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def close_files(keep: Collection[int]) -> None:
    """Close what is open, but standard streams and what imports may keep."""
    for fd, what in open_files().items():
        if fd > 2 and fd not in keep and what not in _HARMLESS_FILES:
            os.close(fd)


def children() -> list[int]:
    """Processes that this one started."""
    found: list[int] = []
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError), open(f"/proc/self/task/{task}/children") as file:
            found += map(int, file.read().split())
    return found


def native_threads() -> list[str]:
    """Names of this process's threads, but the calling one and those that survive a fork."""
    names = []
    for task in os.listdir("/proc/self/task"):
        if int(task) != os.getpid():
            try:
                with open(f"/proc/self/task/{task}/comm") as comm:
                    names.append(comm.read().strip())
            except OSError:  # ended meanwhile
                continue
    return [name for name in names if name not in FORK_SAFE_THREADS]


def open_files() -> dict[int, str]:
    """Open descriptors, and what each is."""
    found = {int(name): _file(int(name)) for name in os.listdir("/proc/self/fd")}
    return {fd: what for fd, what in found.items() if what is not None}


def _file(fd: int) -> str | None:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:  # of a listing that has ended
        return None


def shared_memory() -> Counter[str]:
    """Memory that a fork would share instead of copying it: such as a lock of `multiprocessing` lies in."""
    mappings = _read("/proc/self/maps")
    if "w-s " not in mappings and "wxs " not in mappings:  # nearly always, and ten times as fast
        return Counter()
    return Counter(_SHARED_AND_WRITABLE.findall(mappings))


def _mapped_pages() -> int:
    """Of memory that is no heap: it changes where a library is loaded or memory is shared.

    It takes microseconds to read, after each module, where all mappings of NeMo take milliseconds.
    """
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            pages = file.read().split()
    except OSError:  # some sandboxes do not show it
        return 0
    return int(pages[0]) - int(pages[5])


def _finalizers() -> int:
    """What `multiprocessing` has to clear up at the end of this process: it does so in no fork."""
    util: Any = sys.modules.get("multiprocessing.util")
    return len(getattr(util, "_finalizer_registry", ()))


def _holds_cuda() -> bool:
    """Whether torch has started CUDA, which does not work in a fork; imports nothing."""
    cuda: Any = sys.modules.get("torch.cuda")
    return hasattr(cuda, "is_initialized") and bool(cuda.is_initialized())


def _count_tasks() -> int:
    return os.stat("/proc/self/task").st_nlink - 2


def random_keys(known: Collection[str]) -> dict[str, object]:
    """What the random numbers of this process follow from; drawing one changes it.

    The first one makes the numbers, which is drawn here from generators that are not `known` yet.
    """
    keys: dict[str, object] = {}
    if (python := sys.modules.get("random")) and hasattr(python, "getstate"):
        if "random" not in known:
            python.random()
        keys["random"] = hash(python.getstate())
    if (numpy := sys.modules.get("numpy.random")) and hasattr(numpy, "get_bit_generator"):
        if "numpy" not in known:
            numpy.random_sample()
        # Of MT19937: 624 numbers, and how many of them were used.  `get_state` takes 80 us.
        keys["numpy"] = hash(ctypes.string_at(numpy.get_bit_generator().ctypes.state_address, 4 * 625))
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "default_generator") and not torch.__spec__._initializing:
        state = torch.default_generator.get_state()
        keys["torch"] = hash(ctypes.string_at(state.data_ptr(), state.numel()))
    return keys


def has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


class ImportWatch:
    """Watches imports, and tells what is unsafe about this process.

    Args:
        volatile: variables that have another value in each rank or attempt.
        left_out: modules that must not be imported, and why.
    """

    def __init__(self, volatile: Collection[str], left_out: Mapping[str, str]) -> None:
        self.volatile = set(volatile)
        self.left_out = dict(left_out)
        #: Called with the module whose import goes on from now, when one begins or ends; "": none.
        self.on_import: Callable[[str], None] = lambda module: None
        self._loading: list[str] = []
        #: module -> what is wrong with it, found in this process.
        self.found: dict[str, str] = {}
        #: variable -> its value when an import read it, and the module that did.
        self.read: dict[str, tuple[str | None, str]] = {}
        #: variable -> the value that an import set; None: removed.
        self.set_by_imports: dict[str, str | None] = {}
        self._importers: dict[str, set[str]] = {}
        #: Variables that an import sets to what follows from TMPDIR, as they were before.
        self._first = {name: _plain(name) for name in SET_BY_REPAIRS}
        #: Somebody asked for the directory of temporary files.
        self._tempdir_read = False
        self._files = open_files()
        #: What was opened since, and by whom.
        self._opened: dict[tuple[int, str | None], str] = {}
        self._tasks, self._threads = _count_tasks(), len(native_threads())
        self._pages, self._shared = _mapped_pages(), shared_memory()
        self._finalizers, self._cuda = _finalizers(), _holds_cuda()
        self._children = has_children()
        self.draws = Draws(self._blame_unrepaired)
        self._seeds = random_keys(())

    def take_over(self, other: ImportWatch) -> None:
        """Know what another watch knows of imports that were made before a fork."""
        self.found, self.read = dict(other.found), dict(other.read)
        self.set_by_imports = dict(other.set_by_imports)
        self._importers, self._first = other._importers, other._first
        self.draws.take_over(other.draws)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around imports."""
        watch, real_import = self, builtins.__import__

        class WatchedEnviron(os._Environ):  # type: ignore[type-arg]
            def __getitem__(self, name: str) -> str:
                watch._note_read(name)
                return str(super().__getitem__(name))

            def __contains__(self, name: object) -> bool:
                watch._note_read(name)
                return super().__contains__(name)

            def __iter__(self) -> Iterator[str]:
                watch._note_all_read()
                return super().__iter__()

            def __setitem__(self, name: str, value: str) -> None:
                super().__setitem__(name, value)
                if name not in SET_BY_REPAIRS:
                    watch.set_by_imports[name] = value

            def __delitem__(self, name: str) -> None:
                super().__delitem__(name)
                watch.set_by_imports[name] = None

        def watched_import(
            name: str,
            globals: Mapping[str, object] | None = None,
            locals: Mapping[str, object] | None = None,
            fromlist: Sequence[str] | None = (),
            level: int = 0,
        ) -> ModuleType:
            module = real_import(name, globals, locals, fromlist, level)
            if globals is not None:
                watch._note_edges(str(globals.get("__name__")), module, name, fromlist)
            return module

        # Of all ways to import, each comes by here where a module is loaded.
        machinery: Any = sys.modules["_frozen_importlib"]
        real_load = machinery._find_and_load

        def watched_load(name: str, import_: object) -> ModuleType:
            if name in sys.modules:
                return cast(ModuleType, real_load(name, import_))
            watch._loading.append(name)
            watch.on_import(name)
            try:
                return cast(ModuleType, real_load(name, import_))
            finally:
                watch._loading.pop()
                watch.on_import(watch._loading[-1] if watch._loading else "")
                watch.check(name)

        sys.meta_path.insert(0, self)
        os.environ.__class__ = WatchedEnviron
        builtins.__import__, machinery._find_and_load = watched_import, watched_load
        try:
            with self.draws.watching():
                yield
        finally:
            builtins.__import__, machinery._find_and_load = real_import, real_load
            os.environ.__class__ = os._Environ
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Between two modules: blame the one that runs for what is new, refuse what is left out."""
        del path, target
        running = running_modules(sys._getframe(1))
        self.check(running[0] if running else name)
        parent = name.rpartition(".")[0]
        if parent:
            self._importers.setdefault(parent, set()).add(name)
        for inner, outer in zip([name, *running], running, strict=False):
            self._importers.setdefault(inner, set()).add(outer)
        if name in self.left_out:
            for module in running:
                self.found.setdefault(module, f"imports {name}")
            raise LeftOut(name)
        return None

    def check(self, module: str) -> None:
        """Blame `module` for what is there and was not there before."""
        tasks = _count_tasks()
        if tasks == self._tasks:
            threads = self._threads
        else:
            threads, self._tasks = self._settled_threads(), _count_tasks()
        if threads > self._threads:
            self._blame(module, f"starts a thread ({native_threads()[-1]})")
        self._threads = threads
        for fd in map(int, os.listdir("/proc/self/fd")):
            if fd not in self._files and (what := _file(fd)) not in (None, *_HARMLESS_FILES):
                self._opened.setdefault((fd, what), module)
        if (pages := _mapped_pages()) != self._pages:
            self._pages, shared = pages, shared_memory()
            for what in shared - self._shared:
                self._blame(module, f"shares memory ({what or 'of no name'})")
            self._shared = shared
        if (finalizers := _finalizers()) > self._finalizers:
            self._blame(module, "leaves multiprocessing something to clear up")
        self._finalizers = finalizers
        if not self._cuda and _holds_cuda():
            self._cuda = True
            self._blame(module, "starts CUDA")
        if has_children() and not self._children:
            self._children = True
            self._blame(module, "starts a process")
        seeds = random_keys(self._seeds)
        for library in self._seeds.keys() & seeds:
            if seeds[library] != self._seeds[library]:
                self._blame_unrepaired(module, f"seeds or draws random numbers of {library}")
        self._seeds = seeds
        self.draws.check(module)
        if self._tempdir_read:
            # `tempfile` keeps the directory: the next module that asks is to be seen too.
            cast(Any, sys.modules["tempfile"]).tempdir, self._tempdir_read = None, False

    def check_end(self, module: str) -> None:
        """After an import that nothing was within: what was opened, and is not closed again, counts."""
        self.check(module)
        files = open_files()
        for (fd, what), opener in self._opened.items():
            if files.get(fd) == what is not None:
                self._blame(opener, f"opens {what}")
                self._files[fd] = what
        self._opened.clear()

    def settle(self) -> None:
        """At the end of many imports: what takes too long after each, and cannot be blamed on one."""
        self._shared = shared_memory()

    def unsafe(self) -> str:
        """What is wrong at this moment, or ""."""
        if self.found:
            module, why = next(iter(self.found.items()))
            return f"{module} {why}"
        if len(threading.enumerate()) > 1 or self._settled_threads():
            return f"a thread runs ({native_threads()})"
        if has_children():
            return "it has child processes"
        if self._shared:  # since the start of the interpreter
            return f"it shares memory ({', '.join(self._shared)})"
        return ""

    def to_leave_out(self) -> dict[str, str]:
        """What was left out already, what was found, and all that imported any of it."""
        result = {**self.left_out, **self.found}
        waiting = list(result)
        while waiting:
            module = waiting.pop()
            for importer in self._importers.get(module, ()):
                if importer not in result and importer != "__main__":
                    result[importer] = f"imports {module}"
                    waiting.append(importer)
        return result

    def contradiction(self, env: Mapping[str, str | None]) -> str:
        """Why a program with this environment must not use what was imported here, or ""."""
        for name, (value, module) in self.read.items():
            as_well = self._first.get(name, value)
            if env.get(name) not in (value, as_well) and module not in REPAIRS:
                return f"{module} read {name} while it was imported"
        return ""

    # --- notes -----------------------------------------------------------------------------------

    def _blame(self, module: str, why: str) -> None:
        self.found.setdefault(module, why)

    def _blame_unrepaired(self, module: str, why: str) -> None:
        """For what a repair, or the fork itself, sets right."""
        if module not in REPAIRS and module not in SHARED:
            self._blame(module, why)

    def _settled_threads(self) -> int:
        """After a fork, for which libraries with handlers for that have stopped their threads (OpenBLAS)."""
        if native_threads():
            end_threads(sys.modules)
            child = os.fork()
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)
        return len(native_threads())

    def _note_read(self, name: object) -> None:
        running = running_modules(sys._getframe(2))
        self._tempdir_read |= name == "TMPDIR" and "tempfile" in sys.modules
        if not isinstance(name, str) or not running or name in self.set_by_imports:
            return
        module = running[0]
        if module.partition(".")[0] in READERS_BY_PREFIX:
            return
        self._note_value(name, module)
        if _plain(name) != self._first.get(name, _plain(name)):
            self._note_value("TMPDIR", module)

    def _note_value(self, name: str, module: str) -> None:
        if name in self.volatile and module not in REPAIRS:
            self._blame(module, f"reads {name} while it is imported")
        # Of several readers one that cannot be repaired counts.
        known = self.read.get(name)
        if known is None or known[1] in REPAIRS:
            self.read[name] = (_plain(name), module)

    def _note_all_read(self) -> None:
        running = running_modules(sys._getframe(2))
        if running and running[0].partition(".")[0] not in READERS_BY_PREFIX:
            self._blame(running[0], "reads all variables while it is imported")

    def _note_edges(
        self, importer: str, module: ModuleType, name: str, fromlist: Sequence[str] | None
    ) -> None:
        if fromlist:
            base = module.__name__
            targets = [base, *(f"{base}.{part}" for part in fromlist if f"{base}.{part}" in sys.modules)]
        else:
            parts = name.split(".")
            targets = [".".join(parts[: end + 1]) for end in range(len(parts))]
        for target in targets:
            if target != importer:
                self._importers.setdefault(target, set()).add(importer)


def _plain(name: str) -> str | None:
    """The value of a variable, read behind the watch."""
    try:
        return str(os._Environ.__getitem__(os.environ, name))
    except KeyError:
        return None
