# SPDX-License-Identifier: Apache-2.0
"""From argv to exit code: refuse, or run the job.

Exit codes: 0 all workers succeeded; 1 workers failed, or the launcher did; 70 workers failed and would fail
again; 2 refused, nothing was started; 3 and 4 the host check found this host faulty, or slow; 128+N ended by
signal N before the workers had finished cleanly.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence

from resiliency import log
from resiliency.errors import ConfigError
from resiliency.launch import cli
from resiliency.launch.options import resolve
from resiliency.launch.protection import Protection
from resiliency.launch.standby import Standby
from resiliency.launch.watch import stop_ignoring
from resiliency.template.client import Template
from resiliency.template.server import Work

logger = logging.getLogger(__name__)

REFUSED = 2


def _set_threads(workers: int) -> None:
    """As torchrun: several workers that each use all cores would be slower than one."""
    if workers > 1 and "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"
        logger.info("OMP_NUM_THREADS is not set: each worker gets 1; set it to tune CPU work")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the launcher with `argv` (default: the process's own) and return its exit code."""
    held = None
    try:
        options = resolve(cli.parse(sys.argv[1:] if argv is None else argv), os.environ)
        stop_ignoring(options.signals)
        # As it is from now on, and before it has anything that a fork must not copy.
        held = Template.of_this_process(Work())
        log.configure(options.info)
        _set_threads(options.workers)
        with (
            Protection(grace=options.stop_timeout) as protection,
            Standby(options, protection, held) as standby,
        ):
            # torch and NVRx are imported here, after everything that can be refused without them, and while
            # the template imports what is known of the script.
            from resiliency.launch import job

            return job.run(options, protection, standby)
    except ConfigError as error:
        print(f"usage: {cli.USAGE}\nlauncher.py: error: {error}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:  # before the job's own handler was there
        return 128 + signal.SIGINT
    finally:
        if held is not None:
            held.close()
