# SPDX-License-Identifier: Apache-2.0
"""The failure simulator: ``python3 simulator/simulator_entrypoint.py`` or ``python3 -m simulator``."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__" and not __package__:
    # From a clone Python puts this directory first, where `simulator` is not; its parent is meant.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

from collections.abc import Sequence

from resiliency.errors import ConfigError, ResiliencyError
from simulator.command_line import PROGRAM, parse
from simulator.session import run

#: Exit codes: something failed or could not be undone; refused, nothing was done.
FAILED, REFUSED = 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the simulator with `argv` (default: the process's own) and return its exit code."""
    words = sys.argv[1:] if argv is None else argv
    try:
        if words[:1] == ["trace"]:
            from simulator import recording  # only here: to injure a job, nothing of goodput is needed

            return recording.main(words[1:])
        return run(parse(words, os.environ))
    except ConfigError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return REFUSED
    except ResiliencyError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return FAILED


if __name__ == "__main__":
    sys.exit(main())
