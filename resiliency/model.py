# SPDX-License-Identifier: Apache-2.0
"""Model sizes and how each is laid out over ranks.

A `ModelSize` is a value: it can be listed, checked against a world size and counted without
importing NeMo.  `nemo_config` turns it into NeMo's own Llama configuration.  Names ending in ``t``
are *truncated*: full width and parallelism, but only a few layers, so that one step, one
checkpoint shard and one collective of the large model can be tried on a few hosts.

Sources: Llama 3 (arXiv 2407.21783) for 8B, 70B and 405B; 36M and 2B are Llama-shaped models of
that size; ``tiny`` steps several times a second on two CPU cores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from resiliency.errors import ConfigError

if TYPE_CHECKING:
    from nemo.collections.llm.gpt.model.llama import Llama3Config

#: Ids of the Llama 3 tokenizer; mock data draws from them, so that embeddings have their real size.
LLAMA3_VOCAB_SIZE = 128_256


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """How one replica of a model is spread over ranks.

    `virtual_pipeline` is the number of layer chunks per pipeline stage; None means one.
    """

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int | None = None
    context: int = 1

    @property
    def ranks_per_replica(self) -> int:
        return self.tensor * self.pipeline * self.context

    def __str__(self) -> str:
        text = f"tensor {self.tensor} x pipeline {self.pipeline} x context {self.context}"
        return text if self.virtual_pipeline is None else f"{text}, {self.virtual_pipeline} chunks per stage"


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Shape of a Llama-style decoder.  Lengths are in elements; `seq_length` in tokens."""

    name: str
    layers: int
    hidden: int
    ffn_hidden: int
    heads: int
    query_groups: int
    seq_length: int = 8192
    vocab_size: int = LLAMA3_VOCAB_SIZE
    dropout: float = 0.0
    long_context_rope: bool = False
    layout: ParallelLayout = ParallelLayout()

    @property
    def parameters(self) -> int:
        """Number of parameters, embeddings included (input and output are separate)."""
        kv_hidden = self.hidden // self.heads * self.query_groups
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * kv_hidden
        mlp = 3 * self.hidden * self.ffn_hidden
        norms = 2 * self.hidden
        return self.layers * (attention + mlp + norms) + self.hidden + 2 * self.vocab_size * self.hidden

    def checkpoint_bytes(self) -> int:
        """Upper estimate of one checkpoint: fp32 master weights and two Adam moments, plus weights."""
        return self.parameters * (4 + 4 + 4 + 4)


_70B = ModelSize(
    name="70B",
    layers=80,
    hidden=8192,
    ffn_hidden=28672,
    heads=64,
    query_groups=8,
    long_context_rope=True,
    layout=ParallelLayout(tensor=4, pipeline=4, virtual_pipeline=5, context=2),
)
_405B = ModelSize(
    name="405B",
    layers=126,
    hidden=16384,
    ffn_hidden=53248,
    heads=128,
    query_groups=8,
    long_context_rope=True,
    layout=ParallelLayout(tensor=8, pipeline=9, virtual_pipeline=7, context=2),
)

#: Every model that ``--model`` accepts, smallest first.
MODELS: dict[str, ModelSize] = {
    size.name: size
    for size in (
        ModelSize(
            name="tiny",
            layers=2,
            hidden=64,
            ffn_hidden=128,
            heads=4,
            query_groups=4,
            seq_length=64,
            vocab_size=512,
            # Dropout makes every step consume random numbers, so a resume that forgets the
            # random state shows in the very next loss.
            dropout=0.1,
        ),
        ModelSize(
            name="36M",
            layers=10,
            hidden=512,
            ffn_hidden=1664,
            heads=8,
            query_groups=8,
            seq_length=2048,
            vocab_size=512,
        ),
        ModelSize(name="2B", layers=18, hidden=2560, ffn_hidden=8704, heads=20, query_groups=4),
        ModelSize(
            name="8B",
            layers=32,
            hidden=4096,
            ffn_hidden=14336,
            heads=32,
            query_groups=8,
            long_context_rope=True,
            layout=ParallelLayout(context=2),
        ),
        _70B,
        replace(_70B, name="70Bt", layers=4, layout=ParallelLayout(tensor=4, context=2)),
        _405B,
        replace(
            _405B, name="405Bt", layers=4, layout=ParallelLayout(tensor=8, pipeline=2, virtual_pipeline=2)
        ),
    )
}


