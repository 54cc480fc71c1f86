# SPDX-License-Identifier: Apache-2.0
"""Who is named when a job stands still: the rank that all others wait for, and never another one."""

from __future__ import annotations

import math
import os
import random
from dataclasses import replace

import pytest

from resiliency.errors import ConfigError
from resiliency.launch.health.hang_times import (
    ACCUSE_S,
    ACT_S,
    FIRST_ACT_S,
    LOOK_S,
    HangTimeout,
    HangTimes,
)
from resiliency.launch.health.hangs import HangKind, RankView, explain_hang
from resiliency.launch.health.phases import RankPhase, joins_threads, main_thread, phase_of, telling_frame
from resiliency.rank.inspection import GroupState

from .stuck_jobs import ORDINARY, SLOW, any_job, large_job, run_until_stuck, views

P = RankPhase
AFTER_S = 5.0
#: Jobs of 10,000 ranks, and the number of the first one: by hand, by the thousand.
EXAMPLES = int(os.environ.get("RESILIENCY_EXAMPLES", "0"))
FIRST = int(os.environ.get("RESILIENCY_FIRST_EXAMPLE", "4"))


def test_in_any_mesh_the_rank_that_does_not_go_on_is_named_and_no_other_one() -> None:
    draw = random.Random(32)  # noqa: S311 (a seeded history, no secret)
    for number in range(1500):
        mesh, program = any_job(draw, most_ranks=32)
        stuck, at = draw.randrange(mesh.ranks), draw.randrange(len(program))
        stopped, slow, busy = draw.random() < 0.2, draw.random() < 0.3, draw.random() < 0.3
        outside = draw.random() < 0.3
        phase = draw.choice(SLOW) if slow else draw.choice(ORDINARY)
        culprit = RankView(
            rank=stuck,
            host="h",
            step=0,
            still_s=7.0,
            stopped_s=6.0 if stopped else 0.0,
            phase=RankPhase.UNKNOWN if stopped else phase,
            idle=None if stopped else not busy,
            outside="10.0.0.7:443" if outside and not stopped else "",
        )
        begun = run_until_stuck(mesh, program, {stuck: at})
        mute = draw.random() < 0.2
        finding = explain_hang(list(views(mesh, program, begun, [culprit], mute=mute)), AFTER_S)
        assert finding is not None
        assert finding.ranks == (stuck,), (number, finding)
        expected = HangKind.HELD_UP if slow or busy or outside else HangKind.BEHIND
        assert finding.kind is (HangKind.STOPPED if stopped else expected), (number, finding)
        assert finding.is_accusation == (stopped or not (slow or busy or outside))


def test_ranks_that_save_evaluate_or_compile_are_never_accused_in_jobs_of_10000() -> None:
    """Some are slow, at places of their own; in half one does nothing, and it alone may be accused."""
    accused = 0
    for number in range(FIRST, FIRST + (EXAMPLES or 2)):
        draw = random.Random(number)  # noqa: S311 (as above)
        mesh, program = large_job(draw, 10_000)
        ranks = draw.sample(range(mesh.ranks), draw.choice((2, 3, 10, 100)))
        guilty = ranks[0] if number % 2 else None
        stuck = [
            RankView(
                rank=rank,
                host=f"h{rank // 8}",
                step=draw.choice((0, None)),
                still_s=draw.choice((6.0, 600.0)),
                phase=draw.choice(ORDINARY if rank == guilty else SLOW),
                idle=rank == guilty or draw.random() < 0.5,
            )
            for rank in ranks
        ]
        begun = run_until_stuck(mesh, program, {rank: draw.randrange(len(program)) for rank in ranks})
        finding = explain_hang(list(views(mesh, program, begun, stuck)), AFTER_S)
        assert finding is not None
        assert set(finding.ranks) <= set(ranks), (number, finding)
        if finding.is_accusation:
            assert finding.ranks == (guilty,), (number, finding)
            accused += 1
    assert accused or EXAMPLES


def test_a_job_in_which_ranks_still_finish_steps_has_no_verdict() -> None:
    draw = random.Random(5)  # noqa: S311 (as above)
    mesh, program = any_job(draw, 16)
    waiting = RankView(rank=1, host="h", step=3, still_s=1.0, phase=RankPhase.DATA, idle=True)
    begun = run_until_stuck(mesh, program, {1: 2})
    assert explain_hang(list(views(mesh, program, begun, [waiting])), AFTER_S) is None
    assert explain_hang([], AFTER_S) is None


