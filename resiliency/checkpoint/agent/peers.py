# SPDX-License-Identifier: Apache-2.0
"""The agent's side of the peer plane: what this host has committed, and what that means to the job.

A step that is committed here goes to other hosts; when all hosts have theirs committed and copied, it
is complete, and older generations may go.  As long as that is not known nothing goes, except what the
hosts have given up together: should the disk fill up, saves fail and say so.  A host that is alone in its
job talks to nobody and opens no port.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from resiliency.checkpoint.agent.jobs import GiveUpJob, RetireJob
from resiliency.checkpoint.agent.protocol import Attach, Copies, Repair, RepairDone
from resiliency.checkpoint.capture.arena import rank_directory
from resiliency.checkpoint.names import attempt_id_of, save_id_of
from resiliency.checkpoint.replication.completion import REMEMBERED
from resiliency.checkpoint.replication.hosts import HostTable
from resiliency.checkpoint.replication.repairs import Push
from resiliency.checkpoint.replication.service import (
    Complete,
    GivenUp,
    NotRepaired,
    NotReplicated,
    PeerEvent,
    PeerService,
    Repaired,
    Replicated,
)
from resiliency.checkpoint.storage.posix import SHORTAGES
from resiliency.errors import ConfigError, ResiliencyError

logger = logging.getLogger(__name__)

#: Complete generations that are remembered; more than any tier keeps.
_REMEMBERED = 64
#: Given-up saves whose generations are looked for again with each that follows: a removal may have failed.
_GIVEN_UP = 16


def table_path(arena: Path, first_rank: int) -> Path:
    """Where the first rank of a host leaves the table of peers for its agent, and for that one's successor.

    It goes with the rank's slots when the job has ended well.
    """
    return rank_directory(arena, first_rank) / "peers.json"


@dataclass(frozen=True, kw_only=True)
class _Abandoned:
    """A save of an attempt never becomes complete."""

    step: int
    attempt_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked(Push):
    """A repair, and the attempt that asked for it: another one may have begun before it ends."""

    attempt_id: str


class Replication:
    """Copies and completeness of one host's local tier; used by the agent's main thread.

    Args:
        arena: of the job.
        wake: called from other threads when `take_events` has something new.
    """

    def __init__(self, arena: Path, wake: Callable[[], None]) -> None:
        self._arena = arena
        self._wake = wake
        self._events: queue.SimpleQueue[Copies | RepairDone | _Abandoned] = queue.SimpleQueue()
        self._service: PeerService | None = None
        self._serves = ("", "")
        self._attach: Attach | None = None
        #: A table that could not be read for want of descriptors or memory.
        self._unread: Path | None = None
        #: Of this attempt: the newest step that is committed here, and whether its fate is known.
        self._newest = -1
        self._is_open = False
        self._complete: dict[int, str] = {}
        self._given_up: dict[int, str] = {}

    @property
    def port(self) -> int:
        """Where the agents of other hosts reach this one; 0 if they do not."""
        return 0 if self._service is None else self._service.port

    def begin_attempt(self, attach: Attach) -> None:
        """Another start of the job, or another agent of the same one, which then goes on."""
        self._attach, self._newest, self._is_open = attach, -1, False
        self._complete, self._given_up, self._unread = {}, {}, None
        if not attach.settings.local_directory or attach.is_alone:
            self._stop()
            return
        table = self._table_of(attach)
        if self._service is None or self._serves != (attach.host, attach.settings.local_directory):
            self._stop()
            self._start(attach, table)
        if table is not None:
            self._take(table)

    def introduced(self, attach: Attach) -> None:
        """A rank of the attempt said who it is, perhaps anew."""
        self._attach = attach
        if self._service is not None:
            self._service.spare(attach.restored_step)

    def learn(self, path: Path) -> None:
        """The ranks have made a table of the agents of all hosts."""
        is_reported, self._unread = self._unread == path, None
        try:
            table = HostTable.read(path)
        except ConfigError as error:
            self._note_unread(path, error)
            if not is_reported:
                now = " for now" if self._unread else ""
                logger.error("nothing is copied to other hosts%s: %s", now, error)
            return
        if self._attach is not None and table.attempt_id == self._attach.attempt_id:
            self._take(table)

    def look_again(self) -> None:
        """Read the table if it could not be read when it was due."""
        if self._unread is not None:
            self.learn(self._unread)

    def committed(self, step: int) -> None:
        """This attempt has committed `step` here."""
        if self._attach is None or step < self._newest:
            return
        self._newest = step
        if step in self._complete:  # it was taken up already, from an agent before this one
            return
        if self._attach.is_alone:
            self._put(Copies(step=step, attempt_id=self._attach.attempt_id, complete=True))
        elif self._service is not None:
            self._is_open = True
            self._service.replicate(step, save_id_of(self._attach.attempt_id, step))

    def failed(self, step: int) -> None:
        """This attempt's save of `step` failed here: other hosts may not be able to count on it."""
        if self._attach is not None and self._service is not None:
            self._service.lose(step, save_id_of(self._attach.attempt_id, step))

    def repair(self, repair: Repair) -> None:
        """Another host lacks a copy that this one has.

        How it ends is told.  An agent that was lost may have done it: the other host then says that it
        has the copy.
        """
        if self._attach is None:
            return
        if self._service is None:
            why = "this agent and those of other hosts do not reach each other."
            self._put(RepairDone(attempt_id=self._attach.attempt_id, repair=repair, error=why))
            return
        push = _Asked(
            attempt_id=self._attach.attempt_id,
            holder=self._attach.host,
            source_host=repair.source_host,
            step=repair.step,
            save_id=repair.save_id,
            target=repair.target,
            root=repair.root,
        )
        self._service.repair([push])

    def take_events(self) -> list[Copies | RepairDone | RetireJob | GiveUpJob]:
        """What happened since: for the ranks to know, and for the worker to delete."""
        found: list[Copies | RepairDone | RetireJob | GiveUpJob] = []
        while True:
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                return found
            if self._attach is None or event.attempt_id != self._attach.attempt_id:
                continue
            if isinstance(event, RepairDone):
                found.append(event)
            elif isinstance(event, Copies):
                found += self._act_on(event, self._attach)
            else:
                found.append(self._delete(event, self._attach))

    @property
    def complete(self) -> list[Copies]:
        """The news of the last complete steps, oldest first, for a rank that may have missed them."""
        if self._attach is None:
            return []
        attempt_id, steps = self._attach.attempt_id, sorted(self._complete)[-REMEMBERED:]
        return [Copies(step=step, attempt_id=attempt_id, complete=True) for step in steps]

    @property
    def is_settled(self) -> bool:
        """Whether the newest step has got what it will get."""
        return not self._is_open

    def lift_bandwidth_cap(self) -> None:
        """This host is about to go: without the bandwidth cap from here on."""
        if self._service is not None:
            self._service.lift_bandwidth_cap()

    def close(self) -> None:
        self._stop()

    def _act_on(self, event: Copies, attach: Attach) -> list[Copies | RetireJob]:
        if event.complete and event.step >= self._newest:
            self._is_open = False
        if not event.complete:
            return [event]
        self._complete[event.step] = save_id_of(attach.attempt_id, event.step)
        while len(self._complete) > _REMEMBERED:
            del self._complete[min(self._complete)]
        job = RetireJob(
            settings=attach.settings,
            run_id=attach.run_id,
            complete=dict(self._complete),
            alone=attach.is_alone,
            restored_step=attach.restored_step,
        )
        return [event, job]

    def _delete(self, event: _Abandoned, attach: Attach) -> GiveUpJob:
        self._given_up[event.step] = save_id_of(attach.attempt_id, event.step)
        while len(self._given_up) > _GIVEN_UP:
            del self._given_up[min(self._given_up)]
        return GiveUpJob(settings=attach.settings, saves=dict(self._given_up))

    def _put(self, event: Copies | RepairDone | _Abandoned) -> None:
        """In any thread."""
        self._events.put(event)
        self._wake()

    def _hear(self, event: PeerEvent) -> None:
        """In a thread of the service."""
        if isinstance(event, Repaired):
            self._repaired(event.push)
        elif isinstance(event, NotRepaired):
            self._repaired(event.push, event.why)
        elif isinstance(event, GivenUp):
            self._put(_Abandoned(step=event.step, attempt_id=attempt_id_of(event.save_id, event.step)))
        elif isinstance(event, Complete | NotReplicated | Replicated):
            news = Copies(step=event.step, attempt_id=attempt_id_of(event.save_id, event.step))
            if isinstance(event, Replicated):
                news = replace(news, hosts=event.hosts)
            elif isinstance(event, NotReplicated):
                news = replace(news, error=event.why)
            else:
                news = replace(news, complete=True)
            self._put(news)

    def _repaired(self, push: Push, error: str = "") -> None:
        assert isinstance(push, _Asked), "nobody else asks for repairs"
        repair = Repair(
            step=push.step,
            save_id=push.save_id,
            source_host=push.source_host,
            root=push.root,
            target=push.target,
        )
        self._put(RepairDone(attempt_id=push.attempt_id, repair=repair, error=error))

    def _table_of(self, attach: Attach) -> HostTable | None:
        """The table that this attempt's ranks left for an agent before this one."""
        path = table_path(self._arena, min(attach.local_ranks))
        if not path.exists():
            return None
        try:
            table = HostTable.read(path)
        except ConfigError as error:
            self._note_unread(path, error)
            logger.warning("%s", error)
            return None
        return table if table.attempt_id == attach.attempt_id else None

    def _note_unread(self, path: Path, error: ConfigError) -> None:
        if error.fields.get("errno") in SHORTAGES:
            self._unread = path

    def _start(self, attach: Attach, table: HostTable | None) -> None:
        mine = None if table is None else table.peer(attach.host)
        try:
            # The others know the port of the agent before this one.
            self._service = PeerService(
                attach.host,
                Path(attach.settings.local_directory),
                listen_address=attach.peer_address,
                listen_port=0 if mine is None else mine.port,
                on_event=self._hear,
            )
        except ResiliencyError as error:
            logger.error("no copies from or to other hosts: %s", error)
            return
        self._serves = (attach.host, attach.settings.local_directory)

    def _take(self, table: HostTable) -> None:
        if self._service is None:
            return
        try:
            self._service.update(table)
        except ConfigError as error:
            logger.error("nothing is copied to other hosts: %s", error)

    def _stop(self) -> None:
        service, self._service = self._service, None
        if service is not None:
            service.close()
