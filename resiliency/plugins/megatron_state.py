# SPDX-License-Identifier: Apache-2.0
"""Megatron's sharded states through the checkpoint engine, and back.

    checkpoints = Checkpointer(directory, options=CheckpointerOptions(format="megatron"))
    saving = MegatronSaving()
    checkpoints.save(step, saving.to_capture(sharded_state_dict))   # for dist_checkpointing.save

    loading = MegatronLoading(sharded_state_dict)                   # for dist_checkpointing.load
    checkpoints.restore_with(loading.fill)
    use(loading.state_dict)

What is captured is what ``megatron.core.dist_checkpointing.save`` would write: factories applied,
non-persistent objects dropped, the rest divided into a sharded and a common part, all by Megatron's
own functions.  The way back is by sharded key, as Megatron's: the template may be another tree than
the one that was saved, and may want less.

Objects and the common part are pickled here, on the training thread: these are the very bytes that
Megatron's readers expect, and the agent, which copies them into files, need not import the classes
that they name.  They are small: step counts, learning rates, random states.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, merge, nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedTensor,
    apply_factory_merges,
)
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.utils import (
    _sharded_tensor_shard_id,
    extract_sharded_base,
    force_all_tensors_to_non_fp8,
)

from resiliency.checkpoint.format.megatron import COMMON_FILE
from resiliency.checkpoint.state.fill import plan_restore_tensors
from resiliency.checkpoint.state.layout import Shard, TensorEntry, TensorView
from resiliency.checkpoint.state.snapshot import sharded_objects
from resiliency.errors import CheckpointIncomplete, InternalError, LayoutMismatch
from resiliency.plugins.megatron_values import CommonPart, block, block_place, packed, register, unpacked

logger = logging.getLogger(__name__)

#: Megatron's name for it in the common part.
CONTENT_METADATA = "content_metadata"
#: A common part larger than that is worth a warning: it is pickled while training waits.
_LARGE_COMMON_BYTES = 16 << 20


class MegatronSaving:
    """Prepares sharded states for `Checkpointer.save`; one per job and rank.

    The first save is collective: Megatron validates that the ranks' parts cover every tensor once, and,
    with a `parallelization_group`, agrees who writes what.  Later ones talk to nobody.

    Args:
        parallelization_group: spread the tensors that its ranks hold alike, such as the parameters of
            data-parallel replicas, over their writers; None: the main replica writes.
    """

    def __init__(self, *, parallelization_group: dist.ProcessGroup | None = None) -> None:
        register()
        self._first = True
        self._padding: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        self._spread: Any = None
        # Of a group of one rank Megatron remembers no distribution, and validates with all ranks each time.
        if parallelization_group is not None and dist.get_world_size(parallelization_group) > 1:
            self._spread = FullyParallelSaveStrategyWrapper(
                get_default_save_sharded_strategy(), parallelization_group, do_cache_distribution=True
            )

    def to_capture(
        self, sharded_state_dict: dict[str, Any], *, content_metadata: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """What to give to `Checkpointer.save`.

        The tensors are those of `sharded_state_dict`, not copies.  With parameters that are gathered
        lazily (``overlap_param_gather``), force their gathering before, as for Megatron's own save.

        Args:
            sharded_state_dict: changed as ``dist_checkpointing.save`` changes it: factories are applied.
            content_metadata: as that function takes it.
        """
        sharded, common = self._parts(sharded_state_dict, content_metadata, validate=self._first)
        if self._spread is not None:
            self._spread_writing(sharded)
        data = packed(common)
        if self._first and len(data) > _LARGE_COMMON_BYTES:
            logger.warning(
                "%d bytes of the state are not sharded (%s); they are pickled at each save while training"
                " waits.  Wrap large tensors in ShardedTensor.",
                len(data),
                ", ".join(map(str, common)),
            )
        self._first = False
        return _captured(sharded, data)

    def preview(
        self, sharded_state_dict: dict[str, Any], *, content_metadata: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """What `to_capture` would return, but for who writes what; for `Checkpointer.prewarm`.

        It takes as much room, and this talks to no other rank, also before the first save.
        """
        sharded, common = self._parts(sharded_state_dict, content_metadata, validate=False)
        return _captured(sharded, packed(common))

    def _parts(
        self,
        sharded_state_dict: dict[str, Any],
        content_metadata: Mapping[str, Any] | None,
        *,
        validate: bool,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        if content_metadata is not None:
            sharded_state_dict[CONTENT_METADATA] = dict(content_metadata)
        self._settle_padding(sharded_state_dict)
        sharded, common = save_preprocess(sharded_state_dict, validate_access_integrity=validate)
        force_all_tensors_to_non_fp8(sharded)  # what is loaded into is made so too
        return sharded, common

    def _spread_writing(self, sharded: dict[str, Any]) -> None:
        """Distribute the tensors over their writers, as was agreed at the first save.

        Megatron's cached distribution lets nobody write a tensor that it does not know, such as optimizer
        states that came later; what is not distributed stays with its main replica.
        """
        parts = [part for part in nested_values(sharded) if isinstance(part, ShardedTensor)]
        before = [part.replica_id for part in parts]
        self._spread.apply_saving_parallelization(sharded)
        distributed = self._spread.cached_distribution.shards_in_this_group
        for part, replica_id in zip(parts, before, strict=True):
            if _sharded_tensor_shard_id(part) not in distributed:
                part.replica_id = replica_id

    def _settle_padding(self, state: Any) -> None:
        """Give padding, which is unwritten memory and new at each call, zeros that stay where they are:
        that makes checkpoints reproducible, and lets the captures of one structure share their plan.
        """
        for part in padding_in(state):
            where = (part.key, tuple(part.global_offset))
            if where not in self._padding:
                self._padding[where] = torch.zeros_like(part.data)
            part.data = self._padding[where]


def _captured(sharded: dict[str, Any], common: bytes) -> dict[str, Any]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return {"sharded": sharded, "common": CommonPart(common, rank)}


def padding_in(state: Any) -> Iterator[ShardedTensor]:
    """The zeros that ``dp_reshardable`` puts between the parameters of a bucket."""
    if isinstance(state, list):
        for item in state:
            yield from padding_in(item)
    elif isinstance(state, dict):
        mark = state.get("padding")
        is_padding = isinstance(mark, LocalNonpersistentObject) and mark.unwrap() is True
        for item in state.values():
            if is_padding and isinstance(item, ShardedTensor):
                yield item
            else:
                yield from padding_in(item)


class MegatronLoading:
    """Fills one template from what this rank had captured, as ``dist_checkpointing.load`` would.

    Give `fill` to `Checkpointer.restore_with`; afterwards `state_dict` is what that function would have
    returned.  For another number of ranks, or parts that are cut differently, `fill` raises
    LayoutMismatch, and the template may be given to ``dist_checkpointing.load`` itself.

    Args:
        sharded_state_dict: the template; tensors that have data are filled in place.
    """

    def __init__(self, sharded_state_dict: dict[str, Any]) -> None:
        self._template = sharded_state_dict
        self._loaded: dict[str, Any] | None = None

    @property
    def state_dict(self) -> dict[str, Any]:
        """The loaded state: plain tensors and objects, merged with the common part."""
        if self._loaded is None:
            raise InternalError("nothing was loaded: `fill` was not called, or failed.")
        return self._loaded

    @torch.no_grad()
    def fill(self, shard: Shard) -> Callable[[], None]:
        """Compare with one shard, changing nothing; returns what loads it, while it is valid.

        Raises:
            LayoutMismatch: the shard lacks a part that the template wants.
            CheckpointCorrupt: an object cannot be unpickled.
        """
        force_all_tensors_to_non_fp8(self._template)
        sharded, nonpersistent, factories = load_preprocess(self._template)
        sharded, _ = extract_sharded_base(sharded)
        parts = _StateParts(shard)
        loaded = load_common(shard)
        merge(loaded, nonpersistent)
        merge(loaded, dict_list_map_outplace(parts.take, sharded))
        copy = plan_restore_tensors(shard, parts.targets)

        @torch.no_grad()
        def act() -> None:
            copy()
            self._loaded = apply_factory_merges(loaded, factories)

        return act


def load_common(shard: Shard) -> dict[str, Any]:
    """The common part of a shard, as ``load_common_state_dict`` gives it.

    Raises:
        CheckpointIncomplete: the shard was not captured from Megatron's state.
        CheckpointCorrupt: it cannot be unpickled.
    """
    for placement, data in sharded_objects(shard.layout, shard.values):
        if placement.name == COMMON_FILE:
            common: dict[str, Any] = unpacked(data, COMMON_FILE, map_location="cpu")
            return common
    raise CheckpointIncomplete(
        f"step {shard.step} of rank {shard.rank} holds no state of Megatron.",
        hint="Was it saved through MegatronSaving?",
        step=shard.step,
        rank=shard.rank,
    )


class StepCount:
    """The step of the torch optimizer inside one of Megatron's.

    Megatron then writes parameters that the inner one does not know: the low-precision ones of the model,
    from their main copies.  So it is no torch optimizer here, which would vouch for its own memory only.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.register_step_pre_hook = inner.register_step_pre_hook


