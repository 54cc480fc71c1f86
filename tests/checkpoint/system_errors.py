# SPDX-License-Identifier: Apache-2.0
"""The errors of the system that tests inject at every call, and what must be as before after each."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from resiliency.runtime import awake_s
from resiliency.testing.leaks import open_descriptors
from resiliency.testing.system_faults import NO_THREAD
from tests.waiting import wait_until_equal

NUMBERS = [errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EMFILE, errno.ENOMEM, NO_THREAD]
numbers = pytest.mark.parametrize(
    "number", NUMBERS, ids=[errno.errorcode.get(number, "no-thread") for number in NUMBERS]
)


@contextmanager
def nothing_leaks() -> Iterator[None]:
    awake_s()  # its thread stays
    threads, descriptors = set(threading.enumerate()), set(open_descriptors())
    yield
    wait_until_equal(lambda: set(threading.enumerate()) - threads, set(), timeout=30)
    wait_until_equal(lambda: set(open_descriptors()), descriptors, timeout=30)
