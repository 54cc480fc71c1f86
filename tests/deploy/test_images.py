# SPDX-License-Identifier: Apache-2.0
"""The steps of the images, taken in a fresh environment: CI has no container engine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import yaml

import resiliency
from resiliency.testing.processes import Command as Program
from tests.deploy.chart import CHART, ROOT
from tests.ports import free_port, free_ports
from tests.waiting import wait_until

IMAGES = ROOT / "deploy" / "images"
#: A build and an installation from a package index, on a busy machine.
INSTALL_S = 600.0


def dockerfile(name: str) -> list[tuple[str, str]]:
    """Instructions and their arguments, without comments."""
    lines = (IMAGES / f"{name}.Dockerfile").read_text().replace("\\\n", " ").splitlines()
    words = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    return [(word, rest) for word, rest in words]


def last(name: str, instruction: str) -> str:
    return [rest for word, rest in dockerfile(name) if word == instruction][-1]


@pytest.mark.parametrize("name", ["supervisor", "workload"])
def test_images_are_pinned_and_copy_what_is_there(name: str) -> None:
    (base,) = [rest for word, rest in dockerfile(name) if word == "ARG" and rest.startswith("BASE=")]
    assert re.fullmatch(r"BASE=python:\d+\.\d+\.\d+-slim-\w+", base)
    assert {rest.split()[0] for word, rest in dockerfile(name) if word == "FROM"} == {"${BASE}"}
    for word, rest in dockerfile(name):
        if word == "COPY" and "--from" not in rest:
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), f"{source} is copied and is not there"
    assert last(name, "STOPSIGNAL") == "SIGTERM"
    assert (IMAGES / f"{name}.Dockerfile.dockerignore").exists()


def test_the_supervisors_image_is_not_roots_and_the_launcher_is_the_first_process_of_the_other() -> None:
    assert last("supervisor", "USER") == "65532:65532"
    assert json.loads(last("workload", "ENTRYPOINT")) == ["python3", "/opt/resiliency/launcher.py"]


def test_extras_are_resolved_without_the_base() -> None:
    argv = [sys.executable, str(IMAGES / "requirements.py"), "supervisor", "nemo", "bogus"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    names = {re.split(r"[<>=~ \[]", line)[0] for line in done.stdout.splitlines()}
    assert {"grpcio", "protobuf", "torch", "nvidia-resiliency-ext", "nemo_toolkit"} <= names
    assert names & {"resiliency", "matplotlib", "tqdm"} == set()
    assert "this release has no extra 'bogus'" in done.stderr


def test_chart_and_images_are_of_this_release() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == resiliency.__version__
    for name in ("supervisor", "workload"):
        assert f":{resiliency.__version__} ." in (IMAGES / f"{name}.Dockerfile").read_text()


def install(name: str, tmp_path: Path, extras: str = "") -> Path:
    """The interpreter of an image's environment, made by the step that makes it there.

    Args:
        extras: its build argument EXTRAS.
    """
    (command,) = [
        rest for word, rest in dockerfile(name) if word == "RUN" and "deploy/images/install" in rest
    ]
    environment, source = tmp_path / "venv", tmp_path / "src"
    assert " /opt/venv " in command
    ignored = (IMAGES / f"{name}.Dockerfile.dockerignore").read_text().split()
    shutil.copytree(
        ROOT, source, ignore=shutil.ignore_patterns(*(one.removeprefix("**/") for one in ignored))
    )
    command = command.replace("/opt/venv", str(environment)).replace("${EXTRAS}", extras)
    done = subprocess.run(
        ["sh", "-c", command], cwd=source, capture_output=True, text=True, timeout=INSTALL_S, check=False
    )
    if done.returncode and re.search(r"ConnectionError|NewConnectionError|Temporary failure", done.stderr):
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr[-2000:]
    return environment / "bin" / "python3"


@pytest.mark.network
@pytest.mark.slow
def test_the_workloads_image_installs_trains_and_ends_in_order(tmp_path: Path) -> None:
    """At the size for plain torch programs; NeMo's is the same steps with more packages."""
    python = install("workload", tmp_path, "launch checkpoint")
    (launcher,) = [source for source, target in copied("workload") if target == "/opt/resiliency/"]
    home = tmp_path / "opt"
    home.mkdir()
    shutil.copy(ROOT / launcher, home)
    entry = [str(python), str(home / launcher)]
    assert json.loads(last("workload", "ENTRYPOINT"))[1] == f"/opt/resiliency/{launcher}"
    env = {"PYTHONPATH": None, "RESILIENCY_RUN_DIR": str(tmp_path / "run")}
    with Program([*entry, *json.loads(last("workload", "CMD"))], env=env, cwd=home, cold=True) as program:
        assert program.wait(timeout=INSTALL_S) == 0

    train = tmp_path / "train.py"
    train.write_text(
        "import signal, sys, torch, resiliency.checkpoint\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        "print('trains with', torch.ones(2).sum().item(), flush=True)\n"
        "signal.pause()\n"
    )
    flags = [
        "--nnodes=1",
        "--nproc-per-node=1",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{free_port()}",
    ]
    argv = [*entry, *flags, str(train)]
    with Program(argv, env=env, cwd=home, log=tmp_path / "log.txt", cold=True) as program:
        program.wait_for_line("trains with 2.0", timeout=INSTALL_S)
        program.signal(15)
        assert program.wait(timeout=INSTALL_S) == 0


