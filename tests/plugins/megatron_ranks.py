# SPDX-License-Identifier: Apache-2.0
"""What the ranks of test_megatron_state.py run: a tiny GPT of real Megatron, on gloo.

States are compared as *global tensors*: the parts of all ranks, put together by what Megatron says
about each part.  So a state that was saved by two ranks can be compared, bit for bit, with what one
rank loaded.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from resiliency.checkpoint import Checkpointer, CheckpointerOptions
from resiliency.checkpoint.agent.client import LinkOptions
from resiliency.checkpoint.format.reader import CheckpointReader
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.errors import CheckpointCorrupt, LayoutMismatch
from resiliency.runtime import RunInfo
from resiliency.testing import megatron_cpu
from tests.checkpoint.storage_builders import read_shard

if TYPE_CHECKING:
    from resiliency.plugins.megatron_state import MegatronSaving

STEP = 5
SOON = timedelta(seconds=60)
MODEL_SPACE = "fully_sharded_model_space"
BUCKET_SPACE = "dp_reshardable"


@dataclass(frozen=True)
class Layout:
    """How the ranks share the model, and in which form its optimizer is saved."""

    ranks: int = 1
    tensor: int = 1
    sharding: str = MODEL_SPACE
    bf16: bool = True
    distributed_optimizer: bool = True
    layers: int = 2
    #: Of the distributed optimizer.
    copies: int = 1

    def __str__(self) -> str:
        replicas = self.ranks // self.tensor
        precision = "bf16" if self.bf16 else "fp32"
        optimizer = self.sharding if self.distributed_optimizer else "plain"
        return f"tp{self.tensor}-dp{replicas}-{precision}-{optimizer}"


@dataclass
class Part:
    """One rank's part of a global tensor, as Megatron describes it."""

    key: str
    data: torch.Tensor
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    local_shape: tuple[int, ...]
    flattened: tuple[int, int] | None


@dataclass
class Job:
    """Model and optimizer of one rank."""

    layout: Layout
    model: Any
    optimizer: Any
    rank: int
    extra: dict[str, Any] = field(default_factory=dict)

    def train(self, steps: int) -> None:
        """Optimizer steps on made-up gradients, the same on all replicas."""
        for step in range(1, steps + 1):
            self.optimizer.zero_grad()
            self.model.zero_grad_buffer()
            for parameter in self.model.parameters():
                wave = torch.arange(parameter.numel(), dtype=torch.float32).add_(step).sin_()
                parameter.main_grad.copy_(wave.view(parameter.shape))
            self.model.finish_grad_sync()
            assert self.optimizer.step()[0]

    def sharded_state(self, *, loading: bool = False) -> dict[str, Any]:
        """Like NeMo's checkpoint: sharded model and optimizer, objects of each rank, and plain values."""
        from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject

        metadata = {
            "distrib_optim_sharding_type": self.layout.sharding,
            "chained_optim_avoid_prefix": True,
        }
        model = self.model.module.sharded_state_dict(metadata=metadata)
        optimizer = self.optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)
        noise = None if loading else {"torch": torch.get_rng_state(), "draws": (self.rank, 0.5)}
        state = {
            "state_dict" if loading else "sharded_state_dict": model,
            "optimizer": [optimizer],
            "random": ShardedObject("random", noise, (self.layout.ranks,), (self.rank,)),
            "here": LocalNonpersistentObject(f"rank {self.rank}"),
        }
        # A template has no plain values: they come from the checkpoint.
        return state if loading else {**state, "global_step": STEP, "loops": {"epochs": [1, 2], "seen": None}}


@contextlib.contextmanager
def job(rank: int, layout: Layout) -> Iterator[Job]:
    """A rank's model and optimizer, freshly initialised."""
    with megatron_cpu.installed():
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor, num_distributed_optimizer_instances=layout.copies
        )
        try:
            model_parallel_cuda_manual_seed(7)
            yield _build(rank, layout)
        finally:
            parallel_state.destroy_model_parallel()


