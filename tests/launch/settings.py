# SPDX-License-Identifier: Apache-2.0
"""Settings of the rendezvous under which a lost host is noticed soon."""

from __future__ import annotations

#: A dead host is noticed after 6 s and not after 15.
FAST = "--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=6"
#: The same after longer than a test waits.
SLOW = "--rdzv-conf=keep_alive_interval=60,keep_alive_max_attempt=6"
