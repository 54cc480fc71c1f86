# SPDX-License-Identifier: Apache-2.0
"""Loops that count by themselves, over real DataLoaders, in processes that are killed."""

from __future__ import annotations

import os
import signal
from collections import Counter
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from resiliency.data import (
    GlobalBatch,
    InterruptableDistributedGroupedBatchSampler,
    InterruptableDistributedSampler,
    advancing,
    advancing_steps,
)
from resiliency.errors import ConfigError
from resiliency.testing.rank_pool import RankOutcome, RankPool
from tests.data.loaders import SIZE, Numbers, an_optimizer, end_with, join_feeders, listener_count, loader_of


def train_until_killed(rank: int, path: str, options: dict[str, Any], kill_at: int, after_save: bool) -> None:
    """Two epochs; the model is the list of samples it consumed, saved with the sampler in one file."""
    sampler = InterruptableDistributedSampler(Numbers(), 1, 0)
    consumed: list[list[int]] = [[], []]
    if os.path.exists(path):
        saved = torch.load(path)
        consumed = saved["model"]
        sampler.load_state_dict(saved["sampler"])
    optimizer = an_optimizer()
    loader = loader_of(sampler, worker_init_fn=partial(end_with, os.getpid()), **options)
    steps = 0
    for epoch in range(sampler.epoch, 2):
        sampler.set_epoch(epoch)
        for batch in advancing(loader, optimizer):
            consumed[epoch] += batch.tolist()
            optimizer.step()
            if steps == kill_at and not after_save:
                os.kill(os.getpid(), signal.SIGKILL)
            torch.save({"model": consumed, "sampler": sampler.state_dict()}, path + ".new")
            os.replace(path + ".new", path)
            if steps == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            steps += 1
    del loader
    join_feeders()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_workers": 1, "prefetch_factor": 4},
        {"num_workers": 2, "prefetch_factor": 4, "persistent_workers": True},
    ],
    ids=["no worker", "one worker", "persistent workers"],
)
@pytest.mark.slow
def test_a_loader_killed_at_every_batch_consumes_each_sample_once_in_each_epoch(
    options: dict[str, Any], rank_pool: RankPool, tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint"
    lives = 0
    while lives < 40:
        # Every batch has two deaths: before it is saved, and after. The lives with two workers are longer,
        # and end with what was fetched ahead at several distances.
        saved, ahead = lives % 2 == 1, lives % 3 if options.get("persistent_workers") else 0
        job = rank_pool.run(train_until_killed, 1, str(path), options, ahead, saved, group=False, timeout=60)
        if job.outcomes == [RankOutcome.OK]:
            break
        assert job.outcomes == [RankOutcome.DIED], str(job[0])
        lives += 1
    assert lives >= 6 if options.get("persistent_workers") else lives == 4 * -(-SIZE // 4)
    finished = torch.load(path)
    assert [Counter(epoch) for epoch in finished["model"]] == [Counter(range(SIZE))] * 2
    assert finished["sampler"]["epoch"] == 1


def test_a_batch_counts_when_the_optimizer_has_made_a_step_after_it_d48() -> None:
    sampler = InterruptableDistributedSampler(Numbers(), 1, 0)
    optimizer = an_optimizer()
    positions = []
    for number, _ in enumerate(advancing(loader_of(sampler, num_workers=0), optimizer), 1):
        if number % 2 == 0:  # accumulates the gradients of two batches
            optimizer.step()
        positions.append(sampler.state_dict()["position"])
    assert positions == [0, 8, 8, 16, 16, 22]
    assert sampler.progress.finished


def test_after_an_exception_the_state_is_that_of_the_last_step() -> None:
    sampler = InterruptableDistributedSampler(Numbers(), 1, 0)
    optimizer = an_optimizer()
    seen = []
    with pytest.raises(RuntimeError, match="nan"):  # noqa: PT012  # the loop is the point
        for number, batch in enumerate(advancing(loader_of(sampler), optimizer)):
            if number == 2:
                raise RuntimeError("nan")
            seen += batch.tolist()
            optimizer.step()
    assert sampler.state_dict()["position"] == len(seen) == 8
    optimizer.zero_grad()
    sampler.advance(0)
    rest = list(chain.from_iterable(batch.tolist() for batch in advancing(loader_of(sampler), optimizer)))
    assert Counter(seen + rest) == Counter(range(SIZE))
    optimizer.step()  # the loops are over: nothing counts any more
    assert sampler.state_dict()["position"] == SIZE


def test_without_its_optimizer_a_batch_counts_when_the_next_is_asked_for_and_no_state_is_guessed() -> None:
    sampler = InterruptableDistributedSampler(Numbers(), 1, 0)
    positions = []
    for _ in advancing(loader_of(sampler)):
        positions.append(sampler.progress.position)
        with pytest.raises(ConfigError, match="cannot tell whether the batch in hand is in the model"):
            sampler.state_dict()
    assert positions == [0, 4, 8, 12, 16, 20]
    assert sampler.state_dict()["position"] == SIZE


def test_a_loader_that_drops_its_last_batch_finishes_the_epoch() -> None:
    sampler = InterruptableDistributedSampler(Numbers(), 1, 0)
    optimizer = an_optimizer()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        batches = 0
        for _ in advancing(loader_of(sampler, drop_last=True), optimizer):
            optimizer.step()
            batches += 1
        assert batches == 5
    assert sampler.progress.finished


def test_an_epoch_without_a_step_of_the_optimizer_is_told(caplog: pytest.LogCaptureFixture) -> None:
    sampler = InterruptableDistributedSampler(Numbers(), 1, 0)
    for _ in advancing(loader_of(sampler), an_optimizer()):
        assert sampler.state_dict()["position"] == 0
    assert caplog.text.count("6 batches of epoch 0 came without a step of the optimizer that was passed") == 1
    caplog.clear()
    many = InterruptableDistributedSampler(range(100), 1, 0)
    loader = DataLoader(range(100), sampler=many)  # type: ignore[arg-type]
    for number, _ in enumerate(advancing(loader, an_optimizer()), 1):  # not only at the end of a long epoch
        assert len(caplog.messages) == (number >= 64)
        if number == 90:
            break
    assert "64 batches of epoch 0 came without a step" in caplog.text
    assert "accumulated over more batches" in caplog.text
    assert "pass the optimizer whose step() the loop calls" in caplog.text


def test_a_step_after_a_loop_was_left_with_a_batch_in_hand_is_not_guessed() -> None:
    sampler = InterruptableDistributedSampler(Numbers(), 1, 0)
    optimizer = an_optimizer()
    for number, _ in enumerate(advancing(loader_of(sampler), optimizer)):
        if number == 1:
            break  # the program may have trained on it, or looked whether to go on
        optimizer.step()
    assert sampler.state_dict()["position"] == 4
    optimizer.step()
    with pytest.raises(ConfigError, match="cannot tell whether the batch in hand is in the model"):
        sampler.state_dict()
    sampler.advance(4)
    assert sampler.state_dict()["position"] == 8


def test_leaving_the_loop_after_a_step_lets_go_of_the_optimizer() -> None:
    sampler = InterruptableDistributedSampler(Numbers(), 1, 0)
    optimizer = an_optimizer()
    for _ in advancing(loader_of(sampler), optimizer):
        optimizer.step()
        break
    assert listener_count(optimizer) == 0
    optimizer.step()
    assert sampler.state_dict()["position"] == 4


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_gradient_scaler_skips_does_not_count(fused: bool) -> None:
    sampler = InterruptableDistributedSampler(Numbers(), 1, 0)
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu")
    positions = []
    for number, _ in enumerate(advancing(loader_of(sampler), optimizer)):
        optimizer.zero_grad()
        scaler.scale((weight * (float("inf") if number in (0, 2) else 1.0)).sum()).backward()
        before = weight.item()
        scaler.step(optimizer)
        scaler.update()
        assert (weight.item() == before) is (number in (0, 2))
        positions.append(sampler.state_dict()["position"])
    assert positions == [0, 8, 8, 16, 20, 22]


def test_after_a_loop_without_its_optimizer_was_left_the_state_waits_for_what_became_of_the_last_batch() -> (
    None
):
    for count in (4, 0):
        sampler = InterruptableDistributedSampler(Numbers(), 1, 0)
        for number, _ in enumerate(advancing(loader_of(sampler))):
            if number == 1:
                break
        assert sampler.progress.position == 4
        with pytest.raises(ConfigError, match=r"sampler.advance\(its samples\), or advance\(0\)"):
            sampler.state_dict()
        sampler.advance(count)
        assert sampler.state_dict()["position"] == 4 + count


def test_a_batch_in_hand_is_let_go_by_a_state_and_refused_by_the_next_loop() -> None:
    sampler = InterruptableDistributedSampler(Numbers(), 1, 0)
    state = sampler.state_dict()
    for _ in advancing(loader_of(sampler)):
        break
    for loop in (advancing(loader_of(sampler)), iter(loader_of(sampler))):
        with pytest.raises(ConfigError, match="cannot tell whether the batch in hand is in the model"):
            next(loop)
    sampler.load_state_dict(state)
    assert len(next(advancing(loader_of(sampler)))) == 4
    assert sampler.progress.position == 0


def test_steps_without_an_optimizer_that_were_left_early_are_in_hand_too() -> None:
    sampler = InterruptableDistributedSampler(Numbers(), 1, 0, global_batch=GlobalBatch(8, 3))
    for step in advancing_steps(DataLoader(Numbers(), batch_sampler=sampler.micro_batches())):
        samples = sum(len(batch) for batch, _ in step)
        break
    with pytest.raises(ConfigError, match="cannot tell"):
        sampler.state_dict()
    sampler.advance(0)
    assert sampler.state_dict()["position"] == 0
    sampler.advance(samples)
    assert sampler.state_dict()["position"] == 8


def test_a_batch_sampler_of_torch_counts_its_samples() -> None:
    sampler = InterruptableDistributedSampler(Numbers(), 1, 0)
    loader = DataLoader(Numbers(), batch_sampler=BatchSampler(sampler, 4, drop_last=False))
    optimizer = an_optimizer()
    positions = []
    for _ in advancing(loader, optimizer):
        optimizer.step()
        positions.append(sampler.state_dict()["position"])
    assert positions == [4, 8, 12, 16, 20, SIZE]


def test_a_loader_that_does_not_batch_counts_sample_by_sample() -> None:
    sampler = InterruptableDistributedSampler(Numbers(), 1, 0)
    optimizer = an_optimizer()
    for number, _ in enumerate(advancing(loader_of(sampler, None), optimizer), 1):
        optimizer.step()
        assert sampler.state_dict()["position"] == number
    assert sampler.progress.finished


def test_a_grouped_loader_advances_batch_by_batch() -> None:
    groups = [index % 3 for index in range(SIZE)]
    sampler = InterruptableDistributedGroupedBatchSampler(Numbers(), groups, 4, 1, 0)
    loader = DataLoader(Numbers(), batch_sampler=sampler)
    optimizer = an_optimizer()
    for number, _ in enumerate(advancing(loader, optimizer), 1):
        optimizer.step()
        assert sampler.state_dict()["position"] == number
    assert sampler.progress.finished


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_a_step_counts_when_the_optimizer_made_it_and_is_the_same_on_any_world(world: int) -> None:
    steps = []
    for rank in range(world):
        sampler = InterruptableDistributedSampler(Numbers(), world, rank, global_batch=GlobalBatch(8, 3))
        loader = DataLoader(Numbers(), batch_sampler=sampler.micro_batches())
        optimizer = an_optimizer()
        rows = []
        for number, step in enumerate(advancing_steps(loader, optimizer), 1):
            rows.append([index for batch, weight in step if weight for index in batch.tolist()])
            assert sampler.state_dict()["position"] == (number - 1) * 8
            optimizer.step()
            assert sampler.state_dict()["position"] == min(number * 8, SIZE)
        steps.append(rows)
    whole = list(InterruptableDistributedSampler(Numbers(), 1, 0))
    together = [list(chain.from_iterable(shares)) for shares in zip(*steps, strict=True)]
    assert together == [whole[:8], whole[8:16], whole[16:]]


def test_steps_that_are_not_taken_wholly_are_refused() -> None:
    sampler = InterruptableDistributedSampler(Numbers(), 1, 0, global_batch=GlobalBatch(8, 3))
    steps = advancing_steps(DataLoader(Numbers(), batch_sampler=sampler.micro_batches()))
    next(iter(next(steps)))
    with pytest.raises(ConfigError, match="2 of 3 micro-batches of an optimizer step were not taken"):
        next(steps)


def test_loops_over_the_wrong_loader_are_refused_with_the_right_one() -> None:
    theirs = DistributedSampler(Numbers(), 1, 0)
    with pytest.raises(ConfigError, match="a DistributedSampler, which does not keep its position"):
        next(advancing(DataLoader(Numbers(), sampler=theirs)))
    rows = InterruptableDistributedSampler(Numbers(), 1, 0, global_batch=8)
    with pytest.raises(ConfigError, match=r"advancing_steps\(loader, optimizer\)"):
        next(advancing(DataLoader(Numbers(), batch_sampler=rows.micro_batches())))
    with pytest.raises(ConfigError, match=r"batch_sampler=sampler.micro_batches\(\)"):
        next(advancing_steps(loader_of(rows)))


class Growing(BatchSampler):
    """Might make batches of 1, 2, 3 ... samples."""


def test_loaders_whose_batches_have_no_known_place_or_size_are_refused() -> None:
    sampler = InterruptableDistributedSampler(Numbers(), 1, 0)
    rows = InterruptableDistributedSampler(Numbers(), 1, 0, global_batch=8)
    with pytest.raises(ConfigError, match=r"a Growing; how many samples its batches have is not known"):
        next(advancing(DataLoader(Numbers(), batch_sampler=Growing(sampler, 4, False))))
    with pytest.raises(ConfigError, match="in_order=False"):
        next(advancing(loader_of(sampler, in_order=False)))
    with pytest.raises(ConfigError, match="in_order=False"):
        next(advancing_steps(DataLoader(Numbers(), batch_sampler=rows.micro_batches(), in_order=False)))
