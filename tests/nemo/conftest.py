# SPDX-License-Identifier: Apache-2.0
"""Real training: the real launcher, the real benchmark, NeMo and Megatron on gloo ranks.

Launcher and ranks are forked from an interpreter that holds NeMo: a start costs two seconds instead of the
ten to twenty of its imports.  Two runs start cold, as users do.  One uninterrupted run per layout is shared
by all tests that compare with it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from resiliency.events import EventType, RunEvent
from resiliency.testing import warm
from resiliency.testing.processes import Command
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
#: Longest wait for one attempt (start, train, save) on a busy two-core machine, in seconds.
ATTEMPT_S = 600.0

#: Unique, because the name is also the prefix of the temporary log directory that must be gone.
JOB_NAME = f"options-{os.getpid()}"
TRAIN_TOKENIZER = """
import sys, sentencepiece
sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(["a rank was lost and found again", "every step is kept or paid for"] * 20),
    model_prefix=sys.argv[1], vocab_size=40, model_type="bpe", hard_vocab_limit=False, minloglevel=2)
"""

Losses = dict[int, float]


@dataclass(frozen=True)
class Layout:
    """How many ranks, and the flags that place the model on them."""

    name: str
    ranks: int
    flags: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name


ONE_RANK = Layout("one rank", 1)
TWO_REPLICAS = Layout("two replicas", 2)
TENSOR_PARALLEL = Layout("tensor parallel 2", 2, ("--tensor-parallel", "2"))
#: Steps of every run; one run per layout is shared, so all have the same length.
STEPS = 60


PROCESS = "--enable-optimized-async-ckpt"
ONE_RESTART = ("--max-restarts", "1")


@pytest.fixture(scope="package", autouse=True)
def _forked(nemo_is_warm: None) -> None:
    """All that these tests start."""


class Job:
    """One training job in a directory of its own; it can be started several times."""

    def __init__(self, directory: Path, layout: Layout, stack: ExitStack) -> None:
        self.directory = directory
        self.layout = layout
        self._stack = stack

    @property
    def checkpoints(self) -> Path:
        return self.directory / "storage" / "job" / "checkpoint"

    def start(
        self, *workload: object, launcher: tuple[object, ...] = (), save_every: int = 0, cold: bool = False
    ) -> Command:
        """Start launcher and benchmark; the command is ended with the test.

        Args:
            cold: launcher and first ranks import for themselves.
        """
        saving = [
            "--persistent-ckpt-dir",
            self.directory / "storage",
            "--persistent-ckpt-interval",
            save_every,
        ]
        argv = [
            sys.executable,
            ROOT / "launcher.py",
            "--nproc-per-node",
            self.layout.ranks,
            "--run-dir",
            self.directory,
            *launcher,
            ROOT / "benchmark" / "benchmark.py",
            "--device",
            "cpu",
            "--model",
            "tiny",
            "--max-steps",
            STEPS,
            "--log-dir",
            self.directory / "logs",
            *self.layout.flags,
            *(saving if save_every else []),
            *workload,
        ]
        env = {"JOB_IDENTIFIER": "job", "GOODPUT_USE_FILE_TRACKING": "1"}
        env["RESILIENCY_CACHE_DIR"] = str(self.directory / "cache")  # a cold launcher knows no imports
        command = Command(list(map(str, argv)), env=env, cwd=self.directory, cold=cold)
        return self._stack.enter_context(command)

    def run(
        self, *workload: object, launcher: tuple[object, ...] = (), save_every: int = 0, attempts: int = 1
    ) -> str:
        """Start, wait for success, check that nothing of it is left, and return the output."""
        return self.finish(self.start(*workload, launcher=launcher, save_every=save_every), attempts)

    def finish(self, command: Command, attempts: int = 1, *, forked: bool = True) -> str:
        """What `run` does after the start.

        Args:
            forked: the last ranks did not import NeMo: an upgrade that makes them must not pass unseen.
        """
        assert command.wait(timeout=ATTEMPT_S * attempts) == 0, command.output
        command.assert_no_orphans(timeout=120)
        if forked and os.environ.get("PET_STANDBY") != "off":
            assert self.events(EventType.WORKERS_STARTED)[-1].fields["forked"] == self.layout.ranks, (
                command.output
            )
        return command.output

    def events(self, kind: EventType | None = None) -> list[RunEvent]:
        lines = (self.directory / "job-events.jsonl").read_text().splitlines()
        return [event for event in map(RunEvent.from_json, lines) if kind in (None, event.type)]

    def losses(self, *, attempt: int | None = None) -> Losses:
        """Loss of every step on rank 0, exact to the bit; of the last attempt that ran a step."""
        found: Losses = {}
        for event in self.events(EventType.STEP_FINISHED):
            if event.rank == 0 and attempt in (None, event.attempt) and event.step is not None:
                loss = event.fields["loss"]
                assert isinstance(loss, float)
                found[event.step] = loss
        return found

    def wait_for_step(self, step: int) -> None:
        """Until rank 0 has finished `step` steps."""
        file = self.directory / "job-events.jsonl"
        wait_until(
            lambda: file.exists() and max(self.losses(), default=0) >= step,
            f"step {step} is not reached",
            timeout=ATTEMPT_S,
            every=0.1,
        )

    def restored_steps(self) -> list[int | None]:
        """What rank 0 started from, one entry per start; 0 is from scratch."""
        return [e.step for e in self.events(EventType.CHECKPOINT_LOADED) if e.rank == 0]


@pytest.fixture
def new_job(tmp_path: Path) -> Iterator[Callable[[Layout], Job]]:
    """``new_job(layout)``: a job in the test's own directory."""
    with ExitStack() as stack:
        yield lambda layout: Job(tmp_path, layout, stack)


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Layout], Losses]:
    """``uninterrupted(layout)``: the losses of a run that was never disturbed and never saved."""
    known: dict[Layout, Losses] = {}

    def losses(layout: Layout) -> Losses:
        if layout not in known:
            with ExitStack() as stack:
                job = Job(tmp_path_factory.mktemp("uninterrupted"), layout, stack)
                # One of the two trainings that start cold, and forked ones are to compute the same.
                cold = layout is TENSOR_PARALLEL
                job.finish(job.start(cold=cold), forked=not cold)
                known[layout] = job.losses()
        return known[layout]

    return losses


