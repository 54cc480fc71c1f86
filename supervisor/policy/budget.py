# SPDX-License-Identifier: Apache-2.0
"""How often a job may be acted upon: a budget that training progress refills, and a pace that only time does.

The two answer different questions.  A *budget* tells a job that recovers from one that cannot: a job that
makes no step gets nothing back, however long it waits, and one that fails once a day for a year never runs
out.  A *pace* (token bucket, backoff) keeps actions apart, whatever their reasons.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """What was spent, as of `step`.  One unit comes back for each `steps_per_unit` steps."""

    spent: int = 0
    step: int = 0

    def at(self, step: int, steps_per_unit: int) -> Budget:
        """The budget once training has reached `step`; going back to an older step costs nothing."""
        if not self.spent:
            return Budget(spent=0, step=max(self.step, step))
        back = max(0, step - self.step) // steps_per_unit
        return Budget(spent=max(0, self.spent - back), step=self.step + back * steps_per_unit)

    def left(self, limit: int) -> int:
        return max(0, limit - self.spent)

    def spend(self) -> Budget:
        return replace(self, spent=self.spent + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBucket:
    """At most `capacity` actions at once, and one for each `period_s` in the long run."""

    used: float = 0.0
    at: float = 0.0

    def ready_at(self, now: float, *, capacity: int, period_s: float) -> float:
        """When the next action is allowed: `now`, or later."""
        excess = self._used(now, period_s) + 1 - capacity
        # A rest of rounding must not ask for a wait that no clock can show.
        return now + excess * period_s if excess > 1e-9 else now

    def left(self, now: float, *, capacity: int, period_s: float) -> int:
        """Actions that are allowed at once now."""
        return max(0, int(capacity - self._used(now, period_s) + 1e-9))

    def take(self, now: float, *, period_s: float) -> TokenBucket:
        return TokenBucket(used=self._used(now, period_s) + 1, at=now)

    def _used(self, now: float, period_s: float) -> float:
        return max(0.0, self.used - (now - self.at) / period_s)


def backoff_s(failures: int, *, base_s: float, limit_s: float) -> float:
    """How long to wait after `failures` fruitless actions: 0, base, 2 x base, ... up to the limit."""
    if failures <= 0:
        return 0.0
    # Beyond 2**30 the limit holds in any case, and a float would overflow.
    return float(min(limit_s, base_s * 2.0 ** min(failures - 1, 30)))
