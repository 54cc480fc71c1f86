# SPDX-License-Identifier: Apache-2.0
"""A job that is told to end: all ranks stop at one step, and that step is committed."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from resiliency import runtime
from resiliency.checkpoint import stop
from resiliency.checkpoint.capture.job_memory import DEFAULT_ROOT
from resiliency.checkpoint.checkpointer import Checkpointer, CheckpointerOptions
from resiliency.checkpoint.format.catalog import Condition, list_checkpoints
from resiliency.checkpoint.machine import make_room_for
from resiliency.checkpoint.ranks import RankGroup
from resiliency.checkpoint.stop.loader_workers import outliving
from resiliency.checkpoint.stop.stop_link import StopKind, StopMessage, StopPeer, connect_ranks
from resiliency.checkpoint.stop.termination import Terminated, Termination, TerminationOptions
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.checkpoint.trainer.handles import SaveState
from resiliency.errors import ConfigError, ResiliencyError
from resiliency.events import EventStream, EventType
from resiliency.progress import report_kept
from resiliency.runtime import RunInfo
from resiliency.testing import Fault, MemorySink
from resiliency.testing.leaks import open_descriptors
from resiliency.testing.processes import Command, stop_process, wait_for_exit
from resiliency.testing.rank_pool import RankOutcome, RankPool
from tests.checkpoint import stopping_ranks
from tests.checkpoint.agreeing_threads import Together
from tests.checkpoint.stopping_threads import QUIET, SOON_S, T, together
from tests.step_page import own_page
from tests.waiting import wait_until

PROGRAM = "tests.checkpoint.training_until_told"
LOADERS_OWN = DataLoader.__iter__
LAUNCHER = Path(__file__).parents[3] / "launcher.py"


# --- the protocol, with ranks as threads ---------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_wherever_ranks_are_when_a_stop_is_asked_for_all_stop_at_the_same_step(seed: int) -> None:
    dice = random.Random(seed)  # noqa: S311  # reproducible, not secret
    world_size, steps, stride = dice.randint(1, 5), dice.randint(1, 12), dice.choice([1, 1, 10])
    # (rank, step, in front of its collective or behind it or behind its boundary)
    requests = {
        (dice.randrange(world_size), dice.randint(1, steps), dice.randrange(3))
        for _ in range(dice.choice([1, 1, 2, world_size]))
    }
    lags = [[dice.choice([0.0, 0.0, 0.001, 0.003]) for _ in range(3 * steps + 3)] for _ in range(world_size)]
    coupled = [dice.random() < 0.7 for _ in range(steps + 1)]
    collective, asked_at, ended = threading.Barrier(world_size), [], []

    def train(rank_group: RankGroup) -> int | None:
        lag = iter(lags[rank_group.rank])

        def reach(step: int, point: int) -> None:
            threading.Event().wait(next(lag))
            if (rank_group.rank, step, point) in requests:
                asked_at.append(step)
                termination.request()

        with Termination(rank_group, QUIET, leave=ended.append) as termination:
            for step in range(1, steps + 1):
                reach(step, 0)
                if coupled[step]:
                    collective.wait(SOON_S)
                reach(step, 1)
                if termination.boundary(step * stride):
                    return step
                reach(step, 2)
            return None

    stops = set(together(world_size, train))
    assert len(stops) == 1
    assert ended == []
    stop = stops.pop()
    # Not before it was asked for; and if never, then because training was at its end.
    assert stop is None or stop >= min(asked_at)
    assert stop is not None or max(asked_at) >= 1


@pytest.mark.parametrize("asked", ["before", "between", "after"])
def test_after_a_rollback_all_ranks_stop_at_the_next_step_and_not_beyond_where_they_were(asked: str) -> None:
    """The request comes when none, one or both of the ranks have gone back."""

    def train(rank_group: RankGroup) -> int:
        with Termination(rank_group, QUIET) as termination:
            assert not any(termination.boundary(step) for step in range(1, 31))
            rank_group.gather(None)

            def ask(when: str) -> None:
                if asked == when:
                    if rank_group.rank == 1:
                        termination.request()
                    wait_until(lambda: termination.requested or None, "the request does not arrive")
                rank_group.gather(None)

            ask("before")
            if rank_group.rank == 0:
                termination.went_on_from(10)
            ask("between")
            if rank_group.rank == 1:
                termination.went_on_from(10)
            ask("after")
            return next(step for step in range(11, 40) if termination.boundary(step))

    assert together(2, train) == [11, 11]


@pytest.mark.parametrize("who", ["another rank", "rank 0"])
@pytest.mark.parametrize("how", ["died before", "died while asked", "hangs"])
def test_without_one_rank_there_is_no_common_stop_and_the_others_leave_by_name(who: str, how: str) -> None:
    absent = 0 if who == "rank 0" else 2
    dead, told = threading.Event(), threading.Barrier(3)
    options = TerminationOptions(deadline=timedelta(seconds=2 if how == "hangs" else 60), signals=())

    def vanish(rank_group: RankGroup) -> None:
        rank_group.check(None, "catching signals")  # as a rank that is there does
        peers = connect_ranks(rank_group, address="", timeout=timedelta(seconds=SOON_S))
        if how == "died while asked":
            told.wait(SOON_S)
            hear(next(iter(peers.values())), StopKind.STOP)
        if how == "hangs":
            told.wait(SOON_S)
            dead.wait(SOON_S)
        for peer in peers.values():
            peer.close()
        if how == "died before":
            told.wait(SOON_S)

    def train(rank_group: RankGroup) -> Terminated | None:
        if rank_group.rank == absent:
            vanish(rank_group)
            return None
        termination = Termination(rank_group, options, leave=lambda _: None)
        told.wait(SOON_S)
        termination.request()
        try:
            step = 1
            while not termination.boundary(step):
                step += 1
            raise AssertionError("stopped without a rank")
        except Terminated as terminated:
            return terminated
        finally:
            termination.close(finished=False)
            dead.set()

    ends = [terminated for terminated in together(3, train) if terminated is not None]
    assert len(ends) == 2
    for terminated in ends:
        assert (terminated.code, terminated.committed) == (128 + signal.SIGTERM, False)
    # The first to leave knows why; the other may just see that nobody is left.
    what = "answer" if how == "hangs" else "lost contact with rank"
    assert any(what in terminated.cause and str(absent) in terminated.cause for terminated in ends)


def hear(peer: StopPeer, kind: StopKind) -> StopMessage:
    while True:
        for word in peer.receive(timedelta(seconds=SOON_S)):
            if word.kind is kind:
                return word


def test_a_rank_that_does_not_come_to_the_stop_is_ended_at_the_deadline_with_128_and_the_signal() -> None:
    ended: list[int] = []
    over = threading.Event()

    def leave(code: int) -> None:
        ended.append(code)
        over.set()

    told: list[str] = []
    options = TerminationOptions(deadline=timedelta(seconds=0.2), signals=())
    with Termination(RankGroup(0, 1), options, leave=leave, on_leave=told.append) as termination:
        termination.boundary(1)
        termination.request(signal.SIGUSR1)
        assert over.wait(SOON_S)  # a thread that sits in a collective
    assert ended == [128 + signal.SIGUSR1]
    assert told == ["the deadline is over"]


def test_the_time_that_is_left_is_over_when_the_schedulers_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts suspensions, and native code that keeps the interpreter; ranks still agree."""
    with Termination(RankGroup(0, 1), QUIET) as termination:
        assert termination.time_left() == timedelta(0)
        termination.request()
        wait_until(lambda: termination.requested, "no stop is asked for")
        assert timedelta(0) < termination.time_left() <= QUIET.deadline
        later = runtime.elapsed_s() + 60.0
        monkeypatch.setattr(stop.termination, "elapsed_s", lambda: later)
        assert termination.time_left() == timedelta(0)
        assert termination.boundary(1)


