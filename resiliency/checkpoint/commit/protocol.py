# SPDX-License-Identifier: Apache-2.0
"""The commit protocol as a table: what the leader of a save and its followers do next, and after what.

Nothing here does I/O: `resiliency.checkpoint.commit.commit` performs it on a storage, and says why it is so.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from resiliency.errors import InternalError


class State(Enum):
    NEW = "new"
    CLAIMING = "claiming"  # leader: marker, leftovers, directory
    JOIN = "join"  # follower: waits for the leader's marker
    WRITING = "writing"  # shard files of the local ranks
    VOTING = "voting"  # index of each local rank
    COLLECTING = "gathering"  # leader: waits for the indexes of all ranks
    SEALING = "sealing"  # leader: files of the whole, then the manifest
    PUBLISHING = "publishing"  # leader: lifts the marker
    AWAITING = "awaiting"  # follower: waits until the marker is gone
    GIVING_UP = "giving up"  # tells the others why
    COMMITTED = "committed"
    KEPT = "kept"  # this step was committed before, and stays as it is
    FAILED = "failed"


class Event(Enum):
    LEAD = "lead"
    FOLLOW = "follow"
    DONE = "done"
    EXISTS = "exists"
    ERROR = "error"


FINAL = frozenset({State.COMMITTED, State.KEPT, State.FAILED})

_S, _E = State, Event
LEADER: Mapping[tuple[State, Event], State] = {
    (_S.NEW, _E.LEAD): _S.CLAIMING,
    (_S.CLAIMING, _E.DONE): _S.WRITING,
    (_S.CLAIMING, _E.EXISTS): _S.KEPT,
    (_S.WRITING, _E.DONE): _S.VOTING,
    (_S.VOTING, _E.DONE): _S.COLLECTING,
    (_S.COLLECTING, _E.DONE): _S.SEALING,
    (_S.SEALING, _E.DONE): _S.PUBLISHING,
    (_S.PUBLISHING, _E.DONE): _S.COMMITTED,
    # Its marker may stand by then, and followers wait behind that.
    (_S.CLAIMING, _E.ERROR): _S.GIVING_UP,
    (_S.WRITING, _E.ERROR): _S.GIVING_UP,
    (_S.VOTING, _E.ERROR): _S.GIVING_UP,
    (_S.COLLECTING, _E.ERROR): _S.GIVING_UP,
    (_S.SEALING, _E.ERROR): _S.GIVING_UP,
    (_S.PUBLISHING, _E.ERROR): _S.GIVING_UP,
    (_S.GIVING_UP, _E.DONE): _S.FAILED,
    (_S.GIVING_UP, _E.ERROR): _S.FAILED,
}
FOLLOWER: Mapping[tuple[State, Event], State] = {
    (_S.NEW, _E.FOLLOW): _S.JOIN,
    (_S.JOIN, _E.DONE): _S.WRITING,
    (_S.JOIN, _E.EXISTS): _S.KEPT,
    # The leader may have begun to wait by then.
    (_S.JOIN, _E.ERROR): _S.GIVING_UP,
    (_S.WRITING, _E.DONE): _S.VOTING,
    (_S.VOTING, _E.DONE): _S.AWAITING,
    (_S.AWAITING, _E.DONE): _S.COMMITTED,
    (_S.WRITING, _E.ERROR): _S.GIVING_UP,
    (_S.VOTING, _E.ERROR): _S.GIVING_UP,
    # The vote stands: whether the save succeeds is now the leader's to say.
    (_S.AWAITING, _E.ERROR): _S.FAILED,
    (_S.GIVING_UP, _E.DONE): _S.FAILED,
    (_S.GIVING_UP, _E.ERROR): _S.FAILED,
}


def next_state(state: State, event: Event, *, leads: bool) -> State:
    """The protocol.  An event that the table does not foresee is a bug of ours."""
    table = LEADER if leads else FOLLOWER
    try:
        return table[state, event]
    except KeyError:
        role = "leader" if leads else "follower"
        raise InternalError(f"commit: {role} in state {state.value!r} saw event {event.value!r}.") from None
