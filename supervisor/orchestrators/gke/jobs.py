# SPDX-License-Identifier: Apache-2.0
"""Actions on a JobSet: restart, make again at any size, replace the pods of one host.

Each begins with a mark on the JobSet, or with a record, and ends with its id among those that were carried
out.  A try that was cut short between any two calls is found by what it left, and goes on from there; a try
of another id finishes what it finds first.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable
from typing import Any

from supervisor.orchestrators.gke import jobsets, pods
from supervisor.orchestrators.gke.client import EVENTS, JOBS, JOBSETS, PODS, WORKLOADS, ApiError, Object
from supervisor.orchestrators.gke.hosts import HostActions
from supervisor.orchestrators.gke.names import (
    COMMANDS,
    INDEX,
    JOB_NAME,
    QUEUE_NAME,
    RESET,
    RESTART_ATTEMPT,
    SWAP,
    annotations_of,
    condition,
    is_deleting,
    labels_of,
    owner_uid,
    was_applied,
    with_command,
)
from supervisor.orchestrators.gke.nodes import can_take, holds_place, host_id, name_of
from supervisor.orchestrators.gke.records import Record, Records
from supervisor.orchestrators.gke.sizes import CannotResize, HostsPerReplica, resized, size_of
from supervisor.orchestrators.gke.view import LOOK_S, ClusterView, NotYet, Refused, TimedOut

logger = logging.getLogger(__name__)

#: For which a hot swap waits for a disruption budget; a restart of the whole job costs less than more of it.
EVICT_S = 10.0
#: A workload reset takes less until its pods run, a lost host included: a swap that takes more gives way.
RESET_S = 30.0
_COUNT = r"count/jobsets\.jobset\.x-k8s\.io="
#: A quota that is exceeded by the number of JobSets and by nothing else.
_QUOTA = re.compile(
    rf"exceeded quota: .*, requested: {_COUNT}1, used: {_COUNT}(?P<used>\d+),"
    rf" limited: {_COUNT}(?P<limited>\d+)$"
)
#: The JobSet to be, from the one that is; raises Refused.
Rewrite = Callable[[Object], Object]


class JobActions:
    """Actions on the JobSets of one namespace.

    Args:
        hosts_per_replica: for JobSets that do not say.
    """

    def __init__(
        self, view: ClusterView, records: Records, hosts: HostActions, hosts_per_replica: HostsPerReplica
    ) -> None:
        self._view, self._records, self._hosts = view, records, hosts
        self._hosts_per_replica = hosts_per_replica

    # ------------------------------------------------------------------------------------- in-job reset

    async def check_runs(self, name: str, end: float) -> str:
        """Whether launchers are left that can restart their ranks.

        Raises:
            Refused: none is.
        """
        jobset = await self._get(name, end)
        running = [
            pod for pod in self._view.present_pods(jobset) if pods.is_active(pod) and pods.node_of(pod)
        ]
        if not running:
            raise Refused(f"no pod of {name} is left: the whole job must be started again")
        return f"{len(running)} of {jobsets.pods_wanted(jobset)} pods are there"

    # ------------------------------------------------------------------------------------- restart

    async def reset(self, name: str, command: str, end: float, *, at_once: bool = False) -> str:
        """Start all pods again: by the JobSet's own failure policy, else by making it again.

        Args:
            at_once: also pods that have been starting for long.
        Raises:
            NotYet: there are such pods, and the launchers of the others wait for them.
        """
        jobset = await self._get(name, end)
        if was_applied(jobset, command):
            return await self._placed(jobset, end)
        if jobset["spec"].get("suspend"):
            # Nothing runs that could be started again; made again, it would lose its place in the queue.
            jobset = await self._annotate(jobset, {COMMANDS: with_command(jobset, command)})
            return await self._placed(jobset, end)
        mark = _mark(jobset, RESET, command)
        if mark is None:
            if not (at_once or jobsets.end_of(jobset)):
                await self._check_starts(jobset)
            why = jobsets.why_not_restartable(jobset)
            if why:
                return f"made again, because {why}; {await self.make_again(name, command, end)}"
            mark = {"command": command, "restarts": jobsets.restarts(jobset)}
            jobset = await self._annotate(jobset, {RESET: json.dumps(mark)})
        before = int(mark["restarts"])
        if jobsets.restarts(jobset) <= before:
            await self._fail_a_job(jobset)
            jobset = await self._restarted(name, jobset, before, end)
        if jobsets.end_of(jobset) == "Failed":
            return f"made again, because it has failed; {await self.make_again(name, command, end)}"
        jobset = await self._annotate(jobset, {RESET: None, COMMANDS: with_command(jobset, command)})
        return f"restart {jobsets.restarts(jobset)}; {await self._placed(jobset, end)}"

    async def _check_starts(self, jobset: Object) -> None:
        """Raises: NotYet: pods start for longer than usual, on nodes that are there."""
        times, present, now = self._view.times, self._view.present_pods(jobset), self._view.api.now()
        for pod in present:
            starts_s = pods.starts_for(pod, now)
            if times.stuck_s <= starts_s < times.pull_s and not await self._view.is_lost(pods.node_of(pod)):
                where = pods.placement(present, jobsets.pods_wanted(jobset))
                raise NotYet(f"pods start since {starts_s:.0f} s, as while a large image is pulled: {where}")

    async def _fail_a_job(self, jobset: Object) -> None:
        """One Job runs out of time at once, which its JobSet answers with a restart of all of them."""
        attempt, uid = str(jobsets.restarts(jobset)), jobset["metadata"]["uid"]
        found, _ = await self._view.api.list(
            JOBS, self._view.namespace, labels=f"{RESTART_ATTEMPT}={attempt}"
        )
        mine = [job for job in found if owner_uid(job) == uid and not is_deleting(job)]
        if any(condition(job, "Failed") for job in mine):
            return
        running = [job for job in mine if not condition(job, "Complete")]
        if not running:
            raise ApiError(f"JobSet {jobset['metadata']['name']} has no Job to restart yet")
        if running[0]["spec"].get("activeDeadlineSeconds") != 1:
            await self._view.api.patch(JOBS, running[0], {"spec": {"activeDeadlineSeconds": 1}})

    async def _restarted(self, name: str, jobset: Object, before: int, end: float) -> Object:
        """Wait for the restart to be counted; nothing that is stuck may hold it up."""
        uid = jobset["metadata"]["uid"]
        while True:
            known = self._view.jobsets.get(name)
            mine = known is not None and known["metadata"]["uid"] == uid
            if known is not None and mine and (jobsets.restarts(known) > before or jobsets.end_of(known)):
                return await self._get(name, end)
            if time.monotonic() >= end:
                raise TimedOut(f"JobSet {name} does not count restart {before + 1}")
            await self._view.end_stuck(self._view.pods_of(uid))
            await self._view.changes.wait(LOOK_S)

    # ------------------------------------------------------------------------------------- made again

    async def make_again(
        self, name: str, command: str, end: float, rewrite: Rewrite = lambda one: one
    ) -> str:
        """Delete the JobSet and create it again, as `rewrite` has it.

        Raises:
            Refused: the API server would not take the new one; nothing was deleted.
        """
        jobset = await self._get(name, end)
        if was_applied(jobset, command):
            return await self._placed(jobset, end)
        wanted = jobsets.made_again(rewrite(jobset), await self._queued(jobset), command)
        await self._try_out(wanted)
        jobset = await self.finish(await self._records.write(command, jobset, wanted), end)
        return await self._placed(jobset, end)

    async def resize(self, name: str, command: str, replicas: int, end: float, *, without: str = "") -> str:
        """Make the JobSet again with another number of replicas, and without a host.

        The size stands in the pods' templates, which cannot be changed in place.
        """
        left: tuple[str, ...] = ()

        def rewrite(jobset: Object) -> Object:
            nonlocal left
            try:
                size = size_of(jobset, self._hosts_per_replica)
                made, left = resized(jobset, size, replicas)
            except CannotResize as error:
                raise Refused(f"JobSet {name} cannot be resized: {error}") from error
            if replicas > size.replicas and QUEUE_NAME not in labels_of(jobset):
                self._check_room(jobset, size.job, replicas, replicas * size.hosts_per_replica)
            return made

        if without:
            await self._hosts.cordon(without, command)
        text = await self.make_again(name, command, end, rewrite)
        if left:
            logger.warning("JobSet %s: not the job's size, left as it is: %s", name, "; ".join(left))
            text += f"; left as it is: {'; '.join(left)}"
        return text

    def _check_room(self, jobset: Object, job: str, replicas: int, wanted: int) -> None:
        """Hosts for a larger job: its own, and those that no other pod of this namespace holds."""
        mine = self._view.pods_of(jobset["metadata"]["uid"])
        own = {pods.node_of(pod) for pod in mine if not pods.has_ended(pod)}
        priority = max((int(pod["spec"].get("priority") or 0) for pod in mine), default=0)
        (replicated,) = [one for one in jobsets.replicated_jobs(jobset) if one["name"] == job]
        spec = jobsets.pod_template(replicated)["spec"]
        busy = {
            pods.node_of(pod)
            for pod in self._view.pods.all()
            if not pods.has_ended(pod) and not pods.is_of_the_node(pod) and holds_place(pod, spec, priority)
        } - own
        there = sum(
            can_take(node, spec) and node["metadata"]["name"] not in busy for node in self._view.nodes.all()
        )
        if there < wanted:
            raise Refused(f"{replicas} replicas need {wanted} hosts, and there are {there}")

    async def finish(self, record: Record, end: float) -> Object:
        """Bring about what a record says, from whatever is there; returns the JobSet.

        Raises:
            Refused: somebody else has made a JobSet of that name; it stays as it is.
            ApiError: the old one is not what the new one was made of any more; it stays, and the record goes.
            TimedOut: the old one is not gone yet; the record stays.
        """
        name = record.name
        while True:
            jobset = await self._view.api.try_get(JOBSETS, name, self._view.namespace)
            if jobset is None:
                jobset = await self._create(record)
            if jobset is not None and jobset["metadata"]["uid"] != record.uid:
                break
            if jobset is not None and not is_deleting(jobset):
                if jobsets.made_of(jobset) != jobsets.made_of(record.original):
                    await self._records.remove(record)
                    raise ApiError(f"JobSet {name} was changed before it was deleted")
                # Pods go before their JobSet, which is gone when none is left that could have its names.
                await self._view.api.delete(JOBSETS, jobset, foreground=True, unchanged=True)
            if time.monotonic() >= end:
                raise TimedOut(f"JobSet {name} is not gone yet, and is kept to be made again")
            await self._view.end_stuck(self._view.pods_of(record.uid))
            await self._view.changes.wait(LOOK_S)
        ours = was_applied(jobset, record.command)
        await self._records.remove(record)
        if not ours:
            raise Refused(f"another JobSet {name} was made meanwhile; it stays as it is")
        return jobset

    async def _create(self, record: Record) -> Object | None:
        """None where another one has the name by now."""
        try:
            made = await self._view.api.create(JOBSETS, record.wanted, self._view.namespace)
        except ApiError as error:
            if error.code == 409:
                return None
            if not error.passing:
                # A dry run took it: a webhook that refuses it now may take it later, and it must not be lost.
                raise ApiError(f"JobSet {record.name} is kept, and not made again yet: {error}") from error
            raise
        logger.warning("JobSet %s made again for %s", record.name, record.command)
        return made

    async def _try_out(self, wanted: Object) -> None:
        """Whether the API server and its webhooks would take it: a dry run, before anything is deleted."""
        try:
            await self._view.api.create(JOBSETS, wanted, self._view.namespace, dry_run=True)
        except ApiError as error:
            # Its name is taken, which is looked at last; right before, quotas count it with the old one.
            if error.code == 409 or (error.code == 403 and _frees_enough(str(error))):
                return
            if error.passing:
                raise
            raise Refused(f"the API server would refuse the new JobSet: {error}") from error

    async def _queued(self, jobset: Object) -> Object | None:
        """The queue's own object of a JobSet; None without a queue, or where it cannot be read."""
        if QUEUE_NAME not in labels_of(jobset):
            return None
        try:
            found, _ = await self._view.api.list(WORKLOADS, self._view.namespace)
        except ApiError as error:
            if error.passing:
                raise
            logger.warning(
                "JobSet %s: what its queue changed is not known: %s", jobset["metadata"]["name"], error
            )
            return None
        return next((one for one in found if owner_uid(one) == jobset["metadata"]["uid"]), None)

    # ------------------------------------------------------------------------------------- hot swap

    async def swap(self, name: str, command: str, host: str, end: float) -> tuple[str, str]:
        """Replace the pods of one host; the others stay, where the Jobs allow that.

        Pods of a boot that is over have ended with it, and Jobs make them again; those of a later boot stay.

        Returns:
            What was done, and the id of the host that took the place: the scheduler chooses it.  Empty where
            there is no such host, or not one.
        """
        jobset = await self._get(name, end)
        if _mark(jobset, RESET, command) is not None:
            return await self.reset(name, command, end), ""
        node, mark = name_of(host), _mark(jobset, SWAP, command)
        if was_applied(jobset, command):
            return await self._moved(jobset, mark, end)
        if mark is None and await self._hosts.has_rebooted(host):
            jobset = await self._annotate(jobset, {COMMANDS: with_command(jobset, command)})
            return f"{node} was started again, so its pods stay; {await self._placed(jobset, end)}", ""
        await self._hosts.cordon(host, command)
        found, _ = await self._view.api.list(PODS, self._view.namespace, labels=RESTART_ATTEMPT)
        jobs, _ = await self._view.api.list(JOBS, self._view.namespace)
        mine = pods.pods_of_jobset(jobset["metadata"]["uid"], jobs, found)
        if mark is None:
            there = [pod for pod in mine if pods.node_of(pod) in (node, host) and not pods.has_ended(pod)]
            owners = {job["metadata"]["uid"]: job for job in jobs}
            ways = {
                pod["metadata"]["uid"]: pods.how_to_replace(owners[owner_uid(pod)], pod)
                for pod in there
                if not is_deleting(pod)
            }
            if not all(ways.values()):
                text = await self.reset(name, command, end, at_once=True)  # its host is to be left
                return f"the whole job, because its Jobs replace no single pod: {text}", ""
            wait_s = max((pods.backoff_s(owners[owner_uid(pod)], pod) for pod in there), default=0.0)
            left_s = end - time.monotonic()
            if wait_s > min(RESET_S, left_s):
                less = f"a workload reset takes {RESET_S:g} s at most"
                why = less if wait_s > RESET_S else f"{left_s:.0f} s are left for the swap"
                raise Refused(
                    f"{name} would wait {wait_s:g} s for its pod of {node}: its Job waits twice as"
                    f" long before each replacement, and {why}"
                )
            mark = {
                "command": command,
                "wait_s": wait_s,
                "pods": {pod["metadata"]["uid"]: ways.get(pod["metadata"]["uid"], "delete") for pod in there},
                "indexes": [_index(pod) for pod in there],
            }
            jobset = await self._annotate(jobset, {SWAP: json.dumps(mark)})
        await self._remove(mark["pods"], mine, end)
        jobset = await self._get(name, end)
        # The mark stays: by it a later try of this command finds the node.
        jobset = await self._annotate(jobset, {COMMANDS: with_command(jobset, command)})
        return await self._moved(jobset, mark, end)

    async def _moved(self, jobset: Object, mark: dict[str, Any] | None, end: float) -> tuple[str, str]:
        """Wait for the pods that replace those of a mark, and say where they are."""
        if mark is None:
            return await self._placed(jobset, end), ""
        placed = await self._placed(jobset, end, without=set(mark["pods"]))
        indexes = [tuple(index) for index in mark.get("indexes", ())]
        now = {
            pods.node_of(pod) or "no node yet"
            for pod in self._view.present_pods(jobset)
            if _index(pod) in indexes and pods.is_active(pod)
        }
        node = self._view.nodes.get(next(iter(now))) if len(now) == 1 else None
        where = ", ".join(sorted(now)) or "where it was made again before"
        if mark.get("wait_s", 0.0) > pods.BACKOFF_S:
            where += f" after the {mark['wait_s']:g} s that its Job waits by now"
        return f"moved to {where}; {placed}", host_id(node) if node is not None else ""

    async def _remove(self, ways: dict[str, str], found: list[Object], end: float) -> None:
        """Have pods go, and wait until nothing runs in them any more."""
        left = {pod["metadata"]["uid"]: pod for pod in found if pod["metadata"]["uid"] in ways}
        for uid, pod in left.items():
            if is_deleting(pod) or (ways[uid] == "evict" and await self._evict(pod)):
                continue
            await self._view.api.delete(PODS, pod)
        while left:
            fresh, _ = await self._view.api.list(PODS, self._view.namespace, labels=RESTART_ATTEMPT)
            # One that has ended may be kept by its Job until it is replaced, which takes a backoff.
            there = [pod for pod in fresh if pod["metadata"]["uid"] in left and not pods.has_ended(pod)]
            if not there:
                return
            if time.monotonic() >= end:
                raise TimedOut(f"{len(there)} pods do not end")
            await self._view.end_stuck(there)
            await self._view.changes.wait(LOOK_S)

    async def _evict(self, pod: Object) -> bool:
        """Whether it was evicted; a disruption budget may be in the way for longer than a job should wait."""
        give_up = time.monotonic() + EVICT_S
        while not await self._view.api.evict(pod):
            if time.monotonic() >= give_up:
                return False
            await self._view.changes.wait(LOOK_S)
        return True

    # ------------------------------------------------------------------------------------- waiting

    async def _placed(self, jobset: Object, end: float, *, without: set[str] | None = None) -> str:
        """Wait until all pods run; an image that is pulled, or a queue, is no reason to give up.

        Args:
            without: uids of pods that do not count, whatever is seen of them.
        Raises:
            Refused: the job has failed, or pods fit on no node and none is being added.
            TimedOut: their Job has not made the replacements of `without`.
        """
        name, uid = jobset["metadata"]["name"], jobset["metadata"]["uid"]
        unplaced_at: float | None = None
        while True:
            known = self._view.jobsets.get(name)
            if known is None or _older(known, jobset):
                known = jobset
            if known["metadata"]["uid"] != uid:
                raise Refused(f"JobSet {name} was replaced by somebody else")
            ended = jobsets.end_of(known)
            if ended == "Failed":
                raise Refused(f"JobSet {name} has failed")
            present = [
                pod for pod in self._view.present_pods(known) if pod["metadata"]["uid"] not in (without or ())
            ]
            where = pods.placement(present, jobsets.pods_wanted(known))
            if ended or where.is_complete:
                return "finished" if ended else str(where)
            now = time.monotonic()
            if now >= end - self._view.times.margin_s:
                if without is not None and where.missing and not _suspended(known):
                    raise TimedOut(
                        f"{where.missing} pods of {name} are not made again yet: their Job waits before each"
                        " replacement of an index, twice as long each time"
                    )
                return f"still waiting: {_suspended(known)}{where}"
            if not where.unplaced:
                unplaced_at = None
            elif unplaced_at is None:
                unplaced_at = now
            elif now - unplaced_at >= self._view.times.unplaced_s:
                if not await self._grows(where.unplaced):
                    raise Refused(f"{len(where.unplaced)} pods of {name} fit on no node: {where.why}")
                unplaced_at = now
            await self._view.end_stuck(self._view.pods_of(uid))
            await self._view.changes.wait(min(LOOK_S, self._view.times.unplaced_s / 4))

    async def _grows(self, unplaced: tuple[str, ...]) -> bool:
        """Whether nodes are being added for pods: an autoscaler says so in their events."""
        for uid in unplaced[:8]:
            found, _ = await self._view.api.list(
                EVENTS, self._view.namespace, fields=f"involvedObject.uid={uid}"
            )
            if any(event.get("reason") == "TriggeredScaleUp" for event in found):
                return True
        return False

    # ------------------------------------------------------------------------------------- small parts

    async def _get(self, name: str, end: float) -> Object:
        """The JobSet; one that is being made again is finished first, for whatever command that was.

        Raises:
            Refused: there is none.
            TimedOut: it is not made again by `end`.
        """
        record = await self._records.find(name)
        if record is not None:
            return await self.finish(record, end)
        jobset = await self._view.api.try_get(JOBSETS, name, self._view.namespace)
        if jobset is None:
            raise Refused(f"there is no JobSet {name} in namespace {self._view.namespace}")
        return jobset

    async def _annotate(self, jobset: Object, marks: dict[str, Any]) -> Object:
        return await self._view.api.patch(JOBSETS, jobset, {"metadata": {"annotations": marks}})


