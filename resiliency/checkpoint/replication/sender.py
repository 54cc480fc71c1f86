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
from contextlib import suppress
from types import TracebackType

from resiliency.checkpoint.format.marker import marker_name, step_directory
from resiliency.checkpoint.replication.copy_plan import CopyPlan
from resiliency.checkpoint.replication.hosts import HostTable
from resiliency.checkpoint.replication.placement import Peer
from resiliency.checkpoint.replication.transport.connection import CallDeadline, Link, Links, UnexpectedReply
from resiliency.checkpoint.replication.transport.handshake import PeerRefused, connect
from resiliency.checkpoint.replication.transport.messages import (
    Chunk,
    ConnectionRefused,
    End,
    Held,
    Message,
    Offer,
    PeerHeartbeat,
    Refusal,
    Verified,
    Wanted,
)
from resiliency.checkpoint.storage.checksums import digest_function
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.checkpoint.storage.throttle import Throttle
from resiliency.errors import CheckpointCorrupt, CheckpointError, CheckpointIncomplete, PeerError

logger = logging.getLogger(__name__)

#: Attempts to send a copy to one host before the next one is asked.
ATTEMPTS = 4
_WORTH_ANOTHER_TRY = frozenset({Refusal.CORRUPT.value, Refusal.INCOMPLETE.value})


class SourceUnavailable(CheckpointError):
    """The system does not let us read our own checkpoint for now, of which nothing is known to be wrong."""


class CopySource:
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
            self.copy_plan = CopyPlan.read(storage, step)
        except CheckpointCorrupt as error:
            if "errno" not in error.fields:
                raise
            raise SourceUnavailable(str(error), path=path, step=step) from error
        if self.copy_plan.save_id != save_id:
            raise CheckpointIncomplete(
                f"{path} holds save {self.copy_plan.save_id!r}, expected {save_id!r}.", path=path, step=step
            )
        self._paths = [f"{path}/{record.name}" for record in self.copy_plan.files]
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
        start, length = self.copy_plan.extent(file, number)
        try:
            link.send_file(Chunk(file=file, number=number), self._fds[file], start, length)
        except CheckpointCorrupt as error:
            path = self._paths[file]
            if "errno" in error.fields:
                raise SourceUnavailable(f"{path} cannot be sent: {error.message}", path=path) from error
            raise CheckpointCorrupt(f"{path} was cut: {error.message}", path=path) from error
        # Training needs the page cache more than we do: this was read once and for all.
        with suppress(OSError):
            os.posix_fadvise(self._fds[file], start, length, os.POSIX_FADV_DONTNEED)
        return length

    def check_chunk(self, file: int, number: int) -> None:
        """Whether a chunk is what was committed.

        Raises:
            CheckpointCorrupt: it is not.
            SourceUnavailable: it cannot be read.
        """
        if not self.copy_plan.has(file, number):
            return
        record = self.copy_plan.files[file]
        start, length = self.copy_plan.extent(file, number)
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
        fds, self._fds = self._fds, []
        for fd in fds:
            with suppress(OSError):  # it says nothing of the bytes that were sent
                os.close(fd)

    def __enter__(self) -> CopySource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Sender:
    """Sends copies for one host, from any number of threads."""

    def __init__(self, host: str, links: Links, throttle: Throttle, timeouts: CallDeadline) -> None:
        self._host = host
        self._links = links
        self._throttle = throttle
        self._timeouts = timeouts

    def send(self, source: CopySource, source_host: str, table: HostTable, target: Peer) -> None:
        """See a copy of `source` verified and committed on `target`.

        Goes on after a broken connection, a few times.

        Args:
            source_host: directory name of the host whose checkpoint it is.
        Raises:
            PeerError: the target is dead, stopped, or cannot be reached.
            PeerRefused: it will not have the copy.
            CheckpointCorrupt: our own file is damaged.
            SourceUnavailable: our own file cannot be read for now.
        """
        for attempt in range(1, ATTEMPTS + 1):
            progress = _Progress()
            try:
                self._try(source, source_host, table, target, progress)
            except PeerRefused as error:
                if error.said.why not in _WORTH_ANOTHER_TRY or attempt == ATTEMPTS:
                    raise
                source.check_chunk(error.said.file, error.said.chunk)
                logger.warning("%s  Here it is as it was committed: sending it again.", error)
            except PeerError as error:
                if not progress.sent_bytes or attempt == ATTEMPTS:
                    raise
                logger.warning("%s  Going on after %d bytes.", error, progress.sent_bytes)
            else:
                return

    def _try(
        self, source: CopySource, source_host: str, table: HostTable, target: Peer, progress: _Progress
    ) -> None:
        link = connect(table, self._host, target, self._timeouts, self._links)
        try:
            try:
                _offer(link, source_host, source.copy_plan)
                answer = _answer(link)
                if isinstance(answer, Held):
                    return
                if not isinstance(answer, Wanted):
                    raise PeerError(f"{link.host} said {answer.kind} to an offer.", host=link.host)
                self._send_wanted(link, source, answer, progress)
            except UnexpectedReply as reply:
                raise _unexpected(link, reply.said) from None
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

    def _send_wanted(self, link: Link, source: CopySource, wanted: Wanted, progress: _Progress) -> None:
        for file, first, end in wanted.ranges:
            if not (source.copy_plan.has(file, first) and source.copy_plan.has(file, end - 1)):
                raise PeerError(f"{link.host} wants chunks {first} to {end} of file {file}.", host=link.host)
            for number in range(first, end):
                while link.is_readable():
                    message, _ = link.receive()
                    if not isinstance(message, PeerHeartbeat):
                        raise _unexpected(link, message)
                length = source.copy_plan.extent(file, number)[1]
                self._throttle.wait(length, self._timeouts.heartbeat_s, lambda: link.send(PeerHeartbeat()))
                source.send_chunk(link, file, number)
                progress.sent_bytes += length
        link.wait_to_send()
        link.send(End())


class _Progress:
    """How far an attempt came."""

    sent_bytes = 0


def _offer(link: Link, source_host: str, copy_plan: CopyPlan) -> None:
    contents = [copy_plan.manifest_bytes, *copy_plan.index_bytes.values()]
    offer = Offer(
        source_host=source_host,
        step=copy_plan.step,
        save_id=copy_plan.save_id,
        ranks=tuple(copy_plan.index_bytes),
        sizes=tuple(map(len, contents)),
    )
    link.send(offer, *contents)


def _answer(link: Link) -> Message:
    message = link.receive_answer()
    if isinstance(message, ConnectionRefused):
        raise PeerRefused(link.host, message)
    return message


def _unexpected(link: Link, message: Message) -> PeerError:
    if isinstance(message, ConnectionRefused):
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
            if isinstance(message, ConnectionRefused):
                raise PeerRefused(link.host, message)
    except PeerRefused:
        raise
    except PeerError:
        return  # the first error says more
