# SPDX-License-Identifier: Apache-2.0
"""Faults of a host: little memory, no room on a disk, no network."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from resiliency.cgroups import available_bytes
from simulator.faults import FaultMissed, InjectionFailed, Kind, PlannedFault
from simulator.injectors import memory_holder
from simulator.injectors.memory_holder import SPARED_BYTES
from simulator.injectors.processes import pack
from simulator.job import Job, Process, ancestors
from simulator.journal import Record

#: How long a disk may take to fill, and by how much at a time.
_FILL_S, _PIECE_BYTES = 60, 1 << 30
#: Longest wait for the end of processes whose network is gone already, for all of them together.
_EXIT_S = 2.0
#: How long a command of the system may take.
_COMMAND_S = 20
#: Of a rule for what leaves the host: after the kernel's own for what stays on it (0), before all others.
_RULE_PRIORITY = "5"

#: What the kernel calls the PID namespace in which all processes of the host are seen (PROC_PID_INIT_INO).
_HOST_PIDS = "pid:[4026531836]"
_NAMED = Path("/run/netns")


class MemoryPressure:
    """A process that holds memory of the machine, or of the container that the simulator is in."""

    name = "memory"
    kinds = frozenset({Kind.MEMORY})
    outlives_boot = False

    def __init__(self) -> None:
        self._holders: dict[str, subprocess.Popen[bytes]] = {}

    def refusal(self) -> str:
        return ""

    def aim_fault(self, fault: PlannedFault) -> Record:
        assert fault.value is not None
        available = available_bytes()
        size = min(available * fault.value // 100, available - SPARED_BYTES)
        if size <= 0:
            raise FaultMissed(
                f"{fault.text} missed: {available >> 20} MiB are available, too few to take any."
            )
        return {"bytes": size, "holder": uuid.uuid4().hex}

    def inject(self, record: Record) -> None:
        holder = subprocess.Popen(
            [sys.executable, "-E", "-s", "-S", memory_holder.__file__, str(record["bytes"])],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._holders[str(record["holder"])] = holder

    def end_effect(self, record: Record) -> None:
        # Of another process there is none: its standard input ended with that process.
        holder = self._holders.pop(str(record["holder"]), None)
        if holder is not None:
            holder.kill()
            holder.communicate()


class FullDisk:
    """A file that takes all room of a file system that is neither the system's nor the simulator's.

    Args:
        directory: on that file system; None where none was named.
        kept: directories that must keep their room: the journal's, and that of the job's events.
    """

    name = "disk_full"
    kinds = frozenset({Kind.DISK_FULL})
    outlives_boot = True

    def __init__(self, directory: Path | None, kept: Sequence[Path]) -> None:
        self._directory = directory
        self._kept = kept

    def refusal(self) -> str:
        if self._directory is None:
            return "--disk_dir names no directory on the file system that is to be full."
        try:
            device = self._directory.stat().st_dev
        except OSError as error:
            return f"--disk_dir {self._directory}: {error.strerror}."
        for other in (Path("/"), *self._kept):
            with suppress(OSError):
                if other.stat().st_dev == device:
                    return (
                        f"--disk_dir {self._directory} is on the file system of {other}, which others need:"
                        " mount one for the job."
                    )
        return "" if os.access(self._directory, os.W_OK) else f"--disk_dir {self._directory} is read-only."

    def aim_fault(self, fault: PlannedFault) -> Record:
        if why := self.refusal():
            raise FaultMissed(f"{fault.text} missed: {why}")
        assert self._directory is not None
        path = self._directory.resolve() / f".resiliency-simulator-{uuid.uuid4().hex}"
        mount = next(place for place in path.parents if os.path.ismount(place))
        return {"path": str(path), "mount": str(mount), "left_bytes": (fault.value or 0) << 20}

    def inject(self, record: Record) -> None:
        path, left = Path(str(record["path"])), record["left_bytes"]
        assert isinstance(left, int)
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                _fill(fd, left)
            finally:
                os.close(fd)
        except OSError as error:
            raise InjectionFailed(f"the file system of {path} does not fill: {error.strerror}.") from error

    def end_effect(self, record: Record) -> None:
        mount = record.get("mount")
        try:
            Path(str(record["path"])).unlink()
        except FileNotFoundError as error:
            # After a restart of the host the file is still on a file system that is not mounted yet.
            if isinstance(mount, str) and not os.path.ismount(mount):
                raise InjectionFailed(
                    f"{record['path']} may still take the room of its file system, which is not mounted.",
                    hint=f"Mount it at {mount}; if it is gone for good, delete the journal.",
                ) from error
        except OSError as error:
            raise InjectionFailed(
                f"{record['path']} still takes the room of its file system: {error.strerror}.",
                hint="Remove it by hand.",
            ) from error


def _fill(fd: int, left_bytes: int) -> None:
    """Take room until `left_bytes` are free, in ever smaller pieces, as a file system rounds."""
    size, piece, deadline = 0, _PIECE_BYTES, time.monotonic() + _FILL_S
    while piece >= 4096:
        if time.monotonic() > deadline:
            raise OSError(errno.ETIMEDOUT, f"not within {_FILL_S} s")
        free = os.fstatvfs(fd)
        room = free.f_bavail * free.f_frsize - left_bytes
        piece = min(piece, room - room % 4096)
        if piece <= 0:
            return
        try:
            os.posix_fallocate(fd, size, piece)
            size += piece
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            piece //= 2


class NetworkCut:
    """Nothing leaves the network namespace of the job on this node, as if its switch went dark.

    A rule of routing discards all that is not for the host itself.  Addresses, routes and links stay as they
    are, so the end of the rule is the end of the cut.
    """

    name = "network_cut"
    kinds = frozenset({Kind.NETWORK_CUT})
    outlives_boot = False

    def __init__(self, job: Job) -> None:
        self._job = job

    def refusal(self) -> str:
        for command in (["ip", "-V"], ["nsenter", "--version"]):
            try:
                subprocess.run(command, capture_output=True, timeout=_COMMAND_S, check=True)
            except (OSError, subprocess.SubprocessError):
                return f"the command {command[0]} is missing."
        return "" if os.geteuid() == 0 else "only root may change the routing of a network namespace."

    def aim_fault(self, fault: PlannedFault) -> Record:
        members = self._job.members()
        if not members:
            raise FaultMissed(f"{fault.text} missed: job {self._job.name} has no process on this node now.")
        space = _namespace(members[0].process.pid)
        if not space:
            raise FaultMissed(f"{fault.text} missed: the job's processes ended, or their network is hidden.")
        if not _sees_whole_host() and not _made_here(space):
            raise FaultMissed(
                f"{fault.text} missed: this container hides processes that may share the job's network.",
                hint="Start the simulator in the host's PID namespace, or each node of the job in a network"
                " namespace of its own: unshare --net.",
            )
        ours = {member.process.pid for member in members} | {each.pid for each in self._job.launchers()}
        # What started the job or this simulator there loses its network with them.
        above = ancestors(os.getpid()).union(*(ancestors(pid) for pid in ours))
        looks_until = time.monotonic() + _EXIT_S
        for pid in (int(name) for name in os.listdir("/proc") if name.isdecimal()):
            process = Process.of(pid)
            if process is None or pid in above:
                continue
            seen = _network_of(process, looks_until)
            if seen not in ("", space) or not process.alive:
                continue
            if not ours & ancestors(pid) and not self._job.owns(process):
                raise FaultMissed(
                    f"{fault.text} missed: process {pid}, which is not of job {self._job.name}, shares its"
                    " network.",
                    hint="Start each node of the job in a network namespace of its own: unshare --net.",
                )
        return {
            "namespace": space,
            "pids": _pid_namespace(),
            "processes": [pack(member.process) for member in members],
        }

    def inject(self, record: Record) -> None:
        for family in ("-4", "-6"):
            done = self._in_namespace(record, family, "add")
            if done is None:
                raise FaultMissed("the job's processes ended before their network could be cut.")
            # A namespace without IPv6 needs no rule for it.
            if done.returncode and family == "-4":
                raise InjectionFailed(f"the network stays: {_words(done)}.")

    def end_effect(self, record: Record) -> None:
        for family in ("-4", "-6"):
            # As often as it was added.
            while self._is_cut(record, family):
                done = self._in_namespace(record, family, "del")
                if done is not None and done.returncode:
                    raise InjectionFailed(f"the network stays cut: {_words(done)}.")

    def _is_cut(self, record: Record, family: str) -> bool:
        """Whether the rule is there; a namespace that is gone has none.

        Raises:
            InjectionFailed: that cannot be told.
        """
        done = self._in_namespace(record, family, "show")
        if done is None:
            if _sees_whole_host() or record.get("pids") == _pid_namespace():
                return False
            raise InjectionFailed(
                f"{record['namespace']} may still be cut: it cannot be seen from this PID namespace.",
                hint="Run --undo_only in the PID namespace of the host, with this --state_dir.",
            )
        if done.returncode == 0:
            return any(line.startswith(f"{_RULE_PRIORITY}:".encode()) for line in done.stdout.splitlines())
        if family == "-6" and b"not supported" in done.stderr:
            return False  # a kernel without IPv6
        raise InjectionFailed(f"the network may still be cut: {_words(done)}.")

    @staticmethod
    def _in_namespace(record: Record, family: str, verb: str) -> subprocess.CompletedProcess[bytes] | None:
        """Run ``ip rule VERB``; None where the namespace is not found."""
        space = str(record["namespace"])
        rule = ["rule", verb, "pref", _RULE_PRIORITY]
        rule += ["type", "blackhole"] if verb != "show" else []
        deadline = time.monotonic() + _COMMAND_S
        while (entrance := _entrance(space)) is not None:
            try:
                done = subprocess.run(
                    ["nsenter", f"--net={entrance}", "ip", family, *rule],
                    capture_output=True,
                    timeout=_COMMAND_S,
                    check=False,
                    env={**os.environ, "LC_ALL": "C"},
                )
            except (OSError, subprocess.SubprocessError) as error:
                raise InjectionFailed(f"a rule of routing cannot be changed: {error}.") from error
            # The process by which it was entered may have ended just then; another one may be there.
            if not done.returncode or _leads_to(entrance, space) or time.monotonic() > deadline:
                return done
        return None


def _namespace(pid: int) -> str:
    """Name of the network namespace of a process, with its inode; "" when that cannot be seen."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""


