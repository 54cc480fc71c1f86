# SPDX-License-Identifier: Apache-2.0
"""One shard as a row of messages: what the sender reads, and what the receiver makes of it.

    header      fixed size: how long the index is, or why there will be nothing
    index       the file that the manifest of the sender vouches for
    payload     the files of the shard, one after the other, cut into messages of tens of MiB
    trailer     fixed size: why parts of the payload are no good, if so

How long all of it is follows from what all ranks agreed on and from the header, so nothing that goes
wrong at one end changes what the other waits for: a sender whose disk fails sends the rest as it
is, and a receiver that finds bad bytes takes the rest as well.  The receiver believes only what it
verified: the index against the agreed digest, and each chunk against the index.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from resiliency.checkpoint.format.lease import try_lease
from resiliency.checkpoint.format.local import LAYOUT_BLOB, SLOT_BLOB, VALUES_BLOB
from resiliency.checkpoint.format.manifest import RankIndex, parse_index
from resiliency.checkpoint.format.marker import step_directory
from resiliency.checkpoint.locations import ShardLocation
from resiliency.checkpoint.recovery.inventory import open_location
from resiliency.checkpoint.state.layout import Shard, StateLayout
from resiliency.checkpoint.storage.checksums import digest_function
from resiliency.checkpoint.storage.chunked_file import FileRecord, check_size
from resiliency.checkpoint.storage.interface import ReadableFile, read_file
from resiliency.checkpoint.storage.memory import copy_bytes, page_memory
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.checkpoint.threads import helper_thread
from resiliency.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointIncomplete,
    PeerError,
    ResiliencyError,
    ResourceShortage,
)

logger = logging.getLogger(__name__)

#: Header and trailer.
NOTE_BYTES = 4096
#: Messages that are read at once: a disk wants more than one request, and none while one travels is slow.
_AHEAD = 2

#: Memory that the next message comes from or goes to.  It has left, or is there, before the next is
#: asked for.
Messages = Generator[memoryview, None, None]


class Outgoing:
    """The sender's end of one shard.

    Args:
        peer: rank that gets it.
        message_bytes: of the payload that travel at once; whole pages.  Three times that is in memory.
    """

    def __init__(self, location: ShardLocation, peer: int, message_bytes: int) -> None:
        self.peer = peer
        self._location = location
        self._message_bytes = message_bytes
        self._storage = LocalStorage(location.root, direct=True)  # it is read once
        self._held = contextlib.ExitStack()
        self._error = ""
        self._files: list[tuple[int, FileRecord, ReadableFile]] = []
        self._buffers: list[memoryview] = []

    def messages(self) -> Messages:
        index = self._open()
        yield _note(_Note(len(index), self._error))
        if self._error:
            return
        yield memoryview(bytearray(index))
        yield from self._payload()
        yield _note(_Note(error=self._error))

    def close(self) -> None:
        self._held.close()

    def _open(self) -> bytes:
        location = self._location
        directory = step_directory(location.step)
        try:
            self._held.enter_context(try_lease(self._storage, location.step))
            begin = 0
            reader = open_location(location)
            for record in reader.index(location.rank).files:
                check_size(self._storage, record.inside(directory))
                file = self._storage.open(record.inside(directory).name)
                self._held.callback(file.close)
                self._files.append((begin, record, file))
                begin += record.size_bytes
            # Now: once the receiver expects a payload, nothing but its bytes can come.
            messages = range(0, location.size_bytes, self._message_bytes)
            self._buffers = [page_memory(self._message_bytes) for _ in messages[: _AHEAD + 1]]
            return read_file(self._storage, reader.manifest.index_name(directory, location.rank))
        except ResiliencyError as error:
            self._error = str(error)
            logger.error("rank %d gets no shard from here: %s", self.peer, error)
            return b""

    def _payload(self) -> Messages:
        """While one message travels, the next ones are read."""
        size, length = self._location.size_bytes, self._message_bytes
        starts = range(0, size, length)
        buffers = self._buffers
        readers = [helper_thread(f"resiliency-send_{number}") for number in range(_AHEAD)]
        reads: deque[Future[None]] = deque()

        def read(number: int) -> None:
            for start in starts[number:][:1]:
                work = partial(self._read, start, buffers[number % len(buffers)])
                reads.append(readers[number % _AHEAD].submit(work))

        try:
            for number in range(_AHEAD):
                read(number)
            for number, start in enumerate(starts):
                reads.popleft().result()
                read(number + _AHEAD)  # into the buffer that has just left
                yield buffers[number % len(buffers)][: min(length, size - start)]
        finally:
            for reader in readers:
                reader.close()
            for reader in readers:
                reader.wait_for_end()

    def _read(self, start: int, buffer: memoryview) -> None:
        end = min(start + self._message_bytes, self._location.size_bytes)
        for begin, record, file in self._files:
            low, high = max(begin, start), min(begin + record.size_bytes, end)
            if low >= high or self._error:
                continue
            try:
                count = file.read_into(low - begin, buffer[low - start : high - start])
            except CheckpointError as error:
                self._error = str(error)
            else:
                if count < high - low:
                    self._error = f"{record.name} ends {high - low - count} bytes too early."


class Incoming:
    """The receiver's end of one shard.

    A message stays in the memory that it came to until the one after the next is asked for, so that it
    can be passed on as it came.

    Args:
        peer: rank that it comes from.
        message_bytes: as of the sender.
    """

    def __init__(self, location: ShardLocation, peer: int, message_bytes: int) -> None:
        self.peer = peer
        self._location = location
        self._message_bytes = message_bytes
        self._index: RankIndex | None = None
        self._memory: memoryview | None = None
        self._error: ResiliencyError | None = None
        self._worker = helper_thread("resiliency-receive")

    def messages(self) -> Messages:
        note = memoryview(bytearray(NOTE_BYTES))
        yield note
        header = _read_note(note)
        if header.error:
            self._fail(CheckpointIncomplete(self._text(f"could not be sent: {header.error}")))
            return
        index = memoryview(bytearray(header.index_bytes))
        yield index
        self._learn(bytes(index))
        yield from self._payload()
        yield note
        trailer = _read_note(note)
        if trailer.error:  # it tells the cause of what was found here
            self._error = CheckpointCorrupt(self._text(f"could not be read: {trailer.error}"))

    def shard(self) -> Shard:
        """What came, once all messages have.

        Raises:
            CheckpointCorrupt, CheckpointIncomplete: it is not what was saved.
            CheckpointError: there was no memory for it.
        """
        if self._error is not None:
            raise self._error
        assert self._index is not None
        assert self._memory is not None
        return _shard(self._index, self._memory, self._location)

    def close(self) -> None:
        self._worker.close()
        self._worker.wait_for_end()

    def _learn(self, content: bytes) -> None:
        size = self._location.size_bytes
        try:
            self._index, _ = parse_index(content, self._text("has an index that"), self._location.digest)
            if self._index.size_bytes != size:
                raise CheckpointCorrupt(self._text(f"has {self._index.size_bytes} bytes, expected {size}."))
            self._memory = page_memory(size, large=True)[:size]
        except ResourceShortage as error:
            self._fail(CheckpointError(self._text(f"does not fit into the memory of this rank: {error}")))
        except ResiliencyError as error:
            self._fail(error)

    def _payload(self) -> Messages:
        """While one message travels, the one before is put in its place and verified.

        Not received there: each page of new memory costs a fault, and in the middle of receiving that
        was measured to take several times as long as the bytes.
        """
        size, length = self._location.size_bytes, self._message_bytes
        starts = range(0, size, length)
        buffers = [page_memory(length) for _ in starts[:2]]
        placed: deque[Future[None]] = deque()
        for number, start in enumerate(starts):
            if len(placed) == len(buffers):
                placed.popleft().result()
            end = min(start + length, size)
            buffer = buffers[number % 2][: end - start]
            yield buffer
            placed.append(self._worker.submit(partial(self._place, buffer, start, end)))
        for future in placed:
            future.result()

    def _place(self, message: memoryview, start: int, end: int) -> None:
        if self._memory is not None and self._error is None:
            copy_bytes(self._memory[start:end], message)
            self._verify(self._memory, start, end)

    def _verify(self, memory: memoryview, low: int, high: int) -> None:
        """Compare the chunks that became whole when this part of the payload came."""
        assert self._index is not None
        begin = 0
        for record in self._index.files:
            for number in _whole_chunks(record, low - begin, high - begin):
                if self._error is None:
                    self._verify_chunk(memory[begin : begin + record.size_bytes], record, number)
            begin += record.size_bytes

    def _verify_chunk(self, file: memoryview, record: FileRecord, number: int) -> None:
        start = number * record.chunk_bytes
        end = min(start + record.chunk_bytes, record.size_bytes)
        expected, found = record.digests[number], digest_function(record.algorithm)(file[start:end])
        if found != expected:
            text = f"has other bytes {start} to {end} in {record.name}: {record.algorithm} is {found}, "
            self._fail(
                CheckpointCorrupt(
                    self._text(f"{text}expected {expected}."),
                    hint="The bytes changed after they were written, or on their way.",
                    rank=self._location.rank,
                    offset=start,
                    expected=expected,
                    found=found,
                )
            )

    def _fail(self, error: ResiliencyError) -> None:
        if self._error is None:
            self._error = error

    def _text(self, what: str) -> str:
        location = self._location
        where = f"{location.root}/{step_directory(location.step)} of {location.host}"
        return f"the shard of rank {location.rank} in {where} {what}"


def _whole_chunks(record: FileRecord, low: int, high: int) -> range:
    """Chunks of a file whose last byte lies between `low` and `high`."""
    if high <= 0 or low >= record.size_bytes:
        return range(0)
    last = len(record.digests) if high >= record.size_bytes else high // record.chunk_bytes
    return range(max(low, 0) // record.chunk_bytes, last)


@dataclass(frozen=True)
class _Note:
    index_bytes: int = 0
    error: str = ""


def _note(note: _Note) -> memoryview:
    # 500 characters fit, however they are escaped.
    text = json.dumps([note.index_bytes, note.error[:500]])
    return memoryview(bytearray(text.encode().ljust(NOTE_BYTES)))


def _read_note(message: memoryview) -> _Note:
    try:
        index_bytes, error = json.loads(bytes(message))
        return _Note(int(index_bytes), str(error))
    except (ValueError, TypeError) as error:
        raise PeerError(
            f"a rank that sends a shard speaks another language: {bytes(message[:80])!r}.",
            hint="Do all hosts run the same release?",
        ) from error


def _shard(index: RankIndex, memory: memoryview, location: ShardLocation) -> Shard:
    begins, begin = {}, 0
    for file in index.files:
        begins[file.name] = begin
        begin += file.size_bytes
    blobs = {}
    for key in (SLOT_BLOB, LAYOUT_BLOB, VALUES_BLOB):
        blob = index.blob(key)
        if blob is None:
            raise CheckpointIncomplete(f"the shard of rank {location.rank} came without its {key}.")
        start = begins[index.path_of(blob.file)] + blob.position
        blobs[key] = memory[start : start + blob.size_bytes]
    return Shard(
        layout=StateLayout.from_json(bytes(blobs[LAYOUT_BLOB])),
        values=bytes(blobs[VALUES_BLOB]),
        step=index.step,
        rank=index.rank,
        world_size=location.world_size,
        buffer=blobs[SLOT_BLOB],
        run_id=index.run_id,
        group=index.group,
    )
