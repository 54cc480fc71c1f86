# SPDX-License-Identifier: Apache-2.0
"""Modules that read a rank's variables while they are imported, and how a forked rank sets that right.

Each function does again what the top level of its module did with the variables, now that they are the
rank's.  Nothing is imported here: a module that the template does not hold needs no repair.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any


def _lightning_rank(module: Any) -> None:
    module.rank_zero_only.rank = module._get_rank() or 0


def _torchmetrics_rank(module: Any) -> None:
    module.rank_zero_only.rank = int(os.environ.get("LOCAL_RANK", 0))


def _nemo_logger(module: Any) -> None:
    """Handlers and rank of NeMo's logger: other ranks than the first print nothing."""
    logger = module.logging
    for handler in list(logger._logger.handlers):
        logger._logger.removeHandler(handler)
    logger.captureWarnings(False)
    logger.__init__()


def _nemo_telemetry(module: Any) -> None:
    """NVIDIA's OneLogger: made again, because it is configured once, for one rank.

    Silently: the import said what there is to say, and a program that does without NeMo must not print it.
    """
    from_module = sys.modules[module.OneLoggerNeMoCallback.__module__]
    provider = from_module.TrainingTelemetryProvider
    base = sys.modules[provider.__module__].OneLoggerProvider
    for singleton in (provider, base):
        type(singleton)._instances.pop(singleton, None)
    module.OneLoggerNeMoCallback._instance = None
    module.CallbackGroup._instance = None
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        module.CallbackGroup.get_instance()
    finally:
        logging.disable(before)


#: Module -> its repair, in the order in which they have to be done.
REPAIRS: Mapping[str, Callable[[Any], None]] = {
    "lightning.fabric.utilities.rank_zero": _lightning_rank,
    "lightning_fabric.utilities.rank_zero": _lightning_rank,
    "torchmetrics.utilities.prints": _torchmetrics_rank,
    "nemo.utils": _nemo_logger,
    "nemo.lightning.callback_group": _nemo_telemetry,
}


#: What the repairs read of a rank's environment, by launchers of all kinds.
_NUMBERS = (
    *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "OMPI_COMM_WORLD_RANK", "JSM_NAMESPACE_RANK"),
    *("SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID"),
)


def not_numbers(env: Mapping[str, str | None]) -> list[str]:
    """Variables in `env` that no repair could read: such a program starts cold, and says what is wrong."""
    return [name for name in _NUMBERS if (text := env.get(name)) is not None and not text.strip().isdecimal()]


def failing(modules: Mapping[str, ModuleType], tried: set[str]) -> dict[str, str]:
    """Try the repairs of `modules` that are not in `tried`; those that are not as expected, and why.

    In the template, for a rank whose repair fails ends, and would end again at each restart.
    """
    failed = {}
    for name in [name for name in REPAIRS if name in modules and name not in tried]:
        tried.add(name)
        try:
            REPAIRS[name](modules[name])
        except Exception as error:  # of a version that this file does not know
            failed[name] = f"cannot be set right for each rank ({type(error).__name__}: {error})"
    return failed


def repair_all(modules: Mapping[str, ModuleType]) -> None:
    """Repair those of `modules` that need it; the environment is the rank's already."""
    for name, repair in REPAIRS.items():
        if name in modules:
            repair(modules[name])
