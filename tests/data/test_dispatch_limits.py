# SPDX-License-Identifier: Apache-2.0
"""A data server and its clients: who is waited for and how long, connections, strangers, and full batches."""

from __future__ import annotations

import logging
import resource
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from resiliency.data import (
    Answer,
    BrokenWorker,
    DataServer,
    DispatchedSampler,
    PartitionRanges,
    PoisonPolicy,
    StaleRange,
)
from resiliency.data.dispatch import client as client_module
from resiliency.data.dispatch import server as server_module
from resiliency.data.dispatch import wire as wire_module
from resiliency.data.dispatch.client import DataClient
from resiliency.data.dispatch.wire import DOOR_BYTES
from resiliency.errors import ConfigError, DataError
from tests.data.data_servers import PATIENCE_S, client_of, holders, serving
from tests.data.dispatch_programs import TOKEN
from tests.waiting import wait_until

SOON = timedelta(seconds=0.3)
SHORT = timedelta(seconds=30)


def used(client: DataClient, step: int) -> int:
    part = client.next_range()
    assert part is not None
    client.done(part, step=step)
    return part.start


# -- attempts and steps


def test_the_server_counts_the_attempts_of_clients_that_pass_none(tmp_path: Path) -> None:
    with serving(tmp_path) as server, ExitStack() as stack:
        ranks = [stack.enter_context(client_of(server, f"rank{number}")) for number in range(2)]
        for step in (1, 2):
            for rank in ranks:
                used(rank, step)
        again = stack.enter_context(client_of(server, "rank0"))
        assert (ranks[0].attempt, again.attempt) == (0, 1)
        with pytest.raises(
            StaleRange, match="attempt 0 is over: attempt 1 has begun, as worker 'rank0' joined"
        ):
            ranks[1].next_range()
        again.rollback(None)
        assert used(again, 1) == 0


def test_a_restart_with_defaults_before_the_first_checkpoint_gets_everything_again(tmp_path: Path) -> None:
    with serving(tmp_path) as server, ExitStack() as stack:
        killed = stack.enter_context(client_of(server, "rank0"))
        assert [used(killed, step) for step in (1, 2)] == [0, 10]
        again = stack.enter_context(client_of(server, "rank0"))
        count = 0
        for part in again.ranges():
            again.done(part, step=3)
            count += len(part)
        assert count == 40
        assert again.commit(3)["free"] == []
        with pytest.raises(StaleRange, match="another process is worker 'rank0' now"):
            killed.next_range()


def test_a_commit_waits_for_all_that_used_ranges_and_names_those_that_are_missing(tmp_path: Path) -> None:
    states = []
    with serving(tmp_path) as server, client_of(server, "a") as a, client_of(server, "b") as b:
        used(a, 1)
        used(b, 1)
        with pytest.raises(DataError, match=r"step 1 cannot be committed: workers \['b'\] used ranges in it"):
            a.commit(1, timeout=timedelta())
        waiting = threading.Thread(target=lambda: states.append(a.commit(1)))
        waiting.start()
        wait_until(lambda: server._requests.held, "a does not wait")
        states.append(b.commit(1))
        waiting.join(PATIENCE_S)
    assert len(states) == 2
    assert states[0] == states[1]


def test_what_a_worker_used_in_a_step_that_failed_comes_back_and_what_it_finished_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(tmp_path, size=20) as server, client_of(server, "a") as a:
        assert used(a, 1) == 0

        def fail() -> None:
            with client_of(server, "b") as b:
                assert used(b, 1) == 10
                raise RuntimeError("the collective failed")

        with pytest.raises(RuntimeError, match="the collective failed"):
            fail()
        assert a.next_range() is not None  # which b had
    assert "worker b lost: 1 ranges that it used are in no model for sure (10..20 in epoch 0)" in caplog.text
    with serving(tmp_path / "finished", size=20) as server, client_of(server, "a") as a:
        used(a, 1)
        with client_of(server, "b") as b:
            used(b, 1)
        assert a.commit(1)["free"] == []
        assert a.next_range() is None


def test_ranges_that_come_back_after_the_end_was_said_are_told_at_the_commit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(tmp_path, size=20) as server, client_of(server, "a") as a:
        lost = client_of(server, "b")
        used(a, 1)
        used(lost, 1)
        assert a.next_range() is None
        lost.close()
        assert a.commit(1)["free"] == [[10, 20, 0, ""]]
        assert "ranges came back after the end of the data" in caplog.text
        assert used(a, 2) == 10
        assert a.next_range() is None
        assert a.commit(2)["free"] == []


