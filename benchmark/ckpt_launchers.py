# SPDX-License-Identifier: Apache-2.0
"""What a launcher runs beside the ranks of a job, for the contestants whose launchers have a part in saves.

Every job has a launcher.  So it is there before the memory of a save is counted, and counts by what it grows.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from ckpt_contestants import DLROVER, OWN
from ckpt_memory_rivals import dlrover_saver

from resiliency.launch.agents.host import start_host
from resiliency.runtime import AGENT_HOST_ENV
from resiliency.testing import warm

_STOP = timedelta(seconds=30)


@contextmanager
def launcher(contestant: str, directory: Path) -> Iterator[Mapping[str, str]]:
    """What a contestant needs beside its ranks, from the first to the last; yields what to tell the ranks.

    Raises:
        RankFailed: it did not start; why is in `directory`.
    """
    if contestant == DLROVER:
        with dlrover_saver(directory) as env:
            yield env
    elif contestant in OWN:
        with _agent_host() as env:
            yield env
    else:
        yield {}


@contextmanager
def _agent_host() -> Iterator[Mapping[str, str]]:
    """The process of our launcher that starts checkpoint agents; of all jobs it has the imports made."""
    address = f"ckpt-compare-{uuid.uuid4().hex}"
    lifeline, held = os.pipe()
    try:
        host = start_host(address, lifeline, stop_timeout=_STOP, environment=os.environ, start=warm.start)
        try:
            yield {AGENT_HOST_ENV: address}
        finally:
            host.terminate()
            host.wait(timeout=2 * _STOP.total_seconds())
    finally:
        os.close(lifeline)
        os.close(held)
