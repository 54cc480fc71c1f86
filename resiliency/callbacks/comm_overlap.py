# SPDX-License-Identifier: Apache-2.0
"""Overlap communication with computation, chosen from the parallel layout.

NeMo's `MegatronCommOverlapCallback`, which programs can import from here, has a dozen switches, of
which some are errors for some layouts.  `comm_overlap_callback` sets those that a layout can use.
"""

from __future__ import annotations

import nemo.collections.llm  # noqa: F401  # first, because NeMo's recipes and the callback import each other
import torch
from nemo.lightning.pytorch.callbacks.megatron_comm_overlap import MegatronCommOverlapCallback

from resiliency.errors import ConfigError
from resiliency.model import ParallelLayout

__all__ = ["MegatronCommOverlapCallback", "comm_overlap_callback"]


def comm_overlap_callback(layout: ParallelLayout) -> MegatronCommOverlapCallback:
    """NeMo's callback with every overlap that `layout` can use.

    Raises:
        ConfigError: there is no CUDA device, so there is nothing to overlap with.
    """
    if not torch.cuda.is_available():
        raise ConfigError(
            "communication overlap needs CUDA devices, and there is none.",
            hint="Drop --enable-comm-overlap on a CPU machine.",
            flag="--enable-comm-overlap",
        )
    pipelined = layout.pipeline > 1
    return MegatronCommOverlapCallback(
        # User buffers for tensor parallelism come from Transformer Engine and need sequence parallel.
        tp_comm_overlap=layout.tensor > 1,
        overlap_p2p_comm=pipelined and layout.virtual_pipeline is not None,
        batch_p2p_comm=pipelined and layout.virtual_pipeline is None,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        # Gathering parameters inside the optimizer step leaves parameters stale while a checkpoint
        # is taken right after it.
        overlap_param_gather_with_optimizer_step=False,
        align_param_gather=pipelined,
        defer_embedding_wgrad_compute=pipelined,
        wgrad_deferral_limit=50,
    )
