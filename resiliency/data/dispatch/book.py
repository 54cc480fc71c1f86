# SPDX-License-Identifier: Apache-2.0
"""The book of ranges: which range is free, which a worker holds, and which is in the model.

A pure machine: no clock, no I/O. Each call takes effect wholly or raises and changes nothing.

    free --grant--> held --done(step)--> used in a step --commit(step)--> in the checkpoint of that step
      ^              |                        |                              |
      +- give_back, leave, failed, a new attempt             rollback(state) +-- of an older checkpoint

Invariant: each position that was named is in exactly one of `free`, `held`, `used` (in a step that is not
committed), skipped (by policy, and counted) or counted (all others). `commit(step)` gives the state that
belongs into the checkpoint of that step: it says what the model of that checkpoint was *not* trained on. So
whichever checkpoint a job goes on from, however old, `rollback(its state)` frees exactly what that model
lacks, and the book needs no history.

A range used without a step counts at once: for programs without a model, such as data preparation.

Attempts: a new attempt frees at once what the attempts before held, or used in a step that was not committed.
Where steps were counted, it gets no range before `rollback` says where its model is: the checkpoint, or the
start.

The standard library only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import cast

from resiliency.data.dispatch.ranges import (
    Cursor,
    PartitionRanges,
    Plain,
    RangeSource,
    SampleRange,
    coalesced,
)
from resiliency.data.progress import check_whole
from resiliency.errors import ConfigError, DataError

_VERSION = 1
#: Commits whose state is kept, for ranks that ask for it later and for `rollback_to`.
_COMMITS_KEPT = 16


class StaleRange(DataError):
    """The worker does not hold this range any more: it counts as another one's, or will be."""


class PoisonedRange(DataError):
    """A range could not be used as often as is allowed, and the policy is to stop."""


class Answer(Enum):
    """Why no range is granted."""

    #: Others hold ranges, which may come back, or more may be added.
    WAIT = "wait"
    #: Nothing is free, held or unread, and nothing will be.
    END = "end"


@dataclass(frozen=True, kw_only=True)
class PoisonPolicy:
    """What becomes of a range that workers report as failed.

    Args:
        tries: how often a range may fail; the loss of its worker is no failure of a range.
        skip: leave it out and count it, instead of ending the job with its name.
    """

    tries: int = 3
    skip: bool = False

    def __post_init__(self) -> None:
        if check_whole("tries", self.tries) < 1:
            raise ConfigError("tries is 0; a range may be used at least once.")


@dataclass(frozen=True)
class _HeldRange:
    part: SampleRange
    worker: str


