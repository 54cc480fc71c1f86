# SPDX-License-Identifier: Apache-2.0
"""When a save is complete, and what may go then: counting, without any I/O.

A host *acknowledges* a save when its own commit and its copies are durable and verified.  The leader
counts: once all hosts of the attempt have acknowledged the same save, it is *complete*, and only then may
what is older be deleted anywhere.  A save that some hosts acknowledged and others never will is skipped
as soon as a newer one is complete.

    host:    committed and copied -> acknowledges -> hears of completion -> may retire what is older
    leader:  acknowledged by some ... acknowledged by all = complete, told to all, and to who asks later

Who asks later hears of the last `REMEMBERED` complete saves, not of the newest alone: a host that was cut off
has to do with each of them what the others did, such as handing it over.

A host that lacks its part of each save, as its disk is full, would let the others' disks grow by one save
after the other.  So no more than `MOST_INCOMPLETE` saves wait for their last acknowledgement: for another,
the leader *gives up* one of them for good, and all hosts delete their parts.  First goes the oldest of which
some host has said that it will not acknowledge it; else the one that hosts whose copies are slower than
saves would skip (`resiliency.checkpoint.replication.copy_queue`); the newest one never.

    leader:  too many wait -> gives one up, all hear of it; its acknowledgements no longer count
    host:    hears of it -> never acknowledges it any more -> deletes its part and the copies

A save that an earlier leader found complete is never given up, though only some hosts may have heard of it
and have deleted what is older: the leader's own host had acknowledged it, so its part was on that host's
disk when this leader began, or had been taken away.  So nothing is given up but saves that the leader's own
host has committed, or failed to commit, since then: where the disk of that host hangs, nothing is given up.

Nothing needs to be kept on disk.  Hosts repeat what they know to be complete or given up, and what they have
acknowledged from the newest complete save on, whenever they reach a leader: one that has just started soon
knows all that counts.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection
from dataclasses import dataclass, field
from hashlib import blake2b

#: Saves newer than the newest complete one that may wait for hosts; disks hold as many.  With fewer, hosts
#: whose copies are slow would miss each other.
MOST_INCOMPLETE = 4
#: Given-up saves that are told to who may have missed it.
_GIVEN_UP_REMEMBERED = 64
#: Complete saves that are told to who may have missed them; as many as a rank follows.
REMEMBERED = 16


@dataclass(frozen=True, order=True)
class SaveName:
    """One save of the attempt.  Those with a higher step are newer."""

    step: int
    save_id: str

    @property
    def preference(self) -> tuple[int, int, int]:
        """Of two saves all hosts prefer to copy the one that has more of it, see `CopyQueue`."""
        twos = (self.step & -self.step).bit_length() if self.step else 64
        drawn = int.from_bytes(blake2b(self.save_id.encode(), digest_size=8).digest(), "big")
        return twos, drawn, self.step


@dataclass
class LeaderState:
    """The leader's count.

    Args:
        hosts: all hosts of the attempt.
        complete: what is known to be complete, oldest first; the last `REMEMBERED`.
        given_up: what never becomes complete, oldest first.
        before: saves of which the leader's host had a part when it began to count: an earlier leader may have
            found them complete.  Without a save id: it could not be read, and is any save of its step.
            None: not known, and then nothing is given up.
    """

    hosts: Collection[str]
    complete: list[SaveName] = field(default_factory=list)
    given_up: list[SaveName] = field(default_factory=list)
    before: Collection[SaveName] | None = None
    _acknowledged: dict[SaveName, set[str]] = field(default_factory=dict)
    _lost: dict[SaveName, set[str]] = field(default_factory=dict)
    #: Those of which the leader's own host has said something.
    _own: set[SaveName] = field(default_factory=set)

    @property
    def newest(self) -> SaveName | None:
        return self.complete[-1] if self.complete else None

    def acknowledge(self, host: str, save: SaveName) -> SaveName | None:
        """Count one acknowledgement, repeated or not.

        Returns:
            The newest complete save if that is news to `host`: this one, or one after it.
        """
        if host not in self.hosts:
            return None
        if self.newest is not None and save.step <= self.newest.step:
            return self.newest
        if not self._await(save):
            return None
        acknowledged = self._acknowledged[save]
        acknowledged.add(host)
        self._lost.get(save, set()).discard(host)  # its next try was better
        if acknowledged >= set(self.hosts):
            self.completed(save)
            return save
        return None

    def hold(self, save: SaveName) -> None:
        """The leader's own host has committed its part, and will acknowledge it."""
        if self._await(save):
            self._own.add(save)

    def lose(self, host: str, save: SaveName, *, is_own: bool = False) -> None:
        """A host has no part of it, or no copies, and is not about to.

        Args:
            is_own: it is the leader's host.
        """
        if host not in self.hosts or not self._await(save):
            return
        if is_own:
            self._own.add(save)
        if host not in self._acknowledged[save]:
            self._lost.setdefault(save, set()).add(host)

    def give_up(self) -> list[tuple[SaveName, list[str]]]:
        """Give up what waits beyond `MOST_INCOMPLETE`; returns it with the hosts that kept it waiting."""
        gone: list[tuple[SaveName, list[str]]] = []
        if self.before is None:
            return gone
        for _ in range(len(self._acknowledged) - MOST_INCOMPLETE):
            known = self._own & self._acknowledged.keys() - {max(self._acknowledged)}
            can_give_up = [save for save in known if {save, SaveName(save.step, "")}.isdisjoint(self.before)]
            lost = [save for save in can_give_up if self._lost.get(save)]
            if not can_give_up:
                break
            save = min(lost) if lost else min(can_give_up, key=lambda save: save.preference)
            behind = self._lost.get(save) or set(self.hosts) - self._acknowledged[save]
            self.gave_up(save)
            gone.append((save, sorted(behind)))
        return gone

    def gave_up(self, save: SaveName) -> bool:
        """Take note that `save` never becomes complete, as a host says that heard it before; True if that is
        news."""
        if save in self.complete or save in self.given_up:
            return False
        insort(self.given_up, save)
        del self.given_up[:-_GIVEN_UP_REMEMBERED]
        self._acknowledged.pop(save, None)
        self._lost.pop(save, None)
        self._own.discard(save)
        return True

    def completed(self, save: SaveName) -> bool:
        """Take note that `save` is complete, as a host says that heard it before; True if that is news."""
        if save in self.given_up or not _note(self.complete, save, REMEMBERED):
            return False
        newest = self.complete[-1]
        self._acknowledged = {
            other: by for other, by in self._acknowledged.items() if other.step > newest.step
        }
        self._lost = {other: by for other, by in self._lost.items() if other in self._acknowledged}
        self._own &= self._acknowledged.keys()
        return True

    def awaited(self) -> dict[SaveName, set[str]]:
        """Saves that are not complete, and the hosts that have not acknowledged them."""
        return {save: set(self.hosts) - by for save, by in self._acknowledged.items()}

    def _await(self, save: SaveName) -> bool:
        """Whether a save may become complete; then it is counted from now on."""
        if save in self.given_up or (self.newest is not None and save.step <= self.newest.step):
            return False
        self._acknowledged.setdefault(save, set())
        return True


