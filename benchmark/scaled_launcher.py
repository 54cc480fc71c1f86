# SPDX-License-Identifier: Apache-2.0
"""The launcher with shorter times before it ends ranks, for campaigns: ``scaled_launcher.py ACT_S ...``."""

from __future__ import annotations

import sys

from resiliency.launch.health import hang_times
from resiliency.launch.main import main

if __name__ == "__main__":
    act_s = float(sys.argv.pop(1))
    for name in ("FIRST_STEP_S", "FIRST_ACT_S", "ACCUSE_S"):
        setattr(hang_times, name, getattr(hang_times, name) * act_s / hang_times.ACT_S)
    hang_times.ACT_S = act_s
    sys.exit(main())