# -- who hangs, or is broken


def test_a_worker_that_lives_and_does_nothing_with_its_range_loses_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        serving(tmp_path, size=10, lease=SOON, max_hold=2 * SOON) as server,
        client_of(server, "hung") as hung,
        client_of(server, "b", max_wait=SHORT) as b,
    ):
        part = hung.next_range()
        assert part is not None
        assert b.next_range() == part
        b.done(part)  # at once: `b` may not hold it for longer either
        assert "worker hung lives, and did nothing with its ranges" in caplog.text
        with pytest.raises(StaleRange):
            hung.done(part)
    with pytest.raises(ConfigError, match="max_hold is 0:00:01; it must not be shorter than the lease"):
        serving(tmp_path / "other", max_hold=timedelta(seconds=1))


def test_a_broken_worker_beside_a_good_one_is_refused_and_no_range_is_skipped(tmp_path: Path) -> None:
    policy = PoisonPolicy(skip=True, in_a_row=2)
    refused: list[BaseException] = []

    def work(client: DataClient) -> None:
        try:
            for part in client.ranges():
                client.failed(part, "OSError: /data is not mounted")
        except BrokenWorker as error:
            refused.append(error)

    with (
        serving(tmp_path, size=100, policy=policy) as server,
        client_of(server, "good") as good,
        client_of(server, "broken") as broken,
    ):
        thread = threading.Thread(target=work, args=(broken,))
        thread.start()
        wait_until(lambda: server._requests.held, "the broken worker does not wait")
        count = 0
        for part in good.ranges():
            good.done(part)
            count += 1
        thread.join(PATIENCE_S)
        assert (count, good.skipped) == (10, 0)
    assert "'broken' failed 2 ranges in a row, and other workers used 2 of them" in str(refused[0])


def test_a_failed_range_does_not_wait_for_a_client_that_asks_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "HOLD", SOON)
    with (
        serving(tmp_path, size=10, lease=timedelta(seconds=1)) as server,
        client_of(server, "feeder"),
        client_of(server, "a", max_wait=SHORT) as a,
    ):
        part = a.next_range()
        assert part is not None
        a.failed(part, "bad")
        assert a.try_next_range() is Answer.WAIT
        assert a.next_range() == part


def test_a_process_that_was_replaced_takes_no_watch_from_the_new_one_when_it_leaves(tmp_path: Path) -> None:
    with serving(tmp_path) as server, client_of(server, "a") as old, client_of(server, "a"):
        with pytest.raises(StaleRange, match="another process is worker 'a' now"):
            old.next_range()
        old.close()
        wait_until(lambda: len(server._connections) == 1, "the old process is still connected")
        assert "a" in server._heard


def test_a_wait_for_others_that_is_longer_than_the_timeout_is_no_lost_server(tmp_path: Path) -> None:
    with (
        serving(tmp_path, size=10) as server,
        client_of(server, "a") as a,
        client_of(server, "b", timeout=timedelta(seconds=1.5), max_wait=timedelta(seconds=1.6)) as b,
    ):
        a.next_range()
        with pytest.raises(DataError, match=r"no range within 1\.6 s: other workers hold the last ones"):
            b.next_range()


def test_messages_that_are_too_long_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (server_module, client_module, wire_module):
        monkeypatch.setattr(module, "LINE_BYTES", 20_000)
    source = PartitionRanges(range_size=1, stops={f"{number:0200}": 1 for number in range(100)})
    with DataServer(source, tmp_path / "book", token=TOKEN) as server, client_of(server) as client:
        for _ in range(100):
            used(client, 1)
        with pytest.raises(ConfigError, match=r"the answer has 2\d+ bytes, and a message at most 20000"):
            client.commit(1)
        with pytest.raises(ConfigError, match=r"the request 'extend' has 2\d+ bytes, and a message at most"):
            client.extend({f"x{number:0200}": 1 for number in range(100)})
        client.extend({}, closed=True)
        assert client.next_range() is None


