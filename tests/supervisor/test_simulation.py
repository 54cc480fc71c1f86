# SPDX-License-Identifier: Apache-2.0
"""Histories from seeds keep all invariants, and each guard that is taken away breaks one of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from supervisor.control import ControllerCore
from supervisor.decision.controller import BaseController
from supervisor.decision.guards import GUARDS, Guard, Intent, Refusal, View, no_verdict, not_frozen
from supervisor.decision.state import Account
from supervisor.detection import Detector
from supervisor.detection.jobs import JobWatch
from supervisor.event_log import EventLog
from supervisor.plain import InvalidValue
from supervisor.policy.budget import Budget, TokenBucket
from supervisor.policy.caps import refuse_cordon
from supervisor.policy.verdict import Verdict
from supervisor.simulation import __main__ as program
from supervisor.simulation import plane
from supervisor.simulation.faults import KINDS, NAME_AGAIN, SimFault, draw_diagnoses
from supervisor.simulation.fleet import SimOrchestrator
from supervisor.simulation.loop import Loop
from supervisor.simulation.run import (
    PERIOD_S,
    THRESHOLDS,
    RecklessController,
    Scenario,
    build_fleet,
    run,
    scenario,
    shrink,
)
from supervisor.values import Command, CommandKind, OutcomeStatus, WorkloadInfo

#: A removed guard must show in this many histories.
ENOUGH = 250


#: Where the search begins for those that need a rare history; anywhere else it only takes longer.
BEGIN = {
    **{"within_budget": 73, "budgets_refilled_by_time": 73, "no_second_look": 61, "one_action": 56},
    **{"no_domain_cap": 53, "within_cordon_caps": 45, "quiet_long_enough": 45, "no_backoff": 217},
    "growth_at_any_time": 190,
}


#: A host is lost long after its job was given up: drawn histories are over by then.
AFTER_THE_VERDICT = Scenario(
    seed=1,
    hosts=8,
    faults=(
        SimFault(at=30.0, kind="job is broken"),
        SimFault(at=1500.0, kind="host dies", target=1, seconds=0.0),
    ),
    reckless=False,
)


#: Of seed 10063: the controller is stopped between a loss and the last step of before it.
STOPPED_BEFORE_THE_STEP = Scenario(
    seed=10063,
    hosts=7,
    faults=(
        SimFault(at=121.3, kind="host dies", target=2, seconds=0.0),
        SimFault(at=121.9, kind="controller stops", seconds=20.0),
    ),
    reckless=False,
)

#: Of seed 531: the disk is full when a host is lost, which is taken in after the name was used again.
LOST_BEFORE_THE_NAME = Scenario(
    seed=531,
    hosts=6,
    faults=(
        SimFault(at=80.7, kind="disk is full", seconds=60.0),
        SimFault(at=84.3, kind="host dies", target=3, seconds=0.0),
        SimFault(at=87.9, kind="second controller"),
        SimFault(at=135.8, kind=NAME_AGAIN),
    ),
    reckless=False,
)

#: A host is back, with its launcher, when its swap is looked at, and another sensor had lost it.
BACK_BEFORE_THE_SWAP = Scenario(
    seed=93,
    hosts=8,
    faults=(
        SimFault(at=30.8, kind="host dies", target=6, seconds=20.0, code=1),
        SimFault(at=31.5, kind="actuator crashes", seconds=20.0),
        SimFault(at=40.2, kind="sensor crashes", seconds=3.0),
    ),
    reckless=False,
)

#: Of seed 9038: a whole fleet dies before all of its daemons are back from a partition.
DEAD_IN_A_PARTITION = Scenario(
    seed=9038,
    hosts=4,
    faults=(
        SimFault(at=56.1, kind="partition", seconds=3.0, share=1.0, code=1),
        SimFault(at=60.8, kind="host dies", target=2, seconds=0.0, share=1.0),
    ),
    reckless=False,
)


def first_failing(name: str, controller: Callable[[Scenario], BaseController] | None = None) -> int | None:
    first = BEGIN.get(name, 0)
    for seed in range(first, first + ENOUGH):
        drawn = scenario(seed, 12)
        make = None if controller is None else (lambda drawn=drawn: controller(drawn))
        # A value that cannot be made at all ends a history too, and says nothing about invariants.
        with suppress(InvalidValue):
            if run(drawn, controller=make).violation:
                return seed
    return None


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [200, pytest.param(1000, marks=pytest.mark.thorough("200 are near"))])
def test_histories_keep_all_invariants(seeds: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--seeds", str(seeds)]) == 0, capsys.readouterr().out
    assert f"{seeds} seeds with 12 hosts: all invariants held" in capsys.readouterr().out


@pytest.mark.thorough("test_histories_keep_all_invariants runs with all of them")
@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.__name__)
def test_without_this_guard_a_history_fails(guard: Guard) -> None:
    left = [other for other in GUARDS if other is not guard]

    if guard is no_verdict:
        assert run(AFTER_THE_VERDICT).violation == ""
        alone = run(AFTER_THE_VERDICT, controller=lambda: BaseController(THRESHOLDS, guards=left))
        assert alone.violation.endswith("which was given up")
        return
    assert first_failing(guard.__name__, lambda drawn: _chosen(drawn)(THRESHOLDS, guards=left)) is not None


def _chosen(drawn: Scenario) -> type[BaseController]:
    return RecklessController if drawn.reckless else BaseController


def only_silence_freezes(view: View, intent: Intent) -> Refusal | None:
    """A person's freeze is not heard."""
    return Refusal(text="silent", until=view.now + 5.0) if view.fleet.silent else None


