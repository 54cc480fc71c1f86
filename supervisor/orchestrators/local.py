# SPDX-License-Identifier: Apache-2.0
"""The local orchestrator: hosts are a daemon and a launcher each, as plain processes of one machine.

`wanted` decides what runs where.  A host that is gone stays so until it is uncordoned.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from signal import Signals

from supervisor.orchestrators.job_file import JobFile
from supervisor.orchestrators.processes import (
    Mark,
    Marked,
    has_ended,
    kill_all,
    marked_processes,
    signal_roots,
    start_process,
)
from supervisor.orchestrators.wanted import KILL_S, Seen, WantedOrchestrator, restart_at_next_run


class LocalMachines:
    """All hosts are this machine.  `fleet`: the state directory, which marks their processes."""

    name, watch_s, returns = "local", 0.5, False
    python, supervisor = sys.executable, str(Path(__file__).parents[1])

    def __init__(self, fleet: str) -> None:
        self._fleet = fleet
        self._children: list[int] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        yield
        self._reap()

    async def scan(self) -> Seen:
        self._reap()
        return Seen(processes=marked_processes(self._fleet))

    def _reap(self) -> None:
        self._children = [child for child in self._children if not has_ended(child)]

    async def start(self, argv: Sequence[str], mark: Mark, environment: Mapping[str, str], log: Path) -> None:
        self._children.append(start_process(argv, mark=mark, environment=environment, log=log))

    async def signal_roots(self, processes: Sequence[Marked], number: Signals) -> None:
        signal_roots(processes, number)

    async def kill(self, processes: Sequence[Marked]) -> None:
        kill_all(processes)


class LocalOrchestrator(WantedOrchestrator):
    """Args and errors: see `WantedOrchestrator`."""

    def __init__(self, file: JobFile, state_dir: Path, environment: Mapping[str, str]) -> None:
        super().__init__(file, state_dir, environment, LocalMachines(str(state_dir.resolve())))


def stop_all(state_dir: Path, host: str = "") -> int:
    """Kill all that local orchestrators with this directory have started; returns how many processes.

    Args:
        host: only what runs on this host, as the loss of a machine would end it.
    """
    fleet, killed = str(state_dir.resolve()), set()

    def living() -> list[Marked]:
        return [one for one in marked_processes(fleet) if host in ("", one.mark.host)]

    end = time.monotonic() + KILL_S
    while (left := living()) and time.monotonic() < end:
        killed |= {one.pid for one in left}
        kill_all(left)
        time.sleep(0.05)
    for pid in killed:
        # Where it is a child of this process: one that gives its memory back has ended for all but `waitpid`.
        while not has_ended(pid) and time.monotonic() < end:
            time.sleep(0.05)
    return len(killed)


def main(argv: Sequence[str] | None = None) -> int:
    """``python3 -m supervisor.orchestrators.local --stop DIR``: end a local fleet, or one host of it."""
    parser = argparse.ArgumentParser(
        prog="python3 -m supervisor.orchestrators.local",
        description="End all daemons, launchers and ranks that a local orchestrator has started.",
    )
    parser.add_argument("--stop", metavar="DIR", type=Path, required=True, help="Its --state-dir.")
    parser.add_argument(
        "--host", metavar="NAME", default="", help="Only those of this host, as if its machine were lost."
    )
    args = parser.parse_args(argv)
    if not args.stop.is_dir():
        print(f"--stop: no directory {args.stop}: give the fleet's --state-dir", file=sys.stderr)
        return 1
    killed = stop_all(args.stop, args.host)
    print(f"{killed} processes ended")
    if args.host:
        return 0 if killed else 1
    restart_at_next_run(args.stop / f"{LocalMachines.name}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