def _build(rank: int, layout: Layout) -> Job:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=layout.layers,
        hidden_size=16,
        ffn_hidden_size=24,
        num_attention_heads=4,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        tensor_model_parallel_size=layout.tensor,
        bf16=layout.bf16,
        params_dtype=torch.bfloat16 if layout.bf16 else torch.float32,
        **megatron_cpu.CPU_MODEL_CONFIG,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=64, max_sequence_length=8)
    if layout.bf16:
        model = model.bfloat16()
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=layout.distributed_optimizer,
        num_distributed_optimizer_instances=layout.copies,
    )
    ddp = DistributedDataParallel(config, ddp_config, model)
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=0.01,
        bf16=layout.bf16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=layout.distributed_optimizer,
    )
    return Job(layout, ddp, get_megatron_optimizer(optimizer_config, [ddp]), rank)


def parts_of(state: Any) -> list[Part]:
    """The sharded tensors of a state, copied, without Megatron's types; padding as zeros."""
    from megatron.core.dist_checkpointing.mapping import (
        LocalNonpersistentObject,
        ShardedTensor,
        apply_factories,
    )

    apply_factories(state)
    parts = []

    def walk(item: Any, padding: bool) -> None:
        if isinstance(item, ShardedTensor) and item.data.numel():
            parts.append(part_of(item, torch.zeros_like(item.data) if padding else item.data))
        elif isinstance(item, dict):
            mark = item.get("padding")
            for value in item.values():
                walk(value, isinstance(mark, LocalNonpersistentObject) and mark.unwrap())
        elif isinstance(item, list):
            for value in item:
                walk(value, False)

    walk(state, False)
    return parts


def part_of(item: Any, data: torch.Tensor) -> Part:
    flattened = item.flattened_range
    return Part(
        key=item.key,
        data=data.detach().clone(),
        global_shape=tuple(item.global_shape),
        global_offset=tuple(item.global_offset),
        local_shape=(1,) * item.prepend_axis_num + tuple(item.local_shape),
        flattened=None if flattened is None else (flattened.start, flattened.stop),
    )


def whole(parts: list[Part]) -> dict[str, torch.Tensor]:
    """Global tensors from the parts of all ranks."""
    tensors: dict[str, torch.Tensor] = {}
    pieces: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
    for part in parts:
        found = tensors.setdefault(part.key, torch.zeros(part.global_shape, dtype=part.data.dtype))
        local = part.data.reshape(-1)
        if part.flattened is not None:
            where = (part.key, part.global_offset)
            block = pieces.setdefault(where, torch.zeros(part.local_shape, dtype=local.dtype).flatten())
            block[slice(*part.flattened)] = local
            local = block
        region = tuple(slice(o, o + n) for o, n in zip(part.global_offset, part.local_shape, strict=True))
        found[region] = local.view(part.local_shape)
    return tensors


def differing(left: list[Part], right: list[Part]) -> list[str]:
    """Keys whose global tensors are not the same to the bit."""
    a, b = whole(left), whole(right)
    return sorted(set(a) ^ set(b)) + [
        key
        for key in sorted(set(a) & set(b))
        if (a[key].dtype, a[key].shape) != (b[key].dtype, b[key].shape)
        or not torch.equal(a[key].flatten().view(torch.uint8), b[key].flatten().view(torch.uint8))
    ]


@contextlib.contextmanager
def opened(job: Job, directory: Path, name: str) -> Iterator[tuple[Checkpointer, MegatronSaving]]:
    from megatron.core import parallel_state

    from resiliency.plugins.megatron_state import MegatronSaving, optimizer_steps

    options = CheckpointerOptions(format="megatron", link=LinkOptions(grace=timedelta(seconds=5)))
    info = RunInfo(job_name=name, host="here", rank=job.rank, world_size=job.layout.ranks)
    optimizers = optimizer_steps(job.optimizer)
    with Checkpointer(directory, info=info, options=options, optimizers=optimizers) as checkpoints:
        yield checkpoints, MegatronSaving(parallelization_group=parallel_state.get_data_parallel_group())


