# SPDX-License-Identifier: Apache-2.0
"""pytest plugin: a warm interpreter and a rank pool for the session, and a check for what tests leave behind.

    pytest_plugins = ["resiliency.testing.fixtures"]     # in your top conftest.py

Every test that ends with more threads, processes, descriptors or sockets, other environment
variables, or files in shared memory than it began with gets an error that names them.  What a
library keeps for the life of the process is allowed test by test, with a reason:

    @pytest.mark.leaks("threads", reason="NeMo's logger keeps a thread")

Python processes of the tests are forked from the warm interpreter, see `resiliency.testing.warm`.
"""

from __future__ import annotations

import getpass
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from multiprocessing import resource_tracker

import pytest

from resiliency.testing import warm
from resiliency.testing.leaks import LeakKind, Owner, ProcessSnapshot, leaks_since
from resiliency.testing.rank_pool import PRELOAD, RankPool

_OWNERS = pytest.StashKey[list[Owner]]()
#: Job functions of a rank pool are in files that import it.
_PRELOAD = (*PRELOAD, "pytest")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "leaks(*kinds, reason): what this test may leave behind: "
        + ", ".join(kind.value for kind in LeakKind),
    )
    owners = [Owner(pids=warm.pids, descriptors=warm.descriptors)]  # it is replaced if it is lost
    config.stash[_OWNERS] = owners
    # torch sets this in the process that makes an optimizer step, and reads it during imports: processes that
    # are started later could not be forked from the interpreter that was started before.
    with suppress(KeyError, OSError):  # a user without a name
        torch_default = f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", torch_default)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Start the interpreter: it imports while tests are collected, and the first process waits for it."""
    config = session.config
    hands_out_tests = getattr(config.option, "tx", None) and not hasattr(config, "workerinput")
    if not hands_out_tests and not config.option.collectonly:
        stack = ExitStack()
        config.add_cleanup(stack.close)
        stack.enter_context(warm.interpreter(*_PRELOAD))


@pytest.fixture(scope="session", autouse=True)
def _long_lived_servers() -> None:
    """Start Python's resource tracker now: it lives as long as the process, so no test owns it."""
    resource_tracker.ensure_running()


@pytest.fixture(scope="session")
def rank_pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """The session's rank processes: ``rank_pool.run(fn, 4)``."""
    with RankPool(preload=["pytest"]) as pool:
        pool.warm_up(1)
        owner = Owner(pids=lambda: pool.pids, descriptors=lambda: pool.descriptors)
        request.config.stash[_OWNERS].append(owner)
        yield pool


@pytest.fixture(autouse=True)
def _no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves anything behind."""
    allowed = {LeakKind(kind) for marker in request.node.iter_markers("leaks") for kind in marker.args}
    owners = request.config.stash[_OWNERS]
    before = ProcessSnapshot.take()
    yield
    if leaks := leaks_since(before, allowed=allowed, owners=owners):
        _put_back(before)
        pytest.fail("the test left behind:\n  " + "\n  ".join(leaks), pytrace=False)


def _put_back(before: ProcessSnapshot) -> None:
    """Repair the environment, so that one culprit does not fail the tests after it."""
    for name in set(os.environ) - set(before.variables):
        del os.environ[name]
    os.environ.update(before.variables)
