# SPDX-License-Identifier: Apache-2.0
"""The launcher's own traces: its id, its private directory, and the guardian that clears both up."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from resiliency.events import JsonValue
from resiliency.forks import call_in_child
from resiliency.launch import guardian

logger = logging.getLogger(__name__)

#: NVRx names its sockets after the launcher and the rank; the kernel takes 107 bytes of path.
LONGEST_PRIVATE_DIR = 107 - len("/_ft_launcher0123456789_rmon000.socket")


class Protection:
    """Owns what must not outlive the launcher; leaving the context removes it.

    Sockets and other files of this launcher lie in a directory of its own, so that launchers on
    one host, or in containers that share a temporary directory, cannot clash.

    Args:
        grace: what workers get between SIGTERM and SIGKILL when the launcher was killed.
    """

    def __init__(self, *, grace: timedelta) -> None:
        self.id = uuid.uuid4().hex
        self.private_dir = _make_private_dir()
        #: Processes under this launcher that no restart of workers ends, with all in their sessions: imports
        #: of a template run programs (ldconfig, compilers).
        self.exempt: set[int] = set()
        #: At its end once launcher and guardian are gone, so that nobody looks after workers any more.
        self.lifeline_fd, self._lifeline_write_fd = os.pipe2(os.O_CLOEXEC)
        # For children that are started from this process's own environment.
        self._outer = os.environ.get(guardian.LAUNCHER_ENV)
        os.environ[guardian.LAUNCHER_ENV] = ":".join(filter(None, (self._outer, self.id)))
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", guardian.__file__),
                *(self.id, str(grace.total_seconds()), str(self.private_dir)),
            ],
            stdin=subprocess.PIPE,
            pass_fds=(self._lifeline_write_fd,),
            cwd="/",
            start_new_session=True,  # a Ctrl-C is for the launcher, not for it
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin
        # A forked child that kept the pipe open would hide the launcher's end from the guardian.
        call_in_child(self._forget_pipes)

    def workers(self, pids: Iterable[int]) -> None:
        """Tell the guardian whom to end; replaces those named before."""
        self._tell("workers", pids)

    def helpers(self, pids: Iterable[int]) -> None:
        """Name processes that end after the workers; adds to those named before."""
        self._tell("helpers", pids)

    def last_words(self, path: Path, record: Mapping[str, JsonValue]) -> None:
        """What to append to an event log, with the time, if the launcher cannot do it any more."""
        kept = {name: value for name, value in record.items() if name != "timestamp"}
        self._send("last_words " + json.dumps([str(path), kept]))

    def outer_environment(self) -> dict[str, str]:
        """This process's environment without the launcher's id: for children that outlive workers."""
        env = {**os.environ}
        del env[guardian.LAUNCHER_ENV]
        return env if self._outer is None else {**env, guardian.LAUNCHER_ENV: self._outer}

    def leftovers(self) -> list[guardian.Process]:
        """Living processes that workers started, the launcher's own left out."""
        return [process for process in guardian.find(self.id) if not self._is_own(process.pid)]

    def close(self) -> None:
        """Let the guardian go and remove the private directory; idempotent."""
        if self._pipe.closed:
            return
        self._tell("bye", ())
        with suppress(BrokenPipeError):
            self._pipe.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self.lifeline_fd)
        os.close(self._lifeline_write_fd)
        shutil.rmtree(self.private_dir, ignore_errors=True)

    def __enter__(self) -> Protection:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _is_own(self, pid: int) -> bool:
        try:
            session = os.getsid(pid)
        except ProcessLookupError:  # ended meanwhile
            return True
        return pid in (self._process.pid, *self.exempt) or session in self.exempt

    def _tell(self, kind: str, pids: Iterable[int]) -> None:
        self._send(" ".join([kind, *map(str, pids)]))

    def _send(self, line: str) -> None:
        try:
            self._pipe.write(line.encode() + b"\n")
            self._pipe.flush()
        except BrokenPipeError:
            logger.warning(
                "the guardian process %d is gone: workers would outlive a SIGKILL to the launcher",
                self._process.pid,
            )

    def _forget_pipes(self) -> None:
        with suppress(OSError, ValueError):  # ValueError: closed already, and so is the other
            os.close(self._pipe.fileno())
            os.close(self._lifeline_write_fd)


def _make_private_dir() -> Path:
    path = Path(tempfile.mkdtemp(prefix="launcher-"))
    if len(os.fsencode(path)) <= LONGEST_PRIVATE_DIR:
        return path
    path.rmdir()
    return Path(tempfile.mkdtemp(prefix="launcher-", dir="/tmp"))  # created with mode 700
