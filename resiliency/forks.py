# SPDX-License-Identifier: Apache-2.0
"""What a forked child must let go of: its copies of sockets, pipes and locks would hide its parent's end.

The interpreter keeps what is registered for a fork until the process ends; here it goes with its object.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from contextlib import suppress


def call_in_child(method: Callable[[], object]) -> None:
    """Call a bound method in every child that is forked while its object lives."""
    _methods.add(weakref.WeakMethod(method, _methods.discard))


_methods: set[weakref.WeakMethod[Callable[[], object]]] = set()


def _call_all() -> None:
    for reference in list(_methods):
        method = reference()
        if method is not None:
            with suppress(OSError):  # it is closed already, which must not keep the others open
                method()


os.register_at_fork(after_in_child=_call_all)
