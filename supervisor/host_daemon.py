# SPDX-License-Identifier: Apache-2.0
"""The host daemon: ``python3 supervisor/host_daemon.py`` or ``python3 -m supervisor.host_daemon``."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__" and not __package__:
    # From a clone Python puts this directory first, where `supervisor` is not; its parent is meant.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import asyncio
from collections.abc import Sequence

from resiliency.errors import ConfigError
from supervisor.entry import REFUSED, explained, start_program, until_signal


def main(argv: Sequence[str] | None = None) -> int:
    """Run the daemon with `argv` (default: the process's own) and return its exit code."""
    return explained(lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    from supervisor.daemon.daemon import HostDaemon
    from supervisor.daemon.settings import USAGE, DaemonSettings

    try:
        settings = DaemonSettings.parse(argv, os.environ)
        start_program("host-daemon")
        asyncio.run(until_signal(HostDaemon(settings).run()))
    except ConfigError as error:
        print(f"usage: {USAGE}\nhost_daemon.py: error: {error}", file=sys.stderr)
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
