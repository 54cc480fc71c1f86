# SPDX-License-Identifier: Apache-2.0
"""Modules that read a program's variables while they are imported, and how a forked one sets that right.

Each function does again what the top level of its module did with the variables, now that they are the
program's.  Nothing is imported here: a module that the template does not hold needs no repair.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FunctionType, ModuleType
from typing import Any


def _lightning_rank(module: Any) -> None:
    module.rank_zero_only.rank = module._get_rank() or 0


def _torchmetrics_rank(module: Any) -> None:
    module.rank_zero_only.rank = int(os.environ.get("LOCAL_RANK", 0))


#: What names the directory of temporary files -> that directory.
_directories: dict[tuple[str | None, ...], str] = {}


@contextmanager
def _temporary() -> Iterator[str]:
    """Directory of temporary files; `tempfile` would keep it, and a program may name another one first.

    To find it `tempfile` writes a file, which a program that is killed leaves: that is done once for a
    template and all that is forked from it.
    """
    kept = tempfile.tempdir
    here = None
    with suppress(FileNotFoundError):  # it was deleted
        here = os.getcwd()
    names = *(os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP")), here
    known = _directories.get(names)
    tempfile.tempdir = known if known is not None and os.access(known, os.W_OK | os.X_OK) else None
    try:
        _directories[names] = tempfile.gettempdir()
        yield _directories[names]
    finally:
        tempfile.tempdir = kept


def _dill_session(module: Any) -> None:
    with _temporary() as directory:
        module.TEMPDIR = type(module.TEMPDIR)(directory)


def _nvrx_socket(module: Any) -> None:
    """Its path names the process, too; another module has a copy."""
    with _temporary() as directory:
        path = f"{directory}/_ft_launcher{os.getpid()}.socket"
    copy: Any = sys.modules.get("nvidia_resiliency_ext.fault_tolerance._ft_rendezvous")
    for holder in (module, *([copy] if copy else ())):
        holder.FT_LAUNCHER_IPC_SOCKET = path


def _log_start(module: Any) -> None:
    """Since when records count their milliseconds."""
    now = time.time_ns()
    module._startTime = now if isinstance(module._startTime, int) else now / 1e9  # Python 3.13 has the first


def _own_status(module: Any) -> None:
    """Where its functions look by default for the memory and the time of this process."""
    for name in ("memusage", "jiffies"):
        function = getattr(module, name)
        function.__defaults__ = tuple(
            f"/proc/{os.getpid()}/stat" if isinstance(value, str) else value
            for value in function.__defaults__ or ()
        )


def _session_of_downloads(module: Any) -> None:
    module.SESSION_ID = uuid.uuid4().hex


def _wandb_settings(module: Any) -> None:
    """The process that is measured by default: asked for from now on, and not known since the import.

    Once, in the template: it takes a tenth of a second.
    """
    field = module.Settings.model_fields["x_stats_pid"]
    if field.default_factory is None:
        field.default, field.default_factory = type(field)().default, os.getpid
        module.Settings.model_rebuild(force=True)


def _compile_cache(module: Any) -> None:
    """Name and make the directory of compiled code, for what this program starts, too."""
    with _temporary(), suppress(OSError):  # whoever compiles will hear of it
        module.cache_dir()


def _bisection(module: Any) -> None:
    """Whether a bisection is under way, which lies in the directory of compiled code."""
    with _temporary():
        module.CompilerBisector.bisection_enabled = module.get_is_bisection_enabled()


def _compiled_headers(module: Any) -> None:
    with _temporary():
        module._HEADER_DIR = os.path.join(module.default_cache_dir(), "precompiled_headers")
    module._HEADER_LOCK_DIR = os.path.join(module._HEADER_DIR, "locks")


def _profiles(module: Any) -> None:
    with _temporary() as directory:
        module.PROFILE_DIR = directory


def _linear_solver(module: Any) -> None:
    """Where the one that is taken by default keeps its files."""
    if module.LpSolverDefault is not None:
        module.LpSolverDefault.setTmpDir()


def _export_directory(module: Any) -> None:
    """Where its functions export to by default."""
    with _temporary() as directory:
        for function in vars(module).values():
            if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                values = function.__defaults__ or ()
                count = function.__code__.co_argcount
                names = function.__code__.co_varnames[count - len(values) : count]
                function.__defaults__ = tuple(
                    directory if name == "export_dir" else value
                    for name, value in zip(names, values, strict=True)
                )


def _sacre_bleu_models(module: Any) -> None:
    with _temporary() as directory:
        module._FLORES_LOCAL_DIR = os.path.join(directory, "torchmetrics-flores")


class _MadeLater(tempfile.TemporaryDirectory[str]):
    """Made when its name is asked for: of what is forked with it, little ever does."""

    suffix: str

    def __getattr__(self, attribute: str) -> Any:
        if attribute != "name":
            raise AttributeError(attribute)
        with _temporary():
            self.__init__(self.suffix)  # type: ignore[misc]
        return self.name

    def cleanup(self) -> None:
        if "name" in vars(self):
            super().cleanup()


def _make_later(directory: Any, suffix: str) -> None:
    """A directory of this process; modules keep the object.  That of the template is deleted."""
    atexit.unregister(directory.cleanup)
    directory.cleanup()
    vars(directory).clear()
    directory.__class__ = _MadeLater
    directory.suffix = suffix
    atexit.register(directory.cleanup)


def _wandb_media(module: Any) -> None:
    _make_later(module.MEDIA_TMP, "wandb-media")


def _wandb_artifacts(module: Any) -> None:
    _make_later(module.Artifact._TMP_DIR, "wandb-artifacts")


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
    "logging": _log_start,
    "dill.session": _dill_session,
    "lightning.fabric.utilities.rank_zero": _lightning_rank,
    "lightning_fabric.utilities.rank_zero": _lightning_rank,
    "modelopt.torch.export.model_config_export": _export_directory,
    "modelopt.torch.export.unified_export_hf": _export_directory,
    "modelopt.torch.export.unified_export_megatron": _export_directory,
    "numpy.testing._private.utils": _own_status,
    "nvidia_resiliency_ext.fault_tolerance.launcher": _nvrx_socket,
    "pulp.apis": _linear_solver,
    "torch._dynamo.package": _compile_cache,
    "torch._inductor.codecache": _compiled_headers,
    "torch._inductor.compiler_bisector": _bisection,
    "torch._inductor.wrapper_benchmark": _profiles,
    "torchmetrics.functional.text.sacre_bleu": _sacre_bleu_models,
    "torchmetrics.utilities.prints": _torchmetrics_rank,
    "transformers.utils.hub": _session_of_downloads,
    "wandb.sdk.wandb_settings": _wandb_settings,
    "wandb.sdk.artifacts.artifact": _wandb_artifacts,
    "wandb.sdk.data_types._private": _wandb_media,
    "nemo.utils": _nemo_logger,
    "nemo.lightning.callback_group": _nemo_telemetry,
}


#: Variables that a repair sets anew, so that what an import set is not for the program.
SET_BY_REPAIRS = frozenset({"TORCHINDUCTOR_CACHE_DIR"})

#: What the repairs read of a rank's environment, by launchers of all kinds.
_NUMBERS = (
    *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "OMPI_COMM_WORLD_RANK", "JSM_NAMESPACE_RANK"),
    *("SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID"),
)


def not_numbers(env: Mapping[str, str | None]) -> list[str]:
    """Variables in `env` that no repair could read: such a program starts cold, and says what is wrong."""
    return [name for name in _NUMBERS if (text := env.get(name)) is not None and not text.strip().isdecimal()]


#: How many threads numexpr started, where `end_threads` ended them.
_numexpr_threads = 0


def end_threads(modules: Mapping[str, ModuleType]) -> None:
    """End threads that imports leave and each program gets anew: those of numexpr, with one rank per host.

    By its own function, which waits for them: no lock of theirs is held when the process is forked.
    """
    global _numexpr_threads
    utils: Any = modules.get("numexpr.utils")
    with suppress(Exception):  # not there yet, or of a version that this file does not know: they run on
        if utils is not None and (number := utils.get_num_threads()) > 1:
            utils.set_num_threads(1)
            _numexpr_threads = number


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
    if _numexpr_threads > 1:
        modules["numexpr.utils"].set_num_threads(_numexpr_threads)
