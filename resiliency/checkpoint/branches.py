# SPDX-License-Identifier: Apache-2.0
"""Which saves of a job count: those of its live branch.

A job that restores a step before the newest one begins a *branch*.  Branches have numbers that grow; the
number is in the name of each attempt, and so of each save (`resiliency.checkpoint.names`).  A record says
where each branch began.  The save of a step is *live* if the newest branch made it, or the branch from which
that one began, up to that step, and so on.  Every other save was *left*: no restart takes it by itself.

Of live saves the one with the highest step is the newest.  So as long as no job ever went back, all saves
are live and there is no record.

The record is a file in the directory of the checkpoints of each tier.  A rollback writes it before the first
save of the new branch is committed.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from resiliency.checkpoint.names import branch_number
from resiliency.checkpoint.storage.checksums import DEFAULT_ALGORITHM, digest_function
from resiliency.checkpoint.storage.interface import Storage, read_file, write_file
from resiliency.errors import CheckpointCorrupt, CheckpointMissing, ConfigError
from resiliency.runtime import ROLLBACKS_ENV

RECORD = "branches.json"


@dataclass(frozen=True, order=True, slots=True)
class Branch:
    """A branch that began at `step` of branch `parent`.  The first branch of a job is 0 and has no record."""

    number: int
    parent: int
    step: int


@dataclass(frozen=True)
class Branches:
    """All that is known of the branches of a job; grows only."""

    known: tuple[Branch, ...] = ()

    @property
    def newest(self) -> int:
        """The number of the live branch."""
        return max((branch.number for branch in self.known), default=0)

    def is_live(self, step: int, save_id: str) -> bool:
        """Whether a save counts, see above."""
        return step <= self._ends.get(branch_number(save_id), -1)

    def left_after(self, step: int, save_id: str) -> float:
        """The newest step that a save which was left and the live branch have in common; -1: unknown."""
        number, end = branch_number(save_id), float(step)
        while number not in self._ends:
            branch = self._by_number.get(number)
            if branch is None:
                return -1
            number, end = branch.parent, min(end, branch.step)
        return min(end, self._ends[number])

    def left_steps(self, saves: Mapping[int, str]) -> dict[int, float]:
        """Of saves in a tier those of branches that the job has left.

        Args:
            saves: step to save id of all that are committed there.
        Returns:
            Step to the newest step that it has in common with the live branch.
        """
        known = self.with_seen(saves.values())
        return {
            step: known.left_after(step, save)
            for step, save in saves.items()
            if not known.is_live(step, save)
        }

    def after(self, step: int, save_id: str) -> Branches:
        """With a new branch, which begins at `step` of the branch of `save_id` (empty: from scratch)."""
        branch = Branch(self.newest + 1, branch_number(save_id), step)
        return Branches((*self.known, branch))

    def merged(self, other: Branches) -> Branches:
        """What two records know together."""
        # Of one number by two accounts, as after the loss of a record, any will do that all take alike.
        by_number = {branch.number: branch for branch in sorted((*self.known, *other.known))}
        return Branches(tuple(by_number[number] for number in sorted(by_number)))

    def with_seen(self, save_ids: Iterable[str]) -> Branches:
        """Also with the branches of saves that were found, should the record of one be lost: then all before
        it counts, as no step is known where it began."""
        unknown = {branch_number(save) for save in save_ids} - self._by_number.keys() - {0}
        lost = [Branch(number, self._below(number), _UNKNOWN_STEP) for number in unknown]
        return self.merged(Branches(tuple(lost))) if lost else self

    def as_rows(self) -> list[list[int]]:
        """As JSON has it."""
        return [[branch.number, branch.parent, branch.step] for branch in self.known]

    @classmethod
    def asked_for(cls, environ: Mapping[str, str]) -> Branches:
        """The branches that the launcher has begun, after a loss that was not finite.

        Raises:
            ConfigError: the variable is not what a launcher sets.
        """
        text = environ.get(ROLLBACKS_ENV, "[]")
        try:
            return cls.of_rows(json.loads(text))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{ROLLBACKS_ENV} is no list of branches: {text!r}.") from error

    @classmethod
    def of_rows(cls, rows: Iterable[Iterable[int]]) -> Branches:
        """The inverse of `as_rows`.

        Raises:
            ValueError, TypeError: rows are not that.
        """
        return cls().merged(cls(tuple(_branch(*row) for row in rows)))

    def _below(self, number: int) -> int:
        return max((other for other in self._by_number if other < number), default=0)

    @cached_property
    def _by_number(self) -> Mapping[int, Branch]:
        return {branch.number: branch for branch in self.known}

    @cached_property
    def _ends(self) -> Mapping[int, float]:
        """Of each branch that the live one came from, itself included: its newest step that counts."""
        number, end, ends = self.newest, math.inf, {self.newest: math.inf}
        while (branch := self._by_number.get(number)) is not None:
            # A launcher that goes back may begin a branch before the step at which its parent began.
            number, end = branch.parent, min(branch.step, end)
            ends[number] = end
        return ends


#: Larger than every step.
_UNKNOWN_STEP = 1 << 62


def _branch(number: int, parent: int, step: int) -> Branch:
    if not all(type(value) is int for value in (number, parent, step)) or not 0 <= parent < number:
        raise ValueError(f"a branch has a number above its parent's, and a step: {(number, parent, step)}")
    return Branch(number, parent, step)


def read_branches(storage: Storage) -> Branches:
    """The branches that are recorded in a tier.

    Raises:
        CheckpointCorrupt: the record is not what was written, or cannot be read.
    """
    try:
        content = read_file(storage, RECORD)
    except CheckpointMissing:
        return Branches()
    try:
        record = json.loads(content)
        branches = Branches.of_rows(record["branches"])
        if content != _rendered(branches, record["algorithm"]):
            raise ValueError("its checksum differs")
    except (ValueError, TypeError, KeyError) as error:
        path = storage.describe(RECORD)
        raise CheckpointCorrupt(
            f"{path} is not the record of branches that was written: {error}.",
            hint="Move it away: then the newest branch counts, and all steps before it.",
            path=path,
        ) from error
    return branches


def record_branches(storage: Storage, branches: Branches) -> None:
    """Add to the record; durable when this returns.

    Raises:
        CheckpointError: it could not be read or written, and is as it was.
    """
    if not branches.known or (known := read_branches(storage)) == (merged := known.merged(branches)):
        return
    storage.make_dir("")
    new = f"{RECORD}.{secrets.token_hex(4)}"
    try:
        write_file(storage, new, _rendered(merged))
        storage.replace(new, RECORD)
    except BaseException:
        storage.remove(new)
        raise
    storage.sync_dir("")


def _rendered(branches: Branches, algorithm: str = DEFAULT_ALGORITHM) -> bytes:
    rows = branches.as_rows()
    digest = digest_function(algorithm)(json.dumps(rows).encode())
    return json.dumps({"branches": rows, "algorithm": algorithm, "digest": digest}).encode()
