# SPDX-License-Identifier: Apache-2.0
"""The program itself against real processes: whom it touches, when it ends, what it leaves."""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resiliency.events import EventType, RunEvent
from resiliency.testing.processes import Command
from simulator import session
from simulator.command_line import parse
from simulator.faults import Kind
from simulator.job import Job
from simulator.journal import Journal, boot_id
from simulator.simulator_entrypoint import main
from tests.simulator.conftest import NOBODY, StartWorker, state_of
from tests.waiting import wait_until_equal

ROOT = Path(__file__).parents[2]
JOB = f"simulator-session-{os.getpid()}"
PATIENCE = 180.0

Simulate = Callable[..., Command]


@pytest.fixture
def simulate(state_dir: Path, tmp_path: Path) -> Simulate:
    """``simulate(*flags)`` starts the simulator of node 0, with nothing of this run's environment."""

    def start(*flags: str) -> Command:
        fixed = [
            "--state_dir",
            str(state_dir),
            "--gpus_per_node",
            "2",
            "--kernel_log",
            str(tmp_path / "kmsg"),
        ]
        argv = [sys.executable, str(ROOT / "simulator" / "simulator_entrypoint.py"), *fixed, *flags]
        gone = dict.fromkeys(("JOB_IDENTIFIER", "RESILIENCY_RUN_DIR", "NODE_RANK"))
        return Command(argv, env=gone, cwd=tmp_path)

    return start


def test_other_jobs_nodes_and_users_survive_a_run(
    simulate: Simulate, start_worker: StartWorker, state_dir: Path
) -> None:
    own = [start_worker(JOB, rank) for rank in (0, 1)]
    others = [start_worker("another-job", rank) for rank in (0, 1)]
    others += [start_worker(JOB, rank, group_rank=1) for rank in (0, 1)]
    others += [start_worker(JOB + "-2"), start_worker("")]
    if os.geteuid() == 0:
        others += [start_worker(JOB, rank, user=NOBODY) for rank in (0, 1)]
    flags = ["--at", "0,stop,node=0,gpu=0,duration=0.2", "--at", "0.3,kill,node=0,gpu=0"]
    flags += ["--at", "0.4,xid_crash,node=0,gpu=1"]
    flags += ["--at", "0.5,host_kill,node=0", "--at", "0.5,kill,node=1,gpu=0", "--nnodes", "2"]
    with simulate("--job", JOB, *flags) as command:
        assert command.wait(timeout=PATIENCE) == 0, command.output
    assert [worker.wait(60) for worker in own] == [-signal.SIGKILL] * 2
    assert [state_of(worker) for worker in others] == ["S"] * len(others)
    # The last one finds nothing, or on a busy machine a worker that has been killed and is not dead yet.
    assert re.search("3 faults injected, 1 missed|4 faults injected, 0 missed", command.output)
    assert "1 effects undone" in command.output
    assert os.listdir(state_dir) == []


def test_it_ends_when_the_job_ends(simulate: Simulate, start_worker: StartWorker) -> None:
    worker = start_worker(JOB)
    with simulate("--job", JOB, "--at", "3000,kill,gpu=0", "--job_end_grace_s", "0.5") as command:
        command.wait_for_line("waiting for job", timeout=PATIENCE)
        worker.kill()
        worker.wait()
        # Killed before it was seen, the worker is waited for; so another one comes.
        second = start_worker(JOB)
        command.wait_for_line("job is there", timeout=PATIENCE)
        second.kill()
        second.wait()
        assert command.wait(timeout=PATIENCE) == 0
        assert f"simulator ends: job {JOB} has ended" in command.output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_and_all_effects(simulate: Simulate, start_worker: StartWorker, number: int) -> None:
    worker = start_worker(JOB)
    with simulate("--job", JOB, "--at", "0,stop,gpu=0,duration=3000") as command:
        command.wait_for_line("fault injected: stop", timeout=PATIENCE)
        wait_until_equal(lambda: state_of(worker), "T")
        command.signal(number)
        assert command.wait(timeout=PATIENCE) == 0
    wait_until_equal(lambda: state_of(worker), "S")


