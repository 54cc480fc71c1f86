# SPDX-License-Identifier: Apache-2.0
"""What the exchange between hosts has done so far, as counters that only grow."""

from __future__ import annotations

import threading

#: Name to what it counts, as Prometheus wants it.
COUNTERS = {
    "resiliency_peer_sent_bytes_total": "bytes of checkpoints sent to other hosts",
    "resiliency_peer_received_bytes_total": "bytes of checkpoints received from other hosts",
    "resiliency_peer_copies_sent_total": "copies that another host has verified",
    "resiliency_peer_copies_received_total": "copies of others that were committed here",
    "resiliency_peer_sending_seconds_total": "time spent sending copies, bandwidth cap included",
    "resiliency_peer_refusals_total": "offers that another host refused",
    "resiliency_peer_refused_total": "offers that this host refused",
    "resiliency_peer_retries_total": "attempts after the first to send a copy to a host",
    "resiliency_peer_strangers_total": "connections that were turned away",
    "resiliency_peer_retired_total": "replicas deleted because a newer save was complete",
}


class Counters:
    def __init__(self) -> None:
        self._values = dict.fromkeys(COUNTERS, 0.0)
        self._lock = threading.Lock()

    def add(self, what: str, amount: float = 1.0) -> None:
        """Count `resiliency_peer_<what>_total`."""
        name = f"resiliency_peer_{what}_total"
        with self._lock:
            self._values[name] += amount

    def snapshot(self) -> dict[str, float]:
        with self._lock:
            return dict(self._values)
