# SPDX-License-Identifier: Apache-2.0
"""What the programs of the supervisor begin with: a sentence where gRPC is not installed."""

from __future__ import annotations

import os
from collections.abc import Sequence

from supervisor.entry import explained
from supervisor.view import operators


def run_or_explain(parts: Sequence[str], argv: Sequence[str]) -> int:
    """Run parts of the supervisor in this process; returns the exit code."""

    def run() -> int:
        from supervisor.parts.run import run_program

        return run_program(parts, argv)

    return explained(run)


def operate_or_explain(argv: Sequence[str]) -> int:
    """Do what an operator says; returns the exit code."""

    def run() -> int:
        from supervisor.transport.operators import connect_from

        return operators.run(argv, os.environ, connect_from(os.environ))

    return explained(run)
