# SPDX-License-Identifier: Apache-2.0
"""What `resiliency.data` takes of torch was tried with the oldest release of its range.

CI has one torch. With torch 2.6 on Python 3.10 this folder's tests of the usual level were run by
hand, with `pytest --noconftest -p resiliency.testing.fixtures`. Left out were accelerate, the
launcher and the engine, of which some take a storage in memory. They pass, but for those of FSDP2,
which in that release does not run on a CPU, and for gloo there: one rank in some hundred did not
return from `destroy_process_group`. A name that is not listed here needs another run. Methods of
tensors, modules and loaders are not seen here.
"""

from __future__ import annotations

import ast
from pathlib import Path

import torch.utils.data.distributed

FOLDER = Path(__file__).parents[2] / "resiliency" / "data"
TRIED = {
    "torch.Generator",
    "torch.Tensor",
    "torch.arange",
    "torch.argsort",
    "torch.as_tensor",
    "torch.bincount",
    "torch.cat",
    "torch.device",
    "torch.distributed.ProcessGroup",
    "torch.distributed.all_gather_object",
    "torch.distributed.get_rank",
    "torch.distributed.get_world_size",
    "torch.distributed.is_available",
    "torch.distributed.is_initialized",
    "torch.distributed.new_group",
    "torch.empty",
    "torch.empty_like",
    "torch.equal",
    "torch.frombuffer",
    "torch.get_rng_state",
    "torch.int64",
    "torch.isin",
    "torch.nn",
    "torch.nonzero",
    "torch.optim.Optimizer",
    "torch.randperm",
    "torch.repeat_interleave",
    "torch.save",
    "torch.searchsorted",
    "torch.set_rng_state",
    "torch.split",
    "torch.stack",
    "torch.tensor",
    "torch.uint8",
    "torch.unique",
    "torch.utils.data.BatchSampler",
    "torch.utils.data.DataLoader",
    "torch.utils.data.Dataset",
    "torch.utils.data.IterableDataset",
    "torch.utils.data.Sampler",
    "torch.utils.data.get_worker_info",
}


def names_of_torch(path: Path) -> set[str]:
    tree, found, modules = ast.parse(path.read_text()), set(), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name.partition(".")[0] == "torch":
                    modules[name.asname or "torch"] = name.name if name.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            found |= {f"{node.module}.{name.name}" for name in node.names}
    for node in ast.walk(tree):
        words: list[str] = []
        while isinstance(node, ast.Attribute):
            words.insert(0, node.attr)
            node = node.value
        if words and isinstance(node, ast.Name) and node.id in modules:
            found.add(".".join([modules[node.id], *words]))
    return found


def test_each_name_of_torch_was_tried_with_the_oldest_release() -> None:
    used = set().union(*map(names_of_torch, FOLDER.rglob("*.py")))
    assert len(used) > 20
    assert used - TRIED == set()
    assert TRIED - used == set()


def test_each_name_of_torch_is_in_this_release() -> None:
    for name in TRIED:
        value: object = torch
        for word in name.split(".")[1:]:
            value = getattr(value, word)
