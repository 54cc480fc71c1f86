# SPDX-License-Identifier: Apache-2.0
"""A failed attempt is diagnosed, and a job that would only fail again ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, ProcessFailure

from resiliency import cgroups
from resiliency.errors import ConfigError
from resiliency.events import EventType
from resiliency.launch.agent import wait_for_command
from resiliency.launch.failures import shared_history
from resiliency.launch.failures.evidence import EvidenceCollector, KernelLog, read_error_file
from resiliency.launch.failures.policy import ask_policy, check_policy
from resiliency.launch.fleet.link import HostCommand, HostCommandKind, NullReporter
from resiliency.launch.health.diagnosis import Advice, Cause, Evidence, RankDeath, diagnose
from resiliency.launch.rendezvous import shared_lines
from resiliency.rank import crash_note
from resiliency.testing.processes import Command
from resiliency.wake_pipe import WakePipe
from tests.ports import free_port

from .conftest import SCRIPTS, WAIT, Launch, events
from .settings import FAST

CRASHING = SCRIPTS / "crashing.py"


def _two_hosts(launch: Launch, tmp_path: Path, *words: object) -> list[Command]:
    place = ("--nnodes=2", "--nproc-per-node=1", "--rdzv-id=bad", f"--master-port={free_port()}", FAST)
    return [
        launch(
            *place,
            f"--node-rank={rank}",
            "--max-restarts=9",
            CRASHING,
            *words,
            run_dir=tmp_path / f"{rank}",
        )
        for rank in range(2)
    ]


def test_the_same_error_at_the_same_step_ends_the_job_on_all_hosts_in_the_third_run(
    launch: Launch, tmp_path: Path
) -> None:
    """The bad sample is on host 0, on host 1, and on host 0, which learns from the store what host 1 met."""
    hosts = _two_hosts(launch, tmp_path, "--step=57")
    assert [host.wait(timeout=WAIT) for host in hosts] == [70, 70]
    assert [len(re.findall(r"attempt \d runs", host.output)) for host in hosts] == [3, 3]
    first, last = events(tmp_path / "0", EventType.DIAGNOSED)
    (second,) = events(tmp_path / "1", EventType.DIAGNOSED)
    assert (first.attempt, first.fields["advice"], first.fields["ranks"]) == (0, "restart", [0])
    assert (second.attempt, second.fields["advice"], second.fields["ranks"]) == (1, "restart", [1])
    assert (last.attempt, last.fields["advice"], last.fields["ranks"]) == (2, "stop", [0])
    assert last.fields["decided_by"] == "deterministic"
    assert last.step == 57
    for host in hosts:
        assert "would fail again as it is: rank 0 on" in host.output
        assert "ValueError: sample 4711 is broken at " in host.output


def test_hosts_wait_together_for_longer_and_longer_and_a_job_outlives_an_outage_at_its_start(
    launch: Launch, tmp_path: Path
) -> None:
    hosts = _two_hosts(launch, tmp_path, f"--until={tmp_path / 'there'}")
    for host in hosts:  # also the one whose rank is well
        host.wait_for_line("job waits 1 s before attempt 2", timeout=WAIT)
        host.wait_for_line("job waits 2 s before attempt 3", timeout=WAIT)
    (tmp_path / "there").touch()
    assert [host.wait(timeout=WAIT) for host in hosts] == [0, 0]
    told = events(tmp_path / "0", EventType.DIAGNOSED)
    assert [(event.fields["cause"], event.fields["advice"]) for event in told] == [
        ("io_error", "restart")
    ] * 3


def test_an_exit_code_never_ends_a_job_a_policy_that_raises_changes_nothing_and_a_signal_ends_a_pause(
    launch: Launch, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("def policy(evidence, diagnosis):\n    raise KeyError('oh')\n")
    flags = ("--nproc-per-node=1", "--max-restarts=9", "--failure-policy=mine:policy")
    job = launch(*flags, CRASHING, "--exit=17")
    job.wait_for_line("job waits 5 s before attempt 4", timeout=WAIT)
    os.kill(job.pid, signal.SIGTERM)
    assert job.wait(timeout=WAIT) == 128 + signal.SIGTERM
    assert "attempt 4 runs" not in job.output
    told = events(tmp_path / "run", EventType.DIAGNOSED)
    assert [event.fields["advice"] for event in told] == ["restart"] * 4
    assert job.output.count("--failure-policy mine:policy failed: KeyError: 'oh'; our own advice holds") == 4


class Reporter(NullReporter):
    """Whose supervisor has something to say, and perhaps a command."""

    def __init__(self, pipe: WakePipe, command: HostCommand | None) -> None:
        pipe.wake()
        self.wake_fd, self._command = pipe.fileno(), command

    def try_take_command(self) -> HostCommand | None:
        return self._command


def test_a_command_of_the_supervisor_and_a_change_of_hosts_end_a_pause() -> None:
    command = HostCommand(epoch=1, id="1", kind=HostCommandKind.RESTART_RANKS)
    changes = iter([False, True])
    with closing(WakePipe()) as pipe:
        assert wait_for_command(WAIT, Reporter(pipe, command), lambda: None, lambda: False) is command
        assert wait_for_command(WAIT, Reporter(pipe, None), lambda: None, lambda: next(changes)) is None
    assert next(changes, None) is None


POLICIES = """
import os, signal, time
from resiliency.launch.health.diagnosis import Advice
def stop(evidence, diagnosis):
    print("a policy may print")
    return Advice.STOP if evidence.deaths[0].exit_code == 17 else None
