# SPDX-License-Identifier: Apache-2.0
"""The process that keeps the book of ranges, for consumers that need not march in step.

One thread and one loop: what arrived is applied, then written to the journal in one durable write, and only
then answered. So a server that is killed at any moment, and started again on its journal, goes on where it
was, and clients that ask again get the same answers.

A worker that is silent for longer than the lease is taken for dead, and what it held is free. So is what a
worker holds that says nothing but that it lives for longer than `max_hold`. A server that was stopped itself
gives all workers a fresh lease: their requests wait in its sockets.

Before it shows the token, a stranger can make the server hold a few KiB for a few seconds, and only so many
strangers are heard at a time: a new one takes the place of the oldest.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import logging
import resource
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from resiliency.data.dispatch.book import Book
from resiliency.data.dispatch.bookkeeper import Bookkeeper, refusal
from resiliency.data.dispatch.failures import PoisonPolicy
from resiliency.data.dispatch.journal import Journal
from resiliency.data.dispatch.pending import Pending, PendingRequests
from resiliency.data.dispatch.ranges import Plain, RangeSource
from resiliency.data.dispatch.wire import (
    DOOR,
    DOOR_BYTES,
    HOLD,
    LINE_BYTES,
    VERSION,
    check_token,
    decoded,
    encoded,
    proof_of,
    too_long,
)
from resiliency.errors import ConfigError, DataError, InternalError
from resiliency.tasks import end_tasks, wait_for

log = logging.getLogger(__name__)

#: Entries of the journal after which it is made short.
_ENTRIES = 10_000
#: Connections of workers, and of strangers that have not shown the token; and files beside them.
_CONNECTIONS = 10_000
_STRANGERS = 512
_FILES = 64
#: Between two attempts to accept a connection, while no file is free.
_NO_FILE_S = 0.2
#: Longest time in which the server is up, and in which it ends.
_START_S = 30.0
_END_S = 30.0


class DataServer:
    """Serves ranges of a source, in a thread of this process, until it is closed.

        with DataServer(SampleRanges(size=10**6, range_size=1000), "/shared/book", token=token) as server:
            ...  # clients connect to server.address

    Args:
        directory: of the journal, one for each book; on storage that a restarted server sees.
        token: a secret text that clients know.
        address: host and port to listen on; port 0 takes a free one.
        lease: how long a worker may be silent; clients speak three times as often.
        max_hold: how long a worker that holds ranges may do nothing but say that it lives, as one that hangs
            does; then they go to others. Longer than a worker needs for a range, or pauses between two.
        policy: what becomes of ranges that cannot be used.
    Raises:
        ConfigError: the journal is that of another source, or another server has it open, or the address
            cannot be listened on, or the directory takes no files.
        DataError: the journal is damaged, or partitions grew after they were closed.
    """

    def __init__(
        self,
        source: RangeSource,
        directory: str | Path,
        *,
        token: str,
        address: tuple[str, int] = ("127.0.0.1", 0),
        lease: timedelta = timedelta(seconds=30),
        max_hold: timedelta = timedelta(hours=1),
        policy: PoisonPolicy | None = None,
    ) -> None:
        check_token(token)
        if lease <= timedelta():
            raise ConfigError(f"the lease is {lease}; it must be longer than nothing.")
        if max_hold < lease:
            raise ConfigError(f"max_hold is {max_hold}; it must not be shorter than the lease, {lease}.")
        self._token, self._lease_s, self._wanted = token, lease.total_seconds(), address
        self._max_hold_s = max_hold.total_seconds()
        try:
            self._journal = Journal(directory)
            try:
                self._recover(source, policy or PoisonPolicy())
            except BaseException:
                self._journal.close()
                raise
        except OSError as error:
            raise ConfigError(f"the journal in {directory} cannot be written: {error}") from error
        self._requests = PendingRequests(self._keeper)
        #: When a worker said last that it lives, and when it asked for something.
        self._heard: dict[str, float] = {}
        self._asked: dict[str, float] = {}
        self._connections: set[asyncio.Task[None]] = set()
        #: Those that have not shown the token, the oldest first.
        self._strangers: dict[asyncio.Task[None], socket.socket] = {}
        self._up = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="data-server", daemon=True)
        self._address: tuple[str, int] | None = None
        self._thread.start()
        self._up.wait(_START_S)
        if self._address is None:
            self.close()
            raise InternalError(f"the data server was not up within {_START_S:g} s.")

    def _recover(self, source: RangeSource, policy: PoisonPolicy) -> None:
        entries = self._journal.entries
        if entries:
            if entries[0].get("version") != VERSION:
                raise DataError(
                    f"{self._journal.path} is the journal of another release.",
                    hint="Finish with that release, or start with an empty directory and the state in a "
                    "checkpoint.",
                )
            # With the policy and the partitions of then: else a grant is of another range than was answered.
            then = PoisonPolicy(**cast("dict[str, Any]", entries[0]["policy"]))
            self._keeper = Bookkeeper.of_plain(cast(Plain, entries[0]["snapshot"]), source, then)
            self.book_id = cast(str, entries[0]["book"])
            for number, request in enumerate(entries[1:], start=2):
                answer, entry = self._keeper.apply(request)
                if entry is None:
                    raise DataError(
                        f"entry {number} of the journal cannot be applied again: {answer}",
                        hint="Start with an empty directory and the state in a checkpoint.",
                    )
            self._keeper.take_returned()  # which was logged then
            self._keeper.book.continue_with(source, policy)
            log.info("data server goes on with %d entries of %s", len(entries), self._journal.path)
        else:
            self._keeper, self.book_id = Bookkeeper(Book(source, policy)), secrets.token_hex(8)
        self._journal.entries = []
        self._shorten()

    def _shorten(self) -> None:
        policy = asdict(self._keeper.book.failures.policy)
        snapshot: Plain = {"version": VERSION, "book": self.book_id, "policy": policy}
        snapshot["snapshot"] = self._keeper.to_plain()
        self._journal.start(snapshot)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        assert self._address is not None
        return self._address

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait until the server ends.

        Raises:
            DataError: it ended by itself, because its journal cannot be written; what was answered is in it.
            TimeoutError: it still serves.
        """
        self._thread.join(None if timeout is None else timeout.total_seconds())
        if self._thread.is_alive():
            raise TimeoutError("the data server still serves.")
        self._raise_error()

    def close(self) -> None:
        """End serving. Clients that ask wait for the next server of the same journal.

        Raises:
            DataError: it had ended by itself.
        """
        if self._thread.is_alive() and self._address is not None:
            with contextlib.suppress(RuntimeError):  # it ends just now
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_END_S)
        if self._thread.is_alive():
            raise InternalError(f"the data server did not end within {_END_S:g} s.")
        self._journal.close()
        self._raise_error()

    def __enter__(self) -> DataServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if isinstance(error, OSError) and self._address is None:
            raise ConfigError(f"the data server cannot listen on {self._wanted}: {error}") from error
        if error is not None:
            raise DataError(f"the data server ended: {error!r}") from error

    # -- in its thread

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # the border of the thread; raised by `wait` and `close`
            log.error("data server ended: %r", error)
            self._error = error
        finally:
            self._up.set()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._wake = asyncio.Event()
        _raise_file_limit()
        with contextlib.ExitStack() as stack:
            listeners = [stack.enter_context(listener) for listener in _listeners(self._wanted)]
            self._address = listeners[0].getsockname()[:2]
            now = time.monotonic()
            self._heard = dict.fromkeys(self._keeper.workers, now)
            self._asked = dict(self._heard)
            self._up.set()
            works = [self._stop.wait(), self._work(), self._expire(now), *map(self._accept, listeners)]
            tasks = {asyncio.create_task(work) for work in works}
            done, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            await end_tasks([*others, *self._connections])
            for task in done:
                task.result()

    async def _work(self) -> None:
        """Apply what arrived, write it durably, answer."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            changed, answered = self._requests.apply(time.monotonic())
            if changed:
                self._journal.append(changed)
            for worker, parts in self._keeper.take_returned().items():
                log.warning(
                    "worker %s lost: %d ranges that it used are in no model for sure (%s%s); they are free",
                    *(worker, len(parts), parts[0], ", ..." if len(parts) > 1 else ""),
                )
            for pending, answer in answered:
                if not pending.answer.done():
                    pending.answer.set_result(answer)
            if self._journal.length > _ENTRIES:
                self._shorten()

    async def _expire(self, last: float) -> None:
        """Free what silent workers hold, and answer those that were held for long enough.

        Args:
            last: when this process was surely running: a stop since then counts for no worker.
        """
        tick_s = min(self._lease_s / 10, 0.25)
        while True:
            await asyncio.sleep(tick_s)
            now = time.monotonic()
            if now - last > self._lease_s / 3 + tick_s:
                log.warning("data server was stopped for %.1f s; all workers get a fresh lease", now - last)
                self._heard = dict.fromkeys(self._heard, now)
                self._asked = dict.fromkeys(self._asked, now)
            last = now
            held_by = {held.worker for held in self._keeper.book.held}
            for worker, heard in list(self._heard.items()):
                if now - heard > self._lease_s:
                    del self._heard[worker]
                    if worker in held_by:
                        log.warning("worker %s silent for %.1f s: its ranges are free", worker, now - heard)
                    self._submit({"op": "silent", "worker": worker})
            for worker in self._keeper.book.failures.awaited() - held_by:
                if now - self._asked.setdefault(worker, now) > self._lease_s + HOLD.total_seconds():
                    self._submit({"op": "idle", "worker": worker})
            for worker in held_by:
                idle_s = now - self._asked.setdefault(worker, now)
                if idle_s > self._max_hold_s:
                    self._asked[worker] = now
                    log.warning(
                        "worker %s lives, and did nothing with its ranges for %.0f s: it may hang; they are "
                        "free. A longer max_hold of the server allows that.",
                        *(worker, idle_s),
                    )
                    self._submit({"op": "silent", "worker": worker})
            if self._requests.release_held(now):
                self._wake.set()

    def _submit(self, request: Mapping[str, object], *, hold_s: float = 0.0) -> asyncio.Future[Plain]:
        answer: asyncio.Future[Plain] = self._loop.create_future()
        self._requests.add_request(Pending(request, answer, time.monotonic() + hold_s))
        self._wake.set()
        return answer

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = await self._loop.sock_accept(listener)
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    log.debug("data server lost a connection: %r", error)
                    continue
                log.warning("data server accepts no connection: %s; raise the limit of open files", error)
                await asyncio.sleep(_NO_FILE_S)
                continue
            if len(self._connections) >= _CONNECTIONS:
                log.warning("data server refused a connection: it has %d", _CONNECTIONS)
                connection.close()
                continue
            if len(self._strangers) >= _STRANGERS:
                oldest = next(iter(self._strangers))
                self._strangers.pop(oldest)
                oldest.cancel()
            task = asyncio.create_task(self._connected(connection))
            self._strangers[task] = connection
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _connected(self, connection: socket.socket) -> None:
        task, peer = asyncio.current_task(), "a stranger"
        assert task is not None
        try:
            peer = str(connection.getpeername())
            connection.setblocking(False)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            joined = await wait_for(self._read_join(connection), DOOR.total_seconds())
            if joined is None:
                return
            self._strangers.pop(task, None)
            reader, writer = await asyncio.open_connection(sock=connection, limit=LINE_BYTES)
            try:
                await self._serve_worker(joined, reader, writer)
            finally:
                writer.close()
        except (OSError, asyncio.TimeoutError) as error:
            log.debug("data server lost a connection: %r", error)
        except ValueError:
            log.warning("data server refused %s: a message of more than %d bytes", peer, LINE_BYTES)
        except ConfigError as error:  # what came is no message; what follows it means nothing
            log.warning("data server refused %s: %s", peer, error)
        except asyncio.CancelledError:
            pass  # the server ends, or a newer stranger took the place
        finally:
            self._strangers.pop(task, None)
            connection.close()

    async def _read_join(self, connection: socket.socket) -> Plain | None:
        """The request to join of a client that shows the token; None: it hung up."""
        try:
            nonce = secrets.token_hex(16)
            await self._loop.sock_sendall(connection, encoded({"version": VERSION, "nonce": nonce}))
            line = b""
            while not line.endswith(b"\n"):
                if len(line) == DOOR_BYTES:
                    raise ConfigError(f"{line[:80]!r} is no message of at most {DOOR_BYTES} bytes.")
                more = await self._loop.sock_recv(connection, DOOR_BYTES - len(line))
                if not more:
                    return None
                line += more
            request = decoded(line)
            proof = proof_of(self._token, nonce, str(request.get("worker")), str(request.get("life")))
            if not hmac.compare_digest(proof.encode(), str(request.get("proof")).encode()):
                raise ConfigError("the client does not know the token.", hint="Pass that of the server.")
        except ConfigError as error:
            with contextlib.suppress(OSError):
                await self._loop.sock_sendall(connection, encoded(refusal(error)))
            raise
        return request

    async def _serve_worker(
        self, request: Plain, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Let a worker in, answer its requests one at a time, and hear meanwhile that it lives."""
        joined = {name: request.get(name) for name in ("worker", "life")}
        entry = {"op": "join", "attempt": request.get("attempt"), "again": bool(request.get("again"))}
        answer = await self._submit(entry | joined)
        if "error" in answer:
            writer.write(encoded(answer))
            await writer.drain()
            return
        worker, life = str(joined["worker"]), str(joined["life"])
        self._heard[worker] = self._asked[worker] = time.monotonic()
        source = self._keeper.book.source.identity()
        writer.write(encoded(answer | {"book": self.book_id, "source": source, "lease_s": self._lease_s}))
        pending: asyncio.Future[Plain] | None = None

        def reply(answered: asyncio.Future[Plain]) -> None:
            if answered.cancelled():  # its request was given up for a later one
                writer.close()
            elif not writer.is_closing():
                line = encoded(answered.result())
                if len(line) > LINE_BYTES - DOOR_BYTES:  # its state must fit into a rollback
                    line = encoded(refusal(too_long("the answer", line)))
                writer.write(line)

        while True:
            await writer.drain()
            line = await reader.readline()
            if not line.endswith(b"\n"):
                return
            try:
                request = decoded(line)
            except ConfigError as error:
                writer.write(encoded(refusal(error)))
                raise
            is_worker = self._keeper.is_worker(worker, life)
            if is_worker:
                self._heard[worker] = time.monotonic()
            if request.get("op") == "heartbeat":
                if not is_worker:
                    return
                continue
            if request.get("op") in ("join", "silent", "idle") or (
                pending is not None and not pending.done()
            ):
                refused = ConfigError(f"request {request['op']!r} is not a worker's, or comes too early.")
                writer.write(encoded(refusal(refused)))
                raise refused
            self._asked[worker] = time.monotonic()
            wanted = request.pop("hold_s", 0.0)
            hold_s = min(wanted, HOLD.total_seconds()) if isinstance(wanted, float) else 0.0
            pending = self._submit(request | joined, hold_s=hold_s)
            pending.add_done_callback(reply)
            if request.get("op") == "leave":
                await asyncio.wait([pending])
                if worker not in self._keeper.workers:  # else it was refused, or another process has the name
                    self._heard.pop(worker, None)
                return


def _listeners(wanted: tuple[str, int]) -> list[socket.socket]:
    """Sockets that listen on all addresses of a host, on the same port.

    Raises:
        OSError: one of them is taken, or there is none.
    """
    host, port = wanted
    found: list[socket.socket] = []
    error: OSError | None = None
    addresses = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    try:
        for family, _, _, _, address in dict.fromkeys(addresses):
            where = (address[0], found[0].getsockname()[1] if found else port, *address[2:])
            try:
                found.append(socket.create_server(where, family=family, backlog=1024))
            except OSError as failed:
                if failed.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                    raise
                error = failed
        if not found:
            raise error or OSError(errno.EADDRNOTAVAIL, f"{host!r} has no address")
        for listener in found:
            listener.setblocking(False)
    except BaseException:
        for listener in found:
            listener.close()
        raise
    return found


def _raise_file_limit() -> None:
    """Each worker has a connection: let this process open as many files as it may, up to those of all."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _CONNECTIONS + _FILES
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= limit:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    except (OSError, ValueError) as error:
        log.warning("data server keeps a limit of %d open files, and of workers with it: %s", soft, error)
