# SPDX-License-Identifier: Apache-2.0
"""Closed incidents go into an event stream for each job, beside the controller's event log.

``<state-dir>/<job>-events.jsonl`` has the form of the job's own streams: goodput reads them all.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from contextlib import closing
from datetime import datetime
from pathlib import Path

from resiliency.events import FileSink
from supervisor.view.run_events import run_events
from supervisor.view.status import Status

logger = logging.getLogger(__name__)


class JobEvents:
    """Writes each incident once; an incident that closed before this was made is not written.

    Args:
        directory: of the files.
        closed: ids of incidents that are written already.
    """

    def __init__(self, directory: Path, closed: Iterable[str]) -> None:
        self._directory = directory
        self._written = set(closed)

    def add_closed(self, status: Status, now: datetime) -> None:
        """Write the incidents of `status` that have closed since.  `now`: the moment of `status`, aware."""
        names = {job.workload: job.job or job.workload for job in status.jobs}
        for incident in status.incidents:
            if incident.closed_age_s is None or incident.id in self._written:
                continue
            self._written.add(incident.id)
            job_name = names.get(incident.subject)
            if job_name is None:
                continue  # of a host that no job holds
            # A job's name comes from its launcher: it must lead to no other directory.
            path = self._directory / f"{job_name.replace(os.sep, '_')}-events.jsonl"
            events = run_events(incident, status.commands, job_name=job_name, now=now)
            if not events:
                continue
            try:
                with closing(FileSink(path)) as sink:
                    for event in events:
                        sink.emit(event)
            except OSError as error:
                logger.warning("incident %s of %s is not in %s: %s", incident.id, job_name, path, error)
