# SPDX-License-Identifier: Apache-2.0
"""The agent and its trainers as real processes, killed for real."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
import torch

from resiliency.checkpoint.agent.protocol import (
    Attach,
    Attached,
    Channel,
    Copies,
    Detach,
    Done,
    Heartbeat,
    Message,
    SaveRequest,
    Settings,
    connect,
    decode,
    encode,
    listen,
)
from resiliency.checkpoint.agent.server import Agent
from resiliency.checkpoint.capture.arena import RankArena
from resiliency.checkpoint.capture.capturer import Capturer
from resiliency.checkpoint.capture.job_memory import DEFAULT_ROOT, job_directory
from resiliency.checkpoint.format.catalog import Condition, list_checkpoints
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.errors import ConfigError, PeerError
from resiliency.testing.processes import Command
from tests.checkpoint.hanging_storage import Hang
from tests.checkpoint.storage_builders import file_in, no_descriptor_left
from tests.waiting import wait_until, wait_until_equal

EXAMPLES = Path(__file__).parents[3] / "examples"
#: Longest wait for what takes a few seconds on an idle machine.
SOON_S = 180.0


@pytest.fixture
def job(tmp_path: Path) -> Iterator[str]:
    name = f"agent-test-{os.getpid()}-{tmp_path.name}"
    yield name
    assert list(DEFAULT_ROOT.glob(f"resiliency-{name[:40]}*")) == []


def train(job: str, directory: Path, *arguments: object) -> Command:
    argv = [sys.executable, "-m", "tests.checkpoint.training_until_killed", directory, *map(str, arguments)]
    environment = {"JOB_IDENTIFIER": job, "OMP_NUM_THREADS": "1", "TMPDIR": str(directory.parent)}
    return Command(argv, env=environment)


def said(line: re.Match[str]) -> list[str]:
    return line.string.split()


def complete(directory: Path) -> list[int]:
    found = list_checkpoints(LocalStorage(directory))
    return [checkpoint.step for checkpoint in found if checkpoint.condition is Condition.COMPLETE]


def ended(pid: int, timeout_s: float) -> bool:
    """Wait for a process that may be no child of ours."""
    try:
        psutil.Process(pid).wait(timeout_s)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return False
    return True


@pytest.mark.slow
def test_a_killed_trainer_goes_on_from_memory_with_the_same_agent_and_bits(tmp_path: Path, job: str) -> None:
    with train(job + "-b", tmp_path / "b", 20, 5) as whole:
        expected = said(whole.wait_for_line("^digest", timeout=SOON_S))
        assert whole.wait(timeout=SOON_S) == 0
    with train(job, tmp_path / "a", 20, 5, "park=10") as first:
        agent = said(first.wait_for_line("^agent [1-9]", timeout=SOON_S))
        first.wait_for_line("^parked 10", timeout=SOON_S)
        first.signal(signal.SIGKILL)
        with train(job, tmp_path / "a", 20, 5) as second:
            assert said(second.wait_for_line("^agent [1-9]", timeout=SOON_S)) == agent
            assert second.wait_for_line("^restored", timeout=SOON_S).string.split() == [
                "restored",
                "10",
                "memory",
            ]
            assert said(second.wait_for_line("^digest", timeout=SOON_S)) == expected
            assert second.wait(timeout=SOON_S) == 0
        assert ended(int(agent[1]), SOON_S)
    assert complete(tmp_path / "a") == [10, 15, 20]


@pytest.mark.slow
def test_what_a_dead_trainer_had_captured_is_committed_and_then_nothing_is_left(
    tmp_path: Path, job: str
) -> None:
    # 8 MB at 2 MB/s: the trainer is long dead when its last save is written.
    with train(job, tmp_path, 10, 5, "park=5", "rate=2000000", "size=700000", "grace=1") as trainer:
        agent = said(trainer.wait_for_line("^agent [1-9]", timeout=SOON_S))
        assert trainer.wait_for_line("^parked", timeout=SOON_S).string.split() == ["parked", "5", "captured"]
        assert complete(tmp_path) == []
        trainer.signal(signal.SIGKILL)
        assert ended(int(agent[1]), SOON_S)
    assert complete(tmp_path) == [5]


@pytest.mark.thorough("another end of a trainer is near")
@pytest.mark.slow
def test_who_reads_a_dead_trainer_sees_its_end_while_the_agent_goes_on_and_no_word_of_that_is_lost(
    tmp_path: Path, job: str
) -> None:
    directory = tmp_path / "ckpt"
    # 8 MB at 2 MB/s: what the trainer had captured is committed after its death.
    slowly = ("rate=2000000", "size=700000")
    with train(job, directory, 10, 5, "park=5", *slowly) as first:
        agent = said(first.wait_for_line("^agent [1-9]", timeout=SOON_S))
        first.wait_for_line("parked 5 captured", timeout=SOON_S)
        first.signal(signal.SIGKILL)
        with pytest.raises(EOFError):  # the other end of its pipe is closed, which it shared with the agent
            first.wait_for_line("the end", timeout=SOON_S)
        assert psutil.pid_exists(int(agent[1]))
        log = Path(first.lines[-1].split()[-1])
        assert log.parent == tmp_path
        # A rank that is forked is there again before 8 MB are written, and would hear of step 5 itself.
        wait_until(
            lambda: "step 5 committed in the persistent tier" in log.read_text(), "step 5 not committed"
        )
        with train(job, directory, 10, 5, *slowly) as second:
            assert said(second.wait_for_line("^agent [1-9]", timeout=SOON_S)) == agent
            assert second.wait_for_line("^restored", timeout=SOON_S).string.split() == [
                "restored",
                "5",
                "memory",
            ]
            second.wait_for_line("step 10 committed in the persistent tier", timeout=SOON_S)
            assert second.wait(timeout=SOON_S) == 0
    assert "step 10 committed" not in log.read_text()


@pytest.mark.thorough("another end of a trainer is near")
@pytest.mark.slow
def test_after_an_exception_the_capture_is_committed_and_its_memory_given_back(
    tmp_path: Path, job: str
) -> None:
    with train(job, tmp_path, 10, 5, "fail=10", "rate=100000000", "grace=1") as trainer:
        agent = said(trainer.wait_for_line("^agent [1-9]", timeout=SOON_S))
        assert trainer.wait(timeout=SOON_S) == 1
        assert ended(int(agent[1]), SOON_S)
    assert complete(tmp_path)[-1] == 10


@pytest.mark.thorough("another end of a trainer is near")
@pytest.mark.slow
def test_when_agent_and_trainer_are_killed_the_next_start_finds_the_capture_in_memory_and_saves_it(
    tmp_path: Path, job: str
) -> None:
    with train(job, tmp_path, 10, 5, "park=5", "rate=1000", "size=700000") as first:
        agent = int(said(first.wait_for_line("^agent [1-9]", timeout=SOON_S))[1])
        first.wait_for_line("^parked", timeout=SOON_S)
        first.signal(signal.SIGKILL)
        os.kill(agent, signal.SIGKILL)
        assert ended(agent, SOON_S)
    assert complete(tmp_path) == []
    with train(job, tmp_path, 5, 5, "size=700000") as second:  # it has nothing left to do
        assert second.wait_for_line("^restored", timeout=SOON_S).string.split() == ["restored", "5", "memory"]
        assert second.wait(timeout=SOON_S) == 0
    assert complete(tmp_path) == [5]


@pytest.mark.slow
def test_sigterm_to_the_agent_commits_what_is_captured_without_the_bandwidth_cap(
    tmp_path: Path, job: str
) -> None:
    with train(job, tmp_path, 10, 5, "park=5", "rate=20000", "size=700000", "grace=1") as trainer:
        agent = int(said(trainer.wait_for_line("^agent [1-9]", timeout=SOON_S))[1])
        trainer.wait_for_line("^parked", timeout=SOON_S)
        trainer.signal(signal.SIGKILL)
        # A trainer that is still dying holds the job's lock, and the agent leaves its captures alone.
        trainer.wait(timeout=SOON_S)
        os.kill(agent, signal.SIGTERM)
        assert ended(agent, SOON_S)
    assert complete(tmp_path) == [5]


@pytest.mark.thorough("test_client.py starts agents")
@pytest.mark.slow
def test_the_agent_is_one_per_arena_sees_no_gpu_and_yields_to_training(tmp_path: Path, job: str) -> None:
    with train(job, tmp_path, 10, 5, "park=5", "grace=1") as trainer:
        agent = psutil.Process(int(said(trainer.wait_for_line("^agent [1-9]", timeout=SOON_S))[1]))
        trainer.wait_for_line("^parked", timeout=SOON_S)
        assert agent.environ()["CUDA_VISIBLE_DEVICES"] == ""
        assert agent.nice() == min(psutil.Process(trainer.pid).nice() + 10, 19)
        assert agent.ionice().value == 7
        with Command(agent.cmdline()) as second:
            second.wait_for_line("has an agent already", timeout=SOON_S)
            assert second.wait(timeout=SOON_S) == 2
        trainer.signal(signal.SIGKILL)
        assert ended(agent.pid, SOON_S)


def test_an_agent_without_descriptors_lives_on_and_takes_ranks_when_it_has_some(job: str) -> None:
    arena = job_directory(job)
    argv = [sys.executable, "-m", "resiliency.checkpoint.agent.main", "--arena", arena, "--grace-s", "60"]
    with Command(argv) as agent:
        first = attached(connected(arena))
        with no_descriptor_left(agent.pid):
            second = connect(arena)
            assert second is not None  # the kernel took it, the agent cannot
            agent.wait_for_line("a rank could not be attached", timeout=SOON_S)
        attached(second).send(Detach())
        assert agent.wait(timeout=SOON_S) == 0
        first.close()
        second.close()


def test_a_goodbye_is_heard_of_a_rank_that_left_words_of_the_agent_unread(job: str) -> None:
    arena = job_directory(job)
    argv = [sys.executable, "-m", "resiliency.checkpoint.agent.main", "--arena", arena, "--grace-s", "600"]
    with Command(argv) as agent:
        channel = attached(connected(arena))
        ready, _, _ = select.select([channel], [], [], SOON_S)
        assert ready  # a beat
        channel.send(Detach())
        channel.close()
        assert agent.wait(timeout=SOON_S) == 0
    assert "without detach" not in agent.output


def test_a_goodbye_that_a_rank_left_behind_is_heard_when_a_report_does_not_reach_it(job: str) -> None:
    """As when a save ends between a rank's goodbye and the agent's next look at what ranks say."""
    grace = timedelta(seconds=20)
    arena = job_directory(job)
    agent = Agent(arena, listen(arena), grace=grace)
    try:
        rank = connect(arena)
        assert rank is not None
        rank.send(ALONE)
        agent._accept()
        (served,) = agent._members
        assert agent._listen_to(served)
        rank.send(Detach())
        rank.close()
        agent._tell(ALONE.attempt_id, DONE)
        began = time.monotonic()
        agent.run()
        assert time.monotonic() - began < grace.total_seconds() / 2, "it waits for a rank that has left"
    finally:
        agent.close()


def test_what_was_said_before_a_connection_was_reset_is_read_and_then_its_end(tmp_path: Path) -> None:
    listener = listen(tmp_path)
    channel = connect(tmp_path)
    assert channel is not None
    served = Channel(listener.accept()[0])
    listener.close()
    served.send(Heartbeat())
    channel.send(SAVE)
    channel.send(Detach())
    channel.close()  # the beat unread
    assert [served.receive(timedelta(seconds=5)) for _ in range(2)] == [SAVE, Detach()]
    with pytest.raises(PeerError, match="is gone"):
        served.receive(timedelta(seconds=5))
    served.close()


def connected(arena: Path) -> Channel:
    """Nobody can be told of another process's socket: look."""
    return wait_until(lambda: connect(arena), "there is no agent")


