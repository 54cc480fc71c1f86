# SPDX-License-Identifier: Apache-2.0
"""How a rank joins its job: it meets the others, opens its part of shared memory, and its agent meets theirs.

Collective, in this order, on all ranks: `join`, and once the agents are there, `ReplicaHosts.meet`.
"""

from __future__ import annotations

import socket
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from resiliency.checkpoint.agent.client import AgentLink
from resiliency.checkpoint.agent.peers import table_path
from resiliency.checkpoint.agent.protocol import Attach, Peers, Repair, Settings
from resiliency.checkpoint.capture.arena import RankArena
from resiliency.checkpoint.capture.job_memory import clean_up, job_directory
from resiliency.checkpoint.machine import Machine
from resiliency.checkpoint.ranks import RankGroup
from resiliency.checkpoint.recovery.restore import Restored
from resiliency.checkpoint.replication.hosts import HostTable
from resiliency.checkpoint.replication.repairs import repairs
from resiliency.checkpoint.trainer.options import CheckpointerOptions
from resiliency.checkpoint.trainer.rendezvous import Rendezvous, exchange_agent_addresses, meet
from resiliency.errors import ConfigError, ResiliencyError
from resiliency.runtime import RunInfo


@dataclass(frozen=True, kw_only=True)
class JobContext:
    """What a rank has once it has joined.

    Attributes:
        attach: what it says of itself to its agent.
        directory: of the job's captures on this host.
        arena: its own part of that.
    """

    rendezvous: Rendezvous
    attach: Attach
    directory: Path
    arena: RankArena


def join(
    rank_group: RankGroup,
    info: RunInfo,
    settings: Settings,
    options: CheckpointerOptions,
    *,
    group: str,
    parallel_groups: Sequence[str] = (),
) -> JobContext:
    """Meet the other ranks, and open this one's shared memory; collective.

    Args:
        group: of ranks that may stand in for each other.
        parallel_groups: that this rank is a member of.
    Raises:
        ConfigError: `parallel_groups` is one text, ranks were given different tiers, two hosts have one name
            or one directory, there is no room in shared memory, or a living process owns this rank.
        PeerError: another rank could not.
    """
    _check_labels(parallel_groups)
    # Copies leave both kinds of groups: where a stand-in is, the same state is already.
    machine = Machine.of_this_process(options.arena_root, _made(settings.local_directory))
    groups = {group, *parallel_groups}
    directory = _job_directory(info, settings, options)
    rendezvous = meet(
        rank_group, info, tiers=settings.tiers, groups=groups, machine=machine, arena=directory.name
    )
    attach = Attach(
        rank=rank_group.rank,
        world_size=rank_group.world_size,
        local_ranks=rendezvous.hosts[info.host],
        run_id=info.job_name,
        attempt_id=rendezvous.attempt_id,
        host=info.host,
        peer_address=info.peer_address,
        settings=settings,
    )
    arena = _open_arena(rank_group, attach, directory, options, group)
    return JobContext(rendezvous=rendezvous, attach=attach, directory=directory, arena=arena)


def _job_directory(info: RunInfo, settings: Settings, options: CheckpointerOptions) -> Path:
    """Where this host of the job keeps captures."""
    # Two directories are two jobs, whatever their names: a program may keep two checkpointers.
    suffix = f"{zlib.crc32((settings.directory or settings.local_directory).encode()):08x}"
    # Hosts that share a machine have names of their own.  The machine's name is left out: a container that is
    # started again often has another one, and its captures are still there.
    node = "" if info.host == socket.gethostname() else f"@{info.host}"
    return job_directory(f"{info.job_name}{node}-{suffix}", options.arena_root)


def _made(local_directory: str) -> Path | None:
    """The directory of the local tier, made if it can be; None: there is no such tier."""
    if not local_directory:
        return None
    with suppress(OSError):  # a save tells
        Path(local_directory).mkdir(parents=True, exist_ok=True)
    return Path(local_directory)


def _check_labels(parallel_groups: Sequence[str]) -> None:
    # Of a text alone each character would be a group, shared by nearly all, and no copy better placed.
    if isinstance(parallel_groups, str):
        raise ConfigError(
            f"parallel_groups takes several labels, found the text {parallel_groups!r}.",
            hint=f"Give ({parallel_groups!r},).",
        )


def _open_arena(
    rank_group: RankGroup, attach: Attach, directory: Path, options: CheckpointerOptions, group: str
) -> RankArena:
    error: ResiliencyError | None = None
    arena = None
    try:
        if _is_first_of_host(attach):
            clean_up(options.arena_root, keep=directory)
        arena = RankArena(
            directory,
            rank=attach.rank,
            world_size=attach.world_size,
            slots=options.slots or (3 if len(attach.settings.tiers) > 1 else 2),
            run_id=attach.attempt_id,
            group=group,
        )
    except ResiliencyError as failure:
        error = failure
    except OSError as failure:
        error = ConfigError(
            f"rank {attach.rank} cannot keep captures in {directory}: {failure}.",
            hint="CheckpointerOptions(arena_root=...) must name a directory in memory, on every host.",
            rank=attach.rank,
            path=str(directory),
        )
    try:
        rank_group.check(error, "opening shared memory")
    except ResiliencyError:
        if arena is not None:
            arena.close()
        raise
    assert arena is not None
    return arena


class ReplicaHosts:
    """The hosts of a job, as far as they keep copies for each other; each rank has one.

    Args:
        link: to the agent of this host.
    """

    def __init__(self, context: JobContext, link: AgentLink) -> None:
        self._context = context
        self._link = link
        self._table: HostTable | None = None

    def meet(self, rank_group: RankGroup, info: RunInfo) -> None:
        """Tell this host's agent of the others, if there are any it may copy to; collective.

        Raises:
            ConfigError: a rank could not write what its agent is to read; on the others PeerError.
        """
        context, attach = self._context, self._context.attach
        if not attach.settings.local_directory or len(context.rendezvous.hosts) == 1:
            return
        path = table_path(context.directory, attach.local_ranks[0])
        self._table = exchange_agent_addresses(
            rank_group, context.rendezvous, attach, port=self._link.peer_port, path=path, info=info
        )
        if _is_first_of_host(attach):
            self._link.request(Peers(path=str(path)))

    def meet_again(self, attach: Attach, rank_group: RankGroup, info: RunInfo) -> None:
        """Under the name of another attempt; else like `meet`."""
        rendezvous = self._context.rendezvous.renamed(attach.attempt_id)
        self._context = replace(self._context, rendezvous=rendezvous, attach=attach)
        self.meet(rank_group, info)

    def repair(self, restored: Restored) -> None:
        """Have the hosts that are here make up for the copies that were lost with others."""
        attach = self._context.attach
        if self._table is None or not _is_first_of_host(attach):
            return
        for push in repairs(restored.save_id, restored.locations, self._table.peers, self._table.copies()):
            if push.holder == attach.host:
                self._link.request(
                    Repair(
                        step=push.step,
                        save_id=push.save_id,
                        source_host=push.source_host,
                        root=push.root,
                        target=push.target,
                    )
                )


def _is_first_of_host(attach: Attach) -> bool:
    return attach.rank == attach.local_ranks[0]
