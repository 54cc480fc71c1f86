# SPDX-License-Identifier: Apache-2.0
"""The actuator's commands: once, in time, and only while their reason holds."""

from __future__ import annotations

from dataclasses import replace

from supervisor.execution import Act, Executor, Look, Pace, Perform
from supervisor.orchestrator import Answer
from supervisor.values import Command, CommandKind, Outcome, OutcomeStatus

RESET = Command(
    epoch=3, id="c1", kind=CommandKind.WORKLOAD_RESET, workload="train", evidence=("e1",), deadline_s=100.0
)
STACKS = Command(epoch=3, id="c2", kind=CommandKind.DUMP_STACKS, workload="train", deadline_s=100.0)
DONE = Answer(status=OutcomeStatus.DONE)
BUSY = Answer(status=OutcomeStatus.FAILED, text="429", passing=True)
PACE = Pace(at_once=2, look_s=5.0, try_s=20.0, retry_s=1.0, retry_limit_s=8.0)


def status(acts: list[Act]) -> OutcomeStatus:
    (outcome,) = acts
    assert isinstance(outcome, Outcome)
    return outcome.status


def test_evidence_is_looked_at_before_what_cannot_be_taken_back_and_only_there() -> None:
    executor = Executor(PACE)
    assert executor.submit(RESET, 0.0) == [Look(command=RESET)]
    assert executor.submit(STACKS, 0.0) == [Perform(command=STACKS, number=1)]
    assert executor.looked("c1", True, 1.0) == [Perform(command=RESET, number=1)]
    assert status(executor.answered("c1", 1, DONE, 2.0)) is OutcomeStatus.DONE


def test_ranks_are_restarted_when_their_stacks_are_here_or_do_not_come() -> None:
    stacks, reset = replace(STACKS, incident="i1"), replace(RESET, incident="i1")
    executor = Executor(PACE)
    assert executor.submit(stacks, 0.0) == [Perform(command=stacks, number=1)]
    assert executor.submit(reset, 0.0) == []
    assert executor.submit(replace(RESET, id="c9", incident="i2"), 0.0) != []
    (outcome, *later) = executor.answered("c2", 1, DONE, 3.0)
    assert status([outcome]) is OutcomeStatus.DONE
    assert later == [Look(command=reset)]

    executor = Executor(PACE)
    executor.submit(reset, 0.0)  # a message may overtake another
    executor.submit(stacks, 0.0)
    assert executor.looked("c1", True, 0.1) == []
    assert executor.wake_at() == PACE.stacks_s
    assert executor.tick(PACE.stacks_s - 0.1) == []
    assert executor.tick(PACE.stacks_s) == [Look(command=reset)]


def test_a_command_whose_evidence_is_gone_does_nothing() -> None:
    executor = Executor(PACE)
    executor.submit(RESET, 0.0)
    assert status(executor.looked("c1", False, 1.0)) is OutcomeStatus.WITHDRAWN


def test_evidence_that_nobody_can_look_at_is_asked_again_until_the_deadline() -> None:
    executor = Executor(PACE)
    executor.submit(RESET, 0.0)
    assert executor.looked("c1", None, 1.0) == []
    assert executor.tick(2.0) == [Look(command=RESET)]
    looks = 0
    for now in range(3, 100):
        looks += executor.tick(float(now)).count(Look(command=RESET))
    assert looks > 5
    (outcome,) = executor.tick(100.0)
    assert isinstance(outcome, Outcome)
    assert outcome.status is OutcomeStatus.TIMED_OUT
    assert outcome.text == "not done within 100 s and 0 tries, last: its evidence could not be looked at"


def test_an_answer_that_a_stopped_actuator_reads_late_is_asked_for_again() -> None:
    executor = Executor(PACE)
    executor.submit(RESET, 0.0)
    # It was SIGSTOPped for a minute, and the answer waited in its socket.
    assert executor.looked("c1", True, 60.0) == []
    assert executor.tick(61.0) == [Look(command=RESET)]
    assert status(executor.looked("c1", False, 61.5)) is OutcomeStatus.WITHDRAWN


