# SPDX-License-Identifier: Apache-2.0
"""What a wanted state becomes where hosts cannot be reached: on machines that are values."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from signal import Signals
from typing import Any

import pytest

from supervisor.orchestrator import Answer
from supervisor.orchestrators.job_file import JobFile, LocalJob
from supervisor.orchestrators.processes import Mark, Marked
from supervisor.orchestrators.wanted import Seen, WantedOrchestrator, restart_at_next_run
from supervisor.values import Change, Command, CommandKind, Evidence, OutcomeStatus
from tests.asynchronous import until
from tests.supervisor.orchestrators import look_at, try_once


class Rooms:
    """Hosts whose processes are marks; `unseen` cannot be asked, and nothing can be started in `full`.

    A host of `hangs` is `unseen` from its first signal on.
    """

    name, watch_s, returns, python, supervisor = "rooms", 0.01, True, "python", "supervisor"

    def __init__(self) -> None:
        self.processes: list[Marked] = []
        self.unseen: set[str] = set()
        self.full: set[str] = set()
        self.asked_to_end: list[int] = []
        self.started: list[tuple[str, ...]] = []
        self.hangs: set[str] = set()
        self._pids = itertools.count(1)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        yield

    async def scan(self) -> Seen:
        seen = [one for one in self.processes if one.mark.host not in self.unseen]
        return Seen(processes=seen, unseen=frozenset(self.unseen))

    async def start(self, argv: Sequence[str], mark: Mark, environment: Mapping[str, str], log: Path) -> None:
        del environment, log
        if mark.host in self.full | self.unseen:
            raise OSError(f"nothing starts on {mark.host}")
        self.processes.append(Marked(pid=next(self._pids), parent=0, mark=mark))
        self.started.append((mark.host, *argv))

    async def signal_roots(self, processes: Sequence[Marked], number: Signals) -> None:
        del number
        self.asked_to_end += [one.pid for one in processes]
        self.unseen |= self.hangs & {one.mark.host for one in processes}
        await self.kill(processes)

    async def kill(self, processes: Sequence[Marked]) -> None:
        self.processes = [
            one for one in self.processes if one not in processes or one.mark.host in self.unseen
        ]

    def end(self, part: str, hosts: str) -> None:
        self.processes = [
            one for one in self.processes if one.mark.part != part or one.mark.host not in hosts
        ]

    def on(self, part: str) -> list[str]:
        return sorted(one.mark.host for one in self.processes if one.mark.part == part)


class Watched:
    """An orchestrator of three hosts, `replicas` of which train, on `rooms`."""

    def __init__(self, path: Path, rooms: Rooms, *, replicas: int = 2, waiting: int = 0) -> None:
        self.path = path
        job = LocalJob(
            workload="job", command=("{nnodes}",), replicas=replicas, waiting=waiting, environment={}
        )
        file = JobFile(hosts=("a", "b", "c"), jobs=(job,))
        self.rooms = rooms
        self.told: list[str] = []
        self.orchestrator = WantedOrchestrator(file, path, {}, rooms)
        self._id = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Watched]:
        def tell(host: str, change: Change, evidence: Evidence) -> None:
            self.told.append(f"{host} {change.value} {evidence.text}")

        async with self.orchestrator.running(tell):
            yield self

    async def do(self, kind: CommandKind, **fields: Any) -> Answer:
        self._id += 1
        return await try_once(self.orchestrator, Command(epoch=1, id=f"c{self._id}", kind=kind, **fields))

    async def lose(self, host: str) -> None:
        """All of a host ends, and that is noticed."""
        self.rooms.processes = [one for one in self.rooms.processes if one.mark.host != host]
        await until(lambda: host in self.orchestrator._state.gone, "it does not count as gone")

    async def are_up(self, launchers: str, daemons: str) -> None:
        await until(
            lambda: self.rooms.on("launcher") == list(launchers) and self.rooms.on("daemon") == list(daemons),
            f"not up: {self.rooms.processes}",
        )


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path, Rooms())


async def test_a_launcher_that_was_out_of_reach_when_its_host_was_swapped_is_stopped_later(
    watched: Watched,
) -> None:
    rooms = watched.rooms
    async with watched.running():
        await watched.are_up("ab", "abc")
        (pid,) = [one.pid for one in rooms.processes if (one.mark.host, one.mark.part) == ("a", "launcher")]
        rooms.unseen.add("a")
        done = await watched.do(CommandKind.HOT_SWAP, workload="job", host="a", spare="c")
        assert (done.status, done.text) == (OutcomeStatus.DONE, "started on c")
        await watched.are_up("abc", "abc")  # nobody can tell
        rooms.unseen.clear()
        await watched.are_up("bc", "abc")
        assert rooms.asked_to_end == [pid]


async def test_a_drain_of_a_host_out_of_reach_is_done_when_its_launcher_was_stopped(watched: Watched) -> None:
    rooms = watched.rooms
    async with watched.running():
        await watched.are_up("ab", "abc")
        rooms.unseen.add("a")
        drain = Command(epoch=1, id="d", kind=CommandKind.DRAIN_HOST, host="a")
        answer = await try_once(watched.orchestrator, drain)
        assert (answer.status, answer.passing) == (OutcomeStatus.FAILED, True)
        assert answer.text == "host a cannot be reached, and may still train"
        assert watched.told == []
        rooms.unseen.clear()
        assert (await try_once(watched.orchestrator, drain)).status is OutcomeStatus.DONE
        await watched.are_up("b", "abc")
        assert watched.told == ["a gone a was drained"]


async def test_a_host_that_hangs_while_it_is_drained_is_not_called_drained(watched: Watched) -> None:
    rooms = watched.rooms
    async with watched.running():
        await watched.are_up("ab", "abc")
        rooms.hangs.add("a")
        drain = Command(epoch=1, id="d", kind=CommandKind.DRAIN_HOST, host="a")
        answer = await try_once(watched.orchestrator, drain)
        assert (answer.status, answer.passing) == (OutcomeStatus.FAILED, True)
        assert answer.text == "host a cannot be reached, and may still train"
        assert watched.told == []
        swapped = await watched.do(CommandKind.HOT_SWAP, workload="job", host="a", spare="c")
        assert (swapped.status, swapped.text) == (OutcomeStatus.DONE, "started on c")
        rooms.hangs.clear()
        rooms.unseen.clear()
        await watched.are_up("bc", "abc")


async def test_a_lost_host_gets_no_launcher_from_a_reset_until_it_is_uncordoned(watched: Watched) -> None:
    watched.rooms.returns = False
    async with watched.running():
        await watched.are_up("ab", "abc")
        await watched.lose("b")
        done = await watched.do(CommandKind.WORKLOAD_RESET, workload="job")
        assert done.status is OutcomeStatus.DONE
        assert done.text == "stopped on a, started on a, b lost and not used until uncordoned"
        await watched.are_up("a", "ac")
        done = await watched.do(CommandKind.UNCORDON_HOST, host="b")
        assert done.text == "started on b"
        await watched.are_up("ab", "abc")


@pytest.mark.parametrize("returns", [False, True])
async def test_a_launcher_that_waits_is_beyond_the_size_and_a_lost_host_waits_when_it_is_back(
    tmp_path: Path, returns: bool
) -> None:
    rooms = Rooms()
    rooms.returns = returns
    watched = Watched(tmp_path, rooms, waiting=1)
    async with watched.running():
        await watched.are_up("abc", "abc")
        assert {one for one in rooms.started if one[1] == "2"} == {("a", "2"), ("b", "2"), ("c", "2")}
        await watched.lose("b")
        if not returns:
            await watched.are_up("ac", "ac")
            done = await watched.do(CommandKind.UNCORDON_HOST, host="b")
            assert done.text == "started on b"
        await watched.are_up("abc", "abc")


async def test_a_job_that_shrinks_keeps_the_hosts_that_live_when_two_are_lost(tmp_path: Path) -> None:
    rooms = Rooms()
    rooms.returns = False
    watched = Watched(tmp_path, rooms, replicas=3)
    async with watched.running():
        await watched.are_up("abc", "abc")
        await watched.lose("a")
        await watched.lose("c")
        for host, replicas in (("c", 2), ("a", 1)):
            down = {"workload": "job", "host": host, "replicas": replicas}
            done = await watched.do(CommandKind.SCALE_DOWN, **down)
            assert done.status is OutcomeStatus.DONE, done
            await watched.are_up("b", "b")
        assert watched.orchestrator._state.jobs[0].hosts == ("b",)


async def test_a_drained_host_whose_daemon_is_killed_is_not_gone(watched: Watched) -> None:
    rooms = watched.rooms
    rooms.returns = False
    async with watched.running():
        await watched.are_up("ab", "abc")
        await watched.do(CommandKind.DRAIN_HOST, host="b")
        await watched.are_up("a", "abc")
        rooms.full.add("b")  # its daemon stays away until that was seen
        rooms.end("daemon", "b")
        await until(lambda: "daemon of b" in watched.orchestrator._troubles, "nobody misses the daemon")
        assert await look_at(watched.orchestrator, "b") is None
        assert watched.orchestrator._state.gone == ()
        rooms.full.clear()
        await watched.are_up("a", "abc")


async def test_a_restart_in_place_is_refused_when_the_last_launcher_and_a_host_are_gone(
    watched: Watched,
) -> None:
    rooms = watched.rooms
    async with watched.running():
        await watched.are_up("ab", "abc")
        rooms.processes = [one for one in rooms.processes if one.mark.host != "a"]
        await watched.do(CommandKind.HOT_SWAP, workload="job", host="a", spare="c")
        await watched.are_up("bc", "abc")
        rooms.full.add("c")
        rooms.processes = [one for one in rooms.processes if one.mark.host != "c"]
        await until(lambda: "c" in watched.orchestrator._state.gone, "it does not count as gone")
        rooms.end("launcher", "b")
        refused = await watched.do(CommandKind.IN_JOB_RESET, workload="job")
        assert (refused.status, refused.passing) == (OutcomeStatus.FAILED, False)
        assert refused.text == "no launcher of job is left: the whole job must be started again"
        rooms.unseen.add("c")  # its launcher may live
        answer = await watched.do(CommandKind.IN_JOB_RESET, workload="job")
        assert (answer.status, answer.text) == (OutcomeStatus.DONE, "started on b")


async def test_a_fleet_that_was_stopped_starts_again_as_a_later_start_of_its_job(watched: Watched) -> None:
    rooms, path = watched.rooms, watched.path / "rooms.json"
    async with watched.running():
        await watched.are_up("ab", "abc")
        await watched.do(CommandKind.WORKLOAD_RESET, workload="job")
        await watched.do(CommandKind.DRAIN_HOST, host="b")
        await watched.are_up("a", "abc")
    rooms.processes = []
    restart_at_next_run(path)
    again = Watched(watched.path, rooms)
    async with again.running():
        # At generation 0 its steps would look older than those that the controller knows.
        await again.are_up("a", "abc")
        state = again.orchestrator._state
        assert [job.generation for job in state.jobs] == [2]
        assert (state.epoch, state.cordoned, state.applied) == (1, ("b",), ("c1", "c2"))
    path.unlink()
    restart_at_next_run(path)
    assert not path.exists()


async def test_a_host_that_nothing_can_be_started_on_keeps_no_other_one_waiting(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    rooms = watched.rooms
    rooms.full.add("a")
    async with watched.running():
        await watched.are_up("b", "bc")
        # Many looks later the trouble is in the log once, for the job and for the daemon.
        await until(lambda: "daemon of a" in caplog.text, "the daemon's trouble is not in the log")
        rooms.processes = [one for one in rooms.processes if one.mark.host != "c"]
        await watched.are_up("b", "bc")
        assert caplog.text.count("nothing starts on a") == 2
        rooms.full.clear()
        await watched.are_up("ab", "abc")
        await until(lambda: caplog.text.count("well again") == 2, "it is not said that it is well again")


async def test_a_restart_in_place_does_not_wait_for_a_host_without_a_machine(watched: Watched) -> None:
    rooms = watched.rooms
    scan = rooms.scan

    async def without_a() -> Seen:
        seen = await scan()
        left = [one for one in seen.processes if one.mark.host != "a"]
        return replace(seen, processes=left, absent=frozenset({"a"}))

    async with watched.running():
        await watched.are_up("ab", "abc")
        watched.orchestrator._machines.scan = without_a  # type: ignore[method-assign]
        answer = await watched.do(CommandKind.IN_JOB_RESET, workload="job")
        assert (answer.status, answer.text) == (OutcomeStatus.DONE, "as wanted")
