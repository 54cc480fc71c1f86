# SPDX-License-Identifier: Apache-2.0
"""What is read of other libraries that they do not promise; a test fails when it moves.

Most of it are loaders that deal, skip or count by themselves what a sampler of ours gives: with them each
rank would train on a part of its part, or twice on the same, without a word. A sampler is not told which
loader it is in, and plain loops call nothing of ours; so it looks at the frames of the call that begins an
iteration, which costs microseconds once an epoch.
"""

from __future__ import annotations

import sys

from resiliency.errors import ConfigError

_TORCH = "torch.utils.data.dataloader"
#: Library, class (any if empty), whether it is in the way at an epoch's start too, what it does, what to do.
_FOREIGN = (
    (
        "accelerate",
        "BatchSamplerShard",
        True,
        "deals the batches of this sampler to the ranks, which the sampler has done",
        "Leave the loader out of accelerator.prepare, or prepare it for one process; see docs/data.md.",
    ),
    (
        "accelerate",
        "DataLoaderDispatcher",
        True,
        "reads on one rank and sends each rank a part: this rank's position is not what it was given",
        "Leave out dispatch_batches, and the loader out of accelerator.prepare; see docs/data.md.",
    ),
    (
        "accelerate",
        "SkipBatchSampler",
        False,
        "skips batches from where the sampler goes on by itself",
        "Leave out skip_first_batches: the state of the sampler says where it goes on.",
    ),
    (
        "torchdata",
        "",
        True,
        "keeps a position of its own, which is not that of the model",
        "Use torch's DataLoader: the position is in the state of the sampler.",
    ),
)


def refuse_foreign_loaders(*, at_start: bool) -> None:
    """Raises ConfigError: the iteration that begins is inside such a loader.

    Args:
        at_start: the iteration takes the epoch from its start.
    """
    frame = sys._getframe()
    while (caller := frame.f_back) is not None:
        frame = caller
        module = str(frame.f_globals.get("__name__")).partition(".")[0]
        for library, name, always, does, hint in _FOREIGN:
            if module != library or (at_start and not always):
                continue
            if name in ("", type(frame.f_locals.get("self")).__name__):
                raise ConfigError(f"the {name or 'loader'} of {library} {does}.", hint=hint)


def refuse_persisting_workers() -> None:
    """Raises ConfigError: the iteration that begins is one more of workers that persist."""
    frame = sys._getframe()
    while (caller := frame.f_back) is not None:
        frame = caller
        if frame.f_code.co_name != "_reset" or frame.f_globals.get("__name__") != _TORCH:
            continue
        if not frame.f_locals.get("first_iter", True):
            raise ConfigError(
                "the workers of the loader persist and hold a copy of the dataset, whose share was changed "
                "since.",
                hint="Leave out persistent_workers=True, or num_workers: the samples are in memory.",
            )


def has_unsaved_buffer(dataset: object) -> bool:
    """Whether a Hugging Face dataset shuffles in a buffer, whose samples are in no state of it.

    ``shuffle()`` of theirs makes one of 1,000 samples for each worker. Their own log says at a restart that
    it is filled again: what was in it is left out.
    """
    left = [getattr(dataset, "_ex_iterable", None)]
    while left:
        found = left.pop()
        if type(found).__name__ == "BufferShuffledExamplesIterable":
            return True
        inner = vars(found) if hasattr(found, "__dict__") else {}
        left += [inner[name] for name in ("ex_iterable",) if name in inner]
        left += inner.get("ex_iterables", [])
    return False
