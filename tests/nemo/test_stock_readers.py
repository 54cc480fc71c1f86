# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of ours opens without us: in stock torch and in stock Megatron, with equal bits.

The readers run in processes that import nothing of this project, on one process although two ranks
wrote.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from resiliency.model import MODELS
from tests.nemo.conftest import ATTEMPT_S, STEPS, Finished

pytestmark = [pytest.mark.nemo, pytest.mark.slow]

#: Prints for every tensor its shape, dtype, a digest of its bytes and whether all values are finite.
DESCRIBE = """
import hashlib, json, sys

def describe(tensors):
    found = {}
    for key, tensor in sorted(tensors.items()):
        values = tensor.detach().contiguous()
        found[key] = {
            "shape": list(values.shape), "dtype": str(values.dtype),
            "digest": hashlib.sha256(values.numpy().tobytes()).hexdigest(),
            "finite": bool(torch.isfinite(values).all()), "same": bool((values == values.flatten()[0]).all()),
        }
    ours = [name for name in sys.modules if name.partition(".")[0] in ("resiliency", "nemo")]
    print(json.dumps({"tensors": found, "ours": ours}))
"""
STOCK_TORCH = """
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
reader = dcp.FileSystemReader(sys.argv[1])
entries = reader.read_metadata().state_dict_metadata
tensors = {
    key: torch.full(entry.size, float("nan"), dtype=entry.properties.dtype)
    for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)
}
dcp.load(tensors, storage_reader=reader, no_dist=True)
describe(tensors)
"""
STOCK_MEGATRON = """
import torch
from megatron.core import dist_checkpointing
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
plain = dist_checkpointing.load_plain_tensors(sys.argv[1])
tensors = {key: value for key, value in plain.items() if torch.is_tensor(value)}  # the rest is common.pt
described = dist_checkpointing.load_tensors_metadata(sys.argv[1])
assert {key: tuple(t.shape) for key, t in tensors.items()} == {
    key: t.global_shape for key, t in described.items()
}
describe(tensors)
torch.distributed.destroy_process_group()
"""


@pytest.fixture
def weights(finished: Finished) -> Path:
    """A checkpoint to which both of two ranks contributed."""
    written = finished.checkpoints / f"step={STEPS}" / "weights"
    assert {path.name.split("_")[2] for path in written.glob("__*_*.distcp")} == {"0", "1"}
    return written


def read_with(reader: str, weights: Path) -> dict[str, Any]:
    """What `reader` finds, from a process that knows neither this project nor NeMo."""
    argv = [sys.executable, "-W", "ignore", "-c", DESCRIBE + reader, str(weights)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=ATTEMPT_S, cwd=weights)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["ours"] == []
    tensors: dict[str, Any] = result["tensors"]
    return tensors


def test_stock_torch_and_stock_megatron_read_the_same_bits(weights: Path) -> None:
    by_torch = read_with(STOCK_TORCH, weights)
    by_megatron = read_with(STOCK_MEGATRON, weights)
    assert by_torch == by_megatron

    size = MODELS["tiny"]
    assert all(tensor["finite"] for tensor in by_torch.values())
    embedding = by_torch["module.embedding.word_embeddings.weight"]
    assert embedding["shape"] == [128, size.hidden]  # the 40 words of its tokenizer, padded
    assert not embedding["same"]
    layers = by_torch["module.decoder.layers.self_attention.linear_qkv.weight"]
    assert layers["shape"] == [size.layers, 3 * size.hidden, size.hidden]
    moments = [key for key in by_torch if "exp_avg" in key]
    assert moments
    # The steps of Adam have moved every moment away from zero.
    assert not any(by_torch[key]["same"] for key in moments)
