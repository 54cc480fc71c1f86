# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints a directory holds, which of them are good, and which may go.

Nothing here trusts a name: a checkpoint is complete when no marker stands beside it, its manifest
and the indexes of all its ranks are what was committed, and its files are there in full length.
`inspect` finds that out, by two operations per rank; `verify` reads the bytes as well.  `glance` believes
the manifest, by two operations for any number of ranks: for a restart, whose ranks verify all they read.
Whoever deletes hides first: a checkpoint that is half deleted was never seen as whole.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from resiliency.checkpoint.branches import Branches, read_branches, record_branches
from resiliency.checkpoint.format.claim import (
    OLD_DATA,
    StepClaim,
    StepLook,
    StepTaken,
    holds_claims_alone,
    is_claim,
    look_at,
)
from resiliency.checkpoint.format.dcp import METADATA
from resiliency.checkpoint.format.lease import CLOCK_SKEW, leased_steps
from resiliency.checkpoint.format.manifest import (
    MANIFEST,
    Manifest,
    data_directory,
    index_name,
    parse_manifest,
    read_manifest,
    save_folder,
)
from resiliency.checkpoint.format.marker import (
    MARKER_SUFFIX,
    Marker,
    MarkerState,
    lift_marker,
    parse_step,
    put_marker,
    step_directory,
    try_read_marker,
)
from resiliency.checkpoint.format.nemo import WEIGHTS, check_unproven
from resiliency.checkpoint.format.reader import CheckpointReader
from resiliency.checkpoint.names import attempt_on_branch
from resiliency.checkpoint.storage.chunked_file import Pace, check_size
from resiliency.checkpoint.storage.interface import Storage
from resiliency.checkpoint.storage.posix import FULL, LocalStorage
from resiliency.errors import (
    CheckpointError,
    CheckpointMissing,
    CheckpointWriteFailed,
    ConfigError,
    ResiliencyError,
)
from resiliency.runtime import Clock, SystemClock

logger = logging.getLogger(__name__)


#: End of the name of what stands beside a shard that was found bad; see
# `recovery.inventory.quarantine_location`.
QUARANTINED = ".corrupt"


class Condition(str, Enum):
    COMPLETE = "complete"
    STOCK = "stock"  # written by torch or NeMo alone: complete as far as can be told here
    UNFINISHED = "unfinished"  # a marker stands beside it
    BAD = "bad"  # committed, and damaged since


@dataclass(frozen=True, kw_only=True)
class Found:
    """One checkpoint directory, or a marker without one.

    Args:
        why: for people; empty when the condition says all.
        size_bytes: of its data; 0 when it cannot be told.
        errno: of the operating system, where that is what kept it from being read: it may be whole.
    """

    step: int
    path: str
    condition: Condition
    why: str = ""
    size_bytes: int = 0
    manifest: Manifest | None = None
    errno: int | None = None

    @property
    def is_usable(self) -> bool:
        return self.condition in (Condition.COMPLETE, Condition.STOCK)


def steps_in(storage: Storage) -> list[int]:
    """Steps that have a directory or a marker, lowest first."""
    return list_steps(storage)[0]


def list_steps(storage: Storage) -> tuple[list[int], list[int]]:
    """`steps_in`, and those of them without a marker, by one listing; lowest first."""
    names = storage.list("")
    marked = _steps_of(name.removesuffix(MARKER_SUFFIX) for name in names if name.endswith(MARKER_SUFFIX))
    there = _steps_of(names)
    return sorted(there | marked), sorted(there - marked)


def unmarked_checkpoints(root: Path) -> list[Path]:
    """Directories ``step=N`` below `root` without a marker, newest first; [] when there is no `root`.

    Those of a branch that the job has left are not among them.

    Raises:
        OSError, CheckpointCorrupt: it cannot be listed.
    """
    unmarked = [root / step_directory(step) for step in live_steps(LocalStorage(root))]
    return [path for path in reversed(unmarked) if path.is_dir()]


def live_steps(storage: Storage) -> list[int]:
    """Steps without a marker, lowest first, but for those of a branch that the job has left.

    Raises:
        CheckpointCorrupt: the storage cannot be listed.
    """
    unmarked = list_steps(storage)[1]
    left = left_among(storage, unmarked)
    return [step for step in unmarked if step not in left]


