# SPDX-License-Identifier: Apache-2.0
"""What a launcher's diagnosis asks for: the supervisor replaces a host that the launcher can only restart.

The words are those of `resiliency.launch.health`, which the supervisor does not import; a test compares
them.
"""

from __future__ import annotations

from enum import Enum


class DiagnosisCause(Enum):
    """Why an attempt ended, or stands still."""

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

    @property
    def is_echo(self) -> bool:
        """Whether the fault is elsewhere, so that nothing is said against the host that reports it."""
        return self in (DiagnosisCause.PEER_LOST, DiagnosisCause.HOST_LOST, DiagnosisCause.PREEMPTED)

    @property
    def is_of_gpu(self) -> bool:
        """Whether only a check that has tried the GPUs can disprove it."""
        return self in (
            DiagnosisCause.GPU_FAULT,
            DiagnosisCause.GPU_MISSING,
            DiagnosisCause.ILLEGAL_ACCESS,
            DiagnosisCause.CUDA_ERROR,
        )


class Advice(Enum):
    """What the launcher says should be done; it restarts in place, and does the rest not itself."""

    RESTART = "restart"
    REPLACE_HOST = "replace_host"
    STOP = "stop"


class Confidence(Enum):
    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"


class HostHealth(Enum):
    """What a host check found; the words are those of `resiliency.launch.health.scores`."""

    OK = "ok"
    UNDECIDED = "undecided"
    SLOW = "slow"
    FAULTY = "faulty"


def is_against_host(cause: DiagnosisCause, advice: Advice, confidence: Confidence) -> bool:
    """Whether the host is to be replaced.  A guess replaces none, and an echo is no word on its own host."""
    return advice is Advice.REPLACE_HOST and confidence is not Confidence.LOW and not cause.is_echo
