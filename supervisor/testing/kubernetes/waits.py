# SPDX-License-Identifier: Apache-2.0
"""How long the controllers of a real control plane wait, and how long those in memory do."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class Waits:
    """Seconds, as measured against Kubernetes 1.36; rules by their numbers in `jobs`.

    Attributes:
        backoff_s: after the first failure of an index, then twice as long each time (rule 4).
        backoff_limit_s: longest time of that.
        gone_s: from the end of a Node object to that of its pods (rule 6).
    """

    backoff_s: float = 10.0
    backoff_limit_s: float = 600.0
    gone_s: float = 60.0

    def faster(self, times: float) -> Waits:
        return Waits(**{one.name: getattr(self, one.name) / times for one in fields(self)})