def test_a_stop_goes_on_when_what_is_called_at_its_begin_or_end_fails() -> None:
    over = threading.Event()

    def fail(_: str) -> None:
        raise OSError("the disk of the event log is full")

    options = TerminationOptions(deadline=timedelta(seconds=0.2), signals=())
    with Termination(
        RankGroup(0, 1), options, on_request=fail, on_leave=fail, leave=lambda _: over.set()
    ) as termination:
        termination.request()
        assert over.wait(SOON_S)


def test_when_rank_0_cannot_listen_all_ranks_are_refused() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    def connect(rank_group: RankGroup) -> str:
        if rank_group.rank == 0:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        with pytest.raises(ResiliencyError) as caught:
            connect_ranks(rank_group, address="", timeout=timedelta(seconds=SOON_S))
        return str(caught.value)

    try:
        errors = together(2, connect)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert all("rank 0 cannot be reached by the others: " in error for error in errors)


class Besieged(Together):
    """Strangers connect to rank 0 before any other rank does."""

    def __init__(self, rank_group: Together, strangers: list[socket.socket]) -> None:
        super().__init__(rank_group.rank, rank_group.everyone, rank_group.values)
        self._strangers = strangers

    def gather(self, value: T) -> list[T]:
        values: list[Any] = super().gather(value)
        if isinstance(values[0], tuple):  # how rank 0 is reached
            if self.rank == 1:
                self._strangers += [socket.create_connection(("127.0.0.1", values[0][1])) for _ in range(12)]
                self._strangers[0].send(b"GET / HTTP/1.1\r\n\r\n")
            self.everyone.wait(SOON_S)
        return values


