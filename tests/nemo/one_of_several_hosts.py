# SPDX-License-Identifier: Apache-2.0
"""The benchmark as one rank on a host of its own, several of which share this machine.

A host is a name, an address, a disk, and memory for captures: the last of these is no flag, because real
hosts need none.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

MEMORY_ENV = "TEST_HOST_MEMORY"
BENCHMARK = Path(__file__).parents[2] / "benchmark"


def main() -> int:
    sys.path.insert(0, str(BENCHMARK))
    import benchmark

    benchmark._silence_import_warnings()
    import pretrain

    of_the_benchmark = pretrain._engine_options

    def in_own_memory(workload: Any) -> Any:
        return replace(of_the_benchmark(workload), arena_root=Path(os.environ[MEMORY_ENV]))

    pretrain._engine_options = in_own_memory
    return int(benchmark.main())


if __name__ == "__main__":
    sys.exit(main())
