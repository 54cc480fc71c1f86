# SPDX-License-Identifier: Apache-2.0
"""One watchdog in a process of its own, started by the host daemon: ``python3 -m supervisor.watchdogs``.

The daemon writes one line, a JSON table with what to watch.  After each look the process writes one, until
its standard input ends.  A look that hangs or crashes so takes this process with it, and nothing else.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from supervisor.watchdogs.ecc import EccWatchdog
from supervisor.watchdogs.links import LinkWatchdog
from supervisor.watchdogs.nic import Ports
from supervisor.watchdogs.nvml import NvmlGpus, NvmlLinks
from supervisor.watchdogs.testing import FileGpus
from supervisor.watchdogs.watchdog import Cooldown, Look, UnknownHealth, Watchdog
from supervisor.watchdogs.xid import XidWatchdog

#: Between two looks at a log that never ends.
LEAST_PAUSE_S = 0.2


def make_watchdog(order: Mapping[str, Any]) -> Watchdog:
    """The watchdog that `order` (of `runner.WatchdogRunner`) describes."""
    host, memory = order["host"], order["memory"]
    if order["name"] == "xid":
        return XidWatchdog(host, order["kernel_log"], memory)
    if order["name"] == "ecc":
        return EccWatchdog(host, FileGpus(Path(order["gpus"])) if order["gpus"] else NvmlGpus(), memory)
    return LinkWatchdog(host, order["name"], Ports() if order["name"] == "nic" else NvmlLinks(), memory)


def look_once(watchdog: Watchdog, cooldown: Cooldown) -> dict[str, Any]:
    """What the daemon is told of one look."""
    unknown = ""
    look = Look()
    try:
        look = cooldown.pass_on(watchdog.look(), time.monotonic())
    except UnknownHealth as error:
        unknown = str(error)
    return {
        "findings": [finding.to_dict() for finding in look.findings],
        "notes": look.notes,
        "unknown": unknown,
        "memory": watchdog.memory(),
    }


def main() -> None:
    """Look until the daemon has gone."""
    order = json.loads(sys.stdin.readline())
    watchdog, cooldown = make_watchdog(order), Cooldown(order["cooldown_s"])
    interval_s, asked = order["interval_s"], sys.stdin.fileno()
    while True:
        print(json.dumps(look_once(watchdog, cooldown)), flush=True)
        deadline = time.monotonic() + interval_s
        ended, _, _ = select.select([asked], [], [], min(LEAST_PAUSE_S, interval_s))
        if not ended and (left := deadline - time.monotonic()) > 0:
            news = watchdog.descriptor()
            ended, _, _ = select.select([asked] + ([] if news is None else [news]), [], [], left)
        if asked in ended and not os.read(asked, 1):
            return


if __name__ == "__main__":
    with suppress(BrokenPipeError):  # the daemon ended during a look
        main()
