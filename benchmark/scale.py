# SPDX-License-Identifier: Apache-2.0
"""What a save, a restart and a prune cost each rank of a job of 64 to 10,000 ranks: counted, not timed.

    python3 benchmark/scale.py --ranks 64 256 1024 4096 10000

The code that runs is that of a job: the commit of a leader with its host's ranks and that of a follower
host, the restart of rank 0 and of three other ranks with their inventory, plan and reading, with as many
ranks and with those of a host less, and the pruning of old checkpoints.  Only what they talk to is
simulated: the storage is in memory and counts, and the other ranks answer a collective as ranks of one
program do.  So one small machine shows what 10,000 ranks would ask of their storage and of each other.
Seconds would say nothing here; processor time says what Python computes.

Three ways to hold a state, each of --tensors small tensors:

  sharded     each rank holds an n-th of each tensor (FSDP, or tensor parallelism)
  hybrid      the ranks of a host share each tensor, all hosts hold the same (HSDP)
  replicated  all ranks hold all of it (data parallelism, `replicated=True`)

and these actions, of the rank or host that the table names ("any other": the most that one of them costs):

  first save    rank 0's host commits: reads the vote of each rank, writes `.metadata` and the manifest
  later save    the same, when no rank changed what it writes: nothing of it is computed again
  part of save  another host writes its ranks' files and votes, and collects those of a block of ranks, if
                there are blocks; its waiting is not counted
  restart       a rank lists what is left, agrees with all others, plans, and reads its state
  fewer ranks   the same with the ranks of one host less: refused, where each rank holds a state of its own
  prune         rank 0's host deletes the checkpoint before, as after each save
  prune of K    the same where K newer checkpoints are kept, by the number of checkpoints instead of ranks
  save of S     the first save where the ranks form S pipeline stages, each with tensors of its own and an
                optimizer that numbers its state from 0; by the number of stages

A column ends with the exponent by which it grows, fitted to all sizes: 0 is the same at any size, 1 grows as
the number of ranks does.  Where a rank asks for the words of all ranks, as in a gather, that is 1 by nature.

Exit codes: 0 measured, 1 a rank restored other bytes than were saved.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import pickle
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TypeVar, cast

from measuring import count, machine
from tqdm import tqdm

from resiliency.checkpoint.capture.arena import RankArena
from resiliency.checkpoint.commit.commit import SaveTicket, commit
from resiliency.checkpoint.commit.vote_blocks import BlockCollector, block_name, blocks_of
from resiliency.checkpoint.format.catalog import prune
from resiliency.checkpoint.format.dcp import DcpFormat
from resiliency.checkpoint.format.manifest import RankIndex, data_directory, index_name, write_index
from resiliency.checkpoint.format.marker import step_directory
from resiliency.checkpoint.ranks import RankGroup
from resiliency.checkpoint.recovery.restore import Fill, Restorer
from resiliency.checkpoint.state.layout import Shard, StateLayout, TensorEntry, align, contiguous_stride
from resiliency.checkpoint.state.rank_sets import MESH, text_of_ranks
from resiliency.checkpoint.storage.chunked_file import FileRecord
from resiliency.checkpoint.storage.interface import Storage
from resiliency.errors import LayoutMismatch
from resiliency.testing.counting_storage import CountingStorage, StorageCounts
from resiliency.testing.storage import MemoryStorage

LAYOUTS = ("sharded", "hybrid", "replicated")
METRICS = ("operations", "read_bytes", "written_bytes", "collectives", "gathered_bytes", "cpu_s")
_VALUES_PER_PART = 8
_LONGEST_S = 3600.0
_HEAD_BYTES = 520
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job of one size."""

    layout: str
    ranks: int
    ranks_per_host: int
    tensors: int
    stages: int = 1

    def host(self, rank: int) -> str:
        return f"host-{rank // self.ranks_per_host:05}"

    @property
    def first_host(self) -> range:
        return range(min(self.ranks_per_host, self.ranks))

    @property
    def blocks(self) -> list[list[int]]:
        """In which the votes of its ranks come to the leader."""
        return blocks_of(range(self.ranks))

    @property
    def other_host(self) -> range:
        """The other host that is looked at: one that collects a block of votes, if there are any."""
        first = self.blocks[-1][0] or self.ranks - 1
        start = first // self.ranks_per_host * self.ranks_per_host
        return range(start, min(start + self.ranks_per_host, self.ranks))

    @property
    def replicated(self) -> bool:
        return self.layout == "replicated"

    def format(self) -> DcpFormat:
        return DcpFormat(spread_unsharded=self.replicated)

    def ticket(self, step: int) -> SaveTicket:
        return SaveTicket(
            step=step,
            run_id="scale",
            save_id=f"scale-{step}",
            world_size=self.ranks,
            ranks=range(self.ranks),
            timeout=timedelta(seconds=_LONGEST_S),
        )

    def shard(self, rank: int, step: int) -> Shard:
        """What `rank` captured: each byte tells its place in the whole and the step."""
        of_stage = self.ranks // self.stages
        stage = rank // of_stage
        holders = {"sharded": of_stage, "hybrid": self.ranks_per_host, "replicated": 1}[self.layout]
        part, replica = rank % holders, rank % of_stage // holders
        shape = (_VALUES_PER_PART,)
        members = range(stage * of_stage, (stage + 1) * of_stage)
        mesh = () if self.replicated else ((MESH, text_of_ranks(members)),)
        entries = []
        end = 0
        for number in range(self.tensors):
            key = f"layer.{stage * self.tensors + number}.weight"
            if self.stages > 1 and number % 2:
                key = f"optimizer.state.{number}.exp_avg"
            entries.append(
                TensorEntry(
                    key=key, name=key, path=(key,), dtype="uint8", shape=shape,
                    global_shape=(_VALUES_PER_PART * holders,), global_offset=(_VALUES_PER_PART * part,),
                    stride=contiguous_stride(shape), offset_bytes=end, size_bytes=_VALUES_PER_PART,
                    replica_id=0 if self.replicated else replica, attributes=mesh,
                )
            )  # fmt: skip
            end = align(end + _VALUES_PER_PART)
        layout = StateLayout(entries=tuple(entries), skeleton=b"{}")
        buffer = memoryview(bytearray(layout.size_bytes))
        for number, entry in enumerate(entries):
            content = bytes((part + number + step + place) % 251 for place in range(_VALUES_PER_PART))
            buffer[entry.offset_bytes : entry.end_bytes] = content
        return Shard(
            layout=layout, values=b"{}", step=step, rank=rank, world_size=self.ranks, buffer=buffer,
            run_id="scale",
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one action asks for; units: bytes, seconds of processor time.

    Args:
        ranks: of the job; of the prunes of a small job the checkpoints that it keeps; of saves
            of stages how many.
    """

    action: str
    who: str
    layout: str
    ranks: int
    operations: int
    read_bytes: int
    written_bytes: int
    cpu_s: float
    collectives: int = 0
    gathered_bytes: int = 0


class SimulatedRanks(RankGroup):
    """One rank of a job; the other ranks answer as ranks of the same program do."""

    def __init__(self, job: Job, rank: int, words_of_0: list[object]) -> None:
        self.rank, self.world_size = rank, job.ranks
        self.collectives = 0
        self.gathered_bytes = 0
        self._job = job
        self._words_of_0 = words_of_0

    def gather(self, value: _T) -> list[_T]:
        if self.rank == 0:
            self._words_of_0.append(value)
        first = cast(_T, self._words_of_0[self.collectives])
        self.collectives += 1
        words = [first, *(self._word(rank, value) for rank in range(1, self.world_size))]
        words[self.rank] = value
        longest = max(len(pickle.dumps(word)) for word in (first, words[-1], value))
        # As `RankGroup` does: short words in one collective, the rest of longer ones in another.
        self.gathered_bytes += self.world_size * (_HEAD_BYTES + max(longest - _HEAD_BYTES, 0))
        return words

    def _word(self, rank: int, mine: _T) -> _T:
        if isinstance(mine, tuple) and len(mine) == 3 and isinstance(mine[0], str):  # host, group, branches
            return cast(_T, (self._job.host(rank), *mine[1:]))
        if isinstance(mine, tuple) and len(mine) == 3:  # what a host holds; the storage is rank 0's to list
            return cast(_T, (*mine[:2], None))
        return mine


class _AmongPeers:
    """The format of a leader; before its own ranks write, all other ranks of the job have written."""

    def __init__(self, inner: DcpFormat, let_peers_write: Callable[[], None]) -> None:
        self.name = inner.name
        self._inner = inner
        self._let_peers_write = let_peers_write
        self._lock = threading.Lock()
        self._is_first = True

    def write_rank(
        self, storage: Storage, directory: str, shard: Shard, *, run_id: str, save_id: str
    ) -> RankIndex:
        with self._lock:
            if self._is_first:
                self._is_first = False
                self._let_peers_write()
        return self._inner.write_rank(storage, directory, shard, run_id=run_id, save_id=save_id)

    def seal(self, storage: Storage, directory: str, indexes: Sequence[RankIndex]) -> Sequence[FileRecord]:
        return self._inner.seal(storage, directory, indexes)


def save(job: Job, storage: MemoryStorage, step: int, of_leader: DcpFormat) -> tuple[Cost, Cost]:
    """Commit a step; the cost to rank 0's host and to another one.

    Args:
        of_leader: format of rank 0's host, which keeps it from save to save.
    """
    ticket = job.ticket(step)
    place = data_directory(step_directory(step), ticket.folder)
    leading, following = CountingStorage(storage), CountingStorage(storage)
    peers = job.format()
    of_follower: list[tuple[StorageCounts, float]] = []
    of_peers_s = [0.0]

    def follow() -> None:
        shards = {rank: job.shard(rank, step) for rank in job.other_host}
        commit(following, job.format(), ticket, shards, leads=False)

    follower = threading.Thread(target=follow, name="follower")

    def let_peers_write() -> None:
        began = time.process_time()
        others = [rank for rank in range(job.first_host.stop, job.ranks) if rank not in job.other_host]
        for rank in tqdm(others, desc=f"{job.layout}, step {step}", leave=False, disable=None):
            index = peers.write_rank(
                storage, place, job.shard(rank, step), run_id=ticket.run_id, save_id=ticket.save_id
            )
            write_index(storage, place, index.placed_in(ticket.folder))
        for block in job.blocks[1:-1]:
            BlockCollector(storage, place, block, lambda index: True).try_collect()
        started = time.process_time()
        follower.start()
        last = index_name(place, job.other_host[-1])
        if len(job.blocks) > 1:
            last = block_name(place, job.blocks[-1])
        _wait_until(lambda: storage.exists(last))
        of_follower.append((following.restart_count(), time.process_time() - started))
        of_peers_s[0] = time.process_time() - began

    shards = {rank: job.shard(rank, step) for rank in job.first_host}
    gc.collect()
    began = time.process_time()
    commit(leading, _AmongPeers(of_leader, let_peers_write), ticket, shards, leads=True)
    spent = time.process_time() - began - of_peers_s[0]
    counts = leading.restart_count()
    follower.join(_LONGEST_S)
    action = "first save" if step == 1 else "later save"
    return (
        _cost(job, action, "rank 0's host", counts, spent),
        _cost(job, "part of save", "any other host", *of_follower[0]),
    )


def restart(job: Job, storage: MemoryStorage, step: int, *, saved_by: Job) -> tuple[Cost, Cost]:
    """Restore the newest step; the cost to rank 0, and the most to another rank.

    Raises:
        SystemExit: a rank got other bytes than were saved.
    """
    words: list[object] = []
    costs = [
        _restore(job, storage, step, rank, words, saved_by)
        for rank in dict.fromkeys((0, 1, job.ranks // 2, job.ranks - 1))
    ]
    others = costs[1:]
    most = {name: max(getattr(cost, name) for cost in others) for name in METRICS}
    return costs[0], replace(others[0], **most)


def _restore(
    job: Job, storage: MemoryStorage, step: int, rank: int, words: list[object], saved_by: Job
) -> Cost:
    is_refused = job.ranks != saved_by.ranks and not job.replicated
    counting, rank_group = CountingStorage(storage), SimulatedRanks(job, rank, words)
    expected = job.shard(rank, step)

    def fill(shard: Shard) -> Callable[[], object]:
        def act() -> None:
            assert shard.load is not None
            memory = [memoryview(bytearray(entry.size_bytes)) for entry in shard.layout.entries]
            places = [entry.offset_bytes for entry in shard.layout.entries]
            shard.load(list(zip(places, memory, strict=True)))
            if any(expected.read(e) != m for e, m in zip(expected.layout.entries, memory, strict=True)):
                raise SystemExit(f"rank {rank} of {job.ranks} ({job.layout}) got other bytes than it saved.")

        return act

    with tempfile.TemporaryDirectory() as directory:
        arena = RankArena(Path(directory), rank=rank, world_size=job.ranks)
        try:
            restorer = Restorer(arena, counting, rank_group, replicated=job.replicated, host=job.host(rank))
            gc.collect()
            began = time.process_time()
            found = _step_of(restorer, fill)
            spent = time.process_time() - began
        finally:
            arena.close()
    if found != (None if is_refused else step):
        raise SystemExit(f"rank {rank} of {job.ranks} ({job.layout}) got step {found}, not {step}.")
    action = "restart" if job.ranks == saved_by.ranks else "fewer ranks"
    return replace(
        _cost(saved_by, action, "any other rank" if rank else "rank 0", counting.counts, spent),
        collectives=rank_group.collectives,
        gathered_bytes=rank_group.gathered_bytes,
    )


def _step_of(restorer: Restorer, fill: Fill) -> int | None:
    """The step that was restored; None: refused, for another number of ranks."""
    try:
        return restorer.restore(fill).step
    except LayoutMismatch:
        return None


def remove_old(job: Job, storage: MemoryStorage, kept: int = 1, known: dict[int, str] | None = None) -> Cost:
    """Keep the newest checkpoints alone."""
    counting = CountingStorage(storage)
    began = time.process_time()
    if len(prune(counting, keep_last=kept, known=known)) != 1:
        raise SystemExit(f"a prune did not delete the one checkpoint beyond {kept}.")
    return _cost(job, "prune", "rank 0's host", counting.counts, time.process_time() - began)


def measure_kept(job: Job, kept: int) -> Cost:
    """A prune where so many checkpoints stay, as an agent does it that has saved them."""
    storage, of_leader = MemoryStorage(), job.format()
    known: dict[int, str] = {}
    for step in range(1, kept + 2):
        save(job, storage, step, of_leader)
        if step <= kept:
            prune(storage, keep_last=kept, known=known)
    return replace(remove_old(job, storage, kept, known), action="prune of K", ranks=kept)


def measure_stages(job: Job) -> Cost:
    first, _ = save(job, MemoryStorage(), 1, job.format())
    return replace(first, action="save of S", ranks=job.stages)


def measure(job: Job) -> Iterator[Cost]:
    """All actions of one job, which saves twice."""
    storage, of_leader = MemoryStorage(), job.format()
    first, _ = save(job, storage, 1, of_leader)
    later, part = save(job, storage, 2, of_leader)
    yield from (first, later, part)
    yield from restart(job, storage, 2, saved_by=job)
    fewer = replace(job, ranks=job.ranks - job.ranks_per_host)
    yield from restart(fewer, storage, 2, saved_by=job)
    yield remove_old(job, storage)


def _cost(job: Job, action: str, who: str, counts: StorageCounts, cpu_s: float) -> Cost:
    return Cost(
        action=action, who=who, layout=job.layout, ranks=job.ranks, operations=counts.total,
        read_bytes=counts.read_bytes, written_bytes=counts.written_bytes, cpu_s=cpu_s,
    )  # fmt: skip


def _wait_until(ready: Callable[[], bool]) -> None:
    ends = time.monotonic() + _LONGEST_S
    pause = threading.Event()
    while not ready():
        if time.monotonic() > ends:
            raise SystemExit("the follower did not vote.")
        pause.wait(0.002)


def exponent(sizes: Sequence[int], values: Sequence[float]) -> float | None:
    """p of the power law size**p that fits best; None: there is nothing to fit."""
    points = [
        (math.log(size), math.log(value)) for size, value in zip(sizes, values, strict=True) if value > 0
    ]
    if len(points) < 2:
        return None
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else None


def grouped(costs: Sequence[Cost]) -> dict[tuple[str, str, str], list[Cost]]:
    """Action, who and layout, to the costs at all sizes."""
    groups: dict[tuple[str, str, str], list[Cost]] = {}
    for cost in costs:
        groups.setdefault((cost.action, cost.who, cost.layout), []).append(cost)
    return groups


def exponents(costs: Sequence[Cost]) -> list[dict[str, object]]:
    """For each action, who and layout: the exponent of each metric."""
    return [
        {
            "action": action,
            "who": who,
            "layout": layout,
            **{
                name: exponent([cost.ranks for cost in group], [getattr(cost, name) for cost in group])
                for name in METRICS
            },
        }
        for (action, who, layout), group in grouped(costs).items()
    ]


def as_rows(costs: Sequence[Cost]) -> list[list[str]]:
    """A header, a row per size, and one with exponents for each group."""
    rows = [
        [
            "action",
            "who",
            "state",
            "ranks",
            "operations",
            "read",
            "written",
            "collectives",
            "gathered",
            "processor",
        ]
    ]
    for (action, who, layout), group in grouped(costs).items():
        for cost in group:
            rows.append(
                [
                    action, who, layout, f"{cost.ranks:,}", f"{cost.operations:,}", _size(cost.read_bytes),
                    _size(cost.written_bytes), str(cost.collectives or "-"), _size(cost.gathered_bytes),
                    f"{cost.cpu_s:.3g} s",
                ]
            )  # fmt: skip
        fitted = [
            exponent([cost.ranks for cost in group], [getattr(cost, name) for cost in group])
            for name in METRICS
        ]
        shown = ["-" if power is None else f"^{power + 0.0:.2f}".replace("-0.00", "0.00") for power in fitted]
        rows.append([action, who, layout, "exponent", *shown])
    return rows


def _size(value: float) -> str:
    if not value:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} GiB"


def as_text(rows: Sequence[Sequence[str]]) -> str:
    """A table for people."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if n < 3 else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
        if row[3] == "exponent":
            lines.append("")
    return "\n".join(lines).rstrip()


def as_markdown(args: argparse.Namespace, facts: dict[str, object], rows: Sequence[Sequence[str]]) -> str:
    """A note with the command, the machine and the table."""
    header, *body = ("| " + " | ".join(row) + " |" for row in rows)
    ranks = " ".join(map(str, args.ranks))
    return "\n".join(
        [
            "# What a rank pays as a job grows",
            "",
            f"`python3 benchmark/scale.py --ranks {ranks} --tensors {args.tensors}`",
            "",
            f"Machine: {facts['cores']} cores ({facts['cpu']}), {facts['memory_gib']} GiB, load"
            f" {facts['load_1min']} before; Python {facts['python']}, torch {facts['torch']}.",
            "",
            header,
            "|---|---|---|" + "---:|" * (len(rows[0]) - 3),
            *body,
            "",
        ]
    )


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scale.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ranks", type=count, nargs="+", default=[64, 256, 1024], metavar="N",
        help="sizes of the job (default: 64 256 1024, some minutes; 10000 takes a quarter of an hour and"
        " 6 GiB)",
    )  # fmt: skip
    parser.add_argument("--ranks-per-host", type=count, default=8, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--tensors", type=count, default=64, metavar="N", help="of the state (default: %(default)s)"
    )
    parser.add_argument(
        "--kept", type=count, nargs="+", default=[1, 10, 100], metavar="K",
        help="checkpoints that a small job keeps (default: 1 10 100)",
    )  # fmt: skip
    parser.add_argument(
        "--stages", type=count, nargs="+", default=[2, 8, 32], metavar="S",
        help="pipeline stages of a job of 64 ranks, which they divide (default: 2 8 32)",
    )  # fmt: skip
    parser.add_argument(
        "--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="default: all three"
    )
    parser.add_argument("--export", type=Path, metavar="FILE.json", help="write every figure there")
    parser.add_argument("--markdown", type=Path, metavar="FILE.md", help="write the table there, as a note")
    return parser