def template(rank: int, layout: Layout, file: str, saved_by: int) -> None:
    """Write what `layout` wants from a checkpoint of `saved_by` ranks, for a process that has no model."""
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, extract_matching_values
    from megatron.core.dist_checkpointing.mapping import ShardedBase, apply_factories

    with job(rank, layout) as untrained:
        state = untrained.sharded_state(loading=True)
        apply_factories(state)
        if layout.ranks != saved_by:
            state.pop("random")  # one object per rank that saved
        state, _ = extract_matching_values(state, lambda item: isinstance(item, ShardedBase))
        torch.save(dict_list_map_outplace(lambda item: item.without_data(), state), file.format(rank=rank))


def saved(rank: int, layout: Layout, directory: Path, name: str) -> list[Part]:
    """Train, save through the engine, go on, come back from memory, and return what was saved."""
    with job(rank, layout) as trained:
        trained.train(3)
        with opened(trained, directory, name) as (checkpoints, saving):
            expected, draws = parts_of(trained.sharded_state()), torch.get_rng_state()
            state = saving.to_capture(trained.sharded_state(), content_metadata={"form": layout.sharding})
            handle = checkpoints.save(STEP, state)
            trained.train(2)
            assert differing(parts_of(trained.sharded_state()), expected)
            until = time.monotonic() + SOON.total_seconds()
            # The agent hears of a capture a moment after it, or when it has started.
            while not (sources := checkpoints.take_inventory().sources()):
                assert time.monotonic() < until
            assert (sources[0].step, sources[0].tier.value) == (STEP, "memory")
            state = restore(trained, checkpoints, "memory")
            compare(trained, state, expected)
            assert torch.equal(state["random"]["torch"], draws)
            assert handle.wait(SOON)
            assert handle.state.value == "committed", handle.record
    return expected


def restored_from_disk(rank: int, layout: Layout, directory: Path, expected: list[list[Part]]) -> None:
    """In a new process group: what `saved` saved comes back, read by this library."""
    from resiliency.plugins.megatron_state import MegatronLoading

    with job(rank, layout) as fresh:
        fresh.train(1)
        loading = MegatronLoading(fresh.sharded_state(loading=True))
        loading.fill(read_shard(CheckpointReader(LocalStorage(directory), STEP), rank))()
        compare(fresh, loading.state_dict, expected[rank])


def restored_together(
    rank: int, layout: Layout, directory: Path, name: str, expected: list[list[Part]]
) -> None:
    """The same through `Checkpointer`, which makes sure that all ranks take the same step."""
    with job(rank, layout) as fresh:
        fresh.train(1)
        with opened(fresh, directory, name) as (checkpoints, _):
            compare(fresh, restore(fresh, checkpoints, "persistent"), expected[rank])


def restore(job: Job, checkpoints: Checkpointer, tier: str) -> dict[str, Any]:
    from resiliency.plugins.megatron_state import MegatronLoading

    loading = MegatronLoading(job.sharded_state(loading=True))
    restored = checkpoints.restore_with(loading.fill)
    assert (restored.step, restored.tier.value) == (STEP, tier)
    return loading.state_dict


def compare(job: Job, state: dict[str, Any], expected: list[Part]) -> None:
    """Load as Megatron's own loop does, and compare everything."""
    assert state["global_step"] == STEP
    assert state["loops"] == {"epochs": [1, 2], "seen": None}
    assert state["content_metadata"] == {"form": job.layout.sharding}
    assert state["here"] == f"rank {job.rank}"
    assert state["random"]["draws"] == (job.rank, 0.5)
    job.model.module.load_state_dict(state["state_dict"])
    job.optimizer.load_state_dict(state["optimizer"][0])
    assert differing(parts_of(job.sharded_state()), expected) == []


def loaded_with_another_layout(rank: int, layout: Layout, directory: Path, name: str) -> list[Part]:
    """The engine refuses, on all ranks, and the same template goes to stock Megatron."""
    from megatron.core import dist_checkpointing

    from resiliency.plugins.megatron_state import MegatronLoading

    with job(rank, layout) as fresh, opened(fresh, directory, name) as (checkpoints, _):
        wanted = fresh.sharded_state(loading=True)
        wanted.pop("random")  # an object per saved rank
        before = parts_of(fresh.sharded_state())
        with pytest.raises(LayoutMismatch):
            checkpoints.restore_with(MegatronLoading(wanted).fill)
        assert differing(parts_of(fresh.sharded_state()), before) == []
        state = dist_checkpointing.load(wanted, str(directory / f"step={STEP}"))
        fresh.model.module.load_state_dict(state["state_dict"])
        fresh.optimizer.load_state_dict(state["optimizer"][0])
        return parts_of(fresh.sharded_state())


