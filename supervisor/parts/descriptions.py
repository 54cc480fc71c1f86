# SPDX-License-Identifier: Apache-2.0
"""Which description of a job holds, where hosts give different ones.

Each connected host has one vote, for the job that it works for.  A description holds once it has more than
half of the votes of its job, and stays until another one has more than half.  So one host that claims to work
for the job of others changes nothing about that job, and a job that starts again with another size does.
"""

from __future__ import annotations

from collections import Counter

from supervisor.values import WorkloadInfo


class JobDescriptions:
    """The votes of all connected hosts; each method returns descriptions that hold since its change."""

    def __init__(self) -> None:
        self._given: dict[str, WorkloadInfo] = {}  # by host
        self._jobs: dict[str, str] = {}  # that each host works for
        self._votes: dict[str, Counter[WorkloadInfo]] = {}  # by job

    def take_description(self, host: str, info: WorkloadInfo) -> list[WorkloadInfo]:
        """`host` describes a job; that counts while the host works for this job."""
        return self._change(host, info, self._jobs.get(host, ""))

    def take_job(self, host: str, job: str) -> list[WorkloadInfo]:
        """`host` works for `job` now; empty: for none."""
        return self._change(host, self._given.get(host), job)

    def forget_host(self, host: str) -> list[WorkloadInfo]:
        """The stream of `host` has ended."""
        held = self._change(host, None, "")
        del self._jobs[host]
        return held

    def _change(self, host: str, info: WorkloadInfo | None, job: str) -> list[WorkloadInfo]:
        before, after = self._vote(host), info if info is not None and info.workload == job else None
        self._jobs[host] = job
        if info is None:
            self._given.pop(host, None)
        else:
            self._given[host] = info
        if before == after:
            return []
        for vote, by in ((before, -1), (after, 1)):
            if vote is not None:
                self._votes.setdefault(vote.workload, Counter())[vote] += by
        changed = {vote.workload for vote in (before, after) if vote is not None}
        return [info for job in changed for info in self._winner(job)]

    def _vote(self, host: str) -> WorkloadInfo | None:
        info = self._given.get(host)
        return info if info is not None and info.workload == self._jobs.get(host) else None

    def _winner(self, job: str) -> list[WorkloadInfo]:
        votes = self._votes[job] = +self._votes[job]  # without those that nobody gives any more
        if not votes:
            del self._votes[job]
            return []
        ((info, count),) = votes.most_common(1)
        return [info] if 2 * count > votes.total() else []
