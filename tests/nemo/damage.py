# SPDX-License-Identifier: Apache-2.0
"""Damage to a committed checkpoint."""

from __future__ import annotations

from pathlib import Path


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
