# SPDX-License-Identifier: Apache-2.0
"""When what fails: a schedule is the sorted union of what its sources give, a pure function of values.

Every node computes the whole schedule and keeps its own part, so that nodes agree without talking.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Protocol

from resiliency.errors import ConfigError
from simulator.draws import Draws
from simulator.faults import COLUMNS, RULES, Kind, PlannedFault, kind_named, microseconds

#: A schedule beyond this is taken for a mistake of units.
MOST_FAULTS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Size of the job, and how long its schedule is.

    Raises:
        ConfigError: a number is not positive.
    """

    nnodes: int
    gpus_per_node: int
    length_us: int

    def __post_init__(self) -> None:
        for name in ("nnodes", "gpus_per_node"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} must be 1 or more, found {getattr(self, name)}.")
        if self.length_us <= 0:
            raise ConfigError("--duration_s must be above 0.")

    @property
    def gpus(self) -> int:
        return self.nnodes * self.gpus_per_node


class Source(Protocol):
    """Where faults of a schedule come from."""

    def faults(self, shape: Shape) -> Iterable[PlannedFault]:
        """Those of a job of this size; in any order, the same at every call.

        Raises:
            ConfigError: the source does not fit the size.
        """
        ...


@dataclass(frozen=True)
class Share:
    """How often a kind is drawn, relative to the others; `cause` is what it stands for."""

    kind: Kind
    weight: int = 1
    cause: str = ""


@dataclass(frozen=True, kw_only=True)
class Poisson:
    """Faults at exponentially distributed intervals, each at a device drawn evenly.

    Attributes:
        mean_us: mean time between faults of the whole job.
        shares: what is drawn.
        seed: of the draws.
        lasts_us: duration of kinds that last, by kind.
    """

    mean_us: Fraction
    shares: Sequence[Share]
    seed: int
    lasts_us: Mapping[Kind, int]

    def faults(self, shape: Shape) -> Iterator[PlannedFault]:
        if shape.length_us / self.mean_us > MOST_FAULTS:
            raise ConfigError(
                f"the schedule would have about {int(shape.length_us / self.mean_us):,} faults.",
                hint="Make --duration_s shorter, or the time between faults longer; both are in seconds.",
            )
        draws = Draws(self.seed, "poisson")
        total = sum(share.weight for share in self.shares)
        at_us = 0
        while (at_us := at_us + draws.exponential_us(self.mean_us)) < shape.length_us:
            # Four draws for each fault, used or not, so that a rule of one kind moves no later fault.
            share = _share_at(self.shares, draws.below(total))
            node, gpu, value = draws.below(shape.nnodes), draws.below(shape.gpus_per_node), draws.word()
            yield drawn(share, at_us, node, gpu, value, self.lasts_us)


def drawn(
    share: Share, at_us: int, node: int, gpu: int, word: int, lasts_us: Mapping[Kind, int]
) -> PlannedFault:
    """The fault of a kind with its value chosen by `word`."""
    rule = RULES[share.kind]
    return PlannedFault(
        at_us=at_us,
        kind=share.kind,
        node=node,
        gpu=gpu if rule.on_gpu else None,
        duration_us=lasts_us[share.kind] if rule.lasts else 0,
        value=rule.choices[word % len(rule.choices)] if rule.choices else None,
        cause=share.cause,
    )


