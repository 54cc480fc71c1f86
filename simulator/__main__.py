# SPDX-License-Identifier: Apache-2.0
"""``python -m simulator``: the same as ``python3 simulator/simulator_entrypoint.py``."""

import sys

from simulator.simulator_entrypoint import main

if __name__ == "__main__":
    sys.exit(main())
