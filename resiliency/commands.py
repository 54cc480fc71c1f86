# SPDX-License-Identifier: Apache-2.0
"""Console scripts.  They are installed with the bare package, so each says which extra it lacks."""

from __future__ import annotations

import sys


def checkpoint() -> int:
    """``resiliency-ckpt``: see `resiliency.checkpoint.cli`."""
    try:
        from resiliency.checkpoint.cli import main
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "resiliency":
            raise
        print(
            f"resiliency-ckpt needs {error.name}.  Install it with: pip install 'resiliency[checkpoint]'",
            file=sys.stderr,
        )
        return 2
    return main(prog="resiliency-ckpt")
