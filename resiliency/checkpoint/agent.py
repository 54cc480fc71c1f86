# SPDX-License-Identifier: Apache-2.0
"""The checkpoint agent: one process per host and job that persists what its ranks captured.

It outlives trainers.  Ranks attach over a socket, name the slots that hold a step, and hear how the
save ended; the agent borrows the slots, commits, prunes and gives them back.  It never touches a
GPU and runs no training code.  What happens when somebody dies:

* a rank dies: the newest step that all ranks of this host have whole in memory is committed,
  also if its save was never requested; then the agent waits for the ranks to come back;
* all come back within the grace: they attach as a new session, with their captures still there;
* nobody does: the agent leaves, and takes the captures along if they are all committed;
* the agent dies: its locks vanish, its trainers notice, report the save as failed and start another.
"""

from __future__ import annotations

import logging
import os
import queue
import selectors
import signal
import socket
import time
from datetime import timedelta
from pathlib import Path
from threading import Event
from types import FrameType

from resiliency.checkpoint.arena import (
    CapturedSlot,
    hold_job,
    open_captured,
    peek,
    rank_directory,
    ranks_in,
    remove_when_dead,
    try_open_slot,
)
from resiliency.checkpoint.persist import CleanJob, SaveJob, Worker
from resiliency.checkpoint.wire import (
    Attach,
    Attached,
    Beat,
    Bye,
    Channel,
    Done,
    Hurry,
    Message,
    Refused,
    Save,
    Skip,
)
from resiliency.errors import CheckpointError, ConfigError, PeerError

logger = logging.getLogger(__name__)

BEAT_S = 0.5
_SILENCE_S = 30.0
#: How long ranks may take to leave after the agent was told to.
_LAST_RANKS_S = 60.0
#: More saves than can be queued or in slots.
_REMEMBERED = 64
_AT_ONCE = timedelta(0)


class _Gathering:
    """The ranks of this host that have said what they have of one step."""

    def __init__(self, session: str, run_id: str) -> None:
        self.session = session
        self.run_id = run_id
        self.slots: dict[int, CapturedSlot] = {}
        self.missing: dict[int, str] = {}
        #: Of the missing, those that said so themselves.
        self.skipped: set[int] = set()

    @property
    def ranks(self) -> set[int]:
        return self.slots.keys() | self.missing.keys()

    def close(self) -> None:
        for slot in self.slots.values():
            slot.close()


