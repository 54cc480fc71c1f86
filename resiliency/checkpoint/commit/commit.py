# SPDX-License-Identifier: Apache-2.0
"""Commits a checkpoint on a storage, by the protocol of `resiliency.checkpoint.commit.protocol`.

A checkpoint counts as existing when its directory ``step=N`` holds a manifest and no marker
``step=N-unfinished`` stands beside it.  The order of operations, each durable before the next:

    folder of the save -> marker -> shard files -> index of each rank -> manifest -> marker lifted

so a kill at any point leaves what was committed before untouched and the new step either whole
or hidden.  The leader (the agent of rank 0) makes the folder, places the marker, waits for the indexes of all
ranks and lifts it; the others follow through the files alone: no network, no collectives, no link.  Of many
ranks the votes come in blocks (`resiliency.checkpoint.commit.vote_blocks`).

A process that is late, leader or follower, touches nothing that another save has committed: it writes in the
folder of its own save, and that went when the step was opened again (`resiliency.checkpoint.format.claim`).

All ranks of one save pass the same `save_id`, and no two saves share one (run, attempt and step
make one without talking): files that a dead attempt left at the same step are never counted.

A save that failed may be tried again, under its id.  What stands then is the leader's word on the try
before, and a follower may see it before the leader has cleared it; or a follower is late with its part of a
try that the leader has left.  So all ranks number the tries alike; the leader's markers, and the votes and
refusals of followers carry the save's id and the number, and nobody heeds what is of another save or an
earlier try: a vote that lands late speaks of files that went with its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Generic, Protocol, TypeVar

from resiliency.checkpoint.branches import Branches
from resiliency.checkpoint.commit.protocol import FINAL, Event, State, next_state
from resiliency.checkpoint.commit.vote_blocks import (
    COLLECTED_WITHIN_S,
    BlockCollector,
    Vote,
    block_name,
    blocks_of,
    is_all_there,
    try_read_block,
)
from resiliency.checkpoint.format.claim import StepClaim, StepLook, StepTaken, holds_more_than_claims, look_at
from resiliency.checkpoint.format.manifest import (
    MANIFEST,
    Manifest,
    RankIndex,
    index_name,
    read_manifest,
    save_folder,
    show_files,
    try_read_index,
    write_index,
    write_manifest,
)
from resiliency.checkpoint.format.marker import (
    UNNUMBERED,
    Marker,
    MarkerState,
    read_marker,
    step_directory,
    try_read_marker,
)
from resiliency.checkpoint.format.writers import find_writers
from resiliency.checkpoint.storage.chunked_file import FileRecord
from resiliency.checkpoint.storage.interface import Storage, write_file
from resiliency.checkpoint.storage.posix import any_failed
from resiliency.checkpoint.threads import map_parallel, run_parallel
from resiliency.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointIncomplete,
    CheckpointWriteFailed,
    ConfigError,
    InternalError,
    ResiliencyError,
)
from resiliency.runtime import Clock, SystemClock

ShardT = TypeVar("ShardT", contravariant=True)

#: Longest pause between two looks at the storage; each is about a tenth of the wait so far.
_LONGEST_PAUSE_S = 1.0
#: How long an overtaken save waits for others at least.
_LAST_WAIT_S = 3.0
#: Ends the name of a vote that is not durable.
_NO_VOTE = ".unsynced"
#: Before each further try to tell others of a failure: else they wait for the whole timeout of the save.
_TELL_AGAIN_S = (0.02, 0.1)


class CheckpointFormat(Protocol[ShardT]):
    """How the bytes of a checkpoint are laid out; the protocol is the same for all."""

    @property
    def name(self) -> str: ...

    def write_rank(
        self, storage: Storage, directory: str, shard: ShardT, *, run_id: str, save_id: str
    ) -> RankIndex:
        """Write and sync the files of one rank; `directory` is the folder of the save, and names in the index
        are as if it were the checkpoint."""
        ...

    def seal(self, storage: Storage, directory: str, indexes: Sequence[RankIndex]) -> Sequence[FileRecord]:
        """Write and sync files that describe the checkpoint as a whole, into the folder of the save; leader
        only.  `directory` is the checkpoint's, and names are those that the files get there."""
        ...


