# SPDX-License-Identifier: Apache-2.0
"""When a save is complete, and what may go then: counting, without any I/O.

A host *seals* a save when its own commit and its copies are durable and verified.  The leader
counts: once all hosts of the session have sealed the same save, it is *complete*, and only then may
what is older be deleted anywhere.  A save that some hosts sealed and others never will is passed
over as soon as a newer one is complete.

    host:    committed and copied -> seals -> hears of completion -> may retire what is older
    leader:  sealed by some ......... sealed by all = complete, told to all, and to who asks later

Nothing needs to be kept on disk.  Hosts repeat what they have sealed, from the newest complete save
on, whenever they reach a leader: one that has just started soon knows all that counts.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

#: Saves that wait for hosts; far more than disks hold.
_MOST_OPEN = 256


@dataclass(frozen=True, order=True)
class SaveName:
    """One save of the session.  Those with a higher step are newer."""

    step: int
    save_id: str


@dataclass
class Tally:
    """The leader's count.

    Args:
        hosts: all hosts of the session.
    """

    hosts: Collection[str]
    newest: SaveName | None = None
    _sealed: dict[SaveName, set[str]] = field(default_factory=dict)

    def seal(self, host: str, save: SaveName) -> SaveName | None:
        """Count one seal, repeated or not.

        Returns:
            The newest complete save if that is news to `host`: this one, or one after it.
        """
        if host not in self.hosts:
            return None
        if self.newest is not None and save.step <= self.newest.step:
            return self.newest
        sealed = self._sealed.setdefault(save, set())
        sealed.add(host)
        if sealed >= set(self.hosts):
            self.newest = save
            self._sealed = {other: by for other, by in self._sealed.items() if other.step > save.step}
            return save
        while len(self._sealed) > _MOST_OPEN:
            del self._sealed[min(self._sealed)]
        return None

    def awaited(self) -> dict[SaveName, set[str]]:
        """Saves that are not complete, and the hosts that have not sealed them."""
        return {save: set(self.hosts) - by for save, by in self._sealed.items()}


@dataclass
class Ledger:
    """One host's own account: what it has sealed, and what it knows to be complete.

    Args:
        keep: how many complete generations stay.
    """

    keep: int = 1
    _sealed: set[SaveName] = field(default_factory=set)
    _complete: list[SaveName] = field(default_factory=list)

    @property
    def newest(self) -> SaveName | None:
        return self._complete[-1] if self._complete else None

    def seal(self, save: SaveName) -> None:
        self._sealed.add(save)

    def to_say(self) -> list[SaveName]:
        """What to tell a leader that may know nothing, oldest first."""
        return sorted(self._sealed)

    def completed(self, save: SaveName) -> bool:
        """Take note that `save` is complete; True if that is news."""
        if self.newest is not None and save.step <= self.newest.step:
            return False
        self._complete = [*self._complete, save][-self.keep :]
        self._sealed = {other for other in self._sealed if other.step >= save.step}
        return True

    @property
    def retire_below(self) -> int | None:
        """Step of the oldest complete generation that stays: what is older may go.  None: nothing may."""
        return self._complete[0].step if len(self._complete) == self.keep else None
