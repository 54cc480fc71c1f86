# SPDX-License-Identifier: Apache-2.0
"""What can fail, as values: a `PlannedFault` says what fails where, when, and for how long.

Times are whole microseconds since the job was first seen, so that schedules of different machines can be
compared byte for byte.  The text form is a row of CSV: ``--trace`` reads what ``--dry_run`` prints.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from fractions import Fraction

from resiliency.errors import ConfigError, ResiliencyError

COLUMNS = ("time_s", "kind", "node", "gpu", "duration_s", "value", "cause")


class FaultMissed(ResiliencyError):
    """A fault had no target at its time: the worker was restarting, for instance.  Nothing was done."""


class InjectionFailed(ResiliencyError):
    """The operating system refused an effect, or its end."""


class Kind(str, Enum):
    """What fails.  The value is the word of command lines and traces."""

    KILL = "kill"  # SIGKILL to the process on a GPU, or to the worker of that local rank
    STOP = "stop"  # SIGSTOP for a while: alive for the kernel, silent for everybody else
    SLOW = "slow"  # less CPU for a while
    POWER_CAP = "power_cap"  # less power for a GPU for a while; without GPUs: less CPU
    XID = "xid"  # an Xid line in the kernel log, and nothing else
    XID_CRASH = "xid_crash"  # the line, and the process on the GPU is killed
    HOST_KILL = "host_kill"  # SIGKILL to all processes of the job on a node, its launcher included
    MEMORY = "memory"  # another process holds much of the host's memory for a while
    DISK_FULL = "disk_full"  # a file system has no room for a while
    NETWORK_CUT = "network_cut"  # nothing leaves the network namespace of the job on a node for a while


#: Codes of real failures, and what the driver says of them.
XID_REASONS = {
    31: "Ch 00000008, intr 10000000. MMU Fault",
    48: "An uncorrectable double bit error (DBE) has been detected on GPU",
    63: "Row remapping event: row remapper is pending",
    74: "NVLink: fatal error detected on link 0",
    79: "GPU has fallen off the bus.",
    94: "Contained: uncorrectable error, application was terminated",
    95: "Uncontained: uncorrectable error, GPU reset required",
    119: "Timeout waiting for RPC from GSP",
}


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What is particular to a kind.

    Attributes:
        on_gpu: strikes one device, not a host.
        lasts: ends after a duration.
        unit: of the value, "" where the kind has none.
        choices: values that are drawn where none is given; the first one is the default of fixed faults.
        least, most: allowed values.
    """

    on_gpu: bool
    lasts: bool
    unit: str = ""
    choices: tuple[int, ...] = ()
    least: int = 0
    most: int = 0


RULES: dict[Kind, Rule] = {
    Kind.KILL: Rule(on_gpu=True, lasts=False),
    Kind.STOP: Rule(on_gpu=True, lasts=True),
    Kind.SLOW: Rule(
        on_gpu=True,
        lasts=True,
        unit="percent of one CPU",
        choices=(25, 10, 50),
        least=1,
        most=99,
    ),
    Kind.POWER_CAP: Rule(
        on_gpu=True,
        lasts=True,
        unit="watts",
        choices=tuple(range(200, 701)),
        least=50,
        most=2000,
    ),
    Kind.XID: Rule(on_gpu=True, lasts=False, unit="Xid code", choices=tuple(XID_REASONS), least=1, most=999),
    Kind.XID_CRASH: Rule(
        on_gpu=True, lasts=False, unit="Xid code", choices=tuple(XID_REASONS), least=1, most=999
    ),
    Kind.HOST_KILL: Rule(on_gpu=False, lasts=False),
    Kind.MEMORY: Rule(
        on_gpu=False,
        lasts=True,
        unit="percent of available memory",
        choices=(50, 25, 75),
        least=1,
        most=90,
    ),
    Kind.DISK_FULL: Rule(on_gpu=False, lasts=True, unit="MiB left free", choices=(0,), least=0, most=1 << 30),
    Kind.NETWORK_CUT: Rule(on_gpu=False, lasts=True),
}


