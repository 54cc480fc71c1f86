# SPDX-License-Identifier: Apache-2.0
"""Probes of one host: short programs, each in a process of its own with limits of time.

A fault is only what a probe has measured: a wrong result, a device's own error, or a silence or a crash after
the probe has begun to measure.  A probe that did not come so far, had no core, was stopped, or was ended by
somebody or for memory says nothing of its host, and why.  The programs are in `programs`.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from resiliency.cgroups import oom_kills, throttled_s
from resiliency.launch.health.evidence import signal_name
from resiliency.launch.health.scores import Measurement
from resiliency.proc_stat import read_stat, waited_for_core_s

#: Time between two looks at a probe.
_LOOK_S = 0.5
#: A look may be so late.  Beyond that this process stood still itself, and so may have its probe.
_LATE_S = 0.5
#: For a probe that was killed to end: the kernel may hold it in a driver, and its children hold its output.
_KILL_S = 2.0
_NO_CORE, _STOPPED = "had no core", "was stopped"
#: A core that computes wrong may crash a program so; an abort is the program's own.
_CRASHES = frozenset({signal.SIGSEGV, signal.SIGILL, signal.SIGBUS, signal.SIGFPE})


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One program.

    Attributes:
        limit_s: longest silence while it measures, without time in which it could not run.
        start_s: the same until it begins to measure, imports included.
    """

    name: str
    unit: str
    limit_s: float
    start_s: float
    tolerance: float = 0.25


#: In the order in which they run; one at a time, as they would slow each other.
PROBES = (
    Probe(name="memory", unit="GB/s", limit_s=10, start_s=10),
    # How fast pages of it are made differs from host to host.
    Probe(name="shm", unit="GB/s", limit_s=10, start_s=10, tolerance=0.7),
    # Storage of many hosts is shared, and its speed is that of the others' writes.
    Probe(name="disk", unit="MB/s", limit_s=15, start_s=15, tolerance=0.7),
    # The last one takes what time is left: on storage that is slow, torch's import alone may need it.
    Probe(name="compute", unit="GFLOP/s", limit_s=30, start_s=math.inf),
)


@dataclass(frozen=True, kw_only=True)
class HostProbes:
    """Runs the probes of this host.

    Attributes:
        disk: directory in which the disk probe makes a file without a name.
        command: program of the probes; tests have one that is broken.
        probes: which ones.
    """

    host: str
    disk: Path
    command: tuple[str, ...] = (sys.executable, "-m", "resiliency.launch.host_check.programs")
    probes: tuple[Probe, ...] = PROBES

    def run(self, timeout_s: float) -> list[Measurement]:
        """All measurements within `timeout_s`, of each probe one at least."""
        left_s = timeout_s
        found: list[Measurement] = []
        for probe in self.probes:
            measurements, spent_s = self._run_one(probe, left_s, timeout_s)
            found += measurements
            left_s -= spent_s
        return found

    def _run_one(self, probe: Probe, left_s: float, timeout_s: float) -> tuple[list[Measurement], float]:
        if left_s <= 0:
            missing = f"no time was left of {timeout_s:g} s"
            return [self._measurement(probe, {"probe": probe.name, "missing": missing})], 0.0
        argv = [*self.command, probe.name, str(self.disk)]
        run = _run_process(argv, probe, left_s)
        results, spent_s = run.results, run.spent_s
        if run.crash:
            text = f"crashed once: {run.crash}; no time was left for a second try"
            if left_s > spent_s:
                again = _run_process(argv, probe, left_s - spent_s)
                spent_s += again.spent_s
                results = again.results
                text = f"crashed once: {run.crash}; the second try did not"
                if again.crash:
                    twice = f"crashed twice: {run.crash}, {again.crash}"
                    results.append({"probe": again.stage, "error": twice})
            if not any("error" in one for one in results):
                results.append({"probe": run.stage, "missing": text})
        found = [self._measurement(probe, one) for one in results]
        return list({one.probe: one for one in found}.values()), spent_s  # a failure takes a result's place

    def _measurement(self, probe: Probe, said: Mapping[str, Any]) -> Measurement:
        return Measurement(
            host=self.host,
            probe=str(said["probe"]),
            value=float(said.get("value", 0.0)),
            unit=probe.unit,
            tolerance=probe.tolerance,
            **{name: str(said.get(name, "")) for name in ("error", "missing", "note", "digest", "platform")},
        )


@dataclass(kw_only=True)
class ProbeRun:
    """The results of a process, and its crash.

    Attributes:
        stage: the part of the probe that it was at in the end.
        spent_s: time of it that this process saw.
    """

    results: list[dict[str, Any]]
    stage: str = ""
    crash: str = ""
    spent_s: float = 0.0


