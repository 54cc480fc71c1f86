# SPDX-License-Identifier: Apache-2.0
"""Sums, means and maxima over ranks, batches and epochs, whose state is in the checkpoint.

What a rank adds is *pending* until `reduce`, which adds the pending values of all ranks to `local` and `agg`,
once. Ranks need not know the same names. Whole numbers stay whole, of any size; floats are float64 and are
summed in the order of the ranks with one rounding, so the result is the same on all ranks.

    metrics.update({"samples": len(batch), "correct": correct}).update({"loss": loss}, how="mean",
    weight=len(batch)) metrics.reduce()
    accuracy = metrics.local["correct"] / metrics.local["samples"]
    metrics.reset_local()
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from resiliency.errors import ConfigError

Number = int | float
HOWS = ("sum", "mean", "max")


@dataclass(frozen=True)
class _Total:
    how: str
    value: Number
    weight: Number = 0  # of a mean, whose value is the weighted sum

    def plain(self) -> Number:
        return self.value / self.weight if self.how == "mean" and self.weight else self.value


class MetricsTracker:
    """Metrics by name; every method but `local`, `agg` and the state returns the tracker, so that calls
    chain.

    Attributes:
        epoch_reports: one dict of plain numbers for each epoch that was ended.
    """

    def __init__(self) -> None:
        self.epoch_reports: list[dict[str, Number]] = []
        self._pending: dict[str, _Total] = {}
        self._reduced: dict[str, _Total] = {}
        self._agg: dict[str, _Total] = {}

    @property
    def local(self) -> dict[str, Number]:
        """What was added since `reset_local`: of all ranks if it was reduced, and of this rank alone if not
        yet."""
        return _plain(_merge([self._reduced, self._pending]))

    @property
    def agg(self) -> dict[str, Number]:
        """What was reduced since the epoch began; equal on all ranks."""
        return _plain(self._agg)

    def update(
        self, metrics: Mapping[str, Number | Tensor], *, how: str = "sum", weight: Number = 1
    ) -> MetricsTracker:
        """Add values of this rank.

        Args:
            metrics: numbers, or tensors with one element (a copy from the device, which waits for it).
            how: ``sum``, ``mean`` or ``max`` over calls and ranks; one for each name.
            weight: of a mean, for example the samples of the batch.
        Raises:
            ConfigError: a name is used in two ways, or there is no such way.
        """
        if how not in HOWS:
            raise ConfigError(f"metrics are combined by {', '.join(HOWS)}; {how!r} is none of them.")
        added = {}
        for name, value in metrics.items():
            number = _number(value)
            added[name] = _Total(how, number * weight, weight) if how == "mean" else _Total(how, number)
        merged = _merge([self._pending, added])
        _merge([self._agg, self._reduced, merged])  # refuses what would only be refused later
        self._pending = merged
        return self

    def reduce(self) -> MetricsTracker:
        """Add what is pending on all ranks to `local` and `agg`; a collective of all ranks, once for each
        update.

        Without a process group this is the only rank.

        Raises:
            ConfigError: ranks use a name in two ways; on all ranks, and nothing was added.
        """
        gathered = [self._pending]
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            gathered = [{}] * dist.get_world_size()
            dist.all_gather_object(gathered, self._pending)
        added = _merge(gathered)
        self._reduced, self._agg = _merge([self._reduced, added]), _merge([self._agg, added])
        self._pending = {}
        return self

    def reset_local(self) -> MetricsTracker:
        """Begin `local` from nothing; what was not reduced is dropped."""
        self._pending, self._reduced = {}, {}
        return self

    def end_epoch(self) -> MetricsTracker:
        """Put `agg` into `epoch_reports` and begin the next epoch."""
        self.epoch_reports.append(self.agg)
        self._agg = {}
        return self

    def state_dict(self) -> dict[str, object]:
        """Reports and `agg` as plain copies, equal on all ranks; what was not reduced is not in it."""
        return {
            "epoch_reports": [dict(report) for report in self.epoch_reports],
            "agg": self.agg,
            "totals": {name: [total.how, total.value, total.weight] for name, total in self._agg.items()},
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on from a state of this class, or of cycling_utils' one, whose metrics are sums.

        Raises:
            ConfigError: it is none of them.
        """
        reports, agg = state.get("epoch_reports"), state.get("agg")
        if not isinstance(reports, list) or not isinstance(agg, Mapping):
            raise ConfigError(
                f"this is no state of a MetricsTracker: its keys are {sorted(map(str, state))}."
            )
        totals = state.get("totals")
        found = (
            totals
            if isinstance(totals, Mapping)
            else {name: ("sum", value, 0) for name, value in agg.items()}
        )
        self.epoch_reports = [dict(report) for report in reports]
        self._agg = {name: _Total(*values) for name, values in found.items()}
        self._pending, self._reduced = {}, {}


def _number(value: Number | Tensor) -> Number:
    """A plain number, that any `torch.load` reads; whole ones of any library stay whole."""
    if isinstance(value, Tensor):
        value = value.item()
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return float(value)


def _merge(parts: Iterable[Mapping[str, _Total]]) -> dict[str, _Total]:
    by_name: dict[str, list[_Total]] = {}
    for part in parts:
        for name, total in part.items():
            by_name.setdefault(name, []).append(total)
    return {name: _combined(name, totals) for name, totals in by_name.items()}


def _combined(name: str, totals: list[_Total]) -> _Total:
    hows = sorted({total.how for total in totals})
    if len(hows) > 1:
        raise ConfigError(
            f"the metric {name!r} is a {' and a '.join(hows)}; each name is combined in one way."
        )
    values = [total.value for total in totals]
    if hows == ["max"]:
        return _Total("max", max(values))
    return _Total(hows[0], _sum(values), _sum([total.weight for total in totals]))


def _sum(values: list[Number]) -> Number:
    if all(isinstance(value, int) for value in values):
        return sum(values)
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # above the largest float; infinities of both signs
        return sum(map(float, values))


def _plain(totals: Mapping[str, _Total]) -> dict[str, Number]:
    return {name: total.plain() for name, total in totals.items()}
