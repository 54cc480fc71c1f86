# SPDX-License-Identifier: Apache-2.0
"""The fork server starts before the first test, with the engine imported: beds of hosts need it."""

from __future__ import annotations

import pytest

from tests import fork_server


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Before the rank pool, which would start it with less."""
    fork_server.start(session)
