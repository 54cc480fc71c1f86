# SPDX-License-Identifier: Apache-2.0
"""Stands for a launcher with one rank: twin.py DAEMON_PORT RANK RANKS FOLDER

Without torch.  The rank is a process of its own, which finishes ten steps a second while all ranks of the job
are at the same attempt, as after a collective.  The twins of a job meet in FOLDER as launchers do in their
rendezvous: one that joins, or is asked to restart the ranks, begins a new attempt for all.  A rank that has
ended is reported as failed and left to the supervisor.

While the file FOLDER/stalled exists no rank finishes a step; while FOLDER/held exists, commands wait.
"""

import fcntl
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from resiliency.daemon_link import DaemonLink, read_generation, to_fleet_attempt, to_launcher_attempt
from resiliency.runtime import awake_since

#: Ends with its twin.  Its file says: attempt, last step, and when that was.
RANK = """
import os, sys, time
folder, attempt, parent = sys.argv[1], sys.argv[2], int(sys.argv[3])
rank, ranks = int(sys.argv[4]), int(sys.argv[5])

def read(rank):
    try:
        with open(f"{folder}/rank-{rank}") as file:
            return file.read().split()
    except FileNotFoundError:
        return ["", "0", "0"]

def write(*words):
    with open(f"{folder}/rank-{rank}.new", "w") as file:
        file.write(" ".join(map(str, words)))
    os.replace(f"{folder}/rank-{rank}.new", f"{folder}/rank-{rank}")

step = max(int(read(each)[1]) for each in range(ranks))
write(attempt, step, "-")
while os.getppid() == parent:
    time.sleep(0.1)
    others = [read(each) for each in range(ranks) if each != rank]
    ready = all(at == attempt and int(last) >= step for at, last, _ in others)
    if ready and not os.path.exists(f"{folder}/stalled"):
        step += 1
        write(attempt, step, time.monotonic())
"""


class Twin:
    def __init__(self, port: int, rank: int, ranks: int, folder: Path) -> None:
        self.rank, self.ranks, self.folder = rank, ranks, folder
        folder.mkdir(parents=True, exist_ok=True)
        self.generation = read_generation(os.environ)
        self.commands = deque[Mapping[str, Any]]()
        self.child: subprocess.Popen[bytes] | None = None
        self.attempt = -1
        self.failed = False
        workload = {"workload": folder.name, "replicas": ranks, "max_replicas": 2, "max_in_job_restarts": 3}
        hello = {"kind": "launcher", "key": uuid.uuid4().hex, "workload": workload}
        self.next_attempt(None)
        self.follow()
        self.link = DaemonLink(port=port, hello=hello, make_report=self.report, on_command=self.take)

    def next_attempt(self, ended: int | None) -> None:
        """Begin an attempt on all hosts; if `ended` is not the present one it has been begun already."""
        with (self.folder / f"attempt-{self.generation}").open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            now = int(file.read() or -1)
            if ended is None or ended == now:
                file.truncate(0)
                file.write(str(now + 1))

    def follow(self) -> bool:
        """Be at the job's attempt, with a rank of it; whether there was anything to do."""
        wanted = int((self.folder / f"attempt-{self.generation}").read_text() or self.attempt)
        if wanted == self.attempt:
            return False
        self.end_rank()
        at = str(to_fleet_attempt(self.generation, wanted))
        argv = [sys.executable, "-I", "-S", "-c", RANK, str(self.folder), at, str(os.getpid())]
        self.child = subprocess.Popen([*argv, str(self.rank), str(self.ranks)])
        self.attempt, self.failed = wanted, False
        return True

    def end_rank(self) -> None:
        if self.child is not None:
            self.child.kill()
            self.child.wait()

    def report(self) -> Mapping[str, object]:
        attempt = to_fleet_attempt(self.generation, self.attempt)
        state = "failed" if self.failed else "running"
        worker = {"local_rank": 0, "global_rank": self.rank, "state": state, "heartbeat_age_s": 0.0}
        try:
            at, step, when = (self.folder / f"rank-{self.rank}").read_text().split()
        except FileNotFoundError:
            at = when = "-"
        if at == str(attempt) and when != "-":
            worker |= {"step": int(step), "step_age_s": awake_since(float(when))}
        return {"attempt": attempt, "launcher": "running", "workers": [worker]}

    def take(self, command: Mapping[str, Any]) -> None:
        print(f"has {command['id']}", flush=True)
        self.commands.append(command)

    def obey(self, command: Mapping[str, Any]) -> None:
        text = "twin"
        if command["kind"] == "restart_ranks":
            ended = to_launcher_attempt(self.generation, command.get("attempt"))
            self.next_attempt(self.attempt if ended is None else ended)
            text = f"attempt {self.attempt} ends"
        print(f"obeys {command['id']}", flush=True)
        outcome = {"command": command["id"], "epoch": command["epoch"], "status": "done", "text": text}
        self.link.send_outcome(outcome)

    def run(self, ended: threading.Event) -> None:
        print(f"rank {self.rank} of {self.ranks} begins", flush=True)
        while not ended.wait(0.05):
            if self.commands and not (self.folder / "held").exists():
                self.obey(self.commands.popleft())
            changed = self.follow()
            if not self.failed and self.child is not None and self.child.poll() is not None:
                self.failed = changed = True
            if changed:
                self.link.report_soon()
        self.end_rank()
        self.link.close()


def main() -> None:
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    Twin(*map(int, sys.argv[1:4]), Path(sys.argv[4])).run(ended)


if __name__ == "__main__":
    main()
