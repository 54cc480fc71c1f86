# SPDX-License-Identifier: Apache-2.0
"""The agent of one host: what happens between two starts of the workers, and what is said about it.

Upstream's agent decides when to restart.  This one adds how the decision is reached and carried
out: the kernel reports a death at once, workers and all that they started end within a bounded
time, and each incident is a row of events (fault_detected, workers_stopped, rendezvous_done,
workers_started) with one attempt number for the whole job.
"""

from __future__ import annotations

import logging
import os
import select
import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from resiliency.events import EventStream, EventType
from resiliency.launch import guardian
from resiliency.launch._compat import (
    FaultToleranceConfig,
    HookedAgent,
    HostRendezvous,
    TracedLogs,
    UnhealthyNodeException,
    WorkerSpec,
    hang_note,
    run_script_path,
)
from resiliency.launch.failures.evidence import read_error_file
from resiliency.launch.failures.handler import FailureHandler
from resiliency.launch.fleet.link import (
    HostCommand,
    HostCommandKind,
    WorkerReport,
    WorkerStateReporter,
)
from resiliency.launch.guardian import Process
from resiliency.launch.hangs.hosts import JobView
from resiliency.launch.hangs.slow_ranks import SlowRanks
from resiliency.launch.hangs.watch import HangWatch
from resiliency.launch.health.condition import JobCondition, LauncherState, Requeue
from resiliency.launch.health.diagnosis import Advice, Diagnosis
from resiliency.launch.incident import RankFault, cause_of
from resiliency.launch.options import LaunchOptions
from resiliency.launch.protection import Protection
from resiliency.launch.reaction import waits_natively
from resiliency.launch.standby import Standby
from resiliency.launch.watch import SignalBox, WorkerWatch
from resiliency.proc_stat import has_ended
from resiliency.runtime import StopNote, awake_s, name_ranks

logger = logging.getLogger(__name__)

#: How long the kernel may take to end a process after SIGKILL (uninterruptible I/O).
KILL_WAIT_S = 10.0
#: How often workers that are to end are looked at: two looks have to agree that they cannot.
REACTION_S = 0.5
#: Longest wait for ranks that are about to end, where no culprit is known, and pause between two looks.
LAST_WORDS_S, LAST_WORDS_LOOK_S = 2.0, 0.05
#: How often a pause before an attempt asks whether hosts came or left.
PAUSE_LOOK_S = 1.0
#: Upstream sleeps this long before each look at the workers; the real wait is `wait_for_change`.
UPSTREAM_SLEEP_S = 1e-6


