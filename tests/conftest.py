# SPDX-License-Identifier: Apache-2.0
"""The warm interpreter, the rank pool and the leak checks, for every test."""

import gc
import inspect
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from resiliency.runtime import AGENT_HOST_ENV
from resiliency.testing import warm
from resiliency.testing.cluster import hosts as cluster_hosts
from tests import agent_host, asynchronous

pytest_plugins = ["resiliency.testing.fixtures"]

# A test machine with two busy cores is slow at times, and that is no property of the code.  The same
# examples in each run: a check says whether this change is good.  HYPOTHESIS_PROFILE=explore looks for what
# no run has seen yet.
calm = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("project", calm, derandomize=True)
settings.register_profile("explore", calm)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "project"))

# Unbuffered, Python writes a line in pieces, and ranks that share a pipe tear each other's lines.
os.environ.pop("PYTHONUNBUFFERED", None)
# As in ranks under a launcher; a program with another number could not be forked from the warm interpreter.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Else gRPC, once a test has used it, makes its descriptors anew at each fork of a later one.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"


def pytest_sessionstart() -> None:
    """What programs and ranks of many tests import, beside torch."""
    gc.disable()  # test modules stay: collections find nothing among them, and take a fifth of their import
    warm.preload(*cluster_hosts.PRELOAD, "resiliency.launch.job", "resiliency.launch.agents.main")


def pytest_collection_finish() -> None:
    gc.freeze()  # nor would those to come
    gc.enable()


#: Folders that use NeMo: one worker takes all of a group, so that few interpreters import NeMo, and runs that
#: many tests compare with are made once.
WITH_NEMO = {"tests/nemo": "trainings", "tests/callbacks": "adapters", "tests/plugins": "adapters"}


def unit_of(nodeid: str) -> str:
    """Tests of one unit run in one worker: those of one file, or of a group of `WITH_NEMO`."""
    folder = "/".join(nodeid.split("/")[:2])
    return WITH_NEMO.get(folder, nodeid.partition("::")[0])


class _NamedAtOnce:
    """Failures are named when they happen, and not at the end of the run alone."""

    def __init__(self, terminal: Any) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._terminal.write_line(f"\nfailed: {report.nodeid} ({report.when})")


def pytest_configure(config: pytest.Config) -> None:
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_NamedAtOnce(terminal))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine has a loop and a deadline of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    run = asynchronous.run
    if pyfuncitem.get_closest_marker("virtual_time") is not None:
        from tests.supervisor_kubernetes.virtual_time import run_in_virtual_time as run
    names = pyfuncitem._fixtureinfo.argnames
    run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


def pytest_runtest_setup(item: pytest.Item) -> None:
    mark = item.get_closest_marker("gpu")
    if mark is not None:
        import torch

        wanted, there = mark.kwargs.get("devices", 1), torch.cuda.device_count()
        if there < wanted:
            pytest.skip(f"gpu: needs {wanted} CUDA devices, {there} are there")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Units with the most slow tests come first, so that no worker is left with one at the end."""
    for item in items:
        mark = item.get_closest_marker("thorough")
        if mark is not None and not (mark.args and str(mark.args[0]).strip()):
            raise pytest.UsageError(f"{item.nodeid}: the mark `thorough` needs a reason")
    marks = ("slow", "nemo")
    slow = Counter(unit_of(item.nodeid) for item in items if any(map(item.get_closest_marker, marks)))
    items.sort(key=lambda item: -slow[unit_of(item.nodeid)])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Units go to the workers of pytest-xdist, where they are more than one: see `scripts/check`."""
    from xdist.scheduler import LoadFileScheduling

    class LoadUnits(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    return LoadUnits(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def nemo_is_warm() -> None:
    """From here on the warm interpreter holds NeMo and Megatron: forked trainings import little."""
    warm.preload("nemo.collections.llm", "megatron.core.dist_checkpointing")


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
    """But not these: their agents end some time after they were left, and share no memory with a host."""
    monkeypatch.delenv(AGENT_HOST_ENV)
