# SPDX-License-Identifier: Apache-2.0
"""What the benchmark's flags mean, and every check that needs no NeMo.

A run that cannot work is refused here, before anything heavy is imported and before any file of an
earlier run is touched.  `Workload` is what the rest of the benchmark is handed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from command_line import build_parser
from random_faults import RandomFault, draw_faults

from resiliency.errors import ConfigError
from resiliency.model import MODELS, ModelSize, ParallelLayout, check_layout
from resiliency.testing.faults import Fault


class SaveMode(Enum):
    """Who writes a persistent checkpoint, while training waits or goes on.

    Local ones are always written by the checkpoint process of the host.
    """

    SYNC = "training itself"
    ASYNC = "NeMo's background processes"
    PROCESS = "the checkpoint process of the host"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A checked set of flags: everything that one rank needs to know about the run."""

    size: ModelSize
    layout: ParallelLayout
    device: str
    num_nodes: int
    ranks_per_node: int
    global_batch_size: int
    max_steps: int
    max_runtime_s: int
    termination_deadline_s: float
    val_check_interval: int
    limit_val_batches: int
    job_name: str
    log_dir: Path
    log_to_remote_storage: bool
    log_level: str
    log_interval_steps: int
    tokenizer_path: Path | None
    persistent_ckpt_dir: Path | None
    persistent_ckpt_interval: int | None
    local_ckpt_dir: Path | None
    local_ckpt_interval: int | None
    local_ckpt_replicas: int
    optimizer_replicas: int
    load_replication: bool
    high_scale: bool
    profile_ckpt_interval: int | None
    trace_name: str
    topk_ckpt: int
    ckpt_threads_per_rank: int
    dist_ckpt: bool
    save_mode: SaveMode
    comm_overlap: bool
    gc: bool
    fault_tolerance: bool
    tensorboard: bool
    faults: tuple[Fault, ...]
    random_faults: tuple[RandomFault, ...]

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.ranks_per_node

    @property
    def checkpoint_dir(self) -> Path | None:
        """``<persistent-ckpt-dir>/<job-name>/checkpoint``, as the checkpoint cleaner expects it."""
        return self._below(self.persistent_ckpt_dir)

    @property
    def local_checkpoint_dir(self) -> Path | None:
        """``<local-ckpt-dir>/<job-name>/checkpoint``, on this host; with the hand-over its volume itself."""
        return self.local_ckpt_dir if self.high_scale else self._below(self.local_ckpt_dir)

    @property
    def saves(self) -> bool:
        return self.persistent_ckpt_dir is not None or self.local_ckpt_dir is not None

    @property
    def local_bytes(self) -> int:
        """Upper estimate of one local checkpoint of this host, with the copies that it keeps for others.

        Placement may give a host one copy more than its share.
        """
        one = self.size.checkpoint_bytes() * self.optimizer_replicas // self.num_nodes
        copies = min(self.local_ckpt_replicas + 1, self.num_nodes - 1) if self.local_ckpt_replicas else 0
        return one * (1 + copies)

    def _below(self, root: Path | None) -> Path | None:
        return None if root is None else root / self.job_name / "checkpoint"


