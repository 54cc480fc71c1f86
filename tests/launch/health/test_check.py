# SPDX-License-Identifier: Apache-2.0
"""Real probes and links of several hosts, each a thread with processes of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from resiliency.launch.health.__main__ import main
from resiliency.launch.health.pairing import Pairing
from resiliency.launch.health.scores import HostHealth, Measurement
from resiliency.launch.host_check import exchange as exchanging
from resiliency.launch.host_check import links, probes, programs
from resiliency.launch.host_check.check import HostReport, report_alone, report_with_others
from resiliency.launch.host_check.exchange import Exchange
from resiliency.launch.host_check.probes import PROBES, HostProbes, Probe, ProbeWatch
from resiliency.testing.processes import Command, wait_until_stopped
from tests.control_groups import inside, memory_group
from tests.launch.health.broken_probes import broken
from tests.waiting import WAIT_S, wait_for_seconds

OK, UNDECIDED, SLOW, FAULTY = HostHealth.OK, HostHealth.UNDECIDED, HostHealth.SLOW, HostHealth.FAULTY
COMPUTE = tuple(probe for probe in PROBES if probe.name == "compute")
REST = tuple(probe for probe in PROBES if probe.name != "compute")
LOCAL = "127.0.0.1"


class MemoryStore:
    """torch's Store in the memory of one process."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self.values[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        with self._changed:
            known = self._changed.wait_for(lambda: set(keys) <= self.values.keys(), timeout.total_seconds())
            if not known:
                raise RuntimeError("wait timeout")


def on_all(
    hosts: int, run: Callable[[Exchange], HostReport], store: MemoryStore | None = None
) -> list[HostReport]:
    store = store or MemoryStore()
    with ThreadPoolExecutor(hosts) as threads:
        exchanges = [Exchange(store, check="run-0", rank=rank, hosts=hosts) for rank in range(hosts)]
        return list(threads.map(run, exchanges))


def measured(value: float, **more: str) -> list[Measurement]:
    return [Measurement(host="h", probe="cpu", value=value, unit="GFLOP/s", **more)]


@pytest.mark.slow
def test_the_hosts_that_are_slow_or_compute_wrong_are_found_and_no_other_one(tmp_path: Path) -> None:
    """Real products in real processes, on a clock that the load of this machine does not change.

    A host that computes by other instructions has other results, and one whose probe was killed has none.
    """
    faults = ("usual", "slow", "usual", "flip", "die", "isa")
    own = [
        HostProbes(host="h", disk=tmp_path, probes=COMPUTE, command=broken(fault, "compute")).run(WAIT_S)
        for fault in faults
    ]
    reports = on_all(
        len(own),
        lambda exchange: report_with_others(
            exchange, report_alone("h", own[exchange.rank]), address=LOCAL, links=False, timeout_s=10
        ),
    )
    assert [report.health for report in reports] == [OK, SLOW, OK, FAULTY, UNDECIDED, OK], [
        one.why for one in reports
    ]
    assert "below the median of the other hosts" in reports[1].why
    assert re.search(r"cpu: faulty, results of cores \d+ differ from that of \d+ others", reports[3].why)
    assert reports[4].why == "compute: undecided, was ended by SIGKILL"
    assert reports[4].text().endswith("undecided; not measured: compute")
    ((usual,), (isa,)) = own[0], own[5]
    if usual.digest != isa.digest:  # a processor that knows more than AVX2
        assert usual.platform != isa.platform


#: Its own clock before and after a stop.
STOPPED = """
import os, signal
from resiliency.launch.host_check.programs import _clock
began = _clock()
print("stops", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
print("passed", _clock() - began, flush=True)
"""


def test_a_host_that_stands_still_loses_that_time() -> None:
    with Command([sys.executable, "-c", STOPPED], cold=True) as program:
        program.wait_for_line("stops", timeout=WAIT_S)
        wait_until_stopped(program.pid)
        began = time.monotonic()
        wait_for_seconds(0.3)
        stopped_s = time.monotonic() - began
        program.signal(signal.SIGCONT)
        passed = program.wait_for_line(r"passed (\S+)", timeout=WAIT_S)
        assert float(passed[1]) >= stopped_s


