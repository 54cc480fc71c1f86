# SPDX-License-Identifier: Apache-2.0
"""The size of what is kept of an error, by the rank that notes it and by the launcher that reads it."""

from __future__ import annotations

#: Exceptions that led to the one that ended a rank.
CHAIN = 4
#: Characters of a message that are kept of its head and of its tail: an exception may hold a tensor, and the
#: last line of a loader worker's traceback names the error.
END_CHARS = 2000


def shorten(text: str, end_chars: int = END_CHARS) -> str:
    """The head and the tail of a text that is longer than both, with a mark between them."""
    left_out = len(text) - 2 * end_chars
    if left_out <= 0:
        return text
    return f"{text[:end_chars]}\n[... {left_out} characters ...]\n{text[-end_chars:]}"
