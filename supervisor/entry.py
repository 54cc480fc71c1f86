# SPDX-License-Identifier: Apache-2.0
"""What the programs of the supervisor do first: see that this package is the one that was meant, and log.

PyPI has another distribution called ``supervisor`` (a process manager), with the same import name.
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Iterable
from pathlib import Path

from resiliency import log
from resiliency.errors import ConfigError
from resiliency.runtime import RunInfo

logger = logging.getLogger(__name__)

REFUSED = 2


def start_program(name: str) -> None:
    """Configure logging, and tell of another distribution called supervisor.

    Raises:
        ConfigError: the other one has overwritten files of this package.
    """
    log.configure(RunInfo(job_name=name, host=RunInfo.from_env().host))
    logging.getLogger("supervisor").setLevel(logging.getLogger("resiliency").level)
    other = other_distribution(importlib.metadata.distributions(), Path(__file__).parent)
    if other:
        logger.warning("%s", other)


def other_distribution(distributions: Iterable[importlib.metadata.Distribution], here: Path) -> str:
    """A sentence about a distribution ``supervisor`` among `distributions`; empty when there is none.

    Raises:
        ConfigError: it has files in the directory `here` of this package.
    """
    for distribution in distributions:
        if (distribution.metadata["Name"] or "").lower() != "supervisor":
            continue
        what = (
            f"supervisor {distribution.version}, another distribution with the import name of this package,"
        )
        where = Path(str(distribution.locate_file("supervisor")))
        if where.resolve() == here.resolve():
            raise ConfigError(
                f"{what} is installed over it in {where}.",
                hint="Install the two in different environments: pip uninstall supervisor, then install "
                "resiliency[supervisor] again.",
                path=str(where),
            )
        return f"{what} is installed in {where}; this process uses {here}"
    return ""