def test_after_its_own_sigkill_the_next_start_undoes_first(
    simulate: Simulate, start_worker: StartWorker
) -> None:
    worker = start_worker(JOB)
    with simulate("--job", JOB, "--at", "0,stop,gpu=0,duration=3000") as command:
        command.wait_for_line("fault injected: stop", timeout=PATIENCE)
        command.signal(signal.SIGKILL)
        command.wait(timeout=PATIENCE)
    wait_until_equal(lambda: state_of(worker), "T")
    # Of another job, which never comes.
    with simulate("--job", "another", "--at", "0,kill", "--start_timeout_s", "0") as command:
        assert command.wait(timeout=PATIENCE) == 1
        assert "effect undone that a killed simulator left: stop of node 0 gpu 0" in command.output
        assert "no worker of job another on this node within 0 s" in command.output
    wait_until_equal(lambda: state_of(worker), "S")


def test_faults_reach_the_jobs_event_log(
    simulate: Simulate, start_worker: StartWorker, tmp_path: Path
) -> None:
    start_worker(JOB, 1)
    run_dir = tmp_path / "run"
    flags = ["--at", "0,stop,gpu=1,duration=0.1,cause=Job hang", "--run_dir", str(run_dir)]
    with simulate("--job", JOB, *flags) as command:
        assert command.wait(timeout=PATIENCE) == 0
    (line,) = (run_dir / f"{JOB}-events.jsonl").read_text().splitlines()
    event = RunEvent.from_json(line)
    assert (event.type, event.rank, event.job_name) == (EventType.FAULT_INJECTED, 1, JOB)
    assert (event.fields["kind"], event.fields["cause"]) == ("stop", "Job hang")


def test_a_dry_run_does_nothing(start_worker: StartWorker, state_dir: Path) -> None:
    worker = start_worker(JOB)
    assert main(["--job", JOB, "--at", "0,kill,gpu=0", "--dry_run", "--state_dir", str(state_dir)]) == 0
    assert worker.poll() is None
    assert not state_dir.exists()


