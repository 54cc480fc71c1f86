# SPDX-License-Identifier: Apache-2.0
"""``--sim-fault-desc random,SECONDS``: one fault in each attempt, drawn and done by the simulator.

The simulator's generator draws from all kinds that this job can have on this host; the log names the others
with the reason.  Attempt, rank and time do not depend on the kinds, so all ranks agree on them; the kind is
what the struck rank's host can do.  That rank starts a simulator for itself (``--parent``): a stopped process
cannot continue itself, and what a slow-down needs to be undone must outlive its rank.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from fractions import Fraction
from itertools import islice
from pathlib import Path

from resiliency.errors import ConfigError
from resiliency.events import EventStream, EventType, RunEvent, events_path
from resiliency.runtime import RunInfo
from simulator.command_line import parse
from simulator.faults import Kind, PlannedFault, microseconds, seconds
from simulator.job import NAMES, Job
from simulator.schedule import Poisson, Shape, Share
from simulator.session import log_left_out, refusals, standard_injectors

logger = logging.getLogger(__name__)

#: Attempts for which faults are drawn.
ATTEMPTS = 100
#: How long a simulator may take to undo its effects.
_UNDO = timedelta(seconds=30)


@dataclass(frozen=True, kw_only=True)
class RandomFault:
    """The fault of one attempt.

    Its time counts from when training begins in that attempt; its node is the global rank.  `disk_dir` is for
    a full disk.
    """

    attempt: int
    fault: PlannedFault
    disk_dir: str = ""


def possible_kinds(disk_dir: str) -> list[Kind]:
    """The kinds that this job can have on this host; the host's first rank logs why it cannot have others.

    Args:
        disk_dir: on the file system that may be full; "" where none was named.
    """
    info = RunInfo.from_env()
    options = parse(["--job", info.job_name, "--at", "0,kill", *_disk_flags(disk_dir)], {})
    refused = refusals(Kind, standard_injectors(Job(info.job_name, info.node_rank), options))
    if info.job_name not in map(os.environ.get, NAMES) or info.local_rank is None:
        why = "no launcher has started this process under the name of its job."
        refused |= {Kind.HOST_KILL: why, Kind.NETWORK_CUT: why}
    elif info.world_size <= info.local_world_size:
        refused[Kind.HOST_KILL] = "the job has one host, so no attempt would follow."
    if Kind.NETWORK_CUT not in refused and _has_network_of_host():
        refused[Kind.NETWORK_CUT] = "the job shares the network of its host or container."
    if not info.local_rank:
        log_left_out(refused)
    return [kind for kind in Kind if kind not in refused]


def _has_network_of_host() -> bool:
    try:
        return os.readlink("/proc/self/ns/net") == os.readlink("/proc/1/ns/net")
    except OSError:
        return True  # that cannot be told, and a network of others must not be cut


def _disk_flags(disk_dir: str) -> list[str]:
    return ["--disk_dir", disk_dir] if disk_dir else []


def draw_faults(
    text: str, world_size: int, possible: Callable[[str], Sequence[Kind]] = possible_kinds
) -> tuple[RandomFault, ...]:
    """Read ``random,SECONDS[,seed=N][,duration=S][,disk_dir=DIR]`` and draw.

    Args:
        possible: gives the kinds to draw from, each as often; called with the DIR.
    Raises:
        ConfigError: the text has another form.
    """
    mean, *options = text.split(",")[1:] or [""]
    values = {"seed": "42", "duration": "30", "disk_dir": ""}
    given = [each.partition("=")[0] for each in options]
    values |= {name: each.partition("=")[2] for name, each in zip(given, options, strict=True)}
    mean_us = Fraction(microseconds(mean, f"SECONDS of --sim-fault-desc {text}"))
    lasts_us = microseconds(values["duration"], f"duration of --sim-fault-desc {text}")
    seed = values["seed"]
    known = len(given) == len(set(given)) and len(values) == 3
    if not (mean_us and lasts_us and known and seed.isascii() and seed.isdigit()):
        raise ConfigError(
            f"--sim-fault-desc {text}: cannot read it.",
            hint="Write random,SECONDS[,seed=N][,duration=S][,disk_dir=DIR]; SECONDS, the mean time to a"
            " fault, and S, how long it lasts if it ends, are above 0.",
            flag="--sim-fault-desc",
        )
    source = Poisson(
        mean_us=mean_us,
        shares=[Share(kind) for kind in possible(values["disk_dir"])],
        seed=int(seed),
        lasts_us=dict.fromkeys(Kind, lasts_us),
    )
    # Each rank is a node with one device: kinds that strike a host have a rank, too.
    shape = Shape(nnodes=world_size, gpus_per_node=1, length_us=int(mean_us * 10 * ATTEMPTS))
    found, before_us = [], 0
    for attempt, drawn in enumerate(islice(source.faults(shape), ATTEMPTS)):
        fault = replace(drawn, at_us=drawn.at_us - before_us)
        found.append(RandomFault(attempt=attempt, fault=fault, disk_dir=values["disk_dir"]))
        before_us = drawn.at_us
    return tuple(found)


class RankSimulators:
    """The simulators of this rank: one for each random fault that strikes it in this attempt.

    They start with the event INITIALIZED, and end with the rank at the latest.

    Args:
        faults: those of other ranks and attempts are left out.
        info: identity of this rank.
    """

    def __init__(self, faults: Iterable[RandomFault], info: RunInfo) -> None:
        me = (info.rank or 0, info.attempt or 0)
        self._faults = [each for each in faults if (each.fault.node, each.attempt) == me]
        self._info = info
        self._started: list[subprocess.Popen[bytes]] = []

    def attach(self, events: EventStream) -> None:
        """Start when the rank says that it begins to train."""
        events.observe(self._on_event)

    def _on_event(self, event: RunEvent) -> None:
        if event.type is EventType.INITIALIZED:
            while self._faults:
                self._started.append(self._start(self._faults.pop()))

    def _start(self, drawn: RandomFault) -> subprocess.Popen[bytes]:
        fault, gpu, node = drawn.fault, self._info.local_rank or 0, self._info.node_rank
        row = [seconds(fault.at_us), fault.kind.value, f"node={node}"]
        row += [] if fault.gpu is None else [f"gpu={gpu}"]
        row += [f"duration={seconds(fault.duration_us)}"] if fault.duration_us else []
        row += [] if fault.value is None else [f"value={fault.value}"]
        root = Path(__file__).parents[1]
        flags = ["--job", self._info.job_name, "--parent", str(os.getpid()), "--yes", "--skip_impossible"]
        flags += ["--gpus_per_node", str(gpu + 1), "--at", ",".join(row)]
        flags += ["--duration_s", seconds(fault.at_us + 1), "--job_end_grace_s", "0"]
        flags += ["--nnodes", str(node + 1), "--node_rank", str(node), *_disk_flags(drawn.disk_dir)]
        flags += ["--run_dir", self._info.run_dir] if events_path(self._info).is_file() else []
        return subprocess.Popen(
            [sys.executable, str(root / "simulator" / "simulator_entrypoint.py"), *flags],
            stdin=subprocess.DEVNULL,
            # A signal to the rank's group must not end it before what it has to undo.
            start_new_session=True,
        )

    def close(self) -> None:
        """End the simulators, which undo their effects; idempotent."""
        for process in self._started:
            process.terminate()
        for process in self._started:
            try:
                process.wait(_UNDO.total_seconds())
            except subprocess.TimeoutExpired:
                logger.warning(
                    "simulator %d still undoes its effect after %s; it ends by itself", process.pid, _UNDO
                )
        self._started.clear()
