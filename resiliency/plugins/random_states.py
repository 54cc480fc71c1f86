# SPDX-License-Identifier: Apache-2.0
"""The random state of one rank: taken, set, and adopted from another rank that held the same state.

Ranks of one replica group (`resiliency.plugins.replica_groups`) hold the same model, and each its
own random state.  NeMo seeds data-parallel ranks alike and they draw equally often, so these are the
same as well, unless the program seeds or draws by rank.  Which of the generators are the same in the
group is found out once, at the first save, and kept in every saved state.  A rank that gets the state
of another rank of its group goes on with

* the very numbers that it would have drawn itself, from each generator that was the same;
* numbers of its own, from each that was not: seeded from the owner's state and this rank's number, so
  that they are the same at each try, and not the owner's, which would give both ranks one stream.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import random as megatron_random

from resiliency.plugins.replica_groups import replica_group

logger = logging.getLogger(__name__)

#: In a saved state: the generators that were in the same state on all ranks of the replica group.
_SHARED = "same_in_replica_group"


def rng_state() -> dict[str, Any]:
    """Every generator of this process, for `set_rng_state`."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        # Each state is cloned: the tracker hands out its live tensors.
        "megatron": {
            name: state.clone() for name, state in megatron_random.get_cuda_rng_tracker().get_states().items()
        },
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Set every generator of this process."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    # A dictionary of its own: the tracker keeps it, and writes there as it draws.
    megatron_random.get_cuda_rng_tracker().set_states(dict(state["megatron"]))


class RandomStates:
    """Takes the random state at each save of a job."""

    def __init__(self) -> None:
        self._shared: list[str] | None = None

    def take(self) -> dict[str, Any]:
        """Every generator, with what `adopted` needs to know; collective at the first call only."""
        state = rng_state()
        if self._shared is None:
            self._shared = _shared_in_group(state)
        return {**state, _SHARED: self._shared}


def adopted(state: Mapping[str, Any], *, owner: int, rank: int) -> dict[str, Any]:
    """The random state with which `rank` goes on, from the one that `owner` saved."""
    found = {name: value for name, value in state.items() if name != _SHARED}
    if owner == rank:
        return found
    others = [name for name in found if name not in state.get(_SHARED, ())]
    if others:
        logger.warning(
            "rank %d goes on with the state of rank %d, which drew other random numbers from %s: its own are"
            " seeded anew",
            rank,
            owner,
            " and ".join(others),
        )
    return {name: _seeded(name, value, rank) if name in others else value for name, value in found.items()}


def digest(state: Any) -> str:
    """Equal for equal states."""
    hashed = hashlib.sha256()
    _feed(hashed, state)
    return hashed.hexdigest()


def _shared_in_group(state: Mapping[str, Any]) -> list[str]:
    mine = {name: digest(value) for name, value in state.items()}
    if not dist.is_initialized():
        return sorted(mine)
    own = (replica_group(), mine)
    everyone = [own] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    group = [found for label, found in everyone if label == own[0]]
    return sorted(name for name in mine if all(found.get(name) == mine[name] for found in group))


def _feed(hashed: Any, value: Any) -> None:
    """By content: the pickles of equal tensors differ."""
    if isinstance(value, Mapping):
        for key in sorted(value):
            hashed.update(key.encode())
            _feed(hashed, value[key])
    elif isinstance(value, torch.Tensor):
        hashed.update(value.cpu().numpy().tobytes())
    elif isinstance(value, np.ndarray):
        hashed.update(value.tobytes())
    elif isinstance(value, list | tuple):
        for item in value:
            _feed(hashed, item)
    else:
        hashed.update(pickle.dumps(value))


def _seeded(name: str, value: Any, rank: int) -> Any:
    """A state of generator `name`, of the kind of `value`, that only this rank has."""
    seed = int.from_bytes(hashlib.sha256(f"{digest(value)} of rank {rank}".encode()).digest()[:4], "little")
    if name == "python":
        return random.Random(seed).getstate()  # noqa: S311 - numbers for training, no secrets
    if name == "numpy":
        return np.random.RandomState(seed).get_state()
    if isinstance(value, Mapping):  # Megatron's tracker: a state for each of its names
        return {key: _seeded(key, tracked, rank) for key, tracked in value.items()}
    return _seeded_tensor(value, seed) if isinstance(value, torch.Tensor) else value


def _seeded_tensor(state: torch.Tensor, seed: int) -> torch.Tensor:
    of_cpu = torch.Generator().manual_seed(seed).get_state()
    if state.shape == of_cpu.shape:
        return of_cpu
    made = state.clone()  # of CUDA: a seed and an offset, eight bytes each
    made[:8] = torch.tensor(list(seed.to_bytes(8, "little")), dtype=torch.uint8)
    return made
