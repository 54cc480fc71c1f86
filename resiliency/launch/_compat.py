# SPDX-License-Identifier: Apache-2.0
"""The one file that touches NVRx's inside; everything else sees the names defined here.

NVRx (nvidia-resiliency-ext) 0.4 offers its agent as a command, not as a library: what a subclass
needs has leading underscores.  So the version is checked strictly, each hook is listed in `HOOKS`,
and a test compares them with the installed library.

Importing this module imports torch and NVRx.  NVRx configures the root logger while it is imported;
that is kept away from ours.
"""

from __future__ import annotations

import argparse
import base64
import importlib.metadata
import json
import logging
import os
import pickle
import re
import secrets
import signal
import sys
import tempfile
import threading
import time
import uuid
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from operator import methodcaller
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, TypeVar

from resiliency.errors import ConfigError, UntestedVersion
from resiliency.proc_stat import has_ended
from resiliency.progress import StepPage
from resiliency.runtime import addresses_of, awake_s, elapsed_s, interface_towards

#: Versions of nvidia-resiliency-ext that this release was tested with.
TESTED_VERSIONS = ("0.4.1",)


def check_version() -> None:
    """Raise UntestedVersion unless a tested NVRx is installed."""
    tested = " or ".join(TESTED_VERSIONS)
    hint = f"Install it with: pip install nvidia-resiliency-ext=={TESTED_VERSIONS[-1]}"
    try:
        version = importlib.metadata.version("nvidia-resiliency-ext")
    except importlib.metadata.PackageNotFoundError:
        raise UntestedVersion(
            f"the launcher needs nvidia-resiliency-ext {tested}, and it is not installed.", hint=hint
        ) from None
    if version not in TESTED_VERSIONS:
        raise UntestedVersion(
            f"the launcher was tested with nvidia-resiliency-ext {tested}, found {version}.",
            hint=hint,
            version=version,
        )


@contextmanager
def _root_logger_kept() -> Iterator[None]:
    """logging.basicConfig does nothing while the root logger has a handler."""
    root, guard = logging.getLogger(), logging.NullHandler()
    root.addHandler(guard)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch about pynvml, once in each process
            yield
    finally:
        root.removeHandler(guard)


check_version()
with _root_logger_kept():
    from nvidia_resiliency_ext.fault_tolerance import _ft_rendezvous, rank_monitor_server
    from nvidia_resiliency_ext.fault_tolerance import config as _config
    from nvidia_resiliency_ext.fault_tolerance import launcher as _launcher
    from nvidia_resiliency_ext.fault_tolerance._torch_elastic_compat.agent.server.api import WorkerSpec
    from nvidia_resiliency_ext.fault_tolerance._torch_elastic_compat.multiprocessing import (
        LogsSpecs,
        SignalException,
        Std,
    )
    from nvidia_resiliency_ext.fault_tolerance._torch_elastic_compat.multiprocessing import (
        api as _processes,
    )
    from nvidia_resiliency_ext.fault_tolerance._torch_elastic_compat.multiprocessing import (
        subprocess_handler as _subprocess_handler,
    )
    from nvidia_resiliency_ext.fault_tolerance._torch_elastic_compat.multiprocessing.errors import (
        ProcessFailure,
    )
    from nvidia_resiliency_ext.fault_tolerance._torch_elastic_compat.rendezvous import RendezvousParameters
    from nvidia_resiliency_ext.fault_tolerance._torch_elastic_compat.rendezvous import (
        c10d_rendezvous_backend as _c10d,
    )
    from nvidia_resiliency_ext.fault_tolerance._torch_elastic_compat.rendezvous.api import (
        RendezvousClosedError,
        RendezvousConnectionError,
        RendezvousError,
        RendezvousTimeoutError,
    )
    from nvidia_resiliency_ext.fault_tolerance.config import FaultToleranceConfig
    from nvidia_resiliency_ext.shared_utils import health_check

    from resiliency.launch.rendezvous.launcher_links import WATCHED, LauncherLinks, PeerLauncher
    from resiliency.launch.rendezvous.reconnecting_store import ReconnectingStore, is_served_by_process
    from resiliency.launch.rendezvous_wait import address_for_others

logger = logging.getLogger(__name__)

T = TypeVar("T")


def _method_name(depth: int = 2) -> str:
    """Which method of NVRx's records what it does.

    Upstream takes all of `inspect.stack` for that, twice, and nobody reads it: each look at the rendezvous
    then looks at every module of the process, which takes seconds where there are thousands.
    """
    return sys._getframe(depth).f_code.co_name


_ft_rendezvous.get_method_name = _method_name
# All that these two measure are limits on other processes; `time` is a hook of both.
_ft_rendezvous.time = rank_monitor_server.time = SimpleNamespace(monotonic=awake_s)

UnhealthyNodeException = _launcher.UnhealthyNodeException
run_script_path = _launcher.run_script_path

__all__ = [
    "FaultToleranceConfig",
    "HookedAgent",
    "HostRendezvous",
    "LogsSpecs",
    "RendezvousClosedError",
    "RendezvousConnectionError",
    "RendezvousError",
    "RendezvousTimeoutError",
    "SignalException",
    "TracedLogs",
    "UnhealthyNodeException",
    "WorkerSpec",
    "fault_tolerance_config",
    "hang_note",
    "make_logs_specs",
    "prepare",
    "run_script_path",
    "succeeded",
]

