# SPDX-License-Identifier: Apache-2.0
"""Hand local checkpoints over to the replicator of GKE's multi-tier checkpointing, and take them back.

The replicator runs beside the job on each host, replicates to other hosts and backs up to a bucket.
The two talk through files in the volume that they share, here called the directory:

    replicator.yaml           job -> replicator: who we are.  It removes everything but its own files from
                              the directory, then this file: from then on it serves this start of the job
    replicator.prerestore     replicator -> job: the step that it will restore, before it has fetched it
    <job>-s<step>-n<node>-w0.restore
                              replicator -> job: what it restored, a link; an empty file of step 0: nothing
    step=N                    ours: that link, renamed, and checkpoints being written
    N                         job -> replicator: a complete checkpoint, renamed; from then on it is its own
    replicator.errors         replicator -> job: what went wrong and does not end it
    replicator.failed         replicator -> job: it ended

Each host must hand over the same steps: the replicators wait for each other at each, without a deadline.
So a step is handed over when it is complete on all hosts, and none that is may be left out on one of them:
what may pass is told apart from what may not, and whoever calls `Replicator.hand_over` asks again.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from resiliency.checkpoint.commit.retention import BEING_TAKEN
from resiliency.checkpoint.format.catalog import Condition, inspect
from resiliency.checkpoint.format.lease import leased_steps
from resiliency.checkpoint.format.manifest import read_manifest
from resiliency.checkpoint.format.marker import (
    MarkerState,
    lift_marker,
    parse_step,
    put_marker,
    step_directory,
    try_read_marker,
)
from resiliency.checkpoint.gke import hand_off
from resiliency.checkpoint.gke.replicated_job import ReplicatedJob
from resiliency.checkpoint.ranks import RankGroup
from resiliency.checkpoint.storage.interface import Storage
from resiliency.checkpoint.storage.posix import FULL, LocalStorage
from resiliency.errors import (
    CheckpointError,
    CheckpointIncomplete,
    CheckpointWriteFailed,
    ConfigError,
    PeerError,
    ResiliencyError,
)
from resiliency.files import matching, write_durably
from resiliency.runtime import Clock, SystemClock

logger = logging.getLogger(__name__)

CONFIG = "replicator.yaml"
PRERESTORE = "replicator.prerestore"
ERRORS = "replicator.errors"
FAILED = "replicator.failed"
RESTORE_SUFFIX = ".restore"
#: Steps that may lie there untaken: more would fill the volume while a replicator waits for another host's.
MOST_UNTAKEN = 2
#: A replicator that serves an earlier start of the job ends, and its container is started anew: that takes
#: minutes where containers are restarted with a growing delay.
TIMEOUT = timedelta(minutes=10)
_POLL_S = 0.05


class ReplicatorError(PeerError):
    """The replicator of this host did not do its part."""


class ReplicatorFailed(ReplicatorError):
    """It said that it failed."""


class ReplicatorSilent(ReplicatorError):
    """It did not answer in time."""


class NotHandedOver(ReplicatorError):
    """The system did not let us hand a step over; it may do so the next time."""


class ReplicatorBusy(NotHandedOver):
    """It has not taken what it was given before; `untaken` of the fields: which steps, oldest first."""


class StepGivenUp(ReplicatorError):
    """The local tier gave the step up: it waited for too long behind others."""


class Replicator:
    """This host's end of the hand-over; one process per host uses it, the first rank.

    Args:
        cancel: ends every wait early, as a timeout does.
        storage: that directory, for tests.
        tell_every: how often to log what is awaited.
    """

    def __init__(
        self,
        job: ReplicatedJob,
        *,
        cancel: threading.Event | None = None,
        clock: Clock | None = None,
        storage: Storage | None = None,
        tell_every: timedelta = timedelta(seconds=30),
    ) -> None:
        self.job = job
        self._tell_every_s = tell_every.total_seconds()
        self._root = job.directory
        self._storage = storage or LocalStorage(job.directory)
        self._cancel = cancel or threading.Event()
        self._clock = clock or SystemClock()
        self._errors = ""
        self._failure: str | None = None
        #: Steps that were hidden for a hand-over, and not shown again yet.
        self._hidden: set[int] = set()

    def start(self, timeout: timedelta = TIMEOUT) -> None:
        """Announce this start of the job, and wait until the replicator serves it.

        Call it once per start, on all hosts, before anything is saved: what lies in the directory and was
        not handed over is deleted by the replicator, as it may belong to another job.

        Raises:
            ConfigError: there is no such directory, or it cannot be written.
            ReplicatorFailed: it failed meanwhile.
            ReplicatorSilent: it did not take the file; which was taken back.
        """
        if not self._root.is_dir():
            raise ConfigError(
                f"there is no directory {self._root}.",
                hint="It is the volume of the driver multitier-checkpoint.csi.storage.gke.io; mount it.",
                path=str(self._root),
            )
        config = self._root / CONFIG
        try:
            self._forget_earlier_start()
            self._failure = None
            self._hidden.clear()  # the replicator deletes all that was not handed over
            # Whole or not at all: the replicator ends when it finds the file empty.
            write_durably(config, self.job.to_yaml().encode())
        except OSError as error:
            with suppress(OSError):  # it may be there, though not durably
                config.unlink(missing_ok=True)
            raise ConfigError(
                f"{self._root} cannot be written: {error.strerror or error}.", path=str(self._root)
            ) from error
        if not self._wait(lambda: not config.exists(), f"to take {config}", timeout):
            # Else a replicator that comes later would clean the directory under a job that goes without.
            config.unlink(missing_ok=True)
            raise self._silent(f"did not take {config}", timeout)
        logger.info("the replicator serves node %d of job %s", self.job.node_rank, self.job.job_name)

    def restore(self, timeout: timedelta = TIMEOUT) -> int | None:
        """Wait until the replicator has brought back this host's newest checkpoint, and call it ``step=N``.

        Returns:
            Its step; None if there is none, or if what came back is not a whole checkpoint: that is logged,
            and left to be looked at.
        Raises:
            ReplicatorFailed: it could not restore.
            ReplicatorSilent: it did not say in time what it has.
        """
        link: list[Path] = []

        def arrived() -> bool:
            link[:] = matching(self._root, self._link_name("*"))
            return bool(link)

        if not self._wait(arrived, f"to restore, or to say that it has nothing, in {self._root}", timeout):
            announced = self._announced()
            what = (
                "said nothing about a restore" if announced is None else f"did not restore step {announced}"
            )
            raise self._silent(what, timeout)
        step = self._step_of(link[0])
        if step == 0:
            link[0].unlink()
            logger.info("the replicator has nothing to restore")
            return None
        problem = self._problem_of(link[0], step)
        if problem:
            logger.error("what the replicator restored is not used: %s", problem)
            return None
        os.replace(link[0], self._root / step_directory(step))
        self._storage.sync_dir("")
        logger.info("the replicator restored step %d", step)
        return step

    def hand_over(self, step: int, *, despite_readers: bool = False) -> bool:
        """Give the complete checkpoint of `step` to the replicator; ``step=N`` is gone then.

        Call it on all hosts, once the step is complete on all of them, for each such step and in order.

        Args:
            despite_readers: do not spare who reads it: it finds the checkpoint gone, as when it moves on.
        Returns:
            True: it is the replicator's, by this call or because it brought it back itself.  False: somebody
            reads it just now; ask again.
        Raises:
            NotHandedOver: it is where it was, and as it was: ask again.
            ReplicatorBusy: of these; too many steps lie there that the replicator has not taken.
            StepGivenUp: the local tier has deleted it, or is about to; the next step may be handed over.
            ReplicatorFailed: there is nobody to give it to; nor will there be until the next `start`.
            CheckpointIncomplete: it is not a whole checkpoint.
        """
        try:
            return self._hand_over(step, despite_readers)
        except (CheckpointError, OSError) as error:
            number = error.errno if isinstance(error, OSError) else error.fields.get("errno")
            if number is None:
                raise
            raise NotHandedOver(
                f"step {step} could not be handed over for now: {error}",
                step=step,
                path=str(self._root),
                errno=number,
            ) from error

    def give_up(self, step: int) -> None:
        """Leave a step to the local tier, which may delete it from now on.

        Raises:
            CheckpointError, OSError: ask again, or it stays there.
        """
        with hand_off.locked(self._root):
            self._show_hidden()
            hand_off.give_up(self._storage, step)

    def check(self) -> None:
        """Log what the replicator complains about, once, and raise if it failed.

        ``replicator.errors`` alone is no failure: the replicator writes there, too, that it found nothing to
        restore.

        Raises:
            ReplicatorFailed: with what it said, and again with each call until the next start.
        """
        if errors := self._take(ERRORS):
            self._errors = errors
            logger.warning("the replicator reports: %s", errors)
        failed = self._take(FAILED)
        if failed is not None:
            self._failure = failed or self._errors
        if self._failure is not None:
            raise ReplicatorFailed(
                f"the replicator of node {self.job.node_rank} failed: {self._failure}",
                hint="Its log has more; the job can go on without it from the persistent tier.",
                path=str(self._root / FAILED),
                node_rank=self.job.node_rank,
            )

    # --- handing over ----------------------------------------------------------------------------

    def _hand_over(self, step: int, despite_readers: bool) -> bool:
        self.check()
        with hand_off.locked(self._root):  # the local tier may give it up meanwhile, and delete it
            self._show_hidden()
            is_ours = self._is_ours(step)
            return self._rename(step, despite_readers) if is_ours else True

    def _is_ours(self, step: int) -> bool:
        """Whether the replicator lacks the step, and may have it now."""
        directory = step_directory(step)
        names = self._storage.list("")
        if directory + hand_off.GIVEN_UP in names:
            raise StepGivenUp(
                f"step {step} is not handed over: the local tier gave it up, as too many steps waited.",
                step=step,
                path=str(self._root),
            )
        if (self._root / directory).is_symlink():
            return False
        untaken = sorted(int(name) for name in names if name.isdecimal())
        if len(untaken) >= MOST_UNTAKEN:
            raise ReplicatorBusy(
                f"step {step} waits: the replicator of this host has not taken steps {untaken}.",
                step=step,
                path=str(self._root),
                untaken=untaken,
            )
        return True

    def _rename(self, step: int, despite_readers: bool) -> bool:
        directory = step_directory(step)
        self._check_whole(step)
        self._hidden.add(step)
        try:
            self._hide(step)
            if not despite_readers and step in leased_steps(self._storage, self._clock):
                return False
            self._storage.replace(directory, str(step))
        finally:
            self._try(self._show_hidden, f"the marker of step {step} was not removed")
        # It is the replicator's from here on, whatever else fails.
        self._try(lambda: self._storage.sync_dir(""), f"step {step} may come back after a power cut")
        self._try(lambda: self._forget_links(below=step), "old links were not removed")
        logger.info("step %d was handed over to the replicator", step)
        return True

    def _check_whole(self, step: int) -> None:
        found = inspect(self._storage, step)
        if found.condition is Condition.COMPLETE:
            return
        marker = try_read_marker(self._storage, step)
        is_unread = marker is not None and marker.state is MarkerState.UNKNOWN
        number = errno.EIO if is_unread else found.errno
        error = CheckpointIncomplete(
            f"{found.path} cannot be handed over: {found.condition.value} {found.why}".rstrip() + ".",
            step=step,
            path=found.path,
        )
        if number is not None:
            error.fields["errno"] = number
        raise error

    def _hide(self, step: int) -> None:
        """As for a removal: a reader takes its lease first and looks at the marker second."""
        try:
            put_marker(self._storage, step, BEING_TAKEN)
        except CheckpointWriteFailed as error:
            # The replicator frees what is older when it gets this: where there is no room it must get it.  An
            # empty marker hides as well.
            if error.fields.get("errno") not in FULL:
                raise

    def _show_hidden(self) -> None:
        for step in sorted(self._hidden):
            marker = try_read_marker(self._storage, step)
            # Not that of a removal: the local tier may have shown the step since, and begun to delete it.
            if marker is None or marker == BEING_TAKEN or marker.state is MarkerState.UNKNOWN:
                lift_marker(self._storage, step)
            self._hidden.discard(step)

    def _try(self, tidy_up: Callable[[], None], otherwise: str) -> None:
        try:
            tidy_up()
        except (CheckpointError, OSError) as error:
            logger.warning("%s: %s", otherwise, error)

    # --- files -----------------------------------------------------------------------------------

    def _forget_earlier_start(self) -> None:
        for name in (ERRORS, FAILED):
            if text := self._take(name):
                logger.warning("the replicator reported to an earlier start: %s", text)
        for path in (self._root / PRERESTORE, *matching(self._root, f"*{RESTORE_SUFFIX}")):
            path.unlink(missing_ok=True)

    def _take(self, name: str) -> str | None:
        """Read and remove a report; None when there is none."""
        path = self._root / name
        try:
            text = path.read_text(errors="replace").strip()
            path.unlink(missing_ok=True)
        except FileNotFoundError:
            return None
        return text

    def _announced(self) -> int | None:
        """The step that the replicator will restore, 0 for none; None if it did not say."""
        with suppress(OSError, ValueError):
            text = (self._root / PRERESTORE).read_text()
            found = re.search(r"^restore-step:\s*'?(\d+)'?\s*$", text, re.MULTILINE)
            return int(found[1]) if found else 0
        return None

    def _link_name(self, step: int | str) -> str:
        return f"{self.job.job_name}-s{step}-n{self.job.node_rank}-w0{RESTORE_SUFFIX}"

    def _step_of(self, link: Path) -> int:
        found = re.fullmatch(re.escape(self._link_name("@")).replace("@", r"(\d+)"), link.name)
        if found is None:
            raise ReplicatorError(f"{link} does not name a step.", path=str(link))
        return int(found[1])

    def _problem_of(self, link: Path, step: int) -> str:
        """What is wrong with a restored checkpoint, for people; empty when it looks whole."""
        if not link.is_dir():
            return f"{link} leads to no directory"
        try:
            manifest = read_manifest(self._storage, link.name)
        except CheckpointError as error:
            return str(error)
        if manifest.step != step:
            return f"{link} holds step {manifest.step}"
        marker = try_read_marker(self._storage, step)
        if marker is not None or os.path.lexists(self._root / step_directory(step)):
            return f"{self._root / step_directory(step)} is there already"
        return ""

    def _forget_links(self, below: int) -> None:
        """Links to restored checkpoints that the replicator has dropped, for it has newer ones."""
        for path in matching(self._root, "step=*"):
            step = parse_step(path.name)
            if step is not None and step < below and path.is_symlink() and not path.exists():
                path.unlink(missing_ok=True)

    # --- waiting ---------------------------------------------------------------------------------

    def _wait(self, ready: Callable[[], bool], what: str, timeout: timedelta) -> bool:
        began = tell_at = time.monotonic()
        deadline = began + timeout.total_seconds()
        while not ready():
            self.check()
            now = time.monotonic()
            if now >= tell_at:
                # At first it is nothing strange.
                level, tell_at = (
                    logging.INFO if tell_at == began else logging.WARNING,
                    now + self._tell_every_s,
                )
                logger.log(
                    level,
                    "node %d waits for the replicator %s: %.0f of %g s",
                    *(self.job.node_rank, what, now - began, timeout.total_seconds()),
                )
            left_s = deadline - now
            if left_s <= 0 or self._cancel.wait(min(_POLL_S, left_s)):
                return False
        return True

    def _silent(self, what: str, timeout: timedelta) -> ReplicatorSilent:
        said = f"  It reported: {self._errors}" if self._errors else ""
        return ReplicatorSilent(
            f"the replicator of node {self.job.node_rank} {what} within {timeout.total_seconds():g} s.{said}",
            hint="Is multi-tier checkpointing enabled in the cluster, and is its driver's pod on this host "
            "running?  The replicators of all hosts must be there before any of them restores.",
            path=str(self._root),
            node_rank=self.job.node_rank,
        )


def meet_replicators(
    replicator: Replicator | None, rank_group: RankGroup, *, timeout: timedelta = TIMEOUT
) -> int | None:
    """Start and restore on all hosts; collective over all ranks of the job.

    Args:
        replicator: of this host, on its first rank; None on the others.
    Returns:
        The step that every host got back, the same on all ranks; None if any of them has none, and then
        the job restores from another tier.
    Raises:
        ReplicatorError: of this host.
        PeerError: of another host.
    """
    error: ResiliencyError | None = None
    step: int | None = None
    if replicator is not None:
        try:
            replicator.start(timeout)
            step = replicator.restore(timeout)
        except ResiliencyError as failure:
            error = failure
    rank_group.check(error, "meeting the replicators")
    everyone = rank_group.gather((replicator is not None, step))
    steps = {found for asked, found in everyone if asked}
    if len(steps) > 1:
        logger.error("the replicators restored different steps: %s", sorted(steps, key=str))
    return steps.pop() if len(steps) == 1 else None
