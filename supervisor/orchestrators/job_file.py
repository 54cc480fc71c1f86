# SPDX-License-Identifier: Apache-2.0
"""The job file of the orchestrators local and ray: which hosts there are, and how a job is started on one.

    {"hosts": ["a", "b", "c"],
     "workers_per_host": 1,
     "jobs": [{"workload": "demo", "replicas": 2,
               "command": ["{python}", "launcher.py", "--use-supervisor", "--host-daemon-port={daemon_port}",
                           "--nnodes={nnodes}", "--max-restarts=3", "--max-workload-restarts=3",
                           "--rdzv-id=demo-{generation}", "...", "train.py"]}]}

A command and its environment may hold ``{python}``, ``{host}``, ``{node_rank}``, ``{nnodes}``,
``{replicas}``, ``{generation}`` (starts of the whole job so far), ``{daemon_port}``, ``{address}`` (of the
host) and ``{state_dir}``; other braces stay.  ``"daemon_flags": ["--watchdogs=xid,ecc"]`` are more flags of
the daemon of each host, with ``{host}`` and ``{state_dir}``.  With Ray, ``"resources": {"GPU": 8}`` is what a
host needs of a node.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from resiliency.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class LocalJob:
    """How one job is started.

    Attributes:
        waiting: launchers beyond the size, where there are hosts for them: they wait for a place, and take
            one as soon as a host is lost.
        grace_s: between SIGTERM and SIGKILL when its launchers are stopped.
    """

    workload: str
    command: tuple[str, ...]
    replicas: int = 1
    nodes_per_replica: int = 1
    waiting: int = 0
    environment: Mapping[str, str]
    grace_s: float = 10.0

    def hosts(self, replicas: int) -> int:
        """That train, with so many replicas."""
        return replicas * self.nodes_per_replica


@dataclass(frozen=True, kw_only=True)
class JobFile:
    """Hosts in their order: the first ones get the jobs, the others are spares.

    Attributes:
        first_port: hosts' daemons listen from here on, two ports each.
        daemon_flags: of each host's daemon, beside those that it needs.
        resources: what a host needs of a node, in Ray's words; empty with other orchestrators.
    """

    hosts: tuple[str, ...]
    jobs: tuple[LocalJob, ...]
    workers_per_host: int = 1
    first_port: int = 61000
    resources: Mapping[str, float] = field(default_factory=dict)
    daemon_flags: tuple[str, ...] = ()

    def launcher_port(self, host: str) -> int:
        return self.first_port + 2 * self.hosts.index(host)

    def probe_port(self, host: str) -> int:
        return self.launcher_port(host) + 1


def read_job_file(path: Path) -> JobFile:
    """The file at `path`, checked.

    Raises:
        ConfigError: it cannot be read, or which field cannot work, and why.
    """
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--job-file: {path} cannot be read: {error}.", flag="--job-file") from error

    def refuse(field: str, why: str) -> ConfigError:
        return ConfigError(f"--job-file: {path}: {field} {why}.", flag="--job-file", field=field)

    known = {"hosts", "jobs", "workers_per_host", "first_port", "resources", "daemon_flags"}
    fields = _fields(data, "the file", known, refuse)
    hosts = fields.get("hosts")
    if not isinstance(hosts, list) or not hosts or len(set(map(str, hosts))) < len(hosts):
        raise refuse("hosts", "must be a list of different names")
    for host in hosts:
        if not isinstance(host, str) or not _NAME.fullmatch(host):
            raise refuse("hosts", f"must be names of letters, digits, dots and dashes, found {host!r:.40}")
    jobs = fields.get("jobs")
    if not isinstance(jobs, list) or not jobs:
        raise refuse("jobs", "must be a list of at least one job")
    file = JobFile(
        hosts=tuple(hosts),
        jobs=tuple(_job(job, number, refuse) for number, job in enumerate(jobs)),
        workers_per_host=_whole(fields, "workers_per_host", 1, 1, 1024, refuse),
        first_port=_whole(fields, "first_port", 61000, 1024, 65535 - 2 * len(hosts), refuse),
        resources=_resources(fields.get("resources", {}), refuse),
        daemon_flags=_words(fields.get("daemon_flags", []), "daemon_flags", refuse),
    )
    names = [job.workload for job in file.jobs]
    if len(set(names)) < len(names):
        raise refuse("jobs", f"name a workload twice, found {names}")
    needed = sum(job.hosts(job.replicas) for job in file.jobs)
    if needed > len(hosts):
        raise refuse("hosts", f"are {len(hosts)}, and the jobs need {needed}")
    return file


def _resources(data: Any, refuse: Any) -> dict[str, float]:
    good = isinstance(data, dict) and all(
        isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1e6
        for value in data.values()
    )
    if not good:
        raise refuse("resources", f"must be a table of numbers above 0, found {data!r:.80}")
    return {name: float(value) for name, value in data.items()}


def _job(data: Any, number: int, refuse: Any) -> LocalJob:
    where = f"jobs[{number}]"
    known = {"workload", "command", "replicas", "nodes_per_replica", "waiting", "environment", "grace_s"}
    fields = _fields(data, where, known, refuse)
    workload, command = fields.get("workload"), fields.get("command")
    environment, grace_s = fields.get("environment", {}), fields.get("grace_s", LocalJob.grace_s)
    if not isinstance(workload, str) or not _NAME.fullmatch(workload):
        raise refuse(f"{where}.workload", f"must be a name, found {workload!r:.40}")
    if not (command := _words(command, f"{where}.command", refuse)):
        raise refuse(f"{where}.command", "must not be empty")
    if not isinstance(environment, dict) or not all(isinstance(text, str) for text in environment.values()):
        raise refuse(f"{where}.environment", "must be a table of texts")
    waiting = _whole(fields, "waiting", 0, 0, 10_000, refuse)
    if waiting and any("{node_rank}" in text for text in (*command, *environment.values())):
        raise refuse(
            f"{where}.waiting",
            "needs a command and an environment without {node_rank}: hosts get ranks as they meet",
        )
    if not isinstance(grace_s, (int, float)) or isinstance(grace_s, bool) or not 0 <= grace_s <= 3600:
        raise refuse(f"{where}.grace_s", f"must be 0 to 3600 seconds, found {grace_s!r:.40}")
    return LocalJob(
        workload=workload,
        command=command,
        replicas=_whole(fields, "replicas", 1, 1, 10_000, refuse),
        nodes_per_replica=_whole(fields, "nodes_per_replica", 1, 1, 10_000, refuse),
        waiting=waiting,
        environment=environment,
        grace_s=float(grace_s),
    )


def _words(data: Any, where: str, refuse: Any) -> tuple[str, ...]:
    if not isinstance(data, list) or not all(isinstance(word, str) for word in data):
        raise refuse(where, "must be a list of words")
    return tuple(data)


def _fields(data: Any, where: str, known: set[str], refuse: Any) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise refuse(where, f"must be a table of fields, found {data!r:.40}")
    for name in data:
        if name not in known:
            raise refuse(where, f"has no field {name[:40]!r}; it may have {', '.join(sorted(known))}")
    return data


def _whole(fields: dict[str, Any], name: str, default: int, least: int, most: int, refuse: Any) -> int:
    value = fields.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise refuse(name, f"must be a whole number from {least} to {most}, found {value!r:.40}")
    return value
