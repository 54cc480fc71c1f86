# SPDX-License-Identifier: Apache-2.0
"""When a save is complete, what may go then, and which save is copied next: without any I/O."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resiliency.checkpoint.replication.completion import REMEMBERED, HostState, LeaderState, SaveName
from resiliency.checkpoint.replication.copy_queue import CopyQueue
from resiliency.checkpoint.replication.hosts import HostTable
from resiliency.checkpoint.replication.placement import Peer
from resiliency.errors import ConfigError

HOSTS = ("a", "b", "c")


SESSION = "session"


def name(step: int) -> SaveName:
    return SaveName(step, f"{SESSION}-{step}")


def test_a_save_is_complete_when_the_last_host_has_sealed_it_and_not_before() -> None:
    leader_state = LeaderState(HOSTS)
    assert leader_state.acknowledge("a", name(10)) is None
    assert leader_state.acknowledge("a", name(10)) is None
    assert leader_state.acknowledge("b", name(10)) is None
    assert leader_state.awaited() == {name(10): {"c"}}
    assert leader_state.acknowledge("c", name(10)) == name(10)
    assert leader_state.newest == name(10)


def test_one_host_alone_completes_its_own_saves() -> None:
    assert LeaderState(("a",)).acknowledge("a", name(1)) == name(1)


def test_hosts_that_ask_late_hear_of_the_newest_complete_save() -> None:
    leader_state = LeaderState(HOSTS)
    for step in (10, 20):
        for host in HOSTS:
            leader_state.acknowledge(host, name(step))
    assert leader_state.acknowledge("b", name(10)) == name(20)


def test_the_last_complete_saves_are_remembered_in_order_however_they_became_known() -> None:
    leader_state, host_state = LeaderState(("a",)), HostState()
    for step in (30, 10, 20, *range(40, 40 + 10 * REMEMBERED, 10)):
        assert leader_state.completed(name(step))
        assert host_state.completed(name(step))
    last = [name(step) for step in range(40, 40 + 10 * REMEMBERED, 10)]
    assert leader_state.complete == host_state.complete == last
    for old in (30, 40):
        assert not leader_state.completed(name(old))
        assert not host_state.completed(name(old))
    assert host_state.retire_below == last[-1].step


def test_what_is_known_to_be_complete_needs_no_more_seals() -> None:
    leader_state = LeaderState(HOSTS)
    for step in (10, 20, 30):
        leader_state.acknowledge("a", name(step))
    leader_state.completed(name(20))
    assert leader_state.awaited() == {name(30): {"b", "c"}}
    assert leader_state.acknowledge("b", name(10)) == name(20)


def test_a_save_that_some_host_skipped_is_passed_over_by_a_newer_one() -> None:
    leader_state = LeaderState(HOSTS)
    leader_state.acknowledge("a", name(10))
    for host in HOSTS:
        leader_state.acknowledge(host, name(20))
    assert leader_state.newest == name(20)
    assert leader_state.awaited() == {}


def test_strangers_do_not_count() -> None:
    leader_state = LeaderState(("a", "b"))
    leader_state.acknowledge("a", name(1))
    assert leader_state.acknowledge("x", name(1)) is None
    assert leader_state.newest is None


def test_seals_of_two_saves_at_one_step_are_never_added_up() -> None:
    leader_state = LeaderState(("a", "b"))
    leader_state.acknowledge("a", SaveName(1, "old-1"))
    assert leader_state.acknowledge("b", SaveName(1, "new-1")) is None


@pytest.mark.parametrize(("keep", "allowed"), [(1, [10, 20, 30]), (2, [None, 10, 20])])
def test_what_may_go_is_older_than_the_complete_generations_that_stay(
    keep: int, allowed: list[int | None]
) -> None:
    host_state = HostState(keep=keep)
    assert host_state.retire_below is None
    for step, below in zip((10, 20, 30), allowed, strict=True):
        assert host_state.completed(name(step))
        assert host_state.retire_below == below
    assert not host_state.completed(name(20))


def test_a_host_repeats_its_seals_from_the_newest_complete_save_on() -> None:
    host_state = HostState()
    for step in (10, 20, 30):
        host_state.acknowledge(name(step))
    host_state.completed(name(20))
    assert host_state.to_say() == [name(20), name(30)]


@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6), st.booleans()), max_size=60),
)
def test_nothing_is_retired_that_was_not_superseded_on_all_hosts(
    count: int, story: list[tuple[int, int, bool]]
) -> None:
    """Whatever is sealed in whatever order, and however often the leader forgets all."""
    hosts = [f"h{number}" for number in range(count)]
    host_states = {host: HostState() for host in hosts}
    sealed: dict[str, set[int]] = {host: set() for host in hosts}
    leader_state = LeaderState(hosts)
    for number, step, restarts in story:
        host = hosts[number % count]
        if restarts:
            leader_state = LeaderState(hosts)
            for other in hosts:
                for save in host_states[other].to_say():
                    leader_state.acknowledge(other, save)
        sealed[host].add(step)
        host_states[host].acknowledge(name(step))
        if leader_state.acknowledge(host, name(step)) is not None and leader_state.newest is not None:
            for host_state in host_states.values():
                host_state.completed(leader_state.newest)
        for host_state in host_states.values():
            below = host_state.retire_below
            assert below is None or all(below in steps for steps in sealed.values())


@given(
    st.lists(st.floats(0.3, 7.9), min_size=2, max_size=5),
    st.integers(1, 1000),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_hosts_of_any_speed_meet_at_a_common_save_again_and_again(
    speeds: list[float], first: int, regular: bool, seed: int
) -> None:
    """A save per unit of time; each host needs its own time for a copy, longer than a unit or not."""
    drawn = random.Random(seed)  # noqa: S311
    steps = [first + (10 * n if regular else 0) for n in range(600)]
    if not regular:
        steps = sorted(drawn.sample(range(1, 10**6), 600))
    copied = []
    for speed in speeds:
        copy_queue, done, now, seen = CopyQueue(), set(), drawn.random(), 0
        while seen < len(steps) or copy_queue.take(SESSION)[0] is not None:
            while seen < len(steps) and seen <= now:
                copy_queue.add(name(steps[seen]))
                seen += 1
            save, _ = copy_queue.take(SESSION)
            if save is None:
                now = float(seen)
                continue
            copy_queue.remove(save)
            done.add(save.step)
            now += speed
        copied.append(done)
    common = sorted(steps.index(step) for step in set.intersection(*copied))
    gaps = [b - a for a, b in zip([0, *common], [*common, len(steps)], strict=True)]
    assert max(gaps) <= (64 if regular else 300), gaps


def test_a_backlog_names_what_it_passes_over_and_keeps_what_is_newer() -> None:
    copy_queue = CopyQueue()
    for step in (10, 20, 30):
        copy_queue.add(name(step))
    assert copy_queue.take(SESSION) == (name(20), [name(10)])
    assert copy_queue.take(SESSION) == (name(20), [])
    copy_queue.remove(name(20))
    assert copy_queue.take(SESSION) == (name(30), [])
    copy_queue.remove(name(30))
    assert copy_queue.take(SESSION) == (None, [])


def test_saves_of_earlier_sessions_wait_and_supersede_nothing() -> None:
    copy_queue = CopyQueue()
    earlier = SaveName(1280, "earlier-1280")  # many factors of two
    copy_queue.add(earlier)
    copy_queue.add(name(1275))
    assert copy_queue.take(SESSION) == (name(1275), [])
    copy_queue.remove(name(1275))
    assert copy_queue.take(SESSION) == (earlier, [])


def test_a_save_that_no_host_took_stands_back_behind_newer_ones() -> None:
    copy_queue = CopyQueue()
    copy_queue.add(name(1280))
    assert copy_queue.take(SESSION) == (name(1280), [])
    assert copy_queue.failed(name(1280))
    assert copy_queue.take(SESSION) == (name(1280), [])  # there is nothing else to do
    assert not copy_queue.failed(name(1280))  # no news any more
    copy_queue.add(name(1290))
    assert copy_queue.take(SESSION) == (name(1290), [name(1280)])


def test_saves_of_earlier_sessions_take_turns_when_none_can_be_copied() -> None:
    copy_queue = CopyQueue()
    even, odd = SaveName(20, "earlier-20"), SaveName(21, "earlier-21")
    for save in (even, odd):
        copy_queue.add(save)
    taken = []
    for _ in range(4):
        save, _ = copy_queue.take(SESSION)
        assert save is not None
        taken.append(save)
        copy_queue.failed(save)
    assert taken == [even, odd, even, odd]


# --- the table of peers ---------------------------------------------------------------------------


def make_table(**change: object) -> HostTable:
    peer = Peer(
        host="a", address="10.0.0.1", port=7, ranks=(0, 1), domains=(("rack", "r1"),), groups=("tp0",)
    )
    fields = {
        "attempt_id": "s", "run_id": "r", "token": "t", "leader": "a", "replicas": 1, "bytes_per_s": 5,
        "peers": (peer, Peer(host="b", address="::1", port=8, ranks=(2,))),
    }  # fmt: skip
    return HostTable(**{**fields, **change})  # type: ignore[arg-type]


def test_a_table_comes_back_from_its_file_which_only_this_user_can_read(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    make_table().write(path)
    assert HostTable.read(path) == make_table()
    assert path.stat().st_mode & 0o077 == 0
    assert [p.name for p in path.parent.iterdir()] == ["peers.json"]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"token": ""}, "attempt id and a token"),
        ({"leader": "x"}, "'x'"),
        ({"replicas": -1}, "-1"),
        ({"keep": 0}, "found 1, 5 and 0"),
    ],
)
def test_a_table_that_cannot_work_is_refused(change: dict[str, object], found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        make_table(**change)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"peers": [{"host": 1}]}', "[" * 5000])
def test_what_is_no_table_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a table of peers"):
        HostTable.from_json(text)
