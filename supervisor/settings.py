# SPDX-License-Identifier: Apache-2.0
"""What the environment says to the parts of the supervisor, checked when they start.

Every violation is refused with a sentence that names the variable, before anything listens or connects.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from resiliency.errors import ConfigError

#: Where each part listens when nothing says otherwise; so they find each other on one machine.
SENSOR_PORT, CONTROLLER_PORT, ACTUATOR_PORT, HOST_DAEMON_PORT = 60061, 60062, 60063, 60060

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_ADDRESS = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(\d{1,5})")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Values of the environment; see `docs/supervisor.md` for their meaning.

    An empty address means that the part is not used.  `port` is None where PORT is not set.  `nodes_per_dp`
    and `dp_replicas` are 0 where they are not set.
    """

    port: int | None = None
    sensor_address: str = ""
    controller_address: str = ""
    actuator_address: str = ""
    host_daemon_port: int = HOST_DAEMON_PORT
    heartbeat_polling_period_s: float = 15.0
    heartbeat_timeout_s: float = 30.0
    workers_per_host: int = 8
    job_namespace: str = "default"
    workload_namespace: str = "default"
    max_in_job_restarts: int = 0
    max_workload_restarts: int = 0
    scaling: bool = False
    nodes_per_dp: int = 0
    dp_replicas: int = 0

    def __post_init__(self) -> None:
        if self.heartbeat_timeout_s <= self.heartbeat_polling_period_s:
            raise ConfigError(
                f"HEARTBEAT_TIMEOUT_S ({self.heartbeat_timeout_s:g}) must be larger than "
                f"HEARTBEAT_POLLING_PERIOD_S ({self.heartbeat_polling_period_s:g}): else a host that reports "
                "on time is lost.",
                variable="HEARTBEAT_TIMEOUT_S",
            )

    def hosts_per_replica(self, hosts: int) -> int:
        """Hosts of one data-parallel replica of a job that does not say; 0 where that is no whole number.

        The hosts of a replica go before the number of replicas: a job that is resized keeps them.
        """
        count = self.nodes_per_dp or self.dp_replicas or 1
        if hosts % count:
            return 0
        return self.nodes_per_dp or hosts // count

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Settings:
        """Read and check `env`.

        Raises:
            ConfigError: which variable cannot work, and why.
        """
        return cls(
            port=read_whole(env, "PORT", 1, 65535) if env.get("PORT") else None,
            sensor_address=_address(env, "SENSOR_ADDRESS"),
            controller_address=_address(env, "CONTROLLER_ADDRESS"),
            actuator_address=_address(env, "ACTUATOR_ADDRESS"),
            host_daemon_port=read_whole(env, "HOST_DAEMON_PORT", 1, 65535, cls.host_daemon_port),
            heartbeat_polling_period_s=_seconds(
                env, "HEARTBEAT_POLLING_PERIOD_S", cls.heartbeat_polling_period_s
            ),
            heartbeat_timeout_s=_seconds(env, "HEARTBEAT_TIMEOUT_S", cls.heartbeat_timeout_s),
            workers_per_host=read_whole(env, "WORKERS_PER_HOST", 1, 1024, cls.workers_per_host),
            job_namespace=_namespace(env, "JOB_NAMESPACE", cls.job_namespace),
            workload_namespace=_namespace(env, "WORKLOAD_NAMESPACE", cls.workload_namespace),
            max_in_job_restarts=read_whole(env, "MAX_IN_JOB_RESTARTS", 0, 10**6, cls.max_in_job_restarts),
            max_workload_restarts=read_whole(
                env, "MAX_WORKLOAD_RESTARTS", 0, 10**6, cls.max_workload_restarts
            ),
            scaling=_switch(env, "ENABLE_WORKLOAD_SCALING"),
            nodes_per_dp=read_whole(env, "NUM_NODES_PER_DP", 1, 10**6, cls.nodes_per_dp),
            dp_replicas=read_whole(env, "NUM_DP_REPLICAS", 1, 10**6, cls.dp_replicas),
        )


def make_own_directory(path: Path, flag: str) -> None:
    """Make the directory that `flag` names, where it is not there.

    Raises:
        ConfigError: nothing can be written to it, or it belongs to another user.
    """
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        probe = path / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
        owner = path.stat().st_uid
    except OSError as error:
        raise ConfigError(
            f"{flag}: cannot write to {path}: {error.strerror}.", flag=flag, path=str(path)
        ) from error
    if owner not in (0, os.geteuid()):
        raise ConfigError(
            f"{flag}: {path} belongs to user {owner}, who could change what is done.",
            flag=flag,
            path=str(path),
        )


def read_whole(env: Mapping[str, str], name: str, least: int, most: int, default: int = 0) -> int:
    """The whole number that variable `name` holds, or `default` where it is not set.

    Raises:
        ConfigError: it is no number from `least` to `most`.
    """
    text = env.get(name)
    if not text:
        return default
    if not re.fullmatch(r"[+-]?\d{1,18}", text) or not least <= int(text) <= most:
        raise ConfigError(
            f"{name} must be a whole number from {least} to {most}, found {text!r}.", variable=name
        )
    return int(text)


def _seconds(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 86_400:  # also refuses nan
        raise ConfigError(f"{name} must be seconds above 0 and at most a day, found {text!r}.", variable=name)
    return value


def _switch(env: Mapping[str, str], name: str) -> bool:
    text = (env.get(name) or "0").lower()
    if text not in ("0", "1", "true", "false"):
        raise ConfigError(f"{name} must be 0, 1, true or false, found {env[name]!r}.", variable=name)
    return text in ("1", "true")


def _namespace(env: Mapping[str, str], name: str, default: str) -> str:
    text = env.get(name) or default
    if not _NAME.fullmatch(text):
        raise ConfigError(
            f"{name} must be a Kubernetes name (lower case letters, digits and dashes), found {text!r}.",
            variable=name,
        )
    return text


def _address(env: Mapping[str, str], name: str) -> str:
    text = env.get(name) or ""
    if text:
        check_address(text, name)
    return text


def check_address(text: str, name: str) -> None:
    """Refuse what is not HOST:PORT."""
    match = _ADDRESS.fullmatch(text)
    if match is None or not 1 <= int(match[2]) <= 65535:
        raise ConfigError(f"{name} must be HOST:PORT, found {text!r}.", variable=name)
