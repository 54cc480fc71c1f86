# SPDX-License-Identifier: Apache-2.0
"""Entry point of the agent host: starts the checkpoint agents that ranks ask for, and ends them.

A rank that starts its own agent starts a descendant, and a launcher ends the descendants of its
workers at each restart.  Agents that are children of this process, which is a child of the launcher,
are out of reach of that: they wait, with what the ranks captured, until the next attempt is there.

It imports torch once, at low priority while the workers import theirs, and forks: an agent is
there in milliseconds.  It has one thread, opens no device, and holds no state but its children, so
that nothing is in the way of a fork.

Its lifeline is a pipe that launcher and guardian hold.  The kernel closes it when both are gone, in
whatever way, which is after the workers are gone; then, or at SIGTERM, the agents are told to
commit what is captured and to leave.  If this process is killed, the kernel tells them.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import logging
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from resiliency import log
from resiliency.errors import ConfigError, PeerError
from resiliency.runtime import RunInfo, awake_s, elapsed_s
from resiliency.wake_pipe import WakePipe

if TYPE_CHECKING:
    from resiliency.checkpoint.agent.protocol import RequestRefused, Started

#: Not __name__, which is __main__ here.
logger = logging.getLogger("resiliency.launch.agents.main")

_NICENESS = 10
_PR_SET_PDEATHSIG = 1
#: What the kernel may take to end a process that is killed; one in a call of its own may never end.
_DEATH_S = 3.0
#: An agent that fails sooner after its start than this will fail again: the rank shall know.
_TOO_SOON_S = 5.0
_AT_ONCE = timedelta(0)

#: Becomes the agent of an arena in a forked child; returns the exit code.
Serve = Callable[[Path], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until the launcher is gone or says so; the agents end before this does."""
    parser = argparse.ArgumentParser(
        prog="python3 -m resiliency.launch.agents.main",
        description="Start checkpoint agents for ranks; launcher.py starts this.",
    )
    parser.add_argument("--listener-fd", type=int, required=True, metavar="FD")
    parser.add_argument("--lifeline-fd", type=int, required=True, metavar="FD")
    parser.add_argument("--stop-s", type=float, required=True, metavar="SECONDS")
    options = parser.parse_args(argv)
    log.configure(RunInfo.from_env())
    with suppress(OSError):
        os.nice(_NICENESS)  # before the import, which the workers do at the same time
    from resiliency.checkpoint.agent.main import serve

    # As long as the launcher lives there may be another attempt, however long the hosts take to meet.
    starter = Starter(
        socket.socket(fileno=options.listener_fd),
        options.lifeline_fd,
        lambda arena: serve(arena, grace=timedelta.max),
    )
    starter.run()
    starter.end_agents(timedelta(seconds=options.stop_s))
    return 0


