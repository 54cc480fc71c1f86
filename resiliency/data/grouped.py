# SPDX-License-Identifier: Apache-2.0
"""Batches that are each of one group, planned for the whole world and dealt to its ranks."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence, Sized

import torch
from torch import Tensor

from resiliency.data.progress import Progress, check_whole
from resiliency.data.resumable import ResumableSampler
from resiliency.errors import ConfigError


class InterruptableDistributedGroupedBatchSampler(ResumableSampler[list[int]]):
    """Batches that are each of one group (images of one aspect ratio), as a ``batch_sampler``.

    The batches of an epoch are planned once for the whole world, from the epoch's order alone, and then dealt
    round robin: a position is a batch, and any number of ranks may go on. Each sample is in the plan. The
    last batch of a group repeats some of the same group, where the group does not fill it; and without
    `drop_last` whole batches are dealt twice at the end, where their number is no multiple of the ranks.

    Args:
        group_ids: group of each sample.
        batch_size: samples of a batch.
        drop_last: leave out the batches that a group does not fill, and those that cannot be dealt evenly.
        num_replicas, rank, shuffle, seed, kind, dataset_id: as for `InterruptableDistributedSampler`.
    Raises:
        ConfigError: there are not as many group ids as samples, an id is no whole number, or an argument is
            out of range.
    """

    def __init__(
        self,
        dataset: Sized,
        group_ids: Sequence[int] | Tensor,
        batch_size: int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        kind: str = "torch",
        dataset_id: str = "",
    ) -> None:
        if len(group_ids) != len(dataset):
            raise ConfigError(f"{len(group_ids)} group ids for {len(dataset)} samples; each sample has one.")
        if check_whole("batch_size", batch_size) < 1:
            raise ConfigError("batch_size is 0; a batch has at least one sample.")
        self.batch_size = batch_size
        names = _whole_numbers(group_ids)
        _, self._groups, counts = torch.unique(names, return_inverse=True, return_counts=True)
        self._group_sizes: list[int] = counts.tolist()
        batches = sum(n // batch_size if drop_last else -(-n // batch_size) for n in self._group_sizes)
        fingerprint = zlib.crc32(self._groups.numpy().tobytes())
        plan = f"{len(dataset)} samples in batches of {batch_size}, groups {fingerprint:08x}"
        progress = Progress(
            size=batches, seed=seed, shuffle=shuffle, kind=kind, dataset=dataset_id, plan=plan
        )
        super().__init__(dataset, progress, num_replicas, rank, drop_last)
        self._plan: tuple[int, Tensor] | None = None

    def __iter__(self) -> Iterator[list[int]]:
        start = self.begin_iteration()
        if start is None:
            return
        mine = start.deal(self.rank, self.num_replicas, drop_last=self.drop_last)
        if not mine:  # of nothing there is no plan
            return
        plan = self._planned(start)
        for position in mine:
            indexes: list[int] = plan[position % len(plan)].tolist()
            yield indexes

    def _planned(self, start: Progress) -> Tensor:
        """All batches of the epoch, in their order. Shapes: (batches, batch_size) int64."""
        if self._plan is None or self._plan[0] != start.epoch:
            order = self.order_of(start).at(torch.arange(len(self.dataset)))
            self._plan = (
                start.epoch,
                _plan(order, self._groups, self._group_sizes, self.batch_size, self.drop_last),
            )
            self._order = None
        return self._plan[1]

    def _check_same_order(self, key: str, count: int, epoch: int) -> None:
        if count:
            raise ConfigError(
                f"a state of another library says {key} {count} in epoch {epoch}: it counts batches of "
                "another plan.",
                hint=f"Start that epoch from its beginning: load {{{key!r}: 0, 'epoch': {epoch}}}.",
            )


def _whole_numbers(group_ids: Sequence[int] | Tensor) -> Tensor:
    try:
        given = torch.as_tensor(group_ids)
        names = given.to(torch.int64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"the group ids are no whole numbers: {error}.") from error
    if not torch.equal(names.to(given.dtype), given):
        wrong = given[names.to(given.dtype) != given][0].item()
        raise ConfigError(
            f"{wrong} is a group id; a group is a whole number, and 1.33 and 1.78 would be one.",
            hint="Number the groups: torch.unique(ids, return_inverse=True)[1].",
        )
    return names


def _plan(order: Tensor, groups: Tensor, sizes: list[int], batch_size: int, drop_last: bool) -> Tensor:
    """Batches as they fill up while the order is walked; then the groups' rests, the fullest first.

    Shapes: order and groups (n,); returns (batches, batch_size).
    """
    by_group = torch.split(groups[order].argsort(stable=True), sizes)
    full = torch.cat([places[: len(places) // batch_size * batch_size] for places in by_group])
    batches = full.view(-1, batch_size)
    batches = batches[batches[:, -1].argsort()]
    rests = sorted((-(len(places) % batch_size), group) for group, places in enumerate(by_group))
    filled = []
    for negative_rest, group in rests:
        if negative_rest and not drop_last:
            places = by_group[group]
            start = len(places) + negative_rest
            filled.append(places[torch.arange(start, start + batch_size) % len(places)])
    return order[torch.cat([batches, *[rest.unsqueeze(0) for rest in filled]])]
