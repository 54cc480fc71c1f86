# SPDX-License-Identifier: Apache-2.0
"""What a job is once it has restored: on which branch it goes on, and under which name it saves."""

from __future__ import annotations

from dataclasses import dataclass, replace

from resiliency.checkpoint.agent.protocol import Attach
from resiliency.checkpoint.branches import Branches
from resiliency.checkpoint.names import attempt_on_branch
from resiliency.checkpoint.recovery.restore import Restored

#: So many branches, the newest, are sent to the agent: a packet holds some hundreds, and records have all.
_SENT_BRANCHES = 64


@dataclass(frozen=True, kw_only=True)
class GoingOn:
    """The same on all ranks.

    Attributes:
        attach: what each rank says of itself from here on.
        is_rollback: a new branch begins, the newest of `branches`.
        leaves_own_saves: this start of the job has saved later steps itself.
    """

    attach: Attach
    branches: Branches
    is_rollback: bool
    leaves_own_saves: bool


def go_on_from(attach: Attach, restored: Restored, *, newest_saved: int, partial: bool) -> GoingOn:
    """Go on from what was restored.

    Args:
        attach: before.
        newest_saved: newest step that this start of the job has saved, on any rank; -1: none.
        partial: the state may have parts that were not saved.
    """
    branches = restored.branches.merged(Branches(attach.branches))
    leaves_own_saves = 0 < restored.step < newest_saved
    is_rollback = leaves_own_saves or restored.is_rollback
    if is_rollback:
        branches = branches.after(restored.step, restored.save_id)
    return GoingOn(
        attach=replace(
            attach,
            run_id=restored.run_id or attach.run_id,
            attempt_id=attempt_on_branch(attach.attempt_id, branches.newest),
            restored_step=restored.step or attach.restored_step,
            # A state with parts that were not saved differs from the checkpoint of that step.
            restored_save="" if partial else restored.save_id or attach.restored_save,
            branches=branches.known[-_SENT_BRANCHES:],
        ),
        branches=branches,
        is_rollback=is_rollback,
        leaves_own_saves=leaves_own_saves,
    )
