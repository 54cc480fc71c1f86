# SPDX-License-Identifier: Apache-2.0
"""gRPC keeps threads for the life of the process: they are there before the first test looks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.supervisor_wire.certificates import Authority
from tests.supervisor_wire.fleet import daemon_alone  # noqa: F401 - a fixture


async def _init() -> None:
    grpc.aio.init_grpc_aio()


@pytest.fixture(scope="session", autouse=True)
def grpc_is_warm() -> Iterator[None]:
    # In a loop of its own: gRPC asks for one, and a test before this one may have closed the thread's.
    asyncio.run(_init())
    yield
    grpc.aio.shutdown_grpc_aio()


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("a-token-of-training-hosts\n")
    return path