class Book:
    """See the module. Workers are named by texts; attempts and steps are whole numbers."""

    def __init__(self, source: RangeSource, policy: PoisonPolicy | None = None) -> None:
        self.source = source
        self.policy = policy or PoisonPolicy()
        self.attempt = 0
        #: Returned ranges, taken before new ones.
        self.free: deque[SampleRange] = deque()
        self.held: list[_HeldRange] = []
        #: Used in a step that is not committed.
        self.used: list[tuple[int, SampleRange]] = []
        #: Left out by policy.
        self.skipped: list[SampleRange] = []
        #: Last committed step; -1 before the first.
        self.committed = -1
        self._cursor: Cursor = {}
        self._commits: dict[int, Plain] = {}
        #: Start of a range -> why it failed, each time.
        self._failures: dict[tuple[int, str, int], list[str]] = {}
        #: Whether ranges count by steps of a model, and the state that the model of this attempt has.
        self._has_steps = False
        self._placed: Plain | None = None
        #: Workers that took a range since then.
        self._took: set[str] = set()

    # -- what workers say

    def grant(self, worker: str, attempt: int) -> SampleRange | Answer:
        """The next range for a worker.

        Raises:
            StaleRange: of an attempt that is over.
            PoisonedRange: a range failed too often; no worker gets another one.
            ConfigError: `rollback` has not said where the model of this attempt is.
        """
        self._check_attempt(attempt)
        if not self.policy.skip:
            for (epoch, partition, start), reasons in self._failures.items():
                if len(reasons) >= self.policy.tries:
                    raise PoisonedRange(
                        f"the range from {start}{' of ' + partition if partition else ''} in epoch {epoch} "
                        f"failed {len(reasons)} times: {reasons[-1]}",
                        hint="Repair the data and begin a new attempt, or choose to skip such ranges.",
                        start=start,
                        partition=partition,
                        epoch=epoch,
                    )
        self._check_placed()
        if self.free:
            part = self.free.popleft()
        elif found := self.source.next_range(self._cursor):
            part, self._cursor = found
        elif self.held or not self.source.ended(self._cursor):
            return Answer.WAIT
        else:
            return Answer.END
        self.held.append(_HeldRange(part, worker))
        self._took.add(worker)
        return part

    def done(self, worker: str, attempt: int, part: SampleRange, step: int | None = None) -> None:
        """A worker used the first part of a range that it holds, or all of it.

        To be said before the step ends on any worker that may commit it: what is said later came too late.

        Args:
            step: that it is used in; None: it counts at once.
        Raises:
            StaleRange: the worker does not hold it, so what it made of it must not count.
            ConfigError: the step is committed already.
        """
        self._check_attempt(attempt)
        number = self._number_held(worker, part)
        if step is not None:
            if check_whole("step", step) <= self.committed:
                raise ConfigError(
                    f"range {part} was used in step {step}, and step {self.committed} is committed without "
                    "it.",
                    hint="Say done before the collective that ends the step, and commit after it.",
                )
            self._count_by_steps()
            self.used.append((step, part))
        held = self.held[number]
        if part.stop < held.part.stop:
            rest = SampleRange(part.stop, held.part.stop, part.epoch, part.partition)
            self.held[number] = _HeldRange(rest, worker)
        else:
            del self.held[number]
        self._failures.pop(_start(part), None)

    def failed(self, worker: str, attempt: int, part: SampleRange, reason: str) -> None:
        """A worker could not use a range that it holds: another try, or what the policy says.

        Raises:
            StaleRange: the worker does not hold it.
        """
        self._check_attempt(attempt)
        number = self._number_held(worker, part)
        whole = self.held.pop(number).part
        reasons = self._failures.setdefault(_start(whole), [])
        reasons.append(str(reason))
        if len(reasons) >= self.policy.tries and self.policy.skip:
            self.skipped.append(whole)
            del self._failures[_start(whole)]
        else:
            self.free.appendleft(whole)

    def give_back(self, worker: str, attempt: int, part: SampleRange) -> None:
        """A worker will not use what is left of a range that it holds.

        Raises:
            StaleRange: the worker does not hold it.
        """
        self._check_attempt(attempt)
        self.free.appendleft(self.held.pop(self._number_held(worker, part)).part)

    def leave(self, worker: str) -> None:
        """All that a worker holds is free: it ended, it was silent for too long, or it is another process
        now."""
        self.free.extendleft(held.part for held in reversed(self.held) if held.worker == worker)
        self.held = [held for held in self.held if held.worker != worker]
        self._took.discard(worker)

    # -- what the job says

    def new_attempt(self, attempt: int) -> None:
        """Free at once what attempts before this one held, or used without a commit.

        Raises:
            StaleRange: the attempt is over.
        """
        if check_whole("attempt", attempt) <= self.attempt:
            self._check_attempt(attempt)
            return
        self.attempt = attempt
        self._placed = None
        self.free.extendleft(reversed(coalesced(self._lacking(self.committed))))
        self.held.clear()
        self.used.clear()
        self._took.clear()
        # What stopped the attempt before may have been repaired for this one.
        tries = self.policy.tries
        self._failures = {start: why for start, why in self._failures.items() if len(why) < tries}

    def commit(self, step: int, attempt: int) -> Plain:
        """The state for the checkpoint of a step: all that was used until then is in its model.

        Ranks that ask for the same step get the same state; the last 16 are kept.

        Raises:
            StaleRange: of an attempt that is over.
            ConfigError: a later step was committed before, or `rollback` has not said where the model of
                this attempt is.
        """
        self._check_attempt(attempt)
        if check_whole("step", step) in self._commits:
            return self._commits[step]
        self._check_placed()
        if step < self.committed:
            raise ConfigError(f"step {step} cannot be committed after step {self.committed}.")
        self._count_by_steps()
        state = self._state(step)
        self.used = [(at, part) for at, part in self.used if at > step]
        self.committed = step
        self._commits[step] = state
        for old in list(self._commits)[:-_COMMITS_KEPT]:
            del self._commits[old]
        return state

    def rollback(self, attempt: int, state: Mapping[str, object] | None, worker: str = "") -> None:
        """The model is that of this state: what it was not trained on is free. All workers may say so.

        A job that goes back without new processes does it in a new attempt: it passes a higher number.

        Args:
            state: of `commit`; None: the model starts from scratch.
            worker: who says so.
        Raises:
            StaleRange: the attempt is over.
            ConfigError: another state was named in this attempt, or a later step was committed in it, or
                this worker took ranges since; or the state is of other data. The text has both values.
        """
        there = self._state_of_start() if state is None else self._checked(state)
        if check_whole("attempt", attempt) == self.attempt and self._placed is not None:
            if self._placed != there:
                raise ConfigError(
                    f"attempt {attempt} is at step {self._placed['step']}, and step {there['step']} was "
                    "named.",
                    hint="To go back to another step, begin a new attempt: pass a higher number.",
                )
            # A late rank cannot be the reason: it takes part in each step. To go on would lose ranges.
            went_on = f"to step {self.committed}" if self.committed > cast(int, there["step"]) else ""
            if went_on or worker in self._took:
                went_on = went_on or f"(worker {worker!r} took ranges since)"
                raise ConfigError(
                    f"attempt {attempt} went on from step {there['step']} {went_on}, and step "
                    f"{there['step']} was named again.",
                    hint="To go back, begin a new attempt: pass a higher number.",
                )
            return
        self.new_attempt(attempt)
        self.held.clear()
        self.used.clear()
        self._took.clear()
        self._placed = there
        self._has_steps = True
        self.committed = cast(int, there["step"])
        if self._commits.get(self.committed) == there:
            self._commits = {step: kept for step, kept in self._commits.items() if step <= self.committed}
        else:  # what is kept may be of another lineage
            self._commits = {self.committed: there} if self.committed >= 0 else {}
        self._cursor = dict(cast(Cursor, there["cursor"]))
        self.free = deque(map(SampleRange.of_plain, cast("list[object]", there["free"])))
        self.skipped = [SampleRange.of_plain(plain) for plain in cast("list[object]", there["skipped"])]

    def rollback_to(self, attempt: int, step: int, worker: str = "") -> None:
        """`rollback` to the state of a step that was committed here, for jobs that keep no state of the book.

        Raises:
            ConfigError: its state is not kept; the text says which are.
        """
        if step not in self._commits:
            raise ConfigError(
                f"the state of step {step} is not kept; kept are steps {sorted(self._commits)}.",
                hint="Call rollback with the state in the checkpoint.",
            )
        self.rollback(attempt, self._commits[step], worker)

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
            "committed": self.committed,
            "cursor": self._cursor,
            "free": [part.to_plain() for part in self.free],
            "held": [[held.worker, held.part.to_plain()] for held in self.held],
            "used": [[step, part.to_plain()] for step, part in self.used],
            "skipped": [part.to_plain() for part in self.skipped],
            "commits": list(self._commits.values()),
            "failures": [[list(start), reasons] for start, reasons in self._failures.items()],
            "has_steps": self._has_steps,
            "placed": self._placed,
            "took": sorted(self._took),
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
        book.attempt = cast(int, plain["attempt"])
        book.committed = cast(int, plain["committed"])
        book._cursor = cast(Cursor, plain["cursor"])
        book.free = deque(map(SampleRange.of_plain, cast("list[object]", plain["free"])))
        book.held = [
            _HeldRange(SampleRange.of_plain(part), worker)
            for worker, part in cast("list[tuple[str, object]]", plain["held"])
        ]
        book.used = [
            (step, SampleRange.of_plain(part))
            for step, part in cast("list[tuple[int, object]]", plain["used"])
        ]
        book.skipped = [SampleRange.of_plain(part) for part in cast("list[object]", plain["skipped"])]
        book._commits = {cast(int, kept["step"]): kept for kept in cast("list[Plain]", plain["commits"])}
        failures = cast("list[tuple[tuple[int, str, int], list[str]]]", plain["failures"])
        book._failures = {(start[0], start[1], start[2]): reasons for start, reasons in failures}
        book._has_steps = bool(plain["has_steps"])
        book._placed = cast("Plain | None", plain["placed"])
        book._took = set(cast("list[str]", plain.get("took", [])))  # books of the first release have none
        return book

    def continue_with(self, source: RangeSource, policy: PoisonPolicy) -> None:
        """From now on partitions reach as far as `source` says where that is farther, and `policy` is this.

        Raises:
            DataError: partitions grew after they were closed.
        """
        self.policy = policy
        if isinstance(self.source, PartitionRanges) and isinstance(source, PartitionRanges):
            known = self.source.stops
            stops = {name: max(stop, known.get(name, 0)) for name, stop in source.stops.items()}
            self.extend(stops, closed=source.closed)

    # -- inside

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
        return [held.part for held in self.held] + [part for at, part in self.used if at > step]

    def _count_by_steps(self) -> None:
        self._has_steps = True
        if self._placed is None:  # nothing was restored
            self._placed = self._state_of_start()

    def _state_of_start(self) -> Plain:
        return Book(self.source)._state(-1)

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
                f"attempt {attempt} is over: attempt {self.attempt} has begun.",
                hint="This process belongs to the attempt before; end it.",
                attempt=attempt,
            )
        if attempt > self.attempt:
            raise ConfigError(f"attempt {attempt} has not begun; this is attempt {self.attempt}.")

    def _check_placed(self) -> None:
        if self._has_steps and self._placed is None:
            raise ConfigError(
                f"attempt {self.attempt} did not say where its model is, and the attempt before counted "
                "ranges by steps of a model.",
                hint="Call rollback with the state of the checkpoint that was restored, or with None if the "
                "model starts from scratch.",
            )

    def _number_held(self, worker: str, part: SampleRange) -> int:
        for number, held in enumerate(self.held):
            if held.worker == worker and _start(held.part) == _start(part) and part.stop <= held.part.stop:
                return number
        raise StaleRange(
            f"worker {worker!r} does not hold range {part}: it was given back or went to another worker.",
            hint="What was made of it must not count.",
            worker=worker,
        )


def _start(part: SampleRange) -> tuple[int, str, int]:
    return part.epoch, part.partition, part.start


def _mapping(value: object) -> Mapping[object, object]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{value!r} is no mapping")
    return value


def _list(value: object) -> list[list[object]]:
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{value!r} is no list")
    return list(value)
