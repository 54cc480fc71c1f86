# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/gke-walkthrough.md, typed as they are printed, over a cluster on this machine.

kubectl, helm, the chart and all parts of the supervisor are the real ones, each machine has a network of its
own, and pods are processes.  What trains is played where it needs GPUs.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.supervisor_pages.shell import ENTER, Shell, can_be_apart, commands, open_shell, section
from tests.supervisor_plane.plane import PATIENCE_S, ROOT
from tests.tools import kept
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_be_apart(), reason="needs the right to make network namespaces"),
]

PAGE = (ROOT / "docs" / "gke-walkthrough.md").read_text()
#: What is not typed, by its first words, and why.
ELSEWHERE = {
    "gcloud container": "makes machines of Google Cloud; the test has them",
    "docker": "builds and pushes images, for which the test has no registry; tests/deploy builds what it can",
    "kubectl apply --server-side": "fetches JobSet from the internet; the cluster has it",
    "kubectl -n fleet port-forward": "the pod's port is this machine's own: the next command reaches it",
}
#: Deletes a machine of the cluster as the real one does.
GCLOUD = """#!/bin/sh
[ "$1 $2 $3 $#" = "compute instances delete 6" ] && exec curl -sf "$(cat $WALK/url)/machines/$4/deletion"
exit 2
"""


class Walk:
    """A reader of the page."""

    def __init__(self, shell: Shell) -> None:
        self.shell = shell

    def type(self, command: str) -> str:
        assert not is_elsewhere(command)
        return self.shell.type(command)

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.shell.type("curl -s http://127.0.0.1:60064/status.json"))
        return found

    def wait_for(self, look: Callable[[dict[str, Any]], object], otherwise: str) -> dict[str, Any]:
        seen: list[dict[str, Any]] = []

        def accepted() -> bool:
            code, text = self.shell.try_to_type("curl -s http://127.0.0.1:60064/status.json")
            seen[:] = [json.loads(text)] if not code else []
            return bool(seen and look(seen[0]))

        try:
            wait_until(accepted, otherwise, timeout=PATIENCE_S, every=0.1)
        except AssertionError as error:
            raise AssertionError(f"{error}; seen: {seen}") from error
        return seen[0]

    def pods(self, selector: str = "app=nemo") -> dict[str, str]:
        """Pods of the job that run, and their nodes."""
        text = self.shell.type(f"kubectl -n training get pods -l {selector} -o json")
        return {
            one["metadata"]["name"]: one["spec"].get("nodeName", "")
            for one in json.loads(text)["items"]
            if one["status"]["phase"] == "Running" and "deletionTimestamp" not in one["metadata"]
        }


def is_elsewhere(command: str) -> bool:
    return command.startswith(tuple(ELSEWHERE))


@contextmanager
def walking(folder: Path, pools: str, *flags: str) -> Iterator[Walk]:
    programs = folder / "programs"
    programs.mkdir()
    for name in ("kubectl", "helm"):
        (programs / name).symlink_to(kept(name))
    (programs / "gcloud").write_text(GCLOUD)
    (programs / "gcloud").chmod(0o755)
    (folder / "hosts").write_text("127.0.0.1 localhost\n")
    env = {
        "HOME": str(folder),
        "KUBECONFIG": str(folder / "config"),
        "WALK": str(folder),
        "PATH": f"{programs}:{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
        "PYTHONPATH": str(ROOT),
    }
    enter = f"{ENTER} && mount --bind {folder / 'hosts'} /etc/hosts"
    with open_shell(folder, enter=enter, env=env) as shell:
        program = f"python -m tests.supervisor_pages.cluster_program {folder} {pools} {' '.join(flags)}"
        shell.type(f"cd {ROOT}; {program} > {folder / 'cluster.txt'} 2>&1 & cd {folder}")
        wait_until((folder / "config").exists, "no cluster")
        yield Walk(shell)
    assert "Traceback" not in (log := (folder / "cluster.txt").read_text()), log


