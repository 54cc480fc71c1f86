# SPDX-License-Identifier: Apache-2.0
"""A worker of the agent outlives what goes wrong with one of its jobs."""

from __future__ import annotations

import errno
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from resiliency.checkpoint.agent import tier_writers
from resiliency.checkpoint.agent.jobs import RefuseJob, SaveJob, ShowJob
from resiliency.checkpoint.agent.protocol import Done, Settings
from resiliency.checkpoint.agent.tier_writers import Worker
from resiliency.checkpoint.commit.commit import open_save
from resiliency.checkpoint.commit.retention import BEING_TAKEN
from resiliency.checkpoint.format.manifest import save_folder
from resiliency.checkpoint.format.marker import MarkerState, put_marker, try_read_marker
from resiliency.checkpoint.names import TierName
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.checkpoint.storage.throttle import Throttle
from tests.waiting import wait_until


def settings_of(directory: Path | str, save_timeout_s: float = 60) -> Settings:
    return Settings(
        directory=str(directory), keep=1, replicated=False, bytes_per_s=0, save_timeout_s=save_timeout_s
    )


def save_job(directory: Path, rank: int = 0, *, world_size: int = 2, save_timeout_s: float = 60) -> SaveJob:
    return SaveJob(
        tier=TierName.PERSISTENT,
        step=2,
        attempt_id="s",
        run_id="run",
        world_size=world_size,
        ranks=(rank,),
        settings=settings_of(directory, save_timeout_s),
    )


def test_a_job_that_fails_as_nobody_foresaw_does_not_keep_the_next_one_from_being_done(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put_marker(LocalStorage(tmp_path), 3, BEING_TAKEN)
    worker = Worker(TierName.PERSISTENT, lambda job, done: None, Throttle())
    for directory in ("no\0path", str(tmp_path)):
        assert worker.try_put(ShowJob(settings=settings_of(directory)))
    worker.close(timedelta(seconds=60))
    assert "a job of the persistent tier failed" in caplog.text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rank", [0, 1], ids=["leader", "follower"])
def test_a_follower_whose_refusal_waited_for_long_still_tells_a_leader_that_waits(
    tmp_path: Path, rank: int
) -> None:
    storage = LocalStorage(tmp_path)
    job = replace(save_job(tmp_path, rank), queued=time.monotonic() - 61)
    open_save(storage, 2, job.save_id, 1)
    storage.create("step=2/of-somebody").close()
    worker = Worker(TierName.PERSISTENT, lambda job, done: None, Throttle())
    assert worker.try_put(RefuseJob(save=job, why="no space"))
    worker.close(timedelta(seconds=60))
    # A leader that is so late clears nothing any more.
    folder = save_folder(job.save_id, 1)
    assert storage.list("step=2") == ["of-somebody", folder]
    assert storage.list(f"step=2/{folder}") == (["rank=1.failed"] if rank else [])


def test_a_save_that_fails_before_its_commit_tells_the_other_hosts_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(storage: object) -> None:
        raise OSError(errno.ESTALE, "stale")

    monkeypatch.setattr(tier_writers, "free_failed", fail)
    job = save_job(tmp_path)
    reports: list[Done] = []
    worker = Worker(TierName.PERSISTENT, lambda job, done: reports.append(done), Throttle())
    assert worker.try_put(job)
    wait_until(lambda: reports, "the save is not reported")
    worker.close(timedelta(seconds=60))
    assert ["stale" in done.error for done in reports] == [True]
    marker = try_read_marker(LocalStorage(tmp_path), 2)
    assert marker is not None
    assert (marker.state, marker.save_id) == (MarkerState.FAILED, job.save_id)


def test_a_save_whose_slot_cannot_be_given_back_is_reported_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(job: SaveJob) -> None:
        raise OSError(errno.EIO, "device")

    monkeypatch.setattr(SaveJob, "give_back", fail)
    job = save_job(tmp_path, world_size=1, save_timeout_s=0.1)
    reports: list[Done] = []
    worker = Worker(TierName.PERSISTENT, lambda job, done: reports.append(done), Throttle())
    assert worker.try_put(job)
    worker.close(timedelta(seconds=60))
    assert [done.step for done in reports] == [2]
    assert not worker.is_saving("s")
