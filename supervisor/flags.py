# SPDX-License-Identifier: Apache-2.0
"""What the command lines of the supervisor's programs have in common."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from resiliency.errors import ConfigError

#: Of a later release or another program: refused by name, because a flag without effect misleads.
_LATER = {
    "watchdogs": "watchdogs run in the host daemon",
    "watchdog_interval_s": "watchdogs run in the host daemon",
    "watchdog_notification_cooldown_s": "watchdogs run in the host daemon",
    "enable_standalone_mode": "host daemons learn the jobs of their hosts",
    "enable_topology_aware_scheduling": "host daemons learn the places of their hosts",
    "project": "a host's place comes from its metadata server and node labels, without a project",
}


class Parser(argparse.ArgumentParser):
    """Raises ConfigError for what argparse would end the process for."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}.", hint="See --help.")


def spelled(word: str, separator: str) -> str:
    """`word` of a command line with `separator` in its flag: dashes and underscores mean the same there."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return "--" + name[2:].replace("-", separator).replace("_", separator) + equals + value


#: Those of them that the host daemon takes.
DAEMON_FLAGS = (
    *("watchdogs", "watchdog_interval_s", "watchdog_notification_cooldown_s"),
    *("enable_standalone_mode", "enable_topology_aware_scheduling"),
)


def add_later(parser: argparse.ArgumentParser, separator: str, *, taken: Sequence[str] = ()) -> None:
    """Let `parser` know the flags that `refuse_later` refuses, but for those that it has `taken` itself."""
    group = parser.add_argument_group("refused until a later release")
    for name in _LATER:
        if name in taken:
            continue
        flag = spelled(f"--{name}", separator)
        if name.startswith("enable_"):
            group.add_argument(flag, action="store_const", const=True, help=argparse.SUPPRESS)
        else:
            group.add_argument(flag, help=argparse.SUPPRESS)


def refuse_later(args: argparse.Namespace, separator: str, *, taken: Sequence[str] = ()) -> None:
    """Refuse what a later release will know.

    Raises:
        ConfigError: such a flag was given; it is named.
    """
    for name, why in _LATER.items():
        if name not in taken and getattr(args, name) is not None:
            flag = spelled(f"--{name}", separator)
            raise ConfigError(f"{flag} is refused: {why}.", hint="Leave it out.", flag=flag)
