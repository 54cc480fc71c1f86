# SPDX-License-Identifier: Apache-2.0
"""The processes of the named job on this node, and the only place that signals them.

A process belongs to the job if it is of this user and was started with the job's name in its environment
(`JOB_IDENTIFIER`, which launcher.py sets for its workers, or `TORCHELASTIC_RUN_ID`) and a `LOCAL_RANK`; it
belongs to this node if its `GROUP_RANK` does.  A signal goes through a pidfd, after start time, user and
environment were compared once more: a number that the kernel has given to another process is never hit.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from resiliency.errors import ConfigError
from resiliency.proc_stat import stat_fields
from resiliency.runtime import JOB_ENV

#: Variables that name a job.
NAMES = (JOB_ENV, "TORCHELASTIC_RUN_ID")
_RANK, _LOCAL_RANK, _GROUP_RANK = "RANK", "LOCAL_RANK", "GROUP_RANK"
_WANTED = (*NAMES, _RANK, _LOCAL_RANK, _GROUP_RANK)


class Process(NamedTuple):
    """A process, told apart from a later one with the same number by its start (ticks since boot)."""

    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """The living process with this number; None for none, and for a zombie."""
        fields = stat_fields(pid)
        return None if not fields or fields[0] in ("Z", "X") else cls(pid, fields[19])

    @property
    def alive(self) -> bool:
        return Process.of(self.pid) == self

    def send(self, number: int) -> bool:
        """Signal exactly this process; False when it has ended.

        Raises:
            PermissionError: it belongs to another user.
        """
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            # The pidfd is held now: if the start time is right, it is this process's.
            if not self.alive:
                return False
            signal.pidfd_send_signal(fd, number)
            return True
        except ProcessLookupError:
            return False
        finally:
            os.close(fd)


@dataclass(frozen=True)
class Member:
    """A process of the job on this node.

    Attributes:
        parent: its number.
        rank: global rank, None where the launcher does not say.
        local_rank: of the worker that it is, or under which it was started.
    """

    process: Process
    parent: int
    rank: int | None
    local_rank: int


class Job:
    """The job as seen from one node.

    Args:
        name: value of one of `NAMES` in the environment of its workers.
        node_rank: `GROUP_RANK` of the workers of this node; None takes those of every node on this machine.
    Raises:
        ConfigError: the name is empty.
    """

    def __init__(self, name: str, node_rank: int | None) -> None:
        if not name:
            raise ConfigError(
                "the job has no name, and every process on this machine could be meant.",
                hint=f"Start it with {JOB_ENV}=NAME, and the simulator with --job NAME.",
            )
        self.name = name
        self._node_rank = node_rank
        self._uid = os.getuid()
        #: Launchers that were seen: parents of workers.
        self._launchers: set[Process] = set()

    def members(self) -> list[Member]:
        """The living processes of the job on this node, workers and what they started."""
        found = [member for pid in _pids() if (member := self._member(pid)) is not None]
        for member in _topmost(found):
            launcher = Process.of(member.parent)
            if launcher is not None and self._may_be_launcher(member.parent):
                self._launchers.add(launcher)
        return found

    def workers(self) -> dict[int, Member]:
        """The worker of each local rank: its topmost process."""
        return {member.local_rank: member for member in self._workers(self.members())}

    def workers_of(self, local_rank: int) -> list[Member]:
        """Several where ranks do not know their place, or workers of several nodes are meant."""
        return [member for member in self._workers(self.members()) if member.local_rank == local_rank]

    def launchers(self) -> list[Process]:
        """Parents of workers that are of the job themselves, by name and user: others are never touched."""
        self._launchers = {process for process in self._launchers if process.alive}
        return sorted(process for process in self._launchers if self._names_job(process.pid))

    def host_processes(self) -> list[Process]:
        """All of the job on this node: launchers, then what they started under its name, workers included.

        A launcher comes first, or it would start workers again.
        """
        members = {member.process for member in self.members()}
        launchers = self.launchers()
        pids = {launcher.pid for launcher in launchers}
        started = {
            process
            for pid in _pids()
            if pids & ancestors(pid) and self._names_job(pid) and (process := Process.of(pid)) is not None
        }
        spared = self._spared()
        others = sorted(
            process for process in (started | members) - set(launchers) if process.pid not in spared
        )
        return [*launchers, *others]

    def is_present(self) -> bool:
        """Whether a process of the job, or a launcher of it that was seen, is alive."""
        self._launchers = {process for process in self._launchers if process.alive}
        return bool(self._launchers) or bool(self.members())

    def owns(self, process: Process) -> bool:
        """Whether it is still alive, and of this job."""
        return process.alive and self._names_job(process.pid)

    def signal(self, process: Process, number: int) -> bool:
        """Signal a process after another look at whose it is; False when it has ended."""
        return self.owns(process) and process.send(number)

    def other_nodes(self) -> list[str]:
        """Group ranks of this job's workers on this machine, for an error message."""
        seen = {
            env.get(_GROUP_RANK, "(none)")
            for pid in _pids()
            if self.name in _names(env := _environment(pid)) and _LOCAL_RANK in env
        }
        return sorted(seen)

    def _may_be_launcher(self, pid: int) -> bool:
        # Workers whose launcher is gone have process 1 as their parent, which need not be the job's.
        return pid not in self._spared() and (pid != 1 or self._names_job(pid))

    def _spared(self) -> set[int]:
        """Numbers of processes that are never a target: this one, and what started it."""
        return ancestors(os.getpid())

    def _names_job(self, pid: int) -> bool:
        return _uid(pid) == self._uid and self.name in _names(_environment(pid))

    def _member(self, pid: int) -> Member | None:
        if pid == os.getpid() or _uid(pid) != self._uid:
            return None
        process, env = Process.of(pid), _environment(pid)
        rank, local_rank = _number(env, _RANK), _number(env, _LOCAL_RANK)
        if process is None or local_rank is None or self.name not in _names(env):
            return None
        if self._node_rank not in (None, _number(env, _GROUP_RANK) or 0):
            return None
        fields = stat_fields(pid)
        return Member(process, int(fields[1]), rank, local_rank) if fields else None

    def _workers(self, members: Iterable[Member]) -> list[Member]:
        """The topmost ones, but not helpers that outlive the rank that started them: no launcher is above."""
        launchers = {process.pid for process in self._launchers if process.alive}
        found = _topmost(members)
        return [one for one in found if launchers & ancestors(one.process.pid)] if launchers else found


