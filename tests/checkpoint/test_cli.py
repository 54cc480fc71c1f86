# SPDX-License-Identifier: Apache-2.0
"""The command line over checkpoints: what it prints and how it exits."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from resiliency import commands
from resiliency.checkpoint import cli, progress
from resiliency.checkpoint.branches import Branches, record_branches
from resiliency.checkpoint.capture.arena import RankArena
from resiliency.checkpoint.capture.job_memory import DEFAULT_ROOT, hold_job, job_directory
from resiliency.checkpoint.cli import DAMAGED, INTERRUPTED, NOTHING, OK, USAGE, main
from resiliency.checkpoint.format.catalog import quarantine
from resiliency.checkpoint.format.dcp import DcpFormat
from resiliency.checkpoint.format.local import LocalFormat
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.testing import warm
from tests.checkpoint.storage_builders import file_in, save, small_shard


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    storage = LocalStorage(tmp_path)
    save(storage, LocalFormat(), [small_shard(3)])
    save(storage, DcpFormat(), [small_shard(20)])
    return tmp_path


def damage(directory: Path) -> None:
    path = file_in(directory / "step=20", "__0_0.distcp")
    content = bytearray(path.read_bytes())
    content[700] ^= 1
    path.write_bytes(content)


def test_ls_shows_a_table_row_per_step(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quarantine(LocalStorage(directory), 3, "bytes differ")
    assert main(["ls", str(directory)]) == OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["STEP", "CONDITION", "SIZE", "RANKS", "FORMAT", "CREATED", "NOTE"]
    assert lines[1].startswith("3     unfinished")
    assert lines[1].endswith("corrupt: bytes differ")
    assert lines[2].split()[:2] == ["20", "complete"]
    assert lines[2].split()[4:6] == ["1/1", "dcp"]


def test_a_step_that_the_job_went_back_behind_is_listed_as_left_and_is_not_the_newest(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = LocalStorage(directory)
    save(storage, DcpFormat(), [small_shard(10)], save_id="attempt.1-10")
    record_branches(storage, Branches().after(3, "attempt-0"))
    assert main(["ls", str(directory)]) == OK
    assert "left: job went back to step 3" in capsys.readouterr().out.splitlines()[3]
    assert main(["show", str(directory)]) == OK
    assert "step=10" in capsys.readouterr().out
    assert main(["show", str(directory), "--step", "20"]) == OK


def test_free_removes_what_dead_jobs_left_and_nothing_of_a_living_or_recent_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dead, living, recent = (job_directory(name, tmp_path) for name in ("dead", "living", "recent"))
    for directory in (dead, living, recent):
        RankArena(directory, rank=0).close()
    for directory in (dead, living):
        for path in (*directory.rglob("*"), directory):
            os.utime(path, (1, 1))
    others = tmp_path / f"resiliency-other-{os.getuid() + 1}"  # of nobody: its name and its owner differ
    others.mkdir()
    (tmp_path / f"resiliency-link-{os.getuid()}").symlink_to(others)
    with contextlib.closing(hold_job(living)):
        assert main(["free", str(tmp_path), "--all-users", "--dry-run"]) == OK
        assert f"{dead}: would be freed" in capsys.readouterr().out
        assert dead.exists()
        assert main(["free", str(tmp_path), "--all-users", "--json"]) == OK
        rows = {row["directory"]: row["outcome"] for row in json.loads(capsys.readouterr().out)}
    assert rows == {
        str(dead): "freed",
        str(living): "a process of the job lives",
        str(recent): "changed too recently",
    }
    assert [path.exists() for path in (dead, living, recent, others)] == [False, True, True, True]


@pytest.fixture
def everybodys() -> Iterator[Path]:
    """A directory that other users reach."""
    with tempfile.TemporaryDirectory(dir=DEFAULT_ROOT) as name:
        Path(name).chmod(0o1777)
        yield Path(name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may have files of others")
def test_free_touches_what_is_of_others_with_their_rights_alone(
    everybodys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    victim = everybodys / "victim"
    victim.mkdir(mode=0o755)
    (victim / "file").touch()
    job = everybodys / "resiliency-job-12345"
    job.mkdir(mode=0o700)
    (job / "job.lock").touch()
    (job / "rank-0").symlink_to(victim)  # where root would delete all files
    for path in (job / "job.lock", job):
        os.chown(path, 12345, 12345)
    assert main(["free", str(everybodys), "--all-users", "--older-than", "0"]) == DAMAGED
    assert "not permitted" in capsys.readouterr().out
    assert (victim / "file").exists()
    (job / "rank-0").unlink()
    assert main(["free", str(everybodys), "--older-than", "0"]) == OK  # of this user alone
    assert job.exists()
    assert main(["free", str(everybodys), "--all-users", "--older-than", "0"]) == OK
    assert not job.exists()
    assert os.geteuid() == 0


def test_ls_json_is_one_document(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", str(directory), "--json"]) == OK
    rows = json.loads(capsys.readouterr().out)
    assert [(row["step"], row["condition"], row["format"]) for row in rows] == [
        (3, "complete", "local"),
        (20, "complete", "dcp"),
    ]


def test_verify_reads_the_newest_and_finds_damage(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(directory)]) == OK
    assert capsys.readouterr().out.startswith("step 20: good, ")
    damage(directory)
    assert main(["verify", str(directory)]) == DAMAGED
    assert "step 20: " in (out := capsys.readouterr().out)
    assert "__0_0.distcp, bytes 0 to " in out
    assert main(["verify", str(directory), "--step", "3"]) == OK
    capsys.readouterr()
    assert main(["verify", str(directory), "--all", "--json"]) == DAMAGED
    results = json.loads(capsys.readouterr().out)
    assert [(item["step"], bool(item["error"])) for item in results] == [(3, False), (20, True)]


def test_show_names_every_tensor(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(directory)]) == OK
    out = capsys.readouterr().out
    assert "run 'run'" in out
    assert "model.weight  float32   [37, 11]" in out
    assert main(["show", str(directory), "--step", "3", "--json"]) == OK
    shown = json.loads(capsys.readouterr().out)
    assert {"key": "model.bias", "dtype": "bfloat16", "global_shape": [5]} in shown["tensors"]


def test_a_step_directory_is_that_step(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["show", str(directory / "step=3")]) == OK
    assert "step=3: complete" in capsys.readouterr().out
    monkeypatch.chdir(directory / "step=3")
    assert main(["verify", "."]) == OK
    assert capsys.readouterr().out.startswith("step 3: good")
    assert main(["ls", str(directory / "step=20"), "--json"]) == OK
    assert [row["step"] for row in json.loads(capsys.readouterr().out)] == [20]
    assert main(["ls", str(directory / "step=4")]) == NOTHING
    with pytest.raises(SystemExit) as caught:
        main(["show", str(directory / "step=3"), "--step", "20"])
    assert caught.value.code == USAGE


def test_what_was_not_verified_is_said(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", str(directory)]) == OK
    assert "verify compares the bytes" in capsys.readouterr().err
    main(["verify", str(directory)])
    assert "not verified: 1 other steps, from 3 to 3; --all" in capsys.readouterr().out
    main(["verify", str(directory), "--all"])
    assert "not verified" not in capsys.readouterr().out


@pytest.mark.parametrize("command", ["ls", "verify", "show"])
def test_nothing_usable_and_no_directory_are_told_apart(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(tmp_path)]) == NOTHING
    assert main([command, str(tmp_path / "none")]) == USAGE
    assert "there is no directory" in capsys.readouterr().err


def test_an_unknown_step_is_nothing_usable(directory: Path) -> None:
    assert main(["show", str(directory), "--step", "4"]) == NOTHING
    assert main(["verify", str(directory), "--step", "4"]) == NOTHING


def test_ls_of_a_damaged_checkpoint_exits_as_damaged(directory: Path) -> None:
    file_in(directory / "step=3", "rank=0.json").unlink()
    assert main(["ls", str(directory)]) == DAMAGED


def test_the_module_runs_as_a_program(directory: Path) -> None:
    argv = [sys.executable, "-m", "resiliency.checkpoint"]
    done = warm.run([*argv, "verify", str(directory)], timeout=240)
    assert (done.returncode, done.stdout[:13]) == (0, "step 20: good")
    assert warm.run(argv, timeout=240).returncode == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "unbuffered",
    [
        pytest.param("", id="buffered"),
        pytest.param("1", id="unbuffered", marks=pytest.mark.thorough("the buffered one is near")),
    ],
)
def test_a_reader_that_goes_away_early_gets_no_traceback_and_the_same_exit_code(
    directory: Path, unbuffered: str
) -> None:
    damage(directory)
    reading, writing = os.pipe()
    os.close(reading)  # as `head` does, only sooner
    try:
        done = subprocess.run(
            [sys.executable, "-m", "resiliency.checkpoint", "verify", str(directory)],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            timeout=240,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": unbuffered},
        )
    finally:
        os.close(writing)
    assert done.returncode == DAMAGED
    assert "Traceback" not in done.stderr
    assert "Broken pipe" not in done.stderr  # how the interpreter complains at its end


@pytest.mark.parametrize(("large_bytes", "shown"), [(1, True), (1 << 30, False)])
def test_a_long_verify_shows_a_bar_on_a_terminal(
    directory: Path, monkeypatch: pytest.MonkeyPatch, large_bytes: int, shown: bool
) -> None:
    monkeypatch.setattr(progress, "LARGE_BYTES", large_bytes)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))  # a new one is 0 wide
    with open(ours, "rb", buffering=0) as screen, open(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        assert main(["verify", str(directory)]) == OK
        terminal.write("end")
        terminal.flush()
        seen = b""
        while not seen.endswith(b"end"):
            seen += screen.read(4096)
    assert (b"step 20: 100%" in seen) is shown


def test_nothing_is_drawn_where_nobody_looks(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LARGE_BYTES", 1)
    assert main(["verify", str(directory)]) == OK
    assert capsys.readouterr().err == ""


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises, also where the tests were started in the background of a shell, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class InterruptedStorage(LocalStorage):
    def list(self, name: str) -> list[str]:
        signal.raise_signal(signal.SIGINT)
        return super().list(name)


class ForbiddenStorage(LocalStorage):
    def list(self, name: str) -> list[str]:
        raise PermissionError(13, "Permission denied", self.describe(name))


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    ("storage", "code", "text"),
    [(InterruptedStorage, INTERRUPTED, ""), (ForbiddenStorage, USAGE, "cannot read {}: Permission denied\n")],
)
def test_ctrl_c_and_a_directory_that_cannot_be_read_end_without_a_traceback(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    storage: type[LocalStorage],
    code: int,
    text: str,
) -> None:
    monkeypatch.setattr(cli, "LocalStorage", storage)
    assert main(["ls", str(directory)]) == code
    assert capsys.readouterr().err == text.format(directory)


def test_the_console_script_is_the_same_command_under_its_own_name(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["resiliency-ckpt", "ls", str(directory)])
    assert commands.checkpoint() == OK
    assert capsys.readouterr().out.startswith("STEP")
    monkeypatch.setattr(sys, "argv", ["resiliency-ckpt"])
    with pytest.raises(SystemExit) as caught:
        commands.checkpoint()
    assert caught.value.code == USAGE
    assert "usage: resiliency-ckpt" in capsys.readouterr().err


def test_the_console_script_without_torch_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from resiliency.commands import checkpoint; sys.exit(checkpoint())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == USAGE
    assert (
        done.stderr == "resiliency-ckpt needs torch.  Install it with: pip install 'resiliency[checkpoint]'\n"
    )
