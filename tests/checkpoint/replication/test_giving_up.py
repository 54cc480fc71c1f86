# SPDX-License-Identifier: Apache-2.0
"""Saves that never become complete: which of them go, that they count for nobody, that no other one goes."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import pytest

from resiliency.checkpoint.replication.completion import MOST_INCOMPLETE, HostState, LeaderState, SaveName
from resiliency.checkpoint.replication.completion_link import CompletionLink
from resiliency.checkpoint.replication.hosts import HostTable
from resiliency.checkpoint.replication.placement import Peer
from tests.checkpoint.peer_builders import LONG_S, QUICK, SESSION, table_of

HOSTS = ("a", "b", "c")


def name(step: int) -> SaveName:
    return SaveName(step, f"session-{step}")


def counting(*, before: frozenset[SaveName] | None = frozenset()) -> LeaderState:
    """A leader, host a, that began with parts of the saves `before` on its disk."""
    return LeaderState(HOSTS, before=before)


def commit(
    leader_state: LeaderState, step: int, *, sealed_by: str = "a", lost_by: str = ""
) -> list[tuple[int, list[str]]]:
    """The leader's host commits a step; returns what is given up for it, and the hosts that are behind."""
    leader_state.hold(name(step))
    for host in lost_by:
        leader_state.lose(host, name(step))
    for host in sealed_by:
        leader_state.acknowledge(host, name(step))
    return [(save.step, hosts) for save, hosts in leader_state.give_up()]


def test_while_one_host_has_none_of_its_parts_so_many_saves_wait_and_the_oldest_goes_for_another() -> None:
    leader_state, gone = counting(), []
    for step in range(10, 100, 10):
        gone += commit(leader_state, step, sealed_by="ac", lost_by="b")
    assert gone == [(step, ["b"]) for step in range(10, 100 - 10 * MOST_INCOMPLETE, 10)]
    assert len(leader_state.awaited()) == MOST_INCOMPLETE
    assert leader_state.acknowledge("b", name(90)) == name(90)


def test_what_hosts_with_slow_copies_would_pass_over_goes_first_and_the_newest_never() -> None:
    leader_state = counting()
    assert [commit(leader_state, step, sealed_by="") for step in (8, 10, 12, 15)] == [[]] * 4
    assert commit(leader_state, 17, sealed_by="") == [(15, ["a", "b", "c"])]
    assert commit(leader_state, 20, sealed_by="") == [(17, ["a", "b", "c"])]
    assert commit(leader_state, 21, sealed_by="") == [(10, ["a", "b", "c"])]


def test_a_host_that_has_its_part_at_the_second_try_is_not_what_a_save_waits_for() -> None:
    leader_state = counting()
    commit(leader_state, 16, lost_by="b")
    leader_state.acknowledge("b", name(16))
    for step in (17, 18, 20):
        commit(leader_state, step)
    assert commit(leader_state, 24) == [(17, ["b", "c"])]
    assert leader_state.acknowledge("c", name(16)) == name(16)


@pytest.mark.parametrize("before", [None, frozenset({name(10), SaveName(20, "")})], ids=["unknown", "known"])
def test_what_an_earlier_leader_may_have_found_complete_stays(before: frozenset[SaveName] | None) -> None:
    leader_state = counting(before=before)
    leader_state.acknowledge(
        "b", name(5)
    )  # handed over by the leader's host, which says nothing of it any more
    for step in range(10, 100, 10):
        commit(leader_state, step, lost_by="c")
    leader_state.lose("a", name(10), is_own=True)
    assert leader_state.give_up() == []
    for step in (5, 10, 20):
        assert name(step) in leader_state.awaited()


def test_what_another_start_of_the_job_saved_at_a_step_keeps_none_of_this_one() -> None:
    leader_state, gone = (
        counting(before=frozenset(SaveName(step, f"earlier-{step}") for step in range(100))),
        [],
    )
    for step in range(10, 100, 10):
        gone += commit(leader_state, step, lost_by="b")
    assert [step for step, _ in gone] == list(range(10, 100 - 10 * MOST_INCOMPLETE, 10))


