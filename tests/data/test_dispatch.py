# SPDX-License-Identifier: Apache-2.0
"""The data server and its clients: threads for what they say, processes for what is stopped and killed."""

from __future__ import annotations

import json
import re
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from resiliency.data import (
    Answer,
    DataClient,
    DataServer,
    DispatchedSampler,
    PartitionRanges,
    PoisonedRange,
    PoisonPolicy,
    SampleRange,
    SampleRanges,
    StaleRange,
    TextRanges,
    sizes_of,
    text_records,
)
from resiliency.data.dispatch.wire import LINE_BYTES
from resiliency.errors import ConfigError, DataError, PeerError
from resiliency.testing.processes import Command
from tests.data.data_servers import PATIENCE_S, client_of, holders, serving
from tests.data.dispatch_programs import RANGE, TOKEN
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[DataServer]:
    with serving(tmp_path) as running:
        yield running


def fall_silent(server: DataServer, worker: str) -> None:
    """What the server does when the lease of a worker ends."""
    server._loop.call_soon_threadsafe(server._submit, {"op": "silent", "worker": worker})
    wait_until(lambda: worker not in holders(server), f"{worker} still holds ranges")


def one_line(address: tuple[str, int], *lines: bytes) -> tuple[dict[str, Any], bytes]:
    """What a server says first, and what it says after these lines until it hangs up."""
    with socket.create_connection(address, timeout=PATIENCE_S) as connection:
        said = connection.makefile("rb")
        greeting = json.loads(said.readline())
        try:
            for line in lines:
                connection.sendall(line)
            return greeting, said.read()
        except ConnectionError:  # it hung up before it had read all
            return greeting, b""


# -- what is said


