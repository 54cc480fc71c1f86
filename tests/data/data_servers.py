# SPDX-License-Identifier: Apache-2.0
"""Small data servers in this process, and clients of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from resiliency.data import DataClient, DataServer, SampleRanges
from tests.data.dispatch_programs import TOKEN

PATIENCE_S = 120.0


def serving(directory: Path, size: int = 40, **options: Any) -> DataServer:
    source = SampleRanges(size=size, range_size=10, order="sequential")
    return DataServer(source, directory / "book", **{"token": TOKEN, **options})


def client_of(server: DataServer, name: str = "a", **options: Any) -> DataClient:
    return DataClient(server.address, name, **{"token": TOKEN, **options})


def holders(server: DataServer) -> list[str]:
    return [held.worker for held in server._keeper.book.held]
