# SPDX-License-Identifier: Apache-2.0
"""The checkpoint agent: one process per host and job that persists what its ranks captured.

It outlives trainers.  Ranks attach over a socket, name the slots that hold a step, and hear how the
save ended in each tier; the agent borrows the slots, commits, copies to other hosts, prunes and gives
the slots back.  It never touches a GPU and runs no training code.  What happens when a process dies:

* a rank dies: the newest step that all ranks of this host have whole in memory is committed,
  also if its save was never requested.  If a tier fails at that, or is found to hang, the other one gets it,
  where this host is the whole job.  Then the agent waits for the ranks to come back;
* all come back within the grace: they attach as a new attempt, with their captures still there;
* no rank does: the agent leaves, and takes the captures along if they are all committed;
* the agent dies: its locks vanish, its trainers notice, report the save as failed and start another;
* storage hangs: the save is reported as failed, later ones as skipped until it answers, and the agent
  leaves when it is time to, without the thread that waits (`resiliency.checkpoint.agent.tier_writers`).
"""

from __future__ import annotations

import logging
import queue
import selectors
import signal
import socket
from datetime import timedelta
from pathlib import Path
from threading import Event
from types import FrameType

from resiliency.checkpoint.agent.jobs import GiveUpJob, RetireJob, SaveJob
from resiliency.checkpoint.agent.output import AgentOutput
from resiliency.checkpoint.agent.peers import Replication
from resiliency.checkpoint.agent.protocol import (
    Attach,
    Attached,
    Channel,
    Detach,
    Done,
    Heartbeat,
    LiftBandwidthCap,
    Message,
    Peers,
    Repair,
    RequestRefused,
    SaveRequest,
    Skip,
    listen,
)
from resiliency.checkpoint.agent.save_collector import SaveCollector
from resiliency.checkpoint.capture.arena import ranks_in
from resiliency.checkpoint.capture.job_memory import hold_job, remove_when_dead
from resiliency.checkpoint.names import TierName, start_of
from resiliency.checkpoint.storage.throttle import Throttle
from resiliency.checkpoint.storage.watched import CallTimeouts
from resiliency.errors import ConfigError, PeerError
from resiliency.runtime import awake_s
from resiliency.wake_pipe import WakePipe

logger = logging.getLogger(__name__)

HEARTBEAT_S = 0.5
_SILENCE_S = 30.0
#: How long ranks may take to leave after the agent was asked to end.
_LAST_RANKS_S = 60.0
#: How long one call of the storage may take from then on, also if it was made before.
_LAST_CALL = timedelta(seconds=60)
#: How long a last step may take to get its copies when all ranks have left.
_LAST_COPIES_S = 60.0
_AT_ONCE = timedelta(0)
#: After a connection that could not be taken.
_ACCEPT_PAUSE_S = 0.2