@dataclass(frozen=True, kw_only=True)
class PlannedFault:
    """One failure of a schedule.

    Attributes:
        at_us, duration_us: microseconds; the duration of a kind that does not last is 0.
        gpu: device of the node, which is the local rank of its worker; None for kinds that strike a host.
        value: in the unit of the kind's rule.
        cause: what it stands for, "Faulty GPU" say; for readers.
    """

    at_us: int
    kind: Kind
    node: int
    gpu: int | None = None
    duration_us: int = 0
    value: int | None = None
    cause: str = ""

    def __post_init__(self) -> None:
        rule = RULES[self.kind]
        name = self.kind.value
        if self.at_us < 0 or self.node < 0 or (self.gpu or 0) < 0:
            raise ConfigError(f"time, node and GPU of a fault are zero or more, found {self.text}.")
        if rule.on_gpu == (self.gpu is None):
            needs = "needs a GPU" if rule.on_gpu else "strikes a host and has no GPU"
            raise ConfigError(f"{name} {needs}, found {self.text}.")
        if rule.lasts == (self.duration_us <= 0):
            needs = "needs a duration above zero" if rule.lasts else "has no duration"
            raise ConfigError(f"{name} {needs}, found {self.text}.")
        if (self.value is not None) != bool(rule.unit):
            raise ConfigError(f"{name} has {f'a value, in {rule.unit}' if rule.unit else 'no value'}.")
        if self.value is not None and not rule.least <= self.value <= rule.most:
            raise ConfigError(
                f"the value of {name}, in {rule.unit}, is {rule.least} to {rule.most}, found {self.value}."
            )

    @property
    def order(self) -> tuple[int, int, int, str]:
        """Sorts a schedule: by time, then in a fixed order."""
        return self.at_us, self.node, -1 if self.gpu is None else self.gpu, self.kind.value

    @property
    def row(self) -> tuple[str, ...]:
        """The values of `COLUMNS`; "" for what the kind does not have."""
        return (
            seconds(self.at_us),
            self.kind.value,
            str(self.node),
            "" if self.gpu is None else str(self.gpu),
            seconds(self.duration_us) if self.duration_us else "",
            "" if self.value is None else str(self.value),
            self.cause,
        )

    @property
    def text(self) -> str:
        """For log lines: ``stop of node 0 gpu 1 at 12.500000 s for 30.000000 s``."""
        where = f"node {self.node}" + ("" if self.gpu is None else f" gpu {self.gpu}")
        value = "" if self.value is None else f" ({self.value} {RULES[self.kind].unit})"
        lasts = f" for {seconds(self.duration_us)} s" if self.duration_us else ""
        return f"{self.kind.value}{value} of {where} at {seconds(self.at_us)} s{lasts}"


def seconds(microseconds: int) -> str:
    """Microseconds as seconds with six places, from integers alone."""
    return f"{microseconds // 1_000_000}.{microseconds % 1_000_000:06d}"


def microseconds(text: str, what: str) -> int:
    """Seconds as written by a person, `1.5` or `2e6`, in whole microseconds.

    Raises:
        ConfigError: not a number, or below zero.
    """
    try:
        value = Fraction(text.strip())
    except (ValueError, ZeroDivisionError):
        raise ConfigError(f"{what} must be seconds, found {text!r}.") from None
    if value < 0:
        raise ConfigError(f"{what} must be zero or more seconds, found {text!r}.")
    return round(value * 1_000_000)


def kind_named(text: str) -> Kind:
    """The kind with this name.

    Raises:
        ConfigError: there is none; the message lists them.
    """
    try:
        return Kind(text.strip())
    except ValueError:
        raise ConfigError(
            f"{text!r} is no kind of fault.", hint=f"Choose from {', '.join(kind.value for kind in Kind)}."
        ) from None
