# SPDX-License-Identifier: Apache-2.0
"""What the docs say of each fault is what a test shows."""

from __future__ import annotations

import importlib
import os

from tests.supervisor_plane import fault_table
from tests.supervisor_plane.plane import ROOT

MODULES = (
    "supervisor_plane.test_faults",
    "supervisor_plane.test_phases",
    "supervisor_plane.test_journeys",
    "supervisor_plane.test_end_to_end",
    "supervisor_kubernetes.test_end_to_end",
)
PAGE = ROOT / "docs" / "supervisor-policy.md"
BEGIN, END = "<!-- faults: from the tests -->\n", "\n<!-- end of faults -->"


def test_the_table_of_faults_is_that_of_the_tests() -> None:
    """RESILIENCY_WRITE_DOCS=1 writes it."""
    for module in MODULES:
        importlib.import_module(f"tests.{module}")
    order = [f"`tests/{module.replace('.', '/')}.py`" for module in MODULES]
    rows = sorted(fault_table.rows, key=lambda row: order.index(row.test))
    before, _, rest = PAGE.read_text().partition(BEGIN)
    found, _, after = rest.partition(END)
    wanted = fault_table.table(rows)
    if os.environ.get("RESILIENCY_WRITE_DOCS") == "1":
        PAGE.write_text(before + BEGIN + wanted + END + after)
        found = wanted
    assert len(rows) > 20
    assert found == wanted, "the docs say something else of the faults: read the difference, then write it"
