# SPDX-License-Identifier: Apache-2.0
"""A worker of the agent outlives what goes wrong with one of its jobs."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path

import pytest

from resiliency.checkpoint.jobs import CleanJob
from resiliency.checkpoint.marker import Marker, MarkerState, put_marker
from resiliency.checkpoint.persist import Worker
from resiliency.checkpoint.storage import LocalStorage
from resiliency.checkpoint.tiers import TierName
from resiliency.checkpoint.wire import Settings


def test_a_job_that_fails_as_nobody_foresaw_does_not_keep_the_next_one_from_being_done(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put_marker(LocalStorage(tmp_path), 3, Marker(state=MarkerState.REMOVING))
    worker = Worker(TierName.PERSISTENT, lambda job, done: None, threading.Event())
    for directory in ("no\0path", str(tmp_path)):
        settings = Settings(directory=directory, keep=1, replicated=False, bytes_per_s=0, save_timeout_s=60)
        assert worker.try_put(CleanJob(settings=settings))
    worker.close(timedelta(seconds=60))
    assert "a job of the persistent tier failed" in caplog.text
    assert list(tmp_path.iterdir()) == []