def test_strangers_that_say_nothing_do_not_hold_up_the_ranks() -> None:
    strangers: list[socket.socket] = []

    def connect(rank_group: RankGroup) -> int:
        assert isinstance(rank_group, Together)
        # Each stranger may take 5 s to say who it is.
        limit = timedelta(seconds=20)
        peers = connect_ranks(Besieged(rank_group, strangers), address="127.0.0.1", timeout=limit)
        for peer in peers.values():
            peer.close()
        return len(peers)

    try:
        assert together(4, connect) == [3, 1, 1, 1]
    finally:
        for stranger in strangers:
            stranger.close()


def test_rank_0_makes_room_for_a_connection_from_each_rank() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    everyone_is_there = threading.Barrier(50)

    def connect(rank_group: RankGroup) -> int:
        peers = connect_ranks(rank_group, address="127.0.0.1", timeout=timedelta(seconds=SOON_S))
        everyone_is_there.wait(SOON_S)
        for peer in peers.values():
            peer.close()
        return len(peers)

    resource.setrlimit(resource.RLIMIT_NOFILE, (len(open_descriptors()) + 30, limits[1]))
    try:
        assert together(50, connect) == [49, *[1] * 49]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_more_ranks_than_the_hard_limit_of_open_files_has_room_for_are_refused_with_the_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        pytest.skip("there is no limit")
    with pytest.raises(ConfigError, match=rf"the limit is {hard}.*\n?.*ulimit -Hn"):
        make_room_for(hard, what="connections from all ranks to rank 0")
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)


def test_a_rank_that_is_turned_away_at_first_tries_again() -> None:
    def connect(rank_group: RankGroup) -> int:
        if rank_group.rank != 0:
            peers = connect_ranks(rank_group, address="", timeout=timedelta(seconds=SOON_S))
            peers[0].close()
            return len(peers)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            rank_group.gather("host of rank 0")
            rank_group.gather((["127.0.0.1"], listener.getsockname()[1], "token"))
            listener.accept()[0].close()  # as where its queue is full, or it is out of descriptors
            peer = StopPeer(listener.accept()[0])
            assert hear(peer, StopKind.HELLO) == StopMessage(kind=StopKind.HELLO, number=1, text="token")
            peer.send(StopMessage(kind=StopKind.HELLO, text="token"))
            rank_group.check(None, "connecting")
            peer.close()
        return 1

    assert together(2, connect) == [1, 1]


def test_a_request_that_comes_when_training_has_ended_changes_nothing() -> None:
    termination = Termination(RankGroup(0, 1), QUIET)
    termination.close()
    termination.request()
    termination.close()
    assert not termination.requested