def _share_at(shares: Sequence[Share], number: int) -> Share:
    for share in shares:
        number -= share.weight
        if number < 0:
            return share
    raise AssertionError("the number is below the sum of the weights")


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Faults written by a person or recorded from a real job: fixed times, from flags or a CSV file.

    An empty `node` or `gpu` is drawn from the seed.

    Attributes:
        rows: where each was written, and its values by column.
        speed: times are divided by it; durations are not.
    """

    rows: Sequence[tuple[str, Mapping[str, str]]]
    seed: int
    lasts_us: Mapping[Kind, int]
    speed: Fraction = field(default_factory=lambda: Fraction(1))

    def faults(self, shape: Shape) -> Iterator[PlannedFault]:
        draws = Draws(self.seed, "rows")
        for where, row in self.rows:
            node, gpu = draws.below(shape.nnodes), draws.below(shape.gpus_per_node)
            try:
                fault = self._fault(row, node, gpu)
                if fault.node >= shape.nnodes or (fault.gpu or 0) >= shape.gpus_per_node:
                    raise ConfigError(
                        f"there is no node {fault.node}"
                        + ("" if fault.gpu is None else f" with a GPU {fault.gpu}")
                        + f": the job has {shape.nnodes} nodes with {shape.gpus_per_node} GPUs each, from 0."
                    )
            except ConfigError as error:
                raise ConfigError(f"{where}: {error.message}", hint=error.hint) from None
            if fault.at_us < shape.length_us:
                yield fault

    def _fault(self, row: Mapping[str, str], node: int, gpu: int) -> PlannedFault:
        kind = kind_named(row.get("kind", ""))
        rule = RULES[kind]
        value = _whole(row, "value")
        if value is None and rule.choices:
            value = rule.choices[0]
        if row.get("duration_s"):
            lasts_us = microseconds(row["duration_s"], "duration_s")
        else:
            lasts_us = self.lasts_us[kind] if rule.lasts else 0
        given_node, given_gpu = _whole(row, "node"), _whole(row, "gpu")
        return PlannedFault(
            at_us=round(microseconds(row.get("time_s", ""), "time_s") / self.speed),
            kind=kind,
            node=node if given_node is None else given_node,
            gpu=gpu if given_gpu is None and rule.on_gpu else given_gpu,
            duration_us=lasts_us,
            value=value,
            cause=row.get("cause", ""),
        )


def _whole(row: Mapping[str, str], name: str) -> int | None:
    text = row.get(name, "")
    if not text:
        return None
    if text.isascii() and text.isdigit():
        return int(text)
    raise ConfigError(f"{name} must be a whole number, zero or more, or empty; found {text!r}.")


def rows_of_flag(texts: Iterable[str]) -> list[tuple[str, Mapping[str, str]]]:
    """The rows of ``--at SECONDS,KIND[,node=N][,gpu=G][,duration=S][,value=V]``.

    Raises:
        ConfigError: a text has another form.
    """
    names = {"node": "node", "gpu": "gpu", "duration": "duration_s", "value": "value", "cause": "cause"}
    found: list[tuple[str, Mapping[str, str]]] = []
    for text in texts:
        when, kind, *options = [part.strip() for part in text.split(",")] + ([""] if "," not in text else [])
        row = {"time_s": when, "kind": kind}
        for option in options:
            name, separator, value = option.partition("=")
            if not separator or name not in names or names[name] in row:
                raise ConfigError(
                    f"--at {text}: cannot read {option!r}.",
                    hint="Write SECONDS,KIND[,node=N][,gpu=G][,duration=SECONDS][,value=V], each key once.",
                )
            row[names[name]] = value
        found.append((f"--at {text}", row))
    return found


def read_trace(path: Path) -> list[tuple[str, Mapping[str, str]]]:
    """The rows of a CSV file with a header; lines that start with # are skipped.

    Raises:
        ConfigError: the file cannot be read, or has other columns.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = [
                (number, line)
                for number, line in enumerate(file, 1)
                if line.strip() and not line.startswith("#")  # the reader leaves out empty lines, too
            ]
        reader = csv.DictReader(line for _, line in lines)
        columns = list(reader.fieldnames or ())
        rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"--trace {path}: cannot read it: {error}.", path=str(path)) from error
    unknown = [name for name in columns if name not in COLUMNS]
    if unknown or not {"time_s", "kind"} <= set(columns):
        raise ConfigError(
            f"--trace {path}: the first line must name the columns time_s and kind, and may name"
            f" {', '.join(COLUMNS[2:])}; found {', '.join(columns) or 'nothing'}.",
            path=str(path),
        )
    found: list[tuple[str, Mapping[str, str]]] = []
    for (number, _), row in zip(lines[1:], rows, strict=False):
        if None in row or None in row.values():
            raise ConfigError(f"--trace {path}, line {number}: it has not {len(columns)} fields.")
        found.append((f"--trace {path}, line {number}", {name: row[name].strip() for name in columns}))
    return found


def schedule(sources: Iterable[Source], shape: Shape) -> list[PlannedFault]:
    """The faults of all nodes, in order.

    Raises:
        ConfigError: a source does not fit.
    """
    faults = [fault for source in sources for fault in source.faults(shape)]
    return sorted(faults, key=lambda fault: (*fault.order, fault.row))
