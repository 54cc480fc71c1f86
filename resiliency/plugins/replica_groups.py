# SPDX-License-Identifier: Apache-2.0
"""Who holds the same state as whom, where Megatron's distributed optimizer has several copies.

One copy of the optimizer is spread over all data-parallel ranks: each part exists once, and is lost
with its rank.  With ``num_distributed_optimizer_instances=N`` it is spread over N times fewer ranks, and
each part exists N times.  Ranks that hold the same parts form a *replica group*:

    8 data-parallel ranks, 2 copies          copy 0: ranks 0 1 2 3
                                             copy 1: ranks 4 5 6 7
    replica groups                           {0,4} {1,5} {2,6} {3,7}

What is the same in a group, and what is not:

* Weights, both moments, master weights, step counts, learning rate, loops, and where the data
  samplers are: the same.  Gradients are summed over all ranks before any copy uses them.
* Random states: each rank has its own.  NeMo seeds all data-parallel ranks alike, so they are the same
  too, unless a program seeds or draws by rank; `resiliency.plugins.random_states` finds out.
* Values that callbacks or data modules keep differently on each rank are in nobody's contract: also the
  persistent tier has them of rank 0 only.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from resiliency.errors import ConfigError


def check_replicas(copies: int, *, data_parallel_ranks: int | None = None) -> None:
    """Whether the optimizer can be replicated so often.

    Args:
        data_parallel_ranks: over which it is spread, context-parallel ranks included; None: not known yet.
    Raises:
        ConfigError: it cannot; the message says what could.
    """
    if copies < 2:
        raise ConfigError(
            f"a replicated optimizer has at least 2 copies, found {copies}.",
            hint="Use NeMo's MegatronStrategy for one copy.",
            flag="--num-optimizer-replicas",
        )
    if data_parallel_ranks is not None and data_parallel_ranks % copies:
        divisors = [n for n in range(2, data_parallel_ranks + 1) if data_parallel_ranks % n == 0]
        raise ConfigError(
            f"{data_parallel_ranks} data-parallel ranks do not divide into {copies} copies of the optimizer.",
            hint=f"Choose {', '.join(map(str, divisors))} copies."
            if divisors
            else "Start more data-parallel ranks.",
            flag="--num-optimizer-replicas",
        )


def replica_group() -> str:
    """The label of this rank's replica group; ranks of one save with equal labels hold the same state.

    It names what decides about the content of a shard, positions and numbers, so that labels of jobs
    with different layouts are different.  The number of copies is not in it: a job that goes on with
    fewer or more of them finds its parts.

    Returns:
        "" where Megatron's groups do not exist.
    """
    if not parallel_state.is_initialized():
        return ""
    pairs = {
        "tp": (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_world_size(),
        ),
        "pp": (
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_world_size(),
        ),
        "ep": (
            parallel_state.get_expert_model_parallel_rank(),
            parallel_state.get_expert_model_parallel_world_size(),
        ),
        "etp": (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        ),
        "dp": _place(
            parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True)
        ),
        "edp": _place(parallel_state.get_expert_data_parallel_group(partial_expert_data_parallel=True)),
    }
    chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    return ",".join(f"{name}{rank}/{size}" for name, (rank, size) in pairs.items()) + f",vp{chunks}"


def _place(group: Any) -> tuple[int, int]:
    return dist.get_rank(group), dist.get_world_size(group)