# --- signals of this process ---------------------------------------------------------------------


@pytest.fixture
def handlers() -> Iterator[None]:
    """The signal handlers of this process, as they were."""
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_a_launcher_sees_that_a_stop_by_sigterm_would_cost_no_step() -> None:
    with own_page() as page:
        deaf = Termination(RankGroup(0, 1), TerminationOptions(signals=(signal.SIGUSR1,)))
        assert not deaf.boundary(1)
        deaf.close()
        assert page.read(0).kept_step is None
        termination = Termination(RankGroup(0, 1), TerminationOptions())
        for step in (1, 2):
            assert not termination.boundary(step)
            report_kept(1)  # the commit of an earlier save
            assert page.read(0).kept_step == step
        termination.close()


@pytest.mark.usefixtures("handlers")
def test_handlers_and_wakeup_descriptors_of_others_work_on_and_come_back() -> None:
    called: list[int] = []

    def theirs(number: int, _frame: object) -> None:
        called.append(number)

    read_fd, write_fd = os.pipe2(os.O_NONBLOCK)
    signal.signal(signal.SIGUSR1, theirs)
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    try:
        options = TerminationOptions(signals=(signal.SIGUSR1,))
        asked = threading.Event()
        with Termination(RankGroup(0, 1), options, on_request=lambda _: asked.set()) as termination:
            assert signal.getsignal(signal.SIGUSR1) is not theirs
            signal.raise_signal(signal.SIGUSR1)
            assert asked.wait(SOON_S)
            assert termination.requested
        assert called == [signal.SIGUSR1]
        assert os.read(read_fd, 10) == bytes([signal.SIGUSR1])
        assert signal.getsignal(signal.SIGUSR1) is theirs
    finally:
        assert signal.set_wakeup_fd(-1) == write_fd
        os.close(read_fd)
        os.close(write_fd)


@pytest.mark.usefixtures("handlers")
def test_of_two_that_watch_the_first_may_end_first_and_its_descriptor_is_left_alone(tmp_path: Path) -> None:
    asked = threading.Event()
    first = Termination(RankGroup(0, 1))
    second = Termination(RankGroup(0, 1), on_request=lambda _: asked.set())
    first.close()
    with ExitStack() as files:  # they get the numbers that are free now
        others = [files.enter_context(open(tmp_path / str(i), "wb", buffering=0)) for i in range(8)]
        signal.raise_signal(signal.SIGTERM)
        assert asked.wait(SOON_S)
        second.close()
        assert [other.tell() for other in others] == [0] * 8
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.usefixtures("handlers")
def test_a_signal_arrives_also_when_another_library_took_the_wakeup_descriptor_away() -> None:
    asked = threading.Event()
    with Termination(RankGroup(0, 1), on_request=lambda _: asked.set()):
        signal.set_wakeup_fd(-1)
        signal.raise_signal(signal.SIGTERM)
        assert asked.wait(SOON_S)


@pytest.mark.usefixtures("handlers")
def test_signals_to_a_forked_child_are_not_its_parents() -> None:
    # Two, of which either may be the first to be left behind in the child.
    with Termination(RankGroup(0, 1)) as termination, Termination(RankGroup(0, 1)):
        child = os.fork()
        if child == 0:
            threading.Event().wait(SOON_S)
            os._exit(1)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert not termination.requested


def test_signals_can_be_caught_from_the_main_thread_only() -> None:
    errors: list[str] = []

    def make() -> None:
        with pytest.raises(ConfigError) as caught:
            Termination(RankGroup(0, 1))
        errors.append(str(caught.value))

    thread = threading.Thread(target=make, name="not-main")
    thread.start()
    thread.join(SOON_S)
    assert "from the main thread only" in errors[0]
    assert "'not-main'" in errors[0]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"deadline": timedelta(0)}, "deadline must be positive"),
        ({"signals": (signal.SIGKILL,)}, "SIGKILL cannot be caught"),
    ],
)
def test_options_that_cannot_work_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TerminationOptions(**wrong)


