# SPDX-License-Identifier: Apache-2.0
"""Command lines of sensor, controller, actuator and all in one, checked with the environment at the door."""

from __future__ import annotations

import argparse
import importlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from resiliency.errors import ConfigError
from supervisor.decision.controller import BaseController
from supervisor.flags import Parser, add_later, refuse_later, spelled
from supervisor.policy.thresholds import Thresholds, flag
from supervisor.settings import ACTUATOR_PORT, CONTROLLER_PORT, SENSOR_PORT, Settings, make_own_directory
from supervisor.transport.security import CONTROL_TOKEN_ENV, TOKEN_ENV, Security
from supervisor.view.server import DEFAULT_PORT as STATUS_PORT

#: Each part, its port where nothing says otherwise, and what it is for.
PARTS = {
    "sensor": (SENSOR_PORT, "Take in the reports of all hosts and tell the controller what is wrong."),
    "controller": (CONTROLLER_PORT, "Decide what to do about what the sensor reports, and log it first."),
    "actuator": (ACTUATOR_PORT, "Carry the controller's commands to hosts and to the orchestrator."),
}
ALL = tuple(PARTS)

_ENVIRONMENT = """\
Environment: SENSOR_ADDRESS, CONTROLLER_ADDRESS and ACTUATOR_ADDRESS (HOST:PORT) lead the parts to
each other; PORT is the port of one part; HEARTBEAT_POLLING_PERIOD_S (15) is how often hosts report;
HEARTBEAT_TIMEOUT_S (30), MAX_IN_JOB_RESTARTS (0) and MAX_WORKLOAD_RESTARTS (0) hold where no flag
and no job says otherwise.  SUPERVISOR_TLS_CA, _CERT, _KEY or --plaintext; see docs/supervisor.md."""


@dataclass(frozen=True, kw_only=True)
class PartSettings:
    """A command line that can work, of one part or of all of them.

    Attributes:
        parts: that run in this process.
        ports: of each of them; 0 is any.
        addresses: at which each part is reached, also those of other processes; empty where unknown.
        report_period_s: how often hosts report.
        state_dir: of the event log and of the local orchestrator.
        orchestrator: ``none``, ``local``, ``ray`` or ``gke``.
        job_file: of the orchestrators local and ray; None with another one.
        ray_address: of the cluster.
        status_listen, status_port: of the page for operators; no page without a port.
    """

    parts: tuple[str, ...]
    listen: str
    ports: Mapping[str, int]
    addresses: Mapping[str, str]
    report_period_s: float
    thresholds: Thresholds
    environment: Settings
    security: Security
    state_dir: Path
    shadow: bool
    policy: type[BaseController]
    orchestrator: str
    job_file: Path | None
    ray_address: str
    status_listen: str
    status_port: int | None

    @classmethod
    def parse(cls, parts: Sequence[str], argv: Sequence[str], env: Mapping[str, str]) -> PartSettings:
        """Read flags and environment; a flag wins.

        Args:
            parts: that are to run in this process.
        Raises:
            ConfigError: the first that cannot work, and why.
            SystemExit: after ``--help``.
        """
        environment = Settings.from_env(env)
        args = _parser(parts).parse_args([spelled(word, "-") for word in argv])
        refuse_later(args, "-")
        orchestrator = getattr(args, "orchestrator", "none")
        job_file = getattr(args, "job_file", None)
        if (orchestrator in ("local", "ray")) != (job_file is not None):
            raise ConfigError(
                "--job-file and --orchestrator local or ray go together: the file names hosts and jobs.",
                flag="--job-file",
            )
        ports, addresses = _ports(parts, args, environment), _addresses(parts, environment)
        thresholds = _thresholds(args, environment)
        security = Security.from_env(env, plaintext=args.plaintext)
        if security.tokens is not None and security.control_tokens is None:
            raise ConfigError(
                f"{TOKEN_ENV} needs {CONTROL_TOKEN_ENV}: hosts have the first, and must command nobody.",
                hint="Make a second token with: openssl rand -hex 32",
                variable=CONTROL_TOKEN_ENV,
            )
        return cls(
            parts=tuple(parts),
            listen=security.listen_address(args.listen),
            ports=ports,
            addresses=addresses,
            report_period_s=environment.heartbeat_polling_period_s,
            thresholds=thresholds,
            environment=environment,
            security=security,
            state_dir=_state_dir(args, parts),
            shadow=getattr(args, "shadow", False),
            policy=_policy(getattr(args, "policy", "")),
            orchestrator=orchestrator,
            job_file=Path(job_file) if job_file else None,
            ray_address=getattr(args, "ray_address", "auto"),
            status_listen=getattr(args, "status_listen", ""),
            status_port=_status_port(getattr(args, "status_port", "off")),
        )


