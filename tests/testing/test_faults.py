# SPDX-License-Identifier: Apache-2.0
"""A fault is a value with a text form, and an injector makes exactly that fault happen."""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resiliency.errors import ConfigError
from resiliency.events import EventStream, EventType
from resiliency.runtime import RunInfo
from resiliency.testing import Fault, FaultInjector, FaultKind, InjectedFault, MemorySink, Phase
from resiliency.testing.processes import Command

small = st.integers(0, 10_000)
whens = st.one_of(
    st.builds(dict, step=small),
    st.builds(dict, delay=st.timedeltas(timedelta(0), timedelta(days=300))),
)
hows = st.one_of(
    st.builds(dict, kind=st.sampled_from(FaultKind)),
    st.builds(dict, kind=st.just(FaultKind.EXIT), exit_code=st.integers(0, 255)),
)
faults = st.builds(
    lambda when, how, **rest: Fault(**when, **how, **rest),
    whens,
    hows,
    rank=st.none() | small,
    phase=st.none() | st.sampled_from(Phase),
    attempt=st.none() | small,
)


@given(faults)
def test_the_text_form_gives_the_same_fault_back(fault: Fault) -> None:
    assert Fault.parse(str(fault)) == fault


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("rank_killed,8", {"kind": FaultKind.KILLED, "delay": timedelta(seconds=8)}),
        ("rank_hung, 0.5 , rank=0", {"kind": FaultKind.HUNG, "delay": timedelta(seconds=0.5), "rank": 0}),
        ("rank_exception,step=3", {"kind": FaultKind.EXCEPTION, "step": 3}),
        ("rank_exit,step=3,code=7", {"kind": FaultKind.EXIT, "step": 3, "exit_code": 7}),
        ("rank_killed,step=1,attempt=any", {"kind": FaultKind.KILLED, "step": 1, "attempt": None}),
        ("rank_killed,step=1,rank=last", {"kind": FaultKind.KILLED, "step": 1, "rank": None}),
        (
            "rank_terminated,step=2,phase=save_started",
            {"kind": FaultKind.TERMINATED, "step": 2, "phase": Phase.SAVE_STARTED},
        ),
    ],
)
def test_the_text_form_of_command_lines_is_read(text: str, fault: dict[str, Any]) -> None:
    assert Fault.parse(text) == Fault(**fault)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "'' is not one of rank_killed, rank_hung"),
        ("gpu_melted,8", "'gpu_melted' is not one of rank_killed"),
        ("rank_killed", "delay must be seconds .* found ''"),
        ("rank_killed,soon", "delay must be seconds .* found 'soon'"),
        ("rank_killed,-1", "found '-1'"),
        ("rank_killed,nan", "found 'nan'"),
        ("rank_killed,1e300", "found '1e300'"),
        ("rank_killed,step=", "step must be a whole number.* found ''"),
        ("rank_killed,step=-3", "step must be a whole number.* found '-3'"),
        ("rank_killed,8,step=3", "'step=3' is not one of rank=, phase="),
        ("rank_killed,8,when=now", "'when=now' is not one of rank=, phase="),
        ("rank_killed,8,rank=1,rank=2", "rank= is given twice"),
        ("rank_killed,8,phase=lunch", "'lunch' is not one of initialized"),
        ("rank_killed,8,code=3", "only rank_exit has an exit code"),
        ("rank_exit,8,code=300", "exit code is 0 to 255, found 300"),
    ],
)
def test_a_bad_text_is_answered_with_the_problem_and_the_allowed_forms(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"{problem}.*Write <fault>,<delay>.*rank_exit.*step=N"):
        Fault.parse(text)


def test_a_fault_needs_exactly_one_of_step_and_delay() -> None:
    with pytest.raises(ConfigError, match="either a step or a delay"):
        Fault(kind=FaultKind.KILLED)
    with pytest.raises(ConfigError, match="either a step or a delay"):
        Fault(kind=FaultKind.KILLED, step=1, delay=timedelta(seconds=1))


def test_only_the_meant_rank_and_attempt_are_struck() -> None:
    last = Fault(kind=FaultKind.KILLED, step=1)
    assert [last.hits(RunInfo(rank=r, world_size=3, attempt=0)) for r in range(3)] == [False, False, True]
    assert not last.hits(RunInfo(rank=2, world_size=3, attempt=1))
    assert not last.hits(RunInfo()), "a launcher is no rank"
    always = Fault(kind=FaultKind.KILLED, step=1, attempt=None, rank=0)
    assert always.hits(RunInfo(rank=0, world_size=3, attempt=7))


