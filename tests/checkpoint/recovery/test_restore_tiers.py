# SPDX-License-Identifier: Apache-2.0
"""Restoring from any mix of memory, own disk, peers and shared storage: always one whole save, verified.

Hosts are directories, ranks are real processes, and what is left of the job before is made by hand.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from resiliency.checkpoint.capture.arena import RankArena
from resiliency.checkpoint.locations import ShardLocation
from resiliency.checkpoint.ranks import RankGroup
from resiliency.checkpoint.recovery.inventory import list_local
from resiliency.checkpoint.recovery.restore import Restorer
from resiliency.checkpoint.recovery.sources import Tier
from resiliency.checkpoint.replication.placement import Peer
from resiliency.checkpoint.replication.repairs import repairs
from resiliency.checkpoint.state.fill import plan_restore
from resiliency.checkpoint.state.layout import Shard
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.errors import CheckpointCorrupt, CheckpointIncomplete, LayoutMismatch
from resiliency.testing.rank_pool import RankOutcome, RankPool
from tests.checkpoint.held import (
    SESSION,
    arena_of,
    commit_for_all,
    commit_locally,
    content,
    flip,
    keep_in_memory,
    local_of,
    lose,
    make,
    replicate,
)
from tests.checkpoint.shard_builders import shard_of
from tests.checkpoint.storage_builders import file_in


@dataclass(frozen=True)
class Job:
    """A job that starts: one host for each rank."""

    root: Path
    hosts: tuple[str, ...]
    groups: tuple[str, ...] = ()
    replicated: bool = False
    has_storage: bool = True
    #: Of ranks whose host does not see the shared storage.
    blind: tuple[int, ...] = ()


@dataclass(frozen=True)
class Got:
    """What one rank restored."""

    step: int
    tier: Tier
    content: tuple[bytes, bytes] | None
    moved: frozenset[Tier]
    told: str
    locations: tuple[ShardLocation, ...]


def restorer(rank: int, job: Job, held: ExitStack) -> Restorer:
    host, world_size = job.hosts[rank], len(job.hosts)
    arena = held.enter_context(RankArena(arena_of(job.root, host), rank=rank, world_size=world_size))
    return Restorer(
        arena,
        LocalStorage(job.root / ("unmounted" if rank in job.blind else "persistent"))
        if job.has_storage
        else None,
        RankGroup(rank, world_size),
        replicated=job.replicated,
        local=local_of(job.root, host),
        host=host,
        group=job.groups[rank] if job.groups else "",
    )


class Told(logging.Handler):
    """Keeps what was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage() + "\n"


def restore(rank: int, job: Job) -> Got:
    filled: list[tuple[bytes, bytes]] = []

    def fill(shard: Shard) -> Callable[[], object]:
        return lambda: filled.append(content(shard))

    told, log = Told(), logging.getLogger("resiliency.checkpoint")
    with ExitStack() as held:
        log.addHandler(told)
        held.callback(log.removeHandler, told)
        found = restorer(rank, job, held).restore(fill)
    state = filled[-1] if filled else None
    return Got(found.step, found.tier, state, frozenset(found.bytes_by_tier), told.text, found.locations)


def run(pool: RankPool, *hosts: str, root: Path, **options: object) -> list[Got]:
    job = Job(root, hosts, **options)  # type: ignore[arg-type]
    return pool.run(restore, len(hosts), job, timeout=120.0).values


def states(step: int, world_size: int) -> list[tuple[bytes, bytes]]:
    return [content(make(step, rank, world_size)) for rank in range(world_size)]


def assert_all(found: list[Got], step: int, tier: Tier) -> None:
    """Every rank got its own state of that step."""
    assert [(got.step, got.tier) for got in found] == [(step, tier)] * len(found)
    assert [got.content for got in found] == states(step, len(found))


def save_on(root: Path, step: int, *hosts: str) -> None:
    """Commit `step` on the hosts, one name for each rank."""
    for host in dict.fromkeys(hosts):
        ranks = [rank for rank, name in enumerate(hosts) if name == host]
        commit_locally(root, host, [make(step, rank, len(hosts)) for rank in ranks])


def listed(root: Path, host: str) -> set[tuple[int, int, str]]:
    """Step, rank and owner of what a host still has on its disk."""
    return {(h.step, h.rank, h.source_host) for h in list_local(local_of(root, host), host)}


