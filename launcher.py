# SPDX-License-Identifier: Apache-2.0
"""Start and supervise the workers of one host: ``python3 launcher.py --help``."""

import sys

from resiliency.launch.main import main

if __name__ == "__main__":
    sys.exit(main())