def test_passing_failures_are_tried_again_after_waits_that_grow() -> None:
    executor = Executor(PACE)
    executor.submit(STACKS, 0.0)
    now, tries = 0.0, []
    for number in range(1, 6):
        assert executor.answered("c2", number, BUSY, now) == []
        began = now
        while not (acts := executor.tick(now)):
            now += 0.5
        assert acts == [Perform(command=STACKS, number=number + 1)]
        tries.append(now - began)
    assert tries == [1.0, 2.0, 4.0, 8.0, 8.0]


def test_a_lasting_failure_ends_the_command_at_once() -> None:
    executor = Executor(PACE)
    executor.submit(STACKS, 0.0)
    refused = Answer(status=OutcomeStatus.FAILED, text="no such job")
    assert status(executor.answered("c2", 1, refused, 1.0)) is OutcomeStatus.FAILED


def test_a_try_without_an_answer_is_finished_and_not_withdrawn() -> None:
    executor = Executor(PACE)
    executor.submit(RESET, 0.0)
    executor.looked("c1", True, 0.0)
    assert executor.tick(20.0) == []
    assert executor.tick(21.0) == [Perform(command=RESET, number=2)]
    # The first try's answer was only late: the effect is there.
    assert status(executor.answered("c1", 1, DONE, 22.0)) is OutcomeStatus.DONE
    assert executor.answered("c1", 2, DONE, 23.0) == []


def test_a_restart_in_place_ends_where_the_host_that_it_waits_for_is_swapped() -> None:
    executor = Executor(PACE)
    reset = replace(STACKS, id="r", kind=CommandKind.IN_JOB_RESET)
    other = replace(reset, id="o", workload="other")
    executor.submit(reset, 0.0)
    executor.submit(other, 0.0)
    assert executor.submit(STACKS, 0.0) == []
    swap = replace(RESET, id="s", kind=CommandKind.HOT_SWAP, host="a", spare="b")
    ended, *others = executor.submit(swap, 1.0)
    assert isinstance(ended, Outcome)
    assert (ended.command, ended.status) == ("r", OutcomeStatus.WITHDRAWN)
    assert ended.text == "s (hot_swap) follows it"
    # Its place is free, and what it still answers changes nothing.
    assert others == [Perform(command=STACKS, number=1)]
    assert executor.answered("r", 1, DONE, 2.0) == []


def test_a_repeated_id_is_answered_with_the_same_outcome_and_carried_out_once() -> None:
    executor = Executor(PACE)
    executor.submit(STACKS, 0.0)
    assert executor.submit(STACKS, 1.0) == []
    (outcome,) = executor.answered("c2", 1, DONE, 2.0)
    assert executor.submit(replace(STACKS, epoch=4), 3.0) == [replace(outcome, epoch=4)]


def test_a_deposed_controllers_command_is_refused() -> None:
    executor = Executor(PACE)
    executor.submit(STACKS, 0.0)
    assert status(executor.submit(replace(RESET, epoch=2), 1.0)) is OutcomeStatus.FENCED
    assert executor.looked("c1", True, 2.0) == []


def test_the_orchestrators_own_fence_ends_a_command() -> None:
    executor = Executor(PACE)
    executor.submit(STACKS, 0.0)
    fenced = Answer(status=OutcomeStatus.FENCED, text="epoch 9 was here", epoch=9)
    (outcome,) = executor.answered("c2", 1, fenced, 1.0)
    assert outcome == Outcome(command="c2", epoch=9, status=OutcomeStatus.FENCED, text="epoch 9 was here")
    # The same command of a controller that was started again: below the epoch that was seen, and above it.
    assert executor.submit(replace(STACKS, epoch=4), 2.0) == [outcome]
    above = replace(STACKS, epoch=10)
    assert executor.submit(above, 3.0) == [Perform(command=above, number=1)]


def test_commands_run_side_by_side_up_to_a_bound_and_a_hung_one_gives_its_place_back() -> None:
    executor = Executor(PACE)
    commands = [replace(STACKS, id=f"c{n}") for n in range(3)]
    first, second, third = (executor.submit(command, 0.0) for command in commands)
    assert (len(first), len(second), third) == (1, 1, [])
    assert executor.wake_at() == 20.0
    acts = executor.tick(20.0)
    assert Perform(command=commands[2], number=1) in acts
