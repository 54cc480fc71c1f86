# SPDX-License-Identifier: Apache-2.0
"""The local orchestrator with real daemons, and with launchers that only wait."""

from __future__ import annotations

import json
import os
import re
import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from resiliency.errors import ConfigError
from resiliency.testing.processes import stop_process
from supervisor.orchestrator import Answer
from supervisor.orchestrators import local
from supervisor.orchestrators.job_file import JobFile, read_job_file
from supervisor.orchestrators.local import LocalMachines, LocalOrchestrator
from supervisor.orchestrators.none import NoOrchestrator
from supervisor.orchestrators.processes import Marked, kill_all, marked_processes
from supervisor.orchestrators.wanted import Seen
from supervisor.values import Change, Command, CommandKind, Evidence, OutcomeStatus
from tests.asynchronous import run, until
from tests.ports import free_row
from tests.supervisor.orchestrators import local_fleet, look_at, try_once

pytestmark = pytest.mark.leaks("descriptors", reason="gRPC's own pollers")

#: Says with which values it was started, and waits.
WAITER = "import signal, sys; print(*sys.argv[1:], flush=True); signal.pause()"
VALUES = "{host} {node_rank}/{nnodes} {replicas} {generation} {{kept}}"


def job_file(tmp_path: Path, hosts: tuple[str, ...] = ("a", "b", "c"), **job: object) -> JobFile:
    path = tmp_path / "job.json"
    port = free_row(2 * len(hosts))
    command = ["{python}", "-c", WAITER, VALUES]
    jobs = [{"workload": "job", "replicas": 2, "command": command, "grace_s": 5, **job}]
    path.write_text(json.dumps({"hosts": hosts, "first_port": port, "jobs": jobs}))
    return read_job_file(path)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Path]:
    """The state directory of a local fleet whose processes end with the test."""
    with local_fleet(tmp_path / "fleet") as path:
        yield path


class Local:
    """One orchestrator and what it told the sensor."""

    def __init__(self, fleet: Path, file: JobFile) -> None:
        self.fleet = fleet
        self.changes: list[tuple[str, Change]] = []
        environment = {**os.environ, "SUPERVISOR_PLAINTEXT": "1"}
        self.orchestrator = LocalOrchestrator(file, fleet, environment)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Local]:
        def tell(host: str, change: Change, evidence: Evidence) -> None:
            assert evidence.witness == "orchestrator"
            self.changes.append((host, change))

        async with self.orchestrator.running(tell):
            yield self

    async def do(self, id: str, kind: CommandKind, *, epoch: int = 1, **fields: Any) -> Answer:
        return await try_once(self.orchestrator, Command(epoch=epoch, id=id, kind=kind, **fields))

    async def look(self, host: str) -> bool | None:
        return await look_at(self.orchestrator, host)

    def processes(self, part: str, host: str = "") -> list[Marked]:
        return [
            one
            for one in marked_processes(str(self.fleet))
            if one.mark.part == part and host in ("", one.mark.host)
        ]

    def launchers(self) -> dict[str, int]:
        return {one.mark.host: one.pid for one in self.processes("launcher")}

    def started(self, host: str) -> list[str]:
        """What the launchers of a host were started with."""
        path = self.fleet / "logs" / f"{host}-launcher.log"
        return path.read_text().splitlines() if path.exists() else []


async def lose(fleet: Local, host: str) -> None:
    """All processes of a host end at once."""

    def left() -> list[Marked]:
        return fleet.processes("launcher", host) + fleet.processes("daemon", host)

    kill_all(left())
    await until(lambda: not left(), "it does not end")


async def is_up(fleet: Local, hosts: str, daemons: int) -> None:
    await until(
        lambda: set(fleet.launchers()) == set(hosts) and len(fleet.processes("daemon")) == daemons,
        f"not up: {fleet.launchers()}",
    )
    await until(lambda: all(fleet.started(host) for host in hosts), "a launcher says nothing")