def attached(channel: Channel, settings: Settings | None = None) -> Channel:
    """As the only rank of a job."""
    channel.send(replace(ALONE, settings=settings or ALONE.settings))
    hear(channel, Attached)
    return channel


_Heard = TypeVar("_Heard", Attached, Copies, Done)


def hear(channel: Channel, kind: type[_Heard]) -> _Heard:
    """The next thing that an agent says, but that it lives."""
    deadline = time.monotonic() + 60
    while isinstance(said := channel.receive(timedelta(seconds=60)), Heartbeat):
        assert time.monotonic() < deadline
    assert isinstance(said, kind), said
    return said


def captured(arena: Path) -> tuple[RankArena, Capturer, str]:
    """Step 1 of the only rank of session "s", in shared memory; and the name of its slot."""
    slots = RankArena(arena, rank=0, world_size=1, slots=2, run_id="s")
    capturer = Capturer(slots)
    capture = capturer.begin({"weights": torch.ones(1000)}, 1)
    assert capture is not None
    capturer.fence()
    assert capture.wait(timedelta(seconds=60))
    return slots, capturer, capture.slot_path.name


def test_what_a_rank_left_is_committed_once_the_agent_has_descriptors_for_it(
    tmp_path: Path, job: str
) -> None:
    arena = job_directory(job)
    settings = replace(ATTACH.settings, directory=str(tmp_path), local_directory="")
    argv = [sys.executable, "-m", "resiliency.checkpoint.agent.main", "--arena", arena, "--grace-s", "60"]
    slots, capturer, _ = captured(arena)
    with Command(argv) as agent:
        rank = attached(connected(arena), settings)
        with no_descriptor_left(agent.pid):
            rank.close()  # without detach
            agent.wait_for_line("what ranks left in memory cannot be read for now", timeout=SOON_S)
        wait_until_equal(lambda: complete(tmp_path), [1])
        agent.signal(signal.SIGTERM)
        assert agent.wait(timeout=SOON_S) == 0
    capturer.close()
    slots.close(remove=True)


