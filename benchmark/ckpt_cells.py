# SPDX-License-Identifier: Apache-2.0
"""One cell of the comparison: a size and a number of ranks, under every contestant in turn."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckpt_contestants import ARENA_ENV, FROM_MEMORY, READERS
from ckpt_groups import Groups, RankFailed, arena
from ckpt_launchers import launcher
from ckpt_rank import Figures, Task

from resiliency.checkpoint import Tier
from resiliency.runtime import JOB_ENV

Series = dict[str, list[float]]
#: Told what is being done now.
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Cell:
    """`size_bytes` of state on each of `ranks`."""

    size_bytes: int
    ranks: int

    def __str__(self) -> str:
        size = self.size_bytes / 2**30
        unit, number = ("GiB", size) if size >= 0.1 else ("MiB", self.size_bytes / 2**20)
        return f"{number:.3g} {unit} x {self.ranks} rank{'s' if self.ranks > 1 else ''}"


@dataclass(kw_only=True)
class Outcome:
    """What one contestant did in one cell: each series has a figure per round, of the slowest rank.

    Attributes:
        error: why there are no figures, or none of a restore.
    """

    contestant: str
    series: Series = field(default_factory=dict)
    error: str = ""


@dataclass(kw_only=True)
class CellResult:
    """A cell's limits and outcomes.  `size_bytes` is what one rank really saves; for contestants that
    were left out there was no time.  `cores` are those that ranks and savers share."""

    cell: Cell
    size_bytes: int
    batch: int
    limits: Series
    outcomes: dict[str, Outcome]
    left_out: list[str] = field(default_factory=list)
    cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))


def run_cell(
    groups: Groups,
    cell: Cell,
    contestants: Sequence[str],
    rounds: int,
    root: Path,
    progress: Progress,
    deadline: float = math.inf,
) -> CellResult:
    """Measure the limits, then every contestant.

    Args:
        deadline: monotonic time after which no further contestant begins.
    Raises:
        RankFailed: the limits could not be measured; contestants that fail are reported instead.
    """
    with _job(root) as (directory, env):
        progress("limits")
        blank = Task(
            contestant=None,
            size_bytes=cell.size_bytes,
            world_size=cell.ranks,
            directory=directory,
            rounds=rounds,
        )
        limits = groups.run(blank, env)
    batch = max(figures["batch"] for figures in limits)
    result = CellResult(
        cell=cell,
        size_bytes=limits[0]["size_bytes"],
        batch=batch,
        limits=_slowest([figures["seconds"] for figures in limits]),
        outcomes={},
    )
    for name in contestants:
        if time.monotonic() > deadline:
            result.left_out.append(name)
            continue
        with _job(root) as (directory, env):
            task = replace(blank, contestant=name, directory=directory, batch=batch)
            try:
                result.outcomes[name] = _run_contestant(groups, task, env, progress)
            finally:
                groups.close()
    return result


@contextmanager
def _job(root: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """Directory and environment of one contestant; nothing of it is left behind."""
    directory = Path(tempfile.mkdtemp(prefix="ckpt-compare-", dir=root))
    try:
        with arena() as memory:
            yield directory, {ARENA_ENV: str(memory), JOB_ENV: directory.name}
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.sync()  # nobody pays for the files of another


def _run_contestant(groups: Groups, task: Task, env: dict[str, str], progress: Progress) -> Outcome:
    name = task.contestant or ""
    outcome = Outcome(contestant=name)
    try:
        with launcher(name, task.directory) as more:
            _save_and_restore(groups, task, {**env, **more}, outcome, progress)
    except RankFailed as failure:
        outcome.error = "\n".join([str(failure), *_last_words(task.directory)])
    return outcome


def _save_and_restore(
    groups: Groups, task: Task, env: dict[str, str], outcome: Outcome, progress: Progress
) -> None:
    name = outcome.contestant
    progress(f"{name}: save")
    saved = groups.run(replace(task, keep_memory=name in FROM_MEMORY), env)
    outcome.series = _saving(saved)
    loader = replace(
        task,
        digest=tuple(figures["digest"] for figures in saved),
        saved=saved[0]["saved"],
        restore=Tier.PERSISTENT,
    )
    if name in FROM_MEMORY:
        progress(f"{name}: restore from memory")
        outcome.series |= _prefixed("memory_", _restores(groups, loader, env, Tier.MEMORY))
    progress(f"{name}: restore from disk")
    rounds = task.rounds if name in READERS else 1
    from_storage = _restores(groups, replace(loader, rounds=rounds), env, Tier.PERSISTENT)
    outcome.series |= _prefixed("disk_", from_storage)
    if name in READERS:
        progress(f"{name}: restore from the page cache")
        warm = _restores(groups, replace(loader, is_warm=True), env, Tier.PERSISTENT)
        outcome.series |= _prefixed("warm_", warm)


def _last_words(directory: Path) -> list[str]:
    """The end of what the ranks and their processes printed."""
    texts = [path.read_text(errors="replace") for path in sorted(directory.glob("output-*"))]
    return [line for text in texts for line in text.splitlines()[-20:]]


def _restores(groups: Groups, loader: Task, env: dict[str, str], tier: Tier) -> Series:
    """Each in a fresh process: what a restart would see."""
    found: Series = {}
    for number in range(loader.rounds):
        last = number == loader.rounds - 1
        task = replace(loader, restore=tier, keep_memory=not last)
        for name, values in _slowest(groups.run(task, env)).items():
            found.setdefault(name, []).extend(values)
    return found


def _saving(ranks: Sequence[Figures]) -> Series:
    for figures in ranks:
        windows = figures.get("window_s", [])  # those that block have none, and no excess
        figures["excess_s"] = [
            window - held - undisturbed
            for window, held, undisturbed in zip(
                windows, figures["held_s"][: len(windows)], figures.get("ten_steps_s", []), strict=True
            )
        ]
        figures["commit_s"] = [
            durable - held
            for durable, held in zip(figures["durable_s"], figures["held_alone_s"], strict=True)
        ]
    series = _slowest([{k: v for k, v in figures.items() if isinstance(v, list)} for figures in ranks])
    for name in ("setup_s", "first_held_s", "second_held_s", "first_durable_s"):
        series[name] = [max(figures[name] for figures in ranks)]
    series["extra_bytes"] = [ranks[0]["extra_bytes"] / len(ranks)]
    return series


def _slowest(ranks: Sequence[Figures]) -> Series:
    """Of each round the slowest rank: that is what a job waits for."""
    return {
        name: [max(values) for values in zip(*(r[name] for r in ranks), strict=True)] for name in ranks[0]
    }


def _prefixed(prefix: str, series: Series) -> Series:
    return {prefix + name: values for name, values in series.items()}
