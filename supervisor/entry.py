# SPDX-License-Identifier: Apache-2.0
"""What the programs of the supervisor have in common: their first steps, a missing gRPC, an end by a signal.

PyPI has another distribution called ``supervisor`` (a process manager), with the same import name.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import signal
import sys
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from resiliency import log
from resiliency.errors import ConfigError
from resiliency.files import ALIVE_PERIOD_S, touch_alive_file
from resiliency.runtime import RunInfo
from resiliency.tasks import first_of

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


def explained(run: Callable[[], int]) -> int:
    """The exit code of `run`; a sentence where gRPC is not installed."""
    try:
        return run()
    except ModuleNotFoundError as error:
        package = {"grpc": "grpcio", "google": "protobuf"}.get((error.name or "").partition(".")[0])
        if package is None:
            raise
        print(
            f"the supervisor needs {package}.  Install it with: pip install 'resiliency[supervisor]'",
            file=sys.stderr,
        )
        return REFUSED


async def until_signal(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` until its end, or cancel it at SIGTERM or SIGINT.

    Meanwhile the file for probes is touched, if there is one.

    Raises:
        ConfigError: it cannot be.
    """
    loop = asyncio.get_running_loop()
    both = asyncio.ensure_future(first_of(work, _touch_alive_file()))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, both.cancel)
    with suppress(asyncio.CancelledError):
        await both


async def _touch_alive_file() -> None:
    while True:
        touch_alive_file()
        await asyncio.sleep(ALIVE_PERIOD_S)


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
