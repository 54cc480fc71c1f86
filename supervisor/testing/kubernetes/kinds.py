# SPDX-License-Identifier: Apache-2.0
"""The kinds of objects that the API server has, and its refusals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]

_BUILT_IN = ("", "batch", "coordination.k8s.io", "policy")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind; `plural` is its name in paths and rights."""

    plural: str
    kind: str
    group: str = ""
    version: str = "v1"
    namespaced: bool = True

    @property
    def is_built_in(self) -> bool:
        """Not of a CustomResourceDefinition: items of its lists have neither kind nor apiVersion."""
        return self.group in _BUILT_IN

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version


KINDS = {
    kind.plural: kind
    for kind in (
        Kind(plural="nodes", kind="Node", namespaced=False),
        Kind(plural="pods", kind="Pod"),
        Kind(plural="configmaps", kind="ConfigMap"),
        Kind(plural="events", kind="Event"),
        Kind(plural="resourcequotas", kind="ResourceQuota"),
        Kind(plural="jobs", kind="Job", group="batch"),
        Kind(plural="leases", kind="Lease", group="coordination.k8s.io"),
        Kind(plural="poddisruptionbudgets", kind="PodDisruptionBudget", group="policy"),
        Kind(plural="jobsets", kind="JobSet", group="jobset.x-k8s.io", version="v1alpha2"),
        Kind(plural="workloads", kind="Workload", group="kueue.x-k8s.io", version="v1beta1"),
    )
}

_REASONS = {
    400: "BadRequest",
    403: "Forbidden",
    404: "NotFound",
    405: "MethodNotAllowed",
    409: "Conflict",
    410: "Expired",
    422: "Invalid",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
}


class Refusal(Exception):
    """An answer that is no success."""

    def __init__(
        self, code: int, message: str, *, reason: str = "", retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s
        self.status: Object = {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "message": message,
            "reason": reason or _REASONS.get(code, "Unknown"),
            "code": code,
        }


def gone(message: str) -> Refusal:
    """A version, or a page of a list, that the server no longer has."""
    return Refusal(410, message)


def not_found(kind: Kind, name: str) -> Refusal:
    return Refusal(404, f'{kind.plural}.{kind.group or "core"} "{name}" not found')


def labels_of(thing: Object) -> dict[str, str]:
    return thing["metadata"].get("labels") or {}


def selects(selector: str, labels: dict[str, str]) -> bool:
    """Whether a label selector of equalities and existences holds."""
    for term in filter(None, selector.split(",")):
        key, equals, value = term.replace("==", "=").partition("=")
        if key not in labels or (equals and labels[key] != value):
            return False
    return True
