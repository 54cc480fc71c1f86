# SPDX-License-Identifier: Apache-2.0
"""Several hosts together: copies and completion while hosts die, stop, fill up, leave and come back."""

from __future__ import annotations

import errno
import logging
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import pytest

from resiliency.checkpoint.format.catalog import Condition, inspect, steps_in
from resiliency.checkpoint.replication.completion import MOST_INCOMPLETE, SaveName
from resiliency.checkpoint.replication.hosts import HostTable
from resiliency.checkpoint.replication.placement import Peer, choose_targets
from resiliency.checkpoint.replication.repairs import Push
from resiliency.checkpoint.replication.service import (
    Complete,
    GivenUp,
    NotRepaired,
    NotReplicated,
    PeerService,
    Repaired,
    Replicated,
)
from resiliency.checkpoint.replication.transport.connection import CallDeadline, Link
from resiliency.checkpoint.replication.transport.messages import PROTOCOL_VERSION, ConnectionRefused, Hello
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.errors import ConfigError
from resiliency.testing import warm
from resiliency.testing.leaks import open_descriptors
from resiliency.testing.processes import Command
from tests.checkpoint import peer_process
from tests.checkpoint.peer_builders import (
    LONG_S,
    QUICK,
    SESSION,
    Host,
    commit_step,
    save_name,
    table_of,
    tree,
)
from tests.checkpoint.storage_builders import no_descriptor_left
from tests.waiting import wait_until

Start = Callable[..., list[Host]]
_E = TypeVar("_E")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Hosts of one session in this process; the first leads."""
    with ExitStack() as stack:

        def hosts(*names: str, timeouts: CallDeadline = QUICK, **table: object) -> list[Host]:
            made = []
            for name in names:
                made.append(Host(name, tmp_path / name, timeouts=timeouts))
                stack.callback(made[-1].service.close)
            everybody = table_of([host.peer for host in made], **table)  # type: ignore[arg-type]
            for host in made:
                host.service.update(everybody)
            return made

        yield hosts


def wait_for_count(leader: Host, step: int) -> None:
    """Until the leader counts a save that a host has acknowledged, or will not; no event says so."""

    def is_counted() -> bool:
        state = leader.service._completion_link._leader_state
        return state is not None and SaveName(step, save_name(step)) in state.awaited()

    wait_until(is_counted, "the leader has not heard of it")


def replica_steps(hosts: list[Host], source_host: str) -> dict[str, list[int]]:
    """Where copies of an owner's steps are whole."""
    found = {}
    for host in hosts:
        storage = LocalStorage(host.replicas_of(source_host))
        steps = [s for s in steps_in(storage) if inspect(storage, s).condition is Condition.COMPLETE]
        if steps:
            found[host.name] = steps
    return found


