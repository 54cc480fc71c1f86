# SPDX-License-Identifier: Apache-2.0
"""How long the recovery planner thinks about a large job, and how much memory it takes for that.

    python3 benchmark/planner_scale.py --ranks 10000

All of it is simulated: what each host of such a job would still hold after a loss is made up, and then
planned with the functions that a restart calls.  Every rank runs them before a byte moves, so their
time is a part of every restart.  The cases:

  restarted  all hosts are back, every rank finds its state in the memory of its host
  lost       some hosts were replaced, and what they held went with them
  permuted   every rank starts on another host than before, so that everything must move
  replicas   hosts are lost together with their copies; another member of each rank's replica
             group holds the same state

Exit codes: 0 every case has a plan, 1 one has none (with many lost hosts that is the right answer: two
copies of one shard may be lost).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from measuring import count, machine
from tqdm import tqdm

from resiliency.checkpoint.locations import Place, ShardLocation, ShardRequest, decode, encode
from resiliency.checkpoint.names import directory_name
from resiliency.checkpoint.recovery.planner import RestorePlan, each_plan, explain_missing, plans
from resiliency.checkpoint.replication.placement import Peer, choose_targets
from resiliency.checkpoint.replication.repairs import repairs

_SHARD_BYTES = 12 << 30
_STEPS_BETWEEN = 100
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Job:
    """The size of the job."""

    ranks: int
    ranks_per_host: int
    replicas: int
    generations: int
    lost_hosts: int
    seed: int

    @property
    def hosts(self) -> int:
        return -(-self.ranks // self.ranks_per_host)

    def host(self, rank: int) -> str:
        return f"host-{rank // self.ranks_per_host:05}"

    def group(self, rank: int) -> str:
        """Ranks half the job apart hold the same."""
        return f"shard-{rank % max(1, self.ranks // 2)}"

    def peers(self) -> list[Peer]:
        """Racks of 16 hosts, blocks of 8 racks."""
        return [
            Peer(
                host=self.host(number * self.ranks_per_host),
                address="192.0.2.1",
                port=61000,
                ranks=tuple(
                    range(number * self.ranks_per_host, min(self.ranks, (number + 1) * self.ranks_per_host))
                ),
                domains=(("rack", f"r{number // 16}"), ("block", f"b{number // 128}")),
            )
            for number in range(self.hosts)
        ]


@dataclass(frozen=True, kw_only=True)
class Case:
    """What ranks want, and what is left."""

    name: str
    needs: list[ShardRequest]
    locations: list[ShardLocation]
    peers: list[Peer]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of one case; seconds of each run."""

    case: str
    locations: int
    gathered_bytes: int
    decode_s: list[float]
    first_plan_s: list[float]
    all_plans_s: list[float]
    repairs_s: list[float]
    peak_bytes: int
    sent_shards: int
    pushes: int
    loss: str


def cases(job: Job, peers: Sequence[Peer]) -> list[Case]:
    """All that the module's text names."""
    targets = {peer.host: choose_targets(peer.host, peers, job.replicas)[: job.replicas] for peer in peers}
    lost = set(random.Random(job.seed).sample([peer.host for peer in peers], job.lost_hosts))  # noqa: S311
    needs = [ShardRequest(rank=rank, host=job.host(rank), world_size=job.ranks) for rank in range(job.ranks)]
    left = list(_held(job, targets))
    survived = [location for location in left if location.host not in lost]
    renamed = {host: f"new-{host}" for host in lost}
    new_needs = [replace(need, host=renamed.get(need.host, need.host)) for need in needs]
    new_peers = [replace(peer, host=renamed.get(peer.host, peer.host)) for peer in peers]
    shift = job.ranks_per_host
    permuted = [replace(need, host=job.host((need.rank + shift) % job.ranks)) for need in needs]
    both_lost = lost | {target for host in lost for target in targets[host]}
    gone = {host: f"new-{host}" for host in both_lost}
    return [
        Case(name="restarted", needs=needs, locations=left, peers=list(peers)),
        Case(name="lost", needs=new_needs, locations=survived, peers=new_peers),
        Case(
            name="permuted",
            needs=permuted,
            locations=[location for location in left if location.place is not Place.MEMORY],
            peers=list(peers),
        ),
        Case(
            name="replicas",
            needs=[replace(n, host=gone.get(n.host, n.host), group=job.group(n.rank)) for n in needs],
            locations=[replace(h, group=job.group(h.rank)) for h in left if h.host not in both_lost],
            peers=[replace(peer, host=gone.get(peer.host, peer.host)) for peer in peers],
        ),
    ]


def _held(job: Job, targets: dict[str, list[str]]) -> Iterable[ShardLocation]:
    """Everything of a job that lost nothing: the newest step also in memory."""
    for generation in range(job.generations):
        step = (generation + 1) * _STEPS_BETWEEN
        for rank in range(job.ranks):
            own = ShardLocation(
                step=step,
                save_id=f"0f3a9c52d1e84b77-{step}",
                run_id="7c1b2f60a9d34e15",
                rank=rank,
                world_size=job.ranks,
                host=job.host(rank),
                place=Place.LOCAL,
                root="/local/job",
                digest=f"{rank * 7919 + step:016x}",
                size_bytes=_SHARD_BYTES,
            )
            yield own
            root = f"/local/job/replicas/{directory_name(own.host)}"
            for host in targets[own.host]:
                yield replace(own, host=host, place=Place.REPLICA, root=root)
            if generation == job.generations - 1:
                yield replace(own, place=Place.MEMORY, root="", digest="")


