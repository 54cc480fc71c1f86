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
        out_of_service_s: from the deletion of a pod to its end, on a silent node with that taint.
        taint_s: from a cordon, or its end, to the taint that follows it.
        renew_s: between two renewals of a kubelet's lease.
        monitor_s: between two looks of the node controller at all leases.
        unknown_s: a node whose lease is not renewed for that long is Ready=Unknown.
    """

    backoff_s: float = 10.0
    backoff_limit_s: float = 600.0
    gone_s: float = 60.0
    out_of_service_s: float = 8.5
    taint_s: float = 1.0
    renew_s: float = 10.0
    monitor_s: float = 5.0
    unknown_s: float = 50.0

    def faster(self, times: float) -> Waits:
        return Waits(**{one.name: getattr(self, one.name) / times for one in fields(self)})
