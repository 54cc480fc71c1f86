#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""No identifier of a word that the project has given up: each has a standard term, named beside it.

Names of modules, classes, functions and variables are looked at; texts are not.
"""

from __future__ import annotations

import re
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WHERE = ("resiliency", "benchmark", "examples")
#: given up -> use
RETIRED = {
    "holding": "location",
    "lot": "candidates",
    "errand": "thread",
    "side_by_side": "run_parallel",
    "intake": "save collector",
    "gathering": "pending save",
    "rescue": "commit_emergency",
    "hurry": "lift_bandwidth_cap",
    "recall": "commit lookup",
    "outbox": "request queue",
    "courier": "(none: the publisher posts)",
    "meeting": "rendezvous",
    "neighbor": "replica hosts",
    "membership": "job context",
    "roll_call": "completion link",
    "tally": "leader state",
    "blueprint": "copy plan",
    "reception": "receiver",
    "receipt": "replica writer",
    "patience": "timeouts, deadline",
    "bye": "detach",
    "goodbye": "detach",
    "make_way": "delete_superseded",
    "set_aside": "quarantine",
    "begin_anew": "start_from_scratch",
    "cut_anew": "resharded",
    "fate": "outcome",
    "verdict": "outcome",
    "shipping": "transfer",
    "high_scale": "gke.replicator",
    "bed": "cluster",
    "strike": "hit",
    "agreement": "rank_group",
}
#: Where a name is not ours to choose, or means what it says: (file, name), each with its reason.
ALLOWED = {
    ("benchmark/flags.py", "high_scale"): "the promised flag",
    ("benchmark/flags.py", "enable_high_scale_ckpt"): "the promised flag",
    ("benchmark/pretrain.py", "high_scale"): "the promised flag",
}


def words_of(name: str) -> str:
    """``CopyQueue``, ``_copy_queue`` and ``COPY_QUEUE`` as ``copy_queue``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_")


def retired_in(name: str) -> str | None:
    parts = f"_{words_of(name)}_"
    return next((old for old in RETIRED if f"_{old}_" in parts or f"_{old}s_" in parts), None)


def main() -> int:
    found = []
    for path in sorted(file for part in WHERE for file in (ROOT / part).rglob("*.py")):
        where = str(path.relative_to(ROOT))
        if (old := retired_in(path.stem)) and (where, path.stem) not in ALLOWED:
            found.append(f"{where}: the module's name has {old!r}; use {RETIRED[old]!r}")
        seen = set()
        with path.open("rb") as file:
            for token in tokenize.tokenize(file.readline):
                if token.type != tokenize.NAME or token.string in seen:
                    continue
                seen.add(token.string)
                if (old := retired_in(token.string)) and (where, token.string) not in ALLOWED:
                    found.append(
                        f"{where}:{token.start[0]}: {token.string} has {old!r}; use {RETIRED[old]!r}"
                    )
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
