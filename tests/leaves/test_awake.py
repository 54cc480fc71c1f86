# SPDX-License-Identifier: Apache-2.0
"""Limits on other processes leave out the time in which this process was stopped."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

import pytest

from resiliency import runtime
from resiliency.runtime import MOST_AWAKE_S, TICK_S, AwakeTime
from resiliency.testing.processes import Command

ROOT = Path(__file__).parents[2]
WAIT = 60.0


@pytest.mark.parametrize(
    ("ticks", "now", "awake"),
    [
        ([], 0.0, 0.0),
        ([], 0.25, 0.25),
        ([], 0.5, 0.5),
        ([], 60.0, 0.5),  # read before the tick that comes late
        ([0.25, 0.5, 0.75], 1.0, 1.0),
        ([0.25, 0.5, 60.5], 60.5, 1.0),
        ([0.25, 0.5, 60.5], 60.75, 1.25),
        ([10.0, 20.0, 30.0], 30.0, 1.5),  # continued now and then, as by gang scheduling
    ],
)
def test_a_tick_that_comes_late_counts_as_one_in_time(ticks: list[float], now: float, awake: float) -> None:
    clock, last = AwakeTime(0.0), 0.0
    for tick in ticks:
        assert clock.at(tick) >= last
        clock.tick(tick)
        last = clock.at(tick)
    assert clock.at(now) == pytest.approx(awake)


@pytest.mark.parametrize(
    ("then", "now", "awake"),
    [
        (0.0, 0.5, 0.5),
        (0.0, 61.0, 2.0),  # a stop from 0.5 or so to 60
        (30.0, 61.0, 1.0),  # of another process, which ran meanwhile
        (60.0, 61.0, 1.0),
        (60.5, 100.0, 1.0),  # and stopped again
        (61.0, 60.75, 0.0),
    ],
)
def test_an_age_leaves_out_the_stops_since_then(then: float, now: float, awake: float) -> None:
    clock = AwakeTime(0.0)
    for tick in (0.25, 0.5, 60.0, 60.25, 60.5, 60.75, 61.0):
        if tick <= now:
            clock.tick(tick)
    assert clock.since(then, now) == pytest.approx(awake)


def test_a_suspension_is_left_out_of_an_age_after_any_number_of_late_ticks() -> None:
    clock, now = AwakeTime(0.0), 600.0
    clock.tick(now)
    for late in range(1000):
        now += 0.6 + late % 7 / 100
        clock.tick(now)
    assert clock.since(0.0, now) <= now - 600.0 + MOST_AWAKE_S


PROGRAM = """
import os, signal, time
from resiliency.runtime import awake_s, awake_since
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
began, awake = time.monotonic(), awake_s()
if os.fork() == 0:
    while awake_s() < awake + 1.0:
        time.sleep(0.01)
    os._exit(0)
print("began", flush=True)
signal.sigwait([signal.SIGUSR1])
print(os.wait()[1], time.monotonic() - began, awake_s() - awake, awake_since(began), flush=True)
"""


def test_a_stop_of_a_process_is_left_out_and_a_forked_child_has_a_clock_of_its_own() -> None:
    with Command([sys.executable, "-c", PROGRAM], cwd=ROOT) as program:
        program.wait_for_line("began", timeout=WAIT)
        program.signal(signal.SIGSTOP)
        threading.Event().wait(3.0)  # what is tested
        program.signal(signal.SIGCONT)
        program.signal(signal.SIGUSR1)
        status, real, awake, since = map(float, program.wait_for_line(r"^\d+ ", timeout=WAIT).string.split())
    assert status == 0
    assert real >= 3.0
    assert awake <= real - 3.0 + 2 * MOST_AWAKE_S
    assert since == pytest.approx(awake, abs=2 * MOST_AWAKE_S)


def test_what_is_read_just_after_a_stop_may_be_as_old_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    now, clock = 0.0, AwakeTime(0.0)
    monkeypatch.setattr(runtime, "_monotonic", lambda: now)
    monkeypatch.setattr(runtime, "_awake", clock)
    monkeypatch.setattr(runtime, "_ticker", object())
    for now in (0.25, 0.5, 1.0, 40.0, 40.25):
        clock.tick(now)
    assert [runtime.was_stopped_for(seconds) for seconds in (2.0, 30.0, 60.0)] == [True, True, False]
    for now in (40.5, 41.0, 41.5):
        clock.tick(now)
    assert not runtime.was_stopped_for(2.0)


def test_without_a_thread_all_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    now = 0.0
    monkeypatch.setattr(runtime, "_monotonic", lambda: now)
    monkeypatch.setattr(runtime, "_awake", AwakeTime(now))
    monkeypatch.setattr(runtime, "_ticker", None)
    monkeypatch.setattr(runtime.AwakeTicker, "start", no_thread)
    now = 60.0
    assert runtime.awake_s() == 60.0
    now = 90.0
    assert runtime.awake_s() == 90.0


def test_time_goes_on_while_the_interpreter_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(runtime, "_monotonic", lambda: now)
    monkeypatch.setattr(runtime, "_awake", AwakeTime(now))
    monkeypatch.setattr(runtime, "_ticker", runtime.AwakeTicker(runtime._awake))
    now = 30.0
    assert runtime.awake_s() == MOST_AWAKE_S
    monkeypatch.setattr(sys, "is_finalizing", lambda: True)
    assert runtime.awake_s() == 30.0
    now = 60.0
    assert runtime.awake_s() == 60.0


#: Where a limit ends, replaces or gives up another process.
JUDGES = (
    *("daemon_link", "checkpoint/agent/client", "checkpoint/agent/server", "checkpoint/agent/save_collector"),
    *("checkpoint/storage/watched", "checkpoint/replication/completion_link"),
    *("checkpoint/replication/receiver", "checkpoint/replication/transport/connection"),
    *("checkpoint/stop/stop_link", "checkpoint/stop/termination", "data/dispatch/client"),
    *("launch/agent", "launch/_compat", "launch/hangs/looking", "launch/standby"),
    *("launch/rendezvous/reconnecting_store", "launch/agents/main", "launch/host_check/exchange"),
    "template/client",
)


def test_modules_that_judge_other_processes_read_no_other_clock() -> None:
    sources = {name: (ROOT / "resiliency" / f"{name}.py").read_text() for name in JUDGES}
    assert not [name for name, source in sources.items() if "time.monotonic" in source]
    assert not [name for name, source in sources.items() if "awake_s" not in source]


def test_a_tick_is_short_beside_the_shortest_limit() -> None:
    assert TICK_S < MOST_AWAKE_S <= 0.5
