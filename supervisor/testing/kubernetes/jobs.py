# SPDX-License-Identifier: Apache-2.0
"""The controllers of Jobs and JobSets, as far as a training job meets them.

Each function looks at one object and does what is due.  The rules were measured against Kubernetes 1.36:

1. With `podReplacementPolicy: Failed`, or with a `podFailurePolicy`, a pod that is deleted counts, and loses
   the finalizer `batch.kubernetes.io/job-tracking`, in phase Failed or Succeeded only, or when its Job has
   FailureTarget, Failed or Complete, or is being deleted.  A kubelet sets that phase, or the pod collector,
   or a patch of the pod's status: a deletion by force does not.
2. A pod with that finalizer stays after a deletion by force: grace 0, deletionTimestamp now, no DELETED.
3. With `TerminatingOrFailed` a pod counts as failed from its deletion on, and the finalizer goes once the
   replacement is there.
4. Before each replacement the Job controller waits: 10 s x 2^(failures - 1) from the end of the pod, 10 min
   at most.  A new Job begins at 0.  Failures that a podFailurePolicy ignores cost 10 s, then 20 s each; with
   a limit for each index they count as the others do.  Pods carry both counts of their index.
5. A Job that fails gets FailureTarget first, and Failed when none of its pods terminates any more.  JobSets
   act on Failed.
6. Pods of a Node object that is gone are failed, with the condition DisruptionTarget, and deleted by the pod
   collector 60 s later; so are, after 8.5 s, pods that terminate on a silent node with the taint
   ``node.kubernetes.io/out-of-service`` (`hosts.collect`).
7. A living kubelet sets phase Failed before it deletes a pod, or Succeeded where its containers have ended
   with 0 after SIGTERM, which completes the index (`hosts.run_pods`; *read*, since Kubernetes 1.27).
8. A pod that ends with an exit code for which the podFailurePolicy has `FailJob` fails its Job at once, with
   the reason PodFailurePolicy; a JobSet whose failure policy has `FailJobSet` for that reason is not
   restarted (*read*).
9. A JobSet counts the restarts that its failure policy limits apart, and marks its Jobs and their pods with
   twelve labels (of one group here); what is left out of it, its webhook fills in (`with_defaults`).
"""

from __future__ import annotations

import copy
import hashlib
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime

from supervisor.testing.kubernetes.kinds import Object, labels_of
from supervisor.testing.kubernetes.store import Store, stamp
from supervisor.testing.kubernetes.waits import Waits

PREFIX = "jobset.sigs.k8s.io"
ATTEMPT = f"{PREFIX}/restart-attempt"
INDEX = "batch.kubernetes.io/job-completion-index"
FAILURES = "batch.kubernetes.io/job-index-failure-count"
IGNORED = "batch.kubernetes.io/job-index-ignored-failure-count"
TRACKING = "batch.kubernetes.io/job-tracking"


@dataclass
class JobMemory:
    """What the Job controller remembers.

    Attributes:
        counted: uids of pods that counted as failed while they still had the finalizer.
        failures: how many there were, and the end of the last, by uid of the Job and index.
        ignored: how many of them a podFailurePolicy ignored.
    """

    waits: Waits
    counted: set[str] = field(default_factory=set)
    failures: dict[tuple[str, str], tuple[int, float]] = field(default_factory=dict)
    ignored: dict[tuple[str, str], int] = field(default_factory=dict)

    def note_failure(self, key: tuple[str, str], now: float, *, ignored: bool) -> None:
        number = self.failures.get(key, (0, 0.0))[0] + 1
        by_index = bool(key[1])
        self.failures[key] = (number if by_index or not ignored else min(number, 2), now)
        self.ignored[key] = self.ignored.get(key, 0) + ignored

    def replaced_at(self, key: tuple[str, str]) -> float:
        """When the backoff of an index is over (rule 4)."""
        number, ended_at = self.failures.get(key, (0, 0.0))
        if not number:
            return ended_at
        return ended_at + min(self.waits.backoff_s * 2.0 ** (number - 1), self.waits.backoff_limit_s)