def parse(argv: Sequence[str] | None = None, *, cuda_devices: int = 0) -> Workload:
    """Read and check the flags.

    Args:
        cuda_devices: how many CUDA devices work on this host.
    Raises:
        ConfigError: a combination that cannot work; the message names the flag.
        SystemExit: ``--help``, or a flag that argparse refuses.
    """
    args = build_parser().parse_args(argv)
    _check_numbers(args)
    _check_checkpoint_flags(args)
    _check_local_flags(args)
    device = _device(args.device, cuda_devices)
    num_nodes, ranks_per_node = _started_ranks(args, os.environ)
    world_size = num_nodes * ranks_per_node
    size = MODELS[args.model]
    layout = _layout(args, size, on_cpu=device == "cpu")
    replicas = check_layout(size, layout, world_size=world_size)
    global_batch_size = args.global_bs or replicas * _default_microbatches(layout)
    check_layout(
        size,
        layout,
        world_size=world_size,
        global_batch_size=global_batch_size,
        optimizer_replicas=args.num_optimizer_replicas,
    )
    if args.enable_comm_overlap and device == "cpu":
        raise ConfigError("--enable-comm-overlap needs CUDA devices.", hint="Drop it with --device cpu.")
    return Workload(
        size=size,
        layout=layout,
        device=device,
        num_nodes=num_nodes,
        ranks_per_node=ranks_per_node,
        global_batch_size=global_batch_size,
        max_steps=args.max_steps,
        max_runtime_s=args.max_runtime,
        termination_deadline_s=args.termination_deadline_s,
        val_check_interval=args.val_check_interval,
        limit_val_batches=args.limit_val_batches,
        job_name=_job_name(args.job_name),
        log_dir=args.log_dir,
        log_to_remote_storage=args.log_to_remote_storage,
        log_level=args.log_level,
        log_interval_steps=args.log_interval or (1 if device == "cpu" else 10),
        tokenizer_path=_existing_file("--tokenizer-path", args.tokenizer_path),
        persistent_ckpt_dir=args.persistent_ckpt_dir,
        persistent_ckpt_interval=args.persistent_ckpt_interval,
        local_ckpt_dir=args.local_ckpt_dir,
        local_ckpt_interval=args.local_ckpt_interval,
        local_ckpt_replicas=_local_replicas(args, num_nodes),
        optimizer_replicas=args.num_optimizer_replicas,
        load_replication=args.enable_ckpt_load_replication,
        high_scale=args.enable_high_scale_ckpt,
        profile_ckpt_interval=args.profile_ckpt_interval,
        trace_name=args.trace_name,
        topk_ckpt=args.topk_ckpt,
        ckpt_threads_per_rank=args.ckpt_threads_per_rank,
        dist_ckpt=args.enable_dist_ckpt,
        save_mode=_save_mode(args),
        comm_overlap=args.enable_comm_overlap,
        gc=args.enable_gc,
        fault_tolerance=_fault_tolerance(args.enable_fault_tolerance, os.environ),
        tensorboard=args.enable_tensorboard,
        faults=_faults([text for text in args.sim_fault_desc if not _is_random(text)], world_size),
        random_faults=_random_faults([text for text in args.sim_fault_desc if _is_random(text)], world_size),
    )


def _check_local_flags(args: argparse.Namespace) -> None:
    _both_or_neither(args, "local_ckpt_dir", "local_ckpt_interval")
    for flag in ("enable_ckpt_load_replication", "enable_high_scale_ckpt", "local_ckpt_replicas"):
        if getattr(args, flag) and args.local_ckpt_dir is None:
            raise ConfigError(
                f"--{flag.replace('_', '-')} needs --local-ckpt-dir and --local-ckpt-interval.",
                hint="Name a directory in the memory or on the disk of each host.",
                flag="--local-ckpt-dir",
            )
    if args.enable_ckpt_load_replication and args.num_optimizer_replicas < 2:
        raise ConfigError(
            "--enable-ckpt-load-replication needs --num-optimizer-replicas >= 2: with one copy of the"
            " optimizer no rank can stand in for another.",
            hint="Replicate the optimizer, or leave the flag out: shards come back from other hosts anyway"
            " where --local-ckpt-replicas put them.",
            flag="--num-optimizer-replicas",
        )
    same = args.local_ckpt_dir is not None and args.local_ckpt_dir == args.persistent_ckpt_dir
    if same:
        raise ConfigError(
            f"--local-ckpt-dir and --persistent-ckpt-dir are both {args.local_ckpt_dir}.",
            hint="The first is each host's own, the second is seen by all hosts.",
            flag="--local-ckpt-dir",
        )


def _local_replicas(args: argparse.Namespace, hosts: int) -> int:
    """Copies of each local checkpoint on other hosts."""
    wanted: int | None = args.local_ckpt_replicas
    if args.local_ckpt_dir is None:
        return 0
    if args.enable_high_scale_ckpt and wanted:
        raise ConfigError(
            "--local-ckpt-replicas and --enable-high-scale-ckpt would both copy checkpoints to other hosts.",
            hint="With the second GKE's replicator does it: leave --local-ckpt-replicas out.",
            flag="--local-ckpt-replicas",
        )
    if wanted is None:
        return int(hosts > 1 and not args.enable_high_scale_ckpt)
    if wanted >= hosts:
        raise ConfigError(
            f"--local-ckpt-replicas {wanted} needs {wanted + 1} hosts, the launcher started {hosts}.",
            hint="Copies go to other hosts: choose fewer than there are hosts, or 0 for none.",
            flag="--local-ckpt-replicas",
        )
    return wanted


