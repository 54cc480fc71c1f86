# SPDX-License-Identifier: Apache-2.0
"""Who called is told from a stack, and not from other numbers on it."""

from __future__ import annotations

import ctypes
import os
import struct

import pytest
import torch  # noqa: F401  # a library

from resiliency.launch.reaction import executable_memory, first_caller


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="looks for x86-64's call instruction")
def test_a_number_that_looks_like_an_address_is_no_caller() -> None:
    """On Linux a futex's operation, 0x189, may stand beside half an address of a large library."""
    code = executable_memory(os.getpid())
    python, library = (
        max((entry for entry in code if entry[2].startswith(names)), key=lambda entry: entry[1] - entry[0])
        for names in (("libpython", "python"), "libtorch")
    )
    called = python[0] + ctypes.string_at(python[0], python[1] - python[0]).index(b"\xe8", 64) + 5
    number = library[0] + 4  # nothing is called before it
    stack = ctypes.create_string_buffer(struct.pack("3Q", 0, number, called), 4096)
    memory = os.open("/proc/self/mem", os.O_RDONLY)
    try:
        top = ctypes.addressof(stack)
        assert first_caller(memory, top, code) == python[2]
        assert first_caller(memory, top + 24, code) is None
    finally:
        os.close(memory)
