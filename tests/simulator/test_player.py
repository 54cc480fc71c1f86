# SPDX-License-Identifier: Apache-2.0
"""What becomes of a fault that has no target, or that the operating system refuses."""

from __future__ import annotations

import os
import subprocess

import pytest

from simulator.faults import Kind, PlannedFault
from simulator.injectors import Injector
from simulator.job import Job
from simulator.journal import Journal, Record
from simulator.player import Player, Summary
from tests.simulator.conftest import StartWorker

JOB = f"simulator-player-{os.getpid()}"


class Refused:
    """An injector that gets no process from the operating system at its first fault."""

    name, kinds, outlives_boot = "refused", frozenset({Kind.MEMORY}), False

    def __init__(self) -> None:
        self.injected = 0

    def refusal(self) -> str:
        return ""

    def aim_fault(self, fault: PlannedFault) -> Record:
        return {}

    def inject(self, record: Record) -> None:
        self.injected += 1
        if self.injected == 1:
            raise BlockingIOError("Resource temporarily unavailable")

    def end_effect(self, record: Record) -> None:
        pass


class Broken:
    """An injector with an error in one of its methods; memory pressure comes from another one.

    Args:
        method: that fails, or `record` where its record is no JSON.
    """

    name, kinds, outlives_boot = "broken", frozenset({Kind.STOP, Kind.KILL}), False

    def __init__(self, method: str, error: Exception) -> None:
        self._method, self._error = method, error

    def _fail_in(self, method: str) -> None:
        if method == self._method:
            raise self._error

    def refusal(self) -> str:
        self._fail_in("refusal")
        return ""

    def aim_fault(self, fault: PlannedFault) -> Record:
        self._fail_in("aim_fault")
        return {"object": object()} if self._method == "record" else {}  # type: ignore[dict-item]

    def inject(self, record: Record) -> None:
        self._fail_in("inject")

    def end_effect(self, record: Record) -> None:
        self._fail_in("end_effect")


def faults(count: int) -> list[PlannedFault]:
    return [PlannedFault(at_us=at, kind=Kind.MEMORY, node=0, duration_us=1, value=1) for at in range(count)]


def play(injector: Injector, journal: Journal, planned: list[PlannedFault], *others: Injector) -> Summary:
    return Player(planned, Job(JOB, 0), [injector, *others], journal, wait=lambda timeout_s: False).play()


def test_a_fault_that_the_system_refuses_costs_no_other_fault(
    start_worker: StartWorker, journal: Journal
) -> None:
    start_worker(JOB)
    assert play(Refused(), journal, faults(3)) == Summary(injected=2, failed=1, undone=2)


def test_a_fault_of_the_host_is_missed_where_the_job_is_gone(journal: Journal) -> None:
    injector = Refused()
    assert play(injector, journal, faults(2)) == Summary(missed=2)
    assert injector.injected == 0


@pytest.mark.parametrize(
    "error",
    [OSError("no room"), KeyError("rank"), AssertionError(), subprocess.TimeoutExpired("nvidia-smi", 20)],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize(
    ("method", "summary"),
    [
        ("refusal", Summary(injected=2, missed=1, undone=2)),
        ("aim_fault", Summary(injected=2, failed=1, undone=2)),
        ("record", Summary(injected=2, failed=1, undone=2)),
        ("inject", Summary(injected=2, failed=1, undone=2)),
        ("end_effect", Summary(injected=3, kept=1, undone=2)),
    ],
)
def test_an_error_in_one_injector_costs_its_fault_and_no_other(
    method: str,
    summary: Summary,
    error: Exception,
    start_worker: StartWorker,
    journal: Journal,
    caplog: pytest.LogCaptureFixture,
) -> None:
    start_worker(JOB)
    works = Refused()
    works.injected = 1  # what it refuses is behind it
    planned = [PlannedFault(at_us=0, kind=Kind.STOP, node=0, gpu=0, duration_us=1), *faults(2)]
    assert play(Broken(method, error), journal, planned, works) == summary
    assert "stop of node 0 gpu 0" in caplog.text


def test_a_full_disk_below_the_journal_costs_no_other_fault(
    start_worker: StartWorker, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_worker(JOB)
    works = Refused()
    works.injected = 1
    end_effect = journal.end_effect

    def refuse_first(number: int) -> None:
        if number == 0:
            raise OSError("No space left on device")
        end_effect(number)

    monkeypatch.setattr(journal, "end_effect", refuse_first)
    planned = [PlannedFault(at_us=0, kind=Kind.KILL, node=0, gpu=0), *faults(2)]
    summary = play(Broken("none", OSError()), journal, planned, works)
    assert summary == Summary(injected=3, kept=1, undone=2)
