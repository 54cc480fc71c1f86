# SPDX-License-Identifier: Apache-2.0
"""A look at ranks: what it may take for idle, and that it harms nobody.  What is found is of that moment."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from resiliency.events import EventStream
from resiliency.launch.fleet.link import NullReporter
from resiliency.launch.hangs import looking, waits
from resiliency.launch.hangs.activity import activity, inspected_process, is_stopped, is_traced
from resiliency.launch.hangs.hosts import HostAnswer, HostBoard, JobView, SaidFinding
from resiliency.launch.hangs.looking import Quiet, Watched
from resiliency.launch.hangs.watch import HangWatch
from resiliency.launch.health import hang_times
from resiliency.launch.health.causes import Diagnosis
from resiliency.launch.health.hang_times import HangTimeout
from resiliency.launch.health.phases import RankPhase
from resiliency.launch.rendezvous.shared_lines import SharedLines
from resiliency.progress import STEP_PAGE_ENV, StepPage
from resiliency.rank import inspection
from resiliency.runtime import STOP_NOTES_ENV, RunInfo
from tests.waiting import wait_for_seconds, wait_until

#: Finishes the steps that it is told, on a line each, or does something else; becomes another program, or the
#: same one again.
PROGRAM = """
import atexit, ctypes, os, pdb, queue, socket, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from resiliency.progress import report_step
server = socket.create_server(("127.0.0.1", 0)); client = socket.create_connection(server.getsockname())
mutex = ctypes.create_string_buffer(64)
def main():
    print("runs", flush=True)
    for line in iter(sys.stdin.readline, ""):
        if line.startswith("sleep"):
            os.execvp("sleep", ["sleep", "100"])
        elif line.startswith("again"):
            os.execv(sys.executable, [sys.executable, "-c", os.environ["PROGRAM"]])
        elif line.startswith("do "):
            print("does", flush=True)
            exec(line[3:])
        else:
            report_step(int(line))
            print(line, end="", flush=True)
main()
"""


class Rank:
    """A process that reports steps into slot 0 of `page`."""

    def __init__(self, page: StepPage, directory: Path, *, wrapped: bool = False) -> None:
        shown = {STEP_PAGE_ENV: page.variable(0), STOP_NOTES_ENV: str(directory), "PROGRAM": PROGRAM}
        shell = ["sh", "-c", '"$@"; exit', "sh"] if wrapped else []  # which waits for its child
        self.process = subprocess.Popen(
            [*shell, sys.executable, "-c", PROGRAM],
            env={**os.environ, **shown},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid = self.process.pid
        self.hear("runs")

    def hear(self, word: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == f"{word}\n"

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def finish_step(self, step: int) -> None:
        self.tell(str(step))
        self.hear(str(step))

    def do(self, code: str) -> None:
        """Returns when it sleeps in that."""
        self.tell(f"do exec({code!r})")
        self.hear("does")
        self.wait_until_asleep()

    def wait_until_asleep(self) -> None:
        call = Path(f"/proc/{self.process.pid}/syscall")

        def sleeps() -> bool:
            before = call.read_text()
            wait_for_seconds(0.05)
            return before == call.read_text() != "running\n"

        wait_until(sleeps, "it still runs")

    def look(self, directory: Path, quiet: Quiet | None = None) -> looking.Look:
        trains = inspected_process(self.pid, str(directory))
        watched = Watched(pid=self.pid, trains=trains, step=1, still_s=9.0, stopped_s=0.0, quiet=quiet)
        found = looking.look({0: watched}, str(directory), "h", wait)
        assert found is not None
        return found

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.communicate()


def wait(seconds: float) -> bool:
    wait_for_seconds(seconds)
    return False


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of a test answers at once, but for a machine that is busy with others."""
    monkeypatch.setattr(looking, "ANSWER_S", 30.0)
    monkeypatch.setattr(looking, "WINDOW_S", 0.4)


@pytest.fixture
def page() -> Iterator[StepPage]:
    with ExitStack() as stack:
        page = StepPage(1)
        stack.callback(page.close)
        yield page


@pytest.fixture
def rank(page: StepPage, tmp_path: Path) -> Iterator[Rank]:
    rank = Rank(page, tmp_path)
    try:
        rank.finish_step(1)
        rank.wait_until_asleep()
        yield rank
    finally:
        rank.end()


def test_a_rank_that_has_become_another_program_is_not_ended_by_a_look(rank: Rank, tmp_path: Path) -> None:
    assert '"<string>"' in rank.look(tmp_path).stacks[0]
    rank.tell("again")
    rank.hear("runs")  # what it is told before, the program before may read
    rank.finish_step(2)
    assert looking.ask({0: rank.pid}, str(tmp_path)).keys() == {0}
    assert '"<string>"' in rank.look(tmp_path).stacks[0]
    rank.tell("sleep")
    name = Path(f"/proc/{rank.pid}/comm")
    wait_until(lambda: name.read_text() == "sleep\n", "the rank is no other program")
    assert "gives no Python stacks" in rank.look(tmp_path).stacks[0]
    assert rank.process.poll() is None


