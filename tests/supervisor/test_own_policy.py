# SPDX-License-Identifier: Apache-2.0
"""The policy that docs/supervisor-policy.md shows does what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from supervisor.policy.thresholds import flags
from supervisor.values import CommandKind, EventType
from tests.supervisor.controllers import Controller

PAGE = (Path(__file__).parents[2] / "docs" / "supervisor-policy.md").read_text()
POLICY, PLAY = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def shown() -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(POLICY, names)  # noqa: S102 - the page is ours
    return names


def test_it_swaps_where_the_default_would_reset_the_job() -> None:
    reset = Controller(max_workload_restarts=1)
    assert reset.happens(EventType.XID, code=95) == [CommandKind.WORKLOAD_RESET]
    swap = Controller(policy=shown()["SwapFirst"], max_workload_restarts=1)
    assert swap.happens(EventType.XID, code=95) == [CommandKind.HOT_SWAP]
    assert swap.end() == []


def test_it_waits_for_a_person_where_the_job_is_in_production() -> None:
    fleet = Controller(policy=shown()["SwapFirst"], name="prod-1")
    assert fleet.happens(EventType.HOST_HB) == []
    assert fleet.wait(599.0) == []
    assert fleet.wait(1.0) == [CommandKind.HOT_SWAP]


def test_it_passes_the_simulation_as_the_page_says() -> None:
    names = shown()
    exec(PLAY.replace("range(100)", "range(20)"), names)  # noqa: S102
    assert names["result"].effects >= 0
    assert names["seed"] == 19


def test_every_flag_on_the_page_is_a_row_of_the_table() -> None:
    named = set(re.findall(r"`(--[a-z-]+)`", PAGE)) - {"--seeds"}
    assert named - set(flags()) == set()
