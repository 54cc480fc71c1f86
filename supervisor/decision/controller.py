# SPDX-License-Identifier: Apache-2.0
"""`(state, input, now) -> (state, commands)`, and the class that users extend.

An input first changes what is known (`_take`).  A report of something wrong joins the open incident of its
job, or opens one; after a moment in which the echoes of one fault arrive, the incident is given to
`event_policy`, which calls triggers.  A trigger asks the guards, then makes a command, and the incident waits
for its outcome, then for a training step.  A step closes the incident; a time without one gives it to the
policy again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from supervisor.decision.guards import GUARDS, Guard, Intent, Refusal
from supervisor.decision.state import Account, Flight, Incident, Mark, Seen, State, Suspicion
from supervisor.decision.turn import Decision, EventReport, Turn
from supervisor.policy.caps import CordonMark
from supervisor.policy.ladder import Cause, Rung, rungs
from supervisor.policy.spares import Place, choose_spare
from supervisor.policy.thresholds import Thresholds
from supervisor.policy.verdict import Verdict
from supervisor.policy.xid import Remedy, worst
from supervisor.values import (
    Change,
    Command,
    CommandKind,
    DeviceState,
    Event,
    EventType,
    HostInfo,
    Outcome,
    OutcomeStatus,
    Progress,
    Request,
    Silence,
    WorkloadInfo,
)

#: What the controller decides upon; None is the passing of time.
Input = Event | HostInfo | WorkloadInfo | Progress | Silence | Outcome | None

#: Event ids that are remembered: far more than can be on their way at once.
_REMEMBERED_IDS = 4096

_GRAVITY = (Cause.CAPACITY, Cause.NO_PROGRESS, Cause.WORKER, Cause.HANG, Cause.HOST)


class BaseController:
    """The default policy.  Override `event_policy` for another; the guards hold for that one too.

    Args:
        shadow: decide and note, but give no command: each is taken as if it had been done.
        guards: asked before each command; for tests.
    """

    def __init__(
        self,
        thresholds: Thresholds | None = None,
        *,
        shadow: bool = False,
        guards: Sequence[Guard] = GUARDS,
    ) -> None:
        self.thresholds = thresholds or Thresholds()
        self.shadow = shadow
        self._guards = guards
        self._turn_or_none: Turn | None = None

    # -------------------------------------------------------------------------------- the public hook

    def event_policy(self, event_reports: Sequence[EventReport]) -> None:
        """Decide about one incident: call triggers until one returns True.

        Called again with the same reports where an action failed, or brought no step in time.  Override it to
        decide otherwise; call `super().event_policy(event_reports)` for the cases that you leave as they are.
        """
        report = self.gravest(event_reports)
        cause = self.cause_of(report)
        if cause is Cause.HOST:
            for each in event_reports:
                if self._is_unfit(each.event):
                    self.trigger_cordon_host(each)
        if cause is Cause.HANG:
            self._suspect_hang(report)
        for rung in rungs(cause, host_usable=self._is_usable(report)):
            if self._trigger(rung, report):
                return

    def trigger_in_job_reset(self, report: EventReport) -> bool:
        """Have the launchers restart the ranks in place.  True: done, or as soon as the guards allow."""
        return self._act(report, CommandKind.IN_JOB_RESET)

    def trigger_workload_reset(self, report: EventReport, *, last_resort: bool = False) -> bool:
        """Restart the whole job; as a last resort beyond its budget."""
        return self._act(report, CommandKind.WORKLOAD_RESET, over_budget=last_resort)

    def trigger_workload_recreation(self, report: EventReport) -> bool:
        """Delete the job's object and make it again, where a restart of it is not enough."""
        return self._act(report, CommandKind.WORKLOAD_RECREATION)

    def trigger_hot_swap(self, report: EventReport) -> bool:
        """Put a spare in the place of the report's host; the others keep their processes' memory."""
        if report.host is None or report.workload is None or report.host.workload != report.workload.workload:
            return False
        view = self._turn.view
        spares = {host.id: host for host in view.spares()}
        others = [
            Place(id=host.id, domains=host.domains)
            for host in view.state.hosts.values()
            if host.workload == report.workload.workload and host.id != report.host.id
        ]
        lost = Place(id=report.host.id, domains=report.host.domains)
        places = [Place(id=host.id, domains=host.domains) for host in spares.values()]
        chosen = choose_spare(lost, others, places)
        if chosen is None:
            self._note(report, "hot swap: no spare fits")
            return False
        return self._act(report, CommandKind.HOT_SWAP, spare=spares[chosen.id])

    def trigger_scale_down(self, report: EventReport) -> bool:
        """Go on with one data-parallel replica less, without the report's host."""
        if report.workload is None:
            return False
        return self._act(report, CommandKind.SCALE_DOWN, replicas=report.workload.replicas - 1)

    def trigger_scale_up(self, report: EventReport) -> bool:
        """Grow by one data-parallel replica at the next checkpoint."""
        if report.workload is None:
            return False
        return self._act(report, CommandKind.SCALE_UP, replicas=report.workload.replicas + 1)

    def trigger_cordon_host(self, report: EventReport) -> bool:
        """Keep all jobs off the report's host; a verdict with its evidence says why, until it expires."""
        turn, host = self._turn, report.host
        if host is None or host.cordoned or host.id in turn.state.cordons:
            return False
        asked = Intent(kind=CommandKind.CORDON_HOST, workload=report.workload, host=host)
        if self._refused(report, asked) is not None:
            return False
        evidence = tuple(found.id for found in report.event.evidence)
        self._condemn(f"host:{host.id}", report.event.type.value, evidence, turn.limits.verdict_s)
        turn.put("cordons", host.id, CordonMark(host=host.id, at=turn.now, domains=host.domains))
        self._send(CommandKind.CORDON_HOST, host=host.id, incident=report.incident.id, evidence=evidence)
        return True

    def observe(self, report: EventReport, seconds: float) -> bool:
        """Do nothing for a time: a step closes the incident, else the policy is asked again."""
        self._wait(report.incident.subject, self._turn.now + seconds, "observed")
        return True

    def gravest(self, event_reports: Sequence[EventReport]) -> EventReport:
        """The report that decides; of equals the first, because later ones tend to be its echoes."""
        handled = event_reports[0].incident.handled
        return max(
            event_reports,
            key=lambda report: (
                _GRAVITY.index(self.cause_of(report)),
                report.event.host not in handled,
                -event_reports.index(report),
            ),
        )

    def cause_of(self, report: EventReport) -> Cause:
        """What a report means, with what is known of its host."""
        event, view = report.event, self._turn.view
        known_bad = bool(event.host) and view.is_condemned(event.host)
        if event.type is EventType.SCALE_UP:
            return Cause.CAPACITY
        if event.type is EventType.HANG:
            again = view.state.verdicts.get(f"hang:{event.host}")
            repeated = again is not None and again.holds(view.now) and event.id not in again.evidence
            return Cause.HOST if event.host and (repeated or known_bad) else Cause.HANG
        if event.type is EventType.NO_PROGRESS:
            return Cause.NO_PROGRESS
        if event.type in (EventType.HOST_HB, EventType.ORCHESTRATOR):
            # A host that came back before the decision is no lost host, its ranks are lost ranks.
            back = report.host is not None and report.host.state is not DeviceState.FAILED
            return Cause.WORKER if back and not known_bad else Cause.HOST
        if event.type is EventType.WORKER_HB:
            return Cause.HOST if known_bad else Cause.WORKER
        return Cause.HOST

    # -------------------------------------------------------------------------------- the pure function

    def decide(self, state: State, given: Input, now: float, *, epoch: int) -> Decision:
        """Take one input at `now` of the log's clock.  Pure, if the policy has no side effects."""
        turn = self._turn_or_none = Turn(state, epoch, now, self.thresholds)
        try:
            self._take(given)
            for subject in sorted(turn.state.incidents):
                self._look_at(subject)
            return turn.decision()
        finally:
            self._turn_or_none = None

    def wake_at(self, state: State) -> float | None:
        """When time alone will change something."""
        waits = [incident.decide_at for incident in state.incidents.values() if not incident.command]
        return min(waits, default=None)

    def resume(self, state: State, *, epoch: int) -> tuple[Command, ...]:
        """Commands without an outcome, to be sent again: the same ids, so no second effect."""
        return tuple(replace(flight.command, epoch=epoch) for flight in state.commands.values())

    # -------------------------------------------------------------------------------- inputs

    @property
    def _turn(self) -> Turn:
        assert self._turn_or_none is not None, "triggers are called from event_policy"
        return self._turn_or_none

    def _take(self, given: Input) -> None:
        turn = self._turn
        if isinstance(given, Event):
            self._take_event(given)
        elif isinstance(given, HostInfo):
            known = turn.state.hosts.get(given.id)
            # The orchestrator and our own commands say what is cordoned; a daemon does not know.
            turn.put("hosts", given.id, replace(given, cordoned=known.cordoned if known else given.cordoned))
        elif isinstance(given, WorkloadInfo):
            turn.put("workloads", given.workload, given)
        elif isinstance(given, Progress):
            self._take_progress(given)
        elif isinstance(given, Silence):
            fleet = turn.view.fleet
            if fleet.silent != given.frozen:
                turn.put("fleet", "", replace(fleet, silent=given.frozen))
                text = "frozen" if given.frozen else "thawed"
                turn.notes.append(f"fleet {text}: {given.silent} of {given.hosts} hosts are silent")
        elif isinstance(given, Outcome):
            self._take_outcome(given)

    def _take_progress(self, progress: Progress) -> None:
        turn, name = self._turn, progress.workload
        mark = turn.state.progress.get(name)
        at = turn.now - progress.age_s
        if mark is None:
            turn.put(
                "progress",
                name,
                Mark(step=progress.step, attempt=progress.attempt, at=at, best=progress.step),
            )
        elif progress.attempt > mark.attempt or (
            progress.attempt == mark.attempt and progress.step > mark.step
        ):
            best = max(mark.best, progress.step)
            turn.put("progress", name, Mark(step=progress.step, attempt=progress.attempt, at=at, best=best))
            if best > mark.best:
                turn.put("verdicts", f"job:{name}", None)
            self._close_if_advancing(name)

    def _close_if_advancing(self, name: str) -> None:
        turn = self._turn
        incident, mark = turn.state.incidents.get(name), turn.state.progress[name]
        if incident is None or incident.command:
            return
        fine_after = incident.done_at if incident.done_at is not None else 0.0
        if incident.reports:
            fine_after = max(fine_after, incident.reported_at + turn.limits.advancing_s)
        if mark.at > fine_after:
            turn.put("incidents", name, None)
            turn.put("accounts", name, replace(turn.account(name), quiet_since=turn.now))
            turn.notes.append(f"incident {incident.id} closed: {name} finished step {mark.step}")

    def _take_event(self, event: Event) -> None:
        turn = self._turn
        if event.id in turn.state.seen:
            return
        turn.put("seen", event.id, Seen(at=turn.now))
        if len(turn.state.seen) > _REMEMBERED_IDS:
            turn.put("seen", next(iter(turn.state.seen)), None)
        host = turn.state.hosts.get(event.host)
        if event.type is EventType.OPERATOR:
            self._obey(event)
        elif event.type is EventType.DAEMON_LOST:
            turn.notes.append(
                f"daemon of {event.host} lost: {event.evidence[0].text}; training is not touched"
            )
        elif event.type is EventType.ORCHESTRATOR and event.change is not Change.GONE:
            if host is not None:
                self._take_change(host, event)
        elif event.type is EventType.XID and not worst(_codes(event)).needs_host:
            self._count_xid(event)
        elif event.type is EventType.SCALE_UP:
            self._offer(event)
        else:
            if host is not None and event.type in (EventType.HOST_HB, EventType.ORCHESTRATOR):
                turn.put("hosts", host.id, replace(host, state=DeviceState.FAILED))
            self._open(event)

    def _take_change(self, host: HostInfo, event: Event) -> None:
        turn = self._turn
        if event.change in (Change.CORDONED, Change.LEAVING):
            turn.put("hosts", host.id, replace(host, cordoned=True))
        elif event.change is Change.UNCORDONED:
            turn.put("hosts", host.id, replace(host, cordoned=False))
            self._forgive(host.id)

    def _open(self, event: Event) -> None:
        turn = self._turn
        mark = turn.state.progress.get(event.workload)
        if mark and event.type in (EventType.WORKER_HB, EventType.HANG) and event.attempt < mark.attempt:
            return  # of ranks that a restart has replaced since
        host = turn.state.hosts.get(event.host)
        # A host that was swapped out may still be reported under its old job, which is not concerned.
        left = host is not None and not host.workload
        subject = f"host:{event.host}" if left or not event.workload else event.workload
        soon = turn.now + turn.limits.coalesce_s
        incident = turn.state.incidents.get(subject)
        if incident is None:
            number = turn.next_id("incidents", "i")
            turn.put(
                "incidents",
                subject,
                Incident(
                    id=number,
                    subject=subject,
                    opened_at=turn.now,
                    reported_at=turn.now,
                    decide_at=soon,
                    reports=(event,),
                ),
            )
            turn.notes.append(f"incident {number} opened: {event.type.value} of {event.host or subject}")
            return
        # What waited for something else is looked at again with the news.
        turn.put(
            "incidents",
            subject,
            replace(
                incident,
                reports=(*incident.reports, event),
                reported_at=turn.now,
                decide_at=min(incident.decide_at, soon) if incident.reports else soon,
            ),
        )

    def _offer(self, event: Event) -> None:
        """Room to grow: taken at once or not at all, because the sensor will offer it again."""
        turn = self._turn
        if event.workload in turn.state.incidents or event.workload not in turn.state.workloads:
            return
        incident = Incident(
            id=turn.next_id("incidents", "i"),
            subject=event.workload,
            opened_at=turn.now,
            reported_at=turn.now,
            decide_at=turn.now,
            reports=(event,),
        )
        turn.put("incidents", event.workload, incident)
        self._ask_policy(event.workload)
        after = turn.state.incidents[event.workload]
        if not after.command:
            turn.put("incidents", event.workload, None)

    def _count_xid(self, event: Event) -> None:
        """An application's error is the launcher's business; the same GPU under several jobs is suspect."""
        turn = self._turn
        if worst(_codes(event)) is not Remedy.RESTART_APP:
            turn.notes.append(
                f"xid of {event.host} logged: {', '.join(str(code) for code, _ in _codes(event))}"
            )
            return
        key = f"{event.host}/{event.evidence[0].device}"
        known = turn.state.suspicions.get(key)
        if known is not None and turn.now - known.at >= turn.limits.suspicion_s:
            known = None
        ids = tuple(found.id for found in event.evidence)
        suspicion = Suspicion(
            count=(known.count if known else 0) + 1,
            workloads=tuple(sorted({*(known.workloads if known else ()), event.workload})),
            evidence=((known.evidence if known else ()) + ids)[-64:],
            at=known.at if known else turn.now,
        )
        turn.put("suspicions", key, suspicion)
        if suspicion.count >= turn.limits.suspicious_xids and len(suspicion.workloads) > 1:
            self._condemn(f"host:{event.host}", "repeated xid", suspicion.evidence, turn.limits.suspicion_s)

    def _obey(self, event: Event) -> None:
        """A person's request goes around the policy and its guards, and is logged with who asked."""
        turn, fleet = self._turn, self._turn.view.fleet
        who = event.evidence[0].text.replace(" ", "-")[:64] or "operator"
        turn.notes.append(f"{event.request.value if event.request else ''} {event.host} asked for by {who}")
        if event.request is Request.FREEZE:
            turn.put("fleet", "", replace(fleet, frozen_by=who))
        elif event.request is Request.THAW:
            turn.put("fleet", "", replace(fleet, frozen_by=""))
            for key in [key for key in turn.state.verdicts if key == f"job:{event.workload}"]:
                turn.put("verdicts", key, None)
                turn.put("accounts", event.workload, Account(quiet_since=turn.now))
        else:
            kinds = {
                Request.CORDON: CommandKind.CORDON_HOST,
                Request.UNCORDON: CommandKind.UNCORDON_HOST,
                Request.DRAIN: CommandKind.DRAIN_HOST,
            }
            assert event.request is not None
            self._send(kinds[event.request], host=event.host)

    # -------------------------------------------------------------------------------- outcomes

    def _take_outcome(self, outcome: Outcome) -> None:
        turn = self._turn
        flight = turn.state.commands.get(outcome.command)
        if flight is None or outcome.status is OutcomeStatus.FENCED:
            return
        turn.put("commands", outcome.command, None)
        command, status = flight.command, outcome.status
        turn.notes.append(f"{command.kind.value} {command.id} {status.value}: {outcome.text}")
        if status is OutcomeStatus.DONE:
            self._take_effect(command)
        elif status is OutcomeStatus.WITHDRAWN and command.kind.restarts:
            self._pay_back(command)
        elif command.kind is CommandKind.CORDON_HOST and status is OutcomeStatus.WITHDRAWN:
            turn.put("cordons", command.host, None)
            self._forgive(command.host)
        elif command.kind is CommandKind.HOT_SWAP and status is not OutcomeStatus.WITHDRAWN:
            # Another spare next time.
            self._condemn(f"host:{command.spare}", "swap failed", (command.id,), turn.limits.suspicion_s)
        incident = turn.state.incidents.get(command.workload)
        if incident is None or incident.command != command.id:
            return
        if command.kind is CommandKind.SCALE_UP:
            turn.put("incidents", command.workload, None)
            return
        if status in (OutcomeStatus.DONE, OutcomeStatus.WITHDRAWN):
            left = incident.reports
            if status is OutcomeStatus.DONE:
                # Ranks that were reported meanwhile were restarted with the others; hosts are still lost.
                left = tuple(
                    report
                    for report in left
                    if report.type is not EventType.WORKER_HB and report.host not in incident.handled
                )
            wait = turn.limits.coalesce_s if left else self._downtime(command.workload)
            incident = replace(
                incident, command="", reports=left, done_at=turn.now, decide_at=turn.now + wait
            )
        else:
            incident = replace(
                incident, command="", reports=incident.past + incident.reports, past=(), decide_at=turn.now
            )
        turn.put("incidents", command.workload, incident)

    def _take_effect(self, command: Command) -> None:
        turn = self._turn
        host, job = turn.state.hosts.get(command.host), turn.state.workloads.get(command.workload)
        if host is not None and command.kind in (CommandKind.CORDON_HOST, CommandKind.DRAIN_HOST):
            turn.put("hosts", host.id, replace(host, cordoned=True))
        elif host is not None and command.kind is CommandKind.UNCORDON_HOST:
            turn.put("hosts", host.id, replace(host, cordoned=False))
            self._forgive(host.id)
        elif host is not None and command.kind in (CommandKind.HOT_SWAP, CommandKind.SCALE_DOWN):
            turn.put("hosts", host.id, replace(host, workload=""))
        if command.kind is CommandKind.HOT_SWAP and command.spare in turn.state.hosts:
            spare = turn.state.hosts[command.spare]
            turn.put("hosts", spare.id, replace(spare, workload=command.workload))
        if job is not None and command.replicas is not None:
            turn.put("workloads", job.workload, replace(job, replicas=command.replicas))

    # -------------------------------------------------------------------------------- incidents

    def _look_at(self, subject: str) -> None:
        turn = self._turn
        incident = turn.state.incidents.get(subject)
        if incident is None or incident.command or incident.decide_at > turn.now:
            return
        if not incident.reports:
            # The action was done, and no step came.
            turn.notes.append(f"incident {incident.id} goes on: no step since its last action")
            turn.put(
                "incidents",
                subject,
                replace(incident, reports=incident.past, past=(), stuck=incident.stuck + 1),
            )
        self._ask_policy(subject)
        if subject.startswith("host:"):
            turn.put("incidents", subject, None)  # no job waits for it

    def _ask_policy(self, subject: str) -> None:
        turn = self._turn
        incident = turn.state.incidents[subject]
        reports = [
            EventReport(
                event=event,
                incident=incident,
                workload=turn.state.workloads.get(subject),
                host=turn.state.hosts.get(event.host),
            )
            for event in incident.reports
        ]
        turn.settled = False
        try:
            self.event_policy(reports)
        except (
            Exception
        ) as error:  # a user's policy is foreign code, and its errors must not end the supervisor
            turn.notes.append(f"event_policy failed: {type(error).__name__}: {error}; the default decides")
            BaseController.event_policy(self, reports)
        if not turn.settled and subject in turn.state.incidents:
            self._wait(subject, turn.now + self._downtime(subject), "no rung is possible")
            incident = turn.state.incidents[subject]
            turn.put("incidents", subject, replace(incident, stuck=incident.stuck + 1))
            if incident.stuck >= turn.limits.max_fruitless:
                self._give_up(incident, "no action is possible")

    def _trigger(self, rung: Rung, report: EventReport) -> bool:
        if rung is Rung.LAST_RESORT:
            return self.trigger_workload_reset(report, last_resort=True)
        return {
            Rung.IN_JOB_RESET: self.trigger_in_job_reset,
            Rung.WORKLOAD_RESET: self.trigger_workload_reset,
            Rung.HOT_SWAP: self.trigger_hot_swap,
            Rung.SCALE_DOWN: self.trigger_scale_down,
            Rung.SCALE_UP: self.trigger_scale_up,
        }[rung](report)

    def _act(
        self,
        report: EventReport,
        kind: CommandKind,
        *,
        spare: HostInfo | None = None,
        replicas: int | None = None,
        over_budget: bool = False,
    ) -> bool:
        """Ask the guards, then make the command, and charge the job's account."""
        turn, job = self._turn, report.workload
        if job is None:
            return False
        incident = turn.state.incidents[report.incident.subject]
        asked = Intent(
            kind=kind,
            workload=job,
            host=report.host,
            spare=spare,
            replicas=replicas,
            over_budget=over_budget,
            repeated=bool(incident.actions) and report.event.host in incident.handled,
        )
        if kind.restarts and self._gives_up(job, incident):
            return True
        refusal = self._refused(report, asked)
        if refusal is not None:
            if refusal.until is not None:
                self._wait(incident.subject, refusal.until, refusal.text)
            return refusal.until is not None
        if report.event.type is EventType.HANG:
            self._send(CommandKind.DUMP_STACKS, workload=job.workload, incident=incident.id)
        self._spend(job.workload, kind)
        command = self._send(
            kind,
            workload=job.workload,
            host=report.event.host if kind in (CommandKind.HOT_SWAP, CommandKind.SCALE_DOWN) else "",
            spare=spare.id if spare else "",
            replicas=replicas,
            incident=incident.id,
            evidence=incident.evidence,
            deadline_s=job.termination_threshold_s or turn.limits.container_termination_threshold_s,
        )
        # An action for one host leaves the reports of others; one for the job is for all of them.
        alone = kind in (CommandKind.HOT_SWAP, CommandKind.SCALE_DOWN)
        acted = [each for each in incident.reports if not alone or not self._is_of_other(each, report)]
        left = [each for each in incident.reports if each not in acted]
        turn.settled = True
        turn.put(
            "incidents",
            incident.subject,
            replace(
                incident,
                reports=tuple(left),
                past=tuple(acted),
                command="" if self.shadow else command,
                done_at=turn.now if self.shadow else None,
                decide_at=turn.now + self._downtime(job.workload),
                handled=tuple(dict.fromkeys((*incident.handled, *(each.host for each in acted)))),
                actions=incident.actions + 1,
                note="",
            ),
        )
        return True

    def _is_of_other(self, event: Event, report: EventReport) -> bool:
        """A second host that is lost as well; ranks that fail with the first one are its echoes."""
        if event.host == report.event.host:
            return False
        other = EventReport(
            event=event,
            incident=report.incident,
            workload=report.workload,
            host=self._turn.state.hosts.get(event.host),
        )
        return self.cause_of(other) is Cause.HOST

    def _send(
        self,
        kind: CommandKind,
        *,
        workload: str = "",
        host: str = "",
        spare: str = "",
        replicas: int | None = None,
        incident: str = "",
        evidence: tuple[str, ...] = (),
        deadline_s: float | None = None,
    ) -> str:
        turn = self._turn
        command = Command(
            epoch=turn.epoch,
            id=turn.next_id("commands", "c"),
            kind=kind,
            workload=workload,
            host=host,
            spare=spare,
            replicas=replicas,
            incident=incident,
            evidence=evidence,
            deadline_s=deadline_s or turn.limits.container_termination_threshold_s,
        )
        target = " ".join(part for part in (workload, host, spare and f"by {spare}") if part)
        if self.shadow:
            turn.notes.append(f"shadow: {kind.value} of {target} would be done for {incident or 'a person'}")
            return command.id
        turn.notes.append(f"{kind.value} {command.id} of {target} for {incident or 'a person'}")
        turn.put("commands", command.id, Flight(command=command, at=turn.now))
        turn.commands.append(command)
        return command.id

    def _refused(self, report: EventReport, asked: Intent) -> Refusal | None:
        view = self._turn.view
        for guard in self._guards:
            refusal = guard(view, asked)
            if refusal is not None:
                self._note(report, f"{asked.kind.value} refused by {guard.__name__}: {refusal.text}")
                return refusal
        return None

    def _spend(self, name: str, kind: CommandKind) -> None:
        turn = self._turn
        if not kind.restarts:
            return
        account, best = turn.account(name), turn.view.best_step(name)
        per = turn.limits.steps_per_restart
        in_job, workload = account.in_job.at(best, per), account.workload.at(best, per)
        turn.put(
            "accounts",
            name,
            replace(
                account,
                in_job=in_job.spend() if kind is CommandKind.IN_JOB_RESET else in_job,
                workload=workload.spend()
                if kind in (CommandKind.WORKLOAD_RESET, CommandKind.WORKLOAD_RECREATION)
                else workload,
                bucket=account.bucket.take(turn.now, period_s=turn.limits.action_period_s),
                fruitless=1 if best > account.best or not account.fruitless else account.fruitless + 1,
                best=best,
                acted_at=turn.now,
            ),
        )

    def _pay_back(self, command: Command) -> None:
        """Nothing was restarted: the budget gets it back; `fruitless` does not, or this might never end."""
        turn = self._turn
        account = turn.account(command.workload)
        name = "in_job" if command.kind is CommandKind.IN_JOB_RESET else "workload"
        budget = getattr(account, name)
        resets = (CommandKind.IN_JOB_RESET, CommandKind.WORKLOAD_RESET, CommandKind.WORKLOAD_RECREATION)
        if command.kind in resets and budget.spent:
            paid = replace(budget, spent=budget.spent - 1)
            in_job, workload = (paid, account.workload) if name == "in_job" else (account.in_job, paid)
            turn.put("accounts", command.workload, replace(account, in_job=in_job, workload=workload))

    # -------------------------------------------------------------------------------- verdicts

    def _gives_up(self, job: WorkloadInfo, incident: Incident) -> bool:
        """True, with the verdict, where more actions in a row than all budgets allow brought no step."""
        turn = self._turn
        account = turn.account(job.workload)
        most = job.max_in_job_restarts + job.max_workload_restarts + turn.limits.max_fruitless
        if account.fruitless < most or turn.view.best_step(job.workload) > account.best:
            return False
        self._give_up(incident, f"{account.fruitless} actions in a row brought no step")
        return True

    def _give_up(self, incident: Incident, why: str) -> None:
        turn, name = self._turn, incident.subject
        known = turn.state.verdicts.get(f"job:{name}")
        if known is None or not known.holds(turn.now):
            text = f"the job cannot progress: {why}"
            self._condemn(f"job:{name}", "cannot progress", incident.evidence, turn.limits.verdict_s, text)
            # Once it is forgotten, the job gets as many tries as before.
            turn.put("accounts", name, replace(turn.account(name), fruitless=0))
        self._wait(name, turn.now + turn.limits.verdict_s, why)

    def _condemn(
        self, key: str, cause: str, evidence: tuple[str, ...], seconds: float, text: str = ""
    ) -> None:
        turn = self._turn
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

    def _forgive(self, host: str) -> None:
        """Somebody has seen to the host."""
        for table, key in (("verdicts", f"host:{host}"), ("verdicts", f"hang:{host}"), ("cordons", host)):
            self._turn.put(table, key, None)

    def _suspect_hang(self, report: EventReport) -> None:
        event = report.event
        key = f"hang:{event.host}"
        known = self._turn.state.verdicts.get(key)
        if event.host and not (known is not None and known.holds(self._turn.now)):
            # The event's own id marks it: the same hang, asked about again, is no repetition.
            evidence = (event.id, *(found.id for found in event.evidence))
            self._condemn(key, "hang", evidence, self._turn.limits.suspicion_s)

    # -------------------------------------------------------------------------------- small parts

    def _is_unfit(self, event: Event) -> bool:
        """Hardware evidence that speaks against any job on the host."""
        if event.type is EventType.XID:
            return worst(_codes(event)).cordons
        return event.type in (EventType.ECC, EventType.NODE_CHECK)

    def _is_usable(self, report: EventReport) -> bool:
        host = report.host
        return host is not None and not (
            self._is_unfit(report.event)
            or host.state is DeviceState.FAILED
            or host.cordoned
            or self._turn.view.is_condemned(host.id)
        )

    def _downtime(self, name: str) -> float:
        job = self._turn.state.workloads.get(name)
        return (job.downtime_threshold_s if job else 0) or self._turn.limits.workload_downtime_threshold_s

    def _wait(self, subject: str, until: float, note: str) -> None:
        turn = self._turn
        turn.settled = True
        incident = turn.state.incidents[subject]
        turn.put("incidents", subject, replace(incident, decide_at=max(until, turn.now + 0.1), note=note))

    def _note(self, report: EventReport, text: str) -> None:
        self._turn.notes.append(f"incident {report.incident.id}: {text}")


def _codes(event: Event) -> list[tuple[int, str]]:
    return [(found.code, found.advice) for found in event.evidence if found.code is not None]
