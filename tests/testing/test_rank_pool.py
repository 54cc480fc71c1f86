# SPDX-License-Identifier: Apache-2.0
"""Every end that a rank can come to is reported, in time, and the pool is whole afterwards."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import random
import signal
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from resiliency.errors import ConfigError, PeerError
from resiliency.runtime import RunInfo
from resiliency.testing import Fault, FaultKind, Phase
from resiliency.testing.leaks import open_descriptors
from resiliency.testing.processes import Command
from resiliency.testing.rank_pool import RankFailed, RankOutcome, RankPool, fault_point

OK, ERROR, DIED, HUNG = RankOutcome.OK, RankOutcome.ERROR, RankOutcome.DIED, RankOutcome.HUNG


def all_reduce(rank: int, add: int = 0) -> float:
    import torch
    import torch.distributed as dist

    value = torch.tensor([float(rank + add)])
    dist.all_reduce(value)
    return value.item()


def train(rank: int, steps: int) -> int:
    for step in range(1, steps + 1):
        fault_point(step=step, phase=Phase.STEP_STARTED)
        all_reduce(rank)
        fault_point(step=step)
    return steps


def identity(rank: int) -> tuple[RunInfo, str | None]:
    return RunInfo.from_env(), os.environ.get("EXTRA")


def disturb(rank: int) -> int:
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir("/")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return os.getpid()


def scene(rank: int) -> tuple[int, bool, str, bool, float]:
    untouched = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    return os.getpid(), "LEFT_BEHIND" in os.environ, os.getcwd(), untouched, random.random()  # noqa: S311


def fail_on(rank: int, bad: int) -> int:
    if rank == bad:
        raise PeerError("the switch is on fire.", hint="Leave the room.", rank=rank)
    return rank


def leave_a_thread(rank: int) -> None:
    threading.Thread(target=threading.Event().wait, name="forgotten", daemon=True).start()


def wait_for_ever(rank: int) -> None:
    if rank == 1:
        multiprocessing.get_context("fork").Process(target=forked, daemon=True).start()
        threading.Event().wait()


def forked() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # with its rank
    threading.Event().wait()


def exit_quietly(rank: int) -> None:
    sys.exit(3)


def has_group(rank: int) -> bool:
    import torch.distributed as dist

    return dist.is_initialized()


def test_ranks_talk_to_each_other_and_return_values(rank_pool: RankPool) -> None:
    assert rank_pool.run(all_reduce, 4, 10).values == [46.0] * 4


def test_ranks_are_reused_and_worlds_may_differ_in_size(rank_pool: RankPool) -> None:
    first = [report[0] for report in rank_pool.run(scene, 3).values]
    second = [report[0] for report in rank_pool.run(scene, 2).values]
    assert second == first[:2]


def test_a_job_leaves_the_scene_as_it_found_it(rank_pool: RankPool) -> None:
    before = rank_pool.run(scene, 2).values
    assert rank_pool.run(disturb, 2).values == [pid for pid, *_ in before]
    assert rank_pool.run(scene, 2).values == before


def test_ranks_know_who_they_are(rank_pool: RankPool) -> None:
    (_, _), (info, extra) = rank_pool.run(identity, 2, group=False, env={"EXTRA": "x"}).values
    assert (info.rank, info.local_rank, info.world_size, info.attempt, extra) == (1, 1, 2, 0, "x")


def test_a_process_group_is_optional(rank_pool: RankPool) -> None:
    assert rank_pool.run(has_group, 2, group=False).values == [False, False]
    assert rank_pool.run(has_group, 2).values == [True, True]


def test_an_exception_is_reported_with_its_traceback_and_the_rank_lives_on(rank_pool: RankPool) -> None:
    before = rank_pool.pids
    report = rank_pool.run(fail_on, 2, 1)
    assert report.outcomes == [OK, ERROR]
    assert report[0].value == 0
    with pytest.raises(RankFailed, match=r"(?s)rank 1 error.*in fail_on.*on fire\.  Leave the room"):
        report.values  # noqa: B018
    rank_pool.run(fail_on, 2, None).values  # noqa: B018
    assert not before or rank_pool.pids == before


def test_sys_exit_is_an_error_of_the_function_and_not_the_end_of_the_rank(rank_pool: RankPool) -> None:
    assert rank_pool.run(exit_quietly, 1).outcomes == [ERROR]


@pytest.mark.parametrize(
    ("kind", "exit_code"), [(FaultKind.KILLED, -9), (FaultKind.TERMINATED, -15), (FaultKind.EXIT, 7)]
)
def test_a_dead_rank_is_reported_its_peer_fails_fast_and_both_serve_again(
    rank_pool: RankPool, kind: FaultKind, exit_code: int
) -> None:
    code = exit_code if exit_code > 0 else 1
    fault = Fault(kind=kind, step=3, rank=1, exit_code=code)
    start = time.monotonic()
    report = rank_pool.run(train, 2, 5, faults=[fault], timeout=120, operation_timeout=100)
    assert report.outcomes == [ERROR, DIED]
    assert report[1].exit_code == exit_code
    assert "rank 1 died with exit code" in str(report[1])
    assert time.monotonic() - start < 50, "the peer must not wait for its operation timeout of 100 s"
    assert rank_pool.run(train, 2, 5).values == [5, 5]


def test_a_stopped_rank_is_hung_as_soon_as_its_peers_gave_up_on_it(rank_pool: RankPool) -> None:
    fault = Fault(kind=FaultKind.HUNG, step=2, phase=Phase.STEP_STARTED)
    start = time.monotonic()
    # Long enough for the step before, in which a busy machine stops one of them.
    report = rank_pool.run(train, 2, 3, faults=[fault], operation_timeout=3, timeout=120)
    assert report.outcomes == [ERROR, HUNG]
    assert time.monotonic() - start < 60
    assert rank_pool.run(train, 2, 1).values == [1, 1]


def test_a_rank_that_does_not_answer_is_hung_at_the_deadline(rank_pool: RankPool) -> None:
    report = rank_pool.run(wait_for_ever, 2, group=False, timeout=2)
    assert report.outcomes == [OK, HUNG]
    with pytest.raises(
        RankFailed, match=r"rank 1 hung: no answer before the deadline\nprocess \d+:"
    ) as failed:
        report.values  # noqa: B018
    assert "in wait_for_ever" in str(failed.value)
    assert str(failed.value).count("in forked") == 1


def test_a_placed_exception_names_its_fault(rank_pool: RankPool) -> None:
    report = rank_pool.run(train, 1, 3, faults=[Fault.parse("rank_exception,step=2")])
    assert "InjectedFault: injected fault rank_exception,step=2" in report[0].error


def test_a_thread_left_in_a_rank_is_an_error_and_the_rank_is_replaced(rank_pool: RankPool) -> None:
    report = rank_pool.run(leave_a_thread, 1, group=False)
    assert "returned but left threads behind: forgotten" in report[0].error
    assert rank_pool.run(scene, 1).outcomes == [OK]


def test_what_cannot_travel_is_refused_before_anything_starts(rank_pool: RankPool) -> None:
    with pytest.raises(ConfigError, match=r"cannot send .*lambda.*Define the function at the top"):
        rank_pool.run(lambda rank: rank, 2)


def test_a_closed_pool_has_no_processes_files_or_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = open_descriptors()
    with RankPool() as pool:
        pool.run(all_reduce, 2).values  # noqa: B018
        pids = pool.pids
        assert len(pids) == 2
        assert all(os.path.exists(f"/proc/{pid}") for pid in pids)
    pool.close()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    assert list(tmp_path.iterdir()) == []
    assert open_descriptors() == before
    with pytest.raises(ConfigError, match="closed"):
        pool.run(all_reduce, 2)


def test_ranks_start_the_ordinary_way_where_they_cannot_be_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with RankPool() as pool:
        assert pool.run(all_reduce, 2, 10).values == [21.0, 21.0]


def test_a_pool_in_a_script_runs_functions_of_the_script(tmp_path: Path) -> None:
    source = """
        import os
        from resiliency.testing.rank_pool import RankPool

        def parent(rank):
            return os.getppid()

        if __name__ == "__main__":
            with RankPool() as pool:
                assert pool.run(parent, 2, group=False).values == [os.getpid()] * 2
            print("done")
    """
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(source))
    with Command([sys.executable, script]) as command:
        assert command.wait(timeout=120) == 0, command.output
        assert command.output == "done\n"
        command.assert_no_orphans(timeout=60)


def test_an_interrupted_job_does_not_answer_the_next_one(rank_pool: RankPool) -> None:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            rank_pool.run(wait_for_ever, 2, group=False, timeout=30)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert rank_pool.run(all_reduce, 2).values == [1.0, 1.0]


def test_a_rank_that_cannot_load_the_function_says_why_and_its_peers_are_not_run(
    rank_pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = """
        import os
        if os.environ.get("RANK") == "1":
            raise RuntimeError("no such disk")
        def fn(rank):
            return rank
    """
    (tmp_path / "half_broken.py").write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(tmp_path)
    from half_broken import fn  # type: ignore[import-not-found]

    report = rank_pool.run(fn, 2)
    assert report.outcomes == [ERROR, ERROR]
    assert "not run: another rank failed to start" in report[0].error
    assert "no such disk" in report[1].error