def test_the_newest_step_comes_from_the_own_disks(tmp_path: Path, rank_pool: RankPool) -> None:
    for step in (1, 2):
        save_on(tmp_path, step, "a", "a", "b")
    commit_for_all(tmp_path, [make(1, rank, 3) for rank in range(3)])
    found = run(rank_pool, "a", "a", "b", root=tmp_path)
    assert_all(found, 2, Tier.LOCAL)
    assert all(got.moved == {Tier.LOCAL} for got in found)


def test_ranks_that_changed_hosts_get_their_own_states_from_peers(
    tmp_path: Path, rank_pool: RankPool
) -> None:
    save_on(tmp_path, 2, "a", "a", "b", "b", "c")
    found = run(rank_pool, "c", "b", "a", "b", "a", root=tmp_path, has_storage=False)
    assert_all(found, 2, Tier.PEERS)
    assert all(got.moved == {Tier.LOCAL, Tier.PEERS} for got in found)


def restore_a_part(rank: int, job: Job) -> tuple[Tier, list[float]]:
    state = {"weights": torch.zeros(1000), "new": torch.zeros(3)}
    with ExitStack() as held:
        found = restorer(rank, job, held).restore(lambda shard: plan_restore(state, shard, partial=True))
    return found.tier, [*state["weights"].unique().tolist(), *state["new"].unique().tolist()]


@pytest.mark.parametrize(("hosts", "tier"), [("ab", Tier.LOCAL), ("ba", Tier.PEERS)])
def test_a_part_of_a_state_comes_from_own_disks_and_from_peers(
    hosts: str, tier: Tier, tmp_path: Path, rank_pool: RankPool
) -> None:
    for rank, host in enumerate("ab"):
        shard = shard_of({"weights": torch.full((1000,), 1.0 + rank), "moments": torch.ones(2000)})
        commit_locally(tmp_path, host, [replace(shard, rank=rank, world_size=2, run_id=SESSION)])
    job = Job(tmp_path, tuple(hosts), has_storage=False)
    found = rank_pool.run(restore_a_part, 2, job, timeout=120.0).values
    assert found == [(tier, [1.0, 0.0]), (tier, [2.0, 0.0])]


def test_a_lost_host_is_made_good_by_its_copies_and_the_copies_by_repairs(
    tmp_path: Path, rank_pool: RankPool
) -> None:
    hosts = ("a", "a", "b", "b", "c")
    save_on(tmp_path, 1, *hosts)
    save_on(tmp_path, 2, *hosts)
    for source_host, keeper in (("a", "b"), ("b", "c"), ("c", "a")):
        for step in (1, 2):
            replicate(tmp_path, source_host, step, to=keeper)
    lose(tmp_path, "b")
    found = run(rank_pool, "a", "a", "new", "new", "c", root=tmp_path)
    assert_all(found, 2, Tier.PEERS)
    # Every rank knows the same, and from that which copies are to be made.
    locations = found[0].locations
    assert {got.locations for got in found} == {locations}
    peers = [
        Peer(host=host, address="", port=0, ranks=ranks)
        for host, ranks in (("a", (0, 1)), ("new", (2, 3)), ("c", (4,)))
    ]
    pushes = repairs("session-2", locations, peers, 1)
    assert {(push.source_host, push.holder) for push in pushes} >= {("a", "a"), ("b", "c")}


def test_a_bad_copy_is_passed_over_for_another_one_and_set_aside(tmp_path: Path, rank_pool: RankPool) -> None:
    save_on(tmp_path, 1, "a", "b", "c")
    save_on(tmp_path, 2, "a", "b", "c")
    for keeper in ("b", "c"):
        replicate(tmp_path, "a", 2, to=keeper)
    flip(file_in(local_of(tmp_path, "b") / "replicas" / "a" / "step=2", "rank=0.slot.bin"))
    lose(tmp_path, "a")
    found = run(rank_pool, "new", "b", "c", root=tmp_path)
    assert_all(found, 2, Tier.PEERS)
    assert listed(tmp_path, "b") == {(1, 1, "b"), (2, 1, "b")}
    assert listed(tmp_path, "c") == {(1, 2, "c"), (2, 2, "c"), (2, 0, "a")}
    assert {(h.host, h.source_host) for h in found[0].locations} == {("b", "b"), ("c", "c"), ("c", "a")}


def only_copy_is_bad(root: Path) -> None:
    save_on(root, 1, "a", "b", "c")
    save_on(root, 2, "a", "b", "c")
    for step in (1, 2):
        replicate(root, "a", step, to="b")
    flip(file_in(local_of(root, "b") / "replicas" / "a" / "step=2", "rank=0.slot.bin"))
    lose(root, "a")


