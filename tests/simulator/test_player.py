# SPDX-License-Identifier: Apache-2.0
"""What becomes of a fault that has no target, or that the operating system refuses."""

from __future__ import annotations

import os

from simulator.faults import Kind, PlannedFault
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


def faults(count: int) -> list[PlannedFault]:
    return [PlannedFault(at_us=at, kind=Kind.MEMORY, node=0, duration_us=1, value=1) for at in range(count)]


def play(injector: Refused, journal: Journal, count: int) -> Summary:
    return Player(faults(count), Job(JOB, 0), [injector], journal, wait=lambda timeout_s: False).play()


def test_a_fault_that_the_system_refuses_costs_no_other_fault(
    start_worker: StartWorker, journal: Journal
) -> None:
    start_worker(JOB)
    assert play(Refused(), journal, 3) == Summary(injected=2, failed=1, undone=2)


def test_a_fault_of_the_host_is_missed_where_the_job_is_gone(journal: Journal) -> None:
    injector = Refused()
    assert play(injector, journal, 2) == Summary(missed=2)
    assert injector.injected == 0