def seen(rank: int, begun: int, **more: object) -> RankView:
    group = GroupState(name="0", members="4-0", begun=begun)
    view = RankView(
        rank=rank, host="h1", step=8, still_s=7.0, phase=RankPhase.COLLECTIVE, waits=True, groups=(group,)
    )
    return replace(view, **more)  # type: ignore[arg-type]


def test_a_rank_behind_that_itself_waits_in_native_code_is_not_accused() -> None:
    late = seen(2, 4, phase=RankPhase.OTHER, frame="train.py:9 in receive", idle=True)
    finding = explain_hang([seen(0, 5), seen(1, 5), late], AFTER_S)
    assert finding is not None
    assert finding.kind is HangKind.HELD_UP
    place = "in code of the script: train.py:9 in receive"
    assert finding.sentence == f"rank 2 (host h1) holds up the job for 7 s, {place}; ranks 0-1 wait"


#: What a rank does that all others wait for: what it shows, and what is found.
BEHAVIOURS: dict[str, tuple[dict[str, object], HangKind, str]] = {
    "a lock": ({}, HangKind.BEHIND, "has done nothing for 7 s, in code of the script"),
    "a lock that keeps the interpreter": ({"groups": (), "answers": False}, HangKind.BEHIND, ""),
    "an HTTP answer": ({"outside": "10.0.0.7:443"}, HangKind.HELD_UP, ", waiting for 10.0.0.7:443; rank"),
    "a tool in a pipe": ({"outside": "a pipe"}, HangKind.HELD_UP, ", waiting for a pipe"),
    "a lock file": ({"outside": "a lock on file /d/l"}, HangKind.HELD_UP, "holds up the job for 7 s"),
    "a sleep": ({"outside": "a time of its own"}, HangKind.HELD_UP, "holds up the job"),
    "a debugger": ({"phase": P.PERSON, "groups": ()}, HangKind.HELD_UP, "in a debugger or at a prompt"),
    "no answer and a pipe": (
        {"groups": (), "answers": False, "outside": "a pipe"}, HangKind.HELD_UP, "waiting for a pipe"
    ),
    "no group": ({"groups": ()}, HangKind.HELD_UP, "holds up the job"),
    "work": ({"idle": False}, HangKind.HELD_UP, "holds up the job"),
    "a thing that is not known": ({"idle": None}, HangKind.HELD_UP, "holds up the job"),
    "a device": ({"waits": True}, HangKind.HELD_UP, "holds up the job"),
    "a save": ({"phase": P.CHECKPOINT}, HangKind.HELD_UP, "in a checkpoint"),
    "what follows its last step": ({"groups": (), "ends": True}, HangKind.ENDING, "has been ending for 7 s"),
    "what follows a crash": (
        {"ends": True, "raised": "KeyError"}, HangKind.BEHIND, "for 7 s, after KeyError, in code"
    ),
    "what follows an exception": (
        {"raised": "KeyError", "outside": "a pipe"}, HangKind.HELD_UP, "for 7 s, after KeyError, in code"
    ),
    "a signal": ({"stopped_s": 7.0, "groups": ()}, HangKind.STOPPED, "has been stopped by a signal for 7 s"),
}  # fmt: skip


@pytest.mark.parametrize("what", BEHAVIOURS)
def test_a_rank_is_accused_only_where_its_wait_cannot_end_by_itself(what: str) -> None:
    shows, kind, sentence = BEHAVIOURS[what]
    late = seen(2, 4, **{"phase": P.OTHER, "waits": False, "idle": True, **shows})
    finding = explain_hang([seen(0, 5), seen(1, 5), late], AFTER_S)
    assert finding is not None
    assert (finding.kind, finding.ranks, finding.waiting) == (kind, (2,), (0, 1))
    assert finding.is_accusation == (kind in (HangKind.STOPPED, HangKind.BEHIND))
    assert sentence in finding.sentence


def test_a_person_at_one_rank_is_why_the_job_stands_still_whatever_else_is_seen() -> None:
    alone = seen(0, 5, phase=P.PERSON, waits=False, frame="train.py:3 in main")
    finding = explain_hang([alone, seen(1, 4, stopped_s=9.0), seen(2, 3, idle=True)], AFTER_S)
    assert finding is not None
    assert (finding.kind, finding.ranks) == (HangKind.HELD_UP, (0,))
    assert explain_hang([alone], AFTER_S) is not None