def test_when_the_only_copy_is_bad_all_ranks_go_back_to_the_step_before(
    tmp_path: Path, rank_pool: RankPool
) -> None:
    only_copy_is_bad(tmp_path)
    found = run(rank_pool, "new", "b", "c", root=tmp_path)
    assert_all(found, 1, Tier.PEERS)
    assert "step 2 from peers skipped" in found[0].told
    again = run(rank_pool, "new", "b", "c", root=tmp_path)
    assert_all(again, 1, Tier.PEERS)
    assert "skipped" not in again[0].told  # known by now


def test_when_the_only_copy_is_bad_the_shard_of_the_same_save_comes_from_shared_storage(
    tmp_path: Path, rank_pool: RankPool
) -> None:
    only_copy_is_bad(tmp_path)
    commit_for_all(tmp_path, [make(2, rank, 3) for rank in range(3)])
    found = run(rank_pool, "new", "b", "c", root=tmp_path)
    assert_all(found, 2, Tier.PERSISTENT)
    assert found[0].moved == {Tier.LOCAL, Tier.PERSISTENT}


def test_shards_of_two_attempts_at_one_step_are_never_mixed(tmp_path: Path, rank_pool: RankPool) -> None:
    save_on(tmp_path, 1, "a", "b")
    commit_locally(tmp_path, "a", [make(2, 0, 2)], attempt_id="first")
    commit_locally(tmp_path, "b", [make(2, 1, 2)], attempt_id="second")
    keep_in_memory(tmp_path, "b", make(2, 1, 2), attempt_id="third")
    assert_all(run(rank_pool, "a", "b", root=tmp_path), 1, Tier.LOCAL)


def test_captures_of_survivors_and_copies_of_the_lost_make_one_step(
    tmp_path: Path, rank_pool: RankPool
) -> None:
    save_on(tmp_path, 3, "a", "b", "c")
    replicate(tmp_path, "b", 3, to="c")
    for rank, host in ((0, "a"), (2, "c")):
        keep_in_memory(tmp_path, host, make(3, rank, 3))
        keep_in_memory(tmp_path, host, make(4, rank, 3))  # of which rank 1's is lost
    lose(tmp_path, "b")
    found = run(rank_pool, "a", "new", "c", root=tmp_path)
    assert_all(found, 3, Tier.PEERS)
    assert found[0].moved == {Tier.MEMORY, Tier.PEERS}


def test_ranks_that_changed_places_on_one_host_read_each_others_captures(
    tmp_path: Path, rank_pool: RankPool
) -> None:
    """A replica group: each rank may go on from the capture of the other."""
    for rank in (0, 1):
        keep_in_memory(tmp_path, "a", replace(make(7, rank, 3, like=0), group="twins"))
    keep_in_memory(tmp_path, "b", make(7, 2, 3))
    (tmp_path / "a" / "arena" / "rank-0" / "slot-0").unlink()
    found = run(rank_pool, "a", "a", "b", root=tmp_path, groups=("twins", "twins", ""))
    assert [(got.step, got.tier) for got in found] == [(7, Tier.MEMORY)] * 3
    assert [got.content for got in found] == [
        content(make(7, 1, 3, like=0)),
        content(make(7, 1, 3, like=0)),
        content(make(7, 2, 3)),
    ]


def test_a_shard_that_exists_nowhere_comes_from_a_member_of_its_group(
    tmp_path: Path, rank_pool: RankPool
) -> None:
    for rank, host in enumerate("abcd"):
        commit_locally(tmp_path, host, [replace(make(2, rank, 4, like=rank % 2), group=f"half-{rank % 2}")])
    lose(tmp_path, "c")
    groups = ("half-0", "half-1", "half-0", "half-1")
    found = run(rank_pool, "a", "b", "new", "d", root=tmp_path, groups=groups)
    assert [(got.step, got.tier) for got in found] == [(2, Tier.PEERS)] * 4
    assert [got.content for got in found] == [
        content(make(2, rank, 4, like=rank % 2)) for rank in (0, 1, 0, 3)
    ]


