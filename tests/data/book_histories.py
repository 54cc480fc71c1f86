# SPDX-License-Identifier: Apache-2.0
"""Random histories of a book of ranges, beside a model that is trained: a multiset of what it has seen.

    python -m tests.data.book_histories 100000

The naive model knows no ranges, cursors or leases: it adds the positions of a range when a step uses it,
keeps a copy with each checkpoint, and takes a copy back when the job goes back. At the end of a history,
whatever happened to workers, attempts and the server, it holds each position once per epoch, but for what was
skipped by policy.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

from resiliency.data.dispatch.book import Book, PoisonPolicy
from resiliency.data.dispatch.bookkeeper import Bookkeeper
from resiliency.data.dispatch.journal import decoded, encoded
from resiliency.data.dispatch.ranges import (
    PartitionRanges,
    RangeSource,
    SampleRange,
    SampleRanges,
    TextRanges,
)

#: A position: partition, epoch, number.
Seen = Counter[tuple[str, int, int]]
EVENTS = 60


def positions(part: SampleRange) -> Iterator[tuple[str, int, int]]:
    for number in range(part.start, part.stop):
        yield part.partition, part.epoch, number


def random_source(draw: random.Random) -> tuple[RangeSource, Seen]:
    """A small source, and what an undisturbed program would see."""
    kind = draw.choice(["samples", "text", "partitions"])
    epochs, seed = draw.randint(1, 2), draw.randint(0, 9)
    if kind == "samples":
        size = draw.randint(0, 40)
        order = draw.choice(["sequential", "ranges", "samples"])
        samples = SampleRanges(
            size=size, range_size=draw.randint(1, 9), epochs=epochs, order=order, seed=seed
        )
        return samples, Counter(("", epoch, number) for epoch in range(epochs) for number in range(size))
    sizes = {name: draw.randint(0, 20) for name in ("a", "b", "c")}
    if kind == "text":
        files = tuple(sizes.items())
        text = TextRanges(files=files, range_bytes=draw.randint(1, 9), epochs=epochs, seed=seed)
        return text, Counter((f, e, n) for e in range(epochs) for f, size in files for n in range(size))
    return (
        PartitionRanges(range_size=draw.randint(1, 9)),
        Counter((name, 0, n) for name, stop in sizes.items() for n in range(stop)),
    )


class Server:
    """A keeper and its journal, which is killed between any two writes, and inside of them."""

    def __init__(self, source: RangeSource, policy: PoisonPolicy, draw: random.Random) -> None:
        self.source, self.policy, self.draw = source, policy, draw
        self.keeper = Bookkeeper(Book(source, policy))
        self.journal = encoded([{"snapshot": self.keeper.to_plain()}])
        self.kills = 0

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer that a client gets, which asks again until it gets one."""
        request = json.loads(json.dumps(request))
        while True:
            answer, changed = self.keeper.apply(request)
            line = encoded([request]) if changed else b""
            written = self.draw.choice([0, self.draw.randint(0, len(line)), len(line)])
            if self.draw.random() > 0.04:
                self.journal += line
                if self.draw.random() < 0.1:
                    self._restart(encoded([{"snapshot": self.keeper.to_plain()}]))
                return dict(json.loads(json.dumps(answer)))
            self.kills += 1
            self._restart(self.journal + line[:written])

    def _restart(self, journal: bytes) -> None:
        entries, length = decoded(journal)
        self.journal = journal[:length]
        self.keeper = Bookkeeper.of_plain(entries[0]["snapshot"], self.source, self.policy)  # type: ignore[arg-type]
        for request in entries[1:]:
            assert self.keeper.apply(request)[1], f"{request} changed nothing when it was applied again"


class Worker:
    def __init__(self, name: str, server: Server, attempt: int) -> None:
        self.name, self.server, self.attempt = name, server, attempt
        self.life = f"{name}-{server.draw.random()}"
        self.seq = 0
        self.parts: list[SampleRange] = []
        self.joined = self.ask("join")

    def ask(self, op: str, **fields: object) -> dict[str, Any]:
        self.seq += 1
        me = {"worker": self.name, "life": self.life, "attempt": self.attempt, "seq": self.seq}
        return self.server.ask({"op": op, **me, **fields})

    def grant(self) -> str:
        answer = self.ask("grant")
        if answer.get("answer") == "range":
            self.parts.append(SampleRange.of_plain(answer["range"]))
        return str(answer.get("answer") or answer["error"])


