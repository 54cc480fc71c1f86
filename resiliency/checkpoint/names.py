# SPDX-License-Identifier: Apache-2.0
"""Names that all parts share: of a save, of a tier, of a host as a directory, of one try to save.

The name of a save is the same on all ranks, in memory, on disks, in copies and on shared storage.  It says
which start of the job came to which step, and on which branch (`resiliency.checkpoint.branches`): two starts
may come to one step by different ways, and so may one that restores a step before those that it has saved.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple
from urllib.parse import quote


def save_id_of(attempt_id: str, step: int) -> str:
    """The name of what `attempt_id` saved at `step`."""
    return f"{attempt_id}-{step}"


def attempt_id_of(save_id: str, step: int) -> str:
    """The inverse, for a name of `step`."""
    return save_id.removesuffix(f"-{step}")


def attempt_on_branch(attempt_id: str, number: int) -> str:
    """The attempt of a start of the job while it is on branch `number` (`resiliency.checkpoint.branches`)."""
    return f"{start_of(attempt_id)}.{number}" if number else start_of(attempt_id)


def branch_number(name: str) -> int:
    """The branch of an attempt or of a save, by its name."""
    number = name.partition(".")[2].partition("-")[0]
    return int(number) if number.isascii() and number.isdigit() else 0


def start_of(attempt_id: str) -> str:
    """The attempt as it was when the job started."""
    return attempt_id.partition(".")[0]


class TierName(str, Enum):
    """Where committed checkpoints live."""

    LOCAL = "local"  # each host's own disk or memory, and copies on other hosts
    PERSISTENT = "persistent"  # storage that outlives the hosts


#: Of tiers that are due at one step, the one whose loss costs more is first.  One capture serves all.
PRIORITY = (TierName.PERSISTENT, TierName.LOCAL)


def directory_name(host: str) -> str:
    """The name of `host`, safe as the name of a directory; two hosts never get the same."""
    safe = quote(host, safe="")
    # quote() leaves dots alone, and "." and ".." are directories of their own.
    return safe.replace(".", "%2E") if not safe.strip(".") else safe


class TierTry(NamedTuple):
    """Of one tier, they sort as ranks make them.

    `number`: of the try, from 1; the same on all ranks.
    """

    step: int
    number: int
    tier: str
