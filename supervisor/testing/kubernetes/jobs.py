# SPDX-License-Identifier: Apache-2.0
"""The controllers of Jobs and JobSets, as far as a training job meets them.

Each function looks at one object and does what is due; nothing is remembered between two calls.
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Iterable
from datetime import datetime

from supervisor.testing.kubernetes.kinds import Object, labels_of
from supervisor.testing.kubernetes.store import Store, stamp

PREFIX = "jobset.sigs.k8s.io"
ATTEMPT = f"{PREFIX}/restart-attempt"
INDEX = "batch.kubernetes.io/job-completion-index"
FAILURES = "batch.kubernetes.io/job-index-failure-count"
TRACKING = "batch.kubernetes.io/job-tracking"


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
        if status["restarts"] < (spec.get("failurePolicy") or {}).get("maxRestarts", 0):
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
    _set_status(store, "jobsets", jobset, status)


def _wanted_jobs(jobset: Object, attempt: str) -> list[Object]:
    meta, made = jobset["metadata"], []
    for replicated in jobset["spec"]["replicatedJobs"]:
        for number in range(replicated.get("replicas", 1)):
            job = copy.deepcopy(replicated["template"])
            labels = {
                f"{PREFIX}/jobset-name": meta["name"],
                f"{PREFIX}/jobset-uid": meta["uid"],
                f"{PREFIX}/replicatedjob-name": replicated["name"],
                f"{PREFIX}/job-index": str(number),
                ATTEMPT: attempt,
            }
            name = f"{meta['name']}-{replicated['name']}-{number}"
            own = job.setdefault("metadata", {})
            own.update(name=name, namespace=meta["namespace"], ownerReferences=[_owner(jobset)])
            own["labels"] = {**(own.get("labels") or {}), **labels}
            job["spec"]["suspend"] = bool(jobset["spec"].get("suspend"))
            pod = job["spec"]["template"].setdefault("metadata", {})
            pod["labels"] = {**(pod.get("labels") or {}), **labels}
            made.append(job)
    return made


def reconcile_job(store: Store, job: Object) -> None:
    """Make a pod for each index without one, count those that ended, fail where too many did."""
    meta, spec = job["metadata"], job["spec"]
    status = copy.deepcopy(job.get("status") or {})
    pods = store.owned("pods", meta["uid"])
    over = finished(job) or "deletionTimestamp" in meta
    status.setdefault("succeeded", 0)
    status.setdefault("failed", 0)
    done = set(filter(None, status.get("completedIndexes", "").split(",")))
    failures = dict(status.get("failuresByIndex") or {})
    for pod in pods:
        index = labels_of(pod)[INDEX]
        if TRACKING not in pod["metadata"].get("finalizers", ()):
            continue
        phase, leaving = pod["status"]["phase"], "deletionTimestamp" in pod["metadata"]
        if phase == "Succeeded":
            done.add(index)
        elif phase == "Failed" or (leaving and not (over or spec.get("suspend"))):
            if not over and not _is_ignored(spec, pod):
                status["failed"] += 1
                failures[index] = failures.get(index, 0) + 1
        elif not leaving:
            continue
        pod["metadata"]["finalizers"].remove(TRACKING)
        store.update("pods", pod, meta["namespace"], checked=False)
    status.update(
        completedIndexes=",".join(sorted(done, key=int)), succeeded=len(done), failuresByIndex=failures
    )
    pods = store.owned("pods", meta["uid"])
    active = [pod for pod in pods if _is_active(pod)]
    if over or spec.get("suspend"):
        _delete_all(store, active)
    else:
        if "startTime" not in status:
            status["startTime"] = stamp(store.clock())
        reason = _why_failed(store, spec, status)
        if reason:
            status["conditions"] = [{"type": "Failed", "status": "True", "reason": reason}]
            _delete_all(store, active)
        elif len(done) == spec.get("completions", 1):
            status["conditions"] = [{"type": "Complete", "status": "True"}]
        else:
            _make_pods(store, job, pods, done, failures)
    _set_status(store, "jobs", job, status)


def release_orphans(store: Store) -> None:
    """Let pods go whose Job is gone: nobody counts them any more."""
    jobs = {job["metadata"]["uid"] for job in store.all("jobs")}
    for pod in store.all("pods"):
        meta = pod["metadata"]
        owners = {owner["uid"] for owner in meta.get("ownerReferences") or ()}
        if TRACKING in meta.get("finalizers", ()) and not owners & jobs:
            meta["finalizers"].remove(TRACKING)
            store.update("pods", pod, meta["namespace"], checked=False)


def _why_failed(store: Store, spec: Object, status: Object) -> str:
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
    store: Store, job: Object, pods: list[Object], done: set[str], failures: dict[str, int]
) -> None:
    spec, meta = job["spec"], job["metadata"]
    waits_for_gone = (
        spec.get("podReplacementPolicy", "Failed" if "podFailurePolicy" in spec else "") == "Failed"
    )
    held = {
        labels_of(pod)[INDEX] for pod in pods if _is_active(pod) or (waits_for_gone and not _has_ended(pod))
    }
    for number in range(spec.get("completions", 1)):
        index = str(number)
        if index in done or index in held:
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
        own["annotations"] = {**(own.get("annotations") or {}), **marks}
        own["ownerReferences"] = [_owner(job)]
        own["finalizers"] = [TRACKING]
        pod["status"] = {"phase": "Pending", "conditions": []}
        store.create("pods", pod, meta["namespace"])


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