def _check_checkpoint_flags(args: argparse.Namespace) -> None:
    _both_or_neither(args, "persistent_ckpt_dir", "persistent_ckpt_interval")
    for flag in ("enable_async_ckpt", "enable_optimized_async_ckpt", "enable_dist_ckpt"):
        if getattr(args, flag) and args.persistent_ckpt_dir is None:
            raise ConfigError(
                f"--{flag.replace('_', '-')} needs --persistent-ckpt-dir: nothing would be saved there.",
                hint="Local checkpoints are always written by the checkpoint process.",
            )
    if args.topk_ckpt == 0 or args.topk_ckpt < -1:
        raise ConfigError(
            f"--topk-ckpt {args.topk_ckpt} would keep no checkpoint.",
            hint="Give 1 or more, or -1 for all.",
            flag="--topk-ckpt",
        )


def _save_mode(args: argparse.Namespace) -> SaveMode:
    if args.enable_async_ckpt and args.enable_optimized_async_ckpt:
        raise ConfigError(
            "--enable-async-ckpt and --enable-optimized-async-ckpt are two ways to save in the background.",
            hint="Give one of them; the second holds training for less time.",
            flag="--enable-optimized-async-ckpt",
        )
    if args.enable_optimized_async_ckpt:
        return SaveMode.PROCESS
    return SaveMode.ASYNC if args.enable_async_ckpt else SaveMode.SYNC


def _both_or_neither(args: argparse.Namespace, first: str, second: str) -> None:
    values = {name: getattr(args, name) for name in (first, second)}
    given = [name for name, value in values.items() if value is not None]
    if len(given) == 1:
        flags = {name: "--" + name.replace("_", "-") for name in values}
        other = second if given[0] == first else first
        raise ConfigError(
            f"{flags[given[0]]} was given without {flags[other]}.",
            hint="Set both, or neither.",
            flag=flags[other],
        )


def _device(wanted: str, cuda_devices: int) -> str:
    if wanted == "cuda" and cuda_devices == 0:
        raise ConfigError(
            "--device cuda: no CUDA device works on this host.",
            hint="Check nvidia-smi and that torch was installed with CUDA, or use --device cpu.",
            flag="--device",
        )
    if wanted == "auto":
        return "cuda" if cuda_devices else "cpu"
    return wanted


def _started_ranks(args: argparse.Namespace, env: os._Environ[str]) -> tuple[int, int]:
    """(hosts, ranks per host): what the launcher started; the flags must agree with it."""
    ranks_per_node = int(env.get("LOCAL_WORLD_SIZE", "1"))
    num_nodes = int(env.get("WORLD_SIZE", "1")) // ranks_per_node
    for flag, given, started in (
        ("--num-nodes", args.num_nodes, num_nodes),
        ("--num-gpus", args.num_gpus, ranks_per_node),
    ):
        if given is not None and given != started:
            raise ConfigError(
                f"{flag} {given}, but the launcher started {started}.",
                hint="Leave the flag out, or start the launcher with --nnodes and --nproc-per-node to match.",
                flag=flag,
            )
    return num_nodes, ranks_per_node


def _layout(args: argparse.Namespace, size: ModelSize, *, on_cpu: bool) -> ParallelLayout:
    overrides = {
        name: value
        for name, value in (
            ("tensor", args.tensor_parallel),
            ("pipeline", args.pipeline_parallel),
            ("context", args.context_parallel),
        )
        if value is not None
    }
    for name, value in overrides.items():
        if value < 1:
            raise ConfigError(f"--{name}-parallel must be at least 1, found {value}.")
    layout = replace(size.layout, **overrides)
    if "pipeline" in overrides:
        # The number of chunks was chosen for the model's own number of stages.
        layout = replace(layout, virtual_pipeline=None)
    if on_cpu and layout.context > 1:
        raise ConfigError(
            f"context parallelism of {layout.context} needs Transformer Engine and CUDA.",
            hint="Add --context-parallel 1 with --device cpu.",
            flag="--context-parallel",
        )
    return layout


