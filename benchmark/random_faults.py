# SPDX-License-Identifier: Apache-2.0
"""``--sim-fault-desc random,SECONDS``: one fault in each attempt, drawn and done by the simulator.

The simulator's generator draws from the kinds that a rank can do to itself (`Rule.in_rank`), so all ranks
agree on attempt, rank, kind and time.  The struck rank starts a simulator for itself alone (``--parent``):
a stopped process cannot continue itself, and what a slow-down needs to be undone must outlive its rank.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from fractions import Fraction
from itertools import islice
from pathlib import Path

from resiliency.errors import ConfigError
from resiliency.events import EventStream, EventType, RunEvent, events_path
from resiliency.runtime import RunInfo
from simulator.faults import RULES, Kind, PlannedFault, microseconds, seconds
from simulator.schedule import Poisson, Shape, Share

logger = logging.getLogger(__name__)

#: Attempts for which faults are drawn.
ATTEMPTS = 100
#: How long a simulator may take to undo its effects.
_UNDO = timedelta(seconds=30)


@dataclass(frozen=True, kw_only=True)
class RandomFault:
    """The fault of one attempt.

    Its time counts from when training begins in that attempt; its node is the global rank.
    """

    attempt: int
    fault: PlannedFault


def draw_faults(text: str, world_size: int) -> tuple[RandomFault, ...]:
    """Read ``random,SECONDS[,seed=N][,duration=S]`` and draw.

    Raises:
        ConfigError: the text has another form.
    """
    mean, *options = text.split(",")[1:] or [""]
    values = {"seed": "42", "duration": "30"}
    given = [each.partition("=")[0] for each in options]
    values |= {name: each.partition("=")[2] for name, each in zip(given, options, strict=True)}
    mean_us = Fraction(microseconds(mean, f"SECONDS of --sim-fault-desc {text}"))
    lasts_us = microseconds(values["duration"], f"duration of --sim-fault-desc {text}")
    seed = values["seed"]
    known = len(given) == len(set(given)) and len(values) == 2
    if not (mean_us and lasts_us and known and seed.isascii() and seed.isdigit()):
        raise ConfigError(
            f"--sim-fault-desc {text}: cannot read it.",
            hint="Write random,SECONDS[,seed=N][,duration=S]; SECONDS, the mean time to a fault, and S, how"
            " long it lasts if it ends, are above 0.",
            flag="--sim-fault-desc",
        )
    source = Poisson(
        mean_us=mean_us,
        shares=[Share(kind) for kind, rule in RULES.items() if rule.in_rank],
        seed=int(seed),
        lasts_us=dict.fromkeys(Kind, lasts_us),
    )
    # Each rank is a node with one device: kinds that strike a host have a rank, too.
    shape = Shape(nnodes=world_size, gpus_per_node=1, length_us=int(mean_us * 10 * ATTEMPTS))
    found, before_us = [], 0
    for attempt, drawn in enumerate(islice(source.faults(shape), ATTEMPTS)):
        found.append(RandomFault(attempt=attempt, fault=replace(drawn, at_us=drawn.at_us - before_us)))
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
        self._faults = [each.fault for each in faults if (each.fault.node, each.attempt) == me]
        self._info = info
        self._started: list[subprocess.Popen[bytes]] = []

    def attach(self, events: EventStream) -> None:
        """Start when the rank says that it begins to train."""
        events.observe(self._on_event)

    def _on_event(self, event: RunEvent) -> None:
        if event.type is EventType.INITIALIZED:
            while self._faults:
                self._started.append(self._start(self._faults.pop()))

    def _start(self, fault: PlannedFault) -> subprocess.Popen[bytes]:
        gpu = self._info.local_rank or 0
        row = [seconds(fault.at_us), fault.kind.value]
        row += [] if fault.gpu is None else [f"gpu={gpu}"]
        row += [f"duration={seconds(fault.duration_us)}"] if fault.duration_us else []
        row += [] if fault.value is None else [f"value={fault.value}"]
        root = Path(__file__).parents[1]
        flags = ["--job", self._info.job_name, "--parent", str(os.getpid()), "--yes", "--skip_impossible"]
        flags += ["--gpus_per_node", str(gpu + 1), "--at", ",".join(row)]
        flags += ["--duration_s", seconds(fault.at_us + 1), "--job_end_grace_s", "0", "--node_rank", "0"]
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