class Agent:
    """Serves the ranks of one job on this host until they detach, or stay away for `grace`.

    Args:
        directory: arena of the job.
        listener: socket that listens at its address; the agent owns it.
        output: where it says things, if that is a trainer's.
    """

    def __init__(
        self,
        directory: Path,
        listener: socket.socket,
        *,
        grace: timedelta,
        output: AgentOutput | None = None,
    ) -> None:
        self._directory = directory
        self._job = hold_job(directory)
        self._listener = listener
        self._grace_s = grace.total_seconds()
        self._is_hosted = grace == timedelta.max  # by a launcher, which ends it
        self._output = output
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._news = WakePipe()
        self._selector.register(self._news, selectors.EVENT_READ)
        self._throttle = Throttle()
        self._results: queue.SimpleQueue[tuple[SaveJob, Done]] = queue.SimpleQueue()
        self._collector = SaveCollector(directory, self._job_done, self._throttle)
        self._replication = Replication(directory, self._news.wake)
        self._members: dict[Channel, Attach | None] = {}
        self._heard: dict[Channel, float] = {}
        self._last: Attach | None = None  # of the newest attempt
        self._said_detach: set[int] = set()
        self._deserted_at = awake_s()
        self._has_to_commit = False  # and could not, the last time it tried
        #: Steps, each with a tier that it did not get into: of what failed since an emergency commit began.
        self._gave_up: set[tuple[int, TierName]] = set()
        self._terminated = False
        self._leave_by: float | None = None  # once terminated: with ranks or without
        self._timeouts: CallTimeouts | None = None  # with calls of the storage, once terminated

    def run(self) -> None:
        """Serve until there is nothing left to serve."""
        heartbeat_at = awake_s()
        while not self._is_over():
            for key, _ in self._selector.select(timeout=min(HEARTBEAT_S, self._grace_s) / 2):
                self._handle(key.fileobj)
            if self._output is not None and self._is_deserted():
                self._output.left_alone()
            if awake_s() >= heartbeat_at:
                heartbeat_at = awake_s() + HEARTBEAT_S
                self._heartbeat()
                self._replace_removed()
                if self._leave_by is not None and awake_s() >= self._leave_by:
                    self._collector.stop_waiting()
                self._collector.look_for_hang(self._timeouts)
                self._collector.look_again()
                self._replication.look_again()
                if self._has_to_commit:
                    self._try_commit_emergency()
        logger.info("nothing left to do: the agent leaves")

    def install_signals(self) -> None:
        """SIGTERM: commit what is captured, at full speed, then leave.  SIGINT is the trainers'.

        Who ends a whole job ends its ranks too, and they may save a last step: the agent stays until
        they have left, a minute at most.
        """
        signal.set_wakeup_fd(self._news.wakeup_fd, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def close(self) -> None:
        """Give everything back; the captures go too if no rank needs them any more."""
        self._replication.close()
        self._collector.close(timedelta(seconds=30))
        for channel in list(self._members):
            channel.close()
        self._selector.close()
        removable = self._all_ranks_left() or self._collector.captures_are_spent()
        self._job.close()
        if removable:
            try:
                remove_when_dead(self._directory)
            except OSError as error:  # the next start of the job finds it
                logger.warning("memory of %s is not given back: %s", self._directory, error)
        # Last: once the address is free, a successor may start.
        self._listener.close()
        self._news.close()

    def _replace_removed(self) -> None:
        """Where something deleted the arena under the job, be found at the one that its ranks make again."""
        if self._job.is_current():
            return
        try:
            removed, self._job = self._job, hold_job(self._directory)
            removed.close()
            listener = listen(self._directory)
        except (ConfigError, OSError) as error:  # those that are attached are served on
            logger.error("ranks that start from now on find another agent: %s", error)
            return
        logger.error("%s was deleted under this agent, and is made again", self._directory)
        self._selector.unregister(self._listener)
        self._listener.close()
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ)

    # --- events ----------------------------------------------------------------------------------

    def _on_sigterm(self, _signal: int, _frame: FrameType | None) -> None:
        self._terminated = True

    def _job_done(self, job: SaveJob, done: Done) -> None:
        """In any thread."""
        self._results.put((job, done))
        self._news.wake()

    def _handle(self, source: object) -> None:
        if source is self._listener:
            self._accept()
        elif isinstance(source, Channel):
            self._listen_to(source)
        else:
            self._news.clear()
            self._report()
            if self._terminated and self._leave_by is None:
                logger.warning("asked to end: committing what is captured")
                now = awake_s()
                self._leave_by = now + min(self._grace_s, _LAST_RANKS_S)
                self._timeouts = CallTimeouts(longest=_LAST_CALL, since=now)
                self._lift_bandwidth_cap()
                self._commit_emergency()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # no descriptor is left, for instance: ranks try again, and saves go on
            logger.error("a rank could not be attached: %s", error)
            Event().wait(_ACCEPT_PAUSE_S)  # the listener stays readable
            return
        try:
            channel = Channel(connection)
        except ConfigError as error:
            logger.warning("refused: %s", error)
            return
        self._members[channel] = None
        self._heard[channel] = awake_s()
        self._selector.register(channel, selectors.EVENT_READ)

    def _listen_to(self, channel: Channel) -> bool:
        """Do the next thing that a rank asks for; False if there is none."""
        if channel not in self._members:  # dropped by an event before this one
            return False
        try:
            message = channel.receive(_AT_ONCE)
            if message is None:
                return False
            self._heard[channel] = awake_s()
            self._answer(channel, message)
        except PeerError as error:
            self._lost(channel, error)
        return True

    def _answer(self, channel: Channel, message: Message) -> None:
        member = self._members[channel]
        if isinstance(message, Attach):
            self._attach(channel, message)
        elif isinstance(message, Heartbeat):
            pass
        elif member is None:
            raise PeerError(f"{message.kind} before attach.")
        elif isinstance(message, SaveRequest):
            for missed in self._collector.save(member, message):
                self._send(channel, missed)
        elif isinstance(message, Skip):
            self._collector.skip(member, message)
        elif isinstance(message, Peers):
            self._replication.learn(Path(message.path))
        elif isinstance(message, Repair):
            self._replication.repair(message)
        elif isinstance(message, LiftBandwidthCap):
            logger.warning("rank %d asked to end: committing what is captured at full speed", member.rank)
            self._lift_bandwidth_cap()
        elif isinstance(message, Detach):
            self._said_detach.add(member.rank)
            self._drop(channel)
        else:
            raise PeerError(f"{message.kind} is not for an agent.")

    def _attach(self, channel: Channel, attach: Attach) -> None:
        if attach.rank not in attach.local_ranks or not attach.attempt_id:
            self._send(
                channel, RequestRefused(reason=f"rank {attach.rank} is not among {attach.local_ranks}")
            )
            self._drop(channel)
            return
        if self._last is None or attach.attempt_id != self._last.attempt_id:
            self._begin_attempt(attach)
        self._last = attach
        if self._output is not None:
            self._output.joined_by(channel.pid)
        self._replication.introduced(attach)
        for other, member in list(self._members.items()):
            if other is not channel and member is not None and member.rank == attach.rank:
                self._drop(other)  # its end is not read yet; the arena's lock lets no two live
        self._members[channel] = attach
        self._send(channel, Attached(peer_port=self._replication.port))
        for copies in self._replication.complete:
            self._send(channel, copies)
        logger.debug("rank %d attached (pid %d)", attach.rank, channel.pid)

    def _begin_attempt(self, attach: Attach) -> None:
        for other, member in list(self._members.items()):
            # A start that went back introduces its ranks again; of any other the attempt is over.
            if member is not None and start_of(member.attempt_id) != start_of(attach.attempt_id):
                self._drop(other)
        self._said_detach.clear()
        self._gave_up.clear()
        if not self._terminated:
            self._throttle.restore()
        self._collector.begin_attempt(attach)
        self._replication.begin_attempt(attach)

    def _lost(self, channel: Channel, error: PeerError) -> None:
        member = self._members[channel]
        self._drop(channel)
        if member is not None:
            logger.warning("rank %d left without detach: %s", member.rank, error)
            self._commit_emergency()

    def _drop(self, channel: Channel) -> None:
        if channel in self._members:
            self._selector.unregister(channel)
            del self._members[channel]
            self._heard.pop(channel, None)
        channel.close()
        self._deserted_at = awake_s()

    def _send(self, channel: Channel, message: Message, timeout: timedelta = timedelta(seconds=1)) -> bool:
        try:
            channel.send(message, timeout)
        except PeerError as error:
            # A stopped trainer fills its socket; its end is noticed when it is read.
            logger.debug("not delivered: %s", error)
            return False
        return True

    def _tell(self, attempt_id: str, message: Message) -> None:
        """Say something to all ranks of an attempt."""
        for channel, member in list(self._members.items()):
            if member is not None and member.attempt_id == attempt_id and not self._send(channel, message):
                while self._listen_to(channel):  # it may have left, and said so
                    pass
                self._drop(channel)  # it learns from the end of the connection, and comes back

    def _heartbeat(self) -> None:
        now = awake_s()
        for channel, member in list(self._members.items()):
            self._send(channel, Heartbeat(), _AT_ONCE)
            if member is not None and now - self._heard.get(channel, now) > _SILENCE_S:
                # Only its launcher may end a trainer; what it captured is safe here meanwhile.
                del self._heard[channel]  # once
                logger.warning(
                    "rank %d (process %d) has said nothing for %.0f s", member.rank, channel.pid, _SILENCE_S
                )

    # --- saves -----------------------------------------------------------------------------------

    def _report(self) -> None:
        is_refused = False
        while True:
            try:
                job, done = self._results.get_nowait()
            except queue.Empty:
                break
            self._collector.finish(job, done)
            self._tell(job.attempt_id, done)
            last = self._last
            if last is None or job.attempt_id != last.attempt_id:
                continue
            if done.error:
                if job.tier is TierName.LOCAL:
                    self._replication.failed(job.step)
                if self._is_bereft(last):
                    is_refused = True
                    self._gave_up.add((job.step, job.tier))
            elif job.tier is TierName.LOCAL:
                # Under its own name a kept step has its copies, or gets them by repairs.
                if not done.kept or last.is_alone:
                    self._replication.committed(job.step)
            else:
                self._collector.free_others(last, job.tier, job.step)
        retire: RetireJob | None = None
        for event in self._replication.take_events():
            if isinstance(event, RetireJob):
                # Each says all that is complete: of those that come at once the last will do, and the queue
                # that saves wait in has room for few.
                retire = event
            elif isinstance(event, GiveUpJob):
                self._collector.give_up(event)
            else:
                self._tell(event.attempt_id, event)
        if retire is not None:
            self._collector.retire(retire)
            if self._last is not None:
                self._collector.free_others(self._last, TierName.LOCAL, max(retire.complete))
        if is_refused:
            self._try_commit_emergency()

    def _is_bereft(self, last: Attach) -> bool:
        """Whether memory may hold all that is left: ranks left without detach, or all are to go."""
        there = {member.rank for member in self._members.values() if member is not None}
        return self._terminated or not (there | self._said_detach).issuperset(last.local_ranks)

    def _commit_emergency(self) -> None:
        """Begin to bring to safety what ranks left in memory."""
        self._gave_up.clear()
        self._try_commit_emergency()

    def _try_commit_emergency(self) -> None:
        """Go on with that.  Each tier gets a step once, so this comes to an end."""
        if self._last is None:
            return
        try:
            self._collector.commit_emergency(self._last, self._gave_up)
        except OSError as error:  # no descriptor is left, for instance
            if not self._has_to_commit:
                logger.error("what ranks left in memory cannot be read for now: %s", error)
            self._has_to_commit = True
        else:
            self._has_to_commit = False

    def _lift_bandwidth_cap(self) -> None:
        self._throttle.lift()
        self._replication.lift_bandwidth_cap()

    # --- the end ---------------------------------------------------------------------------------

    def _is_over(self) -> bool:
        if self._collector.in_work or (self._members and not self._terminated):
            return False
        now = awake_s()
        if self._leave_by is not None and now >= self._leave_by:
            return True
        if not self._replication.is_settled and now < self._deserted_at + _LAST_COPIES_S:
            return False
        if self._leave_by is not None:
            return not self._members and not self._has_to_commit
        if self._all_ranks_left():
            # Ranks that were told to end, and may be started again by the launcher, leave their captures.
            return not (self._is_hosted and ranks_in(self._directory))
        return now >= self._deserted_at + self._grace_s

    def _is_deserted(self) -> bool:
        """Whether there were ranks and none is left, though they have not come to their end."""
        return self._last is not None and not self._members and not self._all_ranks_left()

    def _all_ranks_left(self) -> bool:
        return self._last is not None and self._said_detach >= set(self._last.local_ranks)