def give_up_after(*tables: HostTable, found: Sequence[Sequence[SaveName]]) -> list[int]:
    """What host a, which leads at last, gives up when it commits more than may wait."""
    given_up: list[int] = []
    is_over = threading.Event()
    completion_link = CompletionLink(
        "a", lambda save, below: is_over.set(), lambda save, behind: given_up.append(save.step), QUICK
    )
    try:
        completion_link.update(tables[0])
        for each in found:
            completion_link.found(SESSION, each)
        for table in tables[1:]:
            completion_link.update(table)
        for step in range(10, 20 + 10 * MOST_INCOMPLETE, 10):
            completion_link.hold(name(step))
        completion_link.update(table_of([peer("a")], attempt_id="last"))
        completion_link.acknowledge(SaveName(1, "last-1"))
        assert is_over.wait(LONG_S)
    finally:
        completion_link.close()
    return given_up


def peer(host: str) -> Peer:
    return Peer(host=host, address="127.0.0.1", port=1)


def test_who_led_twice_knows_nothing_of_what_was_complete_between() -> None:
    first = table_of([peer("a"), peer("b")])
    assert give_up_after(first, found=[[]]) == [30]
    assert give_up_after(first, replace(first, leader="b"), first, found=[[]]) == []


def test_a_second_look_at_the_disk_keeps_nothing_that_came_after_the_first() -> None:
    later = [name(step) for step in range(10, 100, 10)]
    assert give_up_after(table_of([peer("a"), peer("b")]), found=[[], later]) == [30]


def test_a_save_that_is_given_up_counts_for_nobody_any_more() -> None:
    leader_state, host_state = counting(), HostState()
    host_state.acknowledge(name(10))
    assert leader_state.gave_up(name(10))
    assert host_state.give_up(name(10))
    assert not leader_state.gave_up(name(10))
    assert not host_state.give_up(name(10))
    for host in HOSTS:
        assert leader_state.acknowledge(host, name(10)) is None
    assert leader_state.awaited() == {}
    assert not host_state.acknowledge(name(10))
    assert not host_state.lose(name(10))
    assert host_state.to_say() == host_state.lost_to_say() == []
    assert not leader_state.completed(name(10))
    assert not host_state.completed(name(10))


def test_what_is_complete_is_not_given_up() -> None:
    leader_state, host_state = counting(), HostState()
    assert leader_state.completed(name(10))
    assert host_state.completed(name(10))
    assert not leader_state.gave_up(name(10))
    assert not host_state.give_up(name(10))


