# SPDX-License-Identifier: Apache-2.0
"""The rendezvous store as a process of its own: no host is special, and the store may end and come back."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
from torch.distributed import TCPStore

from resiliency.events import EventType
from resiliency.files import ALIVE_FILE_ENV
from resiliency.launch import _compat
from resiliency.launch.job import KUBERNETES_ENV
from resiliency.launch.rendezvous import reconnecting_store
from resiliency.launch.rendezvous.reconnecting_store import (
    ReconnectingStore,
    StoreUnreachable,
    is_served_by_process,
)
from resiliency.testing.processes import Command
from tests.ports import free_port
from tests.waiting import WAIT_S, wait_until, wait_until_equal

from .conftest import ROOT, WORKER, Launch, events
from .several_hosts import rank_of, together

MODULE = [sys.executable, "-m", "resiliency.launch.rendezvous_store"]
CONF = (
    "--rdzv-conf=is_host=0,keep_alive_interval=1,keep_alive_max_attempt=6,join_timeout=60,last_call_timeout=2"
)

VALUE = _compat._RendezvousValue("state")

Serve = Callable[[int], Command]


@pytest.fixture
def serve() -> Iterator[Serve]:
    with ExitStack() as stack:

        def start(port: int) -> Command:
            argv = [*MODULE, "--host", "127.0.0.1", "--port", str(port)]
            store = stack.enter_context(Command(argv, cwd=ROOT))
            store.wait_for_line("rendezvous store listens", timeout=WAIT_S)
            return store

        yield start


def test_a_store_says_that_it_is_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive = tmp_path / "alive"
    monkeypatch.setenv(ALIVE_FILE_ENV, str(alive))
    with Command([*MODULE, "--host", "127.0.0.1", "--port", "0"], cwd=ROOT) as store:
        store.wait_for_line("rendezvous store listens", timeout=WAIT_S)
        os.utime(alive, (1.0, 1.0))
        wait_until(lambda: alive.stat().st_mtime > 1.0, "the store does not say that it is alive")
    monkeypatch.setenv(ALIVE_FILE_ENV, str(tmp_path / "none" / "alive"))
    with Command([*MODULE, "--host", "127.0.0.1", "--port", "0"], cwd=ROOT) as store:
        assert store.wait(timeout=WAIT_S) == 2
        assert "RESILIENCY_ALIVE_FILE" in store.output


def join(launch: Launch, tmp_path: Path, port: int, name: object, nnodes: str, *words: object) -> Command:
    flags = [CONF, f"--nnodes={nnodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
    rest = ["--rdzv-id=trio", "--local-addr=127.0.0.1", *(words or ("--max-restarts=3", WORKER, "wait"))]
    return launch(*flags, *rest, run_dir=tmp_path / f"run{name}")


def signal_worker(host: Command, attempt: int, number: signal.Signals) -> None:
    line = host.wait_for_line(rf"attempt {attempt} pid (\d+) ready", timeout=WAIT_S)
    os.kill(int(line[1]), number)


@pytest.mark.slow
def test_the_loss_of_the_first_host_is_the_loss_of_any_host(
    launch: Launch, serve: Serve, tmp_path: Path
) -> None:
    port = free_port()
    serve(port)
    hosts = [join(launch, tmp_path, port, index, "2:3") for index in range(3)]
    attempt, ranks = together(*hosts)
    first = hosts.pop(ranks.index(0))
    first.kill()  # the launcher and all that it started, at once
    assert sorted(rank_of(host, attempt + 1) for host in hosts) == [0, 1]

    def sizes() -> list[object]:
        """Of the job, at the last two starts."""
        started = events(tmp_path / f"run{ranks.index(1)}", EventType.WORKERS_STARTED)
        return [event.fields["hosts"] for event in started[-2:]]

    wait_until_equal(sizes, [3, 2])


@pytest.mark.slow
def test_a_store_that_is_killed_and_started_again_touches_no_rank_and_the_next_failure_is_handled(
    launch: Launch, serve: Serve, tmp_path: Path
) -> None:
    port = free_port()
    store = serve(port)
    hosts = [join(launch, tmp_path, port, index, "2") for index in range(2)]
    before = [rank_of(host, 0) for host in hosts]
    store.signal(signal.SIGKILL)
    for host in hosts:
        host.wait_for_line("rendezvous store at .* is away", timeout=WAIT_S)
    serve(port)
    for host in hosts:
        host.wait_for_line("rendezvous store at .* is back", timeout=WAIT_S)
    for index, host in enumerate(hosts):
        assert host.returncode is None
        assert len(events(tmp_path / f"run{index}", EventType.WORKERS_STARTED)) == 1
    signal_worker(hosts[0], 0, signal.SIGKILL)
    assert [rank_of(host, 1) for host in hosts] == before
    assert all(len(re.findall("is away", host.output)) == 1 for host in hosts)


@pytest.mark.slow
def test_a_restart_that_falls_into_the_gap_waits_for_the_store(
    launch: Launch, serve: Serve, tmp_path: Path
) -> None:
    port = free_port()
    store = serve(port)
    hosts = [join(launch, tmp_path, port, index, "2") for index in range(2)]
    before = [rank_of(host, 0) for host in hosts]
    store.signal(signal.SIGKILL)
    store.wait(timeout=WAIT_S)
    signal_worker(hosts[1], 0, signal.SIGKILL)
    wait_until(
        lambda: events(tmp_path / "run1", EventType.WORKERS_STOPPED),
        "the workers of the host were not stopped",
    )
    serve(port)
    assert [rank_of(host, 1) for host in hosts] == before


@pytest.mark.slow
def test_a_job_that_finishes_while_the_store_is_away_succeeds_on_all_hosts(
    launch: Launch, serve: Serve, tmp_path: Path
) -> None:
    port = free_port()
    store = serve(port)
    words = ("--max-restarts=3", WORKER, "graceful")
    hosts = [join(launch, tmp_path, port, index, "2", *words) for index in range(2)]
    for host in hosts:
        host.wait_for_line("attempt 0 pid", timeout=WAIT_S)
    store.kill()
    for host in hosts:
        signal_worker(host, 0, signal.SIGTERM)  # on which it saves and exits 0
    for host in hosts:
        host.wait_for_line("all workers of this host succeeded", timeout=WAIT_S)
    serve(port)
    assert [host.wait(timeout=WAIT_S) for host in hosts] == [0, 0]
    for index in range(2):
        assert len(events(tmp_path / f"run{index}", EventType.WORKERS_STARTED)) == 1


TOLD = ("--max-restarts=0", WORKER, "graceful", "--told")


@pytest.mark.parametrize(
    ("asked", "last", "places"),
    [
        (["", "", ""], ["", "", ""], [0, 1, 2]),
        (["2", "5", "1"], ["", "", ""], [1, 2, 0]),  # of more hosts than are there
        (["2", "", "1"], ["", "", ""], [0, 1, 2]),
        (["", "", ""], ["", "0", "2"], [1, 0, 2]),  # a replacement completed the meeting
        (["", "", ""], ["3", "", "0"], [1, 2, 0]),  # the job is smaller than it was
        (["", "", ""], ["1", "1", ""], [1, 0, 2]),  # of two jobs, which none of ours are
        (["2", "1", "0"], ["0", "1", "2"], [2, 1, 0]),
    ],
)
def test_hosts_that_stay_keep_their_node_ranks(asked: list[str], last: list[str], places: list[int]) -> None:
    assert [_compat._place(asked, last, rank) for rank in range(len(last))] == places


@pytest.mark.thorough("another end of a job is near")
@pytest.mark.slow
def test_hosts_whose_ranks_stopped_for_the_sake_of_one_that_leaves_meet_again(
    launch: Launch, serve: Serve, tmp_path: Path
) -> None:
    port = free_port()
    serve(port)
    leaves, stays = (join(launch, tmp_path, port, index, "2", *TOLD) for index in range(2))
    assert sorted([rank_of(leaves, 0), rank_of(stays, 0)]) == [0, 1]
    signal_worker(stays, 0, signal.SIGTERM)  # by the ranks' agreement; it ends first
    stays.wait_for_line("saved", timeout=WAIT_S)
    assert leaves.returncode is None
    leaves.signal(signal.SIGTERM)
    assert leaves.wait(timeout=WAIT_S) == 0
    stays.wait_for_line("attempt 0 ends: hosts left", timeout=WAIT_S)
    comes = join(launch, tmp_path, port, 2, "2", *TOLD)
    assert [rank_of(stays, 1), rank_of(comes, 1)] == [rank_of(stays, 0), 1 - rank_of(stays, 0)]
    started = events(tmp_path / "run1", EventType.WORKERS_STARTED)
    assert [event.fields["restarts"] for event in started] == [0, 0]  # it is nobody's failure


@pytest.mark.thorough("another end of a job is near")
@pytest.mark.slow
@pytest.mark.parametrize(("launchers", "code"), [(True, 0), (False, 143)], ids=["launchers", "ranks in pods"])
def test_a_job_that_is_told_to_end_on_all_hosts_ends(
    launch: Launch,
    serve: Serve,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    launchers: bool,
    code: int,
) -> None:
    if code:
        monkeypatch.setenv(KUBERNETES_ENV, "10.0.0.1")
    port = free_port()
    serve(port)
    hosts = [join(launch, tmp_path, port, index, "2", *TOLD) for index in range(2)]
    assert sorted(rank_of(host, 0) for host in hosts) == [0, 1]
    for host in hosts:
        signal_worker(host, 0, signal.SIGTERM)
        host.wait_for_line("saved", timeout=WAIT_S)
        if launchers:
            host.signal(signal.SIGTERM)
    assert [host.wait(timeout=WAIT_S) for host in hosts] == [code, code]
    for host in hosts:
        assert "step 7, at which SIGTERM stopped them, is committed" in host.output
        assert "attempt 1" not in host.output


@pytest.mark.thorough("another end of a job is near")
@pytest.mark.slow
def test_a_job_that_has_ended_leaves_its_name_to_the_next_start_of_it(
    launch: Launch, serve: Serve, tmp_path: Path
) -> None:
    port = free_port()
    serve(port)
    finish = ("--max-restarts=0", WORKER, "finish")
    ended = [join(launch, tmp_path, port, f"ended{index}", "2", *finish) for index in range(2)]
    assert [host.wait(timeout=WAIT_S) for host in ended] == [0, 0]
    again = [join(launch, tmp_path, port, f"again{index}", "2", *finish) for index in range(2)]
    assert [host.wait(timeout=WAIT_S) for host in again] == [0, 0]


def a_state(
    *, round: int = 3, hosts: int = 2, complete: bool = True, closed: bool = False, age_s: int = 60
) -> Any:
    state = _compat._ft_rendezvous._RendezvousState()
    state.round, state.complete, state.closed = round, complete, closed
    state.participants = {f"host{rank}": rank for rank in range(hosts)}
    state.last_heartbeats = dict.fromkeys(state.participants, _compat._utc_now() - timedelta(seconds=age_s))
    return state


def value_of(state: Any) -> bytes:
    return bytes(VALUE.encode(state).encode())


def test_of_two_states_the_later_one_of_the_job_is_newer() -> None:
    in_order = [
        a_state(round=3, complete=False, hosts=1),
        a_state(round=3, complete=False, hosts=2),
        a_state(round=3, hosts=2),
        a_state(round=3, hosts=1),  # one has left
        a_state(round=4, complete=False, hosts=0),
        a_state(round=4, closed=True),
    ]
    values = [value_of(state) for state in in_order]
    for place, mine in enumerate(values):
        assert [VALUE.is_newer(mine, theirs) for theirs in values] == [place > other for other in range(6)]


def test_a_state_that_is_put_back_says_that_all_hosts_are_alive() -> None:
    revived = VALUE.decode(VALUE.revive(value_of(a_state(age_s=3600))).encode())
    assert revived.round == 3
    assert all(_compat._utc_now() - seen < timedelta(seconds=30) for seen in revived.last_heartbeats.values())


class Looked:
    """What a launcher finds in a store at each look; the last of it stays."""

    def __init__(self, *states: Any) -> None:
        self.values = [value_of(state) for state in states]
        self.looks = 0

    def call(self, function: Callable[[Any], Any]) -> Any:
        return function(self)

    def get(self, key: str) -> bytes:
        self.looks += 1
        return self.values[min(self.looks, len(self.values)) - 1]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if self.values[-1] == expected.encode():
            self.values = [desired.encode()]
        return self.values[-1]

    @property
    def state(self) -> Any:
        return VALUE.decode(self.values[-1])


@pytest.fixture
def looks_are_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compat, "LOOK", timedelta(milliseconds=10))
    monkeypatch.setattr(_compat, "BEYOND_SILENCE", timedelta(milliseconds=20))


SILENT_AFTER = timedelta(milliseconds=150)  # 15 looks


def ended(age_s: int) -> Any:
    return a_state(closed=True, age_s=age_s)


def test_a_job_may_start_at_once_under_the_name_of_one_that_ended_and_whose_hosts_are_silent() -> None:
    store = Looked(ended(age_s=60))
    VALUE.begin_next_run(cast(Any, store), SILENT_AFTER)
    assert (store.state.round, store.state.closed, store.state.participants) == (4, False, {})
    assert store.looks == 1


def test_a_job_that_has_not_ended_stays_as_it_is() -> None:
    store = Looked(a_state(closed=False))
    VALUE.begin_next_run(cast(Any, store), SILENT_AFTER)
    assert (store.state.round, store.looks) == (3, 1)


@pytest.mark.usefixtures("looks_are_quick")
def test_a_host_whose_clock_goes_wrong_is_silent_once_its_heartbeats_have_stayed_the_same() -> None:
    store = Looked(ended(age_s=-3600))
    VALUE.begin_next_run(cast(Any, store), SILENT_AFTER)
    assert (store.state.round, store.state.closed) == (4, False)
    assert store.looks == 16  # the first, and 15 that found it unchanged


@pytest.mark.usefixtures("looks_are_quick")
def test_a_start_waits_for_the_hosts_of_the_ended_job_to_leave() -> None:
    gone = ended(age_s=0)
    gone.last_heartbeats = {}
    store = Looked(*(ended(age_s=-3600 - look) for look in range(5)), gone)
    VALUE.begin_next_run(cast(Any, store), SILENT_AFTER)
    assert (store.state.round, store.state.closed, store.looks) == (4, False, 6)


@pytest.mark.usefixtures("looks_are_quick")
def test_a_start_is_refused_while_hosts_of_the_ended_job_live() -> None:
    store = Looked(*(ended(age_s=-3600 - look) for look in range(100)))
    VALUE.begin_next_run(cast(Any, store), SILENT_AFTER)
    assert store.state.closed
    assert store.looks == 18  # 15 for silence, 2 beyond it


@pytest.mark.thorough("another end of a job is near")
@pytest.mark.slow
def test_a_start_a_moment_after_a_job_whose_host_was_killed_needs_no_second_try(
    launch: Launch, serve: Serve, tmp_path: Path
) -> None:
    port = free_port()
    serve(port)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=WAIT_S))
    store.set("torch.rendezvous.trio", value_of(ended(age_s=-3600)).decode())
    host = join(launch, tmp_path, port, 0, "1", "--max-restarts=0", WORKER, "finish")
    assert host.wait(timeout=WAIT_S) == 0
    assert "waiting for its hosts to be gone" in host.output


#: Two hosts meet in round 5.  The first of them has been there since round 2, the other one comes new.
#: In a process of its own, which NVRx's threads end with.
REPLACEMENT = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
from torch.distributed import TCPStore
from resiliency.launch import _compat
from resiliency.launch.rendezvous import reconnecting_store

server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
server.set(reconnecting_store.SERVED_BY, reconnecting_store.BY_PROCESS)
state = _compat._ft_rendezvous._RendezvousState()
state.round = 5
server.set("torch.rendezvous.trio", _compat._RendezvousValue.encode(state))
hosts = [
    _compat.HostRendezvous.connect(
        endpoint=f"127.0.0.1:{server.port}", run_id="trio", min_nodes=2, max_nodes=2, local_addr="127.0.0.1",
        node_rank=None, upscaling=False, conf={"is_host": "0", "join_timeout": "60"},
    )[0]
    for _ in range(2)
]
hosts[0]._first_round, hosts[0].run = 2, "trio-1"
with ThreadPoolExecutor() as threads:
    met = [threads.submit(host.next_rendezvous) for host in hosts]
    print(sorted(place.result()[1] for place in met), [host.round() for host in hosts])
    print([(host.run, host.first_attempt) for host in hosts])
sys.stdout.flush()
os._exit(0)
"""


