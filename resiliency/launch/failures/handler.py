# SPDX-License-Identifier: Apache-2.0
"""What a launcher does when ranks fail: diagnose the attempt, ask the user's policy, say what follows."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from resiliency.events import EventStream, EventType
from resiliency.launch.failures.evidence import EvidenceCollector
from resiliency.launch.failures.policy import ask_policy
from resiliency.launch.failures.shared_history import SharedHistory
from resiliency.launch.fleet.link import WorkerStateReporter
from resiliency.launch.health.diagnosis import Advice, Diagnosis, Limits, diagnose
from resiliency.launch.health.evidence import RankDeath
from resiliency.launch.health.history import pause_after
from resiliency.launch.health.rules import SHARED_MEMORY
from resiliency.launch.options import LaunchOptions
from resiliency.launch.rendezvous.shared_lines import SharedLines
from resiliency.progress import StepPage
from resiliency.rank.checkpoint_steps import CheckpointSteps
from resiliency.runtime import ROLLBACKS_ENV

logger = logging.getLogger(__name__)


class FailureHandler:
    """The diagnoses of one launcher.

    Args:
        page: where ranks of this host write their steps.
        lines: what hosts say to each other; None: the job has one host.
        reporter: of the supervisor, which can replace a host.
    """

    def __init__(
        self,
        options: LaunchOptions,
        events: EventStream,
        page: StepPage,
        lines: SharedLines | None,
        reporter: WorkerStateReporter,
    ) -> None:
        self._options, self._events, self._page = options, events, page
        self._reporter = reporter
        self._policy: str | None = options.args.failure_policy
        self._rolls_back = options.args.on_nan == "rollback"
        self._limits = Limits(
            attempts=options.args.attempts_without_progress, seconds=options.args.no_progress_s
        )
        directories = (options.info.run_dir, *filter(None, [options.args.log_dir]), SHARED_MEMORY)
        self._evidence = EvidenceCollector(options.info.host, directories)
        self._shared = SharedHistory(lines)
        #: Seconds that this host wants to wait before the next attempt starts.
        self.pause_s = 0.0

    def begin_attempt(self) -> None:
        self.pause_s = 0.0
        self._evidence.begin_attempt()
        self._page.clear()  # a step of the attempt before is no evidence of this one

    def variables(self, run: str) -> dict[str, str]:
        """Of the ranks of the attempt that begins: from which checkpoints they may go on."""
        rows = self._shared.rollbacks(run) if self._rolls_back else []
        return {ROLLBACKS_ENV: json.dumps(rows)} if rows else {}

    def add_death(
        self,
        local_rank: int,
        *,
        rank: int,
        exit_code: int,
        error: Mapping[str, object],
        hang: str | None,
        stderr_file: str | None,
    ) -> RankDeath:
        """In the order in which deaths are noticed; see `EvidenceCollector.add_death`."""
        return self._evidence.add_death(
            rank=rank,
            exit_code=exit_code,
            error=error,
            hang=hang,
            stderr_file=stderr_file,
            step=self._step_of(local_rank),
        )

    def are_explained(self) -> bool:
        """True if the deaths so far have a culprit; see `EvidenceCollector.is_explained`."""
        return self._evidence.is_explained()

    def diagnose(self, *, run: str, attempt: int, lost_hosts: Sequence[str]) -> Diagnosis:
        """Name the cause of the attempt's end, in the log and as an event.

        `lost_hosts`: those that are known to have left without a word so far.
        """
        evidence = self._evidence.collect(attempt=attempt, step=self._newest_step())
        evidence = replace(
            evidence,
            checkpoints=self._checkpoints(),
            lost_hosts=tuple(lost_hosts),
            reports_steps=any(self._page.read(rank).reports for rank in range(self._options.workers)),
        )
        found = diagnose(
            evidence,
            self._shared.before(run, attempt),
            limits=self._limits,
            rolls_back=self._rolls_back,
        )
        policy = self._policy if evidence.deaths else None  # without one the hosts meet again in any case
        if policy is not None and (advice := ask_policy(policy, evidence, found)) is not None:
            found = replace(found, advice=advice, sentence=f"{found.sentence}; {policy} says {advice.value}")
        self._shared.add(run, found)
        self.pause_s = pause_after(self._shared.own)
        self._events.emit(
            EventType.DIAGNOSED,
            attempt=attempt,
            step=found.step,
            cause=found.cause.value,
            advice=found.advice.value,
            decided_by=found.decided_by.value,
            confidence=found.confidence.value,
            ranks=list(found.ranks),
            hosts=list(found.hosts),
            sentence=found.sentence,
        )
        self._reporter.report_diagnosis(found)
        ends = "the job ends" if found.advice is Advice.STOP else f"advice {found.advice.value}"
        logger.error("attempt %d diagnosed as %s: %s; %s", attempt, found.cause.value, found.sentence, ends)
        return found

    def find_stop(self, run: str) -> Diagnosis | None:
        """The diagnosis with which this host or another one has ended the job, if one did."""
        return self._shared.find_stop(run)

    def close(self) -> None:
        self._evidence.close()

    def _step_of(self, local_rank: int) -> int | None:
        return self._page.read(local_rank).step

    def _checkpoints(self) -> CheckpointSteps | None:
        """By the rank that has saved last: the others are about to."""
        known = (self._page.read(rank).checkpoints for rank in range(self._options.workers))
        return max(
            (steps for steps in known if steps is not None),
            key=lambda steps: (steps.branch, steps.newest),
            default=None,
        )

    def _newest_step(self) -> int | None:
        steps = map(self._step_of, range(self._options.workers))
        return max((step for step in steps if step is not None), default=None)