def test_an_agent_that_is_told_to_end_does_not_wait_for_a_host_that_is_gone(tmp_path: Path, job: str) -> None:
    arena = job_directory(job)
    settings = replace(ATTACH.settings, directory=str(tmp_path), local_directory="", save_timeout_s=60.0)
    argv = [sys.executable, "-m", "resiliency.checkpoint.agent.main", "--arena", arena, "--grace-s", "1"]
    slots, capturer, slot = captured(arena)
    with Command(argv) as agent:
        rank = connected(arena)
        rank.send(replace(ALONE, world_size=2, settings=settings))
        hear(rank, Attached)
        rank.send(SaveRequest(step=1, slot=slot, tiers=("persistent",)))
        wait_until((tmp_path / "step=1-unfinished").exists, "the save has not begun")
        began = time.monotonic()
        agent.signal(signal.SIGTERM)
        assert "ranks 1 did not answer" in hear(rank, Done).error
        rank.close()
        assert agent.wait(timeout=SOON_S) == 0
        assert time.monotonic() - began < 40
    capturer.close()
    slots.close(remove=True)


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["hangs", "fails"])
def test_what_a_rank_left_goes_to_the_other_tier_once_the_first_is_found_not_to_take_it(
    tmp_path: Path, job: str, trouble: str
) -> None:
    arena = job_directory(job)
    local, persistent = tmp_path / "local", tmp_path / "persistent"
    if trouble == "hangs":
        local.mkdir()
        hang = Hang(local, 7)  # the tidying at the start does not return, and the rescue waits behind it
    else:
        local.write_text("in the way")
    settings = replace(
        ATTACH.settings, directory=str(persistent), local_directory=str(local), save_timeout_s=5.0
    )
    argv = [sys.executable, "-m", "resiliency.checkpoint.agent.main", "--arena", arena, "--grace-s", "60"]
    slots, capturer, _ = captured(arena)
    with Command(argv, env={"TMPDIR": str(tmp_path)}) as agent:
        rank = attached(connected(arena), settings)
        rank.close()  # without detach
        wait_until(lambda: complete(persistent) == [1], "nothing is committed")
        if trouble == "hangs":
            hang.end()  # else its agent would wait for it before it leaves
        agent.signal(signal.SIGTERM)
        assert agent.wait(timeout=SOON_S) == 0
    (log,) = tmp_path.glob("*-agent.log")  # it has no rank whose output it could share
    assert re.search("step 1, .* goes to the persistent tier: the local tier failed, or", log.read_text())
    capturer.close()
    slots.close(remove=True)


