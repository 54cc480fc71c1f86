# SPDX-License-Identifier: Apache-2.0
"""What a `Checkpointer` can be told, beside where and how often."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import timedelta
from numbers import Integral
from pathlib import Path

from resiliency.checkpoint.agent.client import LinkOptions
from resiliency.checkpoint.agent.protocol import Settings, check_settings
from resiliency.checkpoint.capture.capturer import CaptureOptions
from resiliency.checkpoint.capture.job_memory import DEFAULT_ROOT
from resiliency.checkpoint.names import TierName
from resiliency.checkpoint.trainer.tier_policy import Interval
from resiliency.errors import ConfigError
from resiliency.files import posix_path
from resiliency.runtime import Clock, SystemClock


@dataclass(frozen=True, kw_only=True)
class LocalTier:
    """Checkpoints on the hosts themselves, and copies of them on other hosts.

    Attributes:
        directory: on this host's own disk or memory file system; the same name on all hosts, as a rule.
        every_steps: interval of `Checkpointer.step`; 0: only `save` saves.
        every: the same in seconds, or by the rate of failures, see `Interval`; instead of `every_steps`.
        keep: newest complete generations that stay; complete are those that every host has committed and
            has its copies of.  There must be room for one more, times the copies that a host keeps.
        replicas: other hosts that get a copy of what a host saved: so many hosts may be lost at once.
            Where there are fewer other hosts, each gets one.
        bytes_per_s: bandwidth of a host for these copies; 0 means no limit.
        backlog: complete generations beyond `keep` that may wait to be handed over to somebody who takes them
            away (`resiliency.plugins.hand_off`); when more wait, the oldest is given up.  0: nobody takes
            any.
    """

    directory: str | Path
    every_steps: int = 0
    every: Interval | None = None
    keep: int = 2
    replicas: int = 1
    bytes_per_s: int = 0
    backlog: int = 0

    def __post_init__(self) -> None:
        posix_path(self.directory, of="the local tier's checkpoints")
        interval_of(self.every_steps, self.every)


@dataclass(frozen=True, kw_only=True)
class CheckpointerOptions:
    """What most jobs leave as it is.

    Attributes:
        overlap: copy what optimizers own while the next forward and backward run, and hold training only
            where one is about to write.  Needs the optimizers: those in the state are found, others are
            passed to `Checkpointer`.  Without any, or with False, a save returns when the copy is done.
        slots: captures that fit into memory; 0: 2, or 3 with two tiers, so that one may write as slowly as
            it likes and leaves room for the other.  1 halves the memory, and gives up this: a save that is
            due while the one before is still being written is skipped (or waits, with `wait=`), and a crash
            in the middle of a copy leaves only what is on disks and peers.
        capture: see `CaptureOptions`.
        bytes_per_s: bandwidth cap of what this host writes to the persistent tier; 0 means none.
        save_timeout: longest wait of a save for the agents of other hosts, and for one call of the storage:
            one that takes longer is taken for hung.
        close_timeout: longest wait for saves under way at the end.
        link: deadlines between trainer and agent.
        arena_root: where the captures live; must be memory.
        allow: classes that a checkpoint may name when it is restored, see
            `resiliency.checkpoint.state.values`.
        format: who reads the checkpoints without this library: "dcp" (stock torch) or "megatron" (stock
            Megatron-core, for states that `resiliency.plugins.megatron_state` prepared).
        clock: by which steps are timed, for intervals that are not in steps and for what saves cost.
    """

    overlap: bool = True
    slots: int = 0
    capture: CaptureOptions = field(default_factory=CaptureOptions)
    bytes_per_s: int = 0
    save_timeout: timedelta = timedelta(minutes=10)
    close_timeout: timedelta = timedelta(minutes=10)
    link: LinkOptions = field(default_factory=LinkOptions)
    arena_root: Path = DEFAULT_ROOT
    allow: tuple[type | str, ...] = ()
    format: str = "dcp"
    clock: Clock = field(default_factory=SystemClock)


def settings_of(
    directory: str | Path | None,
    *,
    keep: int,
    local: LocalTier | None,
    replicated: bool,
    options: CheckpointerOptions,
) -> Settings:
    """What the agent is to be told.

    Raises:
        ConfigError: a number is out of range, there is no tier, or a directory is no path of a file system.
    """
    settings = Settings(
        directory="" if directory is None else str(posix_path(directory).absolute()),
        keep=keep,
        replicated=replicated,
        bytes_per_s=options.bytes_per_s,
        save_timeout_s=options.save_timeout.total_seconds(),
        format=options.format,
    )
    if local is not None:
        settings = replace(
            settings,
            local_directory=str(Path(local.directory).absolute()),
            local_keep=local.keep,
            replicas=local.replicas,
            replication_bytes_per_s=local.bytes_per_s,
            local_backlog=local.backlog,
        )
    check_settings(settings)
    return settings


def interval_of(every_steps: int, every: Interval | None) -> Interval:
    """One interval from the two ways to give it.

    Raises:
        ConfigError: both are given, or one is negative or no number.
    """
    given: object = every_steps
    if not isinstance(given, Integral):
        raise ConfigError(
            f"every_steps must be a whole number, found {every_steps!r}.",
            hint="0, the default, leaves saving to `save`.",
        )
    if every is not None and every_steps:
        raise ConfigError(f"give every_steps or every, not both; found {every_steps} and {every}.")
    if every_steps < 0:
        raise ConfigError(f"every_steps must not be negative, found {every_steps}.")
    return Interval(steps=every_steps) if every is None else every


def intervals_of(
    every_steps: int, every: Interval | None, settings: Settings, local: LocalTier | None
) -> dict[TierName, Interval]:
    """When each tier is due.

    Raises:
        ConfigError: an interval without its tier, or one that cannot be.
    """
    persistent = interval_of(every_steps, every)
    if persistent != Interval() and not settings.directory:
        raise ConfigError(
            "every_steps, or every, is of the persistent tier, found without a directory for that.",
            hint="The interval of the local tier is LocalTier(every_steps=...).",
        )
    intervals = {TierName.PERSISTENT: persistent}
    if local is not None:
        intervals[TierName.LOCAL] = interval_of(local.every_steps, local.every)
    return intervals
