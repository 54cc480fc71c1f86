# SPDX-License-Identifier: Apache-2.0
"""How much and how often one caller may speak, and how long a connection may be silent."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import Any

from resiliency.runtime import Clock, SystemClock
from supervisor.plain import InvalidValue
from supervisor.transport.errors import Reason, Refused

#: Largest message of a call between the parts of the supervisor; senders split batches (`BATCH_BYTES`).
MAX_MESSAGE_BYTES = 4 << 20
#: Largest message on a host's stream; a report of 64 workers has 4 KiB.
MAX_HOST_MESSAGE_BYTES = 256 << 10
#: Values in one batch, and their bytes where more than one is in it: what is around them has room left.
BATCH_ITEMS, BATCH_BYTES = 1000, MAX_MESSAGE_BYTES // 2

#: For both ends.  A stream whose other end is gone without a trace ends within KEEPALIVE_S +
#: KEEPALIVE_TIMEOUT_S.
KEEPALIVE_S, KEEPALIVE_TIMEOUT_S = 10.0, 5.0
COMMON_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", 16 << 10),
    ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
    ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
SERVER_OPTIONS: tuple[tuple[str, Any], ...] = (
    *COMMON_OPTIONS,
    # Else a second server would share the port in silence, and each get half of the calls.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", int(KEEPALIVE_S * 500)),
)
CHANNEL_OPTIONS: tuple[tuple[str, Any], ...] = (
    *COMMON_OPTIONS,
    # Each try has a connection of its own: the pause between tries is `Backoff`'s, not a shared subchannel's.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    # Longest wait for one connection, as the core reads it: a server that ends may accept it and say nothing.
    ("grpc.min_reconnect_backoff_ms", 5000),
)

#: The first epoch of an event log is the time in ms, and each start adds 1: so far ahead no controller is.
MOST_EPOCH_AHEAD_MS = 366 * 86_400_000


def check_epoch(epoch: int) -> None:
    """Refuse the epoch of a command or outcome that no controller can have.

    Receivers remember the highest epoch and refuse lower ones: one message with an absurd one would fence
    every controller that is still to come.

    Raises:
        InvalidValue: it is more than a year ahead of this machine's clock.
    """
    now_ms = time.time_ns() // 10**6
    if epoch > now_ms + MOST_EPOCH_AHEAD_MS:
        raise InvalidValue(
            f"epoch {epoch} is more than a year ahead of this machine's clock ({now_ms}): no controller has "
            "it.",
            value="Command",
            field="epoch",
        )


class RateLimit:
    """A token bucket: `burst` messages at once, `per_s` in the long run."""

    def __init__(self, *, per_s: float, burst: int, clock: Clock | None = None) -> None:
        self._per_s, self._burst = per_s, burst
        self._clock = clock or SystemClock()
        self._left, self._at = float(burst), self._clock.monotonic()

    def spend(self, caller: str) -> None:
        """Count one message.

        Raises:
            Refused: too many.
        """
        now = self._clock.monotonic()
        self._left = min(self._burst, self._left + (now - self._at) * self._per_s)
        self._at = now
        if self._left < 1:
            raise Refused(
                f"{caller} sends more than {self._per_s:g} messages a second.",
                reason=Reason.RATE,
            )
        self._left -= 1


@dataclass
class Backoff:
    """Pauses between tries: doubled each time, at random between half and all of it, so that hosts spread."""

    first_s: float = 0.2
    most_s: float = 10.0
    random: random.Random = field(default_factory=random.Random)  # noqa: S311 - no secret
    _next_s: float = 0.0

    def next_s(self) -> float:
        self._next_s = min(self._next_s * 2 or self.first_s, self.most_s)
        return self._next_s * self.random.uniform(0.5, 1.0)

    def reset(self) -> None:
        self._next_s = 0.0
