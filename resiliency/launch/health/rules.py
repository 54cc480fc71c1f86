# SPDX-License-Identifier: Apache-2.0
"""The ordered table of rules: which cause a death of a rank shows, and what helps.

The first rule that fits a death names its cause.  Rows that say more come before rows that say less: an
import error about a symbol that is missing is a mistake of versions before it is an import error.  A lost
peer comes after all rows that name a fault of the rank itself, and before those that fit everything.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from resiliency.launch.health.causes import OWN, Advice, Cause, Confidence
from resiliency.launch.health.error_kinds import (
    PEER_TEXT,
    is_echo,
    is_of_storage,
    is_of_torch,
    may_be_full,
    says_broken_disk,
    says_full_disk,
    says_full_shared_memory,
)
from resiliency.launch.health.evidence import Evidence, HostFacts, RankDeath, RankError

#: Xids after which a GPU does not work until it is reset or replaced, as in `supervisor.policy.xid`.
FATAL_XIDS = frozenset(
    {46, 48, 54, 62, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, 143, 151, 155, 156, 158}
)
SHARED_MEMORY = "/dev/shm"  # noqa: S108  (a name, in which nothing is written)
_XID = re.compile(r"NVRM: Xid \([^)]*\): (\d+)")
_OOM_KILL = re.compile(
    r"Out of memory: Kill|oom-kill:|Killed process \d+ .*(?:total-vm|anon-rss)|oom_reaper:"
)
_DISK_FAULT = re.compile(
    r"I/O error, dev|Buffer I/O error|EXT4-fs error|XFS .*(?:I/O error|[Cc]orruption)|"
    r"nvme.*(?:timeout|reset)|Remounting filesystem read-only|BTRFS.*error"
)
#: A drive without a medium, an image that is mounted, memory; and an answer that only came late.
_NO_DISK_FAULT = re.compile(r"\bdev (?:sr|loop|fd|ram|zram)\d|completion polled")
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


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A death and its row.  `words`: of the rank, on which the row rests; `error`: whose these are."""

    death: RankDeath
    rule: DiagnosisRule
    words: str
    error: RankError | None


def _error(test: Callable[[RankError], bool]) -> Fits:
    return lambda death, facts, evidence: death.error is not None and test(death.error)


def _said(pattern: str) -> Fits:
    """By an exception; for words of a log see `SUGGESTIONS`."""
    compiled = re.compile(pattern)
    return _error(lambda error: bool(compiled.search(f"{error.type}: {error.message}")))


def _raised(*names: str) -> Fits:
    return _error(lambda error: error.name in names)


def _raised_ours(*names: str) -> Fits:
    """Other libraries have a `ConfigError`, too."""
    return _error(lambda error: error.type in {f"resiliency.errors.{name}" for name in names})


def _before_a_step(death: RankDeath, facts: HostFacts, evidence: Evidence) -> bool:
    return evidence.step is None


def _ended_by(*numbers: int) -> Fits:
    return lambda death, facts, evidence: death.signal in numbers


def _either(*fits: Fits) -> Fits:
    return lambda death, facts, evidence: any(one(death, facts, evidence) for one in fits)


def _both(*fits: Fits) -> Fits:
    return lambda death, facts, evidence: all(one(death, facts, evidence) for one in fits)


def _torch(pattern: str) -> Fits:
    return _both(_error(is_of_torch), _said(pattern))


def is_fatal_xid(line: str) -> bool:
    """Whether a line of the kernel says that a GPU has to be reset or replaced."""
    match = _XID.search(line)
    return match is not None and int(match[1]) in FATAL_XIDS


def is_disk_fault(line: str) -> bool:
    """Whether a line of the kernel says that a disk or its file system is broken."""
    return bool(_DISK_FAULT.search(line)) and not _NO_DISK_FAULT.search(line)


def _kernel(test: Callable[[str], bool]) -> Fits:
    return lambda death, facts, evidence: any(map(test, facts.kernel or ()))


