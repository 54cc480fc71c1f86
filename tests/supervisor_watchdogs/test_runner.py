# SPDX-License-Identifier: Apache-2.0
"""Watchdogs as real processes of a runner: found once across restarts, unknown where they fail or hang."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
import pytest

from supervisor.values import EventType, Evidence, Finding
from supervisor.watchdogs.pending import MOST, REPEAT_S, PendingFindings
from supervisor.watchdogs.runner import FIRST_LOOK_S, WatchdogRunner, WatchdogSettings
from tests.asynchronous import run, until
from tests.waiting import WAIT_S


class Host:
    """The files of a host, and what its watchdogs found."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.kernel_log, self.gpus = tmp_path / "kern.log", tmp_path / "gpus.json"
        self.kernel_log.touch()
        self.gpus.write_text("[]")
        self.found: list[Finding] = []
        self.fails = 0

    def write(self, code: int, bus: str = "0000:3b:00") -> None:
        with self.kernel_log.open("a") as file:
            file.write(f"NVRM: Xid (PCI:{bus}): {code}, why\n")

    @property
    def codes(self) -> list[int | None]:
        return [found.evidence.code for found in self.found]

    def _take(self, findings: Sequence[Finding]) -> None:
        if self.fails:
            self.fails -= 1
            raise RuntimeError("a fault of the daemon's own")
        self.found += findings

    @asynccontextmanager
    async def watched(self, *names: str, look_s: float = WAIT_S) -> AsyncIterator[WatchdogRunner]:
        settings = WatchdogSettings(
            names=names,
            interval_s=0.1,
            kernel_log=str(self.kernel_log),
            gpus=str(self.gpus),
            look_s=look_s,
        )
        runner = WatchdogRunner(settings, host="host-1", state_dir=self.tmp_path, found=self._take)
        task = asyncio.ensure_future(runner.run())
        try:
            yield runner
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def processes() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            found += [child] * ("supervisor.watchdogs" in child.cmdline())
    return found


async def test_what_happens_while_no_daemon_runs_is_found_by_the_next_one_once(host: Host) -> None:
    async with host.watched("xid") as runner:
        await until(lambda: not runner.unknown["xid"], "it does not look")
        host.write(31)
        await until(lambda: host.codes == [31], "31 is not found")
    assert processes() == []
    host.write(79)
    async with host.watched("xid"):
        await until(lambda: host.codes == [31, 79], "79 is not found, or 31 again")


def test_a_watchdog_that_is_killed_comes_back_and_goes_on(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        async with host.watched("xid") as runner:
            await until(lambda: not runner.unknown["xid"], "it does not look")
            (process,) = processes()
            process.send_signal(signal.SIGKILL)
            host.write(48)
            await until(lambda: host.codes == [48], "48 is not found")

    run(work())
    assert "watchdog xid unknown: its process ended; nothing is concluded from that" in caplog.text


@pytest.mark.slow
def test_a_probe_that_hangs_is_unknown_until_it_answers_again_and_hides_no_other(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        async with host.watched("ecc", "xid", look_s=2.0) as runner:
            await until(lambda: not any(runner.unknown.values()), "they do not look")
            host.gpus.write_text('"hang"')
            await until(lambda: runner.unknown["ecc"], "the hang is not noticed")
            host.write(79)
            await until(lambda: host.codes == [79], "the hanging probe hides the other")
            host.gpus.write_text(json.dumps([{"device": "0000:5e:00", "remap_failed": True}]))
            # A second process may have met the hang in its first look, for which it has a minute.
            await until(
                lambda: len(host.found) == 2, "it does not come back", timeout_s=FIRST_LOOK_S + WAIT_S
            )

    run(work())
    assert "watchdog ecc unknown: no answer within 2.1 s; nothing is concluded from that" in caplog.text
    assert host.found[1].type is EventType.ECC


def test_a_missing_driver_is_unknown_with_its_reason_and_one_warning(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        host.gpus.write_text('"NVML: Driver Not Loaded"')
        async with host.watched("ecc") as runner:
            await until(lambda: "Driver Not Loaded" in runner.unknown["ecc"], "no reason")
            host.gpus.write_text("[]")
            await until(lambda: not runner.unknown["ecc"], "it stays unknown")

    run(work())
    lines = [record.message for record in caplog.records if "unknown" in record.message]
    assert lines == ["watchdog ecc unknown: NVML: Driver Not Loaded; nothing is concluded from that"]
    assert host.found == []


def test_a_finding_that_the_daemon_could_not_take_is_found_again_and_ends_nothing(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        async with host.watched("xid") as runner:
            await until(lambda: not runner.unknown["xid"], "it does not look")
            host.fails = 1
            host.write(79)
            await until(lambda: host.codes == [79], "79 is not found again")

    run(work())
    assert "watchdog xid: internal error" in caplog.text


def test_a_damaged_memory_is_begun_again(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    (host.tmp_path / "watchdog-xid-host-1.json").write_text("{")

    async def work() -> None:
        async with host.watched("xid") as runner:
            await until(lambda: not runner.unknown["xid"], "it does not look")
            host.write(79)
            await until(lambda: host.codes == [79], "79 is not found")

    run(work())
    assert "its memory cannot be read" in caplog.text


# ---------------------------------------------------------------- on the way to the sensor


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def finding(name: str, code: int = 31, age_s: float = 0.0) -> Finding:
    return Finding(type=EventType.XID, evidence=Evidence(id=name, witness="xid", code=code, age_s=age_s))


def ids(pending: PendingFindings) -> list[str]:
    return [found.evidence.id for found in pending.current()]


def test_a_finding_is_repeated_on_one_stream_until_it_has_surely_arrived(tmp_path: Path) -> None:
    clock = Clock()
    pending = PendingFindings(tmp_path / "findings.json", clock, "boot")
    assert pending.add([finding("a", age_s=5.0)])
    assert not pending.add([finding("a")])
    clock.now += 10.0
    assert [found.evidence.age_s for found in pending.current()] == [15.0]
    pending.note_sent(pending.current())
    clock.now += REPEAT_S - 1
    pending.note_sent(pending.current())
    pending.begin_stream()  # what was sent on the last one may be lost
    clock.now += 2.0
    pending.note_sent(pending.current())
    assert ids(pending) == ["a"]
    clock.now += REPEAT_S
    pending.note_sent(pending.current())
    assert ids(pending) == []


def test_findings_survive_the_daemon_and_not_the_machine(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "findings.json"
    PendingFindings(path, clock, "boot").add([finding("a")])
    clock.now += 7.0
    after = PendingFindings(path, clock, "boot")
    after.load()
    assert [(found.evidence.id, found.evidence.age_s) for found in after.current()] == [("a", 7.0)]
    other = PendingFindings(path, clock, "another boot")
    other.load()
    assert ids(other) == []
    path.write_text("{}")
    damaged = PendingFindings(path, clock, "boot")
    damaged.load()
    assert ids(damaged) == []


def test_of_too_many_findings_the_gravest_wait(tmp_path: Path) -> None:
    pending = PendingFindings(tmp_path / "findings.json", Clock(), "boot")
    pending.add([*(finding(f"app-{n}") for n in range(2 * MOST)), finding("node", code=79)])
    assert len(ids(pending)) == MOST
    assert ids(pending)[-1] == "node"
