# SPDX-License-Identifier: Apache-2.0
"""JSON merge patch and JSON patch, as far as clients of this API use them."""

from __future__ import annotations

import copy
from typing import Any

from supervisor.testing.kubernetes.kinds import Object, Refusal


def merged(thing: Any, patch: Any) -> Any:
    """`thing` with a merge patch (RFC 7386): null deletes, lists are replaced."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    made = dict(thing) if isinstance(thing, dict) else {}
    for name, value in patch.items():
        if value is None:
            made.pop(name, None)
        else:
            made[name] = merged(made.get(name), value)
    return made


def applied(thing: Object, operations: list[Object]) -> Object:
    """`thing` with a JSON patch (RFC 6902) of add, replace, remove and test.

    Raises:
        Refusal: an operation fails; nothing was changed.
    """
    made = copy.deepcopy(thing)
    for operation in operations:
        *path, last = [
            part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]
        ]
        place: Any = made
        try:
            for part in path:
                place = place[int(part)] if isinstance(place, list) else place[part]
            _apply(place, last, operation)
        except (KeyError, IndexError, ValueError) as error:
            raise Refusal(422, f"the patch cannot be applied at {operation['path']}: {error!r}") from error
    return made


def _apply(place: Any, last: str, operation: Object) -> None:
    what, value = operation["op"], operation.get("value")
    key: Any = int(last) if isinstance(place, list) and last != "-" else last
    if what == "test":
        if place[key] != value:
            raise ValueError("the test fails")
    elif what == "remove":
        del place[key]
    elif what == "add" and isinstance(place, list):
        place.insert(len(place) if key == "-" else key, value)
    elif what in ("add", "replace"):
        if what == "replace":
            place[key]  # it must be there
        place[key] = value
    else:
        raise ValueError(f"no operation {what}")
