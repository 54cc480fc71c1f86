# SPDX-License-Identifier: Apache-2.0
"""Jobs that lack a host: one that comes back, or a spare that comes late, is acted upon at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from supervisor.decision.state import Incident
from supervisor.decision.turn import Turn
from supervisor.decision.verdicts import CANNOT_PROGRESS, is_unfit
from supervisor.values import DeviceState, HostInfo


def wake_waiting(turn: Turn) -> None:
    """Decide now about incidents that lack a host, if the input of this turn has made one usable."""
    state, changes = turn.state, turn.changes.items()
    waiting = [one for one in state.incidents.values() if one.no_spare and not one.command]
    if not waiting:
        return
    changed = {key for (table, key), _ in changes if table in ("hosts", "checks")}
    changed |= {key.removeprefix("host:") for (table, key), row in changes if table == "verdicts" and not row}
    # A command that has ended may have held a spare.
    ended = any(table == "commands" and row is None for (table, _), row in changes)
    among = sorted(changed & state.hosts.keys())
    fresh = turn.view.spares(None if ended else [state.hosts[key] for key in among])
    for incident in waiting if changed or fresh else ():
        _wake(turn, incident, changed, fresh)


def _wake(turn: Turn, incident: Incident, changed: set[str], fresh: Sequence[HostInfo]) -> None:
    """Decide now if one of the hosts that the job lacks is back, or a spare fits in its place."""
    view, name, hosts = turn.view, incident.subject, turn.state.hosts
    events = incident.past + incident.reports
    has_all = not fresh or view.has_hosts(name)
    sizes = set[int]()  # of hosts for which no fresh spare is one
    for lacking in [hosts[one] for one in incident.no_spare if one in hosts]:
        found, mine = None, [each for each in events if each.host == lacking.id]
        if lacking.workload in ("", name) and view.is_usable(lacking):
            # Ranks that run need no action, and hardware that was at fault is no better for its return.
            idle = lacking.id in changed and lacking.state is not DeviceState.RUNNING
            if idle and not any(is_unfit(each) for each in mine):
                found = lacking
        elif not (has_all or lacking.workers_per_host in sizes or all(each.is_of_ranks for each in mine)):
            sizes.add(lacking.workers_per_host)
            found, _ = view.find_spare(lacking, name, fresh)
        if found is not None and _may_try(turn, name, found, most_losses=int(found is lacking)):
            turn.notes.append(f"incident {incident.id} goes on: {found.id} can be used")
            left = tuple(one for one in incident.no_spare if one != found.id)
            reports = sorted(events, key=lambda each: each.host != lacking.id)
            woken = replace(incident, reports=tuple(reports), past=(), no_spare=left)
            turn.put("incidents", name, replace(woken, decide_at=turn.now))
            return


def _may_try(turn: Turn, name: str, found: HostInfo, *, most_losses: int) -> bool:
    """True where no verdict on the job is in the way: a host that is not lost each time ends one."""
    verdict = turn.state.verdicts.get(f"job:{name}")
    cause = verdict.cause if verdict is not None and verdict.holds(turn.now) else ""
    if cause not in ("", CANNOT_PROGRESS) or turn.view.losses(found.name) > most_losses:
        return not cause
    turn.put("verdicts", f"job:{name}", None)
    turn.put("accounts", name, replace(turn.account(name), fruitless=0))
    return True
