# SPDX-License-Identifier: Apache-2.0
"""What ranks do in `test_agreed_restores`: one of them alone finds something, and all act alike."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from resiliency.checkpoint import Tier
from resiliency.errors import CheckpointCorrupt, LayoutMismatch, ResiliencyError
from tests.plugins.megatron_ranks import Layout
from tests.plugins.outlived import outlived

#: How loading the newest checkpoint ends on rank 1.
ERRORS: dict[str, ResiliencyError] = {
    "corrupt": CheckpointCorrupt("bytes differ here."),
    "unfit": LayoutMismatch("another shape is wanted here."),
}
NEWEST = 3
SOON = timedelta(seconds=60)


def restored(rank: int, layout: Layout, root: Path, error: str) -> str:
    """What this rank restores, or the error, where rank 1 alone cannot load the newest checkpoint."""
    try:
        chosen = _connector(rank, root, ERRORS[error])._restore_newest()
    except ResiliencyError as failure:
        return f"{type(failure).__name__}: {failure}"
    return chosen.name


def restored_where_it_is_seen(rank: int, layout: Layout, root: Path) -> str:
    """What this rank restores, where each sees storage of its own under one path."""
    os.chdir(root / str(rank))
    chosen = _connector(-1, Path("/proc/self/cwd/storage"), ERRORS["corrupt"])._restore_newest()
    return chosen.name


def refused_where_it_is_seen(rank: int, layout: Layout, root: Path) -> str:
    """The error, where each rank sees storage of its own under one path."""
    os.chdir(root / str(rank))
    try:
        _connector(-1, Path("/proc/self/cwd/storage"), ERRORS["corrupt"])._restore_newest()
    except ResiliencyError as failure:
        return f"{type(failure).__name__}: {failure}"
    return ""


def restored_of_both_tiers(rank: int, layout: Layout, root: Path, is_resharded: bool) -> str:
    """What this rank restores, or the error, where the hosts hold the newest step for another layout.

    Args:
        is_resharded: it is persistent too, and its form there does not allow it.
    """
    from resiliency.checkpoint.recovery.refusals import RefusedSaves
    from resiliency.plugins.min_ckpt_overhead import MinCkptOverheadCheckpointIO
    from resiliency.plugins.persistent_ckpt_proc import PersistentCheckpointProcessIO
    from resiliency.plugins.process_restores import ProcessRestores

    connector = _connector(-1, root, ERRORS["unfit"])

    class Restores(ProcessRestores):
        """Knows two steps without an engine, and fits the older one alone."""

        def inventory(self) -> Any:
            return SimpleNamespace(stored=[NEWEST, NEWEST - 1], on_hosts={NEWEST: Tier.MEMORY})

        def refused_saves(self, *, above: int) -> Any:
            return RefusedSaves()

        def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
            is_newest = path == self.path_of(NEWEST)
            self.is_resharded = is_resharded or not is_newest
            if is_newest:
                raise ERRORS["unfit"]
            return loads.load_checkpoint(path)

    strategy = connector.trainer.strategy
    loads = strategy.checkpoint_io
    strategy.checkpoint_io = io = PersistentCheckpointProcessIO(MinCkptOverheadCheckpointIO(), root)
    io.restores = Restores(io.checkpoint_io, io.directories, io.open)
    try:
        chosen = connector._restore_newest()
    except ResiliencyError as failure:
        return f"{type(failure).__name__}: {failure}"
    return chosen.name


def restored_while_a_cleaner_runs(rank: int, layout: Layout, root: Path, is_held: bool) -> tuple[str, bool]:
    """What this rank restores, and whether a cleaner could delete it when one rank was reading still.

    Args:
        is_held: hosts hold the step too, for another layout, and it is the persistent one that is cut anew.
    """
    from resiliency.checkpoint.format.catalog import remove_checkpoint
    from resiliency.checkpoint.ranks import RankGroup
    from resiliency.checkpoint.recovery.refusals import RefusedSaves
    from resiliency.checkpoint.storage.posix import LocalStorage
    from resiliency.plugins.min_ckpt_overhead import MinCkptOverheadCheckpointIO
    from resiliency.plugins.persistent_ckpt_proc import PersistentCheckpointProcessIO
    from resiliency.plugins.process_restores import ProcessRestores

    connector = _connector(-1, root, ERRORS["unfit"])
    went: list[bool] = []

    class Restores(ProcessRestores):
        def inventory(self) -> Any:
            return SimpleNamespace(stored=[NEWEST], on_hosts={NEWEST: Tier.MEMORY} if is_held else {})

        def refused_saves(self, *, above: int) -> Any:
            return RefusedSaves()

    class Process(PersistentCheckpointProcessIO):
        def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
            RankGroup.of_process_group().gather(None)  # rank 0 reads
            if rank == 1:
                went.append(remove_checkpoint(LocalStorage(root), NEWEST))
            return loads.load_checkpoint(path)

    strategy = connector.trainer.strategy
    loads = strategy.checkpoint_io
    strategy.checkpoint_io = io = Process(MinCkptOverheadCheckpointIO(), root)
    io.restores = Restores(io.checkpoint_io, io.directories, io.open)
    return connector._restore_newest().name, any(went)


def refused(rank: int, layout: Layout, root: Path, error: str) -> str:
    """The error, where rank 0 alone cannot list the checkpoints."""
    place = root / "a loop" if rank == 0 else root
    try:
        _connector(rank, place, ERRORS[error])._restore_newest()
    except ResiliencyError as failure:
        return f"{type(failure).__name__}: {failure}"
    return ""


def _connector(rank: int, root: Path, error: ResiliencyError) -> Any:
    import lightning
    from lightning.fabric.plugins import TorchCheckpointIO
    from lightning.pytorch import LightningModule, Trainer

    from resiliency.connectors.checkpoint_connector import CheckpointConnector

    class OneWeight(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

    module = OneWeight()

    class FailsOnRank1(TorchCheckpointIO):
        def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
            if rank == 1 and path.name == f"step={NEWEST}":
                raise error
            version = {"pytorch-lightning_version": lightning.__version__}
            return {**version, "global_step": 0, "epoch": 0, "state_dict": module.state_dict()}

    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        plugins=[FailsOnRank1()],
    )
    trainer.strategy.connect(module)
    return CheckpointConnector(trainer, persistent_ckpt_dir=root)


def content_metadata(rank: int, layout: Layout, root: Path) -> str:
    """What NeMo's strategy is told of a capture of which rank 1's part is not Megatron's."""
    from resiliency.checkpoint import CheckpointerOptions
    from resiliency.checkpoint.agent.client import LinkOptions
    from resiliency.events import EventStream
    from resiliency.plugins.megatron_values import CommonPart, packed, register
    from resiliency.plugins.min_ckpt_overhead import MinCkptOverheadCheckpointIO
    from resiliency.plugins.persistent_ckpt_proc import PersistentCheckpointProcessIO
    from resiliency.runtime import RunInfo

    register()
    options = CheckpointerOptions(arena_root=root / "memory", link=LinkOptions(grace=timedelta(seconds=5)))
    events = EventStream(RunInfo(job_name="agreed", host="here", rank=rank, world_size=layout.ranks), [])

    def process() -> PersistentCheckpointProcessIO:
        return PersistentCheckpointProcessIO(
            MinCkptOverheadCheckpointIO(), root / "checkpoints", events=events, options=options
        )

    before = process()
    common = CommonPart(packed({"content_metadata": {"form": "a form"}}), rank)
    state = {"common": common} if rank == 0 else {"weight": torch.ones(4)}
    handle = before.open().save(NEWEST, state)
    before.fence()
    handle.wait(SOON)
    before.teardown()
    with outlived(process()) as io:
        assert NEWEST in io.restores.captured()
        try:
            return str(io.load_content_metadata(root / "checkpoints" / f"step={NEWEST}"))
        except ResiliencyError as failure:
            return f"{type(failure).__name__}: {failure}"