class History:
    """One job, from its start to the end of its data; raises AssertionError where a sample is lost or comes
    twice."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)  # noqa: S311 - histories, no secrets
        self.source, self.expected = random_source(self.draw)
        self.by_steps = self.draw.random() < 0.7
        self.policy = PoisonPolicy(tries=2, skip=True)
        self.server = Server(self.source, self.policy, self.draw)
        self.attempt, self.step, self.committed = 0, 0, -1
        #: Step -> what it used; what the model saw up to here is that of the steps before.
        self.used: dict[int, Seen] = {}
        self.checkpoints: list[tuple[int, Any, dict[int, Seen]]] = []
        #: Processes that were taken for dead, and may wake up.
        self.asleep: list[Worker] = []
        self.workers = self._start_workers()

    def run(self) -> None:
        if isinstance(self.source, PartitionRanges):
            assert self.workers[0].grant() == "wait"  # nothing is there yet, which is not the end
        for _ in range(self.draw.randint(1, EVENTS)):
            self.draw.choice(
                [self._grant, self._grant, self._use, self._use, self._use]
                + [
                    self._step,
                    self._step,
                    self._commit,
                    self._commit,
                    self._lose,
                    self._wake,
                    self._fail,
                    self._back,
                    self._grow,
                ]
                + [self._attempt] * (self.draw.random() < 0.7)
            )()
        self._finish()
        seen: Seen = sum(self.used.values(), Counter())
        for part in self.server.keeper.book.skipped:
            seen.update(positions(part))
        assert seen == self.expected, f"lost {self.expected - seen}, twice {seen - self.expected}"

    def _start_workers(self) -> list[Worker]:
        count = self.draw.randint(1, 4)
        return [Worker(f"w{number}", self.server, self.attempt) for number in range(count)]

    def _grant(self) -> None:
        assert self.draw.choice(self.workers).grant() in ("range", "wait", "end")

    def _use(self) -> None:
        """A worker uses a range, or its first part, in the step under way."""
        worker = self.draw.choice(self.workers)
        if not worker.parts:
            return
        part = worker.parts.pop(self.draw.randrange(len(worker.parts)))
        taken = self.draw.choice([len(part), self.draw.randint(1, len(part))])
        used = part.first(taken)
        step = self.step + 1 if self.by_steps else None
        assert worker.ask("done", range=used.to_plain(), step=step) == {"answer": "ok"}
        self.used.setdefault(self.step + 1, Counter()).update(positions(used))
        if taken < len(part):
            worker.parts.append(SampleRange(used.stop, part.stop, part.epoch, part.partition))

    def _step(self) -> None:
        self.step += 1

    def _commit(self) -> None:
        """The checkpoint of this step or, where saves lag, of one before; sometimes all ranks ask."""
        step = self.draw.randint(max(self.committed, 0), self.step)
        if not self.by_steps:
            return
        answers = [worker.ask("commit", step=step) for worker in self.workers[: self.draw.randint(1, 4)]]
        assert all(answer == answers[0] for answer in answers)
        self.committed = step
        used = {at: Counter(seen) for at, seen in self.used.items() if at <= step}
        self.checkpoints.append((step, answers[0]["state"], used))

    def _lose(self) -> None:
        """A worker is lost: the server noticed that it was silent, or another process has its name."""
        lost = self.workers.pop(self.draw.randrange(len(self.workers)))
        if self.draw.random() < 0.5:
            self.server.ask({"op": "silent", "worker": lost.name})
            self.asleep.append(lost)
        if self.draw.random() < 0.5 or not self.workers:
            name = lost.name if lost not in self.asleep else f"n{self.draw.random()}"
            self.workers.append(Worker(name, self.server, self.attempt))
        elif lost not in self.asleep:
            self.server.ask({"op": "silent", "worker": lost.name})

    def _wake(self) -> None:
        """What a worker that was taken for dead says of its ranges counts for nothing."""
        if self.asleep:
            worker = self.asleep.pop()
            for part in worker.parts:
                answer = worker.ask("done", range=part.to_plain(), step=self.step + 1)
                assert answer["error"] == "StaleRange"

    def _fail(self) -> None:
        worker = self.draw.choice(self.workers)
        if worker.parts:
            part = worker.parts.pop()
            assert worker.ask("failed", range=part.to_plain(), reason="no such line") == {"answer": "ok"}

    def _back(self) -> None:
        worker = self.draw.choice(self.workers)
        if worker.parts:
            part = worker.parts.pop()
            assert worker.ask("give_back", range=part.to_plain()) == {"answer": "ok"}

    def _grow(self) -> None:
        if isinstance(self.source, PartitionRanges):
            stops: Counter[str] = Counter(name for name, _, _ in self.expected)
            self.draw.choice(self.workers).ask("extend", stops=dict(stops))

    def _attempt(self) -> None:
        """All processes are new, and the model is that of any checkpoint, or none."""
        old, self.asleep = [*self.workers, *self.asleep], []
        self.attempt += 1
        self.workers = self._start_workers()
        for worker in old:
            if worker.parts:
                answer = worker.ask("done", range=worker.parts[0].to_plain(), step=self.step + 1)
                assert answer["error"] == "StaleRange"
        if not self.by_steps:
            return
        number = self.draw.randint(-1, len(self.checkpoints) - 1)
        step, state, used = self.checkpoints[number] if number >= 0 else (-1, None, {})
        if self.server.keeper.book.to_plain()["has_steps"]:
            assert self.workers[0].grant() == "ConfigError"  # nobody said where the model is
        for worker in self.workers:
            assert worker.ask("rollback", state=state) == {"answer": "ok"}
        self.step, self.committed = max(step, 0), step
        self.used = {at: Counter(seen) for at, seen in used.items()}
        self.checkpoints = self.checkpoints[: number + 1]

    def _finish(self) -> None:
        """Work until the end is said, to each worker."""
        self._grow()
        if isinstance(self.source, PartitionRanges):
            self.workers[0].ask("extend", stops={}, closed=True)
        ended: set[str] = set()
        for _ in range(1000):
            for worker in self.workers:
                said = worker.grant()
                assert said in ("range", "wait", "end")
                # The end is said where nobody holds anything, and stays the end.
                assert said != "end" or not any(other.parts for other in self.workers)
                if said == "end":
                    ended.add(worker.name)
                assert said == "end" or not ended
            while any(worker.parts for worker in self.workers):
                self._use()
            self._step()
            if len(ended) == len(self.workers):
                return
        raise AssertionError("the end of the data never comes")


def main() -> None:
    count, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    kills = 0
    for seed in range(first, first + count):
        history = History(seed)
        try:
            history.run()
        except BaseException:
            print(f"history {seed}", flush=True)
            raise
        kills += history.server.kills
    print(f"{count} histories, {kills} kills of the server: each position once per epoch")


if __name__ == "__main__":
    main()
