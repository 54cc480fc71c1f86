# SPDX-License-Identifier: Apache-2.0
"""Secrets and namespaces as helm sends them: Kubernetes' protobuf, the few fields that these have."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

FORM = "application/vnd.kubernetes.protobuf"
_MAGIC = b"k8s\0"
#: Numbers of the fields of an ObjectMeta.
_META = {1: "name", 3: "namespace", 5: "uid", 6: "resourceVersion"}
_META_MAPS = {11: "labels", 12: "annotations"}


def decoded(body: bytes) -> dict[str, Any]:
    """An object of the API as JSON has it.

    Raises:
        ValueError: it is of another kind.
    """
    if not body.startswith(_MAGIC):
        raise ValueError("not Kubernetes' protobuf")
    unknown = dict(_fields(body[len(_MAGIC) :]))
    names = dict(_fields(unknown[1]))
    version, kind = names[1].decode(), names[2].decode()
    if kind not in ("Secret", "Namespace", "DeleteOptions"):
        raise ValueError(f"no protobuf of {kind} is known here")
    found: dict[str, Any] = {"apiVersion": version, "kind": kind}
    for number, value in _fields(unknown[2]) if kind != "DeleteOptions" else ():
        if number == 1:
            found["metadata"] = _meta(value)
        elif kind == "Secret" and number == 2:
            key, text = _entry(value)
            found.setdefault("data", {})[key] = base64.b64encode(text).decode()
        elif kind == "Secret" and number == 3:
            found["type"] = value.decode()
    return found


def _meta(body: bytes) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number, value in _fields(body):
        if number in _META and value:
            found[_META[number]] = value.decode()
        elif number in _META_MAPS:
            key, text = _entry(value)
            found.setdefault(_META_MAPS[number], {})[key] = text.decode()
    return found


def _entry(body: bytes) -> tuple[str, bytes]:
    """One entry of a map; an empty value is left out on the wire."""
    fields = dict(_fields(body))
    return fields[1].decode(), fields.get(2, b"")


def _fields(body: bytes) -> Iterator[tuple[int, bytes]]:
    """Numbers of fields and their bytes; numbers as values are skipped."""
    at = 0
    while at < len(body):
        tag, at = _number(body, at)
        size, at = _number(body, at)
        if tag & 7 == 2:
            yield tag >> 3, body[at : at + size]
            at += size
        elif tag & 7 != 0:
            raise ValueError(f"wire type {tag & 7}")


def _number(body: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = body[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
