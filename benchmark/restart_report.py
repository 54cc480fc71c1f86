# SPDX-License-Identifier: Apache-2.0
"""What restart_time.py found, for people (text, Markdown, picture) and for programs (JSON)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from restart_runs import OURS, RANKS, SUPERVISED, SUPERVISED_COLD, Failure, Workload, rendezvous_flags
from restart_spans import LAUNCHER_SPANS, SPANS, Restart

from resiliency.errors import ConfigError
from resiliency.events import JsonValue

_COLORS = dict(zip(SPANS, ("#a3142f", "#e07a3f", "#c9ced4", "#9fb8d9", "#4f86c6", "#2f8f5b"), strict=True))
_INK, _QUIET = "#1d2730", "#66727e"


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run; `restart` is None when it failed, and `error` says why."""

    round: int
    launcher: str
    wall_s: float
    restart: Restart | None = None
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Report:
    """All runs of one workload, with what they ran on.  The first of `launchers` is ours."""

    workload: Workload
    monitor_interval_s: float
    launchers: tuple[str, ...]
    results: tuple[Result, ...]
    date: datetime
    command: str
    machine: Mapping[str, JsonValue]

    def of(self, launcher: str, *, since: int = 1) -> dict[int, Restart]:
        """Round -> what was measured, from round `since` on."""
        return {
            result.round: result.restart
            for result in self.results
            if result.launcher == launcher and result.restart is not None and result.round >= since
        }

    @property
    def title(self) -> str:
        return f"{_FROM[self.workload.failure]} to the first new step"

    @property
    def failures(self) -> list[Result]:
        return [result for result in self.results if result.restart is None]

    @property
    def rounds(self) -> int:
        return max((result.round for result in self.results), default=0)

    def to_json(self) -> dict[str, JsonValue]:
        """Every figure of every run."""
        return {
            "date": self.date.isoformat(timespec="seconds"),
            "command": self.command,
            "machine": dict(self.machine),
            "workload": self.workload.name,
            "ranks": RANKS,
            "steps": self.workload.steps,
            "save_every": self.workload.save_every,
            "fault": self.workload.fault,
            "monitor_interval_s": self.monitor_interval_s,
            "runs": [
                {
                    "round": result.round,
                    "launcher": result.launcher,
                    "wall_s": round(result.wall_s, 3),
                    "error": result.error or None,
                    "restart": result.restart.to_json() if result.restart else None,
                }
                for result in self.results
            ],
        }


_FROM: dict[Failure, str] = {
    "killed": "From a killed rank",
    "hung": "From a hang that was found",
    "host": "From a killed host with a spare",
}


def _span(name: str) -> Callable[[Restart], float]:
    return lambda run: run.spans_s[name]


#: In round 1 our launcher does not know the imports yet.
FIRST_START = "first start, from round 2 on: command to first step"
#: Row of the table -> figure of a run.
_ROWS: dict[str, Callable[[Restart], float | None]] = {
    **{text: _span(name) for name, text in SPANS.items()},
    "total: fault to first new step": lambda run: run.total_s,
    "of it the launcher's part (first two)": lambda run: run.launcher_s,
    "steady step": lambda run: run.step_s,
    "training held by a save": lambda run: run.held_s,
    FIRST_START: lambda run: run.first_step_s,
    "memory of ranks and template, GiB (PSS)": lambda run: (run.memory_bytes or 0) / 2**30 or None,
}


def rows(report: Report) -> Iterator[list[str]]:
    """The table, with its head: medians (min..max), and ratios of the runs of the same round."""
    others = report.launchers[1:]
    yield ["seconds, median (min..max)", *report.launchers, *(f"{OURS} / {other}" for other in others)]
    for text, figure in _ROWS.items():
        cells = []
        since = 2 if text == FIRST_START else 1
        for launcher in report.launchers:
            runs = report.of(launcher, since=since).values()
            values = [value for run in runs if (value := figure(run)) is not None]
            cells.append(_spread(values, "{:.3f}"))
        for other in others:
            ours, theirs = (report.of(name, since=since) for name in (OURS, other))
            pairs = [(figure(ours[number]), figure(theirs[number])) for number in ours if number in theirs]
            cells.append(_spread([a / b for a, b in pairs if a is not None and b], "{:.2f}"))
        yield [text, *cells]


def _spread(values: Sequence[float], form: str) -> str:
    if not values:
        return "-"
    middle = form.format(statistics.median(values))
    if len(values) == 1:
        return middle
    return f"{middle} ({form.format(min(values))}..{form.format(max(values))})"


def own_spans(report: Report) -> str:
    """What our launcher says of its own part; the others write nothing that can be compared."""
    reported = []
    for launcher in (SUPERVISED, SUPERVISED_COLD, OURS):
        runs = list(report.of(launcher).values())
        stages = {
            stage: [run.own_spans_s[stage] for run in runs if stage in run.own_spans_s]
            for stage in (runs[0].own_spans_s if runs else ())
        }
        parts = [f"{stage} {_spread(values, '{:.3f}')}" for stage, values in stages.items()]
        reported += [f"{launcher}: {', '.join(parts)}"] if parts else []
    return "; ".join(reported)


def counts(report: Report) -> str:
    """``launcher.py 5 of 5, ...``: runs that were measured."""
    parts = [f"{launcher} {len(report.of(launcher))} of {report.rounds}" for launcher in report.launchers]
    return ", ".join(parts)