def main() -> int:
    parser = build_parser()
    args = parser.parse_args()
    if min(args.ranks) < 2 * args.ranks_per_host:
        parser.error(f"--ranks {min(args.ranks)}: a job needs two hosts of {args.ranks_per_host} ranks")
    if any(64 % stages for stages in args.stages):
        parser.error(f"--stages {' '.join(map(str, args.stages))}: each must divide 64")
    for path in (args.export, args.markdown):
        if path and not path.resolve().parent.is_dir():
            parser.error(f"the directory of {path} does not exist")
    facts = machine()
    # The largest last: a process that has held gigabytes is slower from there on.
    layouts = [layout for layout in reversed(LAYOUTS) if layout in args.layouts]
    jobs = [
        Job(layout=layout, ranks=ranks, ranks_per_host=args.ranks_per_host, tensors=args.tensors)
        for ranks in sorted(set(args.ranks))
        for layout in layouts
    ]
    costs = [cost for job in tqdm(jobs, unit="job", disable=None) for cost in measure(job)]
    small = Job(
        layout="sharded", ranks=2 * args.ranks_per_host, ranks_per_host=args.ranks_per_host, tensors=4
    )
    costs += [measure_kept(small, kept) for kept in sorted(set(args.kept))]
    costs += [
        measure_stages(Job(layout="sharded", ranks=64, ranks_per_host=8, tensors=args.tensors, stages=stages))
        for stages in sorted(set(args.stages))
    ]
    costs.sort(key=lambda cost: LAYOUTS.index(cost.layout))
    rows = as_rows(costs)
    print(as_text(rows))
    if args.export:
        everything = {
            "machine": facts,
            "ranks_per_host": args.ranks_per_host,
            "tensors": args.tensors,
            "costs": [asdict(cost) for cost in costs],
            "exponents": exponents(costs),
        }
        args.export.write_text(json.dumps(everything, indent=2) + "\n")
    if args.markdown:
        args.markdown.write_text(as_markdown(args, dict(facts), rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
