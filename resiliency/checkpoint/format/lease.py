# SPDX-License-Identifier: Apache-2.0
"""Leases: "I am reading this checkpoint", as a file beside it that any host can see.

A lease is an empty file ``step=N.lease-<end>-<owner>``, where the end counts seconds since 1970.
It ends by itself, so that a reader that died does not keep a checkpoint for ever; the hosts'
clocks are expected to agree to within a minute.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import uuid
from collections.abc import Iterator
from datetime import timedelta

from resiliency.checkpoint.format.marker import step_directory, try_read_marker
from resiliency.checkpoint.storage.interface import Storage
from resiliency.errors import CheckpointError, CheckpointIncomplete
from resiliency.runtime import Clock, SystemClock

logger = logging.getLogger(__name__)

_LEASE = re.compile(r"step=(\d+)\.lease-(\d+)-.+")
#: How far the clocks of two hosts may differ.
CLOCK_SKEW = timedelta(minutes=1)


class Lease:
    """Keeps a checkpoint from being deleted while it is read; a context manager.

    Args:
        lasts: after this it no longer protects, whatever became of this process.
    Raises:
        CheckpointIncomplete: the checkpoint is marked: it is being deleted or was never whole.
    """

    def __init__(
        self,
        storage: Storage,
        step: int,
        *,
        lasts: timedelta = timedelta(hours=1),
        clock: Clock | None = None,
    ) -> None:
        self._storage = storage
        owner = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        ends = (clock or SystemClock()).now() + lasts
        self._name = f"{step_directory(step)}.lease-{int(ends.timestamp())}-{owner}"
        storage.create(self._name).close()
        if try_read_marker(storage, step) is not None:
            self.close()
            raise CheckpointIncomplete(
                f"{storage.describe(step_directory(step))} is marked as unfinished.",
                hint="It is being deleted, or it was found bad; restore another step.",
                step=step,
            )

    def close(self) -> None:
        """Give the checkpoint free; idempotent."""
        self._storage.remove(self._name)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@contextlib.contextmanager
def try_lease(storage: Storage, step: int) -> Iterator[None]:
    """Keep a checkpoint from being deleted, where it can be: it is read all the same."""
    lease = None
    try:
        lease = Lease(storage, step)
    except CheckpointError as error:  # read-only storage: nobody deletes there either
        logger.info("step %d is read without a lease: %s", step, error)
    try:
        yield
    finally:
        if lease is not None:
            try:
                lease.close()
            except CheckpointError as error:  # it ends by itself
                logger.info("the lease on step %d was not given back: %s", step, error)


def leased_steps(storage: Storage, clock: Clock) -> set[int]:
    """Steps that somebody reads; leases that ended are removed."""
    steps = set()
    for name in storage.list(""):
        match = _LEASE.fullmatch(name)
        if match is None:
            continue
        if int(match[2]) + CLOCK_SKEW.total_seconds() < clock.now().timestamp():
            storage.remove(name)
        else:
            steps.add(int(match[1]))
    return steps
