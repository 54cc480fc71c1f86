# SPDX-License-Identifier: Apache-2.0
"""Who and when: the identity of this process within the job, and clocks.

`RunInfo` is the only place that reads the environment variables which torchrun and our launcher
set; every other module is handed a value.  Clocks are objects so that a test can own time:
monotonic seconds measure durations, aware UTC stamps events.  Beside them, what a process does without for
a while.

**Limits on other processes** are measured by `awake_s`.  A process that is stopped (SIGSTOP, a frozen
control group, a suspended job) misses what the others do, and as a rule they were stopped with it.  The
machine's clock goes on, so all limits would be over at the moment at which it is continued.  `awake_s` leaves
such gaps out: a thread ticks, and a tick that comes late counts as one in time.  A process without a core, or
with code that keeps the interpreter, counts as stopped, too.  Not for what others end by their own clocks,
such as a lease: it is lost although its holder was stopped.  `elapsed_s` is for that: it also counts the time
in which the machine is suspended, which `time.monotonic` leaves out.
"""

from __future__ import annotations

import gc
import ipaddress
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Protocol, overload

from resiliency.errors import ConfigError, LossNotFinite
from resiliency.proc_stat import read_stat

#: Any port does: nothing is sent to find out by which way another host is reached.
_SOME_PORT = 9
#: Names the job in events, logs and file names.
JOB_ENV = "JOB_IDENTIFIER"
#: Directory for the files that describe a run (goodput log, event log); default: the working directory.
RUN_DIR_ENV = "RESILIENCY_RUN_DIR"
#: Where ranks ask their launcher for a checkpoint agent: an abstract socket's name, without its first NUL.
AGENT_HOST_ENV = "RESILIENCY_AGENT_HOST"
#: Directory in which ranks that are told to end note where they stopped, for their launcher.
STOP_NOTES_ENV = "RESILIENCY_STOP_NOTES"
#: What this host shares with others that fail together with it: ``rack=r7,block=b1``.
FAILURE_DOMAINS_ENV = "RESILIENCY_FAILURE_DOMAINS"
#: Name or address at which the other hosts of the job reach this one; default: found out.
PEER_ADDRESS_ENV = "RESILIENCY_PEER_ADDRESS"

#: What a rank does about a loss that is not finite: ``stop``, ``rollback`` or ``ignore``; the launcher's
#: ``--on-nan``.
ON_NAN_ENV = "RESILIENCY_ON_NAN"
#: Branches of checkpoints that the launcher has begun, as JSON rows of number, parent and last common step.
ROLLBACKS_ENV = "RESILIENCY_ROLLBACKS"

_STOP_NOTE = "stopped-"

TICK_S = 0.25
#: A tick counts for at most so long.
MOST_AWAKE_S = 2 * TICK_S
#: Gaps that are remembered: the longest ones.
_GAPS = 64


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """Identity of one process of a job.

    `rank`, `local_rank` and `attempt` are None in processes that are not workers (the launcher, a
    command-line tool).  `attempt` counts the starts of the worker group, from 0.  `domains` are pairs of
    label and value: hosts with an equal pair may fail together.  An empty `peer_address` is to be found out.
    """

    job_name: str = "local"
    host: str = ""
    node_rank: int = 0
    rank: int | None = None
    local_rank: int | None = None
    world_size: int = 1
    local_world_size: int = 1
    attempt: int | None = None
    run_dir: str = "."
    domains: tuple[tuple[str, str], ...] = ()
    peer_address: str = ""

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> RunInfo:
        """Read the identity from `env` (default: this process's environment).

        Raises:
            ConfigError: a variable that must be a whole number is not one, or failure domains cannot be read.
        """
        env = os.environ if env is None else env
        return cls(
            job_name=env.get(JOB_ENV) or env.get("JOB_NAME") or env.get("TORCHELASTIC_RUN_ID") or "local",
            host=env.get("NODE_NAME") or socket.gethostname(),
            node_rank=_whole(env, "GROUP_RANK", _whole(env, "NODE_RANK", 0)),
            rank=_whole(env, "RANK"),
            local_rank=_whole(env, "LOCAL_RANK"),
            world_size=_whole(env, "WORLD_SIZE", 1),
            local_world_size=_whole(env, "LOCAL_WORLD_SIZE", 1),
            attempt=_whole(env, "TORCHELASTIC_RESTART_COUNT", 0 if "RANK" in env else None),
            run_dir=env.get(RUN_DIR_ENV) or ".",
            domains=_domains(env.get(FAILURE_DOMAINS_ENV) or ""),
            peer_address=env.get(PEER_ADDRESS_ENV) or "",
        )

    @property
    def is_first_rank(self) -> bool:
        """True in global rank 0 and in a process that is no worker at all."""
        return not self.rank


