# SPDX-License-Identifier: Apache-2.0
"""The ordered table of rules: which cause a death of a rank shows, and what helps.

The first rule that fits a death names its cause.  Rows that say more come before rows that say less: an
import error about a symbol that is missing is a mistake of versions before it is an import error.  A lost
peer comes after all rows that name a fault of the rank itself, and before those that fit everything.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from dataclasses import dataclass

from resiliency.launch.health.causes import Advice, Cause, Confidence
from resiliency.launch.health.evidence import Evidence, HostFacts, RankDeath

#: Xids after which a GPU does not work until it is reset or replaced, as in `supervisor.policy.xid`.
FATAL_XIDS = frozenset(
    {46, 48, 54, 62, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, 143, 151, 155, 156, 158}
)
_XID = re.compile(r"NVRM: Xid \([^)]*\): (\d+)")
_OOM_KILL = re.compile(
    r"Out of memory: Kill|oom-kill:|Killed process \d+ .*(?:total-vm|anon-rss)|oom_reaper:"
)
_DISK_FAULT = re.compile(
    r"I/O error, dev|Buffer I/O error|EXT4-fs error|XFS .*(?:I/O error|[Cc]orruption)|"
    r"nvme.*(?:timeout|reset)|Remounting filesystem read-only|BTRFS.*error"
)
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)

Fits = Callable[[RankDeath, HostFacts, Evidence], bool]


@dataclass(frozen=True, kw_only=True)
class DiagnosisRule:
    """One row.  `says` goes after "rank N on HOST"; `{error}` is the rank's exception, `{end}` its exit."""

    cause: Cause
    fits: Fits
    advice: Advice
    confidence: Confidence
    says: str


def _said(pattern: str) -> Fits:
    compiled = re.compile(pattern)
    return lambda death, facts, evidence: bool(compiled.search(death.text))


def _raised(*names: str) -> Fits:
    return lambda death, facts, evidence: death.error is not None and death.error.name in names


def _raised_before_a_step(*names: str) -> Fits:
    raised = _raised(*names)
    return lambda death, facts, evidence: raised(death, facts, evidence) and evidence.step is None


def _ended_by(*numbers: int) -> Fits:
    return lambda death, facts, evidence: death.signal in numbers


def _either(*fits: Fits) -> Fits:
    return lambda death, facts, evidence: any(one(death, facts, evidence) for one in fits)


def _both(*fits: Fits) -> Fits:
    return lambda death, facts, evidence: all(one(death, facts, evidence) for one in fits)


def is_fatal_xid(line: str) -> bool:
    """Whether a line of the kernel says that a GPU has to be reset or replaced."""
    match = _XID.search(line)
    return match is not None and int(match[1]) in FATAL_XIDS


def is_disk_fault(line: str) -> bool:
    """Whether a line of the kernel says that a disk or its file system is broken."""
    return bool(_DISK_FAULT.search(line))


def _kernel(test: Callable[[str], bool]) -> Fits:
    return lambda death, facts, evidence: any(map(test, facts.kernel or ()))


def _memory_ran_out(death: RankDeath, facts: HostFacts, evidence: Evidence) -> bool:
    """The kernel has killed for memory during the attempt, and the rank or its loader was killed."""
    counted = bool(facts.oom_kills) or any(map(_OOM_KILL.search, facts.kernel or ()))
    return counted and (death.signal == signal.SIGKILL or _LOADER_KILLED(death, facts, evidence))


def _disk_is_full(death: RankDeath, facts: HostFacts, evidence: Evidence) -> bool:
    return bool(facts.full) and _raised("OSError", "CheckpointWriteFailed")(death, facts, evidence)


_LOADER_KILLED = _said(r"DataLoader worker .*(?:killed by signal: Killed|exited unexpectedly)")
_CUDA = _said(r"CUDA|cuda|NCCL|cuDNN|cublas")
_OF_A_DRIVER = _either(_CUDA, lambda death, facts, evidence: death.signal != 0)
_ILLEGAL = _said(r"illegal memory access|an illegal instruction was encountered|misaligned address")

_HIGH, _MEDIUM, _LOW = Confidence.HIGH, Confidence.MEDIUM, Confidence.LOW
_RESTART, _REPLACE, _STOP = Advice.RESTART, Advice.REPLACE_HOST, Advice.STOP


def _row(cause: Cause, fits: Fits, advice: Advice, confidence: Confidence, says: str) -> DiagnosisRule:
    return DiagnosisRule(cause=cause, fits=fits, advice=advice, confidence=confidence, says=says)


