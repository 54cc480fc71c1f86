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

from resiliency.data import Answer, BrokenWorker, DispatchedSampler, PoisonPolicy, StaleRange
from resiliency.data.dispatch import server as server_module
from resiliency.data.dispatch.client import DataClient
from resiliency.data.dispatch.wire import DOOR_BYTES
from resiliency.errors import ConfigError, DataError
from tests.data.data_servers import PATIENCE_S, client_of, holders, serving
from tests.waiting import wait_until

SOON = timedelta(seconds=0.3)


def used(client: DataClient, step: int) -> int:
    part = client.next_range()
    assert part is not None
    client.done(part, step=step)
    return part.start


# -- attempts and steps


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
        client_of(server, "b") as b,
    ):
        part = hung.next_range()
        assert part is not None
        assert b.next_range() == part
        assert "worker hung lives, and did nothing with its ranges" in caplog.text
        with pytest.raises(StaleRange):
            hung.done(part)
        b.done(part)
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
        serving(tmp_path, size=10, lease=SOON) as server,
        client_of(server, "feeder"),
        client_of(server, "a") as a,
    ):
        part = a.next_range()
        assert part is not None
        a.failed(part, "bad")
        assert a.try_next_range() is Answer.WAIT
        assert a.next_range() == part


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
        late = stack.enter_context(socket.create_connection(server.address, timeout=PATIENCE_S))
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


# -- full batches


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