@dataclass
class HostState:
    """One host's own account: what it has acknowledged, and what it knows to be complete.

    Args:
        keep: how many complete generations stay.
    """

    keep: int = 1
    #: Oldest first.
    complete: list[SaveName] = field(default_factory=list)
    given_up: list[SaveName] = field(default_factory=list)
    _acknowledged: set[SaveName] = field(default_factory=set)
    _lost: set[SaveName] = field(default_factory=set)

    def acknowledge(self, save: SaveName) -> bool:
        """False if it is given up: nobody may count on it."""
        if save in self.given_up:
            return False
        self._acknowledged.add(save)
        self._lost.discard(save)
        return True

    def lose(self, save: SaveName) -> bool:
        """This host will not acknowledge it, unless it tries again; False if that changes nothing."""
        is_old = bool(self.complete) and save.step <= self.complete[-1].step
        if is_old or save in self.given_up or save in self._acknowledged:
            return False
        self._lost.add(save)
        return True

    def give_up(self, save: SaveName) -> bool:
        """Take note that `save` never becomes complete: no longer acknowledged; True if that is news."""
        if save in self.given_up or save in self.complete:
            return False
        insort(self.given_up, save)
        del self.given_up[:-_GIVEN_UP_REMEMBERED]
        self._acknowledged.discard(save)
        self._lost.discard(save)
        return True

    def to_say(self) -> list[SaveName]:
        """What it has acknowledged, for a leader that may know nothing, oldest first."""
        return sorted(self._acknowledged)

    def lost_to_say(self) -> list[SaveName]:
        """The same of what it will not acknowledge."""
        return sorted(self._lost)[-_GIVEN_UP_REMEMBERED:]

    def completed(self, save: SaveName) -> bool:
        """Take note that `save` is complete; True if that is news.  They may come in any order."""
        if save in self.given_up or not _note(self.complete, save, max(self.keep, REMEMBERED)):
            return False
        newest = self.complete[-1]
        self._acknowledged = {other for other in self._acknowledged if other.step >= newest.step}
        self._lost = {other for other in self._lost if other.step > newest.step}
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
