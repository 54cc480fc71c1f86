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
    tally = LeaderState(HOSTS)
    assert tally.seal("a", name(10)) is None
    assert tally.seal("a", name(10)) is None
    assert tally.seal("b", name(10)) is None
    assert tally.awaited() == {name(10): {"c"}}
    assert tally.seal("c", name(10)) == name(10)
    assert tally.newest == name(10)


def test_one_host_alone_completes_its_own_saves() -> None:
    assert LeaderState(("a",)).seal("a", name(1)) == name(1)


def test_hosts_that_ask_late_hear_of_the_newest_complete_save() -> None:
    tally = LeaderState(HOSTS)
    for step in (10, 20):
        for host in HOSTS:
            tally.seal(host, name(step))
    assert tally.seal("b", name(10)) == name(20)


def test_the_last_complete_saves_are_remembered_in_order_however_they_became_known() -> None:
    tally, ledger = LeaderState(("a",)), HostState()
    for step in (30, 10, 20, *range(40, 40 + 10 * REMEMBERED, 10)):
        assert tally.completed(name(step))
        assert ledger.completed(name(step))
    last = [name(step) for step in range(40, 40 + 10 * REMEMBERED, 10)]
    assert tally.complete == ledger.complete == last
    for old in (30, 40):
        assert not tally.completed(name(old))
        assert not ledger.completed(name(old))
    assert ledger.retire_below == last[-1].step


def test_what_is_known_to_be_complete_needs_no_more_seals() -> None:
    tally = LeaderState(HOSTS)
    for step in (10, 20, 30):
        tally.seal("a", name(step))
    tally.completed(name(20))
    assert tally.awaited() == {name(30): {"b", "c"}}
    assert tally.seal("b", name(10)) == name(20)


def test_a_save_that_some_host_skipped_is_passed_over_by_a_newer_one() -> None:
    tally = LeaderState(HOSTS)
    tally.seal("a", name(10))
    for host in HOSTS:
        tally.seal(host, name(20))
    assert tally.newest == name(20)
    assert tally.awaited() == {}


def test_strangers_do_not_count() -> None:
    tally = LeaderState(("a", "b"))
    tally.seal("a", name(1))
    assert tally.seal("x", name(1)) is None
    assert tally.newest is None


def test_seals_of_two_saves_at_one_step_are_never_added_up() -> None:
    tally = LeaderState(("a", "b"))
    tally.seal("a", SaveName(1, "old-1"))
    assert tally.seal("b", SaveName(1, "new-1")) is None


@pytest.mark.parametrize(("keep", "allowed"), [(1, [10, 20, 30]), (2, [None, 10, 20])])
def test_what_may_go_is_older_than_the_complete_generations_that_stay(
    keep: int, allowed: list[int | None]
) -> None:
    ledger = HostState(keep=keep)
    assert ledger.retire_below is None
    for step, below in zip((10, 20, 30), allowed, strict=True):
        assert ledger.completed(name(step))
        assert ledger.retire_below == below
    assert not ledger.completed(name(20))


def test_a_host_repeats_its_seals_from_the_newest_complete_save_on() -> None:
    ledger = HostState()
    for step in (10, 20, 30):
        ledger.seal(name(step))
    ledger.completed(name(20))
    assert ledger.to_say() == [name(20), name(30)]


@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6), st.booleans()), max_size=60),
)
def test_nothing_is_retired_that_was_not_superseded_on_all_hosts(
    count: int, story: list[tuple[int, int, bool]]
) -> None:
    """Whatever is sealed in whatever order, and however often the leader forgets all."""
    hosts = [f"h{number}" for number in range(count)]
    ledgers = {host: HostState() for host in hosts}
    sealed: dict[str, set[int]] = {host: set() for host in hosts}
    tally = LeaderState(hosts)
    for number, step, restarts in story:
        host = hosts[number % count]
        if restarts:
            tally = LeaderState(hosts)
            for other in hosts:
                for save in ledgers[other].to_say():
                    tally.seal(other, save)
        sealed[host].add(step)
        ledgers[host].seal(name(step))
        if tally.seal(host, name(step)) is not None and tally.newest is not None:
            for ledger in ledgers.values():
                ledger.completed(tally.newest)
        for ledger in ledgers.values():
            below = ledger.retire_below
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
        backlog, done, now, seen = CopyQueue(), set(), drawn.random(), 0
        while seen < len(steps) or backlog.take(SESSION)[0] is not None:
            while seen < len(steps) and seen <= now:
                backlog.add(name(steps[seen]))
                seen += 1
            save, _ = backlog.take(SESSION)
            if save is None:
                now = float(seen)
                continue
            backlog.remove(save)
            done.add(save.step)
            now += speed
        copied.append(done)
    common = sorted(steps.index(step) for step in set.intersection(*copied))
    gaps = [b - a for a, b in zip([0, *common], [*common, len(steps)], strict=True)]
    assert max(gaps) <= (64 if regular else 300), gaps


def test_a_backlog_names_what_it_passes_over_and_keeps_what_is_newer() -> None:
    backlog = CopyQueue()
    for step in (10, 20, 30):
        backlog.add(name(step))
    assert backlog.take(SESSION) == (name(20), [name(10)])
    assert backlog.take(SESSION) == (name(20), [])
    backlog.remove(name(20))
    assert backlog.take(SESSION) == (name(30), [])
    backlog.remove(name(30))
    assert backlog.take(SESSION) == (None, [])


def test_saves_of_earlier_sessions_wait_and_supersede_nothing() -> None:
    backlog = CopyQueue()
    earlier = SaveName(1280, "earlier-1280")  # many factors of two
    backlog.add(earlier)
    backlog.add(name(1275))
    assert backlog.take(SESSION) == (name(1275), [])
    backlog.remove(name(1275))
    assert backlog.take(SESSION) == (earlier, [])


def test_a_save_that_no_host_took_stands_back_behind_newer_ones() -> None:
    backlog = CopyQueue()
    backlog.add(name(1280))
    assert backlog.take(SESSION) == (name(1280), [])
    assert backlog.failed(name(1280))
    assert backlog.take(SESSION) == (name(1280), [])  # there is nothing else to do
    assert not backlog.failed(name(1280))  # no news any more
    backlog.add(name(1290))
    assert backlog.take(SESSION) == (name(1290), [name(1280)])


def test_saves_of_earlier_sessions_take_turns_when_none_can_be_copied() -> None:
    backlog = CopyQueue()
    even, odd = SaveName(20, "earlier-20"), SaveName(21, "earlier-21")
    for save in (even, odd):
        backlog.add(save)
    taken = []
    for _ in range(4):
        save, _ = backlog.take(SESSION)
        assert save is not None
        taken.append(save)
        backlog.failed(save)
    assert taken == [even, odd, even, odd]


# --- the table of peers ---------------------------------------------------------------------------


def make_table(**change: object) -> HostTable:
    peer = Peer(
        host="a", address="10.0.0.1", port=7, ranks=(0, 1), domains=(("rack", "r1"),), groups=("tp0",)
    )
    fields = {
        "session": "s", "run_id": "r", "token": "t", "leader": "a", "replicas": 1, "bytes_per_s": 5,
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
        ({"token": ""}, "session and a token"),
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
