# SPDX-License-Identifier: Apache-2.0
"""One job on one host, from the first event to the last: meet, run, leave, and name the outcome.

`job_started` and `job_terminated` are written in every way that a job can end, short of SIGKILL to
the launcher itself.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from resiliency.events import EventStream, EventType, RunEvent, events_path
from resiliency.goodput_measure.tracker import goodput_path, open_event_stream, published_record
from resiliency.launch import _compat, cli, rendezvous_wait
from resiliency.launch.agent import ResilientAgent
from resiliency.launch.agents.host import AgentHost
from resiliency.launch.failures.handler import FailureHandler
from resiliency.launch.failures.standard_error import StandardErrors
from resiliency.launch.fleet.link import NullReporter, WorkerStateReporter
from resiliency.launch.fleet.reporter import DaemonReporter
from resiliency.launch.hangs.slow_ranks import SlowRanks
from resiliency.launch.hangs.watch import HangWatch
from resiliency.launch.health.condition import JobCondition, LauncherState, Requeue
from resiliency.launch.health.diagnosis import DecidedBy, Diagnosis
from resiliency.launch.host_check.job_check import JobCheck, UnfitHost
from resiliency.launch.incident import summarise
from resiliency.launch.options import LaunchOptions
from resiliency.launch.protection import Protection
from resiliency.launch.rendezvous.shared_lines import DEADLINE_S, SharedLines
from resiliency.launch.standby import Standby
from resiliency.launch.watch import SignalBox
from resiliency.progress import STEP_PAGE_ENV, StepPage
from resiliency.runtime import (
    AGENT_HOST_ENV,
    FAILURE_DOMAINS_ENV,
    JOB_ENV,
    ON_NAN_ENV,
    RUN_DIR_ENV,
    STOP_NOTES_ENV,
    SystemClock,
)

logger = logging.getLogger(__name__)

#: Outcome of a host that was asked to leave its job, or found itself unfit: the others go on.
LEFT = "unhealthy host"
#: How long such a launcher waits to be ended.
LEFT_S = 30.0
#: Exit codes of a job that failed, and of one that would fail again: EX_SOFTWARE, "do not requeue".
FAILED, NO_REQUEUE = 1, 70
#: Kubelets set it in each pod.
KUBERNETES_ENV = "KUBERNETES_SERVICE_HOST"


@dataclass
class JobOutcome:
    """How the job ended on this host.  Starts as the worst, for ends that nobody foresaw."""

    exit_code: int = 1
    name: str = "error"
    #: Whether the rendezvous is over for all hosts; else they may go on without this one.
    final: bool = True
    #: Why the job would fail again as it is; empty where it may not.
    stop: str = ""

    def fail(self, name: str, stop: Diagnosis | None) -> None:
        self.name, self.stop = name, stop.sentence if stop is not None else ""
        self.exit_code = FAILED if stop is None else NO_REQUEUE

    @property
    def condition(self) -> JobCondition:
        """The word to the supervisor on a job that this launcher leaves down."""
        requeue = Requeue.NO if self.stop else Requeue.LATER
        return JobCondition(state=LauncherState.GAVE_UP, requeue=requeue, why=self.stop or self.name)

    @property
    def leaves_job_down(self) -> bool:
        """Whether the launcher gave up: it neither succeeded, nor was told to end or to leave."""
        return self.exit_code in (FAILED, NO_REQUEUE) and self.name != LEFT


def run(options: LaunchOptions, protection: Protection, standby: Standby) -> int:
    """Run the job and return the launcher's exit code.

    Raises:
        ConfigError: a flag of NVRx's is wrong; nothing was started.
    """
    logging.getLogger("nvidia_resiliency_ext").setLevel(
        logging.DEBUG if logger.isEnabledFor(logging.DEBUG) else logging.WARNING
    )
    config = _compat.fault_tolerance_config(options.args)
    signals = SignalBox(lambda number: _compat.SignalException(f"received {number.name}", sigval=number))
    standby.wake_fd = signals.wake_fd
    log_dir = _log_dir(options)
    with AgentHost(
        options.info, protection, stop_timeout=options.term_timeout, start=standby.start_helper
    ) as agents:
        page = StepPage(options.workers)
        errors = StandardErrors()

        def start_worker(argv: Any, env: Any, stdout: Any, stderr: Any, local_rank: int) -> Any:
            # Upstream has just handled all signals that it knows; ranks inherit what is ignored (nohup).
            signals.reinstate()
            if stderr is None or stderr.name == os.devnull:  # not shown, see --local-ranks-filter
                kept = errors.try_open(local_rank, shown=stderr is None)
                if kept is not None:
                    stderr = kept
                    logs.stderr_files[local_rank] = kept.path
            return standby.start_worker(argv, env, stdout, stderr, local_rank)

        _compat.prepare(protection.private_dir, signals.handle, start_worker, page)
        specs = _compat.make_logs_specs(options.args, log_dir)
        reporter: WorkerStateReporter = NullReporter()
        logs = _compat.TracedLogs(
            specs, lambda env: _adjust(env, options, agents, protection, page, reporter), errors.show
        )
        with (
            open_event_stream(options.info) as events,
            _reported(events, signals, options) as outcome,
            ExitStack() as closing,
        ):
            closing.callback(page.close)
            closing.callback(errors.close)
            _leave_last_words(protection, options)
            check = JobCheck(options, events)
            with signals.interruptible():
                check.check_alone()
            handler, serves, options = _meet(options, signals)
            handler.on_join = _check_at(handler, check, options)
            if options.args.use_supervisor:
                reporter = DaemonReporter(options, page, stacks_dir=str(protection.private_dir))
            closing.callback(reporter.close)
            # What launchers say to each other, where there may be several.
            lines = None
            if options.rendezvous.max_nodes > 1:
                lines = SharedLines(partial(handler.call_store, wait_s=DEADLINE_S))
            hangs = HangWatch(
                page,
                directory=protection.private_dir,
                host=options.info.host,
                events=events,
                reporter=reporter,
                timeout=options.hang_timeout,
                lines=lines,
            )
            closing.callback(hangs.close)
            slow_ranks = SlowRanks(
                page,
                directory=protection.private_dir,
                host=options.info.host,
                events=events,
                lines=lines,
            )
            closing.callback(slow_ranks.close)
            failures = FailureHandler(options, events, page, lines, reporter)
            closing.callback(failures.close)
            agent = ResilientAgent(
                options,
                rendezvous=handler,
                serves_store=serves,
                config=config,
                logs=logs,
                events=events,
                reporter=reporter,
                failures=failures,
                protection=protection,
                standby=standby,
                signals=signals,
                hangs=hangs,
                slow_ranks=slow_ranks,
            )
            try:
                _run_agent(agent, options, outcome)
            finally:
                if outcome.leaves_job_down:
                    reporter.job_is(outcome.condition)
                _leave(agent, agents, signals, final=outcome.final)
        return outcome.exit_code


def _leave(agent: ResilientAgent, agents: AgentHost, signals: SignalBox, *, final: bool) -> None:
    """Leave the rendezvous, and end what runs beside the workers, which have ended."""
    try:
        with signals.interruptible(check=False):
            agent.clean_rdzv_shutdown(close=final)
    finally:
        # No worker is left that would want a last step saved.
        agents.end(signals.at_once_fd)
        if agent.leaving:
            # By who ends it now: a pod that ends by itself before counts as a failure of its Job.
            signals.wait(LEFT_S)
        signals.close()
        agent.shutdown_rank_monitors()


@contextmanager
def _reported(events: EventStream, signals: SignalBox, options: LaunchOptions) -> Iterator[JobOutcome]:
    """The first and the last event, and what goes wrong before there are workers."""
    outcome = JobOutcome()
    signals.install(options.signals)
    events.emit(EventType.JOB_STARTED)
    try:
        yield outcome
    except _compat.SignalException as error:
        outcome.exit_code, outcome.name = 128 + error.sigval, error.sigval.name
        logger.warning("ended by %s before workers ran", error.sigval.name)
    except UnfitHost as error:
        _leave_unfit(error, outcome)
    except (_compat.RendezvousError, RuntimeError, OSError) as error:
        outcome.name = "no meeting point"
        # torch says why in the error below its own.
        why = str(error.__cause__ or error).partition("\n")[0]
        logger.error("cannot meet at %s: %s", options.rendezvous.endpoint, why)
    finally:
        signals.close()
        events.emit(EventType.JOB_TERMINATED, exit_code=outcome.exit_code, outcome=outcome.name)


def _leave_last_words(protection: Protection, options: LaunchOptions) -> None:
    """The last event for the case that this process is killed before it can write one."""
    event = RunEvent(
        type=EventType.JOB_TERMINATED,
        time=SystemClock().now(),
        job_name=options.info.job_name,
        host=options.info.host,
        node_rank=options.info.node_rank,
        fields={"outcome": "launcher killed"},
    )
    protection.last_words(events_path(options.info), json.loads(event.to_json()))
    published = published_record(event)
    if published is not None:
        protection.last_words(goodput_path(options.info), published)


def _meet(options: LaunchOptions, signals: SignalBox) -> tuple[_compat.HostRendezvous, bool, LaunchOptions]:
    """The handler, whether this process serves the store, and the options with what is known of this host."""
    place = options.rendezvous

    def connect() -> tuple[_compat.HostRendezvous, bool, str | None]:
        handler, serves = _compat.HostRendezvous.connect(
            endpoint=place.endpoint,
            run_id=place.run_id,
            min_nodes=place.min_nodes,
            max_nodes=place.max_nodes,
            local_addr=place.local_addr,
            node_rank=place.node_rank,
            upscaling=options.args.ft_restart_policy != "min-healthy",
            conf=place.conf,
        )
        address = place.local_addr
        if place.max_nodes > 1:
            address = address or rendezvous_wait.address_for_others(host)
            rendezvous_wait.set_gloo_interface(address)
        return handler, serves, address

    def must_serve() -> bool:
        return _compat.must_serve_store(place.endpoint, place.conf)

    host, port = _compat.store_place(place.endpoint)
    if place.max_nodes > 1:
        name = "" if place.run_id == cli.UNNAMED else f" as {place.run_id}"
        logger.info("meeting other hosts at %s%s", place.endpoint, name)
    with signals.interruptible():
        handler, serves, address = rendezvous_wait.meet(connect, host, port, must_serve)
    return handler, serves, replace(options, rendezvous=replace(place, local_addr=address))


def _check_at(
    handler: _compat.HostRendezvous, check: JobCheck, options: LaunchOptions
) -> Callable[[Any, int, int, bool], None]:
    """What the handler calls at the end of each rendezvous, before workers are started."""

    def check_host(store: Any, rank: int, hosts: int, changed: bool) -> None:
        check.check_with_others(
            store,
            rank=rank,
            hosts=hosts,
            changed=changed,
            run=handler.run,
            attempt=handler.attempt,
            address=options.rendezvous.local_addr or options.info.host,
        )

    return check_host


def _leave_unfit(error: UnfitHost, outcome: JobOutcome) -> None:
    outcome.exit_code, outcome.name, outcome.final = error.exit_code, LEFT, False
    logger.error("host check: %s; this host leaves the job, exit code %d", error, error.exit_code)


def _run_agent(agent: ResilientAgent, options: LaunchOptions, outcome: JobOutcome) -> None:
    """Run the agent and map what it raises, all of it foreign, to an outcome."""
    endpoint = options.rendezvous.endpoint
    try:
        if _compat.succeeded(agent.run()):
            stopped = bool(agent.stops)
            outcome.exit_code = _stopped_exit_code(signal.SIGTERM) if stopped else 0
            outcome.name = "stopped" if stopped else "succeeded"
        else:
            stop = agent.find_stop()
            outcome.fail("failed", stop)
            logger.error("%s", _summary(options, agent, stop))
    except _compat.SignalException as error:
        outcome.exit_code = _stopped_exit_code(error.sigval) if agent.all_succeeded else 128 + error.sigval
        outcome.name, outcome.final = error.sigval.name, False
        how = "workers finished cleanly" if agent.all_succeeded else "workers did not finish cleanly"
        logger.warning(
            "ended by %s: %s%s, exit code %d",
            error.sigval.name,
            how,
            agent.where_stopped(),
            outcome.exit_code,
        )
    except _compat.UnhealthyNodeException as error:
        outcome.name, outcome.final = LEFT, False
        logger.error("this host leaves the job, because it is unhealthy: %s", error)
    except UnfitHost as error:
        _leave_unfit(error, outcome)
    except _compat.RendezvousClosedError:
        stop = agent.find_stop()
        outcome.fail("ended elsewhere", stop)
        logger.error("another host ended the job.\n%s", _summary(options, agent, stop))
    except _compat.RendezvousTimeoutError:
        outcome.name, outcome.final = "hosts missing", False
        logger.error(
            "fewer than %d hosts came to %s in time.  --rdzv-conf join_timeout=SECONDS sets the wait.",
            options.rendezvous.min_nodes,
            endpoint,
        )
    except (_compat.RendezvousError, RuntimeError, OSError) as error:
        # torch's store raises RuntimeError when the host that serves it is gone.
        outcome.name, outcome.final = "meeting point lost", False
        logger.error("lost contact with the meeting point %s: %s", endpoint, error)
        logger.debug("where it was noticed", exc_info=True)


def _stopped_exit_code(number: int) -> int:
    """Of a launcher whose workers were told to end by signal `number`, and did so in order.

    0 as theirs, but in a pod: there it would complete the index of a Job for good, though the job has not
    come to its end.  A pod that is evicted, preempted or suspended would never be made again.
    """
    return 128 + number if os.environ.get(KUBERNETES_ENV) else 0


def _summary(options: LaunchOptions, agent: ResilientAgent, stop: Diagnosis | None) -> str:
    words = summarise(
        options.script,
        agent.faults,
        restarts=agent.restarts_used,
        max_restarts=options.max_restarts,
    )
    if stop is not None:
        again = ", and would fail again as it is" if stop.decided_by is DecidedBy.DETERMINISTIC else ""
        words += f"\nThe job ends{again}: {stop.sentence}."
    return words


def _adjust(
    env: dict[str, str],
    options: LaunchOptions,
    agents: AgentHost,
    protection: Protection,
    page: StepPage,
    reporter: WorkerStateReporter,
) -> None:
    """What a worker's environment has beyond torchrun's."""
    # What the user says goes first.
    if not os.environ.get(FAILURE_DOMAINS_ENV) and (domains := reporter.failure_domains()):
        env[FAILURE_DOMAINS_ENV] = domains
    env[STEP_PAGE_ENV] = page.variable(int(env["LOCAL_RANK"]))
    env[AGENT_HOST_ENV] = agents.address
    env[STOP_NOTES_ENV] = str(protection.private_dir)
    env[ON_NAN_ENV] = options.args.on_nan
    env[JOB_ENV] = options.info.job_name
    env[RUN_DIR_ENV] = options.info.run_dir
    if env["LOCAL_RANK"] == "0":
        rendezvous_wait.check_first_host(env["MASTER_ADDR"])
    if options.virtual_local_rank:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        own = int(env["LOCAL_RANK"])
        env["CUDA_VISIBLE_DEVICES"] = visible.split(",")[own] if visible else str(own)
        env["LOCAL_RANK"] = "0"


def _log_dir(options: LaunchOptions) -> str | None:
    """As torchrun: redirected output is kept even when nobody said where."""
    if options.args.log_dir is None and (options.args.redirects, options.args.tee) != ("0", "0"):
        return tempfile.mkdtemp(prefix="torchelastic_")
    return str(options.args.log_dir) if options.args.log_dir is not None else None
