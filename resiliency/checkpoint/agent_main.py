# SPDX-License-Identifier: Apache-2.0
"""Entry point of the checkpoint agent: ``python3 -m resiliency.checkpoint.agent_main --arena DIR``.

Trainers start it themselves; a launcher may start it before them.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import platform
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from resiliency.checkpoint.agent import Agent
from resiliency.checkpoint.wire import listen
from resiliency.errors import ConfigError
from resiliency.log import configure
from resiliency.runtime import RunInfo

logger = logging.getLogger(__name__)

DEFAULT_GRACE = timedelta(seconds=60)
_NICENESS = 10
#: Number of the system call ioprio_set, which libc does not wrap.
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_BEST_EFFORT_LOWEST = (2 << 13) | 7


def main(argv: Sequence[str] | None = None) -> int:
    """Run until the job has no more use for an agent; 2 if it already has one."""
    parser = argparse.ArgumentParser(
        prog="python3 -m resiliency.checkpoint.agent_main",
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
    try:
        listener = listen(options.arena)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    lower_priority()
    agent = Agent(options.arena, listener, grace=timedelta(seconds=options.grace_s))
    agent.install_signals()
    try:
        agent.run()
    finally:
        agent.close()
    return 0


def lower_priority() -> None:
    """Yield CPU and disk to training; where the system does not allow it, go on without."""
    try:
        os.nice(_NICENESS)
    except OSError as error:
        logger.debug("priority stays: %s", error)
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        # 1: of this process (its first thread; the others inherit it).
        ctypes.CDLL(None, use_errno=True).syscall(number, 1, 0, _BEST_EFFORT_LOWEST)


if __name__ == "__main__":
    sys.exit(main())