def test_ranks_that_are_all_in_the_same_collective_are_told_apart_by_nothing() -> None:
    finding = explain_hang([seen(0, 5, frame="a.py:1 in f"), seen(1, 5, frame="a.py:1 in f")], AFTER_S)
    assert finding is not None
    assert (finding.kind, finding.is_accusation) == (HangKind.TOGETHER, False)
    assert finding.sentence == "no rank is behind: ranks 0-1 in a collective: a.py:1 in f"


def test_ranks_that_begin_collectives_in_different_orders_are_named_together() -> None:
    def crossed(rank: int, first: int, second: int) -> RankView:
        groups = (
            GroupState(name="a", members="2-0", begun=first),
            GroupState(name="b", members="2-0", begun=second),
        )
        return replace(seen(rank, 0), groups=groups)

    finding = explain_hang([crossed(0, 2, 1), crossed(1, 1, 2)], AFTER_S)
    assert finding is not None
    assert (finding.kind, finding.ranks) == (HangKind.CROSSED, (0, 1))
    assert "they began collectives in different orders" in finding.sentence


def test_a_rank_that_shows_nothing_makes_the_verdict_weaker() -> None:
    silent = RankView(rank=2, host="h1", step=8, still_s=7.0)
    finding = explain_hang([seen(0, 5), seen(1, 5), silent], AFTER_S)
    assert finding is not None
    assert not finding.is_accusation


# --------------------------------------------------------------------------------------------------- phases


def stack(*calls: str) -> str:
    lines = [f'  File "{call.partition(":")[0]}", line 7 in {call.partition(":")[2]}' for call in calls]
    other = 'Thread 0x01 (most recent call first):\n  File "/x/threading.py", line 3 in wait\n\n'
    return other + "Current thread 0x02 (most recent call first):\n" + "\n".join(lines) + "\n"


SITE = "/v/lib/python3.11/site-packages"


@pytest.mark.parametrize(
    ("calls", "phase"),
    [
        (
            [f"{SITE}/torch/distributed/distributed_c10d.py:all_reduce", "/j/train.py:main"],
            P.COLLECTIVE,
        ),
        (["/j/train.py:main"], P.OTHER),
        ([f"{SITE}/torch/autograd/graph.py:_engine_run_backward", "/j/train.py:main"], P.BACKWARD),
        (["/j/data.py:__getitem__", f"{SITE}/torch/utils/data/_utils/fetch.py:fetch"], P.DATA),
        ([f"{SITE}/torch/nn/modules/linear.py:forward", "/j/train.py:main"], P.FORWARD),
        (["/usr/lib/python3.11/threading.py:wait", "/j/train.py:evaluate"], P.EVALUATION),
        (["/j/train.py:score", "/j/train.py:validation_step", "/j/train.py:main"], P.EVALUATION),
        (["/j/train.py:retrieval"], P.OTHER),
        # All of training may be below a function of such a name.
        ([f"{SITE}/torch/nn/modules/linear.py:forward", "/j/train.py:evaluate"], P.FORWARD),
        ([f"{SITE}/torch/utils/data/dataloader.py:__next__", "/j/train.py:evaluate"], P.DATA),
        (["/j/train.py:train_and_evaluate", "/j/train.py:main"], P.OTHER),
        (["/j/train.py:take", "/j/train.py:generate_and_pretrain"], P.OTHER),
        ([f"{SITE}/torch/serialization.py:save", "/j/train.py:main"], P.CHECKPOINT),
        (
            [f"{SITE}/torch/fx/a.py:run", f"{SITE}/torch/_dynamo/convert_frame.py:compile"],
            P.COMPILATION,
        ),
        ([f"{SITE}/torch/nn/a.py:forward", f"{SITE}/torch/_dynamo/eval_frame.py:fn"], P.FORWARD),
        ([f"{SITE}/torch/optim/adamw.py:step", "/j/train.py:main"], P.OPTIMIZER),
        (
            [
                f"{SITE}/torch/distributed/distributed_c10d.py:gather_object",
                f"{SITE}/torch/distributed/checkpoint/state_dict_saver.py:save",
            ],
            P.COLLECTIVE,
        ),
        (
            ["/usr/lib/python3.11/pdb.py:interaction", "/usr/lib/python3.11/bdb.py:f", "/j/train.py:f"],
            P.PERSON,
        ),
        ([f"{SITE}/debugpy/_vendored/pydevd/pydevd.py:wait", "/j/train.py:main"], P.PERSON),
        (["/j/train.py:main", "/usr/lib/python3.11/bdb.py:run", "/usr/lib/python3.11/pdb.py:main"], P.OTHER),
        ([], P.UNKNOWN),
    ],
)
def test_a_stack_tells_what_a_rank_is_in(calls: list[str], phase: RankPhase) -> None:
    frames = main_thread(stack(*calls))
    assert phase_of(frames) is phase
    own = [call for call in calls if call.startswith("/j/")]
    if own:
        file, _, function = own[0].partition(":")
        assert telling_frame(frames) == f"{file.removeprefix('/j/')}:7 in {function}"