def left_among(storage: Storage, steps: Iterable[int], recorded: Branches | None = None) -> dict[int, float]:
    """`Branches.left_steps` of those that have a manifest which says whose they are; any other counts.

    Args:
        recorded: the branches that are recorded there; None: they are read.
    """
    branches = read_branches(storage) if recorded is None else recorded
    if not branches.known:
        return {}  # as nearly always: two operations less for each step
    return branches.left_steps(_saves_at(storage, steps))


def begin_branch(storage: Storage, step: int) -> None:
    """Record that a job which goes on from `step` has gone back, if later checkpoints of the live branch are
    there, or this one is of another; for jobs whose saves are NeMo's own.

    Raises:
        CheckpointError: the storage does not say what there is, or refuses the record.
    """
    saves = _saves_at(storage, list_steps(storage)[1])
    branches = read_branches(storage).with_seen(saves.values())
    live = [other for other, save in saves.items() if branches.is_live(other, save)]
    is_left = step in saves and step not in live
    if is_left or max(live, default=0) > step:
        on_live = attempt_on_branch("", branches.newest)
        record_branches(storage, branches.after(step, saves.get(step, on_live)))
        logger.warning("training went back to step %d in %s", step, storage.describe())


def _saves_at(storage: Storage, steps: Iterable[int]) -> dict[int, str]:
    """Step to save id, as far as there is a manifest that says it."""
    saves = {}
    for step in steps:
        with contextlib.suppress(CheckpointError, ConfigError):
            saves[step] = read_manifest(storage, step_directory(step)).save_id
    return saves


def marked_steps(storage: Storage) -> list[int]:
    """Steps with a marker, lowest first: one listing, where reading all markers would ask for each step."""
    everything, unmarked = list_steps(storage)
    return sorted(set(everything) - set(unmarked))


def _steps_of(names: Iterable[str]) -> set[int]:
    return {step for name in names if (step := parse_step(name)) is not None}


def glance(storage: Storage, step: int) -> Found:
    """Condition of one step by its marker and its manifest alone: a file that is missing does not show.

    What has no manifest of ours, or a damaged one, is inspected.  `size_bytes` is 0 where an older release
    wrote the manifest.
    """
    directory = step_directory(step)
    path = storage.describe(directory)
    marker = try_read_marker(storage, step)
    if marker is not None:
        return _unfinished(step, path, marker)
    try:
        manifest = read_manifest(storage, directory)
    except (CheckpointError, ConfigError):
        return inspect(storage, step)
    if manifest.step != step:
        return inspect(storage, step)
    return Found(
        step=step,
        path=path,
        condition=Condition.COMPLETE,
        size_bytes=manifest.size_bytes or 0,
        manifest=manifest,
    )


def _unfinished(step: int, path: str, marker: Marker) -> Found:
    why = f"{marker.state.value}: {marker.reason}" if marker.reason else marker.state.value
    return Found(step=step, path=path, condition=Condition.UNFINISHED, why=why)


def inspect(storage: Storage, step: int) -> Found:
    """Condition of one step, without reading its data."""
    directory = step_directory(step)
    path = storage.describe(directory)
    marker = try_read_marker(storage, step)
    if marker is not None:
        return _unfinished(step, path, marker)
    try:
        names = storage.list(directory)
        if holds_claims_alone(storage, step):
            return Found(step=step, path=path, condition=Condition.UNFINISHED, why="its save did not begin")
        if METADATA in names and MANIFEST not in names and not _has_index(names):
            return Found(step=step, path=path, condition=Condition.STOCK, why="no checksums")
        if WEIGHTS in names and MANIFEST not in names:
            check_unproven(storage, directory)
            return Found(step=step, path=path, condition=Condition.STOCK, why="in NeMo's own form")
        reader = CheckpointReader(storage, step)
        files = reader.files()
        for record in files:
            check_size(storage, record)
    except (CheckpointError, ConfigError) as error:
        number = error.fields.get("errno")
        return Found(
            step=step,
            path=path,
            condition=Condition.BAD,
            why=str(error),
            errno=number if isinstance(number, int) else None,
        )
    size = sum(record.size_bytes for record in files)
    return Found(
        step=step, path=path, condition=Condition.COMPLETE, size_bytes=size, manifest=reader.manifest
    )


def _has_index(names: Iterable[str]) -> bool:
    return any(name.startswith("rank=") or is_claim(name) for name in names)


def list_checkpoints(storage: Storage) -> list[Found]:
    """All steps with their condition, lowest first."""
    return [inspect(storage, step) for step in steps_in(storage)]