def _run_process(argv: list[str], probe: Probe, budget_s: float) -> ProbeRun:
    # A launcher limits the threads of its ranks; a probe has the host for itself.
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    kills = oom_kills()
    try:
        process = subprocess.Popen(
            argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    except OSError as error:
        return ProbeRun(results=[{"probe": probe.name, "missing": f"could not start: {error.strerror}"}])
    watch = ProbeWatch(process.pid)
    output, errors, ended = b"", b"", False
    end: dict[str, str] = {}
    stage, results, is_complete = _read_results(output, probe.name)
    try:
        while not (end or ended or is_complete):
            look_s = max(min(_LOOK_S, budget_s - watch.spent_s), 0.01)
            try:
                output, errors = process.communicate(timeout=look_s)
                ended = True
            except subprocess.TimeoutExpired as partial:
                output = partial.output or b""
            watch.look(look_s, len(output))
            stage, results, is_complete = _read_results(output, probe.name)
            if not (ended or is_complete):
                end = watch.judge(probe, budget_s, bool(stage))
    finally:
        if not ended:
            _kill(process)
    if ended and not is_complete:
        end = _why_ended(process.returncode, bool(stage), errors, oom_kills() != kills)
    run = ProbeRun(results=results, stage=stage or probe.name, spent_s=watch.spent_s)
    if "crash" in end:
        run.crash = end["crash"]
    elif end and not (process.returncode == 0 and results):
        results.append({"probe": run.stage, **end})
    return run


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a probe, and wait for it within bounds."""
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=_KILL_S)
    process.poll()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def _why_ended(code: int, has_begun: bool, errors: bytes, out_of_memory: bool) -> dict[str, str]:
    """The crash of a probe that ended by itself, or why it measured nothing."""
    if code < 0:
        name = signal_name(-code)
        if -code in _CRASHES and has_begun:
            return {"crash": name}
        reason = ", its control group counted a kill for memory" if out_of_memory else ""
        return {"missing": f"was ended by {name}{reason}"}
    last = errors.decode(errors="replace").strip().splitlines()[-1:]
    return {"missing": ", ".join([f"ended with exit code {code} and no result", *last])}


def _read_results(output: bytes, name: str) -> tuple[str, list[dict[str, Any]], bool]:
    """The part of a probe that has begun last, empty before the first; all results; whether it is over."""
    stage = ""
    results: list[dict[str, Any]] = []
    for line in output.splitlines():
        try:
            said = dict(json.loads(line))
        except (ValueError, TypeError):  # the last one may be torn; libraries print as they like
            continue
        if "end" in said:
            return stage, results, True
        if "begins" in said:
            stage = str(said["begins"])
        elif said.keys() & {"value", "error", "missing"}:
            results.append({"probe": stage or name, **said})
    return stage, results, False


class ProbeWatch:
    """The time that a probe had, and how much of it the probe could not run.

    Attributes:
        spent_s: that this process saw.
        silent_s: since the last output, without time in which the probe could not run.
        held_s: of the time spent, by the reason why the probe could not run.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._looked_at = time.monotonic()
        self._threads: dict[str, _ThreadLook] = {}
        self._throttled_s = throttled_s()
        self._size = 0
        self.spent_s = self.silent_s = 0.0
        self.held_s = {_NO_CORE: 0.0, _STOPPED: 0.0}

    def look(self, asked_s: float, size: int) -> None:
        """Add the time since the last look, of which `asked_s` were to pass; `size` is that of the output."""
        now, before, throttled_before_s = time.monotonic(), self._threads, self._throttled_s
        passed_s = min(now - self._looked_at, asked_s + _LATE_S)
        self._looked_at, self._threads, self._throttled_s = now, _look_at_threads(self._pid), throttled_s()
        self.spent_s += passed_s
        reason, held_s = _NO_CORE, self._throttled_s - throttled_before_s
        for thread, found in self._threads.items():
            known = before.get(thread, _ThreadLook())
            if found.state in "Tt":
                reason, held_s = _STOPPED, passed_s
                break
            # The kernel counts a wait for a core when it is over.
            waits = found.state == "R" and found == known
            held_s = max(held_s, passed_s if waits else found.waited_s - known.waited_s)
        held_s = min(held_s, passed_s)
        self.held_s[reason] += held_s
        self.silent_s = 0.0 if size != self._size else self.silent_s + passed_s - held_s
        self._size = size

    def judge(self, probe: Probe, budget_s: float, has_begun: bool) -> dict[str, str]:
        """The reason to end the probe, as an error or as what is missing; empty: it may go on."""
        if has_begun and self.silent_s >= probe.limit_s:
            return {"error": f"hung: no result after {self.silent_s:.1f} s"}
        if not has_begun and self.silent_s >= probe.start_s:
            return {"missing": f"did not begin to measure within {self.silent_s:.1f} s"}
        if self.spent_s < budget_s:
            return {}
        reason, held_s = max(self.held_s.items(), key=lambda one: one[1])
        if held_s > self.spent_s / 2:
            return {"missing": reason}
        did = "had no result after" if has_begun else "did not begin to measure within"
        return {"missing": f"{did} {self.spent_s:.1f} s, when its time was over"}


class _ThreadLook(NamedTuple):
    state: str = ""
    ran_ticks: tuple[str, ...] = ()
    waited_s: float = 0.0


def _look_at_threads(pid: int) -> dict[str, _ThreadLook]:
    found = {}
    with suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            task = f"{pid}/task/{thread}"
            state, *fields = read_stat(task)
            found[thread] = _ThreadLook(state, tuple(fields[10:12]), waited_for_core_s(task))
    return found
