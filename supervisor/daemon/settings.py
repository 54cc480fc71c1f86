# SPDX-License-Identifier: Apache-2.0
"""The command line of the host daemon, checked with the environment before anything is opened."""

from __future__ import annotations

import argparse
import os
import socket
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from resiliency.daemon_link import DEFAULT_PORT, PORT_ENV
from resiliency.errors import ConfigError
from supervisor.daemon.topology import metadata_address
from supervisor.flags import DAEMON_FLAGS, Parser, add_later, refuse_later, spelled
from supervisor.settings import HOST_DAEMON_PORT, Settings, make_own_directory, read_whole
from supervisor.transport.security import Security, TokenFile, is_loopback
from supervisor.watchdogs.runner import WatchdogSettings
from supervisor.watchdogs.watchdog import NAMES as WATCHDOGS
from supervisor.watchdogs.watchdog import boot_id

USAGE = "host_daemon.py [FLAGS]"
DESCRIPTION = """\
Relay what the launcher of this host knows of its workers to the supervisor, and commands back.

Addresses come from SENSOR_ADDRESS and ACTUATOR_ADDRESS, certificates and tokens from
SUPERVISOR_TLS_CERT, _KEY, _CA and SUPERVISOR_TOKEN_FILE; see docs/supervisor.md."""


@dataclass(frozen=True, kw_only=True)
class DaemonSettings:
    """A command line that can work.

    Attributes:
        host: name that the orchestrator knows this host by.
        listen: interface of `port`.
        address: at which the sensor reaches `port`, for the second path.
        launcher_port: for launchers and programs of this host, on the loopback interface.
        state_dir: for the fence, which must survive the daemon.
        metadata: address of the server that knows where this host is; None: nobody is asked where it is.
        standalone: the job is learnt from the annotations of its pod.
    """

    host: str
    host_id: str
    listen: str
    address: str
    port: int
    launcher_port: int
    workers_per_host: int
    launcher_token: TokenFile | None
    state_dir: Path
    security: Security
    environment: Settings
    watchdogs: WatchdogSettings
    metadata: tuple[str, int] | None
    standalone: bool

    @classmethod
    def parse(cls, argv: Sequence[str], env: Mapping[str, str]) -> DaemonSettings:
        """Read flags and environment; a flag wins.

        Raises:
            ConfigError: the first that cannot work, and why.
            SystemExit: after ``--help``.
        """
        environment = Settings.from_env(env)
        args = _parser().parse_args([spelled(word, "_") for word in argv])
        refuse_later(args, "_", taken=DAEMON_FLAGS)
        port = _port("--port", args.port, environment.host_daemon_port)
        default = read_whole(env, PORT_ENV, 1, 65535, DEFAULT_PORT)
        launcher_port = _port("--launcher_port", args.launcher_port, default)
        if port == launcher_port != 0:
            raise ConfigError(
                f"--port and --launcher_port must differ, both are {port}: one is for the supervisor, the "
                "other for launchers of this host.",
                flag="--launcher_port",
            )
        workers = environment.workers_per_host if args.workers_per_host is None else args.workers_per_host
        if not 1 <= workers <= 1024:
            raise ConfigError(
                f"--workers_per_host must be 1 to 1024, found {workers}.", flag="--workers_per_host"
            )
        host = env.get("NODE_NAME") or socket.gethostname()
        _check_name("NODE_NAME", host)
        security = Security.from_env(env, plaintext=args.plaintext).for_daemons
        listen = security.listen_address(args.listen)
        address = args.address or (listen if is_loopback(listen) else env.get("POD_IP") or host)
        _check_name("--address", address)
        token = args.launcher_token_file
        state_dir = Path(args.state_dir or _default_state_dir())
        make_own_directory(state_dir, "--state_dir")
        return cls(
            host=host,
            host_id=f"{host}.{boot_id()}",
            listen=listen,
            address=f"[{address}]" if ":" in address else address,
            port=port,
            launcher_port=launcher_port,
            workers_per_host=workers,
            launcher_token=TokenFile(Path(token), "--launcher_token_file") if token else None,
            state_dir=state_dir,
            security=security,
            environment=environment,
            watchdogs=_watchdogs(args),
            metadata=metadata_address(env) if args.enable_topology_aware_scheduling else None,
            standalone=args.enable_standalone_mode,
        )


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="host_daemon.py",
        usage=USAGE,
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--workers_per_host", type=int, metavar="N", help="Workers of this host (WORKERS_PER_HOST, else 8)."
    )
    parser.add_argument(
        "--port",
        type=int,
        metavar="PORT",
        help=f"For the supervisor's second path (HOST_DAEMON_PORT, else {HOST_DAEMON_PORT}).",
    )
    parser.add_argument(
        "--listen",
        metavar="ADDRESS",
        help="Interface of --port (0.0.0.0; with --plaintext 127.0.0.1).",
    )
    parser.add_argument(
        "--launcher_port",
        type=int,
        metavar="PORT",
        help=f"For launchers (their --host-daemon-port) and programs, on the loopback interface ({PORT_ENV}, "
        f"else {DEFAULT_PORT}).",
    )
    parser.add_argument(
        "--launcher_token_file",
        metavar="FILE",
        help="Tokens that launchers must bring, one a line; default: only root and the daemon's own user "
        "report.",
    )
    parser.add_argument(
        "--address",
        metavar="ADDRESS",
        help="At which others reach this host (POD_IP, else its name; 127.0.0.1 where --port is on "
        "loopback).",
    )
    parser.add_argument(
        "--state_dir", metavar="DIR", help="Keeps which commands were carried out, across restarts."
    )
    parser.add_argument(
        "--enable_standalone_mode",
        action="store_true",
        help="Learn the job from the annotations of the pod that trains on this host, for jobs that another "
        "launcher starts.",
    )
    parser.add_argument(
        "--enable_topology_aware_scheduling",
        action="store_true",
        help="Learn the host's place from the cloud's metadata server and the labels of its node: spares are "
        "chosen and copies of checkpoints placed by it.",
    )
    parser.add_argument("--plaintext", action="store_true", help="No TLS.  For one machine and for tests.")
    _add_watchdogs(parser)
    add_later(parser, "_", taken=DAEMON_FLAGS)
    return parser


