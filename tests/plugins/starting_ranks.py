# SPDX-License-Identifier: Apache-2.0
"""What ranks do in `test_starts`: connector, checkpoint process and a strategy that loads as NeMo's does."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from tests.plugins.megatron_ranks import Layout
from tests.plugins.outlived import outlived

STEPS = (1, 2, 3)
SOON = timedelta(seconds=60)


class Listings:
    """How often this process lists the directories of interest, as the interpreter itself reports it."""

    def __init__(self) -> None:
        self._counted: Counter[str] | None = None
        sys.addaudithook(self._note)  # for good: there is no way to take one away

    def _note(self, event: str, args: tuple[object, ...]) -> None:
        if self._counted is not None and event in ("os.listdir", "os.scandir"):
            self._counted[os.fsdecode(args[0])] += 1  # type: ignore[arg-type]

    @contextmanager
    def counted(self) -> Iterator[Counter[str]]:
        self._counted = counted = Counter()
        try:
            yield counted
        finally:
            self._counted = None


def start(rank: int, layout: Layout, root: Path) -> dict[str, Any]:
    """Save steps to both tiers, end, lose the memory, and start anew; what the start did.

    Returns:
        The step restored, from where, with which content, and the listings by directory, which are
        relative to `root`, or the steps inspected in the persistent tier.
    """
    listings = Listings()
    with ExitStack() as stack:
        io = process(rank, layout, root, "memory", stack)
        for step in STEPS:
            handle = io.open().save(step, io.checkpoint_io.to_capture(state(rank, layout, step), None))
            io.fence()
            assert handle.wait(SOON)
            assert len(handle.record.committed_in) == 2, handle.record
    with ExitStack() as stack:
        io = process(rank, layout, root, "other-memory", stack)
        io.open()
        connector = connector_of(io, rank, layout, root)
        with listings.counted() as counted:
            chosen = connector._restore_newest()
    return {
        "step": chosen.name,
        "tier": io.restores.restored_from.value,
        "weights": connector.trainer.strategy.loaded["weights"].tolist(),
        "listed": {
            os.path.relpath(path, root): times
            for path, times in counted.items()
            if path.startswith(str(root))
        },
    }


def state(rank: int, layout: Layout, step: int | None) -> dict[str, Any]:
    """One tensor of which each rank has a part; without a step, the template for it."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    data = torch.full((4,), float(-1 if step is None else step))
    weights = ShardedTensor.from_rank_offsets("weights", data, (0, rank, layout.ranks))
    return {"weights": weights} if step is None else {"weights": weights, "global_step": step}


def process(rank: int, layout: Layout, root: Path, memory: str, stack: ExitStack) -> Any:
    """A checkpoint process with both tiers; leaving `stack` ends it, and waits for its agent to be gone."""
    from resiliency.checkpoint import CheckpointerOptions, LocalTier
    from resiliency.checkpoint.agent.client import LinkOptions
    from resiliency.events import EventStream
    from resiliency.plugins.in_cluster_local_ckpt import InClusterLocalCheckpointIO
    from resiliency.plugins.megatron_values import register
    from resiliency.plugins.min_ckpt_overhead import MinCkptOverheadCheckpointIO
    from resiliency.runtime import RunInfo

    register()
    (root / memory).mkdir(exist_ok=True)
    io = InClusterLocalCheckpointIO(
        MinCkptOverheadCheckpointIO(),
        LocalTier(directory=root / "local", keep=len(STEPS), replicas=0),
        persistent_directory=root / "persistent",
        events=EventStream(RunInfo(job_name="starts", host="here", rank=rank, world_size=layout.ranks), []),
        options=CheckpointerOptions(
            arena_root=root / memory, link=LinkOptions(grace=timedelta(seconds=5)), slots=len(STEPS) + 1
        ),
    )
    return stack.enter_context(outlived(io))


def connector_of(io: Any, rank: int, layout: Layout, root: Path) -> Any:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import SingleDeviceStrategy

    from resiliency.connectors.checkpoint_connector import CheckpointConnector

    class LoadsAsNemo(SingleDeviceStrategy):
        loaded: dict[str, Any]

        def load_checkpoint(self, checkpoint_path: Any, weights_only: Any = None) -> dict[str, Any]:
            io.load_content_metadata(checkpoint_path)
            self.loaded = io.load_checkpoint(checkpoint_path, sharded_state_dict=state(rank, layout, None))
            return {"pytorch-lightning_version": "2.0.0", "global_step": 0, "epoch": 0, "state_dict": {}}

    class NoWeight(LightningModule):
        pass

    trainer = Trainer(
        strategy=LoadsAsNemo(device="cpu", checkpoint_io=io),
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
    )
    trainer.strategy.connect(NoWeight())
    return CheckpointConnector(trainer, persistent_ckpt_dir=root / "persistent")
