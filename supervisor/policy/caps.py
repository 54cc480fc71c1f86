# SPDX-License-Identifier: Apache-2.0
"""How many hosts may be taken away, and what must stay."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class CordonMark:
    """A host that was taken out of service at `at`, and the failure domains below its zone that it is in."""

    host: str
    at: float
    domains: tuple[str, ...] = ()


def refuse_cordon(
    marks: Iterable[CordonMark],
    domains: tuple[str, ...],
    now: float,
    *,
    window_s: float,
    per_window: int,
    per_domain: int,
) -> str:
    """Why one more host in `domains`, as in its `CordonMark`, must not be cordoned now; empty if it may.

    Only the smallest domain counts: a zone holds all hosts of many fleets.
    """
    recent = [mark for mark in marks if now - mark.at < window_s]
    if len(recent) >= per_window:
        return f"{len(recent)} hosts were cordoned within {window_s:g} s, at most {per_window} may be"
    if domains:
        near = [mark for mark in recent if mark.domains[:1] == domains[:1]]
        if len(near) >= per_domain:
            return (
                f"{len(near)} hosts of {domains[0]} were cordoned within {window_s:g} s,"
                f" at most {per_domain} may be"
            )
    return ""


def refuse_growth(spares: int, *, needed: int, floor: int) -> str:
    """Why a job must not grow by `needed` of the `spares`; empty if it may."""
    if spares - needed < floor:
        return f"{spares} spares less {needed} would leave fewer than the floor of {floor}"
    return ""
