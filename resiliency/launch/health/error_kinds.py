# SPDX-License-Identifier: Apache-2.0
"""Kinds of errors by their types and texts: torch's own, echoes of a lost peer, storage and services.

Types are known by their names, and texts by the words of torch, NCCL, gloo, the kernel and services.  A text
counts only where its type can have it: a `KeyError` that names a timeout is no timeout.
"""

from __future__ import annotations

import re

from resiliency.launch.health.evidence import RankError

_TORCH_TYPES = frozenset(
    {
        *("AcceleratorError", "OutOfMemoryError", "DeferredCudaCallError", "CudaError"),
        *("DistError", "DistBackendError", "DistNetworkError", "DistStoreError"),
    }
)
#: How torch begins a `RuntimeError` of its own; also within the message of a loader worker's error.
_TORCH_TEXT = re.compile(
    r"^(?:[\w.]+: )?(?:(?:CUDA|HIP|CUDA driver|cuDNN|NCCL) error|CUDA out of memory|"
    r"No CUDA GPUs are available|Found no NVIDIA driver|The NVIDIA driver on your system is too old|"
    r"Unexpected error from cudaGetDeviceCount|Error\(s\) in loading state_dict for )",
    re.MULTILINE,
)
#: Types by which Python says that the program is wrong: their texts hold names and values of the program.
_MISTAKES = frozenset(
    {
        *("AssertionError", "AttributeError", "ImportError", "IndentationError", "IndexError", "KeyError"),
        *("ModuleNotFoundError", "NameError", "NotImplementedError", "RecursionError", "SyntaxError"),
        *("TypeError", "UnboundLocalError", "UnicodeDecodeError", "ValueError", "ZeroDivisionError"),
    }
)
_PEER_TYPES = frozenset({"PeerError", "DistBackendError", "DistNetworkError", "DistStoreError"})
#: What gloo, NCCL and torch's store say of a peer, also in a log.
PEER_TEXT = re.compile(
    r"(?i)\bgloo/|gloo connect|TCPStore|NCCL (?:error|communicator)|nccl(?:Remote|System|Internal)Error|"
    r"watchdog caught collective operation timeout|connection closed by (?:remote )?peer|"
    r"communicator was aborted|remote process (?:has )?exited|socket timeout|wait timeout after|"
    r"timed out waiting \d+ ?ms for (?:recv|send)|monitoredBarrier|peer (?:is gone|lost)|failed to recv|"
    r"rendezvous.*(?:closed|timed? ?out)"
)
#: Errors of a connection, to a peer or to something that the rank alone uses.
_CONNECTION_TYPES = frozenset(
    {
        *("BrokenPipeError", "ConnectionAbortedError", "ConnectionRefusedError", "ConnectionResetError"),
        "EOFError",
    }
)
#: Code that talks to the peers of a rank.
_PEER_CODE = re.compile(r"torch/distributed/|/resiliency/")
_STORAGE_TYPES = frozenset(
    {
        *("BlockingIOError", "FileExistsError", "InterruptedError", "IOError", "IsADirectoryError"),
        *("NotADirectoryError", "OSError"),
        # Our own, which may also name a tier, a host or a plane that is away.
        *("CheckpointCorrupt", "CheckpointError", "CheckpointIncomplete", "CheckpointMissing"),
        *("CheckpointWriteFailed", "ControlPlaneError", "DataError", "ResourceShortage"),
    }
)
_STORAGE_TEXT = re.compile(
    r"\[Errno (?:5|11|30|10[0-4]|107|11[0-3]|116|117|121)\]|Input/output error|Stale file handle|"
    r"Read-only file system|Transport endpoint is not connected|Remote I/O error|"
    r"enforce fail at inline_container|PytorchStreamWriter failed"
)
_SERVICE_TYPE = re.compile(
    r"SSL|(?i:time_?d?_?out|throttl|unavailable|connect|gaierror|herror|http|urlerror|proxyerror|rpc|retry|"
    r"ratelimit|toomany|slowdown|gateway|deadline|transport|endpoint|socket|expired|credential|refresherror|"
    r"clienterror|apierror|operationalerror|protocolerror|incompleteread|brokenprocesspool|commerror|"
    r"^empty$|^full$)"
)
_SERVICE_TEXT = re.compile(
    r"(?i)\b(?:429|50[0234])\b.{0,60}(?:too many|slow|unavailable|gateway|error|https?:)|"
    r"(?:http|status)\D{0,12}(?:408|429|5\d\d)\b|slow ?down|service ?unavailable|too many requests|throttl|"
    r"rate limit|name resolution|name or service not known|could(?: not|n't) connect|max retries|"
    r"maximum number of retries|connection (?:aborted|closed|error|refused|reset|timed out)|timed ?out|"
    r"deadline exceeded|temporarily|try again|token .{0,20}expired|expired ?token|unreachable|"
    r"no route to host|host is down|broken pipe"
)
_FULL_TEXT = re.compile(r"No space left on device|\[Errno 28\]|Disk quota exceeded|\[Errno 122\]")
_SHM_TEXT = re.compile(
    r"creating shared memory segment /dev/shm|(?:out of|insufficient) shared memory|"
    r"(?:/dev/shm|</torch_).*(?:No space left|Success \(0\))|No space left.*(?:/dev/shm|</torch_)",
    re.DOTALL,
)
_DISK_TEXT = re.compile(r"\[Errno (?:5|30|117)\]|Input/output error|Read-only file system")


def is_of_torch(error: RankError) -> bool:
    """Torch, NCCL or the driver has raised it, and not a program that writes the same words."""
    if error.type.startswith(("torch.", "c10.")) or error.name in _TORCH_TYPES:
        return True
    if error.name.startswith("NVMLError"):
        return True
    return error.name in ("RuntimeError", "Error") and bool(_TORCH_TEXT.search(error.message))


def is_echo(error: RankError) -> bool:
    """It only says that a peer is gone."""
    if error.name in _PEER_TYPES or (error.name not in _MISTAKES and PEER_TEXT.search(error.message)):
        return True
    return error.name in _CONNECTION_TYPES and not _is_own_connection(error)


def _is_own_connection(error: RankError) -> bool:
    """The user's code has called something else than a collective, the store or an agent."""
    if error.user_frame is None:
        return False
    below = error.frames[error.frames.index(error.user_frame) + 1 :]
    return not any(_PEER_CODE.search(frame.file) for frame in below)


def says_full_disk(error: RankError) -> bool:
    return error.name not in _MISTAKES and bool(_FULL_TEXT.search(error.message))


def may_be_full(error: RankError) -> bool:
    """A write may have failed for want of room, which the file system has to confirm."""
    return error.name in ("OSError", "CheckpointWriteFailed") or "inline_container" in error.message


def says_full_shared_memory(error: RankError) -> bool:
    return error.name not in _MISTAKES and bool(_SHM_TEXT.search(error.message))


def says_broken_disk(error: RankError) -> bool:
    """A local disk may be the reason, which the kernel has to confirm."""
    return error.name == "CheckpointWriteFailed" or (
        error.name not in _MISTAKES and bool(_DISK_TEXT.search(error.message))
    )


def is_of_storage(error: RankError) -> bool:
    """Storage, a network or a service did not answer as it should; time mends most of these."""
    if error.name in _STORAGE_TYPES or error.name in _CONNECTION_TYPES or _SERVICE_TYPE.search(error.name):
        return True
    texts = (_STORAGE_TEXT, _SERVICE_TEXT)
    return error.name not in _MISTAKES and any(text.search(error.message) for text in texts)
