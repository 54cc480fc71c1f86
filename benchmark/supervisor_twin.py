# SPDX-License-Identifier: Apache-2.0
"""Stands for a launcher with one rank where the supervisor is measured; the local orchestrator starts it.

    supervisor_twin.py DAEMON_PORT RANK REPLICAS WORKLOAD [--stubborn]

It holds a launcher's real link to the host daemon and needs no torch.  Ten steps a second, until SIGUSR1 (the
rank has failed) or SIGUSR2 (it finishes no step any more); a restart in place mends both, and its moment is
printed.  SIGTERM ends it, unless it is stubborn.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
import uuid
from collections.abc import Mapping
from typing import Any

from resiliency.daemon_link import DaemonLink, read_generation, to_fleet_attempt

STEPS_PER_S = 10


class Twin:
    """One rank and its launcher."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._generation, self._attempt = read_generation(os.environ), -1
        self.restart()

    def restart(self) -> None:
        self._attempt, self._failed = self._attempt + 1, False
        self._began = time.monotonic()
        self._stuck_at: float | None = None

    def stop_stepping(self) -> None:
        self._stuck_at = self._stuck_at or time.monotonic()

    def fail(self) -> None:
        self.stop_stepping()
        self._failed = True

    def report(self) -> Mapping[str, object]:
        now = time.monotonic()
        worker: dict[str, object] = {
            "local_rank": 0,
            "global_rank": self._rank,
            "state": "failed" if self._failed else "running",
            "heartbeat_age_s": 0.0,
        }
        step = int(((self._stuck_at or now) - self._began) * STEPS_PER_S)
        if step:
            worker |= {"step": step, "step_age_s": max(0.0, now - self._began - step / STEPS_PER_S)}
        attempt = to_fleet_attempt(self._generation, self._attempt)
        return {"attempt": attempt, "launcher": "running", "workers": [worker]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name in ("port", "rank", "replicas"):
        parser.add_argument(name, type=int)
    parser.add_argument("workload")
    parser.add_argument("--stubborn", action="store_true", help="does not end at SIGTERM")
    args = parser.parse_args()
    twin = Twin(args.rank)
    awaited = {signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)

    def obey(command: Mapping[str, Any]) -> None:
        if command["kind"] == "restart_ranks":
            twin.restart()
            print(f"restart_ranks at {time.time():.3f}", flush=True)
        outcome = {"command": command["id"], "epoch": command["epoch"], "status": "done", "text": "restarted"}
        link.send_outcome(outcome)
        link.report_soon()

    workload = {"workload": args.workload, "replicas": args.replicas, "max_in_job_restarts": 100}
    hello = {"kind": "launcher", "key": uuid.uuid4().hex, "workload": workload}
    link = DaemonLink(port=args.port, hello=hello, make_report=twin.report, on_command=obey)
    while True:
        number = signal.sigwait(awaited)
        if number == signal.SIGTERM and not args.stubborn:
            break
        if number == signal.SIGUSR1:
            twin.fail()
        elif number == signal.SIGUSR2:
            twin.stop_stepping()
        link.report_soon()
    link.close()


if __name__ == "__main__":
    main()
