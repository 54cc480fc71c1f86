# SPDX-License-Identifier: Apache-2.0
"""What is concluded about hosts, GPUs and jobs, until it expires or a person has seen to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from supervisor.decision.incidents import wait_until
from supervisor.decision.state import Incident, Suspicion
from supervisor.decision.turn import EventReport, Turn
from supervisor.policy.verdict import STOPPED, Verdict
from supervisor.policy.xid import Remedy, worst
from supervisor.values import CommandKind, Event, EventType, Evidence, WorkloadInfo

#: Cause of the verdict on a job whose actions brought no step.
CANNOT_PROGRESS = "cannot progress"


def count_xid(turn: Turn, event: Event) -> None:
    """An application's error is the launcher's business; the same GPU under several jobs is suspect."""
    for device in dict.fromkeys(found.device for found in event.evidence):
        xids = [found for found in event.evidence if found.device == device]
        if worst(codes(xids)) is Remedy.RESTART_APP:
            _suspect(turn, event, device, tuple(found.id for found in xids))
        else:
            text = ", ".join(str(code) for code, _ in codes(xids))
            turn.notes.append(f"xid of {event.host} logged: {text}")


def _suspect(turn: Turn, event: Event, device: str, ids: tuple[str, ...]) -> None:
    key = f"{event.host}/{device}"
    known = turn.state.suspicions.get(key)
    if known is not None and turn.now - known.at >= turn.limits.suspicion_s:
        known = None
    suspicion = Suspicion(
        count=(known.count if known else 0) + 1,
        workloads=tuple(sorted({*(known.workloads if known else ()), event.workload})),
        evidence=((known.evidence if known else ()) + ids)[-64:],
        at=known.at if known else turn.now,
    )
    turn.put("suspicions", key, suspicion)
    if suspicion.count >= turn.limits.suspicious_xids and len(suspicion.workloads) > 1:
        condemn(turn, f"host:{event.host}", "repeated xid", suspicion.evidence, turn.limits.suspicion_s)


def gives_up(turn: Turn, job: WorkloadInfo, incident: Incident) -> bool:
    """True, with the verdict, where more actions in a row than all budgets allow brought no step."""
    account = turn.account(job.workload)
    most = job.max_in_job_restarts + job.max_workload_restarts + turn.limits.max_fruitless
    if account.fruitless < most or turn.view.best_step(job.workload) > account.best:
        return False
    give_up(turn, incident, f"{account.fruitless} actions in a row brought no step")
    return True


def give_up(turn: Turn, incident: Incident, why: str) -> None:
    name = incident.subject
    known = turn.state.verdicts.get(f"job:{name}")
    if known is None or not known.holds(turn.now):
        text = f"the job cannot progress: {why}"
        condemn(turn, f"job:{name}", CANNOT_PROGRESS, incident.evidence, turn.limits.verdict_s, text)
        # Once it is forgotten, the job gets as many tries as before.
        turn.put("accounts", name, replace(turn.account(name), fruitless=0))
    wait_until(turn, name, turn.now + turn.limits.verdict_s, why)


def take_order_to_stop(turn: Turn, event: Event) -> None:
    """State at once that a job cannot progress, where its launcher has ended it as one that would fail again.

    It holds until a person lifts it, the job finishes a later step, or another start of it comes.
    """
    order, host = event.order_to_stop, turn.state.hosts.get(event.host)
    name = event.workload or (host.workload if host is not None else "")
    job = turn.state.workloads.get(name)
    if order is None or job is None or not job.is_of_run(event.run):
        return
    known = turn.state.verdicts.get(f"job:{name}")
    if event.attempt >= turn.view.attempt(name) and (known is None or known.cause != STOPPED):
        text = f"the job cannot progress: {order.text}"
        condemn(turn, f"job:{name}", STOPPED, (order.id,), turn.limits.verdict_s, text)


def lift_stop(turn: Turn, name: str) -> None:
    """Another start of the job has come, by its owner: it has its tries."""
    verdict = turn.state.verdicts.get(f"job:{name}")
    if verdict is not None and verdict.cause == STOPPED:
        turn.put("verdicts", f"job:{name}", None)
        turn.put("incidents", name, None)
        turn.notes.append(f"job {name} was started again: {verdict.text} is over")


def condemn(
    turn: Turn, key: str, cause: str, evidence: tuple[str, ...], seconds: float, text: str = ""
) -> None:
    """State a verdict on `key`, "host:ID", "hang:ID" or "job:NAME", for `seconds`."""
    verdict = Verdict(
        subject=key.partition(":")[2],
        cause=cause,
        evidence=evidence,
        at=turn.now,
        expires_at=turn.now + seconds,
        text=text,
    )
    turn.put("verdicts", key, verdict)
    turn.notes.append(f"verdict on {key}: {text or cause}, by {', '.join(evidence[:4])}")


def forget_expired(turn: Turn) -> None:
    """Hosts whose verdict has expired can be used again, and jobs may wait for them."""
    for key, verdict in list(turn.state.verdicts.items()):
        if key.startswith("host:") and not verdict.holds(turn.now):
            turn.put("verdicts", key, None)


def lift_guess(turn: Turn, host: str) -> None:
    """End a verdict that rests on a guess or on a swap, which was not done: such a one is to hold shortly."""
    verdict = turn.state.verdicts.get(f"host:{host}")
    if verdict is not None and verdict.cause in (EventType.DIAGNOSIS.value, CommandKind.HOT_SWAP.value):
        short = verdict.expires_at - verdict.at <= turn.limits.suspicion_s
        turn.put("verdicts", f"host:{host}", None if short else verdict)


def forgive(turn: Turn, host: str) -> None:
    """The host was seen to: nothing is held against it any more."""
    for table, key in (("verdicts", f"host:{host}"), ("verdicts", f"hang:{host}"), ("cordons", host)):
        turn.put(table, key, None)


def suspect_hang(turn: Turn, report: EventReport) -> None:
    """A second hang of the same host within the time of this verdict counts as a failed host."""
    event = report.event
    key = f"hang:{event.host}"
    known = turn.state.verdicts.get(key)
    if event.host and not (known is not None and known.holds(turn.now)):
        # The event's own id marks it: the same hang, asked about again, is no repetition.
        evidence = (event.id, *(found.id for found in event.evidence))
        condemn(turn, key, "hang", evidence, turn.limits.suspicion_s)


def is_unfit(event: Event) -> bool:
    """True for hardware evidence that speaks against any job on the host."""
    if event.type is EventType.XID:
        return worst(codes(event.evidence)).cordons
    return event.type in (EventType.ECC, EventType.NODE_CHECK) or event.asks_for_another_host


def codes(evidence: Iterable[Evidence]) -> list[tuple[int, str]]:
    """Each Xid, with the driver's advice."""
    return [(found.code, found.advice) for found in evidence if found.code is not None]
