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
from typing import NoReturn

from resiliency.daemon_link import DEFAULT_PORT, PORT_ENV
from resiliency.errors import ConfigError
from supervisor.settings import HOST_DAEMON_PORT, Settings, read_whole
from supervisor.transport.security import Security, TokenFile

USAGE = "host_daemon.py [FLAGS]"
DESCRIPTION = """\
Relay what the launcher of this host knows of its workers to the supervisor, and commands back.

Addresses come from SENSOR_ADDRESS and ACTUATOR_ADDRESS, certificates and tokens from
SUPERVISOR_TLS_CERT, _KEY, _CA and SUPERVISOR_TOKEN_FILE; see docs/supervisor.md."""

#: Flags that are promised for a later release: refused by name when given, because a flag without effect
#: misleads.
_LATER = {
    "watchdogs": "watchdogs are not built yet",
    "watchdog_interval_s": "watchdogs are not built yet",
    "watchdog_notification_cooldown_s": "watchdogs are not built yet",
    "project": "the lookup of a host's place in a cloud project is not built yet",
    "enable_topology_aware_scheduling": "topology is not built yet",
    "enable_standalone_mode": "standalone mode is not built yet",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}.", hint="See --help.")


@dataclass(frozen=True, kw_only=True)
class DaemonSettings:
    """A command line that can work.

    Attributes:
        host: name that the orchestrator knows this host by.
        address: at which the sensor and the actuator reach `port`, for the second path.
        launcher_port: for launchers and programs of this host, on the loopback interface.
        state_dir: for the fence, which must survive the daemon.
    """

    host: str
    host_id: str
    address: str
    port: int
    launcher_port: int
    workers_per_host: int
    launcher_token: TokenFile | None
    state_dir: Path
    security: Security
    environment: Settings

    @classmethod
    def parse(cls, argv: Sequence[str], env: Mapping[str, str]) -> DaemonSettings:
        """Read flags and environment; a flag wins.

        Raises:
            ConfigError: the first that cannot work, and why.
            SystemExit: after ``--help``.
        """
        environment = Settings.from_env(env)
        args = _parser().parse_args([_with_underscores(word) for word in argv])
        for name, why in _LATER.items():
            if getattr(args, name) is not None:
                raise ConfigError(f"--{name} is refused: {why}.", hint="Leave it out.", flag=f"--{name}")
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
        address = args.address or env.get("POD_IP") or host
        _check_name("--address", address)
        token = args.launcher_token_file
        state_dir = Path(args.state_dir or _default_state_dir())
        _check_state_dir(state_dir)
        return cls(
            host=host,
            host_id=f"{host}.{_boot_id()}",
            address=f"[{address}]" if ":" in address else address,
            port=port,
            launcher_port=launcher_port,
            workers_per_host=workers,
            launcher_token=TokenFile(Path(token), "--launcher_token_file") if token else None,
            state_dir=state_dir,
            security=Security.from_env(env, plaintext=args.plaintext),
            environment=environment,
        )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
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
        help="For the supervisor's second path, on all interfaces (HOST_DAEMON_PORT, else "
        f"{HOST_DAEMON_PORT}).",
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
        "--address", metavar="ADDRESS", help="At which others reach this host (POD_IP, else its name)."
    )
    parser.add_argument(
        "--state_dir", metavar="DIR", help="Keeps which commands were carried out, across restarts."
    )
    parser.add_argument("--plaintext", action="store_true", help="No TLS.  For one machine and for tests.")
    later = parser.add_argument_group("refused until a later release")
    for name in _LATER:
        if name.startswith("enable_"):
            later.add_argument(f"--{name}", action="store_const", const=True, help=argparse.SUPPRESS)
        else:
            later.add_argument(f"--{name}", help=argparse.SUPPRESS)
    return parser


def _with_underscores(word: str) -> str:
    """Dashes and underscores mean the same in a flag."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


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


def _check_state_dir(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        probe = path / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
        owner = path.stat().st_uid
    except OSError as error:
        raise ConfigError(
            f"--state_dir: cannot write to {path}: {error.strerror}.", flag="--state_dir", path=str(path)
        ) from error
    if owner not in (0, os.geteuid()):
        raise ConfigError(
            f"--state_dir: {path} belongs to user {owner}, who could change which commands are carried out.",
            flag="--state_dir",
            path=str(path),
        )


def _default_state_dir() -> str:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    name = "resiliency-host-daemon"
    return f"{runtime}/{name}" if runtime else f"{tempfile.gettempdir()}/{name}-{os.geteuid()}"


def _boot_id() -> str:
    """Differs between machines, and between starts of one: a replacement under the same name has another."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().replace("-", "")[:12]
    except OSError:
        return "unknown"
