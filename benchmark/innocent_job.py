# SPDX-License-Identifier: Apache-2.0
"""The job of `health_innocents.py`: DDP over gloo that does, once or all the time, what sound programs do.

    innocent_job.py BEHAVIOUR DIRECTORY SECONDS

Each behaviour is a function of this module, and lasts about SECONDS.  Where it needs another side (a service
that answers late, a person at a terminal, the holder of a lock), `innocent_services.py` plays it.
"""

from __future__ import annotations

import asyncio
import atexit
import cProfile
import fcntl
import gc
import multiprocessing
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from resiliency.progress import report_step, watch_rank

#: Steps of a job, and the one in which it does what it does once; so many where each step takes long.
STEPS, AT, SLOW_STEPS = 60, 30, 6


@dataclass
class Job:
    """`seconds`: how long the behaviour lasts.  `batches`: of the loop's loader, where it has one."""

    directory: Path
    seconds: float
    rank: int
    step: int = 0
    batches: Iterator[Any] = field(default_factory=lambda: iter(()))

    @property
    def port(self) -> int:
        return int((self.directory / "port").read_text())

    def get(self, path: str = "late") -> bytes:
        """The answer of the service, which is late."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/{path}", timeout=600) as answer:
            return bytes(answer.read())

    def work(self, seconds: float | None = None) -> None:
        matrix = torch.ones(128, 128)
        until = time.monotonic() + (self.seconds if seconds is None else seconds)
        while time.monotonic() < until:
            matrix = matrix @ matrix / 128


class When(Enum):
    START = "before the first step"
    STEP = "in one step"
    LOOP = "in each step"
    END = "after the last step"


class Behaviour(NamedTuple):
    """`all_ranks`: else rank 0 alone, and the others wait for it in a collective."""

    run: Callable[[Job], Any]
    when: When
    all_ranks: bool


BEHAVIOURS: dict[str, Behaviour] = {}
_Run = Callable[[Job], None]


def behaviour(when: When = When.STEP, *, all_ranks: bool = False) -> Callable[[_Run], _Run]:
    def add(run: _Run) -> _Run:
        BEHAVIOURS[run.__name__] = Behaviour(run, when, all_ranks)
        return run

    return add


# ------------------------------------------------------------------------------- a wait for something outside


@behaviour()
def score_with_judge(job: Job) -> None:
    job.get()


@behaviour(all_ranks=True)
def collect_rollouts_on_all_ranks(job: Job) -> None:
    job.get()


@behaviour()
def answer_in_a_thread(job: Job) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(job.get).result()


@behaviour()
def answer_by_a_queue(job: Job) -> None:
    answers: queue.Queue[bytes] = queue.Queue()
    threading.Thread(target=lambda: answers.put(job.get()), daemon=True).start()
    answers.get()


@behaviour()
def answer_to_asyncio(job: Job) -> None:
    async def ask() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", job.port)
        writer.write(b"GET /late HTTP/1.0\r\n\r\n")
        await reader.read()
        writer.close()

    asyncio.run(ask())


@behaviour()
def answer_polled_with_timeouts(job: Job) -> None:
    with socket.create_connection(("127.0.0.1", job.port)) as link:
        link.sendall(b"GET /late HTTP/1.0\r\n\r\n")
        link.settimeout(1.0)
        while True:
            try:
                if not link.recv(1000):
                    return
            except TimeoutError:
                pass


@behaviour()
def slow_download(job: Job) -> None:
    job.get("drip")


@behaviour()
def upload_to_a_slow_reader(job: Job) -> None:
    with socket.create_connection(("127.0.0.1", job.port)) as link:
        link.sendall(b"POST /slow HTTP/1.0\r\nContent-Length: 30000000\r\n\r\n")
        link.sendall(bytes(30_000_000))
        link.recv(1000)


@behaviour()
def unix_socket_answer(job: Job) -> None:
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(str(job.directory / "unix"))
        link.recv(10)


@behaviour()
def pipe_that_opens_late(job: Job) -> None:
    (job.directory / "fifo").read_bytes()


@behaviour()
def lock_of_another_job(job: Job) -> None:
    with (job.directory / "flock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)


@behaviour()
def record_lock_of_another_job(job: Job) -> None:
    with (job.directory / "record").open("r+") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)


@behaviour()
def lock_file_that_is_polled(job: Job) -> None:
    until = time.monotonic() + job.seconds
    while not (job.directory / "never").exists() and time.monotonic() < until:
        time.sleep(0.5)


@behaviour()
def back_off_before_a_retry(job: Job) -> None:
    time.sleep(job.seconds)


@behaviour(all_ranks=True)
def back_off_on_all_ranks(job: Job) -> None:
    time.sleep(job.seconds)


@behaviour()
def child_process(job: Job) -> None:
    subprocess.run(["sleep", str(job.seconds)], check=True)


@behaviour()
def child_with_output(job: Job) -> None:
    subprocess.run(["sh", "-c", f"sleep {job.seconds}; echo done"], check=True, capture_output=True)


@behaviour()
def busy_child_process(job: Job) -> None:
    code = f"import time; t = time.monotonic()\nwhile time.monotonic() < t + {job.seconds}: pass"
    subprocess.run([sys.executable, "-c", code], check=True)


@behaviour()
def pool_of_processes(job: Job) -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        pool.apply(time.sleep, (job.seconds,))


# ------------------------------------------------------------------------------------------------- a person


@behaviour()
def person_at_a_breakpoint(job: Job) -> None:
    sys.stdin = open(job.directory / "terminal")  # noqa: SIM115 (the prompt reads it)
    breakpoint()


@behaviour()
def person_who_is_asked(job: Job) -> None:
    with (job.directory / "terminal").open() as terminal:
        terminal.readline()


@behaviour()
def debugger_that_is_attached(job: Job) -> None:
    (job.directory / "trace-me").write_text(str(os.getpid()))
    until = time.monotonic() + job.seconds
    while time.monotonic() < until:
        time.sleep(0.01)


@behaviour()
def stopped_and_continued(job: Job) -> None:
    subprocess.Popen(["sh", "-c", f"sleep {min(job.seconds, 6) / 2}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


# ------------------------------------------------------------------------------------------------ long work


@behaviour()
def evaluate(job: Job) -> None:
    job.work()


@behaviour(all_ranks=True)
def evaluate_on_all_ranks(job: Job) -> None:
    job.work()


@behaviour()
def run_benchmark_with_a_loader(job: Job) -> None:
    until = time.monotonic() + job.seconds
    for _ in DataLoader(Batches(0.1), num_workers=1):
        if time.monotonic() > until:
            return


@behaviour()
def save_to_slow_storage(job: Job) -> None:
    torch.save({"x": torch.zeros(1000)}, job.directory / "fifo")


@behaviour()
def many_files_that_are_synced(job: Job) -> None:
    until, number = time.monotonic() + job.seconds, 0
    while time.monotonic() < until:
        number += 1
        with (job.directory / f"part-{number % 50}").open("wb") as file:
            file.write(bytes(100_000))
            os.fsync(file.fileno())


@behaviour()
def collection_of_garbage(job: Job) -> None:
    kept: list[Any] = [[i] for i in range(300_000)]
    until = time.monotonic() + job.seconds
    while time.monotonic() < until:
        gc.collect()
    del kept


@behaviour()
def thread_that_works_while_main_waits(job: Job) -> None:
    thread = threading.Thread(target=job.work)
    thread.start()
    thread.join()


@behaviour()
def profiled_evaluation(job: Job) -> None:
    cProfile.runctx("job.work()", {"job": job}, {})


# ----------------------------------------------------------------------------------------- all the time


@behaviour(When.LOOP, all_ranks=True)
def slow_steps(job: Job) -> None:
    time.sleep(job.seconds / 2)


@behaviour(When.LOOP)
def slow_steps_of_one_rank(job: Job) -> None:
    job.get()


@behaviour(When.LOOP, all_ranks=True)
def steps_that_vary(job: Job) -> None:
    if job.step % 15 == 14:
        time.sleep(job.seconds / 3)


@behaviour(When.LOOP, all_ranks=True)
def accumulation(job: Job) -> None:
    for _ in range(5):
        time.sleep(job.seconds / 30)
        dist.all_reduce(torch.ones(1))


@behaviour(When.LOOP, all_ranks=True)
def steps_that_are_not_reported(job: Job) -> None:
    time.sleep(job.seconds / 60)


@behaviour(When.LOOP, all_ranks=True)
def nice_rank_beside_busy_ones(job: Job) -> None:
    if job.rank == 0 and job.step == AT:
        os.nice(19)
        for _ in range(os.cpu_count() or 1):
            code = f"import time; t = time.monotonic()\nwhile time.monotonic() < t + {job.seconds}: pass"
            subprocess.Popen([sys.executable, "-c", code])
    job.work(0.02)


@behaviour(When.LOOP, all_ranks=True)
def loader_that_waits_for_a_service(job: Job) -> None:
    if job.step == 0:
        job.batches = iter(DataLoader(Served(job), num_workers=1, prefetch_factor=1, batch_size=1))
    next(job.batches)


@behaviour(When.LOOP, all_ranks=True)
def train_and_evaluate(job: Job) -> None:
    if job.step == AT:
        job.work()


# -------------------------------------------------------------------------------------- start and end


@behaviour(When.START)
def rank_that_starts_late(job: Job) -> None:
    time.sleep(job.seconds)


@behaviour(When.START, all_ranks=True)
def long_compilation(job: Job) -> None:
    job.work()


@behaviour(When.START, all_ranks=True)
def storage_that_is_late(job: Job) -> None:
    lock_file_that_is_polled(job)


@behaviour(When.START, all_ranks=True)
def service_that_is_late(job: Job) -> None:
    job.get()


@behaviour(When.END)
def upload_after_training(job: Job) -> None:
    atexit.register(job.get)


@behaviour(When.END, all_ranks=True)
def slow_end_of_all_ranks(job: Job) -> None:
    atexit.register(time.sleep, job.seconds)


@behaviour(When.END)
def thread_that_outlives_main(job: Job) -> None:
    threading.Thread(target=job.get).start()


@behaviour(When.END)
def ranks_that_have_less_data(job: Job) -> None:
    time.sleep(job.seconds)


@behaviour(When.STEP, all_ranks=True)
def suspended_job(job: Job) -> None:
    (job.directory / f"suspend-{job.rank}").touch()
    job.work(3.0)


# ------------------------------------------------------------------------------------------------------- job


class Batches(IterableDataset[torch.Tensor]):
    def __init__(self, each_s: float) -> None:
        self._each_s = each_s

    def __iter__(self) -> Any:
        while True:
            time.sleep(self._each_s)
            yield torch.ones(64)


class Served(IterableDataset[torch.Tensor]):
    def __init__(self, job: Job) -> None:
        self._job = job

    def __iter__(self) -> Any:
        for number in range(STEPS + 5):
            if number == AT:
                self._job.get()
            yield torch.ones(64)


def main() -> None:
    name, directory, seconds = sys.argv[1:]
    job = Job(directory=Path(directory), seconds=float(seconds), rank=int(os.environ["RANK"]))
    does = BEHAVIOURS[name]
    mine = does.all_ranks or job.rank == 0
    watch_rank()
    torch.set_num_threads(1)
    if does.when is When.START and mine:
        does.run(job)
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    slow = does.run in (slow_steps, slow_steps_of_one_rank)
    for job.step in range(SLOW_STEPS if slow else STEPS):
        if job.step == AT:
            (job.directory / "at-step").touch()
        if mine and (does.when is When.LOOP or (does.when is When.STEP and job.step == AT)):
            does.run(job)
        else:
            time.sleep(0.02)
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if does.run is not steps_that_are_not_reported:
            report_step(job.step)
    if does.when is When.END and mine:
        does.run(job)
    if does.run is not ranks_that_have_less_data:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
