# SPDX-License-Identifier: Apache-2.0
"""The benchmark is a program, not a package: its modules are found beside its script."""

from __future__ import annotations

import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmark"
sys.path.append(str(BENCHMARK))
