# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.supervisor_ray.cluster import Cluster, ray_cluster
from tests.supervisor_wire.conftest import grpc_is_warm

__all__ = ["grpc_is_warm"]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with ray_cluster(tmp_path) as started:
        yield started
