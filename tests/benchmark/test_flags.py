# SPDX-License-Identifier: Apache-2.0
"""The benchmark's flags: good defaults, and every refusal before anything heavy is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import flags
import pytest

from resiliency.errors import ConfigError
from resiliency.model import MODELS, ParallelLayout
from resiliency.testing import warm
from resiliency.testing.faults import Fault, FaultKind

from .conftest import BENCHMARK, LAUNCHER_VARIABLES

SAVING = ("--persistent-ckpt-dir=ckpt", "--persistent-ckpt-interval=10")
LOCAL = ("--local-ckpt-dir=local", "--local-ckpt-interval=10")


@pytest.fixture(autouse=True)
def _started_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """``started(hosts, ranks_per_host)``: what a launcher tells its workers."""

    def start(hosts: int, ranks_per_host: int) -> None:
        monkeypatch.setenv("WORLD_SIZE", str(hosts * ranks_per_host))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks_per_host))

    return start


def test_without_flags_the_36m_model_trains_on_one_cpu_rank_and_saves_nothing() -> None:
    workload = flags.parse([])
    assert workload.size is MODELS["36M"]
    assert (workload.device, workload.world_size, workload.layout) == ("cpu", 1, ParallelLayout())
    assert workload.global_batch_size == 2
    assert workload.job_name == "benchmark"
    assert workload.checkpoint_dir is None
    assert workload.faults == workload.random_faults == ()
    assert workload.log_interval_steps == 1


def test_a_cuda_device_is_taken_where_one_works_and_logs_less_often() -> None:
    workload = flags.parse([], cuda_devices=1)
    assert (workload.device, workload.log_interval_steps) == ("cuda", 10)
    assert flags.parse(["--device=cpu"], cuda_devices=1).device == "cpu"


def test_the_launchers_ranks_are_counted_and_fed(started: Callable[[int, int], None]) -> None:
    started(2, 4)
    workload = flags.parse(["--model=tiny", "--tensor-parallel=2", "--num-nodes=2", "--num-gpus=4"])
    assert (workload.num_nodes, workload.ranks_per_node, workload.world_size) == (2, 4, 8)
    assert workload.global_batch_size == 8  # 4 replicas


@pytest.mark.parametrize("size", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("replicas", [1, 3])
def test_every_model_has_a_default_batch_that_its_own_layout_can_run(
    size: object, replicas: int, started: Callable[[int, int], None]
) -> None:
    assert isinstance(size, type(MODELS["tiny"]))
    started(replicas, size.layout.ranks_per_replica)
    workload = flags.parse([f"--model={size.name}"], cuda_devices=8)
    microbatches = workload.global_batch_size // replicas
    assert workload.global_batch_size % replicas == 0
    # Megatron's interleaved schedule raises otherwise, minutes after the start.
    assert size.layout.virtual_pipeline is None or microbatches % size.layout.pipeline == 0


def test_another_pipeline_size_drops_the_chunks_that_were_chosen_for_the_models_own(
    started: Callable[[int, int], None],
) -> None:
    started(1, 8)
    layout = flags.parse(["--model=70B", "--pipeline-parallel=1"], cuda_devices=8).layout
    assert layout == ParallelLayout(tensor=4, pipeline=1, context=2)


def test_checkpoints_go_below_the_jobs_name() -> None:
    workload = flags.parse([*SAVING, "--job-name=j", "--enable-async-ckpt", "--topk-ckpt=3"])
    assert workload.checkpoint_dir == Path("ckpt/j/checkpoint")
    assert (workload.persistent_ckpt_interval, workload.topk_ckpt) == (10, 3)
    assert workload.save_mode is flags.SaveMode.ASYNC
    assert flags.parse([*SAVING, "--enable-optimized-async-ckpt"]).save_mode is flags.SaveMode.PROCESS
    assert flags.parse([]).save_mode is flags.SaveMode.SYNC


def test_each_tier_has_its_own_directory_below_the_jobs_name() -> None:
    workload = flags.parse([*SAVING, *LOCAL, "--job-name=j"])
    assert (workload.checkpoint_dir, workload.local_checkpoint_dir) == (
        Path("ckpt/j/checkpoint"),
        Path("local/j/checkpoint"),
    )
    assert (workload.persistent_ckpt_interval, workload.local_ckpt_interval) == (10, 10)
    assert flags.parse([*LOCAL, "--enable-high-scale-ckpt"]).local_checkpoint_dir == Path("local")
    only_local = flags.parse(LOCAL)
    assert (only_local.checkpoint_dir, only_local.saves) == (None, True)
    assert not flags.parse([]).saves


@pytest.mark.parametrize(
    ("hosts", "argv", "copies"),
    [
        (1, LOCAL, 0),  # there is nobody to keep one
        (2, LOCAL, 1),
        (4, [*LOCAL, "--local-ckpt-replicas=3"], 3),
        (4, [*LOCAL, "--local-ckpt-replicas=0"], 0),
        (4, [*LOCAL, "--enable-high-scale-ckpt"], 0),  # GKE's replicator makes them
        (4, [], 0),
    ],
)
def test_with_several_hosts_local_checkpoints_are_copied_to_another(
    hosts: int, argv: list[str], copies: int, started: Callable[[int, int], None]
) -> None:
    started(hosts, 1)
    assert flags.parse(["--model=tiny", *argv]).local_ckpt_replicas == copies


def test_ranks_stand_in_for_each_other_where_the_optimizer_is_replicated(
    started: Callable[[int, int], None],
) -> None:
    started(2, 2)
    both = ("--num-optimizer-replicas=2", "--enable-ckpt-load-replication")
    workload = flags.parse(["--model=tiny", *LOCAL, *both])
    assert (workload.optimizer_replicas, workload.load_replication) == (2, True)


def test_the_job_is_named_by_the_environment_unless_a_flag_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOB_IDENTIFIER", "from-env")
    assert flags.parse([]).job_name == "from-env"
    assert flags.parse(["--job-name=mine"]).job_name == "mine"


def test_several_faults_may_be_asked_for() -> None:
    wanted = ["--sim-fault-desc=rank_killed,step=5", "--sim-fault-desc=rank_hung,2,rank=0"]
    faults = flags.parse(wanted).faults
    assert faults[0] == Fault(kind=FaultKind.KILLED, step=5)
    assert (faults[1].kind, faults[1].rank) == (FaultKind.HUNG, 0)
    both = flags.parse([wanted[0], "--sim-fault-desc=random,20"])
    assert (both.faults, len(both.random_faults)) == (faults[:1], 100)


def test_heartbeats_are_sent_where_monitors_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_RANK_MONITOR_IPC_SOCKET", "somewhere")
    assert flags.parse(["--enable-fault-tolerance"]).fault_tolerance


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        # Halves of pairs.
        (["--persistent-ckpt-dir=d"], ["--persistent-ckpt-dir", "without --persistent-ckpt-interval"]),
        (["--persistent-ckpt-interval=5"], ["--persistent-ckpt-interval", "without --persistent-ckpt-dir"]),
        (["--local-ckpt-dir=d"], ["--local-ckpt-dir", "without --local-ckpt-interval"]),
        (["--local-ckpt-interval=5"], ["--local-ckpt-interval", "without --local-ckpt-dir"]),
        # Flags that need another.
        (["--enable-async-ckpt"], ["--enable-async-ckpt needs --persistent-ckpt-dir"]),
        (["--enable-dist-ckpt"], ["--enable-dist-ckpt needs --persistent-ckpt-dir"]),
        (["--enable-optimized-async-ckpt"], ["--enable-optimized-async-ckpt needs --persistent-ckpt-dir"]),
        (
            [*SAVING, "--enable-async-ckpt", "--enable-optimized-async-ckpt"],
            ["--enable-async-ckpt and --enable-optimized-async-ckpt", "Give one of them"],
        ),
        (["--enable-high-scale-ckpt"], ["--enable-high-scale-ckpt needs --local-ckpt-dir"]),
        (
            ["--enable-ckpt-load-replication", *LOCAL],
            ["--enable-ckpt-load-replication needs", "--num-optimizer-replicas >= 2"],
        ),
        (["--enable-fault-tolerance"], ["--enable-fault-tolerance needs", "launcher.py"]),
        (["--enable-comm-overlap"], ["--enable-comm-overlap needs CUDA"]),
        (["--enable-ckpt-load-replication"], ["--enable-ckpt-load-replication needs --local-ckpt-dir"]),
        (["--local-ckpt-replicas=1"], ["--local-ckpt-replicas needs --local-ckpt-dir"]),
        ([*LOCAL, "--enable-async-ckpt"], ["--enable-async-ckpt needs --persistent-ckpt-dir"]),
        # Copies of the optimizer, and of checkpoints on other hosts.
        (["--num-optimizer-replicas=2"], ["1 data-parallel replicas do not divide into 2"]),
        ([*LOCAL, "--local-ckpt-replicas=1"], ["--local-ckpt-replicas 1 needs 2 hosts", "started 1"]),
        ([*LOCAL, "--local-ckpt-replicas=-1"], ["--local-ckpt-replicas must not be negative"]),
        ([*LOCAL, "--local-ckpt-replicas=1", "--enable-high-scale-ckpt"], ["would both copy"]),
        (
            ["--local-ckpt-dir=ckpt", LOCAL[1], *SAVING],
            ["--local-ckpt-dir and --persistent-ckpt-dir are both ckpt"],
        ),
        # Layouts.
        (["--device=cuda"], ["--device cuda: no CUDA device works", "--device cpu"]),
        (["--context-parallel=2"], ["context parallelism of 2", "--context-parallel 1"]),
        (["--model=8B"], ["context parallelism of 2", "--context-parallel 1"]),
        (["--tensor-parallel=0"], ["--tensor-parallel must be at least 1, found 0"]),
        (["--tensor-parallel=2"], ["2 ranks and 1 is not a multiple"]),
        (["--num-gpus=8"], ["--num-gpus 8, but the launcher started 1", "--nproc-per-node"]),
        (["--num-nodes=2"], ["--num-nodes 2, but the launcher started 1", "--nnodes"]),
        # Numbers.
        (["--max-steps=0"], ["--max-steps must be at least 1, found 0"]),
        (["--global-bs=0"], ["--global-bs must be at least 1, found 0"]),
        (["--val-check-interval=0"], ["--val-check-interval must be at least 1"]),
        (["--ckpt-threads-per-rank=0"], ["--ckpt-threads-per-rank must be at least 1"]),
        (["--num-optimizer-replicas=0"], ["--num-optimizer-replicas must be at least 1, found 0"]),
        (["--log-interval=0"], ["--log-interval must be at least 1"]),
        ([SAVING[0], "--persistent-ckpt-interval=0"], ["--persistent-ckpt-interval must be at least 1"]),
        (["--profile-ckpt-interval=2"], ["--profile-ckpt-interval must be at least 3, found 2"]),
        (["--max-runtime=-1"], ["--max-runtime must not be negative"]),
        (["--limit-val-batches=-1"], ["--limit-val-batches must not be negative"]),
        (["--topk-ckpt=0"], ["--topk-ckpt 0 would keep no checkpoint", "-1 for all"]),
        (["--topk-ckpt=-2"], ["--topk-ckpt -2"]),
        # Names and files.
        (["--job-name="], ["--job-name ''"]),
        (["--job-name=.."], ["--job-name '..'"]),
        (["--job-name=a/b"], ["--job-name 'a/b'"]),
        (["--tokenizer-path=/no/such.model"], ["--tokenizer-path /no/such.model", "SentencePiece"]),
        (["--tokenizer-path=/"], ["--tokenizer-path /", "no such file"]),
        (["--sim-fault-desc=rank_tired,5"], ["rank_tired"]),
        (["--sim-fault-desc=random"], ["random", "must be seconds"]),
        (["--sim-fault-desc=random,0"], ["--sim-fault-desc random,0", "above 0"]),
        (["--sim-fault-desc=random,often"], ["must be seconds, found 'often'"]),
        (["--sim-fault-desc=random,5,rank=1"], ["random,SECONDS[,seed=N][,duration=S][,disk_dir=DIR]"]),
        (["--sim-fault-desc=random,5,duration=0"], ["--sim-fault-desc random,5,duration=0", "above 0"]),
        (["--sim-fault-desc=random,5,seed=1,seed=2"], ["random,SECONDS[,seed=N][,duration=S]"]),
        (["--sim-fault-desc=random,5,7"], ["random,SECONDS[,seed=N][,duration=S]"]),
    ],
    ids=lambda value: " ".join(value) if value and value[0].startswith("--") else "",
)
def test_what_cannot_work_is_refused_by_name_and_with_a_way_out(argv: list[str], told: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        flags.parse(argv)
    for expected in told:
        assert expected in str(caught.value)


def test_a_batch_that_does_not_divide_over_the_replicas_is_refused_with_one_that_does(
    started: Callable[[int, int], None],
) -> None:
    started(1, 4)
    with pytest.raises(ConfigError, match=r"global batch size 6 .* 4 replicas.*multiple of 4"):
        flags.parse(["--model=tiny", "--global-bs=6"])


def test_a_checkpoint_directory_is_created_and_left_empty(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "b"
    flags.check_checkpoint_dir(directory, need_bytes=1)
    flags.check_checkpoint_dir(directory, need_bytes=1)
    assert list(directory.iterdir()) == []


def test_the_url_of_an_object_store_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        flags.parse(["--persistent-ckpt-dir=gs://bucket/run", "--persistent-ckpt-interval=10"])
    assert "the URL" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["a file", "below a file", "read-only"])
def test_a_directory_that_cannot_be_written_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    # Below /proc nobody can create anything, not even root.
    directory = {
        "a file": tmp_path / "file",
        "below a file": tmp_path / "file" / "below",
        "read-only": Path("/proc/checkpoints"),
    }[kind]
    with pytest.raises(ConfigError, match="cannot be written") as caught:
        flags.check_checkpoint_dir(directory, need_bytes=1)
    assert "--persistent-ckpt-dir" in str(caught.value)
    assert str(directory) in str(caught.value)


def test_a_disk_too_small_for_one_checkpoint_is_refused_with_both_sizes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"bytes free.*1,000,000,000,000,000,000") as caught:
        flags.check_checkpoint_dir(tmp_path, need_bytes=10**18)
    assert "--persistent-ckpt-dir" in str(caught.value)


def run_script(*argv: str, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """The real script, as a rank of its own; the caller's environment has no launcher in it."""
    command = [sys.executable, *argv]
    merged = {**os.environ, **(env or {})}
    return warm.run(command, cwd=cwd, env=merged, timeout=120)