# --- ranks as processes, with collectives and real signals ---------------------------------------


@pytest.mark.parametrize(
    "faults",
    [
        ["rank_terminated,step=5,rank=0"],
        ["rank_terminated,step=5,rank=1,phase=step_started"],
        ["rank_terminated,step=3,rank=0", "rank_terminated,step=4,rank=1", "rank_terminated,step=3,rank=2"],
        ["rank_terminated,0.2,rank=1,phase=step_started"],
    ],
    ids=["rank-0", "in-front-of-a-collective", "all", "later"],
)
def test_a_signal_to_any_ranks_stops_all_at_one_step(rank_pool: RankPool, faults: list[str]) -> None:
    placed = [Fault.parse(fault) for fault in faults]
    stops = rank_pool.run(stopping_ranks.stop_together, 3, faults=placed, timeout=SOON_S).values
    assert len({step for step, _, _ in stops}) == 1
    assert stops[0][0] >= min(fault.step or 1 for fault in placed)
    assert [code for _, code, _ in stops] == [0, 0, 0]
    assert [causes for _, _, causes in stops] == [["SIGTERM"]] * 3


class Held:
    """While the last of two ranks is held in front of a collective, `act` is called once."""

    def __init__(self, directory: Path, act: Callable[[], None]) -> None:
        self.fifo = directory / "hold"
        os.mkfifo(self.fifo)
        self._act = act
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with open(self.fifo, "w"):  # opens when the rank does
            self._act()

    def __enter__(self) -> Held:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(SOON_S)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT])
def test_a_signal_on_request_reaches_a_rank_that_sits_in_a_collective(
    rank_pool: RankPool, tmp_path: Path, number: signal.Signals
) -> None:
    rank_pool.warm_up(2)
    with Held(tmp_path, lambda: os.kill(rank_pool.pids[0], number)) as held:
        arguments = (30.0, (number,), str(held.fifo))
        stops = rank_pool.run(stopping_ranks.stop_together, 2, *arguments, timeout=SOON_S).values
    assert len({step for step, _, _ in stops}) == 1
    assert stops[0][0] >= 2
    assert [causes for _, _, causes in stops] == [[number.name]] * 2


