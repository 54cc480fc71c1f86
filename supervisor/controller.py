# SPDX-License-Identifier: Apache-2.0
"""The controller: ``python3 supervisor/controller.py`` or ``python3 -m supervisor.controller``."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__" and not __package__:
    # From a clone Python puts this directory first, where `supervisor` is not; its parent is meant.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

from collections.abc import Sequence

from supervisor.program import run_or_explain


def main(argv: Sequence[str] | None = None) -> int:
    """Run the controller with `argv` (default: the process's own) and return its exit code."""
    return run_or_explain(("controller",), sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
