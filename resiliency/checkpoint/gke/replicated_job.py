# SPDX-License-Identifier: Apache-2.0
"""Job description file for GKE's replicator; see `resiliency.checkpoint.gke.replicator`."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from resiliency.errors import ConfigError
from resiliency.runtime import RunInfo

#: What saves whole directories, one per host and step.
FRAMEWORK = "pytorch.distributed"
#: The replicator expands variables in names, and takes a name of digits alone for a number.
_JOB_NAME = re.compile(r"(?=.*[A-Za-z])[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, kw_only=True)
class ReplicatedJob:
    """The job as the replicator of a host reads it.

    Args:
        directory: root of the volume shared with it; checkpoints are written there, as ``step=N``.
        nodes: hosts of the job.
        peers_per_node: copies that it keeps on other hosts.
        backup_interval_minutes: how often it copies a checkpoint to the bucket.
        peer_ranks: hosts that keep the copies; () leaves the choice to it.
    """

    directory: Path
    job_name: str
    node_rank: int
    nodes: int
    peers_per_node: int = 1
    backup_interval_minutes: int = 30
    peer_ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not _JOB_NAME.fullmatch(self.job_name):
            raise ConfigError(
                f"the replicator cannot take the job name {self.job_name!r}.",
                hint="Use letters, digits, '.', '_' and '-', at least one letter, and begin with none of the "
                "last three.",
                flag="--job-name",
            )
        if not 0 <= self.node_rank < self.nodes:
            raise ConfigError(f"node rank {self.node_rank} is not below the number of nodes, {self.nodes}.")
        most = max(self.nodes - 1, 1)
        if not 1 <= self.peers_per_node <= most:
            raise ConfigError(
                f"peers_per_node must be 1 to {most} with {self.nodes} nodes, found {self.peers_per_node}."
            )
        if self.backup_interval_minutes < 1:
            raise ConfigError(
                f"backup_interval_minutes must be at least 1, found {self.backup_interval_minutes}."
            )
        if any(not 0 <= peer < self.nodes for peer in self.peer_ranks):
            raise ConfigError(f"peer ranks must be 0 to {self.nodes - 1}, found {self.peer_ranks}.")

    @classmethod
    def from_run(
        cls, info: RunInfo, directory: Path, *, peers_per_node: int = 1, backup_interval_minutes: int = 30
    ) -> ReplicatedJob:
        """As the launcher started this job; every host has equally many ranks."""
        return cls(
            directory=directory,
            job_name=info.job_name,
            node_rank=info.node_rank,
            nodes=info.world_size // info.local_world_size,
            peers_per_node=peers_per_node,
            backup_interval_minutes=backup_interval_minutes,
        )

    def to_yaml(self) -> str:
        fields: dict[str, object] = {
            "job-name": self.job_name,
            "framework": FRAMEWORK,
            "node-rank": self.node_rank,
            "nodes": self.nodes,
            "peers-per-node": self.peers_per_node,
            "backup-interval-minutes": self.backup_interval_minutes,
        }
        if self.peer_ranks:
            fields["peer-ranks"] = list(self.peer_ranks)
        # Values in JSON are values in YAML.
        return "".join(f"{key}: {json.dumps(value)}\n" for key, value in fields.items())