_LOADER_KILLED = _said(r"DataLoader worker .*(?:killed by signal|exited unexpectedly)")
_KILLED = _either(_ended_by(signal.SIGKILL), _both(_LOADER_KILLED, _said(r"signal: Killed|unexpectedly")))


def _memory_ran_out(death: RankDeath, facts: HostFacts, evidence: Evidence) -> bool:
    """By the counter of the job's own group, which also says that a kill was none of its own."""
    return bool(facts.oom_kills) and _KILLED(death, facts, evidence)


def _memory_may_have_run_out(death: RankDeath, facts: HostFacts, evidence: Evidence) -> bool:
    """By a line of the kernel, which may be about another job of the host."""
    seen = facts.oom_kills is None and any(map(_OOM_KILL.search, facts.kernel or ()))
    return seen and _KILLED(death, facts, evidence)


def _is_full(shared_memory: bool) -> Fits:
    return lambda death, facts, evidence: any((one == SHARED_MEMORY) is shared_memory for one in facts.full)


_CUDA = re.compile(r"CUDA|cuda|NCCL|cuDNN|cublas")


def _may_be_of_a_driver(death: RankDeath, facts: HostFacts, evidence: Evidence) -> bool:
    """A line of a log is enough here, because the kernel says the rest."""
    return death.signal != 0 or bool(_CUDA.search(death.text))