@dataclass(frozen=True, kw_only=True)
class SaveTicket:
    """What all ranks of one save agree on beforehand.

    Args:
        save_id: the same on all ranks, and for all tries of one save; part of a file's name.
        try_number: from 1, the same on all ranks; a later try may begin while a rank is still at its part of
            the one before.
        ranks: ranks that must vote; on a local tier those of this host.
        restored_save: the save that this start of the job went on from; empty: none.  Where it stands at
            this step it is the one to save; any other, at any step, may be of a branch that the job has left.
        branches: of the job.  A save at this step that was left is the leader's to remove before it begins.
        is_same: compares what stands at this step with the state to save, where they may be the same under
            other names; None: they are not.
        timeout: longest wait for other ranks, counted from the start of this process's part.
        poll: first pause between looks at the storage while waiting for others; later ones are longer.
    """

    step: int
    run_id: str
    save_id: str
    world_size: int
    ranks: Collection[int]
    try_number: int = 1
    restored_save: str = ""
    branches: Branches = field(default_factory=Branches)
    is_same: Callable[[], bool] | None = None
    timeout: timedelta = timedelta(minutes=10)
    poll: timedelta = timedelta(milliseconds=50)

    @property
    def folder(self) -> str:
        """Where all ranks write."""
        return save_folder(self.save_id, self.try_number)

    def __post_init__(self) -> None:
        outside = [rank for rank in self.ranks if not 0 <= rank < self.world_size]
        is_name = self.save_id and "/" not in self.save_id
        if outside or not self.ranks or self.step < 0 or not is_name or self.try_number < 1:
            raise CheckpointError(
                f"a save needs a step >= 0, a save id without '/', a try >= 1 and ranks in"
                f" 0..{self.world_size - 1}, found step {self.step}, save id {self.save_id!r},"
                f" try {self.try_number}, ranks {sorted(self.ranks)}.",
                step=self.step,
            )


@dataclass(frozen=True, kw_only=True)
class Committed:
    """Outcome of a save.  `kept` is True when the step had been committed before."""

    step: int
    kept: bool
    size_bytes: int


def open_save(
    storage: Storage,
    step: int,
    save_id: str,
    try_number: int = UNNUMBERED,
    *,
    run_id: str = "",
    until: int = 0,
    folder: str = "",
    replaces: bool = False,
) -> StepClaim:
    """Hide `step` and empty its directory; its ranks may write once this returns.

    For the leader, and only where nothing stands that is worth keeping.

    Args:
        run_id, until: see `Marker`.
        folder: of the save; default: see `save_folder`.
        replaces: also a committed checkpoint, such as a copy of what its owner saved again.
    Raises:
        CheckpointWriteFailed: a committed checkpoint is there, another process has taken the step meanwhile,
            or the storage refused.
        CheckpointCorrupt: the storage does not say what is there.
    """
    claim = StepClaim(storage, step, folder or save_folder(save_id, try_number))
    marker = Marker(
        state=MarkerState.WRITING, save_id=save_id, try_number=try_number, run_id=run_id, until=until
    )
    began_before = storage.exists(claim.place)
    seen = look_at(storage, step)
    for is_last in (False, False, True):
        _check_free(storage, step, seen, replaces)
        claim.take()
        before, seen = seen, look_at(storage, step)
        if seen == before:
            break
        # The end of a removal alone, such as another program's, is no save that came before this one.
        is_removal = seen.marker is None or seen.marker.state is MarkerState.REMOVING
        if is_last or not is_removal or seen.commit != before.commit:
            raise claim.overtaken()
    if seen.marker is not None or began_before or claim.others():
        # Followers must not write before the leftovers are gone: the marker that names this
        # save, which they wait for, comes after.
        committed = _hide(storage, claim, seen, replace(marker, state=MarkerState.CLEARING))
        claim.clear(own=True, committed=committed)
        claim.mark(marker)
    else:
        _hide(storage, claim, seen, marker)
        claim.clear()  # what has come since
    return claim


def _check_free(storage: Storage, step: int, seen: StepLook, replaces: bool) -> None:
    if seen.marker is None and seen.manifest is not None and not replaces:
        path = storage.describe(step_directory(step))
        raise CheckpointWriteFailed(
            f"{path} holds a committed checkpoint, which is not overwritten.",
            hint="Save to another directory, or move the old checkpoint away.",
            path=path,
            step=step,
        )


