# SPDX-License-Identifier: Apache-2.0
"""Values to messages and back: by the names of their fields, which are the same.

What arrives becomes a value, and so is checked, before any other code sees it.
"""

from __future__ import annotations

import functools
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, TypeVar

from supervisor import values
from supervisor.protocol import fleet_pb2
from supervisor.protocol.host_commands import HostCommand
from supervisor.values import Value

V = TypeVar("V", bound=Value)

#: Each value that travels, and its message.
MESSAGES: dict[type[Value], Any] = {
    **{
        kind: getattr(fleet_pb2, kind.__name__)
        for kind in (
            *(values.WorkerInfo, values.HostInfo, values.WorkloadInfo, values.Evidence, values.Finding),
            *(values.WorkerReport, values.DaemonReport, values.Event, values.Command, values.Outcome),
            *(values.Progress, values.Silence, values.HostFacts, values.PodFacts),
        )
    },
    HostCommand: fleet_pb2.HostCommand,
}


def to_message(value: Value) -> Any:
    """The message that carries `value`."""
    return _fill(MESSAGES[type(value)](), value)


def _fill(message: Any, value: Any) -> Any:
    for field in fields(value):
        item = getattr(value, field.name)
        if isinstance(item, tuple):
            target = getattr(message, field.name)
            for one in item:
                if is_dataclass(one):
                    _fill(target.add(), one)
                else:
                    target.append(one)
        elif is_dataclass(item):
            _fill(getattr(message, field.name), item)
        elif item is not None:
            setattr(message, field.name, item.value if isinstance(item, Enum) else item)
    return message


def from_message(kind: type[V], message: Any) -> V:
    """The value that `message` carries.

    Raises:
        InvalidValue: a field is missing or out of its range.
    """
    return kind.from_dict(_plain(message))


def _plain(message: Any) -> dict[str, object]:
    plain: dict[str, object] = {}
    for name, has_presence, is_message in _fields(message.DESCRIPTOR):
        if has_presence and not message.HasField(name):
            continue
        item = getattr(message, name)
        if isinstance(item, (str, int, float)):
            plain[name] = item
        elif not is_message:
            plain[name] = list(item)
        elif has_presence:
            plain[name] = _plain(item)
        else:
            plain[name] = [_plain(one) for one in item]
    return plain


@functools.cache
def _fields(descriptor: Any) -> tuple[tuple[str, bool, bool], ...]:
    """Of each field its name, and whether it may be absent, and holds messages."""
    return tuple((one.name, one.has_presence, one.message_type is not None) for one in descriptor.fields)
