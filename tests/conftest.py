# SPDX-License-Identifier: Apache-2.0
"""The rank pool and the leak checks, for every test."""

import os

from hypothesis import HealthCheck, settings

pytest_plugins = ["resiliency.testing.fixtures"]

# A test machine with two busy cores is slow at times, and that is no property of the code.
settings.register_profile("project", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("project")

# Unbuffered, Python writes a line in pieces, and ranks that share a pipe tear each other's lines.
os.environ.pop("PYTHONUNBUFFERED", None)
