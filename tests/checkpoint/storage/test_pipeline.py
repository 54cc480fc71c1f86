# SPDX-License-Identifier: Apache-2.0
"""Parts are prepared ahead and moved in order; an error in either stage ends both."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from resiliency.checkpoint.storage.chunked_file import FilePiece, write_shard_file
from resiliency.checkpoint.storage.pipeline import Transfer, prepare_and_move
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.errors import CheckpointWriteFailed
from resiliency.testing.storage import FaultyStorage, StorageFault, StorageFaultKind

LIMIT_S = 30


@pytest.mark.parametrize("movers", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 40])
def test_every_part_is_moved_once_in_order_and_few_are_in_memory(movers: int, count: int) -> None:
    lock = threading.Lock()
    begun: list[int] = []
    in_memory, moving = {0}, {0}
    alive = [0, 0]

    def prepare(number: int, buffer: memoryview) -> memoryview:
        with lock:
            alive[0] += 1
            in_memory.add(alive[0])
        buffer[:4] = number.to_bytes(4, "big")
        return buffer

    def move(part: memoryview) -> None:
        with lock:
            alive[1] += 1
            moving.add(alive[1])
        begun.append(int.from_bytes(part[:4], "big"))
        with lock:
            alive[0] -= 1
            alive[1] -= 1

    prepare_and_move(Transfer(prepare=prepare, move=move, count=count, movers=movers, buffer_bytes=4096))
    assert sorted(begun) == list(range(count))
    assert movers > 1 or begun == sorted(begun)
    assert max(in_memory) <= movers + 1
    assert max(moving) <= movers


def test_the_next_part_is_prepared_while_one_is_moved() -> None:
    second_is_ready = threading.Event()

    def prepare(number: int, buffer: memoryview) -> int:
        if number == 1:
            second_is_ready.set()
        return number

    def move(number: int) -> None:
        assert second_is_ready.wait(LIMIT_S)

    prepare_and_move(Transfer(prepare=prepare, move=move, count=2, movers=1, buffer_bytes=4096))


def test_an_error_while_preparing_is_raised_after_the_moves_under_way_have_ended() -> None:
    moving, failing, ended = threading.Event(), threading.Event(), threading.Event()

    def prepare(number: int, buffer: memoryview) -> int:
        if number == 1:
            assert moving.wait(LIMIT_S)
            failing.set()
            raise InterruptedError
        return number

    def move(number: int) -> None:
        moving.set()
        assert failing.wait(LIMIT_S)
        ended.set()

    with pytest.raises(InterruptedError):
        prepare_and_move(Transfer(prepare=prepare, move=move, count=100, movers=1, buffer_bytes=4096))
    assert ended.is_set()


def test_an_error_while_moving_ends_those_who_wait_for_a_turn() -> None:
    prepared: list[int] = []
    second_is_ready = threading.Event()

    def prepare(number: int, buffer: memoryview) -> int:
        prepared.append(number)
        if number == 1:
            second_is_ready.set()
        return number

    def move(number: int) -> None:
        assert second_is_ready.wait(LIMIT_S)
        raise InterruptedError

    with ThreadPoolExecutor(1) as pool:
        transfer = Transfer(prepare=prepare, move=move, count=100, movers=1, buffer_bytes=4096)
        ended = pool.submit(prepare_and_move, transfer)
        with pytest.raises(InterruptedError):
            ended.result(LIMIT_S)
    assert sorted(prepared) == [0, 1]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_failed_write_in_the_middle_of_a_file_fails_the_file(tmp_path: Path, threads: int) -> None:
    inner = LocalStorage(tmp_path)
    inner.make_dir("d")
    # The fourth write; the file is created first.
    storage = FaultyStorage(inner, StorageFault(operation=4, kind=StorageFaultKind.ERROR))
    data = bytes(40 * 8192)
    with pytest.raises(CheckpointWriteFailed, match="EIO"):
        write_shard_file(
            storage, "d", "f", [FilePiece(0, data)], len(data), threads=threads, chunk_bytes=8192
        )
    assert not any(operation.startswith("sync") for operation in storage.operations)
