# SPDX-License-Identifier: Apache-2.0
"""Labels and annotations: those of Kubernetes and JobSet that are read, and our own."""

from __future__ import annotations

from datetime import datetime
from typing import Any

Object = dict[str, Any]

JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"
RESTART_ATTEMPT = "jobset.sigs.k8s.io/restart-attempt"
INDEX = "batch.kubernetes.io/job-completion-index"
INDEX_FAILURES = "batch.kubernetes.io/job-index-failure-count"
IGNORED_FAILURES = "batch.kubernetes.io/job-index-ignored-failure-count"
JOB_NAME = "batch.kubernetes.io/job-name"
QUEUE_NAME, QUEUE_PREFIX = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/"
MIRROR = "kubernetes.io/config.mirror"

#: Ids of commands that were carried out on an object, newest last.
COMMANDS = "supervisor/commands"
#: On a JobSet: the command under way, and what it was begun with.
RESET, SWAP = "supervisor/reset", "supervisor/swap"
#: On a JobSet that was resized: whether its Jobs or their pods become more and fewer.
SCALES = "supervisor/scales"
#: On a node: the command that cordoned it, by its id; a person's after this word.
CORDONED_BY, BY_PERSON = "supervisor/cordoned-by", "person/"
#: On a node: the drain that found a job on it.
DRAINED = "supervisor/drained"
#: On pod templates: hosts of one data-parallel replica; also written where the size of a job was a default.
HOSTS_PER_REPLICA = "supervisor/num-nodes-per-dp"
#: On pod templates: goes before the restart attempt in RESILIENCY_JOB_GENERATION.
GENERATION_BASE = "supervisor/generation-base"

#: Ids that an object remembers; the controller repeats none that is older.
REMEMBERED = 32


def annotations_of(thing: Object) -> dict[str, str]:
    return thing["metadata"].get("annotations") or {}


def labels_of(thing: Object) -> dict[str, str]:
    return thing["metadata"].get("labels") or {}


def owner_uid(thing: Object) -> str:
    """Uid of the controller of an object; empty where it has none."""
    owners = thing["metadata"].get("ownerReferences") or []
    return next((str(owner["uid"]) for owner in owners if owner.get("controller")), "")


def is_deleting(thing: Object) -> bool:
    return "deletionTimestamp" in thing["metadata"]


def condition(thing: Object, name: str, status: str = "True") -> Object | None:
    """The condition of an object, where it has this status."""
    found = (thing.get("status") or {}).get("conditions") or []
    return next((one for one in found if one.get("type") == name and one.get("status") == status), None)


def seconds_of(text: str) -> float:
    """A moment as the API writes it, since the epoch."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def was_applied(thing: Object, command: str) -> bool:
    return command in annotations_of(thing).get(COMMANDS, "").split(",")


def with_command(thing: Object, command: str) -> str:
    """The value of COMMANDS with one more id."""
    known = [one for one in annotations_of(thing).get(COMMANDS, "").split(",") if one and one != command]
    return ",".join([*known, command][-REMEMBERED:])
