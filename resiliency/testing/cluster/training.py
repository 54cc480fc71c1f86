# SPDX-License-Identifier: Apache-2.0
"""A small training program whose loss curve shows every wrong bit of a restored state.

Its result is the same on any hosts and in any order of them, and with `replicated` for any number of
ranks: gradients are made in `MICROBATCHES` parts and added up in the order of these, not of ranks.
Without `replicated` each rank has, beside the model, a state of its own that enters the loss: a rank
that gets the shard of another is seen in the next step.  With `shards` there are as many of these states,
each held alike by every so many-th rank, as in hybrid sharding; then the result is the same for any
multiple of that number of ranks.

    rank 0 restored 4 peers               step and tier; step 0 and "none" at a fresh start
    rank 0 step 5 loss 0x1.8ep-1          exact, in hexadecimal
    rank 0 saved 6 committed local        at the end of each save
    rank 0 complete 10                    if the last step is saved, and once all hosts have copies of it
    rank 0 finished

Ranks of a `TestCluster` call `train`; for a launcher it is a program, ``python -m
resiliency.testing.cluster.training key=value ...`` with the fields of `Training`.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from resiliency.checkpoint import Checkpointer, CheckpointerOptions, LocalTier, SaveHandle
from resiliency.checkpoint.agent.client import LinkOptions
from resiliency.runtime import RunInfo
from resiliency.testing.cluster.disks import copies_on

MICROBATCHES = 12
_WIDTH = 8
_SOON = timedelta(seconds=60)
#: Set by the cluster for each of its hosts.
ROOT_ENV, DISK_ENV, MEMORY_ENV, STORE_ENV = "BED_ROOT", "BED_DISK", "BED_MEMORY", "BED_STORE"
_LOOK_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Training:
    """What to train; all ranks alike.

    Args:
        steps: the last step.
        every: interval of saves to the local tier; 0: none.
        persistent_every: the same to `directory`.
        replicas: copies of each host's local checkpoint on other hosts.
        keep: checkpoints that stay, per tier.
        shards: ranks are of one group, and hold the same, if their numbers are equal modulo this; 0: each
            rank has a state of its own.
        row: so many ranks one after another are a parallel group; 0: there is none.
        size: numbers in the state of each rank that is its own.
        park: save this step, then wait to be killed.
        hold: before this step rank 0 waits until `TestCluster.open_gate` is called.
        settle: after each save, wait until it is final on all ranks.
        await_copies: and until each host's checkpoint has its copies on other hosts.
        bytes_per_s: bandwidth of the copies; 0 means no limit.
    """

    steps: int
    every: int = 2
    directory: str = ""
    persistent_every: int = 0
    replicas: int = 1
    keep: int = 2
    replicated: bool = False
    shards: int = 0
    row: int = 0
    size: int = 1000
    park: int = 0
    hold: int = 0
    settle: bool = True
    await_copies: bool = False
    bytes_per_s: int = 0


class Model:
    """The state of one rank, and one step of it."""

    def __init__(self, rank: int, world_size: int, training: Training) -> None:
        self.rank, self.world_size = rank, world_size
        generator = torch.Generator().manual_seed(1)
        self.weights = torch.nn.Parameter(torch.randn(_WIDTH, _WIDTH, generator=generator))
        self.optimizer = torch.optim.AdamW([self.weights], lr=0.05)
        #: Which state it is that this rank has.
        self.shard = rank % training.shards if training.shards else rank
        self.own = None if training.replicated else torch.full((training.size,), float(self.shard + 1))

    @property
    def state(self) -> dict[str, object]:
        state: dict[str, object] = {"weights": self.weights, "optimizer": self.optimizer}
        if self.own is not None:
            state["own"] = self.own
        return state

    def local_part(self, step: int) -> torch.Tensor:
        """This rank's losses and gradients, one row a microbatch, padded to the most that any rank has."""
        rows = torch.zeros(-(-MICROBATCHES // self.world_size), 1 + _WIDTH * _WIDTH)
        for row, batch in enumerate(range(self.rank, MICROBATCHES, self.world_size)):
            generator = torch.Generator().manual_seed(1000 * step + batch)
            inputs = torch.randn(4, _WIDTH, generator=generator)
            loss = torch.tanh(inputs @ self.weights).pow(2).mean()
            (gradient,) = torch.autograd.grad(loss, self.weights)
            rows[row, 0] = loss.detach()
            rows[row, 1:] = gradient.flatten()
        if self.own is not None:
            rows[:, 0] += self.own.mean() / 64
        return rows

    def step(self, step: int, parts: Sequence[torch.Tensor]) -> float:
        """Finish the step with the parts of all ranks; returns the loss."""
        rows = torch.stack([parts[i % self.world_size][i // self.world_size] for i in range(MICROBATCHES)])
        total = torch.zeros(rows.shape[1])
        for row in rows:  # one order of additions for any number of ranks
            total += row
        total /= MICROBATCHES
        self.weights.grad = total[1:].reshape(_WIDTH, _WIDTH).clone()
        self.optimizer.step()
        if self.own is not None:
            wave = torch.arange(len(self.own)).remainder(7)
            self.own.mul_(0.9).add_(wave, alpha=0.01 * (self.shard + step))
        return float(total[0])


def expected_losses(training: Training, world_size: int) -> dict[int, str]:
    """The curve of a job that nothing happened to, worked out in this process."""
    models = [Model(rank, world_size, training) for rank in range(world_size)]
    curve = {}
    for step in range(1, training.steps + 1):
        parts = [model.local_part(step) for model in models]
        curve[step] = {model.step(step, parts).hex() for model in models}.pop()
    return curve


def train(training: Training) -> None:
    """One rank, from the newest checkpoint to the last step."""
    info = RunInfo.from_env()
    rank, world_size = info.rank or 0, info.world_size
    store = os.environ.get(STORE_ENV)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}" if store else None,
        rank=rank,
        world_size=world_size,
        timeout=_SOON,
    )
    model = Model(rank, world_size, training)
    with _checkpointer(training, info) as checkpoints:
        _say(rank, "agent", checkpoints.agent_pid)
        restored = checkpoints.restore(model.state)
        _say(rank, "restored", restored.step, restored.tier.value)
        handle = None
        for step in range(restored.step + 1, training.steps + 1):
            if step == training.hold and rank == 0:
                _wait_at_gate(rank, step)
            mine = model.local_part(step)
            parts = [torch.zeros_like(mine) for _ in range(world_size)]
            dist.all_gather(parts, mine)
            _say(rank, "step", step, "loss", model.step(step, parts).hex())
            handle = checkpoints.step(step, model.state)
            if handle is not None and training.settle:
                _settle(info, training, handle)
            if step == training.park:
                _say(rank, "parked", step)
                threading.Event().wait()
        if handle is not None and "local" in handle.record.committed_in:
            _say(rank, "complete" if handle.wait_complete(_SOON) else "incomplete", handle.step)
    dist.destroy_process_group()
    _say(rank, "finished")


def _checkpointer(training: Training, info: RunInfo) -> Checkpointer:
    rank = info.rank or 0
    local = LocalTier(
        directory=os.environ[DISK_ENV],
        every_steps=training.every,
        keep=training.keep,
        replicas=training.replicas,
        bytes_per_s=training.bytes_per_s,
    )
    return Checkpointer(
        training.directory or None,
        every_steps=training.persistent_every,
        keep=training.keep,
        local=local,
        replicated=training.replicated,
        group=f"shard {rank % training.shards}" if training.shards else "",
        parallel_groups=(f"row {rank // training.row}",) if training.row else (),
        info=info,
        options=CheckpointerOptions(
            arena_root=Path(os.environ[MEMORY_ENV]),
            save_timeout=_SOON,
            close_timeout=_SOON,
            link=LinkOptions(grace=_SOON),
        ),
    )


def _settle(info: RunInfo, training: Training, handle: SaveHandle) -> None:
    handle.wait(_SOON)
    record = handle.record
    _say(info.rank, "saved", handle.step, record.state.value, *record.committed_in, record.why)
    hosts = [""] * info.world_size
    dist.all_gather_object(hosts, info.host)
    if training.await_copies and handle.step % training.every == 0 and not info.rank:
        _wait_for_copies(set(hosts), handle.step, training.replicas)
    dist.barrier()


def _wait_for_copies(hosts: set[str], step: int, replicas: int) -> None:
    """Believes what lies on the disks, and not what the engine says of it."""
    deadline = time.monotonic() + _SOON.total_seconds()
    while True:
        copies = copies_on(Path(os.environ[ROOT_ENV]), step)
        if all(len(copies.get(host, ())) >= replicas for host in hosts):
            _say(0, "copied", step)
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"step {step} of {sorted(hosts)} has copies only as in {copies}")
        threading.Event().wait(_LOOK_S)


def _wait_at_gate(rank: int, step: int) -> None:
    """Reading a FIFO ends when its writer closed it."""
    _say(rank, "held", step)
    (Path(os.environ[ROOT_ENV]) / "gates" / f"step-{step}").read_bytes()


def _say(rank: int | None, *words: object) -> None:
    # In one write: ranks share a pipe.
    sys.stdout.write(" ".join(map(str, ("rank", rank, *words))).rstrip() + "\n")
    sys.stdout.flush()


def main(argv: Sequence[str]) -> None:
    words = dict(word.split("=", 1) for word in argv)
    readers: dict[str, Callable[[str], object]] = {
        "int": int,
        "str": str,
        "bool": lambda text: text == "True",
    }
    kinds = {field.name: str(field.type) for field in fields(Training)}
    train(Training(**{name: readers[kinds[name]](text) for name, text in words.items()}))  # type: ignore[arg-type]


if __name__ == "__main__":
    main(sys.argv[1:])
