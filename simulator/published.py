# SPDX-License-Identifier: Apache-2.0
"""Failure statistics that others have published, as sources of schedules.

The figures with their source are in ``published.json`` beside this file; only those are there that a table of
the source states as numbers:

- ``llama3``: Llama Team, AI @ Meta: The Llama 3 Herd of Models, arXiv:2407.21783, section 3.3.4, table 5
  (root causes of unexpected interruptions in 54 days of pre-training of Llama 3 405B):
  18 causes with their counts, 419 together, on 16,384 GPUs.

Which kind stands for a cause is our choice.  A rate belongs to a fleet: the same
GPUs fail as often in a small job, which is why a small one must be sped up (``--speed``) or play a larger one
(``--as_gpus``) to see a fault within the hour.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from resiliency.errors import ConfigError
from simulator.faults import Kind
from simulator.schedule import Share

_FILE = Path(__file__).with_name("published.json")
_DAY_US = 86_400 * 1_000_000


@dataclass(frozen=True, kw_only=True)
class Published:
    """One publication.

    Attributes:
        name, what, source: for readers.
        shares: causes with their counts, and the kind that stands for each.
        gpu_mean_us: mean time between failures of one GPU with its part of the host.
    """

    name: str
    what: str
    source: str
    shares: tuple[Share, ...]
    gpu_mean_us: Fraction


def publications() -> dict[str, Published]:
    """All, by name."""
    found = {}
    for name, entry in json.loads(_FILE.read_text(encoding="utf-8")).items():
        shares = tuple(Share(Kind(each["kind"]), each["count"], each["cause"]) for each in entry["classes"])
        failures = sum(share.weight for share in shares)
        found[name] = Published(
            name=name,
            what=entry["what"],
            source=entry["source"],
            shares=shares,
            gpu_mean_us=Fraction(entry["gpu_days"] * _DAY_US, failures),
        )
    return found


def publication(name: str) -> Published:
    """The one with this name.

    Raises:
        ConfigError: there is none; the message lists them.
    """
    known = publications()
    if name not in known:
        raise ConfigError(
            f"--profile {name}: there is no such publication.", hint=f"Choose from {', '.join(known)}."
        )
    return known[name]
