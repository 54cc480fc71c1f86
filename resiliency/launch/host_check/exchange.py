# SPDX-License-Identifier: Apache-2.0
"""What the hosts of one check say to each other, over the store of their rendezvous.

Each key begins with the id of the check (run and attempt), so results of an earlier run, or of a check that
did not end, are never read.  Host 0 collects, and publishes what it has: all hosts conclude from that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Protocol

from resiliency.errors import PeerError
from resiliency.runtime import awake_s, elapsed_s

#: Beyond the time that host 0 waits for the others, until they have its answer.
_ANSWER_S = 5.0


class CheckStore(Protocol):
    """The part of torch's Store that a check uses."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """Raises RuntimeError where a key is missing at the end."""
        ...


class Exchange:
    """One host's side of a check.

    Args:
        check: id of the check; no other one has had it.
    """

    def __init__(self, store: CheckStore, *, check: str, rank: int, hosts: int) -> None:
        self._store = store
        self._prefix = f"host-check/{check}"
        self.rank = rank
        self.hosts = hosts

    def tell(self, name: str, value: object) -> None:
        """Publish `value` under a name that this host alone writes."""
        self._store.set(f"{self._prefix}/{name}", json.dumps(value))

    def try_ask(self, name: str, timeout_s: float) -> Any:
        """What another host published; None: nothing within `timeout_s`."""
        key = f"{self._prefix}/{name}"
        until = awake_s() + timeout_s
        while True:
            began, left_s = elapsed_s(), max(until - awake_s(), 0.001)
            try:
                self._store.wait([key], timedelta(seconds=left_s))
                return json.loads(self._store.get(key))
            except RuntimeError:  # torch has no narrower one for its stores
                # Again only where the store's time is over, and not this host's: it was suspended.
                if elapsed_s() - began < left_s or awake_s() >= until:
                    return None

    def gather(self, name: str, mine: Mapping[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        """What each host says, by rank; the same list on all hosts, and {} for one that said nothing in time.

        Raises:
            PeerError: host 0 did not answer.
        """
        self.tell(f"{name}/{self.rank}", mine)
        if self.rank == 0:
            until = awake_s() + timeout_s
            said = [self.try_ask(f"{name}/{rank}", until - awake_s()) or {} for rank in range(self.hosts)]
            self.tell(f"{name}/all", said)
            return said
        answer = self.try_ask(f"{name}/all", timeout_s + _ANSWER_S)
        if answer is None:
            raise PeerError(
                f"host 0 did not publish the results of {name} within {timeout_s + _ANSWER_S:g} s."
            )
        return list(answer)