def loaded_by_nemo(rank: int, layout: Layout, directory: Path) -> list[Part] | str:
    """What NeMo's reader loads for another layout, or why it refuses."""
    from resiliency.plugins.dist_ckpt import VerifiedCheckpointIO

    with job(rank, layout) as fresh:
        wanted = fresh.sharded_state(loading=True)
        wanted.pop("random")  # an object per saved rank
        try:
            state = VerifiedCheckpointIO().load_checkpoint(directory / f"step={STEP}", wanted)
        except LayoutMismatch as mismatch:
            return str(mismatch)
        fresh.model.module.load_state_dict(state["state_dict"])
        fresh.optimizer.load_state_dict(state["optimizer"][0])
        return parts_of(fresh.sharded_state())


#: What rank 1 wants instead of what was saved.
CHANGES = ("key", "shape", "object")


def refused(rank: int, layout: Layout, directory: Path, name: str) -> dict[str, str]:
    """Only rank 1's template is changed; every rank must refuse, and stay as it is.  The texts."""
    from resiliency.plugins.megatron_state import MegatronLoading

    texts = {}
    with job(rank, layout) as fresh, opened(fresh, directory, name) as (checkpoints, _):
        before = parts_of(fresh.sharded_state())
        for change in CHANGES:
            wanted = fresh.sharded_state(loading=True)
            if rank == 1:
                _change(wanted, change)
            with pytest.raises(LayoutMismatch) as caught:
                checkpoints.restore_with(MegatronLoading(wanted).fill)
            assert differing(parts_of(fresh.sharded_state()), before) == []
            texts[change] = str(caught.value)
    return texts


def _change(wanted: dict[str, Any], change: str) -> None:
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    part = [item for item in nested_values(wanted) if isinstance(item, ShardedTensor)][-1]
    if change == "key":
        part.key += ".other"
    elif change == "shape":
        part.global_shape = tuple(2 * size for size in part.global_shape)
        part.axis_fragmentations = tuple(2 * count for count in part.axis_fragmentations)
    else:
        wanted["random"].key = "another object"


def passed_over(rank: int, layout: Layout, directory: Path, name: str) -> None:
    """There is nothing that the engine restores, and the model stays as it is."""
    from resiliency.plugins.megatron_state import MegatronLoading

    with job(rank, layout) as fresh, opened(fresh, directory, name) as (checkpoints, _):
        before = parts_of(fresh.sharded_state())
        assert checkpoints.restore_with(MegatronLoading(fresh.sharded_state(loading=True)).fill).step == 0
        assert differing(parts_of(fresh.sharded_state()), before) == []


def found_bad(rank: int, layout: Layout, directory: Path, name: str) -> None:
    """The only checkpoint is bad: no rank begins anew of its own accord, and the model stays as it is."""
    from resiliency.plugins.megatron_state import MegatronLoading

    with job(rank, layout) as fresh, opened(fresh, directory, name) as (checkpoints, _):
        before = parts_of(fresh.sharded_state())
        with pytest.raises(CheckpointCorrupt, match="can be used"):
            checkpoints.restore_with(MegatronLoading(fresh.sharded_state(loading=True)).fill)
        assert differing(parts_of(fresh.sharded_state()), before) == []


def trained_state(rank: int, layout: Layout, file: str) -> list[Part]:
    """Write a state with its data, for stock Megatron to save."""
    from megatron.core.dist_checkpointing.dict_utils import extract_matching_values
    from megatron.core.dist_checkpointing.mapping import ShardedBase, apply_factories

    with job(rank, layout) as trained:
        trained.train(1)
        state = trained.sharded_state()
        apply_factories(state)
        state, _ = extract_matching_values(state, lambda item: isinstance(item, ShardedBase))
        torch.save(state, file.format(rank=rank))
        return parts_of(state)
