# SPDX-License-Identifier: Apache-2.0
"""Starts the fork server that beds of hosts need, from the `conftest.py` of each directory that has some."""

from __future__ import annotations

import pytest

from resiliency.testing.host_bed import warm_up


def start(session: pytest.Session) -> None:
    """Once per process that runs tests: of pytest-xdist's, the workers."""
    config = session.config
    if getattr(config.option, "tx", None) and not hasattr(config, "workerinput"):
        return
    # pytest lets go of standard error between collection and the first test.  What starts now keeps what it
    # finds, and all ranks and agents write there: into a test's report, not between the dots.
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.resume_global_capture()
    try:
        warm_up()
    finally:
        capture.suspend_global_capture()
