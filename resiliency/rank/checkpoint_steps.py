# SPDX-License-Identifier: Apache-2.0
"""Where a rank is between its checkpoints: what a launcher needs to go back behind them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CheckpointSteps:
    """Steps of checkpoints of one attempt, as a rank knows them.

    Args:
        newest: that was restored, or is to be saved.
        restored: None: the attempt began without one.
        branch: on which the attempt saves.
    """

    newest: int
    restored: int | None = None
    branch: int = 0