def measure(case: Case, *, replicas: int, runs: int) -> Figures:
    """Run all that a restart runs, `runs` times; memory in a run of its own, as watching it takes time."""
    gathered = [encode(case.locations)]
    decode_s, first_s, all_s, repairs_s = [], [], [], []
    pushes = 0
    plan: RestorePlan | None = None
    for _ in range(runs):
        locations, seconds = _timed(lambda: [location for part in gathered for location in decode(part)])
        decode_s.append(seconds)
        plan, seconds = _timed(lambda: next(each_plan(case.needs, locations), None))  # noqa: B023
        first_s.append(seconds)
        all_s.append(_timed(lambda: plans(case.needs, locations))[1])  # noqa: B023
        save_id = plan.save_id if plan else ""
        found, seconds = _timed(lambda: repairs(save_id, locations, case.peers, replicas))  # noqa: B023
        repairs_s.append(seconds)
        pushes = len(found)
    tracemalloc.start()
    next(each_plan(case.needs, case.locations), None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return Figures(
        case=case.name,
        locations=len(case.locations),
        gathered_bytes=len(json.dumps(gathered)),
        decode_s=decode_s,
        first_plan_s=first_s,
        all_plans_s=all_s,
        repairs_s=repairs_s,
        peak_bytes=peak,
        sent_shards=sum(assignment.sender is not None for assignment in plan.assignments) if plan else 0,
        pushes=pushes,
        loss="" if plan else explain_missing(case.needs, case.locations),
    )


def _timed(action: Callable[[], _T]) -> tuple[_T, float]:
    began = time.perf_counter()
    result = action()
    return result, time.perf_counter() - began


def as_text(job: Job, figures: Sequence[Figures], placement_s: float) -> str:
    """A table for people: medians."""
    facts, runs = machine(), len(figures[0].decode_s)
    head = [
        "case",
        "locations",
        "gathered",
        "decode",
        "first plan",
        "all plans",
        "repairs",
        "peak",
        "sent",
        "pushes",
    ]
    rows = [
        [
            figure.case,
            f"{figure.locations:,}",
            f"{figure.gathered_bytes / 2**20:.1f} MiB",
            *(
                f"{statistics.median(seconds):.3f} s"
                for seconds in (figure.decode_s, figure.first_plan_s, figure.all_plans_s, figure.repairs_s)
            ),
            f"{figure.peak_bytes / 2**20:.1f} MiB",
            f"{figure.sent_shards:,}",
            f"{figure.pushes:,}",
        ]
        for figure in figures
    ]
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]
    ]
    return "\n".join(
        [
            f"{job.ranks:,} ranks on {job.hosts:,} hosts, {job.replicas} copies of each checkpoint, "
            f"{job.generations} generations, {job.lost_hosts} hosts lost; medians of {runs} runs",
            f"machine: {facts['cores']} cores ({facts['cpu']}), load {facts['load_1min']}, "
            f"Python {facts['python']}",
            "",
            *lines,
            "",
            "first plan: all that a restart mostly needs; peak: memory for it beside its input; sent: shards",
            "that go from host to host; pushes: checkpoints of a host that are copied anew afterwards.",
            f"Placing the copies of all hosts, once per start: {placement_s:.3f} s.",
            *(f"\nno plan for {figure.case!r}:\n{figure.loss}" for figure in figures if figure.loss),
        ]
    )


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="planner_scale.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ranks", type=count, default=10_000, metavar="N", help="of the job (default: %(default)s)"
    )
    parser.add_argument("--ranks-per-host", type=count, default=8, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--replicas", type=count, default=1, metavar="N",
        help="copies of each checkpoint on other hosts (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--generations", type=count, default=2, metavar="N",
        help="checkpoints that each host keeps (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--lost-hosts", type=count, default=5, metavar="N", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="chooses the lost hosts (default: %(default)s)")
    parser.add_argument(
        "--runs", type=count, default=5, metavar="N", help="of each case (default: %(default)s)"
    )
    parser.add_argument("--export", type=Path, metavar="FILE.json", help="write every figure there")
    return parser


def main() -> int:
    parser = build_parser()
    args = parser.parse_args()
    job = Job(
        ranks=args.ranks,
        ranks_per_host=args.ranks_per_host,
        replicas=args.replicas,
        generations=args.generations,
        lost_hosts=args.lost_hosts,
        seed=args.seed,
    )
    if job.lost_hosts >= job.hosts:
        parser.error(f"--lost-hosts {job.lost_hosts}: the job has {job.hosts} hosts, and one must be left")
    if args.export and not args.export.resolve().parent.is_dir():
        parser.error(f"the directory of {args.export} does not exist")
    peers = job.peers()
    _, placement_s = _timed(lambda: choose_targets(peers[0].host, peers, job.replicas))
    figures = [
        measure(case, replicas=job.replicas, runs=args.runs)
        for case in tqdm(cases(job, peers), unit="case", disable=None)
    ]
    print(as_text(job, figures, placement_s))
    if args.export:
        everything = {
            "machine": machine(),
            "job": vars(job),
            "placement_s": placement_s,
            "cases": [vars(figure) for figure in figures],
        }
        args.export.write_text(json.dumps(everything, indent=2) + "\n")
    return 1 if any(figure.loss for figure in figures) else 0


if __name__ == "__main__":
    sys.exit(main())
