# SPDX-License-Identifier: Apache-2.0
"""Sending a copy of one committed step to another host.

What the other side lacks goes out without a pause between chunks, from the page cache to the
socket.  A connection that breaks is made again and goes on where it was.  Every file is opened
before the first byte is sent, so that the step may be deleted here meanwhile: its bytes stay until
we close them.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from types import TracebackType

from resiliency.checkpoint.checksums import digest_function
from resiliency.checkpoint.marker import marker_name, step_directory
from resiliency.checkpoint.peers.blueprint import Blueprint
from resiliency.checkpoint.peers.counters import Counters
from resiliency.checkpoint.peers.frames import LastWord, Link, Links, Patience
from resiliency.checkpoint.peers.handshake import PeerRefused, connect
from resiliency.checkpoint.peers.messages import (
    Beat,
    Chunk,
    End,
    Held,
    Message,
    Offer,
    Refusal,
    Refused,
    Verified,
    Wanted,
)
from resiliency.checkpoint.peers.placement import Peer
from resiliency.checkpoint.peers.table import PeerTable
from resiliency.checkpoint.storage import LocalStorage
from resiliency.errors import CheckpointCorrupt, CheckpointError, CheckpointIncomplete, PeerError

logger = logging.getLogger(__name__)

#: Attempts to send a copy to one host before the next one is asked.
ATTEMPTS = 4
_WORTH_ANOTHER_TRY = frozenset({Refusal.CORRUPT.value, Refusal.INCOMPLETE.value})


class Throttle:
    """Spreads what all threads send so that it stays below a bandwidth (a token bucket).

    Args:
        bytes_per_s: 0 for no limit; may be set at any time.  Another limit counts at once: who waits by
            the one before goes on.
    """

    def __init__(self, bytes_per_s: int = 0) -> None:
        self._rate = bytes_per_s
        self._free_at = time.monotonic()
        self._is_lifted = False
        #: One more whenever those who wait need wait no longer.
        self._releases = 0
        self._released = threading.Condition()

    @property
    def bytes_per_s(self) -> int:
        return self._rate

    @bytes_per_s.setter
    def bytes_per_s(self, limit: int) -> None:
        with self._released:
            if limit != self._rate:
                self._rate = limit
                self._release()

    def lift(self) -> None:
        """No limit from now on, also for who waits."""
        with self._released:
            self._is_lifted = True
            self._release()

    def restore(self) -> None:
        with self._released:
            self._is_lifted = False

    def wait(self, size_bytes: int, every_s: float, meanwhile: Callable[[], None]) -> None:
        """Wait for the turn of `size_bytes`, and call `meanwhile` every so often."""
        with self._released:
            if not self._rate or self._is_lifted:
                return
            before = self._releases
            begins = max(self._free_at, time.monotonic())
            self._free_at = begins + size_bytes / self._rate
        while (left_s := begins - time.monotonic()) > 0:
            with self._released:
                if self._released.wait_for(lambda: self._releases != before, min(left_s, every_s)):
                    return
            if left_s > every_s:
                meanwhile()

    def _release(self) -> None:
        """Those who wait go on, and nobody waits any more for what they were to send."""
        self._free_at = time.monotonic()
        self._releases += 1
        self._released.notify_all()


class SourceUnavailable(CheckpointError):
    """The system does not let us read our own checkpoint for now, of which nothing is known to be wrong."""


class Source:
    """A committed step of this host, opened for as long as copies of it are sent; a context manager.

    Args:
        root: directory of checkpoints: the local tier, or the replicas of one owner.
    Raises:
        CheckpointIncomplete: it is not there (any more), or not `save_id`.
        CheckpointCorrupt: its manifest or an index is damaged.
        SourceUnavailable: no descriptor is left, for example, or the device fails: another try may do.
    """

    def __init__(self, root: str | os.PathLike[str], step: int, save_id: str) -> None:
        storage = LocalStorage(root)
        path = storage.describe(step_directory(step))
        try:
            self.blueprint = Blueprint.read(storage, step)
        except CheckpointCorrupt as error:
            if "errno" not in error.fields:
                raise
            raise SourceUnavailable(str(error), path=path, step=step) from error
        if self.blueprint.save_id != save_id:
            raise CheckpointIncomplete(
                f"{path} holds save {self.blueprint.save_id!r}, expected {save_id!r}.", path=path, step=step
            )
        self._paths = [f"{path}/{record.name}" for record in self.blueprint.files]
        self._fds: list[int] = []
        try:
            for file in self._paths:
                self._fds.append(os.open(file, os.O_RDONLY | os.O_CLOEXEC))
        except (FileNotFoundError, NotADirectoryError) as error:
            self.close()
            raise CheckpointIncomplete(f"{path} lacks a file: {error}.", path=path, step=step) from error
        except OSError as error:
            self.close()
            raise SourceUnavailable(f"{path} cannot be opened: {error}.", path=path, step=step) from error
        try:
            is_marked = storage.exists(marker_name(step))
        except CheckpointCorrupt as error:
            self.close()
            raise SourceUnavailable(str(error), path=path, step=step) from error
        if is_marked:
            self.close()  # it is being deleted, and some of the files may be others'
            raise CheckpointIncomplete(f"{path} is marked as unfinished.", path=path, step=step)

    def send_chunk(self, link: Link, file: int, number: int) -> int:
        """Send one chunk, unverified: the other side does that.  Returns its size.

        Raises:
            CheckpointCorrupt: the file was cut.
            SourceUnavailable: the device gave an error instead of bytes.
        """
        start, length = self.blueprint.extent(file, number)
        try:
            link.send_file(Chunk(file=file, number=number), self._fds[file], start, length)
        except CheckpointCorrupt as error:
            path = self._paths[file]
            if "errno" in error.fields:
                raise SourceUnavailable(f"{path} cannot be sent: {error.message}", path=path) from error
            raise CheckpointCorrupt(f"{path} was cut: {error.message}", path=path) from error
        # Training needs the page cache more than we do: this was read once and for all.
        os.posix_fadvise(self._fds[file], start, length, os.POSIX_FADV_DONTNEED)
        return length

    def check_chunk(self, file: int, number: int) -> None:
        """Whether a chunk is what was committed.

        Raises:
            CheckpointCorrupt: it is not.
            SourceUnavailable: it cannot be read.
        """
        if not self.blueprint.has(file, number):
            return
        record = self.blueprint.files[file]
        start, length = self.blueprint.extent(file, number)
        try:
            data = os.pread(self._fds[file], length, start)
        except OSError as error:
            raise SourceUnavailable(f"{self._paths[file]} cannot be read: {error}.") from error
        found = digest_function(record.algorithm)(data)
        if found != record.digests[number]:
            raise CheckpointCorrupt(
                f"{self._paths[file]}, bytes {start} to {start + length}: {record.algorithm} is {found}, "
                f"expected {record.digests[number]}.",
                hint="The bytes changed after they were committed.",
                path=self._paths[file],
                offset=start,
            )

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Sender:
    """Sends copies for one host, from any number of threads."""

    def __init__(
        self, host: str, links: Links, throttle: Throttle, counters: Counters, patience: Patience
    ) -> None:
        self._host = host
        self._links = links
        self._throttle = throttle
        self._counters = counters
        self._patience = patience

    def send(self, source: Source, owner: str, table: PeerTable, target: Peer) -> None:
        """See a copy of `source` verified and committed on `target`.

        Goes on after a broken connection, a few times.

        Args:
            owner: directory name of the host whose checkpoint it is.
        Raises:
            PeerError: the target is dead, stopped, or cannot be reached.
            PeerRefused: it will not have the copy.
            CheckpointCorrupt: our own file is damaged.
            SourceUnavailable: our own file cannot be read for now.
        """
        began = time.monotonic()
        try:
            for attempt in range(1, ATTEMPTS + 1):
                if attempt > 1:
                    self._counters.add("retries")
                progress = _Progress()
                try:
                    self._try(source, owner, table, target, progress)
                except PeerRefused as error:
                    self._counters.add("refusals")
                    if error.said.why not in _WORTH_ANOTHER_TRY or attempt == ATTEMPTS:
                        raise
                    source.check_chunk(error.said.file, error.said.chunk)
                    logger.warning("%s  Here it is as it was committed: sending it again.", error)
                except PeerError as error:
                    if not progress.sent_bytes or attempt == ATTEMPTS:
                        raise
                    logger.warning("%s  Going on after %d bytes.", error, progress.sent_bytes)
                else:
                    self._counters.add("copies_sent")
                    return
        finally:
            self._counters.add("sending_seconds", time.monotonic() - began)

    def _try(self, source: Source, owner: str, table: PeerTable, target: Peer, progress: _Progress) -> None:
        link = connect(table, self._host, target, self._patience, self._links)
        try:
            try:
                _offer(link, owner, source.blueprint)
                answer = _answer(link)
                if isinstance(answer, Held):
                    return
                if not isinstance(answer, Wanted):
                    raise PeerError(f"{link.host} said {answer.kind} to an offer.", host=link.host)
                self._send_wanted(link, source, answer, progress)
            except LastWord as word:
                raise _unexpected(link, word.said) from None
            except PeerRefused:
                raise
            except PeerError:
                _hear_out(link)
                raise
            answer = _answer(link)
            if not isinstance(answer, Verified):
                raise PeerError(f"{link.host} said {answer.kind} to a copy.", host=link.host)
        finally:
            self._links.drop(link)

    def _send_wanted(self, link: Link, source: Source, wanted: Wanted, progress: _Progress) -> None:
        for file, first, end in wanted.ranges:
            if not (source.blueprint.has(file, first) and source.blueprint.has(file, end - 1)):
                raise PeerError(f"{link.host} wants chunks {first} to {end} of file {file}.", host=link.host)
            for number in range(first, end):
                while link.is_readable():
                    message, _ = link.receive()
                    if not isinstance(message, Beat):
                        raise _unexpected(link, message)
                length = source.blueprint.extent(file, number)[1]
                self._throttle.wait(length, self._patience.beat_s, lambda: link.send(Beat()))
                source.send_chunk(link, file, number)
                progress.sent_bytes += length
                self._counters.add("sent_bytes", length)
        link.wait_to_send()
        link.send(End())


class _Progress:
    """How far an attempt came."""

    sent_bytes = 0


def _offer(link: Link, owner: str, blueprint: Blueprint) -> None:
    contents = [blueprint.manifest_bytes, *blueprint.index_bytes.values()]
    offer = Offer(
        owner=owner,
        step=blueprint.step,
        save_id=blueprint.save_id,
        ranks=tuple(blueprint.index_bytes),
        sizes=tuple(map(len, contents)),
    )
    link.send(offer, *contents)


def _answer(link: Link) -> Message:
    message = link.receive_answer()
    if isinstance(message, Refused):
        raise PeerRefused(link.host, message)
    return message


def _unexpected(link: Link, message: Message) -> PeerError:
    if isinstance(message, Refused):
        return PeerRefused(link.host, message)
    return PeerError(f"{link.host} said {message.kind} within a copy.", host=link.host)


def _hear_out(link: Link) -> None:
    """A refusal may lie unread in a connection that broke.

    Raises:
        PeerRefused: it does.
    """
    try:
        while link.is_readable():
            message, _ = link.receive()
            if isinstance(message, Refused):
                raise PeerRefused(link.host, message)
    except PeerRefused:
        raise
    except PeerError:
        return  # the first error says more
