# SPDX-License-Identifier: Apache-2.0
"""Small checkpoints of files, as NeMo's own saves leave them."""

from __future__ import annotations

from pathlib import Path

from resiliency.checkpoint.format import nemo

#: As Megatron writes them: two ranks with one and two files, and what rank 0 writes for all.
FILES = {
    "__0_0.distcp": b"rank zero" * 100,
    "__1_0.distcp": b"rank one" * 200,
    "__1_1.distcp": b"one more" * 50,
    ".metadata": b"where each tensor is",
    "common.pt": b"what is not a tensor",
    "metadata.json": b'{"sharded_backend": "torch_dist"}',
}


def write_checkpoint(root: Path, step: int = 10, *, ranks: int = 2) -> Path:
    """A sealed checkpoint of `ranks` ranks."""
    directory = root / f"step={step}"
    weights = directory / nemo.WEIGHTS
    weights.mkdir(parents=True)
    for name, data in FILES.items():
        (weights / name).write_bytes(data)
    for rank in range(ranks):
        nemo.record_rank(directory, step=step, rank=rank)
    nemo.seal(directory, step=step, world_size=ranks)
    return directory