@pytest.mark.thorough("test_histories_keep_all_invariants runs with all of them")
def test_without_a_persons_freeze_a_history_fails() -> None:
    left = [only_silence_freezes if guard is not_frozen else guard for guard in GUARDS]
    assert (
        first_failing("only_silence_freezes", lambda drawn: _chosen(drawn)(THRESHOLDS, guards=left))
        is not None
    )


@pytest.mark.thorough("test_histories_keep_all_invariants runs with all of them")
def test_with_verdicts_that_never_expire_a_history_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is over 600 s after the job was given up, and a host is lost later."""
    short = replace(THRESHOLDS, verdict_s=600.0)
    assert run(AFTER_THE_VERDICT, thresholds=short).violation == ""
    monkeypatch.setattr(Verdict, "holds", lambda self, now: True)
    assert "does not train" in run(AFTER_THE_VERDICT, thresholds=short).violation


def no_dedup(patch: pytest.MonkeyPatch) -> None:
    """A repeated event is a new one."""
    take = BaseController._take_event

    def forget(self: BaseController, event: object) -> None:
        self._turn.put("seen", event.id, None)
        take(self, event)

    patch.setattr(BaseController, "_take_event", forget)


def no_silence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("supervisor.detection.silence.is_correlated", lambda *args, **kwargs: False)


def no_lateness(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Detector, "_pass_time", lambda self, now: now)


def no_second_look(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Detector, "holds", lambda self, command, now: True)


def no_log_fence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EventLog, "_check_epoch", lambda self: None)


def no_id_check(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimOrchestrator, "is_repeated", lambda self, command: False)


def effects_before_the_log(patch: pytest.MonkeyPatch) -> None:
    """Commands leave although their record may never be written."""
    take = ControllerCore.take

    def hasty(self: ControllerCore, given: object, monotonic: float) -> object:
        now = max(self._last, self._offset + monotonic)
        decision = self.controller.decide(self.state, given, now, epoch=self.log.epoch)
        try:
            return take(self, given, monotonic)
        except plane.Crash:
            if decision.commands:
                self.hurried(decision.commands)
            raise

    patch.setattr(ControllerCore, "take", hasty)
    start = plane.Plane._take

    def with_hurry(self: plane.Plane, given: object) -> None:
        self.core.hurried = lambda commands: [self._command(command) for command in commands]
        start(self, given)

    patch.setattr(plane.Plane, "_take", with_hurry)


def no_memory_of_verdicts(patch: pytest.MonkeyPatch) -> None:
    """A job is never given up."""
    patch.setattr("supervisor.decision.controller.gives_up", lambda turn, job, incident: False)


def growth_at_any_time(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(JobWatch, "_may_stop", lambda self, job: True)


def no_bucket(patch: pytest.MonkeyPatch) -> None:
    """Half of `in_pace`."""
    patch.setattr(TokenBucket, "ready_at", lambda self, now, **limits: now)


def no_backoff(patch: pytest.MonkeyPatch) -> None:
    """The other half of it."""
    patch.setattr("supervisor.decision.guards.backoff_s", lambda failures, **limits: 0.0)


def no_domain_cap(patch: pytest.MonkeyPatch) -> None:
    def uncapped(*args: Any, **limits: Any) -> str:
        return refuse_cordon(*args, **{**limits, "per_domain": 1000})

    patch.setattr("supervisor.decision.guards.refuse_cordon", uncapped)


def budgets_refilled_by_time(patch: pytest.MonkeyPatch) -> None:
    account = View.account

    def refilled(self: View, workload: str) -> Account:
        known = account(self, workload)
        old = self.now - known.acted_at > 30.0
        return replace(known, in_job=Budget(), workload=Budget()) if old else known

    patch.setattr(View, "account", refilled)


def no_runs(patch: pytest.MonkeyPatch) -> None:
    """A job is its name."""
    patch.setattr(WorkloadInfo, "is_new_run", lambda *_: False)
    patch.setattr(WorkloadInfo, "is_of_run", lambda *_: True)


def no_replay(patch: pytest.MonkeyPatch) -> None:
    """A controller that starts again knows nothing."""
    replay = EventLog._replay

    def forget(self: EventLog) -> object:
        replayed = replay(self)
        return replace(replayed, state=type(replayed.state).empty())

    patch.setattr(EventLog, "_replay", forget)


@pytest.mark.thorough("test_histories_keep_all_invariants runs with all of them")
@pytest.mark.parametrize(
    "mutation",
    [
        no_dedup,
        no_silence,
        no_lateness,
        no_second_look,
        no_log_fence,
        no_id_check,
        effects_before_the_log,
        no_memory_of_verdicts,
        no_bucket,
        no_backoff,
        no_domain_cap,
        budgets_refilled_by_time,
        no_runs,
        no_replay,
        growth_at_any_time,
    ],
    ids=lambda mutation: mutation.__name__,
)
def test_without_this_mechanism_a_history_fails(
    mutation: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch)
    assert first_failing(mutation.__name__) is not None


def test_another_job_under_the_name_that_advances_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = scenario(23, 12)
    assert drawn.faults[-1].kind == NAME_AGAIN
    assert run(drawn).violation == ""
    no_runs(monkeypatch)
    assert run(drawn).violation.endswith("j0 was given up, and trains")


def test_the_virtual_orchestrator_keeps_to_epochs_and_ids_as_an_adapter_must() -> None:
    """While the log refuses a deposed controller, no history reaches this fence; here it is alone."""
    loop = Loop(1)
    fleet = build_fleet(loop, 6)
    effects: list[str] = []
    orchestrator = SimOrchestrator(fleet, lambda command: effects.append(command.id))
    answers: list[tuple[OutcomeStatus, int]] = []
    reset = Command(epoch=5, id="c1", kind=CommandKind.WORKLOAD_RESET, workload="j0")
    for command in (reset, replace(reset, epoch=6), replace(reset, id="c2", epoch=5)):
        orchestrator.perform(command, lambda answer: answers.append((answer.status, answer.epoch)))
        seen = len(answers)
        while len(answers) == seen:
            assert loop.step()
    assert answers == [(OutcomeStatus.DONE, 0), (OutcomeStatus.DONE, 0), (OutcomeStatus.FENCED, 6)]
    assert effects == ["c1"]


def test_a_seed_is_one_history() -> None:
    first, second = run(scenario(5, 12)), run(scenario(5, 12))
    assert first == second
    assert first.history != run(scenario(6, 12)).history


def test_every_kind_of_fault_is_drawn_and_can_stand_alone() -> None:
    drawn = {fault.kind for seed in range(300) for fault in scenario(seed, 12).faults}
    drawn |= {fault.kind for fault in draw_diagnoses(Random(0), 12, 100.0)}  # noqa: S311 (a seeded history)
    assert drawn == set(KINDS)
    for kind in KINDS:
        fault = SimFault(at=30.0, kind=kind, seconds=20.0, code=79 if kind == "xid" else 1)
        alone = Scenario(seed=3, hosts=8, faults=(fault,), reckless=False)
        assert run(alone).violation == "", kind


def test_a_failing_history_is_shown_with_as_few_faults_as_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(SimOrchestrator, "is_repeated", lambda self, command: False)
    assert program.main(["--seeds", str(ENOUGH)]) == 1
    shown = capsys.readouterr().out
    assert "VIOLATED" in shown
    _, _, smallest = shown.partition("the same with as few faults as fail:")
    assert 0 < smallest.count("  fault ") < shown.count("  fault ") - smallest.count("  fault ")


def test_shrinking_keeps_only_what_is_needed() -> None:
    faults = tuple(SimFault(at=float(n), kind="xid", code=n) for n in range(6))
    failing = Scenario(seed=0, hosts=4, faults=faults, reckless=False)
    smallest = shrink(failing, lambda less: {2, 4} <= {fault.code for fault in less.faults})
    assert [fault.code for fault in smallest.faults] == [2, 4]


def test_a_user_sees_what_a_history_did_and_which_options_are_wrong(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert program.main(["--seed", "3", "--verbose"]) == 0
    assert "seed 3: " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        program.main(["--hosts", "2"])
    assert "--hosts must be 4 or more, found 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    "saved",
    [DEAD_IN_A_PARTITION, STOPPED_BEFORE_THE_STEP, LOST_BEFORE_THE_NAME, BACK_BEFORE_THE_SWAP],
    ids=lambda saved: saved.seed,
)
def test_a_saved_history_that_failed_once_keeps_all_invariants(saved: Scenario) -> None:
    assert run(saved).violation == ""


def test_a_healthy_fleet_is_left_alone() -> None:
    """As many hosts as a second of the check allows; the rest is for `--hosts 10000` by hand."""
    calm = Scenario(seed=1, hosts=300, faults=(), reckless=False)
    result = run(calm)
    assert result.violation == ""
    assert result.effects == 0
    assert result.messages > 300 * 30.0 / PERIOD_S
