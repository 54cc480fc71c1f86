# SPDX-License-Identifier: Apache-2.0
"""The steps of the images, taken in a fresh environment: CI has no container engine."""

from __future__ import annotations

import json
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
from tests.ports import free_ports
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


@pytest.mark.slow
@pytest.mark.leaks("descriptors", reason="gRPC's own pollers")
def test_the_supervisors_image_installs_runs_is_healthy_and_ends_in_order(tmp_path: Path) -> None:
    command = next(rest for word, rest in dockerfile("supervisor") if word == "RUN")
    script, target, *extras = command.split()
    environment, source = tmp_path / "venv", tmp_path / "src"
    assert target == "/opt/venv"
    ignored = (IMAGES / "supervisor.Dockerfile.dockerignore").read_text().split()
    shutil.copytree(
        ROOT, source, ignore=shutil.ignore_patterns(*(one.removeprefix("**/") for one in ignored))
    )
    done = subprocess.run(
        [str(source / script), str(environment), *extras],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=INSTALL_S,
        check=False,
    )
    if done.returncode and re.search(r"ConnectionError|NewConnectionError|Temporary failure", done.stderr):
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr[-2000:]
    python = environment / "bin" / "python3"
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
    probe = [str(python), *json.loads(health[1].replace("60064", str(ports[3])))[1:]]
    with Program(argv, env=env, cwd=tmp_path, log=tmp_path / "log.txt", cold=True) as program:
        program.wait_for_line("actuator ready", timeout=60)
        wait_until(
            lambda: subprocess.run(probe, capture_output=True, timeout=60, check=False).returncode == 0,
            "the health check of the image fails",
        )
        with urllib.request.urlopen(f"http://127.0.0.1:{ports[3]}/metrics", timeout=10) as answer:
            assert b"resiliency_supervisor_info" in answer.read()
        program.signal(15)
        assert program.wait(timeout=60) == 0
    assert subprocess.run(probe, capture_output=True, timeout=60, check=False).returncode != 0


PARTS = ("SENSOR", "CONTROLLER", "ACTUATOR")