def reconcile_jobset(store: Store, jobset: Object) -> None:
    """Make its Jobs; restart all of them where one failed, and the failure policy has a restart left."""
    meta, spec = jobset["metadata"], jobset["spec"]
    status = copy.deepcopy(jobset.get("status") or {"restarts": 0})
    if "deletionTimestamp" in meta or finished(jobset):
        return
    jobs = store.owned("jobs", meta["uid"])
    attempt = str(status["restarts"])
    current = [job for job in jobs if labels_of(job).get(ATTEMPT) == attempt]
    for job in jobs:
        if job not in current and "deletionTimestamp" not in job["metadata"]:
            _delete(store, "jobs", job, foreground=True)
    failed = [job for job in current if _condition(job, "Failed")]
    wanted = _wanted_jobs(jobset, attempt)
    if failed:
        policy = spec.get("failurePolicy") or {}
        if status["restarts"] < policy.get("maxRestarts", 0) and not _ends_jobset(policy, failed):
            status["restarts"] += 1
        else:
            status["conditions"] = [{"type": "Failed", "status": "True", "reason": "FailedJobs"}]
            for job in current:
                if not finished(job) and "deletionTimestamp" not in job["metadata"]:
                    _delete(store, "jobs", job, foreground=True)
    elif len(current) == len(wanted) and all(_condition(job, "Complete") for job in current):
        status["conditions"] = [{"type": "Completed", "status": "True", "reason": "AllJobsCompleted"}]
    else:
        for job in wanted:
            known = store.find("jobs", job["metadata"]["name"], meta["namespace"])
            if known is None:
                store.create("jobs", job, meta["namespace"])
            elif known["spec"].get("suspend", False) != job["spec"]["suspend"] and known in current:
                known["spec"]["suspend"] = job["spec"]["suspend"]
                store.update("jobs", known, meta["namespace"], checked=False)
    # Of restarts, a rule of the failure policy may except some; there is none here that does.
    status["restartsCountTowardsMax"] = status["restarts"]
    # Each change of a pod is one of its JobSet, too: what was read a moment ago is old.
    status["replicatedJobsStatus"] = [
        {
            "name": one["name"],
            **{
                count: sum(
                    (job.get("status") or {}).get(count, 0)
                    for job in current
                    if labels_of(job)[f"{PREFIX}/replicatedjob-name"] == one["name"]
                )
                for count in ("active", "failed", "ready", "succeeded")
            },
        }
        for one in spec["replicatedJobs"]
    ]
    _set_status(store, "jobsets", jobset, status)


def with_defaults(jobset: Object) -> Object:
    """The object that the JobSet webhook and its schema make of one that is created by a call (rule 9)."""
    made = copy.deepcopy(jobset)
    spec = made["spec"]
    spec.setdefault("network", {"enableDNSHostnames": True, "publishNotReadyAddresses": True})
    spec.setdefault("successPolicy", {"operator": "All"})
    spec.setdefault("startupPolicy", {"startupPolicyOrder": "AnyOrder"})
    for replicated in spec["replicatedJobs"]:
        replicated.setdefault("replicas", 1)
        replicated.setdefault("groupName", "default")
        job = replicated["template"]["spec"]
        job.setdefault("completionMode", "Indexed")
        job["template"]["spec"].setdefault("restartPolicy", "OnFailure")
    return made


def _wanted_jobs(jobset: Object, attempt: str) -> list[Object]:
    meta, made = jobset["metadata"], list[Object]()
    sizes = [one.get("replicas", 1) for one in jobset["spec"]["replicatedJobs"]]
    for place, replicated in enumerate(jobset["spec"]["replicatedJobs"]):
        for number in range(sizes[place]):
            job = copy.deepcopy(replicated["template"])
            labels = {
                f"{PREFIX}/jobset-name": meta["name"],
                f"{PREFIX}/jobset-uid": meta["uid"],
                f"{PREFIX}/replicatedjob-name": replicated["name"],
                f"{PREFIX}/replicatedjob-replicas": str(sizes[place]),
                f"{PREFIX}/global-replicas": str(sum(sizes)),
                f"{PREFIX}/group-name": replicated.get("groupName", "default"),
                f"{PREFIX}/group-replicas": str(sum(sizes)),
                f"{PREFIX}/job-index": str(number),
                f"{PREFIX}/job-global-index": str(len(made)),
                f"{PREFIX}/job-group-index": str(len(made)),
                ATTEMPT: attempt,
            }
            name = f"{meta['name']}-{replicated['name']}-{number}"
            key = hashlib.sha256(f"{meta['namespace']}/{name}".encode()).hexdigest()
            labels[f"{PREFIX}/job-key"] = key[:40]
            own = job.setdefault("metadata", {})
            own.update(name=name, namespace=meta["namespace"], ownerReferences=[_owner(jobset)])
            own["labels"] = {**(own.get("labels") or {}), **labels}
            job["spec"]["suspend"] = bool(jobset["spec"].get("suspend"))
            pod = job["spec"]["template"].setdefault("metadata", {})
            pod["labels"] = {**(pod.get("labels") or {}), **labels}
            made.append(job)
    return made


