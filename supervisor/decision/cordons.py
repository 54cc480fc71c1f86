# SPDX-License-Identifier: Apache-2.0
"""Cordons of the supervisor follow its verdicts: each has one owner, one end, and is tried until it is done.

A host with a verdict is cordoned, and uncordoned when the verdict has expired or a check has disproved it.  A
host that a person or the orchestrator has cordoned is theirs.
"""

from __future__ import annotations

from dataclasses import replace

from supervisor.decision.commands import CORDONS, ORCHESTRATOR, send_command
from supervisor.decision.state import Cordon, State
from supervisor.decision.turn import Turn
from supervisor.decision.verdicts import condemn, forgive
from supervisor.values import Change, CommandKind, DeviceState, Event, HostInfo


def is_under_way(state: State, host: str) -> bool:
    """Whether a command that closes or opens the host has no outcome yet."""
    commands = (flight.command for flight in state.commands.values())
    return any(each.host == host and each.kind in CORDONS for each in commands)


def is_ours(state: State, host: str) -> bool:
    """Whether the supervisor has cordoned the host, or is about to."""
    row = state.cordons.get(host)
    return row is not None and not row.by


def look_at_cordons(turn: Turn) -> None:
    """Send what brings hosts in line with the supervisor's verdicts, again where it came to nothing."""
    fleet = turn.view.fleet
    for row in () if fleet.silent or fleet.frozen_by else tuple(turn.state.cordons.values()):
        host, closes = turn.state.hosts.get(row.host), turn.view.is_condemned(row.host)
        closed = host is None or host.cordoned
        if not (row.by or closes or closed):
            forgive(turn, row.host)
            continue
        waits = turn.shadow or row.retry_at > turn.now or is_under_way(turn.state, row.host)
        lost = host is not None and host.state is DeviceState.FAILED and not closes
        if row.by or closes is closed or waits or lost:
            continue
        verdict = turn.state.verdicts.get(f"host:{row.host}")
        send_command(
            turn,
            CommandKind.CORDON_HOST if closes else CommandKind.UNCORDON_HOST,
            host=row.host,
            # Without any it would be a person's command.
            evidence=verdict.evidence if verdict is not None else (f"{row.host}/cordon",),
            why="because its verdict holds" if closes else "because no verdict on it holds",
        )


def see_cordon(turn: Turn, event: Event) -> None:
    """The orchestrator says that a host is closed, and by which command of the supervisor, if by one.

    A swap closes a host too, for as long as a suspicion, or not at all where the host is still in its job.
    """
    name, command = event.host, event.evidence[0].cause
    host, row = turn.state.hosts.get(name), turn.state.cordons.get(name)
    if host is not None:
        turn.put("hosts", name, replace(host, cordoned=True))
    # What was closed before without a row is somebody else's.
    known = host is not None and host.cordoned if row is None else bool(row.by or command)
    if event.change is Change.LEAVING or known:
        return
    by, blocks = ("" if command else ORCHESTRATOR), host.blocks if host is not None else ()
    # No cap counts a swap: lost hosts are replaced at any number.
    at = turn.now - turn.limits.cordon_window_s
    turn.put("cordons", name, Cordon(host=name, at=at, domains=blocks, by=by))
    swapped = command in turn.state.commands or host is None or not host.workload
    if not by and swapped and not turn.view.is_condemned(name):
        cause = CommandKind.HOT_SWAP.value
        condemn(turn, f"host:{name}", cause, (command,), turn.limits.suspicion_s, "its job was given a spare")


def move_cordon(turn: Turn, host: HostInfo) -> bool:
    """Take a cordon over to the new id of a machine that was started again, and its verdict for a short time.

    Returns whether the host is closed, also by a word of the orchestrator, which tells of its own again.
    """
    for earlier in [turn.state.hosts[one] for one in turn.state.names.get(host.name, ()) if one != host.id]:
        row, verdict = turn.state.cordons.get(earlier.id), turn.state.verdicts.get(f"host:{earlier.id}")
        if row is not None and row.by != ORCHESTRATOR:
            forgive(turn, earlier.id)
            turn.put("cordons", host.id, replace(row, host=host.id, tries=0, retry_at=0.0))
            if verdict is not None:
                found, seconds = verdict.evidence, turn.limits.suspicion_s
                condemn(turn, f"host:{host.id}", verdict.cause, found, seconds, verdict.text)
            return earlier.cordoned
    return host.id in turn.state.cordons
