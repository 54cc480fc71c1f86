# SPDX-License-Identifier: Apache-2.0
"""Opens the checkpoint process of a rank that sees it end."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeVar

from tests.plugins.megatron_ranks import SOON

if TYPE_CHECKING:
    from resiliency.plugins.persistent_ckpt_proc import PersistentCheckpointProcessIO

_Io = TypeVar("_Io", bound="PersistentCheckpointProcessIO")


@contextlib.contextmanager
def outlived(io: _Io) -> Iterator[_Io]:
    """Yields `io`, opened; then ends it well, and waits until its process is gone."""
    agent = os.pidfd_open(io.open().agent_pid)
    try:
        yield io
    finally:
        io.finish()
        io.teardown()
        left, _, _ = select.select([agent], [], [], SOON.total_seconds())
        os.close(agent)
        assert left, "its process lives on"
