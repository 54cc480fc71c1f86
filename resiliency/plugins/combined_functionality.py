# SPDX-License-Identifier: Apache-2.0
"""`CombinedCheckpointIO`: both tiers by the arguments that recipes for NeMo's own `CheckpointIO` know.

    io = CombinedCheckpointIO(async_save=True, local_ckpt_dir="/dev/shm/ckpt", use_ckpt_load_replication=True)
    io = AsyncFinalizableCheckpointIO(io)  # with async_save, as NeMo wraps its own

NeMo writes the persistent checkpoints, a checkpoint process the local ones.  One process for both tiers
copies the state once and holds training less:
`resiliency.plugins.in_cluster_local_ckpt.InClusterLocalCheckpointIO`.
"""

from __future__ import annotations

from pathlib import Path

from resiliency.checkpoint.trainer.options import LocalTier
from resiliency.plugins.dist_ckpt import VerifiedCheckpointIO
from resiliency.plugins.in_cluster_local_ckpt import InClusterLocalCheckpointIO, SplitCheckpointIO
from resiliency.plugins.min_ckpt_overhead import MinCkptOverheadCheckpointIO


class CombinedCheckpointIO(SplitCheckpointIO):
    """Two tiers, each with its own parallel saving and loading.

    Args:
        save_ckpt_format, load_directly_on_device, async_save, torch_dist_multiproc,
        assume_constant_structure: as in
            NeMo's `MegatronCheckpointIO`.  Local checkpoints are always written beside training.
        persistent_parallel_save, persistent_parallel_save_within_dp, persistent_parallel_load: of NeMo's
        saves. local_parallel_save, local_parallel_save_within_dp, local_parallel_load: of the local ones;
        with the
            defaults each rank keeps its whole state on its host.
        use_ckpt_load_replication: a rank whose shard is lost goes on from the shard of another rank of its
        replica
            group (`resiliency.plugins.replica_groups`).
        local_ckpt_dir: directory of the local tier, of this job alone.
        replicas: copies of each local checkpoint on other hosts.
    """

    def __init__(
        self,
        save_ckpt_format: str = "torch_dist",
        load_directly_on_device: bool = True,
        async_save: bool = False,
        torch_dist_multiproc: int | None = None,
        assume_constant_structure: bool = False,
        persistent_parallel_save: bool = True,
        persistent_parallel_save_within_dp: bool = False,
        persistent_parallel_load: bool = True,
        local_parallel_save: bool = False,
        local_parallel_save_within_dp: bool = False,
        local_parallel_load: bool = False,
        use_ckpt_load_replication: bool = False,
        *,
        local_ckpt_dir: str | Path,
        replicas: int = 0,
    ) -> None:
        persistent = VerifiedCheckpointIO(
            save_ckpt_format=save_ckpt_format,
            load_directly_on_device=load_directly_on_device,
            async_save=async_save,
            torch_dist_multiproc=torch_dist_multiproc,
            assume_constant_structure=assume_constant_structure,
            parallel_save=persistent_parallel_save,
            parallel_save_within_dp=persistent_parallel_save_within_dp,
            parallel_load=persistent_parallel_load,
        )
        captured = MinCkptOverheadCheckpointIO(
            save_ckpt_format=save_ckpt_format,
            load_directly_on_device=load_directly_on_device,
            assume_constant_structure=assume_constant_structure,
            parallel_save=local_parallel_save,
            parallel_save_within_dp=local_parallel_save_within_dp,
            parallel_load=local_parallel_load,
        )
        local = LocalTier(directory=local_ckpt_dir, replicas=replicas)
        process = InClusterLocalCheckpointIO(captured, local, substitutes=use_ckpt_load_replication)
        super().__init__(persistent, process)
