# SPDX-License-Identifier: Apache-2.0
"""Entry point of the checkpoint agent: ``python3 -m resiliency.checkpoint.agent.main --arena DIR``.

Trainers start it themselves where no launcher does (`resiliency.launch.agents.host`).
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import platform
import signal
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from resiliency.checkpoint.agent.output import AgentOutput
from resiliency.checkpoint.agent.protocol import listen
from resiliency.checkpoint.agent.server import Agent
from resiliency.checkpoint.capture.job_memory import hold_job
from resiliency.checkpoint.stop.terminated import end_process
from resiliency.errors import ConfigError
from resiliency.log import configure
from resiliency.runtime import RunInfo

logger = logging.getLogger(__name__)

DEFAULT_GRACE = timedelta(seconds=60)
NICENESS = 10
#: Number of the system call ioprio_set, which libc does not wrap.
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_BEST_EFFORT_LOWEST = (2 << 13) | 7


def main(argv: Sequence[str] | None = None) -> int:
    """Run until the job has no more use for an agent; 2 if it already has one."""
    parser = argparse.ArgumentParser(
        prog="python3 -m resiliency.checkpoint.agent.main",
        description="Persist what the ranks of this host captured into shared memory.",
    )
    parser.add_argument("--arena", type=Path, required=True, metavar="DIR", help="arena of the job")
    parser.add_argument(
        "--grace-s",
        type=float,
        default=DEFAULT_GRACE.total_seconds(),
        metavar="SECONDS",
        help="how long to wait for ranks that died to come back (default: %(default)s)",
    )
    options = parser.parse_args(argv)
    configure(RunInfo.from_env())
    yield_cpu()
    return serve(
        options.arena, grace=timedelta(seconds=options.grace_s), output=AgentOutput(options.arena.name)
    )


def serve(arena: Path, *, grace: timedelta, output: AgentOutput | None = None) -> int:
    """Be the agent of `arena` in this process; returns its exit code.

    Args:
        output: where it says things, if its standard error is a trainer's.

    SIGTERM may be blocked by the caller, so that none is lost before this can act on it.
    """
    try:
        held = hold_job(arena)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        yield_disk()
        agent = Agent(arena, listen(arena), grace=grace, output=output)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        held.close()
    agent.install_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    try:
        agent.run()
    finally:
        agent.close()
    return 0


def yield_cpu() -> None:
    """Training goes first; where the system does not allow it, go on without."""
    try:
        os.nice(NICENESS)
    except OSError as error:
        logger.debug("priority stays: %s", error)


def yield_disk() -> None:
    """The same for this process's reads and writes."""
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        # 1: of this process (its first thread; the others inherit it).
        ctypes.CDLL(None, use_errno=True).syscall(number, 1, 0, _BEST_EFFORT_LOWEST)


if __name__ == "__main__":
    # Not by the interpreter's end, which may wait for a thread that the storage does not let go.
    end_process(main())
