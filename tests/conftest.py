# SPDX-License-Identifier: Apache-2.0
"""The rank pool and the leak checks, for every test."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["resiliency.testing.fixtures"]

# A test machine with two busy cores is slow at times, and that is no property of the code.
settings.register_profile("project", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("project")

# Unbuffered, Python writes a line in pieces, and ranks that share a pipe tear each other's lines.
os.environ.pop("PYTHONUNBUFFERED", None)

#: Directories whose tests share what takes long to make: trainings, ranks that have Megatron imported.
_TOGETHER = ("nemo", "plugins")
_HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of workers side by side each takes these directories, and else files, whole (``--dist loadgroup``).

    Real training comes first: it keeps the cores busy for as long as all that waits beside it.
    """
    for item in items:
        place = item.path.relative_to(_HERE)
        together = place.parts[0] in _TOGETHER
        item.add_marker(pytest.mark.xdist_group(place.parts[0] if together else str(place)))
    items.sort(key=lambda item: item.path.relative_to(_HERE).parts[0] != "nemo")
