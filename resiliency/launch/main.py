# SPDX-License-Identifier: Apache-2.0
"""From argv to exit code: refuse, or run the job.

Exit codes: 0 all workers succeeded; 1 workers failed, or the launcher did; 2 refused, nothing was
started; 128+N ended by signal N before the workers had finished cleanly.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from resiliency import log
from resiliency.errors import ConfigError
from resiliency.launch import cli
from resiliency.launch.options import resolve

REFUSED = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the launcher with `argv` (default: the process's own) and return its exit code."""
    try:
        options = resolve(cli.parse(sys.argv[1:] if argv is None else argv), os.environ)
        log.configure(options.info)
        # torch and NVRx are imported here, after everything that can be refused without them.
        from resiliency.launch import job

        return job.run(options)
    except ConfigError as error:
        print(f"usage: {cli.USAGE}\nlauncher.py: error: {error}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:  # before the job's own handler was there
        return 128 + signal.SIGINT