class Agent:
    """Serves the ranks of one job on this host until they say goodbye, or stay away for `grace`.

    Args:
        directory: arena of the job.
        listener: socket that listens at its address; the agent owns it.
    """

    def __init__(self, directory: Path, listener: socket.socket, *, grace: timedelta) -> None:
        self._directory = directory
        self._job = hold_job(directory)
        self._listener = listener
        self._grace_s = grace.total_seconds()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._wake_in, self._wake_out = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        self._hurry = Event()
        self._results: queue.SimpleQueue[tuple[SaveJob, Done]] = queue.SimpleQueue()
        self._worker = Worker(self._job_done, self._hurry)
        self._members: dict[Channel, Attach | None] = {}
        self._heard: dict[Channel, float] = {}
        self._last: Attach | None = None  # of the newest session
        self._said_bye: set[int] = set()
        self._gathering: dict[int, _Gathering] = {}
        self._in_work = 0
        #: The last saves that were handed to the worker, and how they ended if they have.
        self._handled: dict[tuple[str, int], Done | None] = {}
        self._deserted_at = time.monotonic()
        self._terminated = False
        self._leave_by: float | None = None  # once terminated: with ranks or without

    def run(self) -> None:
        """Serve until there is nothing left to serve."""
        beat_at = time.monotonic()
        while not self._is_over():
            for key, _ in self._selector.select(timeout=min(BEAT_S, self._grace_s) / 2):
                self._handle(key.fileobj)
            if time.monotonic() >= beat_at:
                beat_at = time.monotonic() + BEAT_S
                self._beat()
        logger.info("nothing left to do: the agent leaves")

    def install_signals(self) -> None:
        """SIGTERM: commit what is captured, at full speed, then leave.  SIGINT is the trainers'.

        Who ends a whole job ends its ranks too, and they may save a last step: the agent stays until
        they have left, a minute at most.
        """
        signal.set_wakeup_fd(self._wake_out, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def close(self) -> None:
        """Give everything back; the captures go too if nobody needs them any more."""
        self._worker.close(timedelta(seconds=30))
        for gathering in self._gathering.values():
            gathering.close()
        for channel in list(self._members):
            channel.close()
        self._selector.close()
        removable = self._captures_are_spent()
        self._job.close()
        if removable:
            remove_when_dead(self._directory)
        # Last: once the address is free, a successor may start.
        self._listener.close()
        for fd in (self._wake_in, self._wake_out):
            os.close(fd)

    # --- events ----------------------------------------------------------------------------------

    def _on_sigterm(self, _signal: int, _frame: FrameType | None) -> None:
        self._terminated = True

    def _job_done(self, job: SaveJob, done: Done) -> None:
        """In the worker's thread."""
        self._results.put((job, done))
        os.write(self._wake_out, b"d")

    def _handle(self, source: object) -> None:
        if source is self._listener:
            self._accept()
        elif isinstance(source, Channel):
            self._listen_to(source)
        else:
            os.read(self._wake_in, 4096)
            self._report()
            if self._terminated and self._leave_by is None:
                logger.warning("asked to end: committing what is captured")
                self._leave_by = time.monotonic() + min(self._grace_s, _LAST_RANKS_S)
                self._hurry.set()
                self._rescue()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        try:
            channel = Channel(connection)
        except ConfigError as error:
            logger.warning("refused: %s", error)
            return
        self._members[channel] = None
        self._heard[channel] = time.monotonic()
        self._selector.register(channel, selectors.EVENT_READ)

    def _listen_to(self, channel: Channel) -> None:
        if channel not in self._members:  # dropped by an event before this one
            return
        try:
            message = channel.receive(_AT_ONCE)
            if message is not None:
                self._heard[channel] = time.monotonic()
                self._answer(channel, message)
        except PeerError as error:
            self._lost(channel, error)

    def _answer(self, channel: Channel, message: Message) -> None:
        member = self._members[channel]
        if isinstance(message, Attach):
            self._attach(channel, message)
        elif isinstance(message, Beat):
            pass
        elif member is None:
            raise PeerError(f"{message.kind} before attach.")
        elif isinstance(message, Save):
            self._gather(member, message)
        elif isinstance(message, Skip):
            gathering = self._gathering_of(member, message.step)
            gathering.missing[member.rank] = message.reason
            gathering.skipped.add(member.rank)
            self._submit(member, message.step)
        elif isinstance(message, Hurry):
            logger.warning("rank %d is told to end: committing what is captured at full speed", member.rank)
            self._hurry.set()
        elif isinstance(message, Bye):
            self._said_bye.add(member.rank)
            self._drop(channel)
        else:
            raise PeerError(f"{message.kind} is not for an agent.")

    def _attach(self, channel: Channel, attach: Attach) -> None:
        if attach.rank not in attach.local_ranks or not attach.session:
            self._send(channel, Refused(reason=f"rank {attach.rank} is not among {attach.local_ranks}"))
            self._drop(channel)
            return
        if self._last is None or attach.session != self._last.session:
            self._begin_session(attach)
        self._last = attach
        for other, member in list(self._members.items()):
            if other is not channel and member is not None and member.rank == attach.rank:
                self._drop(other)  # its end is not read yet; the arena's lock lets no two live
        self._members[channel] = attach
        self._send(channel, Attached())
        logger.debug("rank %d attached (pid %d)", attach.rank, channel.pid)

    def _begin_session(self, attach: Attach) -> None:
        for other, member in list(self._members.items()):
            if member is not None:
                self._drop(other)  # of a session that is over
        for gathering in self._gathering.values():
            gathering.close()
        self._gathering.clear()
        self._said_bye.clear()
        if not self._terminated:
            self._hurry.clear()
        # Sessions before are over: what they had in work is reported to nobody.
        self._handled = {key: done for key, done in self._handled.items() if done is None}
        if 0 in attach.local_ranks:
            self._worker.try_put(CleanJob(attach.settings))

    def _lost(self, channel: Channel, error: PeerError) -> None:
        member = self._members[channel]
        self._drop(channel)
        if member is not None:
            logger.warning("rank %d is gone without goodbye: %s", member.rank, error)
            self._rescue()

    def _drop(self, channel: Channel) -> None:
        if channel in self._members:
            self._selector.unregister(channel)
            del self._members[channel]
            self._heard.pop(channel, None)
        channel.close()
        self._deserted_at = time.monotonic()

    def _send(self, channel: Channel, message: Message, timeout: timedelta = timedelta(seconds=1)) -> bool:
        try:
            channel.send(message, timeout)
        except PeerError as error:
            # A stopped trainer fills its socket; its end is noticed when it is read.
            logger.debug("not delivered: %s", error)
            return False
        return True

    def _beat(self) -> None:
        now = time.monotonic()
        for channel, member in list(self._members.items()):
            self._send(channel, Beat(), _AT_ONCE)
            if member is not None and now - self._heard.get(channel, now) > _SILENCE_S:
                # Only its launcher may end a trainer; what it captured is safe here meanwhile.
                del self._heard[channel]  # once
                logger.warning(
                    "rank %d (process %d) has said nothing for %.0f s", member.rank, channel.pid, _SILENCE_S
                )

    # --- saves -----------------------------------------------------------------------------------

    def _gathering_of(self, member: Attach, step: int) -> _Gathering:
        return self._gathering.setdefault(step, _Gathering(member.session, member.run_id))

    def _gather(self, member: Attach, save: Save) -> None:
        if (member.session, save.step) in self._handled:
            done = self._handled[member.session, save.step]
            if done is None or not done.error:
                return  # a rescue was faster; its outcome went or goes to all ranks
            del self._handled[member.session, save.step]  # another try
        gathering = self._gathering_of(member, save.step)
        slot = self._borrow(member, save)
        if slot is None:
            gathering.missing[member.rank] = f"rank {member.rank}: {save.slot} does not hold that step"
        elif member.rank in gathering.slots:
            slot.close()
        else:
            gathering.slots[member.rank] = slot
            # It may have been skipped before: another try, while others are awaited.
            gathering.missing.pop(member.rank, None)
            gathering.skipped.discard(member.rank)
        self._submit(member, save.step)

    def _borrow(self, member: Attach, save: Save) -> CapturedSlot | None:
        if not save.slot or "/" in save.slot:
            return None
        try:
            slot = try_open_slot(rank_directory(self._directory, member.rank) / save.slot)
        except CheckpointError as error:
            logger.warning("rank %d, step %d: %s", member.rank, save.step, error)
            return None
        if slot is None or (slot.header.step, slot.header.run_id) == (save.step, member.session):
            return slot
        slot.close()
        return None

    def _submit(self, attach: Attach, step: int) -> None:
        """Hand a step to the worker once all ranks of this host have spoken."""
        gathering = self._gathering[step]
        if gathering.ranks != set(attach.local_ranks):
            return
        del self._gathering[step]
        # Ranks pass steps in order, so an older one that is still incomplete never will be whole.
        for old in sorted(old for old in self._gathering if old < step):
            incomplete = self._gathering[old]
            for rank in set(attach.local_ranks) - incomplete.ranks:
                incomplete.missing[rank] = f"rank {rank} went on without it"
            self._submit(attach, old)  # those that wait for it are told
        job = SaveJob(
            step=step,
            session=gathering.session,
            run_id=gathering.run_id,
            world_size=attach.world_size,
            ranks=tuple(sorted(attach.local_ranks)),
            slots=gathering.slots,
            settings=attach.settings,
            missing="; ".join(gathering.missing.values()),
            skipped_by=tuple(sorted(gathering.skipped)),
        )
        if (job.session, step) in self._handled:
            job.close()
            return
        if not job.missing:  # else it stays open for another try, which may come before this one has ended
            self._handled[job.session, step] = None
        self._in_work += 1
        if job.missing and len(job.ranks) == job.world_size:  # no other host waits to be told
            self._job_done(job, _failed(job, job.missing))
            job.close()
        elif not self._worker.try_put(job):
            self._job_done(job, _failed(job, "too many saves wait for storage"))
            job.close()

    def _report(self) -> None:
        while True:
            try:
                job, done = self._results.get_nowait()
            except queue.Empty:
                return
            self._in_work -= 1
            if not job.missing:
                self._handled[job.session, job.step] = done
            while len(self._handled) > _REMEMBERED:
                del self._handled[next(iter(self._handled))]
            for channel, member in list(self._members.items()):
                if member is not None and member.session == job.session and not self._send(channel, done):
                    self._drop(channel)  # it learns from the end of the connection, and comes back

    def _rescue(self) -> None:
        """Commit the newest step that every rank of this host has whole in memory."""
        last = self._last
        if last is None:
            return
        steps = [
            {h.step for _, h in peek(self._directory, rank) if h.run_id == last.session}
            for rank in last.local_ranks
        ]
        for step in sorted(set.intersection(*steps), reverse=True)[:1]:
            if (last.session, step) in self._handled:
                return
            gathering = self._gathering.setdefault(step, _Gathering(last.session, last.run_id))
            for rank in last.local_ranks:
                if rank not in gathering.slots:
                    try:
                        gathering.slots[rank] = open_captured(self._directory, rank, step=step)
                    except CheckpointError as error:  # its trainer lives and captures again
                        logger.info("step %d is not whole any more: %s", step, error)
                        return
            logger.warning("committing step %d, which its ranks left in memory", step)
            self._submit(last, step)

    # --- the end ---------------------------------------------------------------------------------

    def _is_over(self) -> bool:
        if self._in_work or (self._members and not self._terminated):
            return False
        if self._leave_by is not None:
            return not self._members or time.monotonic() >= self._leave_by
        everybody_left = self._last is not None and self._said_bye >= set(self._last.local_ranks)
        return everybody_left or time.monotonic() - self._deserted_at >= self._grace_s

    def _captures_are_spent(self) -> bool:
        """Whether every capture here is committed, or belongs to ranks that ended well."""
        if self._last is not None and self._said_bye >= set(self._last.local_ranks):
            return True
        newest = [peek(self._directory, rank)[:1] for rank in ranks_in(self._directory)]
        return all(
            (done := self._handled.get((header.run_id, header.step))) is not None and not done.error
            for found in newest
            for _, header in found
        )


def _failed(job: SaveJob, why: str) -> Done:
    return Done(
        step=job.step,
        session=job.session,
        error=why,
        skipped_by=job.skipped_by,
        size_bytes=0,
        queued_s=0.0,
        commit_s=0.0,
    )