def nothing(evidence, diagnosis): return None
def nonsense(evidence, diagnosis): return "halt"
def hangs(evidence, diagnosis): signal.pause()
def crashes(evidence, diagnosis): os.kill(os.getpid(), signal.SIGSEGV)
number = 3
"""


@pytest.mark.parametrize(
    ("name", "advice", "says"),
    [
        ("stop", Advice.STOP, ""),
        ("nothing", None, ""),
        ("nonsense", None, "returned 'halt', which is no Advice"),
        ("hangs", None, "no answer after 1 s"),
        ("crashes", None, "failed: exit code -11"),
    ],
)
def test_a_policy_decides_and_one_that_fails_does_not(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    advice: Advice | None,
    says: str,
) -> None:
    (tmp_path / "policies.py").write_text(POLICIES)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    evidence = Evidence(attempt=0, deaths=(RankDeath(rank=0, host="host-a", exit_code=17),))
    assert ask_policy(f"policies:{name}", evidence, diagnose(evidence), deadline_s=1.0) is advice
    assert says in caplog.text


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("policies", "must be MODULE:FUNCTION, found 'policies'"),
        ("no_such_module:f", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("json:no_such_name", "has no attribute 'no_such_name'"),
        ("os:sep", "TypeError: os:sep is no function"),
    ],
)
def test_a_policy_that_cannot_work_is_refused_at_the_door(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        check_policy(name)


def test_a_crash_note_holds_type_message_frames_and_step_and_the_traceback_is_still_printed(
    tmp_path: Path,
) -> None:
    note = tmp_path / "error.json"
    script = tmp_path / "boom.py"
    script.write_text(
        "from resiliency.rank import crash_note\ncrash_note.install(lambda: 7)\n"
        "def step():\n    raise ValueError('line one: x\\nline two')\nstep()\n"
    )
    env = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(note)}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ValueError: line one: x\nline two" in done.stderr
    error = read_error_file(json.loads(note.read_text()))
    assert error is not None
    assert (error.type, error.message, error.step) == ("ValueError", "line one: x\nline two", 7)
    assert str(error.user_frame) == f"{script}:4 in step"
    # Without a launcher nothing is written, and what `record` has written stays.
    note.write_text("{}")
    subprocess.run([sys.executable, script], env=env, capture_output=True, check=False)
    assert note.read_text() == "{}"


def _raise_from(cause: BaseException) -> None:
    raise RuntimeError("could not read a shard after 5 tries") from cause


def _raise_within(context: BaseException, *, hide: bool) -> None:
    try:
        raise context
    except type(context):
        if hide:
            raise ConnectionError("no answer") from None
        raise ConnectionError("no answer")  # noqa: B904


def _raise(error: BaseException) -> None:
    raise error


STALE = OSError(116, "Stale file handle", "/data/0.tar")
TAR = "OSError: [Errno 116] Stale file handle: '/data/0.tar'"
LONG = "    batch = self.stage(batch)\n" * 2000
WORKER = (
    f"Caught OSError in DataLoader worker process 3.\nOriginal Traceback (most recent call last):\n{LONG}"
)
UNPRINTABLE = type("Unprintable", (Exception,), {"__str__": lambda self: 1 / 0})

#: Name -> what is raised, and the exceptions that the launcher reads: all or the beginning of each.
NOTES: dict[str, tuple[Callable[[], None], list[str]]] = {
    "an error of no such name": (
        lambda: _raise(subprocess.TimeoutExpired("make", 3)),
        ["subprocess.TimeoutExpired: Command 'make' timed out after 3 seconds"],
    ),
    "a cause": (lambda: _raise_from(STALE), ["RuntimeError: could not read a shard after 5 tries", TAR]),
    "a context": (lambda: _raise_within(STALE, hide=False), ["ConnectionError: no answer", TAR]),
    "a context that is hidden": (lambda: _raise_within(STALE, hide=True), ["ConnectionError: no answer"]),
    "a loader worker": (
        lambda: _raise(RuntimeError(f"{WORKER}{TAR}\n")),
        ["RuntimeError: Caught OSError in DataLoader worker process 3.\nOriginal", TAR],
    ),
    "a text that cannot be made": (
        lambda: _raise(UNPRINTABLE()),
        ["tests.launch.test_failures.Unprintable: <"],
    ),
}


@pytest.mark.parametrize("writer", ["crash note", "record"])
@pytest.mark.parametrize(("fails", "says"), NOTES.values(), ids=NOTES)
def test_the_whole_error_is_noted_and_torch_reads_the_note(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    writer: str,
    fails: Callable[[], None],
    says: list[str],
) -> None:
    """Also a note of torchelastic's own `record`, as far as that keeps the error."""
    note = tmp_path / "error.json"
    monkeypatch.setenv(crash_note.ERROR_FILE_ENV, str(note))
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    crash_note.install(lambda: 7)
    try:
        fails()
    except Exception as error:
        if writer == "crash note":
            sys.excepthook(type(error), error, error.__traceback__)
        elif isinstance(error, UNPRINTABLE):
            return  # `record` leaves no note of it
        else:
            ErrorHandler().record_exception(error)
            says = [says[0].removeprefix("subprocess."), *says[1:]]
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(note))
    assert failure.timestamp > 0
    found = read_error_file(failure.error_file_data)
    assert found is not None
    for one, beginning in zip((found, *found.chain), says, strict=True):
        assert f"{one.type}: {one.message}".startswith(beginning)
        assert len(one.message) < 5_000 or writer == "record"
    assert found.user_frame is not None
    assert found.user_frame.function.startswith("_raise")
    assert found.step == (7 if writer == "crash note" else None)