async def test_a_spare_takes_the_place_of_a_lost_host_once_also_by_another_actuator(
    tmp_path: Path, fleet: Path
) -> None:
    file = job_file(tmp_path)
    async with Local(fleet, file).running() as first:
        await is_up(first, "ab", daemons=3)
        assert first.started("a") == ["a 0/2 2 0 {{kept}}"]
        assert first.started("b") == ["b 1/2 2 0 {{kept}}"]
        assert [await first.look(host) for host in ("a", "b.boot", "c", "d")] == [True, True, True, None]
        survivor = first.launchers()["a"]
        await lose(first, "b")
        assert await first.look("b") is False
        swap = {"workload": "job", "host": "b.boot", "spare": "c.boot"}
        done = await first.do("c1", CommandKind.HOT_SWAP, epoch=3, **swap)
        assert (done.status, done.text) == (OutcomeStatus.DONE, "started on c")
        await until(lambda: first.started("c"), "the spare says nothing")
        assert first.started("c") == ["c 1/2 2 0 {{kept}}"]
        pids = first.launchers()
        assert pids["a"] == survivor
    # What was started outlives the actuator, and the next one takes it over.
    async with Local(fleet, file).running() as second:
        done = await second.do("c1", CommandKind.HOT_SWAP, epoch=4, **swap)
        assert (done.status, done.text) == (OutcomeStatus.DONE, "as wanted")
        fenced = await second.do("c2", CommandKind.WORKLOAD_RESET, epoch=3, workload="job")
        assert fenced.status is OutcomeStatus.FENCED
        assert second.launchers() == pids
        # A lost host stays away until somebody has seen to it.
        assert await second.look("b") is False
        refused = await second.do("c3", CommandKind.HOT_SWAP, epoch=4, workload="job", host="a", spare="b")
        assert (refused.status, refused.text) == (
            OutcomeStatus.FAILED,
            "b is no spare: it is busy, cordoned or gone",
        )
        await second.do("c4", CommandKind.UNCORDON_HOST, epoch=4, host="b")
        await until(lambda: second.processes("daemon", "b"), "the host does not come back")


async def test_a_whole_start_may_put_a_spare_in_the_place_of_a_lost_host(tmp_path: Path, fleet: Path) -> None:
    async with Local(fleet, job_file(tmp_path)).running() as here:
        await is_up(here, "ab", daemons=3)
        await lose(here, "b")
        kill_all(here.processes("launcher", "a"))
        await until(lambda: not here.launchers(), "it does not end")
        swap = {"workload": "job", "host": "b.boot", "spare": "c.boot"}
        done = await here.do("c1", CommandKind.WORKLOAD_RESET, **swap)
        assert (done.status, done.text) == (OutcomeStatus.DONE, "started on a, c")
        await until(lambda: here.started("c") and len(here.started("a")) == 2, "a launcher says nothing")
        assert here.started("a")[1:] == ["a 0/2 2 1 {{kept}}"]
        assert here.started("c") == ["c 1/2 2 1 {{kept}}"]


async def test_a_command_that_was_cut_short_is_carried_on_by_the_next_actuator(
    tmp_path: Path, fleet: Path
) -> None:
    """What is wanted is on the disk, and nothing of it was done: as after a crash right behind the write."""

    file = job_file(tmp_path)
    async with Local(fleet, file).running() as first:
        await is_up(first, "ab", daemons=3)
        before = first.launchers()
    reset = Command(epoch=2, id="c1", kind=CommandKind.WORKLOAD_RESET, workload="job")
    wanted = first.orchestrator._apply(reset, Seen(processes=()))
    first.orchestrator._save(wanted)
    async with Local(fleet, file).running() as second:
        for host in "ab":
            await until(lambda host=host: len(second.started(host)) == 2, "not started again")
        assert second.started("a")[-1] == "a 0/2 2 1 {{kept}}"
        await until(lambda: set(second.launchers()) == {"a", "b"}, "not both")
        assert not set(before.values()) & set(second.launchers().values())


async def test_a_job_shrinks_grows_and_leaves_a_drained_host(tmp_path: Path, fleet: Path) -> None:
    file = job_file(tmp_path)
    async with Local(fleet, file).running() as here:
        await is_up(here, "ab", daemons=3)
        await lose(here, "a")
        down = {"workload": "job", "host": "a", "replicas": 1}
        done = await here.do("c1", CommandKind.SCALE_DOWN, **down)
        assert done.text == "stopped on b, started on b"
        again = await here.do("c1", CommandKind.SCALE_DOWN, **down)
        assert again.text == "as wanted"
        await until(lambda: here.started("b")[-1] == "b 0/1 1 1 {{kept}}", "not smaller")
        up = await here.do("c2", CommandKind.SCALE_UP, workload="job", replicas=2)
        assert up.status is OutcomeStatus.DONE
        await until(lambda: here.started("c") == ["c 1/2 2 2 {{kept}}"], "not larger")
        more = await here.do("c3", CommandKind.SCALE_UP, workload="job", replicas=3)
        assert (more.status, more.text) == (
            OutcomeStatus.FAILED,
            "3 replicas need 3 hosts, and there are 2",
        )
        assert not more.passing
        drained = await here.do("c4", CommandKind.DRAIN_HOST, host="c.boot")
        assert drained.text == "stopped on c"
        assert here.changes == [("c.boot", Change.GONE)]
        assert set(here.launchers()) == {"b"}
        # Ranks that stop in order stop on all hosts, and so the other launchers may end as well.
        kill_all(here.processes("launcher", "b"))
        await until(lambda: not here.launchers(), "it does not end")
        await here.do("c6", CommandKind.UNCORDON_HOST, host="a")
        swapped = await here.do("c7", CommandKind.HOT_SWAP, workload="job", host="c", spare="a")
        assert swapped.text == "started on b, a"
        other = await here.do("c5", CommandKind.WORKLOAD_RESET, workload="other")
        assert other.text == "the job file has no job other"