class Starter:
    """Owns one agent process per arena.

    Args:
        listener: where ranks ask.
        lifeline_fd: readable once nobody looks after the workers any more.
    """

    def __init__(self, listener: socket.socket, lifeline_fd: int, serve: Serve) -> None:
        self._listener = listener
        self._lifeline_fd = lifeline_fd
        self._serve = serve
        self._agents: dict[int, Path] = {}
        self._started_at: dict[Path, float] = {}
        #: Arenas whose last agent failed at once, and how.
        self._failed: dict[Path, str] = {}
        self._must_end = False
        self._news = WakePipe()
        self._selector = selectors.DefaultSelector()
        for source in (listener, lifeline_fd, self._news):
            self._selector.register(source, selectors.EVENT_READ)
        signal.set_wakeup_fd(self._news.wakeup_fd, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        gc.freeze()  # else collections in the children would copy all that the import made

    def run(self) -> None:
        """Serve until SIGTERM or the end of the lifeline."""
        while not self._must_end:
            for key, _ in self._selector.select():
                source = key.fileobj
                if source is self._listener:
                    self._accept()
                elif source is self._news:
                    self._news.clear()
                    self._reap()
                elif source == self._lifeline_fd:
                    logger.warning("the launcher is gone: its checkpoint agents end")
                    self._must_end = True
                else:
                    self._answer(source)

    def end_agents(self, timeout: timedelta) -> None:
        """SIGTERM to all agents, SIGKILL to those that still commit after `timeout`."""
        self._listener.close()  # who asks now is told by the kernel that there is no host
        for pid in self._agents:
            os.kill(pid, signal.SIGTERM)  # not reaped yet, so the number is theirs
        self._await_agents(timeout.total_seconds())
        for pid in self._agents:
            logger.error("checkpoint agent %d did not end in time and is killed", pid)
            os.kill(pid, signal.SIGKILL)
        self._await_agents(_DEATH_S)
        for pid in self._agents:
            logger.error("checkpoint agent %d does not die: its storage hangs in the kernel", pid)

    def _await_agents(self, timeout_s: float) -> None:
        until = awake_s() + timeout_s
        while self._agents and (left_s := until - awake_s()) > 0:
            for key, _ in self._selector.select(left_s):
                if key.fileobj is self._news:
                    self._news.clear()
                else:
                    self._selector.unregister(key.fileobj)
            self._reap()

    # --- events ----------------------------------------------------------------------------------

    def _on_sigterm(self, *_: object) -> None:
        self._must_end = True

    def _accept(self) -> None:
        from resiliency.checkpoint.agent.protocol import Channel

        connection, _ = self._listener.accept()
        with suppress(ConfigError):  # of another user, and closed
            self._selector.register(Channel(connection), selectors.EVENT_READ)

    def _answer(self, source: object) -> None:
        from resiliency.checkpoint.agent.protocol import Channel, RequestRefused, Start

        assert isinstance(source, Channel)
        try:
            message = source.receive(_AT_ONCE)
            if isinstance(message, Start):
                arena = Path(message.arena)
                self._reap()
                why = self._failed.pop(arena, "")
                source.send(RequestRefused(reason=why) if why else self._start(arena))
        except PeerError:  # has its answer, or is gone
            self._selector.unregister(source)
            source.close()

    def _start(self, arena: Path) -> Started | RequestRefused:
        from resiliency.checkpoint.agent.protocol import RequestRefused, Started

        try:
            return Started(pid=self._agent_of(arena))
        except OSError as error:  # the agents of other arenas live on
            return RequestRefused(reason=f"no process can be started: {error}")

    def _agent_of(self, arena: Path) -> int:
        for pid, served in self._agents.items():
            if served == arena:
                return pid
        self._started_at[arena] = elapsed_s()
        # A SIGTERM to the child waits until the child can act on it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        parent = os.getpid()
        try:
            pid = os.fork()
            if pid == 0:
                self._become_agent(arena, parent)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        self._agents[pid] = arena
        logger.debug("started checkpoint agent %d for %s", pid, arena)
        return pid

    def _become_agent(self, arena: Path, parent: int) -> NoReturn:
        code = 1
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:  # it died before it could be followed
                os._exit(code)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._selector.close()
            self._listener.close()
            os.close(self._lifeline_fd)
            self._news.close()
            code = self._serve(arena)
        except Exception:  # the border of this process
            logger.exception("the checkpoint agent of %s failed", arena)
        finally:
            os._exit(code)

    def _reap(self) -> None:
        for pid in list(self._agents):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            arena = self._agents.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            if code:
                logger.warning("checkpoint agent %d of %s ended with exit code %d", pid, arena, code)
            # Killed is no fault of its own; 2: somebody else was faster.
            if code > 0 and code != 2 and elapsed_s() - self._started_at[arena] < _TOO_SOON_S:
                self._failed[arena] = f"its agent ended at once with exit code {code}"


if __name__ == "__main__":
    sys.exit(main())
