# SPDX-License-Identifier: Apache-2.0
"""Kubelets whose pods are processes of this machine, beside the host daemon of their node."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from supervisor.orchestrators.processes import (
    Mark,
    Marked,
    has_ended,
    kill_all,
    marked_processes,
    signal_roots,
    start_process,
)
from supervisor.testing.kubernetes.hosts import Kubelet
from supervisor.testing.kubernetes.kinds import Object
from tests.supervisor_plane.plane import ROOT

#: How often the end of a pod is looked at.
_LOOK_S = 0.05


@dataclass(kw_only=True)
class ProcessKubelet(Kubelet):
    """One node.

    Attributes:
        directory: of all nodes; it marks their processes.
        node: its name.
        environment: of its daemon and its containers, which may refer to it.
        port: its daemon listens there, and for launchers at the next one.
        flags: of its daemon.
        is_stuck: no pod of it can be ended.
    """

    directory: Path
    node: str
    environment: Mapping[str, str]
    port: int
    flags: tuple[str, ...] = ()
    is_stuck: bool = False
    _children: list[int] = field(default_factory=list)
    _pids: dict[str, int] = field(default_factory=dict)
    _codes: dict[str, int] = field(default_factory=dict)

    def start_daemon(self) -> None:
        argv = [
            *(sys.executable, str(ROOT / "supervisor" / "host_daemon.py"), "--plaintext"),
            *(f"--port={self.port}", f"--launcher_port={self.port + 1}", "--workers_per_host=1"),
            *(f"--state_dir={self.directory / 'daemons' / self.node}", "--address=127.0.0.1"),
            *self.flags,
        ]
        self._start("daemon", argv, {"NODE_NAME": self.node})

    def processes(self, part: str = "") -> list[Marked]:
        fleet = str(self.directory)
        found = [one for one in marked_processes(fleet) if one.mark.host == self.node]
        return [one for one in found if part in ("", one.mark.part)]

    def log_of(self, part: str) -> str:
        path = self.directory / "logs" / f"{self.node}-{part}.log"
        return path.read_text() if path.exists() else ""

    def start_pod(self, pod: Object) -> None:
        (container,) = pod["spec"]["containers"]
        # A kubelet tells each container where the API server is.
        environment = {"PET_HOST_DAEMON_PORT": str(self.port + 1), "KUBERNETES_SERVICE_HOST": "127.0.0.1"}
        for variable in container.get("env") or ():
            text = variable.get("value")
            if text is None:
                text = _field(pod, variable["valueFrom"]["fieldRef"]["fieldPath"])
            environment[variable["name"]] = _expand(text, {**self.environment, **environment})
        argv = [
            _expand(word, {**self.environment, **environment})
            for word in (*container["command"], *container.get("args", ()))
        ]
        self._pids[pod["metadata"]["uid"]] = self._start("pod", argv, environment, pod["metadata"]["uid"])

    def _start(self, part: str, argv: list[str], environment: Mapping[str, str], start: str = "") -> int:
        mark = Mark(fleet=str(self.directory), host=self.node, part=part, start=start)
        log = self.directory / "logs" / f"{self.node}-{part}.log"
        child = start_process(
            argv, mark=mark, environment={**os.environ, **self.environment, **environment}, log=log
        )
        self._children.append(child)
        return child

    def exit_code(self, pod: Object) -> int | None:
        uid = pod["metadata"]["uid"]
        if uid not in self._pids:
            return None  # its image was not pulled yet
        if uid not in self._codes:
            pid, status = os.waitpid(self._pids[uid], os.WNOHANG)
            if not pid:
                return None
            self._codes[uid] = os.waitstatus_to_exitcode(status) % 256
        return self._codes[uid]

    def end_pod(self, pod: Object, now: float) -> float | None:
        meta = pod["metadata"]
        if meta["uid"] not in self._pids:
            return None
        self.exit_code(pod)
        left = [one for one in self.processes("pod") if one.mark.start == meta["uid"]]
        if not left:
            return None
        if self.is_stuck:
            return now + _LOOK_S
        if meta["uid"] not in self.ending_at:
            self.ending_at[meta["uid"]] = now + meta.get("deletionGracePeriodSeconds", 0)
            signal_roots(left, signal.SIGTERM)
        elif now >= self.ending_at[meta["uid"]]:
            kill_all(left)
        return now + _LOOK_S

    def kill(self) -> None:
        """End all that runs here, and wait for it.  The cluster must not ask for its pods any more."""
        # A child that has just begun has no mark to be found by yet.
        end, children = time.monotonic() + 60.0, list(self._children)
        while (left := self.processes()) or children:
            assert time.monotonic() < end, f"processes of {self.node} do not end: {left}"
            kill_all(left)
            children = [child for child in children if not has_ended(child)]
            time.sleep(_LOOK_S)


def _field(pod: Object, path: str) -> str:
    """As the downward API has it: a label or an annotation that is not there is empty."""
    keyed = re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path)
    if keyed:
        return str((pod["metadata"].get(keyed[1]) or {}).get(keyed[2], ""))
    value: object = {**pod, "status": {**pod["status"], "hostIP": "127.0.0.1", "podIP": "127.0.0.1"}}
    for name in path.split("."):
        assert isinstance(value, dict)
        value = value[name]
    return str(value)


def _expand(text: str, variables: Mapping[str, str]) -> str:
    """``$(NAME)`` as Kubernetes replaces it: what is not defined stays."""
    return re.sub(r"\$\((\w+)\)", lambda found: variables.get(found[1], found[0]), text)
