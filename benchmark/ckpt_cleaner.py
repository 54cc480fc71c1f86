# SPDX-License-Identifier: Apache-2.0
"""Keep the directories of a job's checkpoints clean: see `resiliency.checkpoint.cleaner`."""

import sys

from resiliency.checkpoint.cleaner.cleaner import main

if __name__ == "__main__":
    sys.exit(main())
