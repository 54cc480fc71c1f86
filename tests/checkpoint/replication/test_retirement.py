# SPDX-License-Identifier: Apache-2.0
"""Copies of other hosts' checkpoints: which go, and when, also those of hosts that left the job."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from resiliency.checkpoint.format.catalog import steps_in
from resiliency.checkpoint.replication.completion import SaveName
from resiliency.checkpoint.replication.replica_store import ReplicaStore
from resiliency.checkpoint.replication.retirement import retire_replicas, retire_replicas_alone
from resiliency.checkpoint.storage.posix import LocalStorage
from tests.checkpoint.peer_builders import commit_step, save_name


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """A host that has saved steps 10 and 20 alone, and keeps what others saved before."""
    for step in (10, 20):
        commit_step(LocalStorage(tmp_path), step, ranks=(0, 1))
    for source_host, run_id in (("gone", "run"), ("stranger", "another")):
        for step in (5, 15):
            commit_step(replicas(tmp_path, source_host), step, attempt_id="before", run_id=run_id)
    return tmp_path


def replicas(local: Path, source_host: str) -> LocalStorage:
    return LocalStorage(local / "replicas" / source_host)


def retire(local: Path, below: int, newest: str = "") -> dict[str, list[int]]:
    store, own = ReplicaStore(local), LocalStorage(local)
    return dict(retire_replicas(store, own, SaveName(20, newest or save_name(20)), below=below))


def retire_alone(local: Path, complete: Mapping[int, str], keep: int) -> dict[str, list[int]]:
    return dict(retire_replicas_alone(local, complete, keep=keep))


def test_copies_of_the_run_go_whoever_owns_them_and_those_of_others_stay(local: Path) -> None:
    assert retire(local, 10) == {"gone": [5], "stranger": []}
    assert retire(local, 20) == {"gone": [15], "stranger": []}
    assert steps_in(replicas(local, "stranger")) == [5, 15]


@pytest.mark.parametrize("how", ["replaced", "deleted", "unfinished"])
def test_nothing_goes_without_the_own_part_of_the_complete_save(local: Path, how: str) -> None:
    own = LocalStorage(local)
    if how == "deleted":
        own.remove_tree("step=20")
    elif how == "unfinished":
        (local / "step=20-unfinished").touch()
    newest = "later-20" if how == "replaced" else ""
    assert retire(local, 20, newest) == {}
    assert retire_alone(local, {20: newest or save_name(20)}, 1) == {}
    assert steps_in(replicas(local, "gone")) == [5, 15]


def test_an_owner_whose_copies_cannot_be_deleted_keeps_those_of_others_from_nothing(local: Path) -> None:
    (local / "replicas" / "first" / "step=5-unfinished").mkdir(parents=True)  # what no agent ever made
    assert retire(local, 10) == {"gone": [5], "stranger": []}


def test_a_host_alone_keeps_as_many_generations_as_it_was_told(local: Path) -> None:
    assert retire_alone(local, {10: save_name(10)}, 2) == {}
    assert retire_alone(local, {10: save_name(10), 20: save_name(20)}, 2) == {"gone": [5], "stranger": []}
    assert retire_alone(local, {10: save_name(10), 20: save_name(20)}, 1) == {"gone": [15], "stranger": []}


def test_while_other_hosts_have_parts_this_is_left_to_the_service(local: Path) -> None:
    commit_step(LocalStorage(local), 30, ranks=(0, 1), world_size=4)
    assert retire_alone(local, {30: save_name(30)}, 1) == {}
    assert steps_in(replicas(local, "gone")) == [5, 15]


def test_a_host_that_never_had_copies_has_no_directory_of_them_afterwards(tmp_path: Path) -> None:
    commit_step(LocalStorage(tmp_path), 20)
    assert retire_alone(tmp_path, {20: save_name(20)}, 1) == {}
    assert not (tmp_path / "replicas").exists()
