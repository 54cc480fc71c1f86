# SPDX-License-Identifier: Apache-2.0
"""Where launchers and programs of this host report to the daemon: lines of JSON on the loopback interface.

`resiliency.daemon_link` is the other end and describes the lines.  A connection must come from this
machine, and either from root or the daemon's own user, or with the token, where the daemon has one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from resiliency.daemon_link import ADDRESS, LOCAL_PROTOCOL, MAX_LINE_BYTES
from resiliency.errors import ConfigError
from resiliency.tasks import end_tasks, wait_for
from supervisor.daemon.workers import HostWorkers, Reporter
from supervisor.plain import InvalidValue, from_report
from supervisor.protocol.host_commands import HostCommand
from supervisor.transport.errors import Reason, Refused
from supervisor.transport.limits import RateLimit
from supervisor.transport.security import TokenFile
from supervisor.values import Outcome, WorkloadInfo

logger = logging.getLogger(__name__)

#: A connection that has not said hello by then is closed.
HELLO_TIMEOUT_S = 5.0
#: Lines of one reporter: one at each change and one a second.
LINES_PER_S, LINES_BURST = 50.0, 200
#: Connections at once: one launcher, or a program for each worker, and some that are about to end.
MOST_CONNECTIONS = 2048


class LocalServer:
    """Listens for reporters and keeps their table.

    Args:
        changed: called after each change of the table.
        token: that reporters must bring; None: their user decides.
    """

    def __init__(
        self, workers: HostWorkers, *, changed: Callable[[], None], token: TokenFile | None = None
    ) -> None:
        self._workers = workers
        self._changed = changed
        self._token = token
        self._writers: dict[str, asyncio.StreamWriter] = {}
        #: Commands without an outcome, and the connection that each went to.
        self._pending: dict[str, tuple[asyncio.StreamWriter, asyncio.Future[Outcome]]] = {}
        self._connections: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def serve(self, port: int) -> AsyncIterator[int]:
        """Listen within the context; yields the port.

        Raises:
            ConfigError: the port cannot be opened.
        """
        try:
            server = await asyncio.start_server(
                self._accept, ADDRESS, port, limit=MAX_LINE_BYTES, reuse_address=True
            )
        except OSError as error:
            raise ConfigError(
                f"--launcher_port: cannot listen at {ADDRESS}:{port}: {error.strerror}.",
                hint="Another host daemon may run on this host.",
                flag="--launcher_port",
            ) from error
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            await end_tasks(self._connections)

    async def execute(self, command: HostCommand) -> Outcome:
        """Hand `command` to the launcher and wait for its outcome.

        Raises:
            Refused: there is no launcher to take it, or it is gone before its outcome came.
            asyncio.TimeoutError: no outcome by the command's deadline.
        """
        key = self._workers.launcher_key()
        writer = self._writers.get(key) if key else None
        if writer is None:
            raise Refused(
                "no launcher with --use-supervisor is connected to this host.", reason=Reason.INVALID
            )
        future = asyncio.get_running_loop().create_future()
        self._pending[command.id] = writer, future
        try:
            _send(writer, {"command": command.to_dict()})
            return await wait_for(future, command.deadline_s)
        finally:
            del self._pending[command.id]

    def tell_domains(self) -> None:
        """The place of this host has changed: for the ranks that launchers start from now on."""
        for writer in self._writers.values():
            with suppress(OSError):
                _send(writer, {"domains": self._domains()})

    def _domains(self) -> str:
        return ",".join(self._workers.host.domains)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._connections) >= MOST_CONNECTIONS:
            writer.close()
            return
        self._connections.add(task)
        try:
            await self._talk(reader, writer)
        except (Refused, InvalidValue) as error:
            logger.warning("reporter %s refused: %s", writer.get_extra_info("peername"), error)
            with suppress(OSError):
                _send(writer, {"refused": str(error)})
                await wait_for(writer.drain(), 1.0)
        except (OSError, ValueError, asyncio.TimeoutError, asyncio.IncompleteReadError) as error:
            logger.info("reporter %s dropped: %s", writer.get_extra_info("peername"), error)
        except asyncio.CancelledError:
            pass  # the daemon ends
        finally:
            self._connections.discard(task)
            writer.close()
            self._fail_pending(writer)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = await wait_for(_read(reader), HELLO_TIMEOUT_S)
        if hello is None:
            return
        key, reporter = self._check_hello(hello.get("hello"), writer)
        self._writers[key] = writer
        logger.info(
            "%s of %s connected as process %s",
            reporter.kind,
            reporter.workload.workload,
            hello["hello"].get("pid"),
        )
        ended = False
        try:
            _send(writer, {"welcome": {"protocol": LOCAL_PROTOCOL, "domains": self._domains()}})
            self._changed()
            rate = RateLimit(per_s=LINES_PER_S, burst=LINES_BURST)
            while not ended and (message := await _read(reader)) is not None:
                rate.spend(reporter.kind)
                ended = self._take(reporter, message, writer)
        finally:
            if self._writers.get(key) is writer:
                del self._writers[key]
                self._workers.leave(reporter, ended=ended)
                logger.info(
                    "%s of %s %s",
                    reporter.kind,
                    reporter.workload.workload,
                    "ended" if ended else "disconnected without a detach",
                )
                self._changed()

    def _fail_pending(self, writer: asyncio.StreamWriter) -> None:
        """No outcome comes over a connection that has ended."""
        for used, future in self._pending.values():
            if used is writer and not future.done():
                text = (
                    "the launcher disconnected before its outcome came; the command may have had its effect."
                )
                future.set_exception(Refused(text, reason=Reason.INVALID))

    def _check_hello(self, hello: Any, writer: asyncio.StreamWriter) -> tuple[str, Reporter]:
        if not isinstance(hello, dict):
            raise Refused("the first line must be a hello.", reason=Reason.INVALID)
        self._check_identity(hello.get("token"), writer)
        if hello.get("protocol") != LOCAL_PROTOCOL:
            raise Refused(
                f"the program speaks protocol {hello.get('protocol')!r:.20}, this daemon speaks "
                f"{LOCAL_PROTOCOL}; install the same release for both.",
                reason=Reason.VERSION,
            )
        key = hello.get("key")
        if not isinstance(key, str) or not 1 <= len(key) <= 64:
            raise Refused("a hello must carry a key of 1 to 64 characters.", reason=Reason.INVALID)
        workload = from_report(WorkloadInfo, hello.get("workload"))
        return key, self._workers.join(key, str(hello.get("kind")), workload)

    def _check_identity(self, token: Any, writer: asyncio.StreamWriter) -> None:
        if self._token is not None:
            if not isinstance(token, str) or not token or not self._token.accepts(token):
                raise Refused(
                    "the token is not one that this daemon accepts.",
                    hint="Name the daemon's --launcher_token_file in GCP_HOST_DAEMON_TOKEN_FILE.",
                    reason=Reason.IDENTITY,
                )
            return
        user = _user_of(writer.get_extra_info("socket"))
        if user not in (0, os.geteuid()):
            raise Refused(
                f"the program runs as user {'unknown' if user is None else user}, and this daemon listens to "
                f"root and user {os.geteuid()} only.",
                hint="Give the daemon --launcher_token_file, and programs GCP_HOST_DAEMON_TOKEN_FILE.",
                reason=Reason.IDENTITY,
            )

    def _take(self, reporter: Reporter, message: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        """Act on one line; whether it was the detach message."""
        if isinstance(report := message.get("report"), dict):
            before = _news(reporter)
            self._workers.update(reporter, report)
            sequence = report.get("sequence")
            if isinstance(sequence, int):
                _send(writer, {"ack": sequence})
            if before != _news(reporter):
                self._changed()
        elif "outcome" in message:
            outcome = from_report(Outcome, message["outcome"])
            _, future = self._pending.get(outcome.command, (None, None))
            if future is not None and not future.done():
                future.set_result(outcome)
        elif message.get("detach") is True:
            return True
        else:
            raise Refused("a line must be a report, an outcome or a detach.", reason=Reason.INVALID)
        return False


def _news(reporter: Reporter) -> tuple[object, ...]:
    """What the sensor is told at once where it changes; of steps, the first of an attempt."""
    steps = any(worker.step is not None for worker in reporter.workers)
    states = [(worker.local_rank, worker.global_rank, worker.state) for worker in reporter.workers]
    diagnoses = [found.evidence.id for found in reporter.diagnoses]
    known = reporter.condition
    pace = (known.still_s is None, known.phase, known.ranks, known.requeue) if known is not None else None
    return reporter.workload.run, reporter.attempt, reporter.launcher, states, steps, diagnoses, pace


async def _read(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """The next line; None at the end of the connection."""
    line = await reader.readline()
    if not line.endswith(b"\n"):
        return None
    message = json.loads(line)
    if not isinstance(message, dict):
        raise Refused("a line must hold one JSON object.", reason=Reason.INVALID)
    return message


def _send(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    transport = writer.transport
    if transport.get_write_buffer_size() > MAX_LINE_BYTES:
        raise OSError("it does not read what it is sent")
    writer.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")


def _user_of(connection: socket.socket) -> int | None:
    """The user at the other end of a loopback connection, as the kernel's table says."""
    host, port = connection.getpeername()[:2]
    wanted = f"{int.from_bytes(socket.inet_aton(host), 'little'):08X}:{port:04X}"
    try:
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            words = line.split()
            if words[1] == wanted and words[3] in ("01", "02"):
                return int(words[7])
    except (OSError, ValueError, IndexError):
        pass
    return None
