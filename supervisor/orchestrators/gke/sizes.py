# SPDX-License-Identifier: Apache-2.0
"""A JobSet at another number of data-parallel replicas: all that names its size is changed.  Pure.

The size of a job stands in many places: ReplicatedJob.replicas, parallelism and completions, environment
variables, words of command lines.  A job whose parts disagree waits in its rendezvous for ever.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass

from supervisor.orchestrators.gke.jobsets import pod_template, pods_of, pods_of_job, replicated_jobs, words_of
from supervisor.orchestrators.gke.names import HOSTS_PER_REPLICA, SCALES, Object, annotations_of

#: Variables and flags that hold a number of hosts, of replicas, of ranks; flags with dashes or underscores.
_HOSTS = ("NNODES", "PET_NNODES", "NUM_NODES", "NODE_COUNT", "JOB_COMPLETIONS")
_REPLICAS = ("NUM_DP_REPLICAS",)
_RANKS = ("WORLD_SIZE", "NUM_PROCESSES")
_HOST_FLAGS, _REPLICA_FLAGS = ("nnodes", "num-nodes"), ("num-dp-replicas",)
_RANK_FLAGS = ("world-size", "num-processes")


#: Hosts of one replica of a job of so many hosts that does not say; 0 where that is no whole number.
HostsPerReplica = Callable[[int], int]


class CannotResize(Exception):
    """The size of the JobSet cannot be changed; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large a job is.

    Attributes:
        job: name of the ReplicatedJob whose pods train.
    """

    job: str
    replicas: int
    hosts: int

    @property
    def hosts_per_replica(self) -> int:
        return self.hosts // self.replicas


def one_host(hosts: int) -> int:
    """Each host is a replica."""
    del hosts
    return 1


def size_of(jobset: Object, default: HostsPerReplica = one_host) -> Size:
    """The present size, by what the JobSet says or else by `default`.

    Raises:
        CannotResize: the JobSet contradicts itself.
    """
    replicated = trained_by(jobset)
    hosts = pods_of(replicated)
    replicas = _number(replicated, _REPLICAS, _REPLICA_FLAGS)
    if not replicas:
        per = _named_per_replica(replicated) or default(hosts)
        if not per:
            raise CannotResize(
                f"{replicated['name']} names no size, and its {hosts} hosts are no whole number of replicas"
                " by NUM_NODES_PER_DP or NUM_DP_REPLICAS"
            )
        replicas = hosts // per
    if not replicas or hosts % replicas:
        raise CannotResize(f"{replicated['name']} has {hosts} hosts for {replicas} replicas")
    return Size(job=replicated["name"], replicas=replicas, hosts=hosts)


def _named_per_replica(replicated: Object) -> int:
    """Hosts of a replica as the job says; 0 where it does not."""
    text = (pod_template(replicated).get("metadata") or {}).get("annotations", {}).get(HOSTS_PER_REPLICA, "")
    annotated = int(text) if text.isascii() and text.isdecimal() else 0
    return _number(replicated, ("NUM_NODES_PER_DP",), ("num-nodes-per-dp",)) or annotated


def trained_by(jobset: Object) -> Object:
    """The ReplicatedJob that trains: the one with the launcher, else the one with most pods."""
    found = replicated_jobs(jobset)
    for flag in ("use-supervisor", "num-dp-replicas", "nnodes"):
        for one in found:
            if any(_flag(flag).search(word) for word in words_of(one)):
                return one
    return max(found, key=pods_of)


def resized(jobset: Object, size: Size, replicas: int) -> tuple[Object, tuple[str, ...]]:
    """`jobset` at `replicas`, and what names a size that is not the job's and so was left.

    Raises:
        CannotResize: its Jobs cannot have that many pods.
    """
    made = copy.deepcopy(jobset)
    wanted = replicas * size.hosts_per_replica
    (trained,) = [one for one in replicated_jobs(made) if one["name"] == size.job]
    # Of a job with one pod nothing else tells how it grows.
    default = "jobs" if int(trained.get("replicas", 1)) > 1 else "pods"
    scales = annotations_of(made).get(SCALES, default)
    made["metadata"]["annotations"] = {**annotations_of(made), SCALES: scales}
    _set_pods(trained, wanted, scales)
    if not (_named_per_replica(trained) or _number(trained, _REPLICAS, _REPLICA_FLAGS)):
        # The default was for the size that it had.
        metadata = pod_template(trained).setdefault("metadata", {})
        metadata["annotations"] = {
            **(metadata.get("annotations") or {}),
            HOSTS_PER_REPLICA: str(size.hosts_per_replica),
        }
    left: list[str] = []
    for replicated in replicated_jobs(made):
        spec = pod_template(replicated)["spec"]
        for container in (*(spec.get("containers") or ()), *(spec.get("initContainers") or ())):
            _set_variables(container, size, replicas, wanted, left)
            for field in ("command", "args"):
                if container.get(field):
                    container[field] = _new_words(container[field], size, replicas, wanted, left)
    return made, tuple(left)


def _set_pods(replicated: Object, wanted: int, scales: str) -> None:
    """Whole Jobs more or less, or pods of the one Job."""
    per_job, spec = pods_of_job(replicated), replicated["template"]["spec"]
    if scales == "jobs":
        if wanted % per_job:
            raise CannotResize(f"{wanted} hosts are no whole number of Jobs of {per_job}")
        replicated["replicas"] = wanted // per_job
        return
    if spec.get("completions", per_job) != per_job:
        raise CannotResize(f"{replicated['name']} has {spec['completions']} completions for {per_job} pods")
    spec["parallelism"] = wanted
    if "completions" in spec:
        spec["completions"] = wanted


def _rules(
    size: Size, replicas: int, wanted: int
) -> tuple[tuple[tuple[str, ...], tuple[str, ...], int, int], ...]:
    """Variables, flags, the number that they hold now, and the one that they are to hold."""
    return (
        (_HOSTS, _HOST_FLAGS, size.hosts, wanted),
        (_REPLICAS, _REPLICA_FLAGS, size.replicas, replicas),
    )


def _new_number(name: str, text: str, old: int, new: int, left: list[str]) -> str:
    if not text.isdecimal() or int(text) == new:
        return text
    if int(text) != old:
        left.append(f"{name} is {text}, not {old}")
        return text
    return str(new)


def _new_ranks(name: str, text: str, size: Size, wanted: int, left: list[str]) -> str:
    """Ranks are hosts times a number of each host's own."""
    if not text.isdecimal():
        return text
    if int(text) % size.hosts:
        left.append(f"{name} is {text}, no multiple of {size.hosts} hosts")
        return text
    return str(int(text) // size.hosts * wanted)


def _set_variables(container: Object, size: Size, replicas: int, wanted: int, left: list[str]) -> None:
    for variable in container.get("env") or ():
        name, text = variable["name"], variable.get("value")
        if not isinstance(text, str):
            continue
        for names, _, old, new in _rules(size, replicas, wanted):
            if name in names:
                variable["value"] = _new_number(name, text, old, new, left)
        if name in _RANKS:
            variable["value"] = _new_ranks(name, text, size, wanted, left)


def _new_words(words: list[str], size: Size, replicas: int, wanted: int, left: list[str]) -> list[str]:
    """Flags as ``--nnodes=4``, ``--nnodes 4`` in one word of a shell, or as two words."""
    joined = "\0".join(words)
    for _, flags, old, new in _rules(size, replicas, wanted):
        for flag in flags:
            joined = _with_number(flag).sub(
                lambda found, f=flag, o=old, n=new: found[1] + _new_number(f"--{f}", found[2], o, n, left),  # type: ignore[misc]
                joined,
            )
    for flag in _RANK_FLAGS:
        joined = _with_number(flag).sub(
            lambda found, f=flag: found[1] + _new_ranks(f"--{f}", found[2], size, wanted, left),  # type: ignore[misc]
            joined,
        )
    return joined.split("\0")


def _flag(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w-])--{name.replace('-', '[-_]')}(?![\w-])")


def _with_number(name: str) -> re.Pattern[str]:
    return re.compile(rf"((?<![\w-])--{name.replace('-', '[-_]')}[=\s\0]+)(\d+)(?![\w:.])")


def _number(replicated: Object, names: tuple[str, ...], flags: tuple[str, ...]) -> int:
    """What variables or flags of its containers say; 0 where none does."""
    spec = pod_template(replicated)["spec"]
    for container in spec.get("containers") or ():
        for variable in container.get("env") or ():
            text = variable.get("value") or ""
            if variable["name"] in names and text.isdecimal() and int(text):
                return int(text)
    joined = "\0".join(words_of(replicated))
    for flag in flags:
        found = _with_number(flag).search(joined)
        if found:
            return int(found[2])
    return 0
