# SPDX-License-Identifier: Apache-2.0
"""Incidents as values: what a launcher had in its hands, and what a diagnosis has to make of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from resiliency.launch.health.diagnosis import (
    Advice,
    Cause,
    Evidence,
    Frame,
    HostFacts,
    RankDeath,
    RankError,
)
from resiliency.launch.health.evidence import read_traceback
from resiliency.launch.health.rules import SHARED_MEMORY

A, B = "host-a", "host-b"
STEP = Frame(file="/job/train.py", line=88, function="step")
PICKLE = Frame(file="/opt/lib/python3.11/pickle.py", line=7, function="load")
DISTRIBUTED = Frame(file="/opt/x/site-packages/torch/distributed/rendezvous.py", line=9, function="get")
TORCH = Frame(file="/opt/lib/python3.11/site-packages/torch/nn/modules/module.py", line=17, function="call")
PEER = "Connection closed by peer [10.0.0.7]:40213"
GLOO = f"RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] {PEER}"
NCCL = "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error"
WATCHDOG = "[Rank 5] Watchdog caught collective operation timeout: WorkNCCL(OpType=ALLREDUCE) ran for 600 s"
KILL_LINE = "Out of memory: Killed process 4711 (python) total-vm:91234567kB, anon-rss:81234567kB"
XID = "NVRM: Xid (PCI:0000:3b:00): {}, pid=4711, name=python"


@dataclass(frozen=True, kw_only=True)
class Incident:
    """`says`: a part of the sentence."""

    name: str
    evidence: Evidence
    cause: Cause
    advice: Advice
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    says: str = ""


def error(text: str, *frames: Frame) -> RankError:
    kind, _, message = text.partition(": ")
    return RankError(type=kind, message=message, frames=frames)


def raised(
    rank: int,
    text: str,
    *before: str,
    host: str = A,
    exit_code: int = 1,
    frames: tuple[Frame, ...] = (STEP, TORCH),
) -> RankDeath:
    """`before`: the exceptions that led to this one, nearest first."""
    whole = replace(error(text, *frames), chain=tuple(error(one, STEP) for one in before))
    return RankDeath(rank=rank, host=host, exit_code=exit_code, error=whole)


def died(
    rank: int, exit_code: int, *log: str, host: str = A, ended_by_us: bool = False, hang: str = ""
) -> RankDeath:
    """As the launcher notes it: an exception at the end of the log is the rank's."""
    return RankDeath(
        rank=rank,
        host=host,
        exit_code=exit_code,
        error=read_traceback(log),
        log=log,
        ended_by_us=ended_by_us,
        hang=hang,
    )


def after(
    *deaths: RankDeath,
    step: int | None = 40,
    facts: HostFacts | None = None,
    lost_hosts: tuple[str, ...] = (),
) -> Evidence:
    return Evidence(
        attempt=0,
        deaths=deaths,
        step=step,
        uptime_s=60.0,
        hosts=(HostFacts(host=A), HostFacts(host=B)) if facts is None else (facts,),
        lost_hosts=lost_hosts,
    )


def one(
    name: str, evidence: Evidence, cause: Cause, advice: Advice, says: str = "", rank: int = 3
) -> Incident:
    """With the culprit rank 3 on host A, as most have."""
    return Incident(
        name=name, evidence=evidence, cause=cause, advice=advice, ranks=(rank,), hosts=(A,), says=says
    )


def alone(
    name: str,
    text: str,
    cause: Cause,
    advice: Advice,
    says: str = "",
    step: int | None = 40,
    before: tuple[str, ...] = (),
) -> Incident:
    """Rank 3 raises an exception, and two others notice that it is gone."""
    echoes = (raised(0, GLOO), raised(5, NCCL, host=B))
    return one(name, after(raised(3, text, *before), *echoes, step=step), cause, advice, says)


R, REPLACE, STOP = Advice.RESTART, Advice.REPLACE_HOST, Advice.STOP