def test_replicas_of_plain_data_parallel_training_go_from_three_to_two_and_back(
    tmp_path: Path, rank_pool: RankPool
) -> None:
    for rank, host in enumerate("abc"):
        commit_locally(tmp_path, host, [make(1, rank, 3, like=0)])
    lose(tmp_path, "b")
    found = run(rank_pool, "c", "a", root=tmp_path, replicated=True)
    tensors = content(make(1, 0, 3))[0]
    assert [(got.step, got.content and got.content[0]) for got in found] == [(1, tensors)] * 2
    for rank, host in enumerate("ca"):
        commit_locally(tmp_path, host, [make(2, rank, 2, like=0)], attempt_id="two")
    found = run(rank_pool, "a", "new", "c", root=tmp_path, replicated=True)
    assert [(got.step, got.tier) for got in found] == [(2, Tier.PEERS)] * 3
    # Each rank prefers the shard of its own number, as far as there is one: it holds more than tensors.
    assert [got.content for got in found[:2]] == [content(make(2, rank, 2, like=0)) for rank in (0, 1)]
    assert found[2].content is not None
    assert found[2].content[0] == content(make(2, 0, 2))[0]


def test_parts_of_two_damaged_copies_make_a_whole_and_do_so_again(
    tmp_path: Path, rank_pool: RankPool
) -> None:
    save_on(tmp_path, 2, "a", "a", "b")
    copy = replicate(tmp_path, "a", 2, to="b")
    flip(file_in(local_of(tmp_path, "a") / "step=2", "rank=0.slot.bin"))
    flip(file_in(copy, "rank=1.slot.bin"))
    for _ in range(2):
        assert_all(run(rank_pool, "a", "a", "b", root=tmp_path), 2, Tier.PEERS)
    assert listed(tmp_path, "a") == {(2, 1, "a")}


def test_nothing_is_restored_when_shards_are_lost_and_the_log_says_which(
    tmp_path: Path, rank_pool: RankPool
) -> None:
    save_on(tmp_path, 2, "a", "b", "c")
    lose(tmp_path, "b")
    found = run(rank_pool, "a", "new", "c", root=tmp_path)
    assert [(got.step, got.tier, got.content) for got in found] == [(0, Tier.NONE, None)] * 3
    assert "step 2 (save session-2) lacks the shards of rank 1: held nowhere" in found[0].told


def test_parts_of_several_saves_are_no_reason_to_begin_anew(tmp_path: Path, rank_pool: RankPool) -> None:
    for step in (1, 2):
        save_on(tmp_path, step, "a", "b", "c")
    lose(tmp_path, "b")
    job = Job(tmp_path, ("a", "new", "c"))
    told = rank_pool.run(refused_or_restored, 3, job, timeout=120.0).values
    assert told[0].startswith(
        "CheckpointIncomplete: of several saves that the hosts hold none is whole:"
        " step 2 (save session-2) lacks the shards of rank 1"
    )
    assert told[1:] == told[:1] * 2


def test_hosts_whose_only_save_was_found_bad_do_not_begin_anew_at_the_next_start_either(
    tmp_path: Path, rank_pool: RankPool
) -> None:
    save_on(tmp_path, 1, "a", "b")
    flip(file_in(local_of(tmp_path, "a") / "step=1", "rank=0.slot.bin"))
    job = Job(tmp_path, ("a", "b"))
    for error in ("none of the 1 checkpoints", "no checkpoint is left that can be used, but there were some"):
        told = rank_pool.run(refused_or_restored, 2, job, timeout=120.0).values
        assert all(text.startswith(f"CheckpointCorrupt: {error}") for text in told), told
    assert "step=1: a shard of it was found bad" in told[1]


@pytest.mark.parametrize("left", ["one whole save", "one whole save and parts of a newer one", "parts"])
def test_a_whole_save_of_another_number_of_ranks_is_no_reason_to_begin_anew_and_parts_of_one_are(
    tmp_path: Path, rank_pool: RankPool, left: str
) -> None:
    if left != "parts":
        save_on(tmp_path, 1, "a", "b", "c", "a")
    if left != "one whole save":
        save_on(tmp_path, 2, "a", "b", "lost", "a")
    job = Job(tmp_path, ("a", "b", "c"), has_storage=False)
    first, *others = rank_pool.run(refused_or_restored, 3, job, timeout=120.0).values
    assert others == [first] * 2
    if left == "parts":
        assert first == "step 0 from none"
    else:
        assert first.startswith(
            "LayoutMismatch: the hosts hold a whole checkpoint of 4 ranks, and this job has 3: "
        )
        assert "Start 4 ranks to go on from step 1." in first


