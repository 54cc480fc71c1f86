# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/supervisor.md for one machine, typed as they are printed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from supervisor.orchestrators.local import stop_all
from supervisor.orchestrators.processes import marked_processes
from tests.supervisor_pages import shell as pages
from tests.supervisor_pages.shell import LONG_S, blocks, can_be_apart, section
from tests.supervisor_plane.plane import ROOT
from tests.waiting import wait_until

PAGE = (ROOT / "docs" / "supervisor.md").read_text()


class Shell(pages.Shell):
    """Hosts are processes, with their logs in a folder of it."""

    def log(self, host: str) -> str:
        path = self.folder / "fleet" / "logs" / f"{host}-launcher.log"
        return path.read_text() if path.exists() else ""


@contextmanager
def open_shell(folder: Path) -> Iterator[Shell]:
    shell = Shell(folder)
    try:
        yield shell
    finally:
        shell.close()
        stop_all(folder / "fleet")


@pytest.mark.slow
@pytest.mark.skipif(not can_be_apart(), reason="needs the right to make network namespaces")
def test_a_job_that_is_started_by_the_page_loses_a_host_by_the_page_and_goes_on(tmp_path: Path) -> None:
    _, start, look, lose, see, back, end = blocks(section(PAGE, "## Try it on one machine"))
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