@overload
def _whole(env: Mapping[str, str], name: str, default: int) -> int: ...
@overload
def _whole(env: Mapping[str, str], name: str, default: int | None = None) -> int | None: ...
def _whole(env: Mapping[str, str], name: str, default: int | None = None) -> int | None:
    text = env.get(name)
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"environment variable {name} must be a whole number, found {text!r}.",
            hint="torchrun and launcher.py set it; unset it when you start the program by hand.",
            variable=name,
        ) from None


def _domains(text: str) -> tuple[tuple[str, str], ...]:
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    domains = tuple((label.strip(), value.strip()) for label, _, value in pairs)
    labels = [label for label, _ in domains]
    if not all(label and value for label, value in domains) or len(set(labels)) != len(labels):
        raise ConfigError(
            f"environment variable {FAILURE_DOMAINS_ENV} must look like rack=r7,block=b1, with each label"
            f" once, found {text!r}.",
            variable=FAILURE_DOMAINS_ENV,
        )
    return domains


@dataclass(frozen=True, kw_only=True)
class StopNote:
    """Where a rank that was told to end stopped.

    Attributes:
        step: that it had reached.
        committed: the checkpoint of that step is.
        cause: the signal's name, and what went wrong if something did.
    """

    step: int
    committed: bool
    cause: str

    def leave(self) -> None:
        """Tell the launcher, if there is one; a note that cannot be written changes nothing."""
        directory = os.environ.get(STOP_NOTES_ENV)
        if directory:
            with suppress(OSError):
                Path(directory, f"{_STOP_NOTE}{os.getpid()}").write_text(json.dumps(asdict(self)))

    @classmethod
    def take_all(cls, directory: Path) -> list[StopNote]:
        """The notes in `directory`, which are gone then."""
        found = []
        for path in sorted(directory.glob(f"{_STOP_NOTE}*")):
            with suppress(OSError, ValueError, TypeError):
                found.append(cls(**json.loads(path.read_text())))
            path.unlink(missing_ok=True)
        return found


class Clock(Protocol):
    """Source of time.  `resiliency.testing.ManualClock` is the twin that tests own."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary point; never goes back.  For durations."""
        ...

    def now(self) -> datetime:
        """Aware UTC.  For events that people and other hosts read."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def now(self) -> datetime:
        return datetime.now(timezone.utc)


class AwakeTime:
    """The rule of `awake_s`, without a clock: readings of one are given.  One thread ticks, any may ask."""

    def __init__(self, now: float) -> None:
        #: The last tick, by the clock and in awake time: replaced together, so that no reader needs a lock.
        self._ticked = now, now
        #: Ends and lengths of the times that were left out, by the clock.
        self._gaps: tuple[tuple[float, float], ...] = ()

    def tick(self, now: float, most_s: float = MOST_AWAKE_S) -> None:
        """Count the time since the last tick, up to `most_s` of it."""
        last, awake = self._ticked
        passed = now - last
        if passed > most_s:
            gaps = sorted((*self._gaps, (now, passed - most_s)), key=lambda gap: gap[1])
            self._gaps = tuple(gaps[-_GAPS:])
        self._ticked = now, awake + min(passed, most_s)

    def at(self, now: float) -> float:
        """Awake time at a reading of the clock."""
        last, awake = self._ticked
        return awake + min(max(now - last, 0.0), MOST_AWAKE_S)

    def since(self, then: float, now: float) -> float:
        """Awake seconds between two readings; the first one may be of another process of the machine."""
        last, _ = self._ticked
        gaps = (*self._gaps, (now, max(now - last - MOST_AWAKE_S, 0.0)))
        left_out = sum(min(length, max(end - then, 0.0)) for end, length in gaps)
        return max(now - then - left_out, 0.0)


class AwakeTicker(threading.Thread):
    """One for the process, for its whole life."""

    def __init__(self, awake: AwakeTime) -> None:
        super().__init__(name="resiliency-awake", daemon=True)
        self._awake = awake

    def run(self) -> None:
        never = threading.Event()
        while not never.wait(TICK_S):
            self._awake.tick(_monotonic())


#: Tests of other modules replace `time.monotonic`.
_monotonic = time.monotonic
_awake = AwakeTime(_monotonic())
_ticker: AwakeTicker | None = None
#: Reentrant: a signal handler may ask for the time while its thread starts the ticker.
_starting = threading.RLock()


def _reading() -> float:
    """Of the clock, which ticks from here on."""
    if _ticker is None:
        _start_ticker()
    if sys.is_finalizing():  # no thread ticks any more: all time counts, or waits would never end
        _awake.tick(_monotonic(), math.inf)
    return _monotonic()


def _start_ticker() -> None:
    global _ticker
    with _starting:
        if _ticker is not None:
            return
        _awake.tick(_monotonic(), math.inf)
        ticker = AwakeTicker(_awake)
        # Where no thread can be started all time counts, as by any clock, until one can.
        with suppress(RuntimeError):
            ticker.start()
            _ticker = ticker


def _forget_ticker() -> None:
    """In a forked child, which has none of the threads."""
    global _ticker, _starting
    _ticker, _starting = None, threading.RLock()


os.register_at_fork(after_in_child=_forget_ticker)


def awake_s() -> float:
    """Seconds in which this process ran, since an arbitrary point; never goes back."""
    return _awake.at(_reading())


def awake_since(then: float) -> float:
    """Seconds in which this process ran since `then`, a reading of `time.monotonic` by any process here."""
    return _awake.since(then, _reading())


def was_stopped_for(seconds: float) -> bool:
    """True where this process has not run lately: what it reads now may be as old as that."""
    return awake_since(_monotonic() - seconds) < min(1.0, seconds / 2)


def wait_awake(changed: threading.Condition, is_over: Callable[[], bool], timeout_s: float) -> bool:
    """As `changed.wait_for`, for at most so many seconds in which this process ran."""
    until = awake_s() + timeout_s
    while not is_over():
        if (left_s := until - awake_s()) <= 0:
            return False
        changed.wait(left_s)
    return True


def elapsed_s() -> float:
    """Seconds since an arbitrary point, also those in which the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class AwakeClock(SystemClock):
    """The machine's own clocks, but durations are of the time in which this process ran."""

    def monotonic(self) -> float:
        return awake_s()


