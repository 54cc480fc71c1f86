# SPDX-License-Identifier: Apache-2.0
"""Random histories of a data server, beside a model that is trained: a multiset of what it has seen.

    python -m tests.data.book_histories 100000

The server is the product's: its queue with the requests that it holds, its book and the lines of its journal.
It is killed between any two writes of the journal, and inside of them. The naive model beside it knows no
ranges, cursors or leases: it adds the positions of a range when a step uses it, keeps a copy with each
checkpoint, and takes a copy back when the job goes back. Three kinds of jobs:

- `Preparation`: workers without a model, which come, go, hang, are replaced, and some of which are broken.
- `Ranks`: ranks that reduce gradients together, in steps from 0 or from 1. When one dies at any point of a
  step, all are started again, in any order, some late and some never, in any number; or they go back in their
  processes. They pass no attempt, or count them by hand, and sometimes wrongly. They restore a checkpoint, or
  start from scratch and say so or not. The server hears nothing of living ranks for a time. At the end some
  leave before the others commit.
- `Replicas`: the others go on when one dies, and a new one gets its model from them.

At the end each position is in the model once per epoch, but for what was skipped. A range of a replica that
died after the collective of a step and before it said so may be there twice, and the server says which.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

from resiliency.data.dispatch.book import Book
from resiliency.data.dispatch.bookkeeper import Bookkeeper
from resiliency.data.dispatch.failures import PoisonPolicy
from resiliency.data.dispatch.journal import decoded, encoded
from resiliency.data.dispatch.pending import Pending, PendingRequests
from resiliency.data.dispatch.ranges import (
    PartitionRanges,
    Plain,
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


class Died(Exception):
    """The processes of a job were killed."""


class Refused(Exception):
    """The server refused a request: its answer."""

    def __init__(self, answer: dict[str, Any]) -> None:
        super().__init__(answer["text"])
        self.kind, self.text = str(answer["error"]), str(answer["text"])


class Server:
    """The queue, the book and the journal, which is killed between any two writes, and inside of them."""

    def __init__(self, source: RangeSource, policy: PoisonPolicy, draw: random.Random) -> None:
        self.source, self.policy, self.draw = source, policy, draw
        self.requests = PendingRequests(Bookkeeper(Book(source, policy)))
        self.journal = encoded([{"snapshot": self.keeper.to_plain()}])
        self.kills = 0
        #: What workers that were lost had used, and came back.
        self.returned: Seen = Counter()
        #: Requests that have no answer: their clients ask again after a kill.
        self.asked: dict[str, Pending] = {}

    @property
    def keeper(self) -> Bookkeeper:
        return self.requests.keeper

    @property
    def book(self) -> Book:
        return self.keeper.book

    def send(self, request: dict[str, Any], *, is_held: bool = False) -> Future[Plain]:
        """The answer, which is there at once unless the request may be held."""
        answer: Future[Plain] = Future()
        until = 1.0 if is_held else 0.0
        pending = Pending(json.loads(json.dumps(request)), answer, until)
        self.asked[str(request.get("worker"))] = pending
        self.requests.add_request(pending)
        self.turn()
        return answer

    def turn(self) -> None:
        """What the server's loop does, with a kill at any point of it."""
        while True:
            entries, answered = self.requests.apply(0.0)
            line = encoded(entries) if entries else b""
            written = self.draw.choice([0, self.draw.randint(0, len(line)), len(line)])
            if self.draw.random() < 0.04:
                self.kills += 1
                self._restart(self.journal + line[:written])
                continue
            self.journal += line
            for parts in self.keeper.take_returned().values():
                for part in parts:
                    self.returned.update(positions(part))
            for pending, answer in answered:
                if not pending.answer.done():
                    pending.answer.set_result(json.loads(json.dumps(answer)))
            if self.draw.random() < 0.05:
                self._restart(encoded([{"snapshot": self.keeper.to_plain()}]))
                continue
            return

    def hold_no_longer(self) -> None:
        """The time is over for which requests are held."""
        for pending in self.requests.held:
            pending.hold_until = 0.0
        self.requests.release_held(0.0)
        self.turn()

    def _restart(self, journal: bytes) -> None:
        entries, length = decoded(journal)
        self.journal = journal[:length]
        keeper = Bookkeeper.of_plain(entries[0]["snapshot"], self.source, self.policy)  # type: ignore[arg-type]
        for request in entries[1:]:
            answer, entry = keeper.apply(request)
            assert entry is not None, f"{request} changed nothing when it was applied again: {answer}"
        for parts in keeper.take_returned().values():
            for part in parts:
                self.returned.update(positions(part))
        self.requests = PendingRequests(keeper)
        for pending in self.asked.values():
            if not pending.answer.done():
                self.requests.add_request(pending)