def test_evidence_begins_with_the_attempt(tmp_path: Path) -> None:
    """D22: what the kernel and the counters said before is not of this attempt."""
    group = tmp_path / "cgroup" / "job"
    (tmp_path / "proc" / "self").mkdir(parents=True)
    group.mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    assert cgroups.oom_kills(tmp_path / "cgroup", tmp_path / "proc") is None
    (tmp_path / "proc/vmstat").write_text("oom_kill 9\n")
    assert cgroups.oom_kills(tmp_path / "cgroup", tmp_path / "proc") == 9
    (group / "memory.events").write_text("oom 4\noom_kill 3\n")
    assert cgroups.oom_kills(tmp_path / "cgroup", tmp_path / "proc") == 3

    log = tmp_path / "kmsg"
    log.write_text("6,1,1,-;old line\n")
    kernel = KernelLog(log)
    kernel.mark_start()
    with log.open("a") as file:
        file.write("3,2,2,-;Out of memory: Killed process 7 (python)\n SUBSYSTEM=x\n")
    assert kernel.try_read() == ("Out of memory: Killed process 7 (python)",)
    kernel.close()
    assert KernelLog(tmp_path / "absent").try_read() is None

    printed = tmp_path / "stderr.log"
    printed.write_text("Traceback (most recent call last):\nMemoryError: no\n")
    collector = EvidenceCollector("host-a", (str(tmp_path),))
    for attempt, cause in enumerate((Cause.HOST_OOM, Cause.UNKNOWN)):
        collector.begin_attempt()
        if attempt == 0:
            collector.add_death(rank=0, exit_code=1, error={}, hang=None, stderr_file=str(printed))
        assert diagnose(collector.collect(attempt=attempt, step=None)).cause is cause
    collector.close()


ECHO = {"message": "RuntimeError: Connection closed by peer [10.0.0.7]:40213"}
OWN = {"message": "KeyError: 'labels'"}
ENFORCE = "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  1368 vs 4\n"
TEARDOWN = f'Traceback (most recent call last):\n  File "/job/t.py", line 1, in f\nKeyError: 3\n{ENFORCE}'


@pytest.mark.parametrize(
    ("deaths", "explained"),
    [
        ([(1, ECHO, "")], False),
        ([(17, {}, "")], False),
        ([(-6, {}, "")], False),
        ([(-6, {}, ENFORCE)], False),
        ([(-6, {}, TEARDOWN)], True),
        ([(-9, {}, "")], True),
        ([(-11, {}, "")], True),
        ([(1, ECHO, ""), (1, OWN, "")], True),
        ([(17, {}, ""), (1, ECHO, ""), (1, ECHO, "")], False),
    ],
)
def test_echoes_ends_without_a_word_and_aborts_of_native_code_explain_nothing(
    tmp_path: Path, deaths: list[tuple[int, dict[str, object], str]], explained: bool
) -> None:
    collector = EvidenceCollector("host-a")
    collector.begin_attempt()
    for rank, (code, note, text) in enumerate(deaths):
        printed = tmp_path / f"{rank}"
        printed.write_text(text)
        collector.add_death(rank=rank, exit_code=code, error=note, hang=None, stderr_file=str(printed))
    assert collector.is_explained() is explained
    collector.close()


def test_a_store_that_hangs_or_fails_costs_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """D29: nothing waits for the thread that was given up on."""
    monkeypatch.setattr(shared_lines, "DEADLINE_S", 0.1)
    over = threading.Event()

    def hangs(work: Callable[[Any], Any]) -> bool:
        return over.wait(WAIT)

    def fails(work: Callable[[Any], Any]) -> bool:
        raise RuntimeError("connection reset")

    for call in (hangs, fails):
        found = diagnose(
            Evidence(attempt=0, step=3, deaths=(RankDeath(rank=0, host="host-a", exit_code=17),))
        )
        found = replace(found, rollback=(1, 0, 49))
        history = shared_history.SharedHistory(shared_lines.SharedLines(call))
        history.add("run", found)
        assert history.before("run", 1) == (found,)
        assert history.rollbacks("run") == [(1, 0, 49)]
        assert shared_history.decode_diagnosis(shared_history.encode_diagnosis(found)) == found
    over.set()
