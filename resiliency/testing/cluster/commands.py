# SPDX-License-Identifier: Apache-2.0
"""What the hosts of a cluster write, and waiting for them to write something."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

from resiliency.testing.pool.output import OutputReader

#: Seconds for whatever is waited for, by default; a busy machine with two cores needs some.
WAIT_S = 240.0
_LOOK_S = 0.05
_TAIL_LINES = 80


class Words:
    """Collects the lines of all hosts.

    Args:
        log: file that receives them too, as they come.
    """

    def __init__(self, log: Path | None) -> None:
        self._reader = OutputReader(log)
        #: Where hosts write.
        self.output_fd = os.dup(self._reader.write_fd)
        self._reader.start()

    @property
    def lines(self) -> list[str]:
        """All whole lines of all hosts so far."""
        return self._reader.lines()

    def drain(self) -> None:
        """Take in all that was written until now."""
        self._reader.drain()

    def tail(self) -> str:
        """The last lines, for messages."""
        return "\n".join(f"  | {line}" for line in self.lines[-_TAIL_LINES:])

    def wait_for_line(
        self,
        pattern: str,
        *,
        count: int = 1,
        timeout: float = WAIT_S,
        since: int = 0,
        ended: Callable[[], bool] = lambda: False,
    ) -> re.Match[str]:
        """Wait until `count` lines after the first `since` contain `pattern`; return the match in the last.

        Raises:
            TimeoutError: they did not come in time.
            EOFError: `ended` says that all who might write them have.
        """
        regex, deadline = re.compile(pattern), time.monotonic() + timeout
        while True:
            over = ended()  # asked first: what a rank wrote before its end counts
            if over:
                self.drain()
            lines = self.lines
            found = [match for line in lines[since:] if (match := regex.search(line))]
            if len(found) >= count:
                return found[count - 1]
            what = f"{len(found)} of {count} lines matching {pattern!r}"
            if over:
                raise EOFError(f"all ranks ended after {what}:\n{self.tail()}")
            if time.monotonic() >= deadline:
                raise TimeoutError(f"the hosts wrote only {what} within {timeout:g} s:\n{self.tail()}")
            self._reader.wait_for_more(len(lines), min(deadline, time.monotonic() + 0.2))

    def wait_until(self, holds: Callable[[], bool], otherwise: str, *, timeout: float = WAIT_S) -> None:
        """Wait for something that shows in files.

        Raises:
            TimeoutError: with the text `otherwise`.
        """
        deadline = time.monotonic() + timeout
        while not holds():
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{otherwise} within {timeout:g} s:\n{self.tail()}")
            # Files of other processes tell nobody that they changed: look.
            threading.Event().wait(_LOOK_S)

    def close(self) -> None:
        os.close(self.output_fd)
        self._reader.close()
