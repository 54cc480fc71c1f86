# SPDX-License-Identifier: Apache-2.0
"""Rank processes that are started once and used by every test.

Starting a Python process that imports torch costs seconds; a job on ranks that exist already costs
a tenth of one.  The pool keeps its ranks for as long as it lives, replaces those that a test
killed, and tells for every rank how the job ended there: ok, error, died or hung.  The parent
waits on pipes and process ends with a deadline, so a test cannot hang, whatever its ranks do.

    with RankPool() as pool:
        report = pool.run(all_reduce_my_rank, 4, timeout=10)
        assert report.values == [6, 6, 6, 6]

Ranks are forked from an interpreter that has imported torch: the one of the test run (see `warm`),
or one that the pool owns.  They talk gloo over a file, so there is no port to race for.
"""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import Enum
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar, cast

from resiliency.errors import ConfigError
from resiliency.proc_stat import stat_fields
from resiliency.testing import warm
from resiliency.testing.faults import Fault
from resiliency.testing.pool.job import GO, READY, Job, Reply, fault_point
from resiliency.testing.pool.stacks import take_stacks

__all__ = ["JobReport", "RankFailed", "RankOutcome", "RankPool", "RankReport", "fault_point"]

T = TypeVar("T")

#: What every rank needs; add what your tests import, so that it is imported once and not per rank.
PRELOAD = ("torch.distributed", "resiliency.testing.pool.rank")


class RankOutcome(str, Enum):
    """How a job ended in one rank."""

    OK = "ok"
    ERROR = "error"  # the function raised
    DIED = "died"  # the process ended without an answer
    HUNG = "hung"  # no answer in time; the pool killed it


@dataclass(frozen=True, kw_only=True)
class RankReport(Generic[T]):
    """The end of a job in one rank."""

    rank: int
    outcome: RankOutcome
    value: T | None = None
    error: str = ""  # traceback; of a rank that hung the stacks of its threads and children
    exit_code: int | None = None  # of a rank that died; minus the signal

    def __str__(self) -> str:
        detail = {
            RankOutcome.OK: "",
            RankOutcome.ERROR: f":\n{self.error}",
            RankOutcome.DIED: f" with exit code {self.exit_code}",
            RankOutcome.HUNG: f": no answer before the deadline\n{self.error}",
        }
        return f"rank {self.rank} {self.outcome.value}{detail[self.outcome]}"


class RankFailed(AssertionError):
    """A test wanted the values of a job, and some ranks had none."""


@dataclass(frozen=True)
class JobReport(Generic[T]):
    """How a job ended, rank by rank."""

    ranks: tuple[RankReport[T], ...]

    def __getitem__(self, rank: int) -> RankReport[T]:
        return self.ranks[rank]

    @property
    def outcomes(self) -> list[RankOutcome]:
        return [report.outcome for report in self.ranks]

    @property
    def values(self) -> list[T]:
        """What every rank returned.

        Raises:
            RankFailed: a rank returned nothing; the message holds every rank's end.
        """
        if any(report.outcome is not RankOutcome.OK for report in self.ranks):
            raise RankFailed("not every rank returned a value:\n" + "\n".join(map(str, self.ranks)))
        return [cast(T, report.value) for report in self.ranks]


