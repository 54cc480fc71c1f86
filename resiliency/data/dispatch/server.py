# SPDX-License-Identifier: Apache-2.0
"""The process that keeps the book of ranges, for consumers that need not march in step.

One thread and one loop: what arrived is applied, then written to the journal in one durable write, and only
then answered. So a server that is killed at any moment, and started again on its journal, goes on where it
was, and clients that ask again get the same answers.

A worker that is silent for longer than the lease is taken for dead, and what it held is free. A server that
was stopped itself gives all workers a fresh lease: their requests wait in its sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from resiliency.data.dispatch.book import Answer, Book, PoisonPolicy
from resiliency.data.dispatch.bookkeeper import Bookkeeper, refusal
from resiliency.data.dispatch.journal import Journal
from resiliency.data.dispatch.ranges import Plain, RangeSource
from resiliency.data.dispatch.wire import (
    DOOR,
    HOLD,
    LINE_BYTES,
    VERSION,
    check_token,
    decoded,
    encoded,
    proof_of,
)
from resiliency.errors import ConfigError, DataError, InternalError
from resiliency.tasks import end_tasks, wait_for

log = logging.getLogger(__name__)

#: Entries of the journal after which it is made short.
_ENTRIES = 10_000
_CONNECTIONS = 10_000
#: Longest time in which the server is up, and in which it ends.
_START_S = 30.0
_END_S = 30.0


@dataclass
class _Pending:
    """A request that has no answer yet."""

    request: Mapping[str, object]
    answer: asyncio.Future[Plain]
    hold_until: float


class DataServer:
    """Serves ranges of a source, in a thread of this process, until it is closed.

        with DataServer(SampleRanges(size=10**6, range_size=1000), "/shared/book", token=token) as server:
            ...  # clients connect to server.address

    Args:
        directory: of the journal, one for each book; on storage that a restarted server sees.
        token: a secret text that clients know.
        address: host and port to listen on; port 0 takes a free one.
        lease: how long a worker may be silent; clients speak three times as often.
        policy: what becomes of ranges that cannot be used.
    Raises:
        ConfigError: the journal is that of another source, or another server has it open, or the address
            cannot be listened on.
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
        policy: PoisonPolicy | None = None,
    ) -> None:
        check_token(token)
        if lease <= timedelta():
            raise ConfigError(f"the lease is {lease}; it must be longer than nothing.")
        self._token, self._lease_s, self._wanted = token, lease.total_seconds(), address
        self._journal = Journal(directory)
        try:
            self._recover(source, policy or PoisonPolicy())
        except BaseException:
            self._journal.close()
            raise
        self._queue: list[_Pending] = []
        self._held: list[_Pending] = []
        self._heard: dict[str, float] = {}
        self._connections: set[asyncio.Task[None]] = set()
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
            # With the policy and the partitions of then: else a grant is of another range than was answered.
            then = PoisonPolicy(**cast("dict[str, Any]", entries[0]["policy"]))
            self._keeper = Bookkeeper.of_plain(cast(Plain, entries[0]["snapshot"]), source, then)
            self.book_id = cast(str, entries[0]["book"])
            for number, request in enumerate(entries[1:], start=2):
                answer, has_changed = self._keeper.apply(request)
                if not has_changed:
                    raise DataError(
                        f"entry {number} of the journal cannot be applied again: {answer}",
                        hint="Start with an empty directory and the state in a checkpoint.",
                    )
            self._keeper.book.continue_with(source, policy)
            log.info("data server goes on with %d entries of %s", len(entries), self._journal.path)
        else:
            self._keeper, self.book_id = Bookkeeper(Book(source, policy)), secrets.token_hex(8)
        self._journal.entries = []
        self._shorten()

    def _shorten(self) -> None:
        policy = asdict(self._keeper.book.policy)
        snapshot: Plain = {"book": self.book_id, "policy": policy, "snapshot": self._keeper.to_plain()}
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
        server = await asyncio.start_server(self._connected, *self._wanted, limit=LINE_BYTES, backlog=1024)
        self._address = server.sockets[0].getsockname()[:2]
        now = time.monotonic()
        self._heard = dict.fromkeys(self._keeper.workers, now)
        self._up.set()
        async with server:
            works = (self._stop.wait(), self._work(), self._expire(now))
            tasks = {asyncio.create_task(work) for work in works}
            done, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            server.close()
            await end_tasks([*others, *self._connections])
            for task in done:
                task.result()

    async def _work(self) -> None:
        """Apply what arrived, write it durably, answer."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            batch, self._queue = self._queue, []
            answered: list[tuple[_Pending, Plain]] = []
            changed: list[Plain] = []
            while batch:
                before = len(changed)
                for pending in batch:
                    if pending.answer.done():  # its connection was lost
                        continue
                    self._give_up_older(pending)
                    answer, has_changed = self._keeper.apply(pending.request)
                    if has_changed:
                        changed.append(dict(pending.request))
                    if answer.get("answer") == Answer.WAIT.value and time.monotonic() < pending.hold_until:
                        self._held.append(pending)
                    else:
                        answered.append((pending, answer))
                batch = []
                if len(changed) > before:  # which may be what others wait for
                    batch, self._held = self._held, []
            if changed:
                self._journal.append(changed)
            for pending, answer in answered:
                if not pending.answer.done():
                    pending.answer.set_result(answer)
            if self._journal.length > _ENTRIES:
                self._shorten()

    def _give_up_older(self, pending: _Pending) -> None:
        """A worker has one request on its way: one that is still held is of a connection that it left, and
        would take a range that no one gets."""
        if "seq" in pending.request:
            for older in self._held:
                if older.request.get("worker") == pending.request["worker"]:
                    older.answer.cancel()

    async def _expire(self, last: float) -> None:
        """Free what silent workers hold, and answer those that were held for long enough.

        Args:
            last: when this process was surely running: a stop since then counts for no worker.
        """
        tick_s = min(self._lease_s / 10, 1.0)
        while True:
            await asyncio.sleep(tick_s)
            now = time.monotonic()
            if now - last > self._lease_s / 3 + tick_s:
                log.warning("data server was stopped for %.1f s; all workers get a fresh lease", now - last)
                self._heard = dict.fromkeys(self._heard, now)
            last = now
            held_by = {held.worker for held in self._keeper.book.held}
            for worker, heard in list(self._heard.items()):
                if now - heard > self._lease_s:
                    del self._heard[worker]
                    if worker in held_by:
                        log.warning("worker %s silent for %.1f s: its ranges are free", worker, now - heard)
                        self._submit({"op": "silent", "worker": worker})
            if any(pending.hold_until <= now for pending in self._held):
                self._queue, self._held = self._held + self._queue, []
                self._wake.set()

    def _submit(self, request: Mapping[str, object], *, hold_s: float = 0.0) -> asyncio.Future[Plain]:
        pending = _Pending(request, self._loop.create_future(), time.monotonic() + hold_s)
        self._queue.append(pending)
        self._wake.set()
        return pending.answer

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            if len(self._connections) > _CONNECTIONS:
                log.warning("data server refused a connection: it has %d", _CONNECTIONS)
                return
            await self._converse(reader, writer)
        except (OSError, asyncio.TimeoutError) as error:
            log.debug("data server lost a connection: %r", error)
        except ValueError:
            peer = writer.get_extra_info("peername")
            log.warning("data server refused %s: a message of more than %d bytes", peer, LINE_BYTES)
        except ConfigError as error:  # what came is no message; what follows it means nothing
            log.warning("data server refused %s: %s", writer.get_extra_info("peername"), error)
            with contextlib.suppress(OSError):
                writer.write(encoded(refusal(error)))
                await wait_for(writer.drain(), DOOR.total_seconds())
        except asyncio.CancelledError:
            pass  # the server ends
        finally:
            self._connections.discard(task)
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        nonce = secrets.token_hex(16)
        writer.write(encoded({"version": VERSION, "nonce": nonce}))
        line = await wait_for(reader.readline(), DOOR.total_seconds())
        if not line:
            return
        join_request = decoded(line)
        worker, life = join_request.get("worker"), join_request.get("life")
        proof = proof_of(self._token, nonce, str(worker), str(life))
        if not hmac.compare_digest(proof.encode(), str(join_request.get("proof")).encode()):
            raise ConfigError("the client does not know the token.", hint="Pass that of the server.")
        joined = {name: join_request.get(name) for name in ("worker", "life", "attempt")}
        answer = await self._submit({"op": "join", "again": bool(join_request.get("again")), **joined})
        if "error" in answer:
            writer.write(encoded(answer))
            await writer.drain()
            return
        source = self._keeper.book.source.identity()
        writer.write(encoded(answer | {"book": self.book_id, "source": source, "lease_s": self._lease_s}))
        while self._keeper.is_worker(worker := str(worker), str(life)):
            self._heard[worker] = time.monotonic()
            await writer.drain()
            line = await reader.readline()
            if not line.endswith(b"\n"):
                return
            request = decoded(line)
            if request.get("op") in ("join", "silent"):
                raise ConfigError(f"request {request['op']!r} is not a worker's.")
            if request.get("op") == "heartbeat":
                answer = {"answer": "ok"}
            else:
                wanted = request.pop("hold_s", 0.0)
                hold_s = min(wanted, HOLD.total_seconds()) if isinstance(wanted, float) else 0.0
                answer = await self._submit(request | joined, hold_s=hold_s)
            writer.write(encoded(answer))
        await writer.drain()
