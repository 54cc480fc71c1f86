# SPDX-License-Identifier: Apache-2.0
"""Whether two states are the same, object by object."""

from __future__ import annotations

import dataclasses
import struct
from collections import deque
from typing import Any

import numpy as np
import torch

from tests.checkpoint.capture_builders import bits


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, type(expected))
        assert bits(found) == bits(expected)
    elif dataclasses.is_dataclass(expected):
        assert type(found) is type(expected)
        for field in dataclasses.fields(expected):
            assert_same(getattr(found, field.name), getattr(expected, field.name))
    elif isinstance(expected, dict):
        assert type(found) is type(expected)
        assert list(found) == list(expected)
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert type(found) is type(expected)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, (float, complex)) and type(expected) in (float, complex):
        assert type(found) is type(expected)
        one, other = complex(found), complex(expected)
        assert struct.pack("<dd", one.real, one.imag) == struct.pack("<dd", other.real, other.imag)
    elif isinstance(expected, deque):
        assert (type(found), found.maxlen) == (type(expected), expected.maxlen)
        assert_same(list(found), list(expected))
    elif isinstance(expected, np.ndarray):
        assert type(found) is type(expected)
        np.testing.assert_array_equal(found, expected, strict=True)
    else:
        assert type(found) is type(expected)
        assert found == expected
