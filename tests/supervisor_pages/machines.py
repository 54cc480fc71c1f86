# SPDX-License-Identifier: Apache-2.0
"""Machines of the cluster: each has a network of its own, a boot id, and runs its pods as processes."""

from __future__ import annotations

import asyncio
import base64
import os
import subprocess
import sys
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from resiliency.testing import warm
from supervisor.orchestrators.processes import MARK_ENV, Mark
from supervisor.testing.kubernetes.kinds import Object
from supervisor.testing.kubernetes.store import Store
from tests.supervisor_kubernetes.fleet import kubeconfig
from tests.supervisor_kubernetes.pods import ProcessKubelet, _expand, _field
from tests.supervisor_plane.plane import ROOT

#: Of the bridge that all machines are on.  Pods without the network of their node have the first address.
NETWORK, FIRST = "10.128.0", 1


#: What is played, by the ends of its words.
PLAYED = ("launcher.py", "rendezvous_store", "simulator", "sleep")


def run(*commands: str) -> None:
    for command in commands:
        subprocess.run(command.split(), check=True)


def make_bridge() -> None:
    run("mount -t tmpfs tmpfs /run", "ip link set lo up", "ip link add machines type bridge")
    run(f"ip addr add {NETWORK}.{FIRST}/24 dev machines", "ip link set machines up")


