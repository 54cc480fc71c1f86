# SPDX-License-Identifier: Apache-2.0
"""What an agent does for other hosts, and what it tells its ranks of that, with real services and disks."""

from __future__ import annotations

import errno
import os
import queue
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from resiliency.checkpoint.agent.peers import Replication
from resiliency.checkpoint.agent.protocol import Attach, Repair, RepairDone, Settings
from resiliency.checkpoint.replication.placement import Peer
from resiliency.checkpoint.storage.posix import LocalStorage
from tests.checkpoint.peer_builders import LONG_S, commit_step, save_name, table_of, tree
from tests.checkpoint.storage_builders import no_descriptor_left
from tests.waiting import wait_until

SESSION = "now"


class Host:
    """The agent of host `name` as far as it deals with others."""

    def __init__(self, root: Path, name: str, rank: int, *, address: str = "127.0.0.1") -> None:
        self.name = name
        self.disk = root / name
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.replication = Replication(root / f"arena-{name}", lambda: self._news.put(None))
        settings = Settings(
            directory="",
            keep=1,
            replicated=False,
            bytes_per_s=0,
            save_timeout_s=60.0,
            local_directory=str(self.disk),
            replicas=1,
        )
        self.attach = Attach(
            rank=rank,
            world_size=2,
            local_ranks=(rank,),
            run_id="run",
            attempt_id=SESSION,
            host=name,
            peer_address=address,
            settings=settings,
        )
        self.replication.begin_attempt(self.attach)

    def answers(self, count: int) -> list[RepairDone]:
        """What the ranks hear of repairs."""
        found: list[RepairDone] = []
        while len(found) < count:
            self._news.get(timeout=LONG_S)
            found += [event for event in self.replication.take_events() if isinstance(event, RepairDone)]
        return found


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    """Two hosts that know each other."""
    both = Host(tmp_path, "a", 0), Host(tmp_path, "b", 1)
    peers = [Peer(host=host.name, address="127.0.0.1", port=host.replication.port) for host in both]
    table_of(peers, attempt_id=SESSION).write(tmp_path / "table")
    for host in both:
        host.replication.learn(tmp_path / "table")
    yield both
    for host in both:
        host.replication.close()


def test_a_table_that_could_not_be_read_for_want_of_descriptors_is_read_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as stack:
        a, b = Host(tmp_path, "a", 0), Host(tmp_path, "b", 1)
        peers = [Peer(host=host.name, address="127.0.0.1", port=host.replication.port) for host in (a, b)]
        for host in (a, b):
            stack.callback(host.replication.close)
        table_of(peers, attempt_id=SESSION).write(tmp_path / "table")
        b.replication.learn(tmp_path / "table")
        with no_descriptor_left():
            a.replication.learn(tmp_path / "table")
            a.replication.look_again()
        assert caplog.text.count("nothing is copied to other hosts for now") == 1
        a.replication.look_again()
        commit_step(LocalStorage(a.disk), 7, attempt_id="before")
        a.replication.repair(repair_of(7, a.disk))
        assert a.answers(1) == [RepairDone(attempt_id=SESSION, repair=repair_of(7, a.disk))]


def repair_of(step: int, root: Path, target: str = "b") -> Repair:
    return Repair(
        step=step, save_id=save_name(step, "before"), source_host="a", root=str(root), target=target
    )


def test_a_repair_that_was_done_before_is_done_at_once_and_changes_nothing(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    commit_step(LocalStorage(a.disk), 7, attempt_id="before")
    repair = repair_of(7, a.disk)
    a.replication.repair(repair)
    assert a.answers(1) == [RepairDone(attempt_id=SESSION, repair=repair)]
    copy = tree(b.disk / "replicas" / "a")
    assert copy == tree(a.disk)
    for _ in range(2):  # an agent and its successor
        a.replication.repair(repair)
    assert a.answers(2) == [RepairDone(attempt_id=SESSION, repair=repair)] * 2
    assert tree(b.disk / "replicas" / "a") == copy


def opened_for_writing(fifo: Path) -> int | None:
    """None while nobody reads there."""
    try:
        return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return None


def test_the_end_of_a_repair_is_told_to_those_who_asked_and_not_to_the_ranks_of_a_later_start(
    tmp_path: Path, hosts: tuple[Host, Host]
) -> None:
    a, _ = hosts
    hanging = tmp_path / "hanging" / "step=7" / "manifest.json"  # as a disk does
    hanging.parent.mkdir(parents=True)
    os.mkfifo(hanging)
    a.replication.repair(repair_of(7, tmp_path / "hanging"))
    pipe = wait_until(lambda: opened_for_writing(hanging), "nobody reads what is to be sent")
    a.replication.begin_attempt(replace(a.attach, attempt_id="later"))
    hanging.unlink()
    os.close(pipe)
    asked_later = repair_of(8, a.disk)
    a.replication.repair(asked_later)
    (answer,) = a.answers(1)
    assert (answer.attempt_id, answer.repair) == ("later", asked_later)


def test_a_repair_that_cannot_be_done_is_reported_with_the_reason(
    tmp_path: Path, hosts: tuple[Host, Host]
) -> None:
    gone, unknown = repair_of(8, hosts[0].disk), repair_of(7, hosts[0].disk, target="c")
    commit_step(LocalStorage(hosts[0].disk), 7, attempt_id="before")
    for repair in (gone, unknown):
        hosts[0].replication.repair(repair)
    answers = hosts[0].answers(2)
    assert [answer.repair for answer in answers] == [gone, unknown]
    assert "step=8" in answers[0].error
    assert "'c' is no host of the attempt" in answers[1].error
    cut_off = Host(tmp_path, "d", 0, address="192.0.2.1")  # no address of this machine
    cut_off.replication.repair(unknown)
    (answer,) = cut_off.answers(1)
    assert "do not reach each other" in answer.error
    cut_off.replication.close()
