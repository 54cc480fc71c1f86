# SPDX-License-Identifier: Apache-2.0
"""The training of goodput_under_failures.py, with steps that take their time and no processor."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[3] / "benchmark"))

import failures_workload
from failures_savers import SAVERS, Save

STEP_S = 0.05


def rested(name: str) -> Any:
    def make(args: argparse.Namespace, state: Any, events: Any) -> tuple[int, Save]:
        done, save = SAVERS[name](args, state, events)

        def save_and_rest(step: int) -> None:
            save(step)
            time.sleep(STEP_S)

        return done, save_and_rest

    return make


if __name__ == "__main__":
    failures_workload.ROWS = failures_workload.WIDTH = 64
    failures_workload.SAVERS = {name: rested(name) for name in SAVERS}
    failures_workload.main()
