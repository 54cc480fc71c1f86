# SPDX-License-Identifier: Apache-2.0
"""Histories of jobs, each drawn from a seed: the engine's own code beside `tests.checkpoint.history_model`.

A job has a rank and an agent on each of two or three hosts, a storage that all see, and in some histories a
local tier on the disk of each host.  Agents run the real workers of the tiers, ranks restore by the real
`Restorer`, and `go_on_from` says what becomes of the job.  All processes do one operation at a time
(`tests.checkpoint.stepped`).  Of trainers and of the links between agents there are the few lines here alone.

Not among them: captures in memory, copies of the local tier on other hosts, corrupt bytes, power cuts and
caching mounts; each has tests of its own.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
import re
import secrets
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from resiliency.checkpoint import threads
from resiliency.checkpoint.agent import peers, tier_writers
from resiliency.checkpoint.agent.jobs import RetireJob, SaveJob, ShowJob
from resiliency.checkpoint.agent.peers import Replication
from resiliency.checkpoint.agent.protocol import Attach, Done, Settings
from resiliency.checkpoint.agent.save_collector import save_job
from resiliency.checkpoint.agent.tier_writers import Worker
from resiliency.checkpoint.branches import RECORD, record_branches
from resiliency.checkpoint.commit.retention import committed
from resiliency.checkpoint.format import claim
from resiliency.checkpoint.format.catalog import clean_unfinished, prune
from resiliency.checkpoint.format.manifest import MANIFEST, read_manifest
from resiliency.checkpoint.format.marker import LIFTED, MarkerState, parse_marker
from resiliency.checkpoint.format.reader import CheckpointReader
from resiliency.checkpoint.names import TierName, TierTry, branch_number
from resiliency.checkpoint.ranks import RankGroup
from resiliency.checkpoint.recovery import inventory, lost_checkpoints, restore
from resiliency.checkpoint.recovery.restore import Restored, Restorer
from resiliency.checkpoint.replication import retirement
from resiliency.checkpoint.replication.completion import LeaderState, SaveName
from resiliency.checkpoint.replication.service import Complete
from resiliency.checkpoint.state.layout import Shard
from resiliency.checkpoint.storage.interface import read_file
from resiliency.checkpoint.storage.throttle import Throttle
from resiliency.checkpoint.storage.watched import CallTimeouts
from resiliency.checkpoint.trainer.going_on import GoingOn, go_on_from
from resiliency.errors import CheckpointError, CheckpointMissing, PeerError, ResiliencyError, ResourceShortage
from resiliency.runtime import SystemClock
from resiliency.testing.storage import MemoryStorage
from tests.checkpoint.history_model import Branch, Line, Model, Save, Violation
from tests.checkpoint.shard_builders import shard_of as snapshot_shard
from tests.checkpoint.stepped import FaultKind, Mount, Process, Scheduler, Task

SAVE_TIMEOUT_S = 8.0
#: Longer than any lease or save of a process that is gone.
LONG_S = 3 * 3600.0
_STEP = re.compile(r"step=(\d+)")
_ROOT = Path("/nowhere")


def shard_of(content: int, step: int, rank: int, world_size: int) -> Shard:
    """What a rank has when the state is `content`."""
    base = _base(rank)
    buffer = memoryview(bytearray(base.buffer.nbytes))
    buffer[: len(_numbers(content, rank))] = _numbers(content, rank)
    return replace(base, step=step, world_size=world_size, buffer=buffer)


@functools.lru_cache(maxsize=256)
def _numbers(content: int, rank: int) -> bytes:
    return bytes((torch.arange(4) + 1000 * content + 10 * rank).numpy())


@functools.cache
def _base(rank: int) -> Shard:
    return replace(snapshot_shard({f"state{rank}": torch.arange(4)}), rank=rank, run_id="run")


def content_in(shard: Shard) -> int:
    """The inverse of `shard_of`.  Raises Violation: the bytes are of no one state."""
    (entry,) = shard.layout.entries
    data = memoryview(bytearray(entry.size_bytes))
    if shard.load is None:
        data[:] = shard.read(entry)
    else:
        shard.load([(entry.offset_bytes, data)])
    numbers = (torch.frombuffer(data, dtype=torch.int64) - 10 * shard.rank - torch.arange(4)).tolist()
    if numbers != [numbers[0]] * 4 or numbers[0] % 1000:
        raise Violation(f"rank {shard.rank} got {numbers}")
    return int(numbers[0]) // 1000


@dataclass(frozen=True)
class _Slot:
    shard: Shard

    @property
    def header(self) -> Any:
        return SimpleNamespace(tensor_bytes=self.shard.layout.size_bytes, values_bytes=len(self.shard.values))

    def close(self) -> None:
        pass


@dataclass(eq=False)
class _Meeting:
    """Ranks of one start that agree with each other."""

    scheduler: Scheduler
    tasks: list[Task] = field(default_factory=list)
    rounds: dict[int, dict[int, Any]] = field(default_factory=dict)

    def is_broken(self) -> bool:
        return any(task.process.is_dead or task.is_over for task in self.tasks)


class _Ranks(RankGroup):
    def __init__(self, rank: int, world_size: int, meeting: _Meeting) -> None:
        self.rank, self.world_size = rank, world_size
        self._meeting = meeting
        self._count = 0

    def gather(self, value: Any) -> list[Any]:
        said = self._meeting.rounds.setdefault(self._count, {})
        self._count += 1
        said[self.rank] = value
        if len(said) < self.world_size:
            self._meeting.scheduler.wait(
                float("inf"), lambda: len(said) == self.world_size or self._meeting.is_broken()
            )
        if len(said) < self.world_size:
            raise PeerError("a rank is gone.")
        return [said[rank] for rank in range(self.world_size)]


class _Service:
    """In the place of `PeerService`: agents of one attempt count together, and make no copies."""

    port = 0
    history: History

    def __init__(self, host: str, local_root: Path, *, on_event: Callable[[Any], None], **_: Any) -> None:
        self.host, self.on_event = host, on_event
        self.attempt_id = ""

    def replicate(self, step: int, save_id: str) -> None:
        self.history.acknowledge(self.host, SaveName(step, save_id))

    def lose(self, step: int, save_id: str) -> None:
        """Nothing is given up here."""

    def spare(self, step: int) -> None:
        """There are no copies."""

    def close(self) -> None:
        pass


class Agent:
    """One host's agent."""

    def __init__(self, history: History, host: str, name: str) -> None:
        self.host = host
        self.process = Process(name)
        self.attach: Attach | None = None
        self.disk = history.disks[host]
        self.is_left = False
        self._history = history
        self.workers = {
            tier: Worker(tier, self._done, Throttle(), partial(history.mount, self.process, own=self.disk))
            for tier in history.tiers
        }
        self.replication = Replication(_ROOT, lambda: None)
        for worker in self.workers.values():
            history.scheduler.start(self.process, lambda worker=worker: self._work(worker))

    def _work(self, worker: Worker) -> None:
        waiting = worker._queue
        while True:
            if waiting.empty():
                self._history.scheduler.wait(float("inf"), lambda: not waiting.empty())
            job = waiting.get_nowait()
            assert job is not None
            worker._perform(job)

    def begin_attempt(self, attach: Attach) -> None:
        """As `Server` and `SaveCollector` do when ranks introduce themselves."""
        if self.attach is None or self.attach.attempt_id != attach.attempt_id:
            if TierName.LOCAL in self.workers:
                self.workers[TierName.LOCAL].try_put(ShowJob(settings=attach.settings))
            self.replication.begin_attempt(attach)
        self.attach = attach
        self.replication.introduced(attach)

    def save(self, job: SaveJob) -> None:
        worker = self.workers[job.tier]
        worker.overtake(job.attempt_id)
        if not worker.try_put(job):
            worker.refuse(job, "too many saves wait for storage", left_out=False, hangs=False)

    def _done(self, job: SaveJob, done: Done) -> None:
        """As `Server._report`."""
        if self.process.is_dead:  # killed in the kernel, and reports without another operation
            return
        self._history.reported(self, job, done)
        if self.is_left or self.attach is None or job.attempt_id != self.attach.attempt_id:
            return
        if not done.error and job.tier is TierName.LOCAL and not done.kept:
            self.replication.committed(job.step)
        self.hear()

    def hear(self) -> None:
        for event in self.replication.take_events():
            if isinstance(event, RetireJob):
                self.workers[TierName.LOCAL].try_put(event)


