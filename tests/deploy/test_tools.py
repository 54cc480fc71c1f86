# SPDX-License-Identifier: Apache-2.0
"""What the tests of the chart need is fetched before the test workers start, which reach no network."""

from __future__ import annotations

import subprocess

import pytest

from tests.deploy.tools import definitions, helm


@pytest.mark.network
def test_helm_and_the_schemas_of_the_api_are_there() -> None:
    assert subprocess.run([str(helm()), "version"], capture_output=True, timeout=60, check=True).stdout
    assert "io.k8s.api.core.v1.Pod" in definitions()
