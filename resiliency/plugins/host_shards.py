# SPDX-License-Identifier: Apache-2.0
"""Shards that the hosts of a job hold, as Megatron's states: filled from, and asked about."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from resiliency.checkpoint.ranks import RankGroup
from resiliency.checkpoint.recovery.inventory import Inventory, open_location
from resiliency.checkpoint.state.layout import Shard
from resiliency.errors import CheckpointError
from resiliency.plugins.dist_ckpt import RNG_KEY, sharded_per_rank
from resiliency.plugins.megatron_state import CONTENT_METADATA, MegatronLoading, load_common
from resiliency.plugins.random_states import adopted


class Filling:
    """Fills a template from a shard, which may be that of another rank of the replica group."""

    def __init__(self, template: dict[str, Any]) -> None:
        self._template = template
        self._loading: MegatronLoading | None = None
        self._owner = 0

    def fill(self, shard: Shard) -> Callable[[], None]:
        """See `Checkpointer.restore_with`; each source that is tried comes here."""
        self._owner = shard.rank
        random_state = sharded_per_rank(None, (shard.rank, shard.world_size))
        self._loading = MegatronLoading({**self._template, RNG_KEY: random_state})
        return self._loading.fill(shard)

    def loaded(self) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """The loaded state, and the random state to go on with."""
        assert self._loading is not None
        state = self._loading.state_dict
        saved = state.pop(RNG_KEY, None)
        rank = RankGroup.of_process_group().rank
        return state, None if saved is None else adopted(saved, owner=self._owner, rank=rank)


def content_metadata(inventory: Inventory, rank: int, step: int) -> dict[str, Any]:
    """The part of a common part that NeMo builds its template from, of any shard of `step` on this disk.

    Empty if there is none.  All ranks have saved the same.
    """
    host = inventory.needs[rank].host
    for location in inventory.locations:
        if location.step == step and location.host == host and location.place.is_disk_of_host:
            with suppress(CheckpointError):  # the next one; and the restore itself says what is wrong
                common = load_common(open_location(location).open_shard(location.rank))
                return {CONTENT_METADATA: common.get(CONTENT_METADATA)}
    return {}