THREADING = "/usr/lib/python3.11/threading.py"


@pytest.mark.parametrize(
    ("calls", "joins"),
    [
        (["/j/train.py:main"], False),
        ([f"{THREADING}:wait", "/j/train.py:main"], False),  # what a lock of its own may wait for, too
        ([f"{THREADING}:wait", f"{SITE}/db/client.py:get", "/j/train.py:main"], True),
        ([f"{SITE}/db/client.py:get", "/j/train.py:main"], False),  # a plain lock
        ([f"{THREADING}:__enter__", f"{SITE}/db/client.py:get", "/j/train.py:main"], False),
        ([f"{THREADING}:wait", "/j/train.py:main", f"{SITE}/lightning/fit.py:fit"], False),
        ([f"{THREADING}:join", "/j/train.py:main"], True),
        (["/usr/lib/python3.11/queue.py:get", "/j/train.py:main"], True),
    ],
)
def test_a_main_thread_waits_for_another_one_where_its_library_or_a_result_says_so(
    calls: list[str], joins: bool
) -> None:
    assert joins_threads(main_thread(stack(*calls))) is joins


# ------------------------------------------------------------------------------------------------- times


def times_of(*seconds: float, text: str = "auto") -> HangTimes:
    times = HangTimes(HangTimeout.parse(text))
    for step, took in enumerate(seconds):
        times.learn(took, step)
    return times


def test_ranks_are_looked_at_and_ended_after_what_is_long_for_this_job() -> None:
    times = times_of(*[1.0] * 99, 60.0)
    assert (times.p99_s, times.look_s, times.accuse_s) == (1.0, LOOK_S, ACCUSE_S)
    assert times.act_s(certain=True) == times.act_s(certain=True, stopped=True) == ACT_S
    times = times_of(*[1.0] * 99, 400.0)
    # It went on after such a pause: only a stopped rank does not.
    assert times.act_s(certain=True) == 800.0
    assert times.act_s(certain=True, stopped=True) == ACT_S
    times = times_of(*[600.0] * 5)
    assert times.look_s == times.accuse_s == 2.5 * 600
    assert times.act_s(certain=True) == 8 * 600
    assert times.act_s(certain=False) == math.inf


@pytest.mark.parametrize("step_s", [0.1, 30.0, 200.0, 320.0, 900.0])
def test_a_second_step_that_takes_as_long_as_the_first_one_is_never_ended(step_s: float) -> None:
    times = times_of()
    for _ in range(2):  # the attempt after a restart begins with what is known of the one before
        times.learn_first(step_s + 4.0)
        assert times.look_s > step_s
        assert times.act_s(certain=True) >= max(2 * step_s, FIRST_ACT_S)
    times.learn(step_s, 1)
    assert times.act_s(certain=True) >= FIRST_ACT_S
    times.learn(step_s, 2)
    assert (times.usual_s, times.act_s(certain=True)) == (step_s, max(ACT_S, 8 * step_s))


def test_a_step_that_is_reported_at_once_says_nothing_of_those_that_follow() -> None:
    times = times_of()
    times.learn_first(1.0)  # the one that was restored
    assert times.act_s(certain=True) == FIRST_ACT_S


@pytest.mark.parametrize("certain", [True, False])
def test_a_number_of_seconds_counts_from_the_first_step_on(certain: bool) -> None:
    times = times_of(*[0.02] * 9, text="10")
    assert times.act_s(certain=certain) == 10.0
    assert times.act_s(certain=certain, started=False) == FIRST_ACT_S
    assert times.act_s(certain=True, stopped=True, started=False) == 10.0
    assert times_of(text="3600").act_s(certain=certain, started=False) == 3600.0
    assert times_of(text="off").act_s(certain=certain, started=False) == math.inf


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon", ""])
def test_a_timeout_that_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--hang-timeout-s must be auto, off or a number"):
        HangTimeout.parse(text)
