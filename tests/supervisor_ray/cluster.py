# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of this machine, as a test holds it."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.waiting import WAIT_S


class Cluster:
    """The program in `cluster_program`, line by line."""

    def __init__(self, log: Path) -> None:
        self._errors = log.open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.supervisor_ray.cluster_program"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
            start_new_session=True,
        )
        self._buffer = b""
        self.address = str(self._read("address"))

    def add(self) -> None:
        """Add a node."""
        self._ask("add")

    def remove(self, node: str) -> None:
        """Remove the node with this id of Ray's."""
        self._ask(f"remove {node}")

    def _ask(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        self._process.stdin.flush()
        self._read("nodes")

    def _read(self, field: str) -> Any:
        """The value of `field` in the next line that has it; Ray prints there, too."""
        assert self._process.stdout is not None
        end = time.monotonic() + WAIT_S
        while True:
            while b"\n" not in self._buffer:
                left = end - time.monotonic()
                ready, _, _ = select.select([self._process.stdout], [], [], max(left, 0.0))
                block = os.read(self._process.stdout.fileno(), 1 << 16) if ready else b""
                assert block, (
                    f"the cluster does not say {field}: {Path(self._errors.name).read_text()[-3000:]}"
                )
                self._buffer += block
            line, _, self._buffer = self._buffer.partition(b"\n")
            if line.startswith(b'{"' + field.encode()):
                return json.loads(line)[field]

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(WAIT_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()
            self._errors.close()


@contextmanager
def ray_cluster(directory: Path) -> Iterator[Cluster]:
    """One with room for three hosts: a head without, and three nodes."""
    started = Cluster(directory / "cluster.log")
    try:
        for _ in range(3):
            started.add()
        yield started
    finally:
        started.close()
