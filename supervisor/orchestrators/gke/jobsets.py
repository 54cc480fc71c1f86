# SPDX-License-Identifier: Apache-2.0
"""What a JobSet is, how it is made again, and how it is made again at another size.  Pure."""

from __future__ import annotations

import copy
from collections.abc import Iterator

from resiliency.daemon_link import GENERATION_ENV
from supervisor.orchestrators.gke.names import (
    COMMANDS,
    GENERATION_BASE,
    QUEUE_NAME,
    QUEUE_PREFIX,
    RESET,
    RESTART_ATTEMPT,
    SWAP,
    Object,
    condition,
    labels_of,
    with_command,
)

#: Fields of the metadata that the person who made the object set; all others are the server's.
_OWN_METADATA = ("name", "namespace", "labels", "annotations", "ownerReferences")
#: Fields of a pod template that a queue fills in when it admits a job.
_QUEUE_SPEC = ("nodeSelector", "tolerations", "schedulingGates")


def restarts(jobset: Object) -> int:
    return int((jobset.get("status") or {}).get("restarts") or 0)


def replicated_jobs(jobset: Object) -> list[Object]:
    return list(jobset["spec"]["replicatedJobs"])


def pod_template(replicated: Object) -> Object:
    template: Object = replicated["template"]["spec"]["template"]
    return template


def pods_of(replicated: Object) -> int:
    """Pods of one ReplicatedJob."""
    return int(replicated.get("replicas", 1)) * pods_of_job(replicated)


def pods_of_job(replicated: Object) -> int:
    spec = replicated["template"]["spec"]
    return int(spec.get("parallelism", 1))


def pods_wanted(jobset: Object) -> int:
    return sum(pods_of(one) for one in replicated_jobs(jobset))


def end_of(jobset: Object) -> str:
    """``Completed`` or ``Failed``; empty while it runs."""
    return next((name for name in ("Completed", "Failed") if condition(jobset, name)), "")


def why_not_restartable(jobset: Object) -> str:
    """Why its own failure policy would not start all its Jobs again; empty where it would."""
    policy = jobset["spec"].get("failurePolicy") or {}
    counted = (jobset.get("status") or {}).get("restartsCountTowardsMax", restarts(jobset))
    if end_of(jobset):
        return f"it has {end_of(jobset).lower()}"
    if int(counted or 0) >= int(policy.get("maxRestarts") or 0):
        return f"its failurePolicy.maxRestarts ({int(policy.get('maxRestarts') or 0)}) are used up"
    for rule in policy.get("rules") or ():
        reasons = rule.get("onJobFailureReasons") or ["DeadlineExceeded"]
        if rule.get("action") == "FailJobSet" and "DeadlineExceeded" in reasons:
            return f"its failure policy's rule {rule.get('name', '')} fails it"
    return ""


# ---------------------------------------------------------------- generations


def generation(jobset: Object) -> int:
    """What its launchers have as RESILIENCY_JOB_GENERATION, where `generation_problem` is empty."""
    return int(f"{_base(jobset)}{restarts(jobset)}")


def _base(jobset: Object) -> str:
    templates = (pod_template(one) for one in replicated_jobs(jobset))
    bases = [(one.get("metadata") or {}).get("annotations") or {} for one in templates]
    found = max((one.get(GENERATION_BASE, "") for one in bases), key=lambda text: int(text or 0), default="")
    return found if found.isdecimal() else ""


def generation_problem(jobset: Object) -> str:
    """What is missing for steps to be seen after a restart of the JobSet; empty where nothing is."""
    launched = [one for one in replicated_jobs(jobset) if _is_supervised(one)]
    for replicated in launched:
        for container in pod_template(replicated)["spec"].get("containers") or ():
            variables = {one["name"]: one for one in container.get("env") or ()}
            text = variables.get(GENERATION_ENV, {}).get("value", "")
            fields = [
                (variables.get(name, {}).get("valueFrom") or {}).get("fieldRef", {}).get("fieldPath", "")
                for name in (GENERATION_ENV, *_variables_in(text))
            ]
            if any(RESTART_ATTEMPT in field for field in fields) and any(
                GENERATION_BASE in field for field in fields
            ):
                break
        else:
            return (
                f"ReplicatedJob {replicated['name']} does not set {GENERATION_ENV} from "
                f"{GENERATION_BASE} and {RESTART_ATTEMPT}"
            )
    return ""


