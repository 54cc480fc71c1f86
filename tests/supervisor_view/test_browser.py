# SPDX-License-Identifier: Apache-2.0
"""A real browser looks at the page: it obeys its own policy, refreshes itself, and says when it is old."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from playwright.sync_api import sync_playwright

from supervisor.view.server import StatusServer
from supervisor.view.status import Status
from tests.tools import browser

from .documents import full, large

pytestmark = pytest.mark.slow
TIMEOUT_MS = 60_000
#: As root, in a container; and nothing that the browser would look up in the internet by itself.
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")


class Served:
    """A status server in a thread of its own, whose status can be exchanged."""

    def __init__(self) -> None:
        self.status = full()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.server = StatusServer(self._read, port=0)
        self._run(self.server.__aenter__())

    async def _read(self) -> Status:
        return self.status

    def _run(self, coroutine: Any) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    def stop(self) -> None:
        self._run(self.server.__aexit__(None, None, None))

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.close()


@pytest.fixture
def page() -> Iterator[Any]:
    path = browser()
    with sync_playwright() as running, running.chromium.launch(executable_path=path, args=FLAGS) as chromium:
        yield chromium.new_page()


def test_the_page_refreshes_itself_keeps_what_is_open_and_says_when_it_is_old(
    served: Served, page: Any
) -> None:
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.goto(f"http://127.0.0.1:{served.server.port}/")
    assert page.get_by_text("Frozen by alice").is_visible()
    page.locator("#closed summary").click()
    served.status = replace(served.status, epoch=5, frozen_by="bob")
    page.get_by_text("Frozen by bob").wait_for(timeout=TIMEOUT_MS)
    assert page.locator("#closed").get_attribute("open") is not None
    assert complaints == []
    served.stop()
    page.get_by_text("No answer for").wait_for(timeout=TIMEOUT_MS)


def test_a_thousand_hosts_fit_on_a_phone_and_on_a_screen(served: Served, page: Any) -> None:
    served.status = large(1000)
    for width in (390, 1280):
        page.set_viewport_size({"width": width, "height": 900})
        page.goto(f"http://127.0.0.1:{served.server.port}/")
        assert page.locator(".map i").count() == 1000
        assert page.evaluate("document.documentElement.scrollWidth") <= width
