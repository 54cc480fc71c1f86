# SPDX-License-Identifier: Apache-2.0
"""`(state, input, now) -> (state, commands)`, and the class that users extend.

An input first changes what is known (`_take`).  A report of something wrong joins the open incident of its
job, or opens one; after a moment in which the echoes of one fault arrive, the incident is given to
`event_policy`, which calls triggers.  A trigger asks the guards, then makes a command, and the incident waits
for its outcome, then for a training step.  A step closes the incident; a time without one gives it to the
policy again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from supervisor.decision.checks import send_checks, take_check
from supervisor.decision.commands import charge, obey, send_command, take_outcome
from supervisor.decision.cordons import is_ours, is_under_way, look_at_cordons
from supervisor.decision.diagnoses import name_culprits, take_diagnosis
from supervisor.decision.guards import GUARDS, Guard, Intent, Refusal, within_cordon_caps
from supervisor.decision.incidents import (
    downtime_s,
    leave_to_launchers,
    lost_hosts,
    note_absence,
    note_attempt,
    note_refusal,
    open_incident,
    take_progress,
    wait_until,
)
from supervisor.decision.membership import (
    forget_gone,
    forget_replaced,
    is_of_job,
    lose_host,
    take_change,
    take_host,
    take_workload,
)
from supervisor.decision.state import Cordon, Incident, Seen, State
from supervisor.decision.turn import Decision, EventReport, Turn
from supervisor.decision.verdicts import (
    codes,
    condemn,
    count_xid,
    forget_expired,
    give_up,
    gives_up,
    is_unfit,
    suspect_hang,
    take_order_to_stop,
)
from supervisor.decision.waiting import wake_waiting
from supervisor.policy.ladder import Cause, Rung, rungs
from supervisor.policy.thresholds import Thresholds
from supervisor.policy.xid import worst
from supervisor.values import (
    Change,
    Command,
    CommandKind,
    Event,
    EventType,
    HostInfo,
    Outcome,
    Progress,
    Silence,
    WorkloadInfo,
)

#: What the controller decides upon; None is the passing of time.
Input = Event | HostInfo | WorkloadInfo | Progress | Silence | Outcome | None

#: Event ids that are remembered: far more than can be on their way at once.
_REMEMBERED_IDS = 4096

#: Found by watchdogs and launchers, whose evidence has ids of its own.
_FINDINGS = (EventType.XID, EventType.ECC, EventType.NODE_CHECK, EventType.DIAGNOSIS)

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
                if is_unfit(each.event) and not each.event.is_guess:
                    self.trigger_cordon_host(each)
        if cause is Cause.HANG:
            suspect_hang(self._turn, report)
        for rung in rungs(cause, host_usable=self._is_usable(report), guess=self._is_guess(report.event)):
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
        """Put a spare in the place of the report's host; the others keep their processes' memory.

        All start again where launchers of others gave up, for which the spare's would wait without an end,
        and where a swap of the host failed through no fault of the spare: its Job may make pods too late.
        """
        if report.host is None or report.workload is None or not is_of_job(report):
            return False
        ended = set(report.incident.gave_up) - {report.host.id}
        if self._is_replaced(report):
            return not ended and self._expect_replacement(report)
        chosen, why = self._turn.view.find_spare(report.host, report.workload.workload)
        if chosen is None:
            note_refusal(self._turn, report, f"hot swap: {why}")
            if not self._is_guess(report.event):
                incident = self._turn.state.incidents[report.incident.subject]
                lacks = {report.host.id, *lost_hosts(self._turn, incident), *incident.no_spare}
                self._turn.put(
                    "incidents", incident.subject, replace(incident, no_spare=tuple(sorted(lacks)))
                )
            return False
        whole = ended or report.host.id in report.incident.not_swapped
        if self._is_guess(report.event) and (whole or self._why_kept(report.event)):
            return False  # the caps are reached, or a start of the whole job costs more than a guess is worth
        kind = CommandKind.WORKLOAD_RESET if whole else CommandKind.HOT_SWAP
        # No budget of restarts limits either: the host was at fault, and the job does without it.
        return self._act(report, kind, spare=chosen, over_budget=True)

    def trigger_scale_down(self, report: EventReport) -> bool:
        """Go on with one data-parallel replica less, without the report's host."""
        if report.workload is None or not is_of_job(report) or self._is_replaced(report):
            return False
        return self._act(report, CommandKind.SCALE_DOWN, replicas=report.workload.replicas - 1)

    def trigger_scale_up(self, report: EventReport) -> bool:
        """Grow by one data-parallel replica; ranks with `TerminationOptions` save the step they stop at."""
        if report.workload is None:
            return False
        return self._act(report, CommandKind.SCALE_UP, replicas=report.workload.replicas + 1)

    def trigger_cordon_host(self, report: EventReport) -> bool:
        """Keep all jobs off the report's host; a verdict with its evidence says why, until it expires."""
        turn, host = self._turn, report.host
        if host is None:
            return False
        if turn.view.is_condemned(host.id) if is_ours(turn.state, host.id) else host.cordoned:
            return False
        asked = Intent(kind=CommandKind.CORDON_HOST, workload=report.workload, host=host)
        if self._refused(report, asked) is not None:
            return False
        self._condemn(report, host)
        if not (host.cordoned or is_under_way(turn.state, host.id)):
            evidence = turn.state.verdicts[f"host:{host.id}"].evidence
            send_command(
                turn, CommandKind.CORDON_HOST, host=host.id, incident=report.incident.id, evidence=evidence
            )
        return True

    def _condemn(self, report: EventReport, host: HostInfo) -> None:
        """Take a host out of service by a verdict, which its cordon follows; on a guess, for a short time."""
        turn = self._turn
        seconds = turn.limits.suspicion_s if report.event.is_guess else turn.limits.verdict_s
        evidence = tuple(found.id for found in report.event.evidence)
        first = report.event.evidence[0]
        text = f"{first.cause}: {first.text}" if report.event.type is EventType.DIAGNOSIS else ""
        condemn(turn, f"host:{host.id}", report.event.type.value, evidence, seconds, text)
        if not host.cordoned or is_ours(turn.state, host.id):
            turn.put("cordons", host.id, Cordon(host=host.id, at=turn.now, domains=host.blocks))

    def observe(self, report: EventReport, seconds: float) -> bool:
        """Do nothing for a time: a step closes the incident, else the policy is asked again."""
        wait_until(self._turn, report.incident.subject, self._turn.now + seconds, "observed")
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
            return Cause.WORKER if view.is_back(event.host) and not known_bad else Cause.HOST
        if event.type is EventType.WORKER_HB:
            return Cause.HOST if known_bad else Cause.WORKER
        if event.type is EventType.DIAGNOSIS:
            return Cause.WORKER if self._why_kept(event) else Cause.HOST
        return Cause.HOST

    # -------------------------------------------------------------------------------- the pure function

    def decide(
        self, state: State, given: Input, now: float, *, epoch: int, mine: set[str] | None = None
    ) -> Decision:
        """Take one input at `now` of the log's clock.  Pure, if the policy has no side effects.

        Args:
            mine: tables of `state` that this caller alone holds, which may be changed in place.
        """
        turn = self._turn_or_none = Turn(state, epoch, now, self.thresholds, shadow=self.shadow, mine=mine)
        try:
            note_absence(turn)
            self._take(given)
            if given is None:
                forget_expired(turn)
            if not isinstance(given, Progress):
                wake_waiting(turn)
            for subject in sorted(turn.state.incidents):
                self._look_at(subject)
            forget_replaced(turn)
            if not isinstance(given, Progress):
                look_at_cordons(turn)
                send_checks(turn, self._news(given))
            if given is None:
                forget_gone(turn)
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
            take_host(turn, given)
        elif isinstance(given, WorkloadInfo):
            take_workload(turn, given)
        elif isinstance(given, Progress):
            take_progress(turn, given)
        elif isinstance(given, Silence):
            fleet = turn.view.fleet
            if fleet.silent != given.frozen:
                turn.put("fleet", "", replace(fleet, silent=given.frozen))
                text = "frozen" if given.frozen else "thawed"
                turn.notes.append(f"fleet {text}: {given.silent} of {given.hosts} hosts are silent")
        elif isinstance(given, Outcome):
            take_outcome(turn, given)

    def _take_event(self, event: Event) -> None:
        turn = self._turn
        if event.id in turn.state.seen:
            return
        if event.type in _FINDINGS:
            # Daemons repeat findings, and a sensor that was started again tells them under another event id.
            fresh = tuple(found for found in event.evidence if found.id not in turn.state.seen)
            if not fresh:
                return
            event = replace(event, evidence=fresh)
            for found in fresh:
                self._remember(found.id)
        self._remember(event.id)
        host = turn.state.hosts.get(event.host)
        take_order_to_stop(turn, event)
        if event.type is EventType.OPERATOR:
            obey(turn, event)
        elif event.type is EventType.DAEMON_LOST:
            turn.notes.append(
                f"daemon of {event.host} lost: {event.evidence[0].text}; training is not touched"
            )
        elif event.type is EventType.ORCHESTRATOR and event.change is not Change.GONE:
            take_change(turn, event)
        elif event.type is EventType.XID and not worst(codes(event.evidence)).needs_host:
            count_xid(turn, event)
        elif event.type is EventType.SCALE_UP:
            self._offer(event)
        elif event.type is EventType.ATTEMPT:
            note_attempt(turn, event)
        elif event.type is EventType.DIAGNOSIS:
            self._take_diagnosis(event)
        elif event.type is EventType.NODE_CHECK and not take_check(turn, event):
            pass  # the host has found nothing that the policy has to know
        else:
            if event.type is EventType.HANG:
                event = name_culprits(turn, event)
            if host is not None and event.type in (EventType.HOST_HB, EventType.ORCHESTRATOR):
                lose_host(turn, host)
            elif host is None and event.change is Change.GONE:
                turn.put("cordons", event.host, None)
            open_incident(turn, event)

    def _take_diagnosis(self, event: Event) -> None:
        """The launcher restarts its ranks itself; an incident follows where the host is to be replaced."""
        turn = self._turn
        if not take_diagnosis(turn, event) or not event.asks_for_another_host:
            return
        if turn.view.is_condemned(event.host):
            return  # that was decided upon, and ranks that fail there are the host's fault from now on
        host, why = turn.state.hosts[event.host], self._why_kept(event)
        if not why and self._is_guess(event):
            _, why = turn.view.find_spare(host, host.workload)
        if why:
            turn.notes.append(f"{event.host} is not replaced: {why}; its launcher restarts the ranks")
            return
        open_incident(turn, event)

    def _why_kept(self, event: Event) -> str:
        """Why a diagnosis replaces no host: it says nothing against it, or takes away more than may be.

        Where all hosts say that they have no GPU, an image or a driver is at fault, and no other host helps.
        """
        host = self._turn.state.hosts.get(event.host)
        if host is None or not event.asks_for_another_host:
            return "nothing is said against it"
        if host.cordoned or self._turn.view.is_condemned(host.id):
            return ""
        asked = Intent(kind=CommandKind.CORDON_HOST, workload=None, host=host)
        refusal = within_cordon_caps(self._turn.view, asked)
        return refusal.text if refusal is not None else ""

    def _is_guess(self, event: Event) -> bool:
        """Whether words alone speak against a host of a job, which an action has not left without a step."""
        host = self._turn.state.hosts.get(event.host)
        if not event.is_guess or host is None or not host.workload or self._turn.view.is_condemned(host.id):
            return False
        incident = self._turn.state.incidents.get(host.workload)
        return event.workload in ("", host.workload) and not (incident is not None and incident.stuck)

    def _remember(self, id: str) -> None:
        turn = self._turn
        turn.put("seen", id, Seen(at=turn.now))
        if len(turn.state.seen) > _REMEMBERED_IDS:
            turn.put("seen", next(iter(turn.state.seen)), None)

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

    # -------------------------------------------------------------------------------- incidents

    def _look_at(self, subject: str) -> None:
        turn = self._turn
        incident = turn.state.incidents.get(subject)
        if incident is None or incident.command or incident.decide_at > turn.now:
            return
        if leave_to_launchers(turn, incident):
            return
        if not incident.reports:
            # The action was done, and no step came.
            turn.notes.append(f"incident {incident.id} goes on: no step since its last action")
            turn.put(
                "incidents",
                subject,
                replace(incident, reports=incident.past, past=(), stuck=incident.stuck + 1),
            )
        if not self._has_reports(subject):
            return
        self._ask_policy(subject)
        if subject.startswith("host:"):
            turn.put("incidents", subject, None)  # no job waits for it

    def _news(self, given: Input) -> Iterable[HostInfo]:
        """Hosts of which something may have changed: all with time, which alone may take a look at each."""
        hosts = self._turn.state.hosts
        if isinstance(given, HostInfo):
            return [hosts[given.id]] if given.id in hosts else []
        return hosts.values() if given is None else []

    def _has_reports(self, subject: str) -> bool:
        """Whether anything is left to decide upon without diagnoses that the caps have overtaken."""
        turn = self._turn
        incident = turn.state.incidents[subject]
        left = tuple(
            each
            for each in incident.reports
            if each.type is not EventType.DIAGNOSIS or not self._why_kept(each)
        )
        if left == incident.reports:
            return True
        self._leave_hosts(incident, left, incident.past, "no more may be cordoned")
        return bool(left)

    def _leave_hosts(
        self, incident: Incident, left: tuple[Event, ...], past: tuple[Event, ...], why: str
    ) -> None:
        """Go on with what is left of an incident, and leave other hosts to their launchers."""
        turn, subject = self._turn, incident.subject
        turn.notes.append(f"incident {incident.id}: hosts are left to their launchers, {why}")
        turn.put("incidents", subject, replace(incident, reports=left, past=past) if left or past else None)
        if past and not left:
            wait_until(turn, subject, turn.now + downtime_s(turn, subject), "waits for a step")

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
        incident = turn.state.incidents.get(subject, incident)
        guesses = tuple(each for each in incident.reports if self._is_guess(each))
        if guesses and not turn.settled:
            left = tuple(each for each in incident.reports if each not in guesses)
            past = incident.past + (guesses if incident.actions else ())
            self._leave_hosts(incident, left, past, "no spare takes their place")
            if left:
                self._ask_policy(subject)
        elif not turn.settled and subject in turn.state.incidents:
            wait_until(turn, subject, turn.now + downtime_s(turn, subject), "no rung is possible")
            incident = turn.state.incidents[subject]
            turn.put("incidents", subject, replace(incident, stuck=incident.stuck + 1))
            if incident.stuck >= turn.limits.max_fruitless:
                give_up(turn, incident, "no action is possible")

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

    def _others_of_job(self, report: EventReport) -> list[HostInfo]:
        job = report.workload
        return [
            host
            for host in self._turn.state.hosts.values()
            if job is not None and host.workload == job.workload and host.id != report.event.host
        ]

    def _is_replaced(self, report: EventReport) -> bool:
        """Whether the job has all its hosts without the report's: a JobSet makes a pod again by itself."""
        job, view = report.workload, self._turn.view
        lost = lost_hosts(self._turn, report.incident)
        fit = [
            host
            for host in self._others_of_job(report)
            if not (host.cordoned or host.id in lost or view.is_condemned(host.id))
        ]
        return job is not None and len(fit) >= job.replicas * job.nodes_per_replica

    def _expect_replacement(self, report: EventReport) -> bool:
        """Leave a job that has all its hosts to their launchers, for as long as it may be without a step."""
        turn, incident = self._turn, report.incident
        until = incident.reported_at + downtime_s(turn, incident.subject)
        if turn.now >= until:
            return False
        return self.observe(report, until - turn.now)

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
            # What was tried while no spare fitted is not tried again by one.
            repeated=bool(incident.actions)
            and report.event.host in incident.handled
            and (spare is None or report.event.host not in incident.no_spare),
        )
        if kind.restarts and gives_up(turn, job, incident):
            return True
        refusal = self._refused(report, asked)
        if refusal is not None:
            if refusal.until is not None:
                wait_until(turn, incident.subject, refusal.until, refusal.text)
            return refusal.until is not None
        if report.event.type is EventType.HANG:
            send_command(turn, CommandKind.DUMP_STACKS, workload=job.workload, incident=incident.id)
        # An action for one host leaves the reports of others; one for the job is for all of them.
        alone = spare is not None or kind is CommandKind.SCALE_DOWN
        charge(turn, job.workload, kind)
        deadline_s = job.termination_threshold_s or turn.limits.container_termination_threshold_s
        if kind is CommandKind.HOT_SWAP:
            deadline_s = min(deadline_s, turn.limits.hot_swap_threshold_s)
        command = send_command(
            turn,
            kind,
            workload=job.workload,
            host=report.event.host if alone else "",
            spare=spare.id if spare else "",
            replicas=replicas,
            incident=incident.id,
            evidence=incident.evidence,
            deadline_s=deadline_s,
        )
        known_bad = turn.view.is_condemned(report.event.host) or self._why_kept(report.event)
        if spare is not None and report.host is not None and report.event.is_guess and not known_bad:
            self._condemn(report, report.host)
        acted = [each for each in incident.reports if not alone or not self._is_of_other(each, report)]
        left = [each for each in incident.reports if each not in acted]
        # What a job lacks is not forgotten where the action is for something else.
        lacks = tuple(one for one in incident.no_spare if not alone or one != report.event.host)
        kept = (each for each in incident.past if each.host in lacks and not each.is_of_ranks)
        turn.settled = True
        turn.put(
            "incidents",
            incident.subject,
            replace(
                incident,
                reports=tuple(left),
                past=(*kept, *acted),
                command="" if self.shadow else command,
                done_at=turn.now if self.shadow else None,
                decide_at=turn.now + downtime_s(turn, job.workload),
                attempt=max([turn.view.attempt(job.workload), *(each.attempt for each in acted)]),
                handled=tuple(dict.fromkeys((*incident.handled, *(each.host for each in acted)))),
                no_spare=lacks,
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

    def _refused(self, report: EventReport, asked: Intent) -> Refusal | None:
        view = self._turn.view
        for guard in self._guards:
            refusal = guard(view, asked)
            if refusal is not None:
                note_refusal(
                    self._turn, report, f"{asked.kind.value} refused by {guard.__name__}: {refusal.text}"
                )
                return refusal
        return None

    # -------------------------------------------------------------------------------- small parts

    def _is_usable(self, report: EventReport) -> bool:
        host = report.host
        return host is not None and self._turn.view.is_usable(host) and not is_unfit(report.event)
