# SPDX-License-Identifier: Apache-2.0
"""Only a launcher that has ended is reported by the connections between launchers."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import psutil
import pytest

from resiliency.launch.rendezvous.launcher_links import LauncherLinks, PeerLauncher
from resiliency.testing.processes import Command
from tests.waiting import wait_until

from .conftest import SCRIPTS, WAIT

StartPeer = Callable[[str], tuple[Command, PeerLauncher]]


@pytest.fixture
def told() -> list[Any]:
    return []


@pytest.fixture
def links(told: list[Any]) -> Iterator[LauncherLinks]:
    links = LauncherLinks("127.0.0.1", told.append)
    yield links
    links.close()


@pytest.fixture
def start_peer() -> Iterator[StartPeer]:
    with ExitStack() as stack:

        def start(node: str) -> tuple[Command, PeerLauncher]:
            command = stack.enter_context(Command([sys.executable, str(SCRIPTS / "link.py")]))
            place = command.wait_for_line(r"place (\S+)", timeout=WAIT)[1]
            return command, PeerLauncher(node=node, place=place)

        yield start


def are_watched(links: LauncherLinks, count: int) -> None:
    def look() -> bool:
        watches = [watch for _, watch in list(links._watches.values())]
        return [watch.received == watch.token for watch in watches] == [True] * count

    wait_until(look, f"{count} launchers are not watched", timeout=WAIT)


def test_a_launcher_that_ended_is_told_and_one_that_stands_still_is_not(
    links: LauncherLinks, told: list[Any], start_peer: StartPeer
) -> None:
    (stopped, slow), (killed, gone) = start_peer("stopped"), start_peer("killed")
    links.watch([slow, gone])
    are_watched(links, 2)
    stopped.signal(signal.SIGSTOP)
    # Alone: a process that it has forked holds none of its connections.
    os.kill(killed.pid, signal.SIGKILL)
    wait_until(lambda: told, "a launcher that was killed is not told", timeout=WAIT)
    assert told == ["killed"]
    assert psutil.pid_exists(stopped.pid)
    stopped.signal(signal.SIGCONT)
    os.kill(stopped.pid, signal.SIGKILL)
    wait_until(lambda: told[1:], "the other one is not told", timeout=WAIT)
    assert told == ["killed", "stopped"]


def test_a_connection_that_closes_alone_is_no_evidence_and_neither_is_another_program(
    links: LauncherLinks, told: list[Any], start_peer: StartPeer
) -> None:
    (dropping, peer), (killed, gone) = start_peer("dropping"), start_peer("killed")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        links.watch([peer, PeerLauncher(node="other", place=f"127.0.0.1|{port}|{'0' * 32}"), gone])
        connection, _ = other.accept()
        connection.send(b"1" * 32)
        connection.close()
    are_watched(links, 2)
    dropping.signal(signal.SIGUSR1)
    dropping.wait_for_line("dropped", timeout=WAIT)
    are_watched(links, 2)
    os.kill(killed.pid, signal.SIGKILL)
    wait_until(lambda: told, "a launcher that was killed is not told", timeout=WAIT)
    assert told == ["killed"]


def test_hosts_that_are_cut_off_do_not_hold_up_the_end_of_a_launcher_one_by_one(
    links: LauncherLinks, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, over, asked = threading.Event(), threading.Event(), []

    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        asked.append(address)
        begun.set()
        over.wait(WAIT)
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", connect)
    links.watch([PeerLauncher(node=port, place=f"192.0.2.1|{port}|{'0' * 32}") for port in range(1, 9)])
    assert begun.wait(WAIT)
    closing = threading.Thread(target=links.close)
    closing.start()
    wait_until(lambda: links._closed, "it is not told to end", timeout=WAIT)
    over.set()
    closing.join()
    assert asked == [("192.0.2.1", 1)]
