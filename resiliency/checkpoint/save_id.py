# SPDX-License-Identifier: Apache-2.0
"""The one name of a save: the same on all ranks, in memory, on disks, in copies and on shared storage.

It says which start of the job came to which step; two starts may come to one step by different ways.  So may
one start that restores a step before those that it has saved: from there on it goes by another name.
"""

from __future__ import annotations


def save_id_of(session: str, step: int) -> str:
    """The name of what `session` saved at `step`."""
    return f"{session}-{step}"


def session_of(save_id: str, step: int) -> str:
    """The inverse, for a name of `step`."""
    return save_id.removesuffix(f"-{step}")


def branch_of(session: str, number: int) -> str:
    """The session of a start of the job after it went back for the `number`-th time."""
    return f"{start_of(session)}.{number}"


def start_of(session: str) -> str:
    """The session as it was when the job started."""
    return session.partition(".")[0]