class ResilientAgent(HookedAgent):
    """Runs the workers of one host until they succeed, fail for good, or a signal comes."""

    def __init__(
        self,
        options: LaunchOptions,
        *,
        rendezvous: HostRendezvous,
        serves_store: bool,
        config: FaultToleranceConfig,
        logs: TracedLogs,
        events: EventStream,
        reporter: WorkerStateReporter,
        failures: FailureHandler,
        protection: Protection,
        standby: Standby,
        signals: SignalBox,
        hangs: HangWatch,
        slow_ranks: SlowRanks,
    ) -> None:
        in_process = options.args.run_path
        spec = WorkerSpec(
            role=options.args.role,
            local_world_size=options.workers,
            entrypoint=run_script_path if in_process else options.command[0],
            args=options.command if in_process else options.command[1:],
            rdzv_handler=rendezvous,
            max_restarts=options.max_restarts,
            monitor_interval=UPSTREAM_SLEEP_S,
            local_addr=options.rendezvous.local_addr,
        )
        super().__init__(
            spec=spec,
            fault_tol_cfg=config,
            logs_specs=logs,
            start_method=options.args.start_method,
            log_line_prefix_template=os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
            term_timeout=options.term_timeout.total_seconds(),
            workers_stop_timeout=options.stop_timeout.total_seconds(),
            restart_policy=options.args.ft_restart_policy,
            is_store_host=serves_store,
        )
        self._options = options
        self._rendezvous_handler = rendezvous
        self._logs = logs
        self._events = events
        self._reporter = reporter
        self._failures = failures
        self._protection = protection
        self._standby = standby
        self._signals = signals
        self._hangs = hangs
        self._slow_ranks = slow_ranks
        self._watch: WorkerWatch | None = None
        self._seen_pids: set[int] = set()
        self._stops: list[StopNote] = []
        #: What failed on this host in the current attempt.
        self.faults: list[RankFault] = []
        #: Whether the supervisor has another host for the job in the place of this one.
        self.leaving = False
        rendezvous.on_change, rendezvous.on_pause = self._others_changed, self._pause
        rendezvous.on_wait = standby.prepare
        rendezvous.restarts_used, rendezvous.pause_s = lambda: self.restarts_used, lambda: failures.pause_s

    @property
    def attempt(self) -> int:
        return self._rendezvous_handler.attempt

    def interruptible_join(self) -> AbstractContextManager[None]:
        return self._signals.interruptible()

    def _pause(self, seconds: float, is_outdated: Callable[[], bool]) -> None:
        """Wait before the attempt that the hosts have met for; signals raise (`interruptible_join`)."""
        self._say(LauncherState.RESTARTING, why=f"{seconds:g} s of pause before attempt {self.attempt}")
        logger.warning(
            "job waits %g s before attempt %d: those before it ended within a minute, without a new step",
            *(seconds, self.attempt),
        )
        command = wait_for_command(seconds, self._reporter, self._standby.look, is_outdated)
        if command is not None and command.kind is HostCommandKind.LEAVE:
            self._obey(command)
        elif command is not None:
            self._reporter.finish_command(command, done=True, text=f"attempt {self.attempt} starts at once")

    def joined(self) -> None:
        self.faults = []
        StopNote.take_all(self._protection.private_dir)  # of an attempt before
        self._stops.clear()
        self._failures.begin_attempt()
        rendezvous = self._rendezvous_handler
        self._logs.attempt, self._logs.variables = self.attempt, self._failures.variables(rendezvous.run)
        self._reporter.begin_attempt(self.attempt, run=rendezvous.run, first_attempt=rendezvous.first_attempt)
        self._standby.begin_attempt()
        self._events.info = replace(self._events.info, node_rank=self.node_rank)
        self._events.emit(EventType.RENDEZVOUS_DONE, attempt=self.attempt)

    def started(self) -> None:
        self._signals.reinstate()  # once more: --run-path starts no process of its own
        self._watch = WorkerWatch(self.pids.values())
        self._protection.workers(self.pids.values())
        ranks = self.ranks
        for local_rank, rank in ranks.items():
            self._report(rank, local_rank, WorkerReport.RUNNING)
        self._say(LauncherState.RUNNING)
        self._events.emit(
            EventType.WORKERS_STARTED,
            attempt=self.attempt,
            ranks=list(ranks.values()),
            hosts=self.host_count,
            restarts=self.restarts_used,
            forked=self._standby.forked,
        )
        logger.info(
            "attempt %d: started %d workers%s, %s, as processes %s",
            self.attempt,
            len(ranks),
            f" ({self._standby.forked} forked)" if self._standby.forked else "",
            name_ranks(ranks.values()),
            _brief(self.pids.values()),
        )
        self._standby.workers_started()
        pids = self.pids
        job = JobView(
            run=self._rendezvous_handler.run,
            attempt=self.attempt,
            node=self.node_rank,
            hosts=self.host_count,
        )
        workers = {local: (rank, pids[local]) for local, rank in ranks.items()}
        self._hangs.begin(job, workers)
        self._slow_ranks.begin(job, workers)

    def monitors_started(self, pids: Sequence[int]) -> None:
        self._protection.helpers(pids)

    def wait_for_change(self) -> None:
        if self._watch is not None:  # upstream looks once more after it stopped the workers
            self._watch.wait(
                self._options.monitor_interval.total_seconds(), self._signals.wake_fd, self._reporter.wake_fd
            )
            self._signals.check()
            self._standby.look()
            if (command := self._reporter.try_take_command()) is not None:
                self._obey(command)

    def _obey(self, command: HostCommand) -> None:
        reason = command.reason or "no reason"
        if command.kind is HostCommandKind.LEAVE:
            self.leaving = True
            self._say(LauncherState.STOPPING, Requeue.YES, f"this host leaves the job: {reason}")
            self._reporter.finish_command(command, done=True, text="this host leaves the job")
            raise UnhealthyNodeException(f"the supervisor asked for it: {reason}")
        if command.attempt is not None and command.attempt < self.attempt:
            self._reporter.finish_command(command, done=True, text=f"attempt {self.attempt} runs already")
        elif not self._rendezvous_handler.try_restart():
            self._reporter.finish_command(
                command, done=False, text="--ft-restart-policy min-healthy restarts by its own rule only"
            )
        else:
            cause = f"the supervisor asked for a restart: {reason}"
            self._events.emit(EventType.FAULT_DETECTED, attempt=self.attempt, cause=cause)
            logger.warning("attempt %d ends: %s", self.attempt, cause)
            self._reporter.finish_command(command, done=True, text=f"attempt {self.attempt} ends")

    def failed(self, failures: Sequence[Any]) -> None:
        if self._watch is None:
            return  # these ended because we stopped them
        if self._add_failures(failures) and self._signals.first is None:
            self._wait_for_culprit(self._watch)
            found = self._diagnose(self._rendezvous_handler.known_losses())
            if found.advice is Advice.STOP:
                self.use_no_more_restarts()
                self._say(LauncherState.GAVE_UP, Requeue.NO, found.sentence)
            elif self.restarts_used >= self._options.max_restarts:
                self._say(LauncherState.GAVE_UP, Requeue.LATER, f"no restart is left: {found.sentence}")

    def _add_failures(self, failures: Sequence[Any], *, ended: bool = True) -> bool:
        """Record those that are new; returns False where there are none."""
        new = [failure for failure in failures if failure.pid not in self._seen_pids]
        if new:
            self._logs.show_output()  # what a rank has printed comes before what is said of it
        for failure in new:
            self._seen_pids.add(failure.pid)
            self._record(self._fault(failure, ended=ended))
        return bool(new)

    def _wait_for_culprit(self, watch: WorkerWatch) -> None:
        """Let ranks that are about to end say why, where the failures so far may be echoes or say nothing.

        A rank that has met an error closes its connections first, and may end seconds after the peers that
        it takes with it.  Ranks that wait in native code, in a collective, are not about to end.  A signal or
        a command ends the wait.
        """
        deadline = awake_s() + LAST_WORDS_S
        waited: set[int] = set()
        while not self._failures.are_explained() and awake_s() < deadline:
            running = {pid for pid in self.pids.values() if not has_ended(pid)}
            self._add_failures(self.failures_so_far())
            to_come = [one for one in self.failures_to_come() if read_error_file(one.error_file_data)]
            self._add_failures(to_come, ended=False)
            running -= self._seen_pids
            waits = {pid for pid in running if waits_natively(pid)}
            if running <= waits & waited:  # twice: the news of a lost peer may be on its way
                return
            waited = waits
            if watch.wait(LAST_WORDS_LOOK_S, self._signals.wake_fd, self._reporter.wake_fd):
                return

    def _diagnose(self, lost_hosts: Sequence[str]) -> Diagnosis:
        run = self._rendezvous_handler.run
        return self._failures.diagnose(run=run, attempt=self.attempt, lost_hosts=lost_hosts)

    def find_stop(self) -> Diagnosis | None:
        """The diagnosis that ended the job although restarts may have been left; None: none did."""
        return self._failures.find_stop(self._rendezvous_handler.run)

    def were_asked_to_end(self) -> bool:
        return self._watch is not None and bool(self.stops)

    def finished(self) -> None:
        if self._watch is None:
            return  # these ended because we stopped them
        for local_rank, rank in self.ranks.items():
            self._report(rank, local_rank, WorkerReport.COMPLETE)
        self._say(LauncherState.STOPPING, Requeue.NO, "all workers of this host succeeded")
        logger.info("attempt %d: all workers of this host succeeded%s", self.attempt, self.where_stopped())

    @property
    def stops(self) -> list[StopNote]:
        """What workers of this attempt that were told to end have said."""
        self._stops += StopNote.take_all(self._protection.private_dir)
        return self._stops

    def where_stopped(self) -> str:
        """For the last line about workers that were told to end: ``; step 110, at which ...``; else empty."""
        if not self.stops:
            return ""
        last = min(self.stops, key=lambda stop: stop.committed)  # one that is not, if there is any
        outcome = "is committed" if last.committed else "is not committed"
        return f"; step {last.step}, at which {last.cause} stopped them, {outcome}"

    def stop_processes(self, number: signal.Signals, grace_s: float) -> None:
        """Signal the workers, wait for `grace_s`, kill what is left and all that they started.

        A second signal to the launcher ends the wait.
        """
        running = self._watch is not None
        ends = self._signals.first is not None
        if ends:
            self._say(LauncherState.STOPPING, Requeue.YES, "the launcher was asked to end")
        else:
            self._say(LauncherState.RESTARTING)
        self._hangs.end()
        self._slow_ranks.end()
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if self.leaving:
            # They stand still, and would ask those of other hosts in vain for a step to stop at together.
            number, grace_s = signal.SIGKILL, KILL_WAIT_S
        stubborn = self._end_workers(number, grace_s)
        leftovers = self._protection.leftovers()
        at_once = self._signals.at_once
        guardian.end(leftovers, 0.0 if at_once else guardian.LEFTOVER_GRACE_S, self._signals.at_once_fd)
        guardian.wait_until_gone(leftovers, KILL_WAIT_S)
        self._logs.show_output()
        if running:
            self._events.emit(EventType.WORKERS_STOPPED, attempt=self.attempt, killed=stubborn)

    def _end_workers(self, number: signal.Signals, grace_s: float) -> int:
        """Returns how many had to be killed."""
        workers = [process for pid in self.pids.values() if (process := Process.of(pid)) is not None]
        if not workers:
            return 0
        logger.info("stopping %d workers with %s, at most %g s", len(workers), number.name, grace_s)
        for worker in workers:
            worker.send(number)
            worker.send(signal.SIGCONT)  # a stopped process cannot act on a signal
        why = self._wait_for_end(workers, number, grace_s)
        if not why:
            return 0
        stubborn = [worker for worker in workers if worker.alive]
        logger.warning("killing processes %s: %s", _brief(worker.pid for worker in stubborn), why)
        for worker in stubborn:
            worker.send(signal.SIGKILL)
        guardian.wait_until_gone(stubborn, KILL_WAIT_S)
        return len(stubborn)

    def _wait_for_end(self, workers: Sequence[Process], number: signal.Signals, grace_s: float) -> str:
        """Why those that are left have to be killed; "" when there are none."""
        deadline = awake_s() + grace_s
        stuck_before = False
        while not guardian.wait_until_gone(
            workers, min(REACTION_S, max(deadline - awake_s(), 0.0)), self._signals.at_once_fd
        ):
            if self._signals.at_once:
                return "a second signal came"
            if awake_s() >= deadline:
                return f"they outlived {number.name} by {grace_s:g} s"
            # When the launcher was asked to end, ranks may wait for each other on their way to a last save.
            stuck = self._signals.first is None and all(
                waits_natively(worker.pid) for worker in workers if worker.alive
            )
            if stuck and stuck_before:
                return f"they wait in native code, where {number.name} does not reach them"
            stuck_before = stuck
        return ""

    def _fault(self, failure: Any, *, ended: bool) -> RankFault:
        note = hang_note(self._protection.private_dir, failure.pid)
        hang = note.read_text() if note.exists() else None
        note.unlink(missing_ok=True)  # the process number may come again
        local_rank = failure.local_rank
        death = self._failures.add_death(
            local_rank,
            rank=self.ranks[local_rank],
            exit_code=failure.exitcode,
            error=failure.error_file_data,
            hang=hang,
            stderr_file=self._logs.stderr_files.get(local_rank),
        )
        return RankFault(
            rank=self.ranks[local_rank],
            local_rank=local_rank,
            host=self._options.info.host,
            pid=failure.pid,
            attempt=self.attempt,
            exit_code=failure.exitcode,
            cause=cause_of(death) if ended else f"{death.error}, with which it is about to end",
            time=datetime.now(timezone.utc),
            log_file=self._logs.files.get(local_rank),
        )

    def _record(self, fault: RankFault) -> None:
        self.faults.append(fault)
        self._events.emit(
            EventType.FAULT_DETECTED,
            rank=fault.rank,
            attempt=fault.attempt,
            time=fault.time,
            cause=fault.cause,
            exit_code=fault.exit_code,
            pid=fault.pid,
            log_file=fault.log_file,
        )
        # With the failure itself: until its diagnosis is made, the supervisor leaves the ranks to us.
        self._say(LauncherState.RESTARTING, why=f"rank {fault.rank} failed: {fault.cause}")
        self._report(fault.rank, fault.local_rank, WorkerReport.FAILED)
        logger.error(
            "rank %d failed: %s (%d of %d restarts used)",
            fault.rank,
            fault.cause,
            self.restarts_used,
            self._options.max_restarts,
        )

    def _others_changed(self, waiting: int, lost: list[str]) -> None:
        """Upstream restarts the workers right after this; it does not count as a failure here."""
        if waiting:
            cause = f"{waiting} hosts join or restart"
        else:
            cause = f"hosts left: {', '.join(lost)}"
            self._events.emit(EventType.FAULT_DETECTED, attempt=self.attempt, cause=cause)
            # One that has ended the job leaves, too, and has said why.
            if not self._rendezvous_handler.is_closed() and self.find_stop() is None:
                self._diagnose(lost)
        logger.warning("attempt %d ends: %s", self.attempt, cause)

    def _say(self, state: LauncherState, requeue: Requeue | None = None, why: str = "") -> None:
        self._reporter.job_is(JobCondition(state=state, requeue=requeue, why=why))

    def _report(self, rank: int, local_rank: int, state: WorkerReport) -> None:
        pid = self.pids.get(local_rank, 0)
        self._reporter.report(rank=rank, local_rank=local_rank, pid=pid, state=state)


def wait_for_command(
    seconds: float, reporter: WorkerStateReporter, look: Callable[[], None], is_over: Callable[[], bool]
) -> HostCommand | None:
    """Wait until time is up, or `is_over`, or the supervisor has a command, which is returned.

    Args:
        look: called each second; what goes on beside the wait.
    """
    deadline = awake_s() + seconds
    wakes = [reporter.wake_fd] if reporter.wake_fd >= 0 else []
    while (left := deadline - awake_s()) > 0 and not is_over():
        select.select(wakes, [], [], min(left, PAUSE_LOOK_S))
        look()
        if (command := reporter.try_take_command()) is not None:
            return command
    return None


def _brief(numbers: Any) -> str:
    """``0, 1, 2``; long lists by their ends."""
    texts = [str(number) for number in numbers]
    return ", ".join(texts if len(texts) <= 8 else [*texts[:3], "...", *texts[-2:]])
