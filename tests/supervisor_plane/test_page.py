# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/supervisor.md for one machine, typed as they are printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from supervisor.orchestrators.local import stop_all
from supervisor.orchestrators.processes import marked_processes
from tests.supervisor_plane.plane import PATIENCE_S, ROOT
from tests.waiting import wait_until

PAGE = (ROOT / "docs" / "supervisor.md").read_text()
#: The ports that the page prints are free in a network of its own; what ranks leave in memory ends with it.
APART = ("unshare", "--map-root-user", "--mount", "--net", "sh", "-c")
ENTER = "mount -t tmpfs tmpfs /dev/shm && ip link set lo up && exec bash"
LONG_S = 4 * PATIENCE_S


def _can_be_apart() -> bool:
    try:
        return (
            subprocess.run(
                [*APART, "mount -t tmpfs tmpfs /dev/shm && ip link"], capture_output=True
            ).returncode
            == 0
        )
    except FileNotFoundError:
        return False


class Shell:
    """A bash in a folder that looks like a clone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("launcher.py", "examples", "supervisor", "resiliency"):
            (folder / name).symlink_to(ROOT / name)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._bash = subprocess.Popen(
            [*APART, ENTER], cwd=folder, env={**os.environ, "PATH": path}, stdin=subprocess.PIPE, text=True
        )
        self._typed = 0

    def type(self, command: str) -> str:
        """What the command prints; its exit status is 0."""
        self._typed += 1
        output, status = (self.folder / f"{what}-{self._typed}" for what in ("output", "status"))
        assert self._bash.stdin is not None
        self._bash.stdin.write(
            f"{{ {command}\n}} > {output} 2>&1; echo $? > {status}.new; mv {status}.new {status}\n"
        )
        self._bash.stdin.flush()
        wait_until(status.exists, f"{command} does not end", timeout=LONG_S)
        text = output.read_text()
        assert status.read_text() == "0\n", f"{command}: {text}"
        return text

    def log(self, host: str) -> str:
        path = self.folder / "fleet" / "logs" / f"{host}-launcher.log"
        return path.read_text() if path.exists() else ""

    def close(self) -> None:
        assert self._bash.stdin is not None
        self._bash.stdin.write("kill $(jobs -p)\nwait\n")
        self._bash.stdin.close()
        self._bash.wait(PATIENCE_S)


@contextmanager
def open_shell(folder: Path) -> Iterator[Shell]:
    shell = Shell(folder)
    try:
        yield shell
    finally:
        shell.close()
        stop_all(folder / "fleet")


@pytest.mark.slow
@pytest.mark.skipif(not _can_be_apart(), reason="needs the right to make network namespaces")
def test_a_job_that_is_started_by_the_page_loses_a_host_by_the_page_and_goes_on(tmp_path: Path) -> None:
    section = PAGE.partition("\n## Try it on one machine\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```bash\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    start, look, lose, see, back, end = (re.split(r"(?<!\\)\n", block.strip()) for block in blocks[1:])
    with open_shell(tmp_path) as shell:
        for command in start:
            shell.type(command)
        wait_until(
            lambda: "committed in the persistent tier" in shell.log("a"), "nothing is saved", timeout=LONG_S
        )
        status, log, checkpoints = map(shell.type, look)
        assert "3 hosts: 0 failed, 2 running, 1 spare" in status
        assert re.search(r"^demo +2 of 2 .* 10 of 10 in place, 5 of 5 whole .* well$", status, re.MULTILINE)
        assert "rank 0 step" in log
        assert checkpoints.split()
        launcher = _launcher(tmp_path, "a")

        for command in lose:
            shell.type(command)
        wait_until(lambda: " step " in shell.log("spare"), "the spare does not train", timeout=LONG_S)
        status, history, begun = map(shell.type, see)
        assert re.search(r"^hot_swap .* started on spare$", status, re.MULTILINE)
        assert "hot_swap" in history
        assert [int(step) for step in re.findall(r"rank 1 starts after step (\d+) from", begun)][-1] > 0
        assert _launcher(tmp_path, "a") == launcher  # the host that stayed has its processes

        for command in back:
            shell.type(command)
        wait_until(
            lambda: "0 failed, 2 running, 1 spare" in shell.type(look[0]), "b is no spare", timeout=LONG_S
        )
        for command in end:
            shell.type(command)
        assert marked_processes(str(tmp_path / "fleet")) == []
        assert not (tmp_path / "fleet").exists()
        assert shell.type("ls /dev/shm") == ""


def _launcher(folder: Path, host: str) -> int:
    """The first process of a host's launcher."""
    ours = [one for one in marked_processes(str(folder / "fleet")) if one.mark.host == host]
    pids = {one.pid for one in ours}
    return min(one.pid for one in ours if one.mark.part == "launcher" and one.parent not in pids)
