# SPDX-License-Identifier: Apache-2.0
"""What may not be done now, whoever asks for it: each guard is one function, and all of them are in `GUARDS`.

Guards stand between every trigger and its command, also those that a user's own policy calls.  A refusal with
`until` means "not yet": the rung stays the right one, and the incident waits.  One without means "not this":
the policy goes on to the next rung.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from supervisor.decision.state import Account, Fleet, State
from supervisor.policy.budget import backoff_s
from supervisor.policy.caps import refuse_cordon, refuse_growth
from supervisor.policy.pace import advancing_s
from supervisor.policy.spares import REMEMBERED_S, JobShape, choose_spare
from supervisor.policy.thresholds import Thresholds
from supervisor.values import CommandKind, DeviceState, EventType, HostInfo, LauncherState, WorkloadInfo


@dataclass(frozen=True, kw_only=True)
class Intent:
    """What a trigger wants to do.

    Attributes:
        over_budget: the last rung, which no budget limits and the verdict ends.
        repeated: an action for the same hosts came before it in this incident.
    """

    kind: CommandKind
    workload: WorkloadInfo | None
    host: HostInfo | None = None
    spare: HostInfo | None = None
    replicas: int | None = None
    over_budget: bool = False
    repeated: bool = False


@dataclass(frozen=True, kw_only=True)
class Refusal:
    text: str
    until: float | None = None


@dataclass(frozen=True, kw_only=True)
class View:
    """What a guard looks at."""

    state: State
    now: float
    limits: Thresholds

    @property
    def fleet(self) -> Fleet:
        return self.state.fleet.get("", Fleet())

    def account(self, workload: str) -> Account:
        return self.state.accounts.get(workload, Account())

    def best_step(self, workload: str) -> int:
        mark = self.state.progress.get(workload)
        return mark.best if mark else 0

    def attempt(self, workload: str) -> int:
        """The newest that has finished a step; -1 before the first."""
        mark = self.state.progress.get(workload)
        return mark.attempt if mark else -1

    def next_action_at(self, workload: str, *, repeated: bool) -> float:
        """When the pace of a job allows its next action; `repeated`: for the same hosts as the last one."""
        account, limits = self.account(workload), self.limits
        ready = account.bucket.ready_at(
            self.now, capacity=limits.actions_at_once, period_s=limits.action_period_s
        )
        if account.fruitless and repeated and self.best_step(workload) <= account.best:
            wait = backoff_s(account.fruitless, base_s=limits.backoff_s, limit_s=limits.backoff_limit_s)
            ready = max(ready, account.acted_at + wait)
        return ready

    def spares(self, among: Iterable[HostInfo] | None = None) -> list[HostInfo]:
        """Healthy free hosts that are neither cordoned, nor condemned, nor promised to a job already."""
        promised = {flight.command.spare for flight in self.state.commands.values()}
        return [
            host
            for host in (self.state.hosts.values() if among is None else among)
            if host.state is DeviceState.SPARE
            and not (host.workload or host.cordoned or host.id in promised or self.is_condemned(host.id))
            and (not self.limits.spare_check_s or self._was_checked(host.id))
        ]

    def find_spare(
        self, lost: HostInfo, workload: str, among: Iterable[HostInfo] | None = None
    ) -> tuple[HostInfo | None, str]:
        """The spare, of all or `among` some, to use instead of `lost`; None, and why none of them can be."""
        spares = self.spares(among)
        others = [
            host.place
            for host in (self.state.hosts.values() if spares else ())
            if host.workload == workload and host.id != lost.id
        ]
        places = [replace(host.place, losses=self.losses(host.name)) for host in spares]
        chosen = choose_spare(lost.place, others, places)
        if chosen is None:
            why = JobShape.of([lost.place, *others]).refuse_all(places)
            return None, f"no spare fits{why and f': {why}'}"
        return self.state.hosts[chosen.id], ""

    def is_usable(self, host: HostInfo) -> bool:
        """Whether a job can be on the host, as far as is known."""
        return host.state is not DeviceState.FAILED and not (host.cordoned or self.is_condemned(host.id))

    def has_hosts(self, workload: str) -> bool:
        """Whether a job has as many usable hosts as it needs."""
        job, hosts = self.state.workloads.get(workload), self.state.hosts.values()
        usable = sum(host.workload == workload and self.is_usable(host) for host in hosts)
        return job is None or usable >= job.hosts

    def losses(self, name: str) -> int:
        """How often a host was lost within the time for which that is remembered."""
        known = self.state.losses.get(name)
        return sum(self.now - at < REMEMBERED_S for at in known.at) if known is not None else 0

    def _was_checked(self, host: str) -> bool:
        checked = self.state.checks.get(host)
        return checked is not None and bool(checked.health)

    def lost_at(self, workload: str) -> float:
        """When the newest confirmed loss of the job's incident was told: of a host, a launcher or ranks.

        Not of an attempt that a later one has followed: a sensor tells of it again after an absence.
        """
        incident, newest = self.state.incidents.get(workload), self.attempt(workload)
        ended = LauncherState.GAVE_UP
        losses = [
            each
            for each in (incident.reports if incident else ())
            if (each.ends_attempt and each.attempt >= newest)
            or (
                each.confirms_loss
                and not (each.is_of_ranks and each.attempt < newest)
                and (each.launcher is ended or not self.is_back(each.host))
            )
        ]
        reported = (self.state.seen.get(each.id) for each in losses)
        return max((seen.at for seen in reported if seen is not None), default=-math.inf)

    def is_back(self, host: str) -> bool:
        """Whether a host that was reported lost works again; to one that is cordoned no job comes back."""
        known = self.state.hosts.get(host)
        return known is not None and known.state is not DeviceState.FAILED and not known.cordoned

    def is_condemned(self, host: str) -> bool:
        verdict = self.state.verdicts.get(f"host:{host}")
        return verdict is not None and verdict.holds(self.now)


Guard = Callable[[View, Intent], Refusal | None]

#: How long to wait before looking again where only news can change the answer.
_LOOK_AGAIN_S = 5.0


def not_frozen(view: View, intent: Intent) -> Refusal | None:
    """Nothing is done while many hosts are silent at once, or while a person said so."""
    if view.fleet.silent or view.fleet.frozen_by:
        who = (
            f"by {view.fleet.frozen_by}" if view.fleet.frozen_by else "because many hosts are silent at once"
        )
        return Refusal(text=f"frozen {who}", until=view.now + _LOOK_AGAIN_S)
    return None


def one_action(view: View, intent: Intent) -> Refusal | None:
    """A job has one action under way at most."""
    if intent.workload is None or intent.kind in (CommandKind.CORDON_HOST, CommandKind.DUMP_STACKS):
        return None
    for flight in view.state.commands.values():
        other = flight.command
        if other.workload == intent.workload.workload and (
            other.kind.restarts or other.kind is CommandKind.SCALE_UP
        ):
            return Refusal(text=f"{other.kind.value} {other.id} is under way", until=view.now + _LOOK_AGAIN_S)
    return None


def no_verdict(view: View, intent: Intent) -> Refusal | None:
    """A job that cannot progress is left alone until it does, a person says so, or the verdict expires."""
    if intent.workload is None or intent.kind is CommandKind.CORDON_HOST:
        return None
    verdict = view.state.verdicts.get(f"job:{intent.workload.workload}")
    if verdict is not None and verdict.holds(view.now):
        later = view.now + view.limits.verdict_s  # of one that time does not end
        return Refusal(
            text=verdict.text, until=verdict.expires_at if view.now < verdict.expires_at else later
        )
    return None


def not_advancing(view: View, intent: Intent) -> Refusal | None:
    """A job that finished a step within the time that its steps take is not restarted.

    The last steps before a confirmed loss, of a host or of ranks, are no advance: nothing is waited for.
    """
    if intent.workload is None or not intent.kind.restarts:
        return None
    name = intent.workload.workload
    mark = view.state.progress.get(name)
    if mark is None:
        return None
    within_s = advancing_s(view.limits.advancing_s, mark.usual_step_s)
    if view.now - mark.at < within_s and mark.at > view.lost_at(name):
        text = f"step {mark.step} was finished {view.now - mark.at:.1f} s ago"
        return Refusal(text=text, until=mark.at + within_s)
    return None


def launcher_first(view: View, intent: Intent) -> Refusal | None:
    """Ranks that their launcher restarts itself are left to it for a while: the job plane comes first.

    To replace a host, as its launcher advises, is more than that launcher can do.
    """
    incident = view.state.incidents.get(intent.workload.workload) if intent.workload else None
    if incident is None or not intent.kind.restarts:
        return None
    until = incident.reported_at + view.limits.launcher_grace_s  # each try of the launcher's has its time
    replaces = intent.spare is not None or intent.kind is CommandKind.SCALE_DOWN
    if replaces and any(each.type is EventType.DIAGNOSIS for each in incident.reports):
        return None
    if incident.is_being_restarted and view.now < until:
        return Refusal(text="the launcher restarts these ranks itself", until=until)
    return None


def launcher_is_there(view: View, intent: Intent) -> Refusal | None:
    """A launcher that gave up has ended, and can restart no ranks in place: the job needs another one."""
    incident = view.state.incidents.get(intent.workload.workload) if intent.workload else None
    if incident is None or intent.kind is not CommandKind.IN_JOB_RESET:
        return None
    return Refusal(text=f"the launcher of {incident.gave_up[0]} gave up") if incident.gave_up else None


def within_budget(view: View, intent: Intent) -> Refusal | None:
    """Restarts are spent from budgets that only training progress refills."""
    if intent.workload is None or intent.over_budget:
        return None
    name = intent.workload.workload
    account, best = view.account(name), view.best_step(name)
    if intent.kind is CommandKind.IN_JOB_RESET:
        budget, limit = account.in_job, intent.workload.max_in_job_restarts
    elif intent.kind in (CommandKind.WORKLOAD_RESET, CommandKind.WORKLOAD_RECREATION):
        budget, limit = account.workload, intent.workload.max_workload_restarts
    else:
        return None
    if not budget.at(best, view.limits.steps_per_restart).left(limit):
        return Refusal(text=f"the budget of {limit} for {intent.kind.value} is spent at step {best}")
    return None


def in_pace(view: View, intent: Intent) -> Refusal | None:
    """A token bucket for all actions of a job, and a growing wait after those that brought nothing."""
    if intent.workload is None or not intent.kind.restarts:
        return None
    ready = view.next_action_at(intent.workload.workload, repeated=intent.repeated)
    if ready > view.now:
        return Refusal(text=f"actions of this job wait for {ready - view.now:.0f} s more", until=ready)
    return None


def within_cordon_caps(view: View, intent: Intent) -> Refusal | None:
    """At most so many hosts are taken out of service per window and per failure domain."""
    if intent.kind is not CommandKind.CORDON_HOST or intent.host is None:
        return None
    why = refuse_cordon(
        (row for row in view.state.cordons.values() if not row.by),
        intent.host.blocks,
        view.now,
        window_s=view.limits.cordon_window_s,
        per_window=view.limits.max_cordons,
        per_domain=view.limits.max_cordons_per_domain,
    )
    return Refusal(text=why) if why else None


def above_spare_floor(view: View, intent: Intent) -> Refusal | None:
    """Jobs grow only into spares beyond the floor: the others are for hosts that fail."""
    if intent.kind is not CommandKind.SCALE_UP or intent.workload is None or intent.replicas is None:
        return None
    needed = (intent.replicas - intent.workload.replicas) * intent.workload.nodes_per_replica
    name = intent.workload.workload
    shape = JobShape.of([host.place for host in view.state.hosts.values() if host.workload == name])
    fit = [one for one in view.spares() if not shape.refuse(workers=one.workers_per_host, zone=one.zone)]
    why = refuse_growth(len(fit), needed=needed, floor=view.limits.spare_floor)
    return Refusal(text=why) if why else None


def within_size(view: View, intent: Intent) -> Refusal | None:
    """A job stays between its smallest and its largest number of replicas."""
    if intent.replicas is None or intent.workload is None:
        return None
    job = intent.workload
    if not job.scaling:
        return Refusal(text="scaling is off")
    if not job.min_replicas <= intent.replicas <= job.max_replicas:
        return Refusal(
            text=f"{intent.replicas} replicas are outside {job.min_replicas} to {job.max_replicas}"
        )
    return None


def quiet_long_enough(view: View, intent: Intent) -> Refusal | None:
    """A job grows only some time after its last incident: capacity that comes and goes is none."""
    if intent.kind is not CommandKind.SCALE_UP or intent.workload is None:
        return None
    quiet = view.account(intent.workload.workload).quiet_since + view.limits.scale_up_hold_s
    if view.now < quiet:
        return Refusal(text=f"its last incident ended less than {view.limits.scale_up_hold_s:g} s ago")
    return None


GUARDS: tuple[Guard, ...] = (
    not_frozen,
    no_verdict,
    one_action,
    launcher_first,
    launcher_is_there,
    within_size,
    within_budget,
    within_cordon_caps,
    above_spare_floor,
    quiet_long_enough,
    not_advancing,
    in_pace,
)
