# SPDX-License-Identifier: Apache-2.0
"""Carries acknowledgements to the leader, and back what is complete or given up: one thread per host.

On the leader it serves the links of all others; elsewhere it keeps one link to the leader, and
makes a new one whenever that breaks or falls silent.  Both sides send beats, so a host that vanished
and one whose agent is stopped are noticed alike, and hold up nobody but themselves.
"""

from __future__ import annotations

import logging
import queue
import selectors
import threading
from collections.abc import Callable, Collection
from datetime import timedelta
from functools import partial

from resiliency.checkpoint.replication.completion import HostState, LeaderState, SaveName
from resiliency.checkpoint.replication.hosts import HostTable
from resiliency.checkpoint.replication.transport.connection import CallDeadline, Link, Links
from resiliency.checkpoint.replication.transport.handshake import connect
from resiliency.checkpoint.replication.transport.messages import (
    Acknowledged,
    CompleteMessage,
    ConnectionRefused,
    GivenUpMessage,
    Join,
    Lost,
    Message,
    PeerHeartbeat,
)
from resiliency.checkpoint.threads import start_thread
from resiliency.errors import PeerError
from resiliency.runtime import awake_s
from resiliency.wake_pipe import WakePipe

logger = logging.getLogger(__name__)

#: A leader that was not reached for so long is warned of: agents of one start come within seconds.
_WARN_S = 30.0
#: Names of hosts in a message; there may be thousands.
_NAMED = 8


