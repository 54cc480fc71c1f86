# SPDX-License-Identifier: Apache-2.0
"""Which save a host copies next, when saves come faster than copies can be sent.

A save is worth nothing to the completion protocol unless *every* host copies that same one.  Were
each to take the newest whenever it is free, a fast and a slow host could miss each other for ever,
and nothing would ever be complete.  So all prefer the same ones, without talking: of those that
wait, the save whose step has the most factors of two, and among equals the one that a hash draws.
Of every 2**n saves at regular steps one has more such factors than all its neighbours, and a host
that is no slower than half as many intervals meets it whenever it looks.

What is older than the save that is taken has been superseded; what is newer goes on waiting.  As
long as copies are quicker than saves, nothing waits and every save is copied.

Saves of earlier attempts wait until none of this one does.  One that could not be copied anywhere
stands back behind newer ones, and among those of earlier attempts behind all that were tried less often:
what is in its way may not be in theirs.
"""

from __future__ import annotations

import threading
from collections import Counter

from resiliency.checkpoint.names import save_id_of
from resiliency.checkpoint.replication.completion import SaveName

_MOST = 256


class CopyQueue:
    """Saves that wait for their copies; one thread takes, any may add."""

    def __init__(self) -> None:
        self._saves: set[SaveName] = set()
        #: How often each was tried in vain.
        self._failures: Counter[SaveName] = Counter()
        self._lock = threading.Lock()

    def add(self, save: SaveName) -> None:
        with self._lock:
            self._saves.add(save)
            if len(self._saves) > _MOST:
                self._saves.discard(min(self._saves))

    def take(self, attempt_id: str) -> tuple[SaveName | None, list[SaveName]]:
        """The save to copy now, which stays until `remove`, and those of `attempt_id` that it supersedes."""
        with self._lock:
            live = {save for save in self._saves if save.save_id == save_id_of(attempt_id, save.step)}
            if not live:
                return max(self._saves, key=self._turn, default=None), []
            newest = max(save.step for save in live)
            hopeful = {save for save in live if not self._failures[save] or save.step == newest}
            chosen = max(hopeful, key=lambda save: save.preference)
            passed = sorted(save for save in live if save.step < chosen.step)
            self._saves.difference_update(passed)
            for save in self._failures.keys() - self._saves:
                del self._failures[save]
            return chosen, passed

    def failed(self, save: SaveName) -> bool:
        """No host took a copy of it for now.  Returns whether that is news."""
        with self._lock:
            self._failures[save] += 1
            return self._failures[save] == 1

    def remove(self, save: SaveName) -> None:
        with self._lock:
            self._saves.discard(save)
            del self._failures[save]

    def _turn(self, save: SaveName) -> tuple[int, tuple[int, int, int]]:
        return -self._failures[save], save.preference
