# SPDX-License-Identifier: Apache-2.0
"""A handle on a rendezvous store that outlives its connection, and the loss of the store's contents.

torch's `TCPStore` client keeps the socket that it has: once the serving process has ended, every call fails
with "Broken pipe", also when another process serves the port again.  This handle opens another connection,
and puts back what this launcher needs in the store before any other call goes through it:

- keys that this launcher wrote under its current prefix (each key has one writer, so writing twice is safe);
- the shared value, which all launchers change by `compare_set`: the newest that any of them has seen wins.

So the process that serves the store may be killed and started again with nothing in it.  A call has a
deadline even where the machine of the store vanished without a word: calls run in a thread of the
connection, because torch's client may wait for a reply without limit.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as CallTimeout
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from resiliency.errors import ControlPlaneError
from resiliency.runtime import awake_s

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Key and values that tell launchers how long a store lives: as long as a launcher, or on its own.
SERVED_BY, BY_PROCESS, BY_LAUNCHER = "resiliency/served_by", "process", "launcher"
#: Longest time for one call on a connection; then the connection is given up.
CALL_S = 5.0
#: Longest time for one attempt to connect again, and to put back what the launchers need, in calls.
ATTEMPT_CALLS = 3
#: Longest time for a launcher to learn by whom the store is served; the serving process says so as it starts.
SERVED_BY_S = 2.0
#: Pause between two attempts to connect; small, because launchers count each other as dead after 15 s.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 1.0
#: Pause between two looks for a key that another launcher is to write.
FIRST_LOOK_S, LONGEST_LOOK_S = 0.01, 0.5


class StoreUnreachable(ControlPlaneError, RuntimeError):
    """The rendezvous store did not answer in time.  Also a RuntimeError, as what torch's stores raise."""


class SharedValue(Protocol):
    """How to put the value of one key back into a store that has lost it."""

    key: str
    #: What the key holds before any launcher wrote it.
    initial: str

    def revive(self, value: bytes) -> str:
        """`value` as it should be after an outage."""
        ...

    def is_newer(self, mine: bytes, theirs: bytes) -> bool:
        """Whether `mine` is of a later moment of the job than `theirs`."""
        ...


def is_served_by_process(store: Any, *, serves: bool) -> bool:
    """Whether the store outlives launchers.  `serves`: this launcher may be the one that serves it."""
    if not isinstance(store, TCPStore):
        return False
    if serves:
        return bool(store.compare_set(SERVED_BY, "", BY_LAUNCHER) == BY_PROCESS.encode())
    deadline = awake_s() + SERVED_BY_S
    while not store.check([SERVED_BY]):
        if awake_s() > deadline:
            return False  # served by another program: as NVRx's launcher would use it
        threading.Event().wait(FIRST_LOOK_S)
    return bool(store.get(SERVED_BY) == BY_PROCESS.encode())


class _Connection:
    """The calls of one connection wait here for its thread."""

    def __init__(self) -> None:
        self.ready = False
        self.tasks: queue.SimpleQueue[tuple[Callable[[Any], Any], Future[Any]] | None] = queue.SimpleQueue()

    def call(self, function: Callable[[Any], T]) -> T:
        future: Future[T] = Future()
        self.tasks.put((function, future))
        until = awake_s() + CALL_S
        while True:
            try:
                return future.result(max(until - awake_s(), 0.0))
            except CallTimeout:
                if future.done():
                    return future.result()
                if awake_s() >= until:
                    raise