def _jobs(seen: dict[str, Any], name: str) -> dict[str, Any]:
    return next((one for one in seen["jobs"] if one["workload"] == name), {})


def test_the_page_installs_the_supervisor_on_an_empty_cluster(tmp_path: Path) -> None:
    with walking(tmp_path, "gpus") as walk:
        _install(walk)


@pytest.mark.thorough("half a minute; test_plane.py loses a node, and the test above installs")
def test_the_page_leads_from_an_empty_cluster_to_a_killed_node_and_away_again(tmp_path: Path) -> None:
    assert all(map(is_elsewhere, commands(section(PAGE, "## 1. Cluster and images"))))
    with walking(tmp_path, "gpus") as walk:
        _install(walk)
        job = _begin(walk)
        _lose_what_nobody_needs(walk)
        lost = _kill_a_node(walk, job)
        _bad_day(walk, lost)
        _upgrade_and_uninstall(walk)


def _install(walk: Walk) -> None:
    storage, *fleet, install, get, forward, look, upgrade = commands(section(PAGE, "## 2. Supervisor"))
    for command in (storage, *fleet, install):
        walk.type(command)
    wait_until(
        lambda: len(walk.type(get).splitlines()) == 10, "not four Deployments and five daemons", timeout=60
    )
    components = [name.rsplit("-", 2)[0].rpartition("-")[2] for name in walk.type(get).splitlines()[1:]]
    assert sorted(components) == ["actuator", "controller", *["daemon"] * 5, "sensor", "store"]
    assert is_elsewhere(forward)
    walk.wait_for(lambda seen: len(seen["hosts"]) == 5, "five hosts do not register")
    assert 'resiliency_supervisor_hosts{state="spare"} 5' in walk.type(look)
    assert walk.status()["shadow"]
    walk.type(upgrade)
    walk.wait_for(lambda seen: not seen["shadow"] and len(seen["hosts"]) == 5, "the upgrade is not seen")


def _begin(walk: Walk) -> dict[str, str]:
    """Start the job; returns its pods."""
    spares, job, follow = commands(section(PAGE, "## 3. A job"))
    walk.type(spares)
    walk.type(job)
    walk.shell.follow(follow, r"^\[pod/nemo-workers-0-0-\w+/trainer\] .*step 20$")
    seen = walk.wait_for(lambda seen: len(_jobs(seen, "nemo").get("hosts", ())) == 4, "no job of four hosts")
    assert sum(host["state"] == "spare" for host in seen["hosts"]) == 1
    pods = walk.pods()
    (look,) = re.findall(r"`(kubectl [^`]* POD -- ls [^`]*)`", PAGE)
    assert "step-20" in walk.type(look.replace("POD", next(iter(pods))))
    (events,) = re.findall(r"`(/persistent/runs/nemo-events\.jsonl)`", PAGE)
    assert "checkpoint_saved" in walk.type(f"kubectl -n training exec {next(iter(pods))} -- cat {events}")
    return pods


def _lose_what_nobody_needs(walk: Walk) -> None:
    pods, history = walk.pods(), walk.status()["epoch"]
    store, supervisor = re.findall(r"`(kubectl -n fleet delete pod [^`]*)`", PAGE)
    walk.type(store)
    walk.type(supervisor)
    seen = walk.wait_for(
        lambda seen: (
            len(_jobs(seen, "nemo").get("hosts", ())) == 4
            and all(host["connected"] for host in seen["hosts"])
        ),
        "the page is not back",
    )
    assert seen["epoch"] > history
    assert not any(one["kind"] != "cordon" for one in seen["commands"])
    assert walk.pods() == pods