def test_help_comes_at_once_because_nothing_heavy_is_imported(tmp_path: Path) -> None:
    done = run_script("-X", "importtime", str(BENCHMARK / "benchmark.py"), "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "--persistent-ckpt-dir" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "resiliency.model" in imported  # the list is readable
    assert imported.isdisjoint({"torch", "numpy", "nemo", "megatron", "lightning", "psutil"})
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_flag_exits_with_2_and_the_usage(tmp_path: Path) -> None:
    done = run_script(str(BENCHMARK / "benchmark.py"), "--no-such-flag", cwd=tmp_path)
    assert done.returncode == 2
    assert "usage: benchmark.py" in done.stderr
    assert "--no-such-flag" in done.stderr


@pytest.mark.parametrize(
    ("argv", "env", "told"),
    [
        (["--device=cpu", "--topk-ckpt=0"], {}, "--topk-ckpt 0"),
        (["--device=cpu", "--log-dir=/proc/logs"], {}, "--log-dir"),
        (
            ["--device=cpu", "--persistent-ckpt-dir=/proc/x", "--persistent-ckpt-interval=5"],
            {},
            "--persistent-ckpt-dir",
        ),
        (["--device=cpu"], {"RANK": "first"}, "RANK"),
    ],
    ids=["flag", "log directory", "checkpoint directory", "environment"],
)
def test_the_script_says_in_one_line_what_cannot_work_and_leaves_nothing(
    argv: list[str], env: dict[str, str], told: str, tmp_path: Path
) -> None:
    done = run_script(str(BENCHMARK / "benchmark.py"), *argv, cwd=tmp_path, env=env)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("benchmark.py: error: ")
    assert told in line
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_of_the_ranks_of_a_host_only_the_first_says_it(tmp_path: Path) -> None:
    env = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    done = run_script(str(BENCHMARK / "benchmark.py"), "--device=cpu", "--topk-ckpt=0", cwd=tmp_path, env=env)
    assert (done.returncode, done.stderr) == (2, "")


def test_a_fault_for_a_rank_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="--sim-fault-desc rank_killed,step=5,rank=7: there is no rank 7"):
        flags.parse(["--device=cpu", "--model=tiny", "--sim-fault-desc=rank_killed,step=5,rank=7"])