async def test_a_daemon_that_ended_alone_is_started_again_and_a_host_that_is_dead_is_not(
    tmp_path: Path, fleet: Path
) -> None:
    async with Local(fleet, job_file(tmp_path)).running() as here:
        await is_up(here, "ab", daemons=3)
        (daemon,) = here.processes("daemon", "a")
        (spare,) = here.processes("daemon", "c")
        kill_all([daemon, spare, *here.processes("daemon", "b"), *here.processes("launcher", "b")])
        await until(
            lambda: here.processes("daemon", "a") and here.processes("daemon", "c"), "not started again"
        )
        await until(lambda: "b" in here.orchestrator._state.gone, "not gone")
        assert here.processes("daemon", "b") == []
        assert "b" not in here.launchers()


async def test_a_host_that_stands_still_as_a_whole_is_not_called_there(tmp_path: Path, fleet: Path) -> None:
    async with Local(fleet, job_file(tmp_path, grace_s=3600)).running() as here:
        await is_up(here, "ab", daemons=3)
        (daemon,), (launcher,) = here.processes("daemon", "a"), here.processes("launcher", "a")
        stop_process(daemon.pid)
        assert await here.look("a") is True
        stop_process(launcher.pid)
        # Nor is it gone: a process that is stopped may go on.
        assert await here.look("a") is None
        # No grace makes it act upon SIGTERM.
        swap = {"workload": "job", "host": "a.boot", "spare": "c.boot"}
        done = await here.do("c1", CommandKind.HOT_SWAP, **swap)
        assert done.text == "stopped on a, started on c"
        # A command for which there was no time has had its effect; the next one goes on from there.
        done = await here.do("c2", CommandKind.HOT_SWAP, **swap)
        assert (done.status, done.text) == (OutcomeStatus.DONE, "as wanted")


async def test_a_launcher_that_ends_at_once_leaves_its_host_there(tmp_path: Path, fleet: Path) -> None:
    file = job_file(tmp_path, command=["{python}", "-c", "raise SystemExit(2)"])
    async with Local(fleet, file).running() as here:
        await until(
            lambda: all(seat.started for seat in here.orchestrator._state.jobs[0].seats), "not started"
        )
        await until(lambda: not here.launchers(), "a launcher lives on")
        # The spare's daemon is started by the watch, after its second look.
        await until(lambda: here.processes("daemon", "c"), "no watch")
        assert [len(here.processes("daemon", host)) for host in "ab"] == [1, 1]
        assert here.orchestrator._state.gone == ()


async def test_a_watch_goes_on_after_an_error_of_the_machine_and_a_task_that_fails_is_in_the_log(
    tmp_path: Path, fleet: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trouble = "daemon of a: [Errno 17]"
    in_the_way = fleet / "logs"  # where a directory must be made for each daemon
    in_the_way.write_text("")
    here = Local(fleet, job_file(tmp_path, hosts=("a",), replicas=1))
    async with here.running():
        await until(lambda: trouble in caplog.text, "no error is met")
        in_the_way.unlink()
        await until(lambda: here.processes("daemon", "a"), "the watch has ended")
        await until(lambda: "daemon of a: well again" in caplog.text, "nothing says that it passed")
        assert caplog.text.count(trouble) == 1

    def fail(host: str, change: Change, evidence: Evidence) -> None:
        raise ValueError(f"no one takes {host}")

    async with here.orchestrator.running(fail):
        drain = Command(epoch=1, id="c1", kind=CommandKind.DRAIN_HOST, host="a.boot")
        here.orchestrator.perform(drain, lambda answer: None)
        await until(lambda: "ValueError: no one takes a.boot" in caplog.text, "it failed without a word")


async def test_a_process_table_that_cannot_be_read_is_an_error_and_no_loss(
    fleet: Path, tmp_path: Path
) -> None:
    here = Local(fleet, job_file(tmp_path))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.open(os.devnull, os.O_RDONLY)]
    # The next descriptor is the last: the table can be listed, and no process in it be read.
    top = max(int(name) for name in os.listdir("/proc/self/fd"))
    while held[-1] < top:
        held.append(os.open(os.devnull, os.O_RDONLY))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (held[-1] + 2, hard))
        with pytest.raises(OSError, match="Too many open files"):
            marked_processes(str(fleet))
        assert await here.look("a") is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in held:
            os.close(fd)