def find_newest(storage: Storage, *, accept: Callable[[Found], bool] = lambda found: True) -> Found:
    """The usable checkpoint with the highest step of the live branch, among those that `accept` takes.

    Raises:
        CheckpointMissing: there is none; the message says what was there instead.
    """
    skipped = []
    steps = steps_in(storage)
    left = left_among(storage, steps)
    for step in reversed(steps):
        found = inspect(storage, step)
        if step in left:
            skipped.append(f"step {step} (the job went back behind it)")
            continue
        if found.is_usable and accept(found):
            return found
        skipped.append(f"step {step} ({found.condition.value}{': ' + found.why if found.why else ''})")
        logger.info("skipping %s: %s %s", found.path, found.condition.value, found.why)
    there = "; ".join(skipped) or "it is empty or does not exist"
    raise CheckpointMissing(
        f"{storage.describe()} holds no usable checkpoint: {there}.", path=storage.describe()
    )


def verify(storage: Storage, step: int, *, pace: Pace | None = None) -> int:
    """Read all bytes of a committed checkpoint and compare them; returns how many.

    Raises:
        CheckpointIncomplete: a file is missing, or it was never committed.
        CheckpointCorrupt: bytes differ; names file, offset and both digests.
    """
    return CheckpointReader(storage, step, pace=pace).verify()


def is_damaged(storage: Storage, step: int) -> bool:
    """Whether a restore found a shard of it bad and set that aside."""
    return any(name.endswith(QUARANTINED) for name in storage.list(step_directory(step)))


def list_damaged(storage: Storage) -> list[str]:
    """What once was a checkpoint and cannot be used any more, a line each: damaged now, or found so before.

    Saves that never ended are not among them.

    Raises:
        CheckpointCorrupt: the storage cannot be listed.
    """
    lines = []
    for step in steps_in(storage):
        found, marker = inspect(storage, step), try_read_marker(storage, step)
        is_hidden = marker is not None and marker.state is MarkerState.CORRUPT
        if is_hidden or found.condition is Condition.BAD:
            lines.append(f"{found.path}: {found.why}")
        elif marker is None and is_damaged(storage, step):
            lines.append(f"{found.path}: a shard of it was found bad")
    return lines


def quarantine(storage: Storage, step: int, reason: str) -> None:
    """Hide a checkpoint that was found bad, for all readers and for good; not that of a later save."""
    try:
        save_id = read_manifest(storage, step_directory(step)).save_id
    except (CheckpointError, ConfigError):
        save_id = ""
    put_marker(storage, step, Marker(state=MarkerState.CORRUPT, save_id=save_id, reason=reason))
    logger.warning("%s is hidden from now on: %s", storage.describe(step_directory(step)), reason)


def prune(
    storage: Storage,
    *,
    keep_last: int,
    keep: Collection[int] = (),
    known: dict[int, str] | None = None,
    clock: Clock | None = None,
) -> list[int]:
    """Delete complete checkpoints that are `needless_steps`; returns the steps that went.

    Spared are those in `keep`, those somebody holds a lease on, and checkpoints that were written by others,
    were found damaged, or lack their manifest or an index: those are for people to look at.  Removals that
    failed before are tried again.

    Args:
        known: step to save id of committed checkpoints that earlier calls found here; this one adds to it.
            What is known is not looked at again until it is to go.  Take a step out when it is saved again.
    Raises:
        ConfigError: `keep_last` is below 1: the last good checkpoint is never deleted.
        CheckpointError: a removal failed; the others were tried all the same.
    """
    if keep_last < 1:
        raise ConfigError(f"keep_last must be at least 1, found {keep_last}.", keep_last=keep_last)
    known = {} if known is None else known
    recorded = read_branches(storage)
    there = list_steps(storage)[1]
    # Where a job went back, another process may have saved a step again.
    for step in known.keys() - (set() if recorded.known else set(there)):
        del known[step]
    fresh = _committed_saves(storage, set(there) - known.keys())
    known |= fresh
    old = set(needless_steps(sorted(known), recorded.left_steps(known), keep_last))
    fresh |= _committed_saves(storage, old - fresh.keys())
    needless = half_removed(storage) | {step: save for step, save in fresh.items() if step in old}
    allowed = {step: what for step, what in needless.items() if step not in keep}
    return remove_checkpoints(storage, allowed, recorded=recorded, clock=clock)


def _committed_saves(storage: Storage, steps: Iterable[int]) -> dict[int, str]:
    """Of those of `steps` that `try_read_committed` finds."""
    found = {step: try_read_committed(storage, step) for step in sorted(steps)}
    return {step: manifest.save_id for step, manifest in found.items() if manifest is not None}