def test_a_step_that_a_dead_agent_had_committed_is_complete_for_those_who_ask_its_successor(
    tmp_path: Path, job: str
) -> None:
    arena = job_directory(job)
    settings = replace(ATTACH.settings, directory="", local_directory=str(tmp_path))
    argv = [sys.executable, "-m", "resiliency.checkpoint.agent.main", "--arena", arena, "--grace-s", "60"]
    slots, capturer, slot = captured(arena)
    save = SaveRequest(step=1, slot=slot, tiers=("local",))
    with Command(argv) as first:
        channel = attached(connected(arena), settings)
        channel.send(save)
        assert hear(channel, Done).error == ""
        first.signal(signal.SIGKILL)  # what it said is not known to others
        first.wait(timeout=SOON_S)
        channel.close()
    with Command(argv) as second:
        channel = attached(connected(arena), settings)
        channel.send(replace(save, again=True))
        assert hear(channel, Done).error == ""
        assert hear(channel, Copies).complete
        again = attached(connected(arena), settings)  # after a break, say
        assert hear(again, Copies).complete
        capturer.close()
        slots.close(remove=True)
        again.send(Detach())
        assert second.wait(timeout=SOON_S) == 0
        channel.close()
        again.close()


@pytest.mark.thorough("another end of a trainer is near")
@pytest.mark.slow
def test_a_second_trainer_of_a_living_job_is_refused_by_name(tmp_path: Path, job: str) -> None:
    with train(job, tmp_path, 10, 5, "park=5", "grace=1") as first:
        agent = int(said(first.wait_for_line("^agent [1-9]", timeout=SOON_S))[1])
        first.wait_for_line("^parked", timeout=SOON_S)
        with train(job, tmp_path, 10, 5) as second:
            second.wait_for_line("owned by a living process", timeout=SOON_S)
            assert second.wait(timeout=SOON_S) != 0
        first.signal(signal.SIGKILL)
        assert ended(agent, SOON_S)