async def test_a_launcher_that_ended_alone_is_started_again_by_an_in_job_reset(
    tmp_path: Path, fleet: Path
) -> None:
    async with Local(fleet, job_file(tmp_path)).running() as here:
        await is_up(here, "ab", daemons=3)
        survivor = here.launchers()["a"]
        kill_all(here.processes("launcher", "b"))
        await until(lambda: "b" not in here.launchers(), "it does not end")
        done = await here.do("c1", CommandKind.IN_JOB_RESET, workload="job")
        assert (done.status, done.text) == (OutcomeStatus.DONE, "started on b")
        await until(lambda: here.started("b") == ["b 1/2 2 0 {{kept}}"] * 2, "not started")
        assert here.launchers()["a"] == survivor
        kill_all(here.processes("launcher"))
        await until(lambda: not here.launchers(), "they do not end")
        refused = await here.do("c2", CommandKind.IN_JOB_RESET, workload="job")
        assert refused.text == "no launcher of job is left: the whole job must be started again"


async def test_a_launcher_that_ignores_sigterm_is_killed_after_its_grace(tmp_path: Path, fleet: Path) -> None:
    deaf = "import signal; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); signal.pause()"
    file = job_file(tmp_path, ("a",), replicas=1, grace_s=0.2, command=["{python}", "-c", deaf])
    async with Local(fleet, file).running() as here:
        await is_up(here, "a", daemons=1)
        before = here.launchers()["a"]
        done = await here.do("c1", CommandKind.WORKLOAD_RESET, workload="job")
        assert done.text == "stopped on a, started on a"
        assert here.launchers()["a"] != before


async def test_a_host_that_is_swapped_out_alive_gets_another_daemon(tmp_path: Path, fleet: Path) -> None:
    deaf = "import signal; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); signal.pause()"
    file = job_file(tmp_path, ("a", "b"), replicas=1, grace_s=0.2, command=["{python}", "-c", deaf])
    async with Local(fleet, file).running() as here:
        await is_up(here, "a", daemons=2)
        (before,) = here.processes("daemon", "a")
        swap = {"workload": "job", "host": "a", "spare": "b"}
        done = await here.do("c1", CommandKind.HOT_SWAP, **swap)
        assert done.text == "stopped on a, started on b"
        # The one before would say for ever that its host works for the job.
        await until(
            lambda: [one for one in here.processes("daemon", "a") if one.pid != before.pid], "no other"
        )
        assert "a" not in here.orchestrator._state.gone


