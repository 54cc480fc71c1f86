# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/ray.md: on one machine with a real Ray; that for a cluster up to its job file."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from pathlib import Path

import pytest

from supervisor.orchestrators.job_file import read_job_file
from tests.supervisor_pages.shell import APART, ENTER, LONG_S, blocks, can_be_apart, open_shell, section
from tests.supervisor_plane.plane import ROOT
from tests.waiting import wait_until

PAGE = (ROOT / "docs" / "ray.md").read_text()
#: `ray stop` ends all of Ray that it sees.
ALONE = (*APART[:-2], "--pid", "--fork", "--mount-proc", *APART[-2:])


def test_the_command_for_a_cluster_makes_a_job_file_that_the_supervisor_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (_, train, _), *_ = blocks(PAGE)
    _, script, *flags = shlex.split(train.replace("\\\n", " "))
    monkeypatch.setenv("RAY_CLIENT_MODE", "0")  # Ray sets it when it is imported
    monkeypatch.setattr("sys.argv", [script, *flags])
    program = runpy.run_path(str(ROOT / script))
    args = program["parse"]()
    file = tmp_path / "job.json"
    file.write_text(json.dumps(program["job_file"](args, "10.0.0.1:29400")))
    fleet = read_job_file(file)
    assert len(fleet.hosts) == 5
    assert fleet.resources == {"GPU": 8}
    assert args.script.endswith("/examples/ddp_train.py")


@pytest.mark.thorough("starts Ray and trains, as test_training.py")
@pytest.mark.slow
@pytest.mark.skipif(not can_be_apart(), reason="needs the right to make network namespaces")
def test_the_page_trains_on_a_ray_cluster_of_one_machine_and_ends_it(tmp_path: Path) -> None:
    start, look, end = blocks(section(PAGE, "## Try it on one machine"))
    enter = f"{ENTER} && mkdir -p /tmp/ray && mount -t tmpfs tmpfs /tmp/ray"
    env = {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    with open_shell(tmp_path, enter=enter, env=env, apart=ALONE) as shell:
        for command in start:
            shell.type(command)

        def trains() -> bool:
            status, text = shell.try_to_type(look[0])
            steps = re.search(r"^train +2 of 2 +(\d+) ", text, re.MULTILINE)
            return (
                not status
                and "3 hosts: 0 failed, 2 running, 1 spare" in text
                and bool(steps and int(steps[1]) > 20)
            )

        wait_until(trains, "it does not train", timeout=LONG_S, every=1.0)
        assert shell.type(look[1])
        for command in end:
            shell.type(command)
        assert not (tmp_path / "fleet").exists()
        assert shell.type("ls /dev/shm") == ""