def test_a_wait_for_a_core_in_the_middle_of_a_look_at_the_clock_does_not_put_it_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the best of several windows is the one that was interrupted so, and hosts without one are slow."""
    now_s, waited_s, interrupted_s = 100.0, 0.0, 0.0

    def perf_counter() -> float:
        nonlocal now_s, waited_s, interrupted_s
        seen, lost, interrupted_s = now_s, interrupted_s, 0.0
        now_s, waited_s = now_s + lost, waited_s + lost
        return seen

    monkeypatch.setattr(programs, "time", SimpleNamespace(perf_counter=perf_counter))
    monkeypatch.setattr(programs, "waited_for_core_s", lambda task: waited_s)
    began = programs._clock()
    interrupted_s = 5.0
    assert programs._clock() == began


def test_healthy_probes_measure_and_leave_no_file(tmp_path: Path) -> None:
    (disk,) = HostProbes(host="h", disk=tmp_path, probes=REST[2:]).run(60)
    # A disk that is not there is none of the other probes' business.
    memory, shm, no_disk = HostProbes(host="h", disk=tmp_path / "none", probes=REST).run(60)
    assert [(one.probe, one.unit, one.error + one.missing) for one in (memory, shm, disk)] == [
        ("memory", "GB/s", ""),
        ("shm", "GB/s", ""),
        ("disk", "MB/s", ""),
    ]
    assert min(memory.value, shm.value, disk.value) > 0
    assert no_disk.missing == f"cannot write to {tmp_path / 'none'}: No such file or directory"
    assert list(tmp_path.iterdir()) == []
    assert [one.missing for one in HostProbes(host="h", disk=tmp_path).run(0)] == [
        "no time was left of 0 s"
    ] * len(PROBES)


@pytest.mark.parametrize(
    ("fault", "health", "why"),
    [
        ("hang", FAULTY, "hung: no result after"),
        ("half", FAULTY, "hung: no result after"),
        ("crash", FAULTY, "crashed twice: SIGSEGV, SIGSEGV"),
        ("crash-once", UNDECIDED, "crashed once: SIGSEGV; the second try did not"),
        ("die", UNDECIDED, "was ended by SIGKILL"),
        ("late", UNDECIDED, "did not begin to measure within"),
        ("stop", UNDECIDED, "was stopped"),
        ("linger", OK, ""),
        ("none", UNDECIDED, "ended with exit code 1 and no result, KeyError: 'none'"),
    ],
)
def test_a_probe_is_a_fault_of_its_host_only_where_it_fails_in_measuring(
    tmp_path: Path, fault: str, health: HostHealth, why: str
) -> None:
    """Each kind of end of a process; a fault takes the place of a result."""
    name = "none" if fault == "none" else "memory"
    limit_s, start_s = 1.0 if fault in ("hang", "half") else WAIT_S, 1.0 if fault == "late" else WAIT_S
    budget_s = 3.0 if fault == "stop" else WAIT_S
    quick = Probe(name=name, unit="GB/s", limit_s=limit_s, start_s=start_s)
    own = HostProbes(host="h", disk=tmp_path, probes=(quick,), command=broken(fault, "memory"))
    (one,) = own.run(budget_s)
    assert (one.error or one.missing).startswith(why)
    assert bool(one.error + one.missing) == bool(why)
    assert report_alone("h", [one]).health is health


def test_a_check_does_not_wait_for_what_holds_the_output_of_a_probe_that_was_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "_KILL_S", 0.2)
    quick = Probe(name="memory", unit="GB/s", limit_s=0.5, start_s=WAIT_S)
    own = HostProbes(host="h", disk=tmp_path, probes=(quick,), command=broken("orphan", "memory"))
    (one,) = own.run(WAIT_S)
    os.kill(int((tmp_path / "orphan").read_text()), signal.SIGKILL)  # it has been there all the time
    assert one.error.startswith("hung")


def test_a_program_that_cannot_be_started_says_so(tmp_path: Path) -> None:
    (one,) = HostProbes(host="h", disk=tmp_path, probes=COMPUTE, command=(str(tmp_path),)).run(60)
    assert one.missing == "could not start: Permission denied"


def test_time_in_which_the_check_itself_stood_still_is_not_the_probes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A container that was frozen for a minute goes on, and so does its check."""
    now = 100.0
    monkeypatch.setattr(probes, "time", SimpleNamespace(monotonic=lambda: now))
    watch, probe = ProbeWatch(0), Probe(name="memory", unit="GB/s", limit_s=2.2, start_s=2.2)
    for passed_s, judged in ((0.5, False), (60.0, False), (0.5, False), (0.5, True)):
        now += passed_s
        watch.look(0.5, 0)
        assert bool(watch.judge(probe, 60.0, True)) is judged


#: Two probes in a container: one that takes memory until the kernel ends it, and the real one with torch.
IN_A_CONTAINER = """
import pathlib, sys
from resiliency.launch.host_check.probes import PROBES, HostProbes
from tests.launch.health.broken_probes import broken
probes, command = (PROBES[0], PROBES[3]), broken("eat", "memory")
for one in HostProbes(host="h", disk=pathlib.Path(sys.argv[1]), probes=probes, command=command).run(60):
    print(one.probe, one.error or one.missing)
"""