def run_python(*argv: object, timeout: float = 600) -> str:
    """Standard output of a program that must succeed."""
    done = warm.run([sys.executable, *map(str, argv)], timeout=timeout, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="package")
def killed_between_saves(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Two replicas with the checkpoint process; the last was killed at step 50, restarted, and finished.

    The other training that starts cold: its launcher prepares the ranks of the second attempt by itself, and
    up to step 40 its losses are those of ranks that were not forked.
    """
    with ExitStack() as stack:
        job = Job(tmp_path_factory.mktemp("process"), TWO_REPLICAS, stack)
        command = job.start(
            *(PROCESS, "--enable-dist-ckpt", "--sim-fault-desc", "rank_hung,step=50"),
            launcher=(*ONE_RESTART, "--standby", "auto"),
            save_every=20,
            cold=True,
        )
        (rank,) = wait_until(lambda: stopped(command), "no rank is at step 50", timeout=ATTEMPT_S, every=0.5)
        # Until then it stands still.  A restart waits for a template that has the larger part of the imports.
        wait_until(
            lambda: holds_nemo(job), "the template has not imported NeMo", timeout=ATTEMPT_S, every=0.5
        )
        rank.kill()
        return Finished(job, job.finish(command, 2))


def stopped(command: Command) -> list[psutil.Process]:
    found = []
    for process in command.descendants():
        with suppress(psutil.NoSuchProcess):
            if process.status() == psutil.STATUS_STOPPED:
                found.append(process)
    return found


def holds_nemo(job: Job) -> bool:
    """Whether the template has imported it: it keeps what it holds for the next job."""
    kept = (job.directory / "cache" / "imports").glob("benchmark.py-*/????????????????")
    return any("m nemo.collections.llm\t" in path.read_text() for path in kept)


@dataclass(frozen=True)
class Finished:
    """A run that ended, with what it printed."""

    job: Job
    output: str

    @property
    def logs(self) -> Path:
        return self.job.directory / "logs" / JOB_NAME

    @property
    def checkpoints(self) -> Path:
        return self.job.directory / "storage" / JOB_NAME / "checkpoint"


@pytest.fixture(scope="package")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    """Two replicas that trained with every option that most tests leave off."""
    directory = tmp_path_factory.mktemp("options")
    run_python("-c", TRAIN_TOKENIZER, directory / "tokenizer")
    with ExitStack() as stack:
        job = Job(directory, TWO_REPLICAS, stack)
        output = job.run(
            *("--job-name", JOB_NAME, "--tokenizer-path", directory / "tokenizer.model"),
            *("--topk-ckpt", 2, "--enable-dist-ckpt", "--enable-async-ckpt", "--profile-ckpt-interval", 20),
            *("--enable-tensorboard", "--log-to-remote-storage", "--trace-name", "around"),
            *("--enable-gc", "--val-check-interval", 20, "--limit-val-batches", 1, "--max-runtime", 600),
            save_every=20,
        )
        yield Finished(job, output)
