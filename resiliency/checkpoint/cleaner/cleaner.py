# SPDX-License-Identifier: Apache-2.0
"""Keep the directories of a job's checkpoints clean, as a process beside it, one per host.

It removes folders of other jobs, checkpoints that were left unfinished, and old complete ones; and
nothing that is in use.  It may be killed at any moment, and started again or several times: each
removal either happens or does not, and none needs another one.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

from resiliency.checkpoint.cleaner.flags import CleaningPlan, parse
from resiliency.checkpoint.cleaner.in_use import (
    CHECKPOINTS,
    IdleLimits,
    is_job,
    roots_of,
    say_in_use,
    whole_steps,
    why_in_use,
)
from resiliency.checkpoint.cleaner.removal import (
    Leftover,
    RemovalOutcome,
    can_remove,
    leftovers,
    old_steps,
    remove_job,
    remove_leftover,
    sweep,
)
from resiliency.checkpoint.format.catalog import left_among, remove_checkpoint, try_read_committed
from resiliency.checkpoint.format.lease import leased_steps
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.errors import ConfigError, ResiliencyError
from resiliency.log import configure
from resiliency.runtime import Clock, RunInfo, SystemClock
from resiliency.signal_pipe import SignalPipe

logger = logging.getLogger("resiliency.ckpt_cleaner")

OK, TROUBLE, USAGE, INTERRUPTED = 0, 1, 2, 130
#: A sign of life outlasts so many passes, so that one slow pass does not end it.
_SIGN_LASTS = 5
_SIGN_LASTS_AT_LEAST = timedelta(minutes=5)


@dataclass
class Cleaner:
    """Makes passes; what fails in one is said and tried again in the next."""

    plan: CleaningPlan
    clock: Clock = field(default_factory=SystemClock)
    troubles: int = 0
    _said: dict[str, str] = field(default_factory=dict)
    _leftovers: list[Leftover] = field(default_factory=list)
    #: Where to look for them; each place is read once, for later ones are the job's own business.
    _unread: list[Path] = field(init=False)

    def __post_init__(self) -> None:
        # Not in replicas: what is half received there is resumed by the agents.
        self._unread = [prefix / self.plan.job / CHECKPOINTS for prefix, _ in self._tiers()]

    def _tiers(self) -> list[tuple[Path, IdleLimits]]:
        tiers = [(self.plan.local, self.plan.local_idle), (self.plan.persistent, self.plan.persistent_idle)]
        return [
            (prefix, IdleLimits(unfinished=self.plan.unfinished_age, idle=idle))
            for prefix, idle in tiers
            if prefix is not None
        ]

    def run_pass(self) -> bool:
        """Look at everything once; False if something could not be done."""
        self.troubles = 0
        for root in list(self._unread):
            self._try(f"reading {root}", partial(self._find_leftovers, root))
        for prefix, timeouts in self._tiers():
            self._try(f"cleaning {prefix}", partial(self._clean_prefix, prefix, timeouts))
        for leftover in list(self._leftovers):
            self._try(f"removing {leftover.path}", partial(self._clean_leftover, leftover))
        for root in self._roots_to_prune():
            self._try(f"pruning {root}", partial(self._prune, root))
        return not self.troubles

    def _clean_prefix(self, prefix: Path, timeouts: IdleLimits) -> None:
        if not prefix.is_dir():
            self._say(prefix, "does not exist yet")
            return
        self._say(prefix, "is kept clean")
        own = prefix / self.plan.job
        if not self.plan.dry_run:
            sweep(prefix, self.clock)
            if own.is_dir():
                lasts = max(_SIGN_LASTS * self.plan.interval, _SIGN_LASTS_AT_LEAST)
                self._try(f"leaving a sign in {own}", partial(say_in_use, own, self.clock, lasts))
                for root in roots_of(own):
                    sweep(root, self.clock)
        for folder in sorted(prefix.iterdir()):
            if folder != own:
                self._try(f"removing {folder}", partial(self._clean_job, folder, timeouts))

    def _clean_job(self, folder: Path, timeouts: IdleLimits) -> None:
        if not is_job(folder):
            return
        if self.plan.dry_run:
            why = why_in_use(folder, folder.name, timeouts, self.clock)
            self._say(folder, f"left alone: {why}" if why else "would be removed: another job's folder")
            return
        why = remove_job(folder, timeouts, self.clock)
        self._say(folder, f"left alone: {why}" if why else "removed: another job's folder")

    def _find_leftovers(self, root: Path) -> None:
        self._leftovers += leftovers(root, quarantined=self.plan.quarantined)
        self._unread.remove(root)

    def _clean_leftover(self, leftover: Leftover) -> None:
        timeouts = IdleLimits(unfinished=self.plan.unfinished_age, idle=timedelta(0))
        if self.plan.dry_run:
            gone = can_remove(leftover, timeouts, self.clock)
            self._say(leftover.path, "would be removed: unfinished" if gone else "left alone: may be in use")
            return
        outcome = remove_leftover(leftover, timeouts, self.clock)
        if outcome is RemovalOutcome.WAITS:
            self._say(leftover.path, "left alone: it may be being written, or is being read")
            return
        if outcome is RemovalOutcome.REMOVED:
            self._say(leftover.path, "removed: unfinished")
        self._leftovers.remove(leftover)

    def _roots_to_prune(self) -> list[Path]:
        roots = []
        if self.plan.persistent is not None:
            roots.append(self.plan.persistent / self.plan.job / CHECKPOINTS)
        if self.plan.local is not None and self.plan.prune_local:
            roots += roots_of(self.plan.local / self.plan.job)
        return roots

    def _prune(self, root: Path) -> None:
        storage = LocalStorage(root)
        whole = whole_steps(root)
        left = left_among(storage, whole)
        for step in old_steps(whole, left, self.plan.keep, leased_steps(storage, self.clock)):
            path = root / f"step={step}"
            manifest = try_read_committed(storage, step)
            save = manifest.save_id if manifest else None
            if self.plan.dry_run:
                self._say(path, f"would be removed: the newest {self.plan.keep} complete ones stay")
            elif whole_steps(root)[-self.plan.keep :] != whole[-self.plan.keep :] or left != left_among(
                storage, whole
            ):
                return  # one of those that make this one old was found bad, or is newer: look again
            elif remove_checkpoint(storage, step, expected=save, clock=self.clock):
                logger.info("%s removed: the newest %d complete ones stay", path, self.plan.keep)

    def _try(self, doing: str, action: Callable[[], object]) -> None:
        """The file system may fail at every step: that is said, and the rest goes on."""
        try:
            action()
        except (OSError, ResiliencyError) as error:
            self.troubles += 1
            self._say(doing, f"failed, will be tried again: {error}", level=logging.WARNING)
        else:
            self._said.pop(doing, None)

    def _say(self, about: object, what: str, *, level: int = logging.INFO) -> None:
        """Log what is new: a state that lasts is not repeated at every pass."""
        if self._said.get(str(about)) != what:
            self._said[str(about)] = what
            logger.log(level, "%s %s", about, what)


def end_at_signals() -> None:
    """From now on SIGTERM and Ctrl-C end this process at once, whatever it is doing.

    A thread sees to it: the main one may sit in a call to storage that hangs, where no handler in
    Python would run; and without any, the first process of a container is deaf to SIGTERM.
    """
    pipe = SignalPipe([signal.SIGTERM, signal.SIGINT])

    def wait() -> None:
        select.select([pipe], [], [])
        os._exit(INTERRUPTED if signal.SIGINT in pipe.read() else OK)

    threading.Thread(target=wait, name="ckpt-cleaner-signals", daemon=True).start()


def main(argv: Sequence[str] | None = None) -> int:
    """Clean until told to end; returns the exit code."""
    try:
        plan, info = parse(argv), RunInfo.from_env()
        configure(info)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return USAGE
    end_at_signals()
    if plan.persistent is not None and info.node_rank:
        logger.info("%s is left to the cleaner of the first host", plan.persistent)
        plan = replace(plan, persistent=None)
    cleaner, pause = Cleaner(plan), threading.Event()
    while True:
        good = cleaner.run_pass()
        if plan.once:
            return OK if good else TROUBLE
        pause.wait(plan.interval.total_seconds())
