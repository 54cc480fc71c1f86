# SPDX-License-Identifier: Apache-2.0
"""Which job files fit which orchestrator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from resiliency.errors import ConfigError
from supervisor.parts.run import make_orchestrator
from supervisor.parts.settings import ALL, PartSettings


@pytest.mark.parametrize(
    ("orchestrator", "fields", "sentence"),
    [
        ("ray", {}, "--orchestrator ray needs resources: several hosts would share a node"),
        ("ray", {"resources": {}}, "--orchestrator ray needs resources: several hosts would share a node"),
        ("local", {"resources": {"GPU": 8}}, "--job-file: resources are for --orchestrator ray"),
    ],
)
def test_resources_are_what_a_host_of_ray_has_and_no_other(
    tmp_path: Path, orchestrator: str, fields: dict[str, Any], sentence: str
) -> None:
    path = tmp_path / "job.json"
    file = {"hosts": ["a"], "jobs": [{"workload": "job", "command": ["true"]}], **fields}
    path.write_text(json.dumps(file))
    flags = [f"--orchestrator={orchestrator}", f"--job-file={path}", f"--state-dir={tmp_path}"]
    settings = PartSettings.parse(ALL, flags, {"SUPERVISOR_PLAINTEXT": "1"})
    with pytest.raises(ConfigError, match=sentence):
        make_orchestrator(settings)
