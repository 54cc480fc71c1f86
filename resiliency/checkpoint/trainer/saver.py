# SPDX-License-Identifier: Apache-2.0
"""The saves of one rank as training sees them: which tiers a step is for, its capture, and what it cost.

Used by the training thread alone.  What becomes of a capture is for `resiliency.checkpoint.trainer.delivery`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from resiliency.checkpoint.capture.capturer import Capture, Capturer, FoundCapture, WhenFull
from resiliency.checkpoint.capture.cuda import is_recording
from resiliency.checkpoint.capture.owned_memory import takes_hooks, unwrapped, why_unfenced
from resiliency.checkpoint.names import TierName
from resiliency.checkpoint.trainer.delivery import Delivery
from resiliency.checkpoint.trainer.handles import FINAL, SaveHandle, SaveState
from resiliency.checkpoint.trainer.intervals import IntervalAdvice
from resiliency.checkpoint.trainer.options import CheckpointerOptions
from resiliency.checkpoint.trainer.schedule import Schedule
from resiliency.checkpoint.trainer.step_times import Excess, StepTimes
from resiliency.errors import ConfigError
from resiliency.events import EventType

logger = logging.getLogger(__name__)


class Saver:
    """Begins saves, and numbers the tries of a step; all ranks alike, as they save alike.

    Args:
        tiers: that the job has.
        is_alone: what this rank knows of a save is what all ranks know.
        optimizers: that write the state without being part of it, see `Checkpointer`.
        emit: reports events.
    """

    def __init__(
        self,
        capturer: Capturer,
        delivery: Delivery,
        schedule: Schedule,
        *,
        tiers: tuple[str, ...],
        is_alone: bool,
        optimizers: Iterable[Any],
        options: CheckpointerOptions,
        emit: Callable[..., None],
    ) -> None:
        self._capturer = capturer
        self._delivery = delivery
        self._schedule = schedule
        self.tiers = tiers
        self._is_alone = is_alone
        self._optimizers = list(optimizers)
        self._options = options
        self._emit = emit
        #: The optimizers that fence, by identity, with the handles of their hooks.
        self._hooks: dict[int, tuple[Any, Any]] = {}
        self._has_warned = False
        #: Of each of them why its fence cannot be relied upon; empty: it can.
        self._unfenced: dict[int, str] = {}
        #: Of optimizers that have not stepped yet: what to do once they have, and the handles of their hooks.
        self._first_steps: dict[int, Callable[[], None]] = {}
        self._first_hooks: list[Any] = []
        #: Those of which a CUDA graph has a step, that it may replay without calling any hook.
        self._recorded: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._first_hooks.append(register_optimizer_step_pre_hook(partial(_note_recording, self._recorded)))
        self._capture: Capture | None = None
        #: Something wrote the state without a fence: no later save overlaps with training.
        self._is_written_unfenced = False
        self._times = StepTimes(options.clock.monotonic)
        self._newest: SaveHandle | None = None
        #: The save of a capture that was found in memory.
        self._found: SaveHandle | None = None
        #: How long training had been held when the newest save began.
        self._held_before_s = 0.0
        #: Of the newest step: who saves it to which tier.
        self._saved_in: dict[str, SaveHandle] = {}

    def tick(self) -> None:
        """A step is done."""
        self._note_excess(self._times.tick(self._capturer.stats.held_s))

    def save(
        self,
        step: int,
        state: object,
        *,
        tiers: Collection[TierName] | None = None,
        wait: timedelta | None = None,
    ) -> SaveHandle:
        """See `Checkpointer.save`."""
        wanted = self._wanted(step, tiers, is_last=wait is not None)
        self._schedule.saved(step, [TierName(tier) for tier in tiers or self.tiers])
        if not wanted:
            assert self._newest is not None
            return self._newest
        return self.begin(step, state, wanted, wait=wait)

    def begin(
        self, step: int, state: object, tiers: tuple[str, ...], *, wait: timedelta | None
    ) -> SaveHandle:
        """Save `state` to `tiers`, whatever became of the step there before; see `Checkpointer.save`."""
        self._note_excess(self._times.saved(step))
        handle = self._register(step, tiers)
        self._held_before_s = self._capturer.stats.held_s
        self._emit(EventType.SAVE_STARTED, step)
        try:
            writers = self._fencing_writers(state)
            capture = self._capturer.begin(state, step, writers=writers, keep=True, wait=wait)
            self._capture = capture or self._capture
        except Exception as error:  # the caller may go on without this save, and so must the others
            self._emit(EventType.SAVE_RELEASED, step)
            self._delivery.log.add_held(self._held_s)
            self._delivery.not_captured(handle, SaveState.FAILED, str(error), self._held_s)
            raise
        if capture is not None and not writers:
            self._capturer.fence()
        self._delivery.log.add_held(self._held_s)
        self._emit(EventType.SAVE_RELEASED, step)
        if capture is None:
            why = self._capturer.why_skipped or self._delivery.why_full
            self._delivery.not_captured(handle, SaveState.SKIPPED, why, self._held_s)
            return handle
        delayed_s = self._capturer.stats.last_delayed_s
        handle.update(size_bytes=capture.layout.size_bytes, held_s=self._held_s, delayed_s=delayed_s)
        capture.on_held = lambda seconds: self._add_held(handle, seconds)
        if delayed_s:
            why = "storage is slower than the interval"
            logger.info("save of step %d waited %.2f s for a slot: %s", step, delayed_s, why)
        patient = wait is not None or self._options.capture.when_full is WhenFull.WAIT
        self._delivery.send(handle, capture, patient=patient)
        return handle

    def save_found(self, attempt_id: str, step: int) -> None:
        """Save what `attempt_id` captured at `step`, and no disk has, to the first tier; all ranks alike.

        To later saves it is as any step that the job went on from.
        """
        handle = SaveHandle(step, self.tiers[:1], try_number=self._next_try(step))
        self._found = handle
        slot = self._capturer.arena.try_lend(attempt_id, step)
        if slot is None:
            self._delivery.not_captured(handle, SaveState.FAILED, "its capture is gone from memory", 0.0)
            return
        logger.info("step %d is in memory alone: it is saved to the %s tier", step, self.tiers[0])
        self._delivery.send(handle, FoundCapture(self._capturer.arena, slot, step), patient=True)

    @property
    def newest_step(self) -> int:
        """The last step that was to be saved; -1: none."""
        return -1 if self._newest is None else self._newest.step

    def went_back(self) -> None:
        """A restore led back behind `newest_step`: what was saved is of another branch."""
        self._newest = None
        self._saved_in.clear()

    def tried(self, step: int) -> dict[str, SaveHandle]:
        """The tiers that `step` was to be saved to, and its last save there; the same tiers on all ranks."""
        return dict(self._saved_in) if self._newest is not None and self._newest.step == step else {}

    def advice(self, tier: TierName, *, mtbf_s: float) -> IntervalAdvice:
        """See `Checkpointer.advice`."""
        return self._schedule.advice(tier, step_s=self._times.undisturbed_s, mtbf_s=mtbf_s)

    def log_findings(self) -> None:
        """Say what saves of this job have cost; for one rank, at the end."""
        for text in self._schedule.findings(step_s=self._times.undisturbed_s):
            logger.info("from the saves of this run, %s", text)

    def close(self) -> None:
        """Leave the optimizers alone."""
        for hook in (*(hook for _, hook in self._hooks.values()), *self._first_hooks):
            hook.remove()
        self._hooks.clear()
        self._first_hooks.clear()
        self._first_steps.clear()

    def after_first_steps(self, state: object, task: Callable[[], None]) -> None:
        """Call `task` when an optimizer of `state` has stepped once, as it then has its state; for each."""

        def hook(optimizer: object, *_: object) -> None:
            # It cannot be removed here, as torch goes through the hooks.  Several threads may step.
            if (waiting := self._first_steps.pop(id(optimizer), None)) is not None:
                waiting()

        for optimizer in self._all_optimizers(state).values():
            if takes_hooks(optimizer) and hasattr(optimizer, "register_step_post_hook"):
                self._first_steps[id(optimizer)] = task
                self._first_hooks.append(optimizer.register_step_post_hook(hook))

    def _all_optimizers(self, state: object) -> dict[int, Any]:
        found = map(unwrapped, (*self._optimizers, *_optimizers_in(state)))
        return {id(each): each for each in found}

    def _wanted(self, step: int, tiers: Collection[TierName] | None, *, is_last: bool) -> tuple[str, ...]:
        """The tiers to try now, the same on all ranks."""
        known = self.tiers
        asked = known if tiers is None else tuple(TierName(tier).value for tier in tiers)
        if not asked or not set(asked) <= set(known):
            raise ConfigError(
                f"a save is for some of this job's tiers ({', '.join(known)}), found {', '.join(asked)}.",
                step=step,
            )
        newest = self._newest
        if newest is None or step > newest.step:
            return asked
        if step < newest.step:
            raise ConfigError(
                f"step {step} comes after step {newest.step}: steps are saved in growing order.", step=step
            )
        return tuple(tier for tier in asked if self._may_try(tier, is_last=is_last))

    def _may_try(self, tier: str, *, is_last: bool) -> bool:
        """Whether to try the newest step in that tier now.

        Of several ranks one may have heard that a try failed, and another not yet: who went by that would
        wait for the others in vain.
        """
        handle = self._saved_in.get(tier)
        if handle is None or (is_last and not self._is_alone):
            return True
        has_failed = handle.state in FINAL and tier not in handle.record.committed_in
        if has_failed and not self._is_alone:
            logger.warning(
                "step %d is not in the %s tier (%s), and not tried again, as other ranks may not know: save"
                " another step, or this one with wait=... on all ranks",
                *(handle.step, tier, handle.record.why),
            )
        return has_failed and self._is_alone

    def _register(self, step: int, tiers: tuple[str, ...]) -> SaveHandle:
        number = self._next_try(step)
        if self._newest is None or step > self._newest.step:
            self._saved_in.clear()
        self._newest = handle = SaveHandle(step, tiers, try_number=number)
        self._saved_in.update(dict.fromkeys(tiers, handle))
        return handle

    def _next_try(self, step: int) -> int:
        """The number of the next try of `step`, whatever it is for: so one number will do for all tiers."""
        tries = [
            handle.try_number for handle in (self._newest, self._found) if handle and handle.step == step
        ]
        return max(tries, default=0) + 1

    def _fencing_writers(self, state: object) -> list[Any]:
        """What will call the fence before it writes the state; nothing: that cannot be relied upon."""
        self._note_unfenced()
        if not self._options.overlap or self._is_written_unfenced:
            return []
        writers = self._all_optimizers(state)
        if unhookable := [each for each in writers.values() if not takes_hooks(each)]:
            self._warn_of(unhookable[0])
            return []
        for gone in self._hooks.keys() - writers.keys():
            self._hooks.pop(gone)[1].remove()
            del self._unfenced[gone]
        for key, writer in writers.items():
            if key not in self._hooks:
                self._hooks[key] = writer, self._capturer.install_fence(writer)
                self._note_why(key, why_unfenced(writer))
            if writer in self._recorded and not self._unfenced[key]:
                self._note_why(key, f"a CUDA graph has recorded a step of {type(writer).__name__}")
        return [] if any(map(self._unfenced.get, writers)) else list(writers.values())

    def _note_why(self, key: int, why: str) -> None:
        self._unfenced[key] = why
        if why:
            logger.warning("saves hold training until the state is copied: %s", why)

    def _note_unfenced(self) -> None:
        self._capturer.fence()  # as the next capture does first: from here on it is known
        if self._capture is not None and self._capture.was_written and not self._is_written_unfenced:
            self._is_written_unfenced = True
            logger.warning(
                "saves hold training until the state is copied from now on: something wrote it while step %d"
                " was copied, without a fence() before, such as the forward of Embedding(max_norm=...)",
                self._capture.step,
            )

    def _warn_of(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "saves do not overlap with training: %s does not tell when it steps, Optimizer.__init__ was"
                " not called; put the optimizer that it wraps into the state",
                type(optimizer).__name__,
            )

    def _add_held(self, handle: SaveHandle, seconds: float) -> None:
        """A fence held training, after the save had begun."""
        handle.update(held_s=handle.record.held_s + seconds)
        self._delivery.log.add_held(seconds)

    def _note_excess(self, excess: Excess | None) -> None:
        if excess is not None and self._newest is not None and self._newest.step == excess.step:
            self._newest.update(excess_s=excess.excess_s)
            held_s = self._capturer.stats.held_s - self._held_before_s  # fences since then included
            # One that was skipped cost next to nothing, which says nothing of those that are not.
            if self._newest.state not in (SaveState.SKIPPED, SaveState.FAILED):
                tiers = tuple(map(TierName, self._newest.record.tiers))
                self._schedule.add_cost(tiers, held_s + excess.excess_s)
            self._delivery.log.add_excess(excess.excess_s)
            logger.debug("excess of the save of step %d: %+.3f s", excess.step, excess.excess_s)

    @property
    def _held_s(self) -> float:
        return self._capturer.stats.last_held_s


def _note_recording(
    recorded: WeakSet[torch.optim.Optimizer], optimizer: torch.optim.Optimizer, *_: object
) -> None:
    if is_recording():
        recorded.add(optimizer)


def _optimizers_in(state: object, depth: int = 3) -> Iterator[torch.optim.Optimizer]:
    if isinstance(state, torch.optim.Optimizer):
        yield state
    elif depth and isinstance(state, Mapping):
        for value in state.values():
            yield from _optimizers_in(value, depth - 1)
    elif depth and isinstance(state, list | tuple):
        for value in state:
            yield from _optimizers_in(value, depth - 1)