def test_a_container_with_little_memory_says_nothing_of_its_host(tmp_path: Path) -> None:
    with memory_group(96 << 20) as group:
        done = subprocess.run(
            inside(group, [sys.executable, "-c", IN_A_CONTAINER, str(tmp_path)]),
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr
    eaten, compute = done.stdout.splitlines()
    assert eaten == "memory was ended by SIGKILL, its control group counted a kill for memory"
    assert re.fullmatch(r"compute memory leaves \d+ MiB, and torch takes 256 MiB", compute)


@pytest.mark.parametrize(("limit_s", "timeout_s", "why"), [(5.0, 60.0, ""), (60.0, 1.0, "had no core")])
def test_a_probe_without_a_core_to_run_on_gets_more_time_or_says_so(
    tmp_path: Path, limit_s: float, timeout_s: float, why: str
) -> None:
    """Another program has most of the one core that it may use."""
    core = min(os.sched_getaffinity(0))
    bind = f"import os, runpy, sys, time; os.sched_setaffinity(0, {{{core}}})\n"
    busy = [sys.executable, "-c", bind + "while True: pass"]
    probe = bind + "os.nice(5); sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"
    other = subprocess.Popen(busy)
    try:
        found = HostProbes(
            host="h",
            disk=tmp_path,
            probes=(replace(REST[0], limit_s=limit_s),),
            command=(sys.executable, "-c", probe, programs.__file__),
        ).run(timeout_s)
    finally:
        other.kill()
        other.wait()
    assert [one.error + one.missing for one in found] == [why]


def test_results_of_an_earlier_check_are_not_read() -> None:
    """D15: the store still has the results of an earlier attempt and of another run, both bad."""
    store = MemoryStore()
    for check in ("run-1", "old-0"):
        for rank in range(3):
            store.set(f"host-check/{check}/measurements/{rank}", json.dumps({"host": "old"}))
        store.set(f"host-check/{check}/measurements/all", json.dumps([{}, {}, {}]))
    reports = on_all(
        3,
        lambda exchange: report_with_others(
            exchange, report_alone("h", measured(5.0)), address=LOCAL, links=False, timeout_s=5
        ),
        store,
    )
    assert [(report.health, len(report.scores)) for report in reports] == [(OK, 1)] * 3


def test_a_host_that_says_nothing_is_missed_and_without_host_0_the_others_are_undecided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("resiliency.launch.host_check.exchange._ANSWER_S", 0.3)

    def check(exchange: Exchange, silent: int) -> HostReport:
        alone = report_alone("h", measured(5.0))
        if exchange.rank == silent:
            return alone
        return report_with_others(exchange, alone, address=LOCAL, links=False, timeout_s=0.2)

    assert [report.health for report in on_all(3, lambda exchange: check(exchange, 2))] == [OK, OK, OK]
    reports = on_all(3, lambda exchange: check(exchange, 0))
    assert [report.health for report in reports] == [OK, UNDECIDED, UNDECIDED]
    assert "host 0 did not publish the results of measurements" in reports[1].why


class SuspendedStore(MemoryStore):
    """The time of its first wait is over at once: the host was suspended."""

    asleep_s = 0.0

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        if not self.asleep_s:
            self.asleep_s = 3600.0
            raise RuntimeError("wait timeout")
        super().wait(keys, timeout)


def test_a_host_that_was_suspended_waits_for_what_others_say_as_long_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = SuspendedStore()
    monkeypatch.setattr(exchanging, "elapsed_s", lambda: time.monotonic() + store.asleep_s)
    host = Exchange(store, check="run-0", rank=0, hosts=2)
    host.tell("links", 7)
    assert host.try_ask("links", 30.0) == 7
    monkeypatch.setattr(exchanging, "elapsed_s", time.monotonic)
    store.asleep_s = 0.0
    assert host.try_ask("links", 30.0) is None  # the store is gone


class CutExchange(Exchange):
    """A host that reaches no partner of pairs whose names begin so, nor is reached by one."""

    cut = "link-"

    def try_ask(self, name: str, timeout_s: float) -> Any:
        place = super().try_ask(name, timeout_s)
        return self._beside(place) if name.startswith(self.cut) and place else place

    def tell(self, name: str, value: Any) -> None:
        super().tell(name, self._beside(value) if name.startswith(self.cut) else value)

    @staticmethod
    def _beside(place: dict[str, Any]) -> dict[str, Any]:
        return {**place, "at": [LOCAL, 1]}  # no program listens there


class SilentExchange(Exchange):
    """A host that answers nothing of links, as one that was stopped."""

    def tell(self, name: str, value: object) -> None:
        if not name.startswith("link"):
            super().tell(name, value)


def findings_of(
    hosts: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    deaf: Sequence[int] = (),
    silent: Sequence[int] = (),
    cut: str = "none",
) -> links.LinkFindings:
    """Real messages over loopback; a deaf host reaches no other one, and a silent one does not answer.

    How fast they are is chance on a busy machine, and no reason here: slow links are tested by values.
    """
    monkeypatch.setattr(links, "_MESSAGE_BYTES", 1 << 18)
    monkeypatch.setattr(links, "_SLOW_SHARE", 0.0)
    names, store = [f"h{rank}" for rank in range(hosts)], MemoryStore()

    def run(rank: int) -> links.LinkFindings:
        kind = SilentExchange if rank in silent else CutExchange
        exchange = kind(store, check="c", rank=rank, hosts=hosts)
        if isinstance(exchange, CutExchange):
            exchange.cut = "link-" if rank in deaf else cut
        pair_s = 0.3 if silent else 1.0
        return links.check_links(exchange, names, address=LOCAL, timeout_s=60, pair_s=pair_s)

    with ThreadPoolExecutor(hosts) as threads:
        found = list(threads.map(run, range(hosts)))
    assert all(one == found[0] for one in found)  # all hosts conclude the same
    return found[0]


def fresh(hosts: int) -> links.LinkFindings:
    pairing = Pairing(hosts=tuple(f"h{rank}" for rank in range(hosts)))
    return links.LinkFindings(pairing=pairing, rates={}, slow=frozenset(), errors={})


def test_links_and_hosts_that_carry_no_message_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    even = findings_of(4, monkeypatch)
    assert (even.sentences(), len(even.rates), even.pairing.undecided) == ([], 2, ())
    one = findings_of(4, monkeypatch, deaf=[2])
    assert [one.health_of(f"h{rank}") for rank in range(4)] == [OK, OK, FAULTY, OK]
    link = findings_of(4, monkeypatch, cut="link-0-0")
    (sentence,) = link.sentences()
    assert sentence.startswith("link h0 - h1 is broken: no ")
    mute = findings_of(3, monkeypatch, silent=[2])
    assert [mute.health_of(f"h{rank}") for rank in range(3)] == [OK, OK, UNDECIDED]
    two = links.with_answers(fresh(2), [("h0", "h1")], {"h0": {"error": "timed out"}, "h1": {"rate": 9.0}})
    assert [two.health_of(host) for host in ("h0", "h1")] == [UNDECIDED, UNDECIDED]
    assert two.sentences() == ["h0, h1 or the link between them is broken: timed out"]


def test_a_host_with_slow_links_is_slow_and_no_other_one() -> None:
    findings = fresh(8)
    names = findings.pairing.hosts
    while pairs := findings.pairing.next_round():
        rates = {host: 40.0 if "h5" in pair else 100.0 for pair in pairs for host in pair}
        answers = {host: {"rate": rates[host]} if host in rates else {} for host in names}
        findings = links.with_answers(findings, pairs, answers)
    assert [host for host in names if findings.health_of(host) is not OK] == ["h5"]
    assert findings.health_of("h5") is SLOW


def test_a_late_message_of_a_host_without_a_core_is_no_slow_link() -> None:
    for waited, health in ((False, SLOW), (True, UNDECIDED)):
        findings = fresh(8)
        while pairs := findings.pairing.next_round():
            answers = {
                host: {"rate": 40.0 if "h5" in pair else 100.0, "waited": waited and host == "h5"}
                for pair in pairs
                for host in pair
            }
            findings = links.with_answers(findings, pairs, answers)
        assert findings.health_of("h5") is health


def test_the_command_reports_to_people_and_programs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resiliency.launch.health.__main__.HostProbes", partial(HostProbes, probes=REST[2:]))
    assert main(["check", "--disk", str(tmp_path)]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["probe", "rate", "health", "why"]
    assert [line.split()[0] for line in table[1:]] == ["disk", "host"]
    assert main(["check", "--disk", str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["health"], [probe["unit"] for probe in report["probes"]]) == ("ok", ["MB/s"])
    assert main(["check", "--precheck", "0"]) == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--precheck", "3"], "invalid choice"),
        (["--check-timeout-s", "0"], "--check-timeout-s must be above 0, found 0"),
        (["--disk", "/none"], "--disk must be a directory"),
        (["--precheck", "2"], "needs --nnodes of 2 or more"),
        (["--precheck", "2", "--nnodes", "2", "--node-rank", "2"], "--node-rank below it, found 2 and 2"),
        (["--precheck", "2", "--nnodes", "2"], "needs --rdzv-endpoint HOST:PORT"),
    ],
)
def test_bad_flags_are_refused(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.gpu
def test_each_gpu_is_measured(tmp_path: Path) -> None:
    found = HostProbes(host="h", disk=tmp_path, probes=COMPUTE).run(60)
    assert [one.probe for one in found][:2] == ["cpu", "gpu0"]
    assert all(one.value > 0 and one.digest for one in found)