_IMPORT_FAILED = _raised("ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError")

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
        Cause.HOST_OOM,
        _memory_ran_out,
        _RESTART,
        _HIGH,
        "was killed by the kernel: host memory ran out; request more memory, or use fewer loader workers",
    ),
    _row(
        Cause.HOST_OOM,
        _memory_may_have_run_out,
        _RESTART,
        _LOW,
        "was killed, and the kernel killed for memory on this host; request more memory, or use fewer loader "
        "workers",
    ),
    # --- shared and locked memory: before the memory of host and device, whose words they use ---------
    _row(
        Cause.DISK_FULL,
        _error(says_full_shared_memory),
        _RESTART,
        _HIGH,
        "found /dev/shm full ({error}); enlarge it (docker --shm-size, an emptyDir of medium Memory), or use "
        "fewer loader workers",
    ),
    _row(
        Cause.DISK_FULL,
        _both(_ended_by(signal.SIGBUS), _is_full(shared_memory=True)),
        _RESTART,
        _MEDIUM,
        "crashed ({end}) with a full /dev/shm; enlarge it (docker --shm-size, an emptyDir of medium Memory)",
    ),
    _row(
        Cause.PERMISSION,
        _said(r"ibv_\w+ failed with error Cannot allocate memory"),
        _RESTART,
        _HIGH,
        "may not lock memory for its network adapter ({error}); raise the limit, see ulimit -l",
    ),
    # --- devices ----------------------------------------------------------------------------------
    _row(
        Cause.DEVICE_OOM,
        _either(
            _raised("OutOfMemoryError"),
            _torch(
                r"CUDA out of memory|CUDA error: out of memory|hipErrorOutOfMemory|"
                r"CUBLAS_STATUS_ALLOC_FAILED|Cuda failure (?:\d+ )?'out of memory'"
            ),
        ),
        _RESTART,
        _HIGH,
        "needs more device memory than is free ({error}); use a smaller micro-batch",
    ),
    _row(
        Cause.HOST_OOM,
        _either(
            _raised("MemoryError"), _said(r"\[Errno 12\]|[Cc]an(?:not|'t) allocate memory|std.bad_alloc")
        ),
        _RESTART,
        _MEDIUM,
        "got no more host memory ({error}); request more memory, or use fewer loader workers",
    ),
    _row(
        Cause.GPU_FAULT,
        _torch(
            r"uncorrectable ECC|ECC error|fallen off the bus|GPU is lost|GpuIsLost|GPU requires reset|"
            r"Row Remapp|hardware error|NVLink error"
        ),
        _REPLACE,
        _HIGH,
        "has a broken GPU ({error}); the host has to be replaced",
    ),
    _row(
        Cause.GPU_FAULT,
        _both(_kernel(is_fatal_xid), _may_be_of_a_driver),
        _REPLACE,
        _HIGH,
        "has a broken GPU (the kernel reports {kernel}); the host has to be replaced",
    ),
    _row(
        Cause.DEVICE_ASSERT,
        _torch(r"device-side assert"),
        _RESTART,
        _HIGH,
        "failed an assertion on the device (often an index out of range); CUDA_LAUNCH_BLOCKING=1 shows it",
    ),
    _row(
        Cause.ILLEGAL_ACCESS,
        _torch(r"illegal memory access|an illegal instruction was encountered|misaligned address"),
        _RESTART,
        _MEDIUM,
        "accessed device memory illegally ({error}): a kernel's bug, or a GPU that fails",
    ),
    _row(
        Cause.GPU_MISSING,
        _torch(r"No CUDA GPUs are available|no CUDA-capable device|Found no NVIDIA driver"),
        _REPLACE,
        _MEDIUM,
        "finds no GPU ({error}); the host has to be looked at",
    ),
    # --- mistakes that no restart mends -----------------------------------------------------------
    _row(
        Cause.VERSION,
        _either(
            _both(
                _raised("ImportError", "ModuleNotFoundError", "OSError"),
                _said(r"undefined symbol|GLIBC(?:XX)?_[\d.]+'? not found|was compiled (?:with|using) NumPy"),
            ),
            _torch(
                r"no kernel image|driver .{0,30}is (?:insufficient|too old)|NCCL version mismatch|"
                r"Mismatched NCCL|PTX .*unsupported toolchain"
            ),
            _raised_ours("UntestedVersion"),
        ),
        _STOP,
        _HIGH,
        "has versions that do not fit together ({error}); correct the image",
    ),
    _row(
        Cause.TOPOLOGY,
        _either(
            _raised_ours("ConfigError", "LayoutMismatch"),
            _torch(
                r"Duplicate GPU detected|invalid device ordinal|invalid usage .*NCCL|"
                r"Error\(s\) in loading state_dict for "
            ),
        ),
        _STOP,
        _MEDIUM,
        "has a configuration that cannot work ({error}); correct the configuration",
    ),
    _row(
        Cause.CUDA_ERROR,
        _torch(r"CUDA error|HIP error|CUDNN_STATUS|CUDA driver error|cudaError|ncclUnhandledCudaError"),
        _RESTART,
        _MEDIUM,
        "got an error from CUDA ({error})",
    ),
    _row(
        Cause.NAN,
        _either(
            _raised("LossNotFinite", "FloatingPointError"),
            _said(
                r"(?i)\b(?:loss|grad\w*|norm|value)\b.{0,60}\b(?:nan|inf|non-?finite|not finite)\b|"
                r"\bnan\b.{0,60}\bloss"
            ),
        ),
        _STOP,
        _HIGH,
        "has a loss that is not finite ({error})",
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
        _either(_error(says_full_disk), _both(_is_full(shared_memory=False), _error(may_be_full))),
        _RESTART,
        _HIGH,
        "found a full disk{full} ({error}); free space, or keep fewer checkpoints",
    ),
    _row(
        Cause.IO_ERROR,
        _both(_kernel(is_disk_fault), _either(_error(says_broken_disk), _ended_by(signal.SIGBUS))),
        _REPLACE,
        _MEDIUM,
        "has a broken disk (the kernel reports {kernel}); the host has to be replaced",
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
        _error(is_echo),
        _RESTART,
        _LOW,
        "lost a peer ({error}); the rank that failed first is on another host, or not known",
    ),
    # --- storage and services ---------------------------------------------------------------------
    _row(
        Cause.KILLED,
        _LOADER_KILLED,
        _RESTART,
        _MEDIUM,
        "lost a loader worker ({error}); the kernel's log may say why",
    ),
    _row(Cause.MISSING_FILE, _raised("FileNotFoundError"), _RESTART, _HIGH, "misses a file ({error}){at}"),
    _row(Cause.PERMISSION, _raised("PermissionError"), _RESTART, _HIGH, "may not use a file ({error}){at}"),
    _row(
        Cause.IO_ERROR,
        _error(is_of_storage),
        _RESTART,
        _MEDIUM,
        "could not use storage or a service ({error}){at}",
    ),
    # --- the program ------------------------------------------------------------------------------
    _row(
        Cause.IMPORT,
        _both(_IMPORT_FAILED, _before_a_step),
        _STOP,
        _HIGH,
        "cannot load its program ({error}); correct the image or the script",
    ),
    _row(
        Cause.IMPORT,
        _IMPORT_FAILED,
        _RESTART,
        _MEDIUM,
        "cannot load a part of its program ({error}); the disk that holds it may have been away",
    ),
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
        "ended with {end} and printed no error",
    ),
)