def optimizer_steps(optimizer: Any) -> list[StepCount]:
    """What writes the state, for `Checkpointer(optimizers=...)`: all of it that is large.

    A buffer of 64 KiB or more that a forward writes is not the optimizer's: name it with
    `CaptureOptions.eager`.
    """
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is not None:
        return [step for each in chained for step in optimizer_steps(each)]
    inner = getattr(optimizer, "optimizer", None)
    return [] if inner is None else [StepCount(inner)]


class _StateParts:
    """What a shard holds, by sharded key, and what a template takes of it."""

    def __init__(self, shard: Shard) -> None:
        self.targets: list[tuple[str, torch.Tensor]] = []
        self._shard = shard
        names = shard.layout.disk_names
        self._tensors: dict[tuple[str, tuple[int, ...], tuple[int, ...]], TensorEntry | TensorView] = {
            (names[item.key], item.global_offset, item.shape): item for item in shard.layout.tensors()
        }
        self._whole = {names[item.key]: item.global_shape for item in shard.layout.tensors()}
        self._objects = {place.name: data for place, data in sharded_objects(shard.layout, shard.values)}

    def take(self, part: Any) -> Any:
        """What stands for `part` of the template in the loaded state; tensors are filled later."""
        return self._tensor(part) if isinstance(part, ShardedTensor) else self._object(part)

    def _tensor(self, part: ShardedTensor) -> torch.Tensor:
        data = part.data
        if data is None:
            # On a copy: the template stays as it is if another part turns out to be missing.
            empty = part.without_data()
            empty.init_data("cpu")
            data = empty.data
        raw = block(part, data)
        shape, offset = block_place(part)
        item = self._tensors.get((part.key, offset, tuple(raw.shape)))
        if item is None or item.global_shape != shape:
            raise self._mismatch(part.key, f"{list(raw.shape)} at {list(offset)} of {list(shape)}")
        self.targets.append((item.key, raw))
        loaded: torch.Tensor = data.detach()
        return loaded

    def _object(self, part: Any) -> Any:
        data = self._objects.get(part.unique_key)
        if data is None:
            raise self._mismatch(part.unique_key, "this object")
        (value,) = unpacked(data, part.unique_key)
        return value

    def _mismatch(self, key: str, wanted: str) -> LayoutMismatch:
        whole = self._whole.get(key)
        found = "nothing of it" if whole is None else f"other parts of {list(whole)}"
        return LayoutMismatch(
            f"{key}: the state to restore wants {wanted}, rank {self._shard.rank} captured {found}.",
            hint="Another parallel layout or model: load it with megatron.core.dist_checkpointing.load.",
            key=key,
            rank=self._shard.rank,
            step=self._shard.step,
        )
