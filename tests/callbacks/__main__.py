# SPDX-License-Identifier: Apache-2.0
"""Run all checks: ``python -m tests.callbacks DIRECTORY``."""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from pathlib import Path

import pytest

from tests.callbacks import process_checks, stop_checks, tier_checks  # noqa: F401  # register their checks
from tests.callbacks.checks import CHECKS


def main(directory: Path) -> None:
    """Run every check in a directory of its own and print the verdicts as JSON in the last line."""
    warnings.simplefilter("ignore")
    verdicts: dict[str, str] = {}
    for name, function in CHECKS.items():
        own = directory / name
        own.mkdir()
        try:
            function(own)
            verdicts[name] = ""
        except (
            Exception,
            pytest.fail.Exception,
        ):  # the border: each failure is reported, and the next check runs
            verdicts[name] = traceback.format_exc()
    print(json.dumps(verdicts), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
