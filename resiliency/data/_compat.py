# SPDX-License-Identifier: Apache-2.0
"""What is read of other libraries that they do not promise; a test fails when it moves."""

from __future__ import annotations


def has_unsaved_buffer(dataset: object) -> bool:
    """Whether a Hugging Face dataset shuffles in a buffer, whose samples are in no state of it.

    ``shuffle()`` of theirs makes one of 1,000 samples for each worker. Their own log says at a restart that
    it is filled again: what was in it is left out.
    """
    left = [getattr(dataset, "_ex_iterable", None)]
    while left:
        found = left.pop()
        if type(found).__name__ == "BufferShuffledExamplesIterable":
            return True
        inner = vars(found) if hasattr(found, "__dict__") else {}
        left += [inner[name] for name in ("ex_iterable",) if name in inner]
        left += inner.get("ex_iterables", [])
    return False
