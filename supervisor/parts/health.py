# SPDX-License-Identifier: Apache-2.0
"""Whether a program of the supervisor answers: ``python3 -m supervisor.parts.health``, for HEALTHCHECK.

A port that accepts connections is no answer: the kernel does that for a process that is stopped, too.  Here
the program's own loop has to answer a call, of a method that no part has: the answer costs nothing, needs no
role, and is the same from all of them.  A controller says itself whether it can write its log.
"""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

import grpc

from resiliency.errors import ConfigError
from supervisor.daemon.settings import DaemonSettings
from supervisor.parts.settings import ALL, PARTS, PartSettings
from supervisor.transport.limits import CHANNEL_OPTIONS
from supervisor.transport.roles import Role
from supervisor.transport.security import Security

#: For each answer.
ANSWER_S = 5.0
#: Answered by the server of a part with "unimplemented".
_METHOD = "/resiliency.supervisor.v1.Health/Check"
_DAEMON = "host_daemon"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 where the program answers, else 1 and a sentence.

    Args:
        argv: process id of the program; default: 1, the first process of a container.
    """
    words = sys.argv[1:] if argv is None else argv
    pid = words[0] if words else "1"
    try:
        command = Path(f"/proc/{int(pid)}/cmdline").read_bytes().decode().split("\0")[:-1]
        why = find_problem(command, os.environ)
    except (OSError, ValueError, ConfigError) as error:
        why = f"process {pid}: {error}"
    if why:
        print(why, file=sys.stderr)
    return int(bool(why))


def find_problem(command: Sequence[str], env: Mapping[str, str]) -> str:
    """Why the program that was started as `command` in `env` is not well; empty where it is.

    Raises:
        ConfigError: it could not have been started like that.
    """
    parts, flags = _program(command)
    if parts == (_DAEMON,):
        daemon = DaemonSettings.parse(flags, env)
        if not daemon.security.can_serve:
            return ""  # it has no port: its connections are its own
        return _why_silent(daemon.listen, daemon.port, Role.HOST, daemon.security)
    settings = PartSettings.parse(parts, flags, env)
    for part in parts:
        role = Role(f"resiliency-{part}")
        if why := _why_silent(settings.listen, settings.ports[part], role, settings.security):
            return why
    if settings.status_port and "controller" in parts:
        return _why_unwell(_reached(settings.status_listen), settings.status_port)
    return ""


def _program(command: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """The parts that a command line starts, and its flags."""
    for number, word in enumerate(command):
        name = word.removesuffix(".py").replace("/", ".").rpartition("supervisor")[2].strip(".")
        if word == "supervisor" and command[number - 1] == "-m":
            return ALL, [flag for flag in command[number + 1 :] if flag.replace("_", "-") != "--all-in-one"]
        if "supervisor" in word and name in (*PARTS, _DAEMON):
            return (name,), list(command[number + 1 :])
    raise ConfigError(f"{' '.join(command)[:200]!r} is no program of the supervisor.")


def _reached(listen: str) -> str:
    return "127.0.0.1" if listen in ("0.0.0.0", "::", "") else listen  # noqa: S104


def _why_silent(listen: str, port: int, role: Role, security: Security) -> str:
    host = _reached(listen)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        credentials = security.channel_credentials()
    except OSError as error:
        return f"{role.value}: a certificate cannot be read: {error}"
    named = (("grpc.ssl_target_name_override", role.value),)
    channel = (
        grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        if credentials is None
        else grpc.secure_channel(address, credentials, options=CHANNEL_OPTIONS + named)
    )
    with channel:
        try:
            channel.unary_unary(_METHOD)(b"", timeout=ANSWER_S)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return ""
            return f"{role.value} at {address} does not answer: {error.code().name}: {error.details()}"
    return f"{role.value} at {address} is another program"


def _why_unwell(host: str, port: int) -> str:
    address = f"http://{host}:{port}/healthz"
    try:
        with urllib.request.urlopen(address, timeout=ANSWER_S):
            return ""
    except urllib.error.HTTPError as error:
        return f"{address}: {error.read(2048).decode('utf-8', 'replace').strip()}"
    except OSError as error:
        return f"{address}: {error}"


if __name__ == "__main__":
    sys.exit(main())
