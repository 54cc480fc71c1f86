# SPDX-License-Identifier: Apache-2.0
"""Large files in checksummed chunks: written and read by several threads, copied at most once.

A file is a row of chunks of `CHUNK_BYTES`; each has its own digest, computed from the very memory
that is handed to the storage (write) or that came from it (read).  Within a chunk, long runs go
straight to or from where they lie, written ones as far as they are whole pages; only what is between
them passes through a page-aligned buffer.  Nothing is read without being verified.
"""

from __future__ import annotations

import bisect
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from resiliency.checkpoint.storage.checksums import DEFAULT_ALGORITHM, Digest, digest_function
from resiliency.checkpoint.storage.interface import Buffer, ReadableFile, Storage, WritableFile
from resiliency.checkpoint.storage.memory import PAGE_BYTES, copy_bytes, is_page_aligned, page_memory
from resiliency.checkpoint.storage.pipeline import Transfer, prepare_and_move
from resiliency.checkpoint.threads import run_parallel
from resiliency.errors import CheckpointCorrupt, CheckpointIncomplete, CheckpointMissing

CHUNK_BYTES = 4 << 20
#: Chunks that go to the storage in one write.  Between two writes a device may stand still; chunks stay
#: smaller than writes, since who reads a single tensor reads whole chunks.
_CHUNKS_PER_WRITE = 2
#: Writes or reads of a file that are under way at a time.  With two, the device has the next one at hand
#: when one ends, and network and parallel file systems serve both.  More need processors that belong to
#: training.
DEFAULT_THREADS = 2
#: Shorter runs are copied: a call to the device costs more.
_DIRECT_FROM_BYTES = 256 << 10

#: Called with the size of each chunk before it is moved: bandwidth cap, heartbeat, progress.  It
#: may block, and it may raise to stop the transfer.
Pace = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """What was written under a name: enough to verify any part of it."""

    name: str
    size_bytes: int
    chunk_bytes: int
    algorithm: str
    digests: tuple[str, ...]

    def inside(self, directory: str) -> FileRecord:
        """The record with `directory` before its name."""
        return replace(self, name=f"{directory}/{self.name}")


@dataclass(frozen=True)
class FilePiece:
    """Bytes to be written at `offset` of a file; gaps between pieces are zeros."""

    offset: int
    data: Buffer

    @property
    def end(self) -> int:
        return self.offset + memoryview(self.data).nbytes


@dataclass(frozen=True)
class Want:
    """A range of a file that belongs into `target`; `key` names it in error messages."""

    offset: int
    target: memoryview
    key: str = ""

    @property
    def end(self) -> int:
        return self.offset + self.target.nbytes


def write_shard_file(
    storage: Storage,
    directory: str,
    name: str,
    pieces: Sequence[FilePiece],
    size_bytes: int,
    *,
    threads: int = DEFAULT_THREADS,
    chunk_bytes: int = CHUNK_BYTES,
    algorithm: str = DEFAULT_ALGORITHM,
    pace: Pace | None = None,
) -> FileRecord:
    """Write a file of `size_bytes` from `pieces` (in order, not overlapping) and sync it.

    The record that comes back names the file relative to `directory`.

    Args:
        threads: writes that are under way at a time; one more thread gathers and digests what comes next.
    Raises:
        CheckpointWriteFailed: the storage refused; the file is left as it is.
    """
    file = storage.create(f"{directory}/{name}", size_bytes)
    job = _Writer(file, pieces, size_bytes, chunk_bytes, digest_function(algorithm), pace)
    try:
        prepare_and_move(job.transfer(movers=threads))
        file.sync()
    finally:
        file.close()
    return FileRecord(
        name=name,
        size_bytes=size_bytes,
        chunk_bytes=chunk_bytes,
        algorithm=algorithm,
        digests=tuple(job.digests),
    )


def record_file(storage: Storage, directory: str, name: str) -> FileRecord:
    """The record of a file that another program has written; its name is relative to `directory`."""
    file = storage.open(f"{directory}/{name}")
    digest, buffer = digest_function(DEFAULT_ALGORITHM), page_memory(CHUNK_BYTES)
    try:
        starts = range(0, file.size_bytes, CHUNK_BYTES)
        return FileRecord(
            name=name,
            size_bytes=file.size_bytes,
            chunk_bytes=CHUNK_BYTES,
            algorithm=DEFAULT_ALGORITHM,
            digests=tuple(digest(buffer[: file.read_into(start, buffer)]) for start in starts),
        )
    finally:
        file.close()