def needless_steps(committed: Sequence[int], left: Mapping[int, float], keep_last: int) -> list[int]:
    """Which checkpoints may go, lowest first.

    Of the live branch the newest `keep_last` stay.  Those of a branch that was left go when the live one has
    that many behind the step at which it was left.

    Args:
        committed: steps, lowest first.
        left: see `Branches.left_steps`.
    """
    live = [step for step in committed if step not in left]
    old, newest = live[:-keep_last], live[-keep_last:]
    oldest = newest[0] if len(newest) == keep_last else -math.inf
    return [step for step in committed if step in old or left.get(step, math.inf) < oldest]


def try_read_committed(storage: Storage, step: int) -> Manifest | None:
    """The manifest of an unmarked checkpoint in the engine's form, if nothing of it is missed at a glance.

    A few operations, however many ranks there are: `inspect` reads the indexes of all.
    """
    directory = step_directory(step)
    try:
        manifest = read_manifest(storage, directory)
        names = storage.list(directory)
        place = data_directory(directory, manifest.folder)
        indexes = storage.list(place) if manifest.folder else names
    except (CheckpointError, ConfigError):
        return None
    expected = {index_name(place, rank) for rank in manifest.ranks}
    is_whole = manifest.step == step and expected <= {f"{place}/{name}" for name in indexes}
    if not is_whole or WEIGHTS in names or any(name.endswith(QUARANTINED) for name in names):
        return None
    return manifest


def half_removed(storage: Storage) -> dict[int, str | Marker]:
    """Steps whose removal has begun and failed, with their markers."""
    found = _marked(storage, MarkerState.REMOVING)
    return {step: marker for step, marker in found if not marker.reason}


def remove_checkpoints(
    storage: Storage,
    steps: Mapping[int, str | Marker],
    *,
    recorded: Branches | None = None,
    clock: Clock | None = None,
) -> list[int]:
    """`remove_checkpoint` for each, lowest first; returns the steps that went.

    Args:
        steps: to what is expected there.
        recorded: see `remove_checkpoint`.
    Raises:
        CheckpointError: one could not be removed; the others were tried all the same.
    """
    gone, failures = [], []
    for step in sorted(steps):
        try:
            if remove_checkpoint(storage, step, expected=steps[step], recorded=recorded, clock=clock):
                gone.append(step)
        except CheckpointError as error:
            failures.append(error)
    if failures:
        raise failures[0]
    return gone


def try_prune(storage: Storage, keep_last: int, *, spare: int, known: dict[int, str] | None = None) -> None:
    """`prune` after a save: a failure is logged, for the save stands and the next one tries again.

    Args:
        spare: the step just saved, which need not be among the newest: a job may go on from an older step.
        known: see `prune`.
    """
    if known is not None:
        known.pop(spare, None)
    try:
        gone = prune(storage, keep_last=keep_last, keep=(spare,), known=known)
    except ResiliencyError as error:
        logger.warning("old checkpoints were not deleted: %s", error)
    else:
        if gone:
            logger.info("deleted old checkpoints: %s", gone)


def remove_checkpoint(
    storage: Storage,
    step: int,
    *,
    expected: str | Marker | None = None,
    recorded: Branches | None = None,
    clock: Clock | None = None,
) -> bool:
    """Delete one checkpoint, unless a reader has a lease or a save commits it meanwhile; True if it went.

    A reader takes its lease first and looks at the marker second; this puts the marker first and
    looks for leases second.  So at least one of the two sees the other.  What was committed between the look
    and the marker is shown again.  A job that goes back to a checkpoint has a lease on it until its branch is
    recorded, so the record is looked at under the marker as well.

    Args:
        expected: the save that is committed there, or the marker that hides it: what was saved since the
            caller looked stays.
        recorded: only as long as these are the recorded branches; None: whatever they are.
    """
    clock = clock or SystemClock()
    seen = look_at(storage, step)
    is_other = expected is not None and expected != (seen.marker or _save_in(seen))
    if is_other or step in leased_steps(storage, clock):
        return False
    claim = StepClaim.for_removal(storage, step)
    claim.take()
    try:
        return _remove_claimed(storage, claim, seen, recorded, clock)
    except CheckpointWriteFailed:
        if storage.exists(claim.place):
            raise
        return False  # a save, or another removal, has claimed the step


