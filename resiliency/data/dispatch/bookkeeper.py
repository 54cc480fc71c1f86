# SPDX-License-Identifier: Apache-2.0
"""Applies the requests of workers to a book, each one once, however often it arrives.

A worker numbers its requests and has one on its way at a time. The answer to its last request that changed
the book is kept, so a request that comes again, because a connection or the server was lost in between, gets
that answer and changes nothing. Requests that changed the book are what the journal holds: applied again in
the same order, they make the same book and the same answers.

A worker is a name and a *life*, a text that each process draws for itself. A new life frees what the one
before held; an old one that wakes up again is refused. A life that passes no attempt gets the number of the
book, see `Book.attempt_for`.

The standard library only; no clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, KeysView, Mapping
from dataclasses import astuple, dataclass, replace
from typing import cast

from resiliency.data.dispatch.book import Answer, Book, StaleRange
from resiliency.data.dispatch.failures import PoisonPolicy
from resiliency.data.dispatch.ranges import Plain, RangeSource, SampleRange
from resiliency.data.progress import check_whole
from resiliency.errors import ConfigError, ResiliencyError

#: Numbers of attempts are less, when they come from outside: the server counts on from them.
ATTEMPTS = 2**32


@dataclass(frozen=True)
class _Worker:
    life: str
    attempt: int
    #: Whether the number is the server's.
    is_counted: bool
    #: Number of its last request that changed the book, and the answer.
    seq: int = -1
    answer: Plain | None = None


class Bookkeeper:
    """A book, and the last answer to each worker."""

    def __init__(self, book: Book) -> None:
        self.book = book
        #: Worker -> what came back that it had used, until `take_returned`.
        self._returned: dict[str, list[SampleRange]] = {}
        self._workers: dict[str, _Worker] = {}
        self._requests: dict[str, Callable[[Mapping[str, object]], Plain]] = {
            "join": self._join,
            "leave": self._leave,
            "silent": self._silent,
            "idle": self._idle,
            "grant": self._grant,
            "done": self._done,
            "finish": self._finish,
            "failed": self._failed,
            "give_back": self._give_back,
            "drop": self._drop,
            "commit": self._commit,
            "rollback": self._rollback,
            "rollback_to": self._rollback_to,
            "extend": self._extend,
        }

    @property
    def workers(self) -> KeysView[str]:
        """Names of all that joined and did not leave."""
        return self._workers.keys()

    def is_worker(self, worker: str, life: str) -> bool:
        """Whether this process is the one of that name."""
        return worker in self._workers and self._workers[worker].life == life

    def take_returned(self) -> dict[str, list[SampleRange]]:
        """Worker that was lost -> what it had used and came back, since this was asked last."""
        returned, self._returned = self._returned, {}
        return returned

    def apply(self, request: Mapping[str, object]) -> tuple[Plain, Plain | None]:
        """The answer to a request, and what is to be written into the journal; None: the book did not change.

        A request that is refused, or is none, is answered with `error`, `text` and `hint`, and changes
        nothing.
        """
        try:
            handle = self._requests.get(str(request.get("op")))
            if handle is None:
                raise ConfigError(f"there is no request {request.get('op')!r}.")
            if handle in (self._silent, self._idle):
                return handle(request), dict(request)
            if handle == self._join:
                before = self.book.attempt, self._workers.get(_text(request, "worker"))
                answer = handle(request)
                has_changed = before != (self.book.attempt, self._workers[_text(request, "worker")])
                return answer, dict(request) if has_changed else None
            worker, seq = self._check_life(request), check_whole("seq", request.get("seq"))
            known = self._workers[worker]
            if seq < known.seq:
                raise ConfigError(f"request {seq} of worker {worker!r} comes after request {known.seq}.")
            if seq == known.seq:
                return self._with_state(cast(Plain, known.answer)), None
            entry = self._shortened(request)
            answer = handle(request)
            if answer.get("answer") in (Answer.WAIT.value, Answer.END.value):
                return answer, None
            if worker in self._workers:
                self._workers[worker] = replace(self._workers[worker], seq=seq, answer=answer)
            return self._with_state(answer), entry
        except ResiliencyError as error:
            return refusal(error), None

    def to_plain(self) -> Plain:
        workers = {worker: list(astuple(known)) for worker, known in self._workers.items()}
        return {"book": self.book.to_plain(), "workers": workers}

    @classmethod
    def of_plain(cls, plain: Mapping[str, object], source: RangeSource, policy: PoisonPolicy) -> Bookkeeper:
        """Raises ConfigError: it is the book of another source."""
        keeper = cls(Book.of_plain(cast(Plain, plain["book"]), source, policy))
        workers = cast("dict[str, tuple[str, int, bool, int, Plain | None]]", plain["workers"])
        keeper._workers = {worker: _Worker(*known) for worker, known in workers.items()}
        return keeper

    def _with_state(self, answer: Plain) -> Plain:
        """The answer of a commit, which is kept without the state: one for each worker would be many."""
        if "state_of" not in answer:
            return answer
        return {"answer": "ok", "state": self.book.state_of(cast(int, answer["state_of"]))}

    def _shortened(self, request: Mapping[str, object]) -> Plain:
        """The same request without a state that the book has: each rank names that of its checkpoint."""
        state = request.get("state")
        if request["op"] == "rollback" and isinstance(state, Mapping) and self.book.has_state(state):
            kept = {name: value for name, value in request.items() if name != "state"}
            return {**kept, "op": "rollback_to", "step": state["step"]}
        return dict(request)

    def _join(self, request: Mapping[str, object]) -> Plain:
        worker, life = _text(request, "worker"), _text(request, "life")
        wanted = request.get("attempt")
        number = None if wanted is None else check_whole("attempt", wanted)
        if number is not None and number >= ATTEMPTS:
            raise ConfigError(f"attempt is {number}; it must be less than {ATTEMPTS}.")
        known = self._workers.get(worker)
        is_new = known is None or known.life != life
        if known and is_new and request.get("again") and (number is None or number <= self.book.attempt):
            raise _replaced(worker)
        if known is not None and not is_new:
            number = known.attempt
        elif number is None:
            number = self.book.attempt_for(worker)
        self.book.new_attempt(number, f"worker {worker!r} joined again")
        if is_new:
            self._note_returned(worker, self.book.join(worker))
            self._workers[worker] = _Worker(life, number, wanted is None)
        return {"answer": "welcome", "attempt": number}

    def _leave(self, request: Mapping[str, object]) -> Plain:
        worker, is_finished = _text(request, "worker"), bool(request.get("finished"))
        self._note_returned(worker, self.book.leave(worker, is_finished=is_finished))
        del self._workers[worker]
        return {"answer": "ok"}

    def _silent(self, request: Mapping[str, object]) -> Plain:
        """The server's own: the worker may go on, but not with what it held or used."""
        worker = _text(request, "worker")
        if worker in self._workers:
            self._note_returned(worker, self.book.fall_silent(worker))
        return {"answer": "ok"}

    def _idle(self, request: Mapping[str, object]) -> Plain:
        """The server's own: the worker holds nothing, and asks for nothing."""
        self.book.failures.remove_reader(_text(request, "worker"))
        return {"answer": "ok"}

    def _note_returned(self, worker: str, returned: list[SampleRange]) -> None:
        if returned:
            self._returned[worker] = returned

    def _grant(self, request: Mapping[str, object]) -> Plain:
        found = self.book.grant(_text(request, "worker"), self._attempt(request))
        if isinstance(found, Answer):
            return {"answer": found.value, "skipped": len(self.book.skipped)}
        return {"answer": "range", "range": found.to_plain()}

    def _done(self, request: Mapping[str, object]) -> Plain:
        step = request.get("step")
        self.book.done(*self._held(request), step=None if step is None else check_whole("step", step))
        return {"answer": "ok"}

    def _finish(self, request: Mapping[str, object]) -> Plain:
        worker = _text(request, "worker")
        self.book.finish_step(worker, self._attempt(request), check_whole("step", request.get("step")))
        return {"answer": "ok", "over": self.book.used.over, "on": self.book.used.over_on}

    def _failed(self, request: Mapping[str, object]) -> Plain:
        self.book.failed(*self._held(request), _text(request, "reason"))
        return {"answer": "ok"}

    def _give_back(self, request: Mapping[str, object]) -> Plain:
        self.book.give_back(*self._held(request))
        return {"answer": "ok"}

    def _drop(self, request: Mapping[str, object]) -> Plain:
        self.book.drop(*self._held(request))
        return {"answer": "ok"}

    def _commit(self, request: Mapping[str, object]) -> Plain:
        step = check_whole("step", request.get("step"))
        if waiting := self.book.unfinished(step, self._attempt(request)):
            return {"answer": Answer.WAIT.value, "workers": waiting[:10]}
        self.book.commit(step, self._attempt(request), _text(request, "worker"))
        return {"answer": "ok", "state_of": step}

    def _rollback(self, request: Mapping[str, object]) -> Plain:
        state = request.get("state")
        if state is not None and not isinstance(state, Mapping):
            raise ConfigError(f"the state of the book of ranges is a {type(state).__name__}, and no mapping.")
        return self._go_back(_text(request, "worker"), state)

    def _rollback_to(self, request: Mapping[str, object]) -> Plain:
        step = check_whole("step", request.get("step"))
        return self._go_back(_text(request, "worker"), self.book.state_of(step))

    def _go_back(self, worker: str, state: Mapping[str, object] | None) -> Plain:
        known = self._workers[worker]
        attempt = self.book.attempt_for_rollback(state, worker) if known.is_counted else known.attempt
        self._note_returned(worker, self.book.rollback(attempt, state, worker))
        self._workers[worker] = replace(known, attempt=attempt)
        return {"answer": "ok", "attempt": attempt}

    def _extend(self, request: Mapping[str, object]) -> Plain:
        stops = request.get("stops")
        if not isinstance(stops, Mapping) or not all(isinstance(name, str) for name in stops):
            raise ConfigError(f"stops is {stops!r}; it must name partitions and how far they reach.")
        self.book.extend(stops, closed=bool(request.get("closed")))
        return {"answer": "ok"}

    def _attempt(self, request: Mapping[str, object]) -> int:
        return self._workers[_text(request, "worker")].attempt

    def _held(self, request: Mapping[str, object]) -> tuple[str, int, SampleRange]:
        part = SampleRange.of_plain(request.get("range"))
        return _text(request, "worker"), self._attempt(request), part

    def _check_life(self, request: Mapping[str, object]) -> str:
        worker = _text(request, "worker")
        if worker not in self._workers:
            raise StaleRange(f"worker {worker!r} has not joined.", worker=worker)
        if self._workers[worker].life != request.get("life"):
            raise _replaced(worker)
        return worker


def refusal(error: ResiliencyError) -> Plain:
    """An error as an answer."""
    return {"error": type(error).__name__, "text": error.message, "hint": error.hint}


def _replaced(worker: str) -> StaleRange:
    return StaleRange(
        f"another process is worker {worker!r} now.", hint="This one was replaced; end it.", worker=worker
    )


def _text(request: Mapping[str, object], name: str) -> str:
    value = request.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= 4096:
        raise ConfigError(f"{name} is {value!r}; it must be a text of at most 4096 characters.")
    return value
