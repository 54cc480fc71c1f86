# SPDX-License-Identifier: Apache-2.0
"""How a fault happens: each injector carries out some kinds, and undoes what can be undone.

An injector of your own has the methods of `Injector`; hand it to `simulator.player.Player` before the others.
An error that `Injector` does not name is reported, and costs the fault that it happened in and no other.
"""

from __future__ import annotations

import logging
from typing import Protocol

from resiliency.errors import ResiliencyError
from simulator.faults import Kind, PlannedFault
from simulator.journal import Record

logger = logging.getLogger(__name__)


class Injector(Protocol):
    """One way to injure a job.

    `aim_fault` looks and changes nothing; its record is on disk before `inject` acts upon it, and is all that
    `end_effect` gets, perhaps in another process.  A record is JSON.
    """

    #: Written into records, so that the next start finds the injector that can undo them.
    name: str
    kinds: frozenset[Kind]
    #: Whether an effect is still there after a restart of the host.
    outlives_boot: bool

    def refusal(self) -> str:
        """Why this cannot work on this host, as a sentence; "" when it can."""
        ...

    def aim_fault(self, fault: PlannedFault) -> Record:
        """Choose the target.

        Raises:
            FaultMissed: there is none now, or it is not the job's alone.
        """
        ...

    def inject(self, record: Record) -> None:
        """Do it.

        Raises:
            FaultMissed: the target is gone.
            InjectionFailed: the operating system refuses; `end_effect` undoes what has happened.
        """
        ...

    def end_effect(self, record: Record) -> None:
        """Undo it; also if it never began, was undone, or its target is gone.

        Raises:
            InjectionFailed: it is still in effect.
        """
        ...


def refusal_of(injector: Injector) -> str:
    """Why `injector` cannot work on this host; "" when it can.  One that fails to look cannot."""
    try:
        return injector.refusal()
    except Exception as error:  # an injector may be anybody's
        logger.warning("injector %s is left out: its refusal failed", injector.name, exc_info=True)
        return f"injector {injector.name} cannot say whether it works: {error_text(error)}."


def error_text(error: Exception) -> str:
    """Of an error that need not be ours: with its class, for `KeyError('rank')` says only 'rank'."""
    if isinstance(error, (ResiliencyError, OSError)):
        return str(error)
    return f"{type(error).__name__}: {error}"