def test_a_number_that_is_too_large_is_refused_and_the_server_serves_on(tmp_path: Path) -> None:
    with serving(tmp_path) as server, client_of(server) as client:
        refused = pytest.raises(ConfigError, match="is no message of texts and of numbers below")
        for number in (10**30, 10**4300 - 1):
            with refused:
                client_of(server, "b", attempt=number)
            with refused:
                client.finish_step(number)
        with pytest.raises(ConfigError, match=f"attempt is {2**40}; it must be less than {2**32}"):
            client_of(server, "b", attempt=2**40)
        assert client.next_range() is not None


def test_a_journal_in_a_directory_that_takes_no_files_is_refused_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "book").write_text("a file")
    with pytest.raises(ConfigError, match=r"the journal in .*book cannot be written: .*File exists"):
        serving(tmp_path)


# -- connections


@pytest.fixture
def file_limit() -> Iterator[tuple[int, int]]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = min(soft, 512)
    resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))
    yield low, hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_server_may_open_a_file_for_each_worker_and_each_has_one_connection(
    tmp_path: Path, file_limit: tuple[int, int]
) -> None:
    low, hard = file_limit
    with serving(tmp_path) as server, ExitStack() as stack:
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, 10_064) > low
        clients = [stack.enter_context(client_of(server, f"w{number}")) for number in range(5)]
        for client in clients:
            client.try_next_range()
        assert len(server._connections) == 5


def test_a_worker_says_that_it_lives_while_its_request_is_held_and_to_a_server_that_came_back(
    tmp_path: Path,
) -> None:
    with serving(tmp_path, size=10, lease=SOON) as server, client_of(server, "a") as a:
        part = a.next_range()
        assert part is not None
        got: list[object] = []
        waiting = threading.Thread(target=lambda: got.append(a.next_range()))
        waiting.start()
        wait_until(lambda: server._requests.held, "a does not wait")
        heard = server._heard["a"]
        wait_until(lambda: server._heard["a"] > heard + 2 * SOON.total_seconds(), "a is silent")
        assert holders(server) == ["a"]
        server._loop.call_soon_threadsafe(server._submit, {"op": "silent", "worker": "a"})
        waiting.join(PATIENCE_S)
        assert got == [part]  # which is free again
        address = server.address
        server.close()
        with serving(tmp_path, size=10, lease=SOON, address=address) as again:
            heard = again._heard["a"]
            wait_until(lambda: again._heard.get("a", 0) > heard + 2 * SOON.total_seconds(), "a is silent")


def test_strangers_hold_a_few_bytes_for_a_short_time_and_never_the_place_of_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_STRANGERS", 4)
    with serving(tmp_path) as server, client_of(server, "a") as a, ExitStack() as stack:
        strangers = []
        for _ in range(12):
            stranger = stack.enter_context(socket.create_connection(server.address, timeout=PATIENCE_S))
            stranger.recv(1000)
            stranger.sendall(b"x" * (DOOR_BYTES - 1))
            strangers.append(stranger)
        assert len(server._strangers) <= 4
        for stranger in strangers[:8]:  # newer ones took their place
            assert is_hung_up(stranger)
        with client_of(server, "b") as b:
            assert [a.next_range(), b.next_range()] != [None, None]
        strangers[-1].sendall(b"xx")
        assert b"no message of at most 8192 bytes" in strangers[-1].recv(1000)
        monkeypatch.setattr(server_module, "DOOR", timedelta(seconds=0.2))
        late = stack.enter_context(socket.create_connection(server.address, timeout=30))
        assert late.makefile("rb").read().count(b"\n") == 1  # it hangs up after its first line


def is_hung_up(connection: socket.socket) -> bool:
    try:
        return connection.recv(1000) == b""
    except ConnectionError:  # with bytes that were not read
        return True


def test_a_name_that_does_not_fit_in_the_first_message_is_refused_by_the_client() -> None:
    for name in ("", "x" * 257):
        with pytest.raises(ConfigError, match="it must be a name of 1 to 256 characters"):
            DataClient(("127.0.0.1", 9), name, token="t")  # noqa: S106 - no secret


# -- samplers in a checkpoint, and full batches