class ParentJob(Job):
    """The process that started this simulator, as a job of one worker: a program that injures itself.

    Whose it is needs no name: no process is taken for the parent.  What strikes a host or its network strikes
    the job of this name on this node, launcher and parent included, if the parent is of that job.

    Args:
        name: as for `Job`.
        node_rank: as for `Job`.
        pid: of the parent; the simulator may be started after its end.
        rank, local_rank: of the parent.
    Raises:
        ConfigError: another process started this one.
    """

    def __init__(
        self, name: str, node_rank: int | None, pid: int, *, rank: int | None, local_rank: int
    ) -> None:
        super().__init__(name, None)
        self._whole = _JobOfParent(name, node_rank)
        parent = Process.of(pid)
        # The number is looked at again: only now it cannot have been given to another process before.
        if parent is None or os.getppid() != pid:
            raise ConfigError(
                f"--parent {pid}: this simulator was started by process {os.getppid()}, which alone it may"
                " injure.",
                hint="Start it from the program that is to be injured, or give --job without --parent.",
            )
        self._parent = Member(parent, 0, rank, local_rank)

    def members(self) -> list[Member]:
        return [self._parent] if self._parent.process.alive else []

    def launchers(self) -> list[Process]:
        self._whole.members()
        return self._whole.launchers()

    def host_processes(self) -> list[Process]:
        return self._whole.host_processes() if self._whole.owns(self._parent.process) else []

    def owns(self, process: Process) -> bool:
        return (process == self._parent.process and process.alive) or self._whole.owns(process)


class _JobOfParent(Job):
    """The job of the program that started this simulator: what started the simulator is a target, too."""

    def _spared(self) -> set[int]:
        return {os.getpid()}


def _topmost(members: Iterable[Member]) -> list[Member]:
    by_pid = {member.process.pid: member for member in members}
    return [
        member
        for member in by_pid.values()
        if member.parent not in by_pid or by_pid[member.parent].local_rank != member.local_rank
    ]


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _uid(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return -1


def _environment(pid: int) -> Mapping[str, str]:
    """Of what identifies a process, what it was started with; empty when it cannot be read."""
    with suppress(OSError):
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        pairs = (entry.decode(errors="replace").partition("=") for entry in entries)
        return {name: value for name, _, value in pairs if name in _WANTED}
    return {}


def _names(env: Mapping[str, str]) -> set[str]:
    return {env[name] for name in NAMES if name in env}


def _number(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else None


def ancestors(pid: int) -> set[int]:
    """Numbers of a process, its parent, and so on."""
    found: set[int] = set()
    while pid > 0 and pid not in found:
        found.add(pid)
        fields = stat_fields(pid)
        pid = int(fields[1]) if fields else 0
    return found
