# SPDX-License-Identifier: Apache-2.0
"""Plays the programs of the workload's image, as far as the supervisor sees them: they need GPUs or torch.

    python -m tests.supervisor_pages.played COMMAND...     as in the manifest

A launcher takes its flags and reports as the real one does, with the same code.  Launchers meet in a store,
by TCP connections: where one breaks, its host is missing, and the others wait for another one.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: Ten steps a second, of which each twentieth is saved.
STEP_S, EVERY = 0.1, 20


def main(words: list[str]) -> int:
    if "resiliency.launch.rendezvous_store" in words:
        return serve_store(int(words[-1].partition("=")[2]))
    if "simulator" in words:
        return simulate(dict(word.partition("=")[::2] for word in words))
    if any(word.endswith("launcher.py") for word in words):
        return Launcher(words[2:]).run()
    signal.pause()  # `sleep infinity`
    return 0


def say(text: str) -> None:
    print(text, flush=True)


class Lines:
    """JSON, one a line, over a socket."""

    def __init__(self, socket_: socket.socket) -> None:
        self.socket, self._rest = socket_, b""

    def send(self, **fields: Any) -> None:
        self.socket.sendall(json.dumps(fields).encode() + b"\n")

    def read(self) -> Iterator[dict[str, Any]]:
        """What is there now.

        Raises:
            ConnectionError: it has ended.
        """
        block = self.socket.recv(1 << 16)
        if not block:
            raise ConnectionError
        *whole, self._rest = (self._rest + block).split(b"\n")
        yield from map(json.loads, whole)


def serve_store(port: int) -> int:
    """Tell all launchers of a job when there are as many as they need: a round, and the step it begins at."""
    members: dict[Lines, dict[str, Any]] = {}
    with socket.create_server(("", port)) as server:
        while True:
            ready, _, _ = select.select([server, *(one.socket for one in members)], [], [])
            for one in list(members):
                if one.socket in ready:
                    try:
                        for said in one.read():
                            members[one].update(said)
                    except OSError:
                        job = members.pop(one)
                        for other, theirs in members.items():
                            if theirs["job"] == job["job"]:
                                other.send(lost=job["host"])
                    _meet(members)
            if server in ready:
                members[Lines(server.accept()[0])] = {"job": ""}


def _meet(members: dict[Lines, dict[str, Any]]) -> None:
    for job in {one["job"] for one in members.values()} - {""}:
        mine = {one: said for one, said in members.items() if said["job"] == job}
        rounds = {said["round"] for said in mine.values()}
        hosts = next(iter(mine.values()))["hosts"]
        # Launchers that were together before this store's start still are.
        if len(mine) == hosts and (
            len(rounds) > 1 or rounds == {-1} or any(one["again"] for one in mine.values())
        ):
            new, step = max(rounds) + 1, max(said["saved"] for said in mine.values())
            for rank, (one, said) in enumerate(sorted(mine.items(), key=lambda item: item[1]["index"])):
                said.update(round=new, again=False)
                one.send(round=new, rank=rank, step=step)


class Launcher:
    def __init__(self, words: list[str]) -> None:
        from resiliency.launch import cli
        from resiliency.launch.fleet.reporter import DaemonReporter
        from resiliency.launch.options import resolve
        from resiliency.progress import StepPage, _open_slot

        self.options = resolve(cli.parse(words, os.environ), os.environ)
        page = StepPage(self.options.workers)
        self.slots = [_open_slot(page.variable(rank)) for rank in range(self.options.workers)]
        self.reporter = DaemonReporter(self.options, page, stacks_dir="")
        self.round, self.rank, self.step, self.trains = -1, 0, 0, False
        self.link: Lines | None = None
        self.ends = False
        flags = dict(word.partition("=")[::2] for word in words)
        self.checkpoints = Path(flags["--persistent-ckpt-dir"], os.environ["JOB_IDENTIFIER"], "checkpoint")
        self.events = Path(os.environ["RESILIENCY_RUN_DIR"], f"{os.environ['JOB_IDENTIFIER']}-events.jsonl")

    def run(self) -> int:
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "ends", True))
        while not self.ends:
            begun = time.monotonic()
            self._talk()
            self._obey()
            if self.trains:
                self._train()
            time.sleep(max(0.0, STEP_S - (time.monotonic() - begun)))
        self.reporter.close()
        return 1

    def _talk(self) -> None:
        from resiliency.launch.health.condition import JobCondition, LauncherState

        try:
            if self.link is None:
                host, _, port = self.options.rendezvous.endpoint.partition(":")
                self.link = Lines(socket.create_connection((host, int(port)), 1.0))
                self._join(again=False)
            while select.select([self.link.socket], [], [], 0.0)[0]:
                for said in self.link.read():
                    if "lost" in said and self.trains:
                        say(f"host {said['lost']} is lost; waiting for another one")
                        self.trains = False
                        self.reporter.job_is(JobCondition(state=LauncherState.RESTARTING))
                    elif "round" in said:
                        self._begin(**said)
        except OSError as error:
            if self.link is not None:
                say(f"store lost: {error!r}; the ranks go on")
            self.link = None

    def _join(self, *, again: bool) -> None:
        assert self.link is not None
        self.link.send(
            job=self.options.rendezvous.run_id,
            host=os.environ["NODE_NAME"],
            index=int(os.environ["JOB_COMPLETION_INDEX"]),
            hosts=self.options.rendezvous.max_nodes,
            round=self.round,
            saved=self.step - self.step % EVERY,
            again=again,
        )

    def _begin(self, *, round: int, rank: int, step: int) -> None:
        from resiliency.launch.fleet.link import WorkerReport
        from resiliency.launch.health.condition import JobCondition, LauncherState

        self.round, self.rank, self.step, self.trains = round, rank, step, True
        say(f"rank {rank * self.options.workers} starts after step {step}")
        self.reporter.begin_attempt(round, run=self.options.rendezvous.run_id)
        for local in range(self.options.workers):
            number = rank * self.options.workers + local
            self.reporter.report(rank=number, local_rank=local, pid=os.getpid(), state=WorkerReport.RUNNING)
        self.reporter.job_is(JobCondition(state=LauncherState.RUNNING))

    def _obey(self) -> None:
        while (command := self.reporter.try_take_command()) is not None:
            text = f"{command.kind.value} of attempt {self.round}"
            say(text)
            if command.kind.value == "restart_ranks" and self.link is not None:
                self._join(again=True)
            self.ends = command.kind.value == "leave"
            self.reporter.finish_command(command, done=True, text=text)

    def _train(self) -> None:
        from resiliency.progress import _STEP

        self.step += 1
        for slot in self.slots:
            assert slot is not None
            _STEP.pack_into(slot[0], slot[1], self.step + 1, time.monotonic())
        if self.step % EVERY == 0 and self.link is not None:
            self.link.send(saved=self.step)
        if self.rank == 0 and self.step % EVERY == 0:
            say(f"step {self.step}")
            (self.checkpoints / f"step-{self.step}").mkdir(parents=True, exist_ok=True)
            self.events.parent.mkdir(parents=True, exist_ok=True)
            with self.events.open("a") as file:
                file.write(json.dumps({"event": "checkpoint_saved", "step": self.step}) + "\n")


def simulate(flags: dict[str, str]) -> int:
    """The Xid of a node, on the first host."""
    say(f"injects {flags['--kinds']}")
    signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
