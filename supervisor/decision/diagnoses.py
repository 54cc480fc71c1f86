# SPDX-License-Identifier: Apache-2.0
"""What launchers say about the attempts of their jobs: kept for people, and for who holds a job up.

A launcher acts upon its diagnosis itself, by a restart in place.  What it cannot do, and the policy does, is
to replace the host.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from resiliency.launch.health.causes import Cause
from supervisor.decision.state import Diagnosed, State
from supervisor.decision.turn import Turn
from supervisor.policy.diagnosis import ECHOES
from supervisor.values import Event, cut_text


def take_diagnosis(turn: Turn, event: Event) -> bool:
    """Keep the newest diagnosis of a host; False for one of another job, or of an attempt that is history."""
    host = turn.state.hosts.get(event.host)
    job = turn.state.workloads.get(host.workload) if host is not None else None
    if host is None or job is None or event.workload not in ("", job.workload):
        return False
    event = replace(event, workload=job.workload)
    known = turn.state.diagnoses.get(host.id)
    if not job.is_of_run(event.run) or event.attempt < turn.view.attempt(job.workload):
        return False
    if known is not None and known.event.run == event.run and event.attempt < known.event.attempt:
        return False
    found = event.evidence[0]
    turn.put("diagnoses", host.id, Diagnosed(event=event, at=turn.now - found.age_s))
    turn.notes.append(
        f"attempt {event.attempt} of {job.workload} diagnosed by {host.id} as {found.cause}, advice "
        f"{found.advice}: {found.text}"
    )
    return True


def name_culprits(turn: Turn, event: Event) -> Event:
    """A hang with the ranks that launchers accuse of it, where they have since its last step.

    A sensor sees only that no rank advances, or which has finished fewer steps.
    """
    mark = turn.state.progress.get(event.workload)
    accusing = [
        row.event
        for row in turn.state.diagnoses.values()
        if row.event.workload == event.workload
        and row.event.attempt == event.attempt
        and row.event.evidence[0].cause == Cause.HANG.value
        and row.event.ranks
        and (mark is None or row.at > mark.at)
    ]
    if not accusing:
        return event
    hosts = {each.host for each in accusing}
    first = event.evidence[0]
    # In the sensor's own evidence, which it withdraws when the hang ends.
    text = cut_text("; ".join([*(each.evidence[0].text for each in accusing[:4]), first.text]))
    return replace(
        event,
        host=hosts.pop() if len(hosts) == 1 else "",
        ranks=tuple(sorted({rank for each in accusing for rank in each.ranks})),
        evidence=(replace(first, text=text), *event.evidence[1:]),
    )


def gravest_diagnosis(state: State, workload: str) -> Diagnosed | None:
    """Of the newest attempt of which one is known, the first that is no echo."""
    rows = [row for row in state.diagnoses.values() if row.event.workload == workload]
    newest = max((row.event.attempt for row in rows), default=0)
    return min(
        (row for row in rows if row.event.attempt == newest),
        key=lambda row: (Cause(row.event.evidence[0].cause) in ECHOES, row.at),
        default=None,
    )


def diagnosed_hosts(state: State, workload: str) -> Iterable[str]:
    """Hosts whose diagnoses are about the job, also those that it has left since."""
    return [host for host, row in state.diagnoses.items() if row.event.workload == workload]
