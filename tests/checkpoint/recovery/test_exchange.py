# SPDX-License-Identifier: Apache-2.0
"""Shards that travel between ranks: the right bytes arrive, or the rank that wanted them knows why not."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import shutil
import signal
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from resiliency.checkpoint.locations import ShardLocation
from resiliency.checkpoint.recovery.exchange import ExchangeOptions, exchange, rounds
from resiliency.checkpoint.recovery.inventory import open_location
from resiliency.checkpoint.recovery.planner import RestorePlan
from resiliency.checkpoint.recovery.transfer import Incoming, Outgoing
from resiliency.errors import (
    CheckpointCorrupt,
    CheckpointIncomplete,
    PeerError,
    ResiliencyError,
)
from resiliency.testing.rank_pool import RankOutcome, RankPool
from resiliency.testing.system_faults import NO_THREAD, SystemFault
from tests.checkpoint.held import (
    commit_locally,
    content,
    flip,
    local_of,
    lose,
    make,
    on_disks,
    plan_for,
    replicate,
)
from tests.checkpoint.storage_builders import file_in, read_shard
from tests.checkpoint.system_errors import nothing_leaks

PAGE = 4096
#: Small, so that small shards take many messages.
QUICK = ExchangeOptions(message_bytes=16 * PAGE, stall=timedelta(seconds=60))

Received = tuple[bytes, bytes] | str | None


def receive(rank: int, plan: RestorePlan, options: ExchangeOptions = QUICK) -> Received:
    """What came, or the text of the error."""
    try:
        shard = exchange(plan, rank, options)
    except ResiliencyError as error:
        return f"{type(error).__name__}: {error}"
    return None if shard is None else content(shard)


def receive_twice(rank: int, plan: RestorePlan, second: RestorePlan) -> tuple[Received, Received]:
    return receive(rank, plan), receive(rank, second)


def host_per_rank(root: Path, count: int, size: int = 300_000) -> list[str]:
    """Rank r saved step 1 on host r, each shard of another size."""
    hosts = [f"host-{rank}" for rank in range(count)]
    for rank, host in enumerate(hosts):
        commit_locally(root, host, [make(1, rank, count, size=size + 1000 * rank if size else 0)])
    return hosts


@pytest.mark.parametrize("size", [0, 1, 300_000, 9_000_001])
def test_ranks_that_changed_places_send_each_other_their_shards(
    tmp_path: Path, rank_pool: RankPool, size: int
) -> None:
    hosts = host_per_rank(tmp_path, 3, size)
    plan = plan_for(tmp_path, hosts[1:] + hosts[:1])
    assert len(rounds(plan)) == 1  # all at once, in a ring
    found = rank_pool.run(receive, 3, plan, timeout=120.0).values
    assert found == [content(make(1, rank, 3, size=size + 1000 * rank if size else 0)) for rank in range(3)]


def receive_through(rank: int, plan: RestorePlan, device: str | None) -> Received:
    shard = exchange(plan, rank, QUICK, device=None if device is None else torch.device(device))
    return None if shard is None else content(shard)


def test_shards_travel_through_buffers_where_the_group_carries_from_other_memory(
    tmp_path: Path, rank_pool: RankPool
) -> None:
    """The CPU twin of the test with NCCL."""
    hosts = host_per_rank(tmp_path, 2)
    found = rank_pool.run(receive_through, 2, plan_for(tmp_path, hosts[::-1]), "cpu", timeout=120.0).values
    assert found == [content(make(1, rank, 2, size=300_000 + 1000 * rank)) for rank in range(2)]


def receive_over_nccl(rank: int, plan: RestorePlan, store: Path) -> Received:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        store=dist.FileStore(str(store), 2),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
        device_id=torch.device("cuda", rank),
    )
    try:
        dist.all_reduce(torch.ones(1, device="cuda"))
        return receive(rank, plan)
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu(devices=2)
@pytest.mark.leaks("descriptors", reason="CUDA keeps its devices open for the life of the process")
def test_shards_travel_over_nccl(tmp_path: Path, rank_pool: RankPool) -> None:
    hosts = host_per_rank(tmp_path, 2)
    plan, store = plan_for(tmp_path, hosts[::-1]), tmp_path / "store"
    found = rank_pool.run(receive_over_nccl, 2, plan, store, timeout=180.0, group=False).values
    assert found == [content(make(1, rank, 2, size=300_000 + 1000 * rank)) for rank in range(2)]


def test_one_sender_serves_several_ranks_one_after_the_other(tmp_path: Path, rank_pool: RankPool) -> None:
    commit_locally(tmp_path, "old", [make(1, rank, 5) for rank in range(5)])
    plan = plan_for(tmp_path, ["new", "new", "old", "other", "other"])
    assert {assignment.sender for assignment in plan.assignments} == {2, None}
    assert [len(assignments) for assignments in rounds(plan)] == [1, 1, 1, 1]
    found = rank_pool.run(receive, 5, plan, timeout=120.0).values
    assert found == [None if rank == 2 else content(make(1, rank, 5)) for rank in range(5)]


#: Ranks 0, 2, 3 and 4 want the shard that rank 1 can read.
ONE_LEFT = ["new", "old", "other", "other", "third"]


def one_left(root: Path, size: int = 300_000) -> RestorePlan:
    commit_locally(root, "old", [replace(make(1, 1, 5, size=size), group="all")])
    return plan_for(root, ONE_LEFT, groups=["all"] * len(ONE_LEFT))


@pytest.mark.parametrize("size", [0, 1, 300_000])
@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_shard_that_several_ranks_want_is_read_once_and_passed_on_from_each_to_the_next(
    tmp_path: Path, rank_pool: RankPool, size: int, device: str | None
) -> None:
    plan = one_left(tmp_path, size)
    [[chain]] = rounds(plan)
    assert chain.ranks == (1, 0, 2, 3, 4)
    found = rank_pool.run(receive_through, 5, plan, device, timeout=120.0).values
    expected = content(make(1, 1, 5, size=size))
    assert found == [None if rank == 1 else expected for rank in range(5)]


def test_who_passes_a_shard_on_may_send_one_of_its_own_host_meanwhile(
    tmp_path: Path, rank_pool: RankPool
) -> None:
    commit_locally(tmp_path, "a", [replace(make(1, 0, 4, size=300_000), group="even")])
    commit_locally(tmp_path, "b", [replace(make(1, 1, 4, size=200_000), group="odd")])
    # Each of the first two has what the other and one more want.
    plan = plan_for(tmp_path, ["b", "a", "c", "d"], groups=["even", "odd"] * 2)
    assert [[chain.ranks for chain in chains] for chains in rounds(plan)] == [[(1, 0, 2), (0, 1, 3)]]
    found = rank_pool.run(receive, 4, plan, timeout=120.0).values
    shards = [content(make(1, 0, 4, size=300_000)), content(make(1, 1, 4, size=200_000))]
    assert found == shards * 2


def test_a_bad_shard_that_is_passed_on_is_refused_by_all_that_wanted_it(
    tmp_path: Path, rank_pool: RankPool
) -> None:
    plan = one_left(tmp_path)
    flip(file_in(local_of(tmp_path, "old") / "step=1", "rank=1.slot.bin"), 290_000)
    found = rank_pool.run(receive, 5, plan, timeout=120.0).values
    texts = [text for rank, text in enumerate(found) if rank != 1]
    assert all(re.match("CheckpointCorrupt: .* of old has other bytes 0 to ", str(text)) for text in texts)
    # And one that cannot be sent.
    file_in(local_of(tmp_path, "old") / "step=1", "rank=1.slot.bin").unlink()
    found = rank_pool.run(receive, 5, plan, timeout=120.0).values
    texts = [text for rank, text in enumerate(found) if rank != 1]
    assert all(re.match("CheckpointIncomplete: .* could not be sent", str(text)) for text in texts)


def killed_while_passing_on(rank: int, plan: RestorePlan) -> Received:
    """Rank 2, in the middle of the chain, dies when some messages have come."""
    if rank == 2:
        incoming = Incoming(plan.assignments[2].location, 0, QUICK.message_bytes)
        for _, message in zip(range(4), incoming.messages(), strict=False):
            dist.irecv(torch.frombuffer(message, dtype=torch.uint8), 0).wait()
        os.kill(os.getpid(), signal.SIGKILL)
    return receive(rank, plan)


def test_when_a_rank_that_passes_on_is_killed_those_beside_it_are_told(
    tmp_path: Path, rank_pool: RankPool
) -> None:
    plan = one_left(tmp_path)
    report = rank_pool.run(killed_while_passing_on, 5, plan, timeout=120.0)
    assert report[2].outcome is RankOutcome.DIED
    for beside in (0, 3):
        text = report[beside].value
        assert isinstance(text, str)
        assert text.startswith(f"PeerError: rank {beside} lost rank ")


def test_the_shards_of_a_lost_host_come_from_the_host_that_kept_its_copies(
    tmp_path: Path, rank_pool: RankPool
) -> None:
    commit_locally(tmp_path, "a/1", [make(1, 0, 3), make(1, 1, 3)])
    commit_locally(tmp_path, "b", [make(1, 2, 3)])
    replicate(tmp_path, "a/1", 1, to="b")
    lose(tmp_path, "a/1")
    plan = plan_for(tmp_path, ["new", "new", "b"])
    assert rank_pool.run(receive, 3, plan, timeout=120.0).values == [
        content(make(1, 0, 3)),
        content(make(1, 1, 3)),
        None,
    ]


def any_placement(root: Path, seed: int) -> RestorePlan:
    """Five shards and their copies anywhere on four hosts; five ranks on some of them and on new ones.

    In every second placement there are no copies, and the ranks are of two groups.
    """
    chance = random.Random(seed)  # noqa: S311
    old = [chance.choice("abcd") for _ in range(5)]
    groups = [chance.choice("xxy") if seed % 2 else "" for _ in range(5)]
    for host in sorted(set(old)):
        shards = [
            replace(make(1, rank, 5, size=chance.randrange(200_000)), group=groups[rank])
            for rank in range(5)
            if old[rank] == host
        ]
        commit_locally(root, host, shards)
        for keeper in chance.sample("abcd", 0 if seed % 2 else 3):
            if keeper != host:
                replicate(root, host, 1, to=keeper)
    while True:
        with contextlib.suppress(IndexError):  # with these hosts, too much is lost
            hosts = [chance.choice(["a", "b", "c", "d", *["new"] * 6]) for _ in range(5)]
            return plan_for(root, hosts, groups=groups)


def receive_all(rank: int, plans: list[RestorePlan]) -> list[Received]:
    return [receive(rank, plan) for plan in plans]


def test_any_placement_of_shards_and_ranks_brings_each_rank_its_shard(
    tmp_path: Path, rank_pool: RankPool
) -> None:
    plans = [any_placement(tmp_path / str(seed), seed) for seed in range(12)]
    assert max(len(rounds(plan)) for plan in plans) > 2
    assert max(len(chain.ranks) for plan in plans for chains in rounds(plan) for chain in chains) > 2
    found = rank_pool.run(receive_all, 5, plans, timeout=120.0).values
    for number, plan in enumerate(plans):
        for assignment in plan.assignments:
            shard = read_shard(open_location(assignment.location), assignment.location.rank)
            assert found[assignment.rank][number] == (None if assignment.sender is None else content(shard))


def damage(root: Path, how: str) -> None:
    """Something happens to the checkpoint of host-0 after the ranks have agreed on what is there."""
    step = local_of(root, "host-0") / "step=1"
    if how == "a flipped bit":
        flip(file_in(step, "rank=0.slot.bin"), 290_000)
    elif how == "an index of another save":
        commit_locally(root, "else", [make(1, 0, 4, size=77)])
        shutil.copy(file_in(local_of(root, "else") / "step=1", "rank=0.json"), file_in(step, "rank=0.json"))
    elif how == "another save":
        shutil.rmtree(step)
        commit_locally(root, "host-0", [make(1, 0, 4)], attempt_id="later")
    elif how == "a file that is gone":
        file_in(step, "rank=0.slot.bin").unlink()
    elif how == "a file that was cut":
        os.truncate(file_in(step, "rank=0.slot.bin"), 100)
    elif how == "a checkpoint that was removed":
        shutil.rmtree(step)
    elif how == "a marker":
        (step.parent / "step=1-unfinished").touch()


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("a flipped bit", r"CheckpointCorrupt: the shard of rank 0 in .* of host-0 has other bytes 0 to "),
        ("an index of another save", r"CheckpointIncomplete: .* of host-0 could not be sent: .*rank=0.json"),
        (
            "another save",
            r"CheckpointIncomplete: .* could not be sent: .* is not the save session-1 any more",
        ),
        ("a file that is gone", r"CheckpointIncomplete: .* could not be sent: .* lacks its file"),
        ("a file that was cut", r"CheckpointIncomplete: .* could not be sent: .* holds 100 bytes, expected"),
        (
            "a checkpoint that was removed",
            r"CheckpointIncomplete: .* could not be sent: there is no .*manifest",
        ),
        ("a marker", r"CheckpointIncomplete: .* could not be sent: .* is marked as unfinished"),
    ],
)
def test_damage_is_found_by_the_rank_that_wanted_the_shard_and_no_other_rank_notices(
    tmp_path: Path, rank_pool: RankPool, how: str, text: str
) -> None:
    hosts = host_per_rank(tmp_path, 4)
    good = RestorePlan(1, "", "", plan_for(tmp_path, [hosts[0], hosts[2], hosts[1], hosts[3]]).assignments, 0)
    plan = plan_for(tmp_path, hosts[1:] + hosts[:1])
    damage(tmp_path, how)
    found = rank_pool.run(receive_twice, 4, plan, good, timeout=120.0).values
    first, second = [pair[0] for pair in found], [pair[1] for pair in found]
    assert isinstance(first[0], str)
    assert re.match(text, first[0]), first[0]
    assert first[1:] == [content(make(1, r, 4, size=300_000 + 1000 * r)) for r in (1, 2, 3)]
    # The group is as good as before.
    assert second[1:3] == [content(make(1, r, 4, size=300_000 + 1000 * r)) for r in (1, 2)]


def killed_while_sending(rank: int, plan: RestorePlan) -> Received:
    """Rank 0 dies after the index and a part of the payload have left."""
    if rank == 0:
        [assignment] = [assignment for assignment in plan.assignments if assignment.sender == 0]
        messages = Outgoing(assignment.location, assignment.rank, QUICK.message_bytes).messages()
        for _, message in zip(range(4), messages, strict=False):
            dist.isend(torch.frombuffer(message, dtype=torch.uint8), assignment.rank).wait()
        os.kill(os.getpid(), signal.SIGKILL)
    return receive(rank, plan)


def test_when_a_sender_is_killed_its_receiver_is_told_and_the_others_finish(
    tmp_path: Path, rank_pool: RankPool
) -> None:
    commit_locally(tmp_path, "old", [make(1, 0, 5), make(1, 1, 5, size=300_000)])
    for rank in (2, 3, 4):
        commit_locally(tmp_path, f"host-{rank}", [make(1, rank, 5)])
    # Rank 1 is on a new host; ranks 2 and 3 changed places.
    plan = plan_for(tmp_path, ["old", "new", "host-3", "host-2", "host-4"])
    report = rank_pool.run(killed_while_sending, 5, plan, timeout=120.0)
    assert report[0].outcome is RankOutcome.DIED
    lost = report[1].value
    assert isinstance(lost, str)
    assert lost.startswith("PeerError: rank 1 lost rank 0 while they exchanged shards")
    assert [report[rank].value for rank in (2, 3)] == [content(make(1, rank, 5)) for rank in (2, 3)]
    assert report[4].outcome is RankOutcome.OK
    assert report[4].value is None


def silent_sender(rank: int, plan: RestorePlan) -> Received:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    return receive(rank, plan, replace(QUICK, stall=timedelta(seconds=1)))


def test_a_sender_that_falls_silent_is_given_up_at_the_deadline(tmp_path: Path, rank_pool: RankPool) -> None:
    hosts = host_per_rank(tmp_path, 3)
    plan = plan_for(tmp_path, [hosts[1], hosts[0], hosts[2]])
    report = rank_pool.run(silent_sender, 3, plan, timeout=120.0)
    assert [report[0].outcome, report[2].outcome] == [RankOutcome.HUNG, RankOutcome.OK]
    assert isinstance(report[1].value, str)
    assert report[1].value.startswith("PeerError: rank 1 lost rank 0")


@pytest.fixture(scope="module")
def location(tmp_path_factory: pytest.TempPathFactory) -> ShardLocation:
    """A shard of three chunks, the last of which is no whole page."""
    root = tmp_path_factory.mktemp("one")
    commit_locally(root, "here", [make(1, 0, 2, size=9_000_001)])
    [found] = on_disks(root, ["here"])
    return found


def ship(
    location: ShardLocation, message_bytes: int, change: tuple[int, int] | None = None
) -> tuple[Incoming, int]:
    """Carry all messages in this process, and change byte `change[1]` of message `change[0]` on the way."""
    outgoing, incoming = Outgoing(location, 1, message_bytes), Incoming(location, 0, message_bytes)
    count = 0
    for out, into in zip(outgoing.messages(), incoming.messages(), strict=True):
        into[:] = out
        if change is not None and change[0] == count:
            into[change[1] % into.nbytes] ^= 1
        count += 1
    outgoing.close()
    incoming.close()
    return incoming, count


@settings(max_examples=15)
@given(data=st.data())
def test_any_byte_that_changes_on_its_way_is_noticed_however_the_shard_is_cut(
    location: ShardLocation, data: st.DataObject
) -> None:
    message_bytes = PAGE * data.draw(st.integers(30, 3000))
    expected = 3 + -(-location.size_bytes // message_bytes)
    # Of header, index, payload and trailer the two in the middle.
    change = data.draw(st.none() | st.tuples(st.integers(1, expected - 2), st.integers(0, message_bytes)))
    incoming, count = ship(location, message_bytes, change)
    assert count == expected
    if change is None:
        assert content(incoming.shard()) == content(make(1, 0, 2, size=9_000_001))
    else:
        with pytest.raises(CheckpointCorrupt):
            incoming.shard()


def test_a_shard_travels_also_between_ranks_that_may_have_no_more_threads(location: ShardLocation) -> None:
    with nothing_leaks(), SystemFault(Path(location.root), NO_THREAD, call=0, lasts=True):
        incoming, _ = ship(location, 100 * PAGE)
    assert content(incoming.shard()) == content(make(1, 0, 2, size=9_000_001))


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE], ids=["EIO", "ESTALE"])
def test_an_error_of_the_system_at_any_call_of_a_sender_is_told_to_the_receiver_in_place_of_the_shard(
    location: ShardLocation, number: int
) -> None:
    call, hit, failures = 0, True, 0
    while hit:
        root = Path(location.root)
        outgoing, incoming = Outgoing(location, 1, 600 * PAGE), Incoming(location, 0, 600 * PAGE)
        with nothing_leaks():
            arriving = incoming.messages()
            with SystemFault(root, number, call=call) as fault:
                for out in outgoing.messages():
                    next(arriving)[:] = out
                outgoing.close()
            assert next(arriving, None) is None
            incoming.close()
        try:
            incoming.shard()
        except (CheckpointIncomplete, CheckpointCorrupt):
            failures += 1
        hit, call = fault.hit, call + 1
    assert failures > 5


def test_a_sender_without_memory_says_so_before_the_receiver_expects_a_payload(
    location: ShardLocation,
) -> None:
    call, hit, told = 0, True, 0
    while hit:
        outgoing, incoming = Outgoing(location, 1, 600 * PAGE), Incoming(location, 0, 600 * PAGE)
        messages, arriving = outgoing.messages(), incoming.messages()
        with SystemFault(Path(location.root), errno.ENOMEM, call=call) as fault:
            header = next(messages)
        next(arriving)[:] = header
        next(arriving, None)
        outgoing.close()
        incoming.close()
        hit, call = fault.hit, call + 1
        if hit and fault.calls[-1] == "mmap":
            with pytest.raises(CheckpointIncomplete, match="cannot map"):
                incoming.shard()
            told += 1
    assert told > 0


def test_a_sender_of_another_release_is_refused(location: ShardLocation) -> None:
    incoming = Incoming(location, 0, PAGE)
    messages = incoming.messages()
    next(messages)[:5] = b"hello"
    with pytest.raises(PeerError, match="speaks another language"):
        next(messages)
    incoming.close()
