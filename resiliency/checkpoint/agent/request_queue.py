# SPDX-License-Identifier: Apache-2.0
"""What one rank asks of its agents, in the order in which it asked, whichever agent is there to hear it.

A request waits here until an agent has it in hand.  Saves and repairs are remembered until the agent
reports them; when it dies first, what follows from that for its successor goes ahead of all that still
waits, for that was asked later.  So every agent hears of the steps of a tier in growing order, which is
what it goes by when it says that a rank has none.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Sequence
from typing import TypeAlias

from resiliency.checkpoint.agent.protocol import (
    Attach,
    Detach,
    Done,
    LiftBandwidthCap,
    Peers,
    Repair,
    RepairDone,
    SaveRequest,
    Skip,
)
from resiliency.checkpoint.names import TierTry

logger = logging.getLogger(__name__)

Request: TypeAlias = "Attach | Peers | Repair | SaveRequest | Skip | LiftBandwidthCap | Detach"

#: Agents that are told of one repair: it may be what they die of.
_REPAIR_AGENTS = 3
#: Saves that were given up, of which the next agent is told.  Those before them are over
#: for the others, too: they wait for the newer ones.
_MOST_GIVEN_UP = 64


class RequestQueue:
    """The requests of one rank.  Any thread puts; all else is for the thread that talks to the agents.

    Args:
        rank: who asks, for errors.
        is_alone: there is no other rank that could wait for this one.
    """

    def __init__(self, rank: int, *, is_alone: bool) -> None:
        self._rank = rank
        self._is_alone = is_alone
        # One thread takes from the left and puts back there, the others append: deques bear that.
        self._waiting: deque[Request] = deque()
        #: What an agent was told of and has not reported yet, by the newest request for it.
        self._unreported: dict[TierTry, SaveRequest | Skip] = {}
        self._repairs: dict[Repair, None] = {}
        self._repair_agents: Counter[Repair] = Counter()
        #: Said once, it holds for every agent to come.
        self.cap_lifted = False

    def put(self, request: Request) -> None:
        self._waiting.append(request)

    def first(self) -> Request | None:
        """What the agent is to hear next; it stays until `passed_on`."""
        return self._waiting[0] if self._waiting else None

    def passed_on(self) -> None:
        """An agent has the first request in hand."""
        self._note(self._waiting.popleft())

    def reported(self, done: Done) -> None:
        """An agent said how a save ended in a tier."""
        self._unreported.pop(done.tried, None)

    def repair_reported(self, done: RepairDone) -> None:
        """An agent said how a repair ended."""
        self._repairs.pop(done.repair, None)
        self._repair_agents.pop(done.repair, None)

    def give_up_waiting(self) -> None:
        """There is no agent to be had: the saves that wait for one are as lost as if one had taken them."""
        kept: list[Request] = []
        while self._waiting:
            request = self._waiting.popleft()
            if isinstance(request, SaveRequest | Skip):
                self._note(request)
            else:
                kept.append(request)
        self._waiting.extendleft(reversed(kept))

    @property
    def unreported(self) -> frozenset[TierTry]:
        """What is lost if the agent is."""
        return frozenset(self._unreported)

    def start_over(self, again: Sequence[SaveRequest], why: str) -> None:
        """The agent is lost: the next one hears first what this one leaves undone.

        Args:
            again: what it shall save instead.  All else that is unreported is given up, which it is told,
                so that other ranks and hosts need not wait for this one's part of it.
            why: the agent was lost.
        """
        saved_again = {tried for save in again for tried in save.tries}
        given_up = [tried for tried in sorted(self._unreported) if tried not in saved_again][-_MOST_GIVEN_UP:]
        skips = [] if self._is_alone else [self._skip(tried, why) for tried in given_up]
        self._unreported = {}
        undone: list[SaveRequest | Skip] = [*again, *skips]
        undone.sort(key=lambda request: (request.step, request.try_number))
        # No order holds between saves and repairs.
        self._waiting.extendleft(reversed([*self._unfinished_repairs(), *undone]))

    def _skip(self, tried: TierTry, why: str) -> Skip:
        unreported = self._unreported[tried]
        reason = unreported.reason if isinstance(unreported, Skip) else f"rank {self._rank}: {why}"
        return Skip(step=tried.step, tiers=(tried.tier,), reason=reason, try_number=tried.number)

    def _unfinished_repairs(self) -> list[Repair]:
        repairs, self._repairs = list(self._repairs), {}
        for repair in repairs:
            if self._repair_agents[repair] >= _REPAIR_AGENTS:
                logger.error(
                    "%d agents were lost before they had sent step %d of %s to %s: it goes without that copy",
                    *(_REPAIR_AGENTS, repair.step, repair.source_host, repair.target),
                )
        return [repair for repair in repairs if self._repair_agents[repair] < _REPAIR_AGENTS]

    def _note(self, request: Request) -> None:
        if isinstance(request, SaveRequest | Skip):
            self._unreported.update(dict.fromkeys(request.tries, request))
        elif isinstance(request, Repair):
            self._repairs[request] = None
            self._repair_agents[request] += 1
        elif isinstance(request, LiftBandwidthCap):
            self.cap_lifted = True
