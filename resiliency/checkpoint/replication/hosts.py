# SPDX-License-Identifier: Apache-2.0
"""Who takes part: the table of an attempt's hosts, which its trainers write and its agents read.

The trainers agree on it when they start, for they have process groups and agents have not.  One
rank of each host writes it to a file that only this user can read, as it holds the secret by which
agents recognise each other.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from resiliency.checkpoint.messages import decode_record, encode_fields
from resiliency.checkpoint.names import save_id_of
from resiliency.checkpoint.replication.placement import Peer
from resiliency.errors import ConfigError, PeerError


@dataclass(frozen=True, kw_only=True)
class HostTable:
    """The hosts of one attempt and what they have agreed on; the same on all of them.

    Args:
        attempt_id: one start of the job.
        token: secret of the attempt.  Whoever has it may store replicas.
        leader: host that finds out which saves are complete; the one with rank 0.
        replicas: copies of each host's checkpoints on other hosts, as far as there are hosts.
        bytes_per_s: that one host sends at most, 0 for no limit.
        keep: how many complete generations of replicas stay.
    """

    attempt_id: str
    run_id: str
    token: str
    leader: str
    replicas: int
    bytes_per_s: int = 0
    keep: int = 1
    peers: tuple[Peer, ...] = ()

    def __post_init__(self) -> None:
        hosts = [peer.host for peer in self.peers]
        if not self.attempt_id or not self.token:
            raise ConfigError("a table of peers needs an attempt id and a token.")
        if self.leader not in hosts or len(set(hosts)) != len(hosts):
            raise ConfigError(
                f"a table of peers names each host once, and its leader: found {self.leader!r} and {hosts}.",
                hint="Do two hosts have one name?  NODE_NAME sets it.",
            )
        if self.replicas < 0 or self.bytes_per_s < 0 or self.keep < 1:
            raise ConfigError(
                f"replicas and bandwidth are not negative and at least one generation stays, found "
                f"{self.replicas}, {self.bytes_per_s} and {self.keep}."
            )

    def peer(self, host: str) -> Peer | None:
        return next((peer for peer in self.peers if peer.host == host), None)

    def copies(self) -> int:
        """Copies of each host's checkpoints that there can be."""
        return min(self.replicas, len(self.peers) - 1)

    def is_of_attempt(self, step: int, save_id: str) -> bool:
        """Whether a save was made by this attempt, and so by exactly these hosts."""
        return save_id == save_id_of(self.attempt_id, step)

    def to_json(self) -> str:
        return json.dumps(encode_fields(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> HostTable:
        """The inverse of `to_json`.

        Raises:
            ConfigError: it is not a table of this release.
        """
        try:
            return decode_record(cls, text)
        except PeerError as error:
            raise ConfigError(
                f"this is not a table of peers: {error}",
                hint="All ranks and agents must run the same release.",
            ) from error

    def write(self, path: str | os.PathLike[str]) -> None:
        """Replace the file at `path`, readable by this user alone, whole or not at all."""
        target = Path(path)
        draft = target.with_name(f".{target.name}.{os.getpid()}")
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(self.to_json())
        draft.replace(target)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> HostTable:
        """The table in a file.

        Raises:
            ConfigError: it cannot be read, or is no table.
        """
        try:
            return cls.from_json(Path(path).read_text())
        except OSError as error:
            raise ConfigError(
                f"cannot read the table of peers {path}: {error}.", path=str(path), errno=error.errno
            ) from error
