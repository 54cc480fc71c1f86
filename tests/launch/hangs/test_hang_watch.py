# SPDX-License-Identifier: Apache-2.0
"""The launcher names ranks that stand still, and ends those that are to blame."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch.distributed as dist

from resiliency.events import EventType
from resiliency.launch.hangs.hosts import HostBoard, JobView, SaidFinding, merged
from resiliency.launch.hangs.looking import Look
from resiliency.launch.health.hangs import RankView, explain_hang
from resiliency.launch.health.phases import RankPhase
from resiliency.launch.rendezvous.shared_lines import SharedLines
from resiliency.rank.inspection import GroupState
from tests.ports import free_port

from ..conftest import SCRIPTS, WAIT, Launch, events

HANGING = SCRIPTS / "hanging.py"


def test_a_rank_that_hangs_in_its_loader_is_named_by_the_first_host_and_ended_by_its_own(
    launch: Launch, tmp_path: Path
) -> None:
    """With one rank on each host no launcher sees more by itself than that its rank waits.

    The messages that it exchanges with another rank in each step are no collectives.
    """
    place = ["--nnodes=3", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id=hang"]
    flags = [*place, "--local-addr=127.0.0.1", "--max-restarts=1", "--hang-timeout-s=6"]
    hosts = [
        launch(*flags, f"--node-rank={node}", HANGING, "loader", run_dir=tmp_path / f"run{node}")
        for node in range(3)
    ]
    assert [host.wait(timeout=WAIT) for host in hosts] == [0, 0, 0]
    # On a busy machine a rank may answer too late for the first look, and is named by the second one.
    hang = events(tmp_path / "run0", EventType.HANG_DETECTED)[-1]
    assert not events(tmp_path / "run1", EventType.HANG_DETECTED)
    assert hang.fields["kind"] == "behind"
    assert (hang.fields["ranks"], hang.fields["waiting"]) == ([1], [0, 2])
    assert hang.fields["phase"] == "data"
    assert str(hang.fields["frame"]).endswith("in __getitem__")
    assert not hang.fields["silent"]
    (fault,) = events(tmp_path / "run1", EventType.FAULT_DETECTED)
    assert fault.rank == 1
    assert str(fault.fields["cause"]).startswith("hang: rank 1 (host ")
    assert "ranks 0, 2 wait in a collective that it has not begun" in str(fault.fields["cause"])
    assert all(host.output.count(" finished") == 1 for host in hosts)
    # Equal stacks are shown once, and the one that differs first.
    told = [line.partition("stacks of ")[2] for line in hosts[0].lines if "stacks of " in line]
    assert told[-2:] == ["rank 1:", "ranks 0, 2:"]


def test_a_rank_that_is_stopped_before_its_first_step_is_named_and_one_that_evaluates_is_not_accused(
    launch: Launch, tmp_path: Path
) -> None:
    job = launch("--nproc-per-node=2", "--hang-timeout-s=off", HANGING, "stopped")
    pid = int(job.wait_for_line(r"rank 1 pid (\d+) stops", timeout=WAIT)[1])
    job.wait_for_line("rank 1 .* has been stopped by a signal for .* s; rank 0 waits", timeout=WAIT)
    os.kill(pid, signal.SIGCONT)
    job.wait_for_line("rank 0 .* holds up the job for .* s, in an evaluation: .* in evaluate", timeout=WAIT)
    assert job.wait(timeout=WAIT) == 0
    kinds = [hang.fields["kind"] for hang in events(tmp_path / "run", EventType.HANG_DETECTED)]
    assert kinds == ["stopped", "held_up"]


def test_a_rank_with_a_slow_loader_is_named_with_its_own_time_over_hosts(
    launch: Launch, tmp_path: Path
) -> None:
    place = ["--nnodes=2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id=slow"]
    flags = [*place, "--local-addr=127.0.0.1"]
    hosts = [
        launch(*flags, f"--node-rank={node}", HANGING, "slow", run_dir=tmp_path / f"run{node}")
        for node in range(2)
    ]
    hosts[0].wait_for_line(
        r"rank 1 \(host .*\) is slow: .* the difference is in its data loader", timeout=WAIT
    )
    for host in hosts:
        host.signal(signal.SIGTERM)
    for host in hosts:
        host.wait(timeout=WAIT)
    slow = events(tmp_path / "run0", EventType.STRAGGLER_SUSPECTED)[0].fields
    assert (slow["ranks"], slow["delay"]) == ([1], "data")
    assert float(str(slow["own_s"])) > 1.5 * float(str(slow["usual_s"]))


def test_hosts_answer_what_they_see_and_one_that_did_not_listen_says_that_it_may_be_late() -> None:
    store = dist.HashStore()
    lines = SharedLines(lambda function: function(store))
    first, second, third = (
        HostBoard(lines, JobView(run="r", attempt=1, node=node, hosts=3)) for node in range(3)
    )
    view = RankView(
        rank=5,
        host="h2",
        step=None,
        still_s=7.25,
        phase=RankPhase.DATA,
        frame="a.py:1 in f\u2028",
        waits=True,
        idle=False,
        groups=(GroupState(name="0", members="4-1f", begun=7),),
    )
    stack = 'Thread 1 (most recent call first):\n  File "/j/a.py", line 1 in f'
    seen = Look(views=(view,), stacks={5: stack})

    assert second.read() == (None, [])
    first.ask()
    assert (second.read(), third.read()) == ((False, []), (True, []))
    second.answer(seen, late=False, moved=True)
    third.answer(Look(views=(), stacks={}), late=True, moved=False)
    store.append("resiliency/hangs/r/1/1", "an answer of another release\n")
    answers = first.gather(lambda seconds: False)
    assert answers is not None
    assert [(answer.node, answer.late, answer.moved) for answer in answers] == [
        (1, False, True),
        (2, True, False),
    ]
    assert merged([answer.look for answer in answers]) == seen

    first.ask()  # third listened to the question before
    said = SaidFinding(sentence="rank 5 hangs", end=(5,))
    first.tell(said)
    assert third.read() == (False, [])  # what is found of others' answers is no word on its ranks
    third.answer(seen, late=False, moved=False)
    first.tell(said)
    assert third.read() == (None, [said])
    assert third.read() == (None, [])

    store.delete_key("resiliency/hangs/r/1")  # another process serves the store, with nothing in it
    assert third.read() == (None, [])
    first.ask()
    assert third.read() == (False, [])


def test_texts_of_many_hosts_are_read_at_once_and_one_that_is_not_there_is_empty() -> None:
    store = dist.HashStore()
    lines = SharedLines(lambda function: function(store))
    lines.put("0", "zero")
    lines.put("2", "two")
    assert lines.read_each(["0", "1", "2"]) == ["zero", "", "two"]
    lines.put("1", "one")
    assert lines.read_each(["0", "1", "2"]) == ["zero", "one", "two"]


def test_hosts_that_did_not_answer_are_named() -> None:
    finding = explain_hang([RankView(rank=0, host="h", step=1, still_s=9.0)], 5.0, silent=[1, 2])
    assert finding is not None
    assert finding.silent == (1, 2)
    assert finding.sentence.endswith("; hosts 1, 2 of the job did not answer")


def test_a_sentence_about_a_thousand_hosts_can_be_read() -> None:
    views = [RankView(rank=2 * one, host=f"h{one}", step=1, still_s=9.0, stopped_s=9.0) for one in range(500)]
    finding = explain_hang([*views, RankView(rank=1, host="h", step=1, still_s=9.0)], 5.0, silent=range(500))
    assert finding is not None
    assert len(finding.hosts) == 500
    assert len(finding.sentence) < 400
    assert "(hosts h0, h1, h2, h3, h4, h5, h6, h7 and 492 more) have been stopped" in finding.sentence
