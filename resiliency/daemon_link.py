# SPDX-License-Identifier: Apache-2.0
"""The link from a launcher, or from a program without one, to the host daemon of the supervisor.

One thread holds it and does all its I/O.  The program only says that something changed, which costs a lock
and a byte in a pipe: a daemon that is missing, dead, stopped or full never blocks it.  The link sends **the
newest whole report** and not a queue of changes, so that nothing can pile up, and a reconnection needs no
memory of what was lost.

    program: {"hello": {...}}                  daemon: {"welcome": {...}} or {"refused": "sentence"}
    program: {"report": {...}} at a change,    daemon: {"ack": sequence}
             and each second                   daemon: {"command": {...}}, {"domains": "zone=z"}
    program: {"outcome": {...}}, {"detach": true}

Lines of JSON over TCP on the loopback interface; ages instead of times; standard library only, no gRPC and
no torch, because launchers fork and training programs must not pay for it.
"""

from __future__ import annotations

import json
import logging
import os
import random
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from resiliency.errors import ConfigError
from resiliency.forks import call_in_child
from resiliency.runtime import awake_s
from resiliency.wake_pipe import WakePipe

logger = logging.getLogger(__name__)

LOCAL_PROTOCOL = 1
#: Where the daemon listens for launchers, and its port.
ADDRESS, DEFAULT_PORT = "127.0.0.1", 61000
#: Environment variables of programs that report: the port, and a file with the token that a daemon may ask
#: for.
PORT_ENV, TOKEN_ENV = "GCP_HOST_DAEMON_PORT", "GCP_HOST_DAEMON_TOKEN_FILE"
#: How often the whole job was started before, in all its launchers.  They count attempts from 0 at each such
#: start, and the supervisor must not take those of a new start for messages that are late.
GENERATION_ENV = "RESILIENCY_JOB_GENERATION"
#: Attempts of one generation; in logs 2000001 is attempt 1 of generation 2.
ATTEMPTS = 1_000_000
#: Longest line in either direction.
MAX_LINE_BYTES = 256 << 10

#: A report is sent this often when nothing changes, and at most so often when much does.
REPORT_PERIOD_S, LEAST_PERIOD_S = 1.0, 0.05
#: A daemon that acknowledges nothing for this long is taken for stopped.
SILENCE_S = 5.0
CONNECT_TIMEOUT_S = 2.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 10.0
#: For the last report and the detach message.
CLOSE_TIMEOUT_S = 1.0


class _Outage(Exception):
    """Why the connection is not there any more."""


def read_generation(env: Mapping[str, str]) -> int:
    """What `GENERATION_ENV` says; 0 where it is not set.

    Raises:
        ConfigError: it is no whole number from 0 to a million.
    """
    text = env.get(GENERATION_ENV) or "0"
    if not text.isdecimal() or len(text) > 7:
        raise ConfigError(
            f"{GENERATION_ENV} must be a whole number from 0 on, found {text!r:.40}: how often the whole "
            "job was started before.",
            variable=GENERATION_ENV,
        )
    return int(text)


def to_fleet_attempt(generation: int, attempt: int) -> int:
    """An attempt of a launcher as the supervisor counts."""
    return generation * ATTEMPTS + attempt


def to_launcher_attempt(generation: int, attempt: int | None) -> int | None:
    """The way back; an attempt of an earlier generation is below all attempts of this one."""
    return None if attempt is None else max(-1, attempt - generation * ATTEMPTS)


