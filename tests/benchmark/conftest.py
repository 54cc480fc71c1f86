# SPDX-License-Identifier: Apache-2.0
"""The benchmark is a program, not a package: its modules are found beside its script."""

from __future__ import annotations

import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmark"
sys.path.append(str(BENCHMARK))

#: What launchers and schedulers set; a test says itself what was started.
LAUNCHER_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"),
    *("TORCHELASTIC_RESTART_COUNT", "FT_RANK_MONITOR_IPC_SOCKET", "JOB_IDENTIFIER", "RESILIENCY_RUN_DIR"),
)