@dataclass(kw_only=True)
class Machine(ProcessKubelet):
    """A node.

    Attributes:
        number: makes its address.
        store: where a pod's variables and certificates are.
        url: of the API server.
        plays: workloads are played by `tests.supervisor_pages.played`; False starts the real programs.
    """

    number: int
    store: Store
    url: str
    plays: bool = True
    environment: dict[str, str] = field(default_factory=dict)
    port: int = 0
    _programs: dict[str, warm.Process] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.boot = str(uuid.uuid4())
        self.address = f"{NETWORK}.{self.number}"
        self._own = self.directory / "machines" / f"{self.node}-{self.boot[:8]}"
        self._own.mkdir(parents=True)
        (self._own / "boot").write_text(self.boot + "\n")
        name = f"m{self.number}"
        run(
            f"ip netns add {name}",
            f"ip link add {name} type veth peer name eth0 netns {name}",
            f"ip link set {name} master machines up",
            f"ip -n {name} addr add {self.address}/24 dev eth0",
            f"ip -n {name} link set eth0 up",
            f"ip -n {name} link set lo up",
        )
        self._scene_of = (name, self.node, str(self._own / "boot"))

    def vanish(self) -> None:
        """The machine is deleted with all that runs there."""
        self.kill()
        run(f"ip netns delete m{self.number}")

    def log_path(self, pod: Object) -> Path:
        return self.directory / "logs" / f"{pod['metadata']['name']}.log"

    def start_pod(self, pod: Object) -> None:
        (container,) = pod["spec"]["containers"]
        environment, places = self._scene(pod, container)
        words = [
            _placed(_expand(word, environment), places)
            for word in (*container["command"], *container.get("args", ()))
        ]
        if self.plays and any(word.endswith(PLAYED) for word in words[:3]):
            words = ["python3", "-m", "tests.supervisor_pages.played", *words]
        uid = pod["metadata"]["uid"]
        mark = Mark(fleet=str(self.directory), host=self.node, part="pod", start=uid)
        self.log_path(pod).parent.mkdir(exist_ok=True)
        with self.log_path(pod).open("ab") as log:
            self._programs[uid] = warm.start(
                self._argv(pod, words),
                env={**environment, MARK_ENV: mark.to_text()},
                stdin=subprocess.DEVNULL,
                stdout=log.fileno(),
                stderr=log.fileno(),
            )

    def exit_code(self, pod: Object) -> int | None:
        uid = pod["metadata"]["uid"]
        if uid not in self._programs:
            self.start_pod(pod)  # it was bound to a machine of this name before
        code = self._programs[uid].poll()
        return None if code is None else code % 256

    def end_pod(self, pod: Object, now: float) -> float | None:
        uid = pod["metadata"]["uid"]
        self._pids[uid] = self._programs[uid].pid if uid in self._programs else 0
        return super().end_pod(pod, now) if uid in self._programs else None

    def _argv(self, pod: Object, words: list[str]) -> list[str]:
        """A Python program in its node's network, or where services lead to; others only there."""
        scene = self._scene_of if pod["spec"].get("hostNetwork") else ("", "", "")
        if words[0] != "python3":
            return words
        return [sys.executable, "-m", "tests.supervisor_pages.enter", *scene, *words[1:]]

    async def execute(self, pod: Object, words: list[str]) -> tuple[int, bytes, bytes]:
        (container,) = pod["spec"]["containers"]
        environment, places = self._scene(pod, container)
        program = await asyncio.create_subprocess_exec(
            *self._argv(pod, [_placed(word, places) for word in words]),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        out, err = await program.communicate()
        return program.returncode or 0, out, err

    def _scene(self, pod: Object, container: Object) -> tuple[dict[str, str], dict[str, str]]:
        """Variables of a container, and where the paths of its volumes are on this machine."""
        place, meta = pod["metadata"]["namespace"], pod["metadata"]
        volumes = {one["name"]: one for one in pod["spec"].get("volumes") or ()}
        places = {"/opt/resiliency": str(ROOT)}
        for mount in container.get("volumeMounts") or ():
            volume = volumes[mount["name"]]
            if mount["mountPath"] in ("/dev/shm", "/tmp"):  # noqa: S108 - the pod's own, and this machine's
                continue
            if "persistentVolumeClaim" in volume:
                path = self.directory / "volumes" / place / volume["persistentVolumeClaim"]["claimName"]
            elif "hostPath" in volume:
                path = self._own / volume["hostPath"]["path"].strip("/").replace("/", "-")
            else:
                path = self._own / meta["uid"] / mount["name"]
            if (volume.get("hostPath") or {}).get("type") == "CharDevice":
                path.touch()
            else:
                path.mkdir(parents=True, exist_ok=True)
            for name, text in self._secret(place, volume).items():
                (path / name).write_bytes(base64.b64decode(text))
            places[mount["mountPath"]] = str(path)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        if pod["spec"].get("automountServiceAccountToken"):
            user = f"{place}:{pod['spec']['serviceAccountName']}"
            environment["KUBECONFIG"] = str(kubeconfig(self._own / f"{meta['uid']}.json", self.url, user))
        for source in container.get("envFrom") or ():
            environment |= self.store.get("configmaps", source["configMapRef"]["name"], place)["data"]
        if "batch.kubernetes.io/job-completion-index" in (meta.get("labels") or {}):
            environment["JOB_COMPLETION_INDEX"] = meta["labels"]["batch.kubernetes.io/job-completion-index"]
        for variable in container.get("env") or ():
            text = variable.get("value")
            if text is None:
                path_of = variable["valueFrom"]["fieldRef"]["fieldPath"]
                text = _field(pod, path_of)
                if path_of in ("status.hostIP", "status.podIP"):
                    text = self.address if pod["spec"].get("hostNetwork") else f"{NETWORK}.{FIRST}"
            environment[variable["name"]] = _placed(_expand(text, environment), places)
        return environment, places

    def _secret(self, namespace: str, volume: Object) -> dict[str, str]:
        if "secret" not in volume:
            return {}
        data: dict[str, str] = self.store.get("secrets", volume["secret"]["secretName"], namespace)["data"]
        return data


def _placed(word: str, places: dict[str, str]) -> str:
    """A word of a command line with its paths of a container where they are on this machine."""
    before, equals, after = word.rpartition("=")
    for there, here in places.items():
        if after == there or after.startswith(there + "/"):
            return f"{before}{equals}{here}{after[len(there) :]}"
    return word