def reconcile_job(store: Store, job: Object, memory: JobMemory, now: float) -> float | None:
    """Make a pod for each index without one, count those that ended, fail where too many did.

    Returns:
        When time alone will change something.
    """
    meta, spec = job["metadata"], job["spec"]
    status = copy.deepcopy(job.get("status") or {})
    pods = store.owned("pods", meta["uid"])
    fails = _condition(job, "FailureTarget") and not finished(job)
    over = finished(job) or fails or "deletionTimestamp" in meta
    status.setdefault("succeeded", 0)
    status.setdefault("failed", 0)
    done = set(filter(None, status.get("completedIndexes", "").split(",")))
    failures = dict(status.get("failuresByIndex") or {})
    replaced = {labels_of(pod)[INDEX] for pod in pods if _is_active(pod)}
    for pod in pods:
        index, uid = labels_of(pod)[INDEX], pod["metadata"]["uid"]
        if TRACKING not in pod["metadata"].get("finalizers", ()):
            continue
        phase, leaving = pod["status"]["phase"], "deletionTimestamp" in pod["metadata"]
        idle = over or bool(spec.get("suspend"))
        if phase == "Succeeded":
            done.add(index)
        elif phase == "Failed" or (leaving and not idle and not _waits_for_phase(spec)):
            if not over and uid not in memory.counted:
                memory.counted.add(uid)
                ignored = _is_ignored(spec, pod)
                memory.note_failure(_backoff_of(job, index), now, ignored=ignored)
                if not ignored:
                    status["failed"] += 1
                    failures[index] = failures.get(index, 0) + 1
            if phase != "Failed" and index not in replaced:
                continue  # rule 3
        elif not (leaving and idle):
            continue  # rule 1
        pod["metadata"]["finalizers"].remove(TRACKING)
        store.update("pods", pod, meta["namespace"], checked=False)
    status.update(
        completedIndexes=",".join(sorted(done, key=int)), succeeded=len(done), failuresByIndex=failures
    )
    pods = store.owned("pods", meta["uid"])
    active = [pod for pod in pods if _is_active(pod)]
    status.update(active=len(active), ready=sum(pod["status"]["phase"] == "Running" for pod in active))
    wake = None
    if over or spec.get("suspend"):
        _delete_all(store, active)
        if fails and all(_has_ended(pod) for pod in store.owned("pods", meta["uid"])):
            status["conditions"].append({**status["conditions"][0], "type": "Failed"})  # rule 5
    else:
        if "startTime" not in status:
            status["startTime"] = stamp(store.clock())
        reason = _why_failed(store, spec, status, pods)
        if reason:
            status["conditions"] = [{"type": "FailureTarget", "status": "True", "reason": reason}]
            _delete_all(store, active)
        elif len(done) == spec.get("completions", 1):
            status["conditions"] = [{"type": "Complete", "status": "True"}]
        else:
            wake = _make_pods(store, job, pods, done, failures, memory, now)
    _set_status(store, "jobs", job, status)
    return wake


def _backoff_of(job: Object, index: str) -> tuple[str, str]:
    """Failures of one index count for it alone where the Job counts them by index."""
    return job["metadata"]["uid"], index if job["spec"].get("backoffLimitPerIndex") is not None else ""


def _waits_for_phase(spec: Object) -> bool:
    """Whether its pods are replaced in phase Failed only; the API's default with a podFailurePolicy."""
    default = "Failed" if "podFailurePolicy" in spec else "TerminatingOrFailed"
    return bool(spec.get("podReplacementPolicy", default) == "Failed")


def release_orphans(store: Store) -> None:
    """Let pods go whose Job is gone: nobody counts them any more."""
    jobs = {job["metadata"]["uid"] for job in store.all("jobs")}
    for pod in store.all("pods"):
        meta = pod["metadata"]
        owners = {owner["uid"] for owner in meta.get("ownerReferences") or ()}
        if TRACKING in meta.get("finalizers", ()) and not owners & jobs:
            meta["finalizers"].remove(TRACKING)
            store.update("pods", pod, meta["namespace"], checked=False)


def _ends_jobset(policy: Object, failed: list[Object]) -> bool:
    """True where the first rule for the reason of a failed Job fails its JobSet (rule 8)."""
    reasons = {job["status"]["conditions"][0]["reason"] for job in failed}
    for rule in policy.get("rules") or ():
        if reasons & set(rule.get("onJobFailureReasons") or reasons):
            return bool(rule["action"] == "FailJobSet")
    return False