class ReconnectingStore:
    """What a launcher calls of a store, over as many connections as it takes.

    Args:
        first: a connection that is open already.
        shared: the value that all launchers change.
        wait: how long a call waits for a store that is away.
    """

    def __init__(
        self, host: str, port: int, *, first: TCPStore, shared: SharedValue, wait: timedelta
    ) -> None:
        self._place = (host, port)
        self._first: TCPStore | None = first
        self._shared = shared
        wait_s = wait.total_seconds()
        self._wait_s: ContextVar[float] = ContextVar("wait_s", default=wait_s)
        self._seen: bytes | None = None
        self._published: dict[str, str | bytes] = {}
        self._closed = threading.Event()
        self._changed = threading.Condition()
        self._connection = self._start_connection()

    @property
    def address(self) -> str:
        return "{}:{}".format(*self._place)

    @property
    def away(self) -> bool:
        """No connection is open at present."""
        return not self._connection.ready

    @contextmanager
    def wait_at_most(self, seconds: float) -> Iterator[None]:
        """Within, calls of this thread wait at most `seconds` for a store that is away."""
        token = self._wait_s.set(seconds)
        try:
            yield
        finally:
            self._wait_s.reset(token)

    def close(self) -> None:
        """Drop the connection; calls fail from here on."""
        self._closed.set()
        with self._changed:
            self._connection.ready = False
            self._connection.tasks.put(None)
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        """The value of `key`; the shared value at once, another key once it is there.

        Raises:
            StoreUnreachable: the store was away for longer than this thread's patience.
        """
        if key != self._shared.key:
            return self.multi_get([key], self._wait_s.get())[0]
        value: bytes = self.call(lambda store: store.get(key))
        self._seen = value
        return value

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set `key` to `desired` if it holds `expected`; returns what it holds afterwards.

        Raises:
            StoreUnreachable: as `get`.
        """
        value: bytes = self.call(lambda store: store.compare_set(key, expected, desired))
        if key == self._shared.key:
            self._seen = value
        return value

    def multi_get(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        """The values of `keys`, once all of them are there.

        Raises:
            StoreUnreachable: as `get`; or keys are missing after `timeout_s`.
        """
        deadline, pause = awake_s() + timeout_s, FIRST_LOOK_S
        wanted = list(keys)

        def look(store: Any) -> list[bytes] | None:
            # In one task: on this connection the store cannot have lost what it has just shown.
            return store.multi_get(wanted) if store.check(wanted) else None

        while (values := self.call(look)) is None:
            if awake_s() > deadline or self._closed.wait(pause):
                raise StoreUnreachable(
                    f"{', '.join(wanted[:3])}{'...' if wanted[3:] else ''} did not come into the rendezvous "
                    f"store at {self.address} within {timeout_s:g} s: its launcher has not written it.",
                    address=self.address,
                )
            pause = min(pause * 1.5, LONGEST_LOOK_S)
        return values

    def publish(self, key: str, value: str | bytes) -> None:
        """Write `key`, whose only writer this launcher is; after a loss it is written again.

        Raises:
            StoreUnreachable: as `get`.
        """
        with self._changed:
            self._published[key] = value
        self.call(lambda store: store.set(key, value))

    def begin_prefix(self, prefix: str) -> PrefixedStore:
        """The store as one rendezvous uses it; what was published for the one before is let go."""
        with self._changed:
            self._published = {
                key: value for key, value in self._published.items() if key.startswith(f"{prefix}/")
            }
        return PrefixedStore(self, prefix)

    def call(self, function: Callable[[Any], T]) -> T:
        """`function` of the store; what it reads does not count as seen, so it is not put back after a loss.

        Args:
            function: may run more than once, where the store goes away meanwhile.
        Raises:
            StoreUnreachable: as `get`.
        """
        deadline = awake_s() + self._wait_s.get()
        while True:
            connection = self._wait_for_connection(deadline)
            try:
                return connection.call(function)
            except RuntimeError as error:  # torch's, of a connection that is gone
                self._give_up(connection, str(error).partition("\n")[0])
            except CallTimeout:
                self._give_up(connection, f"it did not answer within {CALL_S:g} s")

    def _wait_for_connection(self, deadline: float) -> _Connection:
        with self._changed:
            while not self._connection.ready:
                left = deadline - awake_s()
                if self._closed.is_set() or left <= 0:
                    raise StoreUnreachable(
                        f"the rendezvous store at {self.address} is away.",
                        hint="Start it again at this address; see docs/supervisor.md.",
                        address=self.address,
                    )
                self._changed.wait(left)
            return self._connection

    def _give_up(self, connection: _Connection, why: str) -> None:
        with self._changed:
            if self._connection is not connection or self._closed.is_set():
                return
            logger.warning(
                "rendezvous store at %s is away: %s; ranks go on, restarts wait for it", self.address, why
            )
            connection.tasks.put(None)
            self._connection = self._start_connection()

    def _start_connection(self) -> _Connection:
        connection = _Connection()
        # A daemon: it may be stuck in native code for as long as the network lets it.
        threading.Thread(target=self._serve, args=(connection,), name="rendezvous-store", daemon=True).start()
        return connection

    def _serve(self, connection: _Connection) -> None:
        began, store = awake_s(), self._first
        self._first = None
        if store is None and (store := self._connect()) is not None:
            logger.info("rendezvous store at %s is back after %.1f s", self.address, awake_s() - began)
        if store is None:
            return
        with self._changed:
            connection.ready = not self._closed.is_set()
            self._changed.notify_all()
        while (task := connection.tasks.get()) is not None:
            function, future = task
            try:
                future.set_result(function(store))
            except Exception as error:
                future.set_exception(error)

    def _connect(self) -> TCPStore | None:
        """A connection through which all of this launcher's keys are there; None once this is closed."""
        pause, said = FIRST_PAUSE_S, False
        while not self._closed.wait(pause):
            pause = min(pause * 2, LONGEST_PAUSE_S)
            try:
                return self._attempt()
            except (OSError, RuntimeError) as error:
                logger.debug("rendezvous store at %s: %s", self.address, error)
            except Exception as error:
                # Of what lies in the store, say.  Without this thread nobody would try again.
                if not said:
                    logger.warning(
                        "rendezvous store at %s cannot be used: %s; trying again each second",
                        *(self.address, f"{type(error).__name__}: {error}"),
                    )
                said = True
        return None

    def _attempt(self) -> TCPStore:
        """Connect and put back.  In a thread of its own, which is left behind where it takes too long.

        Where the store's process is frozen its kernel still accepts, and torch's client waits for a reply;
        where the machine then vanishes, it waits for ever.  Few threads are left so: a kernel accepts no more
        than its backlog holds.
        """
        future: Future[TCPStore] = Future()
        threading.Thread(
            target=self._try_to_connect, args=(future,), name="rendezvous-store-connect", daemon=True
        ).start()
        limit_s = ATTEMPT_CALLS * CALL_S
        try:
            return future.result(limit_s)
        except CallTimeout:
            if future.cancel():
                raise ConnectionError(f"no answer within {limit_s:g} s") from None
            return future.result()  # what it came to in this moment, or a TimeoutError of its own
        finally:
            del future  # its error has this frame, which would keep connections open

    def _try_to_connect(self, future: Future[TCPStore]) -> None:
        with suppress(InvalidStateError):  # it was left behind
            try:
                # First without torch, which would say on standard error that nothing listens.
                socket.create_connection(self._place, timeout=CALL_S).close()
                store = TCPStore(*self._place, is_master=False, timeout=timedelta(seconds=CALL_S))
                if not future.cancelled():
                    self._restore(store)
            except Exception as error:
                future.set_exception(error.with_traceback(None))  # the frames of which hold the connection
            else:
                future.set_result(store)

    def _restore(self, store: Any) -> None:
        with self._changed:
            published = dict(self._published)
        for key, value in published.items():
            store.set(key, value)
        key, mine = self._shared.key, self._seen
        if mine is None or mine == self._shared.initial.encode():
            store.compare_set(key, "", self._shared.initial)
            return
        revived = self._shared.revive(mine)
        found = store.compare_set(key, "", revived)
        while found != revived.encode() and (
            found == self._shared.initial.encode() or self._shared.is_newer(mine, found)
        ):
            found = store.compare_set(key, found.decode(), revived)


class PrefixedStore:
    """The part of torch's Store that NVRx's agent calls, for the keys of one rendezvous."""

    def __init__(self, store: ReconnectingStore, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._timeout = timedelta(minutes=5)

    def set_timeout(self, timeout: timedelta) -> None:
        """For keys that other launchers are to write."""
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        self._store.publish(f"{self._prefix}/{key}", value)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._store.multi_get([f"{self._prefix}/{key}" for key in keys], self._timeout.total_seconds())

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Until other launchers have written `keys`."""
        self._store.multi_get([f"{self._prefix}/{key}" for key in keys], timeout.total_seconds())