def test_a_replacement_learns_the_run_and_counts_restarts_from_its_start(
    temporary: Path,
) -> None:
    with Command([sys.executable, "-c", REPLACEMENT], cwd=ROOT, env={"TMPDIR": str(temporary)}) as hosts:
        assert hosts.wait(timeout=WAIT_S) == 0, hosts.output
    assert "[0, 1] [3, 3]" in hosts.output
    assert "[('trio-1', 2), ('trio-1', 2)]" in hosts.output


@contextmanager
def served_here(listener: socket.socket) -> Iterator[None]:
    """A store in this process, which takes the place of `listener`."""
    port, fd = listener.getsockname()[1], listener.detach()
    _server = TCPStore(
        *("127.0.0.1", port),
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=fd,
        use_libuv=False,  # which keeps descriptors for as long as the process lives
    )
    yield


class Gone:
    """A connection that breaks after its first answers."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)

    def get(self, key: str) -> bytes:
        if not self.answers:
            raise RuntimeError("Broken pipe")
        return self.answers.pop()


def broken(port: int, shared: Any, *answers: bytes) -> ReconnectingStore:
    store = ReconnectingStore(
        *("127.0.0.1", port),
        first=cast(Any, Gone(*answers)),
        shared=shared,
        wait=timedelta(seconds=WAIT_S),
    )
    for answer in answers:
        assert store.get(VALUE.key) == answer
    with store.wait_at_most(0), pytest.raises(StoreUnreachable, match="is away"):
        store.get(VALUE.key)
    return store


def test_an_attempt_to_connect_that_nobody_answers_is_given_up_and_another_one_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reconnecting_store, "CALL_S", 0.5)
    with ExitStack() as held:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        store = held.enter_context(closing(broken(port, VALUE)))
        said = b""
        while not said:  # the first connection only looks whether something listens
            listener.settimeout(WAIT_S)
            peer = held.enter_context(listener.accept()[0])
            peer.settimeout(WAIT_S)
            said = peer.recv(1)
        # torch's client waits for an answer, and never learns that none will come.
        with served_here(listener):
            wait_until(lambda: not store.away, "the launcher waits for ever")
            assert store.get(VALUE.key) == VALUE.initial.encode()


def test_what_cannot_be_put_back_is_said_once_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    class Stubborn(_compat._RendezvousValue):
        left = 2

        def revive(self, value: bytes) -> str:
            self.left -= 1
            if self.left >= 0:
                raise ValueError("of another release")
            return super().revive(value)

    mine = value_of(a_state(round=7))
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    with served_here(listener), closing(broken(port, Stubborn(VALUE.key), mine)) as store:
        wait_until(lambda: not store.away, "the launcher does not try again")
        assert VALUE.decode(store.get(VALUE.key)).round == 7
    assert len(re.findall("cannot be used: ValueError: of another release", caplog.text)) == 1


def connect(port: int) -> ReconnectingStore:
    first = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=WAIT_S))
    assert is_served_by_process(first, serves=False)
    return ReconnectingStore("127.0.0.1", port, first=first, shared=VALUE, wait=timedelta(seconds=WAIT_S))


@pytest.mark.slow
def test_what_launchers_need_is_put_back_into_an_empty_store_and_the_newest_state_wins(serve: Serve) -> None:
    port = free_port()
    server = serve(port)
    old, new = value_of(a_state(round=1)), value_of(a_state(round=2))
    with closing(connect(port)) as behind, closing(connect(port)) as ahead:
        ahead.compare_set(VALUE.key, "", old.decode())
        assert behind.get(VALUE.key) == old
        ahead.compare_set(VALUE.key, old.decode(), new.decode())
        first, second = behind.begin_prefix("round1"), ahead.begin_prefix("round1")
        first.set("a", "1")
        second.set("b", b"2")
        server.kill()
        # In this moment each of them learns that the store is away.
        for store in (behind, ahead):
            with store.wait_at_most(0), pytest.raises(StoreUnreachable, match="is away"):
                store.get(VALUE.key)
        serve(port)
        assert second.multi_get(["a", "b"]) == first.multi_get(["a", "b"]) == [b"1", b"2"]
        wait_until(lambda: not behind.away and not ahead.away, "not both are connected again")
        assert {VALUE.decode(store.get(VALUE.key)).round for store in (behind, ahead)} == {2}


@pytest.mark.slow
def test_a_store_that_answers_nothing_holds_no_caller_for_long(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconnecting_store, "CALL_S", 1.0)
    port = free_port()
    server = serve(port)
    with closing(connect(port)) as store:
        store.publish("key", "value")
        server.signal(signal.SIGSTOP)
        with store.wait_at_most(0), pytest.raises(StoreUnreachable, match="is away"):
            store.get("key")
        server.signal(signal.SIGCONT)
        assert store.get("key") == b"value"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--port", "70000"], r"--port must be 0 to 65535, found 70000"),
        (["--port", "x"], r"--port: invalid int value: 'x'.*See --help"),
    ],
)
def test_a_wrong_flag_is_refused_in_one_sentence(flags: list[str], sentence: str) -> None:
    done = subprocess.run([*MODULE, *flags], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert re.search(sentence, done.stderr)
    assert "Traceback" not in done.stderr