def process_start_time() -> datetime:
    """Aware UTC time at which the kernel created this process (Linux; elsewhere: now).

    The interpreter and the imports run before any code of ours can read a clock, and they are a
    large part of a restart; the kernel's record is the only honest start.
    """
    try:
        ticks = int(read_stat()[19])
        with open("/proc/uptime", "rb") as uptime:
            age_s = float(uptime.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        age_s = 0.0
    return datetime.fromtimestamp(time.time() - max(age_s, 0.0), timezone.utc)


#: Runs of ranks that a message names.
_NAMED_RUNS = 8


def name_ranks(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0-5, 9``: for messages, in ascending order; of many runs the first ones."""
    left = sorted(set(ranks))
    count = len(left)
    runs: list[str] = []
    while left and len(runs) < _NAMED_RUNS:
        size = next((i for i in range(1, len(left)) if left[i] != left[0] + i), len(left))
        runs.append(str(left[0]) if size == 1 else f"{left[0]}-{left[size - 1]}")
        del left[:size]
    more = f" and {len(left)} more" if left else ""
    return f"{'rank' if count == 1 else 'ranks'} {', '.join(runs) or 'none'}{more}"


def name_hosts(hosts: Sequence[object]) -> str:
    """``host a``, ``hosts a, b``: as `name_ranks`, of names or numbers."""
    more = f" and {len(hosts) - _NAMED_RUNS} more" if len(hosts) > _NAMED_RUNS else ""
    return f"{'host' if len(hosts) == 1 else 'hosts'} {', '.join(map(str, hosts[:_NAMED_RUNS]))}{more}"


def interface_towards(target: str) -> str:
    """The address of this host's interface on the way to `target`, a name or an address; empty: no way."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((target, _SOME_PORT))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return ""


def is_loopback(address: str) -> bool:
    """Whether an address leads each host to itself."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # a name, which each host looks up by itself
        return address == "localhost"


def addresses_of(name: str) -> list[str]:
    """What a name leads to from here; empty: it is not known here, or the name service does not answer."""
    try:
        return sorted({str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    except OSError:
        return []


_collection_lock = threading.Lock()
#: How many ask for no collections now, and whether there were any before.
_without_collection, _collected_before = 0, True


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Look for no cycles meanwhile, as it would cost more than it finds; as it was afterwards.

    Several threads may ask for it at once: the last one to leave restores what the first one found.
    """
    global _without_collection, _collected_before
    with _collection_lock:
        if not _without_collection:
            _collected_before = gc.isenabled()
        gc.disable()
        _without_collection += 1
    try:
        yield
    finally:
        with _collection_lock:
            _without_collection -= 1
            if not _without_collection and _collected_before:
                gc.enable()


def check_loss(loss: float, *, step: int) -> None:
    """End this rank where its launcher has ``--on-nan stop`` or ``rollback`` and `loss` is not finite.

    Any one rank may call it: the launcher ends the others.

    Raises:
        LossNotFinite: the message names the step.
    """
    if os.environ.get(ON_NAN_ENV) in ("stop", "rollback") and not math.isfinite(loss):
        raise LossNotFinite(
            f"the loss of step {step} is {loss:g}.", hint="Look at the data and the learning rate.", step=step
        )