def _suggestion(
    cause: Cause, pattern: str | re.Pattern[str], says: str
) -> tuple[re.Pattern[str], DiagnosisRule]:
    compiled = re.compile(pattern)
    return compiled, _row(cause, lambda *_: True, _RESTART, _LOW, says)


#: What a line of the log may mean where no exception is known.  A program prints many words that have ended
#: nothing, so these inform: they never ask for another host, end a job, or count as the same error again.
SUGGESTIONS = (
    _suggestion(
        Cause.PREEMPTED,
        r"^slurmstepd: error: .*DUE TO PREEMPTION",
        "was preempted, as its log says ({error})",
    ),
    _suggestion(
        Cause.PEER_LOST,
        PEER_TEXT,
        "ended with {end} after it lost a peer, as its log says ({error}); the rank that failed first is on "
        "another host, or not known",
    ),
    _suggestion(
        Cause.DEVICE_OOM,
        r"CUDA out of memory",
        "ended with {end}; by its log it needs more device memory than is free ({error})",
    ),
    _suggestion(
        Cause.CUDA_ERROR,
        r"\bCUDA error: ",
        "ended with {end}; by its log it got an error from CUDA ({error})",
    ),
    _suggestion(
        Cause.DISK_FULL,
        r"No space left on device",
        "ended with {end}; by its log it found a full disk ({error})",
    ),
)
_SPEAKS = (Cause.ABORT, Cause.KILLED, Cause.EXIT_CODE)


def judge(death: RankDeath, evidence: Evidence) -> Judgement:
    """The first row that fits; the last one always does.

    Where the exception is one of the program, but another one from outside has led to it, that one counts:
    most libraries wrap what storage and services answer.
    """
    rule = _first(death, evidence)
    if death.error is None:
        line = death.log[-1] if death.log else "no text"
        if rule.cause in _SPEAKS:
            rule, line = next(_suggested(death), (rule, line))
        return Judgement(death=death, rule=rule, words=line, error=None)
    if rule.cause in OWN:
        for one in death.error.chain:
            found = _first(replace(death, error=one), evidence)
            if found.cause not in OWN:
                return Judgement(death=death, rule=found, words=f"{death.error}, after {one}", error=one)
    return Judgement(death=death, rule=rule, words=str(death.error), error=death.error)


def _first(death: RankDeath, evidence: Evidence) -> DiagnosisRule:
    facts = evidence.facts(death.host)
    return next(rule for rule in RULES if rule.fits(death, facts, evidence))


def _suggested(death: RankDeath) -> Iterator[tuple[DiagnosisRule, str]]:
    for pattern, rule in SUGGESTIONS:
        # torch also warns of connections that it makes again; what a rank leaves for, it prints last.
        early = rule.cause is Cause.PEER_LOST and death.signal == 0
        for line in death.log[-1:] if early else reversed(death.log):
            if pattern.search(line):
                yield rule, line
