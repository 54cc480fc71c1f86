# SPDX-License-Identifier: Apache-2.0
"""What a new operator is told who has forgotten a part of the page."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from supervisor.entry import explained
from supervisor.orchestrators import local
from supervisor.orchestrators.ray.__main__ import main as ray_main
from tests.ports import free_port
from tests.supervisor_plane.plane import ROOT


def test_an_operator_who_has_started_no_supervisor_is_told_that_nothing_listens() -> None:
    asked = ["status", "--plaintext", f"--controller=127.0.0.1:{free_port()}"]
    kept = {name: text for name, text in os.environ.items() if not name.startswith("SUPERVISOR_")}
    argv = [sys.executable, "-m", "supervisor", *asked]
    done = subprocess.run(argv, cwd=ROOT, env=kept, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "Nothing listens there: is it started, and is that its address?" in done.stderr


@pytest.mark.parametrize("stop", [local.main, ray_main], ids=["local", "ray"])
def test_a_fleet_that_is_not_there_is_not_said_to_have_ended(
    stop: object, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_CLIENT_MODE", "0")  # Ray sets it when it is imported
    assert callable(stop)
    assert stop([f"--stop={tmp_path / 'flet'}"]) == 1
    assert f"no directory {tmp_path / 'flet'}: give the fleet's --state-dir" in capsys.readouterr().err


def test_without_ray_there_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert ray_main([f"--stop={tmp_path}"]) == 1
    assert "pip install 'resiliency[supervisor,ray]'" in capsys.readouterr().err


def test_a_missing_package_has_the_name_that_pip_knows(capsys: pytest.CaptureFixture[str]) -> None:
    def run() -> int:
        raise ModuleNotFoundError("No module named 'google'", name="google.protobuf")

    assert explained(run) == 2
    assert "the supervisor needs protobuf." in capsys.readouterr().err
