# SPDX-License-Identifier: Apache-2.0
"""A file that is written durably is the old or the new one after a kill, and nothing is left beside it."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from resiliency.files import write_durably
from resiliency.testing import warm

#: Killed just before or just after one of its calls of a function in `os`.
WRITES = """
import os, signal, sys
from resiliency.files import write_durably

path, call, moment = sys.argv[1:]
original = getattr(os, call)

def replacement(*args):
    if moment == "after":
        original(*args)
    os.kill(os.getpid(), signal.SIGKILL)

setattr(os, call, replacement)
write_durably(path, b"new" * 1000)
"""


@pytest.mark.parametrize(
    ("call", "moment", "expected"),
    [("fsync", "before", b"old"), ("replace", "before", b"old"), ("replace", "after", b"new" * 1000)],
)
@pytest.mark.parametrize("existed", [True, False], ids=["replacing", "creating"])
def test_a_writer_killed_at_any_point_leaves_the_whole_old_or_the_whole_new_file(
    call: str, moment: str, expected: bytes, existed: bool, tmp_path: Path
) -> None:
    path = tmp_path / "manifest.json"
    if existed:
        path.write_bytes(b"old")
    done = warm.run([sys.executable, "-c", WRITES, str(path), call, moment], timeout=60)
    assert done.returncode == -signal.SIGKILL
    if expected == b"old" and not existed:
        assert not path.exists()
    else:
        assert path.read_bytes() == expected
    write_durably(path, b"next")
    assert [(left.name, left.read_bytes()) for left in tmp_path.iterdir()] == [("manifest.json", b"next")]


def test_writing_again_replaces_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    write_durably(tmp_path / "file", b"one")
    write_durably(tmp_path / "file", b"two")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"two"]
