# SPDX-License-Identifier: Apache-2.0
"""A worker's side of the data server.

    with DataClient(address, f"rank{rank}", token=token) as client:
        for part in client.ranges():
            process(part)
            client.done(part)

Each call has a deadline and outlives the loss of a connection and of the server: it asks again until the
deadline, and a request that arrives twice takes effect once. The end of the data is an answer of the server;
a server that is missing, or that lost its book, is an error.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from types import TracebackType
from typing import BinaryIO, cast

from resiliency.data.dispatch.book import Answer, StaleRange
from resiliency.data.dispatch.failures import BrokenWorker, PoisonedRange
from resiliency.data.dispatch.ranges import Plain, SampleRange
from resiliency.data.dispatch.wire import (
    DOOR,
    HOLD,
    LINE_BYTES,
    NAME_CHARS,
    VERSION,
    check_token,
    decoded,
    encoded,
    proof_of,
    too_long,
)
from resiliency.data.progress import check_whole
from resiliency.errors import ConfigError, DataError, PeerError, ResiliencyError
from resiliency.runtime import awake_s

log = logging.getLogger(__name__)

#: Errors that the server names.
_ERRORS: dict[str, type[ResiliencyError]] = {
    error.__name__: error for error in (ConfigError, DataError, StaleRange, PoisonedRange, BrokenWorker)
}
#: They free what the worker holds: a range that is not delivered yet as well.
_ROLLBACKS = ("rollback", "rollback_to")
#: Between two attempts to reach the server.
_PAUSE_S = 0.2
#: For one answer, before the connection is given up; a server may hold a request for a range.
_TRY_S = (HOLD + DOOR).total_seconds()
#: For the request to leave at the end.
_LEAVE_S = 2.0


class DataClient:
    """Ranges for one worker. Calls may come from any thread, one at a time.

    Args:
        address: host and port of the server.
        worker: a name that no other worker has; a process that takes it over frees what the one before held.
        token: that of the server.
        attempt: of the job; a higher one frees at once what the attempts before it held. None: the server
            numbers them. A process with the name of one that was in the attempt frees what that one held, and
            begins the next attempt if the model of other workers went on without it. Replicas that restart
            alone and get their model from others pass one number for the whole job instead.
        timeout: how long a call tries to reach the server.
        max_wait: how long `next_range` waits for a range while other workers hold the last ones.
    Raises:
        PeerError: there is no server within `timeout`.
        ConfigError: the token is wrong, or a value is.
        StaleRange: the attempt is over.
    """

    def __init__(
        self,
        address: tuple[str, int],
        worker: str,
        *,
        token: str,
        attempt: int | None = None,
        timeout: timedelta = timedelta(minutes=2),
        max_wait: timedelta = timedelta(hours=2),
    ) -> None:
        check_token(token)
        if not isinstance(worker, str) or not 0 < len(worker) <= NAME_CHARS:
            raise ConfigError(f"the worker is {worker!r}; it must be a name of 1 to {NAME_CHARS} characters.")
        if attempt is not None:
            check_whole("attempt", attempt)
        self.worker = worker
        self._timeout_s, self._max_wait_s = timeout.total_seconds(), max_wait.total_seconds()
        #: Longest time in which the server holds a request: its answer comes within the timeout.
        self._hold_s = min(HOLD.total_seconds(), self._timeout_s / 2)
        #: The step of which this worker spoke last, or that it restored; -1: of none.
        self.step = -1
        self._requests = _ServerConnection(address, token, worker, attempt, secrets.token_hex(8))
        self._lock = threading.Lock()
        self._seq = 0
        #: The last request, if a lost server or an interrupt left it without an answer.
        self._unanswered: Plain | None = None
        #: A range that is this worker's and that no caller got, as its call was interrupted.
        self._undelivered: Plain | None = None
        #: Ranges that were left out so far, by the policy of the server or as the rest of a loader, as of the
        #: last answer that said so.
        self.skipped = 0
        #: Whether the last answer to a request for a range was that the data end.
        self._is_at_end = False
        self._ended = threading.Event()
        welcome = self._retried(self._requests.join)
        #: What the server's source is made of, such as the size and the order of its samples.
        self.source: Plain = cast(Plain, welcome["source"])
        #: The number of this attempt.
        self.attempt = cast(int, welcome["attempt"])
        self._lease_s = cast(float, welcome["lease_s"])
        self._heartbeats = threading.Thread(
            target=self._send_heartbeats, name=f"data-client-{worker}", daemon=True
        )
        self._heartbeats.start()

    def ranges(self) -> Iterator[SampleRange]:
        """Ranges until the data end; say `done` of each."""
        while (part := self.next_range()) is not None:
            yield part

    def next_range(self) -> SampleRange | None:
        """A range that is this worker's now; None: the server says that the data end.

        Raises:
            DataError: other workers held the last ranges for longer than `max_wait`, or the server lost its
                book.
            PoisonedRange: a range failed too often.
            BrokenWorker: others used the ranges that this worker failed.
            StaleRange: the attempt is over, or another process has this worker's name.
            PeerError: there is no server.
        """
        deadline = awake_s() + self._max_wait_s
        while True:
            found = self._grant(hold_s=max(0.0, deadline - awake_s()))
            if found is not Answer.WAIT:
                return found if isinstance(found, SampleRange) else None
            if awake_s() > deadline:
                raise DataError(
                    f"no range within {self._max_wait_s:g} s: other workers hold the last ones, or no more "
                    "were added.",
                    hint="Their processes may hang. Pass a longer max_wait if they are slow.",
                )

    def try_next_range(self) -> SampleRange | Answer:
        """The same, without waiting for other workers."""
        return self._grant(hold_s=0.0)

    def done(self, part: SampleRange, step: int | None = None) -> None:
        """This worker used a range, or the first part of one: it counts, with `step` once that is committed.

        Say it before the collective that ends the step. It also says that the steps before are over for this
        worker.

        Raises:
            StaleRange: the range is not this worker's any more: what was made of it must not count.
            ConfigError: the step is over for another worker, or committed.
        """
        self._ask("done", range=part.to_plain(), step=step)
        if step is not None:
            self.step = max(self.step, step)

    def failed(self, part: SampleRange, reason: str) -> None:
        """This worker could not use a range: another one tries it, until the policy of the server takes
        effect."""
        self._ask("failed", range=part.to_plain(), reason=reason[:1000] or "no reason")

    def give_back(self, part: SampleRange) -> None:
        """This worker will not use what is left of a range."""
        self._ask("give_back", range=part.to_plain())

    def drop(self, part: SampleRange) -> None:
        """Leave out what is left of a range, as a loader with `drop_last` does; it counts as skipped."""
        self._ask("drop", range=part.to_plain())

    def finish_step(self, step: int) -> None:
        """The collective that ends a step is over on this worker; `commit` says so too, and `done` with a
        later step.

        A worker that leaves the commit to another one says it right after each collective: before its `done`
        it may wait for a range that the worker holds which waits for it in `commit`.

        Raises:
            StaleRange: this worker was silent for too long, and its steps may come back.
        """
        self._finish(step)

    def _finish(self, step: int) -> Plain:
        answer = self._ask("finish", step=step)
        self.step = max(self.step, step)
        return answer

    def commit(
        self, step: int, *, timeout: timedelta = timedelta(minutes=10), is_last: bool = False
    ) -> Plain:
        """Plain values for the checkpoint of a step; the same on each rank that asks. See `Book.commit`.

        Say it after the collective that ends the step. It waits until the step is over on each worker that
        used ranges in it: what a worker used that is lost before is in no model for sure, and is free again.

        Args:
            is_last: refuse it where a later step is over on any worker.
        Raises:
            DataError: workers did not say within `timeout` that the step is over; the text names them.
            StaleRange: this worker was silent for too long, and its steps may come back.
            ConfigError: a later step was committed, or is over; or the state is too large for a message.
        """
        said = self._finish(step)
        if is_last and cast(int, said["over"]) > step:
            raise ConfigError(
                f"step {step} is the last one of which worker {self.worker!r} spoke, and step "
                f"{said['over']} is over on worker {said['on']!r}.",
                hint="In a step without samples say sampler.advance(0, step=n), or client.finish_step(n) "
                "after its collective.",
            )
        deadline = awake_s() + timeout.total_seconds()
        while True:
            left_s = max(0.0, deadline - awake_s())
            answer = self._ask("commit", step=step, hold_s=min(left_s, self._hold_s))
            if answer["answer"] != Answer.WAIT.value:
                break
            if awake_s() > deadline:
                raise DataError(
                    f"step {step} cannot be committed: workers {answer['workers']} used ranges in it, and "
                    f"did not say within {timeout.total_seconds():g} s that it is over.",
                    hint="All ranks commit right after the collective, or say finish_step before they ask "
                    "for their next range; or they hang.",
                    step=step,
                )
        state = cast(Plain, answer["state"])
        if self._is_at_end and state["free"]:
            log.warning(
                "ranges came back after the end of the data, as a worker was lost in its last step: %s; "
                "ask for them with next_range, and commit again",
                *(state["free"],),
            )
        return state

    def rollback(self, state: Mapping[str, object] | None) -> None:
        """Say where the model of this attempt is: the state in its checkpoint, or None if it starts from
        scratch. All ranks may say it. See `Book.rollback`."""
        self._go_back(self._ask("rollback", state=state), -1 if state is None else state["step"])

    def rollback_to(self, step: int) -> None:
        """`rollback` to a step whose state the server keeps; see `Book.rollback_to`."""
        self._go_back(self._ask("rollback_to", step=step), step)

    def _go_back(self, answer: Plain, step: object) -> None:
        self.attempt, self.step = cast(int, answer["attempt"]), cast(int, step)
        self._undelivered, self._is_at_end = None, False

    def extend(self, stops: Mapping[str, int], *, closed: bool = False) -> None:
        """Partitions reach so far now; `closed`: nothing will be added."""
        self._ask("extend", stops=dict(stops), closed=closed)

    def close(self) -> None:
        """Leave: what this worker holds is free at once, if the server can be reached.

        At the end of a `with` block without an error, the steps in which it used ranges count as over.
        """
        self._leave(is_finished=False)

    def _leave(self, *, is_finished: bool) -> None:
        if self._ended.is_set():
            return
        self._ended.set()
        deadline = awake_s() + _LEAVE_S
        if self._lock.acquire(timeout=_LEAVE_S):  # else the heartbeats try to reach a server that is away
            try:
                self._requests.join(deadline)
                message = {"op": "leave", "seq": self._seq + 1, "finished": is_finished}
                self._requests.exchange(message, deadline)
            except (OSError, ResiliencyError) as error:
                log.debug("worker %s could not leave: %r", self.worker, error)
            finally:
                self._requests.close()
                self._lock.release()
        self._heartbeats.join(2 * _TRY_S)

    def __enter__(self) -> DataClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(is_finished=kind is None)

    def _grant(self, *, hold_s: float) -> SampleRange | Answer:
        undelivered, self._undelivered = self._undelivered, None
        answer = undelivered or self._ask("grant", hold_s=min(hold_s, self._hold_s))
        self.skipped = cast(int, answer.get("skipped", self.skipped))
        self._is_at_end = answer["answer"] == Answer.END.value
        if answer["answer"] == "range":
            return SampleRange.of_plain(answer["range"])
        return Answer(answer["answer"])

    def _ask(self, op: str, **fields: object) -> Plain:
        with self._lock:
            if self._ended.is_set():
                raise ConfigError("the client is closed.")
            wanted = {"op": op, **fields, "hold_s": None}
            if wanted != self._unanswered:  # else it may have arrived: it comes again, and takes effect once
                if self._unanswered and self._unanswered["op"] == "grant" and op not in _ROLLBACKS:
                    self._keep_granted()
                self._seq += 1
            self._unanswered = wanted
            return self._answered({"op": op, "seq": self._seq, **fields})

    def _keep_granted(self) -> None:
        """A grant that was interrupted may have got a range, which nobody would use or give back."""
        with contextlib.suppress(ConfigError, DataError):  # then it got none
            answer = self._answered({"op": "grant", "seq": self._seq, "hold_s": 0.0})
            self._undelivered = answer if answer["answer"] == "range" else None

    def _answered(self, request: Plain) -> Plain:
        def ask(deadline: float) -> Plain:
            self._requests.join(deadline)
            try:
                return self._requests.exchange(request, deadline)
            except ResiliencyError:  # which is an answer
                self._unanswered = None
                raise

        answer = self._retried(ask)
        self._unanswered = None
        return answer

    def _retried(self, ask: Callable[[float], Plain]) -> Plain:
        """What `ask` returns, called with a deadline, until the server answers."""
        deadline = awake_s() + self._timeout_s
        while True:
            try:
                return ask(min(deadline, awake_s() + _TRY_S))
            except OSError as error:
                self._requests.close()
                if awake_s() + _PAUSE_S > deadline:
                    raise PeerError(
                        f"no answer from the data server at {self._requests.address} within "
                        f"{self._timeout_s:g} s: {error!r}",
                        hint="Start it again on its journal; what was answered is in it.",
                    ) from error
                log.info("data server lost: %r; asking again", error)
                self._ended.wait(_PAUSE_S)

    def _send_heartbeats(self) -> None:
        """Says that this process lives, whatever its other threads wait for."""
        while not self._ended.wait(self._lease_s / 3):
            if self._requests.send_heartbeat():
                continue
            # No thread asks for anything now, or it connects again by itself.
            if self._lock.acquire(blocking=False):
                try:
                    if not self._ended.is_set():
                        self._requests.close()
                        self._requests.join(awake_s() + min(_TRY_S, self._lease_s / 3))
                except OSError as error:
                    log.debug("worker %s could not say that it lives: %r", self.worker, error)
                except ResiliencyError as error:
                    log.warning("worker %s stops saying that it lives: %s", self.worker, error)
                    return
                finally:
                    self._lock.release()


class _ServerConnection:
    """A connection that is made when it is needed. One thread at a time asks; another one may send heartbeats
    meanwhile."""

    def __init__(
        self, address: tuple[str, int], token: str, worker: str, attempt: int | None, life: str
    ) -> None:
        self.address = address
        self._token, self._worker, self._attempt, self._life = token, worker, attempt, life
        self._socket: socket.socket | None = None
        self._lines: BinaryIO | None = None
        self._welcome: Plain = {}
        #: Whether the server knows this process, on this connection.
        self._is_in = False
        self._sending = threading.Lock()

    def join(self, deadline: float) -> Plain:
        """Be connected; returns what the server said first.

        Raises:
            OSError: there is no server.
            DataError: it has another book than the one that this worker joined.
            StaleRange: another process has this name, or the attempt is over.
        """
        if self._socket is not None:
            return self._welcome
        self._socket = socket.create_connection(self.address, timeout=_left(deadline))
        try:
            self._welcome = self._greet(self._socket, deadline)
            self._is_in = True
        except BaseException:
            self.close()
            raise
        return self._welcome

    def _greet(self, connection: socket.socket, deadline: float) -> Plain:
        if connection.getsockname() == connection.getpeername():
            raise ConnectionError("no server listens: the kernel connected the socket to itself")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lines = connection.makefile("rb")
        greeting = self._receive(deadline)
        if greeting.get("version") != VERSION:
            raise ConfigError(
                f"the data server at {self.address} speaks version {greeting.get('version')!r}, and this "
                f"release {VERSION}."
            )
        identity = {"worker": self._worker, "life": self._life, "attempt": self._attempt}
        proof = proof_of(self._token, str(greeting.get("nonce")), self._worker, self._life)
        message = {"op": "join", "again": bool(self._welcome), "proof": proof, **identity}
        welcome = self.exchange(message, deadline)
        if self._welcome and welcome["book"] != self._welcome["book"]:
            raise DataError(
                f"the data server at {self.address} has another book of ranges than before: it lost its "
                "journal, and with it what was used.",
                hint="Start it on its journal, or begin a new attempt with the state in a checkpoint.",
            )
        return welcome

    def exchange(self, message: Mapping[str, object], deadline: float) -> Plain:
        """The answer to a message.

        Raises:
            OSError: there is none; the connection is of no more use.
            ResiliencyError: the server refused it.
        """
        assert self._socket is not None
        line = encoded(message)
        if len(line) > LINE_BYTES:
            raise too_long(f"the request {message['op']!r}", line)
        try:
            self._socket.settimeout(_left(deadline))
            with self._sending:
                self._socket.sendall(line)
            answer = self._receive(deadline)
        except BaseException:  # such as Ctrl-C: the answer may still come, and is not the next request's
            self.close()
            raise
        if "error" in answer:
            kind = _ERRORS.get(str(answer["error"]), DataError)
            raise kind(str(answer.get("text")), hint=str(answer.get("hint")), worker=self._worker)
        return answer

    def send_heartbeat(self) -> bool:
        """Whether it was sent; else the connection, if there is one, is of no more use."""
        with self._sending:
            if self._socket is None or not self._is_in:
                return False
            try:
                self._socket.sendall(encoded({"op": "heartbeat"}))
            except OSError:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)  # a thread that waits for an answer tries again
                return False
        return True

    def close(self) -> None:
        with self._sending:
            self._is_in = False
            for part in (self._lines, self._socket):
                if part is not None:
                    with contextlib.suppress(OSError):
                        part.close()
            self._lines = self._socket = None

    def _receive(self, deadline: float) -> Plain:
        assert self._socket is not None
        assert self._lines is not None
        self._socket.settimeout(_left(deadline))
        line = self._lines.readline(LINE_BYTES)
        if not line.endswith(b"\n"):
            raise ConnectionError("the server closed the connection")
        return decoded(line)


def _left(deadline: float) -> float:
    if (left := deadline - awake_s()) <= 0:
        raise TimeoutError("the data server did not answer in time")
    return left
