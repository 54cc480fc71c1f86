# SPDX-License-Identifier: Apache-2.0
"""What ckpt_compare.py found, for people (text, Markdown, picture) and for programs (JSON)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ckpt_bars import Bar, bars, copy_limit, excess_percent, lost, median
from ckpt_cells import CellResult, Outcome
from ckpt_contestants import BLOCKING, FROM_MEMORY, OWN
from ckpt_rank import ROOM, STEPS, STEPS_BEFORE_FIRST

from resiliency.events import JsonValue

_OURS_COLOR, _RIVAL_COLOR, _EXCESS_COLOR = "#2f8f5b", "#4f86c6", "#e07a3f"
_INK, _QUIET = "#1d2730", "#66727e"


@dataclass(frozen=True, kw_only=True)
class Report:
    """All cells of one run, with what they ran on; `left_out` names those that were not measured, and
    `not_installed` the contestants that were not there."""

    results: tuple[CellResult, ...]
    left_out: tuple[str, ...]
    rounds: int
    date: datetime
    command: str
    machine: Mapping[str, JsonValue]
    wall_s: float
    not_installed: tuple[str, ...] = ()

    @property
    def failures(self) -> list[tuple[CellResult, Outcome]]:
        return [(r, outcome) for r in self.results for outcome in r.outcomes.values() if outcome.error]

    def to_json(self) -> dict[str, Any]:
        """Every figure of every round."""
        return {
            "date": self.date.isoformat(timespec="seconds"),
            "command": self.command,
            "machine": dict(self.machine),
            "rounds": self.rounds,
            "left_out": list(self.left_out),
            "not_installed": list(self.not_installed),
            "wall_s": round(self.wall_s, 1),
            "cells": [_cell_json(result) for result in self.results],
        }


def _cell_json(result: CellResult) -> dict[str, Any]:
    return {
        "cell": str(result.cell),
        "ranks": result.cell.ranks,
        "cores": result.cores,
        "size_bytes": result.size_bytes,
        "batch": result.batch,
        "limits_s": result.limits,
        "left_out": result.left_out,
        "contestants": {
            name: {"error": outcome.error or None, **outcome.series}
            for name, outcome in result.outcomes.items()
        },
        "bars": [
            {
                "name": bar.name,
                "value": bar.value,
                "limit": bar.limit,
                "unit": bar.unit,
                "met": bar.is_met,
                "remark": bar.remark,
            }
            for bar in bars(result)
        ],
    }


def _ms(name: str) -> Callable[[CellResult, Outcome], str]:
    return lambda _, outcome: _milliseconds(median(outcome, name))


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value * 1e3:.3g}" if value < 0.1 else f"{value * 1e3:.0f}"


def _times_copy(name: str) -> Callable[[CellResult, Outcome], str]:
    def cell(_: CellResult, outcome: Outcome) -> str:
        pairs = zip(outcome.series.get(name, ()), copy_limit(outcome.series), strict=False)
        ratios = [a / b for a, b in pairs]
        return f"{statistics.median(ratios):.2f}" if ratios else "-"

    return cell


def _extra(result: CellResult, outcome: Outcome) -> str:
    value = median(outcome, "extra_bytes")
    return "-" if value is None else f"{value / result.size_bytes:.1f}"


def _excess_cell(_: CellResult, outcome: Outcome) -> str:
    value = excess_percent(outcome)
    return "-" if value is None else f"{value:.1f}"


def _lost_cell(_: CellResult, outcome: Outcome) -> str:
    return _milliseconds(lost(outcome))


def _memory_cell(result: CellResult, outcome: Outcome) -> str:
    return _ms("memory_restore_s")(result, outcome) if outcome.contestant in FROM_MEMORY else "not offered"


#: Column of the table of contestants -> its text for one of them.
_COLUMNS: dict[str, Callable[[CellResult, Outcome], str]] = {
    "held, overlap": _ms("held_s"),
    "x copy": _times_copy("held_s"),
    "held, none": _ms("held_alone_s"),
    "x copy ": _times_copy("held_alone_s"),
    "excess": _ms("excess_s"),
    "excess %": _excess_cell,
    "lost": _lost_cell,
    "durable": _ms("durable_s"),
    "first held": _ms("first_held_s"),
    "second held": _ms("second_held_s"),
    "extra memory": _extra,
    "from memory": _memory_cell,
    "from disk": _ms("disk_restore_s"),
    "warm": _ms("warm_restore_s"),
}


def limit_rows(result: CellResult) -> Iterator[list[str]]:
    yield ["limit", "ms", "GB/s per rank"]
    for name, seconds in result.limits.items():
        middle = statistics.median(seconds)
        yield [name, f"{middle * 1e3:.1f}", f"{result.size_bytes / middle / 1e9:.2f}"]


def contestant_rows(result: CellResult) -> Iterator[list[str]]:
    yield ["contestant", *(name.strip() for name in _COLUMNS)]
    for name, outcome in result.outcomes.items():
        yield [name, *(cell(result, outcome) for cell in _COLUMNS.values())]


def bar_rows(result: CellResult) -> Iterator[list[str]]:
    yield ["bar", "limit", "found", "verdict", "remark"]
    for bar in bars(result):
        yield [bar.name, _figure(bar, bar.limit), _figure(bar, bar.value), bar.rating, bar.remark]


def _figure(bar: Bar, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f} x" if bar.unit == "x" else f"{value:+.1f} {bar.unit}"


def as_text(report: Report) -> str:
    """The tables for a terminal."""
    lines: list[str] = []
    for result in report.results:
        lines += ["", f"=== {result.cell}: milliseconds, medians of {report.rounds} rounds"]
        for rows in (limit_rows(result), contestant_rows(result), bar_rows(result)):
            lines += ["", *_aligned(list(rows))]
    lines += [f"NOT INSTALLED {name}" for name in report.not_installed]
    lines += [
        f"FAILED {result.cell}, {outcome.contestant}: {outcome.error}" for result, outcome in report.failures
    ]
    return "\n".join(lines)


def _aligned(table: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]


def as_markdown(report: Report, picture: str = "") -> str:
    """A dated note, as kept in docs/benchmarks; `picture` is the name of a file beside it."""
    lines = [
        f"# Saves and restores beside their rivals and the machine's limits, {report.date:%Y-%m-%d}",
        "",
        f"`{report.command}`",
        "",
        _machine_line(report),
        *_conditions(report),
        "",
        "## Bars",
        "",
        *_bar_summary(report),
        *(["", f"![What one save costs training, and when it is durable]({picture})"] if picture else []),
    ]
    for result in report.results:
        lines += ["", f"## {result.cell}", ""]
        lines += [f"{result.size_bytes} bytes per rank, batch {result.batch}.  All times in milliseconds."]
        tables = (list(contestant_rows(result)), list(bar_rows(result)), list(limit_rows(result)))
        lines += [line for rows in tables if len(rows) > 1 for line in ("", *_table(rows))]
    lines += ["", *_WHAT_LIMITS, ""]
    left_out = [f"- {r.cell}: {', '.join(r.left_out)}" for r in report.results if r.left_out]
    left_out += [f"- {cell}: everything" for cell in report.left_out]
    left_out += [f"- {name}: was not installed" for name in report.not_installed]
    if left_out:
        lines += ["## Not measured", "", *left_out, ""]
    if report.failures:
        lines += ["## Failures", ""]
        for result, outcome in report.failures:
            lines += [f"- {result.cell}, {outcome.contestant}: {outcome.error.splitlines()[0]}"]
    return "\n".join(lines).rstrip() + "\n"


def _table(rows: list[list[str]]) -> list[str]:
    head, *body = rows
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body)]


def _machine_line(report: Report) -> str:
    facts = report.machine
    names = ("python", "torch", "nvidia-resiliency-ext", "dlrover")
    versions = ", ".join(f"{name} {facts[name]}" for name in names if facts.get(name))
    return (
        f"Machine: {facts['cores']} cores ({facts['cpu']}), {facts['memory_gib']} GiB, storage "
        f"{facts['storage']}, Linux {facts['kernel']}, load {facts['load_1min']} before; {versions}.  "
        f"The run took {report.wall_s / 60:.0f} minutes."
    )


def _conditions(report: Report) -> list[str]:
    return f"""