def test_a_sampler_whose_state_is_asked_for_before_it_is_loaded_commits_nothing(tmp_path: Path) -> None:
    """As `Checkpointer.restore` does, on a first start and on a restart."""
    with serving(tmp_path) as server, client_of(server, "a") as client:
        sampler = DispatchedSampler(client)
        start = sampler.state_dict()
        assert server._keeper.book.to_plain()["has_steps"] is False
        assert [index for _, index in zip(range(8), sampler, strict=False)] == list(range(8))
        sampler.advance(8, step=1)
        state = sampler.state_dict()
        assert state.keys() == start.keys()
        for saved, first in ((state, 8), (start, 0)):
            with client_of(server, "a") as restarted:
                again = DispatchedSampler(restarted)
                assert again.state_dict() == start
                again.load_state_dict(saved)
                assert next(iter(again)) == first


def test_a_sampler_without_samples_in_a_step_gives_no_state_of_a_step_before(tmp_path: Path) -> None:
    with serving(tmp_path, size=20) as server, client_of(server, "a") as a, client_of(server, "b") as b:
        samplers = [DispatchedSampler(client) for client in (a, b)]
        iterators = [iter(sampler) for sampler in samplers]
        for sampler, iterator in zip(samplers, iterators, strict=True):
            next(iterator)
            sampler.advance(1, step=1)
        next(iterators[1])
        samplers[1].advance(1, step=2)
        b.finish_step(2)
        with pytest.raises(
            ConfigError, match=r"step 1 is the last one of .* 'a' .* step 2 is over on .* 'b'"
        ):
            samplers[0].state_dict()
        samplers[0].advance(0, step=2)
        assert samplers[0].state_dict() == samplers[1].state_dict()
        with client_of(server, "c", attempt=0) as c:  # a replica that got its model from another one
            new = DispatchedSampler(c)
            c.finish_step(2)
            assert new.state_dict() == samplers[1].state_dict()


def test_a_loader_that_drops_its_last_batch_leaves_out_less_than_a_batch_of_each_worker(
    tmp_path: Path,
) -> None:
    batches: list[list[int]] = []

    def consume(client: DataClient) -> None:
        sampler = DispatchedSampler(client)
        for batch in sampler.batches(dropping(sampler)):
            batches.append(batch.tolist())
            sampler.advance(len(batch), step=len(batches))

    with serving(tmp_path, size=53) as server, client_of(server, "a") as a:
        consume(a)
        state = a.commit(len(batches))
        assert (len(batches), state["free"], len(server._keeper.book.skipped)) == (13, [], 1)
    batches.clear()
    with serving(tmp_path / "two", size=53) as server, ExitStack() as stack:
        clients = [stack.enter_context(client_of(server, name)) for name in "ab"]
        threads = [threading.Thread(target=consume_freely, args=(one, batches)) for one in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert {len(batch) for batch in batches} == {4}
    found = Counter(sample for batch in batches for sample in batch)
    assert set(found.values()) == {1}
    assert len(found) >= 53 - 2 * 3


def dropping(sampler: DispatchedSampler) -> DataLoader[torch.Tensor]:
    data: Dataset[torch.Tensor] = torch.arange(53)  # type: ignore[assignment]
    return DataLoader(data, batch_size=4, sampler=sampler, drop_last=True)


def consume_freely(client: DataClient, batches: list[list[int]]) -> None:
    sampler = DispatchedSampler(client)
    for batch in sampler.batches(dropping(sampler)):
        batches.append(batch.tolist())
        sampler.advance(len(batch))


def test_batches_that_are_not_advanced_at_the_end_of_an_iteration_are_told_and_do_not_come_twice(
    tmp_path: Path,
) -> None:
    """Such as gradients accumulated over two batches, of which a range has an odd number."""

    def accumulate_pairs(sampler: DispatchedSampler) -> None:
        waiting = 0
        loader = DataLoader(torch.arange(40), batch_size=8, sampler=sampler)  # type: ignore[arg-type]
        for number, batch in enumerate(sampler.batches(loader)):
            waiting += len(batch)
            if number % 2:
                sampler.advance(waiting, step=number)
                waiting = 0

    with serving(tmp_path) as server, client_of(server, "a") as client:
        refused = pytest.raises(ConfigError, match="8 samples that the loader handed out were not advanced")
        with refused:
            accumulate_pairs(DispatchedSampler(client))


def test_the_log_of_a_server_names_no_worker_that_lost_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with serving(tmp_path) as server, client_of(server, "a") as a:
        part = a.next_range()
        assert part is not None
        a.done(part)
    assert caplog.text == ""
