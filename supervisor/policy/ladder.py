# SPDX-License-Identifier: Apache-2.0
"""What to try for which cause, mildest first, as a table: the first rung that is possible is taken."""

from __future__ import annotations

from enum import Enum


class Cause(Enum):
    WORKER = "worker"  # ranks are lost on a host that is there
    HOST = "host"  # a host is lost, or not fit for work
    HANG = "hang"
    NO_PROGRESS = "no_progress"
    CAPACITY = "capacity"  # there is more room than the job uses


class Rung(Enum):
    IN_JOB_RESET = "in_job_reset"
    WORKLOAD_RESET = "workload_reset"
    HOT_SWAP = "hot_swap"
    SCALE_DOWN = "scale_down"
    SCALE_UP = "scale_up"
    #: A workload reset beyond its budget, slower each time, until the verdict that the job cannot progress.
    LAST_RESORT = "last_resort"


def rungs(cause: Cause, *, host_usable: bool = True, guess: bool = False) -> tuple[Rung, ...]:
    """The rungs for `cause`, in the order in which to try them.

    Args:
        host_usable: nothing speaks against starting the job on the same host again.
        guess: only words speak against the host: a spare takes its place, or its launcher goes on.
    """
    if cause is Cause.CAPACITY:
        return (Rung.SCALE_UP,)
    if cause is Cause.HOST and guess:
        return (Rung.HOT_SWAP,)
    if cause is Cause.HOST:
        again = (Rung.WORKLOAD_RESET,) if host_usable else ()
        return (*again, Rung.HOT_SWAP, Rung.SCALE_DOWN, Rung.LAST_RESORT)
    return (Rung.IN_JOB_RESET, Rung.WORKLOAD_RESET, Rung.LAST_RESORT)