def test_when_a_rank_is_stopped_one_that_is_stuck_with_it_leaves_with_128_and_the_signal(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    rank_pool.warm_up(2)
    first, second = rank_pool.pids[:2]

    def act() -> None:
        stop_process(second)
        os.kill(first, signal.SIGTERM)

    with Held(tmp_path, act) as held:
        arguments = (5.0, (signal.SIGTERM,), str(held.fifo))
        report = rank_pool.run(stopping_ranks.stop_together, 2, *arguments, timeout=SOON_S)
    # It sits in the collective, or is just about to and learns it at its boundary.
    code = report[0].exit_code if report[0].value is None else report[0].value[1]
    assert code == 128 + signal.SIGTERM
    assert report[1].outcome is RankOutcome.HUNG


def test_a_job_that_is_suspended_before_it_has_agreed_on_a_stop_agrees_when_it_goes_on(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    rank_pool.warm_up(2)
    first, second = rank_pool.pids[:2]
    deadline_s = 8.0

    def act() -> None:
        stop_process(second)  # first, so that it cannot answer
        os.kill(first, signal.SIGTERM)
        wait_until(lambda: Path(f"{held.fifo}-0").exists(), "rank 0 knows of no stop", timeout=SOON_S)
        stop_process(first)
        threading.Event().wait(1.2 * deadline_s)  # what is tested
        for pid in (first, second):
            os.kill(pid, signal.SIGCONT)

    with Held(tmp_path, act) as held:
        arguments = (deadline_s, (signal.SIGTERM,), str(held.fifo))
        stops = rank_pool.run(stopping_ranks.stop_together, 2, *arguments, timeout=SOON_S).values
    assert stops == [(stops[0][0], 0, ["SIGTERM"])] * 2


def test_a_handler_of_the_program_may_ask_for_a_stop_wherever_it_interrupts_training(
    rank_pool: RankPool,
) -> None:
    report = rank_pool.run(stopping_ranks.ask_in_a_handler, 1, timeout=SOON_S / 2, group=False)
    assert report.values == [True]


def test_a_second_ctrl_c_ends_at_once(rank_pool: RankPool) -> None:
    report = rank_pool.run(stopping_ranks.interrupt_twice, 1, timeout=SOON_S, group=False)
    assert report[0].outcome is RankOutcome.DIED
    assert report[0].exit_code == 128 + signal.SIGINT


# --- whole jobs, with an agent -------------------------------------------------------------------


def end_after_three(checkpoints: Checkpointer, state: dict[str, Any]) -> None:
    for step in (1, 2, 3):
        checkpoints.save(step, state)
    # The third has no slot, unless storage was very fast.
    last = checkpoints.save(3, state, wait=timedelta(seconds=SOON_S))
    assert last.state is not SaveState.SKIPPED
    assert not checkpoints.stopping
    checkpoints.request_stop()
    for step in itertools.count(4):
        checkpoints.step(step, state)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.slow
def test_a_last_save_waits_for_slow_storage_and_a_stop_takes_the_bandwidth_cap_away(
    tmp_path: Path, job: str
) -> None:
    sink = MemorySink()
    state = {"weights": torch.ones(4 << 20)}  # 16 MiB
    with (
        Checkpointer(
            tmp_path / "ckpt",
            keep=9,
            info=RunInfo(job_name=job, host="here"),
            events=EventStream(RunInfo(job_name=job, rank=0), [sink]),
            options=CheckpointerOptions(bytes_per_s=12 << 20),
            termination=TerminationOptions(deadline=timedelta(seconds=SOON_S), signals=()),
        ) as checkpoints,
        pytest.raises(Terminated) as stopped,
    ):
        end_after_three(checkpoints, state)
    assert (stopped.value.code, stopped.value.committed) == (0, True)
    assert complete(tmp_path) == [1, 2, 3, stopped.value.step]
    said = [
        event for event in sink.events if event.type in (EventType.STOP_REQUESTED, EventType.RANK_FINISHED)
    ]
    assert [(event.type, event.fields["cause"]) for event in said] == [
        (EventType.STOP_REQUESTED, "SIGTERM"),
        (EventType.RANK_FINISHED, "SIGTERM"),
    ]
    assert said[1].step == stopped.value.step


@pytest.fixture
def job(tmp_path: Path) -> Iterator[str]:
    name = f"stop-{os.getpid()}-{tmp_path.name}"
    yield name
    assert list(DEFAULT_ROOT.glob(f"resiliency-{name[:40]}*")) == []


@contextmanager
def ranks(world_size: int, job: str, directory: Path, *arguments: object) -> Iterator[list[Command]]:
    """A job without a launcher: one command per rank."""
    store = directory / f"store-{len(list(directory.iterdir()))}"
    argv = [sys.executable, "-m", PROGRAM, directory / "ckpt", *map(str, arguments)]
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                Command(
                    argv,
                    env={
                        **{"JOB_IDENTIFIER": job, "OMP_NUM_THREADS": "1", "STORE": str(store)},
                        **{"RANK": str(rank), "WORLD_SIZE": str(world_size)},
                    },
                )
            )
            for rank in range(world_size)
        ]


def said(command: Command, pattern: str) -> list[str]:
    """The words of a line, without who said it."""
    return command.wait_for_line(pattern, timeout=SOON_S).string.split()[2:]


def complete(directory: Path) -> list[int]:
    found = list_checkpoints(LocalStorage(directory / "ckpt"))
    return [checkpoint.step for checkpoint in found if checkpoint.condition is Condition.COMPLETE]


