# SPDX-License-Identifier: Apache-2.0
"""Every number that decides, in one table.  Seconds, steps, hosts or shares, as the names say."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True, slots=True)
class Thresholds:
    """One row per number: its flag is ``--`` and its name with dashes (`flags`).

    A job's own `--workload-downtime-threshold-s`, `--container-termination-threshold-s` and budgets travel
    with its `WorkloadInfo`; where a job sets none, the rows of the same name hold.  One exception: without an
    action before it, no step for the downtime counts by the default only where the ranks of a new attempt run
    and the job told steps before.
    """

    # The sensor.
    heartbeat_timeout_s: float = 30.0  # a worker or host silent that long is lost
    tick_s: float = 0.5  # the sensor looks at least that often; what it is late by is added to all deadlines
    hang_threshold_s: float = 300.0  # all workers alive and no step that long is a hang; 0 is off
    silence_share: float = 0.2  # more hosts than that silent at once: freeze
    silence_min_hosts: int = 3  # fewer silent hosts never freeze
    # One incident.
    coalesce_s: float = 2.0  # reports of one incident are gathered that long before it is decided upon
    # A launcher that restarts its ranks itself is left to it that long: it pauses for up to 60 s.
    launcher_grace_s: float = 120.0
    advancing_s: float = 4.0  # a job that finished a step within that time is not restarted
    workload_downtime_threshold_s: float = 600.0  # no step that long after an action: the next rung
    container_termination_threshold_s: float = 600.0  # an action must have ended by then
    hot_swap_threshold_s: float = 120.0  # a hot swap must have ended by then, else the next rung
    # How often.
    steps_per_restart: int = 100  # finished steps that give one restart of a budget back
    actions_at_once: int = 5  # capacity of a job's token bucket
    action_period_s: float = 600.0  # one token comes back in that time
    backoff_s: float = 15.0  # after the first fruitless action, then twice as long each time
    backoff_limit_s: float = 1800.0
    max_fruitless: int = 6  # fruitless actions in a row beyond the budgets, then the verdict on the job
    # How many.
    cordon_window_s: float = 3600.0
    max_cordons: int = 4  # per window
    max_cordons_per_domain: int = 2  # per window and smallest failure domain
    spare_floor: int = 1  # spares that no job may grow into
    spare_check_s: float = 0.0  # spares check themselves that often, and are none before; 0 is off
    # How long.
    scale_up_hold_s: float = 300.0  # no incident that long before a job grows
    verdict_s: float = 86400.0  # a verdict on a host or job is forgotten after that
    suspicion_s: float = (
        3600.0  # a second hang, or repeated application Xids, within that time count together
    )
    suspicious_xids: int = 3  # application Xids of one GPU, from two jobs or more, that make the host suspect

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in _MAY_BE_ZERO else 1e-9
            if not least <= value < math.inf:
                raise ValueError(
                    f"{flag(field.name)} must be {'0 or more' if not least else 'more than 0'}, found {value}"
                )
        if self.silence_share >= 1:
            raise ValueError(
                f"{flag('silence_share')} must be below 1, found {self.silence_share}: a share of all hosts"
            )


_MAY_BE_ZERO = frozenset(
    {"hang_threshold_s", "coalesce_s", "spare_floor", "spare_check_s", "launcher_grace_s", "scale_up_hold_s"}
)


def flag(name: str) -> str:
    """The command-line flag of a row."""
    return "--" + name.replace("_", "-")


def flags() -> dict[str, float]:
    """Each flag and its default."""
    defaults = Thresholds()
    return {flag(field.name): getattr(defaults, field.name) for field in fields(Thresholds)}