class RankPool:
    """Owner of the rank processes; a context manager.

    Not thread-safe: one job at a time.

    Args:
        preload: modules to import once, in the interpreter that ranks are forked from.
        start_timeout: seconds until all ranks of a job must be ready, process start included.
    """

    def __init__(self, *, preload: Sequence[str] = (), start_timeout: float = 120.0) -> None:
        self._interpreter = ExitStack()
        self._interpreter.enter_context(warm.interpreter(*PRELOAD, *preload))
        self._start_timeout = start_timeout
        # A rank serves many tests: it gets nothing from the one that needs it first.
        self._env, self._cwd = dict(os.environ), os.getcwd()
        self._ranks: list[_Rank | None] = []
        self._directory: Path | None = None
        self._closed = False

    def run(
        self,
        fn: Callable[..., T],
        world_size: int,
        *args: object,
        timeout: float = 120.0,
        operation_timeout: float = 60.0,
        group: bool = True,
        faults: Sequence[Fault] = (),
        env: Mapping[str, str] | None = None,
    ) -> JobReport[T]:
        """Call ``fn(rank, *args)`` in `world_size` processes and report every rank's end.

        Never raises for what happens in a rank: look at the report.  Ranks start with RANK,
        WORLD_SIZE and their local twins set, random state seeded with 0 and one torch thread.

        Args:
            fn: function of a module (not a lambda or a local one: it travels by name).
            timeout: seconds from the moment all ranks are ready until the last one must answer.
            operation_timeout: seconds after which a collective gives up on a silent peer.
            group: join a gloo process group of all ranks first.
            faults: failures placed at points that `fn` reports with `fault_point`.
            env: further variables for the job; taken back afterwards.
        Raises:
            ConfigError: the function or an argument cannot be pickled, or the pool is closed.
        """
        if self._closed:
            raise ConfigError("the rank pool is closed.")
        call = _pickled_call(fn, args)
        ready_by = time.monotonic() + self._start_timeout
        ranks = self._living_ranks(world_size)
        directory = tempfile.mkdtemp(dir=self._own_directory())
        job = Job(
            call=call,
            rank=0,
            world_size=world_size,
            store_path=f"{directory}/store" if group else None,
            start_timeout_s=self._start_timeout,
            operation_timeout_s=operation_timeout,
            faults=tuple(faults),
            env=env or {},
            sys_path=tuple(sys.path),
        )
        try:
            answers = self._converse(ranks, job, ready_by, timeout)
            hung = [answer is None for answer in answers]
            stacks = [take_stacks(rank.pid) if one else "" for rank, one in zip(ranks, hung, strict=True)]
        except BaseException:  # Ctrl-C, for one: their answers must not reach the next job
            for number in range(world_size):
                self._discard(number)
            raise
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        return JobReport(
            tuple(self._conclude(i, *ended) for i, ended in enumerate(zip(answers, stacks, strict=True)))
        )

    def _converse(self, ranks: Sequence[_Rank], job: Job, ready_by: float, timeout: float) -> list[_Answer]:
        for number, rank in enumerate(ranks):
            rank.send(replace(job, rank=number))
        answers = _collect(ranks, ready_by)
        if all(answer == READY for answer in answers):
            for rank in ranks:
                rank.send(GO)
            answers = _collect(ranks, time.monotonic() + timeout)
        return answers

    def warm_up(self, world_size: int) -> None:
        """Start ranks now, so that the first job does not wait for the imports."""
        self.run(_nothing, world_size, group=False).values  # noqa: B018  # raises if one failed

    @property
    def pids(self) -> list[int]:
        """Processes of the ranks, for leak checks and for tests that send signals."""
        return [rank.pid for rank in self._ranks if rank is not None]

    @property
    def descriptors(self) -> list[int]:
        """Open descriptors that belong to the pool, for leak checks."""
        return [fd for rank in self._ranks if rank is not None for fd in rank.descriptors]

    def close(self) -> None:
        """End all ranks and remove all files; idempotent."""
        self._closed = True
        for rank in self._ranks:
            if rank is not None:
                rank.connection.close()  # an idle rank ends by itself
        deadline = time.monotonic() + 5
        for rank in self._ranks:
            if rank is not None:
                rank.end(max(deadline - time.monotonic(), 0.0))
        self._ranks.clear()
        self._interpreter.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _own_directory(self) -> Path:
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="rank-pool-"))
        return self._directory

    def _living_ranks(self, count: int) -> list[_Rank]:
        self._ranks += [None] * (count - len(self._ranks))
        for i, rank in enumerate(self._ranks):
            if rank is not None and not rank.is_alive():
                self._discard(i)
        for i in range(count):
            self._ranks[i] = self._ranks[i] or self._new_rank()
        return [rank for rank in self._ranks[:count] if rank is not None]

    def _new_rank(self) -> _Rank:
        timeout = timedelta(seconds=self._start_timeout)
        return _Rank(*warm.start_function(_rank_main, env=self._env, cwd=self._cwd, import_timeout=timeout))

    def _discard(self, rank: int) -> None:
        if (old := self._ranks[rank]) is not None:
            self._ranks[rank] = None
            old.connection.close()
            old.end(0.0)

    def _conclude(self, rank: int, answer: _Answer, stacks: str) -> RankReport[T]:
        """Turn the last word of a rank into its report; a rank that is no longer clean goes."""
        if isinstance(answer, Reply):
            if not answer.reusable:
                self._discard(rank)
            if answer.error:
                return RankReport(rank=rank, outcome=RankOutcome.ERROR, error=answer.error)
            value = pickle.loads(answer.value)  # noqa: S301  # sent by our own rank
            return RankReport(rank=rank, outcome=RankOutcome.OK, value=value)
        self._discard(rank)
        if answer == READY:  # another rank failed before the job began
            error = "not run: another rank failed to start"
            return RankReport(rank=rank, outcome=RankOutcome.ERROR, error=error)
        if answer is None:
            return RankReport(rank=rank, outcome=RankOutcome.HUNG, error=stacks)
        return RankReport(rank=rank, outcome=RankOutcome.DIED, exit_code=cast(int, answer))


