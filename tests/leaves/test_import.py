# SPDX-License-Identifier: Apache-2.0
"""Importing the package and its leaves is cheap and has no effects."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROBE = """
import json, os, sys, threading, time
before, fds, env = set(sys.modules), os.listdir("/proc/self/fd"), dict(os.environ)
import logging
handlers = list(logging.getLogger().handlers)
start = time.process_time()
for name in sys.argv[1:]:
    __import__(name)
took = time.process_time() - start
print(json.dumps({
    "seconds": took,
    "heavy": sorted({m.partition(".")[0] for m in set(sys.modules) - before}
                    & {"torch", "numpy", "psutil", "pytest", "matplotlib", "tqdm", "nemo", "lightning"}),
    "effects": [len(os.listdir("/proc/self/fd")) != len(fds), dict(os.environ) != env,
                threading.active_count() != 1, logging.getLogger().handlers != handlers],
}))
"""
LEAVES = ["resiliency.errors", "resiliency.events", "resiliency.runtime", "resiliency.log"]


@pytest.mark.parametrize(
    ("modules", "limit_s"),
    [(["resiliency"], 0.05), (LEAVES, 0.5), (["resiliency.testing", "resiliency.testing.rank_pool"], 0.5)],
    ids=["package", "leaves", "testing"],
)
def test_importing_is_cheap_and_changes_nothing(modules: list[str], limit_s: float) -> None:
    argv = [sys.executable, "-W", "error", "-c", PROBE, *modules]
    # The best of a few: a busy machine makes one slow, never all of them.
    runs = [json.loads(subprocess.run(argv, capture_output=True, check=True).stdout) for _ in range(3)]
    assert runs[0]["heavy"] == []
    assert not any(runs[0]["effects"]), "files, environment, threads, log handlers"
    assert min(run["seconds"] for run in runs) < limit_s