def _remove_claimed(
    storage: Storage, claim: StepClaim, seen: StepLook, recorded: Branches | None, clock: Clock
) -> bool:
    step, folders = claim.step, claim.others()
    if look_at(storage, step) != seen:
        claim.drop()
        return False
    marker = Marker(state=MarkerState.REMOVING, save_id=_save_in(seen) or claim.folder)
    try:
        claim.mark(marker)
    except CheckpointError:
        with contextlib.suppress(CheckpointError):
            if seen.marker is None:  # it is whole
                claim.take_back(marker)
            claim.drop()
        raise
    committed = claim.committed(folders)
    now = look_at(storage, step)
    is_new = now.commit != seen.commit
    if now.marker != marker and not is_new:
        claim.drop()
        return False  # a save has begun
    if is_new or step in leased_steps(storage, clock) or recorded not in (None, read_branches(storage)):
        if is_new or seen.marker is None:
            claim.take_back(marker)
        else:
            claim.mark(seen.marker)
        claim.drop()
        return False
    try:
        claim.clear(only=folders, committed=committed)
    except StepTaken:
        claim.drop()
        return False
    claim.drop()
    storage.sync_dir("")
    # Its folder is gone, so by name.  A save that was opened just now finds its marker gone, and fails.
    if try_read_marker(storage, step) == marker:
        lift_marker(storage, step)
    return True


def _save_in(seen: StepLook) -> str:
    """The save whose manifest was seen; empty: there was none, or it cannot be read."""
    if seen.manifest is None:
        return ""
    try:
        return parse_manifest(seen.manifest, "").save_id
    except (CheckpointError, ConfigError):
        return ""


def free_failed(storage: Storage) -> None:
    """Delete the files of saves that were given up: on a full disk they would be in the way of all others.

    Their markers stay, from which agents of other hosts may still have to learn it.
    """
    for step, marker in _marked(storage, MarkerState.FAILED):
        free_hidden(storage, step, save_folder(marker.save_id, marker.try_number))


def free_hidden(storage: Storage, step: int, folder: str) -> None:
    """Delete the data of a step that a marker hides.  Writes nothing: it may be for a full disk.

    Args:
        folder: of the save that the marker names, for another one may be committed at this step meanwhile; or
            how it begins.
    """
    directory = step_directory(step)
    for name in storage.list(directory):
        if name.startswith((folder, *OLD_DATA)):
            storage.remove_tree(f"{directory}/{name}")


def forget_failed(storage: Storage, *, below: int) -> None:
    """Forget saves before step `below` that were given up; for when every agent knows, as one that came
    after them was committed by all."""
    for step, marker in _marked(storage, MarkerState.FAILED):
        if step < below:
            remove_checkpoint(storage, step, expected=marker)


def _marked(storage: Storage, state: MarkerState) -> list[tuple[int, Marker]]:
    found = ((step, try_read_marker(storage, step)) for step in marked_steps(storage))
    return [(step, marker) for step, marker in found if marker is not None and marker.state is state]


def clean_unfinished(
    storage: Storage, *, run_id: str, keep: Collection[int] = (), clock: Clock | None = None
) -> list[int]:
    """Delete what unfinished saves and removals of a run left; returns the steps that went.

    For one process of that run, when none of its saves is in flight.  A save of another run may be: it is
    left alone until it has ended in any case (`Marker.until`).  So is what no marker names the run of, and
    what was quarantined, for people to look at.

    Args:
        keep: steps to leave.
    """
    clock = clock or SystemClock()
    gone = []
    for step in marked_steps(storage):
        marker = try_read_marker(storage, step)
        if marker is None:  # a save that was late has put it there, and it hides nothing
            lift_marker(storage, step)
        elif step in keep or not _is_left(marker, run_id, clock):
            continue
        else:
            try:
                is_gone = remove_checkpoint(storage, step, expected=marker, clock=clock)
            except CheckpointWriteFailed as error:
                if error.fields.get("errno") not in FULL:
                    raise
                free_hidden(storage, step, save_folder(marker.save_id, marker.try_number))
                is_gone = remove_checkpoint(storage, step, expected=marker, clock=clock)
            if is_gone:
                gone.append(step)
    return gone


def _is_left(marker: Marker, run_id: str, clock: Clock) -> bool:
    """Whether no living save or removal of another run is behind a marker, as far as can be told."""
    if marker.state is MarkerState.CORRUPT:
        return False
    if marker.state is MarkerState.REMOVING or marker.run_id == run_id:
        return True
    ended = marker.until + CLOCK_SKEW.total_seconds() < clock.now().timestamp()
    return bool(marker.run_id) and ended
