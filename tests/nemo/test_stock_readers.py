# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of ours opens without us: in stock torch and in stock Megatron, with equal bits.

The readers run in cold processes that import nothing of this project, on one process although two ranks
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

#: Prints for each checkpoint and every tensor in it its shape, dtype, a digest of its bytes and whether all
#: values are finite.
DESCRIBE = """
import hashlib, json, sys

def described(tensors):
    found = {}
    for key, tensor in sorted(tensors.items()):
        values = tensor.detach().contiguous()
        found[key] = {
            "shape": list(values.shape), "dtype": str(values.dtype),
            "digest": hashlib.sha256(values.numpy().tobytes()).hexdigest(),
            "finite": bool(torch.isfinite(values).all()), "same": bool((values == values.flatten()[0]).all()),
        }
    return found

def report(read):
    found = [described(read(directory)) for directory in sys.argv[1:]]
    ours = [name for name in sys.modules if name.partition(".")[0] in ("resiliency", "nemo")]
    print(json.dumps({"found": found, "ours": ours}))
"""
STOCK_TORCH = """
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

def read(directory):
    reader = dcp.FileSystemReader(directory)
    entries = reader.read_metadata().state_dict_metadata
    tensors = {
        key: torch.full(entry.size, float("nan"), dtype=entry.properties.dtype)
        for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors

report(read)
"""
STOCK_MEGATRON = """
import torch
from megatron.core import dist_checkpointing

def read(directory):
    plain = dist_checkpointing.load_plain_tensors(directory)
    tensors = {key: value for key, value in plain.items() if torch.is_tensor(value)}  # the rest is common.pt
    described = dist_checkpointing.load_tensors_metadata(directory)
    assert {key: tuple(t.shape) for key, t in tensors.items()} == {
        key: t.global_shape for key, t in described.items()
    }
    return tensors

torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
report(read)
torch.distributed.destroy_process_group()
"""

Tensors = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def directories(finished: Finished, killed_between_saves: Finished) -> list[Path]:
    """Checkpoints to which both of two ranks contributed: NeMo's own, and one of the checkpoint process."""
    newest = f"step={STEPS}"
    found = [finished.checkpoints / newest / "weights", killed_between_saves.job.checkpoints / newest]
    for directory in found:
        assert {path.name.split("_")[2] for path in directory.rglob("__*_*.distcp")} == {"0", "1"}
    return found


def read_with(reader: str, directories: list[Path]) -> list[Tensors]:
    """What `reader` finds in each directory, from a process that knows neither this project nor NeMo."""
    argv = [sys.executable, "-W", "ignore", "-c", DESCRIBE + reader, *map(str, directories)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=ATTEMPT_S, cwd=directories[0])
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["ours"] == []
    found: list[Tensors] = result["found"]
    return found


@pytest.fixture(scope="module")
def read_by_torch(directories: list[Path]) -> list[Tensors]:
    return read_with(STOCK_TORCH, directories)


def test_stock_torch_and_stock_megatron_read_the_same_bits(
    read_by_torch: list[Tensors], directories: list[Path]
) -> None:
    assert read_by_torch == read_with(STOCK_MEGATRON, directories)
    for tensors in read_by_torch:
        assert all(tensor["finite"] for tensor in tensors.values())
        assert any("exp_avg" in key for key in tensors)


def test_what_nemo_saved_has_the_shapes_of_the_model_and_a_trained_optimizer(
    read_by_torch: list[Tensors],
) -> None:
    by_torch, _ = read_by_torch
    size = MODELS["tiny"]
    embedding = by_torch["module.embedding.word_embeddings.weight"]
    assert embedding["shape"] == [128, size.hidden]  # the 40 words of its tokenizer, padded
    assert not embedding["same"]
    layers = by_torch["module.decoder.layers.self_attention.linear_qkv.weight"]
    assert layers["shape"] == [size.layers, 3 * size.hidden, size.hidden]
    moments = [key for key in by_torch if "exp_avg" in key]
    assert moments
    # The steps of Adam have moved every moment away from zero.
    assert not any(by_torch[key]["same"] for key in moments)
