# SPDX-License-Identifier: Apache-2.0
"""Where faults of the cluster hit: file operations on a host's disk, seen through Python's audit hooks.

The interpreter tells an audit hook of every file that is opened, removed or renamed, before it is
done.  So the cluster can kill a host between any two of them without touching the code under test, and a
disk can be full without one being filled.  Orders are files, so that they reach processes that run
already; each is carried out once, by whoever claims it first.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import sys
import threading
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

_STEP = re.compile(r"step=(\d+)(-unfinished)?$")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_MAKING = {"os.mkdir", "os.link", "os.truncate"}
_REMOVING = {"os.remove", "os.rmdir", "shutil.rmtree"}
_HIT = ".hit"


class HostPhase(str, Enum):
    """What a host is doing with a step on its disk."""

    SAVE = "save"  # its agent writes its own ranks' checkpoint
    SEND = "send"  # its agent reads a checkpoint, above all to copy it to another host
    RECEIVE = "receive"  # its agent writes the copy of another host's
    RETIRE = "retire"  # its agent deletes a checkpoint, its own or a copy
    RESTORE = "restore"  # its ranks read a checkpoint, their own or a copy


class FaultHit(str, Enum):
    """What happens there."""

    HOST_KILLED = "host_killed"  # all processes of the host at once, agent included
    HOST_STOPPED = "host_stopped"  # the same with SIGSTOP
    PROCESS_KILLED = "process_killed"  # only the one that does it: the agent, in RESTORE the rank


@dataclass(frozen=True, kw_only=True)
class HostFault:
    """A failure of a host, placed at the moment before one of its file operations.

    Args:
        step: of the checkpoint that the operation is about.
        name: only operations on a file of this name (``manifest.json``), or with this end
            (``-unfinished`` for the marker); "" means any.
        verb: only "read", "write" or "remove".
        operation: which of these, from 0.  Storage may open one file twice.
    """

    host: str
    phase: HostPhase
    step: int
    name: str = ""
    verb: str = ""
    operation: int = 0
    hit: FaultHit = FaultHit.HOST_KILLED

    def __str__(self) -> str:
        what = f"{self.verb or 'operation'} {self.operation} of {self.name or 'any file'}"
        return f"{self.hit.value} on {self.host} at {self.phase.value} of step {self.step}, {what}"


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One file operation on a host's disk, as `TestCluster.operations` lists them."""

    phase: HostPhase
    step: int
    verb: str  # "read", "write" or "remove"
    path: str  # below the host's disk


class Orders:
    """The cluster's side: what shall happen on one host."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._count = 0
        directory.mkdir()

    def place(self, fault: HostFault) -> None:
        self._count += 1
        path = self._directory / f"{self._count:04d}.fault"
        written = path.with_suffix(".new")
        written.write_text(json.dumps(asdict(fault)))
        written.rename(path)  # seen whole or not at all

    def has_hit(self, fault: HostFault) -> bool:
        return any(_read(path) == fault for path in self._directory.glob(f"*{_HIT}"))

    def withdraw(self) -> None:
        """Remove the faults that have not hit yet."""
        for path in self._directory.glob("*.fault"):
            path.unlink(missing_ok=True)

    def fill_disk(self, below: str) -> None:
        path = self._directory / "full.new"
        path.write_text(below)
        path.rename(self._directory / "full")

    def free_disk(self) -> None:
        (self._directory / "full").unlink(missing_ok=True)

    def operations(self) -> list[Operation]:
        lines = (self._directory / "operations").read_text().splitlines()
        found = [json.loads(line) for line in lines]
        return [Operation(**{**fields, "phase": HostPhase(fields["phase"])}) for fields in found]


class Watch:
    """The host's side: a hook in each of its processes, for the life of the process.

    Args:
        disk: what the host keeps on disk; operations elsewhere are nobody's business.
        in_rank: this process is a rank, not the agent.
    """

    def __init__(self, disk: Path, orders: Path, *, in_rank: bool) -> None:
        self._prefix = f"{disk}{os.sep}"
        self._orders = orders
        self._in_rank = in_rank
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()
        self._log = os.open(orders / "operations", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[object, ...]) -> None:
        if event == "os.rename":
            # What is written under the new name; and a marker that is moved away no longer hides its step.
            if str(arguments[0]).endswith("-unfinished"):
                self._note(arguments[0], "remove")
            self._note(arguments[1], "write")
        elif event == "open":
            flags = arguments[2] if len(arguments) > 2 else 0
            assert isinstance(flags, int)
            self._note(arguments[0], "write" if flags & _WRITING else "read")
        elif event in _MAKING or event in _REMOVING:
            self._note(arguments[0], "write" if event in _MAKING else "remove")

    def _note(self, path: object, verb: str) -> None:
        if isinstance(path, os.PathLike):
            path = os.fspath(path)
        if not isinstance(path, str) or not path.startswith(self._prefix):
            return
        operation = self._classify(path[len(self._prefix) :], verb)
        if operation is not None:
            os.write(self._log, f"{json.dumps(asdict(operation))}\n".encode())
            for fault in self._due(operation):
                _hit(fault)
        if verb == "write" and self._is_full(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    def _is_full(self, path: str) -> bool:
        try:
            below = (self._orders / "full").read_text()
        except FileNotFoundError:
            return False
        return not below or below in path[len(self._prefix) :].split(os.sep)

    def _classify(self, path: str, verb: str) -> Operation | None:
        parts = path.split(os.sep)
        found = next(((i, m) for i, part in enumerate(parts) if (m := _STEP.match(part))), None)
        if found is None:
            return None
        index, match = found
        copied = "replicas" in parts[:index]
        if self._in_rank:
            phase = HostPhase.RESTORE
        elif verb == "read":
            phase = HostPhase.SEND
        elif verb == "remove" and not match[2]:
            phase = HostPhase.RETIRE
        else:
            phase = HostPhase.RECEIVE if copied else HostPhase.SAVE
        return Operation(phase=phase, step=int(match[1]), verb=verb, path=path)

    def _due(self, operation: Operation) -> list[HostFault]:
        due = []
        with self._lock:
            for path in sorted(self._orders.glob("*.fault")):
                fault = _read(path)
                if fault is None or (fault.phase, fault.step) != (operation.phase, operation.step):
                    continue
                if not operation.path.endswith(fault.name) or fault.verb not in ("", operation.verb):
                    continue
                seen = self._counts[path.name] = self._counts.get(path.name, -1) + 1
                if seen >= fault.operation and _claim(path):
                    due.append(fault)
        return due


def _read(path: Path) -> HostFault | None:
    try:
        fields = json.loads(path.read_text())
    except FileNotFoundError:  # claimed meanwhile
        return None
    fields |= {"phase": HostPhase(fields["phase"]), "hit": FaultHit(fields["hit"])}
    return HostFault(**fields)


def _claim(path: Path) -> bool:
    try:
        path.rename(path.with_suffix(_HIT))
    except FileNotFoundError:
        return False
    return True


def _hit(fault: HostFault) -> None:
    print(f"cluster: {fault}", file=sys.stderr, flush=True)
    if fault.hit is FaultHit.PROCESS_KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    # The processes of a host are one process group.
    os.killpg(0, signal.SIGKILL if fault.hit is FaultHit.HOST_KILLED else signal.SIGSTOP)