def copied(name: str) -> list[tuple[str, str]]:
    """Single files of this repository that are copied into the last stage, and where to."""
    words = [rest.split() for word, rest in dockerfile(name) if word == "COPY" and "--from" not in rest]
    return [(one[0], one[1]) for one in words if one[0].endswith(".py")]


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.leaks("descriptors", reason="gRPC's own pollers")
def test_the_supervisors_image_installs_runs_is_healthy_and_ends_in_order(tmp_path: Path) -> None:
    python = install("supervisor", tmp_path)
    listed = subprocess.run(
        [str(python), "-m", "pip", "list", "--format=json"], capture_output=True, check=True, timeout=60
    )
    names = {one["name"].lower() for one in json.loads(listed.stdout)}
    assert {"resiliency", "grpcio", "protobuf", "nvidia-ml-py"} <= names
    assert names & {"torch", "numpy", "matplotlib", "nvidia-resiliency-ext"} == set()

    argv = [str(python), "-m", "supervisor.host_daemon", "--help"]
    helped = subprocess.run(argv, cwd=tmp_path, capture_output=True, timeout=60, check=False)
    assert helped.returncode == 0, helped.stderr

    entry = json.loads(last("supervisor", "CMD"))
    assert entry[0] == "python3"
    ports = free_ports(4)
    env = {
        **{f"{part}_ADDRESS": f"127.0.0.1:{port}" for part, port in zip(PARTS, ports, strict=False)},
        "SUPERVISOR_PLAINTEXT": "1",
        "PYTHONPATH": None,
    }
    flags = [f"--status-port={ports[3]}", f"--state-dir={tmp_path / 'state'}"]
    argv = [str(python), *entry[1:], *flags]
    health = re.search(r"CMD (\[.*\])$", last("supervisor", "HEALTHCHECK"))
    assert health is not None
    with Program(argv, env=env, cwd=tmp_path, log=tmp_path / "log.txt", cold=True) as program:
        program.wait_for_line("actuator ready", timeout=60)
        # In a container it is process 1, and the check has its environment.
        probe = [str(python), *json.loads(health[1])[1:], str(program.pid)]
        own = {**os.environ, **{name: text for name, text in env.items() if text is not None}}

        def is_well() -> bool:
            done = subprocess.run(probe, capture_output=True, timeout=60, check=False, env=own, cwd=tmp_path)
            return done.returncode == 0

        wait_until(is_well, "the health check of the image fails")
        with urllib.request.urlopen(f"http://127.0.0.1:{ports[3]}/metrics", timeout=10) as answer:
            assert b"resiliency_supervisor_info" in answer.read()
        program.signal(15)
        assert program.wait(timeout=60) == 0
    assert not is_well()


PARTS = ("SENSOR", "CONTROLLER", "ACTUATOR")
