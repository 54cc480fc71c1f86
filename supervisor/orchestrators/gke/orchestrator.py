# SPDX-License-Identifier: Apache-2.0
"""The seam of the supervisor on Kubernetes: commands in, answers and changes of hosts out."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

from kubernetes_asyncio.client import Configuration

from resiliency.tasks import wait_for
from supervisor.orchestrator import Answer, TellChange, TellFacts, ignore_facts
from supervisor.orchestrators.gke import jobsets, nodes
from supervisor.orchestrators.gke.annotated import annotated_pods
from supervisor.orchestrators.gke.client import NODES, WATCH_S, Api, ApiError, Object, find_cluster
from supervisor.orchestrators.gke.hosts import HostActions, cordoned_by
from supervisor.orchestrators.gke.jobs import JobActions
from supervisor.orchestrators.gke.lease import Fenced, NotHolder, WriterLease
from supervisor.orchestrators.gke.names import CORDONED_BY, annotations_of
from supervisor.orchestrators.gke.records import Records
from supervisor.orchestrators.gke.sizes import HostsPerReplica, one_host
from supervisor.orchestrators.gke.view import ClusterView, NotYet, Refused, TimedOut, Times
from supervisor.orchestrators.tasks import LoggedTasks
from supervisor.values import Change, Command, CommandKind, Evidence, HostFacts, OutcomeStatus, cut_text

logger = logging.getLogger(__name__)

#: For the first list of everything.
LIST_S = 30.0
#: Facts about hosts are looked at so long after a change.
FACTS_S = 0.2
#: Commands whose deadline is known to their later tries; few are under way at once.
REMEMBERED_ENDS = 1024


class GkeOrchestrator:
    """See the package.

    Args:
        namespace: of JobSets, their Jobs and pods (WORKLOAD_NAMESPACE).
        own_namespace: of the Lease and of records (JOB_NAMESPACE).
        hosts_per_replica: for JobSets that do not say (NUM_NODES_PER_DP, NUM_DP_REPLICAS).
        connect: finds the cluster.
    """

    def __init__(
        self,
        namespace: str,
        own_namespace: str,
        *,
        hosts_per_replica: HostsPerReplica = one_host,
        times: Times | None = None,
        connect: Callable[[], Awaitable[Configuration]] = find_cluster,
    ) -> None:
        self._namespace, self._own = namespace, own_namespace
        self._hosts_per_replica = hosts_per_replica
        self._times = times or Times()
        self._connect = connect
        self._identity = f"{os.environ.get('POD_NAME') or socket.gethostname()}_{uuid.uuid4().hex[:8]}"
        self._tasks = LoggedTasks("Kubernetes orchestrator")
        #: All that wait for a command that is being carried out, by its id.
        self._answers: dict[str, list[Callable[[Answer], None]]] = {}
        self._ends: dict[str, float] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._warned: set[str] = set()
        self._forgetting: set[str] = set()
        self._tell: TellChange = lambda host, change, evidence: None

    @asynccontextmanager
    async def running(self, tell: TellChange, tell_facts: TellFacts = ignore_facts) -> AsyncIterator[None]:
        """Watch the cluster, hold the Lease, and finish what another adapter left unfinished.

        Raises:
            ConfigError: no cluster is found.
        """
        self._tell = tell
        async with Api(await self._connect()) as api:
            self._begin(api)
            self._tasks.start(self._tell_facts(tell_facts))
            try:
                yield
            finally:
                await self._tasks.end()

    def _begin(self, api: Api) -> None:
        self._api = api
        self._lease = WriterLease(api, self._own, self._identity, self._times.lease_s)
        self._view = ClusterView(api, self._namespace, self._times, self._lease.served_for)
        # Set when there may be records that nobody is at: after a take-over, and after a try that failed.
        self._unfinished = self._lease.taken
        api.before_change = self._lease.check
        self._records = Records(api, self._own, self._namespace)
        self._hosts = HostActions(self._view)
        self._jobs = JobActions(self._view, self._records, self._hosts, self._hosts_per_replica)
        self._view.nodes.listener = self._node_changed
        self._view.jobsets.listener = self._jobset_changed
        for watched in self._view.watched:
            self._tasks.start(watched.run(api))
        self._tasks.start(self._lease.run())
        self._tasks.start(self._finish_records())

    # ------------------------------------------------------------------------------------- the seam

    def perform(self, command: Command, answer: Callable[[Answer], None]) -> None:
        # Where it is under way its end is the answer to all tries.
        self._answers.setdefault(command.id, []).append(answer)
        if len(self._answers[command.id]) == 1:
            self._tasks.start(self._perform(command))

    def look(self, host: str, answer: Callable[[bool | None], None]) -> None:
        self._tasks.start(self._look(host, answer))

    async def _look(self, host: str, answer: Callable[[bool | None], None]) -> None:
        try:
            answer(await self._is_there(host))
        except (ApiError, NotHolder) as error:
            logger.info("host %s cannot be looked at: %s", host, error)
            answer(None)

    async def _is_there(self, host: str) -> bool | None:
        if not self._view.nodes.listed.is_set():
            return None
        node = self._view.find_node(host)
        if node is None:
            return False
        name = node["metadata"]["name"]
        age = await self._view.kubelets.age(name)
        if age is not None and age <= self._times.alive_s:
            return True
        return False if await self._view.is_lost(name) else None

    # ------------------------------------------------------------------------------------- commands

    async def _perform(self, command: Command) -> None:
        try:
            answer = await self._answer(command)
        finally:
            waiting = self._answers.pop(command.id)
        # Messages of servers may hold lines and be long; outcomes may not.
        answer = replace(answer, text=cut_text(answer.text))
        for one in waiting:
            one(answer)

    async def _answer(self, command: Command) -> Answer:
        end, spare = self._end_of(command), ""
        try:
            await self._lease.admit(command.epoch)
            await wait_for(self._all_listed(), LIST_S)
            async with self._lock_of(command):
                # What came meanwhile: a newer controller, or the end of the time that this one gave.
                await self._lease.admit(command.epoch)
                if time.monotonic() >= end:
                    raise TimedOut(f"nothing was done within {command.deadline_s:g} s")
                if command.kind is CommandKind.HOT_SWAP:
                    text, spare = await self._jobs.swap(command.workload, command.id, command.host, end)
                else:
                    text = await self._carry_out(command, end)
        except Fenced as error:
            return Answer(status=OutcomeStatus.FENCED, text=str(error), epoch=error.highest)
        except NotYet as error:
            return Answer(status=OutcomeStatus.WITHDRAWN, text=str(error))
        except Refused as error:
            return Answer(status=OutcomeStatus.FAILED, text=str(error))
        except ApiError as error:
            self._unfinished.set()
            return Answer(status=OutcomeStatus.FAILED, text=str(error), passing=error.passing)
        except (NotHolder, TimedOut) as error:
            self._unfinished.set()
            return Answer(status=OutcomeStatus.FAILED, text=str(error), passing=True)
        except asyncio.TimeoutError:
            text = f"the cluster could not be listed within {LIST_S:g} s"
            return Answer(status=OutcomeStatus.FAILED, text=text, passing=True)
        return Answer(status=OutcomeStatus.DONE, text=text, spare=spare)

    def _end_of(self, command: Command) -> float:
        """When to give up, of the monotonic clock: the deadline is that of all tries together."""
        end = self._ends.setdefault(command.id, time.monotonic() + command.deadline_s)
        if len(self._ends) > REMEMBERED_ENDS:
            del self._ends[next(iter(self._ends))]
        return end

    def _lock_of(self, command: Command) -> asyncio.Lock:
        """One action at a time on a job, and on a host: a drain that waits must not hold up its job's."""
        if command.kind in (CommandKind.CORDON_HOST, CommandKind.UNCORDON_HOST, CommandKind.DRAIN_HOST):
            return self._locks.setdefault(f"host:{command.host}", asyncio.Lock())
        return self._lock_of_job(command.workload)

    def _lock_of_job(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(f"job:{name}", asyncio.Lock())

    async def _carry_out(self, command: Command, end: float) -> str:
        kind, name, host, number = command.kind, command.workload, command.host, command.id
        if kind is CommandKind.CORDON_HOST:
            return await self._hosts.cordon(host, number, by_person=command.is_of_person)
        if kind is CommandKind.UNCORDON_HOST:
            return await self._hosts.uncordon(host, number, by_person=command.is_of_person)
        if kind is CommandKind.DRAIN_HOST:
            return await self._drain(host, number, end)
        if kind is CommandKind.IN_JOB_RESET:
            return await self._jobs.check_runs(name, end)
        if kind is CommandKind.WORKLOAD_RESET:
            return await self._jobs.reset(name, number, end)
        if kind is CommandKind.WORKLOAD_RECREATION:
            return await self._jobs.make_again(name, number, end)
        if command.replicas is not None:
            return await self._jobs.resize(name, number, command.replicas, end, without=host)
        raise Refused(f"the Kubernetes orchestrator has no {kind.value}")

    async def _drain(self, host: str, command: str, end: float) -> str:
        text, of_a_job = await self._hosts.drain(host, command, end)
        if of_a_job:
            # The job must go on without it: the controller decides how.
            word = f"{nodes.name_of(host)} was drained"
            self._tell(host, Change.GONE, Evidence(id=f"gke:{command}", witness="orchestrator", text=word))
        return text

    async def _all_listed(self) -> None:
        for watched in self._view.watched:
            await watched.listed.wait()

    # ------------------------------------------------------------------------------------- by itself

    async def _finish_records(self) -> None:
        """Go on with JobSets that were deleted, or were to be, when an adapter or a try of it ended."""
        problems: dict[str, str] = {}
        while True:
            await self._unfinished.wait()
            self._unfinished.clear()
            said: dict[str, str] = {}
            try:
                self._lease.check()
                for name in await self._records.names():
                    # One that cannot be finished must not keep the others waiting.
                    if problem := await self._finish_record(name):
                        said[name] = problem
            except ApiError as error:
                said[""] = str(error)
            except NotHolder:
                self._unfinished.set()
            if said:
                self._unfinished.set()
            for name, problem in said.items():
                if problems.get(name) != problem:
                    logger.error("a JobSet that is to be made again is not yet: %s", problem)
            problems = said
            await asyncio.sleep(self._times.retry_s)

    async def _finish_record(self, name: str) -> str:
        """Finish what a record says; what is in the way, empty where nothing is.

        Raises:
            NotHolder: another adapter writes.
        """
        lock = self._lock_of_job(name)
        if lock.locked():
            self._unfinished.set()  # a command is at it, which may give up
            return ""
        async with lock:
            try:
                # Read now: a record that was listed may have been finished meanwhile, and its JobSet deleted.
                record = await self._records.find(name)
                if record is not None:
                    await self._jobs.finish(record, time.monotonic() + self._times.lease_s)
                    logger.warning("JobSet %s: what %s began is finished", name, record.command)
            except (ApiError, Refused, TimedOut) as error:
                return str(error)
        return ""

    async def _tell_facts(self, tell: TellFacts) -> None:
        """Each host's facts, and again when they have changed."""
        reported: dict[str, HostFacts] = {}
        await self._all_listed()
        while True:
            view = self._view
            trains = annotated_pods(
                view.jobsets.all(), view.jobs.all(), view.pods.all(), self._hosts_per_replica
            )
            names = {node["metadata"]["name"]: node for node in view.nodes.all()}
            known = {name: replace(nodes.facts(node), pod=trains.get(name)) for name, node in names.items()}
            for name, facts in known.items():
                if facts != reported.get(name):
                    tell(name, facts)
            reported = known
            await self._view.changes.wait(WATCH_S)
            await asyncio.sleep(FACTS_S)  # changes come in crowds

    def _node_changed(self, before: Object | None, after: Object | None) -> None:
        said = nodes.changes(before, after)
        if after is not None and CORDONED_BY in annotations_of(after) and not nodes.is_cordoned(after):
            if before is None:
                # Uncordoned by a person while no adapter ran.
                said.append((nodes.host_id(after), Change.UNCORDONED, "uncordoned meanwhile"))
            if after["metadata"]["name"] not in self._forgetting:
                self._tasks.start(self._forget_cordon(after["metadata"]["name"]))
        seen = (after or before or {})["metadata"]
        for host, change, text in said:
            name = f"gke:{seen['uid']}:{seen['resourceVersion']}:{change.value}"
            ours = cordoned_by(after) if after is not None and change is Change.CORDONED else ""
            self._tell(host, change, Evidence(id=name, witness="orchestrator", text=text, cause=ours))

    async def _forget_cordon(self, name: str) -> None:
        """Take the mark of a cordon off a node that a person has uncordoned.

        At the start the lease is not held yet: the mark goes once it is.
        """
        self._forgetting.add(name)
        try:
            while (node := self._view.nodes.get(name)) is not None:
                if CORDONED_BY not in annotations_of(node) or nodes.is_cordoned(node):
                    return
                with suppress(NotHolder):
                    self._lease.check()
                    await self._api.patch(NODES, node, {"metadata": {"annotations": {CORDONED_BY: None}}})
                    return
                await asyncio.sleep(self._times.retry_s)
        except ApiError as error:
            logger.info("node %s keeps the mark of a cordon: %s", name, error)
        finally:
            self._forgetting.discard(name)

    def _jobset_changed(self, before: Object | None, after: Object | None) -> None:
        if before is not None or after is None:
            return
        problem, name = jobsets.generation_problem(after), after["metadata"]["name"]
        if problem and name not in self._warned:
            self._warned.add(name)
            logger.warning(
                "JobSet %s: %s; its steps are not seen after a restart of the whole job (docs/gke.md)",
                name,
                problem,
            )