def as_text(report: Report) -> str:
    """The table for a terminal."""
    table = list(rows(report))
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
    lines.insert(1, "-" * len(lines[0]))
    lines += ["", f"Runs measured: {counts(report)}."]
    if own := own_spans(report):
        lines.append(f"What ours reports of its own part, after the fault: {own}.")
    lines += [_failure(result) for result in report.failures]
    return "\n".join(lines)


def _failure(result: Result) -> str:
    return f"FAILED round {result.round}, {result.launcher}, after {result.wall_s:.0f} s: {result.error}"


def as_markdown(report: Report) -> str:
    """A dated note, as kept in docs/benchmarks."""
    facts, work = report.machine, report.workload
    head, *body = rows(report)
    table = [head, ["---"] * len(head), *body]
    flags = f"`{' '.join(work.launcher_flags)}`"
    versions = ", ".join(f"{name} {facts[name]}" for name in list(facts)[5:] if facts[name] is not None)
    failures = [f"- {_failure(result).splitlines()[0]}" for result in report.failures]
    return "\n".join(
        [
            f"# {report.title}, {work.name} workload, {report.date:%Y-%m-%d}",
            "",
            f"`{report.command}`",
            "",
            f"Machine: {facts['cores']} cores ({facts['cpu']}), {facts['memory_gib']} GiB, "
            f"Linux {facts['kernel']}, load {facts['load_1min']} before; {versions}.",
            f"Job: {work.description}; {RANKS} ranks on {_place(work)}, {work.steps} steps, a save every "
            f"{work.save_every}; the last {'host' if work.hosts > 1 else 'rank'} gets "
            f"{'SIGSTOP' if work.hung else 'SIGKILL'} after step {work.fault_step}, so step "
            f"{work.restored_step} is restored.",
            f"Launchers: monitor interval {report.monitor_interval_s:g} s for all; {_rendezvous(work)};",
            "torchrun with `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`, without which a restart can fail;",
            "ft_launcher with `--ft-enable-nic-monitor false`.  `standby off`: launcher.py with",
            "`--standby off`; without it, ranks are forked from a template, which from round 2 on knows the",
            "imports before the first start, too: the first start is that of round 2 and later ones.",
            *(
                [f"Zero is the end of the first rank that a launcher found hung ({flags})."]
                if work.hung
                else []
            ),
            "",
            *(f"| {' | '.join(row)} |" for row in table),
            "",
            f"Runs measured: {counts(report)}.  Ratios are taken within a round, so both sides saw the same",
            "machine; below 1 means that ours is faster.",
            *(
                [f"What ours reports of its own part, after the fault: {own}."]
                if (own := own_spans(report))
                else []
            ),
            *(["", "Runs that failed:", "", *failures] if failures else []),
            "",
            "Limits: one machine, CPU and gloo, so no CUDA or NCCL start-up; the kernel tells the start of a",
            "process to 10 ms; torchrun and ft_launcher wait a random 0 to 0.3 s at a first restart, which",
            "launcher.py leaves out on one host; a stage counts as reached when the last rank has reached",
            "it.  How spans are told apart:",
            "[README](README.md).",
            "",
        ]
    )


def _place(work: Workload) -> str:
    return "one host" if work.hosts == 1 else f"{work.hosts} hosts (launchers on one machine)"


def _rendezvous(work: Workload) -> str:
    if work.hosts == 1:
        return "torchrun and ft_launcher with `--standalone`"
    flags = " ".join(rendezvous_flags("PORT", silent=""))
    return (
        f"all with `{flags}`, in a store of its own, and with a third, spare host, on which a launcher waits "
        f"(`{SUPERVISED_COLD}` starts one there)"
    )


def as_png(report: Report) -> Any:
    """A figure: one stacked bar per launcher, the whole restart above, the launcher's part below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6.4), dpi=130, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(
        f"{report.title}  ·  {report.workload.name} workload",
        size=17, weight="bold", color=_INK, x=0.01, ha="left",
    )  # fmt: skip
    whole, part = figure.subplots(2, 1)
    measured = [launcher for launcher in report.launchers if report.of(launcher)]
    if not measured:
        raise ConfigError("there is nothing to draw: no run was measured.")
    _bars(whole, report, measured, tuple(SPANS), "whole restart")
    _bars(part, report, measured, LAUNCHER_SPANS, "the launcher's part alone")
    part.set_xlabel(
        f"seconds after the fault, medians over {report.rounds} round(s) (min..max of the sum)  ·  "
        f"{RANKS} ranks, {_place(report.workload)}",
        size=10, color=_QUIET,
    )  # fmt: skip
    figure.legend(
        *whole.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=10
    )
    return figure


def _bars(axes: Any, report: Report, launchers: list[str], spans: Sequence[str], title: str) -> None:
    longest = 0.0
    for place, launcher in enumerate(launchers):
        runs = list(report.of(launcher).values())
        left = 0.0
        for name in spans:
            width = statistics.median(run.spans_s[name] for run in runs)
            label = SPANS[name] if not place else None
            axes.barh(place, width, left=left, color=_COLORS[name], label=label, height=0.62)
            left += width
        totals = [sum(run.spans_s[name] for name in spans) for run in runs]
        axes.text(left, place, f"  {_spread(totals, '{:.2f}')} s", va="center", color=_INK, size=11)
        longest = max(longest, left)
    axes.set_title(title, loc="left", size=12, color=_INK)
    axes.set_yticks(range(len(launchers)), launchers, size=12, color=_INK)
    axes.invert_yaxis()
    axes.set_xlim(0, longest * 1.2)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", colors=_QUIET)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
