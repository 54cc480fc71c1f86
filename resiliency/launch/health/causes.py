# SPDX-License-Identifier: Apache-2.0
"""What a diagnosis says: the cause of an attempt's end, the culprits, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Cause(str, Enum):
    """Why an attempt ended.  The value is the word in events."""

    PREEMPTED = "preempted"
    HANG = "hang"
    HOST_OOM = "host_oom"
    GPU_FAULT = "gpu_fault"
    GPU_MISSING = "gpu_missing"
    DEVICE_OOM = "device_oom"
    DEVICE_ASSERT = "device_assert"
    ILLEGAL_ACCESS = "illegal_access"
    CUDA_ERROR = "cuda_error"
    NAN = "nan"
    DISK_FULL = "disk_full"
    IO_ERROR = "io_error"
    PORT_TAKEN = "port_taken"
    VERSION = "version"
    TOPOLOGY = "topology"
    IMPORT = "import"
    MISSING_FILE = "missing_file"
    PERMISSION = "permission"
    PEER_LOST = "peer_lost"
    ASSERTION = "assertion"
    SEGFAULT = "segfault"
    ABORT = "abort"
    KILLED = "killed"
    EXCEPTION = "exception"
    EXIT_CODE = "exit_code"
    HOST_LOST = "host_lost"
    UNKNOWN = "unknown"


#: Ends that the job's own code makes.  All others come from outside of it (storage, network, peers, hosts,
#: GPUs, memory), or leave open where they come from (signals, exit codes): that they repeat proves nothing.
OWN = frozenset(
    {
        *(Cause.EXCEPTION, Cause.ASSERTION, Cause.IMPORT, Cause.VERSION, Cause.TOPOLOGY, Cause.NAN),
        *(Cause.DEVICE_OOM, Cause.DEVICE_ASSERT, Cause.ILLEGAL_ACCESS),
    }
)


class Advice(str, Enum):
    """What to do about it."""

    RESTART = "restart"
    REPLACE_HOST = "replace_host"
    STOP = "stop"


class Confidence(str, Enum):
    """HIGH: the kernel or the error says it.  MEDIUM: it fits.  LOW: nothing contradicts it."""

    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"


class DecidedBy(str, Enum):
    """What the advice rests on: this attempt alone, or a rule over attempts."""

    ATTEMPT = "attempt"
    DETERMINISTIC = "deterministic"
    NO_PROGRESS = "no_progress"


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The verdict on one attempt.

    Args:
        ranks, hosts: the culprits; empty where none is known.
        sentence: the verdict for a reader, with what helps.
        signature: type and place of the error; equal for the same error in another attempt; empty: none.
        error_step: the last step that the culprit had finished; ranks of a host may differ by one.
        step, uptime_s: as in the evidence, for the rules over attempts.
        advanced: the attempt finished a step beyond the checkpoint from which it began; None: unknown.
        rollback: the branch of checkpoints from which the job goes on: its number, the branch that it leaves,
            and the newest step that counts of that; None: the job goes on from its newest checkpoint.
    """

    attempt: int
    cause: Cause
    advice: Advice
    confidence: Confidence
    sentence: str
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    decided_by: DecidedBy = DecidedBy.ATTEMPT
    signature: str = ""
    error_step: int | None = None
    step: int | None = None
    uptime_s: float | None = None
    advanced: bool | None = None
    rollback: tuple[int, int, int] | None = None
