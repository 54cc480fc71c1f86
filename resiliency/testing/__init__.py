# SPDX-License-Identifier: Apache-2.0
"""The tools that our own tests use, for yours: real processes, real faults, no mocks.

Here are the values and twins that need the standard library only.  The rest is imported from its
module, because it needs more: `rank_pool` (torch, in the ranks), `cluster` (the checkpoint engine, on its
hosts), `processes` (psutil), `fixtures` (pytest).  See docs/testing.md and docs/test-cluster.md.
"""

from resiliency.testing.clock import ManualClock
from resiliency.testing.cluster.points import FaultHit, HostFault, HostPhase
from resiliency.testing.faults import Fault, FaultInjector, FaultKind, InjectedFault, Phase
from resiliency.testing.sinks import FailingSink, MemorySink

__all__ = [
    "FailingSink",
    "Fault",
    "FaultHit",
    "FaultInjector",
    "FaultKind",
    "HostFault",
    "HostPhase",
    "InjectedFault",
    "ManualClock",
    "MemorySink",
    "Phase",
]