@pytest.mark.parametrize(
    ("answer", "killed"), [("n\n", False), ("\n", False), ("y\n", True), ("--yes", True)]
)
def test_on_a_terminal_it_asks_first(
    answer: str, killed: bool, start_worker: StartWorker, state_dir: Path
) -> None:
    worker = start_worker(JOB)
    ours, theirs = pty.openpty()
    yes = ["--yes"] if answer == "--yes" else []
    flags = ["--job", JOB, "--at", "0,kill,gpu=0", "--state_dir", str(state_dir), *yes]
    try:
        if not yes:
            os.write(ours, answer.encode())
        done = subprocess.run(
            [sys.executable, "-m", "simulator", *flags],
            cwd=ROOT,
            stdin=theirs,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE,
        )
    finally:
        os.close(ours)
        os.close(theirs)
    assert done.returncode == 0, done.stdout
    assert ("Go on? [y/N]" in done.stdout) == (not yes)
    if killed:
        assert worker.wait(60) == -signal.SIGKILL
    else:
        assert f"This will injure job {JOB} on this node (rank 0): 1 x kill." in done.stdout
        assert worker.poll() is None


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--kinds", "kill"], "--job is missing: without a name every process"),
        (["--job", "j"], "nothing is to fail.  Add --enable_gpu_failure"),
        (["--job", "j", "--kinds", "tired"], "'tired' is no kind of fault.  Choose from kill, stop"),
        (["--job", "j", "--kinds", "kill=0"], "a weight is a whole number"),
        (["--job", "j", "--kinds", "kill", "--node_rank", "1"], "--node_rank must be 0 to 0, found 1"),
        (["--job", "j", "--kinds", "kill", "--nnodes", "0"], "--nnodes must be 1 or more"),
        (["--job", "j", "--kinds", "kill", "--gpus_per_node", "x"], "invalid int value: 'x'"),
        (["--job", "j", "--kinds", "kill", "--fault_interval", "0"], "--fault_interval must be above 0"),
        (["--job", "j", "--kinds", "kill", "--fault_interval", "often"], "must be seconds, found 'often'"),
        (["--job", "j", "--kinds", "kill", "--duration_s", "-1"], "--duration_s must be zero or more"),
        (["--job", "j", "--kinds", "kill", "--duration_s", "0"], "--duration_s must be above 0"),
        (["--job", "j", "--kinds", "kill", "--speed", "0"], "--speed must be a number above 0"),
        (["--job", "j", "--fault_interval", "5"], "needs kinds to draw from"),
        (["--job", "j", "--profile", "llama3", "--kinds", "kill"], "exclude each other"),
        (["--job", "j", "--profile", "acme"], "invalid choice: 'acme'"),
        (["--job", "j", "--kinds", "kill", "--as_gpus", "8"], "needs --profile"),
        (["--job", "j", "--xid_crash", "--kinds", "kill"], "--xid_crash needs --enable_xid_failure"),
        (["--job", "j", "--kinds", "disk_full"], "this host cannot do disk_full: --disk_dir names no"),
        (["--job", "j", "--kinds", "kill", "--fault_interval", "0.001"], "would have about 3,600,000 faults"),
        (["--job", "j", "--mtbf_gpu_s", "1", "--mtbf_host_s", "1"], "not allowed with argument"),
        (["--job", "j", "--kind", "kill"], "unrecognized arguments: --kind kill"),
        (["--job", "j", "--trace", "/none.csv"], "--trace /none.csv: cannot read it"),
        (["--job", "j", "--at", "1,stop", "--fault_duration_s", "0"], "must be above 0"),
    ],
)
def test_bad_input_is_refused_with_a_sentence_and_nothing_is_done(
    flags: list[str], sentence: str, state_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*flags, "--state_dir", str(state_dir)]) == 2
    assert sentence in capsys.readouterr().err
    assert not state_dir.exists()


