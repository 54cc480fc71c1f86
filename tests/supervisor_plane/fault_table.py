# SPDX-License-Identifier: Apache-2.0
"""The table of faults in docs/supervisor-policy.md: each row stands at the test that shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T", bound=Callable[..., object])


@dataclass(frozen=True)
class Row:
    hit: str
    fault: str
    outcome: str
    test: str


rows: list[Row] = []


def fault(hit: str, fault: str, outcome: str) -> Callable[[T], T]:
    """What a test hits, how, and what happens then, for people."""

    def note(test: T) -> T:
        module = test.__module__.replace(".", "/")
        rows.append(Row(hit, fault, outcome, f"`{module}.py`"))
        return test

    return note


def table(found: Iterable[Row]) -> str:
    lines = ["| Hit | Fault | What happens | Shown by |", "|---|---|---|---|"]
    return "\n".join(
        [*lines, *(f"| {row.hit} | {row.fault} | {row.outcome} | {row.test} |" for row in found)]
    )