@pytest.mark.thorough("a signal to the launcher is near")
@pytest.mark.slow
def test_one_signal_while_ranks_sit_in_a_collective_and_all_slots_are_being_written_loses_nothing(
    tmp_path: Path, job: str
) -> None:
    fifo = tmp_path / "hold"
    os.mkfifo(fifo)
    # Two saves of 2 MB under way, at 20 kB/s: minutes, if the bandwidth cap stayed.
    slow = ("every=4", "rate=20000", "size=200000", f"hold=1,10,{fifo}")
    with ranks(2, job, tmp_path, 1_000_000, *slow) as (first, second):
        said(second, "is held")
        first.wait_for_line("step 9", timeout=SOON_S)
        assert complete(tmp_path) == []
        first.signal(signal.SIGTERM)
        first.wait_for_line("all ranks stop when 10 steps are done", timeout=SOON_S)
        with open(fifo, "w"):
            pass
        stopped = [said(command, "stopped") for command in (first, second)]
        assert [command.wait(timeout=SOON_S) for command in (first, second)] == [0, 0]
        for command in (first, second):
            command.assert_no_orphans(timeout=SOON_S)
    assert stopped[0] == stopped[1]
    assert stopped[0][:3] == ["stopped", "10", "0"]
    assert complete(tmp_path) == [4, 8, 10]
    with ranks(2, job, tmp_path, 10, "size=200000") as again:
        for command in again:
            assert said(command, r"^rank \d starts \d") == ["starts", "10", "persistent", stopped[0][3]]
            assert command.wait(timeout=SOON_S) == 0


@pytest.mark.slow
def test_when_a_rank_was_killed_the_captured_step_is_committed_and_the_others_end_with_143(
    tmp_path: Path, job: str
) -> None:
    fifo = tmp_path / "hold"
    os.mkfifo(fifo)
    with ranks(2, job, tmp_path, 1_000_000, "every=4", f"hold=0,10,{fifo}") as (first, second):
        agent = int(said(first, r"agent \d+")[1])
        said(first, "is held")
        second.signal(signal.SIGKILL)
        first.wait_for_line("rank 1 is gone", timeout=SOON_S)
        first.signal(signal.SIGTERM)
        assert first.wait(timeout=SOON_S) == 128 + signal.SIGTERM
        first.wait_for_line("no common stop: lost contact with rank 1", timeout=SOON_S)
        wait_for_exit([agent], time.monotonic() + SOON_S)
    assert complete(tmp_path)[-1] == 8


@pytest.mark.thorough("a rank that was killed is near")
@pytest.mark.slow
def test_when_the_deadline_is_too_short_the_code_says_so_and_the_agent_commits_it_later(
    tmp_path: Path, job: str
) -> None:
    with ranks(1, job, tmp_path, 1_000_000, "deadline=5") as (command,):
        agent = int(said(command, r"agent \d+")[1])
        said(command, "step 3")
        stop_process(agent)
        command.signal(signal.SIGTERM)
        stopped = said(command, "stopped")
        assert command.wait(timeout=SOON_S) == 128 + signal.SIGTERM
        assert stopped[2] == "143"
        assert complete(tmp_path) == []
        os.kill(agent, signal.SIGCONT)
        wait_for_exit([agent], time.monotonic() + SOON_S)
    assert complete(tmp_path) == [int(stopped[1])]


