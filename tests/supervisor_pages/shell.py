# SPDX-License-Identifier: Apache-2.0
"""The commands of a page, and a shell in which they are typed as they are printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.supervisor_plane.plane import PATIENCE_S, ROOT
from tests.waiting import wait_until

#: The ports that pages print are free in a network of its own; what ranks leave in memory ends with it.
APART = ("unshare", "--map-root-user", "--mount", "--net", "sh", "-c")
ENTER = "mount -t tmpfs tmpfs /dev/shm && ip link set lo up"
LONG_S = 4 * PATIENCE_S


def can_be_apart() -> bool:
    """Whether this machine lets its user make network namespaces."""
    try:
        found = subprocess.run([*APART, "mount -t tmpfs tmpfs /dev/shm && ip link"], capture_output=True)
    except FileNotFoundError:
        return False
    return found.returncode == 0


def section(page: str, title: str) -> str:
    """Text of a page from one title to the next."""
    found = page.partition(f"\n{title}\n")[2].partition("\n## ")[0]
    assert found, f"the page has no {title}"
    return found


def blocks(text: str) -> list[list[str]]:
    """Commands of each block of a shell."""
    found = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [re.split(r"(?<!\\)\n", block.strip()) for block in found]


def commands(text: str) -> list[str]:
    """Commands of all blocks."""
    return [command for block in blocks(text) for command in block]


class Shell:
    """A bash in a folder that looks like a clone.

    Args:
        enter: what is done before it begins.
        apart: how it is cut off from this machine.
        env: variables beside this process's own.
    """

    def __init__(
        self,
        folder: Path,
        *,
        enter: str = ENTER,
        env: Mapping[str, str] | None = None,
        apart: tuple[str, ...] = APART,
    ) -> None:
        self.folder = folder
        for name in ("launcher.py", "examples", "supervisor", "resiliency", "deploy"):
            (folder / name).symlink_to(ROOT / name)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._bash = subprocess.Popen(
            [*apart, f"{enter} && exec bash"],
            cwd=folder,
            env={**os.environ, "PATH": path, **(env or {})},
            stdin=subprocess.PIPE,
            text=True,
        )
        self._typed = 0

    def type(self, command: str) -> str:
        """What the command prints; its exit status is 0."""
        status, output = self.try_to_type(command)
        assert status == 0, f"{command}: {output}"
        return output

    def try_to_type(self, command: str) -> tuple[int, str]:
        """The exit status of a command, and what it prints."""
        self._typed += 1
        output, status = (self.folder / f"{what}-{self._typed}" for what in ("output", "status"))
        self._write(f"{{ {command}\n}} > {output} 2>&1; echo $? > {status}.new; mv {status}.new {status}\n")
        wait_until(status.exists, f"{command} does not end", timeout=LONG_S)
        return int(status.read_text()), output.read_text()

    def follow(self, command: str, text: str) -> None:
        """A command that has no end, until it has printed what `text` matches."""
        self._typed += 1
        output = self.folder / f"output-{self._typed}"
        output.touch()
        self._write(f"{command} > {output} 2>&1 &\n")
        wait_until(
            lambda: re.search(text, output.read_text(), re.M),
            f"{command} does not say {text}",
            timeout=LONG_S,
        )
        self._write("kill $!\n")

    def _write(self, text: str) -> None:
        assert self._bash.stdin is not None
        self._bash.stdin.write(text)
        self._bash.stdin.flush()

    def close(self) -> None:
        self._write("kill $(jobs -pr) 2> /dev/null\nwait\n")
        assert self._bash.stdin is not None
        self._bash.stdin.close()
        self._bash.wait(PATIENCE_S)


@contextmanager
def open_shell(folder: Path, **options: Any) -> Iterator[Shell]:
    shell = Shell(folder, **options)
    try:
        yield shell
    finally:
        shell.close()
