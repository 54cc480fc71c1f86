# SPDX-License-Identifier: Apache-2.0
"""The book of ranges: which range is free, which a worker holds, and which is in the model.

A pure machine: no clock, no I/O. Each call takes effect wholly or raises and changes nothing.

    free --grant--> held --done(step)--> used in a step --commit(step)--> in the checkpoint of that step
      ^              |                        |                              |
      +- give_back, leave, failed, a new attempt, a lost worker  rollback(state) of an older checkpoint

Invariant: each position that was named is in exactly one of `free`, `held`, `used` (in a step that is not
committed), skipped (by policy, and counted) or counted (all others). `commit(step)` gives the state that
belongs into the checkpoint of that step: it says what the model of that checkpoint was *not* trained on. So
whichever checkpoint a job goes on from, however old, `rollback(its state)` frees exactly what that model
lacks, and the book needs no history.

A range used without a step counts at once: for programs without a model, such as data preparation.

`commit(step)` waits until the step is over on each worker that used ranges in it. A worker that is lost
before has put them into no model for sure, so they are free again: see `resiliency.data.dispatch.used`.

The members of an attempt take part in each step, with ranges or without: a step that is over on one of them
is in the model of all. A member that is silent while steps are not committed is lost: when the others are
lost too, these steps come back, and it must not go on with a model that has them.

Attempts: a new attempt frees at once what the attempts before held, or used in a step that was not committed.
Where a checkpoint may exist, it gets no range before `rollback` says where its model is: the checkpoint, or
the start. A new process of a worker that was in the attempt begins the next one if the model of the others
went on; else it only frees what the process before held or used.

The standard library only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain
from typing import cast

from resiliency.data.dispatch.failures import Failures, PoisonPolicy, Start, start_of
from resiliency.data.dispatch.ranges import (
    Cursor,
    PartitionRanges,
    Plain,
    RangeSource,
    SampleRange,
    coalesced,
)
from resiliency.data.dispatch.used import UsedRanges
from resiliency.data.progress import check_whole
from resiliency.errors import ConfigError, DataError, InternalError

_VERSION = 1
#: Commits whose state is kept, for ranks that ask for it later and for `rollback_to`.
_COMMITS_KEPT = 16


class StaleRange(DataError):
    """The worker does not hold this range any more: it counts as another one's, or will be."""


class Answer(Enum):
    """Why no range is granted."""

    #: Others hold ranges, which may come back, or more may be added.
    WAIT = "wait"
    #: Nothing is free, held or unread, and nothing will be.
    END = "end"


@dataclass(frozen=True)
class _HeldRange:
    part: SampleRange
    worker: str


