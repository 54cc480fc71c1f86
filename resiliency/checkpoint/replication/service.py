# SPDX-License-Identifier: Apache-2.0
"""The agent's side of all that hosts do for each other: copies, repairs, and completion.

    service = PeerService("host-3", Path("/local/job"), on_event=print)
    service.update(table)                   # once the trainers have agreed on it
    service.replicate(100, "attempt-100")   # step 100 is committed here
    ...                                     # Replicated(100, ...), then Complete(100, ...)
    service.close()

No call waits for the network or for a disk; what comes of it is told as events, from threads of the
service.  A host that is dead, stopped, full or cut off costs its peers nothing but a copy on another
host.  An older replica is deleted only when a newer save of its run is complete on all hosts, by this
service; the host's own checkpoints are the caller's.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

from resiliency.checkpoint.format.catalog import steps_in
from resiliency.checkpoint.format.manifest import read_manifest
from resiliency.checkpoint.format.marker import step_directory, try_read_marker
from resiliency.checkpoint.machine import make_room_for
from resiliency.checkpoint.names import directory_name
from resiliency.checkpoint.replication.completion import MOST_INCOMPLETE, SaveName
from resiliency.checkpoint.replication.completion_link import CompletionLink
from resiliency.checkpoint.replication.copy_queue import CopyQueue
from resiliency.checkpoint.replication.hosts import HostTable
from resiliency.checkpoint.replication.placement import choose_targets
from resiliency.checkpoint.replication.repairs import Push
from resiliency.checkpoint.replication.replica_store import REPLICAS, ReplicaStore
from resiliency.checkpoint.replication.retirement import retire_replicas
from resiliency.checkpoint.replication.sender import CopySource, Sender, SourceUnavailable
from resiliency.checkpoint.replication.server import PeerServer
from resiliency.checkpoint.replication.transport.connection import CallDeadline, Links
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.checkpoint.storage.throttle import Throttle
from resiliency.checkpoint.threads import CallerThread, TaskThread, start_thread
from resiliency.errors import (
    CheckpointError,
    CheckpointIncomplete,
    ConfigError,
    PeerError,
    ResiliencyError,
    ResourceShortage,
)

logger = logging.getLogger(__name__)

#: Rounds in which a repair is tried.
_REPAIR_ROUNDS = 5
#: Given-up saves whose copies are looked for again with each that follows: one may have been on its way.
_GIVEN_UP = 16


@dataclass(frozen=True, kw_only=True)
class Replicated:
    """The copies of a save that this host owes are verified and committed on `hosts`."""

    step: int
    save_id: str
    hosts: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class NotReplicated:
    """A save has fewer copies than were asked for.

    `is_final`: it stays so: it was superseded, or is gone or damaged.  Else every host was asked once
    in vain, or it could not be read for now, and all will be tried again.
    """

    step: int
    save_id: str
    why: str
    is_final: bool


@dataclass(frozen=True, kw_only=True)
class Complete:
    """All hosts have that save committed and copied.

    Of this attempt's saves those before `retire_below` may be deleted; None: nothing may yet.
    """

    step: int
    save_id: str
    retire_below: int | None


@dataclass(frozen=True, kw_only=True)
class GivenUp:
    """That save never becomes complete: this host deletes its part.  May be told again.

    `behind`: some of the hosts that kept it waiting; empty: not known here.
    """

    step: int
    save_id: str
    behind: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Repaired:
    push: Push


@dataclass(frozen=True, kw_only=True)
class NotRepaired:
    push: Push
    why: str


PeerEvent: TypeAlias = "Replicated | NotReplicated | Complete | GivenUp | Repaired | NotRepaired"


class _Leftovers:
    """When to look for what agents before this one left: once for each attempt, until a look succeeds."""

    def __init__(self, pause: timedelta) -> None:
        self._pause_s = pause.total_seconds()
        self._done_for = ""
        self._not_before = 0.0

    def are_due(self, attempt_id: str) -> bool:
        return attempt_id != self._done_for and time.monotonic() >= self._not_before

    def due_in_s(self, attempt_id: str) -> float | None:
        """None: never."""
        return None if attempt_id == self._done_for else max(0.0, self._not_before - time.monotonic())

    def looked(self, attempt_id: str, *, is_done: bool) -> None:
        if is_done:
            self._done_for = attempt_id
        self._not_before = 0.0 if is_done else time.monotonic() + self._pause_s


class PeerService:
    """One host's agent among those of the other hosts.

    Args:
        host: name of this host.
        local_root: root of its local tier: its own checkpoints, and below `replicas` those of others.
        listen_address: address of this host at which others reach it; empty: all that it has.
        listen_port: where an agent before this one listened, if others still expect it there; 0 or a port
            that is taken: any that is free.  Where the table says that others look for this host, it
            listens as soon as it can.
        on_event: called from threads of this service, and not at once from two; it must not block.
    Raises:
        ConfigError: cannot listen at that address.
    """

    def __init__(
        self,
        host: str,
        local_root: Path,
        *,
        listen_address: str = "",
        listen_port: int = 0,
        on_event: Callable[[PeerEvent], None],
        timeouts: CallDeadline | None = None,
    ) -> None:
        timeouts = timeouts or CallDeadline()
        self._host = host
        self._root = local_root
        self._on_event = on_event
        self._timeouts = timeouts
        self._table: HostTable | None = None
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._event_lock = threading.Lock()
        self._links = Links()
        self._throttle = Throttle()
        self._sender = Sender(host, self._links, self._throttle, timeouts)
        self._store = ReplicaStore(local_root)
        self._copy_queue = CopyQueue()
        self._taken_up: set[SaveName] = set()
        self._pushes: queue.SimpleQueue[Push | None] = queue.SimpleQueue()
        self._news = threading.Event()
        #: Used by the thread of the roll call: what was given up lately, and which hosts were named for it.
        self._given_up: list[SaveName] = []
        self._reported_behind: set[tuple[str, ...]] = set()
        self._completion_link = CompletionLink(host, self._completed, self._gave_up, timeouts)
        try:
            self._server = PeerServer(
                host,
                listen_address,
                self._store,
                port=listen_port,
                table=lambda: self._table,
                join=self._completion_link.join,
                timeouts=timeouts,
            )
        except (ConfigError, ResourceShortage):
            self._completion_link.close()
            raise
        self._threads: list[threading.Thread] = []
        #: Last of all closed, for what it closes then may take as long as any other operation.
        self._tidy: TaskThread | CallerThread = CallerThread()
        try:
            self._tidy = TaskThread("resiliency-peer-tidy")
            for name, target in (
                ("resiliency-peer-copy", self._copy_saves),
                ("resiliency-peer-repair", self._carry_out_pushes),
            ):
                thread = threading.Thread(target=target, name=name, daemon=True)
                start_thread(thread)
                self._threads.append(thread)
        except ResourceShortage:
            self.close()
            raise

    @property
    def port(self) -> int:
        """Where this host listens."""
        return self._server.port

    def update(self, table: HostTable) -> None:
        """Work with the hosts of `table` from now on.

        Saves of its attempt that are committed here already (this agent was restarted) are taken up
        again: what was copied stays, and all is acknowledged again.

        Raises:
            ConfigError: this host is not in it.
        """
        if table.peer(self._host) is None:
            raise ConfigError(
                f"host {self._host!r} is not in the table of peers.",
                hint="NODE_NAME must be the same for trainers and agent.",
                host=self._host,
            )
        # First: what other threads tell it of an attempt that it does not know yet is lost.
        self._completion_link.update(table)
        with self._lock:
            is_new = self._table is None or self._table.attempt_id != table.attempt_id
            self._table = table
        if table.leader == self._host:
            try:
                make_room_for(len(table.peers), what="links to the agents of all hosts")
            except ConfigError as error:
                logger.error("some hosts will not be heard, and no step becomes complete: %s", error)
        mine = table.peer(self._host)
        if mine is not None and mine.port:
            self._server.listen_also_at(mine.port)
        self._throttle.bytes_per_s = table.bytes_per_s
        if is_new:
            self._throttle.restore()
        self._news.set()

    def replicate(self, step: int, save_id: str) -> None:
        """This host has committed its part of a save: have it copied, then acknowledge it."""
        save = SaveName(step, save_id)
        self._copy_queue.add(save)
        self._completion_link.hold(save)  # second: what is given up leaves the queue
        self._news.set()

    def lose(self, step: int, save_id: str) -> None:
        """This host's part of a save failed: it is not complete unless another try succeeds."""
        self._completion_link.lose(SaveName(step, save_id))

    def spare(self, step: int) -> None:
        """The attempt went on from `step`: its own saves of that replace no whole copy; 0: from nowhere."""
        self._store.spared_step = step

    def repair(self, pushes: Sequence[Push]) -> None:
        """Send what this host holds to where it is missing; pushes of other hosts are theirs."""
        for push in pushes:
            if push.holder == self._host:
                self._pushes.put(push)

    def lift_bandwidth_cap(self) -> None:
        """Use all bandwidth until the next attempt: the host is about to go."""
        self._throttle.lift()

    def close(self, timeout: timedelta = timedelta(seconds=10)) -> None:
        """End all transfers and threads.  What was received in part stays, hidden.  Idempotent.

        Args:
            timeout: for all of it.  A thread in which the disk hangs is left behind then; it keeps
                nobody, not even the end of the process.
        """
        if self._closing.is_set():
            return
        deadline = time.monotonic() + timeout.total_seconds()

        def left() -> timedelta:
            return timedelta(seconds=max(deadline - time.monotonic(), 0.0))

        self._closing.set()
        self._throttle.lift()
        self._links.cut_all()
        self._news.set()
        self._pushes.put(None)
        self._server.close(left())
        self._completion_link.close(left())
        for thread in self._threads:
            thread.join(left().total_seconds())
        self._tidy.submit(self._store.close)
        self._tidy.close()
        if not self._tidy.wait_for_end(left()) or any(thread.is_alive() for thread in self._threads):
            logger.warning("the disk of %s does not answer: threads that wait for it stay behind", self._root)

    def __enter__(self) -> PeerService:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- copies of own saves ----------------------------------------------------------------------

    def _copy_saves(self) -> None:
        pause_s = 0.0
        leftovers = _Leftovers(self._timeouts.longest_pause)
        while not self._closing.is_set():
            table = self._table
            if table is not None and leftovers.are_due(table.attempt_id):
                leftovers.looked(table.attempt_id, is_done=self._try_take_up(table))
            save, passed = (None, []) if table is None else self._copy_queue.take(table.attempt_id)
            for other in passed:
                self._completion_link.lose(other)
                if other not in self._taken_up:  # of those, nobody knows whether it had been before
                    self._not_replicated(other, f"superseded by step {save.step if save else 0}.")
            if save is None or table is None:
                self._news.wait(None if table is None else leftovers.due_in_s(table.attempt_id))
                self._news.clear()
                continue
            why = self._try_copy(save, table)
            if not why:
                self._copy_queue.remove(save)
                pause_s = 0.0
                continue
            if self._copy_queue.failed(save) and not self._closing.is_set():  # told once, not in each round
                self._emit(NotReplicated(step=save.step, save_id=save.save_id, why=why, is_final=False))
            pause_s = self._timeouts.next_pause_s(pause_s)
            # News may be what helps: other hosts, or a newer save that makes this one obsolete.
            if self._news.wait(pause_s):
                self._news.clear()

    def _try_copy(self, save: SaveName, table: HostTable) -> str:
        """Why `save` has to be tried again; empty: it is done with, one way or the other."""
        try:
            return self._copy(save, table)
        except SourceUnavailable as error:
            logger.warning("step %d is not copied for now: %s", save.step, error)
            return str(error)
        except CheckpointError as error:
            self._not_replicated(save, str(error))
        except Exception as error:  # the border of this thread: the next save may fare better
            logger.exception("copying step %d failed", save.step)
            self._not_replicated(save, f"{type(error).__name__}: {error}")
        self._completion_link.lose(save)
        return ""

    def _copy(self, save: SaveName, table: HostTable) -> str:
        hosts: list[str] = []
        failures: list[str] = []
        with CopySource(self._root, save.step, save.save_id) as source:
            for host in choose_targets(self._host, table.peers, table.replicas):
                if len(hosts) == table.copies() or self._closing.is_set():
                    break
                try:
                    target = table.peer(host)
                    assert target is not None, "targets are peers"
                    self._sender.send(source, directory_name(self._host), table, target)
                    hosts.append(host)
                except PeerError as error:
                    failures.append(str(error))
                    if not self._closing.is_set():
                        logger.warning("no copy of step %d on %s: %s", save.step, host, error)
        if len(hosts) < table.copies():
            return f"{len(hosts)} of {table.copies()} copies: {'; '.join(failures)}"
        self._emit(Replicated(step=save.step, save_id=save.save_id, hosts=tuple(hosts)))
        if table.is_of_attempt(save.step, save.save_id):
            self._completion_link.acknowledge(save)
        return ""

    def _not_replicated(self, save: SaveName, why: str) -> None:
        logger.warning("step %d is not replicated: %s", save.step, why)
        self._emit(NotReplicated(step=save.step, save_id=save.save_id, why=why, is_final=True))

    def _try_take_up(self, table: HostTable) -> bool:
        """Go on with what an agent before this one may have left undone; False: look again later."""
        try:
            return self._take_up(table)
        except CheckpointError as error:
            logger.warning("what an earlier agent left is looked for again: %s", error)
            return False
        except Exception:  # the border of this thread: saves to come are copied all the same
            logger.exception("what an earlier agent left is not copied")
            return True

    def _take_up(self, table: HostTable) -> bool:
        storage = LocalStorage(self._root)
        is_all = True
        found = []
        for step in steps_in(storage):
            save = SaveName(step, "")
            try:
                if try_read_marker(storage, step) is None:
                    save = SaveName(step, read_manifest(storage, step_directory(step)).save_id)
            except (CheckpointIncomplete, ConfigError):
                pass
            except CheckpointError as error:
                if "errno" in error.fields:  # it could not be read, and may be whole
                    logger.warning("what an earlier agent left is looked for again: %s", error)
                    is_all = False
            found.append(save)
        self._completion_link.found(table.attempt_id, found)
        for save in found:
            if table.is_of_attempt(save.step, save.save_id) and save not in self._taken_up:
                self._taken_up.add(save)
                self.replicate(save.step, save.save_id)
        return is_all

    # --- repairs ----------------------------------------------------------------------------------

    def _carry_out_pushes(self) -> None:
        while (push := self._pushes.get()) is not None and not self._closing.is_set():
            try:
                self._push(push)
            except ResiliencyError as error:
                logger.warning("%s was not sent to %s: %s", push.source_host, push.target, error)
                self._emit(NotRepaired(push=push, why=str(error)))
            except Exception as error:  # the border of this thread: the next push may fare better
                logger.exception("a repair failed")
                self._emit(NotRepaired(push=push, why=f"{type(error).__name__}: {error}"))
            else:
                self._emit(Repaired(push=push))

    def _push(self, push: Push) -> None:
        is_own = push.source_host == directory_name(self._host)
        usual = self._root if is_own else self._root / REPLICAS / push.source_host
        source: CopySource | None = None
        pause_s = self._timeouts.next_pause_s(0.0)
        with ExitStack() as opened:
            for number in range(1, _REPAIR_ROUNDS + 1):
                table = self._table
                target = table.peer(push.target) if table is not None else None
                if table is None or target is None:
                    raise PeerError(f"{push.target!r} is no host of the attempt.", host=push.target)
                try:
                    if source is None:
                        source = CopySource(push.root or usual, push.step, push.save_id)
                        opened.push(source)
                    self._sender.send(source, push.source_host, table, target)
                    return
                except (PeerError, SourceUnavailable) as error:
                    if number == _REPAIR_ROUNDS:
                        raise
                    pause_s = self._timeouts.next_pause_s(pause_s)
                    logger.info("%s is sent to %s again: %s", push.source_host, push.target, error)
                    if self._closing.wait(pause_s):
                        raise

    # --- completion -------------------------------------------------------------------------------

    def _completed(self, save: SaveName, retire_below: int | None) -> None:
        """In the thread of the roll call."""
        logger.info("step %d is complete on all hosts", save.step)
        self._reported_behind.clear()
        self._emit(Complete(step=save.step, save_id=save.save_id, retire_below=retire_below))
        if retire_below is not None:
            self._try_tidy(lambda: self._retire(save, retire_below))

    def _retire(self, newest: SaveName, below: int) -> None:
        own = LocalStorage(self._root)
        for source_host, gone in retire_replicas(self._store, own, newest, below=below):
            if gone:
                logger.info("deleted replicas of %s: %s", source_host, gone)
            if self._closing.is_set():
                return

    def _gave_up(self, save: SaveName, behind: tuple[str, ...]) -> None:
        """In the thread of the roll call."""
        self._copy_queue.remove(save)
        why = "its leader says so"
        if behind:
            why = f"{', '.join(behind)} has no part of it, or no copies; the log of the agent there says why"
        is_news = bool(behind) and behind not in self._reported_behind
        self._reported_behind.add(behind)
        logger.log(
            logging.WARNING if is_news else logging.INFO,
            "step %d is given up and deleted on all hosts, as %d newer ones are not complete either: %s",
            *(save.step, MOST_INCOMPLETE, why),
        )
        self._given_up = [*self._given_up, save][-_GIVEN_UP:]
        self._emit(GivenUp(step=save.step, save_id=save.save_id, behind=behind))
        saves = tuple(self._given_up)
        self._try_tidy(lambda: self._delete_replicas_of(saves))

    def _delete_replicas_of(self, saves: Sequence[SaveName]) -> None:
        for source_host in self._store.source_hosts():
            gone = self._store.give_up(source_host, {save.step: save.save_id for save in saves})
            if gone:
                logger.info("deleted replicas of %s, which are given up: %s", source_host, gone)
            if self._closing.is_set():
                return

    def _try_tidy(self, work: Callable[[], None]) -> None:
        def run() -> None:
            if self._closing.is_set():
                return
            began = time.monotonic()
            try:
                work()
            except ResiliencyError as error:
                logger.warning("tidying up replicas: %s", error)
            except Exception:  # the border of this thread
                logger.exception("tidying up replicas")
            logger.debug("tidied up in %.2f s", time.monotonic() - began)

        self._tidy.submit(run)

    def _emit(self, event: PeerEvent) -> None:
        with self._event_lock:
            try:
                self._on_event(event)
            except Exception:  # the caller's border
                logger.exception("the receiver of %s failed", event)
