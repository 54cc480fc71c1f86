# SPDX-License-Identifier: Apache-2.0
"""Three processes of the supervisor, and hosts whose launchers are twins without torch."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from resiliency.testing.processes import Command as Program
from supervisor.orchestrators.local import stop_all
from supervisor.orchestrators.processes import Marked, marked_processes
from supervisor.values import CommandKind, OutcomeStatus, Request
from supervisor.view.status import Status
from tests.ports import free_row
from tests.supervisor_plane.plane import ROOT, Plane, host_of, open_plane

SCRIPTS = Path(__file__).parent / "scripts"
#: Silence is noticed soon, so that a part that is away for longer would be.
TIMEOUT_S = 5.0
SHORT = (f"--heartbeat-timeout-s={TIMEOUT_S:g}", "--tick-s=0.5", "--coalesce-s=0.5", "--advancing-s=1")


class Twins:
    """All parts, and hosts: the first ones have a twin each, two for a job, the others are spares."""

    def __init__(
        self, plane: Plane, hosts: Sequence[str], jobs: Sequence[str], thresholds: Sequence[str]
    ) -> None:
        self.plane, self.hosts, self._thresholds = plane, hosts, (*SHORT, *thresholds)
        plane.env["PYTHONPATH"] = str(ROOT)
        command = ["{python}", str(SCRIPTS / "twin.py"), "{daemon_port}", "{node_rank}", "{replicas}"]
        self._jobs = set(jobs)
        file = plane.tmp_path / "job.json"
        made = [
            {
                "workload": job,
                "replicas": 2,
                "grace_s": 5,
                "command": [*command, str(self.folder(job))],
            }
            for job in jobs
        ]
        file.write_text(json.dumps({"hosts": hosts, "first_port": free_row(2 * len(hosts)), "jobs": made}))
        self.flags = {"actuator": ("--orchestrator=local", f"--job-file={file}")}

    def folder(self, job: str = "job") -> Path:
        """Where the twins of a job meet."""
        return self.plane.tmp_path / "twins" / job

    def start(self, part: str) -> Program:
        return self.plane.start(part, *self.flags.get(part, ()), thresholds=self._thresholds)

    def start_all(self) -> Status:
        for part in ("actuator", "controller", "sensor"):
            self.start(part)
        return self.is_whole()

    def is_whole(self) -> Status:
        """Wait until the controller sees all hosts, connected and at their work, and each job's next step."""
        first = self.plane.wait_for(self._all_there, "the view is not whole")
        steps = {job.workload: job.step or 0 for job in first.jobs}
        return self.plane.wait_for(
            lambda seen: self._all_there(seen) and all((j.step or 0) > steps[j.workload] for j in seen.jobs),
            "no step is seen",
        )

    def _all_there(self, seen: Status) -> bool:
        hosts = [host_of(seen, name) for name in self.hosts]
        there = all(host is not None and host.connected for host in hosts)
        known = {job.workload for job in seen.jobs} == self._jobs
        return there and known and all(len(job.hosts) == job.hosts_needed for job in seen.jobs)

    def processes(self, host: str, *parts: str) -> list[Marked]:
        """Those of a host's parts (``daemon``, ``launcher``, ``rank``), or all of them."""
        fleet = str(self.plane.state_dir.resolve())
        there = [one for one in marked_processes(fleet) if one.mark.host == host]
        pids = {one.pid for one in there}
        found = {"daemon": list[Marked](), "launcher": list[Marked](), "rank": list[Marked]()}
        for one in there:
            found["rank" if one.parent in pids else one.mark.part].append(one)
        return [one for part in parts or found for one in found[part]]

    def stall(self) -> None:
        """From here on no rank finishes a step, as when one of them is lost."""
        (self.folder() / "stalled").touch()

    def did_nothing(self) -> None:
        """No fault was seen, and nothing was done; what the daemon's loss is told by is no incident."""
        status = self.plane.status()
        assert (status.incidents, status.commands, status.frozen) == ((), (), False)

    def restarts_once(self) -> None:
        """A rank is lost: the ranks are restarted in place, and that ends the incident."""
        status = self.plane.wait_for(
            lambda seen: any(one.closed_age_s is not None for one in seen.incidents), "no incident has ended"
        )
        done = [one.kind for one in status.commands if one.outcome is OutcomeStatus.DONE]
        assert (done, len(status.incidents)) == ([CommandKind.IN_JOB_RESET], 1)
        self.is_whole()

    def acts(self) -> None:
        """The whole chain works: a person's request gets to the orchestrator and its outcome back."""
        self.plane.act(Request.CORDON, host="spare")
        status = self.plane.wait_for(
            lambda seen: any(one.outcome is OutcomeStatus.DONE for one in seen.commands), "no outcome"
        )
        assert status.commands[0].kind is CommandKind.CORDON_HOST


@contextmanager
def open_twins(
    tmp_path: Path,
    hosts: Sequence[str] = ("a", "b", "spare"),
    jobs: Sequence[str] = ("job",),
    thresholds: Sequence[str] = (),
) -> Iterator[Twins]:
    with open_plane(tmp_path) as (plane, _):
        try:
            yield Twins(plane, hosts, jobs, thresholds)
        finally:
            for program in plane.programs.values():
                program.signal(signal.SIGCONT)
                program.close()
            stop_all(plane.state_dir)