#: Flags of the launcher, and of the program, for a job that Slurm warns by a signal of the user's choice.
USR1 = ("--signals-to-handle=SIGTERM,SIGUSR1",), ("signals=TERM,USR1",)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "to_all", "code", "flags", "words"),
    [
        pytest.param(signal.SIGTERM, False, 0, (), (), id="launcher"),
        # As Slurm and some container runtimes do: monitors, guardian, agent and its host get it too.
        pytest.param(signal.SIGTERM, True, 143, (), (), id="every-process-of-a-pod"),
        pytest.param(signal.SIGUSR1, False, 0, *USR1, id="usr1"),
    ],
)
def test_a_signal_to_the_launcher_ends_the_job_with_its_current_step_and_in_a_pod_not_with_0(
    tmp_path: Path,
    job: str,
    number: signal.Signals,
    to_all: bool,
    code: int,
    flags: tuple[str, ...],
    words: tuple[str, ...],
) -> None:
    argv = [
        sys.executable,
        LAUNCHER,
        "--nproc-per-node=2",
        "--run-dir",
        tmp_path / "run",
        *flags,
        "-m",
        PROGRAM,
    ]
    env = {"JOB_IDENTIFIER": job, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    env |= {"KUBERNETES_SERVICE_HOST": "10.0.0.1"} if code else {}
    with Command([*map(str, argv), str(tmp_path / "ckpt"), "1000000", *words], env=env) as launcher:
        launcher.wait_for_line("rank 1 step 5", timeout=SOON_S)
        told = launcher.descendants() if to_all else []
        launcher.signal(number)
        for process in told:
            with suppress(psutil.NoSuchProcess):  # the launcher has ended it already
                process.send_signal(number)
        assert launcher.wait(timeout=SOON_S) == code
        assert_stopped_together(launcher, tmp_path)
        step = complete(tmp_path)[-1]
        assert f"; step {step}, at which {number.name} stopped them, is committed" in launcher.output


@pytest.mark.parametrize(
    "how", [("fork",), ("fork", "persistent"), ("spawn",), ("forkserver", "persistent")], ids=" ".join
)
def test_a_signal_to_all_processes_of_a_rank_leaves_its_loader_workers_until_it_has_stopped(
    tmp_path: Path, job: str, how: tuple[str, ...]
) -> None:
    argv = [sys.executable, "-m", "tests.checkpoint.loading_until_told", str(tmp_path / "ckpt"), *how]
    env = {"JOB_IDENTIFIER": job, "OMP_NUM_THREADS": "1", "NODE_NAME": None}
    with Command(argv, env=env, cold=True) as rank:
        rank.wait_for_line("workers of process", timeout=SOON_S)
        os.killpg(rank.pid, signal.SIGTERM)
        assert rank.wait(timeout=SOON_S) == 0, rank.output
        rank.assert_no_orphans(timeout=SOON_S)
    assert len(complete(tmp_path)) == 1
    assert complete(tmp_path)[0] >= 8


def test_a_loader_worker_ignores_a_signal_of_other_processes_and_without_termination_dies_of_it() -> None:
    started = multiprocessing.get_context("spawn").SimpleQueue()
    with outliving([signal.SIGTERM]):
        loader = DataLoader(Told(started), num_workers=1, multiprocessing_context="spawn")  # type: ignore[arg-type]
        batches = iter(loader)
        worker = psutil.Process(started.get())
        subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)
        assert [int(batch) for batch in batches] == [0, 1, 2]
    assert loader.worker_init_fn is None
    assert DataLoader.__iter__ is LOADERS_OWN
    batches = iter(DataLoader(Told(started), num_workers=1, multiprocessing_context="fork"))  # type: ignore[arg-type]
    other = psutil.Process(started.get())
    other.terminate()  # without the handling of signals all is as it was
    with pytest.raises(RuntimeError, match="worker"):
        list(batches)


class Told(Dataset[int]):
    """Says which process loads it."""

    def __init__(self, started: Any) -> None:
        self.started = started

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        if index == 0:
            self.started.put(os.getpid())
        return index


@pytest.mark.thorough("a signal to our launcher is near")
@pytest.mark.slow
def test_a_signal_to_torchrun_ends_the_job_with_its_current_step(tmp_path: Path, job: str) -> None:
    argv = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        PROGRAM,
    ]
    env = {"JOB_IDENTIFIER": job, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    with Command([*argv, str(tmp_path / "ckpt"), "1000000"], env=env) as torchrun:
        torchrun.wait_for_line("rank 1 step 5", timeout=SOON_S)
        torchrun.signal(signal.SIGTERM)
        torchrun.wait(timeout=SOON_S)  # torchrun's own code says that it was told to end
        assert_stopped_together(torchrun, tmp_path)


def assert_stopped_together(command: Command, directory: Path) -> None:
    """Both ranks stopped at one step, which is committed, and left nothing."""
    stopped = [command.wait_for_line(f"rank {rank} stopped.*", timeout=1)[0] for rank in (0, 1)]
    command.assert_no_orphans(timeout=SOON_S)
    assert stopped[0].split()[2:] == stopped[1].split()[2:]
    assert complete(directory) == [int(stopped[0].split()[3])]
