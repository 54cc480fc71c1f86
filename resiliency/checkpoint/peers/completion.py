# SPDX-License-Identifier: Apache-2.0
"""When a save is complete, and what may go then: counting, without any I/O.

A host *seals* a save when its own commit and its copies are durable and verified.  The leader
counts: once all hosts of the session have sealed the same save, it is *complete*, and only then may
what is older be deleted anywhere.  A save that some hosts sealed and others never will is passed
over as soon as a newer one is complete.

    host:    committed and copied -> seals -> hears of completion -> may retire what is older
    leader:  sealed by some ......... sealed by all = complete, told to all, and to who asks later

Who asks later hears of the last `REMEMBERED` complete saves, not of the newest alone: a host that was cut off
has to do with each of them what the others did, such as handing it over.

Nothing needs to be kept on disk.  Hosts repeat what they know to be complete, and what they have sealed
from the newest complete save on, whenever they reach a leader: one that has just started soon knows all
that counts.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection
from dataclasses import dataclass, field

#: Saves that wait for hosts; far more than disks hold.
_MOST_OPEN = 256
#: Complete saves that are told to who may have missed them; as many as a rank follows.
REMEMBERED = 16


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
        complete: what is known to be complete, oldest first; the last `REMEMBERED`.
    """

    hosts: Collection[str]
    complete: list[SaveName] = field(default_factory=list)
    _sealed: dict[SaveName, set[str]] = field(default_factory=dict)

    @property
    def newest(self) -> SaveName | None:
        return self.complete[-1] if self.complete else None

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
            self.completed(save)
            return save
        while len(self._sealed) > _MOST_OPEN:
            del self._sealed[min(self._sealed)]
        return None

    def completed(self, save: SaveName) -> bool:
        """Take note that `save` is complete, as a host says that heard it before; True if that is news."""
        if not _note(self.complete, save, REMEMBERED):
            return False
        newest = self.complete[-1]
        self._sealed = {other: by for other, by in self._sealed.items() if other.step > newest.step}
        return True

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
    #: Oldest first.
    complete: list[SaveName] = field(default_factory=list)
    _sealed: set[SaveName] = field(default_factory=set)

    def seal(self, save: SaveName) -> None:
        self._sealed.add(save)

    def to_say(self) -> list[SaveName]:
        """What to tell a leader that may know nothing, oldest first."""
        return sorted(self._sealed)

    def completed(self, save: SaveName) -> bool:
        """Take note that `save` is complete; True if that is news.  They may come in any order."""
        if not _note(self.complete, save, max(self.keep, REMEMBERED)):
            return False
        newest = self.complete[-1]
        self._sealed = {other for other in self._sealed if other.step >= newest.step}
        return True

    @property
    def retire_below(self) -> int | None:
        """Step of the oldest complete generation that stays: what is older may go.  None: nothing may."""
        return self.complete[-self.keep].step if len(self.complete) >= self.keep else None


def _note(complete: list[SaveName], save: SaveName, most: int) -> bool:
    """Add a save to those known to be complete, in order; False if it is known, or too old to be."""
    if save in complete or (len(complete) >= most and save < complete[0]):
        return False
    insort(complete, save)
    del complete[:-most]
    return True