RULES: tuple[DiagnosisRule, ...] = (
    _row(
        Cause.HANG,
        lambda death, facts, evidence: bool(death.hang),
        _RESTART,
        _HIGH,
        "hung ({hang}); its stacks say where",
    ),
    _row(
        Cause.PREEMPTED,
        _said(r"DUE TO PREEMPTION|preempt(?:ion|ed) notice"),
        _RESTART,
        _HIGH,
        "was preempted; the restart is free",
    ),
    _row(
        Cause.HOST_OOM,
        _memory_ran_out,
        _RESTART,
        _HIGH,
        "was killed by the kernel: host memory ran out; request more memory, or use fewer loader workers",
    ),
    _row(
        Cause.HOST_OOM,
        _either(_raised("MemoryError"), _said(r"\[Errno 12\]|[Cc]annot allocate memory|std.bad_alloc")),
        _RESTART,
        _MEDIUM,
        "got no more host memory ({error}); request more memory, or use fewer loader workers",
    ),
    # --- devices ----------------------------------------------------------------------------------
    _row(
        Cause.GPU_FAULT,
        _said(
            r"uncorrectable ECC|ECC error|fallen off the bus|GPU is lost|GPU requires reset|Row Remapp|"
            r"hardware error|NVLink error"
        ),
        _REPLACE,
        _HIGH,
        "has a broken GPU ({error}); the host has to be replaced",
    ),
    _row(
        Cause.GPU_FAULT,
        _both(_kernel(is_fatal_xid), _OF_A_DRIVER),
        _REPLACE,
        _HIGH,
        "has a broken GPU (the kernel reports {kernel}); the host has to be replaced",
    ),
    _row(
        Cause.DEVICE_OOM,
        _either(
            _raised("OutOfMemoryError"),
            _said(r"CUDA out of memory|CUDA error: out of memory|hipErrorOutOfMemory"),
        ),
        _RESTART,
        _HIGH,
        "needs more device memory than is free ({error}); use a smaller micro-batch",
    ),
    _row(
        Cause.DEVICE_ASSERT,
        _said(r"device-side assert"),
        _RESTART,
        _HIGH,
        "failed an assertion on the device (often an index out of range); CUDA_LAUNCH_BLOCKING=1 shows it",
    ),
    _row(
        Cause.ILLEGAL_ACCESS,
        _ILLEGAL,
        _RESTART,
        _MEDIUM,
        "accessed device memory illegally ({error}): a kernel's bug, or a GPU that fails",
    ),
    _row(
        Cause.GPU_MISSING,
        _said(
            r"[Nn]o CUDA GPUs are available|no CUDA-capable device|Found no NVIDIA driver|"
            r"all CUDA-capable devices"
        ),
        _REPLACE,
        _MEDIUM,
        "finds no GPU ({error}); the host has to be looked at",
    ),
    # --- mistakes that no restart mends -----------------------------------------------------------
    _row(
        Cause.VERSION,
        _said(
            r"undefined symbol|GLIBC(?:XX)?_[\d.]+'? not found|NCCL version mismatch|version mismatch|"
            r"no kernel image|"
            r"driver .{0,30}is (?:insufficient|too old)|not compatible with the current PyTorch|"
            r"Mismatched (?:NCCL|versions)|was compiled (?:with|using) (?:CUDA|NumPy)|"
            r"PTX .*unsupported toolchain"
        ),
        _STOP,
        _HIGH,
        "has versions that do not fit together ({error}); correct the image",
    ),
    _row(
        Cause.VERSION,
        _raised("UntestedVersion"),
        _STOP,
        _HIGH,
        "refuses a version ({error}); correct the image",
    ),
    _row(
        Cause.TOPOLOGY,
        _either(
            _raised("ConfigError", "LayoutMismatch"),
            _said(
                r"world[ _]size .*(?:divisible|match|equal)|not divisible by|Duplicate GPU detected|"
                r"invalid device ordinal|size mismatch for |invalid usage .*NCCL|"
                r"Missing key\(s\) in state_dict"
            ),
        ),
        _STOP,
        _MEDIUM,
        "has a configuration that cannot work ({error}); correct the configuration",
    ),
    _row(
        Cause.CUDA_ERROR,
        _said(r"CUDA error|CUDNN_STATUS|CUBLAS_STATUS|CUDA driver error|cudaError|ncclUnhandledCudaError"),
        _RESTART,
        _MEDIUM,
        "got an error from CUDA ({error})",
    ),
    _row(
        Cause.NAN,
        _either(
            _raised("LossNotFinite", "FloatingPointError"),
            _both(
                lambda death, facts, evidence: death.error is not None,
                _said(
                    r"(?i)\b(?:loss|grad\w*|norm|value)\b.{0,60}\b(?:nan|inf|non-?finite|not finite)\b|"
                    r"\bnan\b.{0,60}\bloss"
                ),
            ),
        ),
        _STOP,
        _HIGH,
        "has a loss that is not finite ({error}); a restart would meet it again",
    ),
    _row(
        Cause.NAN,
        _both(_raised("CheckpointMissing"), _said(r"no checkpoint before step \d+ is left")),
        _STOP,
        _HIGH,
        "finds no checkpoint from before the loss that was not finite ({error})",
    ),
    # --- disks and ports --------------------------------------------------------------------------
    _row(
        Cause.DISK_FULL,
        _either(
            _said(
                r"No space left on device|\[Errno 28\]|Disk quota exceeded|\[Errno 122\]|"
                r"insufficient shared memory"
            ),
            _disk_is_full,
        ),
        _RESTART,
        _HIGH,
        "found a full disk{full} ({error}); free space, or keep fewer checkpoints",
    ),
    _row(
        Cause.IO_ERROR,
        _both(
            _kernel(is_disk_fault),
            _either(_raised("OSError", "CheckpointWriteFailed"), _ended_by(signal.SIGBUS)),
        ),
        _REPLACE,
        _HIGH,
        "has a broken disk (the kernel reports {kernel}); the host has to be replaced",
    ),
    _row(
        Cause.IO_ERROR,
        _said(
            r"Input/output error|\[Errno 5\]|Stale file handle|\[Errno 116\]|Read-only file system|"
            r"\[Errno 30\]|Transport endpoint is not connected|\[Errno 121\]"
        ),
        _RESTART,
        _MEDIUM,
        "could not use storage ({error})",
    ),
    _row(
        Cause.PORT_TAKEN,
        _said(r"(?i)address already in use|EADDRINUSE|\[Errno 98\]"),
        _RESTART,
        _HIGH,
        "found its port taken ({error}); a restart takes another one",
    ),
    # --- echoes -----------------------------------------------------------------------------------
    _row(
        Cause.PEER_LOST,
        _either(
            _raised(
                "PeerError", "DistBackendError", "DistNetworkError", "DistStoreError", "ConnectionResetError"
            ),
            _raised("BrokenPipeError", "ConnectionRefusedError", "EOFError"),
            _said(
                r"(?i)connection (?:was )?(?:closed|reset) by|broken pipe|connection refused|socket timeout|"
                r"communicator was aborted|remote process (?:has )?exited|ncclRemoteError|ncclSystemError|"
                r"watchdog caught collective operation timeout|timed out waiting \d+ ?ms for (?:recv|send)|"
                r"peer (?:closed|is gone|lost)|failed to recv|wait timeout after|"
                r"gloo.*(?:timed? ?out|closed|no route)|no route to host|rendezvous.*(?:closed|timed? ?out)"
            ),
        ),
        _RESTART,
        _LOW,
        "lost a peer ({error}); the rank that failed first is on another host, or not known",
    ),
    # --- the program ------------------------------------------------------------------------------
    _row(
        Cause.IMPORT,
        _raised_before_a_step("ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError"),
        _STOP,
        _HIGH,
        "cannot load its program ({error}); correct the image or the script",
    ),
    _row(
        Cause.IMPORT,
        _raised("ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError"),
        _RESTART,
        _MEDIUM,
        "cannot load a part of its program ({error}); the disk that holds it may have been away",
    ),
    _row(Cause.MISSING_FILE, _raised("FileNotFoundError"), _RESTART, _HIGH, "misses a file ({error})"),
    _row(Cause.PERMISSION, _raised("PermissionError"), _RESTART, _HIGH, "may not use a file ({error})"),
    _row(
        Cause.ASSERTION,
        _raised("AssertionError"),
        _RESTART,
        _HIGH,
        "failed an assertion of the program ({error}){at}",
    ),
    _row(Cause.EXCEPTION, lambda death, *_: death.error is not None, _RESTART, _HIGH, "raised {error}{at}"),
    # --- nothing was said -------------------------------------------------------------------------
    _row(
        Cause.SEGFAULT,
        _ended_by(*_CRASHES),
        _RESTART,
        _HIGH,
        "crashed in native code ({end}); PYTHONFAULTHANDLER=1 shows where",
    ),
    _row(Cause.ABORT, _ended_by(signal.SIGABRT), _RESTART, _MEDIUM, "aborted in native code ({end})"),
    _row(
        Cause.KILLED,
        lambda death, *_: death.signal != 0,
        _RESTART,
        _MEDIUM,
        "was ended from outside ({end}): neither the launcher nor, as far as it can see, the kernel sent it",
    ),
    _row(
        Cause.EXIT_CODE,
        lambda *_: True,
        _RESTART,
        _LOW,
        "ended with {end} and said nothing; --log-dir DIR --tee 3 keeps what it prints",
    ),
)


def rule_for(death: RankDeath, evidence: Evidence) -> DiagnosisRule:
    """The first row that fits; the last one always does."""
    facts = evidence.facts(death.host)
    return next(rule for rule in RULES if rule.fits(death, facts, evidence))
