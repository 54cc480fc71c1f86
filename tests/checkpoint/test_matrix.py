# SPDX-License-Identifier: Apache-2.0
"""Hosts are lost, exchanged, cut off and damaged; the job goes on from the newest complete step, bit by bit.

Each test trains on a cluster of hosts without shared storage (unless it says otherwise) until something
happens, starts the job again on the hosts that are left, and compares every loss after that with the
curve of a job to which nothing happened.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from resiliency.checkpoint.replication.hosts import HostTable
from resiliency.testing.cluster.hosts import (
    ClusterJob,
    FaultHit,
    HostFault,
    HostPhase,
    TestCluster,
    flip_bit,
)
from resiliency.testing.cluster.training import Training, expected_losses, train

#: The last step.  Saves are at even steps, so the copies of 6 are there when the job parks at it.
STEPS, PARK = 10, 6
WHOLE = Training(steps=STEPS, await_copies=True)
PARKED = replace(WHOLE, park=PARK)


@pytest.fixture
def new_cluster(tmp_path: Path) -> Iterator[Callable[..., TestCluster]]:
    clusters: list[TestCluster] = []

    def make(hosts: int, **options: object) -> TestCluster:
        clusters.append(TestCluster(hosts, log=tmp_path / "cluster.txt", **options))  # type: ignore[arg-type]
        return clusters[-1]

    yield make
    for cluster in clusters:
        cluster.close()


def park(cluster: TestCluster, training: Training = PARKED, order: Sequence[str] | None = None) -> None:
    """Train until all ranks wait at the step to park at, then kill the ranks: their agents live on."""
    job = cluster.start(train, training, order=order)
    job.wait_for_line(rf"parked {training.park}", count=len(order or cluster.alive))
    job.end()


def goes_on(
    cluster: TestCluster,
    step: int,
    *,
    order: Sequence[str] | None = None,
    training: Training = WHOLE,
    world: int = 0,
) -> list[str]:
    """Start the job again, and check that it goes on from `step` as if nothing had been.

    Returns the tier from which each rank got its state.
    """
    job = cluster.start(train, training, order=order)
    restored, tiers = job.restored()
    assert restored == step, cluster.tail()
    assert job.wait() == [0] * len(tiers)
    is_as_expected(job, training, step, world or len(tiers))
    return tiers


def is_as_expected(job: ClusterJob, training: Training, step: int, world: int) -> None:
    curve = expected_losses(training, world)
    assert job.losses == {at: loss for at, loss in curve.items() if at > step}


# --- hosts come and go ---------------------------------------------------------------------------


def lose_everything(cluster: TestCluster) -> list[str]:
    cluster.kill("h1", disk=True)
    cluster.revive("h1")
    return ["h0", "h1", "h2"]


def replace_by_spare(cluster: TestCluster) -> list[str]:
    cluster.kill("h1", disk=True)
    cluster.add("h3")
    return ["h0", "h3", "h2"]


def lose_the_first(cluster: TestCluster) -> list[str]:
    cluster.kill("h0", disk=True)
    cluster.add("h3")
    return ["h3", "h1", "h2"]


def swap(cluster: TestCluster) -> list[str]:
    return ["h1", "h0", "h2"]


def permute(cluster: TestCluster) -> list[str]:
    return ["h2", "h0", "h1"]


def power_cut(cluster: TestCluster) -> list[str]:
    for name in cluster.alive:
        cluster.kill(name)
        cluster.revive(name)
    return ["h0", "h1", "h2"]


def power_cut_and_a_lost_disk(cluster: TestCluster) -> list[str]:
    order = power_cut(cluster)
    cluster.kill("h2", disk=True)
    cluster.add("h3")
    return ["h3", *order[:2]]


@pytest.mark.parametrize(
    "happen",
    [
        lose_everything,
        lose_the_first,
        power_cut_and_a_lost_disk,
        *(
            pytest.param(happen, marks=pytest.mark.thorough("what happens beside it is near"))
            for happen in (replace_by_spare, swap, permute, power_cut)
        ),
    ],
)
def test_the_job_goes_on_bit_by_bit_after(
    new_cluster: Callable[..., TestCluster], happen: Callable[[TestCluster], list[str]]
) -> None:
    cluster = new_cluster(3)
    park(cluster)
    assert all(holders != [owner] for owner, holders in cluster.copies(PARK).items())
    goes_on(cluster, PARK, order=happen(cluster))


@pytest.mark.parametrize(
    "hosts", [2, 5, *(pytest.param(hosts, marks=pytest.mark.thorough("five are near")) for hosts in (4, 8))]
)
def test_any_number_of_hosts_survives_the_loss_of_one(
    new_cluster: Callable[..., TestCluster], hosts: int
) -> None:
    racks = {"domains": lambda name: {"rack": str(int(name[1:]) % 2)}} if hosts > 2 else {}
    cluster = new_cluster(hosts, **racks)
    park(cluster)
    for owner, holders in cluster.copies(PARK).items():
        assert holders != [owner]
        if racks:  # copies leave the failure domain of their owner
            assert any(int(holder[1:]) % 2 != int(owner[1:]) % 2 for holder in holders)
    lost = hosts // 2
    cluster.kill(f"h{lost}", disk=True)
    cluster.add(f"h{hosts}")
    goes_on(cluster, PARK, order=[f"h{hosts if index == lost else index}" for index in range(hosts)])


@pytest.mark.parametrize(
    "flipped", [True, pytest.param(False, marks=pytest.mark.thorough("a lost host and a bad copy are near"))]
)
def test_with_two_copies_each_two_hosts_may_be_lost_or_one_and_a_copy_be_bad(
    new_cluster: Callable[..., TestCluster], flipped: bool
) -> None:
    cluster = new_cluster(4)
    training = replace(WHOLE, replicas=2)
    park(cluster, replace(training, park=PARK))
    holders = cluster.copies(PARK)
    assert sorted(len(of_one) for of_one in holders.values()) == [2] * 4
    # The one whose host is lost, and one of the two hosts from which its shard could come.
    cluster.kill("h1", disk=True)
    cluster.add("h4")
    order = ["h0", "h4", "h2", "h3"]
    other = holders["h1"][0]
    if flipped:
        (data,) = cluster[other].disk.glob(f"**/replicas/h1/step={PARK}/**/rank=*.slot.bin")
        flip_bit(data)
    else:
        cluster.kill(other, disk=True)
        cluster.add("h5")
        order[order.index(other)] = "h5"
    goes_on(cluster, PARK, order=order, training=training)


def test_copies_leave_the_hosts_of_the_owners_parallel_group_and_those_that_stand_in_for_it(
    new_cluster: Callable[..., TestCluster],
) -> None:
    """Of three other hosts one has a rank of the same row and one the same state: the third is left."""
    cluster = new_cluster(4)
    park(cluster, replace(WHOLE, park=2, row=2, shards=2))
    tables = [
        HostTable.read(path)
        for host in cluster.alive
        for directory in cluster[host].memory
        for path in directory.rglob("peers.json")
    ]
    groups = {"h0": (0, 0), "h1": (0, 1), "h2": (1, 0), "h3": (1, 1)}
    expected = {host: (f"row {row}", f"shard {shard}") for host, (row, shard) in groups.items()}
    assert [{peer.host: peer.groups for peer in table.peers} for table in tables] == [expected] * 4
    assert cluster.copies(2) == {"h0": ["h3"], "h1": ["h2"], "h2": ["h1"], "h3": ["h0"]}


def test_a_parallel_group_of_all_hosts_keeps_no_copy_back(new_cluster: Callable[..., TestCluster]) -> None:
    cluster = new_cluster(2)
    park(cluster, replace(WHOLE, park=2, row=2))
    assert cluster.copies(2) == {"h0": ["h1"], "h1": ["h0"]}


def test_a_host_that_comes_back_after_the_others_went_on_brings_no_old_step(
    new_cluster: Callable[..., TestCluster],
) -> None:
    cluster = new_cluster(3)
    park(cluster)
    cluster.kill("h1")
    cluster.add("h3")
    park(cluster, replace(WHOLE, park=STEPS), order=["h0", "h3", "h2"])
    cluster.kill("h3", disk=True)
    cluster.revive("h1")
    assert "h1" in cluster.own(PARK)
    goes_on(cluster, STEPS, order=["h1", "h2", "h0"], training=replace(WHOLE, steps=STEPS + 4))


def test_ranks_that_share_a_host_are_lost_and_restored_together(
    new_cluster: Callable[..., TestCluster],
) -> None:
    cluster = new_cluster(2)
    job = cluster.start(train, PARKED, ranks_per_host=2)
    job.wait_for_line(f"parked {PARK}", count=4)
    job.end()
    cluster.kill("h0", disk=True)
    cluster.add("h2")
    job = cluster.start(train, WHOLE, order=["h1", "h2"], ranks_per_host=2)  # h1 had ranks 2 and 3 before
    assert job.restored()[0] == PARK
    assert job.wait() == [0, 0, 0, 0]
    is_as_expected(job, WHOLE, PARK, 4)


# --- another number of ranks ---------------------------------------------------------------------

#: Plain data parallelism, and hybrid sharding: two shards, each on every second rank.  No copies are made
#: of the latter, for the ranks of a group are copies of each other.
ALIKE = Training(steps=14, replicated=True, await_copies=True)
HALVES = Training(steps=14, shards=2, replicas=0)


def goes_on_until(
    cluster: TestCluster, step: int, park_at: int, training: Training, order: Sequence[str]
) -> list[str]:
    """`goes_on`, until the ranks wait at a later step; their agents live on."""
    job = cluster.start(train, replace(training, park=park_at), order=order)
    restored, tiers = job.restored()
    assert restored == step, cluster.tail()
    job.wait_for_line(f"parked {park_at}", count=len(order))
    losses = job.losses
    job.end()
    # The curve of any number of ranks, since the result does not depend on it.
    curve = expected_losses(training, 4)
    assert losses == {at: curve[at] for at in range(step + 1, park_at + 1)}
    return tiers


@pytest.mark.parametrize(
    ("training", "start", "fewer", "more"),
    [
        pytest.param(ALIKE, "012", "10", "301", id="three-two-three"),
        pytest.param(
            HALVES,
            "0123",
            "12",
            "415627",
            id="four-two-six-halves",
            marks=pytest.mark.thorough("tests/plugins/test_elastic_replicas.py has halves"),
        ),
    ],
)
def test_ranks_become_fewer_when_hosts_are_lost_and_more_when_empty_ones_come(
    new_cluster: Callable[..., TestCluster], training: Training, start: str, fewer: str, more: str
) -> None:
    cluster = new_cluster(len(start))
    park(cluster, replace(training, park=PARK))
    for lost in set(start) - set(fewer):
        cluster.kill(f"h{lost}", disk=True)
    goes_on_until(cluster, PARK, 10, training, [f"h{host}" for host in fewer])
    for new in sorted(set(more) - set(start)):
        cluster.add(f"h{new}")
    order = [f"h{host}" for host in more]
    tiers = goes_on(cluster, 10, order=order, training=training)
    assert tiers.count("peers") == len(tiers)
    # With the last step, which more ranks have saved, as many hosts may be lost again.
    assert cluster.own(training.steps) == sorted(order)


def test_memory_of_ranks_that_left_a_host_is_given_back_once_a_later_step_is_complete(
    new_cluster: Callable[..., TestCluster],
) -> None:
    def captured(host: str) -> set[str]:
        return {path.name for directory in cluster[host].memory for path in directory.glob("rank-*")}

    cluster = new_cluster(2)
    park(cluster)
    cluster.make_gate(PARK + 2)
    job = cluster.start(train, replace(WHOLE, hold=PARK + 2, park=PARK + 2), order=["h1", "h0"])
    job.wait_for_line(f"held {PARK + 2}")
    assert job.restored()[0] == PARK
    assert captured("h0") == captured("h1") == {"rank-0", "rank-1"}  # it may still be needed
    cluster.open_gate(PARK + 2)
    job.wait_for_line(f"parked {PARK + 2}", count=2)
    for host, rank in (("h1", "rank-0"), ("h0", "rank-1")):
        cluster.wait_until(lambda host=host, rank=rank: captured(host) == {rank}, f"{host} keeps more")  # type: ignore[misc]
    job.end()
    goes_on(cluster, PARK + 2, order=["h0", "h1"])


# --- damage --------------------------------------------------------------------------------------


def damage_all_copies(cluster: TestCluster, owner: str, step: int) -> None:
    (holder,) = cluster.copies(step)[owner]
    (data,) = cluster[holder].disk.glob(f"**/replicas/{owner}/step={step}/**/rank=*.slot.bin")
    flip_bit(data)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_flipped_bit_in_the_only_copy_makes_all_ranks_take_an_older_step(
    new_cluster: Callable[..., TestCluster], persistent: bool
) -> None:
    cluster = new_cluster(3)
    shared = str(cluster.persistent) if persistent else ""
    whole = replace(WHOLE, directory=shared, persistent_every=5 if persistent else 0)
    park(cluster, replace(whole, park=PARK))
    cluster.kill("h1", disk=True)
    cluster.add("h3")
    damage_all_copies(cluster, "h1", PARK)
    since = len(cluster.lines)
    goes_on(cluster, 5 if persistent else 4, order=["h0", "h3", "h2"], training=whole)
    said = "\n".join(cluster.lines[since:])
    assert re.search(rf"step {PARK} from peers skipped: the shard of rank 1 .* changed", said), cluster.tail()


def test_a_step_that_one_host_did_not_finish_is_taken_by_nobody(
    new_cluster: Callable[..., TestCluster],
) -> None:
    cluster = new_cluster(3)
    fault = HostFault(host="h1", phase=HostPhase.SAVE, step=PARK, name="manifest.json")
    cluster.place(fault)
    job = cluster.start(train, PARKED)
    cluster.wait_for_fault(fault)
    job.wait_for_line("copied 4")
    job.end()
    cluster.kill("h1")  # its disk survives, with half a step on it
    for name in ("h0", "h2"):
        cluster.wait_until(lambda name=name: name in cluster.own(PARK), f"{name} did not commit")  # type: ignore[misc]
    cluster.revive("h1")
    goes_on(cluster, 4)


# --- agents, disks and networks that fail while the job runs -------------------------------------


@pytest.mark.parametrize(
    ("host", "phase"),
    [
        ("h0", HostPhase.SEND),
        *(
            pytest.param(*case, marks=pytest.mark.thorough("another moment of a copy is near"))
            for case in (("h0", HostPhase.RECEIVE), ("h1", HostPhase.SEND), ("h1", HostPhase.RECEIVE))
        ),
    ],
)
def test_an_agent_that_dies_while_copies_are_made_is_replaced_and_the_copies_are_made(
    new_cluster: Callable[..., TestCluster], phase: HostPhase, host: str
) -> None:
    cluster = new_cluster(3)
    fault = HostFault(host=host, phase=phase, step=4, name="slot.bin", hit=FaultHit.PROCESS_KILLED)
    cluster.place(fault)
    cluster.make_gate(5)  # else newer steps may be copied first, and the hosts leave before the fault hits
    job = cluster.start(train, Training(steps=STEPS, hold=5))
    cluster.wait_for_fault(fault)
    cluster.open_gate(5)
    assert job.wait() == [0, 0, 0]
    is_as_expected(job, WHOLE, 0, 3)
    assert {f"rank {rank} complete {STEPS}" for rank in range(3)} <= set(job.lines)
    assert sorted(cluster.copies(STEPS)) == ["h0", "h1", "h2"]
    cluster.kill(host, disk=True)
    cluster.add("h3")
    order = ["h3" if name == host else name for name in ("h0", "h1", "h2")]
    goes_on(cluster, STEPS, order=order, training=replace(WHOLE, steps=STEPS + 4))


def test_a_copy_goes_elsewhere_when_the_disk_of_its_holder_is_full(
    new_cluster: Callable[..., TestCluster],
) -> None:
    cluster = new_cluster(3)
    cluster.fill_disk("h2", below="replicas")
    park(cluster)
    assert sorted(cluster.copies(PARK)) == ["h0", "h1", "h2"]
    assert all("h2" not in holders for holders in cluster.copies(PARK).values())
    assert any("ENOSPC" in line or "full" in line for line in cluster.lines)
    cluster.kill("h1", disk=True)
    cluster.add("h3")
    goes_on(cluster, PARK, order=["h0", "h3", "h2"])


def test_a_full_disk_fails_saves_on_its_host_and_loses_no_older_step(
    new_cluster: Callable[..., TestCluster],
) -> None:
    cluster = new_cluster(3)
    park(cluster, replace(WHOLE, park=4))
    # Of the shard of h0 nothing but its own will be left.
    (holder,) = cluster.copies(4)["h0"]
    full = "h1" if holder == "h2" else "h2"
    cluster.fill_disk(full)
    job = cluster.start(train, Training(steps=STEPS, park=8))
    job.wait_for_line("parked 8", count=3)
    assert job.restored()[0] == 4
    job.end()
    cluster.kill(holder, disk=True)
    cluster.kill(full)  # what it has in memory would serve
    cluster.free_disk(full)
    cluster.revive(full)
    cluster.add("h3")
    goes_on(cluster, 4, order=["h3" if name == holder else name for name in ("h0", "h1", "h2")])


def test_a_last_step_that_full_disks_left_in_memory_alone_is_complete_after_a_start_that_has_nothing_to_do(
    new_cluster: Callable[..., TestCluster],
) -> None:
    cluster, training = new_cluster(2), Training(steps=2)
    for host in cluster.alive:
        cluster.fill_disk(host)
    first = cluster.start(train, training)
    assert first.wait() == [0, 0]
    assert sum("step 2 is nowhere but in the memory" in line for line in first.lines) == 2
    for host in cluster.alive:
        cluster.free_disk(host)
    assert cluster.own(2) == []
    second = cluster.start(train, training)
    assert second.wait() == [0, 0]
    assert second.restored() == (2, ["memory", "memory"])
    assert cluster.copies(2) == {"h0": ["h1"], "h1": ["h0"]}
    cluster.wait_until(lambda: not any(cluster[host].memory for host in cluster.alive), "memory stays")


@pytest.mark.parametrize(
    ("heals", "apart"),
    [
        (True, "h2"),
        *(
            pytest.param(*case, marks=pytest.mark.thorough("another host that is apart is near"))
            for case in ((True, "h0"), (False, "h0"), (False, "h2"))
        ),
    ],
)
def test_while_hosts_are_apart_the_newest_complete_step_stays_and_later_ones_follow(
    new_cluster: Callable[..., TestCluster], apart: str, heals: bool
) -> None:
    cluster = new_cluster(3)
    cluster.make_gate(5)
    job = cluster.start(train, Training(steps=STEPS, hold=5, park=STEPS))
    job.wait_for_line("held 5")
    cluster.wait_until(lambda: len(cluster.copies(4)) == 3, "step 4 was not copied")
    cluster.partition([apart], [name for name in cluster.alive if name != apart])
    cluster.open_gate(5)
    job.wait_for_line(f"parked {STEPS}", count=3)  # training does not wait for copies
    if heals:
        cluster.heal()
        cluster.wait_until(
            lambda: len(cluster.copies(STEPS)) == 3, f"step {STEPS} was not copied after healing"
        )
    job.end()
    cluster.kill(apart, disk=True)
    cluster.heal()
    cluster.add("h3")
    order = ["h3" if name == apart else name for name in ("h0", "h1", "h2")]
    goes_on(cluster, STEPS if heals else 4, order=order, training=replace(WHOLE, steps=STEPS + 4))


# --- losses in the middle of things --------------------------------------------------------------


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(0, id="taking stock", marks=pytest.mark.thorough("one that is sending is near")),
        pytest.param(2, id="sending"),
    ],
)
def test_a_host_lost_in_the_middle_of_a_restore_costs_another_start_and_no_step(
    new_cluster: Callable[..., TestCluster], operation: int
) -> None:
    cluster = new_cluster(3)
    park(cluster)
    cluster.kill("h1", disk=True)
    (holder,) = cluster.copies(PARK)["h1"]
    cluster.add("h3")
    order = ["h0", "h3", "h2"]
    copy = "rank=1.slot.bin"
    fault = HostFault(host=holder, phase=HostPhase.RESTORE, step=PARK, name=copy, operation=operation)
    cluster.place(fault)
    job = cluster.start(train, WHOLE, order=order)
    cluster.wait_for_fault(fault)
    codes = job.wait()
    assert codes[order.index(holder)] == -signal.SIGKILL
    assert 0 not in codes
    assert not any(re.match(r"rank \d restored", line) for line in job.lines)
    cluster.kill(holder)
    cluster.revive(holder)
    goes_on(cluster, PARK, order=order)


#: Where a host dies: the phase, what is done to which file, and how often that was done before.
POINTS = [
    (HostPhase.SAVE, "write", "-unfinished", 0),
    (HostPhase.SAVE, "write", "slot.bin", 0),
    (HostPhase.SAVE, "write", "manifest.json", 0),
    (HostPhase.SAVE, "remove", "-unfinished", 0),
    (HostPhase.SEND, "read", "slot.bin", 0),
    (HostPhase.RECEIVE, "write", "-unfinished", 0),
    (HostPhase.RECEIVE, "write", "slot.bin", 0),
    (HostPhase.RECEIVE, "write", "manifest.json", 0),
    (HostPhase.RECEIVE, "remove", "-unfinished", 0),
    (HostPhase.RETIRE, "remove", "", 0),
    (HostPhase.RETIRE, "remove", "", 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "returns"),
    [
        (1, True),
        *(
            pytest.param(*case, marks=pytest.mark.thorough("the loss of the other host is near"))
            for case in ((0, False), (0, True), (1, False))
        ),
    ],
)
def test_no_loss_of_a_single_host_loses_a_complete_step_wherever_it_strikes(
    new_cluster: Callable[..., TestCluster], rank: int, returns: bool
) -> None:
    """One long job: each start goes on from what the loss before it left, and loses the next host.

    The lost one is replaced by a spare, or `returns` with what it had half done on its disk.
    """
    cluster = new_cluster(3)
    order = ["h0", "h1", "h2"]
    # One complete step stays: who deletes it too early has nothing.
    training = replace(WHOLE, steps=6 * len(POINTS) + 2, keep=1)
    curve = expected_losses(training, 3)
    allowed = {0}
    for number, point in enumerate(POINTS):
        struck = 6 * (number + 1)
        cluster.make_gate(struck - 1)
        job = cluster.start(train, replace(training, hold=struck - 1, park=struck), order=order)
        begun, _ = job.restored()
        assert begun in allowed, f"before {point}:\n{cluster.tail()}"
        job.wait_for_line(f"held {struck - 1}")
        victim = _victim(cluster, order[rank], point[0], struck - 2)
        retires = point[0] is HostPhase.RETIRE
        step = struck - 2 if retires else struck
        fault = HostFault(
            host=victim, phase=point[0], step=step, verb=point[1], name=point[2], operation=point[3]
        )
        cluster.place(fault)
        cluster.open_gate(struck - 1)
        cluster.wait_for_fault(fault)
        job.end()
        losses = job.losses
        assert losses == {at: curve[at] for at in range(begun + 1, max(losses) + 1)}
        allowed = {struck} if retires else {struck - 2, struck}
        if returns:
            cluster.kill(victim)
            cluster.revive(victim)
        else:
            cluster.kill(victim, disk=True)
            order[order.index(victim)] = cluster.add(f"h{number + 3}").name
    job = cluster.start(train, training, order=order)
    begun, _ = job.restored()
    assert begun in allowed
    assert job.wait() == [0, 0, 0]
    is_as_expected(job, training, begun, 3)


def _victim(cluster: TestCluster, wanted: str, phase: HostPhase, step: int) -> str:
    """A host that will come to the phase: not all hosts hold copies of others."""
    holders = {holder for found in cluster.copies(step).values() for holder in found}
    return wanted if phase is not HostPhase.RECEIVE or wanted in holders else max(holders)
