# SPDX-License-Identifier: Apache-2.0
"""Which of Megatron's groups a rank fails together with, so that copies of its checkpoints lie elsewhere.

They are those of ranks that compute every micro-batch together: tensor, context and pipeline parallel.  They
run on neighbouring hosts, and what breaks one of them often breaks or blames the others.  Data-parallel
groups are left out: between them they join a rank with nearly all hosts, which leaves no place to prefer.
"""

from __future__ import annotations

import torch.distributed as dist
from megatron.core import parallel_state


def parallel_groups() -> tuple[str, ...]:
    """Labels of this rank's groups, such as ("tp:4", "pp:0"): the kind, and the lowest rank of the job in it.

    Returns:
        No label for a group of one rank, and none at all where Megatron's groups do not exist.
    """
    if not parallel_state.is_initialized():
        return ()
    groups = {
        "tp": parallel_state.get_tensor_model_parallel_group(),
        "cp": parallel_state.get_context_parallel_group(),
        "pp": parallel_state.get_pipeline_model_parallel_group(),
    }
    members = {kind: dist.get_process_group_ranks(group) for kind, group in groups.items()}
    return tuple(f"{kind}:{min(ranks)}" for kind, ranks in members.items() if len(ranks) > 1)
