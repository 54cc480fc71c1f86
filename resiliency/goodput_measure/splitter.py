# SPDX-License-Identifier: Apache-2.0
"""Cuts the bytes of a log into JSON texts, in whatever portions the bytes come.

A log of ours has one event a line.  What ``gcloud logging read --format=json`` prints is one array over many
lines, and ``jq`` prints objects over several.  All of them may follow each other in one file.  A line that is
`{` alone, or that begins an array of objects, opens a *document*, which may have several lines; any other
line is a text by itself.

The texts do not depend on how the bytes are cut: a log that is followed reads like one that is whole.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from typing import NamedTuple

#: A longer text is no event of ours; the bound keeps a file without newlines out of memory.
MAX_TEXT_BYTES = 1 << 20

_DOCUMENT = re.compile(rb"\{$|\[\s*(?:[{\]]|$)")
_TOKEN = re.compile(rb'["\\{}\[\]\n]')
_QUOTE, _ESCAPE, _NEWLINE, _OBJECT = b'"\\\n{'
_OPENING, _CLOSING = frozenset(b"{["), frozenset(b"}]")


class JsonText(NamedTuple):
    """One text without the blanks around it.

    Attributes:
        line: on which it begins, from 1.
        too_long: it has more than `MAX_TEXT_BYTES`, and `text` is a part of it.
        at_end: the bytes ended before it did.
    """

    text: bytes
    line: int
    too_long: bool = False
    at_end: bool = False


class JsonSplitter:
    """Give it bytes with `feed`, and at their end `close`."""

    def __init__(self) -> None:
        self._line = 1  # of the next byte
        self._rest = b""  # of a line that has no newline yet
        self._skips = False  # what is left of a line that is too long
        self._document: _Document | None = None

    def feed(self, portion: bytes) -> Iterator[JsonText]:
        """Yield the texts that end in `portion`.  Exhaust it before the next call."""
        data, at = self._rest + portion, 0
        self._rest = b""
        while True:
            if self._document is not None:
                at = yield from self._document.read(data, at)
                if not self._document.has_ended:
                    return
                self._line, self._document = self._document.line, None
            end = data.find(b"\n", at)
            if end < 0:
                break
            text = data[at:end].strip()
            if self._skips:
                self._skips = False
            elif text[:2] != b'{"' and _DOCUMENT.match(text):
                self._document = _Document(self._line)
                continue
            elif text:
                too_long = len(text) > MAX_TEXT_BYTES
                yield JsonText(text[:MAX_TEXT_BYTES], self._line, too_long)
            at, self._line = end + 1, self._line + 1
        if not self._skips:
            self._rest = data[at:]
        if len(self._rest) > MAX_TEXT_BYTES:
            yield from self._read_long_line()

    def close(self) -> Iterator[JsonText]:
        """Yield what has begun and not ended."""
        if _DOCUMENT.match(self._rest.strip()):
            yield from self.feed(b"\n")
        if self._document is not None:
            yield from self._document.cut_off(at_end=True)
        elif rest := self._rest.strip():
            yield JsonText(rest, self._line, at_end=True)
        self._rest, self._document = b"", None

    def _read_long_line(self) -> Iterator[JsonText]:
        rest, self._rest = self._rest, b""
        if _DOCUMENT.match(rest.lstrip()):
            self._document = _Document(self._line)
            yield from self.feed(rest)
        else:
            self._skips = True
            yield JsonText(rest[:MAX_TEXT_BYTES], self._line, too_long=True)


class _Document:
    """An array, whose elements are texts, or an object, which is one."""

    def __init__(self, line: int) -> None:
        self.line = line  # of the next byte
        self.has_ended = False
        self._depth = 0
        self._base: int | None = None  # depth in which texts open: 1 in an array
        self._text: bytearray | None = None  # of the text that is open
        self._text_line = line
        self._in_string = False
        self._escaped_at = -1  # this and the next are places in the portion that is read
        self._line_start = 0

    def read(self, data: bytes, at: int) -> Generator[JsonText, None, int]:
        """Yield the texts that end in `data`; returns how far it was read."""
        begin = at  # of what is not yet in `_text`
        self._line_start += at  # which is not 0 for the first portion alone
        for found in _TOKEN.finditer(data, at):
            place = found.start()
            token = data[place]
            if place == self._escaped_at and token != _NEWLINE:
                continue
            if token == _NEWLINE:
                self.line += 1
                self._line_start = place + 1
                if self._in_string:  # JSON has no such string
                    self._keep(data[begin:place])
                    yield self._ended()
                    self.has_ended = True
                    return place + 1
            elif self._in_string:
                if token == _ESCAPE:
                    self._escaped_at = place + 1
                else:
                    self._in_string = token != _QUOTE
            elif token == _QUOTE:
                self._in_string = True
            elif token in _OPENING:
                if self._base is None:
                    self._base = int(token != _OBJECT)
                if self._text is not None and token == _OBJECT and place == self._line_start:
                    # An event of ours begins a line, and an object in an object does not: one was torn.
                    self._keep(data[begin:place])
                    yield from self.cut_off()
                    return place
                if self._depth == self._base:
                    self._text, self._text_line, begin = bytearray(), self.line, place
                self._depth += 1
            elif token in _CLOSING and self._depth:
                self._depth -= 1
                if self._depth == self._base and self._text is not None:
                    self._keep(data[begin : place + 1])
                    yield self._ended()
                if self._depth == 0:
                    self.has_ended = True
                    return place + 1
        self._keep(data[begin:])
        self._line_start -= len(data)
        self._escaped_at = 0 if self._escaped_at == len(data) else -1
        return len(data)

    def cut_off(self, *, at_end: bool = False) -> Iterator[JsonText]:
        """Yield the text that is open; the document ends here."""
        self.has_ended = True
        if self._text is not None:
            yield self._ended()._replace(at_end=at_end)

    def _keep(self, more: bytes) -> None:
        if self._text is not None and len(self._text) <= MAX_TEXT_BYTES:
            self._text += more

    def _ended(self) -> JsonText:
        text, self._text = bytes(self._text or b'"'), None
        return JsonText(text.strip(), self._text_line, too_long=len(text) > MAX_TEXT_BYTES)