def check_layout(
    size: ModelSize,
    layout: ParallelLayout,
    *,
    world_size: int,
    global_batch_size: int | None = None,
    micro_batch_size: int = 1,
    optimizer_replicas: int = 1,
) -> int:
    """Check that `size` can be trained with `layout` on `world_size` ranks.

    Returns:
        The number of data-parallel replicas.
    Raises:
        ConfigError: the message says which numbers do not divide, and what would.
    """

    def require(divides: bool, problem: str, hint: str) -> None:
        if not divides:
            raise ConfigError(
                f"model {size.name} cannot run as {layout} on {world_size} ranks: {problem}.",
                hint=hint,
                model=size.name,
                world_size=world_size,
            )

    per_replica = layout.ranks_per_replica
    require(
        world_size % per_replica == 0,
        f"one replica needs {per_replica} ranks and {world_size} is not a multiple of it",
        f"Start {per_replica} ranks (or 2, 3, ... times as many), or choose a smaller layout.",
    )
    chunks = layout.pipeline * (layout.virtual_pipeline or 1)
    require(
        size.layers % chunks == 0,
        f"{size.layers} layers do not divide into {chunks} pipeline chunks",
        f"Choose a pipeline size that divides {size.layers}.",
    )
    require(
        layout.virtual_pipeline is None or layout.pipeline > 1,
        "a virtual pipeline needs a pipeline of at least 2 stages",
        "Drop the virtual pipeline or raise the pipeline size.",
    )
    for name, count in (("attention heads", size.heads), ("query groups", size.query_groups)):
        require(
            count % layout.tensor == 0,
            f"{count} {name} do not divide over {layout.tensor} tensor-parallel ranks",
            f"Choose a tensor size that divides {count}.",
        )
    require(
        layout.context == 1 or size.seq_length % (2 * layout.context) == 0,
        f"sequence length {size.seq_length} is not a multiple of 2 x {layout.context} context-parallel ranks",
        "Choose a smaller context size.",
    )
    replicas = world_size // per_replica
    require(
        replicas % optimizer_replicas == 0,
        f"{replicas} data-parallel replicas do not divide into {optimizer_replicas} optimizer replicas",
        "Choose --num-optimizer-replicas so that it divides the number of data-parallel replicas.",
    )
    if global_batch_size is not None:
        step = replicas * micro_batch_size
        require(
            global_batch_size > 0 and global_batch_size % step == 0,
            f"global batch size {global_batch_size} is not a multiple of {replicas} replicas x "
            f"{micro_batch_size} samples",
            f"Choose a multiple of {step}.",
        )
        microbatches = global_batch_size // step
        require(
            layout.virtual_pipeline is None or microbatches % layout.pipeline == 0,
            f"{microbatches} microbatches per replica do not divide over {layout.pipeline} stages "
            "that interleave their chunks",
            f"Choose a global batch size that is a multiple of {step * layout.pipeline}.",
        )
    return replicas


def nemo_config(size: ModelSize, layout: ParallelLayout, *, cpu: bool) -> Llama3Config:
    """NeMo's configuration of `size`; imports NeMo.

    Args:
        cpu: fp32 and no fused kernels, for ranks without CUDA; otherwise bf16.
    """
    import torch
    from nemo.collections.llm.gpt.model.llama import Llama3Config, Llama31Config

    dtype = torch.float32 if cpu else torch.bfloat16
    settings = {
        "num_layers": size.layers,
        "hidden_size": size.hidden,
        "ffn_hidden_size": size.ffn_hidden,
        "num_attention_heads": size.heads,
        "num_query_groups": size.query_groups,
        "seq_length": size.seq_length,
        "rotary_base": 500_000,
        "hidden_dropout": size.dropout,
        "attention_dropout": size.dropout,
        "make_vocab_size_divisible_by": 128,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": not cpu,
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual_pipeline,
        "context_parallel_size": layout.context,
        "sequence_parallel": layout.tensor > 1 and not cpu,
    }
    if cpu:
        from resiliency.testing.megatron_cpu import CPU_MODEL_CONFIG

        settings.update(CPU_MODEL_CONFIG)
    config_class = Llama31Config if size.long_context_rope else Llama3Config
    return config_class(**settings)
