# SPDX-License-Identifier: Apache-2.0
"""The meeting point of a job, on none of its hosts: store.py PORT."""

import signal
import sys
from datetime import timedelta

from torch.distributed import TCPStore

store = TCPStore(
    "127.0.0.1",
    int(sys.argv[1]),
    is_master=True,
    wait_for_workers=False,
    timeout=timedelta(seconds=60),
    multi_tenant=True,
)
print("store ready", flush=True)
signal.pause()
