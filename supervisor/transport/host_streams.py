# SPDX-License-Identifier: Apache-2.0
"""The streams of hosts, as the sensor and the actuator hold them: handshake, one stream a host, door checks.

    host:    Hello ----------------> checked: protocol, name, not a duplicate
    server:  <--------------- Welcome
    host:    HostInfo, WorkloadInfo, DaemonReport, Outcome, ... until one side ends

A host that connects again with the same incarnation replaces its own stream; another daemon with the name
of a living one is refused, because the two would report over each other.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any, Protocol

from resiliency import __version__
from resiliency.tasks import end_tasks, wait_for
from supervisor.protocol import PROTOCOL_VERSION, fleet_pb2
from supervisor.protocol.convert import from_message, to_message
from supervisor.protocol.host_commands import HostCommand
from supervisor.transport.errors import Reason, Refused
from supervisor.transport.limits import RateLimit, check_epoch
from supervisor.transport.server import ServerStream
from supervisor.values import DaemonReport, HostFacts, HostInfo, Outcome, Value, WorkloadInfo

logger = logging.getLogger(__name__)

#: A caller that has not said who it is by then is cut off.
HANDSHAKE_S = 10.0
#: Messages of one host: a report at each change, at most ten a second, and a periodic one.
MESSAGES_PER_S, MESSAGES_BURST = 50.0, 200
#: Orders that a host has not read; one more, and its stream ends.
MOST_UNREAD_ORDERS = 256

_KINDS: dict[str, type[Value]] = {
    "host": HostInfo,
    "workload": WorkloadInfo,
    "report": DaemonReport,
    "outcome": Outcome,
}


class HostListener(Protocol):
    """What the owner of the streams does; each returns at once."""

    def host_connected(self, host: HostInfo, incarnation: str) -> None: ...

    def host_message(self, host: str, value: Value) -> None:
        """`value` is a HostInfo, WorkloadInfo, DaemonReport or Outcome of the host with this name."""
        ...

    def host_lost(self, host: str, incarnation: str) -> None:
        """Its stream has ended, and no other one has replaced it."""
        ...


@dataclass(eq=False)
class _Entry:
    incarnation: str
    #: Set to end the stream from our side.
    end: asyncio.Future[Refused]
    orders: asyncio.Queue[Any] = field(default_factory=lambda: asyncio.Queue(MOST_UNREAD_ORDERS))
    replaced: bool = False

    def close(self, reason: Reason, why: str) -> None:
        if not self.end.done():
            self.end.set_result(Refused(why, reason=reason))


class HostStreams:
    """All streams of hosts of one process.

    Args:
        part: name of this process in sentences, "sensor" or "actuator".
        report_period_s: how often hosts report when nothing changes.
    """

    def __init__(self, *, part: str, report_period_s: float, listener: HostListener) -> None:
        self._part = part
        self._report_period_s = report_period_s
        self._listener = listener
        self._entries: dict[str, _Entry] = {}

    @property
    def hosts(self) -> dict[str, str]:
        """Name of each connected host: the incarnation of its daemon."""
        return {name: entry.incarnation for name, entry in self._entries.items()}

    def try_send_command(self, host: str, command: HostCommand) -> bool:
        """Queue `command` for `host`; False when the host is not connected."""
        return self._order(host, fleet_pb2.HostOrder(command=to_message(command)))

    def try_send_facts(self, host: str, facts: HostFacts) -> bool:
        """Queue `facts` for `host`; False when the host is not connected."""
        return self._order(host, fleet_pb2.HostOrder(facts=to_message(facts)))

    def try_ask_resend(self, host: str) -> bool:
        """Ask `host` for all that it knows; False when it is not connected."""
        return self._order(host, fleet_pb2.HostOrder(resend=True))

    def _order(self, host: str, order: Any) -> bool:
        entry = self._entries.get(host)
        if entry is None:
            return False
        try:
            entry.orders.put_nowait(order)
        except asyncio.QueueFull:
            logger.warning("host %s dropped: it has not read %d orders", host, MOST_UNREAD_ORDERS)
            entry.close(Reason.RATE, f"this host has not read {MOST_UNREAD_ORDERS} orders.")
            return False
        return True

    async def connect(self, stream: ServerStream) -> None:
        """The handler of `Connect`: one host, from its Hello to the end of its stream."""
        hello = await self._read_hello(stream)
        host = from_message(HostInfo, hello.host)
        _check_identity(stream, host)
        entry = self._register(host.name, hello.incarnation)
        sender: asyncio.Task[None] | None = None
        reader: asyncio.Task[None] | None = None
        try:
            welcome = fleet_pb2.Welcome(
                protocol=PROTOCOL_VERSION, release=__version__, report_period_s=self._report_period_s
            )
            await stream.send(fleet_pb2.HostOrder(welcome=welcome))
            logger.info("host %s connected from %s", host.name, stream.peer)
            self._listener.host_connected(host, entry.incarnation)
            sender = asyncio.create_task(self._send_orders(stream, entry))
            reader = asyncio.create_task(self._read_messages(stream, host))
            waits: set[asyncio.Future[Any]] = {sender, reader, entry.end}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if entry.end.done():
                raise entry.end.result()
            if reader.done():
                reader.result()
        finally:
            # gRPC cancels this task when the other side is gone, and may do so twice: what is after an
            # `await` in here may never be run.
            if self._entries.get(host.name) is entry:
                del self._entries[host.name]
            if sender is not None and not entry.replaced:
                logger.info("host %s: its stream ended", host.name)
                self._listener.host_lost(host.name, entry.incarnation)
            await end_tasks(task for task in (sender, reader) if task is not None)

    async def _read_hello(self, stream: ServerStream) -> Any:
        try:
            message = await wait_for(stream.receive(), HANDSHAKE_S)
        except asyncio.TimeoutError:
            message = None
        if message is None or message.WhichOneof("body") != "hello":
            raise Refused(
                f"a host must say hello within {HANDSHAKE_S:g} s and before anything else.",
                reason=Reason.INVALID,
            )
        hello = message.hello
        if hello.protocol != PROTOCOL_VERSION:
            raise Refused(
                f"the daemon of host {hello.host.name[:80]!r} speaks protocol {hello.protocol} (release "
                f"{hello.release[:40]!r}), this {self._part} speaks protocol {PROTOCOL_VERSION} (release "
                f"{__version__!r}).",
                hint="Install the same release on both.",
                reason=Reason.VERSION,
            )
        if not 1 <= len(hello.incarnation) <= 64 or not hello.incarnation.isalnum():
            raise Refused("an incarnation must be 1 to 64 letters and digits.", reason=Reason.INVALID)
        return hello

    def _register(self, name: str, incarnation: str) -> _Entry:
        known = self._entries.get(name)
        if known is not None and known.incarnation != incarnation:
            raise Refused(
                f"host name {name!r} is taken: another daemon with this name is connected to this "
                f"{self._part}.",
                hint="Give each host a name of its own (NODE_NAME), or end the other daemon.",
                reason=Reason.DUPLICATE_HOST,
            )
        if known is not None:
            known.replaced = True
            known.close(Reason.REPLACED, "the same daemon has made another stream.")
        entry = self._entries[name] = _Entry(incarnation, asyncio.get_running_loop().create_future())
        return entry

    async def _read_messages(self, stream: ServerStream, host: HostInfo) -> None:
        name = host.name
        rate = RateLimit(per_s=MESSAGES_PER_S, burst=MESSAGES_BURST)
        while (message := await stream.receive()) is not None:
            rate.spend(f"host {name}")
            body = message.WhichOneof("body")
            kind = _KINDS.get(body)
            if kind is None:
                raise Refused(f"a host must not send {body!r} after its hello.", reason=Reason.INVALID)
            value = from_message(kind, getattr(message, body))
            if isinstance(value, HostInfo) and value.name != name:
                raise Refused(f"host {name!r} calls itself {value.name!r} now.", reason=Reason.INVALID)
            spoken_for = {HostInfo: "id", DaemonReport: "host"}.get(kind)
            if spoken_for is not None and getattr(value, spoken_for) != host.id:
                raise Refused(
                    f"host {host.id!r} speaks for host {getattr(value, spoken_for)!r}: a stream is for one "
                    "host.",
                    reason=Reason.INVALID,
                )
            if isinstance(value, Outcome):
                check_epoch(value.epoch)
            self._listener.host_message(name, value)

    async def _send_orders(self, stream: ServerStream, entry: _Entry) -> None:
        while True:
            await stream.send(await entry.orders.get())


def _check_identity(stream: ServerStream, host: HostInfo) -> None:
    """A host speaks for itself: under the name in its certificate, where one is there, and an id of its own.

    Raises:
        Refused: it does not.
    """
    if not stream.caller.speaks_for(host.name):
        raise Refused(
            f"the certificate is for host {', '.join(sorted(stream.caller.hosts))}, and the daemon calls "
            f"itself {host.name!r}.",
            hint="Give each host its own certificate, and NODE_NAME the name that is in it.",
            reason=Reason.IDENTITY,
        )
    if host.id.rpartition(".")[0] != host.name:
        raise Refused(
            f"the id of host {host.name!r} must be its name, a dot and its boot, found {host.id!r}.",
            reason=Reason.INVALID,
        )
