# SPDX-License-Identifier: Apache-2.0
"""What is captured of a NeMo job, prepared once per job.

NeMo plans each save anew: it builds the tree of sharded tensors twice, ranks exchange what each of
them has, agree on who writes it, and compare the parts that must be the same.  Here the ranks talk at
the first save only, and the tree is used again while it is true (`resiliency.plugins.prepared_state`).
Who writes what was captured is told in `resiliency.plugins.persistent_ckpt_proc`.

Used alone, `MinCkptOverheadCheckpointIO` saves as `VerifiedCheckpointIO` does; it reads what NeMo and
what the engine wrote.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject
from megatron.core.distributed import DistributedDataParallelConfig

from resiliency.plugins.dist_ckpt import IN_PLACE, RNG_KEY, VerifiedCheckpointIO, sharded_per_rank
from resiliency.plugins.megatron_state import CONTENT_METADATA, MegatronSaving, padding_in
from resiliency.plugins.megatron_values import CommonPart, packed, unpacked
from resiliency.plugins.prepared_state import MODEL, OPTIMIZER, NotReusable, PreparedState
from resiliency.plugins.random_states import RandomStates, rng_state

logger = logging.getLogger(__name__)


class MinCkptOverheadCheckpointIO(VerifiedCheckpointIO):
    """Turns the checkpoint that NeMo's strategy hands over into the state that the engine captures.

    Takes the arguments of NeMo's `MegatronCheckpointIO`.  Of these, `parallel_save` (the default)
    spreads the tensors that several ranks have over these ranks, `parallel_save_within_dp` only over
    those of one data-parallel group.
    """

    _saving: MegatronSaving | None = None
    _random: RandomStates | None = None
    #: What the last save captured, until it is known whether its tree may be used again.
    _built: dict[str, Any] | None = None
    _padding: frozenset[int] = frozenset()
    #: The tree of the last save that Megatron built; used again once two of them were the same.
    _seen: PreparedState | None = None
    _prepared: PreparedState | None = None
    #: The common part that belongs to the tree.
    _fixed: dict[str, Any] | None = None

    def to_capture(
        self, checkpoint: dict[str, Any], storage_options: dict[str, Any] | None
    ) -> dict[str, Any]:
        """The state of this rank, random state included, as the engine takes it.

        Collective at the first call of a job, and at none after it.
        """
        saving = self._begun()
        self._padding = frozenset(map(id, padding_in(checkpoint.get(OPTIMIZER))))
        self._built = saving.to_capture(
            {**checkpoint, RNG_KEY: self._random_state()},
            content_metadata=(storage_options or {}).get(CONTENT_METADATA),
        )
        return self._built

    def preview(self, strategy: Any) -> dict[str, Any] | None:
        """What takes as much room as a save of this training; talks to no other rank.

        None: each save gathers the optimizer anew, and so would this.
        """
        metadata = strategy.sharded_state_dict_metadata
        if metadata.get("distrib_optim_sharding_type", IN_PLACE) != IN_PLACE:
            return None
        state = {
            MODEL: strategy.megatron_parallel.sharded_state_dict(),
            # Not `RandomStates`: which of them are alike in a group is found out at the first save.
            RNG_KEY: sharded_per_rank(rng_state()),
        }
        if strategy.ckpt_save_optimizer:
            state[OPTIMIZER] = [strategy.optimizer_sharded_state_dict()]
        return self._begun().preview(state, content_metadata=metadata)

    def remember(self, strategy: Any) -> None:
        """Keep what the last save built, if it is sure to be the same next time."""
        built, self._built = self._built, None
        if built is None:
            return
        tree = {key: value for key, value in built["sharded"].items() if key != RNG_KEY}
        try:
            if tree.keys() != {MODEL, OPTIMIZER}:
                raise NotReusable(f"it holds {', '.join(map(str, tree))}")
            found = PreparedState(strategy.megatron_parallel, _optimizer(strategy), tree, self._padding)
            fixed = _fixed_values(unpacked(built["common"].data, "the common part"))
        except NotReusable as why:
            logger.debug("the tree of sharded tensors is built anew for each save: %s", why)
            self._seen = self._prepared = None
            return
        if self._seen is not None and self._seen.is_like(found):
            self._fixed, self._prepared = fixed, found
        self._seen = found

    def try_reuse(self, strategy: Any, checkpoint: dict[str, Any]) -> dict[str, Any] | None:
        """What `to_capture` would return, without a new tree; None if Megatron must build one.

        Args:
            checkpoint: as Lightning dumped it, before the strategy added to it.
        """
        prepared = self._prepared
        if prepared is None:
            return None
        own = {
            key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")
        }
        plain = not any(isinstance(value, ShardedBase) for value in nested_values(own))
        same = len(strategy.optimizers) == 1 and prepared.is_of(
            strategy.megatron_parallel, _optimizer(strategy)
        )
        if not (plain and same) or MODEL in own or OPTIMIZER in own or not prepared.refresh():
            logger.info("the tensors of the model or the optimizer moved: their tree is built anew")
            self._prepared = self._seen = None
            return None
        # Only now: else the strategy's own save does it, and ranks gather equally often.
        _finish_param_gather(strategy)
        common = {**own, "state_dict": OrderedDict(), "optimizer_states": {}, **(self._fixed or {})}
        return {
            "sharded": {**prepared.tree, RNG_KEY: self._random_state()},
            "common": CommonPart(packed(common), dist.get_rank()),
        }

    def _begun(self) -> MegatronSaving:
        if self._saving is None:
            self._saving = MegatronSaving(parallelization_group=self._group())
            self._random = RandomStates()
        return self._saving

    def _random_state(self) -> ShardedObject:
        assert self._random is not None
        return sharded_per_rank(self._random.take())

    def teardown(self) -> None:
        """Keep nothing of a training that is over: another one has other tensors, and other groups."""
        self._saving = self._random = self._built = self._seen = self._prepared = self._fixed = None
        super().teardown()

    def _group(self) -> Any:
        if not self.parallel_save:
            return None
        if self.parallel_save_within_dp:
            return parallel_state.get_data_parallel_group(with_context_parallel=True)
        return dist.group.WORLD


def _optimizer(strategy: Any) -> Any:
    """Megatron's optimizer.

    Raises:
        NotReusable: there are several.
    """
    if len(strategy.optimizers) != 1:
        raise NotReusable(f"there are {len(strategy.optimizers)} optimizers")
    (wrapper,) = strategy.optimizers
    return getattr(wrapper, "mcore_optimizer", wrapper)


def _fixed_values(common: dict[str, Any]) -> dict[str, Any]:
    """What the common part holds of the tree itself, such as the name of the optimizer's form.

    Raises:
        NotReusable: it holds values that may be others at the next save.
    """
    fixed = {key: common[key] for key in common.keys() & {MODEL, OPTIMIZER, CONTENT_METADATA}}
    for key in fixed.keys() & {MODEL, OPTIMIZER}:
        for value in nested_values(fixed[key]):
            if not isinstance(value, str):
                raise NotReusable(f"{key} holds a plain {type(value).__name__}")
    return fixed


def _finish_param_gather(strategy: Any) -> None:
    """As NeMo's strategy does before it saves: parameters may still be gathered from the last step."""
    ddp = strategy.ddp_config
    is_megatrons = isinstance(ddp, DistributedDataParallelConfig)
    if is_megatrons and ddp.use_distributed_optimizer and ddp.overlap_param_gather:
        strategy.megatron_parallel.force_param_sync()
