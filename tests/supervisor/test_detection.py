# SPDX-License-Identifier: Apache-2.0
"""The failure detector, driven by hand: each condition is one event, and its end withdraws the evidence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from supervisor.detection import Detector, Output, Poll, Probe
from supervisor.values import (
    Change,
    Command,
    CommandKind,
    DaemonReport,
    DeviceState,
    Event,
    EventType,
    Evidence,
    Finding,
    HostInfo,
    LauncherState,
    Progress,
    Silence,
    WorkerInfo,
    WorkerReport,
    WorkloadInfo,
)
from tests.supervisor.sensors import LIMITS, Sensor, _host, _worker, events


def test_hosts_that_report_are_never_lost() -> None:
    sensor = Sensor()
    assert events(sensor.run(600)) == []


def test_a_silent_host_is_lost_within_a_second_of_its_timeout_once_and_with_its_evidence() -> None:
    sensor = Sensor()
    last = sensor.now
    said = sensor.run(100, silent=["h1"])
    (lost,) = events(said)
    assert (lost.type, lost.host, lost.workload) == (EventType.HOST_HB, "h1", "train")
    assert lost.evidence[0].witness == "stream"
    assert 20.0 <= lost.evidence[0].age_s <= 21.0
    assert [each.state for each in said if isinstance(each, HostInfo)] == [DeviceState.FAILED]
    assert Probe(host="h1") in said
    assert sensor.now - last == 100


def test_a_stream_that_ends_is_probed_at_once_and_confirmed_by_a_witness() -> None:
    sensor = Sensor()
    assert sensor.take(sensor.detector.stream_ended("h1", sensor.now)) == [Probe(host="h1")]
    said = sensor.take(sensor.detector.witness_answered("h1", False, "orchestrator", sensor.now + 0.2))
    (lost,) = events(said)
    assert lost.type is EventType.HOST_HB
    assert lost.evidence[0].witness == "orchestrator"
    # Where its job is, is asked of the others, so that the decision does not rest on an old step.
    assert Poll(host="h0") in said
    assert Poll(host="h1") not in said


def test_a_daemon_that_dies_alone_is_an_alarm_and_no_lost_host() -> None:
    sensor = Sensor()
    sensor.take(sensor.detector.stream_ended("h1", sensor.now))
    (alarm,) = events(sensor.take(sensor.detector.witness_answered("h1", True, "orchestrator", sensor.now)))
    assert alarm.type is EventType.DAEMON_LOST
    sensor.now += 1.0
    assert events(sensor.run(10, silent=["h1"])) == []
    sensor.take(sensor.detector.register_host(_host("h1", "train"), sensor.now))
    assert sensor.detector.holds(_command(alarm), sensor.now) is False


def test_a_witness_that_cannot_tell_says_nothing_and_one_that_was_not_asked_neither() -> None:
    sensor = Sensor()
    assert sensor.detector.witness_answered("h1", False, "orchestrator", sensor.now) == []
    sensor.detector.stream_ended("h1", sensor.now)
    assert sensor.detector.witness_answered("h1", None, "orchestrator", sensor.now) == []


def test_its_own_absence_is_nobodys_silence() -> None:
    sensor = Sensor()
    sensor.now += 3600.0
    assert sensor.take(sensor.detector.tick(sensor.now)) == []
    assert events(sensor.run(100)) == []


def test_reports_of_half_of_the_timeout_that_are_a_little_late_freeze_nothing_beside_a_lost_host() -> None:
    sensor = Sensor(hosts=9)
    for name in sensor.names:
        sensor.beat(name)
    for _ in range(6):
        # A period of 10 s, of 20 that a host has; these reports are half a second late.
        for tick in range(21):
            sensor.now += 0.5
            sensor.take(sensor.detector.tick(sensor.now))
            if tick == 20:
                for name in sensor.names[1:]:
                    sensor.beat(name)
    assert not any(isinstance(each, Silence) and each.frozen for each in sensor.said)


def test_many_silent_hosts_freeze_and_healing_gives_all_a_fresh_timeout() -> None:
    sensor = Sensor(hosts=10)
    away = [f"h{n}" for n in range(5)]
    said = sensor.run(100, silent=away)
    assert events(said, EventType.HOST_HB) == []
    assert [each.frozen for each in said if isinstance(each, Silence)] == [True]
    healed = sensor.run(6, silent=["h0"])
    assert [each.frozen for each in healed if isinstance(each, Silence)] == [False]
    assert events(healed) == []
    (lost,) = events(sensor.run(25, silent=["h0"]))
    assert lost.host == "h0"


def _blind(sensor: Sensor, names: Sequence[str]) -> None:
    """Their streams end, and a witness sees the hosts; that was a while ago."""
    for name in names:
        sensor.take(sensor.detector.stream_ended(name, sensor.now))
        sensor.take(sensor.detector.witness_answered(name, True, "orchestrator", sensor.now))
    sensor.run(5, silent=names)
    sensor.said.clear()


def test_a_witness_that_saw_many_silent_hosts_and_finds_them_all_gone_is_not_believed() -> None:
    sensor = Sensor(hosts=10)
    _blind(sensor, sensor.names[:9])
    assert sensor.take(sensor.detector.stream_ended("h9", sensor.now)) == [Probe(host="h9")]
    for name in reversed(sensor.names):
        sensor.now += 0.1
        sensor.take(sensor.detector.witness_answered(name, False, "orchestrator", sensor.now))
    sensor.run(100, silent=sensor.names)
    assert events(sensor.said, EventType.HOST_HB) == []
    assert [each.frozen for each in sensor.said if isinstance(each, Silence)] == [True]


def test_a_host_that_is_gone_while_many_daemons_are_is_lost_once_the_others_were_seen_again() -> None:
    sensor = Sensor(hosts=10)
    blind = sensor.names[2:]
    _blind(sensor, blind)
    sensor.detector.stream_ended("h1", sensor.now)
    said = sensor.take(sensor.detector.witness_answered("h1", False, "orchestrator", sensor.now + 0.2))
    assert said == [Probe(host=name) for name in blind]
    for _ in range(30):
        later = sensor.now + 0.5
        for name in [each.host for each in said if isinstance(each, Probe)]:
            sensor.take(sensor.detector.witness_answered(name, name != "h1", "orchestrator", later))
        said = sensor.run(1, silent=sensor.names[1:])
    (lost,) = events(sensor.said, EventType.HOST_HB)
    assert (lost.host, lost.evidence[0].age_s <= 22.0) == ("h1", True)
    assert not any(isinstance(each, Silence) for each in sensor.said)


def test_a_person_can_say_that_the_silent_hosts_are_lost() -> None:
    sensor = Sensor(hosts=10)
    sensor.run(40, silent=["h1", "h2", "h3"])
    said = sensor.take(sensor.detector.thaw(sensor.now))
    assert [event.host for event in events(said)] == ["h1", "h2", "h3"]
    assert [each.frozen for each in said if isinstance(each, Silence)] == [False]


def test_ranks_that_are_lost_one_after_the_other_are_all_in_a_snapshot_and_all_withdrawn() -> None:
    sensor = Sensor()
    failed = [
        WorkerReport(local_rank=number, global_rank=number, state=DeviceState.FAILED) for number in (0, 1)
    ]
    (first,) = events(sensor.beat("h0", workers=tuple(failed[:1])))
    (second,) = events(sensor.beat("h0", workers=tuple(failed)))
    assert (first.ranks, second.ranks) == ((0,), (1,))
    assert events(sensor.detector.snapshot(sensor.now)) == [first, second]
    sensor.beat("h0", attempt=1)
    for event in (first, second):
        assert sensor.detector.holds(_command(event, CommandKind.CORDON_HOST), sensor.now) is False
    assert events(sensor.detector.snapshot(sensor.now)) == []


def test_a_host_that_comes_back_withdraws_the_evidence() -> None:
    sensor = Sensor()
    (lost,) = events(sensor.run(30, silent=["h1"]))
    sensor.run(5, silent=["h1"])
    assert sensor.detector.holds(_command(lost, CommandKind.CORDON_HOST), sensor.now) is True
    said = sensor.run(6)
    assert [each.state for each in said if isinstance(each, HostInfo)] == [DeviceState.SPARE]
    assert sensor.detector.holds(_command(lost, CommandKind.CORDON_HOST), sensor.now) is False


def _command(event: Event, kind: CommandKind = CommandKind.IN_JOB_RESET) -> Command:
    on_host = kind is CommandKind.CORDON_HOST
    return Command(
        epoch=1,
        id="c1",
        kind=kind,
        workload="train",
        host=event.host if on_host else "",
        evidence=tuple(found.id for found in event.evidence),
    )


def test_failed_and_silent_ranks_of_one_report_are_one_event() -> None:
    sensor = Sensor()
    failed = _worker(0, state=DeviceState.FAILED)
    (event,) = events(sensor.beat("h0", workers=failed, launcher=LauncherState.RESTARTING))
    assert (event.type, event.ranks, event.launcher) == (EventType.WORKER_HB, (0,), LauncherState.RESTARTING)
    assert events(sensor.beat("h0", workers=failed)) == []
    (late,) = events(sensor.beat("h1", workers=_worker(1, heartbeat_age_s=20.0)))
    assert late.evidence[0].text == "rank 1: worker: silent for 20.0 s"


def test_what_a_launcher_does_about_a_failed_rank_is_told_when_it_says_so() -> None:
    sensor = Sensor()
    failed = _worker(0, state=DeviceState.FAILED)
    said = [
        event
        for state in (LauncherState.RUNNING, LauncherState.RESTARTING, LauncherState.RESTARTING)
        for event in events(sensor.beat("h0", workers=failed, launcher=state))
    ]
    assert [(event.ranks, event.launcher.value) for event in said] == [((0,), "running"), ((), "restarting")]
    assert said[1].evidence[0].text == "launcher: restarts its ranks"
    # A launcher whose ranks are well restarts them for the sake of others.
    assert events(sensor.beat("h1", workers=_worker(1), launcher=LauncherState.RESTARTING)) == []
    sensor.beat("h0", workers=_worker(0), attempt=1)
    for event in said:
        assert sensor.detector.holds(_command(event, CommandKind.CORDON_HOST), sensor.now) is False


def test_launchers_that_gave_up_are_told_with_and_without_a_failed_rank_until_others_are_there() -> None:
    sensor = Sensor()
    failed = _worker(0, state=DeviceState.FAILED)
    sensor.beat("h0", workers=failed, attempt=1)
    (first,) = events(sensor.beat("h0", workers=failed, attempt=1, launcher=LauncherState.GAVE_UP))
    (second,) = events(sensor.beat("h1", attempt=1, launcher=LauncherState.GAVE_UP))
    assert {event.type for event in (first, second)} == {EventType.WORKER_HB}
    assert first.workload == second.workload == "train"
    assert second.evidence[0].text == "launcher: gave up, and has ended"
    # The daemons go on; so does a launcher that has been started and has not met the others.
    sensor.beat("h1", attempt=1, launcher=LauncherState.GAVE_UP)
    sensor.beat("h0", attempt=0)
    for event in (first, second):
        assert sensor.detector.holds(_command(event, CommandKind.CORDON_HOST), sensor.now) is True
    for name in ("h0", "h1"):
        sensor.beat(name, attempt=2, launcher=LauncherState.RUNNING)
    for event in (first, second):
        assert sensor.detector.holds(_command(event, CommandKind.CORDON_HOST), sensor.now) is False


def test_a_host_whose_launcher_gave_up_is_free_once_its_job_steps_without_it() -> None:
    sensor = Sensor()
    sensor.beat("h1", attempt=1, launcher=LauncherState.GAVE_UP)
    later = {"attempt": 2, "launcher": LauncherState.RUNNING}
    assert sensor.beat("h0", workers=_worker(0), **later) == [_running("h0", "train")]
    said = sensor.beat("h0", workers=_worker(0, step=7, step_age_s=0.0), **later)
    assert said == [_host("h1")]
    assert sensor.beat("h0", workers=_worker(0, step=8, step_age_s=0.0), **later) == []
    # What its daemon says at its own time changes nothing, until its launcher has met the others again.
    assert sensor.beat("h1", attempt=1, launcher=LauncherState.GAVE_UP) == []
    assert sensor.beat("h1", workers=_worker(1), **later) == [_host("h1", "train"), _running("h1", "train")]
    assert len(events(sensor.run(61, workers=_worker(0), **later), EventType.HANG)) == 1


def _running(name: str, workload: str) -> HostInfo:
    return replace(_host(name, workload), state=DeviceState.RUNNING)


def test_a_newer_attempt_ends_what_was_said_of_the_older_one() -> None:
    sensor = Sensor()
    failed = _worker(0, state=DeviceState.FAILED)
    (event,) = events(sensor.beat("h0", workers=failed, attempt=1))
    assert sensor.detector.holds(_command(event, CommandKind.CORDON_HOST), sensor.now) is True
    sensor.beat("h0", workers=_worker(0), attempt=2)
    assert sensor.detector.holds(_command(event, CommandKind.CORDON_HOST), sensor.now) is False
    assert events(sensor.beat("h0", workers=failed, attempt=1)) == []
    assert len(events(sensor.beat("h0", workers=failed, attempt=2))) == 1


def test_late_and_repeated_reports_change_nothing() -> None:
    sensor = Sensor()
    old = sensor.report("h0", workers=_worker(0, state=DeviceState.FAILED))
    sensor.beat("h0", workers=_worker(0))
    assert sensor.detector.report(old, sensor.now) == []
    before = sensor.report("h0", workers=_worker(0, state=DeviceState.FAILED))
    sensor.beat("h0", incarnation="d2", workers=_worker(0))
    assert sensor.detector.report(before, sensor.now) == []
    assert sensor.detector.report(sensor.report("stranger"), sensor.now) == []


def test_findings_of_one_report_are_one_event_and_are_said_once() -> None:
    sensor = Sensor()
    findings = tuple(
        Finding(type=EventType.XID, evidence=Evidence(id=f"h0/x{code}", witness="xid", code=code))
        for code in (31, 79)
    )
    (event,) = events(sensor.beat("h0", findings=findings))
    assert [found.code for found in event.evidence] == [31, 79]
    assert events(sensor.beat("h0", findings=findings)) == []


def test_each_diagnosis_is_an_event_of_its_attempt_once_and_not_when_another_attempt_runs() -> None:
    sensor = Sensor()

    def diagnosed(id: str, attempt: int) -> Finding:
        words = {"cause": "gpu_fault", "advice": "replace_host", "confidence": "high"}
        evidence = Evidence(id=id, witness="launcher", text="a broken GPU", **words)
        return Finding(type=EventType.DIAGNOSIS, evidence=evidence, ranks=(0,), attempt=attempt, run="r")

    found = (diagnosed("a", 1), diagnosed("b", 2))
    said = events(sensor.beat("h0", findings=found, attempt=1))
    assert [(one.type, one.host, one.workload, one.run) for one in said] == [
        (EventType.DIAGNOSIS, "h0", "train", "r")
    ] * 2
    assert [(one.attempt, one.ranks, one.evidence[0].id) for one in said] == [(1, (0,), "a"), (2, (0,), "b")]
    assert events(sensor.beat("h0", findings=found, attempt=1)) == []
    assert events(sensor.beat("h1", findings=(diagnosed("late", 1),), attempt=2)) == []
    # Another host of the job is in a later attempt already.
    assert events(sensor.beat("h0", findings=(diagnosed("later", 1),), attempt=1)) == []


def test_progress_is_the_highest_step_and_an_older_attempt_cannot_move_it() -> None:
    sensor = Sensor()
    said = sensor.run(5, workers=_worker(0, step=7, step_age_s=0.5), attempt=2)
    (progress,) = [each for each in said if isinstance(each, Progress)]
    assert (progress.step, progress.attempt) == (7, 2)
    assert 0.5 <= progress.age_s <= 1.5
    sensor.beat("h1", workers=_worker(1, step=900, step_age_s=0.5), attempt=1)
    assert [each for each in sensor.run(1) if isinstance(each, Progress)] == []


def test_a_hang_names_the_ranks_that_are_behind() -> None:
    sensor = Sensor()
    began = sensor.now
    for _ in range(70):
        sensor.now += 1.0
        for rank, name in enumerate(("h0", "h1")):
            step = 9 if name == "h0" else 8
            sensor.beat(name, workers=_worker(rank, step=step, step_age_s=sensor.now - began))
        for name in ("h2", "h3"):
            sensor.beat(name)
        sensor.take(sensor.detector.tick(sensor.now))
    (hang,) = events(sensor.said)
    assert (hang.type, hang.ranks, hang.host) == (EventType.HANG, (1,), "h1")


def test_ranks_that_go_on_sending_heartbeats_to_their_monitors_do_not_hang() -> None:
    def run(seconds: int, *silent: str) -> list[Event]:
        for _ in range(seconds):
            sensor.now += 1.0
            for rank, name in enumerate(("h0", "h1")):
                age_s = sensor.now - stopped if name in silent else 0.0
                step_age_s = sensor.now - began
                sensor.beat(name, workers=_worker(rank, step=9, step_age_s=step_age_s, monitor_age_s=age_s))
            for name in ("h2", "h3"):
                sensor.beat(name)
            sensor.take(sensor.detector.tick(sensor.now))
        return events(sensor.said, EventType.HANG)

    sensor = Sensor()
    began = stopped = sensor.now
    assert run(200) == []
    stopped = sensor.now
    # One rank waits in a collective for another one, which still does something: not all do.
    assert run(59, "h1") == []
    assert len(run(2, "h1")) == 1


def test_a_host_that_its_job_went_on_without_hides_no_hang() -> None:
    sensor = Sensor(hosts=3)
    # The launcher of h0 died alone in attempt 1: its daemon still tells what that said, and of which job.
    sensor.beat("h0", workers=_worker(0, step=5, step_age_s=0.0), attempt=1)
    sensor.take(sensor.detector.register_host(_host("h2", "train"), sensor.now))
    began = sensor.now
    for _ in range(70):
        sensor.now += 1.0
        for name, rank, attempt in (("h0", 0, 1), ("h1", 1, 2), ("h2", 0, 2)):
            age_s = sensor.now - began
            sensor.beat(name, workers=_worker(rank, step=9, step_age_s=age_s), attempt=attempt)
        sensor.take(sensor.detector.tick(sensor.now))
    (hang,) = events(sensor.said, EventType.HANG)
    assert hang.attempt == 2


def test_no_step_for_the_jobs_own_threshold_is_no_progress_and_is_said_again() -> None:
    sensor = Sensor(downtime_threshold_s=30.0)
    said = sensor.run(60)
    assert [event.type for event in events(said)] == [EventType.NO_PROGRESS] * 2


def test_no_first_step_of_a_new_attempt_is_no_progress_by_the_default_threshold() -> None:
    limit = LIMITS.workload_downtime_threshold_s
    running = {"workers": _worker(), "launcher": LauncherState.RUNNING}
    sensor = Sensor()
    # Nobody knows yet whether this program tells steps at all.
    assert events(sensor.run(2 * limit, **running)) == []
    sensor.run(5, workers=_worker(step=7, step_age_s=0.0), launcher=LauncherState.RUNNING)
    began = sensor.now
    (stuck,) = events(sensor.run(limit + 10, attempt=1, **running), EventType.NO_PROGRESS)
    assert (stuck.workload, stuck.attempt) == ("train", 1)
    assert stuck.evidence[0].text == f"steps: none finished for {limit:g} s"
    assert sensor.now - began == limit + 10
    # A step is the end of it, and what follows that one is a hang or none.
    sensor.run(5, attempt=1, workers=_worker(step=3, step_age_s=0.0), launcher=LauncherState.RUNNING)
    assert sensor.detector.holds(_command(stuck), sensor.now + 60.0) is False
    assert events(sensor.run(2 * limit, attempt=1, **running), EventType.NO_PROGRESS) == []


def test_a_new_sensor_learns_how_far_a_job_was_and_misses_its_next_first_step() -> None:
    sensor = Sensor()
    known = Progress(workload="train", step=7, attempt=3, age_s=50.0)
    sensor.take(sensor.detector.expect_progress(known, sensor.now))
    said = sensor.detector.snapshot(sensor.now)
    assert [each for each in said if isinstance(each, Progress)] == [known]
    running = {"workers": _worker(), "launcher": LauncherState.RUNNING, "attempt": 4}
    (stuck,) = events(sensor.run(LIMITS.workload_downtime_threshold_s + 10, **running))
    assert (stuck.type, stuck.attempt) == (EventType.NO_PROGRESS, 4)


def test_ranks_that_do_not_run_are_not_waited_for_by_the_default_threshold() -> None:
    sensor = Sensor()
    sensor.run(5, workers=_worker(step=7, step_age_s=0.0), launcher=LauncherState.RUNNING)
    waiting = {"attempt": 1, "launcher": LauncherState.STOPPING, "workers": _worker()}
    assert events(sensor.run(2 * LIMITS.workload_downtime_threshold_s, **waiting)) == []


def test_a_job_whose_ranks_go_back_to_an_earlier_step_advances_and_does_not_hang() -> None:
    """As after `Checkpointer.restore(step=...)` in a running job."""
    sensor = Sensor()
    limit = round(LIMITS.hang_threshold_s)
    began = last = sensor.now

    def runs(first: int, second: int, seconds: int) -> None:
        """The last step of each rank; 900 was finished before the restore."""
        for rank, told in enumerate((first, second)):
            age_s = sensor.now - last if told == 900 else 0.0
            sensor.beat(f"h{rank}", workers=_worker(rank, step=told, step_age_s=age_s))
        sensor.run(seconds, silent=("h0", "h1"))

    while sensor.now - began < limit - 5:  # the restore takes its time
        runs(900, 900, 5)
    runs(10, 900, 8)  # the ranks of h1 are late
    for step in range(15, 15 + 3 * limit, 5):
        runs(step, step - 5, 5)
    assert events(sensor.said) == []
    steps = [each.step for each in sensor.said if isinstance(each, Progress)]
    assert steps[-1] == step


def test_a_new_sensor_counts_the_time_without_a_step_from_the_step_and_not_from_its_own_start() -> None:
    sensor = Sensor()
    limit = LIMITS.hang_threshold_s
    stood_s = limit - 10.0
    for rank in (0, 1):
        sensor.beat(f"h{rank}", workers=_worker(rank, step=9, step_age_s=stood_s))
    began = sensor.now
    while not events(sensor.said, EventType.HANG) and sensor.now - began < limit:
        sensor.run(1)
    assert sensor.now - began == 10.0


def test_capacity_is_offered_once_for_what_is_there_and_again_after_a_while() -> None:
    sensor = Sensor(scaling=True)
    # The first offer was made while the sensor was built.
    assert events(sensor.run(70), EventType.SCALE_UP) == []
    assert len(events(sensor.run(40), EventType.SCALE_UP)) == 1
    changed = Evidence(id="k1", witness="orchestrator", text="cordoned")
    sensor.take(sensor.detector.orchestrator_changed("h2", Change.CORDONED, changed, sensor.now))
    sensor.take(sensor.detector.orchestrator_changed("h2", Change.CORDONED, changed, sensor.now))
    assert len(events(sensor.said, EventType.ORCHESTRATOR)) == 1
    (offer,) = events(sensor.run(3), EventType.SCALE_UP)
    assert offer.evidence[0].text == "capacity: 1 spares, a replica needs 1"


def test_a_spare_that_cannot_run_the_jobs_ranks_is_no_capacity() -> None:
    sensor = Sensor(scaling=True)
    for name in ("h2", "h3"):
        sensor.take(sensor.detector.register_host(replace(_host(name), workers_per_host=4), sensor.now))
    assert events(sensor.run(3 * LIMITS.scale_up_hold_s), EventType.SCALE_UP) == []


def test_a_job_that_tells_of_its_saves_is_offered_room_right_after_one_and_at_no_other_time() -> None:
    sensor = Sensor(scaling=True)
    hold_s = round(LIMITS.scale_up_hold_s)

    def trains(seconds: int, kept: int | None, attempt: int = 0) -> list[Event]:
        worker = _worker(step=round(sensor.now), step_age_s=0.0, kept_step=kept)
        return events(sensor.run(seconds, workers=worker, attempt=attempt), EventType.SCALE_UP)

    assert trains(10, 500) == []  # it may be long ago: this sensor has just begun
    assert trains(3 * hold_s, 500) == []
    assert len(trains(10, 600)) == 1
    assert trains(10, 700) == []  # it was offered just now
    # After a restart that goes for its first save.
    assert trains(2 * hold_s, None, attempt=1) == []
    assert trains(2 * hold_s, 700, attempt=1) == []
    assert len(trains(10, 800, attempt=1)) == 1
    assert trains(3 * hold_s, 900, attempt=0) == []  # late, of the attempt before
    # One that goes on from an earlier checkpoint than it had has a next one, too.
    assert trains(3 * hold_s, 300, attempt=2) == []
    assert len(trains(10, 400, attempt=2)) == 1


def test_a_job_that_was_made_again_is_known_also_where_its_attempt_is_told_before_its_run() -> None:
    sensor = Sensor(scaling=True)
    first, again = replace(sensor.job, run="a"), replace(sensor.job, run="b", first_attempt=1000)
    sensor.take(sensor.detector.register_workload(first, sensor.now))
    sensor.run(10, run="a", workers=_worker(step=700, step_age_s=0.0, kept_step=500))
    sensor.beat("h0", attempt=1000)  # its launcher has not met the others
    sensor.take(sensor.detector.register_workload(again, sensor.now))
    worker = _worker(step=501, step_age_s=0.0)
    said = sensor.run(3 * round(LIMITS.scale_up_hold_s), run="b", attempt=1000, workers=worker)
    assert events(said, EventType.SCALE_UP) == []


def test_a_new_sensor_offers_no_room_to_a_job_that_it_has_not_heard() -> None:
    fresh, now = Detector("s2", LIMITS, 5000.0), 5000.0
    job = WorkloadInfo(workload="train", replicas=2, max_replicas=3, scaling=True)
    fresh.expect_workload(job, now)
    for name in ("h0", "h1"):
        fresh.expect_host(_host(name, "train"), now)
    said = [each for name in ("h2", "h3") for each in fresh.register_host(_host(name), now)]
    while now < 5000.0 + 5.0:
        now += 1.0
        said += fresh.tick(now)
    assert events(said, EventType.SCALE_UP) == []


def test_an_offer_that_nobody_takes_is_repeated_more_and_more_seldom_until_something_changes() -> None:
    sensor = Sensor(scaling=True)
    hold_s = LIMITS.scale_up_hold_s
    # Without the limit there would be one each `hold_s`.
    assert len(events(sensor.run(40 * hold_s), EventType.SCALE_UP)) == 5  # after 1, 3, 7, 15 and 31 holds
    assert len(events(sensor.run(32 * hold_s), EventType.SCALE_UP)) == 2
    changed = Evidence(id="k1", witness="orchestrator", text="cordoned")
    sensor.take(sensor.detector.orchestrator_changed("h2", Change.CORDONED, changed, sensor.now))
    assert len(events(sensor.run(2), EventType.SCALE_UP)) == 1
    assert len(events(sensor.run(1.1 * hold_s), EventType.SCALE_UP)) == 1


def test_a_host_that_the_orchestrator_took_is_not_looked_for() -> None:
    sensor = Sensor()
    gone = Evidence(id="k1", witness="orchestrator", text="deleted")
    sensor.take(sensor.detector.orchestrator_changed("h1", Change.GONE, gone, sensor.now))
    assert events(sensor.run(100, silent=["h1"])) == []


def test_a_worker_that_falls_silent_is_asked_for_when_its_time_is_over_and_not_a_period_later() -> None:
    sensor = Sensor()

    def told(age_s: float) -> list[Output]:
        return sensor.beat("h1", workers=_worker(1, heartbeat_age_s=age_s))

    told(0.0)
    asked_at: list[float] = []
    for age_s in range(1, round(LIMITS.heartbeat_timeout_s) + 1):
        sensor.now += 1.0
        if Poll(host="h1") in sensor.take(sensor.detector.tick(sensor.now)):
            asked_at.append(age_s)
        elif age_s % 8 == 0:  # reports of a period of 8 s: the next one would come at 24 s
            assert events(told(age_s)) == []
    assert asked_at == [LIMITS.heartbeat_timeout_s]
    (lost,) = events(told(asked_at[0]))
    assert (lost.type, lost.ranks, lost.evidence[0].age_s) == (EventType.WORKER_HB, (1,), asked_at[0])
    told(0.0)
    for _ in range(60):  # of a worker that gives signs, never
        sensor.now += 1.0
        told(0.5)
        assert Poll(host="h1") not in sensor.take(sensor.detector.tick(sensor.now))


def test_a_replaced_host_is_forgotten_when_the_controller_has_and_not_before() -> None:
    sensor = Sensor()
    (lost,) = events(sensor.run(30, silent=["h1"]))
    again = replace(_host("h1"), id="h1.2")
    sensor.detector.register_host(again, sensor.now)
    others = [_host(name) for name in sensor.names if name != "h1"]
    # A controller that knows both, or none of them because its log is new, may still need what is said of it.
    assert sensor.detector.forget_replaced([*others, _host("h1", "train"), again], sensor.now) == []
    assert sensor.detector.forget_replaced(others, sensor.now) == []
    assert events(sensor.detector.snapshot(sensor.now)) == [lost]
    assert sensor.detector.forget_replaced([*others, again], sensor.now) == ["h1"]
    assert events(sensor.detector.snapshot(sensor.now)) == []


def test_a_snapshot_repeats_what_is_open_with_the_same_ids() -> None:
    sensor = Sensor()
    (lost,) = events(sensor.run(30, silent=["h1"]))
    finding = Finding(type=EventType.ECC, evidence=Evidence(id="h0/e", witness="ecc"))
    (ecc,) = events(sensor.beat("h0", findings=(finding,)))
    said = sensor.detector.snapshot(sensor.now)
    assert events(said) == [lost, ecc]
    assert {each.id: each.state for each in said if isinstance(each, HostInfo)}["h1"] is DeviceState.FAILED
    assert sensor.job in said


def test_a_new_sensor_misses_the_hosts_that_the_controller_knows() -> None:
    detector = Detector("s2", LIMITS, 0.0)
    detector.expect_workload(WorkloadInfo(workload="train"), 0.0)
    detector.expect_host(_host("h1", "train"), 0.0)
    said = [each for now in range(1, 25) for each in detector.tick(float(now))]
    (lost,) = events(said)
    assert (lost.host, lost.workload) == ("h1", "train")
    assert [each for each in said if isinstance(each, Silence)] == [Silence(frozen=False, silent=1, hosts=1)]


@pytest.mark.parametrize("state", [DeviceState.FAILED, DeviceState.RUNNING])
def test_a_new_sensor_misses_a_host_whose_rank_failed_and_not_one_that_was_lost(state: DeviceState) -> None:
    detector = Detector("s2", LIMITS, 0.0)
    rank = WorkerInfo(id="train/0", local_rank=0, global_rank=0, state=state)
    known = replace(_host("h1"), state=DeviceState.FAILED, workers=(rank,))
    detector.expect_host(known, 0.0)
    said = [each for now in range(1, 25) for each in detector.tick(float(now))]
    assert len(events(said)) == (state is DeviceState.FAILED)


def test_whether_evidence_holds_is_told_only_after_a_host_was_asked() -> None:
    sensor = Sensor()
    sensor.run(5, workers=_worker(0, step=7, step_age_s=0.1), attempt=1)
    (event,) = events(sensor.beat("h1", workers=_worker(1, state=DeviceState.FAILED), attempt=1))
    sensor.run(4)
    assert sensor.detector.poll("train") == [Poll(host="h0"), Poll(host="h1")]
    assert sensor.detector.holds(_command(event), sensor.now) is None
    # Nor by the one that has lost its own: their launcher may be stopped, and the ranks go on.
    sensor.beat("h1", workers=_worker(1, state=DeviceState.FAILED), attempt=1)
    assert sensor.detector.holds(_command(event), sensor.now) is None
    sensor.beat("h0", workers=_worker(0, step=7, step_age_s=5.0), attempt=1)
    assert sensor.detector.holds(_command(event), sensor.now) is True
    sensor.beat("h0", workers=_worker(0, step=8, step_age_s=0.2), attempt=1)
    assert sensor.detector.holds(_command(event), sensor.now) is False


def test_a_host_that_waits_for_a_place_neither_answers_for_its_job_nor_hides_a_hang() -> None:
    sensor = Sensor()
    sensor.take(sensor.detector.register_host(_host("h2", "train"), sensor.now))
    said = sensor.run(70, workers=_worker(0, step=7, step_age_s=0.0))
    stuck = {"step": 7, "step_age_s": 70.0}
    (hang,) = events(said + sensor.run(70, workers=_worker(0, **stuck)), EventType.HANG)
    assert set(sensor.detector.poll("train")) == {Poll(host="h0"), Poll(host="h1")}
    sensor.beat("h2")
    assert sensor.detector.holds(_command(hang), sensor.now) is None
    sensor.beat("h0", workers=_worker(0, **stuck))
    assert sensor.detector.holds(_command(hang), sensor.now) is True


def test_answers_that_may_be_as_old_as_the_sensor_was_stopped_do_not_tell_whether_a_job_advances() -> None:
    sensor = Sensor()
    sensor.run(5, workers=_worker(0, step=7, step_age_s=0.1), attempt=1)
    (event,) = events(sensor.beat("h1", workers=_worker(1, state=DeviceState.FAILED), attempt=1))
    sensor.now += 3600.0
    for seconds, holds in ((0.2, None), (3.2, False), (6.2, True)):
        assert Poll(host="h0") in sensor.detector.poll("train")
        sensor.beat("h0", workers=_worker(0, step=8, step_age_s=seconds), attempt=1)
        assert sensor.detector.holds(_command(event), sensor.now) is holds
        sensor.run(3, silent=sensor.names)


def test_what_another_sensor_concluded_of_a_host_is_answered_by_how_the_host_is_now() -> None:
    sensor = Sensor()
    swap = _command_of("h1", "s0:7/0")
    assert sensor.detector.holds(swap, sensor.now) is False
    assert sensor.detector.holds(_command_of("h9", "s0:7/0"), sensor.now) is None
    # What no sensor concluded holds, and so does what this one did.
    assert sensor.detector.holds(_command_of("h1", "i1/stuck1", "s0:7/0"), sensor.now) is True
    assert sensor.detector.holds(_command_of("h1", "h1/nvml/b-ecc-2"), sensor.now) is True
    sensor.beat("h1", workers=_worker(1, state=DeviceState.FAILED))
    sensor.beat("h0", workers=_worker(0))  # it is polled then
    assert sensor.detector.holds(swap, sensor.now) is True
    sensor.beat("h1", workers=_worker(1))
    sensor.run(26, silent=["h1"])
    assert sensor.detector.holds(swap, sensor.now) is True


def test_a_new_sensor_cannot_tell_whether_a_host_is_lost_until_it_could_have_come() -> None:
    detector = Detector("s2", LIMITS, 0.0)
    detector.expect_host(replace(_host("h1"), state=DeviceState.FAILED), 0.0)
    swap = _command_of("h1", "s1:7/0")
    assert detector.holds(swap, 1.0) is None
    for now in range(1, 21):
        detector.tick(float(now))
    assert detector.holds(swap, 20.0) is True
    detector.register_host(_host("h1"), 21.0)
    assert detector.holds(swap, 21.0) is None
    detector.report(DaemonReport(host="h1", incarnation="d1", sequence=0), 22.0)
    assert detector.holds(swap, 22.0) is False


def _command_of(host: str, *evidence: str) -> Command:
    kind = CommandKind.HOT_SWAP
    return Command(epoch=1, id="c1", kind=kind, workload="train", host=host, spare="h3", evidence=evidence)


@pytest.mark.parametrize("by", ["witness", "orchestrator", "launcher"])
def test_a_last_step_from_before_a_confirmed_loss_is_no_advance_and_a_later_one_is(by: str) -> None:
    sensor = Sensor()
    sensor.run(5, workers=_worker(0, step=7, step_age_s=0.1), attempt=1)
    if by == "launcher":
        said = sensor.detector.report(
            sensor.report("h1", attempt=1, launcher=LauncherState.GAVE_UP), sensor.now
        )
    else:
        sensor.take(sensor.detector.stream_ended("h1", sensor.now))
    if by == "orchestrator":
        found = Evidence(id="pod-1", witness="orchestrator", text="deleted")
        said = sensor.detector.orchestrator_changed("h1", Change.GONE, found, sensor.now)
    if by == "witness":
        said = sensor.detector.witness_answered("h1", False, "orchestrator", sensor.now)
    (lost,) = events(sensor.take(said))
    sensor.now += 1.0
    # It is told late, as its launcher reports once a second: the first swap must not be withdrawn for it.
    sensor.beat("h0", workers=_worker(0, step=8, step_age_s=1.2), attempt=1)
    assert sensor.detector.holds(_command(lost), sensor.now) is True
    sensor.beat("h0", workers=_worker(0, step=9, step_age_s=0.2), attempt=1)
    assert sensor.detector.holds(_command(lost), sensor.now) is False


def test_a_silence_that_nobody_confirms_waits_until_the_job_stands_still() -> None:
    sensor = Sensor()
    said = sensor.run(25, silent=["h1"], workers=_worker(0, step=7, step_age_s=0.1), attempt=1)
    (lost,) = events(said, EventType.HOST_HB)
    assert not lost.confirms_loss
    sensor.beat("h0", workers=_worker(0, step=8, step_age_s=2.0), attempt=1)
    assert sensor.detector.holds(_command(lost), sensor.now) is False


@pytest.mark.parametrize("state", [DeviceState.COMPLETE])
def test_a_host_that_is_done_may_fall_silent(state: DeviceState) -> None:
    sensor = Sensor()
    for name in sensor.names:
        sensor.beat(name, workers=_worker(0, state=state))
    sensor.now += 1.0
    assert events(sensor.run(100, silent=sensor.names)) == []


# ---------------------------------------------------------------- names that are used again


def _name_again(sensor: Sensor, run: str, **fields: object) -> list[Output]:
    """The launchers of both hosts say which start of the job they are of."""
    sensor.job = replace(sensor.job, run=run, **fields)
    return sensor.take(sensor.detector.register_workload(sensor.job, sensor.now))


def test_another_job_under_the_name_is_judged_by_its_own_steps_and_times() -> None:
    sensor = Sensor(downtime_threshold_s=100.0)
    _name_again(sensor, "r1")
    trains = {"attempt": 3, "run": "r1", "workers": _worker(step=500, step_age_s=0.0)}
    sensor.beat("h0", **trains)
    sensor.run(95)
    (known,) = _name_again(sensor, "r2")
    assert known == sensor.job
    # Its attempts are lower, and a late word of the other job is none about it.
    assert sensor.beat("h1", **{**trains, "attempt": 4}) == []
    again = {"attempt": 0, "run": "r2"}
    assert events(sensor.run(20, **again, workers=_worker(step=1, step_age_s=0.0))) == []
    sights = {
        sight.host: (sight.attempt, sight.steps) for sight in sensor.detector.sights("", 9, sensor.now)[0]
    }
    assert sights["h0"] == sights["h1"] == (0, ((0, 1),))
    told = [each for each in sensor.said if isinstance(each, Progress)]
    assert {(each.run, each.attempt, each.step) for each in told[1:]} == {("r2", 0, 1)}
    # A launcher of the first one that is heard of again takes nothing back.
    assert sensor.take(sensor.detector.register_workload(replace(sensor.job, run="r1"), sensor.now)) == []
    (stuck,) = events(sensor.run(100, **again), EventType.NO_PROGRESS)
    assert (stuck.run, stuck.attempt) == ("r2", 0)


def test_evidence_of_the_job_before_ends_no_other_job() -> None:
    sensor = Sensor()
    _name_again(sensor, "r1")
    (failed,) = events(sensor.beat("h0", run="r1", workers=_worker(state=DeviceState.FAILED)))
    command = replace(_command(failed), evidence=(failed.evidence[0].id, "i1/stuck1"), run=failed.run)
    sensor.beat("h0", run="r1")
    assert sensor.detector.holds(command, sensor.now) is True
    _name_again(sensor, "r2")
    assert sensor.detector.holds(command, sensor.now) is False


def test_a_start_whose_attempts_go_on_is_the_same_job() -> None:
    sensor = Sensor(downtime_threshold_s=100.0)
    _name_again(sensor, "r1")
    sensor.beat("h0", attempt=3, run="r1", workers=_worker(step=500, step_age_s=0.0))
    sensor.run(95)
    _name_again(sensor, "r2", first_attempt=1_000_000)
    assert sensor.detector.snapshot(sensor.now)[0] == sensor.job
    assert [each.step for each in sensor.detector.snapshot(sensor.now) if isinstance(each, Progress)] == [500]
    assert events(sensor.run(90)) == []
    # A launcher that has come back, and has not met the others yet, does not know which start it is of.
    assert sensor.take(sensor.detector.register_workload(replace(sensor.job, run=""), sensor.now)) == []


def test_jobs_that_ended_and_hosts_that_stay_lost_are_forgotten() -> None:
    sensor = Sensor(downtime_threshold_s=100.0)
    sensor.run(25, silent=["h1"])
    sensor.take(sensor.detector.register_host(_host("h0"), sensor.now))
    sensor.run(98, silent=["h1"])
    assert sensor.detector.snapshot(sensor.now)[0] == sensor.job
    sensor.run(4, silent=["h1"])
    known = sensor.detector.snapshot(sensor.now)
    assert not any(isinstance(each, WorkloadInfo) for each in known)
    assert sensor.detector.knows_host("h1")
    for _ in range(round(LIMITS.verdict_s)):
        sensor.now += 1.0
        if sensor.now % 10 < 1.0:
            for name in ("h0", "h2", "h3"):
                sensor.beat(name)
        sensor.detector.tick(sensor.now)
    assert (sensor.detector.knows_host("h1"), sensor.detector.host_count) == (False, 3)
