# SPDX-License-Identifier: Apache-2.0
"""From a signal at any rank to one step at which all ranks stop.

    termination = Termination(RankGroup(rank, world_size))
    for step in ...:
        train_step()
        if termination.boundary(step):     # False, for the price of a lock, until somebody wants a stop
            ...save...
            raise termination.terminated(step, committed=True)

**Protocol.**  Training says `boundary(step)` when `step` steps are done; all ranks pass the same
boundaries.  A thread beside it, the watcher, does the rest, because training may sit in a collective.

1. The watcher of a rank that gets the signal tells rank 0, and rank 0 tells all.
2. Each watcher, in one critical section, marks the stop as pending and reads the last boundary that
   training passed; it posts ``u = last + 1``.  From then on training passes no boundary without the
   decision: it waits there.
3. Rank 0 decides ``D = max(u)`` over all ranks and tells all.  Each rank stops at its first boundary
   that is not below D.

*All stop at the same boundary*, because no rank has passed one that is not below D: rank r passed
``u_r - 1 < D`` at most when it posted, and none without the decision since.  *Nobody waits for ever*:
only watchers have to act for a decision, and they wait for nothing but words.  A rank that waits at a
boundary holds up others in their collectives only until the decision, and then trains on to D, as do
all.  A rank that has left its loop posts, with its goodbye, a step after all boundaries: the others
then train to their end as well.

*A job that restores an earlier step passes boundaries again.*  Each restore begins a new round, and every
boundary of it counts as later than all before: all ranks restore at the same place of their program.

**When it cannot be.**  The end of a connection tells that a rank died, and silence for 40 % of the
deadline that it hangs.  Then rank 0 calls the stop off: there can be no checkpoint of a new step.  What
was captured before is the agent's to commit, so the ranks leave at once, with 128 + signal: a thread
that waits at a boundary gets `Terminated`, one that is stuck in a collective is ended with the process.
The same happens to a rank that has not come to D when the deadline is over.

**At the stop** ranks may still know different things of a save that was begun before.  `collect` has rank 0
tell all of them what any of them found, so that they go on alike.  It waits for no longer than until one
of them is gone or the deadline is over; a collective promises neither.
"""

from __future__ import annotations

import logging
import queue
import selectors
import signal
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from datetime import timedelta

from resiliency.checkpoint.ranks import RankGroup
from resiliency.checkpoint.stop.loader_workers import outliving
from resiliency.checkpoint.stop.stop_link import StopKind, StopMessage, connect_ranks
from resiliency.checkpoint.stop.terminated import Terminated, TerminationOptions, end_process
from resiliency.checkpoint.threads import start_thread
from resiliency.errors import ConfigError, PeerError
from resiliency.progress import report_kept
from resiliency.runtime import StopNote, awake_s, elapsed_s, name_ranks, wait_awake
from resiliency.signal_pipe import SignalPipe
from resiliency.wake_pipe import WakePipe

__all__ = ["Terminated", "Termination", "TerminationOptions", "end_process"]

logger = logging.getLogger(__name__)

#: Share of the deadline after which a rank that has not answered counts as hung; rank 0 judges, the
#: others wait a little longer for what it says.
_ANSWER_SHARE, _OUTCOME_SHARE = 0.4, 0.5
#: Training that is not stuck may leave by itself once the stop was called off.
_LEAVE_S = 0.3
#: What a rank that stops gets beyond the deadline, to close, before its process is ended.
_LAST_RESORT_S = 2.5
#: How long rank 0 stays for ranks that are about to finish, too.
_LINGER_S = 10.0
_CONNECT = timedelta(seconds=60)
#: More steps than a job has.
_ROUND = 1 << 48


