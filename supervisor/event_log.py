# SPDX-License-Identifier: Apache-2.0
"""The controller's memory: what it took in, what it changed, and so what it meant to do, before it does it.

SQLite with a write-ahead log and `synchronous=FULL`: an append that returned is on the disk.  A record holds
one input and the changes that it made; a command is a row that a change puts into the table of commands, so
an intent is here before its effect, and its outcome is the input that takes the row away again.  A replay
applies changes, and what is left in that table may or may not have happened: it is sent again under the same
id.

One writer: a file lock on one machine, and on top of it an epoch that grows with each opening and is compared
in each append, because a lock of a network file system can be lost without a word.  An epoch that refused a
command of this log (a backup is older than the fleet) is exceeded by the next opening, and not before: a
controller that was deposed must not raise its own.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resiliency.errors import ControlPlaneError
from supervisor.decision.state import Change, Fleet, State, changes_from_plain, changes_to_plain
from supervisor.plain import InvalidValue, to_plain

#: Of the tables and of what is in them; a log with a higher number was written by a newer release.
FORMAT = 1


class LogError(ControlPlaneError):
    """The event log cannot be used; `fields`: path."""


class LogBusy(LogError):
    """Another controller writes it."""


class LogTooNew(LogError):
    """A newer release wrote it."""


class LogDamaged(LogError):
    """What is in it cannot be what was written."""


class LogFull(LogError):
    """There is no room for a record: nothing was written, and nothing may be done."""


class LogDeposed(LogError):
    """A later controller has opened it: this one must end."""


@dataclass(frozen=True)
class Record:
    """One input and what it changed.  `given` is the input's plain form, `kind` its type, for people."""

    now: float
    kind: str
    given: Any
    changes: tuple[Change, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Written:
    """A record with its number in the log and the epoch that wrote it."""

    number: int
    epoch: int
    record: Record


@dataclass(frozen=True)
class Replayed:
    """What a log gives back: the state, and the last moment of the log's clock."""

    state: State
    now: float
    records: int
    #: Of these records.
    bytes: int


class EventLog:
    """An open log of one epoch.  Close it, or use it as a context manager.

    Args:
        connection: to the database; `open` makes one for a path.
        first_epoch: before the first epoch of a new log.  From a clock: a log in the place of a lost one has
            higher epochs and other ids, which hosts and orchestrators do not take for those of before.
        compact_after: records since the last snapshot that make a new one.
        keep: records before the snapshot that stay, for people.
        most_bytes: of those records, and of the records after it, unless the snapshot is larger than that.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        *,
        path: str = ":memory:",
        first_epoch: int = 0,
        compact_after: int = 2000,
        keep: int = 10_000,
        most_bytes: int = 16 << 20,
    ) -> None:
        self._path = path
        self._first_epoch = first_epoch
        self._compact_after = compact_after
        self._keep = keep
        self._most_bytes = most_bytes
        self._lock_fd = -1
        self._connection = connection
        self._connection.isolation_level = None
        with self._mapped():
            self.epoch, self.replayed = self._begin()
        self._since_snapshot = self.replayed.records
        self._bytes_since = self.replayed.bytes
        self._snapshot_bytes = 0

    @classmethod
    def open(cls, path: Path, **options: int) -> EventLog:
        """Open or make the log at `path`, lock it, begin a new epoch and replay it.

        Raises:
            LogBusy: another process has it open.
            LogTooNew: a newer release wrote it.
            LogDamaged: it cannot be read as it was written.
            LogFull: there is no room for the new epoch.
            LogError: the file cannot be opened.
        """
        try:
            fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise LogError(f"event log {path} cannot be locked: {error.strerror}.", path=str(path)) from error
        connection = None
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise LogBusy(
                    f"event log {path} is open in another controller.",
                    hint="One fleet has one controller at a time; end the other one first.",
                    path=str(path),
                ) from None
            try:
                connection = sqlite3.connect(path, timeout=5.0)
            except sqlite3.Error as error:
                raise LogError(f"event log {path} cannot be opened: {error}.", path=str(path)) from error
            log = cls(connection, path=str(path), **options)
        except BaseException:
            if connection is not None:
                connection.close()
            os.close(fd)
            raise
        log._lock_fd = fd
        return log

    def append(self, records: Sequence[Record]) -> None:
        """Write all or none; they are on the disk when this returns.

        Raises:
            LogFull: nothing was written; the caller's state must stay what it was.
            LogDeposed: a later epoch has begun.
            LogDamaged: the database refused it otherwise.
        """
        with self._mapped(), self._transaction():
            self._check_epoch()
            written = self._insert(records)
        self._since_snapshot += len(records)
        self._bytes_since += written

    def _insert(self, records: Sequence[Record]) -> int:
        """The bytes that they took."""
        epoch, rows = self._epoch(), []
        for record in records:
            body = json.dumps(
                {
                    "given": record.given,
                    "changes": changes_to_plain(record.changes),
                    "notes": list(record.notes),
                },
                separators=(",", ":"),
            )
            rows.append((epoch, record.now, record.kind, body, zlib.crc32(body.encode())))
        self._connection.executemany(
            "INSERT INTO records (epoch, now, kind, body, crc) VALUES (?, ?, ?, ?, ?)", rows
        )
        return sum(len(body) for _, _, _, body, _ in rows)

    def compact(self, state: State, now: float) -> bool:
        """Put a snapshot in place of old records, where there are enough of them; True if it was made."""
        # A snapshot writes all rows, so it waits for as many records or bytes: a large fleet pays once a row.
        few = self._since_snapshot < max(self._compact_after, state.size)
        if few and self._bytes_since < max(self._most_bytes, self._snapshot_bytes):
            return False
        body = json.dumps(changes_to_plain(state.to_changes()), separators=(",", ":"))
        with self._mapped(), self._transaction():
            self._check_epoch()
            (last,) = self._connection.execute("SELECT coalesce(max(seq), 0) FROM records").fetchone()
            self._connection.execute("DELETE FROM snapshots")
            self._connection.execute(
                "INSERT INTO snapshots (seq, now, body, crc) VALUES (?, ?, ?, ?)",
                (last, now, body, zlib.crc32(body.encode())),
            )
            self._connection.execute(
                "DELETE FROM records WHERE seq <= ? OR seq <= (SELECT max(seq) FROM (SELECT seq,"
                " sum(length(body)) OVER (ORDER BY seq DESC) AS total FROM records) WHERE total > ?)",
                (last - self._keep, self._most_bytes),
            )
        self._since_snapshot, self._bytes_since, self._snapshot_bytes = 0, 0, len(body)
        return True

    @property
    def since_snapshot(self) -> int:
        """Records that a replay would have to apply."""
        return self._since_snapshot

    def history(self, limit: int = 1000) -> list[tuple[float, str]]:
        """The newest notes, oldest first, with their times of the log's clock."""
        with self._mapped():
            rows = self._connection.execute(
                "SELECT now, body FROM records ORDER BY seq DESC LIMIT ?", (limit,)
            ).fetchall()
        return [(now, note) for now, body in reversed(rows) for note in json.loads(body)["notes"]]

    def newest(self, *, limit: int, since: int = 0) -> list[Written]:
        """The newest `limit` records whose number is above `since`, oldest first."""
        with self._mapped():
            rows = self._connection.execute(
                "SELECT seq, epoch, now, kind, body FROM records WHERE seq > ? ORDER BY seq DESC LIMIT ?",
                (since, limit),
            ).fetchall()
            written = []
            for number, epoch, now, kind, text in reversed(rows):
                body = json.loads(text)
                changes = changes_from_plain(body["changes"])
                record = Record(now, kind, body["given"], changes, tuple(body["notes"]))
                written.append(Written(number, epoch, record))
        return written

    def close(self) -> None:
        """Idempotent; the lock is free afterwards."""
        self._connection.close()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # -------------------------------------------------------------------------------- inside

    def _begin(self) -> tuple[int, Replayed]:
        database = self._connection
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=FULL")
        with self._transaction():
            database.execute("CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL)")
            row = database.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()
            found = row[0] if row else FORMAT
            if found > FORMAT:
                raise LogTooNew(
                    f"event log {self._path} has format {found}, this release reads up to {FORMAT}.",
                    hint="Start the newer release again, or give this one another log.",
                    path=self._path,
                )
            database.execute(
                "CREATE TABLE IF NOT EXISTS records (seq INTEGER PRIMARY KEY AUTOINCREMENT,"
                " epoch INTEGER NOT NULL, now REAL NOT NULL, kind TEXT NOT NULL, body TEXT NOT NULL,"
                " crc INTEGER NOT NULL)"
            )
            database.execute(
                "CREATE TABLE IF NOT EXISTS snapshots (seq INTEGER NOT NULL, now REAL NOT NULL,"
                " body TEXT NOT NULL, crc INTEGER NOT NULL)"
            )
            database.execute(
                "INSERT OR IGNORE INTO meta VALUES ('format', ?), ('epoch', ?)", (FORMAT, self._first_epoch)
            )
            (sound,) = database.execute("PRAGMA quick_check(1)").fetchone()
            if sound != "ok":
                raise self._damaged(sound)
            replayed = self._replay()
            seen = replayed.state.fleet.get("", Fleet()).fenced_by
            database.execute("UPDATE meta SET value = max(value, ?) + 1 WHERE key = 'epoch'", (seen,))
            if row is None and self._first_epoch:
                fleet = Fleet(series=f"@{_in_letters(self._first_epoch)}")
                self._insert([Record(0.0, "Tick", None, (("fleet", "", fleet),), ("a new log begins",))])
                replayed = self._replay()
            return self._epoch(), replayed

    def _replay(self) -> Replayed:
        state, now, first, mine = State.empty(), 0.0, 0, set[str]()
        size = 0
        snapshot = self._connection.execute("SELECT seq, now, body, crc FROM snapshots").fetchone()
        if snapshot:
            first, now, body, crc = snapshot
            state = state.with_changes(changes_from_plain(self._checked(body, crc, "snapshot")))
        records = 0
        rows = self._connection.execute(
            "SELECT seq, now, body, crc FROM records WHERE seq > ? ORDER BY seq", (first,)
        )
        for seq, moment, body, crc in rows:
            changes = changes_from_plain(self._checked(body, crc, f"record {seq}")["changes"])
            state, now, records = state.with_changes(changes, mine), max(now, moment), records + 1
            size += len(body)
        return Replayed(state, now, records, size)

    def _checked(self, body: str, crc: int, what: str) -> Any:
        if zlib.crc32(body.encode()) != crc:
            raise self._damaged(f"the checksum of {what} does not fit")
        return json.loads(body)

    def _epoch(self) -> int:
        row = self._connection.execute("SELECT value FROM meta WHERE key = 'epoch'").fetchone()
        epoch: int = row[0]
        return epoch

    def _check_epoch(self) -> None:
        epoch = self._epoch()
        if epoch != self.epoch:
            raise LogDeposed(
                f"event log {self._path} was opened by a later controller"
                f" (epoch {epoch} after {self.epoch}).",
                hint="This controller ends; the later one goes on.",
                path=self._path,
            )

    def _damaged(self, why: object) -> LogDamaged:
        return LogDamaged(
            f"event log {self._path} is damaged: {why}.",
            hint="Move it away and start again: hosts register again, budgets and verdicts start from zero.",
            path=self._path,
        )

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        """SQLite's errors as ours, by their number and not by their words."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            code = getattr(error, "sqlite_errorcode", None)  # from Python 3.11 on
            if code == 13 or "disk is full" in str(error):
                raise LogFull(
                    f"event log {self._path} cannot be written: the disk is full.",
                    hint="Make room; until then nothing is decided, and running jobs go on.",
                    path=self._path,
                ) from error
            raise self._damaged(error) from error
        except (InvalidValue, json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise self._damaged(error) from error


def record_of(now: float, given: Any, changes: tuple[Change, ...], notes: tuple[str, ...]) -> Record:
    """The record of one decision."""
    kind = "Tick" if given is None else type(given).__name__
    return Record(now, kind, None if given is None else to_plain(given), changes, notes)


def _in_letters(number: int) -> str:
    """`number` in base 36."""
    digits = "0123456789abcdefghijklmnopqrstuvwxyz"
    text = ""
    while number:
        number, rest = divmod(number, 36)
        text = digits[rest] + text
    return text
