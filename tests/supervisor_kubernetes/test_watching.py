# SPDX-License-Identifier: Apache-2.0
"""A watch goes on, whatever a server or a proxy in front of it says."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from kubernetes_asyncio.client import Configuration

from supervisor.orchestrators.gke import client
from supervisor.orchestrators.gke.client import EVENTS, NODES, Api, ApiError, Object
from supervisor.orchestrators.gke.watching import Changes, Watched
from supervisor.testing.kubernetes import Cluster
from tests.asynchronous import run, until
from tests.waiting import WAIT_S


@asynccontextmanager
async def proxy_that_says(text: str) -> AsyncIterator[tuple[Api, list[str]]]:
    """An API without objects, whose watches end after `text`; what is asked of it."""
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.query_string)
        if "watch" in request.query:
            return web.Response(text=text)
        return web.json_response({"metadata": {"resourceVersion": "7"}, "items": []})

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        async with Api(Configuration(host=f"http://{host}:{port}")) as api:
            yield api, asked
    finally:
        await runner.cleanup()


@asynccontextmanager
async def watching(watched: Watched, api: Api) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.ensure_future(watched.run(api))
    try:
        await asyncio.wait_for(watched.listed.wait(), WAIT_S)
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_line_that_is_no_event_is_an_error_of_the_watch() -> None:
    async with proxy_that_says('{"kind": "Status", "code": 502}\n') as (api, _):
        with pytest.raises(ApiError, match="a line is no event"):
            async for _event in api.watch(NODES, "", "7"):
                pass


async def test_watches_that_end_at_once_are_not_asked_for_in_a_circle() -> None:
    async with proxy_that_says("") as (api, asked):
        begun = time.monotonic()
        async with watching(Watched(NODES, "", Changes()), api):
            await until(lambda: sum("watch" in one for one in asked) == 4, "the watch has ended")
        # Pauses of 0.1, 0.2 and 0.4 s at least.
        assert time.monotonic() - begun >= 0.7


def test_a_watch_of_a_kind_without_news_or_bookmarks_is_ended_by_the_server_and_not_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A hundred times as fast; the server has no bookmarks for a kind that nobody lists.
    monkeypatch.setattr(client, "WATCH_S", max(1, client.WATCH_S // 100))
    monkeypatch.setattr(client, "SILENCE_S", client.SILENCE_S / 100)

    async def work() -> None:
        async with Cluster() as cluster, Api(Configuration(host=cluster.api.url)) as api:
            cluster.api.bookmark_s = math.inf
            _, version = await api.list(EVENTS, "jobs")
            assert [event async for event in api.watch(EVENTS, "jobs", version)] == []

    run(work())


async def test_a_change_that_its_listener_cannot_take_does_not_end_the_watch() -> None:
    async with Cluster() as cluster, Api(Configuration(host=cluster.api.url)) as api:
        watched = Watched(NODES, "", Changes())
        told: list[str] = []

        def listen(before: Object | None, after: Object | None) -> None:
            name = (after or before or {})["metadata"]["name"]
            if name == "odd":
                raise ValueError("what is this?")
            told.append(name)

        watched.listener = listen
        async with watching(watched, api):
            cluster.add_node("odd")
            cluster.add_node("n1")
            await cluster.until(lambda: "n1" in told, "the watch has ended")
