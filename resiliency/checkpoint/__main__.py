# SPDX-License-Identifier: Apache-2.0
"""``python3 -m resiliency.checkpoint``, see `resiliency.checkpoint.cli`."""

import sys

from resiliency.checkpoint.cli import main

if __name__ == "__main__":
    sys.exit(main())