INCIDENTS: tuple[Incident, ...] = (
    # --- host memory
    one(
        "oom kill counted by the memory group",
        after(died(3, -9), raised(0, GLOO), facts=HostFacts(host=A, oom_kills=1)),
        Cause.HOST_OOM,
        R,
        "rank 3 on host-a (after step 40) was killed by the kernel: host memory ran out",
    ),
    one(
        "oom kill in the kernel log, after its echo",
        after(raised(0, GLOO), died(3, -9), facts=HostFacts(host=A, kernel=(KILL_LINE,))),
        Cause.HOST_OOM,
        R,
        "request more memory",
    ),
    one(
        "an oom kill of another job, which the kernel's log shows and the own group does not count",
        after(died(3, -9), facts=HostFacts(host=A, oom_kills=0, kernel=(KILL_LINE,))),
        Cause.KILLED,
        R,
        "ended from outside (SIGKILL)",
    ),
    one(
        "a loader worker is killed for memory",
        after(
            raised(3, "RuntimeError: DataLoader worker (pid 9313) is killed by signal: Killed. "),
            facts=HostFacts(host=A, oom_kills=1),
        ),
        Cause.HOST_OOM,
        R,
        "fewer loader workers",
    ),
    alone("numpy gets no memory", "MemoryError: Unable to allocate 64.0 GiB", Cause.HOST_OOM, R, "64.0 GiB"),
    alone(
        "fork gets no memory", "OSError: [Errno 12] Cannot allocate memory", Cause.HOST_OOM, R, "host memory"
    ),
    one(
        "an oom kill of another process does not explain an exception",
        after(raised(3, "ValueError: bad token"), facts=HostFacts(host=A, oom_kills=1)),
        Cause.EXCEPTION,
        R,
        "ValueError: bad token at /job/train.py:88 in step",
    ),
    one(
        "an oom kill on another host does not explain a kill here",
        after(died(3, -9), facts=HostFacts(host=B, oom_kills=2)),
        Cause.KILLED,
        R,
        "SIGKILL",
    ),
    # --- disks
    alone(
        "disk full", "OSError: [Errno 28] No space left on device: '/ckpt/x'", Cause.DISK_FULL, R, "full disk"
    ),
    one(
        "disk full, said by a library in other words",
        after(
            raised(3, "CheckpointWriteFailed: cannot write step=40/rank3.bin"),
            facts=HostFacts(host=A, full=("/ckpt",)),
        ),
        Cause.DISK_FULL,
        R,
        "full disk at /ckpt",
    ),
    alone("quota", "OSError: [Errno 122] Disk quota exceeded", Cause.DISK_FULL, R, "free space"),
    alone(
        "shared memory full, as torch says it",
        "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Bus error. It is possible that "
        "dataloader's workers are out of shared memory. Please try to raise your shared memory limit.",
        Cause.DISK_FULL,
        R,
        "found /dev/shm full",
    ),
    alone(
        "shared memory full, as a loader's worker meets it",
        "RuntimeError: unable to write to file </torch_4711_3>: No space left on device (28)",
        Cause.DISK_FULL,
        R,
        "--shm-size",
    ),
    alone(
        "shared memory full, as NCCL says it",
        "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:328, unhandled system error\n"
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed.\nLast error:\n"
        "Error while creating shared memory segment /dev/shm/nccl-8dAZqP (size 9637888)",
        Cause.DISK_FULL,
        R,
        "found /dev/shm full",
    ),
    one(
        "a rank that maps shared memory which is full",
        after(died(3, -7), raised(0, GLOO), facts=HostFacts(host=A, full=(SHARED_MEMORY,))),
        Cause.DISK_FULL,
        R,
        "crashed (SIGBUS) with a full /dev/shm",
    ),
    alone(
        "torch.save on a full disk",
        "RuntimeError: [enforce fail at inline_container.cc:626] . unexpected pos 1048640 vs 1048532",
        Cause.IO_ERROR,
        R,
    ),
    alone(
        "locked memory",
        "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, unhandled system error\n"
        "ncclSystemError: System call failed.\nLast error:\n"
        "Call to ibv_reg_mr failed with error Cannot allocate memory",
        Cause.PERMISSION,
        R,
        "ulimit -l",
    ),
    one(
        "broken disk",
        after(
            raised(3, "OSError: [Errno 5] Input/output error"),
            facts=HostFacts(host=A, kernel=("blk_update_request: I/O error, dev nvme1n1, sector 4711",)),
        ),
        Cause.IO_ERROR,
        REPLACE,
        "broken disk",
    ),
    alone("mount gone", "OSError: [Errno 116] Stale file handle", Cause.IO_ERROR, R, "could not use storage"),
    alone("read-only", "OSError: [Errno 30] Read-only file system: '/ckpt'", Cause.IO_ERROR, R),
    Incident(
        name="a disk of the host, of which no rank has said anything",
        evidence=after(died(3, 1), facts=HostFacts(host=A, kernel=("I/O error, dev nvme1n1, sector 4711",))),
        cause=Cause.IO_ERROR,
        advice=R,
        hosts=(A,),
        says="the kernel of host host-a reports I/O error, dev nvme1n1",
    ),
    alone(
        "mount gone, in the words of a library",
        "RuntimeError: could not read shard 117 after 5 tries",
        Cause.IO_ERROR,
        R,
        "RuntimeError: could not read shard 117 after 5 tries, after OSError: [Errno 116] Stale file handle",
        before=("OSError: [Errno 116] Stale file handle",),
    ),
    one(
        "a file that ends too soon",
        after(raised(0, GLOO), raised(3, "EOFError: Ran out of input", frames=(STEP, PICKLE))),
        Cause.IO_ERROR,
        R,
        "EOFError: Ran out of input) at /job/train.py:88 in step",
    ),
    one(
        "a data service that is down",
        after(raised(3, "ConnectionRefusedError: [Errno 111] Connection refused"), raised(0, GLOO)),
        Cause.IO_ERROR,
        R,
        "could not use storage or a service",
    ),
    Incident(
        name="a store whose host is gone",
        evidence=after(
            raised(3, "ConnectionRefusedError: [Errno 111] Connection refused", frames=(STEP, DISTRIBUTED))
        ),
        cause=Cause.PEER_LOST,
        advice=R,
    ),
    alone(
        "a loader worker is killed",
        "RuntimeError: DataLoader worker (pid(s) 4711) exited unexpectedly",
        Cause.KILLED,
        R,
        "lost a loader worker",
    ),
    # --- the program
    alone(
        "module missing",
        "ModuleNotFoundError: No module named 'flash_atn'",
        Cause.IMPORT,
        STOP,
        "cannot load its program (ModuleNotFoundError: No module named 'flash_atn')",
        step=None,
    ),
    alone("syntax", "SyntaxError: invalid syntax (train.py, line 3)", Cause.IMPORT, STOP, step=None),
    alone("module gone after steps", "ImportError: cannot import name 'x'", Cause.IMPORT, R, step=900),
    Incident(
        name="module missing on all ranks of one host",
        evidence=after(
            raised(4, "ModuleNotFoundError: No module named 'apex'", host=B),
            raised(5, "ModuleNotFoundError: No module named 'apex'", host=B),
            step=None,
        ),
        cause=Cause.IMPORT,
        advice=STOP,
        ranks=(4, 5),
        hosts=(B,),
        says="rank 4 (and 1 more) on host-b",
    ),
    alone(
        "bad sample", "AssertionError: token 50304 out of range", Cause.ASSERTION, R, "failed an assertion"
    ),
    alone("nan by name", "LossNotFinite: the loss of step 41 is nan", Cause.NAN, STOP, "not finite"),
    alone(
        "nothing to go back to",
        "CheckpointMissing: no checkpoint before step 10 is left.",
        Cause.NAN,
        STOP,
        "no checkpoint before step 10 is left",
    ),
    alone("nan in words", "RuntimeError: Loss is nan, stopping training", Cause.NAN, STOP, "is not finite"),
    alone(
        "nan in Megatron's words",
        "AssertionError: Rank 3: found NaN in local forward loss calculation.",
        Cause.NAN,
        STOP,
    ),
    alone(
        "port", "DistNetworkError: The server socket has failed to listen: EADDRINUSE", Cause.PORT_TAKEN, R
    ),
    alone(
        "port of a script", "OSError: [Errno 98] Address already in use", Cause.PORT_TAKEN, R, "port taken"
    ),
    alone(
        "file", "FileNotFoundError: [Errno 2] No such file or directory: '/d/0.bin'", Cause.MISSING_FILE, R
    ),
    alone(
        "rights", "PermissionError: [Errno 13] Permission denied: '/ckpt'", Cause.PERMISSION, R, "may not use"
    ),
    alone("key", "KeyError: 'labels'", Cause.EXCEPTION, R, "raised KeyError: 'labels'"),
    one(
        "a rank that tells its peers of its error, and loses them then",
        after(raised(0, GLOO), raised(3, GLOO, "KeyError: 'labels'")),
        Cause.EXCEPTION,
        R,
        "raised KeyError: 'labels' at /job/train.py:88 in step",
    ),
    Incident(
        name="an error in what handles a lost peer",
        evidence=after(raised(3, "AttributeError: 'NoneType' object has no attribute 'log'", GLOO)),
        cause=Cause.PEER_LOST,
        advice=R,
    ),
    one("exit code", after(died(3, 17), raised(0, GLOO)), Cause.EXIT_CODE, R, "exit code 17", 3),
    one("segfault", after(died(3, -11), raised(0, GLOO)), Cause.SEGFAULT, R, "PYTHONFAULTHANDLER=1"),
    one("segfault seen by a shell", after(died(3, 139)), Cause.SEGFAULT, R, "SIGSEGV"),
    one("abort", after(died(3, -6, "free(): invalid pointer")), Cause.ABORT, R, "aborted in native code"),
    one("killed from outside", after(died(3, -9), raised(0, GLOO)), Cause.KILLED, R, "ended from outside"),
    one(
        "told by another than the launcher", after(died(3, -15), raised(0, GLOO)), Cause.KILLED, R, "SIGTERM"
    ),
    # --- devices
    alone(
        "device memory",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79.15 GiB",
        Cause.DEVICE_OOM,
        R,
        "smaller micro-batch",
    ),
    alone(
        "uncorrectable memory error",
        "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered",
        Cause.GPU_FAULT,
        REPLACE,
        "broken GPU",
    ),
    one(
        "the driver lost the GPU",
        after(
            raised(3, "RuntimeError: CUDA error: unknown error"),
            facts=HostFacts(host=A, kernel=(XID.format(79),)),
        ),
        Cause.GPU_FAULT,
        REPLACE,
        "Xid (PCI:0000:3b:00): 79",
    ),
    Incident(
        name="all ranks only lost peers, and a kernel knows why",
        evidence=after(raised(0, GLOO), facts=HostFacts(host=B, kernel=(XID.format(119),))),
        cause=Cause.GPU_FAULT,
        advice=REPLACE,
        hosts=(B,),
        says="host host-b has a broken GPU",
    ),
    one(
        "an Xid does not explain a missing key",
        after(raised(3, "KeyError: 'x'"), facts=HostFacts(host=A, kernel=(XID.format(79),))),
        Cause.EXCEPTION,
        R,
    ),
    alone(
        "device-side assertion",
        "RuntimeError: CUDA error: device-side assert triggered",
        Cause.DEVICE_ASSERT,
        R,
        "CUDA_LAUNCH_BLOCKING=1",
    ),
    one(
        "illegal access, with the Xid of a program's error",
        after(
            raised(3, "RuntimeError: CUDA error: an illegal memory access was encountered"),
            facts=HostFacts(host=A, kernel=(XID.format(31),)),
        ),
        Cause.ILLEGAL_ACCESS,
        R,
    ),
    one(
        "illegal access, which C++ reports while it aborts",
        after(
            died(
                3,
                -6,
                "terminate called after throwing an instance of 'c10::Error'",
                "  what():  CUDA error: an illegal memory access was encountered",
            ),
            raised(0, GLOO),
        ),
        Cause.ILLEGAL_ACCESS,
        R,
    ),
    alone(
        "device memory, in NCCL's words",
        "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, unhandled cuda error\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
        Cause.DEVICE_OOM,
        R,
        "smaller micro-batch",
    ),
    alone("words of a GPU in a program's own error", "RuntimeError: ECC error budget: 0", Cause.EXCEPTION, R),
    alone("no GPU", "RuntimeError: No CUDA GPUs are available", Cause.GPU_MISSING, REPLACE, step=None),
    alone("cudnn", "RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR", Cause.CUDA_ERROR, R),
    alone(
        "NCCL's own call into CUDA fails: no echo",
        "torch.distributed.DistBackendError: NCCL error: unhandled cuda error, ncclUnhandledCudaError",
        Cause.CUDA_ERROR,
        R,
    ),
    # --- versions and topology
    alone(
        "extension built for another torch",
        "ImportError: /x/flash.so: undefined symbol: _ZN3c105ErrorC2E",
        Cause.VERSION,
        STOP,
        step=None,
    ),
    alone(
        "driver too old",
        "RuntimeError: The NVIDIA driver on your system is too old (found version 11040)",
        Cause.VERSION,
        STOP,
        "correct the image",
        step=None,
    ),
    alone(
        "NCCL of two versions",
        "torch.distributed.DistBackendError: NCCL error: NCCL version mismatch 2.19 vs 2.21",
        Cause.VERSION,
        STOP,
        step=None,
    ),
    alone(
        "our own refusal of a configuration",
        "resiliency.errors.ConfigError: --nnodes (3) must be divisible by --num-nodes-per-dp (2)",
        Cause.TOPOLOGY,
        STOP,
        step=None,
    ),
    alone("a library's error of that name", "omegaconf.errors.ConfigError: try again", Cause.IO_ERROR, R),
    alone(
        "a version of an object",
        "botocore.exceptions.ClientError: PreconditionFailed: object version mismatch",
        Cause.IO_ERROR,
        R,
    ),
    alone(
        "a state of another model",
        "RuntimeError: Error(s) in loading state_dict for Model:\n\tMissing key(s) in state_dict: 'w'",
        Cause.TOPOLOGY,
        STOP,
        step=None,
    ),
    alone(
        "two ranks on one GPU",
        "torch.distributed.DistBackendError: NCCL error: invalid usage, Duplicate GPU detected",
        Cause.TOPOLOGY,
        STOP,
        step=None,
    ),
    # --- peers, hangs, hosts
    Incident(
        name="only echoes",
        evidence=after(raised(0, GLOO), raised(1, NCCL)),
        cause=Cause.PEER_LOST,
        advice=R,
        says="lost a peer",
    ),
    Incident(
        name="echoes of a lost host",
        evidence=after(raised(0, GLOO), raised(1, NCCL), lost_hosts=(B,)),
        cause=Cause.HOST_LOST,
        advice=R,
        hosts=(B,),
        says="hosts were lost: host-b",
    ),
    Incident(
        name="ranks that the launcher ended are no suspects",
        evidence=after(died(0, -15, ended_by_us=True), died(1, -6, ended_by_us=True), lost_hosts=(B,)),
        cause=Cause.HOST_LOST,
        advice=R,
        hosts=(B,),
    ),
    one(
        "an aborted NCCL watchdog before the rank that failed",
        after(died(5, -6, WATCHDOG, host=B), died(3, -11)),
        Cause.SEGFAULT,
        R,
    ),
    one(
        "a silent exit before a kill for memory",
        after(died(0, 1), died(3, -9), facts=HostFacts(host=A, oom_kills=1)),
        Cause.HOST_OOM,
        R,
    ),
    Incident(
        name="a collective timed out on all ranks",
        evidence=after(died(5, -6, WATCHDOG, host=B), died(3, -6, WATCHDOG)),
        cause=Cause.HANG,
        advice=R,
        says="a collective timed out on rank 5",
    ),
    one(
        "a rank monitor ended a rank",
        after(died(3, -9, hang="no heartbeat within 60 s"), raised(0, GLOO)),
        Cause.HANG,
        R,
        "rank 3 on host-a (after step 40) hung (no heartbeat within 60 s)",
    ),
    one(
        "a scheduler preempts",
        after(died(3, -15, "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 10:00 DUE TO PREEMPTION ***")),
        Cause.PREEMPTED,
        R,
        "as its log says",
    ),
    Incident(name="nothing at all", evidence=after(), cause=Cause.UNKNOWN, advice=R, says="nothing is known"),
)