def _kill_a_node(walk: Walk, before: dict[str, str]) -> str:
    choose, kill, get, history = commands(section(PAGE, "## 4. A killed node"))
    walk.type(choose)
    node = walk.type("echo $node").strip()
    walk.type(kill)
    seen = walk.wait_for(
        lambda seen: any(one["kind"] == "hot_swap" and one["outcome"] for one in seen["commands"]), "no swap"
    )
    (swap,) = [one for one in seen["commands"] if one["kind"] == "hot_swap"]
    assert swap["outcome"] == "done"
    assert swap["text"].startswith("moved to ")
    walk.wait_for(lambda seen: not _jobs(seen, "nemo")["incident"], "the incident does not close")
    after = walk.pods()
    assert len(walk.type(get).splitlines()) == 1 + 4
    assert len(before.keys() & after.keys()) == 3
    assert node not in after.values()
    text = walk.type(history)
    assert "hot_swap" in text
    (logs,) = re.findall(r"`(kubectl -n fleet logs [^`]*)`", PAGE)
    assert re.search(rf"incident i1@\S+ opened: (host_hb|orchestrator) of {node}", walk.type(logs))
    # The cloud makes another node, which is the spare.
    walk.shell.type(f"curl -sf $(cat $WALK/url)/machines/{node}/creation")
    walk.wait_for(
        lambda seen: any(_is_spare(host) and host["name"] == node for host in seen["hosts"]), "no spare"
    )
    return node


def _is_spare(host: dict[str, Any]) -> bool:
    return host["state"] == "spare" and not host["cordoned"]


def _bad_day(walk: Walk, node: str) -> None:
    inject, follow, uncordon, ledger = commands(section(PAGE, "## 5. A bad day, and what it cost"))
    walk.type(inject)
    walk.shell.follow(follow, "injects kill")
    assert sorted(walk.pods("app=inject-faults").values()) == sorted(walk.pods().values())
    walk.type(uncordon.replace("NODE", node))
    assert "goodput_measure.calculator" in ledger  # of a real training: see below


def _upgrade_and_uninstall(walk: Walk) -> None:
    upgrade, uninstall = commands(section(PAGE, "## 6. Upgrade, and away with it"))
    pods = walk.pods()
    walk.type(upgrade)
    walk.type(uninstall)
    assert walk.pods() == pods
    left = walk.shell.type(
        "kubectl -n fleet get deployments,daemonsets,persistentvolumeclaims -o name"
    ).split()
    assert left == ["persistentvolumeclaim/rs-resiliency-supervisor-event-log"]


@pytest.mark.thorough("the page's other journey; launchers and training are real, as in test_end_to_end.py")
def test_the_page_trains_without_gpus_and_loses_a_node(tmp_path: Path) -> None:
    made, jobset, *install, job, look, choose, kill, get, history = commands(
        section(PAGE, "## The same without GPUs")
    )
    ledger = commands(section(PAGE, "## 5. A bad day, and what it cost"))[-1]
    assert is_elsewhere(made)
    assert is_elsewhere(jobset)
    with walking(tmp_path, "cpus", "--real") as walk:
        for command in install:
            walk.type(command)
        walk.wait_for(lambda seen: len(seen["hosts"]) == 4, "four hosts do not register")
        walk.type(job)
        walk.wait_for(lambda seen: (_jobs(seen, "ddp").get("step") or 0) > 40, "it does not train")
        (survivor, lost) = sorted(walk.pods("app=ddp"))
        assert "step" in walk.type(look.replace("POD", survivor))

        walk.type(choose)
        node = walk.type("echo $node").strip()
        assert node == walk.pods("app=ddp")[lost]
        walk.type(kill)
        walk.wait_for(
            lambda seen: any(one["kind"] == "hot_swap" and one["outcome"] for one in seen["commands"]),
            "no swap",
        )
        walk.wait_for(lambda seen: not _jobs(seen, "ddp")["incident"], "the incident does not close")
        assert survivor in walk.type(get)
        assert lost not in walk.type(get)
        assert "hot_swap" in walk.type(history)
        steps = re.findall(r"starts after step (\d+)", walk.type(f"kubectl -n training logs {survivor}"))
        assert int(steps[-1]) > 0
        text = walk.type(ledger.replace("POD", survivor).replace("nemo", "ddp"))
        assert "goodput" in text.lower()
