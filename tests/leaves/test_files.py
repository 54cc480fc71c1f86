# SPDX-License-Identifier: Apache-2.0
"""A file that is written durably is the old or the new one after a kill, and nothing is left beside it."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import resiliency
from resiliency.errors import ConfigError
from resiliency.files import matching, posix_path, write_durably
from resiliency.testing import warm
from tests.checkpoint.storage_builders import no_descriptor_left

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


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("s3://bucket/run", "found the URL 's3://bucket/run'"),
        (Path("s3://bucket/run"), "found the URL 's3:/bucket/run'"),
        ("file:///ckpt", "found the URL"),
        ("/ckpt/gs://bucket", "found the URL"),
        ("~/ckpt", "a directory called '~'"),
        ("~ann/ckpt", "a directory called '~ann'"),
        ("", "need the path of a directory, found ''"),
        ("a\0b", "need the path of a directory"),
        (b"/ckpt", "need the path of a directory, found b'/ckpt'"),
        (7, "need the path of a directory, found 7"),
    ],
)
def test_what_is_no_path_of_a_file_system_is_refused_by_name(path: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(why)):
        posix_path(path)


@pytest.mark.parametrize("path", ["/ckpt", "runs/a:b", "c:/runs", "/ckpt/s3:/x", ".", "run~1", Path("x")])
def test_any_other_path_is_taken_as_it_is(path: str | Path) -> None:
    assert posix_path(path) == Path(path)


def test_a_directory_that_cannot_be_read_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    for name in ("rank-0", "rank-1", "other"):
        (tmp_path / name).touch()
    assert sorted(matching(tmp_path, "rank-*")) == [tmp_path / "rank-0", tmp_path / "rank-1"]
    assert matching(tmp_path / "none", "*") == matching(tmp_path / "other", "*") == []
    with no_descriptor_left(), pytest.raises(OSError, match="Too many open files"):
        matching(tmp_path, "rank-*")


def test_nothing_that_decides_over_checkpoints_uses_glob() -> None:
    """From Python 3.12 on `Path.glob` finds nothing where it should say that it cannot look."""
    package = Path(resiliency.__file__).parent
    sources = sorted((package / "checkpoint").rglob("*.py"))
    assert len(sources) > 100
    assert [str(path) for path in sources if re.search(r"\.r?glob\(", path.read_text())] == []
