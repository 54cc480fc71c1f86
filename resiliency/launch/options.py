# SPDX-License-Identifier: Apache-2.0
"""What to launch, checked: every mistake that can be seen in the flags is refused here.

Nothing has been started when this raises, so a wrong command line costs a second and not a slot in
the queue of a cluster.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import re
import shutil
import signal
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from resiliency.errors import ConfigError
from resiliency.launch.cli import UNNAMED
from resiliency.launch.failures.policy import check_policy
from resiliency.launch.fleet.link import SupervisorOptions
from resiliency.launch.health.hang_times import HangTimeout
from resiliency.runtime import RunInfo

#: Where torchrun's static rendezvous meets by default.
STATIC_ADDRESS, STATIC_PORT = "127.0.0.1", 29500

ENDPOINT = r"[^\s:]+(:\d+)?|\[[\da-fA-F:]+\](:\d+)?"


@dataclass(frozen=True, kw_only=True)
class RendezvousPlace:
    """Where and how the hosts of a job meet.  `node_rank` is None when hosts order themselves."""

    endpoint: str
    run_id: str
    min_nodes: int
    max_nodes: int
    node_rank: int | None
    local_addr: str | None
    conf: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """A command line that can work."""

    info: RunInfo
    rendezvous: RendezvousPlace
    supervisor: SupervisorOptions
    workers: int
    max_restarts: int
    monitor_interval: timedelta
    term_timeout: timedelta
    stop_timeout: timedelta
    hang_timeout: HangTimeout
    signals: tuple[signal.Signals, ...]
    virtual_local_rank: bool
    #: Program and arguments; run_path: the script and its arguments.
    command: tuple[str, ...]
    script: str
    args: argparse.Namespace


def resolve(args: argparse.Namespace, env: Mapping[str, str]) -> LaunchOptions:
    """Check parsed flags and work out what they mean on this machine.

    Raises:
        ConfigError: the first flag that cannot work; nothing was started.
    """
    _refuse_unsupported(args)
    _check_numbers(args)
    min_nodes, max_nodes = _nodes(args.nnodes)
    supervisor = SupervisorOptions.from_args(args)
    rendezvous = _rendezvous(args, min_nodes, max_nodes)
    info = _identity(args, env, rendezvous)
    command = _command(args, env)
    _check_streams(args)
    workers = _workers(args.nproc_per_node)
    for flag, path in (("--run-dir", info.run_dir), ("--log-dir", args.log_dir)):
        if path is not None:
            _check_writable(flag, Path(path))
    if args.failure_policy is not None:
        check_policy(args.failure_policy)
    both = args.shutdown_timeout
    return LaunchOptions(
        info=info,
        rendezvous=rendezvous,
        supervisor=supervisor,
        workers=workers,
        max_restarts=args.max_restarts,
        monitor_interval=timedelta(seconds=args.monitor_interval),
        term_timeout=timedelta(seconds=args.term_timeout if both is None else both),
        stop_timeout=timedelta(seconds=args.workers_stop_timeout if both is None else both),
        hang_timeout=HangTimeout.parse(args.hang_timeout_s),
        signals=_signals(args.signals_to_handle),
        virtual_local_rank=args.virtual_local_rank,
        command=command,
        script=args.training_script,
        args=args,
    )


def _refuse_unsupported(args: argparse.Namespace) -> None:
    for flag, value, instead in (
        ("--numa-binding", args.numa_binding, "Start the workers through numactl: --no-python numactl ..."),
        ("--duplicate-stdout-filters", args.duplicate_stdout_filters, "Keep files with --log-dir and --tee."),
        ("--duplicate-stderr-filters", args.duplicate_stderr_filters, "Keep files with --log-dir and --tee."),
    ):
        if value:
            raise ConfigError(f"{flag} has no counterpart in NVRx's agent.", hint=instead, flag=flag)
    if args.event_log_handler != "null":
        raise ConfigError(
            f"--event-log-handler must be null, found {args.event_log_handler!r}: events go to files.",
            hint="See --run-dir.",
            flag="--event-log-handler",
        )


def _check_numbers(args: argparse.Namespace) -> None:
    if args.max_restarts < 0:
        raise ConfigError(
            f"--max-restarts must be 0 or more, found {args.max_restarts}.", flag="--max-restarts"
        )
    if args.attempts_without_progress < 0:
        raise ConfigError(
            f"--attempts-without-progress must be 0 or more, found {args.attempts_without_progress}.",
            flag="--attempts-without-progress",
        )
    if args.node_rank is not None and args.node_rank < 0:
        raise ConfigError(f"--node-rank must be 0 or more, found {args.node_rank}.", flag="--node-rank")
    times = [
        "monitor_interval",
        "term_timeout",
        "workers_stop_timeout",
        "shutdown_timeout",
        "check_timeout_s",
        "no_progress_s",
    ]
    times += [
        name for name in vars(args) if isinstance(getattr(args, name), float) and name.startswith("ft_")
    ]
    for name in times:
        value = getattr(args, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} must be a number above 0, found {value:g}.", flag=flag)


def _nodes(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high:
        raise ConfigError(
            f"--nnodes must be N or MIN:MAX with 1 <= MIN <= MAX, found {text!r}.", flag="--nnodes"
        )
    return low, high


def _rendezvous(args: argparse.Namespace, min_nodes: int, max_nodes: int) -> RendezvousPlace:
    if args.rdzv_backend.lower() not in ("", "c10d", "static"):
        raise ConfigError(
            f"--rdzv-backend must be c10d or static, found {args.rdzv_backend!r}: NVRx's agent has no other.",
            flag="--rdzv-backend",
        )
    if args.node_rank is not None and args.node_rank >= max_nodes:
        raise ConfigError(
            f"--node-rank must be below --nnodes ({max_nodes}), found {args.node_rank}.", flag="--node-rank"
        )
    if args.standalone and max_nodes > 1:
        raise ConfigError(f"--standalone is for one host, found --nnodes {args.nnodes}.", flag="--standalone")
    if args.rdzv_endpoint and not re.fullmatch(r"[^\s:]+(:\d+)?|\[[\da-fA-F:]+\](:\d+)?", args.rdzv_endpoint):
        raise ConfigError(
            f"--rdzv-endpoint must be HOST or HOST:PORT, found {args.rdzv_endpoint!r}.",
            flag="--rdzv-endpoint",
        )
    conf = _rendezvous_conf(args.rdzv_conf)
    endpoint, run_id, local_addr = args.rdzv_endpoint, args.rdzv_id, args.local_addr
    # torchrun's static style names host 0 instead of an endpoint.
    static = not endpoint and (
        args.rdzv_backend.lower() == "static"
        or args.master_addr is not None
        or args.master_port is not None
        or args.node_rank is not None
    )
    if args.standalone or (max_nodes == 1 and not endpoint):
        endpoint, run_id = "localhost:0", str(uuid.uuid4())
        # The machine's own name need not resolve, and nobody else has to reach it.
        local_addr = local_addr or "127.0.0.1"
    elif static:
        endpoint = f"{args.master_addr or STATIC_ADDRESS}:{args.master_port or STATIC_PORT}"
        conf.setdefault("is_host", str(not args.node_rank))
    elif not endpoint:
        raise ConfigError(
            f"--nnodes {args.nnodes} needs a place where the hosts meet.",
            hint="Give all of them --rdzv-endpoint HOST:PORT, or --master-addr and --node-rank.",
            flag="--rdzv-endpoint",
        )
    return RendezvousPlace(
        endpoint=endpoint,
        run_id=run_id,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        node_rank=(args.node_rank or 0) if static else args.node_rank,
        local_addr=local_addr,
        conf=conf,
    )


def _rendezvous_conf(text: str) -> dict[str, str]:
    conf = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not (key and equals and value):
            raise ConfigError(f"--rdzv-conf must be KEY=VALUE,..., found {part!r}.", flag="--rdzv-conf")
        whole = key.endswith("_timeout") or key == "timeout" or key.startswith("keep_alive_")
        if whole and not (value.isdecimal() and int(value)):
            raise ConfigError(
                f"--rdzv-conf: {key} must be a whole number above 0, found {value!r}.", flag="--rdzv-conf"
            )
        conf[key] = value
    _check_keep_alive(int(conf.get("keep_alive_interval", 5)), int(conf.get("keep_alive_max_attempt", 3)))
    return conf


def _check_keep_alive(interval_s: int, attempts: int) -> None:
    """Refuse values with which hosts that live take each other for dead, and restart for ever.

    A sign of life may come an interval late, because upstream skips one that is due a moment too
    early, and is read from a copy that may be a second old.
    """
    if (attempts - 2) * interval_s < 2:
        raise ConfigError(
            f"--rdzv-conf: keep_alive_max_attempt must be at least {2 + -(-2 // interval_s)} with "
            f"keep_alive_interval {interval_s}, found {attempts}: hosts would take living ones for dead.",
            flag="--rdzv-conf",
        )


def _identity(args: argparse.Namespace, env: Mapping[str, str], rendezvous: RendezvousPlace) -> RunInfo:
    # A launcher that a worker of another job started is no rank of its own job.
    own = {name: value for name, value in env.items() if name not in ("RANK", "LOCAL_RANK", "GROUP_RANK")}
    info = RunInfo.from_env(own)
    named = info.job_name if info.job_name != "local" else ""
    given = args.rdzv_id if args.rdzv_id != UNNAMED else ""
    job_name = args.job_name or named or given or "local"
    if os.sep in job_name:
        raise ConfigError(f"--job-name must not hold {os.sep!r}, found {job_name!r}.", flag="--job-name")
    node_rank = rendezvous.node_rank
    return replace(
        info,
        job_name=job_name,
        attempt=None,
        node_rank=info.node_rank if node_rank is None else node_rank,
        run_dir=os.path.abspath(args.run_dir or info.run_dir),
    )


def _command(args: argparse.Namespace, env: Mapping[str, str]) -> tuple[str, ...]:
    script, rest = args.training_script, args.training_script_args
    if args.module and args.no_python:
        raise ConfigError("--module and --no-python exclude each other.", flag="--no-python")
    if args.module:
        try:
            found = importlib.util.find_spec(script.partition(".")[0]) is not None
        except (ImportError, ValueError):
            found = False
        if not found and not _importable_from_here(script):
            raise ConfigError(f"no module named {script!r} can be found.", flag="--module")
    elif args.no_python and not args.run_path:
        program = shutil.which(script)
        if program is None:
            raise ConfigError(f"no program {script!r} can be found and executed.", flag="--no-python")
        return (program, *rest)
    elif not os.path.isfile(script) and not os.path.isfile(os.path.join(script, "__main__.py")):
        raise ConfigError(
            f"the script {script!r} does not exist (working directory {os.getcwd()}).",
            hint="Flags of the launcher go before the script.",
            script=script,
        )
    if args.run_path:
        return (os.path.abspath(script), *rest)
    python = env.get("PYTHON_EXEC", sys.executable)
    if shutil.which(python) is None:
        raise ConfigError(f"PYTHON_EXEC names no program: {python!r}.", variable="PYTHON_EXEC")
    return (python, "-u", *(("-m",) if args.module else ()), script, *rest)


def _importable_from_here(module: str) -> bool:
    first = module.partition(".")[0]
    return os.path.isdir(first) or os.path.isfile(f"{first}.py")


def _check_streams(args: argparse.Namespace) -> None:
    for flag, value in (("--redirects", args.redirects), ("--tee", args.tee)):
        if not re.fullmatch(r"[0-3]|(\d:[0-3],)*\d:[0-3]", value):
            raise ConfigError(f"{flag} must be 0 to 3 or RANK:0-3,..., found {value!r}.", flag=flag)
    if args.local_ranks_filter and not re.fullmatch(r"\d+(,\d+)*", args.local_ranks_filter):
        raise ConfigError(
            f"--local-ranks-filter must be local ranks like 0,1, found {args.local_ranks_filter!r}.",
            flag="--local-ranks-filter",
        )


def _workers(text: str) -> int:
    if re.fullmatch(r"[+-]?\d+", text):
        count = int(text)
        if count < 1:
            raise ConfigError(f"--nproc-per-node must be 1 or more, found {count}.", flag="--nproc-per-node")
        return count
    cores = os.cpu_count() or 1
    if text == "cpu":
        return cores
    if text not in ("gpu", "auto"):
        raise ConfigError(
            f"--nproc-per-node must be a number, gpu, cpu or auto, found {text!r}.", flag="--nproc-per-node"
        )
    import torch  # only a count of GPUs is worth its import time here

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if text == "gpu" and not gpus:
        raise ConfigError(
            "--nproc-per-node gpu: torch finds no CUDA device on this host.",
            hint="Give a number, or auto.",
            flag="--nproc-per-node",
        )
    return gpus or cores


def _signals(text: str) -> tuple[signal.Signals, ...]:
    known = {item.name: item for item in signal.Signals}
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known or name in ("SIGKILL", "SIGSTOP", "SIGCHLD"):
            raise ConfigError(
                f"--signals-to-handle: {name!r} is no signal that can be handled.", flag="--signals-to-handle"
            )
    return tuple(known[name] for name in names)


def _check_writable(flag: str, path: Path) -> None:
    """Create the directory and prove that a file can be made in it."""
    probe = path / f".launcher-{os.getpid()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"{flag}: cannot write to {path}: {error.strerror}.", flag=flag, path=str(path)
        ) from error