@dataclass
class Job:
    """A start of the job, from its restore on."""

    line: Line
    attaches: dict[str, Attach]
    step: int
    content: int
    newest_saved: int = -1
    try_number: int = 1


def _committed_save(disk: MemoryStorage, step: int) -> str | None:
    """What readers see at a step, once its save has lifted its own marker.

    A late leader lifts that of another save, or of a removal of its own, for the time of two operations: see
    `StepClaim.try_lift`.
    """
    manifest = committed(disk, step)
    if manifest is None:
        return None
    try:
        lifted = parse_marker(read_file(disk, f"step={step}/{manifest.folder}/{LIFTED}"))
    except CheckpointMissing:
        return manifest.save_id
    is_own = (lifted.state, lifted.save_id) == (MarkerState.WRITING, manifest.save_id)
    return manifest.save_id if is_own else None


def _is_row(branch: Branch, number: int, parent: int, fork: int) -> bool:
    is_child = branch.parent is not None and branch.parent.number == parent
    return is_child and (branch.number, branch.fork) == (number, fork)


class KnownLimit(Exception):
    """What the engine does not promise has happened: the history ends."""


class History:
    """One history; `play` runs it, and raises Violation."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)  # noqa: S311
        self.scheduler = Scheduler(seed, self._changed)
        self.hosts = tuple(f"h{number}" for number in range(self.rng.choice([2, 2, 2, 3])))
        self.has_local = self.rng.random() < 0.4
        self.tiers = [TierName.PERSISTENT, *([TierName.LOCAL] if self.has_local else [])]
        keep = self.rng.choice([1, 2, 2, 3])
        self.model = Model(keep=keep, hosts=self.hosts)
        self.disks: dict[str, MemoryStorage] = {disk: MemoryStorage() for disk in ("", *self.hosts)}
        self._names = {id(storage): disk for disk, storage in self.disks.items()}
        self.agents: dict[str, Agent] = {}
        self.trainers: list[Process] = []
        self.job: Job | None = None
        self.events: list[str] = []
        self._dirty: set[tuple[str, int]] = set()
        self._wrong: Violation | None = None
        #: Why the history ended early: see `KnownLimit`.
        self.limit = ""
        self._numbers = itertools.count(1)
        self._orders = itertools.count(1)
        self._starts = itertools.count(1)
        self._leaders: dict[str, LeaderState] = {}
        #: Ends of saves by the host, tier, step and try.
        self._reports: dict[tuple[str, TierName, str, int], str] = {}
        #: By save and try.
        self._contents: dict[tuple[str, int], int] = {}
        self._lines: dict[str, Line] = {}
        self._changes = 0
        #: What was hidden and must not go: who hid it.
        self._suspects: dict[tuple[str, int], tuple[Process, Violation]] = {}
        #: Of what is visible: its files when it was committed.
        self._bytes: dict[tuple[str, int], dict[str, bytes]] = {}
        self._asked: list[tuple[str, TierName, str, int]] = []
        self._beside: list[Process] = []

    # --- the world --------------------------------------------------------------------------------

    def settings(self, host: str) -> Settings:
        return Settings(
            directory=f"{_ROOT}/shared", keep=self.model.keep, replicated=False, bytes_per_s=0,
            save_timeout_s=SAVE_TIMEOUT_S,
            local_directory=f"{_ROOT}/{host}" if self.has_local else "",
            local_keep=self.model.keep,
        )  # fmt: skip

    def mount(self, process: Process, directory: str | Path, *, own: MemoryStorage | None = None) -> Mount:
        """`own`: the disk of its host, if that may be gone."""
        name = Path(directory).name
        disk = self.disks[""] if name == "shared" else own or self.disks[name]
        return Mount(self.scheduler, process, disk, str(directory))

    def _mount_here(self, root: str | Path, **_: Any) -> Any:
        """In the place of `LocalStorage`, for code that opens one itself."""
        task = self.scheduler.current
        assert task is not None
        if Path(root).name in (*self.hosts, "shared"):
            return self.mount(task.process, root)
        return MemoryStorage()

    @contextmanager
    def _engine(self) -> Iterator[None]:
        """The engine in this world: its clocks, waits, threads and random names are the history's."""
        scheduler = self.scheduler

        def wait(event: Any, timeout: float | None = None) -> bool:
            if scheduler.current is None or threading.get_ident() != owner:  # of a progress bar, say
                return real_wait(event, timeout)
            if not event.is_set() and timeout is not None and timeout > 0:
                scheduler.wait(timeout, event.is_set)
            return bool(event.is_set())

        def no_thread(thread: Any) -> None:
            raise ResourceShortage("no threads here.")

        def now(_: SystemClock) -> datetime:
            return datetime.fromtimestamp(scheduler.now, timezone.utc)

        def monotonic(_: SystemClock) -> float:
            return scheduler.now

        def new_uuid() -> uuid.UUID:
            return uuid.UUID(int=names.getrandbits(128))

        def new_token(size_bytes: int) -> str:
            return f"{names.getrandbits(8 * size_bytes):x}"

        real_wait, owner = threading.Event.wait, threading.get_ident()
        names = random.Random(self.seed)  # noqa: S311
        service = type("Service", (_Service,), {"history": self})
        with (
            mock.patch.object(threading.Event, "wait", wait),
            mock.patch.object(threads, "start_thread", no_thread),
            mock.patch.object(tier_writers, "start_thread"),
            mock.patch.object(SystemClock, "monotonic", monotonic),
            mock.patch.object(SystemClock, "now", now),
            mock.patch.object(uuid, "uuid4", new_uuid),
            mock.patch.object(secrets, "token_hex", new_token),
            mock.patch.object(peers, "PeerService", service),
            mock.patch.object(inventory, "LocalStorage", self._mount_here),
            mock.patch.object(restore, "LocalStorage", self._mount_here),
            mock.patch.object(lost_checkpoints, "LocalStorage", self._mount_here),
            mock.patch.object(retirement, "LocalStorage", self._mount_here),
        ):
            yield

    def _changed(self, disk: MemoryStorage, names: tuple[str, ...], process: Process) -> None:
        """After each operation that changes something."""
        name = self._names.get(id(disk))
        if name is None:  # of a host that is gone
            return
        for path in names:
            if path == RECORD:
                self._recorded(name)
                continue
            found = _STEP.match(path)
            if found is None:
                continue
            step, rest = int(found[1]), path.partition("/")[2]
            self._dirty.add((name, step))
            if rest not in ("", MANIFEST) and not rest.endswith(f"/{LIFTED}"):
                continue
            now = _committed_save(disk, step)
            if (name, step) in self._suspects and now is None and not disk.exists(f"step={step}/{MANIFEST}"):
                self._wrong = self._wrong or self._suspects[name, step][1]
            if now != self.model.visible[name].get(step):
                self._changes += 1
                self._see(name, step, now, process)

    def _see(self, disk: str, step: int, now: str | None, process: Process) -> None:
        """Readers see another save at a step, or none."""
        try:
            self.model.change(disk, step, now)
            if now is not None:
                self._suspects.pop((disk, step), None)
                self._note_content(disk, step)
        except Violation as error:
            if now is None and self.disks[disk].exists(f"step={step}/{MANIFEST}"):
                # Who deletes hides first, and looks again then.
                self._suspects[disk, step] = process, error
            else:
                self._wrong = self._wrong or error

    def _recorded(self, disk: str) -> None:
        rows = json.loads(read_file(self.disks[disk], RECORD))["branches"]
        newest = max(number for number, _, _ in rows)
        parent, fork = next((parent, step) for number, parent, step in rows if number == newest)
        lines = [line for line in self._lines.values() if _is_row(line.branch, newest, parent, fork)]
        if not lines:
            return
        line = max(lines, key=lambda line: line.order)
        latest = max(self._lines.values(), key=lambda line: line.order)
        if latest.order > line.order:
            self.limit = self.limit or f"{line.attempt_id} records its branch after {latest.attempt_id} began"
        self.model.note_line(disk, line)

    def _check_content(self, disk: str, step: int) -> None:
        """What readers see at a step is one save, whole."""
        save_id = self.model.visible[disk][step]
        try:
            reader = CheckpointReader(self.disks[disk], step, threads=1)
            reader.verify()
            found = {content_in(reader.open_shard(rank)) for rank in reader.manifest.ranks}
        except ResiliencyError as error:
            raise Violation(f"step {step} of disk {disk!r} is {save_id}, and damaged: {error}") from error
        if found != {self.model.saves[save_id].content}:
            raise Violation(f"step {step} of disk {disk!r} is {save_id}, and holds {found}")

    def _note_content(self, disk: str, step: int) -> None:
        """The same at a glance, when it is committed: from then on its bytes stay as they are."""
        save = self.model.saves[self.model.visible[disk][step]]
        manifest = read_manifest(self.disks[disk], f"step={step}")
        files = self._bytes[disk, step] = self._files_of(disk, step, manifest.folder)
        expected = [_numbers(save.content, rank) for rank in manifest.ranks]
        is_there = [any(numbers in data for data in files.values()) for numbers in expected]
        if not all(is_there):
            raise Violation(f"step {step} of disk {disk!r} is {save.save_id}, and lacks a rank: {is_there}")

    def _files_of(self, disk: str, step: int, folder: str) -> dict[str, bytes]:
        storage, place = self.disks[disk], f"step={step}"
        own = [f"{place}/{folder}/{name}" for name in storage.list(f"{place}/{folder}")]
        shared = [f"{place}/{name}" for name in storage.list(place) if not claim.is_claim(name)]
        return {name: read_file(storage, name) for name in (*own, *shared)}

    def _check_bytes(self, disk: str, step: int) -> None:
        """What was committed is as it was."""
        manifest = read_manifest(self.disks[disk], f"step={step}")
        if self._files_of(disk, step, manifest.folder) != self._bytes[disk, step]:
            raise Violation(f"{self.model.visible[disk][step]} was changed on disk {disk!r}")

    def _guard(self, check: Callable[[], None]) -> None:
        """Within a process: the engine must not take what is wrong with it for an error of its own."""
        try:
            check()
        except Violation as error:
            self._wrong = self._wrong or error

    def _raise_wrong(self) -> None:
        if self.limit:
            raise KnownLimit(self.limit)
        if self._wrong is not None:
            raise self._wrong

    def acknowledge(self, host: str, save: SaveName) -> None:
        attempt_id = save.save_id.rpartition("-")[0]
        leader = self._leaders.setdefault(attempt_id, LeaderState(self.hosts))
        before = list(leader.complete)
        leader.acknowledge(host, save)
        for complete in leader.complete:
            if complete in before:
                continue
            self.model.complete.add(complete.save_id)
            for agent in self.agents.values():
                if not agent.process.is_dead:
                    news = Complete(step=complete.step, save_id=complete.save_id, retire_below=None)
                    agent.replication._hear(news)
                    agent.hear()

    def reported(self, agent: Agent, job: SaveJob, done: Done) -> None:
        self.scheduler.trace.append(
            f"{agent.process.name} reports {job.tier.value} {job.save_id}: {done.error or 'committed'}"
        )
        self._reports[agent.host, job.tier, job.save_id, job.try_number] = done.error
        if not done.error and (job.tier is TierName.PERSISTENT or not agent.is_left):
            disk = agent.host if job.tier is TierName.LOCAL else ""
            content = self._contents[job.save_id, job.try_number]
            self._guard(lambda: self.model.check_report(disk, job.save_id, job.step, content))

    # --- events -----------------------------------------------------------------------------------

    def play(self) -> None:
        with self._engine():
            try:
                self._start(None)
                for _ in range(self.rng.randint(3, 9)):
                    self._event()
                self._end()
            except KnownLimit:
                self.events.append(self.limit)
            finally:
                self.scheduler.close()

    def _event(self) -> None:
        rng = self.rng
        is_hung = bool(self.scheduler.hung())
        kinds: dict[Callable[[], None], int] = {
            self._start_again: 6 if is_hung else 3,
            self._plan_fault: 1 if is_hung else 5,
            self._beside_it: 2,
        }
        if self.job is not None:
            kinds |= {self._save: 8, self._save_same: 1, self._go_back: 2, self._save_late: 3}
        if is_hung:
            kinds |= {self._wake: 3, self._notice: 1}
        event = rng.choices(list(kinds), list(kinds.values()))[0]
        self.events.append(event.__name__.strip("_"))
        self.scheduler.trace.append(f"--- {self.events[-1]}")
        event()
        self._run(rng.choice([0, 5, 20, 60, 200, None, None]))
        self._check()

    def _run(self, operations: int | None = None, until: Callable[[], bool] = lambda: False) -> None:
        self.scheduler.run(operations=operations, until=lambda: bool(self._wrong or self.limit) or until())
        self._raise_wrong()

    def _check(self) -> None:
        for disk, step in sorted(self._dirty):
            if step in self.model.visible[disk]:
                self._check_bytes(disk, step)
        self._dirty.clear()
        for place, (process, _) in list(self._suspects.items()):
            if process.is_dead:  # killed within the few operations between hiding and looking
                del self._suspects[place]

    def _processes(self) -> list[Process]:
        found = [agent.process for agent in self.agents.values()] + self.trainers + self._beside
        return [process for process in found if not process.is_dead]

    def _plan_fault(self) -> None:
        agents = [agent.process for agent in self.agents.values() if not agent.process.is_dead]
        process = self.rng.choice(agents if agents and self.rng.random() < 0.7 else self._processes())
        kind = self.rng.choice(
            [FaultKind.KILL, FaultKind.HANG, FaultKind.HANG, FaultKind.ERROR, FaultKind.FULL]
        )
        writes = self.rng.random() < 0.75
        process.plan(self.rng.randrange(0, 30 if writes else 60), kind, writes=writes)
        self.events[-1] += f" {process.name} {kind.value}"

    def _save_late(self) -> None:
        """An agent hangs in a save, the job starts again and saves the same steps, and the agent wakes."""
        living = [agent for agent in self.agents.values() if not agent.process.is_dead]
        if not living:
            return
        agent = self.rng.choice(living)
        writes = self.rng.random() < 0.75
        agent.process.plan(self.rng.randrange(0, 14 if writes else 40), FaultKind.HANG, writes=writes)
        self._save(stride=1)
        self._run()
        self._start(None)
        for _ in range(self.rng.choice([1, 1, 2])):
            if self.job is not None:
                self._save(stride=1)
                self._run(self.rng.choice([20, 60, None, None, None]))
        self.scheduler.wake(agent.process)

    def _wake(self) -> None:
        self.scheduler.wake(self.rng.choice(self.scheduler.hung()))

    def _notice(self) -> None:
        """Agents notice that their storage hangs, and report what waits for it."""
        for agent in self.agents.values():
            for worker in agent.workers.values():
                worker.look_for_hang(CallTimeouts(longest=timedelta(0)))

    def _start_again(self) -> None:
        choices: list[int | None] = [None, None, None, *self.model.visible[""]]
        is_partial = self.rng.random() < 0.2
        self._start(self.rng.choice(choices), partial=is_partial)
        if is_partial and self.job is not None:
            self._save_same()

    def _start(self, step: int | None, *, partial: bool = False) -> None:
        """A start of the job: ranks are new, agents are, or outlive the ranks, or wait for them in vain."""
        self.job = None
        self._asked.clear()
        number = next(self._starts)
        for process in self.trainers:
            self.scheduler.kill(process)
        for host in self.hosts:
            agent = self.agents.get(host)
            is_hung = agent is not None and agent.process in self.scheduler.hung()
            fate = self.rng.choice(["is killed", "is left", *([] if is_hung else ["stays"])])
            if agent is not None and not agent.process.is_dead and fate == "stays":
                continue
            if agent is not None and fate == "is killed":
                self.scheduler.kill(agent.process)
            elif agent is not None:
                self._replace_host(agent)
            self.agents[host] = Agent(self, host, f"agent {host} of start {number}")
        self.trainers = [Process(f"rank {rank} of start {number}") for rank in range(len(self.hosts))]
        attaches = {host: self._attach(host, f"a{number}") for host in self.hosts}
        self._restore(attaches, step, partial=partial)

    def _replace_host(self, agent: Agent) -> None:
        """Another machine, with an empty disk, takes the place of one that nobody reaches any more."""
        agent.is_left = True
        host = agent.host
        self._names.pop(id(self.disks[host]))
        self.disks[host] = MemoryStorage()
        self._names[id(self.disks[host])] = host
        self.model.lose_disk(host)
        for place in [place for place in self._bytes if place[0] == host]:
            del self._bytes[place]

    def _attach(self, host: str, attempt_id: str) -> Attach:
        rank = self.hosts.index(host)
        return Attach(
            rank=rank, world_size=len(self.hosts), local_ranks=(rank,), run_id="run",
            attempt_id=attempt_id, host=host, settings=self.settings(host),
        )  # fmt: skip

    def _go_back(self) -> None:
        """The ranks restore without a start."""
        assert self.job is not None
        job, self.job = self.job, None
        if any(process.is_dead for process in self.trainers):
            return
        self._asked = [save for save in self._asked if not self.agents[save[0]].process.is_dead]
        choices: list[int | None] = [None, *self.model.visible[""]]
        self._restore(job.attaches, self.rng.choice(choices), job=job)

    def _restore(
        self, attaches: dict[str, Attach], step: int | None, *, job: Job | None = None, partial: bool = False
    ) -> None:
        """`job`: before, where it is no start."""
        newest_saved = -1 if job is None else job.newest_saved
        before, changes = self.model.whole(), self._changes
        expected = self.model.newest_live(before)
        tasks = self._restorers(self.trainers, attaches, step, newest_saved=newest_saved, partial=partial)
        self._run(until=lambda: all(task.is_over for task in tasks))
        if not all(task.is_over for task in tasks) or any(task.process.is_dead for task in tasks):
            self.scheduler.trace.append("the start comes to nothing")
            return
        has_faults = any(process.errors for process in self.trainers)
        errors = [task.error for task in tasks if task.error is not None]
        if errors:
            if isinstance(errors[0], Violation) or not isinstance(errors[0], ResiliencyError):
                raise errors[0]
            self.scheduler.trace.append(f"the start is refused: {errors[0]}")
            if changes == self._changes and not has_faults and expected is not None and step is None:
                raise Violation(f"a start finds nothing, and there are {before}: {errors[0]}") from errors[0]
            return
        contents = {task.result[2] for task in tasks}
        restored, goes_on, _ = tasks[0].result
        if len(contents) != 1:
            raise Violation(f"ranks got {contents} for {restored.save_id}")
        is_sure = before <= self.model.whole()
        self._check_restored(restored, contents.pop(), step, has_faults, expected if is_sure else None)
        line = self._line_of(goes_on, restored)
        step, content = 0, 0
        if restored.step:
            step, content = restored.step, self.model.saves[restored.save_id].content
        elif job is not None and not goes_on.leaves_own_saves:
            step, content = job.step, job.content  # the state is as it was
        self.job = Job(
            line=line,
            attaches={
                host: replace(
                    goes_on.attach,
                    rank=each.rank,
                    local_ranks=each.local_ranks,
                    host=host,
                    settings=each.settings,
                )
                for host, each in attaches.items()
            },
            step=step,
            content=next(self._numbers) if partial else content,
            newest_saved=-1 if goes_on.leaves_own_saves else newest_saved,
            try_number=1 if job is None else job.try_number,
        )
        for host, agent in self.agents.items():
            if not agent.process.is_dead:
                agent.begin_attempt(self.job.attaches[host])

    def _restorers(
        self,
        processes: list[Process],
        attaches: dict[str, Attach],
        step: int | None,
        *,
        newest_saved: int = -1,
        partial: bool = False,
    ) -> list[Task]:
        """As `Checkpointer.restore` on each rank."""
        meeting = _Meeting(self.scheduler)
        for rank, host in enumerate(self.hosts):
            process = processes[rank]

            def run(
                rank: int = rank, host: str = host, process: Process = process
            ) -> tuple[Restored, GoingOn, int]:
                found = [0]

                def fill(shard: Shard) -> Callable[[], None]:
                    return lambda: found.__setitem__(0, content_in(shard))

                arena: Any = SimpleNamespace(directory=_ROOT / "memory", rank=rank)
                shared: Any = self.mount(process, f"{_ROOT}/shared")
                restorer = Restorer(
                    arena,
                    shared,
                    _Ranks(rank, len(self.hosts), meeting),
                    replicated=False,
                    local=_ROOT / host if self.has_local else None,
                    host=host,
                )
                with ExitStack() as leases:
                    restored = restorer.restore(fill, step=step, leases=leases)
                    goes_on = go_on_from(attaches[host], restored, newest_saved=newest_saved, partial=partial)
                    if goes_on.leaves_own_saves:
                        self._line_of(goes_on, restored)
                        self.scheduler.wait(5 * SAVE_TIMEOUT_S, lambda: not self._under_way())
                        mounts: list[Any] = [shared] if rank == 0 else []
                        if self.has_local:
                            mounts.append(self.mount(process, _ROOT / host))
                        for mount in mounts:
                            with suppress(CheckpointError):
                                record_branches(mount, goes_on.branches)
                return restored, goes_on, found[0]

            meeting.tasks.append(self.scheduler.start(process, run))
        return meeting.tasks

    def _under_way(self) -> bool:
        return any(save not in self._reports for save in self._asked)

    def _check_restored(
        self, restored: Restored, content: int, step: int | None, has_faults: bool, expected: Save | None
    ) -> None:
        """`expected`: the newest that was there all the time; None: it cannot be told."""
        self.scheduler.trace.append(f"restored {restored.step} {restored.save_id} {content}")
        if restored.step and content != self.model.saves[restored.save_id].content:
            raise Violation(f"{restored.save_id} is restored as {content}")
        if step is not None:
            if restored.step not in (0, step):
                raise Violation(f"step {step} was asked for, and {restored.step} restored")
            return
        if has_faults or expected is None:
            return
        if restored.step < expected.step:
            raise Violation(f"step {restored.step} is restored, and {expected.save_id} is committed")
        if restored.step and not self.model.is_live(self.model.saves[restored.save_id]):
            raise Violation(f"{restored.save_id} is restored, and was left: {expected.save_id} is live")

    def _line_of(self, goes_on: GoingOn, restored: Restored) -> Line:
        attempt_id = goes_on.attach.attempt_id
        if attempt_id in self._lines:
            return self._lines[attempt_id]
        number = branch_number(attempt_id)
        known = {branch.number: branch for branch in goes_on.branches.known}
        branch = self.model.saves[restored.save_id].line.branch if restored.step else Branch(0)
        if goes_on.is_rollback:
            branch = Branch(number, branch, restored.step)
        elif branch.number != number:
            branch = self._branch_of(known, number)
        self._lines[attempt_id] = Line(next(self._orders), branch, attempt_id)
        return self._lines[attempt_id]

    def _branch_of(self, known: dict[int, Any], number: int) -> Branch:
        if number not in known:
            return Branch(number)
        return Branch(number, self._branch_of(known, known[number].parent), known[number].step)

    def _save(self, *, stride: int = 0) -> None:
        assert self.job is not None
        self.job.step += stride or self.rng.choice([1, 1, 2])
        self.job.content = next(self._numbers)
        self.job.try_number = 1
        self._save_now()

    def _save_same(self) -> None:
        """The step is saved once more, or the one that was restored."""
        assert self.job is not None
        if self.job.step == 0:
            return
        self.job.try_number = self.job.try_number + 1 if self.job.newest_saved == self.job.step else 1
        self._save_now()

    def _save_now(self) -> None:
        job = self.job
        assert job is not None
        if any(process.is_dead for process in self.trainers):
            self.job = None
            return
        job.newest_saved = job.step
        is_calm = self.rng.random() < 0.6 and self._is_calm(job.step)
        jobs = []
        for host, attach in job.attaches.items():
            shard = shard_of(job.content, job.step, attach.rank, attach.world_size)
            for tier in self.tiers:
                tried = TierTry(job.step, job.try_number, tier.value)
                slots: Any = {attach.rank: _Slot(shard)}
                jobs.append((host, save_job(attach, tried, slots=slots)))
        self.model.begin(Save(job.step, jobs[0][1].save_id, job.content, job.line))
        self._contents[jobs[0][1].save_id, job.try_number] = job.content
        for host, part in jobs:
            if not self.agents[host].process.is_dead:
                self._asked.append((host, part.tier, part.save_id, part.try_number))
                self.agents[host].save(part)
        if self.rng.random() < 0.15:
            self._run(self.rng.choice([5, 20, 60]))
            self._beside_it()
        if not is_calm:
            return
        self._run()
        if self._is_calm(None):
            for host, part in jobs:
                why = self._reports.get((host, part.tier, part.save_id, part.try_number), "nothing")
                if why:
                    raise Violation(f"nothing is wrong, and {part.save_id} is not saved on {host}: {why}")

    def _is_calm(self, step: int | None) -> bool:
        """Whether nothing keeps a save of a new step from being committed."""
        if self.scheduler.hung() or any(agent.process.is_dead for agent in self.agents.values()):
            return False
        ours = {agent.process for agent in self.agents.values()} | set(self.trainers) | set(self._beside)
        strangers = [t for t in self.scheduler.tasks if t.process not in ours]
        if any(not t.is_over and not self._is_idle(t) for t in strangers):
            return False
        if any(process.faults or process.is_full for process in ours if not process.is_dead):
            return False
        if step is None:
            return True
        if any(not self._is_idle(t) for t in self.scheduler.tasks if t.process not in self._beside):
            return False
        assert self.job is not None
        there = [self.model.saves[seen[step]] for seen in self.model.visible.values() if step in seen]
        lease = f"step={step}.lease"
        is_read = any(name.startswith(lease) for disk in self.disks.values() for name in disk.list(""))
        return not is_read and not any(self.model.is_live(save, self.job.line) for save in there)

    @staticmethod
    def _is_idle(task: Task) -> bool:
        return task.is_over or (task.wakes_at == float("inf") and not (task.is_ready and task.is_ready()))

    def _beside_it(self) -> None:
        """A second program in the same directory."""
        what = self.rng.choice(["evaluates", "cleans", "prunes"])
        self.events[-1] += f", a program beside it {what}"
        number = len(self._beside)
        if what == "evaluates":
            processes = [Process(f"evaluation {number} rank {rank}") for rank in range(len(self.hosts))]
            self._beside += processes
            attaches = {host: self._attach(host, f"e{number}") for host in self.hosts}
            self._restorers(processes, attaches, None, partial=True)
            return
        process = Process(f"program {number} that {what}")
        self._beside.append(process)
        mount: Any = self.mount(process, f"{_ROOT}/shared")
        if what == "cleans":
            self.scheduler.start(process, lambda: clean_unfinished(mount, run_id="evaluation"))
        else:
            self.scheduler.start(process, lambda: prune(mount, keep_last=self.model.keep))

    def _end(self) -> None:
        """All that hangs wakes or is killed, and the job starts once more: what was committed is there."""
        self.events.append("end")
        for process in self.scheduler.hung():
            if self.rng.random() < 0.5:
                self.scheduler.kill(process)
            self.scheduler.wake(process)
            self._run(self.rng.choice([5, 50, None]))
        for process in {task.process for task in self.scheduler.tasks}:
            process.faults.clear()
            process.is_full = False
            self.scheduler.kill(process)
        self._run()
        self._check()
        self.scheduler.now += LONG_S
        self._beside.clear()
        self._start(None)
        if self.job is None:
            if self.model.newest_live(self.model.whole()) is not None:
                raise Violation("the last start comes to nothing")
            return  # it says so, and a person decides
        newest = max((s for there in self.model.visible.values() for s in there), default=0)
        self.job.step = max(self.job.step, newest)
        self._save()
        self._check()
        for _, error in self._suspects.values():
            raise error
        for disk, there in self.model.visible.items():
            for step in sorted(there):
                self._check_bytes(disk, step)
                self._check_content(disk, step)


def play(seed: int) -> History:
    """Play a history; a Violation carries what happened."""
    history = History(seed)
    try:
        history.play()
    except Violation as error:
        error.add_note(f"seed {seed}: {'; '.join(history.events)}\n{history.scheduler.told()}")
        raise
    return history