class Worker:
    """A process with a client."""

    def __init__(self, name: str, server: Server, attempt: int | None = None) -> None:
        self.name, self.server = name, server
        self.life = f"{name}-{server.draw.random()}"
        self.seq = 0
        self.parts: list[SampleRange] = []
        self.attempt = attempt
        #: What it used in a step that it did not say is over.
        self.unsaid: tuple[int, Seen] = (-1, Counter())
        self.ask("join")

    def send(self, op: str, *, is_held: bool = False, **fields: object) -> Future[Plain]:
        self.seq += 1
        me = {"worker": self.name, "life": self.life, "seq": self.seq}
        if op == "join":
            me["attempt"] = self.attempt
        return self.server.send({"op": op, **me, **fields}, is_held=is_held)

    def ask(self, op: str, **fields: object) -> dict[str, Any]:
        answer: dict[str, Any] = self.send(op, **fields).result(0)
        if "error" in answer:
            raise Refused(answer)
        return answer

    def grant(self) -> str:
        answer = self.ask("grant")
        if answer["answer"] == "range":
            self.parts.append(SampleRange.of_plain(answer["range"]))
        return str(answer["answer"])

    def use(self, step: int | None) -> Seen:
        """A range that it holds, or its first part."""
        draw = self.server.draw
        part = self.parts.pop()
        used = part.first(draw.choice([len(part), draw.randint(1, len(part))]))
        self.ask("done", range=used.to_plain(), step=step)
        if used != part:
            self.parts.insert(0, SampleRange(used.stop, part.stop, part.epoch, part.partition))
        draw.shuffle(self.parts)
        if step is not None:
            before = self.unsaid[1] if self.unsaid[0] == step else Counter()
            self.unsaid = step, before + Counter(positions(used))
        return Counter(positions(used))

    def finish(self, step: int) -> None:
        self.ask("finish", step=step)
        self.unsaid = (-1, Counter())

    def commit(self, step: int) -> Future[Plain]:
        self.finish(step)
        return self.send("commit", is_held=True, step=step)


