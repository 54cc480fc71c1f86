# SPDX-License-Identifier: Apache-2.0
"""What ranks with real Megatron models do in `test_reused_state`: later saves of one job."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import torch

from tests.plugins.megatron_ranks import Job, Layout, _build, job


def writers_of_what_came_later(rank: int, layout: Layout) -> dict[str, bool]:
    """Which tensors of the second save this rank writes; one of them was not in the first."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica

    from resiliency.plugins.megatron_state import MegatronSaving

    def state(*names: str) -> dict[str, Any]:
        return {name: ShardedTensor.from_rank_offsets(name, torch.ones(4), replica_id=rank) for name in names}

    with job(rank, layout):
        saving = MegatronSaving(parallelization_group=parallel_state.get_data_parallel_group())
        saving.to_capture(state("first", "second"))
        parts = saving.to_capture(state("first", "second", "later"))["sharded"]
        return {name: is_main_replica(part.replica_id) for name, part in parts.items()}


def prepared_by_one_alone(rank: int, layout: Layout) -> int:
    """Rank 0 prepares a second save in which no other rank takes part."""
    from megatron.core import parallel_state

    from resiliency.plugins.megatron_state import MegatronSaving

    with job(rank, layout) as mine:
        saving = MegatronSaving(parallelization_group=parallel_state.get_data_parallel_group())
        mine.train(1)
        saving.to_capture(mine.sharded_state())
        return 0 if rank else len(saving.to_capture(mine.sharded_state())["sharded"])


def room_by_one_alone(rank: int, layout: Layout) -> tuple[int, int]:
    """Bytes that rank 0 makes room for before any save, alone, and bytes that it then captures."""
    from megatron.core import parallel_state

    from resiliency.checkpoint.state.snapshot import StateWalker
    from resiliency.plugins.megatron_state import MegatronSaving

    def size(state: dict[str, Any]) -> int:
        return int(StateWalker().snapshot(state).layout.size_bytes)

    with job(rank, layout) as mine:
        saving = MegatronSaving(parallelization_group=parallel_state.get_data_parallel_group())
        mine.train(1)
        made = size(saving.preview(mine.sharded_state())) if rank == 0 else 0
        return made, size(saving.to_capture(mine.sharded_state()))


class Saver:
    """Saves through NeMo's adapter, with as much of NeMo's strategy as it asks for."""

    def __init__(self, mine: Job) -> None:
        from resiliency.plugins.min_ckpt_overhead import MinCkptOverheadCheckpointIO

        self.io = MinCkptOverheadCheckpointIO(parallel_save=False)
        self.gathered = 0
        #: A plain value among the sharded ones, as a module of one's own may have it.
        self.plain: object = None
        self.serve(mine)

    def serve(self, mine: Job) -> None:
        from megatron.core.distributed import DistributedDataParallelConfig

        self.job = mine
        mine.model.force_param_sync = self._gather
        self.strategy = SimpleNamespace(
            megatron_parallel=mine.model,
            optimizers=[mine.optimizer],
            ddp_config=DistributedDataParallelConfig(
                use_distributed_optimizer=True, overlap_param_gather=True
            ),
        )

    def _gather(self) -> None:
        self.gathered += 1

    def reuses(self) -> bool:
        """Save once; whether the tree of an earlier save was used again."""
        state = self.io.try_reuse(self.strategy, {"global_step": 1})
        if state is not None:
            return True
        self.build()
        return False

    def build(self) -> None:
        whole = {"global_step": 1, "state_dict": OrderedDict(), "optimizer_states": {}}
        parts = self.job.sharded_state()
        model = dict(parts["sharded_state_dict"])
        if self.plain is not None:
            model["plain"] = self.plain
        self.io.to_capture({**whole, "sharded_state_dict": model, "optimizer": parts["optimizer"]}, None)
        self.io.remember(self.strategy)


def reused_for(rank: int, layout: Layout) -> dict[str, Any]:
    """Whether the third save uses the tree of the second again, by what changed before it."""
    found: dict[str, Any] = {}
    with job(rank, layout) as mine:
        mine.train(1)
        saver = Saver(mine)
        found["nothing"] = [saver.reuses() for _ in range(3)]
        saver.io.teardown()
        found["the end of a training"] = saver.reuses()
        [saver.reuses() for _ in range(2)]
        other = _build(rank, layout)
        other.train(2)
        saver.serve(other)
        found["another job"] = saver.reuses()
        saver = Saver(mine)
        saver.plain = 1
        found["plain values"] = [saver.reuses() for _ in range(3)]
        saver = Saver(mine)
        [saver.reuses() for _ in range(3)]
        before = saver.gathered
        parameter = next(mine.model.parameters())
        parameter.data = parameter.data.clone()
        found["a moved tensor"] = saver.reuses()
        found["gathered"] = saver.gathered - before
    return found