def test_a_node_rank_in_the_environment_must_be_a_number(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NODE_RANK", "first")
    assert main(["--job", "j", "--kinds", "kill"]) == 2
    assert "NODE_RANK must be a whole number, found 'first'" in capsys.readouterr().err


def test_the_promised_flags_have_their_promised_defaults() -> None:
    flags = ["--enable_gpu_failure", "--enable_gpu_slowdown", "--enable_xid_failure", "--job", "j"]
    options = parse(flags, {})
    assert (options.node_rank, options.seed, options.shape.gpus_per_node) == (0, 42, 8)
    (source,) = options.sources
    assert source.mean_us == 10_000_000  # type: ignore[attr-defined]
    assert [share.kind for share in source.shares] == [Kind.KILL, Kind.POWER_CAP, Kind.XID]  # type: ignore[attr-defined]
    assert source.lasts_us[Kind.POWER_CAP] == 30_000_000  # type: ignore[attr-defined]
    dashes = parse([flag.replace("_", "-") for flag in flags], {})
    assert dashes.sources == options.sources


def test_impossible_kinds_are_skipped_where_that_is_asked_for(
    start_worker: StartWorker, state_dir: Path, tmp_path: Path
) -> None:
    worker = start_worker(JOB)
    flags = ["--at", "0,disk_full", "--at", "0.1,kill,gpu=0", "--skip_impossible", "--job", JOB, "--yes"]
    assert main([*flags, "--state_dir", str(state_dir)]) == 0
    assert worker.wait(60) == -signal.SIGKILL


@pytest.fixture
def my_injectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The module of docs/simulator.md, and classes that are no injectors."""
    page = (ROOT / "docs" / "simulator.md").read_text()
    example = page.partition("```python\n# my_injectors.py\n")[2].partition("```")[0]
    more = """
class Namesake(Abort):
    name = "stop"

class Idle(Abort):
    name = "idle"

    def refusal(self):
        return "it never works."

class Fragile(Abort):
    def inject(self, record):
        raise KeyError("rank")

class Empty:
    name = "empty"

    def __init__(self, job):
        pass
"""
    (tmp_path / "my_injectors.py").write_text(example + more)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_injectors", None)


@pytest.mark.usefixtures("my_injectors")
@pytest.mark.parametrize(
    ("classes", "end"),
    [(["Abort"], signal.SIGABRT), (["Idle", "Abort"], signal.SIGABRT), (["Idle"], signal.SIGKILL)],
)
def test_an_injector_of_the_user_takes_the_place_of_ours_where_it_works(
    classes: list[str], end: int, start_worker: StartWorker, state_dir: Path
) -> None:
    worker = start_worker(JOB)
    own = [word for each in classes for word in ("--injector", f"my_injectors:{each}")]
    flags = ["--at", "0,kill,gpu=0", "--job", JOB, "--yes", "--state_dir", str(state_dir)]
    assert main([*flags, *own]) == 0
    assert worker.wait(60) == -end


@pytest.mark.usefixtures("my_injectors")
def test_an_error_in_the_users_injector_is_told_and_the_schedule_goes_on(
    start_worker: StartWorker, state_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = start_worker(JOB)
    flags = ["--at", "0,kill,gpu=0", "--at", "0.1,stop,gpu=0,duration=0.1", "--job", JOB, "--yes"]
    flags += ["--injector", "my_injectors:Fragile", "--state_dir", str(state_dir)]
    assert main(flags) == 1
    told = capsys.readouterr().err
    assert "fault kill of node 0 gpu 0 at 0.000000 s not injected: KeyError: 'rank'" in told
    assert "1 faults injected, 0 missed, 1 effects undone, 1 failed" in told
    assert worker.poll() is None
    assert os.listdir(state_dir) == []


@pytest.mark.usefixtures("my_injectors")
def test_an_effect_of_the_users_injector_waits_for_a_start_that_knows_it(
    state_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Journal(state_dir).close()
    left = state_dir / "0.journal"
    left.write_text(f'{{"boot": "{boot_id()}"}}\n{{"begin": 0, "record": {{"injector": "abort"}}}}\n')
    flags = ["--undo_only", "--state_dir", str(state_dir)]
    assert main(flags) == 1
    assert left.exists()
    assert main([*flags, "--injector", "my_injectors:Abort"]) == 0
    assert not left.exists()


@pytest.mark.usefixtures("my_injectors")
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("none_such:Abort", "--injector none_such:Abort: cannot make it: No module named 'none_such'"),
        ("my_injectors", "--injector my_injectors: cannot make it"),
        (":Abort", "Write MODULE:CLASS; the module is found on PYTHONPATH"),
        ("my_injectors:None", "cannot make it: module 'my_injectors' has no attribute 'None'"),
        ("my_injectors:Empty", "it has no kinds, outlives_boot, refusal, aim_fault, inject, end_effect"),
        ("my_injectors:Namesake", "its name is 'stop', which another injector has"),
    ],
)
def test_a_class_that_is_no_injector_is_refused(
    name: str, sentence: str, state_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--at", "0,kill,gpu=0", "--job", JOB, "--yes", "--state_dir", str(state_dir)]
    assert main([*flags, "--injector", name]) == 2
    assert sentence in capsys.readouterr().err


#: A program without a job's name that lets itself be stopped and killed, beside a worker of job NAME.
SELF_INJURER = """
import os, subprocess, sys
simulator, name, *flags = sys.argv[1:]
subprocess.Popen([sys.executable, simulator, "--job", name, "--parent", str(os.getpid()), "--yes", *flags])
sys.stdin.read()
"""


def test_a_program_that_injures_itself_is_the_only_one_that_is_touched(
    start_worker: StartWorker, state_dir: Path, tmp_path: Path
) -> None:
    others = [start_worker(JOB, 0), start_worker(JOB, 1)]
    flags = ["--state_dir", str(state_dir), "--at", "0,stop,gpu=1,duration=0.2"]
    flags += ["--at", "0.3,xid,gpu=1,value=48", "--kernel_log", str(tmp_path / "kmsg")]
    flags += ["--at", "0.5,kill,gpu=1"]
    simulator = str(ROOT / "simulator" / "simulator_entrypoint.py")
    env = {"PATH": os.environ["PATH"], "LOCAL_RANK": "1", "RANK": "5"}
    argv = [sys.executable, "-c", SELF_INJURER, simulator, JOB, *flags]
    with subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stderr is not None
        # Its end is that of the simulator, too, which writes there; what it reads stays open until then.
        output = program.stderr.read()
        assert program.wait(PATIENCE) == -signal.SIGKILL
    assert "3 faults injected, 0 missed, 1 effects undone" in output
    assert f": 48, pid={program.pid}, " in (tmp_path / "kmsg").read_text()
    assert [state_of(worker) for worker in others] == ["S", "S"]
    assert os.listdir(state_dir) == []


def test_a_process_that_did_not_start_the_simulator_is_not_taken_for_its_parent(
    start_worker: StartWorker, state_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = start_worker(JOB)
    flags = ["--job", JOB, "--yes", "--at", "0,kill,gpu=0", "--state_dir", str(state_dir)]
    assert main([*flags, "--parent", str(worker.pid)]) == 2
    assert f"--parent {worker.pid}: this simulator was started by process" in capsys.readouterr().err
    assert worker.poll() is None


#: A launcher of two ranks, the second of which lets its host be killed.
SELF_INJURING_JOB = """
exec 3<&0
GROUP_RANK=0 RANK=0 LOCAL_RANK=0 sleep 600 &
GROUP_RANK=0 RANK=1 LOCAL_RANK=1 "$@" <&3 &
wait
"""


def test_a_program_that_loses_its_host_takes_its_job_on_this_node_along(
    start_worker: StartWorker, state_dir: Path
) -> None:
    others = [start_worker(JOB, group_rank=1), start_worker("another-job")]
    simulator = str(ROOT / "simulator" / "simulator_entrypoint.py")
    flags = ["--state_dir", str(state_dir), "--at", "0.5,host_kill,node=0"]
    argv = [sys.executable, "-c", SELF_INJURER, simulator, JOB, *flags]
    env = {"PATH": os.environ["PATH"], "JOB_IDENTIFIER": JOB}
    reads, writes = os.pipe()  # the program waits for its end
    with subprocess.Popen(
        ["sh", "-c", SELF_INJURING_JOB, "sh", *argv],
        env=env,
        stdin=reads,
        stderr=subprocess.PIPE,
        text=True,
    ) as launcher:
        try:
            _, output = launcher.communicate(timeout=PATIENCE)  # until the simulator has ended, too
        finally:
            os.close(reads)
            os.close(writes)
            left = Job(JOB, 0).members()
            for member in left:
                member.process.send(signal.SIGKILL)
            launcher.kill()
    assert launcher.returncode == -signal.SIGKILL
    assert "1 faults injected, 0 missed" in output
    assert left == []
    assert [state_of(worker) for worker in others] == ["S", "S"]


def test_a_program_of_no_job_has_no_host_to_lose(start_worker: StartWorker, state_dir: Path) -> None:
    worker = start_worker(JOB)
    simulator = str(ROOT / "simulator" / "simulator_entrypoint.py")
    flags = ["--state_dir", str(state_dir), "--at", "0,host_kill"]
    argv = [sys.executable, "-c", SELF_INJURER, simulator, JOB, *flags]
    env = {"PATH": os.environ["PATH"], "LOCAL_RANK": "1"}
    with subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stderr is not None
        ended = next(line for line in program.stderr if "simulator ended" in line)
        program.kill()
    assert "0 faults injected, 1 missed" in ended
    assert worker.poll() is None


def test_the_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "--dry_run" in text
    assert "exit codes" in text


def test_an_end_of_input_is_no_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert not session._agreed([], parse(["--job", "j", "--kinds", "kill"], {}))