#: Everything private that this file relies on: owner -> names.  A test fails when one goes away.
HOOKS: Mapping[Any, tuple[str, ...]] = {
    _launcher.LocalElasticAgent: (
        "_rendezvous",
        "_start_workers",
        "_stop_workers",
        "_shutdown",
        "_monitor_workers",
        "_exit_barrier",
        "setup_rank_monitors",
        "shutdown_rank_monitors",
        "clean_rdzv_shutdown",
    ),
    _launcher: ("FT_LAUNCHER_IPC_SOCKET", "_get_logs_specs_class", "_is_store_host", "tempfile"),
    _ft_rendezvous: (
        "FT_LAUNCHER_IPC_SOCKET",
        "_BackendRendezvousStateHolder",
        "RendezvousSettings",
        "_delay",
        "_NodeDesc",
        "_RendezvousState",
        "get_method_name",
        "time",
    ),
    _ft_rendezvous._BackendRendezvousStateHolder: ("sync", "_sanitize"),
    _ft_rendezvous.FtRendezvousHandler: (
        *("_node_desc_generator", "num_nodes_waiting", "next_rendezvous", "_get_store", "_keep_alive"),
        *("try_set_worker_state", "get_worker_states", "round"),
    ),
    _c10d: ("create_backend", "parse_rendezvous_endpoint"),
    _c10d.C10dRendezvousBackend: ("_NULL_SENTINEL",),
    _processes: ("_terminate_process_handler", "get_subprocess_handler"),
    _subprocess_handler.SubprocessHandler: ("_popen",),
    rank_monitor_server: ("time",),
    rank_monitor_server.RankMonitorServer: (
        *("_handle_timeout", "_is_hb_timeout_elapsed", "run_in_subprocess"),
        *("_handle_heartbeat_msg", "_handle_section_msg"),
    ),
}

#: Longest wait for a store that is away, when a launcher is about to end.
LEAVE_S = 15.0
#: Pause between two looks whether hosts of an ended job live, and how much longer than the time after which
#: a host counts as silent a start of the job waits for them.
LOOK, BEYOND_SILENCE = timedelta(seconds=1), timedelta(seconds=2)
#: Pause between two looks at a rendezvous: at least, for each host that takes part, and at most (upstream's).
LEAST_LOOK_S, LOOK_PER_HOST_S, MOST_LOOK_S = 0.1, 0.005, 1.0
#: Ranks whose peers are gone fail by themselves, as a rule.  Only after this they are told to end, which they
#: would take for a wish to save a last step together with all others.
FAIL_ALONE_S = 1.0
#: A launcher that was stopped for longer says so.
TELL_STOPPED_S = 5.0
NVIDIA_DRIVER = "/dev/nvidiactl"
#: Seconds, for --rdzv-conf keys that are not given; NVRx's own, larger than torch's.
RENDEZVOUS_DEFAULTS = {"timeout": "900", "join_timeout": "900", "close_timeout": "600", "read_timeout": "600"}


#: Starts a worker: arguments, environment, files for its output and errors, local rank.
StartWorker = Callable[[Sequence[str], Mapping[str, str], Any, Any, int], Any]


def prepare(
    private_dir: Path,
    on_signal: Callable[[int, FrameType | None], None],
    start_worker: StartWorker,
    page: StepPage,
) -> None:
    """Make NVRx's module state this launcher's own: sockets, signal handler, hang notes, start of workers.

    NVRx installs its handler each time it starts workers, and names sockets by pid in the
    temporary directory that all launchers of the host share.
    """
    tempfile.tempdir = os.fspath(private_dir)
    socket = str(private_dir / "_ft_launcher.socket")
    _launcher.FT_LAUNCHER_IPC_SOCKET = socket
    _ft_rendezvous.FT_LAUNCHER_IPC_SOCKET = socket
    _processes._terminate_process_handler = on_signal
    # It reports each death, and each signal that it gets or sends, in its own words too.
    logging.getLogger(_processes.__name__).setLevel(logging.CRITICAL)
    _launcher.logger.addFilter(lambda record: "death signal" not in str(record.msg))
    if not os.path.exists(NVIDIA_DRIVER):
        # Upstream warns for each rank and each rendezvous that it checks no GPUs.
        logging.getLogger(health_check.__name__).setLevel(logging.ERROR)
    _note_hangs(private_dir)
    _note_heartbeats(page)

    class Handler(_subprocess_handler.SubprocessHandler):
        def _popen(self, args: Sequence[str], env: Mapping[str, str]) -> Any:
            return start_worker(args, env, self._stdout, self._stderr, self.local_rank_id)

    _processes.get_subprocess_handler = Handler


def hang_note(directory: Path, pid: int) -> Path:
    """File by which a rank monitor says that it ended process `pid` because it hung."""
    return directory / f"hang-{pid}"


def _why_hung(monitor: Any) -> str:
    if monitor._is_hb_timeout_elapsed(awake_s()):
        if monitor.last_hb_time is None:
            return f"no first heartbeat within {monitor.cfg.initial_rank_heartbeat_timeout:g} s"
        return f"no heartbeat within {monitor.cfg.rank_heartbeat_timeout:g} s"
    if monitor.open_sections:
        return f"section {', '.join(monitor.open_sections)} open for too long"
    return f"outside any section for more than {monitor.cfg.rank_out_of_section_timeout:g} s"


def _note_hangs(directory: Path) -> None:
    """Let rank monitors, which are forked from here, leave a note before they end a hung rank."""
    server = rank_monitor_server.RankMonitorServer
    handle_timeout = server._handle_timeout

    async def noted(self: Any) -> None:
        if self.rank_info is not None:
            with suppress(OSError):
                hang_note(directory, self.rank_info.pid).write_text(_why_hung(self))
        await handle_timeout(self)

    server._handle_timeout = noted


