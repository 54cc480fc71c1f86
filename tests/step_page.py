# SPDX-License-Identifier: Apache-2.0
"""A step page for this process, as its launcher would have given it one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from resiliency import progress
from resiliency.progress import StepPage


@contextmanager
def own_page() -> Iterator[StepPage]:
    """What this process reports within the context is in the first slot."""
    page = StepPage(1)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(progress, "_slot", progress._open_slot(page.variable(0)))
            patch.setattr(progress, "_looked", True)
            yield page
    finally:
        page.close()
