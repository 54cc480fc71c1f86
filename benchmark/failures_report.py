# SPDX-License-Identifier: Apache-2.0
"""What goodput_under_failures.py says: table, bars, JSON, a dated note, a picture."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from failures_jobs import NOT_A_RIVAL, OURS, Training
from failures_runs import RANKS, Run

from resiliency.events import JsonValue

#: At least so much more time does the best rival lose.
RIVAL_BAR = 1.25


@dataclass(frozen=True, kw_only=True)
class Report:
    """All runs so far.

    Attributes:
        runs: each with the undisturbed rate of its round, in steps a second.
        left_out: contestants that could not take part, with the reason.
    """

    training: Training
    command: str
    machine: Mapping[str, JsonValue]
    runs: Sequence[tuple[Run, float]]
    left_out: Mapping[str, str] = field(default_factory=dict)
    date: datetime = field(default_factory=lambda: datetime.now(timezone.utc))

    @property
    def names(self) -> list[str]:
        """Contestants that a round measured."""
        return list(dict.fromkeys(run.contestant for run, _ in self.runs if not run.error))

    def of(self, name: str) -> list[tuple[Run, float]]:
        return [(run, rate) for run, rate in self.runs if run.contestant == name and not run.error]

    def lost_s(self, name: str) -> list[float]:
        """Lost seconds of each round."""
        return [run.lost_s(rate) for run, rate in self.of(name)]

    @property
    def failed(self) -> list[Run]:
        return [run for run, _ in self.runs if run.error]

    @property
    def best_rival(self) -> str | None:
        """That loses the least time of those that are none of ours."""
        rivals = [one for one in self.names if not one.startswith((OURS, NOT_A_RIVAL))]
        return min(rivals, key=lambda one: statistics.median(self.lost_s(one)), default=None)

    def to_json(self) -> dict[str, JsonValue]:
        return {
            "date": self.date.isoformat(timespec="seconds"),
            "command": self.command,
            "machine": dict(self.machine),
            "training": self.training.name,
            "undisturbed_steps_per_s": {str(run.round): rate for run, rate in self.runs},
            "runs": [run.to_json(rate) for run, rate in self.runs],
            "left_out": dict(self.left_out),
            "bars": list[JsonValue](bars(self)),
        }


HEAD = (
    "contestant", "kept", "worst", "lost s", "worst s", "faults", "back", "mean s", "median s", "worst s"
)  # fmt: skip


def rows(report: Report) -> list[list[str]]:
    """The table: medians over rounds, and the worst round; times to the first step that had not been made."""
    found = []
    for name in report.names:
        runs, lost = report.of(name), report.lost_s(name)
        kept = [run.kept_share(rate) for run, rate in runs]
        times = [each for run, _ in runs for each in run.recoveries_s]
        back = [each for each in times if each is not None]
        row = [name, f"{statistics.median(kept):.1%}", f"{min(kept):.1%}"]
        row += [f"{statistics.median(lost):.1f}", f"{max(lost):.1f}"]
        row += [f"{len(times)} of {sum(run.planned for run, _ in runs)}", str(len(back))]
        row += [f"{of(back):.2f}" for of in (statistics.fmean, statistics.median, max)] if back else ["-"] * 3
        found.append(row)
    return found


def bars(report: Report) -> list[str]:
    """Each bar, met or missed."""
    found, training = [], report.training
    for name in (one for one in report.names if one.startswith(OURS)):
        if training.bar is None:
            runs = [run for run, _ in report.of(name)]
            on = sum(run.trains_on for run in runs)
            is_met = "met" if on == len(runs) else "missed"
            found.append(f"{name} trains on after its losses in {on} of {len(runs)} runs: {is_met}")
            continue
        kept = statistics.median(run.kept_share(rate) for run, rate in report.of(name))
        is_met = "met" if kept >= training.bar else "missed"
        found.append(f"{name} keeps {kept:.1%} of the possible steps (bar {training.bar:.0%}): {is_met}")
    rival = report.best_rival
    if training.bar is not None and rival is not None and OURS in report.names:
        own, its = (statistics.median(report.lost_s(name)) for name in (OURS, rival))
        ratio = its / own if own > 0 else float("inf")
        is_met = "met" if ratio >= RIVAL_BAR else "missed"
        found.append(
            f"{rival}, the best rival, loses {ratio:.2f} x as much time as {OURS} (bar {RIVAL_BAR}): {is_met}"
        )
    return found


def remarks(report: Report) -> list[str]:
    """Where the time went, and what did not go as planned."""
    found = []
    for name in report.names:
        runs = [run.causes_s for run, _ in report.of(name) if run.causes_s]
        words = dict.fromkeys(cause for run in runs for cause in run)
        causes = {word: statistics.median(run.get(word, 0.0) for run in runs) for word in words}
        if causes:
            found.append(f"{name}, s by cause: " + ", ".join(f"{word} {s:.1f}" for word, s in causes.items()))
    for run in (run for run, _ in report.runs if not run.error):
        where = f"round {run.round}, {run.contestant}"
        if run.ended_s is not None:
            found.append(f"{where}: the job ended by itself after {run.ended_s:.0f} s")
        elif report.training.hosts > 1 and not run.trains_on:
            found.append(f"{where}: the job did not train any more after the window")
        for number, spans in enumerate(run.incidents_s, 1):
            parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in spans.items())
            found.append(f"{where}, incident {number} of the supervisor, s: {parts}")
    found += [f"{name} is left out: {why}" for name, why in report.left_out.items()]
    found += [f"FAILED round {run.round}, {run.contestant}: {run.error}" for run in report.failed]
    return found


def as_text(report: Report) -> str:
    """For a terminal."""
    table = [list(HEAD), *rows(report)]
    widths = [max(len(row[place]) for row in table) for place in range(len(HEAD))]
    lines = [
        "  ".join(cell.ljust(width) if not place else cell.rjust(width)
                  for place, (cell, width) in enumerate(zip(row, widths, strict=True)))
        for row in table
    ]  # fmt: skip
    return "\n".join([*lines, *bars(report), *remarks(report)])


def as_markdown(report: Report) -> str:
    """A dated note, as kept in docs/benchmarks."""
    facts, training = report.machine, report.training
    versions = ", ".join(f"{name} {facts[name]}" for name in list(facts)[5:] if facts[name] is not None)
    plan = report.runs[0][0]
    rates = {run.round: rate for run, rate in report.runs}
    table = [list(HEAD), ["---"] * len(HEAD), *rows(report)]
    return "\n".join(
        [
            f"# Goodput under failures, {training.name} training, {report.date:%Y-%m-%d}",
            "",
            f"`{report.command}`",
            "",
            f"Machine: {facts['cores']} cores ({facts['cpu']}), {facts['memory_gib']} GiB, "
            f"Linux {facts['kernel']}, load {facts['load_1min']} before; {versions}.",
            f"Job: {training.description}; {_where(training)}  Each run: {plan.planned} failures in"
            f" {plan.wall_s:g} s, the same for all contestants of a round.",
            *_what_a_loss_is(training),
            "Possible: what torchrun makes without failures and saves, measured in the same round"
            f" ({', '.join(f'{rate:.1f}' for rate in rates.values())} steps a second).",
            "",
            *(f"| {' | '.join(row)} |" for row in table),
            "",
            "*faults*: that hit a rank, of those planned; the rest found no rank, because the job was still"
            " restarting.",
            "*back*: after how many of them training came to a step that it had not made before, and how long"
            " that took.",
            "",
            *(f"- {line.splitlines()[0]}" for line in (*bars(report), *remarks(report))),
            "",
        ]
    )


def _where(training: Training) -> str:
    if training.hosts == 1:
        return f"{RANKS} ranks on one host."
    return f"{training.hosts} hosts of one rank each and a spare, all processes of this machine."


def _what_a_loss_is(training: Training) -> list[str]:
    if training.hosts == 1:
        return []
    return [
        "A loss: daemon, launcher and rank of a host are killed at once, and its disk and memory are removed;"
        " after a third of the mean time between losses the host is back, empty.  Storage, and the store in"
        " which launchers meet, are outside of the hosts.",
    ]


def draw(report: Report) -> Any:
    """A figure of matplotlib's."""
    from matplotlib.figure import Figure

    names = report.names[::-1]
    figure = Figure(figsize=(8, 1 + 0.6 * len(names)), layout="constrained")
    axes = figure.subplots()
    axes.barh(names, [statistics.median(report.lost_s(name)) for name in names], color="#4477aa")
    for place, name in enumerate(names):
        lost = report.lost_s(name)
        axes.plot(lost, [place] * len(lost), "k|", markersize=12)
    axes.set_xlabel("lost seconds: median of rounds, each round a mark")
    return figure


def measured_with(names: Iterable[str]) -> str:
    """Contestants as words of a command line."""
    return " ".join(f'"{name}"' if " " in name else name for name in names)