def _note_heartbeats(page: StepPage) -> None:
    """Let rank monitors, which are forked from here, write when they got a heartbeat or section."""
    server = rank_monitor_server.RankMonitorServer
    for name in ("_handle_heartbeat_msg", "_handle_section_msg"):
        setattr(server, name, _noting(getattr(server, name), page))


def _noting(handle: Callable[..., Any], page: StepPage) -> Callable[..., Any]:
    async def noted(self: Any, *args: Any) -> None:
        # The rank itself may not know its place: with --virtual-local-rank all are 0.
        place = re.search(r"_rmon(\d+)\.socket$", str(self.ipc_socket_path))
        if place is not None:
            page.record_heartbeat(int(place[1]))
        await handle(self, *args)

    return noted


#: Where ours differ from NVRx's: links need InfiniBand adapters; what monitors see, we report.
OUR_DEFAULTS = {"enable_nic_monitor": False, "log_level": "ERROR"}


def fault_tolerance_config(args: argparse.Namespace) -> FaultToleranceConfig:
    """NVRx's configuration from a file and the --ft flags, with its defaults for the rest.

    NVRx refuses to start without any of them; here none is needed.

    Raises:
        ConfigError: the file or a value is wrong.
    """
    args = argparse.Namespace(**vars(args))
    flag = "--ft-cfg-path"
    try:
        text = ""
        if args.ft_cfg_path is not None:
            text = Path(args.ft_cfg_path).read_text()
            FaultToleranceConfig.from_yaml_file(args.ft_cfg_path, ignore_not_recognized=False)
        for name, ours in OUR_DEFAULTS.items():
            if getattr(args, f"ft_{name}") is None and name not in text:
                setattr(args, f"ft_{name}", ours)
        flag = "--ft flags"
        return FaultToleranceConfig.from_args(args)
    except OSError as error:
        raise ConfigError(f"{flag}: cannot read {args.ft_cfg_path}: {error.strerror}.", flag=flag) from error
    except (ValueError, TypeError, AttributeError, _config.yaml.YAMLError) as error:
        raise ConfigError(f"{flag}: {error}.", flag=flag) from error


def make_logs_specs(args: argparse.Namespace, log_dir: str | None) -> LogsSpecs:
    """Where worker output goes, as the flags of the logging group say.

    Raises:
        ConfigError: --logs-specs names no entry point.
    """
    try:
        kind = _launcher._get_logs_specs_class(args.logs_specs)
    except ValueError as error:
        raise ConfigError(f"--logs-specs: {error}.", flag="--logs-specs") from error
    ranks = {int(rank) for rank in args.local_ranks_filter.split(",") if rank}
    return kind(
        log_dir=log_dir,
        redirects=Std.from_str(args.redirects),
        tee=Std.from_str(args.tee),
        local_ranks_filter=ranks or None,
    )


