# SPDX-License-Identifier: Apache-2.0
"""Waiting for what tells nobody when it happens: files, and what other processes and threads do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from resiliency.checkpoint import Checkpointer

WAIT_S = 180.0
#: How long something stays as it is before it counts as settled.
_STILL_S = 0.5
_T = TypeVar("_T")


def wait_until(
    look: Callable[[], _T | None], otherwise: str, *, timeout: float = WAIT_S, every: float = 0.02
) -> _T:
    """Look until something is true; returns what was seen.

    Args:
        otherwise: what is wrong if it never is.
        timeout, every: in seconds.
    Raises:
        AssertionError: it was not within `timeout`.
    """
    deadline = time.monotonic() + timeout
    while not (seen := look()):
        assert time.monotonic() < deadline, f"{otherwise} after {timeout:g} s"
        threading.Event().wait(every)
    return seen


def wait_for_seconds(seconds: float) -> None:
    """The length of a fault, and no wait for anything."""
    threading.Event().wait(seconds)


def wait_until_equal(look: Callable[[], _T], wanted: _T, *, timeout: float = WAIT_S) -> None:
    """Look until `wanted` is seen.

    Raises:
        AssertionError: it was not within `timeout` seconds; says what was seen instead.
    """
    deadline = time.monotonic() + timeout
    while (seen := look()) != wanted:
        assert time.monotonic() < deadline, f"expected {wanted}, found {seen} after {timeout:g} s"
        threading.Event().wait(0.02)


def settled(look: Callable[[], _T]) -> _T:
    """What `look` sees once it has seen the same for half a second: of an agent that still tidies up, say.

    Raises:
        AssertionError: it never settles.
    """
    deadline = time.monotonic() + WAIT_S
    seen, since = look(), time.monotonic()
    while time.monotonic() - since < _STILL_S:
        assert time.monotonic() < deadline, f"it never settles: {seen}"
        threading.Event().wait(0.05)
        now = look()
        if now != seen:
            seen, since = now, time.monotonic()
    return seen


def agent_of(checkpoints: Checkpointer) -> int:
    """The agent's process, once there is one: 0, which a busy machine shows for long, names our own group."""
    return wait_until(lambda: checkpoints.agent_pid, "the rank is attached to no agent")