#: READY or a `Reply`; the exit code of a dead rank; None for one that did not answer in time.
_Answer: TypeAlias = "str | Reply | int | None"


class _Rank:
    """One rank process and our end of the pipe to it."""

    def __init__(self, process: warm.Process, connection: Connection) -> None:
        self.process, self.connection = process, connection
        #: Becomes readable when the process ends.
        self.pidfd = os.pidfd_open(process.pid)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def descriptors(self) -> list[int]:
        return [self.connection.fileno(), self.pidfd]

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def is_stopped(self) -> bool:
        return stat_fields(self.pid)[:1] == ["T"]

    def send(self, message: Job | str) -> None:
        with suppress(BrokenPipeError):  # it died; the next read tells
            self.connection.send(message)

    def end(self, timeout: float) -> None:
        """Wait for the process to end, then insist."""
        os.close(self.pidfd)
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)


def _collect(ranks: Sequence[_Rank], deadline: float) -> list[_Answer]:
    """Wait for one message or the end of every rank.

    Ranks that are stopped when all others have answered will not answer: waiting for the deadline
    would tell nothing more.
    """
    answers: dict[int, _Answer] = {}
    while len(answers) < len(ranks):
        waiting = {i: rank for i, rank in enumerate(ranks) if i not in answers}
        sources: dict[Connection | int, int] = {rank.connection: i for i, rank in waiting.items()}
        sources.update({rank.pidfd: i for i, rank in waiting.items()})
        if answers and all(rank.is_stopped() for rank in waiting.values()):
            break
        ready = wait(list(sources), max(deadline - time.monotonic(), 0.0))
        if not ready:
            break
        for i in {sources[source] for source in ready}:  # type: ignore[index]
            answers[i] = _read(ranks[i])
    return [answers.get(i) for i in range(len(ranks))]


def _read(rank: _Rank) -> _Answer:
    # What a rank sent before it died counts, so the pipe is asked first.
    with suppress(EOFError, ConnectionResetError):
        if rank.connection.poll():
            return cast(_Answer, rank.connection.recv())
    try:
        return rank.process.wait(10)
    except subprocess.TimeoutExpired:  # it closed the pipe, and lives
        return None


def _pickled_call(fn: Callable[..., object], args: tuple[object, ...]) -> bytes:
    try:
        return pickle.dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"cannot send {fn!r} and its arguments to another process: {error}.",
            hint="Define the function at the top of a module, and pass plain values.",
        ) from error


def _nothing(rank: int) -> None:
    return None


def _rank_main(connection: Connection) -> None:
    from resiliency.testing.pool.rank import serve  # imports torch: only here, in the rank

    serve(connection)