def _fails_job(spec: Object, pod: Object) -> bool:
    """True where it has ended with an exit code that fails its Job (rule 8)."""
    rules = [one for one in (spec.get("podFailurePolicy") or {}).get("rules") or () if one.get("onExitCodes")]
    codes = {code for rule in rules if rule["action"] == "FailJob" for code in rule["onExitCodes"]["values"]}
    states = (one.get("state") or {} for one in pod["status"].get("containerStatuses") or ())
    return any((state.get("terminated") or {}).get("exitCode") in codes for state in states)


def _why_failed(store: Store, spec: Object, status: Object, pods: list[Object]) -> str:
    if any(_fails_job(spec, pod) for pod in pods):
        return "PodFailurePolicy"
    deadline = spec.get("activeDeadlineSeconds")
    # With the second that a time stamp leaves out.
    if deadline is not None and store.clock() >= _seconds(status["startTime"]) + deadline:
        return "DeadlineExceeded"
    per_index = spec.get("backoffLimitPerIndex")
    if per_index is not None:
        failed = any(count > per_index for count in status["failuresByIndex"].values())
        return "FailedIndexes" if failed else ""
    return "BackoffLimitExceeded" if status["failed"] > spec.get("backoffLimit", 6) else ""


def _make_pods(
    store: Store,
    job: Object,
    pods: list[Object],
    done: set[str],
    failures: dict[str, int],
    memory: JobMemory,
    now: float,
) -> float | None:
    spec, meta = job["spec"], job["metadata"]
    waits, wakes = _waits_for_phase(spec), []
    held = {labels_of(pod)[INDEX] for pod in pods if _is_active(pod) or (waits and not _has_ended(pod))}
    for number in range(spec.get("completions", 1)):
        index = str(number)
        if index in done or index in held:
            continue
        due = memory.replaced_at(_backoff_of(job, index))
        if now < due:
            wakes.append(due)
            continue
        pod = copy.deepcopy(spec["template"])
        own = pod.setdefault("metadata", {})
        own["name"] = f"{meta['name']}-{index}-{secrets.token_hex(3)[:5]}"
        own["labels"] = {
            **(own.get("labels") or {}),
            INDEX: index,
            "batch.kubernetes.io/job-name": meta["name"],
        }
        marks = {INDEX: index, FAILURES: str(failures.get(index, 0))}
        ignored = memory.ignored.get((meta["uid"], index))
        marks |= {IGNORED: str(ignored)} if ignored else {}
        own["annotations"] = {**(own.get("annotations") or {}), **marks}
        own["ownerReferences"] = [_owner(job)]
        own["finalizers"] = [TRACKING]
        pod["status"] = {"phase": "Pending", "conditions": []}
        store.create("pods", pod, meta["namespace"])
    return min(wakes, default=None)


def _is_ignored(spec: Object, pod: Object) -> bool:
    rules = (spec.get("podFailurePolicy") or {}).get("rules") or []
    ignored = {
        condition["type"]
        for rule in rules
        if rule["action"] == "Ignore"
        for condition in rule.get("onPodConditions") or ()
    }
    return any(one["type"] in ignored for one in pod["status"].get("conditions") or ())


def finished(thing: Object) -> bool:
    return any(_condition(thing, name) for name in ("Complete", "Completed", "Failed"))


def _condition(thing: Object, name: str) -> bool:
    conditions = (thing.get("status") or {}).get("conditions") or []
    return any(one["type"] == name and one["status"] == "True" for one in conditions)


def _has_ended(pod: Object) -> bool:
    return pod["status"]["phase"] in ("Succeeded", "Failed")


def _is_active(pod: Object) -> bool:
    return not _has_ended(pod) and "deletionTimestamp" not in pod["metadata"]


def _delete_all(store: Store, pods: Iterable[Object]) -> None:
    for pod in pods:
        _delete(store, "pods", pod)


def _delete(store: Store, plural: str, thing: Object, *, foreground: bool = False) -> None:
    meta = thing["metadata"]
    store.delete(plural, meta["name"], meta.get("namespace", ""), uid=meta["uid"], foreground=foreground)


def _set_status(store: Store, plural: str, thing: Object, status: Object) -> None:
    if status == thing.get("status"):
        return
    fresh = store.find(plural, thing["metadata"]["name"], thing["metadata"]["namespace"])
    if fresh is not None and fresh["metadata"]["uid"] == thing["metadata"]["uid"]:
        fresh["status"] = status
        store.update(plural, fresh, fresh["metadata"]["namespace"], checked=False)


def _owner(thing: Object) -> Object:
    meta = thing["metadata"]
    return {
        "apiVersion": thing["apiVersion"],
        "kind": thing["kind"],
        "name": meta["name"],
        "uid": meta["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
