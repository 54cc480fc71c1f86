# SPDX-License-Identifier: Apache-2.0
"""The rank pool and the leak checks, for every test."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from resiliency.runtime import AGENT_HOST_ENV
from tests import agent_host

pytest_plugins = ["resiliency.testing.fixtures"]

# A test machine with two busy cores is slow at times, and that is no property of the code.
settings.register_profile("project", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("project")

# Unbuffered, Python writes a line in pieces, and ranks that share a pipe tear each other's lines.
os.environ.pop("PYTHONUNBUFFERED", None)

#: Directories whose tests share what takes long to make: trainings, ranks that have Megatron imported.
_TOGETHER = ("tests/nemo", "tests/plugins")


class ByPlace(LoadScopeScheduling):
    """Of workers side by side each takes these directories, and else files, as a whole."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return next((place for place in _TOGETHER if file.startswith(f"{place}/")), file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByPlace:
    return ByPlace(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real training comes first: it keeps the cores busy for as long as all that waits beside it."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/nemo/"))


@pytest.fixture(scope="session")
def agent_host_env() -> Iterator[dict[str, str]]:
    """Environment variables of trainers whose agents need no import: see `tests.agent_host`."""
    with agent_host.running() as variables:
        yield variables


@pytest.fixture
def agents_at_once(agent_host_env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for trainers in this process, and in those that it starts."""
    for name, value in agent_host_env.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def own_agents(agents_at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """But not these: an agent of their own ends some time after it was left, and shares no memory with a host."""
    monkeypatch.delenv(AGENT_HOST_ENV)