class DaemonLink:
    """Keeps a daemon informed until it is closed; a context manager.

    Args:
        port: of the daemon on this host.
        hello: who reports: ``kind``, ``workload``, ... (see `supervisor.daemon.local_server`).
        make_report: the newest report; called in the link's thread.
        on_command: called in the link's thread with each command; must return at once and not raise.
        token_file: its first line goes into the hello.
    """

    def __init__(
        self,
        *,
        port: int,
        hello: Mapping[str, object],
        make_report: Callable[[], Mapping[str, object]],
        on_command: Callable[[Mapping[str, Any]], None] | None = None,
        token_file: str = "",
    ) -> None:
        self._port = port
        self._hello = dict(hello)
        self._make_report = make_report
        self._on_command = on_command
        self._token_file = token_file
        self._outcomes: deque[Mapping[str, object]] = deque(maxlen=64)
        self._closing = False
        self._changed = True
        #: Whether the daemon has welcomed this program, and still listens.
        self.connected = False
        #: Failure domains of this host as the daemon last said, such as ``subblock=s,zone=z``.
        self.domains = ""
        #: Set once the daemon has answered, or is known to be missing.
        self.tried = threading.Event()
        self._warned = False
        self._socket: socket.socket | None = None
        self._news = WakePipe()
        call_in_child(self._forget)
        self._thread = threading.Thread(target=self._run, name="daemon-link", daemon=True)
        self._thread.start()

    def report_soon(self) -> None:
        """The report has changed.  Returns at once."""
        self._changed = True
        self._news.wake()

    def send_outcome(self, outcome: Mapping[str, object]) -> None:
        """How a command ended.  Returns at once; of more than 64 unsent ones the oldest are dropped."""
        self._outcomes.append(outcome)
        self._news.wake()

    def close(self) -> None:
        """Send the last report, if the daemon takes it within a second; idempotent."""
        if self._closing:
            return
        self._closing = True
        self._news.wake()
        self._thread.join(CLOSE_TIMEOUT_S + CONNECT_TIMEOUT_S + 1.0)
        if not self._thread.is_alive():
            self._news.close()

    def __enter__(self) -> DaemonLink:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _forget(self) -> None:
        """In a forked child: it must not keep the connection open when its parent is gone."""
        self._closing = True
        if self._socket is not None:
            self._socket.close()
        self._news.close()

    # --------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        pause_s = 0.0
        while not self._closing:
            try:
                self._hold()
            except Exception as error:  # the border of the thread: whatever the daemon says, the job goes on
                if self.connected or not self._warned:
                    self._warned = True
                    logger.warning(
                        "host daemon at port %d: %s; the job goes on without it, trying again with a backoff",
                        self._port,
                        error,
                    )
                if self.connected:
                    pause_s = 0.0
                self.tried.set()
            finally:
                self.connected = False
                if self._socket is not None:
                    self._socket.close()
                    self._socket = None
            if not self._closing:
                pause_s = min(pause_s * 2 or FIRST_PAUSE_S, LONGEST_PAUSE_S)
                end = awake_s() + pause_s * random.uniform(0.5, 1.0)  # noqa: S311 - spread, not secret
                while not self._closing and (left_s := end - awake_s()) > 0:
                    self._wait([], [], left_s)

    def _hold(self) -> None:
        """One connection, until it fails or the link is closed."""
        connection = socket.create_connection((ADDRESS, self._port), CONNECT_TIMEOUT_S)
        self._socket = connection
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = {"protocol": LOCAL_PROTOCOL, "pid": os.getpid(), "token": self._token(), **self._hello}
        out, received = _line({"hello": hello}), b""
        sequence, acknowledged = 0, 0
        last_report = -REPORT_PERIOD_S
        heard = awake_s()
        closing_until = 0.0
        while True:
            now = awake_s()
            if self._closing and not closing_until:
                if not self.connected:
                    return
                closing_until = now + CLOSE_TIMEOUT_S
                out += self._take_outcomes() + self._next_report(sequence) + _line({"detach": True})
            if closing_until and (not out or now >= closing_until):
                return
            if self.connected and not closing_until and not out and acknowledged == sequence:
                out += self._take_outcomes()
                if now >= last_report + (LEAST_PERIOD_S if self._changed else REPORT_PERIOD_S):
                    self._changed = False
                    sequence += 1
                    out += self._next_report(sequence)
                    last_report = now
            next_report = last_report + (LEAST_PERIOD_S if self._changed else REPORT_PERIOD_S)
            due = min(next_report if self.connected else now + 1.0, heard + SILENCE_S)
            readable = self._wait([connection], [connection] if out else [], max(due - now, 0.01))
            if out:
                with suppress(BlockingIOError):
                    out = out[connection.send(out) :]
            if readable:
                data = connection.recv(65536)
                if not data:
                    raise _Outage("it closed the connection")
                heard = awake_s()
                *lines, received = (received + data).split(b"\n")
                for line in lines:
                    acknowledged = max(acknowledged, self._take(json.loads(line)))
                if len(received) > MAX_LINE_BYTES:
                    raise _Outage("it sends a line without an end")
            elif awake_s() - heard > SILENCE_S:
                raise _Outage(f"it has not answered for {SILENCE_S:g} s")

    def _take_outcomes(self) -> bytes:
        lines = b""
        while self._outcomes:
            lines += _line({"outcome": self._outcomes.popleft()})
        return lines

    def _next_report(self, sequence: int) -> bytes:
        return _line({"report": {"sequence": sequence, **self._make_report()}})

    def _take(self, message: Any) -> int:
        """Act on one line; returns the sequence that it acknowledges."""
        if not isinstance(message, dict):
            raise _Outage("it speaks another protocol")
        if "refused" in message:
            raise _Outage(f"it refused this program: {message['refused']}")
        if "welcome" in message:
            self.connected, self._changed = True, True
            self._take_domains(message["welcome"])
            self.tried.set()
            if self._warned:
                logger.info("host daemon at port %d: connected", self._port)
                self._warned = False
        elif "command" in message and self._on_command is not None:
            self._on_command(message["command"])
        self._take_domains(message)
        return int(message.get("ack", 0))

    def _take_domains(self, said: Any) -> None:
        domains = said.get("domains") if isinstance(said, dict) else None
        if isinstance(domains, str):
            self.domains = domains

    def _wait(self, read: list[Any], write: list[Any], timeout_s: float) -> bool:
        """Wait for a socket, a wake-up or the time; whether a socket can be read."""
        # poll, not select: a launcher of many ranks has descriptors beyond 1024.
        poll = select.poll()
        poll.register(self._news, select.POLLIN)
        for item in read:
            poll.register(item, select.POLLIN | (select.POLLOUT if item in write else 0))
        readable = False
        for fd, events in poll.poll(timeout_s * 1000):
            if fd == self._news.fileno():
                self._news.clear()
            else:
                readable |= bool(events & ~select.POLLOUT)
        return readable

    def _token(self) -> str:
        if not self._token_file:
            return ""
        with open(self._token_file) as file:
            return file.readline().strip()


def _line(message: Mapping[str, object]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"
