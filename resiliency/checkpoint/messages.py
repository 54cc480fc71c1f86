# SPDX-License-Identifier: Apache-2.0
"""Messages as small dataclasses, and as the JSON that carries them from process to process.

A protocol is a set of frozen dataclasses, each with a `kind`.  Their fields are plain values (`bool`,
`int`, `float`, `str`), enums, records of such fields, or tuples of all these.  What arrives is believed
only if it has exactly these fields, of exactly these types; nothing that another process says raises
anything but `PeerError`, and none of it appears in an error at length.
"""

from __future__ import annotations

import functools
import json
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import Field, asdict, fields, is_dataclass
from enum import Enum
from typing import Any, ClassVar, Generic, Protocol, TypeVar, get_args, get_type_hints

from resiliency.errors import PeerError

#: Of what another process sent, an error shows no more.
_SHOWN_CHARS = 80
_shortened = reprlib.Repr()
_shortened.maxstring = _shortened.maxother = _shortened.maxlong = _SHOWN_CHARS
#: Fields whose key in the JSON is an older name: agents and ranks of two releases meet.
_KEYS = {"attempt_id": "session", "source_host": "owner"}


class Record(Protocol):
    """A dataclass that is a message."""

    kind: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


_Message = TypeVar("_Message", bound=Record)


class MessageCodec(Generic[_Message]):
    """The messages of one protocol.

    Args:
        speaker: who says them, for errors.
        kinds: their classes.
        text_chars: longer texts (an error message with many ranks in it) are cut to this; None: none are.
    """

    def __init__(
        self, speaker: str, kinds: Iterable[type[_Message]], *, text_chars: int | None = None
    ) -> None:
        self._speaker = speaker
        self._kinds = {cls.kind: cls for cls in kinds}
        self._text_chars = text_chars

    def encode(self, message: _Message) -> bytes:
        body = {name: self._cut(value) for name, value in encode_fields(message).items()}
        return json.dumps({"kind": message.kind, **body}, separators=(",", ":")).encode()

    def decode(self, data: bytes) -> _Message:
        """The inverse of `encode`.

        Raises:
            PeerError: not a message, or its fields are not exactly those that it must have.
        """
        try:
            body = json.loads(data)
            cls = self._kinds[body.pop("kind")]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise PeerError(
                f"not a message of {self._speaker}: {_shown(data[:_SHOWN_CHARS])} ({_shown(error)})."
            ) from None
        return _record(cls, body)

    def _cut(self, value: object) -> object:
        return value[: self._text_chars] if isinstance(value, str) else value


_Read = TypeVar("_Read")


def encode_fields(record: Any) -> dict[str, Any]:
    """The fields of a record as `decode_record` takes them."""
    return asdict(record, dict_factory=lambda items: {_KEYS.get(name, name): value for name, value in items})


def decode_record(cls: type[_Read], data: bytes | str) -> _Read:
    """A record on its own, from the JSON object of its fields.

    Raises:
        PeerError: its fields are not exactly those that it must have.
    """
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise PeerError(f"not JSON: {_shown(data[:_SHOWN_CHARS])} ({_shown(error)}).") from None
    return _record(cls, body)


def _record(cls: type[_Read], body: object) -> _Read:
    known: Any = cls  # mypy takes not every type for hashable
    wanted = _fields_of(known)
    if not isinstance(body, dict) or body.keys() != wanted.keys():
        found = sorted(body) if isinstance(body, dict) else body
        raise PeerError(f"{cls.__name__} must have the fields {sorted(wanted)}, found {_shown(found)}.")
    return cls(
        **{name: _value(f"{cls.__name__}.{name}", type_, body[key]) for key, (name, type_) in wanted.items()}
    )


@functools.cache
def _fields_of(cls: type[Any]) -> Mapping[str, tuple[str, Any]]:
    """By key in the JSON: the field's name and type."""
    types = get_type_hints(cls)
    return {_KEYS.get(field.name, field.name): (field.name, types[field.name]) for field in fields(cls)}


def _value(where: str, wanted: Any, found: object) -> object:
    try:
        return _plain(wanted, found)
    except (TypeError, ValueError):
        name = str(wanted) if get_args(wanted) else wanted.__name__
        raise PeerError(f"{where} must be {name}, found {_shown(found)}.") from None


def _plain(wanted: Any, found: object) -> object:
    """`found` as JSON has it, as `wanted`, which is a type of a field.

    Raises:
        TypeError, ValueError: it is something else.
        PeerError: the same of a record.
    """
    if isinstance(wanted, type) and is_dataclass(wanted):
        return _record(wanted, found)
    if isinstance(wanted, type) and issubclass(wanted, Enum):
        return wanted(found)
    items = get_args(wanted)
    if items and isinstance(found, list):
        if items[-1] is Ellipsis:
            items = items[:1] * len(found)
        if len(items) == len(found):
            return tuple(map(_plain, items, found))
    elif type(found) is wanted or (wanted is float and type(found) is int):
        return found
    raise TypeError


def _shown(found: object) -> str:
    return _shortened.repr(found)[:_SHOWN_CHARS]