Every contestant ran in fresh processes, one after the other; medians of {report.rounds} rounds, the
slowest rank of each round.  Training: linear layers under AdamW, gloo, one torch thread per rank.

- *held, overlap*: the call, plus the wait before the optimizer steps, with a forward and backward
  between them that takes {ROOM:g} x the copy with one thread.  *held, none*: nothing between them.
- *excess*: the {STEPS} steps from the save on, less what was held, less {STEPS} undisturbed steps of the
  same round (before and after in turn); *excess %* is its share of those.  Savers that block have none.
- *lost*: what a save costs training, *held, overlap* and *excess* together.
- *durable*: from the call until the checkpoint is written and synced on all ranks, while nothing else
  runs.  *first held*, *second held*: the first saves of the process ("none"), after
  {STEPS_BEFORE_FIRST} steps.
- *extra memory*: peak during a save beyond training's own memory, processes and shared memory included,
  in states per rank.  Small states show the fixed cost: a writer process with torch takes 0.2 GB or more.
- *ours*: the agent comes from the launcher, which has torch imported; one that a rank starts by itself
  takes 0.2 GB more per host.  *One slot*: with `CheckpointerOptions(slots=1)`.
- *from memory*, *from disk*: into the trained tensors, in a fresh process; before a read from disk the
  files were dropped from the page cache (`posix_fadvise`); *warm*: they were all in it.  Every
  contestant's last checkpoint, saved with steps running beside it, was loaded back and compared bit by
  bit with the state that was saved.
  *Not offered*: a new process finds nothing in memory.
- Limits were taken in every round as well, in the process of the contestant; *copy* is the faster of
  one and two threads, *write* and *read* one file per rank past the page cache, in order, and synced; the
  *copy out of the page cache* is of a file that it has, the faster of one and two threads as well.
