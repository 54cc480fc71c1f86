# SPDX-License-Identifier: Apache-2.0
"""Generated histories of trainings over real DataLoaders, beside a model that keeps what was trained on.

A history has lives, each on a number of ranks that go in step. A life begins from the last saved state, loops
over epochs as people write them, and ends where it is killed. The model below knows nothing of positions: it
keeps the samples in the gradients, those in the model, and a copy of them with each saved state.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader

from resiliency.data import (
    GlobalBatch,
    InterruptableDistributedGroupedBatchSampler,
    InterruptableDistributedSampler,
    advancing,
    advancing_steps,
)
from resiliency.errors import ConfigError

#: A sample, or the samples of a batch that is planned as one.
Unit = Any


@dataclass
class Trained:
    """What an undisturbed reader of the program sees: by epoch, in the model and in the gradients."""

    in_model: dict[int, Counter[Unit]] = field(default_factory=lambda: defaultdict(Counter))
    gradients: list[tuple[int, Unit]] = field(default_factory=list)
    #: Samples of each rank, and batches that were drawn a random number for.
    counts: list[int] = field(default_factory=list)
    drawn: list[int] = field(default_factory=list)

    def backward(self, epoch: int, rank: int, units: list[Unit], count: int) -> None:
        self.gradients += [(epoch, unit) for unit in units]
        self.counts[rank] += count

    def step(self) -> None:
        for epoch, unit in self.gradients:
            self.in_model[epoch][unit] += 1
        self.zero_grad()

    def zero_grad(self) -> None:
        self.gradients = []
        self.counts = [0] * len(self.counts)


class Killed(Exception):
    """The life ended."""


class RolledBack(Exception):
    """The program went back to its saved state, without a restart."""


class History:
    """One history, made and checked; `play` runs it."""

    def __init__(self, seed: int) -> None:
        r = self.random = random.Random(seed)  # noqa: S311  # repeatable
        self.seed = seed
        self.kind = r.choice(["samples", "samples", "groups", "rows"])
        self.size = r.randint(1, 40)
        self.batch = r.randint(1, 5)
        self.micro = r.randint(0, 3)
        self.drop_last = r.random() < 0.25
        self.loader_drops = self.kind == "samples" and r.random() < 0.25
        self.order = {
            "shuffle": r.random() < 0.8,
            "kind": r.choice(["torch", "computed"]),
            "seed": r.randint(0, 9),
        }
        self.groups = [r.randint(0, 2) for _ in range(self.size)]
        self.epochs = r.randint(1, 3)
        self.every = r.randint(1, 4)
        self.flush = r.choice(["carry", "carry", "len", "after"])
        self.by_hand = r.random() < 0.15
        #: The loop counts without its optimizer: a batch is in the model when the next one is asked for.
        self.alone = not self.by_hand and r.random() < 0.1
        #: The loop takes as many batches as the loader has, and never asks whether there are more.
        self.is_counted = r.random() < 0.3
        self.skips = r.choice([0.0, 0.0, 0.3])
        self.workers = 2 if seed % 10 == 7 else 0
        self.persistent = self.workers > 0 and r.random() < 0.5
        #: One rank that is only killed: its random numbers are those of an undisturbed run.
        self.random_numbers = self.kind == "samples" and not (self.by_hand or self.alone) and r.random() < 0.5
        most = 1 if self.random_numbers else 2 if self.workers else 5
        self.worlds = [r.randint(1, most) for _ in range(r.randint(1, 3 if self.workers else 6))]
        self.events = 0.0 if r.random() < 0.1 else r.choice([0.02, 0.1, 0.3])
        self.trained = Trained()
        self.saved: tuple[dict[str, Any], Trained, torch.Tensor] | None = None
        self.happened: Counter[str] = Counter()

    # What the program is made of.

    def sampler(self, world: int, rank: int) -> Any:
        if self.kind == "groups":
            return InterruptableDistributedGroupedBatchSampler(
                range(self.size), self.groups, self.batch, world, rank, drop_last=self.drop_last, **self.order
            )
        rows = GlobalBatch(self.batch * 2, self.micro) if self.kind == "rows" else None
        return InterruptableDistributedSampler(
            range(self.size), world, rank, drop_last=self.drop_last, global_batch=rows, **self.order
        )

    def loader(self, sampler: Any) -> DataLoader[Any]:
        options: dict[str, Any] = {"num_workers": self.workers, "persistent_workers": self.persistent}
        if self.kind == "groups":
            options["batch_sampler"] = sampler
        elif self.kind == "rows":
            options["batch_sampler"] = sampler.micro_batches()
        else:
            options |= {"batch_size": self.batch, "sampler": sampler, "drop_last": self.loader_drops}
        return DataLoader(range(self.size), **options)  # type: ignore[arg-type]

    def batches(self, loader: Any, optimizer: Any) -> Iterator[tuple[list[Unit], int, int]]:
        """Units of a batch or row, what they count, and how many batches of the loader they were."""
        if self.kind == "rows":
            for step in self.rows_by_hand(loader) if self.by_hand else advancing_steps(loader, optimizer):
                parts = [(batch.tolist(), weight) for batch, weight in step]
                units = [unit for batch, weight in parts if weight for unit in batch]
                yield units, sum(len(batch) for batch, _ in parts), len(parts)
            return
        for batch in loader if self.by_hand else advancing(loader, optimizer):
            numbers = batch.tolist()
            yield ([tuple(numbers)], 1, 1) if self.kind == "groups" else (numbers, len(numbers), 1)

    def rows_by_hand(self, loader: Any) -> Iterator[list[tuple[Any, float]]]:
        sampler, batches = loader.batch_sampler.sampler, iter(loader)
        position, full = sampler.state_dict()["position"], self.batch * 2
        while (row := min(full, self.size - position)) and not (self.drop_last and row < full):
            plan = GlobalBatch(full, self.micro).micro_batches(sampler.rank, sampler.num_replicas, row)
            yield [(next(batches), part.weight) for part in plan]
            position += row
        assert next(batches, None) is None

    # What happens to it.

    def chance(self, name: str, share: float) -> bool:
        if self.random.random() < share:
            self.happened[name] += 1
            return True
        return False

    def save(self, ranks: list[Any]) -> None:
        states = [sampler.state_dict() for sampler in ranks]
        assert all(state == states[0] for state in states)
        self.compare(states[0], len(ranks))
        trained = deepcopy(self.trained)
        trained.zero_grad()  # no checkpoint has them
        self.saved = states[0], trained, torch.get_rng_state()
        self.happened["saved"] += 1

    def go_back(self, ranks: list[Any]) -> None:
        state, trained, generator = self.saved or (self.sampler(1, 0).state_dict(), Trained(), None)
        for sampler in ranks:
            sampler.load_state_dict(state)
        self.trained = deepcopy(trained)
        self.trained.counts = [0] * len(ranks)
        if generator is None:
            torch.manual_seed(self.seed)
        else:
            torch.set_rng_state(generator)

    def play(self) -> None:
        for world in self.worlds:
            self.life(world, self.events)
        self.life(self.worlds[-1], 0.0)
        self.compare_the_end()

    def life(self, world: int, events: float) -> None:
        ranks = [self.sampler(world, rank) for rank in range(world)]
        self.go_back(ranks)
        optimizers = [
            torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, fused=True) for _ in ranks
        ]
        loaders = [self.loader(sampler) for sampler in ranks]
        if ranks[0].progress.epoch and self.chance("began with epoch 0 again", 0.2):
            for sampler in ranks:
                refused(sampler.set_epoch, 0, text="would be trained on again")
        while True:
            try:
                for epoch in range(ranks[0].epoch, self.epochs):
                    for sampler in ranks:
                        sampler.set_epoch(epoch)
                    while self.loop(ranks, loaders, optimizers, epoch, events):
                        pass
                    if not self.random_numbers and self.chance("saved between epochs", 0.3):
                        self.save(ranks)
                return
            except Killed:
                return
            except RolledBack:
                self.happened["rolled back"] += 1

    def step(self, ranks: list[Any], optimizers: list[Any], *, skip: float) -> bool:
        """Whether the step was made, and not skipped as a gradient scaler does."""
        if self.chance("skipped", skip):
            if self.random.random() < 0.5:  # a fused optimizer is called, and told
                for optimizer in optimizers:
                    optimizer.found_inf = torch.ones(1)
                    optimizer.step()
                    del optimizer.found_inf
            return False
        for optimizer in optimizers:
            optimizer.step()
        if self.by_hand:
            for sampler, count in zip(ranks, self.trained.counts, strict=True):
                sampler.advance(count)
        self.trained.step()
        return True

    def loop(
        self, ranks: list[Any], loaders: list[Any], optimizers: list[Any], epoch: int, events: float
    ) -> bool:
        """One loop over the loaders; whether it was left, and another is to go on with the epoch."""
        carried = bool(self.trained.gradients)
        told = [None] * len(ranks) if self.alone else optimizers
        iterators = [self.batches(*pair) for pair in zip(loaders, told, strict=True)]
        taken, length = 0, 0
        together: Any = enumerate(zip(*iterators, strict=True), 1)
        if self.is_counted and self.kind != "rows":
            for sampler in ranks:
                sampler.set_epoch(epoch)  # `len` is of what is left
            together = zip(range(1, len(loaders[0]) + 1), zip(*iterators, strict=True), strict=False)
        for number, found in together:
            if number == 1 and not self.by_hand:  # a hook of the program, after that of the loop
                for optimizer in optimizers:
                    optimizer.register_step_post_hook(lambda *_: None)
            for rank, (units, count, _) in enumerate(found):
                self.trained.backward(epoch, rank, units, count)
            assert {count for _, _, count in found} == {found[0][2]}
            taken += found[0][2]
            length = length or len(loaders[0])
            assert [len(loader) for loader in loaders] == [length] * len(ranks)
            if self.random_numbers:
                self.trained.drawn.append(int(torch.randint(1 << 30, ())))
            if self.chance("killed before a step", events / 2):
                raise Killed
            if self.alone:
                if self.chance("left with a batch in hand", events):
                    self.leave_in_hand(ranks, iterators)
                    return bool(ranks[0].left)
                self.trained.step()
                continue
            due = number % self.every == 0 or (self.flush == "len" and taken == length)
            if due and self.step(ranks, optimizers, skip=self.skips):
                states = [sampler.state_dict() for sampler in ranks]
                assert all(state == states[0] for state in states)
                if self.chance("killed after a step", events / 4):
                    raise Killed
                if self.random.random() < 0.4:
                    self.save(ranks)
                if self.chance("killed after a save", events / 4):
                    raise Killed
            if self.random_numbers or not self.random.random() < events:
                continue
            self.leave(ranks, optimizers, loaders, iterators, carried, whole=taken == length)
            return bool(ranks[0].left) and not ranks[0].waits_for_step
        assert taken == length or not taken, "the loader gave another number of batches than its length"
        if self.alone and ranks[0].in_hand:  # the loop never asked for more
            for iterator in iterators:
                iterator.close()
            for sampler, (_, count, _) in zip(ranks, found, strict=True):
                refused(sampler.set_epoch, epoch + 1, text="cannot tell whether the batch in hand")
                sampler.advance(count)
                if self.loader_drops:
                    sampler.finish_epoch()
        if self.by_hand or (self.flush == "after" and self.trained.gradients):
            self.step(ranks, optimizers, skip=0.0)
        if self.by_hand:
            for sampler in ranks:
                sampler.finish_epoch()  # what the loader dropped
        return False

    def leave(
        self,
        ranks: list[Any],
        optimizers: list[Any],
        loaders: list[Any],
        iterators: list[Any],
        carried: bool,
        *,
        whole: bool,
    ) -> None:
        if self.random.random() < 0.3 or (carried and any(e for e, _ in self.trained.gradients)):
            self.go_back(ranks)  # without a word to the loops
            if not self.by_hand:
                for iterator in iterators:
                    refused(next, iterator, text="the position of the sampler was set", may_end=True)
            raise RolledBack
        for iterator in iterators:
            iterator.close()
        counts = list(self.trained.counts)
        if self.trained.gradients and self.chance("a step after the loop was left", 0.5):
            self.step(ranks, optimizers, skip=0.0)
            if self.by_hand or whole:
                return
            for sampler, count, loader, optimizer in zip(ranks, counts, loaders, optimizers, strict=True):
                refused(sampler.state_dict, text="cannot tell whether the batch in hand")
                self.go_on_without_a_word(sampler, loader, optimizer, text="cannot tell whether the batch")
                sampler.advance(count)
            return
        self.happened["left"] += 1
        if whole and not self.by_hand and self.trained.gradients and self.random.random() < 0.5:
            return  # they wait for a step
        if self.trained.gradients and not self.by_hand:
            for sampler, loader, optimizer in zip(ranks, loaders, optimizers, strict=True):
                if not whole:
                    self.go_on_without_a_word(sampler, loader, optimizer, text="no optimizer step came after")
                sampler.advance(0)
        self.trained.zero_grad()

    def go_on_without_a_word(self, sampler: Any, loader: Any, optimizer: Any, *, text: str) -> None:
        """Another loop, or another epoch, would take samples again or leave them out."""
        how = self.random.randrange(3)
        if how == 0:
            refused(sampler.set_epoch, sampler.epoch + 1, text=text)
        elif how == 1:
            refused(lambda: next(iter(loader)), text=text)  # workers ask where they begin
        else:
            refused(next, self.batches(loader, optimizer), text=text)

    def leave_in_hand(self, ranks: list[Any], iterators: list[Any]) -> None:
        for iterator in iterators:
            iterator.close()
        trained_on = self.random.random() < 0.5
        for sampler, count in zip(ranks, self.trained.counts, strict=True):
            refused(sampler.state_dict, text="cannot tell whether the batch in hand")
            sampler.advance(count if trained_on else 0)
        if trained_on:
            self.trained.step()
        else:
            self.trained.zero_grad()

    # What must hold.

    def units_of(self, epoch: int) -> list[Unit]:
        alone = self.sampler(1, 0)
        alone.set_epoch(epoch)
        if self.kind == "groups":
            return [tuple(batch) for batch in alone]
        if self.order["kind"] == "torch":  # without any code of the project
            theirs = torch.utils.data.DistributedSampler(
                range(self.size),  # type: ignore[arg-type]
                1,
                0,
                shuffle=self.order["shuffle"],  # type: ignore[arg-type]
                seed=self.order["seed"],
            )
            theirs.set_epoch(epoch)
            return list(theirs)
        plain = InterruptableDistributedSampler(range(self.size), 1, 0, **self.order)  # type: ignore[arg-type]
        plain.set_epoch(epoch)
        return list(plain)

    def compare(self, state: dict[str, Any], world: int) -> None:
        """A state says what is in the model, and nothing else."""
        for epoch in range(self.epochs):
            units, found = self.units_of(epoch), self.trained.in_model[epoch]
            if epoch > state["epoch"]:
                assert not found, (epoch, state)
            elif epoch < state["epoch"] or state["position"] == len(units):
                self.compare_whole(epoch, world)
            else:
                assert found == Counter(units[: state["position"]]), (epoch, state)

    def compare_whole(self, epoch: int, world: int) -> None:
        units, found = self.units_of(epoch), self.trained.in_model[epoch]
        world = max(world, *self.worlds)
        dropped = world - 1 if self.drop_last else 0
        if self.loader_drops:
            dropped += (self.batch - 1) * world
        if self.kind == "rows" and self.drop_last:
            dropped = 2 * self.batch - 1
        least = len(units) - dropped
        assert found.keys() == set(units[: max(least, len(found))]), (epoch, found)
        twice = sum(found.values()) - len(found)
        assert twice <= (0 if self.kind == "rows" or self.drop_last else world - 1), (epoch, found)

    def compare_the_end(self) -> None:
        """What is in the gradients at the end is in no model, and no state says that it is."""
        in_model = deepcopy(self.trained.in_model)
        self.trained.step()
        for epoch in range(self.epochs):
            self.compare_whole(epoch, 1)
        self.trained.in_model = in_model
        if not self.random_numbers:
            return
        batches = self.size // self.batch if self.loader_drops else -(-self.size // self.batch)
        torch.manual_seed(self.seed)
        undisturbed = []
        for epoch in range(self.epochs):
            if epoch == 0 or not self.persistent:
                torch.empty((), dtype=torch.int64).random_()  # the loader's, where an epoch begins
            undisturbed += [int(torch.randint(1 << 30, ())) for _ in range(batches)]
        assert self.trained.drawn == undisturbed


def refused(call: Any, *arguments: Any, text: str, may_end: bool = False) -> None:
    try:
        call(*arguments)
    except ConfigError as error:
        assert text in str(error)  # noqa: PT017  # of many histories, and not one call of a test
    except StopIteration:
        assert may_end
    else:
        raise AssertionError(f"not refused: {text}")


def play(seed: int) -> History:
    history = History(seed)
    with torch.random.fork_rng(devices=[]):
        history.play()
    return history