class Book:
    """See the module. Workers are named by texts; attempts and steps are whole numbers."""

    def __init__(self, source: RangeSource, policy: PoisonPolicy | None = None) -> None:
        self.source = source
        self.attempt = 0
        #: Why it began.
        self._reason = ""
        #: Returned ranges, taken before new ones.
        self.free: deque[SampleRange] = deque()
        #: Used in a step that is not committed.
        self.used = UsedRanges()
        #: Left out by policy, or as the rest of a loader with `drop_last`.
        self.skipped: list[SampleRange] = []
        #: Last committed step, -1 before the first, and the worker that said so.
        self.committed = -1
        self._committed_by = ""
        self.failures = Failures(policy or PoisonPolicy())
        self._held: dict[tuple[str, Start], _HeldRange] = {}
        self._cursor: Cursor = {}
        self._commits: dict[int, Plain] = {}
        #: Whether ranges count by steps of a model, whether one may exist that this book does not know, such
        #: as that of a checkpoint, and the state that the model of this attempt began with.
        self._has_steps = False
        self._has_models = False
        self._placed: Plain | None = None
        #: Whether a step 0 used ranges: else it is that of a model that was saved before its first step.
        self._is_from_0 = False
        #: Workers that took a range since then, and that named that state or were there in a step from it.
        self._took: set[str] = set()
        self._named: set[str] = set()
        #: Workers that joined in this attempt, and those of them that did not leave.
        self._joined: set[str] = set()
        self._present: set[str] = set()
        #: Those of them that joined when its model had gone on, and did not say that they have it.
        self._unplaced: set[str] = set()
        #: Workers that were silent while steps were not committed, which may come back.
        self._lost: set[str] = set()

    @property
    def held(self) -> list[_HeldRange]:
        """What workers hold."""
        return list(self._held.values())

    # -- what workers say

    def grant(self, worker: str, attempt: int) -> SampleRange | Answer:
        """The next range for a worker.

        Raises:
            StaleRange: of an attempt that is over, or the ranges that this worker used came back.
            PoisonedRange: a range failed too often; no worker gets another one.
            BrokenWorker: others used the ranges that this worker failed.
            ConfigError: `rollback` has not said where the model of this attempt is.
        """
        self._check_attempt(attempt)
        self._check_not_lost(worker)
        self.failures.check(worker, attempt)
        self._check_placed(worker)
        part = self._next_for(worker)
        if part is None:
            is_end = not self.free and not self._held and self.source.ended(self._cursor)
            return Answer.END if is_end else Answer.WAIT
        self._held[worker, start_of(part)] = _HeldRange(part, worker)
        self._took.add(worker)
        self.failures.add_reader(worker)
        return part

    def done(self, worker: str, attempt: int, part: SampleRange, step: int | None = None) -> None:
        """A worker used the first part of a range that it holds, or all of it.

        To be said before the collective that ends the step: what is said later came too late.

        Args:
            step: that it is used in; None: it counts at once.
        Raises:
            StaleRange: the worker does not hold it, so what it made of it must not count.
            ConfigError: the step is over or committed already.
        """
        self._check_attempt(attempt)
        held = self._held_of(worker, part)
        if step is not None:
            self._check_not_lost(worker)
            if check_whole("step", step) <= self.committed:
                raise ConfigError(
                    f"range {part} was used in step {step}, and step {self.committed} is committed without "
                    f"it{self._committed_by and f', as worker {self._committed_by!r} said'}.",
                    hint="Say done before the collective that ends the step, and commit after it. All "
                    "workers count the same steps, those of the optimizer.",
                )
            if step <= self.used.over:
                raise ConfigError(
                    f"range {part} was used in step {step}, and step {self.used.over} is over on "
                    f"{f'worker {self.used.over_on!r}' if self.used.over_on else 'a worker that is gone'}.",
                    hint="Say done before the collective that ends the step. All workers count the same "
                    "steps, those of the optimizer. A model that starts again says rollback first: with the "
                    "state of its checkpoint, or None.",
                )
            self._count_by_steps()
            over = self.used.over
            self.used.add_range(worker, step, part)
            self._is_from_0 |= step == 0
            self._note_members(over)
        del self._held[worker, start_of(part)]
        rest = None
        if part.stop < held.stop:
            rest = SampleRange(part.stop, held.stop, part.epoch, part.partition)
            self._held[worker, start_of(rest)] = _HeldRange(rest, worker)
        self.failures.add_use(worker, part, rest)

    def finish_step(self, worker: str, attempt: int, step: int) -> None:
        """The collective that ends a step is over on a worker: what it used until then is in the model.

        Raises:
            StaleRange: the worker was silent for too long, and its steps may come back.
        """
        self._check_attempt(attempt)
        self._check_not_lost(worker)
        if check_whole("step", step) < self.used.over or worker not in self._unplaced:
            self._check_placed(worker)
        self._count_by_steps()
        over = self.used.over
        self.used.finish_step(worker, step)
        self._unplaced.discard(worker)
        self._named.add(worker)
        self._note_members(over)

    def failed(self, worker: str, attempt: int, part: SampleRange, reason: str) -> None:
        """A worker could not use a range that it holds: another one tries it, or what the policy says.

        Raises:
            StaleRange: the worker does not hold it.
        """
        self._check_attempt(attempt)
        whole = self._held_of(worker, part)
        del self._held[worker, start_of(whole)]
        if self.failures.add_failure(worker, whole, str(reason)):
            self.skipped.append(whole)
        else:
            self.free.appendleft(whole)

    def give_back(self, worker: str, attempt: int, part: SampleRange) -> None:
        """A worker will not use what is left of a range that it holds.

        Raises:
            StaleRange: the worker does not hold it.
        """
        self._check_attempt(attempt)
        whole = self._held_of(worker, part)
        del self._held[worker, start_of(whole)]
        self.free.appendleft(whole)

    def drop(self, worker: str, attempt: int, part: SampleRange) -> None:
        """What is left of a range is left out on purpose, and counted as skipped.

        Raises:
            StaleRange: the worker does not hold it.
        """
        self._check_attempt(attempt)
        whole = self._held_of(worker, part)
        del self._held[worker, start_of(whole)]
        self.skipped.append(whole)

    def join(self, worker: str) -> list[SampleRange]:
        """Another process has this name now; returns what came back that the one before had used."""
        back = self._forget_worker(worker)
        self._lost.discard(worker)
        self._joined.add(worker)
        self._present.add(worker)
        if self._went_on():
            self._unplaced.add(worker)
        self.failures.add_reader(worker)
        return back

    def leave(self, worker: str, *, is_finished: bool = False) -> list[SampleRange]:
        """A worker ended, and all that it holds is free.

        Args:
            is_finished: the steps in which it used ranges are over.
        Returns:
            What came back that it had used.
        """
        if is_finished:
            over = self.used.over
            self.used.finish_step(worker, self.used.step_of(worker))
            self._note_members(over)
        back = self._forget_worker(worker)
        # Its process may go on with the model, under another name or this one.
        self._has_models |= bool(back)
        return back

    def fall_silent(self, worker: str) -> list[SampleRange]:
        """The same for a worker that may live: it may go on, but not with what it held, nor with a model of
        steps that are not committed."""
        is_ahead = max(self.used.over, self.used.begun) > self.committed
        if is_ahead and worker not in self._unplaced:
            self._lost.add(worker)
            return self._forget_worker(worker)
        self._free_held(worker)
        self.failures.forget_worker(worker)
        if worker in self._took:
            self._took.discard(worker)
            self._named.add(worker)
        return []

    # -- what the job says

    def attempt_for(self, worker: str) -> int:
        """The attempt of a new process that passes no number: see the module."""
        if self._has_steps and worker in self._joined and self._has_others(worker) and self._went_on():
            return self.attempt + 1
        return self.attempt

    def attempt_for_rollback(self, state: Mapping[str, object] | None, worker: str) -> int:
        """The attempt of a worker that goes back to a state and passes no number: this one for a late rank of
        it; the next one, if the model of this one is another or went on.

        Raises:
            ConfigError: the state is of other data, or damaged.
        """
        there = state_of_start(self.source.identity()) if state is None else self._checked(state)
        is_late = self._placed == there or (self._placed is None and worker not in self._took)
        return self.attempt if is_late and not self._went_on() else self.attempt + 1

    def new_attempt(self, attempt: int, reason: str = "") -> None:
        """Free at once what attempts before this one held, or used without a commit.

        Args:
            reason: for workers of the attempts before, which are told.
        Raises:
            StaleRange: the attempt is over.
        """
        if check_whole("attempt", attempt) <= self.attempt:
            self._check_attempt(attempt)
            return
        self.attempt, self._reason = attempt, reason
        self.free.extendleft(reversed(coalesced(self._lacking(self.committed))))
        self._forget_attempt()
        self._joined.clear()
        self._present.clear()
        self._unplaced.clear()
        self._lost.clear()
        self.failures.forget_attempt()

    def unfinished(self, step: int, attempt: int) -> list[str]:
        """Workers that a commit of this step waits for.

        Raises:
            StaleRange: of an attempt that is over.
        """
        self._check_attempt(attempt)
        return [] if step in self._commits else self.used.unfinished(step)

    def commit(self, step: int, attempt: int, worker: str = "") -> Plain:
        """The state for the checkpoint of a step: all that was used until then is in its model.

        Ranks that ask for the same step get the same state; the last 16 are kept. Say it once `unfinished` is
        empty.

        Args:
            worker: who says so.
        Raises:
            StaleRange: of an attempt that is over.
            ConfigError: a later step was committed before, or `rollback` has not said where the model of
                this attempt is.
        """
        self._check_attempt(attempt)
        if check_whole("step", step) in self._commits:
            return self._commits[step]
        self._check_placed("")
        if step < self.committed:
            raise ConfigError(f"step {step} cannot be committed after step {self.committed}.")
        if waiting := self.unfinished(step, attempt):
            raise InternalError(f"step {step} is not over on {waiting}.")
        self._count_by_steps()
        state = self._state(step)
        self.used.commit_step(step)
        self.committed, self._committed_by = step, worker
        self._has_models = True
        self._commits[step] = state
        for old in list(self._commits)[:-_COMMITS_KEPT]:
            del self._commits[old]
        return state

    def rollback(
        self, attempt: int, state: Mapping[str, object] | None, worker: str = ""
    ) -> list[SampleRange]:
        """The model is that of this state: what it was not trained on is free. All workers may say so.

        A job that goes back does it in a new attempt, see `attempt_for_rollback`, or passes a higher number.

        Args:
            state: of `commit`; None: the model starts from scratch.
            worker: who says so.
        Returns:
            What this worker had used since then in the same attempt, and came back.
        Raises:
            StaleRange: the attempt is over.
            ConfigError: another state was named in this attempt, or its model went on from it; or the state
                is of other data. The text has both values.
        """
        there = state_of_start(self.source.identity()) if state is None else self._checked(state)
        if check_whole("attempt", attempt) == self.attempt and self._placed is not None:
            if self._placed != there:
                raise ConfigError(
                    f"attempt {attempt} is at step {self._placed['step']}, and step {there['step']} was "
                    "named.",
                    hint="All ranks restore the same checkpoint. To go back to another step, begin a new "
                    "attempt: pass a higher number.",
                )
            # A late rank cannot be the reason: it takes part in each step. To go on would lose ranges.
            if self._went_on():
                raise ConfigError(
                    f"attempt {attempt} went on from step {there['step']} to step {self._last_step()}, and "
                    f"step {there['step']} was named again.",
                    hint="To go back, begin a new attempt: pass a higher number, or none in new processes.",
                )
            back = self._forget_worker(worker)  # as another process of that name does
            self._placed = there
            # Of a save before the first step, and of a step 0 without a range, which a job that counts from 0
            # makes anew.
            self._commits = {
                step: kept for step, kept in self._commits.items() if step <= cast(int, there["step"])
            }
            self.committed = min(self.committed, cast(int, there["step"]))
            self.used.begin_after(cast(int, there["step"]))
            self._add_member(worker)
            return back
        self.new_attempt(attempt, f"worker {worker!r} said rollback to step {there['step']}")
        self._forget_attempt()
        self._placed = there
        self._unplaced.clear()
        self._add_member(worker)
        self._has_steps = True
        self._has_models |= state is not None
        self.committed, self._committed_by = cast(int, there["step"]), ""
        if self._commits.get(self.committed) == there:
            self._commits = {step: kept for step, kept in self._commits.items() if step <= self.committed}
        else:  # what is kept may be of another lineage
            self._commits = {self.committed: there} if self.committed >= 0 else {}
        self._cursor = dict(cast(Cursor, there["cursor"]))
        self.free = deque(map(SampleRange.of_plain, cast("list[object]", there["free"])))
        self.skipped = [SampleRange.of_plain(plain) for plain in cast("list[object]", there["skipped"])]
        return []

    def rollback_to(self, attempt: int, step: int, worker: str = "") -> list[SampleRange]:
        """`rollback` to the state of a step that was committed here, for jobs that keep no state of the book.

        Raises:
            ConfigError: its state is not kept; the text says which are.
        """
        return self.rollback(attempt, self.state_of(step), worker)

    def has_state(self, state: Mapping[str, object]) -> bool:
        """Whether `rollback_to` its step is the same as `rollback` to it."""
        step = state.get("step")
        return isinstance(step, int) and step >= 0 and self._commits.get(step) == state

    def state_of(self, step: int) -> Plain:
        """The state of a step that was committed here.

        Raises:
            ConfigError: it is not kept; the text says which are.
        """
        if step not in self._commits:
            raise ConfigError(
                f"the state of step {step} is not kept; kept are steps {sorted(self._commits)}.",
                hint="Call rollback with the state in the checkpoint.",
            )
        return self._commits[step]

    def extend(self, stops: Mapping[str, int], *, closed: bool = False) -> None:
        """Partitions grew, or will not grow any more.

        Raises:
            ConfigError: the source has no partitions.
            DataError: one became shorter.
        """
        if not isinstance(self.source, PartitionRanges):
            raise ConfigError(f"a {type(self.source).__name__} has no partitions that grow.")
        self.source = self.source.extended(stops, closed=closed)

    # -- as plain values

    def to_plain(self) -> Plain:
        """All of it, for `of_plain`; what a checkpoint holds is less, see `commit`."""
        return {
            "version": _VERSION,
            "source": self.source.identity(),
            "stops": dict(self.source.stops) if isinstance(self.source, PartitionRanges) else {},
            "closed": isinstance(self.source, PartitionRanges) and self.source.closed,
            "attempt": self.attempt,
            "reason": self._reason,
            "committed": self.committed,
            "committed_by": self._committed_by,
            "cursor": self._cursor,
            "free": [part.to_plain() for part in self.free],
            "held": [[held.worker, held.part.to_plain()] for held in self.held],
            "used": self.used.to_plain(),
            "skipped": [part.to_plain() for part in self.skipped],
            "commits": list(self._commits.values()),
            "failures": self.failures.to_plain(),
            "has_steps": self._has_steps,
            "has_models": self._has_models,
            "placed": self._placed,
            "is_from_0": self._is_from_0,
            "took": sorted(self._took),
            "named": sorted(self._named),
            "joined": sorted(self._joined),
            "present": sorted(self._present),
            "unplaced": sorted(self._unplaced),
            "lost": sorted(self._lost),
        }

    @classmethod
    def of_plain(
        cls, plain: Mapping[str, object], source: RangeSource, policy: PoisonPolicy | None = None
    ) -> Book:
        """Partitions reach as far as they did then, whatever `source` says; see `continue_with`.

        Raises ConfigError: it is the book of another source; the text has both values.
        """
        book = cls(source, policy)
        book._check_source(plain)
        if isinstance(source, PartitionRanges):
            stops = cast("dict[str, int]", plain["stops"])
            book.source = replace(source, stops=stops, closed=bool(plain["closed"]))
        book.attempt, book._reason = cast(int, plain["attempt"]), cast(str, plain["reason"])
        book.committed, book._committed_by = cast(int, plain["committed"]), cast(str, plain["committed_by"])
        book._cursor = cast(Cursor, plain["cursor"])
        book.free = deque(map(SampleRange.of_plain, cast("list[object]", plain["free"])))
        for worker, held in cast("list[tuple[str, object]]", plain["held"]):
            part = SampleRange.of_plain(held)
            book._held[worker, start_of(part)] = _HeldRange(part, worker)
        book.used = UsedRanges.of_plain(cast(Plain, plain["used"]))
        book.skipped = [SampleRange.of_plain(part) for part in cast("list[object]", plain["skipped"])]
        book._commits = {cast(int, kept["step"]): kept for kept in cast("list[Plain]", plain["commits"])}
        book.failures.restore(cast(Plain, plain["failures"]))
        book._has_steps = bool(plain["has_steps"])
        book._has_models = bool(plain["has_models"])
        book._placed = cast("Plain | None", plain["placed"])
        book._is_from_0 = bool(plain["is_from_0"])
        book._took = set(cast("list[str]", plain["took"]))
        book._named = set(cast("list[str]", plain["named"]))
        book._joined = set(cast("list[str]", plain["joined"]))
        book._present = set(cast("list[str]", plain["present"]))
        book._unplaced = set(cast("list[str]", plain["unplaced"]))
        book._lost = set(cast("list[str]", plain["lost"]))
        return book

    def continue_with(self, source: RangeSource, policy: PoisonPolicy) -> None:
        """From now on partitions reach as far as `source` says where that is farther, and `policy` is this.

        Raises:
            DataError: partitions grew after they were closed.
        """
        self.failures.policy = policy
        if isinstance(self.source, PartitionRanges) and isinstance(source, PartitionRanges):
            known = self.source.stops
            stops = {name: max(stop, known.get(name, 0)) for name, stop in source.stops.items()}
            self.extend(stops, closed=source.closed)

    # -- inside

    def _next_for(self, worker: str) -> SampleRange | None:
        for number, part in enumerate(self.free):
            if self.failures.may_take(worker, part):
                del self.free[number]
                return part
        if not self.failures.may_take(worker, None) or not (found := self.source.next_range(self._cursor)):
            return None
        part, self._cursor = found
        return part

    def _forget_worker(self, worker: str) -> list[SampleRange]:
        """All that a worker holds is free, and what no model has of what it used; returns the latter."""
        has_others = self._has_others(worker)
        self._free_held(worker)
        back = self.used.forget_worker(worker, has_others=has_others)
        self.free.extendleft(reversed(coalesced(back)))
        for members in (self._took, self._named, self._present, self._unplaced):
            members.discard(worker)
        self.failures.forget_worker(worker)
        if not has_others:  # the model of this attempt is gone
            self._placed, self._is_from_0 = None, False
            if not self._has_models:
                self._unplaced.clear()
        return back

    def _free_held(self, worker: str) -> None:
        if worker in self._took:
            held = [held.part for held in self._held.values() if held.worker == worker]
            for part in held:
                del self._held[worker, start_of(part)]
            self.free.extendleft(reversed(held))

    def _has_others(self, worker: str) -> bool:
        """Whether another worker may have the model of this attempt."""
        return any(other != worker for other in chain(self._took, self._named))

    def _add_member(self, worker: str) -> None:
        """A worker has the state that this attempt began with."""
        for members in (self._named, self._joined, self._present):
            members.add(worker)
        self._lost.discard(worker)
        self._unplaced.discard(worker)

    def _note_members(self, over: int) -> None:
        """A step that is over on one member is in the model of all that were there.

        Args:
            over: the last step that was over before.
        """
        if self.used.over > over:
            self._named |= self._present - self._unplaced

    def _forget_attempt(self) -> None:
        self._placed, self._is_from_0 = None, False
        self._held.clear()
        self.used.clear()
        self._took.clear()
        self._named.clear()

    def _went_on(self) -> bool:
        """Whether the model has more than the state that this attempt began with."""
        if self._placed is None:
            return False
        # A job that saves or loads its state before its first step commits step 0.
        first = 0 if self._is_from_0 else 1
        return self._last_step() >= max(first, cast(int, self._placed["step"]) + 1)

    def _last_step(self) -> int:
        return max(self.committed, self.used.over)

    def _state(self, step: int) -> Plain:
        return {
            "version": _VERSION,
            "source": self.source.identity(),
            "step": step,
            "cursor": dict(self._cursor),
            "free": [part.to_plain() for part in coalesced([*self.free, *self._lacking(step)])],
            "skipped": [part.to_plain() for part in self.skipped],
        }

    def _lacking(self, step: int) -> list[SampleRange]:
        """What was named, is not free, and is not in the model of a step that is not yet committed."""
        return [held.part for held in self._held.values()] + self.used.after(step)

    def _count_by_steps(self) -> None:
        self._has_steps = True
        if self._placed is None:  # nothing was restored
            self._placed = state_of_start(self.source.identity())

    def _checked(self, state: Mapping[str, object]) -> Plain:
        """A state of a checkpoint, if it is one of this source, and nothing that only looks like one."""
        self._check_source(state)
        try:
            cursor = {str(key): check_whole("the cursor", n) for key, n in _mapping(state["cursor"]).items()}
            free = [SampleRange.of_plain(list(part)) for part in _list(state["free"])]
            skipped = [SampleRange.of_plain(list(part)) for part in _list(state["skipped"])]
            step = -1 if state["step"] == -1 else check_whole("step", state["step"])
        except (KeyError, TypeError) as error:
            raise ConfigError(f"the state of the book of ranges is not whole: {error!r}.") from None
        return {
            "version": _VERSION,
            "source": self.source.identity(),
            "step": step,
            "cursor": cursor,
            "free": [part.to_plain() for part in free],
            "skipped": [part.to_plain() for part in skipped],
        }

    def _check_source(self, state: Mapping[str, object]) -> None:
        if state.get("version") != _VERSION or not isinstance(theirs := state.get("source"), Mapping):
            raise ConfigError(
                f"the state of the book of ranges has version {state.get('version')!r}, and this release "
                f"reads version {_VERSION}.",
                hint=f"Its keys are {sorted(map(str, state))}.",
            )
        ours = self.source.identity()
        differing = [
            f"{name} {theirs.get(name)!r} in the state and {ours.get(name)!r} here"
            for name in sorted(theirs.keys() | ours.keys())
            if theirs.get(name) != ours.get(name)
        ]
        if differing:
            raise ConfigError(
                "the state of the book of ranges belongs to other ranges: " + "; ".join(differing) + ".",
                hint="Construct the source as it was when the state was saved, or start from scratch.",
            )

    def _check_attempt(self, attempt: int) -> None:
        if attempt < self.attempt:
            raise StaleRange(
                f"attempt {attempt} is over: attempt {self.attempt} has begun"
                f"{self._reason and ', as '}{self._reason}.",
                hint="This process belongs to the attempt before; end it.",
                attempt=attempt,
            )
        if attempt > self.attempt:
            raise ConfigError(f"attempt {attempt} has not begun; this is attempt {self.attempt}.")

    def _check_not_lost(self, worker: str) -> None:
        if worker in self._lost:
            raise StaleRange(
                f"worker {worker!r} was silent for too long while steps were not committed: ranges that its "
                "model has may come again.",
                hint="Load the checkpoint again, and say rollback with its state in a new attempt.",
                worker=worker,
            )

    def _check_placed(self, worker: str) -> None:
        if worker in self._unplaced:
            raise ConfigError(
                f"worker {worker!r} did not say where its model is, and step {self._last_step()} is over on "
                f"the others of attempt {self.attempt}, as far as is known.",
                hint="Call rollback with the state of the checkpoint that was restored, or with None if the "
                "model starts from scratch. A replica that got its model from another one calls "
                "finish_step with the step of that model.",
            )
        if self._has_models and self._placed is None:
            raise ConfigError(
                f"attempt {self.attempt} did not say where its model is, and ranges were counted by steps of "
                "a model before.",
                hint="Call rollback with the state of the checkpoint that was restored, or with None if the "
                "model starts from scratch.",
            )

    def _held_of(self, worker: str, part: SampleRange) -> SampleRange:
        held = self._held.get((worker, start_of(part)))
        if held is None or part.stop > held.part.stop:
            raise StaleRange(
                f"worker {worker!r} does not hold range {part}: it was given back or went to another worker.",
                hint="What was made of it must not count.",
                worker=worker,
            )
        return held.part


def state_of_start(source: Mapping[str, object]) -> Plain:
    """The state of a model that was trained on nothing, for a source of this identity."""
    return {"version": _VERSION, "source": dict(source), "step": -1, "cursor": {}, "free": [], "skipped": []}


def _mapping(value: object) -> Mapping[object, object]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{value!r} is no mapping")
    return value


def _list(value: object) -> list[list[object]]:
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{value!r} is no list")
    return list(value)
