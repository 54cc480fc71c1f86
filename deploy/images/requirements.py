# SPDX-License-Identifier: Apache-2.0
"""Print what extras of this project require, without the project's own base: it is for measuring, and large.

    python3 deploy/images/requirements.py supervisor watchdogs >requirements.txt

An extra that this release does not have is left out, with a line on standard error.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import tomllib

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def requirements(extras: list[str]) -> list[str]:
    """Requirements of `extras`, and of those of this project that they name."""
    known = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    found: dict[str, None] = {}
    for extra in extras:
        if extra not in known:
            print(f"this release has no extra {extra!r}", file=sys.stderr)
        for one in known.get(extra, []):
            ours = re.fullmatch(r"resiliency\[([\w,]+)\]", one)
            found.update(dict.fromkeys(requirements(ours[1].split(",")) if ours else [one]))
    return list(found)


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1:])))
