# SPDX-License-Identifier: Apache-2.0
"""A process that starts checkpoint agents for the tests, as the launcher's does for its ranks.

An agent that a trainer starts itself imports torch, for seconds; one that is forked from a process which
has done so is there at once.  It is the same agent otherwise, but for one thing: it waits for the next
trainer as long as its host lives, so it is not for tests whose trainer does not come back.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from resiliency.checkpoint.capture.job_memory import DEFAULT_ROOT
from resiliency.launch.agents.host import start_host
from resiliency.runtime import AGENT_HOST_ENV
from resiliency.testing import warm
from tests.waiting import wait_until

_STOP = timedelta(seconds=30)


@contextmanager
def running() -> Iterator[dict[str, str]]:
    """Yields the environment variables of trainers whose agents come from this host."""
    address = f"resiliency-test-agents-{uuid.uuid4().hex}"
    lifeline, held = os.pipe()
    try:
        process = start_host(address, lifeline, stop_timeout=_STOP, environment=os.environ, start=warm.start)
        try:
            yield {AGENT_HOST_ENV: address}
        finally:
            process.terminate()
            process.wait(timeout=2 * _STOP.total_seconds())
    finally:
        os.close(lifeline)
        os.close(held)


def wait_for_end(job: str) -> None:
    """Wait until the agent of a job has done all it has to, and has given back the job's memory.

    A trainer that closes waits for an agent of its own, and leaves one of a host to finish alone.

    Args:
        job: a part of its name that no other job has.
    """
    wait_until(
        lambda: not [path for path in DEFAULT_ROOT.glob("resiliency-*") if job in path.name],
        f"the agent of {job} keeps its memory",
    )