def test_a_rank_whose_system_calls_are_not_shown_does_not_count_as_idle(
    rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may wait in native code, for others: a kernel may show what a process reads, and no more."""
    (view,) = rank.look(tmp_path).views
    assert (view.idle, view.waits, view.outside) == (True, False, "a pipe")
    monkeypatch.setattr(waits, "_OTHERS", {})
    (view,) = rank.look(tmp_path).views
    assert (view.idle, view.waits, view.outside) == (None, False, "")


#: What a rank does, and what it shows then beside being idle.
SHOWN: dict[str, dict[str, object]] = {
    "threading.Lock().acquire() and threading.Event().wait()": {"outside": ""},
    # What its answer costs is no work of its own.
    "from resiliency.rank import inspection as i\n"
    "i._groups = lambda counted: [][sum(range(5_000_000)):]; threading.Event().wait()": {"outside": ""},
    # A tracker, say, keeps a connection beside each job.
    "threading.Thread(target=client.recv, args=(1,), daemon=True).start(); threading.Event().wait()": {
        "outside": ""
    },
    "threading.Thread(target=lambda: client.recv(1), daemon=True).start(); threading.Event().wait()": {
        "outside": "another thread of its own"
    },
    # Between two tries of a request, maybe.
    "threading.Thread(target=lambda: time.sleep(1000), daemon=True).start(); threading.Event().wait()": {
        "outside": "another thread of its own"
    },
    "threading.Thread(target=time.sleep, args=(1000,), daemon=True).start(); threading.Event().wait()": {
        "outside": ""
    },
    # A client of a database, whose daemon receives.
    "threading.Thread(target=client.recv, args=(1,), daemon=True).start()\n"
    "exec(compile('event.wait()', '/v/site-packages/db.py', 'exec'), {'event': threading.Event()})": {
        "outside": "another thread of its own"
    },
    "threading.Thread(target=client.recv, args=(1,), daemon=True).start(); queue.Queue().get()": {
        "outside": "another thread of its own"
    },
    "ThreadPoolExecutor().submit(client.recv, 1).result()": {"outside": "another thread of its own"},
    "threading.Thread(target=time.sleep, args=(1000,)).start(); threading.Event().wait()": {
        "outside": "another thread of its own"
    },
    "ctypes.CDLL(None).pthread_mutex_lock(mutex), ctypes.CDLL(None).pthread_mutex_lock(mutex)": {
        "outside": ""
    },
    # It keeps the interpreter, too.
    "ctypes.PyDLL(None).pthread_mutex_lock(mutex), ctypes.PyDLL(None).pthread_mutex_lock(mutex)": {
        "outside": "",
        "answers": False,
    },
    "breakpoint()": {"phase": RankPhase.PERSON},
    "sys.stdin.close(); atexit.register(threading.Event().wait); sys.exit()": {"ends": True},
    "lock = threading.Lock(); lock.acquire(); threading.Thread(target=lock.acquire).start(); {}['labels']": {
        "ends": True,
        "raised": "KeyError",
        "outside": "",
    },
    "try: {}['labels']\nfinally: threading.Event().wait()": {"raised": "KeyError", "outside": ""},
}


@pytest.mark.parametrize("does", SHOWN)
def test_a_look_tells_a_lock_from_a_wait_that_ends_by_itself(
    rank: Rank, tmp_path: Path, does: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "PyDLL" in does:
        monkeypatch.setattr(looking, "ANSWER_S", 0.5)
    rank.do(does)
    (view,) = rank.look(tmp_path).views
    usual = {"idle": True, "waits": False, "answers": True, "ends": False, "raised": ""}
    for name, value in {**usual, **SHOWN[does]}.items():
        assert getattr(view, name) == value, view


def test_a_rank_below_a_shell_is_inspected_and_its_stop_is_seen(page: StepPage, tmp_path: Path) -> None:
    rank = Rank(page, tmp_path, wrapped=True)
    try:
        rank.finish_step(1)
        trains = inspected_process(rank.pid, str(tmp_path))
        assert trains != rank.pid
        rank.do("threading.Event().wait()")
        (view,) = rank.look(tmp_path).views
        assert (view.idle, view.outside, view.phase) == (True, "", RankPhase.OTHER)
        os.kill(trains, signal.SIGSTOP)
        wait_until(lambda: is_stopped(trains), "it is not stopped")
        assert not is_traced(trains)
    finally:
        rank.end()


def test_a_rank_in_a_debugger_is_no_stopped_one_and_gets_no_signal(rank: Rank, tmp_path: Path) -> None:
    rank.tell("do ctypes.CDLL(None).ptrace(0, 0, 0, 0); os.kill(os.getpid(), 19)")
    wait_until(lambda: is_traced(rank.pid), "it has no tracer")
    assert not is_stopped(rank.pid)
    (view,) = rank.look(tmp_path).views
    assert (view.phase, view.stopped_s, view.idle) == (RankPhase.PERSON, 0.0, None)


def test_a_rank_is_quiet_only_where_it_did_nothing_between_two_looks(rank: Rank, tmp_path: Path) -> None:
    rank.do("time.sleep(1000)")
    first = rank.look(tmp_path)
    second = rank.look(tmp_path, first.quiet[0])
    assert (first.views[0].quiet_s, second.quiet[0].since) == (0.0, first.quiet[0].since)
    assert second.views[0].quiet_s > 0.4
    for number in (signal.SIGSTOP, signal.SIGCONT):  # it wakes, and sleeps again
        os.kill(rank.pid, number)
    wait_until(lambda: not is_stopped(rank.pid), "it is still stopped")
    assert rank.look(tmp_path, second.quiet[0]).views[0].quiet_s == 0.0


def test_a_process_with_work_and_without_a_core_is_not_idle(rank: Rank) -> None:
    core = sorted(os.sched_getaffinity(0))[-1]
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as neighbour:
        try:
            os.sched_setaffinity(rank.pid, [core])
            os.sched_setaffinity(neighbour.pid, [core])
            os.sched_setscheduler(rank.pid, os.SCHED_IDLE, os.sched_param(0))
            rank.tell("do exec('while True: pass')")
            rank.hear("does")
            before = activity(rank.pid)
            wait_for_seconds(0.4)
            assert before.is_idle_until(activity(rank.pid), 0.4) is False
        finally:
            neighbour.kill()


@pytest.mark.parametrize("is_known", [True, False])
def test_a_group_without_a_collective_has_begun_none_and_one_whose_are_long_ago_is_left_out(
    is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that only send each other messages in a group wait for nobody in it."""
    entries = [
        {"process_group": (name, ""), "pg_id": int(name), "collective_seq_id": count}
        for name, count in (("0", 7), ("1", 3), ("0", 8))
    ]
    status: dict[str, object] = {"0": {}, "1": {}} if is_known else {"0": {}, "1": {}, "2": {}}
    dump = pickle.dumps({"entries": entries, "pg_status": status})
    native = SimpleNamespace(_dump_fr_trace=lambda *_: dump)
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", native)
    recorded = inspection._recorded_collectives()
    assert recorded is not None
    assert (recorded["0"], recorded["1"]) == (8, 3)
    with nullcontext() if is_known else pytest.raises(KeyError):
        assert recorded["2"] == 0


class Told(NullReporter):
    """Keeps whom the supervisor is told to blame."""

    def __init__(self) -> None:
        self.ranks: list[tuple[int, ...]] = []

    def report_diagnosis(self, found: Diagnosis) -> None:
        self.ranks.append(found.ranks)


def test_what_is_found_holds_for_the_ranks_as_they_were_seen(
    page: StepPage, rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verdict on a rank that has gone on meanwhile ends it neither then nor when it stands still again."""
    monkeypatch.setattr(hang_times, "LOOK_S", 0.5)
    monkeypatch.setattr(hang_times, "LOOK_STEPS", 0.0)
    store = dist.HashStore()
    lines = SharedLines(lambda function: function(store))
    first = HostBoard(lines, JobView(run="r", attempt=0, node=0, hosts=2))
    told = Told()

    def answered() -> list[HostAnswer] | None:
        first.ask()
        return first.gather(wait)

    watch = HangWatch(
        page,
        directory=tmp_path,
        host="h1",
        events=EventStream(RunInfo()),
        reporter=told,
        timeout=HangTimeout(),
        lines=lines,
    )
    try:
        watch.begin(JobView(run="r", attempt=0, node=1, hosts=2), {0: (1, rank.pid)})
        wait_until(answered, "no answer")
        first.tell(SaidFinding(sentence="rank 1 does nothing", accused=(1,)))
        wait_until(lambda: told.ranks == [(1,)], "the supervisor was not told")
        first.tell(SaidFinding(sentence="no rank is behind"))
        wait_until(lambda: told.ranks == [(1,), ()], "what the supervisor was told was not taken back")
        rank.finish_step(2)
        first.tell(SaidFinding(sentence="rank 1 does nothing", end=(1,)))
        wait_until(answered, "no answer")
        assert rank.process.poll() is None
        first.tell(SaidFinding(sentence="rank 1 does nothing", end=(1,)))
        assert rank.process.wait(60.0) == -signal.SIGKILL
    finally:
        watch.close()
