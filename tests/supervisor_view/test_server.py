# SPDX-License-Identifier: Apache-2.0
"""The server of the page over real sockets: what it serves, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace

import pytest

from resiliency.errors import ConfigError, ControlPlaneError
from supervisor.view import server as server_module
from supervisor.view.server import MAX_REQUEST_BYTES, StatusServer
from supervisor.view.status import Status
from tests.asynchronous import run
from tests.waiting import WAIT_S

from .documents import full

WELL = replace(full(), log_problem="")


@dataclass
class Controller:
    """Answers with `status`, fails with `error`, or never answers."""

    status: Status | None = None
    error: ControlPlaneError | None = None
    asked: int = field(default=0)

    async def read(self) -> Status:
        self.asked += 1
        if self.error is not None:
            raise self.error
        if self.status is None:
            await asyncio.Event().wait()
        assert self.status is not None
        return self.status


def serve(controller: Controller, use: Callable[[StatusServer], Awaitable[None]]) -> None:
    async def main() -> None:
        async with StatusServer(controller.read, port=0) as server:
            await use(server)

    run(main())


async def send(server: StatusServer, request: bytes) -> tuple[int, dict[str, str], str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        writer.write(request)
        await writer.drain()
        head, _, body = (await reader.read(-1)).decode().partition("\r\n\r\n")
    finally:
        writer.close()
    first, *lines = head.split("\r\n")
    return int(first.split()[1]), dict(line.split(": ", 1) for line in lines), body


async def get(server: StatusServer, path: str, method: str = "GET") -> tuple[int, dict[str, str], str]:
    return await send(server, f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())


def test_each_path_holds_its_form_of_the_status() -> None:
    async def use(server: StatusServer) -> None:
        code, head, body = await get(server, "/")
        assert (code, head["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert "hot_swap" in body
        assert int(head["Content-Length"]) == len(body.encode())
        assert "script-src 'sha256-" in head["Content-Security-Policy"]
        code, head, body = await get(server, "/status.json?x=1")
        assert (code, head["Content-Type"]) == (200, "application/json")
        assert Status.from_dict(json.loads(body)) == WELL
        code, head, body = await get(server, "/metrics")
        assert (code, head["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
        assert "\nresiliency_supervisor_epoch 4\n" in body
        assert (await get(server, "/healthz"))[::2] == (200, "ok\n")
        code, head, body = await get(server, "/", "HEAD")
        assert (code, body) == (200, "")
        assert int(head["Content-Length"]) > 1000

    serve(Controller(WELL), use)


def test_a_page_that_takes_long_to_make_keeps_nobody_else_waiting() -> None:
    """The loop that serves it is the controller's."""
    begun, asked_again = threading.Event(), threading.Event()

    class LongStatus(Status):
        def to_dict(self) -> dict[str, object]:
            begun.set()
            assert asked_again.wait(WAIT_S)
            return super().to_dict()

    async def use(server: StatusServer) -> None:
        page = asyncio.ensure_future(get(server, "/status.json"))
        assert await asyncio.to_thread(begun.wait, WAIT_S)
        assert (await get(server, "/healthz"))[0] == 200
        asked_again.set()
        assert (await page)[0] == 200

    serve(Controller(LongStatus(**{one.name: getattr(WELL, one.name) for one in fields(WELL)})), use)


def test_a_controller_that_cannot_write_its_log_is_not_healthy() -> None:
    async def use(server: StatusServer) -> None:
        code, _, body = await get(server, "/healthz")
        assert (code, body) == (503, "the event log takes nothing: No space left on device\n")
        assert (await get(server, "/"))[0] == 200

    serve(Controller(full()), use)


@pytest.mark.parametrize(
    ("request_", "code", "sentence"),
    [
        (b"POST / HTTP/1.1\r\n\r\n", 405, "only GET and HEAD"),
        (b"GET /secret HTTP/1.1\r\n\r\n", 404, "there are /, /status.json, /metrics, /healthz"),
        (b"GET / HTTP/2\r\n\r\n", 400, "this is no request of HTTP/1"),
        (b"\x16\x03\x01\r\n\r\n", 400, "this is no request of HTTP/1"),
    ],
)
def test_what_it_does_not_serve_is_refused_with_a_sentence(request_: bytes, code: int, sentence: str) -> None:
    controller = Controller(WELL)

    async def use(server: StatusServer) -> None:
        found, _, body = await send(server, request_)
        assert found == code
        assert body.startswith(sentence)

    serve(controller, use)
    assert controller.asked == 0


def test_a_request_without_end_is_refused_by_its_length() -> None:
    async def use(server: StatusServer) -> None:
        # Exactly as much as is read: more, and the reset of what was not read could overtake the answer.
        code, _, _ = await send(server, b"GET / HTTP/1.1\r\nX: " + b"a" * MAX_REQUEST_BYTES)
        assert code == 431

    serve(Controller(WELL), use)


def test_a_caller_that_says_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "REQUEST_S", 0.05)

    async def use(server: StatusServer) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        with suppress(ConnectionResetError):  # as good as an orderly end
            assert await reader.read(-1) == b""
        writer.close()

    serve(Controller(WELL), use)


def test_a_controller_that_fails_or_hangs_is_answered_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "STATUS_S", 0.05)

    async def fails(server: StatusServer) -> None:
        assert (await get(server, "/metrics"))[::2] == (503, "the sensor is away\n")

    async def hangs(server: StatusServer) -> None:
        answers = await asyncio.gather(*(get(server, "/healthz") for _ in range(8)))
        assert {answer[::2] for answer in answers} == {(503, "no status within 0.05 s\n")}

    serve(Controller(error=ControlPlaneError("the sensor is away")), fails)
    serve(Controller(), hangs)


def test_many_who_ask_at_once_are_one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "FRESH_S", WAIT_S)
    controller = Controller(WELL)

    async def use(server: StatusServer) -> None:
        answers = await asyncio.gather(*(get(server, "/status.json") for _ in range(20)))
        assert {code for code, _, _ in answers} == {200}

    serve(controller, use)
    assert controller.asked == 1


def test_more_connections_than_it_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 1)

    async def use(server: StatusServer) -> None:
        _, silent = await asyncio.open_connection("127.0.0.1", server.port)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        assert (await reader.read(-1)).startswith(b"HTTP/1.1 503 ")
        writer.close()
        silent.close()

    serve(Controller(WELL), use)


def test_a_port_that_is_taken_is_refused_with_a_sentence() -> None:
    async def use(server: StatusServer) -> None:
        with pytest.raises(
            ConfigError, match=f"cannot serve the status page at 127.0.0.1, port {server.port}"
        ):
            async with StatusServer(Controller(WELL).read, port=server.port):
                pass

    serve(Controller(WELL), use)
