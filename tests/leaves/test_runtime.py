# SPDX-License-Identifier: Apache-2.0
"""A process knows who it is from its environment, and when the kernel created it."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterable
from datetime import datetime, timedelta, timezone

import psutil
import pytest

from resiliency import runtime
from resiliency.errors import ConfigError, LossNotFinite
from resiliency.runtime import (
    ON_NAN_ENV,
    RunInfo,
    check_loss,
    name_ranks,
    no_garbage_collection,
    process_start_time,
)

WORKER = {
    "RANK": "9",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "16",
    "LOCAL_WORLD_SIZE": "8",
    "GROUP_RANK": "1",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_RUN_ID": "elastic-id",
    "NODE_NAME": "host-b",
    "RESILIENCY_RUN_DIR": "/runs/7",
}


def test_a_worker_reads_what_the_launcher_set() -> None:
    assert RunInfo.from_env(WORKER) == RunInfo(
        job_name="elastic-id",
        host="host-b",
        node_rank=1,
        rank=9,
        local_rank=1,
        world_size=16,
        local_world_size=8,
        attempt=2,
        run_dir="/runs/7",
    )


def test_a_process_that_is_no_worker_has_no_rank_and_no_attempt() -> None:
    info = RunInfo.from_env({})
    assert (info.rank, info.local_rank, info.attempt, info.world_size) == (None, None, None, 1)
    assert (info.job_name, info.run_dir, info.node_rank) == ("local", ".", 0)
    assert info.host
    assert info.is_first_rank


def test_a_host_says_where_it_is_reached_and_what_it_fails_together_with() -> None:
    env = {"RESILIENCY_FAILURE_DOMAINS": " rack=r7 ,block = b1,", "RESILIENCY_PEER_ADDRESS": "10.0.0.3"}
    info = RunInfo.from_env(env)
    assert info.domains == (("rack", "r7"), ("block", "b1"))
    assert info.peer_address == "10.0.0.3"
    assert (RunInfo.from_env({}).domains, RunInfo.from_env({}).peer_address) == ((), "")


@pytest.mark.parametrize("text", ["rack", "rack=", "=r7", "rack=a,rack=b"])
def test_failure_domains_that_cannot_be_read_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"must look like rack=r7,block=b1"):
        RunInfo.from_env({"RESILIENCY_FAILURE_DOMAINS": text})


@pytest.mark.parametrize(
    ("env", "name"),
    [
        ({"JOB_IDENTIFIER": "a", "JOB_NAME": "b", "TORCHELASTIC_RUN_ID": "c"}, "a"),
        ({"JOB_NAME": "b", "TORCHELASTIC_RUN_ID": "c"}, "b"),
        ({"JOB_IDENTIFIER": "", "TORCHELASTIC_RUN_ID": "c"}, "c"),
    ],
)
def test_the_job_is_named_by_the_first_variable_that_says_something(env: dict[str, str], name: str) -> None:
    assert RunInfo.from_env(env).job_name == name


def test_a_worker_of_a_plain_launcher_is_in_its_first_attempt() -> None:
    info = RunInfo.from_env({"RANK": "0", "NODE_RANK": "3"})
    assert (info.attempt, info.node_rank, info.is_first_rank) == (0, 3, True)
    assert not RunInfo.from_env({"RANK": "1"}).is_first_rank


NUMBERS = [name for name, text in WORKER.items() if text.isdigit()]


@pytest.mark.parametrize("variable", [*NUMBERS, "NODE_RANK"])
@pytest.mark.parametrize("text", ["three", "1.5", "0x2"])
def test_a_number_that_is_none_is_refused_with_its_name_and_text(variable: str, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"{variable} must be a whole number, found '{text}'") as caught:
        RunInfo.from_env({**WORKER, variable: text})
    assert caught.value.fields == {"variable": variable}


def test_a_loss_that_is_not_finite_ends_the_rank_only_where_the_launcher_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_loss(float("nan"), step=7)
    monkeypatch.setenv(ON_NAN_ENV, "ignore")
    check_loss(float("inf"), step=7)
    monkeypatch.setenv(ON_NAN_ENV, "stop")
    check_loss(3.5, step=7)
    with pytest.raises(LossNotFinite, match="the loss of step 7 is nan"):
        check_loss(float("nan"), step=7)


def test_the_start_of_this_process_is_the_kernels() -> None:
    expected = datetime.fromtimestamp(psutil.Process().create_time(), timezone.utc)
    assert abs(process_start_time() - expected) < timedelta(seconds=5)
    assert process_start_time().utcoffset() == timedelta(0)


def test_the_start_of_a_young_process_lies_between_its_launch_and_its_first_statement() -> None:
    code = (
        "from datetime import datetime, timezone; first = datetime.now(timezone.utc);"
        "from resiliency.runtime import process_start_time;"
        "print(process_start_time().isoformat(), first.isoformat())"
    )

    def is_between() -> bool:
        launched = datetime.now(timezone.utc)
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        start, first = map(datetime.fromisoformat, out.split())
        # The kernel counts in ticks of 10 ms, and tells the uptime in the same.
        return launched - timedelta(seconds=0.05) <= start <= first + timedelta(seconds=0.05)

    # A busy machine may stop a process between its looks at two clocks; not all of them.
    assert any(is_between() for _ in range(5))


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], "ranks none"),
        ([3], "rank 3"),
        ([1, 0], "ranks 0-1"),
        ([9, 5, 0, 1, 2, 3, 4, 5], "ranks 0-5, 9"),
        (range(0, 2000, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 992 more"),
        (range(16384), "ranks 0-16383"),
    ],
)
def test_ranks_are_named_shortly(ranks: Iterable[int], text: str) -> None:
    assert name_ranks(ranks) == text


def test_collections_begin_again_once_the_last_of_several_threads_needs_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A restore that another test of this process left hanging counts for nothing.
    monkeypatch.setattr(runtime, "_without_collection", 0)
    gc.enable()
    first, second = no_garbage_collection(), no_garbage_collection()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()