def test_a_host_that_does_not_see_the_storage_costs_the_job_no_checkpoint(
    tmp_path: Path, rank_pool: RankPool
) -> None:
    for step in (1, 2):
        commit_for_all(tmp_path, [make(step, rank, 2) for rank in range(2)])
    job = Job(tmp_path, ("a", "b"), blind=(1,))
    told = rank_pool.run(refused_or_restored, 2, job, timeout=120.0).values
    assert all(
        text.startswith("CheckpointCorrupt: none of the 2 checkpoints that are left can be used")
        for text in told
    )
    assert_all(run(rank_pool, "a", "b", root=tmp_path), 2, Tier.PERSISTENT)


def refused_or_restored(rank: int, job: Job) -> str:
    try:
        got = restore(rank, job)
    except (LayoutMismatch, CheckpointCorrupt, CheckpointIncomplete) as error:
        return f"{type(error).__name__}: {error}"
    return f"step {got.step} from {got.tier.value}"


@pytest.mark.parametrize("newest", ["shared", "local"])
def test_a_newer_checkpoint_of_another_number_of_ranks_is_refused_and_an_older_one_not_missed(
    tmp_path: Path, rank_pool: RankPool, newest: str
) -> None:
    save_on(tmp_path, 2, "a", "b")
    step = 3 if newest == "shared" else 1
    commit_for_all(tmp_path, [make(step, rank, 3) for rank in range(3)])
    found = rank_pool.run(refused_or_restored, 2, Job(tmp_path, ("a", "b")), timeout=120.0).values
    assert found[0] == found[1]
    if newest == "shared":
        assert found[0].startswith(
            f"LayoutMismatch: {tmp_path}/persistent/step=3 was saved by 3 ranks, this job has 2."
        )
    else:
        assert found[0] == "step 2 from local"


@pytest.mark.parametrize("is_whole", [True, False])
def test_who_is_refused_a_persistent_checkpoint_of_other_ranks_hears_what_newer_the_hosts_hold(
    tmp_path: Path, rank_pool: RankPool, is_whole: bool
) -> None:
    commit_for_all(tmp_path, [make(1, rank, 3) for rank in range(3)])
    save_on(tmp_path, 2, "a", "b", "a" if is_whole else "lost")
    first, second = rank_pool.run(refused_or_restored, 2, Job(tmp_path, ("a", "b")), timeout=120.0).values
    assert first == second
    told, hint = first.split("this job has 2.  ")
    assert told == f"LayoutMismatch: {tmp_path}/persistent/step=1 was saved by 3 ranks, "
    assert hint.startswith("The hosts hold newer ones: step 2 (save session-2) lacks the shards of ranks 0-1")
    assert ("Start 3 ranks to go on from step 2.  Step 1: Load it with torch" in hint) is is_whole


def sources(rank: int, job: Job) -> list[tuple[int, str]]:
    with ExitStack() as held:
        return [
            (source.step, source.tier.value)
            for source in restorer(rank, job, held).take_inventory().sources()
        ]


def test_sources_name_each_tier_from_which_a_step_could_come(tmp_path: Path, rank_pool: RankPool) -> None:
    commit_for_all(tmp_path, [make(1, rank, 3) for rank in range(3)])  # of a larger job
    for step in (2, 3):
        save_on(tmp_path, step, "a", "b")
        commit_for_all(tmp_path, [make(step, rank, 2) for rank in range(2)])
    replicate(tmp_path, "a", 3, to="b")
    replicate(tmp_path, "b", 3, to="a")
    for rank, host in enumerate("ab"):
        keep_in_memory(tmp_path, host, make(3, rank, 2))
    expected = [
        (3, "memory"),
        (3, "local"),
        (3, "peers"),
        (3, "persistent"),
        (2, "local"),
        (2, "persistent"),
        (1, "persistent"),
    ]
    assert rank_pool.run(sources, 2, Job(tmp_path, ("a", "b")), timeout=120.0).values == [expected] * 2


def killed_in_the_middle(rank: int, job: Job) -> None:
    def fill(shard: Shard) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    with ExitStack() as held:
        restorer(rank, job, held).restore(fill)


def test_when_a_rank_is_killed_while_all_restore_the_others_end_with_an_error(
    tmp_path: Path, rank_pool: RankPool
) -> None:
    save_on(tmp_path, 2, "a", "b", "c")
    job = Job(tmp_path, ("b", "c", "a"))
    report = rank_pool.run(killed_in_the_middle, 3, job, timeout=120.0, operation_timeout=20.0)
    assert report.outcomes == [RankOutcome.ERROR, RankOutcome.DIED, RankOutcome.ERROR]
    assert list(tmp_path.glob("*/local/*.lease-*")) == []
