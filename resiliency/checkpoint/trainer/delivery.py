# SPDX-License-Identifier: Apache-2.0
"""What becomes of captures: handed to the agent once they are whole, and followed until all tiers reported.

The capturer's publisher passes captures on, the link's thread hears the agent; training waits for neither.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

from resiliency.checkpoint.agent.client import AgentLink, LinkOptions
from resiliency.checkpoint.agent.protocol import Attach, Copies, Done, SaveRequest, Skip
from resiliency.checkpoint.capture.capturer import Capture, Capturer, FoundCapture, Outcome
from resiliency.checkpoint.names import TierName, TierTry
from resiliency.checkpoint.trainer.handles import SaveHandle, SaveLog, SaveState, TierOutcomes
from resiliency.events import EventType
from resiliency.progress import report_kept
from resiliency.runtime import awake_s

logger = logging.getLogger(__name__)

#: Saves whose copies are still told of; more than can be under way.
_REMEMBERED = 16


@dataclass(kw_only=True, eq=False)
class _Saving:
    """One capture on its way into its tiers.

    `asked_again`: a second agent was asked to save it to the local tier.
    """

    handle: SaveHandle
    capture: Capture | FoundCapture
    patient: bool
    outcomes: TierOutcomes
    asked_again: bool = False


class Delivery:
    """One rank's saves between their capture and their end.

    Args:
        arena: of the job.
        capturer: makes the captures; closed before `link` is.
        emit: reports events, from any thread.
        on_commit: hears, from any thread, how long a save took from its capture until a tier had it.
        options: of the link to the agent.
    """

    def __init__(
        self,
        arena: Path,
        attach: Attach,
        capturer: Capturer,
        *,
        emit: Callable[..., None],
        options: LinkOptions,
        on_commit: Callable[[TierName, float], None] = lambda tier, commit_s: None,
    ) -> None:
        self._attach = attach
        self._capturer = capturer
        self._emit = emit
        self._on_commit = on_commit
        self.log = SaveLog()
        #: Newest step that is whole in memory; -1: none.
        self.captured_step = -1
        self._committed_step = -1
        #: Of each tier whose storage hangs, what the agent said first.
        self._hangs: dict[str, str] = {}
        #: The last saves to the local tier and their tries, which hear more after their end.
        self._local_saves: dict[int, tuple[SaveHandle, ...]] = {}
        #: Newest step that was told to be complete on all hosts.
        self._complete_step = -1
        self._lock = threading.Lock()
        self._under_way: dict[TierTry, _Saving] = {}
        self.link = AgentLink(
            arena,
            attach,
            starts=attach.rank == min(attach.local_ranks),
            on_done=self._done,
            on_lost=self._lost,
            on_copies=self._copied,
            options=options,
        )

    @property
    def is_spent(self) -> bool:
        """Whether the newest capture is committed in some tier."""
        return self.captured_step <= self._committed_step

    @property
    def why_full(self) -> str:
        """Why no slot is free for a capture."""
        # Of two slots, say: one is lent to a call that does not return, in the other is the newest capture.
        if hangs := dict(self._hangs):
            return f"no slot is free: {'; '.join(hangs.values())}"
        return "storage is slower than the interval: all slots still wait to be written"

    def send(self, handle: SaveHandle, capture: Capture | FoundCapture, *, patient: bool) -> None:
        """Follow a save from here on.

        Args:
            patient: see `SaveRequest`.
        """
        step, tiers, number = handle.step, handle.record.tiers, handle.try_number
        saving = _Saving(handle=handle, capture=capture, patient=patient, outcomes=TierOutcomes(tiers))
        with self._lock:
            self._under_way.update({TierTry(step, number, tier): saving for tier in tiers})
            if TierName.LOCAL.value in tiers:
                before = self._local_saves.get(step, ())
                if before:  # its copies are not told of again
                    known = before[-1].record
                    handle.update(copies_on=known.copies_on, complete=known.complete)
                self._local_saves[step] = (*before, handle)
            if len(self._local_saves) > _REMEMBERED:
                del self._local_saves[min(self._local_saves)]
        self._capturer.call_after_captures(partial(self._post, saving))

    def not_captured(self, handle: SaveHandle, state: SaveState, why: str, held_s: float) -> None:
        """A save ended before it began; the agent tells the other ranks."""
        # After the captures before it: the agent takes a rank's steps to come in order.
        reason = f"rank {self._attach.rank}: {why}"
        tiers, number = handle.record.tiers, handle.try_number
        skip = Skip(step=handle.step, tiers=tiers, reason=reason, try_number=number)
        self._capturer.call_after_captures(partial(self.link.request, skip))
        logger.warning("save of step %d %s: %s", handle.step, state.value, why)
        self._emit(EventType.SAVE_FAILED, handle.step, cause=why, outcome=state.value)
        self.log.add(replace(handle.record, state=state, why=why, held_s=held_s))
        handle.update(state=state, why=why, held_s=held_s)

    def wait(self, timeout: timedelta) -> bool:
        """Wait until no save is under way; False at the timeout."""
        deadline = awake_s() + timeout.total_seconds()
        with self._lock:
            handles = [saving.handle for saving in self._under_way.values()]
        return all(h.wait(timedelta(seconds=max(0.0, deadline - awake_s()))) for h in handles)

    def went_back(self, timeout: timedelta) -> None:
        """See the saves off that are under way; what is saved from here on is of another branch."""
        if not self.wait(timeout):
            with self._lock:
                left = sorted(self._under_way)
            for tried in left:
                self._finish(tried, "the job went back to an earlier step before it was committed")
        with self._lock:
            self._local_saves.clear()
        self.captured_step = self._committed_step = self._complete_step = -1

    def await_last_copies(self, timeout: timedelta) -> None:
        """Let the last step become complete before the hosts go apart."""
        attach = self._attach
        if not attach.settings.replicas or attach.is_alone:
            return
        last = self._local_saves[max(self._local_saves)][-1] if self._local_saves else None
        if last is not None and "local" in last.record.committed_in and not last.wait_complete(timeout):
            logger.error("step %d still lacks copies on other hosts", last.step)

    def metrics_text(self) -> str:
        """Counters of this rank's saves in Prometheus' text format."""
        return self.log.metrics_text(rank=self._attach.rank, agent_losses=self.link.losses)

    # --- the threads -----------------------------------------------------------------------------

    def _post(self, saving: _Saving) -> None:
        """In the publisher's thread: tell the agent what became of a capture."""
        try:
            why = self._pass_on(saving)
        except Exception as error:  # a border: this save fails by name, and the publisher goes on
            logger.exception("the capture of step %d was not passed on", saving.handle.step)
            why = f"its capture was not passed on: {error!r}"
        if not why:
            return
        handle, reason = saving.handle, f"rank {self._attach.rank}: {why}"
        skip = Skip(step=handle.step, tiers=handle.record.tiers, reason=reason, try_number=handle.try_number)
        try:
            self.link.request(skip)
        finally:
            for tried in skip.tries:
                self._finish(tried, reason)

    def _pass_on(self, saving: _Saving) -> str:
        """Ask the agent for a save; returns why there is none to ask for."""
        capture, handle = saving.capture, saving.handle
        if capture.outcome is not Outcome.CAPTURED:
            return f"its capture was dropped: {capture.error}"
        self.captured_step = capture.step
        handle.update(state=SaveState.CAPTURED)
        self.link.request(
            SaveRequest(
                step=capture.step,
                slot=capture.slot_path.name,
                tiers=handle.record.tiers,
                try_number=handle.try_number,
                patient=saving.patient,
            )
        )
        return ""

    def _done(self, done: Done) -> None:
        """In the link's thread: the agent reports the end of a save in one tier."""
        if not done.hangs:
            self._hangs.pop(done.tier, None)
        elif done.tier not in self._hangs:
            self._hangs[done.tier] = f"at step {done.step}, {done.error}"
        self.log.set_hung(len(self._hangs))
        self._finish(
            done.tried,
            done.error,
            left_out=done.left_out,
            queued_s=done.queued_s,
            commit_s=done.commit_s,
        )

    def _lost(self, why: str, tries: frozenset[TierTry]) -> list[SaveRequest]:
        """In the link's thread: an agent is gone, with the saves that it held; returns what to ask the next.

        To the local tier this host saves alone, so its next agent can still do it.  For the persistent one
        other hosts wait.
        """
        self._hangs.clear()
        self.log.set_hung(0)
        saves = []
        for tried in sorted(tries):
            save = self._save_of(tried) if tried.tier == TierName.LOCAL.value else None
            if save is None:
                self._finish(tried, why)
            else:
                saves.append(save)
        return saves

    def _save_of(self, tried: TierTry) -> SaveRequest | None:
        """The next agent may save the local part of a step, once."""
        step, number, tier = tried
        with self._lock:
            saving = self._under_way.get(tried)
            if saving is None or saving.capture.outcome is not Outcome.CAPTURED or saving.asked_again:
                return None
            saving.asked_again = True
        logger.info("the next agent is asked to save step %d to the local tier", step)
        slot = saving.capture.slot_path.name
        return SaveRequest(step=step, slot=slot, tiers=(tier,), try_number=number, patient=True, again=True)

    def _copied(self, copies: Copies) -> None:
        """In the link's thread: what became of a step in the local tier after its commit."""
        self.log.add_copies(
            verified=len(copies.hosts),
            missing=bool(copies.error),
            complete_step=copies.step if copies.complete else 0,
        )
        if copies.error:
            logger.warning("step %d lacks copies on other hosts: %s", copies.step, copies.error)
        with self._lock:
            handles = self._local_saves.get(copies.step, ())
            # Another agent, or the same one to a rank that comes back, repeats what it knows.
            is_reported = any(handle.record.complete for handle in handles)
            is_news = copies.complete and not (is_reported if handles else copies.step <= self._complete_step)
            if copies.complete:
                self._complete_step = max(self._complete_step, copies.step)
                self._committed_step = max(self._committed_step, copies.step)
                if self._attach.settings.replicated:  # ranks of another number cannot go on from local shards
                    report_kept(copies.step)
            for handle in handles:
                hosts = dict.fromkeys((*handle.record.copies_on, *copies.hosts))
                handle.update(copies_on=tuple(hosts), complete=handle.record.complete or copies.complete)
        if is_news and self._attach.rank == 0:
            self._emit(EventType.CHECKPOINT_SAVED, copies.step, tier=TierName.LOCAL.value)

    def _can_stand_alone(self, saving: _Saving, tier: str) -> bool:
        """Whether a committed save outlives the captures in memory.

        The parts of other hosts may still be in their memory: under the name of this save, unless a start
        before this one made the capture.
        """
        is_found = isinstance(saving.capture, FoundCapture)
        return not is_found or self._attach.is_alone or tier == TierName.PERSISTENT.value

    def _finish(
        self,
        tried: TierTry,
        error: str = "",
        *,
        left_out: bool = False,
        queued_s: float = 0.0,
        commit_s: float = 0.0,
    ) -> None:
        """One tier has ended its part of a save."""
        step, _, tier = tried
        with self._lock:
            saving = self._under_way.pop(tried, None)
            if saving is None:  # reported before, or settled when it was not captured
                return
            saving.outcomes.report(tier, error, left_out=left_out, queued_s=queued_s, commit_s=commit_s)
            changes, is_final = saving.outcomes.changes(), saving.outcomes.are_final
        if error:
            outcome = (SaveState.SKIPPED if left_out else SaveState.FAILED).value
            logger.warning("save of step %d %s in the %s tier: %s", step, outcome, tier, error)
            self._emit(EventType.SAVE_FAILED, step, cause=error, outcome=outcome, tier=tier)
        else:
            if tier == TierName.PERSISTENT.value:
                report_kept(step)
            if self._can_stand_alone(saving, tier):
                self._committed_step = max(self._committed_step, step)
            if commit_s:  # 0: there was nothing left to do
                self._on_commit(TierName(tier), queued_s + commit_s)
            # A local tier has the step when all hosts have it.
            if self._attach.rank == 0 and tier == TierName.PERSISTENT.value:
                self._emit(EventType.CHECKPOINT_SAVED, step, tier=tier)
        if is_final:
            saving.capture.release()
            self.log.add(replace(saving.handle.record, **changes))
        saving.handle.update(**changes)
