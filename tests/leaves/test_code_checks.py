# SPDX-License-Identifier: Apache-2.0
"""The scripts that look at the code itself find what they are for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def run(script: str, *argv: str) -> tuple[int, list[str]]:
    done = subprocess.run([sys.executable, SCRIPTS / script, *argv], capture_output=True, text=True)
    assert not done.stderr
    return done.returncode, done.stdout.splitlines()


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_what_only_tests_use_is_found(tmp_path: Path) -> None:
    write(
        tmp_path,
        "resiliency/a.py",
        "import library\n"
        "def used(): pass\n"
        "def told_of(): pass\n"
        "def alone(): alone()\n"
        "class Ours:\n    def meant(self): return used()\n    def spare(self): pass\n"
        "class Theirs(library.Base):\n    def on_call(self): Ours().meant()\n"
        "class More(Theirs):\n    def on_another(self): pass\n"
        "__all__ = ['More']\n",
    )
    write(tmp_path, "tests/test_a.py", "from resiliency.a import alone, Ours\nalone()\nOurs().spare()\n")
    write(tmp_path, "README.md", "Call `told_of()`.")
    status, lines = run("unused.py", str(tmp_path))
    assert status == 1
    named = [line.partition(": ")[2] for line in lines if line.startswith("resiliency")]
    assert named == ["alone", "Ours.spare"]


def test_class_names_that_are_there_twice_and_full_folders_are_found(tmp_path: Path) -> None:
    write(tmp_path, "resiliency/a.py", "class _One: pass\nclass Two: pass\n")
    write(tmp_path, "resiliency/b/c.py", "def f():\n    class _One: pass\n")
    for number in range(17):
        write(tmp_path, f"supervisor/m{number}.py", "")
    write(tmp_path, "supervisor/__init__.py", "")
    status, lines = run("structure.py", "--classes", "--folders", "--root", str(tmp_path))
    assert status == 1
    assert lines[:2] == ["_One: resiliency/a.py:1, resiliency/b/c.py:2", "supervisor: 17 modules, 16 at most"]