def _mark(jobset: Object, name: str, command: str) -> dict[str, Any] | None:
    """The mark of this command; one of another command is of the past."""
    try:
        mark = json.loads(annotations_of(jobset).get(name, "null"))
    except ValueError:
        return None
    return mark if isinstance(mark, dict) and mark.get("command") == command else None


def _index(pod: Object) -> tuple[str, str]:
    """Job and index of a pod, which its replacements have, too, also after a restart of the JobSet."""
    return labels_of(pod).get(JOB_NAME, ""), annotations_of(pod).get(INDEX, "")


def _frees_enough(refusal: str) -> bool:
    """Whether a quota refused a JobSet only because it counts the one that is to go as well."""
    found = _QUOTA.search(refusal)
    return found is not None and int(found["used"]) <= int(found["limited"])


def _older(known: Object, read: Object) -> bool:
    """Whether a watch is behind what was read: its object is another one, or from before."""
    if known["metadata"]["uid"] != read["metadata"]["uid"]:
        return str(known["metadata"].get("creationTimestamp")) <= str(
            read["metadata"].get("creationTimestamp")
        )
    return jobsets.restarts(known) < jobsets.restarts(read)


def _suspended(jobset: Object) -> str:
    return "it is suspended, " if jobset["spec"].get("suspend") else ""