- DCP *tuned*: staging buffers that are kept, a staging thread that overlaps, two writers, a cached plan.
  NVRx: its persistent writer with cached metadata; its copy from the device is a clone here (CPU).
- *DLRover flash*: every rank saves a shard to memory and to storage; its saver runs in a process that
  outlives the ranks, as `dlrover-run` has it.  Every job has a launcher, so that process counts as extra
  memory only by what it grows.  Its files are synced, which it leaves out.
- *NVRx local*: a file per rank on the same disk as all others, synced, which it leaves out; it outlives the
  process, and the host only with a copy elsewhere (none is made here).  A clone is its copy from the device;
  *forked*: its older worker, whose copy is the fork.  Its guide allows a RAM disk too; that was not measured.
- *lm-resiliency*: its manager, flushed at each save, with its checksums on and its copies to peers off.
""".strip().splitlines()


_WHAT_LIMITS = """
## What limits our figures

- *Durable, from the call* contains the copy that frees training; the write begins when it is whole.
- *Restores* go straight into the state.  Beyond the copy they take what is done for each tensor, about 40
  us in all (table of the capture, comparison with the state, the optimizer's own loading), and files are
  compared with their checksums chunk by chunk, a tenth of the copy.
- *Excess* is the writer's share of the cores, the memory bus and the disk: with as many ranks as cores,
  nothing runs beside training for free.
""".strip().splitlines()


def _bar_summary(report: Report) -> list[str]:
    judged = {str(result.cell): found for result in report.results if (found := bars(result))}
    # A cell may have bars of its own.
    limits = {bar.name: _figure(bar, bar.limit) for found in judged.values() for bar in found}
    rows = [["bar", "limit", *judged]]
    for name, limit in limits.items():
        cells = ({bar.name: bar for bar in found}.get(name) for found in judged.values())
        rows.append([name, limit, *(_judged(bar) if bar else "" for bar in cells)])
    return _table(rows)


def _judged(bar: Bar) -> str:
    if bar.value is None:
        return bar.rating
    return _figure(bar, bar.value) + ("" if bar.is_met else " **missed**")


def as_png(report: Report) -> Any:
    """A figure: per cell, what one save costs training (left) and when it is durable (right)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = 1.2 + sum(0.6 + 0.34 * len(result.outcomes) for result in report.results)
    figure = Figure(figsize=(13, height), dpi=120, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(
        "What one save costs training, and when it is durable", size=17, weight="bold", color=_INK, x=0.01,
        ha="left",
    )  # fmt: skip
    rows = figure.subplots(len(report.results), 2, squeeze=False)
    for (cost, durable), result in zip(rows, report.results, strict=True):
        shown = [outcome for outcome in result.outcomes.values() if "held_s" in outcome.series]
        _draw_cost(cost, result, shown)
        _draw_durable(durable, result, shown)
    rows[-1][0].set_xlabel("milliseconds: held (left part) + excess of ten steps (right part)", color=_QUIET)
    rows[-1][1].set_xlabel("milliseconds; the line is a raw write of the same bytes with fsync", color=_QUIET)
    return figure


def _draw_cost(axes: Any, result: CellResult, shown: Sequence[Outcome]) -> None:
    for place, outcome in enumerate(shown):
        held = 1e3 * (median(outcome, "held_s") or 0.0)
        excess = 1e3 * max(0.0, median(outcome, "excess_s") or 0.0)
        excess = 0.0 if outcome.contestant in BLOCKING else excess
        axes.barh(place, held, color=_color(outcome), height=0.62)
        axes.barh(place, excess, left=held, color=_EXCESS_COLOR, height=0.62)
        axes.text(held + excess, place, f"  {held:.0f} + {excess:.0f}", va="center", color=_INK, size=9)
    _dress(axes, shown, f"{result.cell}, with room to overlap")


def _draw_durable(axes: Any, result: CellResult, shown: Sequence[Outcome]) -> None:
    for place, outcome in enumerate(shown):
        value = 1e3 * (median(outcome, "durable_s") or 0.0)
        axes.barh(place, value, color=_color(outcome), height=0.62)
        axes.text(value, place, f"  {value:.0f}", va="center", color=_INK, size=9)
    raw = [seconds for outcome in shown for seconds in outcome.series.get("write_s", ())]
    if raw:
        axes.axvline(1e3 * statistics.median(raw), color=_INK, linewidth=1)
    _dress(axes, shown, "until durable, nothing beside it")
    axes.set_yticklabels([])


def _color(outcome: Outcome) -> str:
    return _OURS_COLOR if outcome.contestant in OWN else _RIVAL_COLOR


def _dress(axes: Any, shown: Sequence[Outcome], title: str) -> None:
    axes.set_title(title, loc="left", size=11, color=_INK)
    axes.set_yticks(range(len(shown)), [outcome.contestant for outcome in shown], size=10, color=_INK)
    axes.invert_yaxis()
    axes.margins(x=0.16)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", colors=_QUIET, labelsize=9)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
