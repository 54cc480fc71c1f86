# SPDX-License-Identifier: Apache-2.0
"""Generated trainings that are killed, left, rolled back and resized, over real DataLoaders.

What must hold is in `tests.data.sampler_histories`. More than the check has time for:

    RESILIENCY_EXAMPLES=2000 python -m pytest tests/data/test_sampler_histories.py -k many
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.data.sampler_histories import play

EXAMPLES = int(os.environ.get("RESILIENCY_EXAMPLES", "0"))
FEW = 50
#: Histories with loader workers, which take a second each.
WITH_WORKERS = range(7, 10_000_000, 10)


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    """Thousands of lines are logged, and read by nobody."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_in_fifty_generated_trainings_each_sample_is_in_the_model_once_per_epoch() -> None:
    happened: Counter[str] = Counter()
    for seed in range(FEW):
        if seed not in WITH_WORKERS:
            happened += play(seed).happened
    assert len(happened) == 11, happened  # each kind of event


def test_a_generated_training_with_loader_workers_is_no_different() -> None:
    play(WITH_WORKERS[0])


@pytest.mark.thorough("fifty of these histories are near")
@pytest.mark.slow
def test_in_many_generated_trainings_each_sample_is_in_the_model_once_per_epoch() -> None:
    for seed in range(FEW, FEW + (EXAMPLES or 300)):
        play(seed)
