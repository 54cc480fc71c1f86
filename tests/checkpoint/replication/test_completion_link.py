# SPDX-License-Identifier: Apache-2.0
"""The leader's end of the links: one that breaks, and a callback that fails, cost no other host a message."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta

from resiliency.checkpoint.replication.completion import SaveName
from resiliency.checkpoint.replication.completion_link import CompletionLink
from resiliency.checkpoint.replication.hosts import HostTable
from resiliency.checkpoint.replication.placement import Peer
from resiliency.checkpoint.replication.transport.connection import CallDeadline, Link
from resiliency.checkpoint.replication.transport.messages import Acknowledged, CompleteMessage, Message
from tests.checkpoint.peer_builders import LONG_S, SESSION, save_name, table_of
from tests.waiting import wait_until

#: The next heartbeat is far away.
CALM = CallDeadline(silence=timedelta(minutes=10), pause=timedelta(milliseconds=10))


def table_for(*hosts: str, attempt_id: str = SESSION) -> HostTable:
    return table_of([Peer(host=host, address="127.0.0.1", port=1) for host in hosts], attempt_id=attempt_id)


@contextmanager
def leading(on_complete: Callable[[int], None]) -> Iterator[CompletionLink]:
    """Host a leads a, b and c."""
    leader = CompletionLink("a", lambda save, below: on_complete(save.step), lambda save, behind: None, CALM)
    try:
        # Of the first heartbeat: on a link that is broken it would be the first message that cannot be sent.
        wait_until(lambda: leader._heartbeat_at > 0, "its thread has not begun")
        leader.update(table_for("a", "b", "c"))
        yield leader
    finally:
        leader.close()


@contextmanager
def joined(leader: CompletionLink, host: str, *messages: Message, ends: bool = False) -> Iterator[Link]:
    """A host's link, which the leader takes over when `messages` were sent; `ends`: and the host is gone."""
    ours, theirs = socket.socketpair()
    with Link(ours, CALM, "a") as link:
        for message in messages:
            link.send(message)
        if ends:
            link.close()
        assert leader.join(Link(theirs, CALM, host))
        yield link


def save(step: int) -> SaveName:
    return SaveName(step, save_name(step))


def acknowledged(*steps: int) -> list[Message]:
    return [Acknowledged(step=step, save_id=save_name(step)) for step in steps]


def complete(step: int) -> CompleteMessage:
    return CompleteMessage(step=step, save_id=save_name(step))


def test_a_host_that_ends_before_it_is_answered_costs_the_others_no_message_and_no_link() -> None:
    """What it had sent still counts; the leader cannot send the answer to its second message."""
    heard: queue.Queue[int] = queue.Queue()
    with ExitStack() as stack:
        leader = stack.enter_context(leading(heard.put))
        other = stack.enter_context(joined(leader, "b", *acknowledged(20)))
        said = [complete(10), *acknowledged(10, 10, 20)]
        stack.enter_context(joined(leader, "c", *said, ends=True))
        assert heard.get(timeout=LONG_S) == 10
        leader.acknowledge(save(20))
        assert heard.get(timeout=LONG_S) == 20
        assert [other.receive_answer() for _ in range(2)] == [complete(10), complete(20)]
        # The next attempt begins as if nothing had happened.
        leader.update(table_for("a", attempt_id="next"))
        leader.acknowledge(SaveName(1, save_name(1, "next")))
        assert heard.get(timeout=LONG_S) == 1


def test_what_other_threads_ask_for_is_done_though_something_before_it_failed() -> None:
    heard: queue.Queue[int] = queue.Queue()
    is_held, may_go_on = threading.Event(), threading.Event()

    def on_complete(step: int) -> None:
        if step == 10:
            is_held.set()
            assert may_go_on.wait(LONG_S)
        elif step == 20:
            raise RuntimeError("placed")
        heard.put(step)

    with ExitStack() as stack:
        leader = stack.enter_context(leading(on_complete))
        leader.acknowledge(save(10))
        stack.enter_context(joined(leader, "b", *acknowledged(20, 30, 10)))
        stack.enter_context(joined(leader, "c", *acknowledged(20, 30, 10)))
        assert is_held.wait(LONG_S)  # not in a task of other threads, so both of these wait together
        leader.acknowledge(save(20))
        leader.acknowledge(save(30))
        may_go_on.set()
        assert [heard.get(timeout=LONG_S) for _ in range(2)] == [10, 30]