async def test_a_full_disk_fails_a_command_that_is_tried_again(
    tmp_path: Path, fleet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = job_file(tmp_path, ("a",), replicas=1)
    async with Local(fleet, file).running() as here:
        await is_up(here, "a", daemons=1)
        monkeypatch.setattr(LocalMachines, "name", "missing/local")
        failed = await here.do("c1", CommandKind.WORKLOAD_RESET, workload="job")
        assert (failed.status, failed.passing) == (OutcomeStatus.FAILED, True)
        assert here.started("a") == ["a 0/1 1 0 {{kept}}"]
        monkeypatch.undo()
        done = await here.do("c1", CommandKind.WORKLOAD_RESET, workload="job")
        assert done.text == "stopped on a, started on a"


def test_a_state_that_does_not_fit_is_refused(tmp_path: Path, fleet: Path) -> None:
    state = fleet / "local.json"
    state.write_text('{"epoch": "x"}')
    with pytest.raises(
        ConfigError, match=r"local.json cannot be read: WantedState.epoch must be of type int"
    ):
        LocalOrchestrator(job_file(tmp_path), fleet, {})
    seats = [{"host": "x", "start": 1, "started": True}]
    state.write_text(json.dumps({"jobs": [{"workload": "job", "seats": seats, "replicas": 1}]}))
    with pytest.raises(ConfigError, match=r"--job-file has not x, which .*local.json has"):
        LocalOrchestrator(job_file(tmp_path), fleet, {})


def test_without_an_orchestrator_what_needs_one_is_refused() -> None:
    answers: list[Answer] = []
    nothing = NoOrchestrator()
    nothing.perform(Command(epoch=1, id="c1", kind=CommandKind.CORDON_HOST, host="a"), answers.append)
    nothing.perform(Command(epoch=1, id="c2", kind=CommandKind.WORKLOAD_RESET, workload="j"), answers.append)
    assert [answer.status for answer in answers] == [OutcomeStatus.DONE, OutcomeStatus.FAILED]
    assert answers[1].text == "workload_reset needs an orchestrator; this actuator has none (--orchestrator)"
    looked: list[bool | None] = []
    nothing.look("a", looked.append)
    assert looked == [None]


GOOD = {"hosts": ["a"], "jobs": [{"workload": "j", "command": ["x"]}]}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"hosts": []}, "hosts must be a list of different names."),
        ({"hosts": ["a", "a"]}, "hosts must be a list of different names."),
        ({"hosts": ["a b"]}, "hosts must be names of letters, digits, dots and dashes, found 'a b'."),
        ({"jobs": []}, "jobs must be a list of at least one job."),
        ({"spares": 1}, "the file has no field 'spares'; it may have daemon_flags, first_port, hosts, jobs"),
        ({"first_port": 80}, "first_port must be a whole number from 1024 to 65533, found 80."),
        ({"workers_per_host": True}, "workers_per_host must be a whole number from 1 to 1024, found True."),
        ({"resources": {"GPU": 0}}, "resources must be a table of numbers above 0, found {'GPU': 0}."),
        ({"resources": ["GPU"]}, "resources must be a table of numbers above 0, found ['GPU']."),
        ({"daemon_flags": "--watchdogs=xid"}, "daemon_flags must be a list of words."),
        ({"jobs": [{"workload": "j"}]}, "jobs[0].command must be a list of words."),
        ({"jobs": [{"workload": "", "command": ["x"]}]}, "jobs[0].workload must be a name, found ''."),
        ({"jobs": ["j"]}, "jobs[0] must be a table of fields, found 'j'."),
        ({"jobs": GOOD["jobs"] * 2}, "jobs name a workload twice, found ['j', 'j']."),
        ({"jobs": [{"workload": "j", "command": ["x"], "replicas": 2}]}, "hosts are 1, and the jobs need 2."),
        ({"jobs": [{"workload": "j", "command": ["x"], "grace_s": -1}]}, "grace_s must be 0 to 3600 seconds"),
        (
            {
                "jobs": [
                    {"workload": "j", "command": ["x"], "environment": {"R": "{node_rank}"}, "waiting": 1}
                ]
            },
            "jobs[0].waiting needs a command and an environment without {node_rank}",
        ),
        (
            {"jobs": [{"workload": "j", "command": ["x"], "environment": {"A": 1}}]},
            "must be a table of texts.",
        ),
    ],
)
def test_a_job_file_that_cannot_work_is_refused(
    change: dict[str, object], sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps({**GOOD, **change}))
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        read_job_file(path)


def test_a_job_file_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    with pytest.raises(ConfigError, match=r"job.json cannot be read: .*No such file"):
        read_job_file(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"job.json cannot be read: Expecting"):
        read_job_file(path)


def test_what_is_started_is_ended_by_one_command_and_starts_again_as_a_later_start_of_its_job(
    tmp_path: Path, fleet: Path
) -> None:
    file = job_file(tmp_path)

    async def work() -> list[str]:
        async with Local(fleet, file).running() as here:
            await is_up(here, "ab", daemons=3)
            return here.started("a")

    first = run(work())
    assert local.main([f"--stop={fleet}", "--host=nobody"]) == 1
    assert local.main([f"--stop={fleet}-of-another-name"]) == 1  # where nothing can have ended
    assert local.main([f"--stop={fleet}"]) == 0
    assert marked_processes(str(fleet)) == []
    # The controller's log remembers the generation of before, and takes a lower one for the past.
    again = run(work())
    assert again[: len(first)] == first
    assert [line.split()[3] for line in again] == ["0", "1"]