class Hosts:
    """Agents of the hosts of a session, their disks, and what is on its way to the leader, host 0, and back.

    It is lost where either agent dies, or the link breaks.
    """

    def __init__(self, count: int) -> None:
        self.names = [str(number) for number in range(count)]
        self.disks: list[set[SaveName]] = [set() for _ in self.names]
        self.host_states = [HostState() for _ in self.names]
        self.there: list[deque[tuple[str, SaveName]]] = [deque() for _ in self.names]
        self.back: list[deque[tuple[str, SaveName]]] = [deque() for _ in self.names]
        self.leader_state = LeaderState(self.names, before=())
        self.complete: set[SaveName] = set()

    def commit(self, host: int, save: SaveName) -> None:
        self.disks[host].add(save)
        if host == 0:
            self.leader_state.hold(save)
        if self.host_states[host].acknowledge(save):
            self._say(host, "sealed", save)
        else:
            self.disks[host].discard(save)

    def fail(self, host: int, save: SaveName) -> None:
        if self.host_states[host].lose(save):
            self._say(host, "lost", save)

    def deliver(self, host: int) -> None:
        """One message of a host to the leader, and one to it."""
        if self.there[host]:
            self._lead(host, *self.there[host].popleft())
        if self.back[host]:
            self._hear(host, *self.back[host].popleft())

    def reconnect(self, host: int) -> None:
        """Both say what they know."""
        host_state, leader_state = self.host_states[host], self.leader_state
        known = [*_all("complete", host_state.complete), *_all("given up", host_state.given_up)]
        said = [*_all("sealed", host_state.to_say()), *_all("lost", host_state.lost_to_say())]
        self.there[host] = deque([*known, *said])
        self.back[host] = deque(
            [*_all("complete", leader_state.complete), *_all("given up", leader_state.given_up)]
        )

    def restart(self, host: int) -> None:
        """The agent of a host dies, and another one takes up what is on the disk."""
        self.host_states[host] = HostState()
        if host == 0:
            self.leader_state = LeaderState(self.names, before=set(self.disks[0]))
        for save in self.disks[host]:
            if host == 0:
                self.leader_state.hold(save)
            self.host_states[host].acknowledge(save)
        for other in range(len(self.names)) if host == 0 else [host]:
            self.reconnect(other)

    def _say(self, host: int, what: str, save: SaveName) -> None:
        self.there[host].append((what, save))
        if host == 0:
            self.deliver(0)

    def _lead(self, host: int, what: str, save: SaveName) -> None:
        if what == "sealed":
            before = self.leader_state.newest
            answer = self.leader_state.acknowledge(str(host), save)
            if answer is not None:
                self._tell("complete", answer, [host] if answer == before else None)
            elif save in self.leader_state.given_up:
                self._tell("given up", save, [host])
        elif what == "lost":
            self.leader_state.lose(str(host), save, is_own=host == 0)
        elif what == "complete" and self.leader_state.completed(save):
            self._tell("complete", save)
        elif what == "given up" and self.leader_state.gave_up(save):
            self._tell("given up", save)
        for other, _ in self.leader_state.give_up():
            self._tell("given up", other)

    def _tell(self, what: str, save: SaveName, hosts: list[int] | None = None) -> None:
        for host in range(len(self.names)) if hosts is None else hosts:
            self.back[host].append((what, save))
            if host == 0:
                self._hear(0, *self.back[0].pop())

    def _hear(self, host: int, what: str, save: SaveName) -> None:
        if what == "given up":
            if self.host_states[host].give_up(save):
                self.disks[host].discard(save)
        elif self.host_states[host].completed(save):
            self.complete.add(save)
            below = self.host_states[host].retire_below
            assert below is not None
            self.disks[host] = {other for other in self.disks[host] if other.step >= below}


def _all(what: str, saves: list[SaveName]) -> list[tuple[str, SaveName]]:
    return [(what, save) for save in saves]


@pytest.mark.parametrize("seed", range(20))
def test_from_the_first_complete_save_on_all_hosts_have_a_common_one_whatever_is_given_up(seed: int) -> None:
    """However late hosts hear of it, and whichever agents are started anew."""
    drawn = random.Random(seed)  # noqa: S311
    given_up = 0
    for _ in range(50):
        count, step = drawn.randint(2, 3), 1
        hosts = Hosts(count)
        # Some stories have a host whose saves fail, or agents that die, or links that break, often.
        often = [drawn.choice([0, 1, 4]) for _ in range(3)]
        for what in drawn.choices(
            ["next", "commit", "deliver", "fail", "restart", "reconnect"], [6, 16, 16, *often], k=150
        ):
            host = drawn.randrange(count)
            if what == "next":
                step += 1
            elif what in ("commit", "fail"):
                getattr(hosts, what)(host, name(step))
            else:
                getattr(hosts, what)(host)
            newest = max((save.step for save in hosts.complete), default=0)
            shared = {save.step for save in set.intersection(*hosts.disks)}
            assert newest <= max(shared, default=0)
        given_up += len(hosts.leader_state.given_up)
    assert given_up