class History:
    """One job, from its start to the end of its data; raises AssertionError where a sample is lost or comes
    twice."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.source, self.expected = random_source(draw)
        self.policy = PoisonPolicy(tries=draw.choice([1, 2, 3]), skip=True, in_a_row=draw.choice([2, 1000]))
        self.server = Server(self.source, self.policy, draw)

    def check(self, seen: Seen, in_doubt: Seen | None = None) -> None:
        """What the model saw is what it should have, or what was skipped."""
        for part in self.server.book.skipped:
            seen.update(positions(part))
        is_exact = not self.expected - seen and not seen - self.expected - (in_doubt or Counter())
        assert is_exact, f"lost {self.expected - seen}, twice {seen - self.expected}"

    def grow(self, worker: Worker, *, closed: bool = False) -> None:
        if isinstance(self.source, PartitionRanges):
            stops = Counter(name for name, _, _ in self.expected)
            worker.ask("extend", stops=dict(stops), closed=closed)

    def silence(self, name: str) -> None:
        self.server.send({"op": "silent", "worker": name})


class Preparation(History):
    """Workers without a model: a range counts when it is done. Some ranges are bad, some workers broken."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__(draw)
        self.seen: Seen = Counter()
        self.attempt: int | None = draw.choice([None, 0])
        self.asleep: list[Worker] = []
        self.broken: set[str] = set()
        self.bad = {position for position in self.expected if draw.random() < draw.choice([0, 0.03])}
        self.was_idle, self.was_bad = False, self.bad
        self.workers: list[Worker] = []
        # A worker that is not broken lives all the time in most histories.
        self._start(is_broken=False)
        for _ in range(draw.randint(0, 3)):
            self._start(is_broken=draw.random() < 0.4)

    def run(self) -> None:
        if isinstance(self.source, PartitionRanges):
            assert self.workers[0].grant() == "wait"  # nothing is there yet, which is not the end
        events = [self._work] * 8 + [self._lose, self._wake, self._grow, self._back, self._end_hold]
        events += [self._begin_attempt] * (self.draw.random() < 0.3) + [self._idle] * (
            self.draw.random() < 0.1
        )
        for _ in range(self.draw.randint(1, EVENTS)):
            self.draw.choice(events)()
        self._finish()
        for part in self.server.book.skipped:
            is_bad = any(position in self.was_bad for position in positions(part))
            # By as many broken workers as it takes, or because the others asked for nothing.
            is_condemned = len(self.broken) >= self.policy.tries or self.was_idle
            assert is_bad or is_condemned, f"{part} was skipped, which a good worker could use"
        self.check(self.seen)

    def _start(self, *, is_broken: bool, name: str = "") -> None:
        worker = Worker(name or f"w{self.draw.random()}", self.server, self.attempt)
        self.workers.append(worker)
        if is_broken:
            self.broken.add(worker.life)

    def _work(self) -> bool:
        """A worker takes a range, and uses it or not; returns whether it was told the end."""
        worker = self.draw.choice(self.workers)
        is_broken = worker.life in self.broken
        try:
            said = worker.grant()
        except Refused as refused:
            self._repair(worker, refused)
            return False
        assert said != "end" or not any(other.parts for other in self.workers)
        while worker.parts and self.draw.random() < 0.9:
            part = worker.parts[-1]
            if is_broken or self.bad.intersection(positions(part)):
                worker.parts.pop()
                worker.ask("failed", range=part.to_plain(), reason="no such line")
            else:
                self.seen += worker.use(None)
        return said == "end"

    def _repair(self, worker: Worker, refused: Refused) -> None:
        if refused.kind == "BrokenWorker":
            assert worker.life in self.broken, refused.text
            self.workers.remove(worker)
            self._start(is_broken=False, name=worker.name)
        else:  # too many ranges in a row were skipped
            assert refused.kind == "PoisonedRange", refused.text
            self.bad = set()
            self._begin_attempt(self.server.book.attempt + 1)

    def _back(self) -> None:
        worker = self.draw.choice(self.workers)
        if worker.parts:
            worker.ask("give_back", range=worker.parts.pop().to_plain())

    def _grow(self) -> None:
        self.grow(self.draw.choice(self.workers))

    def _end_hold(self) -> None:
        self.server.hold_no_longer()

    def _idle(self) -> None:
        self.was_idle = True
        self.server.send({"op": "idle", "worker": self.draw.choice(self.workers).name})

    def _lose(self) -> None:
        """A worker is lost: the server noticed, or another process has its name; it disturbs nobody."""
        lost = self.workers.pop(self.draw.randrange(len(self.workers)))
        has_good = any(worker.life not in self.broken for worker in self.workers)
        before = self.server.book.attempt
        if self.draw.random() < 0.5:
            self.silence(lost.name)
            self.asleep.append(lost)
        if self.draw.random() < 0.5 or not has_good:
            self._start(is_broken=self.draw.random() < 0.4 and has_good, name=lost.name)
        elif lost not in self.asleep:
            self.silence(lost.name)
        assert self.server.book.attempt == before

    def _wake(self) -> None:
        """What a worker that was taken for dead says of its ranges counts for nothing."""
        if self.asleep:
            worker = self.asleep.pop()
            for part in worker.parts:
                answer = worker.send("done", range=part.to_plain(), step=None).result(0)
                assert answer.get("error") == "StaleRange", f"{part} counted for a worker taken for dead"

    def _begin_attempt(self, attempt: int | None = None) -> None:
        """All processes are new ones; without a model, what was done stays done."""
        self.attempt = attempt or self.draw.choice([None, 0, self.server.book.attempt + 1])
        if self.attempt == 0 and self.server.book.attempt > 0:
            self.attempt = None
        old, self.workers = self.workers, []
        for number, worker in enumerate(old):
            self._start(is_broken=number > 0 and self.draw.random() < 0.3, name=worker.name)

    def _finish(self) -> None:
        self.grow(self.workers[0], closed=True)
        for _ in range(3000):
            if self._work():
                break
            self._wake()
        else:
            raise AssertionError("the end of the data never comes")
        assert all(worker.grant() == "end" for worker in self.workers if worker.life not in self.broken)