def test_the_host_that_leads_makes_room_for_a_link_to_each_host_and_no_other_does(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    host = Host("h0", tmp_path)
    others = [replace(host.peer, host=f"h{number}") for number in range(1, 200)]
    try:
        for leads in (False, True):
            few = len(open_descriptors()) + 30
            resource.setrlimit(resource.RLIMIT_NOFILE, (few, limits[1]))
            peers = [host.peer, *others] if leads else [*others, host.peer]
            host.service.update(table_of(peers, attempt_id=f"session-{leads}"))
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            assert (soft - few >= 200) is leads
    finally:
        host.service.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


# --- hosts that are well --------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "replicas"), [(2, 1), (3, 1), (5, 2)])
def test_every_host_has_its_copies_elsewhere_before_a_save_is_complete(
    start: Start, count: int, replicas: int
) -> None:
    hosts = start(*(f"h{number}" for number in range(count)), replicas=replicas)
    for number, host in enumerate(hosts):
        host.save(10, ranks=(2 * number, 2 * number + 1), world_size=2 * count)
    for host in hosts:
        copies = host.wait_for(Replicated, 10).hosts
        assert len(copies) == replicas
        for name in copies:
            # Beside its own, copies for others may be under way.
            own = tree(host.root, without="replicas")
            assert tree(hosts[int(name[1:])].replicas_of(host.name)) == own
    for host in hosts:
        assert host.wait_for(Complete, 10) == Complete(step=10, save_id="session-10", retire_below=10)


def test_older_replicas_go_when_the_newer_save_is_complete_on_all_hosts_and_not_before(start: Start) -> None:
    hosts = start("a", "b", "c")
    for host in hosts:
        host.save(10)
    for host in hosts:
        host.wait_for(Complete, 10)
    for host in hosts[:2]:
        host.save(20)
        host.wait_for(Replicated, 20)
    held = [steps for host in hosts for steps in replica_steps(hosts, host.name).values()]
    assert sorted(held) == [[10], [10, 20], [10, 20]]
    hosts[2].save(20)
    for host in hosts:
        host.wait_for(Complete, 20)
    for host in hosts:
        wait_until(
            lambda host=host: list(replica_steps(hosts, host.name).values()) == [[20]], "older replicas stay"
        )


def test_copies_of_hosts_that_left_the_job_go_with_the_others_and_those_of_another_job_stay(
    start: Start,
) -> None:
    hosts = start("a", "b")
    for source_host, run_id in (("left", "run"), ("stranger", "another")):
        for step in (5, 15):
            commit_step(
                LocalStorage(hosts[0].replicas_of(source_host)), step, attempt_id="before", run_id=run_id
            )
    hosts[0].save(10)
    hosts[0].wait_for(Replicated, 10)
    assert replica_steps(hosts, "left") == {"a": [5, 15]}
    hosts[1].save(10)
    for host in hosts:
        host.wait_for(Complete, 10)
    wait_until(lambda: replica_steps(hosts, "left") == {"a": [15]}, "the copies of a host that left stay")
    for host in hosts:
        host.save(20)
    wait_until(lambda: replica_steps(hosts, "left") == {}, "the copies of a host that left stay")
    assert replica_steps(hosts, "stranger") == {"a": [5, 15]}


@pytest.mark.parametrize("late", [10, 30])
def test_a_host_that_was_cut_off_hears_of_every_save_that_became_complete_meanwhile(
    start: Start, late: int
) -> None:
    """From step `late` on c had sealed what b had not, and lost its link to the leader."""
    a, b, c = hosts = start("a", "b", "c", replicas=0)
    steps = (10, 20, 30, 40)

    def save(host: Host, step: int) -> None:
        host.save(step)
        host.wait_for(Replicated, step)  # of saves that wait together, one supersedes the older ones

    for step in steps:
        for host in hosts:
            if host is not b or step < late:
                save(host, step)

    def seals_have_come() -> bool:
        leader_state = a.service._completion_link._leader_state  # nothing else tells which have
        return leader_state is not None and leader_state.awaited() == {
            SaveName(step, save_name(step)): {"b"} for step in steps if step >= late
        }

    wait_until(seals_have_come, "the leader has not heard of all")
    c.service.update(table_of([replace(a.peer, port=1), b.peer, c.peer], replicas=0))
    wait_until(lambda: c.service._completion_link._leader is None, "the link stays")
    for step in steps:
        if step >= late:
            save(b, step)
    for host in (a, b):
        host.wait_for(Complete, 40)
    c.service.update(table_of([host.peer for host in hosts], replicas=0))
    assert [c.wait_for(Complete).step for _ in steps] == list(steps)


def test_a_leader_that_was_started_anew_hears_from_the_others_what_had_been_complete(
    tmp_path: Path, start: Start
) -> None:
    """Also of saves that are on its own disk no more, as after a hand-over."""
    a, b = start("a", "b", replicas=0)
    for step in (10, 20, 30):
        for host in (a, b):
            host.save(step)
        for host in (a, b):
            host.wait_for(Complete, step)
    a.service.close()
    for step in (10, 20, 30):
        a.storage.remove_tree(f"step={step}")
    again = Host("a", tmp_path / "a")
    try:
        table = table_of([again.peer, b.peer], replicas=0)
        for host in (again, b):
            host.service.update(table)
        assert [again.wait_for(Complete).step for _ in range(3)] == [10, 20, 30]
    finally:
        again.service.close()


@pytest.mark.parametrize("full", ["a", "c"])
def test_while_a_host_saves_nothing_the_others_keep_so_many_saves_and_copies_and_go_on_with_it(
    start: Start, caplog: pytest.LogCaptureFixture, full: str
) -> None:
    """Its disk is full, say; a leads."""
    hosts = start("a", "b", "c", replicas=1)
    well = [host for host in hosts if host.name != full]
    behind = next(host for host in hosts if host.name == full)
    steps = range(10, 30, 2)
    leader = hosts[0].service._completion_link
    wait_until(lambda: len(leader._heard) == 2, "not all have joined")  # who joins later is not told for whom
    with caplog.at_level(logging.WARNING, logger="resiliency.checkpoint.replication.service"):
        for step in steps:
            behind.service.lose(step, save_name(step))
            wait_for_count(hosts[0], step)  # else it gives up another one, as if all of them were late
            for host in well:
                host.save(step)
                host.wait_for(Replicated, step)
        gone = [steps[n] for n in range(len(steps) - MOST_INCOMPLETE)]
        for host in well:
            assert [host.wait_for(GivenUp).step for _ in gone] == gone
    kept = list(steps[-MOST_INCOMPLETE:])
    for host in well:
        wait_until(
            lambda host=host: set(map(tuple, replica_steps(hosts, host.name).values())) == {tuple(kept)},
            "copies of what is given up stay",
        )
    assert {
        f"{full} has no part" in r.getMessage() for r in caplog.records if "given up" in r.getMessage()
    } == {True}
    assert sum("given up" in record.getMessage() for record in caplog.records) == len(hosts)  # once each
    behind.save(steps[-1])
    for host in hosts:
        host.wait_for(Complete, steps[-1])


def test_a_host_that_was_cut_off_hears_what_was_given_up_and_one_that_commits_it_later_still_deletes_it(
    start: Start,
) -> None:
    a, b, c = hosts = start("a", "b", "c", replicas=0)
    b.service.update(table_of([replace(a.peer, port=1), b.peer, c.peer], replicas=0))
    wait_until(lambda: b.service._completion_link._leader is None, "the link stays")
    b.save(10)
    for step in (10, 20, 30, 40, 50):
        c.service.lose(step, save_name(step))
        wait_for_count(a, step)  # else it gives up another one, as if all of them were late
        a.save(step)
        a.wait_for(Replicated, step)
    assert a.wait_for(GivenUp).behind == ("c",)
    b.service.update(table_of([host.peer for host in hosts], replicas=0))
    assert b.wait_for(GivenUp).step == 10
    assert c.wait_for(GivenUp).step == 10
    c.save(10)  # another try, which took long
    assert c.wait_for(GivenUp).step == 10
    for host in (b, c):
        host.save(50)
    assert [host.wait_for(Complete).step for host in hosts] == [50, 50, 50]


def test_the_last_copy_of_the_step_that_a_job_goes_on_from_is_not_replaced_by_a_save_of_it_anew(
    start: Start,
) -> None:
    """By b, which lost its disk; a keeps its own part, so what b saves there can never be complete."""
    a, b = start("a", "b")
    for host in (a, b):
        host.save(10)
    for host in (a, b):
        host.wait_for(Complete, 10)
    before = tree(a.replicas_of("b"))
    b.storage.remove_tree("step=10")
    table = table_of([a.peer, b.peer], attempt_id="two")
    for host in (a, b):
        host.service.update(table)
        host.service.spare(10)
    b.save(10, attempt_id="two")
    assert "is a copy of the save that was restored" in b.wait_for(NotReplicated, 10).why
    assert tree(a.replicas_of("b")) == before
    for host in (a, b):
        host.save(20, attempt_id="two")
    for host in (a, b):
        host.wait_for(Complete, 20)
    wait_until(lambda: replica_steps([a, b], "b") == {"a": [20]}, "the older copy stays")


class HeldUp(HostTable):
    """Who takes it up is held, once others see it, until they have done what it lets them do."""

    def hold(self, until: Callable[[], object]) -> HostTable:
        looks = iter([lambda: None, until])
        object.__setattr__(self, "next_look", lambda: next(looks, lambda: None)())
        return self

    def peer(self, host: str) -> Peer | None:
        if threading.current_thread() is threading.main_thread():
            self.next_look()  # type: ignore[attr-defined]
        return super().peer(host)


def test_what_a_leader_found_on_its_disk_counts_however_soon_it_is_found(start: Start) -> None:
    """Else it gives nothing up in this session."""
    a, b = start("a", "b", replicas=0)
    commit_step(a.storage, 10, attempt_id="two")
    plain = table_of([a.peer, b.peer], attempt_id="two", replicas=0)

    def found() -> None:
        a.service.replicate(10, save_name(10, "two"))
        a.wait_for(Replicated, 10)

    held = HeldUp(**vars(plain)).hold(found)
    a.service.update(held)
    for step in range(20, 20 + 10 * MOST_INCOMPLETE + 10, 10):
        a.save(step, attempt_id="two")
    assert a.wait_for(GivenUp).step > 10


def test_an_agent_of_another_release_is_turned_away_by_name(start: Start) -> None:
    a, _ = start("a", "b", replicas=0)
    with socket.create_connection(("127.0.0.1", a.service.port), LONG_S) as connection:
        link = Link(connection, QUICK, "a")
        link.send(Hello(version=PROTOCOL_VERSION - 1, attempt_id=SESSION, host="b", nonce="00"))
        answer, _ = link.receive()
        link.close()
    assert isinstance(answer, ConnectionRefused)
    assert f"'b' speaks protocol {PROTOCOL_VERSION - 1}, that of 'a' speaks {PROTOCOL_VERSION}" in answer.text


@pytest.mark.parametrize("names", [("a",), ("a", "b", "c")])
def test_without_copies_a_save_is_complete_when_all_hosts_have_committed_it(
    start: Start, names: tuple[str, ...]
) -> None:
    hosts = start(*names, replicas=0)
    for host in hosts:
        host.save(10)
    for host in hosts:
        assert host.wait_for(Replicated, 10).hosts == ()
        host.wait_for(Complete, 10)
        assert not host.root.joinpath("replicas").exists()


def test_one_host_alone_goes_without_copies(start: Start) -> None:
    (host,) = start("a", replicas=2)
    host.save(10)
    assert host.wait_for(Complete, 10).retire_below == 10


def test_two_generations_stay_if_the_table_says_so(start: Start) -> None:
    hosts = start("a", "b")
    table = replace(table_of([host.peer for host in hosts], attempt_id="next"), keep=2)
    for host in hosts:
        host.service.update(table)
    for step, below in ((10, None), (20, 10), (30, 20)):
        for host in hosts:
            host.save(step, attempt_id="next")
        for host in hosts:
            assert host.wait_for(Complete, step).retire_below == below
    for host in hosts:
        wait_until(
            lambda host=host: list(replica_steps(hosts, host.name).values()) == [[20, 30]], "too many stay"
        )


def test_saves_before_there_is_a_table_are_copied_once_there_is_one(tmp_path: Path, start: Start) -> None:
    hosts = [Host(name, tmp_path / name) for name in ("x", "y")]
    try:
        for host in hosts:
            host.save(10)
        for host in hosts:
            host.service.update(table_of([other.peer for other in hosts]))
        for host in hosts:
            host.wait_for(Complete, 10)
    finally:
        for host in hosts:
            host.service.close()


def test_a_host_that_is_not_in_the_table_is_a_mistake(start: Start) -> None:
    (host,) = start("a")
    with pytest.raises(ConfigError, match="'a' is not in the table"):
        host.service.update(table_of([Peer(host="b", address="127.0.0.1", port=1)]))


def test_a_save_that_is_not_there_or_not_the_one_is_given_up(start: Start) -> None:
    hosts = start("a", "b")
    hosts[0].service.replicate(7, save_name(7))
    assert hosts[0].wait_for(NotReplicated, 7).is_final
    commit_step(hosts[0].storage, 8)
    hosts[0].service.replicate(8, "another-8")
    failed = hosts[0].wait_for(NotReplicated, 8)
    assert failed.is_final
    assert "another-8" in failed.why
    for host in hosts:  # and the next one goes its way
        host.save(9)
    for host in hosts:
        host.wait_for(Complete, 9)


def test_a_save_that_cannot_be_opened_for_now_is_copied_as_soon_as_it_can(start: Start) -> None:
    hosts = start("a", "b")
    for host in hosts:
        commit_step(host.storage, 10)
    with no_descriptor_left():
        for host in hosts:
            host.service.replicate(10, save_name(10))
            failed = host.wait_for(NotReplicated, 10)
            assert not failed.is_final, failed
            assert "EMFILE" in failed.why
    for host in hosts:
        host.wait_for(Replicated, 10)
        host.wait_for(Complete, 10)


def test_what_an_earlier_agent_left_is_copied_also_where_the_disk_could_not_be_listed_at_first(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody asks for these copies again: ranks know that the save was committed."""
    hosts = start("a", "b")
    for host in hosts:
        commit_step(host.storage, 10, attempt_id="next")
    again = table_of([host.peer for host in hosts], attempt_id="next")
    with no_descriptor_left():
        for host in hosts:
            host.service.update(again)
        wait_until(
            lambda: caplog.text.count("what an earlier agent left is looked for again") >= len(hosts),
            "it was never looked for",
        )
        assert "EMFILE" in caplog.text
    for host in hosts:
        assert host.wait_for(Complete, 10).save_id == save_name(10, "next")


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_device_error_in_the_middle_of_a_copy_does_not_end_it(
    start: Start, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    hosts = start("a", "b")
    sendfile, errors = os.sendfile, [OSError(number, os.strerror(number))]

    def failing_once(*args: int) -> int:
        if errors:
            raise errors.pop()
        return sendfile(*args)

    monkeypatch.setattr(os, "sendfile", failing_once)
    for host in hosts:
        host.save(1)
    for host in hosts:
        host.wait_for(Complete, 1)
    assert errors == []
    assert not any(
        isinstance(event, NotReplicated) and event.is_final for host in hosts for event in host.seen
    )


def test_a_repair_waits_until_what_it_sends_can_be_opened(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    pauses = replace(QUICK, pause=timedelta(seconds=0.5), longest_pause=timedelta(seconds=10))
    a, b = start("a", "b", timeouts=pauses)
    commit_step(a.storage, 10)
    push = Push(holder="a", source_host="a", step=10, save_id=save_name(10), target="b")
    with no_descriptor_left():
        a.service.repair([push])
        wait_until(lambda: "a is sent to b again" in caplog.text, "it was never tried")
    assert a.wait_for(Repaired).push == push
    assert replica_steps([b], "a") == {"b": [10]}


def test_a_save_of_an_earlier_session_is_copied_and_never_counted(start: Start) -> None:
    hosts = start("a", "b")
    for host in hosts:
        host.save(10, attempt_id="before")
        host.wait_for(Replicated, 10)
    for host in hosts:
        host.save(20)
    for host in hosts:
        host.wait_for(Complete, 20)
    assert not any(isinstance(event, Complete) for host in hosts for event in host.seen)


def test_repairs_push_what_a_host_holds_to_where_it_is_missing(start: Start) -> None:
    hosts = start("a", "b", "c")
    a, b, c = hosts
    a.save(10)
    (holder,) = a.wait_for(Replicated, 10).hosts
    location, other = (b, c) if holder == "b" else (c, b)
    push = Push(holder=holder, source_host="a", step=10, save_id=save_name(10), target=other.name)
    own = replace(push, holder="a", root=str(a.root))
    missing = Push(holder=holder, source_host="a", step=11, save_id=save_name(11), target=other.name)
    for host in hosts:
        host.service.repair([push, own, missing])
    assert location.wait_for(Repaired).push == push
    assert location.wait_for(NotRepaired).push == missing
    assert a.wait_for(Repaired).push == own
    assert replica_steps(hosts, "a") == {location.name: [10], other.name: [10]}


# --- hosts that are not ---------------------------------------------------------------------------


class HostProcess:
    """A host as a process of its own, forked from an interpreter that has imported the engine."""

    def __init__(self, name: str, root: Path) -> None:
        self.name = name
        self.root = root
        self.begin()

    def begin(self) -> None:
        self._seen: list[object] = []
        self._process, self._connection = warm.start_function(peer_process.serve, self.name, str(self.root))

    def listening(self) -> Peer:
        return Peer(host=self.name, address="127.0.0.1", port=self.wait_for(int))

    def tell(self, *command: object) -> None:
        if not self._connection.closed:
            self._connection.send(command)

    def save(self, step: int) -> None:
        commit_step(LocalStorage(self.root), step)
        self.tell("replicate", step, save_name(step))

    def wait_for(self, kind: type[_E], step: int | None = None) -> _E:
        deadline = time.monotonic() + LONG_S
        while True:
            for event in self._seen:
                if isinstance(event, kind) and step in (None, getattr(event, "step", None)):
                    self._seen.remove(event)
                    return event
            left_s = deadline - time.monotonic()
            came = self._connection.poll(max(left_s, 0))
            assert came, f"{self.name}: no {kind.__name__} of step {step}; {self._seen}"
            self._seen.append(self._connection.recv())

    def signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """Dead when this returns.  Idempotent."""
        if self._connection.closed:
            return
        self._process.kill()
        self._process.wait(LONG_S)
        self._connection.close()


class Job:
    """Hosts a, b, c as processes."""

    def __init__(self, directory: Path, names: str = "abc") -> None:
        self._directory = directory
        self.hosts = {name: HostProcess(name, directory / name) for name in names}
        self.peers = {name: host.listening() for name, host in self.hosts.items()}
        self.update()

    def update(self, *, bytes_per_s: int = 0) -> None:
        """As trainers do: the addresses of all, to all."""
        path = self._directory / f"peers-{bytes_per_s}.json"
        table = table_of(list(self.peers.values()), bytes_per_s=bytes_per_s)
        table.write(path)
        for host in self.hosts.values():
            host.tell("update", str(path))  # one that is stopped or dead reads it later or never

    def restart(self, name: str) -> None:
        self.hosts[name].begin()
        self.peers[name] = self.hosts[name].listening()
        self.update()

    def target_of(self, source_host: str) -> str:
        return choose_targets(source_host, list(self.peers.values()), 1)[0]

    def others(self, name: str) -> list[HostProcess]:
        return [host for other, host in self.hosts.items() if other != name]

    def close(self) -> None:
        for host in self.hosts.values():
            host.kill()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    job.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_stopped_target_is_passed_over(job: Job, how: signal.Signals) -> None:
    target = job.target_of("b")
    job.hosts[target].signal(how)
    job.hosts["b"].save(10)
    hosts = job.hosts["b"].wait_for(Replicated, 10).hosts
    assert hosts == tuple(name for name in "abc" if name not in ("b", target))
    storage = LocalStorage(job.hosts[hosts[0]].root / "replicas" / "b")
    assert inspect(storage, 10).condition is Condition.COMPLETE


@pytest.mark.slow
def test_a_target_that_is_stopped_in_the_middle_is_passed_over_and_finds_its_way_back(job: Job) -> None:
    target = job.hosts[job.target_of("b")]
    job.update(bytes_per_s=1 << 18)  # it takes a minute
    commit_step(LocalStorage(job.hosts["b"].root), 10, size_bytes=16 << 20)
    job.hosts["b"].tell("replicate", 10, save_name(10))
    wait_until((target.root / "replicas/b/step=10-unfinished").exists, "the copy never began")
    target.signal(signal.SIGSTOP)
    job.update()
    hosts = job.hosts["b"].wait_for(Replicated, 10).hosts
    assert hosts == tuple(name for name in "abc" if name not in ("b", target.name))
    target.signal(signal.SIGCONT)
    for host in job.hosts.values():
        host.save(20)
    for host in job.hosts.values():
        host.wait_for(Complete, 20)
    wait_until(
        lambda: sorted(os.listdir(target.root / "replicas/b")) == ["step=20"],
        "what was received in part stays",
    )


@pytest.mark.parametrize("name", ["a", "c"])
def test_a_stopped_host_delays_completion_and_nothing_is_deleted_meanwhile(job: Job, name: str) -> None:
    """a leads."""
    for host in job.hosts.values():
        host.save(10)
    for host in job.hosts.values():
        host.wait_for(Complete, 10)
    job.hosts[name].signal(signal.SIGSTOP)
    for host in job.others(name):
        host.save(20)
        host.wait_for(Replicated, 20)
    # Two have sealed, and nobody has deleted anything.
    for source_host in "abc":
        holders = [
            n for n, host in job.hosts.items() if (host.root / f"replicas/{source_host}/step=10").exists()
        ]
        assert holders == [job.target_of(source_host)]
    job.hosts[name].signal(signal.SIGCONT)
    job.hosts[name].save(20)
    for host in job.hosts.values():
        host.wait_for(Complete, 20)


@pytest.mark.parametrize("name", ["a", "b"])
def test_an_agent_that_was_killed_and_restarted_goes_on_where_it_was(job: Job, name: str) -> None:
    """a leads: all that it knew comes back from the others."""
    for host in job.hosts.values():
        host.save(10)
    for host in job.hosts.values():
        host.wait_for(Complete, 10)
    for host in job.others(name):
        host.save(20)
    for host in job.others(name):
        host.wait_for(Replicated, 20)
    job.hosts[name].kill()
    commit_step(LocalStorage(job.hosts[name].root), 20)  # it was killed between commit and copy
    job.restart(name)
    for host in job.hosts.values():
        host.wait_for(Complete, 20)


def test_an_agent_killed_while_it_receives_leaves_the_older_replica_and_the_newer_one_comes_later(
    job: Job,
) -> None:
    target = job.hosts[job.target_of("b")]
    job.hosts["b"].save(10)
    job.hosts["b"].wait_for(Replicated, 10)
    job.update(bytes_per_s=1 << 18)
    commit_step(LocalStorage(job.hosts["b"].root), 20, size_bytes=16 << 20)
    job.hosts["b"].tell("replicate", 20, save_name(20))
    wait_until((target.root / "replicas/b/step=20-unfinished").exists, "the copy never began")
    target.kill()
    job.update()
    replicas = LocalStorage(target.root / "replicas" / "b")
    assert inspect(replicas, 10).condition is Condition.COMPLETE
    assert inspect(replicas, 20).condition is Condition.UNFINISHED
    job.hosts["b"].wait_for(Replicated, 20)
    job.restart(target.name)
    for host in job.hosts.values():
        host.save(30)
    for host in job.hosts.values():
        host.wait_for(Complete, 30)
    wait_until(lambda: replicas.list("") == ["step=30"], "older or unfinished replicas stay")


def test_a_sender_that_was_stopped_for_long_goes_on_where_it_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    receiver, sender = Host("a", tmp_path / "a"), HostProcess("b", tmp_path / "b")
    try:
        table = table_of([receiver.peer, sender.listening()], bytes_per_s=1 << 18)
        table.write(tmp_path / "slow")
        replace(table, bytes_per_s=0).write(tmp_path / "fast")
        receiver.service.update(table)
        sender.tell("update", str(tmp_path / "slow"))
        commit_step(LocalStorage(sender.root), 10, size_bytes=16 << 20)
        sender.tell("replicate", 10, save_name(10))
        replica = LocalStorage(receiver.replicas_of("b"))
        wait_until(lambda: has_arrived(replica.root), "the copy never began")
        sender.signal(signal.SIGSTOP)
        # Its link for seals ends as well, so no thread serves anybody any more, and what came is written.
        busy = {"resiliency-peer-serve", "resiliency-replica"}
        wait_until(
            lambda: busy.isdisjoint(thread.name for thread in threading.enumerate()),
            "the stopped sender holds a thread",
        )
        sender.tell("update", str(tmp_path / "fast"))
        sender.signal(signal.SIGCONT)
        assert sender.wait_for(Replicated, 10).hosts == ("a",)
        assert inspect(replica, 10).condition is Condition.COMPLETE
        (copied,) = re.findall(r"step 10: (\d+) bytes, (\d+) of them over this connection", caplog.text)
        whole, last = map(int, copied)
        assert 0 < last < whole
    finally:
        sender.kill()
        receiver.service.close()


def has_arrived(root: Path) -> bool:
    """Whether something of a file with content is there, which is made in its whole size before that."""
    files = [path for path in root.rglob("*") if path.is_file() and path.stat().st_size > 1 << 20]
    return any(path.read_bytes().strip(b"\0") for path in files)


def test_after_a_partition_the_newest_step_is_replicated(start: Start) -> None:
    hosts = start("a", "b", "c")
    nowhere = [replace(host.peer, port=1) for host in hosts]
    for host in hosts:
        cut = [host.peer if peer.host == host.name else peer for peer in nowhere]
        host.service.update(table_of(cut))
    for host in hosts:
        host.save(10)
        failed = host.wait_for(NotReplicated)  # before step 20 can supersede it
        assert not failed.is_final
        assert "0 of 1 copies" in failed.why
        for step in (20, 30):
            host.save(step)
    for host in hosts:
        host.service.update(table_of([other.peer for other in hosts]))
    for host in hosts:
        host.wait_for(Replicated, 30)
        host.wait_for(Complete, 30)


def test_a_copy_that_nobody_takes_is_told_once_however_often_it_is_tried(start: Start) -> None:
    (host,) = start("a")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        be_refused(host, other)
    host.service.close()
    assert [event for event in (*host.seen, *host.events.queue) if isinstance(event, NotReplicated)] == []


def be_refused(host: Host, other: socket.socket) -> None:
    peer = Peer(host="b", address="127.0.0.1", port=other.getsockname()[1])
    for table in [table_of([host.peer, peer], attempt_id=attempt_id) for attempt_id in ("one", "two")]:
        host.service.update(table)
        host.save(10 if table.attempt_id == "one" else 20, attempt_id=table.attempt_id)
        assert not host.wait_for(NotReplicated).is_final
    host.service.replicate(
        24, "two-24"
    )  # is not there; when it is given up, the earlier session's has its turn
    assert [host.wait_for(NotReplicated, step).is_final for step in (20, 24)] == [True, True]
    other.settimeout(LONG_S)
    other.listen()
    for _ in range(2):  # it is tried again, and again
        other.accept()[0].close()


def test_a_full_target_refuses_and_the_next_one_takes_the_copy(
    tmp_path: Path, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    names = ("a", "b", "c")
    target = choose_targets("a", [Peer(host=name, address="", port=0) for name in names], 1)[0]
    disk = tmp_path / target
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        hosts = {host.name: host for host in start(*names)}
        hosts["a"].save(10, size_bytes=3 << 20)
        (other,) = hosts["a"].wait_for(Replicated, 10).hosts
        assert other not in ("a", target)
        assert caplog.text.count("a copy from a was refused") == 1
        for host in hosts.values():
            host.service.close()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_calls_return_at_once_while_all_others_hang(start: Start) -> None:
    """Others accept, and never say a word."""
    (host,) = start("a", timeouts=CallDeadline(silence=timedelta(seconds=60)))
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        mute = [
            Peer(host=f"m{n}", address="127.0.0.1", port=listener.getsockname()[1])
            for n, listener in enumerate(listeners)
        ]
        host.service.update(replace(table_of([mute[0], host.peer, mute[1]], attempt_id="mute")))
        commit_step(host.storage, 10, attempt_id="mute")
        began = time.monotonic()
        for step in range(10, 200):
            host.service.replicate(step, f"mute-{step}")
        push = Push(holder="a", source_host="a", step=10, save_id="mute-10", target="m0")
        host.service.repair([push])
        host.service.lift_bandwidth_cap()
        host.service.update(table_of([host.peer, *mute], attempt_id="mute again"))
        host.service.close()
        assert time.monotonic() - began < 30  # half of what anything that waits would take


def test_a_disk_that_hangs_keeps_neither_the_service_nor_the_process_from_ending(tmp_path: Path) -> None:
    with Command([sys.executable, "-m", "tests.checkpoint.host_with_hanging_disk", str(tmp_path)]) as host:
        host.wait_for_line("^hangs$", timeout=LONG_S)
        host.wait_for_line("^closed$", timeout=LONG_S)
        assert host.wait(timeout=LONG_S) == 0


@pytest.mark.parametrize("replicas", [0, 1])
def test_a_service_that_waits_uses_no_processor(start: Start, replicas: int) -> None:
    """Before it has a table; as leader and as another host; with a step that nobody takes."""
    timeouts = CallDeadline(pause=timedelta(seconds=30), longest_pause=timedelta(seconds=30))
    hosts = start("a", "b", timeouts=timeouts, replicas=replicas)
    hosts[0].service.update(table_of([hosts[0].peer, replace(hosts[1].peer, port=1)], replicas=replicas))
    hosts[0].save(10)
    hosts[0].wait_for(Replicated if replicas == 0 else NotReplicated, 10)
    with PeerService(
        "c", hosts[0].root / "c", listen_address="127.0.0.1", on_event=lambda event: None, timeouts=timeouts
    ):
        began = time.process_time()
        threading.Event().wait(1.0)  # the span that is measured; nothing is awaited
        assert time.process_time() - began < 0.3


@pytest.mark.thorough("each test looks for what it left")
def test_hundreds_of_copies_leave_no_thread_and_no_descriptor_behind(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "resiliency.checkpoint.replication.receiver")
    hosts = start("a", "b")
    before: tuple[set[str], int] | None = None
    for step in range(1, 101):
        for host in hosts:
            host.save(step, size_bytes=2000)
        for host in hosts:
            host.wait_for(Complete, step)
            storage = host.storage
            for old in range(max(step - 3, 1), step):
                storage.remove_tree(f"step={old}")
        if step == 10:
            before = {thread.name for thread in threading.enumerate()}, len(open_descriptors())
    assert before is not None
    wait_until(
        lambda: (
            {thread.name for thread in threading.enumerate()} <= before[0]
            and len(open_descriptors()) <= before[1] + 4
        ),
        "threads or descriptors grew",
    )
    for host in hosts:
        wait_until(
            lambda host=host: list(replica_steps(hosts, host.name).values()) == [[100]], "old replicas stay"
        )
        assert caplog.text.count(f"replica of {host.name}, ") == 100


def test_the_next_agent_listens_where_the_one_before_did_unless_somebody_else_does(tmp_path: Path) -> None:
    def begin(port: int) -> PeerService:
        return PeerService(
            "a", tmp_path, listen_address="127.0.0.1", listen_port=port, on_event=lambda event: None
        )

    with begin(0) as first:
        port = first.port
        with begin(port) as other:
            assert other.port not in (0, port)
    with begin(port) as second:
        assert second.port == port


def test_an_agent_listens_at_a_port_that_no_outgoing_connection_gets(tmp_path: Path) -> None:
    lowest, highest = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    if lowest <= 20000:
        pytest.skip("outgoing connections get nearly any port here")
    with PeerService("a", tmp_path, on_event=lambda event: None) as service:
        assert not lowest <= service.port <= highest


def test_an_agent_whose_port_was_taken_is_found_again_when_it_is_free(
    tmp_path: Path, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    (leader,) = start("a")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        peer = Peer(host="b", address="127.0.0.1", port=taken.getsockname()[1])
        other = Host("b", tmp_path / "b")
        try:
            table = table_of([leader.peer, peer])
            for host in (leader, other):
                host.service.update(table)
            assert f"port {peer.port} of this host is taken" in caplog.text
            leader.save(10)
            assert not leader.wait_for(NotReplicated, 10).is_final
            taken.close()
            leader.wait_for(Replicated, 10)
            wait_until(lambda: "find this one again" in caplog.text, "it is not told")
        finally:
            other.service.close()


def test_a_service_that_cannot_listen_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        PeerService("a", tmp_path, listen_address="192.0.2.1", on_event=lambda event: None)


def test_a_leader_that_is_not_reached_is_warned_of_with_what_follows(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    leader, other = start("a", "b", timeouts=replace(QUICK, silence=timedelta(seconds=0.5)))
    other.service.update(table_of([replace(leader.peer, port=1), other.peer]))
    wait_until(lambda: "the leader has not been reached" in caplog.text, "nobody says so")
    warning = next(r.getMessage() for r in caplog.records if "has not been reached" in r.getMessage())
    assert "no step becomes complete" in warning
    assert "cannot reach a at 127.0.0.1:1" in warning
    assert "RESILIENCY_PEER_ADDRESS" in warning