# --- several hosts ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("agents_at_once")
@pytest.mark.parametrize("victim", [0, 1], ids=["leader", "follower"])
def test_agents_of_two_hosts_commit_together_and_one_that_dies_fails_the_save_on_both(
    tmp_path: Path, victim: int
) -> None:
    told = {0: "could not write its part", 1: "given up by its leader|ENOENT"}
    for attempt in (1, 2):
        argv = [sys.executable, "-m", "tests.checkpoint.two_hosts"]
        env = {"OMP_NUM_THREADS": "1"}
        (tmp_path / "store").unlink(missing_ok=True)
        with (
            Command([*argv, "0", str(tmp_path), str(victim)], env=env) as first,
            Command([*argv, "1", str(tmp_path), str(victim)], env=env) as second,
        ):
            for rank, command in enumerate((first, second)):
                assert command.wait(timeout=300) == 0
                lines = [line for line in command.lines if line.startswith(("restored", "saved"))]
                if attempt == 2:
                    assert lines == [f"restored 3 persistent 3.0 {rank}"]
                    continue
                assert lines[0] == f"restored 0 none 0.0 {rank}"
                assert lines[1].split() == ["saved", "1", "committed"]
                assert lines[2].startswith("saved 2 failed")
                assert re.search("was lost" if rank == victim else told[rank], lines[2])
                assert lines[3].split() == ["saved", "3", "committed"]
        assert complete(tmp_path / "ckpt") == [1, 3]
        # An agent that the trainer did not start itself gives its memory back a moment later.
        wait_until_equal(lambda: list((tmp_path / "memory").iterdir()), [])
    parts = [file_in(tmp_path / "ckpt" / "step=3", f"__{rank}_0.distcp").stat().st_size for rank in (0, 1)]
    assert abs(parts[0] - parts[1]) < 1 << 20  # each tensor was written by one rank


