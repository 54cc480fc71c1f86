# SPDX-License-Identifier: Apache-2.0
"""Carries seals to the leader and completions back: one thread per host, whatever the number of hosts.

On the leader it serves the links of all others; elsewhere it keeps one link to the leader, and
makes a new one whenever that breaks or falls silent.  Both sides send beats, so a host that vanished
and one whose agent is stopped are noticed alike, and hold up nobody but themselves.
"""

from __future__ import annotations

import logging
import os
import queue
import selectors
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from resiliency.checkpoint.peers.completion import Ledger, SaveName, Tally
from resiliency.checkpoint.peers.frames import Link, Links, Patience
from resiliency.checkpoint.peers.handshake import connect
from resiliency.checkpoint.peers.messages import Beat, Complete, Join, Message, Refused, Sealed
from resiliency.checkpoint.peers.table import PeerTable
from resiliency.errors import PeerError

logger = logging.getLogger(__name__)

#: A leader that was not reached for so long is warned of: agents of one start come within seconds.
_WARN_S = 30.0


class RollCall:
    """One host's part in finding out which saves are complete.

    Args:
        on_complete: called from its thread with each save that has become complete, and the step
            below which this host may retire what it has, if any.
    """

    def __init__(
        self, host: str, on_complete: Callable[[SaveName, int | None], None], patience: Patience
    ) -> None:
        self._host = host
        self._on_complete = on_complete
        self._patience = patience
        self._tasks: queue.SimpleQueue[PeerTable | SaveName | Link] = queue.SimpleQueue()
        self._table: PeerTable | None = None
        self._ledger = Ledger()
        self._tally: Tally | None = None
        self._links = Links()
        #: Open links, and when each was heard last.
        self._heard: dict[Link, float] = {}
        self._leader: Link | None = None
        self._beat_at = 0.0
        self._dial_at = 0.0
        self._pause_s = 0.0
        #: Since when the leader has not been reached, and when to warn of it next.
        self._lost_at = self._warn_at = 0.0
        self._warn_s = min(_WARN_S, patience.silence.total_seconds())
        self._leads = False
        self._closing = False
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        #: Held to write to the pipe or close it: its number may soon be another file's.
        self._pipe = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="resiliency-peer-roll", daemon=True)
        self._thread.start()

    def update(self, table: PeerTable) -> None:
        """Whose seals count from now on.  Does not wait."""
        self._leads = table.leader == self._host
        self._tell(table)

    def seal(self, save: SaveName) -> None:
        """This host has committed `save`, and its copies are verified.  Does not wait."""
        self._tell(save)

    def join(self, link: Link) -> bool:
        """Take over the link of a host that wants to seal; False if this host does not lead."""
        if self._leads and not self._closing:
            self._tell(link)
            return True
        return False

    def close(self, timeout: timedelta = timedelta(seconds=10)) -> None:
        """Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._links.cut_all()
        self._wake()
        self._thread.join(timeout.total_seconds())

    def _tell(self, task: PeerTable | SaveName | Link) -> None:
        self._tasks.put(task)
        self._wake()

    def _wake(self) -> None:
        with self._pipe, suppress(BlockingIOError):  # full: it will wake
            if self._wake_out >= 0:
                os.write(self._wake_out, b"w")

    # --- everything below runs in the thread ---------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                try:
                    for key, _ in self._selector.select(self._until_next()):
                        self._handle(key.fileobj)
                    self._keep_up()
                except Exception:  # the border of this thread: without it no save becomes complete any more
                    logger.exception("the exchange about complete saves failed, and begins anew")
                    self._hang_up()
                    self._later()
                    threading.Event().wait(self._pause_s)
        finally:
            self._hang_up()
            self._selector.close()
            with self._pipe:
                os.close(self._wake_out)
                self._wake_out = -1
            os.close(self._wake_in)
            while not self._tasks.empty():
                task = self._tasks.get()
                if isinstance(task, Link):
                    task.close()

    def _handle(self, source: object) -> None:
        if isinstance(source, Link):
            if source in self._heard:
                self._listen(source)
            return
        os.read(self._wake_in, 4096)
        while not self._tasks.empty():
            task = self._tasks.get()
            if isinstance(task, PeerTable):
                self._begin(task)
            elif isinstance(task, SaveName):
                self._seal(task)
            else:
                self._welcome(task)

    def _begin(self, table: PeerTable) -> None:
        if table == self._table:
            return
        if self._table is None or table.session != self._table.session:
            self._ledger = Ledger(keep=table.keep)
        self._table = table
        self._hang_up()
        leads = table.leader == self._host
        hosts = [peer.host for peer in table.peers]
        self._tally = Tally(hosts, complete=list(self._ledger.complete)) if leads else None
        self._dial_at = self._pause_s = 0.0
        self._begin_to_miss()
        for save in self._ledger.to_say():
            self._count(self._host, save)

    def _seal(self, save: SaveName) -> None:
        if self._table is None or not self._table.is_of_session(save.step, save.save_id):
            return  # of a session that has ended meanwhile: its hosts may have been others
        self._ledger.seal(save)
        if self._tally is not None:
            self._count(self._host, save)
        elif self._leader is not None:
            self._say(self._leader, Sealed(step=save.step, save_id=save.save_id))

    def _welcome(self, link: Link) -> None:
        """A host has joined: what it seals will be counted, and it hears of all that it may have missed."""
        if self._tally is None:
            link.close()  # the table has changed meanwhile; it tries again
            return
        self._add(link)
        for save in self._tally.complete:
            self._say(link, _complete(save))

    def _listen(self, link: Link) -> None:
        try:
            for message in link.receive_ready():
                self._heard[link] = time.monotonic()
                self._answer(link, message)
        except PeerError as error:
            logger.info("%s", error)
            self._drop(link)

    def _answer(self, link: Link, message: Message) -> None:
        if isinstance(message, Beat):
            return
        if isinstance(message, Sealed | Complete) and not self._is_current(message):
            logger.info("%s speaks of step %d of another session", link.host, message.step)
        elif isinstance(message, Sealed) and self._tally is not None:
            self._count(link.host, SaveName(message.step, message.save_id), link)
        elif isinstance(message, Complete) and (link is self._leader or self._tally is not None):
            self._hear_complete(SaveName(message.step, message.save_id), link)
        elif isinstance(message, Refused):
            raise PeerError(f"{link.host} refused ({message.why}): {message.text}.", host=link.host)
        else:
            raise PeerError(f"{link.host} said {message.kind} about completion.", host=link.host)

    def _is_current(self, message: Sealed | Complete) -> bool:
        return self._table is not None and self._table.is_of_session(message.step, message.save_id)

    def _count(self, host: str, save: SaveName, link: Link | None = None) -> None:
        if self._tally is None:
            return
        before = self._tally.newest
        answer = self._tally.seal(host, save)
        if answer is None:
            return
        if answer != before:
            for other in list(self._heard):
                self._say(other, _complete(answer))
            self._completed(answer)
        elif link is not None:
            self._say(link, _complete(answer))

    def _hear_complete(self, save: SaveName, link: Link) -> None:
        """From the leader; or, on a leader that may have been started anew, from a host that knew before."""
        if self._tally is not None and self._tally.completed(save):
            for other in list(self._heard):
                if other is not link:
                    self._say(other, _complete(save))
        self._completed(save)

    def _completed(self, save: SaveName) -> None:
        if self._ledger.completed(save):
            self._on_complete(save, self._ledger.retire_below)

    def _keep_up(self) -> None:
        """Beats, silence, and the link to the leader."""
        now = time.monotonic()
        if now >= self._beat_at:
            self._beat_at = now + self._patience.beat_s
            for link, heard in list(self._heard.items()):
                if now - heard > self._patience.silence.total_seconds():
                    logger.warning("%s has been silent for %.0f s", link.host, now - heard)
                    self._drop(link)
                else:
                    self._say(link, Beat())
        table = self._table
        if table is not None and self._tally is None and self._leader is None and now >= self._dial_at:
            self._dial(table)

    def _dial(self, table: PeerTable) -> None:
        leader = table.peer(table.leader)
        assert leader is not None, "the table names its leader among the peers"
        try:
            link = connect(table, self._host, leader, self._patience, self._links)
        except PeerError as error:
            self._tell_of_failure(error)
            self._later()
            return
        if self._warn_at > self._lost_at + self._warn_s:
            logger.warning("the leader %s is reached again", leader.host)
        self._add(link)
        self._leader = link
        self._say(link, Join())
        for save in self._ledger.complete:
            self._say(link, _complete(save))
        for save in self._ledger.to_say():
            self._say(link, Sealed(step=save.step, save_id=save.save_id))

    def _begin_to_miss(self) -> None:
        self._lost_at = time.monotonic()
        self._warn_at = self._lost_at + self._warn_s

    def _tell_of_failure(self, error: PeerError) -> None:
        now = time.monotonic()
        if now < self._warn_at:
            logger.info("%s", error)
            return
        self._warn_at = now + 2 * (now - self._lost_at)  # after 30 s, 90 s, ...
        logger.warning(
            "no step becomes complete, and older ones stay: the leader has not been reached for %.0f s: %s"
            "  Is its address right?  RESILIENCY_PEER_ADDRESS on its host sets it",
            *(now - self._lost_at, error),
        )

    def _until_next(self) -> float:
        dials = self._table is not None and self._tally is None and self._leader is None
        at = min(self._beat_at, self._dial_at) if dials else self._beat_at
        return max(at - time.monotonic(), 0.0)

    def _later(self) -> None:
        longest = self._patience.longest_pause.total_seconds()
        self._pause_s = min(max(2 * self._pause_s, self._patience.pause.total_seconds()), longest)
        self._dial_at = time.monotonic() + self._pause_s

    def _add(self, link: Link) -> None:
        self._links.add(link)  # of one that we made, known already
        self._heard[link] = time.monotonic()
        self._selector.register(link, selectors.EVENT_READ)

    def _say(self, link: Link, message: Message) -> None:
        if link in self._heard and not link.try_send(message):
            logger.info("%s takes no messages", link.host)
            self._drop(link)

    def _drop(self, link: Link) -> None:
        if self._heard.pop(link, None) is None:
            return
        self._selector.unregister(link)
        self._links.drop(link)
        if link is self._leader:
            self._leader = None
            self._begin_to_miss()
            self._later()

    def _hang_up(self) -> None:
        for link in list(self._heard):
            self._drop(link)


def _complete(save: SaveName) -> Complete:
    return Complete(step=save.step, save_id=save.save_id)
