# SPDX-License-Identifier: Apache-2.0
"""Training with several copies of the distributed optimizer, so that ranks can stand in for each other.

    strategy = ReplicatedOptimizerMegatronStrategy(
        ..., num_distributed_optimizer_instances=2, ddp=DistributedDataParallelConfig()
    )

What the copies are and who holds the same is told in `resiliency.plugins.replica_groups`.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from nemo.lightning import MegatronStrategy

from resiliency.errors import ConfigError
from resiliency.plugins.replica_groups import check_replicas, replica_group

__all__ = ["ReplicatedOptimizerMegatronStrategy", "check_replicas", "replica_group"]


class ReplicatedOptimizerMegatronStrategy(MegatronStrategy):
    """NeMo's strategy, with the optimizer replicated; takes the same arguments.

    Args:
        num_distributed_optimizer_instances: copies of every part of the optimizer, at least 2.  It costs
            as many times the memory of one copy, and one more all-reduce of each rank's part per step.
    Raises:
        ConfigError: fewer than 2 copies, no distributed optimizer, or ranks that do not divide.
    """

    def __init__(self, *args: Any, num_distributed_optimizer_instances: int, **kwargs: Any) -> None:
        check_replicas(num_distributed_optimizer_instances)
        super().__init__(
            *args, num_distributed_optimizer_instances=num_distributed_optimizer_instances, **kwargs
        )

    def connect(self, model: Any) -> None:
        super().connect(model)
        if not getattr(self.ddp_config, "use_distributed_optimizer", False):
            raise ConfigError(
                f"{self.num_distributed_optimizer_instances} copies of the distributed optimizer were asked"
                " for, and this optimizer is not distributed.",
                hint="Use Megatron's DDP, and NeMo's MegatronOptimizerModule with"
                " OptimizerConfig(use_distributed_optimizer=True).",
            )

    def setup_distributed(self) -> None:
        super().setup_distributed()
        model_parallel = (
            self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size
        )
        check_replicas(
            self.num_distributed_optimizer_instances,
            data_parallel_ranks=dist.get_world_size() // model_parallel * self.context_parallel_size,
        )
