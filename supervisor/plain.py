# SPDX-License-Identifier: Apache-2.0
"""Frozen dataclasses as plain dicts and back, for the event log, the status page and the wire.

A reader refuses what it does not know: a field that a newer release wrote is an error with its name, never
dropped, because a decision that forgets half of its state is worse than one that is not made.  `from_report`
is the exception, for reports of launchers and programs to their daemon.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from resiliency.errors import ControlPlaneError

T = TypeVar("T")
_KNOWN: dict[Any, dict[str, tuple[_Decoder, bool]]] = {}
_PLAIN = frozenset({str, int, float, bool, type(None)})
_Decoder = Callable[[Any, str], Any]


class InvalidValue(ControlPlaneError):
    """A value that breaks its own rules; nothing acted upon it.  `fields`: value, field."""


def to_plain(value: Any) -> Any:
    """`value` as strings, numbers, lists and dicts."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is tuple:
        return [to_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return {name: to_plain(getattr(value, name)) for name in _decoders(kind)}


def from_plain(cls: type[T], data: object) -> T:
    """The dataclass whose `to_plain` gave `data`.

    Raises:
        InvalidValue: a field is missing, unknown, of another type or out of its range.
    """
    if not isinstance(data, Mapping):
        raise InvalidValue(
            f"{cls.__name__} must be a table of fields, found {data!r:.80}.", value=cls.__name__
        )
    decoders = _decoders(cls)
    for name in data:
        if name not in decoders:
            raise InvalidValue(
                f"{cls.__name__} has no field {str(name)[:80]!r} in this release.",
                hint="A newer release may have written it: use that release here too.",
                value=cls.__name__,
                field=str(name),
            )
    given = {}
    for name, (decode, required) in decoders.items():
        if name in data:
            given[name] = decode(data[name], f"{cls.__name__}.{name}")
        elif required:
            raise InvalidValue(f"{cls.__name__}.{name} is missing.", value=cls.__name__, field=name)
    return cls(**given)


def from_report(cls: type[T], data: object) -> T:
    """As `from_plain`, from a program of another release: fields that this one does not know are left out.

    A launcher and its daemon are in different images, and a host without reports is worse than one whose
    newest fields are not read.

    Raises:
        InvalidValue: a field is missing, of another type or out of its range.
    """
    if isinstance(data, Mapping):
        data = {name: item for name, item in data.items() if name in _decoders(cls)}
    return from_plain(cls, data)


def _decoders(cls: Any) -> dict[str, tuple[_Decoder, bool]]:
    """Name of each field of `cls`: how it is read, and whether it must be there."""
    known = _KNOWN.get(cls)
    if known is None:
        hints = get_type_hints(cls)
        known = _KNOWN[cls] = {
            field.name: (_decoder(hints[field.name]), field.default is MISSING) for field in fields(cls)
        }
    return known


def _decoder(hint: Any) -> _Decoder:
    if get_origin(hint) in (Union, types.UnionType):
        (kind,) = (arg for arg in get_args(hint) if arg is not type(None))
        inner = _decoder(kind)
        return lambda data, where: None if data is None else inner(data, where)
    if get_origin(hint) is tuple:
        item = _decoder(get_args(hint)[0])
        return lambda data, where: tuple(item(one, where) for one in _typed(data, (list, tuple), where))
    if is_dataclass(hint):
        row: Any = hint
        return lambda data, where: from_plain(row, data)
    if issubclass(hint, Enum):
        return lambda data, where: _member(hint, data, where)
    accepted = (float, int) if hint is float else (hint,)
    return lambda data, where: _typed(data, accepted, where)


def _typed(data: Any, accepted: tuple[type, ...], where: str) -> Any:
    if type(data) is accepted[0]:
        return data
    if not isinstance(data, accepted) or (isinstance(data, bool) and bool not in accepted):
        raise InvalidValue(
            f"{where} must be of type {accepted[0].__name__}, found {data!r:.80}.", field=where
        )
    return data


def _member(kind: type[Enum], data: Any, where: str) -> Enum:
    with suppress(ValueError):
        return kind(data)
    allowed = ", ".join(str(member.value) for member in kind)
    raise InvalidValue(f"{where} must be one of {allowed}, found {data!r:.80}.", field=where)
