# SPDX-License-Identifier: Apache-2.0
"""Which modules a program imports, in what order, and which variables it sets on the way.

A rank writes the record while it imports: one short line for each module that is imported for the first
time, and none afterwards.  A template that repeats the record in its order makes the same imports.

    a NAME              the module NAME was asked for
    m NAME<TAB>FILE     it was imported, from FILE (empty: built in)
    e NAME              the program itself, and no import, set the variable NAME
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, ModuleType
from typing import NamedTuple

_IMPORT_MACHINERY = "<frozen importlib."


class Entry(NamedTuple):
    """One line of a record.  `file` is None for a variable, "" for a module without a file."""

    name: str
    file: str | None

    @classmethod
    def parse(cls, line: str) -> Entry | None:
        """None for a line that is torn."""
        kind, _, rest = line.partition(" ")
        name, tab, file = rest.partition("\t")
        if kind == "m" and tab:
            return cls(name, file)
        return cls(rest, None) if kind == "e" and rest else None

    def __str__(self) -> str:
        return f"e {self.name}\n" if self.file is None else f"m {self.name}\t{self.file}\n"


def file_of(module: ModuleType | None) -> str:
    """The file that a module was loaded from, or ""; asks no code of the module itself."""
    spec = vars(module).get("__spec__") if isinstance(module, ModuleType) else None
    return str(spec.origin) if isinstance(spec, ModuleSpec) and spec.has_location and spec.origin else ""


class Recorder:
    """Appends to `path` what this process imports from `install` on; a finder that finds nothing.

    A record that cannot be written ends quietly: a rank must not fail for it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None
        #: Lines, so that each is written once.
        self._written: set[str] = set()
        #: Asked for, and not written yet: where it comes from is known once the import has begun.
        self._last: str | None = None

    def install(self) -> None:
        try:
            self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return
        # A process that is forked from this one imports for itself.
        os.register_at_fork(after_in_child=self.close)
        sys.meta_path.insert(0, self)
        recorder = self

        class RecordedEnviron(os._Environ):  # type: ignore[type-arg]
            def __setitem__(self, name: str, value: str) -> None:
                if self.get(name) != value:
                    recorder._note_variable(name)
                super().__setitem__(name, value)

            def __delitem__(self, name: str) -> None:
                recorder._note_variable(name)
                super().__delitem__(name)

        os.environ.__class__ = RecordedEnviron

    def close(self) -> None:
        """End the record without a last line: also in a process that is forked from the recorded one."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            os.environ.__class__ = os._Environ
            if self in sys.meta_path:
                sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        # Not by importlib.util.find_spec, with which libraries look for each other and import nothing.
        if sys._getframe(2).f_code.co_name == "_find_and_load_unlocked":
            self._write_last()
            self._last = name
            self._write(f"a {name}\n")
        return None

    def _write_last(self) -> None:
        name, self._last = self._last, None
        # What was only tried is not there.
        if name is not None and name in sys.modules:
            self._write(str(Entry(name, file_of(sys.modules[name]))))

    def _note_variable(self, name: str) -> None:
        if not _within_import(sys._getframe(2)):
            self._write_last()
            self._write(str(Entry(name, None)))

    def _write(self, line: str) -> None:
        if self._fd is not None and line not in self._written:
            self._written.add(line)
            try:
                os.write(self._fd, line.encode(errors="surrogateescape"))
            except OSError:
                self.close()


def _within_import(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(_IMPORT_MACHINERY):
            return True
        frame = frame.f_back
    return False


class RecordReader:
    """Reads a record that is still being written, whole lines only."""

    def __init__(self, path: Path, position: int = 0) -> None:
        self._path = path
        #: How much of the file was read.
        self.position = position
        self._asked: str | None = None

    def read(self) -> list[Entry]:
        """What was added since the last call; nothing while there is no file."""
        try:
            with self._path.open("rb") as file:
                file.seek(self.position)
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self.position += len(whole)
        lines = whole.decode(errors="surrogateescape").split("\n")[:-1]
        if lines:
            self._asked = lines[-1].removeprefix("a ") if lines[-1].startswith("a ") else None
        return [entry for line in lines if (entry := Entry.parse(line)) is not None]

    def take_asked(self) -> list[Entry]:
        """The module that was asked for last, if nothing tells how that went: it may be the last of all."""
        name, self._asked = self._asked, None
        return [] if name is None else [Entry(name, "")]