class Ranks(History):
    """Ranks that reduce gradients together, and are all started again when one of them dies."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__(draw)
        #: The number of the first step.
        self.first = draw.choice([0, 1])
        self.step = self.first - 1
        #: Whether the server heard nothing of living ranks in this attempt, after a step that is not
        #: committed.
        self.was_away = False
        #: Used by ranks of which the server heard nothing between a collective and the word that it is over,
        #: while others lived.
        self.in_doubt: Seen = Counter()
        #: Step -> what it used; what the model saw up to here is that of the steps before.
        self.model: dict[int, Seen] = {}
        self.checkpoints: list[tuple[int, Any, dict[int, Seen]]] = []
        #: How the attempt is passed: by the server, counted by hand, or by hand and too low at times.
        self.numbering = draw.choice(["server", "server", "hand", "equal"])
        self.by_hand = 0
        #: How many ranks each start has; 0: any number of them.
        self.world = draw.choice([0, 0, 2, 3])
        self.workers: list[Worker] = []
        self.deaths = 0
        self.says_scratch = False
        self.says_rollback = False
        self.refusals: Counter[str] = Counter()

    def run(self) -> None:
        rounds = self.draw.randint(1, 6)
        for number in range(1000):
            is_last = number >= rounds
            self.mortality = 0.0 if is_last else self.draw.choice([0.01, 0.05, 0.2])
            try:
                self._start_ranks(is_last)
                self._train()
                break
            except Died:
                self.deaths += 1
            except Refused as refused:
                # It is refused by name, and the ranks do what the text says.
                self._check_refusal(refused, number - rounds)
                self._heed()
            if is_last or self.draw.random() < 0.2:
                for name in [*self.server.keeper.workers]:  # their leases end
                    self.silence(name)
        else:
            raise AssertionError("the job never ends")
        self.check(sum(self.model.values(), Counter()), self.in_doubt & self.server.returned)

    def _check_refusal(self, refused: Refused, last: int) -> None:
        assert refused.kind in ("ConfigError", "StaleRange"), refused.text
        assert last < 4, f"it is refused for ever: {refused.text}"
        # Ranks whose attempts the server counts, and that say where their model is, are never refused.
        # But for those of which the server heard nothing.
        is_away = self.was_away and "was silent for too long" in refused.text
        assert self.numbering != "server" or not self.says_rollback or is_away, refused.text
        # Nor, before the first commit, those of a job that has the same ranks in each start.
        is_first = not self.server.book.to_plain()["has_models"]
        assert not (self.numbering == "server" and self.world and is_first and not is_away), refused.text
        self.refusals[re.sub(r"[\d.']+", "#", refused.text)[:40]] += 1

    def _heed(self) -> None:
        self.says_scratch = True
        if self.numbering != "server":
            self.by_hand = self.server.book.attempt + 1

    def _die(self, chance: float = 1.0) -> None:
        if self.draw.random() < self.mortality * chance:
            raise Died

    def _start_ranks(self, is_last: bool) -> None:
        """In any number and order; some ranks come late, or never as the job is killed before."""
        names = [f"rank{number}" for number in range(self.world or self.draw.randint(1, 4))]
        if self.draw.random() < 0.1 and not self.world:
            names = [f"{name}-{self.draw.random()}" for name in names]  # such as pods
        self.draw.shuffle(names)
        in_process = {worker.name: worker for worker in self.workers} if self.numbering == "server" else {}
        is_mixed = self.draw.random() < 0.3
        self.workers = []
        if self.numbering == "hand" or (self.numbering == "equal" and self.draw.random() < 0.3):
            self.by_hand += 1
        number = self.draw.randint(-1, len(self.checkpoints) - 1) if self.draw.random() < 0.5 else -1
        if self.checkpoints and number < 0:
            number = len(self.checkpoints) - 1
        step, state, model = self.checkpoints[number] if number >= 0 else (-1, None, {})
        is_scratch = bool(self.checkpoints) and self.draw.random() < 0.1  # it starts from scratch on purpose
        if is_scratch:
            number, step, state, model = -1, -1, None, {}
        says = state is not None or is_scratch or self.says_scratch or self.draw.random() < 0.5
        self.says_scratch, self.says_rollback = False, says
        self.was_away = False
        self.step, self.model = max(step, self.first - 1), {at: Counter(seen) for at, seen in model.items()}
        self.checkpoints = self.checkpoints[: number + 1] if not is_scratch else []
        late = names[self.draw.randint(1, len(names)) :]
        for name in names:
            if name in late:  # others took ranges already, and wait in the collective of their first step
                for worker in self.workers:
                    self._take(worker)
            self._die()
            if name in in_process and says and is_mixed and self.draw.random() < 0.5:
                worker = in_process[name]
                worker.parts = []
            else:
                worker = Worker(name, self.server, None if self.numbering == "server" else self.by_hand)
            self.workers.append(worker)
            if says:
                worker.ask("rollback", state=state)

    def _take(self, worker: Worker) -> str:
        return worker.grant() if not worker.parts else "range"

    def _train(self) -> None:
        self.grow(self.workers[0], closed=True)
        lag: dict[int, tuple[Worker, Future[Plain]]] = {}
        if self.first and self.step < self.first and not self.checkpoints and self.draw.random() < 0.2:
            for worker in self.workers:  # they save before their first step
                worker.commit(0)
        while True:
            self._lose_network()
            at_end = self._make_step()
            self._lose_network()
            self._answered_late(lag)
            if at_end and self.draw.random() < 0.5:
                self._leave_early()
            if at_end or self.draw.random() < 0.3:
                self._commit(lag, alone=not at_end and self.draw.random() < 0.3)
            self._die()
            if at_end and all(worker.grant() == "end" for worker in self.workers):
                return

    def _lose_network(self) -> None:
        """The server hears nothing of some ranks, or of all, for longer than the lease; they live."""
        if self.draw.random() > 0.2 * self.mortality:
            return
        # A step that was begun and died counts too.
        self.was_away |= max(self.step, self.server.book.used.begun) > self.server.book.committed
        away = self.draw.sample(self.workers, self.draw.randint(1, len(self.workers)))
        for worker in away:
            self.silence(worker.name)
            worker.parts = []  # which is what their next `done` tells them
            self.in_doubt += worker.unsaid[1] if len(away) < len(self.workers) else Counter()

    def _leave_early(self) -> None:
        """Ranks end, which says that their last step is over; others commit it."""
        for worker in self.workers[self.draw.randint(1, len(self.workers)) :]:
            worker.send("leave", finished=True)  # which may arrive twice
            self.workers.remove(worker)

    def _make_step(self) -> bool:
        """One step of all ranks; whether none of them has data."""
        used: Seen = Counter()
        step = self.step + 1
        said: list[str] = []
        for worker in self.draw.sample(self.workers, len(self.workers)):
            self._die(0.3)
            said.append(self._take(worker))
            while worker.parts and self.draw.random() < 0.7:
                used += worker.use(step)
            self._die(0.3)  # between done and the collective
        if not used and not any(worker.parts for worker in self.workers):
            for name in set(self.server.keeper.workers) - {worker.name for worker in self.workers}:
                self.silence(name)  # dead ones, which may hold the rest
            return all(answer == "end" for answer in said)
        self.model[step] = used
        self.step = step
        return False

    def _commit(self, lag: dict[int, tuple[Worker, Future[Plain]]], *, alone: bool) -> None:
        if self.step < self.first or lag:
            return
        step = self.step
        if alone:  # rank 0 waits while the others are in the next step
            lag[step] = (self.workers[0], self.workers[0].commit(step))
            if lag[step][1].done() and self.was_away:  # it does not wait, and its checkpoint is written
                self._answered_late(lag)
            for worker in self.workers[1:]:
                self._die(0.3)
                worker.finish(step)
            self._answered_late(lag)
            return
        answers = []
        for worker in self.draw.sample(self.workers, len(self.workers)):
            self._die(0.3)  # between the collective and the commit, for some ranks
            answers.append(worker.commit(step))
        for name in set(self.server.keeper.workers) - {worker.name for worker in self.workers}:
            self.silence(name)  # dead ones, for which the commit waits
        states = [answer.result(0) for answer in answers]
        self._keep(step, states)

    def _answered_late(self, lag: dict[int, tuple[Worker, Future[Plain]]]) -> None:
        for step in list(lag):
            for name in set(self.server.keeper.workers) - {worker.name for worker in self.workers}:
                self.silence(name)
            self._keep(step, [lag.pop(step)[1].result(0)])

    def _keep(self, step: int, answers: list[Plain]) -> None:
        for answer in answers:
            if "error" in answer:
                raise Refused(dict(answer))
        assert all(answer["state"] == answers[0]["state"] for answer in answers)
        self._die()  # after the commit, before the checkpoint is whole
        used = {at: Counter(seen) for at, seen in self.model.items() if at <= step}
        self.checkpoints = [kept for kept in self.checkpoints if kept[0] < step]
        self.checkpoints.append((step, json.loads(json.dumps(answers[0]["state"])), used))


class Replicas(History):
    """Replicas that reduce gradients together: when one dies, the others go on, and give the model to a new
    one."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__(draw)
        self.step = 0
        self.model: Seen = Counter()
        #: Used by replicas which died after a collective and before they said that it is over.
        self.in_doubt: Seen = Counter()
        #: Life -> what it used last, until it says that the step is over.
        self.unsaid: dict[str, Seen] = {}
        #: Taken for dead, and whether what they had used came back.
        self.asleep: list[tuple[Worker, bool]] = []
        #: Whether replicas without a range in a step say that it is over, and new ones which model they got.
        self.says_finish = draw.random() < 0.7
        self.workers = [Worker(f"r{number}", self.server, 0) for number in range(draw.randint(2, 4))]
        for worker in self.workers if self.says_finish else []:
            worker.ask("rollback", state=None)

    def run(self) -> None:
        self.grow(self.workers[0], closed=True)
        try:
            for number in range(1000):
                if self._make_step(0.1 if number < EVENTS else 0.0):
                    break
            else:
                raise AssertionError("the job never ends")
        except Refused as refused:
            # All that ever said something of the model are gone, and that is refused by name.
            if self.says_finish or "did not say where its model is" not in refused.text:
                raise
            return
        seen = self.model
        for part in self.server.book.skipped:
            seen.update(positions(part))
        twice = seen - self.expected
        assert not self.expected - seen, f"lost {self.expected - seen}"
        if self.says_finish:
            assert not twice - self.in_doubt, f"twice {twice}, and in doubt {self.in_doubt}"
        assert not twice - self.server.returned, f"twice {twice}, and it was not told"

    def _lose(self, worker: Worker) -> None:
        self.workers.remove(worker)
        unsaid = self.unsaid.pop(worker.life, Counter())
        self.in_doubt += unsaid
        how = self.draw.choice(["silent", "new process", "both", "leave"])
        if how in ("silent", "both"):
            self.silence(worker.name)
            self.asleep.append((worker, bool(unsaid)))
        if how == "leave":
            worker.send("leave", finished=False)
        if how != "silent" or not self.workers:
            self.workers.append(Worker(worker.name, self.server, 0))
            if self.draw.random() < 0.2:
                self._check_unplaced(self.workers[-1])
            if self.says_finish:
                self.workers[-1].ask("finish", step=self.step)

    def _check_unplaced(self, worker: Worker) -> None:
        """A new replica that must say where its model is must say so after it was silent, too."""
        try:
            worker.grant()
        except Refused:
            self.silence(worker.name)
            assert "error" in worker.send("grant").result(0), "silence said where a model is"

    def _wake(self) -> None:
        """A replica that was taken for dead learns that its model has what comes again."""
        if self.asleep and self.draw.random() < 0.3:
            worker, has_lost = self.asleep.pop()
            answer = worker.send("finish", step=0).result(0)
            assert not has_lost or answer.get("error") == "StaleRange", answer
            worker.send("leave", finished=False)

    def _make_step(self, mortality: float) -> bool:
        """One step; whether the data end, and all of it is in the model and committed."""
        self._wake()
        step, used, said = self.step + 1, dict[str, Seen](), []
        for worker in self.draw.sample(self.workers, len(self.workers)):
            if len(self.workers) > 1 and self.draw.random() < mortality:
                self._lose(worker)  # before done
                continue
            said.append(worker.grant() if not worker.parts else "range")
            mine: Seen = Counter()
            while worker.parts and self.draw.random() < 0.7:
                mine += worker.use(step)
                self.unsaid.pop(worker.life, None)
            used[worker.life] = mine
        for worker in list(self.workers):
            if len(self.workers) > 1 and self.draw.random() < mortality / 2:
                used.pop(worker.life, None)
                self._lose(worker)  # between done and the collective, which goes on without it
        self.model += sum(used.values(), Counter())
        self.unsaid |= {life: mine for life, mine in used.items() if mine}
        self.step = step
        for worker in self.workers if self.says_finish else []:
            if not used.get(worker.life):
                worker.ask("finish", step=step)
                self.unsaid.pop(worker.life, None)
        lost = False
        for worker in list(self.workers):
            if len(self.workers) > 1 and self.draw.random() < mortality / 2:
                self._lose(worker)  # between the collective and what shows that it passed that
                lost = True
        at_end = bool(said) and all(answer == "end" for answer in said) and not lost
        if at_end or self.draw.random() < 0.3:
            answers = []
            for worker in self.draw.sample(self.workers, len(self.workers)):
                if len(self.workers) > 1 and self.draw.random() < mortality / 2:
                    self._lose(worker)
                    at_end = False
                    continue
                answers.append(worker.commit(step))
                self.unsaid.pop(worker.life, None)
            for name in set(self.server.keeper.workers) - {worker.name for worker in self.workers}:
                self.silence(name)
            states = [answer.result(0) for answer in answers]
            assert all("state" in state and state == states[0] for state in states), states
            # Ranges may have come back after the end was said; the state names them.
            at_end = at_end and not any(state["state"]["free"] for state in states)  # type: ignore[index]
        return at_end and not any(worker.parts for worker in self.workers)


def history(seed: int) -> History:
    draw = random.Random(seed)  # noqa: S311 - histories, no secrets
    return draw.choice([Preparation, Ranks, Ranks, Replicas])(draw)


def main() -> None:
    count, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    kinds: Counter[str] = Counter()
    kills = deaths = 0
    for seed in range(first, first + count):
        found = history(seed)
        try:
            found.run()
        except BaseException:
            print(f"history {seed}, {type(found).__name__}", flush=True)
            raise
        kinds[type(found).__name__] += 1
        kills += found.server.kills
        deaths += getattr(found, "deaths", 0)
    print(
        f"{count} histories {dict(kinds)}, {kills} kills of the server, {deaths} of all ranks: nothing lost"
    )


if __name__ == "__main__":
    main()