def _is_supervised(replicated: Object) -> bool:
    return any("--use-supervisor" in word or "--use_supervisor" in word for word in words_of(replicated))


def words_of(replicated: Object) -> list[str]:
    """The command lines of its containers."""
    return [
        word
        for container in pod_template(replicated)["spec"].get("containers") or ()
        for word in (*(container.get("command") or ()), *(container.get("args") or ()))
    ]


def _variables_in(text: str) -> Iterator[str]:
    """Names in ``$(NAME)``."""
    for part in text.split("$(")[1:]:
        yield part.partition(")")[0]


# ---------------------------------------------------------------- made again


def made_of(jobset: Object) -> tuple[Object, ...]:
    """What of a JobSet decides how it is made again, but for the queue and the command."""
    meta = {name: jobset["metadata"][name] for name in _OWN_METADATA if name in jobset["metadata"]}
    return meta, jobset["spec"], {"restarts": restarts(jobset)}


def made_again(jobset: Object, queued: Object | None, command: str) -> Object:
    """The object to create in the place of `jobset`: what people wrote, and none of what servers added.

    Args:
        queued: the queue's Workload of it, which holds its pod templates as they were before admission.
        command: remembered as carried out on the new object.
    """
    meta, spec, _ = copy.deepcopy(made_of(jobset))
    known = meta.setdefault("annotations", {})
    for name in (RESET, SWAP):
        known.pop(name, None)
    known[COMMANDS] = with_command(jobset, command)
    made = {
        "apiVersion": jobset["apiVersion"],
        "kind": jobset["kind"],
        "metadata": meta,
        "spec": spec,
    }
    in_queue = QUEUE_NAME in labels_of(jobset)
    made["spec"].pop("suspend", None)
    if in_queue:
        made["spec"]["suspend"] = True
    base = str(generation(jobset) // 10 + 1)
    for replicated in replicated_jobs(made):
        template = pod_template(replicated)
        if in_queue:
            _take_out_queue(template, _queued_template(queued, replicated["name"]))
        own = template.setdefault("metadata", {})
        own["annotations"] = {**(own.get("annotations") or {}), GENERATION_BASE: base}
    return made


def _queued_template(queued: Object | None, name: str) -> Object | None:
    sets = ((queued or {}).get("spec") or {}).get("podSets") or []
    return next((one["template"] for one in sets if one.get("name") == name), None)


def _take_out_queue(template: Object, before: Object | None) -> None:
    """Put back what the queue changed in a pod template when it admitted the job."""
    meta = template.setdefault("metadata", {})
    if before is None:
        # It cannot be read: only what nobody but the queue writes is taken out.
        template["spec"].pop("schedulingGates", None)
        for part in ("labels", "annotations"):
            kept = {k: v for k, v in (meta.get(part) or {}).items() if not k.startswith(QUEUE_PREFIX)}
            meta[part] = kept
        return
    for part in ("labels", "annotations"):
        theirs = (before.get("metadata") or {}).get(part) or {}
        kept = {k: v for k, v in (meta.get(part) or {}).items() if not k.startswith(QUEUE_PREFIX)}
        meta[part] = {**kept, **{k: v for k, v in theirs.items() if k.startswith(QUEUE_PREFIX)}}
    for field in _QUEUE_SPEC:
        template["spec"].pop(field, None)
        if (before.get("spec") or {}).get(field):
            template["spec"][field] = copy.deepcopy(before["spec"][field])