def test_each_sample_once_and_an_explicit_end_while_others_leave_fall_silent_and_lose_their_lease_d54(
    tmp_path: Path,
) -> None:
    used: list[int] = []
    ended: list[str] = []

    def work(name: str) -> None:
        with client_of(server, name) as client:
            for part in client.ranges():
                with suppress(StaleRange):  # its lease is short, for a machine that is busy
                    client.done(part)
                    used.extend(range(part.start, part.stop))
        ended.append(name)

    def lose(client: DataClient, how: str) -> None:
        if how == "leave":
            client.close()
        elif how == "silent":
            fall_silent(server, client.worker)
        # else the heartbeats have stopped, and its lease ends

    with serving(tmp_path, size=400, lease=timedelta(seconds=1)) as server, ExitStack() as stack:
        lost = []
        for how in ("leave", "silent", "lease"):
            client = stack.enter_context(client_of(server, how))
            if how == "lease":
                client._lease_s = 1e6
            assert client.next_range() is not None
            lost.append(threading.Thread(target=lose, args=(client, how)))
        working = [threading.Thread(target=work, args=(f"w{number}",)) for number in range(8)]
        threads = [*working[:4], *lost, *working[4:]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert sorted(used) == list(range(400))
    assert len(ended) == 8


def test_a_worker_that_waits_gets_what_another_gives_back_and_what_it_leaves(server: DataServer) -> None:
    with client_of(server, "a") as first, client_of(server, "b") as second:
        parts = [first.next_range() for _ in range(4)]
        assert second.try_next_range() is Answer.WAIT
        got: list[object] = []
        waiting = threading.Thread(target=lambda: got.extend([second.next_range(), second.next_range()]))
        waiting.start()
        assert parts[2] is not None
        first.give_back(parts[2])
        wait_until(lambda: server._requests.held, "b does not wait for a second range")
        first.close()  # and leaves three
        waiting.join(PATIENCE_S)
        assert got == [parts[2], parts[0]]


def interrupt_while_it_waits(server: DataServer, client: DataClient) -> None:
    """A signal ends a call of `next_range` that the server holds."""

    class Interrupted(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    def interrupt_while_held() -> None:
        wait_until(lambda: server._requests.held, f"{client.worker} does not wait for a range")
        signal.pthread_kill(main, signal.SIGUSR1)

    main = threading.get_ident()
    before = signal.signal(signal.SIGUSR1, interrupt)
    thread = threading.Thread(target=interrupt_while_held)
    try:
        thread.start()
        with pytest.raises(Interrupted):
            client.next_range()
    finally:
        thread.join(PATIENCE_S)
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("granted", [True, False], ids=["before the next call", "after it"])
def test_a_range_that_an_interrupted_call_would_have_got_is_held_by_nobody_who_does_not_use_it(
    server: DataServer, granted: bool
) -> None:
    with client_of(server, "a") as first, client_of(server, "b", max_wait=timedelta(seconds=60)) as second:
        parts = [first.next_range() for _ in range(4)]
        assert parts[0] is not None
        interrupt_while_it_waits(server, second)
        if granted:
            first.give_back(parts[0])  # which the server grants to the call that was interrupted
            assert "b" in holders(server)
        with pytest.raises(ConfigError, match="no partitions that grow"):
            second.extend({})
        if not granted:
            first.give_back(parts[0])
            assert "b" not in holders(server)
        assert second.try_next_range() == parts[0]
        second.done(parts[0])
        assert second.try_next_range() is Answer.WAIT


def test_a_rollback_after_an_interrupted_call_takes_no_range(server: DataServer) -> None:
    with client_of(server, "a") as first, client_of(server, "b", max_wait=timedelta(seconds=60)) as second:
        parts = [first.next_range() for _ in range(4)]
        interrupt_while_it_waits(server, second)
        second.rollback(None)
        assert holders(server) == []
        assert second.next_range() == parts[0]


def test_a_call_that_a_signal_interrupts_does_not_give_its_answer_to_the_next_one(server: DataServer) -> None:
    with client_of(server, "a") as first, client_of(server, "b", max_wait=timedelta(seconds=60)) as second:
        parts = [first.next_range() for _ in range(4)]
        assert parts[0] is not None
        interrupt_while_it_waits(server, second)
        first.give_back(parts[0])
        assert second.next_range() == parts[0]
        second.done(parts[0])
        assert second.try_next_range() is Answer.WAIT
        first.close()
        assert second.next_range() == parts[1]


def test_steps_attempts_and_states_travel(server: DataServer) -> None:
    with client_of(server, "a") as old:
        first, second = old.next_range(), old.next_range()
        assert first is not None
        assert second is not None
        old.done(first, step=1)
        state = old.commit(1)
        old.done(second, step=2)
        with client_of(server, "b", attempt=1) as new:
            with pytest.raises(StaleRange, match="attempt 0 is over"):
                old.next_range()
            with pytest.raises(ConfigError, match="did not say where its model is"):
                new.next_range()
            new.rollback(json.loads(json.dumps(state)))
            assert new.next_range() == second
            with pytest.raises(ConfigError, match=r"kept are steps \[1\]"):
                new.rollback_to(7)
    with pytest.raises(StaleRange, match="attempt 0 is over"):
        client_of(server, "c", attempt=0)


def test_a_range_that_fails_too_often_ends_the_job_by_name_d49(tmp_path: Path) -> None:
    with serving(tmp_path, policy=PoisonPolicy(tries=2)) as server, client_of(server) as client:
        for _ in range(2):
            part = client.next_range()
            assert part is not None
            client.failed(part, "sample 7 cannot be decoded")
        with pytest.raises(PoisonedRange, match="failed 2 times: sample 7 cannot be decoded"):
            client.next_range()


def test_skipped_ranges_are_told_to_the_workers(tmp_path: Path) -> None:
    policy = PoisonPolicy(tries=1, skip=True)
    with serving(tmp_path, size=10, policy=policy) as server, client_of(server) as client:
        part = client.next_range()
        assert part is not None
        client.failed(part, "bad")
        assert client.next_range() is None
        assert client.skipped == 1


def test_partitions_grow_while_workers_wait_d56(tmp_path: Path) -> None:
    source = PartitionRanges(range_size=10)
    found: list[object] = []
    with (
        DataServer(source, tmp_path / "book", token=TOKEN) as server,
        client_of(server, "a") as reader,
        client_of(server, "b", max_wait=timedelta()) as feeder,
    ):
        with pytest.raises(DataError, match="no range within 0 s"):
            feeder.next_range()
        waiting = threading.Thread(target=lambda: found.append(reader.next_range()))
        waiting.start()
        wait_until(lambda: server._requests.held, "the request for a range is not held")
        feeder.extend({"x": 4}, closed=True)
        waiting.join(PATIENCE_S)
    assert found == [SampleRange(0, 4, 0, "x")]
    with DataServer(source, tmp_path / "book", token=TOKEN) as server, client_of(server, "a") as reader:
        assert reader.next_range() == found[0]
        assert reader.try_next_range() is Answer.WAIT  # it holds that range itself


# -- what is refused at the door


def test_a_client_without_the_token_is_refused_and_never_sees_it(server: DataServer) -> None:
    with pytest.raises(ConfigError, match="does not know the token"):
        client_of(server, token="another")  # noqa: S106 - that is the point
    with pytest.raises(ConfigError, match="there is no token"):
        client_of(server, token="")
    greeting, answer = one_line(server.address, b'{"op":"join","worker":"a","life":"x","attempt":0}\n')
    assert TOKEN not in json.dumps(greeting)
    assert b"does not know the token" in answer
    assert not server._keeper.workers


@pytest.mark.parametrize(
    "line", [b"\n", b"GET / HTTP/1.1\r\n\r\n", b"\xff\xfe\x00\n", b"[1]\n", b"[" * 5_000 + b"\n"]
)
def test_what_is_no_message_is_refused_and_others_are_served(server: DataServer, line: bytes) -> None:
    _, answer = one_line(server.address, line)
    assert json.loads(answer)["error"] == "ConfigError"
    with client_of(server) as client:
        assert client.next_range() == SampleRange(0, 10)


def test_a_message_without_end_is_cut_off(server: DataServer) -> None:
    assert one_line(server.address, b"x" * (LINE_BYTES + 1))[1] == b""
    with client_of(server) as client:
        assert client.next_range() is not None


def test_a_worker_may_not_speak_for_the_server_or_another_worker(server: DataServer) -> None:
    with client_of(server, "a") as a, client_of(server, "b") as b:
        assert a.next_range() is not None
        b._ask("leave", worker="a")  # the name in a request is that of its connection
        assert [held.worker for held in server._keeper.book.held] == ["a"]
        with pytest.raises(ConfigError, match="request 'silent' is not a worker's"):
            a._ask("silent")


# -- what is lost


def test_a_server_on_its_journal_goes_on_where_the_one_before_was_killed(tmp_path: Path) -> None:
    with serving(tmp_path) as server, client_of(server) as client:
        held = client.next_range()
        assert held is not None
        port = server.address
        server.close()
        with serving(tmp_path, address=port) as again:
            client.done(held)
            assert client.next_range() == SampleRange(10, 20)
            assert again.book_id == server.book_id


def test_a_server_that_knows_longer_partitions_than_its_journal_counts_each_offset_once(
    tmp_path: Path,
) -> None:
    with (
        DataServer(PartitionRanges(range_size=10, stops={"y": 4}), tmp_path / "book", token=TOKEN) as server,
        client_of(server, max_wait=timedelta(seconds=20)) as client,
    ):
        part = client.next_range()
        assert part == SampleRange(0, 4, 0, "y")
        client.done(part)
        port = server.address
        server.close()
        # "x" comes first where both are known: the grant of before must not become one of "x".
        longer = PartitionRanges(range_size=10, stops={"x": 3, "y": 9}, closed=True)
        with DataServer(longer, tmp_path / "book", token=TOKEN, address=port):
            found = []
            for part in client.ranges():
                found.append(part)
                client.done(part)
    assert found == [SampleRange(0, 3, 0, "x"), SampleRange(4, 9, 0, "y")]


def test_a_server_with_another_policy_than_its_journal_holds_what_it_granted(tmp_path: Path) -> None:
    with serving(tmp_path, size=20) as server, client_of(server, max_wait=timedelta(seconds=20)) as client:
        part = client.next_range()
        assert part is not None
        client.failed(part, "bad")
        assert client.next_range() == part
        port = server.address
        server.close()
        with serving(tmp_path, size=20, address=port, policy=PoisonPolicy(tries=1, skip=True)):
            client.done(part)
            second = client.next_range()
            assert second == SampleRange(10, 20)
            client.failed(second, "bad")
            assert client.next_range() is None
            assert client.skipped == 1


def test_a_server_that_lost_its_book_is_an_error_and_never_the_end_of_data_d51(tmp_path: Path) -> None:
    with serving(tmp_path) as server, client_of(server) as client:
        assert client.next_range() is not None
        port = server.address
        server.close()
        refused = pytest.raises(DataError, match="has another book of ranges than before")
        with serving(tmp_path / "elsewhere", address=port), refused:
            client.next_range()


def test_a_server_that_is_away_is_an_error_before_the_deadline_d51(tmp_path: Path) -> None:
    with serving(tmp_path) as server, client_of(server, timeout=timedelta(seconds=0.5)) as client:
        server.close()
        with pytest.raises(PeerError, match=r"no answer from the data server at .* within 0.5 s"):
            client.next_range()


def test_another_source_another_server_and_a_damaged_journal_are_refused(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        with pytest.raises(ConfigError, match="another process keeps the journal"):
            serving(tmp_path)
        with pytest.raises(ConfigError, match="cannot listen on"):
            serving(tmp_path / "other", address=server.address)
    with pytest.raises(ConfigError, match="size 40 in the state and 50 here"):
        serving(tmp_path, size=50)
    journal = tmp_path / "book" / "book.journal"
    journal.write_bytes(b"?" + journal.read_bytes()[1:] + b"more\n")
    with pytest.raises(DataError, match="journal is damaged"):
        serving(tmp_path)


def test_a_journal_whose_only_line_is_damaged_is_refused_and_no_range_comes_again(tmp_path: Path) -> None:
    with serving(tmp_path) as server, client_of(server) as client:
        part = client.next_range()
        assert part is not None
        client.done(part)
    serving(tmp_path).close()
    journal = tmp_path / "book" / "book.journal"
    whole = journal.read_bytes()
    assert whole.count(b"\n") == 1
    for damaged in (b"?" + whole[1:], whole[:-1], b""):
        journal.write_bytes(damaged)
        with pytest.raises(DataError, match="journal is damaged: its first line is not whole"):
            serving(tmp_path)
        assert journal.read_bytes() == damaged
    journal.write_bytes(whole)
    with serving(tmp_path) as server, client_of(server) as client:
        assert client.next_range() == SampleRange(10, 20)


def test_a_journal_that_takes_nothing_ends_the_server_and_nothing_is_promised(tmp_path: Path) -> None:
    server = serving(tmp_path)
    with client_of(server, timeout=timedelta(seconds=0.5)) as client:
        assert client.next_range() == SampleRange(0, 10)
        assert server._journal._file is not None
        server._journal._file.close()
        server._journal._file = open("/dev/full", "ab")  # noqa: SIM115 - the journal closes it
        with pytest.raises(PeerError):
            client.next_range()
        with pytest.raises(DataError, match="No space left"):
            server.wait(timedelta(seconds=PATIENCE_S))
        server.close()  # and leaves the journal to the next server
    with serving(tmp_path) as again, client_of(again, "b") as other:
        assert other.next_range() == SampleRange(10, 20)


def test_a_long_journal_is_made_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resiliency.data.dispatch.server._ENTRIES", 10)
    with serving(tmp_path, size=1000) as server, client_of(server) as client:
        for part in client.ranges():
            client.done(part)
    assert len((tmp_path / "book" / "book.journal").read_bytes().splitlines()) < 15
    with serving(tmp_path, size=1000) as server, client_of(server) as client:
        assert client.next_range() is None


# -- samples and records


def test_a_loader_of_two_consumers_gives_each_sample_once(tmp_path: Path) -> None:
    source = SampleRanges(size=53, range_size=7, order="samples", epochs=2)
    data = TensorDataset(torch.arange(53))
    used: Counter[int] = Counter()
    with DataServer(source, tmp_path / "book", token=TOKEN) as server:
        clients = [client_of(server, name) for name in ("a", "b")]

        def consume(sampler: DispatchedSampler) -> None:
            for (indexes,) in sampler.batches(DataLoader(data, batch_size=4, sampler=sampler)):
                used.update(indexes.tolist())
                sampler.advance(len(indexes))

        threads = [threading.Thread(target=consume, args=(DispatchedSampler(one),)) for one in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        for client in clients:
            client.close()
    assert used == Counter(dict.fromkeys(range(53), 2))


def test_samples_that_were_handed_out_and_not_advanced_come_again(server: DataServer) -> None:
    with client_of(server) as client:
        sampler = DispatchedSampler(client)
        iterator = iter(sampler)
        assert [next(iterator) for _ in range(12)] == list(range(12))
        with pytest.raises(ConfigError, match="were not advanced"):
            next(iter(sampler))
        sampler.advance(4, step=1)
        state = sampler.state_dict()
        assert next(iter(sampler)) == 4
        sampler.advance(3, step=2)
        with pytest.raises(ConfigError, match=r"advance\(30\), and 13 samples were handed out"):
            sampler.advance(30)
        sampler.advance(1)
        with pytest.raises(ConfigError, match=r"advanced without a step"):
            sampler.state_dict()
    with client_of(server, attempt=1) as client:
        sampler = DispatchedSampler(client)
        sampler.load_state_dict(state)
        assert sampler.step == 1
        taken = [index for _, index in zip(range(36), sampler, strict=True)]
        assert sorted(taken) == list(range(4, 40))
        with pytest.raises(ConfigError, match="does not take its samples from this sampler"):
            next(sampler.batches(DataLoader(range(3))))  # type: ignore[arg-type]


def test_after_a_lease_has_ended_no_sample_counts_for_another_one(server: DataServer) -> None:
    with client_of(server, "a") as client, client_of(server, "b") as other:
        sampler = DispatchedSampler(client)
        ahead = iter(sampler)
        assert [next(ahead) for _ in range(15)] == list(range(15))
        fall_silent(server, "a")
        assert [other.next_range(), other.next_range()] == [SampleRange(0, 10), SampleRange(10, 20)]
        assert [next(ahead) for _ in range(10)] == list(range(15, 25))  # held again, from 20 on
        with pytest.raises(StaleRange, match="does not hold range"):
            sampler.advance(5)
        assert holders(server) == ["b", "b"]
        for _ in range(3):
            with pytest.raises(StaleRange, match="went to another worker, and the others were given back"):
                sampler.advance(5)
        assert list(ahead) == [25, 26, 27, 28, 29]
        again = iter(sampler)
        assert [next(again) for _ in range(5)] == list(range(20, 25))
        sampler.advance(5)
        assert [held.part for held in server._keeper.book.held][2:] == [SampleRange(25, 30)]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loop_that_leaves_out_a_stale_batch_goes_on_with_what_the_server_grants(
    server: DataServer, workers: int
) -> None:
    counted: list[int] = []
    with client_of(server, "a") as client, client_of(server, "b") as other:
        sampler = DispatchedSampler(client)
        loader = DataLoader(torch.arange(40), batch_size=5, sampler=sampler, num_workers=workers)  # type: ignore[arg-type]
        for batch in sampler.batches(loader):
            if not counted and holders(server).count("b") == 0:
                fall_silent(server, "a")
                part = other.next_range()
                assert part is not None
            with suppress(StaleRange):
                sampler.advance(len(batch))
                counted += batch.tolist()
                if holders(server).count("b"):
                    other.done(part)
    assert counted == list(range(10, 40))


def test_lines_of_text_files_come_once_wherever_ranges_are_cut(tmp_path: Path) -> None:
    lines = [b"x" * (number % 5) for number in range(30)] + [b"last"]
    path = tmp_path / "data.txt"
    path.write_bytes(b"\n".join(lines))
    for size in (1, 2, 7, 1000):
        source = TextRanges(files=sizes_of([path]), range_bytes=size, shuffle=False)
        cursor: dict[str, int] = {}
        found: list[bytes] = []
        while (following := source.next_range(cursor)) is not None:
            part, cursor = following
            found += text_records(part)
        assert found == lines
    refused = pytest.raises(ConfigError, match="ranges of 'text', and a sampler needs samples")
    with DataServer(source, tmp_path / "book", token=TOKEN) as server, client_of(server) as client, refused:
        DispatchedSampler(client)


# -- processes


def program(*words: object) -> Command:
    argv = [sys.executable, "-W", "ignore", "-m", "tests.data.dispatch_programs", *map(str, words)]
    return Command(argv, cwd=ROOT)


def test_samples_that_worker_processes_of_loaders_fetch_ahead_come_once(tmp_path: Path) -> None:
    source = SampleRanges(size=53, range_size=7, order="samples", epochs=2)
    with DataServer(source, tmp_path / "book", token=TOKEN) as server, ExitStack() as stack:
        port = server.address[1]
        ranks = [stack.enter_context(program("load", port, name, 53, 2)) for name in ("a", "b")]
        assert [rank.wait(timeout=PATIENCE_S) for rank in ranks] == [0, 0]
    used = re.findall(r"used \[(.*)\]", "".join(rank.output for rank in ranks))
    assert Counter(map(int, ", ".join(used).split(", "))) == Counter(dict.fromkeys(range(53), 2))


@pytest.mark.slow
def test_workers_and_server_are_stopped_and_killed_and_each_range_counts_once(tmp_path: Path) -> None:
    size, lease_s = 250, 3.0
    book, gates = tmp_path / "book", [tmp_path / name for name in ("awake", "go", "never")]
    with ExitStack() as stack:
        first = stack.enter_context(program("serve", book, 0, size, lease_s))
        port = first.wait_for_line(r"serving (\d+)", timeout=PATIENCE_S)[1]
        delays = {"sleepy": (0, gates[0]), "slow": (0.2, gates[1]), "fast": (0.01, gates[1])}
        delays["victim"] = (0, gates[2])
        workers = {
            name: stack.enter_context(program("work", port, name, *words)) for name, words in delays.items()
        }
        for name, worker in workers.items():
            worker.wait_for_line(f"{name} holds", timeout=PATIENCE_S)
        workers["sleepy"].signal(signal.SIGSTOP)
        workers["victim"].kill()
        first.wait_for_line("worker sleepy silent", timeout=PATIENCE_S)
        first.wait_for_line("worker victim silent", timeout=PATIENCE_S)
        gates[1].touch()
        first.kill()
        second = stack.enter_context(program("serve", book, port, size, lease_s))
        second.wait_for_line("serving", timeout=PATIENCE_S)
        second.signal(signal.SIGSTOP)
        threading.Event().wait(1.2 * lease_s)  # a stop for longer than the lease is what is tested
        second.signal(signal.SIGCONT)
        second.wait_for_line("all workers get a fresh lease", timeout=PATIENCE_S)
        gates[0].touch()
        workers["sleepy"].signal(signal.SIGCONT)
        workers["sleepy"].wait_for_line("sleepy stale", timeout=PATIENCE_S)
        for name in ("sleepy", "slow", "fast"):
            assert workers[name].wait(timeout=PATIENCE_S) == 0
            workers[name].wait_for_line(f"{name} ended", timeout=PATIENCE_S)
    counted = {
        name: list(map(int, re.findall(rf"{name} counted (\d+)", worker.output)))
        for name, worker in workers.items()
    }
    starts = Counter(start for found in counted.values() for start in found)
    assert starts == Counter(range(0, size, RANGE))
    assert len(counted["fast"]) > len(counted["slow"])
