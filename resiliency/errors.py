# SPDX-License-Identifier: Apache-2.0
"""The error tree: who caused a failure, where it happened, and what to do about it.

    ResiliencyError
    ├── ConfigError              the caller: a flag, file, environment variable or topology
    │   └── UntestedVersion      an installed library is not one that this release was tested with
    ├── CheckpointError
    │   ├── CheckpointMissing    no tier holds a complete checkpoint
    │   ├── CheckpointIncomplete a checkpoint lacks files, ranks or its commit
    │   ├── CheckpointCorrupt    bytes differ from what was committed
    │   ├── CheckpointWriteFailed storage refused the bytes (full, read-only, I/O error)
    │   ├── ResourceShortage     this process may have no more memory or threads
    │   └── LayoutMismatch       checkpoint and model disagree about a key, shape or dtype
    ├── LossNotFinite            the loss is NaN or infinite, and the job is to end then
    ├── DataError                training data cannot be read, or a part of it cannot be accounted for
    ├── PeerError                another rank or host died, hung or broke the protocol
    ├── ControlPlaneError        supervisor, daemon or orchestrator
    └── InternalError            a bug of ours

Every error carries the fields it was raised with (`rank`, `step`, `path`, ...), so that a
program can read them, and a text that says what happened, expected against found, and what the
reader can do.  Foreign exceptions are mapped once, in the adapter, with ``raise ... from``.
"""

from __future__ import annotations


class ResiliencyError(Exception):
    """Base of all errors of this project.

    Args:
        message: what happened, expected against found.
        hint: what the reader can do; printed as a second sentence.
        fields: where it happened, for programs: rank, host, step, path, flag, ...
    """

    def __init__(self, message: str, *, hint: str = "", **fields: object) -> None:
        self.message = message
        self.hint = hint
        self.fields = fields
        super().__init__(message)

    def __str__(self) -> str:
        return f"{self.message}  {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions with keyword-only arguments do not survive pickling by default, and these
        # travel between rank processes.
        return _rebuild, (type(self), self.message, self.hint, self.fields)


def _rebuild(
    cls: type[ResiliencyError], message: str, hint: str, fields: dict[str, object]
) -> ResiliencyError:
    return cls(message, hint=hint, **fields)


class ConfigError(ResiliencyError):
    """A flag, file, environment variable or topology that cannot work; nothing was started."""


class UntestedVersion(ConfigError):
    """An installed library is missing or is not a version that this release was tested with."""


class CheckpointError(ResiliencyError):
    """Something about a checkpoint; the subclasses say what."""


class CheckpointMissing(CheckpointError):
    """No tier holds a complete checkpoint."""


class CheckpointIncomplete(CheckpointError):
    """A checkpoint lacks files, ranks or its commit marker."""


class CheckpointCorrupt(CheckpointError):
    """Bytes on storage differ from the bytes that were committed."""


class CheckpointWriteFailed(CheckpointError):
    """Storage refused the bytes (full, read-only, over quota, failing), or the save was given up."""


class ResourceShortage(CheckpointError):
    """This process may have no more memory or threads, which says nothing of the files."""


class LayoutMismatch(CheckpointError):
    """Checkpoint and model disagree about a key, a shape or a dtype."""


class LossNotFinite(ResiliencyError):
    """The loss is NaN or infinite, and the job is to end then (``--on-nan stop``)."""


class DataError(ResiliencyError):
    """Training data cannot be read, or a part of it cannot be accounted for."""


class PeerError(ResiliencyError):
    """Another rank or host died, hung or broke the protocol."""


class ControlPlaneError(ResiliencyError):
    """The supervisor, a host daemon or the orchestrator failed or refused."""


class InternalError(ResiliencyError):
    """An invariant of this project was broken: please report it."""