def _add_watchdogs(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "watchdogs", "What they look at and what becomes of it: docs/watchdogs.md."
    )
    group.add_argument(
        "--watchdogs",
        nargs="+",
        default=[],
        metavar="NAME",
        help=f"Which ones: {', '.join(WATCHDOGS)} (none).  Commas work, too.",
    )
    group.add_argument(
        "--watchdog_interval_s",
        type=float,
        default=WatchdogSettings.interval_s,
        metavar="X",
        help="Between two looks (%(default)g); /dev/kmsg is read at once.",
    )
    group.add_argument(
        "--watchdog_notification_cooldown_s",
        type=float,
        default=WatchdogSettings.cooldown_s,
        metavar="X",
        help="In which the same fact about one device is reported once (%(default)g).",
    )
    group.add_argument(
        "--kernel_log",
        default=WatchdogSettings.kernel_log,
        metavar="FILE",
        help="For xid: the kernel's log, or a file that a logger writes (%(default)s).",
    )
    group.add_argument(
        "--watchdog_gpus",
        default="",
        metavar="FILE",
        help="For ecc, in drills: GPUs as a JSON file describes them, instead of NVML.",
    )


def _watchdogs(args: argparse.Namespace) -> WatchdogSettings:
    names = [name for word in args.watchdogs for name in word.split(",") if name]
    for name in names:
        if name not in WATCHDOGS:
            raise ConfigError(
                f"--watchdogs must be of {', '.join(WATCHDOGS)}, found {name!r}.", flag="--watchdogs"
            )
    for flag in ("--watchdog_interval_s", "--watchdog_notification_cooldown_s"):
        value = getattr(args, flag[2:])
        if not 0 < value <= 86_400:  # also refuses nan
            raise ConfigError(
                f"{flag} must be seconds above 0 and at most a day, found {value:g}.", flag=flag
            )
    return WatchdogSettings(
        names=tuple(dict.fromkeys(names)),
        interval_s=args.watchdog_interval_s,
        cooldown_s=args.watchdog_notification_cooldown_s,
        kernel_log=args.kernel_log,
        gpus=args.watchdog_gpus,
    )


def _port(flag: str, given: int | None, default: int) -> int:
    value = default if given is None else given
    if not 0 <= value <= 65535:
        raise ConfigError(f"{flag} must be 0 (any) to 65535, found {value}.", flag=flag)
    return value


def _check_name(what: str, name: str) -> None:
    if not 1 <= len(name) <= 200 or not name.isprintable() or " " in name:
        raise ConfigError(
            f"{what} must be 1 to 200 printable characters, found {name[:80]!r}.", variable=what
        )


def _default_state_dir() -> str:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    name = "resiliency-host-daemon"
    return f"{runtime}/{name}" if runtime else f"{tempfile.gettempdir()}/{name}-{os.geteuid()}"
