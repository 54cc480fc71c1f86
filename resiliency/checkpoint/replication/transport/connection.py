# SPDX-License-Identifier: Apache-2.0
"""Frames on a TCP connection: a message, and the bytes that belong to it.

    magic, length of the message, length of the bytes | message (JSON) | bytes

Nothing is read before its length was found to be within bounds, and every wait ends: a peer that
moves no byte for `CallDeadline.silence` is taken for dead, whether its host vanished (TCP would tell
after minutes) or its process is stopped (TCP would never tell).  Who is at work and has nothing to
say sends `PeerHeartbeat`.  File content goes from the page cache to the socket without a copy.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import threading
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType

from resiliency.checkpoint.replication.transport.messages import Message, PeerHeartbeat, decode, encode
from resiliency.checkpoint.storage.interface import Buffer
from resiliency.errors import CheckpointCorrupt, PeerError
from resiliency.runtime import awake_s

_MAGIC = b"rpp1"
_PREFIX = struct.Struct("!4sIQ")
MESSAGE_BYTES = 256 << 10
#: Before the handshake nobody gets more of our memory than this.
HELLO_BYTES = 4 << 10
#: A peer that is slower than this is as good as dead.
_LEAST_BYTES_PER_S = 256 << 10
#: What `sendfile` answers where it does not work, and when the file is to blame.
_NO_SENDFILE = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
_UNREADABLE = frozenset({errno.EIO, errno.ESTALE, errno.ENXIO})


@dataclass(frozen=True, kw_only=True)
class CallDeadline:
    """How long to wait for others.

    Args:
        silence: without a byte moved, before a peer is taken for dead.
        connect: for a connection.
        storage: for one answer of this host's own storage; a full disk answers, a broken one may hang.
        pause: after all targets failed; doubles up to `longest_pause`.
    """

    silence: timedelta = timedelta(seconds=20)
    connect: timedelta = timedelta(seconds=5)
    storage: timedelta = timedelta(minutes=10)
    pause: timedelta = timedelta(seconds=1)
    longest_pause: timedelta = timedelta(seconds=15)

    @property
    def heartbeat_s(self) -> float:
        return self.silence.total_seconds() / 4

    def next_pause_s(self, before_s: float) -> float:
        """Pause before the next try; `before_s`: the pause before the last one, 0: there was none."""
        return min(max(2 * before_s, self.pause.total_seconds()), self.longest_pause.total_seconds())


class Link:
    """One connection.  One thread at a time sends, and one receives; `cut` may come from any."""

    def __init__(self, connection: socket.socket, timeouts: CallDeadline, host: str = "") -> None:
        #: Name of the other host; of who has not shown who it is, its address.
        self.host = host or _address_of(connection)
        self.timeouts = timeouts
        self._silence_s = timeouts.silence.total_seconds()
        self._socket = connection
        self._begun = bytearray()  # of frames that have not come whole
        connection.settimeout(self._silence_s)
        with contextlib.suppress(OSError):  # not TCP, in tests
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        return self._socket.fileno()

    def grant(self, timeouts: CallDeadline) -> None:
        """Wait for the other side as `timeouts` says from now on."""
        self.timeouts = timeouts
        self._silence_s = timeouts.silence.total_seconds()
        with contextlib.suppress(OSError):  # cut meanwhile
            self._socket.settimeout(self._silence_s)

    def send(self, message: Message, *payload: Buffer) -> None:
        """Send a frame.

        Raises:
            PeerError: the other side is gone, or takes nothing.
        """
        self._send(_head(message, sum(memoryview(part).nbytes for part in payload)), more=bool(payload))
        for part in payload:
            self._send(part)

    def send_file(self, message: Message, fd: int, offset: int, size_bytes: int) -> None:
        """Send a frame whose bytes are a range of a file.

        While the other side takes nothing, its beats tell that it is alive and waits for its disk.

        Raises:
            PeerError: as `send`.
            LastWord: instead of taking more, it sent something else than a beat.
            CheckpointCorrupt: the file ends before, or cannot be read; with `errno` in the latter case.
        """
        self.wait_to_send()
        self._send(_head(message, size_bytes), more=True)
        end = offset + size_bytes
        while offset < end:
            try:
                count = os.sendfile(self._socket.fileno(), fd, offset, end - offset)
            except BlockingIOError:
                self.wait_to_send()
                continue
            except OSError as error:
                if error.errno in _NO_SENDFILE:
                    count = self._send_copied(fd, offset, end)
                elif error.errno in _UNREADABLE:
                    raise _unread(error, offset) from error
                else:
                    raise self._gone(error) from error
            if count == 0:
                raise CheckpointCorrupt(f"a file ends at byte {offset}, expected {end}.", offset=offset)
            offset += count

    def _send_copied(self, fd: int, offset: int, end: int) -> int:
        """For file systems that cannot send by themselves."""
        try:
            data = os.pread(fd, min(end - offset, 1 << 20), offset)
        except OSError as error:
            raise _unread(error, offset) from error
        self._send(data)
        return len(data)

    def wait_to_send(self) -> None:
        """Wait until the other side takes something, as long as it gives signs of life.

        Raises:
            PeerError, LastWord: as `send_file`.
        """
        while True:
            began = awake_s()
            ready = self._poll(select.POLLIN | select.POLLOUT, self._silence_s)
            if ready & select.POLLOUT:
                return
            if not ready:
                self._check_time(TimeoutError(), began)
                continue
            message, size = self.receive()
            if size or not isinstance(message, PeerHeartbeat):
                raise UnexpectedReply(self.host, message)

    def try_send(self, message: Message) -> bool:
        """Send a small frame without waiting; False if it did not go out whole, and the link is of no use."""
        frame = _head(message, 0)
        try:
            # Where there is room at all, there is room for a small frame.
            return bool(self._poll(select.POLLOUT, 0) & select.POLLOUT) and self._socket.send(frame) == len(
                frame
            )
        except OSError:
            return False

    def receive(self, *, message_bytes: int = MESSAGE_BYTES) -> tuple[Message, int]:
        """The next message and how many bytes belong to it, which `receive_bytes` must get next.

        Raises:
            PeerError: the other side is gone or silent, or breaks the protocol.
        """
        deadline = awake_s() + self._silence_s
        prefix = bytearray(_PREFIX.size)
        self._fill(memoryview(prefix), deadline)
        length, size = self._lengths(prefix, message_bytes)
        content = bytearray(length)
        self._fill(memoryview(content), deadline)
        return decode(bytes(content)), size

    def receive_answer(self) -> Message:
        """The next message that is no beat, and has no bytes."""
        while True:
            message, size = self.receive()
            if size:
                raise PeerError(f"{self.host} sent {size} bytes with {message.kind}.", host=self.host)
            if not isinstance(message, PeerHeartbeat):
                return message

    def receive_ready(self) -> list[Message]:
        """What has come so far, without waiting; of frames without bytes.

        Raises:
            PeerError: the other side is gone, or breaks the protocol.
        """
        if not self.is_readable():
            return []
        try:
            data = self._socket.recv(MESSAGE_BYTES)
        except OSError as error:
            raise self._gone(error) from error
        if not data:
            raise PeerError(f"{self.host} closed the connection.", host=self.host)
        self._begun += data
        messages = []
        while len(self._begun) >= _PREFIX.size:
            length, size = self._lengths(self._begun[: _PREFIX.size], MESSAGE_BYTES)
            end = _PREFIX.size + length
            if size:
                raise PeerError(f"{self.host} sent {size} bytes where none belong.", host=self.host)
            if len(self._begun) < end:
                break
            messages.append(decode(bytes(self._begun[_PREFIX.size : end])))
            del self._begun[:end]
        return messages

    def receive_bytes(self, target: memoryview) -> None:
        """Fill `target` with the bytes of a frame."""
        self._fill(target, awake_s() + self._silence_s + target.nbytes / _LEAST_BYTES_PER_S)

    def is_readable(self, timeout_s: float = 0.0) -> bool:
        """Whether something came, the end of the connection included."""
        return bool(self._poll(select.POLLIN, timeout_s))

    def cut(self) -> None:
        """End all that waits on this link, in whatever thread; `close` remains to be called."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def finish(self, limit_bytes: int = 64 << 20) -> None:
        """After a last word, let the other side read it: what it has sent meanwhile is thrown away.

        A connection that is closed with unread bytes is reset, and takes our last word with it.
        """
        deadline = awake_s() + min(self._silence_s, 5.0)
        scratch = memoryview(bytearray(256 << 10))
        with contextlib.suppress(OSError, PeerError):
            self._socket.shutdown(socket.SHUT_WR)
            while limit_bytes > 0 and awake_s() < deadline:
                count = self._receive_some(scratch, deadline)
                if not count:
                    return
                limit_bytes -= count

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()

    def __enter__(self) -> Link:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    def _send(self, data: Buffer, *, more: bool = False) -> None:
        left = memoryview(data).cast("B")
        while left.nbytes:
            try:
                # Of a frame that goes on, the first part waits for more instead of making a packet.
                began = awake_s()
                count = self._socket.send(left, socket.MSG_MORE if more else 0)
            except OSError as error:
                self._check_time(error, began)
                continue
            left = left[count:]

    def _fill(self, target: memoryview, deadline: float) -> None:
        while target.nbytes:
            count = self._receive_some(target, deadline)
            if not count:
                raise PeerError(f"{self.host} closed the connection.", host=self.host)
            target = target[count:]

    def _receive_some(self, target: memoryview, deadline: float) -> int:
        while True:
            if (began := awake_s()) > deadline:
                raise PeerError(f"{self.host} is too slow.", host=self.host)
            try:
                return self._socket.recv_into(target)
            except OSError as error:
                self._check_time(error, began)

    def _poll(self, events: int, timeout_s: float) -> int:
        poll = select.poll()
        try:
            poll.register(self._socket, events)
        except ValueError:  # closed
            return select.POLLIN
        found = poll.poll(timeout_s * 1000)
        return found[0][1] if found else 0

    def _lengths(self, prefix: bytearray, message_bytes: int) -> tuple[int, int]:
        magic, length, size = _PREFIX.unpack(prefix)
        if magic != _MAGIC or length > message_bytes:
            raise PeerError(f"{self.host} does not speak this protocol: {bytes(prefix)!r}.", host=self.host)
        return length, size

    def _check_time(self, error: OSError, began: float) -> None:
        """Raise what a wait ended with, unless this process was stopped meanwhile: then it begins again."""
        if not isinstance(error, TimeoutError) or awake_s() - began > self._silence_s / 2:
            raise self._gone(error) from error

    def _gone(self, error: OSError) -> PeerError:
        if isinstance(error, TimeoutError):
            return PeerError(
                f"{self.host} has moved no byte for {self._silence_s:g} s: it hangs or is gone.",
                host=self.host,
            )
        return PeerError(f"the connection to {self.host} broke: {error}.", host=self.host)