def test_an_exception_strikes_once_at_its_point_and_is_recorded_first() -> None:
    info, sink = RunInfo(rank=0, attempt=0), MemorySink()
    fault = Fault(kind=FaultKind.EXCEPTION, step=2)
    with FaultInjector([fault], info, EventStream(info, [sink])) as injector:
        injector.at(step=1)
        injector.at(step=2, phase=Phase.STEP_STARTED)
        with pytest.raises(InjectedFault, match="rank_exception,step=2"):
            injector.at(step=2)
        injector.at(step=2)
    (event,) = sink.events
    assert (event.type, event.step) == (EventType.FAULT_INJECTED, 2)
    assert event.fields == {"fault": "rank_exception,step=2"}


def test_a_delayed_exception_waits_for_the_next_point() -> None:
    with FaultInjector([Fault.parse("rank_exception,0")], RunInfo(rank=0)) as injector:
        for timer in injector_threads():
            timer.join(60)
        with pytest.raises(InjectedFault):
            injector.at(step=1, phase=Phase.SAVE_STARTED)


def test_leaving_the_injector_cancels_its_delays() -> None:
    with FaultInjector([Fault.parse("rank_killed,3600")], RunInfo(rank=0)):
        assert len(injector_threads()) == 1
    assert injector_threads() == []


def injector_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "fault-injector"]


RANK = """
    import sys, threading
    from resiliency.events import BackgroundSink, EventStream, FileSink
    from resiliency.runtime import RunInfo
    from resiliency.testing import Fault, FaultInjector
    info = RunInfo(rank=0, attempt=0)
    events = EventStream(info, [BackgroundSink(FileSink("events.jsonl"))])
    print("training", flush=True)
    with FaultInjector([Fault.parse(sys.argv[1])], info, events) as injector:
        injector.at(step=1)
        threading.Event().wait(30)
        print("still here")
"""


@pytest.mark.parametrize("when", ["step=1", "0.05"])
@pytest.mark.parametrize(
    ("kind", "returncode"),
    [("rank_killed", -signal.SIGKILL), ("rank_terminated", -signal.SIGTERM), ("rank_exit", 1)],
)
def test_a_process_dies_as_told_and_its_last_event_is_on_disk(
    tmp_path: Path, when: str, kind: str, returncode: int
) -> None:
    argv = [sys.executable, "-c", textwrap.dedent(RANK), f"{kind},{when}"]
    with Command(argv, cwd=tmp_path) as cmd:
        assert cmd.wait(timeout=120) == returncode
        assert cmd.output == "training\n"
    (line,) = (tmp_path / "events.jsonl").read_text().splitlines()
    assert Fault.parse(json.loads(line)["fields"]["fault"]) == Fault.parse(f"{kind},{when}")


def test_a_hung_process_is_stopped_and_can_be_continued(tmp_path: Path) -> None:
    code = RANK.replace("threading.Event().wait(30)", "pass")
    with Command([sys.executable, "-c", textwrap.dedent(code), "rank_hung,step=1"], cwd=tmp_path) as cmd:
        # Returns when it stops, or ends because it never stopped.
        state = os.waitid(os.P_PID, cmd.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        assert state is not None
        assert state.si_status == signal.SIGSTOP
        cmd.signal(signal.SIGCONT)
        cmd.wait_for_line("still here", timeout=120)
        assert cmd.wait(timeout=120) == 0


def test_an_attached_injector_strikes_inside_the_emit_of_the_event_that_a_fault_is_placed_at() -> None:
    info, sink = RunInfo(rank=0, attempt=0), MemorySink()
    events = EventStream(info, [sink])
    with FaultInjector([Fault.parse("rank_exception,step=3,phase=save_started")], info, events) as injector:
        injector.attach(events)
        events.emit(EventType.STEP_FINISHED, step=3)
        events.emit(EventType.SAVE_STARTED, step=2)
        with pytest.raises(InjectedFault):
            events.emit(EventType.SAVE_STARTED, step=3)
    assert [event.type for event in sink.events][-2:] == [EventType.SAVE_STARTED, EventType.FAULT_INJECTED]


def test_an_attached_injector_counts_delays_from_the_start_of_the_training_loop() -> None:
    info = RunInfo(rank=0, attempt=0)
    events = EventStream(info)
    injector = FaultInjector([Fault.parse("rank_exception,0,phase=step_finished")], info, events)
    injector.attach(events)
    events.emit(EventType.STEP_FINISHED, step=1)  # before the loop started: nothing is due
    events.emit(EventType.INITIALIZED)
    injector.close()  # waits for the timer, which had no delay left
    with pytest.raises(InjectedFault):
        events.emit(EventType.STEP_FINISHED, step=2)