# --- examples ------------------------------------------------------------------------------------


#: Steps take milliseconds: so many that a rank is killed long before the last one.
STEPS = 200
LAUNCHER = (str(EXAMPLES.parent / "launcher.py"),)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone")


def launched(by: tuple[str, ...], example: str, job: str, directory: Path, *, gpus: int = 0) -> Command:
    """Two ranks on the CPU, or one on each of so many GPUs."""
    ranks = str(gpus or 2)
    argv = [sys.executable, *by, "--nproc-per-node", ranks, "--max-restarts", "1", str(EXAMPLES / example)]
    argv += ["--ckpt-dir", str(directory), "--steps", str(STEPS), "--every", "10"]
    env = {"JOB_IDENTIFIER": job, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return Command(argv, env=env | ({} if gpus else {"CUDA_VISIBLE_DEVICES": ""}), cwd=directory.parent)


#: What comes after it in the line may be another process's: they share a pipe.
WEIGHTS = r"rank 0 weights ([0-9a-f]{64})"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "by"),
    [
        ("ddp_train.py", TORCHRUN),
        pytest.param("fsdp2_train.py", LAUNCHER, marks=pytest.mark.thorough("the example with DDP is near")),
    ],
)
def test_an_example_whose_rank_is_killed_ends_with_the_same_bits(
    tmp_path: Path, job: str, example: str, by: tuple[str, ...]
) -> None:
    check_a_kill(tmp_path, job, example, by, victim=1)


@pytest.mark.gpu
@pytest.mark.parametrize("example", ["ddp_train.py", "fsdp2_train.py"])
@pytest.mark.parametrize("by", [TORCHRUN, LAUNCHER], ids=["torchrun", "launcher"])
def test_an_example_on_a_gpu_whose_rank_is_killed_ends_with_the_same_bits(
    tmp_path: Path, job: str, example: str, by: tuple[str, ...]
) -> None:
    check_a_kill(tmp_path, job, example, by, victim=0, gpus=1)


def check_a_kill(
    tmp_path: Path, job: str, example: str, by: tuple[str, ...], *, victim: int, gpus: int = 0
) -> None:
    with launched(LAUNCHER, example, job + "-b", tmp_path / "b", gpus=gpus) as whole:
        expected = whole.wait_for_line(WEIGHTS, timeout=120)[1]
        assert whole.wait(timeout=SOON_S) == 0
    with launched(by, example, job, tmp_path / "a", gpus=gpus) as killed:
        killed.wait_for_line(f"rank {victim} step 25 ", timeout=120)
        os.kill(rank_pid(killed, victim), signal.SIGKILL)
        start = killed.wait_for_line(r"rank 0 starts after step [1-9].*", timeout=120)
        assert re.search(r"step ([2-9]|1\d)0 from (memory|disk)", start.string)
        assert killed.wait_for_line(WEIGHTS, timeout=120)[1] == expected
        assert killed.wait(timeout=SOON_S) == 0
    assert complete(tmp_path / "a")[-1] == STEPS