def _check_numbers(args: argparse.Namespace) -> None:
    positive = ("max_steps", "val_check_interval", "ckpt_threads_per_rank", "num_optimizer_replicas")
    optional = ("global_bs", "persistent_ckpt_interval", "local_ckpt_interval", "log_interval")
    for name in (*positive, *optional):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, found {value}.")
    for name in ("max_runtime", "limit_val_batches", "local_ckpt_replicas"):
        if (getattr(args, name) or 0) < 0:
            raise ConfigError(f"--{name.replace('_', '-')} must not be negative.")
    if not args.termination_deadline_s > 0:
        raise ConfigError(
            f"--termination-deadline-s must be positive, found {args.termination_deadline_s}.",
            flag="--termination-deadline-s",
        )
    if args.profile_ckpt_interval is not None and args.profile_ckpt_interval < 3:
        raise ConfigError(
            f"--profile-ckpt-interval must be at least 3, found {args.profile_ckpt_interval}: "
            "the two steps after a save are recorded too.",
            flag="--profile-ckpt-interval",
        )


def _is_random(text: str) -> bool:
    return text.partition(",")[0] == "random"


def _faults(texts: Sequence[str], world_size: int) -> tuple[Fault, ...]:
    faults = tuple(Fault.parse(text) for text in texts)
    for text, fault in zip(texts, faults, strict=True):
        if fault.rank is not None and fault.rank >= world_size:
            raise ConfigError(
                f"--sim-fault-desc {text}: there is no rank {fault.rank}, the launcher started "
                f"{world_size} ranks.",
                hint=f"Choose a rank from 0 to {world_size - 1}, or leave rank= out for the last one.",
                flag="--sim-fault-desc",
            )
    return faults


def _random_faults(texts: Sequence[str], world_size: int) -> tuple[RandomFault, ...]:
    return tuple(each for text in texts for each in draw_faults(text, world_size))


def _default_microbatches(layout: ParallelLayout) -> int:
    """Samples of one replica per step: the fewest that show accumulation and fill the pipeline."""
    return 2 if layout.virtual_pipeline is None else layout.pipeline


def _job_name(name: str) -> str:
    if not name or "/" in name or name in (".", ".."):
        raise ConfigError(f"--job-name {name!r} cannot name a directory.", flag="--job-name")
    return name


def _existing_file(flag: str, path: Path | None) -> Path | None:
    if path is not None and not path.is_file():
        raise ConfigError(
            f"{flag} {path}: there is no such file.",
            hint="Name a SentencePiece .model file, or leave the flag out for the built-in byte tokenizer.",
            flag=flag,
        )
    return path


def _fault_tolerance(wanted: bool, env: os._Environ[str]) -> bool:
    if wanted and "FT_RANK_MONITOR_IPC_SOCKET" not in env:
        raise ConfigError(
            "--enable-fault-tolerance needs NVRx's rank monitors, and none watches this process.",
            hint="Start the benchmark with launcher.py (or ft_launcher) instead of python or torchrun.",
            flag="--enable-fault-tolerance",
        )
    return wanted


def check_checkpoint_dir(directory: Path, need_bytes: int, flag: str = "--persistent-ckpt-dir") -> None:
    """Create `directory`, prove that it can be written, and that a checkpoint fits.

    Raises:
        ConfigError: names the directory and what is wrong with it.
    """
    free_bytes = check_writable(flag, directory)
    if free_bytes < need_bytes:
        raise ConfigError(
            f"{flag}: directory {directory} has {free_bytes:,} bytes free; one checkpoint of "
            f"this model needs about {need_bytes:,}.",
            hint="Free space or name another directory.",
            flag=flag,
            path=str(directory),
        )


def check_writable(flag: str, directory: Path) -> int:
    """Create `directory`, and prove that it can be written.

    Returns:
        The bytes that are free there.
    Raises:
        ConfigError: names the flag, the directory and what is wrong with it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as probe:
            probe.write(b"x" * 4096)
            probe.flush()
            os.fsync(probe.fileno())
        return shutil.disk_usage(directory).free
    except OSError as error:
        raise ConfigError(
            f"{flag}: directory {directory} cannot be written: {error.strerror or error}.",
            hint="Free space, mend the permissions, or name another directory.",
            flag=flag,
            path=str(directory),
        ) from error
