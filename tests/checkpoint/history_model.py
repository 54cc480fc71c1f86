# SPDX-License-Identifier: Apache-2.0
"""What a job's storage must hold after any history: the model of the generated ones.

It knows each save that was begun (step, content, the branch that it is of), looks at what readers see after
each operation, and is told what was reported.  It does not know how the engine does any of it.

1. What was committed stays, bit for bit, until retention may delete it.
2. The next start restores the newest that is live, as one save.
3. No step holds parts of two saves.
4. A process that is late changes nothing that another one committed, and reports nothing that is not there.
5. A program that saves nothing deletes nothing of a living one.
6. The newest `keep` live ones stay, and with them the one that a rollback went back to.
7. What is committed is never hidden for good.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


class Violation(AssertionError):
    """The engine did what it must not do."""


@dataclass(frozen=True)
class Branch:
    """One way that training went.  `fork`: the step of `parent` at which it began."""

    number: int
    parent: Branch | None = None
    fork: int = 0

    def last_step_of(self, other: Branch) -> float:
        """The newest step of `other` that led here; -1: none."""
        end, branch = float("inf"), self
        while branch != other:
            if branch.parent is None:
                return -1
            end, branch = min(end, branch.fork), branch.parent
        return end


@dataclass(frozen=True)
class Line:
    """A start of the job, or what it is after it went back; later ones have higher orders."""

    order: int
    branch: Branch
    attempt_id: str


@dataclass(frozen=True)
class Save:
    """`content`: a number from which the bytes of all ranks follow."""

    step: int
    save_id: str
    content: int
    line: Line


@dataclass
class Model:
    """`keep`: checkpoints that retention keeps, in each tier."""

    keep: int
    hosts: tuple[str, ...]
    saves: dict[str, Save] = field(default_factory=dict)
    #: By disk (a host's, or the shared one under its empty name): step to the save that readers see.
    visible: dict[str, dict[int, str]] = field(default_factory=dict)
    #: All that was visible at any time, by disk.
    seen: dict[str, set[str]] = field(default_factory=dict)
    #: Saves of the local tier that were reported to be complete on all hosts.
    complete: set[str] = field(default_factory=set)
    #: The line that the job is on, as far as a disk knows: it has recorded its branch there, or committed.
    lines: dict[str, Line] = field(default_factory=dict)
    #: Saves that were begun on the current line, by step: they replace what was left.
    begun: set[tuple[int, Line]] = field(default_factory=set)

    def __post_init__(self) -> None:
        for disk in ("", *self.hosts):
            self.visible[disk], self.seen[disk] = {}, set()

    # --- what happens -----------------------------------------------------------------------------

    def begin(self, save: Save) -> None:
        # Another try may have another state: the ranks have restored the step in full since, and not in part.
        if not any(save.save_id in seen for seen in self.seen.values()):
            self.saves[save.save_id] = save
        self.begun.add((save.step, save.line))

    def note_line(self, disk: str, line: Line) -> None:
        """A line has become known to a disk."""
        if disk not in self.lines or line.order > self.lines[disk].order:
            self.lines[disk] = line

    @property
    def current(self) -> Line | None:
        """The line that the job is on, as far as any disk knows."""
        return max(self.lines.values(), key=lambda line: line.order, default=None)

    def change(self, disk: str, step: int, now: str | None) -> None:
        """Readers see another save at a step, or none."""
        before = self.visible[disk].pop(step, None)
        if before is not None:
            self._check_may_go(disk, step, before)
        if now is None:
            return
        if now not in self.saves or self.saves[now].step != step:
            raise Violation(f"step {step} of disk {disk!r} is of {now}, which nobody saved")
        self.visible[disk][step] = now
        self.seen[disk].add(now)
        self.note_line(disk, self.saves[now].line)

    def lose_disk(self, host: str) -> None:
        self.visible[host], self.seen[host] = {}, set()
        self.lines.pop(host, None)

    def check_report(self, disk: str, save_id: str, step: int, content: int) -> None:
        """A try of a save is reported as committed."""
        others = (self.saves[other] for other in self.seen[disk])
        if not any((other.step, other.content) == (step, content) for other in others):
            raise Violation(f"{save_id} is reported as committed on disk {disk!r} and never was there")

    # --- what holds -------------------------------------------------------------------------------

    def is_live(self, save: Save, line: Line | None = None) -> bool:
        line = line or self.current
        return line is not None and save.step <= line.branch.last_step_of(save.line.branch)

    def whole(self) -> set[str]:
        """Saves that a start may restore."""
        local = set.intersection(*(set(self.visible[host].values()) for host in self.hosts))
        return set(self.visible[""].values()) | local

    def newest_live(self, among: Iterable[str]) -> Save | None:
        live = [self.saves[name] for name in among if self.is_live(self.saves[name])]
        return max(live, key=lambda save: save.step, default=None)

    def _check_may_go(self, disk: str, step: int, save_id: str) -> None:
        save = self.saves[save_id]
        others = (self.visible[host].get(step) for host in self.hosts if host != disk)
        if disk and (save_id not in self.complete or any(other != save_id for other in others)):
            return  # worth nothing without the parts of other hosts
        # It became complete after a later start had restored an older one.  With captures in memory, which
        # are not among these histories, that start would have gone on from it.
        if disk and any(s == step and line.order > save.line.order for s, line in self.begun):
            return
        line = self.lines[disk]
        live = self._live_on(disk)
        if self.is_live(save, line):
            newer = [other for other in live if other > step]
            if len(newer) >= (self.keep if not disk else 1):
                return
            raise Violation(
                f"{save_id} was deleted from disk {disk!r}, and only {newer} are newer of branch"
                f" {line.branch.number}"
            )
        if any(s == step and self.is_live(save, line) is False for s, line in self.begun):
            return  # its step is saved by the branch that left it
        left, current = save.line.branch, line.branch
        origin = _common(left, current)
        common = min(step, left.last_step_of(origin), current.last_step_of(origin))
        keep = self.keep if not disk else 1  # hosts hear of one that is complete, and have no room for more
        if len(live) >= keep and live[-keep] > common:
            return
        raise Violation(
            f"{save_id}, which was left, was deleted from disk {disk!r}, and the live branch has only {live}"
        )

    def _live_on(self, disk: str) -> list[int]:
        there = (self.saves[name] for name in self.visible[disk].values())
        return sorted(
            save.step
            for save in there
            if self.is_live(save, self.lines[disk]) and (not disk or save.save_id in self.complete)
        )


def _common(one: Branch, other: Branch) -> Branch:
    """The newest branch from which both came."""
    ancestors = set()
    branch: Branch | None = other
    while branch is not None:
        ancestors.add(branch)
        branch = branch.parent
    while one not in ancestors:
        assert one.parent is not None
        one = one.parent
    return one
