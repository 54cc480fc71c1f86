# SPDX-License-Identifier: Apache-2.0
"""Errors tell people what to do, and arrive whole in another process."""

from __future__ import annotations

import copy
import pickle

import pytest

from resiliency import errors
from resiliency.errors import CheckpointCorrupt, CheckpointError, ConfigError, ResiliencyError

TREE = [kind for kind in vars(errors).values() if isinstance(kind, type)]


@pytest.mark.parametrize("kind", TREE)
def test_every_error_survives_pickling_with_all_its_fields(kind: type[ResiliencyError]) -> None:
    error = kind("shard 3 is torn.", hint="Restore from a peer.", rank=3, path="/a b/ü")
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):  # noqa: S301
        assert type(twin) is kind
        assert str(twin) == "shard 3 is torn.  Restore from a peer."
        assert (twin.message, twin.hint, twin.fields) == (error.message, error.hint, error.fields)


def test_an_error_without_a_hint_is_its_message() -> None:
    assert str(ConfigError("no such flag.")) == "no such flag."


def test_a_caller_can_catch_by_who_caused_it() -> None:
    assert issubclass(CheckpointCorrupt, CheckpointError)
    assert not issubclass(CheckpointCorrupt, ConfigError)
    assert all(issubclass(kind, ResiliencyError) for kind in TREE)


@pytest.mark.parametrize("kind", TREE)
def test_the_text_on_top_of_the_module_draws_every_class(kind: type[ResiliencyError]) -> None:
    assert errors.__doc__ is not None
    assert kind.__name__ in errors.__doc__
