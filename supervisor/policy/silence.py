# SPDX-License-Identifier: Apache-2.0
"""When to suspect oneself: hosts fail one by one, networks fail for many at once."""

from __future__ import annotations


def is_correlated(silent: int, hosts: int, *, share: float, at_least: int) -> bool:
    """True where so many hosts are silent at the same time that the path to them is the likelier cause.

    A few hosts of a small fleet are no crowd: fewer than `at_least` never count as one.
    """
    return silent >= at_least and silent > share * hosts