class Termination:
    """One rank's part in a common stop.  Made by all ranks alike, in their main threads.

    Args:
        options: see `TerminationOptions`.
        on_request: called in the watcher's thread, once, when a stop is asked for, with the cause; must
            return soon.
        on_leave: called in the watcher's thread with the reason, before it ends the process.
        leave: ends the process with an exit code.
    Raises:
        ConfigError: this is not the main thread and signals are to be caught, or a rank cannot reach
            rank 0; the same on all ranks.
    """

    def __init__(
        self,
        rank_group: RankGroup,
        options: TerminationOptions | None = None,
        *,
        on_request: Callable[[str], None] | None = None,
        on_leave: Callable[[str], None] | None = None,
        leave: Callable[[int], None] = end_process,
    ) -> None:
        self._options = options or TerminationOptions()
        self._rank, self._world_size = rank_group.rank, rank_group.world_size
        self._on_request, self._on_leave, self._leave = on_request, on_leave, leave
        # Guards all that training and the watcher both look at; never held while anybody waits.
        # Reentrant: a signal handler of the program may ask for a stop while its thread is in here.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        #: Boundary that training passed: step, plus `_ROUND` for each restore.
        self._last = -1
        self._round = 0
        self._stopping = False
        self._stop_at: int | None = None
        self._called_off = ""
        self._number = signal.SIGTERM
        self._deadline = self._asked_at = self._called_off_at = self._ends_at = 0.0
        self._on_its_way = self._reached = self._committed = False
        # What all ranks found, if they are asked; see `collect`.
        self._mine: frozenset[str] | None = None
        self._all: frozenset[str] | None = None
        self._not_all = False
        # The watcher's own.
        self._posts: dict[int, int] = {}
        self._departed: dict[int, int] = {}
        self._gone: dict[int, str] = {}
        self._found: dict[int, frozenset[str]] = {}
        self._said_mine = False
        self._requests: queue.SimpleQueue[signal.Signals] = queue.SimpleQueue()
        self._interrupts = 0
        self._closing: float | None = None  # until when to stay for others
        self._polite = self._said_detach = self._ended = False
        self._signals = _catch(rank_group, self._options)
        self._workers = ExitStack()
        self._workers.enter_context(outliving(self._options.signals))
        self._selector = selectors.DefaultSelector()
        self._news = WakePipe()
        try:
            self._peers = connect_ranks(rank_group, address=self._options.address, timeout=_CONNECT)
        except BaseException:
            self._give_back()
            raise
        self._watcher = threading.Thread(target=self._watch, name="resiliency-termination", daemon=True)
        try:
            self._selector.register(self._news, selectors.EVENT_READ)
            if self._signals is not None:
                self._selector.register(self._signals, selectors.EVENT_READ)
            for rank, peer in self._peers.items():
                self._selector.register(peer, selectors.EVENT_READ, rank)
            start_thread(self._watcher)
        except BaseException:
            for peer in self._peers.values():  # by the end of their connection the others learn of it
                peer.close()
            self._give_back()
            raise

    # --- training's side -------------------------------------------------------------------------

    def boundary(self, step: int) -> bool:
        """Say that `step` steps are done; True if all ranks stop here.

        While a stop is being agreed on it waits, for milliseconds as a rule.  After True, training is on
        its way out: only the deadline still ends the process, some seconds late.

        Raises:
            Terminated: the ranks could not agree, so there is nothing to save.
        """
        with self._lock:
            passed = self._round + step
            if not self._stopping:
                self._last = passed
                if signal.SIGTERM in self._options.signals:  # by which a supervisor ends it, and it is saved
                    report_kept(step)
                return False
            wait_awake(self._changed, self._is_decided, self._left_s())
            if self._stop_at is not None and not self._called_off:
                if passed < self._stop_at:
                    self._last = passed
                    return False
                self._on_its_way = self._reached = True
                return True
            self._on_its_way = True
        raise self.terminated(step, committed=False)

    def went_on_from(self, step: int) -> None:
        """All ranks have restored `step`, maybe one before boundaries that they have passed."""
        with self._lock:
            self._round += _ROUND
            self._last = self._round + step

    @property
    def requested(self) -> bool:
        """Whether this rank knows that a stop is wanted.  Ranks learn it at different moments."""
        return self._stopping

    def time_left(self) -> timedelta:
        """Until the deadline by the clock of what sets it, a scheduler say; zero when it is over.

        Limits on other ranks leave out suspensions, and so may allow for more.
        """
        return timedelta(seconds=max(0.0, self._ends_at - elapsed_s()))

    def request(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Ask for a stop as if the signal had come, from any thread: for notices that are no signals."""
        with self._changed:
            if self._closing is None:
                self._requests.put(number)
                self._news.wake()

    def leaving(self) -> None:
        """Training has left its loop.  From now on only the deadline ends the process."""
        with self._changed:
            self._on_its_way = True

    def terminated(self, step: int, *, committed: bool) -> Terminated:
        """What to raise at the end; the launcher hears of it."""
        with self._changed:
            self._committed |= committed
            cause = self._number.name + (f": {self._called_off}" if self._called_off else "")
        StopNote(step=step, committed=self._committed, cause=cause).leave()
        return Terminated(self._code(), step=step, committed=committed, cause=cause)

    def collect(self, found: Iterable[str]) -> frozenset[str] | None:
        """What any rank has found, once all have said; for ranks that stop, once.

        It ends when one of them is gone or has left, and at the deadline.

        Args:
            found: by this rank; words without blanks, few of them different among all ranks.
        Returns:
            None if not all ranks said something; they may then disagree about that.
        """
        with self._changed:
            self._mine = frozenset(found)
            self._news.wake()
            wait_awake(self._changed, lambda: self._all is not None or self._not_all, self._left_s())
            return self._all

    def close(self, *, finished: bool = True, ending: bool = True) -> None:
        """Stop watching and put signal handlers back.

        Rank 0 stays until the others close too, 10 s at most.  Idempotent.

        Args:
            finished: this rank comes to its end in good order, not by an exception.
            ending: after an agreed stop this process ends, so more signals are ignored; False: it goes on.
        """
        if self._closing is not None:
            return
        with self._changed:
            self._on_its_way = True
            self._polite = finished or self._reached
            stay_s = min(_LINGER_S, self._left_s()) if self._stopping else _LINGER_S
            self._closing = awake_s() + (stay_s if self._polite else 0.0)
        self._news.wake()
        self._watcher.join()
        self._give_back(ending=ending and self._reached)

    def __enter__(self) -> Termination:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(finished=kind is None)

    def _is_decided(self) -> bool:
        return self._stop_at is not None or bool(self._called_off)

    def _left_s(self) -> float:
        return max(0.0, self._deadline - awake_s())

    def _code(self) -> int:
        return 0 if self._committed else 128 + self._number

    def _give_back(self, *, ending: bool = False) -> None:
        self._workers.close()
        if self._signals is not None:
            self._signals.close(ending=ending)
        self._selector.close()
        self._news.close()

    # --- the watcher's thread --------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._is_over():
            for key, _ in self._selector.select(self._until_alarm_s()):
                if key.data is not None:
                    self._listen(key.data)
                elif key.fileobj is self._signals:
                    for number in self._signals.read():
                        self._on_signal(number)
                else:
                    self._news.clear()
            while not self._requests.empty():
                self._on_signal(self._requests.get())
            self._say_mine()
            self._look_at_the_clock()
        for peer in self._peers.values():
            peer.close()

    def _is_over(self) -> bool:
        """Whether this rank has said goodbye, and rank 0 has nobody left to serve."""
        if self._closing is None:
            return False
        if self._polite and not self._said_detach:
            self._said_detach = True
            self._tell_all(StopMessage(kind=StopKind.DETACH, number=self._last + 1))
            self._sum_up()
        return self._rank != 0 or not self._peers or self._closing <= awake_s()

    def _listen(self, rank: int) -> None:
        try:
            for message in self._peers[rank].receive():
                self._hear(rank, message)
        except (PeerError, ValueError) as error:
            self._lose(rank, error)

    def _hear(self, rank: int, message: StopMessage) -> None:
        if message.kind is StopKind.STOP:
            self._begin(signal.Signals(message.number), message.left_s, f"at rank {rank}")
        elif message.kind is StopKind.POST:
            self._posts[rank] = message.number
            self._leader_state()
        elif message.kind is StopKind.DETACH:
            self._departed[rank] = self._posts[rank] = message.number
            self._leader_state()
            self._sum_up()
        elif message.kind is StopKind.DECIDE:
            self._decide(message.number)
        elif message.kind is StopKind.GIVE_UP:
            self._call_off(message.text)
        elif message.kind is StopKind.FOUND:
            self._found[rank] = frozenset(message.text.split())
            self._sum_up()
        elif message.kind is StopKind.ALL_FOUND:
            self._answer(frozenset(message.text.split()))
        elif message.kind is StopKind.NOT_ALL:
            self._answer(None)

    def _on_signal(self, number: signal.Signals) -> None:
        self._interrupts += number is signal.SIGINT
        if self._interrupts > 1:
            self._end(f"a second {number.name} came", 128 + number)
        elif self._stopping:
            logger.warning("%s came again; this rank is stopping", number.name)
        else:
            self._begin(number, self._options.deadline.total_seconds(), "here")

    def _begin(self, number: signal.Signals, left_s: float, where: str) -> None:
        """A stop is asked for: mark it as pending and post the next boundary, in one go."""
        with self._changed:
            if self._stopping:
                return
            self._stopping = True
            self._number = number
            self._asked_at = awake_s()
            self._deadline, self._ends_at = self._asked_at + left_s, elapsed_s() + left_s
            upcoming = self._last + 1
        level = logging.WARNING if where == "here" else logging.INFO
        logger.log(level, "%s %s: all ranks stop at one step, within %.1f s", number.name, where, left_s)
        self._posts[self._rank] = upcoming
        self._tell_all(StopMessage(kind=StopKind.STOP, number=number, left_s=left_s))
        if self._rank != 0:
            self._tell_all(StopMessage(kind=StopKind.POST, number=upcoming))
        if self._gone:
            self._call_off(self._who_is_gone())
        elif self._rank != 0 and 0 in self._departed and not self._peers:
            self._decide(self._departed[0])
        self._leader_state()
        self._report(self._on_request, number.name)

    def _leader_state(self) -> None:
        """In rank 0: decide as soon as all have posted."""
        if self._rank != 0 or not self._stopping or self._stop_at is not None or self._called_off:
            return
        if len(self._posts) == self._world_size:
            boundary = max(self._posts.values())
            self._tell_all(StopMessage(kind=StopKind.DECIDE, number=boundary))
            self._decide(boundary)

    def _decide(self, boundary: int) -> None:
        with self._changed:
            self._stop_at = boundary
            self._changed.notify_all()
        level = logging.INFO if self._rank else logging.WARNING
        logger.log(level, "all ranks stop when %d steps are done", boundary % _ROUND)

    def _say_mine(self) -> None:
        """Pass on what training found."""
        mine = self._mine
        if mine is None or self._said_mine:
            return
        self._said_mine = True
        if self._rank == 0:
            self._found[0] = mine
            self._sum_up()
        else:
            self._tell_all(StopMessage(kind=StopKind.FOUND, text=" ".join(sorted(mine))))

    def _sum_up(self) -> None:
        """In rank 0: answer as soon as all have said what they found, or it is known that not all will."""
        if self._rank != 0 or not self._found or self._all is not None or self._not_all:
            return
        silent = set(range(self._world_size)) - self._found.keys()
        if self._gone or silent & self._departed.keys() or (0 in silent and self._said_detach):
            self._tell_all(StopMessage(kind=StopKind.NOT_ALL))
            self._answer(None)
        elif not silent:
            found = frozenset().union(*self._found.values())
            self._tell_all(StopMessage(kind=StopKind.ALL_FOUND, text=" ".join(sorted(found))))
            self._answer(found)

    def _answer(self, found: frozenset[str] | None) -> None:
        """The first answer counts."""
        with self._changed:
            if self._all is None and not self._not_all:
                self._all, self._not_all = found, found is None
                self._changed.notify_all()

    def _call_off(self, why: str) -> None:
        """There will be no new step; ranks that came to the stop wait for its checkpoint all the same."""
        if self._rank == 0 and not self._called_off:
            self._tell_all(StopMessage(kind=StopKind.GIVE_UP, text=why))
        with self._changed:
            if self._called_off or not self._stopping or self._reached:
                return
            self._called_off = why
            self._called_off_at = awake_s()
            self._changed.notify_all()
        logger.error("no common stop: %s.  This rank leaves; its captures are left to the agent", why)

    def _lose(self, rank: int, error: Exception) -> None:
        peer = self._peers.pop(rank)
        self._selector.unregister(peer)
        peer.close()
        if rank == 0:
            self._answer(None)
        if rank in self._departed:
            if rank == 0 and self._stopping and self._stop_at is None:
                self._decide(self._departed[0])
            return
        self._gone[rank] = str(error)
        self._sum_up()
        if self._stopping:
            self._call_off(self._who_is_gone())
        elif self._closing is None:
            logger.warning("rank %d is gone (%s): there can be no common stop any more", rank, error)

    def _who_is_gone(self) -> str:
        return f"lost contact with {name_ranks(self._gone)}"

    def _tell_all(self, message: StopMessage) -> None:
        for peer in self._peers.values():
            peer.send(message)

    # --- time ------------------------------------------------------------------------------------

    def _until_alarm_s(self) -> float | None:
        at = self._alarm_at()
        if self._closing is not None:
            at = min(self._closing, at or self._closing)
        return None if at is None else max(0.0, at - awake_s())

    def _alarm_at(self) -> float | None:
        """When something has to be done if nothing happens until then."""
        with self._changed:
            if not self._stopping or self._ended:
                return None
            if self._stop_at is None and not self._called_off:
                share = _ANSWER_SHARE if self._rank == 0 else _OUTCOME_SHARE
                return self._asked_at + share * (self._deadline - self._asked_at)
            if self._on_its_way:
                return self._deadline + _LAST_RESORT_S
            if self._called_off:
                return min(self._called_off_at + _LEAVE_S, self._deadline)
            return self._deadline

    def _look_at_the_clock(self) -> None:
        at = self._alarm_at()
        if at is None or awake_s() < at:
            return
        if self._stop_at is not None or self._called_off:
            self._end(self._called_off or "the deadline is over")
        elif self._rank == 0:
            silent = sorted(set(range(self._world_size)) - self._posts.keys())
            self._call_off(f"no answer from {name_ranks(silent)}")
        else:
            self._call_off("rank 0 does not answer")

    def _end(self, why: str, code: int | None = None) -> None:
        code = self._code() if code is None else code
        logger.error("%s: this process ends with exit code %d", why, code)
        self._ended = True
        self._report(self._on_leave, why)
        self._leave(code)

    def _report(self, callback: Callable[[str], None] | None, text: str) -> None:
        if callback is not None:
            try:
                callback(text)
            except Exception:  # the border of this thread: nothing else ends a process that is stuck
                logger.exception("callback at a stop failed; the stop goes on")


def _catch(rank_group: RankGroup, options: TerminationOptions) -> SignalPipe | None:
    """Install the handlers, or refuse on all ranks."""
    error: ConfigError | None = None
    pipe = None
    try:
        pipe = SignalPipe(options.signals) if options.signals else None
    except ConfigError as failure:
        error = failure
    try:
        rank_group.check(error, "catching signals")
    except BaseException:
        if pipe is not None:
            pipe.close()
        raise
    return pipe
