# SPDX-License-Identifier: Apache-2.0
"""Applies the requests of workers to a book, each one once, however often it arrives.

A worker numbers its requests and has one on its way at a time. The answer to its last request that changed
the book is kept, so a request that comes again, because a connection or the server was lost in between, gets
that answer and changes nothing. Requests that changed the book are what the journal holds: applied again in
the same order, they make the same book and the same answers.

A worker is a name and a *life*, a text that each process draws for itself. A new life frees what the one
before held; an old one that wakes up again is refused.

The standard library only; no clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

from resiliency.data.dispatch.book import Answer, Book, PoisonPolicy, StaleRange
from resiliency.data.dispatch.ranges import Plain, RangeSource, SampleRange
from resiliency.data.progress import check_whole
from resiliency.errors import ConfigError, ResiliencyError


class Bookkeeper:
    """A book, and the last answer to each worker."""

    def __init__(self, book: Book) -> None:
        self.book = book
        #: Worker -> life, number of its last request that changed the book, and the answer.
        self._workers: dict[str, tuple[str, int, Plain]] = {}
        self._requests: dict[str, Callable[[Mapping[str, object]], Plain]] = {
            "join": self._join,
            "leave": self._leave,
            "silent": self._silent,
            "grant": self._grant,
            "done": self._done,
            "failed": self._failed,
            "give_back": self._give_back,
            "commit": self._commit,
            "rollback": self._rollback,
            "rollback_to": self._rollback_to,
            "extend": self._extend,
        }

    @property
    def workers(self) -> list[str]:
        """Names of all that joined and did not leave."""
        return list(self._workers)

    def is_worker(self, worker: str, life: str) -> bool:
        """Whether this process is the one of that name."""
        return worker in self._workers and self._workers[worker][0] == life

    def apply(self, request: Mapping[str, object]) -> tuple[Plain, bool]:
        """The answer to a request, and whether the book changed.

        A request that is refused, or is none, is answered with `error`, `text` and `hint`, and changes
        nothing.
        """
        try:
            handle = self._requests.get(str(request.get("op")))
            if handle is None:
                raise ConfigError(f"there is no request {request.get('op')!r}.")
            if handle == self._silent:
                return handle(request), True
            if handle == self._join:
                before = self.book.attempt, self._workers.get(_text(request, "worker"))
                answer = handle(request)
                return answer, before != (self.book.attempt, self._workers[_text(request, "worker")])
            worker, seq = self._check_life(request), check_whole("seq", request.get("seq"))
            life, last, answer = self._workers[worker]
            if seq < last:
                raise ConfigError(f"request {seq} of worker {worker!r} comes after request {last}.")
            if seq == last:
                return answer, False
            answer = handle(request)
            if answer.get("answer") in (Answer.WAIT.value, Answer.END.value):
                return answer, False
            if worker in self._workers:
                self._workers[worker] = (life, seq, answer)
            return answer, True
        except ResiliencyError as error:
            return refusal(error), False

    def to_plain(self) -> Plain:
        workers = {worker: list(entry) for worker, entry in self._workers.items()}
        return {"book": self.book.to_plain(), "workers": workers}

    @classmethod
    def of_plain(cls, plain: Mapping[str, object], source: RangeSource, policy: PoisonPolicy) -> Bookkeeper:
        """Raises ConfigError: it is the book of another source."""
        keeper = cls(Book.of_plain(cast(Plain, plain["book"]), source, policy))
        for worker, (life, seq, answer) in cast("dict[str, list[object]]", plain["workers"]).items():
            keeper._workers[worker] = (cast(str, life), cast(int, seq), cast(Plain, answer))
        return keeper

    def _join(self, request: Mapping[str, object]) -> Plain:
        worker, life = _text(request, "worker"), _text(request, "life")
        attempt = check_whole("attempt", request.get("attempt"))
        known = self._workers.get(worker)
        if known is not None and known[0] != life and request.get("again") and attempt <= self.book.attempt:
            raise _replaced(worker)
        self.book.new_attempt(attempt)
        if known is None or known[0] != life:
            self.book.leave(worker)
            self._workers[worker] = (life, -1, {})
        return {"answer": "welcome"}

    def _leave(self, request: Mapping[str, object]) -> Plain:
        self.book.leave(_text(request, "worker"))
        del self._workers[_text(request, "worker")]
        return {"answer": "ok"}

    def _silent(self, request: Mapping[str, object]) -> Plain:
        """The server's own: the worker may go on, but not with what it held."""
        self.book.leave(_text(request, "worker"))
        return {"answer": "ok"}

    def _grant(self, request: Mapping[str, object]) -> Plain:
        found = self.book.grant(_text(request, "worker"), _attempt(request))
        if isinstance(found, Answer):
            return {"answer": found.value, "skipped": len(self.book.skipped)}
        return {"answer": "range", "range": found.to_plain()}

    def _done(self, request: Mapping[str, object]) -> Plain:
        step = request.get("step")
        self.book.done(*_held(request), step=None if step is None else check_whole("step", step))
        return {"answer": "ok"}

    def _failed(self, request: Mapping[str, object]) -> Plain:
        self.book.failed(*_held(request), _text(request, "reason"))
        return {"answer": "ok"}

    def _give_back(self, request: Mapping[str, object]) -> Plain:
        self.book.give_back(*_held(request))
        return {"answer": "ok"}

    def _commit(self, request: Mapping[str, object]) -> Plain:
        state = self.book.commit(check_whole("step", request.get("step")), _attempt(request))
        return {"answer": "ok", "state": state}

    def _rollback(self, request: Mapping[str, object]) -> Plain:
        state = request.get("state")
        if state is not None and not isinstance(state, Mapping):
            raise ConfigError(f"the state of the book of ranges is a {type(state).__name__}, and no mapping.")
        self.book.rollback(_attempt(request), state, _text(request, "worker"))
        return {"answer": "ok"}

    def _rollback_to(self, request: Mapping[str, object]) -> Plain:
        step = check_whole("step", request.get("step"))
        self.book.rollback_to(_attempt(request), step, _text(request, "worker"))
        return {"answer": "ok"}

    def _extend(self, request: Mapping[str, object]) -> Plain:
        stops = request.get("stops")
        if not isinstance(stops, Mapping) or not all(isinstance(name, str) for name in stops):
            raise ConfigError(f"stops is {stops!r}; it must name partitions and how far they reach.")
        self.book.extend(stops, closed=bool(request.get("closed")))
        return {"answer": "ok"}

    def _check_life(self, request: Mapping[str, object]) -> str:
        worker = _text(request, "worker")
        if worker not in self._workers:
            raise StaleRange(f"worker {worker!r} has not joined.", worker=worker)
        if self._workers[worker][0] != request.get("life"):
            raise _replaced(worker)
        return worker


def refusal(error: ResiliencyError) -> Plain:
    """An error as an answer."""
    return {"error": type(error).__name__, "text": error.message, "hint": error.hint}


def _replaced(worker: str) -> StaleRange:
    return StaleRange(
        f"another process is worker {worker!r} now.", hint="This one was replaced; end it.", worker=worker
    )


def _held(request: Mapping[str, object]) -> tuple[str, int, SampleRange]:
    return _text(request, "worker"), _attempt(request), SampleRange.of_plain(request.get("range"))


def _attempt(request: Mapping[str, object]) -> int:
    return check_whole("attempt", request.get("attempt"))


def _text(request: Mapping[str, object], name: str) -> str:
    value = request.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= 4096:
        raise ConfigError(f"{name} is {value!r}; it must be a text of at most 4096 characters.")
    return value
