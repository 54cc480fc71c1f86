# SPDX-License-Identifier: Apache-2.0
"""The one name of a save: the same on all ranks, in memory, on disks, in copies and on shared storage.

It says which start of the job came to which step; two starts may come to one step by different ways.
"""

from __future__ import annotations


def save_id_of(session: str, step: int) -> str:
    """The name of what `session` saved at `step`."""
    return f"{session}-{step}"


def session_of(save_id: str, step: int) -> str:
    """The inverse, for a name of `step`."""
    return save_id.removesuffix(f"-{step}")
