# SPDX-License-Identifier: Apache-2.0
"""What replication.py found, for people (text, Markdown) and for programs (JSON)."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from replication_hosts import HOSTS

from resiliency.events import JsonValue

Figures = Mapping[str, float]

#: Measurement -> what it is called; the order of the tables.
TITLES = {
    "raw_memory": "raw socket, received into memory",
    "raw_file": "raw socket, received into a file, synced",
    "ours_one_way": "ours, host-0 to host-1: verified, synced, committed",
    "ours_both_ways": "ours, both hosts at once: verified, synced, committed",
    "nvrx_both_ways": "NVRx clique of 2 gloo ranks, both at once: in memory",
    "raw_read": "raw read of the host's files",
    "own_disk": "restore, each rank from its own disk",
    "from_peer": "restore, rank 0 from a peer: its host was lost",
    "replicas_off": "a save without copies",
    "replicas_on": "a save with one copy on the other host",
}
#: Title -> which measurement is divided by which, in the same round.
_RATIOS = {
    "copy: ours, one way / raw socket into memory": ("ours_one_way", "raw_memory"),
    "copy: ours, one way / raw socket into a file": ("ours_one_way", "raw_file"),
    "copy: ours, both ways / NVRx": ("ours_both_ways", "nvrx_both_ways"),
    "recovery: from a peer / from own disk": ("from_peer", "own_disk"),
    "recovery: from own disk / raw read": ("own_disk", "raw_read"),
    "recovery: from a peer / raw read": ("from_peer", "raw_read"),
}
#: Figure of a save -> what it is called.
_SAVE_FIGURES = {
    "held_s": "training held when the save began",
    "excess_s": "excess of the ten steps after it",
    "cost_s": "both, with fences: save and ten steps, less ten steps before",
    "ten_steps_s": "ten steps before it",
    "complete_s": "complete on both hosts after",
}
_OFF, _ON = "replicas_off", "replicas_on"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A measurement that did not run; it was not tried in later rounds."""

    name: str
    round: int
    error: str

    def __str__(self) -> str:
        *_, last = self.error.strip().splitlines() or ["no error was told"]
        return f"{TITLES.get(self.name, self.name)}, round {self.round}: {last}"


@dataclass(frozen=True, kw_only=True)
class Report:
    """All rounds; each maps a measurement to its figures, those of the slowest rank."""

    rounds: Sequence[Mapping[str, Figures]]
    failures: Sequence[Failure]
    saved_bytes: int
    date: datetime
    command: str
    machine: Mapping[str, JsonValue]
    wall_s: float

    def series(self, name: str, figure: str = "s") -> list[float]:
        """That figure in every round that has it."""
        return [found[name][figure] for found in self.rounds if name in found]

    def ratios(self, name: str, other: str) -> list[float]:
        pairs = [
            (found[name]["s"], found[other]["s"]) for found in self.rounds if {name, other} <= found.keys()
        ]
        return [one / two for one, two in pairs]

    def differences(self, figure: str) -> list[float]:
        """What copies add to that figure of a save."""
        pairs = [(found[_ON], found[_OFF]) for found in self.rounds if {_ON, _OFF} <= found.keys()]
        return [on[figure] - off[figure] for on, off in pairs]

    def to_json(self) -> dict[str, JsonValue]:
        """Every figure of every round."""
        return {
            "date": self.date.isoformat(timespec="seconds"),
            "command": self.command,
            "machine": dict(self.machine),
            "hosts": HOSTS,
            "saved_bytes": self.saved_bytes,
            "wall_s": round(self.wall_s, 1),
            "rounds": [
                {
                    name: {key: round(value, 6) for key, value in figures.items()}
                    for name, figures in one.items()
                }
                for one in self.rounds
            ],
            "ratios": {
                f"{name} / {other}": [round(ratio, 4) for ratio in self.ratios(name, other)]
                for name, other in _RATIOS.values()
            },
            "failures": [
                {"measurement": failure.name, "round": failure.round, "error": failure.error}
                for failure in self.failures
            ],
        }


def _spread(values: Sequence[float], form: str = "{:.3f}") -> str:
    if not values:
        return "-"
    middle = form.format(statistics.median(values))
    if len(values) == 1:
        return middle
    return f"{middle} ({form.format(min(values))}..{form.format(max(values))})"


def _timed(report: Report) -> Iterator[list[str]]:
    yield ["copies and recovery", "seconds", "GB/s per host"]
    for name in TITLES:
        if name not in (_OFF, _ON):
            seconds = report.series(name)
            rates = [report.saved_bytes / taken / 1e9 for taken in seconds]
            yield [TITLES[name], _spread(seconds), _spread(rates, "{:.2f}")]


def _ratios(report: Report) -> Iterator[list[str]]:
    yield ["ratios within a round, below 1: the first is faster", "ratio"]
    for title, (name, other) in _RATIOS.items():
        yield [title, _spread(report.ratios(name, other), "{:.2f}")]


def _saves(report: Report) -> Iterator[list[str]]:
    yield ["saves, seconds", TITLES[_OFF], TITLES[_ON], "copies add"]
    for figure, title in _SAVE_FIGURES.items():
        columns = (report.series(_OFF, figure), report.series(_ON, figure), report.differences(figure))
        yield [title, *map(_spread, columns)]


def _tables(report: Report) -> Iterator[list[list[str]]]:
    """With their heads; what was not measured has no row, and stands among the failures if it was tried."""
    for table in (_timed, _ratios, _saves):
        head, *rows = table(report)
        if body := [row for row in rows if any(cell != "-" for cell in row[1:])]:
            yield [head, *body]


def as_text(report: Report) -> str:
    """The tables for a terminal."""
    lines = [_setting(report)]
    for rows in _tables(report):
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        aligned = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        lines += ["", aligned[0], "-" * len(aligned[0]), *aligned[1:]]
    lines += ["", *(f"FAILED {failure}" for failure in report.failures)]
    return "\n".join(lines).rstrip()


def _setting(report: Report) -> str:
    return (
        f"{report.saved_bytes / 2**20:.1f} MiB of state per rank, {HOSTS} hosts of one rank each on one "
        f"machine, medians (min..max) of {len(report.rounds)} round(s)"
    )


def as_markdown(report: Report) -> str:
    """A dated note, as kept in docs/benchmarks."""
    facts = report.machine
    packages = ("python", "torch", "nvidia-resiliency-ext")
    versions = ", ".join(f"{name} {facts[name]}" for name in packages if facts.get(name) is not None)
    tables: list[str] = []
    for head, *body in _tables(report):
        tables += ["", *(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body))]
    failures = [f"- {failure}" for failure in report.failures]
    return "\n".join(
        [
            f"# Copies on other hosts, {report.date:%Y-%m-%d}",
            "",
            f"`{report.command}`",
            "",
            f"Machine: {facts['cores']} cores ({facts['cpu']}), {facts['memory_gib']} GiB, "
            f"{facts['storage']}, Linux {facts['kernel']}, load {facts['load_1min']} before; {versions}.",
            "",
            f"{_setting(report)}.",
            *tables,
            *(["", "What did not run:", "", *failures] if failures else []),
            "",
            "Limits: one machine plays both hosts, so they share its cores, its memory bus and one disk, and",
            "the network is the loopback device.  NVRx leaves its copies in memory, unverified, and holds",
            "training meanwhile; ours are verified and on disk, and training goes on.  Restores and raw",
            "reads begin with an empty page cache; copies begin with the source in it, except NVRx's, which",
            "come from tensors.  Of two ranks the slower one counts.",
            "",
        ]
    )