class CompletionLink:
    """One host's part in finding out which saves are complete.

    Args:
        on_complete: called from its thread with each save that has become complete, and the step
            below which this host may retire what it has, if any.
        on_given_up: the same with each save that never becomes complete, and the hosts that kept it waiting:
            this host deletes its part.  Told again for one that this host acknowledges all the same.
    """

    def __init__(
        self,
        host: str,
        on_complete: Callable[[SaveName, int | None], None],
        on_given_up: Callable[[SaveName, tuple[str, ...]], None],
        timeouts: CallDeadline,
    ) -> None:
        self._host = host
        self._on_complete = on_complete
        self._on_given_up = on_given_up
        self._timeouts = timeouts
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        #: What this host had when the attempt began, if it has led since then: see `LeaderState.before`.
        self._before: frozenset[SaveName] | None = None
        self._led_from_the_start = False
        self._table: HostTable | None = None
        self._host_state = HostState()
        self._leader_state: LeaderState | None = None
        self._links = Links()
        #: Open links, and when each was heard last.
        self._heard: dict[Link, float] = {}
        self._leader: Link | None = None
        self._heartbeat_at = 0.0
        self._dial_at = 0.0
        self._pause_s = 0.0
        #: Since when the leader has not been reached, and when to warn of it next.
        self._lost_at = self._warn_at = 0.0
        self._warn_s = min(_WARN_S, timeouts.silence.total_seconds())
        self._leads = False
        self._closing = False
        self._selector = selectors.DefaultSelector()
        self._news = WakePipe()
        self._selector.register(self._news, selectors.EVENT_READ)
        #: Held to write to the pipe or close it: its number may soon be another file's.
        self._pipe = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="resiliency-peer-roll", daemon=True)
        try:
            start_thread(self._thread)
        except BaseException:
            self._selector.close()
            self._news.close()
            raise

    def update(self, table: HostTable) -> None:
        """Whose acknowledgements count from now on.  Does not wait."""
        self._leads = table.leader == self._host
        self._tell(partial(self._begin, table))

    def acknowledge(self, save: SaveName) -> None:
        """This host has committed `save`, and its copies are verified.  Does not wait."""
        self._tell(partial(self._acknowledge, save))

    def hold(self, save: SaveName) -> None:
        """This host has committed `save`, and makes its copies.  Does not wait."""
        self._tell(partial(self._hold, save))

    def lose(self, save: SaveName) -> None:
        """This host has no part of `save`, or gave up its copies.  Does not wait."""
        self._tell(partial(self._lose, save))

    def found(self, attempt_id: str, saves: Collection[SaveName]) -> None:
        """What this host had before it committed anything for `attempt_id`; some of that may be among it.

        Only the first time in an attempt counts.  Without a save id: what could not be read.
        """
        self._tell(partial(self._note_found, attempt_id, frozenset(saves)))

    def join(self, link: Link) -> bool:
        """Take over the link of a host that wants to acknowledge saves; False if this host does not lead."""
        if self._leads and not self._closing:
            self._tell(partial(self._welcome, link))
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

    def _tell(self, task: Callable[[], None]) -> None:
        self._tasks.put(task)
        self._wake()

    def _wake(self) -> None:
        with self._pipe:
            self._news.wake()

    # --- everything below runs in the thread ---------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                try:
                    for key, _ in self._selector.select(self._until_next()):
                        self._handle(key.fileobj)
                    self._keep_up()
                except Exception:  # the border of this thread: without it no save becomes complete any more
                    logger.exception("completion link failed; connecting again")
                    self._hang_up()
                    self._later()
                    threading.Event().wait(self._pause_s)
                    self._wake()  # for the tasks behind one that failed
        finally:
            self._hang_up()
            self._selector.close()
            with self._pipe:
                self._news.close()
            self._table = self._leader_state = None
            self._carry_out()  # of what is left this closes the links of hosts that joined

    def _handle(self, source: object) -> None:
        if isinstance(source, Link):
            if source in self._heard:
                self._listen(source)
            return
        self._news.clear()
        self._carry_out()

    def _carry_out(self) -> None:
        while not self._tasks.empty():
            self._tasks.get()()

    def _begin(self, table: HostTable) -> None:
        if table == self._table or self._closing:
            return
        leads = table.leader == self._host
        if self._table is None or table.attempt_id != self._table.attempt_id:
            self._host_state = HostState(keep=table.keep)
            self._before, self._led_from_the_start = None, leads
        self._led_from_the_start &= leads
        if not leads:  # another one finds saves complete meanwhile
            self._before = None
        self._table = table
        self._hang_up()
        hosts = [peer.host for peer in table.peers]
        self._leader_state = None
        if leads:
            host_state = self._host_state
            self._leader_state = LeaderState(
                hosts, list(host_state.complete), list(host_state.given_up), self._before
            )
        self._dial_at = self._pause_s = 0.0
        self._begin_to_miss()
        for save in self._host_state.to_say():
            self._count(self._host, save)
        for save in self._host_state.lost_to_say():
            self._count_lost(self._host, save)

    def _acknowledge(self, save: SaveName) -> None:
        if self._table is None or not self._table.is_of_attempt(save.step, save.save_id):
            return  # of an attempt that has ended meanwhile: its hosts may have been others
        if not self._host_state.acknowledge(save):
            self._on_given_up(save, ())  # it was on its way to the disk when it was given up
        elif self._leader_state is not None:
            self._count(self._host, save)
        elif self._leader is not None:
            self._say(self._leader, Acknowledged(step=save.step, save_id=save.save_id))

    def _hold(self, save: SaveName) -> None:
        if self._table is None or not self._table.is_of_attempt(save.step, save.save_id):
            return
        if save in self._host_state.given_up:
            self._on_given_up(save, ())
        elif self._leader_state is not None:
            self._leader_state.hold(save)
            self._give_up_what_is_too_much()

    def _lose(self, save: SaveName) -> None:
        if self._table is None or not self._table.is_of_attempt(save.step, save.save_id):
            return
        if not self._host_state.lose(save):
            return
        if self._leader_state is not None:
            self._count_lost(self._host, save)
        elif self._leader is not None:
            self._say(self._leader, Lost(step=save.step, save_id=save.save_id))

    def _note_found(self, attempt_id: str, saves: frozenset[SaveName]) -> None:
        # A host that took the lead later does not know what the one before it had counted.
        if self._table is None or attempt_id != self._table.attempt_id or not self._led_from_the_start:
            return
        if self._before is not None:  # a later look also finds what was saved since
            return
        self._before = saves
        if self._leader_state is not None:
            self._leader_state.before = saves
            self._give_up_what_is_too_much()

    def _welcome(self, link: Link) -> None:
        """A host has joined: what it acknowledges will be counted, and it hears of all that it missed."""
        if self._leader_state is None:
            link.close()  # the table has changed meanwhile; it tries again
            return
        self._add(link)
        for save in self._leader_state.complete:
            self._say(link, _complete(save))
        for save in self._leader_state.given_up:
            self._say(link, GivenUpMessage(step=save.step, save_id=save.save_id))

    def _listen(self, link: Link) -> None:
        try:
            messages = link.receive_ready()
            self._heard[link] = awake_s()  # first: an answer that cannot be sent drops the link
            for message in messages:
                self._answer(link, message)
        except PeerError as error:
            logger.info("%s", error)
            self._drop(link)

    def _answer(self, link: Link, message: Message) -> None:
        if isinstance(message, PeerHeartbeat):
            return
        if isinstance(
            message, Acknowledged | Lost | CompleteMessage | GivenUpMessage
        ) and not self._is_current(message):
            logger.info("%s speaks of step %d of another attempt", link.host, message.step)
        elif isinstance(message, Acknowledged) and self._leader_state is not None:
            self._count(link.host, SaveName(message.step, message.save_id), link)
        elif isinstance(message, Lost) and self._leader_state is not None:
            self._count_lost(link.host, SaveName(message.step, message.save_id))
        elif isinstance(message, CompleteMessage) and (
            link is self._leader or self._leader_state is not None
        ):
            self._hear_complete(SaveName(message.step, message.save_id), link)
        elif isinstance(message, GivenUpMessage) and (link is self._leader or self._leader_state is not None):
            self._hear_given_up(SaveName(message.step, message.save_id), message.behind, link)
        elif isinstance(message, ConnectionRefused):
            raise PeerError(f"{link.host} refused ({message.why}): {message.text}.", host=link.host)
        else:
            raise PeerError(f"{link.host} said {message.kind} about completion.", host=link.host)

    def _is_current(self, message: Acknowledged | Lost | CompleteMessage | GivenUpMessage) -> bool:
        return self._table is not None and self._table.is_of_attempt(message.step, message.save_id)

    def _count(self, host: str, save: SaveName, link: Link | None = None) -> None:
        if self._leader_state is None:
            return
        before = self._leader_state.newest
        answer = self._leader_state.acknowledge(host, save)
        if answer is None:
            if link is not None and save in self._leader_state.given_up:
                self._say(link, GivenUpMessage(step=save.step, save_id=save.save_id))
            self._give_up_what_is_too_much()
            return
        if answer != before:
            for other in list(self._heard):
                self._say(other, _complete(answer))
            self._completed(answer)
        elif link is not None:
            self._say(link, _complete(answer))

    def _count_lost(self, host: str, save: SaveName) -> None:
        if self._leader_state is not None:
            self._leader_state.lose(host, save, is_own=host == self._host)
            self._give_up_what_is_too_much()

    def _give_up_what_is_too_much(self) -> None:
        """On the leader."""
        assert self._leader_state is not None, "the leader counts"
        for save, hosts in self._leader_state.give_up():
            behind = tuple(hosts[:_NAMED])
            for other in list(self._heard):
                self._say(other, GivenUpMessage(step=save.step, save_id=save.save_id, behind=behind))
            self._give_up(save, behind)

    def _hear_given_up(self, save: SaveName, behind: tuple[str, ...], link: Link) -> None:
        """From the leader; or, on a leader that may have been started anew, from a host that knew before."""
        if self._leader_state is not None and self._leader_state.gave_up(save):
            for other in list(self._heard):
                if other is not link:
                    self._say(other, GivenUpMessage(step=save.step, save_id=save.save_id))
        self._give_up(save, behind)

    def _give_up(self, save: SaveName, behind: tuple[str, ...]) -> None:
        # From here on this host does not acknowledge it; only then does it delete its part.
        if self._host_state.give_up(save):
            self._on_given_up(save, behind)

    def _hear_complete(self, save: SaveName, link: Link) -> None:
        """From the leader; or, on a leader that may have been started anew, from a host that knew before."""
        if self._leader_state is not None and self._leader_state.completed(save):
            for other in list(self._heard):
                if other is not link:
                    self._say(other, _complete(save))
        self._completed(save)

    def _completed(self, save: SaveName) -> None:
        if self._host_state.completed(save):
            self._on_complete(save, self._host_state.retire_below)

    def _keep_up(self) -> None:
        """Beats, silence, and the link to the leader."""
        now = awake_s()
        if now >= self._heartbeat_at:
            self._heartbeat_at = now + self._timeouts.heartbeat_s
            for link, heard in list(self._heard.items()):
                if now - heard > self._timeouts.silence.total_seconds():
                    logger.warning("%s has been silent for %.0f s", link.host, now - heard)
                    self._drop(link)
                else:
                    self._say(link, PeerHeartbeat())
        table = self._table
        if table is not None and self._leader_state is None and self._leader is None and now >= self._dial_at:
            self._dial(table)

    def _dial(self, table: HostTable) -> None:
        leader = table.peer(table.leader)
        assert leader is not None, "the table names its leader among the peers"
        try:
            link = connect(table, self._host, leader, self._timeouts, self._links)
        except PeerError as error:
            self._tell_of_failure(error)
            self._later()
            return
        if self._warn_at > self._lost_at + self._warn_s:
            logger.warning("the leader %s is reached again", leader.host)
        self._add(link)
        self._leader = link
        self._say(link, Join())
        for save in self._host_state.complete:
            self._say(link, _complete(save))
        for save in self._host_state.given_up:
            self._say(link, GivenUpMessage(step=save.step, save_id=save.save_id))
        for save in self._host_state.to_say():
            self._say(link, Acknowledged(step=save.step, save_id=save.save_id))
        for save in self._host_state.lost_to_say():
            self._say(link, Lost(step=save.step, save_id=save.save_id))

    def _begin_to_miss(self) -> None:
        self._lost_at = awake_s()
        self._warn_at = self._lost_at + self._warn_s

    def _tell_of_failure(self, error: PeerError) -> None:
        now = awake_s()
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
        dials = self._table is not None and self._leader_state is None and self._leader is None
        at = min(self._heartbeat_at, self._dial_at) if dials else self._heartbeat_at
        return max(at - awake_s(), 0.0)

    def _later(self) -> None:
        self._pause_s = self._timeouts.next_pause_s(self._pause_s)
        self._dial_at = awake_s() + self._pause_s

    def _add(self, link: Link) -> None:
        self._links.add(link)  # of one that we made, known already
        self._heard[link] = awake_s()
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


def _complete(save: SaveName) -> CompleteMessage:
    return CompleteMessage(step=save.step, save_id=save.save_id)