class TracedLogs(LogsSpecs):
    """Adds to the environment of each worker, and remembers where its output went.

    Upstream builds the environment in one long method, and hands it to the log specification as
    the last step before the start: the public place to add to it.
    """

    def __init__(
        self,
        inner: LogsSpecs,
        adjust: Callable[[dict[str, str]], None],
        show_output: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self._inner = inner
        self._adjust = adjust
        #: Shows what ranks have written until now.
        self.show_output = show_output
        #: Number of this start, the same on all hosts; upstream would pass the restarts that count.
        self.attempt = 0
        #: Of each worker of this start.
        self.variables: Mapping[str, str] = {}
        #: Local rank -> file with its standard error (else standard output), when there is one.
        self.files: dict[int, str] = {}
        self.stderr_files: dict[int, str] = {}

    def reify(self, envs: dict[int, dict[str, str]]) -> Any:
        for env in envs.values():
            env["TORCHELASTIC_RESTART_COUNT"] = str(self.attempt)
            env.update(self.variables)
            self._adjust(env)
        where = self._inner.reify(envs)
        kept = (
            {rank: path for rank, path in paths.items() if path not in ("", os.devnull)}
            for paths in (where.stdouts, where.stderrs)
        )
        stdout_files, self.stderr_files = kept
        self.files = {**stdout_files, **self.stderr_files}
        return where

    @property
    def root_log_dir(self) -> str:
        return str(self._inner.root_log_dir)


@contextmanager
def _paced(hosts: int, on_wait: Callable[[], None]) -> Iterator[None]:
    """How long upstream waits between two looks at the state of so many hosts; `on_wait` is called before.

    It also waits a random 0 to 0.3 s at the first start and restart, so that hosts arrive spread.  One host
    has nobody to be spread from, and pays it in every first incident.
    """
    delay, look_s = _ft_rendezvous._delay, _look_s(hosts)

    def wait(seconds: float | tuple[float, float]) -> None:
        if not isinstance(seconds, tuple):
            on_wait()
            delay(min(seconds, look_s))
        elif hosts > 1:
            delay(seconds)

    _ft_rendezvous._delay = wait
    try:
        yield
    finally:
        _ft_rendezvous._delay = delay


def _look_s(hosts: int) -> float:
    """Upstream looks once a second; a small job more often, so that its store has no more work."""
    return min(max(LEAST_LOOK_S, hosts * LOOK_PER_HOST_S), MOST_LOOK_S)


class _StateHolder(_ft_rendezvous._BackendRendezvousStateHolder):
    """Upstream's, which also drops hosts whose launchers are known to have ended: they count as silent.

    Upstream compares the last sign of life of each host with the wall clock.  Here the time in which this
    launcher was stopped makes no host older, itself included: a suspended job would lose all of them.
    """

    def __init__(self, backend: Any, settings: Any) -> None:
        super().__init__(backend, settings)
        self._cache_duration: float = MOST_LOOK_S
        self._ended: frozenset[Any] = frozenset()
        #: Of each host: its last sign of life as it said it, and later by the time in which this one slept.
        self._signs: dict[Any, tuple[datetime, datetime]] = {}
        self._asleep_s, self._stopped_s = time.time() - awake_s(), elapsed_s() - awake_s()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within, each look asks the store, and not only one a second."""
        self._cache_duration = 0.0
        try:
            yield
        finally:
            self._cache_duration = MOST_LOOK_S

    def drop(self, node: Any) -> None:
        """At the next look, for which the store is asked.  From any thread."""
        state = self._state
        if node in state.participants and state.worker_states.get(node) != _launcher.WorkerState.SUCCEEDED:
            logger.warning("launcher %s has ended: it closed its connection; hosts meet without it", node)
        self._ended |= {node}
        self._last_sync_time = -1

    def _sanitize(self) -> None:
        said = self._state.last_heartbeats
        known = self._ended & said.keys()
        self._count_signs(said)
        counted = {node: at for node, (_, at) in self._signs.items()}
        self._state.last_heartbeats = {**counted, **dict.fromkeys(known, datetime.min)}
        super()._sanitize()
        self._state.last_heartbeats = {node: said[node] for node in self._state.last_heartbeats}
        if known:  # told at once: a newcomer, which watches nobody, would complete a rendezvous with them
            self.mark_dirty()

    def _count_signs(self, said: Mapping[Any, datetime]) -> None:
        now, asleep_s = _utc_now(), time.time() - awake_s()
        slept, self._asleep_s = max(asleep_s - self._asleep_s, 0.0), asleep_s
        stopped_s = elapsed_s() - awake_s()  # the wall clock may have been set
        lately_s, self._stopped_s = stopped_s - self._stopped_s, stopped_s
        if lately_s > TELL_STOPPED_S:
            logger.warning(
                "launcher stopped for %.0f s: suspended, frozen or without a core; limits leave it out",
                lately_s,
            )
        before, self._signs = self._signs, {}
        for node, at in said.items():
            last, counted = before.get(node, (None, at))
            later = (counted if last == at else at) + timedelta(seconds=slept)
            # One that came while this launcher slept is not older than this moment.
            self._signs[node] = at, max(min(later, now), at)


class _RendezvousValue:
    """NVRx's rendezvous state as the value that launchers put back into a store that lost it."""

    initial = _c10d.C10dRendezvousBackend._NULL_SENTINEL

    def __init__(self, key: str) -> None:
        self.key = key

    @staticmethod
    def encode(state: Any) -> str:
        return base64.b64encode(pickle.dumps(state)).decode()

    @staticmethod
    def decode(value: bytes) -> Any:
        # As trustworthy as NVRx's own reading of it: whoever can write to the store can run code here.
        return pickle.loads(base64.b64decode(value))  # noqa: S301

    def revive(self, value: bytes) -> str:
        """All hosts count as alive as of now: none of them could say so while the store was away."""
        state = self.decode(value)
        now = _utc_now()
        state.last_heartbeats = dict.fromkeys(state.last_heartbeats, now)
        if state.deadline is not None:
            state.deadline = max(state.deadline, now)
        return self.encode(state)

    def is_newer(self, mine: bytes, theirs: bytes) -> bool:
        return bool(self._progress(self.decode(mine)) > self._progress(self.decode(theirs)))

    @staticmethod
    def _progress(state: Any) -> tuple[bool, int, bool, int]:
        """Grows through a job: hosts join a round until it is complete, and then only leave it."""
        hosts = len(state.participants)
        return state.closed, state.round, state.complete, -hosts if state.complete else hosts

    def begin_next_run(self, store: ReconnectingStore, silent_after: timedelta) -> None:
        """Let a job start under the name of one that ended, once the hosts of that one are gone or silent.

        Silent: by the clock of this host their last heartbeat is old; or, because clocks differ, it stays
        the same for `silent_after`.  This waits up to 2 s longer than that.  Then hosts of the ended job
        live: its state stays, and refuses who wants to join.
        The number of the round goes on, so that keys of the ended job are not taken for the new one's.

        Raises:
            StoreUnreachable: the store was away for longer than this thread's patience.
        """
        # Counted in looks: while a store hangs no host can say that it lives.
        enough, last = silent_after / LOOK, (silent_after + BEYOND_SILENCE) / LOOK
        heartbeats: dict[Any, datetime] = {}
        same: dict[Any, int] = {}
        look = 0
        while True:
            # Not with `get`: put back after a loss, the ended state would win over the next run's.
            value: bytes = store.call(lambda store: store.get(self.key))
            if value == self.initial.encode() or not (state := self.decode(value)).closed:
                return
            found = dict(state.last_heartbeats)
            same = {
                node: same[node] + 1 if heartbeats.get(node) == heartbeat else 0
                for node, heartbeat in found.items()
            }
            heartbeats, old = found, _utc_now() - silent_after
            if all(heartbeat <= old or same[node] >= enough for node, heartbeat in found.items()):
                fresh = _ft_rendezvous._RendezvousState()
                fresh.round = state.round + 1
                begun = self.encode(fresh)
                if store.call(methodcaller("compare_set", self.key, value.decode(), begun)) == begun.encode():
                    return
                # Something else came first: the next look says what; another host of this start, as a rule.
            if look >= last:
                return
            if look == 0:
                logger.info("a job of this name ended a moment ago; waiting for its hosts to be gone")
            look += 1
            threading.Event().wait(LOOK.total_seconds())


def _utc_now() -> datetime:
    """Without a zone, as NVRx keeps it."""
    return datetime.now(timezone.utc).replace(tzinfo=None)


def store_place(endpoint: str) -> tuple[str, int]:
    """Host and port of the rendezvous store."""
    host, port = _c10d.parse_rendezvous_endpoint(endpoint, default_port=29400)
    return str(host), int(port)


def must_serve_store(endpoint: str, conf: Mapping[str, str]) -> bool:
    """Whether this host has to serve the rendezvous store; looks up names."""
    params = RendezvousParameters("c10d", endpoint, "any", 1, 1, None, **conf)
    try:
        if _launcher._is_store_host(params):
            return True
    except OSError:  # upstream looks up the host's own name, which need not be known
        pass
    host, _ = store_place(endpoint)
    # Upstream does not know all of this host's addresses.
    return "is_host" not in conf and any(interface_towards(one) == one for one in addresses_of(host))


class HostRendezvous(_ft_rendezvous.FtRendezvousHandler):
    """NVRx's rendezvous, with fixed node ranks and with eyes for hosts that left.

    Over a store that a process of its own serves, it also goes on while that process is away.
    """

    _asked_rank: int | None = None
    #: In the rendezvous before.  Upstream keeps ranks only where the host that completes one was in that
    #: before it, and a replacement, which comes last, often completes it.
    _last_rank: int | None = None
    _members: frozenset[Any] = frozenset()
    _changed = False
    #: Called when other hosts force a restart: how many want in, and which ones left.
    on_change: Callable[[int, list[str]], None] | None = None
    #: Called again and again while this host waits for others, or for a place.
    on_wait: Callable[[], None] = staticmethod(lambda: None)
    #: Called after each rendezvous, with its store, this host's number in it, the number of hosts, and
    #: whether they are other hosts than in the one before.  May raise.
    on_join: Callable[[Any, int, int, bool], None] = staticmethod(lambda *_: None)
    #: Tells how many restarts this host has counted; upstream counts on each host apart.
    restarts_used: Callable[[], int] = staticmethod(lambda: 0)
    #: Seconds that this host wants to wait before the next attempt starts; all wait for the longest time.
    pause_s: Callable[[], float] = staticmethod(lambda: 0.0)
    #: Called with that time, and with what tells that hosts came or left, which ends the wait.
    on_pause: Callable[[float, Callable[[], bool]], None] = staticmethod(lambda *_: None)
    _restart_asked = False
    #: The most that a host has counted: a host whose workers were healthy counts on with the others.
    job_restarts = 0
    #: Number of the current rendezvous: the attempt, the same on all hosts.  It grows; the first is 0 unless
    #: the store has seen an earlier start of the job.
    attempt = 0
    #: Id of this start of the job, the same on all hosts and for all its attempts; empty before the first.
    run = ""
    #: Set where the store is a process of its own, which may go away and come back.
    outside: ReconnectingStore | None = None
    _first_round: int | None = None
    _links: LauncherLinks | None = None
    _plain_store: Any = None
    _lost_since = 0.0

    @classmethod
    def connect(
        cls,
        *,
        endpoint: str,
        run_id: str,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None,
        node_rank: int | None,
        upscaling: bool,
        conf: Mapping[str, str],
    ) -> tuple[HostRendezvous, bool]:
        """Meet at `endpoint`; returns the handler, and whether this process serves the store.

        Blocks until the serving host is there, up to read_timeout.
        """
        conf = {**RENDEZVOUS_DEFAULTS, **conf}
        serves = must_serve_store(endpoint, conf)

        def create(is_host: bool) -> Any:
            given = {"is_host": str(is_host), **conf}
            params = RendezvousParameters("c10d", endpoint, run_id, min_nodes, max_nodes, local_addr, **given)
            return _c10d.create_backend(params)

        served_near = False
        try:
            backend, store = create(serves)
        except RendezvousConnectionError:
            if not serves or "is_host" in conf:
                raise
            backend, store = create(False)
            served_near = True  # by another launcher of this machine, which leaves last
        seconds = {
            key: timedelta(seconds=int(conf[f"{key}_timeout"]))
            for key in ("join", "last_call", "close", "heartbeat")
            if f"{key}_timeout" in conf
        }
        settings = _ft_rendezvous.RendezvousSettings(
            run_id,
            min_nodes,
            max_nodes,
            _ft_rendezvous.RendezvousTimeout(**seconds),
            keep_alive_interval=timedelta(seconds=int(conf.get("keep_alive_interval", 5))),
            keep_alive_max_attempt=int(conf.get("keep_alive_max_attempt", 3)),
            upscaling_enabled=upscaling,
        )
        outside = None
        if is_served_by_process(store, serves=serves):
            serves = False
            host, port = store_place(endpoint)
            value = _RendezvousValue(f"torch.rendezvous.{run_id}")
            outside = ReconnectingStore(host, port, first=store, shared=value, wait=settings.timeout.join)
            value.begin_next_run(outside, settings.keep_alive_interval * settings.keep_alive_max_attempt)
            backend = _c10d.C10dRendezvousBackend(outside, run_id)
        holder = _StateHolder(backend, settings)
        node = cls._node_desc_generator.generate(local_addr)
        # In a container each start has the same host name and process number: it is another launcher.
        node = replace(node, local_id=secrets.randbits(31))
        handler = cls(node, settings, backend.name, store, holder)
        handler._asked_rank = node_rank
        handler.outside = outside
        handler._plain_store = store
        if max_nodes > 1 and handler.sees_losses:
            handler._listen(local_addr or address_for_others(store_place(endpoint)[0]) or node.addr)
        return handler, serves and not served_near

    def _listen(self, address: str) -> None:
        """Without it, other hosts find the end of this launcher by its missing signs of life."""
        try:
            self._links = LauncherLinks(address, self._state_holder.drop)
        except OSError as error:
            logger.debug("other launchers cannot watch this one at %s: %s", address, error)

    def next_rendezvous(self) -> tuple[Any, int, int]:
        """Meet, and wait as long as one of the hosts wants to; meet again if hosts came or left meanwhile.

        They meet first, so that ranks of hosts that are well end at once, and all give signs of life while
        they wait.
        """
        store, rank, size, pause_s = self._meet()
        if pause_s:
            self.on_pause(pause_s, self._is_outdated)
            if self._is_outdated():
                store, rank, size, _ = self._meet()
        return store, rank, size

    def _is_outdated(self) -> bool:
        """Hosts want in, or have left since the last rendezvous, as far as the store can be asked."""
        if not self.sees_losses:
            return False
        return self._look(
            lambda: bool(super(HostRendezvous, self).num_nodes_waiting() or self.lost_hosts()), lambda: False
        )

    def _meet(self) -> tuple[Any, int, int, float]:
        with _paced(self._settings.max_nodes, self.on_wait), self._state_holder.watched():
            store, rank, size = super().next_rendezvous()
            while self._members and self._state_holder.state.round <= self.attempt:
                # Another launcher put back a state in which this host had not left the round yet.
                store, rank, size = super().next_rendezvous()
        members = frozenset(self._state_holder.state.participants)
        # A host that was left out of a rendezvous sees the same hosts again, and they see another one.
        self._changed = members != self._members or self._state_holder.state.round != self.attempt + 1
        self._members = members
        self._lost_since = 0.0
        self._restart_asked = False  # a failure came first, and has had the same effect
        self.attempt = self._state_holder.state.round
        if self._first_round is None:
            self._first_round = 0 if self.outside is None else self.attempt
        used = self.restarts_used()
        asked, last = ("" if one is None else str(one) for one in (self._asked_rank, self._last_rank))
        # An id that hosts have agreed on goes before one that a host has just made.
        run = f"0{self.run}" if self.run else f"1{uuid.uuid4().hex}"
        place = self._links.place if self._links is not None else ""
        mine = [asked, last, used, self._first_round, run, place, self._this_node.local_id, self.pause_s()]
        answers = [answer.split(",") for answer in _exchange(store, rank, size, ",".join(map(str, mine)))]
        all_asked, all_last, all_used, all_first, all_run, all_places, all_ids, pauses = zip(
            *answers, strict=True
        )
        self._watch_others(rank, all_places, all_ids)
        self.job_restarts = max(map(int, all_used))
        # A replacement learns from the others when the job began, and which it is.
        self._first_round = min(map(int, all_first))
        self.run = min(all_run)[1:]
        self._last_rank = _place(all_asked, all_last, rank)
        return store, self._last_rank, size, max(map(float, pauses))

    def check_hosts(self, store: Any, rank: int, size: int) -> None:
        """Call `on_join`, once the hosts know each other's ranks."""
        self.on_join(store, rank, size, self._changed)

    def _watch_others(self, rank: int, places: Sequence[str], ids: Sequence[str]) -> None:
        """Those behind this host, by the rank that the rendezvous assigned.

        Args:
            ids: of their launchers: the state may be of another rendezvous by now.
        """
        if self._links is None:
            return
        nodes = {number: node for node, number in self._state_holder.state.participants.items()}
        behind = [(rank + step) % len(places) for step in range(1, min(len(places), WATCHED + 1))]
        self._links.watch(
            [
                PeerLauncher(node=nodes[one], place=places[one])
                for one in behind
                if one in nodes and places[one] and str(nodes[one].local_id) == ids[one]
            ]
        )

    @property
    def first_attempt(self) -> int:
        """Number of the first rendezvous of this start of the job."""
        return self._first_round or 0

    def close(self) -> None:
        """Drop the connections to other launchers, and to a store that is a process of its own."""
        if self._links is not None:
            self._links.close()
        if self.outside is not None:
            self.outside.close()

    def call_store(self, function: Callable[[Any], T], *, wait_s: float) -> T:
        """`function` of the rendezvous store, for keys that belong to no single rendezvous.

        Args:
            wait_s: how long it waits for a store that is away.
        """
        with self.wait_at_most(wait_s):
            return function(self._plain_store) if self.outside is None else self.outside.call(function)

    def wait_at_most(self, seconds: float) -> AbstractContextManager[None]:
        """Within, wait at most `seconds` for a store that is away."""
        return nullcontext() if self.outside is None else self.outside.wait_at_most(seconds)

    def _look(self, look: Callable[[], T], otherwise: Callable[[], T]) -> T:
        """`look` at the shared state; `otherwise` while a store that can come back is away."""
        try:
            with self.wait_at_most(0):
                return look()
        except RendezvousConnectionError:
            if self.outside is None:
                raise
            return otherwise()

    def _get_store(self) -> Any:
        if self.outside is None:
            return super()._get_store()
        return self.outside.begin_prefix(
            f"torch.rendezvous.{self._settings.run_id}.{self._state_holder.state.round}"
        )

    def _keep_alive(self) -> None:
        if self.outside is None or not self.outside.away:
            with self.wait_at_most(0):
                super()._keep_alive()

    def try_report_success(self, wait_s: float) -> bool:
        """Tell the other hosts that this one leaves because it is done (see `lost_hosts`)."""
        try:
            with self.wait_at_most(wait_s):
                super().try_set_worker_state(_launcher.WorkerState.SUCCEEDED)
        except RendezvousError:
            return False
        except KeyError:  # the others have met without this host, which is told so by their absence
            return True
        return True

    # The next three are what upstream looks at with the min-healthy policy.

    def try_set_worker_state(self, target_state: Any) -> Any:
        return self._look(
            lambda: super(HostRendezvous, self).try_set_worker_state(target_state), lambda: target_state
        )

    def get_worker_states(self) -> Any:
        return self._look(
            lambda: super(HostRendezvous, self).get_worker_states(),
            lambda: dict(self._state_holder.state.worker_states),
        )

    def round(self) -> int:
        """Restarts of this start of the job, which upstream compares with --max-restarts."""
        round_now = self._look(
            lambda: int(super(HostRendezvous, self).round()), lambda: int(self._state_holder.state.round)
        )
        return round_now - (self._first_round or 0)

    def lost_hosts(self) -> list[str]:
        """Hosts that took part in this attempt, and left without having finished."""
        with self._heartbeat_lock:
            self._state_holder.sync()
            state = self._state_holder.state
            gone = self._members - frozenset(state.participants)
            done = _launcher.WorkerState.SUCCEEDED
            return sorted(str(node) for node in gone if state.worker_states.get(node) != done)

    def known_losses(self) -> list[str]:
        """As `lost_hosts`, as far as the store can be asked."""
        return self._look(self.lost_hosts, list)

    def all_are_done(self) -> bool:
        """Whether each host of this attempt has said that it is, as far as the store can be asked."""

        def look() -> bool:
            with self._heartbeat_lock:
                self._state_holder.sync()
                states = self._state_holder.state.worker_states
                return all(states.get(node) == _launcher.WorkerState.SUCCEEDED for node in self._members)

        return self._look(look, lambda: False)

    @property
    def sees_losses(self) -> bool:
        """Whether hosts that left make the others meet again: not with the min-healthy policy."""
        return bool(self._settings.upscaling_enabled)

    def try_restart(self) -> bool:
        """Have the workers of this host restarted at the next look, and so those of all hosts."""
        self._restart_asked = self.sees_losses
        return self._restart_asked

    def num_nodes_waiting(self) -> int:
        """Hosts that want in, or else hosts that left: upstream restarts the workers for either.

        Upstream alone looks only for arrivals, so the loss of a host would go unnoticed until a
        collective fails or times out.  With the min-healthy policy upstream looks by itself.
        """
        if self._restart_asked:
            self._restart_asked = False
            return 1
        return self._look(self._waiting_or_lost, lambda: 0)

    def _waiting_or_lost(self) -> int:
        waiting, lost = int(super().num_nodes_waiting()), []
        if self.sees_losses:
            lost = self.lost_hosts()
            self._lost_since = (self._lost_since or awake_s()) if lost else 0.0
            if lost and awake_s() < self._lost_since + FAIL_ALONE_S:
                return 0
            if (waiting or lost) and self.on_change is not None:
                self.on_change(waiting, lost)
        return waiting or len(lost)


def _exchange(store: Any, rank: int, size: int, mine: str) -> list[str]:
    """What each host says, by rank; one round trip, because each may take 40 ms (delayed ACK)."""
    if size == 1:
        return [mine]
    store.set(f"resiliency/{rank}", mine)
    return [answer.decode() for answer in store.multi_get([f"resiliency/{other}" for other in range(size)])]


def _place(asked: Sequence[str], last: Sequence[str], rank: int) -> int:
    """The node rank of this host: by what all hosts asked for, else what it was, else one that is free.

    So hosts that stay find their ranks' captures in their own memory, whoever comes for one that left.

    Args:
        asked, last: by the rank that the rendezvous assigned; empty where a host has none.
    """
    if all(asked) and len(set(asked)) == len(asked):
        return sorted(asked, key=int).index(asked[rank])
    kept: dict[int, int] = {}  # by the rank that it was
    for assigned, before in enumerate(last):
        if before and int(before) < len(last):
            kept.setdefault(int(before), assigned)
    if rank in kept.values():
        return int(last[rank])
    free = [place for place in range(len(last)) if place not in kept]
    new = sorted(set(range(len(last))) - set(kept.values()))
    return free[new.index(rank)]


def succeeded(result: Any) -> bool:
    """Whether the job succeeded, as far as the host knows whose agent's `run` returned `result`.

    Upstream's own `is_failed` says no where one worker failed and the others, which were then told to
    end, ended with exit code 0: it calls such a group unhealthy.  It has no result (None) for a host that
    waited as a spare when the job ended well, whatever its workers did in an attempt before.
    """
    return result is None or bool(result.state == _launcher.WorkerState.SUCCEEDED)


class HookedAgent(_launcher.LocalElasticAgent):
    """Upstream's agent with its protected methods turned into named hooks."""

    @abstractmethod
    def interruptible_join(self) -> AbstractContextManager[None]:
        """Around code that waits for other hosts."""

    @abstractmethod
    def joined(self) -> None:
        """All hosts agreed on ranks."""

    @abstractmethod
    def started(self) -> None:
        """The workers of this host run."""

    @abstractmethod
    def wait_for_change(self) -> None:
        """Return when it is time to look at the workers."""

    @abstractmethod
    def failed(self, failures: Sequence[Any]) -> None:
        """Workers failed by themselves (ProcessFailure); may repeat."""

    @abstractmethod
    def finished(self) -> None:
        """All workers of this host succeeded, and so the job, as far as this host knows."""

    @abstractmethod
    def were_asked_to_end(self) -> bool:
        """Whether the workers, which all succeeded, had been told to end, by no signal to this launcher."""

    @abstractmethod
    def stop_processes(self, number: signal.Signals, grace_s: float) -> None:
        """End all workers and what they left behind.  Called more than once."""

    @abstractmethod
    def monitors_started(self, pids: Sequence[int]) -> None:
        """Rank monitors run as these processes."""

    @property
    def pids(self) -> dict[int, int]:
        """Local rank -> process of the current attempt."""
        return {} if self._pcontext is None else dict(self._pcontext.pids())

    @property
    def ranks(self) -> dict[int, int]:
        """Local rank -> global rank."""
        return {worker.local_rank: worker.global_rank for worker in self._worker_group.workers}

    @property
    def node_rank(self) -> int:
        return int(self._worker_group.group_rank or 0)

    @property
    def host_count(self) -> int:
        return int(self._worker_group.group_world_size or 0)

    @property
    def restarts_used(self) -> int:
        return int(self._worker_group.spec.max_restarts - self._remaining_restarts)

    def use_no_more_restarts(self) -> None:
        """A failure ends the job now, on all hosts, as if its restarts were used up."""
        # What is compared with is lowered, too: the min-healthy policy counts what is left again.
        self._worker_group.spec.max_restarts = self.restarts_used
        self._remaining_restarts = 0

    def failures_so_far(self) -> list[Any]:
        """Workers that have failed until now (ProcessFailure)."""
        return list(super()._monitor_workers(self._worker_group).failures.values())

    def failures_to_come(self) -> list[Any]:
        """Workers that run, and have noted the exception with which they will end (ProcessFailure)."""
        found = []
        running = {local_rank: pid for local_rank, pid in self.pids.items() if not has_ended(pid)}
        for local_rank, pid in running.items():
            path = self._pcontext.error_files[local_rank]
            with suppress(OSError, ValueError, LookupError, TypeError):  # none, half written, or of others
                json.loads(Path(path).read_text())
                found.append(ProcessFailure(local_rank=local_rank, pid=pid, exitcode=1, error_file=path))
        return found

    @property
    def all_succeeded(self) -> bool:
        """True when workers were started and each ended with exit code 0."""
        if self._pcontext is None:
            return False
        result = self._pcontext.wait(0)
        return result is not None and not result.is_failed()

    #: Until when hosts whose ranks were told to end wait for each other; None: they were not.
    _wait_until: float | None = None

    def _rendezvous(self, worker_group: Any) -> None:
        self._wait_until = None
        with self.interruptible_join():
            super()._rendezvous(worker_group)
            # Not before: the hosts that stay would wait for the number of workers of one that leaves here.
            self._rdzv_handler.check_hosts(
                worker_group.store, worker_group.group_rank, worker_group.group_world_size
            )
        spec = worker_group.spec
        self._remaining_restarts = max(spec.max_restarts - self._rdzv_handler.job_restarts, 0)
        self.joined()

    def _start_workers(self, worker_group: Any) -> Any:
        pids = super()._start_workers(worker_group)
        self.started()
        return pids

    def _monitor_workers(self, worker_group: Any) -> Any:
        self.wait_for_change()
        result = super()._monitor_workers(worker_group)
        if result.failures:
            self.failed(list(result.failures.values()))
        elif result.state == _launcher.WorkerState.SUCCEEDED:
            if self._waits_for_others():
                # Then upstream looks whether hosts left, and if so all meet again.
                return replace(result, state=_launcher.WorkerState.HEALTHY)
            self.finished()
        return result

    def _waits_for_others(self) -> bool:
        """Whether it is still open if the job ends, or only another host, for whose sake ranks here ended.

        A launcher that is told to end leaves the rendezvous; others say that they are done, as this one does.
        """
        rendezvous = self._rdzv_handler
        if not rendezvous.sees_losses or self.host_count == 1 or not self.were_asked_to_end():
            return False
        if self._wait_until is None:
            self._wait_until = awake_s() + self._exit_barrier_timeout
        if awake_s() >= self._wait_until:
            return False
        if not rendezvous.try_report_success(0):
            return rendezvous.outside is not None  # a store that comes back; else nobody can meet again
        return not rendezvous.all_are_done()

    def _exit_barrier(self) -> None:
        rendezvous = self._rdzv_handler
        reported = rendezvous.try_report_success(LEAVE_S)
        with self.interruptible_join():
            if not reported:  # a store that is away: from here on a signal ends the wait for it
                rendezvous.try_report_success(self._exit_barrier_timeout)
            with rendezvous.wait_at_most(self._exit_barrier_timeout):
                super()._exit_barrier()

    def clean_rdzv_shutdown(self, close: bool) -> None:
        with self._rdzv_handler.wait_at_most(LEAVE_S):
            super().clean_rdzv_shutdown(close=close)
        self._rdzv_handler.close()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = 30) -> None:
        self.stop_processes(death_sig, timeout)
        super()._shutdown(death_sig, timeout=0)  # nothing lives any more; it closes its log readers

    def setup_rank_monitors(self, envs: Any) -> None:
        """Also replaces monitors that died: upstream would let each later attempt fail on them."""
        for local_rank, monitor in tuple(self._local_rank_to_rmon.items()):
            if not monitor.is_alive():
                del self._local_rank_to_rmon[local_rank]
        super().setup_rank_monitors(envs)
        pids = [monitor.pid for monitor in self._local_rank_to_rmon.values()]
        for pid in pids:
            # Out of the terminal's foreground group: a Ctrl-C would end the monitors first, and
            # with them the heartbeats of workers that are still saving.
            with suppress(OSError):
                os.setpgid(pid, pid)
        self.monitors_started(pids)

    def shutdown_rank_monitors(self) -> None:
        """Upstream joins without a limit; a monitor that is stopped would hold the launcher."""
        for monitor in self._local_rank_to_rmon.values():
            monitor.terminate()
        for monitor in self._local_rank_to_rmon.values():
            monitor.join(2)
            if monitor.is_alive():
                monitor.kill()
        super().shutdown_rank_monitors()