def program_of(parts: Sequence[str]) -> str:
    return f"{parts[0]}.py" if len(parts) == 1 else "python3 -m supervisor --all-in-one"


def usage_of(parts: Sequence[str]) -> str:
    return f"{program_of(parts)} [FLAGS]"


def _parser(parts: Sequence[str]) -> argparse.ArgumentParser:
    what = PARTS[parts[0]][1] if len(parts) == 1 else "Run sensor, controller and actuator in one process."
    parser = Parser(
        prog=program_of(parts),
        usage=usage_of(parts),
        description=f"{what}\n\n{_ENVIRONMENT}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if len(parts) == 1:
        default = PARTS[parts[0]][0]
        parser.add_argument("--port", type=int, metavar="PORT", help=f"To listen at (PORT, else {default}).")
    parser.add_argument(
        "--listen",
        metavar="ADDRESS",
        help="Interface to listen at (0.0.0.0; with --plaintext 127.0.0.1).",
    )
    parser.add_argument("--plaintext", action="store_true", help="No TLS.  For one machine and for tests.")
    if "controller" in parts:
        _add_controller(parser)
    if "actuator" in parts:
        parser.add_argument(
            "--orchestrator",
            choices=("none", "local", "ray", "gke"),
            default="none",
            help="What owns the hosts: none (restarts in place only), local (processes of this machine), ray "
            "(nodes of a Ray cluster, see docs/ray.md), gke (JobSets of a Kubernetes cluster, see "
            "docs/gke.md).",
        )
        parser.add_argument(
            "--job-file", metavar="FILE", help="Hosts and jobs of --orchestrator local or ray (JSON)."
        )
        parser.add_argument(
            "--ray-address",
            default="auto",
            metavar="HOST:PORT",
            help="Of the cluster of --orchestrator ray (%(default)s: the one that this machine is part of).",
        )
    if "controller" in parts or "actuator" in parts:
        parser.add_argument(
            "--state-dir", metavar="DIR", help="Keeps the event log, and what the orchestrator started."
        )
    if "sensor" in parts or "controller" in parts:
        _add_thresholds(parser)
    add_later(parser, "-")
    return parser


def _add_controller(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shadow", action="store_true", help="Decide and log, but give no command: see what would be done."
    )
    parser.add_argument(
        "--policy", default="", metavar="MODULE:CLASS", help="A subclass of BaseController, instead of it."
    )

    parser.add_argument(
        "--status-port",
        default=str(STATUS_PORT),
        metavar="PORT|off",
        help="Of the page for operators, and of Prometheus' metrics (%(default)s); 0: a free port.",
    )
    parser.add_argument(
        "--status-listen",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="Interface of that page (%(default)s).  It has no login.",
    )


def _status_port(text: str) -> int | None:
    if text == "off":
        return None
    if not text.isdecimal() or int(text) > 65535:
        raise ConfigError(f"--status-port must be 0 to 65535 or off, found {text!r}.", flag="--status-port")
    return int(text)


def _add_thresholds(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "thresholds", "Give sensor and controller the same.  docs/supervisor.md says what each does."
    )
    defaults = Thresholds()
    for field in fields(Thresholds):
        default = getattr(defaults, field.name)
        variable = "HEARTBEAT_TIMEOUT_S, else " if field.name == "heartbeat_timeout_s" else ""
        group.add_argument(
            flag(field.name),
            type=int if isinstance(default, int) else float,
            metavar="N" if isinstance(default, int) else "X",
            help=f"({variable}{default:g})",
        )


def _thresholds(args: argparse.Namespace, environment: Settings) -> Thresholds:
    given = {
        field.name: value
        for field in fields(Thresholds)
        if (value := getattr(args, field.name, None)) is not None
    }
    given.setdefault("heartbeat_timeout_s", environment.heartbeat_timeout_s)
    try:
        thresholds = Thresholds(**given)
    except ValueError as error:
        raise ConfigError(f"{error}.", flag=str(error).partition(" ")[0]) from error
    if thresholds.heartbeat_timeout_s <= environment.heartbeat_polling_period_s:
        raise ConfigError(
            f"{flag('heartbeat_timeout_s')} ({thresholds.heartbeat_timeout_s:g}) must be larger than "
            f"HEARTBEAT_POLLING_PERIOD_S ({environment.heartbeat_polling_period_s:g}): else a host that "
            "reports on time is lost.",
            flag=flag("heartbeat_timeout_s"),
        )
    return thresholds


def _ports(parts: Sequence[str], args: argparse.Namespace, environment: Settings) -> dict[str, int]:
    if len(parts) == 1:
        port = args.port if args.port is not None else environment.port
        chosen = {parts[0]: PARTS[parts[0]][0] if port is None else port}
    else:
        given = _given_addresses(environment)
        chosen = {
            part: int(given[part].rpartition(":")[2]) if given[part] else PARTS[part][0] for part in parts
        }
    for part, port in chosen.items():
        if not 0 <= port <= 65535:
            raise ConfigError(f"--port of the {part} must be 0 (any) to 65535, found {port}.", flag="--port")
    return chosen


def _given_addresses(environment: Settings) -> dict[str, str]:
    return {
        "sensor": environment.sensor_address,
        "controller": environment.controller_address,
        "actuator": environment.actuator_address,
    }


def _addresses(parts: Sequence[str], environment: Settings) -> dict[str, str]:
    """On one machine the parts find each other at their own ports."""
    given = _given_addresses(environment)
    if len(parts) > 1:
        return {part: given[part] or f"127.0.0.1:{PARTS[part][0]}" for part in PARTS}
    (part,) = parts
    needed = {"sensor": ("controller",), "controller": ("actuator",), "actuator": ("controller", "sensor")}
    for other in needed[part]:
        if not given[other]:
            variable = f"{other.upper()}_ADDRESS"
            raise ConfigError(
                f"{variable} must be set: the {part} speaks to the {other}.",
                hint="On one machine, python3 -m supervisor --all-in-one needs no addresses.",
                variable=variable,
            )
    return given


def _policy(text: str) -> type[BaseController]:
    if not text:
        return BaseController
    module, colon, name = text.partition(":")
    found: object = None
    try:
        found = getattr(importlib.import_module(module), name, None) if colon and module else None
    except ImportError as error:
        raise ConfigError(f"--policy: {module} cannot be imported: {error}.", flag="--policy") from error
    if not (isinstance(found, type) and issubclass(found, BaseController)):
        raise ConfigError(
            f"--policy must be MODULE:CLASS of a subclass of BaseController, found {text!r}.", flag="--policy"
        )
    return found


def _state_dir(args: argparse.Namespace, parts: Sequence[str]) -> Path:
    text = getattr(args, "state_dir", None) or os.path.join(
        os.environ.get("XDG_STATE_HOME") or tempfile.gettempdir(), f"resiliency-supervisor-{os.geteuid()}"
    )
    path = Path(text)
    if parts != ("sensor",):
        make_own_directory(path, "--state-dir")
    return path
