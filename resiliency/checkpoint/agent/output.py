# SPDX-License-Identifier: Apache-2.0
"""Where an agent that a trainer started says things: as long as there are trainers, on their standard error.

The agent outlives them.  If it went on holding that standard error, whoever reads it through a pipe
(``train.py 2>&1 | tee log``) would not see its end before the agent's.  So what it says while nobody is
there goes to a file, and the next trainer's standard error takes over from that.
"""

from __future__ import annotations

import logging
import os
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

_STDERR = 2
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOCTTY


class AgentOutput:
    """The standard error of this process; used by the agent's main thread.

    Args:
        name: of the job; its file is in the directory for temporary files.
    """

    def __init__(self, name: str) -> None:
        self.path = Path(tempfile.gettempdir()) / f"{name}-agent.log"
        self._is_alone = False

    def left_alone(self) -> None:
        """No trainer is there any more: let go of what they read."""
        if self._is_alone:
            return
        try:
            # Not through a link or a pipe that somebody else put there.
            fd = os.open(self.path, _APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        except OSError as error:
            self._stay(f"cannot be written: {error}")
            return
        found = os.fstat(fd)
        if found.st_uid != os.getuid() or not stat.S_ISREG(found.st_mode):
            os.close(fd)
            self._stay("is no file of this user")
            return
        logger.info("no rank is left: what this agent does until one is there is said in %s", self.path)
        self._become(fd)
        self._is_alone = True

    def joined_by(self, pid: int) -> None:
        """The trainer `pid` is there."""
        if not self._is_alone:
            return
        try:
            # A pipe that nobody reads is not waited for.
            fd = os.open(f"/proc/{pid}/fd/{_STDERR}", _APPEND | os.O_NONBLOCK)
        except OSError as error:  # a socket, for instance
            logger.info("process %d is there, but its standard error cannot be shared: %s", pid, error)
            return
        if stat.S_ISREG(os.fstat(fd).st_mode) and not _appends(pid):
            os.close(fd)
            logger.info("process %d is there, and overwrites what others add to its standard error", pid)
            return
        os.set_blocking(fd, True)
        self._become(fd)
        self._is_alone = False

    def _stay(self, why: str) -> None:
        logger.warning(
            "no rank is left, and this agent keeps the standard error of one: %s %s", self.path, why
        )
        self._is_alone = True  # not again and again

    @staticmethod
    def _become(fd: int) -> None:
        # Where nobody reads any more it fails, and what is left goes to the new place.
        with suppress(OSError):
            sys.stderr.flush()
        os.dup2(fd, _STDERR)
        os.close(fd)


def _appends(pid: int) -> bool:
    """Whether the standard error of a process was opened for appending, as by ``>>``.

    Opened by ``>``, it has a place of its own in the file, and writes there whatever others have added.
    """
    try:
        info = Path(f"/proc/{pid}/fdinfo/{_STDERR}").read_text()
    except OSError:
        return False
    flags = next((line.split()[1] for line in info.splitlines() if line.startswith("flags:")), "0")
    return bool(int(flags, 8) & os.O_APPEND)
