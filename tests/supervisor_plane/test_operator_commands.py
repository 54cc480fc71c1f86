# SPDX-License-Identifier: Apache-2.0
"""The command line of operators and the page, with a real controller."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from supervisor.view.status import Status
from tests.supervisor_plane.plane import PATIENCE_S, ROOT, Plane, open_plane

pytestmark = pytest.mark.leaks("descriptors", reason="gRPC's own pollers")


def operate(plane: Plane, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "supervisor", *words, "--plaintext", "--controller", plane.address]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE_S)


def test_a_person_freezes_looks_and_thaws_and_the_page_and_the_metrics_say_so(tmp_path: Path) -> None:
    with open_plane(tmp_path) as (plane, _):
        program = plane.start("all")
        page = program.wait_for_line(r"status page at (http://127\.0\.0\.1:\d+)/", timeout=PATIENCE_S)[1]

        def fetch(path: str) -> str:
            with urllib.request.urlopen(f"{page}{path}", timeout=PATIENCE_S) as answer:  # noqa: S310
                return str(answer.read().decode())

        done = operate(plane, "freeze", "--by", "ann", "--why", "a switch is replaced")
        assert (done.returncode, done.stdout, done.stderr) == (0, "freeze logged\n", "")
        assert "! Frozen by ann" in operate(plane, "status").stdout
        assert "a switch is replaced" in operate(plane, "history").stdout
        plane.wait_for(lambda seen: seen.frozen_by == "ann", "not frozen")
        assert fetch("/healthz") == "ok\n"
        assert 'resiliency_supervisor_frozen{cause="operator"} 1\n' in fetch("/metrics")
        assert "Frozen by ann" in fetch("/")
        assert operate(plane, "thaw").returncode == 0
        assert not Status.from_dict(json.loads(operate(plane, "status", "--json").stdout)).frozen
        refused = operate(plane, "drain", "nowhere")
        assert (refused.returncode, refused.stdout) == (1, "")
        assert "no host has the id or the name 'nowhere'" in refused.stderr
        program.kill()
        gone = operate(plane, "status", "--timeout", "2")
        assert (gone.returncode, gone.stdout) == (1, "")
        assert "Traceback" not in gone.stderr