def rank_pid(command: Command, rank: int) -> int:
    for process in psutil.Process(command.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended since it was listed
            if process.environ().get("RANK") == str(rank) and "checkpoint.agent.main" not in " ".join(
                process.cmdline()
            ):
                return process.pid
    raise AssertionError(f"no rank {rank}")


# --- the wire ------------------------------------------------------------------------------------

SETTINGS = Settings(directory="/ckpt", keep=3, replicated=False, bytes_per_s=0, save_timeout_s=600.0)
ATTACH = Attach(
    rank=1, world_size=2, local_ranks=(0, 1), run_id="r", attempt_id="s", host="h", settings=SETTINGS
)
ALONE = replace(ATTACH, rank=0, world_size=1, local_ranks=(0,))
DONE = Done(step=3, attempt_id="s", tier="local", error="", size_bytes=1, queued_s=0.5, commit_s=1.0)
SAVE = SaveRequest(step=3, slot="slot-0", tiers=("local", "persistent"), patient=True)
COPIES = Copies(step=3, attempt_id="s", hosts=("a", "b"), complete=True)


@pytest.mark.parametrize("message", [ATTACH, DONE, SAVE, COPIES, Attached(peer_port=7), Detach()])
def test_a_message_comes_back_as_it_was_sent(message: Message) -> None:
    assert decode(encode(message)) == message


def changed(**fields: object) -> bytes:
    return json.dumps({**json.loads(encode(ATTACH)), **fields}).encode()


@pytest.mark.parametrize(
    ("packet", "text"),
    [
        (b"GET / HTTP/1.1", "not a message"),
        (b"[1]", "not a message"),
        (b'{"kind":"dance"}', "not a message"),
        (b'{"kind":"save","step":1}', "must have the fields"),
        (changed(more=1), "must have the fields"),
        (changed(rank="0"), "Attach.rank must be int"),
        (changed(rank=True), "Attach.rank must be int"),
        (changed(local_ranks=[0, "1"]), r"Attach.local_ranks must be tuple"),
        (encode(SAVE).replace(b'"local"', b"1"), r"SaveRequest.tiers must be tuple\[str"),
        (changed(settings=None), "Settings must have the fields"),
    ],
)
def test_what_is_no_message_is_refused_with_what_was_expected(packet: bytes, text: str) -> None:
    with pytest.raises(PeerError, match=text):
        decode(packet)


def test_an_arena_has_one_agent_and_its_peers_notice_its_end(tmp_path: Path) -> None:
    assert connect(tmp_path) is None
    listener = listen(tmp_path)
    with pytest.raises(ConfigError, match="has an agent already"):
        listen(tmp_path)
    channel = connect(tmp_path)
    assert channel is not None
    served = Channel(listener.accept()[0])
    listener.close()
    assert (served.pid, channel.pid) == (os.getpid(), os.getpid())
    assert served.receive(timedelta(0)) is None
    channel.send(Detach())
    assert served.receive(timedelta(seconds=5)) == Detach()
    served.close()
    with pytest.raises(PeerError, match="is gone"):
        channel.receive(timedelta(seconds=5))
    channel.close()
    assert connect(tmp_path) is None


def test_without_a_free_descriptor_there_is_no_connection_for_now(tmp_path: Path) -> None:
    listener = listen(tmp_path)
    with no_descriptor_left():
        assert connect(tmp_path) is None
    channel = connect(tmp_path)
    assert channel is not None
    channel.close()
    listener.close()


def test_the_end_of_a_peer_is_noticed_although_a_forked_child_of_it_lives(tmp_path: Path) -> None:
    listener = listen(tmp_path)
    channel = connect(tmp_path)
    assert channel is not None
    served = Channel(listener.accept()[0])
    hold, release = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(release)
        os.read(hold, 1)  # until the test lets go
        os._exit(0)
    channel.close()
    with pytest.raises(PeerError, match="is gone"):
        served.receive(timedelta(seconds=5))
    os.close(release)
    os.close(hold)
    assert os.waitpid(child, 0)[1] == 0
    served.close()
    listener.close()
