# SPDX-License-Identifier: Apache-2.0
"""Stands for a launcher with one rank: twin.py DAEMON_PORT RANK REPLICAS STALLED

It reports ten finished steps a second to the host daemon, without torch, and obeys it until SIGTERM.  While
the file STALLED exists it finishes none.
"""

import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from resiliency.daemon_link import DaemonLink, read_generation, to_fleet_attempt


def main() -> None:
    port, rank, replicas = (int(word) for word in sys.argv[1:4])
    stalled = Path(sys.argv[4])
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    done, at = [0], [time.monotonic()]
    generation, attempts = read_generation(os.environ), [0]

    def report() -> Mapping[str, object]:
        now = time.monotonic()
        if not stalled.exists():
            done[0] += max(1, int((now - at[0]) * 10))
            at[0] = now
        worker = {"local_rank": 0, "global_rank": rank, "state": "running", "heartbeat_age_s": 0.0}
        return {
            "attempt": to_fleet_attempt(generation, attempts[0]),
            "launcher": "running",
            "workers": [{**worker, "step": done[0], "step_age_s": now - at[0]}],
        }

    def obey(command: Mapping[str, Any]) -> None:
        if command["kind"] == "restart_ranks":
            attempts[0] += 1
        outcome = {"command": command["id"], "epoch": command["epoch"], "status": "done", "text": "twin"}
        link.send_outcome(outcome)
        link.report_soon()

    workload = {"workload": "job", "replicas": replicas, "max_replicas": 2, "max_in_job_restarts": 3}
    hello = {"kind": "launcher", "key": uuid.uuid4().hex, "workload": workload}
    link = DaemonLink(port=port, hello=hello, make_report=report, on_command=obey)
    print(f"rank {rank} of {replicas} begins", flush=True)
    ended.wait()
    link.close()


if __name__ == "__main__":
    main()