def _network_of(process: Process, until: float) -> str:
    """As `_namespace`; a process that ends has given its network back a moment before it is gone.

    Args:
        until: a monotonic time; what cannot be seen by then may be any network.
    """
    while not (seen := _namespace(process.pid)) and process.alive and time.monotonic() < until:
        time.sleep(0.01)
    return seen


def _pid_namespace() -> str:
    """Name of this process's PID namespace, with its inode; "" where /proc is of another one."""
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def _sees_whole_host() -> bool:
    return _pid_namespace() == _HOST_PIDS


def _made_here(space: str) -> bool:
    """Whether a network namespace was surely made in this container: neither its own nor one with a name.

    Both of these can be shared by containers whose processes are not seen from here.
    """
    own = _namespace(1)
    return bool(own) and own != space and _named(space) is None


def _named(space: str) -> Path | None:
    """Where `ip netns` keeps a network namespace."""
    with suppress(OSError):
        return next((path for path in _NAMED.iterdir() if _leads_to(path, space)), None)
    return None


def _leads_to(path: Path, space: str) -> bool:
    with suppress(OSError):
        return f"net:[{path.stat().st_ino}]" == space
    return False


def _entrance(space: str) -> Path | None:
    """A path by which a network namespace can be entered; None where it is gone.

    Raises:
        InjectionFailed: the network of a living process cannot be seen, and may be this one.
    """
    if (named := _named(space)) is not None:
        return named
    # Were it the network of what started this process, this process would have been found in it.
    above, hidden, looks_until = ancestors(os.getpid()), 0, time.monotonic() + _EXIT_S
    for pid in (int(name) for name in os.listdir("/proc") if name.isdecimal()):
        process = Process.of(pid)
        if process is None or pid in above:
            continue
        found = _network_of(process, looks_until)
        if found == space:
            return Path(f"/proc/{pid}/ns/net")
        if not found and process.alive:
            hidden = pid
    if hidden:
        raise InjectionFailed(f"network {space} is not found, and that of process {hidden} cannot be seen.")
    return None


def _words(done: subprocess.CompletedProcess[bytes]) -> str:
    return done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}"