def _hide(storage: Storage, claim: StepClaim, seen: StepLook, marker: Marker) -> list[str]:
    """Put the marker, unless something was committed since a look; returns folders that were before it."""
    claim.mark(marker)
    committed = claim.committed(claim.others()) if marker.state is MarkerState.CLEARING else []
    if look_at(storage, claim.step).commit != seen.commit:
        claim.take_back(marker)
        raise claim.overtaken()
    return committed


def commit(
    storage: Storage,
    format: CheckpointFormat[ShardT],
    ticket: SaveTicket,
    shards: Mapping[int, ShardT],
    *,
    leads: bool,
    clock: Clock | None = None,
    cancel: threading.Event | None = None,
    overtaken: threading.Event | None = None,
) -> Committed:
    """Write the shards of this process's ranks and see the checkpoint committed.

    Returns when the checkpoint is durable and visible, on followers too.  When this raises, the
    step is hidden (or as it was, if it had been committed before) and nothing older was touched.

    Args:
        shards: rank to what `format` writes for it.
        leads: True in exactly one process of the save.
        cancel: ends the waits early and lets nothing more begin but what tells others that the save failed.
        overtaken: others may be gone, and something waits for this save to end: it waits for them no longer
            than its own part took, and 3 s at least.
    Raises:
        CheckpointWriteFailed: the storage refused, here or at another rank; or something else stands at
            this step; or the save was cancelled or overtaken.
        CheckpointIncomplete: the deadline passed; the message names the ranks that did not vote.
        ResourceShortage, InternalError: anything else failed here; the other hosts get it as a refusal.
    """
    return _Save(storage, format, ticket, shards, leads, clock or SystemClock(), cancel, overtaken).run()