def read_ranges(
    storage: Storage,
    record: FileRecord,
    wants: Iterable[Want],
    *,
    threads: int = DEFAULT_THREADS,
    pace: Pace | None = None,
) -> int:
    """Fill every target, verifying each chunk that is touched; returns the bytes read.

    A target may hold bad bytes when this raises.

    Raises:
        CheckpointCorrupt: names the file, the key, the offset, and both digests.
        CheckpointIncomplete: the file is missing.
    """
    ordered = sorted((want for want in wants if want.target.nbytes), key=lambda want: want.offset)
    touched: set[int] = set()
    for want in ordered:
        touched.update(range(want.offset // record.chunk_bytes, -(-want.end // record.chunk_bytes)))
    return _read_chunks(storage, record, ordered, sorted(touched), threads, pace)


def verify_file(
    storage: Storage, record: FileRecord, *, threads: int = DEFAULT_THREADS, pace: Pace | None = None
) -> int:
    """Read all chunks and compare their digests; raises like `read_ranges`."""
    return _read_chunks(storage, record, [], list(range(len(record.digests))), threads, pace)


def verify_chunks(
    storage: Storage, record: FileRecord, offsets: Iterable[int], *, threads: int = DEFAULT_THREADS
) -> int:
    """As `verify_file`, of the chunks that hold the bytes at `offsets` alone; others are skipped."""
    within = {offset // record.chunk_bytes for offset in offsets if 0 <= offset < record.size_bytes}
    return _read_chunks(storage, record, [], sorted(within), threads, None)


def check_size(storage: Storage, record: FileRecord) -> None:
    """The cheap check: the file is there and as long as it was written."""
    _open_checked(storage, record).close()


def _open_checked(storage: Storage, record: FileRecord) -> ReadableFile:
    path = storage.describe(record.name)
    try:
        file = storage.open(record.name)
    except CheckpointMissing as error:
        raise CheckpointIncomplete(f"the checkpoint lacks its file {path}.", path=path) from error
    if file.size_bytes == record.size_bytes:
        return file
    found = file.size_bytes
    file.close()
    raise CheckpointCorrupt(
        f"{path} holds {found} bytes, expected {record.size_bytes}.",
        hint="The file was cut or replaced; restore another checkpoint.",
        path=path,
        expected=record.size_bytes,
        found=found,
        is_short=found < record.size_bytes,
    )


def _read_chunks(
    storage: Storage,
    record: FileRecord,
    wants: Sequence[Want],
    chunks: Sequence[int],
    threads: int,
    pace: Pace | None,
) -> int:
    file = _open_checked(storage, record)
    try:
        job = _Reader(file, storage.describe(record.name), record, wants, pace)
        _in_parallel(
            lambda number, buffer: job.read_chunk(chunks[number], buffer),
            len(chunks),
            threads,
            record.chunk_bytes,
        )
        return sum(job.extent(chunk)[1] for chunk in chunks)
    finally:
        file.close()


@dataclass(frozen=True)
class _Part:
    """What one write puts at `start`: all whole pages, but for the end of the file."""

    start: int
    length: int
    views: list[memoryview]


class _Writer:
    def __init__(
        self,
        file: WritableFile,
        pieces: Sequence[FilePiece],
        size_bytes: int,
        chunk_bytes: int,
        digest: Digest,
        pace: Pace | None,
    ) -> None:
        self.digests = [""] * -(-size_bytes // chunk_bytes)
        self._file = file
        views = ((piece.offset, memoryview(piece.data).cast("B")) for piece in pieces)
        self._ranges = [(offset, view) for offset, view in views if view.nbytes]
        self._starts = [offset for offset, _ in self._ranges]
        self._ends = [offset + view.nbytes for offset, view in self._ranges]
        self._size = size_bytes
        self._chunk = chunk_bytes
        self._digest = digest
        self._pace = pace

    def transfer(self, *, movers: int) -> Transfer[_Part]:
        """How the file is written: `_CHUNKS_PER_WRITE` chunks at a time."""
        return Transfer(
            prepare=self._prepare,
            move=self._write,
            count=-(-len(self.digests) // _CHUNKS_PER_WRITE),
            movers=movers,
            # No more than a small file needs.
            buffer_bytes=min(_CHUNKS_PER_WRITE * self._chunk, self._size) + PAGE_BYTES,
        )

    def _prepare(self, number: int, buffer: memoryview) -> _Part:
        """Gather and digest the chunks of a part."""
        first = number * _CHUNKS_PER_WRITE
        start = first * self._chunk
        length = min(_CHUNKS_PER_WRITE * self._chunk, self._size - start)
        views: list[memoryview] = []
        free = buffer
        for chunk in range(first, min(first + _CHUNKS_PER_WRITE, len(self.digests))):
            low = chunk * self._chunk
            high = min(low + self._chunk, self._size)
            if self._pace is not None:  # by chunks, or a file of two would be free
                self._pace(high - low)
            gathered, free = self._gathered(low, high, buffer, free)
            self.digests[chunk] = self._digest(*gathered)
            views += gathered
        return _Part(start, length, views)

    def _write(self, part: _Part) -> None:
        # Only the end of the file is no whole page: the pages before it still go directly.
        rest = part.length % PAGE_BYTES
        *views, last = part.views
        if part.length > rest:
            self._file.write_at(part.start, *views, last[: last.nbytes - rest])
        if rest:
            self._file.write_at(part.start + part.length - rest, last[last.nbytes - rest :])

    def _gathered(
        self, start: int, end: int, buffer: memoryview, free: memoryview
    ) -> tuple[list[memoryview], memoryview]:
        """The bytes of a chunk, where they lie or in `free`, a part of `buffer`; and what of it is left.

        One after the other: pages of a buffer that nothing is gathered in take no memory.
        """
        first = bisect.bisect_right(self._ends, start)
        ranges = self._ranges[first : bisect.bisect_left(self._starts, end)]
        views = []
        for segment in _segments(start, end, ranges, buffer, unit=PAGE_BYTES):
            if segment.in_place:
                views.append(segment.view)
                continue
            length = segment.view.nbytes
            gathered = replace(segment, view=free[:length])
            _gather(gathered, ranges)
            views.append(gathered.view)
            free = free[length:]  # whole pages, but for the end of the file
        return views, free


def _gather(segment: _Segment, ranges: Sequence[tuple[int, memoryview]]) -> None:
    at, start, end = segment.start, segment.start, segment.end
    for offset, view in ranges:
        low, high = max(offset, start), min(offset + view.nbytes, end)
        if low >= high:
            continue
        segment.view[at - start : low - start] = bytes(low - at)
        copy_bytes(segment.view[low - start : high - start], view[low - offset : high - offset])
        at = high
    segment.view[at - start :] = bytes(end - at)


@dataclass(frozen=True)
class _Segment:
    """Part of a chunk: its bytes are where they belong (`in_place`), or in the buffer."""

    start: int
    view: memoryview
    in_place: bool

    @property
    def end(self) -> int:
        return self.start + self.view.nbytes


def _segments(
    start: int, end: int, ranges: Sequence[tuple[int, memoryview]], buffer: memoryview, *, unit: int
) -> list[_Segment]:
    """Cut a chunk into long runs of single ranges, and what is between them.

    Args:
        unit: all cuts are at multiples of it, and so are the addresses of runs; the parts in `buffer`
            (page-aligned itself) are aligned as well.
    """
    segments: list[_Segment] = []
    at = start
    for number, (offset, view) in enumerate(ranges):
        low = max(-(-max(offset, start) // unit) * unit, at)
        high = min(offset + view.nbytes, end) // unit * unit
        if high - low < _DIRECT_FROM_BYTES or _is_shared(ranges, number, low, high):
            continue
        run = view[low - offset : high - offset]
        if unit > 1 and not is_page_aligned(run, low):
            continue
        if low > at:
            segments.append(_Segment(at, buffer[at - start : low - start], in_place=False))
        segments.append(_Segment(low, run, in_place=True))
        at = high
    if at < end:
        segments.append(_Segment(at, buffer[at - start : end - start], in_place=False))
    return segments


def _is_shared(ranges: Sequence[tuple[int, memoryview]], number: int, low: int, high: int) -> bool:
    return any(
        offset < high and offset + view.nbytes > low
        for other, (offset, view) in enumerate(ranges)
        if other != number
    )


class _Reader:
    def __init__(
        self, file: ReadableFile, path: str, record: FileRecord, wants: Sequence[Want], pace: Pace | None
    ) -> None:
        self._file = file
        self._path = path
        self._record = record
        self._wants = wants
        # Targets may overlap in the file (two names for one tensor): running maximum of the ends.
        self._starts = [want.offset for want in wants]
        self._reach = list(itertools.accumulate((want.end for want in wants), max))
        self._digest = digest_function(record.algorithm)
        self._pace = pace

    def extent(self, number: int) -> tuple[int, int]:
        start = number * self._record.chunk_bytes
        return start, min(self._record.chunk_bytes, self._record.size_bytes - start)

    def read_chunk(self, number: int, buffer: memoryview) -> None:
        start, length = self.extent(number)
        if self._pace is not None:
            self._pace(length)
        wants = self._overlapping(start, start + length)
        ranges = [(want.offset, want.target) for want in wants]
        segments = _segments(start, start + length, ranges, buffer, unit=1)
        self._fill(number, segments)
        self._verify(number, segments, wants)
        for segment in segments:
            if not segment.in_place:
                _scatter(segment, wants)

    def _overlapping(self, start: int, end: int) -> list[Want]:
        first = bisect.bisect_right(self._reach, start)
        last = bisect.bisect_left(self._starts, end)
        return [want for want in self._wants[first:last] if want.end > start]

    def _fill(self, number: int, segments: Sequence[_Segment]) -> None:
        start, length = self.extent(number)
        count = self._file.read_into(start, *(segment.view for segment in segments))
        if count < length:
            raise CheckpointCorrupt(
                f"{self._path} ends at byte {start + count}, expected {self._record.size_bytes}.",
                hint="The file was cut while it was read; restore another checkpoint.",
                path=self._path,
                offset=start + count,
                is_short=True,
            )

    def _verify(self, number: int, segments: Sequence[_Segment], wants: list[Want]) -> None:
        found = self._digest(*(segment.view for segment in segments))
        expected = self._record.digests[number]
        if found == expected:
            return
        start, length = self.extent(number)
        keys = [want.key for want in wants if want.key]
        where = f" ({', '.join(keys[:3])}{', ...' if len(keys) > 3 else ''})" if keys else ""
        raise CheckpointCorrupt(
            f"{self._path}, bytes {start} to {start + length}{where}: "
            f"{self._record.algorithm} is {found}, expected {expected}.",
            hint="The bytes changed after they were written; restore another checkpoint.",
            path=self._path,
            key=keys[0] if keys else None,
            offset=start,
            expected=expected,
            found=found,
        )


def _scatter(segment: _Segment, wants: Sequence[Want]) -> None:
    for want in wants:
        low, high = max(want.offset, segment.start), min(want.end, segment.end)
        if low < high:
            copy_bytes(
                want.target[low - want.offset : high - want.offset],
                segment.view[low - segment.start : high - segment.start],
            )


def _in_parallel(
    work: Callable[[int, memoryview], None], count: int, threads: int, buffer_bytes: int
) -> None:
    """Call `work` for 0 .. count-1, each thread with a page-aligned buffer of its own.

    The first error stops all and is raised here, after the threads have ended: nobody writes to
    the caller's memory once this has returned (but see `run_parallel` for a second Ctrl-C).
    """
    numbers = iter(range(count))
    lock = threading.Lock()
    stop = threading.Event()

    def run() -> None:
        # Not closed by hand: the frames of an error may still refer to it.
        buffer = page_memory(buffer_bytes)
        while not stop.is_set():
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            try:
                work(number, buffer)
            except BaseException:
                stop.set()
                raise

    run_parallel([run] * min(max(threads, 1), count), "resiliency-shard")
