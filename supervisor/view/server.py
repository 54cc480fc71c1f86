# SPDX-License-Identifier: Apache-2.0
"""A small HTTP server for people and for Prometheus: ``/``, ``/status.json``, ``/metrics``, ``/healthz``.

It reads and never acts.  One request a connection, with limits on its size, its time and the number of
connections; the status is asked for once a second at most, however many ask.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType

from resiliency.errors import ConfigError, ResiliencyError
from resiliency.prometheus import CONTENT_TYPE
from resiliency.tasks import end_tasks, wait_for
from supervisor.view import metrics
from supervisor.view.page import CONTENT_SECURITY_POLICY, status_page
from supervisor.view.status import Status

logger = logging.getLogger(__name__)

DEFAULT_PORT = 60064
#: Longest request, and the time in which it must be there; a status that takes longer counts as none.
MAX_REQUEST_BYTES = 8192
REQUEST_S, STATUS_S, SEND_S = 5.0, 10.0, 10.0
MAX_CONNECTIONS = 64
#: How old an answer may be.
FRESH_S = 1.0

ReadStatus = Callable[[], Awaitable[Status]]


@dataclass(frozen=True)
class _Answer:
    code: str
    body: str
    kind: str = "text/plain; charset=utf-8"


class StatusServer:
    """Serves what `read` returns, from ``async with`` on until it is left.

    Args:
        read: the newest status; may raise a ResiliencyError, which is answered with 503 and its text.
        host: interface to listen on.  There is no login: whoever reaches the port sees hosts and jobs.
        port: 0 is a free one.
    """

    def __init__(self, read: ReadStatus, *, host: str = "127.0.0.1", port: int = DEFAULT_PORT) -> None:
        self._read = read
        self._host = host
        self.port = port
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()
        self._lock = asyncio.Lock()
        self._status: Status | None = None
        self._read_at = 0.0

    async def __aenter__(self) -> StatusServer:
        """Listen.

        Raises:
            ConfigError: it cannot, on this interface and port.
        """
        try:
            self._server = await asyncio.start_server(
                self._connected, self._host, self.port, limit=MAX_REQUEST_BYTES
            )
        except OSError as error:
            raise ConfigError(
                f"cannot serve the status page at {self._host}, port {self.port}: {error.strerror}.",
                hint="Give another port.",
                port=self.port,
            ) from error
        self.port = self._server.sockets[0].getsockname()[1]
        logger.info("status page at http://%s:%d/", self._host, self.port)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()
            await end_tasks(self._open)
            await self._server.wait_closed()
            self._server = None

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            await self._talk(reader, writer)
        except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError):
            pass  # the caller went away, or is too slow; nothing is owed to it
        finally:
            self._open.discard(task)
            writer.transport.abort()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        method, answer = "GET", _Answer("503 Service Unavailable", "too many connections\n")
        if len(self._open) <= MAX_CONNECTIONS:
            try:
                head = await wait_for(reader.readuntil(b"\r\n\r\n"), REQUEST_S)
            except asyncio.LimitOverrunError:
                answer = _Answer("431 Request Header Fields Too Large", "the request is too long\n")
            else:
                words = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
                method = words[0]
                answer = await self._answer(words)
        body = answer.body.encode()
        writer.write(_head(answer, len(body)) + (b"" if method == "HEAD" else body))
        await wait_for(writer.drain(), SEND_S)
        writer.close()
        await wait_for(writer.wait_closed(), SEND_S)

    async def _answer(self, words: list[str]) -> _Answer:
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _Answer("400 Bad Request", "this is no request of HTTP/1\n")
        if words[0] not in ("GET", "HEAD"):
            return _Answer("405 Method Not Allowed", "only GET and HEAD: this page acts on nothing\n")
        path = words[1].partition("?")[0]
        if path not in _PATHS:
            return _Answer("404 Not Found", f"there are {', '.join(_PATHS)}\n")
        try:
            status = await wait_for(self._newest(), STATUS_S)
            return await asyncio.to_thread(_PATHS[path], status)  # a large fleet's page takes a while
        except ResiliencyError as error:
            return _Answer("503 Service Unavailable", f"{error}\n")
        except asyncio.TimeoutError:
            return _Answer("503 Service Unavailable", f"no status within {STATUS_S:g} s\n")

    async def _newest(self) -> Status:
        async with self._lock:
            if self._status is None or time.monotonic() - self._read_at > FRESH_S:
                self._status = await self._read()
                self._read_at = time.monotonic()
            return self._status


def _head(answer: _Answer, size: int) -> bytes:
    lines = [
        f"HTTP/1.1 {answer.code}",
        f"Content-Type: {answer.kind}",
        f"Content-Length: {size}",
        "Cache-Control: no-store",
        f"Content-Security-Policy: {CONTENT_SECURITY_POLICY}",
        "X-Content-Type-Options: nosniff",
        "Connection: close",
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def _health(status: Status) -> _Answer:
    if status.log_problem:
        return _Answer("503 Service Unavailable", f"the event log takes nothing: {status.log_problem}\n")
    return _Answer("200 OK", "ok\n")


def _json(status: Status) -> _Answer:
    return _Answer("200 OK", json.dumps(status.to_dict(), separators=(",", ":")) + "\n", "application/json")


_PATHS: dict[str, Callable[[Status], _Answer]] = {
    "/": lambda status: _Answer("200 OK", status_page(status), "text/html; charset=utf-8"),
    "/status.json": _json,
    "/metrics": lambda status: _Answer("200 OK", metrics.metrics_text(status), CONTENT_TYPE),
    "/healthz": _health,
}
