# SPDX-License-Identifier: Apache-2.0
"""Tables behind the head of a rank's index: long lists that are read and parsed when a reader needs them.

A table is one line of JSON.  The head holds its length, its checksum and its number of rows, so a reader of
the head alone compares two tables by their checksums, and a torn table never passes for a whole one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar, overload

from resiliency.errors import CheckpointCorrupt

_Row = TypeVar("_Row")


class IndexTable(Sequence[_Row], Generic[_Row]):
    """The rows of a table; whoever looks at one of them has all of them parsed.

    Args:
        count: number of rows.
        digest: of the line of JSON.
        load: gives the line, verified.
        parse: makes a row of an item of the JSON list.
        path: of the index, for messages.
    Raises (on the first look at a row):
        CheckpointIncomplete, CheckpointCorrupt: the table is gone, or not what was written.
    """

    def __init__(
        self,
        count: int,
        digest: str,
        load: Callable[[], bytes],
        parse: Callable[[Any], _Row],
        path: str,
    ) -> None:
        self.digest = digest
        self._count = count
        self._load: Callable[[], bytes] | None = load
        self._parse = parse
        self._path = path
        self._rows: tuple[_Row, ...] = ()

    def rows(self) -> tuple[_Row, ...]:
        """All of them."""
        load = self._load
        if load is not None:
            line = load()
            try:
                self._rows = tuple(self._parse(item) for item in json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise CheckpointCorrupt(
                    f"{self._path} has a table that is not of this format: {type(error).__name__}: {error}.",
                    hint="Restore another checkpoint.",
                    path=self._path,
                ) from error
            self._load = None
        return self._rows

    def check(self) -> None:
        """Read and compare the line, without a look at its rows.

        Raises:
            CheckpointIncomplete, CheckpointCorrupt: the table is gone, or not what was written.
        """
        load = self._load
        if load is not None:
            load()

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> _Row: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[_Row]: ...

    def __getitem__(self, index: int | slice) -> _Row | Sequence[_Row]:
        return self.rows()[index]

    def __iter__(self) -> Iterator[_Row]:
        return iter(self.rows())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, IndexTable):
            return self.digest == other.digest
        return isinstance(other, tuple) and self.rows() == other

    def __hash__(self) -> int:
        return hash(self.rows())

    def __repr__(self) -> str:
        return f"IndexTable({self._count} rows, {self.digest})"


@dataclass(frozen=True)
class TableLine:
    """A table as it is written."""

    text: bytes
    digest: str


class TableRows(tuple[_Row, ...]):
    """Rows that are the same at many saves: their line is rendered once, and found again without a look at
    them."""

    @cached_property
    def line(self) -> TableLine:
        return render_table(self)


def render_table(rows: Sequence[object]) -> TableLine:
    """The line of `rows`, which are dataclasses of what JSON knows."""
    text = json.dumps([vars(row) for row in rows], separators=(",", ":")).encode() + b"\n"
    return TableLine(text, digest_of(text))


def digest_of(line: bytes) -> str:
    """Checksum of a table; long, for tables of equal checksums count as equal."""
    return hashlib.blake2b(line, digest_size=16).hexdigest()


def check_table(line: bytes, digest: str, path: str) -> bytes:
    """`line` if its checksum is `digest`.

    Raises:
        CheckpointCorrupt: it is not.
    """
    found = digest_of(line)
    if found != digest:
        raise CheckpointCorrupt(
            f"{path} was changed or cut: a table of it has digest {found}, expected {digest}.",
            hint="Restore another checkpoint.",
            path=path,
            expected=digest,
            found=found,
        )
    return line
