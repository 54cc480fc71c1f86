# SPDX-License-Identifier: Apache-2.0
"""A trainer's side of the checkpoint agent: start it, keep in touch, notice when it dies.

One thread does all of it, so that training never waits for the agent.  Requests made while there is
no agent wait for the next one (`RequestQueue`); saves that an agent had taken with it are reported lost.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from resiliency.checkpoint.agent.protocol import (
    Attach,
    Attached,
    Channel,
    Copies,
    Detach,
    Done,
    Heartbeat,
    LiftBandwidthCap,
    Message,
    Peers,
    Repair,
    RepairDone,
    RequestRefused,
    SaveRequest,
    Skip,
    Start,
    Started,
    connect,
    connect_to,
)
from resiliency.checkpoint.agent.request_queue import RequestQueue
from resiliency.checkpoint.names import TierTry
from resiliency.checkpoint.storage.posix import SHORTAGES
from resiliency.checkpoint.threads import start_thread
from resiliency.errors import ConfigError, PeerError
from resiliency.runtime import AGENT_HOST_ENV, awake_s
from resiliency.wake_pipe import WakePipe

logger = logging.getLogger(__name__)

HEARTBEAT_S = 0.5
_LOOK_S = 0.05
_BACKOFF_S = (0.0, 0.2, 1.0, 5.0)
#: A connection, or an agent, that ended sooner than this will end soon again.
_LIVED_S = 10.0
#: Between the starts of agents that end at once: each costs training the time in which it imports torch.
_RESTART_S, _LONGEST_RESTART_S = 0.5, 30.0
_AT_ONCE = timedelta(0)


@dataclass(frozen=True, kw_only=True)
class LinkOptions:
    """Deadlines of the link.

    Attributes:
        silence: an agent that says nothing for so long is taken for hung, and replaced.
        start: longest time for a new agent to answer; it imports torch first.
        grace: how long an agent waits for ranks that died.
    """

    silence: timedelta = timedelta(seconds=30)
    start: timedelta = timedelta(minutes=2)
    grace: timedelta = timedelta(seconds=60)


class AgentLink:
    """Connects one rank to the agent of its host.

    Args:
        starts: this rank starts the agent where there is none; one per host.
        on_done: called in the link's thread with the outcome of each save in each tier.
        on_lost: called in the link's thread when an agent is gone or cannot be had, with the reason and
            the tries that are lost with it; returns what the next agent is asked to save instead, and gives
            up the others.
        on_copies: called in the link's thread with what became of steps after their commit.
    """

    def __init__(
        self,
        directory: Path,
        attach: Attach,
        *,
        starts: bool,
        on_done: Callable[[Done], None],
        on_lost: Callable[[str, frozenset[TierTry]], Sequence[SaveRequest]],
        on_copies: Callable[[Copies], None],
        options: LinkOptions | None = None,
    ) -> None:
        self._directory = directory
        self._attach = attach
        self._starts = starts
        self._on_done = on_done
        self._on_lost = on_lost
        self._on_copies = on_copies
        self._options = options or LinkOptions()
        self._request_queue = RequestQueue(attach.rank, is_alone=attach.world_size == 1)
        self._news = WakePipe()
        # A signal handler may call `request` while this thread is in it.
        self._wake_lock = threading.RLock()
        self._closing = threading.Event()
        self._given_up = threading.Event()
        self._attached = threading.Event()
        self._agent: subprocess.Popen[bytes] | None = None
        self._starts_of_agents = _Starts()
        #: Address of the launcher's agent host; empty if there is none, or it failed.
        self._host = os.environ.get(AGENT_HOST_ENV, "")
        #: Process id of the agent, once attached; 0 while there is none.
        self.agent_pid = 0
        #: Where agents of other hosts reach it; 0 if they do not.
        self.peer_port = 0
        #: Warnings of the search under way, which looks many times a second.
        self._said: set[str] = set()
        self.losses = 0
        reap_agents()
        self._thread = threading.Thread(target=self._run, name="resiliency-agent-link", daemon=True)
        try:
            start_thread(self._thread)
        except BaseException:
            self._news.close()
            raise

    @property
    def is_hosted(self) -> bool:
        """Whether a launcher looks after the agent, and ends it with itself."""
        return bool(self._host)

    def wait_for_agent(
        self, at_most: timedelta | None = None, *, tell_every: timedelta = timedelta(seconds=10)
    ) -> bool:
        """Wait until this rank is attached.

        Args:
            at_most: None: as long as an agent may take to start.
            tell_every: how often to log that it waits.
        Returns:
            False if that takes longer.
        """
        began = awake_s()
        left_s = longest_s = (at_most or self._options.start).total_seconds()
        while left_s > 0 and not self._attached.wait(min(tell_every.total_seconds(), left_s)):
            waited_s = awake_s() - began
            left_s = longest_s - waited_s
            logger.warning(
                "rank %d waits for the checkpoint agent of host %r at %s: %.0f of %g s; rank %d starts it",
                *(self._attach.rank, self._attach.host, self._directory, waited_s, longest_s),
                min(self._attach.local_ranks),
            )
        return self._attached.is_set()

    def request(self, message: Peers | Repair | SaveRequest | Skip | LiftBandwidthCap) -> None:
        """Pass a message to the agent, this one or the next; never blocks, and does nothing after `close`."""
        self._request_queue.put(message)
        self._wake()

    def introduce_again(self, attach: Attach) -> None:
        """What this rank says of itself changed; requests that follow are meant so."""
        self._attach = attach
        self._request_queue.put(attach)
        self._wake()

    def close(self, *, detach: bool, timeout: timedelta = timedelta(seconds=15)) -> None:
        """End the connection.  Idempotent.

        Args:
            detach: this rank ended well.  Else the agent commits its captures and waits for it to return.
            timeout: for the thread to end, and for an agent that this process started and that has
                nothing left to do.
        """
        if self._closing.is_set():
            return
        deadline = awake_s() + timeout.total_seconds()
        if detach:
            self._request_queue.put(Detach())
        else:
            self._given_up.set()
        self._closing.set()
        self._wake()
        self._thread.join(timeout.total_seconds())
        self._given_up.set()
        self._wake()
        self._thread.join(timeout.total_seconds())
        if self._agent is not None and detach:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._agent.wait(max(0.0, deadline - awake_s()))
        if self._agent is not None and self._agent.poll() is None:
            # It lives on, on purpose; Popen would warn of a forgotten child.
            _outliving.add(self._agent.pid)
            self._agent.returncode = 0
        with self._wake_lock:
            if not self._thread.is_alive():  # else it may still look at them
                self._news.close()

    def _wake(self) -> None:
        # Whoever asks for something may be late: the descriptor may be another file's by then.
        with self._wake_lock:
            self._news.wake()

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        failures = short_lived = 0
        while not self._given_up.is_set():
            try:
                channel = self._connect()
            except PeerError as error:
                failures += 1
                self._request_queue.give_up_waiting()
                self._lost(str(error))
            else:
                if channel is None:
                    return
                began = awake_s()
                try:
                    self._converse(channel)
                    return
                except PeerError as error:
                    self._lost(f"the checkpoint agent (process {channel.pid}) was lost: {error}")
                finally:
                    self.agent_pid = 0
                    self._attached.clear()
                    channel.close()
                # One that an agent ends each time is no better than none.
                short_lived = 0 if awake_s() - began >= _LIVED_S else short_lived + 1
                failures = max(short_lived - 1, 0)
            if self._agent is not None:
                self._agent.poll()
            self._given_up.wait(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])

    def _lost(self, why: str) -> None:
        self.losses += 1
        logger.error("%s", why)
        self._request_queue.start_over(self._on_lost(why, self._request_queue.unreported), why)

    def _connect(self) -> Channel | None:
        """Attached to an agent, started if need be; None when closing.

        Raises:
            PeerError: none answered in time, or it refused this rank.
        """
        deadline = awake_s() + self._options.start.total_seconds()
        self._said.clear()
        while not self._given_up.is_set():
            try:
                channel = connect(self._directory)
            except ConfigError as error:
                raise PeerError(str(error)) from error
            if channel is not None and self._introduce(channel, deadline):
                return channel
            if channel is None and self._starts:
                self._start_agent()
            if awake_s() >= deadline:
                raise PeerError(
                    f"no checkpoint agent answered within {self._options.start.total_seconds():g} s.",
                    hint="Its log is on the standard error of the first rank of this host.",
                )
            # Nobody can be told of another process's socket: look.
            self._given_up.wait(_LOOK_S)
        return None

    def _introduce(self, channel: Channel, deadline: float) -> bool:
        """Attach; False if this agent was just leaving, or this rank is.

        Raises:
            PeerError: it does not want this rank, or does not answer.
        """
        left_s = max(0.0, deadline - awake_s())
        try:
            channel.send(self._attach)
            answer = None
            until = awake_s() + min(left_s, self._options.silence.total_seconds())
            while not isinstance(answer, Attached | RequestRefused) and awake_s() < until:
                if self._given_up.is_set():
                    channel.close()
                    return False
                left_s = until - awake_s()
                answer = channel.receive(timedelta(seconds=min(max(0.01, left_s), HEARTBEAT_S)))
        except PeerError:
            channel.close()
            return False
        if isinstance(answer, Attached):
            self.agent_pid, self.peer_port = channel.pid, answer.peer_port
            self._attached.set()
            self._starts_of_agents.attached()
            return True
        if isinstance(answer, RequestRefused):
            why = f"refused this rank: {answer.reason}"
        else:
            why = "does not answer."
            self._kill(channel)
        channel.close()
        raise PeerError(f"the checkpoint agent (process {channel.pid}) {why}")

    def _start_agent(self) -> None:
        if self._agent is not None:
            if self._agent.poll() is None:
                return
            pause_s = self._starts_of_agents.ended(self._agent.pid)
            if pause_s is not None:
                logger.info(
                    "checkpoint agent %d ended with exit code %d; another is started in %.1f s",
                    *(self._agent.pid, self._agent.returncode, pause_s),
                )
        if not self._starts_of_agents.is_due():
            return
        if self._host and self._launcher_starts_it():
            return
        argv = [sys.executable, "-m", "resiliency.checkpoint.agent.main"]
        argv += ["--arena", str(self._directory), "--grace-s", str(self._options.grace.total_seconds())]
        # A session of its own: signals for the trainer's group are not for the agent.
        try:
            self._agent = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            )
            self._starts_of_agents.began(self._agent.pid)
        except OSError as error:
            if error.errno not in SHORTAGES:
                raise PeerError(f"the checkpoint agent cannot be started: {error}.") from error
            # It may pass, and there may be an agent that this process cannot connect to for want of the same.
            self._warn_once(f"the checkpoint agent cannot be started for now: {error}")

    def _warn_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            logger.warning("%s", text)

    def _launcher_starts_it(self) -> bool:
        """Ask the launcher, whose agents outlive a restart of its workers and have torch imported already."""
        try:
            answer = self._ask_host()
        except (PeerError, ConfigError) as error:
            answer = RequestRefused(reason=str(error))
        if isinstance(answer, Started):
            self._starts_of_agents.began(answer.pid)
            return True
        if self._given_up.is_set():
            return True
        why = answer.reason if isinstance(answer, RequestRefused) else "it does not answer"
        self._warn_once(f"the launcher starts no checkpoint agent, so this rank does: {why}")
        if isinstance(answer, RequestRefused):
            self._host = ""  # one that could not be reached may be asked for the next agent
        return False

    def _ask_host(self) -> Message | None:
        channel = connect_to("\0" + self._host)
        if channel is None:
            return None
        try:
            channel.send(Start(arena=str(self._directory.absolute())))
            deadline = awake_s() + self._options.start.total_seconds()
            answer = None
            # It may still import torch.
            while answer is None and awake_s() < deadline and not self._given_up.is_set():
                answer = channel.receive(timedelta(seconds=HEARTBEAT_S))
            return answer
        finally:
            channel.close()

    def _converse(self, channel: Channel) -> None:
        heard = beaten = awake_s()
        if self._request_queue.cap_lifted:
            channel.send(LiftBandwidthCap())
        while True:
            closing = self._closing.is_set()  # before the last look: the goodbye was put before that was set
            self._pass_on(channel)
            if closing:
                return
            ready = _readable(channel.fileno(), self._news.fileno(), timeout_s=HEARTBEAT_S / 2)
            self._news.clear()
            now = awake_s()
            if channel.fileno() in ready:
                message = channel.receive(_AT_ONCE)
                heard = now
                if isinstance(message, Done):
                    if message.attempt_id == self._attach.attempt_id:
                        self._request_queue.reported(message)
                        self._on_done(message)
                elif isinstance(message, Copies):
                    if message.attempt_id == self._attach.attempt_id:
                        self._on_copies(message)
                elif isinstance(message, RepairDone):
                    if message.attempt_id == self._attach.attempt_id:
                        self._request_queue.repair_reported(message)
                elif message is not None and not isinstance(message, Heartbeat | Attached):
                    raise PeerError(f"{message.kind} is not for a trainer.")
            if now - heard > self._options.silence.total_seconds():
                self._kill(channel)
                raise PeerError(f"it said nothing for {now - heard:.0f} s.")
            if now - beaten > HEARTBEAT_S:
                beaten = now
                channel.send(Heartbeat())

    def _pass_on(self, channel: Channel) -> None:
        while (request := self._request_queue.first()) is not None:
            channel.send(request)  # one that did not get there is for the next agent
            self._request_queue.passed_on()

    def _kill(self, channel: Channel) -> None:
        """End a hung agent.  It is the one at the other end of the socket: its id is not reused yet."""
        if not self._starts:
            return
        logger.error("the checkpoint agent (process %d) hangs: it is killed", channel.pid)
        try:
            fd = os.pidfd_open(channel.pid)
        except OSError as error:  # it has ended, or there is no descriptor left: then the next try does it
            logger.warning("it is not killed: %s", error)
            return
        with contextlib.suppress(ProcessLookupError):
            try:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
                _readable(fd, timeout_s=5.0)
            finally:
                os.close(fd)


#: Agents that outlived the link which started them: children of this process still.
_outliving: set[int] = set()


def reap_agents() -> bool:
    """Take the exit codes of agents that outlived their link and have ended since: each costs a place in the
    process table until then.  Each new link does so; never blocks.

    Returns:
        True if none is left.
    """
    for pid in tuple(_outliving):
        with contextlib.suppress(ChildProcessError):  # other code of this process was first
            if os.waitpid(pid, os.WNOHANG)[0] == 0:
                continue
        _outliving.discard(pid)
    return not _outliving


class _Starts:
    """When an agent may be started: at once after one that served for a while, else after growing pauses."""

    def __init__(self) -> None:
        self._pid = 0
        self._attached_at: float | None = None
        self._due_at = self._pause_s = 0.0

    def is_due(self) -> bool:
        return awake_s() >= self._due_at

    def began(self, pid: int) -> None:
        """An agent is there; of another one than before nobody said that it had ended."""
        if pid == self._pid:
            return
        if self._pid:
            self.ended(self._pid)
        self._pid, self._attached_at = pid, None

    def attached(self) -> None:
        """It takes this rank."""
        self._attached_at = awake_s()

    def ended(self, pid: int) -> float | None:
        """How long to wait for the next; None if that was said before."""
        if pid != self._pid:
            return None
        self._pid = 0
        now = awake_s()
        lived = self._attached_at is not None and now - self._attached_at >= _LIVED_S
        self._pause_s = 0.0 if lived else min(max(2 * self._pause_s, _RESTART_S), _LONGEST_RESTART_S)
        self._due_at = now + self._pause_s
        return self._pause_s


def _readable(*fds: int, timeout_s: float) -> set[int]:
    """Those of `fds` that can be read or have ended; `select` refuses numbers above 1023, which occur."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(timeout_s * 1000)}
