# SPDX-License-Identifier: Apache-2.0
"""Control groups of the kernel for tests that need a real one."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.waiting import wait_until


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """A memory group with a limit, of version 1 or 2; skips the test where this user may make none."""
    group = _make("memory", "memory.limit_in_bytes", limit_bytes) or _make("", "memory.max", limit_bytes)
    if group is None:
        pytest.skip("this user may make no memory group")
    try:
        yield group
    finally:
        wait_until(lambda: _removed(group), f"{group} is not empty")


def inside(group: Path, argv: Sequence[str]) -> list[str]:
    """The command that runs `argv` as a member of the group."""
    return ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *argv]


def _make(root: str, limit: str, limit_bytes: int) -> Path | None:
    group = Path("/sys/fs/cgroup", root, f"resiliency-test-{secrets.token_hex(4)}")
    with suppress(OSError):
        group.mkdir()
        try:
            (group / limit).write_text(str(limit_bytes))
            return group
        except OSError:
            group.rmdir()
    return None


def _removed(group: Path) -> bool:
    with suppress(OSError):  # the last of its processes is about to be gone
        group.rmdir()
    return not group.exists()