class UnexpectedReply(PeerError):
    """Instead of going on, the other side said something."""

    def __init__(self, host: str, message: Message) -> None:
        super().__init__(f"{host} said {message.kind}.", host=host)
        self.said = message


def _unread(error: OSError, offset: int) -> CheckpointCorrupt:
    return CheckpointCorrupt(f"a file cannot be read: {error}.", offset=offset, errno=error.errno)


def _head(message: Message, size_bytes: int) -> bytes:
    content = encode(message)
    return _PREFIX.pack(_MAGIC, len(content), size_bytes) + content


def _address_of(connection: socket.socket) -> str:
    try:
        name = connection.getpeername()
    except OSError:
        return "somebody"
    return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "somebody"


class Links:
    """The open links of one service, so that closing it ends all waits at once."""

    def __init__(self) -> None:
        self._links: set[Link] = set()
        self._closed = False
        self._lock = threading.Lock()

    def add(self, link: Link) -> Link:
        with self._lock:
            self._links.add(link)
            if self._closed:
                link.cut()
        return link

    def drop(self, link: Link) -> None:
        """Close a link."""
        with self._lock:
            self._links.discard(link)
            link.close()

    def release(self, link: Link) -> None:
        """Somebody else closes it."""
        with self._lock:
            self._links.discard(link)

    def cut_all(self) -> None:
        """End all waits, now and of links that come; who waits closes its link."""
        with self._lock:
            self._closed = True
            for link in self._links:
                link.cut()
