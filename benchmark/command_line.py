# SPDX-License-Identifier: Apache-2.0
"""The benchmark's flags with their help texts; it imports nothing heavy, so that ``--help`` is quick."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from resiliency.files import path_flag
from resiliency.log import LEVELS
from resiliency.model import MODELS

DESCRIPTION = """\
Pretrain a Llama-style model on mock data with NeMo 2 and Megatron-core: the workload with which
checkpoints, restarts and goodput are measured.  Start it with launcher.py (or torchrun), which
gives every process its rank:

  python3 launcher.py --nproc-per-node 2 --max-restarts 3 benchmark/benchmark.py \\
      --device cpu --model tiny --max-steps 40 --job-name demo \\
      --persistent-ckpt-dir runs/demo --persistent-ckpt-interval 10
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``benchmark.py``; it imports nothing heavy, so ``--help`` is quick."""
    parser = argparse.ArgumentParser(
        prog="benchmark.py", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _training_flags(parser.add_argument_group("training"))
    _layout_flags(parser.add_argument_group("ranks and parallelism"))
    _checkpoint_flags(parser.add_argument_group("checkpoints"))
    _observation_flags(parser.add_argument_group("logs and measurement"))
    _fault_flags(parser.add_argument_group("faults"))
    return parser


def _training_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model",
        choices=list(MODELS),
        default="36M",
        help="model size (default: %(default)s); "
        "a trailing t means truncated to 4 layers; tiny suits two CPU cores",
    )
    group.add_argument(
        "--tokenizer-path",
        type=Path,
        metavar="FILE",
        help="SentencePiece model; default: a built-in byte tokenizer, so that nothing is downloaded",
    )
    group.add_argument(
        "--global-bs",
        type=int,
        metavar="N",
        help="samples per optimizer step; default: 2 per data-parallel replica, "
        "and with a virtual pipeline as many as there are pipeline stages. A checkpoint goes on with the "
        "number that it was saved with: give it where the number of replicas may change",
    )
    group.add_argument(
        "--max-steps",
        type=int,
        default=1_000_000,
        metavar="N",
        help="stop after N steps (default: %(default)s)",
    )
    group.add_argument(
        "--max-runtime",
        type=int,
        default=0,
        metavar="SECONDS",
        help="stop after this much training time, earlier attempts included; 0 = no limit (default)",
    )
    group.add_argument(
        "--val-check-interval",
        type=int,
        default=40,
        metavar="N",
        help="validate every N steps (default: %(default)s)",
    )
    group.add_argument(
        "--limit-val-batches",
        type=int,
        default=0,
        metavar="N",
        help="batches per validation; 0 = never validate (default)",
    )
    group.add_argument(
        "--enable-gc",
        action="store_true",
        help="collect Python garbage at fixed steps on all "
        "ranks together, instead of whenever each rank likes",
    )


def _layout_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--device",
        choices=["auto", "cuda", "cpu"],
        default="auto",
        help="auto = cuda where a CUDA device works, else cpu with gloo (default: %(default)s)",
    )
    group.add_argument("--num-nodes", type=int, metavar="N", help="hosts; default: what the launcher started")
    group.add_argument(
        "--num-gpus",
        type=int,
        metavar="N",
        help="ranks per host, also on CPU; default: what the launcher started",
    )
    group.add_argument("--tensor-parallel", type=int, metavar="N", help="override the model's own layout")
    group.add_argument("--pipeline-parallel", type=int, metavar="N", help="override the model's own layout")
    group.add_argument("--context-parallel", type=int, metavar="N", help="override the model's own layout")
    group.add_argument(
        "--num-optimizer-replicas",
        type=int,
        default=1,
        metavar="N",
        help="copies of the distributed optimizer over the data-parallel ranks: N ranks hold each part of "
        "it, which takes N times the memory (default: %(default)s)",
    )
    group.add_argument(
        "--enable-comm-overlap",
        action="store_true",
        help="overlap communication with computation where the layout allows it (CUDA only)",
    )


def _checkpoint_flags(group: argparse._ArgumentGroup) -> None:
    _tier_flags(group)
    _writing_flags(group)
    _sharing_flags(group)
    _time_flags(group)


def _tier_flags(group: argparse._ArgumentGroup) -> None:
    """Where checkpoints go, and how often."""
    group.add_argument(
        "--persistent-ckpt-dir",
        type=path_flag,
        metavar="DIR",
        help="storage that all hosts see; checkpoints go to DIR/<job-name>/checkpoint/step=N",
    )
    group.add_argument(
        "--persistent-ckpt-interval",
        type=int,
        metavar="N",
        help="save there every N steps; set together with --persistent-ckpt-dir or not at all",
    )
    group.add_argument(
        "--local-ckpt-dir",
        type=path_flag,
        metavar="DIR",
        help="memory or disk of each host; checkpoints go to DIR/<job-name>/checkpoint/step=N, and the "
        "newest two stay.  Together with --persistent-ckpt-dir: two tiers, each with its own interval",
    )
    group.add_argument(
        "--local-ckpt-interval",
        type=int,
        metavar="N",
        help="save there every N steps; set together with --local-ckpt-dir or not at all",
    )
    group.add_argument(
        "--local-ckpt-replicas",
        type=int,
        metavar="N",
        help="copies of each local checkpoint on other hosts, so that it outlives its own host; "
        "default: 1 with several hosts, else 0",
    )


def _writing_flags(group: argparse._ArgumentGroup) -> None:
    """How they are written, and how many stay."""
    group.add_argument(
        "--topk-ckpt",
        type=int,
        default=-1,
        metavar="K",
        help="keep the newest K persistent checkpoints; -1 keeps all (default)",
    )
    group.add_argument(
        "--ckpt-threads-per-rank",
        type=int,
        default=2,
        metavar="N",
        help="threads or processes per rank that copy and write (default: %(default)s)",
    )
    group.add_argument(
        "--enable-dist-ckpt",
        action="store_true",
        help="spread each save and load over all "
        "data-parallel ranks, instead of leaving it to the first of them",
    )
    group.add_argument(
        "--enable-async-ckpt",
        action="store_true",
        help="write in a background process while training goes on",
    )
    group.add_argument(
        "--enable-optimized-async-ckpt",
        action="store_true",
        help="copy into memory and go on: a checkpoint process that lives as long as the job writes "
        "(the memory of a host holds two copies of its state, three with two tiers).  Local checkpoints are "
        "always written so; "
        "with this flag one copy serves both tiers",
    )


def _sharing_flags(group: argparse._ArgumentGroup) -> None:
    """What others than their own host and rank do with them."""
    group.add_argument(
        "--enable-ckpt-load-replication",
        action="store_true",
        help="a rank whose shard is lost gets the state of a rank that holds the same; needs "
        "--local-ckpt-dir and --num-optimizer-replicas >= 2",
    )
    group.add_argument(
        "--enable-high-scale-ckpt",
        action="store_true",
        help="hand local checkpoints over to GKE's multi-tier replicator, which copies them to other hosts "
        "and to a bucket; --local-ckpt-dir is then the volume that it shares with the job",
    )


def _time_flags(group: argparse._ArgumentGroup) -> None:
    """How long the last one may take, and where the time of all of them goes."""
    group.add_argument(
        "--termination-deadline-s",
        type=float,
        default=25.0,
        metavar="SECONDS",
        help="after SIGTERM all ranks stop at one step, and its checkpoint must be committed in this time; "
        "some seconds less than what the platform leaves before it kills (default: %(default)s)",
    )
    group.add_argument(
        "--profile-ckpt-interval",
        type=int,
        metavar="N",
        help="trace the steps around every N-th step; choose the checkpoint interval",
    )


def _observation_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--job-name",
        default=os.environ.get("JOB_IDENTIFIER") or "benchmark",
        metavar="NAME",
        help="names directories, logs and events (default: %(default)s)",
    )
    group.add_argument(
        "--log-dir",
        type=Path,
        default=Path("runs"),
        metavar="DIR",
        help="TensorBoard files and traces go to DIR/<job-name> (default: %(default)s)",
    )
    group.add_argument(
        "--log-to-remote-storage",
        action="store_true",
        help="--log-dir is remote: write on this "
        "host's own disk, and copy to --log-dir in the background and at the end",
    )
    group.add_argument(
        "--log-interval", type=int, metavar="N", help="log every N-th step; default: 1 on CPU, 10 on CUDA"
    )
    group.add_argument("--log-level", choices=LEVELS, default="INFO", help="default: %(default)s")
    group.add_argument("--enable-tensorboard", action="store_true", help="write TensorBoard scalars")
    group.add_argument(
        "--trace-name", default="trace", metavar="NAME", help="prefix of trace files (default: %(default)s)"
    )


def _fault_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--enable-fault-tolerance",
        action="store_true",
        help="send heartbeats to NVRx's rank monitors, which find hangs; needs launcher.py or ft_launcher",
    )
    group.add_argument(
        "--sim-fault-desc",
        metavar="FAULT,DELAY[,KEY=VALUE...]",
        action="append",
        default=[],
        help="make one rank fail: rank_killed, rank_hung, rank_exception, rank_exit or "
        "rank_terminated, after DELAY seconds of training or at step=N; keys rank, attempt, "
        "phase, code; may be given several times.  Example: rank_killed,step=25.  "
        "random,SECONDS[,seed=N][,duration=S][,disk_dir=DIR]: in each attempt one fault that the "
        "simulator draws and does, after SECONDS on average, for S seconds (30) if it ends, of all kinds "
        "that this job can have on this host (a full disk: on DIR's file system)",
    )
