# SPDX-License-Identifier: Apache-2.0
"""What ranks do in `test_replica_groups`: a tiny GPT of real Megatron with a replicated optimizer."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import torch

from tests.plugins.megatron_ranks import Job, Layout, job, parts_of


def label_and_content(rank: int, layout: Layout) -> tuple[str, str]:
    """The replica group of this rank, and a digest of what it holds after two steps."""
    from resiliency.plugins.replica_groups import replica_group

    with job(rank, layout) as mine:
        train_on_own_gradients(mine, steps=2)
        hashed = hashlib.sha256()
        for part in parts_of(mine.sharded_state()):
            hashed.update(f"{part.key} {part.global_offset} {part.flattened}".encode())
            hashed.update(part.data.contiguous().view(torch.uint8).numpy().tobytes())
        return replica_group(), hashed.hexdigest()


def train_on_own_gradients(mine: Job, steps: int) -> None:
    """Each rank has gradients of its own, as from data of its own."""
    for step in range(1, steps + 1):
        mine.optimizer.zero_grad()
        mine.model.zero_grad_buffer()
        for parameter in mine.model.parameters():
            wave = torch.arange(parameter.numel(), dtype=torch.float32).mul_(mine.rank + step).sin_()
            parameter.main_grad.copy_(wave.view(parameter.shape))
        mine.model.finish_grad_sync()
        assert mine.optimizer.step()[0]


def numbers_after_adoption(rank: int, layout: Layout) -> dict[str, Any]:
    """What this rank draws, and what the other one draws that goes on from its state."""
    import numpy as np

    from resiliency.plugins.random_states import RandomStates, adopted, set_rng_state

    with job(rank, layout):
        # A program that seeds Python's generator by rank and NumPy's alike; Megatron seeds the others.
        random.seed(rank)
        np.random.seed(1234)
        state = RandomStates().take()

        def drawn() -> dict[str, Any]:
            from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

            with get_cuda_rng_tracker().fork():
                tracked = torch.rand(3).tolist()
            return {
                "python": random.random(),  # noqa: S311 - it is the generator that is looked at
                "numpy": float(np.random.random()),
                "torch": torch.rand(3).tolist(),
                "megatron": tracked,
            }

        found = {"own": drawn()}
        for name in ("stand-in", "the same again"):
            set_rng_state(adopted(state, owner=rank, rank=1 - rank))
            found[name] = drawn()
        set_rng_state(adopted(state, owner=rank, rank=rank))
        found["itself"] = drawn()
        return found