class _Save(Generic[ShardT]):
    """Performs the action of each state; what happens next is the table's to say."""

    def __init__(
        self,
        storage: Storage,
        format: CheckpointFormat[ShardT],
        ticket: SaveTicket,
        shards: Mapping[int, ShardT],
        leads: bool,
        clock: Clock,
        cancel: threading.Event | None,
        overtaken: threading.Event | None,
    ) -> None:
        self._storage = storage
        self._format = format
        self._ticket = ticket
        self._shards = shards
        self._leads = leads
        self._clock = clock
        self._cancel = cancel or threading.Event()
        self._overtaken = overtaken or threading.Event()
        self._worked_s = 0.0
        self._deadline = clock.monotonic() + ticket.timeout.total_seconds()
        self._directory = step_directory(ticket.step)
        self._claimed = StepClaim(storage, ticket.step, ticket.folder)
        #: Where all ranks write.
        self._place = self._claimed.place
        self._until = int((clock.now() + ticket.timeout).timestamp())
        self._indexes: dict[int, RankIndex] = {}
        self._digests: dict[int, str] = {}
        self._error: ResiliencyError | None = None
        self._blocks = blocks_of(ticket.ranks)
        #: Leader: of blocks that nobody has collected, by their first rank, when all their votes were there.
        self._all_there_since: dict[int, float] = {}
        #: Leader: its marker does not stand yet, nor can one of a later save.
        self._is_claiming = False

    def run(self) -> Committed:
        actions: dict[State, Callable[[], Event]] = {
            State.CLAIMING: self._claim,
            State.JOIN: self._join,
            State.WRITING: self._write,
            State.VOTING: self._vote,
            State.COLLECTING: self._gather,
            State.SEALING: self._seal,
            State.PUBLISHING: self._publish,
            State.AWAITING: self._await,
            State.GIVING_UP: self._give_up,
        }
        state = next_state(State.NEW, Event.LEAD if self._leads else Event.FOLLOW, leads=self._leads)
        while state not in FINAL:
            try:
                self._check_cancel(state)
                event = actions[state]()
            except Exception as error:  # the border of this part: other hosts wait for its outcome
                failure = any_failed(error, f"save step {self._ticket.step} in", self._storage.describe())
                # The first failure is the cause; failing to report it is not.
                self._error = self._error or failure
                event = Event.ERROR
            state = next_state(state, event, leads=self._leads)
        if state is State.FAILED:
            raise self._error or InternalError("a save failed without an error.")
        return Committed(
            step=self._ticket.step,
            kept=state is State.KEPT,
            size_bytes=sum(index.size_bytes for index in self._indexes.values()),
        )

    def _check_cancel(self, state: State) -> None:
        if self._cancel.is_set() and state is not State.GIVING_UP:
            raise self._cancelled(f"before {state.value}")

    def _cancelled(self, when: str) -> CheckpointWriteFailed:
        step = self._ticket.step
        return CheckpointWriteFailed(f"step {step}: the save was cancelled {when}.", step=step)

    # --- leader --------------------------------------------------------------------------------

    def _claim(self) -> Event:
        storage, step = self._storage, self._ticket.step
        self._is_claiming = True
        storage.make_dir("")
        if read_marker(storage, step) is None and holds_more_than_claims(storage, step):
            self._check_kept()
            return Event.EXISTS
        ticket = self._ticket
        open_save(storage, step, ticket.save_id, ticket.try_number, run_id=ticket.run_id, until=self._until)
        self._is_claiming = False
        return Event.DONE

    def _check_kept(self) -> None:
        """What stands at this step without a marker is somebody's only copy: never overwrite it."""
        try:
            manifest = read_manifest(self._storage, self._directory)
        except (CheckpointIncomplete, CheckpointCorrupt, ConfigError) as error:
            raise self._occupied(
                f"exists and was not written by this library, or is damaged: {error.message}"
            ) from error
        self._check_run(manifest)
        self._check_branch(manifest)

    def _check_run(self, manifest: Manifest) -> None:
        if manifest.run_id != self._ticket.run_id:
            raise self._occupied(
                f"is a checkpoint of run {manifest.run_id!r}, this is run {self._ticket.run_id!r}."
            )

    def _occupied(self, why: str) -> CheckpointWriteFailed:
        path = self._storage.describe(self._directory)
        return CheckpointWriteFailed(
            f"{path} {why}",
            hint="Save to another directory, or move the old checkpoint away.",
            path=path,
            step=self._ticket.step,
        )

    def _gather(self) -> Event:
        missing = set(self._ticket.ranks) - self._indexes.keys()

        unlisted: CheckpointCorrupt | None = None

        def all_voted() -> bool:
            nonlocal unlisted
            if not missing:
                return True
            try:
                names = {f"{self._place}/{name}" for name in self._storage.list(self._place)}
            except CheckpointCorrupt as error:  # the next look may fare better
                unlisted = error
                return False
            unlisted = None
            if not names:  # not even its own indexes: the folder is gone
                raise self._claimed.overtaken()
            for rank in sorted(missing):
                self._check_refusal(rank, names)
            for vote in self._votes(missing, names):
                if self._is_vote_of_this_try(vote[0]):
                    self._indexes[vote[0].rank], self._digests[vote[0].rank] = vote
                    missing.discard(vote[0].rank)
            return not missing

        if self._wait(all_voted, lambda: f"ranks {_listed(missing)}"):
            return Event.DONE
        raise CheckpointIncomplete(
            f"step {self._ticket.step}: {len(missing)} of {len(self._ticket.ranks)} ranks did not finish "
            f"writing within {self._ticket.timeout.total_seconds():g} s: {_listed(missing)}.",
            hint="Older checkpoints are untouched; look at the logs of these ranks.",
            step=self._ticket.step,
            missing_ranks=sorted(missing),
            path=self._storage.describe(self._directory),
        ) from unlisted

    def _votes(self, missing: set[int], names: Collection[str]) -> list[Vote]:
        """What is there of the votes that are missed: see `resiliency.checkpoint.commit.vote_blocks`."""
        found: list[Vote] = []
        singly: list[int] = []
        for number, block in enumerate(self._blocks):
            if missing.isdisjoint(block):
                continue
            is_own = number == 0 or block[0] in self._shards
            is_collected = not is_own and block_name(self._place, block) in names
            votes = try_read_block(self._storage, self._place, block) if is_collected else None
            if votes is not None:
                found += votes
            elif is_own or self._is_left_to_leader(block, names):
                singly += (rank for rank in block if rank in missing)
        voters = [rank for rank in singly if index_name(self._place, rank) in names]
        # The head: tables that are not known from the save before are read when the save is sealed.
        read = map_parallel(
            lambda rank: try_read_index(self._storage, self._place, rank), voters, "resiliency-votes"
        )
        return [*found, *(vote for vote in read if vote is not None)]

    def _is_left_to_leader(self, block: Sequence[int], names: Collection[str]) -> bool:
        """Whether all its votes have been there for long, and nobody has collected them."""
        if not is_all_there(self._place, block, names):
            return False
        now = self._clock.monotonic()
        return now - self._all_there_since.setdefault(block[0], now) >= COLLECTED_WITHIN_S

    def _is_vote_of_this_try(self, index: RankIndex) -> bool:
        ticket = self._ticket
        return (index.save_id, index.try_number) == (ticket.save_id, ticket.try_number)

    def _check_refusal(self, rank: int, names: Collection[str]) -> None:
        name = self._refusal_name(rank)
        if name in names:
            raise CheckpointWriteFailed(
                f"step {self._ticket.step}: rank {rank} could not write its part.",
                hint=f"Its reason is in {self._storage.describe(name)} and in its log.",
                step=self._ticket.step,
                rank=rank,
            )

    def _seal(self) -> Event:
        ordered = [self._indexes[rank] for rank in sorted(self._indexes)]
        files = self._format.seal(self._storage, self._directory, ordered)
        # The proof that each entry of each rank was written, whatever the format.
        written_by = find_writers(ordered)
        sizes = [file.size_bytes for file in files] + [index.size_bytes for index in ordered]
        manifest = Manifest(
            step=self._ticket.step,
            run_id=self._ticket.run_id,
            save_id=self._ticket.save_id,
            world_size=self._ticket.world_size,
            format=self._format.name,
            ranks=dict(sorted(self._digests.items())),
            files=tuple(files),
            created=self._clock.now().isoformat(timespec="seconds"),
            size_bytes=sum(sizes),
            written_by=written_by,
            folder=self._ticket.folder,
        )
        write_manifest(self._storage, self._place, manifest)
        shown = [*(file.name for file in files), *(name for index in ordered for name in index.shown)]
        self._storage.sync_dir(self._place)
        with self._claimed.changing():
            show_files(self._storage, self._directory, self._ticket.folder, [*shown, MANIFEST])
        self._storage.sync_dir(self._directory)
        return Event.DONE

    def _publish(self) -> Event:
        is_own = read_manifest(self._storage, self._directory).folder == self._ticket.folder
        # That it can be lifted says that no other save has opened the step since.
        if not is_own or not self._claimed.try_lift(self._is_own_marker):
            raise self._claimed.overtaken()
        return Event.DONE

    # --- follower ------------------------------------------------------------------------------

    def _join(self) -> Event:
        found: list[Event] = []

        def open_for_us() -> bool:
            marker = try_read_marker(self._storage, self._ticket.step)
            if marker is None:
                found[:] = [Event.EXISTS]
                return self._is_committed(of_this_save=False)
            found[:] = [Event.DONE]
            return self._heeds(marker) and marker.state is MarkerState.WRITING

        if not self._wait(open_for_us, lambda: "the leader"):
            raise self._leader_silent("did not open the save")
        return found[0]

    def _await(self) -> Event:
        to_collect = [
            BlockCollector(self._storage, self._place, block, self._is_vote_of_this_try)
            for block in self._blocks[1:]
            if block[0] in self._shards
        ]

        def published() -> bool:
            with suppress(CheckpointError):  # then the leader reads the votes one by one
                to_collect[:] = [block for block in to_collect if not block.try_collect()]
            marker = try_read_marker(self._storage, self._ticket.step)
            if marker is None:
                return self._is_committed(of_this_save=True)
            self._check_not_replaced(marker)
            self._heeds(marker)
            return False

        if not self._wait(published, lambda: "the leader"):
            raise self._leader_silent("did not commit")
        return Event.DONE

    def _is_committed(self, *, of_this_save: bool) -> bool:
        try:
            manifest = read_manifest(self._storage, self._directory)
        except (CheckpointIncomplete, CheckpointCorrupt, ConfigError):
            return False
        if of_this_save:
            if manifest.save_id != self._ticket.save_id:
                raise self._claimed.overtaken()
            return True
        if not self._ticket.branches.is_live(self._ticket.step, manifest.save_id):
            return False
        self._check_run(manifest)  # as on the leader, which has no marker there to say so
        self._check_branch(manifest)
        return True

    def _heeds(self, marker: Marker) -> bool:
        """Whether the leader's word is on this try: what it said of an earlier one is over.

        Raises:
            CheckpointWriteFailed: it has given this try up.
        """
        if self._is_overtaken(marker):
            raise CheckpointWriteFailed(
                f"step {self._ticket.step}: this part is of try {self._ticket.try_number}, and its leader is"
                f" at try {marker.try_number} by now.",
                step=self._ticket.step,
            )
        if not self._is_of_this_try(marker):
            return False
        if marker.state is MarkerState.FAILED:
            raise CheckpointWriteFailed(
                f"step {self._ticket.step}: the save was given up by its leader: {marker.reason}",
                step=self._ticket.step,
            )
        return True

    def _is_of_this_save(self, marker: Marker) -> bool:
        return marker.save_id == self._ticket.save_id

    def _is_of_this_try(self, marker: Marker) -> bool:
        return self._is_of_this_save(marker) and marker.try_number in (UNNUMBERED, self._ticket.try_number)

    def _is_own_marker(self, marker: Marker) -> bool:
        # That of a removal names the save as well.
        return marker.state is MarkerState.WRITING and self._is_of_this_try(marker)

    def _is_overtaken(self, marker: Marker) -> bool:
        return self._is_of_this_save(marker) and marker.try_number > self._ticket.try_number

    def _check_still_open(self) -> None:
        """The leader may have given up and begun another try, and our files went with the first.

        An index in the second would not be counted; it would only be in the way of the next one's.
        """
        marker = try_read_marker(self._storage, self._ticket.step)
        if marker is None:  # its leader lifts it after this vote
            raise self._claimed.overtaken()
        self._check_not_replaced(marker)
        self._heeds(marker)

    def _check_not_replaced(self, marker: Marker) -> None:
        """Once the leader has opened this save, a marker of another one says that this one is over."""
        is_open = marker.state in (MarkerState.CLEARING, MarkerState.WRITING)
        if is_open and marker.save_id and not self._is_of_this_save(marker):
            raise CheckpointWriteFailed(
                f"step {self._ticket.step}: this part is of save {self._ticket.save_id!r}, and the step is"
                f" being saved as {marker.save_id!r} by now.",
                step=self._ticket.step,
            )

    def _leader_silent(self, what: str) -> CheckpointIncomplete:
        return CheckpointIncomplete(
            f"step {self._ticket.step}: the leader {what} within {self._ticket.timeout.total_seconds():g} s.",
            hint="Do all ranks see the same directory, and does the agent of rank 0 run?",
            step=self._ticket.step,
            missing_ranks=[0],
            path=self._storage.describe(self._directory),
        )

    # --- both ----------------------------------------------------------------------------------

    def _check_branch(self, manifest: Manifest) -> None:
        """What stands here must be the state to save, for it stays and counts as saved.

        It is if this very save is here already, or the one that the job went on from.
        """
        ticket = self._ticket
        is_known = manifest.save_id in (ticket.save_id, ticket.restored_save)
        if not is_known and (ticket.is_same is None or not ticket.is_same()):
            raise self._occupied(
                f"was saved by an earlier start of the job, or before it went back ({manifest.save_id}), and"
                " this state did not go on from it: it stays, and the state of now is not saved."
            )

    def _write(self) -> Event:
        # Side by side: one file after the other would leave the device idle at each sync between them.
        began = self._clock.monotonic()
        tasks = [partial(self._write_rank, shard) for shard in self._shards.values()]
        for index in run_parallel(tasks, "resiliency-rank"):
            self._indexes[index.rank] = index
        self._worked_s = self._clock.monotonic() - began
        return Event.DONE

    def _write_rank(self, shard: ShardT) -> RankIndex:
        with self._claimed.changing():
            index = self._format.write_rank(
                self._storage,
                self._place,
                shard,
                run_id=self._ticket.run_id,
                save_id=self._ticket.save_id,
            )
        return index.placed_in(self._ticket.folder)

    def _vote(self) -> Event:
        if not self._leads:
            self._check_still_open()
        # A vote counts as soon as the leader finds it: what may fail comes before.
        suffix = "" if self._leads else _NO_VOTE
        with self._claimed.changing():
            # Side by side: the syncs of many ranks take little longer than that of one.
            votes = [partial(self._write_vote, rank, suffix) for rank in self._shards]
            for index, digest in run_parallel(votes, "resiliency-vote"):
                self._indexes[index.rank], self._digests[index.rank] = index, digest
            if self._leads:  # it syncs the names once, with that of the manifest
                return Event.DONE
            self._storage.sync_dir(self._place)
            for rank in self._shards:
                name = index_name(self._place, rank)
                self._storage.replace(name + suffix, name)
        return Event.DONE

    def _write_vote(self, rank: int, suffix: str) -> tuple[RankIndex, str]:
        index = replace(self._indexes[rank], try_number=self._ticket.try_number)
        return index, write_index(self._storage, self._place, index, suffix=suffix)

    def _give_up(self) -> Event:
        for pause_s in _TELL_AGAIN_S:
            try:
                self._tell_others(str(self._error))
            except Exception:  # other hosts wait for it, and are not to blame
                self._cancel.wait(pause_s)
            else:
                return Event.DONE
        self._tell_others(str(self._error))
        return Event.DONE

    def _tell_others(self, reason: str) -> None:
        # What cannot be read may be somebody's committed step, which a marker of ours would hide.
        marker = read_marker(self._storage, self._ticket.step)
        if self._leads:
            # Else it came so late that the step is somebody else's, and maybe committed.
            is_ours = marker is not None and self._is_of_this_try(marker)
            may_claim = self._may_claim(marker)
            if may_claim:
                self._claimed.take()
            if may_claim or is_ours or marker == Marker(state=MarkerState.UNKNOWN):
                self._claimed.mark(self._marker(MarkerState.FAILED, reason))
            return
        # Else nobody waits for it; and where no marker stands, it would be in the way of all later saves.
        if marker is not None and self._is_of_this_try(marker) and marker.state is MarkerState.WRITING:
            for rank in self._shards:
                write_file(self._storage, self._refusal_name(rank), reason.encode())

    def _may_claim(self, marker: Marker | None) -> bool:
        """Whether the leader failed before its marker stood, in time, and a marker hides no checkpoint."""
        is_late = isinstance(self._error, StepTaken) or self._clock.monotonic() > self._deadline
        if not self._is_claiming or self._cancel.is_set() or is_late:
            return False
        return marker is not None or not holds_more_than_claims(self._storage, self._ticket.step)

    def _marker(self, state: MarkerState, reason: str = "") -> Marker:
        return Marker(
            state=state,
            save_id=self._ticket.save_id,
            reason=reason,
            try_number=self._ticket.try_number,
            run_id=self._ticket.run_id,
            until=self._until,
        )

    def _refusal_name(self, rank: int) -> str:
        return f"{self._place}/rank={rank}.failed"

    def _wait(self, ready: Callable[[], bool], others: Callable[[], str]) -> bool:
        """Look until `ready`; False when the deadline passed.

        A shared file system tells nobody about changes, so looking is all there is.

        Args:
            others: who is waited for.
        Raises:
            CheckpointWriteFailed: the save was cancelled or overtaken: others are to blame for nothing.
        """
        began = self._clock.monotonic()
        while not ready():
            now = self._clock.monotonic()
            waited_s, left_s = now - began, self._deadline - now
            if self._overtaken.is_set() and waited_s >= max(_LAST_WAIT_S, self._worked_s):
                raise self._given_up_for_others(waited_s, others())
            pause_s = min(max(self._ticket.poll.total_seconds(), waited_s / 10), _LONGEST_PAUSE_S)
            if self._cancel.wait(min(pause_s, max(left_s, 0.0))):
                raise self._cancelled("while it waited for others")
            if left_s <= 0:
                return False
        return True

    def _given_up_for_others(self, waited_s: float, others: str) -> CheckpointWriteFailed:
        step = self._ticket.step
        return CheckpointWriteFailed(
            f"step {step}: {others} did not answer for {waited_s:.0f} s, and the job goes on or ends.",
            hint="Older checkpoints are untouched.",
            step=step,
        )


def _listed(ranks: Collection[int]) -> str:
    return ", ".join(str(rank) for rank in sorted(ranks))
