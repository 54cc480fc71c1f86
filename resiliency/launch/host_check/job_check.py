# SPDX-License-Identifier: Apache-2.0
"""The host check of a launcher: alone before it joins its job, then with the other hosts at a rendezvous.

A faulty host has left before others count on it, and a host that waits for a place has been checked as well.
Restarts of workers on the same hosts check nothing, unless that was asked for.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from enum import Enum
from pathlib import Path
from typing import Any

from resiliency.errors import ResiliencyError
from resiliency.events import EventStream, EventType
from resiliency.launch.health.scores import HostHealth
from resiliency.launch.host_check.check import EXIT_CODES, HostReport, report_alone, report_with_others
from resiliency.launch.host_check.exchange import Exchange
from resiliency.launch.host_check.probes import HostProbes
from resiliency.launch.options import LaunchOptions

logger = logging.getLogger(__name__)


class UnfitHost(ResiliencyError):
    """The check has found that this host must not take part; `exit_code` is the launcher's."""

    def __init__(self, report: HostReport) -> None:
        super().__init__(f"this host is {report.health.value}: {report.why}", host=report.host)
        self.exit_code = EXIT_CODES[report.health]


class CheckTime(str, Enum):
    """When hosts that had joined are checked again; the value is that of ``--check-on``."""

    START = "start"
    HOST_CHANGE = "host-change"
    ALWAYS = "always"


class JobCheck:
    """The checks of one launcher, by its flags.

    Args:
        probes: of this host; None: the usual ones, with the disk of the run directory.
    """

    def __init__(
        self, options: LaunchOptions, events: EventStream, *, probes: HostProbes | None = None
    ) -> None:
        self.level = int(options.args.precheck)
        self._leaves_if_slow = bool(options.args.exclude_straggler)
        self._timeout_s = float(options.args.check_timeout_s)
        self._again = CheckTime(options.args.check_on)
        self._host = options.info.host
        self._events = events
        self._probes = probes or HostProbes(host=self._host, disk=Path(options.info.run_dir))
        #: Of this launcher alone: files of earlier runs say nothing of this one.
        self._history: dict[tuple[str, str], list[float]] = defaultdict(list)
        self._report: HostReport | None = None
        self._has_joined = False

    def check_alone(self) -> None:
        """Run the probes of this host.

        Raises:
            UnfitHost: the launcher has to end.
        """
        if self.level:
            began = time.monotonic()
            measurements = self._probes.run(self._timeout_s)
            self._report = report_alone(self._host, measurements, self._history)
            for one in measurements:
                if one.has_rate:
                    self._history[one.host, one.probe].append(one.value)
            self._conclude(self._report, None, time.monotonic() - began)

    def check_with_others(
        self, store: Any, *, rank: int, hosts: int, changed: bool, run: str, attempt: int, address: str
    ) -> None:
        """After a rendezvous; all hosts of it call this.

        Args:
            changed: whether its hosts are others than those of the one before.
            run: id of this start of the job; with `attempt` it names this check alone.
            address: where the other hosts reach this one.
        Raises:
            UnfitHost: the launcher has to end.
        """
        is_new, self._has_joined = not self._has_joined, True
        if not self.level or not (changed or self._again is CheckTime.ALWAYS):
            return
        repeats = not is_new and self._again is not CheckTime.START
        if repeats:
            self.check_alone()
        if hosts > 1 and self._report is not None:
            began = time.monotonic()
            report = report_with_others(
                Exchange(store, check=f"{run}-{attempt}", rank=rank, hosts=hosts),
                self._report,
                address=address,
                links=self.level == 2 and (is_new or repeats),
                timeout_s=self._timeout_s,
                history=self._history,
            )
            self._conclude(report, attempt, time.monotonic() - began)

    def _conclude(self, report: HostReport, attempt: int | None, took_s: float) -> None:
        fields = report.fields()
        del fields["host"]  # each event has it
        self._events.emit(EventType.HOST_CHECKED, attempt=attempt, duration_s=round(took_s, 3), **fields)
        for line in report.links:
            logger.warning("host check: %s", line)
        leaves = report.health is HostHealth.FAULTY or (
            report.health is HostHealth.SLOW and self._leaves_if_slow
        )
        if leaves:
            raise UnfitHost(report)
        if report.health is HostHealth.OK and not report.notes:
            logger.info("host checked: ok; took %.1f s", took_s)
        elif report.health is HostHealth.OK:
            logger.warning("host checked: ok, but %s; the host stays", report.notes)
        else:
            logger.warning("host checked: %s: %s; the host stays", report.health.value, report.why)
