# SPDX-License-Identifier: Apache-2.0
"""Hosts check themselves while no rank runs there: those that launchers blamed, and spares if that is asked.

A blamed host has been replaced first, so its job waits for no check.  What the check finds decides whether
the host may be used again.
"""

from __future__ import annotations

from collections.abc import Iterable

from resiliency.launch.health.causes import Cause
from resiliency.launch.health.scores import HostHealth
from supervisor.decision.commands import send_command
from supervisor.decision.membership import is_held
from supervisor.decision.state import Checked
from supervisor.decision.turn import Turn
from supervisor.decision.verdicts import condemn
from supervisor.policy.diagnosis import OF_GPU
from supervisor.values import CommandKind, DeviceState, Event, EventType, Evidence, HostInfo

#: At once: each holds one of the places that the actuator has for commands.
_AT_ONCE = 2
#: A check itself has 60 s; its host may still end the launcher that was there.
_CHECK_S = 300.0


def send_checks(turn: Turn, news: Iterable[HostInfo]) -> None:
    """Have hosts check themselves whose check is due: those that are blamed, and spares among the `news`."""
    state = turn.state
    under_way = [
        flight.command.host
        for flight in state.commands.values()
        if flight.command.kind is CommandKind.CHECK_HOST
    ]
    room = _AT_ONCE - len(under_way)
    if room <= 0:
        return
    blamed = (state.hosts.get(subject.removeprefix("host:")) for subject in state.verdicts)
    hosts = {host.id: host for host in blamed if host is not None}
    if turn.limits.spare_check_s:
        hosts.update((host.id, host) for host in news)
    due = [
        (host, evidence)
        for host in hosts.values()
        if host.id not in under_way and (evidence := _reason(turn, host)) is not None
    ]
    for host, evidence in due[:room]:
        known = state.checks.get(host.id)
        asked = Checked(at=turn.now, evidence=evidence, health=known.health if known else "")
        turn.put("checks", host.id, asked)
        send_command(turn, CommandKind.CHECK_HOST, host=host.id, deadline_s=_CHECK_S, why="because it is due")


def _reason(turn: Turn, host: HostInfo) -> tuple[str, ...] | None:
    """The evidence that a check of the host may disprove, empty for a spare; None where none is due."""
    if host.state is not DeviceState.SPARE or is_held(turn, host):
        return None
    checked = turn.state.checks.get(host.id)
    verdict = turn.state.verdicts.get(f"host:{host.id}")
    if verdict is not None and verdict.holds(turn.now):
        if verdict.cause != EventType.DIAGNOSIS.value:
            return None
        # One that was found well, and is blamed again soon after that, is not believed a second time; a check
        # that came to nothing is made again as late.
        again = checked is not None and (
            checked.evidence == verdict.evidence or turn.now - checked.at < turn.limits.suspicion_s
        )
        return None if again else verdict.evidence
    every_s = turn.limits.spare_check_s
    if not every_s or host.cordoned or (checked is not None and turn.now - checked.at < every_s):
        return None
    return ()


def take_check(turn: Turn, event: Event) -> bool:
    """What a host found out about itself; True where it is broken, and the policy has to know."""
    found = event.evidence[0]
    host = turn.state.hosts.get(event.host)
    if not found.cause or host is None:
        return not found.cause  # a watchdog's check, which tells of faults alone
    health = HostHealth(found.cause)
    known = turn.state.checks.get(host.id)
    checked = Checked(at=turn.now, evidence=known.evidence if known else (), health=health.value)
    turn.put("checks", host.id, checked)
    turn.notes.append(f"check of {host.id}: {health.value}{found.text and ', '}{found.text}")
    if health is HostHealth.FAULTY:
        ids = tuple(one.id for one in event.evidence)
        condemn(turn, f"host:{host.id}", event.type.value, ids, turn.limits.verdict_s, found.text)
        return True
    verdict = turn.state.verdicts.get(f"host:{host.id}")
    if verdict is None or verdict.cause != EventType.DIAGNOSIS.value:
        return False
    if why := _why_suspect(turn, host, health, found):
        turn.notes.append(f"{host.id} stays under suspicion: {why}")
        return False
    turn.notes.append(f"suspicion of {host.id} dropped: its check found nothing")
    turn.put("verdicts", f"host:{host.id}", None)  # the supervisor's own cordon ends with it
    return False


def _why_suspect(turn: Turn, host: HostInfo, health: HostHealth, found: Evidence) -> str:
    """Why a check does not disprove what a launcher has said; empty if it does."""
    if health is not HostHealth.OK:
        return f"its check says {health.value}"
    row = turn.state.diagnoses.get(host.id)
    tried = len(found.device.split(",")) if found.device else 0
    blamed = row is None or Cause(row.event.evidence[0].cause) in OF_GPU
    if blamed and tried < host.workers_per_host:
        return f"its check has tried {tried} GPUs of {host.workers_per_host}"
    return ""
