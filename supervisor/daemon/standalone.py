# SPDX-License-Identifier: Apache-2.0
"""What the annotations of a pod say about its job.  Pure.

A text that cannot be used costs a sentence and nothing else: the others hold, and in its place the value that
does least.
"""

from __future__ import annotations

from typing import Any

from supervisor.plain import InvalidValue
from supervisor.values import PodFacts, WorkloadInfo

#: Annotation: the field of `WorkloadInfo` that it is.
_FIELDS = {
    "container-name": "container",
    "job-name": "job",
    "max-workload-restarts": "max_workload_restarts",
    "max-in-job-restarts": "max_in_job_restarts",
    "workload-downtime-threshold-s": "downtime_threshold_s",
    "container-termination-threshold-s": "termination_threshold_s",
    "enable-workload-scaling": "scaling",
    "num-nodes-per-dp": "nodes_per_replica",
    "min-num-dp-replicas": "min_replicas",
    "max-num-dp-replicas": "max_replicas",
}
#: Not more than a signed number of 32 bits, as a JobSet takes it, and not longer than a year.
_MOST, _MOST_S = 2**31 - 1, 366 * 86_400.0


def read_annotations(pod: PodFacts) -> tuple[WorkloadInfo, tuple[str, ...]]:
    """The job of a pod, and a sentence for each annotation that is not used."""
    fields: dict[str, Any] = {}
    sentences: list[str] = []
    for annotation in pod.annotations:
        name, _, text = annotation.partition("=")
        field = _FIELDS.get(name)
        if field is None:
            continue
        try:
            fields[field] = _value(field, text)
            WorkloadInfo(workload=pod.workload, **{field: fields[field]} if field != "scaling" else {})
        except (KeyError, ValueError, InvalidValue):
            fields.pop(field, None)
            sentences.append(
                f"annotation supervisor/{name} must be {_range(field)}, found {text[:80]!r}; ignored"
            )
    per_replica = fields.get("nodes_per_replica", pod.hosts)
    if pod.hosts % per_replica:
        sentences.append(
            f"annotation supervisor/num-nodes-per-dp ({per_replica}) must divide the {pod.hosts} pods of "
            f"{pod.workload}; ignored"
        )
        per_replica = pod.hosts
    replicas = pod.hosts // per_replica
    low, high = fields.get("min_replicas", replicas), fields.get("max_replicas", replicas)
    if fields.get("scaling") and not low <= replicas <= high:
        sentences.append(
            f"annotation supervisor/enable-workload-scaling needs min-num-dp-replicas ({low}) <= {replicas} "
            f"<= max-num-dp-replicas ({high}); ignored"
        )
        fields["scaling"] = False
    fields.update(nodes_per_replica=per_replica, replicas=replicas, min_replicas=low, max_replicas=high)
    return WorkloadInfo(workload=pod.workload, namespace=pod.namespace, **fields), tuple(sentences)


def _value(field: str, text: str) -> object:
    if field in ("container", "job"):
        if not text:
            raise ValueError(text)
        return text
    if field == "scaling":
        return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
    if field.endswith("_s"):
        return _within(float(text), 0.0, _MOST_S)
    least = 0 if field.startswith("max_") and field != "max_replicas" else 1
    if not text.isascii() or not text.isdecimal():
        raise ValueError(text)
    return _within(int(text[:20]), least, _MOST)


def _within(value: Any, least: float, most: float) -> Any:
    if not least <= value <= most:  # also refuses nan
        raise ValueError(value)
    return value


def _range(field: str) -> str:
    if field in ("container", "job"):
        return "a name without a space"
    if field == "scaling":
        return "true or false"
    if field.endswith("_s"):
        return "seconds from 0 to a year"
    least = 0 if field.startswith("max_") and field != "max_replicas" else 1
    return f"a whole number from {least} on"
